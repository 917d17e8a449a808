//! Bounds that an application or a rule states (thesis, table 3.2), and which carriers cannot keep them by what is known of
//! the path.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::condition::{rate_in_words, time_in_words};
use crate::select::Features;

/// Those of [`CLASSES`](crate::select::CLASSES) whose rate the path's losses bound: CUBIC's.
const CUBIC: [&str; 2] = ["tcp", "graft:cubic"];
/// Those of [`CLASSES`](crate::select::CLASSES) that fill the queue before the path: what is sent by loss-based congestion controls.
/// `tcp:bbr` is one until BBR takes over, as it does where the path loses packets.
const FILL_QUEUES: [&str; 4] = ["tcp", "tcp:bbr", "graft:cubic", "graft:hybla"];
/// Bits of payload in a full packet.
const PACKET_BITS: f64 = 1448.0 * 8.0;

/// The bounds of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Bounds {
    /// Maximum time from one application to the other.
    #[serde(default)]
    pub max_delay: Option<Duration>,
    /// Minimum rate of what is sent, bit/s of payload, while the application has that much.
    #[serde(default)]
    pub min_throughput: Option<u64>,
}

/// One of [`Bounds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// [`Bounds::max_delay`].
    MaxDelay,
    /// [`Bounds::min_throughput`].
    MinThroughput,
}

impl Bound {
    /// Both.
    pub const ALL: [Self; 2] = [Self::MaxDelay, Self::MinThroughput];

    /// Its name in rules.
    pub fn name(self) -> &'static str {
        match self {
            Self::MaxDelay => "max_delay",
            Self::MinThroughput => "min_throughput",
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Bounds {
    /// Whether nothing is bounded.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The bound that a carrier, one of [`CLASSES`](crate::select::CLASSES), cannot keep where others may: CUBIC's rate over a path
    /// that loses packets, by its response function. `None`: as far as is known it keeps them.
    pub fn broken_by(&self, class: &str, features: &Features) -> Option<Bound> {
        let wanted = self.min_throughput? as f64;
        let is_less = CUBIC.contains(&class) && cubic_rate(features).is_some_and(|r| r < wanted);
        is_less.then_some(Bound::MinThroughput)
    }
}

/// As rules state them, with commas: `max_delay 200ms, min_throughput 5Mbit/s`.
impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let delay = self
            .max_delay
            .map(|max| format!("{} {}", Bound::MaxDelay, time_in_words(max)));
        let rate = self
            .min_throughput
            .map(|min| format!("{} {}", Bound::MinThroughput, rate_in_words(min)));
        let all: Vec<_> = delay.into_iter().chain(rate).collect();
        f.write_str(&all.join(", "))
    }
}

/// Whether a carrier, one of [`CLASSES`](crate::select::CLASSES), fills the queue before the path.
pub(super) fn fills_queues(class: &str) -> bool {
    FILL_QUEUES.contains(&class)
}

/// The mean rate of TCP under CUBIC, bit/s: RFC 9438, section 5.1 (C = 0.4, a reduction to 0.7), or, in its region that is
/// friendly to Reno, Mathis and others' (1997) `1.22 / sqrt(p)`. What is lost together counts as one loss. Of the campaign's
/// 767 transfers of 16 MiB over links that lose 0.5 % or more, where this is less than the link's rate, the median had 1.02
/// of it, and nine in ten at most 1.40. `None`: the path loses nothing, or nobody knows.
fn cubic_rate(features: &Features) -> Option<f64> {
    let rtt = features.rtt_ms? / 1e3;
    let loss = features.loss_percent? / 100.0 / features.loss_burst.unwrap_or(1.0).max(1.0);
    if !(loss > 0.0 && rtt > 0.0) {
        return None;
    }
    let window = (1.054 * (rtt / loss).powf(0.75)).max(1.22 / loss.sqrt());
    Some(window * PACKET_BITS / rtt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::CLASSES;

    const MBIT: u64 = 1_000_000;

    fn path(rtt_ms: f64, loss: f64, burst: f64) -> Features {
        Features {
            rtt_ms: Some(rtt_ms),
            loss_percent: Some(loss),
            loss_burst: Some(burst),
            ..Features::default()
        }
    }

    fn at_least(bits: u64) -> Bounds {
        Bounds {
            min_throughput: Some(bits),
            ..Bounds::default()
        }
    }

    #[test]
    fn broken_by__cubic_where_losses_bound_its_rate() {
        // 1.22 / sqrt(0.01) is 12 packets, as much each 100 ms.
        let lossy = path(100.0, 1.0, 1.0);
        let bounds = at_least(5 * MBIT);
        let broken = CLASSES.map(|class| bounds.broken_by(class, &lossy));
        let bound = Some(Bound::MinThroughput);
        assert_eq!(broken, [bound, None, None, bound, None]);
        for (bits, is_broken) in [(MBIT, false), (2 * MBIT, true)] {
            let broken = at_least(bits).broken_by("tcp", &lossy);
            assert_eq!(broken.is_some(), is_broken, "{bits}");
        }
        // Ten losses at a time are one: sqrt(10) times as much.
        let burst = path(100.0, 1.0, 10.0);
        assert_eq!(at_least(4 * MBIT).broken_by("tcp", &burst), None);
        // Below the Reno region, RFC 9438's table 2: p = 0.0001 at 100 ms is 188 packets.
        let rate = cubic_rate(&path(100.0, 0.01, 1.0)).expect("a rate");
        let window = rate * 0.1 / PACKET_BITS;
        assert!((180.0..195.0).contains(&window), "{window}");
    }

    #[test]
    fn broken_by__nothing_that_is_not_known() {
        let bounds = at_least(1000 * MBIT);
        for features in [
            Features::default(),
            path(100.0, 0.0, 1.0),
            path(0.0, 1.0, 1.0),
            path(f64::NAN, 1.0, 1.0),
            path(100.0, f64::NAN, 1.0),
        ] {
            assert_eq!(bounds.broken_by("tcp", &features), None, "{features:?}");
        }
        let delay = Bounds {
            max_delay: Some(Duration::from_millis(1)),
            ..Bounds::default()
        };
        assert_eq!(delay.broken_by("tcp", &path(900.0, 9.0, 1.0)), None);
        assert!(Bounds::default().is_none() && !delay.is_none());
        let both = Bounds {
            max_delay: Some(Duration::from_millis(200)),
            ..at_least(5 * MBIT)
        };
        assert_eq!(both.to_string(), "max_delay 200ms, min_throughput 5Mbit/s");
    }

    #[test]
    fn fills_queues__knows_all_classes() {
        let fill = CLASSES.map(fills_queues);
        assert_eq!(fill, [true, true, false, true, true]);
        assert!(FILL_QUEUES.iter().all(|class| CLASSES.contains(class)));
        assert!(CUBIC.iter().all(|class| CLASSES.contains(class)));
    }
}
