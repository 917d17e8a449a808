// SPDX-License-Identifier: GPL-2.0-only
/*
 * Microbenchmarks for `vtl bench micro`: cost of each transport function of the stream graft in the
 * kernel, and of composition. Two programs each: base_NAME prepares a context TURNS times
 * (base1_NAME once), cost_NAME also calls the function on it. The difference of their times over
 * TURNS is the function's cost. They use session 1 and its rings, which crates/vtl-bpf/src/trial.rs
 * makes.
 */
#include "grafts/stream.bpf.c"
#include "tf/window.h"

/* SID, TURNS and PAYLOAD as in trial.rs. */
enum { SID = 1, TURNS = 64, PAYLOAD = 1440, WORDS = 16 };

/* The compiler must neither drop the context nor keep it in registers. */
#define KEEP(c) asm volatile("" ::"r"(&(c)) : "memory")

/* A function costs the same whatever kind of program it is compiled into. */
#define MICRO(name, setup, ready, call)                                                            \
    SEC("tc") int base_##name(struct __sk_buff *ctx) {                                             \
        setup;                                                                                     \
        int i;                                                                                     \
        vtl_for(i, 0, TURNS) {                                                                     \
            ready;                                                                                 \
            KEEP(c);                                                                               \
        }                                                                                          \
        return 0;                                                                                  \
    }                                                                                              \
    SEC("tc") int cost_##name(struct __sk_buff *ctx) {                                             \
        setup;                                                                                     \
        int i;                                                                                     \
        vtl_for(i, 0, TURNS) {                                                                     \
            ready;                                                                                 \
            KEEP(c);                                                                               \
            call;                                                                                  \
            KEEP(c);                                                                               \
        }                                                                                          \
        return 0;                                                                                  \
    }
/* Functions with loops that the verifier does not follow in a loop: one call per run. */
#define MICRO_ONCE(name, setup, ready, call)                                                       \
    SEC("tc") int base1_##name(struct __sk_buff *ctx) {                                            \
        setup;                                                                                     \
        ready;                                                                                     \
        KEEP(c);                                                                                   \
        return 0;                                                                                  \
    }                                                                                              \
    SEC("tc") int cost1_##name(struct __sk_buff *ctx) {                                            \
        setup;                                                                                     \
        ready;                                                                                     \
        KEEP(c);                                                                                   \
        call;                                                                                      \
        KEEP(c);                                                                                   \
        return 0;                                                                                  \
    }

#define SESSION                                                                                    \
    asm volatile("" ::"r"(ctx));                                                                   \
    struct vtl_session *s = vtl_session_at(SID);                                                   \
    if (!s)                                                                                        \
    return -1

/* Overhead of the method itself. */
MICRO(nothing, SESSION; __u64 c = 0, c = i, KEEP(c))

/* ------------------------------------------------------------------------------------- egress */

#define OUT                                                                                        \
    SESSION;                                                                                       \
    struct vtl_out c = {.s = s, .now = bpf_ktime_get_ns(), .type = VTL_DATA, .len = PAYLOAD};      \
    if (vtl_fetch(&c))                                                                             \
    return -1

MICRO(congestion_start, OUT, s->tx.acks = 1, tf_congestion_start(&c, BBR(s)))
MICRO(pace_wait, OUT, s->tx.pace_ns = 0, tf_pace_wait(&c))
MICRO_ONCE(choose, OUT, c.seq = 0, tf_choose(&c, &BBR(s)->loss_q16))
MICRO(fetch, OUT, c.seq = i, vtl_fetch(&c))
/* A new packet each time, as in order. */
MICRO(number, OUT, c.flags = 0; c.seq = i; VTL_STORE(s->tx.next, i), tf_number(&c))
MICRO(pace_charge, OUT, s->tx.pace_ns = 0, tf_pace_charge(&c))
MICRO(checksum_add, OUT, c.sum = i, tf_checksum_add(&c))
MICRO(copy_out, OUT, c.sum = 0,
      c.sum = vtl_tc_put(ctx, c.slot, VTL_OFFSET_V4 + sizeof(struct vtl_data_hdr), PAYLOAD))

/* ------------------------------------------------------------------------------------ ingress */

#define IN                                                                                         \
    SESSION;                                                                                       \
    struct vtl_data_hdr hdr = {};                                                                  \
    struct vtl_in c = {.s = s, .hdr = &hdr, .type = VTL_DATA, .len = PAYLOAD};                     \
    c.slot = vtl_env_rx_slot(s, 0);                                                                \
    if (!c.slot)                                                                                   \
    return -1

