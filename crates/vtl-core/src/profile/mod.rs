//! Which of the four classes of applications a flow belongs to, told from its first packets that carry data.
//!
//! A [`Classifier`] is fed what a flow carries in both directions, until it has a [`Verdict`] or has seen
//! [`PACKETS`] packets. In order of strength it goes by:
//! 1. the bytes: the protocol, by its greeting or first request (`bytes.rs`, `tls.rs`, `http.rs`);
//! 2. the executable's name, where the protocol carries applications of every kind (TLS, HTTP, SSH), or is unknown;
//! 3. of an unknown protocol, its shape where that is plain (`shape.rs`), else the port, else what is left of the shape.
//!
//! [`Cache`] keeps the verdicts on earlier flows, for flows of the same program to the same destination to begin with.
//!
//! A port whose protocol would have been recognised tells nothing about bytes that were not. What a rule or
//! an application requires wins over every verdict: that is the caller's to see to. Nothing here reads a clock
//! or fails: bytes that mean nothing give no verdict.

mod bytes;
mod cache;
mod class;
mod executable;
mod http;
mod shape;
mod tls;

use std::fmt;

pub use cache::{Cache, KNOWN_FOR, MAX_KNOWN, Program, Source};
pub use class::Profile;

use bytes::{Match, RuledOut, Seen, Step};
use shape::Shape;

/// Packets with data, in both directions together, after which a flow has its verdict or none. The thesis looks at as many.
pub const PACKETS: usize = 10;
/// After this many calls only one in as many is looked at, so that a program that writes byte by byte costs no more.
const CALLS: u32 = 64;
/// Bytes that are kept of each direction's beginning, until there is a verdict.
const HEAD: usize = 2048;

/// What a flow was found to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The class of its application.
    pub profile: Profile,
    /// Its protocol, as people call it, if the bytes show one.
    pub protocol: Option<&'static str>,
    /// What tells, as a short phrase: `TLS to example.org offers h2`. Printable ASCII.
    pub evidence: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.profile, self.evidence)
    }
}

/// The beginning of one direction.
#[derive(Debug, Default)]
struct Head {
    bytes: Vec<u8>,
    /// All of the direction, bytes.
    total: u64,
}

impl Head {
    fn add(&mut self, bytes: &[u8]) {
        let room = HEAD.saturating_sub(self.bytes.len());
        self.bytes
            .extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.total = self.total.saturating_add(bytes.len() as u64);
    }
}

/// Tells one flow's class. At most 4 KiB of memory besides itself, which it gives back as soon as it is done.
#[derive(Debug)]
pub struct Classifier {
    /// Class and name of the executable, if that tells.
    executable: Option<(Profile, &'static str)>,
    port: u16,
    opener: Head,
    accepter: Head,
    accepter_first: bool,
    ruled_out: RuledOut,
    shape: Shape,
    calls: u32,
    done: bool,
    verdict: Option<Verdict>,
}

impl Classifier {
    /// Starts with a flow's first byte. `executable` is the program's path or name, if known; `port` is
    /// the one that the connection was opened to.
    pub fn new(executable: Option<&str>, port: u16) -> Self {
        Self {
            executable: executable.and_then(executable::class),
            port,
            opener: Head::default(),
            accepter: Head::default(),
            accepter_first: false,
            ruled_out: RuledOut::default(),
            shape: Shape::default(),
            calls: 0,
            done: false,
            verdict: None,
        }
    }

    /// Takes bytes from the side that opened the connection, at `now` (ns, of any clock that does not go back).
    /// At a host that accepted it, these are the ones that it receives.
    pub fn sent(&mut self, now: u64, bytes: &[u8]) {
        self.take(now, true, bytes);
    }

    /// Takes bytes to the side that opened the connection.
    pub fn received(&mut self, now: u64, bytes: &[u8]) {
        self.take(now, false, bytes);
    }

    /// The verdict, as soon as there is one. It does not change any more.
    pub fn verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref()
    }

    /// Whether further bytes make no difference: there is a verdict, or there will be none.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Decides by what has come so far, as for a flow that has ended or fallen silent. [`PACKETS`] packets do it, too.
    pub fn conclude(&mut self) {
        if self.done {
            return;
        }
        let found = self.identify(true);
        self.verdict = match found {
            Step::Yes(found) => Some(self.known(found)),
            Step::No | Step::More => self.unknown(),
        };
        self.finish();
    }

    fn take(&mut self, now: u64, opener: bool, bytes: &[u8]) {
        if self.done || bytes.is_empty() {
            return;
        }
        if !opener && self.opener.total == 0 {
            self.accepter_first = true;
        }
        let head = if opener {
            &mut self.opener
        } else {
            &mut self.accepter
        };
        head.add(bytes);
        self.shape.add(now, opener, bytes.len());
        self.calls = self.calls.saturating_add(1);
        let looks = self.calls <= CALLS || self.calls.is_multiple_of(CALLS);
        if self.shape.packets() >= PACKETS {
            self.conclude();
        } else if looks && let Step::Yes(found) = self.identify(false) {
            self.verdict = Some(self.known(found));
            self.finish();
        }
    }

    /// Asks the signatures. `last`: nothing more will come.
    fn identify(&mut self, last: bool) -> Step {
        let seen = Seen {
            opener: &self.opener.bytes,
            accepter: &self.accepter.bytes,
            opener_ended: last || self.opener.bytes.len() >= HEAD,
            accepter_ended: last || self.accepter.bytes.len() >= HEAD,
            opener_total: self.opener.total,
            accepter_first: self.accepter_first,
            port: self.port,
        };
        bytes::identify(&seen, &mut self.ruled_out)
    }

    /// Of a protocol that was recognised.
    fn known(&self, found: Match) -> Verdict {
        let (profile, evidence) = match self.executable {
            Some((profile, name)) if found.general => {
                (profile, format!("{}, by {name}", found.evidence))
            }
            _ => (found.profile, found.evidence),
        };
        Verdict {
            profile,
            protocol: Some(found.protocol),
            evidence,
        }
    }

    /// Of one that was not.
    fn unknown(&self) -> Option<Verdict> {
        let verdict = |profile, evidence| Verdict {
            profile,
            protocol: None,
            evidence,
        };
        if let Some((profile, name)) = self.executable {
            return Some(verdict(profile, format!("executable {name}")));
        }
        let port = Profile::of(self.port).map(|profile| (profile, format!("port {}", self.port)));
        // Of a protocol that `bytes` cannot recognise the port is better evidence than the shape.
        let (strong, weak) = match bytes::recognises(self.port) {
            false => (port, None),
            true if self.opener.total + self.accepter.total == 0 => (None, port),
            true => (None, None),
        };
        let (profile, evidence) = strong
            .or_else(|| self.shape.plain())
            .or(weak)
            .or_else(|| self.shape.exchange())?;
        Some(verdict(profile, evidence))
    }

    fn finish(&mut self) {
        self.done = true;
        (self.opener.bytes, self.accepter.bytes) = (Vec::new(), Vec::new());
    }
}

#[cfg(test)]
mod tests;
