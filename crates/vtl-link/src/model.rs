//! One direction of a link as a state machine: packets and the time go in, packets and deadlines come out.
//! Nothing here reads a clock or touches a socket.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::link::{Host, Link, LossModel, MTU, Slots};
use crate::loss::LossProcess;
use crate::random::Random;
use crate::sojourn::Sojourn;

/// A point in time or a span, nanoseconds. The origin is the caller's.
pub type Nanos = u64;

/// What the model needs to know of a packet.
pub trait Frame: Clone {
    /// Bytes that occupy the link.
    fn link_bytes(&self) -> u64;
    /// Marks the packet as one that met congestion (CE, RFC 3168), in place of a loss. False if its sender
    /// does not say that it understands that (ECT).
    fn mark(&mut self) -> bool;
    /// The protocol of the IP packet.
    fn protocol(&self) -> Option<u8> {
        None
    }
    /// Flips one bit after the IP header, chosen by `random`. False if there is no such bit.
    fn flip_bit(&mut self, random: u64) -> bool;
    /// Exchanges two words of 8 bytes of the payload, chosen by `random`. False if that changes nothing.
    fn exchange_words(&mut self, _random: u64) -> bool {
        false
    }
}

/// [`Frame::mark`] for the bytes of an IP packet.
pub fn mark_ip(packet: &mut [u8]) -> bool {
    match packet {
        [0x40..=0x4f, tos, _, _, _, _, _, _, _, _, high, low, ..] if *tos & 3 != 0 => {
            // RFC 1624, equation 3, for the word that holds the two bits.
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

/// The figures of one direction, in the units of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    /// Propagation delay one way.
    pub delay: Nanos,
    /// Serialisation time of a byte, nanoseconds. 0: no limit.
    pub ns_per_byte: f64,
    /// Packets that may wait behind the one being sent.
    pub queue_limit: usize,
    /// Packets that waited longer leave marked.
    pub mark_above: Option<Nanos>,
    /// Packets of this IP protocol are dropped.
    pub blocked: Option<u8>,
    /// Mean loss, 0 to 1.
    pub loss: f64,
    /// Probability that a packet is held back by `reorder_hold`.
    pub reorder: f64,
    /// How long a reordered packet is held back.
    pub reorder_hold: Nanos,
    /// Probability that a packet arrives twice.
    pub duplicate: f64,
    /// Probability that a bit of a packet flips.
    pub corrupt: f64,
    /// Probability that two words of a packet's payload are exchanged.
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

    /// The figures from client to server.
    pub fn up(link: &Link) -> Self {
        Params::new(link, Host::Client, link.loss_up(), link.seed)
    }

    /// The figures from server to client.
    pub fn down(link: &Link) -> Self {
        // The directions must not lose the same packets.
        Params::new(link, Host::Server, link.loss_down(), !link.seed)
    }
}

#[derive(Debug)]
struct Flying<F> {
    at: Nanos,
    /// Breaks ties: packets released at one instant keep their order.
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

/// Counters of one direction since the testbed came up. A packet counts once for everything that befell it.
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
    /// Packets that left with a mark of congestion.
    pub marked: u64,
    /// Packets that were held back so that later ones overtook them.
    pub reordered: u64,
    /// Packets that were delivered twice.
    pub duplicated: u64,
    /// Packets with a flipped bit.
    pub corrupted: u64,
    /// Packets with two words of their payload exchanged.
    pub tampered: u64,
    /// Packets waiting for the link at this moment.
    pub queue_packets: u64,
    /// Most packets that ever waited.
    pub max_queue_packets: u64,
    /// Time that half of the packets spent at the bottleneck at most, from arrival until they were on the
    /// wire, microseconds.
    pub sojourn_p50_us: u64,
    /// The same for 95 of 100 packets.
    pub sojourn_p95_us: u64,
    /// Packets on their way at this moment.
    pub flying_packets: u64,
    /// Captured frames of more than one MTU: the sender's offloads were switched back on. They are carried
    /// whole, and one loss takes all of it.
    pub aggregates: u64,
    /// Frames that the host dropped before the emulator saw them. Anything but 0 means that the machine was
    /// too slow and the measurement is void.
    pub host_drops: u64,
    /// Frames that the kernel refused to deliver.
    pub send_errors: u64,
    /// The most that a packet came late, microseconds.
    pub max_late_us: u64,
}

/// One direction of the link.
#[derive(Debug)]
pub struct Direction<F> {
    params: Params,
    /// Waiting packets with the time they arrived. The front one is being serialised.
    queue: VecDeque<(Nanos, F)>,
    /// When the front of `queue` has left.
    front_done: Nanos,
    /// When the packet before the front had left.
    free_at: Nanos,
    /// Packets on their way, the next to arrive on top.
    flying: BinaryHeap<Reverse<Flying<F>>>,
    /// Arrival of the last packet that was not held back: arrivals never run backwards, even if a change of
    /// the link shortens the delay.
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
    /// An empty link.
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

    /// Changes the link at `now`. What is already under way arrives when it would have; what still waits
    /// in the queue is sent at the new figures. Random numbers continue unless the seed changes.
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
        // A front packet that the old rate would have kept for minutes is sent at the new one.
        if let Some((arrived, frame)) = self.queue.front() {
            let anew = self.free_at.max(*arrived).max(now) + self.serialisation(frame);
            self.front_done = self.front_done.min(anew);
        }
    }

    /// A packet reached the link at `now`.
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
        // Without a rate the packet is gone at once and does not count as waiting.
        self.advance(now);
    }

    /// The next packet that has arrived by `now`, if any.
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

    /// When to call [`pop`](Self::pop) again. It may be earlier than the next arrival, never later.
    pub fn next_event(&self) -> Option<Nanos> {
        let leaving = (!self.queue.is_empty()).then(|| self.front_done + self.params.delay);
        let arriving = self.flying.peek().map(|f| f.0.at);
        match (leaving, arriving) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// Counters since the start, and gauges at this moment.
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

    /// Lets every packet leave that has been serialised by `now`.
    fn advance(&mut self, now: Nanos) {
        while !self.queue.is_empty() && self.front_done <= now {
            let Some((arrived, mut frame)) = self.queue.pop_front() else {
                return;
            };
            let left = self.front_done;
            let waited = left.saturating_sub(arrived + self.serialisation(&frame));
            if self.params.mark_above.is_some_and(|most| waited > most) && frame.mark() {
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

    /// When the first slot opens at or after `time`.
    fn slot_after(&mut self, time: Nanos) -> Nanos {
        let Some(slots) = self.params.slots else {
            return time;
        };
        let (min, max) = (nanos(slots.min_ms).max(1), nanos(slots.max_ms).max(1));
        // After a long silence there is no need to draw every slot that nobody used.
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
