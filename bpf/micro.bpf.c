// SPDX-License-Identifier: GPL-2.0-only
/*
 * What each transport function of the stream graft costs in the kernel, for `vtl bench micro`, and
 * what composing them costs. Two programs each: base_NAME makes a context ready TURNS times
 * (base1_NAME once), cost_NAME also calls the function on it. The difference of their times over
 * TURNS is the function's. They work on session 1 and its rings, which crates/vtl-bpf/src/trial.rs
 * makes.
 */
#include "grafts/stream.bpf.c"
#include "tf/window.h"

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
MICRO(reverse_note, IN, s->tx.next = s->tx.una + 64,
      tf_reverse_note(&c, VTL_OWN(s, tx, struct vtl_reverse)))

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
MICRO(reverse, ACKD, VTL_OWN(s, tx, struct vtl_reverse)->came_ns = c.now - zero;
      VTL_OWN(s, tx, struct vtl_reverse)->took_us = i,
      tf_reverse(&c, VTL_OWN(s, tx, struct vtl_reverse)))
MICRO(rate, ACKD, c.delivered = 16; s->tx.next = 64; sent->xid = 0; sent->delivered = 0;
      sent->sent_ns = c.now - VTL_NS_PER_MS;
      sent->delivered_ns = c.now - VTL_NS_PER_MS, tf_rate(&c))
MICRO_ONCE(congestion_bbr, ACKD, c.delivered = zero + 16; c.rtt_us = zero + 1000;
           c.rate = zero + (1 << 20); c.in_flight = zero + 64;
           s->tx.delivered += 16, tf_congestion_bbr(&c))

/* -------------------------------------------------------------------------------- composition */

/*
 * What composing costs: three parts of `selective-repeat`, each as the graft composes it of
 * transport functions, and as somebody would write the same logic into one function without them.
 * Both begin with the same context and must end with the same one; only the map lookups of
 * env_bpf.h, which are no transport function's, are used by both.
 */
enum { WINDOW = 16 };

