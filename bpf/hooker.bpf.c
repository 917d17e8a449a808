// SPDX-License-Identifier: GPL-2.0-only
/*
 * The Hooker: carries connections of unmodified TCP applications. Captures their connects, holds
 * the SYN of a captured connect until the real destination has answered vtld, discovers peers with
 * VTL by a TCP option, and steers their connections to vtld. Ignores sockets outside the daemon's
 * network namespace.
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "vtl/hooker.h"
#include "vtl/receiver.h"
#include "vtl/syn.h"
#include "vtl/tf.h"

char _license[] SEC("license") = "GPL";

const volatile struct vtl_hook_config config SEC(".rodata.config");

#include "vtl/capture.h"
#include "vtl/outside.h"

/* Remote client, by the ends of vtld's connection to a local application that represents it. vtld
 * writes after bind(); vtl_accepted removes the entry, or vtld if the connection was never
 * accepted. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(max_entries, 131072);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, struct vtl_four_tuple);
    __type(value, struct vtl_endpoint);
} vtl_pairs SEC(".maps");

/* Remote client, in the socket storage of the application's end of such a connection: unlike ports,
 * never reused for another one. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct vtl_endpoint);
} vtl_shown SEC(".maps");

/* Hooked server ports (host order): 1 if vtld takes over connections from peers with VTL. */
struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 65536);
    __type(key, __u32);
    __type(value, __u8);
} vtl_ports SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_SOCKMAP);
    __uint(max_entries, VTL_STEER_SLOTS);
    __type(key, __u32);
    __type(value, __u64);
} vtl_steer SEC(".maps");

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 20);
} vtl_syns SEC(".maps");

/* ---- client capture ---- */

/* Whether a hook sends connects of this socket to vtld; sets the policy. Marks the socket as
 * hooked, so that rules ignore it. */
static __always_inline int is_hooked(struct bpf_sock_addr *ctx, __u32 *policy) {
    __u32 none = 0, *named;

    named = bpf_sk_storage_get(&vtl_policies, ctx->sk, &none, BPF_SK_STORAGE_GET_F_CREATE);
    *policy = named ? *named : none;
    return *policy != VTL_POLICY_PLAIN;
}

SEC("cgroup/connect4")
int vtl_connect4(struct bpf_sock_addr *ctx) {
    struct vtl_endpoint dest;
    __u32 policy;

    if (!is_tcp_of_others(ctx) || is_taken4(ctx))
        return 1;
    destination4(ctx, &dest);
    if (is_hooked(ctx, &policy) && take4(ctx, &dest, policy))
        return 1;
    bpf_sk_storage_delete(&vtl_captured, ctx->sk);
    return goes_on(&dest, policy);
}

SEC("cgroup/connect6")
int vtl_connect6(struct bpf_sock_addr *ctx) {
    struct vtl_endpoint dest;
    __u32 policy;

    destination6(ctx, &dest);
    if (!is_tcp_of_others(ctx) || is_taken6(&dest))
        return 1;
    if (is_hooked(ctx, &policy) && take6(ctx, &dest, policy))
        return 1;
    bpf_sk_storage_delete(&vtl_captured, ctx->sk);
    return goes_on(&dest, policy);
}

/* ---- addresses shown to applications ---- */

static __always_inline void show4(struct bpf_sock_addr *ctx, const __u8 addr[16]) {
    ctx->user_ip4 = ((const __u32 *)addr)[3];
}

static __always_inline void show6(struct bpf_sock_addr *ctx, const __u8 addr[16]) {
    const __u32 *w = (const __u32 *)addr;
    ctx->user_ip6[0] = w[0];
    ctx->user_ip6[1] = w[1];
    ctx->user_ip6[2] = w[2];
    ctx->user_ip6[3] = w[3];
}

