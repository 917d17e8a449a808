//! Keys, and the pool's directory.
#![allow(missing_docs, non_snake_case)]

use std::{
    fs,
    os::unix::fs::{PermissionsExt, chown, symlink},
    path::{Path, PathBuf},
};

use vtl_pool::{
    Manifest, Package, Pool,
    key::{PublicKey, SecretKey, Trust},
    manifest::Project,
    object::Description,
    pool::{Origin, store},
    revocations::{FILE, Revocation, Revocations},
};

/// A directory that vanishes with its owner.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vtl-pool-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A graft that comes with VTL, under another name and gid.
fn object(name: &str, gid: u32) -> Vec<u8> {
    let mut image = vtl_bpf::objects::graft("selective-repeat")
        .unwrap()
        .to_vec();
    let old = b"selective-repeat\0";
    let at = image.windows(old.len()).position(|w| w == old).unwrap();
    image[at..at + 32].fill(0);
    image[at..at + name.len()].copy_from_slice(name.as_bytes());
    let at = at + std::mem::offset_of!(vtl_proto::intf::vtl_graft_info, gid);
    image[at..at + 4].copy_from_slice(&gid.to_le_bytes());
    image
}

fn package(name: &str, gid: u32, version: &str, key: &SecretKey) -> (Manifest, Vec<u8>) {
    let object = object(name, gid);
    let description = Description::read(&object).unwrap();
    let project = Project {
        name: name.into(),
        version: version.parse().unwrap(),
        gid: gid as u16,
        services: description.services,
        licence: "GPL-2.0-only".into(),
        author: "Ada".into(),
    };
    let manifest = project.manifest(&description).unwrap();
    let bytes = Package::sign(&manifest, &object, key).unwrap();
    (manifest, bytes)
}

fn built_in() -> Pool {
    let images = vtl_bpf::objects::GRAFTS.iter().map(|(_, image)| *image);
    Pool::new(images, "0.1.0".parse().unwrap()).unwrap()
}

fn put(folder: &Path, (manifest, bytes): (Manifest, Vec<u8>)) -> PathBuf {
    store(folder, &manifest, &bytes).unwrap()
}

#[test]
fn key__written_0600_and_read_only_so() {
    let scratch = Scratch::new("key");
    let key = SecretKey::generate().unwrap();
    let (secret, public) = key.write(&scratch.0, "me").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&secret), 0o600);
    assert_eq!(SecretKey::read(&secret).unwrap().public(), key.public());
    assert_eq!(PublicKey::read(&public).unwrap(), key.public());
    // Neither written over, nor taken for the other.
    assert!(key.write(&scratch.0, "me").is_err());
    assert!(PublicKey::read(&secret).is_err());
    assert!(
        !format!("{key:?}").contains(
            fs::read_to_string(&secret)
                .unwrap()
                .trim_start_matches("vtl-secret-key ")
                .trim()
        )
    );
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).unwrap();
    let why = SecretKey::read(&secret).unwrap_err().to_string();
    assert!(why.contains("chmod 600"), "{why}");
}

#[test]
fn trust__leaves_out_what_others_may_change() {
    let scratch = Scratch::new("trust");
    for name in ["good", "open", "bad"] {
        SecretKey::generate()
            .unwrap()
            .write(&scratch.0, name)
            .unwrap();
    }
    fs::set_permissions(
        scratch.0.join("open.pub"),
        fs::Permissions::from_mode(0o666),
    )
    .unwrap();
    fs::write(scratch.0.join("bad.pub"), "vtl-public-key 12\n").unwrap();
    let trust = Trust::read(&scratch.0).unwrap();
    let names: Vec<_> = trust.keys().map(|(name, _)| name).collect();
    assert_eq!(names, ["good"]);
    assert_eq!(trust.left_out.len(), 2);
    assert_eq!(
        Trust::read(&scratch.0.join("none")).unwrap().keys().count(),
        0
    );
}

#[test]
fn trust__leaves_out_what_belongs_to_others() {
    let scratch = Scratch::new("owner");
    for name in ["theirs", "roots", "ours"] {
        let key = SecretKey::generate().unwrap();
        key.write(&scratch.0, name).unwrap();
    }
    let give = |path: &Path, uid| chown(path, Some(uid), None);
    if !vtl_testing::is_root() {
        return;
    }
    give(&scratch.0, 1000).unwrap();
    give(&scratch.0.join("theirs.pub"), 65_534).unwrap();
    give(&scratch.0.join("ours.pub"), 1000).unwrap();
    let trust = Trust::read(&scratch.0).unwrap();
    let names: Vec<_> = trust.keys().map(|(name, _)| name).collect();
    assert_eq!(names, ["ours", "roots"]);
    let why = trust.left_out[0].to_string();
    assert!(
        why.contains("theirs.pub") && why.contains("chown root"),
        "{why}"
    );
}

