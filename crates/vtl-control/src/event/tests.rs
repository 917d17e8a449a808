//! Events as the control socket carries them, and the document that describes them.

use serde_json::{Value, json};

use super::*;
use crate::document::DOCUMENT;

/// One of each kind, with its fields.
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn samples() -> Vec<Value> {
    let flow = |event: &str, more: Value| {
        let ends = json!({ "flow": 7, "local": "192.0.2.1:40000", "peer": "192.0.2.2:80" });
        with(event, &[&ends, &more])
    };
    let association = |event: &str| {
        let more = json!({ "association": 9, "local": "192.0.2.1", "peer": "192.0.2.2", "role": "client" });
        with(event, &[&more])
    };
    let carrier = |event: &str, more: Value| {
        let common = json!({ "association": 9, "peer": "192.0.2.2", "carrier": "quic" });
        with(event, &[&common, &more])
    };
    let session = |event: &str, more: Value| {
        let common = json!({ "sid": 3, "peer": "192.0.2.2", "port": 9253 });
        with(event, &[&common, &more])
    };
    let path = |event: &str| {
        let more =
            json!({ "association": 9, "peer": "192.0.2.2", "local": "10.0.0.1", "to": "10.0.0.2" });
        with(event, &[&more])
    };
    let address = |event: &str| {
        with(
            event,
            &[&json!({ "address": "2001:db8::1", "interface": "wan0" })],
        )
    };
    let change = |event: &str, more: Value| {
        let common = json!({
            "peer": "192.0.2.2", "association": 9, "from": "graft", "to": "quic", "why": "rtt 400 ms",
        });
        with(event, &[&common, &more])
    };
    let bound = |event: &str| {
        let more = json!({
            "association": 9, "sid": 3, "peer": "192.0.2.2", "carrier": "tcp", "bound": "max_delay",
            "why": "delay 900ms",
        });
        with(event, &[&more])
    };
    let number = json!({ "number": 2, "role": "server" });
    let counts = json!({ "bytes_sent": 5, "bytes_received": 6 });
    let rule = json!({ "rule": "far" });
    let action = json!({ "action": "quic", "expires": "2027-01-31T18:00:00Z", "installed": true });
    vec![
        flow(
            "flow_opened",
            json!({ "role": "client", "association": 9, "resumed": true }),
        ),
        flow(
            "flow_moved",
            json!({ "from": "tcp", "to": "graft", "why": "moved by hand" }),
        ),
        flow(
            "flow_ended",
            with(
                "",
                &[&counts, &json!({ "how": "reset", "why": "by the peer" })],
            ),
        ),
        association("association_up"),
        association("association_lost"),
        carrier("carrier_up", number.clone()),
        carrier("carrier_down", with("", &[&number, &counts])),
        carrier("carrier_failed", json!({ "why": "timed out" })),
        session("session_up", json!({ "graft": "stream" })),
        session("session_down", json!({})),
        session(
            "session_cut",
            json!({ "by": 4, "packets": 3, "messages": 2, "bytes": 4100 }),
        ),
        path("path_up"),
        path("path_down"),
        address("address_added"),
        address("address_removed"),
        with(
            "peer_learned",
            &[&json!({ "peer": "192.0.2.2", "key": "00" })],
        ),
        with(
            "peer_changed",
            &[&json!({ "peer": "192.0.2.2", "why": "it is 01, and was 00" })],
        ),
        with(
            "peer_refused",
            &[&json!({ "peer": "192.0.2.2", "why": "it shows no key" })],
        ),
        with("peer_trusted", &[&json!({ "name": "gate", "key": "00" })]),
        with("peer_forgotten", &[&json!({ "name": "gate" })]),
        with(
            "graft_deployed",
            &[&json!({ "graft": "stream", "gid": 2, "instructions": 900 })],
        ),
        with("graft_removed", &[&json!({ "graft": "stream" })]),
        with(
            "gateway_added",
            &[&json!({ "interface": "wan0", "carrier": "best" })],
        ),
        with("gateway_removed", &[&json!({ "interface": "wan0" })]),
        with("rule_added", &[&rule, &action]),
        with("rule_changed", &[&rule, &action]),
        with("rule_removed", &[&rule]),
        with("rule_expired", &[&rule]),
        change("condition_met", rule.clone()),
        change("condition_left", rule.clone()),
        bound("bound_missed"),
        bound("bound_kept"),
        change("selection_changed", json!({})),
        with("selection_switched", &[&json!({ "on": false })]),
        with("missed", &[&json!({ "events": 12 })]),
    ]
}

