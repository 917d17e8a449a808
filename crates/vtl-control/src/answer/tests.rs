//! Answers as the control socket carries them.

use vtl_proto::keys::Suite;

use super::*;
use crate::{Events, document};

/// This answer is that message, and no other; clients ignore what a newer daemon adds.
macro_rules! form {
    ($answer:expr, $message:expr $(,)?) => {
        let (answer, mut message) = ($answer, $message);
        message["ok"] = true.into();
        message["protocol"] = 1.into();
        assert_eq!(to_message(&answer), Ok(message.clone()));
        document::has_fields(&message);
        message["newer"] = json!([1]);
        assert_eq!(from_message(message).ok(), Some(answer));
    };
}

fn session() -> SessionStatus {
    SessionStatus {
        sid: 3,
        peer: "192.0.2.1".parse().unwrap(),
        port: 9253,
        way: "udp".to_owned(),
        udp_port: 22_100,
        cipher: Some(Suite::Aes128Gcm),
        phase: "open".to_owned(),
        graft: Some("stream".to_owned()),
        rtt_ms: 20.5,
        min_rtt_ms: 20.0,
        rate_mbit: 30.25,
        loss_pct: 0.5,
        mode: None,
        cwnd: 10,
        sent: 11,
        retransmitted: 12,
        delivered: 13,
        lost: 14,
        reorder: 15,
        timeouts: 16,
        unacknowledged: 17,
        received: 18,
        duplicates: 19,
        bad_checksum: 20,
        beyond_window: 21,
    }
}

fn session_message() -> Value {
    json!({
        "sid": 3, "peer": "192.0.2.1", "port": 9253, "way": "udp", "udp_port": 22_100,
        "cipher": "aes-128-gcm",
        "phase": "open", "graft": "stream", "rtt_ms": 20.5, "min_rtt_ms": 20.0,
        "rate_mbit": 30.25, "loss_pct": 0.5, "mode": null, "cwnd": 10, "sent": 11,
        "retransmitted": 12, "delivered": 13, "lost": 14, "reorder": 15, "timeouts": 16,
        "unacknowledged": 17, "received": 18, "duplicates": 19, "bad_checksum": 20,
        "beyond_window": 21,
    })
}

#[test]
fn refusals__have_this_form() {
    let refused = Refusal::from("no").to_message();
    assert_eq!(
        refused,
        json!({ "ok": false, "error": "no", "denied": false, "protocol": 1 })
    );
    let error = from_message::<Done>(refused).unwrap_err();
    assert!(matches!(&error, Error::Refused(why) if why == "no"));
    let denied = Refusal {
        denied: true,
        ..Refusal::from("not you")
    };
    let error = from_message::<Done>(denied.to_message()).unwrap_err();
    assert!(matches!(&error, Error::Forbidden(why) if why == "not you"));
}

#[test]
fn from_message__what_is_no_answer_is_malformed() {
    for message in [json!("welcome"), json!({}), json!({ "ok": 1 })] {
        let error = from_message::<Done>(message).unwrap_err();
        assert!(matches!(error, Error::Malformed(_)), "{error:?}");
    }
    let error = from_message::<Listening>(json!({ "ok": true })).unwrap_err();
    assert!(error.to_string().contains("`key`"), "{error}");
}

#[test]
fn from_message__another_version_is_told() {
    let mut done = to_message(&Done {}).unwrap();
    done["protocol"] = 2.into();
    let error = from_message::<Done>(done).unwrap_err();
    assert!(matches!(error, Error::Protocol(2)), "{error}");
    // Of daemons before there were versions.
    assert!(from_message::<Done>(json!({ "ok": true })).is_ok());
    let unknown = json!({ "ok": false, "error": "unknown op \"events\"", "denied": false });
    let error = from_message::<Done>(unknown).unwrap_err();
    assert!(matches!(error, Error::TooOld), "{error}");
}

#[test]
fn events__have_this_form() {
    let none = || Events {
        events: Vec::new(),
        last: 7,
    };
    form!(none(), json!({ "events": [], "last": 7 }));
}

#[test]
fn done__has_this_form() {
    form!(Done {}, json!({}));
}

