//! Answers.

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

use crate::Error;

/// Why the daemon does not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// One sentence.
    pub why: String,
    /// Only because of who asks.
    pub denied: bool,
}

impl<T: Into<String>> From<T> for Refusal {
    fn from(why: T) -> Self {
        let why = why.into();
        Self { why, denied: false }
    }
}

impl Refusal {
    /// The message that says so.
    pub fn to_message(&self) -> Value {
        json!({ "ok": false, "error": self.why, "denied": self.denied })
    }
}

/// The message with an answer, which is an object.
///
/// # Errors
/// A path in it is not UTF-8.
pub fn to_message(answer: &impl Serialize) -> Result<Value, Refusal> {
    let mut message = serde_json::to_value(answer).map_err(|error| error.to_string())?;
    message["ok"] = true.into();
    Ok(message)
}

/// The answer in a message.
pub(crate) fn from_message<T: DeserializeOwned>(mut message: Value) -> Result<T, Error> {
    let fields = message.as_object_mut();
    match fields
        .and_then(|f| f.remove("ok"))
        .and_then(|ok| ok.as_bool())
    {
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
            } else {
                Error::Refused(why)
            })
        }
        None => Err(Error::Malformed(message.to_string())),
    }
}

/// It is done, and there is nothing to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {}

/// What the daemon is carrying. Answers [`Request::Status`](crate::Request::Status).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// The kernel's release.
    pub kernel: String,
    /// Since the daemon began, seconds.
    pub uptime_s: f64,
    /// The network interfaces that carry packets.
    pub interfaces: Vec<Interface>,
    /// The sessions, as many as one message takes.
    pub sessions: Vec<SessionStatus>,
    /// The index of the session with which the next message begins, if there are more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<u32>,
    /// VTL ports that applications listen at.
    pub listeners: Vec<u16>,
    /// Requests of peers for sessions.
    pub negotiation: Negotiation,
    /// Packets of all interfaces.
    pub packets: Packets,
    /// The carriers that are no grafts.
    pub carriers: Vec<CarrierStatus>,
    /// The hooks.
    pub hooks: Vec<Hook>,
    /// Hosts so near, over a clean path, that connections to them go past the daemon unless they name a carrier.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub near: Vec<IpAddr>,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Bytes of its longest packet.
    pub mtu: u32,
    /// How packets leave: `live` or `tc`.
    pub driver: Option<String>,
    /// Why so.
    pub why: Option<String>,
}

/// A session: what is counted of it, since it began unless said otherwise. Answers
/// [`Request::Statistics`](crate::Request::Statistics).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Its index.
    pub sid: u32,
    /// The other host.
    pub peer: IpAddr,
    /// The VTL port that it was opened to; 0: it carries hooked flows.
    pub port: u16,
    /// `native`, `udp` or `tcp`: how packets cross the network.
    pub way: String,
    /// The peer's UDP port; 0: native.
    pub udp_port: u16,
    /// With which its payload is encrypted: `aes-128-gcm`, `aes-256-gcm` or `chacha20-poly1305`. `None`: not.
    #[serde(default)]
    pub cipher: Option<Suite>,
    /// `opening`, `open`, `closing` or `ended`.
    pub phase: String,
    /// The graft's name.
    pub graft: Option<String>,
    /// Smoothed round-trip time, milliseconds.
    pub rtt_ms: f64,
    /// The shortest round-trip time of the last 10 s, milliseconds.
    pub min_rtt_ms: f64,
    /// The highest rate at which packets have arrived at the peer, over a second of the last ten that data
    /// went: Mbit/s of payload.
    pub rate_mbit: f64,
    /// Transmissions lost on the way there, of those in the last 10 s that data went, percent.
    pub loss_pct: f64,
    /// What BBR does just now.
    pub mode: Option<String>,
    /// Packets that may be under way.
    pub cwnd: u64,
    /// Packets sent, repetitions included.
    pub sent: u64,
    /// Packets sent again.
    pub retransmitted: u64,
    /// Packets that have arrived at the peer, as far as the latest acknowledgement tells.
    pub delivered: u64,
    /// Transmissions that have not arrived, as far as the latest acknowledgement tells.
    pub lost: u64,
    /// Packets that may overtake one before it counts as lost.
    pub reorder: u32,
    /// Times that nothing came back for too long, since something last did.
    pub timeouts: u32,
    /// Packets that the peer has not acknowledged yet.
    pub unacknowledged: u64,
    /// Different packets received.
    pub received: u64,
    /// Packets received again.
    pub duplicates: u32,
    /// Packets received with a wrong checksum.
    pub bad_checksum: u64,
    /// Packets received for which there was no room.
    pub beyond_window: u64,
}

/// Requests of peers for sessions since the daemon began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Negotiation {
    /// Sessions made.
    pub accepted: u64,
    /// Of them, with data ahead of the answer.
    pub early: u64,
    /// Requests refused for another reason than the next two.
    pub refused: u64,
    /// Requests that were answered with a cookie.
    pub cookies: u64,
    /// Requests whose ticket had opened a session before.
    pub replays: u64,
    /// Requests that got the same answer as before.
    pub repeated: u64,
    /// Places that peers without proven address hold now.
    pub strangers: usize,
}

