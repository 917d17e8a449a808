// SPDX-License-Identifier: GPL-2.0-only
/* DCCP with CCID 2 (RFC 4340, RFC 4341): TCP-like congestion control. */
#include "tf/newreno.h"
#define CONTROL_STATE struct vtl_cc
#define CONTROL_CC(control) (control)
#define CONGESTION_CONTROL tf_newreno
#include "dccp.h"

VTL_GRAFT("dccp-ccid2", 10, VTL_S_CONGESTION_CONTROL, 10,
          "Datagrams under the congestion control of TCP, sent once.");
