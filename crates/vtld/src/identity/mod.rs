//! Authentication of hosts (PROTOCOL.md, section 7, "Identity"): each has a static Ed25519 key, presented in TLS 1.3 as
//! a raw public key (RFC 7250).
//!
//! - `peers`: the files of known peers and their keys; `reach`: the ports of this host that a peer may reach;
//! - `certificates`: certificates of hosts, signed by an authority;
//! - `tls`: TLS on control connections;
//! - `handshake`: the TLS handshake for the keys of sessions.

mod certificates;
pub(crate) mod handshake;
mod peers;
mod reach;
pub(crate) mod tls;

use std::{
    io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use vtl_control::{PeerKey, What};
use vtl_pool::{
    Certificate,
    key::{PublicKey, SecretKey},
};
use vtl_proto::frame::Side;

use crate::events::emit;
use certificates::{Certificates, Uncertified};
use handshake::TAG_KEYS;
use peers::{All, Files, Peer, Policy};
pub(crate) use reach::Reach;

/// Default path of the operator's file of peers.
pub const DEFAULT_PEERS: &str = "/etc/vtl/peers.toml";
/// Default state directory: the host's key, and the keys that it has learned.
pub const DEFAULT_STATE: &str = "/var/lib/vtl";
/// Base name of the host's key in the state directory.
const HOST_KEY: &str = "host";
/// Maximum number of peers in one message.
const PAGE: usize = 50;

/// Why this host refuses a peer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum Refused {
    #[error(
        "the key of {peer} has changed: it is {shown}, and {name} has {known}. Somebody may be in \
         between, or the host was set up anew; its connections are plain TCP. If the new key is right: \
         vtl peer forget {name}, or change it where it is listed"
    )]
    Changed {
        peer: IpAddr,
        name: String,
        known: String,
        shown: String,
    },
    #[error(
        "nobody knows the key of {peer}, {shown}, and the policy is \"known\": its connections are plain \
         TCP. If it is right: vtl peer trust NAME {shown} --address {peer}"
    )]
    Unknown { peer: IpAddr, shown: String },
    #[error(
        "{name} at {peer} shows no key any more: its connections are plain TCP. If it runs an older \
         version now: vtl peer forget {name}"
    )]
    Silent { peer: IpAddr, name: String },
    #[error("{peer} shows no key, and the policy is \"{policy}\": its connections are plain TCP")]
    Nameless { peer: IpAddr, policy: Policy },
    #[error(
        "{peer} has no certificate for its key, {shown}, and the policy is \"ca\": its connections are plain TCP. If \
         it is right: vtl peer sign on the authority's host, or here vtl peer trust NAME {shown} --address {peer}"
    )]
    Uncertified { peer: IpAddr, shown: String },
    #[error("{peer} is refused: {why}; its connections are plain TCP")]
    Certificate { peer: IpAddr, why: Uncertified },
    #[error(
        "the key of {peer}, {shown}, is revoked (`revoked` in peers.toml): its connections are plain TCP"
    )]
    Revoked { peer: IpAddr, shown: String },
    #[error("the key of {peer} changed within an association: its carriers are closed")]
    Another { peer: IpAddr },
    #[error("the lists of peers cannot be used, so connections are plain TCP: {0}")]
    Files(String),
}

/// Name and permissions of a peer that is not refused.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Standing {
    /// Its name, if it is known.
    pub(crate) name: Option<String>,
    /// Ports of this host that its flows may be carried to.
    pub(crate) reach: Reach,
}

impl Standing {
    /// Why the peer may not reach a port of this host; `None` if it may.
    pub(crate) fn out_of_reach(&self, port: u16) -> Option<String> {
        let name = self.name.as_deref().unwrap_or("a peer that is not listed");
        let why = || format!("port {port} is out of the `reach` of {name} (peers.toml)");
        (!self.reach.contains(port)).then(why)
    }
}

/// This host's identity, and the peers that it knows.
pub struct Identity {
    public: PublicKey,
    /// TLS configurations of control connections, and of handshakes for sessions.
    controls: tls::Configs,
    sessions: tls::Configs,
    certificates: Certificates,
    /// The files of peers; checked for each control connection, so an edited file applies from the next one on.
    files: Files,
    /// Settings as of the last read.
    settings: Mutex<Settings>,
}

