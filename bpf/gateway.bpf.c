// SPDX-License-Identifier: GPL-2.0-only
/*
 * Gateway: ends TCP connections that this host forwards, and carries them over a hop.
 *
 * A SYN goes through the kernel's forwarding, firewall included, and is held at the egress of the
 * interface that it would leave by. Later packets of its connection are taken at ingress: they get
 * a mark, by which they are routed to this host although they are for another one.
 */
#include "vmlinux.h"
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "vtl/gateway.h"
#include "vtl/receiver.h"
#include "vtl/syn.h"

char _license[] SEC("license") = "GPL";

const volatile struct vtl_hook_config config SEC(".rodata.config");

#include "vtl/capture.h"
#include "vtl/outside.h"

/* Interfaces whose hops are carried, by index. Written by vtld. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, VTL_GATEWAY_HOPS_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, __u32);
    __type(value, struct vtl_gateway_hop);
} vtl_gateway_hops SEC(".maps");

/* Destinations that are carried, of interfaces that do not carry all. Written by vtld. */
struct {
    __uint(type, BPF_MAP_TYPE_LPM_TRIE);
    __uint(max_entries, VTL_GATEWAY_FILTERS_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct vtl_gateway_prefix);
    __type(value, __u8);
} vtl_gateway_prefixes SEC(".maps");

/* Likewise destination ports. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, VTL_GATEWAY_FILTERS_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct vtl_gateway_port);
    __type(value, __u8);
} vtl_gateway_ports SEC(".maps");

/* As vtl_gateway_outside, of connects to hosts beyond the hop. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, VTL_GATEWAY_INSIDE_MAX);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct vtl_four_tuple);
    __type(value, __u64);
} vtl_gateway_inside SEC(".maps");

/* What became of a SYN that came in. */
enum { SYN_ARRIVED = 1, SYN_FORWARDED };

/* Ends of the latest SYNs as they came in: one that leaves with others has been translated (NAT),
 * and only the kernel knows how to translate its answer back. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 32768);
    __type(key, struct vtl_four_tuple);
    __type(value, __u8);
} vtl_gateway_arrived SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 20);
} vtl_gateway_syns SEC(".maps");

/* The listeners that held SYNs are injected to, by enum vtl_steer_slot. */
struct {
    __uint(type, BPF_MAP_TYPE_SOCKMAP);
    __uint(max_entries, VTL_STEER_SLOTS);
    __type(key, __u32);
    __type(value, __u64);
} vtl_gateway_listeners SEC(".maps");

/* Reads both ends of a TCP packet; 0: success. */
static __always_inline int load_ends(struct __sk_buff *skb, int v4, __be16 sport, __be16 dport,
                                     struct vtl_four_tuple *ends) {
    __u32 ip[2];

    __builtin_memset(ends, 0, sizeof(*ends));
    ends->from.port = sport;
    ends->to.port = dport;
    if (!v4)
        return load_ip(skb, offsetof(struct ipv6hdr, saddr), ends->from.addr, 16) ||
               load_ip(skb, offsetof(struct ipv6hdr, daddr), ends->to.addr, 16);
    if (load_ip(skb, offsetof(struct iphdr, saddr), ip, sizeof(ip)))
        return 1;
    map_v4(ends->from.addr, ip[0]);
    map_v4(ends->to.addr, ip[1]);
    return 0;
}

static __always_inline int is_held(const struct vtl_four_tuple *ends) {
    return bpf_map_lookup_elem(&vtl_gateway_inside, ends) ||
           bpf_map_lookup_elem(&vtl_gateway_outside, ends);
}

/* ---- SYNs ---- */

/* 1 if the interface's gateway carries connections to this destination. */
static __always_inline int carries(__u32 ifindex, const struct vtl_endpoint *to) {
    struct vtl_gateway_hop *hop = bpf_map_lookup_elem(&vtl_gateway_hops, &ifindex);
    struct vtl_gateway_prefix prefix = {.bits = 32 + 128, .ifindex = ifindex};
    struct vtl_gateway_port port = {.ifindex = ifindex, .port = bpf_ntohs(to->port)};

    if (!hop)
        return 0;
    copy_addr(prefix.addr, to->addr);
    if (hop->has_prefixes && !bpf_map_lookup_elem(&vtl_gateway_prefixes, &prefix))
        return 0;
    return !hop->has_ports || bpf_map_lookup_elem(&vtl_gateway_ports, &port);
}