/* Address for getpeername; NULL: the kernel's. `ends`: of the connection, as a server sees it. */
static __always_inline struct vtl_endpoint *true_peer(struct bpf_sock_addr *ctx,
                                                      struct vtl_four_tuple *ends) {
    struct vtl_endpoint *client;
    struct vtl_captured *c;

    c = bpf_sk_storage_get(&vtl_captured, ctx->sk, NULL, 0);
    if (c)
        return &c->dest;
    client = bpf_sk_storage_get(&vtl_shown, ctx->sk, NULL, 0);
    if (client)
        return client;
    if (bpf_get_netns_cookie(ctx) != config.netns_cookie)
        return NULL;
    /* Fallback if vtl_accepted could not allocate storage. */
    return bpf_map_lookup_elem(&vtl_pairs, ends);
}

SEC("cgroup/getpeername4")
int vtl_getpeername4(struct bpf_sock_addr *ctx) {
    struct vtl_four_tuple ends = {.from.port = ctx->user_port};
    struct bpf_sock *sk = ctx->sk;
    struct vtl_endpoint *peer;

    if (!sk)
        return 1;
    map_v4(ends.from.addr, ctx->user_ip4);
    map_v4(ends.to.addr, sk->src_ip4);
    ends.to.port = bpf_htons(sk->src_port);
    peer = true_peer(ctx, &ends);
    if (peer) {
        show4(ctx, peer->addr);
        ctx->user_port = peer->port;
    }
    return 1;
}

