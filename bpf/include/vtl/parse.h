/* SPDX-License-Identifier: GPL-2.0-only */
/* Parsing and writing of frames: finds and checks the VTL header of an Ethernet frame, and writes
 * the headers in front of it. */
#ifndef VTL_PARSE_H
#define VTL_PARSE_H

#include "headers.h"

/* Checked IP header of a frame; `offset` is 0 if there is none. */
struct vtl_ip {
    __u32 offset; /* of its payload: VTL_OFFSET_V4 or VTL_OFFSET_V6, unless it has options */
    __u32 length; /* bytes of payload, as the header says */
    __u8 protocol;
    __u8 odd; /* has options, or is a fragment */
};

/* Reads the IP header of the Ethernet frame in `data`..`end`. */
VTL_INLINE struct vtl_ip vtl_parse_ip(void *data, void *end) {
    struct ethhdr *eth = data;
    if ((void *)(eth + 1) > end)
        return (struct vtl_ip){};
    if (eth->h_proto == vtl_swap16(ETH_P_IP)) {
        struct iphdr *ip = (void *)(eth + 1);
        if ((void *)(ip + 1) > end)
            return (struct vtl_ip){};
        __u32 length = vtl_swap16(ip->tot_len);
        return (struct vtl_ip){
            .offset = VTL_OFFSET_V4,
            .length = length > sizeof(*ip) ? length - sizeof(*ip) : 0,
            .protocol = ip->protocol,
            .odd = ip->ihl * 4 != sizeof(*ip) || ip->frag_off & vtl_swap16(VTL_IP_FRAGMENT),
        };
    }
    if (eth->h_proto == vtl_swap16(ETH_P_IPV6)) {
        struct ipv6hdr *ip = (void *)(eth + 1);
        if ((void *)(ip + 1) > end)
            return (struct vtl_ip){};
        return (struct vtl_ip){
            .offset = VTL_OFFSET_V6,
            .length = vtl_swap16(ip->payload_len),
            .protocol = ip->nexthdr,
        };
    }
    return (struct vtl_ip){};
}

/*
 * Offset of the VTL header behind Ethernet and IP, 0 if the frame carries something else, -1 if it
 * is VTL's and malformed. Reads `data`..`end`, and accepts the IP length only within `total` bytes.
 * On success at least a struct vtl_hdr lies before `end`.
 */
VTL_INLINE int vtl_parse_frame(void *data, void *end, __u32 total) {
    struct vtl_ip ip = vtl_parse_ip(data, end);
    if (!ip.offset || ip.protocol != VTL_IPPROTO)
        return 0;
    if (ip.odd || ip.length < sizeof(struct vtl_hdr) || ip.offset + ip.length > total ||
        data + ip.offset + sizeof(struct vtl_hdr) > end)
        return -1;
    return ip.offset;
}

/*
 * Offset of the UDP header behind Ethernet and IP if it is for VTL's port, 0 if the frame carries
 * something else, -1 if no VTL packet fits behind it. On success at least that and a struct vtl_hdr
 * lie before `end`. Skips fragments, and headers with options: the kernel delivers their contents
 * to vtld, which accepts no DATA.
 */
VTL_INLINE int vtl_parse_udp(void *data, void *end, __u32 total) {
    const __u32 min = sizeof(struct udphdr) + sizeof(struct vtl_hdr);
    struct vtl_ip ip = vtl_parse_ip(data, end);
    struct udphdr *udp = data + ip.offset;
    if (!ip.offset || ip.protocol != IPPROTO_UDP || ip.odd || (void *)(udp + 1) > end ||
        udp->dest != vtl_swap16(VTL_UDP_PORT))
        return 0;
    if (!udp->source || vtl_swap16(udp->len) != ip.length || ip.length < min ||
        ip.offset + ip.length > total || (void *)udp + min > end)
        return -1;
    return ip.offset;
}

/*
 * Bytes of the UDP header in packets to that port, VTL_UDP_HEADER or 0. Computed without a branch:
 * the verifier would follow all code after it once for each case. For the same reason headers are
 * written for both cases.
 */
