/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: which packet to send next. Selective repeat: packets that were declared lost go
 * first, in order; then new ones, as far as the peer's ring, our ring and the congestion window
 * allow. When neither is possible and packets are out, a probe timeout (RFC 9002, 6.2) sends the
 * oldest one again; its acknowledgement describes all the others.
 */
#ifndef VTL_TF_RETRANSMIT_H
#define VTL_TF_RETRANSMIT_H

#include "vtl/tf.h"

/* Probe timeout without backoff, ns. */
VTL_INLINE __u64 vtl_probe_timeout(const struct vtl_session *s) {
    if (!s->tx.srtt_us)
        return 500 * VTL_NS_PER_MS;
    __u64 ns = (s->tx.srtt_us + 4ull * s->tx.rttvar_us) * VTL_NS_PER_US + 5 * VTL_NS_PER_MS;
    return ns < 10 * VTL_NS_PER_MS ? 10 * VTL_NS_PER_MS : ns;
}

/*
 * The same with backoff. Where data are out, four packets leave at each timeout (two in RFC 9002,
 * 6.2.4), and the first three timeouts follow each other without backoff: loss comes in bursts of
 * packets, and on a narrow path only our own packets bring a burst to its end.
 */
VTL_INLINE __u64 vtl_timeout(const struct vtl_session *s, int data) {
    __u32 timeouts = s->tx.timeouts;
    if (data && timeouts % 4)
        return VTL_NS_PER_MS;
    if (data)
        timeouts = timeouts < 12 ? 0 : timeouts / 4 - 2;
    __u64 timeout = vtl_probe_timeout(s) << (timeouts < 6 ? timeouts : 6);
    return timeout < 3 * VTL_NS_PER_S ? timeout : 3 * VTL_NS_PER_S;
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

/*
 * When the app has nothing more to send, the path has room: what is sent again goes twice, the
 * second time behind all others. Otherwise one retransmission in so many would get lost, too, and
 * the end of a transfer would wait for another round trip.
 */
VTL_INLINE void vtl_copy_later(struct vtl_session *s, __u64 seq) {
    if (s->tx.copied - s->tx.copies < VTL_TX_COPIES)
        s->tx.copy[s->tx.copied++ & (VTL_TX_COPIES - 1)] = seq;
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

/*
 * Chooses o->seq, or says when to try again (s->tx.wake_ns). `producer` is what the app claims to
 * have written: it is believed only as far as its own ring.
 */
VTL_INLINE enum vtl_verdict tf_choose(struct vtl_out *o) {
    VTL_TF(retransmit, VTL_S_RELIABLE);
    struct vtl_session *s = o->s;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (!ctl)
        return VTL_STOP;
    __u64 una = VTL_LOAD(s->tx.una);
    __u64 limit = VTL_LOAD(s->tx.limit);
    __u64 end = VTL_LOAD(ctl->producer);
    if (end - una > s->slots)
        end = una + s->slots;
    o->end = end;
    __u64 in_flight = vtl_in_flight(s);
    int room = in_flight < s->tx.cwnd;

    if (room && VTL_LOAD(s->tx.lost_pending)) {
        __u64 seq = vtl_take_lost(s);
        if (seq != VTL_NEVER && seq >= una && seq < s->tx.next) {
            if (s->tx.next >= end)
                vtl_copy_later(s, seq);
            o->seq = seq;
            o->type = VTL_DATA;
            o->flags = VTL_F_RETRANSMIT | VTL_F_ACK_NOW;
            return VTL_NEXT;
        }
    }
    if (room && s->tx.copies != s->tx.copied) {
        __u64 seq = vtl_take_copy(s, una);
        if (seq != VTL_NEVER && seq < s->tx.next) {
            s->tx.abandoned++; /* the first copy: only one of them will count as delivered */
            o->seq = seq;
            o->type = VTL_DATA;
            o->flags = VTL_F_RETRANSMIT | VTL_F_ACK_NOW;
            return VTL_NEXT;
        }
    }
    if (room && s->tx.next < end && s->tx.next < limit) {
        o->seq = s->tx.next;
        o->type = VTL_DATA;
        o->flags = 0;
        return VTL_NEXT;
    }
    if (room && (s->tx.next >= end || s->tx.next >= limit)) /* not the path sets the pace */
        s->tx.app_limited = s->tx.delivered + in_flight + !in_flight;
    __u64 outstanding = s->tx.next - una;
    if (!outstanding && !s->tx.probe && s->tx.next >= end)
        return VTL_STOP;
    /* Packets are out, or the peer's ring is full, or vtld asks whether the peer is there. */
    int data = outstanding && !s->tx.probe;
    __u64 timeout = vtl_timeout(s, data);
    __u64 due = s->tx.last_sent_ns + timeout;
    if (s->tx.probe == 1) {
        s->tx.probe = 2; /* the first leaves at once */
        due = o->now;
    }
    if (o->now < due) {
        s->tx.wake_ns = due;
        return VTL_STOP;
    }
    s->tx.timeouts++;
    o->flags = VTL_F_ACK_NOW;
    if (data) {
        o->seq = una;
        o->type = VTL_DATA;
        o->flags |= VTL_F_RETRANSMIT;
        s->tx.abandoned++;
    } else {
        o->seq = s->tx.next;
        o->type = VTL_PROBE;
    }
    return VTL_NEXT;
}

/* Would tf_choose find a packet? Asked again after egress said that it has none, so that an event
 * in between is not missed. */
VTL_INLINE int vtl_can_send(struct vtl_session *s) {
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (!ctl || vtl_in_flight(s) >= VTL_LOAD(s->tx.cwnd))
        return 0;
    if (VTL_LOAD(s->tx.lost_pending) || s->tx.copies != s->tx.copied)
        return 1;
    __u64 end = VTL_LOAD(ctl->producer);
    __u64 una = VTL_LOAD(s->tx.una);
    if (end - una > s->slots)
        end = una + s->slots;
    return s->tx.next < end && s->tx.next < VTL_LOAD(s->tx.limit);
}

#endif
