/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The programs of a graft, around a composition: VTL_GRAFT(...), its description (tf.h), and the
 * following functions, which compose.h makes of transport functions before it includes this file.
 * A graft that composes by hand defines them itself:
 *
 *   enum vtl_verdict graft_egress(struct vtl_out *);    choose one packet and make its header
 *   void graft_seal(struct vtl_out *);                  once the payload is in the packet
 *   enum vtl_verdict graft_admit(struct vtl_in *);      before the payload is copied to its slot
 *   enum vtl_verdict graft_ingress(struct vtl_in *);    after that
 *   enum vtl_verdict graft_listener(struct vtl_ackd *); process an acknowledgement
 *   int graft_can_send(struct vtl_session *);           whether graft_egress would find a packet
 *   void graft_tell(struct vtl_session *, struct vtl_ack_hdr *);
 *                                                       `limit` and `aux` of an acknowledgement
 *
 * The programs do what all grafts share: session lookup, copies between packet and slot, locks,
 * acknowledgements. The root programs reach them by tail call, after checking version, lengths,
 * session and token.
 */
#ifndef VTL_GRAFT_H
#define VTL_GRAFT_H

#include "env_bpf.h"
#include "engine.h"
#include "frame.h"
#include "parse.h"

char _license[] SEC("license") = "GPL";

/*
 * vtl_move for both kinds of context: between a slot and the packet from `offset` on. Global
 * functions, verified once, so that the code after them is not verified again for each length.
 */
#define VTL_MOVE(name, context, part, put, skip)                                                   \
    VTL_GLOBAL __u64 name(struct context *ctx, struct vtl_slot *slot, __u32 offset, __u32 len) {   \
        void *data = (void *)(long)ctx->data + offset, *end = (void *)(long)ctx->data_end;         \
        if (!slot || offset > VTL_HEADROOM + VTL_UDP_HEADER + sizeof(struct vtl_data_hdr) ||       \
            len > VTL_MAX_PAYLOAD)                                                                 \
            return 0;                                                                              \
        return part(put ? data + (skip) : slot->data + (skip),                                     \
                    put ? slot->data + (skip) : data + (skip), put, end, len);                     \
    }
