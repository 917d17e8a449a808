/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Interface between the kernel's programs and user space: layouts of rings and sessions. Host byte
 * order. Each field names its writer. "app" maps the ring (an aware application, or vtld on behalf
 * of a hooked one) and is hostile; "vtld" is the daemon; "egress", "ingress" and "listener" are the
 * graft's programs; "root" the root programs.
 */
#ifndef VTL_INTF_H
#define VTL_INTF_H

#include "wire.h"
#include "hooker.h"
#include "gateway.h"
#include "timers.h"

enum {
    VTL_MAX_SESSIONS = 1024,      /* default; vtld may make the maps larger; index 0 is reserved */
    VTL_MAX_RINGS = 1024,         /* entries of the ring directories, likewise */
    VTL_DIRECT_MARK = 0x56544c31, /* SO_MARK of sockets whose sends run egress directly */
    VTL_TURNS = 64,        /* maximum of sessions served by one call of the pump, a power of two */
    VTL_WAKE_BYTES = 4096, /* size of an application's ring buffer of events */
    VTL_EVENTS_BYTES = 1 << 18, /* size of a shard's */
    VTL_MAX_SHARDS = 64,
    VTL_CROWD_NS = 1000000, /* more than VTL_CROWD wake-ups within this time are a crowd */
    VTL_CROWD = 12,
    VTL_MAX_GRAFTS = 64,  /* gids 1..63 */
    VTL_SLOT_SIZE = 2048, /* bytes; the rings are arrays of this */
    VTL_SLOT_DATA = 2032,
    VTL_WINDOW_WORDS = VTL_MAX_WINDOW / 64,
    VTL_ACK_WORDS = VTL_ACK_MAX_BITMAP / 8, /* size of an ACK's bitmap */
    VTL_TX_COPIES = 32,                     /* a power of two */
    VTL_HEADROOM = 54, /* Ethernet + IPv6 header: the longest in front of a VTL or UDP header */
    VTL_PUMP_ETHERTYPE = 0x88b5,     /* IEEE 802 local experimental 1: a frame for egress to fill */
    VTL_DOORBELL_ETHERTYPE = 0x88b6, /* local experimental 2: wakes a shard, on the loopback */
    VTL_FLOWS_ETHERTYPE = 0x88b5, /* local experimental 1 again: wakes vtl-flows, on the loopback */
    VTL_PARAMS = 8,               /* maximum per graft */
    VTL_REORDER = 3,  /* initial reordering threshold, vtl_tx.reorder: RFC 9002, 6.1.1 */
    VTL_TX_OWN = 176, /* words of state for a graft's own use: sender, */
    VTL_RX_OWN = 16,  /* receiver */
    VTL_LANE_SHIFT = 16,
};

/*
 * Rate limit of packets from strangers (NEGO, NEGO_NACK) to vtld: token buckets for each IPv4
 * address or IPv6 /64, and for all. BURST packets may come at once, then one every NS nanoseconds.
 * Generous, since many hosts may share an address, and a lost request is repeated over UDP.
 */
enum {
    VTL_NEGO_LIMIT_NS = 1000000, /* 1,000 a second */
    VTL_NEGO_LIMIT_BURST = 2000,
    VTL_NEGO_LIMIT_ALL_NS = 200000, /* 5,000 a second */
    VTL_NEGO_LIMIT_ALL_BURST = 5000,
    VTL_NEGO_LIMIT_PREFIXES = 8192, /* prefixes remembered, least recently used go first */
};

enum {
    VTL_LISTED_LAST = 1u << 31, /* VTL_F_LAST in vtl_slot.more of a receive ring that is a list */
};

/* Payload of one packet. Slot 0 of a ring is struct vtl_ring_ctl; packet s has
 * slot 1 + s % slots. */
struct vtl_slot {
    __u32 len;   /* transmit: app; receive: ingress. Bytes of data in use; received 0: the packet of
                  * this slot was given up */
    __u32 more;  /* transmit: app; receive: ingress. Reliable grafts: VTL_F_LAST; with order, too:
                  * VTL_F_MORE, the message continues in the next packet. Partial order, transmit,
                  * from bit VTL_LANE_SHIFT on: distance back to the predecessor in packets, below
                  * VTL_MAX_WINDOW; 0: none */
    __u64 stamp; /* transmit, grafts with a lifetime: egress, time of the first transmission (ns of
                  * CLOCK_MONOTONIC). receive, ingress: the packet's number (grafts without order);
                  * which half has arrived (with reliability and order: halves.h); number of the
                  * packet to read at this position (partial order: partial_order.h) */
    __u8 data[VTL_SLOT_DATA];
};

