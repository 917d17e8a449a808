/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Fragmentation of packets too large for the path. A packet's payload is fixed once the app has
 * written it, but the path MTU may shrink afterwards: such packets go in two halves, which the
 * receiver reassembles in the packet's slot. Transport functions see one packet. Only for reliable
 * ordered grafts: the others give up packets that do not get through, and need `aux`.
 *
 * Rare, so the copying is in global functions: other packets pay for two comparisons.
 */
#ifndef VTL_HALVES_H
#define VTL_HALVES_H

#include "tf.h"

/* Compositions for other grafts define VTL_WITHOUT_HALVES before their first include, which saves
 * verifying this code. */
#ifdef VTL_WITHOUT_HALVES
enum { VTL_HALVES = 0 };
#else
enum { VTL_HALVES = 1 };
#endif

VTL_INLINE void vtl_copy_half(__u8 *to, const __u8 *from) {
    int i;
    vtl_for(i, 0, VTL_HALF / 8)((__u64 *)to)[i] = ((const __u64 *)from)[i];
}

/* Copies half of packet `seq` into the scratch slot: the first, which schedules the second
 * (tx.half), or the second. Returns its length; 0 if there is no second half any more. */
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
    __u32 max = s->max_payload < VTL_MAX_PAYLOAD ? s->max_payload : VTL_MAX_PAYLOAD;
    if (len > max)
        len = max;
    return len > VTL_HALF ? len - VTL_HALF : 0;
}

/* vtl_fetch for fragmented packets: the first half. */
VTL_INLINE enum vtl_verdict vtl_fetch_half(struct vtl_out *o) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    if (!scratch || vtl_take_half(o->s, o->seq, 0) != VTL_HALF)
        return VTL_STOP;
    o->flags |= VTL_F_HALF;
    o->slot = &scratch->slot;
    o->len = VTL_HALF;
    return VTL_NEXT;
}

/* graft_egress for the second half. */
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
    s->tx.xid--; /* as for the first half: both are one transmission */
    vtl_number_header(o);
    o->hdr.data.h.aux = vtl_swap16(VTL_HALF);
    return VTL_SEND;
}

/*
 * Reassembles: copies the verified half of packet `seq`, `len` bytes from `from` on, from the
 * scratch slot into the packet's slot. Returns whether the packet is complete.
 *
 * The slot's stamp says which halves it has, combined with the packet's number, so that an earlier
 * packet's stamp is void. The app can write it, but spoils only its own data.
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
