//! Ed25519 keys (RFC 8032): a developer's own, and those that a host trusts.

use std::{
    fmt, fs, io,
    io::Write,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};

use crate::{
    Error, Result, read_from,
    revocations::{Identity, Revocations},
};

const SECRET: &str = "vtl-secret-key";
const PUBLIC: &str = "vtl-public-key";
/// DER prefixes of keys: RFC 8410, sections 4 and 7.
const SPKI: [u8; 12] = [48, 42, 48, 5, 6, 3, 43, 101, 112, 3, 33, 0];
const PKCS8: [u8; 16] = [48, 46, 2, 1, 0, 48, 5, 6, 3, 43, 101, 112, 4, 34, 4, 32];
/// Maximum length of a key file, bytes.
const MAX_KEY: usize = 1024;
/// Maximum number of files read in a directory of keys.
const MAX_KEYS: usize = 1024;

/// A signing key. Wiped from memory when dropped.
pub struct SecretKey(SigningKey);

/// A verifying key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey(VerifyingKey);

/// Does not print the secret key.
impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey of {}", self.public())
    }
}

/// The whole key, in hexadecimal.
impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(self.0.as_bytes()))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(bytes)
}

/// Parses any number of bytes.
pub(crate) fn from_hex_bytes(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let byte = |pair: &[u8]| from_hex::<1>(std::str::from_utf8(pair).ok()?).map(|[byte]| byte);
    let is_whole = digits.len().is_multiple_of(2) && digits.iter().all(u8::is_ascii_hexdigit);
    is_whole.then(|| digits.chunks(2).map(byte).collect())?
}

impl PublicKey {
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        Self::from_bytes(&from_hex(text)?)
    }

    pub(crate) fn from_bytes(bytes: &[u8; 32]) -> Option<Self> {
        VerifyingKey::from_bytes(bytes).ok().map(Self)
    }

    pub(crate) fn to_bytes(self) -> [u8; 32] {
        self.0.to_bytes()
    }

    /// Encodes as SubjectPublicKeyInfo in DER (RFC 8410, section 4), the form of raw public keys in
    /// TLS.
    pub fn to_spki(self) -> Vec<u8> {
        [&SPKI[..], self.0.as_bytes()].concat()
    }

    /// Parses a SubjectPublicKeyInfo; `None` unless it has an Ed25519 key.
    pub fn from_spki(der: &[u8]) -> Option<Self> {
        let key = der.strip_prefix(&SPKI[..])?.try_into().ok()?;
        let key = VerifyingKey::from_bytes(key).ok()?;
        // For a key of small order, anybody can forge signatures.
        (!key.is_weak()).then_some(Self(key))
    }

    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        let signature = Signature::from_bytes(signature);
        self.0.verify_strict(message, &signature).is_ok()
    }

    /// The first eight bytes in hexadecimal: enough to tell keys apart by eye.
    pub fn short(&self) -> String {
        to_hex(&self.0.as_bytes()[..8])
    }

    /// Parses hexadecimal digits, as in the file.
    pub fn parse(text: &str) -> Option<Self> {
        Self::from_hex(text)
    }

    /// Reads a public key's file.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::BadKey`].
    pub fn read(path: &Path) -> Result<Self> {
        let file = fs::File::open(path).map_err(|e| failed("read", path, e))?;
        Self::from_file(&file, path)
    }

    fn from_file(file: &fs::File, path: &Path) -> Result<Self> {
        let word = read_word(file, path, PUBLIC)?;
        Self::from_hex(&word).ok_or_else(|| not_a_key(path, PUBLIC))
    }
}

