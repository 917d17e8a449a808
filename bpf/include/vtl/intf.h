/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * What the kernel's programs and user space share: ring and session layouts. Host byte order.
 * Each field says who writes it. "app" is whoever maps the ring (an aware application, or vtld on
 * behalf of a hooked one): hostile. "vtld" is the daemon. "egress", "ingress" and "listener" are
 * the graft's programs; "root" the root programs.
 */
#ifndef VTL_INTF_H
#define VTL_INTF_H

#include "wire.h"
#include "hooker.h"
#include "timers.h"

enum {
    VTL_MAX_SESSIONS = 1024, /* unless vtld makes the maps larger; index 0 is never handed out */
    VTL_MAX_RINGS = 1024,    /* entries of the ring directories, likewise */
    VTL_DIRECT_MARK = 0x56544c31, /* of sockets whose packets are an application's call of egress */
    VTL_TURNS = 64,               /* sessions that one call of the pump serves, a power of two */
    VTL_WAKE_BYTES = 4096,        /* of an application's ring of events */
    VTL_EVENTS_BYTES = 1 << 18,   /* of a shard's */
    VTL_MAX_SHARDS = 64,
    VTL_CROWD_NS = 1000000, /* more than VTL_CROWD wake-ups in this time are a crowd */
    VTL_CROWD = 12,
    VTL_MAX_GRAFTS = 64,  /* gids 1..63 */
    VTL_SLOT_SIZE = 2048, /* bytes; the rings are arrays of this */
    VTL_SLOT_DATA = 2032,
    VTL_WINDOW_WORDS = VTL_MAX_WINDOW / 64,
    VTL_ACK_WORDS = VTL_ACK_MAX_BITMAP / 8, /* of one acknowledgement's bitmap */
    VTL_TX_COPIES = 32,                     /* a power of two */
    VTL_HEADROOM = 54, /* Ethernet + IPv6 header: the longest that precedes a VTL or UDP header */
    VTL_PUMP_ETHERTYPE = 0x88b5, /* IEEE 802 local experimental 1: a frame for egress to fill */
    VTL_BELL_ETHERTYPE = 0x88b6, /* local experimental 2: what wakes vtld, on the loopback */
    VTL_FLOWS_ETHERTYPE =
        0x88b5,       /* the first again, on the loopback: what wakes its thread of flows */
    VTL_PARAMS = 8,   /* parameters of a graft */
    VTL_REORDER = 3,  /* what vtl_tx.reorder begins with: RFC 9002, 6.1.1 */
    VTL_TX_OWN = 176, /* words of state that a graft lays out itself: sender, */
    VTL_RX_OWN = 16,  /* receiver */
    VTL_LANE_SHIFT = 16,
};

/*
 * How many of the packets that anybody may send (NEGO, NEGO_NACK) are passed to vtld: from one
 * IPv4 address or IPv6 /64, and in all. So many may come at once, and then one in so many
 * nanoseconds. Many hosts may share an address, and a request that is lost is repeated behind UDP,
 * so this is generous.
 */
enum {
    VTL_ASK_NS = 1000000, /* 1,000 a second */
    VTL_ASK_BURST = 2000,
    VTL_ASK_ALL_NS = 200000, /* 5,000 a second */
    VTL_ASK_ALL_BURST = 5000,
    VTL_ASKERS = 8192, /* prefixes that are remembered: the latest */
};

enum {
    VTL_LISTED_LAST = 1u << 31, /* VTL_F_LAST in vtl_slot.more of a receive ring with a list */
};

/* One packet's payload. Slot 0 of a ring is struct vtl_ring_ctl; packet s lies in slot
 * 1 + s % slots. */
