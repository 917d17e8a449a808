/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: selective repeat. Chooses the next packet: lost packets first, in order; then new
 * ones, within the peer's receive window, our ring and the congestion window. If neither is
 * possible and packets are outstanding, a probe timeout (RFC 9002, 6.2) retransmits the oldest; its
 * acknowledgement describes all others. window.h is the same without measures for the tail of a
 * transfer; partial.h reuses the parts.
 */
#ifndef VTL_TF_RETRANSMIT_H
#define VTL_TF_RETRANSMIT_H

#include "vtl/tf.h"

/* Probe timeout without backoff, ns. */
VTL_INLINE __u64 vtl_probe_timeout(const struct vtl_session *s) {
    if (!s->tx.srtt_us)
        return VTL_PTO_FIRST_MS * VTL_NS_PER_MS;
    __u64 ns =
        (s->tx.srtt_us + 4ull * s->tx.rttvar_us) * VTL_NS_PER_US + VTL_PTO_DELAY_MS * VTL_NS_PER_MS;
    return ns < VTL_PTO_MIN_MS * VTL_NS_PER_MS ? VTL_PTO_MIN_MS * VTL_NS_PER_MS : ns;
}

/*
 * Probe timeout with backoff. With data outstanding, VTL_PTO_PROBES packets leave at each timeout
 * (two in RFC 9002, 6.2.4), and the first three timeouts have no backoff: losses are bursty, and on
 * a narrow path only our own packets get a burst over.
 */
VTL_INLINE __u64 vtl_probe_timeout_backoff(const struct vtl_session *s, int data) {
    __u32 timeouts = s->tx.timeouts;
    if (data && timeouts % VTL_PTO_PROBES)
        return VTL_PTO_PROBE_GAP_MS * VTL_NS_PER_MS;
    if (data)
        timeouts = timeouts < 3 * VTL_PTO_PROBES ? 0 : timeouts / VTL_PTO_PROBES - 2;
    __u64 timeout = vtl_probe_timeout(s)
                    << (timeouts < VTL_PTO_BACKOFF ? timeouts : VTL_PTO_BACKOFF);
    return timeout < VTL_PTO_MAX_MS * VTL_NS_PER_MS ? timeout : VTL_PTO_MAX_MS * VTL_NS_PER_MS;
}

/* Takes the first packet out of `lost`; VTL_NEVER if there is none. */
VTL_GLOBAL __u64 vtl_take_lost(struct vtl_session *s) {
    if (!s)
        return VTL_NEVER;
    __u64 una = VTL_LOAD(s->tx.una);
    __u32 start = una / 64;
    __u32 words = (__u32)((s->tx.next + 63) / 64) - start;
    if (words > VTL_WINDOW_WORDS)
        words = VTL_WINDOW_WORDS;
    __u32 skip = s->tx.scan - start;
    skip = vtl_unknown(skip < words ? skip : 0);
    words = vtl_unknown(words);
    /* From the end of the latest search to the end of the window, then from its start: the listener
     * may have marked an earlier packet. */
    int turn;
    vtl_for(turn, 0, words) {
        __u32 i = skip + turn;
        if (i >= words)
            i -= words;
        __u32 word = (start + i) % VTL_WINDOW_WORDS;
        __u64 bits = VTL_LOAD(s->tx.lost[word]);
        if (!bits)
            continue;
        __u64 mask = bits & -bits;
        s->tx.scan = start + i;
        if (!(__sync_fetch_and_and(&s->tx.lost[word], ~mask) & mask))
            continue; /* acknowledged meanwhile */
        __sync_fetch_and_add(&s->tx.lost_pending, -1);
        return ((una & ~63ull) + i * 64ull) | vtl_lowest_bit(mask);
    }
    s->tx.scan = start;
    return VTL_NEVER;
}

/* Loss rate from which the last packet of a burst is sent twice: 1 % in 65,536ths. */
#define VTL_COPY_LOSS 655

