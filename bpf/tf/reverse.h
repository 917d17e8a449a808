/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * measurement: how long acknowledgements wait behind data that the peer sends. A round trip tells
 * of both directions; where both are busy, each would take the other's queue for its own. The
 * peer's packets say when they left by its clock: how much later than the quickest they come is
 * what they, and the acknowledgements among them, have waited (RFC 6817, section 2.1, measures the
 * other direction the same way).
 */
#ifndef VTL_TF_REVERSE_H
#define VTL_TF_REVERSE_H

#include "vtl/tf.h"

/* The quickest packet is that of so many round trips, or twice as many: the peer's queue is empty
 * more often, and after them a longer way, or a clock that drifts, is no queue any more. */
#define VTL_REVERSE_ROUNDS 4

/* In vtl_tx.own: of the sending half, though ingress writes the first two (reverse_note.h). */
struct vtl_reverse {
    __u64 came_ns; /* when the latest packet came, */
    __u32 took_us; /* and its arrival by our clock minus its departure by the peer's, modulo 2^32 */
    __u32 least_us;  /* the least such difference since `began_ns`, */
    __u64 began_ns;  /* 0: nothing known, */
    __u32 before_us; /* and in the round trips before */
};

/* Microseconds that an acknowledgement has waited that comes now. */
VTL_GLOBAL int vtl_reverse_waited(struct vtl_reverse *r, __u64 now, __u32 srtt_us,
                                  __u32 min_rtt_us) {
    if (!r)
        return 0;
    __u64 known_ns = VTL_REVERSE_ROUNDS * VTL_NS_PER_US * srtt_us;
    __u64 ago = now - VTL_LOAD(r->came_ns);
    if (ago > known_ns)
        return 0; /* or it came while this was called */
    __u32 took = VTL_LOAD(r->took_us);
    __u64 spent = now - r->began_ns;
    if (!r->began_ns || spent > known_ns) {
        r->before_us = r->began_ns && spent <= 2 * known_ns ? r->least_us : took;
        r->least_us = took;
        r->began_ns = now;
    } else if ((__s32)(took - r->least_us) < 0) {
        r->least_us = took;
    }
    __s32 waited = took - r->least_us, earlier = took - r->before_us;
    if (earlier > waited)
        waited = earlier;
    /* No queue, but a longer way. */
    if ((__u32)waited > min_rtt_us) {
        r->before_us = r->least_us = took;
        return 0;
    }
    /* Since then nothing more has gone into the queue. */
    ago /= VTL_NS_PER_US;
    return (__u32)waited > ago ? waited - ago : 0;
}

/* listener: before tf_ack_cumulative and tf_rate, which measure rates as if the peer's queue did
 * not come and go. */
VTL_INLINE void tf_reverse(struct vtl_ackd *a, struct vtl_reverse *r) {
    VTL_TF(reverse, 0);
    const struct vtl_tx *tx = &a->s->tx;
    a->waited_us = vtl_reverse_waited(r, a->now, tx->srtt_us, tx->meter.min_rtt_us);
}

#endif
