/* SPDX-License-Identifier: GPL-2.0-only */
/* Who receives a TCP packet that tcx sees: a socket of this host, or another host. */
#ifndef VTL_RECEIVER_H
#define VTL_RECEIVER_H

#include <bpf/bpf_core_read.h>

#include "local.h"
#include "segment.h"
#include "sock.h"

/* The socket that a TCP packet is for, to be released; NULL: none. */
static __always_inline struct bpf_sock *receiver(struct __sk_buff *skb, __be16 sport, __be16 dport,
                                                 int v4) {
    struct bpf_sock_tuple tuple = {};

    if (v4) {
        /* saddr and daddr are adjacent in both headers and tuples. */
        load_ip(skb, offsetof(struct iphdr, saddr), &tuple.ipv4.saddr, 2 * sizeof(__be32));
        tuple.ipv4.sport = sport;
        tuple.ipv4.dport = dport;
        return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
    }
    load_ip(skb, offsetof(struct ipv6hdr, saddr), &tuple.ipv6.saddr, 2 * sizeof(struct in6_addr));
    tuple.ipv6.sport = sport;
    tuple.ipv6.dport = dport;
    return bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
}

/* State of the socket that a TCP packet is for; 0: none. *refuses: whether a listener would take no
 * connection of vtld's: its accept queue is full, or its clients sign their segments. */
static __always_inline int receiver_state(struct __sk_buff *skb, __be16 sport, __be16 dport, int v4,
                                          int *refuses) {
    struct bpf_sock *sk = receiver(skb, sport, dport, v4);
    struct sock *listener;
    int state;

    if (!sk)
        return 0;
    state = sk->state;
    if (state == BPF_TCP_LISTEN && refuses) {
        listener = (struct sock *)bpf_skc_to_tcp_sock(sk);
        *refuses = listener && BPF_CORE_READ(listener, sk_ack_backlog) >
                                   BPF_CORE_READ(listener, sk_max_ack_backlog);
        *refuses |= signs(sk);
    }
    bpf_sk_release(sk);
    return state;
}

/* Whether a SYN is for another host, to which this one forwards or bridges it. A wildcard listener
 * would match it all the same. */
static __always_inline int is_others(struct __sk_buff *skb, int v4) {
    struct bpf_fib_lookup fib = {
        .family = v4 ? VTL_AF_INET : VTL_AF_INET6,
        .l4_protocol = IPPROTO_TCP,
        .ifindex = skb->ifindex,
    };

    if (skb->pkt_type == PACKET_OTHERHOST)
        return 1;
    if (v4) {
        load_ip(skb, offsetof(struct iphdr, saddr), &fib.ipv4_src, sizeof(fib.ipv4_src));
        load_ip(skb, offsetof(struct iphdr, daddr), &fib.ipv4_dst, sizeof(fib.ipv4_dst));
    } else {
        load_ip(skb, offsetof(struct ipv6hdr, saddr), fib.ipv6_src, sizeof(fib.ipv6_src));
        load_ip(skb, offsetof(struct ipv6hdr, daddr), fib.ipv6_dst, sizeof(fib.ipv6_dst));
    }
    return vtl_is_for_another(skb, &fib);
}

#endif
