// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT)
/*
 * TCP Vegas (Brakmo and Peterson, "TCP Vegas: end to end congestion avoidance on a global
 * Internet", 1995). Once per round trip it estimates its packets in the queue as expected minus
 * actual throughput, window * (RTT - base) / RTT. Below 2 packets the window grows by one, above 4
 * it shrinks by one. Slow start doubles the window in every other round trip only, and ends above 1
 * packet in the queue. Losses as in Reno.
 */
#include "kernel.h"

enum {
    ALPHA = 2,
    BETA = 4,
    GAMMA = 1,
    /* Minimum of samples in a round: a single one may be of a delayed acknowledgement. */
    SAMPLES = 3,
};

struct vegas {
    __u32 base_us;  /* minimum round-trip time; 0: none yet */
    __u32 round_us; /* minimum of this round; 0: none yet */
    __u32 last_us;  /* the two latest samples */
    __u32 former_us;
    __u32 samples; /* samples in this round */
    __u32 end;     /* snd_nxt at the start of the round, which ends once that is acknowledged */
    __u32 grows;   /* slow start: 1 in every other round */
};

INLINE void begin_round(struct tcp_sock *tp, struct vegas *v) {
    v->end = tp->snd_nxt;
    v->round_us = 0;
    v->samples = 0;
}

SEC("struct_ops")
void BPF_PROG(vegas_init, struct sock *sk) {
    struct vegas *v = state_of(sk);

    v->base_us = 0;
    v->last_us = 0;
    v->former_us = 0;
    v->grows = 1;
    begin_round(tcp_sk(sk), v);
}

SEC("struct_ops")
void BPF_PROG(vegas_pkts_acked, struct sock *sk, const struct ack_sample *sample) {
    struct vegas *v = state_of(sk);
    __s32 rtt = sample->rtt_us;

    if (rtt <= 0)
        return;
    if (!v->base_us || (__u32)rtt < v->base_us)
        v->base_us = rtt;
    if (!v->round_us || (__u32)rtt < v->round_us)
        v->round_us = rtt;
    v->former_us = v->last_us;
    v->last_us = rtt;
    v->samples++;
}

SEC("struct_ops")
void BPF_PROG(vegas_cong_avoid, struct sock *sk, __u32 ack, __u32 acked) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct vegas *v = state_of(sk);
    __u64 window = tp->snd_cwnd, fits, queued;
    __u32 rtt;

    if (!is_after(ack, v->end)) {
        if (in_slow_start(tp) && v->grows && is_limited(tp))
            tcp_slow_start(tp, acked);
        return;
    }
    if (v->samples < SAMPLES) {
        /* Windows this small say nothing about the queue. */
        tcp_reno_cong_avoid(sk, ack, acked);
    } else if (v->round_us) {
        /* In slow start the queue grows during the round; its end shows the window's effect. One of
         * two samples may be of a delayed acknowledgement. */
        rtt = in_slow_start(tp) ? min(v->last_us, v->former_us) : v->round_us;
        fits = window * v->base_us / max(rtt, v->base_us);
        queued = window - fits;
        if (in_slow_start(tp)) {
            /* A round shows the effect of the previous round's window: it is this window only if
             * that did not grow. */
            if (!v->grows && queued > GAMMA) {
                /* One more than the path holds; from here on by one per round. */
                set_window(tp, min(window, max(fits + 1, CWND_MIN)));
                tp->snd_ssthresh = min(tp->snd_ssthresh, max(tp->snd_cwnd - 1, CWND_MIN));
            }
            v->grows = !v->grows;
        } else if (queued > BETA) {
            set_window(tp, max(window - 1, CWND_MIN));
            tp->snd_ssthresh = min(tp->snd_ssthresh, max(tp->snd_cwnd - 1, CWND_MIN));
        } else if (queued < ALPHA && is_limited(tp)) {
            set_window(tp, window + 1);
        }
    }
    begin_round(tp, v);
}

SEC("struct_ops")
void BPF_PROG(vegas_set_state, struct sock *sk, __u8 state) {
    /* Samples from recovery do not apply to later packets. */
    if (state == CA_OPEN)
        begin_round(tcp_sk(sk), state_of(sk));
}

SEC("struct_ops")
void BPF_PROG(vegas_cwnd_event, struct sock *sk, int event) {
    if (event == CA_EVENT_CWND_RESTART)
        begin_round(tcp_sk(sk), state_of(sk));
}

SEC("struct_ops")
__u32 BPF_PROG(vegas_ssthresh, struct sock *sk) {
    return max(tcp_sk(sk)->snd_cwnd / 2, CWND_MIN);
}

CONTROL
struct tcp_congestion_ops vegas = {
    .name = "vtl_vegas",
    .init = (void *)vegas_init,
    .ssthresh = (void *)vegas_ssthresh,
    .cong_avoid = (void *)vegas_cong_avoid,
    .set_state = (void *)vegas_set_state,
    .cwnd_event = (void *)vegas_cwnd_event,
    .pkts_acked = (void *)vegas_pkts_acked,
    .undo_cwnd = (void *)undo_window,
};
