//! Joins packets that follow each other into pieces that the kernel takes at once: the counterpart of `cut.rs`, after
//! the rules of the kernel's generic receive offload, without I/O.

use super::packet::{self, ACK, FLAGS, Headers, PSH, SEQUENCE, Transport};
use super::virtio::{VIRTIO, Virtio};

/// Maximum length of a piece, bytes.
const MAX_PIECE: usize = 65_535;
/// How many of the latest pieces a packet may join.
const OPEN: usize = 8;
/// Maximum number of UDP datagrams in a piece: `UDP_MAX_SEGMENTS` of kernels before 6.9.
const MAX_DATAGRAMS: u16 = 64;

/// Packets that are to be written together, in order.
pub(super) struct Joiner {
    pieces: Vec<Piece>,
    /// Pieces in use.
    used: usize,
    /// Whether the device takes joined datagrams of UDP.
    udp: bool,
}

/// One or more packets of a flow, behind room for virtio's header.
struct Piece {
    bytes: Vec<u8>,
    /// Of the packets; `None`: nothing can be told about it, so nothing joins it.
    headers: Option<Headers>,
    /// Payload of the first packet, and so of all but the last.
    size: usize,
    count: u16,
    /// Nothing may follow.
    is_complete: bool,
}

impl Joiner {
    pub(super) fn new(udp: bool) -> Self {
        Self {
            pieces: Vec::new(),
            used: 0,
            udp,
        }
    }

    /// Adds an IP packet of at most 64 KiB.
    pub(super) fn push(&mut self, packet: &[u8]) {
        let headers = Headers::parse(packet).filter(|of| of.are_exact(packet));
        if let Some(headers) = headers {
            let open = &mut self.pieces[self.used.saturating_sub(OPEN)..self.used];
            // The flow's latest piece or none, or packets would overtake each other.
            let mut latest = open.iter_mut().rev();
            let latest = latest.find(|piece| piece.is_of(&headers, packet));
            if let Some(piece) = latest
                && piece.takes(&headers, packet, self.udp)
            {
                piece.append(&headers, packet);
                return;
            }
        }
        if self.used == self.pieces.len() {
            self.pieces.push(Piece::new());
        }
        self.pieces[self.used].begin(headers, packet);
        self.used += 1;
    }

    /// Takes all pieces out, with virtio's header, in order.
    pub(super) fn take(&mut self, mut write: impl FnMut(&[u8])) {
        for piece in &mut self.pieces[..self.used] {
            write(piece.finish());
        }
        self.used = 0;
    }
}

impl Piece {
    fn new() -> Self {
        Self {
            bytes: Vec::with_capacity(VIRTIO + MAX_PIECE),
            headers: None,
            size: 0,
            count: 0,
            is_complete: false,
        }
    }

    fn begin(&mut self, headers: Option<Headers>, packet: &[u8]) {
        self.bytes.clear();
        self.bytes.extend_from_slice(&[0; VIRTIO]);
        self.bytes.extend_from_slice(packet);
        self.headers = headers;
        self.count = 1;
        self.size = headers.map_or(0, |headers| packet.len() - headers.len);
        self.is_complete = headers.is_none_or(|headers| !can_begin(&headers, packet));
    }

    /// Whether a packet belongs to the same flow.
    fn is_of(&self, headers: &Headers, packet: &[u8]) -> bool {
        let Some(own) = &self.headers else {
            return false;
        };
        let first = &self.bytes[VIRTIO..];
        let is_same = (own.transport, own.is_v6) == (headers.transport, headers.is_v6);
        is_same
            && first[own.ip..][..4] == packet[headers.ip..][..4]
            && own.addresses(first) == headers.addresses(packet)
    }

    /// Whether a packet of the same flow continues what is here, and nothing is lost if the kernel is told so.
    fn takes(&self, headers: &Headers, packet: &[u8], udp: bool) -> bool {
        let payload = packet.len() - headers.len;
        let own = self.bytes.len() - VIRTIO - headers.len;
        let first = &self.bytes[VIRTIO..];
        !self.is_complete
            && self.headers.as_ref() == Some(headers)
            && (1..=self.size).contains(&payload)
            && first.len() + payload <= MAX_PIECE
            && follows_by_ip(headers, first, packet, self.count)
            && match headers.transport {
                Transport::Tcp => follows_by_tcp(headers, first, packet, own as u32),
                Transport::Udp => udp && self.count < MAX_DATAGRAMS,
            }
            // What is joined gets a new checksum: wrong ones are left as they are.
            && (self.count > 1 || headers.are_sound(first))
            && headers.are_sound(packet)
    }

    fn append(&mut self, headers: &Headers, packet: &[u8]) {
        self.bytes.extend_from_slice(&packet[headers.len..]);
        self.count += 1;
        self.is_complete = packet.len() - headers.len < self.size;
        if headers.transport == Transport::Tcp && packet[headers.ip + FLAGS] & PSH != 0 {
            self.bytes[VIRTIO + headers.ip + FLAGS] |= PSH;
            self.is_complete = true;
        }
    }

