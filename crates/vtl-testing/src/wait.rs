//! Waiting, for something that must come: never for a time that should suffice.

use std::{
    thread,
    time::{Duration, Instant},
};

/// After this a test calls what it waits for hung. No test decides anything else by time, so this is much
/// longer than a machine that does other things takes for any of it.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Asks again and again, until the answer is yes.
///
/// # Panics
/// When [`PATIENCE`] is at its end.
#[track_caller]
pub fn until(what: &str, mut yes: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !yes() {
        assert!(Instant::now() < deadline, "hung: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}