struct vtl_slot {
    __u32 len;   /* transmit: app; receive: ingress. Bytes of data in use; received 0: the packet
                  * that belongs here was given up */
    __u32 more;  /* transmit: app; receive: ingress. Grafts with reliability, VTL_F_LAST: see
                  * there; with order, too, VTL_F_MORE: the message goes on in the next packet.
                  * Partial order, transmit, from bit
                  * VTL_LANE_SHIFT on: how many packets back the one is that this one follows, below
                  * VTL_MAX_WINDOW; 0: none */
    __u64 stamp; /* transmit, grafts with a lifetime: egress, when it first sent the packet (ns
                  * of CLOCK_MONOTONIC). receive, grafts without order: ingress, the packet's
                  * number; with reliability and order: ingress, which half of it has come */
    __u8 data[VTL_SLOT_DATA];
};

/* Slot 0 of each ring. */
struct vtl_ring_ctl {
    __u64 producer; /* transmit: app, next packet to be written. receive: ingress, packets below
                     * lie in the ring, in order. Store after the data, load with acquire */
    __u64 pad0[7];
    __u64 consumer; /* transmit: listener, packets below are acknowledged and their slots free.
                     * receive: app, packets below were read */
    __u64 pad1[7];
    __u32 waiting; /* transmit: egress sets it when it ran dry: the app kicks vtld after the next
                    * store to `producer` and clears it. receive: app sets it, enum vtl_waiting,
                    * before it sleeps, ingress clears it and wakes vtld */
    __u32 closed;  /* vtld: 0, or 1 + enum vtl_closed: the session is over; and VTL_SUCCEEDED */
    __u32 refill;  /* transmit: app sets it when the ring is full; the listener clears it and
                    * has it woken when vtl_refill() slots are free. receive: app sets it before
                    * it kicks vtld, as the sender may be waiting for room; vtld clears it */
    __u32 most;    /* transmit: vtld, if the path takes less than when the session began: bytes of
                    * payload that packets should have at most; else 0 */
    __u32 pad2[12];
};

/* What a reader sleeps for. */
enum vtl_waiting {
    VTL_WAITS_IN_ORDER = 1, /* a packet that can be read in order */
    VTL_WAITS_FOR_ANY = 2,  /* or one that lies behind a gap; grafts with reliability and order.
                             * vtld, which sees `map` */
};

/* Whom wake-ups go to. */
enum vtl_aware {
    VTL_DAEMON = 0, /* vtld, to hand them on: no session's own choice */
    VTL_EVENTS = 1, /* the application, by its ring of events */
    VTL_HANDED = 2, /* the application, by vtld: it has no such ring */
    VTL_RUNG = 3,   /* vtld's thread of flows, by its ring of events and a frame on the loopback */
};

/* Why a session ended; in vtl_ring_ctl.closed plus one. */
enum vtl_closed {
    VTL_CLOSED_BY_PEER = 0,
    VTL_CLOSED_TIMEOUT = 1,
    VTL_CLOSED_LOCAL = 2,
};

/* A bit of vtl_ring_ctl.closed in transmit rings. */
enum {
    VTL_SUCCEEDED = 1 << 8, /* the peer has opened the session that succeeds this one */
};

/* What the sender knows of the latest transmission of one packet. Egress writes, listener reads;
 * one array per session, as long as the transmit ring. */
struct vtl_sent {
    __u64 sent_ns;      /* when */
    __u64 first_ns;     /* vtl_tx.first_sent_ns at that time */
    __u64 delivered;    /* vtl_tx.delivered at that time */
    __u64 delivered_ns; /* vtl_tx.delivered_ns at that time */
    __u32 xid;
    __u32 app_limited;
};

/* Congestion control, BBR-like: written by the listener, before the first packet by egress. Rates
 * in packets per 1,024 seconds. */