#[test]
fn refresh__takes_what_is_right_and_says_what_is_not() {
    let scratch = Scratch::new("refresh");
    let (folder, key) = (&scratch.0, SecretKey::generate().unwrap());
    let mut trust = Trust::default();
    trust.add("ada", key.public());
    let mut pool = built_in();
    let own = pool.entries().len();
    pool.refresh(&folder.join("none"), &trust).unwrap();
    assert_eq!(pool.entries().len(), own);

    let first = put(folder, package("mine", 40, "1.0.0", &key));
    put(folder, package("mine", 40, "1.1.0", &key));
    put(
        folder,
        package("strange", 41, "1.0.0", &SecretKey::generate().unwrap()),
    );
    fs::write(folder.join("broken-1.0.0.vtlg"), b"nothing").unwrap();
    fs::copy(&first, folder.join("renamed-1.0.0.vtlg")).unwrap();
    fs::write(folder.join("unrelated.txt"), b"nothing").unwrap();
    for _ in 0..2 {
        pool.refresh(folder, &trust).unwrap();
        assert_eq!(pool.entries().len(), own + 2);
        let mut why: Vec<_> = pool.refused().iter().map(|(_, e)| e.to_string()).collect();
        why.sort();
        assert_eq!(why.len(), 3, "{why:?}");
        assert!(why[0].contains("no tar archive") || why[0].contains("not a graft package"));
        assert!(
            why.iter()
                .any(|w| w.contains("must be named mine-1.0.0.vtlg")),
            "{why:?}"
        );
        assert!(why.iter().any(|w| w.contains("does not trust")), "{why:?}");
    }
    assert_eq!(
        pool.find("mine").unwrap().manifest.version.to_string(),
        "1.1.0"
    );
    let old = pool.find("mine@1.0.0").unwrap();
    assert_eq!(
        old.origin,
        Origin::Package {
            path: first.clone(),
            signer: "ada".into()
        }
    );
    assert!(pool.find("mine@2.0.0").is_none() && pool.find("mine@x").is_none());
    assert!(pool.find("stream").is_some());
    fs::remove_file(first).unwrap();
    pool.refresh(folder, &trust).unwrap();
    assert!(pool.find("mine@1.0.0").is_none());
    // Who is not trusted any more is out.
    pool.refresh(folder, &Trust::default()).unwrap();
    assert_eq!(pool.entries().len(), own);
}

#[test]
fn refresh__two_with_one_gid() {
    let scratch = Scratch::new("gid");
    let (folder, key) = (&scratch.0, SecretKey::generate().unwrap());
    let mut trust = Trust::default();
    trust.add("ada", key.public());
    let mut pool = built_in();
    let name = |pool: &Pool| -> Vec<String> {
        let packages = pool
            .entries()
            .iter()
            .filter(|e| e.origin != Origin::BuiltIn);
        packages.map(|e| e.manifest.name.clone()).collect()
    };
    put(folder, package("older", 40, "1.0.0", &key));
    pool.refresh(folder, &trust).unwrap();
    // It was there first, whatever the names.
    put(folder, package("newer", 40, "1.0.0", &key));
    pool.refresh(folder, &trust).unwrap();
    assert_eq!(name(&pool), ["older"]);
    let why = pool.refused()[0].1.to_string();
    assert!(why.contains("graft id 40 is taken by \"older\""), "{why}");
    // Nobody takes the place of what comes with VTL.
    put(folder, package("thief", 2, "1.0.0", &key));
    put(folder, package("stream", 42, "9.0.0", &key));
    put(folder, package("selective-repeat", 5, "9.0.0", &key));
    pool.refresh(folder, &trust).unwrap();
    assert_eq!(name(&pool), ["older"]);
    assert_eq!(pool.refused().len(), 4);
}

#[test]
fn store__whole_and_once() {
    let scratch = Scratch::new("store");
    let key = SecretKey::generate().unwrap();
    let (manifest, bytes) = package("mine", 40, "1.0.0", &key);
    let path = store(&scratch.0, &manifest, &bytes).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    store(&scratch.0, &manifest, &bytes).unwrap();
    let (_, other) = package("mine", 40, "1.0.0", &SecretKey::generate().unwrap());
    let why = store(&scratch.0, &manifest, &other)
        .unwrap_err()
        .to_string();
    assert!(why.contains("raise the version"), "{why}");
    assert_eq!(fs::read_dir(&scratch.0).unwrap().count(), 1);
}

/// A directory of keys with one, and one of packages.
fn keys_and_packages(name: &str) -> (Scratch, PathBuf, PathBuf, SecretKey) {
    let scratch = Scratch::new(name);
    let (keys, folder) = (scratch.0.join("keys"), scratch.0.join("pool"));
    for path in [&keys, &folder] {
        fs::create_dir(path).unwrap();
    }
    let key = SecretKey::generate().unwrap();
    key.write(&keys, "ada").unwrap();
    (scratch, keys, folder, key)
}

/// Why packages are refused, after the directories were read.
fn refused(pool: &mut Pool, keys: &Path, folder: &Path) -> Vec<String> {
    pool.refresh(folder, &Trust::read(keys).unwrap()).unwrap();
    let refused = pool.refused().iter();
    refused.map(|(_, error)| error.to_string()).collect()
}

