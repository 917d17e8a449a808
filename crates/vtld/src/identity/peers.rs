//! Files of peers: `peers.toml`, the operator's, and `known_peers.toml`, vtld's own, like ssh's `ssh_known_hosts` and
//! `known_hosts`.

use std::{
    fmt, fs, io,
    io::Write,
    net::IpAddr,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use toml::Value;
use vtl_control::PeerKey;
use vtl_pool::{certificate::is_name, key::PublicKey};

use super::reach::Reach;
use crate::hooker::rules::Prefix;

/// Maximum size of a file, bytes.
const MAX_FILE: u64 = 4 << 20;
/// Maximum number of learned peers.
const MAX_LEARNED: usize = 10_000;
/// Maximum number of addresses of one peer.
const MAX_ADDRESSES: usize = 32;
/// File of learned peers, in the state directory.
const LEARNED: &str = "known_peers.toml";
/// Lock file of daemons that share a state directory. Only root may open it, since anybody who can open it can lock it.
const LOCK: &str = "lock";

/// Policy: whose keys are accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Policy {
    /// Known peers, and unknown ones on first use.
    #[default]
    FirstUse,
    /// Known peers only.
    Known,
    /// Known peers, and hosts with a certificate of an authority.
    Ca,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FirstUse => "first-use",
            Self::Known => "known",
            Self::Ca => "ca",
        })
    }
}

/// A peer as written in a file. Unknown fields are errors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    key: String,
    #[serde(default)]
    addresses: Vec<String>,
    reach: Option<Value>,
}

impl Entry {
    fn parse(self) -> Result<Peer, String> {
        let name = self.name.clone();
        let reach = reach(self.reach.as_ref()).map_err(|error| format!("{name}: {error}"))?;
        Peer::parse(&PeerKey {
            name: self.name,
            key: self.key,
            addresses: self.addresses,
            reach: reach.and_then(|reach| reach.to_texts()),
        })
    }
}

fn reach(written: Option<&Value>) -> Result<Option<Reach>, String> {
    written.map(Reach::parse).transpose()
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    policy: Policy,
    reach: Option<Value>,
    #[serde(default)]
    peer: Vec<Entry>,
    #[serde(default)]
    ca: Vec<Entry>,
    #[serde(default)]
    revoked: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Learned {
    peer: Vec<PeerKey>,
}

/// A known peer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Peer {
    pub(super) name: String,
    pub(super) key: PublicKey,
    /// Its addresses; empty: anywhere.
    pub(super) addresses: Vec<Prefix>,
    /// Ports of this host that its flows may be carried to, if limited for this peer.
    pub(super) reach: Option<Reach>,
}

impl Peer {
    /// Parses a peer.
    ///
    /// # Errors
    /// The name, the key, an address or the reach is invalid, or there are too many addresses.
    pub(super) fn parse(written: &PeerKey) -> Result<Self, String> {
        let PeerKey {
            name,
            key,
            addresses,
            reach,
        } = written;
        if !is_name(name) {
            return Err(format!(
                "{name:?} is no name: up to 253 letters, digits, dots, colons, hyphens and underscores"
            ));
        }
        let parsed = PublicKey::parse(key)
            .ok_or_else(|| format!("{name} has no key: {key:?} is not 64 hexadecimal digits"))?;
        if addresses.len() > MAX_ADDRESSES {
            return Err(format!(
                "{name} has more than {MAX_ADDRESSES} addresses: use prefixes"
            ));
        }
        let addresses = addresses.iter().map(|text| {
            text.parse()
                .map_err(|error| format!("{name}: {text:?}: {error}"))
        });
        let reach = reach.as_deref().map(|texts| {
            Reach::from_texts(Some(texts)).map_err(|error| format!("{name}: {error}"))
        });
        Ok(Self {
            name: name.clone(),
            key: parsed,
            reach: reach.transpose()?,
            addresses: addresses.collect::<Result<_, String>>()?,
        })
    }

    pub(super) fn to_key(&self) -> PeerKey {
        PeerKey {
            name: self.name.clone(),
            key: self.key.to_string(),
            addresses: self.addresses.iter().map(ToString::to_string).collect(),
            reach: self.reach.as_ref().and_then(Reach::to_texts),
        }
    }

    /// A peer learned on first use.
    pub(super) fn learned(address: IpAddr, key: PublicKey) -> Self {
        Self {
            name: address.to_string(),
            key,
            addresses: vec![Prefix::from(address)],
            reach: None,
        }
    }

