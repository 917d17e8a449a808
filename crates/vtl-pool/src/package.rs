//! The package file: a tar archive of `manifest.toml`, `graft.bpf.o` and `signature`, in this
//! order, independent of author and time. A file that differs from the output of [`Package::sign`]
//! for its content is refused: so no byte is without meaning.

use std::io::{Cursor, Read};

use sha2::{Digest, Sha256};

use crate::{
    Error, Manifest, Result, allowlist,
    key::{PublicKey, SecretKey, Trust, from_hex, to_hex},
    manifest::MAX_MANIFEST,
    object::{Description, MAX_OBJECT},
    revocations::Identity,
};

/// Maximum length of a package, bytes.
pub const MAX_PACKAGE: usize = MAX_MANIFEST + MAX_OBJECT + MAX_SIGNATURE + 8 * BLOCK;
const MAX_SIGNATURE: usize = 1024;
/// Block size of tar: a header is one block, contents are padded to blocks, two zero blocks end the
/// archive.
const BLOCK: usize = 512;
const MEMBERS: [(&str, usize); 3] = [
    ("manifest.toml", MAX_MANIFEST),
    ("graft.bpf.o", MAX_OBJECT),
    ("signature", MAX_SIGNATURE),
];
/// Domain separation: no signature for another purpose is valid for a package.
const DOMAIN: &[u8] = b"vtl graft package 1\n";

/// A verified package: signed by `signer`, with a manifest that agrees with the object.
#[derive(Clone, Debug)]
pub struct Package {
    /// Its manifest.
    pub manifest: Manifest,
    /// The object's description.
    pub description: Description,
    /// The object.
    pub object: Vec<u8>,
    /// The signing key. Whether it is trusted is checked elsewhere.
    pub signer: PublicKey,
    /// SHA-256 of the file.
    digest: [u8; 32],
}

impl Package {
    /// Signs a package; returns the file's content.
    ///
    /// # Errors
    /// [`Error::TooLong`], or a defect of the object or the manifest.
    pub fn sign(manifest: &Manifest, object: &[u8], key: &SecretKey) -> Result<Vec<u8>> {
        let text = manifest.to_text();
        let signature = key.sign(&message(text.as_bytes(), object));
        let signature = format!("ed25519 {} {}\n", key.public(), to_hex(&signature));
        let bytes = pack(&[text.as_bytes(), object, signature.as_bytes()]);
        // Check it as its readers will.
        Self::read(&bytes)?;
        Ok(bytes)
    }

    /// Reads and verifies a package; only trust and revocations are not checked.
    ///
    /// # Errors
    /// Any but [`Error::Untrusted`] and [`Error::Revoked`]: no package, [`Error::Unsigned`],
    /// [`Error::Tampered`], another version of VTL, a manifest that contradicts the object, or
    /// [`Error::NotAllowed`].
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let [text, object, signature] = unpack(bytes)?;
        if signature.is_empty() {
            return Err(Error::Unsigned);
        }
        let not = |why: &str| Error::NotAPackage(why.to_owned());
        let (signer, signature) =
            parse_signature(&signature).ok_or_else(|| not("its signature is no signature"))?;
        if !signer.verifies(&message(&text, &object), &signature) {
            return Err(Error::Tampered);
        }
        let text = String::from_utf8(text).map_err(|_| not("its manifest is not text"))?;
        let manifest = Manifest::parse(&text)?;
        let description = Description::read(&object)?;
        manifest.check(&description)?;
        allowlist::check(&object)?;
        Ok(Self {
            manifest,
            description,
            object,
            signer,
            digest: Sha256::digest(bytes).into(),
        })
    }

    /// Identity for revocations.
    pub fn identity(&self) -> Identity {
        Identity {
            signer: self.signer,
            file: self.digest,
            object: Sha256::digest(&self.object).into(),
            name: self.manifest.name.clone(),
            version: self.manifest.version,
        }
    }

    /// Reads a package for use on this host: its signer must be trusted, and the package not
    /// revoked. Also returns the name of the key.
    ///
    /// # Errors
    /// As [`Package::read`], [`Error::Untrusted`], or [`Error::Revoked`].
    pub fn open(bytes: &[u8], trust: &Trust) -> Result<(Self, String)> {
        let package = Self::read(bytes)?;
        let name = trust.accept(&package.identity())?.to_owned();
        Ok((package, name))
    }
}

/// A line `ed25519 KEY SIGNATURE`.
pub(crate) fn parse_signature(bytes: &[u8]) -> Option<(PublicKey, [u8; 64])> {
    let text = std::str::from_utf8(bytes).ok()?.strip_suffix('\n')?;
    // Lower case only: a package revoked by its digest must not return with other digits.
    if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let mut words = text.split(' ');
    let parsed = match (words.next()?, words.next()?, words.next()?, words.next()) {
        ("ed25519", key, signature, None) => (PublicKey::from_hex(key)?, from_hex(signature)?),
        _ => return None,
    };
    Some(parsed)
}

