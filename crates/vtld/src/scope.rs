//! The network interfaces that VTL uses (`vtld --interface`), and which of them a route uses.

use std::{collections::BTreeSet, io, net::IpAddr};

use nix::{net::if_::if_nameindex, sys::socket::SockProtocol};
use vtl_bpf::{
    netdev,
    netlink::{self, attribute, attributes, value},
};

/// The loopback's index in every network namespace.
pub(crate) const LOOPBACK: u32 = 1;

/// Names of the interfaces; empty: all. The loopback is neither inside nor outside: VTL does not use it, and
/// packets of a host to itself pass.
#[derive(Clone, Debug, Default)]
pub struct Scope(Vec<String>);

impl Scope {
    /// Creates a scope of these names, which need not exist yet.
    pub fn new(names: Vec<String>) -> Self {
        Self(names)
    }

    /// Whether it contains all interfaces.
    pub(crate) fn is_all(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it contains an interface of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.is_all() || self.0.iter().any(|known| known == name)
    }

    /// Whether an interface with this index exists and is in scope.
    pub(crate) fn has_index(&self, index: u32) -> bool {
        netdev::name_of(index).is_some_and(|name| self.has(&name))
    }

    /// Indexes of existing interfaces in scope, and the loopback's.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub(crate) fn inside(&self) -> io::Result<BTreeSet<u32>> {
        let all = if_nameindex()?;
        let ours = all
            .iter()
            .filter(|one| self.has(&one.name().to_string_lossy()));
        Ok(ours.map(|one| one.index()).chain([LOOPBACK]).collect())
    }

    /// Names without an interface at present.
    pub(crate) fn absent(&self) -> impl Iterator<Item = &str> {
        let names = self.0.iter().map(String::as_str);
        names.filter(|name| netdev::index_of(name).is_err())
    }

    /// Whether packets to a host leave through an interface in scope; false if the route is unknown.
    pub(crate) fn leads_to(&self, to: IpAddr, from: IpAddr, mark: u32) -> bool {
        self.is_all() || exit(to, from, mark).is_ok_and(|index| self.has_index(index))
    }
}

// linux/rtnetlink.h: length of an `rtmsg`, `rtm_type` in it, and an attribute.
const ROUTE: usize = 12;
const TYPE: usize = 7;
const RTA_MARK: u16 = 16;

/// Looks up the interface of the route between these addresses, or `to` one from whichever the kernel takes.
pub(crate) fn exit(to: IpAddr, from: impl Into<Option<IpAddr>>, mark: u32) -> io::Result<u32> {
    let socket = netlink::open(SockProtocol::NetlinkRoute)?;
    let from = from.into().map(|from| from.to_canonical());
    let question = question(to.to_canonical(), from, mark);
    oif(&netlink::get(&socket, libc::RTM_GETROUTE, &question)?)
}

/// Body of RTM_GETROUTE.
fn question(to: IpAddr, from: Option<IpAddr>, mark: u32) -> Vec<u8> {
    let bytes = |ip| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let family = if to.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    let (to, from) = (bytes(to), from.map_or_else(Vec::new, bytes));
    let bits = |address: &[u8]| (address.len() * 8) as u8;
    let mut message = vec![family as u8, bits(&to), bits(&from)];
    message.resize(ROUTE, 0);
    let attributes = [
        (libc::RTA_DST, &to[..]),
        (libc::RTA_SRC, &from),
        (RTA_MARK, &mark.to_ne_bytes()),
    ];
    for (kind, value) in attributes.iter().filter(|(_, value)| !value.is_empty()) {
        message.extend(attribute(*kind, value));
    }
    message
}

/// RTA_OIF of the body of the kernel's answer; an error for addresses of several hosts.
fn oif(answer: &[u8]) -> io::Result<u32> {
    if let Some(libc::RTN_BROADCAST | libc::RTN_ANYCAST | libc::RTN_MULTICAST) =
        answer.get(TYPE).copied()
    {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    }
    let index = attributes(answer.get(ROUTE..).unwrap_or_default())
        .find_map(|(kind, bytes)| (kind == libc::RTA_OIF).then(|| value(bytes))?);
    index
        .map(u32::from_ne_bytes)
        .ok_or(io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn exit__of_this_host_is_the_loopback() {
        let local = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(exit(local, local, 0).expect("a route"), LOOPBACK);
        assert_eq!(exit(local, None, 0).expect("a route"), LOOPBACK);
        assert!(Scope::default().leads_to(local, local, 0));
        assert!(!Scope::new(vec!["vtl9".into()]).leads_to(local, local, 0));
        let broadcast = IpAddr::from([127, 255, 255, 255]);
        assert!(exit(broadcast, local, 0).is_err());
        // An address that no host has.
        assert!(exit(local, IpAddr::from([240, 0, 0, 1]), 0).is_err());
    }

    #[test]
    fn scope__is_by_name() {
        let one = Scope::new(vec!["lo".into(), "vtl9".into()]);
        assert!(one.has("lo") && one.has("vtl9") && !one.has("vtl"));
        assert!(one.has_index(LOOPBACK) && !one.has_index(u32::MAX));
        assert_eq!(one.inside().expect("a list"), [LOOPBACK].into());
        assert_eq!(one.absent().collect::<Vec<_>>(), ["vtl9"]);
        let all = Scope::default();
        assert!(all.is_all() && all.has("anything") && all.absent().next().is_none());
    }
}
