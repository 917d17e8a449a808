//! The two rings of a session: packet-sized slots in memory that the application and the kernel's
//! programs share. Layout: `bpf/include/vtl/intf.h`.

use std::{
    collections::HashMap,
    io,
    num::NonZero,
    os::fd::{AsFd, BorrowedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use vtl_proto::intf::{self, vtl_ring_ctl, vtl_slot};

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
        Ok(Self {
            base: base.cast(),
            slots,
        })
    }

    fn length(slots: u32) -> usize {
        ((slots as usize + 1) * SLOT).next_multiple_of(4096)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned field of the control slot, inside the mapping.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn half(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    fn producer(&self) -> &AtomicU64 {
        self.word(std::mem::offset_of!(vtl_ring_ctl, producer))
    }

    fn consumer(&self) -> &AtomicU64 {
        self.word(std::mem::offset_of!(vtl_ring_ctl, consumer))
    }

    fn waiting(&self) -> &AtomicU32 {
        self.half(std::mem::offset_of!(vtl_ring_ctl, waiting))
    }

    fn refill(&self) -> &AtomicU32 {
        self.half(std::mem::offset_of!(vtl_ring_ctl, refill))
    }

    fn most(&self) -> &AtomicU32 {
        self.half(std::mem::offset_of!(vtl_ring_ctl, most))
    }

    fn closed(&self) -> &AtomicU32 {
        self.half(std::mem::offset_of!(vtl_ring_ctl, closed))
    }

    fn set_closed(&self, why: u32) {
        let succeeded = self.closed().load(Ordering::Relaxed) & intf::VTL_SUCCEEDED;
        self.closed()
            .store(succeeded | (why + 1), Ordering::Release);
    }

    fn slot(&self, packet: u64) -> NonNull<vtl_slot> {
        let index = 1 + (packet & u64::from(self.slots - 1)) as usize;
        // SAFETY: index is at most `slots`, inside the mapping.
        unsafe { self.base.add(index * SLOT) }.cast()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; the borrows of it have ended.
        let _ = unsafe { munmap(self.base.cast(), Self::length(self.slots)) };
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
}

fn closed(value: u32) -> Option<Closed> {
    match (value & !intf::VTL_SUCCEEDED).checked_sub(1)? {
        intf::VTL_CLOSED_BY_PEER => Some(Closed::ByPeer),
        intf::VTL_CLOSED_LOCAL => Some(Closed::Local),
        _ => Some(Closed::Broken),
    }
}

/// The sending side.
pub struct TxRing {
    ring: Ring,
    next: u64,
    /// `consumer` when it was last looked at: the kernel writes there, so looking is not free.
    acknowledged: u64,
    max_payload: u32,
}

impl TxRing {
    /// Maps a transmit ring of `slots` packets with at most `max_payload` bytes each.
    ///
    /// # Errors
    /// The system's, or `InvalidInput` for impossible sizes.
    pub fn map(fd: BorrowedFd<'_>, slots: u32, max_payload: u16) -> io::Result<Self> {
        if max_payload == 0 || u32::from(max_payload) > intf::VTL_MAX_PAYLOAD {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "bad payload size",
            ));
        }
        let ring = Ring::map(fd, slots)?;
        let next = ring.producer().load(Ordering::Relaxed);
        Ok(Self {
            ring,
            next,
            acknowledged: next,
            max_payload: max_payload.into(),
        })
    }

    /// Bytes that a packet should have at most. Becomes less when the path takes less.
    pub fn max_payload(&self) -> usize {
        let most = self.max_payload as usize;
        match self.ring.most().load(Ordering::Relaxed) as usize {
            0 => most,
            path => path.min(most),
        }
    }

    /// Tells whoever writes packets how many bytes the path takes.
    pub fn set_path(&self, most: u16) {
        self.ring.most().store(most.into(), Ordering::Relaxed);
    }

    /// Slots that may be written now.
    pub fn room(&mut self) -> u64 {
        self.acknowledged = self.ring.consumer().load(Ordering::Acquire);
        self.known_room()
    }

    /// As [`TxRing::room`] when that was last asked: at most what it is now.
    fn known_room(&self) -> u64 {
        let used = self.next.wrapping_sub(self.acknowledged);
        u64::from(self.ring.slots).saturating_sub(used)
    }

    /// The payload area of the `ahead`-th slot to be written, as many bytes as the ring was mapped
    /// for.
    ///
    /// # Panics
    /// If `ahead` is not below [`TxRing::room`].
    pub fn slot(&mut self, ahead: u64) -> &mut [u8] {
        assert!(
            ahead < self.known_room() || ahead < self.room(),
            "that slot still holds a packet in flight"
        );
        let slot = self.ring.slot(self.next + ahead).as_ptr();
        // SAFETY: inside the slot; the kernel only reads it, and not before it is published.
        unsafe {
            std::slice::from_raw_parts_mut(
                (&raw mut (*slot).data).cast(),
                self.max_payload as usize,
            )
        }
    }

    /// Room for `bytes` bytes in the next slots, leaving out the first `skip` bytes of each: for
    /// reading straight into them. The last area is cut to make the sum right. `most`: bytes per
    /// packet, as [`TxRing::max_payload`] said.
    ///
    /// # Panics
    /// If that takes more slots than [`TxRing::room`], `skip` is not below `most`, or `most` is more
    /// than the ring was mapped for.
    pub fn areas(
        &mut self,
        bytes: usize,
        most: usize,
        skip: usize,
    ) -> Vec<std::io::IoSliceMut<'_>> {
        assert!(most <= self.max_payload as usize);
        let each = most - skip;
        let count = bytes.div_ceil(each);
        assert!(count as u64 <= self.room());
        (0..count)
            .map(|ahead| {
                let slot = self.ring.slot(self.next + ahead as u64).as_ptr();
                let length = each.min(bytes - ahead * each);
                // SAFETY: inside the slot; different slots do not overlap, as count is at most
                // the number of slots; the kernel only reads them, once they are published.
                let area = unsafe {
                    let data: *mut u8 = (&raw mut (*slot).data).cast();
                    std::slice::from_raw_parts_mut(data.add(skip), length)
                };
                std::io::IoSliceMut::new(area)
            })
            .collect()
    }

    /// Publishes the next slots, with the lengths of their payload. Returns true if the daemon must
    /// be kicked because its pump had gone to sleep.
    ///
    /// # Panics
    /// If a length is 0 or too large, or there are more than [`TxRing::room`].
    pub fn publish(&mut self, lengths: &[u32]) -> bool {
        self.publish_with(lengths, |_| 0)
    }

    /// As [`TxRing::publish`], for slots that hold one message, or a part of it: with `goes_on`
    /// the next slot to be published goes on with it.
    ///
    /// # Panics
    /// As [`TxRing::publish`].
    pub fn publish_message(&mut self, lengths: &[u32], goes_on: bool) -> bool {
        self.publish_with(lengths, |i| {
            let more = goes_on || i + 1 < lengths.len();
            if more { intf::VTL_F_MORE } else { 0 }
        })
    }

    /// As [`TxRing::publish`] where the order is partial: each packet follows the one before it in
    /// the same lane.
    ///
    /// # Panics
    /// As [`TxRing::publish`].
    pub fn publish_in_lane(&mut self, lengths: &[u32], lane: u32, lanes: &mut Lanes) -> bool {
        let next = self.next;
        self.publish_with(lengths, |i| {
            lanes.follow(lane, next + i as u64) << intf::VTL_LANE_SHIFT
        })
    }

    /// Publishes a packet that says that nothing follows in this session: what does, does in the one
    /// that succeeds it. Returns as [`TxRing::publish`].
    ///
    /// # Panics
    /// Without [`TxRing::room`].
    pub fn publish_last(&mut self) -> bool {
        self.slot(0)[0] = 0;
        self.publish_with(&[1], |_| intf::VTL_F_LAST)
    }

    fn publish_with(&mut self, lengths: &[u32], mut more: impl FnMut(usize) -> u32) -> bool {
        let count = lengths.len() as u64;
        assert!(count <= self.known_room() || count <= self.room());
        for (i, len) in lengths.iter().enumerate() {
            assert!((1..=self.max_payload).contains(len));
            let slot = self.ring.slot(self.next + i as u64).as_ptr();
            // SAFETY: inside the slot, which is ours until it is published.
            unsafe { ((*slot).len, (*slot).more) = (*len, more(i)) };
        }
        self.next += lengths.len() as u64;
        self.ring.producer().store(self.next, Ordering::Release);
        // Pairs with egress, which sets `waiting` and then looks at `producer` again.
        fence(Ordering::SeqCst);
        self.ring.waiting().load(Ordering::Relaxed) != 0
            && self.ring.waiting().swap(0, Ordering::AcqRel) != 0
    }

    /// Asks to be woken when a quarter of the ring, or more, is free. Returns false if it is already.
    pub fn wait_for_room(&mut self) -> bool {
        self.ring.refill().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.room() < u64::from(self.ring.slots / 4) && self.closed().is_none() {
            return true;
        }
        self.ring.refill().store(0, Ordering::Relaxed);
        false
    }

    /// Packets published since the session began, whoever did it.
    pub fn published(&self) -> u64 {
        self.ring.producer().load(Ordering::Acquire)
    }

    /// Bytes of payload in the packet that was published last, if there was one.
    pub fn latest(&self) -> Option<u32> {
        let slot = self.ring.slot(self.next.checked_sub(1)?).as_ptr();
        // SAFETY: a slot that this side has written; nobody else does.
        Some(unsafe { (*slot).len })
    }

    /// The first packet that the peer has not acknowledged: for whoever carries packets in place of
    /// the kernel's programs.
    pub fn outstanding(&self) -> Option<&[u8]> {
        let first = self.ring.consumer().load(Ordering::Relaxed);
        if first == self.next {
            return None;
        }
        let slot = self.ring.slot(first).as_ptr();
        // SAFETY: published, and ours to read until it is acknowledged.
        unsafe {
            let len = (*slot).len.min(self.max_payload) as usize;
            Some(std::slice::from_raw_parts(
                (&raw const (*slot).data).cast(),
                len,
            ))
        }
    }

    /// Likewise: packets below this number have arrived. False if they cannot have.
    pub fn acknowledge(&self, below: u64) -> bool {
        let first = self.ring.consumer().load(Ordering::Relaxed);
        let possible = (first..=self.next).contains(&below);
        if possible {
            self.ring.consumer().store(below, Ordering::Release);
        }
        possible
    }

    /// The number of the first packet that the peer has not acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.ring.consumer().load(Ordering::Acquire)
    }

    /// Packets that the peer has not acknowledged.
    pub fn unacknowledged(&self) -> u64 {
        self.next
            .wrapping_sub(self.ring.consumer().load(Ordering::Acquire))
    }

    /// Whether and how the session ended.
    pub fn closed(&self) -> Option<Closed> {
        closed(self.ring.closed().load(Ordering::Acquire))
    }

    /// Marks the session as ended, for the other user of the ring.
    pub fn set_closed(&self, why: u32) {
        self.ring.set_closed(why);
    }

    /// Whether the peer has opened the session that succeeds this one.
    pub fn is_succeeded(&self) -> bool {
        self.ring.closed().load(Ordering::Acquire) & intf::VTL_SUCCEEDED != 0
    }

    /// Tells the other user of the ring that there is a session that succeeds this one.
    pub fn set_succeeded(&self) {
        self.ring
            .closed()
            .fetch_or(intf::VTL_SUCCEEDED, Ordering::Release);
    }
}

