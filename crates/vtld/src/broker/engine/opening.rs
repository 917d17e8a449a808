//! How sessions come to be: negotiation, in both roles, for hooked and for aware applications.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, PoisonError},
    time::Duration,
};

use nix::sys::{
    epoll::{EpollEvent, EpollFlags},
    eventfd::{EfdFlags, EventFd},
};
use vtl::ring::{RxRing, TxRing};
use vtl_proto::{
    intf,
    nego::{self, Established, Initiator, NegoKey, Offer, Policy},
    services::{GraftInfo, Requirements, Services, select},
    wire::{Gids, Nego, Packet},
};

use super::{
    super::{
        Granted, Owner, Reply,
        caller::Caller,
        now_ns, random_token,
        raw::{self, Received},
        session::{self, Aware, Phase, Session, Use, Wish},
        stock,
    },
    BACKLOG, CROWD, Engine, PATHS, Source, UNVALIDATED,
};

impl Engine {
    /// The grafts that a session may use, in order of preference, with those that are not in the
    /// kernel yet. Who asks for nothing gets nothing first, who asks for something the best of
    /// those that provide it.
    pub(super) fn usable(&self, wanted: &Requirements) -> Vec<GraftInfo> {
        let grafts = self.pool.iter().filter(|p| !p.disabled).map(|p| &p.info);
        let mut usable = select(grafts, wanted);
        if wanted.required().is_empty() && wanted.prefer.is_empty() {
            usable.sort_by_key(|g| g.provides.count());
        }
        usable.into_iter().cloned().collect()
    }

    /// The gids to offer for a wish.
    fn offered(&self, wish: &Wish) -> Result<Gids, String> {
        let mut usable = self.usable(&wish.wanted);
        if let Some(name) = &wish.graft {
            let pooled = self.pool.iter().find(|p| p.info.name == *name);
            let pooled = pooled
                .filter(|p| !p.disabled)
                .ok_or_else(|| format!("the pool has no graft \"{name}\": vtl graft list"))?;
            wish.check(&pooled.params)?;
            usable.retain(|g| g.name == *name);
            if usable.is_empty() {
                return Err(format!(
                    "graft \"{name}\" is not what was asked for: it provides {}",
                    pooled.info.provides
                ));
            }
        } else if !wish.params.is_empty() {
            return Err("parameters are a graft's: name it, too".into());
        }
        let gids: Vec<u16> = usable.iter().map(|g| g.gid).collect();
        Gids::new(&gids[..gids.len().min(intf::VTL_NEGO_GRAFTS as usize)])
            .filter(|g| !g.is_empty())
            .ok_or_else(|| self.lacking(wish))
    }

    /// Why no graft will do.
    fn lacking(&self, wish: &Wish) -> String {
        let required = wish.wanted.required();
        let with = |g: &GraftInfo| g.satisfies(required);
        if self.pool.iter().any(|p| !p.disabled && with(&p.info)) {
            return format!(
                "every graft of the pool with {required} also has what was prohibited: {}",
                wish.wanted.prohibit
            );
        }
        let all = self.pool.iter().filter(|p| !p.disabled);
        let all = all.fold(Services::NONE, |all, p| all | p.info.provides.implied());
        match all.missing(required) {
            Services::NONE => format!("no graft of the pool provides {required} together"),
            missing => format!("no graft of the pool provides {missing}"),
        }
    }

    /// Makes sure that a graft of the pool is in the kernel.
    pub(super) fn launch(&mut self, gid: u16) -> Result<(), String> {
        if self.plane.grafts().any(|g| g.gid == gid) {
            return Ok(());
        }
        let image = self
            .pool
            .iter()
            .find(|p| p.info.gid == gid && !p.disabled)
            .map(|p| p.image);
        let image = image.ok_or_else(|| format!("the pool has no graft {gid}"))?;
        let start = now_ns();
        let info = self.plane.deploy(image).map_err(|e| e.to_string())?;
        let ms = (now_ns() - start) as f64 / 1e6;
        tracing::info!(
            graft = info.name,
            gid,
            instructions = info.instructions,
            ms,
            "deployed"
        );
        Ok(())
    }

    /// May a peer open a session now?
    fn room_for_strangers(&self) -> bool {
        let table = self.plane.sessions();
        let unvalidated = |(sid, session): &(&u32, &Session)| {
            !session.initiator && table.get(**sid).is_some_and(|e| e.ifindex() == 0)
        };
        !self.stopping
            && self.sessions.len() < self.config.max_sessions
            && self.sessions.iter().filter(unvalidated).count() < UNVALIDATED
    }

    /// Remembers a peer's round-trip time.
    pub(super) fn note_path(&mut self, peer: IpAddr, rtt: Duration) {
        if self.paths.len() >= PATHS && !self.paths.contains_key(&peer) {
            self.paths.clear(); // it costs no more than the first session to a stranger
        }
        self.paths.insert(peer, rtt);
    }

