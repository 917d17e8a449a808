//! Executes the actions of `vtl_core::mtud`: path MTU discovery and the detour over TCP.

use vtl_bpf::sessions;
use vtl_core::{
    mtud::{DetourStep, PathMtu, Progress, Step},
    session::ABORT_COPIES,
};
use vtl_proto::{
    intf,
    nego::Encapsulation,
    services::Services,
    wire::{Packet, Size},
};

use super::{
    super::{
        now_ns,
        raw::{self, Received, Via},
        session::INITIAL_RTT,
    },
    ControlBroker,
};

/// Difference in length between the headers of DATA and SIZE, bytes.
const LONGER: u16 = (size_of::<intf::vtl_data_hdr>() - size_of::<intf::vtl_hdr>()) as u16;

/// Progress of a session, as `vtl_core::mtud::Progress` defines it.
fn mark(acknowledged: bool, entry: &sessions::Session<'_>) -> u64 {
    if acknowledged {
        entry.acknowledged()
    } else {
        entry.sent()
    }
}

impl ControlBroker {
    /// Starts path MTU discovery of a session whose graft is `gid`. `max_payload`: limit of both hosts' links.
    /// A smaller path MTU cached from earlier sessions applies from the first packet on.
    pub(super) fn begin_path(&mut self, sid: u32, gid: u16, max_payload: u16) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(sid), table.get(sid)) else {
            return;
        };
        let graft = self.plane.grafts().find(|g| g.gid == gid);
        let services = graft.map_or(Services::NONE, |g| g.services);
        let tells = Services::RELIABLE | Services::PARTIAL_RELIABILITY;
        let acknowledged = !services.intersection(tells).is_empty();
        let now = now_ns();
        let (peer, encapsulation) = (session.peer, entry.encapsulation());
        let max = self.peers.payload(peer, now, max_payload) - encapsulation.overhead();
        let mtu = session
            .long_messages
            .then(|| PathMtu::new(peer, encapsulation, max, acknowledged, now));
        let is_initiator = session.lifecycle.is_initiator();
        session.path.begin(now, encapsulation, is_initiator, mtu);
        if max < max_payload {
            session.set_path(max);
            if graft.is_some_and(|g| g.halves) {
                entry.set_path(max);
            }
        }
    }

    /// Restarts the path if the encapsulation of an open session has changed. False if it has less room, and
    /// packets already written cannot be fragmented.
    pub(super) fn restart_path(&mut self, sid: u32) -> bool {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get(sid), table.get(sid)) else {
            return false;
        };
        let (before, published) = (session.path.encapsulation(), session.published() > 0);
        if before == entry.encapsulation() {
            return true;
        }
        let no_longer = entry.encapsulation().overhead() <= before.overhead();
        let entry = entry.snapshot();
        self.begin_path(sid, entry.gid, entry.max_payload);
        no_longer || !published || self.has_halves(entry.gid)
    }

    /// Whether the graft can fragment packets already written.
    fn has_halves(&self, gid: u16) -> bool {
        self.plane.grafts().any(|g| g.gid == gid && g.halves)
    }

    /// Polls path MTU discovery of an open session.
    pub(super) fn poll_path(&mut self, sid: u32, now: u64) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(sid), table.get(sid)) else {
            return;
        };
        let (peer, local) = (session.peer, session.local);
        let (by_tcp, leads) = (session.may_go_by_tcp(), session.lifecycle.is_initiator());
        let probing = session.lifecycle.is_probing();
        let elsewhere = [0, intf::VTL_TUNNEL].contains(&entry.ifindex());
        let Some(path) = session.path.mtu().filter(|_| !elsewhere) else {
            return;
        };
        let at = Progress {
            mark: mark(path.is_acknowledged(), &entry),
            out: entry.unacknowledged() > 0 || probing,
            rtt_ns: entry.measured_rtt().unwrap_or(INITIAL_RTT).as_nanos() as u64,
        };
        let told = || raw::route(peer, Some(local)).map_or(0, |(_, mtu)| mtu);
        match path.poll(now, &at, told) {
            Step::Nothing => {}
            Step::UseTcp if leads => self.use_tcp(sid, now),
            Step::UseTcp => {}
            Step::Ask(payloads) => {
                if path.asks_by_tcp()
                    && by_tcp
                    && let Some(number) = self.connection_of(sid)
                {
                    self.ask(sid, 0, Via::Tcp(number));
                }
                for payload in payloads {
                    self.send_size(sid, intf::VTL_F_ACK_NOW, payload + LONGER, 0);
                }
            }
            Step::Reduce(max) => self.reduce(sid, now, max),
        }
    }

    /// Sends a SIZE with `ACK_NOW` in another encapsulation than the session's packets.
    fn ask(&mut self, sid: u32, payload: u16, via: Via) {
        self.send_to_peer_via(sid, intf::VTL_F_ACK_NOW, via, |header| {
            Packet::Size(Size {
                header,
                zeros: payload + LONGER,
                answers: 0,
            })
        });
    }

    fn send_size(&mut self, sid: u32, flags: u32, zeros: u16, answers: u16) {
        self.send_to_peer(sid, flags, |header| {
            Packet::Size(Size {
                header,
                zeros,
                answers,
            })
        });
    }

    /// Handles a SIZE from the peer, a question or an answer.
    pub(super) fn sized(&mut self, size: &Size, received: &Received) {
        let sid = size.header.sid;
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(sid), table.get(sid)) else {
            return;
        };
        let known = session.token == size.header.token && session.peer == received.from;
        if !known || !session.is_open() {
            return;
        }
        let now = now_ns();
        session.lifecycle.handle_size(now);
        let encapsulation = received.via.encapsulation();
        if u32::from(size.header.flags) & intf::VTL_F_ACK_NOW != 0 {
            session.path.handle_question(encapsulation);
            let answers = size.zeros;
            self.send_to_peer_via(sid, 0, received.via, |header| {
                Packet::Size(Size {
                    header,
                    zeros: 0,
                    answers,
                })
            });
        } else {
            let payload = size.answers.saturating_sub(LONGER);
            let mark = mark(session.path.is_acknowledged(), &entry);
            session
                .path
                .handle_answer(now, encapsulation, payload, mark);
        }
    }

    /// Starts a session's detour over TCP. Only its initiator does.
    fn use_tcp(&mut self, sid: u32, now: u64) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(sid), table.get(sid)) else {
            return;
        };
        tracing::info!(peer = %session.peer, sid, "session: path drops VTL's packets: they go over TCP");
        session.path.start_detour(now);
        entry.set_port(0);
        entry.set_tunnel(true);
        self.restart_path(sid);
        self.send_probe(sid);
    }

    /// Sends a PROBE after a change of encapsulation: packets in flight are acknowledged or retransmitted at
    /// once, and the peer learns the new one.
    pub(super) fn send_probe(&mut self, sid: u32) {
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.probe();
            self.shards.due(sid);
        }
    }

    /// Polls a session's detour over TCP.
    pub(super) fn poll_detour(&mut self, sid: u32, now: u64) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get(sid), table.get(sid)) else {
            return;
        };
        let udp = self.has_halves(entry.gid()) || session.published() == 0;
        let udp_port = Via::Udp(session.port_there);
        let (ifindex, rtt) = (entry.ifindex(), entry.measured_rtt());
        let rtt_ns = rtt.unwrap_or(INITIAL_RTT).as_nanos() as u64;
        let max = self.peers.payload(session.peer, now, entry.max_payload());
        let Some(session) = self.sessions.get_mut(sid) else {
            return;
        };
        if ![0, intf::VTL_TUNNEL].contains(&ifindex) {
            tracing::info!(peer = %session.peer, sid, encapsulation = %entry.encapsulation(), "session: packets leave TCP again");
            session.path.end_detour();
            self.restart_path(sid);
            return self.send_probe(sid);
        }
        let Some(detour) = session.path.detour() else {
            return;
        };
        let asked = |encapsulation: Encapsulation| {
            (
                max - encapsulation.overhead(),
                via_of(encapsulation, udp_port),
            )
        };
        match detour.poll(now, rtt_ns, udp) {
            DetourStep::Nothing => {}
            DetourStep::Ask => {
                for encapsulation in [Encapsulation::Native, Encapsulation::Udp] {
                    let (payload, via) = asked(encapsulation);
                    self.ask(sid, payload, via);
                }
            }
            DetourStep::Leave(encapsulation) => {
                let (payload, via) = asked(encapsulation);
                entry.set_port(match via {
                    Via::Udp(port) => port,
                    _ => 0,
                });
                entry.set_tunnel(false);
                for _ in 0..2 {
                    self.ask(sid, payload, via);
                }
            }
            DetourStep::Stay => {
                entry.set_port(0);
                entry.set_tunnel(true);
                self.send_probe(sid);
            }
        }
    }

    /// Reduces the payload of a session's packets to `max` bytes. Larger packets already written are
    /// fragmented, if the graft can. Other grafts cannot retransmit them: where losses are allowed they are
    /// lost, otherwise the session fails.
    fn reduce(&mut self, sid: u32, now: u64, max: u16) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get(sid), table.get(sid)) else {
            return;
        };
        let peer = session.peer;
        tracing::info!(%peer, payload = max, "session: path MTU reduced");
        session.set_path(max);
        self.peers
            .note_path(peer, max + session.path.encapsulation().overhead(), now);
        let gid = entry.snapshot().gid;
        let graft = self.plane.grafts().find(|g| g.gid == gid);
        let acknowledged = session.path.is_acknowledged();
        if graft.is_some_and(|g| g.halves) {
            entry.set_path(max);
            entry.probe(); // retransmits what is in flight at once, without waiting for the timeout
            self.shards.due(sid);
        } else if acknowledged {
            tracing::info!(%peer, "session: aborted: packets in flight exceed the new path MTU, and the graft cannot fragment");
            (0..ABORT_COPIES).for_each(|_| self.send_close(sid, true));
            self.fail(sid);
        }
    }
}

fn via_of(encapsulation: Encapsulation, udp: Via) -> Via {
    match encapsulation {
        Encapsulation::Udp => udp,
        _ => Via::Native,
    }
}
