//! Sessions' packets over TCP: between the kernel's programs and the connections with other daemons
//! (`tunnel.rs`).

use std::{io, sync::Arc};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use vtl_bpf::{
    plane::DataPlane,
    pump::{Served, Turn},
    sessions::SessionTable,
    tunnel::{Taken, Tunnel},
};
use vtl_proto::{carrier::GRAFT_PORT, intf, record::Records, wire};

use crate::hooker::rules::Prefix;

use super::{
    MS, QUANTUM, now_ns,
    raw::{Received, Via},
    session::Session,
    sessions::Sessions,
    shard::{Call, Schedule, Shards},
    source::Source,
    tunnel::Tunnels,
};

/// Retry interval of egress while the connection is congested.
const CONGESTED_NS: u64 = MS;
/// Retry interval of egress while the connection is being established.
const CONNECTING_NS: u64 = 20 * MS;
/// Maximum frames of a call.
const BATCH: u32 = 2 * QUANTUM;

impl Session {
    /// Whether packets may be sent over TCP; not of flows' sessions, since flows have TCP connections of their
    /// own.
    pub(super) fn may_go_by_tcp(&self) -> bool {
        self.port != GRAFT_PORT
    }
}

/// Packets received by a connection.
#[must_use]
pub(super) struct Arrived {
    number: u32,
    packets: Vec<u8>,
    /// An error, or the connection's end.
    result: io::Result<()>,
}

impl Arrived {
    /// The packets, in their order.
    pub(super) fn packets(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = &self.packets[..];
        std::iter::from_fn(move || {
            let (packet, others) = Records::PACKETS.first(rest)?;
            rest = others;
            Some(packet)
        })
    }
}

/// The connections, and egress of the sessions that use them.
pub(super) struct ByTcp {
    connections: Tunnels,
    /// The kernel's programs for egress and ingress.
    programs: Tunnel,
    /// Receive buffer, kept between calls.
    packets: Vec<u8>,
    /// Timers of the sessions' egress.
    schedule: Schedule,
    /// Watches the connections.
    epoll: Arc<Epoll>,
}

impl ByTcp {
    /// Listens, if no other program has the port.
    ///
    /// # Errors
    /// The programs cannot be called.
    pub(super) fn open(plane: &DataPlane, epoll: Arc<Epoll>) -> anyhow::Result<Self> {
        let connections = Tunnels::open();
        // Edge-triggered: if accepting fails for lack of descriptors, it is retried with the next connection.
        let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        for (listener, v6) in connections.listeners().into_iter().zip([false, true]) {
            let event = EpollEvent::new(edges, Source::Tunnels { v6 }.pack());
            listener.map_or(Ok(()), |listener| epoll.add(listener, event))?;
        }
        Ok(Self {
            connections,
            programs: Tunnel::open(plane)?,
            packets: Vec::new(),
            schedule: Schedule::new(plane.sessions().places()),
            epoll,
        })
    }

    /// Whether peers can connect.
    pub(super) fn is_listening(&self) -> bool {
        self.connections.listeners().iter().any(Option::is_some)
    }

    /// Schedules egress of a session at once.
    pub(super) fn due(&mut self, sid: u32) {
        self.schedule.now(sid);
    }

    /// Time of the next egress.
    pub(super) fn next(&self) -> u64 {
        self.schedule.next()
    }

    /// Removes a session from the schedule.
    pub(super) fn forget(&mut self, sid: u32) {
        self.schedule.cancel(sid);
    }

    /// Closes idle connections.
    pub(super) fn sweep(&mut self, now: u64) {
        self.connections.sweep(now);
    }

    /// Accepts peers' connections. `from`: hosts allowed.
    pub(super) fn accept(&mut self, v6: bool, from: &[Prefix]) {
        while let Some(number) = self.connections.accept(v6, now_ns(), from) {
            self.watch(number, false);
        }
    }

    fn watch(&mut self, number: u32, waits: bool) {
        let source = Source::Tunnel { number };
        let event = EpollEvent::new(interest(waits), source.pack());
        let added = (self.connections.descriptor(number)).map(|fd| self.epoll.add(fd, event));
        if !matches!(added, Some(Ok(()))) {
            self.connections.close(number);
        }
    }

    /// Returns the connection of a session's packets; connects if there is none.
    pub(super) fn connection_of(&mut self, session: &mut Session) -> Option<u32> {
        if !session.may_go_by_tcp() {
            return None;
        }
        if let Some(number) = session.tunnel
            && self.connections.descriptor(number).is_some()
        {
            return Some(number);
        }
        let connected = self
            .connections
            .connect(session.local, session.peer, now_ns())
            .inspect_err(
                |error| tracing::debug!(%error, peer = %session.peer, "tunnel: cannot connect"),
            );
        session.tunnel = connected.ok();
        let number = session.tunnel?;
        self.watch(number, true);
        Some(number)
    }

