//! Who this host is, and who its peers are (PROTOCOL.md, section 7, "Identity"): a static Ed25519 key for each
//! host, shown in TLS 1.3 as a raw public key (RFC 7250).
//!
//! - `peers`: the files that say which keys are whose, `reach`: and what of this host theirs is;
//! - `certificates`: those of hosts, where an authority says whose a key is;
//! - `tls`: TLS on control connections;
//! - `handshake`: TLS for the keys of sessions.

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

use vtl_control::PeerKey;
use vtl_pool::{
    Certificate,
    key::{PublicKey, SecretKey},
};
use vtl_proto::frame::Side;

use certificates::{Certificates, Uncertified};
use handshake::TAG_KEYS;
use peers::{All, Files, Peer, Policy};
pub(crate) use reach::Reach;

/// The operator's file, unless the daemon is told otherwise.
pub const DEFAULT_PEERS: &str = "/etc/vtl/peers.toml";
/// Where the host's key is, and those that it has learned.
pub const DEFAULT_STATE: &str = "/var/lib/vtl";
/// The host's key in the folder of state.
const HOST_KEY: &str = "host";
/// Peers that one message names.
const PAGE: usize = 50;

/// Why this host has nothing to do with a peer.
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
    #[error("an association with {peer} goes on with another key: it has no carriers")]
    Another { peer: IpAddr },
    #[error("the lists of peers cannot be used, so connections are plain TCP: {0}")]
    Files(String),
}

/// What a peer that is not refused is to this host.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Standing {
    /// What it is called, if it is known.
    pub(crate) name: Option<String>,
    /// What of this host its flows may be carried to.
    pub(crate) reach: Reach,
}

impl Standing {
    /// Why nothing of the peer's is carried to a port of this host, if it may not reach that.
    pub(crate) fn out_of_reach(&self, port: u16) -> Option<String> {
        let name = self.name.as_deref().unwrap_or("a peer that is not listed");
        let why = || format!("port {port} is out of the `reach` of {name} (peers.toml)");
        (!self.reach.contains(port)).then(why)
    }
}

/// Who this host is, and whom it knows.
pub struct Identity {
    public: PublicKey,
    /// Of control connections, and of handshakes for sessions.
    controls: tls::Configs,
    sessions: tls::Configs,
    certificates: Certificates,
    /// Looked at for each control connection, so that an edited file counts from the next one on.
    files: Files,
    /// As the files said last.
    said: Mutex<Said>,
}

/// What counts before a peer can be judged.
#[derive(Clone, Copy, Debug)]
struct Said {
    policy: Policy,
    /// There are ports that peers may not reach.
    limits: bool,
}

impl Said {
    fn of(all: &All) -> Self {
        Self {
            policy: all.policy,
            limits: all.limits(),
        }
    }
}

