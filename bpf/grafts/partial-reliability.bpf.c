// SPDX-License-Identifier: GPL-2.0-only
/* Selective repeat that gives lost packets up, as many as the application
 * allows: late ones would be worth less than the wait for them. */
#define VTL_WITHOUT_HALVES
#include "../tf/ack.h"
#include "../tf/checksum.h"
#include "../tf/fec.h"
#include "../tf/loss.h"
#include "../tf/number.h"
#include "../tf/partial.h"
#include "../tf/receive.h"
#include "../tf/rtt.h"
#include "../tf/skip.h"

enum { WINDOW, MAX_LOSS, LOSS_WINDOW, LIFETIME, FEC };

struct own {
    struct vtl_partial partial;
    struct vtl_budget budget;
    struct vtl_fec fec;
};

VTL_INLINE enum vtl_verdict graft_egress(struct vtl_out *o) {
    struct own *own = VTL_OWN(o->s, tx, struct own);
    const __u32 *param = o->s->param;
    tf_window_start(o, param[WINDOW]);
    int idle = vtl_written(o) && o->s->tx.next >= o->end;
    if (tf_fec_make(o, &own->fec, param[FEC], idle) == VTL_SEND)
        return VTL_SEND;
    if (tf_partial_choose(o, &own->partial, 1) || vtl_fetch(o))
        return VTL_STOP;
    tf_number(o);
    tf_partial_tell(o, &own->partial);
    tf_lifetime_start(o);
    return VTL_SEND;
}

VTL_INLINE void graft_seal(struct vtl_out *o) {
    tf_checksum_add(o);
}

VTL_INLINE enum vtl_verdict graft_admit(struct vtl_in *in) {
    return vtl_is_parity(in) ? tf_fec_admit(in) : tf_receive_admit(in);
}

VTL_INLINE enum vtl_verdict graft_ingress(struct vtl_in *in) {
    if (tf_checksum_verify(in))
        return VTL_STOP;
    if (in->refused) { /* parity: tf_fec_admit */
        if (!tf_fec_recover(in))
            tf_receive_place(in);
        return VTL_STOP;
    }
    tf_receive_place(in);
    tf_skip(in);
    tf_ack_note(in);
    return in->duplicate || in->hdr->h.flags & VTL_F_ACK_NOW ? VTL_SEND : VTL_STOP;
}

VTL_INLINE enum vtl_verdict graft_listener(struct vtl_ackd *a) {
    struct own *own = VTL_OWN(a->s, tx, struct own);
    const __u32 *param = a->s->param;
    if (tf_ack_verify(a))
        return VTL_STOP;
    tf_window_limit(a, param[WINDOW]);
    if (tf_ack_cumulative(a))
        return VTL_STOP;
    tf_loss_reordering(a);
    tf_loss_selective(a);
    tf_rtt(a);
    tf_partial_budget(a, &own->partial, &own->budget,
                      (__u64)param[LOSS_WINDOW] * param[MAX_LOSS] / 1000, param[LOSS_WINDOW],
                      param[LIFETIME]);
    return VTL_NEXT;
}

VTL_INLINE int graft_can_send(struct vtl_session *s) {
    return vtl_partial_can_send(s, &VTL_OWN(s, tx, struct own)->partial);
}

VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *a) {
    a->limit = vtl_swap64(vtl_rx_limit(s));
}

#include "vtl/graft.h"

VTL_GRAFT("partial-reliability", 6, VTL_S_PARTIAL_RELIABILITY | VTL_S_ORDERED | VTL_S_FLOW_CONTROL,
          20, "In order, with losses up to a bound that holds over every stretch of packets.",
          VTL_PARAM("window", "packets", 16, 1, VTL_PARTIAL_MOST),
          VTL_PARAM("max-loss", "per mille", 100, 0, 1000),
          VTL_PARAM("loss-window", "packets", 100, 1, 10000),
          VTL_PARAM("lifetime", "ms", 0, 0, 60000),
          VTL_PARAM("fec", "packets", 0, 0, VTL_FEC_MOST));
