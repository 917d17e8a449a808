//! Monitors the paths to other hosts, by what their connections count anyway: no packet is sent for it.
//!
//! Three threads read counters, each those of its own connections, and add what has come since to one table:
//! `vtl-broker` sessions (`session.rs`; 10 times a second, at most 1,024 each time), `vtl-flows` other carriers and flows'
//! own TCP connections (`carrier.rs`, `tcp.rs`; 10 times a second, at most 256 connections a second), `vtl-proxy`
//! proxied connections (once a second while they move bytes, at most 256). The estimators are `vtl_core::netmon`. What the
//! link layer of this host says (`link_layer.rs`) is asked for where a rule or a scheduler needs it.

mod carrier;
mod exporter;
mod link_layer;
mod session;
mod status;
mod tcp;

use std::{
    collections::HashMap,
    fmt,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use vtl_core::netmon::{Counters, Estimator, Link, Metrics, Tracker, best};
use vtl_proto::carrier::Kind;

pub(crate) use carrier::counters as of_carrier;
pub use exporter::{Loopback, serve};
use link_layer::LinkLayers;
pub(crate) use session::counters as of_session;
pub(crate) use tcp::{MAX_READ, TcpWatch, losses, models_the_path, mptcp};

/// Maximum number of hosts. For one more, the host goes whose connections were read longest ago.
const MAX_HOSTS: usize = 1024;
/// Minimum time since the connections of such a host were read: it may have some still.
const SPARED: Duration = Duration::from_secs(60);
/// Pause after a search for such a host that found none.
const SEARCH: Duration = Duration::from_secs(1);
/// How long figures stay after a connection was last read.
const KEPT: Duration = Duration::from_secs(600);

/// What has told of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// Plain TCP connections: flows' own, and proxied ones.
    Tcp,
    /// Carriers of a kind.
    Carrier(Kind),
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp => f.write_str("tcp"),
            Self::Carrier(kind) => kind.fmt(f),
        }
    }
}

/// What one kind of connection has told of a path.
#[derive(Debug)]
struct Source {
    evidence: Evidence,
    estimator: Estimator,
    /// When a connection was last read.
    read: Instant,
    /// When one last had something new.
    news: Instant,
}

/// The paths to other hosts. Shared by threads.
#[derive(Debug)]
pub struct NetMonitor {
    began: Instant,
    links: Arc<LinkLayers>,
    hosts: Mutex<Hosts>,
}

/// What was told, by host.
#[derive(Debug, Default)]
struct Hosts {
    known: HashMap<IpAddr, Vec<Source>>,
    /// When there was no room for another one.
    full: Option<Instant>,
}

impl Default for NetMonitor {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            links: Arc::default(),
            hosts: Mutex::default(),
        }
    }
}

/// The latest reading of one connection.
#[derive(Debug, Default)]
pub(crate) struct Watch(Tracker);

impl NetMonitor {
    fn hosts(&self) -> MutexGuard<'_, Hosts> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a reading of a connection to `peer`, made at `at`.
    pub(crate) fn note(
        &self,
        peer: IpAddr,
        evidence: Evidence,
        watch: &mut Watch,
        at: Instant,
        counters: Counters,
    ) {
        let since = at.saturating_duration_since(self.began).as_nanos();
        let step = watch
            .0
            .advance(u64::try_from(since).unwrap_or(u64::MAX), counters);
        let peer = peer.to_canonical();
        let mut hosts = self.hosts();
        let told = match step {
            Some(_) if !hosts.known.contains_key(&peer) && !hosts.has_room(at) => return,
            Some(_) => hosts.known.entry(peer).or_default(),
            // A connection that is idle keeps what is known of its path, and no more.
            None => match hosts.known.get_mut(&peer) {
                Some(told) => told,
                None => return,
            },
        };
        let found = told.iter().position(|told| told.evidence == evidence);
        let place = match (found, step) {
            (Some(place), _) => place,
            (None, None) => return,
            (None, Some(_)) => {
                told.push(Source {
                    evidence,
                    estimator: Estimator::default(),
                    read: at,
                    news: at,
                });
                told.len() - 1
            }
        };
        let told = &mut told[place];
        told.read = told.read.max(at);
        if let Some(step) = step {
            told.news = told.news.max(at);
            told.estimator.add(&step);
        }
    }

    /// The metrics of the path to an address, by the newest and best evidence; `None` if nothing is known of it.
    pub fn metrics(&self, peer: IpAddr) -> Option<Metrics> {
        self.recent(peer, KEPT)
    }

    /// The same, by evidence of at most this age.
    pub fn recent(&self, peer: IpAddr, age: Duration) -> Option<Metrics> {
        let now = Instant::now();
        let hosts = self.hosts();
        let told = hosts.known.get(&peer.to_canonical())?;
        let kept = told.iter().filter(|told| told.is_kept(now));
        let aged = kept.map(|told| told.aged(now));
        let recent: Vec<_> = aged.filter(|(of, _)| *of <= age).collect();
        Some(best(&recent)?.1)
    }

    /// What the link layer says of the interface by which packets between these addresses leave. Needs a runtime.
    pub(crate) fn link_between(&self, local: IpAddr, peer: IpAddr) -> Link {
        self.links.latest((local, peer))
    }

    /// What one kind of connection has told, at most this long ago.
    pub(crate) fn recent_of(
        &self,
        peer: IpAddr,
        evidence: Evidence,
        age: Duration,
    ) -> Option<Metrics> {
        let now = Instant::now();
        let hosts = self.hosts();
        let told = hosts.known.get(&peer.to_canonical())?;
        let told = told.iter().find(|told| told.evidence == evidence)?;
        let (of, metrics) = told.aged(now);
        (of <= age).then_some(metrics)
    }
}

impl Source {
    fn is_kept(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.read) < KEPT
    }

    /// The age of what it told, and that.
    fn aged(&self, now: Instant) -> (Duration, Metrics) {
        (
            now.saturating_duration_since(self.news),
            self.estimator.metrics(),
        )
    }
}

impl Hosts {
    /// Whether there is room for another host; makes some if it can.
    fn has_room(&mut self, now: Instant) -> bool {
        if self.known.len() < MAX_HOSTS {
            return true;
        }
        let since = |then: Instant| now.saturating_duration_since(then);
        if self.full.is_some_and(|full| since(full) < SEARCH) {
            return false;
        }
        self.known.retain(|_, told| {
            told.retain(|told| told.is_kept(now));
            !told.is_empty()
        });
        if self.known.len() >= MAX_HOSTS {
            let read = |told: &Vec<Source>| told.iter().map(|told| told.read).max();
            let hosts = self.known.iter();
            let hosts = hosts.filter_map(|(peer, told)| Some((read(told)?, *peer)));
            if let Some((read, first)) = hosts.min()
                && since(read) >= SPARED
            {
                self.known.remove(&first);
            }
        }
        let has_room = self.known.len() < MAX_HOSTS;
        self.full = (!has_room).then_some(now);
        has_room
    }
}

#[cfg(test)]
mod tests;
