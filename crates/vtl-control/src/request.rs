//! Requests.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    path::PathBuf,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use vtl_proto::services::Requirements;

/// Longest time in which the daemon answers from memory, however busy the machine.
pub(crate) const PROMPT: Duration = Duration::from_secs(10);
/// Longest time in which it has programs verified, reads files, or opens a carrier.
const THOROUGH: Duration = Duration::from_secs(60);

/// A request to the daemon. On the wire `op` names the variant, followed by the fields; fields with
/// their default may be omitted, unknown ones are ignored.
///
/// Members of the socket's group may make any request not marked "root only". Each variant names
/// the type of its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// State of the daemon, and a page of sessions from an index on.
    ///
    /// Answer: [`Status`](crate::Status).
    Status {
        /// The lowest session index.
        #[serde(default, skip_serializing_if = "is_default")]
        from: u32,
    },
    /// The grafts of the pool.
    ///
    /// Answer: [`Grafts`](crate::Grafts).
    GraftList,
    /// Details of one graft of the pool.
    ///
    /// Answer: an object: the manifest, and the graft's state in pool and kernel.
    GraftShow {
        /// `NAME` or `NAME@VERSION`.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// Load a graft into the kernel: from the pool, or from the package whose descriptor is passed.
    /// Root only.
    ///
    /// Answer: [`Deployed`](crate::Deployed).
    GraftDeploy {
        /// `NAME` or `NAME@VERSION` of the pool, if no package is passed.
        #[serde(default, skip_serializing_if = "is_default")]
        name: Option<String>,
    },
    /// Replace a graft in the kernel by another version, named as in [`Request::GraftDeploy`]. Open
    /// sessions keep their state if the versions are compatible; otherwise sessions of flows are
    /// aborted, and an application's session makes the swap fail. Root only.
    ///
    /// Answer: [`Deployed`](crate::Deployed).
    GraftSwap {
        /// `NAME` or `NAME@VERSION` of the pool, if no package is passed.
        #[serde(default, skip_serializing_if = "is_default")]
        name: Option<String>,
    },
    /// Unload a graft from the kernel. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    GraftRemove {
        /// Its name.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// A page of flows (hooked connections with a TCP connection of their own), from an id on.
    ///
    /// Answer: [`FlowList`](crate::FlowList).
    FlowList {
        /// The lowest id.
        #[serde(default, skip_serializing_if = "is_default")]
        from: u64,
    },
    /// One flow.
    ///
    /// Answer: [`FlowStatus`](crate::FlowStatus).
    FlowShow {
        /// Its id.
        id: u64,
    },
    /// Move a flow's outgoing data to another carrier. Root only.
    ///
    /// Answer: [`FlowStatus`](crate::FlowStatus).
    FlowMove {
        /// Its id.
        id: u64,
        /// `tcp`, its own connection, where it then stays; or another carrier to its peer.
        #[serde(deserialize_with = "must::name")]
        carrier: String,
        /// Seconds after which it goes where it would go without; `None`: it stays until that carrier breaks.
        #[serde(
            default,
            skip_serializing_if = "is_default",
            deserialize_with = "must::for_s"
        )]
        for_s: Option<NonZeroU32>,
    },
    /// A page of the paths to other hosts, sorted by address, from one on.
    ///
    /// Answer: [`PathList`](crate::PathList).
    PathList {
        /// The lowest address; `None`: the first.
        #[serde(default, skip_serializing_if = "is_default")]
        from: Option<IpAddr>,
    },
    /// The path to a host, and what each kind of connection has told of it.
    ///
    /// Answer: [`PathReport`](crate::PathReport).
    PathShow {
        /// Its address.
        #[serde(deserialize_with = "must::peer")]
        peer: IpAddr,
    },
    /// This host's key, and a page of known peers from an index on.
    ///
    /// Answer: [`Peers`](crate::Peers).
    PeerList {
        /// The index of the first peer.
        #[serde(default, skip_serializing_if = "is_default")]
        from: usize,
    },
    /// Trust a peer's key, replacing a key learned under its name. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    PeerTrust(PeerKey),
    /// Forget a learned peer: the next key at its addresses counts as first use. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    PeerForget {
        /// The peer's name.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// The hooks.
    ///
    /// Answer: [`Hooks`](crate::Hooks).
    HookList,
    /// Hook the requesting process, and its children.
    ///
    /// Answer: [`HookAdded`](crate::HookAdded).
    HookRun {
        /// Carrier of their connections.
        #[serde(flatten)]
        carrier: CarrierSpec,
    },
    /// Hook a port or a cgroup. Root only.
    ///
    /// Answer: [`HookAdded`](crate::HookAdded).
    HookAdd {
        /// Target of the hook.
        #[serde(flatten)]
        target: HookTarget,
        /// Carrier of its connections.
        #[serde(flatten)]
        carrier: CarrierSpec,
    },
    /// Remove a hook; its connections continue. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    HookRemove {
        /// Target of the hook.
        #[serde(flatten)]
        target: HookTarget,
    },
    /// Carry the TCP connections that this host forwards over an interface. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    GatewayAdd {
        /// The interface.
        #[serde(deserialize_with = "must::name")]
        interface: String,
        /// Addresses and prefixes of destinations; empty: all.
        #[serde(default, skip_serializing_if = "is_default")]
        to: Vec<String>,
        /// Destination ports; empty: all.
        #[serde(default, skip_serializing_if = "is_default")]
        ports: Vec<u16>,
        /// Carrier of connections that leave by the interface; `None`: the best one.
        #[serde(default, skip_serializing_if = "is_default")]
        carrier: Option<String>,
    },
    /// The gateways.
    ///
    /// Answer: [`Gateways`](crate::Gateways).
    GatewayList,
    /// Forward new connections over an interface as before. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    GatewayRemove {
        /// The interface.
        #[serde(deserialize_with = "must::name")]
        interface: String,
    },
    /// A page of the rules in force, from an index on.
    ///
    /// Answer: [`Rules`](crate::Rules).
    RuleList {
        /// The index of the first rule, in the file's order.
        #[serde(default, skip_serializing_if = "is_default")]
        from: u32,
    },
    /// Explain the decision of the rules in force about a connection.
    ///
    /// Answer: [`Explanation`](crate::Explanation).
    RuleExplain(OpenedConnection),
    /// Check a file of rules, whose descriptor is passed, without applying it.
    ///
    /// Answer: [`RuleCount`](crate::RuleCount).
    RuleCheck {
        /// Name of the file for the answer.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// Reload the file of rules. Root only.
    ///
    /// Answer: [`RuleCount`](crate::RuleCount).
    RuleReload,
    /// Put a rule in force for some time, before those of the file and behind those installed earlier; in the place of
    /// an installed one of that name. It outlives a restart of the daemon, and is gone when its time is over. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    RuleInstall {
        /// The rule: what a file of rules says of one, but `expires`.
        rule: Map<String, Value>,
        /// Seconds until it expires.
        #[serde(deserialize_with = "must::seconds")]
        for_s: NonZeroU32,
    },
    /// Take an installed rule out of force; connections that it made go on. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    RuleWithdraw {
        /// Its name.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// Events, as they happen: waits until there is one.
    ///
    /// Answer: [`Events`](crate::Events).
    Events {
        /// `last` of the answer before: what has happened since, too. `None`: what happens from now on.
        #[serde(
            default,
            skip_serializing_if = "is_default",
            deserialize_with = "must::since"
        )]
        since: Option<u64>,
        /// Only these kinds ([`KINDS`](crate::KINDS)); empty: all.
        #[serde(
            default,
            skip_serializing_if = "is_default",
            deserialize_with = "must::kinds"
        )]
        kinds: Vec<String>,
        /// Milliseconds to wait at most; `None`: for ever.
        #[serde(
            default,
            skip_serializing_if = "is_default",
            deserialize_with = "must::wait_ms"
        )]
        wait_ms: Option<u32>,
    },
    /// Whether the model chooses for the carrier `auto`, and a page of what it has chosen, from an index on.
    ///
    /// Answer: [`SelectStatus`](crate::SelectStatus).
    SelectStatus {
        /// The index of the first association.
        #[serde(default, skip_serializing_if = "is_default")]
        from: usize,
    },
    /// Turn the choice by the model on or off, restarts of the daemon included. Off: connections of the carrier `auto`,
    /// those that run as well, go by TCP. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    SelectSet {
        /// On, or off.
        on: bool,
    },
    /// Turn learning of flows on or off, restarts of the daemon included, or forget what was learnt. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    SelectLearn {
        /// What to do.
        learn: Learning,
    },
    /// What flows of the carrier `auto` have taught: a page of it, from an index on.
    ///
    /// Answer: [`Lessons`](crate::Lessons).
    SelectLessons {
        /// The index of the first destination.
        #[serde(default, skip_serializing_if = "is_default")]
        from: usize,
    },
    /// Exit, and hand everything over to another daemon, through the socket whose descriptor is in
    /// the answer. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    TakeOver,
    /// Open a session, and wait until the peer has agreed. The session belongs to this connection,
    /// and ends with it.
    ///
    /// Answer: [`Grant`](crate::Grant).
    Connect {
        /// Peer, or session to succeed.
        #[serde(flatten)]
        to: Destination,
        /// Requirements on it.
        #[serde(flatten)]
        session: SessionRequest,
    },
    /// Move on to the session by which the peer has succeeded one of this application's.
    ///
    /// Answer: [`Grant`](crate::Grant).
    Follow {
        /// The session that was succeeded.
        succeeds: SessionKey,
    },
    /// Bind a VTL port for the life of the connection.
    ///
    /// Answer: [`Listening`](crate::Listening).
    Listen {
        /// 1 to 65535.
        #[serde(deserialize_with = "must::port")]
        port: u16,
    },
    /// Wait for the next session opened by a peer at a port.
    ///
    /// Answer: [`Grant`](crate::Grant).
    Accept {
        /// Key in the answer to [`Request::Listen`]; `None`: the connection's own port.
        #[serde(default, skip_serializing_if = "is_default")]
        key: Option<u64>,
    },
    /// State of the connection's session.
    ///
    /// Answer: [`SessionStatus`](crate::SessionStatus).
    Statistics,
    /// Release the connection's session, which a stateless switch has ended, and tell what was given up of it.
    ///
    /// Answer: [`Done`](crate::Done).
    GiveUp(GivenUp),
    /// End the connection's session.
    ///
    /// Answer: [`Done`](crate::Done).
    Close {
        /// Abort: unread or unacknowledged data may be lost.
        #[serde(default, skip_serializing_if = "is_default")]
        aborted: bool,
    },
}

