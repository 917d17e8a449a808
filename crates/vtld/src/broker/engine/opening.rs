//! How sessions come to be: what both roles need, and the initiator's, for hooked and for aware
//! applications. The responder's is in `responding`.

use std::{
    collections::{BTreeMap, HashMap},
    net::{IpAddr, SocketAddr},
    sync::PoisonError,
    time::Duration,
};

use nix::sys::{
    epoll::{EpollEvent, EpollFlags},
    eventfd::{EfdFlags, EventFd},
};
use vtl::ring::{RxRing, TxRing};
use vtl_bpf::sessions::SessionTable;
use vtl_proto::{
    intf,
    nego::{Answer, Early, Established, Initiator, NegoError, Offer, Offered, PATIENCE, Step, Way},
    services::Services,
    wire::{Header, Packet},
};

use super::{
    super::{
        GRACE_NS, Granted, Owner, Predecessor, Reply, Toward,
        bells::Bell,
        caller::Caller,
        now_ns,
        peers::{Exit, Next},
        random_token,
        raw::{self, Received},
        session::{self, Aware, Phase, Session, Use, Wish},
        stock,
    },
    CROWD, Engine, MANY, Parked, Source,
};
use crate::hooker::{LOSSY, Over};

/// How often a session's lock is tried, 1 ms apart, that an application holds for a microsecond.
const LOCK_TRIES: u32 = 50;

/// The indexes of sessions.
pub(super) struct Indexes<'a> {
    table: &'a SessionTable,
    sessions: &'a BTreeMap<u32, Session>,
    /// When those were freed that ended a moment ago.
    freed: &'a HashMap<u32, u64>,
}

impl<'a> Indexes<'a> {
    /// Of the engine's parts, one by one: it may be at work on the others.
    pub(super) fn of(
        plane: &'a vtl_bpf::plane::DataPlane,
        sessions: &'a BTreeMap<u32, Session>,
        freed: &'a HashMap<u32, u64>,
    ) -> Self {
        let table = plane.sessions();
        Self {
            table,
            sessions,
            freed,
        }
    }

    /// Whether nobody uses this index, and nobody did a moment ago. An application may still hold a
    /// session whose entry the programs have let go of.
    fn is_free(&self, sid: u32) -> bool {
        let rested = |at: &u64| now_ns() - at >= GRACE_NS;
        let entry = self.table.get(sid);
        entry.is_some_and(|e| e.state() == intf::VTL_FREE)
            && !self.sessions.contains_key(&sid)
            && self.freed.get(&sid).is_none_or(rested)
    }

    /// The first free index behind `sid`: one that was freed is left alone for as long as possible.
    fn free_after(&self, sid: u32) -> Option<u32> {
        (sid + 1..self.table.places())
            .chain(1..=sid)
            .find(|sid| self.is_free(*sid))
    }

    /// One that is probably free when a peer comes back: any that is free now.
    pub(super) fn any(&self) -> u32 {
        let random = random_token() % u64::from(self.table.places() - 1);
        self.free_after(random as u32).unwrap_or(1)
    }
}

