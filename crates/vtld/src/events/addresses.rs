//! This host's addresses, as they come and go.

use std::{collections::BTreeSet, net::IpAddr};

use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags};
use vtl_control::What;

use super::emit;

/// The addresses of interfaces that are up, but the loopback.
pub(crate) struct Addresses(BTreeSet<(IpAddr, String)>);

impl Addresses {
    /// As they are now.
    pub(crate) fn read() -> Self {
        Self(read().unwrap_or_default())
    }

    /// Tells of those that have come and gone since. Call it when rtnetlink says that something changed.
    pub(crate) fn follow(&mut self) {
        let Ok(now) = read() else { return };
        for (address, interface) in self.0.difference(&now).cloned() {
            let interface = interface.into();
            emit(What::AddressRemoved { address, interface });
        }
        for (address, interface) in now.difference(&self.0).cloned() {
            let interface = interface.into();
            emit(What::AddressAdded { address, interface });
        }
        self.0 = now;
    }
}

fn read() -> nix::Result<BTreeSet<(IpAddr, String)>> {
    let up = InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING;
    let interfaces = getifaddrs()?.filter(|interface| {
        let is_up = interface.flags.contains(up);
        is_up && !interface.flags.contains(InterfaceFlags::IFF_LOOPBACK)
    });
    let row = |interface: nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
        let ip = v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))?;
        Some((ip, interface.interface_name))
    };
    Ok(interfaces.filter_map(row).collect())
}
