/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: go-back-N. The receiver accepts packets in order only (in_order.h), so once a packet
 * was overtaken, lost or not, all packets from it on are lost, and are retransmitted in order.
 */
#ifndef VTL_TF_GO_BACK_H
#define VTL_TF_GO_BACK_H

#include "loss.h"

/* Marks all packets sent, from `from` on, as lost. */
VTL_INLINE void vtl_lose_all(struct vtl_session *s, __u64 from) {
    struct vtl_tx *tx = &s->tx;
    __u64 next = VTL_LOAD(tx->next);
    __u64 first = from / 64, last = next / 64;
    int i;
    vtl_for(i, 0, VTL_WINDOW_WORDS) {
        if (first + i > last)
            break;
        __u64 mask = ~0ull;
        if (!i)
            mask &= ~0ull << (from % 64);
        if (first + i == last)
            mask &= ~(~0ull << (next % 64));
        if (!mask)
            continue;
        __u32 fresh = vtl_popcount(
            mask & ~__sync_fetch_and_or(&tx->lost[(first + i) % VTL_WINDOW_WORDS], mask));
        tx->lost_total += fresh;
        __sync_fetch_and_add(&tx->lost_pending, fresh);
    }
}

/* listener: after tf_loss_reordering, which updates acked_xid. */
VTL_INLINE void tf_go_back(struct vtl_ackd *a) {
    VTL_TF(go_back, VTL_S_RELIABLE);
    struct vtl_tx *tx = &a->s->tx;
    if (a->cum >= VTL_LOAD(tx->next) ||
        VTL_LOAD(tx->lost[(a->cum / 64) % VTL_WINDOW_WORDS]) >> (a->cum % 64) & 1)
        return; /* nothing is outstanding, or it is marked already */
    struct vtl_sent *sent = vtl_env_sent(a->s, a->cum);
    if (sent && (__s32)(tx->acked_xid - VTL_LOAD(sent->xid)) > 0)
        vtl_lose_all(a->s, a->cum);
}

/* egress: before the choice. Packets are useful in order only: the search for lost ones starts at
 * the oldest. */
VTL_INLINE void tf_go_back_order(struct vtl_out *o) {
    o->s->tx.scan = VTL_LOAD(o->s->tx.una) / 64;
}

#endif
