//! Bounds that rules state: where a carrier misses one, it is told, and the connections of unmodified programs move to one
//! that keeps it.

use std::fs;

use serde_json::Value;
use vtl::{Mode, Requirements};
use vtl_control::Request;
use vtl_testbed::{Host, Link};

use crate::harness::{Process, World, payload, same, until, url};

/// A short path with a queue of 1.5 s, which TCP under CUBIC fills.
const RTT_MS: f64 = 20.0;
const MBIT: f64 = 8.0;
const QUEUE: u32 = 1000;
const SIZE: usize = 64 << 20;

const RULES: &str =
    "[[rule]]\nname = \"live\"\nport = 80\ncarrier = \"auto\"\nmax_delay = \"80ms\"\n";

/// Events of a kind that the client's daemon has told.
fn told(world: &World, kind: &str) -> Vec<Value> {
    let request = Request::Events {
        since: Some(0),
        kinds: vec![kind.to_owned()],
        wait_ms: Some(0),
    };
    let answer = world.call(Host::Client, &request);
    let events = answer["events"].as_array().expect("a list").clone();
    events.into_iter().filter(|e| e["event"] == kind).collect()
}

#[test]
fn bounds__an_upload_leaves_tcp_that_fills_the_queue() {
    let link = Link {
        queue_packets: Some(QUEUE),
        ..Link::new(RTT_MS, MBIT)
    };
    let Some(mut world) = World::bare("bounds", &link) else {
        return;
    };
    for host in [Host::Client, Host::Server] {
        world.testbed.tune_tcp(host, "cubic").expect("tuned");
    }
    world.start_web();
    world.start(Host::Server, &[]);
    world.hook();
    let file = world.path("rules.toml");
    fs::write(&file, RULES).expect("written");
    world.start(Host::Client, &["--rules", file.to_str().expect("UTF-8")]);
    let from = world.path("from");
    fs::write(&from, payload(SIZE, 7)).expect("written");
    let to = url(world.servers()[0], "upload");
    let mut curl = (world.testbed.command(Host::Client, "curl")).expect("a namespace");
    curl.args(["--noproxy", "*", "-sS", "--fail", "-T"]);
    let mut curl = Process::start(curl.arg(&from).arg(&to));

    let told = |kind| told(&world, kind);
    until("the bound is missed", || {
        assert!(curl.ended().is_none(), "it has ended before");
        !told("bound_missed").is_empty()
    });
    let missed = told("bound_missed")[0].clone();
    assert_eq!(missed["bound"], "max_delay", "{missed}");
    assert!(
        missed["carrier"].as_str().expect("text").starts_with("tcp"),
        "{missed}"
    );
    let why = missed["why"].as_str().expect("text");
    assert!(why.ends_with("max_delay 80ms"), "{missed}");
    // It moves while it runs, to what keeps the queue short.
    let row = || world.call(Host::Client, &Request::SelectStatus { from: 0 })["paths"][0].clone();
    until("the graft", || row()["carrier"] == "graft:stream");
    // Behind what TCP has left in the queue, the graft keeps none of its own. The upload takes a minute, whatever the
    // machine does besides.
    until("the bound is kept", || {
        assert!(curl.ended().is_none(), "it has ended before: {}", row());
        !told("bound_kept").is_empty()
    });
    let kept = told("bound_kept")[0].clone();
    assert_eq!(kept["carrier"], "graft:stream", "{kept}");
    let row = row();
    assert_eq!(row["max_delay_ms"], 80.0, "{row}");
    assert!(row["missed"].is_null(), "{row}");
    let status = world.vtl(Host::Client, &["select", "status"]).output();
    let status = status.expect("vtl runs").stdout;
    let status = String::from_utf8_lossy(&status);
    assert!(status.contains("does not keep max_delay 80ms"), "{status}");
    world.set_rate(200.0);
    assert!(curl.wait().success());
    same(&from, &world.path("www").join("upload"));
}

/// An application's session is watched; and refused, once the path is known to be too long for it.
#[test]
fn bounds__of_a_session_are_told_and_refused() {
    let Some(world) = World::with_daemons("bounds-session", &Link::new(400.0, 50.0)) else {
        return;
    };
    let socket = |mode| world.aware(mode, 7300);
    let mut wanted = Requirements::STREAM;
    wanted.qos.max_delay_ms = Some(100);
    let mut server = socket(Mode::Responder);
    let mut client = socket(Mode::Initiator);
    client
        .negotiate(&wanted)
        .expect("nothing is known of the path");
    server.validate().expect("a session");
    client.send_message(&payload(100_000, 7)).expect("sent");
    let mut buffer = vec![0; 100_000];
    assert_eq!(server.recv_message(&mut buffer).expect("received"), 100_000);
    until("the bound is missed", || {
        !told(&world, "bound_missed").is_empty()
    });
    let missed = told(&world, "bound_missed")[0].clone();
    assert!(
        missed["sid"].is_u64() && missed["association"].is_null(),
        "{missed}"
    );
    assert_eq!(missed["bound"], "max_delay", "{missed}");
    let mut other = socket(Mode::Initiator);
    let error = other.negotiate(&wanted).expect_err("refused").to_string();
    assert!(
        error.contains("one way") && error.contains("max_delay is 100"),
        "{error}"
    );
}
