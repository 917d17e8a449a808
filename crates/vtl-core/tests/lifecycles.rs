//! Two lifecycles of one session over a link that loses, doubles, reorders, and goes dead, in virtual
//! time. Both hosts must come to know the end within bounded time, and never two ends that contradict
//! each other (PROTOCOL.md, sections 4 and 6).
#![allow(missing_docs, non_snake_case)]

use std::{collections::BTreeMap, env};

use vtl_core::session::{
    ABORT_COPIES, Action, CLOSE_NS, CLOSE_TRIES, DEAD_NS, End, EndReason, Farewell, KEEPALIVE_NS,
    Lifecycle, Observation, PeerClose, Reaction, Successor, UNVALIDATED_NS,
};
use vtl_testing::Random;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;
/// Resolution of the virtual time.
const STEP: u64 = 5 * MS;
/// Interval of polls.
const TICK: u64 = 100 * MS;
/// Packets in flight at most.
const WINDOW: u64 = 8;
/// Probe timeout before and after the first acknowledgement, which doubles for each one in a row; and
/// its upper bound.
const PTO: [u64; 3] = [500 * MS, 150 * MS, 3 * S];
/// Time after which an initiator gives up that early data are confirmed.
const PATIENCE: u64 = 9 * S;
/// Time from the end at one host to the end at the other one: silence, a row of three probe
/// timeouts, and a poll.
const BOUND: u64 = DEAD_NS + 3 * PTO[2] + 2 * TICK;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packet {
    Data { seq: u64 },
    Ack { cum: u64 },
    Probe,
    Close { aborted: bool },
}

/// What happens at a host besides packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The application closes the session, once all its data are acknowledged.
    Close,
    /// The application has vanished.
    Abort,
    /// The daemon ends the session without the application.
    End,
    /// The host falls silent.
    Die,
}

/// The end of a session as a host knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    /// The application had closed it.
    Quiet,
    /// The application learns that the peer has closed it in order.
    ClosedByPeer,
    /// The application learns of an error.
    Failed,
    /// The application learns that its own host has ended it.
    Local,
    /// Nobody knew of it.
    Forgotten,
    /// The host is dead.
    Dead,
}

struct Host {
    session: Lifecycle<()>,
    /// The programs know the session.
    is_known: bool,
    located: bool,
    /// The daemon reads the event of the peer's first packet then.
    first_packet_at: Option<u64>,
    validated: bool,
    heard: u64,
    timeouts: u32,
    has_rtt: bool,
    probe: bool,
    /// Packets that the application has written, were sent, were acknowledged; and were received.
    written: u64,
    next: u64,
    una: u64,
    cum: u64,
    sent_at: u64,
    tick_at: u64,
    /// Waits for acknowledgements.
    closes: bool,
    /// The application has closed the session in order, or the host has aborted it.
    has_closed: bool,
    has_aborted: bool,
    /// An orderly CLOSE has come while the session was open.
    got_close: bool,
    end: Option<(u64, Outcome)>,
}

impl Host {
    fn new(session: Lifecycle<()>, tick_at: u64) -> Self {
        let located = session.is_initiator();
        Self {
            session,
            is_known: true,
            located,
            first_packet_at: None,
            validated: located,
            heard: 0,
            timeouts: 0,
            has_rtt: false,
            probe: located,
            written: 0,
            next: 0,
            una: 0,
            cum: 0,
            sent_at: 0,
            tick_at,
            closes: false,
            has_closed: false,
            has_aborted: false,
            got_close: false,
            end: None,
        }
    }

    fn observe(&self) -> Observation {
        Observation {
            heard: self.heard,
            timeouts: self.timeouts,
            unacknowledged: self.next - self.una,
            located: self.located,
            rerouted: false,
        }
    }

    /// What the programs in the kernel send by themselves.
    fn pump(&mut self, now: u64, out: &mut Vec<Packet>) {
        if !self.session.is_open() || !self.located {
            return;
        }
        while self.next < self.written.min(self.una + WINDOW) {
            out.push(Packet::Data { seq: self.next });
            self.next += 1;
            self.sent_at = now;
        }
        let asks = self.next > self.una || self.probe;
        let first = PTO[usize::from(self.has_rtt)];
        let timeout = (first << self.timeouts.min(6)).min(PTO[2]);
        if asks && now >= self.sent_at + timeout {
            self.timeouts += 1;
            self.sent_at = now;
            out.push(match self.next > self.una {
                true => Packet::Data { seq: self.una },
                false => Packet::Probe,
            });
        }
    }

