/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Timers of transport functions. The one definition for the kernel and for vtld's schedules.
 * PROTOCOL.md, sections 5 and 9, has those visible to a peer.
 */
#ifndef VTL_TIMERS_H
#define VTL_TIMERS_H

enum {
    /* Probe timeout (RFC 9002, 6.2): tf/retransmit.h */
    VTL_PTO_FIRST_MS = 500, /* before the first round-trip time */
    VTL_PTO_DELAY_MS = 5,   /* allowance for the peer's delayed acknowledgements */
    VTL_PTO_MIN_MS = 10, /* minimum; also how soon vtld must check a sender that runs on its own */
    VTL_PTO_MAX_MS = 3000,    /* maximum, after backoff */
    VTL_PTO_BACKOFF = 6,      /* maximum of doublings */
    VTL_PTO_PROBES = 4,       /* probes per timeout (RFC 9002, 6.2.4: two), with data outstanding */
    VTL_PTO_PROBE_GAP_MS = 1, /* between two of them */
    /* Round trips: tf/rtt.h */
    VTL_RTT_MAX_US = 60000000, /* longer samples are invalid */
    VTL_MIN_RTT_MS = 10000,    /* window of the minimum filter (also tf/bbr.h) */
    /* Pacing: tf/pacing.h */
    VTL_PACE_BURST_US = 1000, /* minimum burst that a late pump may catch up with */
    VTL_PACE_SLEEP_US = 250,  /* minimum interval between calls of the pump for a paced session: a
                               * call costs about 8 us, so several packets per call */
};

#endif
