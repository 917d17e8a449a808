//! Requests that wait for rings, or for the deployment of a graft.

use std::collections::VecDeque;

use vtl_control::Destination;

use super::{
    super::{Granted, Owner, Reply, raw::Received, session::SessionSpec},
    ControlBroker,
};

/// Maximum of parked packets; peers retransmit others.
const PACKETS: usize = 64;

enum Parked {
    /// A peer's NEGO, or its answer to one.
    Packet(Received),
    /// An aware application's request for a session.
    Connect(Connect),
}

/// An application's request for a session.
pub(in super::super) struct Connect {
    pub(in super::super) owner: Owner,
    pub(in super::super) to: Destination,
    pub(in super::super) request: SessionSpec,
    pub(in super::super) reply: Reply<Granted>,
}

/// Queue of parked requests, in order of arrival.
#[derive(Default)]
pub(super) struct Parking(VecDeque<Parked>);

impl Parking {
    /// Parks a packet; drops it if the queue is full, since the peer retransmits it.
    pub(super) fn keep_packet(&mut self, packet: Received) {
        let packets = self.0.iter().filter(|p| matches!(p, Parked::Packet(_)));
        if packets.count() < PACKETS {
            self.0.push_back(Parked::Packet(packet));
        }
    }

    /// Parks an application's request.
    pub(super) fn keep(&mut self, request: Connect) {
        self.0.push_back(Parked::Connect(request));
    }

    /// Drops requests of an owner that has gone.
    pub(super) fn gone(&mut self, owner: Owner) {
        self.0
            .retain(|p| !matches!(p, Parked::Connect(request) if request.owner == owner));
    }
}

impl ControlBroker {
    /// Retries everything that is parked.
    pub(super) fn resume(&mut self) {
        for parked in std::mem::take(&mut self.parking.0) {
            match parked {
                Parked::Packet(received) => self.control_packet(received),
                Parked::Connect(request) => self.connect(request),
            }
        }
    }
}
