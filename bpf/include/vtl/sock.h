/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* What programs read of the kernel's TCP sockets, by CO-RE. */
#ifndef VTL_SOCK_H
#define VTL_SOCK_H

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* A listener's accept queue. */
struct sock {
    __u32 sk_ack_backlog, sk_max_ack_backlog;
} __attribute__((preserve_access_index));

/* Bits of inet_flags, an enum without a name, since Linux 6.6. Every TCP socket has the second. */
enum { INET_FLAGS_TRANSPARENT = 1 << 15, INET_FLAGS_IS_ICSK = 1 << 16 };

struct inet_sock {
    unsigned long inet_flags;
} __attribute__((preserve_access_index));

/* Signature keys and MPTCP, where compiled in; out-of-order packets. */
struct tcp_sock {
    __u32 rcv_ooopack;
    void *md5sig_info; /* RFC 2385 */
    void *ao_info;     /* RFC 5925 */
    _Bool is_mptcp;
} __attribute__((preserve_access_index));

/* 1 for a subflow of an MPTCP connection, which the kernel opens by itself. */
static __always_inline int is_subflow(struct bpf_sock *sk) {
    struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);

    return tcp && bpf_core_field_exists(tcp->is_mptcp) && tcp->is_mptcp;
}

/* 1 if the socket signs its segments, which vtld cannot do for it. */
static __always_inline int signs(struct bpf_sock *sk) {
    struct tcp_sock *tcp = bpf_skc_to_tcp_sock(sk);

    if (!tcp)
        return 0;
    if (bpf_core_field_exists(tcp->md5sig_info) && tcp->md5sig_info)
        return 1;
    return bpf_core_field_exists(tcp->ao_info) && tcp->ao_info;
}

/* 1 if the socket may have an address of another host (IP_TRANSPARENT), which vtld could not bind.
 */
static __always_inline int is_transparent(struct bpf_sock *sk) {
    const unsigned long both = INET_FLAGS_TRANSPARENT | INET_FLAGS_IS_ICSK;
    struct inet_sock *inet = (struct inet_sock *)bpf_skc_to_tcp_sock(sk);

    return inet && bpf_core_field_exists(inet->inet_flags) && (inet->inet_flags & both) == both;
}

#endif
