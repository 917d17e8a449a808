/* SPDX-License-Identifier: GPL-2.0-only */
/* Frames: finds and checks the VTL header of an Ethernet frame, and writes frames. */
#ifndef VTL_PARSE_H
#define VTL_PARSE_H

#ifndef __bpf__
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#endif
#include "tf.h"

#define VTL_OFFSET_V4 (sizeof(struct ethhdr) + sizeof(struct iphdr))
#define VTL_OFFSET_V6 (sizeof(struct ethhdr) + sizeof(struct ipv6hdr))

/*
 * Offset of the VTL header behind Ethernet and IP, or 0 if the frame carries something else, or -1
 * if it is VTL's and malformed. Sees `data`..`end`, and trusts the IP length only if it fits into
 * `total` bytes. On success at least a struct vtl_hdr lies before `end`.
 */
VTL_INLINE int vtl_parse_frame(void *data, void *end, __u32 total) {
    struct ethhdr *eth = data;
    if ((void *)(eth + 1) > end)
        return 0;
    if (eth->h_proto == vtl_swap16(ETH_P_IP)) {
        struct iphdr *ip = (void *)(eth + 1);
        if ((void *)(ip + 1) > end || ip->protocol != VTL_IPPROTO)
            return 0;
        if (ip->ihl != 5 || ip->frag_off & vtl_swap16(0x3fff))
            return -1;
        __u32 length = vtl_swap16(ip->tot_len);
        if (length < sizeof(*ip) + sizeof(struct vtl_hdr) || length + sizeof(*eth) > total)
            return -1;
        return (void *)(ip + 1) + sizeof(struct vtl_hdr) > end ? -1 : (int)VTL_OFFSET_V4;
    }
    if (eth->h_proto == vtl_swap16(ETH_P_IPV6)) {
        struct ipv6hdr *ip = (void *)(eth + 1);
        if ((void *)(ip + 1) > end || ip->nexthdr != VTL_IPPROTO)
            return 0;
        __u32 length = vtl_swap16(ip->payload_len);
        if (length < sizeof(struct vtl_hdr) || length + VTL_OFFSET_V6 > total)
            return -1;
        return (void *)(ip + 1) + sizeof(struct vtl_hdr) > end ? -1 : (int)VTL_OFFSET_V6;
    }
    return 0;
}

/*
 * Where the UDP header of a frame begins that is for VTL's port, behind Ethernet and IP; or 0 if
 * the frame carries something else, or -1 if no VTL packet can lie behind it. On success at least
 * that and a struct vtl_hdr lie before `end`. Fragments, and headers with options, are not looked
 * into: the kernel hands what they carry to vtld, who takes no DATA.
 */
VTL_INLINE int vtl_parse_udp(void *data, void *end, __u32 total) {
    const __u32 least = sizeof(struct udphdr) + sizeof(struct vtl_hdr);
    struct ethhdr *eth = data;
    struct udphdr *udp;
    __u32 length, offset;
    if ((void *)(eth + 1) > end)
        return 0;
    if (eth->h_proto == vtl_swap16(ETH_P_IP)) {
        struct iphdr *ip = (void *)(eth + 1);
        udp = (void *)(ip + 1);
        offset = VTL_OFFSET_V4;
        if ((void *)(udp + 1) > end || ip->protocol != IPPROTO_UDP || ip->ihl != 5 ||
            ip->frag_off & vtl_swap16(0x3fff))
            return 0;
        length = vtl_swap16(ip->tot_len) - sizeof(*ip);
    } else if (eth->h_proto == vtl_swap16(ETH_P_IPV6)) {
        struct ipv6hdr *ip = (void *)(eth + 1);
        udp = (void *)(ip + 1);
        offset = VTL_OFFSET_V6;
        if ((void *)(udp + 1) > end || ip->nexthdr != IPPROTO_UDP)
            return 0;
        length = vtl_swap16(ip->payload_len);
    } else {
        return 0;
    }
    if (udp->dest != vtl_swap16(VTL_UDP_PORT))
        return 0;
    if (!udp->source || vtl_swap16(udp->len) != length || length < least ||
        length > total - offset || (void *)udp + least > end)
        return -1;
    return offset;
}

/*
 * Bytes of the UDP header in packets to a peer with that port, VTL_UDP_HEADER or 0. Calculated, and
 * not decided: the verifier would look at all that follows once for each case. For that reason
 * headers are written for both cases, too.
 */
VTL_INLINE __u32 vtl_udp_room(__be16 port) {
    __u32 n = port;
    asm volatile("" : "+r"(n));
    return -n >> 31 << 3;
}

VTL_INLINE __u8 vtl_protocol(__u32 room) {
    return VTL_IPPROTO - (room >> 3) * (VTL_IPPROTO - IPPROTO_UDP);
}

/* The UDP header in front of `length` bytes. No checksum: VTL has its own (RFC 6935). */
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
    for (int i = 0; i < 10; i++)
        sum += w[i];
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    ip->check = ~sum;
}

/* Exchanges the addresses of a received frame and sets its length, for an answer of `length` bytes
 * to that UDP port, or without UDP: it begins vtl_udp_room() bytes behind `offset`, the length of
 * Ethernet and IP header, and is to be written afterwards. The caller checked the bounds. */
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
        ip->frag_off = vtl_swap16(0x4000);
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
 * front of a packet of `length` bytes, whose first eight are to be written afterwards. */
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

/* Has the path marked the packet (ECN CE, RFC 3168)? `frame` holds its IP header. */
VTL_INLINE int vtl_is_marked(const void *frame, int offset) {
    __u8 bits = ((const __u8 *)frame)[15];
    return (offset == (int)VTL_OFFSET_V4 ? bits & 3 : bits >> 4 & 3) == 3;
}

#endif
