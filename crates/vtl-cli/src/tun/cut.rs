//! Cuts what the kernel hands over in one piece into packets: segmentation offload of a TUN device, by virtio's header
//! (virtio 1.2, section 5.1.6.2), without I/O.

use std::io;

use super::packet::{self, FIN, Headers, PSH, Transport, put};
use super::virtio::Virtio;

/// Congestion window reduced (RFC 3168): on the first segment only, as the kernel sets it.
const CWR: u8 = 0x80;

/// Packets of one piece, the next of which is at `at`.
pub(super) struct Cutter<'a> {
    piece: &'a [u8],
    /// `None`: the piece is a packet.
    segments: Option<Segments>,
    /// Bytes of payload, or of the only packet, that were taken so far.
    taken: usize,
    /// Segments taken so far.
    count: u16,
}

struct Segments {
    headers: Headers,
    /// Payload of each segment but the last, bytes.
    size: usize,
}

impl<'a> Cutter<'a> {
    /// `raw`: what was read from the device, with virtio's header.
    ///
    /// # Errors
    /// It is not what its header says.
    pub(super) fn new(raw: &'a mut [u8]) -> io::Result<Self> {
        let bad = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let (virtio, piece) = Virtio::split(raw).ok_or_else(|| bad("a short packet"))?;
        let mut segments = None;
        if virtio.is_whole() {
            if let Some((start, at)) = virtio.checksum() {
                complete(piece, start, at).ok_or_else(|| bad("a checksum beyond the packet"))?;
            }
        } else {
            let headers = Headers::parse(piece).ok_or_else(|| bad("segments of what?"))?;
            let size = usize::from(virtio.size);
            if size == 0 || piece.len() <= headers.len {
                return Err(bad("segments without a size"));
            }
            segments = Some(Segments { headers, size });
        }
        Ok(Self {
            piece,
            segments,
            taken: 0,
            count: 0,
        })
    }

    /// Length of the next packet, bytes; 0 after the last.
    pub(super) fn next_len(&self) -> usize {
        match &self.segments {
            None => self.piece.len() - self.taken,
            Some(Segments { headers, size }) => {
                match (self.piece.len() - headers.len - self.taken).min(*size) {
                    0 => 0,
                    payload => headers.len + payload,
                }
            }
        }
    }

    /// Writes the next packet to the beginning of `to`, and returns its length: 0 after the last, or if it has no room
    /// there.
    pub(super) fn next_into(&mut self, to: &mut [u8]) -> usize {
        let length = self.next_len();
        let Some(to) = to.get_mut(..length).filter(|to| !to.is_empty()) else {
            return 0;
        };
        let Some(Segments { headers, .. }) = &self.segments else {
            to.copy_from_slice(self.piece);
            self.taken = length;
            return length;
        };
        let payload = &self.piece[headers.len + self.taken..][..length - headers.len];
        to[..headers.len].copy_from_slice(&self.piece[..headers.len]);
        to[headers.len..].copy_from_slice(payload);
        let is_last = headers.len + self.taken + payload.len() == self.piece.len();
        headers.set_length(to, self.count);
        if headers.transport == Transport::Tcp {
            let tcp = &mut to[headers.ip..];
            let sequence = packet::sequence(tcp).wrapping_add(self.taken as u32);
            put(tcp, packet::SEQUENCE, &sequence.to_be_bytes());
            if self.count > 0 {
                tcp[packet::FLAGS] &= !CWR;
            }
            if !is_last {
                tcp[packet::FLAGS] &= !(FIN | PSH);
            }
        }
        headers.set_checksum(to);
        self.taken += payload.len();
        self.count = self.count.wrapping_add(1);
        length
    }
}

/// Packets of several pieces.
pub(super) struct Cutters<'a, I> {
    pieces: I,
    current: Option<Cutter<'a>>,
}

impl<'a, I: Iterator<Item = Cutter<'a>>> Cutters<'a, I> {
    pub(super) fn new(mut pieces: I) -> Self {
        let current = pieces.next();
        Self { pieces, current }
    }

    /// As [`Cutter::next_len`].
    pub(super) fn next_len(&mut self) -> usize {
        loop {
            match self.current.as_ref().map(Cutter::next_len) {
                None => return 0,
                Some(0) => self.current = self.pieces.next(),
                Some(length) => return length,
            }
        }
    }

    /// As [`Cutter::next_into`].
    pub(super) fn next_into(&mut self, to: &mut [u8]) -> usize {
        self.next_len();
        let current = self.current.as_mut();
        current.map_or(0, |cutter| cutter.next_into(to))
    }
}

