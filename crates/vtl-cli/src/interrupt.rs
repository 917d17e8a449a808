//! Noticing that the user wants the program to end, so that it can clean up first.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::failure::Failure;

/// Set once SIGINT, SIGTERM or SIGHUP has arrived.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Catches the signals from now on.
    pub(crate) fn catch() -> io::Result<Self> {
        let flag = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag.0))?;
        }
        Ok(flag)
    }

    /// Fails once a signal has arrived.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        if self.0.load(Ordering::Relaxed) {
            return Err(Failure::interrupted());
        }
        Ok(())
    }
}
