//! What goes into a simulation, and what comes out.

use std::fmt;

use vtl_link::{Link, Nanos};

use crate::{
    app::{Lengths, Losses, Pace, Promise},
    host::SessionConfig,
    sim::MS,
};

/// What to simulate.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The link. Host 0 is its server, the sender of a download; host 1 its client.
    pub link: Link,
    /// Both ends of the session.
    pub session: SessionConfig,
    /// Packets that host 0 and host 1 have to send.
    pub packets: [u64; 2],
    /// How long they are.
    pub lengths: Lengths,
    /// How fast they are read.
    pub pace: Pace,
    /// What the graft promises to them.
    pub promise: Promise,
    /// Seed of everything but the link, which has its own.
    pub seed: u64,
    /// When to stop, even if not everything has arrived.
    pub until: Nanos,
    /// Measurements begin then.
    pub measure_from: Nanos,
    /// A session that delivers nothing for so long, though it could, has stalled.
    pub patience: Nanos,
    /// Times during which nothing arrives.
    pub outages: Vec<(Nanos, Nanos)>,
    /// The link becomes another one at that time.
    pub change: Option<(Nanos, Link)>,
    /// How much faster host 1's clock runs than host 0's, millionths.
    pub drift_ppm: i64,
    /// One packet in so many arrives a second time, garbled; 0: none.
    pub garbled_one_in: u64,
    /// A second session whose applications and peers break every rule.
    pub hostile: bool,
}

impl Scenario {
    /// An endless transfer from host 0 to host 1.
    pub fn bulk(link: Link, until: Nanos) -> Self {
        Self {
            seed: link.seed,
            link,
            session: SessionConfig::default(),
            packets: [u64::MAX, 0],
            lengths: Lengths::Full,
            pace: Pace::AtOnce,
            promise: Promise::Everything,
            until,
            measure_from: 0,
            patience: 90_000 * MS,
            outages: Vec::new(),
            change: None,
            drift_ppm: 0,
            garbled_one_in: 0,
            hostile: false,
        }
    }
}

/// What came out, of the direction from host 0 to host 1.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// When everything had arrived, or the simulation ended.
    pub end: Nanos,
    /// Packets read by each host, all of them right.
    pub packets: [u64; 2],
    /// Goodput since `measure_from`, bit/s.
    pub goodput: f64,
    /// The same of the other direction.
    pub goodput_up: f64,
    /// Retransmissions per packet sent.
    pub retransmitted: f64,
    /// Duplicates that reached the receiver, per packet sent.
    pub duplicates: f64,
    /// Half of the packets waited no longer than that in the bottleneck's queue, ns.
    pub queue_p50: f64,
    /// 95 % of packets waited no longer there, ns.
    pub queue_p95: f64,
    /// When the first million bytes had been read, 0 if never.
    pub first_megabyte: Nanos,
    /// What did not reach host 1, or twice.
    pub losses: Losses,
    /// Probe timeouts.
    pub abandoned: u64,
}

/// What must never happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The application got something else than was sent.
    WrongData {
        /// Which host.
        host: usize,
        /// Which packet.
        seq: u64,
    },
    /// Nothing moves any more.
    Stalled {
        /// Since when.
        since: Nanos,
        /// The sessions' states.
        state: String,
    },
    /// Egress asks to be called again at once, for ever.
    Spins {
        /// When.
        at: Nanos,
        /// The session's state.
        state: String,
    },
    /// When all is over, packets are still counted as being in flight.
    Leak(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WrongData { host, seq } => write!(f, "host {host} got a wrong packet {seq}"),
            Self::Stalled { since, state } => write!(f, "stalled since {} ms: {state}", since / MS),
            Self::Spins { at, state } => write!(f, "spins at {} ms: {state}", at / MS),
            Self::Leak(state) => write!(f, "accounting: {state}"),
        }
    }
}
