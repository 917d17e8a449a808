// SPDX-License-Identifier: GPL-2.0-only
#define _GNU_SOURCE
#include <linux/types.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "env_native.h"
#include "native.h"
#include "ops.h"
#include "vtl/parse.h"
#include "vtl/route.h"

__thread struct vtl_native_host *host;

/* ------------------------------------------------------------------------------------- memory */

/* `bytes` of zeros between two inaccessible pages. */
static void *guarded(size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE);
    size_t inner = (bytes + page - 1) / page * page;
    char *base = mmap(NULL, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + page, inner, PROT_READ | PROT_WRITE))
        return NULL;
    return base + page + inner - bytes;
}

static void unguard(void *at, size_t bytes) {
    size_t page = sysconf(_SC_PAGESIZE);
    size_t inner = (bytes + page - 1) / page * page;
    if (at)
        munmap((char *)at + bytes - inner - page, inner + 2 * page);
}

struct vtl_native_host *vtl_native_new(void) {
    struct vtl_native_host *h = calloc(1, sizeof(*h));
    if (h)
        h->stage = guarded(VTL_NATIVE_FRAME);
    return h && h->stage ? h : NULL;
}

void vtl_native_free(struct vtl_native_host *h) {
    for (int sid = 0; sid < VTL_NATIVE_SESSIONS; sid++) {
        struct native_session *n = h->sessions[sid];
        if (!n)
            continue;
        unguard(n->tx, n->ring_bytes);
        unguard(n->rx, n->ring_bytes);
        unguard(n->sent, n->sent_bytes);
        free(n);
    }
    unguard(h->stage, VTL_NATIVE_FRAME);
    free(h);
}

int vtl_native_add(struct vtl_native_host *h, __u32 sid, __u32 slots) {
    if (!sid || sid >= VTL_NATIVE_SESSIONS || h->sessions[sid])
        return -1;
    struct native_session *n = aligned_alloc(64, sizeof(*n));
    if (!n)
        return -1;
    memset(n, 0, sizeof(*n));
    n->ring_bytes = sizeof(struct vtl_slot) * (slots + 1);
    n->sent_bytes = sizeof(struct vtl_sent) * slots;
    n->tx = guarded(n->ring_bytes);
    n->rx = guarded(n->ring_bytes);
    n->sent = guarded(n->sent_bytes);
    n->s.sid = sid;
    n->s.slots = slots;
    h->sessions[sid] = n;
    return n->tx && n->rx && n->sent ? 0 : -1;
}

struct vtl_session *vtl_native_session(struct vtl_native_host *h, __u32 sid) {
    return &h->sessions[sid]->s;
}

struct vtl_slot *vtl_native_tx_ring(struct vtl_native_host *h, __u32 sid) {
    return h->sessions[sid]->tx;
}

struct vtl_slot *vtl_native_rx_ring(struct vtl_native_host *h, __u32 sid) {
    return h->sessions[sid]->rx;
}

struct vtl_sent *vtl_native_scoreboard(struct vtl_native_host *h, __u32 sid) {
    return h->sessions[sid]->sent;
}

__u64 *vtl_native_stats(struct vtl_native_host *h) {
    return h->stats;
}

__u32 vtl_native_events(struct vtl_native_host *h, __u32 sid) {
    __u32 events = h->sessions[sid]->events;
    h->sessions[sid]->events = 0;
    return events;
}

/* ------------------------------------------------------------------------------------- frames */

static const struct vtl_native_ops *graft(__u32 gid) {
    for (int i = 0; vtl_native_grafts[i]; i++) {
        if (vtl_native_grafts[i]->info->gid == gid)
            return vtl_native_grafts[i];
    }
    return NULL;
}

const struct vtl_graft_info *vtl_native_graft(__u32 index) {
    for (__u32 i = 0; vtl_native_grafts[i]; i++) {
        if (i == index)
            return vtl_native_grafts[i]->info;
    }
    return NULL;
}

__u32 vtl_native_egress(struct vtl_native_host *h, __u32 sid, __u64 now, __u8 *frame) {
    host = h;
    struct vtl_session *s = vtl_session_at(sid);
    const struct vtl_native_ops *ops = s && s->state == VTL_OPEN ? graft(s->gid) : NULL;
    return ops ? ops->make(s, now, frame) : 0;
}

__u32 vtl_native_ingress(struct vtl_native_host *h, __u64 now, const __u8 *received, __u32 length,
                         __u8 *answer, __u32 room) {
    if (length > VTL_NATIVE_FRAME)
        return 0;
    host = h;
    host->now = now;
    /* Reading beyond the frame is a crash. */
    __u8 *frame = h->stage + VTL_NATIVE_FRAME - length;
    memcpy(frame, received, length);
    int route = vtl_route(frame, frame + length, length, VTL_NATIVE_IFINDEX);
    if (route < 0)
        return 0;
    int offset = vtl_parse_frame(frame, frame + length, length);
    const struct vtl_hdr *hdr = (const void *)(frame + offset);
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr->sid));
    const struct vtl_native_ops *ops = graft(route / VTL_ROLES);
    if (!ops)
        vtl_env_count(VTL_ST_RX_NO_GRAFT);
    else if (route % VTL_ROLES == VTL_INGRESS)
        return ops->data(s, frame, length, offset, answer, room);
    else
        ops->ack(s, now, frame, length, offset);
    return 0;
}
