/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Capture of connects, which go to vtld instead of their destination: for hooks (bpf/hooker.bpf.c)
 * and for rules (bpf/rules.bpf.c), which reuse the former's maps. Includers define `config`, a
 * struct vtl_hook_config, first.
 */
#ifndef VTL_CAPTURE_H
#define VTL_CAPTURE_H

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "vtl/exe.h"
#include "vtl/hooker.h"
#include "vtl/sock.h"

enum {
    SOCK_STREAM = 1,
    LOOPBACK4 = 0x7f000001, /* 127.0.0.1, host order */
};

/* Captured sockets: the application's destination, in its socket's storage. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct vtl_captured);
} vtl_captured SEC(".maps");

/* Policy of sockets under a hook: carrier of the nearest one. Written by bpf/carrier.bpf.c before
 * vtl_connect4 and 6 run, which write 0 = none. Rules ignore such sockets. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, __u32);
} vtl_policies SEC(".maps");

/* Addresses that getsockname returns, by socket cookie. vtld writes an entry once it knows the
 * route, and again if the connection's port changes; the program copies it into the socket's
 * storage on demand. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 65536);
    __type(key, __u64);
    __type(value, struct vtl_endpoint);
} vtl_locals SEC(".maps");

/* Destinations without VTL: when the entry expires, CLOCK_MONOTONIC nanoseconds. Written by
 * vtld. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 16384);
    __type(key, struct vtl_endpoint);
    __type(value, __u64);
} vtl_plain SEC(".maps");

/* Near hosts, by address: connects without a carrier bypass vtld. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 16384);
    __type(key, __u8[16]);
    __type(value, struct vtl_near);
} vtl_near SEC(".maps");

/* vtld's own sockets by cookie. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 65536);
    __type(key, __u64);
    __type(value, struct vtl_own_socket);
} vtl_own SEC(".maps");

/* Heartbeat of vtld, one entry: CLOCK_MONOTONIC nanoseconds. Written by vtld. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, __u64);
} vtl_beat SEC(".maps");

/* 1 if vtld serves connections. If it hangs or is stopped, they go by TCP. */
static __always_inline int is_served(void) {
    __u32 only = 0;
    __u64 *beat = bpf_map_lookup_elem(&vtl_beat, &only);

    return beat && bpf_ktime_get_ns() < *(volatile __u64 *)beat + VTL_BEAT_NS;
}

static __always_inline void map_v4(__u8 out[16], __be32 addr) {
    __u32 *w = (__u32 *)out;
    w[0] = 0;
    w[1] = 0;
    w[2] = bpf_htonl(0xffff);
    w[3] = addr;
}

static __always_inline void copy_addr(void *to, const void *from) {
    __builtin_memcpy(to, from, 16);
}

static __always_inline int is_mapped(const __u32 w[4]) {
    return w[0] == 0 && w[1] == 0 && w[2] == bpf_htonl(0xffff);
}

/* 1 for this network (0/8), loopback, multicast, and 240/4 with broadcast. */
static __always_inline int stays_local4(__be32 addr) {
    __u32 top = bpf_ntohl(addr) >> 24;
    return top == 0 || top == 127 || top >= 224;
}

/* 1 for unspecified and loopback (::/96), multicast ff00::/8, and link-local fe80::/10, whose scope
 * these programs cannot see. */
static __always_inline int stays_local6(const __u32 w[4]) {
    __u32 top = bpf_ntohl(w[0]);
    return (w[0] | w[1] | w[2]) == 0 || top >> 24 == 0xff || top >> 22 == 0xfe80 >> 6;
}

/* 1 for TCP in the daemon's network namespace, except the daemon's own sockets, and connects to
 * other daemons. */
static __always_inline int is_tcp_of_others(struct bpf_sock_addr *ctx) {
    __u64 cookie;

    if (ctx->type != SOCK_STREAM || ctx->protocol != IPPROTO_TCP || !ctx->sk ||
        ctx->user_port == bpf_htons(VTL_TCP_PORT) ||
        bpf_get_netns_cookie(ctx) != config.netns_cookie || is_subflow(ctx->sk))
        return 0;
    cookie = bpf_get_socket_cookie(ctx);
    return !bpf_map_lookup_elem(&vtl_own, &cookie);
}

/* 1 if vtld can stand in for the socket. Not bound to a device, from which lo is unreachable; no
 * privileged source port, which the server checks (NFS, rsh) and vtld cannot bind again. */
static __always_inline int is_candidate(struct bpf_sock_addr *ctx) {
    return ctx->sk && ctx->sk->bound_dev_if == 0 && ctx->user_port != 0 &&
           (ctx->sk->src_port == 0 || ctx->sk->src_port >= 1024) && !signs(ctx->sk) &&
           !is_transparent(ctx->sk);
}

/* 1 if the policy requires a carrier, whatever is known of the destination. */
static __always_inline int requires_carrier(__u32 policy) {
    return policy != VTL_POLICY_PLAIN && (policy & VTL_POLICY_REQUIRE);
}

