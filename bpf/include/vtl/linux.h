/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* Types of the kernel. eBPF programs take them, like everything else of the kernel, from vmlinux.h,
 * never from the build host; user-space code takes them from its host. */
#ifndef VTL_LINUX_H
#define VTL_LINUX_H

#ifdef __bpf__
#include "vmlinux.h"
#else
#include <linux/types.h>
#endif

#endif
