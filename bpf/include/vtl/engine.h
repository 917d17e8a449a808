/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Part of all grafts and drivers that needs no kernel: between a composition's transport functions
 * (see graft.h) and the programs that move bytes. To be included after the environment (env_bpf.h,
 * or crates/vtl-sim/native) and the composition.
 */
#ifndef VTL_ENGINE_H
#define VTL_ENGINE_H

#include "halves.h"
#include "headers.h"
#include "room.h"
#include "tag.h"
#include "tf.h"

#define VTL_TRY_LOCK(lock) (__sync_lock_test_and_set(&(lock), 1) == 0)
#define VTL_UNLOCK(lock)                                                                           \
    do {                                                                                           \
        VTL_BARRIER();                                                                             \
        VTL_STORE(lock, 0);                                                                        \
    } while (0)

/* Writes the header of a DATA or PROBE packet, with the next transmission number. */
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

/* Requests wake-ups from the next acknowledgement and from the app. Returns whether there is
 * something to send after all. */
VTL_GLOBAL int vtl_rest(struct vtl_session *s, __u64 now) {
    if (!s)
        return 0;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (ctl)
        VTL_STORE(ctl->waiting, 1);
    __sync_lock_test_and_set(&s->tx.idle, 1);
    /* An acknowledgement is due that could not be built while ingress held the lock. */
    return (graft_can_send(s) && s->tx.pace_ns <= now) || VTL_LOAD(s->rx.ack_now) ||
           (VTL_HALVES && s->tx.half);
}

