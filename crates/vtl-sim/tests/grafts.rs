//! Every graft over a grid of round-trip times, losses, reordering and duplication: each keeps its
//! delivery guarantee.
#![allow(missing_docs, non_snake_case)]

mod runs;

use runs::{failures, none, seeds};
use vtl_link::{Link, LossModel, Random};
use vtl_proto::intf;
use vtl_sim::{
    app::{Lengths, Promise},
    host::{SessionConfig, grafts, text},
    sim::{MS, Outcome, Scenario, Sim},
};

const RTTS: [f64; 3] = [1.0, 20.0, 200.0];
const LOSSES: [(f64, bool); 4] = [(0.0, false), (2.0, false), (10.0, false), (5.0, true)];
const REORDERING: [f64; 2] = [0.0, 5.0];
const DUPLICATION: [f64; 2] = [0.0, 5.0];

fn promise(graft: &str) -> Promise {
    match graft {
        "canonical" | "udp" | "udp-lite" => Promise::Nothing,
        "dccp-ccid2" | "dccp-ccid3" => Promise::Datagrams,
        "partial-reliability" => Promise::Gaps,
        "partial-order" => Promise::Lanes,
        _ => Promise::Everything,
    }
}

fn link(rtt: f64, loss: (f64, bool), reorder: f64, duplicate: f64, seed: u64) -> Link {
    let mut link = Link::new(rtt, 20.0);
    link.seed = seed;
    link.loss_down_pct = Some(loss.0);
    link.loss_up_pct = Some(loss.0 / 2.0);
    if loss.1 {
        link.loss_model = LossModel::BURSTS;
    }
    (link.reorder_pct, link.duplicate_pct) = (reorder, duplicate);
    link
}

#[test]
fn ecn__keeps_queues_short() {
    let run = |graft: &'static str, ecn_ms| {
        let mut link = Link::new(40.0, 20.0);
        link.ecn_ms = ecn_ms;
        let mut scenario = Scenario::bulk(link, 20_000 * MS);
        scenario.measure_from = scenario.until / 4;
        scenario.session = SessionConfig::of(graft);
        scenario.promise = promise(graft);
        let o = Sim::new(scenario).run();
        o.unwrap_or_else(|failure| panic!("{graft}: {failure}"))
    };
    for graft in [
        "stream",
        "newreno",
        "cubic",
        "hybla",
        "dccp-ccid2",
        "dccp-ccid3",
    ] {
        let (drops, marks) = (run(graft, None), run(graft, Some(5.0)));
        assert!(marks.queue_p95 < 10e6, "{graft}: {} ns", marks.queue_p95);
        assert!(marks.goodput > 15e6, "{graft}: {}", marks.goodput);
        assert!(
            marks.retransmitted < 1e-4,
            "{graft}: {}",
            marks.retransmitted
        );
        // Without marks all but one fill the queue.
        assert!(graft == "stream" || drops.queue_p95 > 30e6, "{graft}");
    }
}

/// Checks an outcome against the graft's promise: a description of the failure, or `None`.
fn check(graft: &str, link: &Link, packets: [u64; 2], o: &Outcome) -> Option<String> {
    let [sent, back] = packets;
    match promise(graft) {
        Promise::Everything | Promise::Lanes | Promise::Gaps => (o.packets != [back, sent])
            .then(|| format!("incomplete: {:?} of {packets:?}", o.packets)),
        _ => {
            let came = o.losses.seen.iter().filter(|seen| **seen).count() as f64;
            let share = came / sent as f64;
            let loss = link.loss_down_pct.unwrap_or_default() / 100.0;
            let bursts = matches!(link.loss_model, LossModel::GilbertElliott { .. });
            let slack = if bursts { 0.15 } else { 0.05 };
            // The queue is long enough to lose none.
            ((share - (1.0 - loss)).abs() > slack).then(|| format!("{came} of {sent} came"))
        }
    }
}