/// Runs the egress of the session that the daemon has registered the socket `caller` for, to send
/// one packet of `length` bytes of payload. False if that is not possible here or now.
pub fn run_egress(caller: impl AsFd, length: u32) -> bool {
    /// What precedes the payload, less what precedes that of a UDP packet: then the kernel need
    /// not change the packet's length.
    const HEADERS: usize = size_of::<intf::vtl_data_hdr>() - 8;
    /// What is sent is replaced.
    static NOTHING: [u8; HEADERS + intf::VTL_MAX_PAYLOAD as usize] =
        [0; HEADERS + intf::VTL_MAX_PAYLOAD as usize];
    let least = intf::VTL_MIN_PACKET as usize - 8;
    let length = (HEADERS + length as usize).clamp(least, NOTHING.len());
    nix::unistd::write(caller, &NOTHING[..length]).is_ok()
}

/// The lanes of a session with partial order: the latest packet of each.
#[derive(Default)]
pub struct Lanes {
    latest: HashMap<u32, u64>,
}

impl Lanes {
    /// How many packets back the one is that `packet` follows, the next one of `lane`. 0 if there is
    /// none in the window: then it has arrived.
    fn follow(&mut self, lane: u32, packet: u64) -> u32 {
        let window = u64::from(intf::VTL_MAX_WINDOW);
        if self.latest.len() >= 2 * intf::VTL_MAX_WINDOW as usize {
            self.latest.retain(|_, latest| packet - *latest < window);
        }
        let back = self
            .latest
            .insert(lane, packet)
            .map(|latest| packet - latest);
        back.filter(|back| *back < window).unwrap_or(0) as u32
    }
}

