/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Turns a composition into programs. A graft defines, then includes this file:
 *
 *   VTL_GRAFT(...)                                      what it is: see tf.h
 *   enum vtl_verdict graft_egress(struct vtl_out *);    choose one packet and make its header
 *   void graft_seal(struct vtl_out *);                  once the payload is in it
 *   enum vtl_verdict graft_admit(struct vtl_in *);      before a payload is copied to its slot
 *   enum vtl_verdict graft_ingress(struct vtl_in *);    once it is there
 *   enum vtl_verdict graft_listener(struct vtl_ackd *);
 *   int graft_can_send(struct vtl_session *);           would graft_egress find a packet?
 *   void graft_tell(struct vtl_session *, struct vtl_ack_hdr *);
 *                                                       `limit` and `aux` of an acknowledgement
 *
 * The programs do what all grafts share: find the session, move bytes between packet and slot, take
 * the locks, answer with acknowledgements. They are reached by tail call from the root programs,
 * which have checked version, lengths, session and token.
 */
#ifndef VTL_GRAFT_H
#define VTL_GRAFT_H

#include "env_bpf.h"
#include "engine.h"
#include "parse.h"

enum {
    VTL_TC_NEXT = -1, /* TCX_NEXT: not ours */
    VTL_TC_DROP = 2,  /* TCX_DROP. tcx knows no TC_ACT_STOLEN: it would pass the packet on */
};

char _license[] SEC("license") = "GPL";

/*
 * vtl_move for both kinds of context: between a slot and the packet from `offset` on. Functions of
 * their own, so that the verifier looks at them once, and not at all that follows once for each
 * length.
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

/* ------------------------------------------------------------------------------------- egress */

/* Bytes of the frame. The verifier does not take a difference of packet pointers in 32 bits. */
VTL_INLINE __u32 vtl_xdp_length(struct xdp_md *ctx) {
    return bpf_xdp_get_buff_len(ctx);
}

/* Are there the headers in front of VTL's? It goes without saying behind a look at the whole, and
 * clang would leave it out; but the verifier does not know. */
VTL_INLINE int vtl_has_headers(void *data, int ip, void *end) {
    asm volatile("" : "+r"(data));
    return data + ip + VTL_UDP_HEADER <= end;
}

/* `ip`: length of Ethernet and IP header. */
VTL_INLINE int vtl_xdp_emit(struct xdp_md *ctx, struct vtl_out *o, int ip) {
    __be16 port = VTL_LOAD(o->s->port);
    __u32 offset = ip + vtl_udp_room(port);
    __u32 header = offset + o->header_len;
    __u32 n = vtl_padded(o);
    int grow = (int)(header + n) - (int)vtl_xdp_length(ctx);
    if (grow > 0 || (grow && bpf_xdp_adjust_tail(ctx, grow)))
        return XDP_ABORTED;
    if (o->type == VTL_DATA)
        o->sum = vtl_xdp_put(ctx, o->slot, offset + sizeof(struct vtl_data_hdr), o->len);
    vtl_seal(o);
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    if (data + offset + VTL_MIN_PACKET > end || !vtl_has_headers(data, ip, end))
        return XDP_ABORTED;
    vtl_write_headers(data, o->s, ip, o->header_len + n, port);
    if (o->type == VTL_DATA)
        vtl_copy(data + offset, &o->hdr, sizeof(struct vtl_data_hdr));
    else
        vtl_copy(data + offset, &o->hdr, VTL_MIN_PACKET);
    return XDP_TX;
}

SEC("xdp") int vtl_egress_xdp(struct xdp_md *ctx) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    struct vtl_pump *p = scratch ? vtl_pump_of(scratch->shard) : 0;
    struct vtl_session *s = p ? vtl_pumped_session(p) : 0;
    if (!s)
        return XDP_DROP;
    struct vtl_out o = {.s = s, .now = vtl_pump_clock(p)};
    int made = s->state == VTL_OPEN && vtl_make(&o) == VTL_SEND;
    vtl_end_turn(p, made);
    if (!made)
        return XDP_DROP;
    int verdict = s->ip_version == 4 ? vtl_xdp_emit(ctx, &o, VTL_OFFSET_V4)
                                     : vtl_xdp_emit(ctx, &o, VTL_OFFSET_V6);
    if (verdict != XDP_TX) {
        vtl_env_count(VTL_ST_TX_FAILED);
        return XDP_DROP;
    }
    return verdict;
}

