/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * What the Hooker's programs (bpf/hooker.bpf.c) and vtld share. Addresses are 16 bytes in network
 * order, IPv4 mapped into IPv6 (RFC 4291, 2.5.5.2); ports are in network order.
 */
#ifndef VTL_HOOKER_H
#define VTL_HOOKER_H

#include <linux/types.h>

enum {
    VTL_OPT_KIND = 253,    /* experimental TCP option, RFC 6994 */
    VTL_OPT_EXID = 0x5654, /* "VT" */
    VTL_OPT_LEN = 4,       /* kind, length, experiment identifier */
    VTL_SYN_MAX = 128,     /* an IP and a TCP header with every option: at most 120 bytes */
};

/* Set by vtld before the programs are loaded. */
struct vtl_hook_config {
    __u64 netns_cookie;  /* the daemon's network namespace: sockets of others are left alone */
    __u32 mark;          /* SO_MARK of packets that vtld injects on lo; random, not 0 */
    __u16 capture_port4; /* host order; 0 = this family is not captured */
    __u16 capture_port6;
};

enum {
    VTL_CC_NAME_MAX = 16,        /* the name of a TCP congestion control, 0 at its end included */
    VTL_WISH_PLAIN = 0xffffffff, /* vtl_captured.wish: not to be captured */
};

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

/* A captured socket, in its socket storage. connect writes, getsockname fills in `local`. */
struct vtl_captured {
    struct vtl_endpoint dest; /* what the application asked for */
    __u8 local[16];           /* what getsockname shows; all zero = not known yet */
    __u32 wish;               /* which carrier its hook names: vtld's number for it, 0 = none */
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

/* Values of the map `vtl_own`: sockets of vtld by cookie. vtld writes before connect() or
 * listen(), the sock_ops program adds VTL_OWN_PEER. */
enum vtl_own {
    VTL_OWN_OFFER = 1 << 0,  /* offer (active) or answer (passive) the option */
    VTL_OWN_PEER = 1 << 1,   /* the peer showed that it understands the option */
    VTL_OWN_LISTEN = 1 << 2, /* the steering listener */
};

/* Indexes of the SOCKMAP `vtl_steer`: the steering listeners. */
enum vtl_steer_slot { VTL_STEER_4 = 0, VTL_STEER_6 = 1, VTL_STEER_SLOTS = 2 };

#endif
