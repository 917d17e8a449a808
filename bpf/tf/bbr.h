/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * A model of the path after BBR (Cardwell et al., ACM Queue 2016;
 * draft-cardwell-iccrg-bbr-congestion-control). Sends at the measured delivery rate, probes for
 * more every few rounds, and keeps a quarter more than a bandwidth-delay product in flight. It
 * knows nothing of packets or sessions: grafts (congestion_bbr.h) and the kernel's TCP
 * (bpf/tcp/stream.bpf.c) tell it what acknowledgements say. Where it differs from BBR:
 *
 * - Losses tell of congestion only together with a queue, or where less loses less. While round
 *   trips are short, the pacing rate makes up for those that the path has anyway, so that what the
 *   bottleneck carries stays at its rate.
 * - While a queue stands, a little less than the measured rate is sent: a rate measured from
 *   acknowledgements that come in clusters is too high. One that stands longer than probing takes
 *   is drained, until a round trip shows it empty.
 * - Round trips like the shortest need no probing, but not for ever: where the path has become
 *   shorter, a queue makes up for it. After half a minute and 200 round trips there is a probe.
 * - Packets that the path marks (ECN) tell of a queue like long round trips do.
 * - One that does not empty is somebody else's, who fills buffers, or none at all, as the path has
 *   become longer. Draining and filling tell: whoever fills a queue leaves it shorter by what we
 *   take out of it, and longer, or full, by what we add; a longer path follows neither, and is got
 *   to know anew. Against a competitor the window follows CUBIC (RFC 9438), until the queue is
 *   found empty again.
 * - A full queue that loses far more than the link ever did tells that the link has become slower:
 *   what was known of its rate counts no more.
 */
#ifndef VTL_TF_BBR_H
#define VTL_TF_BBR_H

#include "cube_root.h"
#include "vtl/tf.h"

/* Gains in 256ths. */
#define VTL_BBR_HIGH_GAIN 739 /* 2 / ln 2 */
#define VTL_BBR_DRAIN_GAIN 88 /* its inverse */
#define VTL_BBR_UP_GAIN 320
#define VTL_BBR_DOWN_GAIN 192
#define VTL_BBR_QUEUED_GAIN 240 /* cruising with a queue: 1/16 less makes up for 6 % too much */
#define VTL_BBR_ROUNDS 10       /* the maximum filter of the rate */
#define VTL_BBR_MIN_CWND 4
#define VTL_BBR_INITIAL_CWND 32
#define VTL_BBR_MIN_RTT_NS (VTL_MIN_RTT_MS * VTL_NS_PER_MS)
#define VTL_BBR_PROBE_RTT_NS (200 * VTL_NS_PER_MS)
/* For so long, and so many round trips, one like the shortest is taken for one without a queue of
 * ours: the path may have become shorter, and the queue as much longer. */
#define VTL_BBR_TRUST_NS (30 * VTL_NS_PER_S)
#define VTL_BBR_TRUST_RTTS 200
/* The largest share of lost packets that is made up for before it is known what gets lost when less
 * is sent: 10 % in 65,536ths. */
#define VTL_BBR_LOSS_MAX 6554
/* And ever: a half. */
#define VTL_BBR_LOSS_MOST 32768
/* Packets, at least, that say what share of them gets lost. */
#define VTL_BBR_LOSS_PACKETS 64
/* What sleeping pumps and readers may add to a round trip: it counts only on short paths. */
#define VTL_BBR_HOST_US 1000
/* As much as the medium may add, by taking turns: it counts up to this, and up to a round trip. */
#define VTL_BBR_JITTER_US 20000
/* Startup ends when a round loses more than this, 20 %: the queue runs over. */
#define VTL_BBR_LOSS_FULL 13107
/* Losses beyond the usual ones that may be chance: 2 %. */
#define VTL_BBR_LOSS_SLACK 1311
/* Rounds in a row that show no queue: who filled it has gone. */
#define VTL_BBR_GONE 8
/* Packets that come late, in 65,536ths, when a few that overtake them have the shortest round trip:
 * one of eight. */
#define VTL_BBR_LATE 8192

