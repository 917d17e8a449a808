/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Interface between the Hooker's programs (bpf/hooker.bpf.c, rules.bpf.c, carrier.bpf.c) and vtld.
 * Addresses are 16 bytes in network order, IPv4 mapped into IPv6 (RFC 4291, 2.5.5.2); ports are in
 * network order.
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

/* Timeout of vtld's heartbeat. */
#define VTL_BEAT_NS 1000000000ull

/* Configuration, set by vtld before load. */
struct vtl_hook_config {
    __u64 netns_cookie;  /* the daemon's network namespace: sockets in others are ignored */
    __u32 mark;          /* SO_MARK of packets that vtld injects on lo; random, not 0 */
    __u16 capture_port4; /* host order; 0 = no capture of this family */
    __u16 capture_port6;
    __u64 sees_exe; /* 1: this kernel shows programs the file that a task executes */
    __u64 near_ns;  /* how long a host stays near without another connection to it */
    __u64 far_us;   /* maximum round-trip time of a near host, microseconds */
    __u64 ticks;    /* per second: the unit of TCP's timeouts; 0: unknown, the kernel's timeouts */
};

enum {
    VTL_CC_NAME_MAX = 16,          /* name of a TCP congestion control, with its final 0 */
    VTL_POLICY_PLAIN = 0xffffffff, /* vtl_captured.policy: no capture */
    VTL_POLICY_REQUIRE = 1 << 30, /* flag in others: never TCP, so the connect fails without vtld */
    VTL_POLICY_NEAR = 1 << 29,    /* flag in others: connects to near hosts bypass vtld */
};

/* Decision graph of bpf/rules.bpf.c: a table of steps with forward edges only. vtld replaces it as
 * a whole for each set of rules. */
enum {
    VTL_RULES_MAX = 1024, /* rules per table, and entries of the map `vtl_matched` */
    VTL_STEPS_MAX = 8192, /* steps per table */
};

enum vtl_step_kind {
    VTL_STEP_END = 0,   /* no rule matches */
    VTL_STEP_ACT = 1,   /* a rule matches: `arg` is the policy, VTL_POLICY_PLAIN = no capture, `hit`
                         * its entry of vtl_matched, `value` the name of a congestion control,
                         * empty = the system's */
    VTL_STEP_LOCAL = 2, /* the destination is this host, link-local or multicast */
    VTL_STEP_USER = 3,  /* the process runs as user `arg` */
    VTL_STEP_PORT = 4, /* destination port, in host order, between the first and the second __u32 of
                        * `value`, inclusive */
    VTL_STEP_PREFIX = 5, /* destination in the prefix `value` of `arg` & 255 bits, an address in
                          * network order, IPv4 mapped into IPv6 */
    VTL_STEP_EXE = 6,    /* the process executes the file with inode number `value` (first __u64) on
                          * device `arg` */
    VTL_STEP_GROUP = 7,  /* the process is in or below the cgroup with id `value` (first __u64),
                          * `arg` levels below the root */
};

enum { VTL_PREFIX_6 = 1 << 8 }; /* in `arg` of VTL_STEP_PREFIX: IPv6 only */

struct vtl_step {
    __u32 kind;
    __u32 arg;
    __u32 hit;      /* next step if true: always a later one */
    __u32 miss;     /* next step if false, likewise */
    __u8 value[16]; /* aligned to 8 bytes */
};

/* Request to vtl_identify and its answer: identity of a file and of a cgroup. */
struct vtl_identity {
    __u64 group; /* vtld: id of a cgroup, an ancestor of its own or its own */
    __u64 id;    /* the file's inode number */
    __u64 own;   /* inode number of vtld's own executable */
    __u32 fd;    /* vtld: descriptor of the file */
    __u32 dev;   /* the file's device, in the kernel's form */
    __u32 level; /* depth of `group` below the root; VTL_LEVELS = not found */
    __u32 pad;
};

/* Maximum depth of cgroups that rules can match. */
enum { VTL_LEVELS = 64 };

/* Configuration of a hook with a carrier (bpf/carrier.bpf.c), set by vtld before load. */
struct vtl_carrier_config {
    __u64 netns_cookie; /* as in struct vtl_hook_config */
    __u32 policy;       /* policy for connects of this hook; not 0 */
    __u16 port;         /* host order: of accepted connections; 0 = those opened under the hook */
    __u16 marks;        /* 1: the congestion control requires ECN */
    char control[VTL_CC_NAME_MAX]; /* congestion control; empty = the system's */
};

/* One end of a connection. */
struct vtl_endpoint {
    __u8 addr[16];
    __be16 port;
    __u16 pad; /* 0: the struct is a map key */
};

/* Both ends of a connection. A map key as well. */
struct vtl_four_tuple {
    struct vtl_endpoint from; /* the opener */
    struct vtl_endpoint to;
};

