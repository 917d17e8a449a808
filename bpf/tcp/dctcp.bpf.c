// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT)
/*
 * DCTCP (RFC 8257): reduces the window in proportion to the fraction of packets marked by the path
 * (ECN). Both ends must use it: the receiver reports exactly which packets were marked, while ECN
 * otherwise reports that some were (RFC 3168). A loss halves the window.
 */
#include "kernel.h"

enum {
    ONE = 1 << 10,   /* fixed-point 1 */
    GAIN_SHIFT = 4,  /* g = 1/16 (RFC 8257, 4.2) */
    DEMAND_CWR = 4,  /* tcp_sock.ecn_flags: acknowledgements carry ECE */
    ACK_PENDING = 2, /* icsk_ack.pending, ICSK_ACK_TIMER: an acknowledgement is delayed */
};

struct dctcp {
    __u32 alpha;        /* estimated fraction of marked packets, unit 1 / ONE */
    __u32 end;          /* sequence number that ends the observation window */
    __u32 delivered;    /* tcp_sock.delivered at its start */
    __u32 delivered_ce; /* tcp_sock.delivered_ce at its start */
    __u32 ce;           /* receiver: whether the latest packet was marked */
    __u32 rcv_nxt;      /* receiver: tcp_sock.rcv_nxt before that packet */
};

INLINE void observe(struct tcp_sock *tp, struct dctcp *d) {
    d->end = tp->snd_nxt;
    d->delivered = tp->delivered;
    d->delivered_ce = tp->delivered_ce;
}

SEC("struct_ops")
void BPF_PROG(dctcp_init, struct sock *sk) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct dctcp *d = state_of(sk);

    /* Respond to the first mark as in RFC 3168 (RFC 8257, 4.2). */
    d->alpha = ONE;
    d->ce = 0;
    d->rcv_nxt = tp->rcv_nxt;
    observe(tp, d);
}

/* RFC 8257, 3.3, steps 1 to 7. */
SEC("struct_ops")
void BPF_PROG(dctcp_pkts_acked, struct sock *sk, const struct ack_sample *sample) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct dctcp *d = state_of(sk);
    __u32 una = tp->snd_una, delivered, marked, fraction;

    if (!is_after(una, d->end))
        return;
    delivered = tp->delivered - d->delivered;
    marked = min(tp->delivered_ce - d->delivered_ce, delivered);
    fraction = delivered ? (__u64)marked * ONE / delivered : 0;
    /* Values below 16, whose 1/16 is rounded to 0, must still decay to 0. */
    d->alpha -= d->alpha >> GAIN_SHIFT ? d->alpha >> GAIN_SHIFT : d->alpha;
    d->alpha = min(d->alpha + (fraction >> GAIN_SHIFT), ONE);
    observe(tp, d);
}

/* Response to marks: step 8. Losses: below, where they can be distinguished. */
SEC("struct_ops")
__u32 BPF_PROG(dctcp_ssthresh, struct sock *sk) {
    struct dctcp *d = state_of(sk);
    __u64 window = tcp_sk(sk)->snd_cwnd;

    return max(window - window * d->alpha / (2 * ONE), CWND_MIN);
}

/* RFC 8257, 3.5: losses as in standard TCP. */
SEC("struct_ops")
void BPF_PROG(dctcp_set_state, struct sock *sk, __u8 state) {
    struct tcp_sock *tp = tcp_sk(sk);
    __u8 now = BPF_CORE_READ_BITFIELD(connection(sk), icsk_ca_state);

    if ((state == CA_RECOVERY || state == CA_LOSS) && now < CA_RECOVERY)
        tp->snd_ssthresh = min(tp->snd_ssthresh, max(tp->prior_cwnd / 2, CWND_MIN));
}

SEC("struct_ops")
void BPF_PROG(dctcp_cong_avoid, struct sock *sk, __u32 ack, __u32 acked) {
    tcp_reno_cong_avoid(sk, ack, acked);
}

INLINE void echo(struct tcp_sock *tp, __u32 ce) {
    if (ce)
        tp->ecn_flags |= DEMAND_CWR;
    else
        tp->ecn_flags &= ~DEMAND_CWR;
}

/* Receiver, for each packet (RFC 8257, 3.2): an acknowledgement covers only marked packets, or only
 * unmarked ones. */
SEC("struct_ops")
void BPF_PROG(dctcp_cwnd_event, struct sock *sk, int event) {
    struct tcp_sock *tp = tcp_sk(sk);
    struct dctcp *d = state_of(sk);
    __u32 ce = event == CA_EVENT_ECN_IS_CE;

    if (!ce && event != CA_EVENT_ECN_NO_CE)
        return;
    if (ce != d->ce && (connection(sk)->icsk_ack.pending & ACK_PENDING)) {
        echo(tp, d->ce);
        bpf_tcp_send_ack(tp, d->rcv_nxt);
    }
    d->ce = ce;
    d->rcv_nxt = tp->rcv_nxt;
    echo(tp, ce);
}

CONTROL
struct tcp_congestion_ops dctcp = {
    .name = "vtl_dctcp",
    .flags = CA_NEEDS_ECN,
    .init = (void *)dctcp_init,
    .ssthresh = (void *)dctcp_ssthresh,
    .cong_avoid = (void *)dctcp_cong_avoid,
    .set_state = (void *)dctcp_set_state,
    .cwnd_event = (void *)dctcp_cwnd_event,
    .pkts_acked = (void *)dctcp_pkts_acked,
    .undo_cwnd = (void *)undo_window,
};