/* 1 if connects to this destination bypass vtld, by what is known of it. */
static __always_inline int is_bypassed(const struct vtl_endpoint *to) {
    struct vtl_near *near = bpf_map_lookup_elem(&vtl_near, to->addr);
    __u64 *until = bpf_map_lookup_elem(&vtl_plain, to);

    return (near && is_near(near)) || (until && *until > bpf_ktime_get_ns());
}

/* Enters a held SYN, of which vtld is told. 1: it is held, also one that was held before. 0: no
 * room. *fresh: it was not held before. */
static __always_inline int enter(const struct vtl_four_tuple *ends, int outside, int *fresh) {
    __u64 now = bpf_ktime_get_ns();
    long failed;

    *fresh = 0;
    if (is_held(ends))
        return 1;
    failed = outside ? bpf_map_update_elem(&vtl_gateway_outside, ends, &now, BPF_NOEXIST)
                     : bpf_map_update_elem(&vtl_gateway_inside, ends, &now, BPF_NOEXIST);
    *fresh = !failed;
    return !failed;
}

/* The interfaces that a SYN came in by and would leave by. Read once: the verifier takes no address
 * of a field of the context that clang keeps for a second look. */
struct way {
    __u32 in, out;
};

/* Tells vtld of a SYN; 0: no room. */
static __always_inline int tell(struct __sk_buff *skb, const struct vtl_four_tuple *ends, __u32 len,
                                struct way way, int outside, int onward,
                                const struct vtl_flow_name *flow) {
    struct vtl_gateway_syn *s = bpf_ringbuf_reserve(&vtl_gateway_syns, sizeof(*s), 0);

    if (!s)
        return 0;
    s->ifindex = outside ? way.in : way.out;
    s->out = way.out;
    s->outside = outside;
    s->onward = onward;
    s->ends = *ends;
    s->flow = *flow;
    if (load_syn(skb, s->packet, len)) {
        bpf_ringbuf_discard(s, 0);
        return 0;
    }
    s->len = len;
    bpf_ringbuf_submit(s, 0);
    return 1;
}

/* Decides on a SYN with these ends. */
static __always_inline int hold(struct __sk_buff *skb, const struct tcphdr *tcp, __u32 off,
                                const struct vtl_four_tuple *ends, struct way way) {
    struct vtl_flow_name flow = {};
    int outside, leaves, onward, fresh;
    enum syn_says says;

    says = vtl_option(skb, off, tcp->doff, &flow);
    if (says == SYN_BOUND)
        return TC_ACT_UNSPEC;
    /* Those with the option come from a VTL host, or another gateway; those without go to one. */
    outside = says != SYN_NOTHING;
    leaves = carries(way.out, &ends->to) && !is_bypassed(&ends->to);
    if (!is_held(ends)) {
        if (outside ? !carries(way.in, &ends->to) : !leaves)
            return TC_ACT_UNSPEC;
        /* A control connection is for vtld only: the host behind must not see one. */
        if (!is_served())
            return says == SYN_CONTROL ? TC_ACT_SHOT : TC_ACT_UNSPEC;
    }
    if (!enter(ends, outside, &fresh))
        return says == SYN_CONTROL ? TC_ACT_SHOT : TC_ACT_UNSPEC;
    onward = says == SYN_FLOW && leaves;
    if (tell(skb, ends, off + tcp->doff * 4, way, outside, onward, &flow) || !fresh)
        return TC_ACT_SHOT;
    if (outside)
        bpf_map_delete_elem(&vtl_gateway_outside, ends);
    else
        bpf_map_delete_elem(&vtl_gateway_inside, ends);
    return says == SYN_CONTROL ? TC_ACT_SHOT : TC_ACT_UNSPEC;
}

/* tcx egress on every interface but lo: holds SYNs of forwarded connections. Whatever it does not
 * take leaves as it would without a gateway. */
SEC("tcx/egress")
int vtl_gateway_hold(struct __sk_buff *skb) {
    struct way way = {VTL_LOAD(skb->ingress_ifindex), VTL_LOAD(skb->ifindex)};
    struct vtl_four_tuple ends;
    struct tcphdr tcp, *seen;
    __u8 *arrived;
    int v4, odd, verdict;
    __u32 off;

    /* 0: this host's own. */
    if (!way.in || way.in == way.out)
        return TC_ACT_UNSPEC;
    seen = glance(skb, &odd);
    if (surely_no_syn(seen, odd) || !load_tcp(skb, &tcp, &off, &v4) || !tcp.syn || tcp.ack)
        return TC_ACT_UNSPEC;
    /* Headers that contradict themselves: vtld could not read them. */
    if (tcp.doff < 5 || off < sizeof(struct iphdr))
        return TC_ACT_UNSPEC;
    if (load_ends(skb, v4, tcp.source, tcp.dest, &ends))
        return TC_ACT_UNSPEC;
    arrived = bpf_map_lookup_elem(&vtl_gateway_arrived, &ends);
    if (!arrived)
        return TC_ACT_UNSPEC;
    verdict = hold(skb, &tcp, off, &ends, way);
    if (verdict == TC_ACT_UNSPEC)
        *arrived = SYN_FORWARDED;
    return verdict;
}

