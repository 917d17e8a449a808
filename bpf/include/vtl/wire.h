/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * What crosses the network: PROTOCOL.md explains it, this file defines it.
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
    VTL_UDP_PORT = 22100, /* "VT"; of both hosts, unless a NAT changes it */
    VTL_TCP_PORT = 22100, /* of daemons that carry packets by TCP */
    VTL_UDP_HEADER = 8,   /* bytes */
    VTL_VERSION = 2,
    /* The most payload bytes that one packet may carry, whatever the MTU. */
    VTL_MAX_PAYLOAD = 1920,
    VTL_MAX_WINDOW = 32768,     /* packets from the oldest one missing on */
    VTL_ACK_MAX_BITMAP = 1024,  /* bytes: an ACK passes every IPv6 path */
    VTL_MIN_PACKET = 72,        /* bytes of a DATA or PROBE with its padding */
    VTL_MAX_MESSAGE = 64 << 20, /* bytes, where messages may take several packets */
    VTL_HALF = 960, /* payload bytes of the first half of a packet too large for the path */
};

/* Low four bits of vtl_hdr.version_type. */
enum vtl_type {
    VTL_DATA = 0,      /* payload for the receive ring; struct vtl_data_hdr */
    VTL_ACK = 1,       /* the receiver's whole state; struct vtl_ack_hdr and a bitmap */
    VTL_PROBE = 2,     /* asks for an acknowledgement, carries nothing; struct vtl_data_hdr */
    VTL_NEGO = 3,      /* opens a session; struct vtl_nego */
    VTL_NEGO_ACK = 4,  /* accepts; struct vtl_nego */
    VTL_NEGO_NACK = 5, /* refuses; struct vtl_nego with the reason */
    VTL_CLOSE = 6,     /* the sender has forgotten the session, or is about to; bare header */
    VTL_SIZE = 7,      /* asks whether the path takes a packet of this size, or says that it did;
                        * bare header, then as many zeros as are asked about */
    VTL_TYPES = 8,
};

/* vtl_hdr.flags */
enum {
    VTL_F_ACK_NOW = 1 << 0,    /* DATA, PROBE: acknowledge this packet at once. SIZE: answer it */
    VTL_F_PHASE = 1 << 1,      /* DATA, PROBE, ACK, SIZE, CLOSE: the key phase of a session with
                                * keys; else 0, and ignored */
    VTL_F_RETRANSMIT = 1 << 2, /* DATA: sent before under the same sequence number */
    VTL_F_PARTIAL = 1 << 2,    /* ACK: the bitmap ends early; nothing is said about later packets */
    VTL_F_UPDATE = 1 << 3,  /* ACK: a window update that no packet caused: the echo is an old one */
    VTL_F_ABORT = 1 << 4,   /* CLOSE: something may not have been delivered */
    VTL_F_LAST = 1 << 4,    /* DATA: the last packet of its direction; what follows goes by the
                             * session that succeeds this one. Its payload is nobody's */
    VTL_F_PARITY = 1 << 5,  /* DATA: the XOR of a group of packets from `seq` on; none itself */
    VTL_F_MORE = 1 << 6,    /* DATA: its message goes on in the next packet. NEGO, NEGO_ACK: the
                             * sender's host takes messages of several packets, and knows HALF and
                             * SIZE */
    VTL_F_HALF = 1 << 7,    /* DATA: the payload is half of the packet's */
    VTL_F_SUCCEED = 1 << 7, /* NEGO: the session succeeds the one that sid and token name;
                             * NEGO_ACK: so it does */
    VTL_F_MARKS = VTL_F_MORE | VTL_F_LAST, /* what applications say of DATA */
};

/* Starts every packet. 24 bytes. */
struct vtl_hdr {
    __u8 version_type; /* version in the high four bits, enum vtl_type in the low four */
    __u8 flags;
    __be16 gid;   /* the graft that made the packet and that must process it */
    __be32 sid;   /* the session's index at the receiver, which handed it out; NEGO: see there */
    __be64 token; /* the receiver's random guard of that session; NEGO: see there. In sessions
                   * with keys the header's tag stands here */
    __le32 csum;  /* see vtl_csum: over everything from version_type to the end */
    __be16 len;   /* bytes that follow this packet type's own header, without padding */
    __be16 aux;   /* see below; else 0 */
};

/*
 * What vtl_hdr.aux holds, by graft:
 * DATA, PROBE of grafts that give packets up: how far below `seq` the first packet lies that the
 *   sender has not settled.
 * DATA of partial-order: how many packets back the one lies that this one follows; 0: none.
 * DATA with VTL_F_PARITY: packets of the group.
 * DATA of udp-lite: bytes of payload that the checksum covers.
 * DATA with VTL_F_HALF: where the half begins, 0 or VTL_HALF.
 * SIZE without VTL_F_ACK_NOW: `len` of the one that it answers.
 * ACK: packets that the path has marked (ECN CE), modulo 2^16.
 */

/*
 * DATA and PROBE. 40 bytes, padded with zeros behind the payload to VTL_MIN_PACKET, so that an
 * acknowledgement is never longer than what it answers: XDP can turn the one into the other in
 * place, and nobody gains by asking.
 */
struct vtl_data_hdr {
    struct vtl_hdr h;
    __be64 seq; /* the packet's place in the stream; PROBE: the next new one */
    __be32 xid; /* number of this transmission: grows by one with every DATA or PROBE sent */
    __be32 ts;  /* sender's clock, microseconds modulo 2^32: echoed; only differences count */
};

