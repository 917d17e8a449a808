//! Session set-up: the initiator, for hooked and for aware applications.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use vtl_bpf::sessions;
use vtl_control::{Destination, SessionKey};
use vtl_core::{
    mtud::max_payload,
    reconfigure::Bounds,
    session::{Lifecycle, Phase},
};
use vtl_proto::{
    carrier::GRAFT_PORT,
    frame::Side,
    intf::{self, vtl_tx},
    nego::{
        self, Answer, Early, Encapsulation, Established, Flight, Initiator, NegoError, Offer,
        PATIENCE, Step,
    },
    services::{GraftInfo, Services},
    wire::{Header, Nego, Packet},
};

use super::{
    super::{
        bounds::{self, SessionBounds},
        now_ns,
        peers::{Exit, Next},
        random_token,
        raw::{self, Received, Via},
        session::{self, Aware, Keying, SessionSpec},
    },
    ControlBroker,
    opening::aware,
    parked::Connect,
};

/// The graft that delivers damaged packets, which cannot be sealed: opening them would fail.
const DAMAGED: &str = "udp-lite";
/// Attempts, 1 ms apart, to take a session's egress lock, which an application holds for a microsecond.
const LOCK_TRIES: u32 = 50;

impl ControlBroker {
    pub(super) fn connect(&mut self, connect: Connect) {
        let Connect {
            owner,
            to,
            ref request,
            ref reply,
        } = connect;
        let (peer, succeeds) = match to {
            Destination::Peer { port: 0, .. } => {
                let _ = reply.send(Err("there is no port 0: name another one".into()));
                return;
            }
            Destination::Peer { host, port } => (SocketAddr::new(host, port), None),
            Destination::Successor { succeeds } => match self.to_be_succeeded(succeeds, request) {
                Ok(peer) => (peer, Some(succeeds.sid)),
                Err(error) => {
                    let _ = reply.send(Err(error));
                    return;
                }
            },
        };
        let unconfirmed = |sid| {
            self.sessions
                .get(sid)
                .is_some_and(|s| s.lifecycle.is_confirming())
        };
        let ready = if succeeds.is_some_and(unconfirmed) {
            Ok(false)
        } else {
            self.rings_ready(peer.ip())
                .and_then(|rings| Ok(self.candidate_ready(request)? && rings))
        };
        match ready {
            Ok(true) => {}
            Ok(false) => {
                self.parking.keep(connect);
                return;
            }
            Err(error) => {
                let _ = reply.send(Err(error));
                return;
            }
        }
        let shared = reply.clone();
        let opened = self.open(peer.ip(), peer.port(), request, succeeds, |rings| {
            aware(owner, rings, Some(shared))
        });
        if let Err(error) = opened {
            let _ = reply.send(Err(error));
        }
    }

    /// Peer address and port of a session to be succeeded.
    fn to_be_succeeded(&self, of: SessionKey, request: &SessionSpec) -> Result<SocketAddr, String> {
        let session = self.sessions.get(of.sid);
        let session = session.filter(|s| s.token == of.key);
        let session = session.ok_or("the session has ended")?;
        // Checked first: the succession may have ended the session, unnoticed by the application.
        if session.successor.is_some() {
            return Err("the session is being changed already: try again".into());
        }
        if !session.is_open() {
            return Err("the session has ended".into());
        }
        if request.stateless {
            self.may_be_cut(of.sid).map_err(|why| why.to_string())?;
        }
        Ok((session.peer, session.port).into())
    }

    /// Whether the first candidate, which most peers choose, is deployed; otherwise the answer to NEGO would
    /// have to wait for it.
    fn candidate_ready(&mut self, request: &SessionSpec) -> Result<bool, String> {
        let first = self.pool.candidates(request)?[0].gid;
        self.graft_ready(first)
    }

    /// Whether an answer has to wait for the deployment of its graft.
    pub(super) fn answer_waits(&mut self, answer: &Nego<'_>, from: IpAddr) -> bool {
        let session = self.sessions.get(answer.header.sid);
        let is_awaited = session.is_some_and(|s| {
            let opening = matches!(s.lifecycle.phase(), Phase::Opening(_));
            s.peer == from && (opening || s.lifecycle.is_confirming())
        });
        let gid = answer.gids.first().copied().unwrap_or_default();
        is_awaited && self.graft_ready(gid) == Ok(false)
    }

