// SPDX-License-Identifier: GPL-2.0-only
/* UDP-Lite (RFC 3828): damage beyond the covered bytes is passed to the application. */
#include "tf/checksum_cover.h"

enum { COVERAGE };

#define CHECKSUM_ADD(o) tf_checksum_cover_add(o, (o)->s->param[COVERAGE])
#define CHECKSUM_VERIFY tf_checksum_cover_verify
#include "plain.h"

VTL_GRAFT("udp-lite", 8, 0, 0, "Datagrams of which only the first bytes must be undamaged.",
          VTL_PARAM("coverage", "bytes", 64, 0, VTL_MAX_PAYLOAD));
