//! The responder's half of opening sessions: from a peer's NEGO to the application that accepts.

use std::time::Duration;

use vtl_proto::{
    nego::{Choice, Made, Policy, Reason, Request, Verdict},
    wire::{Nego, Packet},
};

use super::{
    super::{
        now_ns,
        raw::{self, Received},
        session::{Answered, Session, Use},
    },
    BACKLOG, Engine,
    opening::{Indexes, aware},
    pool,
};

impl Engine {
    /// A peer wants to open a session. False if that has to wait for rings.
    pub(super) fn asked(&mut self, nego: &Nego, received: &Received) -> bool {
        let grafts: Vec<_> = pool::working(&self.pool).collect();
        let policy = Policy {
            grafts: &grafts,
            listening: nego.port == 0 || self.listeners.contains_key(&nego.port),
            room: !self.stopping && self.sessions.len() < self.config.max_sessions,
        };
        let indexes = Indexes::of(&self.plane, &self.sessions, &self.freed);
        let from = received.from;
        let next = || indexes.any();
        let verdict = self.responder.asked(now_ns(), from, nego, &policy, next);
        match verdict {
            Verdict::Answer(answer) => self.send(&answer, received.to, received.from),
            // It comes again, and by then perhaps somebody has accepted.
            Verdict::Open(_) if self.backlog_is_full(nego.port) => {}
            // The responder takes note of it when there are rings. Without any for ever, it refuses.
            Verdict::Open(_) if self.rings_ready(received.from) == Ok(false) => return false,
            Verdict::Open(request) => self.respond(&request, received),
        }
        true
    }

    fn backlog_is_full(&self, port: u16) -> bool {
        let listener = self.listeners.get(&port);
        listener.is_some_and(|l| l.backlog.len() >= BACKLOG)
    }

    fn respond(&mut self, request: &Request, received: &Received) {
        let peer = received.from;
        let choice = request.choices.iter().find(|c| self.launch(c.gid).is_ok());
        let made = match choice {
            Some(choice) => self.accept(request, choice, received).map_err(|error| {
                tracing::warn!(%error, %peer, "a session was not accepted");
                Reason::NoRoom
            }),
            None => Err(Reason::NoGraft),
        };
        let answer = made.unwrap_or_else(|reason| self.responder.refuse(request, reason));
        self.send(&answer, received.to, peer);
    }

    fn accept(
        &mut self,
        request: &Request,
        choice: &Choice,
        received: &Received,
    ) -> Result<Packet<'static>, String> {
        let port = request.port();
        let owner = self.listeners.get(&port).map_or(0, |l| l.owner);
        let mtu = raw::route(received.from).map_or(1500, |(_, mtu)| mtu);
        // What we have learned of the path is for our direction, and the peer may have sent already.
        let max_payload = raw::max_payload(mtu, received.from);
        let wish = request.early_with(choice);
        let (sid, token) = self.create(received.from, received.to, port, wish, |rings| {
            Ok(if port == 0 {
                Use::Streams {
                    graft: None,
                    waiting: Vec::new(),
                    streams: None,
                }
            } else {
                Use::Aware(aware(owner, rings, None)?)
            })
        })?;
        let next_sid = self.indexes().any();
        let session = self.sessions.get_mut(&sid).expect("just made");
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
            early: wish == Some((sid, token)),
        });
        self.establish(sid, &established)
            .inspect_err(|_| self.forget(sid))?;
        Ok(answer)
    }

    /// The first packet of a peer that opened a session. From here on the session may be used.
    pub(super) fn validated(&mut self, sid: u32, answered: Answered) {
        self.responder.validated(sid);
        let Some(session) = self.sessions.get(&sid).filter(|s| s.is_open()) else {
            return;
        };
        let (peer, port) = (session.peer, session.port);
        // What did not wait for the answer says nothing of the path.
        let elapsed = Duration::from_nanos(now_ns() - answered.at_ns);
        let measured = (!answered.early).then_some(elapsed);
        if let Some(rtt) = measured {
            self.peers.note_rtt(peer, rtt);
        }
        let rtt = measured.or(self.peers.rtt(peer));
        let slots = self.usable_slots(session);
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Some(entry) = self.plane.sessions().get(sid) else {
            return;
        };
        if let Some(rtt) = rtt {
            entry.suppose_rtt(rtt);
            if slots > session.slots {
                session.slots = slots;
                entry.widen(slots);
            }
        }
        let entry = entry.snapshot();
        if let Err(error) = session.map_streams(entry.max_payload) {
            tracing::warn!(%error, %peer, "a session cannot be used");
            self.close(sid, true);
            return;
        }
        self.begin_path(sid, entry.gid, entry.max_payload);
        if let Some(listener) = self.listeners.get_mut(&port) {
            listener.backlog.push_back(sid);
            self.grant_accepted();
        }
        self.receive(sid);
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
                self.owned.remove(&(aware.owner, sid));
                self.owned.insert((owner, sid));
                aware.owner = owner;
            }
            let _ = reply.send(self.grant(sid));
        }
    }
}
