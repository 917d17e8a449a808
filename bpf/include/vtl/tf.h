/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * The contract of transport functions.
 *
 * A transport function is a static inline C function over one of the contexts below: the session's
 * state, the packet, and the time as an argument. It reads and writes what the context gives it
 * and calls nothing but other inline functions and the vtl_env_* functions, so the same source
 * compiles into XDP, into TC and natively for tests and simulation. The environment (env_bpf.h, or
 * crates/vtl-sim/native) supplies the vtl_env_* functions; graft.h supplies the contexts.
 *
 * Locking: `tx` fields of the listener and `rx` fields are written under the session's busy flags,
 * which graft.h takes; egress runs on vtld's pump thread only.
 */
#ifndef VTL_TF_H
#define VTL_TF_H

#include "intf.h"

#define VTL_INLINE static inline __attribute__((always_inline, unused))

/*
 * In the kernel a function of its own, which the verifier looks at once, whatever its arguments,
 * instead of once on each path that leads to it: for what many paths lead to. A call costs 1 ns.
 * Pointers are to structures of the session or of the stack, and may be null for all it knows;
 * pointers within a structure cannot be passed.
 */
#ifdef __bpf__
#define VTL_GLOBAL __attribute__((noinline))
#else
#define VTL_GLOBAL VTL_INLINE
#endif

/* A store or load that the compiler may neither split nor move across another such access. */
#define VTL_STORE(x, v) (*(volatile __typeof__(x) *)&(x) = (v))
#define VTL_LOAD(x) (*(volatile const __typeof__(x) *)&(x))
/* Orders plain accesses for the compiler; enough on x86, whose stores keep their order. */
#define VTL_BARRIER() asm volatile("" ::: "memory")

/* Runs the body with int i = from .. to - 1. In the kernel an open-coded iterator (Linux 6.4),
 * which the verifier follows without unrolling; a call of 3 ns a turn. */
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
    VTL_NEXT = 0, /* go on with the next transport function */
    VTL_SEND,     /* egress: transmit the packet. ingress: answer with an acknowledgement */
    VTL_STOP,     /* done with this packet; nothing leaves */
};

/* Egress: the packet being made. */
struct vtl_out {
    struct vtl_session *s;
    __u64 now; /* ns */
    __u64 end; /* first packet that the app has not written */
    __u64 seq;
    struct vtl_slot *slot; /* DATA: the payload */
    struct vtl_sent *sent; /* DATA: the scoreboard entry of seq */
    __u32 len;             /* DATA: payload bytes, 1..max_payload */
    __u8 type;             /* enum vtl_type */
    __u8 flags;
    __u8 header_len; /* of hdr in use */
    __u64 sum;       /* of the payload, once it was copied into the packet: see vtl_move */
    union {
        struct vtl_data_hdr data;
        struct vtl_ack_hdr ack;
        __u64 words[VTL_TAGGED_WORDS];
        struct vtl_tagged tagged;
    } hdr;
};

/* Ingress: a DATA or PROBE packet that belongs to the session. */
struct vtl_in {
    struct vtl_session *s;
    __u64 seq;
    struct vtl_data_hdr *hdr; /* a copy: the packet cannot change it */
    struct vtl_slot *slot;    /* where the payload belongs and, unless seen before, now lies */
    __u64 place;              /* the slot's number: seq, unless packets lie in order of arrival */
    __u64 sum;                /* of the payload: see vtl_move */
    __u32 len;                /* payload bytes as the header says, at most VTL_MAX_PAYLOAD */
    __u8 type;
    __u8 duplicate; /* its place is taken: the payload goes nowhere, the checksum still counts */
    __u8 refused;   /* not taken, though it is new: likewise */
    __u8 marked;    /* the path is congested: ECN CE (RFC 3168) */
    __u8 half;      /* of a packet: the payload goes to the scratch slot, until it is verified */
};

/* Listener: an acknowledgement that belongs to the session. */
struct vtl_ackd {
    struct vtl_session *s;
    __u64 now;
    struct vtl_ack_hdr *hdr;
    const __u64 *map; /* the bitmap, little-endian words, VTL_ACK_WORDS + 1 of them readable */
    __u32 words;      /* of it that came */
    /* filled in by transport functions on the way */
    __u64 cum;
    __u64 delivered; /* packets newly known to have arrived */
    __u32 sent;      /* transmissions of which it is known now whether they have arrived, */
    __u32 arrived;   /* and how many of them, and of earlier ones, have: struct vtl_meter */
    __u32 rtt_us;    /* 0 = no sample */
    __u32 waited_us; /* of that, behind the peer's own data; 0 = none, or not known */
    __u64 rate;      /* delivery rate sample, packets per 1,024 s; 0 = none */
    __u32 app_limited;
    __u64 in_flight; /* after this acknowledgement */
};

