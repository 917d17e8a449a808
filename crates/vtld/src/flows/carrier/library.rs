//! What moves packets of carriers in user space: QUIC, SCTP and KCP. They run in processes of their own (`process/`), and
//! know nothing of that.

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
use vtl_proto::keys::Secret;

use super::{Expected, Local, framed::Pipe};

/// A certificate and its key, each in DER.
#[derive(Serialize, Deserialize)]
pub(super) struct Certificate {
    pub(super) certificate: Bytes,
    pub(super) key: Bytes,
}

/// Without the key.
impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Certificate(..)")
    }
}

/// What opening a carrier takes.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Opening {
    pub(super) to: SocketAddr,
    pub(super) token: u64,
    pub(super) crypto: Secret,
    /// The address to open it from.
    pub(super) local: IpAddr,
    /// The path's round-trip time, as TCP measured it.
    pub(super) rtt: Option<Duration>,
}

/// A carrier whose handshake is done. It ends when this is dropped.
pub(super) struct Opened {
    pub(super) pipe: Rc<Pipe>,
    /// Bytes that the library uses, or that the peer can make it use at once.
    pub(super) memory: Box<dyn Fn() -> u64>,
    pub(super) path: Box<dyn Fn() -> Option<CarrierPath>>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.pipe.end();
    }
}

/// Carriers that peers have opened, by their token.
pub(super) type Opens = mpsc::UnboundedSender<(u64, Opened)>;

/// What moves the packets of all carriers of a kind.
pub(super) trait Library {
    /// Lets a peer open a carrier.
    fn expect(&self, expected: Expected);

    /// No more.
    fn revoke(&self, token: u64);

    /// Opens a carrier.
    fn connect(&self, opening: Opening) -> Local<'_, io::Result<Opened>>;

    /// Ends all carriers.
    fn close(&self);

    /// Completes when the peers have been told.
    fn wait_idle(&self) -> Local<'_, ()>;
}
