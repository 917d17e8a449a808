// SPDX-License-Identifier: GPL-2.0-only
/*
 * Root programs: attached once, never replaced. Ingress makes the checks common to all VTL packets,
 * updates the return path, and tail-calls the packet's graft; packets that are not VTL's pass after
 * a check of one or two fields. Egress passes the pump's frames to the session's graft.
 */
#include "vtl/env_bpf.h"
#include "vtl/frame.h"
#include "vtl/local.h"
#include "vtl/route.h"

char _license[] SEC("license") = "GPL";

/* Token buckets by prefix (vtl_prefix()): time when the bucket will be full again
 * (vtl_take_token()). */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, VTL_NEGO_LIMIT_PREFIXES);
    __type(key, __u64);
    __type(value, __u64);
} vtl_nego_limits SEC(".maps");

/* Token bucket of all prefixes together. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1);
    __type(key, __u32);
    __type(value, __u64);
} vtl_nego_total SEC(".maps");

const volatile struct vtl_root_config vtl_root = {.by_udp = 1};

/*
 * Tail-calls slot `index` of a PROG_ARRAY; returns if it is empty. With an index that the verifier
 * knows, a tail call becomes a direct jump (2 ns), which the kernel patches when the slot changes;
 * else it is an indirect one (19 ns). So slots below 32, the first gids, have cases of their own.
 */
#define VTL_GO(ctx, map, index)                                                                    \
    do {                                                                                           \
        __u32 to = (index);                                                                        \
        switch (to) {                                                                              \
            VTL_GO_8(ctx, map, 0)                                                                  \
            VTL_GO_8(ctx, map, 8)                                                                  \
            VTL_GO_8(ctx, map, 16)                                                                 \
            VTL_GO_8(ctx, map, 24)                                                                 \
        default:                                                                                   \
            bpf_tail_call(ctx, &map, to);                                                          \
        }                                                                                          \
    } while (0)
#define VTL_GO_1(ctx, map, index)                                                                  \
    case index:                                                                                    \
        bpf_tail_call_static(ctx, &map, index);                                                    \
        break;
#define VTL_GO_8(ctx, map, index)                                                                  \
    VTL_GO_1(ctx, map, (index) + 0)                                                                \
    VTL_GO_1(ctx, map, (index) + 1)                                                                \
    VTL_GO_1(ctx, map, (index) + 2)                                                                \
    VTL_GO_1(ctx, map, (index) + 3)                                                                \
    VTL_GO_1(ctx, map, (index) + 4)                                                                \
    VTL_GO_1(ctx, map, (index) + 5)                                                                \
    VTL_GO_1(ctx, map, (index) + 6)                                                                \
    VTL_GO_1(ctx, map, (index) + 7)

/*
 * UDP decapsulation, in global functions, so that the path of other packets stays short. Removes
 * the UDP header of packets for grafts.
 */
VTL_INLINE int vtl_udp(struct vtl_frame f) {
    int route = vtl_route_udp(vtl_frame_data(f), vtl_frame_end(f), vtl_frame_length(f),
                              vtl_frame_ifindex(f));
    return route >= 0 && vtl_frame_cut_udp(f) ? VTL_ROUTE_DROP : route;
}

VTL_GLOBAL int vtl_udp_tc(struct __sk_buff *ctx) {
    return vtl_udp(vtl_frame_tc(ctx));
}

VTL_GLOBAL int vtl_udp_xdp(struct xdp_md *ctx) {
    return vtl_udp(vtl_frame_xdp(ctx));
}

/* Takes a token from a bucket of `burst` tokens, refilled every `gap` ns; 0: empty. Its only state
 * is when it will be full again (virtual scheduling, ITU-T I.371). CPUs that race may take one
 * token together. */
VTL_INLINE int vtl_take_token(__u64 *full, __u64 now, __u64 gap, __u32 burst) {
    __u64 at = VTL_LOAD(*full);
    if (at < now)
        at = now;
    if (at - now >= gap * burst)
        return 0;
    VTL_STORE(*full, at + gap);
    return 1;
}

