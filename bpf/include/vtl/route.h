/* SPDX-License-Identifier: GPL-2.0-only */
/* Decision of the root programs: checks common to all VTL packets, and the program to call. */
#ifndef VTL_ROUTE_H
#define VTL_ROUTE_H

#include "parse.h"
#include "tag.h"

/* Supplied by the environment. */
VTL_INLINE struct vtl_session *vtl_session_at(__u32 sid);

/* Result: a slot of the PROG_ARRAY (>= 0), or one of these. */
enum vtl_route {
    VTL_ROUTE_PASS = -1,  /* not VTL's, or for vtld */
    VTL_ROUTE_DROP = -2,  /* unless it is for another host */
    VTL_ROUTE_LIMIT = -3, /* for vtld, but from strangers: rate-limited */
};

/*
 * Replay check, for sessions with keys: whether an authentic packet may update the return path. An
 * on-path attacker can replay packets from elsewhere, so only a packet with a new number may, or
 * the first of all.
 */
VTL_INLINE int vtl_is_fresh(struct vtl_session *s, struct vtl_hdr *h, void *end, __u32 type) {
    __u32 *highest = type == VTL_ACK ? &s->replay_echo_xid : &s->replay_xid;
    __u32 number;
    if (type == VTL_ACK) {
        struct vtl_ack_hdr *a = (struct vtl_ack_hdr *)h;
        if ((void *)(a + 1) > end)
            return 0;
        number = vtl_swap32(a->echo_xid);
    } else if (type == VTL_DATA || type == VTL_PROBE) {
        struct vtl_data_hdr *d = (struct vtl_data_hdr *)h;
        if ((void *)(d + 1) > end)
            return 0;
        number = vtl_swap32(d->xid);
    } else {
        return !s->ifindex && type != VTL_NEGO_ACK;
    }
    if ((__s32)(number - VTL_LOAD(*highest)) < 0)
        return !s->ifindex;
    VTL_STORE(*highest, number + 1);
    return 1;
}

/*
 * Updates the return path from an authentic packet; `port`: its UDP source port, 0 without UDP. An
 * initiator keeps its encapsulation (UDP or not, tunnel or not), which vtld chooses: otherwise both
 * sides could follow each other for ever. MTU probes (SIZE) may try the tunnel, or an interface
 * instead of it, without switching the responder.
 */
VTL_INLINE void vtl_learn(struct vtl_session *s, struct ethhdr *eth, __u32 ifindex, __be16 port,
                          __u32 type) {
    __u32 by_tunnel = ifindex == VTL_TUNNEL, was_tunnel = s->ifindex == VTL_TUNNEL;
    if (s->is_initiator ? by_tunnel || was_tunnel
                        : by_tunnel != was_tunnel && s->ifindex && type == VTL_SIZE)
        return;
    if (s->port != port && (!s->is_initiator || (s->port && port)))
        VTL_STORE(s->port, port);
    struct ethhdr *known = (struct ethhdr *)s->headers;
    if (s->ifindex == ifindex && !__builtin_memcmp(known->h_dest, eth->h_source, ETH_ALEN) &&
        !__builtin_memcmp(known->h_source, eth->h_dest, ETH_ALEN))
        return;
    __builtin_memcpy(known->h_dest, eth->h_source, ETH_ALEN);
    __builtin_memcpy(known->h_source, eth->h_dest, ETH_ALEN);
    known->h_proto = eth->h_proto;
    VTL_BARRIER();
    VTL_STORE(s->ifindex, ifindex);
}

/* Whether source and destination address are the session's. A router sees others' packets, too. */
VTL_INLINE int vtl_from_peer(struct vtl_session *s, void *data, int offset) {
    void *ours = s->headers + sizeof(struct ethhdr);
    void *theirs = data + sizeof(struct ethhdr);
    if (offset == (int)VTL_OFFSET_V4) {
        struct iphdr *us = ours, *them = theirs;
        return s->ip_version == 4 && us->daddr == them->saddr && us->saddr == them->daddr;
    }
    struct ipv6hdr *us = ours, *them = theirs;
    return s->ip_version == 6 &&
           !__builtin_memcmp(&us->daddr, &them->saddr, sizeof(struct in6_addr)) &&
           !__builtin_memcmp(&us->saddr, &them->daddr, sizeof(struct in6_addr));
}

/* Whether the packet ends exactly where its header says, padding included. */
VTL_INLINE int vtl_is_exact(void *data, int offset, __be16 port, struct vtl_hdr *h, __u32 type) {
    void *ip = data + sizeof(struct ethhdr);
    __u32 length = offset == (int)VTL_OFFSET_V4
                       ? vtl_swap16(((struct iphdr *)ip)->tot_len) - sizeof(struct iphdr)
                       : vtl_swap16(((struct ipv6hdr *)ip)->payload_len);
    if (port)
        length -= VTL_UDP_HEADER;
    __u32 want = vtl_swap16(h->len);
    want += type == VTL_ACK ? sizeof(struct vtl_ack_hdr) : sizeof(struct vtl_data_hdr);
    return length == (want < VTL_MIN_PACKET ? VTL_MIN_PACKET : want);
}

