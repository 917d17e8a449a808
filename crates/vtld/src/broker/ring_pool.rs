//! Pool of ring sets, filled by a thread of its own: creating and clearing large ones keeps a processor busy for up to
//! 0.2 s.
//!
//! Rings come in a few sizes, for short and for long paths, within a quota of memory; as it runs out, sets
//! become smaller.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::Duration,
};

use vtl_bpf::rings::{RingMaker, RingSet, bytes};
use vtl_proto::intf;

use super::{GRACE_NS, MS};
use crate::panics::test_point;

/// Minimum size, of which there is memory for all sessions that may come.
const MIN: u32 = 8;
/// Size for when memory is short, or many sessions share a very short path.
const SMALL: u32 = 64;
/// Size for each of many sessions on a path within a site: 1 Gbit/s at 1 ms.
const SHARED: u32 = 256;
/// Size for a path within a site: 10 Gbit/s at 1 ms. Larger rings only cost cache misses.
pub(super) const NEAR: u32 = 1024;
/// Size for paths over the internet, and for unknown ones: four bandwidth-delay products of 1 Gbit/s at 50 ms,
/// since a packet lost twice blocks for three round trips.
pub(super) const FAR: u32 = 16384;
/// Size of a lot, in bytes and in sets: sets are created in lots when sessions come faster than single sets can
/// be made.
const LOT_BYTES: u64 = 64 << 20;
const LOT_SETS: u64 = 32;
/// Pause after replacing a set, per byte: 2 s for 64 MiB. Clearing those takes a processor up to 0.2 s, and
/// running sessions should lose at most a tenth of its time.
const PAUSE_NS_PER_BYTE: u64 = 30;
/// Time of one full packet at 1 Gbit/s, µs.
const PACKET_US: u128 = 12;

/// Slots for a path with this round-trip time, at most `max`: four bandwidth-delay products at 1 Gbit/s.
/// Faster paths are shorter as a rule, and get at least [`NEAR`]; less in a crowd of sessions, so that their
/// rings together stay in the caches.
pub(super) fn slots_for(rtt: Duration, max: u32, crowd: bool) -> u32 {
    let packets = (4 * rtt.as_micros() / PACKET_US).min(intf::VTL_MAX_WINDOW.into()) as u32;
    let wanted = packets.next_power_of_two();
    let wanted = match crowd && wanted <= NEAR {
        true => wanted.clamp(SMALL, SHARED),
        false => wanted.max(NEAR),
    };
    wanted.min(max)
}

/// Maximum slots, at least [`MIN`], of rings within this memory.
pub(super) fn slots_within(memory: u64) -> u32 {
    let sizes = std::iter::successors(Some(MIN), |size| Some(size * 2));
    let fit = sizes.take_while(|size| *size <= intf::VTL_MAX_WINDOW && bytes(*size) <= memory);
    fit.last().unwrap_or(MIN)
}

/// Number of sets of one size in a lot.
fn lot(slots: u32) -> usize {
    (LOT_BYTES / bytes(slots)).clamp(1, LOT_SETS) as usize
}

/// Time without a new session after which taken rings are replaced.
const RESTOCK_NS: u64 = 1_000 * MS;
/// Time after the latest session's opening until spare rings are freed.
const SPARE_NS: u64 = 10_000 * MS;

enum Order {
    Make(u32, usize),
    /// Clear it for reuse.
    Recycle(RingSet),
    /// Free it.
    Retire(RingSet),
}

enum Delivery {
    /// Result of an order for sets of this many slots.
    Made(u32, vtl_bpf::Result<RingSet>),
    Recycled(RingSet),
}

/// The pool of ring sets, for the broker's thread.
pub(super) struct RingPool {
    orders: Sender<Order>,
    deliveries: Receiver<Delivery>,
    /// Sets ready for use, by size.
    ready: BTreeMap<u32, Vec<RingSet>>,
    /// Sets ordered and not delivered yet.
    coming: usize,
    /// Sizes to replace, of which sets were taken.
    owed: BTreeSet<u32>,
    /// Time of the next replacement.
    replenish_ns: u64,
    /// When a set was last taken.
    taken_ns: u64,
    /// Sets taken since the latest replacement.
    rush: usize,
    /// A request waits for a set.
    wanted: bool,
    /// Error to report to that request.
    failed: Option<vtl_bpf::Error>,
    /// Number of sets to keep ready of each usual size.
    level: usize,
    /// The largest size.
    max: u32,
}