    /// Whether it may be at an address.
    pub(super) fn may_be_at(&self, address: IpAddr) -> bool {
        self.addresses.is_empty() || self.addresses.iter().any(|prefix| prefix.contains(address))
    }

    /// Whether the address itself, not just a prefix, is listed as this peer's.
    pub(super) fn is_pinned(&self, address: IpAddr) -> bool {
        self.addresses.contains(&Prefix::from(address))
    }
}

/// Identifies the version of a file (inode, size, times); `None` if there is none.
pub(super) type Stamp = Option<[i64; 5]>;

/// Minimum age of a change for a stamp to be reliable: a younger file may change again without new times.
const YOUNG: Duration = Duration::from_millis(100);

/// Contents of both files.
#[derive(Debug)]
pub(super) struct All {
    pub(super) policy: Policy,
    /// Ports that flows of peers that are not listed may be carried to.
    pub(super) reach: Reach,
    /// The listed peers, then the learned ones.
    pub(super) peers: Vec<Peer>,
    /// Authorities whose certificates are accepted.
    pub(super) authorities: Vec<Peer>,
    /// Revoked keys: refused even if known.
    pub(super) revoked: Vec<PublicKey>,
    /// Number of listed peers in `peers`.
    pub(super) listed: usize,
}

/// Paths of both files, and their contents as of the last read.
#[derive(Debug)]
pub(super) struct Files {
    listed: PathBuf,
    /// The state directory, which daemons of several network namespaces may share.
    state: PathBuf,
    known: Mutex<Option<([Stamp; 2], Arc<All>)>>,
}

/// Locks a state directory against changes by other daemons.
///
/// # Errors
/// The lock file cannot be opened or locked.
pub(super) fn lock(state: &Path) -> Result<Flock<fs::File>, String> {
    let mut options = fs::OpenOptions::new();
    let opened = options
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(state.join(LOCK))
        .map_err(|error| error.to_string());
    let locked = opened.and_then(|file| {
        Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, error)| error.to_string())
    });
    locked.map_err(|error| format!("cannot lock {}: {error}", state.display()))
}

impl All {
    /// Whether the reach of any peer is limited.
    pub(super) fn limits(&self) -> bool {
        let is_limited = |peer: &Peer| peer.reach.as_ref().is_some_and(Reach::is_limited);
        let mut all = self.peers.iter().chain(&self.authorities);
        self.reach.is_limited() || all.any(is_limited)
    }

    /// The peers listed by the operator.
    pub(super) fn listed(&self) -> impl Iterator<Item = &Peer> {
        self.peers[..self.listed].iter()
    }

    /// The reach of a peer: its own; all ports if it is listed without one; else the default.
    pub(super) fn reach_of(&self, peer: &Peer) -> Reach {
        let is_listed = self.listed().any(|listed| listed == peer);
        match &peer.reach {
            Some(reach) => reach.clone(),
            None if is_listed => Reach::default(),
            None => self.reach.clone(),
        }
    }
}

impl Files {
    pub(super) fn new(listed: &Path, state: &Path) -> Self {
        Self {
            listed: listed.to_owned(),
            state: state.to_owned(),
            known: Mutex::default(),
        }
    }

    fn learned(&self) -> PathBuf {
        self.state.join(LEARNED)
    }

    /// Reads the files if they have changed since the last time; cached, since strangers can trigger it at any rate.
    ///
    /// # Errors
    /// A file cannot be read or is invalid: which, and why.
    pub(super) fn read(&self) -> Result<Arc<All>, String> {
        let learned = self.learned();
        let now = SystemTime::now();
        let stamps = [&self.listed, &learned].map(|path| stamp(path));
        // Poisoning is harmless: replaced as a whole.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((as_of, all)) = &*known
            && *as_of == stamps
        {
            return Ok(Arc::clone(all));
        }
        let mut all = read(&self.listed)?;
        all.peers.extend(read(&learned)?.peers);
        let all = Arc::new(all);
        let is_settled = stamps.iter().flatten().all(|stamp| is_older(stamp, now));
        *known = is_settled.then(|| (stamps, Arc::clone(&all)));
        Ok(all)
    }

