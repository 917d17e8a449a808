//! How much may be under way beside what the library allows.
//!
//! The library's slow start ends with losses only. Then half a queue or more is lost at once, of which
//! it repairs one packet each round trip. So until the first loss delay ends it (as in RFC 9406), and
//! where many packets are lost nevertheless, its retransmission timer is made to expire, behind which
//! it sends everything again that is missing.

use std::time::{Duration, Instant};

/// Packets that may always be under way.
const LEAST: u32 = 16;
/// So many missing packets are too many to be repaired one by one.
const MANY: u32 = 32;
/// What counts as a queue: an eighth of the round trip, within these.
const QUEUE: (Duration, Duration) = (Duration::from_millis(4), Duration::from_millis(16));

/// A packet whose acknowledgement is awaited.
struct Sample {
    number: u32,
    sent: Instant,
    /// Packets under way then.
    under_way: u32,
}

/// Of an association. Numbers are those of packets, modulo 2^32.
#[derive(Default)]
pub(super) struct Start {
    newest: Option<u32>,
    acknowledged: Option<u32>,
    sample: Option<Sample>,
    least_rtt: Option<Duration>,
    /// `None`: as much as the library allows.
    limit: Option<u32>,
    lossy: bool,
    /// Everything up to here is to be sent again; when that was decided.
    repair: Option<(u32, Instant)>,
}

fn is_behind(number: u32, other: u32) -> bool {
    (number.wrapping_sub(other) as i32) > 0
}

impl Start {
    fn under_way(&self) -> u32 {
        match (self.newest, self.acknowledged) {
            (Some(newest), Some(acknowledged)) => newest.wrapping_sub(acknowledged),
            _ => 0,
        }
    }

    /// A packet goes; `true` if it is a new one.
    pub(super) fn sent(&mut self, number: u32, now: Instant) -> bool {
        if self.newest.is_some_and(|newest| !is_behind(number, newest)) {
            self.lossy = true;
            (self.sample, self.limit) = (None, None);
            return false;
        }
        self.newest = Some(number);
        self.acknowledged.get_or_insert(number.wrapping_sub(1));
        if self.sample.is_none() && !self.lossy {
            self.sample = Some(Sample {
                number,
                sent: now,
                under_way: self.under_way(),
            });
        }
        true
    }

    /// Whether another one may.
    pub(super) fn has_room(&self) -> bool {
        self.limit.is_none_or(|limit| self.under_way() < limit)
    }

    /// Everything up to a number has arrived, and `missing` of those behind have not, though others
    /// have. `true` if the library's timer should expire.
    pub(super) fn acknowledged(
        &mut self,
        number: u32,
        missing: u32,
        timeout: Duration,
        now: Instant,
    ) -> bool {
        let Some(newest) = self.newest.filter(|newest| !is_behind(number, *newest)) else {
            return false;
        };
        self.acknowledged = Some(number);
        if self
            .repair
            .is_some_and(|(last, _)| !is_behind(last, number))
        {
            self.repair = None;
        }
        if let Some(sample) = self.sample.take_if(|s| !is_behind(s.number, number)) {
            self.measured(&sample, now.saturating_duration_since(sample.sent));
        }
        let patient = |(_, since)| now.saturating_duration_since(since) < 2 * timeout;
        if missing < MANY || self.repair.is_some_and(patient) {
            return false;
        }
        self.repair = Some((newest, now));
        true
    }

    fn measured(&mut self, sample: &Sample, rtt: Duration) {
        let least = self.least_rtt.map_or(rtt, |least| least.min(rtt));
        self.least_rtt = Some(least);
        let queue = (least / 8).clamp(QUEUE.0, QUEUE.1);
        if rtt > least + queue {
            let share = least.as_secs_f64() / rtt.as_secs_f64();
            let limit = (f64::from(sample.under_way) * share) as u32;
            self.limit = Some(limit.max(LEAST));
        } else if let Some(limit) = &mut self.limit {
            *limit += *limit / 8 + 1;
        }
    }

    /// Whether what is missing is being sent again. The library's window does not grow meanwhile.
    pub(super) fn is_repairing(&self) -> bool {
        self.repair.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRIP: Duration = Duration::from_millis(100);
    const TIMEOUT: Duration = Duration::from_millis(300);

    #[test]
    fn start__a_queue_ends_it_and_the_first_loss_leaves_it_to_the_library() {
        let mut start = Start::default();
        let mut now = Instant::now();
        let first = u32::MAX - 50;
        let mut next = first;
        // Each round twice as many, and from the third on a queue.
        for (count, rtt) in [(20, TRIP), (40, TRIP), (80, TRIP + TRIP / 2)] {
            for _ in 0..count {
                assert!(start.has_room());
                assert!(start.sent(next, now));
                next = next.wrapping_add(1);
            }
            now += rtt;
            assert!(!start.acknowledged(next.wrapping_sub(1), 0, TIMEOUT, now));
        }
        assert_eq!(start.limit, Some(LEAST));
        for _ in 0..LEAST {
            assert!(start.has_room());
            start.sent(next, now);
            next = next.wrapping_add(1);
        }
        assert!(!start.has_room());
        now += TRIP;
        start.acknowledged(next.wrapping_sub(1), 0, TIMEOUT, now);
        assert!(start.limit > Some(LEAST) && start.has_room());
        assert!(!start.sent(next.wrapping_sub(1), now));
        assert_eq!(start.limit, None);
    }

    #[test]
    fn start__many_losses_are_repaired_together() {
        let mut start = Start::default();
        let now = Instant::now();
        for number in 0..100 {
            start.sent(number, now);
        }
        let mut said = |number, missing, at| start.acknowledged(number, missing, TIMEOUT, now + at);
        assert!(!said(9, MANY - 1, TRIP));
        assert!(said(9, MANY, TRIP));
        // Not again at once.
        assert!(!said(10, MANY, TRIP * 2));
        assert!(said(11, MANY, TRIP * 8));
        assert!(!said(200, MANY, TRIP * 20), "what was never sent");
        assert!(start.is_repairing());
        start.acknowledged(99, 0, TIMEOUT, now + TRIP * 9);
        assert!(!start.is_repairing());
    }
}