SEC("cgroup/getpeername6")
int vtl_getpeername6(struct bpf_sock_addr *ctx) {
    struct vtl_four_tuple ends = {.from.port = ctx->user_port};
    __u32 w[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
    struct bpf_sock *sk = ctx->sk;
    struct vtl_endpoint *peer;

    if (!sk)
        return 1;
    copy_addr(ends.from.addr, w);
    w[0] = VTL_LOAD(sk->src_ip6[0]);
    w[1] = VTL_LOAD(sk->src_ip6[1]);
    w[2] = VTL_LOAD(sk->src_ip6[2]);
    w[3] = VTL_LOAD(sk->src_ip6[3]);
    copy_addr(ends.to.addr, w);
    ends.to.port = bpf_htons(sk->src_port);
    peer = true_peer(ctx, &ends);
    if (peer) {
        show6(ctx, peer->addr);
        ctx->user_port = peer->port;
    }
    return 1;
}

/* Remote address. Word by word: the verifier rejects reading two at once. */
static __always_inline void remote_address(struct bpf_sock_ops *ops, __u8 addr[16]) {
    __u32 w[4];

    if (ops->family == VTL_AF_INET) {
        map_v4(addr, ops->remote_ip4);
        return;
    }
    w[0] = VTL_LOAD(ops->remote_ip6[0]);
    w[1] = VTL_LOAD(ops->remote_ip6[1]);
    w[2] = VTL_LOAD(ops->remote_ip6[2]);
    w[3] = VTL_LOAD(ops->remote_ip6[3]);
    copy_addr(addr, w);
}

static __always_inline void local_address(struct bpf_sock_ops *ops, __u8 addr[16]) {
    __u32 w[4];

    if (ops->family == VTL_AF_INET) {
        map_v4(addr, ops->local_ip4);
        return;
    }
    w[0] = VTL_LOAD(ops->local_ip6[0]);
    w[1] = VTL_LOAD(ops->local_ip6[1]);
    w[2] = VTL_LOAD(ops->local_ip6[2]);
    w[3] = VTL_LOAD(ops->local_ip6[3]);
    copy_addr(addr, w);
}

/* Attached for all processes: stores the client of a connection that vtld opened to a local
 * application at once, since the application may ask after vtld has closed its end and the port is
 * reused. accept() waits for the socket's lock, under which this program runs. */
SEC("sockops")
int vtl_accepted(struct bpf_sock_ops *ops) {
    struct vtl_four_tuple ends = {};
    struct vtl_endpoint *client;
    struct bpf_sock *sk;

    if (ops->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB || !ops->is_fullsock ||
        bpf_get_netns_cookie(ops) != config.netns_cookie)
        return 1;
    remote_address(ops, ends.from.addr);
    local_address(ops, ends.to.addr);
    ends.from.port = bpf_htons(bpf_ntohl(ops->remote_port));
    ends.to.port = bpf_htons(ops->local_port);
    client = bpf_map_lookup_elem(&vtl_pairs, &ends);
    sk = ops->sk;
    if (client && sk && bpf_sk_storage_get(&vtl_shown, sk, client, BPF_SK_STORAGE_GET_F_CREATE))
        bpf_map_delete_elem(&vtl_pairs, &ends);
    return 1;
}

/* Adds a connection's packets, with decay. `min`: limit of affected packets; one connection adds
 * a quarter of it at most. */
static __always_inline void add_share(struct vtl_ratio *share, __u64 hit, __u64 all, __u32 min) {
    if (hit > min / 4) {
        all = all * (min / 4) / hit;
        hit = min / 4;
    }
    if (all > VTL_NEAR_LONG)
        all = VTL_NEAR_LONG;
    if (share->all > VTL_NEAR_LONG) {
        share->hit /= 2;
        share->all /= 2;
    }
    share->hit += hit;
    share->all += all;
}

static __always_inline int is_much(const struct vtl_ratio *share, __u32 of, __u32 min) {
    return share->hit >= min && share->hit * of > share->all;
}

/* Attached for all processes: monitors connections to near hosts. Counts are approximate: CPUs
 * race. */
SEC("sockops")
int vtl_watch_near(struct bpf_sock_ops *ops) {
    __u64 packets, cookie, late = 0;
    struct vtl_near *near;
    struct tcp_sock *tcp;
    struct bpf_sock *sk;
    __u8 addr[16];

    if (ops->op != BPF_SOCK_OPS_TCP_CONNECT_CB && ops->op != BPF_SOCK_OPS_RETRANS_CB &&
        ops->op != BPF_SOCK_OPS_STATE_CB)
        return 1;
    if (bpf_get_netns_cookie(ops) != config.netns_cookie)
        return 1;
    remote_address(ops, addr);
    near = bpf_map_lookup_elem(&vtl_near, addr);
    if (!near || !is_near(near))
        return 1;
    packets = (__u64)ops->segs_in + ops->segs_out;
    switch (ops->op) {
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
        /* Not vtld's own connections: their bytes mostly go by carriers. */
        cookie = bpf_get_socket_cookie(ops);
        if (bpf_map_lookup_elem(&vtl_own, &cookie))
            break;
        bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RETRANS_CB_FLAG |
                                           BPF_SOCK_OPS_STATE_CB_FLAG);
        break;
    case BPF_SOCK_OPS_RETRANS_CB:
        if (packets > VTL_NEAR_LONG && (__u64)ops->total_retrans * VTL_NEAR_RETRANSMITTED > packets)
            near->spoiled = bpf_ktime_get_ns();
        break;
    case BPF_SOCK_OPS_STATE_CB:
        /* Others may have set the state callback as well, but not the one for retransmissions. */
        if (!(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_RETRANS_CB_FLAG) ||
            ops->args[1] != BPF_TCP_CLOSE || ops->args[0] == BPF_TCP_SYN_SENT)
            break;
        add_share(&near->retransmitted, ops->total_retrans, packets, VTL_NEAR_RETRANSMITTED_MIN);
        sk = ops->sk;
        tcp = sk ? (struct tcp_sock *)bpf_skc_to_tcp_sock(sk) : NULL;
        if (tcp && bpf_core_field_exists(tcp->rcv_ooopack))
            late = BPF_CORE_READ(tcp, rcv_ooopack);
        add_share(&near->reordered, late, packets, VTL_NEAR_REORDERED_MIN);
        /* All ones: no sample. */
        if (ops->rtt_min != ~0u)
            near->slow = ops->rtt_min > config.far_us ? near->slow + 1 : 0;
        if (near->slow >= VTL_NEAR_SLOW ||
            is_much(&near->retransmitted, VTL_NEAR_RETRANSMITTED, VTL_NEAR_RETRANSMITTED_MIN) ||
            is_much(&near->reordered, VTL_NEAR_REORDERED, VTL_NEAR_REORDERED_MIN))
            near->spoiled = bpf_ktime_get_ns();
        else /* Connections extend the time as long as the host is near. */
            near->until = bpf_ktime_get_ns() + config.near_ns;
        break;
    }
    return 1;
}

/* Address for getsockname; 0: the kernel's. `local`: local end of the connection to the real
 * destination. */
