/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Wire format: defined here, explained in PROTOCOL.md.
 *
 * Packets travel as IP protocol VTL_IPPROTO over IPv4 or IPv6, or behind a UDP header. Integers are
 * big-endian unless said otherwise. C and Rust (through bindgen) both use this file; nothing
 * mirrors it by hand.
 */
#ifndef VTL_WIRE_H
#define VTL_WIRE_H

#include "linux.h"

enum {
    VTL_IPPROTO = 253,    /* experimentation, RFC 3692 */
    VTL_UDP_PORT = 22100, /* "VT"; at both hosts, unless a NAT changes it */
    VTL_TCP_PORT = 22100, /* detours: packets over TCP between daemons; not captured by hooks */
    VTL_UDP_HEADER = 8,   /* bytes */
    VTL_VERSION = 2,
    /* Maximum payload bytes of a packet, whatever the MTU. */
    VTL_MAX_PAYLOAD = 1920,
    VTL_MAX_WINDOW = 32768,     /* packets, counted from the oldest one missing */
    VTL_ACK_MAX_BITMAP = 1024,  /* bytes: an ACK fits every IPv6 path */
    VTL_MIN_PACKET = 72,        /* bytes of a DATA or PROBE with padding */
    VTL_MAX_MESSAGE = 64 << 20, /* bytes, where messages may span packets */
    VTL_HALF = 960,             /* fragmentation: payload bytes of the first half */
};

/* Low four bits of vtl_hdr.version_type. */
enum vtl_type {
    VTL_DATA = 0,      /* payload for the receive ring; struct vtl_data_hdr */
    VTL_ACK = 1,       /* the receiver's whole state; struct vtl_ack_hdr and a bitmap */
    VTL_PROBE = 2,     /* asks for an acknowledgement, no payload; struct vtl_data_hdr */
    VTL_NEGO = 3,      /* opens a session; struct vtl_nego */
    VTL_NEGO_ACK = 4,  /* accepts; struct vtl_nego */
    VTL_NEGO_NACK = 5, /* refuses; struct vtl_nego with the reason */
    VTL_CLOSE = 6,     /* the sender has forgotten the session, or is about to; bare header */
    VTL_SIZE = 7, /* path MTU probe, or the answer to one; bare header, then as many zeros as are
                   * probed for */
    VTL_TYPES = 8,
};

/* vtl_hdr.flags */
enum {
    VTL_F_ACK_NOW = 1 << 0,    /* DATA, PROBE: acknowledge this packet at once. SIZE: answer it */
    VTL_F_PHASE = 1 << 1,      /* DATA, PROBE, ACK, SIZE, CLOSE: reserved for the phase of the tag
                                * key (PROTOCOL.md, "Room"): 0 when sent, ignored */
    VTL_F_RETRANSMIT = 1 << 2, /* DATA: retransmission, with the same sequence number */
    VTL_F_PARTIAL = 1 << 2,    /* ACK: the bitmap is truncated; later packets are not described */
    VTL_F_UPDATE = 1 << 3,    /* ACK: window update that no packet caused; the echo is an old one */
    VTL_F_STATELESS = 1 << 3, /* NEGO with SUCCEED: the predecessor may end at once, with what is in
                               * flight; NEGO_ACK with SUCCEED: it does */
    VTL_F_ABORT = 1 << 4,     /* CLOSE: data may be undelivered */
    VTL_F_LAST = 1 << 4,      /* DATA: last packet of its direction; later data go by the session's
                               * successor. Its payload is ignored */
    VTL_F_PARITY = 1 << 5,    /* DATA: XOR parity of the `aux` packets from `seq` on */
    VTL_F_MORE = 1 << 6, /* DATA: the message continues in the next packet. NEGO, NEGO_ACK: the host
                          * supports messages of several packets, HALF and SIZE */
    VTL_F_HALF = 1 << 7, /* DATA: payload is half of the packet's */
    VTL_F_SUCCEED = 1 << 7, /* NEGO: successor of the session that sid and token name; NEGO_ACK:
                             * accepted as such */
    VTL_F_MARKS = VTL_F_MORE | VTL_F_LAST, /* set by applications */
};