/// The receiving side.
pub struct RxRing {
    ring: Ring,
    /// Slots say which packet is to be read: see [`RxRing::with_list`].
    listed: bool,
    next: u64,
    /// `producer` when it was last looked at: the kernel writes there, so looking is not free.
    arrived: u64,
    told: u64,
    /// The number behind that of the last packet, once that was met.
    end: Option<u64>,
}

impl RxRing {
    /// Maps a receive ring of `slots` packets.
    ///
    /// # Errors
    /// The system's, or `InvalidInput` for impossible sizes.
    pub fn map(fd: BorrowedFd<'_>, slots: u32) -> io::Result<Self> {
        let ring = Ring::map(fd, slots)?;
        let next = ring.consumer().load(Ordering::Relaxed);
        Ok(Self {
            ring,
            listed: false,
            next,
            arrived: next,
            told: next,
            end: None,
        })
    }

    /// As the grafts with partial order fill it: packets lie by their numbers, and the slots hold a
    /// list of them in the order in which they are to be read.
    #[must_use]
    pub fn with_list(mut self) -> Self {
        self.listed = true;
        self
    }

    /// The slot of the `ahead`-th packet to be read.
    fn slot(&self, ahead: u64) -> NonNull<vtl_slot> {
        let slot = self.ring.slot(self.next + ahead);
        if !self.listed {
            return slot;
        }
        // SAFETY: published by the kernel, which leaves it alone until it is consumed.
        self.ring.slot(unsafe { (*slot.as_ptr()).stamp })
    }

