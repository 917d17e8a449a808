/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* When CUBIC's window (RFC 9438) is again what it was: the inverse of its curve. */
#ifndef VTL_TF_CUBE_ROOT_H
#define VTL_TF_CUBE_ROOT_H

#include "vtl/tf.h"

/* Of a number below 2^63. A function of its own: once in a loss, and long. */
VTL_GLOBAL __u32 vtl_cube_root(__u64 x) {
    __u64 root = 0;
    for (int bit = 20; bit >= 0; bit--) {
        __u64 more = root | 1ull << bit;
        root |= vtl_up_to(more * more * more, x) << bit;
    }
    return root;
}

#endif
