/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: negative acknowledgement. The receiver tells about a gap as soon as it sees one, and
 * the sender, which then asks for few acknowledgements, believes the first report: what was
 * overtaken at all is sent again at once. Networks that reorder cost it duplicates, and loss.h
 * widens the threshold when they are reported.
 */
#ifndef VTL_TF_NACK_H
#define VTL_TF_NACK_H

#include "vtl/tf.h"

/* ingress: before the packet is placed. Does it leave a gap behind the highest one so far? */
VTL_INLINE int tf_nack_gap(const struct vtl_in *in) {
    return in->type == VTL_DATA && in->seq > in->s->rx.max;
}

/* egress: before the first packet. */
VTL_INLINE void tf_nack_start(struct vtl_out *o) {
    VTL_TF(nack, 0);
    if (!o->s->tx.next)
        VTL_STORE(o->s->tx.reorder, 1);
}

#endif