MICRO(receive_admit, IN, c.seq = s->rx.cum, tf_receive_admit(&c))
MICRO(copy_in, IN, c.sum = 0,
      c.sum = vtl_tc_take(ctx, c.slot, VTL_OFFSET_V4 + sizeof(struct vtl_data_hdr), PAYLOAD))
MICRO(checksum_verify, IN, hdr.h.csum = vtl_csum_fold(0), tf_checksum_verify(&c))
MICRO_ONCE(receive_place, IN, c.seq = s->rx.cum, tf_receive_place(&c))
/* Last packet of a burst: published with a fence. */
MICRO_ONCE(receive_place_last, IN, c.seq = s->rx.cum;
           hdr.h.flags = VTL_F_ACK_NOW, tf_receive_place(&c))
MICRO(ack_note, IN, c.seq = i, tf_ack_note(&c))
MICRO(reverse_note, IN, s->tx.next = s->tx.una + 64, tf_reverse_note(&c, REVERSE(s)))

#define ANSWER                                                                                     \
    SESSION;                                                                                       \
    struct vtl_ack_hdr c = {};                                                                     \
    struct vtl_scratch *scratch = vtl_get_scratch();                                               \
    if (!scratch)                                                                                  \
    return -1

MICRO_ONCE(ack_build, ANSWER, s->rx.max = s->rx.cum, vtl_ack_build(s, &c, scratch->map, 0, 0))
MICRO_ONCE(ack_build_bitmap, ANSWER, s->rx.max = s->rx.cum + 64 * WORDS,
           vtl_ack_build(s, &c, scratch->map, WORDS, 0))

/* ----------------------------------------------------------------------------------- listener */

/* Unknown to the verifier, as in the graft: else it would follow every iteration of every loop. */
#define ACKD                                                                                       \
    SESSION;                                                                                       \
    struct vtl_scratch *scratch = vtl_get_scratch();                                               \
    struct vtl_sent *sent = vtl_env_sent(s, 0);                                                    \
    if (!scratch || !sent)                                                                         \
        return -1;                                                                                 \
    __u64 zero = VTL_LOAD(s->rx.cum);                                                              \
    struct vtl_ack_hdr hdr = {.skip = zero, .h = {.flags = zero}};                                 \
    struct vtl_ackd c = {.s = s,                                                                   \
                         .now = bpf_ktime_get_ns(),                                                \
                         .hdr = &hdr,                                                              \
                         .map = scratch->map,                                                      \
                         .cum = zero,                                                              \
                         .words = zero}

MICRO_ONCE(ack_verify, ACKD, hdr.h.csum = vtl_csum_fold(0), tf_ack_verify(&c))
/* Acknowledges 16 packets in order, of 64 in flight. */
MICRO_ONCE(ack_cumulative, ACKD, s->tx.next = s->tx.una + 64; s->tx.sent = s->tx.delivered + 64;
           hdr.cum = vtl_swap64(s->tx.una + 16);
           hdr.received = vtl_swap64(s->tx.delivered + 16), tf_ack_cumulative(&c))
MICRO(loss_reordering, ACKD, hdr.echo_xid = vtl_swap32(s->tx.acked_xid + 1);
      s->tx.xid += 2, tf_loss_reordering(&c))
MICRO_ONCE(loss_selective, ACKD, s->tx.next = 64; s->tx.tail = 0, tf_loss_selective(&c, 1))
#define NEXT_LOSSES                                                                                \
    for (int w = 0; w < WORDS; w++) {                                                              \
        scratch->map[w] = ~1ull;                                                                   \
        s->tx.lost[w] = 0;                                                                         \
    }
/* A bitmap of 1,024 packets, with one lost in each 64. */
MICRO_ONCE(loss_selective_bitmap, ACKD, c.words += WORDS; s->tx.next = 64 * WORDS;
           s->tx.acked_xid = 1 << 20; NEXT_LOSSES, tf_loss_selective(&c, 1))
MICRO(rtt, ACKD, hdr.echo_ts = vtl_swap32((__u32)(c.now / VTL_NS_PER_US) - 1000 - i), tf_rtt(&c))
MICRO(reverse, ACKD, REVERSE(s)->came_ns = c.now - zero;
      REVERSE(s)->took_us = i, tf_reverse(&c, REVERSE(s)))
