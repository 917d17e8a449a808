/* SPDX-License-Identifier: GPL-2.0-only */
/* Common part of `newreno`, `cubic` and `hybla`: selective repeat like that of `stream`, but with
 * CONGESTION_CONTROL(a, cc). */
#include "tf/congestion.h"
#include "tf/ecn.h"
#include "tf/loss.h"
#include "tf/pacing.h"
#include "tf/receive.h"
#include "tf/window.h"

#define CC(s) VTL_OWN(s, tx, struct vtl_cc)

#define GRAFT_START(o) tf_cc_start(o, CC((o)->s)), tf_ecn_start(o)
#define GRAFT_CHOOSE(o) (tf_pace_wait(o) || tf_window_choose(o))
#define GRAFT_NUMBER(o) tf_number(o), tf_pace_charge(o)
#define GRAFT_ADMIT(in) tf_receive_admit(in)
#define GRAFT_PLACE(in) tf_receive_place(in), tf_ecn_note(in)
#define GRAFT_HEAR(a) tf_cc_note(a, CC((a)->s))
#define GRAFT_LOSS(a) tf_loss_reordering(a), tf_loss_selective(a, 0)
#define GRAFT_CONTROL(a) tf_delivery_rate(a, 0), CONGESTION_CONTROL(a, CC((a)->s))
#define GRAFT_TELL(s, h) tf_ecn_tell(s, h)
#include "vtl/compose.h"
