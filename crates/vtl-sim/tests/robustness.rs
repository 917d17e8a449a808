//! Random links, readers and hostile neighbours: every packet is delivered exactly once, in order, and no
//! session stalls.
//!
//! `VTL_SIM_SEEDS=FROM..TO` runs other seeds than the default.
#![allow(missing_docs, non_snake_case)]

mod runs;

use runs::{failures, none, seeds};
use vtl_link::{Link, LossModel, Random};
use vtl_sim::{
    app::{Lengths, Pace},
    host::SessionConfig,
    sim::{MS, Scenario, Sim},
};

/// A scenario drawn from a seed: any link, any reader, both directions.
fn draw(seed: u64) -> Scenario {
    let mut rng = Random::new(seed, 1);
    let rtt_ms = rng.pick(&[0.2, 1.0, 10.0, 50.0, 100.0, 300.0, 600.0]);
    let rate = rng.pick(&[1.0, 4.0, 16.0, 100.0, 850.0]);
    let mut link = Link::new(rtt_ms, rate);
    link.seed = seed;
    let losses = [0.0, 0.0, 1.0, 2.0, 5.0, 10.0, 20.0];
    link.loss_down_pct = Some(rng.pick(&losses));
    link.loss_up_pct = Some(rng.pick(&losses));
    if rng.one_in(2) {
        // Bursts are counted in packets: a long one outlives many probe timeouts.
        let (burst_packets, bad_loss_pct) = rng.pick(&[(3.0, 100.0), (8.0, 50.0)]);
        link.loss_model = LossModel::GilbertElliott {
            burst_packets,
            bad_loss_pct,
        };
    }
    link.reorder_pct = rng.pick(&[0.0, 0.0, 1.0, 10.0]);
    link.reorder_ms = rng.pick(&[None, Some(0.5), Some(rtt_ms / 4.0)]);
    link.duplicate_pct = rng.pick(&[0.0, 0.0, 1.0, 10.0]);
    link.corrupt_pct = rng.pick(&[0.0, 0.0, 0.5, 3.0]);
    link.queue_packets = rng.pick(&[None, None, Some(5), Some(32), Some(2000)]);
    let packets = 1 + rng.below(2500);
    let mut scenario = Scenario::bulk(link, 3_000_000 * MS);
    scenario.packets = [packets, rng.pick(&[0, 0, 1, packets / 2])];
    scenario.lengths = rng.pick(&[Lengths::Full, Lengths::Random]);
    scenario.pace = rng.pick(&[
        Pace::AtOnce,
        Pace::AtOnce,
        Pace::Steady {
            packets: 20,
            every_ns: 5 * MS,
        },
        Pace::Pausing { pause_ns: 800 * MS },
    ]);
    scenario.session = SessionConfig {
        slots: rng.pick(&[16, 64, 256, 1024, 8192, 32768]),
        max_payload: rng.pick(&[512, 1440]),
        ipv6: rng.one_in(3),
        first_xid: rng.pick(&[1, 0, u32::MAX - 500, i32::MAX as u32 - 500]),
        rtt_us: rng.pick(&[0, 1, (rtt_ms * 1000.0) as u32]),
        ..Default::default()
    };
    if rng.one_in(4) {
        let from = rng.below(2000) * MS;
        scenario
            .outages
            .push((from, from + (1 + rng.below(4000)) * MS));
    }
    scenario.garbled_one_in = rng.pick(&[0, 0, 10, 100]);
    if scenario.garbled_one_in != 0 {
        // Two opposite flips of one bit would pass the checksum.
        scenario.link.corrupt_pct = 0.0;
    }
    scenario.hostile = rng.one_in(4);
    if scenario.hostile && scenario.link.queue_packets == Some(2000) {
        // The hostile session would fill the queue, and all packets would wait for minutes.
        scenario.link.queue_packets = None;
    }
    scenario.seed = seed;
    scenario
}

