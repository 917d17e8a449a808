// SPDX-License-Identifier: GPL-2.0-only
/* Carries packets without any service: every host has it, for applications that require nothing. */
#include "tf/checksum.h"
#define CHECKSUM_ADD tf_checksum_add
#define CHECKSUM_VERIFY tf_checksum_verify
#include "plain.h"

VTL_GRAFT("canonical", 1, 0, 1, "Carries packets and adds nothing: no order, no repetition.");
