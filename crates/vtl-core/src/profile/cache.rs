//! Verdicts on earlier flows: what a new one is before its first byte.

use std::{collections::HashMap, hash::Hash};

use super::Verdict;

/// Remembers the latest verdict for each destination and executable, for a time.
#[derive(Debug)]
pub struct Cache<Destination> {
    /// With the time of the verdict, ns.
    verdicts: HashMap<(Destination, String), (u64, Verdict)>,
    capacity: usize,
    max_age: u64,
}

impl<Destination: Clone + Eq + Hash> Cache<Destination> {
    /// Holds at most `capacity` verdicts, each for `max_age` ns after the last flow that confirmed it.
    pub fn new(capacity: usize, max_age: u64) -> Self {
        Self {
            verdicts: HashMap::new(),
            capacity,
            max_age,
        }
    }

    /// The latest verdict on flows of `executable` (empty: unknown) to `destination`.
    pub fn get(&self, now: u64, destination: &Destination, executable: &str) -> Option<&Verdict> {
        let key = (destination.clone(), executable.to_owned());
        let (at, verdict) = self.verdicts.get(&key)?;
        (now.saturating_sub(*at) < self.max_age).then_some(verdict)
    }

    /// Remembers a verdict in place of an earlier one; where there is no room, in place of the oldest one.
    pub fn insert(
        &mut self,
        now: u64,
        destination: Destination,
        executable: &str,
        verdict: Verdict,
    ) {
        let key = (destination, executable.to_owned());
        if self.verdicts.len() >= self.capacity && !self.verdicts.contains_key(&key) {
            let max_age = self.max_age;
            self.verdicts
                .retain(|_, (at, _)| now.saturating_sub(*at) < max_age);
            if self.verdicts.len() >= self.capacity {
                let oldest = self.verdicts.iter().min_by_key(|(_, (at, _))| *at);
                if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                    self.verdicts.remove(&oldest);
                }
            }
        }
        if self.capacity > 0 {
            self.verdicts.insert(key, (now, verdict));
        }
    }

    /// How many verdicts it holds, those included that are too old.
    pub fn len(&self) -> usize {
        self.verdicts.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.verdicts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;

    fn verdict(evidence: &str) -> Verdict {
        Verdict {
            profile: Profile::LossSensitive,
            protocol: None,
            evidence: evidence.into(),
        }
    }

    #[test]
    fn cache__has_the_latest_verdict_for_destination_and_executable() {
        let mut cache = Cache::new(2, 100);
        cache.insert(1, 7, "a", verdict("old"));
        cache.insert(2, 7, "a", verdict("new"));
        assert_eq!(cache.get(3, &7, "a"), Some(&verdict("new")));
        assert_eq!((cache.get(3, &8, "a"), cache.get(3, &7, "b")), (None, None));
        assert_eq!(cache.len(), 1);
    }

    #[test]
    fn cache__forgets_with_age() {
        let mut cache = Cache::new(2, 100);
        cache.insert(1, 7, "a", verdict(""));
        assert!(cache.get(100, &7, "a").is_some());
        assert!(cache.get(101, &7, "a").is_none());
        cache.insert(50, 7, "a", verdict(""));
        assert!(cache.get(101, &7, "a").is_some());
    }

    #[test]
    fn cache__is_bounded_and_drops_the_oldest() {
        let mut cache = Cache::new(3, 1000);
        for destination in 0..50 {
            cache.insert(destination, destination, "", verdict(""));
            assert!(cache.len() <= 3);
        }
        let held: Vec<_> = (0..50).filter(|d| cache.get(50, d, "").is_some()).collect();
        assert_eq!(held, [47, 48, 49]);
        let mut none = Cache::new(0, 1000);
        none.insert(0, 1, "", verdict(""));
        assert!(none.is_empty());
    }
}
