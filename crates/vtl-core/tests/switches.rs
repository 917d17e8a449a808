//! Two hosts that switch their session a thousand times, under load in both directions, over a link that loses one
//! packet in twenty, those of the switch included, doubles and reorders some, in virtual time. The negotiation is
//! `vtl_proto::nego`, the sessions' life `vtl_core::session`; what the daemon, the rings and the library do about them
//! is modelled here. Stateful switches lose nothing; stateless ones at most what was in flight; neither delivers
//! anything twice or out of order (PROTOCOL.md, section 4, "Succession").
#![allow(missing_docs, non_snake_case)]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use vtl_core::{
    session::{EndReason, Lifecycle, Phase},
    switch::Terms,
};
use vtl_proto::{
    nego::{
        self, Answer, Encapsulation, Initiator, Made, Offer, Offered, PATIENCE, Policy, Responder,
        Step, Verdict,
    },
    services::{GraftInfo, Services},
    wire,
};
use vtl_testing::Random;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;
/// Percent of packets that the link loses, and doubles.
const LOSS: u64 = 5;
const DOUBLES: u64 = 2;
/// Packets in flight, and packets that a ring holds.
const WINDOW: usize = 16;
const RING: usize = 48;
/// Retransmission timeout.
const TIMEOUT: u64 = 50 * MS;
const PORT: u16 = 7;

#[derive(Clone, Copy)]
enum Packet {
    Nego(wire::Packet<'static>),
    /// To the session of that index and token.
    Session(u32, u64, Content),
}

#[derive(Clone, Copy)]
enum Content {
    /// A message, or the last packet of a direction.
    Data(usize, Option<u64>),
    Ack(usize),
    Probe,
}

struct Session {
    life: Lifecycle<Box<Initiator>>,
    token: u64,
    /// The peer's index and token, once known.
    peer: Option<(u32, u64)>,
    succeeds: Option<u32>,
    successor: Option<u32>,
    cuts: bool,
    /// A packet of the peer's has come; the daemon reads that then.
    located: bool,
    first_packet_at: Option<u64>,
    /// The application has it.
    granted: bool,
    /// The application may see that there is a successor.
    told: bool,
    cut: bool,
    heard: bool,
    /// Transmit ring: all that was written; what is acknowledged, what was sent.
    written: Vec<Option<u64>>,
    una: usize,
    next: usize,
    sent_at: u64,
    /// Receive ring: what has come beyond `cum`, what was read.
    arrived: BTreeMap<usize, Option<u64>>,
    cum: usize,
    read: usize,
    /// The peer's last packet was read.
    at_end: bool,
}

impl Session {
    fn new(life: Lifecycle<Box<Initiator>>, token: u64, succeeds: Option<u32>) -> Self {
        Self {
            located: life.is_initiator(),
            life,
            token,
            peer: None,
            succeeds,
            successor: None,
            cuts: false,
            first_packet_at: None,
            granted: false,
            told: false,
            cut: false,
            heard: false,
            written: Vec::new(),
            una: 0,
            next: 0,
            sent_at: 0,
            arrived: BTreeMap::new(),
            cum: 0,
            read: 0,
            at_end: false,
        }
    }

    /// What the programs in the kernel send.
    fn pump(&mut self, now: u64, out: &mut Vec<Packet>) {
        let (Some((sid, token)), true) = (self.peer, self.located && self.life.is_open()) else {
            return;
        };
        if now >= self.sent_at + TIMEOUT {
            self.next = self.una;
            if self.life.is_initiator() && !self.heard {
                out.push(Packet::Session(sid, token, Content::Probe));
                self.sent_at = now;
            }
        }
        while self.next < self.written.len().min(self.una + WINDOW) {
            let content = Content::Data(self.next, self.written[self.next]);
            out.push(Packet::Session(sid, token, content));
            self.next += 1;
            self.sent_at = now;
        }
    }

