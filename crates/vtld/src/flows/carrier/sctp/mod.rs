//! SCTP (RFC 9260) as a carrier, over UDP (RFC 6951), in user space, with `sctp-proto`.
//!
//! One socket serves all associations of the process, as client and server. An association is
//! identified by the peer's address and the SCTP ports, which derive from the granted token: packets
//! to other ports are not answered.
//!
//! Packets are sealed after their ports if the peer supports it.
//!
//! Chunks are unordered messages, each in one packet: no head-of-line blocking by a lost packet. Control
//! frames are ordered.

mod association;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod interop;
mod packet;

use std::{
    cell::RefCell,
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::oneshot,
    task::spawn_local,
    time::{sleep, timeout},
};
use vtl_control::CarrierPath;
use vtl_proto::frame::Side;

use super::{
    Expected, HANDSHAKE, Local,
    library::{Library, Opened, Opening, Opens, ms},
    sealed,
    segments::Segments,
};
use crate::panics;
use association::{Driver, Role, Shared};
use packet::Header;

/// Addresses and ports of an association.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Path {
    peer: SocketAddr,
    /// SCTP ports: local, peer.
    here: u16,
    there: u16,
    /// Local address.
    local: Option<IpAddr>,
}

/// The SCTP ports of a token: the server's, and the client's.
fn ports(token: u64) -> (u16, u16) {
    ((token >> 48) as u16, (token >> 32) as u16)
}

/// Whether a token yields valid ports.
fn is_fit(token: u64) -> bool {
    let (server, client) = ports(token);
    server != 0 && client != 0
}

/// Outstanding grants, by the client's address, the local SCTP port, and the client's.
type Grants = HashMap<(IpAddr, u16, u16), Expected>;

/// The socket, and the associations and grants that received packets are routed to.
struct Wire {
    socket: Segments,
    /// By the peer's address, the local SCTP port, and the peer's.
    associations: RefCell<HashMap<(SocketAddr, u16, u16), Rc<Shared>>>,
    grants: RefCell<Grants>,
    arrivals: Opens,
}

/// The SCTP endpoint of this process, client and server.
pub(super) struct Sctp {
    wire: Rc<Wire>,
}

/// An association that is being opened; closed on drop.
struct Pending(Option<Rc<Shared>>);

impl Pending {
    fn done(mut self) -> Option<Rc<Shared>> {
        self.0.take()
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            shared.pipe.end();
        }
    }
}

impl Sctp {
    /// Starts the endpoint on a non-blocking socket.
    pub(super) fn start(socket: std::net::UdpSocket, arrivals: Opens) -> io::Result<Self> {
        let wire = Rc::new(Wire {
            socket: Segments::new(socket)?,
            associations: RefCell::default(),
            grants: RefCell::default(),
            arrivals,
        });
        spawn_local(Rc::clone(&wire).receive());
        Ok(Self { wire })
    }

    /// Begins to open an association to the server of a grant.
    fn begin(
        &self,
        local: IpAddr,
        to: SocketAddr,
        token: u64,
        rtt: Option<Duration>,
        datagrams: sealed::Datagrams,
    ) -> io::Result<impl Future<Output = io::Result<Rc<Shared>>> + use<>> {
        if !is_fit(token) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let (there, here) = ports(token);
        let path = Path {
            peer: to,
            here,
            there,
            local: Some(local),
        };
        let (opened, is_open) = oneshot::channel();
        let tell = Box::new(|| {
            // Fails if the opening was cancelled.
            let _ = opened.send(());
        });
        let role = Role::Client;
        let (driver, shared) = Driver::new(role, &self.wire, path, token, rtt, datagrams, tell)
            .map_err(io::Error::other)?;
        self.wire.enter(&path, &shared);
        spawn_local(panics::isolated(driver.run()));
        let pending = Pending(Some(shared));
        Ok(async move {
            let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
            is_open.await.map_err(|_| refused())?;
            pending.done().ok_or_else(refused)
        })
    }
}

impl Library for Sctp {
    fn expect(&self, expected: Expected) {
        let (server, port) = ports(expected.token);
        let mut grants = self.wire.grants.borrow_mut();
        grants.insert((expected.client, server, port), expected);
    }

    fn revoke(&self, token: u64) {
        let mut grants = self.wire.grants.borrow_mut();
        grants.retain(|_, expected| expected.token != token);
    }