/* What an acknowledgement says, and what follows from it. */
struct vtl_bbr_ack {
    __u64 now;         /* ns */
    __u64 rate;        /* delivery rate sample, packets per 1,024 s; 0 = none */
    __u64 delivered;   /* packets that have arrived so far, */
    __u64 newly;       /* and those of them that this acknowledgement is the first to tell of */
    __u64 lost;        /* transmissions given up so far */
    __u64 in_flight;   /* packets, after this acknowledgement */
    __u64 waiting;     /* the model: those of them that are under way only as acknowledgements wait;
                        * `in_flight` is then without them */
    __u64 cwnd;        /* packets in flight allowed: until now; the model sets the next, */
    __u64 pace;        /* and the pacing rate, packets per 1,024 s; 0 = unpaced */
    __u32 transmitted; /* transmissions so far, modulo 2^32 as all that follow, */
    __u32 told;        /* those of which it is known whether they have arrived, */
    __u32 told_arrived; /* and how many of them, and of earlier ones, have. */
    __u32 sent;         /* `told` and */
    __u32 arrived;      /* `told_arrived` since the acknowledgement before */
    __u32 rtt_us;       /* 0 = no sample */
    __u32 srtt_us;      /* smoothed, and its variation: RFC 6298 */
    __u32 rttvar_us;
    __u32 waited_us;   /* of the round trip, behind the peer's own data */
    __u32 late;        /* transmissions that lately overtook some which arrived nevertheless, */
    __u32 late_q16;    /* and the share of packets that came so late, 65,536 = all */
    __u32 marks;       /* packets that the path has marked (ECN) so far, modulo 2^16 */
    __u32 app_limited; /* the sample says more about the application than about the path */
    __u32 initial;     /* packets, the initial window; 0 = vtl_bbr_initial */
};

/*
 * The initial window: a packet for each millisecond of round trip, which is about 12 Mbit/s, but
 * between 32 packets and 128. A long path costs the most round trips to get to know, and hardly one
 * of today's is slower; on a slow one 128 packets are less than its bandwidth-delay product.
 */
VTL_INLINE __u32 vtl_bbr_initial(__u32 rtt_us) {
    __u32 window = rtt_us / 1000;
    return window < VTL_BBR_INITIAL_CWND ? VTL_BBR_INITIAL_CWND : window > 128 ? 128 : window;
}

/* Nothing is known but, if `srtt_us` is not 0, the round trip that setting up took. */
VTL_INLINE void vtl_bbr_start(struct vtl_bbr *b, __u64 now, __u32 srtt_us) {
    if (!b->floor_q16)
        b->floor_q16 = VTL_BBR_LOSS_MAX;
    /* Round trips of data may find a queue already. But they are a little longer, too. */
    b->min_rtt_us = srtt_us + srtt_us / 8;
    b->min_rtt_ns_at = now;
    b->probe_rtt_end_ns = now;
}

VTL_INLINE __u32 vtl_bbr_gain(const struct vtl_bbr *b) {
    switch (b->mode) {
    case VTL_BBR_STARTUP:
        return VTL_BBR_HIGH_GAIN;
    case VTL_BBR_DRAIN:
        return VTL_BBR_DRAIN_GAIN;
    case VTL_BBR_PROBE_BW:
        switch (b->phase) {
        case VTL_BBR_UP:
            return VTL_BBR_UP_GAIN;
        case VTL_BBR_DOWN:
        case VTL_BBR_EMPTY:
            return VTL_BBR_DOWN_GAIN;
        default:
            return b->queued ? VTL_BBR_QUEUED_GAIN : 256;
        }
    default:
        return 256;
    }
}

/* Bandwidth-delay product in packets, times gain / 256. */
VTL_INLINE __u64 vtl_bbr_bdp(const struct vtl_bbr *b, __u64 bw, __u32 gain) {
    /* packets / 1024 s * us * gain / 256 */
    return bw * b->min_rtt_us / 1000000 * gain / 256 / 1024;
}

/* A round trip without what acknowledgements wait behind the peer's data: no shorter than the
 * shortest. */
