// SPDX-License-Identifier: GPL-2.0-only
/*
 * Root programs: attached once and never replaced. Ingress checks what every VTL packet must
 * satisfy, learns where the peer lives, and tail-calls the graft that the packet names; packets
 * that are not VTL's pass after a look at one or two fields. Egress hands the pump's frames to the
 * session's graft.
 */
#include "vtl/env_bpf.h"
#include "vtl/parse.h"

char _license[] SEC("license") = "GPL";

enum { VTL_TC_NEXT = -1, VTL_TC_STOLEN = 4 };

/* What to do with a packet: a slot of the PROG_ARRAY (>= 0), or one of these. */
enum vtl_route {
    VTL_ROUTE_PASS = -1, /* not VTL's, or vtld's to handle */
    VTL_ROUTE_DROP = -2,
};

/* Remembers the way back to the peer of an authentic packet. */
VTL_INLINE void vtl_learn(struct vtl_session *s, struct ethhdr *eth, __u32 ifindex)
{
    struct ethhdr *known = (struct ethhdr *)s->headers;
    if (s->ifindex == ifindex && !__builtin_memcmp(known->h_dest, eth->h_source, ETH_ALEN) &&
        !__builtin_memcmp(known->h_source, eth->h_dest, ETH_ALEN))
        return;
    __builtin_memcpy(known->h_dest, eth->h_source, ETH_ALEN);
    __builtin_memcpy(known->h_source, eth->h_dest, ETH_ALEN);
    known->h_proto = eth->h_proto;
    VTL_BARRIER();
    VTL_STORE(s->ifindex, ifindex);
}

/* Did the packet come from the host that the session is with? */
VTL_INLINE int vtl_from_peer(struct vtl_session *s, void *data, int offset)
{
    void *ours = s->headers + sizeof(struct ethhdr);
    void *theirs = data + sizeof(struct ethhdr);
    if (offset == (int)VTL_OFFSET_V4)
        return s->ip_version == 4 &&
               ((struct iphdr *)ours)->daddr == ((struct iphdr *)theirs)->saddr;
    return s->ip_version == 6 && !__builtin_memcmp(&((struct ipv6hdr *)ours)->daddr,
                                                   &((struct ipv6hdr *)theirs)->saddr,
                                                   sizeof(struct in6_addr));
}

VTL_INLINE int vtl_route_at(void *data, void *end, __u32 ifindex, int offset)
{
    struct vtl_hdr *h = data + offset;
    if ((void *)(h + 1) > end)
        return VTL_ROUTE_DROP;
    __u32 type = h->version_type & 0xf;
    if (h->version_type >> 4 != VTL_VERSION && type == VTL_NEGO)
        return VTL_ROUTE_PASS; /* vtld says that it does not speak that version */
    if (h->version_type >> 4 != VTL_VERSION || type >= VTL_TYPES) {
        vtl_env_count(VTL_ST_RX_MALFORMED);
        return VTL_ROUTE_DROP;
    }
    vtl_env_count(VTL_ST_RX_PACKETS);
    if (type == VTL_NEGO || type == VTL_NEGO_NACK) {
        vtl_env_count(VTL_ST_RX_CONTROL);
        return VTL_ROUTE_PASS;
    }
    struct vtl_session *s = vtl_session_at(vtl_swap32(h->sid));
    if (!s || s->state == VTL_FREE || s->token != vtl_swap64(h->token) ||
        !vtl_from_peer(s, data, offset)) {
        vtl_env_count(VTL_ST_RX_NO_SESSION);
        return VTL_ROUTE_DROP;
    }
    __u32 was = s->ifindex;
    vtl_learn(s, data, ifindex);
    if (!was)
        vtl_env_notify(s, VTL_EV_SEND);
    if (type == VTL_NEGO_ACK || type == VTL_CLOSE) {
        vtl_env_count(VTL_ST_RX_CONTROL);
        return VTL_ROUTE_PASS;
    }
    __u32 gid = vtl_swap16(h->gid);
    if (s->state != VTL_OPEN || gid != s->gid || gid >= VTL_MAX_GRAFTS) {
        vtl_env_count(VTL_ST_RX_NO_GRAFT);
        return VTL_ROUTE_DROP;
    }
    return gid * VTL_ROLES + (type == VTL_ACK ? VTL_LISTENER : VTL_INGRESS);
}

VTL_INLINE int vtl_route(void *data, void *end, __u32 total, __u32 ifindex)
{
    int offset = vtl_parse_frame(data, end, total);
    if (!offset)
        return VTL_ROUTE_PASS;
    if (offset == (int)VTL_OFFSET_V4)
        return vtl_route_at(data, end, ifindex, VTL_OFFSET_V4);
    if (offset == (int)VTL_OFFSET_V6)
        return vtl_route_at(data, end, ifindex, VTL_OFFSET_V6);
    vtl_env_count(VTL_ST_RX_MALFORMED);
    return VTL_ROUTE_DROP;
}

SEC("tcx/ingress") int vtl_root_in_tc(struct __sk_buff *ctx)
{
    if (ctx->protocol != vtl_swap16(ETH_P_IP) && ctx->protocol != vtl_swap16(ETH_P_IPV6))
        return VTL_TC_NEXT;
    if ((void *)(long)ctx->data_end - (void *)(long)ctx->data < (long)VTL_OFFSET_V6 + 24 &&
        ctx->len > ctx->data_end - ctx->data)
        bpf_skb_pull_data(ctx, ctx->len < 128 ? ctx->len : 128);
    int route = vtl_route((void *)(long)ctx->data, (void *)(long)ctx->data_end, ctx->len,
                          ctx->ifindex);
    if (route == VTL_ROUTE_PASS)
        return VTL_TC_NEXT;
    if (route >= 0) {
        bpf_tail_call(ctx, &vtl_in_tc, route);
        vtl_env_count(VTL_ST_RX_NO_GRAFT);
    }
    return VTL_TC_STOLEN;
}

SEC("xdp") int vtl_root_in_xdp(struct xdp_md *ctx)
{
    int route = vtl_route((void *)(long)ctx->data, (void *)(long)ctx->data_end,
                          ctx->data_end - ctx->data, ctx->ingress_ifindex);
    if (route == VTL_ROUTE_PASS)
        return XDP_PASS;
    if (route >= 0) {
        bpf_tail_call(ctx, &vtl_in_xdp, route);
        vtl_env_count(VTL_ST_RX_NO_GRAFT);
    }
    return XDP_DROP;
}

/* The gid of the session that the pump put into its frame, or 0. */
VTL_INLINE __u32 vtl_pumped_gid(void *data, void *end)
{
    struct vtl_pump_frame *f = data;
    if ((void *)(f + 1) > end)
        return 0;
    struct vtl_session *s = vtl_session_at(f->sid);
    return s ? s->gid : 0;
}

SEC("tcx/egress") int vtl_root_out_tc(struct __sk_buff *ctx)
{
    if (ctx->protocol != vtl_swap16(VTL_PUMP_ETHERTYPE))
        return VTL_TC_NEXT;
    __u32 gid = vtl_pumped_gid((void *)(long)ctx->data, (void *)(long)ctx->data_end);
    bpf_tail_call(ctx, &vtl_out_tc, gid);
    return VTL_TC_STOLEN;
}

SEC("xdp") int vtl_root_out_xdp(struct xdp_md *ctx)
{
    __u32 gid = vtl_pumped_gid((void *)(long)ctx->data, (void *)(long)ctx->data_end);
    bpf_tail_call(ctx, &vtl_out_xdp, gid);
    return XDP_DROP;
}
