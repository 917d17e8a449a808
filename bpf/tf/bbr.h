/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Congestion control: a model of the path after BBR (Cardwell et al., ACM Queue 2016;
 * draft-cardwell-iccrg-bbr-congestion-control). Paces at the measured delivery rate, probes for
 * more bandwidth every few rounds, and keeps 1.25 bandwidth-delay products in flight. Independent
 * of packets and sessions: grafts (congestion_bbr.h) and the kernel's TCP (bpf/tcp/stream.bpf.c)
 * feed it with acknowledgements. Differences from BBR:
 *
 * - Random loss: a loss is a congestion signal only if there is a queue, or if sending less loses
 *   less. Without a queue, the pacing rate is raised by the path's own loss rate, so that the
 *   bottleneck stays utilised.
 * - Standing queue: the pacing gain is 15/16 while one stands, since delivery rates measured from
 *   clustered acknowledgements are too high. A queue that outlasts a bandwidth probe is drained
 *   until a round-trip sample shows it empty.
 * - Full path: until round trips grow in STARTUP, it sends at least an initial window per round
 *   trip, whatever the rate samples say. From then on these count, however low they are; once
 *   packets are lost, too, they bound the window, and a second such round ends STARTUP.
 * - PROBE_RTT is skipped while samples are near the minimum, at most for 30 s and 200 round trips:
 *   on a path that became shorter, a queue of ours can hide the difference. It follows STARTUP
 *   where other connections know a shorter round trip than the handshake's: our queue may have
 *   taken the place of what others had left.
 * - ECN marks signal a queue, as long round trips do.
 * - A queue that does not drain is a competitor's that fills buffers, or a longer path. To tell
 *   which, in flight is first reduced (EMPTY), then increased (TRY): a competitor's queue shrinks
 *   and grows (or overflows) with it; the round-trip time of a longer path does neither, and the
 *   model starts anew. Against a competitor the window follows CUBIC (RFC 9438) until the queue is
 *   seen empty again. One that does not answer to losses either, such as BBRv1, would take all: as
 *   long as losses come back sooner than CUBIC's could, the session holds two bandwidth-delay
 *   products and does not answer either.
 * - Bandwidth reduction: a full queue that loses far more than the path's own loss rate discards
 *   the former maximum of the delivery rate.
 */
#ifndef VTL_TF_BBR_H
#define VTL_TF_BBR_H

#include "cube_root.h"
#include "vtl/tf.h"

/* Gains in 256ths. */
#define VTL_BBR_HIGH_GAIN 739 /* 2 / ln 2 */
#define VTL_BBR_DRAIN_GAIN 88 /* its inverse */
/* STARTUP on a path that was full: the first round's samples are at least half of its rate. */
#define VTL_BBR_FILLED_GAIN 512
#define VTL_BBR_UP_GAIN 320
#define VTL_BBR_DOWN_GAIN 192
#define VTL_BBR_QUEUED_GAIN 240 /* CRUISE with a queue: rate samples are up to 6 % high */
#define VTL_BBR_ROUNDS 10       /* the maximum filter of the rate */
#define VTL_BBR_BETA 179        /* CUBIC's multiplicative decrease (RFC 9438, 4.6) */
#define VTL_BBR_MIN_CWND 4
#define VTL_BBR_INITIAL_CWND 32
/* Round-trip time assumed where there is no sample. */
#define VTL_BBR_UNKNOWN_RTT_US 100000
#define VTL_BBR_MIN_RTT_NS (VTL_MIN_RTT_MS * VTL_NS_PER_MS)
#define VTL_BBR_PROBE_RTT_NS (200 * VTL_NS_PER_MS)
/* How long, in time and in round trips, samples near the minimum replace PROBE_RTT. */
#define VTL_BBR_TRUST_NS (30 * VTL_NS_PER_S)
#define VTL_BBR_TRUST_RTTS 200
/* The path's own loss rate (`floor_q16`) until it is known, and the excess over it that is hardly
 * random: 10 % in 65,536ths. */
#define VTL_BBR_LOSS_ASSUMED 6554
/* Maximum of the loss rate that the pacing rate compensates: a half. */
#define VTL_BBR_LOSS_MAX 32768
/* Minimum sample for a loss rate, packets. */
#define VTL_BBR_LOSS_PACKETS 64
/* Delay that sleeping hosts may add to a round trip; matters on short paths only. */
#define VTL_BBR_HOST_US 1000
/* Jitter of the medium (slots) that the window covers: up to this, or up to a round trip. */
#define VTL_BBR_JITTER_US 20000
/* STARTUP ends when a round loses more than 20 % without growth: the queue overflows. */
#define VTL_BBR_LOSS_FULL 13107
/* Loss above the usual rate that is still attributed to chance: 2 %. */
#define VTL_BBR_LOSS_SLACK 1311
/* Consecutive rounds without a queue after which a competitor is considered gone. */
#define VTL_BBR_GONE 8
/* HOLD begins when, so many times in a row, packets were lost before this share (in 16ths) of the
 * window that the decrease before took away had come back. Flows of CUBIC that lost nothing
 * themselves need K/2 to fill the room, after which 14/16 have come back. */
#define VTL_BBR_HOLD_LOSSES 2
#define VTL_BBR_HOLD_SHARE 11
/* Window in HOLD, bandwidth-delay products in 256ths, and the least interval of probes, round
 * trips. */
