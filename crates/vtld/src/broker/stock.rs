//! Keeps sets of rings ready, on a thread of its own: making and clearing them takes milliseconds.
//!
//! Rings come in a few sizes, for short and for long paths. All of them together take no more than
//! a budget of memory; as it runs out, sets become smaller.

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

/// The smallest size, for when memory is short, or many sessions share a very short path.
const LEAST: u32 = 64;
/// What a session needs to exist.
const TINY: u32 = 8;
/// What each of many sessions needs of a path within a site: 1 Gbit/s at 1 ms.
const SHARED: u32 = 256;
/// What a path within a site needs: 10 Gbit/s at 1 ms. More only makes memory colder.
pub(super) const NEAR: u32 = 1024;
/// What paths over the internet need, and those of which nothing is known: four bandwidth-delay
/// products of 1 Gbit/s at 50 ms, since a packet that is lost twice holds up three round trips.
pub(super) const FAR: u32 = 16384;
/// When sessions come faster than sets can be made one by one, they are made in lots of so many
/// bytes, or so many sets.
const LOT_BYTES: u64 = 64 << 20;
const LOT_SETS: u64 = 32;
/// How long making up for a set waits, by its bytes: 2 s for 64 MiB. Clearing those takes a processor
/// for up to 0.2 s, a tenth of which is what sessions at work may be asked for.
const PAUSE_NS_PER_BYTE: u64 = 30;

/// Slots for a path with this round-trip time, at most `most`: four bandwidth-delay products at
/// 1 Gbit/s. Faster paths are shorter as a rule, and get at least [`NEAR`]; but not where there is a
/// crowd of sessions, as what all of them use should stay in the caches.
pub(super) fn slots_for(rtt: Duration, most: u32, crowd: bool) -> u32 {
    let packets = (4 * rtt.as_micros() / 12).min(intf::VTL_MAX_WINDOW.into()) as u32;
    let wanted = packets.next_power_of_two();
    let wanted = match crowd && wanted <= NEAR {
        true => wanted.clamp(LEAST, SHARED),
        false => wanted.max(NEAR),
    };
    wanted.min(most)
}

/// The most slots, [`TINY`] at least, of rings that take no more than this memory.
pub(super) fn slots_within(memory: u64) -> u32 {
    let sizes = std::iter::successors(Some(TINY), |size| Some(size * 2));
    let fit = sizes.take_while(|size| *size <= intf::VTL_MAX_WINDOW && bytes(*size) <= memory);
    fit.last().unwrap_or(TINY)
}

/// Sets of one size in a lot.
fn lot(slots: u32) -> usize {
    (LOT_BYTES / bytes(slots)).clamp(1, LOT_SETS) as usize
}

/// After how long without a new session rings are made in place of those that were taken.
const RESTOCK_NS: u64 = 1_000 * MS;
/// How long spare rings are kept after the last session was opened.
const SPARE_NS: u64 = 10_000 * MS;

enum Order {
    Make(u32, usize),
    /// To be used again.
    Recycle(RingSet),
    /// Not to be used again.
    Retire(RingSet),
}

enum Delivery {
    /// For an order of so many slots.
    Made(u32, vtl_bpf::Result<RingSet>),
    Recycled(RingSet),
}

/// The stock.
pub(super) struct Stock {
    orders: Sender<Order>,
    deliveries: Receiver<Delivery>,
    /// By size.
    ready: BTreeMap<u32, Vec<RingSet>>,
    /// Ordered and not made yet.
    coming: usize,
    /// Sizes of which sets were taken.
    owed: BTreeSet<u32>,
    /// The next one is made up for then.
    replenish_ns: u64,
    /// When a set was last taken.
    taken_ns: u64,
    /// Sets taken since those were made up for.
    rush: usize,
    /// Somebody waits for a set.
    wanted: bool,
    /// Why there will be none for whoever waits.
    failed: Option<vtl_bpf::Error>,
    /// Of each size that sessions start with, so many are kept ready.
    level: usize,
    /// The largest size.
    most: u32,
}