    fn handle(&mut self, content: Content) -> Option<Content> {
        self.heard = true;
        match content {
            Content::Data(seq, message) => {
                if (self.cum..self.cum + WINDOW).contains(&seq) {
                    self.arrived.insert(seq, message);
                }
                while self.arrived.contains_key(&self.cum) {
                    self.cum += 1;
                }
                Some(Content::Ack(self.cum))
            }
            Content::Probe => Some(Content::Ack(self.cum)),
            Content::Ack(cum) => {
                self.una = self.una.max(cum);
                self.next = self.next.max(self.una);
                None
            }
        }
    }
}

/// What a host has given up in one switch.
struct Cut {
    messages: Vec<u64>,
}

struct Host {
    address: IpAddr,
    responder: Responder,
    grafts: Vec<GraftInfo>,
    sessions: BTreeMap<u32, Session>,
    next_sid: u32,
    /// The application: its session, those before that are not read to their ends, and its next call.
    present: u32,
    old: Vec<u32>,
    calls_at: u64,
    /// The session that it has asked for.
    asked: Option<u32>,
    switch_at: u64,
    stateless: bool,
    sent: u64,
    received: Vec<u64>,
    cuts: Vec<Cut>,
    switches: u64,
    refused: u64,
    is_over: bool,
}

impl Host {
    fn new(last: u8, stateless: bool) -> Self {
        let graft = |gid, provides| GraftInfo {
            name: format!("g{gid}"),
            gid,
            provides,
            params: Vec::new(),
        };
        Self {
            address: IpAddr::V4(Ipv4Addr::new(192, 0, 2, last)),
            responder: Responder::new(0, [last; 16]),
            grafts: vec![graft(4, Services::RELIABLE | Services::ORDERED)],
            sessions: BTreeMap::new(),
            next_sid: 1,
            present: 0,
            old: Vec::new(),
            calls_at: 0,
            asked: None,
            switch_at: 0,
            stateless,
            sent: 0,
            received: Vec::new(),
            cuts: Vec::new(),
            switches: 0,
            refused: 0,
            is_over: false,
        }
    }

    fn make(&mut self, session: Session) -> u32 {
        let sid = self.next_sid;
        self.next_sid += 1;
        self.sessions.insert(sid, session);
        sid
    }

    /// What vtld does in `cut_predecessor`.
    fn cut_predecessor(&mut self, by: u32) {
        let successor = &self.sessions[&by];
        let Some(before) = successor.succeeds.filter(|_| successor.cuts) else {
            return;
        };
        let before = self.sessions.get_mut(&before).expect("kept");
        if before.successor == Some(by)
            && let Some(end) = before.life.cut()
        {
            assert_eq!(end.tell, Some(EndReason::Cut));
            before.cut = true;
        }
    }

    /// As vtld's `may_succeed`: `None` says later.
    fn may_succeed(&self, (sid, token): (u32, u64)) -> Option<bool> {
        let Some(session) = self.sessions.get(&sid).filter(|s| s.token == token) else {
            return Some(false);
        };
        if !session.life.is_open() {
            return Some(false);
        }
        if !session.granted || !session.life.is_settled() {
            return None;
        }
        let leads = session.life.is_initiator();
        let successor = session.successor.and_then(|s| self.sessions.get(&s));
        let ours = |s: &Session| matches!(s.life.phase(), Phase::Opening(_)) && !leads;
        Some(successor.is_none_or(ours))
    }

    fn asked(
        &mut self,
        now: u64,
        from: IpAddr,
        nego: &wire::Nego<'_>,
        token: u64,
    ) -> Option<Packet> {
        let named = nego::succeeded(nego).expect("successions only");
        let listening = self.may_succeed(named)?;
        let terms = Terms {
            port: PORT,
            provides: self.grafts[0].provides,
            asked: Services::PARTIAL_RELIABILITY,
            required: Services::NONE,
        };
        let policy = Policy {
            grafts: &self.grafts,
            listening,
            room: true,
            tolerant: terms.tolerate_loss().is_ok(),
        };
        let next_sid = self.next_sid + 1;
        let request = match self.responder.asked(now, from, nego, &policy, || next_sid) {
            Verdict::Answer(answer) => return Some(Packet::Nego(answer)),
            Verdict::Open(request) => request,
            verdict => panic!("{verdict:?}"),
        };
        let sid = self.make(Session::new(
            Lifecycle::responder(now),
            token,
            Some(named.0),
        ));
        self.sessions.get_mut(&named.0).expect("named").successor = Some(sid);
        let made = Made {
            sid,
            token,
            ring_slots: RING as u32,
            max_payload: 1400,
            next_sid: sid + 1,
        };
        let (answer, established) =
            (self.responder).accept(now, &request, &request.choices[0], &made);
        let session = self.sessions.get_mut(&sid).expect("just made");
        session.life.handle_established(now);
        session.peer = Some((established.peer_sid, established.peer_token));
        session.cuts = established.stateless;
        Some(Packet::Nego(answer))
    }

