/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: forward error correction by XOR parity. A parity packet, the XOR of the payloads,
 * follows every `group` new packets, or fewer when the application has no more; a receiver that
 * misses one of them recovers it from the others. So one loss in a group costs no round trip.
 *
 * A parity packet is DATA with VTL_F_PARITY: `seq` is the first of its group, `aux` their number,
 * `ts` the XOR of their lengths. It has no sequence number of its own and is not acknowledged.
 */
#ifndef VTL_TF_FEC_H
#define VTL_TF_FEC_H

#include "number.h"
#include "receive.h"
#include "retransmit.h"

enum { VTL_FEC_MAX = 32 };

/* Written by egress. */
struct vtl_fec {
    __u64 group; /* first packet without parity yet */
};

/* XORs the first `bytes` of `from` into `to`. */
VTL_GLOBAL int vtl_fec_mix(struct vtl_slot *to, struct vtl_slot *from, __u32 bytes) {
    int i;
    if (!to || !from || bytes > VTL_MAX_PAYLOAD)
        return 0;
    vtl_for(i, 0, VTL_MAX_PAYLOAD / 8) {
        if (i >= VTL_MAX_PAYLOAD / 8 || (__u32)i * 8 >= bytes)
            break;
        __u64 w = ((__u64 *)from->data)[i];
        __u32 left = bytes - i * 8;
        if (left < 8)
            w &= ~(~0ull << 8 * left);
        ((__u64 *)to->data)[i] ^= w;
    }
    return 1;
}

VTL_GLOBAL int vtl_fec_clear(struct vtl_slot *slot) {
    int i;
    if (!slot)
        return 0;
    slot->len = 0;
    vtl_for(i, 0, VTL_MAX_PAYLOAD / 8) {
        if (i >= VTL_MAX_PAYLOAD / 8)
            break;
        ((__u64 *)slot->data)[i] = 0;
    }
    return 1;
}

/*
 * egress: before the choice of a packet. VTL_SEND: `o` is a parity packet. Only if none of the
 * group is acknowledged, since the application may overwrite acknowledged slots.
 */
VTL_INLINE enum vtl_verdict tf_fec_make(struct vtl_out *o, struct vtl_fec *f, __u32 group) {
    struct vtl_session *s = o->s;
    __u64 count = s->tx.next - f->group;
    int idle = vtl_read_end(o) && s->tx.next >= o->end;
    if (!group || !count || (count < group && !idle))
        return VTL_NEXT;
    __u64 first = f->group;
    f->group = s->tx.next;
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (count > VTL_FEC_MAX || count < 2 || VTL_LOAD(s->tx.una) > first || !scratch ||
        !vtl_fec_clear(&scratch->slot))
        return VTL_NEXT;
    __u32 lengths = 0, max = 1;
    int i;
    vtl_for(i, 0, VTL_FEC_MAX) {
        if ((__u64)i >= count)
            break;
        struct vtl_slot *slot = vtl_env_tx_slot(s, first + i);
        __u32 len = slot ? VTL_LOAD(slot->len) : 0;
        if (!len || len > s->max_payload || len > VTL_MAX_PAYLOAD)
            return VTL_NEXT;
        vtl_fec_mix(&scratch->slot, slot, len);
        lengths ^= len;
        if (len > max)
            max = len;
    }
    if (VTL_LOAD(s->tx.una) > first)
        return VTL_NEXT;
    o->type = VTL_DATA;
    o->flags = VTL_F_PARITY;
    o->seq = first;
    o->slot = &scratch->slot;
    o->len = max;
    vtl_number_header(o);
    o->hdr.data.h.aux = vtl_swap16((__u16)count);
    o->hdr.data.ts = vtl_swap32(lengths);
    return VTL_SEND;
}

VTL_INLINE int vtl_is_parity(const struct vtl_in *in) {
    return in->type == VTL_DATA && in->hdr->h.flags & VTL_F_PARITY;
}

/* ingress: admits parity packets, instead of other admissions: they have no place in the ring. */
VTL_INLINE enum vtl_verdict tf_fec_admit(struct vtl_in *in) {
    in->refused = 1;
    return VTL_NEXT;
}

/*
 * Recovers the one missing packet of a group, at most `max` bytes, from the others and the parity,
 * which is overwritten. Returns its number, its length in parity->len; VTL_NEVER if not exactly one
 * is missing.
 */
VTL_GLOBAL __u64 vtl_fec_recover(struct vtl_session *s, struct vtl_slot *parity, __u64 first,
                                 __u32 count, __u32 max) {
    if (!s || !parity)
        return VTL_NEVER;
    struct vtl_rx *rx = &s->rx;
    /* All slots must still hold the group: later packets may have reused them. */
    if (count < 2 || count > VTL_FEC_MAX || first + count > vtl_rx_known_limit(s) ||
        rx->max > first + s->slots || first + count <= rx->cum)
        return VTL_NEVER;
    __u64 missing = VTL_NEVER;
    int i;
    vtl_for(i, 0, VTL_FEC_MAX) {
        __u64 seq = first + i;
        if ((__u32)i >= count)
            break;
        if (seq >= rx->cum && !(rx->map[(seq / 64) % VTL_WINDOW_WORDS] >> (seq % 64) & 1)) {
            if (missing != VTL_NEVER)
                return VTL_NEVER; /* two are missing */
            missing = seq;
            continue;
        }
        struct vtl_slot *slot = vtl_env_rx_slot(s, seq);
        __u32 own = slot ? VTL_LOAD(slot->len) : 0;
        if (!own || own > VTL_MAX_PAYLOAD)
            return VTL_NEVER; /* one was given up */
        vtl_fec_mix(parity, slot, own);
        parity->len ^= own;
    }
    struct vtl_slot *slot = missing != VTL_NEVER ? vtl_env_rx_slot(s, missing) : 0;
    if (!slot || !parity->len || parity->len > max)
        return VTL_NEVER;
    vtl_fec_clear(slot);
    vtl_fec_mix(slot, parity, parity->len);
    return missing;
}

/* ingress: for a verified parity packet in in->slot. VTL_NEXT: `in` is now the recovered packet, as
 * if it had arrived. */
VTL_INLINE enum vtl_verdict tf_fec_recover(struct vtl_in *in) {
    VTL_TF(fec, 0);
    struct vtl_session *s = in->s;
    struct vtl_slot *parity = in->slot;
    if (!parity)
        return VTL_STOP;
    parity->len = vtl_swap32(in->hdr->ts);
    __u64 missing = vtl_fec_recover(s, parity, in->seq, vtl_swap16(in->hdr->h.aux), in->len);
    struct vtl_slot *slot = missing != VTL_NEVER ? vtl_env_rx_slot(s, missing) : 0;
    if (!slot)
        return VTL_STOP;
    in->seq = in->place = missing;
    in->slot = slot;
    in->len = parity->len;
    in->refused = 0;
    s->rx.recovered++;
    return VTL_NEXT;
}

/* ingress: for a verified packet. VTL_STOP: it was parity, and the packet that it recovered, if
 * any, is placed. */
VTL_INLINE enum vtl_verdict tf_fec_take(struct vtl_in *in) {
    if (!in->refused) /* set by tf_fec_admit */
        return VTL_NEXT;
    if (!tf_fec_recover(in))
        tf_receive_place(in);
    return VTL_STOP;
}

#endif
