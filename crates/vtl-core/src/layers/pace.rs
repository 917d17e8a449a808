//! Pacing: a stack without congestion control sends at a rate that was set for its hop, and no faster.

use super::{MS, Ns};

/// What may be sent at once after a pause, as time at the rate: timers are not much finer, and tasks wait for their turn.
const BURST: Ns = 4 * MS;
/// What is waited for at least once that is used up, as time at the rate: runs of packets cost less than single ones.
const QUANTUM: Ns = MS / 4;

/// Bounds the rate of packets.
#[derive(Clone, Copy, Debug)]
pub struct Pacer {
    /// Bits in a second.
    rate: u64,
    /// Time by which everything sent would be through at that rate.
    until: Ns,
    /// When the next packet may leave.
    next: Ns,
}

impl Pacer {
    /// Paces at this rate, bit/s, at least 1.
    pub fn new(rate: u64) -> Self {
        Self {
            rate: rate.max(1),
            until: 0,
            next: 0,
        }
    }

    /// When the next packet may leave.
    pub fn next(&self) -> Ns {
        self.next
    }

    /// Notes a packet of this many bytes on the link, that leaves now.
    pub fn sent(&mut self, now: Ns, bytes: usize) {
        let ns = bytes as u128 * 8 * 1_000_000_000 / u128::from(self.rate);
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        self.until = self.until.max(now).saturating_add(ns);
        if self.until > now.saturating_add(BURST) {
            self.next = self.until - (BURST - QUANTUM);
        }
    }

    /// Bytes at the rate in this time.
    pub fn bytes_in(&self, time: Ns) -> u64 {
        let bytes = u128::from(self.rate) * u128::from(time) / 8_000_000_000;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pacer__keeps_its_rate_and_bounds_bursts() {
        const SECOND: Ns = 1_000_000_000;
        let mut pacer = Pacer::new(20_000_000);
        let mut now = 5 * SECOND;
        let mut sent = 0_u64;
        while now < 6 * SECOND {
            while pacer.next() <= now {
                pacer.sent(now, 1250);
                sent += 1;
            }
            now += MS;
        }
        // 2,000 packets a second, and the burst once.
        assert!((2000..=2000 + 9).contains(&sent), "{sent}");
        assert_eq!(pacer.bytes_in(SECOND), 2_500_000);
        // A long pause earns no more than one burst.
        now += 100 * SECOND;
        let mut burst = 0;
        while pacer.next() <= now {
            pacer.sent(now, 1250);
            burst += 1;
        }
        assert!(burst <= 9, "{burst}");
        // Once it is used up, packets leave in runs.
        assert!(pacer.next() > now + QUANTUM / 2);
        // Nothing overflows.
        let mut slow = Pacer::new(0);
        slow.sent(now, usize::MAX);
        assert!(slow.next() > now);
    }
}
