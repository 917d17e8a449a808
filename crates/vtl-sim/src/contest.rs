//! Flows that share one bottleneck: sessions of the graft with each other, and with models of TCP,
//! on a link that may change.

use std::collections::VecDeque;

use vtl_link::{Direction, Frame, Link, Nanos, Params, mark_ip};
use vtl_proto::{intf, ip};

use crate::{
    host::SessionConfig,
    models::{Model, SEGMENT, Sender},
    pair::Pair,
    sim::MS,
};

/// Sender of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A session of the graft.
    Vtl,
    /// A model of TCP.
    Tcp(Model),
}

/// One flow, from host 0 to host 1.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// Its sender.
    pub kind: Kind,
    /// Start time.
    pub start: Nanos,
    /// Packets to send, of 1,440 bytes of payload.
    pub packets: u64,
    /// Traffic before the bulk. Models of TCP have the bulk at once.
    pub before: Before,
    /// Round-trip time in addition to the link's, of the flow's own way to the bottleneck.
    pub access: Nanos,
    /// Time that the handshake spent in the bottleneck's queue.
    pub handshake_queued: Nanos,
    /// The path's minimum round trip, as other connections know it; 0: unknown.
    pub known_rtt: Nanos,
}

/// Traffic of a flow before its bulk: some packets at once, then small answers, one at a time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Before {
    /// Packets available at the start.
    pub packets: u64,
    /// Delay of the first answer from the flow's start.
    pub pause: Nanos,
    /// Number of answers.
    pub answers: u64,
    /// Packets per answer.
    pub each: u64,
    /// Interval between answers.
    pub every: Nanos,
}

impl Before {
    /// Delay of the bulk from the flow's start.
    pub fn takes(&self) -> Nanos {
        self.pause + self.answers * self.every
    }

    /// Total packets before the bulk.
    pub fn all(&self) -> u64 {
        self.packets + self.answers * self.each
    }
}

impl Flow {
    /// An endless flow that starts at once.
    pub fn endless(kind: Kind) -> Self {
        Self {
            kind,
            start: 0,
            packets: u64::MAX / 2,
            before: Before::default(),
            access: 0,
            handshake_queued: 0,
            known_rtt: 0,
        }
    }

    /// Packets that the application has written by `now`, and the time of its next write.
    fn written(&self, now: Nanos) -> (u64, Nanos) {
        let before = &self.before;
        let spent = now - self.start;
        if spent >= before.takes() {
            return (self.packets, Nanos::MAX);
        }
        let begun = (spent + before.every).saturating_sub(before.pause) / before.every;
        let next = self.start + before.pause + begun * before.every;
        (before.packets + begun * before.each, next)
    }
}

/// Parameters of a simulation.
#[derive(Clone, Debug)]
pub struct Contest {
    /// The initial link.
    pub link: Link,
    /// Changes of the link, with their times.
    pub changes: Vec<(Nanos, Link)>,
    /// The competing flows.
    pub flows: Vec<Flow>,
    /// Begin of measurements.
    pub measure_from: Nanos,
    /// Time limit, unless all flows end earlier.
    pub until: Nanos,
    /// Capacity of each session's rings, packets.
    pub slots: u32,
    /// Packets of no flow that the bottleneck's queue holds at the beginning.
    pub foreign: u64,
}

/// Result.
#[derive(Clone, Debug, Default)]
pub struct Shares {
    /// Rate of each flow on the link during the measurement, bit/s, with headers, without
    /// retransmissions.
    pub rates: Vec<f64>,
    /// Time when each flow had arrived completely, 0 if it has not.
    pub ends: Vec<Nanos>,
    /// Queueing time at the bottleneck, median, ns.
    pub queue_p50: f64,
    /// Longest time during which every packet queued for more than a quarter of a round trip and
    /// four packets.
    pub standing: Nanos,
    /// Packets dropped by a full queue, as a share of those sent.
    pub overflow: f64,
}

impl Shares {
    /// Jain's index of the rates: 1 if all are equal.
    pub fn jain(&self) -> f64 {
        let sum: f64 = self.rates.iter().sum();
        let squares: f64 = self.rates.iter().map(|r| r * r).sum();
        sum * sum / (self.rates.len() as f64 * squares)
    }
}

#[derive(Clone, Debug)]
enum Load {
    Vtl(Vec<u8>),
    Segment(u64),
    Acknowledgement(u64),
    Foreign,
}

#[derive(Clone, Debug)]
struct Packet {
    flow: usize,
    entered: Nanos,
    load: Load,
}

