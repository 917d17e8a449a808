//! Packets of sessions that go by TCP: between the kernel's programs and the connections with other
//! daemons (`broker/tunnel.rs`).

use std::{io, sync::Arc};

use nix::sys::epoll::{EpollEvent, EpollFlags};
use vtl_bpf::{
    pump::{Served, Turn},
    tunnel::Taken,
};
use vtl_proto::{carrier::GRAFT_PORT, intf};

use super::{
    super::{
        MS, QUANTUM, now_ns,
        raw::{Received, Via},
        session::Session,
        shard::Call,
        tunnel,
    },
    Engine, Source,
};

/// Egress looks again after so long at a connection that many packets wait for, and at one that is not
/// made yet.
const FULL_NS: u64 = MS;
const NOT_MADE_NS: u64 = 20 * MS;
/// Frames of a call.
const BATCH: u32 = 2 * QUANTUM;

impl Session {
    /// Flows have TCP connections of their own.
    pub(super) fn may_go_by_tcp(&self) -> bool {
        self.port != GRAFT_PORT
    }
}

impl Engine {
    /// Takes the connections that peers have made.
    pub(super) fn accept_tunnels(&mut self, v6: bool) {
        while let Some(number) = self.tunnels.accept(v6, now_ns()) {
            self.watch_tunnel(number, false);
        }
    }

    fn watch_tunnel(&mut self, number: u32, waits: bool) {
        let source = Source::Tunnel { number };
        let event = EpollEvent::new(interest(waits), source.pack());
        let added = (self.tunnels.descriptor(number)).map(|fd| self.epoll.add(fd, event));
        if !matches!(added, Some(Ok(()))) {
            self.tunnels.close(number);
        }
    }

    /// The connection that a session's packets go by, which is made if there is none.
    pub(super) fn tunnel_of(&mut self, sid: u32) -> Option<u32> {
        let session = self.sessions.get_mut(&sid).filter(|s| s.may_go_by_tcp())?;
        if let Some(number) = session.tunnel
            && self.tunnels.descriptor(number).is_some()
        {
            return Some(number);
        }
        let connected = self
            .tunnels
            .connect(session.local, session.peer, now_ns())
            .inspect_err(|error| tracing::debug!(%error, peer = %session.peer, "no connection"));
        session.tunnel = connected.ok();
        let number = session.tunnel?;
        self.watch_tunnel(number, true);
        Some(number)
    }

    /// How long egress of a session has to wait, if it may not go on now.
    pub(super) fn tunnel_wait_ns(&mut self, sid: u32) -> Option<u64> {
        match self.tunnel_of(sid) {
            Some(number) if self.tunnels.has_room(number) => None,
            Some(number) if self.tunnels.is_made(number) => Some(FULL_NS),
            _ => Some(NOT_MADE_NS),
        }
    }

    pub(super) fn send_by_tcp(&mut self, number: u32, packet: &[u8]) {
        let sent = self.tunnels.send(number, packet);
        self.flush_tunnel(number, sent);
    }

    /// Something has happened to a connection.
    pub(super) fn tunnel_event(&mut self, number: u32) {
        let mut packets = std::mem::take(&mut self.tunnelled);
        packets.clear();
        let result = self.tunnels.flush(number);
        let result = result.and_then(|()| self.tunnels.receive(number, &mut packets));
        let mut rest = &packets[..];
        while let Some((packet, others)) = tunnel::first(rest) {
            self.take_tunnelled(number, packet);
            rest = others;
        }
        self.tunnelled = packets;
        self.flush_tunnel(number, result);
    }

