//! The two rings of a session: packet-sized slots in memory shared by user space and the kernel's
//! programs. Layout, and the writer of each field: `bpf/include/vtl/intf.h`.
//!
//! - [`TxRing`]: the writer's side; [`Lanes`]: order of messages in a ring with partial order;
//! - [`RxRing`]: the reader's side;
//! - [`Controls`]: the daemon's view of both;
//! - [`Events`]: the kernel's wake-ups for the user of a session;
//! - [`egress`]: sends published packets without the daemon's pump.
//!
//! With keys, [`TxRing`] seals payloads before the kernel sees them, and [`RxRing`] opens them at
//! the first read. [`seal`] also seals the packets of other carriers.
//!
//! An aware application maps the rings of its own session (crate `vtl`); the daemon maps those of
//! hooked flows.

mod controls;
pub mod egress;
mod events;
mod lanes;
#[cfg_attr(miri, path = "mapping_miri.rs")]
mod mapping;
mod receive;
pub mod seal;
mod transmit;
mod unsealed;

use std::{
    io,
    num::NonZero,
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

use vtl_proto::intf::{self, vtl_ring_ctl, vtl_slot};

pub use controls::Controls;
pub use events::Events;
pub use lanes::Lanes;
pub use receive::RxRing;
pub use transmit::TxRing;

const SLOT: usize = intf::VTL_SLOT_SIZE as usize;

/// A mapped ring: the control slot, then `slots` packets.
struct Ring {
    base: NonNull<u8>,
    slots: u32,
}

// SAFETY: shared memory by nature; the control fields are only touched atomically, and the slots
// only by the side that the protocol of producer and consumer names.
unsafe impl Send for Ring {}

impl Ring {
    fn map(fd: BorrowedFd<'_>, slots: u32) -> io::Result<Self> {
        if !slots.is_power_of_two() || slots > intf::VTL_MAX_WINDOW {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "bad number of slots",
            ));
        }
        let length = NonZero::new(Self::length(slots)).expect("at least the control slot");
        Ok(Self {
            base: mapping::map(fd, length)?,
            slots,
        })
    }

    fn length(slots: u32) -> usize {
        ((slots as usize + 1) * SLOT).next_multiple_of(4096)
    }

    fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned field of the control slot, inside the mapping.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn producer(&self) -> &AtomicU64 {
        self.word64(std::mem::offset_of!(vtl_ring_ctl, producer))
    }

    fn consumer(&self) -> &AtomicU64 {
        self.word64(std::mem::offset_of!(vtl_ring_ctl, consumer))
    }

    fn waiting(&self) -> &AtomicU32 {
        self.word32(std::mem::offset_of!(vtl_ring_ctl, waiting))
    }

    fn refill(&self) -> &AtomicU32 {
        self.word32(std::mem::offset_of!(vtl_ring_ctl, refill))
    }

    fn path_payload(&self) -> &AtomicU32 {
        self.word32(std::mem::offset_of!(vtl_ring_ctl, path_payload))
    }

    fn notsent_lowat(&self) -> &AtomicU32 {
        self.word32(std::mem::offset_of!(vtl_ring_ctl, notsent_lowat))
    }

    fn closed(&self) -> &AtomicU32 {
        self.word32(std::mem::offset_of!(vtl_ring_ctl, closed))
    }

    fn set_closed(&self, why: u32) {
        let succeeded = self.closed().load(Ordering::Relaxed) & intf::VTL_SUCCEEDED;
        self.closed()
            .store(succeeded | (why + 1), Ordering::Release);
    }

    /// Index of a packet's slot.
    fn index(&self, packet: u64) -> usize {
        (packet & u64::from(self.slots - 1)) as usize
    }

    fn slot(&self, packet: u64) -> NonNull<vtl_slot> {
        let offset = (1 + self.index(packet)) * SLOT;
        // SAFETY: the index is below `slots`: inside the mapping.
        unsafe { self.base.add(offset) }.cast()
    }

    /// Address and length of a packet's payload; the length is clamped to the maximum, whatever the
    /// slot says.
    fn content(&self, packet: u64) -> (*mut u8, usize) {
        let slot = self.slot(packet).as_ptr();
        // SAFETY: inside the mapping. Read once: a misbehaving writer can change it only after it
        // was clamped.
        unsafe {
            let len = (&raw const (*slot).len).read_volatile() as usize;
            let data = (&raw mut (*slot).data).cast();
            (data, len.min(intf::VTL_MAX_PAYLOAD as usize))
        }
    }

    /// The stamp in a packet's slot: in a list, the number of the packet to be read.
    fn stamp(&self, packet: u64) -> u64 {
        // SAFETY: inside the mapping; read once, as above.
        unsafe { (&raw const (*self.slot(packet).as_ptr()).stamp).read_volatile() }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; the borrows of it have ended.
        unsafe { mapping::unmap(self.base, Self::length(self.slots)) };
    }
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The peer closed it after everything was delivered.
    ByPeer,
    /// The peer did not answer any more, or gave up: data may be missing.
    Broken,
    /// This side's daemon closed it.
    Local,
    /// A stateless switch has ended it: its successor goes on, what was in flight is given up.
    Cut,
}