struct vtl_bbr {
    __u64 bw_max[10]; /* maximum delivery rate of each of the latest rounds */
    __u64 bw;         /* maximum of those */
    __u64 full_bw;    /* startup: the rate that growth is measured against */
    __u64 next_round; /* the round ends when a packet sent at this `delivered` is acknowledged */
    __u64 min_rtt_ns_at;
    __u64 phase_ns; /* when the phase began */
    __u64 phase_bw; /* bw at that time */
    __u64 probe_rtt_end_ns;
    __u64 last_lost; /* tx.lost_total at the end of the last round */
    /* against a competitor that fills the queue */
    __u64 window;    /* packets, after CUBIC */
    __u64 most;      /* the window at the latest loss; in VTL_BBR_TRY: that of the phase */
    __u64 epoch_ns;  /* when that was */
    __u32 k_ms;      /* from the epoch until the window is `most` again */
    __u32 competing; /* 0 or 1 */
    __u32 busy;      /* times in a row that the queue would not drain; while competing: rounds in a
                      * row without a queue until that ends */
    __u32 yielded;   /* round of the latest loss that was yielded to */
    __u32 rounds;
    __u32 phase_round; /* when the phase began */
    __u32 slot;        /* of bw_max that the current round fills */
    __u32 min_rtt_us;
    __u32 round_min_us; /* the shortest round trip of this round */
    __u32 probe_us;     /* the shortest while probing for it */
    __u32 mode;         /* enum vtl_bbr_mode */
    __u32 phase;        /* enum vtl_bbr_phase */
    __u32 full_count;
    __u32 loss_q16;      /* smoothed share of packets lost, 65,536 = all */
    __u32 floor_q16;     /* the same of those that were sent when less than the rate was */
    __u32 round_sent;    /* transmissions, as vtl_meter counts them, and how many of them had */
    __u32 round_arrived; /* arrived, when `loss_q16` was last updated */
    __u32 less_from;     /* the first transmission of the latest phase that sends less, */
    __u32 less_to;       /* and the first one behind it; */
    __u32 less;          /* 1 while it lasts */
    __u32 less_sent;     /* of such phases, since `floor_q16` was last updated */
    __u32 less_arrived;
    __u32 queued;  /* the last round never saw the queue empty */
    __u32 marks;   /* how many packets the path has marked, modulo 2^16, */
    __u32 marked;  /* and whether it has in this round */
    __u32 from_us; /* while what is in flight shrinks and grows: the shortest round trip before, 0
                    * once one was another */
    __u32 from;    /* against a competitor: the most in flight with such a round trip, */
    __u32 alone;   /* and the rounds in a row that there has been half of it at most */
};

enum vtl_bbr_mode { VTL_BBR_STARTUP, VTL_BBR_DRAIN, VTL_BBR_PROBE_BW, VTL_BBR_PROBE_RTT };

/* In VTL_BBR_PROBE_BW: ask for more, drain what that added to the queue, keep to the rate, drain a
 * queue that stands nevertheless, and see whether it is the path that has become longer. */
enum vtl_bbr_phase { VTL_BBR_UP, VTL_BBR_DOWN, VTL_BBR_CRUISE, VTL_BBR_EMPTY, VTL_BBR_TRY };

/* What acknowledgements have shown of the path, whatever the graft: rtt.h. Of the transmissions
 * numbered up to `xid`, those in `extra` left out, `arrived` have arrived, `received` of them for
 * the first time. */
struct vtl_meter {
    __u64 received;
    __u64 min_rtt_ns; /* when `min_rtt_us` was measured */
    __u32 min_rtt_us; /* the shortest of the last 10 s; 0 = none */
    __u32 xid;
    __u32 extra; /* of vtl_tx.extra */
    __u32 arrived;
};