VTL_INLINE __u32 vtl_bbr_own(const struct vtl_bbr *b, __u32 rtt_us, __u32 waited_us) {
    return rtt_us > b->min_rtt_us + waited_us ? rtt_us - waited_us : b->min_rtt_us;
}

/* Packets more that are under way where a few overtake most others: as many. The shortest round
 * trip is that of the few. */
VTL_INLINE __u64 vtl_bbr_late(const struct vtl_bbr *b, const struct vtl_bbr_ack *a) {
    __u64 most = 2 * vtl_bbr_bdp(b, b->bw, 256);
    if (a->late_q16 < VTL_BBR_LATE)
        return 0;
    return a->late < most ? a->late : most;
}

/* Round trips up to this one show an empty queue: a sixth longer than the shortest, with what
 * hosts, the packet in front of one, and those that overtake it may add. */
VTL_INLINE __u32 vtl_bbr_empty_us(const struct vtl_bbr *b, const struct vtl_bbr_ack *a) {
    __u64 packets = b->bw ? (1 + vtl_bbr_late(b, a)) * 1024 * 1000000 / b->bw : 0;
    return b->min_rtt_us + b->min_rtt_us / 6 + VTL_BBR_HOST_US / 4 + packets;
}

/* Has what we put into the queue gone? A path that holds less than a packet is never empty while
 * one is under way. */
VTL_INLINE int vtl_bbr_drained(struct vtl_bbr *b, const struct vtl_bbr_ack *a) {
    __u64 bdp = vtl_bbr_bdp(b, b->bw, 256);
    bdp += vtl_bbr_late(b, a);
    return a->in_flight <= (bdp > VTL_BBR_MIN_CWND ? bdp : VTL_BBR_MIN_CWND);
}

VTL_INLINE void vtl_bbr_enter(struct vtl_bbr *b, struct vtl_bbr_ack *a, __u32 phase) {
    b->mode = VTL_BBR_PROBE_BW;
    b->phase = phase;
    b->phase_ns = a->now;
    b->phase_bw = b->bw;
    b->phase_round = b->rounds;
}

VTL_INLINE void vtl_bbr_drain(struct vtl_bbr *b) {
    b->mode = VTL_BBR_DRAIN;
    b->phase_round = b->rounds;
}

/* The rate of the latest round. */
VTL_INLINE __u64 vtl_bbr_latest(const struct vtl_bbr *b) {
    __u32 last = b->slot ? b->slot - 1 : VTL_BBR_ROUNDS - 1;
    return last < VTL_BBR_ROUNDS ? b->bw_max[last] : 0;
}

/* No higher rate of before counts any more. */
VTL_INLINE void vtl_bbr_slower(struct vtl_bbr *b, __u64 bw) {
    if (!bw || bw >= b->bw)
        return;
    for (int i = 0; i < VTL_BBR_ROUNDS; i++)
        b->bw_max[i] = b->bw_max[i] < bw ? b->bw_max[i] : bw;
    b->bw = bw;
}

/* A queue stands. While it does, every rate is what we get of the link, and the latest counts: the
 * maximum of many would keep the queue for ever, where several flows share it. */
VTL_INLINE void vtl_bbr_empty(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    __u64 bw = vtl_bbr_latest(b);
    /* A round that happened to lose much says little, unless the link had something to send all the
     * time. */
    if (bw < b->bw - b->bw / 4 && b->round_min_us < 2 * b->min_rtt_us)
        bw = b->bw - b->bw / 4;
    if (!a->app_limited)
        vtl_bbr_slower(b, bw);
    /* What a competitor will be met with, if there is one: not what draining in vain has left. */
    if (!b->busy)
        b->window = a->cwnd > a->waiting ? a->cwnd - a->waiting : 0;
    if (!b->competing)
        b->from_us = b->round_min_us;
    vtl_bbr_enter(b, a, VTL_BBR_EMPTY);
}

/* CUBIC's epoch begins: the window grows towards `most` and beyond from now on. */
VTL_INLINE void vtl_bbr_epoch(struct vtl_bbr *b, struct vtl_bbr_ack *a, __u64 most, __u64 from) {
    b->most = most;
    b->window = from;
    b->epoch_ns = a->now;
    /* (most - from) / 0.4, in cubic milliseconds */
    b->k_ms = vtl_cube_root((most - from) * 2500000000ull);
}

