/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: common part of tf_newreno, tf_cubic and tf_hybla, which are interchangeable.
 * Each is a function of the listener that sets tx.cwnd (packets) after every acknowledgement, and
 * tx.pacing_gap_ns, so that no window leaves in one burst; tf_tfrc has its own state and sets a
 * rate. Others fit in the same place: their input is the acknowledgement (struct vtl_ackd) and
 * vtl_cc_event, their output vtl_tx.
 *
 * Congestion events are losses and ECN marks (RFC 3168): at most one per round trip, however many
 * packets it hits.
 */
#ifndef VTL_TF_CONGESTION_H
#define VTL_TF_CONGESTION_H

#include "vtl/tf.h"

enum {
    VTL_CC_INITIAL_WINDOW = 10, /* packets: RFC 6928 */
    VTL_CC_MIN_WINDOW = 2,
};

enum vtl_cc_what { VTL_CC_NOTHING, VTL_CC_LOSS, VTL_CC_MARK, VTL_CC_TIMEOUT };

/* Written by the listener, before the first packet by egress. */
struct vtl_cc {
    __u64 ssthresh;   /* slow start threshold (RFC 5681), packets */
    __u64 credit;     /* fraction of the window's next packet, in a unit of the algorithm's own */
    __u64 lost;       /* tx.lost_total at the latest check */
    __u32 recover;    /* xid of the first transmission after the latest congestion event */
    __u32 marks;      /* vtl_hdr.aux: packets marked by the path */
    __u32 timeout;    /* 1 if the retransmission timer had fired before this acknowledgement */
    __u32 min_rtt_us; /* Hybla: minimum round-trip time; 0: none yet */
    /* CUBIC. RFC 9438, 4.1.2; windows in 1,024ths of a packet */
    __u64 w_max;    /* window at the latest congestion event */
    __u64 epoch_ns; /* start of congestion avoidance; 0: not begun since */
    __u64 w_est;    /* what NewReno would have */
    __u32 k_ms;     /* K: time from the epoch until the window is `w_max` again */
    __u32 pad;
};

/* egress: before the first packet. */
VTL_INLINE void tf_cc_start(struct vtl_out *o, struct vtl_cc *cc) {
    struct vtl_tx *tx = &o->s->tx;
    if (tx->next)
        return;
    cc->ssthresh = VTL_NEVER;
    cc->recover = tx->xid - tx->reorder - 2;
    tx->cwnd = VTL_CC_INITIAL_WINDOW;
    tx->pacing_gap_ns = tx->srtt_us * VTL_NS_PER_US / (2 * VTL_CC_INITIAL_WINDOW);
}

/* listener: before tf_ack_cumulative, which clears the count of timeouts. */
VTL_INLINE void tf_cc_note(struct vtl_ackd *a, struct vtl_cc *cc) {
    cc->timeout = a->s->tx.timeouts && a->s->tx.una != VTL_LOAD(a->s->tx.next);
}

/* Congestion event since the last acknowledgement. */
VTL_INLINE enum vtl_cc_what vtl_cc_event(struct vtl_ackd *a, struct vtl_cc *cc) {
    struct vtl_tx *tx = &a->s->tx;
    __u32 marks = vtl_swap16(a->hdr->h.aux);
    int lost = tx->lost_total > cc->lost;
    int marked = (__s16)(marks - cc->marks) > 0; /* fewer: an older acknowledgement */
    cc->lost = tx->lost_total;
    if (marked)
        cc->marks = marks;
    if (cc->timeout) {
        cc->timeout = 0;
        cc->recover = VTL_LOAD(tx->xid);
        return VTL_CC_TIMEOUT;
    }
    /* Losses among packets sent before the latest event belong to it. They are detected, at the
     * latest, once packets sent after it have overtaken them by the reordering threshold. */
    if ((!lost && !marked) || (__s32)(tx->acked_xid - cc->recover) <= vtl_reordering_threshold(tx))
        return VTL_CC_NOTHING;
    cc->recover = VTL_LOAD(tx->xid);
    return lost ? VTL_CC_LOSS : VTL_CC_MARK;
}

/* Whether the congestion window is the limit. A window that the app does not fill says nothing
 * about the path (RFC 7661). */
VTL_INLINE int vtl_cc_is_window_limited(const struct vtl_ackd *a) {
    return 4 * (a->in_flight + a->delivered) >= 3 * a->s->tx.cwnd;
}

/* Slow start: grows by one packet per packet delivered, up to the threshold. Returns the packets
 * left for congestion avoidance. */
VTL_INLINE __u64 vtl_cc_slow_start(struct vtl_ackd *a, const struct vtl_cc *cc) {
    struct vtl_tx *tx = &a->s->tx;
    if (tx->cwnd >= cc->ssthresh)
        return a->delivered;
    __u64 grow = cc->ssthresh - tx->cwnd;
    if (grow > a->delivered)
        grow = a->delivered;
    tx->cwnd += grow;
    return a->delivered - grow;
}

/* Paces the window over the round trip: at twice its rate in slow start, at 1.25 times its rate
 * afterwards. */
VTL_INLINE void vtl_cc_pace(struct vtl_ackd *a, const struct vtl_cc *cc) {
    struct vtl_tx *tx = &a->s->tx;
    __u64 gap = tx->srtt_us * VTL_NS_PER_US / (tx->cwnd ? tx->cwnd : 1);
    tx->pacing_gap_ns = tx->cwnd < cc->ssthresh ? gap / 2 : gap * 4 / 5;
}

/* After a timeout: one packet, and slow start up to `threshold`. */
VTL_INLINE void vtl_cc_restart(struct vtl_ackd *a, struct vtl_cc *cc, __u64 threshold) {
    cc->ssthresh = threshold > VTL_CC_MIN_WINDOW ? threshold : VTL_CC_MIN_WINDOW;
    cc->credit = 0;
    a->s->tx.cwnd = 1;
}

/* After a congestion event: sets window and threshold. */
VTL_INLINE void vtl_cc_reduce(struct vtl_ackd *a, struct vtl_cc *cc, __u64 window) {
    cc->ssthresh = window > VTL_CC_MIN_WINDOW ? window : VTL_CC_MIN_WINDOW;
    cc->credit = 0;
    a->s->tx.cwnd = cc->ssthresh;
}

#endif