    fn act(&mut self, now: u64, action: Action, out: &mut Vec<Packet>) {
        match action {
            Action::Nothing | Action::Watch { probe: false, .. } => {}
            Action::Confirm => {
                self.session.handle_heard(self.heard);
                if self.session.is_confirming() && now > PATIENCE {
                    let end = self.session.fail().expect("not ended");
                    self.finish(now, end, out);
                }
            }
            Action::Watch { probe: true, .. } => {
                if !self.probe {
                    out.push(Packet::Probe);
                    self.sent_at = now;
                }
                self.probe = true;
            }
            Action::SendClose => self.send_close(false, out),
            Action::End(end) => self.finish(now, end, out),
            Action::Forget => self.note_end(now, Outcome::Forgotten),
            Action::Reroute => unreachable!("there is one way"),
        }
    }

    /// Nothing goes unasked to an address that has not been proven.
    fn send_close(&self, aborted: bool, out: &mut Vec<Packet>) {
        if self.located {
            out.push(Packet::Close { aborted });
        }
    }

    fn finish(&mut self, now: u64, end: End, out: &mut Vec<Packet>) {
        match end.farewell {
            Farewell::Nothing => {}
            Farewell::Close => self.send_close(false, out),
            Farewell::Abort => (0..ABORT_COPIES).for_each(|_| self.send_close(true, out)),
        }
        let outcome = match end.tell {
            None => Outcome::Quiet,
            Some(EndReason::ClosedByPeer) => Outcome::ClosedByPeer,
            Some(EndReason::Failed) => Outcome::Failed,
            Some(EndReason::Local) => Outcome::Local,
            Some(EndReason::Cut) => unreachable!("no session has a successor"),
        };
        self.note_end(now, outcome);
        if end.tell.is_some() {
            assert_eq!(self.session.close(now, false), Action::Forget);
        }
    }

    fn note_end(&mut self, now: u64, outcome: Outcome) {
        assert_eq!(self.end, None, "an end is told once");
        self.end = Some((now, outcome));
        self.is_known = false;
    }

    fn event(&mut self, now: u64, event: Event, out: &mut Vec<Packet>) {
        if self.end.is_some() {
            return;
        }
        match event {
            Event::Close => self.closes = true,
            Event::Abort => {
                self.has_aborted |= self.session.is_open();
                let action = self.session.close(now, true);
                self.act(now, action, out);
            }
            Event::End => {
                self.has_aborted |= self.session.is_open();
                let end = self.session.abort().expect("not ended");
                self.finish(now, end, out);
            }
            Event::Die => self.note_end(now, Outcome::Dead),
        }
    }

    fn step(&mut self, now: u64, out: &mut Vec<Packet>) {
        if self.end.is_some() {
            return;
        }
        if self.first_packet_at.is_some_and(|at| at <= now) {
            self.first_packet_at = None;
            self.validated = true;
            self.session.handle_first_packet();
        }
        if self.closes && self.una == self.written && self.session.is_open() {
            self.has_closed = true;
            let action = self.session.close(now, false);
            self.act(now, action, out);
        }
        if self.tick_at <= now {
            self.tick_at += TICK;
            let action = self.session.poll(now, &self.observe());
            self.act(now, action, out);
        }
        if self.end.is_none() {
            self.pump(now, out);
        }
    }

    fn handle(&mut self, now: u64, packet: Packet, random: &mut Random, out: &mut Vec<Packet>) {
        if !self.is_known {
            return;
        }
        if !self.located {
            self.located = true;
            self.first_packet_at = Some(now + random.below(100) * MS);
        }
        match packet {
            Packet::Data { seq } => {
                self.heard += 1;
                self.cum += u64::from(seq == self.cum);
                out.push(Packet::Ack { cum: self.cum });
            }
            Packet::Probe => out.push(Packet::Ack { cum: self.cum }),
            Packet::Ack { cum } if cum >= self.una => {
                self.heard += 1;
                self.una = cum;
                (self.timeouts, self.probe) = (0, false);
                self.has_rtt = true;
            }
            Packet::Ack { .. } => {}
            Packet::Close { aborted } => {
                self.got_close |= !aborted && self.session.is_open();
                let close = PeerClose {
                    aborted,
                    succeeds: false,
                    successor: Successor::Known,
                };
                let mut reaction = self.session.handle_close(&close);
                if reaction == Reaction::Validate {
                    self.validated = true;
                    reaction = self.session.handle_close(&close);
                }
                match reaction {
                    Reaction::Ignore => {}
                    Reaction::End(end) => self.finish(now, end, out),
                    reaction => panic!("{reaction:?}"),
                }
            }
        }
    }
}