    /// Packets that the ring holds.
    pub fn slots(&self) -> u64 {
        self.ring.slots.into()
    }

    /// Packets that have arrived since the session began, whoever put them here.
    pub fn received(&self) -> u64 {
        self.ring.producer().load(Ordering::Acquire)
    }

    /// Puts a packet behind the others, in place of the kernel's programs. False if there is no room.
    pub fn deliver(&mut self, payload: &[u8]) -> bool {
        let next = self.received();
        let full = next.wrapping_sub(self.next) >= u64::from(self.ring.slots);
        if full || payload.len() > intf::VTL_MAX_PAYLOAD as usize {
            return false;
        }
        let slot = self.ring.slot(next).as_ptr();
        // SAFETY: inside the slot, in which nothing is left to be read; nobody else writes.
        unsafe {
            (*slot).len = payload.len() as u32;
            (*slot).more = 0;
            let data: *mut u8 = (&raw mut (*slot).data).cast();
            data.copy_from_nonoverlapping(payload.as_ptr(), payload.len());
        }
        self.ring.producer().store(next + 1, Ordering::Release);
        true
    }

    /// Packets that can be read now.
    pub fn available(&mut self) -> u64 {
        self.arrived = self.ring.producer().load(Ordering::Acquire);
        self.arrived.wrapping_sub(self.next)
    }