/* The sending half. */
struct vtl_tx {
    /* egress */
    __u64 next; /* first packet never sent */
    __u64 sent; /* transmissions of DATA */
    __u64 retransmitted;
    __u64 pace_ns; /* nothing leaves before */
    __u64 wake_ns; /* for the pump: 0 = call again at once, ~0 = on an event, else a time */
    __u64 last_sent_ns;
    __u64 abandoned;   /* transmissions given up without being found lost: by a probe timeout, by
                        * vtld's question, for a second copy */
    __u64 app_limited; /* delivered count up to which rate samples are too low, 0 = none */
    __u32 xid;         /* of the next transmission */
    __u32 timeouts;    /* probe timeouts since the last acknowledgement; the listener clears it */
    __u32 idle;        /* egress sets; the listener clears it and kicks the pump once there is
                        * something to send */
    __u32 probe;       /* vtld sets 1, egress 2, the listener clears: ask whether the peer is there,
                        * at once and then at each probe timeout, until something is acknowledged */
    __u32 scan;        /* word of `lost` where the search goes on */
    __u32 copies;      /* second copies of retransmissions that were sent, or not needed any more */
    __u32 copied;      /* how many of those are, or were, to come: entries of `copy` so far */
    __u64 copy[VTL_TX_COPIES]; /* packets to be sent a second time, at index modulo the length */
    __u32 running; /* lock of egress: a thread of vtld holds it while it calls the pump, direct
                    * egress while it makes a packet */
    __u32 again;   /* direct egress found the lock taken: its holder runs egress once more */
    __u32 told;    /* direct egress sets: an event is on its way to vtld, which clears it */
    __u32 timed;   /* vtld: it will run egress at the next probe timeout by itself */
    __u32 extra;   /* transmissions that the peer does not count as received: PROBE and parity */
    __u64 bytes;   /* of payload in all transmissions of DATA */
    __u64 half;    /* egress: one above the packet whose second half is still to be sent; 0, none */
    /* listener */
    __u64 una __attribute__((aligned(64))); /* first packet not acknowledged */
    __u64 limit;     /* flow control: the peer's ring ends here. vtld sets the first */
    __u64 delivered; /* packets that the peer has received */
    __u64 delivered_ns;
    __u64 first_sent_ns; /* when the latest acknowledged packet was sent */
    __u64 lost_total;    /* transmissions given up */
    __u64 acks;
    __u64 cwnd;          /* packets in flight allowed */
    __u64 pacing_gap_ns; /* between two packets; 0 = no pacing */
    __u64 calm;          /* `delivered` when a threshold last changed, or was confirmed */
    __u32 acked_xid;     /* largest xid acknowledged */
    __u32 reorder;       /* transmissions that may overtake one before it counts as lost, */
    __u32 late;          /* and that have overtaken some which arrived nevertheless, lately; */
    __u32 late_q16;      /* smoothed share of packets that came late, 65,536 = all */
    __u32 dups;          /* vtl_ack_hdr.dups of the latest acknowledgement */
    __u32 srtt_us;       /* RFC 6298 */
    __u32 rttvar_us;
    __u32 lost_pending; /* bits set in `lost`: listener adds, egress subtracts, both atomically */
    __u32 busy;         /* lock of the listener */
    __u32 tail;         /* low half: where the search for losses beyond the bitmap goes on */
    struct vtl_meter meter;
    struct vtl_bbr bbr;
    __u64 own[VTL_TX_OWN]; /* what this graft's transport functions keep: see VTL_OWN. Zero at
                            * first; the composition says who writes */
    __u64 lost[VTL_WINDOW_WORDS]; /* to be sent again: listener sets, egress clears, atomically */
};

/* The receiving half: written by ingress. */
struct vtl_rx {
    __u64 cum;      /* next packet expected in order */
    __u64 max;      /* one above the highest packet received */
    __u64 received; /* distinct packets */
    __u64 consumer; /* the app's position, as far as it was believable */
    __u64 bad_csum;
    __u64 beyond;   /* packets that found no room */
    __u64 echo_seq; /* of the latest packet: for acknowledgements that egress sends */
    __u32 echo_xid;
    __u32 echo_ts;
    __u32 dups;
    __u32 busy;      /* lock of ingress */
    __u32 ack_now;   /* vtld sets, egress clears: send an acknowledgement (window update) */
    __u32 turn;      /* which part of the window the next bitmap that cannot hold all describes */
    __u64 given_up;  /* packets that the sender gave up and that did not arrive */
    __u64 recovered; /* packets that were made out of others (fec.h) */
    __u32 marked;    /* packets that the path has marked (ECN CE) */
    __u32 bell;      /* ingress: this packet is to wake vtld; 1 + enum vtl_aware */
    __u64 own[VTL_RX_OWN];       /* as vtl_tx.own */
    __u64 map[VTL_WINDOW_WORDS]; /* bit s % VTL_MAX_WINDOW: packet s, cum <= s < max, is there */
};

