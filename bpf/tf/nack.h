/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: negative acknowledgement. The receiver reports a gap at once, and the sender, which
 * asks for few acknowledgements, retransmits on the first report (packet threshold of 1). Networks
 * with reordering cause duplicates, and loss.h raises the threshold when they are reported.
 */
#ifndef VTL_TF_NACK_H
#define VTL_TF_NACK_H

#include "vtl/tf.h"

/* ingress: before the packet is placed. Whether it leaves a gap behind the highest one so far. */
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