    fn answered(&mut self, now: u64, packet: &wire::Packet<'static>, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Some(nego) = session.life.opening() else {
            return;
        };
        match nego.handle(now, packet, Encapsulation::Native) {
            Ok(None) => {}
            Ok(Some(Answer::Opened(established))) => {
                assert_eq!(established.stateless, self.stateless);
                session.life.handle_established(now);
                session.peer = Some((established.peer_sid, established.peer_token));
                session.cuts = established.stateless;
                session.granted = true;
                self.cut_predecessor(sid);
            }
            Ok(other) => panic!("{other:?}"),
            Err(_) => self.failed(sid),
        }
    }

    /// The session cannot be opened: the one before stays.
    fn failed(&mut self, sid: u32) {
        let session = self.sessions.remove(&sid).expect("it was being opened");
        let before = session.succeeds.and_then(|sid| self.sessions.get_mut(&sid));
        if let Some(before) = before.filter(|before| before.successor == Some(sid)) {
            before.successor = None;
        }
        self.asked = None;
        self.refused += 1;
    }

    fn handle(
        &mut self,
        now: u64,
        from: IpAddr,
        packet: Packet,
        random: &mut Random,
        out: &mut Vec<Packet>,
    ) {
        match packet {
            Packet::Nego(wire::Packet::Nego(nego)) => {
                let token = random.bits();
                out.extend(self.asked(now, from, &nego, token));
            }
            Packet::Nego(answer @ (wire::Packet::NegoAck(nego) | wire::Packet::NegoNack(nego))) => {
                self.answered(now, &answer, nego.header.sid);
            }
            Packet::Nego(other) => panic!("{other:?}"),
            Packet::Session(sid, token, content) => {
                let session = self.sessions.get_mut(&sid);
                let known = |s: &&mut Session| s.token == token && s.life.is_open();
                let Some(session) = session.filter(known) else {
                    return; // as the root program does
                };
                if !session.located {
                    session.located = true;
                    session.first_packet_at = Some(now + random.below(3) * MS);
                }
                if let (Some(answer), Some((sid, token))) = (session.handle(content), session.peer)
                {
                    out.push(Packet::Session(sid, token, answer));
                }
            }
        }
    }

    fn step(&mut self, now: u64, random: &mut Random, out: &mut Vec<Packet>) {
        let due: Vec<u32> = (self.sessions.iter())
            .filter(|(_, s)| s.first_packet_at.is_some_and(|at| at <= now))
            .map(|(sid, _)| *sid)
            .collect();
        for sid in due {
            let session = self.sessions.get_mut(&sid).expect("just seen");
            session.first_packet_at = None;
            session.life.handle_first_packet();
            self.responder.validated(sid);
            if let Some(before) = self.sessions[&sid].succeeds {
                self.sessions.get_mut(&before).expect("kept").told = true;
                self.cut_predecessor(sid);
            }
        }
        if let Some(sid) = self.asked
            && let Some(nego) = self.sessions.get_mut(&sid).and_then(|s| s.life.opening())
            && nego.poll_at() <= now
        {
            match nego.poll(now) {
                Ok(Some(Step::Send(packet, _))) => out.push(Packet::Nego(packet)),
                Ok(_) => {}
                Err(_) => self.failed(sid),
            }
        }
        if self.calls_at <= now {
            self.calls_at = now + (1 + random.below(8)) * MS;
            self.call(now, random);
        }
        self.sessions.values_mut().for_each(|s| s.pump(now, out));
    }

    /// What the application and its library do.
    fn call(&mut self, now: u64, random: &mut Random) {
        if let Some(sid) = self.asked.filter(|sid| self.sessions[sid].granted) {
            self.asked = None;
            self.switches += 1;
            self.go_over(sid);
        }
        let present = &self.sessions[&self.present];
        if present.told
            && let Some(sid) = present.successor
        {
            // Its own request was overtaken.
            self.sessions.get_mut(&sid).expect("told").granted = true;
            self.go_over(sid);
        }
        self.read();
        let present = self.sessions.get_mut(&self.present).expect("there is one");
        if !self.is_over && !present.cut {
            while present.written.len() - present.una < RING {
                present.written.push(Some(self.sent));
                self.sent += 1;
            }
        }
        let may_ask = self.asked.is_none() && present.life.is_settled() && !present.cut;
        if !self.is_over && may_ask && self.switch_at <= now && present.successor.is_none() {
            self.switch_at = now + (20 + random.below(120)) * MS;
            self.ask(now, random);
        }
    }

