/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * The kernel's types and constants that eBPF programs use, and no others: contexts of programs,
 * protocol headers, maps, flags. What a distribution has in /usr/include/linux differs from release
 * to release (struct bpf_iter_num is there since 6.4); programs that include this header instead
 * compile alike everywhere. Neither can be included beside the other.
 *
 * Layouts and values are the kernel's user ABI (include/uapi/linux), which does not change. The
 * tests of crates/vtl-bpf compare each of them with the headers of the system.
 */
#ifndef __VMLINUX_H__
#define __VMLINUX_H__

typedef signed char __s8;
typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u16 __le16;
typedef __u32 __le32;
typedef __u64 __le64;
typedef __u16 __sum16;
typedef __u32 __wsum;

/* ---- maps: linux/bpf.h ---- */

enum bpf_map_type {
    BPF_MAP_TYPE_HASH = 1,
    BPF_MAP_TYPE_ARRAY = 2,
    BPF_MAP_TYPE_PROG_ARRAY = 3,
    BPF_MAP_TYPE_PERCPU_ARRAY = 6,
    BPF_MAP_TYPE_LRU_HASH = 9,
    BPF_MAP_TYPE_LPM_TRIE = 11,
    BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
    BPF_MAP_TYPE_SOCKMAP = 15,
    BPF_MAP_TYPE_SK_STORAGE = 24,
    BPF_MAP_TYPE_RINGBUF = 27,
};

/* Flags of maps. */
enum {
    BPF_F_NO_PREALLOC = 1 << 0,
    BPF_F_MMAPABLE = 1 << 10,
    BPF_F_INNER_MAP = 1 << 12,
};

/* ---- flags of helpers: linux/bpf.h ---- */

enum { BPF_ANY = 0, BPF_NOEXIST = 1 };
enum { BPF_F_INGRESS = 1 << 0 };
enum { BPF_F_CURRENT_NETNS = -1L };
enum { BPF_SK_STORAGE_GET_F_CREATE = 1 << 0 };
enum { BPF_RB_NO_WAKEUP = 1 << 0, BPF_RB_FORCE_WAKEUP = 1 << 1 };
enum bpf_adj_room_mode { BPF_ADJ_ROOM_NET = 0 };
enum bpf_hdr_start_off { BPF_HDR_START_NET = 1 };
enum { BPF_LOAD_HDR_OPT_TCP_SYN = 1 << 0 };

/* Results of bpf_fib_lookup(). */
enum { BPF_FIB_LKUP_RET_NOT_FWDED = 4, BPF_FIB_LKUP_RET_FWD_DISABLED = 5 };

/* An open-coded iterator over numbers (Linux 6.4): bpf_for() of bpf_helpers.h. */
struct bpf_iter_num {
    __u64 __opaque[1];
} __attribute__((aligned(8)));

/* ---- contexts of programs: linux/bpf.h ---- */

struct bpf_sock;
struct bpf_flow_keys;

/* A pointer in a context, which the verifier gives its true size. */
#define __bpf_md_ptr(type, name)                                                                   \
    union {                                                                                        \
        type name;                                                                                 \
        __u64 : 64;                                                                                \
    } __attribute__((aligned(8)))

/* tcx. Addresses and remote_port in network byte order. */
struct __sk_buff {
    __u32 len;
    __u32 pkt_type;
    __u32 mark;
    __u32 queue_mapping;
    __u32 protocol; /* network byte order */
    __u32 vlan_present;
    __u32 vlan_tci;
    __u32 vlan_proto;
    __u32 priority;
    __u32 ingress_ifindex;
    __u32 ifindex;
    __u32 tc_index;
    __u32 cb[5];
    __u32 hash;
    __u32 tc_classid;
    __u32 data;
    __u32 data_end;
    __u32 napi_id;
    __u32 family;
    __u32 remote_ip4;
    __u32 local_ip4;
    __u32 remote_ip6[4];
    __u32 local_ip6[4];
    __u32 remote_port;
    __u32 local_port; /* host byte order */
    __u32 data_meta;
    __bpf_md_ptr(struct bpf_flow_keys *, flow_keys);
    __u64 tstamp;
    __u32 wire_len;
    __u32 gso_segs;
    __bpf_md_ptr(struct bpf_sock *, sk);
    __u32 gso_size;
    __u8 tstamp_type;
    __u32 : 24;
    __u64 hwtstamp;
};

/* __sk_buff.pkt_type of a frame for another Ethernet address: linux/if_packet.h. */
#define PACKET_OTHERHOST 3

/* Verdicts of tcx: linux/pkt_cls.h. TC_ACT_UNSPEC is TCX_NEXT, TC_ACT_SHOT is TCX_DROP. */
#define TC_ACT_UNSPEC (-1)
#define TC_ACT_SHOT 2

