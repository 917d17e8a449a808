//! Address prefixes for quotas and limits: what one subscriber is usually assigned.

use std::{
    cell::RefCell,
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    rc::Rc,
};

use crate::hooker::rules::Prefix;

/// Entries evicted at a time.
const AT_ONCE: usize = 64;

/// An IPv4 address, or an IPv6 /64, within which hosts choose addresses freely (RFC 4291, section 2.5.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Network(IpAddr);

impl Network {
    /// The network of an address.
    pub(crate) fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(v4) => Self(v4.into()),
            IpAddr::V6(v6) => {
                let [a, b, c, d, ..] = v6.segments();
                Self(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into())
            }
        }
    }
}

/// Those who wait for something, which anybody may ask for: a bounded number, and of one network at most a quarter.
#[derive(Debug)]
pub(crate) struct Waiting {
    all: Rc<RefCell<Vec<Network>>>,
    max: usize,
}

impl Waiting {
    /// Nobody yet, and `max` at most.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            all: Rc::default(),
            max,
        }
    }

    /// A place for another one, until it is dropped. `None`: there is none.
    pub(crate) fn enter(&self, network: Network) -> Option<Place> {
        let mut all = self.all.borrow_mut();
        let of_network = all.iter().filter(|other| **other == network).count();
        if all.len() >= self.max || of_network >= self.max / 4 {
            return None;
        }
        all.push(network);
        let all = Rc::clone(&self.all);
        Some(Place { all, network })
    }
}

/// A place among those who wait.
#[derive(Debug)]
pub(crate) struct Place {
    all: Rc<RefCell<Vec<Network>>>,
    network: Network,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.all.borrow_mut();
        if let Some(place) = all.iter().position(|other| *other == self.network) {
            all.swap_remove(place);
        }
    }
}

/// Whether a host may use VTL here: one of these prefixes contains it, or there are none.
pub(crate) fn admits(from: &[Prefix], host: IpAddr) -> bool {
    let host = host.to_canonical();
    from.is_empty() || from.iter().any(|prefix| prefix.contains(host))
}

/// Evicts entries of a full cache keyed by address; `retain` is the cache's. They belong to the network with
/// most entries, so that no network can evict another's.
pub(crate) fn make_room(
    addresses: impl Iterator<Item = IpAddr>,
    retain: impl FnOnce(&mut dyn FnMut(IpAddr) -> bool),
) {
    let mut counts: HashMap<Network, usize> = HashMap::new();
    for address in addresses {
        *counts.entry(Network::of(address)).or_default() += 1;
    }
    let largest = counts.into_iter().max_by_key(|(_, count)| *count);
    let Some((largest, _)) = largest else { return };
    let mut spare = AT_ONCE;
    retain(&mut |address| {
        let goes = spare > 0 && Network::of(address) == largest;
        spare -= usize::from(goes);
        !goes
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn admits__those_of_a_prefix() {
        let from = ["192.0.2.0/24", "2001:db8::/32"].map(|text| text.parse().expect("a prefix"));
        let is_admitted = |text: &str| admits(&from, text.parse().expect("an address"));
        assert!(is_admitted("192.0.2.7") && is_admitted("::ffff:192.0.2.7"));
        assert!(is_admitted("2001:db8:1::1"));
        assert!(!is_admitted("192.0.3.7") && !is_admitted("2001:db9::1"));
        assert!(admits(&[], "192.0.3.7".parse().expect("an address")));
    }

    #[test]
    fn make_room__at_the_cost_of_the_largest() {
        let mut all: Vec<IpAddr> = (0..100).map(|n| [10, 0, 0, n].into()).collect();
        let of_one = |n| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, n));
        all.extend((0..200).map(of_one));
        for (round, left) in [(1, 236), (2, 172), (3, 108), (4, 100)] {
            make_room(all.clone().into_iter(), |keep| all.retain(|a| keep(*a)));
            assert_eq!(all.len(), left, "round {round}");
            assert_eq!(all.iter().filter(|a| a.is_ipv4()).count(), 100);
        }
    }

    #[test]
    fn network__of_addresses() {
        let of = |text: &str| Network::of(text.parse().expect("an address"));
        assert_eq!(of("2001:db8:1:2::3"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::3"), of("2001:db8:1:3::3"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.2"), of("192.0.2.1"));
    }
}
