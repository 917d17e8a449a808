//! The interfaces that packets leave by.

use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd},
};

use vtl_bpf::netdev::Changes;

/// Which there are, and how packets leave them.
pub(super) struct Interfaces {
    changes: Changes,
    /// By which driver, and why.
    drivers: HashMap<u32, (&'static str, String)>,
}

impl Interfaces {
    /// Watches for changes.
    ///
    /// # Errors
    /// What the kernel refused.
    pub(super) fn watch() -> vtl_bpf::Result<Self> {
        Ok(Self {
            changes: Changes::open()?,
            drivers: HashMap::new(),
        })
    }

    /// Can be read from when interfaces have changed.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }

    /// Takes note that they have.
    pub(super) fn take_changes(&mut self) {
        self.changes.take();
    }

    /// Packets leave an interface by this driver, and why.
    pub(super) fn note_driver(&mut self, index: u32, name: &'static str, why: String) {
        self.drivers.insert(index, (name, why));
    }

    /// By which driver packets leave an interface, and why.
    pub(super) fn driver(&self, index: u32) -> Option<(&'static str, &str)> {
        let (name, why) = self.drivers.get(&index)?;
        Some((name, why))
    }

    /// An interface has gone.
    pub(super) fn forget(&mut self, index: u32) {
        self.drivers.remove(&index);
    }
}