/// An event with the fields of all parts; without a name only these.
fn with(event: &str, parts: &[&Value]) -> Value {
    let mut all = match event {
        "" => json!({}),
        event => json!({ "id": 5, "time": "2026-11-28T14:00:00.123Z", "event": event }),
    };
    for (key, value) in parts.iter().filter_map(|part| part.as_object()).flatten() {
        all[key] = value.clone();
    }
    all
}

#[test]
fn events__have_these_forms() {
    for message in samples() {
        let event: Event = serde_json::from_value(message.clone()).expect("an event");
        assert_ne!(event.what, What::Unknown, "{message}");
        assert_eq!(message["event"], event.what.name());
        assert_eq!(serde_json::to_value(&event).expect("JSON"), message);
    }
    // What a flag or an option leaves out.
    for (event, fields) in [
        ("flow_opened", &["resumed"][..]),
        ("flow_ended", &["why"]),
        ("rule_added", &["expires", "installed"]),
        ("missed", &["events"]),
    ] {
        let full = samples()
            .into_iter()
            .find(|message| message["event"] == event);
        let mut message = full.expect("there is one");
        fields
            .iter()
            .for_each(|field| drop(message.as_object_mut().map(|m| m.remove(*field))));
        let parsed: Event = serde_json::from_value(message.clone()).expect("an event");
        assert_eq!(serde_json::to_value(&parsed).expect("JSON"), message);
    }
}

#[test]
fn events__of_newer_daemons_are_unknown() {
    let newer = with("moon_risen", &[&json!({ "phase": 1 })]);
    let event: Event = serde_json::from_value(newer).expect("an event");
    assert_eq!((event.id, event.what), (5, What::Unknown));
}

#[test]
fn kinds__name_all_events_and_their_subjects() {
    let mut wanted = Vec::new();
    for message in samples() {
        let name = message["event"].as_str().expect("a name").to_owned();
        if name == "missed" {
            continue; // comes unasked
        }
        let subject = name.split('_').next().expect("a word").to_owned();
        if !wanted.contains(&subject) {
            wanted.push(subject);
        }
        wanted.push(name);
    }
    assert_eq!(KINDS.to_vec(), wanted);
    let learned = What::PeerForgotten {
        name: "gate".into(),
    };
    assert!(learned.is_of("peer") && learned.is_of("peer_forgotten"));
    assert!(!learned.is_of("peer_learned") && !learned.is_of("forgotten"));
}

#[test]
fn document__has_every_event_with_its_fields() {
    for message in samples() {
        let name = message["event"].as_str().expect("a name");
        let row = DOCUMENT
            .lines()
            .find(|line| line.starts_with(&format!("| `{name}`")));
        let row =
            row.unwrap_or_else(|| panic!("docs/management.md has no row for the event {name}"));
        for field in message.as_object().expect("an object").keys() {
            let is_common = ["id", "time", "event"].contains(&field.as_str());
            assert!(
                is_common || row.contains(&format!("`{field}`")),
                "{name}: {field}: {row}"
            );
        }
    }
}

#[test]
fn document__has_the_example_as_it_is() {
    let example = include_str!("../../../../examples/management.py");
    let (_, code) = example
        .split_once('\n')
        .expect("a line that says what it is");
    assert!(
        DOCUMENT.contains(code),
        "examples/management.py and docs/management.md differ"
    );
}