struct Simulation {
    random: Random,
    now: u64,
    /// The initiator, and the responder.
    hosts: [Host; 2],
    /// By time of arrival and a number: receiver, packet.
    link: BTreeMap<(u64, u64), (usize, Packet)>,
    sent: u64,
    loss: u64,
    /// Packets to that host are lost from then on.
    cut_at: [u64; 2],
    /// In order of time: host, event.
    script: Vec<(u64, usize, Event)>,
    /// The applications write until then.
    writes_until: u64,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut initiator = Lifecycle::initiator(0, ());
        if random.percent(30) {
            initiator.start_confirming(0);
        } else {
            initiator.handle_established(0);
        }
        let mut responder = Lifecycle::responder(0);
        responder.handle_established(0);
        let loss = [0, 10, 30, 50][random.below(4) as usize];
        let at = match random.percent(20) {
            true => random.below(S),
            false => random.below(60 * S),
        };
        let host = random.below(2) as usize;
        let soon = at + random.below(600) * MS;
        let mut cut_at = [u64::MAX; 2];
        let mut script = match random.below(9) {
            0 | 1 => vec![(at, host, Event::Close)],
            2 => vec![(at, host, Event::Close), (soon, 1 - host, Event::Close)],
            3 => vec![(at, host, Event::Abort)],
            4 => vec![(at, host, Event::End)],
            5 => vec![(at, host, Event::Close), (soon, 1 - host, Event::Abort)],
            6 => vec![(at, host, Event::Die)],
            7 => {
                cut_at[host] = soon;
                vec![(at, host, Event::Close)]
            }
            _ => {
                cut_at[host] = at;
                if random.percent(50) {
                    cut_at[1 - host] = at;
                }
                vec![]
            }
        };
        script.sort_by_key(|(at, ..)| *at);
        let ticks = [random.below(TICK), random.below(TICK)];
        Self {
            random,
            now: 0,
            hosts: [
                Host::new(initiator, ticks[0]),
                Host::new(responder, ticks[1]),
            ],
            link: BTreeMap::new(),
            sent: 0,
            loss,
            cut_at,
            script,
            writes_until: at,
        }
    }

    fn send(&mut self, from: usize, packets: Vec<Packet>) {
        let to = 1 - from;
        for packet in packets {
            for _ in 0..1 + u64::from(self.random.percent(5)) {
                let delay = (5 + self.random.below(60)) * MS;
                if self.random.percent(self.loss) || self.now >= self.cut_at[to] {
                    continue;
                }
                self.sent += 1;
                self.link
                    .insert((self.now + delay, self.sent), (to, packet));
            }
        }
    }

    fn run(&mut self) {
        // Before it closes, an application waits for acknowledgements, by one loss at a time.
        let bound = self.writes_until + 1000 * S;
        while self.hosts.iter().any(|host| host.end.is_none()) {
            assert!(
                self.now < bound,
                "the end is not known: {:?}",
                self.hosts.each_ref().map(|host| (&host.session, host.end))
            );
            self.step();
        }
        for at in 0..2 {
            self.check(at);
        }
        let times = self.hosts.each_ref().map(|host| host.end.unwrap().0);
        assert!(times[0].abs_diff(times[1]) <= BOUND, "{times:?}");
    }

    fn step(&mut self) {
        self.now += STEP;
        while let Some(entry) = self.link.first_entry()
            && entry.key().0 <= self.now
        {
            let (to, packet) = entry.remove();
            let mut out = Vec::new();
            self.hosts[to].handle(self.now, packet, &mut self.random, &mut out);
            self.send(to, out);
        }
        while let Some((at, host, event)) = self.script.first().copied()
            && at <= self.now
        {
            self.script.remove(0);
            let mut out = Vec::new();
            self.hosts[host].event(self.now, event, &mut out);
            self.send(host, out);
        }
        for at in 0..2 {
            // Bursts, and pauses that keepalive has to bridge.
            if self.now < self.writes_until && self.random.below(2000) == 0 {
                self.hosts[at].written += 1 + self.random.below(20);
            }
            let mut out = Vec::new();
            self.hosts[at].step(self.now, &mut out);
            self.send(at, out);
        }
    }

    /// What the protocol promises to a host.
    fn check(&self, at: usize) {
        let (host, peer) = (&self.hosts[at], &self.hosts[1 - at]);
        let (outcome, other) = (host.end.unwrap().1, peer.end.unwrap().1);
        match outcome {
            Outcome::Quiet => assert!(host.has_closed || host.has_aborted),
            Outcome::ClosedByPeer => {
                assert!(peer.has_closed && !peer.has_aborted, "peer: {other:?}");
                assert_eq!(host.cum, peer.written, "the peer's data are complete");
                assert_eq!(other, Outcome::Quiet);
            }
            Outcome::Failed => assert!(!host.got_close, "the peer has closed it in order"),
            Outcome::Local => assert!(host.has_aborted),
            Outcome::Forgotten => assert!(at == 1 && !host.validated),
            Outcome::Dead => {}
        }
        if self.loss == 0 && self.cut_at == [u64::MAX; 2] {
            // Nothing is left to chance, but who of two that end the session is first.
            match other {
                Outcome::Quiet if peer.has_closed && !host.has_closed && !host.has_aborted => {
                    assert_eq!(outcome, Outcome::ClosedByPeer);
                }
                Outcome::Quiet | Outcome::Local if peer.has_aborted && !host.has_closed => {
                    assert!(host.has_aborted || outcome == Outcome::Failed || !host.validated);
                }
                Outcome::Failed => assert!(host.has_aborted || outcome == Outcome::Dead),
                _ => {}
            }
        }
    }
}