impl Frame for Packet {
    fn link_bytes(&self) -> u64 {
        match &self.load {
            Load::Vtl(bytes) => (bytes.len() - ip::field::IP) as u64,
            Load::Segment(_) | Load::Foreign => SEGMENT,
            Load::Acknowledgement(_) => 64,
        }
    }

    fn mark(&mut self) -> bool {
        match &mut self.load {
            Load::Vtl(bytes) => mark_ip(&mut bytes[ip::field::IP..]),
            _ => false,
        }
    }

    fn flip_bit(&mut self, _: u64) -> bool {
        false
    }
}

enum Party {
    Vtl(Box<Pair>),
    Tcp(Box<Sender>),
}

impl Party {
    fn delivered(&self) -> u64 {
        match self {
            Self::Vtl(pair) => pair.read(),
            Self::Tcp(t) => t.delivered,
        }
    }
}

struct Run<'a> {
    contest: &'a Contest,
    links: [Direction<Packet>; 2],
    params: [Params; 2],
    /// Packets of each flow on their way to the bottleneck, with the time of their arrival there.
    access: Vec<VecDeque<(Nanos, Packet)>>,
    parties: Vec<Party>,
    queueing: Vec<u32>,
    /// Time of the latest packet with a short queueing time, and the longest interval between two
    /// such packets.
    emptied: Nanos,
    standing: Nanos,
    now: Nanos,
    watch: &'a mut dyn FnMut(Nanos, usize, &intf::vtl_tx),
}

impl Contest {
    /// Flows on a link, measured in the last three quarters of the time.
    pub fn new(link: Link, flows: Vec<Flow>, until: Nanos) -> Self {
        Self {
            link,
            changes: Vec::new(),
            flows,
            measure_from: until / 4,
            until,
            slots: 8192,
            foreign: 0,
        }
    }

    /// Runs the simulation.
    ///
    /// # Panics
    /// If a session delivers wrong data, or its egress spins.
    pub fn run(&self) -> Shares {
        self.run_watched(&mut |_, _, _| ())
    }

    /// Runs the simulation; calls `watch` with a session's sender state after each acknowledgement.
    ///
    /// # Panics
    /// As [`Contest::run`].
    pub fn run_watched(&self, watch: &mut dyn FnMut(Nanos, usize, &intf::vtl_tx)) -> Shares {
        let params = [Params::down(&self.link), Params::up(&self.link)];
        let party = |(i, flow): (usize, &Flow)| match flow.kind {
            Kind::Vtl => {
                let rtt_us = (self.link.rtt_ms * 1000.0) as u32 + (flow.access / 1000) as u32;
                let config = SessionConfig {
                    slots: self.slots,
                    rtt_us: rtt_us + (flow.handshake_queued / 1000) as u32,
                    known_us: (flow.known_rtt / 1000) as u32,
                    ..Default::default()
                };
                Party::Vtl(Box::new(Pair::new(&config, flow.start, i as u64)))
            }
            Kind::Tcp(model) => {
                let seed = self.link.seed.wrapping_add(i as u64);
                let rtt = (self.link.rtt_ms * MS as f64) as Nanos + flow.access;
                let sender = Sender::new(model, flow.packets, seed).with_handshake(rtt);
                Party::Tcp(Box::new(sender))
            }
        };
        Run {
            contest: self,
            links: params.clone().map(Direction::new),
            params,
            access: vec![VecDeque::new(); self.flows.len()],
            parties: self.flows.iter().enumerate().map(party).collect(),
            queueing: Vec::new(),
            emptied: 0,
            standing: 0,
            now: 0,
            watch,
        }
        .run()
    }
}

