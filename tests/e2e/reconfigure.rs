//! Rules with conditions on the path: running connections of unmodified programs change their carrier while the path
//! does.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, same, until, url, words};

/// Round trips on either side of the rules' threshold, ms.
const NEAR: f64 = 20.0;
const FAR: f64 = 400.0;
/// Mbit/s: slow enough for what is to happen in the middle.
const CRAWL: f64 = 8.0;
const SIZE: usize = 48 << 20;
/// IP protocol.
const UDP: u8 = 17;

/// The only rule, with one condition on the round-trip time.
fn rules(carrier: &str) -> String {
    rule("rtt >= 250ms for 200ms", carrier)
}

fn rule(condition: &str, carrier: &str) -> String {
    format!(
        "[[rule]]\nname = \"far\"\nport = 80\ncarrier = \"best\"\ndwell = \"1s\"\n\
         when = {{ if = \"{condition}\", carrier = \"{carrier}\" }}\n"
    )
}

/// A client with a rule, and a download by an unmodified, unhooked curl.
struct Far {
    world: World,
    file: PathBuf,
    wanted: PathBuf,
    to: PathBuf,
    curl: Process,
}

impl Far {
    fn begin(name: &str, carrier: &str) -> Option<Self> {
        let mut world = World::bare(name, &Link::new(NEAR, CRAWL))?;
        world.start_web();
        world.start(Host::Server, &[]);
        world.hook();
        let file = world.path("rules.toml");
        fs::write(&file, rules(carrier)).expect("written");
        world.start(Host::Client, &["--rules", file.to_str().expect("UTF-8")]);
        let wanted = world.serve("big", SIZE);
        let to = world.path("got");
        let url = url(world.servers()[0], "big");
        let mut curl = world.plain_curl(Path::new("/usr/bin/curl"), &to, &url);
        let far = Self {
            curl: Process::start(&mut curl),
            world,
            file,
            wanted,
            to,
        };
        far.goes_by("graft");
        Some(far)
    }

    /// What each host sends of each flow by.
    fn paths(&self) -> Vec<String> {
        let of = |host| {
            let list = self.world.call(host, &Request::FlowList { from: 0 });
            let flows = list["flows"].as_array().expect("a list").clone();
            let path = |flow: Value| flow["sends_by"].as_str().expect("text").to_owned();
            flows.into_iter().map(path)
        };
        of(Host::Client).chain(of(Host::Server)).collect()
    }

    /// Waits until the flow goes by a carrier in both directions.
    #[track_caller]
    fn goes_by(&self, carrier: &str) {
        until(&format!("{carrier} at both hosts"), || {
            self.paths() == [carrier, carrier]
        });
    }

    /// Waits until so many bytes more have arrived, and not all.
    #[track_caller]
    fn goes_on(&mut self, more: u64) {
        let arrived = || self.to.metadata().map_or(0, |m| m.len());
        let wanted = arrived() + more;
        until("the download goes on", || {
            assert!(self.curl.ended().is_none(), "it ended after {}", arrived());
            arrived() >= wanted
        });
    }

    /// Its end, with the very bytes.
    #[track_caller]
    fn ends(mut self) {
        self.world.set_rate(200.0);
        assert!(self.curl.wait().success());
        same(&self.wanted, &self.to);
    }

    /// What `vtl rule list` says of the condition.
    fn condition(&self) -> Value {
        let listed: Value =
            serde_json::from_str(&self.world.rule_ok(&["list", "--json"])).expect("JSON");
        listed["rules"][0]["when"][0].clone()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.world.log_path(Host::Client)).expect("a log")
    }
}