#[test]
fn every_graft__keeps_its_promise_over_the_grid() {
    let mut jobs = Vec::new();
    for graft in grafts() {
        let name: &'static str = text(&graft.name).leak();
        for rtt in RTTS {
            for loss in LOSSES {
                for reorder in REORDERING {
                    for duplicate in DUPLICATION {
                        let seed = jobs.len() as u64;
                        jobs.push((name, link(rtt, loss, reorder, duplicate, seed)));
                    }
                }
            }
        }
    }
    let count = jobs.len();
    let failures = failures(jobs, |(name, link)| {
        let mut scenario = Scenario::bulk(link.clone(), 3_600_000 * MS);
        scenario.session = SessionConfig::of(name);
        scenario.promise = promise(name);
        // Few with stop-and-wait, where each packet takes a round trip.
        scenario.packets = if name == "stop-and-wait" {
            [60, 20]
        } else {
            [600, 100]
        };
        if matches!(scenario.promise, Promise::Nothing | Promise::Datagrams) {
            // No losses by a full queue, which unpaced grafts would cause.
            scenario.link.queue_packets = Some(4000);
            scenario.packets = [2000, 100];
        }
        scenario.lengths = Lengths::Random;
        let packets = scenario.packets;
        let wrong = match Sim::new(scenario).run() {
            Ok(outcome) => check(name, &link, packets, &outcome),
            Err(failure) => Some(failure.to_string()),
        };
        wrong.map(|wrong| format!("{name}: {wrong}\n  {link:?}"))
    });
    none(&failures, count);
}

/// Full reliability: random simulations, spread over the grafts that promise it.
#[test]
fn reliable_grafts__never_lose_duplicate_or_reorder() {
    let seeds = seeds(1000);
    let names: Vec<&'static str> = grafts()
        .map(|g| &*text(&g.name).leak())
        .filter(|name| promise(name) == Promise::Everything)
        .collect();
    let failures = failures(seeds.clone().collect(), |seed| {
        let mut rng = Random::new(seed, 3);
        let name = names[(seed % names.len() as u64) as usize];
        let rtt = rng.pick(&[0.2, 2.0, 20.0, 100.0, 600.0]);
        let mut link = Link::new(rtt, rng.pick(&[1.0, 10.0, 100.0]));
        link.seed = seed;
        let losses = [0.0, 1.0, 5.0, 20.0];
        link.loss_down_pct = Some(rng.pick(&losses));
        link.loss_up_pct = Some(rng.pick(&losses));
        if rng.one_in(2) {
            link.loss_model = LossModel::BURSTS;
        }
        link.reorder_pct = rng.pick(&[0.0, 1.0, 20.0]);
        link.duplicate_pct = rng.pick(&[0.0, 1.0, 20.0]);
        link.corrupt_pct = rng.pick(&[0.0, 2.0]);
        link.queue_packets = rng.pick(&[None, Some(3), Some(50)]);
        let mut scenario = Scenario::bulk(link, 7_200_000 * MS);
        scenario.seed = seed;
        // Bursts are counted in packets: one may outlive dozens of timeouts.
        scenario.patience *= 10;
        scenario.lengths = rng.pick(&[Lengths::Full, Lengths::Random]);
        scenario.session = SessionConfig {
            slots: rng.pick(&[16, 64, 1024]),
            max_payload: 512,
            ipv6: rng.one_in(2),
            first_xid: rng.pick(&[1, u32::MAX - 30]),
            rtt_us: rng.pick(&[0, 1, (rtt * 1000.0) as u32]),
            ..SessionConfig::of(name)
        };
        if name == "go-back-n" || name == "selective-repeat" {
            let window = rng.pick(&[1, 2, 16, 100, 1024]);
            scenario.session = scenario.session.with("window", window);
        }
        let max = if name == "stop-and-wait" { 30 } else { 200 };
        scenario.packets = [1 + rng.below(max), rng.below(max / 2)];
        let want = scenario.packets;
        let text = format!("{scenario:?}");
        let wrong = match Sim::new(scenario).run() {
            Ok(o) if o.packets == [want[1], want[0]] => return None,
            Ok(o) => format!("incomplete: {:?} of {want:?}", o.packets),
            Err(failure) => failure.to_string(),
        };
        Some(format!("seed {seed}, {name}: {wrong}\n  {text}"))
    });
    none(&failures, seeds.count());
}