impl Run<'_> {
    fn run(mut self) -> Shares {
        let mut before = vec![0; self.parties.len()];
        let mut ends = vec![0; self.parties.len()];
        let mut changes = self.contest.changes.iter().peekable();
        let mut measuring = false;
        for _ in 0..self.contest.foreign {
            self.push(0, 0, Load::Foreign);
        }
        while self.now < self.contest.until && ends.contains(&0) {
            if !measuring && self.now >= self.contest.measure_from {
                measuring = true;
                self.queueing.clear();
                (self.emptied, self.standing) = (self.now, 0);
                before = self.parties.iter().map(Party::delivered).collect();
            }
            while let Some((_, link)) = changes.next_if(|c| c.0 <= self.now) {
                self.params = [Params::down(link), Params::up(link)];
                for (direction, params) in self.links.iter_mut().zip(&self.params) {
                    direction.set(self.now, params.clone());
                }
            }
            self.accesses();
            self.arrivals();
            let mut next = changes.peek().map_or(Nanos::MAX, |c| c.0);
            for (i, end) in ends.iter_mut().enumerate() {
                next = next.min(self.party(i));
                if *end == 0 && self.parties[i].delivered() >= self.contest.flows[i].packets {
                    *end = self.now;
                }
            }
            for (at, _) in self.access.iter().filter_map(VecDeque::front) {
                next = next.min(*at);
            }
            for link in &self.links {
                next = next.min(link.next_event().unwrap_or(Nanos::MAX));
            }
            self.now = next.max(self.now + 1).min(self.contest.until);
        }
        let span = (self.now - self.contest.measure_from.min(self.now)).max(1) as f64 / 1e9;
        self.queueing.sort_unstable();
        let stats = self.links[0].stats();
        Shares {
            rates: self
                .parties
                .iter()
                .zip(&before)
                .map(|(p, b)| ((p.delivered() - b) * SEGMENT * 8) as f64 / span)
                .collect(),
            ends,
            queue_p50: self
                .queueing
                .get(self.queueing.len() / 2)
                .map_or(0.0, |us| f64::from(*us) * 1000.0),
            standing: self.standing,
            overflow: stats.queue_drops as f64 / stats.rx_packets.max(1) as f64,
        }
    }

    fn push(&mut self, from: usize, flow: usize, load: Load) {
        let packet = Packet {
            flow,
            entered: self.now,
            load,
        };
        match self.contest.flows[flow].access {
            delay if from == 0 && delay > 0 => {
                self.access[flow].push_back((self.now + delay, packet));
            }
            _ => self.links[from].push(self.now, packet),
        }
    }

    /// Moves packets that have reached the bottleneck into its queue.
    fn accesses(&mut self) {
        for line in &mut self.access {
            while let Some((at, mut packet)) = line.pop_front_if(|(at, _)| *at <= self.now) {
                packet.entered = at;
                self.links[0].push(self.now, packet);
            }
        }
    }

    fn arrivals(&mut self) {
        for from in 0..2 {
            while let Some(packet) = self.links[from].pop(self.now) {
                if from == 0 {
                    let p = &self.params[0];
                    let own = p.delay as f64 + packet.link_bytes() as f64 * p.ns_per_byte;
                    let waited = (self.now - packet.entered) as f64 - own;
                    self.queueing.push((waited.max(0.0) / 1000.0) as u32);
                    let short = p.delay as f64 / 2.0 + 4.0 * 1500.0 * p.ns_per_byte;
                    if waited < short {
                        self.emptied = self.now;
                    }
                    self.standing = self.standing.max(self.now - self.emptied);
                }
                self.arrive(1 - from, packet);
            }
        }
    }

    fn arrive(&mut self, at: usize, packet: Packet) {
        match (packet.load, &mut self.parties[packet.flow]) {
            (Load::Vtl(bytes), Party::Vtl(pair)) => {
                if let Some(answer) = pair.arrive(at, &bytes, self.now) {
                    self.push(at, packet.flow, Load::Vtl(answer));
                } else if at == 0 {
                    (self.watch)(self.now, packet.flow, pair.sender());
                }
            }
            (Load::Segment(id), _) => self.push(1, packet.flow, Load::Acknowledgement(id)),
            (Load::Acknowledgement(id), Party::Tcp(sender)) => sender.acknowledged(self.now, id),
            _ => {}
        }
    }

    /// Runs a flow; returns the time of its next call.
    fn party(&mut self, i: usize) -> Nanos {
        if self.now < self.contest.flows[i].start {
            return self.contest.flows[i].start;
        }
        match &mut self.parties[i] {
            Party::Tcp(sender) => {
                let mut ids = Vec::new();
                while let Some(id) = sender.send(self.now) {
                    ids.push(id);
                }
                let due = sender.due();
                for id in ids {
                    self.push(0, i, Load::Segment(id));
                }
                due
            }
            Party::Vtl(_) => self.session(i),
        }
    }

    fn session(&mut self, i: usize) -> Nanos {
        let now = self.now;
        let (written, more) = self.contest.flows[i].written(now);
        let Party::Vtl(pair) = &mut self.parties[i] else {
            return Nanos::MAX;
        };
        let mut made = Vec::new();
        let due = pair
            .run(written, now, |side, bytes| made.push((side, bytes)))
            .unwrap_or_else(|fault| panic!("flow {i}: {fault}, at {} ms", now / MS));
        for (side, bytes) in made {
            self.push(side, i, Load::Vtl(bytes));
        }
        due.min(more)
    }
}
