//! Session set-up: the responder, from a peer's NEGO to the application that accepts.

use std::{io, net::IpAddr, time::Duration};

use vtl_control::SessionKey;
use vtl_core::{
    mtud,
    session::{Lifecycle, Phase},
};
use vtl_proto::{
    carrier::{GRAFT_PORT, may_lose},
    frame::Side,
    intf,
    nego::{self, Choice, Encapsulation, Flight, Made, NegoKey, Policy, Reason, Request, Verdict},
    services::Services,
    wire::{Nego, Packet},
};

use crate::network::{Network, admits};

use super::{
    super::{
        Granted, Owner,
        listeners::Accepted,
        now_ns, random,
        raw::{self, Received, Via},
        session::{Answered, Keying, Session, WHOLE},
    },
    ControlBroker,
    opening::aware,
};

/// Whether a session may be succeeded.
enum Succession {
    Yes {
        /// Services that the successor must provide.
        required: Services,
        /// The successor must have keys.
        sealed: bool,
    },
    No,
    /// Not yet: ignore the NEGO, which the peer retransmits.
    Later,
}

impl ControlBroker {
    /// Handles a peer's NEGO. False if it has to wait for rings or for the graft.
    pub(super) fn asked(&mut self, nego: &Nego<'_>, received: &Received) -> bool {
        if !admits(&self.config.from, received.from) {
            return true; // silently, as without a daemon
        }
        let mut grafts: Vec<_> = self.pool.working().collect();
        if nego.port == GRAFT_PORT {
            if received.via.encapsulation() == Encapsulation::Tcp {
                return true; // flows have TCP connections of their own
            }
            // Grafts that lose something only if a server here is marked as loss-tolerant.
            let tolerant = (self.hooker.as_ref()).is_some_and(|hooker| hooker.tolerates_any());
            grafts.retain(|g| g.provides.contains(WHOLE) || tolerant && may_lose(&g.name));
        }
        let listening = match nego::succeeded(nego) {
            None if nego.port == GRAFT_PORT && !self.awaits_flows() => false,
            None => self.listeners.owner(nego.port).is_some(),
            Some(named) => match self.may_succeed(named, nego.port, received.from) {
                Succession::Later => return true,
                Succession::No => false,
                Succession::Yes { required, sealed } => {
                    let has_keys = Flight::Hello.of(&nego.extensions).is_some();
                    let is_sealed = has_keys || !sealed && !required.contains(Services::ENCRYPTION);
                    let required = Services::ENCRYPTION.missing(required);
                    grafts.retain(|g| is_sealed && g.provides.contains(required));
                    true
                }
            },
        };
        let policy = Policy {
            grafts: &grafts,
            listening,
            room: !self.stopping && self.has_room_for(received.from),
            tolerant: nego::succeeded(nego).is_some_and(|(sid, _)| self.may_be_cut(sid).is_ok()),
        };
        let (from, sessions) = (received.from, &self.sessions);
        let next = || sessions.any_free();
        let verdict = self.responder.asked(now_ns(), from, nego, &policy, next);
        match verdict {
            Verdict::Answer(answer) => {
                self.send_answer(&answer, &NegoKey::new(from, nego), received);
            }
            Verdict::Ignore => {}
            Verdict::Finish(sid, flight) => self.finish(sid, &flight, received),
            // The accept queue is full: the peer retransmits.
            Verdict::Open(ref request)
                if request.succeeds.is_none() && self.listeners.is_full(nego.port) => {}
            // The responder is called again when all is ready. If rings can never be had, it refuses.
            Verdict::Open(ref request)
                if self.rings_ready(received.from) == Ok(false) || !self.choice_ready(request) =>
            {
                return false;
            }
            Verdict::Open(request) => self.respond(&request, received),
        }
        true
    }

    /// Whether peers' flows are expected here.
    fn awaits_flows(&self) -> bool {
        (self.hooker.as_ref()).is_some_and(|hooker| hooker.serves_any())
    }

    /// Whether a host's quota allows another session: the last quarter of the places is for networks with few.
    fn has_room_for(&self, peer: IpAddr) -> bool {
        let max = self.config.max_sessions;
        let all = self.sessions.len();
        all < max - max / 4
            || all < max && self.sessions.of_network(Network::of(peer)) < max / 16 + 1
    }

    /// Whether the peer may open a successor of that session. If both do at the same time, the session's
    /// initiator wins.
    fn may_succeed(&self, (sid, token): (u32, u64), port: u16, from: IpAddr) -> Succession {
        let named = |s: &&Session| (s.token, s.peer, s.port) == (token, from, port);
        let Some(session) = self.sessions.get(sid).filter(named) else {
            return Succession::No;
        };
        if !session.is_open() {
            return Succession::No;
        }
        if !session.aware.granted || !session.lifecycle.is_settled() {
            return Succession::Later;
        }
        let successor = session.successor.and_then(|s| self.sessions.get(s));
        let leads = session.lifecycle.is_initiator();
        let ours = |s: &Session| matches!(s.lifecycle.phase(), Phase::Opening(_)) && !leads;
        if successor.is_none_or(ours) {
            Succession::Yes {
                required: session.required,
                sealed: session.agreed().is_some(),
            }
        } else {
            Succession::No
        }
    }