fn closed(value: u32) -> Option<Closed> {
    match (value & !intf::VTL_SUCCEEDED).checked_sub(1)? {
        intf::VTL_CLOSED_BY_PEER => Some(Closed::ByPeer),
        intf::VTL_CLOSED_LOCAL => Some(Closed::Local),
        intf::VTL_CLOSED_CUT => Some(Closed::Cut),
        _ => Some(Closed::Broken),
    }
}

/// Zeroes a ring, so that its next user sees no data of the previous one.
///
/// # Errors
/// The system's, if the ring cannot be mapped.
pub fn clear(fd: BorrowedFd<'_>, slots: u32) -> io::Result<()> {
    let ring = Ring::map(fd, slots)?;
    // SAFETY: the whole mapping; a ring out of use has no other user.
    unsafe { ring.base.write_bytes(0, Ring::length(slots)) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;

    pub(super) const SLOTS: u32 = 8;

    /// A ring in ordinary memory, in place of the kernel's.
    pub(super) fn memory() -> OwnedFd {
        #[cfg(miri)]
        {
            let fd = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            mapping::renew(fd.as_fd());
            return fd;
        }
        #[cfg(not(miri))]
        shared_memory()
    }

    #[cfg(not(miri))]
    fn shared_memory() -> OwnedFd {
        let fd =
            nix::sys::memfd::memfd_create(c"ring", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&fd, Ring::length(SLOTS) as i64).unwrap();
        fd
    }

    #[test]
    fn map__refuses_impossible_sizes() {
        let fd = memory();
        assert!(TxRing::map(fd.as_fd(), 7, 100).is_err());
        assert!(TxRing::map(fd.as_fd(), 1 << 20, 100).is_err());
        assert!(TxRing::map(fd.as_fd(), SLOTS, 0).is_err());
        assert!(RxRing::map(fd.as_fd(), 0).is_err());
    }

    #[test]
    fn clear__leaves_nothing() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.slot(0).fill(7);
        tx.publish(&[100]);
        drop(tx);
        clear(fd.as_fd(), SLOTS).unwrap();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        assert_eq!(tx.unacknowledged(), 0);
        assert!(tx.slot(0).iter().all(|b| *b == 0));
    }

    /// Under Miri, checks that the memory ordering of the control fields suffices.
    #[test]
    fn rings__a_writer_and_a_reader_in_two_threads() {
        const PACKETS: u64 = 3 * SLOTS as u64;
        let fd = memory();
        // Both sides of one ring: the kernel only carries packets from ring to ring.
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        let mut rx = RxRing::map(fd.as_fd(), SLOTS).unwrap();
        let writer = std::thread::spawn(move || {
            for packet in 0..PACKETS {
                while tx.room() == 0 {
                    std::thread::yield_now();
                }
                tx.slot(0).fill(packet as u8);
                tx.publish(&[1 + packet as u32]);
            }
        });
        for packet in 0..PACKETS {
            while rx.available() == 0 {
                std::thread::yield_now();
            }
            assert_eq!(rx.packet(0), vec![packet as u8; 1 + packet as usize]);
            rx.consume(1);
        }
        writer.join().unwrap();
    }
}
