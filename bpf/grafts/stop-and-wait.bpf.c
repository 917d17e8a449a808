// SPDX-License-Identifier: GPL-2.0-only
/* Stop-and-wait: one packet in flight, retransmitted by a timer until it is acknowledged. */
#include "tf/in_order.h"
#include "tf/window.h"

#define GRAFT_START(o) tf_window_start(o, 1)
#define GRAFT_CHOOSE(o) tf_window_choose(o)
#define GRAFT_ADMIT(in) tf_in_order_admit(in)
#define GRAFT_PLACE(in) tf_in_order_place(in)
#define GRAFT_HEAR(a) tf_window_limit(a, 1)
#include "vtl/compose.h"

VTL_GRAFT("stop-and-wait", 3, VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL, 10,
          "One packet at a time, until it is acknowledged.");