/* Verdict on a connect that vtld does not get: 1, unchanged; 0, EPERM. Required carriers do not
 * apply to destinations on this host. */
static __always_inline int goes_on(const struct vtl_endpoint *dest, __u32 policy) {
    const __u32 *w = (const __u32 *)dest->addr;

    if (!requires_carrier(policy))
        return 1;
    return is_mapped(w) ? stays_local4(w[3]) : !(w[0] | w[1] | w[2]);
}

/* 1 if captured already: by programs of a descendant cgroup, or of another kind. */
static __always_inline int is_taken4(struct bpf_sock_addr *ctx) {
    return ctx->user_ip4 == bpf_htonl(LOOPBACK4) &&
           ctx->user_port == bpf_htons(config.capture_port4);
}

static __always_inline int is_taken6(const struct vtl_endpoint *dest) {
    const __u32 *w = (const __u32 *)dest->addr;

    if (is_mapped(w))
        return w[3] == bpf_htonl(LOOPBACK4) && dest->port == bpf_htons(config.capture_port4);
    return (w[0] | w[1] | w[2]) == 0 && w[3] == bpf_htonl(1) &&
           dest->port == bpf_htons(config.capture_port6);
}

/* 1 if connects to the host bypass vtld. */
static __always_inline int is_near(const struct vtl_near *near) {
    return near->until > bpf_ktime_get_ns() && !near->spoiled;
}

/* 1 if connects with this policy bypass vtld when they are to near hosts. */
static __always_inline int leaves_near(__u32 policy) {
    return !policy || (policy != VTL_POLICY_PLAIN && (policy & VTL_POLICY_NEAR));
}

/* Decides on capture. 1: the connect goes to vtld, and `dest` is stored. */
static __always_inline int capture(struct bpf_sock_addr *ctx, const struct vtl_endpoint *dest,
                                   __u32 policy) {
    struct vtl_captured *c;
    struct vtl_near *near;
    __u64 cookie, *until;

    if (!is_served())
        return 0;
    near = leaves_near(policy) ? bpf_map_lookup_elem(&vtl_near, dest->addr) : NULL;
    if (near && is_near(near))
        return 0;
    until = bpf_map_lookup_elem(&vtl_plain, dest);
    if (until && *until > bpf_ktime_get_ns() && !requires_carrier(policy))
        return 0;
    c = bpf_sk_storage_get(&vtl_captured, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
    if (!c)
        return 0;
    c->dest = *dest;
    c->policy = policy;
    c->has_port = ctx->sk->src_port != 0;
    __builtin_memset(&c->local, 0, sizeof(c->local));
    note_exe(ctx->sk);
    /* The socket may have had a captured connect before. */
    cookie = bpf_get_socket_cookie(ctx);
    bpf_map_delete_elem(&vtl_locals, &cookie);
    return 1;
}

/* Redirects a connect to vtld, and stores its destination `dest` and `policy` with the socket. 0:
 * not captured, left unchanged. */
static __always_inline int take4(struct bpf_sock_addr *ctx, const struct vtl_endpoint *dest,
                                 __u32 policy) {
    if (!is_candidate(ctx) || !config.capture_port4 || stays_local4(ctx->user_ip4) ||
        !capture(ctx, dest, policy))
        return 0;
    ctx->user_ip4 = bpf_htonl(LOOPBACK4);
    ctx->user_port = bpf_htons(config.capture_port4);
    return 1;
}

static __always_inline int take6(struct bpf_sock_addr *ctx, const struct vtl_endpoint *dest,
                                 __u32 policy) {
    const __u32 *to = (const __u32 *)dest->addr;
    __u32 w[3] = {}, last;
    __u16 port;

    if (!is_candidate(ctx))
        return 0;
    if (is_mapped(to)) {
        port = stays_local4(to[3]) ? 0 : config.capture_port4;
        w[2] = to[2];
        last = bpf_htonl(LOOPBACK4);
    } else {
        port = stays_local6(to) ? 0 : config.capture_port6;
        last = bpf_htonl(1);
    }
    if (!port || !capture(ctx, dest, policy))
        return 0;
    ctx->user_ip6[0] = w[0];
    ctx->user_ip6[1] = w[1];
    ctx->user_ip6[2] = w[2];
    ctx->user_ip6[3] = last;
    ctx->user_port = bpf_htons(port);
    return 1;
}

/* Destination of a connect. */
static __always_inline void destination4(struct bpf_sock_addr *ctx, struct vtl_endpoint *dest) {
    map_v4(dest->addr, ctx->user_ip4);
    dest->port = ctx->user_port;
    dest->pad = 0;
}

static __always_inline void destination6(struct bpf_sock_addr *ctx, struct vtl_endpoint *dest) {
    __u32 w[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};

    copy_addr(dest->addr, w);
    dest->port = ctx->user_port;
    dest->pad = 0;
}

#endif
