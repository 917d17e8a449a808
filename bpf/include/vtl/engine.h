/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * What all grafts and all drivers share and what needs no kernel: between the transport functions
 * of a composition (see graft.h) and the programs that move bytes. The environment (env_bpf.h, or
 * crates/vtl-sim/native) comes before this file, the composition too.
 */
#ifndef VTL_ENGINE_H
#define VTL_ENGINE_H

#include "tf.h"

#define VTL_TRY_LOCK(busy) (__sync_lock_test_and_set(&(busy), 1) == 0)
#define VTL_UNLOCK(busy)                                                                           \
    do {                                                                                           \
        VTL_BARRIER();                                                                             \
        VTL_STORE(busy, 0);                                                                        \
    } while (0)

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
    enum vtl_verdict v = graft_egress(o);
    if (v == VTL_SEND) {
        s->tx.wake_ns = 0;
        vtl_env_count(VTL_ST_TX_PACKETS);
        return v;
    }
    /* Ask for a kick by the next acknowledgement and by the app, then look once more. */
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (ctl)
        VTL_STORE(ctl->waiting, 1);
    __sync_lock_test_and_set(&s->tx.idle, 1);
    /* An acknowledgement that found ingress at work is still due. */
    if ((vtl_can_send(s) && s->tx.pace_ns <= o->now) || VTL_LOAD(s->rx.ack_now))
        s->tx.wake_ns = 0;
    return VTL_STOP;
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
    return VTL_NEXT;
}

/* Bytes behind the header: payload and padding. */
VTL_INLINE __u32 vtl_padded(const struct vtl_out *o) {
    const __u32 least = VTL_MIN_PACKET - sizeof(struct vtl_data_hdr);
    return o->type != VTL_DATA ? 0 : o->len < least ? least : o->len;
}

/* What the two ingress drivers have in common once they hold a copy of the header. The payload of a
 * new packet is then to be copied to its slot. */
VTL_INLINE enum vtl_verdict vtl_in_start(struct vtl_in *in, __u32 room) {
    in->type = in->hdr->h.version_type & 0xf;
    in->len = vtl_swap16(in->hdr->h.len);
    in->seq = vtl_swap64(in->hdr->seq);
    if (in->len > VTL_MAX_PAYLOAD || in->len > room || (in->type == VTL_DATA) != (in->len != 0)) {
        vtl_env_count(VTL_ST_RX_MALFORMED);
        return VTL_STOP;
    }
    enum vtl_verdict v = graft_admit(in);
    if (v != VTL_NEXT || in->type == VTL_PROBE || in->duplicate)
        return v;
    in->slot = vtl_env_rx_slot(in->s, in->seq);
    return in->slot ? VTL_NEXT : VTL_STOP;
}

/* Tells vtld what an acknowledgement made possible, if somebody waits for it. */
VTL_INLINE void vtl_wake_sender(struct vtl_session *s) {
    __u32 what = 0;
    if (VTL_LOAD(s->tx.idle) && vtl_can_send(s) && __sync_lock_test_and_set(&s->tx.idle, 0))
        what = VTL_EV_SEND;
    struct vtl_ring_ctl *ctl = vtl_env_tx_ctl(s);
    if (ctl && VTL_LOAD(ctl->refill)) {
        __u64 used = VTL_LOAD(ctl->producer) - s->tx.una;
        if (used <= s->slots - s->slots / 4 && __sync_lock_test_and_set(&ctl->refill, 0))
            what |= VTL_EV_ROOM;
    }
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
    graft_listener(&a);
    /* An exchange, not a store: who looks for news after saying that it sleeps must see them. */
    __sync_lock_test_and_set(&s->tx.busy, 0);
    vtl_wake_sender(s);
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
