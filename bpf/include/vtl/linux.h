/* SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0 OR MIT) */
/* The kernel's types. eBPF programs have them, and all else of the kernel's, from vmlinux.h, never
 * from the system that compiles them; what runs in user space has them from its system. */
#ifndef VTL_LINUX_H
#define VTL_LINUX_H

#ifdef __bpf__
#include "vmlinux.h"
#else
#include <linux/types.h>
#endif

#endif
