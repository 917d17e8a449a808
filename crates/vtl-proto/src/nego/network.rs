//! Simulation in virtual time: two hosts open sessions with each other over a network that loses, duplicates,
//! delays and reorders, with attackers that forge and replay. One of two encapsulations may be blocked, from
//! the start or from some time on. Every attempt must end soon, both ends must agree on the result, and no
//! application may get a message twice.

use core::net::Ipv4Addr;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap},
    thread,
};

use vtl_testing::Random;

use super::Encapsulation::{Native, Udp};
use super::*;
use crate::{
    services::{GraftInfo, ParamRange, Services},
    wire::{Extensions, Gids, Param, Params},
};

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;
const SEEDS: u64 = 10_000;
/// Deadline of an application's attempt, successful or not: [`PATIENCE`], and the time after which a silent
/// peer counts as dead.
const BOUND: u64 = 25 * S;
const DEAD: u64 = 15 * S;
const UNVALIDATED: u64 = 5 * S;
/// Flights of the crypto handshake, as far as negotiation knows them.
const HELLO: &[u8] = b"the first flight";
const ANSWER: &[u8] = b"the answer";
const FINISH: &[u8] = b"the last one";

/// Packets on the network. Data are not simulated in detail: one message stands for all.
#[derive(Clone)]
enum Wire {
    Control(Vec<u8>),
    Data {
        sid: u32,
        token: u64,
        message: usize,
    },
    Ack {
        sid: u32,
        token: u64,
    },
    Abort {
        sid: u32,
        token: u64,
    },
}

enum Event {
    Arrive {
        to: usize,
        from: IpAddr,
        wire: Wire,
        encapsulation: Encapsulation,
    },
    Open {
        host: usize,
    },
    Wake {
        host: usize,
        attempt: usize,
    },
    Forge,
    Restart {
        host: usize,
    },
}

/// A session at the responder.
struct Session {
    peer: IpAddr,
    token: u64,
    link: Established,
    made: u64,
    heard: bool,
    /// It has no keys yet, and reads no data before.
    awaits: bool,
    delivered: bool,
    ends: u64,
}

struct Attempt {
    sid: u32,
    token: u64,
    begun: u64,
    nego: Option<Initiator>,
    session: Option<Established>,
    /// Encapsulation of data.
    encapsulation: Encapsulation,
    /// Start of the session.
    since: u64,
    data_due: u64,
    /// Early data were sent before the peer named a graft that does not load here: no second choice then.
    gone_wrong: bool,
    outcome: Option<Result<(), String>>,
}

struct Host {
    addr: IpAddr,
    responder: Responder,
    grafts: Vec<GraftInfo>,
    /// Grafts that do not load.
    broken: Vec<u16>,
    sessions: BTreeMap<u32, Session>,
    attempts: Vec<Attempt>,
    known: Option<Known>,
    next_sid: u32,
}

/// Cached parameters of the other host.
struct Known {
    ticket: Ticket,
    fresh: bool,
    gid: u16,
    encapsulation: Encapsulation,
}

/// Parameters of the network.
struct Weather {
    loss: u64,
    copies: u64,
    jitter: u64,
    replays: u64,
    forgers: bool,
    restarts: bool,
    /// Encapsulation whose packets are lost, from that time on.
    blocked: Option<(Encapsulation, u64)>,
    /// Upper bound, ms, of the random time after a message until the responder's session ends.
    hurry: u64,
}

struct Simulation {
    random: Random,
    weather: Weather,
    now: u64,
    order: u64,
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<Event>>,
    hosts: [Host; 2],
    /// Deliveries of each message, named by its host and attempt: graft and parameters of each.
    delivered: HashMap<usize, Vec<(u16, Values)>>,
}