    fn ask(&mut self, now: u64, random: &mut Random) {
        let before = &self.sessions[&self.present];
        let offer = Offer {
            sid: self.next_sid,
            services: Services::PARTIAL_RELIABILITY,
            succeeds: before.peer,
            stateless: self.stateless,
            ..plain_offer()
        };
        let token = random.bits();
        let life = Lifecycle::initiator(now, Box::new(Initiator::new(offer, now, token)));
        let sid = self.make(Session::new(life, token, Some(self.present)));
        self.sessions
            .get_mut(&self.present)
            .expect("it has one")
            .successor = Some(sid);
        self.asked = Some(sid);
    }

    fn go_over(&mut self, to: u32) {
        let before = self.sessions.get_mut(&self.present).expect("it has one");
        assert_eq!(before.cut, self.stateless);
        if before.cut {
            let messages: Vec<u64> = before.written[before.una..]
                .iter()
                .copied()
                .flatten()
                .collect();
            assert!(messages.len() <= RING);
            self.cuts.push(Cut { messages });
        } else {
            before.written.push(None);
        }
        self.old.push(self.present);
        self.present = to;
    }

    fn read(&mut self) {
        let order: Vec<u32> = self.old.iter().copied().chain([self.present]).collect();
        for sid in order {
            let session = self.sessions.get_mut(&sid).expect("kept");
            while session.read < session.cum {
                match session.arrived.remove(&session.read).expect("below cum") {
                    Some(message) => self.received.push(message),
                    None => session.at_end = true,
                }
                session.read += 1;
            }
            if sid == self.present || !(session.cut || session.at_end) {
                return;
            }
            self.old.retain(|old| *old != sid);
        }
    }
}

struct Simulation {
    random: Random,
    now: u64,
    hosts: [Host; 2],
    link: BTreeMap<(u64, u64), (usize, Packet)>,
    sent: u64,
    /// NEGOs, and answers, that got lost.
    lost: [u64; 2],
}

impl Simulation {
    fn new(seed: u64, stateless: bool) -> Self {
        let mut hosts = [Host::new(1, stateless), Host::new(2, stateless)];
        // The first session, which needs no switch.
        for (at, host) in hosts.iter_mut().enumerate() {
            let life = match at {
                0 => Lifecycle::initiator(0, Box::new(Initiator::new(plain_offer(), 0, 1))),
                _ => Lifecycle::responder(0),
            };
            let mut session = Session::new(life, 1 + at as u64, None);
            session.life.handle_established(0);
            session.life.handle_first_packet();
            (session.located, session.granted) = (true, true);
            session.peer = Some((1, 2 - at as u64));
            host.present = host.make(session);
        }
        Self {
            random: Random(seed),
            now: 0,
            hosts,
            link: BTreeMap::new(),
            sent: 0,
            lost: [0; 2],
        }
    }

    fn step(&mut self) {
        self.now += MS;
        let mut out = [Vec::new(), Vec::new()];
        while let Some(entry) = self.link.first_entry()
            && entry.key().0 <= self.now
        {
            let (to, packet) = entry.remove();
            let from = self.hosts[1 - to].address;
            self.hosts[to].handle(self.now, from, packet, &mut self.random, &mut out[to]);
        }
        for (at, packets) in out.iter_mut().enumerate() {
            self.hosts[at].step(self.now, &mut self.random, packets);
            for packet in packets.drain(..) {
                for _ in 0..1 + u64::from(self.random.percent(DOUBLES)) {
                    let delay = (5 + self.random.below(6)) * MS;
                    if self.random.percent(LOSS) {
                        match packet {
                            Packet::Nego(wire::Packet::Nego(_)) => self.lost[0] += 1,
                            Packet::Nego(_) => self.lost[1] += 1,
                            Packet::Session(..) => {}
                        }
                        continue;
                    }
                    self.sent += 1;
                    self.link
                        .insert((self.now + delay, self.sent), (1 - at, packet));
                }
            }
        }
    }

    fn switches(&self) -> u64 {
        self.hosts.iter().map(|host| host.switches).sum()
    }

