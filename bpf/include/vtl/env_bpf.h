/* SPDX-License-Identifier: GPL-2.0-only */
/* Maps, and the environment of transport functions in the kernel. Every object declares all maps;
 * vtl-bpf creates them once, with the root programs, and passes them to each graft. */
#ifndef VTL_ENV_BPF_H
#define VTL_ENV_BPF_H

#include "tf.h"

/* Sessions, by index (sid). vtl-bpf sets how many. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, VTL_MAX_SESSIONS);
    __uint(map_flags, BPF_F_MMAPABLE);
    __type(key, __u32);
    __type(value, struct vtl_session);
} vtl_sessions SEC(".maps");

/* State of the pump, by shard, and behind the shards an entry for packets over TCP. vtl-bpf sets
 * how many. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __uint(map_flags, BPF_F_MMAPABLE);
    __type(key, __u32);
    __type(value, struct vtl_pump);
} vtl_pump SEC(".maps");

struct vtl_ring_template {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
    __uint(key_size, sizeof(__u32));
    __uint(value_size, sizeof(struct vtl_slot));
};

struct vtl_scoreboard_template {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __uint(map_flags, BPF_F_INNER_MAP);
    __uint(key_size, sizeof(__u32));
    __uint(value_size, sizeof(struct vtl_sent));
};

/* Ring directories: the rings and scoreboards of sessions, by vtl_session.ring. vtl-bpf sets how
 * many, and installs the maps. */
#define VTL_DIRECTORY(name, template)                                                              \
    struct {                                                                                       \
        __uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);                                                  \
        __uint(max_entries, VTL_MAX_RINGS);                                                        \
        __type(key, __u32);                                                                        \
        __array(values, struct template);                                                          \
    } name SEC(".maps")
VTL_DIRECTORY(vtl_tx_rings, vtl_ring_template);
VTL_DIRECTORY(vtl_rx_rings, vtl_ring_template);
VTL_DIRECTORY(vtl_scoreboards, vtl_scoreboard_template);

struct vtl_wake_template {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, VTL_WAKE_BYTES);
};

/* Ring buffers of events for vtld's shards, by number, VTL_EVENTS_BYTES each. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
    __uint(max_entries, 1);
    __type(key, __u32);
    __array(values, struct vtl_wake_template);
} vtl_events SEC(".maps");

/* Ring buffers of events for aware applications (VTL_EVENTS), by the session's entry of the ring
 * directories. */
VTL_DIRECTORY(vtl_wakes, vtl_wake_template);

/* Sessions by the cookie of the socket with which an aware application runs egress directly. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, VTL_MAX_SESSIONS);
    __type(key, __u64);
    __type(value, __u32);
} vtl_callers SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, VTL_STATS);
    __type(key, __u32);
    __type(value, __u64);
} vtl_stats SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, struct vtl_scratch);
} vtl_scratch SEC(".maps");

/* This CPU's buffers. */
VTL_INLINE struct vtl_scratch *vtl_get_scratch(void) {
    __u32 zero = 0;
    return bpf_map_lookup_elem(&vtl_scratch, &zero);
}

/* Programs of grafts, by gid (egress), or gid * VTL_ROLES + role (ingress): the root programs' tail
 * calls. */
#define VTL_PROGRAMS(name, entries)                                                                \
    struct {                                                                                       \
        __uint(type, BPF_MAP_TYPE_PROG_ARRAY);                                                     \
        __uint(max_entries, entries);                                                              \
        __type(key, __u32);                                                                        \
        __type(value, __u32);                                                                      \
    } name SEC(".maps")
VTL_PROGRAMS(vtl_in_tc, VTL_MAX_GRAFTS *VTL_ROLES);
VTL_PROGRAMS(vtl_in_xdp, VTL_MAX_GRAFTS *VTL_ROLES);
VTL_PROGRAMS(vtl_out_tc, VTL_MAX_GRAFTS);
VTL_PROGRAMS(vtl_out_xdp, VTL_MAX_GRAFTS);
VTL_PROGRAMS(vtl_out_direct, VTL_MAX_GRAFTS);

