/* SPDX-License-Identifier: GPL-2.0-only */
/* Common part of `canonical`, `udp` and `udp-lite`: packets are sent once and read in order of
 * arrival, with the checksum of CHECKSUM_ADD(o) and CHECKSUM_VERIFY(in). */
#define VTL_WITHOUT_HALVES
#include "tf/arrival.h"
#include "tf/datagram.h"

#define GRAFT_CHOOSE(o) tf_datagram_choose(o)
#define GRAFT_NUMBER(o) tf_datagram_number(o)
#define GRAFT_SEAL(o) CHECKSUM_ADD(o), tf_datagram_release(o)
#define GRAFT_ADMIT(in) tf_arrival_admit(in)
#define GRAFT_VERIFY(in) CHECKSUM_VERIFY(in)
#define GRAFT_PLACE(in) tf_arrival_place(in)
#define GRAFT_CUMULATIVE(a) (tf_datagram_heard(a), VTL_NEXT)
#define GRAFT_CAN_SEND(s) vtl_datagram_can_send(s)
#include "vtl/compose.h"