impl Request {
    /// Longest time in which the daemon answers unless it hangs; `None`: it waits for a peer, or an event.
    pub fn patience(&self) -> Option<Duration> {
        match self {
            Self::Connect { .. } | Self::Accept { .. } => None,
            Self::Events { wait_ms, .. } => {
                let wait = Duration::from_millis((*wait_ms)?.into());
                Some(PROMPT + wait)
            }
            Self::GraftList
            | Self::GraftShow { .. }
            | Self::GraftDeploy { .. }
            | Self::GraftSwap { .. }
            | Self::GraftRemove { .. }
            | Self::FlowMove { .. }
            | Self::HookRun { .. }
            | Self::HookAdd { .. }
            | Self::GatewayAdd { .. }
            | Self::GatewayRemove { .. }
            | Self::RuleCheck { .. }
            | Self::RuleReload
            | Self::RuleInstall { .. }
            | Self::RuleWithdraw { .. } => Some(THOROUGH),
            Self::Status { .. }
            | Self::FlowList { .. }
            | Self::FlowShow { .. }
            | Self::PathList { .. }
            | Self::PathShow { .. }
            | Self::PeerList { .. }
            | Self::PeerTrust(_)
            | Self::PeerForget { .. }
            | Self::HookList
            | Self::HookRemove { .. }
            | Self::GatewayList
            | Self::RuleList { .. }
            | Self::RuleExplain(_)
            | Self::SelectStatus { .. }
            | Self::SelectSet { .. }
            | Self::SelectLearn { .. }
            | Self::SelectLessons { .. }
            | Self::TakeOver
            | Self::Follow { .. }
            | Self::Listen { .. }
            | Self::Statistics
            | Self::GiveUp(_)
            | Self::Close { .. } => Some(PROMPT),
        }
    }
}