#define VTL_BBR_HOLD_GAIN 512
#define VTL_BBR_HOLD_CRUISE 5
/* Share of reordered packets (1/8, in 65,536ths) from which on the minimum round trip is that of a
 * few that overtake the others. */
#define VTL_BBR_LATE 8192

/* State of the model, initially zero. Of a session: written by the listener, before the first
 * packet by egress. Rates in packets per 1,024 seconds. */
struct vtl_bbr {
    __u64 bw_max[VTL_BBR_ROUNDS]; /* maximum delivery rate in each of the latest rounds */
    __u64 bw;                     /* maximum of those */
    __u64 full_bw;                /* STARTUP: the rate that growth is compared with */
    __u64 next_round;             /* `delivered` at which the round ends */
    __u64 min_rtt_ns_at;          /* time of the latest sample near `min_rtt_us` */
    __u64 phase_ns;               /* start of the phase */
    __u64 phase_bw;               /* bw at that time */
    __u64 probe_rtt_end_ns;
    __u64 last_lost; /* tx.lost_total at the end of the latest round */
    /* competition with a flow that fills the queue */
    __u64 window;    /* packets, after CUBIC */
    __u64 max;       /* window at the latest loss; in VTL_BBR_TRY: window of the phase */
    __u64 epoch_ns;  /* time of the latest loss */
    __u32 k_ms;      /* time from the epoch until the window is `max` again */
    __u32 competing; /* enum vtl_bbr_competing */
    __u32 busy; /* consecutive times that the queue did not drain; while competing: rounds in a row
                 * without a queue until competition ends */
    __u32 vain; /* consecutive decreases after which packets were lost again early */
    __u32 yielded; /* round of the latest multiplicative decrease */
    __u32 rounds;
    __u32 phase_round; /* round in which the phase began */
    __u32 slot;        /* entry of bw_max for the current round */
    __u32 min_rtt_us;
    __u32 round_min_us; /* minimum round-trip time of this round */
    __u32 probe_us;     /* minimum in PROBE_RTT */
    __u32 known;        /* enum vtl_bbr_known */
    __u32 mode;         /* enum vtl_bbr_mode */
    __u32 phase;        /* enum vtl_bbr_phase */
    __u32 full_count;
    __u32 loss_q16;      /* smoothed loss rate, 65,536 = all */
    __u32 floor_q16;     /* the path's own loss rate: that of phases below the bottleneck's rate */
    __u32 round_sent;    /* transmissions, as vtl_meter counts them, and arrivals, */
    __u32 round_arrived; /* at the latest update of `loss_q16` */
    __u32 less_from;     /* first transmission of the latest phase below the bottleneck's rate, */
    __u32 less_to;       /* first transmission after it; */
    __u32 less;          /* 1 during the phase */
    __u32 less_sent;     /* transmissions in such phases since the latest update of `floor_q16` */
    __u32 less_arrived;
    __u32 queued;    /* no sample of the latest round showed the queue empty */
    __u32 marks;     /* packets marked by the path (ECN CE), modulo 2^16, */
    __u32 marked;    /* 1 if any in this round */
    __u32 from_us;   /* EMPTY and TRY, or competing: minimum round-trip time before, 0 once another
                      * was seen */
    __u32 from;      /* competing: maximum in flight at that round-trip time, */
    __u32 alone;     /* rounds in a row with half of it or less in flight */
    __u32 round_end; /* STARTUP: transmissions at the round's start. Once their fate is known, it
                      * ends, however many were lost */
    __u32 swelled; /* STARTUP: bit 0 if a sample of this round showed a queue of ours, bit 1 if one
                    * of the round before did; */
    __u32 filled;  /* 1 if any did since it began: `bw` is the path's, however little it is */
};

/* What other connections know of the path when the session begins: nothing; the handshake's round
 * trip; a shorter one, until PROBE_RTT has looked for it. */
enum vtl_bbr_known { VTL_BBR_STRANGE, VTL_BBR_KNOWN, VTL_BBR_DOUBTED };

enum vtl_bbr_mode { VTL_BBR_STARTUP, VTL_BBR_DRAIN, VTL_BBR_PROBE_BW, VTL_BBR_PROBE_RTT };

/* Phases of VTL_BBR_PROBE_BW: UP probes for bandwidth, DOWN drains the probe's queue, CRUISE keeps
 * to the rate, EMPTY drains a standing queue, TRY tells whether the path has become longer. */
enum vtl_bbr_phase { VTL_BBR_UP, VTL_BBR_DOWN, VTL_BBR_CRUISE, VTL_BBR_EMPTY, VTL_BBR_TRY };

/* What the window follows: the model; CUBIC, against a competitor; or, against one that does not
 * answer to losses, the model with a standing queue. */
enum vtl_bbr_competing { VTL_BBR_ALONE, VTL_BBR_CUBIC, VTL_BBR_HOLD };

