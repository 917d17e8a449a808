//! Duration of short transfers over paths of any rate and queue: the first transfer of a session, and one
//! after another.
#![allow(missing_docs, non_snake_case)]

use std::{
    env, fs, iter,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use vtl_link::{Link, LossModel, Nanos, Profile, Random};
use vtl_sim::{
    change::link,
    contest::{Before, Contest, Flow, Kind},
    sim::MS,
};

/// Time limit of a transfer.
const LIMIT: Nanos = 600_000 * MS;

/// Measurement of a transfer.
#[derive(Clone, Copy, Debug)]
struct Took {
    /// Duration from the first packet to the arrival of the last, ms.
    ms: f64,
    /// Retransmissions, as a share of the packets sent.
    again: f64,
}

/// Measures a transfer of `packets` packets after the traffic `before`.
fn transfer(link: &Link, packets: u64, before: Before) -> Took {
    let flow = Flow {
        packets: before.all() + packets,
        before,
        ..Flow::endless(Kind::Vtl)
    };
    let begins = before.takes();
    let mut contest = Contest::new(link.clone(), vec![flow], begins + LIMIT);
    contest.slots = (4.0 * link.bdp_bytes() as f64 / 1500.0) as u32;
    contest.slots = contest.slots.clamp(1024, 16_384).next_power_of_two();
    let [mut sent, mut again] = [[0; 2]; 2];
    let shares = contest.run_watched(&mut |now, _, tx| {
        let place = usize::from(now >= begins);
        (sent[place], again[place]) = (tx.sent, tx.retransmitted);
    });
    let end = match shares.ends[0] {
        0 => begins + LIMIT,
        end => end,
    };
    Took {
        ms: (end - begins) as f64 / 1e6,
        again: (again[1] - again[0]) as f64 / (sent[1] - sent[0]).max(1) as f64,
    }
}

/// The first transfer of a session.
fn new(link: &Link, packets: u64) -> Took {
    transfer(link, packets, Before::default())
}

/// The second transfer of a session, a second after the first.
fn known(link: &Link, packets: u64) -> Took {
    let before = Before {
        packets,
        pause: (new(link, packets).ms * 1e6) as u64 + 1000 * MS,
        every: MS,
        ..Before::default()
    };
    transfer(link, packets, before)
}

/// A link of the sweep: group, name, link.
type Named = (&'static str, String, Link);

/// The links of the thesis.
fn profiles() -> impl Iterator<Item = Named> {
    let all = [
        Profile::Satellite,
        Profile::Terrestrial,
        Profile::Lan,
        Profile::Campus,
        Profile::Lte,
    ];
    all.into_iter().flat_map(|profile| {
        [0.0, 2.0, 5.0].map(|loss| {
            let mut link = profile.link();
            (link.loss_down_pct, link.loss_up_pct) = (Some(loss), Some(0.0));
            ("profiles", format!("{profile}-{loss}"), link)
        })
    })
}

/// A random link. `short`: slow, with a queue of 8 to 64 packets; else as in `vtl select measure`.
fn drawn(number: u64, short: bool) -> Named {
    let mut random = Random::new(number << 8 | u64::from(short), 1);
    let mut between = |min: f64, max: f64| min * f64::powf(max / min, random.unit());
    let (rtt, rate) = if short {
        (between(4.0, 300.0), between(0.5, 30.0))
    } else {
        (between(1.0, 700.0), between(1.0, 1000.0))
    };
    let (loss, burst, few) = (between(0.05, 20.0), between(2.0, 16.0), between(8.0, 64.0));
    let loss = if random.chance(if short { 0.7 } else { 0.2 }) {
        0.0
    } else {
        loss
    };
    let product = rtt * rate * 1000.0 / 12_000.0;
    let queue = (product * random.pick(&[0.5, 1.0, 2.0])).max(16.0);
    let mut link = link(rtt, rate, loss, if short { few } else { queue } as u32);
    if random.chance(0.4) {
        link.loss_model = LossModel::GilbertElliott {
            burst_packets: burst,
            bad_loss_pct: 100.0,
        };
    }
    let group = if short { "short" } else { "random" };
    (group, format!("{group}-{number}"), link)
}

/// Rows of a link, comma-separated.
fn rows((group, name, link): &Named) -> String {
    let mut out = String::new();
    let is_random = link.loss_down() > 0.0 || link.slots.is_some();
    for (packets, runs) in [(3, 30), (46, 30), (729, 8), (11_651, 2)] {
        // At most half a minute on a link without loss.
        if packets as f64 * 0.012 / link.rate_mbit > 30.0 {
            continue;
        }
        let runs = if is_random { runs } else { 1 };
        let mut link = link.clone();
        let mut all = [Vec::new(), Vec::new()];
        for seed in 0..runs {
            link.seed = seed + 1;
            all[0].push(new(&link, packets));
            all[1].push(known(&link, packets));
        }
        for (kind, mut all) in iter::zip(["new", "known"], all) {
            all.sort_by(|a, b| b.ms.total_cmp(&a.ms));
            let mean = |of: &[Took]| of.iter().map(|t| t.ms).sum::<f64>() / of.len() as f64;
            out += &format!(
                "{group},{name},{:.3},{:.3},{:.3},{},{packets},{kind},{:.2},{:.2},{:.4}\n",
                link.rtt_ms,
                link.rate_mbit,
                link.loss_down(),
                link.queue_limit(),
                mean(&all),
                mean(&all[..all.len().div_ceil(4)]),
                all.iter().map(|t| t.again).sum::<f64>() / all.len() as f64,
            );
        }
    }
    out
}

/// Writes the durations of transfers of four sizes on many links to the file STARTS. LINKS=n: n random links of
/// each group.
#[test]
#[ignore = "takes minutes, and only shows"]
fn starts__on_many_links() {
    let count = env::var("LINKS").map_or(300, |n| n.parse().expect("a number"));
    let drawn = (0..count).flat_map(|n| [drawn(n, true), drawn(n, false)]);
    let links: Vec<Named> = profiles().chain(drawn).collect();
    let parts = Mutex::new(vec![String::new(); links.len()]);
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let place = next.fetch_add(1, Ordering::Relaxed);
                    let Some(link) = links.get(place) else { break };
                    let text = rows(link);
                    parts.lock().expect("nobody panics with it")[place] = text;
                }
            });
        }
    });
    let head =
        "group,link,rtt_ms,rate_mbit,loss_pct,queue,packets,session,ms,slowest_quarter_ms,again\n";
    let text = head.to_owned() + &parts.into_inner().expect("nobody panics with it").concat();
    match env::var_os("STARTS") {
        Some(file) => fs::write(file, text).expect("a file that can be written"),
        None => print!("{text}"),
    }
}

/// 64 KiB, as the first and as the second transfer: limits as multiples of the time that the bottleneck needs.
#[test]
fn starts__on_a_short_queue_retransmit_little() {
    let paths = [
        ((16.0, 1.57, 16), 1.05, 1.05),
        ((16.0, 1.57, 100), 1.05, 1.05),
        ((100.0, 2.0, 16), 1.45, 1.45),
        ((40.0, 5.0, 10), 1.2, 1.05),
        ((10.0, 16.0, 16), 1.25, 1.1),
        ((100.0, 10.0, 20), 2.9, 1.35),
    ];
    for ((rtt, rate, queue), max_new, max_known) in paths {
        let link = link(rtt, rate, 0.0, queue);
        let min = 46.0 * 1500.0 * 8.0 / rate / 1e3 + rtt / 2.0;
        let (new, known) = (new(&link, 46), known(&link, 46));
        println!("{rtt} ms, {rate} Mbit/s, {queue}: {min:.0} ms, {new:.2?}, {known:.2?}");
        assert!(new.ms < max_new * min && new.again < 0.55);
        assert!(known.ms < max_known * min && known.again < 0.05);
    }
}
