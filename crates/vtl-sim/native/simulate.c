// SPDX-License-Identifier: GPL-2.0-only
/*
 * One graft, two hosts and a link in virtual time: what `vtl graft test` runs, on a grid of paths.
 * A graft that promises order and reliability must deliver every packet once, in order; any other
 * one what it delivers undamaged. The link carries 100 Mbit/s, queues 256 packets, and loses and
 * delays by a seeded generator, so that a failure comes again.
 */
#define _GNU_SOURCE
#include <linux/types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"
#include "ops.h"

enum { SID = 1, SLOTS = 1024, LENGTH = 1000, PACKETS = 2000, QUEUE = 256, EVENTS = 1 << 16 };
#define MS 1000000ull
#define PATIENCE (1200 * 1000 * MS) /* of virtual time, until a transfer counts as stalled */
#define UPTIME (3600 * 1000 * MS)   /* what the hosts' clocks show when the simulation begins */
/* Of one byte at 100 Mbit/s. */
#define NS_PER_BYTE 80

struct path {
    __u32 rtt_ms, loss_pct, reorder_pct;
};

struct event {
    __u64 at;
    __u32 to, length;
    __u8 *bytes;
};

struct side {
    struct vtl_native_host *host;
    __u64 wake;      /* when its pump runs */
    __u64 link_free; /* when its transmitter is idle again */
    __u64 written, read, kicked;
};

/* State of a POSIX generator: its sequence is the same on every machine. */
struct random {
    unsigned short state[3];
};

struct world {
    struct side side[2];
    struct event heap[EVENTS];
    __u32 events, queued[2];
    __u64 now;
    struct random random;
    struct path path;
    __u64 damaged, repeated, distinct;
    __u8 seen[PACKETS];
};

static struct random seeded(__u64 seed) {
    return (struct random){{0x330e ^ seed >> 32, seed, seed >> 16}}; /* as srand48 */
}

/* 31 random bits. */
static __u32 draw(struct random *r) {
    return nrand48(r->state);
}

static int chance(struct world *w, __u32 pct) {
    return draw(&w->random) % 100 < pct;
}

