//! Earlier traffic of a session must not mislead its model of the path.
#![allow(missing_docs, non_snake_case)]

use vtl_link::Link;
use vtl_sim::{
    change::link,
    contest::{Before, Contest, Flow, Kind},
    sim::MS,
};

/// Packets of the transfer.
const BULK: u64 = 8000;

/// Duration of a transfer after earlier traffic of its session, seconds.
fn takes(link: &Link, before: Before) -> f64 {
    let flow = Flow {
        packets: before.all() + BULK,
        before,
        ..Flow::endless(Kind::Vtl)
    };
    let begins = before.takes();
    let shares = Contest::new(link.clone(), vec![flow], begins + 60_000 * MS).run();
    (shares.ends[0] - begins) as f64 / 1e9
}

/// `answers` of `each` packets, every `every` milliseconds.
fn answers(answers: u64, each: u64, every: u64) -> Before {
    Before {
        answers,
        each,
        every: every * MS,
        ..Before::default()
    }
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes long: `make test` runs it, optimised"
)]
fn history__of_small_answers_slows_nothing_down() {
    let paths = [
        (40.0, 200.0, 1.0, 700),
        (100.0, 100.0, 2.0, 800),
        (100.0, 100.0, 0.0, 800),
        (300.0, 20.0, 1.0, 500),
    ];
    for (rtt, rate, loss, queue) in paths {
        let path = link(rtt, rate, loss, queue);
        let fresh = takes(&path, Before::default());
        let thin = [
            answers(1500, 2, 45),
            answers(1500, 10, 45),
            answers(300, 40, 45),
            answers(15, 2, 2000),
        ];
        let known = Before {
            packets: 4000,
            pause: 4000 * MS,
            ..answers(300, 10, 45)
        };
        for before in thin.into_iter().chain([known]) {
            let took = takes(&path, before);
            println!(
                "{rtt} ms, {rate} Mbit/s, {loss} %: {took:.2} s, fresh {fresh:.2} s, {before:?}"
            );
            assert!(took <= 1.05 * fresh);
        }
    }
}

/// A path that becomes shorter: the window that filled it is a queue now, and round trips look the same.
#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes long: `make test` runs it, optimised"
)]
fn history__of_a_longer_path_leaves_no_queue() {
    for (long, short, rate, at) in [
        (123.0, 11.0, 2.5, 3),
        (200.0, 20.0, 20.0, 8),
        (200.0, 20.0, 20.0, 25),
    ] {
        let [long, short] = [long, short].map(|rtt| link(rtt, rate, 0.0, 800));
        let at = at * 1000 * MS;
        let mut contest = Contest::new(long, vec![Flow::endless(Kind::Vtl)], at + 150_000 * MS);
        // After the former minimum round trip is no longer trusted.
        contest.measure_from = at + 90_000 * MS;
        contest.changes = vec![(at, short.clone())];
        let shares = contest.run();
        let queue = shares.queue_p50 / 1e6;
        let rate = shares.rates[0] / short.rate_mbit / 1e6;
        println!("to {} ms: {queue:.1} ms, {rate:.3}", short.rtt_ms);
        assert!(queue < short.rtt_ms, "a queue of {queue:.1} ms");
        assert!(rate > 0.99, "{rate:.3} of the rate");
    }
}

/// Rate in Mbit/s of a transfer that its rings limit, during 30 s on the last of `paths`, after 10 s on each of
/// the others.
fn window_limited_rate(paths: &[Link], slots: u32) -> f64 {
    let mut contest = Contest::new(paths[0].clone(), vec![Flow::endless(Kind::Vtl)], 0);
    let changes = paths.iter().zip(0..).skip(1);
    contest.slots = slots;
    contest.changes = changes.map(|(p, n)| (n * 10_000 * MS, p.clone())).collect();
    contest.measure_from = (paths.len() as u64 - 1) * 10_000 * MS;
    contest.until = contest.measure_from + 30_000 * MS;
    contest.run().rates[0] / 1e6
}

#[test]
#[cfg_attr(
    debug_assertions,
    ignore = "takes long: `make test` runs it, optimised"
)]
fn history__where_rings_limit_a_longer_path_is_followed() {
    for (loss, slots) in [(0.5, 8192), (0.5, 4096), (0.0, 4096), (2.0, 8192)] {
        let paths = [50.0, 300.0, 500.0].map(|rtt| link(rtt, 100.0, loss, 500));
        let rate = window_limited_rate(&paths, slots);
        let fresh = window_limited_rate(&paths[2..], slots);
        println!("{loss} %, {slots} slots: {rate:.1} Mbit/s, fresh {fresh:.1}");
        assert!(rate >= 0.9 * fresh);
    }
}