    /// Changes the learned peers, unless `change` fails.
    ///
    /// # Errors
    /// Those of `change`; too many peers, or the file cannot be read or written.
    pub(super) fn change<T>(
        &self,
        change: impl FnOnce(&mut Vec<Peer>) -> Result<T, String>,
    ) -> Result<T, String> {
        let _locked = lock(&self.state)?;
        let path = self.learned();
        let mut learned = read(&path)?.peers;
        let result = change(&mut learned)?;
        if learned.len() > MAX_LEARNED {
            return Err(format!(
                "{} has {MAX_LEARNED} peers: vtl peer forget those that are gone",
                path.display()
            ));
        }
        let written = Learned {
            peer: learned.iter().map(Peer::to_key).collect(),
        };
        let text = toml::to_string(&written).map_err(|error| error.to_string())?;
        let head = "# Keys of hosts that this one has connected to: vtl peer.\n\n";
        let text = format!("{head}{text}");
        if text.len() as u64 > MAX_FILE {
            return Err(format!(
                "{} would be longer than {} MiB: give peers shorter lists of ports, or forget those that are gone",
                path.display(),
                MAX_FILE >> 20
            ));
        }
        replace(&path, &text)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        Ok(result)
    }

    /// Checks that no listed peer has this name.
    ///
    /// # Errors
    /// The operator's file lists it, or cannot be read.
    pub(super) fn check_unlisted(&self, name: &str) -> Result<(), String> {
        let listed = read(&self.listed)?.peers;
        match listed.iter().any(|peer| peer.name == name) {
            true => Err(format!(
                "{name} stands in {}: change it there",
                self.listed.display()
            )),
            false => Ok(()),
        }
    }
}

pub(super) fn stamp(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    let (ino, size) = (meta.ino().cast_signed(), meta.size().cast_signed());
    Some([ino, size, meta.mtime(), meta.ctime(), meta.ctime_nsec()])
}

/// Whether a stamp was older than [`YOUNG`] at `now`.
fn is_older([.., seconds, nanoseconds]: &[i64; 5], now: SystemTime) -> bool {
    let changed = Duration::new(seconds.cast_unsigned(), *nanoseconds as u32);
    (now.duration_since(UNIX_EPOCH)).is_ok_and(|now| now > changed + YOUNG)
}

/// Replaces a file atomically.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut options = fs::OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)
}

fn read(path: &Path) -> Result<All, String> {
    let failed = |error: &dyn fmt::Display| format!("{}: {error}", path.display());
    let text = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(failed(&error)),
        Ok(meta) if !meta.is_file() || meta.len() > MAX_FILE => {
            return Err(failed(&format_args!(
                "no file of at most {} MiB",
                MAX_FILE >> 20
            )));
        }
        Ok(_) => fs::read_to_string(path).map_err(|error| failed(&error))?,
    };
    let written: Written = toml::from_str(&text).map_err(|error| failed(&error))?;
    let parse = |entries: Vec<Entry>| -> Result<Vec<Peer>, String> {
        let peers: Result<_, _> = entries.into_iter().map(Entry::parse).collect();
        peers.map_err(|error| failed(&error))
    };
    let (peers, authorities) = (parse(written.peer)?, parse(written.ca)?);
    check_authorities(written.policy, &authorities).map_err(|error| failed(&error))?;
    let revoked = written.revoked.iter().map(|text| {
        let no_key = || {
            failed(&format!(
                "{text:?} in `revoked` is no key: 64 hexadecimal digits"
            ))
        };
        PublicKey::parse(text).ok_or_else(no_key)
    });
    let reach = reach(written.reach.as_ref()).map_err(|error| failed(&error))?;
    Ok(All {
        policy: written.policy,
        reach: reach.unwrap_or_default(),
        listed: peers.len(),
        peers,
        authorities,
        revoked: revoked.collect::<Result<_, _>>()?,
    })
}

/// Rejects contradictory settings of authorities and policy, which would otherwise be ignored.
fn check_authorities(policy: Policy, authorities: &[Peer]) -> Result<(), String> {
    match (policy, authorities) {
        (Policy::Ca, []) => Err("policy = \"ca\" wants a [[ca]], with name and key".into()),
        (Policy::FirstUse | Policy::Known, [ca, ..]) => Err(format!(
            "[[ca]] {} counts for nothing with policy = \"{policy}\": set policy = \"ca\", or take it out",
            ca.name
        )),
        _ => match authorities.iter().find(|ca| !ca.addresses.is_empty()) {
            Some(ca) => Err(format!(
                "[[ca]] {} has addresses: they stand in its certificates",
                ca.name
            )),
            None => Ok(()),
        },
    }
}
