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
    /// Replace a graft that is in the kernel by another version of it; sessions go on. As
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
mod tests {
    use serde_json::json;
    use vtl_proto::services::{Qos, Services};

    use super::*;

    /// This request is that message, and no other.
    macro_rules! form {
        ($request:expr, $message:expr $(,)?) => {
            let (request, message) = ($request, $message);
            assert_eq!(serde_json::to_value(&request).unwrap(), message);
            assert_eq!(Request::parse(&message), Ok(request));
        };
    }

    #[test]
    fn status__has_this_form() {
        form!(Request::Status { from: 0 }, json!({ "op": "status" }));
        form!(
            Request::Status { from: 100 },
            json!({ "op": "status", "from": 100 }),
        );
    }

    #[test]
    fn grafts__have_these_forms() {
        let mine = || "mine@0.1.0".to_owned();
        form!(Request::GraftList, json!({ "op": "graft_list" }));
        form!(
            Request::GraftShow { name: mine() },
            json!({ "op": "graft_show", "name": "mine@0.1.0" }),
        );
        form!(
            Request::GraftDeploy { name: Some(mine()) },
            json!({ "op": "graft_deploy", "name": "mine@0.1.0" }),
        );
        // A package.
        form!(
            Request::GraftDeploy { name: None },
            json!({ "op": "graft_deploy" }),
        );
        form!(
            Request::GraftSwap { name: Some(mine()) },
            json!({ "op": "graft_swap", "name": "mine@0.1.0" }),
        );
        form!(
            Request::GraftSwap { name: None },
            json!({ "op": "graft_swap" }),
        );
        form!(
            Request::GraftRemove { name: mine() },
            json!({ "op": "graft_remove", "name": "mine@0.1.0" }),
        );
    }

    #[test]
    fn hooks__have_these_forms() {
        form!(Request::HookList, json!({ "op": "hook_list" }));
        let udp = || CarrierSpec {
            carrier: Some("udp".to_owned()),
            loss_tolerant: true,
        };
        form!(
            Request::HookRun { carrier: udp() },
            json!({ "op": "hook_run", "carrier": "udp", "loss_tolerant": true }),
        );
        form!(
            Request::HookAdd {
                target: HookTarget::Port(80),
                carrier: udp(),
            },
            json!({ "op": "hook_add", "port": 80, "carrier": "udp", "loss_tolerant": true }),
        );
        form!(
            Request::HookAdd {
                target: HookTarget::Cgroup("/sys/fs/cgroup/x".into()),
                carrier: CarrierSpec::default(),
            },
            json!({ "op": "hook_add", "cgroup": "/sys/fs/cgroup/x" }),
        );
        form!(
            Request::HookRemove {
                target: HookTarget::Port(80),
            },
            json!({ "op": "hook_remove", "port": 80 }),
        );
        form!(
            Request::HookRemove {
                target: HookTarget::Cgroup("/sys/fs/cgroup/x".into()),
            },
            json!({ "op": "hook_remove", "cgroup": "/sys/fs/cgroup/x" }),
        );
    }

    #[test]
    fn rules__have_these_forms() {
        form!(Request::RuleList { from: 0 }, json!({ "op": "rule_list" }));
        form!(
            Request::RuleList { from: 7 },
            json!({ "op": "rule_list", "from": 7 }),
        );
        form!(
            Request::RuleExplain(OpenedConnection {
                to: "[2001:db8::1]:443".parse().unwrap(),
                user: Some(1000),
                exe: Some(Executable {
                    device: 2049,
                    inode: 131_077,
                }),
                cgroup: Some("/system.slice".into()),
            }),
            json!({
                "op": "rule_explain", "to": "[2001:db8::1]:443", "user": 1000,
                "exe": { "device": 2049, "inode": 131_077 }, "cgroup": "/system.slice",
            }),
        );
        form!(
            Request::RuleExplain(OpenedConnection {
                to: "192.0.2.1:80".parse().unwrap(),
                user: None,
                exe: None,
                cgroup: None,
            }),
            json!({ "op": "rule_explain", "to": "192.0.2.1:80" }),
        );
        form!(
            Request::RuleCheck {
                name: "/etc/vtl/rules.toml".to_owned(),
            },
            json!({ "op": "rule_check", "name": "/etc/vtl/rules.toml" }),
        );
        form!(Request::RuleReload, json!({ "op": "rule_reload" }));
    }

