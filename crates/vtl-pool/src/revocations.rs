//! Revocations: packages and keys that a host rejects in spite of a trusted signature. They are in
//! `revoked.toml`, beside the keys:
//!
//! ```toml
//! # `vtl graft pull` takes nothing without a fresh index; without this line it warns where one is missing that was there.
//! index = "require"
//! # Public keys, as in their files.
//! keys = ["5f…"]
//! # SHA-256 of packages' files, or of the objects in them (`vtl graft show`).
//! packages = ["c4…"]
//! # The lowest version that is taken.
//! [minimum]
//! mine = "0.1.2"
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    Error, Result, Version,
    key::{PublicKey, failed, from_hex, guarded, to_hex},
    object::is_name,
    read_from,
};

/// Name of the file, in the directory of trusted keys.
pub const FILE: &str = "revoked.toml";
/// Maximum length of the file, bytes.
const MAX_FILE: usize = 1 << 20;

/// Identity of a package for revocations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The signing key.
    pub signer: PublicKey,
    /// SHA-256 of the file.
    pub file: [u8; 32],
    /// SHA-256 of the object in it.
    pub object: [u8; 32],
    /// The graft's name.
    pub name: String,
    /// The graft's version.
    pub version: Version,
}

/// A revocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Revocation {
    /// All packages signed with this key.
    Key(PublicKey),
    /// The package whose file or object has this SHA-256.
    Package([u8; 32]),
    /// All versions of a graft below this one.
    Before(String, Version),
}

/// 32 bytes, in hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Digest(pub(crate) [u8; 32]);

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        to_hex(&self.0).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.bytes().all(|b| b.is_ascii_hexdigit());
        let bytes = from_hex(&text).filter(|_| digits).map(Self);
        bytes.ok_or_else(|| de::Error::custom(format!("`{text}` has not 64 hexadecimal digits")))
    }
}

/// Policy for packages without a valid index.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum IndexPolicy {
    /// Reject all.
    Require,
}

/// The file's content.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct List {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<IndexPolicy>,
    keys: BTreeSet<Digest>,
    packages: BTreeSet<Digest>,
    minimum: BTreeMap<String, Version>,
}

/// The revocations of a host.
#[derive(Clone, Debug, Default)]
pub struct Revocations {
    path: PathBuf,
    list: List,
    /// Defect of the file. Then all packages are rejected: any might be revoked.
    unusable: Option<String>,
}

impl Revocations {
    /// Reads the revocations of a directory of keys. Only root and `owner`, a uid, may be able to
    /// change the file.
    pub(crate) fn read(folder: &Path, owner: u32) -> Self {
        let path = folder.join(FILE);
        let (list, unusable) = match read(&path, owner) {
            Ok(list) => (list, None),
            Err(error) => (List::default(), Some(error.to_string())),
        };
        Self {
            path,
            list,
            unusable,
        }
    }

    /// Defect of the file, for which all packages are rejected.
    pub fn unusable(&self) -> Option<&str> {
        self.unusable.as_deref()
    }

    /// Whether packages need an unexpired index.
    pub fn requires_index(&self) -> bool {
        self.list.index.is_some()
    }

    /// Checks that a package is not revoked.
    ///
    /// # Errors
    /// [`Error::Revoked`]; for every package if the file is unusable.
    pub fn check(&self, package: &Identity) -> Result<()> {
        let place = self.path.display();
        let revoked = |what: String| Err(Error::Revoked(format!("{what} ({place})")));
        if let Some(why) = &self.unusable {
            return Err(Error::Revoked(format!(
                "no package is taken before the list of revocations is mended: {why}"
            )));
        }
        if self.list.keys.contains(&Digest(package.signer.to_bytes())) {
            return revoked(format!("the key {} is revoked", package.signer.short()));
        }
        for (what, digest) in [("package", package.file), ("object", package.object)] {
            if self.list.packages.contains(&Digest(digest)) {
                return revoked(format!("this {what} is revoked"));
            }
        }
        match self.list.minimum.get(&package.name) {
            Some(minimum) if package.version < *minimum => revoked(format!(
                "{} {} is revoked: {minimum} is the lowest version that this host takes",
                package.name, package.version
            )),
            _ => Ok(()),
        }
    }

    /// Adds a revocation to the file in a directory of keys, and returns the file's path. Comments
    /// in the file are lost.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::BadKey`] if the existing file is unusable.
    pub fn add(folder: &Path, revocation: Revocation) -> Result<PathBuf> {
        let owner = fs::metadata(folder).map_err(|e| failed("read", folder, e))?;
        let path = folder.join(FILE);
        // Nobody else changes the list meanwhile.
        let lock = fs::File::open(folder).and_then(|folder| folder.lock().map(|()| folder));
        let _lock = lock.map_err(|e| failed("lock", folder, e))?;
        let mut list = read(&path, owner.uid())?;
        match revocation {
            Revocation::Key(key) => {
                list.keys.insert(Digest(key.to_bytes()));
            }
            Revocation::Package(digest) => {
                list.packages.insert(Digest(digest));
            }
            Revocation::Before(name, version) => {
                let minimum = list.minimum.entry(name).or_default();
                *minimum = version.max(*minimum);
            }
        }
        let text = toml::to_string(&list).expect("no maps with other keys than text");
        let draft = folder.join(format!(".{FILE}.{}", std::process::id()));
        // What a process with this number has left when it was killed.
        let _ = fs::remove_file(&draft);
        let written = fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(&draft)
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .and_then(|()| fs::rename(&draft, &path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written.map_err(|e| failed("write", &path, e))?;
        Ok(path)
    }
}

/// Reads the list; empty if there is no file.
fn read(path: &Path, owner: u32) -> Result<List> {
    // A dangling link does not count as "no file".
    if let Err(error) = fs::symlink_metadata(path)
        && error.kind() == io::ErrorKind::NotFound
    {
        return Ok(List::default());
    }
    let file = guarded(path, owner)?;
    let bytes = read_from(&file, MAX_FILE, || path.display().to_string())?;
    let bytes = bytes.map_err(|e| failed("read", path, e))?;
    let bad = |why: String| Error::BadKey {
        path: path.to_owned(),
        why,
    };
    let text = String::from_utf8(bytes).map_err(|_| bad("it is not text".into()))?;
    let list: List = toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(1, |span| {
            let before = text.get(..span.start).unwrap_or_default();
            before.matches('\n').count() + 1
        });
        bad(format!(
            "line {line}: {}",
            error.message().replace('\n', " ")
        ))
    })?;
    match list.minimum.keys().find(|name| !is_name(name)) {
        Some(name) => Err(bad(format!("\"{name}\" is no graft's name"))),
        None => Ok(list),
    }
}
