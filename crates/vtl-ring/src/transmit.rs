//! Transmit ring: the application's side.

use std::{
    io,
    os::fd::BorrowedFd,
    sync::atomic::{Ordering, fence},
};

use vtl_proto::{intf, keys::Keys};

use super::{Closed, Lanes, Ring, closed, seal::Sealer};

/// The application's side of a transmit ring.
pub struct TxRing {
    ring: Ring,
    /// First slot not written yet; slots from `producer` up to it are staged.
    next: u64,
    /// Cached `consumer`: the kernel writes that cache line, so reading it costs.
    acknowledged: u64,
    /// Limit before sealing.
    max_payload: u32,
    sealer: Option<Sealer>,
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
            sealer: None,
        })
    }

    /// Seals payloads from the next packet on, each once, in its slot, before the kernel sees it; a
    /// retransmission sends the same bytes. All lengths are before sealing; the maximum payload
    /// shrinks by [`overhead(numbered)`](vtl_proto::seal::overhead).
    ///
    /// `numbered`: packets carry their numbers, as they must unless the graft is reliable and
    /// ordered. Both ends must agree on it.
    #[must_use]
    pub fn with_keys(mut self, keys: &Keys, numbered: bool) -> Self {
        let sealer = Sealer::new(keys.suite, &keys.send, numbered);
        let overhead = sealer.overhead() as u32;
        self.max_payload = self.max_payload.saturating_sub(overhead).max(1);
        self.sealer = Some(sealer);
        self
    }

    /// Maximum payload of a packet, bytes. Shrinks when the path MTU does.
    pub fn max_payload(&self) -> usize {
        let max = self.max_payload as usize;
        match self.ring.path_payload().load(Ordering::Relaxed) as usize {
            0 => max,
            path => path.saturating_sub(self.overhead()).clamp(1, max),
        }
    }

    /// Bytes that sealing adds to a payload.
    fn overhead(&self) -> usize {
        self.sealer.as_ref().map_or(0, Sealer::overhead)
    }

    /// Length on the wire of a payload of `len` bytes: sealed, if there are keys.
    pub fn sealed_len(&self, len: u32) -> u32 {
        len + self.overhead() as u32
    }

    /// Free slots.
    pub fn room(&mut self) -> u64 {
        self.acknowledged = self.ring.consumer().load(Ordering::Acquire);
        self.known_room()
    }

    /// Lower bound of the free slots: as of the last [`TxRing::room`].
    fn known_room(&self) -> u64 {
        let used = self.next.wrapping_sub(self.acknowledged);
        u64::from(self.ring.slots).saturating_sub(used)
    }

    /// The payload area of the `ahead`-th slot to be written: the maximum payload of
    /// [`TxRing::map`], less the overhead of sealing.
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

    /// Stages the next slots, with these payload lengths, to be published together with later ones.
    ///
    /// # Panics
    /// If a length is 0 or too large, or there are more than [`TxRing::room`].
    pub fn stage(&mut self, lengths: &[u32]) {
        self.stage_with(lengths, |_| 0);
    }

    /// Number of staged slots.
    pub fn staged(&self) -> u64 {
        let published = self.ring.producer().load(Ordering::Relaxed);
        self.next.wrapping_sub(published)
    }

    /// Publishes the staged slots. Returns true if the daemon must be woken because its pump
    /// sleeps.
    pub fn publish_staged(&mut self) -> bool {
        self.ring.producer().store(self.next, Ordering::Release);
        // Pairs with egress, which sets `waiting` and then re-reads `producer`.
        fence(Ordering::SeqCst);
        self.ring.waiting().load(Ordering::Relaxed) != 0
            && self.ring.waiting().swap(0, Ordering::AcqRel) != 0
    }

    /// Publishes the next slots, with these payload lengths. Returns as [`TxRing::publish_staged`].
    ///
    /// # Panics
    /// If a length is 0 or too large, or there are more than [`TxRing::room`].
    pub fn publish(&mut self, lengths: &[u32]) -> bool {
        self.publish_with(lengths, |_| 0)
    }

    /// As [`TxRing::publish`], for slots that hold one message, or a part of it: `goes_on` if the
    /// next published slot continues it.
    ///
    /// # Panics
    /// As [`TxRing::publish`].
    pub fn publish_message(&mut self, lengths: &[u32], goes_on: bool) -> bool {
        self.publish_with(lengths, |i| {
            let more = goes_on || i + 1 < lengths.len();
            if more { intf::VTL_F_MORE } else { 0 }
        })
    }

    /// As [`TxRing::publish`], with partial order: each packet follows the previous one of the same
    /// lane.
    ///
    /// # Panics
    /// As [`TxRing::publish`].
    pub fn publish_in_lane(&mut self, lengths: &[u32], lane: u32, lanes: &mut Lanes) -> bool {
        let next = self.next;
        self.publish_with(lengths, |i| {
            lanes.follow(lane, next + i as u64) << intf::VTL_LANE_SHIFT
        })
    }

    /// Publishes the last packet of this session: later data is in the session that succeeds it.
    /// Returns as [`TxRing::publish`].
    ///
    /// # Panics
    /// Without [`TxRing::room`].
    pub fn publish_last(&mut self) -> bool {
        self.slot(0)[0] = 0;
        self.publish_with(&[1], |_| intf::VTL_F_LAST)
    }

    fn publish_with(&mut self, lengths: &[u32], more: impl FnMut(usize) -> u32) -> bool {
        self.stage_with(lengths, more);
        self.publish_staged()
    }

    fn stage_with(&mut self, lengths: &[u32], mut more: impl FnMut(usize) -> u32) {
        let count = lengths.len() as u64;
        assert!(count <= self.known_room() || count <= self.room());
        for (i, len) in lengths.iter().enumerate() {
            assert!((1..=self.max_payload).contains(len));
            let number = self.next + i as u64;
            let slot = self.ring.slot(number).as_ptr();
            let sealed = self.sealed_len(*len);
            let more = more(i);
            // SAFETY: inside the slot, which is ours until it is published.
            unsafe { ((*slot).len, (*slot).more) = (sealed, more) };
            if let Some(sealer) = &mut self.sealer {
                // SAFETY: as above; a slot has more bytes than the longest payload and the overhead
                // on the shortest.
                let payload = unsafe {
                    let data = (&raw mut (*slot).data).cast();
                    std::slice::from_raw_parts_mut(data, sealed as usize)
                };
                sealer.seal(number, more, payload);
            }
        }
        self.next += lengths.len() as u64;
    }

    /// Requests a wake-up when a quarter of the ring is free. Returns false if it is already, or if
    /// the session has ended.
    pub fn wait_for_room(&mut self) -> bool {
        self.wait_unless(|tx| tx.room() >= u64::from(tx.ring.slots / 4))
    }

    /// As [`TxRing::wait_for_room`] for a writer that publishes at most `lowat` packets before they are sent
    /// (as TCP_NOTSENT_LOWAT): requests a wake-up when half of them are left. `sent`: reads how many
    /// packets were sent, once each.
    pub fn wait_for_notsent(&mut self, lowat: u32, sent: impl Fn() -> u64) -> bool {
        self.ring.notsent_lowat().store(lowat, Ordering::Relaxed);
        let half = u64::from(lowat / 2);
        self.wait_unless(|tx| {
            let enough = half.min(u64::from(tx.ring.slots / 4));
            tx.next.saturating_sub(sent()) <= half && tx.room() >= enough
        })
    }

    fn wait_unless(&mut self, has_room: impl FnOnce(&mut Self) -> bool) -> bool {
        self.ring.refill().store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !has_room(self) && self.closed().is_none() {
            return true;
        }
        self.ring.refill().store(0, Ordering::Relaxed);
        false
    }

    /// Packets published since the session began, by any writer.
    pub fn published(&self) -> u64 {
        self.ring.producer().load(Ordering::Acquire)
    }

    /// Number of the first unacknowledged packet.
    pub fn acknowledged(&self) -> u64 {
        self.ring.consumer().load(Ordering::Acquire)
    }

    /// Number of the next packet to be written.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Unacknowledged packets, staged ones included.
    pub fn unacknowledged(&self) -> u64 {
        self.next
            .wrapping_sub(self.ring.consumer().load(Ordering::Acquire))
    }

    /// What is written and not acknowledged: packets, messages that end in them, and bytes before sealing.
    pub fn pending(&self) -> (u64, u64, u64) {
        // Whatever is written there.
        let max = self.next.min(self.ring.slots.into());
        let packets = self.unacknowledged().min(max);
        let (mut messages, mut bytes) = (0, 0);
        for number in self.next - packets..self.next {
            let slot = self.ring.slot(number).as_ptr();
            // SAFETY: inside the mapping; this side has written it.
            let more = unsafe { (&raw const (*slot).more).read_volatile() };
            messages += u64::from(more & intf::VTL_F_MORE == 0);
            bytes += self.ring.content(number).1.saturating_sub(self.overhead()) as u64;
        }
        (packets, messages, bytes)
    }

    /// Whether and how the session ended.
    pub fn closed(&self) -> Option<Closed> {
        closed(self.ring.closed().load(Ordering::Acquire))
    }

    /// Whether the peer has opened the session that succeeds this one.
    pub fn is_succeeded(&self) -> bool {
        self.ring.closed().load(Ordering::Acquire) & intf::VTL_SUCCEEDED != 0
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
    fn tx_ring__what_is_pending_is_counted_by_message() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        assert_eq!(tx.pending(), (0, 0, 0));
        tx.publish(&[10, 20]);
        tx.publish_message(&[100, 100, 5], false);
        // The next one is begun, and goes on.
        tx.publish_message(&[100], true);
        assert_eq!(tx.pending(), (6, 3, 335));
        tx.ring.consumer().store(3, Ordering::Release);
        assert_eq!(tx.pending(), (3, 1, 205));
        tx.ring.consumer().store(99, Ordering::Release);
        assert!(
            tx.pending().0 <= u64::from(SLOTS),
            "whatever is written there"
        );
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
    fn tx_ring__what_is_staged_takes_room_and_is_published_at_once() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.ring.waiting().store(1, Ordering::Release);
        tx.stage(&[1, 2]);
        tx.stage(&[3]);
        assert_eq!((tx.published(), tx.staged(), tx.room()), (0, 3, 5));
        assert!(tx.publish_staged());
        assert_eq!((tx.published(), tx.staged(), tx.next()), (3, 0, 3));
    }

    #[test]
    fn tx_ring__waits_until_half_of_what_may_wait_is_sent() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.publish(&[1; 4]);
        assert!(tx.wait_for_notsent(4, || 0));
        assert_eq!(tx.ring.notsent_lowat().load(Ordering::Relaxed), 4);
        assert_eq!(tx.ring.refill().load(Ordering::Relaxed), 1);
        assert!(tx.wait_for_notsent(4, || 1));
        assert!(!tx.wait_for_notsent(4, || 2), "half of them are left");
        assert_eq!(tx.ring.refill().load(Ordering::Relaxed), 0);
        tx.publish(&[1; 4]);
        assert!(tx.wait_for_notsent(4, || 8), "the ring is full");
        tx.ring.consumer().store(2, Ordering::Release);
        assert!(!tx.wait_for_notsent(4, || 8));
    }

    #[test]
    fn tx_ring__packets_become_smaller_with_the_path() {
        let fd = memory();
        let mut tx = TxRing::map(fd.as_fd(), SLOTS, 100).unwrap();
        tx.ring.path_payload().store(60, Ordering::Relaxed);
        assert_eq!(tx.max_payload(), 60);
        // A writer that has not re-read the limit may still write up to the old one.
        assert_eq!(tx.slot(0).len(), 100);
        assert!(!tx.publish(&[100]));
        // The field is shared memory: it cannot raise the limit above the agreed one.
        tx.ring.path_payload().store(1000, Ordering::Relaxed);
        assert_eq!(tx.max_payload(), 100);
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
}