/// Completes a checksum of all bytes from `start` on, which lies at `at` and has the pseudo header's sum.
fn complete(piece: &mut [u8], start: usize, at: usize) -> Option<()> {
    let sum = !packet::fold(packet::sum(piece.get(start..)?));
    // UDP's 0 means that there is none (RFC 768), and TCP's may be either.
    let sum = if sum == 0 { u16::MAX } else { sum };
    let place = piece.get_mut(at..at + 2)?;
    place.copy_from_slice(&sum.to_ne_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::packet::tests::{is_sound, tcp4, udp6};
    use super::*;

    fn cut(virtio: Virtio, piece: &[u8]) -> Vec<Vec<u8>> {
        let mut raw = [&virtio.bytes()[..], piece].concat();
        let mut cutter = Cutter::new(&mut raw).unwrap();
        let mut packets = Vec::new();
        let mut room = [0; 2000];
        while cutter.next_len() > 0 {
            assert_eq!(cutter.next_into(&mut [0; 3]), 0, "no room there");
            let length = cutter.next_into(&mut room);
            packets.push(room[..length].to_vec());
        }
        assert_eq!(cutter.next_into(&mut room), 0);
        packets
    }

    #[test]
    fn cutter__tcp_in_segments() {
        let payload: Vec<u8> = (0..2500).map(|n| n as u8).collect();
        let piece = tcp4(7, 1000, 0x10 | FIN | PSH | CWR, &payload);
        let virtio = Virtio::segments(&Headers::parse(&piece).unwrap(), 1000);
        let packets = cut(virtio, &piece);
        assert_eq!(packets.len(), 3);
        let mut got = Vec::new();
        for (i, packet) in packets.iter().enumerate() {
            assert!(is_sound(packet), "{i}");
            let flags = [0x10 | CWR, 0x10, 0x10 | FIN | PSH][i];
            let wanted = tcp4(7 + i as u16, 1000 + i as u32 * 1000, flags, &packet[40..]);
            assert_eq!(packet, &wanted);
            got.extend_from_slice(&packet[40..]);
        }
        assert_eq!(got, payload);
    }

    #[test]
    fn cutter__any_number_of_segments() {
        // A peer may ask for segments as short as it likes.
        let piece = tcp4(7, 1, 0x10, &[9; 20_000]);
        let virtio = Virtio::segments(&Headers::parse(&piece).unwrap(), 48);
        let packets = cut(virtio, &piece);
        assert_eq!(packets.len(), 20_000_usize.div_ceil(48));
        assert!(packets.iter().all(|packet| is_sound(packet)));
    }

    #[test]
    fn cutter__udp_in_segments() {
        let piece = udp6(&[3; 900]);
        let virtio = Virtio::segments(&Headers::parse(&piece).unwrap(), 400);
        let packets = cut(virtio, &piece);
        let lengths = [400, 400, 100].map(|payload| udp6(&vec![3; payload]));
        assert_eq!(packets, lengths);
        assert!(packets.iter().all(|packet| is_sound(packet)));
    }

    #[test]
    fn cutter__a_packet_gets_its_checksum() {
        let whole = tcp4(1, 2, 0x10, b"hello");
        assert_eq!(cut(Virtio::default(), &whole), std::slice::from_ref(&whole));
        let mut piece = whole.clone();
        let headers = Headers::parse(&piece).unwrap();
        headers.set_pseudo(&mut piece);
        assert!(!is_sound(&piece));
        let virtio = Virtio::segments(&headers, 0);
        assert_eq!(cut(virtio, &piece), [whole]);
    }

    #[test]
    fn cutter__what_cannot_be_is_an_error() {
        let piece = tcp4(1, 2, 0x10, b"hello");
        let headers = Headers::parse(&piece).unwrap();
        let whole = Virtio::segments(&headers, 0);
        let segments = Virtio::segments(&headers, 3);
        let changed = |mut virtio: Virtio, change: fn(&mut Virtio)| {
            change(&mut virtio);
            virtio
        };
        for (virtio, bytes) in [
            (changed(whole, |v| v.start = 100), &piece[..]),
            (changed(whole, |v| v.at = u16::MAX), &piece[..]),
            (changed(segments, |v| v.size = 0), &piece[..]),
            (segments, &piece[..40]),
            (segments, &piece[..39]),
            (segments, &[0x50; 60][..]),
        ] {
            let mut raw = [&virtio.bytes()[..], bytes].concat();
            assert!(Cutter::new(&mut raw).is_err(), "{virtio:?} {bytes:?}");
        }
        assert!(Cutter::new(&mut [0; 9]).is_err());
    }
}