/* graft_egress behind the choice, and graft_seal. */
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
    struct vtl_data_hdr *h = &o->hdr.data;
    if (!tx->next) {
        if (tx->limit > WINDOW)
            VTL_STORE(tx->limit, WINDOW);
        tx->cwnd = WINDOW;
    }
    o->len = 0;
    if (o->type == VTL_DATA) {
        struct vtl_slot *slot = vtl_env_tx_slot(s, o->seq);
        struct vtl_sent *sent = vtl_env_sent(s, o->seq);
        o->slot = slot;
        o->sent = sent;
        if (!slot || !sent)
            return -1;
        __u32 len = VTL_LOAD(slot->len), most = s->max_payload;
        if (most > VTL_MAX_PAYLOAD)
            most = VTL_MAX_PAYLOAD;
        o->len = len > most ? most : len ? len : 1;
        o->flags |= VTL_LOAD(slot->more) & VTL_F_MARKS;
        if (o->len > s->path && o->len > VTL_HALF && vtl_fetch_half(o))
            return -1;

        __u64 out = tx->delivered + tx->lost_total + tx->abandoned;
        __u64 in_flight = tx->sent > out ? tx->sent - out : 0;
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
            __u64 w = tx->cwnd;
            __u32 every = w >= 256 ? 16 : w >= 128 ? 8 : w >= 64 ? 4 : w >= 16 ? 2 : 1;
            VTL_STORE(tx->next, o->seq + 1);
            if (o->seq % every == 0 || in_flight + 1 >= w || tx->next >= tx->limit ||
                tx->next >= o->end)
                o->flags |= VTL_F_ACK_NOW;
        } else {
            tx->retransmitted++;
        }
    }
    h->h.version_type = VTL_VERSION << 4 | o->type;
    h->h.flags = o->flags;
    h->h.gid = vtl_swap16(s->gid);
    h->h.sid = vtl_swap32(s->peer_sid);
    h->h.token = vtl_swap64(s->peer_token);
    h->h.len = vtl_swap16(o->type == VTL_DATA ? o->len : 0);
    h->h.aux = 0;
    h->seq = vtl_swap64(o->seq);
    h->xid = vtl_swap32(tx->xid);
    h->ts = vtl_swap32((__u32)(o->now / VTL_NS_PER_US));
    o->header_len = o->type == VTL_DATA ? sizeof(struct vtl_data_hdr) : VTL_MIN_PACKET;
    tx->xid++;
    tx->last_sent_ns = o->now;
    if (o->type != VTL_DATA || o->flags & VTL_F_PARITY)
        tx->extra++;
    else
        tx->bytes += o->len;

    h->h.csum = 0;
    const __u64 *w = o->hdr.words;
    __u64 sum = o->sum + w[0] + w[1] + w[2] + w[3] + w[4];
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    h->h.csum = ~(__u32)sum;
    return 0;
}
_Static_assert(sizeof(struct vtl_data_hdr) == 5 * 8, "hand_send sums five words");

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
    if (in->type != VTL_PROBE) {
        __u64 most = (rx->cum & ~63ull) + VTL_MAX_WINDOW, limit = rx->consumer + s->slots;
        if (in->seq >= (limit < most ? limit : most)) {
            struct vtl_ring_ctl *ctl = vtl_env_rx_ctl(s);
            if (ctl) {
                __u64 consumer = VTL_LOAD(ctl->consumer);
                if (consumer - rx->consumer <= rx->cum - rx->consumer)
                    rx->consumer = consumer;
            }
            limit = rx->consumer + s->slots;
            if (in->seq >= (limit < most ? limit : most)) {
                rx->beyond++;
                vtl_env_count(VTL_ST_RX_BEYOND);
                return -1;
            }
        }
        in->place = in->seq;
        __u64 word = rx->map[(in->seq / 64) % VTL_WINDOW_WORDS];
        in->duplicate = in->seq < rx->cum || (word >> (in->seq % 64) & 1);
    }

    __u32 want = h->h.csum;
    h->h.csum = 0;
    const __u64 *w = (const __u64 *)h;
    __u64 sum = in->sum + w[0] + w[1] + w[2] + w[3] + w[4];
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    if (~(__u32)sum != want) {
        rx->bad_csum++;
        vtl_env_count(VTL_ST_RX_BAD_CSUM);
        return -1;
    }

    if (in->type != VTL_PROBE && in->duplicate) {
        rx->dups++;
        vtl_env_count(VTL_ST_RX_DUPLICATE);
    } else if (in->type != VTL_PROBE &&
               (!(h->h.flags & VTL_F_HALF) || vtl_put_half(s, in->seq, vtl_swap16(h->h.aux),
                                                           in->len, h->h.flags & VTL_F_MARKS))) {
        if (!(h->h.flags & VTL_F_HALF)) {
            in->slot->len = in->len;
            in->slot->more = h->h.flags & VTL_F_MARKS;
        }
        rx->map[(in->seq / 64) % VTL_WINDOW_WORDS] |= 1ull << (in->seq % 64);
        rx->received++;
        if (in->seq >= rx->max)
            rx->max = in->seq + 1;
        if (in->seq == rx->cum) {
            __u64 cum = rx->cum;
            int i;
            vtl_for(i, 0, VTL_WINDOW_WORDS + 1) {
                __u32 at = (cum / 64) % VTL_WINDOW_WORDS;
                __u64 missing = ~rx->map[at] & (~0ull << (cum % 64));
                if (missing) {
                    cum = (cum & ~63ull) + vtl_lowest_bit(missing);
                    break;
                }
                rx->map[at] = 0;
                cum = (cum & ~63ull) + 64;
            }
            rx->cum = cum;
            struct vtl_ring_ctl *ctl = vtl_env_rx_ctl(s);
            if (ctl) {
                VTL_BARRIER();
                if (h->h.flags & VTL_F_ACK_NOW)
                    __sync_lock_test_and_set(&ctl->producer, cum);
                else
                    VTL_STORE(ctl->producer, cum);
                if (VTL_LOAD(ctl->waiting) && __sync_lock_test_and_set(&ctl->waiting, 0))
                    vtl_env_notify(s, VTL_EV_RECV);
            }
        }
    }
    rx->echo_seq = in->seq;
    rx->echo_xid = vtl_swap32(h->xid);
    rx->echo_ts = vtl_swap32(h->ts);
    return in->duplicate || h->h.flags & VTL_F_ACK_NOW;
}

