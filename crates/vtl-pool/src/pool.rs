//! The grafts that a host may use: the built-in ones, and the packages of a directory.

use std::{
    collections::HashMap,
    fs, io,
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use crate::{
    Error, Manifest, Package, Result, Version,
    key::Trust,
    manifest::{Project, Wanted},
    object::Description,
    package::MAX_PACKAGE,
    read_bounded,
    revocations::{Identity, Revocations},
};

/// Maximum number of packages in one directory.
const MAX_PACKAGES: usize = 1024;

/// Origin of a graft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Part of this build, and trusted as such.
    BuiltIn,
    /// A signed package.
    Package {
        /// The file.
        path: PathBuf,
        /// The name of the key that signed it.
        signer: String,
    },
}

/// One version of a graft.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its manifest.
    pub manifest: Manifest,
    /// Preference among grafts that meet the requirements: the highest is taken.
    pub rank: u32,
    /// The object.
    pub object: Arc<[u8]>,
    /// Its origin.
    pub origin: Origin,
    /// Identity for revocations, if it is a package.
    pub identity: Option<Identity>,
}

/// Cached content of a file, valid while its time and length are unchanged.
#[derive(Clone)]
struct Seen {
    modified: SystemTime,
    length: u64,
    identity: Identity,
    manifest: Manifest,
    rank: u32,
    object: Arc<[u8]>,
}

/// The grafts of a host. Cheap to clone.
#[derive(Clone, Default)]
pub struct Pool {
    entries: Vec<Entry>,
    refused: Vec<(PathBuf, Arc<Error>)>,
    revocations: Revocations,
    seen: HashMap<PathBuf, Seen>,
}

