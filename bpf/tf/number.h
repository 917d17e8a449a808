/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: numbers each transmission (xid), timestamps it, writes the scoreboard entry for loss
 * detection, round-trip time and delivery rate, and decides which packets ask for an
 * acknowledgement.
 */
#ifndef VTL_TF_NUMBER_H
#define VTL_TF_NUMBER_H

#include "vtl/tf.h"

/* egress: once a packet is chosen. */
VTL_INLINE void tf_number(struct vtl_out *o) {
    VTL_TF(number, 0);
    struct vtl_session *s = o->s;
    struct vtl_tx *tx = &s->tx;
    if (o->type == VTL_DATA) {
        __u64 in_flight = vtl_in_flight(s);
        struct vtl_sent *sent = o->sent;
        if (!in_flight) {
            /* The pipe was empty: rate samples start here. */
            tx->first_sent_ns = o->now;
            tx->delivered_ns = o->now;
        }
        sent->sent_ns = o->now;
        sent->first_ns = tx->first_sent_ns;
        sent->delivered = tx->delivered;
        sent->delivered_ns = tx->delivered_ns;
        sent->xid = tx->xid;
        sent->app_limited = tx->app_limited != 0;
        tx->sent++;
        if (o->seq == tx->next) {
            VTL_STORE(tx->next, o->seq + 1);
            if (o->seq % vtl_ack_every(tx->cwnd) == 0 || in_flight + 1 >= tx->cwnd ||
                tx->next >= tx->limit || tx->next >= o->end)
                o->flags |= VTL_F_ACK_NOW;
        } else {
            tx->retransmitted++;
        }
    }
    vtl_number_header(o);
}

#endif