/* graft_listener, without its search for losses in the bitmap, of an acknowledgement without one.
 */
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
    h->h.csum = 0;
    const __u64 *w = (const __u64 *)h;
    __u64 sum = w[0] + w[1] + w[2] + w[3] + w[4] + w[5] + w[6] + w[7] + w[8];
    int i;
    vtl_for(i, 0, a->words) {
        if (i >= VTL_ACK_WORDS)
            break;
        sum += a->map[i];
    }
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    if (~(__u32)sum != want) {
        vtl_env_count(VTL_ST_RX_BAD_CSUM);
        return -1;
    }

    __u64 cum = vtl_swap64(h->cum), received = vtl_swap64(h->received);
    __u64 limit = vtl_swap64(h->limit), most = (cum & ~63ull) + VTL_MAX_WINDOW;
    if (limit > cum + WINDOW)
        limit = cum + WINDOW;
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
    if (limit > most)
        limit = most;
    if (limit > tx->limit)
        tx->limit = limit;
    if (cum != tx->una) {
        __u64 first = tx->una / 64, last = cum / 64;
        vtl_for(i, 0, VTL_WINDOW_WORDS + 1) {
            if (first + i > last)
                break;
            __u32 word = (first + i) % VTL_WINDOW_WORDS;
            __u64 keep = first + i == last ? ~0ull << (cum % 64) : 0;
            if (!(VTL_LOAD(tx->lost[word]) & ~keep))
                continue;
            __u64 old = __sync_fetch_and_and(&tx->lost[word], keep);
            __u32 undone = vtl_bits(old & ~keep);
            __sync_fetch_and_add(&tx->lost_pending, -(int)undone);
            tx->lost_total -= undone;
        }
        VTL_STORE(tx->una, cum);
        struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
        if (ctl)
            VTL_STORE(ctl->consumer, cum);
    }

    __u32 dups = vtl_swap32(h->dups) - VTL_LOAD(tx->copies);
    if ((__s32)(dups - tx->dups) > 0) {
        __u32 reorder = tx->reorder + 1 + tx->reorder / 8;
        tx->reorder = reorder < VTL_REORDER_MAX ? reorder : VTL_REORDER_MAX;
        tx->dups = dups;
        tx->calm = tx->delivered;
    }
    __u32 xid = vtl_swap32(h->echo_xid);
    __s32 newer = xid - tx->acked_xid;
    if (newer > 0 && (__s32)(xid - tx->xid) < 0)
        tx->acked_xid = xid;
    if (a->delivered && !(h->h.flags & VTL_F_UPDATE)) {
        __u32 late = tx->late, grown = 2 * late + 3;
        __u32 overtaken = newer < 0 ? tx->acked_xid - xid : 0;
        if (grown > VTL_LATE_MAX)
            grown = VTL_LATE_MAX;
        tx->late_q16 = tx->late_q16 - tx->late_q16 / 64 + (overtaken ? 1024 : 0);
        int calm = 1;
        if (overtaken > late && late < grown)
            tx->late = overtaken < grown ? overtaken : grown;
        else if (!late || overtaken + late / 8 < late) {
            calm = tx->delivered - tx->calm > VTL_CALM * (late + tx->reorder + 1);
            if (calm && late)
                tx->late -= 1 + late / 8;
            if (calm && tx->reorder > VTL_REORDER)
                tx->reorder -= 1 + (tx->reorder - VTL_REORDER) / 8;
        }
        if (calm)
            tx->calm = tx->delivered;
    }

    __u32 rtt = (__u32)(a->now / VTL_NS_PER_US) - vtl_swap32(h->echo_ts);
    struct vtl_meter *m = &tx->meter;
    if (h->h.flags & VTL_F_UPDATE)
        return 0;
    int overtook = 0;
    if ((__s32)(xid - m->xid) >= 0 && (__s32)(xid - tx->xid) < 0) {
        __u32 before = m->xid - m->extra, came = m->arrived;
        m->xid = xid;
        m->extra = VTL_LOAD(tx->extra);
        if ((__s32)(xid - m->extra - before) < 0)
            m->extra = xid - before;
        m->received = received;
        m->arrived = (__u32)received + vtl_swap32(h->dups);
        __u32 more = xid - m->extra - before;
        came = m->arrived - came;
        overtook = more > 2 && came < (more + 1) / 2;
    }
    if (rtt > 60 * 1000000u)
        return 0;
    if (!rtt)
        rtt = 1;
    int counts = !overtook || !m->min_rtt_us;
    if (counts)
        a->rtt_us = rtt;
    if (counts &&
        (!m->min_rtt_us || rtt <= m->min_rtt_us || a->now - m->min_rtt_ns >= 10 * VTL_NS_PER_S)) {
        m->min_rtt_us = rtt;
        m->min_rtt_ns = a->now;
    }
    if (!tx->srtt_us || tx->acks == 1) {
        tx->srtt_us = rtt;
        tx->rttvar_us = rtt / 2;
        return 0;
    }
    __u32 error = rtt > tx->srtt_us ? rtt - tx->srtt_us : tx->srtt_us - rtt;
    tx->rttvar_us = (3 * tx->rttvar_us + error) / 4;
    tx->srtt_us = (7ull * tx->srtt_us + rtt + 7) / 8;
    return 0;
}
_Static_assert(sizeof(struct vtl_ack_hdr) == 9 * 8, "hand_hear sums nine words");

/* A new packet each time, as in order. What comes of it must count, or the compiler drops it. */
#define SENT                                                                                       \
    c.type = VTL_DATA;                                                                             \
    c.flags = 0;                                                                                   \
    c.seq = i;                                                                                     \
    c.sum = i;                                                                                     \
    VTL_STORE(s->tx.next, i)
MICRO(composed_send, OUT, SENT, c.now += composed_send(&c))
MICRO(hand_send, OUT, SENT, c.now += hand_send(&c))

/* In order, with room, and with a checksum that is right. */
#define RECEIVED                                                                                   \
    c.type = VTL_DATA;                                                                             \
    c.seq = s->rx.consumer = s->rx.cum;                                                            \
    hdr.h.csum = 0;                                                                                \
    hdr.h.csum = vtl_csum_fold(vtl_csum_words((const __u64 *)&hdr, sizeof(hdr) / 8))
MICRO_ONCE(composed_receive, IN, RECEIVED, c.len += composed_receive(&c))
MICRO_ONCE(hand_receive, IN, RECEIVED, c.len += hand_receive(&c))

/* An acknowledgement of 16 packets in order, of 64 that are under way. */
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