/*
 * Schedules a second copy of `seq`. While the app has nothing more to send, the path has room:
 * retransmissions are sent twice, the copy behind all others, and so is the last packet (tail
 * loss). Otherwise some would be lost again, each at the cost of a round trip at the end of a
 * transfer.
 */
VTL_INLINE void vtl_schedule_copy(struct vtl_session *s, __u64 seq) {
    if (s->tx.copies_scheduled - s->tx.copies_done < VTL_TX_COPIES)
        s->tx.copy[s->tx.copies_scheduled++ & (VTL_TX_COPIES - 1)] = seq;
}

/* Whether the path has room for copies: not if most of a round trip is a queue of ours that has
 * overflowed. A fifth of all packets lost is more than paths lose by chance. */
VTL_INLINE int vtl_has_room(const struct vtl_session *s) {
    const struct vtl_tx *tx = &s->tx;
    __u32 min_us = tx->meter.min_rtt_us;
    return !min_us || 4 * tx->lost_total < tx->delivered || tx->srtt_us <= min_us + min_us / 2;
}

/*
 * Whether the last packet written is to be sent twice: no later packet reveals its loss. Not while
 * the ring is the limit, since more will follow; at most one copy per half a round trip, for apps
 * that write packet by packet.
 */
VTL_INLINE int vtl_is_tail_copy_due(struct vtl_out *o, const __u32 *loss_q16) {
    struct vtl_tx *tx = &o->s->tx;
    if (*loss_q16 < VTL_COPY_LOSS || 2 * (tx->next - VTL_LOAD(tx->una)) >= o->s->slots)
        return 0;
    struct vtl_sent *latest =
        vtl_env_sent(o->s, tx->copy[(tx->copies_scheduled - 1) % VTL_TX_COPIES]);
    return latest && o->now - latest->sent_ns >= VTL_NS_PER_US * tx->srtt_us / 2;
}

/* Takes the first scheduled second copy that is not acknowledged; VTL_NEVER if there is none. */
VTL_GLOBAL __u64 vtl_take_copy(struct vtl_session *s, __u64 una) {
    if (!s)
        return VTL_NEVER;
    int i;
    vtl_for(i, 0, VTL_TX_COPIES) {
        if (s->tx.copies_done == s->tx.copies_scheduled)
            break;
        __u64 seq = s->tx.copy[s->tx.copies_done++ & (VTL_TX_COPIES - 1)];
        if (seq >= una)
            return seq;
    }
    return VTL_NEVER;
}

/* End of the data written by the app, bounded by its ring. */
VTL_INLINE __u64 vtl_written_end(const struct vtl_session *s, const struct vtl_ring_ctl *ctl,
                                 __u64 una) {
    __u64 end = VTL_LOAD(ctl->producer);
    return end - una > s->slots ? una + s->slots : end;
}

/* Sets o->end. Returns 0 without a ring. */
VTL_INLINE int vtl_read_end(struct vtl_out *o) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(o->s);
    if (!ctl)
        return 0;
    o->end = vtl_written_end(o->s, ctl, VTL_LOAD(o->s->tx.una));
    return 1;
}

/* Makes the packet a retransmission of `seq`. */
VTL_INLINE void vtl_retransmit(struct vtl_out *o, __u64 seq) {
    o->seq = seq;
    o->type = VTL_DATA;
    o->flags = VTL_F_RETRANSMIT | VTL_F_ACK_NOW;
}

/* Makes the packet a PROBE, which carries no data. */
VTL_INLINE void vtl_probe(struct vtl_out *o) {
    o->seq = o->s->tx.next;
    o->type = VTL_PROBE;
    o->flags = VTL_F_ACK_NOW;
}

/* Chooses a packet within the congestion window: a lost one, if `repeat`; a second copy, if
 * `eager` (vtl_choose); or a new one. */
