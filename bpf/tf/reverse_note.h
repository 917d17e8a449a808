/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* measurement: what reverse.h needs to know of the packets that come. */
#ifndef VTL_TF_REVERSE_NOTE_H
#define VTL_TF_REVERSE_NOTE_H

#include "reverse.h"

/* ingress: of a packet that was verified. Short ones take less time on a slow link. Nobody asks
 * unless something is under way. */
VTL_INLINE void tf_reverse_note(struct vtl_in *in, struct vtl_reverse *r) {
    if (2 * in->len < in->s->max_payload || VTL_LOAD(in->s->tx.una) == VTL_LOAD(in->s->tx.next))
        return;
    __u64 now = vtl_env_now();
    r->took_us = (__u32)(now / VTL_NS_PER_US) - vtl_swap32(in->hdr->ts);
    r->came_ns = now;
}

#endif
