//! Packages, as a registry or anybody else may hand them over. The first byte chooses what the rest is: a package's
//! file, or its manifest and its object, which are then signed, so that they get behind the signature.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::{Corpus, fuzz_target};
use vtl_pool::{
    Manifest, Package, allowlist,
    key::{PublicKey, SecretKey},
    manifest::Project,
    object::{Description, licence},
};

static KEY: LazyLock<SecretKey> = LazyLock::new(|| SecretKey::generate().expect("randomness"));

fn object(image: &[u8]) {
    let description = Description::read(image);
    let _ = (allowlist::check(image), licence(image));
    if let Ok(description) = description {
        description.founded();
        let project = Project::built_in(&description, Default::default());
        if let Ok(manifest) = project.manifest(&description)
            && let Ok(bytes) = Package::sign(&manifest, image, &KEY)
        {
            let package = Package::read(&bytes).expect("what was signed is whole");
            assert_eq!((package.manifest, &package.object[..]), (manifest, image));
        }
    }
}

fn manifest(text: &str) {
    if let Ok(manifest) = Manifest::parse(text) {
        let again = Manifest::parse(&manifest.to_text()).expect("it was parsed before");
        assert_eq!(again, manifest);
        assert!(!manifest.file_name().contains('/'));
        manifest.to_json();
    }
    let _ = Project::parse(text);
    let _ = PublicKey::parse(text);
    let _ = text.parse::<vtl_pool::Version>();
    let _ = text.parse::<vtl_pool::manifest::Wanted>();
}

fuzz_target!(|data: &[u8]| -> Corpus {
    let Some((kind, data)) = data.split_first() else {
        return Corpus::Reject;
    };
    match kind {
        b'o' => object(data),
        b'm' => match std::str::from_utf8(data) {
            Ok(text) => manifest(text),
            Err(_) => return Corpus::Reject,
        },
        b'p' => {
            if let Ok(package) = Package::read(data) {
                package.identity();
            }
        }
        _ => return Corpus::Reject,
    }
    Corpus::Keep
});
