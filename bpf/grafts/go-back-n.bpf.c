// SPDX-License-Identifier: GPL-2.0-only
/* Go-back-N: a window of packets; a loss sends everything behind it again. */
#include "../tf/ack.h"
#include "../tf/checksum.h"
#include "../tf/go_back.h"
#include "../tf/in_order.h"
#include "../tf/number.h"
#include "../tf/rtt.h"
#include "../tf/window.h"

enum { WINDOW };

VTL_INLINE enum vtl_verdict graft_egress(struct vtl_out *o) {
    tf_window_start(o, o->s->param[WINDOW]);
    tf_go_back_order(o);
    if (tf_window_choose(o) || vtl_fetch(o))
        return VTL_STOP;
    tf_number(o);
    return VTL_SEND;
}

VTL_INLINE void graft_seal(struct vtl_out *o) {
    tf_checksum_add(o);
}

VTL_INLINE enum vtl_verdict graft_admit(struct vtl_in *in) {
    return tf_in_order_admit(in);
}

VTL_INLINE enum vtl_verdict graft_ingress(struct vtl_in *in) {
    if (tf_checksum_verify(in))
        return VTL_STOP;
    tf_in_order_place(in);
    tf_ack_note(in);
    return in->duplicate || in->refused || in->hdr->h.flags & VTL_F_ACK_NOW ? VTL_SEND : VTL_STOP;
}

VTL_INLINE enum vtl_verdict graft_listener(struct vtl_ackd *a) {
    if (tf_ack_verify(a))
        return VTL_STOP;
    tf_window_limit(a, a->s->param[WINDOW]);
    if (tf_ack_cumulative(a))
        return VTL_STOP;
    tf_loss_reordering(a);
    tf_go_back(a);
    tf_rtt(a);
    return VTL_NEXT;
}

VTL_INLINE int graft_can_send(struct vtl_session *s) {
    return vtl_can_send(s);
}

VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *a) {
    a->limit = vtl_swap64(vtl_rx_limit(s));
}

#include "vtl/graft.h"

VTL_GRAFT("go-back-n", 4, VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL, 20,
          "A window of packets; after a loss everything behind it goes again.",
          VTL_PARAM("window", "packets", 16, 1, VTL_MAX_WINDOW));
