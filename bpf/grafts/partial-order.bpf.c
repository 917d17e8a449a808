// SPDX-License-Identifier: GPL-2.0-only
/* stream with partial order: messages are delivered in order within their lane only. */
#define VTL_WITHOUT_HALVES
#include "tf/partial_order.h"

#define ORDER_TELL(o) tf_partial_order_tell(o)
#define RECEIVE_ADMIT(in) tf_partial_order_admit(in)
#define RECEIVE_PLACE(in) tf_partial_order_place(in)
#define GRAFT_LIMIT(s) vtl_partial_order_limit(s)
#include "stream.h"

VTL_GRAFT("partial-order", 15,
          VTL_S_RELIABLE | VTL_S_PARTIAL_ORDER | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 65,
          "Everything arrives; messages of a lane in order, and lanes do not wait for each other.");
