//! Noticing that the user wants the program to end, so that it can clean up first.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// The user asked the program to end.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// Set once SIGINT, SIGTERM or SIGHUP has arrived.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches the signals from now on.
    ///
    /// # Errors
    /// A handler cannot be installed.
    pub(crate) fn catch() -> io::Result<Self> {
        let flag = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag.0))?;
        }
        Ok(flag)
    }

    /// As if a signal had arrived.
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether a signal has arrived.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Fails once a signal has arrived.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub(crate) fn check(&self) -> Result<(), Interrupted> {
        if self.is_set() {
            return Err(Interrupted);
        }
        Ok(())
    }
}
