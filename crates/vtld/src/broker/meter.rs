//! Recent loss and delivery rate of a session, for any graft.

use std::collections::VecDeque;

use vtl_proto::intf::vtl_meter;

/// Length of the measurement window.
const SPAN_NS: u64 = 10_000_000_000;
/// Interval between two marks.
const STEP_NS: u64 = 1_000_000_000;
/// Minimum interval of a rate sample: a shorter one may be a burst.
const MIN_SAMPLE_NS: u64 = 300_000_000;

/// Totals of a session at one time, as of the latest acknowledgement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// Nanoseconds.
    pub(super) at_ns: u64,
    /// Packets that have arrived at the peer for the first time.
    pub(super) received: u64,
    /// Transmissions, and how many of them have arrived, modulo 2^32.
    pub(super) transmitted: u32,
    pub(super) arrived: u32,
}

impl Mark {
    /// Reads the kernel's counters.
    pub(super) fn new(at_ns: u64, meter: &vtl_meter) -> Self {
        Self {
            at_ns,
            received: meter.received,
            transmitted: meter.xid.wrapping_sub(meter.extra),
            arrived: meter.arrived,
        }
    }
}

/// Measures by these totals. An idle session keeps the figures of the time when it was last busy.
#[derive(Debug)]
pub(super) struct Meter {
    marks: VecDeque<Mark>,
    latest: Mark,
    /// Totals since the session began, without the modulus.
    transmitted: u64,
    arrived: u64,
}

impl Meter {
    /// Creates the meter of a session that begins now.
    pub(super) fn new(now_ns: u64) -> Self {
        let begin = Mark {
            at_ns: now_ns,
            ..Mark::default()
        };
        Self {
            marks: [begin].into(),
            latest: begin,
            transmitted: 0,
            arrived: 0,
        }
    }

    /// Adds a sample. Call it regularly, and before reading.
    pub(super) fn note(&mut self, now: Mark) {
        let last = self.latest;
        if now.received == last.received {
            return;
        }
        self.transmitted += u64::from(now.transmitted.wrapping_sub(last.transmitted));
        self.arrived += u64::from(now.arrived.wrapping_sub(last.arrived));
        self.latest = now;
        let due = |mark: &Mark| now.at_ns.saturating_sub(mark.at_ns) >= STEP_NS;
        if self.marks.back().is_none_or(due) {
            self.marks.push_back(now);
        }
        // Keep one mark from before the window: the window starts there.
        let over = |mark: &Mark| now.at_ns.saturating_sub(mark.at_ns) > SPAN_NS;
        while self.marks.get(1).is_some_and(over) {
            self.marks.pop_front();
        }
    }

    /// Transmissions lost since the session began.
    pub(super) fn lost(&self) -> u64 {
        self.transmitted.saturating_sub(self.arrived)
    }

    /// Recent loss rate of transmissions, percent.
    pub(super) fn loss_pct(&self) -> f64 {
        let Some(first) = self.marks.front() else {
            return 0.0;
        };
        let transmitted = self.latest.transmitted.wrapping_sub(first.transmitted);
        let arrived = self.latest.arrived.wrapping_sub(first.arrived);
        match transmitted {
            0 => 0.0,
            _ => f64::from(transmitted.saturating_sub(arrived)) / f64::from(transmitted) * 100.0,
        }
    }

    /// Maximum recent delivery rate, packets per second.
    pub(super) fn rate(&self) -> f64 {
        let ends = self.marks.iter().skip(1).chain([&self.latest]);
        self.marks
            .iter()
            .zip(ends)
            .filter(|(a, b)| b.at_ns.saturating_sub(a.at_ns) >= MIN_SAMPLE_NS)
            .map(|(a, b)| {
                let received = b.received.saturating_sub(a.received) as f64;
                received / ((b.at_ns - a.at_ns) as f64 / 1e9)
            })
            .fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn mark(at_ms: u64, transmitted: u32, arrived: u32) -> Mark {
        Mark {
            at_ns: at_ms * MS,
            received: arrived.into(),
            transmitted,
            arrived,
        }
    }

    #[test]
    fn loss__is_of_the_last_ten_seconds() {
        let mut meter = Meter::new(0);
        assert_eq!(
            (meter.loss_pct(), meter.rate(), meter.lost()),
            (0.0, 0.0, 0)
        );
        for step in 0..=200u32 {
            // A hundred a step; half of them lost at first, none later.
            let arrived = step.min(50) * 50 + step.saturating_sub(50) * 100;
            meter.note(mark(u64::from(step) * 100, step * 100, arrived));
        }
        assert_eq!(meter.loss_pct(), 0.0);
        assert_eq!(meter.lost(), 2500);
        assert_eq!(meter.rate(), 1000.0);
        assert!(meter.marks.len() <= 12);
    }

    #[test]
    fn note__an_idle_session_keeps_its_figures() {
        let mut meter = Meter::new(0);
        meter.note(mark(500, 1000, 900));
        // Nothing but questions whether the peer is there, which are left out.
        for s in 1..100 {
            meter.note(mark(500 + s * 1000, 1000, 900));
        }
        assert_eq!((meter.loss_pct(), meter.rate()), (10.0, 1800.0));
    }

    #[test]
    fn note__totals_go_on_beyond_the_modulus() {
        let mut meter = Meter::new(0);
        let mut now = Mark::default();
        for second in 1..=40 {
            now.at_ns = second * 1000 * MS;
            now.received += 1 << 27;
            now.transmitted = now.transmitted.wrapping_add(1 << 28);
            now.arrived = now.arrived.wrapping_add(1 << 27);
            meter.note(now);
        }
        assert_eq!((meter.loss_pct(), meter.lost()), (50.0, 40 << 27));
    }
}
