/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* Cube root, for CUBIC's K (RFC 9438): the time until the window is W_max again. */
#ifndef VTL_TF_CUBE_ROOT_H
#define VTL_TF_CUBE_ROOT_H

#include "vtl/tf.h"

/* Cube root of a number below 2^63. A global function: long, and called once per loss. */
VTL_GLOBAL __u32 vtl_cube_root(__u64 x) {
    __u64 root = 0;
    for (int bit = 20; bit >= 0; bit--) {
        __u64 more = root | 1ull << bit;
        root |= vtl_up_to(more * more * more, x) << bit;
    }
    return root;
}

#endif