#[test]
fn lifecycles__agree_on_the_end() {
    let number = |name: &str, or: u64| {
        env::var(name)
            .ok()
            .and_then(|v| v.parse().ok())
            .unwrap_or(or)
    };
    let (first, seeds) = (number("VTL_SEED", 0), number("VTL_SEEDS", 1000));
    let mut outcomes: BTreeMap<[Outcome; 2], u64> = BTreeMap::new();
    for seed in first..first + seeds {
        let result = std::panic::catch_unwind(|| {
            let mut simulation = Simulation::new(seed);
            simulation.run();
            simulation.hosts.map(|host| host.end.unwrap().1)
        });
        let Ok(ends) = result else {
            panic!("seed {seed}: VTL_SEED={seed} VTL_SEEDS=1 runs it alone");
        };
        *outcomes.entry(ends).or_default() += 1;
    }
    println!("{outcomes:?}");
    if seeds >= 1000 {
        use Outcome::{ClosedByPeer, Dead, Failed, Forgotten, Local, Quiet};
        for ends in [
            [Quiet, ClosedByPeer],
            [ClosedByPeer, Quiet],
            [Quiet, Quiet],
            [Quiet, Failed],
            [Failed, Quiet],
            [Failed, Failed],
            [Failed, Local],
            [Local, Failed],
            [Failed, Dead],
            [Dead, Failed],
            [Failed, Forgotten],
        ] {
            assert!(outcomes.contains_key(&ends), "{ends:?}");
        }
    }
}

/// Runs two hosts without events for a while.
fn idle(seed: u64, loss: u64, span: u64) -> Simulation {
    let mut simulation = Simulation::new(seed);
    simulation.loss = loss;
    (simulation.script, simulation.cut_at) = (Vec::new(), [u64::MAX; 2]);
    simulation.writes_until = 0;
    while simulation.now < span {
        simulation.step();
    }
    simulation
}

#[test]
fn keepalive__bridges_losses_of_an_idle_session() {
    for seed in 0..20 {
        let simulation = idle(seed, 10, 600 * S);
        for host in &simulation.hosts {
            assert_eq!(host.end, None, "seed {seed}");
            // Both ask, and neither asks more often than it has to.
            let max = 600 * S / KEEPALIVE_NS;
            assert!((10..=2 * max).contains(&host.heard), "{}", host.heard);
        }
    }
}

#[test]
fn unvalidated__responder_forgets_the_session_and_the_initiator_finds_out() {
    for seed in 0..20 {
        let mut simulation = idle(seed, 100, 30 * S);
        let ends = simulation.hosts.each_mut().map(|host| host.end.unwrap());
        assert_eq!(
            ends.map(|(_, outcome)| outcome),
            [Outcome::Failed, Outcome::Forgotten]
        );
        assert!(ends[1].0 <= UNVALIDATED_NS + TICK + STEP, "{ends:?}");
    }
}

#[test]
fn close__without_any_answer_takes_a_second() {
    let mut simulation = idle(1, 0, 2 * S);
    simulation.loss = 100;
    let begin = simulation.now;
    simulation.writes_until = begin;
    simulation.script = vec![(begin, 0, Event::Close)];
    simulation.run();
    let ends = simulation.hosts.each_ref().map(|host| host.end.unwrap());
    assert_eq!(ends[0].1, Outcome::Quiet);
    let took = ends[0].0 - begin;
    let wanted = u64::from(CLOSE_TRIES) * CLOSE_NS;
    assert!((wanted..=wanted + CLOSE_TRIES as u64 * (TICK + STEP)).contains(&took));
    assert_eq!(ends[1].1, Outcome::Failed, "by silence");
}
