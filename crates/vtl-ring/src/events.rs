//! Ring of events by which the kernel's programs wake the application: a BPF ring buffer. The
//! content of events is irrelevant, only their presence counts.

use std::{
    io,
    num::NonZero,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use nix::{
    sys::mman::{MapFlags, ProtFlags, mmap, munmap},
    unistd::{SysconfVar, sysconf},
};

/// The ring buffer: the consumer position is on its first page, the producer position on the
/// second.
pub struct Events {
    fd: OwnedFd,
    read: NonNull<AtomicU64>,
    written: NonNull<AtomicU64>,
    page: NonZero<usize>,
}

// SAFETY: the mapped pages are only touched atomically.
unsafe impl Send for Events {}

impl Events {
    /// Maps the ring of events of a session.
    ///
    /// # Errors
    /// The system's.
    pub fn map(fd: OwnedFd) -> io::Result<Self> {
        let page = sysconf(SysconfVar::PAGE_SIZE)?.and_then(|n| usize::try_from(n).ok());
        let page = page
            .and_then(NonZero::new)
            .ok_or(io::ErrorKind::Unsupported)?;
        let map = |rights: ProtFlags, at: usize| {
            // SAFETY: a new mapping at an address of the kernel's choice.
            unsafe { mmap(None, page, rights, MapFlags::MAP_SHARED, &fd, at as i64) }
        };
        let read = map(ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, 0)?;
        let written = map(ProtFlags::PROT_READ, page.get()).inspect_err(|_| {
            // SAFETY: mapped just now with this length.
            let _ = unsafe { munmap(read, page.get()) };
        })?;
        Ok(Self {
            fd,
            read: read.cast(),
            written: written.cast(),
            page,
        })
    }

    /// Whether events are pending.
    pub fn is_pending(&self) -> bool {
        // SAFETY: as in `clear`.
        let (read, written) = unsafe { (self.read.as_ref(), self.written.as_ref()) };
        read.load(Ordering::Relaxed) != written.load(Ordering::Acquire)
    }

    /// Consumes all events.
    pub fn clear(&self) {
        // SAFETY: each is the first word of its page, mapped as long as `self` lives.
        let (read, written) = unsafe { (self.read.as_ref(), self.written.as_ref()) };
        // The kernel reads `read` after its write: an exchange, since a plain store might be
        // delayed and hide an event that arrives now.
        read.swap(written.load(Ordering::Acquire), Ordering::SeqCst);
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        for at in [self.read, self.written] {
            // SAFETY: mapped in `map` with this length.
            let _ = unsafe { munmap(at.cast(), self.page.get()) };
        }
    }
}
