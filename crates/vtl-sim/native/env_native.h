/* SPDX-License-Identifier: GPL-2.0-only */
/* The environment of transport functions in plain memory. */
#ifndef VTL_ENV_NATIVE_H
#define VTL_ENV_NATIVE_H

#include <linux/types.h>
#include <stddef.h>

#include "native.h"

struct native_session {
    struct vtl_session s; /* first: the environment gets back from it to the rest */
    struct vtl_slot *tx, *rx;
    struct vtl_sent *sent;
    size_t ring_bytes, sent_bytes;
    __u32 events;
};

struct vtl_native_host {
    struct native_session *sessions[VTL_NATIVE_SESSIONS];
    __u64 stats[VTL_STATS];
    struct vtl_scratch scratch;
    __u64 now;
    __u8 *stage; /* VTL_NATIVE_FRAME bytes, then inaccessible memory */
};

/* The host at work: the environment's functions have no argument for it. */
extern __thread struct vtl_native_host *host;

VTL_INLINE struct native_session *native(struct vtl_session *s) {
    return (struct native_session *)s;
}

VTL_INLINE struct vtl_session *vtl_session_at(__u32 sid) {
    struct native_session *n = sid < VTL_NATIVE_SESSIONS ? host->sessions[sid] : NULL;
    return n ? &n->s : NULL;
}

VTL_INLINE struct vtl_slot *vtl_env_tx_slot(struct vtl_session *s, __u64 seq) {
    return native(s)->tx + 1 + (seq & (s->slots - 1));
}

VTL_INLINE struct vtl_slot *vtl_env_rx_slot(struct vtl_session *s, __u64 seq) {
    return native(s)->rx + 1 + (seq & (s->slots - 1));
}

VTL_INLINE struct vtl_ring_ctl *vtl_env_tx_ctl(struct vtl_session *s) {
    return (struct vtl_ring_ctl *)native(s)->tx;
}

VTL_INLINE struct vtl_ring_ctl *vtl_env_rx_ctl(struct vtl_session *s) {
    return (struct vtl_ring_ctl *)native(s)->rx;
}

VTL_INLINE struct vtl_sent *vtl_env_sent(struct vtl_session *s, __u64 seq) {
    return native(s)->sent + (seq & (s->slots - 1));
}

VTL_INLINE void vtl_env_count(__u32 stat) {
    host->stats[stat]++;
}

VTL_INLINE __u32 vtl_env_sid(struct vtl_session *s) {
    return s->sid;
}

VTL_INLINE __u64 vtl_env_now(void) {
    return host->now;
}

VTL_INLINE void vtl_env_notify(struct vtl_session *s, __u32 what) {
    native(s)->events |= what;
}

VTL_INLINE struct vtl_scratch *vtl_get_scratch(void) {
    return &host->scratch;
}

#endif
