//! Profiles of earlier flows, by destination and program: what a flow begins with, before its first byte.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use super::Profile;

/// Maximum number of entries. For one more, the one noted longest ago goes.
pub const MAX_KNOWN: usize = 1024;
/// How long an entry counts after it was noted last.
pub const KNOWN_FOR: Duration = Duration::from_secs(3600);

/// The file that a program executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Program {
    /// The device that it is on, as the kernel numbers it,
    pub device: u32,
    /// and its inode there.
    pub inode: u64,
}

/// What flows are told apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Where the connection was opened to.
    pub dest: SocketAddr,
    /// The program that has opened it; `None`: unknown, or on another host.
    pub program: Option<Program>,
}

/// Profiles by [`Source`]. The latest verdict counts. Time is an argument, in nanoseconds of any clock that does not go
/// back.
#[derive(Debug, Default)]
pub struct Cache {
    known: HashMap<Source, (Profile, u64)>,
}

impl Cache {
    /// Notes a verdict on a flow.
    pub fn note(&mut self, now_ns: u64, source: Source, profile: Profile) {
        if self.known.len() >= MAX_KNOWN && !self.known.contains_key(&source) {
            self.known.retain(|_, (_, at_ns)| is_fresh(now_ns, *at_ns));
            if self.known.len() >= MAX_KNOWN {
                let oldest = self.known.iter().min_by_key(|(_, (_, at_ns))| *at_ns);
                if let Some(oldest) = oldest.map(|(source, _)| *source) {
                    self.known.remove(&oldest);
                }
            }
        }
        self.known.insert(source, (profile, now_ns));
    }

    /// The profile of the latest flow of this kind, if it is not too long ago.
    pub fn get(&self, now_ns: u64, source: &Source) -> Option<Profile> {
        let (profile, at_ns) = self.known.get(source)?;
        is_fresh(now_ns, *at_ns).then_some(*profile)
    }
}

fn is_fresh(now_ns: u64, at_ns: u64) -> bool {
    let age = Duration::from_nanos(now_ns.saturating_sub(at_ns));
    age <= KNOWN_FOR
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const HOUR: u64 = 3600 * S;

    fn source(port: u16, inode: u64) -> Source {
        Source {
            dest: SocketAddr::new([192, 0, 2, 1].into(), port),
            program: Some(Program { device: 1, inode }),
        }
    }

    #[test]
    fn get__tells_destinations_and_programs_apart() {
        let mut cache = Cache::default();
        cache.note(0, source(443, 7), Profile::LossSensitive);
        assert_eq!(cache.get(0, &source(443, 7)), Some(Profile::LossSensitive));
        let unknown = Source {
            program: None,
            ..source(443, 7)
        };
        for other in [source(443, 8), source(80, 7), unknown] {
            assert_eq!(cache.get(0, &other), None);
        }
        // The latest counts.
        cache.note(S, source(443, 7), Profile::TimeSensitive);
        assert_eq!(cache.get(S, &source(443, 7)), Some(Profile::TimeSensitive));
    }

    #[test]
    fn get__forgets_what_is_old() {
        let mut cache = Cache::default();
        cache.note(S, source(80, 1), Profile::TimeSensitive);
        let known = |cache: &Cache, at| cache.get(at, &source(80, 1)).is_some();
        assert!(known(&cache, S + HOUR) && !known(&cache, S + HOUR + 1));
        // A clock that goes back is not the cache's to find out.
        assert!(known(&cache, 0));
        cache.note(S + HOUR, source(80, 1), Profile::TimeSensitive);
        assert!(known(&cache, S + 2 * HOUR));
    }

    #[test]
    fn note__is_bounded_and_the_oldest_goes() {
        let mut cache = Cache::default();
        let all = MAX_KNOWN as u64;
        for i in 0..all {
            cache.note(i, source(80, i), Profile::TimeSensitive);
        }
        // One that is noted again is young.
        cache.note(all, source(80, 0), Profile::TimeSensitive);
        cache.note(all + 1, source(80, all), Profile::TimeSensitive);
        assert_eq!(cache.known.len(), MAX_KNOWN);
        let has = |cache: &Cache, i| cache.known.contains_key(&source(80, i));
        assert!(has(&cache, 0) && !has(&cache, 1) && has(&cache, 2) && has(&cache, all));
        // What is old goes at once.
        cache.note(3 * HOUR, source(80, all + 1), Profile::TimeSensitive);
        assert_eq!(cache.known.len(), 1);
    }
}