impl SecretKey {
    /// Generates a key from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::File`] if they are unavailable.
    pub fn generate() -> Result<Self> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed)
            .map_err(|e| failed("read", Path::new("/dev/urandom"), e.into()))?;
        Ok(Self(SigningKey::from_bytes(&seed)))
    }

    #[cfg(test)]
    pub(crate) fn from_seed(seed: [u8; 32]) -> Self {
        Self(SigningKey::from_bytes(&seed))
    }

    /// The public half.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key())
    }

    /// Encodes as PrivateKeyInfo in DER (RFC 8410, section 7).
    pub fn to_pkcs8(&self) -> Vec<u8> {
        [&PKCS8[..], self.0.as_bytes()].concat()
    }

    pub(crate) fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }

    /// Reads a key written by [`SecretKey::write`].
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::BadKey`], also if others may read the file.
    pub fn read(path: &Path) -> Result<Self> {
        let file = fs::File::open(path).map_err(|e| failed("read", path, e))?;
        let meta = file.metadata().map_err(|e| failed("read", path, e))?;
        if meta.mode() & 0o077 != 0 {
            return Err(Error::BadKey {
                path: path.to_owned(),
                why: "others may read this secret key: chmod 600 it, or make a new one".into(),
            });
        }
        let word = read_word(&file, path, SECRET)?;
        from_hex(&word)
            .map(|seed| Self(SigningKey::from_bytes(&seed)))
            .ok_or_else(|| not_a_key(path, SECRET))
    }

    /// Writes `NAME.key` (mode 0600) and `NAME.pub` to `folder`, and returns both paths. Never
    /// overwrites a file.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn write(&self, folder: &Path, name: &str) -> Result<(PathBuf, PathBuf)> {
        // Atomically, without overwriting: a truncated key would keep a daemon from starting.
        let create = |path: &Path, mode: u32, text: String| {
            let new = path.with_added_extension(format!("new-{}", std::process::id()));
            // Left by a killed process.
            let _ = fs::remove_file(&new);
            let created = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(mode)
                .open(&new)
                .and_then(|mut file| {
                    file.write_all(text.as_bytes())?;
                    file.sync_all()?;
                    fs::hard_link(&new, path)
                });
            let _ = fs::remove_file(&new);
            created.map_err(|e| failed("write", path, e))
        };
        let secret = folder.join(format!("{name}.key"));
        let public = folder.join(format!("{name}.pub"));
        if public.exists() {
            let exists = io::Error::from(io::ErrorKind::AlreadyExists);
            return Err(failed("write", &public, exists));
        }
        create(
            &secret,
            0o600,
            format!("{SECRET} {}\n", to_hex(self.0.as_bytes())),
        )?;
        create(&public, 0o644, format!("{PUBLIC} {}\n", self.public()))?;
        Ok((secret, public))
    }
}

pub(crate) fn failed(what: &'static str, path: &Path, source: io::Error) -> Error {
    Error::File {
        what,
        path: path.to_owned(),
        source,
    }
}

fn not_a_key(path: &Path, kind: &str) -> Error {
    Error::BadKey {
        path: path.to_owned(),
        why: format!("there is no {kind} in this file"),
    }
}

/// The word after the file's type.
fn read_word(file: &fs::File, path: &Path, kind: &str) -> Result<String> {
    let bytes = read_from(file, MAX_KEY, || path.display().to_string())?;
    let bytes = bytes.map_err(|e| failed("read", path, e))?;
    let text = String::from_utf8(bytes).map_err(|_| not_a_key(path, kind))?;
    let word = text.strip_prefix(kind).map(str::trim);
    word.map(str::to_owned).ok_or_else(|| not_a_key(path, kind))
}

/// Opens a file that only root and `owner`, a uid, may change.
pub(crate) fn guarded(path: &Path, owner: u32) -> Result<fs::File> {
    let file = fs::File::open(path).map_err(|e| failed("read", path, e))?;
    // Of the open file: the name may refer to another one by then.
    let meta = file.metadata().map_err(|e| failed("read", path, e))?;
    let how = if meta.mode() & 0o022 != 0 {
        "chmod 644"
    } else if meta.uid() != 0 && meta.uid() != owner {
        "chown root"
    } else {
        return Ok(file);
    };
    Err(Error::BadKey {
        path: path.to_owned(),
        why: format!("others may change this file, so it is not trusted: {how} it"),
    })
}

/// The keys that a host trusts, and its revocations.
#[derive(Debug, Default)]
pub struct Trust {
    keys: Vec<(String, PublicKey)>,
    revocations: Revocations,
    /// Ignored files, with the reason.
    pub left_out: Vec<Error>,
}

impl Trust {
    /// Reads all `*.pub` of a directory, and its revocations; a missing directory has none. Files
    /// that others than root and the directory's owner own or may change are ignored. If the
    /// revocations are such a file, or malformed, all packages are rejected.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut trust = Self::default();
        let entries = match fs::read_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(trust),
            other => other.map_err(|e| failed("read", folder, e))?,
        };
        let mut paths: Vec<PathBuf> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|e| e == "pub"))
            .take(MAX_KEYS)
            .collect();
        paths.sort();
        let owner = fs::metadata(folder).map_err(|e| failed("read", folder, e))?;
        trust.revocations = Revocations::read(folder, owner.uid());
        for path in paths {
            let file = guarded(&path, owner.uid());
            match file.and_then(|file| PublicKey::from_file(&file, &path)) {
                Ok(key) => {
                    let name = path.file_stem().unwrap_or_default().to_string_lossy();
                    trust.keys.push((name.into_owned(), key));
                }
                Err(error) => trust.left_out.push(error),
            }
        }
        Ok(trust)
    }

    /// Adds a trusted key.
    pub fn add(&mut self, name: &str, key: PublicKey) {
        self.keys.push((name.to_owned(), key));
    }

    /// Name of a trusted key: its file's, without `.pub`.
    pub fn name_of(&self, key: &PublicKey) -> Option<&str> {
        let found = self.keys.iter().find(|(_, known)| known == key);
        found.map(|(name, _)| name.as_str())
    }

    /// Checks that the host accepts a package; returns the name of its key.
    ///
    /// # Errors
    /// [`Error::Untrusted`], [`Error::Revoked`].
    pub fn accept(&self, package: &Identity) -> Result<&str> {
        let name = self.name_of(&package.signer);
        let name = name.ok_or_else(|| Error::Untrusted(package.signer.to_string()))?;
        self.revocations.check(package)?;
        Ok(name)
    }

    /// The revocations.
    pub fn revocations(&self) -> &Revocations {
        &self.revocations
    }

    /// All keys, by name.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &PublicKey)> {
        self.keys.iter().map(|(name, key)| (name.as_str(), key))
    }
}