fn pool(random: &mut Random) -> (Vec<GraftInfo>, Vec<u16>) {
    let mut grafts = Vec::new();
    let mut broken = Vec::new();
    // Graft 1, the canonical one, is in both pools and loads everywhere.
    for gid in 1..=5u16 {
        if gid != 1 && random.percent(40) {
            continue;
        }
        if gid != 1 && random.percent(20) {
            broken.push(gid);
        }
        let initial = 10 + random.below(2) as u32;
        let range = ParamRange {
            initial,
            min: 1,
            max: 20 + random.below(2) as u32 * 80,
        };
        grafts.push(GraftInfo {
            name: format!("g{gid}"),
            gid,
            provides: Services::NONE,
            params: vec![range; usize::from(gid % 3)],
        });
    }
    let turn = random.below(grafts.len() as u64) as usize;
    grafts.rotate_left(turn);
    (grafts, broken)
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let fair = random.percent(25);
        let weather = Weather {
            loss: if fair { 0 } else { random.below(30) },
            copies: random.below(30),
            jitter: random.below(40) * MS,
            replays: random.below(30),
            forgers: random.percent(50),
            restarts: !fair && random.percent(30),
            blocked: random.percent(50).then(|| {
                let encapsulation = if random.percent(70) { Native } else { Udp };
                (encapsulation, random.below(2) * random.below(12 * S))
            }),
            hurry: 1 + random.below(4) * random.below(1000),
        };
        let hosts = [1, 2].map(|i| {
            let (grafts, broken) = pool(&mut random);
            Host {
                addr: Ipv4Addr::new(192, 0, 2, i).into(),
                responder: Responder::new(0, [random.bits() as u8; 16]),
                grafts,
                broken,
                sessions: BTreeMap::new(),
                attempts: Vec::new(),
                known: None,
                next_sid: 1,
            }
        });
        let mut simulation = Self {
            random,
            weather,
            now: 0,
            order: 0,
            queue: BinaryHeap::new(),
            events: Vec::new(),
            hosts,
            delivered: HashMap::new(),
        };
        let crossing = simulation.random.percent(50);
        for i in 0..6 {
            let at = if crossing && i < 2 {
                0
            } else {
                simulation.random.below(12 * S)
            };
            simulation.at(at, Event::Open { host: i % 2 });
        }
        if simulation.weather.forgers {
            simulation.at(0, Event::Forge);
        }
        if simulation.weather.restarts {
            let (host, at) = (simulation.random.below(2), simulation.random.below(14 * S));
            let host = host as usize;
            simulation.at(at, Event::Restart { host });
        }
        simulation
    }

    fn at(&mut self, time: u64, event: Event) {
        self.events.push(Some(event));
        self.order += 1;
        let time = time.max(self.now);
        self.queue
            .push(Reverse((time, self.order, self.events.len() - 1)));
    }

    /// Sends a packet over the simulated network.
    fn send(&mut self, from: usize, wire: &Wire, encapsulation: Encapsulation) {
        let blocked = |(which, at)| which == encapsulation && self.now >= at;
        if self.weather.blocked.is_some_and(blocked) {
            return;
        }
        let (to, from) = (1 - from, self.hosts[from].addr);
        let mut copies = u64::from(!self.random.percent(self.weather.loss));
        copies += u64::from(self.random.percent(self.weather.copies));
        let mut delays: Vec<u64> = (0..copies)
            .map(|_| 5 * MS + self.random.below(self.weather.jitter + 1))
            .collect();
        if self.random.percent(self.weather.replays) {
            delays.push(self.random.below(10 * S));
        }
        for delay in delays {
            let (wire, at) = (wire.clone(), self.now + delay);
            self.at(
                at,
                Event::Arrive {
                    to,
                    from,
                    wire,
                    encapsulation,
                },
            );
        }
    }

    fn control(&mut self, from: usize, packet: &Packet<'_>, encapsulation: Encapsulation) {
        let mut bytes = vec![0; packet.wire_len()];
        packet.emit(&mut bytes).expect("a well-formed packet");
        self.send(from, &Wire::Control(bytes), encapsulation);
    }

    fn run(mut self) -> Self {
        while let Some(Reverse((time, _, index))) = self.queue.pop() {
            if time > 60 * S {
                break;
            }
            self.now = time;
            let event = self.events[index].take().expect("each happens once");
            match event {
                Event::Arrive {
                    to,
                    from,
                    wire,
                    encapsulation,
                } => self.arrive(to, from, wire, encapsulation),
                Event::Open { host } => self.open(host),
                Event::Wake { host, attempt } => self.wake(host, attempt),
                Event::Forge => self.forge(),
                Event::Restart { host } => self.restart(host),
            }
        }
        self
    }

    fn open(&mut self, host: usize) {
        let token = self.random.bits();
        let guard = self.random.bits();
        let asked = self.random.percent(50);
        let h = &mut self.hosts[host];
        let grafts: Vec<Offered> = h
            .grafts
            .iter()
            .map(|g| Offered {
                gid: g.gid,
                params: g.params.clone(),
                asked: vec![(0, 15); usize::from(asked && !g.params.is_empty())],
            })
            .collect();
        let sid = h.next_sid;
        h.next_sid += 1;
        let loads = !h.broken.contains(&grafts[0].gid);
        let first = grafts[0].gid;
        let early = match &mut h.known {
            Some(known) if known.fresh && loads && (known.gid == first || asked) => {
                known.fresh = false;
                Some(Early {
                    token: guard,
                    max_payload: 1400,
                    long_messages: true,
                })
            }
            _ => None,
        };
        let offer = Offer {
            sid,
            ring_slots: 1024,
            max_payload: 1400,
            port: 80,
            services: Services::NONE,
            grafts,
            encapsulations: match h.known.as_ref().map(|known| known.encapsulation) {
                Some(Udp) => vec![Udp, Native],
                _ => vec![Native, Udp],
            },
            patience: PATIENCE,
            known_rtt: h.known.as_ref().map(|_| Duration::from_millis(10)),
            ticket: h.known.as_ref().map(|known| known.ticket),
            early,
            succeeds: None,
            stateless: false,
        };
        let encapsulation = offer.encapsulations[0];
        let mut nego = Initiator::new(offer, self.now, token);
        if self.random.percent(50) {
            nego.set_crypto(HELLO, self.random.percent(50));
        }
        let h = &mut self.hosts[host];
        h.attempts.push(Attempt {
            encapsulation,
            sid,
            token,
            begun: self.now,
            nego: Some(nego),
            session: None,
            since: 0,
            data_due: u64::MAX,
            gone_wrong: false,
            outcome: None,
        });
        let attempt = h.attempts.len() - 1;
        self.wake(host, attempt);
    }

    /// Runs the initiator's side.
    fn wake(&mut self, host: usize, index: usize) {
        let now = self.now;
        let attempt = &mut self.hosts[host].attempts[index];
        if attempt.outcome.is_some() {
            return;
        }
        let mut next = u64::MAX;
        if let Some(nego) = &mut attempt.nego {
            match nego.poll(now) {
                Err(error) => {
                    attempt.outcome = Some(Err(error.to_string()));
                    return;
                }
                Ok(Some(Step::OpenEarly(session))) => {
                    attempt.session = Some(session);
                    attempt.since = now;
                    attempt.data_due = now;
                    next = nego.poll_at();
                }
                Ok(Some(Step::Send(packet, encapsulation))) => {
                    next = nego.poll_at();
                    let extensions = nego.extensions().to_vec();
                    let extensions = Extensions::parse(&extensions).expect("our own");
                    self.control(host, &packet.with_extensions(extensions), encapsulation);
                }
                Ok(None) => next = nego.poll_at(),
            }
        }
        let attempt = &mut self.hosts[host].attempts[index];
        if let Some(session) = attempt.session {
            if now - attempt.since > DEAD {
                attempt.outcome = Some(Err("silence".into()));
                return;
            }
            if attempt.data_due <= now {
                attempt.data_due = now + 200 * MS;
                let (sid, token) = (session.peer_sid, session.peer_token);
                let message = index * 2 + host;
                let encapsulation = attempt.encapsulation;
                let data = Wire::Data {
                    sid,
                    token,
                    message,
                };
                self.send(host, &data, encapsulation);
            }
            next = next.min(self.hosts[host].attempts[index].data_due);
        }
        let attempt = index;
        self.at(next, Event::Wake { host, attempt });
    }

    fn arrive(&mut self, host: usize, from: IpAddr, wire: Wire, encapsulation: Encapsulation) {
        self.tidy(host);
        let now = self.now;
        match wire {
            Wire::Control(bytes) => {
                let Ok(packet) = Packet::parse(&bytes) else {
                    return;
                };
                match &packet {
                    Packet::Nego(nego) => self.asked(host, from, nego, encapsulation),
                    Packet::NegoAck(_) | Packet::NegoNack(_) => {
                        self.answered(host, &packet, encapsulation);
                    }
                    _ => {}
                }
            }
            Wire::Data {
                sid,
                token,
                message,
            } => {
                let h = &mut self.hosts[host];
                let Some(session) = h.sessions.get_mut(&sid) else {
                    return;
                };
                if session.token != token || session.peer != from {
                    return;
                }
                if session.awaits {
                    return;
                }
                session.heard = true;
                h.responder.validated(sid);
                let ack = Wire::Ack {
                    sid: session.link.peer_sid,
                    token: session.link.peer_token,
                };
                if !session.delivered {
                    session.delivered = true;
                    session.ends = now + self.random.below(self.weather.hurry) * MS;
                    let how = (session.link.gid, session.link.params);
                    self.delivered.entry(message).or_default().push(how);
                }
                self.send(host, &ack, encapsulation);
            }
            Wire::Ack { sid, token } => {
                let attempts = self.hosts[host].attempts.iter_mut();
                for attempt in attempts.filter(|a| (a.sid, a.token) == (sid, token)) {
                    if attempt.session.is_some() && attempt.outcome.is_none() {
                        attempt.outcome = Some(Ok(()));
                    }
                }
            }
            Wire::Abort { sid, token } => {
                let h = &mut self.hosts[host];
                if h.sessions.get(&sid).is_some_and(|s| s.token == token) {
                    h.sessions.remove(&sid);
                    h.responder.ended(sid);
                }
            }
        }
    }

    /// Removes sessions that are not validated in time, and those that have ended.
    fn tidy(&mut self, host: usize) {
        let now = self.now;
        let h = &mut self.hosts[host];
        let over = |s: &Session| (!s.heard && now - s.made > UNVALIDATED) || now > s.ends;
        let ended: Vec<u32> = h
            .sessions
            .iter()
            .filter(|(_, s)| over(s))
            .map(|(sid, _)| *sid)
            .collect();
        for sid in ended {
            h.sessions.remove(&sid);
            h.responder.ended(sid);
        }
        assert!(h.responder.strangers() <= STRANGERS);
        assert_eq!(h.responder.sessions(), h.sessions.len());
    }

    fn asked(&mut self, host: usize, from: IpAddr, nego: &Nego<'_>, encapsulation: Encapsulation) {
        let (now, token, next_sid) = (self.now, self.random.bits(), 1 + self.random.below(1000));
        let key = NegoKey::new(from, nego);
        let h = &mut self.hosts[host];
        let policy = Policy {
            grafts: &h.grafts,
            listening: nego.port == 80,
            room: h.sessions.len() < 64,
            tolerant: true,
        };
        let next_sid = next_sid as u32;
        let request = match h.responder.asked(now, from, nego, &policy, || next_sid) {
            Verdict::Answer(answer) => return self.reply(host, &key, &answer, encapsulation),
            Verdict::Ignore => return,
            Verdict::Open(request) => request,
            Verdict::Finish(sid, flight) => {
                assert_eq!(flight, FINISH);
                let session = h.sessions.get_mut(&sid).expect("it is held");
                session.awaits = false;
                let answer = h.responder.finished(sid).expect("it is held");
                return self.reply(host, &key, &answer, encapsulation);
            }
        };
        let choice = request.choices.iter().find(|c| !h.broken.contains(&c.gid));
        let Some(choice) = choice else {
            let refusal = h.responder.refuse(&request, Reason::NoGraft);
            return self.reply(host, &key, &refusal, encapsulation);
        };
        let free = |sid: &u32| !h.sessions.contains_key(sid);
        let asked = request.early_with(choice).filter(|(sid, _)| free(sid));
        let (sid, token) =
            asked.unwrap_or_else(|| ((1000..).find(free).expect("there are many"), token));
        let made = Made {
            sid,
            token,
            ring_slots: 1024,
            max_payload: 1400,
            next_sid,
        };
        let (answer, link) = h.responder.accept(now, &request, choice, &made);
        let awaits = request.hello.as_deref().inspect(|hello| {
            assert_eq!(*hello, HELLO);
            assert!(h.responder.set_crypto(&request, ANSWER));
        });
        let session = Session {
            peer: from,
            token,
            link,
            made: now,
            heard: false,
            awaits: awaits.is_some(),
            delivered: false,
            ends: u64::MAX,
        };
        h.sessions.insert(sid, session);
        self.reply(host, &key, &answer, encapsulation);
    }

    /// Answers to forged addresses are dropped.
    fn reply(
        &mut self,
        host: usize,
        to: &NegoKey,
        packet: &Packet<'_>,
        encapsulation: Encapsulation,
    ) {
        if to.addr == self.hosts[1 - host].addr {
            let extensions = self.hosts[host].responder.extensions(to).to_vec();
            let extensions = Extensions::parse(&extensions).expect("our own");
            self.control(host, &packet.with_extensions(extensions), encapsulation);
        }
    }

    fn answered(&mut self, host: usize, packet: &Packet<'_>, encapsulation: Encapsulation) {
        let (now, token) = (self.now, self.random.bits());
        let h = &mut self.hosts[host];
        let sid = packet.header().sid;
        let Some(index) = h.attempts.iter().position(|a| a.sid == sid) else {
            return;
        };
        let attempt = &mut h.attempts[index];
        let Some(nego) = attempt.nego.as_mut().filter(|_| attempt.outcome.is_none()) else {
            return;
        };
        let session = match nego.handle(now, packet, encapsulation) {
            Ok(None) => return self.wake(host, index),
            Err(error) => {
                attempt.outcome = Some(Err(error.to_string()));
                let retry = match error {
                    NegoError::Differs(gid) => nego.without(gid, now, token),
                    _ => None,
                };
                return self.retry(host, index, packet, encapsulation, retry, token);
            }
            Ok(Some(Answer::Opened(s) | Answer::Moved(s) | Answer::Confirmed(s))) => s,
            Ok(Some(Answer::Finished)) => {
                attempt.nego = None;
                return self.wake(host, index);
            }
        };
        if h.broken.contains(&session.gid) {
            attempt.outcome = Some(Err("does not load".into()));
            attempt.gone_wrong = attempt.session.is_some();
            let retry = nego.without(session.gid, now, token);
            return self.retry(host, index, packet, encapsulation, retry, token);
        }
        if let Some(ticket) = session.ticket {
            h.known = Some(Known {
                ticket,
                fresh: true,
                gid: session.gid,
                encapsulation,
            });
        }
        let Packet::NegoAck(ack) = packet else {
            panic!("opened by {packet:?}");
        };
        match Flight::Answer.of(&ack.extensions) {
            None => attempt.nego = None,
            Some(flight) => {
                assert_eq!(flight, ANSWER);
                nego.finish(now, &session, FINISH, encapsulation);
            }
        }
        attempt.encapsulation = encapsulation;
        attempt.session = Some(session);
        attempt.since = now;
        attempt.data_due = now;
        self.wake(host, index);
    }

    /// Abandons a session that is unusable here; retries with another graft, if any.
    fn retry(
        &mut self,
        host: usize,
        index: usize,
        packet: &Packet<'_>,
        encapsulation: Encapsulation,
        retry: Option<Initiator>,
        token: u64,
    ) {
        if let Packet::NegoAck(nego) = packet {
            let (sid, token) = (nego.sid, nego.token);
            self.send(host, &Wire::Abort { sid, token }, encapsulation);
        }
        if retry.is_some() {
            let attempt = &mut self.hosts[host].attempts[index];
            attempt.outcome = None;
            attempt.token = token;
            attempt.nego = retry;
            self.wake(host, index);
        }
    }

    /// Off-path attackers: packets with invented numbers, from the hosts' own addresses and from others.
    fn forge(&mut self) {
        let random = &mut self.random;
        let to = random.below(2) as usize;
        let honest = random.percent(30).then(|| self.hosts[1 - to].addr);
        let from = honest.unwrap_or_else(|| Ipv4Addr::from(random.bits() as u32).into());
        let param = Param {
            graft: 0,
            index: 0,
            value: random.bits() as u32,
        };
        let params = if random.percent(20) {
            vec![param]
        } else {
            Vec::new()
        };
        let nego = Nego {
            header: to_header(random),
            token: random.bits(),
            peer_token: random.bits(),
            sid: 1 + random.below(2000) as u32,
            ring_slots: 1 + random.bits() as u32 / 2,
            max_payload: 512 + random.below(60_000) as u16,
            port: 80,
            services: 0,
            reason: 0,
            gids: Gids::new(&[1]).expect("one"),
            ticket: Ticket {
                time: random.below(20_000),
                mac: random.bits(),
                sid: random.below(3) as u32,
            },
            params: Params::new(&params).expect("few"),
            extensions: Extensions::default(),
        };
        let packet = match random.below(4) {
            0 => Packet::NegoAck(nego),
            1 => Packet::NegoNack(Nego {
                reason: 1 + random.below(6) as u8,
                ..nego
            }),
            _ => Packet::Nego(nego),
        };
        let mut bytes = vec![0; packet.wire_len()];
        packet.emit(&mut bytes).expect("a well-formed packet");
        let wire = Wire::Control(bytes);
        let encapsulation = if random.percent(50) { Native } else { Udp };
        let next = self.now + 1 + self.random.below(200 * MS);
        self.at(
            self.now,
            Event::Arrive {
                to,
                from,
                wire,
                encapsulation,
            },
        );
        if next < 25 * S {
            self.at(next, Event::Forge);
        }
    }

    fn restart(&mut self, host: usize) {
        let now = self.now;
        let secret = [self.random.bits() as u8; 16];
        let h = &mut self.hosts[host];
        h.responder = Responder::new(now, secret);
        h.sessions.clear();
        h.known = None;
        for attempt in h.attempts.iter_mut().filter(|a| a.outcome.is_none()) {
            attempt.outcome = Some(Err("restarted".into()));
        }
    }

    fn check(&self, seed: u64) {
        for (message, times) in &self.delivered {
            assert_eq!(times.len(), 1, "seed {seed}: message {message} came twice");
        }
        for (h, host) in self.hosts.iter().enumerate() {
            for (i, attempt) in host.attempts.iter().enumerate() {
                let outcome = attempt.outcome.as_ref();
                let outcome = outcome.unwrap_or_else(|| panic!("seed {seed}: {h}.{i} never ended"));
                let got = self.delivered.get(&(i * 2 + h));
                if outcome.is_ok() {
                    let session = attempt.session.expect("it is open");
                    let want = (session.gid, session.params);
                    assert_eq!(got, Some(&vec![want]), "seed {seed}: {h}.{i}");
                    continue;
                }
                // A session does not change its encapsulation here if that is blocked.
                let cut = self
                    .weather
                    .blocked
                    .is_some_and(|(_, at)| attempt.begun < at);
                if self.weather.loss == 0 && !self.weather.restarts && !attempt.gone_wrong && !cut {
                    panic!("seed {seed}: {h}.{i}: {outcome:?} although nothing was lost");
                }
            }
        }
    }
}

