/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * The contract of transport functions.
 *
 * A transport function is a static inline C function over one of the contexts below: the session's
 * state, the packet, and the time as an argument. It accesses only its context and calls only other
 * inline and VTL_GLOBAL functions and vtl_env_*, so the same source compiles into XDP, into TC and
 * natively for tests and simulation. The environment (env_bpf.h, or crates/vtl-sim/native) supplies
 * the vtl_env_* functions; graft.h and engine.h supply the contexts.
 *
 * Locking: ingress, which writes `rx`, runs under rx.lock (graft.h), the listener, which writes its
 * `tx` fields, under tx.lock (vtl_listen in engine.h); egress under tx.egress_lock, in a call of
 * the pump or in the sender's own (direct egress).
 */
#ifndef VTL_TF_H
#define VTL_TF_H

#include "intf.h"

#define VTL_INLINE static inline __attribute__((always_inline, unused))

/*
 * A global function in the kernel: verified once for any arguments, instead of once on each path
 * that calls it. For functions that many paths call; a call costs 1 ns. Pointers are to structures
 * of the session or of the stack, and may be null for the verifier; pointers into a structure
 * cannot be passed.
 */
#ifdef __bpf__
#define VTL_GLOBAL __attribute__((noinline))
#else
#define VTL_GLOBAL VTL_INLINE
#endif

/*
 * Returns `x`, whose origin the compiler then does not know, so that it compares and uses this
 * value itself, and not another one that comes to the same. For the verifier: those of Linux 6.8
 * and 6.12 do not derive bounds of `x` from a comparison of `x - 1`, and 6.8's not what a pointer
 * is from a flag set with it.
 */
#define vtl_hidden(x)                                                                              \
    ({                                                                                             \
        __typeof__(x) vtl_hidden_ = (x);                                                           \
        asm volatile("" : "+r"(vtl_hidden_));                                                      \
        vtl_hidden_;                                                                               \
    })

/*
 * Returns `x`, of which the verifier then knows nothing. Where it knows a value, and a later branch
 * depends on it, it follows the paths with each value apart: a condition that is tested twice would
 * double the paths between.
 */
VTL_GLOBAL __u64 vtl_unknown(__u64 x) {
    asm volatile("" : "+r"(x));
    return x;
}

/* Single access that the compiler neither splits nor reorders with another one of these. */
#define VTL_STORE(x, v) (*(volatile __typeof__(x) *)&(x) = (v))
#define VTL_LOAD(x) (*(volatile const __typeof__(x) *)&(x))
/* Compiler barrier: enough on x86-64, whose stores keep their order, and for which alone vtl-bpf
 * builds. */
#define VTL_BARRIER() asm volatile("" ::: "memory")

/* Loop with int i = from .. to - 1. In the kernel an open-coded iterator (Linux 6.4), which the
 * verifier does not unroll; 3 ns per iteration. */
#ifdef __bpf__
#include <bpf/bpf_helpers.h>
#define vtl_for(i, from, to) bpf_for(i, (int)(from), (int)(to))
#else
#define vtl_for(i, from, to) for ((i) = (from); (i) < (int)(to); (i)++)
#endif

#define VTL_NEVER (~0ull)
#define VTL_NS_PER_US 1000ull
#define VTL_NS_PER_MS 1000000ull
#define VTL_NS_PER_S 1000000000ull

enum vtl_verdict {
    VTL_NEXT = 0, /* continue with the next transport function */
    VTL_SEND,     /* egress: transmit the packet. ingress: answer with an acknowledgement */
    VTL_STOP,     /* done with this packet; nothing is sent */
};

/* Context of egress: the packet being made. */
struct vtl_out {
    struct vtl_session *s;
    __u64 now; /* ns */
    __u64 end; /* first packet not written by the app */
    __u64 seq;
    struct vtl_slot *slot; /* DATA: the payload */
    struct vtl_sent *sent; /* DATA: the scoreboard entry of seq */
    __u32 len;             /* DATA: payload bytes, 1..max_payload */
    __u8 type;             /* enum vtl_type */
    __u8 flags;
    __u8 header_len; /* bytes of hdr in use */
    __u64 sum;       /* sum of the payload, once copied into the packet: see vtl_move */
    union {
        struct vtl_data_hdr data;
        struct vtl_ack_hdr ack;
        __u64 words[VTL_TAGGED_WORDS];
        struct vtl_tagged tagged;
    } hdr;
};

/* Part of vtl_join: the verifier knows nothing of what the structure holds afterwards. */
VTL_GLOBAL int vtl_forget_packet(struct vtl_out *o, int v) {
    asm volatile("" : "+r"(v) : "r"(o) : "memory");
    return v;
}

