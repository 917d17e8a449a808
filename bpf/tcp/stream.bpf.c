// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT)
/*
 * The congestion control of the graft `stream` (../tf/bbr.h) for the kernel's TCP: a server serves
 * clients without VTL by it. Which packets are lost TCP finds out by itself (RACK, RFC 8985), and
 * what it measures of rates (draft-cheng-iccrg-delivery-rate-estimation) and round trips the model
 * gets as it is. TCP paces.
 */
#include "../tf/bbr.h"
#include "kernel.h"

/* The kernel gives cong_control its sample as the fourth argument, until Linux 6.10 as the second.
 */
extern int LINUX_KERNEL_VERSION __kconfig;
#define SAMPLE_IS_FOURTH (LINUX_KERNEL_VERSION >= (6 << 16 | 10 << 8))

enum {
    INITIAL = 10,       /* packets: RFC 6928 */
    SNDBUF_WINDOWS = 3, /* in the send buffer: under way, to be sent again, to come */
};

struct stream {
    struct vtl_bbr bbr;
    __u64 delivered;      /* packets since this control has the connection, */
    __u64 lost;           /* but for those of */
    __u64 timed_out;      /* retransmission timeouts, */
    __u32 delivered_seen; /* and tcp_sock's counters when they were last updated */
    __u32 lost_seen;
    __u32 window;    /* as the model set it; TCP shrinks its own, after a timeout to 1 */
    __u32 from_idle; /* the next round trip is the first after a long pause */
};

/* icsk_ca_priv has no room for the model. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct stream);
} streams SEC(".maps");

/* `packets`: per 1,024 s. */
INLINE void set_rate(struct sock *sk, __u64 packets) {
    __u64 rate = packets * tcp_sk(sk)->mss_cache / 1024;

    if (rate < tcp_sk(sk)->mss_cache)
        rate = tcp_sk(sk)->mss_cache;
    sk->sk_pacing_rate = rate < sk->sk_max_pacing_rate ? rate : sk->sk_max_pacing_rate;
}

/* Returns the state, NULL without memory for it. */
INLINE struct stream *begin(struct sock *sk) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct stream *s = bpf_sk_storage_get(&streams, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
    __u32 srtt_us = tp->srtt_us / 8;

    if (!s)
        return 0;
    __builtin_memset(s, 0, sizeof(*s));
    s->delivered_seen = tp->delivered;
    s->lost_seen = tp->lost;
    s->bbr.marks = tp->delivered_ce;
    vtl_bbr_start(&s->bbr, bpf_ktime_get_ns(), srtt_us);
    tp->snd_ssthresh = ~0u >> 1;
    /* Twice the window in a round trip, as slow start would. */
    if (srtt_us)
        set_rate(sk, 2ull * tp->snd_cwnd * 1024 * 1000000 / srtt_us);
    if (sk->sk_pacing_status == PACING_NONE)
        sk->sk_pacing_status = PACING_NEEDED;
    return s;
}

SEC("struct_ops")
void BPF_PROG(stream_init, struct sock *sk) {
    begin(sk);
}

/* Is the sender limited by a receive window that is still small, rather than by a queue? */
INLINE int is_receiver_limited(const struct tcp_sock *tp, const struct vtl_bbr *b) {
    return tp->snd_wnd < (__u64)tp->snd_cwnd * tp->mss_cache && !b->queued;
}

