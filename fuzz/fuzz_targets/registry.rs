//! What a registry answers: addresses to go on at, and what it wants to see. An address that it names never leads
//! the login elsewhere.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/vtl-cli/src/registry/challenge.rs"]
mod challenge;
#[allow(dead_code)]
#[path = "../../crates/vtl-cli/src/registry/url.rs"]
mod url;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    challenge::complaint(data);
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let challenge = challenge::Challenge::parse(text);
    let _ = text.parse::<url::Place>();
    let base = url::Url::parse("https://host.example:5000/v2/a/").expect("an address");
    let realm = challenge.realm.as_deref().and_then(url::Url::parse);
    for found in [url::Url::parse(text), base.join(text), realm]
        .into_iter()
        .flatten()
    {
        let again = url::Url::parse(&found.with("key", text).to_string());
        let again = again.filter(|_| text.len() < 1000);
        assert!(again.is_none_or(|again| again.same_origin(&found)));
        assert_eq!(url::Url::parse(&found.to_string()).as_ref(), Some(&found));
        found.is_private();
    }
});