/// What to do about learning of flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Learning {
    /// Learn, and choose by it.
    On,
    /// Neither; what was learnt stays until the daemon ends.
    Off,
    /// Forget what was learnt.
    Reset,
}

/// A peer's name, key and addresses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerKey {
    /// This host's name for the peer.
    #[serde(deserialize_with = "must::name")]
    pub name: String,
    /// Its public Ed25519 key, in hexadecimal.
    #[serde(deserialize_with = "must::name")]
    pub key: String,
    /// Addresses and prefixes where the peer may be; empty: anywhere.
    #[serde(default, skip_serializing_if = "is_default")]
    pub addresses: Vec<String>,
    /// Ports of this host, and ranges ("8000-8100"), that its connections may reach; `None`: those
    /// of unlisted peers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reach: Option<Vec<String>>,
}

/// Carrier of hooked connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarrierSpec {
    /// The carrier, as `vtl run --carrier` names it; `None`: the best one.
    #[serde(
        default,
        skip_serializing_if = "is_default",
        deserialize_with = "must::carrier"
    )]
    pub carrier: Option<String>,
    /// The flows tolerate loss.
    #[serde(default, skip_serializing_if = "is_default")]
    pub loss_tolerant: bool,
    /// Connections must go over the carrier (`None`: the best one), never over TCP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub require: bool,
    /// As `require`, over encrypted carriers only.
    #[serde(default, skip_serializing_if = "is_default")]
    pub require_encryption: bool,
    /// For a port only: `tcp:CONTROL`, the TCP congestion control towards clients without VTL.
    #[serde(
        default,
        skip_serializing_if = "is_default",
        deserialize_with = "must::carrier"
    )]
    pub others: Option<String>,
}