/// The signed content.
fn message(manifest: &[u8], object: &[u8]) -> Vec<u8> {
    let mut message = DOMAIN.to_vec();
    message.extend_from_slice(&Sha256::digest(manifest));
    message.extend_from_slice(&Sha256::digest(object));
    message
}

/// Makes the archive.
fn pack(contents: &[&[u8]; 3]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for ((name, _), content) in MEMBERS.iter().zip(contents) {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(0);
        header.set_uid(0);
        header.set_gid(0);
        header.set_entry_type(tar::EntryType::Regular);
        archive
            .append_data(&mut header, name, *content)
            .expect("memory can be written, and the names are short");
    }
    archive.into_inner().expect("memory can be written")
}

/// The contents of an archive made by [`pack`].
fn unpack(bytes: &[u8]) -> Result<[Vec<u8>; 3]> {
    let not = |why: String| Error::NotAPackage(why);
    if bytes.len() > MAX_PACKAGE {
        return Err(Error::TooLong {
            what: "the package".into(),
            max: MAX_PACKAGE,
        });
    }
    let mut archive = tar::Archive::new(Cursor::new(bytes));
    let entries = archive.entries().map_err(|e| not(e.to_string()))?;
    let mut contents = [const { Vec::new() }; 3];
    let mut count = 0;
    for entry in entries.raw(true) {
        let mut entry = entry.map_err(|_| not("it is no tar archive".into()))?;
        let Some((name, max)) = MEMBERS.get(count) else {
            return Err(not("there is more in it than belongs there".into()));
        };
        if entry.path_bytes() != name.as_bytes() {
            return Err(not(format!("where {name} belongs there is something else")));
        }
        if entry.size() > *max as u64 {
            return Err(Error::TooLong {
                what: format!("{name} of the package"),
                max: *max,
            });
        }
        entry
            .read_to_end(&mut contents[count])
            .map_err(|_| not("it is cut short".into()))?;
        count += 1;
    }
    if count < 2 {
        return Err(not("manifest and object are not both there".into()));
    }
    if count < MEMBERS.len() {
        return Err(Error::Unsigned);
    }
    let [manifest, object, signature] = &contents;
    if pack(&[manifest, object, signature]) != bytes {
        return Err(Error::Tampered);
    }
    Ok(contents)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use proptest::prelude::*;
    use vtl_proto::services::Services;

    use super::*;
    use crate::manifest::Project;

    /// The object of a graft that comes with VTL.
    fn object() -> &'static [u8] {
        vtl_bpf::objects::graft("selective-repeat").expect("it comes with VTL")
    }

    fn manifest() -> Manifest {
        let description = Description::read(object()).unwrap();
        let project = Project {
            name: description.name.clone(),
            version: "1.2.3".parse().unwrap(),
            gid: description.gid,
            services: description.services,
            licence: "GPL-2.0-only".into(),
            author: "Ada".into(),
        };
        project.manifest(&description).unwrap()
    }

    fn key() -> SecretKey {
        SecretKey::generate().unwrap()
    }

    /// A package made without checks.
    fn forge(text: &str, object: &[u8]) -> Vec<u8> {
        let key = key();
        let signature = key.sign(&message(text.as_bytes(), object));
        let signature = format!("ed25519 {} {}\n", key.public(), to_hex(&signature));
        pack(&[text.as_bytes(), object, signature.as_bytes()])
    }

    fn refusal(bytes: &[u8]) -> String {
        Package::read(bytes).unwrap_err().to_string()
    }

    #[test]
    fn sign__round_trip_and_the_same_bytes_again() {
        let key = key();
        let bytes = Package::sign(&manifest(), object(), &key).unwrap();
        assert_eq!(bytes, Package::sign(&manifest(), object(), &key).unwrap());
        let package = Package::read(&bytes).unwrap();
        assert_eq!(package.manifest, manifest());
        assert_eq!(package.object, object());
        assert_eq!(package.signer, key.public());
        let names: Vec<_> = package
            .manifest
            .functions
            .iter()
            .map(String::as_str)
            .collect();
        assert!(
            names.contains(&"window") && names.contains(&"loss"),
            "{names:?}"
        );
        assert_eq!(package.manifest.parameters[0].name, "window");
    }

    #[test]
    fn open__takes_trusted_keys_only() {
        let key = key();
        let bytes = Package::sign(&manifest(), object(), &key).unwrap();
        let mut trust = Trust::default();
        let why = Package::open(&bytes, &trust).unwrap_err().to_string();
        assert!(why.contains("does not trust"), "{why}");
        trust.add("ada", key.public());
        assert_eq!(Package::open(&bytes, &trust).unwrap().1, "ada");
    }

    #[test]
    fn read__unsigned() {
        let text = manifest().to_text();
        let unsigned = pack(&[text.as_bytes(), object(), b""]);
        assert!(refusal(&unsigned).contains("not signed"));
        let mut two = unsigned;
        two.truncate(two.len() - 3 * BLOCK);
        two.extend_from_slice(&[0; 2 * BLOCK]);
        assert!(refusal(&two).contains("not signed"));
    }

    #[test]
    fn read__manifests_that_lie() {
        let honest = manifest();
        let lie = |change: &dyn Fn(&mut Manifest)| {
            let mut manifest = honest.clone();
            change(&mut manifest);
            refusal(&forge(&manifest.to_text(), object()))
        };
        let more = Services::CONGESTION_CONTROL;
        let why = lie(&|m| m.services = m.services | more);
        assert!(
            why.contains("contradicts the object: services is")
                && why.contains("congestion-control"),
            "{why}"
        );
        let why = lie(&|m| m.gid = 63);
        assert!(
            why.contains("gid is 63 in the manifest, 5 in the object"),
            "{why}"
        );
        let why = lie(&|m| m.name = "other".into());
        assert!(why.contains("name is other"), "{why}");
        let why = lie(&|m| m.functions.push("tf_magic".into()));
        assert!(why.contains("functions"), "{why}");
        let why = lie(&|m| m.parameters[0].max = 5);
        assert!(why.contains("parameters"), "{why}");
        let why = lie(&|m| m.wire = 9);
        let ours = format!("this host speaks {}", vtl_proto::intf::VTL_VERSION);
        assert!(
            why.contains("speaks wire version 9, ") && why.contains(&ours),
            "{why}"
        );
        let why = lie(&|m| m.interface = 1);
        assert!(why.contains("interface version 1"), "{why}");
    }

    #[test]
    fn read__services_that_nothing_provides() {
        // Object and manifest agree in the lie.
        let mut image = object().to_vec();
        let services = manifest().services | Services::CONGESTION_CONTROL;
        let name = b"selective-repeat\0";
        let at = image.windows(name.len()).position(|w| w == name).unwrap();
        let at = at + std::mem::offset_of!(vtl_proto::intf::vtl_graft_info, services);
        image[at..at + 2].copy_from_slice(&services.bits().to_le_bytes());
        let mut manifest = manifest();
        manifest.services = services;
        let why = refusal(&forge(&manifest.to_text(), &image));
        assert!(
            why.contains("nothing in it provides congestion-control"),
            "{why}"
        );
    }

    #[test]
    fn read__too_long() {
        assert!(refusal(&vec![0; MAX_PACKAGE + 1]).contains("more than"));
        let long = "#".repeat(MAX_MANIFEST + 1);
        assert!(refusal(&forge(&long, object())).contains("manifest.toml of the package has more"));
        let long = vec![0; MAX_OBJECT + 1];
        assert!(refusal(&pack(&[b"", &long, b""])).contains("more than"));
    }

    #[test]
    fn read__signatures_in_capital_letters() {
        let key = key();
        let text = manifest().to_text();
        let signature = key.sign(&message(text.as_bytes(), object()));
        let digits = [key.public().to_string(), to_hex(&signature)];
        let pack = |[key, signature]: &[String; 2]| {
            let signature = format!("ed25519 {key} {signature}\n");
            pack(&[text.as_bytes(), object(), signature.as_bytes()])
        };
        assert!(Package::read(&pack(&digits)).is_ok());
        for which in 0..2 {
            let mut capitals = digits.clone();
            capitals[which].make_ascii_uppercase();
            let why = refusal(&pack(&capitals));
            assert!(why.contains("its signature is no signature"), "{why}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn read__any_change_is_noticed(at in any::<prop::sample::Index>(), bit in 0..8) {
            let mut bytes = Package::sign(&manifest(), object(), &key()).unwrap();
            let at = at.index(bytes.len());
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(Package::read(&bytes).is_err());
        }

        #[test]
        fn read__any_end_is_noticed(at in any::<prop::sample::Index>()) {
            let bytes = Package::sign(&manifest(), object(), &key()).unwrap();
            prop_assert!(Package::read(&bytes[..at.index(bytes.len())]).is_err());
        }

        #[test]
        fn read__anything_at_all(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            prop_assert!(Package::read(&bytes).is_err());
        }

        #[test]
        fn describe__damaged_objects_do_no_harm(
            at in any::<prop::sample::Index>(), word in any::<u64>(),
        ) {
            let mut image = object().to_vec();
            let at = at.index(image.len() - 8);
            image[at..at + 8].copy_from_slice(&word.to_le_bytes());
            let _ = Description::read(&image);
            let _ = allowlist::check(&image);
            // The section headers: few bytes, but the reader relies on most of them.
            let mut image = object().to_vec();
            let table = u64::from_le_bytes(image[40..48].try_into().unwrap()) as usize;
            let at = table + at % (image.len() - table - 8);
            image[at..at + 8].copy_from_slice(&word.to_le_bytes());
            let _ = Description::read(&image);
            let _ = allowlist::check(&image);
        }
    }
}
