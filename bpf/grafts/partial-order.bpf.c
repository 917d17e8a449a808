// SPDX-License-Identifier: GPL-2.0-only
/* Messages that may overtake each other, but not those of their own lane: stream with partial
 * order. */
#define VTL_WITHOUT_HALVES
#include "../tf/ack.h"
#include "../tf/checksum.h"
#include "../tf/congestion_bbr.h"
#include "../tf/ecn.h"
#include "../tf/loss.h"
#include "../tf/number.h"
#include "../tf/pacing.h"
#include "../tf/partial_order.h"
#include "../tf/retransmit.h"
#include "../tf/rtt.h"

VTL_INLINE enum vtl_verdict graft_egress(struct vtl_out *o) {
    tf_congestion_start(o);
    tf_ecn_start(o);
    if (tf_pace_wait(o) || tf_choose(o) || vtl_fetch(o))
        return VTL_STOP;
    tf_number(o);
    tf_partial_order_tell(o);
    tf_pace_charge(o);
    return VTL_SEND;
}

VTL_INLINE void graft_seal(struct vtl_out *o) {
    tf_checksum_add(o);
}

VTL_INLINE enum vtl_verdict graft_admit(struct vtl_in *in) {
    return tf_partial_order_admit(in);
}

VTL_INLINE enum vtl_verdict graft_ingress(struct vtl_in *in) {
    if (tf_checksum_verify(in))
        return VTL_STOP;
    tf_partial_order_place(in);
    tf_ecn_note(in);
    tf_ack_note(in);
    return in->duplicate || in->hdr->h.flags & VTL_F_ACK_NOW ? VTL_SEND : VTL_STOP;
}

VTL_INLINE enum vtl_verdict graft_listener(struct vtl_ackd *a) {
    if (tf_ack_verify(a) || tf_ack_cumulative(a))
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
    a->limit = vtl_swap64(vtl_partial_order_limit(s));
    tf_ecn_tell(s, a);
}

#include "vtl/graft.h"

VTL_GRAFT("partial-order", 15,
          VTL_S_RELIABLE | VTL_S_PARTIAL_ORDER | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 65,
          "Everything arrives; messages of a lane in order, and lanes do not wait for each other.");
