/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* flow control: by rate. Paces packets at a rate set by the application. */
#ifndef VTL_TF_RATE_H
#define VTL_TF_RATE_H

#include "pacing.h"
#include "vtl/headers.h"

/* egress: before tf_pace_wait. Bits of full packets with VTL's and IPv4's headers; 0 kbit/s: no
 * limit. */
VTL_INLINE void tf_rate_limit(struct vtl_out *o, __u32 kbit) {
    VTL_TF(rate, 0);
    const __u32 headers = sizeof(struct iphdr) + sizeof(struct vtl_data_hdr);
    __u64 bits = 8ull * (o->s->max_payload + headers);
    o->s->tx.pacing_gap_ns = kbit ? bits * 1000000 / kbit : 0;
}

#endif