/// What both roles need.
impl Engine {
    pub(super) fn indexes(&self) -> Indexes<'_> {
        Indexes::of(&self.plane, &self.sessions, &self.freed)
    }

    /// Slots, at most `most`, that a session with this peer should use; `None` if nothing is known of
    /// the path.
    fn slots_for(&self, peer: IpAddr, most: u32) -> Option<u32> {
        let crowd = self.sessions.len() >= CROWD;
        let rtt = self.peers.rtt(peer)?;
        Some(stock::slots_for(rtt, most, crowd))
    }

    /// Slots of the rings that a session with this peer should have.
    fn wanted_slots(&self, peer: IpAddr) -> u32 {
        let most = self.config.ring_slots;
        let wanted = self.slots_for(peer, most).unwrap_or(stock::FAR);
        if self.sessions.len() < MANY {
            return wanted;
        }
        let share = self.config.ring_memory / self.config.max_sessions.max(1) as u64;
        wanted.min(stock::slots_within(share))
    }

    /// Slots that a session should use of the rings that it has.
    pub(super) fn usable_slots(&self, session: &Session) -> u32 {
        let most = session.rings.slots;
        self.slots_for(session.peer, most).unwrap_or(most)
    }

    /// Whether [`Engine::create`] will find rings. If not, some are being made, and
    /// [`Engine::resume`] will be called.
    pub(super) fn rings_ready(&mut self, peer: IpAddr) -> Result<bool, String> {
        let wanted = self.wanted_slots(peer);
        self.stock.prepare(wanted).map_err(|e| e.to_string())
    }

    /// Goes on with what waited for rings, as far as there are some.
    pub(super) fn resume(&mut self) {
        for parked in std::mem::take(&mut self.parked) {
            match parked {
                Parked::Asked(received) => self.control_packet(received),
                Parked::Connect {
                    owner,
                    to,
                    wish,
                    reply,
                } => self.connect(owner, to, wish, reply),
                Parked::Client(flow) => self.client(flow),
            }
        }
    }

    /// Makes a session's entry and rings, as large as a known path needs. While the path is not
    /// known, a small part of large rings is used. It gets the index and the token wished for, if
    /// that index is free, and the rings hold what a peer may send ahead of the answer.
    pub(super) fn create(
        &mut self,
        peer: IpAddr,
        local: IpAddr,
        port: u16,
        wish: Option<(u32, u64)>,
        purpose: impl FnOnce(&vtl_bpf::rings::RingSet) -> Result<Use, String>,
    ) -> Result<(u32, u64), String> {
        if self.sessions.len() >= self.config.max_sessions {
            return Err(format!(
                "this host has {} sessions already: raise vtld --max-sessions",
                self.sessions.len()
            ));
        }
        let wanted = self.wanted_slots(peer);
        let rings = self.stock.take(wanted).ok_or("there are no rings")?;
        let known = self.peers.rtt(peer).is_some();
        let begin = if known { wanted } else { stock::NEAR };
        let mut slots = begin.min(rings.slots);
        let indexes = self.indexes();
        let early = rings.slots >= intf::VTL_EARLY_WINDOW;
        let wish = wish.filter(|(sid, _)| early && indexes.is_free(*sid));
        if wish.is_some() {
            slots = slots.max(intf::VTL_EARLY_WINDOW);
        }
        let found = wish.or_else(|| Some((indexes.free_after(self.last_sid)?, random_token())));
        let Some((sid, token)) = found else {
            self.stock.put(rings);
            return Err("all sessions of this host are in use".into());
        };
        if wish.is_none() {
            self.last_sid = sid;
        }
        self.last_opened_ns = now_ns();
        let register = |purpose: Use| {
            if let Use::Aware(aware) = &purpose {
                // Each kick is an event; nobody reads how many there were. It stays in here for as
                // long as the application has it.
                let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
                let event = EpollEvent::new(flags, Source::Kick { sid }.pack());
                if let Some(kick) = &aware.kick {
                    self.epoll.add(kick, event).map_err(|e| e.to_string())?;
                }
            }
            Ok(purpose)
        };
        let purpose = match purpose(&rings).and_then(register) {
            Ok(purpose) => purpose,
            Err(error) => {
                self.stock.put(rings);
                return Err(error);
            }
        };
        let caller = self.caller(sid);
        let entry = self.plane.sessions().get(sid).expect("it was found free");
        let mut value = session::entry(sid, token, rings.index, slots, local, peer);
        value.aware = match purpose {
            Use::Streams { .. } => intf::VTL_HOOKED,
            Use::Aware(_) if rings.wake().is_some() => intf::VTL_EVENTS,
            Use::Aware(_) => intf::VTL_HANDED,
        };
        entry.initialise(value);
        entry.set_state(intf::VTL_OPENING);
        let now = now_ns();
        let session = Session {
            peer,
            local,
            port,
            token,
            initiator: false,
            succeeds: None,
            successor: None,
            required: Services::NONE,
            preferred: Vec::new(),
            exit: None,
            port_there: intf::VTL_UDP_PORT as u16,
            way: Way::Native,
            confirming: None,
            answered: None,
            phase: Phase::Ended,
            rings,
            slots,
            long_messages: false,
            path: None,
            purpose,
            caller,
            lossy: false,
            lifeline: None,
            heard: 0,
            heard_ns: now,
            asked: 0,
            used_ns: now,
        };
        if let Use::Aware(aware) = &session.purpose {
            self.owned.insert((aware.owner, sid));
        }
        self.sessions.insert(sid, session);
        Ok((sid, token))
    }

    /// A way to run a session's egress without the pump, where there is one.
    fn caller(&self, sid: u32) -> Option<Caller> {
        let caller = self.plane.has_direct().then(Caller::open)?;
        let registered = caller.and_then(|caller| {
            caller.register(&self.callers, sid)?;
            Ok(caller)
        });
        registered
            .inspect_err(|error| tracing::debug!(%error, sid, "all packets go by the pump"))
            .ok()
    }

    /// Hands the session to the kernel's programs.
    pub(super) fn establish(&mut self, sid: u32, established: &Established) -> Result<(), String> {
        let session = self.sessions.get(&sid).ok_or("the session has gone")?;
        if let Some(rtt) = established.rtt {
            self.peers.note_rtt(session.peer, rtt);
        }
        let slots = self.usable_slots(session);
        let graft = self.plane.grafts().find(|g| g.gid == established.gid);
        let session = self.sessions.get_mut(&sid).expect("still there");
        if let (Use::Streams { over, .. }, Some(graft)) = (&mut session.purpose, graft)
            && !graft.services.contains(session::WHOLE)
        {
            session.lossy = true;
            // Flows of ours may go there, but only those that are marked.
            let name = LOSSY.into_iter().find(|name| *name == graft.name);
            *over = Some(Over::Lossy(name.ok_or("it cannot carry streams")?).into());
        }
        if session.initiator {
            session.slots = session.slots.max(slots);
            session.map_streams(established.max_payload)?;
        }
        session.long_messages = established.long_messages;
        let entry = self.plane.sessions().get(sid).expect("it has an entry");
        let slots = session.slots;
        entry.complete(|s| {
            session::fill(s, established);
            s.slots = slots;
        });
        entry.set_state(intf::VTL_OPEN);
        session.phase = Phase::Open;
        session.heard_ns = now_ns();
        let peer = session.peer;
        let streams = matches!(session.purpose, Use::Streams { .. });
        self.begin_path(sid, established.gid, established.max_payload);
        self.schedule.now(sid);
        if streams {
            self.handle
                .peers
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(peer);
        }
        Ok(())
    }

    /// Notes which session one is to succeed.
    pub(super) fn succeed(&mut self, sid: u32, of: Option<u32>) {
        let Some(before) = of.and_then(|of| self.sessions.get_mut(&of)) else {
            return;
        };
        before.successor = Some(sid);
        if let Some(session) = self.sessions.get_mut(&sid) {
            session.succeeds = of;
        }
    }

    /// What the application gets of its session, once: the daemon then closes what it does not need.
    pub(super) fn grant(&mut self, sid: u32) -> Result<Granted, String> {
        let entry = self
            .plane
            .sessions()
            .get(sid)
            .ok_or("the session has gone")?
            .snapshot();
        let session = self.sessions.get_mut(&sid).ok_or("the session has gone")?;
        let graft = self.plane.grafts().find(|g| g.gid == entry.gid);
        let (graft, services) =
            graft.map_or_else(Default::default, |g| (g.name.clone(), g.services));
        let granted = session::grant(sid, session, &entry, graft, services)
            .ok_or_else(|| "out of file descriptors".to_owned())?;
        session.rings.release();
        session.caller.iter_mut().for_each(Caller::release);
        if let Some(aware) = session.aware() {
            aware.granted = true;
            aware.kick = None;
            self.bells.keep(&mut aware.wake);
        }
        Ok(granted)
    }
}

