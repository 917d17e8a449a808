//! What the other end of a file transfer says: what is taken is written as the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vtl_proto::file::{Offer, Verdict};

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    if let Ok(offer) = Offer::read(&mut rest) {
        let mut again = Vec::new();
        offer.write(&mut again).expect("memory");
        assert_eq!(again, data[..data.len() - rest.len()]);
    }
    let mut rest = data;
    if let Ok(verdict) = Verdict::read(&mut rest) {
        let mut again = Vec::new();
        verdict.write(&mut again).expect("memory");
        assert_eq!(again, data[..data.len() - rest.len()]);
        let _ = verdict.into_result();
    }
});
