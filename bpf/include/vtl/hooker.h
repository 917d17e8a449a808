/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * What the Hooker's programs (bpf/hooker.bpf.c) and vtld share. Addresses are 16 bytes in network
 * order, IPv4 mapped into IPv6 (RFC 4291, 2.5.5.2); ports are in network order.
 */
#ifndef VTL_HOOKER_H
#define VTL_HOOKER_H

#include "linux.h"

enum {
    VTL_OPT_KIND = 253,    /* experimental TCP option, RFC 6994 */
    VTL_OPT_EXID = 0x5654, /* "VT" */
    VTL_OPT_LEN = 12,      /* kind, length, experiment identifier; the flow's tag and number */
    VTL_SYN_MAX = 128,     /* an IP and a TCP header with every option: at most 120 bytes */
};

/* How long the heartbeat of vtld counts. */
#define VTL_BEAT_NS 1000000000ull

/* Set by vtld before the programs are loaded. */
struct vtl_hook_config {
    __u64 netns_cookie;  /* the daemon's network namespace: sockets of others are left alone */
    __u32 mark;          /* SO_MARK of packets that vtld injects on lo; random, not 0 */
    __u16 capture_port4; /* host order; 0 = this family is not captured */
    __u16 capture_port6;
    __u64 sees_exe; /* rules only; 1: this kernel shows programs which file a task executes */
    __u64 near_ns;  /* how long a host counts as near without another connection to it */
    __u64 far_us;   /* a host with longer round trips than this, in microseconds, is not near */
};

enum {
    VTL_CC_NAME_MAX = 16,        /* the name of a TCP congestion control, 0 at its end included */
    VTL_WISH_PLAIN = 0xffffffff, /* vtl_captured.wish: not to be captured */
    VTL_WISH_REQUIRE = 1 << 30,  /* in others: never TCP, so what vtld does not get fails */
};

/* What bpf/rules.bpf.c decides by: a table of steps, in which every way leads forward. vtld makes a
 * new one for each set of rules and puts it in the place of the former. */
enum {
    VTL_RULES_MAX = 1024, /* rules of one table, and places of the map `vtl_matched` */
    VTL_STEPS_MAX = 8192, /* steps of one table */
};

enum vtl_step_kind {
    VTL_STEP_END = 0,    /* no rule matches */
    VTL_STEP_ACT = 1,    /* a rule matches: `arg` is the wish, VTL_WISH_PLAIN = not to be captured,
                          * `hit` its place in vtl_matched, `value` the name of a congestion
                          * control, empty = the system's */
    VTL_STEP_LOCAL = 2,  /* the destination is this host, link-local or multicast */
    VTL_STEP_USER = 3,   /* the process runs as user `arg` */
    VTL_STEP_PORT = 4,   /* the destination's port, in host order, is not below the first __u32 of
                          * `value`, nor above the second */
    VTL_STEP_PREFIX = 5, /* the first `arg` & 255 bits of the destination are those of `value`, an
                          * address in network order, IPv4 mapped into IPv6 */
    VTL_STEP_EXE = 6,    /* the process executes a file on the device `arg` whose number is the
                          * first __u64 of `value` */
    VTL_STEP_GROUP = 7,  /* the process is in or below a cgroup, which is `arg` levels below the
                          * topmost, and whose number is the first __u64 of `value` */
};

enum { VTL_PREFIX_6 = 1 << 8 }; /* in `arg` of VTL_STEP_PREFIX: and it is not IPv4 */

struct vtl_step {
    __u32 kind;
    __u32 arg;
    __u32 hit;      /* the step to go to if this one is true: greater than its own */
    __u32 miss;     /* and if not */
    __u8 value[16]; /* aligned to 8 bytes */
};

/* What vtl_identify says of a file and a cgroup; both sides write. */
struct vtl_identity {
    __u64 group; /* vtld: a cgroup that its own is in or below */
    __u64 id;    /* the file's inode number */
    __u64 own;   /* that of the file that vtld executes */
    __u32 fd;    /* vtld: its descriptor of a file */
    __u32 dev;   /* the file's device, in the kernel's form */
    __u32 level; /* how far below the topmost `group` is; VTL_LEVELS = it is not there */
    __u32 pad;
};

/* Cgroups deeper than this cannot be matched. */
enum { VTL_LEVELS = 64 };

