//! Requests by the control socket, as any local member may send them: what is taken is written as the same request.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vtl_control::Request;

fuzz_target!(|data: &[u8]| {
    let Ok(message) = serde_json::from_slice(data) else {
        return;
    };
    match Request::parse(&message) {
        Ok(request) => {
            let again = serde_json::to_value(&request).expect("a request is JSON");
            assert_eq!(Request::parse(&again).as_ref(), Ok(&request));
        }
        // One sentence that fits a line of a log.
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