/// Settings that apply before a peer is authenticated.
#[derive(Clone, Copy, Debug)]
struct Settings {
    policy: Policy,
    /// Some peers may not reach all ports.
    limits: bool,
}

impl Settings {
    fn of(all: &All) -> Self {
        Self {
            policy: all.policy,
            limits: all.limits(),
        }
    }
}

impl Identity {
    /// Reads the host's key, or generates it.
    ///
    /// # Errors
    /// The key or a file of peers cannot be read or is invalid, or the key cannot be written.
    pub fn open(state: &Path, listed: &Path) -> Result<Self, String> {
        let key = host_key(state)?;
        let files = Files::new(listed, state);
        // Fail now: a policy that cannot be read must not be replaced by a default.
        let all = files.read()?;
        let controls = tls::controls(&key).map_err(|error| error.to_string())?;
        let sessions = tls::configs(&key).map_err(|error| error.to_string())?;
        let identity = Self {
            public: key.public(),
            controls,
            sessions,
            certificates: Certificates::new(state),
            files,
            settings: Mutex::new(Settings::of(&all)),
        };
        // Logs errors in it.
        identity.certificate();
        Ok(identity)
    }

    fn settings(&self) -> MutexGuard<'_, Settings> {
        // Poisoning is harmless: replaced as a whole.
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This host's certificate; empty if it has none. Reads a file.
    pub(crate) fn certificate(&self) -> Vec<u8> {
        self.certificates.own_bytes(self.public)
    }

    /// Whether the policy is "ca", as of the last read: peers are authenticated by certificates.
    pub(crate) fn needs_certificates(&self) -> bool {
        self.settings().policy == Policy::Ca
    }

    /// TLS for one control connection. `opener`: the side that has opened it.
    pub(crate) fn tls(&self, opener: Side) -> io::Result<rustls::Connection> {
        let connection = match opener {
            Side::Local => tls::client(&self.controls.0),
            Side::Peer => tls::server(&self.controls.1),
        };
        connection.map_err(io::Error::other)
    }

    /// Starts the handshake for the keys of a session that this host opens. Returns the first flight. `bound`:
    /// negotiation data that the handshake authenticates.
    pub(crate) fn initiate(&self, bound: Vec<u8>) -> io::Result<(handshake::Initiator, Vec<u8>)> {
        handshake::Initiator::new(&self.sessions.0, bound)
    }

    /// Answers a peer's first flight. `theirs`, `ours`: negotiation data of the peer and of this host that the
    /// handshake authenticates. `tag_keys`: random.
    pub(crate) fn respond(
        &self,
        hello: &[u8],
        theirs: &[u8],
        ours: Vec<u8>,
        tag_keys: &[u8; TAG_KEYS],
    ) -> io::Result<(handshake::Responder, Vec<u8>)> {
        handshake::Responder::new(&self.sessions.1, hello, theirs, ours, tag_keys)
    }

    /// Whether the peer of an association opened by `opener` must be authenticated before anything is carried, as of
    /// the last read: the policy requires known peers, or the peer is a client and some ports are out of reach.
    pub(crate) fn judges_first(&self, opener: Side) -> bool {
        let settings = self.settings();
        opener == Side::Peer && settings.limits || settings.policy != Policy::FirstUse
    }

    /// Authenticates a peer by its key (`None`: it has none) and the certificate for it. `opener`: the side that has
    /// opened the association. If this host has connected to an address that is pinned to a peer, listed or learned,
    /// it must be that peer. Otherwise, and for clients, which roam and share addresses, the key alone identifies the
    /// peer.
    pub(crate) fn judge(
        &self,
        opener: Side,
        peer: IpAddr,
        shown: Option<PublicKey>,
        certificate: Option<&[u8]>,
    ) -> Result<Standing, Refused> {
        self.judge_at(SystemTime::now(), opener, peer, shown, certificate)
    }

