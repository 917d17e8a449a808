/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability and flow control: sliding window of `window` packets from the oldest one not
 * acknowledged. Lost packets go first, then new ones; if neither is possible, a retransmission
 * timer (RFC 6298) retransmits the oldest. Loss detection is separate (loss.h, go_back.h, none): so
 * this is stop-and-wait with a window of 1, go-back-N and selective repeat. The sender's own window
 * is imposed on the receiver's limit, and needs no state.
 */
#ifndef VTL_TF_WINDOW_H
#define VTL_TF_WINDOW_H

#include "retransmit.h"

/* egress: before the first packet, imposes the window. */
VTL_INLINE void tf_window_start(struct vtl_out *o, __u32 window) {
    struct vtl_tx *tx = &o->s->tx;
    if (tx->next)
        return;
    if (tx->limit > window)
        VTL_STORE(tx->limit, window);
    tx->cwnd = window;
}

/* listener: between tf_ack_verify and tf_ack_cumulative: imposes the window. */
VTL_INLINE void tf_window_limit(struct vtl_ackd *a, __u32 window) {
    __u64 max = vtl_swap64(a->hdr->cum) + window;
    if (vtl_swap64(a->hdr->limit) > max)
        a->hdr->limit = vtl_swap64(max);
}

/* egress: chooses o->seq, or sets tx.wake_ns. */
VTL_INLINE enum vtl_verdict tf_window_choose(struct vtl_out *o) {
    VTL_TF(window, VTL_S_RELIABLE);
    return vtl_choose(o, 0);
}

#endif
