/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability at the receiver: skips packets that the sender has given up (partial.h). Each leaves
 * an empty slot in the ring, and is counted. Used with receive.h.
 */
#ifndef VTL_TF_SKIP_H
#define VTL_TF_SKIP_H

#include "receive.h"

/* Maximum of slots that one packet empties; the next packet continues. */
#define VTL_SKIP_MAX 128

/* The sender's floor, as far as it is plausible. */
VTL_INLINE __u64 vtl_told_floor(const struct vtl_in *in) {
    __u64 behind = vtl_swap16(in->hdr->h.aux);
    return behind <= in->seq ? in->seq - behind : 0;
}

/* Skips to `floor`. */
VTL_GLOBAL int vtl_skip(struct vtl_session *s, __u64 floor, int fence) {
    if (!s)
        return 0;
    struct vtl_rx *rx = &s->rx;
    /* Below the limit: slots beyond hold data that the app has not read. */
    __u64 limit = vtl_rx_known_limit(s);
    if (floor > limit)
        floor = limit;
    __u64 seq = rx->cum;
    int i;
    vtl_for(i, 0, VTL_SKIP_MAX) {
        __u32 word = (seq / 64) % VTL_WINDOW_WORDS;
        __u64 missing = ~rx->map[word] & (~0ull << (seq % 64));
        if (!missing) {
            seq = (seq & ~63ull) + 64;
            continue;
        }
        seq = (seq & ~63ull) + vtl_lowest_bit(missing);
        if (seq >= floor)
            break;
        struct vtl_slot *slot = vtl_env_rx_slot(s, seq);
        if (!slot)
            break;
        slot->len = 0;
        rx->map[word] |= 1ull << (seq % 64);
        rx->given_up++;
        if (seq >= rx->max)
            rx->max = seq + 1;
    }
    rx->cum = vtl_rx_scan(rx);
    vtl_publish(s, rx->cum, fence);
    return 0;
}

/* ingress: once the packet itself is placed. */
VTL_INLINE void tf_skip(struct vtl_in *in) {
    VTL_TF(skip, 0);
    __u64 floor = vtl_told_floor(in);
    if (floor > in->s->rx.cum)
        vtl_skip(in->s, floor, in->hdr->h.flags & VTL_F_ACK_NOW);
}

#endif