MICRO(rate, ACKD, BBR(s)->min_rtt_us = 900; c.delivered = 16; s->tx.next = 64; sent->xid = 0;
      sent->delivered = 0; sent->sent_ns = c.now - VTL_NS_PER_MS;
      sent->delivered_ns = c.now - VTL_NS_PER_MS, tf_delivery_rate(&c, BBR(s)->min_rtt_us))
MICRO_ONCE(congestion_bbr, ACKD, BBR(s)->min_rtt_us = 900; c.delivered = zero + 16;
           c.rtt_us = zero + 1000; c.rate = zero + (1 << 20); c.in_flight = zero + 64;
           s->tx.delivered += 16, tf_congestion_bbr(&c, BBR(s)))

/* -------------------------------------------------------------------------------- composition */

/*
 * Cost of composition: three parts of `selective-repeat`, each composed of transport functions as
 * in the graft, and as one function by hand. The latter decides in one place, and keeps values in
 * variables that transport functions pass in contexts, headers and the session. Both call the same
 * code for the rules themselves (checksums, released slots, loss detection, round-trip time). Both
 * start with the same context and must end with the same one.
 */
enum { WINDOW = 16 };

/* graft_egress after the choice, and graft_seal. */
VTL_INLINE int composed_send(struct vtl_out *o) {
    tf_window_start(o, WINDOW);
    if (vtl_fetch(o))
        return -1;
    tf_number(o);
    tf_checksum_add(o);
    return 0;
}

VTL_INLINE int hand_send(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    struct vtl_tx *tx = &s->tx;
    if (!tx->next) {
        if (tx->limit > WINDOW)
            VTL_STORE(tx->limit, WINDOW);
        tx->cwnd = WINDOW;
    }
    if (vtl_fetch(o))
        return -1;
    if (o->type == VTL_DATA) {
        struct vtl_sent *sent = o->sent;
        __u64 in_flight = vtl_in_flight(s);
        if (!in_flight)
            tx->first_sent_ns = tx->delivered_ns = o->now;
        sent->sent_ns = o->now;
        sent->first_ns = tx->first_sent_ns;
        sent->delivered = tx->delivered;
        sent->delivered_ns = tx->delivered_ns;
        sent->xid = tx->xid;
        sent->app_limited = tx->app_limited != 0;
        tx->sent++;
        if (o->seq == tx->next) {
            __u64 next = o->seq + 1, window = tx->cwnd;
            VTL_STORE(tx->next, next);
            if (o->seq % vtl_ack_every(window) == 0 || in_flight + 1 >= window ||
                next >= tx->limit || next >= o->end)
                o->flags |= VTL_F_ACK_NOW;
        } else {
            tx->retransmitted++;
        }
    }
    vtl_number_header(o);
    o->hdr.data.h.csum = 0;
    o->hdr.data.h.csum =
        vtl_csum_fold(o->sum + vtl_csum_words(o->hdr.words, sizeof(o->hdr.data) / 8));
    return 0;
}

/* graft_admit and graft_ingress. */
VTL_INLINE int composed_receive(struct vtl_in *in) {
    if (tf_receive_admit(in) || tf_checksum_verify(in))
        return -1;
    tf_receive_place(in);
    tf_ack_note(in);
    return in->duplicate || in->hdr->h.flags & VTL_F_ACK_NOW;
}

VTL_INLINE int hand_receive(struct vtl_in *in) {
    struct vtl_session *s = in->s;
    struct vtl_rx *rx = &s->rx;
    struct vtl_data_hdr *h = in->hdr;
    int data = in->type != VTL_PROBE;
    if (data) {
        if (in->seq >= vtl_rx_known_limit(s) && in->seq >= vtl_rx_limit(s)) {
            rx->beyond++;
            vtl_env_count(VTL_ST_RX_BEYOND);
            return -1;
        }
        __u64 word = rx->map[(in->seq / 64) % VTL_WINDOW_WORDS];
        in->place = in->seq;
        in->half = h->h.flags & VTL_F_HALF;
        in->duplicate = in->seq < rx->cum || (word >> (in->seq % 64) & 1);
    }
    __u32 want = h->h.csum;
    h->h.csum = 0;
    if (vtl_csum_fold(in->sum + vtl_csum_words((const __u64 *)h, sizeof(*h) / 8)) != want) {
        rx->bad_csum++;
        vtl_env_count(VTL_ST_RX_BAD_CSUM);
        return -1;
    }
    if (data && vtl_rx_take(in)) {
        if (in->seq == rx->cum)
            vtl_rx_advance(in);
        else
            vtl_rx_behind_gap(s, h->h.flags & VTL_F_ACK_NOW);
    }
    rx->echo_seq = in->seq;
    rx->echo_xid = vtl_swap32(h->xid);
    rx->echo_ts = vtl_swap32(h->ts);
    return in->duplicate || h->h.flags & VTL_F_ACK_NOW;
}

