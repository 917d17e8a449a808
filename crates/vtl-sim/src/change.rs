//! Paths that change under a transfer.

use std::{fmt, thread};

use vtl_link::{Link, Nanos, Random};

use crate::{
    contest::{Contest, Flow, Kind, Shares},
    models::Model,
    sim::MS,
};

/// Duration of a measurement after the change.
const AFTERMATH: Nanos = 30_000 * MS;

/// A path, and its change.
#[derive(Clone, Debug)]
pub struct Change {
    /// The link before.
    pub before: Link,
    /// The link after.
    pub after: Link,
    /// Time of the change.
    pub at: Nanos,
}

/// Performance of a transfer in the 30 s after a change.
#[derive(Clone, Copy, Debug)]
pub struct Fate {
    /// Rate on the link, bit/s, without retransmissions.
    pub rate: f64,
    /// Longest standing queue, as in [`Shares::standing`], seconds.
    pub standing: f64,
}

/// Performance of three transfers after a change.
#[derive(Clone, Copy, Debug)]
pub struct Aftermath {
    /// Of `stream`.
    pub stream: Fate,
    /// Of `stream` started after the change.
    pub fresh: Fate,
    /// Of a model of TCP under BBR, version 1.
    pub bbr: Fate,
}

impl Aftermath {
    /// Rate of `stream`, as a share of the one started after the change.
    pub fn share(&self) -> f64 {
        self.stream.rate / self.fresh.rate
    }
}

/// A link with this loss in the direction of the data only.
pub fn link(rtt_ms: f64, rate_mbit: f64, loss_pct: f64, queue_packets: u32) -> Link {
    let mut link = Link::new(rtt_ms, rate_mbit);
    link.loss_down_pct = Some(loss_pct);
    link.loss_up_pct = Some(0.0);
    link.queue_packets = Some(queue_packets);
    link
}

/// Log-uniform random number between two bounds.
fn between(dice: &mut Random, min: f64, max: f64) -> f64 {
    let part = dice.below(1 << 20) as f64 / f64::from(1 << 20);
    min * (max / min).powf(part)
}

impl Change {
    /// A random change of round trip, rate, loss, or round trip and rate, by up to a factor of
    /// twenty, in the first nine seconds.
    pub fn random(seed: u64) -> Self {
        let dice = &mut Random::new(seed, 7);
        let (rtt, rate) = (between(dice, 5.0, 400.0), between(dice, 2.0, 200.0));
        let loss = match dice.below(5) {
            0 | 1 => 0.0,
            _ => between(dice, 0.1, 5.0),
        };
        let products = between(dice, 0.5, 4.0);
        let queue = ((rtt * rate * 125.0 / 1500.0 * products) as u32).max(32);
        let mut before = link(rtt, rate, loss, queue);
        before.seed = seed;
        let mut after = before.clone();
        let kind = dice.below(4);
        if kind == 0 || kind == 3 {
            after.rtt_ms = (rtt * between(dice, 0.05, 20.0)).clamp(2.0, 1000.0);
        }
        if kind == 1 || kind == 3 {
            after.rate_mbit = (rate * between(dice, 0.05, 20.0)).clamp(1.0, 400.0);
        }
        if kind == 2 {
            after.loss_down_pct = Some((loss.max(0.2) * between(dice, 0.05, 20.0)).min(5.0));
        }
        Self {
            before,
            after,
            at: (1000 + dice.below(8000)) * MS,
        }
    }

    fn run(&self, kind: Kind, is_fresh: bool) -> Fate {
        let first = if is_fresh { &self.after } else { &self.before };
        let flows = vec![Flow::endless(kind)];
        let mut contest = Contest::new(first.clone(), flows, AFTERMATH);
        contest.slots = 32_768;
        contest.measure_from = 0;
        if !is_fresh {
            contest.changes = vec![(self.at, self.after.clone())];
            contest.measure_from = self.at;
            contest.until += self.at;
        }
        let Shares {
            rates, standing, ..
        } = contest.run();
        Fate {
            rate: rates[0],
            standing: standing as f64 / 1e9,
        }
    }

    /// Measures the three transfers.
    pub fn measure(&self) -> Aftermath {
        Aftermath {
            stream: self.run(Kind::Vtl, false),
            fresh: self.run(Kind::Vtl, true),
            bbr: self.run(Kind::Tcp(Model::Bbr), false),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loss = |link: &Link| link.loss_down_pct.unwrap_or(link.loss_pct);
        write!(
            f,
            "{:.0}-{:.0} ms, {:.0}-{:.0} Mbit/s, {:.1}-{:.1} %, {} packets, at {:.1} s",
            self.before.rtt_ms,
            self.after.rtt_ms,
            self.before.rate_mbit,
            self.after.rate_mbit,
            loss(&self.before),
            loss(&self.after),
            self.before.queue_packets.unwrap_or(0),
            self.at as f64 / 1e9,
        )
    }
}

/// Measures all changes, on all CPUs.
///
/// # Panics
/// As [`Contest::run`].
pub fn measure_all(changes: &[Change]) -> Vec<Aftermath> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let part = changes.len().div_ceil(threads).max(1);
    thread::scope(|scope| {
        let begun: Vec<_> = changes
            .chunks(part)
            .map(|part| scope.spawn(|| part.iter().map(Change::measure).collect::<Vec<_>>()))
            .collect();
        let done = begun.into_iter().map(|t| t.join().expect("it ends"));
        done.flatten().collect()
    })
}
