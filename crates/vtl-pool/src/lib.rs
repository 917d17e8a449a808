//! Graft packages and the pool of a host: no sockets, no kernel.
//!
//! A package is one file, `NAME-VERSION.vtlg`: a tar archive, reproducible to the byte, of a
//! manifest, the compiled eBPF object, and an Ed25519 signature over both.
//!
//! - [`allowlist`]: the allow list for objects;
//! - [`object`]: an object's description, read from its ELF sections;
//! - [`manifest`]: a package's manifest, and its check against the object;
//! - [`key`]: signing keys, and the keys that a host trusts;
//! - [`certificate`]: signed statements about the keys of hosts;
//! - [`revocations`]: packages and keys that a host rejects in spite of the signature;
//! - [`index`]: a publisher's signed list of its newest packages;
//! - [`package`]: the file;
//! - [`pool`]: the grafts that a host may use.
//!
//! Packages are untrusted input: all sizes are bounded, and every refusal is one sentence.

#![deny(unsafe_code)]

pub mod allowlist;
pub mod certificate;
mod elf;
pub mod index;
pub mod key;
pub mod manifest;
pub mod object;
pub mod package;
pub mod pool;
pub mod revocations;

use std::{io, path::PathBuf};

pub use certificate::Certificate;
pub use index::Index;
pub use manifest::{Manifest, Version};
pub use package::Package;
pub use pool::Pool;

/// Reasons for refusing a package, a key or a file: one sentence each.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// The operation, as a verb.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file is longer than the limit.
    #[error("{what} has more than {max} bytes")]
    TooLong {
        /// The file or part that is too long.
        what: String,
        /// The limit.
        max: usize,
    },
    /// The object does not describe itself as a graft.
    #[error("not a usable graft object: {0}")]
    BadObject(String),
    /// The object contains something that is not on the allow list.
    #[error("not allowed in a graft: {0}")]
    NotAllowed(String),
    /// The manifest cannot be understood.
    #[error("the manifest is not usable: {0}")]
    BadManifest(String),
    /// The manifest contradicts the object.
    #[error(
        "the manifest contradicts the object: {key} is {claimed} in the manifest, {actual} in the object"
    )]
    Lie {
        /// The contradicting key.
        key: &'static str,
        /// In the manifest.
        claimed: String,
        /// In the object.
        actual: String,
    },
    /// A claimed service to which no transport function of the object contributes.
    #[error(
        "the manifest contradicts the object: nothing in it provides {services}; it consists of {functions}"
    )]
    Unfounded {
        /// The services.
        services: String,
        /// The object's transport functions.
        functions: String,
    },
    /// The file is no package.
    #[error("not a graft package: {0}")]
    NotAPackage(String),
    /// The package has no signature.
    #[error("the package is not signed: sign it with `vtl graft sign`")]
    Unsigned,
    /// The signature does not match the content.
    #[error("invalid signature: the package was altered after it was signed")]
    Tampered,
    /// The signature is valid, but its key is not trusted.
    #[error("the package is signed with a key that this host does not trust ({0})")]
    Untrusted(String),
    /// The package is revoked, or the list of revocations is unusable.
    #[error("{0}")]
    Revoked(String),
    /// The index is malformed, or rejects the package.
    #[error("{0}")]
    Index(String),
    /// Built for another wire version.
    #[error("graft \"{name}\" speaks wire version {its}, this host speaks {ours}")]
    Wire {
        /// The graft.
        name: String,
        /// Its version.
        its: u32,
        /// This build's.
        ours: u32,
    },
    /// Built for another version of the interface between programs and daemon.
    #[error(
        "graft \"{name}\" is built for interface version {its}, this host has {ours}: build it anew"
    )]
    Interface {
        /// The graft.
        name: String,
        /// Its version.
        its: u32,
        /// This build's.
        ours: u32,
    },
    /// The gid belongs to another graft.
    #[error("graft id {gid} is taken by \"{name}\": one of the two needs another")]
    GidTaken {
        /// The id.
        gid: u16,
        /// Name of the other graft.
        name: String,
    },
    /// The name belongs to another graft.
    #[error("{0}")]
    NameTaken(String),
    /// A key file does not hold a key.
    #[error("{}: {why}", path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
}

/// Latest expiry of what is signed: 9999-12-31T23:59:59Z, the last second that RFC 3339 can express.
pub(crate) const LAST_EXPIRY: u64 = 253_402_300_799;

/// This crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Reads a file of at most `max` bytes.
///
/// # Errors
/// [`Error::File`], [`Error::TooLong`].
pub fn read_bounded(path: &std::path::Path, max: usize) -> Result<Vec<u8>> {
    let failed = |source| Error::File {
        what: "read",
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    read_from(file, max, || path.display().to_string())?.map_err(failed)
}

/// As [`read_bounded`], from any reader. The inner error is the reader's.
pub(crate) fn read_from(
    reader: impl io::Read,
    max: usize,
    name: impl FnOnce() -> String,
) -> Result<io::Result<Vec<u8>>> {
    use io::Read;
    let mut bytes = Vec::new();
    match reader.take(max as u64 + 1).read_to_end(&mut bytes) {
        Ok(_) if bytes.len() > max => Err(Error::TooLong { what: name(), max }),
        Ok(_) => Ok(Ok(bytes)),
        Err(error) => Ok(Err(error)),
    }
}