    /// The payload of the `ahead`-th packet to be read; empty if that packet was given up.
    ///
    /// # Panics
    /// If `ahead` is not below what [`RxRing::available`] last said.
    pub fn packet(&self, ahead: u64) -> &[u8] {
        assert!(ahead < self.arrived.wrapping_sub(self.next));
        let slot = self.slot(ahead).as_ptr();
        // SAFETY: published by the kernel, which leaves it alone until it is consumed.
        unsafe {
            let len = ((*slot).len as usize).min(intf::VTL_MAX_PAYLOAD as usize);
            std::slice::from_raw_parts((&raw const (*slot).data).cast(), len)
        }
    }

    /// The payload of the `ahead`-th packet to be read, which may lie behind a gap.
    ///
    /// # Panics
    /// If the ring has no place for it.
    ///
    /// # Safety
    /// The packet has arrived: the session's entry says so (`vtl_rx.map`). Where the graft is reliable
    /// and ordered, the kernel leaves it alone from then on until it is consumed.
    pub unsafe fn behind_gap(&self, ahead: u64) -> &[u8] {
        assert!(ahead < self.slots());
        let slot = self.ring.slot(self.next + ahead).as_ptr();
        // SAFETY: inside the mapping; the caller says that nobody writes.
        unsafe {
            let len = ((*slot).len as usize).min(intf::VTL_MAX_PAYLOAD as usize);
            std::slice::from_raw_parts((&raw const (*slot).data).cast(), len)
        }
    }

    /// The number of the packet to be read next.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether the message of the `ahead`-th packet to be read goes on in the packet behind it. Has
    /// a meaning only where messages may take several packets.
    ///
    /// # Panics
    /// As [`RxRing::packet`].
    pub fn goes_on(&self, ahead: u64) -> bool {
        assert!(ahead < self.arrived.wrapping_sub(self.next));
        let slot = self.ring.slot(self.next + ahead).as_ptr();
        // SAFETY: as in `packet`.
        unsafe { (*slot).more & intf::VTL_F_MORE != 0 }
    }

    /// Whether the packet to be read next is the one that [`TxRing::publish_last`] made; it is taken
    /// out then. Has a meaning only where the graft is reliable.
    ///
    /// # Panics
    /// If there is no packet.
    pub fn take_last(&mut self) -> bool {
        let last = self.is_last(0);
        if last {
            // SAFETY: as in `packet`.
            let listed = unsafe { (*self.ring.slot(self.next).as_ptr()).stamp };
            let number = if self.listed { listed } else { self.next };
            self.end = Some(number.wrapping_add(1));
            self.consume(1);
        }
        last
    }

    /// Whether the `ahead`-th packet to be read is that one.
    ///
    /// # Panics
    /// As [`RxRing::packet`].
    pub fn is_last(&self, ahead: u64) -> bool {
        assert!(ahead < self.arrived.wrapping_sub(self.next));
        let mark = if self.listed {
            intf::VTL_LISTED_LAST
        } else {
            intf::VTL_F_LAST
        };
        // SAFETY: as in `packet`.
        unsafe { (*self.slot(ahead).as_ptr()).more & mark != 0 }
    }

    /// Whether the last packet and all before it were read.
    pub fn is_at_end(&self) -> bool {
        self.end == Some(self.next)
    }

