//! The stacks of an association: its carriers, each on a path, that flows are spread over.

use std::{
    cell::{Cell, RefCell},
    net::IpAddr,
    rc::Rc,
    time::Duration,
};

use tokio::{task::spawn_local, time::sleep};
use vtl_control::FlowStack;
use vtl_core::stacks::{PeerAddresses, StackState, Turns};
use vtl_pool::key::PublicKey;
use vtl_proto::frame::{Addresses, CarrierId, FlowId, Side};

use super::{
    super::{addresses::is_private, carrier::Carrier, flow::State},
    Peer, Running, now_ns,
};

/// How soon to look again whether a stack takes a chunk: less than what may wait in one.
const FULL: Duration = Duration::from_millis(2);

/// What is known of an association's paths.
#[derive(Default)]
pub(super) struct Stacks {
    /// The peer's further addresses, once it has told them: it knows several paths.
    told: RefCell<Option<Vec<IpAddr>>>,
    /// Those that it has told in the life of the association.
    admitted: RefCell<PeerAddresses>,
    /// Changes with them.
    version: Cell<u64>,
    /// Flows were spread when that was looked at last.
    was_spread: Cell<bool>,
    /// The address of the flows' own connections is this host's no more.
    lacks_own: Cell<bool>,
    /// Flows that wait for room.
    turns: RefCell<Turns>,
    /// They are looked after.
    is_looking: Cell<bool>,
}

impl Stacks {
    /// Whether flows were spread when that was looked at last.
    pub(super) fn was_spread(&self) -> bool {
        self.was_spread.get()
    }
}

impl Peer {
    /// Whether flows are spread over all carriers.
    pub(in super::super) fn is_spread(&self) -> bool {
        self.scheduler().is_some()
    }

    /// The carriers that flows are spread over, and their state.
    pub(in super::super) fn stacks(&self) -> Vec<(Rc<dyn Carrier>, StackState)> {
        let carriers = self.carriers.borrow();
        let stacks = carriers.iter().filter_map(|(id, running)| {
            Some((Rc::clone(&running.carrier), stack_of(*id, running)?))
        });
        stacks.collect()
    }

    /// Notes what the link layer below each carrier says. `of`: its rate between addresses of this host and of the peer,
    /// bit/s.
    pub(in super::super) fn note_link_rates(&self, of: impl Fn(IpAddr, IpAddr) -> Option<u64>) {
        for running in self.carriers.borrow().values() {
            let between = running.carrier.between();
            let rate = between
                .and_then(|(local, peer)| of(local, peer))
                .unwrap_or(0);
            running.link_rate.set(rate / 8);
        }
    }

    /// The stacks of a flow, for commands; none if it is not spread.
    pub(super) fn stacks_of(&self, state: &State) -> Vec<FlowStack> {
        if !self.is_spread() {
            return Vec::new();
        }
        let mut stacks = self.stacks();
        stacks.sort_by_key(|(_, stack)| (stack.path, stack.id));
        let shown = stacks.iter().filter_map(|(carrier, stack)| {
            let (local, peer) = carrier.between()?;
            let [bytes_sent, bytes_received] = state.shares.of(stack.id);
            Some(FlowStack {
                carrier: carrier.kind()?.name().to_owned(),
                local,
                peer,
                first: stack.path == 0,
                delivers: !stack.is_late,
                rtt_ms: (stack.rtt_ns / 10_000) as f64 / 100.0,
                sends_mbit: (stack.rate / 1250) as f64 / 100.0,
                bytes_sent,
                bytes_received,
            })
        });
        shown.collect()
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
        if self.key.opener == Side::Peer {
            return;
        }
        let peer = self.key.peer.to_canonical();
        // One from outside is not to have this host look around at home.
        let may_be = |address: &IpAddr| {
            let is_inside = is_private(*address) && !is_private(peer);
            !is_inside && *address != peer
        };
        let told = addresses.iter().map(|address| address.to_canonical());
        let mut admitted = self.stacks.admitted.borrow_mut();
        let told = Some(admitted.admit(self.now_ns(), told.filter(may_be)));
        if *self.stacks.told.borrow() != told {
            self.stacks.told.replace(told);
            self.stacks.version.set(self.stacks.version.get() + 1);
            self.changed.notify_waiters();
        }
    }

    /// Whether a flow may give a stack a chunk now, or others come first.
    pub(in super::super) fn may_place(&self, flow: FlowId) -> bool {
        self.stacks.turns.borrow().may_place(flow)
    }

    /// Wakes a flow (`Changed::sending`) when it may be its turn to look for room.
    pub(in super::super) fn wait_for_room(self: &Rc<Self>, flow: FlowId) {
        self.stacks.turns.borrow_mut().wait(flow);
        if self.stacks.is_looking.replace(true) {
            return;
        }
        let peer = Rc::downgrade(self);
        spawn_local(async move {
            loop {
                sleep(FULL).await;
                let Some(peer) = peer.upgrade() else { return };
                let next = peer.stacks.turns.borrow_mut().pass();
                if !peer.wake(next) {
                    peer.stacks.is_looking.set(false);
                    return;
                }
            }
        });
    }

    /// Notes that a flow has given a chunk away, and wakes the next one that waits.
    pub(in super::super) fn placed(&self, flow: FlowId) {
        let next = self.stacks.turns.borrow_mut().placed(flow);
        self.wake(next);
    }

    /// Wakes the flow whose turn it is, or the next one that has not ended; false: none waits.
    fn wake(&self, mut next: Option<FlowId>) -> bool {
        let flows = self.flows.borrow();
        while let Some(flow) = next {
            if let Some(state) = flows.get(&flow) {
                state.changed.sending.notify_one();
                return true;
            }
            next = self.stacks.turns.borrow_mut().pass();
        }
        false
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

/// The state of a carrier; `None`: it takes no part, as lossy ones, which do not say what they have lost.
fn stack_of(id: CarrierId, running: &Running) -> Option<StackState> {
    let carrier = Some(&running.carrier).filter(|carrier| !carrier.loses());
    Some(StackState {
        link_rate: running.link_rate.get(),
        ..carrier?.stack(id)?
    })
}
