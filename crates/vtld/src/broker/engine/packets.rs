//! Control packets to and from peers.

use std::net::IpAddr;

use vtl_proto::{
    carrier::GRAFT_PORT,
    intf,
    nego::{self, Way},
    wire::Packet,
};

use super::{
    super::raw::{Raw, Received, Via},
    Engine, PARKED, Parked,
};

impl Engine {
    pub(super) fn control_packets(&mut self, v6: bool, way: Way) {
        for _ in 0..64 {
            let Some(raw) = self.socket(v6, way) else {
                return;
            };
            match raw.receive() {
                Ok(Some(received)) => self.control_packet(received),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "receiving a control packet");
                    return;
                }
            }
        }
    }

    pub(super) fn control_packet(&mut self, received: Received) {
        let packet = match Packet::parse(&received.bytes) {
            Ok(packet) => packet,
            Err(error) => {
                if let Some(nack) = nego::refuse_version(&received.bytes) {
                    self.send_back(&nack, &received);
                }
                tracing::debug!(%error, from = %received.from, "a malformed control packet");
                return;
            }
        };
        match &packet {
            Packet::Nego(nego) => {
                if !self.asked(nego, &received) {
                    self.park(Parked::Asked(received));
                }
            }
            Packet::NegoAck(n) | Packet::NegoNack(n) => {
                if self.answer_waits(n, received.from) {
                    return self.park(Parked::Answered(received));
                }
                self.answered(n.header.sid, &packet, &received);
            }
            Packet::Close(header) => self.closed(*header, &received),
            Packet::Size(size) => self.sized(size, &received),
            Packet::Data(_) | Packet::Ack(_) | Packet::Probe(_) => {}
        }
    }

    /// Keeps a packet until there is what it needs. Its sender repeats it if there is no room.
    fn park(&mut self, packet: Parked) {
        if self.parked.len() < PARKED {
            self.parked.push_back(packet);
        }
    }

    /// What control packets are sent and received by.
    fn socket(&self, v6: bool, way: Way) -> Option<&Raw> {
        let sockets = match way {
            Way::Native => &self.raw,
            Way::Udp => &self.udp,
            Way::Tcp => return None,
        };
        sockets[usize::from(v6)].as_ref()
    }

    /// The ways that a port of a peer's may be reached by, the best one first.
    pub(super) fn ways(&self, peer: IpAddr, port: u16, now: u64) -> Vec<Way> {
        let mut ways = self.peers.ways(peer, now).to_vec();
        ways.retain(|way| match way {
            Way::Tcp => port != GRAFT_PORT,
            way => self.socket(peer.is_ipv6(), *way).is_some(),
        });
        ways
    }

    /// Answers a packet by the way that it came.
    pub(super) fn send_back(&mut self, packet: &Packet<'_>, received: &Received) {
        self.send(packet, received.to, received.from, received.via);
    }

    /// How a session's packets go now; `None` as long as its peer has not shown itself.
    pub(super) fn via(&mut self, sid: u32) -> Option<Via> {
        let entry = self.plane.sessions().get(sid)?;
        match entry.ifindex() {
            0 => None,
            intf::VTL_TUNNEL => self.tunnel_of(sid).map(Via::Tcp),
            _ => Some(Via::port(entry.port())),
        }
    }

    /// Sends a packet to a peer.
    pub(super) fn send(&mut self, packet: &Packet<'_>, from: IpAddr, to: IpAddr, via: Via) {
        let mut buffer = [0; 2048];
        let Ok(length) = packet.emit(&mut buffer) else {
            return;
        };
        let port = match via {
            Via::Native => 0,
            Via::Udp(port) => port,
            Via::Tcp(number) => return self.send_by_tcp(number, &buffer[..length]),
        };
        let Some(raw) = self.socket(to.is_ipv6(), via.way()) else {
            return;
        };
        if let Err(error) = raw.send(&buffer[..length], from, to, port) {
            tracing::debug!(%error, %to, "a control packet cannot be sent");
        }
    }
}
