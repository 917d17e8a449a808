//! The state of a path from what connections count.

use std::{collections::VecDeque, time::Duration};

use super::{Bandwidth, Bound, Link, Metrics, Step};

/// Minimum number of packets sent while no queue stood: the losses of fewer say too little by themselves.
const CLEAR_PACKETS: u64 = 64;
/// Length of a bucket of the window of losses and of minimum round-trip times (BBR has 10 s for the latter, too).
const BUCKET_NS: u64 = 10_000_000_000;
/// Maximum number of buckets: five minutes.
const BUCKETS: u64 = 30;
/// Packets that the window is to have: a path that loses 1 % then shows it with a standard error of 16 %.
const ENOUGH: u64 = 4096;

/// Packets of a group: many against the bursts that it is to show.
const GROUP: u32 = 32;
/// Groups, and losses in them, from which bursts can be told.
const GROUPS: u64 = 16;
const LOSSES: f64 = 8.0;

/// Length of a rate's measurement, and in round trips; a shorter one may be a burst.
const SLOT_NS: u64 = 500_000_000;
const SLOT_RTTS: u32 = 2;
/// Age up to which rates are kept, against the newest.
const LATELY_NS: u64 = 10_000_000_000;
/// Minimum number of rates to keep, whatever their age.
const MIN_SLOTS: usize = 4;
/// A rate that the application bounded raises the bandwidth only if it exceeds the measured one by this share: a smaller
/// excess is the measurement's.
const EXCESS: f64 = 0.05;

/// Losses of ten seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    from_ns: u64,
    sent: u64,
    lost: i64,
    /// Of those without a queue on the path.
    clear_sent: u64,
    clear_lost: i64,
    min_rtt: Option<Duration>,
    groups: Groups,
}

/// Sums over groups of packets: of `n` packets `l` were lost.
#[derive(Clone, Copy, Debug, Default)]
struct Groups {
    count: u64,
    /// Sums of n, of l, and of l²/n.
    sent: f64,
    lost: f64,
    squares: f64,
}

impl Groups {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.sent += other.sent;
        self.lost += other.lost;
        self.squares += other.squares;
    }

    /// The mean length of a run of losses. Where each packet is lost with probability p by itself, the number of losses
    /// in a group has the variance np(1 − p). The runs of a two-state Markov chain (Gilbert's model) with the
    /// autocorrelation ρ multiply that by D = (1 + ρ)/(1 − ρ) for large n, and their mean length is
    /// 1/((1 − p)(1 − ρ)) = (D + 1)/(2(1 − p)).
    fn burst(&self) -> Option<f64> {
        if self.count < GROUPS || self.lost < LOSSES || self.lost >= self.sent {
            return None;
        }
        let p = self.lost / self.sent;
        let deviations = self.squares - self.lost * p;
        let dispersion = deviations / ((self.count - 1) as f64 * p * (1.0 - p));
        let burst = (dispersion.max(0.0) + 1.0) / (2.0 * (1.0 - p));
        Some(burst.clamp(1.0, self.sent / self.count as f64))
    }
}

/// What was delivered in a span of time, by all connections.
#[derive(Clone, Copy, Debug)]
struct Slot {
    from_ns: u64,
    to_ns: u64,
    /// End of the latest step of any connection in it; the rate counts once that is the slot's end.
    told_ns: u64,
    /// Length of the longest of these steps: other connections may be read that much later.
    longest_ns: u64,
    delivered: u64,
    bound: Bound,
}

impl Slot {
    fn new(from_ns: u64, length_ns: u64) -> Self {
        Self {
            from_ns,
            to_ns: from_ns.saturating_add(length_ns),
            told_ns: from_ns,
            longest_ns: 0,
            delivered: 0,
            bound: Bound::Path,
        }
    }