/* The listener of held SYNs that vtld injects, whatever their destination; also where the kernel
 * answers with SYN cookies, and looks for it once more. */
SEC("sk_lookup")
int vtl_gateway_listen(struct bpf_sk_lookup *ctx) {
    __u32 slot = ctx->family == VTL_AF_INET ? VTL_STEER_4 : VTL_STEER_6;
    struct vtl_four_tuple ends = {};
    struct bpf_sock *sk;
    __u32 w[4];

    if (ctx->protocol != IPPROTO_TCP)
        return SK_PASS;
    if (ctx->family == VTL_AF_INET) {
        map_v4(ends.from.addr, ctx->remote_ip4);
        map_v4(ends.to.addr, ctx->local_ip4);
    } else {
        w[0] = VTL_LOAD(ctx->remote_ip6[0]);
        w[1] = VTL_LOAD(ctx->remote_ip6[1]);
        w[2] = VTL_LOAD(ctx->remote_ip6[2]);
        w[3] = VTL_LOAD(ctx->remote_ip6[3]);
        copy_addr(ends.from.addr, w);
        w[0] = VTL_LOAD(ctx->local_ip6[0]);
        w[1] = VTL_LOAD(ctx->local_ip6[1]);
        w[2] = VTL_LOAD(ctx->local_ip6[2]);
        w[3] = VTL_LOAD(ctx->local_ip6[3]);
        copy_addr(ends.to.addr, w);
    }
    ends.from.port = ctx->remote_port;
    ends.to.port = bpf_htons(ctx->local_port);
    if (!is_held(&ends))
        return SK_PASS;
    sk = bpf_map_lookup_elem(&vtl_gateway_listeners, &slot);
    if (!sk)
        return SK_PASS;
    bpf_sk_assign(ctx, sk, 0);
    bpf_sk_release(sk);
    return SK_PASS;
}

/* ---- later packets ---- */

/* Whether a socket in this state takes a packet that is for another host by its address. */
static __always_inline int is_live(int state) {
    return state && state != BPF_TCP_LISTEN && state != BPF_TCP_TIME_WAIT;
}

/* Whether the connection of a packet that meets a socket in TIME_WAIT is a later one, between the
 * same ends: its SYN, or a packet of one that was forwarded. */
static __always_inline int is_later(const struct vtl_four_tuple *ends, const struct tcphdr *tcp) {
    struct vtl_four_tuple back = {.from = ends->to, .to = ends->from};
    __u8 *there, *here;

    if (tcp->syn && !tcp->ack)
        return 1;
    there = bpf_map_lookup_elem(&vtl_gateway_arrived, ends);
    here = bpf_map_lookup_elem(&vtl_gateway_arrived, &back);
    return (there && *there == SYN_FORWARDED) || (here && *here == SYN_FORWARDED);
}

/* Has a packet forwarded although a socket has its ends. The kernel looks for sockets before it
 * looks for routes (early demux), and forwards no packet with a socket; but not in a packet with a
 * tunnel's metadata, which is gone once the route is found. */
static __always_inline void step_past(struct __sk_buff *skb) {
    struct bpf_tunnel_key none = {};

    bpf_skb_set_tunnel_key(skb, &none, sizeof(none), 0);
}

static __always_inline int tuple_state(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
                                       __u32 size) {
    struct bpf_sock *sk = bpf_skc_lookup_tcp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
    int state;

    if (!sk)
        return 0;
    state = sk->state;
    bpf_sk_release(sk);
    return state;
}