#[test]
fn sessions__have_these_forms() {
    form!(session(), session_message());
    form!(Listening { key: u64::MAX }, json!({ "key": u64::MAX }));
    let mut grant = Grant {
        sid: 3,
        key: u64::MAX,
        slots: 64,
        max_payload: 1400,
        max_message: 64_000_000,
        graft: "stream".to_owned(),
        gid: 2,
        services: Services::TCP,
        peer: "2001:db8::1".parse().unwrap(),
        events: true,
        keys: None,
    };
    let mut message = json!({
        "sid": 3, "key": u64::MAX, "slots": 64, "max_payload": 1400,
        "max_message": 64_000_000, "graft": "stream", "gid": 2, "services": 15,
        "peer": "2001:db8::1", "events": true,
    });
    form!(grant.clone(), message.clone());
    grant.keys = Some(Keys {
        suite: Suite::ChaCha20Poly1305,
        send: [0xab; 32].into(),
        receive: [0xcd; 32].into(),
    });
    message["keys"] = json!({
        "suite": "chacha20-poly1305", "send": "ab".repeat(32), "receive": "cd".repeat(32),
    });
    form!(grant.clone(), message);
    let shown = format!("{grant:?}");
    assert!(
        !shown.contains("abab") && shown.contains("Secret(..)"),
        "{shown}"
    );
}

#[test]
fn status__has_this_form() {
    let carrier = CarrierStatus {
        peer: "192.0.2.1".parse().unwrap(),
        carrier: "sctp".to_owned(),
        encrypted: true,
        role: "client".to_owned(),
        flows: 1,
        bytes_sent: 2,
        bytes_received: 3,
        skipped_bytes: None,
        path: Some(CarrierPath {
            rtt_ms: 1.5,
            sent: 4,
            lost: 5,
            refused: Some(6),
            ..CarrierPath::default()
        }),
    };
    let without = CarrierStatus {
        path: None,
        carrier: "mptcp".to_owned(),
        ..carrier.clone()
    };
    let status = Status {
        version: "0.1.0".to_owned(),
        kernel: "6.18".to_owned(),
        uptime_s: 3.5,
        interfaces: vec![Interface {
            name: "eth0".to_owned(),
            mtu: 1500,
            driver: Some("live".to_owned()),
            why: None,
        }],
        sessions: vec![session()],
        more: Some(100),
        listeners: vec![9253],
        negotiation: Negotiation {
            accepted: 1,
            early: 2,
            refused: 3,
            cookies: 4,
            replays: 5,
            repeated: 6,
            strangers: 7,
        },
        packets: Packets {
            received: 1,
            malformed: 2,
            no_session: 3,
            no_graft: 4,
            bad_checksum: 5,
            duplicate: 6,
            beyond_window: 7,
            contended: 8,
            control: 9,
            sent: 10,
            acknowledgements: 11,
            failed: 12,
            others: 13,
            limited: 14,
        },
        carriers: vec![carrier, without],
        hooks: Vec::new(),
        gateways: Vec::new(),
        near: vec!["192.0.2.1".parse().unwrap()],
    };
    form!(
        status,
        json!({
            "version": "0.1.0", "kernel": "6.18", "uptime_s": 3.5,
            "interfaces": [{ "name": "eth0", "mtu": 1500, "driver": "live", "why": null }],
            "sessions": [session_message()], "more": 100, "listeners": [9253],
            "negotiation": {
                "accepted": 1, "early": 2, "refused": 3, "cookies": 4, "replays": 5,
                "repeated": 6, "strangers": 7,
            },
            "packets": {
                "received": 1, "malformed": 2, "no_session": 3, "no_graft": 4,
                "bad_checksum": 5, "duplicate": 6, "beyond_window": 7, "contended": 8,
                "control": 9, "sent": 10, "acknowledgements": 11, "failed": 12,
                "others": 13, "limited": 14,
            },
            "carriers": [
                {
                    "peer": "192.0.2.1", "carrier": "sctp", "encrypted": true, "role": "client", "flows": 1,
                    "bytes_sent": 2, "bytes_received": 3, "rtt_ms": 1.5, "sent": 4, "lost": 5,
                    "refused": 6,
                },
                {
                    "peer": "192.0.2.1", "carrier": "mptcp", "encrypted": true, "role": "client", "flows": 1,
                    "bytes_sent": 2, "bytes_received": 3,
                },
            ],
            "hooks": [],
            "near": ["192.0.2.1"],
        }),
    );
}

