// SPDX-License-Identifier: GPL-2.0-only
/* Selective repeat with NewReno. */
#include "tf/newreno.h"
#define CONGESTION_CONTROL tf_newreno
#include "classic.h"

VTL_GRAFT("newreno", 12,
          VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 60,
          "Selective repeat under the congestion control of TCP as it was.");
