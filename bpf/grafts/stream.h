/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* The composition of stream, for the kernel and for native simulation. `partial-order` is the same
 * with another receiver: what it calls instead of receive.h, and what it adds to a packet. */
#ifndef GRAFT_LIMIT
#define GRAFT_MARK(o)
#define GRAFT_ADMIT tf_receive_admit
#define GRAFT_PLACE tf_receive_place
#define GRAFT_LIMIT vtl_rx_limit
#endif

VTL_INLINE enum vtl_verdict graft_egress(struct vtl_out *o) {
    tf_congestion_start(o);
    tf_ecn_start(o);
    if (tf_pace_wait(o) || tf_choose(o) || vtl_fetch(o))
        return VTL_STOP;
    tf_number(o);
    GRAFT_MARK(o);
    tf_pace_charge(o);
    return VTL_SEND;
}

VTL_INLINE void graft_seal(struct vtl_out *o) {
    tf_checksum_add(o);
}

VTL_INLINE enum vtl_verdict graft_admit(struct vtl_in *in) {
    return GRAFT_ADMIT(in);
}

VTL_INLINE enum vtl_verdict graft_ingress(struct vtl_in *in) {
    if (tf_checksum_verify(in))
        return VTL_STOP;
    GRAFT_PLACE(in);
    tf_ecn_note(in);
    tf_ack_note(in);
    tf_reverse_note(in, VTL_OWN(in->s, tx, struct vtl_reverse));
    return in->duplicate || in->hdr->h.flags & VTL_F_ACK_NOW ? VTL_SEND : VTL_STOP;
}

VTL_INLINE enum vtl_verdict graft_listener(struct vtl_ackd *a) {
    if (tf_ack_verify(a))
        return VTL_STOP;
    tf_reverse(a, VTL_OWN(a->s, tx, struct vtl_reverse));
    if (tf_ack_cumulative(a))
        return VTL_STOP;
    tf_loss_reordering(a);
    tf_loss_selective(a);
    tf_rtt(a);
    tf_rate(a);
    tf_congestion_bbr(a);
    return VTL_NEXT;
}

VTL_INLINE int graft_can_send(struct vtl_session *s) {
    return vtl_can_send(s);
}

VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *a) {
    a->limit = vtl_swap64(GRAFT_LIMIT(s));
    tf_ecn_tell(s, a);
}
