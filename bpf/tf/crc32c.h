/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/*
 * checksum: CRC32C over the header and the whole payload, as in SCTP (RFC 9260, appendix A) and in
 * DCCP's Data Checksum option (RFC 4340, 9.3), in place of the sum. Detects every burst of up to 32
 * bits; costs a microsecond for a full packet.
 */
#ifndef VTL_TF_CRC32C_H
#define VTL_TF_CRC32C_H

#include "crc32c_table.h"
#include "vtl/tf.h"

VTL_INLINE __u32 vtl_crc32c_word(__u32 crc, __u32 word) {
    crc ^= word;
    return vtl_crc32c_table[3][crc & 255] ^ vtl_crc32c_table[2][crc >> 8 & 255] ^
           vtl_crc32c_table[1][crc >> 16 & 255] ^ vtl_crc32c_table[0][crc >> 24];
}

/* Continues `crc` over the first bytes of a slot. */
VTL_GLOBAL __u32 vtl_crc32c_slot(struct vtl_slot *slot, __u32 bytes, __u32 crc) {
    int i;
    if (!slot || bytes > VTL_MAX_PAYLOAD)
        return crc;
    vtl_for(i, 0, VTL_MAX_PAYLOAD / 4) {
        if (i >= VTL_MAX_PAYLOAD / 4 || (__u32)i * 4 + 4 > bytes)
            break;
        crc = vtl_crc32c_word(crc, ((__u32 *)slot->data)[i]);
    }
    __u32 done = bytes & ~3u;
    for (int n = 0; n < 3; n++) {
        if (done + n < bytes && done + n < VTL_MAX_PAYLOAD)
            crc = crc >> 8 ^ vtl_crc32c_table[0][(crc ^ slot->data[done + n]) & 255];
    }
    return crc;
}

VTL_INLINE __u32 vtl_crc32c_packet(const __u64 *hdr, struct vtl_slot *slot, __u32 bytes) {
    __u32 crc = ~0u;
    for (__u32 i = 0; i < sizeof(struct vtl_data_hdr) / 8; i++) {
        crc = vtl_crc32c_word(crc, (__u32)hdr[i]);
        crc = vtl_crc32c_word(crc, hdr[i] >> 32);
    }
    return ~(slot ? vtl_crc32c_slot(slot, bytes, crc) : crc);
}

/* egress, once the payload is in the packet */
VTL_INLINE void tf_crc32c_add(struct vtl_out *o) {
    o->hdr.data.h.csum = 0;
    o->hdr.data.h.csum = vtl_crc32c_packet(o->hdr.words, o->type == VTL_DATA ? o->slot : 0, o->len);
}

/* ingress: verifies the packet; the payload is in its slot already, not yet published. */
VTL_INLINE enum vtl_verdict tf_crc32c_verify(struct vtl_in *in) {
    VTL_TF(crc32c, 0);
    __u32 want = in->hdr->h.csum;
    in->hdr->h.csum = 0;
    if (vtl_crc32c_packet((const __u64 *)in->hdr, in->slot, in->len) == want)
        return VTL_NEXT;
    in->s->rx.bad_csum++;
    vtl_env_count(VTL_ST_RX_BAD_CSUM);
    return VTL_STOP;
}

#endif
