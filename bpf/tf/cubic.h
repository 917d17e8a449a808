/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: CUBIC (RFC 9438), with C = 0.4, beta = 0.7, fast convergence and the
 * Reno-friendly region.
 */
#ifndef VTL_TF_CUBIC_H
#define VTL_TF_CUBIC_H

#include "congestion.h"
#include "cube_root.h"

/* W_cubic(t), RFC 9438, figure 1, in 1,024ths of a packet. */
VTL_INLINE __u64 vtl_cubic_window(const struct vtl_cc *cc, __u64 ms) {
    __u64 off = ms > cc->k_ms ? ms - cc->k_ms : cc->k_ms - ms;
    if (off > 100000)
        off = 100000;
    /* 0.4 packets for the cube of each second, times 1,024 */
    __u64 cube = off * off * off / 1000000 * 4096 / 10000;
    if (ms > cc->k_ms)
        return cc->w_max + cube;
    return cc->w_max > cube ? cc->w_max - cube : 0;
}

VTL_INLINE void vtl_cubic_epoch(struct vtl_ackd *a, struct vtl_cc *cc) {
    __u64 window = a->s->tx.cwnd * 1024;
    cc->epoch_ns = a->now;
    cc->w_est = window;
    if (cc->w_max < window)
        cc->w_max = window;
    /* (w_max - window) / 0.4 in packets, as cubic milliseconds; w_max is below 2^25 */
    cc->k_ms = vtl_cube_root((cc->w_max - window) * 2441406);
}

/* Congestion avoidance for `acked` packets (sections 4.2 to 4.5). */
VTL_INLINE void vtl_cubic_grow(struct vtl_ackd *a, struct vtl_cc *cc, __u64 acked) {
    struct vtl_tx *tx = &a->s->tx;
    __u64 window = tx->cwnd * 1024;
    if (!window)
        return;
    if (!cc->epoch_ns)
        vtl_cubic_epoch(a, cc);
    __u64 ms = (a->now - cc->epoch_ns) / VTL_NS_PER_MS;
    /* alpha = 3 (1 - beta) / (1 + beta), and 1 once the window is W_max again */
    cc->w_est += (cc->w_est < cc->w_max ? 542ull : 1024ull) * 1024 * acked / window;
    if (vtl_cubic_window(cc, ms) < cc->w_est) {
        if (cc->w_est / 1024 > tx->cwnd)
            tx->cwnd = cc->w_est / 1024;
        return;
    }
    __u64 target = vtl_cubic_window(cc, ms + tx->srtt_us / 1000);
    if (target > window + window / 2)
        target = window + window / 2;
    if (target <= window)
        return;
    cc->credit += (target - window) * acked;
    tx->cwnd += cc->credit / window;
    cc->credit %= window;
}

VTL_INLINE __u64 vtl_cubic_less(struct vtl_ackd *a, struct vtl_cc *cc) {
    __u64 window = a->s->tx.cwnd * 1024;
    cc->w_max = window < cc->w_max ? window * 17 / 20 : window; /* fast convergence */
    cc->epoch_ns = 0;
    return a->s->tx.cwnd * 7 / 10;
}

/* listener: after tf_delivery_rate. */
VTL_INLINE void tf_cubic(struct vtl_ackd *a, struct vtl_cc *cc) {
    VTL_TF(cubic, VTL_S_CONGESTION_CONTROL);
    switch (vtl_cc_event(a, cc)) {
    case VTL_CC_TIMEOUT:
        vtl_cc_restart(a, cc, vtl_cubic_less(a, cc));
        break;
    case VTL_CC_LOSS:
    case VTL_CC_MARK:
        vtl_cc_reduce(a, cc, vtl_cubic_less(a, cc));
        break;
    default:
        if (!a->delivered || !vtl_cc_is_window_limited(a))
            break;
        __u64 acked = vtl_cc_slow_start(a, cc);
        if (acked)
            vtl_cubic_grow(a, cc, acked);
    }
    vtl_cc_pace(a, cc);
}

#endif