    /// Makes a session's entry and rings, as large as a known path needs. While the path is not
    /// known, a small part of large rings is used.
    pub(super) fn create(
        &mut self,
        peer: IpAddr,
        local: IpAddr,
        port: u16,
        purpose: impl FnOnce(&vtl_bpf::rings::RingSet) -> Result<Use, String>,
    ) -> Result<(u32, u64), String> {
        if self.sessions.len() >= self.config.max_sessions {
            return Err(format!(
                "this host has {} sessions already: raise vtld --max-sessions",
                self.sessions.len()
            ));
        }
        let sid = self
            .plane
            .sessions()
            .free_after(self.last_sid)
            .ok_or("all sessions of this host are in use")?;
        self.last_sid = sid;
        let known = self.paths.get(&peer).copied();
        let mut wanted = known.map_or(stock::FAR, |rtt| {
            stock::slots_for(rtt, self.config.ring_slots)
        });
        if wanted == stock::NEAR && self.sessions.len() >= CROWD {
            wanted = stock::LEAST;
        }
        let rings = self.stock.take(wanted).map_err(|e| e.to_string())?;
        let used = if known.is_some() { wanted } else { stock::NEAR };
        let slots = used.min(rings.slots);
        self.last_opened_ns = now_ns();
        let token = random_token();
        let purpose = match purpose(&rings) {
            Ok(purpose) => purpose,
            Err(error) => {
                self.stock.put(rings);
                return Err(error);
            }
        };
        if let Use::Aware(aware) = &purpose {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, Source::Kick { sid }.pack());
            self.epoll
                .add(&aware.kick, event)
                .map_err(|e| e.to_string())?;
        }
        let entry = self.plane.sessions().get(sid).expect("it was found free");
        let mut value = session::entry(sid, token, rings.index, slots, local, peer);
        if let Use::Aware(aware) = &purpose {
            value.aware = 1;
            if let Some(caller) = &aware.caller {
                caller
                    .register(&self.callers, sid)
                    .map_err(|e| e.to_string())?;
            }
        }
        entry.initialise(value);
        entry.set_state(intf::VTL_OPENING);
        let now = now_ns();
        let session = Session {
            peer,
            local,
            port,
            token,
            initiator: false,
            params: Vec::new(),
            answered: None,
            answered_ns: None,
            phase: Phase::Ended,
            rings,
            slots,
            purpose,
            lifeline: None,
            heard: 0,
            heard_ns: now,
            used_ns: now,
        };
        self.sessions.insert(sid, session);
        Ok((sid, token))
    }

    /// Begins to open a session.
    pub(super) fn open(
        &mut self,
        peer: IpAddr,
        port: u16,
        wish: &Wish,
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
        let gids = self.offered(wish)?;
        let (sid, token) = self.create(peer, local, port, purpose)?;
        let session = self.sessions.get_mut(&sid).expect("just made");
        let offer = Offer {
            sid,
            ring_slots: session.slots,
            max_payload: raw::max_payload(mtu, peer),
            port,
            services: wish.wanted.required(),
            gids,
            known_rtt: self.paths.get(&peer).copied(),
        };
        session.initiator = true;
        session.params = wish.params();
        session.phase = Phase::Opening(Initiator::new(offer, now_ns(), token));
        self.open_timer(sid, now_ns());
        Ok(sid)
    }

    /// Sends the NEGO when it is due.
    pub(super) fn open_timer(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Phase::Opening(nego) = &mut session.phase else {
            return;
        };
        let (local, peer) = (session.local, session.peer);
        let sent = nego.poll(now);
        self.next_tick = self.next_tick.min(nego.poll_at());
        match sent {
            Ok(Some(packet)) => self.send(&packet, local, peer),
            Ok(None) => {}
            Err(error) => self.failed(sid, &error.to_string()),
        }
    }

    pub(super) fn send(&self, packet: &Packet<'_>, from: IpAddr, to: IpAddr) {
        let mut buffer = [0; 256];
        let Ok(length) = packet.emit(&mut buffer) else {
            return;
        };
        let Some(raw) = &self.raw[usize::from(to.is_ipv6())] else {
            return;
        };
        if let Err(error) = raw.send(&buffer[..length], from, to) {
            tracing::debug!(%error, %to, "a control packet cannot be sent");
        }
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
                    let _ = reply.send(Err(format!(
                        "no session with {peer}: {why} (does VTL run there? try: vtl doctor)"
                    )));
                }
            }
        }
        self.forget(sid);
        for flow in flows {
            self.plain(flow);
        }
    }

    pub(super) fn control_packets(&mut self, v6: bool) {
        for _ in 0..64 {
            let Some(raw) = &self.raw[usize::from(v6)] else {
                return;
            };
            match raw.receive() {
                Ok(Some(received)) => self.control_packet(&received),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "receiving a control packet");
                    return;
                }
            }
        }
    }

    pub(super) fn control_packet(&mut self, received: &Received) {
        let packet = match Packet::parse(&received.bytes) {
            Ok(packet) => packet,
            Err(error) => {
                if let Some(nack) = nego::refuse_version(&received.bytes) {
                    self.send(&nack.answer(), received.to, received.from);
                }
                tracing::debug!(%error, from = %received.from, "a malformed control packet");
                return;
            }
        };
        match &packet {
            Packet::Nego(nego) => self.asked(nego, received),
            Packet::NegoAck(n) | Packet::NegoNack(n) => {
                self.answered(n.header.sid, &packet, received);
            }
            Packet::Close(header) => self.closed(*header, received),
            Packet::Data(_) | Packet::Ack(_) | Packet::Probe(_) => {}
        }
    }

    /// A peer wants to open a session.
    pub(super) fn asked(&mut self, nego: &Nego, received: &Received) {
        let key = NegoKey::new(received.from, nego);
        let known = self.sessions.values().find_map(|s| {
            s.answered
                .as_ref()
                .filter(|(k, _)| *k == key)
                .map(|(_, p)| *p)
        });
        if let Some(answer) = known {
            self.send(&answer, received.to, received.from);
            return;
        }
        let mut ports = vec![0];
        ports.extend(
            self.listeners
                .iter()
                .filter(|(_, l)| l.backlog.len() < BACKLOG)
                .map(|(port, _)| *port),
        );
        let mtu = raw::route(received.from).map_or(1500, |(_, mtu)| mtu);
        let grafts = self.usable(&Requirements::default());
        let policy = Policy {
            grafts: &grafts,
            ports: &ports,
            room: self.room_for_strangers(),
            ring_slots: stock::NEAR,
            max_payload: raw::max_payload(mtu, received.from),
        };
        let choice = match nego::respond(nego, &policy) {
            Ok(choice) => choice,
            Err(nack) => {
                self.send(&nack.answer(), received.to, received.from);
                return;
            }
        };
        if let Err(error) = self.respond(key, &choice, received) {
            tracing::warn!(%error, peer = %received.from, "a session was not accepted");
        }
    }

    pub(super) fn respond(
        &mut self,
        key: NegoKey,
        choice: &nego::Choice,
        received: &Received,
    ) -> Result<(), String> {
        self.launch(choice.session.gid)?;
        let port = choice.port;
        let owner = self.listeners.get(&port).map_or(0, |l| l.owner);
        let max_payload = choice.session.max_payload;
        let (sid, token) = self.create(received.from, received.to, port, |rings| {
            Ok(if port == 0 {
                Use::Streams {
                    waiting: Vec::new(),
                    streams: None,
                }
            } else {
                Use::Aware(aware(owner, rings, max_payload, None)?)
            })
        })?;
        let session = self.sessions.get_mut(&sid).expect("just made");
        let answer = choice.with_ring_slots(session.slots).answer(sid, token);
        session.answered = Some((key, answer));
        session.answered_ns = Some(now_ns());
        self.establish(sid, &choice.session)?;
        self.send(&answer, received.to, received.from);
        Ok(())
    }

    /// The first packet of a peer that opened a session came `rtt` after our answer. From here on
    /// the session may be used.
    pub(super) fn validated(&mut self, sid: u32, rtt: Duration) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Some(entry) = self.plane.sessions().get(sid) else {
            return;
        };
        if !session.is_open() {
            return;
        }
        entry.suppose_rtt(rtt);
        let slots = stock::slots_for(rtt, session.rings.slots);
        if slots > session.slots {
            session.slots = slots;
            entry.widen(slots);
        }
        let (peer, port) = (session.peer, session.port);
        if let Err(error) = session.map_streams(entry.snapshot().max_payload) {
            tracing::warn!(%error, %peer, "a session cannot be used");
            self.close(sid, true);
            return;
        }
        self.note_path(peer, rtt);
        if let Some(listener) = self.listeners.get_mut(&port) {
            listener.backlog.push_back(sid);
            self.grant_accepted();
        }
        self.receive(sid);
    }

    /// The answer to our NEGO.
    pub(super) fn answered(&mut self, sid: u32, packet: &Packet<'_>, received: &Received) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        if session.peer != received.from {
            return;
        }
        let Phase::Opening(nego) = &mut session.phase else {
            return;
        };
        match nego.handle(now_ns(), packet) {
            Ok(None) => {}
            Ok(Some(established)) => {
                let done = self
                    .launch(established.gid)
                    .and_then(|()| self.establish(sid, &established));
                match done {
                    Ok(()) => self.opened(sid),
                    Err(error) => self.failed(sid, &error),
                }
            }
            Err(error) => self.failed(sid, &error.to_string()),
        }
    }

    /// Hands the session to the kernel's programs.
    pub(super) fn establish(&mut self, sid: u32, established: &Established) -> Result<(), String> {
        let session = self.sessions.get_mut(&sid).ok_or("the session has gone")?;
        if session.initiator {
            // After more than one NEGO nobody knows which was answered.
            let slots = established.rtt.map_or(session.rings.slots, |rtt| {
                stock::slots_for(rtt, session.rings.slots)
            });
            session.slots = session.slots.max(slots);
            session.map_streams(established.max_payload)?;
        }
        let entry = self.plane.sessions().get(sid).expect("it has an entry");
        let slots = session.slots;
        let pooled = self.pool.iter().find(|p| p.info.gid == established.gid);
        let params = pooled.map_or(&[][..], |p| &p.params);
        entry.complete(|s| {
            session::fill(s, established);
            session::set_params(s, params, &session.params);
            s.slots = slots;
        });
        entry.set_state(intf::VTL_OPEN);
        session.phase = Phase::Open;
        session.heard_ns = now_ns();
        self.schedule.now(sid);
        let peer = session.peer;
        if matches!(session.purpose, Use::Streams { .. }) {
            self.handle
                .peers
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(peer);
        }
        if let Some(rtt) = established.rtt {
            self.note_path(peer, rtt);
        }
        Ok(())
    }

    /// A session that we opened is open.
    pub(super) fn opened(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        tracing::info!(peer = %session.peer, sid, port = session.port, "session open");
        // The peer learns from our first packet where we live.
        if let Some(entry) = self.plane.sessions().get(sid) {
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

    pub(super) fn grant(&self, sid: u32) -> Result<Granted, String> {
        let entry = self
            .plane
            .sessions()
            .get(sid)
            .ok_or("the session has gone")?
            .snapshot();
        let session = self.sessions.get(&sid).ok_or("the session has gone")?;
        let graft = self.plane.grafts().find(|g| g.gid == entry.gid);
        let (graft, services) = graft.map_or_else(Default::default, |g| {
            (g.name.clone(), Services::from_bits(g.services))
        });
        session::grant(sid, session, &entry, graft, services)
            .ok_or_else(|| "out of file descriptors".to_owned())
    }

    pub(super) fn connect(
        &mut self,
        owner: Owner,
        to: SocketAddr,
        wish: &Wish,
        reply: &Reply<Granted>,
    ) {
        if to.port() == 0 {
            let _ = reply.send(Err("port 0 is the Hooker's: name another one".into()));
            return;
        }
        let shared = reply.clone();
        let mtu = raw::route(to.ip()).map_or(1500, |(_, mtu)| mtu);
        let max_payload = raw::max_payload(mtu, to.ip());
        let opened = self.open(to.ip(), to.port(), wish, |rings| {
            Ok(Use::Aware(aware(owner, rings, max_payload, Some(shared))?))
        });
        if let Err(error) = opened {
            let _ = reply.send(Err(error));
        }
    }

    /// Gives sessions that wait to applications that wait.
    pub(super) fn grant_accepted(&mut self) {
        let mut ready = Vec::new();
        for listener in self.listeners.values_mut() {
            while !listener.waiting.is_empty()
                && let Some(sid) = listener.backlog.pop_front()
                && let Some((owner, reply)) = listener.waiting.pop_front()
            {
                ready.push((sid, owner, reply));
            }
        }
        for (sid, owner, reply) in ready {
            let aware = self.sessions.get_mut(&sid).and_then(Session::aware);
            if let Some(aware) = aware {
                aware.owner = owner;
            }
            let _ = reply.send(self.grant(sid));
        }
    }
}

/// The daemon's part of an aware application's session.
fn aware(
    owner: Owner,
    rings: &vtl_bpf::rings::RingSet,
    max_payload: u16,
    reply: Option<Reply<Granted>>,
) -> Result<Aware, String> {
    let event = || {
        EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map(Arc::new)
            .map_err(|e| format!("an eventfd: {e}"))
    };
    let map = |e: std::io::Error| format!("mapping a ring: {e}");
    Ok(Aware {
        owner,
        reply,
        kick: event()?,
        wake: event()?,
        sent: 0,
        caller: Caller::open()
            .inspect_err(
                |error| tracing::debug!(%error, "no way for the application to run egress"),
            )
            .ok(),
        tx: TxRing::map(rings.transmit(), rings.slots, max_payload).map_err(map)?,
        rx: RxRing::map(rings.receive(), rings.slots).map_err(map)?,
    })
}
