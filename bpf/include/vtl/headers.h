/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* Views of a packet's headers: Ethernet, IP and UDP as the kernel defines them, and VTL's, with
 * names for bits, and with both versions of IP behind one name. */
#ifndef VTL_HEADERS_H
#define VTL_HEADERS_H

#ifndef __bpf__
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#endif
#include "tf.h"

/* Length of Ethernet and IP header, without options. */
#define VTL_OFFSET_V4 (sizeof(struct ethhdr) + sizeof(struct iphdr))
#define VTL_OFFSET_V6 (sizeof(struct ethhdr) + sizeof(struct ipv6hdr))
_Static_assert(VTL_HEADROOM == VTL_OFFSET_V6, "the longest headers in front of VTL's");
_Static_assert(VTL_UDP_HEADER == sizeof(struct udphdr), "UDP's header");

enum {
    /* iphdr.frag_off */
    VTL_IP_DONT_FRAGMENT = 0x4000,
    VTL_IP_FRAGMENT = 0x3fff, /* more-fragments bit and offset: not 0 in any fragment */
    /* Explicit congestion notification (RFC 3168) */
    VTL_ECN_ECT0 = 2,
    VTL_ECN_CE = 3,
    VTL_ECN_MASK = 3,
    VTL_ECN_V6_SHIFT = 4, /* in ipv6hdr.flow_lbl[0], whose high half ends the traffic class */
};

/* ECN bits of the IP header in a frame, whose VTL or UDP header begins at `offset`. */
VTL_INLINE __u32 vtl_ecn(const void *frame, int offset) {
    const void *ip = frame + sizeof(struct ethhdr);
    return (offset == (int)VTL_OFFSET_V4
                ? ((const struct iphdr *)ip)->tos
                : ((const struct ipv6hdr *)ip)->flow_lbl[0] >> VTL_ECN_V6_SHIFT) &
           VTL_ECN_MASK;
}

/* Sets ECT(0) in a session's IP header. */
VTL_INLINE void vtl_ecn_capable(struct vtl_session *s) {
    void *ip = s->headers + sizeof(struct ethhdr);
    if (s->ip_version == 4)
        ((struct iphdr *)ip)->tos |= VTL_ECN_ECT0;
    else
        ((struct ipv6hdr *)ip)->flow_lbl[0] |= VTL_ECN_ECT0 << VTL_ECN_V6_SHIFT;
}

/* Type of the packet; may be beyond enum vtl_type. */
VTL_INLINE __u32 vtl_hdr_type(const struct vtl_hdr *h) {
    return h->version_type & 0xf;
}

VTL_INLINE __u32 vtl_hdr_version(const struct vtl_hdr *h) {
    return h->version_type >> 4;
}

/* Writes the common header of a session's packet; checksum and tag come last (graft_seal). */
VTL_INLINE void vtl_hdr_write(struct vtl_hdr *h, const struct vtl_session *s, __u32 type,
                              __u8 flags, __u32 len) {
    h->version_type = VTL_VERSION << 4 | type;
    h->flags = flags;
    h->gid = vtl_swap16(s->gid);
    h->sid = vtl_swap32(s->peer_sid);
    h->token = vtl_swap64(s->peer_token);
    h->len = vtl_swap16((__u16)len);
    h->aux = 0;
}

#endif
