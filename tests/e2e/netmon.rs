//! The state of a path by what connections carry, against what the testbed did to their packets.

use std::process::Output;

use serde_json::Value;
use vtl_testbed::{DirectionStats, Host, Link, LossModel};

use crate::harness::{World, payload, until, vtl, words};

const RTT_MS: f64 = 40.0;
const RATE_MBIT: f64 = 20.0;
const LOSS_PCT: f64 = 2.0;
/// Bytes: some 9,000 packets, and five seconds.
const SIZE: usize = 12 << 20;

/// How far off figures may be, as a share: of the round trip, of losses, and of the bandwidth.
const RTT_ERROR: f64 = 0.05;
const LOSS_ERROR: f64 = 0.2;
const RATE_ERROR: f64 = 0.1;

fn link(loss_pct: f64) -> Link {
    Link {
        loss_pct,
        ..Link::new(RTT_MS, RATE_MBIT)
    }
}

#[track_caller]
fn is_near(what: &str, told: &Value, truth: f64, error: f64) {
    let told = told.as_f64().unwrap_or_else(|| panic!("{what}: not told"));
    let off = (told / truth - 1.0).abs();
    assert!(off <= error, "{what}: {told}, and in truth {truth}");
}

impl World {
    /// What `vtl path show` says on a host of the path to an address, of one kind of connection.
    fn told(&self, host: Host, to: &str, evidence: &str) -> Value {
        let show = self.vtl(host, &["path", "show", to, "--json"]).output();
        let show = show.expect("vtl runs");
        assert!(show.status.success(), "{}", words(&show));
        let report: Value = serde_json::from_slice(&show.stdout).expect("JSON");
        let told = report["told"].as_array().expect("a list").iter();
        let mut told = told.filter(|row| row["evidence"] == evidence);
        let row = told
            .next()
            .unwrap_or_else(|| panic!("{evidence}: {report}"));
        row.clone()
    }

