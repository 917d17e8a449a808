//! How a flow's traffic goes over time: its rates, whether it is a mouse or an elephant (Guo and Matta, 2001: short and
//! slow, or long and fast), and how bursty it is. By counts that the caller samples about once a second.

use std::{fmt, time::Duration};

/// Time constant of what is remembered: a flow that has changed looks new after some three of them.
const MEMORY: Duration = Duration::from_secs(10);
/// Bytes within [`MEMORY`] that make an elephant: as much as takes a long path's congestion control beyond its start,
/// and 0.8 Mbit/s if it goes on.
const ELEPHANT: f64 = (1 << 20) as f64;
/// Time after which variation can be told from a start.
const ENOUGH: Duration = Duration::from_secs(5);

/// A flow by what it carries lately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Little: round trips are what its application waits for.
    Mouse,
    /// Much: the path's rate is.
    Elephant,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mouse => "mouse",
            Self::Elephant => "elephant",
        })
    }
}

/// The traffic of one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes in each direction as of the last sample.
    seen: [u64; 2],
    /// Bytes per second between the last two samples.
    rates: [f64; 2],
    /// Seconds, bytes, and the bytes' product with their rate, of both directions together; each loses weight with
    /// [`MEMORY`].
    seconds: f64,
    bytes: f64,
    products: f64,
    /// Time that was sampled.
    sampled: Duration,
}

impl Traffic {
    /// Begins with these counts of bytes in each direction, which are not looked at.
    pub fn new(seen: [u64; 2]) -> Self {
        Self {
            seen,
            ..Self::default()
        }
    }

    /// Takes the counts, `after` the last sample. Without time between nothing is taken.
    pub fn sample(&mut self, counts: [u64; 2], after: Duration) {
        let seconds = after.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        let bytes = [0, 1].map(|i| counts[i].saturating_sub(self.seen[i]) as f64);
        self.seen = counts;
        self.rates = bytes.map(|bytes| bytes / seconds);
        let kept = (-seconds / MEMORY.as_secs_f64()).exp();
        let both = bytes[0] + bytes[1];
        self.seconds = self.seconds * kept + seconds;
        self.bytes = self.bytes * kept + both;
        self.products = self.products * kept + both * both / seconds;
        self.sampled = self.sampled.saturating_add(after);
    }

    /// Bytes per second in each direction between the last two samples.
    pub fn rates(&self) -> [f64; 2] {
        self.rates
    }

    /// Mouse or elephant, by both directions together.
    pub fn size(&self) -> Size {
        if self.bytes < ELEPHANT {
            Size::Mouse
        } else {
            Size::Elephant
        }
    }

    /// Coefficient of variation of the rate from sample to sample: 0 of a constant rate, 1 of a rate whose deviation is
    /// as large as its mean, more of rare bursts. `None` before there is enough to tell.
    pub fn burstiness(&self) -> Option<f64> {
        if self.sampled < ENOUGH || self.bytes < 1.0 {
            return None;
        }
        let mean = self.bytes / self.seconds;
        let variance = self.products / self.seconds - mean * mean;
        Some(variance.max(0.0).sqrt() / mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A flow that carries so many bytes in each second, the same in both directions.
    fn flow(seconds: impl IntoIterator<Item = u64>) -> Traffic {
        let mut traffic = Traffic::new([7, 9]);
        let mut counts = [7, 9];
        for bytes in seconds {
            counts = counts.map(|count| count + bytes);
            traffic.sample(counts, SECOND);
        }
        traffic
    }

    #[test]
    fn rates__are_of_the_last_sample() {
        let mut traffic = Traffic::new([1000, 0]);
        assert_eq!(traffic.rates(), [0.0, 0.0]);
        traffic.sample([3000, 500], 2 * SECOND);
        assert_eq!(traffic.rates(), [1000.0, 250.0]);
        traffic.sample([3000, 500], SECOND);
        assert_eq!(traffic.rates(), [0.0, 0.0]);
        // No time, and counts that go back.
        traffic.sample([9000, 500], Duration::ZERO);
        traffic.sample([0, 0], SECOND);
        assert_eq!(traffic.rates(), [0.0, 0.0]);
    }

    #[test]
    fn size__is_by_what_was_carried_lately() {
        assert_eq!(flow([]).size(), Size::Mouse);
        assert_eq!(flow([500_000]).size(), Size::Mouse);
        assert_eq!(flow([600_000]).size(), Size::Elephant);
        assert_eq!(flow([60_000; 100]).size(), Size::Elephant);
        // As much in all, but slowly.
        assert_eq!(flow([20_000; 300]).size(), Size::Mouse);
        // What was an elephant is none for ever.
        let pause = [10_000_000].into_iter().chain([0; 60]);
        assert_eq!(flow(pause).size(), Size::Mouse);
    }

    #[test]
    fn burstiness__of_constant_and_of_rare_traffic() {
        assert_eq!(flow([100; 4]).burstiness(), None, "too early");
        assert_eq!(flow([0; 50]).burstiness(), None, "nothing");
        let near = |traffic: Traffic, wanted: f64| {
            let burstiness = traffic.burstiness().unwrap();
            assert!((burstiness - wanted).abs() < 0.15, "{burstiness}");
        };
        near(flow([1000; 50]), 0.0);
        near(flow([1000, 0].repeat(50)), 1.0);
        // One second in ten: the deviation is three means.
        near(
            flow([&[0; 5][..], &[1000], &[0; 4]].concat().repeat(20)),
            3.0,
        );
    }

    #[test]
    fn burstiness__any_counts_are_borne() {
        let mut traffic = Traffic::default();
        for counts in [[u64::MAX; 2], [0; 2], [u64::MAX; 2]] {
            for after in [Duration::from_nanos(1), SECOND, Duration::MAX] {
                traffic.sample(counts, after);
                assert!(traffic.burstiness().is_none_or(|b| !b.is_nan()));
            }
        }
    }
}
