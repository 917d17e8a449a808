//! A flow over several stacks, in virtual time: what the schedulers make of paths that differ, lose packets, and end.
//!
//! A stack is a session as the flow sees one: reliable, in order, sending at the path's rate. A lost packet comes a
//! round trip later, and holds up those behind it.
#![allow(missing_docs, non_snake_case)]

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use vtl_core::{
    flow::{Chunk, Given, Next, Path, ReceiveHalf, SendHalf},
    stacks::{Schedule, StackState, scheduler},
};
use vtl_proto::{
    carrier::Scheduler,
    frame::{CarrierId, Side},
};
use vtl_testing::Random;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;
const MB: u64 = 1 << 20;
/// Payload of a packet.
const PACKET: u64 = 1400;
/// How often the driver looks, as vtld does.
const TICK: u64 = MS;
/// What may wait in a stack, ns at its rate, and packets at least.
const UNSENT_NS: u64 = 10 * MS;
const MIN_UNSENT: u64 = 16 * PACKET;
/// The receive window.
const WINDOW: u64 = 8 * MB;

#[derive(Clone, Copy)]
struct Link {
    rtt_ms: u64,
    mbit: u64,
    loss_pct: u64,
}

const fn link(rtt_ms: u64, mbit: u64, loss_pct: u64) -> Link {
    Link {
        rtt_ms,
        mbit,
        loss_pct,
    }
}

/// A session on a path.
struct Session {
    link: Link,
    number: u32,
    /// When the last byte given to it leaves.
    free_at: u64,
    /// Chunks on their way, with the time at which they arrive in order; `None`: never.
    way: VecDeque<(Option<u64>, Chunk)>,
    in_order_at: u64,
    /// Times at which acknowledgements come, and how far they go.
    acks: VecDeque<(u64, u64)>,
    given: u64,
    delivered: u64,
    heard_at: u64,
    /// Nothing gets through any more.
    is_cut: bool,
    is_broken: bool,
    sent: u64,
}

impl Session {
    fn new(number: u32, link: Link) -> Self {
        Self {
            link,
            number,
            free_at: 0,
            way: VecDeque::new(),
            in_order_at: 0,
            acks: VecDeque::new(),
            given: 0,
            delivered: 0,
            heard_at: 0,
            is_cut: false,
            is_broken: false,
            sent: 0,
        }
    }

    fn id(&self) -> CarrierId {
        CarrierId {
            opener: Side::Local,
            number: self.number,
        }
    }

    fn rate(&self) -> u64 {
        self.link.mbit * 125_000
    }

    fn rtt(&self) -> u64 {
        self.link.rtt_ms * MS
    }

    fn state(&mut self, now: u64) -> StackState {
        while let Some((at, to)) = self.acks.front().copied()
            && at <= now
        {
            self.acks.pop_front();
            self.delivered = to;
            self.heard_at = now;
        }
        let unsent = self.free_at.saturating_sub(now) * self.rate() / S;
        if self.delivered == self.given {
            self.heard_at = now;
        }
        StackState {
            link_rate: 0,
            id: self.id(),
            path: self.number as u8,
            rtt_ns: self.rtt(),
            rate: self.rate(),
            unacked: self.given - self.delivered,
            has_room: unsent < (self.rate() * UNSENT_NS / S).max(MIN_UNSENT),
            is_late: now - self.heard_at > self.rtt() * 5 / 4 + 5 * MS,
            given: self.given,
            delivered: self.delivered,
        }
    }

    fn give(&mut self, now: u64, chunk: Chunk, random: &mut Random) {
        let len = chunk.bytes.len() as u64;
        self.free_at = self.free_at.max(now) + len * S / self.rate();
        let mut at = self.free_at + self.rtt() / 2;
        for _ in 0..len.div_ceil(PACKET) {
            // And what is sent again may get lost, too.
            while random.percent(self.link.loss_pct) {
                at += self.rtt();
            }
        }
        self.in_order_at = self.in_order_at.max(at);
        self.given += len;
        self.sent += len;
        let arrives = (!self.is_cut).then_some(self.in_order_at);
        self.way.push_back((arrives, chunk));
        if let Some(at) = arrives {
            self.acks.push_back((at + self.rtt() / 2, self.given));
        }
    }

    fn cut(&mut self, now: u64) {
        self.is_cut = true;
        for (at, _) in &mut self.way {
            *at = at.filter(|at| *at < now);
        }
        self.acks.retain(|(at, _)| *at < now);
    }
}

struct World {
    random: Random,
    now: u64,
    sessions: Vec<Session>,
    schedule: Box<dyn Schedule>,
    sender: SendHalf,
    receiver: ReceiveHalf,
    /// What the application has written and is not sent, and reads.
    waiting: u64,
    read: u64,
    /// When the last byte was read, and the longest time without one.
    read_at: u64,
    longest: u64,
    confirms: VecDeque<(u64, (u64, bool, u64))>,
}

