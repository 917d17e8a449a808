/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: none. Each packet is sent once, as soon as the app has written it, and its slot is
 * free when the payload is copied. Acknowledgements serve liveness, and statistics of arrivals.
 */
#ifndef VTL_TF_DATAGRAM_H
#define VTL_TF_DATAGRAM_H

#include "number.h"
#include "window.h"
#include "vtl/room.h"

/* End of the data written by the app. An implausible position is ignored: nothing else would ever
 * stop the sender. */
VTL_INLINE __u64 vtl_datagram_end(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    __u64 end = ctl ? VTL_LOAD(ctl->producer) : s->tx.next;
    return end - s->tx.next <= s->slots ? end : s->tx.next;
}

/* egress: the next packet, or a liveness probe. */
VTL_INLINE enum vtl_verdict tf_datagram_choose(struct vtl_out *o) {
    VTL_TF(datagram, 0);
    struct vtl_tx *tx = &o->s->tx;
    if (vtl_probe_due(o, 0, 0)) {
        vtl_probe(o);
        return VTL_NEXT;
    }
    o->end = vtl_datagram_end(o->s);
    if (tx->next == o->end)
        return VTL_STOP;
    o->seq = tx->next;
    o->type = VTL_DATA;
    return VTL_NEXT;
}

/* Packets per acknowledgement, for statistics only. */
enum { VTL_DATAGRAM_ACK_EVERY = 32 };

/* egress: instead of tf_number. The packet's fate will not be known. */
VTL_INLINE void tf_datagram_number(struct vtl_out *o) {
    struct vtl_tx *tx = &o->s->tx;
    if (o->type == VTL_DATA) {
        tx->sent++;
        tx->abandoned++;
        VTL_STORE(tx->next, o->seq + 1);
        /* No window holds the sender up, and the pump, which estimates by these what it can send in
         * one call, is not to believe so. */
        VTL_STORE(tx->limit, o->seq + 1 + o->s->slots);
        VTL_STORE(tx->cwnd, o->s->slots);
        if (o->seq % VTL_DATAGRAM_ACK_EVERY == VTL_DATAGRAM_ACK_EVERY - 1)
            o->flags |= VTL_F_ACK_NOW;
    }
    vtl_number_header(o);
}

/* egress, once the payload is in the packet: frees the slot. */
VTL_INLINE void tf_datagram_release(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (o->type != VTL_DATA || !ctl)
        return;
    VTL_BARRIER();
    VTL_STORE(s->tx.una, s->tx.next);
    /* An exchange: a writer rereads this after it announced that it waits for room. */
    __sync_lock_test_and_set(&ctl->consumer, s->tx.next);
    __u32 what = vtl_room_event(s);
    if (what)
        vtl_env_notify(s, what);
}

/* listener: the peer is alive. Counts of packets received are not checked against those sent: the
 * network may duplicate either side's packets. */
VTL_INLINE void tf_datagram_heard(struct vtl_ackd *a) {
    struct vtl_tx *tx = &a->s->tx;
    tx->acks++;
    tx->timeouts = 0;
    tx->probe = 0;
}

VTL_INLINE int vtl_datagram_can_send(struct vtl_session *s) {
    return s->tx.next != vtl_datagram_end(s);
}

#endif
