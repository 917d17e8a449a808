/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* Wake-up of apps that wait for room in the transmit ring, by the code that frees slots. */
#ifndef VTL_ROOM_H
#define VTL_ROOM_H

#include "tf.h"

/* Free slots at which a sender is woken: a quarter of the ring; more in small rings, where a
 * wake-up would cost more than the packets. */
VTL_INLINE __u32 vtl_refill(__u32 slots) {
    return slots >= 512 ? slots / 4 : slots >= 256 ? 128 : slots / 2;
}

/* VTL_EV_ROOM if the app waits for room in its transmit ring and there is enough. */
VTL_INLINE __u32 vtl_room_event(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (!ctl || !VTL_LOAD(ctl->refill))
        return 0;
    __u64 producer = VTL_LOAD(ctl->producer), used = producer - s->tx.una;
    __u32 enough = vtl_refill(s->slots), half = VTL_LOAD(ctl->notsent_lowat) / 2;
    if (half) {
        if (producer - VTL_LOAD(s->tx.next) > half)
            return 0;
        if (half < enough)
            enough = half;
    }
    return used <= s->slots - enough && __sync_lock_test_and_set(&ctl->refill, 0) ? VTL_EV_ROOM : 0;
}

#endif