/// Packets since the daemon began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packets {
    /// Received.
    pub received: u64,
    /// Malformed: shorter than they say, or of another version or an unknown type.
    pub malformed: u64,
    /// Of no session, or with a wrong token.
    pub no_session: u64,
    /// Of a graft that is not in the kernel.
    pub no_graft: u64,
    /// With a wrong checksum.
    pub bad_checksum: u64,
    /// Received again.
    pub duplicate: u64,
    /// Outside the receive window.
    pub beyond_window: u64,
    /// Dropped because another processor was at work on the session.
    pub contended: u64,
    /// Passed to the daemon: the negotiation's.
    pub control: u64,
    /// Sent by egress.
    pub sent: u64,
    /// Acknowledgements sent by ingress.
    pub acknowledgements: u64,
    /// That could not be sent.
    pub failed: u64,
    /// For other hosts, which this one forwards packets to: left alone, and counted as malformed, of no
    /// session or the negotiation's as well.
    #[serde(default)]
    pub others: u64,
    /// The negotiation's that were dropped, as there were too many from their prefix or in all; counted as
    /// passed to the daemon as well.
    #[serde(default)]
    pub limited: u64,
}

/// A carrier that is no graft.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CarrierStatus {
    /// The other host.
    pub peer: IpAddr,
    /// `graft`, `quic`, `sctp`, `mptcp` or `kcp`.
    pub carrier: String,
    /// Nobody on the path reads what goes by it.
    #[serde(default)]
    pub encrypted: bool,
    /// `client`, which opened it, or `server`.
    pub role: String,
    /// Flows that are open.
    pub flows: usize,
    /// Bytes to the peer: applications', and what is said about their flows.
    pub bytes_sent: u64,
    /// Bytes of applications from the peer.
    pub bytes_received: u64,
    /// Of a carrier that loses some: bytes that applications here have gone on without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_bytes: Option<u64>,
    /// Where the carrier says so.
    #[serde(flatten)]
    pub path: Option<CarrierPath>,
}

/// What a carrier knows of its path.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CarrierPath {
    /// Round-trip time, milliseconds.
    pub rtt_ms: f64,
    /// Packets sent.
    pub sent: u64,
    /// Packets that the network lost; with SCTP, DATA chunks sent again.
    pub lost: u64,
    /// Of SCTP: packets of the peer's address that are no part of the association.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<u64>,
}

/// The grafts of the pool. Answers [`Request::GraftList`](crate::Request::GraftList).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grafts {
    /// A row for each, by number.
    pub grafts: Vec<Graft>,
    /// Files of the pool's directory that are refused.
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
    /// It is in the kernel.
    pub deployed: bool,
    /// The key's name, or `built in`, or `gone from the pool`.
    pub signer: String,
}

/// A file that the pool does not take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedFile {
    /// The file.
    pub file: PathBuf,
    /// One sentence.
    pub why: String,
}

/// A graft is in the kernel. Answers [`Request::GraftDeploy`](crate::Request::GraftDeploy) and
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
    /// What loading it took, milliseconds.
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
    /// What it is on.
    #[serde(flatten)]
    pub on: Hooked,
    /// What its connections travel by, unless it is the best carrier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub carrier: Option<String>,
    /// Connections that got the congestion control which the carrier names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
    /// The rule that it was made for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
}

/// What a hook is on.
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

/// A hook is there. Answers [`Request::HookAdd`](crate::Request::HookAdd) and
/// [`Request::HookRun`](crate::Request::HookRun).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookAdded {
    /// Its number.
    pub id: u32,
}

/// Hosts that this one knows. Answers [`Request::PeerList`](crate::Request::PeerList).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peers {
    /// This host's own public key, in hexadecimal.
    pub key: String,
    /// Whose keys are taken: `first-use`, `known`, or `ca`.
    pub policy: String,
    /// Ports of this host, and ranges, that connections of peers which are not listed may be carried to; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<Vec<String>>,
    /// This host's certificate, if it has one for its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<HostCertificate>,
    /// Whose certificates are taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub authorities: Vec<PeerKey>,
    /// As many as one message takes: those that the operator lists, those learned, then those that have shown a
    /// certificate since the daemon started.
    pub peers: Vec<Peer>,
    /// The index with which the next message begins, if there are more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<usize>,
}

/// A host that is known by its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Whose the key is.
    #[serde(flatten)]
    pub known: PeerKey,
    /// In the operator's file; else it was learned, or trusted by command.
    pub listed: bool,
    /// By which it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<HostCertificate>,
}

/// A certificate of a host: what an operator's key has signed about its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCertificate {
    /// What the host is called.
    pub name: String,
    /// The public key that has signed it, in hexadecimal.
    pub signer: String,
    /// Prefixes where the host may be; without any, nobody connects to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// When it expires, as RFC 3339 has it.
    pub expires: String,
}

