//! What is known of a network path, from the packets that it carries anyway (thesis, section 3.3.2: NetMonitor).

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The state of a path in the direction in which this host sends. What was not measured is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    /// The minimum round-trip time lately: the path without queues.
    pub min_rtt: Option<Duration>,
    /// The smoothed round-trip time (RFC 6298).
    pub rtt: Option<Duration>,
    /// The mean deviation of round-trip times (RFC 6298, RTTVAR).
    pub rtt_variance: Option<Duration>,
    /// The mean difference of consecutive round-trip times (RFC 3550, section 6.4.1, of round trips).
    pub jitter: Option<Duration>,
    /// The share of packets that the path loses, 0 to 1.
    pub loss: Option<f64>,
    /// How many packets are lost together, on average: 1 if losses are independent.
    pub loss_burst: Option<f64>,
    /// The rate of delivery, bit/s of payload.
    pub delivery_rate: Option<u64>,
    /// The rate that the path has for us.
    pub bandwidth: Option<Bandwidth>,
    /// The share of packets that arrive behind later ones, 0 to 1.
    pub reordering: Option<f64>,
    /// Packets that the share of lost ones is of.
    pub packets: u64,
}

/// An estimate of the bandwidth that a path has for us.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// bit/s of payload.
    pub rate: u64,
    /// Whether it is a lower bound, as the application sent less than the path would have carried.
    pub at_least: bool,
    /// Its relative error: the true value is within `rate` times 1 ± `error`.
    pub error: f64,
}

impl Metrics {
    /// The queueing delay: what the smoothed round-trip time exceeds the minimum by.
    pub fn queueing(&self) -> Option<Duration> {
        Some(self.rtt?.saturating_sub(self.min_rtt?))
    }
}