/* graft_listener, without loss detection in the bitmap, for an acknowledgement without one. */
VTL_INLINE int composed_hear(struct vtl_ackd *a) {
    if (tf_ack_verify(a))
        return -1;
    tf_window_limit(a, WINDOW);
    if (tf_ack_cumulative(a))
        return -1;
    tf_loss_reordering(a);
    tf_rtt(a);
    return 0;
}

VTL_INLINE int hand_hear(struct vtl_ackd *a) {
    struct vtl_session *s = a->s;
    struct vtl_tx *tx = &s->tx;
    struct vtl_ack_hdr *h = a->hdr;
    __u32 want = h->h.csum;
    if (vtl_ack_csum(h, a->map, a->words) != want) {
        vtl_env_count(VTL_ST_RX_BAD_CSUM);
        return -1;
    }

    __u64 cum = vtl_swap64(h->cum), received = vtl_swap64(h->received);
    __u64 limit = vtl_swap64(h->limit), max = (cum & ~63ull) + VTL_MAX_WINDOW;
    if (limit > cum + WINDOW)
        limit = cum + WINDOW;
    if (limit > max)
        limit = max;
    if (cum > VTL_LOAD(tx->next) || received > tx->sent || cum < tx->una ||
        received < tx->delivered)
        return -1;
    tx->acks++;
    tx->timeouts = 0;
    tx->probe = 0;
    a->cum = cum;
    a->delivered = received - tx->delivered;
    tx->delivered = received;
    if (a->delivered)
        tx->delivered_ns = a->now;
    if (limit > tx->limit)
        tx->limit = limit;
    if (cum != tx->una)
        vtl_ack_release(s, cum);
    tf_loss_reordering(a);
    tf_rtt(a);
    return 0;
}

/* A new packet each time, as in order. The result must be used, or the compiler drops it. */
#define SENT                                                                                       \
    c.type = VTL_DATA;                                                                             \
    c.flags = 0;                                                                                   \
    c.seq = i;                                                                                     \
    c.sum = i;                                                                                     \
    VTL_STORE(s->tx.next, i)
MICRO(composed_send, OUT, SENT, c.now += composed_send(&c))
MICRO(hand_send, OUT, SENT, c.now += hand_send(&c))

/* In order, with room, and with a correct checksum. */
#define RECEIVED                                                                                   \
    c.type = VTL_DATA;                                                                             \
    c.seq = s->rx.consumer = s->rx.cum;                                                            \
    hdr.h.csum = 0;                                                                                \
    hdr.h.csum = vtl_csum_fold(vtl_csum_words((const __u64 *)&hdr, sizeof(hdr) / 8))
MICRO_ONCE(composed_receive, IN, RECEIVED, c.len += composed_receive(&c))
MICRO_ONCE(hand_receive, IN, RECEIVED, c.len += hand_receive(&c))

/* Acknowledges 16 packets in order, of 64 in flight. */
#define HEARD                                                                                      \
    s->tx.next = s->tx.una + 64;                                                                   \
    s->tx.sent = s->tx.delivered + 64;                                                             \
    hdr.cum = vtl_swap64(s->tx.una + 16);                                                          \
    hdr.received = vtl_swap64(s->tx.delivered + 16);                                               \
    hdr.limit = vtl_swap64(s->tx.una + 64);                                                        \
    hdr.echo_ts = vtl_swap32((__u32)(c.now / VTL_NS_PER_US) - 1000);                               \
    hdr.h.csum = 0;                                                                                \
    hdr.h.csum = vtl_csum_fold(vtl_csum_words((const __u64 *)&hdr, sizeof(hdr) / 8))
MICRO_ONCE(composed_hear, ACKD, HEARD, c.rtt_us += composed_hear(&c))
MICRO_ONCE(hand_hear, ACKD, HEARD, c.rtt_us += hand_hear(&c))
