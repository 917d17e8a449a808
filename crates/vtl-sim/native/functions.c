// SPDX-License-Identifier: GPL-2.0-only
/* Single transport functions, for tables, in the engine of `stream`. */
#define VTL_NATIVE_OPS vtl_native_ops_functions
#define vtl_description vtl_native_ops_functions_info
#include "grafts/stream.bpf.c"
#include "tf/crc32c.h"
#include "tf/cubic.h"
#include "tf/hybla.h"
#include "tf/newreno.h"
#include "tf/tfrc.h"

/* ----------------------------------------------------------------- single transport functions */

#define VERDICT(define, name, call)                                                                \
    define(name) {                                                                                 \
        host = h;                                                                                  \
        return call(c);                                                                            \
    }
#define NO_VERDICT(define, name, call)                                                             \
    define(name) {                                                                                 \
        host = h;                                                                                  \
        call(c);                                                                                   \
        return VTL_NEXT;                                                                           \
    }
#define OUT(name) enum vtl_verdict vtl_native_##name(struct vtl_native_host *h, struct vtl_out *c)
#define IN(name) enum vtl_verdict vtl_native_##name(struct vtl_native_host *h, struct vtl_in *c)
#define ACKD(name) enum vtl_verdict vtl_native_##name(struct vtl_native_host *h, struct vtl_ackd *c)

VERDICT(OUT, make, vtl_make)
#define CHOOSE(o) tf_choose(o, &BBR((o)->s)->loss_q16)
VERDICT(OUT, choose, CHOOSE)
VERDICT(OUT, fetch, vtl_fetch)
NO_VERDICT(OUT, number, tf_number)
NO_VERDICT(OUT, checksum_add, tf_checksum_add)
VERDICT(OUT, pace_wait, tf_pace_wait)
NO_VERDICT(OUT, pace_charge, tf_pace_charge)
VERDICT(IN, checksum_verify, tf_checksum_verify)
VERDICT(IN, receive_admit, tf_receive_admit)
NO_VERDICT(IN, receive_place, tf_receive_place)
NO_VERDICT(IN, ack_note, tf_ack_note)
VERDICT(ACKD, ack_verify, tf_ack_verify)
VERDICT(ACKD, ack_cumulative, tf_ack_cumulative)
NO_VERDICT(ACKD, loss_reordering, tf_loss_reordering)
/* as in `stream` */
#define LOSS_SELECTIVE(c) tf_loss_selective(c, 1)
NO_VERDICT(ACKD, loss_selective, LOSS_SELECTIVE)
NO_VERDICT(ACKD, rtt, tf_rtt)
#define RATE(a) tf_delivery_rate(a, BBR((a)->s)->min_rtt_us)
NO_VERDICT(ACKD, rate, RATE)

#define CONTROL(name, type)                                                                        \
    enum vtl_verdict vtl_native_##name(struct vtl_native_host *h, struct vtl_ackd *a) {            \
        host = h;                                                                                  \
        tf_##name(a, VTL_OWN(a->s, tx, type));                                                     \
        return VTL_NEXT;                                                                           \
    }
CONTROL(congestion_bbr, struct vtl_bbr)
CONTROL(newreno, struct vtl_cc)
CONTROL(cubic, struct vtl_cc)
CONTROL(hybla, struct vtl_cc)
CONTROL(tfrc, struct vtl_tfrc)
CONTROL(reverse, struct vtl_reverse)

__u64 vtl_native_tfrc_equation(__u32 rtt_us, __u64 interval) {
    return vtl_tfrc_equation(rtt_us, interval);
}

__u64 vtl_native_tfrc_mean(const struct vtl_tfrc *t, __u64 open) {
    return vtl_tfrc_mean(t, open);
}

__u64 vtl_native_hybla_slow(__u32 rtt_us) {
    return vtl_hybla_slow(vtl_hybla_rho(rtt_us));
}

__u32 vtl_native_crc32c(struct vtl_slot *slot, __u32 bytes) {
    return ~vtl_crc32c_slot(slot, bytes, ~0u);
}

__u32 vtl_native_ack_build(struct vtl_native_host *h, struct vtl_session *s,
                           struct vtl_ack_hdr *hdr, __u64 *map, __u32 words, int update) {
    host = h;
    vtl_ack_build(s, hdr, map, words, update);
    return vtl_ack_words(s);
}

__u64 vtl_native_rx_limit(struct vtl_native_host *h, struct vtl_session *s) {
    host = h;
    return vtl_rx_limit(s);
}

int vtl_native_can_send(struct vtl_native_host *h, struct vtl_session *s) {
    host = h;
    return vtl_can_send(s);
}
