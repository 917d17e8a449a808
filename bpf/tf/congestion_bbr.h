/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: model of the path after BBR (Cardwell et al., ACM Queue 2016;
 * draft-cardwell-iccrg-bbr-congestion-control). Sends at the measured delivery rate, probes for
 * more one round in eight, keeps at most two bandwidth-delay products in flight, and takes losses
 * below the level of congestion as the link's own: the pacing rate makes up for them, so that
 * what the bottleneck carries stays at its rate.
 */
#ifndef VTL_TF_CONGESTION_BBR_H
#define VTL_TF_CONGESTION_BBR_H

#include "vtl/tf.h"

/* Gains in 256ths. */
#define VTL_BBR_HIGH_GAIN 739 /* 2 / ln 2 */
#define VTL_BBR_DRAIN_GAIN 88 /* its inverse */
#define VTL_BBR_CWND_GAIN 512
#define VTL_BBR_ROUNDS 10 /* the maximum filter of the rate */
#define VTL_BBR_MIN_CWND 4
#define VTL_BBR_INITIAL_CWND 32
#define VTL_BBR_MIN_RTT_NS (10 * VTL_NS_PER_S)
#define VTL_BBR_PROBE_RTT_NS (200 * VTL_NS_PER_MS)
/* The largest share of lost packets that is made up for: 10 % in 65,536ths. */
#define VTL_BBR_LOSS_MAX 6554
/* What sleeping pumps and readers may add to a round trip: it counts only on short paths. */
#define VTL_BBR_HOST_US 1000
/* Startup ends when a round loses more than this, 20 %: the queue runs over. */
#define VTL_BBR_LOSS_FULL 13107

/*
 * The initial window: a packet for each millisecond of round trip, which is about 12 Mbit/s, but
 * between 32 packets and 128. A long path costs the most round trips to get to know, and hardly one
 * of today's is slower; on a slow one 128 packets are less than its bandwidth-delay product.
 */
VTL_INLINE __u32 vtl_bbr_initial(__u32 rtt_us) {
    __u32 window = rtt_us / 1000;
    return window < VTL_BBR_INITIAL_CWND ? VTL_BBR_INITIAL_CWND : window > 128 ? 128 : window;
}

/* egress: before the first packet, spreads the initial window over half a round trip, if
 * negotiation has measured one. */
VTL_INLINE void tf_congestion_start(struct vtl_out *o) {
    struct vtl_tx *tx = &o->s->tx;
    if (tx->next || tx->acks)
        return;
    tx->cwnd = vtl_bbr_initial(tx->srtt_us);
    tx->pacing_gap_ns = tx->srtt_us * VTL_NS_PER_US / (2 * tx->cwnd);
}

VTL_INLINE __u32 vtl_bbr_gain(const struct vtl_bbr *b) {
    switch (b->mode) {
    case VTL_BBR_STARTUP:
        return VTL_BBR_HIGH_GAIN;
    case VTL_BBR_DRAIN:
        return VTL_BBR_DRAIN_GAIN;
    case VTL_BBR_PROBE_BW:
        return b->cycle == 0 ? 320 : b->cycle == 1 ? 192 : 256;
    default:
        return 256;
    }
}

/* Bandwidth-delay product in packets, times gain / 256. */
VTL_INLINE __u64 vtl_bbr_bdp(const struct vtl_bbr *b, __u64 bw, __u32 gain) {
    /* packets / 1024 s * us * gain / 256 */
    return bw * b->min_rtt_us / 1000000 * gain / 256 / 1024;
}

/* Has the queue gone? A path that holds less than a packet is never empty while one is under way.
 */
VTL_INLINE int vtl_bbr_drained(const struct vtl_ackd *a) {
    const struct vtl_bbr *b = &a->s->tx.bbr;
    __u64 bdp = vtl_bbr_bdp(b, b->bw, 256);
    return a->in_flight <= (bdp > VTL_BBR_MIN_CWND ? bdp : VTL_BBR_MIN_CWND);
}

VTL_INLINE void vtl_bbr_round(struct vtl_ackd *a) {
    struct vtl_tx *tx = &a->s->tx;
    struct vtl_bbr *b = &tx->bbr;
    b->next_round = tx->delivered + a->in_flight;
    b->rounds++;
    b->slot = b->slot + 1 < VTL_BBR_ROUNDS ? b->slot + 1 : 0;
    if (b->slot < VTL_BBR_ROUNDS)
        b->bw_max[b->slot] = 0;
    /* Losses can be taken back (vtl_loss_undo). */
    __u64 lost = tx->lost_total > b->round_lost ? tx->lost_total - b->round_lost : 0;
    __u64 delivered = tx->delivered - b->round_delivered;
    if (lost + delivered >= 64) {
        __u32 share = lost * 65536 / (lost + delivered);
        if (b->mode == VTL_BBR_STARTUP && share > VTL_BBR_LOSS_FULL)
            b->mode = VTL_BBR_DRAIN;
        b->loss_q16 = (3 * b->loss_q16 + share) / 4;
        b->round_lost = tx->lost_total;
        b->round_delivered = tx->delivered;
    }
    if (b->mode != VTL_BBR_STARTUP || a->app_limited || !b->bw)
        return;
    if (b->bw * 4 >= b->full_bw * 5) {
        b->full_bw = b->bw;
        b->full_count = 0;
    } else if (++b->full_count >= 3) {
        b->mode = VTL_BBR_DRAIN;
    }
}