    fn connect(&self, opening: Opening) -> Local<'_, io::Result<Opened>> {
        let Opening {
            to,
            token,
            crypto,
            local,
            rtt,
            ..
        } = opening;
        Box::pin(async move {
            let datagrams = sealed::Datagrams::new(&crypto, Side::Local);
            let begun = self.begin(local, to, token, rtt, datagrams)?;
            let shared = timeout(HANDSHAKE, begun).await;
            Ok(opened(shared.map_err(|_| io::ErrorKind::TimedOut)??))
        })
    }

    fn close(&self) {
        let all: Vec<_> = self.wire.associations.borrow().values().cloned().collect();
        all.iter().for_each(|shared| shared.pipe.end());
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        const OFTEN: Duration = Duration::from_millis(2);
        Box::pin(async {
            while !self.wire.associations.borrow().is_empty() {
                sleep(OFTEN).await;
            }
        })
    }
}

/// An association as a carrier.
fn opened(shared: Rc<Shared>) -> Opened {
    Opened {
        pipe: Rc::clone(&shared.pipe),
        memory: {
            let shared = Rc::clone(&shared);
            Box::new(move || shared.memory())
        },
        path: Box::new(move || Some(shared.figures())),
    }
}

impl Shared {
    /// Statistics for `status`.
    fn figures(&self) -> CarrierPath {
        let figures = &self.figures;
        let measured = figures.measured.get();
        let smoothed = measured.map(|measured| measured.rtt);
        let rtt = smoothed.filter(|rtt| !rtt.is_zero()).or(figures.rtt.get());
        CarrierPath {
            rtt_ms: ms(rtt.unwrap_or_default()),
            min_rtt_ms: measured.and_then(|measured| measured.min_rtt).map(ms),
            delivered: measured.map(|measured| measured.delivered),
            app_limited: measured.map(|measured| measured.app_limited),
            sent: figures.sent.get(),
            lost: figures.again.get(),
            refused: Some(figures.refused.get()),
        }
    }
}

impl Wire {
    fn enter(&self, path: &Path, shared: &Rc<Shared>) {
        let mut all = self.associations.borrow_mut();
        all.insert((path.peer, path.here, path.there), Rc::clone(shared));
    }

    fn forget(&self, path: &Path, shared: &Rc<Shared>) {
        let mut all = self.associations.borrow_mut();
        let key = (path.peer, path.here, path.there);
        if all.get(&key).is_some_and(|known| Rc::ptr_eq(known, shared)) {
            all.remove(&key);
        }
    }

    /// Receives datagrams. Never returns.
    async fn receive(self: Rc<Self>) {
        let route = |peer, local, packet: &[u8]| self.route(peer, local, packet);
        self.socket.receive(route).await;
    }

    fn route(self: &Rc<Self>, peer: SocketAddr, local: Option<IpAddr>, packet: &[u8]) {
        let Some(header) = Header::of(packet) else {
            return;
        };
        let (here, there) = (header.destination, header.source);
        let known = self
            .associations
            .borrow()
            .get(&(peer, here, there))
            .cloned();
        if let Some(shared) = known {
            if let Some(packet) = shared.open(packet) {
                shared.deliver(packet);
            }
            return;
        }
        let path = Path {
            peer,
            here,
            there,
            local,
        };
        if let Some((shared, packet)) = self.admit(path, packet) {
            shared.deliver(packet);
        }
    }

    /// Accepts an association of a client that holds a grant.
    fn admit(self: &Rc<Self>, path: Path, packet: &[u8]) -> Option<(Rc<Shared>, Bytes)> {
        let place = (path.peer.ip(), path.here, path.there);
        let Expected {
            token, rtt, crypto, ..
        } = self.grants.borrow().get(&place)?.clone();
        let mut datagrams = sealed::Datagrams::new(&crypto, Side::Peer);
        let packet = datagrams.open(packet)?;
        let is_init = packet::chunks(&packet).next().map(|c| c.kind) == Some(packet::INIT);
        if !is_init || !packet::is_intact(&packet) {
            return None;
        }
        self.grants.borrow_mut().remove(&place);
        let wire = Rc::clone(self);
        let key = (path.peer, path.here, path.there);
        let tell = Box::new(move || {
            let shared = wire.associations.borrow().get(&key).cloned();
            if let Some(shared) = shared {
                // Fails if the daemon is ending.
                let _ = wire.arrivals.send((token, opened(shared)));
            }
        });
        let role = Role::Server;
        let (driver, shared) = Driver::new(role, self, path, token, rtt, datagrams, tell).ok()?;
        self.enter(&path, &shared);
        spawn_local(panics::isolated(driver.run()));
        Some((shared, packet))
    }
}
