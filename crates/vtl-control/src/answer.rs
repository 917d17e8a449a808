//! Answers.

mod rules;
mod select;

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use crate::PeerKey;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use vtl_proto::{
    keys::{Keys, Suite},
    services::Services,
};

use crate::{
    Error,
    request::{PROTOCOL, UNKNOWN_OP, protocol},
};

pub use rules::{Conditions, Explanation, PassedRule, PathCondition, Rule, RuleCount, Rules};
pub use select::{Lesson, LessonOutcome, Lessons, SelectStatus, SelectedPath};

/// The daemon's refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason, one sentence.
    pub why: String,
    /// Refused to this user only.
    pub denied: bool,
}

impl<T: Into<String>> From<T> for Refusal {
    fn from(why: T) -> Self {
        let why = why.into();
        Self { why, denied: false }
    }
}

impl Refusal {
    /// The refusal as a message.
    pub fn to_message(&self) -> Value {
        json!({ "ok": false, "error": self.why, "denied": self.denied, "protocol": PROTOCOL })
    }
}

/// An answer, which must be an object, as a message.
///
/// # Errors
/// A path in the answer is not UTF-8.
pub fn to_message(answer: &impl Serialize) -> Result<Value, Refusal> {
    let mut message = serde_json::to_value(answer).map_err(|error| error.to_string())?;
    message["ok"] = true.into();
    message["protocol"] = PROTOCOL.into();
    Ok(message)
}

/// Parses the answer in a message.
pub(crate) fn from_message<T: DeserializeOwned>(mut message: Value) -> Result<T, Error> {
    let theirs = protocol(&message);
    let fields = message.as_object_mut();
    match fields
        .and_then(|f| f.remove("ok"))
        .and_then(|ok| ok.as_bool())
    {
        Some(true) if theirs != PROTOCOL => Err(Error::Protocol(theirs)),
        Some(true) => {
            serde_json::from_value(message).map_err(|error| Error::Malformed(error.to_string()))
        }
        Some(false) => {
            let why = match message["error"].take() {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Err(if message["denied"] == true {
                Error::Forbidden(why)
            } else if why.starts_with(UNKNOWN_OP) {
                Error::TooOld
            } else {
                Error::Refused(why)
            })
        }
        None => Err(Error::Malformed(message.to_string())),
    }
}

/// Success, without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {}

/// State of the daemon. Answers [`Request::Status`](crate::Request::Status).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// The kernel's release.
    pub kernel: String,
    /// Uptime of the daemon, seconds.
    pub uptime_s: f64,
    /// The interfaces that the data plane is attached to.
    pub interfaces: Vec<Interface>,
    /// A page of sessions.
    pub sessions: Vec<SessionStatus>,
    /// First session index of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<u32>,
    /// VTL ports that applications listen at.
    pub listeners: Vec<u16>,
    /// Peers' requests for sessions.
    pub negotiation: Negotiation,
    /// Packets, over all interfaces.
    pub packets: Packets,
    /// The carriers other than grafts.
    pub carriers: Vec<CarrierStatus>,
    /// The hooks.
    pub hooks: Vec<Hook>,
    /// Near hosts, over a clean path: connections to them go past the daemon unless they name a carrier.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<IpAddr>,
    /// The gateways.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<Gateway>,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// MTU, bytes.
    pub mtu: u32,
    /// Egress driver: `live` or `tc`.
    pub driver: Option<String>,
    /// Reason for the driver.
    pub why: Option<String>,
}

