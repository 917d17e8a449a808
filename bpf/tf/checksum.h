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

/* Sum of the words of a header on the stack. */
VTL_INLINE __u64 vtl_csum_words(const __u32 *w, __u32 words) {
    __u64 sum = 0;
    for (__u32 i = 0; i < words; i++)
        sum += w[i];
    return sum;
}

/*
 * Sum of `len` bytes of a slot, len at most VTL_MAX_PAYLOAD. Zeroes up to 64 bytes behind them, so
 * that whole blocks can be added and short packets padded; VTL_SLOT_DATA leaves room for that.
 */
VTL_INLINE __u64 vtl_csum_slot(struct vtl_slot *slot, __u32 len) {
    __u64 sum = 0;
    if (len > VTL_MAX_PAYLOAD)
        return 0;
    /* Unaligned on purpose, which clang would split into bytes: the stores are volatile words. */
    volatile __u64 *pad = (volatile __u64 *)(slot->data + len);
    for (int i = 0; i < 8; i++)
        pad[i] = 0;
    const __u32 *w = (const __u32 *)slot->data;
    for (int block = 0; block < (VTL_MAX_PAYLOAD + 63) / 64; block++) {
        if ((__u32)block * 64 >= len)
            break;
        sum += (__u64)w[0] + w[1] + w[2] + w[3] + w[4] + w[5] + w[6] + w[7];
        sum += (__u64)w[8] + w[9] + w[10] + w[11] + w[12] + w[13] + w[14] + w[15];
        w += 16;
    }
    return sum;
}

/* egress */
VTL_INLINE void tf_checksum_add(struct vtl_out *o) {
    o->hdr.data.h.csum = 0;
    __u64 sum = vtl_csum_words(o->hdr.words, sizeof(struct vtl_data_hdr) / 4);
    if (o->type == VTL_DATA)
        sum += vtl_csum_slot(o->slot, o->len);
    o->hdr.data.h.csum = vtl_csum_fold(sum);
}

/* ingress: the payload already lies in its slot, where nobody looks before it is published. */
VTL_INLINE enum vtl_verdict tf_checksum_verify(struct vtl_in *in) {
    __u32 want = in->hdr->h.csum;
    in->hdr->h.csum = 0;
    __u64 sum = vtl_csum_words((const __u32 *)in->hdr, sizeof(struct vtl_data_hdr) / 4);
    if (in->type == VTL_DATA && in->slot)
        sum += vtl_csum_slot(in->slot, in->len);
    if (vtl_csum_fold(sum) == want)
        return VTL_NEXT;
    in->s->rx.bad_csum++;
    vtl_env_count(VTL_ST_RX_BAD_CSUM);
    return VTL_STOP;
}

#endif
