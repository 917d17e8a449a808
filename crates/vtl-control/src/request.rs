//! Requests.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use vtl_proto::services::Requirements;

/// A request to the daemon. On the wire `op` names the variant, and the fields follow; those that
/// have their default may be left out, and unknown ones are ignored.
///
/// Members of the socket's group may ask for anything but what is marked "root only". Each variant
/// names the type of its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// State of the data plane, and of the sessions from an index on, as many as one message takes.
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
    /// All that is known of one graft of the pool.
    ///
    /// Answer: an object: the manifest, and what the pool and the kernel have of it.
    GraftShow {
        /// `NAME` or `NAME@VERSION`.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// Load a graft into the kernel: one of the pool, or the package whose file's descriptor comes
    /// along. Root only.
    ///
    /// Answer: [`Deployed`](crate::Deployed).
    GraftDeploy {
        /// `NAME` or `NAME@VERSION` of the pool, without a package.
        #[serde(default, skip_serializing_if = "is_default")]
        name: Option<String>,
    },
    /// Replace a graft that is in the kernel by another version of it. Open sessions keep their state
    /// if the versions are compatible; otherwise those of flows are aborted, and one of an application
    /// refuses the swap. As
    /// [`Request::GraftDeploy`]. Root only.
    ///
    /// Answer: [`Deployed`](crate::Deployed).
    GraftSwap {
        /// `NAME` or `NAME@VERSION` of the pool, without a package.
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
    /// The flows: hooked connections with a TCP connection of their own, from an id on, as many as one message
    /// takes.
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
    /// Have what this host sends of a flow travel by another carrier. Root only.
    ///
    /// Answer: [`FlowStatus`](crate::FlowStatus).
    FlowMove {
        /// Its id.
        id: u64,
        /// `tcp`, its own connection, where it then stays; or another carrier that there is to its peer.
        #[serde(deserialize_with = "must::name")]
        carrier: String,
    },
    /// This host's key and the peers that it knows, from one on, as many as one message takes.
    ///
    /// Answer: [`Peers`](crate::Peers).
    PeerList {
        /// The index of the first peer.
        #[serde(default, skip_serializing_if = "is_default")]
        from: usize,
    },
    /// Trust a peer's key, in place of what was learned under its name. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    PeerTrust(PeerKey),
    /// Forget a peer that was learned, so that the next key at its addresses counts as the first. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    PeerForget {
        /// What it is called.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// The hooks.
    ///
    /// Answer: [`Hooks`](crate::Hooks).
    HookList,
    /// Hook the process that asks, and its children.
    ///
    /// Answer: [`HookAdded`](crate::HookAdded).
    HookRun {
        /// What their connections travel by.
        #[serde(flatten)]
        carrier: CarrierSpec,
    },
    /// Hook a port or a cgroup. Root only.
    ///
    /// Answer: [`HookAdded`](crate::HookAdded).
    HookAdd {
        /// What to hook.
        #[serde(flatten)]
        target: HookTarget,
        /// What its connections travel by.
        #[serde(flatten)]
        carrier: CarrierSpec,
    },
    /// Remove a hook; its connections go on. Root only.
    ///
    /// Answer: [`Done`](crate::Done).
    HookRemove {
        /// What is hooked.
        #[serde(flatten)]
        target: HookTarget,
    },
    /// The rules in force, from an index on, as many as one message takes.
    ///
    /// Answer: [`Rules`](crate::Rules).
    RuleList {
        /// The index of the first rule, in the file's order.
        #[serde(default, skip_serializing_if = "is_default")]
        from: u32,
    },
    /// What the rules in force say to a connection.
    ///
    /// Answer: [`Explanation`](crate::Explanation).
    RuleExplain(OpenedConnection),
    /// Check a file of rules, whose descriptor comes along, without putting it in force.
    ///
    /// Answer: [`RuleCount`](crate::RuleCount).
    RuleCheck {
        /// What the answer calls the file.
        #[serde(deserialize_with = "must::name")]
        name: String,
    },
    /// Read the file of rules again. Root only.
    ///
    /// Answer: [`RuleCount`](crate::RuleCount).
    RuleReload,
    /// End, and leave everything to another daemon, by the socket whose descriptor comes with the answer. Root
    /// only.
    ///
    /// Answer: [`Done`](crate::Done).
    TakeOver,
    /// Open a session, and wait until the peer has agreed. It belongs to the connection on which it
    /// was asked for, and ends with that.
    ///
    /// Answer: [`Grant`](crate::Grant).
    Connect {
        /// Where it leads.
        #[serde(flatten)]
        to: Destination,
        /// What it is to be like.
        #[serde(flatten)]
        session: SessionRequest,
    },
    /// Take over the session by which the peer has succeeded one of this application.
    ///
    /// Answer: [`Grant`](crate::Grant).
    Follow {
        /// The session that it succeeds.
        succeeds: SessionKey,
    },
    /// Hold a VTL port as long as the connection lasts.
    ///
    /// Answer: [`Listening`](crate::Listening).
    Listen {
        /// 1 to 65535.
        #[serde(deserialize_with = "must::port")]
        port: u16,
    },
    /// Wait for the next session that a peer opens to a port.
    ///
    /// Answer: [`Grant`](crate::Grant).
    Accept {
        /// As the answer to [`Request::Listen`] has it; without, the connection's own port.
        #[serde(default, skip_serializing_if = "is_default")]
        key: Option<u64>,
    },
    /// State of the connection's session.
    ///
    /// Answer: [`SessionStatus`](crate::SessionStatus).
    Statistics,
    /// End the connection's session.
    ///
    /// Answer: [`Done`](crate::Done).
    Close {
        /// Not in order: what is unread or not acknowledged may be lost.
        #[serde(default, skip_serializing_if = "is_default")]
        aborted: bool,
    },
}

/// Whose a key is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerKey {
    /// What this host calls the peer.
    #[serde(deserialize_with = "must::name")]
    pub name: String,
    /// Its public Ed25519 key, in hexadecimal.
    #[serde(deserialize_with = "must::name")]
    pub key: String,
    /// Addresses and prefixes where it may be; anywhere if there are none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub addresses: Vec<String>,
    /// Ports of this host, and ranges of them ("8000-8100"), that its connections may be carried to; `None`: those of
    /// peers that are not listed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub reach: Option<Vec<String>>,
}

