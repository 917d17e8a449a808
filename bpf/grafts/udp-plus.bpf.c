// SPDX-License-Identifier: GPL-2.0-only
/* UDP Plus of VirtualStack: ordered datagrams with flow control, reliable by negative
 * acknowledgements, without congestion control: for dedicated links. */
#include "tf/loss.h"
#include "tf/nack.h"
#include "tf/rate.h"
#include "tf/receive.h"
#include "tf/window.h"

enum { RATE };

#define GRAFT_START(o)                                                                             \
    tf_window_start(o, VTL_MAX_WINDOW), tf_nack_start(o), tf_rate_limit(o, (o)->s->param[RATE])
#define GRAFT_CHOOSE(o) (tf_pace_wait(o) || tf_window_choose(o))
#define GRAFT_NUMBER(o) tf_number(o), tf_pace_charge(o)
#define GRAFT_ADMIT(in) tf_receive_admit(in)
#define GRAFT_URGENT(in) tf_nack_gap(in)
#define GRAFT_PLACE(in) tf_receive_place(in)
#define GRAFT_LOSS(a) tf_loss_reordering(a), tf_loss_selective(a, 0)
#include "vtl/compose.h"

VTL_GRAFT("udp-plus", 9, VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL, 30,
          "Ordered, reliable by negative acknowledgements, no congestion control.",
          VTL_PARAM("rate", "kbit/s", 0, 0, 100000000));