VTL_INLINE void vtl_bbr_compete(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    b->competing = 1;
    b->busy = VTL_BBR_GONE;
    b->from = 0;
    b->yielded = b->rounds;
    vtl_bbr_epoch(b, a, b->window, b->window);
}

/* The path is got to know anew. */
VTL_INLINE void vtl_bbr_anew(struct vtl_bbr *b) {
    b->competing = b->busy = 0;
    b->mode = VTL_BBR_STARTUP;
    b->full_bw = b->full_count = 0;
}

/* Rounds until the effect on the shortest round trip shows: of less in flight, and of more, which
 * the first packets of a round are not behind yet. */
#define VTL_BBR_LESS 2
#define VTL_BBR_MORE 3

/* Are round trips as long as before, though there is less or more in flight? */
VTL_INLINE int vtl_bbr_same(const struct vtl_bbr *b) {
    __u32 slack = b->from_us / 64 + VTL_BBR_HOST_US / 4;
    return b->round_min_us + slack >= b->from_us && b->round_min_us <= b->from_us + slack;
}

/* At the end of a round against a competitor: is it none? Its queue would be shorter by what we
 * have taken out of it; where round trips stay the same with half as much in flight, they are the
 * path's. */
VTL_INLINE int vtl_bbr_alone(struct vtl_bbr *b, struct vtl_bbr_ack *a, int congested) {
    if (b->mode != VTL_BBR_PROBE_BW || a->app_limited)
        b->from = 0;
    if (!b->from || !vtl_bbr_same(b)) {
        b->from = b->mode == VTL_BBR_PROBE_BW && b->round_min_us != ~0u ? a->in_flight : 0;
        b->from_us = b->round_min_us;
        b->alone = 0;
        return 0;
    }
    if (a->in_flight > b->from)
        b->from = a->in_flight;
    b->alone = !congested && 2 * a->in_flight <= b->from ? b->alone + 1 : 0;
    if (b->alone <= VTL_BBR_LESS)
        return 0;
    b->min_rtt_us = b->from_us;
    b->min_rtt_ns_at = a->now;
    return 1;
}

/* At the end of a round of EMPTY or TRY: has the path become longer? */
VTL_INLINE void vtl_bbr_longer(struct vtl_bbr *b, struct vtl_bbr_ack *a, int congested) {
    if (b->mode != VTL_BBR_PROBE_BW || b->phase < VTL_BBR_EMPTY || b->competing)
        return;
    __u32 spent = b->rounds - b->phase_round;
    if (congested || (b->phase == VTL_BBR_TRY && a->app_limited) || !vtl_bbr_same(b))
        b->from_us = 0;
    /* Half as much again would not show where the application keeps only a little in flight. */
    int is_window_limited = 4 * a->in_flight >= 3 * vtl_bbr_bdp(b, b->bw, 256);
    if (b->phase == VTL_BBR_EMPTY && spent == VTL_BBR_LESS && b->from_us && is_window_limited) {
        b->most = a->in_flight + a->in_flight / 2;
        vtl_bbr_enter(b, a, VTL_BBR_TRY);
    } else if (b->phase == VTL_BBR_TRY && spent == VTL_BBR_MORE) {
        /* Unless there was less to be sent; an acknowledgement or two make no difference. */
        if (b->from_us && a->in_flight + a->in_flight / 4 + 2 >= b->most) {
            b->min_rtt_us = b->round_min_us;
            b->min_rtt_ns_at = a->now;
            vtl_bbr_anew(b);
            return;
        }
        if (!b->queued)
            b->busy = 0;
        else if (++b->busy >= 3)
            vtl_bbr_compete(b, a);
        vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
    }
}

/* At the end of a round with losses against a competitor: the window yields by 30 %. What gets lost
 * in the round after that had been sent before. */
VTL_INLINE void vtl_bbr_yield(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (b->rounds - b->yielded < 2)
        return;
    b->yielded = b->rounds;
    __u64 less = b->window * 179 / 256;
    vtl_bbr_epoch(b, a, b->window, less > VTL_BBR_MIN_CWND ? less : VTL_BBR_MIN_CWND);
}