/* Input of the model, per acknowledgement, and its output (`cwnd`, `pace`). */
struct vtl_bbr_ack {
    __u64 now;          /* ns */
    __u64 rate;         /* delivery rate sample, packets per 1,024 s; 0 = none */
    __u64 delivered;    /* packets delivered in total */
    __u64 newly;        /* packets newly delivered by this acknowledgement */
    __u64 lost;         /* transmissions declared lost in total */
    __u64 in_flight;    /* packets, after this acknowledgement */
    __u64 waiting;      /* the model: packets that count as in flight only because acknowledgements
                         * wait behind the peer's data; the model takes them out of `in_flight` */
    __u64 cwnd;         /* congestion window, packets: the present one; the model sets the next */
    __u64 pace;         /* the model: pacing rate, packets per 1,024 s; 0 = unpaced */
    __u32 transmitted;  /* transmissions in total, modulo 2^32, as the following four */
    __u32 told;         /* transmissions whose fate is known, */
    __u32 told_arrived; /* and arrivals among them and earlier ones */
    __u32 sent;         /* growth of `told` since the previous acknowledgement */
    __u32 arrived;      /* growth of `told_arrived`, likewise */
    __u32 rtt_us;       /* round-trip sample; 0 = none */
    __u32 srtt_us;      /* smoothed round-trip time (RFC 6298) */
    __u32 rttvar_us;    /* its variation */
    __u32 waited_us;    /* part of the round trip spent behind the peer's own data */
    __u32 reordering_extent; /* vtl_tx.reordering_extent */
    __u32 reordered_q16;     /* vtl_tx.reordered_q16 */
    __u32 marks;             /* packets that the path has marked (ECN) so far, modulo 2^16 */
    __u32 app_limited;       /* the sample says more about the application than about the path */
    __u32 initial;           /* packets, the initial window; 0 = vtl_bbr_initial */
};

/*
 * Initial window in packets: one per millisecond of round-trip time (about 12 Mbit/s), from 32 to
 * 128. Startup costs most on long paths, few of which are slower; 128 packets are less than the
 * bandwidth-delay product of those.
 */
VTL_INLINE __u32 vtl_bbr_initial(__u32 rtt_us) {
    __u32 window = rtt_us / 1000;
    return window < VTL_BBR_INITIAL_CWND ? VTL_BBR_INITIAL_CWND : window > 128 ? 128 : window;
}

/* Initialises the model. `srtt_us`: the round trip of the handshake, 0 if unknown. */
VTL_INLINE void vtl_bbr_start(struct vtl_bbr *b, __u64 now, __u32 srtt_us) {
    if (!b->floor_q16)
        b->floor_q16 = VTL_BBR_LOSS_ASSUMED;
    /* The first data samples may include a queue, but serialisation, too: allow an eighth. */
    b->min_rtt_us = srtt_us + srtt_us / 8;
    b->min_rtt_ns_at = now;
    b->probe_rtt_end_ns = now;
}

