/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * congestion control: explicit congestion notification (RFC 3168). Packets are sent as ECT(0); the
 * receiver counts CE marks and reports the count in acknowledgements.
 */
#ifndef VTL_TF_ECN_H
#define VTL_TF_ECN_H

#include "vtl/headers.h"

/* egress: before the first packet. */
VTL_INLINE void tf_ecn_start(struct vtl_out *o) {
    if (!o->s->tx.next)
        vtl_ecn_capable(o->s);
}

/* ingress: for a verified packet. */
VTL_INLINE void tf_ecn_note(struct vtl_in *in) {
    VTL_TF(ecn, 0);
    in->s->rx.marked += in->marked;
}

/* Writes the count into an acknowledgement. */
VTL_INLINE void tf_ecn_tell(struct vtl_session *s, struct vtl_ack_hdr *a) {
    a->h.aux = vtl_swap16((__u16)s->rx.marked);
}

#endif
