//! One direction of a link as a sans-I/O state machine: packets and the time in, packets and
//! deadlines out. Reads no clock, uses no socket.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::link::{Host, Link, LossModel, MTU, Slots};
use crate::loss::LossProcess;
use crate::random::Random;
use crate::sojourn::Sojourn;

/// A point in time or a duration, nanoseconds. The caller chooses the origin.
pub type Nanos = u64;

/// The model's view of a packet.
pub trait Frame: Clone {
    /// Bytes that the packet occupies on the link.
    fn link_bytes(&self) -> u64;
    /// Marks the packet with CE (RFC 3168) instead of dropping it. False if it is not ECN-capable
    /// (ECT).
    fn mark(&mut self) -> bool;
    /// The protocol of the IP packet.
    fn protocol(&self) -> Option<u8> {
        None
    }
    /// Flips one bit after the IP header, selected by `random`. False if there is no such bit.
    fn flip_bit(&mut self, random: u64) -> bool;
    /// Swaps two 8-byte words of the payload, selected by `random`. False if that changes nothing.
    fn exchange_words(&mut self, _random: u64) -> bool {
        false
    }
}

/// [`Frame::mark`] for an IP packet's bytes.
pub fn mark_ip(packet: &mut [u8]) -> bool {
    match packet {
        [0x40..=0x4f, tos, _, _, _, _, _, _, _, _, high, low, ..] if *tos & 3 != 0 => {
            // RFC 1624, equation 3, for the word with the ECN field.
            let sum = u32::from(!u16::from_be_bytes([*high, *low])) + u32::from(3 - (*tos & 3));
            [*high, *low] = (!((sum + (sum >> 16)) as u16)).to_be_bytes();
            *tos |= 3;
            true
        }
        [0x60..=0x6f, class, ..] if *class & 0x30 != 0 => {
            *class |= 0x30;
            true
        }
        _ => false,
    }
}

/// Parameters of one direction, in the model's units.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    /// One-way propagation delay.
    pub delay: Nanos,
    /// Serialisation time per byte, nanoseconds. 0: no limit.
    pub ns_per_byte: f64,
    /// Queue limit, packets, without the one being sent.
    pub queue_limit: usize,
    /// Waiting time above which packets leave with a CE mark.
    pub mark_above: Option<Nanos>,
    /// IP protocol that is dropped.
    pub blocked: Option<u8>,
    /// Mean loss rate, 0 to 1.
    pub loss: f64,
    /// Probability that a packet is reordered: held back by `reorder_hold`.
    pub reorder: f64,
    /// Time by which a reordered packet is held back.
    pub reorder_hold: Nanos,
    /// Probability that a packet is duplicated.
    pub duplicate: f64,
    /// Probability of a bit error in a packet.
    pub corrupt: f64,
    /// Probability that two words of a packet's payload are swapped.
    pub tamper: f64,
    slots: Option<Slots>,
    loss_model: LossModel,
    seed: u64,
}

fn nanos(ms: f64) -> Nanos {
    (ms * 1e6).round() as Nanos
}

impl Params {
    fn new(link: &Link, from: Host, loss_pct: f64, seed: u64) -> Self {
        let ns_per_byte = if link.rate_mbit > 0.0 {
            8e3 / link.rate_mbit
        } else {
            0.0
        };
        let eight_packets = (8.0 * f64::from(MTU) * ns_per_byte) as Nanos;
        Params {
            delay: nanos(link.rtt_ms / 2.0),
            ns_per_byte,
            queue_limit: link.queue_limit() as usize,
            mark_above: link.ecn_ms.map(nanos),
            blocked: (link.blocked).filter(|_| link.blocked_from.is_none_or(|host| host == from)),
            loss: loss_pct / 100.0,
            reorder: link.reorder_pct / 100.0,
            reorder_hold: link.reorder_ms.map_or(eight_packets.max(1_000_000), nanos),
            duplicate: link.duplicate_pct / 100.0,
            corrupt: link.corrupt_pct / 100.0,
            tamper: link.tamper_pct / 100.0,
            slots: link.slots,
            loss_model: link.loss_model,
            seed,
        }
    }

    /// Parameters from client to server.
    pub fn up(link: &Link) -> Self {
        Params::new(link, Host::Client, link.loss_up(), link.seed)
    }

    /// Parameters from server to client.
    pub fn down(link: &Link) -> Self {
        // The directions must not lose the same packets.
        Params::new(link, Host::Server, link.loss_down(), !link.seed)
    }
}

#[derive(Debug)]
struct Flying<F> {
    at: Nanos,
    /// Tie-breaker: packets released at the same time keep their order.
    order: u64,
    frame: F,
}