/* Slot 0 of each ring. */
struct vtl_ring_ctl {
    __u64 producer; /* transmit: app, next packet to write. receive: ingress, packets below are in
                     * the ring, in order. Store after the data, load with acquire */
    __u64 pad0[7];
    __u64 consumer; /* transmit: listener, packets below are acknowledged, their slots free.
                     * receive: app, packets below were read */
    __u64 pad1[7];
    __u32 waiting; /* transmit: egress sets it when it has nothing to send: the app clears it and
                    * kicks vtld after its next store to `producer`. receive: app sets it, enum
                    * vtl_waiting, before it sleeps; ingress clears it and wakes vtld */
    __u32 closed;  /* vtld: 0 while open, or 1 + enum vtl_closed; and VTL_SUCCEEDED */
    __u32
        refill;          /* transmit: app sets it when it waits for room; with an acknowledgement
                          * (vtl_room_event(); without acknowledgements, with a packet sent), it is
                          * cleared, and the app is woken, if vtl_refill() slots are free. receive: app
                          * sets it before it kicks vtld, as the sender may wait for room; vtld clears it */
    __u32 path_payload;  /* transmit: vtld, maximum payload per packet in bytes, if the path MTU has
                          * shrunk since the session began; else 0 */
    __u32 notsent_lowat; /* transmit: app, the most packets that it publishes before they are sent;
                          * 0: any number. Then `refill` also waits until half of them are sent, and
                          * for no more free slots than that */
    __u32 pad2[11];
};

/* What a sleeping reader waits for. */
enum vtl_waiting {
    VTL_WAITS_IN_ORDER = 1, /* the next packet in order */
    VTL_WAITS_FOR_ANY = 2,  /* or any packet, also out of order; reliable ordered grafts. Only for
                             * vtld, which sees `map` */
};

/* Receiver of wake-ups. */
enum vtl_aware {
    VTL_DAEMON = 0,   /* vtld, which hands them on: never a session's own choice */
    VTL_EVENTS = 1,   /* the application, through its ring buffer of events */
    VTL_RELAYED = 2,  /* the application, through vtld: it has no such ring */
    VTL_DOORBELL = 3, /* vtl-flows, through its ring buffer of events and a frame on the loopback */
};

/* Why a session ended: vtl_ring_ctl.closed less one. */
enum vtl_closed {
    VTL_CLOSED_BY_PEER = 0,
    VTL_CLOSED_TIMEOUT = 1,
    VTL_CLOSED_LOCAL = 2,
    VTL_CLOSED_CUT = 3, /* stateless switch: its successor goes on */
};

/* Flag in vtl_ring_ctl.closed of transmit rings. */
enum {
    VTL_SUCCEEDED = 1 << 8, /* the peer has opened this session's successor */
};

/* Scoreboard entry: the latest transmission of one packet. Written by egress, read by the listener;
 * one array per session, as long as the transmit ring. */
struct vtl_sent {
    __u64 sent_ns;      /* time of transmission */
    __u64 first_ns;     /* vtl_tx.first_sent_ns at that time */
    __u64 delivered;    /* vtl_tx.delivered at that time */
    __u64 delivered_ns; /* vtl_tx.delivered_ns at that time */
    __u32 xid;
    __u32 app_limited;
};

/* What congestion control does at present, for reports (`vtl status`). */
enum vtl_control_mode {
    VTL_MODE_NONE, /* not told */
    VTL_MODE_STARTUP,
    VTL_MODE_DRAIN,
    VTL_MODE_PROBE_BW,
    VTL_MODE_PROBE_RTT,
};

/* Measurements from acknowledgements, for all grafts: rtt.h. Of the transmissions up to `xid`,
 * without the `extra` ones, `arrived` have arrived, `received` of them for the first time. */
struct vtl_meter {
    __u64 received;
    __u64 min_rtt_ns; /* time of the sample in `min_rtt_us` */
    __u32 min_rtt_us; /* minimum of the last VTL_MIN_RTT_MS; before the first sample what vtld knows
                       * of the path from other connections; 0 = none */
    __u32 xid;        /* highest echoed */
    __u32 extra;      /* vtl_tx.extra at the latest update */
    __u32 arrived;    /* duplicates included, modulo 2^32 */
};

