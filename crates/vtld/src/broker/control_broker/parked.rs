//! What goes on when there are rings for it, and the graft is in the kernel.

use std::collections::VecDeque;

use vtl_control::Destination;

use super::{
    super::{Granted, Owner, Reply, raw::Received, session::Wish},
    ControlBroker,
};

/// Peers' packets that may wait; they repeat them.
const PACKETS: usize = 64;

enum Parked {
    /// A peer's NEGO, or its answer to one.
    Packet(Received),
    /// An aware application's.
    Connect(Connect),
}

/// An application that wants a session.
pub(in super::super) struct Connect {
    pub(in super::super) owner: Owner,
    pub(in super::super) to: Destination,
    pub(in super::super) wish: Wish,
    pub(in super::super) reply: Reply<Granted>,
}

/// What waits, in the order in which it came.
#[derive(Default)]
pub(super) struct Parking(VecDeque<Parked>);

impl Parking {
    /// Keeps a packet until there is what it needs. Its sender repeats it if there is no room.
    pub(super) fn keep_packet(&mut self, packet: Received) {
        let packets = self.0.iter().filter(|p| matches!(p, Parked::Packet(_)));
        if packets.count() < PACKETS {
            self.0.push_back(Parked::Packet(packet));
        }
    }

    /// Keeps an application's request.
    pub(super) fn keep(&mut self, request: Connect) {
        self.0.push_back(Parked::Connect(request));
    }

    /// An owner has gone.
    pub(super) fn gone(&mut self, owner: Owner) {
        self.0
            .retain(|p| !matches!(p, Parked::Connect(request) if request.owner == owner));
    }
}

impl ControlBroker {
    /// Goes on with what is parked, as far as it can.
    pub(super) fn resume(&mut self) {
        for parked in std::mem::take(&mut self.parking.0) {
            match parked {
                Parked::Packet(received) => self.control_packet(received),
                Parked::Connect(request) => self.connect(request),
            }
        }
    }
}