    /// Adds the share of a step that fell into it: it delivered evenly.
    fn add(&mut self, step: &Step, delivered: u64) {
        let from_ns = self.from_ns.max(step.from_ns);
        let to_ns = self.to_ns.min(step.at_ns);
        if from_ns >= to_ns {
            return;
        }
        let length_ns = step.at_ns - step.from_ns;
        let share = u128::from(delivered) * u128::from(to_ns - from_ns) / u128::from(length_ns);
        let share = u64::try_from(share).unwrap_or(u64::MAX);
        self.delivered = self.delivered.saturating_add(share);
        self.told_ns = self.told_ns.max(to_ns);
        self.longest_ns = self.longest_ns.max(length_ns);
        self.bound = self.bound.max(step.bound);
    }

    fn is_full(&self) -> bool {
        self.told_ns == self.to_ns
    }

    /// bit/s.
    fn rate(&self) -> u64 {
        let bits = u128::from(self.delivered) * 8_000_000_000;
        let rate = bits / u128::from((self.to_ns - self.from_ns).max(1));
        u64::try_from(rate).unwrap_or(u64::MAX)
    }
}

/// The estimator of one path, fed by the connections of one kind to one host. It keeps the figures of the time when these
/// were last busy. At most 5 KiB.
#[derive(Clone, Debug, Default)]
pub struct Estimator {
    rtt: Option<Duration>,
    rtt_variance: Option<Duration>,
    reordering: Option<f64>,
    buckets: VecDeque<Bucket>,
    /// Packets, and losses, that do not make a group yet: without a queue on the path.
    group: (u32, i64),
    slots: VecDeque<Slot>,
    /// Time of the newest step.
    newest_ns: u64,
}

impl Estimator {
    /// Adds a step of one of the connections.
    pub fn add(&mut self, step: &Step) {
        self.rtt = step.rtt.or(self.rtt);
        self.rtt_variance = step.rtt_variance.or(self.rtt_variance);
        self.reordering = step.reordering.or(self.reordering);
        self.add_losses(step);
        self.add_delivery(step);
    }

    fn add_losses(&mut self, step: &Step) {
        let is_open = |bucket: &Bucket| {
            // Also after a clock that went back: no step may add buckets without end.
            step.at_ns
                .checked_sub(bucket.from_ns)
                .is_none_or(|age_ns| age_ns < BUCKET_NS)
        };
        if !self.buckets.back().is_some_and(is_open) {
            self.buckets.push_back(Bucket {
                from_ns: step.at_ns,
                ..Bucket::default()
            });
            self.drop_buckets(step.at_ns);
        }
        let full = self.group(step);
        let Some(bucket) = self.buckets.back_mut() else {
            return;
        };
        bucket.sent += u64::from(step.sent);
        bucket.lost += i64::from(step.lost);
        if !step.is_queued {
            bucket.clear_sent += u64::from(step.sent);
            bucket.clear_lost += i64::from(step.lost);
        }
        let shortest = step.min_rtt.or(step.rtt);
        bucket.min_rtt = bucket.min_rtt.into_iter().chain(shortest).min();
        if let Some((sent, lost)) = full {
            let (n, l) = (f64::from(sent), lost.max(0) as f64);
            bucket.groups.add(&Groups {
                count: 1,
                sent: n,
                lost: l,
                squares: l * l / n,
            });
        }
    }

    /// Packets, and losses, of a group that is full.
    fn group(&mut self, step: &Step) -> Option<(u32, i64)> {
        if step.is_queued {
            self.group = (0, 0);
            return None;
        }
        let (sent, lost) = &mut self.group;
        *sent = sent.saturating_add(step.sent);
        *lost += i64::from(step.lost);
        (*sent >= GROUP).then(|| std::mem::take(&mut self.group))
    }

    /// Drops buckets that are too old, or not needed for [`ENOUGH`] packets.
    fn drop_buckets(&mut self, now_ns: u64) {
        let mut rest: u64 = self.buckets.iter().map(|bucket| bucket.sent).sum();
        self.buckets.retain(|bucket| {
            let age_ns = now_ns.saturating_sub(bucket.from_ns);
            rest -= bucket.sent;
            age_ns <= BUCKET_NS * BUCKETS && (rest < ENOUGH || age_ns <= 2 * BUCKET_NS)
        });
    }