impl Identity {
    /// Reads the host's key, or makes it.
    ///
    /// # Errors
    /// The key or a list cannot be read or makes no sense, or the key cannot be written.
    pub fn open(state: &Path, listed: &Path) -> Result<Self, String> {
        let key = host_key(state)?;
        let files = Files::new(listed, state);
        // A policy that cannot be read must not become another one later.
        let all = files.read()?;
        let controls = tls::controls(&key).map_err(|error| error.to_string())?;
        let sessions = tls::configs(&key).map_err(|error| error.to_string())?;
        let identity = Self {
            public: key.public(),
            controls,
            sessions,
            certificates: Certificates::new(state),
            files,
            said: Mutex::new(Said::of(&all)),
        };
        // Says what is wrong with it.
        identity.certificate();
        Ok(identity)
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        // Replaced as a whole.
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This host's certificate; empty where it has none. Reads a file.
    pub(crate) fn certificate(&self) -> Vec<u8> {
        self.certificates.own_bytes(self.public)
    }

    /// Whether peers are judged by certificates, as the files said last.
    pub(crate) fn needs_certificates(&self) -> bool {
        self.said().policy == Policy::Ca
    }

    /// TLS for one connection, on the side of its opener or of its acceptor.
    pub(crate) fn tls(&self, opener: Side) -> io::Result<rustls::Connection> {
        let connection = match opener {
            Side::Local => tls::client(&self.controls.0),
            Side::Peer => tls::server(&self.controls.1),
        };
        connection.map_err(io::Error::other)
    }

    /// Begins the handshake for the keys of a session that this host opens: with the first flight. It protects
    /// `bound`.
    pub(crate) fn initiate(&self, bound: Vec<u8>) -> io::Result<(handshake::Initiator, Vec<u8>)> {
        handshake::Initiator::new(&self.sessions.0, bound)
    }

    /// Answers the first flight of a peer, which is to have protected `theirs`, and protects `ours`. `tag_keys`: drawn
    /// at random.
    pub(crate) fn respond(
        &self,
        hello: &[u8],
        theirs: &[u8],
        ours: Vec<u8>,
        tag_keys: &[u8; TAG_KEYS],
    ) -> io::Result<(handshake::Responder, Vec<u8>)> {
        handshake::Responder::new(&self.sessions.1, hello, theirs, ours, tag_keys)
    }

    /// Whether peers must be judged before anything of an association that `opener` has opened is carried, as the
    /// files said last: they must be known, or there are ports that they may not reach.
    pub(crate) fn judges_first(&self, opener: Side) -> bool {
        let said = self.said();
        opener == Side::Peer && said.limits || said.policy != Policy::FirstUse
    }

    /// Whether to have anything to do with who has shown a key, `None` for none, and a certificate for it. `opener` has
    /// opened the association. Where a peer is listed or was learned at the very address that was connected to, it must
    /// be that one. Else, and where the other host has connected, since clients roam and share addresses, the key says
    /// who it is.
    pub(crate) fn judge(
        &self,
        opener: Side,
        peer: IpAddr,
        shown: Option<PublicKey>,
        certificate: Option<&[u8]>,
    ) -> Result<Standing, Refused> {
        self.judge_at(SystemTime::now(), opener, peer, shown, certificate)
    }

    /// The same at a time.
    fn judge_at(
        &self,
        now: SystemTime,
        opener: Side,
        peer: IpAddr,
        shown: Option<PublicKey>,
        certificate: Option<&[u8]>,
    ) -> Result<Standing, Refused> {
        let read = self.files.read();
        // Where the files make no sense, nobody is known.
        let nobody = Said {
            policy: Policy::Known,
            limits: true,
        };
        *self.said() = read.as_ref().map_or(nobody, |all| Said::of(all));
        let all = read.map_err(Refused::Files)?;
        let peer = peer.to_canonical();
        let Some(shown) = shown.filter(|_| all.policy == Policy::Ca) else {
            return self.judge_known(&all, opener, peer, shown);
        };
        // What the operator says of this very host, where it may be and what it reaches, no certificate widens.
        let is_its = |known: &Peer| known.key == shown;
        let is_limited = |known: &Peer| is_its(known) && known.reach.is_some();
        if all.listed().any(is_its) || all.peers.iter().any(is_limited) {
            return self.judge_known(&all, opener, peer, Some(shown));
        }
        let certified = self.certified(&all, (opener, peer), shown, certificate, now);
        // The operator's own word on this very address counts more.
        let mut here = all.listed().filter(|known| known.is_pinned(peer));
        let is_another =
            opener == Side::Local && here.next().is_some_and(|known| known.key != shown);
        match certified {
            Ok(Some(standing)) if !is_another && !all.revoked.contains(&shown) => Ok(standing),
            Ok(_) => self.judge_known(&all, opener, peer, Some(shown)),
            // It may be known without.
            Err(why) => match self.judge_known(&all, opener, peer, Some(shown)) {
                Err(Refused::Uncertified { .. } | Refused::Changed { .. }) => {
                    Err(Refused::Certificate { peer, why })
                }
                other => other,
            },
        }
    }

    /// What a peer is by its certificate, the one that it shows or has shown before; `None` where there is none.
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

    /// The same by keys alone.
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
                    // By another association meanwhile.
                    Ok(false) => return self.judge(opener, peer, Some(shown), None),
                    Ok(true) => {
                        tracing::info!(%peer, key = %shown, "a new peer, trusted on first use");
                    }
                    // No worse than meeting it for the first time again.
                    Err(error) => {
                        tracing::warn!(%peer, key = %shown, %error, "a peer was not learned");
                    }
                }
                Ok(stranger())
            }
        }
    }

    /// This host's key and the peers that it knows, from an index on.
    ///
    /// # Errors
    /// A list cannot be read.
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

    /// Trusts a key, in place of what was learned under that name, at the same addresses and with the
    /// same reach unless others are given.
    ///
    /// # Errors
    /// It is none, the name is listed, or the file cannot be written.
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

    /// Forgets a peer that was learned.
    ///
    /// # Errors
    /// There is none of that name, or the file cannot be written.
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

/// The host's key, made if there is none.
fn host_key(state: &Path) -> Result<SecretKey, String> {
    let path: PathBuf = state.join(format!("{HOST_KEY}.key"));
    std::fs::create_dir_all(state)
        .map_err(|error| format!("cannot make the folder {}: {error}", state.display()))?;
    let _locked = peers::lock(state)?;
    if path.exists() {
        return SecretKey::read(&path).map_err(|error| error.to_string());
    }
    let key = SecretKey::generate().map_err(|error| error.to_string())?;
    // Written over: one without its secret half is worth nothing.
    let _ = std::fs::remove_file(state.join(format!("{HOST_KEY}.pub")));
    key.write(state, HOST_KEY)
        .map_err(|error| error.to_string())?;
    tracing::info!(key = %key.public(), file = %path.display(), "this host has a key now");
    Ok(key)
}

#[cfg(test)]
mod tests;