/// Target of a hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", try_from = "PortOrCgroup")]
pub enum HookTarget {
    /// A TCP port of local servers, 1 to 65535.
    Port(u16),
    /// All processes of a cgroup: its directory.
    Cgroup(PathBuf),
}

#[derive(Deserialize)]
struct PortOrCgroup {
    #[serde(default, deserialize_with = "must::port_if_any")]
    port: Option<u16>,
    cgroup: Option<PathBuf>,
}

impl TryFrom<PortOrCgroup> for HookTarget {
    type Error = &'static str;

    fn try_from(named: PortOrCgroup) -> Result<Self, Self::Error> {
        match (named.port, named.cgroup) {
            (Some(port), None) => Ok(Self::Port(port)),
            (None, Some(path)) => Ok(Self::Cgroup(path)),
            _ => Err("name either a port or a cgroup"),
        }
    }
}

/// A connection opened by a process, or forwarded by this host, as far as known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedConnection {
    /// Destination.
    #[serde(deserialize_with = "must::to")]
    pub to: SocketAddr,
    /// Number of the user who opens it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub user: Option<u32>,
    /// The file that the process executes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub exe: Option<Executable>,
    /// The cgroup of the process, as rules name cgroups.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cgroup: Option<PathBuf>,
    /// Of a connection that this host forwards as a gateway instead: the interface that it leaves by.
    #[serde(default, skip_serializing_if = "is_default")]
    pub via: Option<String>,
    /// Who opens that one.
    #[serde(
        default,
        skip_serializing_if = "is_default",
        deserialize_with = "must::from"
    )]
    pub from: Option<SocketAddr>,
}

/// A file by identity, as in stat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Executable {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
}

/// Destination of a new session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "name either a peer, \"host\" an IP address and \"port\" a number from 1 to 65535, \
                 or in \"succeeds\" the sid and the key of a session"
)]
pub enum Destination {
    /// The destination of an existing session, which the new one succeeds.
    Successor {
        /// The session.
        succeeds: SessionKey,
    },
    /// A VTL port of a peer.
    Peer {
        /// The peer.
        host: IpAddr,
        /// 1 to 65535.
        #[serde(deserialize_with = "must::port")]
        port: u16,
    },
}

/// Identifies an application's session to the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionKey {
    /// The session's index.
    pub sid: u32,
    /// Key from the grant; its holder may have the session succeeded.
    pub key: u64,
}

