//! Who may use what the machine has once: namespaces by name, the processors, `/run/vtl`.

use std::{
    fs::File,
    sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use nix::fcntl::{Flock, FlockArg};

/// Held by one process of the machine at a time, from its first turn to its end.
static MACHINE: OnceLock<Flock<File>> = OnceLock::new();
/// The standard library lets who wants to be alone wait for no newcomers.
static OTHERS: RwLock<()> = RwLock::new(());

/// The turn of the test that holds it.
#[derive(Debug)]
#[allow(dead_code, reason = "held")]
pub enum Turn {
    /// Others of this process may go on beside it.
    Beside(RwLockReadGuard<'static, ()>),
    /// It is the only one on this machine.
    Alone(RwLockWriteGuard<'static, ()>),
}

/// Waits until no test has the machine for itself. For tests that make testbeds of their own names: what one
/// leaves behind is no other's fault. Needs root.
///
/// # Panics
/// The lock file cannot be made.
pub fn turn() -> Turn {
    take_machine();
    Turn::Beside(OTHERS.read().unwrap_or_else(PoisonError::into_inner))
}

/// Waits until no other test holds a turn, over all processes of this machine. For tests that count or measure
/// what all tests use. Needs root.
///
/// # Panics
/// The lock file cannot be made.
pub fn turn_alone() -> Turn {
    take_machine();
    Turn::Alone(OTHERS.write().unwrap_or_else(PoisonError::into_inner))
}

fn take_machine() {
    MACHINE.get_or_init(|| {
        let file = File::create("/run/vtl-testbed-tests.lock").expect("a lock file");
        Flock::lock(file, FlockArg::LockExclusive).expect("a lock")
    });
}
