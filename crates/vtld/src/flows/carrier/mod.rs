//! Carriers: the traits that every kind implements, and the kinds.

mod conversations;
pub(super) mod framed;
mod graft;
mod kcp;
mod layered;
mod library;
mod mptcp;
pub(super) mod process;
mod quic;
mod sctp;
mod sealed;
mod segments;
mod stack;

use std::{
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    pin::Pin,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, sockopt,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use vtl_control::CarrierPath;
use vtl_core::{flow::Chunk, stacks::StackState};
use vtl_pool::key::PublicKey;
use vtl_proto::{
    carrier::Kind,
    frame::{CRYPTO, CarrierId, FlowId},
    keys::Secret,
};

pub(super) use layered::CarrierLayers;
use process::Filter;

use super::peer::Peer;
use crate::{
    broker::{self, random},
    hooker::CarrierOptions,
    stacks,
};

/// Timeout of a handshake, and of the first frame.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// A path is dead after this time plus three round trips without an answer to a packet that wants one.
const SILENCE: Duration = Duration::from_secs(1);
/// Interval of path supervision.
const TICK: Duration = Duration::from_millis(100);
/// Idle timeout of a connection, the same as a session's; keepalives prevent it on a working path.
const DEAD: Duration = Duration::from_nanos(vtl_core::session::DEAD_NS);
/// Minimum retransmission timeout of carriers in user space. Less than RFC 9260 recommends for SCTP (1 s) because of
/// delayed acknowledgements: here the last packet of each burst asks for an immediate one.
const MIN_RTO: Duration = Duration::from_millis(100);
/// The field `crypto` of GRANT for a carrier without encryption.
pub(super) const CLEAR: [u8; CRYPTO] = [0; CRYPTO];
/// Size of a UDP socket's buffers, bytes.
const SOCKET: usize = 8 << 20;
/// Pause after an error of a UDP socket: an ICMP error for a sent packet, or out of memory.
const SOCKET_PAUSE: Duration = Duration::from_millis(1);

/// Binds a socket to any address and a free port: dual-stack, whatever `net.ipv6.bindv6only` says, or IPv4 only on a
/// host without IPv6. `open`: makes a socket of an address's family.
fn bind_any(open: impl Fn(IpAddr) -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    let bind_to = |ip: IpAddr| -> io::Result<OwnedFd> {
        let socket = open(ip)?;
        if ip.is_ipv6() {
            setsockopt(&socket, sockopt::Ipv6V6Only, &false)?;
        }
        let any = SockaddrStorage::from(SocketAddr::new(ip, 0));
        bind(socket.as_raw_fd(), &any)?;
        Ok(socket)
    };
    bind_to(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| bind_to(Ipv4Addr::UNSPECIFIED.into()))
}

/// A UDP socket by [`bind_any`].
fn socket() -> io::Result<UdpSocket> {
    let open = |ip: IpAddr| {
        let family = match ip {
            IpAddr::V4(_) => AddressFamily::Inet,
            IpAddr::V6(_) => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_CLOEXEC;
        Ok(socket::socket(family, SockType::Datagram, flags, None)?)
    };
    let socket = UdpSocket::from(bind_any(open)?);
    // Smaller buffers will do if refused.
    let _ = setsockopt(&socket, sockopt::RcvBufForce, &SOCKET);
    let _ = setsockopt(&socket, sockopt::SndBufForce, &SOCKET);
    Ok(socket)
}

/// Why a carrier does not accept frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    /// It has broken.
    #[error("the carrier has broken")]
    Broken,
    /// It has not taken the chunk: no room before the flow left it, or it takes no chunks.
    #[error("the carrier is full")]
    Full,
}

/// A boxed future of this thread (not `Send`).
pub(super) type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;
/// Completes when a carrier has accepted the frames. If it is dropped before, they may have been accepted or not.
pub(super) type Taking<'a> = Local<'a, Result<(), Refused>>;

/// Moves frames to another host. Received frames are passed to [`Peer`].
pub(super) trait Carrier {
    /// The kind; `None` for a control connection.
    fn kind(&self) -> Option<Kind>;

    /// Sends control frames.
    fn control(&self, frames: Bytes) -> Taking<'_>;

    /// Sends a frame, of [`Carrier::longest_message`] at most, that others may overtake.
    fn message(&self, frame: Bytes) -> Taking<'_> {
        self.control(frame)
    }

    /// Maximum size of such a frame, bytes; 0: it takes none.
    fn longest_message(&self) -> usize {
        0
    }

    /// Sends bytes of a flow.
    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_>;

    /// Its state for the schedulers of flows that are spread over several; `None`: it takes no part.
    fn stack(&self, _id: CarrierId) -> Option<StackState> {
        None
    }

    /// The addresses of this host and of the peer that it goes between, if it says so.
    fn between(&self) -> Option<(IpAddr, IpAddr)> {
        None
    }

    /// Takes a chunk of such a flow at once, or, false, not at all.
    fn take_now(&self, _flow: FlowId, _chunk: Chunk) -> bool {
        false
    }

    /// Drops the state of a flow that has ended.
    fn forget(&self, flow: FlowId);

    /// Whether it is lossy: it carries chunks of loss-tolerant flows only, and no control frames.
    fn loses(&self) -> bool {
        false
    }

    /// Passes packets that have arrived to the association at once, when a control frame about them has arrived by
    /// another carrier.
    fn look(&self, _peer: &Peer, _id: CarrierId) {}

    /// Memory that it uses, or that the peer can make it use at once, bytes.
    fn memory(&self) -> u64 {
        0
    }

    /// Closes it.
    fn close(&self);

    /// Statistics of its path.
    fn path(&self) -> Option<CarrierPath>;

    /// The same, and when they were true.
    fn reading(&self) -> Option<(Instant, CarrierPath)> {
        Some((Instant::now(), self.path()?))
    }

    /// Whether it is encrypted.
    fn is_encrypted(&self) -> bool;

    /// Whether it is in the clear although this host has offered keys.
    fn is_clear(&self) -> bool {
        false
    }
}

