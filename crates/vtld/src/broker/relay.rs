//! Whether the daemon hands wake-ups on to aware applications.
//!
//! The kernel's programs wake an application by an interrupt, which costs as much as several
//! packets. When that happens too often they leave it to the daemon, which naps instead of going to
//! sleep, and wakes everybody whom there is news for between two naps.

/// How often it is decided anew.
const PERIOD_NS: u64 = 2_000_000;
/// With fewer wake-ups in that time the programs make them themselves again.
const FEW: u32 = 12;

/// The decision, and what it rests on.
#[derive(Default)]
pub(super) struct Relay {
    active: bool,
    /// Wake-ups handed on since `since_ns`.
    count: u32,
    since_ns: u64,
}

impl Relay {
    /// One was handed on.
    pub(super) fn note(&mut self) {
        self.count += 1;
    }

    /// Decides. Returns what is to be told to the programs, if that has changed.
    pub(super) fn decide(&mut self, now_ns: u64) -> Option<bool> {
        if !self.active && self.count == 0 {
            return None;
        }
        if self.active && now_ns.saturating_sub(self.since_ns) < PERIOD_NS {
            return None;
        }
        let before = self.active;
        // The programs would not have asked without a crowd.
        self.active = !before || self.count >= FEW;
        self.count = 0;
        self.since_ns = now_ns;
        (self.active != before).then_some(self.active)
    }

    /// Whether to nap rather than to sleep.
    pub(super) fn active(&self) -> bool {
        self.active
    }
}
