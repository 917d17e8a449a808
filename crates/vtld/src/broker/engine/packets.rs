//! Control packets to and from peers.

use std::net::IpAddr;

use vtl_proto::{nego, wire::Packet};

use super::{super::raw::Received, Engine, PARKED, Parked};

impl Engine {
    pub(super) fn control_packets(&mut self, v6: bool) {
        for _ in 0..64 {
            let Some(raw) = &self.raw[usize::from(v6)] else {
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
                    self.send(&nack, received.to, received.from);
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

    pub(super) fn send(&self, packet: &Packet<'_>, from: IpAddr, to: IpAddr) {
        let mut buffer = [0; 2048];
        let Ok(length) = packet.emit(&mut buffer) else {
            return;
        };
        let Some(raw) = &self.raw[usize::from(to.is_ipv6())] else {
            return;
        };
        if let Err(error) = raw.send(&buffer[..length], from, to) {
            tracing::debug!(%error, %to, "a control packet cannot be sent");
        }
    }
}
