//! Whether the path of one TCP connection loses packets itself, as far as its sender can tell.

use std::time::Duration;

use super::Counters;

/// What TCP tells of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reading {
    /// Round-trip times, and packets sent and lost.
    pub counters: Counters,
    /// Bytes acknowledged.
    pub acked: u64,
    /// Bytes that were sent and are not acknowledged.
    pub outstanding: u64,
    /// Slow start has ended: the congestion window was reduced.
    pub is_reduced: bool,
}

/// What [`PathLosses`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing new.
    Unknown,
    /// The path loses packets that no full queue explains.
    Lossy,
    /// It has lost fewer than that for 32 round trips, and 1,000 packets.
    Clean,
}

/// One packet of so many is lost by a window that grows until a queue overflows, on a path that loses none itself. Where a
/// queue stands, losses count from as many packets on.
const OVERFLOWS: u32 = 100;
/// In slow start losses count where no queue stands and at most one packet of so many is lost. A queue that is too short to
/// be seen loses as much by a window that doubles, once; BBR does better there than what fills it.
const STARTS: u32 = 8;
/// Packets after which losses are counted anew.
const WINDOW: u32 = 1000;
/// Round trips after which they are, at least.
const CLEAN_ROUND_TRIPS: u32 = 32;

#[derive(Clone, Copy, Debug, Default)]
enum Phase {
    /// Slow start: its last window overflows the queue, whatever the path.
    #[default]
    Begins,
    /// What was outstanding by the first reduction is acknowledged up to fewer bytes than these.
    Recovers { edge: u64 },
    /// Losses count from here on.
    Counts { at_ns: u64, sent: u32, lost: u32 },
}

/// Follows the losses of one TCP connection. Those of slow start's last window count only where no queue stood that it
/// may have overflowed, and none by when a queue may have.
#[derive(Clone, Copy, Debug, Default)]
pub struct PathLosses {
    phase: Phase,
    /// Packets sent and lost by the first reading: those of the handshake are no losses of slow start.
    first: Option<(u32, u32)>,
}

impl PathLosses {
    /// Takes a reading. `now_ns`: of any clock that does not go back, ns.
    pub fn look(&mut self, now_ns: u64, reading: &Reading) -> Verdict {
        let counters = &reading.counters;
        let from_here = Phase::Counts {
            at_ns: now_ns,
            sent: counters.sent,
            lost: counters.lost,
        };
        let first = *self.first.get_or_insert((counters.sent, counters.lost));
        if !matches!(self.phase, Phase::Counts { .. }) && Self::loses_at_start(counters, first) {
            self.phase = from_here;
            return Verdict::Lossy;
        }
        if let (Phase::Begins, true) = (self.phase, reading.is_reduced) {
            let edge = reading.acked.saturating_add(reading.outstanding);
            self.phase = Phase::Recovers { edge };
        }
        let Phase::Counts { at_ns, sent, lost } = self.phase else {
            if let Phase::Recovers { edge } = self.phase
                && reading.acked >= edge
            {
                self.phase = from_here;
            }
            return Verdict::Unknown;
        };
        if counters.may_overflow() {
            self.phase = from_here;
            return Verdict::Unknown;
        }
        let (sent, lost) = since(counters, (sent, lost));
        let is_enough = !counters.has_queue_lately() || sent >= OVERFLOWS;
        if lost > 0 && is_enough && lost.saturating_mul(OVERFLOWS) >= sent {
            self.phase = from_here;
            return Verdict::Lossy;
        }
        let rtt = counters.rtt.unwrap_or(Duration::ZERO);
        let passed = Duration::from_nanos(now_ns.saturating_sub(at_ns));
        if sent < WINDOW || passed < rtt * CLEAN_ROUND_TRIPS {
            return Verdict::Unknown;
        }
        self.phase = from_here;
        Verdict::Clean
    }

    /// Whether slow start has lost packets that no queue explains.
    fn loses_at_start(counters: &Counters, first: (u32, u32)) -> bool {
        let (sent, lost) = since(counters, first);
        lost > 0 && lost.saturating_mul(STARTS) <= sent && !counters.has_standing_queue()
    }
}

