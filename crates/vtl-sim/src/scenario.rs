//! Input and result of a simulation.

use std::fmt;

use vtl_link::{Link, Nanos};

use crate::{
    app::{Lengths, Losses, Pace, Promise},
    host::SessionConfig,
    sim::MS,
};

/// Parameters of a simulation.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The link. Host 0 is its server, the sender of a download; host 1 is its client.
    pub link: Link,
    /// Parameters of both ends of the session.
    pub session: SessionConfig,
    /// Packets to send, of host 0 and host 1.
    pub packets: [u64; 2],
    /// Length of packets.
    pub lengths: Lengths,
    /// Pace of the readers.
    pub pace: Pace,
    /// Delivery guarantee of the graft.
    pub promise: Promise,
    /// Seed of everything but the link, which has its own.
    pub seed: u64,
    /// Time limit.
    pub until: Nanos,
    /// Begin of measurements.
    pub measure_from: Nanos,
    /// Time without progress, though it is possible, after which a session counts as stalled.
    pub patience: Nanos,
    /// Outages: intervals with total loss.
    pub outages: Vec<(Nanos, Nanos)>,
    /// Change of the link, with its time.
    pub change: Option<(Nanos, Link)>,
    /// Clock drift of host 1 against host 0, millionths.
    pub drift_ppm: i64,
    /// One packet in this many arrives a second time, garbled; 0: none.
    pub garbled_one_in: u64,
    /// Adds a second session, with misbehaving applications and peers.
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

/// Result, for the direction from host 0 to host 1 unless stated otherwise.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Time when everything had arrived, or the simulation ended.
    pub end: Nanos,
    /// Packets read by each host, with verified content.
    pub packets: [u64; 2],
    /// Goodput since `measure_from`, bit/s.
    pub goodput: f64,
    /// Goodput of the other direction.
    pub goodput_up: f64,
    /// Retransmissions per packet sent.
    pub retransmitted: f64,
    /// Duplicates that reached the receiver, per packet sent.
    pub duplicates: f64,
    /// Queueing time at the bottleneck, median, ns.
    pub queue_p50: f64,
    /// Queueing time at the bottleneck, 95th percentile, ns.
    pub queue_p95: f64,
    /// Time when the first million bytes had been read, 0 if never.
    pub first_megabyte: Nanos,
    /// Packets that host 1 missed, or received twice.
    pub losses: Losses,
    /// Transmissions given up without being found lost, as by a probe timeout.
    pub abandoned: u64,
}

/// Violations that must never happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The application received other data than was sent.
    WrongData {
        /// Receiving host.
        host: usize,
        /// Number of the packet.
        seq: u64,
    },
    /// No progress.
    Stalled {
        /// Time of the latest progress.
        since: Nanos,
        /// The sessions' states.
        state: String,
    },
    /// Egress requests immediate calls without end.
    Spins {
        /// The time.
        at: Nanos,
        /// The session's state.
        state: String,
    },
    /// At the end, packets are still counted as in flight.
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
