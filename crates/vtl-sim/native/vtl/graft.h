/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * What takes the place of bpf/include/vtl/graft.h when a composition is compiled for this machine:
 * the same engine around it, and drivers that work on frames in memory. build.rs compiles each
 * graft on its own, with VTL_NATIVE_OPS as the name of its entry in the table of grafts.
 */
#ifndef VTL_GRAFT_H
#define VTL_GRAFT_H

#include <string.h>

#include "env_native.h"
#include "ops.h"
#include "vtl/engine.h"
#include "vtl/parse.h"

static int header_offset(const struct vtl_session *s) {
    return s->ip_version == 4 ? (int)VTL_OFFSET_V4 : (int)VTL_OFFSET_V6;
}

static __u32 make(struct vtl_session *s, __u64 now, __u8 *frame) {
    struct vtl_out o = {.s = s, .now = now};
    if (vtl_make(&o) != VTL_SEND)
        return 0;
    int offset = header_offset(s);
    __u32 bytes = vtl_padded(&o);
    __u32 length = offset + o.header_len + bytes;
    __u8 *body = frame + offset + sizeof(struct vtl_data_hdr);
    if (o.type == VTL_DATA)
        o.sum = vtl_move(body, o.slot->data, 1, frame + length, o.len);
    vtl_seal(&o);
    vtl_write_headers(frame, s, offset, o.header_len + bytes, 0);
    memcpy(frame + offset, &o.hdr, o.header_len);
    return length;
}

static __u32 data_arrives(struct vtl_session *s, const __u8 *frame, __u32 length, int offset,
                          __u8 *answer, __u32 room) {
    struct vtl_data_hdr hdr;
    if (offset + sizeof(hdr) > length || !VTL_TRY_LOCK(s->rx.lock))
        return 0;
    memcpy(&hdr, frame + offset, sizeof(hdr));
    struct vtl_in in = {.s = s, .hdr = &hdr, .marked = vtl_is_marked(frame, offset)};
    enum vtl_verdict v = vtl_in_start(&in, length - offset - sizeof(hdr));
    if (v == VTL_NEXT) {
        if (in.slot)
            in.sum =
                vtl_move(in.slot->data, frame + offset + sizeof(hdr), 0, frame + length, in.len);
        v = graft_ingress(&in);
    }
    __u32 bytes = 0;
    if (v == VTL_SEND && room >= offset + sizeof(struct vtl_ack_hdr)) {
        struct vtl_ack_hdr ack;
        __u32 max = (room - offset - sizeof(ack)) / 8;
        __u32 words = vtl_ack_words(s) < max ? vtl_ack_words(s) : max;
        vtl_ack_build(s, &ack, host->scratch.map, words, 0);
        memcpy(answer, frame, offset);
        vtl_turn_round(answer, offset, sizeof(ack) + words * 8, 0);
        memcpy(answer + offset, &ack, sizeof(ack));
        memcpy(answer + offset + sizeof(ack), host->scratch.map, words * 8);
        vtl_env_count(VTL_ST_TX_ACKS);
        bytes = offset + sizeof(ack) + words * 8;
    }
    VTL_UNLOCK(s->rx.lock);
    return bytes;
}

static void ack_arrives(struct vtl_session *s, __u64 now, const __u8 *frame, __u32 length,
                        int offset) {
    struct vtl_ack_hdr hdr;
    if (offset + sizeof(hdr) > length)
        return;
    memcpy(&hdr, frame + offset, sizeof(hdr));
    int words = vtl_ack_length(&hdr, length - offset - sizeof(hdr));
    if (words < 0)
        return;
    memcpy(host->scratch.map, frame + offset + sizeof(hdr), words * 8);
    vtl_listen(s, now, &hdr, host->scratch.map, words);
}

extern const struct vtl_graft_info vtl_description; /* by VTL_GRAFT */

const struct vtl_native_ops VTL_NATIVE_OPS = {
    .info = &vtl_description, .make = make, .data = data_arrives, .ack = ack_arrives};

#endif
