/* SPDX-License-Identifier: GPL-2.0-only */
/* A graft compiled for this machine. */
#ifndef VTL_OPS_H
#define VTL_OPS_H

#include "vtl/intf.h"

struct vtl_native_ops {
    const struct vtl_graft_info *info;
    /* Writes the next frame, returns its length or 0. */
    __u32 (*make)(struct vtl_session *s, __u64 now, __u8 *frame);
    /* A DATA or PROBE packet; returns the length of the answer or 0. */
    __u32 (*data)(struct vtl_session *s, const __u8 *frame, __u32 length, int offset, __u8 *answer,
                  __u32 room);
    void (*ack)(struct vtl_session *s, __u64 now, const __u8 *frame, __u32 length, int offset);
};

/* All of them, up to a NULL; build.rs writes it. */
extern const struct vtl_native_ops *const vtl_native_grafts[];

#endif