VTL_INLINE int vtl_tc_emit(struct __sk_buff *ctx, struct vtl_out *o, int ip) {
    __be16 port = VTL_LOAD(o->s->port);
    __u32 offset = ip + vtl_udp_room(port);
    __u32 n = vtl_padded(o);
    __u32 length = offset + o->header_len + n;
    if (length != ctx->len && bpf_skb_change_tail(ctx, length, 0))
        return VTL_TC_DROP;
    if (o->type == VTL_DATA)
        o->sum = vtl_tc_put(ctx, o->slot, offset + sizeof(struct vtl_data_hdr), o->len);
    vtl_seal(o);
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    if (data + offset + VTL_MIN_PACKET > end || !vtl_has_headers(data, ip, end))
        return VTL_TC_DROP;
    vtl_write_headers(data, o->s, ip, o->header_len + n, port);
    if (o->type == VTL_DATA)
        vtl_copy(data + offset, &o->hdr, sizeof(struct vtl_data_hdr));
    else
        vtl_copy(data + offset, &o->hdr, VTL_MIN_PACKET);
    return VTL_TC_NEXT;
}

SEC("tcx/egress") int vtl_egress_tc(struct __sk_buff *ctx) {
    struct vtl_pump *p = vtl_pump_of(ctx->mark);
    struct vtl_session *s = p ? vtl_pumped_session(p) : 0;
    if (!s)
        return VTL_TC_DROP;
    ctx->mark = 0; /* it has no meaning from here on */
    struct vtl_out o = {.s = s, .now = bpf_ktime_get_ns()};
    int made = s->state == VTL_OPEN && vtl_make(&o) == VTL_SEND;
    vtl_end_turn(p, made);
    if (!made)
        return VTL_TC_DROP;
    int verdict = s->ip_version == 4 ? vtl_tc_emit(ctx, &o, VTL_OFFSET_V4)
                                     : vtl_tc_emit(ctx, &o, VTL_OFFSET_V6);
    if (verdict == VTL_TC_DROP) {
        vtl_env_count(VTL_ST_TX_FAILED);
        return VTL_TC_DROP;
    }
    return verdict;
}

/* A packet that an aware application sent to nobody, on the loopback, becomes its session's next
 * one and leaves through the session's interface. */
SEC("tcx/egress") int vtl_egress_direct(struct __sk_buff *ctx) {
    struct vtl_session *s = vtl_session_at(ctx->cb[0]);
    if (!s || s->state != VTL_OPEN)
        return VTL_TC_DROP;
    struct vtl_out o = {.s = s, .now = bpf_ktime_get_ns()};
    if (vtl_make_direct(&o) != VTL_SEND)
        return VTL_TC_DROP;
    int verdict = s->ip_version == 4 ? vtl_tc_emit(ctx, &o, VTL_OFFSET_V4)
                                     : vtl_tc_emit(ctx, &o, VTL_OFFSET_V6);
    if (verdict == VTL_TC_DROP) {
        vtl_env_count(VTL_ST_TX_FAILED);
        return VTL_TC_DROP;
    }
    return bpf_redirect(s->ifindex, 0);
}

/* ------------------------------------------------------------------------------------ ingress */

/* Turns the packet into an acknowledgement and sends it back. */
VTL_GLOBAL int vtl_tc_answer(struct __sk_buff *ctx, struct vtl_session *s, __u32 ip) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!s || (ip != VTL_OFFSET_V4 && ip != VTL_OFFSET_V6))
        return VTL_TC_DROP;
    __be16 port = VTL_LOAD(s->port);
    __u32 offset = ip + vtl_udp_room(port);
    __u32 words = vtl_ack_words(s);
    __u32 length = sizeof(struct vtl_ack_hdr) + words * 8;
    if (!scratch || bpf_skb_change_tail(ctx, offset + length, 0))
        return VTL_TC_DROP;
    struct vtl_ack_hdr ack;
    vtl_ack_build(s, &ack, scratch->map, words, 0);
    __u32 bytes = words * 8;
    if (bytes - 1 < VTL_ACK_MAX_BITMAP &&
        bpf_skb_store_bytes(ctx, offset + sizeof(ack), scratch->map, bytes, 0))
        return VTL_TC_DROP;
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    if (data + offset + sizeof(ack) > end || !vtl_has_headers(data, ip, end))
        return VTL_TC_DROP;
    vtl_turn_round(data, ip, length, port);
    vtl_copy(data + offset, &ack, sizeof(ack));
    vtl_env_count(VTL_ST_TX_ACKS);
    return bpf_redirect(ctx->ifindex, 0);
}