impl<F> PartialEq for Flying<F> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}
impl<F> Eq for Flying<F> {}
impl<F> PartialOrd for Flying<F> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<F> Ord for Flying<F> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// Counters of one direction since the testbed started. A packet counts once for each event.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionStats {
    /// Packets that reached the link.
    pub rx_packets: u64,
    /// IP bytes that reached the link.
    pub rx_bytes: u64,
    /// Packets delivered, duplicates included.
    pub tx_packets: u64,
    /// IP bytes delivered, duplicates included.
    pub tx_bytes: u64,
    /// Packets lost by the loss model.
    pub lost: u64,
    /// Packets dropped because the queue was full.
    pub queue_drops: u64,
    /// Packets that left with a CE mark.
    pub marked: u64,
    /// Packets held back, so that later ones overtook them.
    pub reordered: u64,
    /// Packets delivered twice.
    pub duplicated: u64,
    /// Packets with a flipped bit.
    pub corrupted: u64,
    /// Packets with two words of their payload swapped.
    pub tampered: u64,
    /// Present queue length, packets.
    pub queue_packets: u64,
    /// Maximum queue length, packets.
    pub max_queue_packets: u64,
    /// Sojourn time at the bottleneck, from arrival to the end of serialisation: median,
    /// microseconds.
    pub sojourn_p50_us: u64,
    /// The same, 95th percentile.
    pub sojourn_p95_us: u64,
    /// Packets in propagation now.
    pub flying_packets: u64,
    /// Captured frames longer than one MTU: the sender's offloads were switched on again. They are
    /// carried whole, so one loss drops a whole frame.
    pub aggregates: u64,
    /// Frames dropped by the host before the emulator. Any but 0 means that the machine was too
    /// slow: the measurement is void.
    pub host_drops: u64,
    /// Frames that the kernel refused to deliver.
    pub send_errors: u64,
    /// Maximum delay of a delivery beyond its due time, microseconds.
    pub max_late_us: u64,
}

/// One direction of the link.
#[derive(Debug)]
pub struct Direction<F> {
    params: Params,
    /// Queued packets with their arrival times. The front one is being serialised.
    queue: VecDeque<(Nanos, F)>,
    /// End of serialisation of the front of `queue`.
    front_done: Nanos,
    /// End of serialisation of the packet before the front.
    free_at: Nanos,
    /// Packets in propagation, the next to arrive on top.
    flying: BinaryHeap<Reverse<Flying<F>>>,
    /// Arrival of the latest packet that was not held back: arrivals stay in order even if a change
    /// of the link shortens the delay.
    last_arrival: Nanos,
    next_slot: Nanos,
    order: u64,
    loss: LossProcess,
    reorder: Random,
    duplicate: Random,
    corrupt: Random,
    tamper: Random,
    slot: Random,
    sojourn: Sojourn,
    stats: DirectionStats,
}

impl<F: Frame> Direction<F> {
    /// An idle link.
    pub fn new(params: Params) -> Self {
        let seed = params.seed;
        Direction {
            loss: LossProcess::new(params.loss_model, params.loss, seed),
            reorder: Random::new(seed, 2),
            duplicate: Random::new(seed, 3),
            corrupt: Random::new(seed, 4),
            tamper: Random::new(seed, 6),
            slot: Random::new(seed, 5),
            params,
            queue: VecDeque::new(),
            front_done: 0,
            free_at: 0,
            flying: BinaryHeap::new(),
            last_arrival: 0,
            next_slot: 0,
            order: 0,
            sojourn: Sojourn::default(),
            stats: DirectionStats::default(),
        }
    }

    /// Changes the link at `now`. Packets in propagation arrive as scheduled; queued ones are sent
    /// with the new parameters. Random sequences continue unless the seed changes.
    pub fn set(&mut self, now: Nanos, params: Params) {
        self.advance(now);
        if params.seed == self.params.seed {
            self.loss.set(params.loss_model, params.loss);
        } else {
            let seed = params.seed;
            self.loss = LossProcess::new(params.loss_model, params.loss, seed);
            self.reorder = Random::new(seed, 2);
            self.duplicate = Random::new(seed, 3);
            self.corrupt = Random::new(seed, 4);
            self.tamper = Random::new(seed, 6);
            self.slot = Random::new(seed, 5);
        }
        self.params = params;
        // Otherwise the old rate might keep the front packet for minutes.
        if let Some((arrived, frame)) = self.queue.front() {
            let anew = self.free_at.max(*arrived).max(now) + self.serialisation(frame);
            self.front_done = self.front_done.min(anew);
        }
    }