/// Runs a seed. Returns a description of the failure, if any.
fn try_seed(seed: u64) -> Option<String> {
    let scenario = draw(seed);
    let want = scenario.packets;
    let description = format!("{scenario:?}");
    let failure = match Sim::new(scenario).run() {
        Ok(outcome) if outcome.packets == [want[1], want[0]] => return None,
        Ok(outcome) => format!("incomplete: {:?} of {want:?}", outcome.packets),
        Err(failure) => failure.to_string(),
    };
    Some(format!("seed {seed}: {failure}\n  {description}"))
}

#[test]
fn any_link__delivers_everything_exactly_once_and_in_order() {
    let seeds = seeds(200);
    let failures = failures(seeds.clone().collect(), try_seed);
    none(&failures, seeds.count());
}

/// Time of a transfer's end, ms.
fn end(link: Link, packets: u64, outages: Vec<(u64, u64)>) -> f64 {
    let mut scenario = Scenario::bulk(link, 100_000 * MS);
    scenario.packets = [packets, 0];
    scenario.session.slots = 8192;
    scenario.session.rtt_us = (scenario.link.rtt_ms * 1000.0) as u32;
    scenario.outages = outages;
    let outcome = Sim::new(scenario).run().unwrap_or_else(|f| panic!("{f}"));
    assert_eq!(outcome.packets[1], packets);
    outcome.end as f64 / MS as f64
}

/// By how much an outage from `from` to `to` (ms) delays the end of a transfer of 10 s, milliseconds.
fn cost_of_outage(rtt_ms: f64, rate_mbit: f64, from: u64, to: u64) -> f64 {
    let packets = (rate_mbit * 10e6 / 8.0 / 1440.0) as u64;
    let end = |outages| end(Link::new(rtt_ms, rate_mbit), packets, outages);
    end(vec![(from * MS, to * MS)]) - end(Vec::new())
}

#[test]
fn outage_at_the_end__costs_a_few_round_trips() {
    let cost = cost_of_outage(600.0, 100.0, 13_000, 14_000);
    assert!(cost < f64::from(1000 + 5 * 600), "{cost} ms");
    for from in 10_700..10_710 {
        let cost = cost_of_outage(100.0, 100.0, from, 11_000);
        assert!(cost < f64::from(300 + 5 * 100), "{cost} ms");
    }
}

/// A random outage in the last round trips of a transfer: by how much it delays the end, and the limit for
/// that, ms.
fn outage(seed: u64) -> (f64, f64) {
    let mut rng = Random::new(seed, 2);
    let rtt = rng.pick(&[1.0, 10.0, 50.0, 100.0, 300.0, 600.0]);
    let mut link = Link::new(rtt, rng.pick(&[1.0, 10.0, 100.0]));
    link.queue_packets = rng.pick(&[None, Some(16), Some(1000)]);
    link.seed = seed;
    let packets = rng.pick(&[1, 3, 46, 700, 3000]);
    let normal = end(link.clone(), packets, Vec::new());
    let from = (normal - 3.0 * rtt * rng.unit()).max(0.0);
    let long = rtt * 0.1 * 100.0_f64.powf(rng.unit());
    let outage = ((from * 1e6) as u64, ((from + long) * 1e6) as u64);
    let queue = u64::from(link.queue_limit()).min(packets) as f64 * 12.0 / link.rate_mbit;
    let cost = end(link, packets, vec![outage]) - normal;
    // The distance of timeouts grows with the length of the outage and with the round trip, queue included.
    (cost, 3.0 * long + 12.0 * rtt + 500.0 + 4.0 * queue)
}

#[test]
fn outage_at_the_end__never_stalls_a_transfer() {
    for seed in seeds(300) {
        let (cost, max) = outage(seed);
        assert!(cost < max, "seed {seed}: {cost} of {max} ms");
    }
}

/// After the last acknowledgement there may be no event any more: the simulation must end then, not at the
/// scenario's limit as if the transfer had stalled.
#[test]
fn simulation__ends_with_the_last_acknowledgement() {
    // The first packets are lost, and a probe timeout's packet is the last.
    let cost = |outage| end(Link::new(100.0, 10.0), 1, vec![(0, outage * MS)]);
    for outage in 1..400 {
        let at = cost(outage);
        assert!(at < 1000.0, "{at} ms, outage of {outage} ms");
    }
}
