//! Requests as the control socket carries them.

use serde_json::json;
use vtl_proto::services::{Qos, Services};

use super::*;
use crate::document;

/// This request is that message, and no other.
macro_rules! form {
    ($request:expr, $message:expr $(,)?) => {
        let (request, message) = ($request, $message);
        assert_eq!(serde_json::to_value(&request).unwrap(), message);
        document::has_fields(&message);
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
fn gateways__have_these_forms() {
    let interface = || "wan0".to_owned();
    form!(
        Request::GatewayAdd {
            interface: interface(),
            to: Vec::new(),
            ports: Vec::new(),
            carrier: None
        },
        json!({ "op": "gateway_add", "interface": "wan0" }),
    );
    form!(
        Request::GatewayAdd {
            interface: interface(),
            to: vec!["10.0.0.0/8".into()],
            ports: vec![80, 443],
            carrier: Some("auto".into())
        },
        json!({
            "op": "gateway_add", "interface": "wan0", "to": ["10.0.0.0/8"], "ports": [80, 443], "carrier": "auto"
        }),
    );
    form!(Request::GatewayList, json!({ "op": "gateway_list" }));
    form!(
        Request::GatewayRemove {
            interface: interface()
        },
        json!({ "op": "gateway_remove", "interface": "wan0" }),
    );
}

#[test]
fn select__has_these_forms() {
    form!(
        Request::SelectStatus { from: 0 },
        json!({ "op": "select_status" }),
    );
    form!(
        Request::SelectStatus { from: 100 },
        json!({ "op": "select_status", "from": 100 }),
    );
    form!(
        Request::SelectSet { on: false },
        json!({ "op": "select_set", "on": false }),
    );
    form!(
        Request::SelectLearn {
            learn: Learning::Reset
        },
        json!({ "op": "select_learn", "learn": "reset" }),
    );
    form!(
        Request::SelectLessons { from: 0 },
        json!({ "op": "select_lessons" }),
    );
}

#[test]
fn hooks__have_these_forms() {
    form!(Request::HookList, json!({ "op": "hook_list" }));
    let udp = || CarrierSpec {
        carrier: Some("udp".to_owned()),
        loss_tolerant: true,
        ..CarrierSpec::default()
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
            target: HookTarget::Port(80),
            carrier: CarrierSpec {
                others: Some("tcp:stream".to_owned()),
                ..CarrierSpec::default()
            },
        },
        json!({ "op": "hook_add", "port": 80, "others": "tcp:stream" }),
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
    form!(Request::FlowList { from: 0 }, json!({ "op": "flow_list" }));
    form!(
        Request::FlowShow { id: 7 },
        json!({ "op": "flow_show", "id": 7 }),
    );
    form!(
        Request::FlowMove {
            id: 7,
            carrier: "tcp".to_owned(),
            for_s: None,
        },
        json!({ "op": "flow_move", "id": 7, "carrier": "tcp" }),
    );
    form!(
        Request::PathList { from: None },
        json!({ "op": "path_list" })
    );
    let peer = "192.0.2.7".parse().unwrap();
    form!(
        Request::PathList { from: Some(peer) },
        json!({ "op": "path_list", "from": "192.0.2.7" }),
    );
    form!(
        Request::PathShow { peer },
        json!({ "op": "path_show", "peer": "192.0.2.7" }),
    );
    let bad = Request::parse(&json!({ "op": "path_show", "peer": "there" }));
    assert_eq!(
        bad.unwrap_err().to_string(),
        "path_show: \"peer\" must be an IP address"
    );
    form!(Request::PeerList { from: 0 }, json!({ "op": "peer_list" }));
    form!(
        Request::PeerTrust(PeerKey {
            name: "gate".to_owned(),
            key: "00".to_owned(),
            addresses: vec!["192.0.2.7".to_owned()],
            reach: None,
        }),
        json!({ "op": "peer_trust", "name": "gate", "key": "00", "addresses": ["192.0.2.7"] }),
    );
    form!(
        Request::PeerTrust(PeerKey {
            name: "gate".to_owned(),
            key: "00".to_owned(),
            addresses: Vec::new(),
            reach: Some(vec!["80".to_owned()]),
        }),
        json!({ "op": "peer_trust", "name": "gate", "key": "00", "reach": ["80"] }),
    );
    form!(
        Request::PeerForget {
            name: "gate".to_owned()
        },
        json!({ "op": "peer_forget", "name": "gate" }),
    );
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
            via: Some("wan0".into()),
            from: Some("[2001:db8::2]:4000".parse().unwrap()),
        }),
        json!({
            "op": "rule_explain", "to": "[2001:db8::1]:443", "user": 1000,
            "exe": { "device": 2049, "inode": 131_077 }, "cgroup": "/system.slice",
            "via": "wan0", "from": "[2001:db8::2]:4000",
        }),
    );
    form!(
        Request::RuleExplain(OpenedConnection {
            to: "192.0.2.1:80".parse().unwrap(),
            user: None,
            exe: None,
            cgroup: None,
            via: None,
            from: None,
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
    form!(Request::TakeOver, json!({ "op": "take_over" }));
}

#[test]
fn rules_of_controllers__have_these_forms() {
    let rule = json!({ "name": "far", "via": "wan0", "to": ["10.0.0.0/8"], "carrier": "quic" });
    form!(
        Request::RuleInstall {
            rule: rule.as_object().unwrap().clone(),
            for_s: NonZeroU32::new(600).unwrap(),
        },
        json!({ "op": "rule_install", "rule": rule, "for_s": 600 }),
    );
    form!(
        Request::RuleWithdraw {
            name: "far".to_owned()
        },
        json!({ "op": "rule_withdraw", "name": "far" }),
    );
    form!(
        Request::FlowMove {
            id: 7,
            carrier: "tcp".to_owned(),
            for_s: NonZeroU32::new(600),
        },
        json!({ "op": "flow_move", "id": 7, "carrier": "tcp", "for_s": 600 }),
    );
}

#[test]
fn events__have_these_forms() {
    form!(
        Request::Events {
            since: None,
            kinds: Vec::new(),
            wait_ms: None
        },
        json!({ "op": "events" }),
    );
    form!(
        Request::Events {
            since: Some(0),
            kinds: vec!["flow".to_owned()],
            wait_ms: Some(0)
        },
        json!({ "op": "events", "since": 0, "kinds": ["flow"], "wait_ms": 0 }),
    );
}

#[test]
fn document__has_every_request() {
    let unknown = Request::deserialize(json!({ "op": "dance" })).expect_err("unknown");
    let text = unknown.to_string();
    // "unknown variant `dance`, expected one of `status`, …"
    let names: Vec<&str> = text.split('`').skip(3).step_by(2).collect();
    assert!(names.len() > 30 && names.contains(&"events"), "{text}");
    for name in names {
        let is_there = document::DOCUMENT.contains(&format!("`{name}`"));
        assert!(is_there, "docs/management.md lacks the request `{name}`");
    }
}

#[test]
fn parse__another_version_is_refused() {
    let said = |protocol: Value| {
        let parsed = Request::parse(&json!({ "op": "hook_list", "protocol": protocol }));
        parsed.map_err(|bad| bad.to_string())
    };
    assert_eq!(said(1.into()), Ok(Request::HookList));
    for other in [json!(2), json!(0), json!("one"), json!(null)] {
        let why = said(other).expect_err("another version");
        assert!(
            why.contains("of the control protocol, and this vtld"),
            "{why}"
        );
    }
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
                stateless: true,
                graft: Some("cubic".to_owned()),
                params: [("window".to_owned(), 64)].into(),
            },
        },
        json!({
            "op": "connect", "succeeds": succeeds,
            "services": 0, "prefer": 0, "avoid": 0, "prohibit": 0,
            "max_delay_ms": null, "min_throughput_mbit": null, "max_loss_pct": null,
            "stateless": true, "graft": "cubic", "params": { "window": 64 },
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
    form!(
        Request::GiveUp(GivenUp {
            packets: 3,
            messages: 2,
            bytes: 4100,
        }),
        json!({ "op": "give_up", "packets": 3, "messages": 2, "bytes": 4100 }),
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
        (
            json!({ "op": "dance" }),
            concat!(
                "unknown op \"dance\": this vtld, ",
                env!("CARGO_PKG_VERSION"),
                ", does not know it"
            ),
        ),
        (
            json!({ "op": "rule_install", "rule": {}, "for_s": 0 }),
            "rule_install: \"for_s\" must be a number of seconds from 1",
        ),
        (
            json!({ "op": "events", "kinds": "flow" }),
            "events: \"kinds\" must be a list of names",
        ),
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
