// SPDX-License-Identifier: GPL-2.0-only
/* Byte stream: selective repeat, reliable, in order, flow and congestion controlled. */
#include "tf/receive.h"

#define ORDER_TELL(o) (void)0
#define RECEIVE_ADMIT(in) tf_receive_admit(in)
#define RECEIVE_PLACE(in) tf_receive_place(in)
#include "stream.h"

VTL_GRAFT("stream", 2,
          VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 100,
          "Byte streams over any path: selective repeat under a model of the path's rate.");