impl Pool {
    /// A pool of the built-in grafts only.
    ///
    /// # Errors
    /// A built-in graft is invalid.
    pub fn new<'a>(built_in: impl IntoIterator<Item = &'a [u8]>, version: Version) -> Result<Self> {
        let mut pool = Self::default();
        for object in built_in {
            let description = Description::read(object)?;
            pool.admit(Entry {
                manifest: Project::built_in(&description, version).manifest(&description)?,
                rank: description.rank,
                object: object.into(),
                origin: Origin::BuiltIn,
                identity: None,
            })?;
        }
        Ok(pool)
    }

    /// Reads the packages of a directory anew. A bad package does not affect the others:
    /// [`Pool::refused`] has its error. Of two that conflict, the one that was there before stays,
    /// else the first by name.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read; a missing one is empty.
    pub fn refresh(&mut self, folder: &Path, trust: &Trust) -> Result<()> {
        let failed = |source| Error::File {
            what: "read",
            path: folder.to_owned(),
            source,
        };
        let mut paths: Vec<PathBuf> = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            other => other
                .map_err(failed)?
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| path.extension().is_some_and(|e| e == "vtlg"))
                .take(MAX_PACKAGES)
                .collect(),
        };
        paths.sort();
        let before: Vec<PathBuf> = self
            .entries
            .iter()
            .filter_map(|e| match &e.origin {
                Origin::Package { path, .. } => Some(path.clone()),
                Origin::BuiltIn => None,
            })
            .collect();
        self.entries.retain(|e| e.origin == Origin::BuiltIn);
        self.refused.clear();
        self.revocations = trust.revocations().clone();
        self.seen.retain(|path, _| paths.contains(path));
        paths.sort_by_key(|path| !before.contains(path));
        for path in paths {
            let admitted = self.look(&path, trust).and_then(|entry| self.admit(entry));
            if let Err(error) = admitted {
                self.refused.push((path, error.into()));
            }
        }
        Ok(())
    }

    fn look(&mut self, path: &Path, trust: &Trust) -> Result<Entry> {
        let failed = |source| Error::File {
            what: "read",
            path: path.to_owned(),
            source,
        };
        let meta = fs::metadata(path).map_err(failed)?;
        let (modified, length) = (meta.modified().map_err(failed)?, meta.len());
        let seen = self.seen.get(path);
        let seen = match seen.filter(|s| s.modified == modified && s.length == length) {
            Some(seen) => seen.clone(),
            None => {
                let package = Package::read(&read_bounded(path, MAX_PACKAGE)?)?;
                let seen = Seen {
                    modified,
                    length,
                    identity: package.identity(),
                    rank: package.description.rank,
                    manifest: package.manifest,
                    object: package.object.into(),
                };
                self.seen.insert(path.to_owned(), seen.clone());
                seen
            }
        };
        let signer = trust.accept(&seen.identity)?;
        if path
            .file_name()
            .is_none_or(|n| *n != *seen.manifest.file_name())
        {
            return Err(Error::NotAPackage(format!(
                "the file must be named {}, after what is in it",
                seen.manifest.file_name()
            )));
        }
        Ok(Entry {
            manifest: seen.manifest,
            rank: seen.rank,
            object: seen.object,
            origin: Origin::Package {
                path: path.to_owned(),
                signer: signer.to_owned(),
            },
            identity: Some(seen.identity),
        })
    }

    /// Checks that a graft does not conflict with the others.
    ///
    /// # Errors
    /// [`Error::GidTaken`], [`Error::NameTaken`].
    pub fn fits(&self, manifest: &Manifest) -> Result<()> {
        for other in self.entries.iter().map(|e| &e.manifest) {
            if other.gid == manifest.gid && other.name != manifest.name {
                return Err(Error::GidTaken {
                    gid: manifest.gid,
                    name: other.name.clone(),
                });
            }
            if other.name == manifest.name && other.gid != manifest.gid {
                return Err(Error::NameTaken(format!(
                    "graft \"{}\" {} has graft id {}: all its versions must",
                    other.name, other.version, other.gid
                )));
            }
        }
        let built_in = |e: &&Entry| e.origin == Origin::BuiltIn && e.manifest.name == manifest.name;
        match self.entries.iter().find(built_in) {
            Some(other) => Err(Error::NameTaken(format!(
                "graft \"{}\" is part of VTL itself: choose another name",
                other.manifest.name
            ))),
            None => Ok(()),
        }
    }

    fn admit(&mut self, entry: Entry) -> Result<()> {
        self.fits(&entry.manifest)?;
        self.entries.push(entry);
        Ok(())
    }

    /// All versions of all grafts.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Whether a package is revoked, as of the last reading; it may have left the directory.
    pub fn revokes(&self, package: &Identity) -> bool {
        self.revocations.check(package).is_err()
    }

    /// Refused packages of the directory, with the reason.
    pub fn refused(&self) -> &[(PathBuf, Arc<Error>)] {
        &self.refused
    }

    /// Finds a graft by `NAME`, in its highest version, or by `NAME@VERSION`.
    pub fn find(&self, wanted: &str) -> Option<&Entry> {
        let wanted: Wanted = wanted.parse().ok()?;
        self.entries
            .iter()
            .filter(|e| e.manifest.name == wanted.name && wanted.takes(e.manifest.version))
            .max_by_key(|e| e.manifest.version)
    }
}

/// Writes a package to a directory under its name, atomically. Succeeds if the same bytes are
/// there.
///
/// # Errors
/// [`Error::File`]; [`Error::NameTaken`] if another package of that name and version is there.
pub fn store(folder: &Path, manifest: &Manifest, bytes: &[u8]) -> Result<PathBuf> {
    let path = folder.join(manifest.file_name());
    let failed = |source| Error::File {
        what: "write",
        path: path.clone(),
        source,
    };
    match fs::read(&path) {
        Ok(there) if there == bytes => return Ok(path),
        Ok(_) => {
            return Err(Error::NameTaken(format!(
                "another {} is in {} already: raise the version",
                manifest.file_name(),
                folder.display()
            )));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    fs::create_dir_all(folder).map_err(failed)?;
    let draft = folder.join(format!(".{}.{}", manifest.file_name(), std::process::id()));
    let written = fs::File::create(&draft)
        .and_then(|mut file| {
            file.write_all(bytes)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&draft, &path));
    if written.is_err() {
        let _ = fs::remove_file(&draft);
    }
    written.map_err(failed)?;
    Ok(path)
}
