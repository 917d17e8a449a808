/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * What all grafts and all drivers share and what needs no kernel: between the transport functions
 * of a composition (see graft.h) and the programs that move bytes. The environment (env_bpf.h, or
 * crates/vtl-sim/native) comes before this file, the composition too.
 */
#ifndef VTL_ENGINE_H
#define VTL_ENGINE_H

#include "halves.h"
#include "headers.h"
#include "room.h"
#include "tag.h"
#include "tf.h"

#define VTL_TRY_LOCK(busy) (__sync_lock_test_and_set(&(busy), 1) == 0)
#define VTL_UNLOCK(busy)                                                                           \
    do {                                                                                           \
        VTL_BARRIER();                                                                             \
        VTL_STORE(busy, 0);                                                                        \
    } while (0)

/* Writes the header of DATA or PROBE, with the number of this transmission. */
VTL_INLINE void vtl_number_header(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    struct vtl_tx *tx = &s->tx;
    vtl_hdr_write(&o->hdr.data.h, s, o->type, o->flags, o->type == VTL_DATA ? o->len : 0);
    o->hdr.data.seq = vtl_swap64(o->seq);
    o->hdr.data.xid = vtl_swap32(tx->xid);
    o->hdr.data.ts = vtl_swap32((__u32)(o->now / VTL_NS_PER_US));
    o->header_len = o->type == VTL_DATA ? sizeof(struct vtl_data_hdr) : VTL_MIN_PACKET;
    tx->xid++;
    tx->last_sent_ns = o->now;
    if (o->type != VTL_DATA || o->flags & VTL_F_PARITY)
        tx->extra++;
    else
        tx->bytes += o->len;
}

/* Asks for a kick by the next acknowledgement and by the app. Is there something to send after all?
 */
VTL_INLINE int vtl_rest(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (ctl)
        VTL_STORE(ctl->waiting, 1);
    __sync_lock_test_and_set(&s->tx.idle, 1);
    /* An acknowledgement that found ingress at work is still due. */
    return (graft_can_send(s) && s->tx.pace_ns <= o->now) || VTL_LOAD(s->rx.ack_now) ||
           (VTL_HALVES && s->tx.half);
}

/* Makes the next packet in `o`. VTL_STOP: none now, s->tx.wake_ns says when. */
VTL_INLINE enum vtl_verdict vtl_make(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    s->tx.wake_ns = VTL_NEVER;
    if (!VTL_LOAD(s->ifindex))
        return VTL_STOP; /* the peer's first packet will tell where it lives */
    if (VTL_LOAD(s->rx.ack_now) && VTL_TRY_LOCK(s->rx.busy)) {
        /* Before the look at what the app has read: it may read more, and ask again. */
        __sync_lock_test_and_set(&s->rx.ack_now, 0);
        vtl_ack_build(s, &o->hdr.ack, 0, 0, 1);
        VTL_UNLOCK(s->rx.busy);
        o->type = VTL_ACK;
        o->header_len = sizeof(struct vtl_ack_hdr);
        o->len = 0;
        s->tx.wake_ns = 0;
        return VTL_SEND;
    }
    enum vtl_verdict v = VTL_HALVES && s->tx.half ? vtl_second_half(o) : graft_egress(o);
    if (v == VTL_SEND) {
        s->tx.wake_ns = 0;
        vtl_env_count(VTL_ST_TX_PACKETS);
        return v;
    }
    if (vtl_rest(o))
        s->tx.wake_ns = 0;
    return VTL_STOP;
}

/* Where nothing is left to be sent, rate samples until all this has arrived say more about the
 * application than about the path. Whoever asks again for a packet, and gets none, says so himself
 * (retransmit.h). */
VTL_GLOBAL int vtl_limited(struct vtl_session *s) {
    if (!s)
        return 0;
    struct vtl_tx *tx = &s->tx;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    __u64 in_flight = vtl_in_flight(s);
    if (ctl && VTL_LOAD(ctl->producer) == tx->next && in_flight < VTL_LOAD(tx->cwnd) &&
        !VTL_LOAD(tx->lost_pending) && tx->copies == tx->copied)
        tx->app_limited = tx->delivered + in_flight + !in_flight;
    return 0;
}

/* As vtl_make, but called by the application's own send, beside the pump. Makes one packet at most;
 * vtld is told if there is more, or if nobody watches over the packet's acknowledgement yet. */
VTL_INLINE enum vtl_verdict vtl_make_direct(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    if (!VTL_TRY_LOCK(s->tx.running)) {
        __sync_lock_test_and_set(&s->tx.again, 1);
        if (!VTL_TRY_LOCK(s->tx.running))
            return VTL_STOP; /* its holder looks at `again` after it let go */
    }
    enum vtl_verdict v = vtl_make(o);
    int more = v == VTL_SEND ? vtl_rest(o) : s->tx.wake_ns != VTL_NEVER;
    if (v == VTL_SEND)
        vtl_limited(s);
    __sync_lock_test_and_set(&s->tx.running, 0);
    more |= __sync_lock_test_and_set(&s->tx.again, 0) || !VTL_LOAD(s->tx.timed);
    /* Once: the ring of events is everybody's, and this is as often as the app likes. */
    if (more && !__sync_lock_test_and_set(&s->tx.told, 1))
        vtl_env_notify(s, VTL_EV_SEND);
    return v;
}