#define VTL_MOVES(kind, context)                                                                   \
    VTL_MOVE(vtl_##kind##_put_blocks, context, vtl_move_blocks, 1, 0)                              \
    VTL_MOVE(vtl_##kind##_put_rest, context, vtl_move_rest, 1, vtl_in_blocks(len))                 \
    VTL_MOVE(vtl_##kind##_take_blocks, context, vtl_move_blocks, 0, 0)                             \
    VTL_MOVE(vtl_##kind##_take_rest, context, vtl_move_rest, 0, vtl_in_blocks(len))                \
    VTL_INLINE __u64 vtl_##kind##_put(struct context *ctx, struct vtl_slot *slot, __u32 offset,    \
                                      __u32 len) {                                                 \
        return vtl_##kind##_put_blocks(ctx, slot, offset, len) +                                   \
               vtl_##kind##_put_rest(ctx, slot, offset, len);                                      \
    }                                                                                              \
    VTL_INLINE __u64 vtl_##kind##_take(struct context *ctx, struct vtl_slot *slot, __u32 offset,   \
                                       __u32 len) {                                                \
        return vtl_##kind##_take_blocks(ctx, slot, offset, len) +                                  \
               vtl_##kind##_take_rest(ctx, slot, offset, len);                                     \
    }
VTL_MOVES(xdp, xdp_md)
VTL_MOVES(tc, __sk_buff)

/* Copies a slot's payload into the frame at `offset`. Returns its sum. */
VTL_INLINE __u64 vtl_frame_put(struct vtl_frame f, struct vtl_slot *slot, __u32 offset, __u32 len) {
    return f.xdp ? vtl_xdp_put(f.ctx, slot, offset, len) : vtl_tc_put(f.ctx, slot, offset, len);
}

/* Copies the payload at `offset` of the frame into a slot. Returns its sum. */
VTL_INLINE __u64 vtl_frame_take(struct vtl_frame f, struct vtl_slot *slot, __u32 offset,
                                __u32 len) {
    return f.xdp ? vtl_xdp_take(f.ctx, slot, offset, len) : vtl_tc_take(f.ctx, slot, offset, len);
}

/* Whether the frame has the headers in front of VTL's. Implied by checks of the whole packet, so
 * clang would drop this check; but the verifier needs it. */
VTL_INLINE int vtl_has_headers(void *data, int ip, void *end) {
    return vtl_hidden(data) + ip + VTL_UDP_HEADER <= end;
}

/* ------------------------------------------------------------------------------------- egress */

/* Writes headers into the frame: Ethernet and IP's, `ip` bytes, and UDP's in front of a packet of
 * `length` bytes, and the packet's own; 0: success. */
VTL_INLINE int vtl_put_headers(struct vtl_frame f, struct vtl_out *o, int ip, __u32 length,
                               __be16 port) {
    __u32 offset = ip + vtl_udp_room(port);
    void *data = vtl_frame_data(f), *end = vtl_frame_end(f);
    if (data + offset + VTL_MIN_PACKET > end || !vtl_has_headers(data, ip, end))
        return -1;
    vtl_write_headers(data, o->s, ip, length, port);
    if (o->type == VTL_DATA)
        vtl_copy(data + offset, &o->hdr, sizeof(struct vtl_data_hdr));
    else
        vtl_copy(data + offset, &o->hdr, VTL_MIN_PACKET);
    return 0;
}

/* Writes the packet of `o` into the frame; 0: success. */
VTL_INLINE int vtl_emit(struct vtl_frame f, struct vtl_out *o) {
    int is_v4 = vtl_unknown(o->s->ip_version == 4);
    __u32 ip = is_v4 ? VTL_OFFSET_V4 : VTL_OFFSET_V6;
    /* Once: a packet that arrives meanwhile may change it. */
    __be16 port = VTL_LOAD(o->s->port);
    __u32 offset = vtl_unknown(ip) + vtl_udp_room(port);
    __u32 length = o->header_len + vtl_padded(o);
    int failed = vtl_frame_resize(f, offset + length);
    if (!failed) {
        if (o->type == VTL_DATA)
            o->sum = vtl_frame_put(f, o->slot, offset + sizeof(struct vtl_data_hdr), o->len);
        vtl_seal(o);
        failed = is_v4 ? vtl_put_headers(f, o, VTL_OFFSET_V4, length, port)
                       : vtl_put_headers(f, o, VTL_OFFSET_V6, length, port);
    }
    if (failed)
        vtl_env_count(VTL_ST_TX_FAILED);
    return failed;
}

/* Makes a frame of the pump the next packet of session `s`, whose turn it is. */
VTL_INLINE int vtl_egress(struct vtl_frame f, struct vtl_pump *p, struct vtl_session *s,
                          __u64 now) {
    struct vtl_out o = {.s = s, .now = now};
    int made = s->state == VTL_OPEN && vtl_join(&o, vtl_make(&o)) == VTL_SEND;
    vtl_end_turn(p, made);
    if (!made)
        return vtl_frame_drop(f);
    return vtl_emit(f, &o) ? vtl_frame_drop(f) : vtl_frame_send(f);
}

SEC("xdp") int vtl_egress_xdp(struct xdp_md *ctx) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    struct vtl_pump *p = scratch ? vtl_pump_of(scratch->shard) : 0;
    struct vtl_session *s = p ? vtl_pumped_session(p) : 0;
    return s ? vtl_egress(vtl_frame_xdp(ctx), p, s, vtl_pump_clock(p)) : XDP_DROP;
}

SEC("tcx/egress") int vtl_egress_tc(struct __sk_buff *ctx) {
    struct vtl_pump *p = vtl_pump_of(ctx->mark);
    struct vtl_session *s = p ? vtl_pumped_session(p) : 0;
    ctx->mark = 0; /* no longer used */
    return s ? vtl_egress(vtl_frame_tc(ctx), p, s, bpf_ktime_get_ns()) : VTL_TC_DROP;
}

/* Makes a packet that an aware application sent, on the loopback, the next one of its session, and
 * sends it by the session's interface. */
SEC("tcx/egress") int vtl_egress_direct(struct __sk_buff *ctx) {
    struct vtl_session *s = vtl_session_at(ctx->cb[0]);
    if (!s || s->state != VTL_OPEN)
        return VTL_TC_DROP;
    struct vtl_out o = {.s = s, .now = bpf_ktime_get_ns()};
    if (vtl_make_direct(&o) != VTL_SEND || vtl_emit(vtl_frame_tc(ctx), &o))
        return VTL_TC_DROP;
    return bpf_redirect(s->ifindex, 0);
}

/* ------------------------------------------------------------------------------------ ingress */

/* Turns the headers of a received frame round, `ip` bytes of them and UDP's, for an acknowledgement
 * with `bytes` of bitmap, and writes its header behind them; 0: success. */
VTL_INLINE int vtl_answer_headers(struct vtl_frame f, const struct vtl_ack_hdr *ack, int ip,
                                  __u32 bytes, __be16 port) {
    __u32 offset = ip + vtl_udp_room(port);
    void *data = vtl_frame_data(f), *end = vtl_frame_end(f);
    if (data + offset + sizeof(*ack) > end || !vtl_has_headers(data, ip, end))
        return -1;
    vtl_turn_round(data, ip, sizeof(*ack) + bytes, port);
    vtl_copy(data + offset, ack, sizeof(*ack));
    return 0;
}

/* Turns the packet into an acknowledgement, in place, and sends it back. */
VTL_INLINE int vtl_answer_at(struct vtl_frame f, struct vtl_session *s, __u32 ip) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!s || !scratch || ip > VTL_OFFSET_V6)
        return vtl_frame_drop(f);
    __be16 port = VTL_LOAD(s->port);
    __u32 room = vtl_udp_room(port), fixed = ip + room + sizeof(struct vtl_ack_hdr);
    __u32 words = vtl_ack_words(s);
    if (vtl_frame_prepend(f, room) || vtl_frame_fit(f, fixed, &words))
        return vtl_frame_drop(f);
    struct vtl_ack_hdr ack;
    vtl_ack_build(s, &ack, scratch->map, words, 0);
    __u32 bytes = words * 8, last = vtl_hidden(bytes - 1);
    if (last < VTL_ACK_MAX_BITMAP && vtl_frame_store(f, fixed, scratch->map, last + 1))
        return vtl_frame_drop(f);
    if (ip == VTL_OFFSET_V4 ? vtl_answer_headers(f, &ack, VTL_OFFSET_V4, bytes, port)
                            : vtl_answer_headers(f, &ack, VTL_OFFSET_V6, bytes, port))
        return vtl_frame_drop(f);
    vtl_env_count(VTL_ST_TX_ACKS);
    /* XDP_TX loses acknowledgements on veth behind a router; a redirect does not. */
    return bpf_redirect(vtl_frame_ifindex(f), 0);
}

