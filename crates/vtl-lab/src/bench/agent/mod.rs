//! The two ends of a measured transfer: processes of this program inside the testbed's
//! namespaces, told what to do by one JSON argument ([`Order`]).
//!
//! The server says `ready` when it can be reached; at the end of its input it writes a [`Summary`]
//! and ends. The client says `ready` when nothing is left to do before the measurement, starts when
//! a line comes in, writes an [`Outcome`] when it is through, and ends at the end of its input. The
//! connections stay open until then, so that they can be looked at.

mod aware;
mod client;
mod conn;
mod graft;
mod message;
mod quic;
mod server;
mod tcp;
mod udp;
mod workload;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bench::plan::Rule;

/// UDP payload of a full-size packet over IPv4 at an MTU of 1,500.
const DATAGRAM: u16 = 1_472;
/// Bytes of a UDP socket's buffers.
const SOCKET: usize = 16 << 20;
/// How often a client asks where the question may be lost, until something comes; and the silence after which nothing
/// more comes.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Size of that question, bytes: the number of bytes to send.
const QUESTION: usize = 8;

/// What one end has to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    /// Which end.
    pub(crate) side: Side,
    /// What carries the bytes.
    pub(crate) protocol: Protocol,
    /// The server's address.
    pub(crate) address: SocketAddr,
    /// What the client asks for, on each connection.
    pub(crate) work: Work,
    /// Connections at the same time.
    pub(crate) connections: u32,
    /// Whether the client fetches a little on a connection of its own first.
    pub(crate) known: bool,
    /// How long the client waits after the start signal, seconds.
    pub(crate) delay_s: f64,
    /// When the client gives up, seconds after the start.
    pub(crate) limit_s: f64,
    /// Round-trip time of the link, ms.
    pub(crate) rtt_ms: f64,
    /// Rate of the link, Mbit/s; 0: not limited.
    pub(crate) rate_mbit: f64,
}

/// The end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Side {
    /// Asks and receives.
    Client,
    /// Answers and sends.
    Server,
}

/// What carries the bytes.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    /// TCP, with this congestion control if one is named.
    Tcp(Option<String>),
    /// TCP that may lose bytes on its way, since a loss-tolerant carrier took its place.
    LossyTcp,
    /// QUIC, with this congestion control.
    Quic(String),
    /// UDP.
    Udp,
    /// A VTL session over the graft of this name.
    Graft {
        /// The graft.
        name: String,
        /// Its parameters that do not have their defaults.
        params: Vec<(String, u32)>,
        /// Its payload is encrypted.
        sealed: bool,
        /// The host's daemon.
        daemon: PathBuf,
    },
    /// VTL sessions over the grafts that a rule says, by an application that follows it.
    Aware {
        /// The rule.
        rule: Rule,
        /// The host's daemon.
        daemon: PathBuf,
    },
}

/// What is transferred on a connection.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Work {
    /// So many bytes from the server.
    File(u64),
    /// So many bytes to the server.
    Upload(u64),
    /// Requests and responses.
    Messages {
        /// Bytes of a request.
        request: u32,
        /// Bytes of a response.
        response: u32,
        /// How many.
        count: u32,
    },
    /// Whatever comes from the server until the time is over; at a rate, each message or block with its latency.
    Stream {
        /// The server's rate, kbit/s; 0: as fast as it goes.
        rate_kbit: u64,
        /// For how long, ms.
        millis: u64,
    },
}

/// What the client has to say.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Payload bytes received; of an upload, handed over.
    pub(crate) bytes: u64,
    /// Bytes that were not what they should be.
    pub(crate) wrong: u64,
    /// Whether everything that was asked for came.
    pub(crate) complete: bool,
    /// Whether the time limit cut it.
    pub(crate) cut: bool,
    /// From before the first connection was opened to the last byte, or to the cut. Of an upload, until the server
    /// has said that all of it is there.
    pub(crate) seconds: f64,
    /// Until the first byte; not of uploads.
    pub(crate) first_byte_s: Option<f64>,
    /// Until half of the bytes, or half of the time: `(seconds, bytes by then)`.
    pub(crate) half: Option<(f64, u64)>,
    /// Latency of messages, µs, at the 50th, 99th and 99.9th percentile.
    pub(crate) latency_us: Option<[f64; 3]>,
    /// Bytes by then, every 100 ms.
    pub(crate) samples: Vec<(f64, u64)>,
    /// When another graft took over, seconds.
    pub(crate) switches: Vec<f64>,
    /// The most memory it had resident, KiB.
    pub(crate) peak_kb: u64,
    /// Why it failed, if it did.
    pub(crate) error: Option<String>,
}

/// What the server has to say.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Packets sent.
    pub(crate) sent: u64,
    /// Of those, sent again or lost, as the transport counts them.
    pub(crate) again: u64,
    /// What the connection really used, in words.
    pub(crate) settings: String,
    /// The most memory it had resident, KiB.
    pub(crate) peak_kb: u64,
}

/// The process that an end of a transfer is. Writes its results to standard output.
///
/// # Errors
/// The order is none, or the end cannot be set up.
pub(crate) fn main(order: &str) -> anyhow::Result<()> {
    let order: Order = serde_json::from_str(order)?;
    match order.side {
        Side::Client => client::run(&order),
        Side::Server => server::run(&order),
    }
}

/// One line of JSON for the process that gave the order.
fn say(value: &impl Serialize) -> anyhow::Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, value)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// What both ends say when they are ready.
pub(crate) const READY: &str = "ready";

/// The most memory that this process has had resident, KiB.
fn own_peak_kb() -> u64 {
    crate::child::peak_kb(std::process::id())
}

/// The largest buffer that a baseline is given, bytes: twice the bandwidth-delay product, at least
/// 32 MiB, as [`vtl_testbed::Testbed::tune_tcp`] does for TCP; many connections share that.
fn buffer_limit(order: &Order) -> u64 {
    let bdp = order.rate_mbit * 1e6 / 8.0 * order.rtt_ms / 1e3;
    let all = (2.0 * bdp).max(f64::from(32 << 20)) as u64;
    (all / u64::from(order.connections)).max(1 << 20)
}
