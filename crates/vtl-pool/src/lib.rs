//! Graft packages and the pool that keeps them: no sockets, no kernel.
//!
//! A package is one file, `NAME-VERSION.vtlg`: a tar archive, the same bytes for the same content,
//! of a manifest, the compiled eBPF object, and an Ed25519 signature over both.
//!
//! - [`allowlist`]: what an object may contain;
//! - [`object`]: what an object says about itself, read from its ELF sections;
//! - [`manifest`]: what a package says about itself, and whether its object agrees;
//! - [`key`]: keys to sign with, and keys that a host trusts;
//! - [`certificate`]: statements, signed with such keys, about hosts' own;
//! - [`revocations`]: what a host takes no more, whoever signed it;
//! - [`index`]: what a publisher says of its newest packages;
//! - [`package`]: the file;
//! - [`pool`]: which grafts a host may use.
//!
//! Packages come from strangers: everything here is bounded in size and refuses in one sentence.

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

/// Why a package, a key or a file is refused: one sentence each.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// What was tried, as a verb.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file has more bytes than anything honest.
    #[error("{what} has more than {most} bytes")]
    TooLong {
        /// What is too long.
        what: String,
        /// The limit.
        most: usize,
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
    /// The manifest says other than the object.
    #[error("the manifest lies: it says {key} {claimed}, but the object says {actual}")]
    Lie {
        /// Of what.
        key: &'static str,
        /// In the manifest.
        claimed: String,
        /// In the object.
        actual: String,
    },
    /// A service that no transport function of the object contributes to.
    #[error(
        "the manifest lies: nothing in the object provides {services}; it consists of {functions}"
    )]
    Unfounded {
        /// The services.
        services: String,
        /// The transport functions that are there.
        functions: String,
    },
    /// Not a package at all.
    #[error("not a graft package: {0}")]
    NotAPackage(String),
    /// There is no signature in it.
    #[error("the package is not signed: sign it with `vtl graft sign`")]
    Unsigned,
    /// The signature is not of this content.
    #[error("the package was changed after it was signed: its signature does not fit")]
    Tampered,
    /// The signature fits, but who made it is nobody here.
    #[error("the package is signed with a key that this host does not trust ({0})")]
    Untrusted(String),
    /// It is revoked, or the list of revocations cannot be used.
    #[error("{0}")]
    Revoked(String),
    /// An index is none, or says that the package is not to be taken.
    #[error("{0}")]
    Index(String),
    /// Made for another wire format.
    #[error("graft \"{name}\" speaks wire version {its}, this host speaks {ours}")]
    Wire {
        /// The graft.
        name: String,
        /// Its version.
        its: u32,
        /// This build's.
        ours: u32,
    },
    /// Built for another interface between programs and daemon.
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
    /// The gid is another graft's.
    #[error("graft id {gid} is taken by \"{name}\": one of the two needs another")]
    GidTaken {
        /// The id.
        gid: u16,
        /// Who has it.
        name: String,
    },
    /// The name is another graft's.
    #[error("{0}")]
    NameTaken(String),
    /// A key file does not hold a key.
    #[error("{}: {why}", path.display())]
    BadKey {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// This crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Reads a file of at most `most` bytes.
///
/// # Errors
/// [`Error::File`], [`Error::TooLong`].
pub fn read_bounded(path: &std::path::Path, most: usize) -> Result<Vec<u8>> {
    let failed = |source| Error::File {
        what: "read",
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(failed)?;
    read_from(file, most, || path.display().to_string())?.map_err(failed)
}

/// As [`read_bounded`], from anything. The inner error is the reader's.
pub(crate) fn read_from(
    reader: impl io::Read,
    most: usize,
    name: impl FnOnce() -> String,
) -> Result<io::Result<Vec<u8>>> {
    use io::Read;
    let mut bytes = Vec::new();
    match reader.take(most as u64 + 1).read_to_end(&mut bytes) {
        Ok(_) if bytes.len() > most => Err(Error::TooLong { what: name(), most }),
        Ok(_) => Ok(Ok(bytes)),
        Err(error) => Ok(Err(error)),
    }
}