    #[test]
    fn sessions__have_these_forms() {
        let key = SessionKey {
            sid: 3,
            key: u64::MAX,
        };
        let succeeds = json!({ "sid": 3, "key": u64::MAX });
        form!(
            Request::Connect {
                to: Destination::Peer {
                    host: "192.0.2.1".parse().unwrap(),
                    port: 9253,
                },
                session: SessionRequest {
                    requirements: Requirements {
                        services: Services::RELIABLE,
                        prefer: Services::ORDERED,
                        avoid: Services::FLOW_CONTROL,
                        prohibit: Services::CONGESTION_CONTROL,
                        qos: Qos {
                            max_delay_ms: Some(50),
                            min_throughput_mbit: Some(2.5),
                            max_loss_pct: None,
                        },
                    },
                    ..Default::default()
                },
            },
            json!({
                "op": "connect", "host": "192.0.2.1", "port": 9253,
                "services": 1, "prefer": 2, "avoid": 4, "prohibit": 8,
                "max_delay_ms": 50, "min_throughput_mbit": 2.5, "max_loss_pct": null,
            }),
        );
        form!(
            Request::Connect {
                to: Destination::Successor { succeeds: key },
                session: SessionRequest {
                    requirements: Requirements::default(),
                    graft: Some("cubic".to_owned()),
                    params: [("window".to_owned(), 64)].into(),
                },
            },
            json!({
                "op": "connect", "succeeds": succeeds,
                "services": 0, "prefer": 0, "avoid": 0, "prohibit": 0,
                "max_delay_ms": null, "min_throughput_mbit": null, "max_loss_pct": null,
                "graft": "cubic", "params": { "window": 64 },
            }),
        );
        form!(
            Request::Follow { succeeds: key },
            json!({ "op": "follow", "succeeds": succeeds }),
        );
        form!(
            Request::Listen { port: 9253 },
            json!({ "op": "listen", "port": 9253 }),
        );
        form!(Request::Accept { key: None }, json!({ "op": "accept" }));
        form!(
            Request::Accept {
                key: Some(u64::MAX),
            },
            json!({ "op": "accept", "key": u64::MAX }),
        );
        form!(Request::Statistics, json!({ "op": "statistics" }));
        form!(Request::Close { aborted: false }, json!({ "op": "close" }));
        form!(
            Request::Close { aborted: true },
            json!({ "op": "close", "aborted": true }),
        );
    }

    /// Forms that clients have had before.
    #[test]
    fn parse__takes_what_older_clients_send() {
        let parsed = |message| Request::parse(&message).unwrap();
        assert_eq!(
            parsed(json!({
                "op": "hook_add", "port": 80, "carrier": null, "loss_tolerant": false,
            })),
            Request::HookAdd {
                target: HookTarget::Port(80),
                carrier: CarrierSpec::default(),
            }
        );
        assert_eq!(
            parsed(json!({
                "op": "rule_explain", "to": "192.0.2.1:80", "user": null, "cgroup": null,
            })),
            parsed(json!({ "op": "rule_explain", "to": "192.0.2.1:80" })),
        );
        assert_eq!(
            parsed(json!({
                "op": "connect", "host": "192.0.2.1", "port": 7, "services": 0, "graft": "udp",
                "params": {},
            })),
            parsed(json!({
                "op": "connect", "host": "192.0.2.1", "port": 7, "graft": "udp", "newer": [1],
            })),
        );
        assert_eq!(
            parsed(json!({ "op": "close", "aborted": false })),
            Request::Close { aborted: false }
        );
    }

    #[test]
    fn parse__nonsense_is_refused_in_one_sentence() {
        let peer = "connect: name either a peer, \"host\" an IP address and \"port\" a number from 1 \
                    to 65535, or in \"succeeds\" the sid and the key of a session";
        for (message, why) in [
            (json!({}), "the request names no op"),
            (json!([1, 2]), "the request names no op"),
            (json!({ "op": 7 }), "the request names no op"),
            (json!({ "op": "dance" }), "unknown op \"dance\""),
            (
                json!({ "op": "graft_show" }),
                "graft_show: missing field `name`",
            ),
            (
                json!({ "op": "graft_show", "name": 7 }),
                "graft_show: \"name\" must be a name",
            ),
            (
                json!({ "op": "listen", "port": -1 }),
                "listen: \"port\" must be a number from 1 to 65535",
            ),
            (
                json!({ "op": "listen", "port": 0 }),
                "listen: \"port\" must be a number from 1 to 65535",
            ),
            (
                json!({ "op": "hook_add", "port": 70_000 }),
                "hook_add: \"port\" must be a number from 1 to 65535",
            ),
            (
                json!({ "op": "hook_add", "port": 7, "carrier": 7 }),
                "hook_add: \"carrier\" must be a name",
            ),
            (
                json!({ "op": "hook_remove", "port": 80, "cgroup": "/x" }),
                "hook_remove: name either a port or a cgroup",
            ),
            (
                json!({ "op": "hook_remove" }),
                "hook_remove: name either a port or a cgroup",
            ),
            (
                json!({ "op": "rule_explain", "to": "192.0.2.1" }),
                "rule_explain: \"to\" must be an address and a port",
            ),
            (json!({ "op": "connect", "host": "x" }), peer),
            (json!({ "op": "connect", "host": "x", "port": 7 }), peer),
            (
                json!({ "op": "connect", "host": "10.73.0.2", "port": 70_000 }),
                peer,
            ),
            (json!({ "op": "connect", "succeeds": { "sid": 1 } }), peer),
            (
                json!({ "op": "connect", "host": "10.73.0.2", "port": 7, "params": { "a": "b" } }),
                "connect: \"params\" must be an object of numbers",
            ),
            (
                json!({ "op": "follow" }),
                "follow: missing field `succeeds`",
            ),
        ] {
            let error = Request::parse(&message).expect_err("nonsense");
            assert_eq!(error.to_string(), why, "{message}");
        }
    }
}
