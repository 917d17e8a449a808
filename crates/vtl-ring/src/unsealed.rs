//! Sealed payloads of a receive ring, each opened once.

use std::cell::{Cell, OnceCell, RefCell};

use super::seal::Opener;

/// The opened payloads of a ring, and their opener.
pub(super) struct Unsealed {
    opener: RefCell<Opener>,
    payloads: Payloads,
    forged: Cell<u64>,
}

/// Location of opened payloads, by slot.
enum Payloads {
    /// In their slots, which the kernel does not read any more: the length, or [`SEALED`].
    InPlace(Box<[Cell<u16>]>),
    /// Copied, as the kernel may still need the sealed bytes: it recovers lost packets from others
    /// and their parity.
    Copied(Box<[OnceCell<Vec<u8>>]>),
}

/// Mark of a packet that is not opened yet.
const SEALED: u16 = u16::MAX;

impl Unsealed {
    pub(super) fn new(opener: Opener, slots: u32, copied: bool) -> Self {
        let payloads = if copied {
            Payloads::Copied((0..slots).map(|_| OnceCell::new()).collect())
        } else {
            Payloads::InPlace((0..slots).map(|_| Cell::new(SEALED)).collect())
        };
        Self {
            opener: RefCell::new(opener),
            payloads,
            forged: Cell::new(0),
        }
    }

    /// The opened payload of packet `place` of the ring, whose slot is `index` and holds `len`
    /// bytes at `data`, with the marks `more`. Empty if it fails authentication, or was given up.
    ///
    /// # Safety
    /// `data` and `len` are bytes of the slot. The packet has arrived: nobody but the reader writes
    /// there until it is consumed.
    pub(super) unsafe fn payload(
        &self,
        (data, len): (*mut u8, usize),
        more: u32,
        index: usize,
        place: u64,
    ) -> &[u8] {
        match &self.payloads {
            Payloads::InPlace(lengths) => {
                if lengths[index].get() == SEALED {
                    // SAFETY: no other writer, and no reference to it was handed out yet.
                    let packet = unsafe { std::slice::from_raw_parts_mut(data, len) };
                    lengths[index].set(self.open(place, more, packet) as u16);
                }
                let opened = usize::from(lengths[index].get());
                // SAFETY: at most `len`; it is not opened again.
                unsafe { std::slice::from_raw_parts(data, opened) }
            }
            Payloads::Copied(copies) => copies[index].get_or_init(|| {
                // SAFETY: as the caller says.
                let mut copy = unsafe { std::slice::from_raw_parts(data, len) }.to_vec();
                let opened = self.open(place, more, &mut copy);
                copy.truncate(opened);
                copy
            }),
        }
    }

    /// Packets that failed authentication.
    pub(super) fn forged(&self) -> u64 {
        self.forged.get()
    }

    /// Opens a packet. Returns the length of its payload: 0 if it was given up, or fails
    /// authentication, which is counted.
    fn open(&self, place: u64, more: u32, packet: &mut [u8]) -> usize {
        if packet.is_empty() {
            return 0;
        }
        self.opener
            .borrow_mut()
            .open(place, more, packet)
            .unwrap_or_else(|| {
                self.forged.set(self.forged.get() + 1);
                0
            })
    }

