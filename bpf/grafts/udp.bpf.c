// SPDX-License-Identifier: GPL-2.0-only
/* UDP: ports, which the session has, and a checksum. */
#include "tf/checksum.h"
#define CHECKSUM_ADD tf_checksum_add
#define CHECKSUM_VERIFY tf_checksum_verify
#include "plain.h"

VTL_GRAFT("udp", 7, 0, 0, "What UDP does: datagrams with a checksum, and nothing else.");