impl RingPool {
    /// Starts the thread, which creates `level` sets of each usual size up to `max` packets, within a quota of
    /// `budget` bytes for all existing sets, part of which is reserved for `sessions` sessions. It calls `call`
    /// after deliveries.
    pub(super) fn start(
        maker: RingMaker,
        max: u32,
        level: usize,
        budget: u64,
        sessions: usize,
        call: impl Fn() + Send + 'static,
    ) -> Self {
        let (orders, inbox) = mpsc::channel();
        let (outbox, deliveries) = mpsc::channel();
        let workshop = Workshop {
            maker,
            budget,
            used: 0,
            sessions: sessions as u64,
            sets: 0,
            outbox,
            call: Box::new(call),
        };
        thread::Builder::new()
            .name("vtl-rings".into())
            .spawn(move || workshop.run(&inbox))
            .expect("a thread can be started");
        let mut pool = Self {
            orders,
            deliveries,
            ready: BTreeMap::new(),
            coming: 0,
            owed: BTreeSet::new(),
            replenish_ns: 0,
            taken_ns: 0,
            rush: 0,
            wanted: false,
            failed: None,
            level,
            max,
        };
        let mut sizes = vec![FAR.min(max), NEAR.min(max)];
        sizes.dedup();
        for size in sizes {
            pool.order(size, level);
        }
        pool
    }

    fn order(&mut self, slots: u32, count: usize) {
        if count > 0 && self.orders.send(Order::Make(slots, count)).is_ok() {
            self.coming += count;
        }
    }

    fn accept(&mut self, delivery: Delivery) -> vtl_bpf::Result<()> {
        let set = match delivery {
            Delivery::Recycled(set) => set,
            Delivery::Made(ordered, made) => {
                self.coming -= 1;
                let set = made?;
                if set.slots < ordered {
                    self.owed.remove(&ordered); // no memory for that size now
                }
                set
            }
        };
        self.ready.entry(set.slots).or_default().push(set);
        Ok(())
    }

    fn collect(&mut self) {
        while let Ok(delivery) = self.deliveries.try_recv() {
            if let Err(error) = self.accept(delivery) {
                tracing::debug!(%error, "rings: cannot make");
                self.owed.clear();
                if self.wanted {
                    // The first one says why; those behind it, at most, that there is no memory.
                    self.failed.get_or_insert(error);
                }
            }
        }
    }

    /// Whether [`RingPool::take`] will find a set. If not, some are being made: ask again when the thread has
    /// called.
    ///
    /// # Errors
    /// None can be made.
    pub(super) fn prepare(&mut self, slots: u32) -> vtl_bpf::Result<bool> {
        self.collect();
        if self.ready.values().any(|sets| !sets.is_empty()) {
            self.wanted = false;
            self.failed = None;
            return Ok(true);
        }
        if self.coming > 0 {
            self.wanted = true;
            return Ok(false);
        }
        if let Some(error) = self.failed.take() {
            self.wanted = false;
            return Err(error);
        }
        self.wanted = true;
        let slots = slots.min(self.max);
        // One set, or a lot if sessions come faster than single sets can be made.
        let rush = self.rush > self.level;
        self.order(slots, if rush { lot(slots) } else { 1 });
        Ok(false)
    }

    /// Takes a set of rings of `slots` packets, or of the next larger size, else of the next smaller one. Never
    /// blocks: [`RingPool::prepare`] says whether there is any.
    ///
    /// Sets taken by few sessions are not replaced at once: creating rings keeps a processor busy, which would delay
    /// the new session.
    pub(super) fn take(&mut self, slots: u32, now_ns: u64) -> Option<RingSet> {
        let slots = slots.min(self.max);
        let larger = self.ready.range(slots..).find(|(_, s)| !s.is_empty());
        let smaller = || self.ready.range(..slots).rfind(|(_, s)| !s.is_empty());
        let size = larger.or_else(smaller).map(|(size, _)| *size)?;
        let set = self.ready.get_mut(&size)?.pop()?;
        self.owed.extend([slots, size]);
        self.rush += 1;
        self.taken_ns = now_ns;
        let left = self.ready.get(&slots).map_or(0, Vec::len) + self.coming;
        if self.rush > self.level && left < lot(slots).div_ceil(2) {
            self.order(slots, lot(slots)); // before the pool is empty
        }
        Some(set)
    }