    /// Frees the next `count` packets. Returns true if the daemon should be kicked, because the
    /// sender may be waiting for the room.
    pub fn consume(&mut self, count: u64) -> bool {
        let backlog = self.available();
        self.next += count;
        self.ring.consumer().store(self.next, Ordering::Release);
        let slots = u64::from(self.ring.slots);
        let freed = self.next - self.told;
        if freed >= slots / 2 && backlog >= slots / 2 {
            self.told = self.next;
            return true;
        }
        if self.listed {
            // Room is offered anew only when everything was read: nobody but us knows when that is.
            let tell = backlog <= count && freed >= slots / 4;
            self.told = if tell { self.next } else { self.told };
            return tell;
        }
        if backlog < slots / 4 {
            self.told = self.next; // acknowledgements carry the news
        }
        false
    }

    /// Leaves a note for the daemon, which is to be kicked, that there is room again.
    pub fn offer_room(&self) {
        self.ring.refill().store(1, Ordering::Release);
    }

    /// Takes that note away. Returns whether there was one.
    pub fn take_offer(&self) -> bool {
        self.ring.refill().load(Ordering::Relaxed) != 0
            && self.ring.refill().swap(0, Ordering::AcqRel) != 0
    }

    /// Announces that the reader goes to sleep. Returns false if there is something to read after
    /// all.
    pub fn prepare_wait(&mut self) -> bool {
        self.prepare_wait_for(intf::VTL_WAITS_IN_ORDER)
    }

    /// The same, but a packet behind a gap ends the sleep, too. The caller looks for some after this,
    /// for one may have come before.
    pub fn prepare_wait_for_any(&mut self) -> bool {
        self.prepare_wait_for(intf::VTL_WAITS_FOR_ANY)
    }

    fn prepare_wait_for(&mut self, what: u32) -> bool {
        self.ring.waiting().store(what, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.available() == 0 && self.closed().is_none() {
            return true;
        }
        self.ring.waiting().store(0, Ordering::Relaxed);
        false
    }

    /// Whether and how the session ended. Packets may still be there to be read.
    pub fn closed(&self) -> Option<Closed> {
        closed(self.ring.closed().load(Ordering::Acquire))
    }

    /// Marks the session as ended, for the other user of the ring.
    pub fn set_closed(&self, why: u32) {
        self.ring.set_closed(why);
    }
}

/// Overwrites everything in a ring, so that its next user sees nothing of the last one's.
///
/// # Errors
/// The system's, if it cannot be mapped.
pub fn clear(fd: BorrowedFd<'_>, slots: u32) -> io::Result<()> {
    let ring = Ring::map(fd, slots)?;
    // SAFETY: the whole mapping; nobody else uses a ring that is out of use.
    unsafe { ring.base.write_bytes(0, Ring::length(slots)) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use super::*;

    const SLOTS: u32 = 8;

    /// A ring in ordinary memory, in place of the kernel's.
    fn memory() -> OwnedFd {
        let fd =
            nix::sys::memfd::memfd_create(c"ring", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&fd, Ring::length(SLOTS) as i64).unwrap();
        fd
    }

    #[test]
    fn tx_ring__room_shrinks_until_acknowledged() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        assert_eq!(tx.room(), 8);
        tx.slot(0)[..3].copy_from_slice(b"abc");
        assert!(!tx.publish(&[3]), "nobody waits");
        assert_eq!((tx.room(), tx.unacknowledged()), (7, 1));
        tx.ring.consumer().store(1, Ordering::Release);
        assert_eq!((tx.room(), tx.unacknowledged()), (8, 0));
    }

    #[test]
    fn tx_ring__kicks_once_when_egress_waits() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.ring.waiting().store(1, Ordering::Release);
        assert!(tx.publish(&[1]));
        assert!(!tx.publish(&[1]));
    }

