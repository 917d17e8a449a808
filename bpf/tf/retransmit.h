/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: which packet to send next. Selective repeat: packets that were declared lost go
 * first, in order; then new ones, as far as the peer's ring, our ring and the congestion window
 * allow. When neither is possible and packets are out, a probe timeout (RFC 9002, 6.2) sends the
 * oldest one again; its acknowledgement describes all the others. window.h is the same without what
 * this does for the end of a transfer, and partial.h is made of its parts.
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
 * The same with backoff. Where data are out, VTL_PTO_ROW packets leave at each timeout (two in RFC
 * 9002, 6.2.4), and the first three timeouts follow each other without backoff: loss comes in
 * bursts of packets, and on a narrow path only our own packets bring a burst to its end.
 */
VTL_INLINE __u64 vtl_timeout(const struct vtl_session *s, int data) {
    __u32 timeouts = s->tx.timeouts;
    if (data && timeouts % VTL_PTO_ROW)
        return VTL_PTO_ROW_MS * VTL_NS_PER_MS;
    if (data)
        timeouts = timeouts < 3 * VTL_PTO_ROW ? 0 : timeouts / VTL_PTO_ROW - 2;
    __u64 timeout = vtl_probe_timeout(s)
                    << (timeouts < VTL_PTO_BACKOFF ? timeouts : VTL_PTO_BACKOFF);
    return timeout < VTL_PTO_MAX_MS * VTL_NS_PER_MS ? timeout : VTL_PTO_MAX_MS * VTL_NS_PER_MS;
}

/* The first packet of `lost`, taken out of it, or VTL_NEVER. */
VTL_INLINE __u64 vtl_take_lost(struct vtl_session *s) {
    __u64 una = VTL_LOAD(s->tx.una);
    __u32 start = una / 64;
    __u32 words = (__u32)((s->tx.next + 63) / 64) - start;
    if (words > VTL_WINDOW_WORDS)
        words = VTL_WINDOW_WORDS;
    __u32 skip = s->tx.scan - start;
    if (skip >= words)
        skip = 0;
    /* From where the last search ended to the end, then from the start: the listener may have
     * marked one behind us. */
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

/* The share of packets lost from which on the last packet of a burst goes twice: 1 % in 65,536ths.
 */
#define VTL_COPY_LOSS 655

/*
 * When the app has nothing more to send, the path has room: what is sent again goes twice, the
 * second time behind all others, and so does the last packet. Otherwise one of them in so many
 * would get lost, too, and the end of a transfer would wait for another round trip.
 */
VTL_INLINE void vtl_copy_later(struct vtl_session *s, __u64 seq) {
    if (s->tx.copied - s->tx.copies < VTL_TX_COPIES)
        s->tx.copy[s->tx.copied++ & (VTL_TX_COPIES - 1)] = seq;
}

/*
 * Shall the last packet that was written go twice? No packet follows it to tell of its loss. Where
 * the ring is what limits, there is more to come; who writes packet by packet has one copy in half
 * a round trip, not of each.
 */
VTL_INLINE int vtl_end_twice(struct vtl_out *o) {
    struct vtl_tx *tx = &o->s->tx;
    if (tx->bbr.loss_q16 < VTL_COPY_LOSS || 2 * (tx->next - VTL_LOAD(tx->una)) >= o->s->slots)
        return 0;
    struct vtl_sent *latest = vtl_env_sent(o->s, tx->copy[(tx->copied - 1) % VTL_TX_COPIES]);
    return latest && o->now - latest->sent_ns >= VTL_NS_PER_US * tx->srtt_us / 2;
}

/* The first packet to be sent a second time that has not been acknowledged, or VTL_NEVER. */
VTL_INLINE __u64 vtl_take_copy(struct vtl_session *s, __u64 una) {
    for (int i = 0; i < VTL_TX_COPIES; i++) {
        if (s->tx.copies == s->tx.copied)
            break;
        __u64 seq = s->tx.copy[s->tx.copies++ & (VTL_TX_COPIES - 1)];
        if (seq >= una)
            return seq;
    }
    return VTL_NEVER;
}

/* First packet that the app has not written, believed only as far as its own ring. */
VTL_INLINE __u64 vtl_end(const struct vtl_session *s, const struct vtl_ring_ctl *ctl, __u64 una) {
    __u64 end = VTL_LOAD(ctl->producer);
    return end - una > s->slots ? una + s->slots : end;
}

/* Sets o->end. False without a ring. */
VTL_INLINE int vtl_written(struct vtl_out *o) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(o->s);
    if (!ctl)
        return 0;
    o->end = vtl_end(o->s, ctl, VTL_LOAD(o->s->tx.una));
    return 1;
}