/// Maximum number of packets given up among any `window` consecutive ones.
fn worst(gaps: &[u64], window: u64) -> usize {
    let mut first = 0;
    let mut worst = 0;
    for (last, gap) in gaps.iter().enumerate() {
        while gap - gaps[first] >= window {
            first += 1;
        }
        worst = worst.max(last + 1 - first);
    }
    worst
}

#[test]
fn worst__counts_windows() {
    assert_eq!(worst(&[], 5), 0);
    assert_eq!(worst(&[1, 5, 6, 10, 11], 5), 2);
    assert_eq!(worst(&[1, 2, 3], 3), 3);
}

/// Partial reliability with random bursts, budgets and windows: no window of packets has more gaps than
/// its budget.
#[test]
fn partial_reliability__never_exceeds_its_budget() {
    let seeds = seeds(1000);
    let count = seeds.clone().count();
    let gaps = std::sync::atomic::AtomicU64::new(0);
    let failures = failures(seeds.clone().collect(), |seed| {
        let mut rng = Random::new(seed, 4);
        let rtt = rng.pick(&[1.0, 10.0, 100.0]);
        let mut link = Link::new(rtt, 10.0);
        link.seed = seed;
        link.loss_down_pct = Some(rng.pick(&[2.0, 10.0, 20.0]));
        link.loss_up_pct = Some(rng.pick(&[0.0, 10.0]));
        link.loss_model = LossModel::GilbertElliott {
            burst_packets: rng.pick(&[2.0, 5.0]),
            bad_loss_pct: 100.0,
        };
        link.reorder_pct = rng.pick(&[0.0, 10.0]);
        link.duplicate_pct = rng.pick(&[0.0, 10.0]);
        let loss_window = rng.pick(&[1, 10, 16, 50, 100, 640]);
        let max_loss = rng.pick(&[0, 20, 100, 125, 500, 1000]);
        let mut scenario = Scenario::bulk(link, 7_200_000 * MS);
        scenario.seed = seed;
        scenario.patience *= 10;
        scenario.promise = Promise::Gaps;
        scenario.session = SessionConfig {
            slots: rng.pick(&[64, 1024]),
            max_payload: 512,
            first_xid: rng.pick(&[1, u32::MAX - 30]),
            ..SessionConfig::of("partial-reliability")
        }
        .with("window", rng.pick(&[4, 16, 200]))
        .with("max-loss", max_loss)
        .with("loss-window", loss_window)
        .with("lifetime", rng.pick(&[0, 0, 50]))
        .with("fec", rng.pick(&[0, 0, 2, 8]));
        scenario.packets = [1 + rng.below(600), 0];
        let want = scenario.packets[0];
        let text = format!("{scenario:?}");
        let max = (loss_window * max_loss / 1000).min(64) as usize;
        let wrong = match Sim::new(scenario).run() {
            Ok(o) if o.packets[1] != want => format!("incomplete: {:?} of {want}", o.packets),
            Ok(o) => {
                let worst = worst(&o.losses.gaps, loss_window.into());
                gaps.fetch_add(
                    o.losses.gaps.len() as u64,
                    std::sync::atomic::Ordering::Relaxed,
                );
                if worst <= max {
                    return None;
                }
                format!("{worst} of {loss_window} given up, budget {max}")
            }
            Err(failure) => failure.to_string(),
        };
        Some(format!("seed {seed}: {wrong}\n  {text}"))
    });
    none(&failures, count);
    let gaps = gaps.into_inner();
    assert!(
        gaps > 2 * count as u64,
        "{gaps} packets were given up: that tests nothing"
    );
}