/// Counters of a session, since its start unless stated otherwise. Answers
/// [`Request::Statistics`](crate::Request::Statistics).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Its index.
    pub sid: u32,
    /// The other host.
    pub peer: IpAddr,
    /// VTL port at which it was opened; 65535: it carries hooked flows.
    pub port: u16,
    /// Encapsulation: `native`, `udp` or `tcp`.
    pub way: String,
    /// The peer's UDP port; 0: native.
    pub udp_port: u16,
    /// AEAD of its payload: `aes-128-gcm`, `aes-256-gcm` or `chacha20-poly1305`. `None`: not
    /// encrypted.
    #[serde(default)]
    pub cipher: Option<Suite>,
    /// `opening`, `open`, `closing` or `ended`.
    pub phase: String,
    /// The graft's name.
    pub graft: Option<String>,
    /// Smoothed round-trip time, milliseconds.
    pub rtt_ms: f64,
    /// Minimum round-trip time of the last 10 s, milliseconds.
    pub min_rtt_ms: f64,
    /// Maximum delivery rate over one second, of the last ten seconds with data: Mbit/s of payload.
    pub rate_mbit: f64,
    /// Loss rate on the way to the peer, of transmissions in the last 10 s with data: percent.
    pub loss_pct: f64,
    /// What congestion control does at present, where the graft tells it: "startup", "drain", "probe-bw" or
    /// "probe-rtt".
    pub mode: Option<String>,
    /// Congestion window, packets.
    pub cwnd: u64,
    /// Packets sent, retransmissions included.
    pub sent: u64,
    /// Packets retransmitted.
    pub retransmitted: u64,
    /// Packets delivered to the peer, as of the latest acknowledgement.
    pub delivered: u64,
    /// Transmissions lost, as of the latest acknowledgement.
    pub lost: u64,
    /// Reordering threshold, packets: later packets acknowledged before one counts as lost.
    pub reorder: u32,
    /// Consecutive probe timeouts without an acknowledgement.
    pub timeouts: u32,
    /// Packets that the peer has not acknowledged yet.
    pub unacknowledged: u64,
    /// Packets received, without duplicates.
    pub received: u64,
    /// Duplicates received.
    pub duplicates: u32,
    /// Packets received with a wrong checksum.
    pub bad_checksum: u64,
    /// Packets received beyond the receive window.
    pub beyond_window: u64,
}

/// Peers' requests for sessions, since the daemon began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiation {
    /// Sessions opened.
    pub accepted: u64,
    /// Those of them with early data.
    pub early: u64,
    /// Requests refused for any reason but the next two.
    pub refused: u64,
    /// Requests answered with a cookie.
    pub cookies: u64,
    /// Replays: requests whose ticket has opened a session before.
    pub replays: u64,
    /// Retransmitted requests, answered as before.
    pub repeated: u64,
    /// Present sessions of peers with unproven addresses.
    pub strangers: usize,
}

/// Packet counters since the daemon began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packets {
    /// Received.
    pub received: u64,
    /// Malformed: truncated, of another version, or of unknown type.
    pub malformed: u64,
    /// For no session, or with a wrong token.
    pub no_session: u64,
    /// For a graft that is not in the kernel.
    pub no_graft: u64,
    /// With a wrong checksum.
    pub bad_checksum: u64,
    /// Duplicates.
    pub duplicate: u64,
    /// Outside the receive window.
    pub beyond_window: u64,
    /// Dropped because another CPU was processing the session.
    pub contended: u64,
    /// Passed to the daemon: packets of the negotiation.
    pub control: u64,
    /// Sent by egress.
    pub sent: u64,
    /// Acknowledgements sent by ingress.
    pub acknowledgements: u64,
    /// Transmissions that failed.
    pub failed: u64,
    /// Packets that this host forwards to others: passed unchanged, and also counted as malformed,
    /// of no session, or of the negotiation.
    #[serde(default)]
    pub others: u64,
    /// Packets of the negotiation dropped by rate limit, per prefix or in total; also counted as
    /// passed to the daemon.
    #[serde(default)]
    pub limited: u64,
}

/// A carrier other than a graft.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CarrierStatus {
    /// The other host.
    pub peer: IpAddr,
    /// `graft`, `quic`, `sctp`, `mptcp` or `kcp`.
    pub carrier: String,
    /// The carrier encrypts its payload.
    #[serde(default)]
    pub encrypted: bool,
    /// `client` if this host opened it, or `server`.
    pub role: String,
    /// Open flows.
    pub flows: usize,
    /// Bytes to the peer: applications' data, and control frames of their flows.
    pub bytes_sent: u64,
    /// Bytes of application data from the peer.
    pub bytes_received: u64,
    /// On a lossy carrier, bytes that applications here have skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_bytes: Option<u64>,
    /// Path measurements, if the carrier has them.
    #[serde(flatten)]
    pub path: Option<CarrierPath>,
}

