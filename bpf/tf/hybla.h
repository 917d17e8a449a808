/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: Hybla (Caini and Firrincieli, "TCP Hybla: a TCP enhancement for heterogeneous
 * networks", 2004), for satellite paths. The window grows in time as on a path of 25 ms: with rho =
 * RTT / 25 ms, by 2^rho - 1 per packet in slow start, by rho^2 / window in congestion avoidance.
 */
#ifndef VTL_TF_HYBLA_H
#define VTL_TF_HYBLA_H

#include "congestion.h"
#include "hybla_rho.h"

/* listener: after tf_delivery_rate. */
VTL_INLINE void tf_hybla(struct vtl_ackd *a, struct vtl_cc *cc) {
    VTL_TF(hybla, VTL_S_CONGESTION_CONTROL);
    struct vtl_tx *tx = &a->s->tx;
    if (a->rtt_us && (!cc->min_rtt_us || a->rtt_us < cc->min_rtt_us))
        cc->min_rtt_us = a->rtt_us;
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
        __u64 rho = vtl_hybla_rho(cc->min_rtt_us);
        if (tx->cwnd < cc->ssthresh) {
            cc->credit += vtl_hybla_slow(rho) * a->delivered;
            __u64 grown = tx->cwnd + cc->credit / 128;
            cc->credit %= 128;
            tx->cwnd = grown < cc->ssthresh ? grown : cc->ssthresh;
            /* Windows beyond any ring are of no use, and would take as long to shrink. */
            if (tx->cwnd > VTL_MAX_WINDOW)
                tx->cwnd = VTL_MAX_WINDOW;
        } else if (tx->cwnd) {
            /* rho^2 in 128ths of 128ths */
            cc->credit += rho * rho * a->delivered;
            __u64 packet = tx->cwnd * 128 * 128;
            tx->cwnd += cc->credit / packet;
            cc->credit %= packet;
        }
    }
    vtl_cc_pace(a, cc);
}

#endif