    /// Writes what waits; closes the connection if it has broken.
    fn flush_tunnel(&mut self, number: u32, result: io::Result<()>) {
        match result.and_then(|()| self.tunnels.flush(number)) {
            Ok(()) => {
                if let Some(waits) = self.tunnels.watch(number)
                    && let Some(fd) = self.tunnels.descriptor(number)
                {
                    let source = Source::Tunnel { number };
                    let mut event = EpollEvent::new(interest(waits), source.pack());
                    let _ = self.epoll.modify(fd, &mut event);
                }
            }
            Err(error) => {
                tracing::debug!(%error, number, "a connection for packets has ended");
                self.tunnels.close(number);
            }
        }
    }

    /// A packet from a peer: the programs look at it as at any other.
    fn take_tunnelled(&mut self, number: u32, packet: &[u8]) {
        let Some([local, peer]) = self.tunnels.addresses(number) else {
            return;
        };
        let Some((sid, token)) = named(packet) else {
            return;
        };
        if let Some(session) = self.sessions.get_mut(&sid)
            && (session.token, session.peer) == (token, peer)
        {
            if !session.may_go_by_tcp() {
                return;
            }
            session.tunnel = Some(number);
            self.tunnels.note_use(number, now_ns());
        }
        match self.tunnel.receive(peer, local, packet) {
            Ok(Taken::Done) => {}
            Ok(Taken::Answer(answer)) => {
                // If there is no room for it, the next one says the same.
                let _ = self.tunnels.send(number, answer);
            }
            Ok(Taken::Control) => self.control_packet(Received {
                from: peer,
                via: Via::Tcp(number),
                to: local,
                bytes: packet.to_vec(),
            }),
            Err(error) => tracing::debug!(%error, "a packet is not taken"),
        }
    }

    /// Has the programs make packets for the sessions that are due, and sends them.
    pub(super) fn pump_by_tcp(&mut self) {
        let now = now_ns();
        self.by_tcp.expire(now);
        let table = Arc::clone(self.plane.sessions());
        let mut call = Call::new(now, BATCH);
        while !call.is_full()
            && let Some(sid) = self.by_tcp.pop()
        {
            let (Some(session), Some(entry)) = (self.sessions.get(&sid), table.get(sid)) else {
                continue;
            };
            let (ifindex, published) = (entry.ifindex(), session.published());
            if !session.is_open() || ifindex == 0 {
                continue;
            }
            if ifindex != intf::VTL_TUNNEL {
                self.shards.due(sid);
            } else if let Some(wait) = self.tunnel_wait_ns(sid) {
                self.by_tcp.at(sid, now + wait);
            } else {
                call.add(sid, &entry, published, QUANTUM, &mut self.by_tcp);
            }
        }
        if !call.is_empty() {
            let served = self.send_turns(call.turns());
            call.settle(Some(served), &table, &mut self.by_tcp, |_, _| u64::MAX);
        }
    }

    fn send_turns(&mut self, turns: &[Turn]) -> io::Result<Served> {
        let mut used = Vec::with_capacity(turns.len());
        let (sessions, tunnels) = (&self.sessions, &mut self.tunnels);
        let served = self.tunnel.send(turns, |sid, packet| {
            if let Some(number) = sessions.get(&sid).and_then(|s| s.tunnel) {
                let _ = tunnels.send(number, packet);
                if used.last() != Some(&number) {
                    used.push(number);
                }
            }
        });
        let now = now_ns();
        for number in used {
            self.tunnels.note_use(number, now);
            self.flush_tunnel(number, Ok(()));
        }
        served
    }
}

fn interest(waits: bool) -> EpollFlags {
    if waits {
        EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT
    } else {
        EpollFlags::EPOLLIN
    }
}

/// The session that a packet names, and the token that it shows.
fn named(packet: &[u8]) -> Option<(u32, u64)> {
    let at = |offset: usize| packet.get(offset..);
    let sid = at(std::mem::offset_of!(intf::vtl_hdr, sid))?.first_chunk()?;
    let token = at(std::mem::offset_of!(intf::vtl_hdr, token))?.first_chunk()?;
    Some((u32::from_be_bytes(*sid), u64::from_be_bytes(*token)))
}