VTL_INLINE enum vtl_verdict vtl_next(struct vtl_out *o, const int repeat, const __u32 *eager) {
    struct vtl_session *s = o->s;
    struct vtl_tx *tx = &s->tx;
    __u64 in_flight = vtl_in_flight(s);
    if (in_flight >= VTL_LOAD(tx->cwnd))
        return VTL_STOP;
    if (repeat && VTL_LOAD(tx->lost_pending)) {
        __u64 seq = vtl_take_lost(s);
        if (seq != VTL_NEVER && seq >= VTL_LOAD(tx->una) && seq < tx->next) {
            if (eager && tx->next >= o->end && vtl_has_room(s))
                vtl_schedule_copy(s, seq);
            vtl_retransmit(o, seq);
            return VTL_NEXT;
        }
    }
    if (eager && tx->copies_done != tx->copies_scheduled) {
        __u64 seq = vtl_take_copy(s, VTL_LOAD(tx->una));
        if (seq != VTL_NEVER && seq < tx->next) {
            tx->abandoned++; /* the first copy: only one of them counts as delivered */
            vtl_retransmit(o, seq);
            return VTL_NEXT;
        }
    }
    if (tx->next < o->end && tx->next < VTL_LOAD(tx->limit)) {
        if (eager && tx->next + 1 == o->end && vtl_is_tail_copy_due(o, eager))
            vtl_schedule_copy(s, tx->next);
        o->seq = tx->next;
        o->type = VTL_DATA;
        o->flags = 0;
        return VTL_NEXT;
    }
    tx->app_limited = tx->delivered + in_flight + !in_flight;
    return VTL_STOP;
}

/* Whether the probe timeout is due, or vtld's liveness probe, which leaves at once and is no
 * timeout. If not, sets tx.wake_ns. `waiting`: packets are outstanding, or wait for the peer's
 * receive window; `data`: see vtl_probe_timeout_backoff. */
VTL_INLINE int vtl_probe_due(struct vtl_out *o, int waiting, int data) {
    struct vtl_tx *tx = &o->s->tx;
    if (!waiting && !tx->probe)
        return 0;
    if (tx->probe == 1) {
        tx->probe = 2;
        return 1;
    }
    __u64 due = tx->last_sent_ns + vtl_probe_timeout_backoff(o->s, data);
    if (o->now < due) {
        tx->wake_ns = due;
        return 0;
    }
    tx->timeouts++;
    return 1;
}

/* Chooses o->seq, or sets tx.wake_ns. `eager`, the loss rate of VTL_COPY_LOSS: second copies at the
 * tail of a transfer (vtl_schedule_copy), and timeouts in rows of four (vtl_probe_timeout_backoff);
 * NULL: neither.
 */
VTL_INLINE enum vtl_verdict vtl_choose(struct vtl_out *o, const __u32 *eager) {
    struct vtl_tx *tx = &o->s->tx;
    if (!vtl_read_end(o))
        return VTL_STOP;
    if (vtl_next(o, 1, eager) == VTL_NEXT)
        return VTL_NEXT;
    __u64 una = VTL_LOAD(tx->una);
    int out = tx->next != una, stopped = tx->next < o->end;
    if (!vtl_probe_due(o, out | stopped, eager && out))
        return VTL_STOP;
    if (out) {
        vtl_retransmit(o, una);
        tx->abandoned++;
    } else {
        vtl_probe(o);
    }
    return VTL_NEXT;
}

/* egress. `loss_q16`: congestion control's loss rate, 65,536 = all. */
VTL_INLINE enum vtl_verdict tf_choose(struct vtl_out *o, const __u32 *loss_q16) {
    VTL_TF(retransmit, VTL_S_RELIABLE);
    return vtl_choose(o, loss_q16);
}

/* Whether vtl_choose would find a packet. Called after egress announced that it has none, so that
 * no event in between is missed. */
VTL_INLINE int vtl_can_send(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (!ctl || vtl_in_flight(s) >= VTL_LOAD(s->tx.cwnd))
        return 0;
    if (VTL_LOAD(s->tx.lost_pending) || s->tx.copies_done != s->tx.copies_scheduled)
        return 1;
    __u64 end = vtl_written_end(s, ctl, VTL_LOAD(s->tx.una));
    return s->tx.next < end && s->tx.next < VTL_LOAD(s->tx.limit);
}

#endif
