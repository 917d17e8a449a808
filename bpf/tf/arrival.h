/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * ordering: none. Packets are placed in the receive ring in order of arrival, each with its number
 * in its slot. Packets that find no room are dropped: there is no flow control. Duplicates are
 * delivered.
 */
#ifndef VTL_TF_ARRIVAL_H
#define VTL_TF_ARRIVAL_H

#include "receive.h"

/* ingress: instead of tf_receive_admit. rx.cum counts the packets placed, so vtl_rx_limit applies
 * to them. */
VTL_INLINE enum vtl_verdict tf_arrival_admit(struct vtl_in *in) {
    VTL_TF(arrival, 0);
    struct vtl_session *s = in->s;
    if (in->type == VTL_PROBE)
        return VTL_NEXT;
    in->place = s->rx.cum;
    if (in->place < vtl_rx_known_limit(s) || in->place < vtl_rx_limit(s))
        return VTL_NEXT;
    s->rx.beyond++;
    vtl_env_count(VTL_ST_RX_BEYOND);
    return VTL_STOP;
}

/* ingress: publishes the packet. */
VTL_INLINE void tf_arrival_place(struct vtl_in *in) {
    struct vtl_rx *rx = &in->s->rx;
    if (!in->slot)
        return;
    in->slot->len = in->len;
    in->slot->stamp = in->seq;
    rx->received++;
    rx->cum = rx->max = in->place + 1;
    vtl_publish(in->s, rx->cum, 1);
}

#endif
