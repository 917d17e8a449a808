/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * checksum: full coverage. 32-bit one's complement sum over the packet from version_type to its
 * end, as little-endian words, the csum field counted as zero and the end padded with zeros
 * (PROTOCOL.md). The sum of RFC 1071 in 32 bits: half the false accepts of TCP's per bit of error
 * squared, and as cheap to compute from memory.
 */
#ifndef VTL_TF_CHECKSUM_H
#define VTL_TF_CHECKSUM_H

#include "vtl/tf.h"

VTL_INLINE __u32 vtl_csum_fold(__u64 sum) {
    sum = (sum & 0xffffffff) + (sum >> 32);
    sum = (sum & 0xffffffff) + (sum >> 32);
    return ~(__u32)sum;
}

/* A word that may lie anywhere. Every machine that has a JIT for eBPF reads those in one go, but
 * clang does not know that and would read bytes. */
#ifdef __bpf__
typedef __u32 vtl_word;
#else
typedef __u32 vtl_word __attribute__((aligned(1)));
#endif

/* Sum of the words of a header on the stack. */
VTL_INLINE __u64 vtl_csum_words(const __u32 *w, __u32 words) {
    __u64 sum = 0;
    for (__u32 i = 0; i < words; i++)
        sum += w[i];
    return sum;
}

/*
 * Sum of `len` bytes from `data`, at most VTL_MAX_PAYLOAD; none at or behind `end` is read. `data`
 * may be unaligned.
 */
VTL_INLINE __u64 vtl_csum_bytes(const void *data, const void *end, __u32 len) {
    __u64 sum = 0;
    for (int block = 0; block < VTL_MAX_PAYLOAD / 64; block++) {
        if (len < 64 || data + 64 > end)
            break;
        const vtl_word *w = data;
        sum += (__u64)w[0] + w[1] + w[2] + w[3] + w[4] + w[5] + w[6] + w[7];
        sum += (__u64)w[8] + w[9] + w[10] + w[11] + w[12] + w[13] + w[14] + w[15];
        data += 64;
        len -= 64;
    }
    for (int word = 0; word < 15; word++) {
        if (len < 4 || data + 4 > end)
            break;
        sum += *(const vtl_word *)data;
        data += 4;
        len -= 4;
    }
    const __u8 *rest = data;
    if (len & 2 && data + 2 <= end) {
        sum += rest[0] | (__u32)rest[1] << 8;
        if (len & 1 && data + 3 <= end)
            sum += (__u32)rest[2] << 16;
    } else if (len & 1 && data + 1 <= end) {
        sum += rest[0];
    }
    return sum;
}

/* egress */
VTL_INLINE void tf_checksum_add(struct vtl_out *o) {
    o->hdr.data.h.csum = 0;
    __u64 sum = vtl_csum_words(o->hdr.words, sizeof(struct vtl_data_hdr) / 4);
    if (o->type == VTL_DATA)
        sum += vtl_csum_bytes(o->slot->data, o->slot->data + VTL_SLOT_DATA, o->len);
    o->hdr.data.h.csum = vtl_csum_fold(sum);
}

/* ingress */
VTL_INLINE enum vtl_verdict tf_checksum_verify(struct vtl_in *in) {
    __u32 want = in->hdr->h.csum;
    in->hdr->h.csum = 0;
    __u64 sum = vtl_csum_words((const __u32 *)in->hdr, sizeof(struct vtl_data_hdr) / 4);
    if (in->type == VTL_DATA)
        sum += vtl_csum_bytes(in->payload, in->end, in->len);
    if (vtl_csum_fold(sum) == want)
        return VTL_NEXT;
    in->s->rx.bad_csum++;
    vtl_env_count(VTL_ST_RX_BAD_CSUM);
    return VTL_STOP;
}

#endif