/// A carrier whose handshake is complete.
pub(super) trait Link {
    /// Serves an association until the carrier ends. `opened`: its id, if this host has opened it; else the peer
    /// announces it. `layers`: those over it.
    fn serve(
        self: Box<Self>,
        peer: Rc<Peer>,
        opened: Option<CarrierId>,
        layers: CarrierLayers,
    ) -> Local<'static, ()>;

    /// Whether the peer, which has opened it, has said that layers are over it.
    fn has_layers(&self) -> bool {
        false
    }
}

/// How a carrier opened by a peer identifies its association.
pub(super) enum Shown {
    /// By the token of the grant.
    Token(u64),
    /// By the peer's address, or its key, and the tag of an association that the peer has opened.
    Association {
        peer: IpAddr,
        tag: u32,
        shown: Option<Box<PublicKey>>,
    },
}

/// Channel of links opened by peers.
pub(super) type Arrivals = mpsc::UnboundedSender<(Shown, Box<dyn Link>)>;

/// A grant received from a peer.
#[derive(Clone, Debug)]
pub(super) struct Granted {
    pub(super) to: SocketAddr,
    pub(super) token: u64,
    /// As in [`vtl_proto::frame::Frame::Grant`].
    pub(super) crypto: Secret,
}

/// Parameters for opening a carrier.
#[derive(Clone, Debug)]
pub(super) struct ToOpen {
    pub(super) granted: Granted,
    /// Local address.
    pub(super) local: IpAddr,
    /// The path's round-trip time, measured by TCP.
    pub(super) rtt: Option<Duration>,
    /// Session parameters, for a graft.
    pub(super) options: Option<Arc<CarrierOptions>>,
    /// Encryption is required.
    pub(super) encrypted: bool,
    /// Number of the path; 0: that of the flows' own connections, from the route's address.
    pub(super) path: u8,
}

impl Granted {
    /// For kinds that need no grant: the host alone.
    pub(super) fn freely(peer: IpAddr) -> Self {
        Self {
            to: SocketAddr::new(peer, 0),
            token: 0,
            crypto: CLEAR.into(),
        }
    }
}

