/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Composes a graft: the functions that graft.h requires, as a sequence of places for transport
 * functions. A graft includes its transport functions, defines the places that it fills, and
 * includes this file. The right column has the defaults; places without one are mandatory. Several
 * functions in one place are separated by commas. A graft that needs another sequence defines the
 * functions of graft.h itself.
 *
 * egress: one packet
 *   GRAFT_START(o)      before the choice                                 nothing
 *   GRAFT_MAKE(o)       VTL_SEND: it has made a packet itself             VTL_NEXT
 *   GRAFT_CHOOSE(o)     chooses a packet, or VTL_STOP
 *   GRAFT_NUMBER(o)     makes its header                                  tf_number
 *   GRAFT_SEAL(o)       once the payload is in it                         tf_checksum_add
 * ingress: DATA or PROBE
 *   GRAFT_ADMIT(in)     finds a place for it, or VTL_STOP
 *   GRAFT_VERIFY(in)    once the payload is in place; VTL_STOP: damaged   tf_checksum_verify
 *   GRAFT_URGENT(in)    whether to acknowledge it unasked                 0
 *   GRAFT_TAKE(in)      VTL_STOP: processed, not to be placed             VTL_NEXT
 *   GRAFT_PLACE(in)     accepts it
 * listener: an acknowledgement
 *   GRAFT_HEAR(a)       before the cumulative part                        nothing
 *   GRAFT_CUMULATIVE(a) processes that; VTL_STOP: ignore                  tf_ack_cumulative
 *   GRAFT_LOSS(a)       loss detection                                    nothing
 *   GRAFT_CONTROL(a)    window and rate, after the round-trip sample      nothing
 * all
 *   GRAFT_CAN_SEND(s)   whether GRAFT_CHOOSE would find a packet          vtl_can_send
 *   GRAFT_LIMIT(s)      end of our receive window                         vtl_rx_limit
 *   GRAFT_TELL(s, h)    other fields of an acknowledgement                nothing
 */
#ifndef VTL_COMPOSE_H
#define VTL_COMPOSE_H

#include "tf/ack.h"
#include "tf/checksum.h"
#include "tf/number.h"
#include "tf/retransmit.h"
#include "tf/rtt.h"

#ifndef GRAFT_START
#define GRAFT_START(o) (void)0
#endif
#ifndef GRAFT_MAKE
#define GRAFT_MAKE(o) VTL_NEXT
#endif
#ifndef GRAFT_NUMBER
#define GRAFT_NUMBER(o) tf_number(o)
#endif
#ifndef GRAFT_SEAL
#define GRAFT_SEAL(o) tf_checksum_add(o)
#endif
#ifndef GRAFT_VERIFY
#define GRAFT_VERIFY(in) tf_checksum_verify(in)
#endif
#ifndef GRAFT_URGENT
#define GRAFT_URGENT(in) 0
#endif
#ifndef GRAFT_TAKE
#define GRAFT_TAKE(in) VTL_NEXT
#endif
#ifndef GRAFT_HEAR
#define GRAFT_HEAR(a) (void)0
#endif
#ifndef GRAFT_CUMULATIVE
#define GRAFT_CUMULATIVE(a) tf_ack_cumulative(a)
#endif
#ifndef GRAFT_LOSS
#define GRAFT_LOSS(a) (void)0
#endif
#ifndef GRAFT_CONTROL
#define GRAFT_CONTROL(a) (void)0
#endif
#ifndef GRAFT_CAN_SEND
#define GRAFT_CAN_SEND(s) vtl_can_send(s)
#endif
#ifndef GRAFT_LIMIT
#define GRAFT_LIMIT(s) vtl_rx_limit(s)
#endif
#ifndef GRAFT_TELL
#define GRAFT_TELL(s, h) (void)0
#endif

VTL_INLINE enum vtl_verdict graft_egress(struct vtl_out *o) {
    GRAFT_START(o);
    if (GRAFT_MAKE(o) == VTL_SEND)
        return VTL_SEND;
    if (vtl_join(o, GRAFT_CHOOSE(o)) || vtl_fetch(o))
        return VTL_STOP;
    GRAFT_NUMBER(o);
    return VTL_SEND;
}

VTL_INLINE void graft_seal(struct vtl_out *o) {
    GRAFT_SEAL(o);
}

VTL_INLINE enum vtl_verdict graft_admit(struct vtl_in *in) {
    return GRAFT_ADMIT(in);
}

VTL_INLINE enum vtl_verdict graft_ingress(struct vtl_in *in) {
    int urgent = GRAFT_URGENT(in); /* before placing, which changes the answer */
    if (GRAFT_VERIFY(in) || GRAFT_TAKE(in))
        return VTL_STOP;
    GRAFT_PLACE(in);
    tf_ack_note(in);
    return urgent || in->duplicate || in->refused || in->hdr->h.flags & VTL_F_ACK_NOW ? VTL_SEND
                                                                                      : VTL_STOP;
}

VTL_INLINE enum vtl_verdict graft_listener(struct vtl_ackd *a) {
    if (tf_ack_verify(a))
        return VTL_STOP;
    GRAFT_HEAR(a);
    if (GRAFT_CUMULATIVE(a))
        return VTL_STOP;
    GRAFT_LOSS(a);
    tf_rtt(a);
    GRAFT_CONTROL(a);
    return VTL_NEXT;
}

VTL_INLINE int graft_can_send(struct vtl_session *s) {
    return GRAFT_CAN_SEND(s);
}

VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *h) {
    h->limit = vtl_swap64(GRAFT_LIMIT(s));
    GRAFT_TELL(s, h);
}

#include "vtl/graft.h"

#endif
