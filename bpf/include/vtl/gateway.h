/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Interface between the gateway's programs (bpf/gateway.bpf.c) and vtld. Addresses and ports as in
 * hooker.h.
 */
#ifndef VTL_GATEWAY_H
#define VTL_GATEWAY_H

#include "hooker.h"

/* Routing of packets of connections that end at a gateway although their destination is another
 * host. All of it is exact numbers, so that the next daemon finds what a killed one has left, and
 * nobody else's packets match. */
enum {
    VTL_GATEWAY_MARK = 0x56544c47,   /* mark of such packets: "VTLG" */
    VTL_GATEWAY_INJECT = 0x56544c49, /* mark of a held SYN that vtld injects: "VTLI" */
    VTL_GATEWAY_TABLE = 22100,       /* routing table: everything is local */
    VTL_GATEWAY_PRIORITY = 21,       /* of the first of the rules that lead there */
};

/* Unanswered connects that a gateway holds at most; SYNs beyond are forwarded. */
enum {
    VTL_GATEWAY_INSIDE_MAX = 4096,  /* to hosts beyond the hop */
    VTL_GATEWAY_OUTSIDE_MAX = 1024, /* from VTL hosts beyond the hop */
    VTL_GATEWAY_HOPS_MAX = 256,     /* interfaces, and prefixes and ports for each */
    VTL_GATEWAY_FILTERS_MAX = 4096, /* prefixes, and ports, of all interfaces */
};

/* An interface whose hop is carried: value of the map `vtl_gateway_hops`, keyed by its index. */
struct vtl_gateway_hop {
    __u8 has_prefixes; /* 1: only destinations in `vtl_gateway_prefixes` */
    __u8 has_ports;    /* 1: only ports in `vtl_gateway_ports` */
};

/* Key of the trie `vtl_gateway_prefixes`. */
struct vtl_gateway_prefix {
    __u32 bits; /* 32 + the prefix's length in `addr` */
    __u32 ifindex;
    __u8 addr[16];
};

/* Key of `vtl_gateway_ports`. */
struct vtl_gateway_port {
    __u32 ifindex;
    __u32 port; /* host order */
};

/* A SYN held at a gateway: entry of the ring buffer `vtl_gateway_syns`. */
struct vtl_gateway_syn {
    __u32 ifindex; /* the hop's interface */
    __u32 out;     /* the interface that it would leave by */
    __u32 len;     /* bytes in use of `packet` */
    __u32 outside; /* 1: from beyond the hop, with the option, whose content is `flow` */
    __u32 onward;  /* 1: as well, and `out` is another hop, which is to carry it, too */
    struct vtl_flow_name flow;
    struct vtl_four_tuple ends;
    __u8 packet[VTL_SYN_MAX]; /* IP and TCP header */
};

#endif