/// The initiator's half.
impl Engine {
    pub(super) fn connect(&mut self, owner: Owner, to: Toward, wish: Wish, reply: Reply<Granted>) {
        let (peer, succeeds) = match to {
            Toward::Peer(peer) if peer.port() == 0 => {
                let _ = reply.send(Err("port 0 is the Hooker's: name another one".into()));
                return;
            }
            Toward::Peer(peer) => (peer, None),
            Toward::Successor(of) => match self.to_be_succeeded(of) {
                Ok(peer) => (peer, Some(of.sid)),
                Err(error) => {
                    let _ = reply.send(Err(error.into()));
                    return;
                }
            },
        };
        let unconfirmed = |sid| {
            self.sessions
                .get(&sid)
                .is_some_and(|s| s.confirming.is_some())
        };
        let ready = if succeeds.is_some_and(unconfirmed) {
            Ok(false)
        } else {
            self.rings_ready(peer.ip())
        };
        match ready {
            Ok(true) => {}
            Ok(false) => {
                self.parked.push_back(Parked::Connect {
                    owner,
                    to,
                    wish,
                    reply,
                });
                return;
            }
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        }
        let shared = reply.clone();
        let opened = self.open(peer.ip(), peer.port(), &wish, succeeds, |rings| {
            Ok(Use::Aware(aware(owner, rings, Some(shared))?))
        });
        if let Err(error) = opened {
            let _ = reply.send(Err(error));
        }
    }