VTL_INLINE __u32 vtl_udp_room(__be16 port) {
    return -vtl_hidden((__u32)port) >> 31 << 3;
}

VTL_INLINE __u8 vtl_protocol(__u32 room) {
    return VTL_IPPROTO - (room >> 3) * (VTL_IPPROTO - IPPROTO_UDP);
}

/* Writes the UDP header in front of `length` bytes. No checksum: VTL has its own (RFC 6935). */
VTL_INLINE void vtl_write_udp(void *at, __be16 port, __u32 length) {
    struct udphdr *udp = at;
    udp->source = vtl_swap16(VTL_UDP_PORT);
    udp->dest = port;
    udp->len = vtl_swap16(sizeof(*udp) + length);
    udp->check = 0;
}

VTL_INLINE void vtl_ip4_finish(struct iphdr *ip, __u16 length) {
    ip->tot_len = vtl_swap16(length);
    ip->check = 0;
    __u32 sum = 0;
    __u16 *w = (__u16 *)ip;
    for (__u32 i = 0; i < sizeof(*ip) / sizeof(*w); i++)
        sum += w[i];
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    ip->check = ~sum;
}

/* Swaps the addresses of a received frame and sets its length, for an answer of `length` bytes to
 * that UDP port, or without UDP. The answer is to be written afterwards, vtl_udp_room() bytes
 * behind `offset`, the length of Ethernet and IP header. The caller has checked the bounds. */
VTL_INLINE void vtl_turn_round(void *data, int offset, __u32 length, __be16 port) {
    __u32 room = vtl_udp_room(port);
    struct ethhdr *eth = data;
    __u8 mac[ETH_ALEN];
    __builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
    __builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
    __builtin_memcpy(eth->h_source, mac, ETH_ALEN);
    vtl_write_udp(data + offset, port, length);
    length += room;
    if (offset == (int)VTL_OFFSET_V4) {
        struct iphdr *ip = (void *)(eth + 1);
        __be32 address = ip->saddr;
        ip->saddr = ip->daddr;
        ip->daddr = address;
        ip->ttl = 64;
        ip->tos = 0;
        ip->id = 0;
        ip->frag_off = vtl_swap16(VTL_IP_DONT_FRAGMENT);
        ip->protocol = vtl_protocol(room);
        vtl_ip4_finish(ip, sizeof(*ip) + length);
    } else {
        struct ipv6hdr *ip = (void *)(eth + 1);
        struct in6_addr address = ip->saddr;
        ip->saddr = ip->daddr;
        ip->daddr = address;
        ip->hop_limit = 64;
        ip->nexthdr = vtl_protocol(room);
        ip->payload_len = vtl_swap16(length);
    }
}

/* Writes a session's Ethernet and IP headers, `offset` bytes, and UDP's, if there is a port, in
 * front of a packet of `length` bytes, whose first eight bytes are to be written afterwards. */
VTL_INLINE void vtl_write_headers(void *data, struct vtl_session *s, int offset, __u32 length,
                                  __be16 port) {
    __u32 room = vtl_udp_room(port);
    vtl_write_udp(data + offset, port, length);
    length += room;
    if (offset == (int)VTL_OFFSET_V4) {
        struct iphdr *ip = data + sizeof(struct ethhdr);
        vtl_copy(data, s->headers, VTL_OFFSET_V4);
        ip->protocol = vtl_protocol(room);
        vtl_ip4_finish(ip, sizeof(*ip) + length);
    } else {
        struct ipv6hdr *ip = data + sizeof(struct ethhdr);
        vtl_copy(data, s->headers, VTL_OFFSET_V6);
        ip->nexthdr = vtl_protocol(room);
        ip->payload_len = vtl_swap16(length);
    }
}

/* Whether the path marked the packet (ECN CE, RFC 3168). `frame` holds its IP header. */
VTL_INLINE int vtl_is_marked(const void *frame, int offset) {
    return vtl_ecn(frame, offset) == VTL_ECN_CE;
}

#endif
