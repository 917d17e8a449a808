//! This host's sessions, and the allocation of their indexes.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use vtl_bpf::sessions::SessionTable;
use vtl_proto::intf;

use crate::network::Network;

use super::{GRACE_NS, Owner, now_ns, random_token, session::Session};

/// Allocation of indexes.
struct Indexes {
    /// Indexes range from 1 to below this.
    places: u32,
    /// Recently freed indexes, and when their shards released them: `u64::MAX` until then.
    freed: HashMap<u32, u64>,
    /// Index allocated last.
    last: u32,
}

impl Indexes {
    fn new(places: u32) -> Self {
        Self {
            places,
            freed: HashMap::new(),
            last: 0,
        }
    }

    /// Whether an index was freed less than the grace period ago.
    fn rests(&self, sid: u32, now: u64) -> bool {
        let recent = |at: &u64| now.saturating_sub(*at) < GRACE_NS;
        self.freed.get(&sid).is_some_and(recent)
    }

    /// Returns the first free index behind `sid`, cyclically, so that a freed one is reused as late as
    /// possible.
    fn after(&self, sid: u32, is_free: impl Fn(u32) -> bool) -> Option<u32> {
        let all = (sid + 1..self.places).chain(1..=sid);
        all.into_iter().find(|sid| is_free(*sid))
    }
}

/// The sessions.
pub(super) struct Sessions {
    table: Arc<SessionTable>,
    known: BTreeMap<u32, Session>,
    /// Sessions by owner.
    owned: BTreeSet<(Owner, u32)>,
    indexes: Indexes,
    /// Where [`Sessions::take_turn`] goes on.
    next_turn: u32,
}

impl Sessions {
    /// Creates an empty set over the kernel's session table.
    pub(super) fn new(table: Arc<SessionTable>) -> Self {
        Self {
            indexes: Indexes::new(table.places()),
            table,
            known: BTreeMap::new(),
            owned: BTreeSet::new(),
            next_turn: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// Number of sessions with hosts of a network.
    pub(super) fn of_network(&self, network: Network) -> usize {
        let all = self.known.values();
        all.filter(|s| Network::of(s.peer) == network).count()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    pub(super) fn contains(&self, sid: u32) -> bool {
        self.known.contains_key(&sid)
    }

    pub(super) fn get(&self, sid: u32) -> Option<&Session> {
        self.known.get(&sid)
    }

    pub(super) fn get_mut(&mut self, sid: u32) -> Option<&mut Session> {
        self.known.get_mut(&sid)
    }

    /// Indexes from this one on, in ascending order.
    pub(super) fn indexes_from(&self, sid: u32) -> impl Iterator<Item = u32> {
        self.known.range(sid..).map(|(sid, _)| *sid)
    }

    /// The sessions of an owner, in ascending order.
    pub(super) fn of(&self, owner: Owner) -> Vec<u32> {
        let owned = self.owned.range((owner, 0)..=(owner, u32::MAX));
        owned.map(|(_, sid)| *sid).collect()
    }

    pub(super) fn insert(&mut self, sid: u32, session: Session) {
        self.owned.insert((session.aware.owner, sid));
        self.known.insert(sid, session);
    }

    /// Removes a session; reserves its index until its shard has released it.
    pub(super) fn remove(&mut self, sid: u32) -> Option<Session> {
        let session = self.known.remove(&sid)?;
        self.owned.remove(&(session.aware.owner, sid));
        self.reserve(sid);
        if let Some(before) = session.succeeds.and_then(|s| self.known.get_mut(&s))
            && before.successor == Some(sid)
        {
            before.successor = None;
        }
        Some(session)
    }

    /// Changes a session's owner.
    pub(super) fn hand_over(&mut self, sid: u32, owner: Owner) {
        if let Some(session) = self.known.get_mut(&sid) {
            let before = std::mem::replace(&mut session.aware.owner, owner);
            self.owned.remove(&(before, sid));
            self.owned.insert((owner, sid));
        }
    }

    /// Returns the next `max` sessions, round-robin.
    pub(super) fn take_turn(&mut self, max: usize) -> Vec<u32> {
        let turn: Vec<u32> = self.indexes_from(self.next_turn).take(max).collect();
        self.next_turn = match turn.last() {
            Some(last) if turn.len() == max => last + 1,
            _ => 0,
        };
        turn
    }

    /// Reserves an index until [`Sessions::release`].
    pub(super) fn reserve(&mut self, sid: u32) {
        self.indexes.freed.insert(sid, u64::MAX);
    }

    /// Releases an index for its shard; the grace period starts.
    pub(super) fn release(&mut self, sid: u32) {
        self.indexes.freed.insert(sid, now_ns());
    }

    /// Drops records of freed indexes whose grace period is over.
    pub(super) fn sweep(&mut self, now: u64) {
        let recent = |at: u64| now.saturating_sub(at) < GRACE_NS;
        self.indexes.freed.retain(|_, at| recent(*at));
    }

    /// Whether an index is unused and its grace period over. An application may still hold a session whose
    /// entry the programs have freed.
    pub(super) fn is_free(&self, sid: u32) -> bool {
        let entry = self.table.get(sid);
        entry.is_some_and(|e| e.state() == intf::VTL_FREE)
            && !self.contains(sid)
            && !self.indexes.rests(sid, now_ns())
    }

    /// Allocates the next free index.
    pub(super) fn next_free(&mut self) -> Option<u32> {
        let sid = self
            .indexes
            .after(self.indexes.last, |sid| self.is_free(sid))?;
        self.indexes.last = sid;
        Some(sid)
    }

    /// Returns a random free index to suggest for a peer's next session; not reserved.
    pub(super) fn any_free(&self) -> u32 {
        let random = random_token() % u64::from(self.indexes.places - 1);
        let free = self.indexes.after(random as u32, |sid| self.is_free(sid));
        free.unwrap_or(1)
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn indexes__go_round_and_leave_out_0() {
        let indexes = Indexes::new(4);
        let odd = |sid: u32| sid % 2 == 1;
        assert_eq!(indexes.after(0, odd), Some(1));
        assert_eq!(indexes.after(1, odd), Some(3));
        assert_eq!(indexes.after(3, odd), Some(1));
        assert_eq!(indexes.after(3, |sid| sid == 3), Some(3));
        assert_eq!(indexes.after(2, |sid| sid == 0 || sid == 4), None);
    }

    #[test]
    fn indexes__rest_until_their_shard_has_let_go_and_then_a_while() {
        let mut indexes = Indexes::new(4);
        indexes.freed.insert(1, u64::MAX);
        indexes.freed.insert(2, 1000);
        assert!(indexes.rests(1, u64::MAX - 1));
        assert!(indexes.rests(2, 1000));
        assert!(indexes.rests(2, 999 + GRACE_NS));
        assert!(!indexes.rests(2, 1000 + GRACE_NS));
        assert!(!indexes.rests(3, 0));
    }
}
