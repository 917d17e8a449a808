// SPDX-License-Identifier: GPL-2.0-only
/* Byte stream: selective repeat, reliable, in order, flow and congestion controlled. */
#include "../tf/ack.h"
#include "../tf/checksum.h"
#include "../tf/congestion_bbr.h"
#include "../tf/ecn.h"
#include "../tf/loss.h"
#include "../tf/number.h"
#include "../tf/pacing.h"
#include "../tf/receive.h"
#include "../tf/retransmit.h"
#include "../tf/reverse_note.h"
#include "../tf/rtt.h"
#include "stream.h"
#include "vtl/graft.h"

VTL_GRAFT("stream", 2,
          VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 100,
          "Byte streams over any path: selective repeat under a model of the path's rate.");