    /// Drops the opened payload of a slot, for its next packet.
    pub(super) fn consume(&mut self, index: usize) {
        match &mut self.payloads {
            Payloads::InPlace(lengths) => lengths[index].set(SEALED),
            Payloads::Copied(copies) => drop(copies[index].take()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::fd::{AsFd, OwnedFd},
        sync::atomic::Ordering,
    };

    use vtl_proto::{
        intf,
        keys::{Keys, Suite},
        seal::{self, overhead},
    };

    use super::super::{
        Ring, RxRing, TxRing,
        tests::{SLOTS, memory},
    };

    /// The first packet of the second epoch.
    const EPOCH: u64 = 1 << seal::EPOCH;

    fn keys(send: u8, receive: u8) -> Keys {
        Keys {
            suite: Suite::Aes128Gcm,
            send: [send; 32].into(),
            receive: [receive; 32].into(),
        }
    }

    /// A transmit ring, the receive ring at the other end, and the network between them.
    struct Pair {
        tx: TxRing,
        rx: RxRing,
        /// Of `tx`.
        from: Ring,
        /// Of `rx`.
        to: Ring,
    }

    fn ring() -> (OwnedFd, Ring) {
        let fd = memory();
        let ring = Ring::map(fd.as_fd(), SLOTS).unwrap();
        (fd, ring)
    }

    impl Pair {
        fn new(numbered: bool) -> Self {
            Self::beginning(numbered, 0)
        }

        /// The first packet of both rings is number `first`.
        fn beginning(numbered: bool, first: u64) -> Self {
            let [(tx, from), (rx, to)] = [ring(), ring()];
            for ring in [&from, &to] {
                ring.producer().store(first, Ordering::Relaxed);
                ring.consumer().store(first, Ordering::Relaxed);
            }
            let tx = TxRing::map(tx.as_fd(), SLOTS, 100).unwrap();
            let rx = RxRing::map(rx.as_fd(), SLOTS).unwrap();
            Self {
                tx: tx.with_keys(&keys(1, 2), numbered),
                rx: rx.with_keys(&keys(2, 1), numbered),
                from,
                to,
            }
        }

        /// Publishes a packet. Returns its number.
        fn send(&mut self, payload: &[u8]) -> u64 {
            let number = self.tx.next();
            self.tx.slot(0)[..payload.len()].copy_from_slice(payload);
            self.tx.publish(&[payload.len() as u32]);
            number
        }

        /// Copies a packet to a place other than its own.
        fn put(&self, number: u64, place: u64) {
            let (from, to) = (self.from.slot(number), self.to.slot(place));
            // SAFETY: slots of two mappings that are ours alone.
            unsafe { from.copy_to_nonoverlapping(to, 1) };
        }

        /// Copies packets to their own places.
        fn carry(&self, numbers: impl IntoIterator<Item = u64>) {
            numbers
                .into_iter()
                .for_each(|number| self.put(number, number));
        }

        /// Publishes packets up to `end` to the reader.
        fn publish(&mut self, end: u64) {
            self.to.producer().store(end, Ordering::Relaxed);
            self.rx.available();
        }

        /// The bytes that the sealed packet in a place has.
        fn received(&mut self, place: u64) -> &mut [u8] {
            let (data, len) = self.to.content(place);
            // SAFETY: the mapping is ours alone.
            unsafe { std::slice::from_raw_parts_mut(data, len) }
        }
    }

    #[test]
    fn rx_ring__opens_what_a_tx_ring_sealed() {
        for numbered in [false, true] {
            let mut pair = Pair::new(numbered);
            assert_eq!(pair.tx.max_payload(), 100 - overhead(numbered));
            for round in 0..3 * u64::from(SLOTS) {
                let number = pair.send(&[round as u8; 50]);
                pair.carry([number]);
                assert!(!pair.received(number).starts_with(&[round as u8; 2]));
                assert_eq!(pair.received(number).len(), 50 + overhead(numbered));
                pair.publish(number + 1);
                for _ in 0..2 {
                    assert_eq!(pair.rx.packet(0), [round as u8; 50]);
                }
                pair.rx.consume(1);
                pair.from.consumer().store(number + 1, Ordering::Relaxed);
            }
            assert_eq!(pair.rx.forged(), 0);
        }
    }

    #[test]
    fn rx_ring__marks_cannot_be_forged() {
        for mark in [intf::VTL_F_MORE, intf::VTL_F_LAST] {
            let mut pair = Pair::new(false);
            pair.send(b"hello");
            pair.carry([0]);
            pair.publish(1);
            // SAFETY: the mapping is ours alone.
            unsafe { (*pair.to.slot(0).as_ptr()).more ^= mark };
            assert!(!pair.rx.take_last());
            assert_eq!((pair.rx.packet(0), pair.rx.forged()), (&b""[..], 1));
        }
        let mut pair = Pair::new(false);
        pair.tx.publish_last();
        pair.carry([0]);
        pair.publish(1);
        assert!(pair.rx.take_last() && pair.rx.is_at_end());
        assert_eq!(pair.rx.forged(), 0);
    }

    #[test]
    fn rx_ring__several_packets_are_read_at_once() {
        for numbered in [false, true] {
            let mut pair = Pair::new(numbered);
            for payload in [&b"one"[..], b"two", b"three"] {
                pair.send(payload);
            }
            pair.carry(0..3);
            pair.publish(3);
            let read = [0, 1, 2, 0].map(|n| pair.rx.packet(n));
            assert_eq!(read, [&b"one"[..], b"two", b"three", b"one"]);
        }
    }

    #[test]
    fn rx_ring__what_was_changed_is_empty_and_counted() {
        for numbered in [false, true] {
            let len = 5 + overhead(numbered);
            for at in 0..len {
                let mut pair = Pair::new(numbered);
                pair.send(b"hello");
                pair.send(b"world");
                pair.carry(0..2);
                pair.received(0)[at] ^= 0x10;
                pair.publish(2);
                for _ in 0..2 {
                    assert_eq!(pair.rx.packet(0), b"", "byte {at}");
                }
                assert_eq!(pair.rx.packet(1), b"world");
                assert_eq!(pair.rx.forged(), 1);
            }
        }
    }

    #[test]
    fn rx_ring__any_length_is_borne() {
        for numbered in [false, true] {
            let mut pair = Pair::new(numbered);
            for len in (0..=30).chain([2000, u32::MAX]) {
                pair.send(b"hello");
                let place = pair.rx.next();
                pair.put(place, place);
                // SAFETY: the mapping is ours alone.
                unsafe { (*pair.to.slot(place).as_ptr()).len = len };
                pair.publish(place + 1);
                let right = len as usize == 5 + overhead(numbered);
                let expected: &[u8] = if right { b"hello" } else { b"" };
                assert_eq!(pair.rx.packet(0), expected, "{len}");
                pair.rx.consume(1);
                pair.from.consumer().store(place + 1, Ordering::Relaxed);
            }
            // All but the given-up ones and the right one.
            assert_eq!(pair.rx.forged(), 31);
        }
    }

    #[test]
    fn rx_ring__other_keys_open_nothing() {
        for numbered in [false, true] {
            let mut pair = Pair::new(numbered);
            pair.send(b"hello");
            pair.carry([0]);
            let (fd, other) = ring();
            // SAFETY: slots of two mappings that are ours alone.
            unsafe { pair.to.slot(0).copy_to_nonoverlapping(other.slot(0), 1) };
            other.producer().store(1, Ordering::Relaxed);
            let rx = RxRing::map(fd.as_fd(), SLOTS).unwrap();
            let mut rx = rx.with_keys(&keys(1, 2), numbered);
            assert_eq!(rx.available(), 1);
            assert_eq!((rx.packet(0), rx.forged()), (&b""[..], 1));
        }
    }

    #[test]
    fn rx_ring__a_packet_in_anothers_place_does_not_open() {
        let mut pair = Pair::new(false);
        pair.send(b"one");
        pair.send(b"two");
        pair.put(0, 1);
        pair.put(1, 0);
        pair.publish(2);
        assert_eq!([pair.rx.packet(0), pair.rx.packet(1)], [b"", b""]);
        assert_eq!(pair.rx.forged(), 2);
    }

    #[test]
    fn rx_ring__opens_by_the_number_told_and_each_once() {
        let mut pair = Pair::new(true);
        pair.send(b"one");
        pair.send(b"two");
        for (place, number) in [1, 0, 1].into_iter().enumerate() {
            pair.put(number, place as u64);
        }
        pair.publish(3);
        assert_eq!([0, 1].map(|n| pair.rx.packet(n)), [b"two", b"one"]);
        assert_eq!((pair.rx.packet(2), pair.rx.forged()), (&b""[..], 1));
    }

    #[test]
    fn rx_ring__keys_change_in_the_middle() {
        for numbered in [false, true] {
            let mut pair = Pair::beginning(numbered, EPOCH - 4);
            for number in EPOCH - 4..EPOCH + 4 {
                assert_eq!(pair.send(&[number as u8; 9]), number);
            }
            pair.carry(EPOCH - 4..EPOCH + 4);
            pair.publish(EPOCH + 4);
            // Out of order, back and forth.
            for ahead in [5, 3, 4, 0, 7, 1, 2, 6] {
                let expected = [(EPOCH - 4 + ahead) as u8; 9];
                assert_eq!(pair.rx.packet(ahead), expected, "{ahead}");
            }
            assert_eq!(pair.rx.forged(), 0);
        }
    }

    #[test]
    fn rx_ring__what_was_given_up_is_not_forged() {
        for numbered in [false, true] {
            let mut pair = Pair::new(numbered);
            pair.send(b"one");
            pair.send(b"two");
            pair.carry([1]);
            pair.publish(2);
            assert_eq!([pair.rx.packet(0), pair.rx.packet(1)], [&b""[..], b"two"]);
            assert_eq!(pair.rx.forged(), 0);
        }
    }

    #[test]
    fn rx_ring__behind_a_gap_and_then_in_order() {
        let mut pair = Pair::new(false);
        for payload in [b"one", b"two", b"six"] {
            pair.send(payload);
        }
        pair.carry([1, 2]);
        pair.received(2)[0] ^= 1;
        // SAFETY: nobody writes there.
        let behind = [1, 2].map(|ahead| unsafe { pair.rx.behind_gap(ahead) });
        assert_eq!(behind, [&b"two"[..], b""]);
        pair.carry([0]);
        pair.publish(3);
        let read = [0, 1, 2].map(|ahead| pair.rx.packet(ahead));
        assert_eq!(read, [&b"one"[..], b"two", b""]);
        assert_eq!(pair.rx.forged(), 1);
    }

    #[test]
    fn rx_ring__with_a_list_each_is_opened_once() {
        let [(tx, from), (rx, to)] = [ring(), ring()];
        let tx = TxRing::map(tx.as_fd(), SLOTS, 100).unwrap();
        let rx = RxRing::map(rx.as_fd(), SLOTS).unwrap().with_list();
        let mut pair = Pair {
            tx: tx.with_keys(&keys(1, 2), true),
            rx: rx.with_keys(&keys(2, 1), true),
            from,
            to,
        };
        for round in 0..3 {
            let first = round * u64::from(SLOTS);
            let order = [3, 0, 7, 1, 2, 4, 6, 5].map(|n| first + n);
            for number in first..first + u64::from(SLOTS) {
                assert_eq!(pair.send(&[number as u8]), number);
            }
            pair.carry(first..first + u64::from(SLOTS));
            for (entry, number) in (first..).zip(order) {
                // SAFETY: the mapping is ours alone.
                unsafe { (*pair.to.slot(entry).as_ptr()).stamp = number };
            }
            pair.publish(first + u64::from(SLOTS));
            for (ahead, number) in (0..).zip(order).chain((0..).zip(order)) {
                assert_eq!(pair.rx.packet(ahead), [number as u8]);
            }
            pair.rx.consume(3);
            pair.rx.consume(u64::from(SLOTS) - 3);
            let end = first + u64::from(SLOTS);
            pair.from.consumer().store(end, Ordering::Relaxed);
        }
        assert_eq!(pair.rx.forged(), 0);
    }

    #[test]
    fn rx_ring__copies_packets_that_tell_their_number() {
        // The kernel recovers lost packets from received ones, in their sealed form.
        for numbered in [false, true] {
            let mut pair = Pair::new(numbered);
            pair.send(b"hello");
            pair.carry([0]);
            let came = pair.received(0).to_vec();
            pair.publish(1);
            assert_eq!(pair.rx.packet(0), b"hello");
            assert_eq!(pair.received(0) == came, numbered);
        }
    }

    #[test]
    fn rx_ring__a_forged_last_packet_is_not_taken() {
        let mut pair = Pair::new(false);
        pair.send(b"one");
        pair.tx.publish_last();
        pair.carry(0..2);
        pair.received(1)[0] ^= 1;
        pair.publish(2);
        assert_eq!((pair.rx.packet(0), pair.rx.is_last(1)), (&b"one"[..], true));
        pair.rx.consume(1);
        assert!(!pair.rx.take_last() && !pair.rx.is_at_end());
        assert_eq!(pair.rx.forged(), 1);
    }

    #[test]
    fn tx_ring__sealed_packets_become_smaller_with_the_path() {
        for numbered in [false, true] {
            let mut pair = Pair::new(numbered);
            let over = overhead(numbered);
            pair.from.path_payload().store(60, Ordering::Relaxed);
            assert_eq!(pair.tx.max_payload(), 60 - over);
            assert_eq!(pair.tx.sealed_len(7), 7 + over as u32);
            // A writer that has not re-read the limit may still write up to the old one.
            let max = pair.tx.slot(0).len();
            assert_eq!(max, 100 - over);
            pair.send(&vec![7; max]);
            pair.carry([0]);
            assert_eq!(pair.received(0).len(), 100);
            pair.publish(1);
            assert_eq!(pair.rx.packet(0), vec![7; max]);
            for path in [1, over as u32, 1000] {
                pair.from.path_payload().store(path, Ordering::Relaxed);
                let expected = if path == 1000 { max } else { 1 };
                assert_eq!(pair.tx.max_payload(), expected);
            }
        }
    }

    #[test]
    fn tx_ring__the_longest_and_the_shortest_packets_fit() {
        for (max_payload, max) in [(1, 1), (20, 1), (intf::VTL_MAX_PAYLOAD as u16, 1_000_000)] {
            let (fd, _) = ring();
            let tx = TxRing::map(fd.as_fd(), SLOTS, max_payload).unwrap();
            let mut tx = tx.with_keys(&keys(1, 2), true);
            assert!(tx.max_payload() <= max);
            let len = tx.max_payload() as u32;
            tx.publish(&[len]);
            assert!(tx.sealed_len(len) <= intf::VTL_MAX_PAYLOAD);
        }
    }

    #[test]
    #[should_panic(expected = "contains")]
    fn tx_ring__no_payload_takes_the_overheads_place() {
        let mut pair = Pair::new(false);
        pair.tx.publish(&[100]);
    }
}
