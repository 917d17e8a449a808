//! Orderly end of the daemon when one of its threads panics.
//!
//! Threads depend on each other: without one of them the daemon would accept connections that nobody serves. So
//! a panic is handled as SIGTERM, which hands over all state except the panicked thread's, and then as a
//! failure, so that the service manager starts the next daemon. Panics in `isolated` tasks end those alone.

use std::{
    backtrace::{Backtrace, BacktraceStatus},
    cell::Cell,
    fs, panic,
    path::PathBuf,
    pin::pin,
    process,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, alarm},
};

/// Timeout of the orderly end after a panic.
const PATIENCE_S: u32 = 10;
/// For tests only: names a file with the name of a thread, which panics. No effect without this variable or the
/// file.
const TEST: &str = "VTL_TEST_PANIC";

static PANICKED: AtomicBool = AtomicBool::new(false);
static TEST_FILE: OnceLock<PathBuf> = OnceLock::new();

thread_local! {
    static ISOLATED: Cell<bool> = const { Cell::new(false) };
}

/// Installs the panic handler. SIGTERM must be blocked in all threads but the one that waits for it.
pub fn watch() {
    if let Some(path) = std::env::var_os(TEST) {
        let _ = TEST_FILE.set(path.into());
    }
    panic::set_hook(Box::new(|panic| {
        let current = thread::current();
        let thread = current.name().unwrap_or("unnamed");
        tracing::error!(thread, %panic, "panic: the daemon hands over and exits");
        let trace = Backtrace::capture();
        if trace.status() == BacktraceStatus::Captured {
            tracing::error!(thread, "{trace}");
        }
        if !PANICKED.swap(true, Ordering::SeqCst) {
            // SIGALRM's default action ends the process: that needs neither a lock nor a thread.
            alarm::set(PATIENCE_S);
            let _ = kill(Pid::this(), Signal::SIGTERM);
        }
    }));
}

/// Installs the panic handler of a process of carriers: isolated tasks end alone, any other panic ends it at
/// once.
pub fn watch_carriers() {
    panic::set_hook(Box::new(|panic| {
        if ISOLATED.get() {
            tracing::warn!(%panic, "panic: one carrier closed");
            return;
        }
        // The log is no longer written.
        eprintln!("vtld: a process of carriers ends: {panic}");
        process::exit(1);
    }));
}

/// Whether a thread has panicked, so that the daemon ends.
pub fn happened() -> bool {
    PANICKED.load(Ordering::SeqCst)
}

/// Runs a task whose panic ends it alone.
pub(crate) async fn isolated<F: Future>(task: F) -> F::Output {
    let mut task = pin!(task);
    std::future::poll_fn(|context| {
        let _mark = Mark::set();
        task.as_mut().poll(context)
    })
    .await
}

/// Marks the thread as isolated until dropped, also by a panic.
struct Mark;

impl Mark {
    fn set() -> Self {
        ISOLATED.set(true);
        Self
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        ISOLATED.set(false);
    }
}

/// Panics if a test has requested it for this thread.
pub(crate) fn test_point() {
    let Some(path) = TEST_FILE.get() else {
        return;
    };
    let Ok(wanted) = fs::read_to_string(path) else {
        return;
    };
    if thread::current().name() == Some(wanted.trim()) {
        // Once only.
        let _ = fs::remove_file(path);
        panic!("{TEST}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isolated__only_while_the_task_is_polled() {
        let mut task = Box::pin(isolated(async {
            assert!(ISOLATED.get());
            std::future::pending::<()>().await;
        }));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(task.as_mut().poll(&mut context).is_pending());
        assert!(!ISOLATED.get());
        let mut task = Box::pin(isolated(async { panic!("alone") }));
        let poll = panic::AssertUnwindSafe(|| task.as_mut().poll(&mut context));
        assert!(panic::catch_unwind(poll).is_err());
        assert!(!ISOLATED.get());
    }
}