/* Supplied by the environment. Pointers are NULL if the ring does not exist. */
VTL_INLINE struct vtl_slot *vtl_env_tx_slot(struct vtl_session *s, __u64 seq);
VTL_INLINE struct vtl_slot *vtl_env_rx_slot(struct vtl_session *s, __u64 seq);
VTL_INLINE struct vtl_ring_ctl *vtl_env_tx_ctl(struct vtl_session *s);
VTL_INLINE struct vtl_ring_ctl *vtl_env_rx_ctl(struct vtl_session *s);
VTL_INLINE struct vtl_sent *vtl_env_sent(struct vtl_session *s, __u64 seq);
/* Tells vtld about an event (enum vtl_what). */
VTL_INLINE void vtl_env_notify(struct vtl_session *s, __u32 what);
VTL_INLINE void vtl_env_count(__u32 stat);
VTL_INLINE __u32 vtl_env_sid(struct vtl_session *s);
/* Nanoseconds since the system's start. */
VTL_INLINE __u64 vtl_env_now(void);

/* Supplied by the composition: graft.h lists all of these. */
VTL_INLINE enum vtl_verdict vtl_fetch(struct vtl_out *o); /* by engine.h, for compositions */
VTL_INLINE void vtl_number_header(struct vtl_out *o);     /* likewise */
VTL_INLINE void graft_tell(struct vtl_session *s, struct vtl_ack_hdr *a);

/*
 * The state that a graft's transport functions keep between packets: `struct s` over vtl_tx.own or
 * vtl_rx.own of a session. A transport function takes its part as an argument, so that any can be
 * composed with any other.
 */
#define VTL_OWN(s, half, type)                                                                     \
    ({                                                                                             \
        _Static_assert(sizeof(type) <= sizeof((s)->half.own), "more state than there is room");    \
        (type *)(s)->half.own;                                                                     \
    })

/*
 * Describes the graft (struct vtl_graft_info): name, gid, services, rank, a sentence, and for each
 * parameter a VTL_PARAM. The value of the n-th one is s->param[n], between `least` and `most`. What
 * keeps everything in order also says that it knows halves (halves.h), unless it is built without.
 *
 *   VTL_GRAFT("name", 40, VTL_S_RELIABLE, 10, "What it is for.",
 *             VTL_PARAM("window", "packets", 16, 1, 1024));
 */
#define VTL_PARAM(name_, unit_, initial_, least_, most_)                                           \
    {.name = name_, .unit = unit_, .initial = initial_, .least = least_, .most = most_}
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
 * Stands first in a transport function, with its name and the services that it contributes to:
 * leaves both in the section .vtl.tf of each object whose programs call the function, and no
 * instruction. So a package can be asked what it consists of, and whether what it promises is
 * there.
 */
#define VTL_TF(name_, services_)                                                                   \
    static const struct vtl_tf_info vtl_tf_##name_                                                 \
        __attribute__((section(".vtl.tf"), used, nodebug)) = {.name = #name_,                      \
                                                              .services = services_}

/* Too large for the stack: an acknowledgement's bitmap, and the payload of a duplicate or of half a
 * packet. One for each CPU, also from the environment. */
struct vtl_scratch {
    struct vtl_slot slot;
    __u64 map[VTL_ACK_WORDS + 1];
    __u32 shard; /* whose live frame this is: from the root program to the graft's egress */
};
VTL_INLINE struct vtl_scratch *vtl_get_scratch(void);

/* Transmissions that have overtaken one that is lost, at least. */
VTL_INLINE __s32 vtl_overtakers(const struct vtl_tx *tx) {
    return tx->reorder > tx->late ? tx->reorder : tx->late + 1;
}

/* Packets per acknowledgement: a sixteenth of the window or less, so that an acknowledgement's loss
 * or delay matters little, and at most 16. */
VTL_INLINE __u32 vtl_ack_every(__u64 cwnd) {
    return cwnd >= 256 ? 16 : cwnd >= 128 ? 8 : cwnd >= 64 ? 4 : cwnd >= 16 ? 2 : 1;
}

/* Packets in flight: sent, and neither delivered nor given up. */
VTL_INLINE __u64 vtl_in_flight(const struct vtl_session *s) {
    __u64 out = s->tx.delivered + s->tx.lost_total + s->tx.abandoned;
    return s->tx.sent > out ? s->tx.sent - out : 0;
}

/* 1 if x <= y, else 0; both below 2^63. Not a comparison, and hidden from the compiler, which would
 * branch on it: in a loop each branch doubles the paths that the verifier follows. */
VTL_INLINE __u64 vtl_up_to(__u64 x, __u64 y) {
    __u64 above = (y - x) >> 63;
    asm volatile("" : "+r"(above));
    return above ^ 1;
}

/* Number of set bits. */
VTL_INLINE __u32 vtl_bits(__u64 x) {
    x -= (x >> 1) & 0x5555555555555555ull;
    x = (x & 0x3333333333333333ull) + ((x >> 2) & 0x3333333333333333ull);
    x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0full;
    return (x * 0x0101010101010101ull) >> 56;
}

/* Index of the lowest set bit, 64 if there is none. Without branches, of which the verifier would
 * follow each. */
VTL_INLINE __u32 vtl_lowest_bit(__u64 x) {
    return vtl_bits((x & -x) - 1);
}

/* Copies a constant number of bytes in the largest words there are. A memcpy between pointers of
 * unknown alignment goes byte by byte in eBPF, and reading words from bytes just stored stalls. */
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