/* Returns `v`. To be called where paths that made different packets join: as vtl_unknown, for all
 * of the packet. */
VTL_INLINE int vtl_join(struct vtl_out *o, int v) {
    struct vtl_session *s = o->s;
    struct vtl_slot *slot = o->slot;
    struct vtl_sent *sent = o->sent;
    v = vtl_forget_packet(o, v);
    o->s = s;
    o->slot = slot;
    o->sent = sent;
    return v;
}

/* Context of ingress: a DATA or PROBE packet of the session. */
struct vtl_in {
    struct vtl_session *s;
    __u64 seq;
    struct vtl_data_hdr *hdr; /* a copy, which the packet cannot change */
    struct vtl_slot *slot; /* destination of the payload; the scratch slot for duplicates, refused
                            * packets and halves; NULL for a PROBE */
    __u64 place;           /* number of the slot: seq, unless the ring is in order of arrival */
    __u64 sum;             /* sum of the payload: see vtl_move */
    __u32 len;             /* payload bytes according to the header, at most VTL_MAX_PAYLOAD */
    __u8 type;
    __u8 duplicate; /* received before: the payload is discarded, the checksum still verified */
    __u8 refused;   /* not accepted, though new: likewise */
    __u8 marked;    /* congestion experienced: ECN CE (RFC 3168) */
    __u8 half;      /* half of a packet: payload in the scratch slot until verified */
};

/* Context of the listener: an acknowledgement for the session. */
struct vtl_ackd {
    struct vtl_session *s;
    __u64 now;
    struct vtl_ack_hdr *hdr;
    const __u64 *map; /* bitmap in little-endian words, VTL_ACK_WORDS + 1 of them readable */
    __u32 words;      /* received words of the bitmap */
    /* set by transport functions */
    __u64 cum;
    __u64 delivered; /* packets newly delivered */
    __u32 sent;      /* transmissions whose fate is newly known, */
    __u32 arrived;   /* arrivals among them and earlier ones: struct vtl_meter */
    __u32 rtt_us;    /* 0 = no sample */
    __u32 waited_us; /* part of it spent behind the peer's own data; 0 = none or unknown */
    __u64 rate;      /* delivery rate sample, packets per 1,024 s; 0 = none */
    __u32 app_limited;
    __u64 in_flight; /* after this acknowledgement */
};

/* Supplied by the environment. NULL without a ring. */
VTL_INLINE struct vtl_slot *vtl_env_tx_slot(struct vtl_session *s, __u64 seq);
VTL_INLINE struct vtl_slot *vtl_env_rx_slot(struct vtl_session *s, __u64 seq);
VTL_INLINE struct vtl_ring_ctl *vtl_env_tx_ctl(struct vtl_session *s);
VTL_INLINE struct vtl_ring_ctl *vtl_env_rx_ctl(struct vtl_session *s);
VTL_INLINE struct vtl_sent *vtl_env_sent(struct vtl_session *s, __u64 seq);
/* Notifies of events, a bit set of enum vtl_what: the session's user or vtld. */
VTL_INLINE void vtl_env_notify(struct vtl_session *s, __u32 what);
/* Increments a counter (enum vtl_stat). */
VTL_INLINE void vtl_env_count(__u32 stat);
VTL_INLINE __u32 vtl_env_sid(struct vtl_session *s);
/* CLOCK_MONOTONIC, ns. */
VTL_INLINE __u64 vtl_env_now(void);

/* Supplied by engine.h. */
VTL_INLINE enum vtl_verdict vtl_fetch(struct vtl_out *o);
VTL_INLINE void vtl_number_header(struct vtl_out *o);
/* Supplied by the composition (complete list: graft.h). */
VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *a);

/*
 * State that a graft's transport functions keep between packets: vtl_tx.own or vtl_rx.own of a
 * session as `type`. A transport function takes its part as an argument, so that it composes with
 * any other.
 */
#define VTL_OWN(s, half, type)                                                                     \
    ({                                                                                             \
        _Static_assert(sizeof(type) <= sizeof((s)->half.own), "more state than there is room");    \
        (type *)(s)->half.own;                                                                     \
    })

/*
 * Describes the graft (struct vtl_graft_info): name, gid, services, rank, summary, and a VTL_PARAM
 * for each parameter. The value of the n-th one is s->param[n], between `min` and `max`.
 * Reliable ordered grafts also announce halves (halves.h), unless built without.
 *
 *   VTL_GRAFT("name", 40, VTL_S_RELIABLE, 10, "What it is for.",
 *             VTL_PARAM("window", "packets", 16, 1, 1024));
 */