    #[test]
    fn tx_ring__packets_become_smaller_with_the_path() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.set_path(60);
        assert_eq!(tx.max_payload(), 60);
        // Whoever has not looked meanwhile may still write what it could before.
        assert_eq!(tx.slot(0).len(), 100);
        assert!(!tx.publish(&[100]));
        // The other side of the ring may write there: no more than was agreed.
        tx.set_path(1000);
        assert_eq!(tx.max_payload(), 100);
    }

    #[test]
    fn tx_ring__areas_cover_the_bytes_and_skip_headers() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        let areas = tx.areas(200, 100, 16);
        let lengths: Vec<usize> = areas.iter().map(|a| a.len()).collect();
        assert_eq!(lengths, [84, 84, 32]);
    }

    #[test]
    #[should_panic(expected = "still holds a packet")]
    fn tx_ring__a_packet_in_flight_is_not_overwritten() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.publish(&[1; 8]);
        let _ = tx.slot(0);
    }

    #[test]
    fn tx_ring__a_consumer_ahead_of_the_producer_gives_no_room() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.ring.consumer().store(5, Ordering::Release);
        assert_eq!(tx.room(), 0);
    }

    #[test]
    fn rx_ring__reads_in_order_and_never_beyond_a_slot() {
        let fd = memory();
        let mut rx = RxRing::map(fd.as_fd(), SLOTS).unwrap();
        assert_eq!(rx.available(), 0);
        assert!(rx.prepare_wait());
        let slot = rx.ring.slot(0).as_ptr();
        // SAFETY: the mapping is ours alone.
        unsafe { (*slot).len = u32::MAX };
        rx.ring.producer().store(1, Ordering::Release);
        assert_eq!(rx.available(), 1);
        assert_eq!(rx.packet(0).len(), intf::VTL_MAX_PAYLOAD as usize);
        rx.consume(1);
        assert_eq!(rx.available(), 0);
    }

    #[test]
    fn rx_ring__reads_as_listed() {
        let fd = memory();
        let mut rx = RxRing::map(fd.as_fd(), SLOTS).unwrap().with_list();
        for (entry, packet) in [(0, 2), (1, 0), (2, u64::MAX)] {
            // SAFETY: the mapping is ours alone.
            unsafe { (*rx.ring.slot(entry).as_ptr()).stamp = packet };
        }
        for (packet, len) in [(0, 5), (2, 7)] {
            // SAFETY: as above.
            unsafe { (*rx.ring.slot(packet).as_ptr()).len = len };
        }
        rx.ring.producer().store(3, Ordering::Release);
        assert_eq!(rx.available(), 3);
        assert_eq!([0, 1, 2].map(|n| rx.packet(n).len()), [7, 5, 0]);
    }

    #[test]
    fn lanes__follow_their_own() {
        let mut lanes = Lanes::default();
        let follow = [
            (1, 0),
            (2, 1),
            (1, 2),
            (1, 3),
            (2, 4),
            (2, 4 + 32768),
            (1, 3 + 32767),
        ];
        let back = follow.map(|(lane, packet)| lanes.follow(lane, packet));
        assert_eq!(back, [0, 0, 2, 1, 3, 0, 32767]);
        for lane in 0..200_000 {
            lanes.follow(lane, 100_000 + u64::from(lane));
        }
        assert!(lanes.latest.len() <= 65_536);
    }

    #[test]
    fn rx_ring__waiting_is_not_announced_when_there_is_something() {
        let fd = memory();
        let mut rx = RxRing::map(fd.as_fd(), SLOTS).unwrap();
        rx.ring.producer().store(1, Ordering::Release);
        assert!(!rx.prepare_wait());
        assert_eq!(rx.ring.waiting().load(Ordering::Relaxed), 0);
    }

    #[test]
    fn rx_ring__a_full_ring_that_empties_tells_the_sender() {
        let fd = memory();
        let mut rx = RxRing::map(fd.as_fd(), SLOTS).unwrap();
        rx.ring.producer().store(8, Ordering::Release);
        let kicks = (0..8).filter(|_| rx.consume(1)).count();
        assert_eq!(kicks, 1);
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
}