/* Finds payload and scoreboard of o->seq. */
VTL_INLINE enum vtl_verdict vtl_fetch(struct vtl_out *o) {
    o->len = 0;
    if (o->type != VTL_DATA)
        return VTL_NEXT;
    o->slot = vtl_env_tx_slot(o->s, o->seq);
    o->sent = vtl_env_sent(o->s, o->seq);
    if (!o->slot || !o->sent)
        return VTL_STOP;
    /* The app wrote this length, and may be changing it now. */
    __u32 len = VTL_LOAD(o->slot->len);
    __u32 most = o->s->max_payload;
    if (most > VTL_MAX_PAYLOAD)
        most = VTL_MAX_PAYLOAD;
    o->len = len > most ? most : len ? len : 1;
    o->flags |= VTL_LOAD(o->slot->more) & VTL_F_MARKS;
    return VTL_HALVES && o->len > o->s->path && o->len > VTL_HALF ? vtl_fetch_half(o) : VTL_NEXT;
}

/* Bytes behind the header: payload and padding. */
VTL_INLINE __u32 vtl_padded(const struct vtl_out *o) {
    const __u32 least = VTL_MIN_PACKET - sizeof(struct vtl_data_hdr);
    return o->type != VTL_DATA ? 0 : o->len < least ? least : o->len;
}

/* A word that may lie anywhere. Every machine that has a JIT for eBPF reads and writes those in one
 * go, but clang does not know that and would take bytes. */
#ifdef __bpf__
typedef __u64 vtl_u64;
typedef __u32 vtl_u32;
typedef __u16 vtl_u16;
#else
typedef __u64 vtl_u64 __attribute__((aligned(1)));
typedef __u32 vtl_u32 __attribute__((aligned(1)));
typedef __u16 vtl_u16 __attribute__((aligned(1)));
#endif

/*
 * Copying a payload of `len` bytes, at most VTL_MAX_PAYLOAD, between a slot and a packet that ends
 * at `end`, with its sum: modulo 2^64, of little-endian 64-bit words, padded with zeros. `put`:
 * into the packet, with its padding, else out of it. What the packet has no room for is left out.
 * One pass over the memory instead of two, and the stores that miss the cache overlap with the
 * additions. In two parts, which vtl_move puts together: the kernel's verifier would follow the
 * second once for each length of the first.
 */
#define VTL_FITS(bytes) ((put ? (const void *)to : from) + (bytes) <= end)

/* Two words at a time into two sums: eBPF has ten registers, and if the compiler orders these
 * itself it keeps the sum and the pointers on the stack. */
#define VTL_MOVE_PAIR(i)                                                                           \
    do {                                                                                           \
        __u64 x = ((const vtl_u64 *)from)[i], y = ((const vtl_u64 *)from)[(i) + 1];                \
        ((vtl_u64 *)to)[i] = x;                                                                    \
        ((vtl_u64 *)to)[(i) + 1] = y;                                                              \
        even += x;                                                                                 \
        odd += y;                                                                                  \
        asm volatile("" : "+r"(even), "+r"(odd));                                                  \
    } while (0)
#define VTL_MOVE_64(i)                                                                             \
    VTL_MOVE_PAIR(i);                                                                              \
    VTL_MOVE_PAIR((i) + 2);                                                                        \
    VTL_MOVE_PAIR((i) + 4);                                                                        \
    VTL_MOVE_PAIR((i) + 6)

/* All whole blocks of 64 bytes, two at a time. */
VTL_INLINE __u64 vtl_move_blocks(void *to, const void *from, const int put, const void *end,
                                 __u32 len) {
    __u64 even = 0, odd = 0;
    for (int block = 0; block < VTL_MAX_PAYLOAD / 128; block++) {
        if (len < 128 || !VTL_FITS(128))
            break;
        VTL_MOVE_64(0);
        VTL_MOVE_64(8);
        from += 128;
        to += 128;
        len -= 128;
        asm volatile("" : "+r"(from), "+r"(to));
    }
    if (len >= 64 && VTL_FITS(64)) {
        VTL_MOVE_64(0);
    }
    return even + odd;
}

/* Bytes of those. */
VTL_INLINE __u32 vtl_in_blocks(__u32 len) {
    return len & (2047 & ~63);
}

