//! The receiver's end of `nack`.

use std::collections::VecDeque;

use vtl_proto::layers::{Nack as Header, Report, near};

use super::super::{MS, Ns, Out, Packet};

/// Packets after which a report is due: if nothing is missing, and at least if something is.
const EVERY: u64 = 32;
const EVERY_MISSING: u64 = 8;
/// Time after which one is due for packets that have come: likewise.
const DELAY: Ns = 20 * MS;
const DELAY_MISSING: Ns = 5 * MS;
/// And for packets that come again, which say that a report has got lost.
const DELAY_AGAIN: Ns = MS;

/// What has arrived.
pub(super) struct Receiver {
    window: u64,
    /// All packets below have arrived;
    cum: u64,
    /// which of those behind it have.
    arrived: VecDeque<bool>,
    /// All packets below were sent, as far as is known; at least as many as `arrived` is about.
    end: u64,
    /// The latest transmission, and when it came; the highest one.
    latest: Option<(u64, Ns)>,
    highest: u64,
    dups: u32,
    /// Packets since the last report, and when one is due.
    unreported: u64,
    due: Option<Ns>,
}

impl Receiver {
    pub(super) fn new(window: u32) -> Self {
        Self {
            window: window.into(),
            cum: 0,
            arrived: VecDeque::new(),
            end: 0,
            latest: None,
            highest: 0,
            dups: 0,
            unreported: 0,
            due: None,
        }
    }

    fn is_missing(&self) -> bool {
        self.cum < self.end
    }

    /// Notes a transmission.
    fn note(&mut self, now: Ns, xid: u32) {
        let xid = near(xid, self.highest);
        self.highest = self.highest.max(xid);
        self.latest = Some((xid, now));
    }

    fn due_in(&mut self, now: Ns, delay: Ns) {
        let at = now + delay;
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }

    pub(super) fn data(&mut self, now: Ns, seq: u32, xid: u32, packet: Packet, out: &mut Out) {
        let seq = near(seq, self.cum);
        if seq >= self.cum + self.window {
            return out.refuse();
        }
        self.note(now, xid);
        let place = seq.checked_sub(self.cum).map(|place| place as usize);
        let is_new = place.is_some_and(|place| self.arrived.get(place) != Some(&true));
        let Some(place) = place.filter(|_| is_new) else {
            self.dups = self.dups.wrapping_add(1);
            out.refuse();
            return self.due_in(now, DELAY_AGAIN);
        };
        if self.arrived.len() <= place {
            self.arrived.resize(place + 1, false);
        }
        self.arrived[place] = true;
        while self.arrived.front() == Some(&true) {
            self.arrived.pop_front();
            self.cum += 1;
        }
        // A gap that was not there before.
        let is_gap = seq > self.end;
        self.end = self.end.max(seq + 1).max(self.cum);
        self.unreported += 1;
        out.up(packet);
        let (every, delay) = match self.is_missing() {
            // The more is under way the less often.
            true => ((self.end - self.cum) / 8, DELAY_MISSING),
            false => (EVERY, DELAY),
        };
        if is_gap || self.unreported >= every.clamp(EVERY_MISSING, EVERY) {
            self.report(now, out);
        } else {
            self.due_in(now, delay);
        }
    }

    pub(super) fn probe(&mut self, now: Ns, next: u32, xid: u32, out: &mut Out) {
        let next = near(next, self.cum).min(self.cum + self.window);
        self.note(now, xid);
        self.end = self.end.max(next);
        self.report(now, out);
    }

    pub(super) fn poll(&mut self, now: Ns, out: &mut Out) {
        if self.due.is_some_and(|due| due <= now) {
            self.report(now, out);
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Ns> {
        self.due
    }

    /// Sends a report.
    fn report(&mut self, now: Ns, out: &mut Out) {
        let Some((echo, at)) = self.latest else {
            return;
        };
        self.due = None;
        self.unreported = 0;
        let (missing, end) = self.missing();
        let held = (now.saturating_sub(at) / 1000).min(u32::MAX.into());
        // Numbers truncated on purpose.
        let report = Report {
            cum: self.cum as u32,
            end: end as u32,
            echo: echo as u32,
            held: held as u32,
            dups: self.dups,
            missing,
        };
        out.down(Packet::new(&Header::Report(report).emit()));
    }

    /// The runs of missing packets, as many as a report has, and up to where they say everything.
    fn missing(&self) -> (Vec<(u16, u16)>, u64) {
        let mut runs: Vec<(u16, u16)> = Vec::new();
        let (mut before, mut len) = (0_u16, 0_u16);
        let ahead = (self.end - self.cum) as usize;
        for place in 0..ahead {
            let has_arrived = self.arrived.get(place) == Some(&true);
            if has_arrived && len > 0 {
                runs.push((before, len));
                (before, len) = (0, 0);
                if runs.len() == Report::MAX_RUNS {
                    return (runs, self.cum + place as u64);
                }
            }
            // The window is less than 2^16 packets.
            match has_arrived {
                true => before += 1,
                false => len += 1,
            }
        }
        if len > 0 {
            runs.push((before, len));
        }
        (runs, self.end)
    }
}
