// SPDX-License-Identifier: GPL-2.0-only
/*
 * What each transport function of the stream graft costs in the kernel, for `vtl bench micro`. Two
 * programs each: base_NAME makes a context ready TURNS times (base1_NAME once), cost_NAME also
 * calls the function on it. The difference of their times over TURNS is the function's. They work
 * on session 1 and its rings, which crates/vtl-bpf/src/trial.rs makes.
 */
#include "tf/ack.h"
#include "tf/checksum.h"
#include "tf/congestion_bbr.h"
#include "tf/loss.h"
#include "tf/number.h"
#include "tf/pacing.h"
#include "tf/receive.h"
#include "tf/retransmit.h"
#include "tf/rtt.h"
#include "grafts/stream.h"
#include "vtl/graft.h"

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
/* The verifier does not follow these loops in a loop: one call a run. */
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

/* What the method itself adds. */
MICRO(nothing, SESSION; __u64 c = 0, c = i, KEEP(c))

/* ------------------------------------------------------------------------------------- egress */

#define OUT                                                                                        \
    SESSION;                                                                                       \
    struct vtl_out c = {.s = s, .now = bpf_ktime_get_ns(), .type = VTL_DATA, .len = PAYLOAD};      \
    if (vtl_fetch(&c))                                                                             \
    return -1

MICRO(congestion_start, OUT, s->tx.acks = 1, tf_congestion_start(&c))
MICRO(pace_wait, OUT, s->tx.pace_ns = 0, tf_pace_wait(&c))
MICRO_ONCE(choose, OUT, c.seq = 0, tf_choose(&c))
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
/* The last of a burst: its position is published with a fence. */
MICRO_ONCE(receive_place_last, IN, c.seq = s->rx.cum;
           hdr.h.flags = VTL_F_ACK_NOW, tf_receive_place(&c))
MICRO(ack_note, IN, c.seq = i, tf_ack_note(&c))

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

/* The verifier must not know these figures, as it does not in the graft: it would follow every turn
 * of every loop. */
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
/* An acknowledgement of 16 packets in order, of 64 that are under way. */
MICRO_ONCE(ack_cumulative, ACKD, s->tx.next = s->tx.una + 64; s->tx.sent = s->tx.delivered + 64;
           hdr.cum = vtl_swap64(s->tx.una + 16);
           hdr.received = vtl_swap64(s->tx.delivered + 16), tf_ack_cumulative(&c))
MICRO(loss_reordering, ACKD, hdr.echo_xid = vtl_swap32(s->tx.acked_xid + 1);
      s->tx.xid += 2, tf_loss_reordering(&c))
MICRO_ONCE(loss_selective, ACKD, s->tx.next = 64; s->tx.tail = 0, tf_loss_selective(&c))
#define NEXT_LOSSES                                                                                \
    for (int w = 0; w < WORDS; w++) {                                                              \
        scratch->map[w] = ~1ull;                                                                   \
        s->tx.lost[w] = 0;                                                                         \
    }
/* A bitmap of 1,024 packets, of each 64 of which one is missing and found to be lost. */
MICRO_ONCE(loss_selective_bitmap, ACKD, c.words += WORDS; s->tx.next = 64 * WORDS;
           s->tx.acked_xid = 1 << 20; NEXT_LOSSES, tf_loss_selective(&c))
MICRO(rtt, ACKD, hdr.echo_ts = vtl_swap32((__u32)(c.now / VTL_NS_PER_US) - 1000 - i), tf_rtt(&c))
MICRO(rate, ACKD, c.delivered = 16; s->tx.next = 64; sent->xid = 0; sent->delivered = 0;
      sent->sent_ns = c.now - VTL_NS_PER_MS;
      sent->delivered_ns = c.now - VTL_NS_PER_MS, tf_rate(&c))
MICRO_ONCE(congestion_bbr, ACKD, c.delivered = zero + 16; c.rtt_us = zero + 1000;
           c.rate = zero + (1 << 20); c.in_flight = zero + 64;
           s->tx.delivered += 16, tf_congestion_bbr(&c))
