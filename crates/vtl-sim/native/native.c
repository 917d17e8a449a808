// SPDX-License-Identifier: GPL-2.0-only
#define _GNU_SOURCE
#include <linux/types.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "native.h"

/* ------------------------------------------------------------------------------- environment */

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
    __u8 *stage; /* VTL_NATIVE_FRAME bytes, then inaccessible memory */
};

/* The host at work: the environment's functions have no argument for it. */
static __thread struct vtl_native_host *host;

static struct native_session *native(struct vtl_session *s) {
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

VTL_INLINE void vtl_env_notify(struct vtl_session *s, __u32 what) {
    native(s)->events |= what;
}

VTL_INLINE struct vtl_scratch *vtl_get_scratch(void) {
    return &host->scratch;
}

#include "tf/ack.h"
#include "tf/checksum.h"
#include "tf/congestion_bbr.h"
#include "tf/loss.h"
#include "tf/number.h"
#include "tf/pacing.h"
#include "tf/receive.h"
#include "tf/retransmit.h"
#include "tf/rtt.h"
#include "grafts/stream.h"
#include "vtl/engine.h"
#include "vtl/route.h"

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

/* ------------------------------------------------------------------------------------ drivers */

static int header_offset(const struct vtl_session *s) {
    return s->ip_version == 4 ? (int)VTL_OFFSET_V4 : (int)VTL_OFFSET_V6;
}

__u32 vtl_native_egress(struct vtl_native_host *h, __u32 sid, __u64 now, __u8 *frame) {
    host = h;
    struct vtl_session *s = vtl_session_at(sid);
    if (!s || s->state != VTL_OPEN)
        return 0;
    struct vtl_out o = {.s = s, .now = now};
    if (vtl_make(&o) != VTL_SEND)
        return 0;
    int offset = header_offset(s);
    __u32 bytes = vtl_padded(&o);
    __u32 length = offset + o.header_len + bytes;
    __u8 *body = frame + offset + sizeof(struct vtl_data_hdr);
    if (o.type == VTL_DATA)
        o.sum = vtl_move(body, o.slot->data, 1, frame + length, o.len);
    vtl_seal(&o);
    vtl_write_headers(frame, s, offset, o.header_len + bytes);
    memcpy(frame + offset, &o.hdr, o.header_len);
    return length;
}

static __u32 data_arrives(struct vtl_session *s, const __u8 *frame, __u32 length, int offset,
                          __u8 *answer, __u32 room) {
    struct vtl_data_hdr hdr;
    if (offset + sizeof(hdr) > length || !VTL_TRY_LOCK(s->rx.busy))
        return 0;
    memcpy(&hdr, frame + offset, sizeof(hdr));
    struct vtl_in in = {.s = s, .hdr = &hdr};
    enum vtl_verdict v = vtl_in_start(&in, length - offset - sizeof(hdr));
    if (v == VTL_NEXT) {
        if (in.slot)
            in.sum =
                vtl_move(in.slot->data, frame + offset + sizeof(hdr), 0, frame + length, in.len);
        v = graft_ingress(&in);
    }
    __u32 bytes = 0;
    if (v == VTL_SEND && room >= offset + sizeof(struct vtl_ack_hdr)) {
        struct vtl_ack_hdr ack;
        __u32 most = (room - offset - sizeof(ack)) / 8;
        __u32 words = vtl_ack_words(s) < most ? vtl_ack_words(s) : most;
        vtl_ack_build(s, &ack, host->scratch.map, words, 0);
        memcpy(answer, frame, offset);
        memcpy(answer + offset, &ack, sizeof(ack));
        memcpy(answer + offset + sizeof(ack), host->scratch.map, words * 8);
        vtl_turn_round(answer, offset, sizeof(ack) + words * 8);
        vtl_env_count(VTL_ST_TX_ACKS);
        bytes = offset + sizeof(ack) + words * 8;
    }
    VTL_UNLOCK(s->rx.busy);
    return bytes;
}

static void ack_arrives(struct vtl_session *s, __u64 now, const __u8 *frame, __u32 length,
                        int offset) {
    struct vtl_ack_hdr hdr;
    if (offset + sizeof(hdr) > length)
        return;
    memcpy(&hdr, frame + offset, sizeof(hdr));
    int words = vtl_ack_length(&hdr, length - offset - sizeof(hdr));
    if (words < 0)
        return;
    memcpy(host->scratch.map, frame + offset + sizeof(hdr), words * 8);
    vtl_listen(s, now, &hdr, host->scratch.map, words);
}

__u32 vtl_native_ingress(struct vtl_native_host *h, __u64 now, const __u8 *received, __u32 length,
                         __u8 *answer, __u32 room) {
    enum { IFINDEX = 1, GID = 2 };
    if (length > VTL_NATIVE_FRAME)
        return 0;
    host = h;
    /* Reading beyond the frame is a crash. */
    __u8 *frame = h->stage + VTL_NATIVE_FRAME - length;
    memcpy(frame, received, length);
    int route = vtl_route(frame, frame + length, length, IFINDEX);
    if (route < 0)
        return 0;
    int offset = vtl_parse_frame(frame, frame + length, length);
    const struct vtl_hdr *hdr = (const void *)(frame + offset);
    struct vtl_session *s = vtl_session_at(vtl_swap32(hdr->sid));
    if (route == GID * VTL_ROLES + VTL_INGRESS)
        return data_arrives(s, frame, length, offset, answer, room);
    if (route == GID * VTL_ROLES + VTL_LISTENER)
        ack_arrives(s, now, frame, length, offset);
    else
        vtl_env_count(VTL_ST_RX_NO_GRAFT);
    return 0;
}

/* ----------------------------------------------------------------- single transport functions */

#define VERDICT(define, name, call)                                                                \
    define(name) {                                                                                 \
        host = h;                                                                                  \
        return call(c);                                                                            \
    }
#define NO_VERDICT(define, name, call)                                                             \
    define(name) {                                                                                 \
        host = h;                                                                                  \
        call(c);                                                                                   \
        return VTL_NEXT;                                                                           \
    }
#define OUT(name) enum vtl_verdict vtl_native_##name(struct vtl_native_host *h, struct vtl_out *c)
#define IN(name) enum vtl_verdict vtl_native_##name(struct vtl_native_host *h, struct vtl_in *c)
#define ACKD(name) enum vtl_verdict vtl_native_##name(struct vtl_native_host *h, struct vtl_ackd *c)

VERDICT(OUT, make, vtl_make)
VERDICT(OUT, choose, tf_choose)
VERDICT(OUT, fetch, vtl_fetch)
NO_VERDICT(OUT, number, tf_number)
NO_VERDICT(OUT, checksum_add, tf_checksum_add)
VERDICT(OUT, pace_wait, tf_pace_wait)
NO_VERDICT(OUT, pace_charge, tf_pace_charge)
VERDICT(IN, checksum_verify, tf_checksum_verify)
VERDICT(IN, receive_admit, tf_receive_admit)
NO_VERDICT(IN, receive_place, tf_receive_place)
NO_VERDICT(IN, ack_note, tf_ack_note)
VERDICT(ACKD, ack_verify, tf_ack_verify)
VERDICT(ACKD, ack_cumulative, tf_ack_cumulative)
NO_VERDICT(ACKD, loss_reordering, tf_loss_reordering)
NO_VERDICT(ACKD, loss_selective, tf_loss_selective)
NO_VERDICT(ACKD, rtt, tf_rtt)
NO_VERDICT(ACKD, rate, tf_rate)
NO_VERDICT(ACKD, congestion_bbr, tf_congestion_bbr)

__u32 vtl_native_ack_build(struct vtl_native_host *h, struct vtl_session *s,
                           struct vtl_ack_hdr *hdr, __u64 *map, __u32 words, int update) {
    host = h;
    vtl_ack_build(s, hdr, map, words, update);
    return vtl_ack_words(s);
}

__u64 vtl_native_rx_limit(struct vtl_native_host *h, struct vtl_session *s) {
    host = h;
    return vtl_rx_limit(s);
}

int vtl_native_can_send(struct vtl_native_host *h, struct vtl_session *s) {
    host = h;
    return vtl_can_send(s);
}
