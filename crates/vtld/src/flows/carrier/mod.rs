//! What a carrier does for the flows of an association, and which kinds there are.

pub(super) mod framed;
mod graft;
mod kcp;
mod library;
mod mptcp;
pub(super) mod process;
mod quic;
mod sctp;
mod sealed;

use std::{
    future::Future,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    pin::Pin,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use nix::sys::socket::{setsockopt, sockopt};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use vtl_control::CarrierPath;
use vtl_core::flow::Chunk;
use vtl_proto::{
    carrier::Kind,
    frame::{CRYPTO, CarrierId, FlowId},
    keys::Secret,
};

use super::peer::Peer;
use crate::{
    broker::{self, random},
    hooker::Over,
};

/// How long a handshake may take, and the first frame.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Without an answer for this time, and three round trips, to what wants one, the path is dead.
const SILENCE: Duration = Duration::from_secs(1);
/// Interval between two looks at the path.
const TICK: Duration = Duration::from_millis(100);
/// A connection on which nothing comes for so long is dead, as a session is: its client sees to it that
/// something does.
const DEAD: Duration = Duration::from_nanos(vtl_core::session::DEAD_NS);
/// Floor of the retransmission timers of carriers that run in user space. Less than RFC 9260 recommends for
/// SCTP (1 s), whose reason is delayed acknowledgements: here the last packet of each burst asks for one at once.
const MIN_RTO: Duration = Duration::from_millis(100);
/// What GRANT says of a carrier that does not encrypt.
pub(super) const CLEAR: [u8; CRYPTO] = [0; CRYPTO];
/// Bytes of a UDP socket's own buffers.
const SOCKET: usize = 8 << 20;

/// A socket for both families, where the host has both.
fn socket() -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))
        .or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    // Less will do where it is refused.
    let _ = setsockopt(&socket, sockopt::RcvBufForce, &SOCKET);
    let _ = setsockopt(&socket, sockopt::SndBufForce, &SOCKET);
    Ok(socket)
}

/// Why a carrier does not take something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    /// It has broken.
    #[error("the carrier has broken")]
    Broken,
    /// It has no room for another flow.
    #[error("the carrier is full")]
    Full,
}

/// A future of this thread.
pub(super) type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;
/// Waits until a carrier has taken something. What was under way when it is dropped may have been taken.
pub(super) type Taking<'a> = Local<'a, Result<(), Refused>>;

/// Moves frames to another host. What arrives goes to [`Peer`].
pub(super) trait Carrier {
    /// `None` for the control connection, which has no flows.
    fn kind(&self) -> Option<Kind>;

    /// Sends control frames.
    fn control(&self, frames: Bytes) -> Taking<'_>;

    /// Sends bytes of a flow.
    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_>;

    /// A flow has ended: nothing more comes of it.
    fn forget(&self, flow: FlowId);

    /// Chunks get lost on its way: it takes those of flows that do without, and no control frames.
    fn loses(&self) -> bool {
        false
    }

    /// Gives the association what has come by it, where the peer has said something of that by another carrier.
    fn look(&self, _peer: &Peer, _id: CarrierId) {}

    /// Memory in bytes that it uses, or that the peer can make it use at once.
    fn memory(&self) -> u64 {
        0
    }

    /// Ends it.
    fn close(&self);

    /// Figures of its path.
    fn path(&self) -> Option<CarrierPath>;

    /// Nobody on the path reads what goes by it.
    fn is_encrypted(&self) -> bool;

    /// Whether this host has asked the peer in vain to have it sealed.
    fn is_clear(&self) -> bool {
        false
    }
}

/// A carrier whose handshake is done.
pub(super) trait Link {
    /// Has it carry flows of an association, to its end. `opened`: its number, if this host has opened it;
    /// else the peer says it.
    fn serve(self: Box<Self>, peer: Rc<Peer>, opened: Option<CarrierId>) -> Local<'static, ()>;
}

