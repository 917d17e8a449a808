//! What a session says of itself to schedulers ([`StackState`]), and where its chunks have got to.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    time::{Duration, Instant},
};

use vtl_core::{flow::Chunk, stacks::StackState};
use vtl_proto::frame::{CarrierId, FlowId, HEADER};

use super::{moving::Graft, session::Session};

/// What may wait in a session to be sent, at its rate: longer than this thread takes to come back, and short, since what
/// is given to a session cannot go by another one any more.
const UNSENT: Duration = Duration::from_millis(10);
/// The same of a slow session, packets.
const MIN_UNSENT: u64 = 16;
/// Maximum number of packets that are kept track of: more than a window.
const MAX_MARKS: usize = 65_536;
/// Allowance for the time that acknowledgements take beyond the round-trip time.
const SLACK: Duration = Duration::from_millis(5);

/// Positions of chunks in a session's packets.
#[derive(Default)]
pub(super) struct Loads {
    /// A scheduler looks at the session.
    is_used: Cell<bool>,
    /// Number of the path, and its round-trip time before the first sample.
    path: Cell<u8>,
    rtt: Cell<Duration>,
    /// Bytes of chunks: given to the session, put into packets, and acknowledged.
    given: Cell<u64>,
    placed: Cell<u64>,
    delivered: Cell<u64>,
    /// Packets that are not acknowledged, and how far they go in the bytes of chunks.
    marks: RefCell<VecDeque<(u64, u64)>>,
    /// Acknowledgements so far, and when the last one came; or when everything was acknowledged. The peer's packets do not
    /// count: a path may deliver in one direction only.
    heard: Cell<Option<(u64, Instant)>>,
}

impl Loads {
    /// Sets the path's number, and its round-trip time as far as it is known.
    pub(super) fn begin(&self, path: u8, rtt: Duration) {
        self.path.set(path);
        self.rtt.set(rtt);
    }

    /// Sets the path's number anew.
    pub(super) fn set_path(&self, path: u8) {
        self.path.set(path);
    }

    /// Number of the path.
    pub(super) fn path(&self) -> u8 {
        self.path.get()
    }

    /// Notes that a chunk was given to the session.
    pub(super) fn note_given(&self, bytes: usize) {
        self.given.set(self.given.get() + bytes as u64);
    }

    /// Notes bytes of a chunk in packet `number`.
    pub(super) fn note_placed(&self, number: u64, bytes: usize) {
        self.placed.set(self.placed.get() + bytes as u64);
        if self.is_used.get() {
            let mut marks = self.marks.borrow_mut();
            if marks.len() > MAX_MARKS {
                // Nobody has looked for long.
                marks.clear();
                self.is_used.set(false);
                return;
            }
            match marks.back_mut() {
                Some((last, placed)) if *last == number => *placed = self.placed.get(),
                _ => marks.push_back((number, self.placed.get())),
            }
        }
    }

    /// Bytes in packets below `acknowledged`.
    fn delivered(&self, acknowledged: u64) -> u64 {
        if !self.is_used.replace(true) {
            self.delivered.set(self.placed.get());
        }
        let mut marks = self.marks.borrow_mut();
        while let Some((_, placed)) = marks.pop_front_if(|(number, _)| *number < acknowledged) {
            self.delivered.set(placed);
        }
        self.delivered.get()
    }

    /// Whether no acknowledgement has come for longer than they take, although something is not acknowledged.
    fn is_late(&self, acks: u64, unacknowledged: u64, patience: Duration) -> bool {
        match self.heard.get() {
            Some((before, since)) if before == acks && unacknowledged > 0 => {
                since.elapsed() > patience
            }
            _ => {
                self.heard.set(Some((acks, Instant::now())));
                false
            }
        }
    }
}

/// Of the kernel's entry of a session.
pub(super) struct Sending {
    srtt: Duration,
    rtt_variance: Duration,
    cwnd: u64,
    pacing_gap_ns: u64,
    in_flight: u64,
    /// Sent, and not acknowledged: unlike the above it is 0 once everything is.
    unacknowledged: u64,
    next: u64,
    acks: u64,
}

