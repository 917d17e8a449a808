/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * checksum: partial coverage, as in UDP-Lite (RFC 3828). Covers the header and as many bytes of
 * payload as the packet says; damage beyond them reaches the application, which may prefer it to a
 * loss.
 */
#ifndef VTL_TF_CHECKSUM_COVER_H
#define VTL_TF_CHECKSUM_COVER_H

#include "checksum.h"

/* Sum of the first `bytes` of a slot, zero-padded. */
VTL_GLOBAL __u64 vtl_sum_start(struct vtl_slot *slot, __u32 bytes) {
    __u64 sum = 0;
    int i;
    if (!slot || bytes > VTL_MAX_PAYLOAD)
        return 0;
    vtl_for(i, 0, VTL_MAX_PAYLOAD / 8) {
        if (i >= VTL_MAX_PAYLOAD / 8 || (__u32)i * 8 >= bytes)
            break;
        __u64 w = ((__u64 *)slot->data)[i];
        __u32 left = bytes - i * 8;
        if (left < 8)
            w &= ~(~0ull << 8 * left);
        sum += w;
    }
    return sum;
}

/* egress, once the payload is in the packet */
VTL_INLINE void tf_checksum_cover_add(struct vtl_out *o, __u32 coverage) {
    __u32 bytes = o->type != VTL_DATA ? 0 : coverage < o->len ? coverage : o->len;
    o->hdr.data.h.aux = vtl_swap16((__u16)bytes);
    o->hdr.data.h.csum = 0;
    __u64 sum = vtl_csum_words(o->hdr.words, sizeof(struct vtl_data_hdr) / 8);
    o->hdr.data.h.csum = vtl_csum_fold(sum + (bytes ? vtl_sum_start(o->slot, bytes) : 0));
}

/* ingress: verifies the packet; the payload is in its slot already, not yet published. */
VTL_INLINE enum vtl_verdict tf_checksum_cover_verify(struct vtl_in *in) {
    VTL_TF(checksum_cover, 0);
    __u32 want = in->hdr->h.csum;
    __u32 bytes = vtl_swap16(in->hdr->h.aux);
    in->hdr->h.csum = 0;
    __u64 sum = vtl_csum_words((const __u64 *)in->hdr, sizeof(struct vtl_data_hdr) / 8);
    if (bytes <= in->len && bytes && in->slot)
        sum += vtl_sum_start(in->slot, bytes);
    if (bytes <= in->len && vtl_csum_fold(sum) == want)
        return VTL_NEXT;
    in->s->rx.bad_csum++;
    vtl_env_count(VTL_ST_RX_BAD_CSUM);
    return VTL_STOP;
}

#endif
