/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Distinguishes packets for this host from those that the kernel forwards or bridges. Only called
 * for packets that would be dropped or steered, since it takes a lookup in the routing tables.
 */
#ifndef VTL_LOCAL_H
#define VTL_LOCAL_H

#include "tf.h"

/* Address families: linux/socket.h does not define these for user space. */
enum { VTL_AF_INET = 2, VTL_AF_INET6 = 10 };

/*
 * Whether the packet is for another host. `fib`: family, addresses and interface; overwritten by
 * the kernel. Decided by the kernel's tables, also those of a VRF, so each address of this host is
 * local on every interface, and so are broadcast addresses. Multicast is not for this host: VTL has
 * none. Packets from an interface without forwarding are for this host; bridged frames have another
 * Ethernet address, which tcx programs can tell (`pkt_type`) and XDP's cannot. Packets from the
 * loopback are for this host, and so are those carried over TCP (tunnel.rs), which come from there.
 */
VTL_INLINE int vtl_is_for_another(void *ctx, struct bpf_fib_lookup *fib) {
    if (fib->ifindex == VTL_LOOPBACK_IFINDEX)
        return 0;
    __u8 first = *(__u8 *)fib->ipv6_dst; /* in either family */
    if (fib->family == VTL_AF_INET ? first >> 4 == 0xe : first == 0xff)
        return 1;
    long found = bpf_fib_lookup(ctx, fib, sizeof(*fib), 0);
    return found >= 0 && found != BPF_FIB_LKUP_RET_NOT_FWDED &&
           found != BPF_FIB_LKUP_RET_FWD_DISABLED;
}

#endif