/// Flows. Answers [`Request::FlowList`](crate::Request::FlowList).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FlowList {
    /// As many as one message takes, by id.
    pub flows: Vec<FlowStatus>,
    /// The id with which the next message begins, if there are more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<u64>,
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
    /// It requires a carrier: none of its bytes travels by its own connection.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub requires_carrier: bool,
    /// And one that is encrypted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub requires_encryption: bool,
    /// What bytes to the peer travel by: `tcp`, its own connection; `tls`, the daemons' connection; or another
    /// carrier; `none`, if it requires one and waits for it.
    pub sends_by: String,
    /// What bytes from the peer came by last.
    pub receives_by: String,
    /// Bytes of the application to the peer.
    pub bytes_sent: u64,
    /// Bytes of the peer's application that have been received in order.
    pub bytes_received: u64,
    /// Of a flow that may lose something: how many of those bytes the application has gone on without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped_bytes: Option<u64>,
    /// Mbit/s to the peer in the last second or two.
    pub sends_mbit: f64,
    /// Mbit/s from the peer.
    pub receives_mbit: f64,
    /// The class of its application, as its first bytes tell, once they do: `loss-sensitive`, for instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// What tells: the name of a server, perhaps, so only root is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile_evidence: Option<String>,
    /// The application's end of its connection with the daemon, and the daemon's: what tells which program it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app: Option<[SocketAddr; 2]>,
    /// Since its TCP connection was established, seconds.
    pub age_s: f64,
    /// Why `sends_by` is what it is.
    pub why: String,
}

/// The rules in force. Answers [`Request::RuleList`](crate::Request::RuleList).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// The file that has them.
    pub file: PathBuf,
    /// As many as one message takes.
    pub rules: Vec<Rule>,
    /// The index of the rule with which the next message begins, if there are more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub more: Option<u32>,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// Its name.
    pub name: String,
    /// The connections that it is about, of those that processes of this host open.
    #[serde(rename = "match", skip_serializing_if = "Option::is_none")]
    pub conditions: Option<Conditions>,
    /// Instead: ports of this host whose connections it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<Vec<u16>>,
    /// What becomes of them.
    pub action: String,
    /// Connections that it has matched since it is in force, if they are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
    /// Files and cgroups that it names and that are not there now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<PathBuf>,
}

/// What a connection must be like: all kinds that are given, of each kind one value. The last value
/// of a long list says how many more there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Conditions {
    /// Cgroups that the process is in, or below.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cgroup: Vec<String>,
    /// Users that it runs as.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub user: Vec<String>,
    /// Files that it executes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exe: Vec<String>,
    /// Ports of the destination, and ranges of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub port: Vec<String>,
    /// Prefixes of the destination's address.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub to: Vec<String>,
    /// What the application is like.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub profile: Vec<String>,
    /// Destinations that the host itself is, link-local and multicast ones count, too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub local: bool,
}

/// What decides about a connection. Answers
/// [`Request::RuleExplain`](crate::Request::RuleExplain).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The hook made by hand that does, before all rules.
    pub hook: Option<u32>,
    /// The rules that do not match, in their order.
    pub passed: Vec<PassedRule>,
    /// The name of the rule that does.
    pub decides: Option<String>,
    /// What becomes of the connection by that.
    pub action: Option<String>,
}

/// A rule that does not match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedRule {
    /// Its name.
    pub rule: String,
    /// Why.
    pub because: String,
}

/// Answers [`Request::RuleCheck`](crate::Request::RuleCheck) and
/// [`Request::RuleReload`](crate::Request::RuleReload).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleCount {
    /// Rules in the file.
    pub count: usize,
}

/// A port is held. Answers [`Request::Listen`](crate::Request::Listen).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// Other connections may accept sessions with it.
    pub key: u64,
}

/// A session is open. Answers [`Request::Connect`](crate::Request::Connect),
/// [`Request::Follow`](crate::Request::Follow) and [`Request::Accept`](crate::Request::Accept).
///
/// Descriptors come along: the transmit ring, the receive ring, an eventfd that has the daemon look
/// at the session, one by which the daemon wakes the application; with `events` the ring of events
/// by which the kernel does; and unless the application lives in another network namespace than the
/// daemon, the socket by which it runs egress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its index.
    #[serde(default)]
    pub sid: u32,
    /// With which the application's other connections may have it succeeded.
    #[serde(default)]
    pub key: u64,
    /// Packets per ring.
    pub slots: u32,
    /// Payload bytes per packet, sealed where there are keys.
    pub max_payload: u16,
    /// Bytes of the longest message. 0, from a daemon that does not say: those of a packet.
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
    /// A ring of events comes along.
    #[serde(default)]
    pub events: bool,
    /// With which its payload is sealed. `None`: in the clear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<Keys>,
}

#[cfg(test)]
mod tests;
