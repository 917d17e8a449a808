//! Control packets to and from peers.

use std::net::IpAddr;

use vtl_proto::{
    nego::{self, Way},
    wire::Packet,
};

use super::{
    super::raw::{Raw, Received},
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
                if !self.asked(nego, &received) && self.parked.len() < PARKED {
                    self.parked.push_back(Parked::Asked(received));
                }
            }
            Packet::NegoAck(n) | Packet::NegoNack(n) => {
                self.answered(n.header.sid, &packet, &received);
            }
            Packet::Close(header) => self.closed(*header, &received),
            Packet::Size(size) => self.sized(size, &received),
            Packet::Data(_) | Packet::Ack(_) | Packet::Probe(_) => {}
        }
    }

    /// What control packets are sent and received by.
    fn socket(&self, v6: bool, way: Way) -> Option<&Raw> {
        let sockets = match way {
            Way::Native => &self.raw,
            Way::Udp => &self.udp,
        };
        sockets[usize::from(v6)].as_ref()
    }

    /// The ways that a peer may be reached by, the best one first.
    pub(super) fn ways(&self, peer: IpAddr, now: u64) -> Vec<Way> {
        let mut ways = self.peers.ways(peer, now).to_vec();
        ways.retain(|way| self.socket(peer.is_ipv6(), *way).is_some());
        ways
    }

    /// Answers a packet by the way that it came.
    pub(super) fn send_back(&self, packet: &Packet<'_>, received: &Received) {
        self.send(packet, received.to, received.from, received.port);
    }

    /// Sends to the peer's UDP port, or, 0, without UDP.
    pub(super) fn send(&self, packet: &Packet<'_>, from: IpAddr, to: IpAddr, port: u16) {
        let mut buffer = [0; 2048];
        let Ok(length) = packet.emit(&mut buffer) else {
            return;
        };
        let Some(raw) = self.socket(to.is_ipv6(), Way::by(port)) else {
            return;
        };
        if let Err(error) = raw.send(&buffer[..length], from, to, port) {
            tracing::debug!(%error, %to, "a control packet cannot be sent");
        }
    }
}