impl World {
    fn new(kind: Scheduler, links: &[Link], seed: u64) -> Self {
        let sessions: Vec<_> = (1..)
            .zip(links)
            .map(|(number, link)| Session::new(number, *link))
            .collect();
        let mut sender = SendHalf::default();
        sender.move_to(Path::Carrier(sessions[0].id()), false);
        sender.confirmed(0, false, WINDOW, false).expect("right");
        let mut receiver = ReceiveHalf::new(WINDOW, WINDOW);
        receiver.confirm_sent((0, false, WINDOW));
        Self {
            random: Random(seed),
            now: 0,
            sessions,
            schedule: scheduler(kind),
            sender,
            receiver,
            waiting: 0,
            read: 0,
            read_at: 0,
            longest: 0,
            confirms: VecDeque::new(),
        }
    }

    fn states(&mut self) -> Vec<StackState> {
        let now = self.now;
        let alive = self.sessions.iter_mut().filter(|s| !s.is_broken);
        alive.map(|session| session.state(now)).collect()
    }

    fn give(&mut self, stack: &StackState, chunk: &Chunk) -> Given {
        let given = Given::new(self.now, stack, chunk.bytes.len() as u64);
        let mut of_id = self.sessions.iter_mut().filter(|s| s.id() == stack.id);
        let session = of_id.next().expect("one of them");
        session.give(self.now, chunk.clone(), &mut self.random);
        given
    }

    /// As vtld's `flow/spread.rs`.
    fn send(&mut self) {
        loop {
            let path = self.sender.path();
            let next = self.sender.next(path, 64 << 10);
            let is_idle = match &next {
                Some(Next::New { .. }) => self.waiting == 0,
                Some(Next::Again(_)) => false,
                Some(Next::Fin) | None => true,
            };
            while let states = self.states()
                && let Some(hastened) = self.sender.hasten(self.now, &states, is_idle)
            {
                let given = self.give(&states[hastened.stack], &hastened.chunk);
                self.sender.hastened(&hastened, given);
            }
            let states = self.states();
            let (offset, len, bytes) = match next {
                Some(Next::Again(chunk)) => (chunk.offset, chunk.bytes.len() as u64, chunk.bytes),
                Some(Next::New { offset, max }) if self.waiting > 0 => {
                    let len = max.min(self.waiting).min(64 << 10);
                    let bytes: Vec<u8> = (offset..offset + len).map(pattern).collect();
                    (offset, len, bytes.into())
                }
                _ => return,
            };
            let is_again = offset < self.sender.next_offset();
            let backlog = if is_again { len } else { self.waiting };
            let picks = self.schedule.pick(&states, backlog);
            let lens = picks.places().map(|place| states[place].chunk_len());
            let Some(len) = lens.min().map(|min| min.min(len)) else {
                return;
            };
            let bytes: Bytes = bytes.slice(..len as usize);
            let chunk = Chunk {
                offset,
                bytes: bytes.clone(),
                urgent: false,
            };
            let given: Vec<_> = picks
                .places()
                .map(|place| self.give(&states[place], &chunk))
                .collect();
            if is_again {
                self.sender.sent_again_by(len as usize, &given);
            } else {
                self.waiting -= len;
                self.sender.sent_new_by(bytes, false, &given);
            }
        }
    }

    fn receive(&mut self) {
        let now = self.now;
        for session in &mut self.sessions {
            while let Some((Some(at), _)) = session.way.front()
                && *at <= now
                && let Some((_, chunk)) = session.way.pop_front()
            {
                let taken = self.receiver.chunk(chunk.offset, &chunk.bytes, false);
                taken.expect("right");
            }
        }
        while let Some((bytes, _)) = self.receiver.peek() {
            let len = bytes.len();
            for (offset, byte) in (self.read..).zip(bytes) {
                assert_eq!(*byte, pattern(offset), "offset {offset}");
            }
            self.receiver.consume(len);
            self.read += len as u64;
            self.longest = self.longest.max(now - self.read_at);
            self.read_at = now;
        }
        if let Some(confirm) = self.receiver.owes_confirm() {
            self.receiver.confirm_sent(confirm);
            let alive = self.sessions.iter().filter(|session| !session.is_cut);
            let rtt = alive.map(Session::rtt).min().expect("one is left");
            self.confirms.push_back((now + rtt / 2, confirm));
        }
        while let Some((at, (offset, fin, limit))) = self.confirms.front().copied()
            && at <= now
        {
            self.confirms.pop_front();
            let confirmed = self.sender.confirmed(offset, fin, limit, false);
            confirmed.expect("right");
        }
    }

    fn tick(&mut self) {
        self.now += TICK;
        assert!(self.now < 300 * S, "it hangs at byte {}", self.read);
        self.receive();
        self.send();
    }