/* Header of every packet. 24 bytes. */
struct vtl_hdr {
    __u8 version_type; /* version in the high four bits, enum vtl_type in the low four */
    __u8 flags;
    __be16 gid;   /* graft that made the packet and must process it */
    __be32 sid;   /* session index at the receiver, assigned by it; NEGO: see there */
    __be64 token; /* the receiver's random guard of that session; NEGO: see there. Sessions with
                   * keys: the header's tag */
    __le32 csum;  /* see vtl_csum: over everything from version_type to the end */
    __be16 len;   /* bytes that follow this packet type's own header, without padding */
    __be16 aux;   /* see below; else 0 */
};

/*
 * vtl_hdr.aux, by graft:
 * DATA, PROBE of grafts that give packets up: distance from `seq` down to the floor, the sender's
 *   first packet neither acknowledged nor given up.
 * DATA of partial-order: distance back to the predecessor, in packets; 0: none.
 * DATA with VTL_F_PARITY: packets of the group.
 * DATA of udp-lite: bytes of payload that the checksum covers.
 * DATA with VTL_F_HALF: offset of the half, 0 or VTL_HALF.
 * SIZE without VTL_F_ACK_NOW: `len` of the probe that it answers.
 * ACK: packets marked by the path (ECN CE), modulo 2^16.
 */

/*
 * DATA and PROBE. 40 bytes, zero-padded behind the payload to VTL_MIN_PACKET, the size of an ACK
 * without a bitmap: XDP turns the packet into its acknowledgement in place, with as much of the
 * bitmap as fits.
 */
struct vtl_data_hdr {
    struct vtl_hdr h;
    __be64 seq; /* sequence number; PROBE: that of the next new packet */
    __be32 xid; /* transmission number: incremented with every DATA or PROBE sent */
    __be32 ts;  /* sender's clock, microseconds modulo 2^32: echoed; only differences count */
};

/*
 * ACK. 72 bytes, then h.len bytes of bitmap. Each one describes the receiver's whole state, so a
 * lost acknowledgement costs nothing. Bit (s - base) % 8 of byte (s - base) / 8 is set if packet s
 * has arrived, where base = cum rounded down to a multiple of 64, plus 64 * skip. Packets between
 * cum and base are not described. h.len is a multiple of 8.
 */
struct vtl_ack_hdr {
    struct vtl_hdr h;
    __be64 cum;      /* cumulative: every packet below has arrived (next one expected) */
    __be64 limit;    /* flow control: end of the receive window */
    __be64 received; /* distinct DATA packets accepted since the session began */
    __be64 echo_seq; /* seq of the packet that caused this acknowledgement */
    __be32 echo_xid; /* its xid */
    __be32 echo_ts;  /* its ts */
    __be32 dups;     /* DATA packets received more than once, modulo 2^32 */
    __be32 skip;     /* words of 64 packets between cum's own and the bitmap's first */
};

/*
 * NEGO, NEGO_ACK, NEGO_NACK: 160 bytes, then h.len bytes of extensions, handled by the daemons. The
 * initiator offers up to VTL_NEGO_GRAFTS grafts in order of preference; the answer has the chosen
 * one in gids[0].
 */
enum {
    VTL_NEGO_GRAFTS = 8,
    VTL_NEGO_PARAMS = 8,    /* also the maximum of one graft */
    VTL_NEGO_MAX = 1200,    /* maximum bytes with extensions: fits every IPv6 path */
    VTL_EARLY_WINDOW = 256, /* early data: packets that the initiator may send before the answer */
};

/* vtl_nego.reason in a NEGO_NACK. */
enum vtl_nack {
    VTL_NACK_NONE = 0,
    VTL_NACK_NO_GRAFT = 1,    /* no offered graft is in the pool, or policy forbids them */
    VTL_NACK_NO_ROOM = 2,     /* too many sessions */
    VTL_NACK_NO_LISTENER = 3, /* no listener at that port */
    VTL_NACK_VERSION = 4,     /* unsupported version */
    VTL_NACK_COOKIE = 5,      /* not a refusal: repeat the NEGO with the ticket of this answer */
    VTL_NACK_USED = 6,        /* replay: the ticket has already opened a session */
    VTL_NACK_SUCCESSION = 7,  /* no such session to succeed, or it has a successor */
    VTL_NACK_EXTENSION = 8,   /* unknown critical extension */
    VTL_NACK_RELIABLE = 9,    /* VTL_F_STATELESS, but the predecessor may not lose anything */
};