/* XDP. */
struct xdp_md {
    __u32 data;
    __u32 data_end;
    __u32 data_meta;
    __u32 ingress_ifindex;
    __u32 rx_queue_index;
    __u32 egress_ifindex;
};

enum xdp_action {
    XDP_ABORTED = 0,
    XDP_DROP = 1,
    XDP_PASS = 2,
    XDP_TX = 3,
    XDP_REDIRECT = 4,
};

/* cgroup/connect4, connect6, getpeername and getsockname. Addresses and ports in network byte
 * order. */
struct bpf_sock_addr {
    __u32 user_family;
    __u32 user_ip4;
    __u32 user_ip6[4];
    __u32 user_port;
    __u32 family;
    __u32 type;
    __u32 protocol;
    __u32 msg_src_ip4;
    __u32 msg_src_ip6[4];
    __bpf_md_ptr(struct bpf_sock *, sk);
};

/* sockops. Addresses and remote_port in network byte order. */
struct bpf_sock_ops {
    __u32 op;
    union {
        __u32 args[4];
        __u32 reply;
        __u32 replylong[4];
    };
    __u32 family;
    __u32 remote_ip4;
    __u32 local_ip4;
    __u32 remote_ip6[4];
    __u32 local_ip6[4];
    __u32 remote_port;
    __u32 local_port; /* host byte order */
    __u32 is_fullsock;
    __u32 snd_cwnd;
    __u32 srtt_us; /* us << 3 */
    __u32 bpf_sock_ops_cb_flags;
    __u32 state;
    __u32 rtt_min;
    __u32 snd_ssthresh;
    __u32 rcv_nxt;
    __u32 snd_nxt;
    __u32 snd_una;
    __u32 mss_cache;
    __u32 ecn_flags;
    __u32 rate_delivered;
    __u32 rate_interval_us;
    __u32 packets_out;
    __u32 retrans_out;
    __u32 total_retrans;
    __u32 segs_in;
    __u32 data_segs_in;
    __u32 segs_out;
    __u32 data_segs_out;
    __u32 lost_out;
    __u32 sacked_out;
    __u32 sk_txhash;
    __u64 bytes_received;
    __u64 bytes_acked;
    __bpf_md_ptr(struct bpf_sock *, sk);
    __bpf_md_ptr(void *, skb_data);
    __bpf_md_ptr(void *, skb_data_end);
    __u32 skb_len;
    __u32 skb_tcp_flags;
};

/* bpf_sock_ops.op: events of a sockops program. */
enum {
    BPF_SOCK_OPS_TIMEOUT_INIT = 1,
    BPF_SOCK_OPS_TCP_CONNECT_CB = 3,
    BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB = 4,
    BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB = 5,
    BPF_SOCK_OPS_NEEDS_ECN = 6,
    BPF_SOCK_OPS_RETRANS_CB = 9,
    BPF_SOCK_OPS_STATE_CB = 10,
    BPF_SOCK_OPS_TCP_LISTEN_CB = 11,
    BPF_SOCK_OPS_HDR_OPT_LEN_CB = 14,
    BPF_SOCK_OPS_WRITE_HDR_OPT_CB = 15,
};

/* bpf_sock_ops_cb_flags. */
enum {
    BPF_SOCK_OPS_RETRANS_CB_FLAG = 1 << 1,
    BPF_SOCK_OPS_STATE_CB_FLAG = 1 << 2,
    BPF_SOCK_OPS_WRITE_HDR_OPT_CB_FLAG = 1 << 6,
};

/* struct bpf_sock.state. */
enum {
    BPF_TCP_ESTABLISHED = 1,
    BPF_TCP_SYN_SENT = 2,
    BPF_TCP_TIME_WAIT = 6,
    BPF_TCP_CLOSE = 7,
    BPF_TCP_LISTEN = 10,
    BPF_TCP_NEW_SYN_RECV = 12
};

/* ---- sockets: linux/bpf.h, linux/tcp.h ---- */

/* A socket, by bpf_sk_lookup_tcp() and its kin. */
struct bpf_sock {
    __u32 bound_dev_if;
    __u32 family;
    __u32 type;
    __u32 protocol;
    __u32 mark;
    __u32 priority;
    __u32 src_ip4;
    __u32 src_ip6[4];
    __u32 src_port; /* host byte order */
    __be16 dst_port;
    __u16 : 16;
    __u32 dst_ip4;
    __u32 dst_ip6[4];
    __u32 state;
    __s32 rx_queue_mapping;
};

/* sk_lookup: the packet whose socket is looked up. IPv4 addresses and remote_port in network byte
 * order. */
struct bpf_sk_lookup {
    __u64 cookie;
    __u32 family;
    __u32 protocol;
    __u32 remote_ip4;
    __u32 remote_ip6[4];
    __be16 remote_port;
    __u16 : 16;
    __u32 local_ip4;
    __u32 local_ip6[4];
    __u32 local_port; /* host byte order */
    __u32 ingress_ifindex;
};