/* Wakes vtld, if that is to be, by a copy of the packet, which its packet socket on the loopback
 * gets at once; the mark says which shard's. A function of its own, called always: a branch would
 * double what is verified. */
VTL_GLOBAL int vtl_tc_ring_bell(struct __sk_buff *ctx, struct vtl_session *s) {
    const __u32 at = offsetof(struct ethhdr, h_proto), loopback = 1;
    if (!s || !s->rx.bell)
        return 0;
    __u32 whose = s->rx.bell;
    s->rx.bell = 0;
    __be16 is = ctx->protocol;
    __be16 bell = vtl_swap16(whose == 1 + VTL_RUNG ? VTL_FLOWS_ETHERTYPE : VTL_BELL_ETHERTYPE);
    __u32 mark = ctx->mark;
    ctx->mark = s->shard;
    int failed = bpf_skb_store_bytes(ctx, at, &bell, sizeof(bell), 0) ||
                 bpf_clone_redirect(ctx, loopback, 0);
    bpf_skb_store_bytes(ctx, at, &is, sizeof(is), 0);
    ctx->mark = mark;
    if (failed)
        vtl_env_wake_for(s, whose);
    return failed;
}

VTL_INLINE int vtl_ingress_tc_at(struct __sk_buff *ctx, int offset) {
    /* Drivers may leave a part of the packet in pages. */
    if (ctx->data_end - ctx->data < ctx->len && bpf_skb_pull_data(ctx, ctx->len))
        return VTL_TC_DROP;
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    struct vtl_data_hdr hdr;
    if (data + offset + sizeof(hdr) > end)
        return VTL_TC_DROP;
    vtl_copy(&hdr, data + offset, sizeof(hdr));
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr.h.sid));
    if (!s)
        return VTL_TC_DROP;
    vtl_put_token(s, &hdr.h);
    if (!VTL_TRY_LOCK(s->rx.busy)) {
        vtl_env_count(VTL_ST_RX_CONTENDED);
        return VTL_TC_DROP;
    }
    struct vtl_in in = {.s = s, .hdr = &hdr, .marked = vtl_is_marked(data, offset)};
    int verdict = VTL_TC_DROP;
    enum vtl_verdict v = vtl_in_start(&in, ctx->len - offset - sizeof(hdr));
    if (v == VTL_NEXT) {
        if (in.slot)
            in.sum = vtl_tc_take(ctx, in.slot, offset + sizeof(hdr), in.len);
        v = graft_ingress(&in);
    }
    vtl_tc_ring_bell(ctx, s);
    if (v == VTL_SEND)
        verdict = vtl_tc_answer(ctx, s, offset);
    VTL_UNLOCK(s->rx.busy);
    return verdict;
}

SEC("tcx/ingress") int vtl_ingress_tc(struct __sk_buff *ctx) {
    return ctx->protocol == vtl_swap16(ETH_P_IP) ? vtl_ingress_tc_at(ctx, VTL_OFFSET_V4)
                                                 : vtl_ingress_tc_at(ctx, VTL_OFFSET_V6);
}

VTL_GLOBAL int vtl_xdp_answer(struct xdp_md *ctx, struct vtl_session *s, __u32 ip) {
    if (!s || (ip != VTL_OFFSET_V4 && ip != VTL_OFFSET_V6))
        return XDP_DROP;
    __be16 port = VTL_LOAD(s->port);
    __u32 offset = ip + vtl_udp_room(port);
    if (vtl_xdp_shift(ctx, (int)(ip - offset)))
        return XDP_DROP;
    /* A frame can only be cut here: growing it fails on veth. */
    __u32 total = vtl_xdp_length(ctx);
    __u32 fixed = offset + sizeof(struct vtl_ack_hdr);
    __u32 words = vtl_ack_words(s);
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!scratch || total < fixed)
        return XDP_DROP;
    if (words > (total - fixed) / 8)
        words = (total - fixed) / 8;
    __u32 length = sizeof(struct vtl_ack_hdr) + words * 8;
    if (bpf_xdp_adjust_tail(ctx, (int)(offset + length) - (int)total))
        return XDP_DROP;
    struct vtl_ack_hdr ack;
    vtl_ack_build(s, &ack, scratch->map, words, 0);
    __u32 bytes = words * 8;
    if (bytes - 1 < VTL_ACK_MAX_BITMAP && bpf_xdp_store_bytes(ctx, fixed, scratch->map, bytes))
        return XDP_DROP;
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    if (data + offset + sizeof(ack) > end || !vtl_has_headers(data, ip, end))
        return XDP_DROP;
    vtl_turn_round(data, ip, length, port);
    vtl_copy(data + offset, &ack, sizeof(ack));
    vtl_env_count(VTL_ST_TX_ACKS);
    /* XDP_TX loses acknowledgements on veth behind a router; a redirect does not. */
    return bpf_redirect(ctx->ingress_ifindex, 0);
}

