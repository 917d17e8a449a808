/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * checksum: full coverage. The sum modulo 2^64 of the packet's little-endian 64-bit words, from
 * version_type to its end, with csum as zero and zero padding; folded to 32 bits and complemented
 * (PROTOCOL.md, section 3). As strong as the sum of RFC 1071, but with 32 bits, at half the cost:
 * eBPF has no addition with carry. vtl_move sums the payload as it copies.
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
VTL_INLINE __u64 vtl_csum_words(const __u64 *w, __u32 words) {
    __u64 sum = 0;
    for (__u32 i = 0; i < words; i++)
        sum += w[i];
    return sum;
}

/* egress, once the payload is in the packet */
VTL_INLINE void tf_checksum_add(struct vtl_out *o) {
    o->hdr.data.h.csum = 0;
    __u64 sum = vtl_csum_words(o->hdr.words, sizeof(struct vtl_data_hdr) / 8);
    o->hdr.data.h.csum = vtl_csum_fold(sum + o->sum);
}

/* ingress: verifies the packet; the payload is in its slot already, not yet published. */
VTL_INLINE enum vtl_verdict tf_checksum_verify(struct vtl_in *in) {
    VTL_TF(checksum, 0);
    __u32 want = in->hdr->h.csum;
    in->hdr->h.csum = 0;
    __u64 sum = vtl_csum_words((const __u64 *)in->hdr, sizeof(struct vtl_data_hdr) / 8);
    if (vtl_csum_fold(sum + in->sum) == want)
        return VTL_NEXT;
    in->s->rx.bad_csum++;
    vtl_env_count(VTL_ST_RX_BAD_CSUM);
    return VTL_STOP;
}

#endif