    /// Housekeeping: replaces taken sets and frees spare ones if no session has been opened for a while.
    pub(super) fn tick(&mut self, now_ns: u64) {
        let quiet = now_ns.saturating_sub(self.taken_ns);
        if quiet > RESTOCK_NS {
            self.replenish(now_ns);
        }
        if quiet > SPARE_NS {
            self.trim();
        }
    }

    /// Replaces taken sets one at a time, small ones first.
    fn replenish(&mut self, now_ns: u64) {
        self.collect();
        self.rush = 0;
        if self.coming > 0 || now_ns < self.replenish_ns {
            return;
        }
        while let Some(slots) = self.owed.first().copied() {
            if self.ready.get(&slots).map_or(0, Vec::len) < self.level {
                self.order(slots, 1);
                self.replenish_ns = now_ns + bytes(slots) * PAUSE_NS_PER_BYTE;
                return;
            }
            self.owed.pop_first();
        }
    }

    /// Returns a set that no application has mapped, which may be reused.
    pub(super) fn put(&mut self, set: RingSet) {
        self.collect();
        let enough = self.ready.get(&set.slots).map_or(0, Vec::len) >= self.level;
        let order = if enough {
            Order::Retire
        } else {
            Order::Recycle
        };
        let _ = self.orders.send(order(set));
    }

    /// Returns a set that an application may still have mapped: it is never reused.
    pub(super) fn put_exposed(&self, set: RingSet) {
        let _ = self.orders.send(Order::Retire(set));
    }

    /// Frees sets made for a rush that is over.
    fn trim(&mut self) {
        self.collect();
        for sets in self.ready.values_mut() {
            for set in sets.drain(self.level.min(sets.len())..) {
                let _ = self.orders.send(Order::Retire(set));
            }
        }
    }
}

/// The thread's side.
struct Workshop {
    maker: RingMaker,
    /// Memory quota of all sets, bytes.
    budget: u64,
    /// Memory in use, bytes.
    used: u64,
    /// Maximum number of sessions.
    sessions: u64,
    /// Number of sets.
    sets: u64,
    outbox: Sender<Delivery>,
    /// Called after deliveries.
    call: Box<dyn Fn() + Send>,
}

impl Workshop {
    fn run(mut self, inbox: &Receiver<Order>) {
        while let Ok(order) = inbox.recv() {
            test_point();
            let mut making = Vec::new();
            let mut ended = Vec::new();
            for order in std::iter::once(order).chain(inbox.try_iter()) {
                match order {
                    Order::Make(slots, count) => making.push((slots, count)),
                    Order::Recycle(set) => ended.push((set, true)),
                    Order::Retire(set) => ended.push((set, false)),
                }
            }
            // First: requests may wait for these.
            for (slots, count) in making {
                if self.make(slots, count).is_none() {
                    return;
                }
            }
            if !ended.is_empty() {
                thread::sleep(Duration::from_nanos(GRACE_NS));
                if self.clean_up(ended).is_none() {
                    return;
                }
            }
        }
    }

    /// Largest size up to `slots` within the quota.
    fn affordable(&self, slots: u32) -> Option<u32> {
        let reserved = bytes(MIN) * self.sessions.saturating_sub(self.sets);
        affordable(slots, self.used, self.budget, reserved)
    }

    /// Delivers `count` sets or errors. `None` if the receiver has gone.
    fn make(&mut self, slots: u32, count: usize) -> Option<()> {
        let mut sizes = Vec::new();
        while sizes.len() < count
            && let Some(size) = self.affordable(slots)
        {
            self.used += bytes(size);
            self.sets += 1;
            sizes.push(size);
        }
        let mut failure = None;
        let made = self.maker.make(&sizes).unwrap_or_else(|error| {
            failure = Some(error);
            Vec::new()
        });
        self.used -= sizes[made.len()..].iter().copied().map(bytes).sum::<u64>();
        self.sets -= (sizes.len() - made.len()) as u64;
        let missing = count - made.len();
        for set in made {
            self.outbox.send(Delivery::Made(slots, Ok(set))).ok()?;
        }
        for _ in 0..missing {
            let error = failure.take().unwrap_or_else(out_of_memory);
            self.outbox.send(Delivery::Made(slots, Err(error))).ok()?;
        }
        (self.call)();
        Some(())
    }

