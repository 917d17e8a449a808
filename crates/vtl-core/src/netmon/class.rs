//! Classes of paths, by round-trip time.

use std::{fmt, time::Duration};

use super::Metrics;

/// Links by their round-trip time (thesis, table 5.2; its bandwidths do not set them apart).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Below 50 ms: a data centre, a home.
    Lan,
    /// Below 500 ms: the Internet on land and in the sea.
    Terrestrial,
    /// 500 ms or more: satellites.
    LongDelay,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lan => "lan",
            Self::Terrestrial => "terrestrial",
            Self::LongDelay => "long-delay",
        })
    }
}

const TERRESTRIAL: Duration = Duration::from_millis(50);
const LONG_DELAY: Duration = Duration::from_millis(500);

/// Packets without a loss after which a path counts as one that loses none.
const PROOF: u64 = 2_000;
/// Share of lost packets from which a path may be wireless.
const LOSES: f64 = 1e-3;
/// Packets lost in a row, on average, from which losses come in bursts.
const BURSTS: f64 = 1.5;

impl Metrics {
    /// The class of the path, by its minimum round-trip time.
    pub fn class(&self) -> Option<Class> {
        Some(match self.min_rtt? {
            rtt if rtt < TERRESTRIAL => Class::Lan,
            rtt if rtt < LONG_DELAY => Class::Terrestrial,
            _ => Class::LongDelay,
        })
    }

    /// Whether the path looks wireless: it loses packets in bursts, and not because its queue is full. `None` while too
    /// little is known.
    pub fn looks_wireless(&self) -> Option<bool> {
        let loss = self.clear_loss?;
        if loss < LOSES {
            return (self.packets >= PROOF).then_some(false);
        }
        Some(self.loss_burst? >= BURSTS)
    }
}