    /// Time that a transfer takes, ns.
    fn transfer(&mut self, bytes: u64) -> u64 {
        let (began, until) = (self.now, self.read + bytes);
        self.waiting += bytes;
        self.read_at = self.now;
        while self.read < until {
            self.tick();
        }
        self.now - began
    }
}

fn pattern(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Rate of a transfer, Mbit/s.
fn goodput(kind: Scheduler, links: &[Link], bytes: u64) -> f64 {
    let took = World::new(kind, links, 1).transfer(bytes);
    bytes as f64 * 8e3 / took as f64
}

const NEAR: Link = link(20, 50, 1);
const FAR: Link = link(60, 50, 1);
const SLOW: Link = link(600, 1, 0);

#[test]
fn bulk__fills_both_paths() {
    for kind in [
        Scheduler::Ecf,
        Scheduler::LowestRtt,
        Scheduler::Weighted,
        Scheduler::RoundRobin,
    ] {
        let rate = goodput(kind, &[NEAR, FAR], 16 * MB);
        println!("{kind}: {rate:.1} Mbit/s");
        assert!(rate >= 85.0, "{kind}: {rate:.1} Mbit/s");
    }
    let rate = goodput(Scheduler::Primary, &[NEAR, FAR], 8 * MB);
    assert!((45.0..=50.0).contains(&rate), "one path: {rate:.1}");
}

/// It helps with no more than it brings in time.
#[test]
fn ecf__a_slow_path_beside_a_fast_one_does_no_harm() {
    for bytes in [64 << 10, MB, 16 * MB] {
        let alone = goodput(Scheduler::Ecf, &[NEAR], bytes);
        let rate = goodput(Scheduler::Ecf, &[NEAR, SLOW], bytes);
        println!("{bytes} bytes: {rate:.1} of {alone:.1} Mbit/s");
        assert!(rate >= 0.95 * alone, "{bytes}: {rate:.1} of {alone:.1}");
    }
}

#[test]
fn cut__either_path_stalls_for_three_round_trips_at_most() {
    for kind in Scheduler::ALL {
        for cut in 0..2 {
            let mut world = World::new(kind, &[NEAR, FAR], 1);
            world.waiting = 8 * MB;
            while world.now < 300 * MS {
                world.tick();
            }
            (world.longest, world.read_at) = (0, world.now);
            let now = world.now;
            world.sessions[cut].cut(now);
            // The carrier breaks when it has been silent for a second and three round trips.
            let breaks = now + S + 3 * world.sessions[cut].rtt();
            while world.read < 8 * MB {
                world.tick();
                if world.now >= breaks && !world.sessions[cut].is_broken {
                    world.sessions[cut].is_broken = true;
                    let left = world.sessions[1 - cut].id();
                    let id = world.sessions[cut].id();
                    world.sender.carrier_broken(id);
                    world.sender.move_to(Path::Carrier(left), false);
                }
            }
            let stalled = world.longest / MS;
            println!("{kind}, path {cut}: {stalled} ms");
            assert!(stalled <= 3 * FAR.rtt_ms, "{kind}, {cut}: {stalled} ms");
        }
    }
}

/// Times that small messages take, sorted, ns.
fn messages(kind: Scheduler, links: &[Link]) -> Vec<u64> {
    let mut world = World::new(kind, links, 3);
    let mut times = Vec::new();
    for _ in 0..1000 {
        times.push(world.transfer(500));
        let until = world.now + 20 * MS;
        while world.now < until {
            world.tick();
        }
    }
    times.sort_unstable();
    times
}

#[test]
fn redundant__one_copy_in_time_is_enough() {
    let lossy = [link(20, 50, 5), link(22, 50, 5)];
    let alone = messages(Scheduler::Ecf, &lossy[..1]);
    let both = messages(Scheduler::Redundant, &lossy);
    let at = |times: &[u64], pct: usize| times[times.len() * pct / 100];
    let (median, p99) = (at(&alone, 50), at(&both, 99));
    println!(
        "median alone {median} ns, p99 of both {p99} ns, alone {}",
        at(&alone, 99)
    );
    assert!(p99 * 10 <= median * 12, "{p99} of {median}");
    assert!(at(&alone, 99) > median * 12 / 10, "one path does not do it");
}

/// What is idle sends nothing more.
#[test]
fn idle__no_chunk_goes_twice_on_paths_that_deliver() {
    let mut world = World::new(Scheduler::Ecf, &[link(20, 50, 0), link(60, 50, 0)], 1);
    for _ in 0..20 {
        world.transfer(10_000);
        let until = world.now + 500 * MS;
        while world.now < until {
            world.tick();
        }
    }
    let sent: u64 = world.sessions.iter().map(|session| session.sent).sum();
    assert_eq!(sent, 200_000);
    let mut shares: BTreeMap<u32, u64> = BTreeMap::new();
    for session in &world.sessions {
        shares.insert(session.number, session.sent);
    }
    assert_eq!(shares[&1], 200_000, "the nearer one has all");
}
