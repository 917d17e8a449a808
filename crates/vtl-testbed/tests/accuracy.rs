//! Accuracy of the emulator, end to end: as `ping` and UDP sockets see it, not by its own counters.
//!
//! A busy machine makes packets late, never early, and its drops are counted: tests assert only that. How late
//! they are is measured by the ignored tests (`make soak`), on an idle machine.

#![allow(non_snake_case, reason = "tests are named `function__case`")]

#[path = "common/mod.rs"]
mod common;

use std::net::IpAddr;
use std::time::Duration;

use common::{Flood, flood, median, testbed, turn, within};
use vtl_testbed::{Host, Link, LossModel, Testbed};

/// Round-trip times, ms, and rates, Mbit/s.
const PINGED: [(f64, f64); 5] = [
    (0.0, 0.0),
    (10.0, 16.0),
    (50.0, 850.0),
    (100.0, 100.0),
    (600.0, 4.0),
];
const FLOODED: [(f64, f64); 4] = [(600.0, 4.0), (10.0, 16.0), (100.0, 100.0), (50.0, 850.0)];

/// Round-trip times that `ping` measures, milliseconds.
fn ping(testbed: &Testbed, to: IpAddr) -> Vec<f64> {
    const COUNT: usize = 6;
    let output = testbed
        .command(Host::Client, "ping")
        .expect("a command")
        .args(["-n", "-i", "0.05", "-W", "60", "-c", &COUNT.to_string()])
        .arg(to.to_string())
        .output()
        .expect("ping runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let times: Vec<f64> = text
        .lines()
        .filter_map(|l| l.split_once("time=")?.1.split(' ').next()?.parse().ok())
        .collect();
    assert_eq!(times.len(), COUNT, "a perfect link loses no ping: {text}");
    times
}

/// Pings over all links and both versions of IP: the link's round-trip time, and those measured.
fn pings(name: &str) -> Option<Vec<(f64, Vec<f64>)>> {
    let _turn = turn(&["ip", "ping"])?;
    let testbed = testbed(name, &Link::default());
    let ends: [IpAddr; 2] = [
        testbed.addr4(Host::Server).into(),
        testbed.addr6(Host::Server).into(),
    ];
    let over = |(rtt, rate)| {
        testbed.set(&Link::new(rtt, rate)).expect("set");
        ends.map(|to| (rtt, ping(&testbed, to)))
    };
    Some(PINGED.into_iter().flat_map(over).collect())
}

#[test]
fn ping__never_sooner_than_the_delay() {
    for (rtt, times) in pings("t-acc-ping").unwrap_or_default() {
        // ping prints three digits.
        let early = |t: &f64| *t < rtt * 0.999 - 0.01;
        assert!(!times.iter().any(early), "{rtt} ms: {times:?}");
    }
}

#[test]
#[ignore = "measures: make soak"]
fn ping__within_two_milliseconds_or_two_per_cent() {
    for (rtt, times) in pings("t-acc-ping-quiet").unwrap_or_default() {
        let late = median(times.clone()) - rtt;
        assert!(late <= f64::max(2.0, rtt * 0.02), "{rtt} ms: {times:?}");
    }
}

/// Floods a link with 15 % more than its rate.
fn flood_beyond(testbed: &Testbed, (rtt, rate): (f64, f64)) -> Flood {
    testbed.set(&Link::new(rtt, rate)).expect("set");
    let time = Duration::from_millis(1500);
    let got = flood(testbed, Host::Client, Host::Server, rate * 1.15, time);
    eprintln!("{rate} Mbit/s: {got:?}");
    got
}

#[test]
fn flood__never_faster_than_the_rate() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let testbed = testbed("t-acc-rate", &Link::default());
    for (rtt, rate) in FLOODED {
        let got = flood_beyond(&testbed, (rtt, rate));
        // Since before the first packet was sent: its serialisation counts, too.
        let min = got.received as f64 * 12_000.0 / (rate * 1e6) + rtt / 2e3;
        assert!(
            got.until_last.as_secs_f64() >= min * 0.999,
            "{rate} Mbit/s: {got:?}"
        );
        assert_ne!(got.received, 0);
    }
}

#[test]
#[ignore = "measures: make soak"]
fn flood__rate_within_three_per_cent() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let testbed = testbed("t-acc-rate-quiet", &Link::default());
    for (rtt, rate) in FLOODED {
        let rates = (0..5).map(|_| flood_beyond(&testbed, (rtt, rate)).mbit);
        let median = median(rates.collect());
        assert!((median / rate - 1.0).abs() <= 0.03, "{rate}: {median}");
    }
}

#[test]
#[ignore = "measures: make soak"]
fn capacity__850_mbit_of_full_packets() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let link = Link {
        queue_packets: Some(10_000),
        ..Link::new(20.0, 1000.0)
    };
    let testbed = testbed("t-acc-cap", &link);
    for (from, to) in [(Host::Client, Host::Server), (Host::Server, Host::Client)] {
        let floods: Vec<Flood> = (0..5)
            .map(|_| flood(&testbed, from, to, 870.0, Duration::from_secs(2)))
            .collect();
        let median = median(floods.iter().map(|f| f.mbit).collect());
        assert!(median >= 850.0, "from {from:?}: {floods:?}");
        let whole = floods.iter().filter(|f| f.received == f.sent).count();
        assert!(whole > 2, "from {from:?}: {floods:?}");
    }
}

/// Asserts that losses are as frequent as the model says, all are counted, and nothing else is missing.
fn lost_as_the_model_says(testbed: &Testbed, link: &Link, variance: f64) {
    for (from, to, pct) in [
        (Host::Client, Host::Server, link.loss_up()),
        (Host::Server, Host::Client, link.loss_down()),
    ] {
        testbed.set(link).expect("set");
        let got = flood(testbed, from, to, 250.0, Duration::from_secs(1));
        let lost = got.link.lost;
        eprintln!("{pct} % from {from:?}: {lost} lost, {got:?}");
        within(lost, got.link.rx_packets, pct, variance);
        let missing = got.sent - got.received;
        let counted = lost + got.link.queue_drops + got.link.host_drops + got.link.send_errors;
        assert!(missing <= counted, "{missing} missing: {got:?}");
        assert!(got.received <= got.link.tx_packets, "{got:?}");
    }
}

#[test]
fn loss__matches_the_model_and_is_counted() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let testbed = testbed("t-acc-loss", &Link::default());
    for (down, up) in [(1.0, 0.0), (2.0, 2.0), (5.0, 1.0)] {
        let link = Link {
            loss_down_pct: Some(down),
            loss_up_pct: Some(up),
            queue_packets: Some(1000),
            ..Link::new(20.0, 400.0)
        };
        lost_as_the_model_says(&testbed, &link, 1.0);
    }
}

#[test]
fn loss__bursts_have_the_same_mean() {
    let Some(_turn) = turn(&["ip"]) else {
        return;
    };
    let link = Link {
        loss_pct: 5.0,
        loss_model: LossModel::BURSTS,
        ..Link::new(20.0, 0.0)
    };
    let testbed = testbed("t-acc-burst", &link);
    // Losses of one burst, of 8 packets in the mean, are not independent: the variance is about
    // 2 * 8 - 1 times that of independent losses.
    lost_as_the_model_says(&testbed, &link, 15.0);
}