/* The shortest round trip without a queue of ours. Others' makes it look longer, too: where
 * everybody takes that for the path, their windows overflow it for ever; where the path has
 * changed, a few probes tell. */
VTL_INLINE void vtl_bbr_probed(struct vtl_bbr *b, __u64 now, __u32 seen_us) {
    if (seen_us > b->min_rtt_us)
        seen_us = b->min_rtt_us + (seen_us - b->min_rtt_us) / 4;
    b->min_rtt_us = seen_us;
    b->min_rtt_ns_at = now;
}

/* Drains the queue to see the shortest round trip. */
VTL_INLINE void vtl_bbr_probe(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    b->mode = VTL_BBR_PROBE_RTT;
    b->phase_round = b->rounds;
    b->probe_rtt_end_ns = a->now + VTL_BBR_PROBE_RTT_NS + 3 * b->min_rtt_us * VTL_NS_PER_US;
    b->probe_us = ~0u;
    b->min_rtt_ns_at = a->now;
}

/* The share of `sent` packets that has not arrived, in 65,536ths. What was overtaken, and arrives
 * later, may make it more. */
VTL_INLINE __u32 vtl_bbr_share(__u32 sent, __u32 arrived) {
    return arrived < sent ? (sent - arrived) * 65536ull / sent : 0;
}

/*
 * What gets lost when we send less than the bottleneck's rate is the path's own, and may be made up
 * for, however much it is. A queue that runs over, and a policer, which drops without having one,
 * lose nothing then.
 */
VTL_GLOBAL int vtl_bbr_floor(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    int is_of_it = (__s32)(a->told - a->sent - b->less_from) >= 0 &&
                   (b->less || (__s32)(a->told - b->less_to) <= 0);
    if (!is_of_it)
        return 0;
    b->less_sent += a->sent;
    b->less_arrived += a->arrived;
    if (b->less_sent < VTL_BBR_LOSS_PACKETS)
        return 0;
    b->floor_q16 = (b->floor_q16 + vtl_bbr_share(b->less_sent, b->less_arrived)) / 2;
    b->less_sent = b->less_arrived = 0;
    return 0;
}

/* The share of lost packets that is made up for: those that the path loses anyway, and a few by
 * chance. */
VTL_INLINE __u32 vtl_bbr_made_up(const struct vtl_bbr *b) {
    __u32 most = b->floor_q16 + b->floor_q16 / 8 + 256;
    __u32 loss = b->loss_q16 < most ? b->loss_q16 : most;
    return loss < VTL_BBR_LOSS_MOST ? loss : VTL_BBR_LOSS_MOST;
}

