//! This host's addresses, as the kernel has them now.

use std::net::IpAddr;

use nix::{ifaddrs, net::if_::InterfaceFlags};

/// An address of this host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Own {
    pub(crate) address: IpAddr,
    /// The name of its interface.
    pub(crate) interface: String,
    /// Others may reach it: the interface is up, and not the loopback.
    pub(crate) is_up: bool,
}

/// All of them, in the kernel's order.
///
/// # Errors
/// Those of getifaddrs(3).
pub(crate) fn own() -> nix::Result<Vec<Own>> {
    let up = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let row = |interface: ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        Some(Own {
            address: v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))?,
            is_up: interface.flags.contains(up)
                && !interface.flags.contains(InterfaceFlags::IFF_LOOPBACK),
            interface: interface.interface_name,
        })
    };
    Ok(ifaddrs::getifaddrs()?.filter_map(row).collect())
}
