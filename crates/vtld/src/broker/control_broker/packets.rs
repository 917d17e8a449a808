//! Control packets to and from peers.

use std::net::IpAddr;

use vtl_proto::{
    carrier::GRAFT_PORT,
    intf,
    nego::{self, Encapsulation},
    wire::{self, Extensions, Packet, TagKey},
};

use super::{
    super::raw::{Received, Via},
    ControlBroker,
};
use crate::network::admits;

impl ControlBroker {
    /// Handles an event of a connection with another daemon.
    pub(super) fn tunnel_event(&mut self, number: u32) {
        let arrived = self.by_tcp.receive(number);
        for packet in arrived.packets() {
            if let Some(control) = self.by_tcp.take(number, packet, &mut self.sessions) {
                self.control_packet(control);
            }
        }
        self.by_tcp.finish(arrived);
    }

    /// Returns the TCP connection of a session's packets; connects if there is none.
    pub(super) fn connection_of(&mut self, sid: u32) -> Option<u32> {
        let session = self.sessions.get_mut(sid)?;
        self.by_tcp.connection_of(session)
    }

    pub(super) fn control_packets(&mut self, v6: bool, encapsulation: Encapsulation) {
        for _ in 0..64 {
            match self.sockets.receive(v6, encapsulation) {
                Ok(Some(received)) => self.control_packet(received),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "session: cannot receive control packets");
                    return;
                }
            }
        }
    }

    pub(super) fn control_packet(&mut self, mut received: Received) {
        if !self.take_tag(&mut received) {
            return;
        }
        let packet = match Packet::parse(&received.bytes) {
            Ok(packet) => packet,
            Err(error) => {
                if admits(&self.config.from, received.from)
                    && let Some(nack) = nego::refuse_version(&received.bytes)
                {
                    self.send_back(&nack, &received);
                }
                tracing::debug!(%error, from = %received.from, "session: malformed control packet dropped");
                return;
            }
        };
        match &packet {
            Packet::Nego(nego) => {
                if !self.asked(nego, &received) {
                    self.parking.keep_packet(received);
                }
            }
            Packet::NegoAck(n) | Packet::NegoNack(n) => {
                if self.answer_waits(n, received.from) {
                    return self.parking.keep_packet(received);
                }
                self.answered(n.header.sid, &packet, &received);
            }
            Packet::Close(header) => self.closed(*header, &received),
            Packet::Size(size) => self.sized(size, &received),
            Packet::Data(_) | Packet::Ack(_) | Packet::Probe(_) => {}
        }
    }

    /// Verifies the tag of a packet of a session with keys, and replaces it by the token. False if it is wrong.
    fn take_tag(&self, received: &mut Received) -> bool {
        let kind = received
            .bytes
            .first()
            .map_or(0, |first| u32::from(first & 15));
        let session = wire::sid(&received.bytes).and_then(|sid| self.sessions.get(sid));
        match session.filter(|session| session.tags.is_some()) {
            Some(session) if [intf::VTL_CLOSE, intf::VTL_SIZE].contains(&kind) => {
                session.is_from_peer(&mut received.bytes)
            }
            _ => true,
        }
    }

    /// Encapsulations by which a peer's port may be reached, the preferred one first.
    pub(super) fn encapsulations(&self, peer: IpAddr, port: u16, now: u64) -> Vec<Encapsulation> {
        let mut encapsulations = self.peers.encapsulations(peer, now).to_vec();
        encapsulations.retain(|encapsulation| match encapsulation {
            Encapsulation::Tcp => port != GRAFT_PORT,
            encapsulation => self.sockets.has(peer.is_ipv6(), *encapsulation),
        });
        encapsulations
    }

    /// Answers a packet in its own encapsulation.
    pub(super) fn send_back(&mut self, packet: &Packet<'_>, received: &Received) {
        self.send(packet, received.to, received.from, received.via);
    }

    /// Current encapsulation of a session's packets; `None` until the peer's address is validated.
    pub(super) fn via(&mut self, sid: u32) -> Option<Via> {
        let entry = self.plane.sessions().get(sid)?;
        match entry.ifindex() {
            0 => None,
            intf::VTL_TUNNEL => self.connection_of(sid).map(Via::Tcp),
            _ => Some(Via::port(entry.port())),
        }
    }

    /// Sends a NEGO, or an answer to one, with its extensions.
    pub(super) fn send_nego(
        &mut self,
        packet: &Packet<'_>,
        extensions: &[u8],
        from: IpAddr,
        to: IpAddr,
        via: Via,
    ) {
        match Extensions::parse(extensions) {
            Ok(extensions) => self.send(&packet.with_extensions(extensions), from, to, via),
            Err(error) => {
                tracing::error!(%error, "session: invalid extensions of our own: NEGO not sent");
            }
        }
    }

    /// Sends a packet to a peer.
    pub(super) fn send(&mut self, packet: &Packet<'_>, from: IpAddr, to: IpAddr, via: Via) {
        self.send_tagged(packet, None, from, to, via);
    }

    /// Sends a packet of a session whose headers have tags.
    pub(super) fn send_tagged(
        &mut self,
        packet: &Packet<'_>,
        key: Option<&TagKey>,
        from: IpAddr,
        to: IpAddr,
        via: Via,
    ) {
        let mut buffer = [0; 2048];
        let Ok(length) = packet.emit(&mut buffer) else {
            return;
        };
        if let Some(key) = key {
            key.put(&mut buffer[..length]);
        }
        let port = match via {
            Via::Native => 0,
            Via::Udp(port) => port,
            Via::Tcp(number) => return self.by_tcp.send(number, &buffer[..length]),
        };
        self.sockets
            .send(&buffer[..length], from, to, via.encapsulation(), port);
    }
}