    fn clean_up(&mut self, ended: Vec<(RingSet, bool)>) -> Option<()> {
        let mut retired = Vec::new();
        for (set, again) in ended {
            let clear = || {
                vtl_ring::clear(set.transmit(), set.slots)
                    .and_then(|()| vtl_ring::clear(set.receive(), set.slots))
            };
            // A set that cannot be cleared must not be reused.
            if again && clear().is_ok() {
                self.outbox.send(Delivery::Recycled(set)).ok()?;
            } else {
                retired.push(set);
            }
        }
        let freed: u64 = retired.iter().map(|s| bytes(s.slots)).sum();
        let count = retired.len() as u64;
        match self.maker.retire(retired) {
            Ok(()) => {
                self.used -= freed;
                self.sets -= count;
            }
            Err(error) => tracing::warn!(%error, "rings: cannot free"),
        }
        Some(())
    }
}

/// Largest size up to `slots` for which `used` of `budget` bytes leave room. Large sets get only half of the
/// budget and those for near peers three quarters, so that many small ones fit; the bytes `reserved` are for
/// the smallest only.
fn affordable(slots: u32, used: u64, budget: u64, reserved: u64) -> Option<u32> {
    let free = budget.saturating_sub(reserved);
    let share = |size: u32| match size {
        MIN => budget,
        _ if size > NEAR => free.min(budget / 2),
        _ if size > SHARED => free.min(budget / 4 * 3),
        _ => free,
    };
    [slots, FAR, NEAR, SHARED, SMALL, MIN]
        .into_iter()
        .filter(|size| *size <= slots)
        .find(|size| used + bytes(*size) <= share(*size))
}

fn out_of_memory() -> vtl_bpf::Error {
    vtl_bpf::Error::System {
        what: "no memory for rings: raise vtld --ring-memory".into(),
        source: std::io::ErrorKind::OutOfMemory.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn affordable__smaller_ones_as_memory_runs_out() {
        const BUDGET: u64 = 1 << 30;
        let (mut used, mut sizes) = (0, Vec::new());
        while let Some(size) = affordable(32768, used, BUDGET, 0) {
            used += bytes(size);
            sizes.push(size);
        }
        assert!(used <= BUDGET && sizes.is_sorted_by(|a, b| a >= b));
        let count = |size| sizes.iter().filter(|s| **s == size).count();
        assert_eq!([32768, 16384].map(count), [3, 1]);
        assert!(count(1024) > 50 && count(256) > 200);
        assert_eq!(sizes.last(), Some(&MIN));
        assert_eq!(affordable(64, 0, BUDGET, 0), Some(64));
        assert_eq!(affordable(64, 0, BUDGET, BUDGET), Some(MIN));
        assert_eq!(affordable(32768, 0, 0, 0), None);
    }

    #[test]
    fn slots_within__the_share_of_one_of_many() {
        let sizes = [0, 64 << 10, 100 << 10, 320 << 10, 1 << 40].map(slots_within);
        assert_eq!(sizes, [MIN, MIN, 16, 64, intf::VTL_MAX_WINDOW]);
    }

    #[test]
    fn slots_for__grows_with_the_round_trip_and_never_beyond_the_most() {
        let ms = |n: u64| Duration::from_micros(n * 1000);
        let sizes = [0, 1, 3, 10, 49, 100, 600].map(|n| slots_for(ms(n), 32768, false));
        assert_eq!(sizes, [1024, 1024, 1024, 4096, 16384, 32768, 32768]);
        let sizes = [0, 10, 600].map(|n| slots_for(ms(n), 512, false));
        assert_eq!(sizes, [512, 512, 512]);
        assert_eq!(slots_for(ms(600), 16384, false), 16384);
    }

    #[test]
    fn slots_for__in_a_crowd_what_a_gigabit_needs() {
        let us = Duration::from_micros;
        let sizes = [0, 100, 192, 300, 600, 3000].map(|n| slots_for(us(n), 32768, true));
        assert_eq!(sizes, [64, 64, 64, 128, 256, 256]);
        let sizes = [100, 600, 10_000].map(|n| slots_for(us(n), 128, true));
        assert_eq!(sizes, [64, 128, 128]);
        let far = [128, 512, 32768].map(|max| slots_for(us(10_000), max, true));
        assert_eq!(far, [128, 512, 4096]);
    }
}