#[test]
fn reconfigure__a_download_follows_the_round_trip_time() {
    let Some(mut far) = Far::begin("when-quic", "quic") else {
        return;
    };
    far.goes_on(200_000);
    for _ in 0..2 {
        assert_eq!(far.condition()["if"], "rtt >= 250ms for 200ms");
        assert_eq!(far.condition()["decides_for"], Value::Null);
        far.world.set_rtt(FAR);
        far.goes_by("quic");
        far.goes_on(200_000);
        let server = far.world.servers()[0].to_string();
        let condition = far.condition();
        for list in ["holds_for", "decides_for"] {
            assert_eq!(condition[list], serde_json::json!([server]), "{condition}");
        }
        let text = far.world.rule_ok(&["list"]);
        assert!(
            text.contains(&format!("then quic (now to {server})")),
            "{text}"
        );
        far.world.set_rtt(NEAR);
        far.goes_by("graft");
        far.goes_on(200_000);
    }
    let log = far.log();
    for said in [
        "to=quic",
        "to=best",
        "rtt >= 250ms for 200ms\\\" holds",
        "has ended",
    ] {
        assert!(log.contains(said), "{said}: {log}");
    }
    far.ends();
}

/// The link layer of the client's interface, which looks like Ethernet of 10 Gbit/s.
#[test]
fn reconfigure__by_what_the_link_layer_says() {
    let Some(mut far) = Far::begin("when-link", "quic") else {
        return;
    };
    for (condition, carrier) in [
        ("medium is ethernet and link-rate >= 1Gbit/s", "quic"),
        ("medium is cellular", "graft"),
        ("link-rate > 1Gbit/s", "quic"),
        ("link-rate < 1Gbit/s", "graft"),
        // An interface without a signal: nobody knows, so nothing changes.
        ("signal > 1%", "graft"),
    ] {
        fs::write(&far.file, rule(condition, "quic")).expect("written");
        far.world.rule_ok(&["reload"]);
        far.goes_by(carrier);
        far.goes_on(200_000);
        far.goes_by(carrier);
    }
    let peer = far.world.servers()[0];
    let link = far.world.call(Host::Client, &Request::PathShow { peer })["link"].clone();
    assert_eq!(link["medium"], "ethernet", "{link}");
    assert_eq!(link["rate_mbit"], 10_000.0, "{link}");
    assert_eq!(link["signal_pct"], Value::Null);
    far.ends();
}

/// From one graft to another one, which takes a session of its own, and to the flow's own connection.
#[test]
fn reconfigure__to_another_graft_and_to_tcp_after_a_reload() {
    let Some(mut far) = Far::begin("when-graft", "graft:cubic") else {
        return;
    };
    let grafts = |far: &Far| -> Vec<String> {
        let status = far.world.status(Host::Client);
        let sessions = status["sessions"].as_array().expect("a list").clone();
        let graft = |session: Value| session["graft"].as_str().unwrap_or_default().to_owned();
        sessions.into_iter().map(graft).collect()
    };
    assert!(!grafts(&far).contains(&"cubic".to_owned()));
    far.world.set_rtt(FAR);
    until("a session over cubic", || {
        grafts(&far).contains(&"cubic".to_owned())
    });
    let sent = |far: &Far| {
        let status = far.world.status(Host::Server);
        let sessions = status["sessions"].as_array().expect("a list").clone();
        let mut of_cubic = sessions
            .iter()
            .filter(|session| session["graft"] == "cubic");
        of_cubic
            .find_map(|session| session["sent"].as_u64())
            .unwrap_or(0)
    };
    // The server follows: hundreds of packets of the file.
    until("the file comes by it", || sent(&far) > 300);
    far.goes_on(200_000);
    // Other conditions are followed at once, also by connections that run.
    fs::write(&far.file, rules("tcp")).expect("written");
    far.world.rule_ok(&["reload"]);
    far.goes_by("tcp");
    far.goes_on(200_000);
    far.world.set_rtt(NEAR);
    far.goes_by("graft");
    far.ends();
}

