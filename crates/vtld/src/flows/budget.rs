//! Memory budget of flows: in total, per network and per association.
//!
//! Credit is overcommitted, since most applications read. At half of any quota (soft limit) receive windows and
//! unconfirmed bytes shrink to a minimum. Beyond a quota (hard limit) the association's carriers are closed and no
//! new one is opened: its flows fall back to their TCP connections, which are read only while nothing is queued for the
//! application, so TCP's own backpressure holds the rest. No flow is reset, no byte is lost.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    rc::Rc,
};

use vtl_core::flow::INITIAL_CREDIT;

use crate::network::Network;

/// Quotas of a network and of an association: this fraction of the total.
const OF_NETWORK: u64 = 2;
const OF_ASSOCIATION: u64 = 4;

/// Maximum receive window of a flow, bytes. In-order delivery under loss takes two bandwidth-delay products: enough
/// for 100 Mbit/s at a round trip of 1 s, and the capacity of a ring of 16,384 slots.
const FLOW_WINDOW: u64 = 24 << 20;

/// What the budget has left for an association.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Room {
    /// A quota is exceeded (hard limit).
    None,
    /// Over half of a quota is in use (soft limit).
    Little,
    /// Windows of full size.
    Ample,
}

/// Bytes charged to a network's associations, and their number.
type Part = (Rc<Cell<u64>>, usize);

/// The budget of all flows.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes in total.
    max: u64,
    used: Cell<u64>,
    networks: RefCell<HashMap<Network, Part>>,
}

/// An association's account with the budget; closed on drop.
#[derive(Debug)]
pub(super) struct Account {
    budget: Rc<Budget>,
    network: Network,
    of_network: Rc<Cell<u64>>,
    used: Cell<u64>,
}

fn change(cell: &Cell<u64>, from: u64, to: u64) {
    cell.set(cell.get() - from + to);
}

impl Budget {
    pub(super) fn new(max: u64) -> Rc<Self> {
        Rc::new(Self {
            max,
            used: Cell::new(0),
            networks: RefCell::default(),
        })
    }

    /// The quota of an association, bytes.
    fn of_association(&self) -> u64 {
        self.max / OF_ASSOCIATION
    }

    /// Upper bound of a carrier's or a flow's receive window, bytes.
    pub(super) fn max_ahead(&self) -> u64 {
        self.of_association() / 4
    }

    /// Whether one more than so many flows may have `room` bytes each in the kernel, which is in no account, and counts two
    /// for each: a quarter of the budget in all.
    pub(super) fn has_room(&self, flows: usize, room: u32) -> bool {
        (flows as u64) < self.max / 4 / (2 * u64::from(room))
    }

    /// Opens an account for an association with a host of that network.
    pub(super) fn open(self: &Rc<Self>, network: Network) -> Account {
        let mut networks = self.networks.borrow_mut();
        let (of_network, associations) = networks.entry(network).or_default();
        *associations += 1;
        Account {
            budget: Rc::clone(self),
            network,
            of_network: Rc::clone(of_network),
            used: Cell::new(0),
        }
    }
}

impl Account {
    /// Maximum receive window of a flow, bytes: a quarter of the association's quota at most, so that two flows stay
    /// below its soft limit.
    pub(super) fn flow_window(&self) -> u64 {
        FLOW_WINDOW.min(self.budget.max_ahead()).max(INITIAL_CREDIT)
    }

    /// Sets the association's charge, bytes. Returns whether it has increased.
    pub(super) fn set(&self, bytes: u64) -> bool {
        let before = self.used.replace(bytes);
        if before != bytes {
            change(&self.of_network, before, bytes);
            change(&self.budget.used, before, bytes);
        }
        bytes > before
    }

    /// The limit in force for the association.
    pub(super) fn room(&self) -> Room {
        let Budget { max, used, .. } = &*self.budget;
        let of_network = self.of_network.get();
        let parts = [
            (self.used.get(), self.budget.of_association()),
            (of_network, max / OF_NETWORK),
        ];
        let networks = self.budget.networks.borrow().len() as u64;
        // In total, only networks with more than an equal share exceed the quota.
        let is_full = used.get() > *max && of_network.saturating_mul(networks) >= used.get();
        if is_full || parts.iter().any(|(used, max)| used > max) {
            Room::None
        } else if used.get() > max / 2 || parts.iter().any(|(used, max)| *used > max / 2) {
            Room::Little
        } else {
            Room::Ample
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.set(0);
        let mut networks = self.budget.networks.borrow_mut();
        if let Some((_, associations)) = networks.get_mut(&self.network) {
            *associations -= 1;
            if *associations == 0 {
                networks.remove(&self.network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(n: u8) -> Network {
        Network::of([192, 0, 2, n].into())
    }

    #[test]
    fn flow_window__leaves_room_for_two() {
        let account = Budget::new(64 << 20).open(network(1));
        assert_eq!(account.flow_window(), 4 << 20);
        account.set(2 * account.flow_window());
        assert_eq!(account.room(), Room::Ample);
        let [large, small] = [1 << 30, 0].map(|max| Budget::new(max).open(network(1)));
        assert_eq!(large.flow_window(), FLOW_WINDOW);
        assert_eq!(small.flow_window(), INITIAL_CREDIT);
    }

    #[test]
    fn room__of_an_association_its_network_and_all() {
        let budget = Budget::new(800);
        let [a, b] = [(); 2].map(|()| budget.open(network(1)));
        let other = budget.open(network(2));
        assert!(a.set(100));
        assert_eq!(a.room(), Room::Ample);
        assert!(a.set(101));
        assert_eq!((a.room(), b.room()), (Room::Little, Room::Ample));
        a.set(201);
        assert_eq!((a.room(), b.room()), (Room::None, Room::Little));
        assert_eq!(other.room(), Room::Ample);
        assert!(!a.set(200));
        b.set(200);
        assert_eq!((a.room(), b.room()), (Room::Little, Room::Little));
        b.set(201);
        assert_eq!(b.room(), Room::None, "of the network");
        assert_eq!(other.room(), Room::Little, "of all, half is in use");
        drop((a, b));
        assert_eq!(other.room(), Room::Ample);
        assert_eq!(budget.networks.borrow().len(), 1);
    }

    #[test]
    fn room__where_all_is_in_use_the_largest_have_none() {
        let budget = Budget::new(800);
        let accounts: Vec<_> = (0..6).map(|n| budget.open(network(n))).collect();
        for account in &accounts {
            account.set(140);
        }
        accounts[0].set(10);
        accounts[1].set(200);
        let rooms: Vec<_> = accounts.iter().map(Account::room).collect();
        assert_eq!(rooms[..2], [Room::Little; 2], "770 are");
        accounts[1].set(199);
        accounts[2].set(200);
        assert_eq!(accounts[0].room(), Room::Little);
        assert_eq!(accounts[2].room(), Room::None, "829 are");
        assert_eq!(accounts[3].room(), Room::None, "more than a sixth of that");
    }
}
