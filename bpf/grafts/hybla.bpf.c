// SPDX-License-Identifier: GPL-2.0-only
/* Selective repeat with Hybla. */
#include "tf/hybla.h"
#define CONGESTION_CONTROL tf_hybla
#include "classic.h"

VTL_GRAFT("hybla", 14,
          VTL_S_RELIABLE | VTL_S_ORDERED | VTL_S_FLOW_CONTROL | VTL_S_CONGESTION_CONTROL, 50,
          "Selective repeat under the congestion control of TCP Hybla, for satellites.");