VTL_INLINE void vtl_bbr_rate(struct vtl_ackd *a) {
    struct vtl_bbr *b = &a->s->tx.bbr;
    __u32 slot = b->slot;
    if (slot < VTL_BBR_ROUNDS && a->rate && (!a->app_limited || a->rate > b->bw) &&
        a->rate > b->bw_max[slot])
        b->bw_max[slot] = a->rate;
    __u64 bw = 0;
    for (int i = 0; i < VTL_BBR_ROUNDS; i++)
        bw = b->bw_max[i] > bw ? b->bw_max[i] : bw;
    if (bw)
        b->bw = bw;
}

VTL_INLINE void vtl_bbr_min_rtt(struct vtl_ackd *a) {
    struct vtl_bbr *b = &a->s->tx.bbr;
    int expired = a->now - b->min_rtt_ns_at > VTL_BBR_MIN_RTT_NS;
    if (!a->rtt_us)
        return;
    /* A sample within 2 % is as good as a new minimum: an idle queue needs no probing. */
    if (!b->min_rtt_us || a->rtt_us <= b->min_rtt_us) {
        b->min_rtt_us = a->rtt_us;
        b->min_rtt_ns_at = a->now;
    } else if (a->rtt_us <= b->min_rtt_us + b->min_rtt_us / 50) {
        b->min_rtt_ns_at = a->now;
    } else if (expired && b->mode == VTL_BBR_PROBE_BW) {
        b->mode = VTL_BBR_PROBE_RTT;
        b->probe_rtt_end_ns = a->now + VTL_BBR_PROBE_RTT_NS + b->min_rtt_us * VTL_NS_PER_US;
        b->min_rtt_us = a->rtt_us;
        b->min_rtt_ns_at = a->now;
    }
}

VTL_INLINE void vtl_bbr_mode(struct vtl_ackd *a) {
    struct vtl_bbr *b = &a->s->tx.bbr;
    if (b->mode == VTL_BBR_DRAIN && vtl_bbr_drained(a)) {
        b->mode = VTL_BBR_PROBE_BW;
        b->cycle = 2;
        b->cycle_ns = a->now;
    } else if (b->mode == VTL_BBR_PROBE_BW) {
        int full = a->now - b->cycle_ns > b->min_rtt_us * VTL_NS_PER_US;
        /* Stop draining as soon as the queue that probing made is gone. */
        if (b->cycle == 1 && vtl_bbr_drained(a))
            full = 1;
        if (full) {
            b->cycle = (b->cycle + 1) % 8;
            b->cycle_ns = a->now;
        }
    } else if (b->mode == VTL_BBR_PROBE_RTT && a->now > b->probe_rtt_end_ns) {
        b->mode = VTL_BBR_PROBE_BW;
        b->cycle = 2;
        b->cycle_ns = a->now;
        b->min_rtt_ns_at = a->now;
    }
}

/* listener */
VTL_INLINE void tf_congestion_bbr(struct vtl_ackd *a) {
    struct vtl_tx *tx = &a->s->tx;
    struct vtl_bbr *b = &tx->bbr;
    if (tx->delivered >= b->next_round)
        vtl_bbr_round(a);
    vtl_bbr_rate(a);
    vtl_bbr_min_rtt(a);
    vtl_bbr_mode(a);

    /* Until the path is known, no slower than the initial window per round trip: the first samples
     * may say more about the application than about the path. */
    __u64 bw = b->bw;
    __u32 rtt = b->min_rtt_us ? b->min_rtt_us : 100000;
    __u64 initial = (__u64)vtl_bbr_initial(rtt) * 1024 * 1000000 / rtt;
    if (b->mode == VTL_BBR_STARTUP && bw < initial)
        bw = initial;
    __u32 loss = b->loss_q16 < VTL_BBR_LOSS_MAX ? b->loss_q16 : VTL_BBR_LOSS_MAX;
    __u64 made_up = bw + bw * loss / 65536;
    __u64 pace = made_up * vtl_bbr_gain(b) / 256;
    tx->pacing_gap_ns = pace ? 1024 * VTL_NS_PER_S / pace : 0;

    __u64 cwnd;
    if (b->mode == VTL_BBR_PROBE_RTT) {
        cwnd = vtl_bbr_bdp(b, bw, 128);
    } else {
        cwnd = vtl_bbr_bdp(b, made_up, VTL_BBR_CWND_GAIN);
        cwnd += 3 * 16; /* acknowledgements come for up to 16 packets at once */
        cwnd += bw / 1024 * VTL_BBR_HOST_US / 1000000;
        if (cwnd < VTL_BBR_INITIAL_CWND)
            cwnd = VTL_BBR_INITIAL_CWND;
    }
    tx->cwnd = cwnd > VTL_BBR_MIN_CWND ? cwnd : VTL_BBR_MIN_CWND;
}

#endif
