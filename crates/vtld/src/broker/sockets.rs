//! The sockets for control packets: IPv4 and IPv6, native and UDP.

use std::{
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
};

use anyhow::Context;
use vtl_proto::{intf, nego::Encapsulation};

use super::raw::{Raw, Received};

/// By IP version: IPv4, IPv6.
pub(super) struct Sockets {
    native: [Option<Raw>; 2],
    udp: [Option<Raw>; 2],
}

impl Sockets {
    /// Opens those of VTL's UDP port, if it is free.
    pub(super) fn by_udp() -> Self {
        let udp = match Raw::open(false, Encapsulation::Udp) {
            // A host may have no IPv6.
            Ok(v4) => [Some(v4), Raw::open(true, Encapsulation::Udp).ok()],
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
        let v4 =
            Raw::open(false, Encapsulation::Native).context("a raw socket for IP protocol 253")?;
        self.native = [Some(v4), Raw::open(true, Encapsulation::Native).ok()];
        Ok(())
    }

    fn socket(&self, v6: bool, encapsulation: Encapsulation) -> Option<&Raw> {
        let sockets = match encapsulation {
            Encapsulation::Native => &self.native,
            Encapsulation::Udp => &self.udp,
            Encapsulation::Tcp => return None,
        };
        sockets[usize::from(v6)].as_ref()
    }

    /// Whether this socket is open.
    pub(super) fn has(&self, v6: bool, encapsulation: Encapsulation) -> bool {
        self.socket(v6, encapsulation).is_some()
    }

    /// All open sockets, with IP version (`true`: 6) and encapsulation.
    pub(super) fn all(&self) -> impl Iterator<Item = (BorrowedFd<'_>, bool, Encapsulation)> {
        [
            (false, Encapsulation::Native),
            (true, Encapsulation::Native),
            (false, Encapsulation::Udp),
            (true, Encapsulation::Udp),
        ]
        .into_iter()
        .filter_map(|(v6, encapsulation)| {
            Some((self.socket(v6, encapsulation)?.as_fd(), v6, encapsulation))
        })
    }

    /// Receives the next packet, if any.
    ///
    /// # Errors
    /// The kernel's error of the socket.
    pub(super) fn receive(
        &self,
        v6: bool,
        encapsulation: Encapsulation,
    ) -> io::Result<Option<Received>> {
        self.socket(v6, encapsulation)
            .map_or(Ok(None), Raw::receive)
    }

    /// Sends a packet from a local address, natively or to UDP port `port`. Dropped without a socket for it.
    pub(super) fn send(
        &self,
        packet: &[u8],
        from: IpAddr,
        to: IpAddr,
        encapsulation: Encapsulation,
        port: u16,
    ) {
        let Some(socket) = self.socket(to.is_ipv6(), encapsulation) else {
            return;
        };
        if let Err(error) = socket.send(packet, from, to, port) {
            tracing::debug!(%error, %to, "session: cannot send a control packet");
        }
    }
}
