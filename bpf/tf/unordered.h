/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * ordering: none, with duplicates removed and losses known. Packets are placed in the receive ring
 * in order of arrival, each with its number in its slot. A bitmap by number serves
 * acknowledgements, and packets that the sender has given up are skipped (partial.h). Packets that
 * find no room in the ring are dropped, and count as lost: there is no flow control.
 */
#ifndef VTL_TF_UNORDERED_H
#define VTL_TF_UNORDERED_H

#include "receive.h"
#include "skip.h"

/* Written by ingress. Both count packets in the ring. */
struct vtl_unordered {
    __u64 placed;
    __u64 consumer; /* the app's position, as far as it was plausible */
};

/* End of the bitmap. */
VTL_INLINE __u64 vtl_unordered_limit(const struct vtl_session *s) {
    return (s->rx.cum & ~63ull) + VTL_MAX_WINDOW;
}

VTL_INLINE int vtl_unordered_room(struct vtl_session *s, struct vtl_unordered *u) {
    if (u->placed - u->consumer < s->slots)
        return 1;
    struct vtl_ring_ctl *ctl = vtl_env_rx_ctl(s);
    if (!ctl)
        return 0;
    __u64 consumer = VTL_LOAD(ctl->consumer);
    if (consumer - u->consumer <= u->placed - u->consumer)
        u->consumer = consumer;
    return u->placed - u->consumer < s->slots;
}

/* ingress: instead of tf_receive_admit. */
VTL_INLINE enum vtl_verdict tf_unordered_admit(struct vtl_in *in, struct vtl_unordered *u) {
    struct vtl_session *s = in->s;
    if (in->type == VTL_PROBE)
        return VTL_NEXT;
    __u64 word = s->rx.map[(in->seq / 64) % VTL_WINDOW_WORDS];
    in->duplicate = in->seq < s->rx.cum || (word >> (in->seq % 64) & 1);
    in->place = u->placed;
    if (in->seq < vtl_unordered_limit(s) && (in->duplicate || vtl_unordered_room(s, u)))
        return VTL_NEXT;
    s->rx.beyond++;
    vtl_env_count(VTL_ST_RX_BEYOND);
    return VTL_STOP;
}

/* ingress: publishes the packet. */
VTL_INLINE void tf_unordered_place(struct vtl_in *in, struct vtl_unordered *u) {
    VTL_TF(unordered, 0);
    struct vtl_rx *rx = &in->s->rx;
    if (!in->slot || !vtl_rx_take(in))
        return;
    in->slot->stamp = in->seq;
    u->placed = in->place + 1;
    vtl_publish(in->s, u->placed, in->hdr->h.flags & VTL_F_ACK_NOW);
    if (in->seq == rx->cum)
        rx->cum = vtl_rx_scan(rx);
}

/* Skips to `floor`. */
VTL_GLOBAL int vtl_unordered_skip(struct vtl_session *s, __u64 floor) {
    if (!s)
        return 0;
    struct vtl_rx *rx = &s->rx;
    if (floor > vtl_unordered_limit(s))
        floor = vtl_unordered_limit(s);
    if (floor <= rx->cum)
        return 0;
    __u64 first = rx->cum / 64, last = floor / 64;
    int i;
    vtl_for(i, 0, VTL_WINDOW_WORDS + 1) {
        if (first + i > last)
            break;
        __u64 mask = ~0ull;
        if (!i)
            mask &= ~0ull << (rx->cum % 64);
        if (first + i == last)
            mask &= ~(~0ull << (floor % 64));
        __u64 *word = &rx->map[(first + i) % VTL_WINDOW_WORDS];
        rx->given_up += vtl_popcount(mask & ~*word);
        /* Completed words serve later packets. */
        *word = first + i == last ? *word & ~mask : 0;
    }
    rx->cum = floor;
    if (rx->max < floor)
        rx->max = floor;
    rx->cum = vtl_rx_scan(rx);
    return 0;
}

/* Instead of tf_skip: there are no slots to empty. */
VTL_INLINE void tf_unordered_skip(struct vtl_in *in) {
    __u64 floor = vtl_told_floor(in);
    if (floor > in->s->rx.cum)
        vtl_unordered_skip(in->s, floor);
}

#endif