/* Authenticates a packet: by its tag if the session has keys, except NEGO_ACK, which vtld verifies;
 * else by the token. */
VTL_INLINE int vtl_is_authentic(struct vtl_session *s, struct vtl_hdr *h, void *end, __u32 type) {
    if (!s->keyed || type == VTL_NEGO_ACK)
        return s->token == vtl_swap64(h->token);
    struct vtl_tagged header = {};
    __u32 words = vtl_tagged_words(type);
    for (__u32 i = 0; i < VTL_TAGGED_WORDS; i++) {
        __u64 *word = (__u64 *)h + i;
        if (i >= words)
            break;
        if ((void *)(word + 1) > end)
            return 0;
        header.word[i] = *word;
    }
    header.word[VTL_TOKEN_WORD] = vtl_swap64(s->token);
    return vtl_expected_tag(s, &header, type) == ((__u64 *)h)[VTL_TOKEN_WORD];
}

/* Checks a packet, updates the return path if it is authentic, and returns its route (enum
 * vtl_route). `offset`: length of the headers up to IP. `port`: UDP source port, 0 without UDP. */
VTL_INLINE int vtl_route_at(void *data, void *end, __u32 ifindex, int offset, __be16 port) {
    struct vtl_hdr *h = data + offset + (port ? VTL_UDP_HEADER : 0);
    if ((void *)(h + 1) > end)
        return VTL_ROUTE_DROP;
    __u32 type = vtl_hdr_type(h);
    if (vtl_hdr_version(h) != VTL_VERSION && type == VTL_NEGO)
        return VTL_ROUTE_LIMIT; /* vtld answers that it does not support that version */
    if (vtl_hdr_version(h) != VTL_VERSION || type >= VTL_TYPES) {
        vtl_env_count(VTL_ST_RX_MALFORMED);
        return VTL_ROUTE_DROP;
    }
    vtl_env_count(VTL_ST_RX_PACKETS);
    if (type == VTL_NEGO || type == VTL_NEGO_NACK) {
        vtl_env_count(VTL_ST_RX_CONTROL);
        return VTL_ROUTE_LIMIT;
    }
    struct vtl_session *s = vtl_session_at(vtl_swap32(h->sid));
    if (!s || s->state == VTL_FREE || !vtl_from_peer(s, data, offset) ||
        !vtl_is_authentic(s, h, end, type)) {
        vtl_env_count(VTL_ST_RX_NO_SESSION);
        return VTL_ROUTE_DROP;
    }
    __u32 was = s->ifindex;
    if (!s->keyed || vtl_is_fresh(s, h, end, type))
        vtl_learn(s, data, ifindex, port, type);
    /* Not for CLOSE, which vtld receives itself: the session may not be known to it yet. */
    if (!was && type != VTL_CLOSE)
        vtl_env_notify(s, VTL_EV_SEND);
    if (type > VTL_PROBE) { /* NEGO_ACK, CLOSE, SIZE */
        vtl_env_count(VTL_ST_RX_CONTROL);
        return VTL_ROUTE_PASS;
    }
    if (!vtl_is_exact(data, offset, port, h, type)) {
        vtl_env_count(VTL_ST_RX_MALFORMED);
        return VTL_ROUTE_DROP;
    }
    __u32 gid = vtl_swap16(h->gid);
    if (s->state != VTL_OPEN || gid != s->gid || gid >= VTL_MAX_GRAFTS) {
        vtl_env_count(VTL_ST_RX_NO_GRAFT);
        return VTL_ROUTE_DROP;
    }
    return gid * VTL_ROLES + (type == VTL_ACK ? VTL_LISTENER : VTL_INGRESS);
}

/* Route of a frame: vtl_route_at for packets without UDP encapsulation. */
VTL_INLINE int vtl_route(void *data, void *end, __u32 total, __u32 ifindex) {
    int offset = vtl_parse_frame(data, end, total);
    if (!offset)
        return VTL_ROUTE_PASS;
    if (offset == (int)VTL_OFFSET_V4)
        return vtl_route_at(data, end, ifindex, VTL_OFFSET_V4, 0);
    if (offset == (int)VTL_OFFSET_V6)
        return vtl_route_at(data, end, ifindex, VTL_OFFSET_V6, 0);
    vtl_env_count(VTL_ST_RX_MALFORMED);
    return VTL_ROUTE_DROP;
}

/* The same for packets with UDP encapsulation. */
VTL_INLINE int vtl_route_udp(void *data, void *end, __u32 total, __u32 ifindex) {
    int offset = vtl_parse_udp(data, end, total);
    if (!offset)
        return VTL_ROUTE_PASS;
    if (offset == (int)VTL_OFFSET_V4) {
        struct udphdr *udp = data + VTL_OFFSET_V4;
        return vtl_route_at(data, end, ifindex, VTL_OFFSET_V4, udp->source);
    }
    if (offset == (int)VTL_OFFSET_V6) {
        struct udphdr *udp = data + VTL_OFFSET_V6;
        return vtl_route_at(data, end, ifindex, VTL_OFFSET_V6, udp->source);
    }
    vtl_env_count(VTL_ST_RX_MALFORMED);
    return VTL_ROUTE_DROP;
}

#endif
