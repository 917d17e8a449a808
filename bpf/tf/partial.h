/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * reliability: partial. Lost packets may be given up: they are not retransmitted, and the receiver
 * skips them. Every packet carries the `floor` (PROTOCOL.md, section 5), the sender's first packet
 * that is not settled, that is, neither acknowledged nor given up; skip.h is the receiver's part. A
 * budget limits how many are given up:
 *
 * - tf_partial_budget: at most `max` of any `window` consecutive packets. Exact, not on average: a
 *   packet is given up only if the one given up `max` times before is at least a window older, and
 *   only if no later packet was given up, so that no window holds more.
 * - tf_partial_all: no limit. There are no retransmissions.
 */
#ifndef VTL_TF_PARTIAL_H
#define VTL_TF_PARTIAL_H

#include "ack.h"
#include "number.h"
#include "window.h"

enum {
    VTL_PARTIAL_WINDOW = 4096, /* packets for which it is recorded whether they were given up */
    VTL_PARTIAL_MAX = VTL_PARTIAL_WINDOW - 64, /* maximum of packets outstanding: they may begin
                                                * and end within a word of the bitmap */
    VTL_BUDGET_MAX = 64, /* maximum of packets given up in a window of the budget */
    VTL_PARTIAL_WORDS = VTL_PARTIAL_WINDOW / 64,
};

/* Written by the listener, except `told`. */
struct vtl_partial {
    __u64 floor;                   /* first packet neither acknowledged nor given up */
    __u64 told;                    /* egress: floor in the latest packet sent */
    __u64 swept;                   /* `gone` is empty below */
    __u64 given_up;                /* packets given up in total */
    __u64 forgiven;                /* packets given up that arrived after all */
    __u64 gone[VTL_PARTIAL_WORDS]; /* packets given up, from the peer's cum on */
};

/* Written by the listener: the latest packets given up; ring, index modulo its length. */
struct vtl_budget {
    __u64 given[VTL_BUDGET_MAX];
};

/* ------------------------------------------------------------------------------------- egress */

/* After the choice, before the header is sealed: writes the floor. */
VTL_INLINE void tf_partial_tell(struct vtl_out *o, struct vtl_partial *p) {
    __u64 floor = VTL_LOAD(p->floor);
    __u64 behind = floor < o->seq ? o->seq - floor : 0;
    o->hdr.data.h.aux = vtl_swap16((__u16)behind);
    if (floor > p->told)
        p->told = floor;
}

/*
 * Chooses o->seq, or sets tx.wake_ns. A PROBE carries a new floor when no DATA does. `repeat`: the
 * first packet not settled is retransmitted when the retransmission timer fires; otherwise a PROBE
 * goes.
 */
VTL_INLINE enum vtl_verdict tf_partial_choose(struct vtl_out *o, struct vtl_partial *p,
                                              const int repeat) {
    VTL_TF(partial, VTL_S_PARTIAL_RELIABILITY);
    struct vtl_tx *tx = &o->s->tx;
    if (!vtl_read_end(o))
        return VTL_STOP;
    if (vtl_next(o, repeat, 0) == VTL_NEXT)
        return VTL_NEXT;
    __u64 floor = VTL_LOAD(p->floor);
    if (floor > p->told) {
        vtl_probe(o);
        return VTL_NEXT;
    }
    if (!vtl_probe_due(o, tx->next != VTL_LOAD(tx->una) || tx->next < o->end, 0))
        return VTL_STOP;
    if (repeat && floor < tx->next) {
        vtl_retransmit(o, floor);
        tx->abandoned++;
    } else {
        vtl_probe(o);
    }
    return VTL_NEXT;
}

/* Whether tf_partial_choose would find a packet. */
VTL_INLINE int vtl_partial_can_send(struct vtl_session *s, struct vtl_partial *p) {
    return vtl_can_send(s) || VTL_LOAD(p->floor) > p->told;
}

/* ----------------------------------------------------------------------------------- listener */

/* Forgets packets given up below the peer's cum, which it has skipped. */
VTL_INLINE void vtl_partial_sweep(struct vtl_ackd *a, struct vtl_partial *p) {
    __u64 first = p->swept / 64, last = a->cum / 64;
    int i;
    vtl_for(i, 0, VTL_PARTIAL_WORDS + 1) {
        if (first + i > last)
            break;
        p->gone[(first + i) % VTL_PARTIAL_WORDS] &= first + i == last ? ~0ull << (a->cum % 64) : 0;
    }
    p->swept = a->cum;
}

/* Whether the budget allows to give up `seq`, after `given` others. */
VTL_INLINE int vtl_budget_allows(const struct vtl_budget *b, __u64 given, __u64 seq, __u32 max,
                                 __u32 window) {
    if (!b)
        return 1;
    if (max > VTL_BUDGET_MAX)
        max = VTL_BUDGET_MAX;
    if (given && seq < b->given[(given - 1) % VTL_BUDGET_MAX])
        return 0; /* later windows were counted without it */
    return max && (given < max || seq - b->given[(given - max) % VTL_BUDGET_MAX] >= window);
}