/* A captured socket, in its socket storage. Written at connect; getsockname fills in `local`. */
struct vtl_captured {
    struct vtl_endpoint dest;  /* destination of the application's connect */
    struct vtl_endpoint local; /* address that getsockname returns; all zero = not known yet */
    __u32 policy;              /* vtld's number for the carrier that the hook or rule names, with
                                * flags VTL_POLICY_*; 0 = none */
    __u32 has_port;            /* 1: the application has bound a port, and sees that one */
};

enum { VTL_EXE_NAME_MAX = 32 };

/* The file that a process executes: what connections of one program have in common. */
struct vtl_exe {
    __u64 inode; /* 0 = unknown */
    __u32 dev;   /* its device, in the kernel's form */
    __u32 pad;
    char name[VTL_EXE_NAME_MAX]; /* its last component, with a final 0; cut if longer */
};

/* A SYN held on lo: entry of the ring buffer `vtl_syns`. */
struct vtl_syn {
    __u64 cookie;             /* the application's socket */
    struct vtl_exe exe;       /* the application */
    struct vtl_endpoint dest; /* its destination; port 0 = this socket was never captured */
    __u32 mark;               /* SO_MARK of the application's socket */
    __u32 len;                /* bytes in use of `packet` */
    __u32 policy;             /* as in struct vtl_captured */
    __u8 packet[VTL_SYN_MAX]; /* IP and TCP header; the TCP checksum is not complete (offload) */
};

/* Packets affected, of all packets. */
struct vtl_ratio {
    __u64 hit;
    __u64 all;
};

/* State of a host whose path was measured as near and clean, so that VTL gains nothing: value of
 * the map `vtl_near`, keyed by address. vtld creates it, vtl_watch_near counts. */
struct vtl_near {
    __u64 until;   /* CLOCK_MONOTONIC, ns: until then connects without a carrier bypass vtld */
    __u64 spoiled; /* CLOCK_MONOTONIC, ns: when it ceased to be near and clean; 0 = it has not */
    __u64 slow;    /* consecutive connections with round trips longer than `far_us` */
    /* Sums over closed connections. Each loss makes many later packets out of order. */
    struct vtl_ratio retransmitted;
    struct vtl_ratio reordered; /* out of order */
};

/* Limits of a near and clean host. It is spoiled once more than one packet in
 * VTL_NEAR_RETRANSMITTED (VTL_NEAR_REORDERED), and at least _MIN of them, were retransmitted (out
 * of order), or after VTL_NEAR_SLOW slow connections in a row. A connection adds a quarter of _MIN
 * at most, since each one loses many in slow start; an open connection is judged alone after
 * VTL_NEAR_LONG packets. */
enum {
    VTL_NEAR_RETRANSMITTED = 100,
    VTL_NEAR_RETRANSMITTED_MIN = 64,
    VTL_NEAR_REORDERED = 20,
    VTL_NEAR_REORDERED_MIN = 256,
    VTL_NEAR_LONG = 50000,
    VTL_NEAR_SLOW = 4,
};

/* For how long, and eight round trips, a connection's segments repeat the option though no data is
 * acknowledged: about what five retransmissions take, the first after 200 ms and each after twice
 * as long. */
enum { VTL_OPTION_MS = 5000 };

/* How much longer than its round trip a connection waits before it retransmits, ms: between two
 * daemons one and a quarter round trips and _SLACK_, at least _MIN_; at most, and to any other
 * host, the kernel's own (TCP_RTO_MIN). The peer delays acknowledgements by 40 ms, or a round trip
 * if that is longer. */
enum { VTL_RTO_MIN_MS = 60, VTL_RTO_SLACK_MS = 20, VTL_RTO_KERNEL_MS = 200 };

enum vtl_own_socket_flag {
    VTL_SOCK_OFFER = 1 << 0,   /* send the option: in SYN (active) or SYN/ACK (passive) */
    VTL_SOCK_PEER = 1 << 1,    /* the peer has sent the option */
    VTL_SOCK_LISTEN = 1 << 2,  /* the steering listener */
    VTL_SOCK_FLOW = 1 << 3,    /* the option names a flow */
    VTL_SOCK_GAVE_UP = 1 << 4, /* the option is no longer repeated: the peer may not have seen it */
};

/* Flow of a connection, as named in the option. */
struct vtl_flow_name {
    __be32 tag;    /* of the association, chosen by its opener */
    __be32 number; /* of the flow; 0 = the association's control connection */
};

/* Values of the map `vtl_own`: vtld's sockets by cookie. vtld writes before connect() or listen();
 * the sock_ops program adds VTL_SOCK_PEER and VTL_SOCK_GAVE_UP, writes entries of accepted
 * connections, and removes closed ones. */
struct vtl_own_socket {
    __u32 flags; /* enum vtl_own_socket_flag */
    struct vtl_flow_name flow;
    __u32 unheard_since; /* no data acknowledged since, ms, monotonic; 0: not looked at */
};

/* Indexes of the SOCKMAP `vtl_steer`: the steering listeners. */
enum vtl_steer_slot { VTL_STEER_4 = 0, VTL_STEER_6 = 1, VTL_STEER_SLOTS = 2 };

#endif