enum vtl_state {
    VTL_FREE = 0,
    VTL_OPENING = 1, /* initiator: NEGO sent */
    VTL_OPEN = 2,
};

/* An `ifindex` of sessions whose packets vtld carries by TCP: the loopback's, which leads to
 * nobody. */
enum { VTL_TUNNEL = 1 };

enum { VTL_TAGGED_WORDS = 9 }; /* of the longest header, struct vtl_ack_hdr */

/* A header, as a tag is computed over it. */
struct vtl_tagged {
    __u64 word[VTL_TAGGED_WORDS];
};

/* The key of the tags of one direction. */
struct vtl_tag_key {
    __u64 word[2];
};

/* One session. vtld maps the array of these; applications never do. */
struct vtl_session {
    /* vtld, before it stores `state` */
    __u32 state; /* enum vtl_state */
    __u32 sid;   /* its own index */
    __u32 ring;  /* entry of the ring directories */
    __u32 came;  /* root, `keyed`: behind the highest `xid` of the peer's DATA and PROBE */
    __u64 token; /* must be in every packet that arrives; `keyed`: its tag */
    __u64 peer_token;
    __u32 peer_sid;
    __u32 slots; /* of each of the two rings, a power of two, at most VTL_MAX_WINDOW */
    __u16 gid;
    __u16 max_payload;
    __u16 path;      /* vtld, at any time: packets with more payload than this go in halves */
    __u8 ip_version; /* 4 or 6 */
    __u8 leads;      /* vtld, before `state`: we opened the session, and decide about its way */
    __u8 keyed;      /* vtld, before packets come or go: headers have tags in place of the token */
    __u32 echoed;    /* root, `keyed`: behind the highest `echo_xid` of the peer's ACK */
    struct vtl_tag_key tag_in, tag_out; /* vtld, before `keyed` */
    /* vtld the IP header (addresses, protocol, hop limit), root the Ethernet header: taken from
     * the latest authentic packet, of a session with keys the latest that is no repetition, with
     * the addresses exchanged */
    __u8 headers[VTL_HEADROOM] __attribute__((aligned(8)));
    __be16 port;   /* the peer's UDP port, 0: packets go without UDP. Who leads: vtld, and root if a
                    * NAT changes the port; the other side: root, from the latest authentic packet */
    __u32 ifindex; /* root: where that packet came in; 0 = none yet, nothing can be sent */
    __u32 aware;   /* vtld, before `state`: enum vtl_aware */
    __u32 shard;   /* vtld, before `state`: the thread of vtld that runs its egress and is told its
                    * events; entry of `vtl_pump` and `vtl_events` */
    __u32 told;    /* bit set of enum vtl_what: wake-ups that vtld is to hand on to the application.
                    * Programs add, vtld takes, atomically */
    __u32 param[VTL_PARAMS]; /* vtld, before `state`: the graft's parameters, as its description
                              * lists them (graft.h) */
    struct vtl_tx tx __attribute__((aligned(64)));
    struct vtl_rx rx __attribute__((aligned(64)));
};

/* One session's turn in a call of the pump. */
struct vtl_turn {
    __u32 sid;   /* vtld */
    __u32 quota; /* frames that it may still have: vtld sets it, egress counts down */
};

/* The map `vtl_pump`, one entry for each shard, and one for packets that go by TCP: whom a call of
 * the pump serves, in order. A turn ends with its quota, or when the session has nothing to send.
 * Frames cannot carry it: live frames of a call's later batches still hold what earlier ones made
 * of them. Entries share no cache line. */
struct vtl_pump {
    __u32 at;    /* the turn under way: the shard sets 0, egress counts up */
    __u32 count; /* the shard: turns */
    __u32 awake; /* the shard: it will look at its events before it sleeps, and needs no wake-up */
    __u32 relay; /* the shard: it hands wake-ups on to aware applications, many at a time */
    /* ingress and listener; guesses, as CPUs may overwrite each other's */
    __u64 since_ns; /* when they began to count `woken` */
    __u32 woken;    /* wake-ups since that were not for the session of the one before */
    __u32 latest;   /* the session of the latest one */
    __u64 now_ns;   /* egress: see vtl_pump_clock */
    __u32 uses;     /* of `now_ns`: the shard sets 0, egress counts */
    __u32 bell;     /* the shard: a frame of VTL_BELL_ETHERTYPE on the loopback, with the shard's
                     * number as its mark, wakes it */
    struct vtl_turn turns[VTL_TURNS];
} __attribute__((aligned(64)));