    /// Whether the first choice that can be deployed is deployed; true if none can.
    fn choice_ready(&mut self, request: &Request) -> bool {
        let mut choices = request.choices.iter();
        let first = choices.find_map(|c| self.graft_ready(c.gid).ok());
        first.unwrap_or(true)
    }

    fn respond(&mut self, request: &Request, received: &Received) {
        let mut choices = request.choices.iter();
        let choice = choices.find(|c| self.graft_ready(c.gid) == Ok(true));
        let made = match choice {
            Some(choice) => self.accept(request, choice, received),
            None => Err(Reason::NoGraft),
        };
        let answer = made.unwrap_or_else(|reason| self.responder.refuse(request, reason));
        self.send_answer(&answer, request.key(), received);
    }

    /// Sends an answer to NEGO, with the crypto handshake's flight if there is one.
    fn send_answer(&mut self, answer: &Packet<'_>, key: &NegoKey, received: &Received) {
        let extensions = self.responder.extensions(key).to_vec();
        self.send_nego(
            answer,
            &extensions,
            received.to,
            received.from,
            received.via,
        );
    }

    /// Answers the crypto handshake's first flight, if the peer asks for a session with keys.
    fn answer_hello(&mut self, sid: u32, request: &Request, answer: &Packet<'_>) -> io::Result<()> {
        let (Some(hello), Packet::NegoAck(ack)) = (&request.hello, answer) else {
            return Ok(());
        };
        let ours = nego::bound_answer(ack);
        let answered = (self.identity).respond(hello, &request.bound(), ours, &random());
        let (tls, flight) = answered?;
        if !self.responder.set_crypto(request, &flight) {
            return Err(io::Error::other("the answer is longer than the question"));
        }
        self.use_tags(sid, tls.tags());
        if let Some(session) = self.sessions.get_mut(sid) {
            session.keying = Keying::Answered(Box::new(tls));
        }
        Ok(())
    }

    /// Handles the last flight of a session's crypto handshake: authenticates the peer, and installs the keys.
    fn finish(&mut self, sid: u32, flight: &[u8], received: &Received) {
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        let Keying::Answered(tls) = &mut session.keying else {
            return;
        };
        let agreed = match tls.finished(flight) {
            Ok(agreed) => agreed,
            Err(error) => {
                tracing::debug!(%error, peer = %session.peer, "session: TLS handshake failed");
                return;
            }
        };
        let refused = if !session.expects(agreed.peer) {
            Some("somebody else asks for a session in the peer's place".to_owned())
        } else if session.port == GRAFT_PORT {
            None // the association's thread authorises the peer
        } else {
            let judged = (self.identity).judge(Side::Peer, session.peer, Some(agreed.peer), None);
            match judged {
                Ok(standing) => standing.out_of_reach(session.port),
                Err(error) => Some(error.to_string()),
            }
        };
        if let Some(why) = refused {
            tracing::warn!(peer = %session.peer, why, "session: refused: peer not authorized");
            // The last flight has validated the address.
            self.send_to_peer_via(sid, intf::VTL_F_ABORT, received.via, Packet::Close);
            return self.forget(sid);
        }
        session.keying = Keying::Agreed(Box::new(agreed));
        let answered = session.answered.take();
        if let Some(answer) = self.responder.finished(sid) {
            self.send_back(&answer, received);
        }
        if let Some(answered) = answered {
            self.validated(sid, answered);
        }
    }