    /// Until that many switches are done, and everything that can arrive has.
    fn run(&mut self, switches: u64) {
        let bound = (switches + 100) * S;
        while self.switches() < switches {
            assert!(self.now < bound, "{} switches", self.switches());
            self.step();
        }
        self.hosts.iter_mut().for_each(|host| host.is_over = true);
        let quiet = |host: &Host| {
            let is_sent = |s: &Session| !s.life.is_open() || s.una == s.written.len();
            host.asked.is_none() && host.old.is_empty() && host.sessions.values().all(is_sent)
        };
        let end = self.now + 60 * S;
        while !(self.hosts.iter().all(quiet) && self.link.is_empty()) {
            assert!(
                self.now < end,
                "what is left does not arrive: {:?}",
                self.hosts.each_ref().map(|host| (
                    host.asked,
                    &host.old,
                    host.present,
                    host.refused
                ))
            );
            self.step();
        }
        self.step_some();
    }

    /// The applications' last calls.
    fn step_some(&mut self) {
        (0..200).for_each(|_| self.step());
    }

    /// Compares what one host has sent with what the other has received. Returns how many are missing.
    fn check(&self, seed: u64, from: usize) -> u64 {
        let (sender, receiver) = (&self.hosts[from], &self.hosts[1 - from]);
        let ascending = receiver.received.is_sorted_by(|a, b| a < b);
        assert!(ascending, "{seed}: twice, or out of order");
        let received: BTreeSet<u64> = receiver.received.iter().copied().collect();
        let mut missing: BTreeSet<u64> = (0..sender.sent)
            .filter(|id| !received.contains(id))
            .collect();
        assert!(
            received.iter().all(|id| *id < sender.sent),
            "{seed}: never sent"
        );
        let count = missing.len() as u64;
        for cut in &sender.cuts {
            missing.retain(|id| !cut.messages.contains(id));
        }
        assert!(
            missing.is_empty(),
            "{seed}: missing, and not given up: {missing:?}"
        );
        count
    }
}

/// An offer that succeeds no session.
fn plain_offer() -> Offer {
    Offer {
        sid: 1,
        ring_slots: RING as u32,
        max_payload: 1400,
        port: PORT,
        services: Services::NONE,
        grafts: vec![Offered {
            gid: 4,
            params: Vec::new(),
            asked: Vec::new(),
        }],
        known_rtt: None,
        encapsulations: vec![Encapsulation::Native],
        patience: PATIENCE,
        ticket: None,
        early: None,
        succeeds: None,
        stateless: false,
    }
}

fn simulate(seed: u64, stateless: bool, switches: u64) -> Simulation {
    let mut simulation = Simulation::new(seed, stateless);
    simulation.run(switches);
    simulation
}

#[test]
fn stateless__a_thousand_switches_lose_what_was_in_flight_and_no_more() {
    let run = simulate(1, true, 1000);
    let missing: u64 = (0..2).map(|from| run.check(1, from)).sum();
    let cuts = || run.hosts.iter().flat_map(|host| &host.cuts);
    let given_up: u64 = cuts().map(|cut| cut.messages.len() as u64).sum();
    let sent: u64 = run.hosts.iter().map(|host| host.sent).sum();
    let refused: u64 = run.hosts.iter().map(|host| host.refused).sum();
    println!(
        "{} switches, {refused} refused; NEGOs and answers lost: {:?}; of {sent} messages {given_up} given up, \
         {missing} missing",
        run.switches(),
        run.lost
    );
    // Each switch, at both hosts.
    assert_eq!(cuts().count() as u64, 2 * run.switches());
    assert!(run.lost.iter().all(|lost| *lost > 30), "{:?}", run.lost);
    // They did lose something, or there was nothing to bound.
    assert!(
        (1000..=given_up).contains(&missing),
        "{missing} of {given_up}"
    );
    assert!(refused > 0, "both sides never asked at once");
    let received: usize = run.hosts.iter().map(|host| host.received.len()).sum();
    assert_eq!(received as u64 + missing, sent);
}

#[test]
fn stateful__a_thousand_switches_lose_nothing() {
    let run = simulate(1, false, 1000);
    for from in 0..2 {
        assert_eq!(run.check(1, from), 0);
        let (sender, receiver) = (&run.hosts[from], &run.hosts[1 - from]);
        assert_eq!(receiver.received.len() as u64, sender.sent);
    }
    assert!(run.lost.iter().all(|lost| *lost > 30), "{:?}", run.lost);
}

#[test]
fn switches__of_many_seeds() {
    for seed in 2..60 {
        for stateless in [true, false] {
            let run = simulate(seed, stateless, 30);
            for from in 0..2 {
                let missing = run.check(seed, from);
                assert!(stateless || missing == 0, "{seed}: {missing} missing");
            }
        }
    }
}