static __always_inline int true_local(struct bpf_sock_addr *ctx, struct vtl_endpoint *local) {
    struct vtl_endpoint *now;
    struct vtl_captured *c;
    __u64 cookie;

    if (!ctx->sk)
        return 0;
    c = bpf_sk_storage_get(&vtl_captured, ctx->sk, NULL, 0);
    if (!c)
        return 0;
    cookie = bpf_get_socket_cookie(ctx);
    now = bpf_map_lookup_elem(&vtl_locals, &cookie);
    /* LRU entries may be evicted later, hence the copy. */
    if (now)
        c->local = *now;
    if (!c->local.port)
        return 0;
    *local = c->local;
    if (c->has_port)
        local->port = ctx->user_port;
    return 1;
}

SEC("cgroup/getsockname4")
int vtl_getsockname4(struct bpf_sock_addr *ctx) {
    struct vtl_endpoint local;

    if (true_local(ctx, &local)) {
        show4(ctx, local.addr);
        ctx->user_port = local.port;
    }
    return 1;
}

SEC("cgroup/getsockname6")
int vtl_getsockname6(struct bpf_sock_addr *ctx) {
    struct vtl_endpoint local;

    if (true_local(ctx, &local)) {
        show6(ctx, local.addr);
        ctx->user_port = local.port;
    }
    return 1;
}

/* ---- SYN hold ---- */

/* Spins until the first data of a captured connection, or its FIN, will find the socket; `tcp` is
 * from glance(). vtld's CPU does the handshake, and the application may send on another CPU as soon
 * as the SYN/ACK is there. inet_ehash_insert() of Linux 6.18 removes the request from the table
 * just before it inserts the connection: a lookup in between finds the listener, which answers with
 * a RST. */
static __always_inline void await_accepted(struct __sk_buff *skb, const struct tcphdr *tcp) {
    /* Many times the usual wait. Reached in full only if the SYN/ACK is acknowledged with data
     * only. */
    enum { LOOKUPS = 1000 };
    struct bpf_sock *sk = skb->sk;
    struct bpf_tcp_sock *from;
    __be16 sport, dport;
    int v4, turn;

    v4 = skb->protocol == bpf_htons(ETH_P_IP);
    if (tcp->dest != bpf_htons(v4 ? config.capture_port4 : config.capture_port6) || !sk)
        return;
    /* The handshake's bare ACK is for the request. */
    if (!tcp->fin && (void *)tcp - (void *)(long)skb->data + tcp->doff * 4 >= skb->len)
        return;
    sport = tcp->source;
    dport = tcp->dest;
    sk = bpf_sk_fullsock(sk);
    from = sk ? bpf_tcp_sock(sk) : NULL;
    /* Later segments are sent by the established connection. */
    if (!from || from->segs_in > 1)
        return;
    vtl_for(turn, 0, LOOKUPS) {
        int state = receiver_state(skb, sport, dport, v4, NULL);
        if (state != BPF_TCP_LISTEN && state != BPF_TCP_NEW_SYN_RECV)
            return;
    }
}

