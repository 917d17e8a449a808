/* SPDX-License-Identifier: GPL-2.0-only */
/* What `dccp-ccid2` and `dccp-ccid3` have in common: datagrams that nobody repeats (RFC 4340),
 * under the congestion control GRAFT_CONTROL(a, control), whose state is GRAFT_STATE, with the
 * struct vtl_cc GRAFT_CC(control). */
#define VTL_WITHOUT_HALVES
#include "../tf/ack.h"
#include "../tf/congestion.h"
#include "../tf/crc32c.h"
#include "../tf/ecn.h"
#include "../tf/loss.h"
#include "../tf/number.h"
#include "../tf/pacing.h"
#include "../tf/partial.h"
#include "../tf/rtt.h"
#include "../tf/unordered.h"

struct own {
    struct vtl_partial partial;
    GRAFT_STATE control;
};

VTL_INLINE enum vtl_verdict graft_egress(struct vtl_out *o) {
    struct own *own = VTL_OWN(o->s, tx, struct own);
    tf_window_start(o, VTL_PARTIAL_MOST);
    tf_cc_start(o, GRAFT_CC(&own->control));
    tf_ecn_start(o);
    if (tf_pace_wait(o) || tf_partial_choose(o, &own->partial, 0) || vtl_fetch(o))
        return VTL_STOP;
    tf_number(o);
    tf_partial_tell(o, &own->partial);
    tf_pace_charge(o);
    return VTL_SEND;
}

VTL_INLINE void graft_seal(struct vtl_out *o) {
    tf_crc32c_add(o);
}

VTL_INLINE enum vtl_verdict graft_admit(struct vtl_in *in) {
    return tf_unordered_admit(in, VTL_OWN(in->s, rx, struct vtl_unordered));
}

VTL_INLINE enum vtl_verdict graft_ingress(struct vtl_in *in) {
    if (tf_crc32c_verify(in))
        return VTL_STOP;
    tf_unordered_place(in, VTL_OWN(in->s, rx, struct vtl_unordered));
    tf_unordered_skip(in);
    tf_ecn_note(in);
    tf_ack_note(in);
    return in->duplicate || in->hdr->h.flags & VTL_F_ACK_NOW ? VTL_SEND : VTL_STOP;
}

VTL_INLINE enum vtl_verdict graft_listener(struct vtl_ackd *a) {
    struct own *own = VTL_OWN(a->s, tx, struct own);
    if (tf_ack_verify(a))
        return VTL_STOP;
    tf_cc_note(a, GRAFT_CC(&own->control));
    tf_window_limit(a, VTL_PARTIAL_MOST);
    if (tf_ack_cumulative(a))
        return VTL_STOP;
    tf_loss_reordering(a);
    tf_loss_selective(a);
    tf_partial_all(a, &own->partial);
    tf_rtt(a);
    tf_rate(a);
    GRAFT_CONTROL(a, &own->control);
    return VTL_NEXT;
}

VTL_INLINE int graft_can_send(struct vtl_session *s) {
    return vtl_partial_can_send(s, &VTL_OWN(s, tx, struct own)->partial);
}

VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *a) {
    a->limit = vtl_swap64(vtl_unordered_limit(s));
    tf_ecn_tell(s, a);
}

#include "vtl/graft.h"
