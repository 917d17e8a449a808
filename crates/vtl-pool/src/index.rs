//! Signed indexes of packages: a publisher's newest versions and its revocations, valid until the
//! index expires. They expose a registry that serves old packages or withholds new ones. One file
//! has the roles *snapshot* and *timestamp* of The Update Framework.
//!
//! TOML; the last line is a signature over everything before it:
//!
//! ```toml
//! # One more each time. No host goes back.
//! serial = 3
//! # Seconds since 1970-01-01T00:00:00Z.
//! expires = 1900000000
//! # SHA-256 of packages' files, or of the objects in them.
//! revoked = ["c4…"]
//! # By graft: the newest version, and the SHA-256 of the package's file.
//! [newest.mine]
//! version = "0.1.2"
//! sha256 = "5f…"
//! # By graft: the lowest version that is to be taken.
//! [minimum]
//! mine = "0.1.1"
//! # ed25519 KEY SIGNATURE
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use crate::{
    Error, LAST_EXPIRY, Result, Version,
    key::{PublicKey, SecretKey, failed, guarded, to_hex},
    object::is_name,
    package::parse_signature,
    read_from,
    revocations::{Digest, Identity, Revocation},
};

/// Maximum length of an index, bytes.
pub const MAX_INDEX: usize = 256 << 10;
/// Domain separation: no signature for another purpose is valid for an index.
const DOMAIN: &[u8] = b"vtl graft index 1\n";
/// Start of the signature's line.
const COMMENT: &str = "# ";

/// The newest version of a graft.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Newest {
    version: Version,
    sha256: Digest,
}

/// The signed content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    serial: u64,
    expires: u64,
    #[serde(default)]
    revoked: BTreeSet<Digest>,
    #[serde(default)]
    newest: BTreeMap<String, Newest>,
    #[serde(default)]
    minimum: BTreeMap<String, Version>,
}

/// An index with a valid signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Index {
    /// The publisher's key. Whether it is trusted is checked elsewhere.
    pub signer: PublicKey,
    list: List,
    bytes: Vec<u8>,
}

/// File name of a publisher's index.
pub fn file_name(signer: &PublicKey) -> String {
    format!("index-{}.vtli", signer.short())
}

impl Index {
    /// Signs `previous` with further packages and revocations, under the next serial. `expires`:
    /// seconds since 1970-01-01T00:00:00Z.
    ///
    /// # Errors
    /// [`Error::Index`]: a package or `previous` is signed with another key; a key is to be
    /// revoked, which only hosts can do; or the index becomes too long.
    pub fn update(
        previous: Option<&Self>,
        packages: &[Identity],
        revocations: Vec<Revocation>,
        expires: u64,
        key: &SecretKey,
    ) -> Result<Self> {
        let of_another = previous.is_some_and(|previous| previous.signer != key.public());
        if of_another
            || packages
                .iter()
                .any(|package| package.signer != key.public())
        {
            return Err(Error::Index(
                "an index is about packages that are signed with its own key".into(),
            ));
        }
        let mut list = previous
            .map(|previous| previous.list.clone())
            .unwrap_or_default();
        list.serial = (list.serial.checked_add(1))
            .ok_or_else(|| Error::Index("there is no serial behind the last one".into()))?;
        list.expires = expires;
        for package in packages {
            let newest = Newest {
                version: package.version,
                sha256: Digest(package.file),
            };
            let before = list.newest.get(&package.name);
            if before.is_none_or(|before| before.version <= newest.version) {
                list.newest.insert(package.name.clone(), newest);
            }
        }
        for revocation in revocations {
            match revocation {
                Revocation::Package(digest) => {
                    list.revoked.insert(Digest(digest));
                }
                Revocation::Before(name, version) => {
                    let minimum = list.minimum.entry(name).or_default();
                    *minimum = version.max(*minimum);
                }
                Revocation::Key(_) => {
                    return Err(Error::Index(
                        "a key is revoked by each host: vtl graft revoke".into(),
                    ));
                }
            }
        }
        let text = toml::to_string(&list).map_err(|error| Error::Index(error.to_string()))?;
        let signature = to_hex(&key.sign(&message(&text)));
        let text = format!("{text}{COMMENT}ed25519 {} {signature}\n", key.public());
        // Check it as its readers will.
        Self::read(text.as_bytes())
    }

