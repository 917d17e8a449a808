/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * measurement: round-trip time (RFC 6298 with the timestamps of RFC 7323: every echo is a sample,
 * also of retransmissions), loss (transmissions against arrivals), and delivery rate
 * (draft-cheng-iccrg-delivery-rate-estimation).
 */
#ifndef VTL_TF_RTT_H
#define VTL_TF_RTT_H

#include "vtl/tf.h"

/* Transmissions whose fate is known. */
VTL_INLINE __u32 vtl_meter_sent(const struct vtl_meter *m) {
    return m->xid - m->extra;
}

/*
 * Updates the meter. Counts are cumulative, so a lost acknowledgement costs nothing. Returns
 * whether most transmissions since the previous acknowledgement are still missing: lost, or
 * overtaken on a shorter route by the packet that caused this one.
 */
VTL_INLINE int vtl_meter_count(struct vtl_ackd *a) {
    struct vtl_tx *tx = &a->s->tx;
    struct vtl_meter *m = &tx->meter;
    __u32 sent = vtl_meter_sent(m), arrived = m->arrived;
    __u32 xid = vtl_swap32(a->hdr->echo_xid);
    if ((__s32)(xid - m->xid) < 0 || (__s32)(xid - VTL_LOAD(tx->xid)) >= 0)
        return 0; /* out of order, or never sent */
    m->xid = xid;
    m->extra = VTL_LOAD(tx->extra);
    /* Extra transmissions that egress has made since are not among these. */
    if ((__s32)(vtl_meter_sent(m) - sent) < 0)
        m->extra = xid - sent;
    m->received = vtl_swap64(a->hdr->received);
    m->arrived = (__u32)m->received + vtl_swap32(a->hdr->dups);
    a->sent = vtl_meter_sent(m) - sent;
    a->arrived = m->arrived - arrived;
    return a->sent > 2 && a->arrived < (a->sent + 1) / 2;
}

/* Takes a round-trip sample into the meter's minimum filter. */
VTL_INLINE void vtl_meter_rtt(struct vtl_ackd *a, __u32 rtt_us) {
    struct vtl_meter *m = &a->s->tx.meter;
    if (m->min_rtt_us && rtt_us > m->min_rtt_us &&
        a->now - m->min_rtt_ns < VTL_MIN_RTT_MS * VTL_NS_PER_MS)
        return;
    m->min_rtt_us = rtt_us;
    m->min_rtt_ns = a->now;
}

/* listener: after tf_ack_cumulative and loss detection (acked_xid): updates the meter, and samples
 * the round-trip time. */
VTL_INLINE void tf_rtt(struct vtl_ackd *a) {
    VTL_TF(rtt, 0);
    struct vtl_tx *tx = &a->s->tx;
    if (a->hdr->h.flags & VTL_F_UPDATE)
        return;
    int overtook = vtl_meter_count(a);
    /* A late duplicate shows the timing of a replay, or of a spurious retransmission. */
    if (!a->delivered && (__s32)(vtl_swap32(a->hdr->echo_xid) - tx->acked_xid) < 0)
        return;
    __u32 rtt = (__u32)(a->now / VTL_NS_PER_US) - vtl_swap32(a->hdr->echo_ts);
    if (rtt > VTL_RTT_MAX_US)
        return; /* no timestamp of ours */
    if (!rtt)
        rtt = 1;
    /* No minimum from packets on a shorter route: it must hold for all of them. */
    if (!overtook || !tx->meter.min_rtt_us) {
        a->rtt_us = rtt;
        vtl_meter_rtt(a, rtt);
    }
    if (!tx->srtt_us || tx->acks == 1) { /* replaces vtld's estimate from the handshake */
        tx->srtt_us = rtt;
        tx->rttvar_us = rtt / 2;
        return;
    }
    __u32 error = rtt > tx->srtt_us ? rtt - tx->srtt_us : tx->srtt_us - rtt;
    tx->rttvar_us = (3 * tx->rttvar_us + error) / 4;
    tx->srtt_us = (7ull * tx->srtt_us + rtt + 7) / 8;
}

/* listener: after tf_rtt: samples the delivery rate, and counts the packets in flight.
 * `min_rtt_us`: congestion control's minimum round-trip time; 0: none, all samples count. */
VTL_INLINE void tf_delivery_rate(struct vtl_ackd *a, __u32 min_rtt_us) {
    struct vtl_session *s = a->s;
    struct vtl_tx *tx = &s->tx;
    a->in_flight = vtl_in_flight(s);
    if (tx->app_limited && tx->delivered > tx->app_limited)
        tx->app_limited = 0;
    /* Without a sample, the session's state counts. */
    a->app_limited = tx->app_limited != 0;
    __u64 seq = vtl_swap64(a->hdr->echo_seq);
    if (!a->delivered || a->hdr->h.flags & VTL_F_UPDATE || seq >= VTL_LOAD(tx->next))
        return;
    struct vtl_sent *sent = vtl_env_sent(s, seq);
    if (!sent || sent->xid != vtl_swap32(a->hdr->echo_xid))
        return;
    __u64 delivered = tx->delivered - sent->delivered;
    __u64 send_ns = sent->sent_ns - sent->first_ns;
    __u64 now = a->now - a->waited_us * VTL_NS_PER_US;
    __u64 ack_ns = now > sent->delivered_ns ? now - sent->delivered_ns : 0;
    __u64 ns = send_ns > ack_ns ? send_ns : ack_ns;
    tx->first_sent_ns = sent->sent_ns;
    a->app_limited = sent->app_limited;
    /* Samples over less than the minimum round-trip time are invalid (section 4.1.2 of the
     * draft). */
    if (!ns || ns > VTL_RTT_MAX_US * VTL_NS_PER_US || delivered > 1u << 24 ||
        ns / VTL_NS_PER_US < min_rtt_us)
        return;
    a->rate = delivered * (1024 * VTL_NS_PER_S) / ns;
}

#endif