/* Key of a prefix: an IPv4 address, or the first half of an IPv6 address. The former look like
 * 100::/64 (RFC 6666), a source of no packets. */
VTL_INLINE __u64 vtl_prefix(const struct bpf_fib_lookup *fib) {
    return fib->family == VTL_AF_INET ? (__u64)fib->ipv4_src << 32 | 1
                                      : (__u64)fib->ipv6_src[1] << 32 | fib->ipv6_src[0];
}

/* Whether the rate limit admits another packet from strangers to vtld. Packets over TCP have
 * authentic addresses, so they count for their prefix only. */
VTL_INLINE int vtl_is_within_limit(__u64 prefix, int by_tcp) {
    __u64 now = bpf_ktime_get_ns(), fresh = now + VTL_NEGO_LIMIT_NS;
    __u32 zero = 0;
    __u64 *one = bpf_map_lookup_elem(&vtl_nego_limits, &prefix);
    __u64 *all = bpf_map_lookup_elem(&vtl_nego_total, &zero);
    if (!one)
        bpf_map_update_elem(&vtl_nego_limits, &prefix, &fresh, BPF_ANY);
    /* A prefix over its limit takes nothing from the others. */
    if ((one && !vtl_take_token(one, now, VTL_NEGO_LIMIT_NS, VTL_NEGO_LIMIT_BURST)) ||
        (all && !by_tcp &&
         !vtl_take_token(all, now, VTL_NEGO_LIMIT_ALL_NS, VTL_NEGO_LIMIT_ALL_BURST))) {
        vtl_env_count(VTL_ST_RX_LIMITED);
        return 0;
    }
    return 1;
}

/* Whether to pass on a packet that would be dropped, or is a stranger's: it is for another host, or
 * within the rate limit. `bridged`: to another Ethernet address. */
VTL_INLINE int vtl_is_passed_on(struct vtl_frame f, int bridged, int route) {
    __u32 ifindex = vtl_frame_ifindex(f);
    struct bpf_fib_lookup fib = {.ifindex = ifindex};
    struct ethhdr *eth = vtl_frame_data(f);
    void *end = vtl_frame_end(f);
    if ((void *)(eth + 1) > end)
        return 0;
    if (eth->h_proto == vtl_swap16(ETH_P_IP)) {
        struct iphdr *ip = (void *)(eth + 1);
        if ((void *)(ip + 1) > end)
            return 0;
        fib.family = VTL_AF_INET;
        fib.l4_protocol = ip->protocol;
        fib.ipv4_src = ip->saddr;
        fib.ipv4_dst = ip->daddr;
    } else {
        struct ipv6hdr *ip = (void *)(eth + 1);
        if ((void *)(ip + 1) > end)
            return 0;
        fib.family = VTL_AF_INET6;
        fib.l4_protocol = ip->nexthdr;
        __builtin_memcpy(fib.ipv6_src, &ip->saddr, sizeof(fib.ipv6_src));
        __builtin_memcpy(fib.ipv6_dst, &ip->daddr, sizeof(fib.ipv6_dst));
    }
    __u64 prefix = vtl_prefix(&fib); /* before the lookup, which overwrites it */
    if (bridged || vtl_is_for_another(f.ctx, &fib)) {
        vtl_env_count(VTL_ST_RX_OTHERS);
        return 1;
    }
    return route == VTL_ROUTE_LIMIT && vtl_is_within_limit(prefix, ifindex == VTL_TUNNEL);
}

VTL_GLOBAL int vtl_is_passed_on_tc(struct __sk_buff *ctx, int route) {
    int bridged = ctx->pkt_type == PACKET_OTHERHOST && ctx->ifindex != VTL_LOOPBACK_IFINDEX;
    return vtl_is_passed_on(vtl_frame_tc(ctx), bridged, route);
}

VTL_GLOBAL int vtl_is_passed_on_xdp(struct xdp_md *ctx, int route) {
    return vtl_is_passed_on(vtl_frame_xdp(ctx), 0, route);
}