fn to_header(random: &mut Random) -> Header {
    to(random.below(3) as u32, random.below(2) * random.bits())
}

/// What occurred, over all seeds.
#[derive(Debug, Default)]
struct Totals {
    outcomes: BTreeMap<String, u32>,
    counters: Counters,
    by_udp: u32,
    /// Of these, where nothing else passed.
    blocked: u32,
}

impl Totals {
    fn count(&mut self, end: &Simulation) {
        for host in &end.hosts {
            self.count_negotiations(host.responder.counters());
            for attempt in &host.attempts {
                let good = attempt.outcome == Some(Ok(()));
                self.by_udp += u32::from(good && attempt.encapsulation == Udp);
                self.blocked += u32::from(good && end.weather.blocked == Some((Native, 0)));
                assert!(attempt.begun + BOUND < 60 * S);
                let text = match attempt.outcome.as_ref() {
                    Some(Ok(())) => "a session".to_owned(),
                    Some(Err(error)) => error.clone(),
                    None => String::new(),
                };
                *self.outcomes.entry(text).or_default() += 1;
            }
        }
    }

    fn count_negotiations(&mut self, more: Counters) {
        self.counters.early += more.early;
        self.counters.cookies += more.cookies;
        self.counters.replays += more.replays;
        self.counters.repeated += more.repeated;
    }

    fn add(mut self, other: Self) -> Self {
        for (text, count) in other.outcomes {
            *self.outcomes.entry(text).or_default() += count;
        }
        self.count_negotiations(other.counters);
        self.by_udp += other.by_udp;
        self.blocked += other.blocked;
        self
    }
}

/// Also checks coverage: outcomes of all kinds must occur.
#[test]
fn network__every_attempt_ends_and_no_message_comes_twice() {
    let run = |seeds: std::ops::Range<u64>| {
        let mut totals = Totals::default();
        for seed in seeds {
            let end = Simulation::new(seed).run();
            end.check(seed);
            totals.count(&end);
        }
        totals
    };
    let totals = thread::scope(|scope| {
        let other = scope.spawn(|| run(SEEDS / 2..SEEDS));
        run(0..SEEDS / 2).add(other.join().expect("it says why"))
    });
    println!("{totals:#?}");
    assert!(totals.by_udp > totals.blocked && totals.blocked > 5000);
    let counters = &totals.counters;
    assert!(counters.early > 1000 && counters.cookies > 1000 && counters.replays > 1000);
    let all: u32 = totals.outcomes.values().sum();
    let sessions = totals.outcomes["a session"];
    assert!(sessions > all * 9 / 10, "{totals:?}");
}