    fn accept(
        &mut self,
        request: &Request,
        choice: &Choice,
        received: &Received,
    ) -> Result<Packet<'static>, Reason> {
        let port = request.port();
        let before = request.succeeds.and_then(|(s, _)| self.sessions.get(s));
        let required = before.map_or(Services::NONE, |s| s.required);
        let expected = before.and_then(Session::agreed).map(|agreed| agreed.peer);
        let owner = match before {
            Some(before) => before.aware.owner,
            None => self.listeners.owner(port).unwrap_or(0),
        };
        let mtu = raw::route(received.from, None).map_or(1500, |(_, mtu)| mtu);
        // Our cached path MTU is for our direction, and the peer may have sent early data.
        let max_payload = mtud::max_payload(mtu, received.from, Encapsulation::Native);
        let requested = request.early_with(choice);
        let created = self.create(
            received.from,
            received.to,
            port,
            requested,
            |rings| aware(owner, rings, None),
            |_, _, _| Lifecycle::responder(now_ns()),
        );
        let (sid, token) = created.map_err(|error| no_room(&error, received))?;
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_port(match received.via {
                Via::Udp(port) => port,
                Via::Native | Via::Tcp(_) => 0,
            });
        }
        let next_sid = self.sessions.any_free();
        self.succeed(sid, request.succeeds.map(|(s, _)| s));
        let session = self.sessions.get_mut(sid).expect("just made");
        session.required = required;
        session.asked = request.services();
        session.cuts = request.stateless;
        session.expected = expected;
        if let Via::Tcp(number) = received.via {
            session.tunnel = Some(number);
        }
        let made = Made {
            sid,
            token,
            ring_slots: session.slots,
            max_payload,
            next_sid,
        };
        let now = now_ns();
        let (answer, established) = self.responder.accept(now, request, choice, &made);
        session.answered = Some(Answered {
            at_ns: now,
            early: requested == Some((sid, token)),
        });
        session.lifecycle.handle_established(now);
        // Must precede the session's opening in the kernel.
        if let Err(error) = self.answer_hello(sid, request, &answer) {
            tracing::debug!(%error, peer = %received.from, "session: cannot answer the TLS handshake");
            self.responder.handshake_failed(now);
            self.forget(sid);
            return Err(Reason::Extension);
        }
        self.establish(sid, &established).map_err(|error| {
            self.forget(sid);
            no_room(&error, received)
        })?;
        Ok(answer)
    }

    /// Handles the first packet of a session's initiator, which validates its address: the session may be used
    /// from now on.
    pub(super) fn validated(&mut self, sid: u32, answered: Answered) {
        if self.sessions.get(sid).is_some_and(Session::awaits_keys) {
            return;
        }
        self.responder.validated(sid);
        let session = self.sessions.get_mut(sid);
        if !session.is_some_and(|s| s.lifecycle.handle_first_packet()) {
            return;
        }
        let Some(session) = self.sessions.get(sid) else {
            return;
        };
        let (peer, port, succeeds) = (session.peer, session.port, session.succeeds);
        // Early data give no round-trip sample.
        let elapsed = Duration::from_nanos(now_ns() - answered.at_ns);
        let measured = (!answered.early).then_some(elapsed);
        if let Some(rtt) = measured {
            self.peers.note_rtt(peer, rtt);
        }
        let rtt = measured.or(self.peers.rtt(peer));
        if let Some(entry) = self.plane.sessions().get(sid) {
            self.peers
                .note_encapsulation(peer, entry.encapsulation(), now_ns());
        }
        let slots = self.usable_slots(session);
        let known = self.known_rtt(session);
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        let Some(entry) = self.plane.sessions().get(sid) else {
            return;
        };
        if let Some(known) = known {
            entry.suppose_min_rtt(known);
        }
        if let Some(rtt) = rtt {
            entry.suppose_rtt(rtt);
            if slots > session.slots {
                session.slots = slots;
                entry.widen(slots);
            }
        }
        let entry = entry.snapshot();
        self.begin_path(sid, entry.gid, entry.max_payload);
        if let Some(before) = succeeds {
            self.tell_succeeded(before, sid);
        } else {
            self.listeners.opened(port, sid);
            self.grant_accepted();
        }
    }

    /// Notifies the application that its session has a successor.
    fn tell_succeeded(&mut self, before: u32, sid: u32) {
        let session = self.sessions.get_mut(before);
        let session = session.filter(|s| s.successor == Some(sid));
        match session.map(|session| &session.aware) {
            Some(aware) => {
                aware.controls.set_succeeded();
                self.shards.wake(before);
                // Afterwards, so that the application finds the successor when it finds the end.
                self.cut_predecessor(sid);
            }
            None => self.close(sid, true),
        }
    }

    /// Hands a session's successor to the application, on another connection to the control socket.
    pub(super) fn follow(&mut self, owner: Owner, from: SessionKey) -> Result<Granted, String> {
        let before = self.sessions.get(from.sid);
        let sid = before
            .filter(|s| s.token == from.key)
            .and_then(|s| s.successor)
            .ok_or("the session has no successor")?;
        let successor = self.sessions.get(sid);
        let fresh = successor.filter(|s| !s.aware.granted);
        fresh.ok_or("it was handed over")?;
        self.sessions.hand_over(sid, owner);
        self.grant(sid)
    }

    /// Matches pending sessions with waiting accepts.
    pub(super) fn grant_accepted(&mut self) {
        for Accepted { sid, owner, reply } in self.listeners.take_accepted() {
            self.sessions.hand_over(sid, owner);
            let _ = reply.send(self.grant(sid));
        }
    }
}

/// Logs why a session was not accepted.
fn no_room(error: &str, received: &Received) -> Reason {
    tracing::warn!(error, peer = %received.from, "session: refused: no room");
    Reason::NoRoom
}
