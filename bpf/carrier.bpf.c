// SPDX-License-Identifier: GPL-2.0-only
/*
 * Programs of one hook with a named carrier (vtl run --carrier, vtl hook add --carrier): connects
 * get the hook's policy, TCP connections its congestion control. One instance is loaded for each
 * such hook, with its own configuration. Ignores sockets outside the daemon's network namespace.
 */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "vtl/hooker.h"
#include "vtl/local.h"

char _license[] SEC("license") = "GPL";

enum { SOCK_STREAM = 1 };

const volatile struct vtl_carrier_config config SEC(".rodata.config");

/* Connections that got the congestion control. */
__u64 connections;

/* Replaced by the map of bpf/hooker.bpf.c at load. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, __u32);
} vtl_policies SEC(".maps");

/* Stores the policy. The kernel runs a cgroup's programs before its ancestors': the first policy,
 * that of the hook nearest to the socket, stays. */
static __always_inline int store_policy(struct bpf_sock_addr *ctx) {
    __u32 policy = config.policy;

    if (ctx->type == SOCK_STREAM && ctx->protocol == IPPROTO_TCP && ctx->sk &&
        bpf_get_netns_cookie(ctx) == config.netns_cookie)
        bpf_sk_storage_get(&vtl_policies, ctx->sk, &policy, BPF_SK_STORAGE_GET_F_CREATE);
    return 1;
}

SEC("cgroup/connect4")
int vtl_policy4(struct bpf_sock_addr *ctx) {
    return store_policy(ctx);
}

SEC("cgroup/connect6")
int vtl_policy6(struct bpf_sock_addr *ctx) {
    return store_policy(ctx);
}

static __always_inline int is_loopback(__be32 ip) {
    return (bpf_ntohl(ip) >> 24) == 127;
}

/* Whether a connection stays on this host: over the loopback, or from an address to itself. IPv6
 * addresses word by word: the verifier rejects reading two at once. */
static __always_inline int is_local(struct bpf_sock_ops *ops) {
    __u32 a, b, c, d;

    if (ops->family == VTL_AF_INET)
        return is_loopback(ops->remote_ip4) || ops->remote_ip4 == ops->local_ip4;
    a = VTL_LOAD(ops->remote_ip6[0]);
    b = VTL_LOAD(ops->remote_ip6[1]);
    c = VTL_LOAD(ops->remote_ip6[2]);
    d = VTL_LOAD(ops->remote_ip6[3]);
    if (!a && !b && (c == bpf_htonl(0xffff) ? is_loopback(d) : !c && d == bpf_htonl(1)))
        return 1;
    return a == VTL_LOAD(ops->local_ip6[0]) && b == VTL_LOAD(ops->local_ip6[1]) &&
           c == VTL_LOAD(ops->local_ip6[2]) && d == VTL_LOAD(ops->local_ip6[3]);
}

/* Sets the congestion control of connections opened under the hook, or accepted at its port. */
SEC("sockops")
int vtl_control(struct bpf_sock_ops *ops) {
    if (bpf_get_netns_cookie(ops) != config.netns_cookie)
        return 1;
    switch (ops->op) {
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
        if (config.port)
            return 1;
        break;
    case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
        /* Local connections, as from vtld to a server, have no path to control. */
        if (!config.port || ops->local_port != config.port || is_local(ops))
            return 1;
        break;
    case BPF_SOCK_OPS_NEEDS_ECN:
        /* The SYN is answered before the connection has its own congestion control. */
        if (config.port && config.marks && ops->local_port == config.port)
            ops->reply = 1;
        return 1;
    default:
        return 1;
    }
    if (!bpf_setsockopt(ops, IPPROTO_TCP, TCP_CONGESTION, (void *)config.control,
                        sizeof(config.control)))
        __sync_fetch_and_add(&connections, 1);
    return 1;
}