    fn counts(&self) -> [DirectionStats; 2] {
        let stats = self.testbed.stats().expect("the emulator's counts");
        [stats.up, stats.down]
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Percent of the packets in between that did not arrive.
fn loss_pct(before: &DirectionStats, after: &DirectionStats) -> f64 {
    let gone = |stats: &DirectionStats| stats.lost + stats.queue_drops;
    let sent = after.rx_packets - before.rx_packets;
    (gone(after) - gone(before)) as f64 / sent as f64 * 100.0
}

/// Checks figures against what the emulator did in between, `carried` bytes of payload.
#[track_caller]
fn check(told: &Value, before: &DirectionStats, after: &DirectionStats, carried: usize) {
    eprintln!("{told}\n{after:?}");
    // A packet of 1,500 bytes takes 0.6 ms at that rate, beside the delay.
    is_near("round trip", &told["min_rtt_ms"], RTT_MS, RTT_ERROR);
    assert!(
        told["packets"]
            .as_u64()
            .is_some_and(|packets| packets > 2000)
    );
    let lost = loss_pct(before, after);
    is_near("loss", &told["loss_pct"], lost, LOSS_ERROR);
    // Headers take their share of the link.
    let payload = carried as f64 / (after.tx_bytes - before.tx_bytes) as f64;
    is_near(
        "bandwidth",
        &told["bandwidth_mbit"],
        RATE_MBIT * payload,
        RATE_ERROR,
    );
    assert_eq!(told["bandwidth_at_least"], false, "{told}");
    assert_eq!(told["class"], "lan");
}

/// A download by a carrier over a path that loses packets one by one.
fn is_accurate(carrier: &str) {
    let Some(mut world) = World::alone(&format!("netmon-{carrier}"), &link(LOSS_PCT)) else {
        return;
    };
    world.start_web();
    world.start_both(&[]);
    let server = world.servers()[0];
    world.serve("big", SIZE);
    world.meet_by(&["--carrier", carrier]);
    let [_, before] = world.counts();
    let mut download = world.start_over(carrier, server, "big");
    assert!(download.process.wait().success());
    download.check();
    let [_, after] = world.counts();
    let client = world.testbed.addr4(Host::Client).to_string();
    let told = world.told(Host::Server, &client, carrier);
    check(&told, &before, &after, SIZE);
}

#[test]
fn netmon__a_graft_tells_of_its_path() {
    is_accurate("graft");
}

#[test]
fn netmon__quic_tells_of_its_path() {
    is_accurate("quic");
}

#[test]
fn netmon__sctp_tells_of_its_path() {
    is_accurate("sctp");
}

/// An upload to a host without VTL, by a proxied connection, which fills the queue. What gets lost is its overflow.
#[test]
fn netmon__plain_tcp_tells_of_its_path() {
    let Some(mut world) = World::alone("netmon-tcp", &link(0.0)) else {
        return;
    };
    world.start_web();
    let cubic = world.testbed.tune_tcp(Host::Client, "cubic");
    cubic.expect("every Linux has CUBIC");
    world.start(Host::Client, &["--metrics", "127.0.0.1:9300"]);
    let server = world.servers()[0];
    let [before, _] = world.counts();
    world.upload_run(&[], server, "up", &payload(SIZE, 3));
    let [after, _] = world.counts();
    let told = world.told(Host::Client, &server.to_string(), "tcp");
    check(&told, &before, &after, SIZE);
    let list = world.vtl(Host::Client, &["path", "list"]).output();
    let list = said(&list.expect("vtl runs"));
    assert!(
        list.contains(&server.to_string()) && list.contains("lan"),
        "{list}"
    );
    // And the same for Prometheus.
    let ask = |url: &str| {
        let curl = world.testbed.command(Host::Client, "curl");
        let mut curl = curl.expect("a namespace");
        curl.args(["--noproxy", "*", "-sS", "--fail", url]);
        curl.output().expect("curl runs")
    };
    let figures = said(&ask("http://127.0.0.1:9300/metrics"));
    let wanted = format!("vtl_path_min_rtt_seconds{{peer=\"{server}\",evidence=\"tcp\"}} 0.04");
    assert!(figures.contains(&wanted), "{figures}");
    assert!(!ask("http://127.0.0.1:9300/").status.success());
}

/// Losses without a queue leave a window small: what TCP reaches then is a lower bound.
#[test]
fn netmon__tcp_over_a_path_that_loses_tells_a_lower_bound() {
    let Some(mut world) = World::alone("netmon-bound", &link(LOSS_PCT)) else {
        return;
    };
    world.start_web();
    let cubic = world.testbed.tune_tcp(Host::Client, "cubic");
    cubic.expect("every Linux has CUBIC");
    world.start(Host::Client, &[]);
    let server = world.servers()[0];
    let [before, _] = world.counts();
    world.upload_run(&[], server, "up", &payload(SIZE / 3, 3));
    let [after, _] = world.counts();
    let told = world.told(Host::Client, &server.to_string(), "tcp");
    eprintln!("{told}");
    is_near(
        "loss",
        &told["loss_pct"],
        loss_pct(&before, &after),
        LOSS_ERROR,
    );
    assert_eq!(told["bandwidth_at_least"], true, "{told}");
    assert!(
        told["bandwidth_mbit"]
            .as_f64()
            .is_some_and(|mbit| mbit < RATE_MBIT)
    );
}

/// Losses of four packets in a row, on average, and no queue: as over radio.
#[test]
fn netmon__losses_in_bursts_are_told_apart() {
    let bursts = Link {
        loss_model: LossModel::GilbertElliott {
            burst_packets: 4.0,
            bad_loss_pct: 100.0,
        },
        ..link(LOSS_PCT)
    };
    let Some(mut world) = World::alone("netmon-burst", &bursts) else {
        return;
    };
    world.start_web();
    world.start_both(&[]);
    world.serve("big", SIZE);
    world.meet_by(&["--carrier", "graft"]);
    let client = world.testbed.addr4(Host::Client).to_string();
    let mut told = Value::Null;
    // On a busy machine, packets are late as in a queue, and do not count.
    until("enough packets", || {
        let mut download = world.start_over("graft", world.servers()[0], "big");
        assert!(download.process.wait().success());
        download.check();
        told = world.told(Host::Server, &client, "graft");
        eprintln!("{told}");
        told["loss_burst"].is_number()
    });
    // Some 45 bursts: their mean length is uncertain by a third.
    let burst = told["loss_burst"].as_f64().expect("a number");
    assert!((2.0..8.0).contains(&burst), "{told}");
    assert_eq!(told["looks_wireless"], true);
}

/// As text, as JSON, and on a terminal, which it gives back.
#[test]
fn top__shows_paths_and_flows_while_they_run() {
    let Some(mut world) = World::alone("top", &link(0.0)) else {
        return;
    };
    world.start_web();
    world.start_both(&[]);
    world.serve("big", SIZE);
    let mut download = world.start_over("quic", world.servers()[0], "big");
    download.reaches(500_000);
    let client = world.testbed.addr4(Host::Client).to_string();
    let top = |args: &[&str]| {
        let top = world.vtl(Host::Server, &[&["top"], args].concat()).output();
        said(&top.expect("vtl runs"))
    };
    until("its rate", || {
        let frame: Value = serde_json::from_str(&top(&["--count", "1", "--json"])).expect("JSON");
        let [path, flow] = [&frame["paths"][0], &frame["flows"][0]];
        path["peer"] == client.as_str()
            && path["evidence"] == "quic"
            && flow["program"] == "nginx"
            && flow["sends_by"] == "quic"
            && flow["sends_mbit"].as_f64().is_some_and(|mbit| mbit > 1.0)
    });
    assert_eq!(top(&["--count", "2"]).matches("nginx (").count(), 2);
    let mut script = (world.testbed.command(Host::Server, "script")).expect("a namespace");
    let on_terminal = format!("{} top --count 2", vtl().display());
    script.args(["-qec", &on_terminal, "/dev/null"]);
    let shown = said(&script.output().expect("script, of bsdutils, runs"));
    // Once more each time that the terminal gets another size.
    assert!(shown.matches("nginx (").count() >= 2, "{shown:?}");
    assert!(shown.starts_with("\x1b[?1049h"), "{shown:?}");
    assert!(shown.trim_end().ends_with("\x1b[?1049l"), "{shown:?}");
    assert!(download.process.wait().success());
    download.check();
}
