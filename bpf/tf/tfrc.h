/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: TFRC (RFC 5348), a rate that follows TCP's throughput equation smoothly. The
 * sender learns the losses from selective acknowledgements, so it keeps the loss intervals itself
 * (sender-based variant, section 8 of RFC 5348): the receiver needs nothing.
 */
#ifndef VTL_TF_TFRC_H
#define VTL_TF_TFRC_H

#include "congestion.h"

enum { VTL_TFRC_INTERVALS = 8, VTL_TFRC_INITIAL = 3 };

/* Written by the listener. Rates in packets per 1,024 seconds. */
struct vtl_tfrc {
    struct vtl_cc cc;                   /* also for tf_cc_start and tf_cc_note */
    __u64 rate;                         /* allowed rate; 0 before the first feedback */
    __u64 received;                     /* receive rate over the latest round trip */
    __u64 round_ns;                     /* start of the current round trip, */
    __u64 delivered;                    /* and tx.delivered then */
    __u64 heard_ns;                     /* time of the latest acknowledgement */
    __u64 event_ns;                     /* time of the latest loss event; 0: none yet */
    __u64 event_at;                     /* packets delivered or lost until then */
    __u64 interval[VTL_TFRC_INTERVALS]; /* loss intervals in packets, the latest first */
};

/* Square root of a number below 2^62. */
VTL_INLINE __u64 vtl_square_root(__u64 x) {
    __u64 root = 0;
    for (int bit = 30; bit >= 0; bit--) {
        __u64 more = root | 1ull << bit;
        root |= vtl_up_to(more * more, x) << bit;
    }
    return root;
}

/*
 * The throughput equation, section 3.1, with b = 1 and t_RTO = 4 R:
 *   X = 1 / (R (sqrt(2 p / 3) + 12 sqrt(3 p / 8) p (1 + 32 p^2)))
 * in packets per 1,024 s; p is 1 / `interval` packets.
 */
VTL_GLOBAL __u64 vtl_tfrc_equation(__u32 rtt_us, __u64 interval) {
    if (!interval)
        interval = 1;
    if (interval > 1ull << 30)
        interval = 1ull << 30;
    __u64 p = (1ull << 30) / interval; /* in 2^-30 */
    __u64 first = vtl_square_root((2 * p / 3) << 30);
    __u64 second = vtl_square_root((3 * p / 8) << 30);
    __u64 square = 32 * (p * p >> 30) + (1ull << 30);
    second = (second * 12 * p >> 30) >> 10; /* in 2^-20 */
    second = second * (square >> 10) >> 20;
    __u64 f = (first >> 10) + second;
    return (1024000000ull << 20) / ((rtt_us ? rtt_us : 1) * (f ? f : 1));
}

/* Weighted mean of the loss intervals (section 5.4), including the open one, `open`, if that makes
 * it longer. */
VTL_INLINE __u64 vtl_tfrc_mean(const struct vtl_tfrc *t, __u64 open) {
    const __u32 weight[VTL_TFRC_INTERVALS] = {5, 5, 5, 5, 4, 3, 2, 1};
    __u64 closed = 0, with = open * 5, closed_weight = 0, with_weight = 5;
    for (int i = 0; i < VTL_TFRC_INTERVALS; i++) {
        if (!t->interval[i])
            break;
        closed += t->interval[i] * weight[i];
        closed_weight += weight[i];
        if (i + 1 < VTL_TFRC_INTERVALS) {
            with += t->interval[i] * weight[i + 1];
            with_weight += weight[i + 1];
        }
    }
    closed /= closed_weight ? closed_weight : 1;
    with /= with_weight;
    return closed > with ? closed : with;
}

/* Starts a loss event: closes the open interval. */
VTL_INLINE void vtl_tfrc_event(struct vtl_ackd *a, struct vtl_tfrc *t, __u64 count) {
    __u64 length = count - t->event_at;
    if (!t->event_ns) {
        /* First interval (section 6.3.1): inverts the equation for the receive rate so far: 1 / p =
         * 2/3 (X R)^2 for small p. In the first round trip: for the packets received so far. */
        __u64 window = t->received * a->s->tx.srtt_us / 1000000 / 1024;
        if (!t->received)
            window = a->s->tx.delivered;
        if (window < VTL_TFRC_INITIAL)
            window = VTL_TFRC_INITIAL;
        length = window * window * 2 / 3;
    }
    for (int i = VTL_TFRC_INTERVALS - 1; i > 0; i--)
        t->interval[i] = t->interval[i - 1];
    t->interval[0] = length ? length : 1;
    t->event_ns = a->now;
    t->event_at = count;
}

/* listener: after tf_delivery_rate. */
VTL_INLINE void tf_tfrc(struct vtl_ackd *a, struct vtl_tfrc *t) {
    VTL_TF(tfrc, VTL_S_CONGESTION_CONTROL);
    struct vtl_tx *tx = &a->s->tx;
    __u64 rtt_ns = tx->srtt_us * VTL_NS_PER_US;
    if (!rtt_ns)
        return;
    /* Minimum: one packet in 64 s (section 4.3). Initially three packets per round trip. */
    const __u64 min = 1024 / 64;
    __u64 initial = VTL_TFRC_INITIAL * 1024000000ull / tx->srtt_us;
    int first = !t->rate;
    if (first) {
        t->rate = initial;
        t->round_ns = t->heard_ns = a->now;
        t->delivered = tx->delivered;
    }
    /* Halves the rate for every four round trips without feedback (section 4.4). */
    __u64 quiet = (a->now - t->heard_ns) / (4 * rtt_ns);
    if (quiet && (t->cc.timeout || a->in_flight))
        t->rate >>= quiet < 16 ? quiet : 16;
    t->heard_ns = a->now;
    t->cc.timeout = 0;
    enum vtl_cc_what what = vtl_cc_event(a, &t->cc);
    __u64 count = tx->delivered + tx->lost_total;
    if (what != VTL_CC_NOTHING && (!t->event_ns || a->now - t->event_ns >= rtt_ns))
        vtl_tfrc_event(a, t, count);
    if (a->now - t->round_ns >= rtt_ns || what != VTL_CC_NOTHING) {
        __u64 ns = a->now - t->round_ns;
        if (ns >= rtt_ns) {
            t->received = (tx->delivered - t->delivered) * (1024 * VTL_NS_PER_S) / ns;
            t->round_ns = a->now;
            t->delivered = tx->delivered;
        }
        /* An application-limited sender is not held to its receive rate (section 8.2.1). */
        __u64 max = tx->app_limited || !t->received ? VTL_NEVER : 2 * t->received;
        if (t->event_ns) {
            __u64 rate = vtl_tfrc_equation(tx->srtt_us, vtl_tfrc_mean(t, count - t->event_at));
            t->rate = rate < max ? rate : max;
        } else if (ns >= rtt_ns && t->received) {
            __u64 rate = tx->app_limited ? t->rate : 2 * t->rate;
            t->rate = rate < max ? rate : max;
            if (t->rate < initial)
                t->rate = initial;
        }
    }
    if (t->rate < min)
        t->rate = min;
    tx->pacing_gap_ns = 1024 * VTL_NS_PER_S / t->rate;
    /* The rate is the limit; the window only bounds packets in flight without feedback. */
    tx->cwnd = 2 * t->rate * tx->srtt_us / 1000000 / 1024 + 8;
}

#endif