    /// The piece, with headers for all that is in it.
    fn finish(&mut self) -> &[u8] {
        if let Some(headers) = &self.headers
            && self.count > 1
        {
            let (header, packet) = self.bytes.split_at_mut(VIRTIO);
            headers.set_length(packet, 0);
            headers.set_pseudo(packet);
            header.copy_from_slice(&Virtio::segments(headers, self.size as u16).bytes());
        }
        &self.bytes
    }
}

/// Whether others may join a packet.
fn can_begin(headers: &Headers, packet: &[u8]) -> bool {
    packet.len() > headers.len
        && (headers.transport == Transport::Udp || packet[headers.ip + FLAGS] == ACK)
}

/// Whether a packet may be the next after `count` by its IP header.
fn follows_by_ip(headers: &Headers, first: &[u8], packet: &[u8], count: u16) -> bool {
    if headers.is_v6 {
        // Version, class and label; next header and hop limit.
        return first[..4] == packet[..4] && first[6..8] == packet[6..8];
    }
    let id = |of: &[u8]| u16::from_be_bytes([of[4], of[5]]);
    // Packets that must not be fragmented need no identification (RFC 6864, section 4.1).
    let is_atomic = first[6] & 0x40 != 0;
    first[..2] == packet[..2]
        && first[6..10] == packet[6..10]
        && (is_atomic || id(packet) == id(first).wrapping_add(count))
        && first[20..headers.ip] == packet[20..headers.ip]
}

/// Whether a segment continues one of `own` bytes, and else says the same.
fn follows_by_tcp(headers: &Headers, first: &[u8], packet: &[u8], own: u32) -> bool {
    let (first, tcp) = (&first[headers.ip..headers.len], &packet[headers.ip..]);
    packet::sequence(tcp) == packet::sequence(first).wrapping_add(own)
        && tcp[FLAGS] & !PSH == ACK
        // The acknowledgement and its length; the window; the urgent pointer and the options.
        && first[SEQUENCE + 4..FLAGS] == tcp[SEQUENCE + 4..FLAGS]
        && first[FLAGS + 1..FLAGS + 3] == tcp[FLAGS + 1..FLAGS + 3]
        && first[FLAGS + 5..] == tcp[FLAGS + 5..first.len()]
}

#[cfg(test)]
mod tests {
    use super::super::cut::Cutter;
    use super::super::packet::{
        FIN, put,
        tests::{is_sound, tcp4, udp6},
    };
    use super::*;

    fn joined(packets: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut joiner = Joiner::new(true);
        let mut pieces = Vec::new();
        // A second batch finds nothing of the first.
        for _ in 0..2 {
            pieces.clear();
            packets.iter().for_each(|packet| joiner.push(packet));
            joiner.take(|piece| pieces.push(piece.to_vec()));
        }
        joiner.take(|_| panic!("all were taken"));
        pieces
    }

    /// What a kernel makes of the pieces.
    fn cut(pieces: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        for piece in pieces {
            let mut piece = piece.clone();
            let mut cutter = Cutter::new(&mut piece).unwrap();
            let mut room = [0; 2000];
            while cutter.next_len() > 0 {
                let length = cutter.next_into(&mut room);
                packets.push(room[..length].to_vec());
            }
        }
        packets
    }

    /// Segments of one flow with consecutive identifications, of these lengths.
    fn flow(lengths: &[usize]) -> Vec<Vec<u8>> {
        let mut sequence = u32::MAX - 1500;
        let segment = |(id, length): (usize, &usize)| {
            let packet = tcp4(id as u16, sequence, ACK, &vec![id as u8; *length]);
            sequence = sequence.wrapping_add(*length as u32);
            packet
        };
        lengths.iter().enumerate().map(segment).collect()
    }

    #[test]
    fn joiner__what_it_joins_is_cut_to_the_same() {
        for lengths in [
            &[1000; 50][..],
            &[1400, 1400, 3],
            &[7],
            &[1000, 900, 1000, 1000],
        ] {
            let packets = flow(lengths);
            assert_eq!(cut(&joined(&packets)), packets, "{lengths:?}");
        }
        let packets: Vec<_> = [400, 400, 100, 400]
            .map(|length| udp6(&vec![1; length]))
            .into();
        assert_eq!(cut(&joined(&packets)), packets);
    }

