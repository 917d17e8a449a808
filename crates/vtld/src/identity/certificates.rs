//! Certificates of hosts, for the policy "ca": signed with an operator's key, they bind a host's key to its name and
//! addresses, with an expiry. Exchanged on control connections (PROTOCOL.md, section 7, "Certificates").

use std::{
    net::IpAddr,
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use vtl_control::{HostCertificate, PeerKey};
use vtl_pool::{Certificate, certificate::Malformed, key::PublicKey};
use vtl_proto::frame::Side;

use super::{
    Standing,
    peers::{All, Stamp, stamp},
};
use crate::hooker::rules::Prefix;

/// File name of this host's certificate, in the state directory.
const OWN: &str = "host.crt";
/// Maximum number of certificates kept of other hosts.
const MAX_SHOWN: usize = 4096;

// Every certificate fits into its frame.
const _: () = assert!(vtl_pool::certificate::MAX_CERTIFICATE <= vtl_proto::frame::MAX_CERTIFICATE);

/// Why a certificate is rejected.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum Uncertified {
    #[error("its certificate cannot be used: {0}")]
    Malformed(#[from] Malformed),
    #[error(
        "its certificate, for {name}, is signed with {signer}, which is no [[ca]] of peers.toml"
    )]
    Signer { name: String, signer: String },
    #[error(
        "its certificate, for {name}, is for another key, {certified}: install the one for {shown} there"
    )]
    Key {
        name: String,
        certified: String,
        shown: String,
    },
    #[error("the certificate of {name} has expired at {expiry}: sign another one (vtl peer sign)")]
    Expired { name: String, expiry: String },
    #[error("its certificate calls it {name}, and {known} is listed as the key of {name}")]
    Name { name: String, known: String },
    #[error(
        "the certificate of {name} is for {addresses}: sign one with --address if this is its place, too"
    )]
    Address { name: String, addresses: String },
}

/// Checks a certificate for the host with `key` at an address; this host has connected to that if `opener` is
/// [`Side::Local`].
pub(super) fn check(
    all: &All,
    certificate: &Certificate,
    (opener, peer): (Side, IpAddr),
    key: PublicKey,
    now: SystemTime,
) -> Result<Standing, Uncertified> {
    let name = certificate.name.clone();
    let signer = all
        .authorities
        .iter()
        .find(|ca| ca.key == certificate.signer);
    let Some(ca) = signer else {
        let signer = certificate.signer.to_string();
        return Err(Uncertified::Signer { name, signer });
    };
    if certificate.key != key {
        return Err(Uncertified::Key {
            name,
            certified: certificate.key.to_string(),
            shown: key.to_string(),
        });
    }
    if certificate.has_expired(now) {
        let expiry = certificate.expiry().to_string();
        return Err(Uncertified::Expired { name, expiry });
    }
    let mut listed = all.listed().filter(|listed| listed.name == name);
    if let Some(other) = listed.find(|listed| listed.key != key) {
        let known = other.key.to_string();
        return Err(Uncertified::Name { name, known });
    }
    let addresses = prefixes(certificate);
    // A client is identified by its key; a server must be the one meant by its address.
    let is_anywhere = addresses.is_empty() && opener == Side::Peer;
    if !is_anywhere && !addresses.iter().any(|prefix| prefix.contains(peer)) {
        let addresses: Vec<_> = addresses.iter().map(ToString::to_string).collect();
        let addresses = match addresses.is_empty() {
            true => "no address, so only for hosts that connect".to_owned(),
            false => addresses.join(", "),
        };
        return Err(Uncertified::Address { name, addresses });
    }
    let reach = ca.reach.clone().unwrap_or_else(|| all.reach.clone());
    Ok(Standing {
        name: Some(name),
        reach,
    })
}

fn prefixes(certificate: &Certificate) -> Vec<Prefix> {
    let addresses = certificate.addresses.iter();
    addresses
        .map(|(address, bits)| Prefix::new(*address, *bits))
        .collect()
}

