/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability and ordering at the receiver, without a reassembly buffer: accepts only the next
 * packet in order. Used with go_back.h, and with a window of 1.
 */
#ifndef VTL_TF_IN_ORDER_H
#define VTL_TF_IN_ORDER_H

#include "receive.h"

/* Instead of tf_receive_admit. Out-of-order packets count as beyond the window, and are
 * acknowledged, so that the sender goes back. */
VTL_INLINE enum vtl_verdict tf_in_order_admit(struct vtl_in *in) {
    VTL_TF(in_order, VTL_S_ORDERED);
    enum vtl_verdict v = tf_receive_admit(in);
    if (v == VTL_NEXT && in->type == VTL_DATA && in->seq > in->s->rx.cum)
        in->refused = 1;
    return v;
}

/* Instead of tf_receive_place. */
VTL_INLINE void tf_in_order_place(struct vtl_in *in) {
    if (!in->refused) {
        tf_receive_place(in);
        return;
    }
    in->s->rx.beyond++;
    in->s->rx.dups++; /* it arrived, and will again: transmissions and arrivals must match */
    vtl_env_count(VTL_ST_RX_BEYOND);
}

#endif