    #[test]
    fn joiner__as_many_as_fit() {
        let pieces = |lengths: &[usize]| joined(&flow(lengths)).len();
        assert_eq!(pieces(&[1000; 65]), 1);
        assert_eq!(pieces(&[1000; 66]), 2);
        assert_eq!(pieces(&[1000, 999]), 1);
        assert_eq!(pieces(&[1000, 999, 1]), 2, "behind a short one");
        assert_eq!(pieces(&[999, 1000]), 2, "a longer one");
        let datagrams = |count| vec![udp6(&[1; 100]); count];
        assert_eq!(joined(&datagrams(64)).len(), 1);
        assert_eq!(joined(&datagrams(65)).len(), 2);
        let mut joiner = Joiner::new(false);
        datagrams(2).iter().for_each(|packet| joiner.push(packet));
        assert_eq!(joiner.used, 2, "of a kernel that does not take them");
    }

    #[test]
    fn joiner__flows_between_each_other() {
        let one = flow(&[1000; 4]);
        let other = one.iter().map(|packet| {
            let mut packet = packet.clone();
            packet[21] ^= 1;
            Headers::parse(&packet).unwrap().set_checksum(&mut packet);
            packet
        });
        let other: Vec<_> = other.collect();
        let both: Vec<_> = one
            .iter()
            .zip(&other)
            .flat_map(|(a, b)| [a.clone(), b.clone()])
            .collect();
        let pieces = joined(&both);
        assert_eq!(pieces.len(), 2);
        assert_eq!(cut(&pieces), [one, other].concat());
    }

    /// Two segments, the second of them changed.
    fn with(change: impl Fn(&mut Vec<u8>)) -> Vec<Vec<u8>> {
        let mut packets = flow(&[1000; 2]);
        change(&mut packets[1]);
        packets
    }

    #[test]
    fn joiner__nothing_gets_lost_by_it() {
        let sound = |change: &dyn Fn(&mut [u8])| {
            with(|packet| {
                change(packet);
                let headers = Headers::parse(packet).unwrap();
                headers.set_length(packet, 0);
                headers.set_checksum(packet);
            })
        };
        // Type of service (ECN), lifetime, sequence, acknowledgement, window, urgent pointer.
        for at in [1, 8, 24, 28, 35, 39] {
            let packets = sound(&|packet| packet[at] ^= 1);
            assert!(is_sound(&packets[1]), "{at}");
            assert_eq!(cut(&joined(&packets)), packets, "{at}");
            assert_eq!(joined(&packets).len(), 2, "{at}");
        }
        for flags in [FIN | ACK, 0x02, 0x14, 0x30, ACK | 0x40, ACK | 0x80] {
            let packets = sound(&|packet| packet[33] = flags);
            assert_eq!(joined(&packets).len(), 2, "{flags}");
        }
        // Wrong checksums stay wrong.
        for at in [10, 36, 100] {
            let packets = with(|packet| packet[at] ^= 1);
            assert_eq!(cut(&joined(&packets)), packets, "{at}");
        }
        let mut first = flow(&[1000; 2]);
        first[0][100] ^= 1;
        assert_eq!(cut(&joined(&first)), first);
        // Bytes behind the packet, and less than it tells.
        let longer = with(|packet| packet.push(0));
        assert_eq!(joined(&longer).len(), 2);
    }

    #[test]
    fn joiner__a_push_ends_a_piece() {
        let mut packets = flow(&[1000; 3]);
        packets[1][33] |= PSH;
        Headers::parse(&packets[1])
            .unwrap()
            .set_checksum(&mut packets[1]);
        let pieces = joined(&packets);
        assert_eq!(pieces.len(), 2);
        assert_eq!(cut(&pieces), packets);
    }

    #[test]
    fn joiner__what_overtook_nothing_does_not_now() {
        // An acknowledgement between two segments.
        let mut packets = flow(&[1000; 2]);
        packets.insert(1, tcp4(9, 5, ACK, b""));
        assert_eq!(cut(&joined(&packets)), packets);
    }

    #[test]
    fn joiner__identifications_are_kept_where_they_count() {
        let without_df = |packet: &mut Vec<u8>, id: u16| {
            packet[6] &= !0x40;
            put(packet, 4, &id.to_be_bytes());
            Headers::parse(packet).unwrap().set_length(packet, 0);
        };
        for (ids, pieces) in [([5, 6], 1), ([5, 9], 2)] {
            let mut packets = flow(&[1000; 2]);
            for (packet, id) in packets.iter_mut().zip(ids) {
                without_df(packet, id);
            }
            assert_eq!(joined(&packets).len(), pieces);
            assert_eq!(cut(&joined(&packets)), packets);
        }
    }

    #[test]
    fn joiner__anything_passes() {
        let odd: [&[u8]; 6] = [
            &[0],
            &[0x45; 20],
            &[0x60; 40],
            &[0x45; 19],
            &[0xff; 100],
            &[0x4f; 59],
        ];
        let odd = odd.map(<[u8]>::to_vec);
        let pieces = joined(&odd);
        assert_eq!(pieces.len(), 6);
        for (piece, packet) in pieces.iter().zip(&odd) {
            assert_eq!(&piece[VIRTIO..], packet);
        }
    }
}