/// A carrier's path measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CarrierPath {
    /// Round-trip time, milliseconds.
    pub rtt_ms: f64,
    /// Its minimum lately, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_rtt_ms: Option<f64>,
    /// Packets sent.
    pub sent: u64,
    /// Packets lost; with SCTP, DATA chunks retransmitted.
    pub lost: u64,
    /// Bytes that the peer has acknowledged; with QUIC, of whole packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivered: Option<u64>,
    /// Whether the application bounds the rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app_limited: Option<bool>,
    /// SCTP only: packets from the peer's address that are not of the association.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<u64>,
}

/// The grafts of the pool. Answers [`Request::GraftList`](crate::Request::GraftList).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grafts {
    /// One row per graft, by number.
    pub grafts: Vec<Graft>,
    /// Refused files of the pool's directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused: Vec<RefusedFile>,
}

/// A graft of the pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Graft {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its number in packets.
    pub gid: u16,
    /// The services that it provides, by name.
    pub services: String,
    /// Bytes of its object.
    pub bytes: usize,
    /// Instructions of its programs; 0 unless it is in the kernel.
    pub instructions: usize,
    /// Whether it is in the kernel.
    pub deployed: bool,
    /// The key's name, or `built in`, or `gone from the pool`.
    pub signer: String,
}

/// A refused file of the pool's directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedFile {
    /// The file.
    pub file: PathBuf,
    /// The reason, one sentence.
    pub why: String,
}

/// A graft has been loaded into the kernel. Answers
/// [`Request::GraftDeploy`](crate::Request::GraftDeploy) and
/// [`Request::GraftSwap`](crate::Request::GraftSwap).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Deployed {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its number in packets.
    pub gid: u16,
    /// Instructions of its programs.
    pub instructions: usize,
    /// Loading time, milliseconds.
    pub ms: f64,
}

/// Answers [`Request::HookList`](crate::Request::HookList).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hooks {
    /// The hooks.
    pub hooks: Vec<Hook>,
}

/// A hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    /// Its number.
    pub id: u32,
    /// Target of the hook.
    #[serde(flatten)]
    pub on: Hooked,
    /// Carrier of its connections; `None`: the best one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub carrier: Option<String>,
    /// Connections that got the congestion control of the named carrier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
    /// Rule that made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
}

/// The gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateways {
    /// One for each interface.
    pub gateways: Vec<Gateway>,
}

/// A gateway: an interface, forwarded TCP connections over which are carried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    /// The interface.
    pub interface: String,
    /// Addresses and prefixes of destinations; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<String>,
    /// Destination ports; empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// Carrier of connections that leave by the interface; `None`: the best one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carrier: Option<String>,
    /// There is no such interface at present.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub absent: bool,
    /// Connections that were ended here so far.
    pub connections: u64,
}

/// Target of a hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Hooked {
    /// A process, and its children.
    Run {
        /// The process.
        run: u32,
        /// The cgroup made for it.
        cgroup: PathBuf,
        /// Processes in it now.
        processes: usize,
    },
    /// All processes of a cgroup.
    Cgroup {
        /// Its directory.
        cgroup: PathBuf,
        /// Processes in it now.
        processes: usize,
    },
    /// A TCP port of local servers.
    Port {
        /// The port.
        port: u16,
    },
}

/// A hook was added. Answers [`Request::HookAdd`](crate::Request::HookAdd) and
/// [`Request::HookRun`](crate::Request::HookRun).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookAdded {
    /// Its number.
    pub id: u32,
}

/// Known peers. Answers [`Request::PeerList`](crate::Request::PeerList).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peers {
    /// This host's own public key, in hexadecimal.
    pub key: String,
    /// Policy for peers' keys: `first-use`, `known`, or `ca`.
    pub policy: String,
    /// Ports of this host, and ranges, that unlisted peers' connections may reach; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<Vec<String>>,
    /// This host's certificate, if it has one for its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<HostCertificate>,
    /// Keys whose certificates are accepted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub authorities: Vec<PeerKey>,
    /// A page of peers: listed ones, learned ones, then those that have shown a certificate since
    /// the daemon started.
    pub peers: Vec<Peer>,
    /// First index of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<usize>,
}