    /// Where a session leads that another one is to succeed.
    fn to_be_succeeded(&self, of: Predecessor) -> Result<SocketAddr, &'static str> {
        let session = self.sessions.get(&of.sid);
        let session = session.filter(|s| s.token == of.key);
        let session = session.ok_or("the session has ended")?;
        // It may have ended by that, and the application not have noticed yet.
        if session.successor.is_some() {
            return Err("the session is being changed already: try again");
        }
        if !session.is_open() {
            return Err("the session has ended");
        }
        Ok((session.peer, session.port).into())
    }

    /// Begins to open a session, perhaps one that succeeds another.
    pub(super) fn open(
        &mut self,
        peer: IpAddr,
        port: u16,
        wish: &Wish,
        succeeds: Option<u32>,
        purpose: impl FnOnce(&vtl_bpf::rings::RingSet) -> Result<Use, String>,
    ) -> Result<u32, String> {
        if self.stopping {
            return Err("the daemon is stopping".into());
        }
        if peer.is_loopback() || peer.is_unspecified() || peer.is_multicast() {
            return Err(format!("{peer} is not another host"));
        }
        let (local, mtu) =
            raw::route(peer).map_err(|e| format!("there is no route to {peer}: {e}"))?;
        let mut grafts = self.candidates(wish)?;
        // What is taken in most cases need not be waited for when the answer comes.
        while let Err(error) = self.launch(grafts[0].gid) {
            grafts.remove(0);
            if grafts.is_empty() {
                return Err(error);
            }
        }
        let mut gids: Vec<u16> = grafts.iter().map(|g| g.gid).collect();
        gids.truncate(intf::VTL_NEGO_GRAFTS as usize);
        let preferred = gids.clone();
        let now = now_ns();
        let mut ways = self.ways(peer, now);
        let before = succeeds.and_then(|sid| self.plane.sessions().get(sid));
        let port_there = before.map_or(0, |before| before.port());
        if let Some(before) = before {
            ways.sort_by_key(|way| *way != before.way());
        }
        // The other session's token proves our address.
        let ticket = match succeeds {
            Some(_) => None,
            None => self.peers.ticket(peer, now),
        };
        // What goes ahead may have to go again. And a hooked flow that is refused goes over TCP:
        // nothing of it may have gone elsewhere.
        let reliable = |gid| {
            let found = grafts.iter().find(|g| g.gid == gid);
            found.is_some_and(|g| g.provides.contains(Services::RELIABLE))
        };
        // Nor would the peer have room for it, if its rings are as small as ours.
        let room = self.wanted_slots(peer) >= intf::VTL_EARLY_WINDOW;
        let mut early = if port != 0 && succeeds.is_none() && room {
            self.peers
                .take_early(peer, port, now, ways[0], &mut gids, reliable)
        } else {
            None
        };
        if early.is_some() && self.launch(gids[0]).is_err() {
            gids.remove(0); // the one that was the first before is loaded
            early = None;
        }
        let rtt = self.peers.rtt(peer);
        let offered = |gid: &u16| {
            let pooled = self.pool.iter().find(|p| p.info.gid == *gid)?;
            Some(Offered {
                gid: *gid,
                params: pooled.info.params.clone(),
                asked: wish.asked(&pooled.params, rtt),
            })
        };
        let offered: Vec<Offered> = gids.iter().filter_map(offered).collect();
        let (sid, token) = self.create(peer, local, port, None, purpose)?;
        let session = self.sessions.get_mut(&sid).expect("just made");
        let offer = Offer {
            sid,
            ring_slots: session.slots,
            max_payload: {
                let most = raw::max_payload(mtu, peer, Way::Native);
                self.peers.payload(peer, now, most)
            },
            port,
            services: wish.wanted.required(),
            grafts: offered,
            known_rtt: rtt,
            ways,
            patience: match port {
                0 => patience(rtt),
                _ => PATIENCE,
            },
            ticket,
            early: early.as_ref().map(|next| Early {
                token: random_token(),
                max_payload: next.max_payload,
                long_messages: next.long_messages,
            }),
            succeeds: succeeds
                .and_then(|sid| self.plane.sessions().get(sid))
                .map(|entry| entry.peer()),
        };
        session.initiator = true;
        session.exit = early.map(|next| next.exit);
        let port_there = session.exit.map_or(port_there, |exit| exit.port);
        if port_there != 0 {
            session.port_there = port_there;
        }
        session.preferred = preferred;
        session.required = wish.wanted.required();
        session.phase = Phase::Opening(Box::new(Initiator::new(offer, now, token)));
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.complete(|s| s.leads = 1);
        }
        self.succeed(sid, succeeds);
        self.open_timer(sid, now);
        Ok(sid)
    }

    /// Sends the NEGO when it is due, and lets data go when they may.
    pub(super) fn open_timer(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Phase::Opening(nego) = &mut session.phase else {
            return;
        };
        let (local, peer, port_there) = (session.local, session.peer, session.port_there);
        let has_tcp = matches!(session.purpose, Use::Streams { .. });
        let step = nego.poll(now);
        self.negotiations.at(sid, nego.poll_at());
        match step {
            Ok(Some(Step::Send(packet, way))) => {
                self.send(&packet, local, peer, port_for(way, port_there));
            }
            Ok(Some(Step::Go(established))) => self.go_ahead(sid, &established),
            Ok(None) => {}
            Err(error) => {
                if error == NegoError::TimedOut && has_tcp {
                    self.peers.note_closed(peer, now);
                }
                self.failed(sid, &error.to_string());
            }
        }
    }

    /// The answer to our NEGO.
    pub(super) fn answered(&mut self, sid: u32, packet: &Packet<'_>, received: &Received) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        if session.peer != received.from {
            return;
        }
        let now = now_ns();
        let way = Way::by(received.port);
        if let Some(nego) = &mut session.confirming {
            match nego.handle(now, packet, way) {
                Ok(None) => self.confirm_timer(sid, now),
                Ok(Some(Answer::Moved(established))) => {
                    self.moved(sid, &established, received.port);
                }
                Ok(Some(Answer::Confirmed(established) | Answer::Opened(established))) => {
                    session.confirming = None;
                    self.confirmed(sid, &established, received.port);
                }
                Err(error) => self.broken(sid, &error.to_string()),
            }
            return;
        }
        let Phase::Opening(nego) = &mut session.phase else {
            return;
        };
        let established = match nego.handle(now, packet, way) {
            Ok(None) => return self.open_timer(sid, now),
            Ok(Some(
                Answer::Opened(established)
                | Answer::Confirmed(established)
                | Answer::Moved(established),
            )) => established,
            Err(NegoError::Differs(gid)) => {
                let why = NegoError::Differs(gid).to_string();
                return self.without(sid, gid, (packet, received.port), &why);
            }
            Err(error) => return self.failed(sid, &error.to_string()),
        };
        if let Err(error) = self.launch(established.gid) {
            return self.without(sid, established.gid, (packet, received.port), &error);
        }
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_port(received.port);
        }
        match self.establish(sid, &established) {
            Ok(()) => {
                self.met(sid, &established);
                self.opened(sid);
            }
            Err(error) => self.failed(sid, &error),
        }
    }

    /// A session that we opened is open.
    pub(super) fn opened(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        tracing::info!(peer = %session.peer, sid, port = session.port, "session open");
        // The peer learns from our first packet where we live. One that is asked before it can have
        // the session would be asked in vain.
        if session.confirming.is_none()
            && let Some(entry) = self.plane.sessions().get(sid)
        {
            entry.probe();
        }
        match &mut session.purpose {
            Use::Streams { .. } => self.start_waiting(sid),
            Use::Aware(aware) => {
                let reply = aware.reply.take();
                let granted = self.grant(sid);
                if let Some(reply) = reply {
                    let _ = reply.send(granted);
                }
            }
        }
    }

    /// Remembers what the next session with the peer may begin with.
    fn met(&mut self, sid: u32, established: &Established) {
        let (Some(session), Some(entry)) =
            (self.sessions.get_mut(&sid), self.plane.sessions().get(sid))
        else {
            return;
        };
        let entry = entry.snapshot();
        let mut ethernet = [0; 14];
        ethernet.copy_from_slice(&entry.headers[..14]);
        let exit = Exit {
            ethernet,
            ifindex: entry.ifindex,
            port: u16::from_be(entry.port),
        };
        let now = now_ns();
        self.peers.note_way(session.peer, Way::by(exit.port), now);
        if session.succeeds.is_some() {
            return; // who listens there did not take it
        }
        let preferred = std::mem::take(&mut session.preferred);
        if let Some(next) = Next::new(now, established, session.port, preferred, exit) {
            self.peers.note_next(session.peer, next);
        }
    }

    /// The peer agreed, in that packet from that port, on a graft that is of no use here: another one,
    /// if there is any.
    fn without(&mut self, sid: u32, gid: u16, (packet, port): (&Packet<'_>, u16), why: &str) {
        let Some(session) = self.sessions.get(&sid) else {
            return;
        };
        if let Packet::NegoAck(ack) = packet {
            let close = Packet::Close(Header {
                flags: intf::VTL_F_ABORT as u8,
                gid: 0,
                sid: ack.sid,
                token: ack.token,
            });
            self.send(&close, session.local, session.peer, port);
        }
        let (now, token) = (now_ns(), random_token());
        let next = match &session.phase {
            Phase::Opening(nego) => nego.without(gid, now, token),
            _ => None,
        };
        let (Some(next), Some(session)) = (next, self.sessions.get_mut(&sid)) else {
            return self.failed(sid, why);
        };
        tracing::info!(peer = %session.peer, why, "the next choice");
        session.token = token;
        session.phase = Phase::Opening(Box::new(next));
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.complete(|s| s.token = token);
        }
        self.open_timer(sid, now);
    }

    /// A session could not be opened.
    pub(super) fn failed(&mut self, sid: u32, why: &str) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        tracing::info!(peer = %session.peer, why, "no session");
        let peer = session.peer;
        let mut flows = Vec::new();
        match &mut session.purpose {
            Use::Streams { waiting, .. } => flows = std::mem::take(waiting),
            Use::Aware(aware) => {
                if let Some(reply) = aware.reply.take() {
                    let _ = reply.send(Err(match session.succeeds {
                        Some(_) => format!("the session with {peer} stays as it is: {why}"),
                        None => format!(
                            "no session with {peer}: {why} (does VTL run there, and does \
                             the path take IP protocol {} or UDP port {}? try: vtl doctor)",
                            intf::VTL_IPPROTO,
                            intf::VTL_UDP_PORT
                        ),
                    }));
                }
            }
        }
        self.forget(sid);
        for flow in flows {
            self.plain(flow);
        }
    }

    /// Data may go, though the answer is still to come.
    fn go_ahead(&mut self, sid: u32, established: &Established) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let established = Established {
            rtt: self.peers.rtt(session.peer),
            ..*established
        };
        let phase = std::mem::replace(&mut session.phase, Phase::Ended);
        if let (Some(exit), Some(entry)) = (session.exit, self.plane.sessions().get(sid)) {
            entry.complete(|s| {
                s.headers[..exit.ethernet.len()].copy_from_slice(&exit.ethernet);
                s.ifindex = exit.ifindex;
            });
            entry.set_port(exit.port);
        }
        if let Err(error) = self.establish(sid, &established) {
            self.failed(sid, &error);
            return;
        }
        if let (Phase::Opening(nego), Some(session)) = (phase, self.sessions.get_mut(&sid)) {
            self.negotiations.at(sid, nego.poll_at());
            session.confirming = Some(nego);
        }
        self.opened(sid);
    }

    /// Repeats the NEGO of a session that data have gone to already.
    pub(super) fn confirm_timer(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let entry = self.plane.sessions().get(sid);
        if entry.is_some_and(|e| e.heard() != 0) {
            // Only who has the session can acknowledge.
            session.confirming = None;
        }
        let Some(nego) = &mut session.confirming else {
            return;
        };
        let (local, peer, port_there) = (session.local, session.peer, session.port_there);
        let step = nego.poll(now);
        self.negotiations.at(sid, nego.poll_at());
        match step {
            Ok(Some(Step::Send(packet, way))) => {
                self.send(&packet, local, peer, port_for(way, port_there));
            }
            Ok(_) => {}
            Err(error) => self.broken(sid, &error.to_string()),
        }
    }

    /// The session that data have gone to is there, says an answer from that UDP port. If they went
    /// another way, nothing shows that it leads there.
    fn confirmed(&mut self, sid: u32, established: &Established, port: u16) {
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_port(port);
        }
        if !self.turn(sid) {
            return self.broken(
                sid,
                "packets of the size that were sent do not get there any more",
            );
        }
        if let Some(entry) = self.plane.sessions().get(sid)
            && entry.heard() == 0
        {
            // They may have come too early, or there were none yet.
            entry.probe();
            self.schedule.now(sid);
        }
        self.met(sid, established);
    }

    /// What went ahead was not taken: all of it goes again, to the session that there is now.
    fn moved(&mut self, sid: u32, established: &Established, port: u16) {
        if let Err(error) = self.launch(established.gid) {
            return self.broken(sid, &error);
        }
        let (Some(session), Some(entry)) =
            (self.sessions.get_mut(&sid), self.plane.sessions().get(sid))
        else {
            return;
        };
        session.confirming = None;
        let longest = |gid: u16| {
            let graft = self.plane.grafts().find(|g| g.gid == gid);
            let services = graft.map_or(Services::NONE, |g| g.services);
            session::max_message(session.long_messages, established.max_payload, services)
        };
        if longest(established.gid) < longest(entry.snapshot().gid) {
            return self.broken(sid, "by the peer's choice messages would be cut");
        }
        // Who holds it is in the kernel, and lets go as soon as its processor runs.
        let locked = (0..LOCK_TRIES).any(|_| {
            entry.lock_egress() || {
                std::thread::sleep(Duration::from_millis(1));
                false
            }
        });
        if !locked {
            return self.broken(sid, "the application is at work on the session");
        }
        // The peer knew nothing of the session that there was: no packet of it will come.
        entry.set_state(intf::VTL_OPENING);
        entry.complete(|s| {
            s.tx = session::sender();
            s.tx.running = 1;
            session::fill(s, established);
        });
        entry.set_port(port);
        entry.set_state(intf::VTL_OPEN);
        entry.probe();
        entry.unlock_egress(false);
        if !self.turn(sid) {
            return self.broken(
                sid,
                "packets of the size that were sent do not get there any more",
            );
        }
        self.begin_path(sid, established.gid, established.max_payload);
        self.schedule.now(sid);
        self.met(sid, established);
    }

    /// A session that data have gone to does not come to be.
    fn broken(&mut self, sid: u32, why: &str) {
        if let Some(session) = self.sessions.get(&sid) {
            tracing::info!(peer = %session.peer, why, "the session has come to nothing");
        }
        self.end(sid, intf::VTL_CLOSED_TIMEOUT);
    }
}

