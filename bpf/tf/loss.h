/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: loss detection. A packet is lost if it has not arrived although one transmitted
 * `reorder` transmissions later has: the packet threshold of RFC 9002, 6.1.1, over transmission
 * numbers, so that lost retransmissions are detected just as fast. `reorder` grows with reported
 * duplicates, which signal spurious retransmissions (RFC 2883 and RFC 8985, 3.3 for the idea), and
 * shrinks while there are none. `reordering_extent` raises the threshold to the reordering that
 * packets survived lately. Whatever the threshold, an overtaken packet is lost after two round-trip
 * times: RFC 8985, 6.2, never waits longer. Early retransmit (RFC 5827): one overtaker is enough if
 * the last packet sent has arrived and there was no reordering.
 */
#ifndef VTL_TF_LOSS_H
#define VTL_TF_LOSS_H

#include "vtl/tf.h"

#define VTL_REORDER_MAX 256
#define VTL_REORDERING_MAX 8192
/* A threshold of n shrinks after VTL_CALM * n packets without reordering or duplicates. */
#define VTL_CALM 16

/* Undoes the loss of `packets` marked but not retransmitted packets that have arrived. If they
 * counted as lost and as delivered, in_flight would be short by one for each, for ever. */
VTL_INLINE void vtl_loss_undo(struct vtl_session *s, __u32 packets) {
    __sync_fetch_and_add(&s->tx.lost_pending, -(int)packets);
    s->tx.lost_total -= packets;
}

/* Marks seq as lost if its latest transmission was overtaken by the threshold, or at all and two
 * round-trip times ago. Returns whether it is lost; if not, no later packet that was transmitted
 * once is. `end_xid`: from vtl_loss_end. */
VTL_GLOBAL int vtl_loss_check(struct vtl_session *s, __u64 now, __u64 seq, __u32 end_xid) {
    struct vtl_sent *sent = s ? vtl_env_sent(s, seq) : 0;
    if (!sent)
        return 0;
    struct vtl_tx *tx = &s->tx;
    __u32 xid = VTL_LOAD(sent->xid);
    __s32 overtaken = tx->acked_xid - xid;
    int is_early = end_xid && (__s32)(end_xid - xid) > 0;
    if (!is_early && overtaken < vtl_reordering_threshold(tx) &&
        (overtaken <= 0 || now - sent->sent_ns < 2 * VTL_NS_PER_US * tx->srtt_us))
        return 0;
    __u64 mask = 1ull << (seq % 64);
    __u32 word = (seq / 64) % VTL_WINDOW_WORDS;
    if (__sync_fetch_and_or(&tx->lost[word], mask) & mask)
        return 1;
    tx->lost_total++;
    __sync_fetch_and_add(&tx->lost_pending, 1);
    return 1;
}

/* Early retransmit (RFC 5827): once the last packet ever sent has arrived, only retransmissions, a
 * round trip later, could overtake those still missing, so one overtaker is enough unless there is
 * reordering. Returns its xid, or 0. */
VTL_INLINE __u32 vtl_loss_end(const struct vtl_ackd *a) {
    const struct vtl_tx *tx = &a->s->tx;
    __u32 xid = vtl_swap32(a->hdr->echo_xid);
    int is_reordered = tx->reordering_extent || tx->reorder > VTL_REORDER || xid != tx->acked_xid;
    return !is_reordered && vtl_swap64(a->hdr->echo_seq) + 1 == VTL_LOAD(tx->next) ? xid : 0;
}

/* Adapts the thresholds to a packet that has just arrived, overtaken by `overtaken` others. Once
 * may be an accident: `reordering_extent` at most about doubles at a time. */
VTL_GLOBAL int vtl_loss_reordered(struct vtl_session *s, __u32 overtaken) {
    if (!s)
        return 0;
    struct vtl_tx *tx = &s->tx;
    __u32 grown = 2 * tx->reordering_extent + 3;
    if (grown > VTL_REORDERING_MAX)
        grown = VTL_REORDERING_MAX;
    tx->reordered_q16 = tx->reordered_q16 - tx->reordered_q16 / 64 + (overtaken ? 1024 : 0);
    if (overtaken > tx->reordering_extent && tx->reordering_extent < grown) {
        tx->reordering_extent = overtaken < grown ? overtaken : grown;
    } else if (!tx->reordering_extent ||
               overtaken + tx->reordering_extent / 8 < tx->reordering_extent) {
        if (tx->delivered - tx->calm <= VTL_CALM * (tx->reordering_extent + tx->reorder + 1))
            return 0;
        if (tx->reordering_extent)
            tx->reordering_extent -= 1 + tx->reordering_extent / 8;
        if (tx->reorder > VTL_REORDER)
            tx->reorder -= 1 + (tx->reorder - VTL_REORDER) / 8;
    }
    tx->calm = tx->delivered;
    return 0;
}