/// A host known by its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Name, key and addresses.
    #[serde(flatten)]
    pub known: PeerKey,
    /// In the operator's file; else learned, or trusted by command.
    pub listed: bool,
    /// The certificate by which it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<HostCertificate>,
}

/// A host's certificate: an operator's signed statement about the host's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCertificate {
    /// The host's name.
    pub name: String,
    /// The signing public key, in hexadecimal.
    pub signer: String,
    /// Prefixes of the host's addresses; without any, no peer connects to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Expiry, in RFC 3339 format.
    pub expires: String,
}

/// Flows. Answers [`Request::FlowList`](crate::Request::FlowList).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowList {
    /// A page of flows, by id.
    pub flows: Vec<FlowStatus>,
    /// First id of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<u64>,
}

/// A page of paths. Answers [`Request::PathList`](crate::Request::PathList).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathList {
    /// By the best evidence, sorted by address.
    pub paths: Vec<PathStatus>,
    /// Address from which on there are more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more: Option<IpAddr>,
}

/// A path. Answers [`Request::PathShow`](crate::Request::PathShow).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathReport {
    /// By the best evidence.
    #[serde(flatten)]
    pub path: PathStatus,
    /// By each kind of connection.
    pub told: Vec<PathStatus>,
    /// The interface by which packets leave, and its link layer; `None`: there is no route now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkStatus>,
}

/// An interface, and what its link layer says. What it does not tell is `None`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkStatus {
    /// Name of the interface.
    pub interface: String,
    /// `ethernet`, `wifi`, `cellular` or `tunnel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub medium: Option<String>,
    /// The rate at which it sends, headers and all, Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_mbit: Option<f64>,
    /// The quality of the signal, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal_pct: Option<f64>,
}

/// The state of the path to a host, in the direction in which this host sends. What was not measured is `None`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathStatus {
    /// The other host.
    pub peer: IpAddr,
    /// The kind of connection that has told most: `tcp`, or a carrier as in [`CarrierStatus`].
    pub evidence: String,
    /// Time since it told something new, seconds.
    pub age_s: f64,
    /// `lan` (round trips below 50 ms), `terrestrial` (below 500 ms) or `long-delay`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// It loses packets in bursts, while no queue stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub looks_wireless: Option<bool>,
    /// The minimum round-trip time lately, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_rtt_ms: Option<f64>,
    /// The smoothed round-trip time, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_ms: Option<f64>,
    /// The mean deviation of round-trip times, milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_variance_ms: Option<f64>,
    /// Number of packets that `loss_pct` is a share of.
    pub packets: u64,
    /// Lost packets, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_pct: Option<f64>,
    /// Lost packets of those sent while no queue stood on the path, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clear_loss_pct: Option<f64>,
    /// How many packets are lost in a row while no queue stands, on average.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_burst: Option<f64>,
    /// Packets that arrive behind later ones, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reordering_pct: Option<f64>,
    /// Rate of delivery, payload, Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delivery_mbit: Option<f64>,
    /// The rate that the path has for this host, payload, Mbit/s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_mbit: Option<f64>,
    /// Whether `bandwidth_mbit` is a lower bound, as less was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_at_least: Option<bool>,
    /// By how much the two highest rates lately differ, percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth_error_pct: Option<f64>,
}