/* Sender state. */
struct vtl_tx {
    /* egress */
    __u64 next; /* first packet never sent (SND.NXT) */
    __u64 sent; /* transmissions of DATA */
    __u64 retransmitted;
    __u64 pace_ns; /* pacing: earliest time of the next packet */
    __u64 wake_ns; /* for the pump: 0 = call again at once, ~0 = on an event, else a time */
    __u64 last_sent_ns;
    __u64 abandoned;   /* transmissions given up without being declared lost: after a probe timeout,
                        * after vtld's liveness probe, for a second copy; of grafts without
                        * reliability (datagram.h) all */
    __u64 app_limited; /* `delivered` up to which rate samples are application-limited, 0 = none */
    __u32 xid;         /* of the next transmission */
    __u32 timeouts;    /* probe timeouts since the last acknowledgement; the listener clears it */
    __u32 idle; /* egress sets it; the listener clears it and wakes the pump once there is something
                 * to send */
    __u32 probe; /* liveness probe: at once, then at each probe timeout, until an acknowledgement.
                  * vtld sets 1, egress 2, the listener clears */
    __u32 scan;  /* word of `lost` where the search continues */
    __u32 copies_done;         /* second copies that were sent, or not needed any more */
    __u32 copies_scheduled;    /* second copies scheduled so far: entries of `copy` */
    __u64 copy[VTL_TX_COPIES]; /* packets to be sent a second time; ring, index modulo its length */
    __u32 egress_lock; /* lock of egress: held by a thread of vtld during a call of the pump, by
                        * direct egress while it makes a packet */
    __u32 rerun; /* set by direct egress when the lock is taken: the holder runs egress once more */
    __u32 event_pending; /* set by direct egress: an event is on its way to vtld, which clears it */
    __u32 has_timer;     /* vtld: it runs egress at the next probe timeout by itself */
    __u32 extra; /* transmissions that the peer does not count as received: PROBE and parity */
    __u64 bytes; /* payload bytes in all transmissions of DATA */
    __u64 half;  /* egress: one above the packet whose second half is due; 0, none */
    /* listener */
    __u64 una __attribute__((aligned(64))); /* first packet not acknowledged (SND.UNA) */
    __u64 limit;     /* flow control: end of the peer's receive window. vtld sets the first */
    __u64 delivered; /* packets received by the peer */
    __u64 delivered_ns;
    __u64 first_sent_ns; /* transmission time of the latest acknowledged packet */
    __u64 lost_total;    /* transmissions declared lost */
    __u64 acks;
    __u64 cwnd;          /* congestion window, packets */
    __u64 pacing_gap_ns; /* gap between two packets; 0 = no pacing */
    __u64 calm;          /* `delivered` when a reordering threshold last changed or was confirmed */
    __u32 acked_xid;     /* largest xid acknowledged */
    __u32 reorder; /* packet threshold: transmissions that must overtake one before it is lost */
    __u32 reordering_extent; /* RFC 4737: how many transmissions overtook packets that lately
                              * arrived late; raises the threshold above `reorder` (loss.h) */
    __u32 reordered_q16;     /* smoothed share of packets that arrive late, 65,536 = all */
    __u32 dups;              /* vtl_ack_hdr.dups of the latest acknowledgement */
    __u32 srtt_us;           /* RFC 6298 */
    __u32 rttvar_us;
    __u32 lost_pending; /* bits set in `lost`: listener adds, egress subtracts, both atomically */
    __u32 lock;         /* of the listener */
    __u32 tail;         /* low 32 bits of the packet where the search for losses beyond the bitmap
                         * continues */
    __u32 mode;         /* enum vtl_control_mode; before the first packet by egress */
    struct vtl_meter meter;
    __u64 own[VTL_TX_OWN]; /* state of this graft's transport functions: see VTL_OWN. Initially
                            * zero; the composition defines who writes */
    __u64 lost[VTL_WINDOW_WORDS]; /* to retransmit: listener sets, egress clears, atomically */
};

