/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* measurement: input of reverse.h from the peer's packets. */
#ifndef VTL_TF_REVERSE_NOTE_H
#define VTL_TF_REVERSE_NOTE_H

#include "reverse.h"

/* ingress: for a verified packet. Ignores short ones, which take less time on a slow link, and all
 * while nothing is outstanding, when the result is not used. */
VTL_INLINE void tf_reverse_note(struct vtl_in *in, struct vtl_reverse *r) {
    if (2 * in->len < in->s->max_payload || VTL_LOAD(in->s->tx.una) == VTL_LOAD(in->s->tx.next))
        return;
    __u64 now = vtl_env_now();
    r->took_us = (__u32)(now / VTL_NS_PER_US) - vtl_swap32(in->hdr->ts);
    r->came_ns = now;
}

#endif