static void put(struct world *w, struct event e) {
    if (w->events == EVENTS)
        abort();
    __u32 i = w->events++;
    for (; i && w->heap[(i - 1) / 2].at > e.at; i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = e;
}

static struct event take(struct world *w) {
    struct event first = w->heap[0], last = w->heap[--w->events];
    __u32 i = 0;
    for (;;) {
        __u32 child = 2 * i + 1;
        if (child >= w->events)
            break;
        if (child + 1 < w->events && w->heap[child + 1].at < w->heap[child].at)
            child++;
        if (w->heap[child].at >= last.at)
            break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return first;
}

/* A frame leaves a host. */
static void transmit(struct world *w, int from, const __u8 *frame, __u32 length) {
    struct side *s = &w->side[from];
    if (s->link_free < w->now)
        s->link_free = w->now;
    if ((s->link_free - w->now) / (LENGTH * NS_PER_BYTE) > QUEUE)
        return; /* the queue is full */
    s->link_free += length * NS_PER_BYTE;
    if (chance(w, w->path.loss_pct))
        return;
    __u64 at = s->link_free + w->path.rtt_ms * MS / 2;
    if (chance(w, w->path.reorder_pct))
        at += draw(&w->random) % (w->path.rtt_ms * MS / 4 + MS);
    __u8 *copy = malloc(length);
    if (!copy)
        abort();
    memcpy(copy, frame, length);
    put(w, (struct event){.at = at, .to = 1 - from, .length = length, .bytes = copy});
}

static void fill(__u8 *data, __u64 number) {
    struct random random = seeded(number);
    memcpy(data, &number, sizeof(number));
    for (int i = sizeof(number); i < LENGTH; i += 4) {
        __u32 word = draw(&random);
        memcpy(data + i, &word, sizeof(word));
    }
}

/* The sending application keeps the ring full. */
static void application(struct world *w) {
    struct side *s = &w->side[0];
    struct vtl_slot *ring = vtl_native_tx_ring(s->host, SID);
    struct vtl_ring_ctl *ctl = (struct vtl_ring_ctl *)ring;
    __u64 before = s->written;
    while (s->written < PACKETS && s->written - ctl->consumer < SLOTS) {
        struct vtl_slot *slot = &ring[1 + s->written % SLOTS];
        slot->len = LENGTH;
        fill(slot->data, s->written);
        ctl->producer = ++s->written;
    }
    if (s->written != before)
        s->wake = w->now;
}

/* The receiving application reads, and checks what it gets. */
static void check(struct world *w, __u32 services) {
    struct side *s = &w->side[1];
    struct vtl_slot *ring = vtl_native_rx_ring(s->host, SID);
    struct vtl_ring_ctl *ctl = (struct vtl_ring_ctl *)ring;
    __u8 wanted[LENGTH];
    int ordered = services & VTL_S_ORDERED;
    for (; s->read < ctl->producer; ctl->consumer = ++s->read) {
        const struct vtl_slot *slot = &ring[1 + s->read % SLOTS];
        if (!slot->len && !(services & VTL_S_RELIABLE))
            continue; /* given up */
        __u64 number = ordered ? s->read : slot->stamp;
        if (number >= PACKETS) {
            w->damaged++;
            continue;
        }
        fill(wanted, number);
        if (slot->len != LENGTH || memcmp(slot->data, wanted, LENGTH))
            w->damaged++;
        else if (w->seen[number])
            w->repeated++;
        else
            w->distinct += w->seen[number] = 1;
    }
    if (s->read - s->kicked >= SLOTS / 4) {
        s->kicked = s->read;
        vtl_native_session(s->host, SID)->rx.ack_now = 1;
        s->wake = w->now;
    }
}

/* When the session is to be asked again. */
static __u64 wake_of(struct vtl_native_host *h) {
    __u64 at = vtl_native_session(h, SID)->tx.wake_ns;
    return at == ~0ull ? at : at > UPTIME ? at - UPTIME : 0;
}

static void pump(struct world *w, int i) {
    struct side *s = &w->side[i];
    __u8 frame[VTL_NATIVE_FRAME];
    for (int packets = 0; s->wake <= w->now && packets < 4 * SLOTS; packets++) {
        __u32 length = vtl_native_egress(s->host, SID, UPTIME + w->now, frame);
        if (length)
            transmit(w, i, frame, length);
        else
            s->wake = wake_of(s->host);
        if (!length && s->wake <= w->now)
            s->wake = w->now + 1;
    }
}

static int open_session(struct side *side, int i, const struct vtl_graft_info *graft) {
    side->host = vtl_native_new();
    if (!side->host || vtl_native_add(side->host, SID, SLOTS))
        return -1;
    struct vtl_session *s = vtl_native_session(side->host, SID);
    s->token = 100 + i;
    s->peer_token = 101 - i;
    s->peer_sid = SID;
    s->gid = graft->gid;
    for (int p = 0; p < VTL_PARAMS; p++)
        s->param[p] = graft->param[p].initial;
    s->max_payload = s->path = 1400;
    s->ip_version = 4;
    const __u8 head[VTL_HEADROOM] = {2,    0, 0,    0, 0, 2 - i, 2,  0, 0,    0,    0,  1 + i,
                                     0x08, 0, 0x45, 0, 0, 0,     0,  0, 0x40, 0,    64, VTL_IPPROTO,
                                     0,    0, 10,   0, 0, 1 + i, 10, 0, 0,    2 - i};
    memcpy(s->headers, head, sizeof(head));
    s->ifindex = VTL_NATIVE_IFINDEX;
    s->tx.limit = SLOTS;
    s->tx.cwnd = 32;
    s->tx.reorder = VTL_REORDER;
    s->tx.xid = 1;
    s->state = VTL_OPEN;
    side->wake = ~0ull;
    return 0;
}

/* Runs one cell; prints its line. Returns 0 if the graft kept its promise. */
static int simulate(const struct path *path, __u64 seed) {
    const struct vtl_graft_info *graft = vtl_native_grafts[0]->info;
    const __u32 both = VTL_S_RELIABLE | VTL_S_ORDERED;
    struct world *w = calloc(1, sizeof(*w));
    if (!w || open_session(&w->side[0], 0, graft) || open_session(&w->side[1], 1, graft))
        abort();
    w->path = *path;
    w->random = seeded(seed);
    int reliable = graft->services & VTL_S_RELIABLE;
    struct vtl_tx *tx = &vtl_native_session(w->side[0].host, SID)->tx;
    int done = 0;
    while (!done && w->now < PATIENCE) {
        application(w);
        for (int i = 0; i < 2; i++) {
            if (vtl_native_events(w->side[i].host, SID) & VTL_EV_SEND)
                w->side[i].wake = w->now;
            pump(w, i);
        }
        __u64 next = w->events ? w->heap[0].at : ~0ull;
        for (int i = 0; i < 2; i++)
            next = w->side[i].wake < next ? w->side[i].wake : next;
        if (next == ~0ull)
            break;
        w->now = next > w->now ? next : w->now;
        while (w->events && w->heap[0].at <= w->now) {
            struct event e = take(w);
            __u8 answer[VTL_NATIVE_FRAME];
            __u32 n = vtl_native_ingress(w->side[e.to].host, UPTIME + w->now, e.bytes, e.length,
                                         answer, VTL_NATIVE_ANSWER);
            free(e.bytes);
            if (n)
                transmit(w, e.to, answer, n);
        }
        check(w, graft->services);
        done = tx->una == PACKETS && (reliable ? w->side[1].read == PACKETS : !w->events);
    }
    const char *wrong = 0;
    if (w->damaged)
        wrong = "packets arrived damaged, or not in order";
    else if (w->repeated && (graft->services & both))
        wrong = "packets were delivered twice";
    else if (!done)
        wrong = "it stands still: nothing is under way, or nothing gets through";
    else if (reliable && w->distinct != PACKETS)
        wrong = "packets are missing";
    double seconds = w->now / 1e9;
    printf("%4u ms  %2u %% loss  %2u %% reordered  %7.2f Mbit/s  %5llu sent again  %s\n",
           path->rtt_ms, path->loss_pct, path->reorder_pct,
           w->distinct * LENGTH * 8 / 1e6 / (seconds > 0 ? seconds : 1),
           (unsigned long long)tx->retransmitted, wrong ? wrong : "kept its promise");
    while (w->events)
        free(take(w).bytes);
    for (int i = 0; i < 2; i++)
        vtl_native_free(w->side[i].host);
    free(w);
    return wrong ? 1 : 0;
}

int main(int count, char **argument) {
    const __u32 rtts[] = {1, 20, 100, 600}, losses[] = {0, 1, 5}, reorders[] = {0, 5};
    __u64 seed = count > 1 ? strtoull(argument[1], 0, 10) : 1;
    int failed = 0;
    for (int r = 0; r < 4; r++)
        for (int l = 0; l < 3; l++)
            for (int o = 0; o < 2; o++) {
                struct path path = {rtts[r], losses[l], reorders[o]};
                failed += simulate(&path, seed);
            }
    return failed ? 1 : 0;
}