/* A round has ended. */
VTL_GLOBAL int vtl_bbr_round(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    b->next_round = a->delivered + a->in_flight + a->waiting;
    b->rounds++;
    /* What is known of the rate outlives PROBE_RTT, which measures none. */
    if (b->mode != VTL_BBR_PROBE_RTT)
        b->slot = b->slot + 1 < VTL_BBR_ROUNDS ? b->slot + 1 : 0;
    if (b->mode != VTL_BBR_PROBE_RTT && b->slot < VTL_BBR_ROUNDS)
        b->bw_max[b->slot] = 0;
    __u32 marked = b->marked;
    int emptying = b->mode == VTL_BBR_PROBE_BW && b->phase >= VTL_BBR_EMPTY;
    b->marked = 0;
    /* A round without a sample, as of packets that TCP has sent twice, shows neither. */
    int measured = b->round_min_us != ~0u;
    if (measured)
        b->queued = b->round_min_us > vtl_bbr_empty_us(b, a);
    b->queued |= marked != 0;
    __u32 sent = a->told - b->round_sent;
    __u32 arrived = a->told_arrived - b->round_arrived;
    __u32 lost = arrived < sent ? sent - arrived : 0;
    if (b->competing && (marked || a->lost > b->last_lost))
        vtl_bbr_yield(b, a);
    if (b->competing && b->queued)
        b->busy = VTL_BBR_GONE;
    else if (b->competing && b->mode == VTL_BBR_PROBE_BW && !--b->busy)
        vtl_bbr_anew(b);
    b->last_lost = a->lost;
    /* As many as ever get lost, and a few by chance. */
    __u64 usual = sent * (2ull * b->loss_q16 + VTL_BBR_LOSS_SLACK) / 65536 + 3;
    if (sent >= VTL_BBR_LOSS_PACKETS) {
        __u32 share = vtl_bbr_share(sent, arrived);
        /* A path that loses much, but carries ever more, is not full. */
        if (b->mode == VTL_BBR_STARTUP && share > VTL_BBR_LOSS_FULL &&
            (b->queued || b->bw * 4 < b->full_bw * 5))
            vtl_bbr_drain(b);
        /* With a queue, losses may be its own: what was known before stays, and fades. Those of
         * DRAIN are of the queue that startup ran over; EMPTY and TRY compare with what was known.
         */
        if (b->mode == VTL_BBR_DRAIN || (emptying && !b->competing))
            ;
        else if (!b->queued || share < b->loss_q16)
            b->loss_q16 = (3 * b->loss_q16 + share) / 4;
        else
            b->loss_q16 -= b->loss_q16 / 16;
        /* Hardly a link's own: is the shortest round trip known one with a queue? */
        if (b->loss_q16 > b->floor_q16 + VTL_BBR_LOSS_MAX && b->mode == VTL_BBR_PROBE_BW &&
            !b->competing && a->now - b->probe_rtt_end_ns > VTL_BBR_MIN_RTT_NS / 2)
            vtl_bbr_probe(b, a);
        b->round_sent += sent;
        b->round_arrived += arrived;
    }
    /* A queue that loses far more than the link ever did: it is full, as the link has become
     * slower. What came of the latest round is what it carries. */
    if (b->queued && (b->mode == VTL_BBR_DRAIN || b->mode == VTL_BBR_PROBE_BW) && !b->competing &&
        sent >= VTL_BBR_LOSS_PACKETS && lost > sent / 8 && lost > usual)
        vtl_bbr_slower(b, vtl_bbr_latest(b));
    if (b->queued && measured && b->rounds - b->phase_round >= 2 &&
        (b->mode == VTL_BBR_DRAIN || (b->mode == VTL_BBR_PROBE_BW && b->phase == VTL_BBR_CRUISE)))
        vtl_bbr_empty(b, a);
    if (b->competing && vtl_bbr_alone(b, a, marked || lost > usual))
        vtl_bbr_anew(b);
    vtl_bbr_longer(b, a, marked || lost > usual);
    b->round_min_us = ~0u;
    if (b->mode != VTL_BBR_STARTUP || !b->bw)
        return 0;
    /* Growth counts in any round; a round that the application limited is no sign of a full path.
     */
    if (b->bw * 4 >= b->full_bw * 5) {
        b->full_bw = b->bw;
        b->full_count = 0;
    } else if (!a->app_limited && ++b->full_count >= (b->queued ? 2 : 3)) {
        vtl_bbr_drain(b);
    }
    return 0;
}

VTL_INLINE void vtl_bbr_rate(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (b->mode == VTL_BBR_PROBE_RTT)
        return;
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

VTL_INLINE void vtl_bbr_min_rtt(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!a->rtt_us)
        return;
    if (a->rtt_us < b->round_min_us)
        b->round_min_us = a->rtt_us;
    int expired = a->now - b->min_rtt_ns_at > VTL_BBR_MIN_RTT_NS;
    /* The first sample of data shows whether what negotiation measured was this path at all. */
    int wrong = !b->min_rtt_us || (!b->rounds && a->rtt_us > 8ull * b->min_rtt_us);
    /* A sample within 2 % is as good as a new minimum: an idle queue needs no probing. */
    __u32 slack = b->min_rtt_us / 50;
    int shorter = wrong || a->rtt_us + slack < b->min_rtt_us;
    int near = a->rtt_us <= b->min_rtt_us + slack;
    if (wrong || a->rtt_us < b->min_rtt_us)
        b->min_rtt_us = a->rtt_us;
    if (near && a->app_limited && b->mode != VTL_BBR_PROBE_RTT)
        b->probe_rtt_end_ns = a->now;
    __u64 trust = VTL_BBR_TRUST_NS + VTL_BBR_TRUST_RTTS * VTL_NS_PER_US * b->min_rtt_us;
    if (shorter || (near && a->now - b->probe_rtt_end_ns < trust)) {
        b->min_rtt_ns_at = a->now;
    } else if (b->mode == VTL_BBR_PROBE_BW &&
               (expired || (b->competing && !near && a->now >> 33 != b->phase_ns >> 33))) {
        vtl_bbr_probe(b, a);
    }
    if (b->mode == VTL_BBR_PROBE_RTT && b->rounds - b->phase_round >= 2 && a->rtt_us < b->probe_us)
        b->probe_us = a->rtt_us;
}

