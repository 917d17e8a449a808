//! How `stream` and its neighbours share a bottleneck: the matrix of links, queues, losses and
//! round trips that fairness is judged by.

use std::{fmt::Write, thread};

use vtl_link::{Nanos, Profile};

use crate::{
    contest::{Contest, Flow, Kind, Shares},
    models::Model,
    sim::MS,
};

/// Links, with their round-trip time in ms and their rate in Mbit/s.
pub const LINKS: [(Profile, f64, f64); 4] = [
    (Profile::Campus, 10.0, 16.0),
    (Profile::Lte, 40.0, 20.0),
    (Profile::Terrestrial, 100.0, 100.0),
    (Profile::Satellite, 600.0, 4.0),
];

/// Limits of the bottleneck's queue, bandwidth-delay products.
pub const QUEUES: [f64; 3] = [0.5, 1.0, 4.0];

/// Neighbours, with their names.
pub const NEIGHBOURS: [(&str, Model); 2] = [("CUBIC", Model::Cubic), ("BBR", Model::Bbr)];

/// Duration of a contest.
const SPAN: Nanos = 60_000 * MS;
/// Delay of the second flow's start, and of each further one's, where flows start together.
const TOGETHER: Nanos = 100 * MS;
/// The same where they start apart.
const APART: Nanos = 5_000 * MS;

/// Flows on one of the links.
#[derive(Clone, Debug)]
pub struct Cell {
    /// The link: an index of [`LINKS`].
    pub link: usize,
    /// Limit of the queue, bandwidth-delay products.
    pub queue: f64,
    /// Random loss of the data, per cent.
    pub loss_pct: f64,
    /// The flows' senders, and the multiple of the link's round-trip time that each one has.
    pub flows: Vec<(Kind, u64)>,
    /// Interval between the flows' starts.
    pub every: Nanos,
    /// Seed of the link.
    pub seed: u64,
}

impl Cell {
    /// Flows of equal round-trip times, without random loss.
    pub fn new(link: usize, queue: f64, kinds: &[Kind]) -> Self {
        Self {
            link,
            queue,
            loss_pct: 0.0,
            flows: kinds.iter().map(|kind| (*kind, 1)).collect(),
            every: TOGETHER,
            seed: 1,
        }
    }

    /// Runs the contest. Measured are all 60 s; where flows start apart, the last half.
    pub fn contest(&self) -> Contest {
        let (profile, rtt_ms, rate_mbit) = LINKS[self.link];
        let mut link = profile.link();
        let product = rtt_ms * rate_mbit * 125.0 / 1500.0;
        link.queue_packets = Some((self.queue * product).round().max(4.0) as u32);
        link.loss_down_pct = Some(self.loss_pct);
        link.loss_up_pct = Some(0.0);
        link.seed = self.seed;
        let flow = |(i, (kind, times)): (usize, &(Kind, u64))| Flow {
            start: i as u64 * self.every,
            access: (times - 1) * (rtt_ms * MS as f64) as u64,
            ..Flow::endless(*kind)
        };
        let flows = self.flows.iter().enumerate().map(flow).collect();
        let mut contest = Contest::new(link, flows, SPAN);
        contest.measure_from = if self.every == APART { SPAN / 2 } else { 0 };
        contest
    }

    /// Runs the contest.
    ///
    /// # Panics
    /// As [`Contest::run`].
    pub fn run(&self) -> Shares {
        self.contest().run()
    }

    /// Rate of the link, bit/s.
    fn rate(&self) -> f64 {
        LINKS[self.link].2 * 1e6
    }

    /// Median queue in bandwidth-delay products.
    fn depth(&self, shares: &Shares) -> f64 {
        shares.queue_p50 / (LINKS[self.link].1 * MS as f64)
    }
}

/// The table.
///
/// # Panics
/// If a transport function fails.
pub fn table() -> String {
    let parts: Vec<String> = (0..LINKS.len()).map(section).collect();
    HEAD.to_owned() + &parts.concat()
}

/// The part of the table about one link: an index of [`LINKS`].
///
/// # Panics
/// As [`table`].
pub fn section(link: usize) -> String {
    let (profile, rtt, rate) = LINKS[link];
    let title = format!("\n{}: {rtt} ms, {rate} Mbit/s\n", profile.name());
    // Independent: one thread each.
    let parts: Vec<String> = thread::scope(|scope| {
        let all = QUEUES.map(|queue| scope.spawn(move || row(link, queue)));
        all.into_iter()
            .map(|t| t.join().expect("contests that end"))
            .collect()
    });
    title + &parts.concat()
}

const HEAD: &str = "# stream beside one flow of another control, simulated, 60 s: shares of the rate in per cent, \
     stream first.\n\
     # `equal`: equal round-trip times; `far`, `near`: four times the link's round-trip time for stream, or for\n\
     # the other; `1 %`: equal, random loss, and the other's rate as a multiple of that beside its own kind;\n\
     # `queue`: median of the queue at equal round-trip times, bandwidth-delay products. `four`: Jain's index of\n\
     # four flows of stream, together, and 5 s apart in the last 30 s, and their queues; the queue of one alone.\n\
     # UPDATE_RESULTS=1 cargo test --release -p vtl-sim --test results -- --ignored neighbours   writes this file.\n";

/// The rows of one queue on one link.
fn row(link: usize, queue: f64) -> String {
    let mut out = String::new();
    for (name, model) in NEIGHBOURS {
        let both = [Kind::Vtl, Kind::Tcp(model)];
        let cell = Cell::new(link, queue, &both);
        let percent = |shares: &Shares| {
            let part = |i: usize| shares.rates[i] / cell.rate() * 100.0;
            format!("{:5.1} {:4.1}", part(0), part(1))
        };
        let equal = cell.run();
        let [far, near] = [[4, 1], [1, 4]].map(|times| {
            let mut cell = cell.clone();
            cell.flows = vec![(both[0], times[0]), (both[1], times[1])];
            cell.run()
        });
        let lossy = |kinds: &[Kind]| {
            let mut cell = Cell::new(link, queue, kinds);
            cell.loss_pct = 1.0;
            cell.run()
        };
        let (mixed, own) = (lossy(&both), lossy(&[Kind::Tcp(model); 2]));
        let times = mixed.rates[1] / (own.rates[0] + own.rates[1]) * 2.0;
        writeln!(
            out,
            "{queue:3} BDP  {name:6} equal {}   far {}   near {}   1 % {} {times:5.2}   queue {:4.2}",
            percent(&equal),
            percent(&far),
            percent(&near),
            percent(&mixed),
            cell.depth(&equal),
        )
        .expect("a String");
    }
    let mut cell = Cell::new(link, queue, &[Kind::Vtl; 4]);
    let together = cell.run();
    cell.every = APART;
    let apart = cell.run();
    let alone = Cell::new(link, queue, &[Kind::Vtl]);
    let single = alone.run();
    writeln!(
        out,
        "{queue:3} BDP  four   Jain {:.3} {:.3}   queue {:4.2} {:4.2}   alone {:4.2}, rate {:5.1} %",
        together.jain(),
        apart.jain(),
        cell.depth(&together),
        cell.depth(&apart),
        alone.depth(&single),
        single.rates[0] / alone.rate() * 100.0,
    )
    .expect("a String");
    out
}
