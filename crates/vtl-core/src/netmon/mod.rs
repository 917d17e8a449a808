//! The state of network paths, from the packets that they carry anyway (thesis, section 3.3.2: NetMonitor).
//!
//! - [`Counters`]: what a carrier counts; [`Tracker`] takes what has come since the last reading ([`Step`]).
//! - [`Estimator`]: the state of a path ([`Metrics`]) from the steps of all connections of one kind to a host.
//! - [`best`]: the state of a path of which several kinds of carriers have told.
//! - [`Link`]: what the link layer of this host says.
//! - [`figures`], [`told`]: what hosts tell each other of the direction in which they send.
//!
//! Time is an argument, in nanoseconds of any clock that does not go back. Nothing here allocates without bound.

mod class;
mod counters;
mod estimator;
mod link;
mod losses;
mod told;

use std::time::Duration;

pub use class::Class;
pub use counters::{Bound, Counters, Step, Tracker};
pub use estimator::Estimator;
pub use link::{Link, Medium, signal_quality};
pub use losses::{PathLosses, Reading, Verdict};
pub use told::{figures, told};

/// The state of a path in the direction in which this host sends. What was not measured is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Metrics {
    /// The minimum round-trip time lately: the path without queues.
    pub min_rtt: Option<Duration>,
    /// The smoothed round-trip time (RFC 6298).
    pub rtt: Option<Duration>,
    /// The mean deviation of round-trip times (RFC 6298, RTTVAR): their jitter.
    pub rtt_variance: Option<Duration>,
    /// The share of packets that the path loses, 0 to 1.
    pub loss: Option<f64>,
    /// The same of packets that were sent while no queue stood on the path: what it loses whatever is sent.
    pub clear_loss: Option<f64>,
    /// How many of these packets are lost in a row, on average: about 1 if losses are independent.
    pub loss_burst: Option<f64>,
    /// The rate of delivery, bit/s of payload.
    pub delivery_rate: Option<u64>,
    /// The rate that the path has for us.
    pub bandwidth: Option<Bandwidth>,
    /// The share of packets that arrive behind later ones, 0 to 1.
    pub reordering: Option<f64>,
    /// Packets that the share of lost ones is of.
    pub packets: u64,
    /// The link layer of this host's interface; estimators know nothing of it.
    pub link: Link,
}

/// An estimate of the bandwidth that a path has for us.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// bit/s of payload.
    pub rate: u64,
    /// Whether it is a lower bound, as less was sent than the path would have carried.
    pub at_least: bool,
    /// Its relative error, 0 to 1: by how much the two highest rates lately differ; 1 where there was only one.
    pub error: f64,
}

impl Metrics {
    /// The queueing delay: what the smoothed round-trip time exceeds the minimum by.
    pub fn queueing(&self) -> Option<Duration> {
        Some(self.rtt?.saturating_sub(self.min_rtt?))
    }

    /// These, with what they lack from `other`, and its bandwidth where that is measured and this one is not.
    fn or(self, other: &Self) -> Self {
        let is_measured = |bandwidth: &Bandwidth| !bandwidth.at_least;
        let [own, theirs] = [self.bandwidth, other.bandwidth];
        // One of two loss figures: they are not of the same packets.
        let of = if self.loss.is_none() { other } else { &self };
        Self {
            min_rtt: self.min_rtt.or(other.min_rtt),
            rtt: self.rtt.or(other.rtt),
            rtt_variance: self.rtt_variance.or(other.rtt_variance),
            loss: of.loss,
            clear_loss: of.clear_loss,
            loss_burst: of.loss_burst,
            packets: of.packets,
            delivery_rate: self.delivery_rate.or(other.delivery_rate),
            bandwidth: own
                .filter(is_measured)
                .or(theirs.filter(is_measured))
                .or(own)
                .or(theirs),
            reordering: self.reordering.or(other.reordering),
            link: self.link,
        }
    }
}

/// Age, against that of the newest, up to which figures count as new.
const FRESH: Duration = Duration::from_secs(10);

/// The state of a path of which several carriers have told, with the age of what each told, and which of them is the
/// main evidence: of those that are as new as the newest, give or take 10 s, the one with most packets. What it lacks is
/// from the others as new. `None` if nobody has told anything.
pub fn best(told: &[(Duration, Metrics)]) -> Option<(usize, Metrics)> {
    let newest = told.iter().map(|(age, _)| *age).min()?;
    let mut fresh: Vec<usize> = (0..told.len())
        .filter(|n| told[*n].0.saturating_sub(newest) <= FRESH)
        .collect();
    fresh.sort_by_key(|n| (std::cmp::Reverse(told[*n].1.packets), told[*n].0));
    let main = *fresh.first()?;
    let all = fresh.iter().map(|n| &told[*n].1);
    Some((main, all.fold(Metrics::default(), Metrics::or)))
}

#[cfg(test)]
mod tests;
