//! Memory that others share, mapped.

use std::{io, num::NonZero, os::fd::BorrowedFd, ptr::NonNull};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// Maps so many bytes of a file, to be read and written.
///
/// # Errors
/// The system's.
pub(super) fn map(fd: BorrowedFd<'_>, length: NonZero<usize>) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice; the kernel checks its length.
    let base = unsafe {
        mmap(
            None,
            length,
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_SHARED,
            fd,
            0,
        )
    }?;
    Ok(base.cast())
}

/// Ends a mapping.
///
/// # Safety
/// It is one of [`map`], with this length, and nothing of it is used any more.
pub(super) unsafe fn unmap(base: NonNull<u8>, length: usize) {
    // SAFETY: as the caller says.
    let _ = unsafe { munmap(base.cast(), length) };
}