    /// The same, at time `now`.
    fn judge_at(
        &self,
        now: SystemTime,
        opener: Side,
        peer: IpAddr,
        shown: Option<PublicKey>,
        certificate: Option<&[u8]>,
    ) -> Result<Standing, Refused> {
        let read = self.files.read();
        // With invalid files nobody is known.
        let nobody = Settings {
            policy: Policy::Known,
            limits: true,
        };
        *self.settings() = read.as_ref().map_or(nobody, |all| Settings::of(all));
        let all = read.map_err(Refused::Files)?;
        let peer = peer.to_canonical();
        let Some(shown) = shown.filter(|_| all.policy == Policy::Ca) else {
            return self.judge_known(&all, opener, peer, shown);
        };
        // A certificate must not widen the operator's own entry for this host (addresses, reach).
        let is_its = |known: &Peer| known.key == shown;
        let is_limited = |known: &Peer| is_its(known) && known.reach.is_some();
        if all.listed().any(is_its) || all.peers.iter().any(is_limited) {
            return self.judge_known(&all, opener, peer, Some(shown));
        }
        let certified = self.certified(&all, (opener, peer), shown, certificate, now);
        // The operator's own entry for this very address takes precedence.
        let mut here = all.listed().filter(|known| known.is_pinned(peer));
        let is_another =
            opener == Side::Local && here.next().is_some_and(|known| known.key != shown);
        match certified {
            Ok(Some(standing)) if !is_another && !all.revoked.contains(&shown) => Ok(standing),
            Ok(_) => self.judge_known(&all, opener, peer, Some(shown)),
            // The peer may be known without a certificate.
            Err(why) => match self.judge_known(&all, opener, peer, Some(shown)) {
                Err(Refused::Uncertified { .. } | Refused::Changed { .. }) => {
                    Err(Refused::Certificate { peer, why })
                }
                other => other,
            },
        }
    }

    /// Standing of a peer by its certificate, which it presents or has presented before; `None` if there is none.
    fn certified(
        &self,
        all: &All,
        place: (Side, IpAddr),
        key: PublicKey,
        certificate: Option<&[u8]>,
        now: SystemTime,
    ) -> Result<Option<Standing>, Uncertified> {
        let certificate = match certificate.filter(|bytes| !bytes.is_empty()) {
            Some(bytes) => Some(Certificate::parse(bytes)?),
            None => self.certificates.of(key),
        };
        let Some(certificate) = certificate else {
            return Ok(None);
        };
        let standing = certificates::check(all, &certificate, place, key, now)?;
        self.certificates.keep(&certificate, now);
        Ok(Some(standing))
    }

    /// Authenticates a peer by its key alone.
    fn judge_known(
        &self,
        all: &All,
        opener: Side,
        peer: IpAddr,
        shown: Option<PublicKey>,
    ) -> Result<Standing, Refused> {
        let policy = all.policy;
        let stranger = || Standing {
            name: None,
            reach: all.reach.clone(),
        };
        if let Some(shown) = shown.filter(|shown| all.revoked.contains(shown)) {
            let shown = shown.to_string();
            return Err(Refused::Revoked { peer, shown });
        }
        let mut pinned = all.peers.iter().filter(|_| opener == Side::Local);
        let first = pinned.find(|known| known.is_pinned(peer));
        let Some(shown) = shown else {
            return match first {
                Some(known) => Err(Refused::Silent {
                    peer,
                    name: known.name.clone(),
                }),
                None if policy != Policy::FirstUse => Err(Refused::Nameless { peer, policy }),
                None => Ok(stranger()),
            };
        };
        let mut of_key = all.peers.iter().filter(|known| known.key == shown);
        if let Some(first) = first {
            return match of_key.find(|known| known.is_pinned(peer)) {
                Some(known) => Ok(standing(all, known)),
                None => Err(Refused::Changed {
                    peer,
                    name: first.name.clone(),
                    known: first.key.to_string(),
                    shown: shown.to_string(),
                }),
            };
        }
        if let Some(known) = of_key.find(|known| known.may_be_at(peer)) {
            return Ok(standing(all, known));
        }
        match (policy, opener) {
            (Policy::Known, _) => Err(Refused::Unknown {
                peer,
                shown: shown.to_string(),
            }),
            (Policy::Ca, _) => Err(Refused::Uncertified {
                peer,
                shown: shown.to_string(),
            }),
            (Policy::FirstUse, Side::Peer) => Ok(stranger()),
            (Policy::FirstUse, Side::Local) => {
                let learned = self.files.change(|peers| {
                    let is_new = !peers.iter().any(|known| known.is_pinned(peer));
                    if is_new {
                        peers.push(Peer::learned(peer, shown));
                    }
                    Ok(is_new)
                });
                match learned {
                    // Learned by another association meanwhile.
                    Ok(false) => return self.judge(opener, peer, Some(shown), None),
                    Ok(true) => {
                        tracing::info!(%peer, key = %shown, "identity: new peer, trusted on first use");
                        let key = shown.to_string().into();
                        emit(What::PeerLearned { peer, key });
                    }
                    // Harmless: the next contact is a first use again.
                    Err(error) => {
                        tracing::warn!(%peer, key = %shown, %error, "identity: cannot store the key of a new peer: its next contact is a first one again");
                    }
                }
                Ok(stranger())
            }
        }
    }

