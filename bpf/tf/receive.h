/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability, ordering and flow control at the receiver: duplicate detection, reassembly, in-order
 * delivery. Packets are placed by sequence number, so reordering costs nothing; the ring is the
 * receive window.
 */
#ifndef VTL_TF_RECEIVE_H
#define VTL_TF_RECEIVE_H

#include "vtl/halves.h"
#include "vtl/tf.h"

/* End of the receive window, from the app's position as last read. */
VTL_INLINE __u64 vtl_rx_known_limit(const struct vtl_session *s) {
    /* No two packets of the window may share a word of the bitmap. */
    __u64 max = (s->rx.cum & ~63ull) + VTL_MAX_WINDOW;
    __u64 limit = s->rx.consumer + s->slots;
    return limit < max ? limit : max;
}

/* End of the receive window, after reading the app's position, which counts only if it moved
 * forward, but not beyond the data published. A cache miss, since the app writes it. */
VTL_INLINE __u64 vtl_rx_limit(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_rx_ctl(s);
    if (ctl) {
        __u64 consumer = VTL_LOAD(ctl->consumer);
        if (consumer - s->rx.consumer <= s->rx.cum - s->rx.consumer)
            s->rx.consumer = consumer;
    }
    return vtl_rx_known_limit(s);
}

/* ingress: checks for room and duplicates. Runs before the payload is copied, so that a duplicate
 * never overwrites data that the app may be reading. */
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

/* Publishes packets below `cum` to the app, and wakes it. A sleeper sets `waiting`, fences, and
 * rereads `producer`; here the order is reversed. The fence takes 70 ns, so only packets that ask
 * for an acknowledgement have it (`fence`): the last one of every burst does. */
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

/* Counts the packet, and marks it as received unless it is a duplicate or half of it is missing.
 * Returns whether it is complete and new. */
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
    /* vtld reads out-of-order packets once their bits are set. */
    VTL_BARRIER();
    rx->map[(in->seq / 64) % VTL_WINDOW_WORDS] |= 1ull << (in->seq % 64);
    rx->received++;
    if (in->seq >= rx->max)
        rx->max = in->seq + 1;
    return 1;
}

/* New value of `cum`: skips received packets, and clears completed words. */
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

/* Advances `cum`, and publishes it to the app. */
VTL_INLINE void vtl_rx_advance(struct vtl_in *in) {
    struct vtl_rx *rx = &in->s->rx;
    rx->cum = vtl_rx_scan(rx);
    vtl_publish(in->s, rx->cum, in->hdr->h.flags & VTL_F_ACK_NOW);
}

/* Wakes a reader that also waits for out-of-order packets. `fence` as in vtl_publish. */
VTL_GLOBAL int vtl_rx_behind_gap(struct vtl_session *s, int fence) {
    struct vtl_ring_ctl *ctl = s ? vtl_env_rx_ctl(s) : 0;
    if (!ctl)
        return 0;
    __u32 waiting = fence ? __sync_fetch_and_add(&ctl->waiting, 0) : VTL_LOAD(ctl->waiting);
    if (waiting == VTL_WAITS_FOR_ANY && __sync_lock_test_and_set(&ctl->waiting, 0))
        vtl_env_notify(s, VTL_EV_RECV);
    return 0;
}

/* ingress: accepts the verified packet in its slot. */
VTL_INLINE void tf_receive_place(struct vtl_in *in) {
    if (!in->slot || !vtl_rx_take(in))
        return;
    if (in->seq == in->s->rx.cum)
        vtl_rx_advance(in);
    else
        vtl_rx_behind_gap(in->s, in->hdr->h.flags & VTL_F_ACK_NOW);
}

#endif
