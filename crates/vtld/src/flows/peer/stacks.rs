//! The stacks of an association: its carriers, each on a path, that flows are spread over.

use std::{
    cell::{Cell, RefCell},
    net::IpAddr,
    rc::Rc,
};

use vtl_core::stacks::Stack;
use vtl_pool::key::PublicKey;
use vtl_proto::frame::{Addresses, CarrierId, Side};

use super::{
    super::{addresses::is_private, carrier::Carrier},
    Peer, Running, now_ns,
};

/// What is known of an association's paths.
#[derive(Default)]
pub(super) struct Stacks {
    /// The peer's further addresses, once it has told them: it knows several paths.
    told: RefCell<Option<Vec<IpAddr>>>,
    /// Changes with them.
    version: Cell<u64>,
    /// Flows were spread when that was looked at last.
    was_spread: Cell<bool>,
    /// The address of the flows' own connections is this host's no more.
    lacks_own: Cell<bool>,
}

impl Peer {
    /// Whether flows are spread over all carriers.
    pub(in super::super) fn is_spread(&self) -> bool {
        self.scheduler().is_some()
    }

    /// The carriers that flows are spread over, and their state.
    pub(in super::super) fn stacks(&self) -> Vec<(Rc<dyn Carrier>, Stack)> {
        let carriers = self.carriers.borrow();
        let stacks = carriers.iter().filter_map(|(id, running)| {
            Some((Rc::clone(&running.carrier), stack_of(*id, running)?))
        });
        stacks.collect()
    }

    /// Time since the association began, ns.
    pub(in super::super) fn now_ns(&self) -> u64 {
        now_ns(self.began)
    }

    /// The carrier on the first path that has one, if flows are spread.
    pub(super) fn first_stack(&self) -> Option<CarrierId> {
        self.scheduler()?;
        let carriers = self.carriers.borrow();
        let stacks = carriers
            .iter()
            .filter_map(|(id, running)| stack_of(*id, running));
        let first = stacks.min_by_key(|stack| (stack.path, stack.id));
        first.map(|stack| stack.id)
    }

    /// Whether flows go by other paths, too, than that of their own connections.
    pub(super) fn is_elsewhere(&self) -> bool {
        let carriers = self.carriers.borrow();
        let mut stacks = carriers
            .iter()
            .filter_map(|(id, running)| stack_of(*id, running));
        self.is_spread() && stacks.any(|stack| stack.path != 0)
    }

    /// Applies whether flows are spread, and what over.
    pub(super) fn follow_spread(&self) {
        let is_spread = self.is_spread();
        if !self.stacks.was_spread.replace(is_spread) && !is_spread {
            return;
        }
        self.core.borrow_mut().set_spread(is_spread);
        let is_elsewhere = self.is_elsewhere();
        for state in self.flows.borrow().values() {
            state.licence.set_waived(is_elsewhere);
        }
    }

    /// Whether a carrier that has shown this key may come from another address than the association's.
    pub(in super::super) fn may_be_elsewhere(&self, shown: Option<PublicKey>) -> bool {
        self.is_spread() && self.is_admitted() && shown.is_some() && shown == self.shown.get()
    }

    /// Whether further paths may be opened: the peer knows them, and is known by its key.
    pub(in super::super) fn may_have_stacks(&self) -> bool {
        let is_told = self.stacks.told.borrow().is_some();
        let is_known = self.shown.get().is_some() && self.is_admitted();
        self.is_spread() && is_told && is_known && self.has_room()
    }

    /// Changes when other paths may be possible.
    pub(in super::super) fn stacks_state(&self) -> (u64, bool) {
        (self.stacks.version.get(), self.may_have_stacks())
    }

    /// The peer's further addresses.
    pub(in super::super) fn told_addresses(&self) -> Vec<IpAddr> {
        self.stacks.told.borrow().clone().unwrap_or_default()
    }

    /// Notes the peer's further addresses.
    pub(in super::super) fn note_addresses(&self, addresses: Addresses<'_>) {
        if self.key.opener == Side::Peer || !self.is_spread() {
            return;
        }
        let peer = self.key.peer.to_canonical();
        // One from outside is not to have this host look around at home.
        let may_be = |address: &IpAddr| {
            let is_host = !(address.is_loopback() || address.is_unspecified());
            let is_inside = is_private(*address) && !is_private(peer);
            is_host && !address.is_multicast() && !is_inside && *address != peer
        };
        let told: Vec<IpAddr> = addresses.iter().filter(may_be).collect();
        let told = Some(told);
        if *self.stacks.told.borrow() != told {
            self.stacks.told.replace(told);
            self.stacks.version.set(self.stacks.version.get() + 1);
            self.changed.notify_waiters();
        }
    }

    /// Notes whether this host still has the address of the flows' own connections. Without it the carriers from there
    /// end, rather than by silence.
    pub(in super::super) fn set_own(&self, has_own: bool) {
        let lacked = self.stacks.lacks_own.replace(!has_own);
        if has_own && lacked {
            self.changed.notify_waiters();
        }
        if !has_own && self.is_elsewhere() {
            for (id, running) in &*self.carriers.borrow() {
                if stack_of(*id, running).is_some_and(|stack| stack.path == 0) {
                    running.carrier.close();
                }
            }
        }
    }

    /// Whether a session from the address of the flows' own connections is in vain.
    pub(super) fn lacks_own(&self) -> bool {
        self.is_spread() && self.stacks.lacks_own.get()
    }
}

/// The state of a carrier; `None`: it takes no part.
fn stack_of(id: CarrierId, running: &Running) -> Option<Stack> {
    running.carrier.stack(id)
}
