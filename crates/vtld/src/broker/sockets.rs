//! The sockets for control packets: IPv4 and IPv6, native and UDP.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
};

use anyhow::Context;
use vtl_proto::{intf, nego::Way};

use super::raw::{Raw, Received};

/// By IP version: IPv4, IPv6.
pub(super) struct Sockets {
    native: [Option<Raw>; 2],
    udp: [Option<Raw>; 2],
}

impl Sockets {
    /// Opens those of VTL's UDP port, if it is free.
    pub(super) fn by_udp() -> Self {
        let udp = match Raw::open(false, Way::Udp) {
            // A host may have no IPv6.
            Ok(v4) => [Some(v4), Raw::open(true, Way::Udp).ok()],
            Err(error) => {
                let port = intf::VTL_UDP_PORT;
                tracing::warn!(%error, port, "session: cannot bind the UDP port: no UDP encapsulation");
                [None, None]
            }
        };
        Self {
            native: [None, None],
            udp,
        }
    }

    /// Opens the raw sockets.
    ///
    /// # Errors
    /// IPv4's cannot be opened; IPv6's may be missing.
    pub(super) fn open_native(&mut self) -> anyhow::Result<()> {
        let v4 = Raw::open(false, Way::Native).context("a raw socket for IP protocol 253")?;
        self.native = [Some(v4), Raw::open(true, Way::Native).ok()];
        Ok(())
    }

    fn socket(&self, v6: bool, way: Way) -> Option<&Raw> {
        let sockets = match way {
            Way::Native => &self.native,
            Way::Udp => &self.udp,
            Way::Tcp => return None,
        };
        sockets[usize::from(v6)].as_ref()
    }

    /// Whether this socket is open.
    pub(super) fn has(&self, v6: bool, way: Way) -> bool {
        self.socket(v6, way).is_some()
    }

    /// All open sockets, with IP version (`true`: 6) and encapsulation.
    pub(super) fn all(&self) -> impl Iterator<Item = (BorrowedFd<'_>, bool, Way)> {
        [
            (false, Way::Native),
            (true, Way::Native),
            (false, Way::Udp),
            (true, Way::Udp),
        ]
        .into_iter()
        .filter_map(|(v6, way)| Some((self.socket(v6, way)?.as_fd(), v6, way)))
    }

    /// Receives the next packet, if any.
    ///
    /// # Errors
    /// The kernel's error of the socket.
    pub(super) fn receive(&self, v6: bool, way: Way) -> io::Result<Option<Received>> {
        self.socket(v6, way).map_or(Ok(None), Raw::receive)
    }

    /// Sends a packet from a local address, natively or to UDP port `port`. Dropped without a socket for it.
    pub(super) fn send(&self, packet: &[u8], from: IpAddr, to: IpAddr, way: Way, port: u16) {
        let Some(socket) = self.socket(to.is_ipv6(), way) else {
            return;
        };
        if let Err(error) = socket.send(packet, from, to, port) {
            tracing::debug!(%error, %to, "session: cannot send a control packet");
        }
    }
}
