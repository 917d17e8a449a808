//! The header before each packet of a TUN device with offloads: `struct virtio_net_hdr` (virtio 1.2, section 5.1.6), in
//! the host's byte order.

use super::packet::{Headers, Transport};

/// Bytes of the header.
pub(super) const VIRTIO: usize = 10;
/// The checksum from `start` on is to be completed.
const NEEDS_CHECKSUM: u8 = 1;
/// Kinds of segments; the flag for a TCP that uses ECN is added to them.
const TCP4: u8 = 1;
const TCP6: u8 = 4;
const UDP: u8 = 5;

/// The header.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Virtio {
    flags: u8,
    /// What the segments are; 0: the packet is whole.
    kind: u8,
    /// Bytes of headers. The kernel's are not relied on: forwarded packets have others.
    headers: u16,
    /// Payload of each segment but the last, bytes.
    pub(super) size: u16,
    /// Place from which the checksum counts.
    pub(super) start: u16,
    /// Place of the checksum, from there.
    pub(super) at: u16,
}

impl Virtio {
    /// Takes the header off what was read; `None` if nothing is behind it.
    pub(super) fn split(raw: &mut [u8]) -> Option<(Self, &mut [u8])> {
        let (header, packet) = raw.split_first_chunk_mut::<VIRTIO>()?;
        let word = |at| u16::from_ne_bytes([header[at], header[at + 1]]);
        let virtio = Self {
            flags: header[0],
            kind: header[1],
            headers: word(2),
            size: word(4),
            start: word(6),
            at: word(8),
        };
        (!packet.is_empty()).then_some((virtio, packet))
    }

    /// That of a packet in segments of `size` bytes of payload. 0: of one whose checksum is to be completed.
    pub(super) fn segments(headers: &Headers, size: u16) -> Self {
        let (kind, at) = match (headers.transport, headers.is_v6) {
            (Transport::Tcp, false) => (TCP4, 16),
            (Transport::Tcp, true) => (TCP6, 16),
            (Transport::Udp, _) => (UDP, 6),
        };
        Self {
            flags: NEEDS_CHECKSUM,
            kind: if size > 0 { kind } else { 0 },
            headers: headers.len as u16,
            size,
            start: headers.ip as u16,
            at,
        }
    }

    /// Whether the packet is whole.
    pub(super) fn is_whole(&self) -> bool {
        self.kind == 0
    }

    /// Where the checksum counts from, and where it is, if it is to be completed.
    pub(super) fn checksum(&self) -> Option<(usize, usize)> {
        let start = usize::from(self.start);
        (self.flags & NEEDS_CHECKSUM != 0).then(|| (start, start + usize::from(self.at)))
    }

    pub(super) fn bytes(&self) -> [u8; VIRTIO] {
        let mut bytes = [self.flags, self.kind, 0, 0, 0, 0, 0, 0, 0, 0];
        let words = [self.headers, self.size, self.start, self.at];
        for (place, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}
