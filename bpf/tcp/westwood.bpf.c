// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT)
/*
 * TCP Westwood+ (Grieco and Mascolo, "Performance evaluation and comparison of Westwood+, New Reno,
 * and Vegas TCP congestion control", 2004): Reno, but a loss sets the threshold to the
 * bandwidth-delay product, estimated bandwidth * minimum round-trip time, instead of half the
 * window. The estimate filters the delivery rate of each round trip: 7/8 of the estimate and 1/8 of
 * the round.
 */
#include "kernel.h"

enum {
    /* Minimum length of a round: shorter ones measure bursts. */
    ROUND_NS = 50 * 1000 * 1000,
    /* The estimate keeps 7/8, after the first round. */
    FILTER = 8,
};

struct westwood {
    __u64 begin_ns;   /* start of the round; 0: not begun */
    __u64 rate;       /* estimated bandwidth, packets per 1,024 s: no rounding to 0 on slow paths */
    __u32 delivered;  /* tcp_sock.delivered at the start of the round */
    __u32 rtt_us;     /* latest sample */
    __u32 min_rtt_us; /* minimum; 0: none yet */
};

SEC("struct_ops")
void BPF_PROG(westwood_init, struct sock *sk) {
    struct westwood *w = state_of(sk);

    w->begin_ns = 0;
    w->rate = 0;
    w->delivered = 0;
    w->rtt_us = 0;
    w->min_rtt_us = 0;
}

SEC("struct_ops")
void BPF_PROG(westwood_pkts_acked, struct sock *sk, const struct ack_sample *sample) {
    struct westwood *w = state_of(sk);
    __s32 rtt = sample->rtt_us;

    if (rtt <= 0)
        return;
    w->rtt_us = rtt;
    if (!w->min_rtt_us || (__u32)rtt < w->min_rtt_us)
        w->min_rtt_us = rtt;
}

/* Called for every acknowledgement, also for duplicates in recovery, whose packets the kernel
 * counts in `delivered`. */
SEC("struct_ops")
void BPF_PROG(westwood_in_ack_event, struct sock *sk, __u32 flags) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct westwood *w = state_of(sk);
    __u64 now = bpf_ktime_get_ns(), elapsed = now - w->begin_ns, rate;
    __u64 round = w->rtt_us * 1000ull;

    if (!w->begin_ns) {
        w->begin_ns = now;
        w->delivered = tp->delivered;
        return;
    }
    if (elapsed < (round > ROUND_NS ? round : ROUND_NS))
        return;
    rate = (__u64)(tp->delivered - w->delivered) * (1024ull * 1000 * 1000) / (elapsed / 1000);
    w->rate = w->rate ? (w->rate * (FILTER - 1) + rate) / FILTER : rate;
    w->begin_ns = now;
    w->delivered = tp->delivered;
}

SEC("struct_ops")
__u32 BPF_PROG(westwood_ssthresh, struct sock *sk) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct westwood *w = state_of(sk);

    if (!w->rate || !w->min_rtt_us)
        return max(tp->snd_cwnd / 2, CWND_MIN);
    return max(w->rate * w->min_rtt_us / (1024ull * 1000 * 1000), CWND_MIN);
}

SEC("struct_ops")
void BPF_PROG(westwood_cong_avoid, struct sock *sk, __u32 ack, __u32 acked) {
    tcp_reno_cong_avoid(sk, ack, acked);
}

CONTROL
struct tcp_congestion_ops westwood = {
    .name = "vtl_westwood",
    .init = (void *)westwood_init,
    .ssthresh = (void *)westwood_ssthresh,
    .cong_avoid = (void *)westwood_cong_avoid,
    .in_ack_event = (void *)westwood_in_ack_event,
    .pkts_acked = (void *)westwood_pkts_acked,
    .undo_cwnd = (void *)undo_window,
};
