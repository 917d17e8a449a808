// SPDX-License-Identifier: GPL-2.0-only
/*
 * Restricts VTL's sockets to the interfaces of vtld --interface: packets from others do not find
 * them. Loaded only with that option.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#include "vtl/intf.h"

char _license[] SEC("license") = "GPL";

enum { INSIDE_MAX = 256 };

/* Indexes of those interfaces, and the loopback's. Written by vtld. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, INSIDE_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u32);
    __type(value, __u8);
} vtl_inside SEC(".maps");

static __always_inline int is_inside(__u32 ifindex) {
    return !!bpf_map_lookup_elem(&vtl_inside, &ifindex);
}

static __always_inline int vtl_lookup(struct bpf_sk_lookup *ctx, __u32 port) {
    return ctx->local_port != port || is_inside(ctx->ingress_ifindex) ? SK_PASS : SK_DROP;
}

/* VTL's UDP port, if vtld has it. SK_DROP: the kernel answers as for an unbound port. */
SEC("sk_lookup")
int vtl_lookup_udp(struct bpf_sk_lookup *ctx) {
    return ctx->protocol == IPPROTO_UDP ? vtl_lookup(ctx, VTL_UDP_PORT) : SK_PASS;
}

/* The same for TCP. */
SEC("sk_lookup")
int vtl_lookup_tcp(struct bpf_sk_lookup *ctx) {
    return ctx->protocol == IPPROTO_TCP ? vtl_lookup(ctx, VTL_TCP_PORT) : SK_PASS;
}

/* Raw sockets, which have no lookup: bytes of the packet to deliver. */
SEC("socket")
int vtl_filter(struct __sk_buff *skb) {
    return is_inside(skb->ifindex) ? -1 : 0;
}