#[test]
fn grafts__have_these_forms() {
    let graft = Graft {
        name: "mine".to_owned(),
        version: "0.1.0".to_owned(),
        gid: 40,
        services: "reliable+ordered".to_owned(),
        bytes: 5000,
        instructions: 900,
        deployed: true,
        signer: "me".to_owned(),
    };
    let row = json!({
        "name": "mine", "version": "0.1.0", "gid": 40, "services": "reliable+ordered",
        "bytes": 5000, "instructions": 900, "deployed": true, "signer": "me",
    });
    form!(
        Grafts {
            grafts: vec![graft.clone()],
            refused: Vec::new(),
        },
        json!({ "grafts": [row] }),
    );
    form!(
        Grafts {
            grafts: vec![graft],
            refused: vec![RefusedFile {
                file: "/x.vtlg".into(),
                why: "it is cut off".to_owned(),
            }],
        },
        json!({
            "grafts": [row], "refused": [{ "file": "/x.vtlg", "why": "it is cut off" }],
        }),
    );
    form!(
        Deployed {
            name: "mine".to_owned(),
            version: "0.1.0".to_owned(),
            gid: 40,
            instructions: 900,
            ms: 12.5,
        },
        json!({ "name": "mine", "version": "0.1.0", "gid": 40, "instructions": 900, "ms": 12.5 }),
    );
}

#[test]
fn hooks__have_these_forms() {
    let hook = |id, on| Hook {
        id,
        on,
        carrier: None,
        connections: None,
        rule: None,
    };
    let run = Hooked::Run {
        run: 4711,
        cgroup: "/vtl/1".into(),
        processes: 2,
    };
    let cgroup = Hooked::Cgroup {
        cgroup: "/x".into(),
        processes: 0,
    };
    let port = Hook {
        carrier: Some("tcp:bbr".to_owned()),
        connections: Some(5),
        rule: Some("web".to_owned()),
        ..hook(3, Hooked::Port { port: 80 })
    };
    form!(
        Hooks {
            hooks: vec![hook(1, run), hook(2, cgroup), port],
        },
        json!({ "hooks": [
            { "id": 1, "run": 4711, "cgroup": "/vtl/1", "processes": 2 },
            { "id": 2, "cgroup": "/x", "processes": 0 },
            { "id": 3, "port": 80, "carrier": "tcp:bbr", "connections": 5, "rule": "web" },
        ] }),
    );
    form!(HookAdded { id: 7 }, json!({ "id": 7 }));
}

/// Texts of a list.
fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&w| w.to_owned()).collect()
}

/// Conditions of all kinds.
fn all_conditions() -> Conditions {
    Conditions {
        cgroup: words(&["/x"]),
        user: words(&["me"]),
        exe: words(&["/bin/sh"]),
        port: words(&["80", "8000-8100"]),
        to: words(&["10.0.0.0/8"]),
        profile: words(&["insensitive"]),
        local: true,
        via: words(&["wan0"]),
        from: words(&["10.1.0.0/16"]),
        from_port: words(&["4000"]),
    }
}

#[test]
fn rules__have_these_forms() {
    let opened = |conditions| Rule {
        name: "backup".to_owned(),
        conditions: Some(conditions),
        listen: None,
        action: "graft:cubic".to_owned(),
        when: Vec::new(),
        expires: None,
        connections: None,
        missing: Vec::new(),
        installed: false,
    };
    let condition = |holds_for: &[&str], decides_for: &[&str]| PathCondition {
        condition: "rtt >= 300ms".to_owned(),
        carrier: "quic".to_owned(),
        holds_for: words(holds_for),
        decides_for: words(decides_for),
    };
    let conditional = Rule {
        when: vec![
            condition(&["10.0.0.1", "10.0.0.2"], &["10.0.0.1"]),
            condition(&[], &[]),
        ],
        ..opened(Conditions::default())
    };
    let accepted = Rule {
        conditions: None,
        listen: Some(vec![80, 443]),
        connections: Some(5),
        missing: vec!["/gone".into()],
        installed: true,
        expires: Some("2027-01-31T18:00:00Z".to_owned()),
        ..opened(Conditions::default())
    };
    form!(
        Rules {
            file: "/etc/vtl/rules.toml".into(),
            rules: vec![
                opened(Conditions::default()),
                opened(all_conditions()),
                conditional,
                accepted
            ],
            more: Some(3),
        },
        json!({
            "file": "/etc/vtl/rules.toml",
            "rules": [
                { "name": "backup", "match": {}, "action": "graft:cubic" },
                {
                    "name": "backup",
                    "match": {
                        "cgroup": ["/x"], "user": ["me"], "exe": ["/bin/sh"],
                        "port": ["80", "8000-8100"], "to": ["10.0.0.0/8"],
                        "profile": ["insensitive"], "local": true,
                        "via": ["wan0"], "from": ["10.1.0.0/16"], "from_port": ["4000"],
                    },
                    "action": "graft:cubic",
                },
                {
                    "name": "backup", "match": {}, "action": "graft:cubic",
                    "when": [
                        {
                            "if": "rtt >= 300ms", "carrier": "quic",
                            "holds_for": ["10.0.0.1", "10.0.0.2"], "decides_for": ["10.0.0.1"],
                        },
                        { "if": "rtt >= 300ms", "carrier": "quic" },
                    ],
                },
                {
                    "name": "backup", "listen": [80, 443], "action": "graft:cubic",
                    "expires": "2027-01-31T18:00:00Z", "connections": 5, "missing": ["/gone"], "installed": true,
                },
            ],
            "more": 3,
        }),
    );
    form!(
        Explanation {
            hook: None,
            passed: vec![PassedRule {
                rule: "dns".to_owned(),
                because: "its port is not 80".to_owned(),
            }],
            decides: Some("backup".to_owned()),
            action: Some("graft:cubic".to_owned()),
        },
        json!({
            "hook": null, "passed": [{ "rule": "dns", "because": "its port is not 80" }],
            "decides": "backup", "action": "graft:cubic",
        }),
    );
    form!(RuleCount { count: 2 }, json!({ "count": 2 }));
}