/* Whether the lifetime of `seq` has expired. */
VTL_INLINE int vtl_partial_late(struct vtl_ackd *a, __u64 seq, __u32 lifetime_ms) {
    if (!lifetime_ms)
        return 1;
    struct vtl_slot *slot = vtl_env_tx_slot(a->s, seq);
    return !slot || a->now - VTL_LOAD(slot->stamp) >= lifetime_ms * VTL_NS_PER_MS;
}

/* Gives up packets declared lost, as far as the budget allows. */
VTL_INLINE void vtl_partial_give_up(struct vtl_ackd *a, struct vtl_partial *p, struct vtl_budget *b,
                                    __u32 max, __u32 window, __u32 lifetime_ms) {
    struct vtl_tx *tx = &a->s->tx;
    if (!VTL_LOAD(tx->lost_pending))
        return;
    __u64 first = a->cum / 64, next = VTL_LOAD(tx->next);
    int i;
    vtl_for(i, 0, VTL_PARTIAL_WORDS + 1) {
        if ((first + i) * 64 >= next)
            break;
        __u32 word = (first + i) % VTL_WINDOW_WORDS;
        __u64 bits = VTL_LOAD(tx->lost[word]);
        /* Until the peer has skipped them, they are missing from each of its bitmaps. */
        __u64 again = bits & p->gone[(first + i) % VTL_PARTIAL_WORDS];
        if (again) {
            __u64 old = __sync_fetch_and_and(&tx->lost[word], ~again);
            vtl_loss_undo(a->s, vtl_popcount(old & again));
            bits &= ~again;
        }
        int n;
        vtl_for(n, 0, 64) {
            if (!bits)
                break;
            __u64 mask = bits & -bits;
            __u64 seq = (first + i) * 64 + vtl_lowest_bit(bits);
            bits &= bits - 1;
            if (!vtl_budget_allows(b, p->given_up, seq, max, window) ||
                !vtl_partial_late(a, seq, lifetime_ms) ||
                !(__sync_fetch_and_and(&tx->lost[word], ~mask) & mask))
                continue; /* egress may have taken it meanwhile */
            __sync_fetch_and_add(&tx->lost_pending, -1);
            p->gone[(first + i) % VTL_PARTIAL_WORDS] |= mask;
            if (b)
                b->given[p->given_up % VTL_BUDGET_MAX] = seq;
            p->given_up++;
        }
    }
}

/*
 * Moves the floor, and no longer counts packets as lost that were given up but arrived. Below the
 * peer's cum it is only known how many: the peer has received `received` packets, so it has skipped
 * the others below its cum.
 */
VTL_INLINE void vtl_partial_settle(struct vtl_ackd *a, struct vtl_partial *p) {
    struct vtl_tx *tx = &a->s->tx;
    __u64 next = VTL_LOAD(tx->next);
    __u64 base = a->cum & ~63ull;
    __u64 floor = base, above = 0, waiting = 0;
    if (vtl_swap32(a->hdr->skip))
        return; /* the packets from cum on are not described */
    int i;
    vtl_for(i, 0, VTL_PARTIAL_WORDS) {
        __u64 from = base + i * 64ull;
        if (from >= next)
            break;
        __u64 have = i < (int)a->words && i < VTL_ACK_WORDS ? a->map[i] : 0;
        __u64 below = i ? 0 : ~(~0ull << (a->cum % 64));
        have &= ~below;
        __u64 *gone = &p->gone[(from / 64) % VTL_PARTIAL_WORDS];
        *gone &= ~have;
        above += vtl_popcount(have);
        waiting += vtl_popcount(*gone);
        __u64 open = ~(have | *gone | below);
        /* If everything before this word is settled: else the floor is before it already. */
        floor += vtl_lowest_bit(open) & -vtl_up_to(from, floor);
    }
    if (floor > next)
        floor = next;
    if (floor > p->floor)
        VTL_STORE(p->floor, floor);
    if (a->hdr->h.flags & VTL_F_PARTIAL || above > tx->delivered)
        return;
    __u64 skipped = a->cum - (tx->delivered - above);
    __u64 arrived = p->given_up - waiting - skipped;
    if (arrived > p->forgiven && arrived <= p->given_up) {
        tx->lost_total -= arrived - p->forgiven;
        p->forgiven = arrived;
    }
}

/* listener, after loss detection: gives up lost packets within the budget, `max` of `window`
 * packets. Packets first sent less than `lifetime_ms` ago are retransmitted rather than given up
 * (0: given up at once). */
VTL_INLINE void tf_partial_budget(struct vtl_ackd *a, struct vtl_partial *p, struct vtl_budget *b,
                                  __u32 max, __u32 window, __u32 lifetime_ms) {
    vtl_partial_sweep(a, p);
    vtl_partial_give_up(a, p, b, max, window, lifetime_ms);
    vtl_partial_settle(a, p);
}

/* listener, after loss detection: gives up all lost packets. */
VTL_INLINE void tf_partial_all(struct vtl_ackd *a, struct vtl_partial *p) {
    vtl_partial_sweep(a, p);
    vtl_partial_give_up(a, p, 0, 0, 0, 0);
    vtl_partial_settle(a, p);
}

/* egress: records the time of the first transmission, for the lifetime. */
VTL_INLINE void tf_lifetime_start(struct vtl_out *o) {
    if (o->type == VTL_DATA && !(o->flags & VTL_F_RETRANSMIT))
        VTL_STORE(o->slot->stamp, o->now);
}

#endif