/// A carrier that cannot be had leaves the flow where it is, is reported once, and works once it can be had.
#[test]
fn reconfigure__a_carrier_that_cannot_be_had() {
    let Some(mut far) = Far::begin("when-blocked", "quic") else {
        return;
    };
    far.world.block(Some(UDP));
    far.world.set_rtt(FAR);
    let failures = |far: &Far| far.log().matches("the carrier cannot be opened").count();
    until("a report", || failures(&far) == 1);
    assert_eq!(far.paths(), ["graft", "graft"]);
    assert_eq!(far.condition()["decides_for"], Value::Null);
    assert!(far.condition()["holds_for"].is_array());
    far.goes_on(200_000);
    far.world.block(None);
    far.goes_by("quic");
    assert_eq!(failures(&far), 1);
    far.goes_on(200_000);
    far.ends();
}

/// What an operator has moved by hand stays, and the next daemon goes on as the former one did.
#[test]
fn reconfigure__by_hand_and_after_a_take_over() {
    let Some(mut far) = Far::begin("when-hand", "quic") else {
        return;
    };
    far.world.set_rtt(FAR);
    far.goes_by("quic");
    let rules = far.file.clone();
    let rules = ["--rules", rules.to_str().expect("UTF-8")];
    far.world.take_over_with(Host::Client, &rules);
    far.goes_by("quic");
    far.goes_on(200_000);
    let list = far.world.call(Host::Client, &Request::FlowList { from: 0 });
    let id = list["flows"][0]["id"].to_string();
    let moved = ["flow", "move", &id, "--carrier", "quic"];
    let moved = far
        .world
        .vtl(Host::Client, &moved)
        .output()
        .expect("vtl runs");
    assert!(moved.status.success(), "{}", words(&moved));
    far.world.set_rtt(NEAR);
    // The server follows the rule, what the client sends stays.
    until("the server's direction is back", || {
        far.paths() == ["quic", "graft"]
    });
    far.goes_on(200_000);
    assert_eq!(far.paths(), ["quic", "graft"]);
    // A restart breaks what it was moved to.
    far.world.take_over_with(Host::Client, &rules);
    until("both are back", || far.paths() == ["graft", "graft"]);
    far.goes_on(200_000);
    far.ends();
}

/// A wrong condition is refused with the whole file, by one sentence that says where.
#[test]
fn reconfigure__a_bad_condition_is_refused_whole() {
    let Some(mut world) = World::bare("when-bad", &Link::new(NEAR, CRAWL)) else {
        return;
    };
    let file = world.path("rules.toml");
    let good = rules("quic");
    fs::write(&file, &good).expect("written");
    world.start(Host::Client, &["--rules", file.to_str().expect("UTF-8")]);
    for (from, to, about) in [
        ("rtt", "rt", "there is no figure \\\"rt\\\""),
        ("250ms", "250", "is no unit of rtt"),
        ("\"quic\"", "\"tcp:bbr\"", "cannot take connections over"),
        (
            "\"quic\"",
            "\"graft:none\"",
            "there is no carrier graft:none",
        ),
    ] {
        fs::write(&file, good.replace(from, to)).expect("written");
        let output = world.rule(&["reload"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.lines().count() == 1,
            "{said}"
        );
        let about = about.replace('\\', "");
        assert!(
            said.contains(&about) && said.contains("rules.toml:"),
            "{said}"
        );
        let listed = world.rule_ok(&["list"]);
        assert!(
            listed.contains("rtt >= 250ms for 200ms then quic"),
            "{listed}"
        );
    }
    fs::write(&file, &good).expect("written");
    let add = [
        "add",
        "more",
        "--carrier",
        "best",
        "--dwell",
        "5s",
        "--when",
    ];
    let when = |when| [&add[..], &[when]].concat();
    assert!(!world.rule(&when("loss > 2 then quic")).status.success());
    world.rule_ok(&when("loss > 2% and rate < 1Mbit for 3s then sctp"));
    let listed = world.rule_ok(&["list"]);
    let wanted = "loss > 2% and rate < 1Mbit/s for 3s then sctp";
    assert!(listed.contains(wanted), "{listed}");
}
