// SPDX-License-Identifier: GPL-2.0-only
/* DCCP with CCID 3 (RFC 4340, RFC 5348): a smooth, TCP-friendly rate. */
#include "tf/tfrc.h"
#define CONTROL_STATE struct vtl_tfrc
#define CONTROL_CC(control) (&(control)->cc)
#define CONGESTION_CONTROL tf_tfrc
#include "dccp.h"

VTL_GRAFT("dccp-ccid3", 11, VTL_S_CONGESTION_CONTROL, 9,
          "Datagrams at a smooth rate that is fair to TCP, sent once.");