VTL_GLOBAL int vtl_tc_answer(struct __sk_buff *ctx, struct vtl_session *s, __u32 ip) {
    return vtl_answer_at(vtl_frame_tc(ctx), s, ip);
}

VTL_GLOBAL int vtl_xdp_answer(struct xdp_md *ctx, struct vtl_session *s, __u32 ip) {
    return vtl_answer_at(vtl_frame_xdp(ctx), s, ip);
}

/* Wakes vtl-flows or the session's shard, whichever rx.doorbell names, by a copy of the packet to
 * its packet socket on the loopback. The copy's EtherType tells the two apart, its mark is the
 * shard's number. A global function, called unconditionally: a branch would double the paths to
 * verify. */
VTL_GLOBAL int vtl_tc_ring_doorbell(struct __sk_buff *ctx, struct vtl_session *s) {
    const __u32 at = offsetof(struct ethhdr, h_proto);
    if (!s || !s->rx.doorbell)
        return 0;
    __u32 whose = s->rx.doorbell;
    s->rx.doorbell = 0;
    __be16 protocol = ctx->protocol;
    __be16 type =
        vtl_swap16(whose == 1 + VTL_DOORBELL ? VTL_FLOWS_ETHERTYPE : VTL_DOORBELL_ETHERTYPE);
    __u32 mark = ctx->mark;
    ctx->mark = s->shard;
    int failed = bpf_skb_store_bytes(ctx, at, &type, sizeof(type), 0) ||
                 bpf_clone_redirect(ctx, VTL_LOOPBACK_IFINDEX, 0);
    bpf_skb_store_bytes(ctx, at, &protocol, sizeof(protocol), 0);
    ctx->mark = mark;
    if (failed)
        vtl_env_wake_for(s, whose);
    return failed;
}