/* Receiver state: written by ingress. */
struct vtl_rx {
    __u64 cum;      /* next packet expected in order (RCV.NXT) */
    __u64 max;      /* one above the highest packet received */
    __u64 received; /* distinct packets */
    __u64 consumer; /* the app's position, as far as it was plausible */
    __u64 bad_csum;
    __u64 beyond;   /* packets beyond the receive window */
    __u64 echo_seq; /* of the latest packet: for acknowledgements that egress sends */
    __u32 echo_xid;
    __u32 echo_ts;
    __u32 dups;
    __u32 lock;      /* of ingress */
    __u32 ack_now;   /* vtld sets, egress clears: send an acknowledgement (window update) */
    __u32 turn;      /* alternates the part of the window in bitmaps too short for all of it */
    __u64 given_up;  /* packets given up by the sender that did not arrive */
    __u64 recovered; /* packets recovered from others (fec.h) */
    __u32 marked;    /* packets marked by the path (ECN CE) */
    __u32 doorbell;  /* ingress: receiver of this packet's wake-up, 1 + enum vtl_aware; 0: none */
    __u64 own[VTL_RX_OWN];       /* as vtl_tx.own */
    __u64 map[VTL_WINDOW_WORDS]; /* bit s % VTL_MAX_WINDOW: packet s, cum <= s < max, has arrived */
};

enum vtl_state {
    VTL_FREE = 0,
    VTL_OPENING = 1, /* initiator: NEGO sent */
    VTL_OPEN = 2,
};

/* Index of the loopback, the same in every network namespace. */
enum { VTL_LOOPBACK_IFINDEX = 1 };

/* `ifindex` of sessions whose packets vtld carries over TCP: the loopback's, where they reach
 * nobody. */
enum { VTL_TUNNEL = VTL_LOOPBACK_IFINDEX };

enum { VTL_TAGGED_WORDS = 9 }; /* size of the longest header, struct vtl_ack_hdr */

/* Header as the tag's input. */
struct vtl_tagged {
    __u64 word[VTL_TAGGED_WORDS];
};

/* Tag key of one direction. */
struct vtl_tag_key {
    __u64 word[2];
};

/* A session. vtld maps the array of sessions; applications never do. */
struct vtl_session {
    /* vtld, before it stores `state` */
    __u32 state;      /* enum vtl_state */
    __u32 sid;        /* its own index */
    __u32 ring;       /* entry of the ring directories */
    __u32 replay_xid; /* root, `keyed`: replay check, one above the highest `xid` of the peer's DATA
                       * and PROBE */
    __u64 token;      /* required in every packet that arrives; `keyed`: its tag */
    __u64 peer_token;
    __u32 peer_sid;
    __u32 slots; /* of each ring, a power of two, at most VTL_MAX_WINDOW */
    __u16 gid;
    __u16 max_payload;
    __u16 path;        /* vtld, at any time: maximum payload without fragmentation into halves */
    __u8 ip_version;   /* 4 or 6 */
    __u8 is_initiator; /* vtld, before `state`: 1: we choose the encapsulation */
    __u8 keyed; /* vtld, before packets come or go: headers carry tags instead of the token */
    __u32 replay_echo_xid; /* root, `keyed`: replay check, one above the highest `echo_xid` of its
                              ACK */
    struct vtl_tag_key tag_in, tag_out; /* vtld, before `keyed` */
    /* vtld the IP header (addresses, protocol, hop limit), root the Ethernet header: from the
     * latest authentic packet (with keys: that is no replay), addresses swapped */
    __u8 headers[VTL_HEADROOM] __attribute__((aligned(8)));
    __be16 port; /* the peer's UDP port, 0: no UDP encapsulation. Initiator: vtld, and root if a NAT
                  * changes the port; responder: root, from the latest authentic packet */
    __u32 ifindex; /* root: interface of that packet; 0 = none yet, nothing can be sent */
    __u32 aware;   /* vtld, before `state`: enum vtl_aware */
    __u32 shard;   /* vtld, before `state`: the shard that runs its egress and receives its events;
                    * entry of `vtl_pump` and `vtl_events` */
    __u32 pending_wakeups;   /* bit set of enum vtl_what: wake-ups for vtld to hand on to the
                              * application. Programs add, vtld takes, atomically */
    __u32 param[VTL_PARAMS]; /* vtld, before `state`: the graft's parameters, in the order of its
                              * description (struct vtl_graft_info) */
    struct vtl_tx tx __attribute__((aligned(64)));
    struct vtl_rx rx __attribute__((aligned(64)));
};

/* A session's turn in a call of the pump. */
struct vtl_turn {
    __u32 sid;   /* vtld */
    __u32 quota; /* frames left: vtld sets it, egress counts down */
};

/* Entry of the map `vtl_pump`, one for each shard and one for packets over TCP: the sessions that a
 * call of the pump serves, in order. A turn ends with its quota, or when the session has nothing to
 * send. Frames cannot carry this: live frames of later batches still hold what earlier ones made of
 * them. Entries share no cache line. */