    /// This host's key, and a page of the peers that it knows, from an index on.
    ///
    /// # Errors
    /// A file of peers cannot be read.
    pub(crate) fn list(&self, from: usize) -> Result<vtl_control::Peers, String> {
        let all = self.files.read()?;
        let row = |(index, peer): (usize, &Peer)| vtl_control::Peer {
            known: peer.to_key(),
            listed: index < all.listed,
            certificate: None,
        };
        let certified = self.certificates.peers(&all, SystemTime::now());
        let count = all.peers.len() + certified.len();
        let peers = all.peers.iter().enumerate().map(row).chain(certified);
        Ok(vtl_control::Peers {
            key: self.public.to_string(),
            policy: all.policy.to_string(),
            reach: all.reach.to_texts(),
            certificate: self.certificates.own_told(self.public),
            authorities: all.authorities.iter().map(Peer::to_key).collect(),
            peers: peers.skip(from).take(PAGE).collect(),
            more: Some(from.saturating_add(PAGE)).filter(|more| *more < count),
        })
    }

    /// Trusts a key. Replaces what was learned under that name, and keeps its addresses and reach unless
    /// others are given.
    ///
    /// # Errors
    /// The key is invalid, the name is the operator's, or the file cannot be written.
    pub(crate) fn trust(&self, key: &PeerKey) -> Result<(), String> {
        let mut new = Peer::parse(key)?;
        self.files.change(|peers| {
            match peers.iter().position(|peer| peer.name == new.name) {
                Some(at) => {
                    let before = peers.remove(at);
                    if new.addresses.is_empty() {
                        new.addresses = before.addresses;
                    }
                    new.reach = new.reach.or(before.reach);
                }
                None => self.files.check_unlisted(&new.name)?,
            }
            peers.push(new);
            Ok(())
        })
    }

    /// Forgets a learned peer.
    ///
    /// # Errors
    /// No learned peer of that name, or the file cannot be written.
    pub(crate) fn forget(&self, name: &str) -> Result<(), String> {
        self.files.change(|peers| {
            let before = peers.len();
            peers.retain(|peer| peer.name != name);
            if peers.len() == before {
                self.files.check_unlisted(name)?;
                return Err(format!("there is no peer {name}: vtl peer list"));
            }
            Ok(())
        })
    }
}

fn standing(all: &All, known: &Peer) -> Standing {
    Standing {
        name: Some(known.name.clone()),
        reach: all.reach_of(known),
    }
}

/// Reads the host's key; generates it if there is none.
fn host_key(state: &Path) -> Result<SecretKey, String> {
    let path: PathBuf = state.join(format!("{HOST_KEY}.key"));
    std::fs::create_dir_all(state)
        .map_err(|error| format!("cannot make the folder {}: {error}", state.display()))?;
    let _locked = peers::lock(state)?;
    if path.exists() {
        return SecretKey::read(&path).map_err(|error| error.to_string());
    }
    let key = SecretKey::generate().map_err(|error| error.to_string())?;
    // A public key without its secret half is useless: overwrite it.
    let _ = std::fs::remove_file(state.join(format!("{HOST_KEY}.pub")));
    key.write(state, HOST_KEY)
        .map_err(|error| error.to_string())?;
    tracing::info!(key = %key.public(), file = %path.display(), "identity: key generated");
    Ok(key)
}

#[cfg(test)]
mod tests;
