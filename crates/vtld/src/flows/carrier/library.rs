//! Transport libraries of carriers in user space: QUIC, SCTP, KCP and stacks of layers. They run in processes of their own (`process/`),
//! of which they are unaware.

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    time::Duration,
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use vtl_control::CarrierPath;
use vtl_core::layers::Pipeline;
use vtl_proto::keys::Secret;

use super::{Expected, Local, framed::Pipe};

/// Milliseconds, rounded to 0.01, for [`CarrierPath`].
pub(super) fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 1e2
}

/// A certificate and its key, each in DER.
#[derive(Serialize, Deserialize)]
pub(super) struct Certificate {
    pub(super) certificate: Bytes,
    pub(super) key: Bytes,
}

/// Omits the key.
impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificate(..)")
    }
}

/// Parameters for opening a carrier.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opening {
    pub(super) to: SocketAddr,
    pub(super) token: u64,
    pub(super) crypto: Secret,
    /// Local address.
    pub(super) local: IpAddr,
    /// The path's round-trip time, measured by TCP.
    pub(super) rtt: Option<Duration>,
    /// Of a stack.
    pub(super) layering: Option<Layering>,
}

/// What a stack consists of.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Layering {
    /// As [`vtl_core::layers::Description`].
    pub(super) layers: String,
    /// What this host, and the peer, send at most, kbit/s; 0: without bound.
    pub(super) rate: u32,
    pub(super) peer_rate: u32,
}

/// A carrier whose handshake is complete; closed on drop.
pub(super) struct Opened {
    pub(super) pipe: Rc<Pipe>,
    /// Memory that the library uses, or that the peer can make it use at once, bytes.
    pub(super) memory: Box<dyn Fn() -> u64>,
    pub(super) path: Box<dyn Fn() -> Option<CarrierPath>>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.pipe.end();
    }
}

/// Channel of carriers opened by peers, with their tokens.
pub(super) type Opens = mpsc::UnboundedSender<(u64, Opened)>;

/// Moves the packets of all carriers of a kind.
pub(super) trait Library {
    /// Permits a peer to open a carrier.
    fn expect(&self, expected: Expected);

    /// Revokes the permission.
    fn revoke(&self, token: u64);

    /// Opens a carrier.
    fn connect(&self, opening: Opening) -> Local<'_, io::Result<Opened>>;

    /// Makes layers over a carrier of vtld's. `mtu`: maximum length of a packet at the bottom, bytes.
    ///
    /// # Errors
    /// What is wrong with them, as one sentence.
    fn layers(&self, _layers: &str, _mtu: usize) -> Result<Pipeline, String> {
        Err("layers are in the process of stacks".into())
    }

    /// Closes all carriers.
    fn close(&self);

    /// Completes when the peers have been told of the end.
    fn wait_idle(&self) -> Local<'_, ()>;
}