/* Constants of the root programs, set before they are loaded. */
struct vtl_root_config {
    __u32 by_udp; /* vtld has the UDP port, and what comes to it is VTL's */
    __u32 shard;  /* whose live frames vtl_root_out_xdp makes; that program is loaded for each */
};

/* What the programs tell a shard through its ring buffer, an entry of `vtl_events`. */
struct vtl_event {
    __u32 sid;
    __u32 what; /* bit set of enum vtl_what */
};

enum vtl_what {
    VTL_EV_SEND = 1 << 0, /* the session may have something to send: run egress */
    VTL_EV_RECV = 1 << 1, /* packets lie in the receive ring */
    VTL_EV_ROOM = 1 << 2, /* the transmit ring has room again */
};

/* Counters of the root programs and grafts, per CPU, in the map `vtl_stats`. */
enum vtl_stat {
    VTL_ST_RX_PACKETS,
    VTL_ST_RX_MALFORMED,  /* shorter than it says, wrong version, unknown type, bad lengths */
    VTL_ST_RX_NO_SESSION, /* no such session, or the token does not fit */
    VTL_ST_RX_NO_GRAFT,   /* no graft deployed under that gid */
    VTL_ST_RX_BAD_CSUM,
    VTL_ST_RX_DUPLICATE,
    VTL_ST_RX_BEYOND,    /* outside the receive window */
    VTL_ST_RX_CONTENDED, /* dropped because another CPU was in the same session */
    VTL_ST_RX_CONTROL,   /* passed to vtld */
    VTL_ST_TX_PACKETS,
    VTL_ST_TX_ACKS,
    VTL_ST_TX_FAILED,
    VTL_ST_RX_OTHERS,  /* of those counted as malformed, without a session or passed to vtld: left
                        * alone, as they are for other hosts */
    VTL_ST_RX_LIMITED, /* of those counted as passed to vtld: dropped, as there were too many */
    VTL_STATS,
};

/*
 * What a graft says about itself, in the section .vtl.graft of its object: VTL_GRAFT writes it.
 * Little-endian. Names and units are text that ends with a zero byte.
 */
enum { VTL_GRAFT_ABI = 9 }; /* of this description and of everything in this file */

struct vtl_param_info {
    char name[24]; /* letters, digits and '-' */
    char unit[16]; /* "packets", "ms", "kbit/s", ...; empty for a bare number */
    __u32 initial; /* the default */
    __u32 least;
    __u32 most;
    __u32 reserved;
};

enum vtl_graft_flag {
    VTL_G_HALVES = 1 << 0, /* packets that are too large for the path go in halves (halves.h) */
};

struct vtl_graft_info {
    char name[32]; /* letters, digits and '-' */
    __u32 gid;
    __u32 services; /* bit set of enum vtl_service */
    __u32 version;  /* VTL_GRAFT_ABI */
    __u32 rank;     /* of two grafts that provide what is asked for, the higher one is taken */
    char summary[120];
    __u32 params; /* valid entries of param */
    __u32 flags;  /* bit set of enum vtl_graft_flag */
    struct vtl_param_info param[VTL_PARAMS];
};

/* A transport function that is part of the object, in the section .vtl.tf: VTL_TF writes it. */
struct vtl_tf_info {
    char name[28];  /* a C identifier */
    __u32 services; /* bit set of enum vtl_service: what it contributes to */
};

/* The slots of the PROG_ARRAYs: gid * VTL_ROLES + role. */
enum vtl_role { VTL_INGRESS = 0, VTL_LISTENER = 1, VTL_ROLES = 2 };

#endif
