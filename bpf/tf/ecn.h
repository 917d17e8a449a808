/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: explicit congestion notification (RFC 3168). Packets say
 * that marks are understood, ECT(0); the receiver counts those that come
 * marked, and acknowledgements tell the count.
 */
#ifndef VTL_TF_ECN_H
#define VTL_TF_ECN_H

#include "vtl/tf.h"

/* egress: before the first packet. The byte behind the first one of the IP
 * header holds the two bits in both versions. */
VTL_INLINE void tf_ecn_start(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    if (!s->tx.next)
        s->headers[15] |= s->ip_version == 4 ? 2 : 2 << 4;
}

/* ingress: of a packet that was verified. */
VTL_INLINE void tf_ecn_note(struct vtl_in *in) {
    VTL_TF(ecn, 0);
    in->s->rx.marked += in->marked;
}

/* In an acknowledgement. */
VTL_INLINE void tf_ecn_tell(struct vtl_session *s, struct vtl_ack_hdr *a) {
    a->h.aux = vtl_swap16((__u16)s->rx.marked);
}

#endif
