/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Kernel interface of TCP congestion controls: the struct members that they use, which libbpf
 * relocates to the running kernel by name; kfuncs; and the declaration of a congestion control.
 *
 * A congestion control is a set of functions (struct_ops) that the kernel's TCP calls. Its state
 * per connection is icsk_ca_priv, 104 bytes, initially 0. Windows are in packets.
 */
#ifndef VTL_TCP_KERNEL_H
#define VTL_TCP_KERNEL_H

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

/* The kernel defines the parameters. */
#pragma clang diagnostic ignored "-Wunused-parameter"

char _license[] SEC("license") = "Dual MIT/GPL";

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* Functions that take a struct sock get a struct tcp_sock from the kernel. */
struct sock {
    unsigned long sk_pacing_rate; /* bytes/s */
    unsigned long sk_max_pacing_rate;
    __u32 sk_pacing_status;
};

struct inet_connection_sock {
    __u8 icsk_ca_state : 5;
    struct {
        __u8 pending;
    } icsk_ack;
    __u64 icsk_ca_priv[13];
};

struct tcp_sock {
    __u32 snd_wnd;
    __u32 mss_cache;
    __u32 snd_cwnd;
    __u32 snd_cwnd_clamp;
    __u32 snd_ssthresh;
    __u32 snd_una;
    __u32 snd_nxt;
    __u32 rcv_nxt;
    __u32 prior_cwnd;
    __u32 packets_out;
    __u32 max_packets_out;
    __u32 sacked_out;
    __u32 lost_out;
    __u32 retrans_out;
    __u32 delivered;
    __u32 delivered_ce;
    __u32 lost;
    __u32 srtt_us; /* unit: 1/8 us */
    __u32 mdev_us; /* unit: 1/4 us */
    __u8 is_cwnd_limited : 1;
    __u8 ecn_flags;
};

struct ack_sample {
    __s32 rtt_us; /* < 0: no sample */
};

/* Delivery rate sample of an acknowledgement: packets delivered in an interval. */
struct rate_sample {
    __s32 delivered;  /* < 0: no sample */
    long interval_us; /* <= 0: no sample */
    long rtt_us;      /* < 0: no sample */
    _Bool is_app_limited;
    _Bool is_ack_delayed; /* possibly a delayed acknowledgement */
};

#pragma clang attribute pop

/* enum sk_pacing: whether TCP paces itself. */
enum { PACING_NONE = 0, PACING_NEEDED = 1 };

/* enum tcp_ca_event and enum tcp_ca_state: the values in use. */
enum {
    CA_EVENT_TX_START = 0,
    CA_EVENT_CWND_RESTART = 1,
    CA_EVENT_ECN_NO_CE = 4,
    CA_EVENT_ECN_IS_CE = 5
};
enum { CA_OPEN = 0, CA_RECOVERY = 3, CA_LOSS = 4 };

enum {
    CA_NEEDS_ECN = 1 << 1, /* TCP_CONG_NEEDS_ECN */
    CWND_MIN = 2,
};

/* The name comes first: vtld writes it there. */
struct tcp_congestion_ops {
    char name[16];
    __u32 flags;
    void (*init)(struct sock *sk);
    void (*release)(struct sock *sk);
    __u32 (*ssthresh)(struct sock *sk);
    void (*cong_avoid)(struct sock *sk, __u32 ack, __u32 acked);
    void (*set_state)(struct sock *sk, __u8 state);
    void (*cwnd_event)(struct sock *sk, int event);
    void (*in_ack_event)(struct sock *sk, __u32 flags);
    void (*pkts_acked)(struct sock *sk, const struct ack_sample *sample);
    void (*cong_control)(struct sock *sk, __u32 ack, int flag, const struct rate_sample *sample);
    __u32 (*undo_cwnd)(struct sock *sk);
    __u32 (*sndbuf_expand)(struct sock *sk);
};

extern __u32 tcp_slow_start(struct tcp_sock *tp, __u32 acked) __ksym;
extern void tcp_reno_cong_avoid(struct sock *sk, __u32 ack, __u32 acked) __ksym;
extern __u32 tcp_reno_undo_cwnd(struct sock *sk) __ksym;

#define CONTROL SEC(".struct_ops.link")
#define INLINE static inline __attribute__((always_inline))

INLINE struct tcp_sock *tcp_sk(struct sock *sk) {
    return (struct tcp_sock *)sk;
}

INLINE struct inet_connection_sock *connection(struct sock *sk) {
    return (struct inet_connection_sock *)sk;
}

/* State of a connection's congestion control. */
INLINE void *state_of(struct sock *sk) {
    return connection(sk)->icsk_ca_priv;
}

INLINE __u32 min(__u32 a, __u32 b) {
    return a < b ? a : b;
}

INLINE __u32 max(__u32 a, __u32 b) {
    return a > b ? a : b;
}

INLINE int in_slow_start(const struct tcp_sock *tp) {
    return tp->snd_cwnd < tp->snd_ssthresh;
}

/* Whether the congestion window is the limit: else it must not grow (RFC 7661). In slow start it
 * may be twice what was in flight. */
INLINE int is_limited(struct tcp_sock *tp) {
    if (in_slow_start(tp))
        return tp->snd_cwnd < 2 * tp->max_packets_out;
    return BPF_CORE_READ_BITFIELD(tp, is_cwnd_limited);
}

INLINE void set_window(struct tcp_sock *tp, __u64 packets) {
    tp->snd_cwnd = packets < tp->snd_cwnd_clamp ? packets : tp->snd_cwnd_clamp;
}

/* Packets in flight: tcp_packets_in_flight. */
INLINE __u32 in_flight(const struct tcp_sock *tp) {
    return tp->packets_out - tp->sacked_out - tp->lost_out + tp->retrans_out;
}

/* Sequence numbers wrap. */
INLINE int is_after(__u32 a, __u32 b) {
    return (__s32)(a - b) > 0;
}

/* Loaded only if used, hence the '?' (libbpf). */
SEC("?struct_ops")
__u32 BPF_PROG(undo_window, struct sock *sk) {
    return tcp_reno_undo_cwnd(sk);
}

#endif