/*
 * ACK. 72 bytes, then h.len bytes of bitmap. Each one describes the whole state of the receiver,
 * so a lost acknowledgement costs nothing. Bit (s - base) % 8 of byte (s - base) / 8 says that
 * packet s has arrived, where base = cum rounded down to a multiple of 64, plus 64 * skip. Nothing
 * is said about packets between cum and base. h.len is a multiple of 8.
 */
struct vtl_ack_hdr {
    struct vtl_hdr h;
    __be64 cum;      /* every packet below has arrived (next one expected) */
    __be64 limit;    /* flow control: packets from here on find no room in the receive ring */
    __be64 received; /* distinct DATA packets accepted since the session began */
    __be64 echo_seq; /* seq of the packet that caused this acknowledgement */
    __be32 echo_xid; /* its xid */
    __be32 echo_ts;  /* its ts */
    __be32 dups;     /* DATA packets received more than once, modulo 2^32 */
    __be32 skip;     /* words of 64 packets between cum's own and the bitmap's first */
};

/*
 * NEGO, NEGO_ACK, NEGO_NACK: 160 bytes, then h.len bytes of extensions, handled by the daemons. The
 * initiator offers up to VTL_NEGO_GRAFTS grafts in order of preference; the answer names the one
 * chosen in gids[0].
 */
enum {
    VTL_NEGO_GRAFTS = 8,
    VTL_NEGO_PARAMS = 8,    /* also the most that one graft has */
    VTL_NEGO_MAX = 1200,    /* bytes of the longest, with its extensions: passes every IPv6 path */
    VTL_EARLY_WINDOW = 256, /* packets that the initiator may send before it has the answer */
};

/* vtl_nego.reason in a NEGO_NACK. */
enum vtl_nack {
    VTL_NACK_NONE = 0,
    VTL_NACK_NO_GRAFT = 1,    /* none of the offered grafts is in the pool, or policy forbids it */
    VTL_NACK_NO_ROOM = 2,     /* too many sessions */
    VTL_NACK_NO_LISTENER = 3, /* nobody waits at that port */
    VTL_NACK_VERSION = 4,     /* version not spoken */
    VTL_NACK_COOKIE = 5,      /* no refusal: repeat the NEGO with the ticket of this answer */
    VTL_NACK_USED = 6,        /* the ticket has opened a session already */
    VTL_NACK_SUCCESSION = 7,  /* the session to succeed is not there, or has a successor */
    VTL_NACK_EXTENSION = 8,   /* a critical extension is not known */
};

/* One parameter of an offered graft. 8 bytes. */
struct vtl_nego_param {
    __u8 graft; /* which one: index in vtl_nego.gids */
    __u8 index; /* which parameter, in the graft's own order */
    __u16 reserved;
    __be32 value;
};

struct vtl_nego {
    struct vtl_hdr h;   /* NEGO: sid and token are 0, or, for early data, those of the session that
                         * the initiator wants at the responder */
    __be64 token;       /* the guard that the peer must put into packets it sends to us */
    __be64 peer_token;  /* answer: the initiator's token, as proof that its NEGO was seen */
    __be32 sid;         /* our session index, likewise */
    __be32 ring_slots;  /* packets our receive ring holds: our first flow-control limit */
    __be16 max_payload; /* the most payload per packet we take */
    __be16 port;        /* rendezvous: 0 is the Hooker's multiplexed stream service */
    __be16 services;    /* bit set of enum vtl_service: what the initiator requires */
    __u8 reason;        /* enum vtl_nack */
    __u8 grafts;        /* valid entries of gids */
    __be16 gids[VTL_NEGO_GRAFTS];
    /* The ticket. Made by the responder, for the initiator's address alone; NEGO returns it. */
    __be64 ticket_time; /* when it was made, ms since the responder started */
    __be64 ticket_mac;  /* the responder's own business */
    __be32 ticket_sid;  /* the session index that it is good for; 0 = no ticket */
    __u8 params;        /* valid entries of param */
    __u8 reserved[3];
    struct vtl_nego_param param[VTL_NEGO_PARAMS];
};

/*
 * An extension behind struct vtl_nego: this, `length` bytes of value, and padding with zeros to a
 * multiple of VTL_EXT_ALIGN. 4 bytes.
 */
struct vtl_ext {
    __be16 type;   /* enum vtl_ext_type, with VTL_EXT_CRITICAL or without */
    __be16 length; /* bytes of the value, without padding */
};

enum {
    VTL_EXT_CRITICAL = 1 << 15, /* in vtl_ext.type: who does not know it refuses the session */
    VTL_EXT_ALIGN = 4,
};

/* The other bits of vtl_ext.type. Hosts of this version know the first two. */
enum vtl_ext_type {
    VTL_EXT_PADDING = 0, /* makes the packet longer */
    VTL_EXT_CRYPTO = 1,  /* struct vtl_ext_crypto, then a flight of the TLS handshake */
    VTL_EXT_PATH = 2,    /* struct vtl_ext_path */
};

/* How the value of VTL_EXT_CRYPTO begins. 4 bytes. */
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

/* The value of VTL_EXT_PATH. 4 bytes. */
struct vtl_ext_path {
    __u8 number; /* of the association's path that the session takes; 0 without this extension */
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