/// What hooked connections travel by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarrierSpec {
    /// The carrier, as `vtl run --carrier` names it; `None`: the best one.
    #[serde(
        default,
        skip_serializing_if = "is_default",
        deserialize_with = "must::carrier"
    )]
    pub carrier: Option<String>,
    /// The flows can do without what the network loses.
    #[serde(default, skip_serializing_if = "is_default")]
    pub loss_tolerant: bool,
    /// Connections must be carried, by it or, if it is `None`, by the best one: never by TCP.
    #[serde(default, skip_serializing_if = "is_default")]
    pub require: bool,
    /// As `require`, and by carriers that are encrypted.
    #[serde(default, skip_serializing_if = "is_default")]
    pub require_encryption: bool,
    /// Of a port: `tcp:CONTROL`, under which TCP to clients without VTL is sent.
    #[serde(
        default,
        skip_serializing_if = "is_default",
        deserialize_with = "must::carrier"
    )]
    pub others: Option<String>,
}

/// What a hook is put on.
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

/// A connection that a process opens, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedConnection {
    /// Where it goes.
    #[serde(deserialize_with = "must::to")]
    pub to: SocketAddr,
    /// The user who opens it, by number.
    #[serde(default, skip_serializing_if = "is_default")]
    pub user: Option<u32>,
    /// The file that the process executes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub exe: Option<Executable>,
    /// The cgroup that the process is in, as rules name cgroups.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cgroup: Option<PathBuf>,
}

/// A file, whatever it is called: as stat(2) has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Executable {
    /// The device that it lies on.
    pub device: u64,
    /// Its number there.
    pub inode: u64,
}

/// Where a new session leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "name either a peer, \"host\" an IP address and \"port\" a number from 1 to 65535, \
                 or in \"succeeds\" the sid and the key of a session"
)]
pub enum Destination {
    /// Where this session leads, which the new one succeeds.
    Successor {
        /// The session.
        succeeds: SessionKey,
    },
    /// To a VTL port of a peer.
    Peer {
        /// The peer.
        host: IpAddr,
        /// 1 to 65535.
        #[serde(deserialize_with = "must::port")]
        port: u16,
    },
}

/// Names a session of an application towards the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionKey {
    /// The session's index.
    pub sid: u32,
    /// As it was granted: who knows it may have the session succeeded.
    pub key: u64,
}

/// What a session is to be like.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SessionRequest {
    /// The services and bounds that a graft is chosen by.
    #[serde(flatten)]
    pub requirements: Requirements,
    /// This graft and no other.
    #[serde(default, skip_serializing_if = "is_default")]
    pub graft: Option<String>,
    /// Parameters of the graft that shall not have their defaults, by name.
    #[serde(
        default,
        skip_serializing_if = "is_default",
        deserialize_with = "must::params"
    )]
    pub params: BTreeMap<String, u32>,
}

/// A request that makes no sense: one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadRequest(String);

impl Request {
    /// The request that a message is.
    ///
    /// # Errors
    /// It names no operation that there is, or lacks a field, or has one that cannot be.
    pub fn parse(message: &Value) -> Result<Self, BadRequest> {
        let op = message["op"].as_str();
        let op = op.ok_or_else(|| BadRequest("the request names no op".to_owned()))?;
        Self::deserialize(message).map_err(|error| {
            let why = error.to_string();
            BadRequest(if why.starts_with("unknown variant") {
                format!("unknown op \"{op}\"")
            } else {
                format!("{op}: {why}")
            })
        })
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Fields, and what they must be.
mod must {
    use std::{collections::BTreeMap, net::SocketAddr, num::NonZeroU16};

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
        name: String = "a name";
        params: BTreeMap<String, u32> = "an object of numbers";
        to: SocketAddr = "an address and a port";
    }

    pub(super) fn port<'de, D: Deserializer<'de>>(from: D) -> Result<u16, D::Error> {
        let why = "\"port\" must be a number from 1 to 65535";
        let port = NonZeroU16::deserialize(from).map_err(|_| D::Error::custom(why))?;
        Ok(port.get())
    }

    pub(super) fn port_if_any<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u16>, D::Error> {
        port(from).map(Some)
    }
}

#[cfg(test)]
mod tests;
