//! One request in several encapsulations, staggered (RFC 8305, RFC 9623): schedule of transmissions.

use core::{fmt, time::Duration};

use super::{ATTEMPT_DELAY, MAX_WAIT, MIN_ATTEMPT_DELAY, nanos};
use crate::intf;

/// Encapsulation of packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Encapsulation {
    /// IP protocol `intf::VTL_IPPROTO`.
    #[default]
    Native,
    /// Over UDP, for middleboxes that drop unknown IP protocols.
    Udp,
    /// Over a TCP connection between the daemons, where neither gets through.
    Tcp,
}

impl Encapsulation {
    /// Encapsulation of packets from or to a UDP port; 0 is native.
    pub fn by(port: u16) -> Self {
        match port {
            0 => Self::Native,
            _ => Self::Udp,
        }
    }

    /// Bytes of headers between the IP header and VTL's.
    pub fn overhead(self) -> u16 {
        match self {
            Self::Native | Self::Tcp => 0,
            Self::Udp => intf::VTL_UDP_HEADER as u16,
        }
    }
}

impl fmt::Display for Encapsulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Udp => "udp",
            Self::Tcp => "tcp",
        })
    }
}

/// Transmissions in one encapsulation.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) encapsulation: Encapsulation,
    /// Transmissions so far.
    pub(super) tries: u32,
    /// Time of the latest one.
    pub(super) sent_ns: u64,
    due_ns: u64,
    wait: Duration,
}

/// The transmissions of one request.
#[derive(Clone, Debug)]
pub(super) struct Race {
    runs: Vec<Run>,
}

impl Race {
    /// Starts with these encapsulations, the preferred one first. `wait`: initial retransmission timeout.
    /// `rtt`: if known.
    pub(super) fn new(
        encapsulations: &[Encapsulation],
        now_ns: u64,
        wait: Duration,
        rtt: Option<Duration>,
    ) -> Self {
        let delay = rtt
            .map_or(ATTEMPT_DELAY, |rtt| rtt * 3 / 2)
            .clamp(MIN_ATTEMPT_DELAY, MAX_WAIT);
        let run = |(i, encapsulation): (u64, &Encapsulation)| Run {
            encapsulation: *encapsulation,
            tries: 0,
            sent_ns: now_ns,
            due_ns: now_ns.saturating_add(i * nanos(delay)),
            wait,
        };
        Self {
            runs: (0..).zip(encapsulations).map(run).collect(),
        }
    }

    /// Time of the next transmission.
    pub(super) fn due_ns(&self) -> u64 {
        let due = self.runs.iter().map(|run| run.due_ns);
        due.min().unwrap_or(u64::MAX)
    }

    /// Encapsulation to transmit in now, if any; doubles its timeout (exponential back-off).
    pub(super) fn next(&mut self, now_ns: u64) -> Option<Encapsulation> {
        let due = self.runs.iter_mut().filter(|run| run.due_ns <= now_ns);
        let run = due.min_by_key(|run| run.due_ns)?;
        run.tries += 1;
        run.sent_ns = now_ns;
        run.due_ns = now_ns.saturating_add(nanos(run.wait));
        run.wait = (run.wait * 2).min(MAX_WAIT);
        Some(run.encapsulation)
    }

    /// Transmissions in an encapsulation, if any.
    pub(super) fn by(&self, encapsulation: Encapsulation) -> Option<&Run> {
        self.runs
            .iter()
            .find(|run| run.encapsulation == encapsulation && run.tries > 0)
    }

    /// Number of all transmissions.
    pub(super) fn tries(&self) -> u32 {
        self.runs.iter().map(|run| run.tries).sum()
    }

    /// Current timeout of the first encapsulation.
    pub(super) fn wait(&self) -> Duration {
        self.runs.first().map_or(MAX_WAIT, |run| run.wait)
    }
}