    fn add_delivery(&mut self, step: &Step) {
        let Some(delivered) = step.delivered.filter(|_| step.at_ns > step.from_ns) else {
            return;
        };
        let min_ns = match self.rtt {
            Some(rtt) => {
                SLOT_NS.max(u64::try_from((rtt * SLOT_RTTS).as_nanos()).unwrap_or(u64::MAX))
            }
            None => SLOT_NS,
        };
        for slot in &mut self.slots {
            slot.add(step, delivered);
        }
        // Slots follow each other, but where nothing was delivered for a while.
        let last_ns = self.slots.back().map_or(0, |slot| slot.to_ns);
        let mut from_ns = last_ns
            .max(step.from_ns)
            .max(step.at_ns.saturating_sub(LATELY_NS));
        while from_ns < step.at_ns {
            let mut slot = Slot::new(from_ns, min_ns);
            slot.add(step, delivered);
            from_ns = slot.to_ns;
            self.slots.push_back(slot);
        }
        self.newest_ns = self.newest_ns.max(step.at_ns);
        let is_old = |slot: &Slot| step.at_ns.saturating_sub(slot.to_ns) > LATELY_NS;
        self.slots.retain(|slot| slot.is_full() || !is_old(slot));
        while self.slots.len() > MIN_SLOTS && self.slots.front().is_some_and(is_old) {
            self.slots.pop_front();
        }
    }

    /// The state of the path.
    pub fn metrics(&self) -> Metrics {
        // Of the newest bucket and the one before.
        let lately = self.buckets.iter().rev().take(2);
        let [mut packets, mut clear_packets] = [0; 2];
        let [mut lost, mut clear_lost] = [0; 2];
        let mut groups = Groups::default();
        for bucket in &self.buckets {
            packets += bucket.sent;
            lost += bucket.lost;
            clear_packets += bucket.clear_sent;
            clear_lost += bucket.clear_lost;
            groups.add(&bucket.groups);
        }
        let share =
            |lost: i64, of: u64| (of > 0).then(|| (lost as f64 / of as f64).clamp(0.0, 1.0));
        Metrics {
            min_rtt: lately.filter_map(|bucket| bucket.min_rtt).min(),
            rtt: self.rtt,
            rtt_variance: self.rtt_variance,
            loss: share(lost, packets),
            clear_loss: share(clear_lost, clear_packets).filter(|_| clear_packets >= CLEAR_PACKETS),
            loss_burst: groups.burst(),
            delivery_rate: self.delivery_rate(),
            bandwidth: self.bandwidth(),
            reordering: self.reordering,
            packets,
            link: Link::default(),
        }
    }

    /// The latest rate to which no connection adds any more, if there is one.
    fn delivery_rate(&self) -> Option<u64> {
        let mut full = self.slots.iter().rev().filter(|slot| slot.is_full());
        let latest = full.clone().next();
        let is_final = |slot: &&Slot| self.newest_ns - slot.to_ns >= slot.longest_ns;
        full.find(is_final).or(latest).map(Slot::rate)
    }

    /// The highest rate lately: measured where the path bounded it, else a lower bound.
    fn bandwidth(&self) -> Option<Bandwidth> {
        let of = |is_measured: bool| {
            let slots = self
                .slots
                .iter()
                .filter(move |slot| slot.is_full() && (slot.bound == Bound::Path) == is_measured);
            let mut rates: Vec<u64> = slots.map(Slot::rate).collect();
            rates.sort_unstable_by(|a, b| b.cmp(a));
            rates
        };
        let (measured, bounded) = (of(true), of(false));
        let above = bounded.first().copied().unwrap_or(0) as f64;
        let holds = measured
            .first()
            .is_some_and(|rate| above <= *rate as f64 * (1.0 + EXCESS));
        let rates = if holds { measured } else { bounded };
        let rate = *rates.first()?;
        let error = match rates.get(1) {
            Some(second) if rate > 0 => (rate - second) as f64 / rate as f64,
            _ => 1.0,
        };
        Some(Bandwidth {
            rate,
            at_least: !holds,
            error,
        })
    }
}
