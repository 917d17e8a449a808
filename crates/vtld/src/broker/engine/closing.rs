//! How sessions end.

use vtl_proto::{
    intf,
    wire::{Header, Packet},
};

use super::{
    super::{
        Owner, now_ns,
        raw::{Received, Via},
        session::Phase,
    },
    CLOSE_NS, Engine,
};

/// CLOSE packets that tell of an abort.
const ABORT_COPIES: usize = 3;

impl Engine {
    pub(super) fn close_owned(&mut self, owner: Owner, aborted: bool) {
        for sid in self.sessions_of_owner(owner) {
            self.close(sid, aborted);
        }
    }

    /// The sessions of an aware application, in ascending order.
    pub(super) fn sessions_of_owner(&self, owner: Owner) -> Vec<u32> {
        let owned = self.owned.range((owner, 0)..=(owner, u32::MAX));
        owned.map(|(_, sid)| *sid).collect()
    }

    /// Ends a session from our side.
    pub(super) fn close(&mut self, sid: u32, aborted: bool) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        match session.phase {
            Phase::Open => {}
            Phase::Closing { .. } => return,
            Phase::Opening(_) | Phase::Ended => {
                self.forget(sid);
                return;
            }
        }
        session.phase = Phase::Closing {
            tries: 1,
            next_ns: now_ns() + CLOSE_NS,
        };
        self.shards.rest(sid);
        if aborted {
            self.send_aborts(sid);
            self.end(sid, intf::VTL_CLOSED_LOCAL);
        } else {
            self.send_close(sid, aborted);
        }
    }

    /// Ends an open session whose owner has not asked for it, and learns of it.
    pub(super) fn abort(&mut self, sid: u32) {
        self.send_aborts(sid);
        self.end(sid, intf::VTL_CLOSED_LOCAL);
    }

    /// Nobody will be here to repeat it, and the peer would wait for its own patience to end.
    fn send_aborts(&mut self, sid: u32) {
        for _ in 0..ABORT_COPIES {
            self.send_close(sid, true);
        }
    }

    pub(super) fn send_close(&mut self, sid: u32, aborted: bool) {
        let flags = if aborted { intf::VTL_F_ABORT } else { 0 };
        self.send_to_peer(sid, flags, Packet::Close);
    }

    /// Sends what a session's daemons say to each other, but nothing unasked to an address that has
    /// not been proven.
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

    /// The same, by a way that the session's packets may not go now.
    pub(super) fn send_to_peer_via(
        &mut self,
        sid: u32,
        flags: u32,
        via: Via,
        packet: impl FnOnce(Header) -> Packet<'static>,
    ) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get(&sid), table.get(sid)) else {
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
        self.send(&packet(header), local, peer, via);
    }

    /// The peer's CLOSE.
    pub(super) fn closed(&mut self, header: Header, received: &Received) {
        let Some(session) = self.sessions.get(&header.sid) else {
            return;
        };
        if session.token != header.token || session.peer != received.from {
            return;
        }
        let aborted = u32::from(header.flags) & intf::VTL_F_ABORT != 0;
        tracing::debug!(peer = %session.peer, sid = header.sid, aborted, "the peer closes the session");
        match session.phase {
            Phase::Closing { .. } => self.end(header.sid, intf::VTL_CLOSED_LOCAL),
            Phase::Open => {
                if aborted && session.succeeds.is_some() && session.answered.is_some() {
                    // Its opener could not use it, and nobody here knows of it.
                    return self.forget(header.sid);
                }
                if !aborted && !self.knows_successor(header.sid) {
                    return; // it comes again
                }
                // A CLOSE proves the address like any packet, and may be the first that comes: who
                // listens gets the session, and its end.
                let session = self.sessions.get_mut(&header.sid);
                if let Some(answered) = session.and_then(|s| s.answered.take()) {
                    self.validated(header.sid, answered);
                }
                self.send_close(header.sid, false);
                let why = if aborted {
                    intf::VTL_CLOSED_TIMEOUT
                } else {
                    intf::VTL_CLOSED_BY_PEER
                };
                self.end(header.sid, why);
            }
            Phase::Opening(_) | Phase::Ended => {}
        }
    }

    /// The application must know of the session that succeeds one before this one ends, which would
    /// look like the end. False if the peer has not shown itself in it yet.
    fn knows_successor(&mut self, sid: u32) -> bool {
        let successor = self.sessions.get(&sid).and_then(|s| s.successor);
        let Some(successor) = successor else {
            return true;
        };
        let entry = self.plane.sessions().get(successor);
        let shown = entry.is_some_and(|e| e.ifindex() != 0);
        let session = self.sessions.get_mut(&successor);
        match session.and_then(|s| s.answered.take_if(|_| shown)) {
            Some(answered) => self.validated(successor, answered),
            None => {
                let session = self.sessions.get(&successor);
                return session.is_none_or(|s| s.answered.is_none());
            }
        }
        true
    }

    /// The session is over: the programs let go of it, its users learn why. An aware application
    /// may still read what has arrived; its rings are freed when it leaves.
    pub(super) fn end(&mut self, sid: u32, why: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_state(intf::VTL_FREE);
        }
        self.responder.ended(sid);
        session.confirming = None;
        tracing::debug!(peer = %session.peer, sid, why, "session ended");
        let was_closing = matches!(session.phase, Phase::Closing { .. });
        session.phase = Phase::Ended;
        self.shards.rest(sid);
        if was_closing {
            return self.forget(sid);
        }
        session.aware.controls.set_closed(why);
        self.shards.wake(sid);
    }

    /// Removes a session and everything that belongs to it.
    pub(super) fn forget(&mut self, sid: u32) {
        let Some(session) = self.sessions.remove(&sid) else {
            return;
        };
        tracing::debug!(peer = %session.peer, sid, "session forgotten");
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_state(intf::VTL_FREE);
            if let Some(rtt) = entry.measured_rtt() {
                self.peers.note_rtt(session.peer, rtt);
            }
        }
        if let Some(caller) = &session.caller {
            caller.forget(&self.callers);
        }
        self.responder.ended(sid);
        self.freed.insert(sid, u64::MAX); // until its shard has forgotten it, too
        if let Some(before) = session.succeeds.and_then(|s| self.sessions.get_mut(&s))
            && before.successor == Some(sid)
        {
            before.successor = None;
        }
        for listener in self.listeners.values_mut() {
            listener.backlog.retain(|s| *s != sid);
        }
        self.owned.remove(&(session.aware.owner, sid));
        self.by_tcp.cancel(sid);
        self.shards.forget(sid);
        self.stock.put_exposed(session.rings);
    }
}
