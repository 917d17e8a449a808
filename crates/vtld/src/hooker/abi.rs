//! `bpf/include/vtl/hooker.h` in Rust, and addresses in its form.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

pub(super) use vtl_proto::intf::{
    VTL_CC_NAME_MAX, VTL_GATEWAY_FILTERS_MAX, VTL_GATEWAY_INJECT, VTL_LEVELS, VTL_POLICY_NEAR,
    VTL_POLICY_PLAIN, VTL_POLICY_REQUIRE, VTL_PREFIX_6, VTL_RULES_MAX, VTL_SOCK_FLOW,
    VTL_SOCK_GAVE_UP, VTL_SOCK_OFFER, VTL_SOCK_PEER, VTL_STEER_4, VTL_STEER_6, VTL_STEP_ACT,
    VTL_STEP_END, VTL_STEP_EXE, VTL_STEP_GROUP, VTL_STEP_LOCAL, VTL_STEP_PORT, VTL_STEP_PREFIX,
    VTL_STEP_USER, VTL_STEPS_MAX, VTL_SYN_MAX, vtl_carrier_config, vtl_endpoint, vtl_exe,
    vtl_flow_name, vtl_four_tuple, vtl_gateway_hop, vtl_gateway_port, vtl_gateway_prefix,
    vtl_gateway_syn, vtl_hook_config, vtl_identity, vtl_near, vtl_own_socket, vtl_step, vtl_syn,
};

/// Types without padding and without invalid values, which can be converted from and to bytes.
///
/// # Safety
/// Every byte pattern of the type's size must be a valid value, and no byte may be padding.
pub(super) unsafe trait Pod: Copy {}

// SAFETY: integers and arrays of them, laid out without holes.
unsafe impl Pod for vtl_endpoint {}
// SAFETY: as above.
unsafe impl Pod for vtl_four_tuple {}
// SAFETY: as above.
unsafe impl Pod for vtl_hook_config {}
// SAFETY: as above.
unsafe impl Pod for vtl_carrier_config {}
// SAFETY: as above.
unsafe impl Pod for vtl_step {}
// SAFETY: as above.
unsafe impl Pod for vtl_identity {}
// SAFETY: as above.
unsafe impl Pod for vtl_own_socket {}
// SAFETY: as above.
unsafe impl Pod for vtl_near {}
// SAFETY: as above; what lies between `exe` and the end is 160 bytes, a multiple of eight.
unsafe impl Pod for vtl_syn {}
// SAFETY: as above.
unsafe impl Pod for vtl_gateway_syn {}
// SAFETY: as above.
unsafe impl Pod for vtl_gateway_hop {}
// SAFETY: as above.
unsafe impl Pod for vtl_gateway_prefix {}
// SAFETY: as above.
unsafe impl Pod for vtl_gateway_port {}

pub(super) fn bytes_of<T: Pod>(value: &T) -> &[u8] {
    // SAFETY: `value` is live for the returned lifetime and, being Pod, all its bytes are
    // initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// The value at the beginning of `bytes`, if these are enough for a `T`: map values are padded to eight bytes.
pub(super) fn from_bytes<T: Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: the length was checked, the read is unaligned, every pattern is a valid Pod.
    (bytes.len() >= size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

pub(super) fn endpoint(addr: SocketAddr) -> vtl_endpoint {
    vtl_endpoint {
        addr: wide(addr.ip()).octets(),
        port: addr.port().to_be(),
        pad: 0,
    }
}

pub(super) fn ends([from, to]: [SocketAddr; 2]) -> vtl_four_tuple {
    vtl_four_tuple {
        from: endpoint(from),
        to: endpoint(to),
    }
}

/// The addresses of [`ends`].
pub(super) fn both(ends: &vtl_four_tuple) -> [SocketAddr; 2] {
    [socket_addr(&ends.from), socket_addr(&ends.to)]
}

pub(super) fn socket_addr(endpoint: &vtl_endpoint) -> SocketAddr {
    let ip = Ipv6Addr::from(endpoint.addr).to_canonical();
    SocketAddr::new(ip, u16::from_be(endpoint.port))
}

/// IPv4 mapped into IPv6 (RFC 4291, 2.5.5.2).
pub(super) fn wide(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}
