/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: what the interchangeable ones share. Each is one function of the listener,
 * tf_newreno, tf_cubic or tf_hybla, which sets tx.cwnd (packets) after every acknowledgement and
 * tx.pacing_gap_ns, so that no window leaves in one burst; tf_tfrc has a state of its own and sets
 * a rate. Another one fits in the same place: it sees what an acknowledgement says (struct
 * vtl_ackd), vtl_cc_event tells it what happened to the path, and vtl_tx is its output.
 *
 * A loss, and a packet that the path marked instead of dropping it (ECN, RFC 3168), are events: one
 * for each round trip at most, however many packets it hits.
 */
#ifndef VTL_TF_CONGESTION_H
#define VTL_TF_CONGESTION_H

#include "vtl/tf.h"

enum {
    VTL_CC_INITIAL = 10, /* packets: RFC 6928 */
    VTL_CC_LEAST = 2,
};

enum vtl_cc_what { VTL_CC_NOTHING, VTL_CC_LOSS, VTL_CC_MARK, VTL_CC_TIMEOUT };

/* Listener, but before the first packet egress. */
struct vtl_cc {
    __u64 threshold; /* slow start ends there, packets */
    __u64 credit;    /* what is missing to the next packet of the window, in the unit of each */
    __u64 lost;      /* tx.lost_total when last looked at */
    __u32 recover;   /* xid of the first transmission after the latest event */
    __u32 marks;     /* vtl_hdr.aux: how many packets the path has marked */
    __u32 timeout;   /* the retransmission timer had fired when this acknowledgement came */
    __u32 min_rtt_us;
    /* CUBIC. Windows in 1,024ths of a packet */
    __u64 most;     /* window at the latest event */
    __u64 epoch_ns; /* 0: growth has not begun since */
    __u64 estimate; /* what NewReno would have */
    __u32 k_ms;     /* from the epoch until the window is `most` again */
    __u32 pad;
};

/* egress: before the first packet. */
VTL_INLINE void tf_cc_start(struct vtl_out *o, struct vtl_cc *cc) {
    struct vtl_tx *tx = &o->s->tx;
    if (tx->next)
        return;
    cc->threshold = VTL_NEVER;
    cc->recover = tx->xid - tx->reorder - 2;
    tx->cwnd = VTL_CC_INITIAL;
    tx->pacing_gap_ns = tx->srtt_us * VTL_NS_PER_US / (2 * VTL_CC_INITIAL);
}

/* listener: before tf_ack_cumulative, which ends the row of timeouts. */
VTL_INLINE void tf_cc_note(struct vtl_ackd *a, struct vtl_cc *cc) {
    cc->timeout = a->s->tx.timeouts && a->s->tx.una != VTL_LOAD(a->s->tx.next);
}

/* What happened since the last acknowledgement. */
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
    /* Losses among what was sent before the latest event are found once what was sent after it has
     * overtaken them by the reordering threshold, at the latest. */
    if ((!lost && !marked) || (__s32)(tx->acked_xid - cc->recover) <= vtl_overtakers(tx))
        return VTL_CC_NOTHING;
    cc->recover = VTL_LOAD(tx->xid);
    return lost ? VTL_CC_LOSS : VTL_CC_MARK;
}

/* Is it the window that holds the sender back? One that the app does not fill says nothing about
 * the path (RFC 7661). */
VTL_INLINE int vtl_cc_limited(const struct vtl_ackd *a) {
    return 4 * (a->in_flight + a->delivered) >= 3 * a->s->tx.cwnd;
}

/* Slow start: a packet more for each one that has arrived, up to the threshold. Returns what is
 * left for congestion avoidance. */
VTL_INLINE __u64 vtl_cc_slow_start(struct vtl_ackd *a, const struct vtl_cc *cc) {
    struct vtl_tx *tx = &a->s->tx;
    if (tx->cwnd >= cc->threshold)
        return a->delivered;
    __u64 grow = cc->threshold - tx->cwnd;
    if (grow > a->delivered)
        grow = a->delivered;
    tx->cwnd += grow;
    return a->delivered - grow;
}

/* Spreads the window over the round trip: twice as fast as it needs in slow start, a quarter faster
 * after that. */
VTL_INLINE void vtl_cc_pace(struct vtl_ackd *a, const struct vtl_cc *cc) {
    struct vtl_tx *tx = &a->s->tx;
    __u64 gap = tx->srtt_us * VTL_NS_PER_US / (tx->cwnd ? tx->cwnd : 1);
    tx->pacing_gap_ns = tx->cwnd < cc->threshold ? gap / 2 : gap * 4 / 5;
}

/* The window after a timeout: one packet, and slow start to `threshold`. */
VTL_INLINE void vtl_cc_restart(struct vtl_ackd *a, struct vtl_cc *cc, __u64 threshold) {
    cc->threshold = threshold > VTL_CC_LEAST ? threshold : VTL_CC_LEAST;
    cc->credit = 0;
    a->s->tx.cwnd = 1;
}

/* The window after a loss. */
VTL_INLINE void vtl_cc_reduce(struct vtl_ackd *a, struct vtl_cc *cc, __u64 window) {
    cc->threshold = window > VTL_CC_LEAST ? window : VTL_CC_LEAST;
    cc->credit = 0;
    a->s->tx.cwnd = cc->threshold;
}

#endif
