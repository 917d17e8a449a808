/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * ordering: partial (idea: RFC 1693). A packet may name an earlier one as its predecessor, and is
 * delivered once that and all before it in its lane have been; it waits for nothing else. Lanes are
 * the sender's: a packet only carries the distance back to its predecessor (vtl_hdr.aux), so there
 * may be as many lanes as packets, and a lane costs nothing.
 *
 * Packets are placed in the receive ring by number, as in receive.h. The order of delivery is a
 * list in the same slots: the n-th packet to read is packet `stamp` of slot n.
 */
#ifndef VTL_TF_PARTIAL_ORDER_H
#define VTL_TF_PARTIAL_ORDER_H

#include "receive.h"

/* vtl_slot.more. Transmit: distance back to the predecessor, 0: none. Receive: whether the packet
 * is on the list; the same distance; distance ahead to a successor that arrived first; and in the
 * topmost bit VTL_F_LAST. */
enum {
    VTL_LISTED = 1,
    VTL_AFTER_SHIFT = 1,
    VTL_AHEAD_SHIFT = 16,
    VTL_LANE_MAX = VTL_MAX_WINDOW - 1,
    VTL_AHEAD = VTL_LANE_MAX << VTL_AHEAD_SHIFT,
};

/* Written by ingress. Positions in the list, except `base` and `limit`. */
struct vtl_partial_order {
    __u64 listed;
    __u64 consumer; /* the app's position, as far as it was plausible */
    __u64 mark;     /* once the app is here, it has read all packets */
    __u64 base;     /* below this one */
    __u64 limit;    /* end of the receive window */
};

VTL_INLINE struct vtl_partial_order *vtl_lanes(struct vtl_session *s) {
    return VTL_OWN(s, rx, struct vtl_partial_order);
}

VTL_INLINE __u32 vtl_after(__u32 more) {
    return more >> VTL_AFTER_SHIFT & VTL_LANE_MAX;
}

/* egress: after tf_number. */
VTL_INLINE void tf_partial_order_tell(struct vtl_out *o) {
    VTL_TF(partial_order, VTL_S_PARTIAL_ORDER | VTL_S_FLOW_CONTROL);
    if (o->type == VTL_DATA)
        o->hdr.data.h.aux = vtl_swap16(VTL_LOAD(o->slot->more) >> VTL_LANE_SHIFT & VTL_LANE_MAX);
}

/*
 * End of the receive window. All packets below `cum` are listed, so once the app has read to the
 * current end of the list, their slots are free.
 */
VTL_GLOBAL __u64 vtl_partial_order_limit(struct vtl_session *s) {
    if (!s)
        return 0;
    struct vtl_partial_order *p = vtl_lanes(s);
    struct vtl_ring_ctl *ctl = vtl_env_rx_ctl(s);
    if (!ctl)
        return p->limit;
    __u64 consumer = VTL_LOAD(ctl->consumer);
    if (consumer - p->consumer <= p->listed - p->consumer)
        p->consumer = consumer;
    for (int i = 0; i < 2; i++) {
        if (p->consumer < p->mark)
            break;
        __u64 max = (s->rx.cum & ~63ull) + VTL_MAX_WINDOW, limit = p->base + s->slots;
        p->limit = limit < max ? limit : max;
        p->mark = p->listed;
        p->base = s->rx.cum;
    }
    return p->limit;
}

/* Instead of tf_receive_admit. */
VTL_INLINE enum vtl_verdict tf_partial_order_admit(struct vtl_in *in) {
    struct vtl_session *s = in->s;
    if (in->type == VTL_PROBE)
        return VTL_NEXT;
    if (in->seq >= vtl_lanes(s)->limit && in->seq >= vtl_partial_order_limit(s)) {
        s->rx.beyond++;
        vtl_env_count(VTL_ST_RX_BEYOND);
        return VTL_STOP;
    }
    in->place = in->seq;
    __u64 word = s->rx.map[(in->seq / 64) % VTL_WINDOW_WORDS];
    in->duplicate = in->seq < s->rx.cum || (word >> (in->seq % 64) & 1);
    return VTL_NEXT;
}

VTL_INLINE int vtl_has_come(struct vtl_rx *rx, __u64 seq) {
    return rx->map[(seq / 64) % VTL_WINDOW_WORDS] >> (seq % 64) & 1;
}

/* Appends `seq` and all its waiting successors to the list. A slot may have a stale successor from
 * an earlier packet, so both ends must agree. */
VTL_GLOBAL int vtl_partial_order_list(struct vtl_session *s, __u64 seq) {
    if (!s)
        return 0;
    struct vtl_partial_order *p = vtl_lanes(s);
    int i;
    vtl_for(i, 0, VTL_MAX_WINDOW) {
        struct vtl_slot *entry = vtl_env_rx_slot(s, p->listed);
        struct vtl_slot *slot = vtl_env_rx_slot(s, seq);
        /* Each packet is listed once, whatever the application writes into its ring. */
        if (!entry || !slot || p->listed >= s->rx.received)
            break;
        entry->stamp = seq;
        p->listed++;
        __u32 ahead = (slot->more & VTL_AHEAD) >> VTL_AHEAD_SHIFT;
        slot->more |= VTL_LISTED;
        seq += ahead;
        if (!ahead || seq >= s->rx.max || !vtl_has_come(&s->rx, seq))
            break;
        slot = vtl_env_rx_slot(s, seq);
        if (!slot || vtl_after(slot->more) != ahead || slot->more & VTL_LISTED)
            break;
    }
    return 0;
}

/* Whether the new packet in its slot, whose `more` was `before`, must wait for its predecessor. */
VTL_INLINE int vtl_partial_order_waits(struct vtl_in *in, __u32 before) {
    struct vtl_session *s = in->s;
    __u32 after = vtl_swap16(in->hdr->h.aux) & VTL_LANE_MAX;
    in->slot->more = (before & VTL_AHEAD) | after << VTL_AFTER_SHIFT |
                     (in->hdr->h.flags & VTL_F_LAST ? VTL_LISTED_LAST : 0);
    if (!after || after > in->seq || in->seq - after < s->rx.cum)
        return 0;
    struct vtl_slot *first = vtl_env_rx_slot(s, in->seq - after);
    if (!first || (first->more & VTL_LISTED && vtl_has_come(&s->rx, in->seq - after)))
        return 0;
    first->more = (first->more & ~VTL_AHEAD) | after << VTL_AHEAD_SHIFT;
    return 1;
}

/* Instead of tf_receive_place. */
VTL_INLINE void tf_partial_order_place(struct vtl_in *in) {
    struct vtl_session *s = in->s;
    if (!in->slot)
        return;
    __u32 before = in->duplicate ? 0 : in->slot->more;
    if (!vtl_rx_take(in))
        return;
    int waits = vtl_partial_order_waits(in, before);
    if (!waits)
        vtl_partial_order_list(s, in->seq);
    if (in->seq == s->rx.cum)
        s->rx.cum = vtl_rx_scan(&s->rx);
    if (!waits)
        vtl_publish(s, vtl_lanes(s)->listed, in->hdr->h.flags & VTL_F_ACK_NOW);
}

#endif
