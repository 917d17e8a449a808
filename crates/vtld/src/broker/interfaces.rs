//! The interfaces for egress.

use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd},
};

use vtl_bpf::netdev::Changes;

/// Watches interfaces for changes, and keeps their egress drivers.
pub(super) struct Interfaces {
    changes: Changes,
    /// Driver by interface, and why it was chosen.
    drivers: HashMap<u32, (&'static str, String)>,
}

impl Interfaces {
    /// Starts watching for changes.
    ///
    /// # Errors
    /// The kernel refuses the netlink socket.
    pub(super) fn watch() -> vtl_bpf::Result<Self> {
        Ok(Self {
            changes: Changes::open()?,
            drivers: HashMap::new(),
        })
    }

    /// Becomes readable when interfaces have changed.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }

    /// Drains pending change notifications.
    pub(super) fn take_changes(&mut self) {
        self.changes.take();
    }

    /// Notes the egress driver of an interface, and why it was chosen.
    pub(super) fn note_driver(&mut self, index: u32, name: &'static str, why: String) {
        self.drivers.insert(index, (name, why));
    }

    /// The egress driver of an interface, and why it was chosen.
    pub(super) fn driver(&self, index: u32) -> Option<(&'static str, &str)> {
        let (name, why) = self.drivers.get(&index)?;
        Some((name, why))
    }

    /// Removes an interface that has gone.
    pub(super) fn forget(&mut self, index: u32) {
        self.drivers.remove(&index);
    }
}
