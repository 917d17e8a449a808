/* SPDX-License-Identifier: GPL-2.0-only */
/* VTL's option in a SYN, and others that matter. */
#ifndef VTL_SYN_H
#define VTL_SYN_H

#include "hooker.h"
#include "segment.h"

/* The option as on the wire. */
struct option {
    __u8 kind, len;
    __be16 exid;
    struct vtl_flow_name flow;
};

/* Kind of VTL's option in a SYN. */
enum syn_says {
    SYN_NOTHING,
    SYN_FLOW,
    SYN_CONTROL,
    SYN_BOUND, /* signed, or a further subflow of MPTCP: only its own end can answer it */
};

/* Maximum bytes of options. Kinds of options without a length (RFC 9293, 3.2). */
enum { OPTIONS_MAX = 40, OPTION_END = 0, OPTION_NOP = 1 };

/* Kinds of options that bind a SYN to its ends: RFC 2385, RFC 5925, and RFC 8684 with its subtype
 * MP_JOIN. */
enum { OPT_MD5 = 19, OPT_AO = 29, OPT_MPTCP = 30, MPTCP_JOIN = 1 };

/* Copies the IP and TCP header of a SYN, `len` bytes; 0: success. */
static __always_inline long load_syn(struct __sk_buff *skb, __u8 to[VTL_SYN_MAX], __u32 len) {
    const __u32 min = sizeof(struct iphdr) + sizeof(struct tcphdr);
    __u32 more = vtl_hidden(len - min);

    return more > VTL_SYN_MAX - min || load_ip(skb, 0, to, more + min);
}

/* What the options of a SYN say, whose TCP header is at `off`; *flow: VTL's option's content, in
 * the first two cases of VTL's. */
static __always_inline enum syn_says vtl_option(struct __sk_buff *skb, __u32 off, __u32 doff,
                                                struct vtl_flow_name *flow) {
    __u8 opts[OPTIONS_MAX + VTL_OPT_LEN];
    __u32 len = doff * 4 - sizeof(struct tcphdr), i = 0;

    if (doff <= 5 || len < VTL_OPT_LEN || len > OPTIONS_MAX)
        return SYN_NOTHING;
    __builtin_memset(opts, 0, sizeof(opts));
    if (load_ip(skb, off + sizeof(struct tcphdr), opts, len))
        return SYN_NOTHING;
    /* Every option but the end takes at least one byte. */
    int turn;
    vtl_for(turn, 0, OPTIONS_MAX) {
        if (i > OPTIONS_MAX - VTL_OPT_LEN)
            return SYN_NOTHING;
        __u8 kind = opts[i], size = opts[i + 1];
        if (kind == OPTION_END)
            return SYN_NOTHING;
        if (kind == OPTION_NOP) {
            i++;
            continue;
        }
        /* Byte by byte: unaligned. */
        const __u8 *exid = opts + i + offsetof(struct option, exid);
        const __u8 *number = opts + i + offsetof(struct option, flow.number);
        if (kind == VTL_OPT_KIND && size == VTL_OPT_LEN && exid[0] == VTL_OPT_EXID >> 8 &&
            exid[1] == (VTL_OPT_EXID & 0xff)) {
            const __u8 *tag = opts + i + offsetof(struct option, flow.tag);
            __u8 *to = (__u8 *)flow;
            for (int k = 0; k < 4; k++) {
                to[offsetof(struct vtl_flow_name, tag) + k] = tag[k];
                to[offsetof(struct vtl_flow_name, number) + k] = number[k];
            }
            return flow->number ? SYN_FLOW : SYN_CONTROL;
        }
        if (kind == OPT_MD5 || kind == OPT_AO ||
            (kind == OPT_MPTCP && opts[i + 2] >> 4 == MPTCP_JOIN))
            return SYN_BOUND;
        if (size < 2)
            return SYN_NOTHING;
        i += size;
    }
    return SYN_NOTHING;
}

#endif
