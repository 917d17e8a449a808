/* SPDX-License-Identifier: GPL-2.0-only */
/* TCP headers of packets in tcx programs, for the Hooker. */
#ifndef VTL_SEGMENT_H
#define VTL_SEGMENT_H

#include <bpf/bpf_endian.h>

#include "headers.h"

/* Copies `bytes` from offset `at` of the IP header; 0: success. */
static __always_inline long load_ip(struct __sk_buff *skb, __u32 at, void *to, __u32 bytes) {
    return bpf_skb_load_bytes_relative(skb, at, to, bytes, BPF_HDR_START_NET);
}

/* Reads the TCP header behind the IPv4 or IPv6 header; *off: its offset from the network header. 0
 * if the packet is not TCP, or is a fragment. IPv6 extension headers are not parsed: such a SYN
 * counts as plain TCP. */
static __always_inline int load_tcp(struct __sk_buff *skb, struct tcphdr *tcp, __u32 *off,
                                    int *v4) {
    union {
        struct iphdr v4;
        struct ipv6hdr v6;
    } ip;

    if (skb->protocol == bpf_htons(ETH_P_IP)) {
        if (load_ip(skb, 0, &ip.v4, sizeof(ip.v4)))
            return 0;
        if (ip.v4.protocol != IPPROTO_TCP || (ip.v4.frag_off & bpf_htons(VTL_IP_FRAGMENT)))
            return 0;
        *off = ip.v4.ihl * 4;
        *v4 = 1;
    } else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
        if (load_ip(skb, 0, &ip.v6, sizeof(ip.v6)))
            return 0;
        if (ip.v6.nexthdr != IPPROTO_TCP)
            return 0;
        *off = sizeof(ip.v6);
        *v4 = 0;
    } else {
        return 0;
    }
    return !load_ip(skb, *off, tcp, sizeof(*tcp));
}

/* Fast path of load_tcp(), at a tenth of its cost: pointer to the TCP header of an Ethernet frame.
 * NULL: no TCP, or, if *odd, load_tcp() has to decide. */
static __always_inline struct tcphdr *glance(struct __sk_buff *skb, int *odd) {
    void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
    struct ethhdr *eth = data;
    struct tcphdr *tcp;
    __u8 protocol;

    *odd = 1;
    if ((void *)(eth + 1) > end || eth->h_proto != skb->protocol)
        return NULL;
    if (eth->h_proto == bpf_htons(ETH_P_IP)) {
        struct iphdr *ip = (void *)(eth + 1);
        tcp = (void *)(ip + 1);
        if ((void *)(tcp + 1) > end || ip->ihl * 4 != sizeof(*ip))
            return NULL;
        protocol = ip->protocol;
    } else if (eth->h_proto == bpf_htons(ETH_P_IPV6)) {
        struct ipv6hdr *ip = (void *)(eth + 1);
        tcp = (void *)(ip + 1);
        if ((void *)(tcp + 1) > end)
            return NULL;
        protocol = ip->nexthdr;
    } else {
        protocol = 0;
    }
    *odd = 0;
    return protocol == IPPROTO_TCP ? tcp : NULL;
}

/* 1 if the result of glance() excludes a SYN that opens a connection: true of nearly all
 * packets. */
static __always_inline int surely_no_syn(const struct tcphdr *tcp, int odd) {
    return tcp ? !tcp->syn || tcp->ack : !odd;
}

#endif