/* One parameter of an offered graft. 8 bytes. */
struct vtl_nego_param {
    __u8 graft; /* index in vtl_nego.gids */
    __u8 index; /* number of the parameter, in the graft's order */
    __u16 reserved;
    __be32 value;
};

struct vtl_nego {
    struct vtl_hdr h;   /* NEGO: sid and token are 0, or, at the responder, those wanted for early
                         * data, with VTL_F_SUCCEED those of the predecessor, or with a finish those
                         * of the session whose handshake it finishes */
    __be64 token;       /* guard required in the peer's packets to us */
    __be64 peer_token;  /* answer: the initiator's token, as proof that its NEGO was seen */
    __be32 sid;         /* session index at the sender of this packet; answer: the responder's */
    __be32 ring_slots;  /* slots of our receive ring: initial flow-control limit */
    __be16 max_payload; /* maximum payload per packet that we accept */
    __be16 port;     /* VTL port asked for, not 0; 65535: flows (vtl_proto::carrier::GRAFT_PORT) */
    __be16 services; /* bit set of enum vtl_service: what the initiator requires */
    __u8 reason;     /* enum vtl_nack */
    __u8 grafts;     /* valid entries of gids */
    __be16 gids[VTL_NEGO_GRAFTS];
    /* Ticket (address validation cookie): made by the responder for this initiator's address; NEGO
     * returns it. */
    __be64 ticket_time; /* time of issue, ms since the responder started */
    __be64 ticket_mac;  /* opaque to the initiator */
    __be32 ticket_sid;  /* the session index it is valid for; 0 = no ticket */
    __u8 params;        /* valid entries of param */
    __u8 reserved[3];
    struct vtl_nego_param param[VTL_NEGO_PARAMS];
};

/*
 * Extension behind struct vtl_nego: this, `length` bytes of value, and zero padding to a multiple
 * of VTL_EXT_ALIGN. 4 bytes.
 */
struct vtl_ext {
    __be16 type;   /* enum vtl_ext_type, with VTL_EXT_CRITICAL or without */
    __be16 length; /* bytes of the value, without padding */
};

enum {
    VTL_EXT_CRITICAL = 1 << 15, /* in vtl_ext.type: a host that does not know it refuses */
    VTL_EXT_ALIGN = 4,
};

/* The other bits of vtl_ext.type. Hosts of this version know the first two. */
enum vtl_ext_type {
    VTL_EXT_PADDING = 0, /* enlarges the packet */
    VTL_EXT_CRYPTO = 1,  /* struct vtl_ext_crypto, then a flight of the TLS handshake */
    VTL_EXT_PATH = 2,    /* struct vtl_ext_path */
};

/* Head of VTL_EXT_CRYPTO's value. 4 bytes. */
struct vtl_ext_crypto {
    __u8 flight; /* enum vtl_flight */
    __u8 reserved[3];
};

/* Flights of the TLS handshake. */
enum vtl_flight {
    VTL_FLIGHT_HELLO = 1,  /* NEGO: the initiator's first */
    VTL_FLIGHT_ANSWER = 2, /* NEGO_ACK: the responder's */
    VTL_FLIGHT_FINISH = 3, /* NEGO once more: the initiator's second */
};

/* Value of VTL_EXT_PATH. 4 bytes. */
struct vtl_ext_path {
    __u8 number; /* number of the session's path within the association; 0 without this extension */
    __u8 reserved[3];
};

/* Services of the thesis, table 3.1. */
enum vtl_service {
    VTL_S_RELIABLE = 1 << 0,
    VTL_S_ORDERED = 1 << 1,
    VTL_S_FLOW_CONTROL = 1 << 2,
    VTL_S_CONGESTION_CONTROL = 1 << 3,
    VTL_S_PARTIAL_RELIABILITY = 1 << 4, /* no more loss than agreed; RELIABLE is that, too */
    VTL_S_PARTIAL_ORDER = 1 << 5,       /* as ordered as agreed; ORDERED is that, too */
    VTL_S_MULTIPATH = 1 << 8,           /* over several paths at once */
    VTL_S_ENCRYPTION = 1 << 9,          /* confidential and authentic */
};

#endif
