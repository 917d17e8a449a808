//! How true the emulator is, end to end: what `ping` and UDP sockets see, not what it says of itself.

#![allow(non_snake_case, reason = "tests are named `function__case`")]

#[path = "common/mod.rs"]
mod common;

use std::net::IpAddr;
use std::time::Duration;

use common::{flood, testbed, turn, within_three_attempts};
use vtl_testbed::{Host, Link, LossModel, Testbed};

fn check(good: bool, figures: String) -> Result<String, String> {
    if good { Ok(figures) } else { Err(figures) }
}

/// Round-trip times that `ping` measures, milliseconds, sorted.
fn ping(testbed: &Testbed, to: IpAddr, count: u32, interval: f64) -> Vec<f64> {
    let output = testbed
        .command(Host::Client, "ping")
        .expect("a command")
        .args([
            "-n",
            "-c",
            &count.to_string(),
            "-i",
            &interval.to_string(),
            "-W",
            "3",
            &to.to_string(),
        ])
        .output()
        .expect("ping runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut times: Vec<f64> = text
        .lines()
        .filter_map(|l| l.split_once("time=")?.1.split(' ').next()?.parse().ok())
        .collect();
    times.sort_by(f64::total_cmp);
    assert_eq!(
        times.len(),
        count as usize,
        "a perfect link loses no ping: {text}"
    );
    times
}

#[test]
fn ping__within_two_milliseconds_or_two_per_cent() {
    let Some(_turn) = turn("ping", &["ip", "ping"]) else {
        return;
    };
    let testbed = testbed("t-acc-ping", &Link::default());
    let ends: [IpAddr; 2] = [
        testbed.addr4(Host::Server).into(),
        testbed.addr6(Host::Server).into(),
    ];
    for (rtt, rate) in [
        (0.0, 0.0),
        (10.0, 16.0),
        (50.0, 850.0),
        (100.0, 100.0),
        (600.0, 4.0),
    ] {
        for to in ends {
            within_three_attempts(|| {
                testbed.set(&Link::new(rtt, rate)).expect("set");
                let times = ping(&testbed, to, 6, 0.05);
                let allowed = f64::max(2.0, rtt * 0.02);
                let good = times.iter().all(|t| (t - rtt).abs() <= allowed);
                check(
                    good,
                    format!("RTT {rtt} ms at {rate} Mbit/s to {to}: {times:?} ms"),
                )
            });
        }
    }
}

#[test]
fn flood__rate_within_three_per_cent() {
    let Some(_turn) = turn("flood", &["ip"]) else {
        return;
    };
    let testbed = testbed("t-acc-rate", &Link::default());
    for (rate, rtt) in [(4.0, 600.0), (16.0, 10.0), (100.0, 100.0), (850.0, 50.0)] {
        within_three_attempts(|| {
            testbed.set(&Link::new(rtt, rate)).expect("set");
            let before = testbed.stats().expect("stats");
            let got = flood(
                &testbed,
                Host::Client,
                Host::Server,
                rate * 1.15,
                Duration::from_millis(1500),
            );
            let after = testbed.stats().expect("stats");
            let figures = format!(
                "{rate} Mbit/s: {:.2} Mbit/s, {} sent, {} received, {} dropped by the queue, {} by the host, up to {} us late",
                got.mbit,
                got.sent,
                got.received,
                after.up.queue_drops - before.up.queue_drops,
                after.up.host_drops + after.up.send_errors,
                after.up.max_late_us,
            );
            check((got.mbit / rate - 1.0).abs() <= 0.03, figures)
        });
    }
}

#[test]
fn capacity__850_mbit_of_full_packets_without_a_loss() {
    let Some(_turn) = turn("capacity", &["ip"]) else {
        return;
    };
    let testbed = testbed(
        "t-acc-cap",
        &Link {
            queue_packets: Some(10_000),
            ..Link::new(20.0, 1000.0)
        },
    );
    for (from, to) in [(Host::Client, Host::Server), (Host::Server, Host::Client)] {
        within_three_attempts(|| {
            let got = flood(&testbed, from, to, 870.0, Duration::from_secs(2));
            let stats = testbed.stats().expect("stats");
            let figures = format!(
                "from {from:?}: {:.1} Mbit/s, {} of {} packets, {stats:?}",
                got.mbit, got.received, got.sent
            );
            check(got.mbit >= 850.0 && got.received == got.sent, figures)
        });
    }
}

#[test]
fn loss__within_three_standard_errors() {
    let Some(_turn) = turn("loss", &["ip"]) else {
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
        for (from, to, pct) in [
            (Host::Client, Host::Server, up),
            (Host::Server, Host::Client, down),
        ] {
            within_three_attempts(|| {
                testbed.set(&link).expect("set");
                let got = flood(&testbed, from, to, 250.0, Duration::from_secs(1));
                let (p, n) = (pct / 100.0, got.sent as f64);
                let error = (p * (1.0 - p) / n).sqrt();
                let loss = 1.0 - got.received as f64 / n;
                let figures = format!(
                    "{pct} % from {from:?}: {:.3} % of {} packets, standard error {:.3} %",
                    loss * 100.0,
                    got.sent,
                    error * 100.0
                );
                check((loss - p).abs() <= 3.0 * error, figures)
            });
        }
    }
}

#[test]
fn loss__bursts_have_the_same_mean() {
    let Some(_turn) = turn("bursts", &["ip"]) else {
        return;
    };
    let link = Link {
        loss_pct: 5.0,
        loss_model: LossModel::BURSTS,
        ..Link::new(20.0, 0.0)
    };
    let testbed = testbed("t-acc-burst", &link);
    within_three_attempts(|| {
        let got = flood(
            &testbed,
            Host::Server,
            Host::Client,
            300.0,
            Duration::from_secs(2),
        );
        let (p, n, burst) = (0.05, got.sent as f64, 8.0);
        // Losses of one burst are not independent: the variance is about 2·burst − 1 times the uniform one.
        let error = (p * (1.0 - p) / n * (2.0 * burst - 1.0)).sqrt();
        let loss = 1.0 - got.received as f64 / n;
        check(
            (loss - p).abs() <= 3.0 * error,
            format!("bursts: {:.3} % of {} packets", loss * 100.0, got.sent),
        )
    });
}