VTL_INLINE struct vtl_session *vtl_session_at(__u32 sid) {
    return bpf_map_lookup_elem(&vtl_sessions, &sid);
}

VTL_INLINE struct vtl_pump *vtl_pump_of(__u32 shard) {
    return bpf_map_lookup_elem(&vtl_pump, &shard);
}

/* Time for a packet of the pump. Reading the clock costs as much as making a header, so four
 * packets share a reading: they leave within about two microseconds. */
VTL_INLINE __u64 vtl_pump_clock(struct vtl_pump *p) {
    if (!(p->uses++ % 4))
        p->now_ns = bpf_ktime_get_ns();
    return p->now_ns;
}

/* The session whose turn it is. */
VTL_INLINE struct vtl_session *vtl_pumped_session(struct vtl_pump *p) {
    __u32 at = p->at;
    return at < p->count ? vtl_session_at(p->turns[at % VTL_TURNS].sid) : 0;
}

/* Accounts for a frame given to the current session, which has `used` it or had nothing to send. */
VTL_INLINE void vtl_end_turn(struct vtl_pump *p, int used) {
    __u32 at = p->at;
    if (at < p->count && (!used || !--p->turns[at % VTL_TURNS].quota))
        VTL_STORE(p->at, at + 1);
}

/* Entry `index` of the session's map in a ring directory. */
VTL_INLINE void *vtl_env_entry(void *directory, struct vtl_session *s, __u32 index) {
    __u32 ring = s->ring;
    void *inner = bpf_map_lookup_elem(directory, &ring);
    return inner ? bpf_map_lookup_elem(inner, &index) : 0;
}

VTL_INLINE __u32 vtl_env_index(struct vtl_session *s, __u64 seq) {
    return seq & (s->slots - 1);
}

VTL_INLINE struct vtl_slot *vtl_env_tx_slot(struct vtl_session *s, __u64 seq) {
    return vtl_env_entry(&vtl_tx_rings, s, 1 + vtl_env_index(s, seq));
}

VTL_INLINE struct vtl_slot *vtl_env_rx_slot(struct vtl_session *s, __u64 seq) {
    return vtl_env_entry(&vtl_rx_rings, s, 1 + vtl_env_index(s, seq));
}

VTL_INLINE struct vtl_ring_ctl *vtl_env_tx_ctl(struct vtl_session *s) {
    return vtl_env_entry(&vtl_tx_rings, s, 0);
}

VTL_INLINE struct vtl_ring_ctl *vtl_env_rx_ctl(struct vtl_session *s) {
    return vtl_env_entry(&vtl_rx_rings, s, 0);
}

VTL_INLINE struct vtl_sent *vtl_env_sent(struct vtl_session *s, __u64 seq) {
    return vtl_env_entry(&vtl_scoreboards, s, vtl_env_index(s, seq));
}

VTL_INLINE void vtl_env_count(__u32 stat) {
    __u64 *n = bpf_map_lookup_elem(&vtl_stats, &stat);
    if (n)
        (*n)++;
}

VTL_INLINE __u64 vtl_env_now(void) {
    return bpf_ktime_get_ns();
}

VTL_INLINE __u32 vtl_env_sid(struct vtl_session *s) {
    return s->sid;
}

/*
 * Whether vtld is to hand on this wake-up of session `sid`, instead of this program. A wake-up from
 * here is an interrupt; when several sessions have many (VTL_CROWD), vtld coalesces them: it hands
 * on all that are pending, then naps. A session that has them alone is spared the naps. Writers
 * that wait for room are in no hurry, so vtld serves them whenever it is awake.
 */
VTL_INLINE int vtl_relays(struct vtl_pump *p, __u32 sid, __u32 what) {
    if (VTL_LOAD(p->relay) || (!(what & VTL_EV_RECV) && VTL_LOAD(p->awake)))
        return 1;
    if (VTL_LOAD(p->latest) == sid)
        return 0;
    VTL_STORE(p->latest, sid);
    __u64 now = bpf_ktime_get_ns();
    if (now - VTL_LOAD(p->since_ns) > VTL_CROWD_NS) {
        VTL_STORE(p->since_ns, now);
        VTL_STORE(p->woken, 0);
    }
    __u32 woken = VTL_LOAD(p->woken) + 1;
    VTL_STORE(p->woken, woken);
    return woken > VTL_CROWD;
}

