/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * measurement: one-way queueing delay of the peer's packets, which acknowledgements share. A round
 * trip includes both directions; where both are busy, each sender would take the other's queue for
 * its own. The peer's packets carry their departure by its clock: the excess of their delay over
 * the minimum is the queueing delay (RFC 6817, section 2.1, measures the other direction the same
 * way).
 */
#ifndef VTL_TF_REVERSE_H
#define VTL_TF_REVERSE_H

#include "vtl/tf.h"

/* Round trips of the minimum's window; it covers one or two windows. The peer's queue is empty more
 * often than that; older minima may be of a shorter route, or of a clock that drifts. */
#define VTL_REVERSE_ROUNDS 4

/* In vtl_tx.own: sender state, though ingress writes the first two fields (reverse_note.h). */
struct vtl_reverse {
    __u64 came_ns;   /* arrival of the latest packet, */
    __u32 took_us;   /* its arrival by our clock minus its departure by the peer's, modulo 2^32 */
    __u32 min_us;    /* minimum of that difference since `began_ns`, */
    __u64 began_ns;  /* 0: nothing known, */
    __u32 before_us; /* minimum of the window before */
};

/* Queueing delay in microseconds of an acknowledgement that arrives now. */
VTL_GLOBAL int vtl_reverse_waited(struct vtl_reverse *r, __u64 now, __u32 srtt_us,
                                  __u32 min_rtt_us) {
    if (!r)
        return 0;
    __u64 known_ns = VTL_REVERSE_ROUNDS * VTL_NS_PER_US * srtt_us;
    __u64 ago = now - VTL_LOAD(r->came_ns);
    if (ago > known_ns)
        return 0; /* or it arrived during this call */
    __u32 took = VTL_LOAD(r->took_us);
    __u64 spent = now - r->began_ns;
    if (!r->began_ns || spent > known_ns) {
        r->before_us = r->began_ns && spent <= 2 * known_ns ? r->min_us : took;
        r->min_us = took;
        r->began_ns = now;
    } else if ((__s32)(took - r->min_us) < 0) {
        r->min_us = took;
    }
    __s32 waited = took - r->min_us, earlier = took - r->before_us;
    if (earlier > waited)
        waited = earlier;
    /* No queue, but a longer route. */
    if ((__u32)waited > min_rtt_us) {
        r->before_us = r->min_us = took;
        return 0;
    }
    /* Nothing has entered the queue since then. */
    ago /= VTL_NS_PER_US;
    return (__u32)waited > ago ? waited - ago : 0;
}

/* listener: before tf_ack_cumulative and tf_delivery_rate, which subtract the delay, so that the
 * peer's queue does not distort rates. */
VTL_INLINE void tf_reverse(struct vtl_ackd *a, struct vtl_reverse *r) {
    VTL_TF(reverse, 0);
    const struct vtl_tx *tx = &a->s->tx;
    a->waited_us = vtl_reverse_waited(r, a->now, tx->srtt_us, tx->meter.min_rtt_us);
}

#endif