/* tcx egress on lo: holds the SYNs of captured connects. */
SEC("tcx/egress")
int vtl_hold_syn(struct __sk_buff *skb) {
    /* A locally administered address that lo does not have. */
    static const __u8 nobody[ETH_ALEN] = {0x02, 0, 0, 0, 0, 0x01};
    struct vtl_captured *c = NULL;
    struct vtl_exe *exe = NULL;
    struct tcphdr tcp, *seen;
    struct bpf_sock *sk;
    struct vtl_syn *s;
    __u32 off, len;
    int v4, odd;

    seen = glance(skb, &odd);
    if (surely_no_syn(seen, odd)) {
        if (seen)
            await_accepted(skb, seen);
        return TC_ACT_UNSPEC;
    }
    if (!load_tcp(skb, &tcp, &off, &v4) || !tcp.syn || tcp.ack)
        return TC_ACT_UNSPEC;
    if (tcp.dest != bpf_htons(v4 ? config.capture_port4 : config.capture_port6))
        return TC_ACT_UNSPEC;
    /* vtld's own, or a gateway's, to a port of another host. */
    if (skb->mark == config.mark || skb->mark == VTL_GATEWAY_INJECT)
        return TC_ACT_UNSPEC;

    /* Without room in the ring buffer the SYN is lost; the application retransmits it. */
    s = bpf_ringbuf_reserve(&vtl_syns, sizeof(*s), 0);
    if (!s)
        return TC_ACT_SHOT;
    __builtin_memset(&s->dest, 0, sizeof(s->dest));
    __builtin_memset(&s->exe, 0, sizeof(s->exe));
    s->policy = 0;
    s->cookie = bpf_get_socket_cookie(skb);
    s->mark = skb->mark;
    sk = skb->sk;
    if (sk)
        sk = bpf_sk_fullsock(sk);
    if (sk) {
        c = bpf_sk_storage_get(&vtl_captured, sk, NULL, 0);
        exe = bpf_sk_storage_get(&vtl_exes, sk, NULL, 0);
    }
    if (c) {
        s->dest = c->dest;
        s->policy = c->policy;
    }
    if (exe)
        s->exe = *exe;
    len = off + tcp.doff * 4;
    if (load_syn(skb, s->packet, len)) {
        bpf_ringbuf_discard(s, 0);
        return TC_ACT_SHOT;
    }
    s->len = len;
    bpf_ringbuf_submit(s, 0);

    /* Swallow the packet. Dropping it here would signal congestion to TCP, and the connection would
     * start with a reduced window; packets for another host's Ethernet address are silently dropped
     * on input. */
    bpf_skb_store_bytes(skb, 0, nobody, sizeof(nobody), 0);
    return bpf_redirect(VTL_LOOPBACK_IFINDEX, BPF_F_INGRESS);
}

/* ---- discovery ---- */

/* Flags of a SYN/ACK, bpf_sock_ops.skb_tcp_flags. */
enum { SYN_ACK = 0x12 };

/* Reads the peer's option; returns its length, 0 if there is none. */
static __always_inline int peers_option(struct bpf_sock_ops *ops, struct option *opt, __u64 flags) {
    int len;

    /* The search key: kind and experiment identifier. */
    *opt = (struct option){VTL_OPT_KIND, 4, bpf_htons(VTL_OPT_EXID), {0, 0}};
    len = bpf_load_hdr_opt(ops, opt, sizeof(*opt), flags);
    return len == VTL_OPT_LEN ? len : 0;
}

static __always_inline void set_writing(struct bpf_sock_ops *ops, int on) {
    __u32 flags = ops->bpf_sock_ops_cb_flags & ~BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG;

    bpf_sock_ops_cb_flags_set(ops, on ? flags | BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG : flags);
}

/* Whether vtld answers the option on this connection: by its port, or as a gateway. */
static __always_inline int is_answered(struct bpf_sock_ops *ops) {
    __u32 port = ops->local_port;
    __u8 *hooked = bpf_map_lookup_elem(&vtl_ports, &port);
    struct vtl_four_tuple ends = {};

    if (hooked && *hooked)
        return 1;
    remote_address(ops, ends.from.addr);
    local_address(ops, ends.to.addr);
    ends.from.port = bpf_htons(bpf_ntohl(ops->remote_port));
    ends.to.port = bpf_htons(ops->local_port);
    return !!bpf_map_lookup_elem(&vtl_gateway_outside, &ends);
}

/* Option for the segment about to be sent; returns its length, 0 if none. Active side: in the SYN,
 * and in all segments until data was acknowledged, so that a lost third ACK does not hide it.
 * Passive side: in the SYN/ACK, if the SYN had it, with the same flow. */
static __always_inline int own_option(struct bpf_sock_ops *ops, struct option *opt) {
    struct vtl_own_socket *own;
    __u64 cookie;

    if (ops->skb_tcp_flags == SYN_ACK)
        return is_answered(ops) ? peers_option(ops, opt, BPF_LOAD_HDR_OPT_TCP_SYN) : 0;
    cookie = bpf_get_socket_cookie(ops);
    own = bpf_map_lookup_elem(&vtl_own, &cookie);
    if (!own || !(own->flags & VTL_SOCK_OFFER) || !(own->flags & VTL_SOCK_FLOW))
        return 0;
    opt->kind = VTL_OPT_KIND;
    opt->len = VTL_OPT_LEN;
    opt->exid = bpf_htons(VTL_OPT_EXID);
    opt->flow = own->flow;
    return opt->len;
}

