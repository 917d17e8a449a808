//! Receive ring: the application's side.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::atomic::{Ordering, fence},
};

use vtl_proto::{intf, keys::Keys};

use super::{Closed, Ring, closed, seal::Opener, unsealed::Unsealed};

/// The application's side of a receive ring.
pub struct RxRing {
    ring: Ring,
    /// Slots name the packet to be read: see [`RxRing::with_list`].
    listed: bool,
    /// Number of the next packet to be read.
    next: u64,
    /// Cached `producer`: the kernel writes that cache line, so reading it costs.
    arrived: u64,
    /// `next` as of which the sender has been told of the room.
    told: u64,
    /// Number after the last packet's, once that was read.
    end: Option<u64>,
    /// With sealed payloads.
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

    /// Opens payloads sealed by [`TxRing::with_keys`](super::TxRing::with_keys) at the other end,
    /// each once, at its first read. `numbered`: as there. Must be called before the first read.
    #[must_use]
    pub fn with_keys(mut self, keys: &Keys, numbered: bool) -> Self {
        let slots = self.ring.slots;
        // Packets may be out of order by up to the ring's size.
        let opener = Opener::new(keys.suite, &keys.receive, numbered, slots, self.next);
        self.unsealed = Some(Unsealed::new(opener, slots, numbered));
        self
    }

    /// Reads the layout of grafts with partial order: packets lie at their numbers, and the slots
    /// form a list of them in reading order.
    #[must_use]
    pub fn with_list(mut self) -> Self {
        self.listed = true;
        self
    }

    /// The place (number) of the `ahead`-th packet to be read.
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
    /// The packet has arrived, and the kernel does not write there until it is consumed.
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

    /// Capacity of the ring, packets.
    pub fn slots(&self) -> u64 {
        self.ring.slots.into()
    }

    /// Packets ready to be read.
    pub fn available(&mut self) -> u64 {
        self.arrived = self.ring.producer().load(Ordering::Acquire);
        self.arrived.wrapping_sub(self.next)
    }

    /// The payload of the `ahead`-th packet to be read; empty if the packet was given up, or failed
    /// authentication ([`RxRing::forged`] counts those).
    ///
    /// # Panics
    /// If `ahead` is not below the last result of [`RxRing::available`].
    pub fn packet(&self, ahead: u64) -> &[u8] {
        assert!(ahead < self.arrived.wrapping_sub(self.next));
        // SAFETY: published by the kernel, which does not write there until it is consumed.
        unsafe { self.payload(self.place(ahead)) }
    }

    /// Packets read that failed authentication: forged or modified on the path, or replayed, if
    /// packets carry their numbers. 0 without keys.
    pub fn forged(&self) -> u64 {
        self.unsealed.as_ref().map_or(0, Unsealed::forged)
    }

    /// The payload of the `ahead`-th packet to be read, which may be out of order, behind a gap.
    ///
    /// # Panics
    /// If `ahead` is beyond the ring.
    ///
    /// # Safety
    /// The packet has arrived, according to the session's entry (`vtl_rx.map`). With a reliable and
    /// ordered graft, the kernel does not write there from then on until it is consumed.
    pub unsafe fn behind_gap(&self, ahead: u64) -> &[u8] {
        assert!(ahead < self.slots());
        // SAFETY: the caller guarantees that there is no writer.
        unsafe { self.payload(self.next + ahead) }
    }

    /// Number of the next packet to be read.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Whether the message of the `ahead`-th packet to be read continues in the next packet.
    /// Meaningful only if messages may take several packets.
    ///
    /// # Panics
    /// As [`RxRing::packet`].
    pub fn goes_on(&self, ahead: u64) -> bool {
        assert!(ahead < self.arrived.wrapping_sub(self.next));
        let slot = self.ring.slot(self.next + ahead).as_ptr();
        // SAFETY: as in `packet`.
        unsafe { (*slot).more & intf::VTL_F_MORE != 0 }
    }

    /// Consumes the next packet if it is the marker of
    /// [`TxRing::publish_last`](super::TxRing::publish_last); returns whether it was. Meaningful
    /// only with a reliable graft.
    ///
    /// # Panics
    /// If there is no packet.
    pub fn take_last(&mut self) -> bool {
        // A forged mark must not truncate the data: authenticate it first.
        let last = self.is_last(0) && (self.unsealed.is_none() || !self.packet(0).is_empty());
        if last {
            let number = self.place(0);
            self.end = Some(number.wrapping_add(1));
            self.consume(1);
        }
        last
    }

    /// Whether the `ahead`-th packet to be read carries the mark of [`RxRing::take_last`].
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

    /// Frees the next `count` packets. Returns true if the daemon must be woken, because the sender
    /// may be blocked on the window.
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
            // The window is advertised only when everything was read, and only the reader knows
            // when.
            let tell = backlog <= count && freed >= slots / 4;
            self.told = if tell { self.next } else { self.told };
            return tell;
        }
        if backlog < slots / 4 {
            self.told = self.next; // acknowledgements carry the window
        }
        false
    }

    /// Drops the opened payloads of the next `count` packets.
    fn forget(&mut self, count: u64) {
        if self.unsealed.is_some() {
            for ahead in 0..count.min(self.slots()) {
                let index = self.ring.index(self.place(ahead));
                self.unsealed.iter_mut().for_each(|u| u.consume(index));
            }
        }
    }

    /// Marks that there is room again, before the daemon is woken.
    pub fn offer_room(&self) {
        self.ring.refill().store(1, Ordering::Release);
    }

    /// Requests a wake-up, before the reader sleeps. Returns false if there is a packet to read, or
    /// the session has ended.
    pub fn prepare_wait(&mut self) -> bool {
        self.prepare_wait_for(intf::VTL_WAITS_IN_ORDER)
    }

    /// The same, but an out-of-order packet ends the sleep, too. The caller must check for such
    /// after this call: one may have arrived before.
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

    /// Whether and how the session ended. There may still be packets to read.
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
