// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT)
/*
 * The congestion control of the graft `stream` (../tf/bbr.h) for the kernel's TCP, with which a
 * server serves clients without VTL, and connections of `auto` go on once the path loses packets.
 * Loss detection (RACK, RFC 8985), delivery rates (draft-cheng-iccrg-delivery-rate-estimation) and
 * round-trip times are TCP's, and so is pacing.
 */
#include "../tf/bbr.h"
#include "kernel.h"

/* cong_control's sample is the fourth argument since Linux 6.10, the second before. */
extern int LINUX_KERNEL_VERSION __kconfig;
#define SAMPLE_IS_FOURTH (LINUX_KERNEL_VERSION >= (6 << 16 | 10 << 8))

enum {
    INITIAL = 10,       /* packets: RFC 6928 */
    SNDBUF_WINDOWS = 3, /* send buffer in windows: in flight, to be retransmitted, new */
};

struct stream {
    struct vtl_bbr bbr;
    __u64 delivered;      /* packets delivered since the connection began, */
    __u64 lost;           /* lost since this control has it, without those of */
    __u64 timed_out;      /* retransmission timeouts, */
    __u32 delivered_seen; /* tcp_sock's counters at the latest update */
    __u32 lost_seen;
    __u32 window;    /* as set by the model; TCP reduces its own, to 1 after a timeout */
    __u32 from_idle; /* the next round-trip sample is the first after a long idle period */
};

/* icsk_ca_priv is too small for the model. */
struct {
    __uint(type, BPF_MAP_TYPE_SK_STORAGE);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __type(key, int);
    __type(value, struct stream);
} streams SEC(".maps");

/* Sets the pacing rate, given in packets per 1,024 s. */
INLINE void set_rate(struct sock *sk, __u64 packets) {
    __u64 rate = packets * tcp_sk(sk)->mss_cache / 1024;

    if (rate < tcp_sk(sk)->mss_cache)
        rate = tcp_sk(sk)->mss_cache;
    sk->sk_pacing_rate = rate < sk->sk_max_pacing_rate ? rate : sk->sk_max_pacing_rate;
}

/* Initializes the state and returns it, NULL without memory. */
INLINE struct stream *begin(struct sock *sk) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct stream *s = bpf_sk_storage_get(&streams, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
    __u32 srtt_us = tp->srtt_us / 8;

    if (!s)
        return 0;
    __builtin_memset(s, 0, sizeof(*s));
    /* Where it takes over from another control, the window may grow to what slow start would have
     * by now, whatever that control has made of the losses behind it. */
    s->delivered = s->delivered_seen = tp->delivered;
    s->bbr.round_sent = s->bbr.round_arrived = tp->delivered;
    s->lost_seen = tp->lost;
    s->bbr.marks = tp->delivered_ce;
    vtl_bbr_start(&s->bbr, bpf_ktime_get_ns(), srtt_us);
    tp->snd_ssthresh = ~0u >> 1;
    /* Twice the window per round trip, as in slow start. */
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

/* What takes over from here goes on by the model's window, instead of by slow start from it. */
SEC("struct_ops")
void BPF_PROG(stream_release, struct sock *sk) {
    tcp_sk(sk)->snd_ssthresh = tcp_sk(sk)->snd_cwnd;
}

/* Whether a small receive window limits the sender, rather than a queue. */
INLINE int is_receiver_limited(const struct tcp_sock *tp, const struct vtl_bbr *b) {
    return tp->snd_wnd < (__u64)tp->snd_cwnd * tp->mss_cache && !b->queued;
}

INLINE void control(struct sock *sk, const struct rate_sample *sample) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct stream *s = bpf_sk_storage_get(&streams, sk, 0, 0);
    __u32 arrived, lost;

    /* Without memory the window stays as it is; retry. */
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
        /* Includes packets to be retransmitted: a round lasts until they have arrived. */
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

/* A retransmission timeout marks all packets in flight as lost, mostly wrongly: not to be counted
 * in the loss rate. */
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
    .release = (void *)stream_release,
    .ssthresh = (void *)stream_ssthresh,
    .set_state = (void *)stream_set_state,
    .cwnd_event = (void *)stream_cwnd_event,
    .cong_control = (void *)stream_control,
    .undo_cwnd = (void *)stream_undo_window,
    .sndbuf_expand = (void *)stream_sndbuf_expand,
};