/// What is given up counts once, although acknowledgements show it as missing until the peer has skipped it: where
/// hundreds of packets are under way, many of them.
#[test]
fn partial_reliability__uses_its_budget_with_a_large_window() {
    let given_up = |max_loss| {
        let mut link = Link::new(50.0, 20.0);
        link.loss_down_pct = Some(2.0);
        link.loss_up_pct = Some(0.0);
        link.queue_packets = Some(2000); // nothing adapts to a short one
        let mut scenario = Scenario::bulk(link, 600_000 * MS);
        scenario.promise = Promise::Gaps;
        scenario.packets = [4000, 0];
        scenario.session = SessionConfig::of("partial-reliability")
            .with("window", 512)
            .with("max-loss", max_loss);
        let o = Sim::new(scenario).run().unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(o.packets[1], 4000);
        o.losses.gaps.len()
    };
    let all = given_up(1000);
    assert!((60..100).contains(&all), "{all} of 4,000");
    // Of 100 packets with two losses on average hardly any has more than ten, and few more than five.
    assert_eq!(given_up(100), all);
    let some = given_up(50);
    assert!(some * 10 >= all * 9, "{some} of {all}");
    // One in a hundred; between two are fifty more on average, to the next loss.
    let few = given_up(10);
    assert!((20..=40).contains(&few), "{few}");
}

/// Parity recovers one loss in a group: fewer packets are given up.
#[test]
fn fec__recovers_single_losses() {
    let run = |fec| {
        let mut link = Link::new(50.0, 20.0);
        link.loss_down_pct = Some(3.0);
        link.loss_up_pct = Some(0.0);
        link.queue_packets = Some(2000); // nothing adapts to a short one
        let mut scenario = Scenario::bulk(link, 600_000 * MS);
        scenario.promise = Promise::Gaps;
        scenario.lengths = Lengths::Random;
        scenario.packets = [3000, 0];
        scenario.session = SessionConfig::of("partial-reliability")
            .with("window", 100)
            .with("max-loss", 1000)
            .with("fec", fec);
        let o = Sim::new(scenario).run().unwrap_or_else(|f| panic!("{f}"));
        assert_eq!(o.packets[1], 3000);
        o.losses.gaps.len()
    };
    let (without, with) = (run(0), run(8));
    assert!((60..130).contains(&without), "{without}");
    assert!(with * 2 < without, "{with} of {without}");
}

/// With a second session whose applications and peer break every rule, and with garbled packets, each graft
/// stays within its memory, terminates, and keeps its promise to the honest session.
#[test]
fn every_graft__survives_hostile_neighbours() {
    let mut jobs = Vec::new();
    for graft in grafts() {
        let name: &'static str = text(&graft.name).leak();
        jobs.extend((0..12_u64).map(|seed| (name, seed)));
    }
    let count = jobs.len();
    let failures = failures(jobs, |(name, seed)| {
        let mut link = link(20.0, (2.0, false), 2.0, 2.0, seed);
        link.queue_packets = Some(1000);
        let mut scenario = Scenario::bulk(link.clone(), 120_000 * MS);
        scenario.session = SessionConfig {
            slots: 64,
            ..SessionConfig::of(name)
        };
        if name == "udp-lite" {
            // Damage to what it does not cover is meant to get through.
            scenario.session = scenario.session.with("coverage", intf::VTL_MAX_PAYLOAD);
        }
        scenario.promise = promise(name);
        scenario.hostile = true;
        scenario.garbled_one_in = 20;
        scenario.seed = seed;
        scenario.packets = [100, 20];
        scenario.lengths = Lengths::Random;
        let packets = scenario.packets;
        let wrong = match Sim::new(scenario).run() {
            Ok(o) if o.packets == [packets[1], packets[0]] => None,
            // How many packets such grafts deliver is not known, and hostile neighbours never end.
            Ok(_) if matches!(promise(name), Promise::Nothing | Promise::Datagrams) => None,
            Ok(o) => Some(format!("incomplete: {:?} of {packets:?}", o.packets)),
            Err(failure) => Some(failure.to_string()),
        };
        wrong.map(|wrong| format!("{name}, seed {seed}: {wrong}"))
    });
    none(&failures, count);
}
