//! This host's addresses, as they come and go (rtnetlink).

use std::{
    cell::{Cell, RefCell},
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
};

use tokio::{io::unix::AsyncFd, sync::Notify, task::spawn_local};
use vtl_bpf::netdev;

use super::socket::watch;
use crate::{
    Scope, addresses,
    hooker::{drain, watch_interfaces},
};

/// An address of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Own {
    pub(super) address: IpAddr,
    /// Its interface.
    pub(super) index: u32,
}

/// The addresses of interfaces that VTL uses, without the loopback's and link-local ones.
pub(super) struct Addresses {
    scope: Scope,
    all: RefCell<Vec<Own>>,
    version: Cell<u64>,
    changed: Notify,
}

impl Addresses {
    /// Reads the addresses, and follows changes for as long as it is used.
    pub(super) fn start(scope: Scope) -> Rc<Self> {
        // First: what changes from here on is told there.
        let socket = watch_interfaces().map_err(io::Error::other).and_then(watch);
        let addresses = Rc::new(Self {
            all: RefCell::new(read(&scope)),
            scope,
            version: Cell::new(0),
            changed: Notify::new(),
        });
        match socket {
            Ok(socket) => drop(spawn_local(Rc::clone(&addresses).follow(socket))),
            Err(error) => tracing::warn!(%error, "addresses: changes are not followed"),
        }
        addresses
    }

    async fn follow(self: Rc<Self>, socket: AsyncFd<OwnedFd>) {
        while let Ok(mut ready) = socket.readable().await {
            drain(socket.get_ref().as_fd());
            ready.clear_ready();
            let all = read(&self.scope);
            if *self.all.borrow() != all {
                self.all.replace(all);
                self.version.set(self.version.get() + 1);
                self.changed.notify_waiters();
            }
        }
    }

    /// The addresses.
    pub(super) fn all(&self) -> Vec<Own> {
        self.all.borrow().clone()
    }

    /// Changes with them.
    pub(super) fn version(&self) -> u64 {
        self.version.get()
    }

    /// Completes when they are others than in this version.
    pub(super) async fn changed(&self, version: u64) {
        while self.version.get() == version {
            self.changed.notified().await;
        }
    }

    /// What a peer may reach this host by besides `known`, one address of each interface: of the same family, and none
    /// of private networks for a peer from outside.
    pub(super) fn further(&self, known: IpAddr, peer: IpAddr) -> Vec<IpAddr> {
        let all = self.all.borrow();
        further(&all, known.to_canonical(), peer.to_canonical())
    }
}

/// The addresses of other interfaces than `known`'s, one each.
pub(super) fn elsewhere(all: &[Own], known: IpAddr) -> Vec<Own> {
    let home = all.iter().find(|own| own.address == known);
    let mut seen: Vec<u32> = home.map(|own| own.index).into_iter().collect();
    let mut found = Vec::new();
    for own in all {
        if own.address.is_ipv4() == known.is_ipv4() && !seen.contains(&own.index) {
            seen.push(own.index);
            found.push(*own);
        }
    }
    found
}

fn further(all: &[Own], known: IpAddr, peer: IpAddr) -> Vec<IpAddr> {
    let others = elsewhere(all, known).into_iter().map(|own| own.address);
    // RFC 6598: a carrier's customers are outside, though they are told of the carrier's own network.
    let is_inside = is_private(peer) && !is_shared(peer);
    let may_know = |address: &IpAddr| {
        is_inside || !is_private(*address) || is_shared(*address) && is_shared(peer)
    };
    others.filter(may_know).collect()
}

/// Whether an address means something in one network only.
pub(super) fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_private() || is_shared(address),
        IpAddr::V6(v6) => v6.is_unique_local(),
    }
}

/// Whether an address is of a network between a carrier and its customers (RFC 6598).
fn is_shared(address: IpAddr) -> bool {
    let IpAddr::V4(v4) = address else {
        return false;
    };
    let [a, b, ..] = v4.octets();
    (a, b & 0xc0) == (100, 64)
}

fn read(scope: &Scope) -> Vec<Own> {
    let is_local = |address: &IpAddr| match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let all = addresses::own().unwrap_or_default().into_iter();
    let ours = all.filter(|own| own.is_up && scope.has(&own.interface) && !is_local(&own.address));
    let row = |own: addresses::Own| {
        let index = netdev::index_of(&own.interface).ok()?;
        let address = own.address;
        Some(Own { address, index })
    };
    ours.filter_map(row).collect()
}

#[cfg(test)]
#[allow(non_snake_case)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn ip(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    /// An address of the interface with this index.
    pub(in super::super) fn own(address: &str, index: u32) -> Own {
        let address = ip(address);
        Own { address, index }
    }

    #[test]
    fn elsewhere__one_address_of_each_other_interface() {
        let all = [
            own("192.0.2.1", 2),
            own("192.0.2.9", 2),
            own("2001:db8::1", 3),
            own("198.51.100.1", 3),
            own("198.51.100.2", 3),
        ];
        assert_eq!(elsewhere(&all, ip("192.0.2.9")), [own("198.51.100.1", 3)]);
        // It is gone, and with it what its interface was.
        let left = elsewhere(&all[3..], ip("192.0.2.9"));
        assert_eq!(left, [own("198.51.100.1", 3)]);
        assert_eq!(elsewhere(&all, ip("2001:db8::7")), [own("2001:db8::1", 3)]);
    }

    #[test]
    fn further__nothing_private_for_peers_from_outside() {
        let all = [
            own("192.0.2.1", 2),
            own("10.1.2.3", 3),
            own("100.64.0.1", 4),
            own("198.51.100.1", 5),
        ];
        let known = ip("192.0.2.1");
        assert_eq!(
            further(&all, known, ip("203.0.113.5")),
            [ip("198.51.100.1")]
        );
        assert_eq!(further(&all, known, ip("10.9.9.9")).len(), 3);
        let shared = ["100.64.0.1", "198.51.100.1"].map(ip);
        assert_eq!(further(&all, known, ip("100.99.9.9")), shared);
    }
}