/* Makes the next packet in `o`. VTL_STOP: none; s->tx.wake_ns says when to call again. */
VTL_INLINE enum vtl_verdict vtl_make(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    s->tx.wake_ns = VTL_NEVER;
    if (!VTL_LOAD(s->ifindex))
        return VTL_STOP; /* the route is learned from the peer's first packet */
    if (VTL_LOAD(s->rx.ack_now) && VTL_TRY_LOCK(s->rx.lock)) {
        /* Before the app's position is read: it may read more meanwhile, and request another
         * one. */
        __sync_lock_test_and_set(&s->rx.ack_now, 0);
        vtl_ack_build(s, &o->hdr.ack, 0, 0, 1);
        VTL_UNLOCK(s->rx.lock);
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
    if (vtl_rest(s, o->now))
        s->tx.wake_ns = 0;
    return VTL_STOP;
}

/* Marks rate samples as application-limited until everything in flight has arrived, if nothing is
 * left to send. For direct egress, which asks for one packet only; else retransmit.h does so when
 * it finds none. */
VTL_GLOBAL int vtl_mark_app_limited(struct vtl_session *s) {
    if (!s)
        return 0;
    struct vtl_tx *tx = &s->tx;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    __u64 in_flight = vtl_in_flight(s);
    if (ctl && VTL_LOAD(ctl->producer) == tx->next && in_flight < VTL_LOAD(tx->cwnd) &&
        !VTL_LOAD(tx->lost_pending) && tx->copies_done == tx->copies_scheduled)
        tx->app_limited = tx->delivered + in_flight + !in_flight;
    return 0;
}

/* vtl_make for direct egress: called by the application's send, concurrently with the pump. Makes
 * at most one packet; notifies vtld if there are more, or if no probe timeout is scheduled. */
VTL_INLINE enum vtl_verdict vtl_make_direct(struct vtl_out *o) {
    struct vtl_session *s = o->s;
    if (!VTL_TRY_LOCK(s->tx.egress_lock)) {
        __sync_lock_test_and_set(&s->tx.rerun, 1);
        if (!VTL_TRY_LOCK(s->tx.egress_lock))
            return VTL_STOP; /* the holder rereads `rerun` after unlocking */
    }
    enum vtl_verdict v = vtl_join(o, vtl_make(o));
    int more = v == VTL_SEND ? vtl_rest(s, o->now) : s->tx.wake_ns != VTL_NEVER;
    if (v == VTL_SEND)
        vtl_mark_app_limited(s);
    __sync_lock_test_and_set(&s->tx.egress_lock, 0);
    more |= __sync_lock_test_and_set(&s->tx.rerun, 0) || !VTL_LOAD(s->tx.has_timer);
    /* At most one pending: the ring of events is shared, and the app may call this as often as it
     * likes. */
    if (more && !__sync_lock_test_and_set(&s->tx.event_pending, 1))
        vtl_env_notify(s, VTL_EV_SEND);
    return v;
}

/* Looks up payload and scoreboard entry of o->seq. */
VTL_INLINE enum vtl_verdict vtl_fetch(struct vtl_out *o) {
    o->len = 0;
    if (o->type != VTL_DATA)
        return VTL_NEXT;
    o->slot = vtl_env_tx_slot(o->s, o->seq);
    o->sent = vtl_env_sent(o->s, o->seq);
    if (!o->slot || !o->sent)
        return VTL_STOP;
    /* Written by the app, which may change it concurrently. */
    __u32 len = VTL_LOAD(o->slot->len);
    __u32 max = o->s->max_payload;
    if (max > VTL_MAX_PAYLOAD)
        max = VTL_MAX_PAYLOAD;
    o->len = len > max ? max : len ? len : 1;
    o->flags |= VTL_LOAD(o->slot->more) & VTL_F_MARKS;
    return VTL_HALVES && o->len > o->s->path && o->len > VTL_HALF ? vtl_fetch_half(o) : VTL_NEXT;
}

/* Bytes behind the header: payload and padding. */
VTL_INLINE __u32 vtl_padded(const struct vtl_out *o) {
    const __u32 min = VTL_MIN_PACKET - sizeof(struct vtl_data_hdr);
    return o->type != VTL_DATA ? 0 : o->len < min ? min : o->len;
}

/* Unaligned words. All architectures with an eBPF JIT access them at once, but clang would go by
 * bytes. */
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
 * Copies `len` bytes of payload, at most VTL_MAX_PAYLOAD, between a slot and a packet that ends at
 * `end`, and returns their sum: modulo 2^64, of little-endian 64-bit words, zero-padded. `put`:
 * into the packet, with padding; else out of it. Bytes beyond the packet are left out. One pass
 * over the memory instead of two, and the stores that miss the cache overlap with the additions. In
 * two parts, which vtl_move combines: the verifier would follow the second one once for each length
 * of the first.
 */
#define VTL_FITS(bytes) ((put ? (const void *)to : from) + (bytes) <= end)

/* Two words at a time into two sums: eBPF has ten registers, and if the compiler orders this
 * itself, sum and pointers spill to the stack. */
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

/* Whole blocks of 64 bytes, two at a time. */
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

/* Bytes in whole blocks. */
VTL_INLINE __u32 vtl_in_blocks(__u32 len) {
    return len & (2047 & ~63);
}

/* Whole words of the remainder, of `bytes` less than 64. */
VTL_INLINE __u64 vtl_move_words(void *to, const void *from, const int put, const void *end,
                                __u32 bytes) {
    __u64 sum = 0;
    for (int word = 0; word < 7; word++) {
        if (bytes < 8 || !VTL_FITS(8))
            break;
        __u64 w = *(const vtl_u64 *)from;
        *(vtl_u64 *)to = w;
        sum += w;
        from += 8;
        to += 8;
        bytes -= 8;
    }
    return sum;
}

/* Remainder: the last len % 64 bytes of a payload of `len`, and the padding. */
VTL_INLINE __u64 vtl_move_rest(void *to, const void *from, const int put, const void *end,
                               __u32 len) {
    const __u32 min = VTL_MIN_PACKET - sizeof(struct vtl_data_hdr);
    if (put && len < min && VTL_FITS(min)) {
        for (int i = 0; i < (int)min / 8; i++)
            ((vtl_u64 *)to)[i] = 0;
    }
    __u64 sum = vtl_move_words(to, from, put, end, len & 63);
    /* Behind them wherever the loop ended, or the verifier would follow the rest for each end. */
    __u32 words = vtl_hidden(len & 56) & 56, shift = 0;
    from += words;
    to += words;
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

/* Blocks and remainder. */
VTL_INLINE __u64 vtl_move(void *to, const void *from, const int put, const void *end, __u32 len) {
    __u32 done = vtl_in_blocks(len);
    return vtl_move_blocks(to, from, put, end, len) +
           vtl_move_rest(to + done, from + done, put, end, len);
}

/* egress: seals the header, once the payload is in the packet and `o->sum` is known. */
VTL_INLINE void vtl_seal(struct vtl_out *o) {
    if (o->type == VTL_ACK)
        return;
    graft_seal(o);
    vtl_put_tag(o->s, &o->hdr.tagged, sizeof(struct vtl_data_hdr));
}

/* Common start of both ingress drivers, with a copy of the header. VTL_NEXT: the payload is to be
 * copied to `in->slot`, if that is set. */
VTL_INLINE enum vtl_verdict vtl_in_start(struct vtl_in *in, __u32 room) {
    in->type = vtl_hdr_type(&in->hdr->h);
    in->len = vtl_swap16(in->hdr->h.len);
    in->seq = vtl_swap64(in->hdr->seq);
    if (in->len > VTL_MAX_PAYLOAD || in->len > room || (in->type == VTL_DATA) != (in->len != 0)) {
        vtl_env_count(VTL_ST_RX_MALFORMED);
        return VTL_STOP;
    }
    enum vtl_verdict v = graft_admit(in);
    if (v != VTL_NEXT)
        return v;
    struct vtl_slot *slot = 0;
    if (in->type == VTL_DATA) {
        struct vtl_scratch *scratch = vtl_get_scratch();
        if (!in->duplicate && !in->refused && !in->half)
            slot = vtl_env_rx_slot(in->s, in->place);
        else
            slot = scratch ? &scratch->slot : 0;
        if (!slot)
            return VTL_STOP;
    }
    in->slot = vtl_hidden(slot);
    return VTL_NEXT;
}

/* After an acknowledgement: notifies the pump if it sleeps and the session may send again, and the
 * app if it waits for room and there is enough. `sooner`: egress's timeout is now shorter than the
 * one that the pump waits for. */
VTL_INLINE void vtl_wake_sender(struct vtl_session *s, int sooner) {
    __u32 what = 0;
    if (VTL_LOAD(s->tx.idle) && (sooner || graft_can_send(s)) &&
        __sync_lock_test_and_set(&s->tx.idle, 0))
        what = VTL_EV_SEND;
    what |= vtl_room_event(s);
    if (what)
        vtl_env_notify(s, what);
}

/* Processes an acknowledgement for session `s`, from copies of its header and bitmap. */
VTL_INLINE void vtl_listen(struct vtl_session *s, __u64 now, struct vtl_ack_hdr *hdr,
                           const __u64 *map, __u32 words) {
    if (!VTL_TRY_LOCK(s->tx.lock)) {
        vtl_env_count(VTL_ST_RX_CONTENDED);
        return;
    }
    struct vtl_ackd a = {.s = s, .now = now, .hdr = hdr, .map = map, .words = words};
    __u32 timeouts = s->tx.timeouts;
    graft_listener(&a);
    int sooner = timeouts && !s->tx.timeouts;
    /* An exchange, not a store: a thread that announces its sleep and rechecks must see the
     * news. */
    __sync_lock_test_and_set(&s->tx.lock, 0);
    vtl_wake_sender(s, sooner);
}

/* Words of the bitmap, or -1 if its length or position is invalid. `room`: bytes of the packet
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
