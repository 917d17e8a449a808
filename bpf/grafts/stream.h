/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* Common part of `stream` and `partial-order`: retransmission with BBR-like congestion control.
 * RECEIVE_ADMIT(in) and RECEIVE_PLACE(in) are the receiver's part, ORDER_TELL(o) writes its part of
 * the header. */
#include "tf/congestion_bbr.h"
#include "tf/ecn.h"
#include "tf/loss.h"
#include "tf/pacing.h"
#include "tf/retransmit.h"
#include "tf/reverse_note.h"

struct own {
    struct vtl_bbr bbr;
    struct vtl_reverse reverse;
};
#define OWN(s) VTL_OWN(s, tx, struct own)
#define BBR(s) (&OWN(s)->bbr)
#define REVERSE(s) (&OWN(s)->reverse)

#define GRAFT_START(o) tf_congestion_start(o, BBR((o)->s)), tf_ecn_start(o)
#define GRAFT_CHOOSE(o) (tf_pace_wait(o) || tf_choose(o, &BBR((o)->s)->loss_q16))
#define GRAFT_NUMBER(o) tf_number(o), ORDER_TELL(o), tf_pace_charge(o)
#define GRAFT_ADMIT(in) RECEIVE_ADMIT(in)
#define GRAFT_PLACE(in) RECEIVE_PLACE(in), tf_ecn_note(in), tf_reverse_note(in, REVERSE((in)->s))
#define GRAFT_HEAR(a) tf_reverse(a, REVERSE((a)->s))
#define GRAFT_LOSS(a) tf_loss_reordering(a), tf_loss_selective(a, 1)
#define GRAFT_CONTROL(a)                                                                           \
    tf_delivery_rate(a, BBR((a)->s)->min_rtt_us), tf_congestion_bbr(a, BBR((a)->s))
#define GRAFT_TELL(s, h) tf_ecn_tell(s, h)
#include "vtl/compose.h"
