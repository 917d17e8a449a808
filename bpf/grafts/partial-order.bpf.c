// SPDX-License-Identifier: GPL-2.0-only
/* Messages that may overtake each other, but not those of their own lane: stream with partial
 * order. */
#define VTL_WITHOUT_HALVES
#include "../tf/ack.h"
#include "../tf/checksum.h"
#include "../tf/congestion_bbr.h"
#include "../tf/ecn.h"
#include "../tf/loss.h"
#include "../tf/number.h"
#include "../tf/pacing.h"
#include "../tf/partial_order.h"
#include "../tf/retransmit.h"
#include "../tf/reverse_note.h"
#include "../tf/rtt.h"
#define GRAFT_MARK tf_partial_order_tell
#define GRAFT_ADMIT tf_partial_order_admit
#define GRAFT_PLACE tf_partial_order_place
#define GRAFT_LIMIT vtl_partial_order_limit
#include "stream.h"
#include "vtl/graft.h"

VTL_GRAFT("partial-order", 15,
          VTL_S_RELIABLE | VTL_S_PARTIAL_ORDER | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 65,
          "Everything arrives; messages of a lane in order, and lanes do not wait for each other.");
