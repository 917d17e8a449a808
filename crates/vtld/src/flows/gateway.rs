//! Associations of gateways: one end, or both, has an address that is not its own.
//!
//! A flow's TCP connection, and the control connection, have the address of the host behind a gateway, which the
//! gateway stands in for. Other carriers are between the daemons' own addresses, which they tell each other inside TLS
//! (GATEWAY): so nobody else is believed. A session to such an address has to show the key that the control connection
//! has shown.

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
};

use vtl_proto::frame::Frame;

use super::{Flows, control::Control, peer::Peer};

/// What is special of an association if gateways have it.
#[derive(Default)]
pub(super) struct Gateway {
    /// This host is a gateway in it: the association's local address is another host's.
    pub(super) forwards: Cell<bool>,
    /// The peer's address, if the association's is that of a host behind it.
    pub(super) host: Cell<Option<IpAddr>>,
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
        let is_odd = address.is_loopback() || address.is_multicast() || address.is_unspecified();
        if is_odd || !control.has_tls() || peer.host() == address {
            return;
        }
        tracing::debug!(peer = %peer.key.peer, gateway = %address, "association: the peer is a gateway");
        peer.gateway.host.set(Some(address));
        peer.changed.notify_waiters();
        // Sessions from there may wait.
        self.appeared.notify_waiters();
    }
}
