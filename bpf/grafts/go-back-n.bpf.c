// SPDX-License-Identifier: GPL-2.0-only
/* Go-back-N: a window of packets; a loss causes retransmission of all packets from there on. */
#include "tf/go_back.h"
#include "tf/in_order.h"
#include "tf/window.h"

enum { WINDOW };

#define GRAFT_START(o) tf_window_start(o, (o)->s->param[WINDOW]), tf_go_back_order(o)
#define GRAFT_CHOOSE(o) tf_window_choose(o)
#define GRAFT_ADMIT(in) tf_in_order_admit(in)
#define GRAFT_PLACE(in) tf_in_order_place(in)
#define GRAFT_HEAR(a) tf_window_limit(a, (a)->s->param[WINDOW])
#define GRAFT_LOSS(a) tf_loss_reordering(a), tf_go_back(a)
#include "vtl/compose.h"

VTL_GRAFT("go-back-n", 4, VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL, 20,
          "A window of packets; after a loss everything behind it goes again.",
          VTL_PARAM("window", "packets", 16, 1, VTL_MAX_WINDOW));