/* Whether a middlebox or this host's own packet filter seems to drop segments with the option:
 * after the handshake, VTL_OPTION_MS and eight round trips without an acknowledgement of data since
 * any was sent or anything received, or six segments received. Less may be due to an outage, and
 * without the option the peer would take the connection for a plain one. Retransmissions are not
 * counted: what the own filter drops is unsent for the kernel, which probes (RFC 9293, 3.8.6.1).
 * Not for control connections, which are useless without the option. */
static __always_inline int is_option_blocked(struct bpf_sock_ops *ops, struct vtl_own_socket *own) {
    __u32 limit, now = bpf_ktime_get_ns() / 1000000 | 1; /* never 0 */

    if (ops->state != BPF_TCP_ESTABLISHED || !(own->flags & VTL_SOCK_FLOW) || !own->flow.number)
        return 0;
    if (!own->unheard_since && (ops->data_segs_out || ops->segs_in > 1))
        own->unheard_since = now;
    /* srtt_us: eighths of a microsecond. */
    limit = VTL_OPTION_MS + ops->srtt_us / 1000;
    return ops->segs_in > 5 || (own->unheard_since && now - own->unheard_since > limit);
}

/* Bounds the retransmission timeout from below (VTL_RTO_MIN_MS): for a peer that runs VTL, or for
 * any other host. */
static __always_inline void set_min_rto(struct bpf_sock_ops *ops, int is_peer) {
    /* srtt_us: eighths of a microsecond. */
    int us = ops->srtt_us / 8 + ops->srtt_us / 32 + VTL_RTO_SLACK_MS * 1000;

    if (us < VTL_RTO_MIN_MS * 1000)
        us = VTL_RTO_MIN_MS * 1000;
    if (us > VTL_RTO_KERNEL_MS * 1000 || !is_peer)
        us = VTL_RTO_KERNEL_MS * 1000;
    bpf_setsockopt(ops, IPPROTO_TCP, TCP_BPF_RTO_MIN, &us, sizeof(us));
}

SEC("sockops")
int vtl_sockops(struct bpf_sock_ops *ops) {
    struct vtl_own_socket *own, accepted;
    struct option opt = {};
    __u64 cookie;
    int len;

    if (bpf_get_netns_cookie(ops) != config.netns_cookie)
        return 1;
    switch (ops->op) {
    case BPF_SOCK_OPS_TIMEOUT_INIT:
        /* Retransmit a lost SYN of discovery after 300 ms instead of 1 s. */
        cookie = bpf_get_socket_cookie(ops);
        own = bpf_map_lookup_elem(&vtl_own, &cookie);
        if (own && (own->flags & VTL_SOCK_OFFER))
            ops->reply = config.ticks * 3 / 10;
        break;
    case BPF_SOCK_OPS_TCP_CONNECT_CB:
    case BPF_SOCK_OPS_TCP_LISTEN_CB:
        cookie = bpf_get_socket_cookie(ops);
        own = bpf_map_lookup_elem(&vtl_own, &cookie);
        if (own && (own->flags & VTL_SOCK_OFFER)) {
            set_writing(ops, 1);
            /* Accepted connections inherit it, and their first sample of the round trip counts. */
            if (ops->op == BPF_SOCK_OPS_TCP_LISTEN_CB)
                set_min_rto(ops, 1);
            bpf_sock_ops_cb_flags_set(ops, ops->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_STATE_CB_FLAG);
        }
        break;
    case BPF_SOCK_OPS_STATE_CB:
        if (ops->args[1] == BPF_TCP_CLOSE) {
            cookie = bpf_get_socket_cookie(ops);
            bpf_map_delete_elem(&vtl_own, &cookie);
        }
        break;
    case BPF_SOCK_OPS_HDR_OPT_LEN_CB:
        cookie = bpf_get_socket_cookie(ops);
        own = bpf_map_lookup_elem(&vtl_own, &cookie);
        /* bytes_acked includes the SYN. */
        if (own && is_option_blocked(ops, own)) {
            own->flags = (own->flags & ~VTL_SOCK_OFFER) | VTL_SOCK_GAVE_UP;
            set_writing(ops, 0);
        } else if (ops->is_fullsock && ops->bytes_acked > 1) {
            set_writing(ops, 0);
            bpf_map_delete_elem(&vtl_own, &cookie);
        } else {
            len = own_option(ops, &opt);
            if (len)
                bpf_reserve_hdr_opt(ops, len, 0);
        }
        break;
    case BPF_SOCK_OPS_WRITE_HDR_OPT_CB:
        len = own_option(ops, &opt);
        if (len)
            bpf_store_hdr_opt(ops, &opt, sizeof(opt), 0);
        break;
    case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
        if (!(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG))
            break;
        cookie = bpf_get_socket_cookie(ops);
        own = bpf_map_lookup_elem(&vtl_own, &cookie);
        if (!own || !(own->flags & VTL_SOCK_OFFER))
            break;
        if (peers_option(ops, &opt, 0)) {
            own->flags |= VTL_SOCK_PEER;
            set_min_rto(ops, 1);
        } else {
            set_writing(ops, 0);
        }
        break;
    case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
        /* Inherited from the steering listener. */
        if (!(ops->bpf_sock_ops_cb_flags & BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG) || !is_answered(ops))
            break;
        set_writing(ops, 0);
        cookie = bpf_get_socket_cookie(ops);
        len = peers_option(ops, &opt, 0);
        set_min_rto(ops, len);
        accepted.flags = VTL_SOCK_LISTEN | (len ? VTL_SOCK_PEER | VTL_SOCK_FLOW : 0);
        accepted.flow = opt.flow;
        accepted.unheard_since = 0;
        bpf_map_update_elem(&vtl_own, &cookie, &accepted, BPF_ANY);
        break;
    }
    return 1;
}