    /// Parses an index, and checks its signature.
    ///
    /// # Errors
    /// [`Error::Index`], [`Error::TooLong`].
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let not = |why: &str| Error::Index(format!("it is no index: {why}"));
        if bytes.len() > MAX_INDEX {
            return Err(Error::TooLong {
                what: "the index".into(),
                max: MAX_INDEX,
            });
        }
        let text = std::str::from_utf8(bytes).map_err(|_| not("it is not text"))?;
        let before = text.strip_suffix('\n').and_then(|text| text.rfind('\n'));
        let (signed, last) = text.split_at(before.map_or(0, |at| at + 1));
        let signature = last.strip_prefix(COMMENT);
        let signature = signature.and_then(|line| parse_signature(line.as_bytes()));
        let (signer, signature) = signature.ok_or_else(|| not("it is not signed"))?;
        if !signer.verifies(&message(signed), &signature) {
            return Err(not("it was altered after it was signed"));
        }
        let list: List = toml::from_str(signed).map_err(|error| not(error.message()))?;
        let mut names = list.newest.keys().chain(list.minimum.keys());
        if !names.all(|name| is_name(name)) {
            return Err(not("a name in it is no graft's"));
        }
        if list.serial == 0 || list.expires > LAST_EXPIRY {
            return Err(not("its serial or its expiry cannot be"));
        }
        Ok(Self {
            signer,
            list,
            bytes: bytes.to_vec(),
        })
    }

    /// The file's content.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Serial number: grows with each index of a publisher.
    pub fn serial(&self) -> u64 {
        self.list.serial
    }

    /// Expiry, in RFC 3339 format.
    pub fn expiry(&self) -> impl fmt::Display + use<> {
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(self.list.expires))
    }

    /// Whether the index has expired.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() >= self.list.expires
    }

    /// Whether it has an entry for a graft's newest version.
    pub fn names(&self, graft: &str) -> bool {
        self.list.newest.contains_key(graft)
    }

    /// Checks a package of the same signer: published, and not revoked. `as_newest`: it was offered
    /// as the newest version.
    ///
    /// # Errors
    /// [`Error::Index`].
    pub fn check(&self, package: &Identity, as_newest: bool) -> Result<()> {
        let (name, version) = (&package.name, package.version);
        let refuse = |why: String| {
            let serial = self.list.serial;
            Err(Error::Index(format!(
                "{why} (its publisher's index, serial {serial})"
            )))
        };
        let digests = [package.file, package.object].map(Digest);
        if digests
            .iter()
            .any(|digest| self.list.revoked.contains(digest))
        {
            return refuse(format!("this package of {name} {version} is revoked"));
        }
        if let Some(minimum) = self.list.minimum.get(name).filter(|min| version < **min) {
            return refuse(format!(
                "{name} {version} is revoked: {minimum} is the lowest version"
            ));
        }
        match self.list.newest.get(name) {
            Some(newest) if newest.version == version && newest.sha256 != digests[0] => refuse(
                format!("what is there as {name} {version} is another package"),
            ),
            Some(newest) if newest.version > version && as_newest => refuse(format!(
                "{name} {version} is not the newest: {} is, and is withheld",
                newest.version
            )),
            _ => Ok(()),
        }
    }

    /// Reads the newest index of a signer seen by this host, from its directory of keys.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::BadKey`] if others may change the file, or as [`Index::read`].
    pub fn kept(folder: &Path, signer: &PublicKey) -> Result<Option<Self>> {
        let path = folder.join(file_name(signer));
        if let Err(error) = fs::symlink_metadata(&path)
            && error.kind() == io::ErrorKind::NotFound
        {
            return Ok(None);
        }
        use std::os::unix::fs::MetadataExt;
        let owner = fs::metadata(folder).map_err(|e| failed("read", folder, e))?;
        let file = guarded(&path, owner.uid())?;
        let bytes = read_from(&file, MAX_INDEX, || path.display().to_string())?;
        let bytes = bytes.map_err(|e| failed("read", &path, e))?;
        let bad = |why: String| Error::BadKey {
            path: path.clone(),
            why,
        };
        let index = Self::read(&bytes).map_err(|error| bad(error.to_string()))?;
        match index.signer == *signer {
            true => Ok(Some(index)),
            false => Err(bad("it is another publisher's".into())),
        }
    }

    /// Merges the index at a place (`None`: it has none) with the one kept: returns the index to
    /// use. Detects rollback.
    ///
    /// # Errors
    /// [`Error::Index`]: `shown` is older than `kept`, or differs under the same serial.
    pub fn advance(shown: Option<Self>, kept: Option<Self>) -> Result<Option<Self>> {
        let (shown, kept) = match (shown, kept) {
            (Some(shown), Some(kept)) => (shown, kept),
            (shown, kept) => return Ok(shown.or(kept)),
        };
        let (new, old) = (shown.list.serial, kept.list.serial);
        if new < old {
            return Err(Error::Index(format!(
                "the index there is an old one, serial {new}: this host has seen serial {old}"
            )));
        }
        if new == old && shown.list != kept.list {
            return Err(Error::Index(format!(
                "the index there is another one than this host has seen, under the same serial {new}"
            )));
        }
        Ok(Some(shown))
    }

    /// Writes the index to a folder, atomically. Returns its path.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn store(&self, folder: &Path) -> Result<PathBuf> {
        let path = folder.join(file_name(&self.signer));
        let draft = path.with_added_extension(format!("new-{}", std::process::id()));
        let written = fs::write(&draft, &self.bytes).and_then(|()| fs::rename(&draft, &path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written.map_err(|e| failed("write", &path, e))?;
        Ok(path)
    }
}