INLINE void control(struct sock *sk, const struct rate_sample *sample) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct stream *s = bpf_sk_storage_get(&streams, sk, 0, 0);
    __u32 arrived, lost;

    /* There was no memory: the window stays as it is, until there is. */
    if (!s)
        s = begin(sk);
    if (!s)
        return;
    arrived = tp->delivered - s->delivered_seen;
    lost = tp->lost - s->lost_seen;
    s->delivered += arrived;
    s->lost += lost;
    s->delivered_seen = tp->delivered;
    s->lost_seen = tp->lost;

    struct vtl_bbr_ack ack = {
        .now = bpf_ktime_get_ns(),
        .delivered = s->delivered,
        .newly = arrived,
        .lost = s->lost + s->timed_out,
        /* With what is to be sent again: a round lasts until that has arrived. */
        .in_flight = tp->packets_out - tp->sacked_out,
        .cwnd = s->window ? s->window : tp->snd_cwnd,
        .transmitted = s->delivered + s->lost + in_flight(tp),
        .told = s->delivered + s->lost,
        .told_arrived = s->delivered,
        .sent = arrived + lost,
        .arrived = arrived,
        .srtt_us = tp->srtt_us / 8,
        .rttvar_us = tp->mdev_us / 4,
        .marks = tp->delivered_ce,
        .app_limited = sample->is_app_limited || is_receiver_limited(tp, &s->bbr),
        .initial = INITIAL,
    };
    if (sample->rtt_us > 0 && (!sample->is_ack_delayed || !s->bbr.min_rtt_us))
        ack.rtt_us = sample->rtt_us;
    if (s->from_idle && ack.rtt_us) {
        s->from_idle = 0;
        vtl_bbr_probed(&s->bbr, ack.now, ack.rtt_us);
    }
    if (sample->delivered > 0 && sample->interval_us > 0)
        ack.rate = sample->delivered * 1024000000ull / (__u64)sample->interval_us;

    vtl_bbr_update(&s->bbr, &ack);
    set_rate(sk, ack.pace);
    set_window(tp, ack.cwnd);
    s->window = ack.cwnd;
}

SEC("struct_ops")
void stream_control(unsigned long long *args) {
    const struct rate_sample *sample;

    if (SAMPLE_IS_FOURTH)
        asm volatile("%0 = *(u64 *)(%1 + 24)" : "=r"(sample) : "r"(args));
    else
        asm volatile("%0 = *(u64 *)(%1 + 8)" : "=r"(sample) : "r"(args));
    control((struct sock *)args[0], sample);
}

SEC("struct_ops")
void BPF_PROG(stream_cwnd_event, struct sock *sk, int event) {
    struct stream *s;

    if (event != CA_EVENT_TX_START)
        return;
    s = bpf_sk_storage_get(&streams, sk, 0, 0);
    if (s && bpf_ktime_get_ns() - s->bbr.min_rtt_ns_at > VTL_BBR_MIN_RTT_NS)
        s->from_idle = 1;
}

/* A retransmission timeout takes all that is under way for lost, and most of it is not: it says
 * nothing of the share that the path loses. */
SEC("struct_ops")
void BPF_PROG(stream_set_state, struct sock *sk, __u8 state) {
    struct stream *s;

    if (state != CA_LOSS)
        return;
    s = bpf_sk_storage_get(&streams, sk, 0, 0);
    if (!s)
        return;
    s->timed_out += tcp_sk(sk)->lost - s->lost_seen;
    s->lost_seen = tcp_sk(sk)->lost;
}

/* The model sets the window, whatever TCP takes for congestion. */
SEC("struct_ops")
__u32 BPF_PROG(stream_ssthresh, struct sock *sk) {
    return tcp_sk(sk)->snd_ssthresh;
}

SEC("struct_ops")
__u32 BPF_PROG(stream_undo_window, struct sock *sk) {
    return tcp_sk(sk)->snd_cwnd;
}

SEC("struct_ops")
__u32 BPF_PROG(stream_sndbuf_expand, struct sock *sk) {
    return SNDBUF_WINDOWS;
}

CONTROL
struct tcp_congestion_ops stream = {
    .name = "vtl_stream",
    .init = (void *)stream_init,
    .ssthresh = (void *)stream_ssthresh,
    .set_state = (void *)stream_set_state,
    .cwnd_event = (void *)stream_cwnd_event,
    .cong_control = (void *)stream_control,
    .undo_cwnd = (void *)stream_undo_window,
    .sndbuf_expand = (void *)stream_sndbuf_expand,
};
