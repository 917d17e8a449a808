// SPDX-License-Identifier: GPL-2.0-only
/* Selective repeat: a window of packets; only lost ones are retransmitted. */
#include "tf/loss.h"
#include "tf/receive.h"
#include "tf/window.h"

enum { WINDOW };

#define GRAFT_START(o) tf_window_start(o, (o)->s->param[WINDOW])
#define GRAFT_CHOOSE(o) tf_window_choose(o)
#define GRAFT_ADMIT(in) tf_receive_admit(in)
#define GRAFT_PLACE(in) tf_receive_place(in)
#define GRAFT_HEAR(a) tf_window_limit(a, (a)->s->param[WINDOW])
#define GRAFT_LOSS(a) tf_loss_reordering(a), tf_loss_selective(a, 0)
#include "vtl/compose.h"

VTL_GRAFT("selective-repeat", 5, VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL, 40,
          "A window of packets; only what gets lost goes again.",
          VTL_PARAM("window", "packets", 16, 1, VTL_MAX_WINDOW));
