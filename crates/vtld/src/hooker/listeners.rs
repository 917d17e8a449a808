//! The Hooker's listening sockets. They are bound before the programs are loaded, whose constants the ports are, and
//! listen after the programs are attached, which must see the listen.

use std::{io, net::TcpListener, os::fd::OwnedFd};

use super::{abi, bpf::Maps, error::HookerError, sock};

/// The listeners; a family that the host lacks is absent. `steer` ends with a former daemon's, if any, for handshakes
/// that were in progress at the handover.
#[derive(Default)]
pub(super) struct Listeners {
    pub(super) capture: Vec<TcpListener>,
    pub(super) steer: Vec<TcpListener>,
}

/// Loopback sockets of one address family, bound but not listening.
pub(super) struct Bound {
    is_v4: bool,
    capture: OwnedFd,
    capture_port: u16,
    steer: OwnedFd,
}

impl Bound {
    /// Binds both sockets; reuses a former daemon's capture socket, since pending connects go to its port.
    pub(super) fn new(is_v4: bool, inherited: Option<OwnedFd>) -> io::Result<Self> {
        let (capture, capture_port) = match inherited {
            Some(socket) => sock::local(&socket).map(|local| (socket, local.port()))?,
            None => sock::loopback(is_v4)?,
        };
        let (steer, _) = sock::loopback(is_v4)?;
        Ok(Self {
            is_v4,
            capture,
            capture_port,
            steer,
        })
    }

    /// The port that captured connects are redirected to.
    pub(super) fn capture_port(&self) -> u16 {
        self.capture_port
    }
}

impl Listeners {
    /// Duplicates the descriptors.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        let all = |those: &[TcpListener]| -> io::Result<Vec<_>> {
            those.iter().map(TcpListener::try_clone).collect()
        };
        Ok(Self {
            capture: all(&self.capture)?,
            steer: all(&self.steer)?,
        })
    }

    /// Listens on the sockets of one address family and has SYNs with the option steered to them.
    pub(super) fn add(&mut self, bound: Bound, maps: &Maps) -> Result<(), HookerError> {
        let (slot, listen) = match bound.is_v4 {
            true => (abi::VTL_STEER_4, "listen on 127.0.0.1"),
            false => (abi::VTL_STEER_6, "listen on [::1]"),
        };
        let capture = sock::listen(bound.capture).map_err(HookerError::socket(listen))?;
        self.capture.push(capture);
        let cookie = sock::cookie(&bound.steer);
        let cookie = cookie.map_err(HookerError::socket("read a socket's cookie"))?;
        maps.own_listener(cookie)?;
        // Otherwise a retransmitted SYN/ACK would lack the option.
        sock::save_syn(&bound.steer).map_err(HookerError::socket(listen))?;
        let steer = sock::listen(bound.steer).map_err(HookerError::socket(listen))?;
        maps.steer_to(slot, &steer)?;
        self.steer.push(steer);
        Ok(())
    }
}