impl Stock {
    /// Starts the thread, which makes `level` sets of each usual size up to `most` packets, within
    /// `budget` bytes for all sets that there are at a time, of which some are left for `sessions`
    /// sessions. It calls `call` when it has made some.
    pub(super) fn start(
        maker: RingMaker,
        most: u32,
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
            .name("vtl-stock".into())
            .spawn(move || workshop.run(&inbox))
            .expect("a thread can be started");
        let mut stock = Self {
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
            most,
        };
        let mut sizes = vec![FAR.min(most), NEAR.min(most)];
        sizes.dedup();
        for size in sizes {
            stock.order(size, level);
        }
        stock
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
                    self.owed.remove(&ordered); // there is no memory for that now
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
                tracing::debug!(%error, "no rings to keep ready");
                self.owed.clear();
                self.failed = self.wanted.then_some(error);
            }
        }
    }

    /// Whether [`Stock::take`] will find a set. If not, some are being made: ask again when the
    /// thread has called.
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
        let slots = slots.min(self.most);
        // One, unless sessions come faster than single sets can be made.
        let rush = self.rush > self.level;
        self.order(slots, if rush { lot(slots) } else { 1 });
        Ok(false)
    }

    /// A set of rings of `slots` packets, or of what comes next to it: a larger one, else a
    /// smaller one. Never waits: [`Stock::prepare`] says whether there is any.
    ///
    /// What few sessions take is not made up for at once: making rings keeps a processor busy for up
    /// to a tenth of a second, which would be missing to the session that begins.
    pub(super) fn take(&mut self, slots: u32, now_ns: u64) -> Option<RingSet> {
        let slots = slots.min(self.most);
        let larger = self.ready.range(slots..).find(|(_, s)| !s.is_empty());
        let smaller = || self.ready.range(..slots).rfind(|(_, s)| !s.is_empty());
        let size = larger.or_else(smaller).map(|(size, _)| *size)?;
        let set = self.ready.get_mut(&size)?.pop()?;
        self.owed.extend([slots, size]);
        self.rush += 1;
        self.taken_ns = now_ns;
        let left = self.ready.get(&slots).map_or(0, Vec::len) + self.coming;
        if self.rush > self.level && left < lot(slots).div_ceil(2) {
            self.order(slots, lot(slots)); // before there is none left
        }
        Some(set)
    }

    /// Now and then: makes up for what was taken, and gives back what is too much, if no session has
    /// been opened for a while.
    pub(super) fn tick(&mut self, now_ns: u64) {
        let quiet = now_ns.saturating_sub(self.taken_ns);
        if quiet > RESTOCK_NS {
            self.replenish(now_ns);
        }
        if quiet > SPARE_NS {
            self.trim();
        }
    }

    /// Makes up for what was taken, one set at a time, small ones first.
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

    /// Gives a set back that only the daemon and the kernel have seen.
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

    /// Gives a set back that an application may still have mapped: nobody else may get it.
    pub(super) fn put_exposed(&self, set: RingSet) {
        let _ = self.orders.send(Order::Retire(set));
    }

    /// Gives back the memory of what was made for a rush that is over.
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
    /// Bytes that all sets together may take.
    budget: u64,
    /// Bytes that they take.
    used: u64,
    /// Sessions that there may be at a time.
    sessions: u64,
    /// How many there are.
    sets: u64,
    outbox: Sender<Delivery>,
    /// Tells the stock's owner that there are deliveries.
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
            // Somebody may be waiting for these.
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

    /// The largest size up to `slots` that may be made.
    fn affordable(&self, slots: u32) -> Option<u32> {
        let reserved = bytes(TINY) * self.sessions.saturating_sub(self.sets);
        affordable(slots, self.used, self.budget, reserved)
    }

    /// Delivers `count` times. `None` if nobody wants anything any more.
    fn make(&mut self, slots: u32, count: usize) -> Option<()> {
        let mut sizes = Vec::new();
        while sizes.len() < count
            && let Some(size) = self.affordable(slots)
        {
            self.used += bytes(size);
            self.sets += 1;
            sizes.push(size);
        }
        let made = self.maker.make(&sizes).unwrap_or_else(|error| {
            tracing::debug!(%error, "rings cannot be made");
            Vec::new()
        });
        self.used -= sizes[made.len()..].iter().copied().map(bytes).sum::<u64>();
        self.sets -= (sizes.len() - made.len()) as u64;
        let missing = count - made.len();
        for set in made {
            self.outbox.send(Delivery::Made(slots, Ok(set))).ok()?;
        }
        for _ in 0..missing {
            self.outbox
                .send(Delivery::Made(slots, Err(out_of_memory())))
                .ok()?;
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
            // What cannot be cleared must not be used again.
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
            Err(error) => tracing::warn!(%error, "rings cannot be taken away"),
        }
        Some(())
    }
}

/// The largest size up to `slots` for which `used` of `budget` bytes leave room. Large sets get only
/// half of the budget, those for near peers three quarters, so that there are many small ones; and
/// only the smallest get what is `reserved`.
fn affordable(slots: u32, used: u64, budget: u64, reserved: u64) -> Option<u32> {
    let free = budget.saturating_sub(reserved);
    let share = |size: u32| match size {
        TINY => budget,
        _ if size > NEAR => free.min(budget / 2),
        _ if size > SHARED => free.min(budget / 4 * 3),
        _ => free,
    };
    [slots, FAR, NEAR, SHARED, LEAST, TINY]
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
        assert_eq!(sizes.last(), Some(&TINY));
        assert_eq!(affordable(64, 0, BUDGET, 0), Some(64));
        assert_eq!(affordable(64, 0, BUDGET, BUDGET), Some(TINY));
        assert_eq!(affordable(32768, 0, 0, 0), None);
    }

    #[test]
    fn slots_within__the_share_of_one_of_many() {
        let sizes = [0, 64 << 10, 100 << 10, 320 << 10, 1 << 40].map(slots_within);
        assert_eq!(sizes, [TINY, TINY, 16, 64, intf::VTL_MAX_WINDOW]);
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
        let far = [128, 512, 32768].map(|most| slots_for(us(10_000), most, true));
        assert_eq!(far, [128, 512, 4096]);
    }
}
