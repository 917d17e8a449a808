//! Scheduler of egress. The cost of a step does not grow with the number of sessions, except for timers, which
//! are a heap.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

/// Due on an event only.
const NEVER: u64 = u64::MAX;
/// Due at once.
const NOW: u64 = 0;

#[derive(Clone, Copy)]
struct Entry {
    /// When the session is due: `NOW`, `NEVER`, or a time.
    due_ns: u64,
    /// Time of its earliest entry in the heap, which may precede `due_ns`; `NEVER` without one.
    armed_ns: u64,
}

/// Due times of sessions, in nanoseconds of one monotonic clock.
pub(in crate::broker) struct Schedule {
    ready: VecDeque<u32>,
    timers: BinaryHeap<Reverse<(u64, u32)>>,
    sessions: Vec<Entry>,
}

impl Schedule {
    /// Creates a schedule for sessions with indexes below `places`.
    pub(in crate::broker) fn new(places: u32) -> Self {
        let none = Entry {
            due_ns: NEVER,
            armed_ns: NEVER,
        };
        Self {
            ready: VecDeque::new(),
            timers: BinaryHeap::new(),
            sessions: vec![none; places as usize],
        }
    }

    /// Schedules a session at once, behind those already due.
    pub(in crate::broker) fn now(&mut self, sid: u32) {
        self.at(sid, NOW);
    }

    /// Schedules a session at once, before all others.
    pub(in crate::broker) fn first(&mut self, sid: u32) {
        let entry = &mut self.sessions[sid as usize];
        if entry.due_ns != NOW {
            entry.due_ns = NOW;
            self.ready.push_front(sid);
        }
    }

    /// Schedules a session: 0 for at once, `u64::MAX` for on an event only. One that is due at once stays so.
    pub(in crate::broker) fn at(&mut self, sid: u32, ns: u64) {
        let entry = &mut self.sessions[sid as usize];
        if entry.due_ns == NOW {
            return;
        }
        entry.due_ns = ns;
        match ns {
            NOW => self.ready.push_back(sid),
            NEVER => {}
            _ if ns < entry.armed_ns => {
                entry.armed_ns = ns;
                self.timers.push(Reverse((ns, sid)));
            }
            _ => {} // the heap's entry is moved when it expires
        }
    }

    /// Cancels a session's schedule.
    pub(in crate::broker) fn cancel(&mut self, sid: u32) {
        self.sessions[sid as usize].due_ns = NEVER;
    }

    /// Makes sessions with expired timers ready.
    pub(in crate::broker) fn expire(&mut self, now_ns: u64) {
        while let Some(&Reverse((ns, sid))) = self.timers.peek()
            && ns <= now_ns
        {
            self.timers.pop();
            let entry = &mut self.sessions[sid as usize];
            if entry.armed_ns != ns {
                continue; // superseded by an earlier one
            }
            entry.armed_ns = NEVER;
            let due = entry.due_ns;
            if due != NOW && due != NEVER {
                self.at(sid, if due <= now_ns { NOW } else { due });
            }
        }
    }

    /// When [`Schedule::pop`] will return a session, at the earliest: 0 for now, `u64::MAX` for never.
    pub(in crate::broker) fn next(&self) -> u64 {
        if !self.ready.is_empty() {
            return NOW;
        }
        self.timers.peek().map_or(NEVER, |Reverse((ns, _))| *ns)
    }

    /// Upper bound of the number of ready sessions.
    pub(in crate::broker) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Takes the next session that is due.
    pub(in crate::broker) fn pop(&mut self) -> Option<u32> {
        while let Some(sid) = self.ready.pop_front() {
            let entry = &mut self.sessions[sid as usize];
            if entry.due_ns == NOW {
                entry.due_ns = NEVER;
                return Some(sid);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(schedule: &mut Schedule) -> Vec<u32> {
        std::iter::from_fn(|| schedule.pop()).collect()
    }

    #[test]
    fn pop__in_the_order_of_arrival_and_once_each() {
        let mut s = Schedule::new(1024);
        for sid in [3, 1, 3, 2, 1] {
            s.now(sid);
        }
        assert_eq!((s.next(), s.ready()), (0, 3));
        assert_eq!(all(&mut s), [3, 1, 2]);
        assert_eq!((s.next(), s.ready()), (u64::MAX, 0));
    }

    #[test]
    fn first__goes_before_all_others() {
        let mut s = Schedule::new(1024);
        s.now(1);
        s.first(2);
        s.first(1);
        assert_eq!(all(&mut s), [2, 1]);
    }

    #[test]
    fn at__ready_when_its_time_has_come() {
        let mut s = Schedule::new(1024);
        s.at(1, 500);
        s.at(2, 300);
        assert_eq!(s.next(), 300);
        s.expire(299);
        assert_eq!(s.pop(), None);
        s.expire(300);
        assert_eq!(all(&mut s), [2]);
        s.expire(1000);
        assert_eq!(all(&mut s), [1]);
    }

    #[test]
    fn at__later_and_earlier_than_before() {
        let mut s = Schedule::new(1024);
        s.at(1, 100);
        s.at(1, 900);
        s.expire(100);
        assert_eq!((s.pop(), s.next()), (None, 900));
        s.at(1, 200);
        assert_eq!(s.next(), 200);
        s.expire(200);
        assert_eq!(all(&mut s), [1]);
        s.expire(900);
        assert_eq!(s.pop(), None, "the old time means nothing any more");
    }

    #[test]
    fn at__many_changes_leave_no_heap_behind() {
        let mut s = Schedule::new(1024);
        for ns in 1000..100_000 {
            s.at(1, ns);
        }
        assert_eq!(s.timers.len(), 1);
    }

    #[test]
    fn at__does_not_put_off_what_is_due() {
        let mut s = Schedule::new(1024);
        s.now(1);
        s.at(1, 100);
        s.at(1, u64::MAX);
        assert_eq!(all(&mut s), [1]);
    }

    #[test]
    fn cancel__neither_queue_nor_timer() {
        let mut s = Schedule::new(1024);
        s.now(1);
        s.at(2, 100);
        s.cancel(1);
        s.cancel(2);
        s.expire(100);
        assert_eq!(s.pop(), None);
        // The same index is used again.
        s.now(1);
        assert_eq!(all(&mut s), [1]);
    }
}