struct vtl_pump {
    __u32 at;    /* current turn: the shard sets 0, egress counts up */
    __u32 count; /* the shard: turns */
    __u32 awake; /* the shard: it checks its events before it sleeps, and needs no wake-up */
    __u32 relay; /* the shard: it hands wake-ups on to aware applications, in batches */
    /* ingress and listener; approximate, as CPUs race */
    __u64 since_ns; /* start of counting `woken` */
    __u32 woken;    /* wake-ups since then for another session than the one before */
    __u32 latest;   /* session of the latest one */
    __u64 now_ns;   /* egress: see vtl_pump_clock */
    __u32 uses;     /* uses of `now_ns`: the shard sets 0, egress counts */
    __u32 doorbell; /* the shard: woken by a frame of VTL_DOORBELL_ETHERTYPE on the loopback whose
                     * mark is the shard's number */
    struct vtl_turn turns[VTL_TURNS];
} __attribute__((aligned(64)));

/* Constants of the root programs, set before load. */
struct vtl_root_config {
    __u32 by_udp; /* vtld has bound the UDP port: packets to it are VTL's */
    __u32 shard;  /* shard whose live frames vtl_root_out_xdp makes; that program is loaded once for
                   * each */
};

/* Event for a shard, in its ring buffer, an entry of `vtl_events`. */
struct vtl_event {
    __u32 sid;
    __u32 what; /* bit set of enum vtl_what */
};

enum vtl_what {
    VTL_EV_SEND = 1 << 0, /* the session may have something to send: run egress */
    VTL_EV_RECV = 1 << 1, /* packets are in the receive ring */
    VTL_EV_ROOM = 1 << 2, /* the transmit ring has room again */
};

/* Counters of the root programs and grafts, per CPU, in the map `vtl_stats`. */
enum vtl_stat {
    VTL_ST_RX_PACKETS,
    VTL_ST_RX_MALFORMED,  /* truncated, wrong version, unknown type, bad lengths */
    VTL_ST_RX_NO_SESSION, /* no such session, or wrong token */
    VTL_ST_RX_NO_GRAFT,   /* no graft deployed under that gid */
    VTL_ST_RX_BAD_CSUM,
    VTL_ST_RX_DUPLICATE,
    VTL_ST_RX_BEYOND,    /* outside the receive window */
    VTL_ST_RX_CONTENDED, /* dropped: another CPU was in the same session */
    VTL_ST_RX_CONTROL,   /* passed to vtld */
    VTL_ST_TX_PACKETS,
    VTL_ST_TX_ACKS,
    VTL_ST_TX_FAILED,
    VTL_ST_RX_OTHERS,  /* of those malformed, without a session or passed to vtld: passed on
                        * untouched, as they are for other hosts */
    VTL_ST_RX_LIMITED, /* of those passed to vtld: dropped by the rate limit */
    VTL_STATS,
};

/*
 * A graft's description of itself, in the section .vtl.graft of its object, written by VTL_GRAFT.
 * Little-endian. Names and units are zero-terminated text.
 */
enum { VTL_GRAFT_ABI = 10 }; /* version of this description and of everything in this file */

struct vtl_param_info {
    char name[24]; /* letters, digits and '-' */
    char unit[16]; /* "packets", "ms", "kbit/s", ...; empty for a bare number */
    __u32 initial; /* the default */
    __u32 min;
    __u32 max;
    __u32 reserved;
};

enum vtl_graft_flag {
    VTL_G_HALVES = 1 << 0, /* fragments packets larger than the path's MTU (halves.h) */
};

struct vtl_graft_info {
    char name[32]; /* letters, digits and '-' */
    __u32 gid;
    __u32 services; /* bit set of enum vtl_service */
    __u32 version;  /* VTL_GRAFT_ABI */
    __u32 rank; /* of two grafts that provide the services asked for, the higher one is chosen */
    char summary[120];
    __u32 params; /* valid entries of param */
    __u32 flags;  /* bit set of enum vtl_graft_flag */
    struct vtl_param_info param[VTL_PARAMS];
};

/* A transport function that the object contains, in the section .vtl.tf, written by VTL_TF. */
struct vtl_tf_info {
    char name[28];  /* a C identifier */
    __u32 services; /* bit set of enum vtl_service that it contributes to */
};

/* Slots of the PROG_ARRAYs: gid * VTL_ROLES + role. */
enum vtl_role { VTL_INGRESS = 0, VTL_LISTENER = 1, VTL_ROLES = 2 };

#endif