/// A carrier that a peer may open (outstanding grant).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Expected {
    pub(super) token: u64,
    /// The peer's address.
    pub(super) client: IpAddr,
    /// The path's round-trip time, measured by TCP.
    pub(super) rtt: Option<Duration>,
    /// As in [`vtl_proto::frame::Frame::Grant`].
    pub(super) crypto: Secret,
    /// The highest rate at which this host sends if the carrier is a stack, kbit/s.
    pub(super) accept_rate: u32,
}

/// A grant for a peer.
pub(super) struct Grant {
    pub(super) port: u16,
    pub(super) token: u64,
    /// As in [`vtl_proto::frame::Frame::Grant`].
    pub(super) crypto: [u8; CRYPTO],
}

impl Grant {
    /// The matching expectation, for the peer at `client`.
    fn expected(&self, client: IpAddr, rtt: Option<Duration>) -> Expected {
        Expected {
            token: self.token,
            client,
            rtt,
            crypto: self.crypto.into(),
            accept_rate: stacks::accept_rate(),
        }
    }
}

/// The secret that seals a carrier without certificates; [`CLEAR`] if it is not sealed.
fn secret(seals: bool) -> [u8; CRYPTO] {
    match seals {
        true => random(),
        false => CLEAR,
    }
}

/// Grants carriers of a kind to peers.
pub(super) trait Grantor {
    /// Grants a carrier to a peer. `seals`: whether to seal it, if the kind has no encryption of its own. `rtt`: of the
    /// path, measured by TCP.
    fn grant(&self, client: IpAddr, rtt: Option<Duration>, seals: bool) -> io::Result<Grant>;

    /// Revokes a grant.
    fn revoke(&self, token: u64);
}

/// This host's endpoint of all carriers of a kind.
pub(super) trait Endpoint {
    /// The grantor; `None` if peers need no grant.
    fn grantor(&self) -> Option<&dyn Grantor>;

    /// Opens a carrier.
    fn connect(&self, opening: ToOpen) -> Local<'_, io::Result<Box<dyn Link>>>;

    /// Makes layers over a carrier of another kind, if this is the kind of stacks. `mtu`: maximum length of a packet for that
    /// carrier, bytes.
    ///
    /// # Errors
    /// Also what is wrong with the layers, as one sentence.
    fn filter(&self, _layers: String, _mtu: usize) -> Local<'_, io::Result<Filter>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }

    /// Closes all carriers of the kind.
    fn close(&self);

    /// Completes when the peers have been told of the end.
    fn wait_idle(&self) -> Local<'_, ()>;
}

/// Starts the endpoint of a kind; call it within a tokio `LocalSet`. `max_ahead`: upper bound of a carrier's
/// receive window, bytes.
pub(super) fn start(
    kind: Kind,
    arrivals: Arrivals,
    broker: &broker::Handle,
    max_ahead: u64,
) -> io::Result<Rc<dyn Endpoint>> {
    Ok(match kind {
        Kind::Quic | Kind::Sctp | Kind::Kcp | Kind::Stack => {
            process::Remote::start(kind, max_ahead, arrivals)
        }
        Kind::Mptcp => Rc::new(mptcp::Mptcp::start(arrivals)?),
        Kind::Graft => Rc::new(graft::Sessions::start(arrivals, broker)?),
    })
}

#[cfg(test)]
mod tests {
    use nix::{
        sched::{CloneFlags, unshare},
        sys::socket::getsockopt,
    };

    use super::*;

    #[test]
    fn socket__takes_both_families_whatever_the_system_prefers() {
        if !vtl_testing::is_root() {
            return;
        }
        let in_own_namespace = || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            std::fs::write("/proc/sys/net/ipv6/bindv6only", "1").unwrap();
            let socket = socket().unwrap();
            assert!(socket.local_addr().unwrap().is_ipv6());
            assert!(!getsockopt(&socket, sockopt::Ipv6V6Only).unwrap());
        };
        std::thread::spawn(in_own_namespace).join().unwrap();
    }
}
