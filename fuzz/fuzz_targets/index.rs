//! An index of packages, as a registry sends it: it is read or refused, and what is read was signed.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use vtl_pool::{Index, key::SecretKey, revocations::Revocation};

static KEY: LazyLock<SecretKey> = LazyLock::new(|| SecretKey::generate().expect("a key"));

fuzz_target!(|data: &[u8]| {
    if let Ok(index) = Index::read(data) {
        assert_eq!(index.bytes(), data);
        assert!(index.serial() > 0 && index.expiry().to_string().ends_with('Z'));
    }
    // One with a signature that fits: whatever is in it, it is read as it was written, or not signed.
    let Some((head, name)) = data.split_first_chunk::<8>() else {
        return;
    };
    let name = String::from_utf8_lossy(name).into_owned();
    let revocations = vec![
        Revocation::Before(name, Default::default()),
        Revocation::Package([head[0]; 32]),
    ];
    let expires = u64::from_le_bytes(*head);
    if let Ok(index) = Index::update(None, &[], revocations, expires, &KEY) {
        assert_eq!(Index::read(index.bytes()).ok(), Some(index));
    }
});