VTL_INLINE int vtl_root_in(struct vtl_frame f) {
    int route =
        vtl_route(vtl_frame_data(f), vtl_frame_end(f), vtl_frame_length(f), vtl_frame_ifindex(f));
    if (route == VTL_ROUTE_PASS && vtl_root.by_udp)
        route = f.xdp ? vtl_udp_xdp(f.ctx) : vtl_udp_tc(f.ctx);
    if (route == VTL_ROUTE_PASS)
        return vtl_frame_pass(f);
    if (route >= 0) {
        if (f.xdp)
            VTL_GO(f.ctx, vtl_in_xdp, route);
        else
            VTL_GO(f.ctx, vtl_in_tc, route);
        vtl_env_count(VTL_ST_RX_NO_GRAFT);
    } else if (f.xdp ? vtl_is_passed_on_xdp(f.ctx, route) : vtl_is_passed_on_tc(f.ctx, route)) {
        return vtl_frame_pass(f);
    }
    return vtl_frame_drop(f);
}

SEC("tcx/ingress") int vtl_root_in_tc(struct __sk_buff *ctx) {
    if (ctx->protocol != vtl_swap16(ETH_P_IP) && ctx->protocol != vtl_swap16(ETH_P_IPV6))
        return VTL_TC_NEXT;
    /* Make the headers readable by pointer, wherever drivers left them. */
    const __u32 longest = VTL_OFFSET_V6 + VTL_UDP_HEADER + sizeof(struct vtl_ack_hdr);
    enum { PULL = 160 }; /* bytes: more than that */
    if ((void *)(long)ctx->data_end - (void *)(long)ctx->data < (long)longest &&
        ctx->len > ctx->data_end - ctx->data)
        bpf_skb_pull_data(ctx, ctx->len < PULL ? ctx->len : PULL);
    return vtl_root_in(vtl_frame_tc(ctx));
}

SEC("xdp") int vtl_root_in_xdp(struct xdp_md *ctx) {
    return vtl_root_in(vtl_frame_xdp(ctx));
}

/* Frames of the pump: the mark is the entry of `vtl_pump`. */
SEC("tcx/egress") int vtl_root_out_tc(struct __sk_buff *ctx) {
    if (ctx->protocol != vtl_swap16(VTL_PUMP_ETHERTYPE))
        return VTL_TC_NEXT;
    struct vtl_pump *p = vtl_pump_of(ctx->mark);
    if (!p)
        return VTL_TC_DROP;
    struct vtl_session *s = vtl_pumped_session(p);
    if (s)
        bpf_tail_call(ctx, &vtl_out_tc, s->gid);
    vtl_end_turn(p, 0);
    return VTL_TC_DROP;
}

/* Direct egress, on the loopback: an aware application runs its session's egress. It cannot send
 * more than the session may. */
SEC("tcx/egress") int vtl_root_direct(struct __sk_buff *ctx) {
    if (ctx->mark != VTL_DIRECT_MARK)
        return VTL_TC_NEXT;
    __u64 cookie = bpf_get_socket_cookie(ctx);
    __u32 *sid = bpf_map_lookup_elem(&vtl_callers, &cookie);
    struct vtl_session *s = sid ? vtl_session_at(*sid) : 0;
    if (s && s->ifindex == VTL_TUNNEL) {
        /* vtld carries it over TCP. At most one pending, as in vtl_make_direct. */
        if (!__sync_lock_test_and_set(&s->tx.event_pending, 1))
            vtl_env_notify(s, VTL_EV_SEND);
    } else if (s) {
        ctx->cb[0] = *sid;
        bpf_tail_call(ctx, &vtl_out_direct, s->gid);
    }
    return VTL_TC_DROP;
}

/* Live frames. Loaded once for each shard, whose number is a constant. */
SEC("xdp") int vtl_root_out_xdp(struct xdp_md *ctx) {
    struct vtl_scratch *scratch = vtl_get_scratch();
    struct vtl_pump *p = vtl_pump_of(vtl_root.shard);
    if (!p || !scratch)
        return XDP_DROP;
    scratch->shard = vtl_root.shard;
    struct vtl_session *s = vtl_pumped_session(p);
    if (s)
        VTL_GO(ctx, vtl_out_xdp, s->gid);
    vtl_end_turn(p, 0);
    return XDP_DROP;
}