/* The rest: the last len % 64 bytes of a payload of `len`. */
VTL_INLINE __u64 vtl_move_rest(void *to, const void *from, const int put, const void *end,
                               __u32 len) {
    __u64 sum = 0;
    const __u32 least = VTL_MIN_PACKET - sizeof(struct vtl_data_hdr);
    if (put && len < least && VTL_FITS(least)) {
        for (int i = 0; i < (int)least / 8; i++)
            ((vtl_u64 *)to)[i] = 0;
    }
    len %= 64;
    for (int word = 0; word < 7; word++) {
        if (len < 8 || !VTL_FITS(8))
            break;
        __u64 w = *(const vtl_u64 *)from;
        *(vtl_u64 *)to = w;
        sum += w;
        from += 8;
        to += 8;
        len -= 8;
    }
    __u32 shift = 0;
    if (len & 4 && VTL_FITS(4)) {
        __u32 w = *(const vtl_u32 *)from;
        *(vtl_u32 *)to = w;
        sum += w;
        from += 4;
        to += 4;
        shift = 32;
    }
    if (len & 2 && VTL_FITS(2)) {
        __u16 w = *(const vtl_u16 *)from;
        *(vtl_u16 *)to = w;
        sum += (__u64)w << shift;
        from += 2;
        to += 2;
        shift += 16;
    }
    if (len & 1 && VTL_FITS(1)) {
        __u8 w = *(const __u8 *)from;
        *(__u8 *)to = w;
        sum += (__u64)w << shift;
    }
    return sum;
}
#undef VTL_FITS

/* Both parts. */
VTL_INLINE __u64 vtl_move(void *to, const void *from, const int put, const void *end, __u32 len) {
    __u32 done = vtl_in_blocks(len);
    return vtl_move_blocks(to, from, put, end, len) +
           vtl_move_rest(to + done, from + done, put, end, len);
}

/* Egress, once the payload is in the packet and `o->sum` is known. */
VTL_INLINE void vtl_seal(struct vtl_out *o) {
    if (o->type == VTL_ACK)
        return;
    graft_seal(o);
    vtl_put_data_tag(o->s, &o->hdr.tagged);
}

/* What the two ingress drivers have in common once they hold a copy of the header. The payload is
 * then to be moved to its slot, if there is one. */
VTL_INLINE enum vtl_verdict vtl_in_start(struct vtl_in *in, __u32 room) {
    in->type = vtl_hdr_type(&in->hdr->h);
    in->len = vtl_swap16(in->hdr->h.len);
    in->seq = vtl_swap64(in->hdr->seq);
    if (in->len > VTL_MAX_PAYLOAD || in->len > room || (in->type == VTL_DATA) != (in->len != 0)) {
        vtl_env_count(VTL_ST_RX_MALFORMED);
        return VTL_STOP;
    }
    enum vtl_verdict v = graft_admit(in);
    if (v != VTL_NEXT || in->type == VTL_PROBE)
        return v;
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!in->duplicate && !in->refused && !in->half)
        in->slot = vtl_env_rx_slot(in->s, in->place);
    else
        in->slot = scratch ? &scratch->slot : 0;
    return in->slot ? VTL_NEXT : VTL_STOP;
}

/* Tells vtld what an acknowledgement made possible, if somebody waits for it. `sooner`: egress has
 * a shorter timeout than the one it waits for. */
VTL_INLINE void vtl_wake_sender(struct vtl_session *s, int sooner) {
    __u32 what = 0;
    if (VTL_LOAD(s->tx.idle) && (sooner || graft_can_send(s)) &&
        __sync_lock_test_and_set(&s->tx.idle, 0))
        what = VTL_EV_SEND;
    what |= vtl_room_event(s);
    if (what)
        vtl_env_notify(s, what);
}

/* An acknowledgement of session `s`, whose header and bitmap were copied out of the packet. */
VTL_INLINE void vtl_listen(struct vtl_session *s, __u64 now, struct vtl_ack_hdr *hdr,
                           const __u64 *map, __u32 words) {
    if (!VTL_TRY_LOCK(s->tx.busy)) {
        vtl_env_count(VTL_ST_RX_CONTENDED);
        return;
    }
    struct vtl_ackd a = {.s = s, .now = now, .hdr = hdr, .map = map, .words = words};
    __u32 timeouts = s->tx.timeouts;
    graft_listener(&a);
    int sooner = timeouts && !s->tx.timeouts;
    /* An exchange, not a store: who looks for news after saying that it sleeps must see them. */
    __sync_lock_test_and_set(&s->tx.busy, 0);
    vtl_wake_sender(s, sooner);
}

/* Words of the bitmap, or -1 if its length or place cannot be right. `room` is what the packet has
 * behind the header. */
VTL_INLINE int vtl_ack_length(const struct vtl_ack_hdr *hdr, __u32 room) {
    __u32 bytes = vtl_swap16(hdr->h.len);
    if (bytes <= room && bytes <= VTL_ACK_MAX_BITMAP && bytes % 8 == 0 &&
        vtl_swap32(hdr->skip) <= VTL_WINDOW_WORDS - bytes / 8)
        return bytes / 8;
    vtl_env_count(VTL_ST_RX_MALFORMED);
    return -1;
}

#endif