impl Session {
    fn sending(&self) -> Option<Sending> {
        self.known(|entry| Sending {
            srtt: entry.srtt(),
            rtt_variance: entry.sender().rtt_variance,
            cwnd: entry.cwnd(),
            pacing_gap_ns: entry.pacing_gap_ns(),
            in_flight: entry.in_flight(),
            unacknowledged: entry.unacknowledged(),
            next: entry.next(),
            acks: entry.acks(),
        })
    }
}

impl Sending {
    /// Bytes of chunks a second, with so many in a packet.
    fn rate(&self, payload: u64) -> u64 {
        let per_second = |packets: u64, ns: u64| {
            let bytes = u128::from(packets) * u128::from(payload);
            u64::try_from(bytes * 1_000_000_000 / u128::from(ns)).unwrap_or(u64::MAX)
        };
        let srtt = self.srtt.as_nanos() as u64;
        match (self.pacing_gap_ns, srtt) {
            (0, 0) => 0,
            (0, srtt) => per_second(self.cwnd, srtt),
            (gap, _) => per_second(1, gap),
        }
    }
}

impl Graft {
    pub(super) fn state(&self, id: CarrierId) -> Option<StackState> {
        let loads = &self.loads;
        let sending = self.session.sending()?;
        let tx = self.session.tx.borrow();
        let payload = tx.max_payload().saturating_sub(HEADER).max(1) as u64;
        let (next, acknowledged) = (tx.next(), tx.acknowledged());
        drop(tx);
        let rate = sending.rate(payload);
        let queued = loads.given.get() - loads.placed.get();
        let unsent = next.saturating_sub(sending.next) + queued.div_ceil(payload);
        let may_wait = u128::from(rate) * UNSENT.as_nanos() / 1_000_000_000 / u128::from(payload);
        let srtt = match sending.srtt {
            Duration::ZERO => loads.rtt.get(),
            srtt => srtt,
        };
        let patience = srtt + SLACK + (4 * sending.rtt_variance).max(srtt / 4);
        Some(StackState {
            id,
            path: loads.path(),
            rtt_ns: srtt.as_nanos() as u64,
            rate,
            link_rate: 0,
            unacked: (sending.in_flight + unsent) * payload,
            has_room: u128::from(unsent) < may_wait.max(MIN_UNSENT.into()),
            is_late: loads.is_late(sending.acks, sending.unacknowledged, patience),
            given: loads.given.get(),
            delivered: loads.delivered(acknowledged),
        })
    }

    /// Takes a chunk at once, or not at all.
    pub(super) fn push_now(&self, flow: FlowId, chunk: Chunk) -> bool {
        // Never more than the queue's size.
        let Ok(room) = self.room.try_acquire_many(chunk.bytes.len() as u32) else {
            return false;
        };
        room.forget();
        self.push(flow, chunk);
        true
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn delivered__by_packets_from_when_a_scheduler_looks() {
        let loads = Loads::default();
        loads.note_given(3000);
        loads.note_placed(0, 1000);
        assert_eq!(loads.delivered(0), 1000, "of no interest");
        loads.note_placed(1, 500);
        loads.note_placed(1, 500);
        loads.note_placed(2, 1000);
        assert_eq!(
            [1, 2, 2, 9].map(|n| loads.delivered(n)),
            [1000, 2000, 2000, 3000]
        );
        assert!(loads.marks.borrow().is_empty());
    }

    #[test]
    fn note_placed__keeps_track_of_a_bounded_number() {
        let loads = Loads::default();
        loads.delivered(0);
        for number in 0..3 * MAX_MARKS as u64 {
            loads.note_given(1);
            loads.note_placed(number, 1);
        }
        assert!(loads.marks.borrow().len() <= MAX_MARKS + 1);
        assert_eq!(loads.delivered(0), 3 * MAX_MARKS as u64, "it looks again");
    }

    #[test]
    fn is_late__with_something_in_flight_only() {
        let loads = Loads::default();
        let now = |heard, in_flight| loads.is_late(heard, in_flight, Duration::ZERO);
        assert!(!now(1, 5), "the first look");
        std::thread::sleep(Duration::from_millis(1));
        assert!(now(1, 5));
        assert!(!now(1, 0));
        assert!(!now(2, 5), "heard");
    }
}
