//! Packet ordering: packets come up in the order in which they were sent.

use std::collections::BTreeMap;

use vtl_proto::layers::{Ordering as Header, near};

use super::{Layer, MS, Ns, Out, Packet};

/// Numbers packets, and holds back what has overtaken others.
///
/// Packets behind a gap wait for it, `buffer` at most. Over a layer that loses none the gap is always filled; over others it is
/// given up after `wait`, or when the buffer is full. It passes up nothing twice.
pub struct Ordering {
    buffer: u64,
    /// How long a gap is waited for; `None`: the layer below loses nothing.
    wait: Option<Ns>,
    /// Number of the next packet sent,
    next: u64,
    /// and of the next to come up.
    due: u64,
    held: BTreeMap<u64, Packet>,
    /// Since when the gap at `due` is waited for.
    since: Ns,
}

impl Ordering {
    /// `buffer`: packets; `wait_ms`: how long to wait for a gap, if the layer below may lose packets.
    pub fn new(buffer: u32, wait_ms: u32, below_is_reliable: bool) -> Self {
        Self {
            buffer: buffer.into(),
            wait: (!below_is_reliable).then(|| Ns::from(wait_ms) * MS),
            next: 0,
            due: 0,
            held: BTreeMap::new(),
            since: 0,
        }
    }

    /// Passes up what is in order.
    fn release(&mut self, now: Ns, out: &mut Out) {
        let before = self.due;
        while let Some(packet) = self.held.remove(&self.due) {
            out.up(packet);
            self.due += 1;
        }
        if self.due > before {
            self.since = now;
        }
    }

    /// Gives up the gap.
    fn skip(&mut self, now: Ns, out: &mut Out) {
        if let Some((first, _)) = self.held.first_key_value() {
            self.due = *first;
            self.release(now, out);
        }
    }
}

impl Layer for Ordering {
    fn header(&self) -> usize {
        Header::LEN
    }

    fn send(&mut self, _now: Ns, mut packet: Packet, out: &mut Out) {
        // Truncated on purpose.
        let seq = self.next as u32;
        packet.push(&Header { seq }.emit());
        self.next += 1;
        out.down(packet);
    }

    fn receive(&mut self, now: Ns, mut packet: Packet, out: &mut Out) {
        let Some((Header { seq }, _)) = Header::parse(packet.bytes()) else {
            return out.refuse();
        };
        packet.advance(Header::LEN);
        let seq = near(seq, self.due);
        while self.wait.is_some() && seq >= self.due + self.buffer && !self.held.is_empty() {
            self.skip(now, out);
        }
        if self.wait.is_some() && seq >= self.due + self.buffer {
            // More was lost than is held.
            self.due = seq;
        }
        // Never so with a peer that keeps the rules of the layer below.
        if seq < self.due || seq >= self.due + self.buffer || self.held.contains_key(&seq) {
            return out.refuse();
        }
        if self.held.is_empty() {
            self.since = now;
        }
        self.held.insert(seq, packet);
        self.release(now, out);
    }

    fn poll(&mut self, now: Ns, _room: usize, out: &mut Out) {
        if self.next_timeout().is_some_and(|at| at <= now) {
            self.skip(now, out);
        }
    }

    fn held(&self) -> usize {
        self.held.len()
    }

    fn next_timeout(&self) -> Option<Ns> {
        let wait = self.wait.filter(|_| !self.held.is_empty())?;
        Some(self.since.saturating_add(wait))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(seq: u32) -> Packet {
        let mut packet = Packet::new(&seq.to_be_bytes());
        packet.push(&Header { seq }.emit());
        packet
    }

    fn receive(layer: &mut Ordering, now: Ns, seq: u32) -> Vec<u32> {
        let mut out = Out::default();
        layer.receive(now, packet(seq), &mut out);
        seqs(&out)
    }

    fn seqs(out: &Out) -> Vec<u32> {
        let up = out.up.iter();
        up.map(|p| u32::from_be_bytes(p.bytes().try_into().unwrap()))
            .collect()
    }

    #[test]
    fn ordering__holds_back_what_overtakes() {
        let mut layer = Ordering::new(8, 0, true);
        assert_eq!(receive(&mut layer, 0, 1), [0_u32; 0]);
        assert_eq!(receive(&mut layer, 0, 2), [0_u32; 0]);
        assert_eq!(receive(&mut layer, 0, 1), [0_u32; 0], "twice");
        assert_eq!(receive(&mut layer, 0, 8), [0_u32; 0], "beyond the buffer");
        assert_eq!(receive(&mut layer, 0, 0), [0, 1, 2]);
        assert_eq!(receive(&mut layer, 0, 0), [0_u32; 0], "late");
        // Over a layer that loses nothing no gap is given up.
        assert_eq!(receive(&mut layer, 0, 4), [0_u32; 0]);
        assert_eq!(layer.next_timeout(), None);
        assert_eq!(receive(&mut layer, 0, 3), [3, 4]);
    }

    #[test]
    fn ordering__gives_a_gap_up_in_time_or_for_room() {
        let mut layer = Ordering::new(4, 50, false);
        assert_eq!(receive(&mut layer, 10, 1), [0_u32; 0]);
        assert_eq!(layer.next_timeout(), Some(10 + 50 * MS));
        let mut out = Out::default();
        layer.poll(9, 1, &mut out);
        assert_eq!(seqs(&out), [0_u32; 0]);
        layer.poll(10 + 50 * MS, 1, &mut out);
        assert_eq!(seqs(&out), [1]);
        assert_eq!(receive(&mut layer, 0, 0), [0_u32; 0], "too late");
        assert_eq!(receive(&mut layer, 0, 3), [0_u32; 0]);
        assert_eq!(receive(&mut layer, 0, 7), [3], "no room for the gap");
        assert_eq!(receive(&mut layer, 0, 100), [7, 100]);
        assert_eq!(receive(&mut layer, 0, 101), [101]);
    }
}