/* Pacing gain of the present mode and phase, in 256ths. */
VTL_INLINE __u32 vtl_bbr_gain(const struct vtl_bbr *b) {
    switch (b->mode) {
    case VTL_BBR_STARTUP:
        return b->filled ? VTL_BBR_FILLED_GAIN : VTL_BBR_HIGH_GAIN;
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
            return b->queued && b->competing != VTL_BBR_HOLD ? VTL_BBR_QUEUED_GAIN : 256;
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

/* Round trip without the time that the acknowledgement waited behind the peer's data; at least the
 * minimum. */
VTL_INLINE __u32 vtl_bbr_own(const struct vtl_bbr *b, __u32 rtt_us, __u32 waited_us) {
    return rtt_us > b->min_rtt_us + waited_us ? rtt_us - waited_us : b->min_rtt_us;
}

/* Additional packets in flight where a few packets overtake most others, whose round trip is longer
 * than the minimum. */
VTL_INLINE __u64 vtl_bbr_late(const struct vtl_bbr *b, const struct vtl_bbr_ack *a) {
    __u64 max = 2 * vtl_bbr_bdp(b, b->bw, 256);
    if (a->reordered_q16 < VTL_BBR_LATE)
        return 0;
    return a->reordering_extent < max ? a->reordering_extent : max;
}

/* Threshold of the round trip below which the queue counts as empty: 7/6 of the minimum, plus
 * allowances for hosts, one packet's serialisation, and reordering. */
VTL_INLINE __u32 vtl_bbr_empty_us(const struct vtl_bbr *b, const struct vtl_bbr_ack *a) {
    __u64 packets = b->bw ? (1 + vtl_bbr_late(b, a)) * 1024 * 1000000 / b->bw : 0;
    return b->min_rtt_us + b->min_rtt_us / 6 + VTL_BBR_HOST_US / 4 + packets;
}

/* Whether in flight has fallen to a bandwidth-delay product, or to the minimum window. */
VTL_INLINE int vtl_bbr_drained(struct vtl_bbr *b, const struct vtl_bbr_ack *a) {
    __u64 bdp = vtl_bbr_bdp(b, b->bw, 256);
    bdp += vtl_bbr_late(b, a);
    return a->in_flight <= (bdp > VTL_BBR_MIN_CWND ? bdp : VTL_BBR_MIN_CWND);
}

/* Enters a phase of PROBE_BW. */
VTL_INLINE void vtl_bbr_enter(struct vtl_bbr *b, struct vtl_bbr_ack *a, __u32 phase) {
    b->mode = VTL_BBR_PROBE_BW;
    b->phase = phase;
    b->phase_ns = a->now;
    b->phase_bw = b->bw;
    b->phase_round = b->rounds;
}

/* Enters DRAIN. */
VTL_INLINE void vtl_bbr_drain(struct vtl_bbr *b) {
    b->mode = VTL_BBR_DRAIN;
    b->phase_round = b->rounds;
}

/* Delivery rate of the latest round. */
VTL_INLINE __u64 vtl_bbr_latest(const struct vtl_bbr *b) {
    __u32 last = b->slot ? b->slot - 1 : VTL_BBR_ROUNDS - 1;
    return last < VTL_BBR_ROUNDS ? b->bw_max[last] : 0;
}

/* Caps the maximum filter of the delivery rate at `bw`. */
VTL_GLOBAL int vtl_bbr_slower(struct vtl_bbr *b, __u64 bw) {
    if (!b || !bw || bw >= b->bw)
        return 0;
    for (int i = 0; i < VTL_BBR_ROUNDS; i++)
        b->bw_max[i] = b->bw_max[i] < bw ? b->bw_max[i] : bw;
    b->bw = bw;
    return 0;
}

/* Enters EMPTY. While a queue stands, each sample is this flow's share of the link, so the latest
 * replaces the maximum: otherwise flows that share the queue would keep it standing. */
VTL_GLOBAL int vtl_bbr_empty(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    __u64 bw = vtl_bbr_latest(b);
    /* At most 25 % at a time, unless the queue has kept the link busy all the time: the round may
     * have lost much by chance. */
    if (bw < b->bw - b->bw / 4 && b->round_min_us < 2 * b->min_rtt_us)
        bw = b->bw - b->bw / 4;
    if (!a->app_limited)
        vtl_bbr_slower(b, bw);
    /* CUBIC's start against a competitor: the window before draining in vain. */
    if (!b->busy)
        b->window = a->cwnd > a->waiting ? a->cwnd - a->waiting : 0;
    if (!b->competing)
        b->from_us = b->round_min_us;
    vtl_bbr_enter(b, a, VTL_BBR_EMPTY);
    return 0;
}

/* Starts a CUBIC epoch (RFC 9438, 4.2): from `from` towards `max` and beyond. */
VTL_INLINE void vtl_bbr_epoch(struct vtl_bbr *b, struct vtl_bbr_ack *a, __u64 max, __u64 from) {
    b->max = max;
    b->window = from;
    b->epoch_ns = a->now;
    /* (max - from) / 0.4, in cubic milliseconds */
    b->k_ms = vtl_cube_root((max - from) * 2500000000ull);
}

/* Starts to compete with a flow that fills the queue: CUBIC's window from now on. */
VTL_INLINE void vtl_bbr_compete(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    b->competing = 1;
    b->busy = VTL_BBR_GONE;
    b->from = 0;
    b->yielded = b->rounds;
    vtl_bbr_epoch(b, a, b->window, b->window);
}

/* Restarts the model in STARTUP. */
VTL_INLINE void vtl_bbr_anew(struct vtl_bbr *b) {
    b->competing = b->busy = 0;
    b->mode = VTL_BBR_STARTUP;
    b->full_bw = b->full_count = 0;
    b->filled = 0;
}

/* Rounds until the minimum round trip reflects a change of in flight: a reduction, and an increase,
 * which the first packets of a round do not queue behind yet. */
#define VTL_BBR_LESS 2
#define VTL_BBR_MORE 3

/* Whether the round's minimum is unchanged (1/64 and 250 us) though in flight has changed. */
VTL_INLINE int vtl_bbr_same(const struct vtl_bbr *b) {
    __u32 slack = b->from_us / 64 + VTL_BBR_HOST_US / 4;
    return b->round_min_us + slack >= b->from_us && b->round_min_us <= b->from_us + slack;
}

/* At the end of a round in competition: whether there is no competitor. Its queue would shrink with
 * our in flight; if the round trip stays the same with half as much in flight, it is the path's. */
VTL_GLOBAL int vtl_bbr_alone(struct vtl_bbr *b, struct vtl_bbr_ack *a, int congested) {
    if (!b || !a)
        return 0;
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

/* At the end of a round of EMPTY or TRY: detects a longer path. */
VTL_GLOBAL int vtl_bbr_longer(struct vtl_bbr *b, struct vtl_bbr_ack *a, int congested) {
    if (!b || !a)
        return 0;
    if (b->mode != VTL_BBR_PROBE_BW || b->phase < VTL_BBR_EMPTY || b->competing)
        return 0;
    __u32 spent = b->rounds - b->phase_round;
    if (congested || (b->phase == VTL_BBR_TRY && a->app_limited) || !vtl_bbr_same(b))
        b->from_us = 0;
    /* TRY proves nothing if the application keeps less in flight than the path holds. */
    int is_window_limited = 4 * a->in_flight >= 3 * vtl_bbr_bdp(b, b->bw, 256);
    if (b->phase == VTL_BBR_EMPTY && spent == VTL_BBR_LESS && b->from_us && is_window_limited) {
        b->max = a->in_flight + a->in_flight / 2;
        vtl_bbr_enter(b, a, VTL_BBR_TRY);
    } else if (b->phase == VTL_BBR_TRY && spent == VTL_BBR_MORE) {
        /* Only if TRY did fill its window; allow for acknowledgements in between. */
        if (b->from_us && a->in_flight + a->in_flight / 4 + 2 >= b->max) {
            b->min_rtt_us = b->round_min_us;
            b->min_rtt_ns_at = a->now;
            vtl_bbr_anew(b);
            return 0;
        }
        if (!b->queued)
            b->busy = 0;
        else if (++b->busy >= 3)
            vtl_bbr_compete(b, a);
        vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
    }
    return 0;
}

/* Multiplicative decrease (0.7) at the end of a round with losses, in competition, at most once in
 * two rounds: losses of the next were sent before the decrease. Or HOLD, where decreases are in
 * vain. */
VTL_GLOBAL int vtl_bbr_yield(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    if (b->rounds - b->yielded < 2)
        return 0;
    b->yielded = b->rounds;
    __u64 from = b->max * VTL_BBR_BETA / 256;
    __u64 back = b->window > from ? b->window - from : 0;
    int is_early = b->window < b->max && back * 16 < (b->max - from) * VTL_BBR_HOLD_SHARE;
    b->vain = is_early ? b->vain + 1 : 0;
    if (b->vain >= VTL_BBR_HOLD_LOSSES) {
        b->competing = VTL_BBR_HOLD;
        b->vain = 0;
        vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
        return 0;
    }
    __u64 less = b->window * VTL_BBR_BETA / 256;
    vtl_bbr_epoch(b, a, b->window, less > VTL_BBR_MIN_CWND ? less : VTL_BBR_MIN_CWND);
    return 0;
}

/* Takes the result of PROBE_RTT. A longer one may be due to others' queue, which must not be taken
 * for the path (all windows would grow with it), so only a quarter of the difference counts; a few
 * probes follow a real change. */
VTL_INLINE void vtl_bbr_probed(struct vtl_bbr *b, __u64 now, __u32 seen_us) {
    if (seen_us > b->min_rtt_us)
        seen_us = b->min_rtt_us + (seen_us - b->min_rtt_us) / 4;
    b->min_rtt_us = seen_us;
    b->min_rtt_ns_at = now;
}

/* Enters PROBE_RTT. */
VTL_INLINE void vtl_bbr_probe(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (b->competing == VTL_BBR_HOLD)
        b->window = a->in_flight;
    b->mode = VTL_BBR_PROBE_RTT;
    b->phase_round = b->rounds;
    b->probe_rtt_end_ns = a->now + VTL_BBR_PROBE_RTT_NS + 3 * b->min_rtt_us * VTL_NS_PER_US;
    b->probe_us = ~0u;
    b->min_rtt_ns_at = a->now;
}

/* Loss rate in 65,536ths. Reordered packets may make it higher. */
VTL_INLINE __u32 vtl_bbr_share(__u32 sent, __u32 arrived) {
    return arrived < sent ? (sent - arrived) * 65536ull / sent : 0;
}

/*
 * Updates the path's own loss rate (`floor_q16`): that of phases that send less than the
 * bottleneck's rate, when neither a queue overflows nor a policer drops. It may be compensated
 * however high it is.
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

/* Loss rate that the pacing rate compensates: the path's own, plus a margin for chance. */
VTL_INLINE __u32 vtl_bbr_made_up(const struct vtl_bbr *b) {
    __u32 max = b->floor_q16 + b->floor_q16 / 8 + 256;
    __u32 loss = b->loss_q16 < max ? b->loss_q16 : max;
    return loss < VTL_BBR_LOSS_MAX ? loss : VTL_BBR_LOSS_MAX;
}

/*
 * Takes the losses of `sent` transmissions, of which `arrived` have come. `emptying`: a queue is
 * being drained on purpose.
 */
VTL_GLOBAL int vtl_bbr_losses(struct vtl_bbr *b, struct vtl_bbr_ack *a, __u32 sent, __u32 arrived,
                              int emptying) {
    if (!b || !a)
        return 0;
    __u32 share = vtl_bbr_share(sent, arrived);
    /* High random loss is no full pipe while the rate still grows. */
    if (b->mode == VTL_BBR_STARTUP && share > VTL_BBR_LOSS_FULL &&
        (b->queued || b->bw * 4 < b->full_bw * 5))
        vtl_bbr_drain(b);
    /* With a queue, losses may be due to overflow: the estimate only decays. Not updated in
     * DRAIN (overflow of STARTUP), nor in EMPTY and TRY, which compare with it. */
    if (b->mode == VTL_BBR_DRAIN || (emptying && !b->competing))
        ;
    else if (!(b->queued || b->swelled & 1) || share < b->loss_q16)
        b->loss_q16 = (3 * b->loss_q16 + share) / 4;
    else
        b->loss_q16 -= b->loss_q16 / 16;
    /* Hardly random loss: the minimum round trip may include a queue, so probe it. */
    if (b->loss_q16 > b->floor_q16 + VTL_BBR_LOSS_ASSUMED && b->mode == VTL_BBR_PROBE_BW &&
        !b->competing && a->now - b->probe_rtt_end_ns > VTL_BBR_MIN_RTT_NS / 2)
        vtl_bbr_probe(b, a);
    b->round_sent += sent;
    b->round_arrived += arrived;
    return 0;
}

/* At the end of a round trip: filters, losses, phases. */
VTL_GLOBAL int vtl_bbr_round(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    b->next_round = a->delivered + a->in_flight + a->waiting;
    b->round_end = a->transmitted;
    b->rounds++;
    /* PROBE_RTT measures no rate: the maximum filter stands still. */
    if (b->mode != VTL_BBR_PROBE_RTT)
        b->slot = b->slot + 1 < VTL_BBR_ROUNDS ? b->slot + 1 : 0;
    if (b->mode != VTL_BBR_PROBE_RTT && b->slot < VTL_BBR_ROUNDS)
        b->bw_max[b->slot] = 0;
    __u32 marked = b->marked;
    int emptying = vtl_unknown(b->mode == VTL_BBR_PROBE_BW && b->phase >= VTL_BBR_EMPTY);
    b->marked = 0;
    /* A round may be without a sample: TCP has none of retransmissions. */
    int measured = vtl_unknown(b->round_min_us != ~0u);
    if (measured)
        b->queued = b->round_min_us > vtl_bbr_empty_us(b, a);
    b->queued |= marked != 0;
    __u32 sent = a->told - b->round_sent;
    __u32 arrived = a->told_arrived - b->round_arrived;
    __u32 lost = vtl_unknown(arrived < sent ? sent - arrived : 0);
    if (b->competing == VTL_BBR_CUBIC && (marked || a->lost > b->last_lost))
        vtl_bbr_yield(b, a);
    if (b->competing && b->queued)
        b->busy = VTL_BBR_GONE;
    else if (b->competing && b->mode == VTL_BBR_PROBE_BW && !--b->busy)
        vtl_bbr_anew(b);
    b->last_lost = a->lost;
    /* The usual loss, plus a margin for chance. */
    __u64 usual = sent * (2ull * b->loss_q16 + VTL_BBR_LOSS_SLACK) / 65536 + 3;
    if (sent >= VTL_BBR_LOSS_PACKETS)
        vtl_bbr_losses(b, a, sent, arrived, emptying);
    /* A queue in two rounds running has kept the bottleneck busy, so the rate is known, and it has
     * overflowed: more of the same would be lost. */
    if (b->mode == VTL_BBR_STARTUP && b->swelled == 3 && a->lost && b->bw * 4 < b->full_bw * 5)
        vtl_bbr_drain(b);
    b->swelled = b->swelled << 1 & 3;
    /* Bandwidth reduction: the full queue loses far more than usual, so the latest round's rate is
     * the bottleneck's, unless the queue is being drained on purpose. */
    if (b->queued && (b->mode == VTL_BBR_DRAIN || b->mode == VTL_BBR_PROBE_BW) && !b->competing &&
        !emptying && sent >= VTL_BBR_LOSS_PACKETS && lost > sent / 8 && lost > usual)
        vtl_bbr_slower(b, vtl_bbr_latest(b));
    if (b->queued && measured && b->competing != VTL_BBR_HOLD && b->rounds - b->phase_round >= 2 &&
        (b->mode == VTL_BBR_DRAIN || (b->mode == VTL_BBR_PROBE_BW && b->phase == VTL_BBR_CRUISE)))
        vtl_bbr_empty(b, a);
    if (b->competing && vtl_bbr_alone(b, a, marked || lost > usual))
        vtl_bbr_anew(b);
    vtl_bbr_longer(b, a, marked || lost > usual);
    b->round_min_us = ~0u;
    if (b->mode != VTL_BBR_STARTUP || !b->bw)
        return 0;
    /* Growth counts in every round; an application-limited round is no sign of a full pipe. */
    if (b->bw * 4 >= b->full_bw * 5) {
        b->full_bw = b->bw;
        b->full_count = 0;
    } else if (!a->app_limited && ++b->full_count >= (b->queued ? 2 : 3)) {
        vtl_bbr_drain(b);
    }
    return 0;
}

/* Takes a sample of the delivery rate into the maximum filter. */
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

/* Takes a round-trip sample into the minimum filter, and enters PROBE_RTT when that is due. */
VTL_INLINE void vtl_bbr_min_rtt(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!a->rtt_us)
        return;
    if (a->rtt_us < b->round_min_us)
        b->round_min_us = a->rtt_us;
    int expired = a->now - b->min_rtt_ns_at > VTL_BBR_MIN_RTT_NS;
    /* A first sample of more than 8 times the handshake's: the handshake took another path, unless
     * others have seen it, too. */
    int wrong = !b->min_rtt_us || (!b->rounds && !b->known && a->rtt_us > 8ull * b->min_rtt_us);
    /* Samples within 2 % of the minimum replace PROBE_RTT. */
    __u32 slack = b->min_rtt_us / 50;
    int shorter = wrong || a->rtt_us + slack < b->min_rtt_us;
    int near = a->rtt_us <= b->min_rtt_us + slack;
    if (wrong || a->rtt_us < b->min_rtt_us)
        b->min_rtt_us = a->rtt_us;
    if (near && a->app_limited && b->mode != VTL_BBR_PROBE_RTT)
        b->probe_rtt_end_ns = a->now;
    __u64 trust = VTL_BBR_TRUST_NS + VTL_BBR_TRUST_RTTS * VTL_NS_PER_US * b->min_rtt_us;
    if (b->known == VTL_BBR_DOUBTED && b->mode == VTL_BBR_PROBE_BW) {
        b->known = VTL_BBR_KNOWN;
        vtl_bbr_probe(b, a);
    } else if (shorter || (near && a->now - b->probe_rtt_end_ns < trust)) {
        b->min_rtt_ns_at = a->now;
    } else if (b->mode == VTL_BBR_PROBE_BW &&
               /* In competition every 2^33 ns (8.6 s) of the clock, at the same time as others. */
               (expired || (b->competing && !near && a->now >> 33 != b->phase_ns >> 33))) {
        vtl_bbr_probe(b, a);
    }
    if (b->mode == VTL_BBR_PROBE_RTT && b->rounds - b->phase_round >= 2 && a->rtt_us < b->probe_us)
        b->probe_us = a->rtt_us;
}

/*
 * In STARTUP: notes a full path. The round trips of packets that leave faster than the path carries
 * them grow, whatever their rate samples are worth. By an eighth is less than the shortest queue of
 * most paths. A queue of ours has no more packets than are in flight (Little's law): else the path
 * has become longer, or a host or the medium was busy for a while. Before the first sample of the
 * rate there is nothing that could count.
 */
VTL_GLOBAL int vtl_bbr_swell(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a || b->mode != VTL_BBR_STARTUP || !b->bw)
        return 0;
    __u32 min_us = b->min_rtt_us;
    if (b->rounds && b->round_min_us < min_us)
        min_us = b->round_min_us;
    __u64 packets = (2 + vtl_bbr_late(b, a)) * 1024 * 1000000 / b->bw;
    if (a->rtt_us <= min_us + min_us / 8 + VTL_BBR_HOST_US + packets)
        return 0;
    __u64 in_flight = a->in_flight + a->newly;
    if (b->bw / 1024 * a->rtt_us / 1000000 > 2 * in_flight)
        return 0;
    /* Where the application or the ring is the limit, a longer path must not end STARTUP. */
    b->swelled |= !a->app_limited;
    b->filled = 1;
    return 0;
}

/* Phase transitions. */
VTL_GLOBAL int vtl_bbr_mode(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    __u64 rtt_ns = b->min_rtt_us * VTL_NS_PER_US;
    __u64 spent = a->now - b->phase_ns;
    /* 2 to 5 round trips, 5 to 8 in HOLD, desynchronised from others: a flow with more than its
     * share loses to those that probe while it cruises. */
    __u32 cruise = (b->competing ? VTL_BBR_HOLD_CRUISE : 2) + (b->phase_ns >> 10 & 3);
    int empty = vtl_unknown(a->rtt_us && a->rtt_us <= vtl_bbr_empty_us(b, a));
    if (b->mode == VTL_BBR_DRAIN) {
        if (vtl_bbr_drained(b, a))
            vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
    } else if (b->mode == VTL_BBR_PROBE_BW && b->competing != VTL_BBR_CUBIC) {
        switch (b->phase) {
        case VTL_BBR_UP:
            if (spent < rtt_ns)
                break;
            /* The rate still grows without a queue: repeat. */
            if (empty && b->bw > b->phase_bw + b->phase_bw / 8)
                vtl_bbr_enter(b, a, VTL_BBR_UP);
            else if (a->in_flight >= vtl_bbr_bdp(b, b->bw, VTL_BBR_UP_GAIN) || b->marked ||
                     spent > 3 * rtt_ns)
                vtl_bbr_enter(b, a, VTL_BBR_DOWN);
            break;
        case VTL_BBR_DOWN:
            /* Until the probe's queue is drained. */
            if (vtl_bbr_drained(b, a) || spent > (b->competing ? 1 : 2) * rtt_ns)
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
            if ((b->competing || !b->queued) && spent > cruise * rtt_ns)
                vtl_bbr_enter(b, a, VTL_BBR_UP);
        }
    } else if (b->mode == VTL_BBR_PROBE_RTT && a->now > b->probe_rtt_end_ns && b->probe_us != ~0u) {
        /* After HOLD a decrease shows whether the competitor answers by now. */
        if (b->competing == VTL_BBR_HOLD) {
            b->competing = VTL_BBR_CUBIC;
            b->vain = VTL_BBR_HOLD_LOSSES - 1;
            b->yielded = b->rounds;
            vtl_bbr_epoch(b, a, b->window, b->window * VTL_BBR_BETA / 256);
        }
        if (b->probe_us <= vtl_bbr_empty_us(b, a)) {
            /* One that is back, as BBRv1 is after its own probe, is known at once. */
            b->busy = b->competing ? 2 : 0;
            b->competing = VTL_BBR_ALONE;
        }
        vtl_bbr_probed(b, a->now, b->probe_us);
        vtl_bbr_enter(b, a, VTL_BBR_CRUISE);
    }
    return 0;
}

/* CUBIC's window in packets (RFC 9438, 4.2). */
VTL_INLINE __u64 vtl_bbr_cubic(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    __u64 ms = (a->now - b->epoch_ns) / VTL_NS_PER_MS;
    __u64 off = ms > b->k_ms ? ms - b->k_ms : b->k_ms - ms;
    if (off > 60000)
        off = 60000;
    /* 0.4 packets for the cube of each second */
    __u64 cube = off * off * off / 1000 * 2 / 5000000;
    __u64 window = ms > b->k_ms ? b->max + cube : b->max > cube ? b->max - cube : 0;
    /* Only while the window is the limit. */
    if (window > b->window && a->in_flight + a->newly + 16 >= b->window)
        b->window = window;
    return b->window;
}

/* Notes ECN marks of this round. */
VTL_INLINE void vtl_bbr_marks(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if ((__s16)(a->marks - b->marks) <= 0)
        return;
    b->marks = a->marks;
    b->marked = 1;
}

/* Sets `cwnd` and `pace`. */
VTL_GLOBAL int vtl_bbr_limits(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    if (!b || !a)
        return 0;
    /* STARTUP sends at least the initial window per round trip until it has filled the path: the
     * first samples may be limited by the application. */
    __u64 bw = b->bw;
    __u32 rtt = b->min_rtt_us ? b->min_rtt_us : VTL_BBR_UNKNOWN_RTT_US;
    __u32 window = a->initial ? a->initial : vtl_bbr_initial(rtt);
    __u32 min = window < VTL_BBR_INITIAL_CWND ? window : VTL_BBR_INITIAL_CWND;
    __u64 initial = (__u64)window * 1024 * 1000000 / rtt;
    if (b->mode == VTL_BBR_STARTUP && !b->filled && bw < initial)
        bw = initial;
    __u64 made_up = bw * 65536 / (65536 - vtl_bbr_made_up(b));
    __u32 pace_gain = vtl_unknown(vtl_bbr_gain(b));
    __u32 less = vtl_unknown(!b->competing && pace_gain <= VTL_BBR_DOWN_GAIN);
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
    } else if (b->competing == VTL_BBR_CUBIC) {
        cwnd = vtl_bbr_cubic(b, a);
        /* 1.25 windows per round trip, in packets per 1,024 s */
        pace = cwnd * 1280 * 1000000 / own;
    } else {
        pace = (b->queued && b->mode == VTL_BBR_PROBE_BW ? bw : made_up) * pace_gain / 256;
        int starting = vtl_unknown(b->mode == VTL_BBR_STARTUP || b->mode == VTL_BBR_DRAIN);
        int emptying = vtl_unknown(b->mode == VTL_BBR_PROBE_BW && b->phase == VTL_BBR_EMPTY);
        int trying = b->mode == VTL_BBR_PROBE_BW && b->phase == VTL_BBR_TRY;
        __u32 gain = starting ? 512 : b->competing ? VTL_BBR_HOLD_GAIN : VTL_BBR_UP_GAIN;
        cwnd = vtl_bbr_bdp(b, made_up, gain);
        /* One bandwidth-delay product drains a queue of our own without a gap; after two rounds in
         * vain 0.75, as several flows may share it. */
        if (emptying)
            cwnd =
                vtl_bbr_bdp(b, made_up, b->rounds - b->phase_round < 2 ? 256 : VTL_BBR_DOWN_GAIN);
        /* Allow for delayed and aggregated acknowledgements, reordering and jitter. */
        cwnd += emptying ? 0 : 2 * vtl_ack_every(cwnd) + 2;
        cwnd += vtl_bbr_late(b, a);
        /* Bounded, since a queue makes round trips vary, too. */
        __u64 jitter = 2 * a->rttvar_us;
        __u64 max = b->min_rtt_us > VTL_BBR_JITTER_US ? b->min_rtt_us : VTL_BBR_JITTER_US;
        if (jitter > max)
            jitter = max;
        cwnd += bw / 1024 * (VTL_BBR_HOST_US + jitter) / 1000000;
        if (starting && cwnd < min && !(b->filled && a->lost))
            cwnd = min;
        /* Without samples that count, at most two packets for each that arrived. */
        if (b->mode == VTL_BBR_STARTUP && !b->filled && cwnd > window + 2 * a->delivered)
            cwnd = window + 2 * a->delivered;
        /* Packet conservation (RFC 6937): what is in flight includes losses that only later packets
         * reveal. */
        if (b->mode == VTL_BBR_STARTUP && b->filled && cwnd < a->in_flight + a->newly)
            cwnd = a->in_flight + a->newly;
        if (trying) {
            cwnd = b->max;
            pace = cwnd * 1280 * 1000000 / own;
        }
    }
    a->pace = pace;
    cwnd += a->waiting;
    a->cwnd = cwnd > VTL_BBR_MIN_CWND ? cwnd : VTL_BBR_MIN_CWND;
    return 0;
}

/* Processes an acknowledgement: sets `cwnd` and `pace`. */
VTL_INLINE void vtl_bbr_update(struct vtl_bbr *b, struct vtl_bbr_ack *a) {
    /* Acknowledgements that wait behind the peer's own data do not count in this direction. */
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
    vtl_bbr_swell(b, a);
    /* Packets given up do not prolong the round. */
    if (b->next_round > a->delivered + a->in_flight + a->waiting)
        b->next_round = a->delivered + a->in_flight + a->waiting;
    int is_told = b->mode == VTL_BBR_STARTUP && (__s32)(a->told - b->round_end) >= 0;
    if (a->delivered >= b->next_round || is_told)
        vtl_bbr_round(b, a);
    vtl_bbr_mode(b, a);
    vtl_bbr_limits(b, a);
}

#endif