    /// Time that egress of a session has to wait; `None` if it may run.
    fn wait_ns(&mut self, session: &mut Session) -> Option<u64> {
        match self.connection_of(session) {
            Some(number) if self.connections.has_room(number) => None,
            Some(number) if self.connections.is_established(number) => Some(CONGESTED_NS),
            _ => Some(CONNECTING_NS),
        }
    }

    /// Sends a packet.
    pub(super) fn send(&mut self, number: u32, packet: &[u8]) {
        let sent = self.connections.send(number, packet);
        self.flush(number, sent);
    }

    /// Reads from a connection. Pass its packets to [`ByTcp::take`] one by one, since DATA may follow the NEGO
    /// that creates their session; then call [`ByTcp::finish`].
    pub(super) fn receive(&mut self, number: u32) -> Arrived {
        let mut packets = std::mem::take(&mut self.packets);
        packets.clear();
        let result = self.connections.flush(number);
        let result = result.and_then(|()| self.connections.receive(number, &mut packets));
        Arrived {
            number,
            packets,
            result,
        }
    }

    /// Ends [`ByTcp::receive`]: writes what is queued, or closes a broken connection.
    pub(super) fn finish(&mut self, arrived: Arrived) {
        self.packets = arrived.packets;
        self.flush(arrived.number, arrived.result);
    }

    /// Writes what is queued; closes the connection on an error.
    fn flush(&mut self, number: u32, result: io::Result<()>) {
        match result.and_then(|()| self.connections.flush(number)) {
            Ok(()) => {
                if let Some(waits) = self.connections.watch(number)
                    && let Some(fd) = self.connections.descriptor(number)
                {
                    let source = Source::Tunnel { number };
                    let mut event = EpollEvent::new(interest(waits), source.pack());
                    let _ = self.epoll.modify(fd, &mut event);
                }
            }
            Err(error) => {
                tracing::debug!(%error, number, "tunnel: closed");
                self.connections.close(number);
            }
        }
    }

    /// Passes a peer's packet to the ingress programs. Returns it if it is a control packet for the broker.
    pub(super) fn take(
        &mut self,
        number: u32,
        packet: &[u8],
        sessions: &mut Sessions,
    ) -> Option<Received> {
        let [local, peer] = self.connections.addresses(number)?;
        let sid = wire::sid(packet)?;
        let mut header = [0; size_of::<intf::vtl_ack_hdr>()];
        let known = packet.len().min(header.len());
        header[..known].copy_from_slice(&packet[..known]);
        if let Some(session) = sessions.get_mut(sid)
            && session.peer == peer
            && session.is_from_peer(&mut header[..known])
        {
            if !session.may_go_by_tcp() {
                return None;
            }
            session.tunnel = Some(number);
            self.connections.note_use(number, now_ns());
        }
        match self.programs.receive(peer, local, packet) {
            Ok(Taken::Done) => None,
            Ok(Taken::Answer(answer)) => {
                // Dropped if there is no room: the next acknowledgement supersedes it.
                let _ = self.connections.send(number, answer);
                None
            }
            Ok(Taken::Control) => Some(Received {
                from: peer,
                via: Via::Tcp(number),
                to: local,
                bytes: packet.to_vec(),
            }),
            Err(error) => {
                tracing::debug!(%error, "tunnel: cannot inject a packet");
                None
            }
        }
    }

    /// Runs egress of the sessions that are due, and sends their packets.
    pub(super) fn pump(&mut self, sessions: &mut Sessions, table: &SessionTable, shards: &Shards) {
        let now = now_ns();
        self.schedule.expire(now);
        let mut call = Call::new(now, BATCH);
        while !call.is_full()
            && let Some(sid) = self.schedule.pop()
        {
            let (Some(session), Some(entry)) = (sessions.get_mut(sid), table.get(sid)) else {
                continue;
            };
            let (ifindex, published) = (entry.ifindex(), session.published());
            if !session.is_open() || ifindex == 0 {
                continue;
            }
            if ifindex != intf::VTL_TUNNEL {
                shards.due(sid);
            } else if let Some(wait) = self.wait_ns(session) {
                self.schedule.at(sid, now + wait);
            } else {
                call.add(sid, &entry, published, QUANTUM, &mut self.schedule);
            }
        }
        if !call.is_empty() {
            let served = self.send_turns(call.turns(), sessions);
            call.settle(Some(served), table, &mut self.schedule, |_, _| u64::MAX);
        }
    }

    fn send_turns(&mut self, turns: &[Turn], sessions: &Sessions) -> io::Result<Served> {
        let mut used = Vec::with_capacity(turns.len());
        let connections = &mut self.connections;
        let served = self.programs.send(turns, |sid, packet| {
            if let Some(number) = sessions.get(sid).and_then(|s| s.tunnel) {
                let _ = connections.send(number, packet);
                if used.last() != Some(&number) {
                    used.push(number);
                }
            }
        });
        let now = now_ns();
        for number in used {
            self.connections.note_use(number, now);
            self.flush(number, Ok(()));
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
