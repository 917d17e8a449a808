/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Hybla's arithmetic (Caini and Firrincieli, "TCP Hybla: a TCP enhancement for heterogeneous
 * networks", 2004): rho, the round-trip time in multiples of the reference path's, and the
 * increment in slow start. For grafts and for TCP.
 */
#ifndef VTL_TF_HYBLA_RHO_H
#define VTL_TF_HYBLA_RHO_H

#include "vtl/linux.h"

#define VTL_HYBLA_RTT0_US 25000
#define VTL_HYBLA_MAX 16 /* maximum of rho in 2^rho: beyond any window's growth by an ACK */

/* rho in 128ths, at least 1. */
static inline __attribute__((always_inline)) __u32 vtl_hybla_rho(__u32 rtt_us) {
    __u64 rho = rtt_us * 128ull / VTL_HYBLA_RTT0_US;
    return rho < 128 ? 128 : rho;
}

/* 2^rho - 1 in 128ths. The fraction is linear between powers of 2^(1/8). */
static inline __attribute__((always_inline)) __u64 vtl_hybla_slow(__u32 rho) {
    __u32 whole = rho / 128, eighth = rho / 16 % 8, rest = rho % 16;
    if (whole >= VTL_HYBLA_MAX)
        return (1ull << VTL_HYBLA_MAX) * 128 - 128;
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

#endif
