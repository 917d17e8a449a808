//! Stands in for memory that is shared under Miri, which maps none: all mappings of a descriptor are one allocation.

use std::{
    alloc::{Layout, alloc_zeroed},
    collections::HashMap,
    io,
    num::NonZero,
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr::NonNull,
    sync::{Mutex, PoisonError},
};

/// Size of an allocation, bytes: more than tests map.
const BYTES: usize = 64 << 10;

/// The allocation.
struct Memory(NonNull<u8>);

// SAFETY: nothing but a place, as a mapping's.
unsafe impl Send for Memory {}

static MAPPED: Mutex<Option<HashMap<RawFd, Memory>>> = Mutex::new(None);

pub(super) fn map(fd: BorrowedFd<'_>, length: NonZero<usize>) -> io::Result<NonNull<u8>> {
    if length.get() > BYTES {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = mapped.get_or_insert_default().entry(fd.as_raw_fd());
    let memory = memory.or_insert_with(|| {
        let layout = Layout::from_size_align(BYTES, 4096).expect("a layout");
        // SAFETY: some bytes.
        Memory(NonNull::new(unsafe { alloc_zeroed(layout) }).expect("memory"))
    });
    Ok(memory.0)
}

/// Frees nothing: there may be other mappings.
pub(super) unsafe fn unmap(_base: NonNull<u8>, _length: usize) {}

/// Forgets the mapping of a closed descriptor whose number is in use again.
#[cfg(test)]
pub(super) fn renew(fd: BorrowedFd<'_>) {
    let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
    mapped.get_or_insert_default().remove(&fd.as_raw_fd());
}