/// Packets sent and lost since there were so many.
fn since(counters: &Counters, (sent, lost): (u32, u32)) -> (u32, u32) {
    // Negative: late packets had counted as lost.
    let lost = u32::try_from(counters.lost.wrapping_sub(lost) as i32).unwrap_or(0);
    (counters.sent.wrapping_sub(sent), lost)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT_MS: u64 = 100;
    const MSS: u64 = 1000;

    /// A connection in virtual time, one look each round trip.
    #[derive(Default)]
    struct Connection {
        losses: PathLosses,
        now_ms: u64,
        sent: u32,
        lost: u32,
        acked: u64,
        is_reduced: bool,
    }

    impl Connection {
        /// A round trip later so many more were sent and lost, and so many are outstanding.
        fn round(&mut self, sent: u32, lost: u32, outstanding: u64, queue_ms: u64) -> Verdict {
            self.now_ms += RTT_MS + queue_ms;
            self.sent += sent;
            self.lost += lost;
            self.acked += u64::from(sent) * MSS;
            self.is_reduced |= lost > 0;
            let reading = Reading {
                counters: Counters {
                    rtt: Some(Duration::from_millis(RTT_MS + queue_ms)),
                    min_rtt: Some(Duration::from_millis(RTT_MS)),
                    sent: self.sent,
                    lost: self.lost,
                    ..Counters::default()
                },
                acked: self.acked,
                outstanding: outstanding * MSS,
                is_reduced: self.is_reduced,
            };
            self.losses.look(self.now_ms * 1_000_000, &reading)
        }

        /// Past slow start, of which nothing counted.
        fn begun() -> Self {
            let mut begun = Self::default();
            assert_eq!(begun.round(10, 0, 20, 0), Verdict::Unknown);
            assert_eq!(begun.round(100, 20, 50, 0), Verdict::Unknown);
            assert_eq!(begun.round(50, 0, 50, 0), Verdict::Unknown);
            begun
        }
    }

    #[test]
    fn look__the_overshoot_of_slow_start_says_nothing() {
        // Queues of no length, of an eighth, and of half a round trip.
        for (queue_ms, noticed) in [(0, 30), (12, 30), (50, 1)] {
            let mut connection = Connection::default();
            for sent in [10, 20, 40, 80] {
                assert_eq!(connection.round(sent, 0, 80, queue_ms), Verdict::Unknown);
            }
            // Half of a window is lost, and noticed bit by bit where the queue is long.
            assert_eq!(
                connection.round(30, noticed, 90, queue_ms),
                Verdict::Unknown
            );
            assert_eq!(
                connection.round(50, 40 - noticed, 60, queue_ms),
                Verdict::Unknown
            );
            assert_eq!(connection.round(40, 5, 40, queue_ms), Verdict::Unknown);
            // Then CUBIC's window grows until it overflows again: one packet in thousands.
            for round in 0..300 {
                let lost = u32::from(round % 50 == 49);
                let verdict = connection.round(50 + round % 50, lost, 60, queue_ms);
                assert_ne!(verdict, Verdict::Lossy, "{queue_ms} ms, round {round}");
            }
        }
    }

    #[test]
    fn look__slow_start_on_a_lossy_path_says_so_by_its_first_loss() {
        // A SYN was sent twice.
        let mut connection = Connection {
            lost: 1,
            ..Connection::default()
        };
        for sent in [10, 20] {
            assert_eq!(connection.round(sent, 0, 40, 10), Verdict::Unknown);
        }
        assert_eq!(connection.round(30, 2, 40, 20), Verdict::Lossy);
        // From there on it is as behind slow start.
        assert_eq!(connection.round(50, 2, 40, 50), Verdict::Unknown);
        assert_eq!(connection.round(50, 0, 40, 50), Verdict::Lossy);
    }

    #[test]
    fn look__a_lossy_path_is_seen_by_the_first_loss_behind_it() {
        let mut connection = Connection::begun();
        assert_eq!(connection.round(30, 0, 30, 0), Verdict::Unknown);
        assert_eq!(connection.round(30, 1, 30, 0), Verdict::Lossy);
        // Late and not lost.
        connection.lost -= 1;
        assert_eq!(connection.round(30, 0, 30, 0), Verdict::Unknown);
    }

    #[test]
    fn look__where_a_queue_stands_a_hundred_packets_are_needed() {
        let mut connection = Connection::begun();
        assert_eq!(connection.round(60, 2, 30, 50), Verdict::Unknown);
        assert_eq!(connection.round(39, 0, 30, 50), Verdict::Unknown);
        assert_eq!(connection.round(1, 0, 30, 50), Verdict::Lossy);
        assert_eq!(connection.round(101, 1, 30, 50), Verdict::Unknown);
    }

    #[test]
    fn look__by_when_the_queue_may_overflow_nothing_counts() {
        let mut connection = Connection::begun();
        for _ in 0..10 {
            assert_eq!(connection.round(50, 5, 50, 100), Verdict::Unknown);
        }
        assert_eq!(connection.round(50, 0, 50, 0), Verdict::Unknown);
        assert_eq!(connection.round(50, 1, 50, 0), Verdict::Lossy);
    }

    #[test]
    fn look__a_path_that_has_become_clean() {
        let mut connection = Connection::begun();
        assert_eq!(connection.round(30, 1, 30, 0), Verdict::Lossy);
        // Packets enough, but not time.
        for _ in 1..CLEAN_ROUND_TRIPS {
            assert_eq!(connection.round(100, 0, 100, 0), Verdict::Unknown);
        }
        assert_eq!(connection.round(100, 0, 100, 0), Verdict::Clean);
        // Time, but not packets.
        for _ in 0..99 {
            assert_eq!(connection.round(10, 0, 10, 0), Verdict::Unknown);
        }
        assert_eq!(connection.round(10, 0, 10, 0), Verdict::Clean);
        // It loses again.
        assert_eq!(connection.round(50, 1, 50, 0), Verdict::Lossy);
    }
}
