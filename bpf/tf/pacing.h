/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * pacing: spreads packets at congestion control's rate. A late pump may catch up with a burst: what
 * was due in the latest 1/16 of a round trip, at least VTL_PACE_BURST_US. The queue that congestion
 * control allows is several times as long.
 */
#ifndef VTL_TF_PACING_H
#define VTL_TF_PACING_H

#include "vtl/tf.h"

/* egress: before the choice of a packet. */
VTL_INLINE enum vtl_verdict tf_pace_wait(struct vtl_out *o) {
    VTL_TF(pacing, 0);
    struct vtl_tx *tx = &o->s->tx;
    if (!tx->pacing_gap_ns || tx->pace_ns <= o->now)
        return VTL_NEXT;
    tx->wake_ns = tx->pace_ns + VTL_PACE_SLEEP_US * VTL_NS_PER_US;
    return VTL_STOP;
}

/* egress: after a packet was made. */
VTL_INLINE void tf_pace_charge(struct vtl_out *o) {
    struct vtl_tx *tx = &o->s->tx;
    __u64 from = tx->pace_ns, burst = tx->srtt_us * (VTL_NS_PER_US / 16);
    if (burst < VTL_PACE_BURST_US * VTL_NS_PER_US)
        burst = VTL_PACE_BURST_US * VTL_NS_PER_US;
    if (from + burst < o->now)
        from = o->now - burst;
    tx->pace_ns = from + tx->pacing_gap_ns;
}

#endif