enum sk_action { SK_DROP = 0, SK_PASS = 1 };

/* TCP's part of one, by bpf_tcp_sock(). */
struct bpf_tcp_sock {
    __u32 snd_cwnd;
    __u32 srtt_us; /* us << 3 */
    __u32 rtt_min;
    __u32 snd_ssthresh;
    __u32 rcv_nxt;
    __u32 snd_nxt;
    __u32 snd_una;
    __u32 mss_cache;
    __u32 ecn_flags;
    __u32 rate_delivered;
    __u32 rate_interval_us;
    __u32 packets_out;
    __u32 retrans_out;
    __u32 total_retrans;
    __u32 segs_in;
    __u32 data_segs_in;
    __u32 segs_out;
    __u32 data_segs_out;
    __u32 lost_out;
    __u32 sacked_out;
    __u64 bytes_received;
    __u64 bytes_acked;
    __u32 dsack_dups;
    __u32 delivered;
    __u32 delivered_ce;
    __u32 icsk_retransmits;
};

/* Addresses and ports of a socket lookup. */
struct bpf_sock_tuple {
    union {
        struct {
            __be32 saddr;
            __be32 daddr;
            __be16 sport;
            __be16 dport;
        } ipv4;
        struct {
            __be32 saddr[4];
            __be32 daddr[4];
            __be16 sport;
            __be16 dport;
        } ipv6;
    };
};

/* Parameters of bpf_skb_set_tunnel_key(). */
struct bpf_tunnel_key {
    __u32 tunnel_id;
    __u32 remote_ipv6[4];
    __u8 tunnel_tos;
    __u8 tunnel_ttl;
    __u16 tunnel_ext;
    __u32 tunnel_label;
    __u32 local_ipv6[4];
};

/* Parameters of bpf_fib_lookup(). */
struct bpf_fib_lookup {
    __u8 family;
    __u8 l4_protocol;
    __be16 sport;
    __be16 dport;
    __u16 tot_len;
    __u32 ifindex;
    __be32 flowinfo;
    union {
        __be32 ipv4_src;
        __u32 ipv6_src[4];
    };
    union {
        __be32 ipv4_dst;
        __u32 ipv6_dst[4];
    };
    __be16 h_vlan_proto;
    __be16 h_vlan_TCI;
    __u8 smac[6];
    __u8 dmac[6];
};

/* Options of level IPPROTO_TCP: linux/tcp.h; of bpf_setsockopt only: linux/bpf.h. */
#define TCP_CONGESTION 13
#define TCP_BPF_RTO_MIN 1004 /* us */

/* ---- headers of packets: linux/if_ether.h, in.h, in6.h, ip.h, ipv6.h, tcp.h, udp.h ---- */

#define ETH_ALEN 6
#define ETH_P_IP 0x0800
#define ETH_P_IPV6 0x86DD

enum { IPPROTO_ICMP = 1, IPPROTO_TCP = 6, IPPROTO_UDP = 17, IPPROTO_ICMPV6 = 58 };

struct ethhdr {
    unsigned char h_dest[ETH_ALEN];
    unsigned char h_source[ETH_ALEN];
    __be16 h_proto;
} __attribute__((packed));

struct iphdr {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    __u8 ihl : 4, version : 4;
#else
    __u8 version : 4, ihl : 4;
#endif
    __u8 tos;
    __be16 tot_len;
    __be16 id;
    __be16 frag_off;
    __u8 ttl;
    __u8 protocol;
    __sum16 check;
    __be32 saddr;
    __be32 daddr;
};

struct in6_addr {
    union {
        __u8 u6_addr8[16];
        __be16 u6_addr16[8];
        __be32 u6_addr32[4];
    } in6_u;
};

struct ipv6hdr {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    __u8 priority : 4, version : 4;
#else
    __u8 version : 4, priority : 4;
#endif
    __u8 flow_lbl[3];
    __be16 payload_len;
    __u8 nexthdr;
    __u8 hop_limit;
    struct in6_addr saddr;
    struct in6_addr daddr;
};

struct tcphdr {
    __be16 source;
    __be16 dest;
    __be32 seq;
    __be32 ack_seq;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    __u16 res1 : 4, doff : 4, fin : 1, syn : 1, rst : 1, psh : 1, ack : 1, urg : 1, ece : 1,
        cwr : 1;
#else
    __u16 doff : 4, res1 : 4, cwr : 1, ece : 1, urg : 1, ack : 1, psh : 1, rst : 1, syn : 1,
        fin : 1;
#endif
    __be16 window;
    __sum16 check;
    __be16 urg_ptr;
};

struct udphdr {
    __be16 source;
    __be16 dest;
    __be16 len;
    __sum16 check;
};

#endif