/// Requirements on a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionRequest {
    /// Services and bounds for the choice of the graft.
    #[serde(flatten)]
    pub requirements: Requirements,
    /// Of a session that succeeds another one: that one may end at once, and lose what is in flight (stateless).
    #[serde(default, skip_serializing_if = "is_default")]
    pub stateless: bool,
    /// Only this graft.
    #[serde(default, skip_serializing_if = "is_default")]
    pub graft: Option<String>,
    /// Parameters of the graft that override its defaults, by name.
    #[serde(
        default,
        skip_serializing_if = "is_default",
        deserialize_with = "must::params"
    )]
    pub params: BTreeMap<String, u32>,
}

/// What a host gives up of its own direction in a stateless switch, at most: the peer may have got some of it, and its
/// acknowledgement was still to come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenUp {
    /// Packets written and not acknowledged.
    pub packets: u64,
    /// Messages that end in them; a packet of a byte stream counts as one.
    pub messages: u64,
    /// Bytes of their payload.
    pub bytes: u64,
}

/// An invalid request: one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadRequest(String);

/// Version of the control protocol, in requests and answers (`protocol`). It grows when something changes its meaning:
/// what is only added does not count. A message without it has version 1.
pub const PROTOCOL: u64 = 1;

/// How the refusal of an unknown request begins, also in versions before there was [`PROTOCOL`].
pub(crate) const UNKNOWN_OP: &str = "unknown op";

/// The version of the protocol that a message says.
pub(crate) fn protocol(message: &Value) -> u64 {
    match message.get("protocol") {
        None => 1,
        Some(said) => said.as_u64().unwrap_or_default(),
    }
}

impl Request {
    /// Parses a message.
    ///
    /// # Errors
    /// Another version of the protocol; unknown operation; missing or invalid field.
    pub fn parse(message: &Value) -> Result<Self, BadRequest> {
        let theirs = protocol(message);
        if theirs != PROTOCOL {
            return Err(BadRequest(format!(
                "the client speaks version {theirs} of the control protocol, and this vtld, {}, version {PROTOCOL}: \
                 use the client that came with it, or restart vtld after an upgrade",
                env!("CARGO_PKG_VERSION")
            )));
        }
        let op = message["op"].as_str();
        let op = op.ok_or_else(|| BadRequest("the request names no op".to_owned()))?;
        Self::deserialize(message).map_err(|error| {
            let why = error.to_string();
            BadRequest(if why.starts_with("unknown variant") {
                format!(
                    "{UNKNOWN_OP} \"{op}\": this vtld, {}, does not know it",
                    env!("CARGO_PKG_VERSION")
                )
            } else {
                format!("{op}: {why}")
            })
        })
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Deserialisers of fields, with their error messages.
mod must {
    use std::{
        collections::BTreeMap,
        net::{IpAddr, SocketAddr},
        num::{NonZeroU16, NonZeroU32},
    };

    use serde::{Deserialize, Deserializer, de::Error};

    macro_rules! must {
        ($($field:ident: $type:ty = $what:literal;)*) => {$(
            pub(super) fn $field<'de, D: Deserializer<'de>>(from: D) -> Result<$type, D::Error> {
                let why = concat!("\"", stringify!($field), "\" must be ", $what);
                Deserialize::deserialize(from).map_err(|_| D::Error::custom(why))
            }
        )*};
    }

    must! {
        carrier: Option<String> = "a name";
        for_s: Option<NonZeroU32> = "a number of seconds from 1";
        from: Option<SocketAddr> = "an address and a port";
        kinds: Vec<String> = "a list of names";
        name: String = "a name";
        params: BTreeMap<String, u32> = "an object of numbers";
        peer: IpAddr = "an IP address";
        since: Option<u64> = "the last of an answer";
        wait_ms: Option<u32> = "a number of milliseconds";
        to: SocketAddr = "an address and a port";
    }

    pub(super) fn port<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
        let why = "\"port\" must be a number from 1 to 65535";
        let port = NonZeroU16::deserialize(from).map_err(|_| D::Error::custom(why))?;
        Ok(port.get())
    }

    pub(super) fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<NonZeroU32, D::Error> {
        let why = "\"for_s\" must be a number of seconds from 1";
        NonZeroU32::deserialize(from).map_err(|_| D::Error::custom(why))
    }

    pub(super) fn port_if_any<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
        port(from).map(Some)
    }
}

#[cfg(test)]
mod tests;