#[test]
fn revocations__of_versions_packages_and_keys() {
    let (_scratch, keys, folder, key) = keys_and_packages("revoked");
    let mut pool = built_in();
    let own = pool.entries().len();
    let old = put(&folder, package("mine", 40, "0.1.9", &key));
    let new = put(&folder, package("mine", 40, "0.1.10", &key));
    put(&folder, package("other", 41, "1.0.0", &key));
    assert!(refused(&mut pool, &keys, &folder).is_empty());
    let identity = pool.find("mine@0.1.9").unwrap().identity.clone().unwrap();
    assert!(!pool.revokes(&identity));

    let before = Revocation::Before("mine".into(), "0.1.10".parse().unwrap());
    let list = Revocations::add(&keys, before).unwrap();
    assert_eq!(list, keys.join(FILE));
    let why = refused(&mut pool, &keys, &folder);
    assert_eq!(why.len(), 1, "{why:?}");
    let words = "mine 0.1.9 is revoked: 0.1.10 is the lowest version";
    assert!(why[0].contains(words) && why[0].contains(FILE), "{why:?}");
    assert!(pool.find("mine@0.1.9").is_none() && pool.find("mine").is_some());
    // It may be in the kernel when its file has gone.
    let bytes = fs::read(&old).unwrap();
    fs::remove_file(&old).unwrap();
    assert!(refused(&mut pool, &keys, &folder).is_empty() && pool.revokes(&identity));
    let opened = Package::open(&bytes, &Trust::read(&keys).unwrap());
    assert!(opened.unwrap_err().to_string().contains("is revoked"));
    // A minimum does not go down.
    let lower = Revocation::Before("mine".into(), "0.1.0".parse().unwrap());
    Revocations::add(&keys, lower).unwrap();
    refused(&mut pool, &keys, &folder);
    assert!(pool.revokes(&identity));

    // By the object, and by the file, in whatever case.
    let package = Package::read(&fs::read(&new).unwrap()).unwrap();
    let identity = package.identity();
    Revocations::add(&keys, Revocation::Package(identity.object)).unwrap();
    let why = refused(&mut pool, &keys, &folder);
    assert!(why[0].contains("this object is revoked"), "{why:?}");
    let file: String = identity.file.iter().map(|b| format!("{b:02X}")).collect();
    fs::write(&list, format!("packages = [\"{file}\"]\n")).unwrap();
    let why = refused(&mut pool, &keys, &folder);
    assert!(why[0].contains("this package is revoked"), "{why:?}");
    assert_eq!(pool.entries().len(), own + 1);

    Revocations::add(&keys, Revocation::Key(key.public())).unwrap();
    let why = refused(&mut pool, &keys, &folder);
    assert_eq!(why.len(), 2);
    let words = format!("the key {} is revoked", key.public().short());
    assert!(why.iter().all(|why| why.contains(&words)), "{why:?}");
    assert_eq!(pool.entries().len(), own, "what is built in stays");
    assert_eq!(fs::read_dir(&keys).unwrap().count(), 3, "no drafts");
}

#[test]
fn revocations__that_cannot_be_used_revoke_everything() {
    let (_scratch, keys, folder, key) = keys_and_packages("unusable");
    let mut pool = built_in();
    let own = pool.entries().len();
    put(&folder, package("mine", 40, "1.0.0", &key));
    let list = keys.join(FILE);
    let mut check = |words: &str| {
        let why = refused(&mut pool, &keys, &folder);
        assert_eq!((why.len(), pool.entries().len()), (1, own));
        assert!(why[0].starts_with("no package is taken"), "{why:?}");
        assert!(why[0].contains(words) && why[0].contains(FILE), "{why:?}");
        let trust = Trust::read(&keys).unwrap();
        assert!(trust.revocations().unusable().is_some());
        // Nor is it written over.
        assert!(Revocations::add(&keys, Revocation::Package([0; 32])).is_err());
    };
    for (text, words) in [
        ("keys = []\nkey = []\n", "line 2: unknown field `key`"),
        (
            "packages = [\"12\"]\n",
            "line 1: `12` has not 64 hexadecimal digits",
        ),
        ("[minimum]\nmine = \"1\"\n", "line 2: "),
        ("[minimum]\n\"m ine\" = \"1.0.0\"\n", "is no graft's name"),
        ("nonsense", "line 1: "),
    ] {
        fs::write(&list, text).unwrap();
        check(words);
    }
    fs::write(&list, b"\xff").unwrap();
    check("not text");
    fs::write(&list, "").unwrap();
    fs::set_permissions(&list, fs::Permissions::from_mode(0o664)).unwrap();
    check("chmod 644");
    fs::remove_file(&list).unwrap();
    symlink("nowhere", &list).unwrap();
    check("cannot read");
    fs::remove_file(&list).unwrap();
    fs::write(&list, "# nothing yet\n").unwrap();
    assert!(refused(&mut pool, &keys, &folder).is_empty());
    assert!(pool.find("mine").is_some());
    if vtl_testing::is_root() {
        chown(&list, Some(65_534), None).unwrap();
        assert!(refused(&mut pool, &keys, &folder)[0].contains("chown root"));
    }
}