/* Goes on to another phase if it is time to. */
VTL_GLOBAL int vtl_bbr_mode(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    __u64 rtt_ns = b->min_rtt_us * VTL_NS_PER_US;
    __u64 spent = a->now - b->phase_ns;
    int empty = a->rtt_us && a->rtt_us <= vtl_bbr_empty_us(b, a);
    if (b->mode == VTL_BBR_DRAIN) {
        if (vtl_bbr_drained(b, a))
            vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
    } else if (b->mode == VTL_BBR_PROBE_BW && !b->competing) {
        switch (b->phase) {
        case VTL_BBR_UP:
            if (spent < rtt_ns)
                break;
            /* There is more, and no queue yet: go on. */
            if (empty && b->bw > b->phase_bw + b->phase_bw / 8)
                vtl_bbr_enter(b, a, VTL_BBR_UP);
            else if (a->in_flight >= vtl_bbr_bdp(b, b->bw, VTL_BBR_UP_GAIN) || b->marked ||
                     spent > 3 * rtt_ns)
                vtl_bbr_enter(b, a, VTL_BBR_DOWN);
            break;
        case VTL_BBR_DOWN:
            /* Stop draining as soon as the queue that probing made is gone. */
            if (vtl_bbr_drained(b, a) || spent > 2 * rtt_ns)
                vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
            break;
        case VTL_BBR_EMPTY:
            if (empty) {
                b->busy = 0;
                vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
            } else if (b->rounds - b->phase_round >= 4) {
                if (++b->busy >= 3)
                    vtl_bbr_compete(b, a);
                vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
            }
            break;
        default:
            /* Not in step with others: when they probe we keep still, and lose to them if we have
             * more. */
            if (!b->queued && spent > (2 + (b->phase_ns >> 10 & 3)) * rtt_ns)
                vtl_bbr_enter(b, a, VTL_BBR_UP);
        }
    } else if (b->mode == VTL_BBR_PROBE_RTT && a->now > b->probe_rtt_end_ns && b->probe_us != ~0u) {
        if (b->probe_us <= vtl_bbr_empty_us(b, a))
            b->competing = b->busy = 0;
        vtl_bbr_probed(b, a->now, b->probe_us);
        vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
    }
    return 0;
}

/* CUBIC's window, in packets. */
VTL_INLINE __u64 vtl_bbr_cubic(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    __u64 ms = (a->now - b->epoch_ns) / VTL_NS_PER_MS;
    __u64 off = ms > b->k_ms ? ms - b->k_ms : b->k_ms - ms;
    if (off > 60000)
        off = 60000;
    __u64 cube = off * off * off / 1000 * 2 / 5000000;
    __u64 window = ms > b->k_ms ? b->most + cube : b->most > cube ? b->most - cube : 0;
    /* It grows only while it is what limits. */
    if (window > b->window && a->in_flight + a->newly + 16 >= b->window)
        b->window = window;
    return b->window;
}

VTL_INLINE void vtl_bbr_marks(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if ((__s16)(a->marks - b->marks) <= 0)
        return;
    b->marks = a->marks;
    b->marked = 1;
}

