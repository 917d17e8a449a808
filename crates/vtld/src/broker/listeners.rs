//! Ports on which applications listen for sessions.

use std::collections::{BTreeMap, VecDeque, btree_map::Entry};

use super::{Granted, Owner, Reply, random_token};

/// Maximum length of a port's accept queue.
const BACKLOG: usize = 64;

struct Listener {
    owner: Owner,
    /// Key with which other connections accept.
    key: u64,
    /// Accept queue: open sessions not accepted yet.
    backlog: VecDeque<u32>,
    /// Pending accepts, in order of arrival.
    waiting: VecDeque<(Owner, Reply<Granted>)>,
}

/// The listeners, by port.
#[derive(Default)]
pub(super) struct Listeners {
    ports: BTreeMap<u16, Listener>,
}

/// A session matched with a pending accept.
pub(super) struct Accepted {
    pub(super) sid: u32,
    pub(super) owner: Owner,
    pub(super) reply: Reply<Granted>,
}

impl Listeners {
    /// Listens on a port. Returns the key with which other connections may accept.
    ///
    /// # Errors
    /// The port is taken, or 0.
    pub(super) fn listen(&mut self, owner: Owner, port: u16) -> Result<u64, String> {
        match self.ports.entry(port) {
            _ if port == 0 => Err("there is no port 0".into()),
            Entry::Occupied(_) => Err(format!(
                "VTL port {port} is taken by another receiver: choose another one"
            )),
            Entry::Vacant(free) => {
                let key = random_token();
                free.insert(Listener {
                    owner,
                    key,
                    backlog: VecDeque::new(),
                    waiting: VecDeque::new(),
                });
                Ok(key)
            }
        }
    }

    /// Queues an accept at the port of the key, or else of the owner.
    pub(super) fn accept(&mut self, owner: Owner, key: Option<u64>, reply: Reply<Granted>) {
        let found = self
            .ports
            .values_mut()
            .find(|l| key.map_or(l.owner == owner, |key| l.key == key));
        match found {
            Some(listener) => listener.waiting.push_back((owner, reply)),
            None => {
                let _ = reply.send(Err("accept without listen".into()));
            }
        }
    }

    /// All ports.
    pub(super) fn ports(&self) -> impl Iterator<Item = u16> {
        self.ports.keys().copied()
    }

    /// The listener of a port.
    pub(super) fn owner(&self, port: u16) -> Option<Owner> {
        self.ports.get(&port).map(|l| l.owner)
    }

    /// Whether a port's accept queue is full.
    pub(super) fn is_full(&self, port: u16) -> bool {
        let listener = self.ports.get(&port);
        listener.is_some_and(|l| l.backlog.len() >= BACKLOG)
    }

    /// Appends an open session to its port's accept queue.
    pub(super) fn opened(&mut self, port: u16, sid: u32) {
        if let Some(listener) = self.ports.get_mut(&port) {
            listener.backlog.push_back(sid);
        }
    }

    /// Matches queued sessions with pending accepts.
    pub(super) fn take_accepted(&mut self) -> Vec<Accepted> {
        let mut accepted = Vec::new();
        for listener in self.ports.values_mut() {
            while !listener.waiting.is_empty()
                && let Some(sid) = listener.backlog.pop_front()
                && let Some((owner, reply)) = listener.waiting.pop_front()
            {
                accepted.push(Accepted { sid, owner, reply });
            }
        }
        accepted
    }

    /// Removes a session from the accept queues.
    pub(super) fn forget(&mut self, sid: u32) {
        for listener in self.ports.values_mut() {
            listener.backlog.retain(|s| *s != sid);
        }
    }

    /// Removes the ports and pending accepts of an owner that has gone. Returns the sessions of its accept
    /// queue.
    pub(super) fn gone(&mut self, owner: Owner) -> Vec<u32> {
        let mut left = Vec::new();
        for (_, listener) in self.ports.extract_if(.., |_, l| l.owner == owner) {
            for (_, reply) in listener.waiting {
                let _ = reply.send(Err("the listener has gone".into()));
            }
            left.extend(listener.backlog);
        }
        for listener in self.ports.values_mut() {
            listener.waiting.retain(|(waiting, _)| *waiting != owner);
        }
        left
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn listen__one_for_each_port() {
        let mut listeners = Listeners::default();
        assert!(listeners.listen(1, 0).is_err());
        let key = listeners.listen(1, 7).unwrap();
        assert!(listeners.listen(2, 7).unwrap_err().contains("taken"));
        assert_ne!(key, listeners.listen(2, 8).unwrap());
        assert_eq!(listeners.ports().collect::<Vec<_>>(), [7, 8]);
    }

    #[test]
    fn take_accepted__in_order_by_key_or_owner() {
        let mut listeners = Listeners::default();
        let key = listeners.listen(1, 7).unwrap();
        let (reply, answers) = mpsc::sync_channel(4);
        for (owner, key) in [(1, None), (9, Some(key)), (9, None), (1, Some(key ^ 1))] {
            listeners.accept(owner, key, reply.clone());
        }
        assert_eq!(
            answers.try_iter().count(),
            2,
            "owners that may not listen are told so"
        );
        for sid in [3, 4, 5] {
            listeners.opened(7, sid);
        }
        listeners.forget(4);
        let accepted = listeners.take_accepted();
        let accepted: Vec<_> = accepted.iter().map(|a| (a.sid, a.owner)).collect();
        assert_eq!(accepted, [(3, 1), (5, 9)]);
    }

    #[test]
    fn gone__drops_waiting_sessions_and_requests_of_the_owner() {
        let mut listeners = Listeners::default();
        let key = listeners.listen(1, 7).unwrap();
        let (reply, answers) = mpsc::sync_channel(4);
        listeners.accept(2, Some(key), reply.clone());
        assert!(listeners.gone(2).is_empty());
        for sid in 0..BACKLOG as u32 {
            assert!(!listeners.is_full(7));
            listeners.opened(7, sid);
        }
        assert!(listeners.is_full(7));
        assert!(listeners.take_accepted().is_empty());
        assert_eq!(listeners.gone(1).len(), BACKLOG);
        assert!(listeners.owner(7).is_none());
        assert!(answers.try_recv().is_err());
    }
}
