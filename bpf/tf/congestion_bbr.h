/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* congestion control: sets window and pacing rate by the model of bbr.h. */
#ifndef VTL_TF_CONGESTION_BBR_H
#define VTL_TF_CONGESTION_BBR_H

#include "bbr.h"
#include "rtt.h"

/* egress: before the first packet. Paces the initial window over half a round trip, if the
 * handshake measured one. */
VTL_INLINE void tf_congestion_start(struct vtl_out *o, struct vtl_bbr *b) {
    struct vtl_tx *tx = &o->s->tx;
    if (tx->next)
        return;
    if (!b->floor_q16)
        b->floor_q16 = VTL_BBR_LOSS_ASSUMED;
    if (tx->acks)
        return;
    vtl_bbr_start(b, o->now, tx->srtt_us);
    /* The handshake may have stood in a queue of others, as behind the connection whose bytes this
     * session takes over; or the path has become longer. */
    __u32 known_us = VTL_LOAD(tx->meter.min_rtt_us);
    if (known_us && known_us < tx->srtt_us - tx->srtt_us / 4)
        b->known = VTL_BBR_DOUBTED;
    else if (known_us)
        b->known = VTL_BBR_KNOWN;
    tx->mode = VTL_MODE_STARTUP;
    tx->cwnd = vtl_bbr_initial(tx->srtt_us);
    tx->pacing_gap_ns = tx->srtt_us * VTL_NS_PER_US / (2 * tx->cwnd);
}

/* listener */
VTL_INLINE void tf_congestion_bbr(struct vtl_ackd *a, struct vtl_bbr *b) {
    VTL_TF(congestion_bbr, VTL_S_CONGESTION_CONTROL);
    struct vtl_tx *tx = &a->s->tx;
    struct vtl_bbr_ack ack = {
        .now = a->now,
        .rate = a->rate,
        .delivered = tx->delivered,
        .newly = a->delivered,
        .lost = tx->lost_total,
        .in_flight = a->in_flight,
        .cwnd = tx->cwnd,
        /* As vtl_meter counts them. */
        .transmitted = VTL_LOAD(tx->xid) - 1 - VTL_LOAD(tx->extra),
        .told = vtl_meter_sent(&tx->meter),
        .told_arrived = tx->meter.arrived,
        .sent = a->sent,
        .arrived = a->arrived,
        .rtt_us = a->rtt_us,
        .srtt_us = tx->srtt_us,
        .rttvar_us = tx->rttvar_us,
        .waited_us = a->waited_us,
        .reordering_extent = tx->reordering_extent,
        .reordered_q16 = tx->reordered_q16,
        .marks = vtl_swap16(a->hdr->h.aux),
        .app_limited = a->app_limited,
    };

    vtl_bbr_update(b, &ack);
    _Static_assert((int)VTL_MODE_STARTUP + VTL_BBR_PROBE_RTT == VTL_MODE_PROBE_RTT, "same order");
    tx->mode = VTL_MODE_STARTUP + b->mode;
    tx->pacing_gap_ns = ack.pace ? 1024 * VTL_NS_PER_S / ack.pace : 0;
    tx->cwnd = ack.cwnd;
}

#endif