/* Sends the packet's wake-up, if any. */
VTL_INLINE void vtl_ring_doorbell(struct vtl_frame f, struct vtl_session *s) {
    if (!f.xdp) {
        vtl_tc_ring_doorbell(f.ctx, s);
        return;
    }
    __u32 whose = s->rx.doorbell;
    if (whose) {
        s->rx.doorbell = 0;
        vtl_env_wake_for(s, whose); /* XDP cannot clone frames */
    }
}

/* Processes a DATA or PROBE packet whose VTL header begins at `offset`, and answers it with an
 * acknowledgement if the graft asks for one. */
VTL_INLINE int vtl_ingress_at(struct vtl_frame f, int offset) {
    if (vtl_frame_gather(f))
        return vtl_frame_drop(f);
    void *data = vtl_frame_data(f), *end = vtl_frame_end(f);
    struct vtl_data_hdr hdr;
    if (data + offset + sizeof(hdr) > end)
        return vtl_frame_drop(f);
    vtl_copy(&hdr, data + offset, sizeof(hdr));
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr.h.sid));
    if (!s)
        return vtl_frame_drop(f);
    vtl_put_token(s, &hdr.h);
    if (!VTL_TRY_LOCK(s->rx.lock)) {
        vtl_env_count(VTL_ST_RX_CONTENDED);
        return vtl_frame_drop(f);
    }
    struct vtl_in in = {.s = s, .hdr = &hdr, .marked = vtl_is_marked(data, offset)};
    int verdict = vtl_frame_drop(f);
    enum vtl_verdict v = vtl_in_start(&in, vtl_frame_length(f) - offset - sizeof(hdr));
    if (v == VTL_NEXT) {
        if (in.slot)
            in.sum = vtl_frame_take(f, in.slot, offset + sizeof(hdr), in.len);
        v = graft_ingress(&in);
    }
    vtl_ring_doorbell(f, s);
    if (v == VTL_SEND)
        verdict = f.xdp ? vtl_xdp_answer(f.ctx, s, offset) : vtl_tc_answer(f.ctx, s, offset);
    VTL_UNLOCK(s->rx.lock);
    return verdict;
}

VTL_INLINE int vtl_ingress(struct vtl_frame f) {
    return vtl_frame_is_v4(f) ? vtl_ingress_at(f, VTL_OFFSET_V4) : vtl_ingress_at(f, VTL_OFFSET_V6);
}

SEC("tcx/ingress") int vtl_ingress_tc(struct __sk_buff *ctx) {
    return vtl_ingress(vtl_frame_tc(ctx));
}

SEC("xdp") int vtl_ingress_xdp(struct xdp_md *ctx) {
    return vtl_ingress(vtl_frame_xdp(ctx));
}

/* ----------------------------------------------------------------------------------- listener */

VTL_INLINE int vtl_listener(struct vtl_frame f) {
    struct vtl_ack_hdr hdr;
    __u32 offset = vtl_frame_is_v4(f) ? VTL_OFFSET_V4 : VTL_OFFSET_V6;
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!scratch || vtl_frame_load(f, offset, &hdr, sizeof(hdr)))
        return vtl_frame_drop(f);
    int words = vtl_ack_length(&hdr, vtl_frame_length(f) - offset - sizeof(hdr));
    if (words < 0)
        return vtl_frame_drop(f);
    __u32 last = vtl_hidden(words * 8 - 1);
    if (last < VTL_ACK_MAX_BITMAP &&
        vtl_frame_load(f, offset + sizeof(hdr), scratch->map, last + 1))
        return vtl_frame_drop(f);
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr.h.sid));
    if (s) {
        vtl_put_token(s, &hdr.h);
        vtl_listen(s, bpf_ktime_get_ns(), &hdr, scratch->map, words);
    }
    return vtl_frame_drop(f);
}

SEC("tcx/ingress") int vtl_listener_tc(struct __sk_buff *ctx) {
    return vtl_listener(vtl_frame_tc(ctx));
}

SEC("xdp") int vtl_listener_xdp(struct xdp_md *ctx) {
    return vtl_listener(vtl_frame_xdp(ctx));
}

#endif
