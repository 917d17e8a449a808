/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * Tag of a header: SipHash-2-4 (Aumasson and Bernstein, 2012) over its bytes as little-endian
 * words, with the token in its place. In sessions with keys the tag travels instead of the token
 * (PROTOCOL.md, section 4, "Keys"), in memory order.
 */
#ifndef VTL_TAG_H
#define VTL_TAG_H

#include "tf.h"

/* Word of vtl_hdr with the token, or the tag. */
enum { VTL_TOKEN_WORD = 1 };

#define VTL_ROTATE(x, by) ((x) << (by) | (x) >> (64 - (by)))
#define VTL_SIP_ROUND(a, b, c, d)                                                                  \
    do {                                                                                           \
        a += b;                                                                                    \
        c += d;                                                                                    \
        b = VTL_ROTATE(b, 13) ^ a;                                                                 \
        d = VTL_ROTATE(d, 16) ^ c;                                                                 \
        a = VTL_ROTATE(a, 32);                                                                     \
        c += b;                                                                                    \
        a += d;                                                                                    \
        b = VTL_ROTATE(b, 17) ^ c;                                                                 \
        d = VTL_ROTATE(d, 21) ^ a;                                                                 \
        c = VTL_ROTATE(c, 32);                                                                     \
    } while (0)

/* SipHash-2-4 of the first `count` words. */
VTL_INLINE __u64 vtl_tag(__u64 k0, __u64 k1, const struct vtl_tagged *t, __u32 count) {
    __u64 a = k0 ^ 0x736f6d6570736575ull, b = k1 ^ 0x646f72616e646f6dull;
    __u64 c = k0 ^ 0x6c7967656e657261ull, d = k1 ^ 0x7465646279746573ull;
    for (__u32 i = 0; i < VTL_TAGGED_WORDS && i < count; i++) {
        __u64 w = t->word[i];
        d ^= w;
        VTL_SIP_ROUND(a, b, c, d);
        VTL_SIP_ROUND(a, b, c, d);
        a ^= w;
    }
    __u64 last = (__u64)count * 8 << 56;
    d ^= last;
    VTL_SIP_ROUND(a, b, c, d);
    VTL_SIP_ROUND(a, b, c, d);
    a ^= last;
    c ^= 0xff;
    VTL_SIP_ROUND(a, b, c, d);
    VTL_SIP_ROUND(a, b, c, d);
    VTL_SIP_ROUND(a, b, c, d);
    VTL_SIP_ROUND(a, b, c, d);
    return a ^ b ^ c ^ d;
}

/* Words of the header that the tag protects, by type. */
VTL_INLINE __u32 vtl_tagged_words(__u32 type) {
    return (type == VTL_ACK                         ? sizeof(struct vtl_ack_hdr)
            : type == VTL_DATA || type == VTL_PROBE ? sizeof(struct vtl_data_hdr)
                                                    : sizeof(struct vtl_hdr)) /
           8;
}

/* Puts the tag into a finished header of `bytes`, if the session has keys. A global function: many
 * paths lead to it. */
VTL_GLOBAL int vtl_put_tag(struct vtl_session *s, struct vtl_tagged *t, __u32 bytes) {
    if (s && t && s->keyed)
        t->word[VTL_TOKEN_WORD] = vtl_tag(s->tag_out.word[0], s->tag_out.word[1], t, bytes / 8);
    return 0;
}

/* Expected tag of the peer's header of that type, which contains the token. */
VTL_GLOBAL __u64 vtl_expected_tag(struct vtl_session *s, const struct vtl_tagged *t, __u32 type) {
    if (!s || !t)
        return 0;
    __u64 k0 = s->tag_in.word[0], k1 = s->tag_in.word[1];
    return vtl_tag(k0, k1, t, vtl_tagged_words(type));
}

/* Restores the token in a copy of a header that root has authenticated, by token or tag. */
VTL_INLINE void vtl_put_token(struct vtl_session *s, struct vtl_hdr *h) {
    h->token = vtl_swap64(s->token);
}

#endif
