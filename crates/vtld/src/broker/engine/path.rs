//! Follows the size of the packets that the path takes; what to do, `broker/path.rs` decides.

use vtl_bpf::sessions;
use vtl_proto::{
    intf,
    nego::Way,
    services::Services,
    wire::{Packet, Size},
};

use super::{
    super::{
        now_ns,
        path::{PathSize, Progress, Step},
        raw::{self, Received},
    },
    Engine,
};

/// Bytes by which the header of DATA is longer than that of SIZE.
const LONGER: u16 = (size_of::<intf::vtl_data_hdr>() - size_of::<intf::vtl_hdr>()) as u16;
/// Where no acknowledgement has told the round-trip time.
const RTT_NS: u64 = 100_000_000;

/// How far the session is.
fn mark(path: &PathSize, entry: &sessions::Session<'_>) -> u64 {
    if path.acknowledged() {
        entry.acknowledged()
    } else {
        entry.sent()
    }
}

impl Engine {
    /// A session begins, with a graft and what both hosts' links take: what is known of the path
    /// holds from the first packet on.
    pub(super) fn begin_path(&mut self, sid: u32, gid: u16, max_payload: u16) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(&sid), table.get(sid)) else {
            return;
        };
        let graft = self.plane.grafts().find(|g| g.gid == gid);
        let services = graft.map_or(Services::NONE, |g| g.services);
        let tells = Services::RELIABLE | Services::PARTIAL_RELIABILITY;
        let acknowledged = !services.intersection(tells).is_empty();
        let now = now_ns();
        session.way = entry.way();
        let most = self.peers.payload(session.peer, now, max_payload) - session.way.overhead();
        session.path = session
            .long_messages
            .then(|| PathSize::new(session.peer, session.way, most, acknowledged, now));
        if most < max_payload {
            session.set_path(most);
            if graft.is_some_and(|g| g.halves) {
                entry.set_path(most);
            }
        }
    }

    /// Takes note of how packets of an open session go now. False if that leaves less room, and what
    /// was written already cannot go in halves.
    pub(super) fn turn(&mut self, sid: u32) -> bool {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get(&sid), table.get(sid)) else {
            return false;
        };
        let (before, published) = (session.way, session.published() > 0);
        if before == entry.way() {
            return true;
        }
        let entry = entry.snapshot();
        let halves = self.plane.grafts().any(|g| g.gid == entry.gid && g.halves);
        self.begin_path(sid, entry.gid, entry.max_payload);
        halves || !published || before == Way::Udp
    }

    /// Looks whether an open session gets on, and if not, whether its packets are too large.
    pub(super) fn watch_path(&mut self, sid: u32, now: u64) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(&sid), table.get(sid)) else {
            return;
        };
        let peer = session.peer;
        let Some(path) = session.path.as_mut().filter(|_| entry.ifindex() != 0) else {
            return;
        };
        let at = Progress {
            mark: mark(path, &entry),
            out: entry.unacknowledged() > 0,
            rtt_ns: entry
                .measured_rtt()
                .map_or(RTT_NS, |rtt| rtt.as_nanos() as u64),
        };
        let told = || raw::route(peer).map_or(0, |(_, mtu)| mtu);
        match path.look(now, &at, told) {
            Step::Nothing => {}
            Step::Ask(payloads) => {
                for payload in payloads {
                    self.say_size(sid, intf::VTL_F_ACK_NOW, payload + LONGER, 0);
                }
            }
            Step::Narrow(most) => self.narrow(sid, now, most),
        }
    }

    fn say_size(&self, sid: u32, flags: u32, zeros: u16, answers: u16) {
        self.send_to_peer(sid, flags, |header| {
            Packet::Size(Size {
                header,
                zeros,
                answers,
            })
        });
    }

    /// A question about a size, or an answer.
    pub(super) fn sized(&mut self, size: &Size, received: &Received) {
        let sid = size.header.sid;
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(&sid), table.get(sid)) else {
            return;
        };
        let known = session.token == size.header.token && session.peer == received.from;
        if !known || !session.is_open() {
            return;
        }
        let now = now_ns();
        session.heard_ns = now;
        if u32::from(size.header.flags) & intf::VTL_F_ACK_NOW != 0 {
            self.say_size(sid, 0, 0, size.zeros);
        } else if let Some(path) = &mut session.path {
            let mark = mark(path, &entry);
            path.answered(now, size.answers.saturating_sub(LONGER), mark);
        }
    }

    /// The path takes less than it did. What was written before and is larger goes in halves, where
    /// the graft knows them. Others cannot send it again: what they may lose
    /// gets lost, and a session that has to wait for such a packet ends.
    fn narrow(&mut self, sid: u32, now: u64, most: u16) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get(&sid), table.get(sid)) else {
            return;
        };
        let peer = session.peer;
        tracing::info!(%peer, payload = most, "the path takes smaller packets than before");
        session.set_path(most);
        self.peers
            .note_path(peer, most + session.way.overhead(), now);
        let gid = entry.snapshot().gid;
        let graft = self.plane.grafts().find(|g| g.gid == gid);
        let acknowledged = session.path.as_ref().is_some_and(PathSize::acknowledged);
        if graft.is_some_and(|g| g.halves) {
            entry.set_path(most);
            entry.probe(); // what is out goes again now, and not when a long timeout ends
            self.schedule.now(sid);
        } else if acknowledged {
            tracing::info!(%peer, "and a packet that is larger cannot be sent again");
            self.send_close(sid, true);
            self.end(sid, intf::VTL_CLOSED_TIMEOUT);
        }
    }
}