VTL_INLINE int vtl_ingress_xdp_at(struct xdp_md *ctx, int offset) {
    void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
    struct vtl_data_hdr hdr;
    if (data + offset + sizeof(hdr) > end)
        return XDP_DROP;
    vtl_copy(&hdr, data + offset, sizeof(hdr));
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr.h.sid));
    if (!s)
        return XDP_DROP;
    vtl_put_token(s, &hdr.h);
    if (!VTL_TRY_LOCK(s->rx.busy)) {
        vtl_env_count(VTL_ST_RX_CONTENDED);
        return XDP_DROP;
    }
    struct vtl_in in = {.s = s, .hdr = &hdr, .marked = vtl_is_marked(data, offset)};
    int verdict = XDP_DROP;
    enum vtl_verdict v = vtl_in_start(&in, vtl_xdp_length(ctx) - offset - sizeof(hdr));
    if (v == VTL_NEXT) {
        if (in.slot)
            in.sum = vtl_xdp_take(ctx, in.slot, offset + sizeof(hdr), in.len);
        v = graft_ingress(&in);
    }
    __u32 whose = s->rx.bell;
    if (whose) {
        s->rx.bell = 0;
        vtl_env_wake_for(s, whose); /* a frame cannot be copied here */
    }
    if (v == VTL_SEND)
        verdict = vtl_xdp_answer(ctx, s, offset);
    VTL_UNLOCK(s->rx.busy);
    return verdict;
}

/* IPv4 or IPv6; root has parsed the frame already. */
VTL_INLINE int vtl_xdp_is_v4(struct xdp_md *ctx) {
    struct ethhdr *eth = (void *)(long)ctx->data;
    return (void *)(eth + 1) <= (void *)(long)ctx->data_end && eth->h_proto == vtl_swap16(ETH_P_IP);
}

SEC("xdp") int vtl_ingress_xdp(struct xdp_md *ctx) {
    return vtl_xdp_is_v4(ctx) ? vtl_ingress_xdp_at(ctx, VTL_OFFSET_V4)
                              : vtl_ingress_xdp_at(ctx, VTL_OFFSET_V6);
}

/* ----------------------------------------------------------------------------------- listener */

SEC("tcx/ingress") int vtl_listener_tc(struct __sk_buff *ctx) {
    struct vtl_ack_hdr hdr;
    __u32 offset = ctx->protocol == vtl_swap16(ETH_P_IP) ? VTL_OFFSET_V4 : VTL_OFFSET_V6;
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!scratch || bpf_skb_load_bytes(ctx, offset, &hdr, sizeof(hdr)))
        return VTL_TC_DROP;
    int words = vtl_ack_length(&hdr, ctx->len - offset - sizeof(hdr));
    if (words < 0)
        return VTL_TC_DROP;
    __u32 bytes = words * 8;
    if (bytes - 1 < VTL_ACK_MAX_BITMAP &&
        bpf_skb_load_bytes(ctx, offset + sizeof(hdr), scratch->map, bytes))
        return VTL_TC_DROP;
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr.h.sid));
    if (s) {
        vtl_put_token(s, &hdr.h);
        vtl_listen(s, bpf_ktime_get_ns(), &hdr, scratch->map, words);
    }
    return VTL_TC_DROP;
}

SEC("xdp") int vtl_listener_xdp(struct xdp_md *ctx) {
    struct vtl_ack_hdr hdr;
    __u32 offset = vtl_xdp_is_v4(ctx) ? VTL_OFFSET_V4 : VTL_OFFSET_V6;
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!scratch || bpf_xdp_load_bytes(ctx, offset, &hdr, sizeof(hdr)))
        return XDP_DROP;
    int words = vtl_ack_length(&hdr, vtl_xdp_length(ctx) - offset - sizeof(hdr));
    if (words < 0)
        return XDP_DROP;
    __u32 bytes = words * 8;
    if (bytes - 1 < VTL_ACK_MAX_BITMAP &&
        bpf_xdp_load_bytes(ctx, offset + sizeof(hdr), scratch->map, bytes))
        return XDP_DROP;
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr.h.sid));
    if (s) {
        vtl_put_token(s, &hdr.h);
        vtl_listen(s, bpf_ktime_get_ns(), &hdr, scratch->map, words);
    }
    return XDP_DROP;
}

#endif