/* listener: updates acked_xid, and adapts the reordering thresholds. */
VTL_INLINE void tf_loss_reordering(struct vtl_ackd *a) {
    struct vtl_tx *tx = &a->s->tx;
    __u32 xid = vtl_swap32(a->hdr->echo_xid);
    __u32 dups = vtl_swap32(a->hdr->dups) - VTL_LOAD(tx->copies_done);
    /* Spurious retransmissions come with reordering, the network's own duplicates are few: grow
     * slowly. */
    if ((__s32)(dups - tx->dups) > 0) {
        __u32 reorder = tx->reorder + 1 + tx->reorder / 8;
        tx->reorder = reorder < VTL_REORDER_MAX ? reorder : VTL_REORDER_MAX;
        tx->dups = dups;
        tx->calm = tx->delivered;
    } else if (xid + 1 == VTL_LOAD(tx->xid)) {
        tx->dups = dups; /* all are settled: copies that got lost made no duplicates */
    }
    __s32 newer = xid - tx->acked_xid;
    if (newer > 0 && (__s32)(xid - tx->xid) < 0)
        tx->acked_xid = xid;
    if (a->delivered && !(a->hdr->h.flags & VTL_F_UPDATE))
        vtl_loss_reordered(a->s, newer < 0 ? tx->acked_xid - xid : 0);
}

/* listener: after tf_loss_reordering: marks lost packets in the part of the window that the
 * acknowledgement describes. `early`: early retransmit (vtl_loss_end), for grafts in which a wrong
 * guess costs a spurious retransmission at most. */
VTL_INLINE void tf_loss_selective(struct vtl_ackd *a, const int early) {
    VTL_TF(loss, 0);
    struct vtl_session *s = a->s;
    __u64 next = VTL_LOAD(s->tx.next);
    __u32 skip = vtl_swap32(a->hdr->skip);
    __u64 base = (a->cum & ~63ull) + skip * 64ull;
    __u32 end_xid = early ? vtl_loss_end(a) : 0;

    /* The next packet in order is missing, whatever part of the window the bitmap covers. */
    if (skip && a->cum < next)
        vtl_loss_check(s, a->now, a->cum, end_xid);
    int i;
    vtl_for(i, 0, a->words) {
        __u64 from = base + i * 64ull;
        if (i >= VTL_ACK_WORDS || from >= next)
            break;
        __u64 have = a->map[i];
        __u32 word = (from / 64) % VTL_WINDOW_WORDS;
        __u64 marked = VTL_LOAD(s->tx.lost[word]);
        if (marked & have) {
            /* Spurious: marked as lost, but arrived. */
            __u64 old = __sync_fetch_and_and(&s->tx.lost[word], ~have);
            vtl_loss_undo(s, vtl_popcount(old & have));
        }
        __u64 missing = ~(have | marked);
        if (from < a->cum)
            missing &= ~0ull << (a->cum % 64);
        int n;
        vtl_for(n, 0, 64) {
            if (!missing)
                break;
            __u64 seq = from + vtl_lowest_bit(missing);
            missing &= missing - 1;
            if (seq >= next)
                break;
            vtl_loss_check(s, a->now, seq, end_xid);
        }
    }
    /* Nothing beyond the bitmap has arrived. First transmissions are in order there, so the search
     * ends at the first packet that is not lost yet. It checks 64 packets per acknowledgement;
     * after a longer burst of losses the next one continues (`tail`), or the end of a transfer
     * would take a round trip for each 64 packets. */
    if (a->hdr->h.flags & VTL_F_PARTIAL)
        return;
    __u64 from = base + a->words * 64ull;
    if (from < a->cum)
        from = a->cum;
    __s32 done = s->tx.tail - (__u32)from;
    __u64 seq = done > 0 && from + done < next ? from + done : from;
    s->tx.tail = from;
    int n;
    vtl_for(n, 0, 64) {
        if (seq >= next || !vtl_loss_check(s, a->now, seq, end_xid))
            return;
        seq++;
    }
    s->tx.tail = seq;
}

#endif
