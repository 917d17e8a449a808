/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Timers of transport functions, each defined once: whoever schedules what they wait for, in the
 * kernel or in vtld, takes it from here. PROTOCOL.md, sections 5 and 9, has those that a peer
 * notices.
 */
#ifndef VTL_TIMERS_H
#define VTL_TIMERS_H

enum {
    /* Probe timeout (RFC 9002, 6.2): tf/retransmit.h */
    VTL_PTO_FIRST_MS = 500, /* before a round-trip time is known */
    VTL_PTO_DELAY_MS = 5,   /* allowance for a peer that acknowledges late */
    VTL_PTO_MIN_MS = 10,    /* floor, and how soon vtld must look at a sender that it lets alone */
    VTL_PTO_MAX_MS = 3000,  /* ceiling, after backoff */
    VTL_PTO_BACKOFF = 6,    /* doublings at most */
    VTL_PTO_ROW = 4,        /* packets that leave at one timeout, where they come in rows */
    VTL_PTO_ROW_MS = 1,     /* between two of them */
    /* Round trips: tf/rtt.h */
    VTL_RTT_MAX_US = 60000000, /* a longer sample is none */
    VTL_MIN_RTT_MS = 10000,    /* how long the shortest round trip counts (also tf/bbr.h) */
    /* Pacing: tf/pacing.h */
    VTL_PACE_BURST_US = 1000, /* what a late pump may catch up with, at least */
    VTL_PACE_SLEEP_US = 250,  /* between two calls of the pump for a paced session, at least: a call
                               * costs about 8 us, so several packets a call */
};

#endif