/* Puts an event into the ring buffer of the session's shard. `flags`: BPF_RB_*. */
VTL_INLINE void vtl_env_tell_shard(struct vtl_session *s, struct vtl_event *event, __u64 flags) {
    __u32 shard = s->shard;
    void *events = bpf_map_lookup_elem(&vtl_events, &shard);
    if (events)
        bpf_ringbuf_output(events, event, sizeof(*event), flags);
}

/* Wakes the session's shard, by an event without a session. */
VTL_INLINE void vtl_env_wake_shard(struct vtl_session *s) {
    struct vtl_event event = {};
    vtl_env_tell_shard(s, &event, BPF_RB_FORCE_WAKEUP);
}

/* Puts an event into the ring buffer of the session's user. `flags`: BPF_RB_*. */
VTL_INLINE void vtl_env_tell_user(struct vtl_session *s, struct vtl_event *event, __u64 flags) {
    __u32 ring = s->ring;
    void *wake = bpf_map_lookup_elem(&vtl_wakes, &ring);
    if (wake)
        bpf_ringbuf_output(wake, event, sizeof(*event), flags);
}

/* Fallback for a frame on the loopback that cannot be sent: wakes its receiver through a ring
 * buffer. `doorbell`: vtl_rx.doorbell. */
VTL_INLINE void vtl_env_wake_for(struct vtl_session *s, __u32 doorbell) {
    struct vtl_event event = {};
    if (doorbell == 1 + VTL_DOORBELL)
        vtl_env_tell_user(s, &event, BPF_RB_FORCE_WAKEUP);
    else
        vtl_env_wake_shard(s);
}

/*
 * Delivers events: VTL_EV_SEND to the session's shard, the others to the session's user: directly
 * (ring buffer, or for vtl-flows a frame on the loopback, which ingress sends afterwards:
 * rx.doorbell), or through its shard, which hands them on (`pending_wakeups`).
 */
VTL_GLOBAL int vtl_notify(struct vtl_session *s, __u32 what) {
    if (!s)
        return 0;
    struct vtl_event event = {.sid = vtl_env_sid(s), .what = what};
    struct vtl_pump *p = vtl_pump_of(s->shard);
    __u32 theirs = what & ~VTL_EV_SEND;
    if (theirs == VTL_EV_RECV && s->aware == VTL_DOORBELL && p && VTL_LOAD(p->doorbell)) {
        vtl_env_tell_user(s, &event, BPF_RB_NO_WAKEUP);
        s->rx.doorbell = 1 + VTL_DOORBELL;
        event.what &= VTL_EV_SEND;
    } else if (theirs && p && (s->aware == VTL_RELAYED || vtl_relays(p, event.sid, theirs))) {
        if ((__sync_fetch_and_or(&s->pending_wakeups, theirs) & theirs) == theirs)
            event.what &= VTL_EV_SEND; /* already pending at vtld */
    } else if (theirs) {
        vtl_env_tell_user(s, &event, 0);
        event.what &= VTL_EV_SEND;
    }
    if (!event.what)
        return 0;
    /* A wake-up by the ring buffer interrupts this CPU, at the cost of several packets; one by a
     * frame does not. */
    __u32 awake = p ? VTL_LOAD(p->awake) : 0;
    __u32 rings = !awake && what == VTL_EV_RECV && p && VTL_LOAD(p->doorbell);
    if (rings)
        s->rx.doorbell = 1 + VTL_DAEMON;
    vtl_env_tell_shard(s, &event, awake || rings ? BPF_RB_NO_WAKEUP : 0);
    if (!awake || VTL_LOAD(p->awake))
        return 0;
    /* It went to sleep, perhaps before the event was there. */
    vtl_env_wake_shard(s);
    return 0;
}

VTL_INLINE void vtl_env_notify(struct vtl_session *s, __u32 what) {
    vtl_notify(s, what);
}

#endif
