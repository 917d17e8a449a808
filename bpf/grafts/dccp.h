/* SPDX-License-Identifier: GPL-2.0-only */
/* Common part of `dccp-ccid2` and `dccp-ccid3`: datagrams without retransmission (RFC 4340), with
 * CONGESTION_CONTROL(a, control), whose state has the type CONTROL_STATE and contains the struct
 * vtl_cc CONTROL_CC(control). */
#define VTL_WITHOUT_HALVES
#include "tf/congestion.h"
#include "tf/crc32c.h"
#include "tf/ecn.h"
#include "tf/loss.h"
#include "tf/pacing.h"
#include "tf/partial.h"
#include "tf/unordered.h"

struct own {
    struct vtl_partial partial;
    CONTROL_STATE control;
};
#define OWN(s) VTL_OWN(s, tx, struct own)
#define PARTIAL(s) (&OWN(s)->partial)
#define CC(s) CONTROL_CC(&OWN(s)->control)
#define UNORDERED(s) VTL_OWN(s, rx, struct vtl_unordered)

#define GRAFT_START(o)                                                                             \
    tf_window_start(o, VTL_PARTIAL_MAX), tf_cc_start(o, CC((o)->s)), tf_ecn_start(o)
#define GRAFT_CHOOSE(o) (tf_pace_wait(o) || tf_partial_choose(o, PARTIAL((o)->s), 0))
#define GRAFT_NUMBER(o) tf_number(o), tf_partial_tell(o, PARTIAL((o)->s)), tf_pace_charge(o)
#define GRAFT_SEAL(o) tf_crc32c_add(o)
#define GRAFT_ADMIT(in) tf_unordered_admit(in, UNORDERED((in)->s))
#define GRAFT_VERIFY(in) tf_crc32c_verify(in)
#define GRAFT_PLACE(in)                                                                            \
    tf_unordered_place(in, UNORDERED((in)->s)), tf_unordered_skip(in), tf_ecn_note(in)
#define GRAFT_HEAR(a) tf_cc_note(a, CC((a)->s)), tf_window_limit(a, VTL_PARTIAL_MAX)
#define GRAFT_LOSS(a)                                                                              \
    tf_loss_reordering(a), tf_loss_selective(a, 0), tf_partial_all(a, PARTIAL((a)->s))
#define GRAFT_CONTROL(a) tf_delivery_rate(a, 0), CONGESTION_CONTROL(a, &OWN((a)->s)->control)
#define GRAFT_CAN_SEND(s) vtl_partial_can_send(s, PARTIAL(s))
#define GRAFT_LIMIT(s) vtl_unordered_limit(s)
#define GRAFT_TELL(s, h) tf_ecn_tell(s, h)
#include "vtl/compose.h"
