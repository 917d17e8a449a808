/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: Hybla (Caini and Firrincieli, "TCP Hybla: a TCP enhancement for heterogeneous
 * networks", 2004). The window grows as that of a path of 25 ms would, counted in time: with rho =
 * RTT / 25 ms, by 2^rho - 1 for each packet in slow start, by rho^2 / window in congestion
 * avoidance. For satellites.
 */
#ifndef VTL_TF_HYBLA_H
#define VTL_TF_HYBLA_H

#include "congestion.h"

#define VTL_HYBLA_RTT0_US 25000
#define VTL_HYBLA_MOST 16 /* of 2^rho: more than any window doubles in an acknowledgement */

/* rho in 128ths, at least 1. */
VTL_INLINE __u32 vtl_hybla_rho(__u32 rtt_us) {
    __u64 rho = rtt_us * 128ull / VTL_HYBLA_RTT0_US;
    return rho < 128 ? 128 : rho;
}

/* 2^rho - 1 in 128ths. The fraction is linear between powers of 2^(1/8). */
VTL_INLINE __u64 vtl_hybla_slow(__u32 rho) {
    __u32 whole = rho / 128, eighth = rho / 16 % 8, rest = rho % 16;
    if (whole >= VTL_HYBLA_MOST)
        return (1ull << VTL_HYBLA_MOST) * 128 - 128;
    __u64 from, to;
    switch (eighth) {
    case 0:
        from = 1024, to = 1117;
        break;
    case 1:
        from = 1117, to = 1218;
        break;
    case 2:
        from = 1218, to = 1328;
        break;
    case 3:
        from = 1328, to = 1448;
        break;
    case 4:
        from = 1448, to = 1579;
        break;
    case 5:
        from = 1579, to = 1722;
        break;
    case 6:
        from = 1722, to = 1878;
        break;
    default:
        from = 1878, to = 2048;
    }
    return ((from + (to - from) * rest / 16) << whole) / 8 - 128;
}

/* listener: after tf_rate. */
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
        if (!a->delivered || !vtl_cc_limited(a))
            break;
        __u64 rho = vtl_hybla_rho(cc->min_rtt_us);
        if (tx->cwnd < cc->threshold) {
            cc->credit += vtl_hybla_slow(rho) * a->delivered;
            __u64 grown = tx->cwnd + cc->credit / 128;
            cc->credit %= 128;
            tx->cwnd = grown < cc->threshold ? grown : cc->threshold;
            /* A window beyond any ring serves nobody, and would take as long to shrink. */
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