/// How long flows wait for a session, which can go on over TCP: for a few tries by each way.
fn patience(rtt: Option<Duration>) -> Duration {
    const LEAST: Duration = Duration::from_secs(2);
    const ROUNDS: u32 = 4;
    let rounds = rtt.map_or(Duration::ZERO, |rtt| rtt.saturating_mul(ROUNDS));
    (LEAST + rounds).min(PATIENCE)
}

/// The UDP port that a NEGO goes to.
fn port_for(way: Way, port_there: u16) -> u16 {
    match way {
        Way::Native => 0,
        Way::Udp => port_there,
    }
}

/// The daemon's part of an aware application's session.
pub(super) fn aware(
    owner: Owner,
    rings: &vtl_bpf::rings::RingSet,
    reply: Option<Reply<Granted>>,
) -> Result<Aware, String> {
    let event = || {
        EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map_err(|e| format!("an eventfd: {e}"))
    };
    let map = |e: std::io::Error| format!("mapping a ring: {e}");
    Ok(Aware {
        owner,
        reply,
        kick: Some(event()?),
        wake: Bell::Held(event()?),
        sent: 0,
        granted: false,
        // Nothing but their control slots is used here, and mapping all of 32 MiB takes a
        // millisecond.
        tx: TxRing::map(rings.transmit(), 1, 1).map_err(map)?,
        rx: RxRing::map(rings.receive(), 1).map_err(map)?,
    })
}