/* Whether the packet is an ICMP error about a connection that ends here. */
static __always_inline int is_error4(struct __sk_buff *skb) {
    struct bpf_sock_tuple tuple = {};
    struct iphdr ip, inner;
    __be16 ports[2];
    __u32 off;
    __u8 type;

    if (load_ip(skb, 0, &ip, sizeof(ip)) || ip.protocol != IPPROTO_ICMP ||
        (ip.frag_off & bpf_htons(VTL_IP_FRAGMENT)))
        return 0;
    off = ip.ihl * 4;
    /* Destination unreachable, time exceeded, parameter problem: RFC 792. */
    if (load_ip(skb, off, &type, 1) || (type != 3 && type != 11 && type != 12))
        return 0;
    off += 8;
    if (load_ip(skb, off, &inner, sizeof(inner)) || inner.protocol != IPPROTO_TCP ||
        load_ip(skb, off + inner.ihl * 4, ports, sizeof(ports)))
        return 0;
    /* The packet that is quoted went the other way. */
    tuple.ipv4.saddr = inner.daddr;
    tuple.ipv4.daddr = inner.saddr;
    tuple.ipv4.sport = ports[1];
    tuple.ipv4.dport = ports[0];
    return is_live(tuple_state(skb, &tuple, sizeof(tuple.ipv4)));
}

static __always_inline int is_error6(struct __sk_buff *skb) {
    struct bpf_sock_tuple tuple = {};
    struct ipv6hdr ip, inner;
    __be16 ports[2];
    __u8 type;

    if (load_ip(skb, 0, &ip, sizeof(ip)) || ip.nexthdr != IPPROTO_ICMPV6)
        return 0;
    /* Errors: RFC 4443, section 2.1. */
    if (load_ip(skb, sizeof(ip), &type, 1) || !type || type > 4)
        return 0;
    if (load_ip(skb, sizeof(ip) + 8, &inner, sizeof(inner)) || inner.nexthdr != IPPROTO_TCP ||
        load_ip(skb, sizeof(ip) + 8 + sizeof(inner), ports, sizeof(ports)))
        return 0;
    __builtin_memcpy(tuple.ipv6.saddr, &inner.daddr, 16);
    __builtin_memcpy(tuple.ipv6.daddr, &inner.saddr, 16);
    tuple.ipv6.sport = ports[1];
    tuple.ipv6.dport = ports[0];
    return is_live(tuple_state(skb, &tuple, sizeof(tuple.ipv6)));
}

/* Has a packet for another host's address end here. */
static __always_inline void take(struct __sk_buff *skb) {
    skb->mark = VTL_GATEWAY_MARK;
}

/* Has it end here, at this socket. The kernel must not look for the socket once more: while another
 * processor completes the handshake it may find neither the request nor the connection, but the
 * listener, which resets what the client has just opened. */
static __always_inline void take_for(struct __sk_buff *skb, struct bpf_sock *sk) {
    take(skb);
    /* Fails if the socket has just been closed: then the kernel looks for another. */
    bpf_sk_assign(skb, sk, 0);
}

/* A packet for which there is no live socket, but perhaps one in TIME_WAIT. */
static __always_inline void take_late(struct __sk_buff *skb, const struct tcphdr *tcp, int v4,
                                      int state) {
    struct vtl_four_tuple ends;
    __u8 arrived = SYN_ARRIVED;

    if (load_ends(skb, v4, tcp->source, tcp->dest, &ends))
        return;
    if (tcp->syn && !tcp->ack)
        bpf_map_update_elem(&vtl_gateway_arrived, &ends, &arrived, BPF_ANY);
    if (state == BPF_TCP_TIME_WAIT) {
        if (!is_others(skb, v4))
            return;
        if (is_later(&ends, tcp))
            step_past(skb);
        else
            take(skb);
        return;
    }
    /* The last segment of a handshake by SYN cookies has no socket yet. */
    if (!tcp->syn && is_held(&ends) && is_others(skb, v4))
        take(skb);
}

/* tcx ingress on every interface but lo: marks packets of connections that end here, and notes
 * SYNs. */
SEC("tcx/ingress")
int vtl_gateway_take(struct __sk_buff *skb) {
    struct bpf_sock *sk;
    struct tcphdr tcp;
    int v4 = skb->protocol == bpf_htons(ETH_P_IP), state = 0;
    __u32 off;

    if (!load_tcp(skb, &tcp, &off, &v4)) {
        if ((v4 ? is_error4(skb) : is_error6(skb)) && is_others(skb, v4))
            take(skb);
        return TC_ACT_UNSPEC;
    }
    sk = receiver(skb, tcp.source, tcp.dest, v4);
    if (sk) {
        state = sk->state;
        if (is_live(state) && is_others(skb, v4))
            take_for(skb, sk);
        bpf_sk_release(sk);
    }
    if (!is_live(state))
        take_late(skb, &tcp, v4, state);
    return TC_ACT_UNSPEC;
}
