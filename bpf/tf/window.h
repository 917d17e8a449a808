/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability and flow control: a sliding window. At most `window` packets beyond the oldest one
 * that is not acknowledged are under way; what was declared lost goes first, then new packets; when
 * neither is possible, a retransmission timer (RFC 6298) sends the oldest packet again. What counts
 * as lost is for others to say (loss.h, go_back.h, nobody): so this is stop-and-wait with a window
 * of 1, go-back-N and selective repeat. The window is what the sender grants itself: it is laid
 * over the limit that the receiver grants, and needs no state.
 */
#ifndef VTL_TF_WINDOW_H
#define VTL_TF_WINDOW_H

#include "retransmit.h"

/* egress: before the first packet, takes the window over. */
VTL_INLINE void tf_window_start(struct vtl_out *o, __u32 window) {
    struct vtl_tx *tx = &o->s->tx;
    if (tx->next)
        return;
    if (tx->limit > window)
        VTL_STORE(tx->limit, window);
    tx->cwnd = window;
}

/* listener: between tf_ack_verify and tf_ack_cumulative. */
VTL_INLINE void tf_window_limit(struct vtl_ackd *a, __u32 window) {
    __u64 most = vtl_swap64(a->hdr->cum) + window;
    if (vtl_swap64(a->hdr->limit) > most)
        a->hdr->limit = vtl_swap64(most);
}

/* What the app has written, believed only as far as its own ring. False without a ring. */
VTL_INLINE int vtl_written(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (!ctl)
        return 0;
    __u64 una = VTL_LOAD(s->tx.una);
    o->end = VTL_LOAD(ctl->producer);
    if (o->end - una > s->slots)
        o->end = una + s->slots;
    return 1;
}

/* Is it time for the retransmission timer, or for a question whether the peer is there? Else
 * tx.wake_ns says when. `waiting`: something is out, or stopped. */
VTL_INLINE int vtl_timer(struct vtl_out *o, int waiting) {
    struct vtl_tx *tx = &o->s->tx;
    if (!waiting && !tx->probe)
        return 0;
    __u64 due = tx->last_sent_ns + vtl_timeout(o->s, 0);
    if (tx->probe == 1) {
        tx->probe = 2; /* the first leaves at once */
        due = o->now;
    }
    if (o->now < due) {
        tx->wake_ns = due;
        return 0;
    }
    tx->timeouts++;
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

/* A lost packet, with `repeat`, or a new one, if the window has room for it. */
VTL_INLINE enum vtl_verdict vtl_window_next(struct vtl_out *o, const int repeat) {
    struct vtl_session *s = o->s;
    struct vtl_tx *tx = &s->tx;
    __u64 in_flight = vtl_in_flight(s);
    if (in_flight >= VTL_LOAD(tx->cwnd))
        return VTL_STOP;
    if (repeat && VTL_LOAD(tx->lost_pending)) {
        __u64 seq = vtl_take_lost(s);
        if (seq != VTL_NEVER && seq >= VTL_LOAD(tx->una) && seq < tx->next) {
            vtl_again(o, seq);
            return VTL_NEXT;
        }
    }
    if (tx->next < o->end && tx->next < VTL_LOAD(tx->limit)) {
        o->seq = tx->next;
        o->type = VTL_DATA;
        o->flags = 0;
        return VTL_NEXT;
    }
    tx->app_limited = tx->delivered + in_flight + !in_flight; /* not the path sets the pace */
    return VTL_STOP;
}

/* egress: chooses o->seq, or says when to try again. */
VTL_INLINE enum vtl_verdict tf_window_choose(struct vtl_out *o) {
    VTL_TF(window, VTL_S_RELIABLE);
    struct vtl_session *s = o->s;
    if (!vtl_written(o))
        return VTL_STOP;
    if (vtl_window_next(o, 1) == VTL_NEXT)
        return VTL_NEXT;
    __u64 una = VTL_LOAD(s->tx.una);
    int out = s->tx.next != una;
    int probe = s->tx.probe != 0;
    if (!vtl_timer(o, out || s->tx.next < o->end))
        return VTL_STOP;
    if (out && !probe) {
        vtl_again(o, una);
        s->tx.abandoned++;
    } else {
        vtl_probe_peer(o);
    }
    return VTL_NEXT;
}

#endif