/// By what a peer that has opened a carrier says whose it is.
pub(super) enum Shown {
    /// What it was granted.
    Token(u64),
    /// An association of its own: its address, and the tag.
    Association { peer: IpAddr, tag: u32 },
}

/// Links that peers have opened.
pub(super) type Arrivals = mpsc::UnboundedSender<(Shown, Box<dyn Link>)>;

/// What a peer has granted.
#[derive(Clone, Debug)]
pub(super) struct Granted {
    pub(super) to: SocketAddr,
    pub(super) token: u64,
    /// As in [`vtl_proto::frame::Frame::Grant`].
    pub(super) crypto: Secret,
}

/// What a host needs to open a carrier.
#[derive(Clone, Debug)]
pub(super) struct ToOpen {
    pub(super) granted: Granted,
    /// The address to open it from.
    pub(super) local: IpAddr,
    /// The path's round-trip time, as TCP measured it.
    pub(super) rtt: Option<Duration>,
    /// What the session is to be like, if it is one of a graft.
    pub(super) over: Option<Arc<Over>>,
    /// It must be encrypted.
    pub(super) encrypted: bool,
}

impl Granted {
    /// What is needed of kinds that are not granted: the host.
    pub(super) fn freely(peer: IpAddr) -> Self {
        Self {
            to: SocketAddr::new(peer, 0),
            token: 0,
            crypto: CLEAR.into(),
        }
    }
}

/// A carrier that a peer may open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Expected {
    pub(super) token: u64,
    /// The address that it comes from.
    pub(super) client: IpAddr,
    /// The path's round-trip time, as TCP measured it.
    pub(super) rtt: Option<Duration>,
    /// As in [`vtl_proto::frame::Frame::Grant`].
    pub(super) crypto: Secret,
}

/// What a peer needs to open a carrier.
pub(super) struct Grant {
    pub(super) port: u16,
    pub(super) token: u64,
    /// As in [`vtl_proto::frame::Frame::Grant`].
    pub(super) crypto: [u8; CRYPTO],
}

impl Grant {
    /// What is expected of the peer that it is for.
    fn expected(&self, client: IpAddr, rtt: Option<Duration>) -> Expected {
        Expected {
            token: self.token,
            client,
            rtt,
            crypto: self.crypto.into(),
        }
    }
}

/// What a carrier without a certificate is sealed with, if it is.
fn secret(seals: bool) -> [u8; CRYPTO] {
    match seals {
        true => random(),
        false => CLEAR,
    }
}

/// Lets peers open carriers of a kind.
pub(super) trait Grantor {
    /// Lets a peer open one, which is sealed or not if it does not encrypt by itself. `rtt`: of the path, as TCP
    /// measured it.
    fn grant(&self, client: IpAddr, rtt: Option<Duration>, seals: bool) -> io::Result<Grant>;

    /// Takes a grant back.
    fn revoke(&self, token: u64);
}

/// This host's part of all carriers of a kind.
pub(super) trait Endpoint {
    /// `None` if peers need no grant.
    fn grantor(&self) -> Option<&dyn Grantor>;

    /// Opens a carrier.
    fn connect(&self, opening: ToOpen) -> Local<'_, io::Result<Box<dyn Link>>>;

    /// Ends all carriers of the kind.
    fn close(&self);

    /// Completes when the peers have been told.
    fn wait_idle(&self) -> Local<'_, ()>;
}

/// Starts this host's part of a kind, inside a tokio runtime's local tasks. `most_ahead`: bytes that a peer may be allowed
/// to have under way.
pub(super) fn start(
    kind: Kind,
    arrivals: Arrivals,
    broker: &broker::Handle,
    most_ahead: u64,
) -> io::Result<Rc<dyn Endpoint>> {
    Ok(match kind {
        Kind::Quic | Kind::Sctp | Kind::Kcp => process::Remote::start(kind, most_ahead, arrivals),
        Kind::Mptcp => Rc::new(mptcp::Mptcp::start(arrivals)?),
        Kind::Graft => Rc::new(graft::Sessions::start(arrivals, broker)?),
    })
}