/* ---- server steering ---- */

/* tcx ingress on every interface but lo: steers SYNs with the option to vtld. */
SEC("tcx/ingress")
int vtl_steer_syn(struct __sk_buff *skb) {
    struct tcphdr tcp, *seen;
    struct bpf_sock *sk;
    __u32 off, port, slot;
    int v4, odd, state, refuses = 0;
    struct vtl_flow_name flow;
    enum syn_says says;
    __u8 *hooked;

    seen = glance(skb, &odd);
    if (surely_no_syn(seen, odd) || !load_tcp(skb, &tcp, &off, &v4) || !tcp.syn || tcp.ack)
        return TC_ACT_UNSPEC;
    port = bpf_ntohs(tcp.dest);
    hooked = bpf_map_lookup_elem(&vtl_ports, &port);
    if (!hooked || !*hooked)
        return TC_ACT_UNSPEC;
    says = vtl_option(skb, off, tcp.doff, &flow);
    if ((says != SYN_FLOW && says != SYN_CONTROL) || is_others(skb, v4))
        return TC_ACT_UNSPEC;
    /* Control connections are for vtld only; an application must not see one. The peer
     * retransmits. */
    if (!is_served())
        return says == SYN_CONTROL ? TC_ACT_SHOT : TC_ACT_UNSPEC;

    /* Only if the application listens, so that a closed port still answers with a RST, and its
     * accept queue has room, so that a full one still drops silently, and it wants no signatures
     * (TCP-MD5, TCP-AO), which vtld would stand in for; and only for new connections:
     * a SYN for an existing one is left to TCP. A control connection needs no listener: its flows
     * may be from when there was one. */
    state = receiver_state(skb, tcp.source, tcp.dest, v4, &refuses);
    if (says == SYN_CONTROL ? state && state != BPF_TCP_LISTEN : state != BPF_TCP_LISTEN || refuses)
        return TC_ACT_UNSPEC;

    slot = v4 ? VTL_STEER_4 : VTL_STEER_6;
    sk = bpf_map_lookup_elem(&vtl_steer, &slot);
    if (!sk)
        return TC_ACT_UNSPEC;
    bpf_sk_assign(skb, sk, 0);
    bpf_sk_release(sk);
    return TC_ACT_UNSPEC;
}