/* Set by vtld before the programs of one hook with a carrier (bpf/carrier.bpf.c) are loaded. */
struct vtl_carrier_config {
    __u64 netns_cookie;            /* as in struct vtl_hook_config */
    __u32 wish;                    /* what connects of this hook are marked with; not 0 */
    __u16 port;                    /* host order: connections that it accepts; 0 = those that the
                                    * hook's programs open */
    __u16 marks;                   /* 1: the congestion control needs ECN */
    char control[VTL_CC_NAME_MAX]; /* the congestion control; empty = the system's */
};

/* One end of a connection. */
struct vtl_endpoint {
    __u8 addr[16];
    __be16 port;
    __u16 pad; /* 0: the struct is a map key */
};

/* Both ends of a connection. A map key as well. */
struct vtl_ends {
    struct vtl_endpoint from; /* of who has opened it */
    struct vtl_endpoint to;
};

/* A captured socket, in its socket storage. connect writes, getsockname fills in `local`. */
struct vtl_captured {
    struct vtl_endpoint dest;  /* what the application asked for */
    struct vtl_endpoint local; /* what getsockname shows; all zero = not known yet */
    __u32 wish;                /* which carrier its hook names: vtld's number for it, 0 = none */
    __u32 has_port;            /* 1: the application has bound it to a port, and sees that one */
};

/* One SYN held on lo: ring buffer `vtl_syns`. */
struct vtl_syn {
    __u64 cookie;             /* the application's socket */
    struct vtl_endpoint dest; /* where it wants to go; port 0 = this socket was never captured */
    __u32 mark;               /* SO_MARK of the application's socket */
    __u32 len;                /* bytes used of `packet` */
    __u32 wish;               /* as in struct vtl_captured */
    __u8 packet[VTL_SYN_MAX]; /* IP and TCP header; the TCP checksum is not filled in */
};

/* Packets, and how many of them something befell. */
struct vtl_share {
    __u64 hit;
    __u64 all;
};

/* What is known of a host whose path was measured as near and clean, where VTL gains nothing: a
 * value of the map `vtl_near`, by its address. vtld writes a new one, vtl_watch_near counts. */
struct vtl_near {
    __u64 until;   /* CLOCK_MONOTONIC, ns: connects that name no carrier go past vtld until then */
    __u64 spoiled; /* the same: since when it is not near and clean any more; 0 = it is */
    __u64 slow;    /* connections in a row that had longer round trips than `far_us` */
    /* Of connections that have ended since. Each loss makes many that were sent later late. */
    struct vtl_share again; /* sent again */
    struct vtl_share late;  /* out of order */
};

/* When a host is not near and clean any more: one of so many packets was hit, and at least so many
 * were; a connection adds a quarter of the latter at most, since each loses many where it begins
 * faster than the path is. A connection that goes on tells enough alone after so many packets. Or
 * so many in a row were slow. */
enum {
    VTL_NEAR_AGAIN = 100,
    VTL_NEAR_AGAIN_LEAST = 64,
    VTL_NEAR_LATE = 20,
    VTL_NEAR_LATE_LEAST = 256,
    VTL_NEAR_LONG = 50000,
    VTL_NEAR_SLOW = 4,
};

enum vtl_own {
    VTL_OWN_OFFER = 1 << 0,   /* offer (active) or answer (passive) the option */
    VTL_OWN_PEER = 1 << 1,    /* the peer showed that it understands the option */
    VTL_OWN_LISTEN = 1 << 2,  /* the steering listener */
    VTL_OWN_FLOW = 1 << 3,    /* the option names a flow */
    VTL_OWN_GAVE_UP = 1 << 4, /* the option is repeated no more: the peer may not have seen it */
};

/* The flow that a connection belongs to, as the option has it. */
struct vtl_flow_name {
    __be32 tag;    /* of the association: its opener chooses it */
    __be32 number; /* of the flow; 0 = the association's control connection */
};

/* Values of the map `vtl_own`: sockets of vtld by cookie. vtld writes before connect() or
 * listen(), the sock_ops program adds VTL_OWN_PEER and VTL_OWN_GAVE_UP, writes those of accepted
 * connections, and removes those that are closed. */
struct vtl_owned {
    __u32 flags; /* enum vtl_own */
    struct vtl_flow_name flow;
    __u32 sent_again; /* segments that had been sent again when the SYN/ACK came */
};

/* Indexes of the SOCKMAP `vtl_steer`: the steering listeners. */
enum vtl_steer_slot { VTL_STEER_4 = 0, VTL_STEER_6 = 1, VTL_STEER_SLOTS = 2 };

#endif
