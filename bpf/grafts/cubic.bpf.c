// SPDX-License-Identifier: GPL-2.0-only
/* Selective repeat with CUBIC. */
#include "tf/cubic.h"
#define CONGESTION_CONTROL tf_cubic
#include "classic.h"

VTL_GRAFT("cubic", 13,
          VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 70,
          "Selective repeat under the congestion control of TCP as it is.");