VTL_INLINE void vtl_again(struct vtl_out *o, __u64 seq) {
    o->seq = seq;
    o->type = VTL_DATA;
    o->flags = VTL_F_RETRANSMIT | VTL_F_ACK_NOW;
}

VTL_INLINE void vtl_probe_peer(struct vtl_out *o) {
    o->seq = o->s->tx.next;
    o->type = VTL_PROBE;
    o->flags = VTL_F_ACK_NOW;
}

/* If the window has room: a lost packet, with `repeat`; a second copy of one, with `copies`; or a
 * new one. */
VTL_INLINE enum vtl_verdict vtl_next(struct vtl_out *o, const int repeat, const int copies) {
    struct vtl_session *s = o->s;
    struct vtl_tx *tx = &s->tx;
    __u64 in_flight = vtl_in_flight(s);
    if (in_flight >= VTL_LOAD(tx->cwnd))
        return VTL_STOP;
    if (repeat && VTL_LOAD(tx->lost_pending)) {
        __u64 seq = vtl_take_lost(s);
        if (seq != VTL_NEVER && seq >= VTL_LOAD(tx->una) && seq < tx->next) {
            if (copies && tx->next >= o->end)
                vtl_copy_later(s, seq);
            vtl_again(o, seq);
            return VTL_NEXT;
        }
    }
    if (copies && tx->copies != tx->copied) {
        __u64 seq = vtl_take_copy(s, VTL_LOAD(tx->una));
        if (seq != VTL_NEVER && seq < tx->next) {
            tx->abandoned++; /* the first copy: only one of them will count as delivered */
            vtl_again(o, seq);
            return VTL_NEXT;
        }
    }
    if (tx->next < o->end && tx->next < VTL_LOAD(tx->limit)) {
        if (copies && tx->next + 1 == o->end && vtl_end_twice(o))
            vtl_copy_later(s, tx->next);
        o->seq = tx->next;
        o->type = VTL_DATA;
        o->flags = 0;
        return VTL_NEXT;
    }
    tx->app_limited = tx->delivered + in_flight + !in_flight; /* not the path sets the pace */
    return VTL_STOP;
}

/* Is it time for the timeout, or for vtld's question whether the peer is there, which leaves at
 * once and is no timeout? Else tx.wake_ns says when. `waiting`: packets are out, or wait for room
 * in the peer's ring; `data`: see vtl_timeout. */
VTL_INLINE int vtl_timer(struct vtl_out *o, int waiting, int data) {
    struct vtl_tx *tx = &o->s->tx;
    if (!waiting && !tx->probe)
        return 0;
    if (tx->probe == 1) {
        tx->probe = 2;
        return 1;
    }
    __u64 due = tx->last_sent_ns + vtl_timeout(o->s, data);
    if (o->now < due) {
        tx->wake_ns = due;
        return 0;
    }
    tx->timeouts++;
    return 1;
}

/* Chooses o->seq, or says when to try again (tx.wake_ns). `eager`: the end of a transfer goes twice
 * (vtl_copy_later), and timeouts come in rows of four (vtl_timeout). */
VTL_INLINE enum vtl_verdict vtl_choose(struct vtl_out *o, const int eager) {
    struct vtl_tx *tx = &o->s->tx;
    if (!vtl_written(o))
        return VTL_STOP;
    if (vtl_next(o, 1, eager) == VTL_NEXT)
        return VTL_NEXT;
    __u64 una = VTL_LOAD(tx->una);
    int out = tx->next != una, stopped = tx->next < o->end;
    if (!vtl_timer(o, out | stopped, eager && out))
        return VTL_STOP;
    if (out) {
        vtl_again(o, una);
        tx->abandoned++;
    } else {
        vtl_probe_peer(o);
    }
    return VTL_NEXT;
}

/* egress */
VTL_INLINE enum vtl_verdict tf_choose(struct vtl_out *o) {
    VTL_TF(retransmit, VTL_S_RELIABLE);
    return vtl_choose(o, 1);
}

/* Would vtl_choose find a packet? Asked again after egress said that it has none, so that an event
 * in between is not missed. */
VTL_INLINE int vtl_can_send(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (!ctl || vtl_in_flight(s) >= VTL_LOAD(s->tx.cwnd))
        return 0;
    if (VTL_LOAD(s->tx.lost_pending) || s->tx.copies != s->tx.copied)
        return 1;
    __u64 end = vtl_end(s, ctl, VTL_LOAD(s->tx.una));
    return s->tx.next < end && s->tx.next < VTL_LOAD(s->tx.limit);
}

#endif
