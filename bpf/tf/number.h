/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: numbers each transmission (xid), stamps it with the sender's clock, writes the
 * scoreboard entry from which losses, round-trip time and delivery rate are read later, and decides
 * which packets ask for an acknowledgement.
 */
#ifndef VTL_TF_NUMBER_H
#define VTL_TF_NUMBER_H

#include "vtl/tf.h"

/* Packets per acknowledgement: a sixteenth of the window or less, so that an acknowledgement's loss
 * or delay matters little, and at most 16. */
VTL_INLINE __u32 vtl_ack_every(__u64 cwnd) {
    return cwnd >= 256 ? 16 : cwnd >= 128 ? 8 : cwnd >= 64 ? 4 : cwnd >= 16 ? 2 : 1;
}

/* Writes the header of DATA or PROBE, with the number of this transmission. */
VTL_INLINE void vtl_number_header(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    struct vtl_tx *tx = &s->tx;
    o->hdr.data.h.version_type = VTL_VERSION << 4 | o->type;
    o->hdr.data.h.flags = o->flags;
    o->hdr.data.h.gid = vtl_swap16(s->gid);
    o->hdr.data.h.sid = vtl_swap32(s->peer_sid);
    o->hdr.data.h.token = vtl_swap64(s->peer_token);
    o->hdr.data.h.len = vtl_swap16(o->type == VTL_DATA ? o->len : 0);
    o->hdr.data.h.aux = 0;
    o->hdr.data.seq = vtl_swap64(o->seq);
    o->hdr.data.xid = vtl_swap32(tx->xid);
    o->hdr.data.ts = vtl_swap32((__u32)(o->now / VTL_NS_PER_US));
    o->header_len = o->type == VTL_DATA ? sizeof(struct vtl_data_hdr) : VTL_MIN_PACKET;
    tx->xid++;
    tx->last_sent_ns = o->now;
}

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