/// A flow: a hooked connection with a TCP connection of its own. Answers
/// [`Request::FlowShow`](crate::Request::FlowShow) and [`Request::FlowMove`](crate::Request::FlowMove).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowStatus {
    /// Unique while the daemon runs.
    pub id: u64,
    /// This host's end of its TCP connection.
    pub local: SocketAddr,
    /// The other end.
    pub peer: SocketAddr,
    /// `client` if this host's application has opened it, or `server`.
    pub role: String,
    /// It requires a carrier: none of its data goes over its own connection.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub requires_carrier: bool,
    /// The carrier must be encrypted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub requires_encryption: bool,
    /// Carrier of data to the peer: `tcp`, its own connection; `tls`, the daemons' connection;
    /// another carrier; or `none`, while it waits for the one that it requires.
    pub sends_by: String,
    /// Carrier of the latest data from the peer.
    pub receives_by: String,
    /// Bytes of application data to the peer.
    pub bytes_sent: u64,
    /// Bytes of application data received in order from the peer.
    pub bytes_received: u64,
    /// On a loss-tolerant flow, how many of those bytes the application has skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_bytes: Option<u64>,
    /// Mbit/s to the peer, over the last one to two seconds.
    pub sends_mbit: f64,
    /// Mbit/s from the peer.
    pub receives_mbit: f64,
    /// `elephant` if it has carried at least 1 MiB in the last ten seconds or so, or `mouse`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<String>,
    /// Deviation of its rate from second to second over the mean rate, of the last ten seconds or so: 0 if it is
    /// constant, above 1 if most goes in rare bursts. Not of a flow younger than five seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burstiness: Option<f64>,
    /// Class of its application, once recognised by its first bytes: `loss-sensitive`, for
    /// instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Evidence for the class; may be a server's name, so for root only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile_evidence: Option<String>,
    /// Ends of the connection between application and daemon, the application's first: identifies
    /// the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app: Option<[SocketAddr; 2]>,
    /// The association that it belongs to, as the two hosts number it ([`SelectedPath`] has the same number).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub association: Option<u32>,
    /// The stacks that it goes by at once (carrier `multipath`); only in answers about a single flow.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stacks: Vec<FlowStack>,
    /// Age of its TCP connection, seconds.
    pub age_s: f64,
    /// Reason for `sends_by`.
    pub why: String,
}

/// A stack of a flow, a carrier on a path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowStack {
    /// The carrier: `graft`.
    pub carrier: String,
    /// This host's address on the path.
    pub local: IpAddr,
    /// The other host's.
    pub peer: IpAddr,
    /// Whether the path is that of the flow's own connection.
    pub first: bool,
    /// Whether it delivers, as far as this host can tell: acknowledgements come in time.
    pub delivers: bool,
    /// Smoothed round-trip time, milliseconds.
    pub rtt_ms: f64,
    /// Rate at which it sends, of all flows, Mbit/s.
    pub sends_mbit: f64,
    /// Bytes of the flow that this host has sent by it, what went by another stack as well included.
    pub bytes_sent: u64,
    /// Bytes of the flow that have arrived by it, likewise.
    pub bytes_received: u64,
}

/// A port was bound. Answers [`Request::Listen`](crate::Request::Listen).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// Key with which other connections may accept sessions at the port.
    pub key: u64,
}

/// A session was opened. Answers [`Request::Connect`](crate::Request::Connect),
/// [`Request::Follow`](crate::Request::Follow) and [`Request::Accept`](crate::Request::Accept).
///
/// Descriptors, in this order: the transmit ring; the receive ring; an eventfd that wakes the
/// daemon; an eventfd by which the daemon wakes the application; with `events`, the ring of events
/// by which the kernel does; the socket to run egress, unless the application is in another network
/// namespace than the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its index.
    #[serde(default)]
    pub sid: u32,
    /// Key with which the application's other connections may have it succeeded.
    #[serde(default)]
    pub key: u64,
    /// Packets per ring.
    pub slots: u32,
    /// Maximum payload of a packet, bytes, sealed if there are keys.
    pub max_payload: u16,
    /// Maximum length of a message, bytes. 0, from an old daemon: that of a packet.
    #[serde(default)]
    pub max_message: u32,
    /// The graft's name.
    #[serde(default)]
    pub graft: String,
    /// Its number in packets.
    pub gid: u16,
    /// The services that it provides.
    pub services: Services,
    /// The other host.
    pub peer: IpAddr,
    /// Whether a ring of events is included.
    #[serde(default)]
    pub events: bool,
    /// Keys that seal its payload. `None`: in the clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<Keys>,
}

#[cfg(test)]
mod tests;
