//! Mapping of shared memory.

use std::{io, num::NonZero, os::fd::BorrowedFd, ptr::NonNull};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// Maps `length` bytes of a file, for reading and writing.
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

/// Unmaps a mapping.
///
/// # Safety
/// `base` and `length` are those of a call of [`map`], and no reference into it is left.
pub(super) unsafe fn unmap(base: NonNull<u8>, length: usize) {
    // SAFETY: as the caller says.
    let _ = unsafe { munmap(base.cast(), length) };
}
