/* SPDX-License-Identifier: GPL-2.0-only */
/* What `canonical`, `udp` and `udp-lite` have in common: packets that are sent once and read as
 * they arrive, under the checksum that GRAFT_ADD(o) makes and GRAFT_VERIFY(in) asks for. */
#define VTL_WITHOUT_HALVES
#include "../tf/ack.h"
#include "../tf/arrival.h"
#include "../tf/datagram.h"
#include "../tf/rtt.h"

VTL_INLINE enum vtl_verdict graft_egress(struct vtl_out *o) {
    if (tf_datagram_choose(o) || vtl_fetch(o))
        return VTL_STOP;
    tf_datagram_number(o);
    return VTL_SEND;
}

VTL_INLINE void graft_seal(struct vtl_out *o) {
    GRAFT_ADD(o);
    tf_datagram_release(o);
}

VTL_INLINE enum vtl_verdict graft_admit(struct vtl_in *in) {
    return tf_arrival_admit(in);
}

VTL_INLINE enum vtl_verdict graft_ingress(struct vtl_in *in) {
    if (GRAFT_VERIFY(in))
        return VTL_STOP;
    tf_arrival_place(in);
    tf_ack_note(in);
    return in->hdr->h.flags & VTL_F_ACK_NOW ? VTL_SEND : VTL_STOP;
}

VTL_INLINE enum vtl_verdict graft_listener(struct vtl_ackd *a) {
    if (tf_ack_verify(a))
        return VTL_STOP;
    tf_datagram_heard(a);
    tf_rtt(a);
    return VTL_NEXT;
}

VTL_INLINE int graft_can_send(struct vtl_session *s) {
    return vtl_datagram_can_send(s);
}

VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *a) {
    a->limit = vtl_swap64(vtl_rx_limit(s));
}

#include "vtl/graft.h"
