/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Packets too large for the path. A packet's payload is fixed once the app has written it, and the
 * path may shrink afterwards: then such packets go in two halves, and the receiver puts them
 * together in the packet's slot. Transport functions see one packet. Only for grafts with
 * reliability and order: the others give up what does not get through, and need `aux`.
 *
 * All of it is rare, so it is in functions of their own: other packets pay for two comparisons.
 */
#ifndef VTL_HALVES_H
#define VTL_HALVES_H

#include "tf.h"

/* Compositions that are for others define VTL_WITHOUT_HALVES before they include anything, and
 * spare the verifier what is never called. */
#ifdef VTL_WITHOUT_HALVES
enum { VTL_HALVES = 0 };
#else
enum { VTL_HALVES = 1 };
#endif

VTL_INLINE void vtl_copy_half(__u8 *to, const __u8 *from) {
    int i;
    vtl_for(i, 0, VTL_HALF / 8)((__u64 *)to)[i] = ((const __u64 *)from)[i];
}

/* Copies half of packet `seq` into the scratch slot: the first, which leaves the other one to be
 * sent, or what is left behind it. Returns how many bytes it has; 0, if there is no second one any
 * more. */
VTL_GLOBAL __u32 vtl_take_half(struct vtl_session *s, __u64 seq, __u32 second) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    struct vtl_slot *slot = s ? vtl_env_tx_slot(s, seq) : 0;
    if (!slot || !scratch)
        return 0;
    if (!second) {
        vtl_copy_half(scratch->slot.data, slot->data);
        s->tx.half = seq + 1;
        return VTL_HALF;
    }
    vtl_copy_half(scratch->slot.data, slot->data + VTL_HALF);
    scratch->slot.more = slot->more;
    __u32 len = VTL_LOAD(slot->len);
    __u32 most = s->max_payload < VTL_MAX_PAYLOAD ? s->max_payload : VTL_MAX_PAYLOAD;
    if (len > most)
        len = most;
    return len > VTL_HALF ? len - VTL_HALF : 0;
}

/* vtl_fetch, for a packet that goes in halves: the first. */
VTL_INLINE enum vtl_verdict vtl_fetch_half(struct vtl_out *o) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!scratch || vtl_take_half(o->s, o->seq, 0) != VTL_HALF)
        return VTL_STOP;
    o->flags |= VTL_F_HALF;
    o->slot = &scratch->slot;
    o->len = VTL_HALF;
    return VTL_NEXT;
}

/* graft_egress, for the half that is still to follow. */
VTL_INLINE enum vtl_verdict vtl_second_half(struct vtl_out *o) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    struct vtl_session *s = o->s;
    o->seq = s->tx.half - 1;
    s->tx.half = 0;
    o->len = vtl_take_half(s, o->seq, 1);
    if (!scratch || !o->len || o->len > VTL_HALF)
        return VTL_STOP;
    o->slot = &scratch->slot;
    o->type = VTL_DATA;
    o->flags = VTL_F_HALF | VTL_F_ACK_NOW | (scratch->slot.more & VTL_F_MARKS);
    s->tx.xid--; /* the first half was numbered last: both are one transmission */
    vtl_number_header(o);
    o->hdr.data.h.aux = vtl_swap16(VTL_HALF);
    return VTL_SEND;
}

/*
 * Half of packet `seq`, `len` bytes from `from` on, verified, lies in the scratch slot. Puts it
 * into the packet's own slot, and says whether the packet is whole.
 *
 * The slot itself says what it has, by a number that contains the packet's: an earlier packet's
 * says nothing. The app can write it, and spoils its own data then.
 */
VTL_GLOBAL int vtl_put_half(struct vtl_session *s, __u64 seq, __u32 from, __u32 len, __u32 more) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    struct vtl_slot *slot = s ? vtl_env_rx_slot(s, seq) : 0;
    if (!slot || !scratch)
        return 0;
    __u64 have = slot->stamp - seq * 4;
    if (have > 3)
        have = 0;
    if (from == 0 && len == VTL_HALF) {
        vtl_copy_half(slot->data, scratch->slot.data);
        have |= 1;
    } else if (from == VTL_HALF && len <= VTL_HALF) {
        vtl_copy_half(slot->data + VTL_HALF, scratch->slot.data);
        slot->len = VTL_HALF + len;
        slot->more = more;
        have |= 2;
    } else {
        vtl_env_count(VTL_ST_RX_MALFORMED);
        return 0;
    }
    slot->stamp = seq * 4 + have;
    return have == 3;
}

#endif
