/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability, ordering and flow control at the receiver: which packets are new, where they lie,
 * what is in order. Placement by sequence number makes reordering free; ring space is the window.
 */
#ifndef VTL_TF_RECEIVE_H
#define VTL_TF_RECEIVE_H

#include "vtl/halves.h"
#include "vtl/tf.h"

/* The first packet that finds no room, as far as the app's position is known. */
VTL_INLINE __u64 vtl_rx_known_limit(const struct vtl_session *s) {
    /* No two packets of the window may share a word of the bitmap. */
    __u64 most = (s->rx.cum & ~63ull) + VTL_MAX_WINDOW;
    __u64 limit = s->rx.consumer + s->slots;
    return limit < most ? limit : most;
}

/* The same after a look at the app's position, which is believed only if it moved forward and not
 * beyond what the app was given. The app writes there, so looking costs a cache miss. */
VTL_INLINE __u64 vtl_rx_limit(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_rx_ctl(s);
    if (ctl) {
        __u64 consumer = VTL_LOAD(ctl->consumer);
        if (consumer - s->rx.consumer <= s->rx.cum - s->rx.consumer)
            s->rx.consumer = consumer;
    }
    return vtl_rx_known_limit(s);
}

/* Is there a place for this packet, and is it still empty? Runs before the payload is copied, so
 * that a duplicate never overwrites data that the app may be reading. */
VTL_INLINE enum vtl_verdict tf_receive_admit(struct vtl_in *in) {
    VTL_TF(receive, VTL_S_ORDERED | VTL_S_FLOW_CONTROL);
    struct vtl_session *s = in->s;
    if (in->type == VTL_PROBE)
        return VTL_NEXT;
    if (in->seq >= vtl_rx_known_limit(s) && in->seq >= vtl_rx_limit(s)) {
        s->rx.beyond++;
        vtl_env_count(VTL_ST_RX_BEYOND);
        return VTL_STOP;
    }
    in->place = in->seq;
    in->half = VTL_HALVES ? in->hdr->h.flags & VTL_F_HALF : 0;
    __u64 word = s->rx.map[(in->seq / 64) % VTL_WINDOW_WORDS];
    in->duplicate = in->seq < s->rx.cum || (word >> (in->seq % 64) & 1);
    return VTL_NEXT;
}

/* Tells the app that packets below `cum` may be read, and wakes it. A sleeper sets `waiting`,
 * fences, and looks at `producer` again; here the order is the other way round. The fence costs 70
 * ns, so only packets that ask for an acknowledgement pay for it (`fence`): the last of every burst
 * does. */
VTL_INLINE void vtl_publish(struct vtl_session *s, __u64 cum, int fence) {
    struct vtl_ring_ctl *ctl = vtl_env_rx_ctl(s);
    if (!ctl)
        return;
    VTL_BARRIER();
    if (fence)
        __sync_lock_test_and_set(&ctl->producer, cum);
    else
        VTL_STORE(ctl->producer, cum);
    if (VTL_LOAD(ctl->waiting) && __sync_lock_test_and_set(&ctl->waiting, 0))
        vtl_env_notify(s, VTL_EV_RECV);
}

/* Counts the packet, and marks it as received unless it was before, or half of it is missing.
 * Returns whether it is new. */
VTL_INLINE int vtl_rx_take(struct vtl_in *in) {
    struct vtl_rx *rx = &in->s->rx;
    if (in->duplicate) {
        rx->dups++;
        vtl_env_count(VTL_ST_RX_DUPLICATE);
        return 0;
    }
    __u32 more = in->hdr->h.flags & VTL_F_MARKS;
    if (VTL_HALVES && in->half) {
        if (!vtl_put_half(in->s, in->seq, vtl_swap16(in->hdr->h.aux), in->len, more))
            return 0;
    } else {
        in->slot->len = in->len;
        in->slot->more = more;
    }
    /* vtld reads packets behind a gap once their bits are set. */
    VTL_BARRIER();
    rx->map[(in->seq / 64) % VTL_WINDOW_WORDS] |= 1ull << (in->seq % 64);
    rx->received++;
    if (in->seq >= rx->max)
        rx->max = in->seq + 1;
    return 1;
}

/* Where the packets in order end now. */
VTL_INLINE __u64 vtl_rx_scan(struct vtl_rx *rx) {
    __u64 cum = rx->cum;
    int i;
    vtl_for(i, 0, VTL_WINDOW_WORDS + 1) {
        __u32 word = (cum / 64) % VTL_WINDOW_WORDS;
        __u64 missing = ~rx->map[word] & (~0ull << (cum % 64));
        if (missing) {
            cum = (cum & ~63ull) + vtl_lowest_bit(missing);
            break;
        }
        rx->map[word] = 0;
        cum = (cum & ~63ull) + 64;
    }
    return cum;
}

/* Moves the in-order position, and publishes that to the app. */
VTL_INLINE void vtl_rx_advance(struct vtl_in *in) {
    struct vtl_rx *rx = &in->s->rx;
    rx->cum = vtl_rx_scan(rx);
    vtl_publish(in->s, rx->cum, in->hdr->h.flags & VTL_F_ACK_NOW);
}

/* Wakes who sleeps for packets behind a gap as well. `fence` as in vtl_publish. */
VTL_GLOBAL int vtl_rx_behind_gap(struct vtl_session *s, int fence) {
    struct vtl_ring_ctl *ctl = s ? vtl_env_rx_ctl(s) : 0;
    if (!ctl)
        return 0;
    __u32 waiting = fence ? __sync_fetch_and_add(&ctl->waiting, 0) : VTL_LOAD(ctl->waiting);
    if (waiting == VTL_WAITS_FOR_ANY && __sync_lock_test_and_set(&ctl->waiting, 0))
        vtl_env_notify(s, VTL_EV_RECV);
    return 0;
}

/* A packet that was verified lies in its slot. */
VTL_INLINE void tf_receive_place(struct vtl_in *in) {
    if (in->type == VTL_PROBE || !vtl_rx_take(in))
        return;
    if (in->seq == in->s->rx.cum)
        vtl_rx_advance(in);
    else
        vtl_rx_behind_gap(in->s, in->hdr->h.flags & VTL_F_ACK_NOW);
}

#endif
