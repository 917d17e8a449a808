// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT)
/*
 * TCP Hybla (Caini and Firrincieli, "TCP Hybla: a TCP enhancement for heterogeneous networks",
 * 2004): the window grows in time as on a path of 25 ms. With rho = RTT / 25 ms, each packet
 * acknowledged adds 2^rho - 1 in slow start, rho^2 / window in congestion avoidance. A loss halves
 * the window. RTT is the minimum seen, so that a queue does not make the sender faster.
 */
#include "kernel.h"

#include "../tf/hybla_rho.h"

struct hybla {
    __u64 credit;     /* fraction of the window's next packet: 128ths in slow start, then 128ths of
                       * 128ths of 1 / window */
    __u32 min_rtt_us; /* 0: none yet */
};

SEC("struct_ops")
void BPF_PROG(hybla_init, struct sock *sk) {
    struct hybla *h = state_of(sk);

    h->credit = 0;
    h->min_rtt_us = 0;
}

SEC("struct_ops")
void BPF_PROG(hybla_pkts_acked, struct sock *sk, const struct ack_sample *sample) {
    struct hybla *h = state_of(sk);

    if (sample->rtt_us > 0 && (!h->min_rtt_us || (__u32)sample->rtt_us < h->min_rtt_us))
        h->min_rtt_us = sample->rtt_us;
}

SEC("struct_ops")
void BPF_PROG(hybla_cong_avoid, struct sock *sk, __u32 ack, __u32 acked) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct hybla *h = state_of(sk);
    __u64 rho, unit, credit, fits;
    __u32 window = tp->snd_cwnd;

    if (!is_limited(tp) || !window)
        return;
    rho = vtl_hybla_rho(h->min_rtt_us);
    if (in_slow_start(tp)) {
        credit = h->credit + vtl_hybla_slow(rho) * acked;
        unit = 128;
    } else {
        credit = h->credit + rho * rho * acked;
        unit = window * 128ull * 128;
    }
    h->credit = credit % unit;
    credit = window + credit / unit;
    if (in_slow_start(tp)) {
        /* Not beyond the threshold, where congestion avoidance begins, nor beyond the receive
         * window: on a long path one acknowledgement adds thousands of packets, and only losses
         * would take the excess back. */
        fits = tp->mss_cache ? tp->snd_wnd / tp->mss_cache + 1 : window;
        fits = fits > window ? fits : window;
        if (fits > tp->snd_ssthresh)
            fits = tp->snd_ssthresh;
        if (credit > fits) {
            credit = fits;
            h->credit = 0;
        }
    }
    set_window(tp, credit);
}

SEC("struct_ops")
__u32 BPF_PROG(hybla_ssthresh, struct sock *sk) {
    return max(tcp_sk(sk)->snd_cwnd / 2, CWND_MIN);
}

CONTROL
struct tcp_congestion_ops hybla = {
    .name = "vtl_hybla",
    .init = (void *)hybla_init,
    .ssthresh = (void *)hybla_ssthresh,
    .cong_avoid = (void *)hybla_cong_avoid,
    .pkts_acked = (void *)hybla_pkts_acked,
    .undo_cwnd = (void *)undo_window,
};
