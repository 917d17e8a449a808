/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* Who frees slots of the transmit ring tells the app that waits for them. */
#ifndef VTL_ROOM_H
#define VTL_ROOM_H

#include "tf.h"

/* Free slots that a sender is woken for: a quarter, but not so few that waking it costs more than
 * the packets. */
VTL_INLINE __u32 vtl_refill(__u32 slots) {
    return slots >= 512 ? slots / 4 : slots >= 256 ? 128 : slots / 2;
}

/* VTL_EV_ROOM if the app waits for room in its transmit ring and enough of it is free. */
VTL_INLINE __u32 vtl_room_event(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (!ctl || !VTL_LOAD(ctl->refill))
        return 0;
    __u64 used = VTL_LOAD(ctl->producer) - s->tx.una;
    return used <= s->slots - vtl_refill(s->slots) && __sync_lock_test_and_set(&ctl->refill, 0)
               ? VTL_EV_ROOM
               : 0;
}

#endif
