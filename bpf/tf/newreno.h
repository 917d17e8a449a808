/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: NewReno (RFC 5681, RFC 6582), counted in packets as in RFC 9002, 7.3: the
 * acknowledgements are selective, so recovery needs no artificial window.
 */
#ifndef VTL_TF_NEWRENO_H
#define VTL_TF_NEWRENO_H

#include "congestion.h"

/* listener: after tf_delivery_rate. */
VTL_INLINE void tf_newreno(struct vtl_ackd *a, struct vtl_cc *cc) {
    VTL_TF(newreno, VTL_S_CONGESTION_CONTROL);
    struct vtl_tx *tx = &a->s->tx;
    switch (vtl_cc_event(a, cc)) {
    case VTL_CC_TIMEOUT:
        vtl_cc_restart(a, cc, tx->cwnd / 2);
        break;
    case VTL_CC_LOSS:
    case VTL_CC_MARK:
        vtl_cc_reduce(a, cc, tx->cwnd / 2);
        break;
    default:
        if (!a->delivered || !vtl_cc_is_window_limited(a))
            break;
        /* One packet per window delivered. */
        cc->credit += vtl_cc_slow_start(a, cc);
        if (tx->cwnd && cc->credit >= tx->cwnd) {
            cc->credit -= tx->cwnd;
            tx->cwnd++;
        }
    }
    vtl_cc_pace(a, cc);
}

#endif
