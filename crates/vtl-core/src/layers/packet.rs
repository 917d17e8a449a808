//! A packet on its way through the layers.

use bytes::{Buf, Bytes};

/// Free bytes in front of a new packet: headers are added without moving what is behind.
const HEADROOM: usize = 64;
/// Free bytes behind a packet, for the network to seal it in its place.
const TAILROOM: usize = 32;

/// A packet. Headers are added to and removed from its front.
#[derive(Debug)]
pub struct Packet {
    bytes: Vec<u8>,
    /// Where the packet begins.
    start: usize,
}

impl Packet {
    /// A packet with these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        let mut all = Vec::with_capacity(HEADROOM + bytes.len() + TAILROOM);
        all.resize(HEADROOM, 0);
        all.extend_from_slice(bytes);
        Self {
            bytes: all,
            start: HEADROOM,
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Its bytes. They are copied only if they take less than half of their memory, which whoever counts bytes would
    /// not see.
    pub fn into_bytes(self) -> Bytes {
        if 2 * self.len() < self.bytes.capacity() {
            return Bytes::copy_from_slice(self.bytes());
        }
        let mut bytes = Bytes::from(self.bytes);
        bytes.advance(self.start);
        bytes
    }

    /// Its length, bytes.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a header.
    pub fn push(&mut self, header: &[u8]) {
        match self.start.checked_sub(header.len()) {
            Some(start) => {
                self.bytes[start..self.start].copy_from_slice(header);
                self.start = start;
            }
            None => *self = Self::new(&[header, self.bytes()].concat()),
        }
    }

    /// Removes bytes in front, all if there are fewer.
    pub fn advance(&mut self, bytes: usize) {
        self.start += bytes.min(self.len());
    }

    /// Removes all but the last `len` bytes: a header has been parsed, and this is behind it.
    pub fn keep(&mut self, len: usize) {
        self.advance(self.len().saturating_sub(len));
    }
}

impl Clone for Packet {
    fn clone(&self) -> Self {
        Self::new(self.bytes())
    }
}

impl PartialEq for Packet {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Packet {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet__takes_headers_in_front() {
        let mut packet = Packet::new(b"packet");
        // More than there is room for without moving.
        for _ in 0..HEADROOM {
            packet.push(b"head");
        }
        assert_eq!(packet.len(), 6 + 4 * HEADROOM);
        assert!(packet.bytes().starts_with(b"headhead") && packet.bytes().ends_with(b"packet"));
        packet.advance(4);
        packet.keep(7);
        assert_eq!(packet, Packet::new(b"dpacket"));
        packet.keep(9);
        assert_eq!(packet.bytes(), b"dpacket");
        assert_eq!(packet.clone().into_bytes(), "dpacket");
        let long = [7; 2 * HEADROOM];
        assert_eq!(Packet::new(&long).into_bytes(), long[..]);
        packet.advance(99);
        assert!(packet.is_empty());
    }
}
