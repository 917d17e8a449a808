/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Whether a packet that came in is for this host, or for another one that the kernel forwards or
 * bridges it to. Asked only about packets that would be dropped or steered: it takes a lookup in
 * the routing tables.
 */
#ifndef VTL_LOCAL_H
#define VTL_LOCAL_H

#include "tf.h"

/* Address families: linux/socket.h has no such names for user space. */
enum { VTL_AF_INET = 2, VTL_AF_INET6 = 10 };

/* What comes in here is for this host, and so is what comes by TCP (tunnel.rs). */
enum { VTL_LOOPBACK_IFINDEX = 1 };

/*
 * Is the packet for another host? `fib` has family, addresses and interface; the kernel writes to
 * it. The kernel's tables decide, those of a VRF too, so each address of this host counts as its
 * own on every interface, and so do broadcast addresses. Multicast is nobody's: VTL has none. What
 * comes in at an interface that forwards nothing is for this host; frames that are bridged there
 * have another Ethernet address, which tcx programs can tell (`pkt_type`) and XDP's cannot.
 */
VTL_INLINE int vtl_is_for_another(void *ctx, struct bpf_fib_lookup *fib) {
    if (fib->ifindex == VTL_LOOPBACK_IFINDEX)
        return 0;
    __u8 first = *(__u8 *)fib->ipv6_dst; /* of either family's address */
    if (fib->family == VTL_AF_INET ? first >> 4 == 0xe : first == 0xff)
        return 1;
    long found = bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);
    return found >= 0 && found != BPF_FIB_LKUP_RET_NOT_FWDED &&
           found != BPF_FIB_LKUP_RET_FWD_DISABLED;
}

#endif