fn message(signed: &str) -> Vec<u8> {
    [DOMAIN, signed.as_bytes()].concat()
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    const EXPIRES: u64 = 1_900_000_000;

    fn key() -> SecretKey {
        SecretKey::from_seed([7; 32])
    }

    fn package(version: &str, digest: u8) -> Identity {
        Identity {
            signer: key().public(),
            file: [digest; 32],
            object: [digest | 128; 32],
            name: "mine".into(),
            version: version.parse().unwrap(),
        }
    }

    fn update(previous: Option<&Index>, packages: &[Identity]) -> Index {
        Index::update(previous, packages, Vec::new(), EXPIRES, &key()).unwrap()
    }

    fn why(result: Result<impl Sized>) -> String {
        result.err().expect("refused").to_string()
    }

    #[test]
    fn index__says_what_is_newest() {
        let first = update(None, &[package("0.1.0", 1)]);
        assert_eq!((first.serial(), first.signer), (1, key().public()));
        assert_eq!(first.expiry().to_string(), "2030-03-17T17:46:40Z");
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        assert!(!first.has_expired(at(EXPIRES - 1)) && first.has_expired(at(EXPIRES)));
        let index = update(Some(&first), &[package("0.2.0", 2), package("0.1.5", 3)]);
        assert_eq!(index.serial(), 2);
        assert_eq!(Index::read(index.bytes()).unwrap(), index);
        index.check(&package("0.2.0", 2), true).unwrap();
        index.check(&package("0.3.0", 9), true).unwrap();
        index.check(&package("0.1.0", 1), false).unwrap();
        let withheld = why(index.check(&package("0.1.0", 1), true));
        assert!(withheld.contains("0.2.0 is, and is withheld"), "{withheld}");
        let other = why(index.check(&package("0.2.0", 3), false));
        assert!(other.contains("is another package"), "{other}");
        assert!(index.names("mine") && !index.names("other"));
    }

    #[test]
    fn index__revokes() {
        let revocations = vec![
            Revocation::Package([131; 32]),
            Revocation::Before("mine".into(), "0.2.0".parse().unwrap()),
            Revocation::Before("mine".into(), "0.1.0".parse().unwrap()),
        ];
        let index = Index::update(None, &[], revocations, EXPIRES, &key()).unwrap();
        index.check(&package("0.2.0", 1), true).unwrap();
        assert!(why(index.check(&package("0.1.9", 1), false)).contains("0.2.0 is the lowest"));
        assert!(
            why(index.check(&package("0.2.0", 3), false)).contains("is revoked"),
            "its object"
        );
        let key_revoked = vec![Revocation::Key(key().public())];
        assert!(why(Index::update(None, &[], key_revoked, EXPIRES, &key())).contains("each host"));
        let other = SecretKey::from_seed([8; 32]);
        let foreign = Index::update(None, &[package("0.1.0", 1)], Vec::new(), EXPIRES, &other);
        assert!(why(foreign).contains("its own key"));
        assert!(
            why(Index::update(
                Some(&index),
                &[],
                Vec::new(),
                EXPIRES,
                &other
            ))
            .contains("own")
        );
    }

    #[test]
    fn advance__never_goes_back() {
        let first = update(None, &[package("0.1.0", 1)]);
        let second = update(Some(&first), &[package("0.2.0", 2)]);
        let fork = update(Some(&first), &[]);
        let advance = |shown: Option<&Index>, kept: Option<&Index>| {
            Index::advance(shown.cloned(), kept.cloned())
        };
        assert_eq!(advance(None, None).unwrap(), None);
        assert_eq!(advance(None, Some(&first)).unwrap().as_ref(), Some(&first));
        assert_eq!(
            advance(Some(&second), None).unwrap().as_ref(),
            Some(&second)
        );
        assert_eq!(
            advance(Some(&second), Some(&first)).unwrap().as_ref(),
            Some(&second)
        );
        assert_eq!(
            advance(Some(&second), Some(&second)).unwrap().as_ref(),
            Some(&second)
        );
        let old = why(advance(Some(&first), Some(&second)));
        assert!(
            old.contains("serial 1: this host has seen serial 2"),
            "{old}"
        );
        assert!(why(advance(Some(&fork), Some(&second))).contains("under the same serial 2"));
    }

    #[test]
    fn read__refuses_what_was_changed() {
        let index = update(None, &[package("0.1.0", 1)]);
        let bytes = index.bytes();
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1;
            assert!(Index::read(&changed).is_err(), "{at}");
            assert!(Index::read(&bytes[..at]).is_err(), "{at}");
        }
        assert!(Index::read(&[bytes, b"\n"].concat()).is_err());
        assert!(why(Index::read(&vec![b' '; MAX_INDEX + 1])).contains("more than"));
        let signed = |text: &str| {
            let signature = to_hex(&key().sign(&message(text)));
            let text = format!("{text}# ed25519 {} {signature}\n", key().public());
            why(Index::read(text.as_bytes()))
        };
        assert!(signed("").contains("no index"));
        assert!(signed("serial = 0\nexpires = 1\n").contains("cannot be"));
        assert!(signed("serial = 1\nexpires = 253402300800\n").contains("cannot be"));
        assert!(signed("serial = 1\nexpires = 1\nelse = 1\n").contains("else"));
        assert!(
            signed("serial = 1\nexpires = 1\n[minimum]\n\"a b\" = \"1.0.0\"\n").contains("name")
        );
    }

    #[test]
    fn kept__is_the_signers_own() {
        let folder = std::env::temp_dir().join(format!("vtl-index-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir(&folder).unwrap();
        let signer = key().public();
        assert_eq!(Index::kept(&folder, &signer).unwrap(), None);
        let index = update(None, &[]);
        let path = index.store(&folder).unwrap();
        assert_eq!(Index::kept(&folder, &signer).unwrap(), Some(index));
        let other = Index::update(None, &[], Vec::new(), 1, &SecretKey::from_seed([8; 32]));
        fs::write(&path, other.unwrap().bytes()).unwrap();
        assert!(why(Index::kept(&folder, &signer)).contains("another publisher's"));
        fs::write(&path, "serial = 1").unwrap();
        assert!(why(Index::kept(&folder, &signer)).contains("not signed"));
        fs::remove_dir_all(folder).unwrap();
    }
}