#[test]
fn select__has_this_form() {
    let unknown = SelectedPath {
        peer: "192.0.2.1".parse().unwrap(),
        association: None,
        profile: None,
        max_delay_ms: None,
        min_throughput_mbit: None,
        missed: Vec::new(),
        carrier: "tcp".to_owned(),
        flows: 1,
        direction: None,
        min_rtt_ms: None,
        loss_pct: None,
        loss_burst: None,
        rate_mbit: None,
        rate_at_least: None,
        packets: None,
        why: "auto: tcp, too little is known of the path yet".to_owned(),
        explanation: None,
        since_s: None,
    };
    let known = SelectedPath {
        profile: Some("loss-sensitive".to_owned()),
        max_delay_ms: Some(200.0),
        min_throughput_mbit: Some(5.0),
        missed: vec!["max_delay".to_owned()],
        carrier: "graft:stream".to_owned(),
        direction: Some("receives".to_owned()),
        min_rtt_ms: Some(600.5),
        loss_pct: Some(2.0),
        loss_burst: Some(1.5),
        rate_mbit: Some(9.5),
        rate_at_least: Some(true),
        packets: Some(4096),
        association: Some(7),
        explanation: Some("graft:stream: in".to_owned()),
        since_s: Some(3.5),
        ..unknown.clone()
    };
    form!(
        SelectStatus {
            on: true,
            paths: vec![unknown, known],
            more: Some(100),
        },
        json!({
            "on": true,
            "paths": [
                {
                    "peer": "192.0.2.1", "carrier": "tcp", "flows": 1,
                    "why": "auto: tcp, too little is known of the path yet",
                },
                {
                    "peer": "192.0.2.1", "association": 7, "profile": "loss-sensitive",
                    "max_delay_ms": 200.0, "min_throughput_mbit": 5.0, "missed": ["max_delay"],
                    "carrier": "graft:stream", "flows": 1,
                    "direction": "receives", "min_rtt_ms": 600.5, "loss_pct": 2.0, "loss_burst": 1.5,
                    "rate_mbit": 9.5, "rate_at_least": true, "packets": 4096,
                    "why": "auto: tcp, too little is known of the path yet", "explanation": "graft:stream: in",
                    "since_s": 3.5,
                },
            ],
            "more": 100,
        }),
    );
}

#[test]
fn lessons__have_this_form() {
    let lesson = Lesson {
        peer: "192.0.2.1".parse().unwrap(),
        profile: None,
        model: "tcp".to_owned(),
        learnt: None,
        outcomes: Vec::new(),
    };
    let learnt = Lesson {
        profile: Some("loss-sensitive".to_owned()),
        learnt: Some("graft:stream".to_owned()),
        outcomes: vec![LessonOutcome {
            carrier: "tcp".to_owned(),
            bytes_from: 65_536,
            rate_mbit: 2.5,
            flows: 9,
            age_s: 3.5,
        }],
        ..lesson.clone()
    };
    form!(
        Lessons {
            on: true,
            lessons: vec![lesson, learnt],
            more: Some(100),
        },
        json!({
            "on": true,
            "lessons": [
                { "peer": "192.0.2.1", "model": "tcp", "outcomes": [] },
                {
                    "peer": "192.0.2.1", "profile": "loss-sensitive", "model": "tcp", "learnt": "graft:stream",
                    "outcomes": [
                        { "carrier": "tcp", "bytes_from": 65_536, "rate_mbit": 2.5, "flows": 9, "age_s": 3.5 },
                    ],
                },
            ],
            "more": 100,
        }),
    );
}
