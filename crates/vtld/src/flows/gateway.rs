//! Associations of gateways: one end, or both, has an address that is not its own.
//!
//! A flow's TCP connection, and the control connection, have the address of the host behind a gateway, which the
//! gateway stands in for. Other carriers are between the daemons' own addresses, which they tell each other inside TLS
//! (GATEWAY): so nobody else is believed. A session to such an address has to show the key that the control connection
//! has shown.

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use vtl_core::stacks::is_host;
use vtl_proto::frame::Frame;

use super::{Flows, addresses::is_private, control::Control, peer::Peer};

/// What is special of an association if gateways have it.
#[derive(Default)]
pub(super) struct Gateway {
    /// This host is a gateway in it: the association's local address is another host's.
    pub(super) forwards: Cell<bool>,
    /// The peer's address, if the association's is that of a host behind it.
    pub(super) host: Cell<Option<IpAddr>>,
    /// When it was told.
    told: Cell<Option<Instant>>,
}

/// Pause before the peer may name another address.
const AGAIN: Duration = Duration::from_secs(60);

/// Whether a peer at `peer` may have `address` for its own, as seen from `own`: it leads this host's packets there, and
/// must not have this host look around at home; a gateway's hosts may have addresses of any kind (`forwards`).
fn is_credible(address: IpAddr, peer: IpAddr, own: [IpAddr; 2], forwards: bool) -> bool {
    let is_inside = is_private(address) && !is_private(peer) && !forwards;
    let is_of_family = address.is_ipv4() == peer.is_ipv4();
    is_host(address) && is_of_family && !is_inside && !own.contains(&address)
}

impl Peer {
    /// The address of the peer's daemon, as far as it is known.
    pub(super) fn host(&self) -> IpAddr {
        self.gateway.host.get().unwrap_or(self.key.peer)
    }
}

impl Flows {
    /// This host's address in carriers of an association.
    pub(super) fn own_address(&self, peer: &Peer) -> IpAddr {
        let towards = || {
            let to = SocketAddr::new(peer.host(), 9);
            self.hooker.address_towards(to).ok()
        };
        let own = peer.gateway.forwards.get().then(towards).flatten();
        own.unwrap_or(peer.key.local)
    }

    /// Tells the peer this host's own address, if this host is a gateway. `is_known`: the peer understands that.
    pub(super) async fn tell_gateway(&self, peer: &Peer, control: &Control, is_known: bool) {
        if !peer.gateway.forwards.get() || !is_known || !control.has_tls() {
            return;
        }
        let address = match self.own_address(peer) {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        // Fails if the connection has: there will be another one.
        let _ = control.say(Frame::Gateway { address }).await;
    }

    /// Notes the address that the peer, a gateway, has told on a control connection.
    pub(super) fn note_gateway(&self, peer: &Peer, control: &Control, address: IpAddr) {
        let address = address.to_canonical();
        let own = [peer.key.local, self.own_address(peer)];
        let forwards = peer.gateway.forwards.get();
        let is_credible = is_credible(address, peer.key.peer, own, forwards);
        if !is_credible || !control.has_tls() || peer.host() == address {
            return;
        }
        let told = peer.gateway.told.get();
        if told.is_some_and(|told| told.elapsed() < AGAIN) {
            return;
        }
        peer.gateway.told.set(Some(Instant::now()));
        tracing::debug!(peer = %peer.key.peer, gateway = %address, "association: the peer is a gateway");
        peer.gateway.host.set(Some(address));
        peer.changed.notify_waiters();
        // Sessions from there may wait.
        self.appeared.notify_waiters();
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn is_credible__hosts_of_the_same_family_only() {
        let ip = |text: &str| text.parse::<IpAddr>().expect("an address");
        let may = |address: &str, peer: &str| {
            let own = [ip("192.0.2.1"), ip("2001:db8::1")];
            is_credible(ip(address), ip(peer), own, false)
        };
        assert!(may("192.0.2.7", "198.51.100.1") && may("2001:db8::7", "2001:db8:1::1"));
        for address in [
            "2001:db8::7",
            "192.0.2.1",
            "255.255.255.255",
            "169.254.0.1",
            "127.0.0.1",
            "224.0.0.1",
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.5",
        ] {
            assert!(!may(address, "198.51.100.1"), "{address}");
        }
        for address in [
            "192.0.2.7",
            "2001:db8::1",
            "fe80::1",
            "::1",
            "ff02::1",
            "::",
            "fd00::5",
            "64:ff9b::7f00:1",
        ] {
            assert!(!may(address, "2001:db8:1::1"), "{address}");
        }
        assert!(may("10.0.0.5", "10.1.0.1") && may("fd00::5", "fd01::1"));
        assert!(is_credible(
            ip("10.0.0.5"),
            ip("192.0.2.9"),
            [ip("10.0.0.1"); 2],
            true
        ));
    }
}