/// A certificate's contents, for commands.
fn told(certificate: &Certificate) -> HostCertificate {
    HostCertificate {
        name: certificate.name.clone(),
        signer: certificate.signer.to_string(),
        addresses: prefixes(certificate)
            .iter()
            .map(ToString::to_string)
            .collect(),
        expires: certificate.expiry().to_string(),
    }
}

/// This host's certificate.
#[derive(Clone, Debug, Default)]
struct Own {
    bytes: Vec<u8>,
    told: Option<HostCertificate>,
}

/// This host's own certificate, and the valid ones of other hosts.
#[derive(Debug)]
pub(super) struct Certificates {
    path: PathBuf,
    own: Mutex<(Stamp, Own)>,
    /// Certificates presented by other hosts; checked anew on each use. Not kept beyond [`MAX_SHOWN`].
    shown: Mutex<Vec<Certificate>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // Poisoning is harmless: no partial updates.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Certificates {
    /// `state`: the state directory.
    pub(super) fn new(state: &std::path::Path) -> Self {
        Self {
            path: state.join(OWN),
            own: Mutex::default(),
            shown: Mutex::default(),
        }
    }

    /// This host's certificate, if it is for `key`; read again if the file has changed.
    fn own(&self, key: PublicKey) -> Own {
        let stamp = stamp(&self.path);
        let mut known = lock(&self.own);
        if known.0 != stamp {
            *known = (stamp, Own::default());
            match stamp.map(|_| Certificate::read(&self.path)).transpose() {
                Ok(None) => {}
                Ok(Some((_, read))) if read.key != key => {
                    let file = self.path.display();
                    tracing::error!(%file, certified = %read.key, %key, "identity: certificate ignored: it certifies another key; have this host's signed anew");
                }
                Ok(Some((bytes, read))) => {
                    let (name, expires) = (&read.name, read.expiry());
                    if read.has_expired(SystemTime::now()) {
                        tracing::warn!(name, %expires, "identity: certificate expired: have it signed anew");
                    } else {
                        tracing::info!(name, %expires, "identity: certificate loaded");
                    }
                    let told = Some(told(&read));
                    known.1 = Own { bytes, told };
                }
                Err(error) => tracing::error!(%error, "identity: certificate ignored"),
            }
        }
        known.1.clone()
    }

    /// This host's certificate, encoded; empty if it has none.
    pub(super) fn own_bytes(&self, key: PublicKey) -> Vec<u8> {
        self.own(key).bytes
    }

    /// Contents of this host's certificate, for commands.
    pub(super) fn own_told(&self, key: PublicKey) -> Option<HostCertificate> {
        self.own(key).told
    }

    /// Keeps a valid certificate, in place of others for its key; drops expired ones.
    pub(super) fn keep(&self, certificate: &Certificate, now: SystemTime) {
        let mut shown = lock(&self.shown);
        shown.retain(|other| other.key != certificate.key && !other.has_expired(now));
        if shown.len() < MAX_SHOWN {
            shown.push(certificate.clone());
        }
    }

    /// The certificate for a key that was presented before.
    pub(super) fn of(&self, key: PublicKey) -> Option<Certificate> {
        let shown = lock(&self.shown);
        shown
            .iter()
            .find(|certificate| certificate.key == key)
            .cloned()
    }

    /// The hosts whose certificates are kept and valid by the current files.
    pub(super) fn peers(&self, all: &All, now: SystemTime) -> Vec<vtl_control::Peer> {
        let shown = lock(&self.shown);
        let is_good = |certificate: &&Certificate| {
            let ca = all
                .authorities
                .iter()
                .any(|ca| ca.key == certificate.signer);
            ca && !certificate.has_expired(now) && !all.revoked.contains(&certificate.key)
        };
        let row = |certificate: &Certificate| vtl_control::Peer {
            known: PeerKey {
                name: certificate.name.clone(),
                key: certificate.key.to_string(),
                addresses: prefixes(certificate)
                    .iter()
                    .map(ToString::to_string)
                    .collect(),
                reach: None,
            },
            listed: false,
            certificate: Some(told(certificate)),
        };
        shown.iter().filter(is_good).map(row).collect()
    }
}
