//! One test at a time where tests share what the machine has once.

use std::fs::File;

use nix::fcntl::{Flock, FlockArg};

/// The turn of the test that holds it.
#[derive(Debug)]
pub struct Turn(#[allow(dead_code, reason = "held")] Flock<File>);

/// Waits until no other test holds the turn, over all processes of this machine. For tests that make
/// testbeds or measure: what one leaves behind is no other's fault. Needs root.
///
/// # Panics
/// The lock file cannot be made.
pub fn turn() -> Turn {
    let file = File::create("/run/vtl-testbed-tests.lock").expect("a lock file");
    Turn(Flock::lock(file, FlockArg::LockExclusive).expect("a lock"))
}
