/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * A frame in tcx or XDP: hides the differences, so that packets are processed by one source. `xdp`
 * is constant in each program: code for the other hook is not compiled.
 *
 * Pointers into a frame are valid until it is resized, gathered or prepended to.
 */
#ifndef VTL_FRAME_H
#define VTL_FRAME_H

#include "env_bpf.h"
#include "parse.h"

enum {
    VTL_TC_NEXT = TC_ACT_UNSPEC, /* not ours */
    VTL_TC_DROP = TC_ACT_SHOT,   /* also for consumed packets: tcx passes TC_ACT_STOLEN on */
};

struct vtl_frame {
    void *ctx; /* struct xdp_md or struct __sk_buff */
    int xdp;
};

VTL_INLINE struct vtl_frame vtl_frame_tc(struct __sk_buff *ctx) {
    return (struct vtl_frame){.ctx = ctx, .xdp = 0};
}

VTL_INLINE struct vtl_frame vtl_frame_xdp(struct xdp_md *ctx) {
    return (struct vtl_frame){.ctx = ctx, .xdp = 1};
}

/* A field of both kinds of context. */
#define VTL_FRAME_FIELD(f, name)                                                                   \
    ((f).xdp ? ((struct xdp_md *)(f).ctx)->name : ((struct __sk_buff *)(f).ctx)->name)

/* The Ethernet header. */
VTL_INLINE void *vtl_frame_data(struct vtl_frame f) {
    return (void *)(long)VTL_FRAME_FIELD(f, data);
}

/* End of the bytes that pointers can read: of the frame, or of its linear part (tcx). */
VTL_INLINE void *vtl_frame_end(struct vtl_frame f) {
    return (void *)(long)VTL_FRAME_FIELD(f, data_end);
}

/* Length of the frame. */
VTL_INLINE __u32 vtl_frame_length(struct vtl_frame f) {
    if (!f.xdp)
        return ((struct __sk_buff *)f.ctx)->len;
    /* The verifier rejects 32-bit differences of packet pointers, which clang would use. */
    return vtl_hidden((__u64)(vtl_frame_end(f) - vtl_frame_data(f)));
}

/* Ingress interface. */
VTL_INLINE __u32 vtl_frame_ifindex(struct vtl_frame f) {
    return f.xdp ? ((struct xdp_md *)f.ctx)->ingress_ifindex : ((struct __sk_buff *)f.ctx)->ifindex;
}

/* Whether it is IPv4, else IPv6; for frames that root has parsed. */
VTL_INLINE int vtl_frame_is_v4(struct vtl_frame f) {
    if (!f.xdp)
        return ((struct __sk_buff *)f.ctx)->protocol == vtl_swap16(ETH_P_IP);
    struct ethhdr *eth = vtl_frame_data(f);
    return (void *)(eth + 1) <= vtl_frame_end(f) && eth->h_proto == vtl_swap16(ETH_P_IP);
}

/* ----------------------------------------------------------------------------------- verdicts */

VTL_INLINE int vtl_frame_drop(struct vtl_frame f) {
    return f.xdp ? (int)XDP_DROP : (int)VTL_TC_DROP;
}

/* Passes the frame on to the rest of the system. */
VTL_INLINE int vtl_frame_pass(struct vtl_frame f) {
    return f.xdp ? (int)XDP_PASS : (int)VTL_TC_NEXT;
}

/* egress: sends the frame by the interface where the program runs. */
VTL_INLINE int vtl_frame_send(struct vtl_frame f) {
    return f.xdp ? (int)XDP_TX : (int)VTL_TC_NEXT;
}

/* ------------------------------------------------------------------- bytes; 0: it has succeeded */

VTL_INLINE long vtl_frame_load(struct vtl_frame f, __u32 at, void *to, __u32 bytes) {
    return f.xdp ? bpf_xdp_load_bytes(f.ctx, at, to, bytes)
                 : bpf_skb_load_bytes(f.ctx, at, to, bytes);
}

VTL_INLINE long vtl_frame_store(struct vtl_frame f, __u32 at, void *from, __u32 bytes) {
    return f.xdp ? bpf_xdp_store_bytes(f.ctx, at, from, bytes)
                 : bpf_skb_store_bytes(f.ctx, at, from, bytes, 0);
}

/* Linearizes the frame, so that pointers can read all of it: drivers may leave a part in pages. */
VTL_INLINE long vtl_frame_gather(struct vtl_frame f) {
    struct __sk_buff *skb = f.ctx;
    return !f.xdp && skb->data_end - skb->data < skb->len && bpf_skb_pull_data(skb, skb->len);
}

/* Cuts the frame to `length` bytes, or (tcx only, since it fails on veth under XDP) extends it. */
VTL_INLINE long vtl_frame_resize(struct vtl_frame f, __u32 length) {
    __u32 present = vtl_frame_length(f);
    if (!f.xdp)
        return length != present && bpf_skb_change_tail(f.ctx, length, 0);
    int grow = (int)length - (int)present;
    return grow > 0 || (grow && bpf_xdp_adjust_tail(f.ctx, grow));
}

/* Resizes the frame to `fixed` bytes and as many of the `words`, of 8 bytes, as fit. */
VTL_INLINE long vtl_frame_fit(struct vtl_frame f, __u32 fixed, __u32 *words) {
    if (!f.xdp)
        return bpf_skb_change_tail(f.ctx, fixed + *words * 8, 0);
    /* By a helper: cheaper to verify than a difference of pointers. */
    __u32 present = bpf_xdp_get_buff_len(f.ctx);
    if (present < fixed)
        return -1;
    if (*words > (present - fixed) / 8)
        *words = (present - fixed) / 8;
    return bpf_xdp_adjust_tail(f.ctx, (int)(fixed + *words * 8) - (int)present);
}

/* XDP: moves Ethernet and IP headers over the VTL_UDP_HEADER bytes behind them, or, with a negative
 * `by`, away from them. */
VTL_INLINE int vtl_xdp_move(struct xdp_md *ctx, int by, const __u32 length) {
    __u64 headers[(VTL_OFFSET_V6 + 7) / 8];
    return bpf_xdp_load_bytes(ctx, 0, headers, length) || bpf_xdp_adjust_head(ctx, by) ||
           bpf_xdp_store_bytes(ctx, 0, headers, length);
}

VTL_GLOBAL int vtl_xdp_shift(struct xdp_md *ctx, int by) {
    struct ethhdr *eth = (void *)(long)ctx->data;
    if (!by)
        return 0;
    if ((void *)(eth + 1) > (void *)(long)ctx->data_end)
        return -1;
    return eth->h_proto == vtl_swap16(ETH_P_IP) ? vtl_xdp_move(ctx, by, VTL_OFFSET_V4)
                                                : vtl_xdp_move(ctx, by, VTL_OFFSET_V6);
}

/* Makes room for a UDP header of `room` bytes, or 0, for a packet that is to be written anew. XDP:
 * in front, since the frame cannot grow at its end. */
VTL_INLINE long vtl_frame_prepend(struct vtl_frame f, __u32 room) {
    return f.xdp && vtl_xdp_shift(f.ctx, -(int)room);
}

/* Removes the UDP header. */
VTL_INLINE long vtl_frame_cut_udp(struct vtl_frame f) {
    return f.xdp ? vtl_xdp_shift(f.ctx, VTL_UDP_HEADER)
                 : bpf_skb_adjust_room(f.ctx, -VTL_UDP_HEADER, BPF_ADJ_ROOM_NET, 0);
}

#endif
