/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: cumulative and selective acknowledgement. Each one describes the receiver's whole
 * state, so losing one costs nothing, and no state is kept of what was acknowledged.
 */
#ifndef VTL_TF_ACK_H
#define VTL_TF_ACK_H

#include "checksum.h"
#include "loss.h"
#include "receive.h"
#include "vtl/headers.h"
#include "vtl/tag.h"

/* Words from that of cum to that of the last packet received. */
VTL_GLOBAL __u32 vtl_rx_words(const struct vtl_session *s) {
    if (!s || s->rx.max <= s->rx.cum)
        return 0;
    __u64 words = (s->rx.max + 63) / 64 - s->rx.cum / 64;
    return words < VTL_WINDOW_WORDS ? words : VTL_WINDOW_WORDS;
}

/* Words of the bitmap to send now. */
VTL_GLOBAL __u32 vtl_ack_words(const struct vtl_session *s) {
    if (!s)
        return 0;
    __u32 words = vtl_rx_words(s);
    return words < VTL_ACK_WORDS ? words : VTL_ACK_WORDS;
}

/*
 * Start of the bitmap, in words from that of cum. A bitmap too short for all `full` words
 * alternates between the oldest packets and those around the packet that caused it: losses are
 * found where packets arrive, and missing packets at the start block all others. If that packet
 * was the oldest, the last ones take their turn: what no bitmap describes is in flight for the
 * sender, whose window may be full of it.
 */
VTL_GLOBAL __u32 vtl_ack_skip(struct vtl_session *s, __u32 words, __u32 full) {
    if (!s || words >= full || !words || !(s->rx.turn++ & 1))
        return 0;
    if (s->rx.echo_seq < s->rx.cum)
        return full - words;
    __u64 skip = s->rx.echo_seq / 64 - s->rx.cum / 64;
    skip = skip > words / 2 ? skip - words / 2 : 0;
    return skip < full - words ? skip : full - words;
}

/*
 * Builds an acknowledgement: the header, and `words` words of bitmap in `map`. `update`: a window
 * update that no packet caused. The caller holds the session's lock.
 */
VTL_INLINE void vtl_ack_build(struct vtl_session *s, struct vtl_ack_hdr *a, __u64 *map, __u32 words,
                              int update) {
    __u32 full = vtl_rx_words(s);
    __u32 skip = vtl_ack_skip(s, words, full);
    vtl_hdr_write(&a->h, s, VTL_ACK,
                  (skip + words < full ? VTL_F_PARTIAL : 0) | (update ? VTL_F_UPDATE : 0),
                  words * 8);
    a->h.csum = 0;
    a->cum = vtl_swap64(s->rx.cum);
    graft_tell(s, a);
    a->received = vtl_swap64(s->rx.received);
    a->echo_seq = vtl_swap64(s->rx.echo_seq);
    a->echo_xid = vtl_swap32(s->rx.echo_xid);
    a->echo_ts = vtl_swap32(s->rx.echo_ts);
    a->dups = vtl_swap32(s->rx.dups);
    a->skip = vtl_swap32(skip);
    __u64 sum = vtl_csum_words((const __u64 *)a, sizeof(*a) / 8);
    int i;
    vtl_for(i, 0, words) {
        if (i >= VTL_ACK_WORDS)
            break;
        __u64 w = s->rx.map[(s->rx.cum / 64 + skip + i) % VTL_WINDOW_WORDS];
        map[i] = w;
        sum += w;
    }
    a->h.csum = vtl_csum_fold(sum);
    vtl_put_tag(s, (struct vtl_tagged *)a, sizeof(*a));
}

/* ingress: records the values that the next acknowledgement echoes. */
VTL_INLINE void tf_ack_note(struct vtl_in *in) {
    VTL_TF(ack, 0);
    in->s->rx.echo_seq = in->seq;
    in->s->rx.echo_xid = vtl_swap32(in->hdr->xid);
    in->s->rx.echo_ts = vtl_swap32(in->hdr->ts);
}

/* Checksum of an acknowledgement with that many words of bitmap; clears the header's own. */
VTL_INLINE __u32 vtl_ack_csum(struct vtl_ack_hdr *h, const __u64 *map, __u32 words) {
    h->h.csum = 0;
    __u64 sum = vtl_csum_words((const __u64 *)h, sizeof(*h) / 8);
    int i;
    vtl_for(i, 0, words) {
        if (i >= VTL_ACK_WORDS)
            break;
        sum += map[i];
    }
    return vtl_csum_fold(sum);
}

/* listener: verifies the checksum. */
VTL_INLINE enum vtl_verdict tf_ack_verify(struct vtl_ackd *a) {
    __u32 want = a->hdr->h.csum;
    if (vtl_ack_csum(a->hdr, a->map, a->words) == want)
        return VTL_NEXT;
    vtl_env_count(VTL_ST_RX_BAD_CSUM);
    return VTL_STOP;
}

/* Frees the slots of the packets below `cum`, which was `una` before. They need no retransmission;
 * their bits serve later packets. */
VTL_INLINE void vtl_ack_release(struct vtl_session *s, __u64 cum) {
    struct vtl_tx *tx = &s->tx;
    __u64 first = tx->una / 64, last = cum / 64;
    int i;
    vtl_for(i, 0, VTL_WINDOW_WORDS + 1) {
        if (first + i > last)
            break;
        __u32 word = (first + i) % VTL_WINDOW_WORDS;
        __u64 keep = first + i == last ? ~0ull << (cum % 64) : 0;
        if (!(VTL_LOAD(tx->lost[word]) & ~keep))
            continue;
        __u64 old = __sync_fetch_and_and(&tx->lost[word], keep);
        vtl_loss_undo(s, vtl_popcount(old & ~keep));
    }
    VTL_STORE(tx->una, cum);
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (ctl)
        VTL_STORE(ctl->consumer, cum);
}

/*
 * listener: processes the cumulative part and the flow-control limit. Ignores acknowledgements of
 * packets never sent, and those that withdraw an earlier one.
 */
VTL_INLINE enum vtl_verdict tf_ack_cumulative(struct vtl_ackd *a) {
    struct vtl_session *s = a->s;
    struct vtl_tx *tx = &s->tx;
    __u64 cum = vtl_swap64(a->hdr->cum);
    __u64 received = vtl_swap64(a->hdr->received);
    __u64 limit = vtl_swap64(a->hdr->limit);
    __u64 next = VTL_LOAD(tx->next);
    if (cum > next || received > tx->sent)
        return VTL_STOP;
    if (cum < tx->una || received < tx->delivered)
        return VTL_STOP; /* out of order: a newer one was processed */
    tx->acks++;
    tx->timeouts = 0;
    tx->probe = 0;
    a->cum = cum;
    a->delivered = received - tx->delivered;
    tx->delivered = received;
    if (a->delivered)
        tx->delivered_ns = a->now - a->waited_us * VTL_NS_PER_US;
    __u64 max = (cum & ~63ull) + VTL_MAX_WINDOW;
    if (limit > max)
        limit = max;
    if (limit > tx->limit)
        tx->limit = limit;
    if (cum != tx->una)
        vtl_ack_release(s, cum);
    return VTL_NEXT;
}

#endif