#define VTL_PARAM(name_, unit_, initial_, min_, max_)                                              \
    {.name = name_, .unit = unit_, .initial = initial_, .min = min_, .max = max_}
#define VTL_GRAFT(name_, gid_, services_, rank_, summary_, ...)                                    \
    const struct vtl_graft_info vtl_description __attribute__((section(".vtl.graft"), used)) = {   \
        .name = name_,                                                                             \
        .gid = gid_,                                                                               \
        .services = services_,                                                                     \
        .version = VTL_GRAFT_ABI,                                                                  \
        .rank = rank_,                                                                             \
        .summary = summary_,                                                                       \
        .flags =                                                                                   \
            VTL_HALVES && !(~(services_) & (VTL_S_RELIABLE | VTL_S_ORDERED)) ? VTL_G_HALVES : 0,   \
        .params = sizeof((struct vtl_param_info[]){__VA_ARGS__}) / sizeof(struct vtl_param_info),  \
        .param = {__VA_ARGS__}}

/*
 * First statement of a transport function: its name and the services that it contributes to.
 * Records both in the section .vtl.tf of each object that calls the function, without an
 * instruction, so that a package can be asked for its parts and checked against its promises.
 */
#define VTL_TF(name_, services_)                                                                   \
    static const struct vtl_tf_info vtl_tf_##name_                                                 \
        __attribute__((section(".vtl.tf"), used, nodebug)) = {.name = #name_,                      \
                                                              .services = services_}

/* Buffers too large for the stack: an acknowledgement's bitmap, and the payload of duplicates and
 * halves. Per CPU; from the environment. */
struct vtl_scratch {
    struct vtl_slot slot;
    __u64 map[VTL_ACK_WORDS + 1];
    __u32 shard; /* shard of this live frame: from the root program to the graft's egress */
};
VTL_INLINE struct vtl_scratch *vtl_get_scratch(void);

/* Reordering threshold: transmissions that must overtake one before it is declared lost. */
VTL_INLINE __s32 vtl_reordering_threshold(const struct vtl_tx *tx) {
    return tx->reorder > tx->reordering_extent ? tx->reorder : tx->reordering_extent + 1;
}

/* Packets per acknowledgement: at most 1/16 of the window, so that losing or delaying one matters
 * little, and at most 16. */
VTL_INLINE __u32 vtl_ack_every(__u64 cwnd) {
    return cwnd >= 256 ? 16 : cwnd >= 128 ? 8 : cwnd >= 64 ? 4 : cwnd >= 16 ? 2 : 1;
}

/* Packets in flight: sent, neither delivered nor given up. */
VTL_INLINE __u64 vtl_in_flight(const struct vtl_session *s) {
    __u64 out = s->tx.delivered + s->tx.lost_total + s->tx.abandoned;
    return s->tx.sent > out ? s->tx.sent - out : 0;
}

/* 1 if x <= y, else 0; both below 2^63. Branchless, and hidden from the compiler: each branch in a
 * loop doubles the paths that the verifier follows. */
VTL_INLINE __u64 vtl_up_to(__u64 x, __u64 y) {
    return vtl_hidden((y - x) >> 63) ^ 1;
}

/* Number of set bits. */
VTL_INLINE __u32 vtl_popcount(__u64 x) {
    x -= (x >> 1) & 0x5555555555555555ull;
    x = (x & 0x3333333333333333ull) + ((x >> 2) & 0x3333333333333333ull);
    x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full;
    return (x * 0x0101010101010101ull) >> 56;
}

/* Index of the lowest set bit, 64 if none. Branchless, for the verifier. */
VTL_INLINE __u32 vtl_lowest_bit(__u64 x) {
    return vtl_popcount((x & -x) - 1);
}

/* Copies a constant number of bytes, in the largest words possible. In eBPF a memcpy between
 * pointers of unknown alignment goes byte by byte, and reading words just stored as bytes
 * stalls. */
VTL_INLINE void vtl_copy(void *to, const void *from, const __u32 bytes) {
#ifdef __bpf__
    __u32 i = 0;
    for (; i + 8 <= bytes; i += 8)
        *(__u64 *)(to + i) = *(const __u64 *)(from + i);
    for (; i + 2 <= bytes; i += 2)
        *(__u16 *)(to + i) = *(const __u16 *)(from + i);
#else
    __builtin_memcpy(to, from, bytes);
#endif
}

#define vtl_swap16 __builtin_bswap16
#define vtl_swap32 __builtin_bswap32
#define vtl_swap64 __builtin_bswap64

#endif
