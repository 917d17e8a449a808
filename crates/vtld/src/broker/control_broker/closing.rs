//! Executes the actions of `vtl_core::session`: keepalive and closing.

use std::time::Instant;

use vtl_control::What;
use vtl_core::session::{
    ABORT_COPIES, Action, End, EndReason, Farewell, PeerClose, Reaction, Successor,
};
use vtl_proto::{
    carrier::{GRAFT_PORT, Kind},
    intf,
    wire::{Header, Packet},
};

use super::{
    super::{
        Owner,
        meter::Mark,
        now_ns,
        raw::{Received, Via},
    },
    ControlBroker,
};
use crate::{
    events::emit,
    netmon::{self, Evidence},
};

/// Reason of a session's end, as its rings' control blocks encode it.
fn code(reason: EndReason) -> u32 {
    match reason {
        EndReason::ClosedByPeer => intf::VTL_CLOSED_BY_PEER,
        EndReason::Failed => intf::VTL_CLOSED_TIMEOUT,
        EndReason::Local => intf::VTL_CLOSED_LOCAL,
        EndReason::Cut => intf::VTL_CLOSED_CUT,
    }
}

impl ControlBroker {
    /// Polls a session's lifecycle.
    pub(super) fn tick_session(&mut self, sid: u32, now: u64) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(sid), table.get(sid)) else {
            return;
        };
        let seen = session.observe(&entry);
        let action = session.lifecycle.poll(now, &seen);
        if let Action::End(End { tell: Some(_), .. }) = action {
            tracing::info!(peer = %session.peer, sid, "session: timeout, nothing heard from the peer");
        }
        self.act(sid, now, action);
    }

    fn act(&mut self, sid: u32, now: u64, action: Action) {
        match action {
            Action::Nothing => {}
            Action::Confirm => self.confirm_timer(sid, now),
            Action::Reroute => {
                self.restart_path(sid);
                self.send_probe(sid);
            }
            Action::Watch { heard, probe } => self.keep_alive(sid, now, heard, probe),
            Action::SendClose => {
                self.shards.rest(sid);
                self.send_close(sid, false);
            }
            Action::End(end) => self.end(sid, end),
            Action::Forget => self.forget(sid),
        }
    }

    /// Updates the measurements of an open session's path, and sends keepalive probes if `probe`. `heard`: the
    /// peer has been heard since the last tick.
    fn keep_alive(&mut self, sid: u32, now: u64, heard: bool, probe: bool) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(sid), table.get(sid)) else {
            return;
        };
        session.meter.note(Mark::new(now, &entry.meter()));
        // What is known of a peer is of the path that other connections take.
        let is_beside = session.is_beside;
        let counters = netmon::of_session(&entry);
        if let (Some(bounds), Some(counters)) = (&mut session.bounds, &counters) {
            let gid = entry.snapshot().gid;
            let graft = self.plane.grafts().find(|graft| graft.gid == gid);
            let graft = graft.map_or("", |graft| graft.name.as_str());
            let told = bounds.read(now, counters, (session.peer, sid), graft);
            told.into_iter().for_each(emit);
        }
        if !is_beside && let Some(counters) = counters {
            let evidence = Evidence::Carrier(Kind::Graft);
            self.monitor.note(
                session.peer,
                evidence,
                &mut session.watch,
                Instant::now(),
                counters,
            );
        }
        if heard
            && !is_beside
            && let Some(rtt) = entry.measured_rtt()
        {
            self.peers.note_shorter_rtt(session.peer, rtt);
        }
        if probe {
            entry.probe();
            self.shards.due(sid);
        }
        if session.path.detour().is_some() {
            self.poll_detour(sid, now);
        } else {
            self.poll_path(sid, now);
        }
    }

    pub(super) fn close_owned(&mut self, owner: Owner, aborted: bool) {
        for sid in self.sessions.of(owner) {
            self.close(sid, aborted);
        }
    }

    /// Closes a session on behalf of its user.
    pub(super) fn close(&mut self, sid: u32, aborted: bool) {
        let now = now_ns();
        if let Some(session) = self.sessions.get_mut(sid) {
            let action = session.lifecycle.close(now, aborted);
            self.act(sid, now, action);
        }
    }

    /// Aborts a session on this host's behalf, and reports it to its user.
    pub(super) fn abort(&mut self, sid: u32) {
        let session = self.sessions.get_mut(sid);
        if let Some(end) = session.and_then(|s| s.lifecycle.abort()) {
            self.end(sid, end);
        }
    }

    /// Ends a session that cannot go on.
    pub(super) fn fail(&mut self, sid: u32) {
        let session = self.sessions.get_mut(sid);
        if let Some(end) = session.and_then(|s| s.lifecycle.fail()) {
            self.end(sid, end);
        }
    }

    pub(super) fn send_close(&mut self, sid: u32, aborted: bool) {
        let flags = if aborted { intf::VTL_F_ABORT } else { 0 };
        self.send_to_peer(sid, flags, Packet::Close);
    }

    /// Sends a control packet of a session; nothing unless the peer's address is validated.
    pub(super) fn send_to_peer(
        &mut self,
        sid: u32,
        flags: u32,
        packet: impl FnOnce(Header) -> Packet<'static>,
    ) {
        if let Some(via) = self.via(sid) {
            self.send_to_peer_via(sid, flags, via, packet);
        }
    }

    /// Sends a control packet of a session by `via`, whatever its current encapsulation.
    pub(super) fn send_to_peer_via(
        &mut self,
        sid: u32,
        flags: u32,
        via: Via,
        packet: impl FnOnce(Header) -> Packet<'static>,
    ) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get(sid), table.get(sid)) else {
            return;
        };
        let (peer_sid, token) = entry.peer();
        let header = Header {
            flags: flags as u8,
            gid: 0,
            sid: peer_sid,
            token,
        };
        let (local, peer) = (session.local, session.peer);
        let key = session.tags.as_ref().map(|tags| tags.send.clone());
        self.send_tagged(&packet(header), key.as_ref(), local, peer, via);
    }

    /// Handles a CLOSE from the peer.
    pub(super) fn closed(&mut self, header: Header, received: &Received) {
        let sid = header.sid;
        let Some(session) = self.sessions.get(sid) else {
            return;
        };
        if session.token != header.token || session.peer != received.from {
            return;
        }
        let aborted = u32::from(header.flags) & intf::VTL_F_ABORT != 0;
        match (session.awaits_keys(), aborted) {
            (true, true) => return self.forget(sid),
            // The peer retransmits it, and the application may have the session by then.
            (true, false) => return,
            (false, _) => {}
        }
        tracing::debug!(peer = %session.peer, sid, aborted, "session: closed by the peer");
        // Validate the session, or its successor, first where due, which may remove it.
        while let Some(session) = self.sessions.get(sid) {
            let (succeeds, successor) = (session.succeeds.is_some(), session.successor);
            let close = PeerClose {
                aborted,
                succeeds,
                successor: successor.map_or(Successor::Known, |sid| self.as_successor(sid)),
            };
            let Some(session) = self.sessions.get_mut(sid) else {
                return;
            };
            let validated = match session.lifecycle.handle_close(&close) {
                Reaction::Ignore => return,
                Reaction::Forget => return self.forget(sid),
                Reaction::End(end) => return self.end(sid, end),
                Reaction::Validate => sid,
                Reaction::ValidateSuccessor => successor.unwrap_or(sid),
            };
            if self
                .sessions
                .get(validated)
                .is_some_and(|session| session.awaits_keys())
            {
                self.forget(validated);
                continue;
            }
            let session = self.sessions.get_mut(validated);
            let Some(answered) = session.and_then(|s| s.answered.take()) else {
                return;
            };
            self.validated(validated, answered);
        }
    }

    /// State of a session as the successor of another one.
    fn as_successor(&self, sid: u32) -> Successor {
        let located = self
            .plane
            .sessions()
            .get(sid)
            .is_some_and(|e| e.ifindex() != 0);
        let session = self.sessions.get(sid);
        session.map_or(Successor::Known, |s| {
            s.lifecycle.as_successor(located && !s.awaits_keys())
        })
    }

    /// Ends a session: frees its entry, and reports the reason to its user. An aware application may still read
    /// data that have arrived; the rings are freed when it leaves.
    pub(super) fn end(&mut self, sid: u32, end: End) {
        match end.farewell {
            Farewell::Nothing => {}
            Farewell::Close => self.send_close(sid, false),
            Farewell::Abort => (0..ABORT_COPIES).for_each(|_| self.send_close(sid, true)),
        }
        let Some(session) = self.sessions.get(sid) else {
            return;
        };
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_state(intf::VTL_FREE);
        }
        self.responder.ended(sid);
        tracing::debug!(peer = %session.peer, sid, ?end, "session: ended");
        self.shards.rest(sid);
        let Some(reason) = end.tell else {
            return self.forget(sid);
        };
        session.aware.controls.set_closed(code(reason));
        self.shards.wake(sid);
    }

    /// Removes a session and all its resources.
    pub(super) fn forget(&mut self, sid: u32) {
        let Some(session) = self.sessions.remove(sid) else {
            return;
        };
        tracing::debug!(peer = %session.peer, sid, "session: removed");
        if session.aware.granted && session.port != GRAFT_PORT {
            let (peer, port) = (session.peer, session.port);
            emit(What::SessionDown { sid, peer, port });
        }
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_state(intf::VTL_FREE);
            if let Some(rtt) = entry.measured_rtt().filter(|_| !session.is_beside) {
                self.peers.note_rtt(session.peer, rtt);
            }
        }
        if let Some(caller) = &session.caller {
            caller.forget(&self.callers);
        }
        self.responder.ended(sid);
        self.listeners.forget(sid);
        self.by_tcp.forget(sid);
        self.shards.forget(sid);
        self.rings.put_exposed(session.rings);
    }
}
