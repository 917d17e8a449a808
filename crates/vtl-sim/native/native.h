/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The data plane of one host in plain memory: the same transport functions, engine and root checks
 * that run in the kernel, called by tests. Not thread-safe; one host may not be used by two
 * threads.
 */
#ifndef VTL_NATIVE_H
#define VTL_NATIVE_H

#include "vtl/tf.h"
#include "tf/bbr.h"
#include "tf/congestion.h"
#include "tf/reverse.h"
#include "tf/tfrc.h"

enum {
    VTL_NATIVE_FRAME = 2048, /* buffer for any frame: Ethernet, IPv6 and VTL headers, and payload */
    VTL_NATIVE_ANSWER = 1514, /* maximum length of an acknowledgement's frame, at an MTU of 1,500 */
    VTL_NATIVE_SESSIONS = 8,
    VTL_NATIVE_IFINDEX = 2, /* the interface of all frames; not the loopback, which is VTL_TUNNEL */
};

struct vtl_native_host;

struct vtl_native_host *vtl_native_new(void);
void vtl_native_free(struct vtl_native_host *h);

/* Makes session `sid` (1 to VTL_NATIVE_SESSIONS - 1) with rings of `slots` packets. The rings end
 * where inaccessible memory begins, so that a stray access is a crash. */
int vtl_native_add(struct vtl_native_host *h, __u32 sid, __u32 slots);

/* The description of a graft; NULL behind the last one. */
const struct vtl_graft_info *vtl_native_graft(__u32 index);

/* A session's state, rings and scoreboard; the pointers are valid as long as the host. */
struct vtl_session *vtl_native_session(struct vtl_native_host *h, __u32 sid);
struct vtl_slot *vtl_native_tx_ring(struct vtl_native_host *h, __u32 sid);
struct vtl_slot *vtl_native_rx_ring(struct vtl_native_host *h, __u32 sid);
struct vtl_sent *vtl_native_scoreboard(struct vtl_native_host *h, __u32 sid);
/* VTL_STATS counters. */
__u64 *vtl_native_stats(struct vtl_native_host *h);
/* Bit set of enum vtl_what since the last call. */
__u32 vtl_native_events(struct vtl_native_host *h, __u32 sid);

/* Runs egress for one packet, as the pump does: writes a frame and returns its length, or 0 if
 * there is nothing to send before wake_ns. */
__u32 vtl_native_egress(struct vtl_native_host *h, __u32 sid, __u64 now, __u8 *frame);

/* Passes a frame to ingress or the listener. Returns the length of the acknowledgement in `answer`,
 * or 0. `room`: its maximum length. */
__u32 vtl_native_ingress(struct vtl_native_host *h, __u64 now, const __u8 *frame, __u32 length,
                         __u8 *answer, __u32 room);

/* Single transport functions, for table tests. The host is the session's. */
#define VTL_NATIVE_OUT(name)                                                                       \
    enum vtl_verdict vtl_native_##name(struct vtl_native_host *, struct vtl_out *)
#define VTL_NATIVE_IN(name)                                                                        \
    enum vtl_verdict vtl_native_##name(struct vtl_native_host *, struct vtl_in *)
#define VTL_NATIVE_ACKD(name)                                                                      \
    enum vtl_verdict vtl_native_##name(struct vtl_native_host *, struct vtl_ackd *)
VTL_NATIVE_OUT(make);
VTL_NATIVE_OUT(choose);
VTL_NATIVE_OUT(fetch);
VTL_NATIVE_OUT(number);
VTL_NATIVE_OUT(checksum_add);
VTL_NATIVE_OUT(pace_wait);
VTL_NATIVE_OUT(pace_charge);
VTL_NATIVE_IN(checksum_verify);
VTL_NATIVE_IN(receive_admit);
VTL_NATIVE_IN(receive_place);
VTL_NATIVE_IN(ack_note);
VTL_NATIVE_ACKD(ack_verify);
VTL_NATIVE_ACKD(ack_cumulative);
VTL_NATIVE_ACKD(loss_reordering);
VTL_NATIVE_ACKD(loss_selective);
VTL_NATIVE_ACKD(rtt);
VTL_NATIVE_ACKD(rate);
/* Their state is at the beginning of vtl_tx.own. */
VTL_NATIVE_ACKD(congestion_bbr);
VTL_NATIVE_ACKD(newreno);
VTL_NATIVE_ACKD(cubic);
VTL_NATIVE_ACKD(hybla);
VTL_NATIVE_ACKD(tfrc);
VTL_NATIVE_ACKD(reverse);
__u64 vtl_native_tfrc_equation(__u32 rtt_us, __u64 interval);
__u64 vtl_native_tfrc_mean(const struct vtl_tfrc *t, __u64 open);
__u64 vtl_native_hybla_slow(__u32 rtt_us);
/* Of the first bytes of a slot. */
__u32 vtl_native_crc32c(struct vtl_slot *slot, __u32 bytes);
/* Builds an acknowledgement of all `words`; returns vtl_ack_words. */
__u32 vtl_native_ack_build(struct vtl_native_host *h, struct vtl_session *s,
                           struct vtl_ack_hdr *hdr, __u64 *map, __u32 words, int update);
__u64 vtl_native_rx_limit(struct vtl_native_host *h, struct vtl_session *s);
int vtl_native_can_send(struct vtl_native_host *h, struct vtl_session *s);

#endif
