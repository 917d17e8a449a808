/* SPDX-License-Identifier: GPL-2.0-only */
/* Connects from VTL hosts beyond a gateway's hop: for the gateway's programs, and for the Hooker's,
 * which answer the option on them. */
#ifndef VTL_OUTSIDE_H
#define VTL_OUTSIDE_H

#include "gateway.h"

/* Unanswered connects by their ends, and when their first SYN came, CLOCK_MONOTONIC nanoseconds.
 * Full: SYNs are forwarded. Written by vtl_gateway_hold; vtld removes an entry when its handshake
 * is complete, or has failed. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, VTL_GATEWAY_OUTSIDE_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct vtl_four_tuple);
    __type(value, __u64);
} vtl_gateway_outside SEC(".maps");

#endif
