//! The receiving side.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::atomic::{Ordering, fence},
};

use vtl_proto::{intf, keys::Keys};

use super::{Closed, Ring, closed, seal::Opener, unsealed::Unsealed};

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
    /// Where payloads are sealed.
    unsealed: Option<Unsealed>,
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
            unsealed: None,
        })
    }

    /// Opens payloads, which [`TxRing::with_keys`](super::TxRing::with_keys) has sealed at the other
    /// end, each once and when it is first read. `numbered`: as there. To be called before anything
    /// was read.
    #[must_use]
    pub fn with_keys(mut self, keys: &Keys, numbered: bool) -> Self {
        let slots = self.ring.slots;
        // Packets come in any order as far as the ring reaches.
        let opener = Opener::new(keys.suite, &keys.receive, numbered, slots, self.next);
        self.unsealed = Some(Unsealed::new(opener, slots, numbered));
        self
    }

    /// As the grafts with partial order fill it: packets lie by their numbers, and the slots hold a
    /// list of them in the order in which they are to be read.
    #[must_use]
    pub fn with_list(mut self) -> Self {
        self.listed = true;
        self
    }

    /// The place of the `ahead`-th packet to be read.
    fn place(&self, ahead: u64) -> u64 {
        let place = self.next + ahead;
        if !self.listed {
            return place;
        }
        self.ring.stamp(place)
    }

    /// The payload of the packet at a place.
    ///
    /// # Safety
    /// It has arrived, and the kernel leaves it alone until it is consumed.
    unsafe fn payload(&self, place: u64) -> &[u8] {
        let (data, len) = self.ring.content(place);
        match &self.unsealed {
            // SAFETY: as the caller says.
            Some(unsealed) => unsafe {
                let more = (*self.ring.slot(place).as_ptr()).more;
                unsealed.payload((data, len), more, self.ring.index(place), place)
            },
            // SAFETY: as the caller says.
            None => unsafe { std::slice::from_raw_parts(data, len) },
        }
    }

    /// Packets that the ring holds.
    pub fn slots(&self) -> u64 {
        self.ring.slots.into()
    }

    /// Packets that can be read now.
    pub fn available(&mut self) -> u64 {
        self.arrived = self.ring.producer().load(Ordering::Acquire);
        self.arrived.wrapping_sub(self.next)
    }

    /// The payload of the `ahead`-th packet to be read; empty if that packet was given up, or does
    /// not open, which [`RxRing::forged`] counts.
    ///
    /// # Panics
    /// If `ahead` is not below what [`RxRing::available`] last said.
    pub fn packet(&self, ahead: u64) -> &[u8] {
        assert!(ahead < self.arrived.wrapping_sub(self.next));
        // SAFETY: published by the kernel, which leaves it alone until it is consumed.
        unsafe { self.payload(self.place(ahead)) }
    }

    /// Packets read that did not open: somebody on the path has made or changed them, or they came
    /// twice where packets tell their numbers. 0 without keys.
    pub fn forged(&self) -> u64 {
        self.unsealed.as_ref().map_or(0, Unsealed::forged)
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
        // SAFETY: the caller says that nobody writes.
        unsafe { self.payload(self.next + ahead) }
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

    /// Whether the packet to be read next is the one that
    /// [`TxRing::publish_last`](super::TxRing::publish_last) made; it is taken out then. Has a
    /// meaning only where the graft is reliable.
    ///
    /// # Panics
    /// If there is no packet.
    pub fn take_last(&mut self) -> bool {
        // Whoever forges the mark must not cut off what follows.
        let last = self.is_last(0) && (self.unsealed.is_none() || !self.packet(0).is_empty());
        if last {
            let number = self.place(0);
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
        unsafe { (*self.ring.slot(self.place(ahead)).as_ptr()).more & mark != 0 }
    }

    /// Whether the last packet and all before it were read.
    pub fn is_at_end(&self) -> bool {
        self.end == Some(self.next)
    }

    /// Frees the next `count` packets. Returns true if the daemon should be kicked, because the
    /// sender may be waiting for the room.
    pub fn consume(&mut self, count: u64) -> bool {
        let backlog = self.available();
        self.forget(count);
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

    /// Forgets what was opened of the next `count` packets.
    fn forget(&mut self, count: u64) {
        if self.unsealed.is_some() {
            for ahead in 0..count.min(self.slots()) {
                let index = self.ring.index(self.place(ahead));
                self.unsealed.iter_mut().for_each(|u| u.consume(index));
            }
        }
    }

    /// Leaves a note for the daemon, which is to be kicked, that there is room again.
    pub fn offer_room(&self) {
        self.ring.refill().store(1, Ordering::Release);
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
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::{
        super::tests::{SLOTS, memory},
        *,
    };

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
}
