//! A certificate, as any host shows it on a control connection: it is parsed or refused, and what parses was signed.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use vtl_pool::{Certificate, key::SecretKey};

static KEY: LazyLock<SecretKey> = LazyLock::new(|| SecretKey::generate().expect("a key"));

fuzz_target!(|data: &[u8]| {
    if let Ok(parsed) = Certificate::parse(data) {
        assert!(parsed.expiry().to_string().ends_with('Z'));
        assert!(Certificate::parse(&data[1..]).is_err());
    }
    // The same form with a signature that fits: whatever the fields say, it reads as it was written.
    let Some((head, name)) = data.split_first_chunk::<9>() else {
        return;
    };
    let expires = u64::from_le_bytes(head[1..].try_into().expect("eight"));
    let name = String::from_utf8_lossy(name);
    let bits = head[0];
    let addresses = [([10, 0, 0, 0].into(), bits)];
    if let Ok(bytes) = Certificate::sign(&name, KEY.public(), &addresses, expires, &KEY) {
        let parsed = Certificate::parse(&bytes).expect("it was checked when it was signed");
        assert_eq!((parsed.name, parsed.expires), (name.into_owned(), expires));
        assert_eq!(parsed.addresses, addresses);
    }
});