    /// Source address and MTU of the route to a peer.
    ///
    /// # Errors
    /// Why there is none for sessions, in a sentence.
    fn way_to(&self, peer: IpAddr, request: &SessionSpec) -> Result<(IpAddr, u32), String> {
        if peer.is_loopback() || peer.is_unspecified() || peer.is_multicast() {
            return Err(format!("{peer} is not another host"));
        }
        let (local, mtu) = raw::route(peer, request.from)
            .map_err(|e| format!("there is no route to {peer}: {e}"))?;
        if !self.config.scope.leads_to(peer, local, 0) {
            return Err(format!(
                "{peer} is behind an interface that VTL is not for (vtld --interface)"
            ));
        }
        Ok((local, mtu))
    }

    /// Starts opening a session. `succeeds`: its predecessor.
    pub(super) fn open(
        &mut self,
        peer: IpAddr,
        port: u16,
        request: &SessionSpec,
        succeeds: Option<u32>,
        purpose: impl FnOnce(&vtl_bpf::rings::RingSet) -> Result<Aware, String>,
    ) -> Result<u32, String> {
        if self.stopping {
            return Err("the daemon is stopping".into());
        }
        let (local, mtu) = self.way_to(peer, request)?;
        let mut grafts = self.candidates(request, port)?;
        let stated = self.bounded(peer, port, request, &mut grafts)?;
        let mut gids: Vec<u16> = grafts.iter().map(|g| g.gid).collect();
        gids.truncate(intf::VTL_NEGO_GRAFTS as usize);
        let preferred = gids.clone();
        let now = now_ns();
        let mut encapsulations = self.encapsulations(peer, port, now);
        let before = succeeds.and_then(|sid| self.plane.sessions().get(sid));
        let port_there = before.map_or(0, |before| before.port());
        if let Some(before) = before {
            encapsulations.sort_by_key(|encapsulation| *encapsulation != before.encapsulation());
        }
        // The predecessor's token validates our address.
        let ticket = match succeeds {
            Some(_) => None,
            None => self.peers.ticket(peer, now),
        };
        // Early data may have to be retransmitted.
        let reliable = |gid| {
            let found = grafts.iter().find(|g| g.gid == gid);
            found.is_some_and(|g| g.provides.contains(Services::RELIABLE))
        };
        // No early data either if the peer's rings may be too small, judged by ours.
        let room = self.wanted_slots(peer) >= intf::VTL_EARLY_WINDOW;
        // A successor of a sealed session is sealed, and has the same peer.
        let expected = succeeds.and_then(|sid| self.sessions.get(sid)?.agreed());
        let expected = expected.map(|agreed| agreed.peer);
        let seals = expected.is_some() || self.seals(request, port) && takes_seals(&grafts);
        let mut early = if succeeds.is_none() && room && !seals {
            self.peers
                .take_early(peer, port, now, encapsulations[0], &mut gids, reliable)
        } else {
            None
        };
        if early.is_some() && self.graft_ready(gids[0]) != Ok(true) {
            gids.remove(0); // the former first choice is loaded
            early = None;
        }
        let rtt = self.peers.rtt(peer);
        let offered = self.pool.offered(&gids, request, rtt);
        let max_payload = max_payload(mtu, peer, Encapsulation::Native);
        let max_payload = self.peers.payload(peer, now, max_payload);
        let next = early.as_ref().map(|next| Early {
            token: random_token(),
            max_payload: next.max_payload,
            long_messages: next.long_messages,
        });
        let succeeded = succeeds
            .and_then(|sid| self.plane.sessions().get(sid))
            .map(|entry| entry.peer());
        let offer = |sid, ring_slots| Offer {
            sid,
            ring_slots,
            max_payload,
            port,
            services: request.wanted.required(),
            grafts: offered,
            known_rtt: rtt,
            encapsulations,
            patience: PATIENCE,
            ticket,
            early: next,
            succeeds: succeeded,
            stateless: request.stateless,
        };
        let lifecycle = |sid, token, slots| {
            let negotiation = Initiator::new(offer(sid, slots), now, token);
            Lifecycle::initiator(now, Box::new(negotiation))
        };
        let (sid, _) = self.create(peer, local, port, None, purpose, lifecycle)?;
        let session = self.sessions.get_mut(sid).expect("just made");
        session.exit = early.map(|next| next.exit);
        let port_there = session.exit.map_or(port_there, |exit| exit.port);
        if port_there != 0 {
            session.port_there = port_there;
        }
        session.is_beside = request.from.is_some();
        session.bounds = SessionBounds::new(stated).map(Box::new);
        session.preferred = preferred;
        session.required = request.wanted.required();
        session.asked = session.required;
        session.expected = expected;
        if expected.is_some() {
            session.required = session.required | Services::ENCRYPTION;
        }
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.complete(|s| s.is_initiator = 1);
        }
        self.succeed(sid, succeeds);
        if seals {
            self.ask_for_keys(sid)
                .inspect_err(|_| self.forget(sid))
                .map_err(|error| format!("no handshake for keys: {error}"))?;
        }
        self.open_timer(sid, now);
        Ok(sid)
    }

    /// The bounds that an application has stated, by which the grafts are ordered.
    ///
    /// # Errors
    /// The path is known not to keep them, in a sentence.
    fn bounded(
        &self,
        peer: IpAddr,
        port: u16,
        request: &SessionSpec,
        grafts: &mut [GraftInfo],
    ) -> Result<Bounds, String> {
        let stated = match port {
            GRAFT_PORT => Bounds::default(), // flows have none, or their own
            _ => bounds::of(&request.wanted.qos),
        };
        if let Some(path) = self.monitor.recent(peer, bounds::KNOWN) {
            bounds::choose(&stated, peer, &path, grafts)?;
        }
        Ok(stated)
    }

    /// The grafts to offer; never empty.
    fn candidates(&self, request: &SessionSpec, port: u16) -> Result<Vec<GraftInfo>, String> {
        let mut grafts = self.pool.candidates(request)?;
        if self.seals(request, port) && grafts.iter().any(|graft| graft.name != DAMAGED) {
            grafts.retain(|graft| graft.name != DAMAGED);
        }
        match request.wanted.required().contains(Services::ENCRYPTION) && !takes_seals(&grafts) {
            true => Err(format!("packets of graft \"{DAMAGED}\" cannot be sealed")),
            false => Ok(grafts),
        }
    }

    /// Whether to ask for keys.
    fn seals(&self, request: &SessionSpec, port: u16) -> bool {
        let wanted = request.wanted.required() | request.wanted.prefer;
        let unwanted = request.wanted.avoid | request.wanted.prohibit;
        let is_for_flows = port == GRAFT_PORT && self.config.seals_flows;
        wanted.contains(Services::ENCRYPTION)
            || is_for_flows && !unwanted.contains(Services::ENCRYPTION)
    }

    /// Starts the crypto handshake in a session's NEGO.
    fn ask_for_keys(&mut self, sid: u32) -> io::Result<()> {
        if let Some(session) = self.sessions.get_mut(sid)
            && let Some(nego) = session.lifecycle.opening()
        {
            let (tls, flight) = self.identity.initiate(nego.bound())?;
            nego.set_crypto(&flight, session.required.contains(Services::ENCRYPTION));
            session.keying = Keying::Asked(Box::new(tls));
        }
        Ok(())
    }

    /// Runs the negotiation's timer: sends NEGO when due, and opens the session for early data.
    pub(super) fn open_timer(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        let (local, peer, port_there) = (session.local, session.peer, session.port_there);
        let Some(nego) = session.lifecycle.opening() else {
            return;
        };
        let step = nego.poll(now);
        let extensions = nego.extensions().to_vec();
        self.negotiations.at(sid, nego.poll_at());
        match step {
            Ok(Some(Step::Send(packet, encapsulation))) => {
                if let Some(via) = self.via_for(sid, encapsulation, port_there) {
                    self.send_nego(&packet, &extensions, local, peer, via);
                }
            }
            Ok(Some(Step::OpenEarly(established))) => self.open_early(sid, &established),
            Ok(None) => {}
            Err(error) => self.failed(sid, &error.to_string()),
        }
    }

    /// Handles an answer to NEGO.
    pub(super) fn answered(&mut self, sid: u32, packet: &Packet<'_>, received: &Received) {
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        if session.peer != received.from {
            return;
        }
        let now = now_ns();
        let (via, encapsulation) = (received.via, received.via.encapsulation());
        if let Some(nego) = session.lifecycle.confirming() {
            match nego.handle(now, packet, encapsulation) {
                Ok(None) => self.confirm_timer(sid, now),
                Ok(Some(Answer::Moved(established))) => {
                    self.moved(sid, &established, via);
                }
                Ok(Some(Answer::Finished)) => {
                    session.lifecycle.handle_confirmed();
                    self.settled();
                }
                Ok(Some(Answer::Confirmed(established) | Answer::Opened(established))) => {
                    session.lifecycle.handle_confirmed();
                    self.confirmed(sid, &established, via);
                }
                Err(error) => {
                    self.decline(sid, packet, via);
                    self.broken(sid, &error.to_string());
                }
            }
            return;
        }
        let Some(nego) = session.lifecycle.opening() else {
            return;
        };
        let established = match nego.handle(now, packet, encapsulation) {
            Ok(None | Some(Answer::Finished)) => return self.open_timer(sid, now),
            Ok(Some(
                Answer::Opened(established)
                | Answer::Confirmed(established)
                | Answer::Moved(established),
            )) => established,
            Err(NegoError::Differs(gid)) => {
                let why = NegoError::Differs(gid).to_string();
                return self.offer_next(sid, gid, (packet, via), &why);
            }
            Err(error) => {
                self.decline(sid, packet, via);
                return self.failed(sid, &error.to_string());
            }
        };
        if let Err(error) = self.graft_ready(established.gid) {
            return self.offer_next(sid, established.gid, (packet, via), &error);
        }
        if let Some(entry) = self.plane.sessions().get(sid) {
            go_by(&entry, via);
        }
        match self.take_keys(sid, packet, &established, encapsulation) {
            Ok(true) => {}
            Ok(false) => {
                if let Some(session) = self.sessions.get_mut(sid) {
                    session.lifecycle.handle_established(now);
                }
            }
            Err(error) => {
                self.decline(sid, packet, via);
                return self.failed(sid, &error.to_string());
            }
        }
        match self.establish(sid, &established) {
            Ok(()) => {
                self.cache_path(sid, &established);
                if let Some(session) = self.sessions.get_mut(sid) {
                    session.cuts = established.stateless;
                }
                // The crypto handshake's last flight has to precede data.
                self.confirm_timer(sid, now);
                self.opened(sid);
            }
            Err(error) => self.failed(sid, &error),
        }
    }

    /// Handles the peer's flight of the crypto handshake in its NEGO_ACK, which came in `encapsulation`: the session is
    /// open then, and confirmed once the peer has the last flight. False if there are no keys.
    fn take_keys(
        &mut self,
        sid: u32,
        packet: &Packet<'_>,
        established: &Established,
        encapsulation: Encapsulation,
    ) -> io::Result<bool> {
        let (Packet::NegoAck(ack), Some(session)) = (packet, self.sessions.get_mut(sid)) else {
            return Ok(false);
        };
        let tls = match std::mem::take(&mut session.keying) {
            Keying::Asked(tls) => tls,
            other => {
                session.keying = other;
                return Ok(false);
            }
        };
        let Some(flight) = Flight::Answer.of(&ack.extensions) else {
            session.keying = Keying::Refused;
            return Ok(false);
        };
        let (agreed, finish) = tls.answered(flight, &nego::bound_answer(ack))?;
        if !session.expects(agreed.peer) {
            return Err(io::Error::other(
                "somebody else has answered in the peer's place",
            ));
        }
        if session.port != GRAFT_PORT {
            // For flows the association's thread authorises the peer.
            let judged = self
                .identity
                .judge(Side::Local, session.peer, Some(agreed.peer), None);
            judged.map_err(io::Error::other)?;
        }
        let tags = agreed.tags.clone();
        session.keying = Keying::Agreed(Box::new(agreed));
        let now = now_ns();
        if let Some(nego) = session.lifecycle.opening() {
            nego.finish(now, established, &finish, encapsulation);
        }
        session.lifecycle.start_confirming(now);
        self.use_tags(sid, &tags);
        Ok(true)
    }

    /// Completes the opening of a session: hands it to the application.
    pub(super) fn opened(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        tracing::info!(peer = %session.peer, sid, port = session.port, "session: open");
        // Validates our address to the peer. Without a confirmed session there, a probe would be in vain.
        let nego = session.lifecycle.confirming();
        if nego.is_none_or(|nego| nego.is_finishing())
            && let Some(entry) = self.plane.sessions().get(sid)
        {
            entry.probe();
            self.shards.due(sid);
        }
        let reply = session.aware.reply.take();
        let granted = self.grant(sid);
        if granted.is_ok() {
            self.cut_predecessor(sid);
        }
        if let Some(reply) = reply {
            let _ = reply.send(granted);
        }
    }

    /// Caches parameters for early data of the next session with the peer.
    fn cache_path(&mut self, sid: u32, established: &Established) {
        let (Some(session), Some(entry)) =
            (self.sessions.get_mut(sid), self.plane.sessions().get(sid))
        else {
            return;
        };
        let (encapsulation, entry) = (entry.encapsulation(), entry.snapshot());
        let mut ethernet = [0; 14];
        ethernet.copy_from_slice(&entry.headers[..14]);
        let exit = Exit {
            ethernet,
            ifindex: entry.ifindex,
            port: u16::from_be(entry.port),
        };
        let now = now_ns();
        self.peers
            .note_encapsulation(session.peer, encapsulation, now);
        if session.succeeds.is_some() {
            return; // the listener did not accept it
        }
        let preferred = std::mem::take(&mut session.preferred);
        if let Some(next) = Next::new(now, established, session.port, preferred, exit) {
            self.peers.note_next(session.peer, next);
        }
    }

    /// Declines the answer in `packet`, whose graft is unusable here, and negotiates another graft, if there is
    /// one.
    fn offer_next(&mut self, sid: u32, gid: u16, (packet, via): (&Packet<'_>, Via), why: &str) {
        self.decline(sid, packet, via);
        let (now, token) = (now_ns(), random_token());
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        let peer = session.peer;
        let nego = session.lifecycle.opening();
        let next = nego.and_then(|nego| Some((nego.without(gid, now, token)?, nego)));
        let Some((next, nego)) = next else {
            return self.failed(sid, why);
        };
        tracing::info!(%peer, why, "session: graft of the answer unusable here: next graft offered");
        **nego = next;
        session.token = token;
        let asks = matches!(session.keying, Keying::Asked(_));
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.complete(|s| s.token = token);
        }
        if asks && let Err(error) = self.ask_for_keys(sid) {
            return self.failed(sid, &error.to_string());
        }
        self.open_timer(sid, now);
    }

    /// Aborts the session that the peer has created if the packet is its NEGO_ACK, so that the peer need not
    /// wait for its timeout.
    fn decline(&mut self, sid: u32, packet: &Packet<'_>, via: Via) {
        if let (Packet::NegoAck(ack), Some(session)) = (packet, self.sessions.get(sid)) {
            let close = Packet::Close(Header {
                flags: intf::VTL_F_ABORT as u8,
                gid: 0,
                sid: ack.sid,
                token: ack.token,
            });
            let (local, peer) = (session.local, session.peer);
            self.send(&close, local, peer, via);
        }
    }

    /// Reports that a session could not be opened, and removes it.
    pub(super) fn failed(&mut self, sid: u32, why: &str) {
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        tracing::info!(peer = %session.peer, why, "session: cannot open");
        let peer = session.peer;
        if let Some(reply) = session.aware.reply.take() {
            let _ = reply.send(Err(match session.succeeds {
                Some(_) => format!("the session with {peer} stays as it is: {why}"),
                None => format!(
                    "no session with {peer}: {why} (does VTL run there, and does \
                     the path take IP protocol {}, or UDP or TCP to port {}? try: vtl doctor)",
                    intf::VTL_IPPROTO,
                    intf::VTL_UDP_PORT
                ),
            }));
        }
        self.forget(sid);
    }

    /// Opens a session for early data, before the peer's answer.
    fn open_early(&mut self, sid: u32, established: &Established) {
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        let established = Established {
            rtt: self.peers.rtt(session.peer),
            ..*established
        };
        session.lifecycle.start_confirming(now_ns());
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
        let session = self.sessions.get_mut(sid);
        if let Some(nego) = session.and_then(|s| s.lifecycle.confirming()) {
            self.negotiations.at(sid, nego.poll_at());
        }
        self.opened(sid);
    }

    /// Wakes parked requests: one for a successor may have waited for this session's confirmation.
    fn settled(&self) {
        let _ = self.events.parked.write(1);
    }

    /// Runs the negotiation's timer of a session with early data, or with an unfinished crypto handshake.
    pub(super) fn confirm_timer(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        let waited = session.lifecycle.is_confirming();
        // Acknowledgements in the kernel do not confirm the crypto handshake.
        let is_finishing = (session.lifecycle.confirming()).is_some_and(|nego| nego.is_finishing());
        if !is_finishing && let Some(entry) = self.plane.sessions().get(sid) {
            session.lifecycle.handle_heard(entry.heard());
        }
        let (local, peer, port_there) = (session.local, session.peer, session.port_there);
        let Some(nego) = session.lifecycle.confirming() else {
            if waited {
                self.settled();
            }
            return;
        };
        let step = nego.poll(now);
        let extensions = nego.extensions().to_vec();
        self.negotiations.at(sid, nego.poll_at());
        match step {
            Ok(Some(Step::Send(packet, encapsulation))) => {
                if let Some(via) = self.via_for(sid, encapsulation, port_there) {
                    self.send_nego(&packet, &extensions, local, peer, via);
                }
            }
            Ok(_) => {}
            Err(error) => self.broken(sid, &error.to_string()),
        }
    }

    /// Handles the answer that confirms early data, which came by `via`. If they went by another encapsulation,
    /// it is not known to work.
    fn confirmed(&mut self, sid: u32, established: &Established, via: Via) {
        self.settled();
        if let Some(entry) = self.plane.sessions().get(sid) {
            go_by(&entry, via);
        }
        if !self.restart_path(sid) {
            return self.broken(
                sid,
                "packets of the size that were sent do not get there any more",
            );
        }
        if let Some(entry) = self.plane.sessions().get(sid)
            && entry.heard() == 0
        {
            // Early data may have preceded the session's set-up there, or there were none.
            entry.probe();
            self.shards.due(sid);
        }
        self.cache_path(sid, established);
    }

    /// Handles an answer that rejects early data: retransmits all of them in the session it names.
    fn moved(&mut self, sid: u32, established: &Established, via: Via) {
        self.settled();
        if let Err(error) = self.graft_ready(established.gid) {
            return self.broken(sid, &error);
        }
        let (Some(session), Some(entry)) =
            (self.sessions.get_mut(sid), self.plane.sessions().get(sid))
        else {
            return;
        };
        session.lifecycle.handle_confirmed();
        let longest = |gid: u16| {
            let graft = self.plane.grafts().find(|g| g.gid == gid);
            let services = graft.map_or(Services::NONE, |g| g.services);
            session::max_message(session.long_messages, established.max_payload, services)
        };
        if longest(established.gid) < longest(entry.snapshot().gid) {
            return self.broken(sid, "by the peer's choice messages would be cut");
        }
        // The holder is in the kernel, and releases it as soon as its processor runs.
        let locked = (0..LOCK_TRIES).any(|_| {
            entry.lock_egress() || {
                std::thread::sleep(Duration::from_millis(1));
                false
            }
        });
        if !locked {
            return self.broken(sid, "the application is at work on the session");
        }
        // The peer does not know the former session: no packet of it will come.
        entry.set_state(intf::VTL_OPENING);
        entry.complete(|s| {
            let tx = vtl_tx {
                egress_lock: 1,
                ..session::sender()
            };
            // SAFETY: a field of the entry. Written as it is: the lock, for which a shard may be
            // waiting, must not be seen free in between.
            unsafe { (&raw mut s.tx).write_volatile(tx) };
            session::fill(s, established);
        });
        go_by(&entry, via);
        entry.set_state(intf::VTL_OPEN);
        entry.probe();
        entry.unlock_egress(false);
        if !self.restart_path(sid) {
            return self.broken(
                sid,
                "packets of the size that were sent do not get there any more",
            );
        }
        self.begin_path(sid, established.gid, established.max_payload);
        self.shards.due(sid);
        self.cache_path(sid, established);
    }

    /// Encapsulation and port of a NEGO.
    fn via_for(&mut self, sid: u32, encapsulation: Encapsulation, port_there: u16) -> Option<Via> {
        match encapsulation {
            Encapsulation::Native => Some(Via::Native),
            Encapsulation::Udp => Some(Via::Udp(port_there)),
            Encapsulation::Tcp => self.connection_of(sid).map(Via::Tcp),
        }
    }

    /// Fails an open session that the negotiation cannot confirm: its early data, if any, are not delivered.
    fn broken(&mut self, sid: u32, why: &str) {
        if let Some(session) = self.sessions.get(sid) {
            tracing::info!(peer = %session.peer, why, "session: aborted before the peer confirmed it");
        }
        self.fail(sid);
    }
}

/// Whether packets of these grafts can be sealed.
fn takes_seals(grafts: &[GraftInfo]) -> bool {
    grafts.iter().all(|graft| graft.name != DAMAGED)
}

/// Switches a session's packets to the encapsulation of the peer's answer.
fn go_by(entry: &sessions::Session<'_>, via: Via) {
    entry.set_port(match via {
        Via::Udp(port) => port,
        Via::Native | Via::Tcp(_) => 0,
    });
    if via.encapsulation() == Encapsulation::Tcp {
        entry.set_tunnel(true);
    }
}
