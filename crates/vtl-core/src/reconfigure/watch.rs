//! Watches whether the connections of one path get what is bounded ([`Bounds`]), and which carriers have missed it.

use std::time::Duration;

use super::{
    Bound, Bounds, Failures, MAX_DOUBLED, State,
    condition::{Reading, rate_in_words, time_in_words},
    nanos,
};
use crate::netmon::Metrics;

/// How long a bound must be missed before it counts as that, and kept before it counts as kept; and how long a carrier is
/// given before it is judged.
pub const JUDGED_AFTER: Duration = Duration::from_secs(3);
/// A bound is kept again by this share of it: one part in ten.
const HYSTERESIS: u32 = 10;
/// How long a carrier that has missed a bound is passed over, at first.
const PASSED_OVER: Duration = Duration::from_secs(300);

/// What connections get, as measured. `None`: unknown, which changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// From one host to the other.
    pub delay: Option<Duration>,
    /// How much of that is a queue's.
    pub queueing: Duration,
    /// bit/s, of connections whose applications have more to send.
    pub throughput: Option<u64>,
}

impl Outcome {
    /// The delay by the figures of a path: half of the shortest round trip, and the queue, which counts as this direction's.
    pub fn of(metrics: &Metrics) -> Self {
        let queueing = metrics.queueing().unwrap_or_default();
        Self {
            delay: metrics.min_rtt.map(|rtt| rtt / 2 + queueing),
            queueing,
            throughput: None,
        }
    }
}

/// A bound that is missed from now on, or is no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which.
    pub bound: Bound,
    /// Whether it is missed.
    pub is_missed: bool,
}

/// Watches the bounds of one path's connections, or of one session.
#[derive(Clone, Debug)]
pub struct BoundWatch {
    pub(super) bounds: Bounds,
    /// Whether each of [`Bound::ALL`] is missed,
    states: [State; 2],
    /// and since when each reading has said so, of what the connections go by, ns.
    bad_ns: [Option<u64>; 2],
    /// The misses of each class, the last one the first's, as [`super::Engine`]'s failures.
    misses: Vec<Failures>,
}

impl BoundWatch {
    /// Begins with bounds that are kept.
    pub fn new(bounds: Bounds) -> Self {
        Self::among(bounds, 0)
    }

    /// The same, with so many classes that may miss them.
    pub(super) fn among(bounds: Bounds, places: usize) -> Self {
        Self {
            bounds,
            states: [State::default(); 2],
            bad_ns: [None; 2],
            misses: vec![Failures::default(); places],
        }
    }

    /// A bound, and what was measured of it, in words: `delay 912ms, of which 900ms in a queue; max_delay 200ms`.
    pub fn figures(&self, bound: Bound, outcome: &Outcome) -> String {
        match bound {
            Bound::MaxDelay => {
                let millis = |time: Duration| Duration::from_millis(time.as_millis() as u64);
                let words = |time: Option<Duration>| {
                    time.map_or("unknown".into(), |time| time_in_words(millis(time)))
                };
                let [delay, queue] = [outcome.delay, Some(outcome.queueing)].map(words);
                let max = self
                    .bounds
                    .max_delay
                    .map_or_else(String::new, time_in_words);
                format!("delay {delay}, of which {queue} in a queue; {bound} {max}")
            }
            Bound::MinThroughput => {
                let kbit = outcome.throughput.map(|bits| bits / 1000 * 1000);
                let rate = kbit.map_or("unknown".into(), rate_in_words);
                let min = self
                    .bounds
                    .min_throughput
                    .map_or_else(String::new, rate_in_words);
                format!("throughput {rate}; {bound} {min}")
            }
        }
    }

    /// Takes what was measured. Returns the bounds for which that changes something.
    pub fn take(&mut self, now_ns: u64, outcome: &Outcome) -> [Option<Change>; 2] {
        let readings = Bound::ALL.map(|bound| self.read(bound, outcome));
        let mut changes = [None; 2];
        for (place, bound) in Bound::ALL.into_iter().enumerate() {
            let bad_ns = &mut self.bad_ns[place];
            match readings[place] {
                Reading::Holds => *bad_ns = bad_ns.or(Some(now_ns)),
                Reading::Unknown => {}
                Reading::IsNear | Reading::IsFar => *bad_ns = None,
            }
            let state = &mut self.states[place];
            let was_missed = state.holds;
            state.take(now_ns, readings[place], JUDGED_AFTER);
            let is_missed = state.holds;
            if is_missed != was_missed {
                changes[place] = Some(Change { bound, is_missed });
            }
        }
        changes
    }

    /// Notes that the connections go by something else: that is given its time.
    pub(super) fn note_switch(&mut self) {
        self.bad_ns = [None; 2];
    }

    fn read(&self, bound: Bound, outcome: &Outcome) -> Reading {
        let (is_missed, is_kept) = match bound {
            Bound::MaxDelay => match (self.bounds.max_delay, outcome.delay) {
                (Some(max), Some(delay)) => (delay > max, delay <= max - max / HYSTERESIS),
                _ => return Reading::Unknown,
            },
            Bound::MinThroughput => match (self.bounds.min_throughput, outcome.throughput) {
                (Some(min), Some(rate)) => {
                    let enough = min.saturating_add(min / u64::from(HYSTERESIS));
                    (rate < min, rate >= enough)
                }
                _ => return Reading::Unknown,
            },
        };
        match (is_missed, is_kept) {
            (true, _) => Reading::Holds,
            (false, true) => Reading::IsFar,
            (false, false) => Reading::IsNear,
        }
    }

    /// The bounds that are missed.
    pub fn missed(&self) -> impl Iterator<Item = Bound> {
        let all = Bound::ALL.into_iter().zip(self.states);
        all.filter(|(_, state)| state.holds).map(|(bound, _)| bound)
    }

    /// Whether a bound has been missed for long enough by what the connections go by.
    pub(super) fn is_judged(&self, now_ns: u64) -> bool {
        let all = self.states.iter().zip(self.bad_ns);
        let mut bad = all.filter_map(|(state, bad_ns)| bad_ns.filter(|_| state.holds));
        bad.any(|bad_ns| now_ns.saturating_sub(bad_ns) >= nanos(JUDGED_AFTER))
    }

    /// Has the class at this place passed over for a while: twice as long for each miss in a row, 32 times at most.
    pub(super) fn note_miss(&mut self, now_ns: u64, place: usize) {
        if self.is_passed_over(now_ns, place) {
            return;
        }
        let miss = &mut self.misses[place];
        let wait_ns = nanos(PASSED_OVER).saturating_mul(1 << miss.count.min(MAX_DOUBLED));
        miss.until_ns = now_ns.saturating_add(wait_ns);
        miss.count = miss.count.saturating_add(1);
    }

    /// Forgets the misses of a class that keeps what is bounded.
    pub(super) fn note_kept(&mut self, place: usize) {
        self.misses[place] = Failures::default();
    }

    pub(super) fn is_passed_over(&self, now_ns: u64, place: usize) -> bool {
        self.misses[place].until_ns > now_ns
    }
}