    /// Accepts a packet that reaches the link at `now`.
    pub fn push(&mut self, now: Nanos, frame: F) {
        self.advance(now);
        self.stats.rx_packets += 1;
        self.stats.rx_bytes += frame.link_bytes();
        if self.params.blocked.is_some() && self.params.blocked == frame.protocol() {
            self.stats.lost += 1;
            return;
        }
        if self.queue.len() > self.params.queue_limit {
            self.stats.queue_drops += 1;
            return;
        }
        if self.queue.is_empty() {
            self.front_done = self.free_at.max(now) + self.serialisation(&frame);
        }
        self.queue.push_back((now, frame));
        let waiting = self.queue.len() as u64 - 1;
        self.stats.max_queue_packets = self.stats.max_queue_packets.max(waiting);
        // Without a rate the packet leaves at once, and does not count as queued.
        self.advance(now);
    }

    /// Takes the next packet that has arrived by `now`, if any.
    pub fn pop(&mut self, now: Nanos) -> Option<F> {
        self.advance(now);
        if self.flying.peek()?.0.at > now {
            return None;
        }
        let flying = self.flying.pop()?.0;
        self.stats.tx_packets += 1;
        self.stats.tx_bytes += flying.frame.link_bytes();
        self.stats.max_late_us = self.stats.max_late_us.max((now - flying.at) / 1000);
        Some(flying.frame)
    }

    /// Time of the next call of [`pop`](Self::pop): not later than the next arrival, but possibly
    /// earlier.
    pub fn next_event(&self) -> Option<Nanos> {
        let leaving = (!self.queue.is_empty()).then(|| self.front_done + self.params.delay);
        let arriving = self.flying.peek().map(|f| f.0.at);
        match (leaving, arriving) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Counters since the start, and present gauges.
    pub fn stats(&self) -> DirectionStats {
        DirectionStats {
            queue_packets: self.queue.len().saturating_sub(1) as u64,
            flying_packets: self.flying.len() as u64,
            sojourn_p50_us: self.sojourn.quantile(0.5) / 1_000,
            sojourn_p95_us: self.sojourn.quantile(0.95) / 1_000,
            ..self.stats.clone()
        }
    }

    fn serialisation(&self, frame: &F) -> Nanos {
        (frame.link_bytes() as f64 * self.params.ns_per_byte).round() as Nanos
    }

    /// Sends on all packets serialised by `now`.
    fn advance(&mut self, now: Nanos) {
        while !self.queue.is_empty() && self.front_done <= now {
            let Some((arrived, mut frame)) = self.queue.pop_front() else {
                return;
            };
            let left = self.front_done;
            let waited = left.saturating_sub(arrived + self.serialisation(&frame));
            if self.params.mark_above.is_some_and(|max| waited > max) && frame.mark() {
                self.stats.marked += 1;
            }
            self.sojourn.record(left.saturating_sub(arrived));
            self.free_at = left;
            self.depart(left, frame);
            if let Some((arrived, next)) = self.queue.front() {
                self.front_done = left.max(*arrived) + self.serialisation(next);
            }
        }
    }

    fn depart(&mut self, left: Nanos, mut frame: F) {
        if self.loss.lose_next() {
            self.stats.lost += 1;
            return;
        }
        let mut at = (self.slot_after(left) + self.params.delay).max(self.last_arrival);
        if self.reorder.chance(self.params.reorder) {
            at += self.params.reorder_hold;
            self.stats.reordered += 1;
        } else {
            self.last_arrival = at;
        }
        if self.corrupt.chance(self.params.corrupt) && frame.flip_bit(self.corrupt.bits()) {
            self.stats.corrupted += 1;
        }
        if self.tamper.chance(self.params.tamper) && frame.exchange_words(self.tamper.bits()) {
            self.stats.tampered += 1;
        }
        if self.duplicate.chance(self.params.duplicate) {
            self.stats.duplicated += 1;
            self.fly(at, frame.clone());
        }
        self.fly(at, frame);
    }

    fn fly(&mut self, at: Nanos, frame: F) {
        self.flying.push(Reverse(Flying {
            at,
            order: self.order,
            frame,
        }));
        self.order += 1;
    }

    /// Time of the first slot at or after `time`.
    fn slot_after(&mut self, time: Nanos) -> Nanos {
        let Some(slots) = self.params.slots else {
            return time;
        };
        let (min, max) = (nanos(slots.min_ms).max(1), nanos(slots.max_ms).max(1));
        // After a long idle time, skip unused slots instead of drawing each.
        if time > self.next_slot + 1000 * max {
            self.next_slot = time - 10 * max;
        }
        while self.next_slot < time {
            self.next_slot += min + ((max - min) as f64 * self.slot.unit()) as Nanos;
        }
        self.next_slot
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