/* An acknowledgement has come: sets `cwnd` and `pace`. */
VTL_INLINE void vtl_bbr_update(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    /* What the peer's own data hold back is no part of this direction. */
    a->waiting = b->bw / 1024 * a->waited_us / 1000000;
    if (a->waiting > a->in_flight)
        a->waiting = a->in_flight;
    a->in_flight -= a->waiting;
    if (a->rtt_us > b->min_rtt_us)
        a->rtt_us = vtl_bbr_own(b, a->rtt_us, a->waited_us);
    vtl_bbr_floor(b, a);
    vtl_bbr_rate(b, a);
    vtl_bbr_min_rtt(b, a);
    vtl_bbr_marks(b, a);
    /* What was given up need not be waited for. */
    if (b->next_round > a->delivered + a->in_flight + a->waiting)
        b->next_round = a->delivered + a->in_flight + a->waiting;
    if (a->delivered >= b->next_round)
        vtl_bbr_round(b, a);
    vtl_bbr_mode(b, a);

    /* Until the path is known, no slower than the initial window per round trip: the first samples
     * may say more about the application than about the path. */
    __u64 bw = b->bw;
    __u32 rtt = b->min_rtt_us ? b->min_rtt_us : 100000;
    __u32 window = a->initial ? a->initial : vtl_bbr_initial(rtt);
    __u32 least = window < VTL_BBR_INITIAL_CWND ? window : VTL_BBR_INITIAL_CWND;
    __u64 initial = (__u64)window * 1024 * 1000000 / rtt;
    if (b->mode == VTL_BBR_STARTUP && bw < initial)
        bw = initial;
    __u64 made_up = bw * 65536 / (65536 - vtl_bbr_made_up(b));
    __u32 less = !b->competing && vtl_bbr_gain(b) <= VTL_BBR_DOWN_GAIN;
    if (less != b->less && less)
        b->less_from = a->transmitted;
    else if (less != b->less)
        b->less_to = a->transmitted;
    b->less = less;

    __u64 cwnd, pace;
    __u32 own = vtl_bbr_own(b, a->srtt_us, a->waited_us);
    own = own ? own : 1;
    if (b->mode == VTL_BBR_PROBE_RTT) {
        pace = bw;
        cwnd = vtl_bbr_bdp(b, bw, b->rounds - b->phase_round < 2 ? 256 : 128);
        if (b->competing && cwnd > b->window)
            cwnd = b->window;
    } else if (b->competing) {
        cwnd = vtl_bbr_cubic(b, a);
        pace = cwnd * 1280 * 1000000 / own;
    } else {
        pace = (b->queued && b->mode == VTL_BBR_PROBE_BW ? bw : made_up) * vtl_bbr_gain(b) / 256;
        int starting = b->mode == VTL_BBR_STARTUP || b->mode == VTL_BBR_DRAIN;
        int emptying = b->mode == VTL_BBR_PROBE_BW && b->phase == VTL_BBR_EMPTY;
        int trying = b->mode == VTL_BBR_PROBE_BW && b->phase == VTL_BBR_TRY;
        cwnd = vtl_bbr_bdp(b, made_up, starting ? 512 : VTL_BBR_UP_GAIN);
        /* One product is enough to drain a queue of our own, and leaves no gap behind it. After two
         * rounds in vain less, as several may share it. */
        if (emptying)
            cwnd =
                vtl_bbr_bdp(b, made_up, b->rounds - b->phase_round < 2 ? 256 : VTL_BBR_DOWN_GAIN);
        /* Acknowledgements come for several packets at once, late, and unevenly. */
        cwnd += emptying ? 0 : 2 * vtl_ack_every(cwnd) + 2;
        cwnd += vtl_bbr_late(b, a);
        /* A queue makes round trips vary, too. */
        __u64 jitter = 2 * a->rttvar_us;
        __u64 most = b->min_rtt_us > VTL_BBR_JITTER_US ? b->min_rtt_us : VTL_BBR_JITTER_US;
        if (jitter > most)
            jitter = most;
        cwnd += bw / 1024 * (VTL_BBR_HOST_US + jitter) / 1000000;
        if (starting && cwnd < least)
            cwnd = least;
        if (trying) {
            cwnd = b->most;
            pace = cwnd * 1280 * 1000000 / own;
        }
    }
    a->pace = pace;
    cwnd += a->waiting;
    a->cwnd = cwnd > VTL_BBR_MIN_CWND ? cwnd : VTL_BBR_MIN_CWND;
}

#endif
