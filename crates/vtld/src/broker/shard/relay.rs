//! Decides whether the daemon relays wake-ups to aware applications.
//!
//! The kernel's programs wake an application by an interrupt, which costs as much as several packets. When
//! wake-ups are frequent they leave them to the daemon, which polls at short intervals instead of sleeping, and
//! wakes all applications with news at once. One busy session alone does not justify that: it needs low
//! latency, as a rule.

/// Interval of decisions.
const PERIOD_NS: u64 = 2_000_000;
/// Threshold, in wake-ups for another session than the previous one per interval, below which the programs wake
/// applications themselves again.
const FEW: u32 = 12;

/// The decision, and its inputs.
#[derive(Default)]
pub(super) struct Relay {
    active: bool,
    /// Wake-ups relayed since `since_ns` for another session than `latest`.
    count: u32,
    /// The session of the latest wake-up.
    latest: u32,
    since_ns: u64,
}

impl Relay {
    /// Counts a wake-up relayed to a session's application.
    pub(super) fn note(&mut self, sid: u32) {
        self.count += u32::from(sid != self.latest);
        self.latest = sid;
    }

    /// Decides anew. Returns the new decision, for the programs, if it has changed.
    pub(super) fn decide(&mut self, now_ns: u64) -> Option<bool> {
        if !self.active && self.count == 0 {
            return None;
        }
        if self.active && now_ns.saturating_sub(self.since_ns) < PERIOD_NS {
            return None;
        }
        let before = self.active;
        // The programs only ask for it if wake-ups are frequent.
        self.active = !before || self.count >= FEW;
        self.count = 0;
        self.since_ns = now_ns;
        (self.active != before).then_some(self.active)
    }

    /// Whether to poll rather than to sleep.
    pub(super) fn active(&self) -> bool {
        self.active
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relay__begins_with_the_first_and_ends_when_they_are_few() {
        let mut relay = Relay::default();
        assert_eq!((relay.decide(5), relay.active()), (None, false));
        relay.note(1);
        assert_eq!((relay.decide(10), relay.active()), (Some(true), true));
        let mut now = 10;
        for _ in 0..3 {
            (2..FEW + 2).for_each(|sid| relay.note(sid));
            assert_eq!(relay.decide(now + PERIOD_NS - 1), None);
            now += PERIOD_NS;
            assert_eq!((relay.decide(now), relay.active()), (None, true));
        }
        relay.note(1);
        now += PERIOD_NS;
        assert_eq!((relay.decide(now), relay.active()), (Some(false), false));
    }

    #[test]
    fn relay__one_session_alone_is_no_crowd() {
        let mut relay = Relay::default();
        relay.note(7);
        assert_eq!(relay.decide(0), Some(true));
        (0..1000).for_each(|_| relay.note(7));
        assert_eq!(relay.decide(PERIOD_NS), Some(false));
    }
}
