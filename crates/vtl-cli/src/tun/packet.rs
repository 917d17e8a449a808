//! Headers of the TCP segments and UDP datagrams that a tunnel cuts and joins, and their checksums. Sums are those of
//! RFC 1071 in the host's byte order, which its section 2 allows.

/// Places in a TCP header.
pub(super) const SEQUENCE: usize = 4;
pub(super) const FLAGS: usize = 13;
/// Flags of TCP.
pub(super) const FIN: u8 = 0x01;
pub(super) const PSH: u8 = 0x08;
pub(super) const ACK: u8 = 0x10;
/// In IPv4's field of fragments: more follow, and where this one belongs.
const FRAGMENT: u16 = 0x3fff;

/// A protocol that is cut and joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Tcp,
    Udp,
}

/// Where the headers of a packet are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Headers {
    pub(super) transport: Transport,
    pub(super) is_v6: bool,
    /// Bytes of the IP header.
    pub(super) ip: usize,
    /// Bytes of both headers.
    pub(super) len: usize,
}

impl Headers {
    /// Those of a TCP segment or UDP datagram that is no fragment; `None` of anything else. IPv6 extension headers are
    /// not passed over.
    pub(super) fn parse(packet: &[u8]) -> Option<Self> {
        let (is_v6, ip, protocol) = match packet.first()? >> 4 {
            4 => {
                let ip = usize::from(packet[0] & 15) * 4;
                let header = packet.get(..ip).filter(|_| ip >= 20)?;
                let fragment = u16::from_be_bytes([header[6], header[7]]) & FRAGMENT;
                (false, ip, (fragment == 0).then_some(header[9])?)
            }
            6 => (true, 40, packet.get(..40)?[6]),
            _ => return None,
        };
        let (transport, length) = match protocol {
            6 => {
                let length = usize::from(packet.get(ip + 12)? >> 4) * 4;
                (Transport::Tcp, (length >= 20).then_some(length)?)
            }
            17 => (Transport::Udp, 8),
            _ => return None,
        };
        let len = ip + length;
        (packet.len() >= len).then_some(Self {
            transport,
            is_v6,
            ip,
            len,
        })
    }

    /// The addresses.
    pub(super) fn addresses<'a>(&self, packet: &'a [u8]) -> &'a [u8] {
        if self.is_v6 {
            &packet[8..40]
        } else {
            &packet[12..20]
        }
    }

    /// Whether the headers tell the packet's length.
    pub(super) fn are_exact(&self, packet: &[u8]) -> bool {
        let word = |at: usize| usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
        let told = if self.is_v6 { 40 + word(4) } else { word(2) };
        told == packet.len()
            && (self.transport == Transport::Tcp || self.ip + word(self.ip + 4) == told)
    }

    /// Has the headers tell the packet's length; an IPv4 packet's identification is raised by `count`.
    pub(super) fn set_length(&self, packet: &mut [u8], count: u16) {
        let length = packet.len() as u16;
        if self.is_v6 {
            put(packet, 4, &(length - 40).to_be_bytes());
        } else {
            put(packet, 2, &length.to_be_bytes());
            let id = u16::from_be_bytes([packet[4], packet[5]]).wrapping_add(count);
            put(packet, 4, &id.to_be_bytes());
            put(packet, 10, &[0; 2]);
            let sum = !fold(sum(&packet[..self.ip]));
            put(packet, 10, &sum.to_ne_bytes());
        }
        if self.transport == Transport::Udp {
            put(
                packet,
                self.ip + 4,
                &(length - self.ip as u16).to_be_bytes(),
            );
        }
    }

    /// Sum of the pseudo header (RFC 9293, section 3.1; RFC 8200, section 8.1).
    fn pseudo(&self, packet: &[u8]) -> u64 {
        let protocol = match self.transport {
            Transport::Tcp => 6_u16,
            Transport::Udp => 17,
        };
        let length = (packet.len() - self.ip) as u16;
        sum(self.addresses(packet)) + u64::from(protocol.to_be()) + u64::from(length.to_be())
    }

    fn checksum_at(&self) -> usize {
        self.ip
            + match self.transport {
                Transport::Tcp => 16,
                Transport::Udp => 6,
            }
    }

    /// Sets the transport's checksum.
    pub(super) fn set_checksum(&self, packet: &mut [u8]) {
        put(packet, self.checksum_at(), &[0; 2]);
        let sum = !fold(self.pseudo(packet) + sum(&packet[self.ip..]));
        // UDP's 0 means that there is none (RFC 768).
        let none = self.transport == Transport::Udp && sum == 0;
        let sum = if none { u16::MAX } else { sum };
        put(packet, self.checksum_at(), &sum.to_ne_bytes());
    }

    /// Sets the transport's checksum to what the kernel completes: the pseudo header's sum.
    pub(super) fn set_pseudo(&self, packet: &mut [u8]) {
        let sum = fold(self.pseudo(packet));
        put(packet, self.checksum_at(), &sum.to_ne_bytes());
    }

    /// Whether the checksums are right. A UDP datagram must have one.
    pub(super) fn are_sound(&self, packet: &[u8]) -> bool {
        let has_sum = || packet[self.checksum_at()..][..2] != [0; 2];
        (self.is_v6 || fold(sum(&packet[..self.ip])) == u16::MAX)
            && (self.transport == Transport::Tcp || has_sum())
            && fold(self.pseudo(packet) + sum(&packet[self.ip..])) == u16::MAX
    }
}

/// The sequence number of a TCP header.
pub(super) fn sequence(tcp: &[u8]) -> u32 {
    let bytes = [SEQUENCE, SEQUENCE + 1, SEQUENCE + 2, SEQUENCE + 3];
    u32::from_be_bytes(bytes.map(|at| tcp[at]))
}

/// Writes bytes into a packet.
pub(super) fn put(packet: &mut [u8], at: usize, bytes: &[u8]) {
    packet[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Sum of the 32-bit words of at most 64 KiB; the last may be incomplete.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let sum: u64 = words
        .iter()
        .map(|word| u64::from(u32::from_ne_bytes(*word)))
        .sum();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    sum + u64::from(u32::from_ne_bytes(last))
}

/// Folds a sum to 16 bits, with its carries.
pub(super) fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
pub(super) mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    /// A segment of TCP in IPv4 with this identification, sequence number and flags.
    pub(in super::super) fn tcp4(id: u16, sequence: u32, flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = Vec::new();
        PacketBuilder::ipv4([10, 9, 0, 1], [10, 9, 0, 2], 64)
            .tcp(1000, 80, sequence, 500)
            .ack(77)
            .write_to_vec(&mut packet, payload)
            .unwrap();
        put(&mut packet, 4, &id.to_be_bytes());
        packet[20 + FLAGS] = flags;
        let headers = Headers::parse(&packet).unwrap();
        headers.set_length(&mut packet, 0);
        headers.set_checksum(&mut packet);
        packet
    }

    /// A UDP datagram in IPv6, by another's code.
    pub(in super::super) fn udp6(payload: &[u8]) -> Vec<u8> {
        let mut packet = Vec::new();
        PacketBuilder::ipv6([0xfd; 16], [0xfc; 16], 64)
            .udp(1000, 53)
            .write_to_vec(&mut packet, payload)
            .unwrap();
        packet
    }

    /// Whether lengths and checksums are right.
    pub(in super::super) fn is_sound(packet: &[u8]) -> bool {
        let headers = Headers::parse(packet).unwrap();
        headers.are_exact(packet) && headers.are_sound(packet)
    }

    #[test]
    fn headers__checksums_are_those_of_another_implementation() {
        for length in [0, 1, 2, 3, 4, 5, 999, 1400] {
            let payload: Vec<u8> = (0..length).map(|n| (n * 7) as u8).collect();
            let theirs = udp6(&payload);
            let mut ours = theirs.clone();
            let headers = Headers::parse(&ours).unwrap();
            put(&mut ours, 46, &[1, 2]);
            headers.set_checksum(&mut ours);
            assert_eq!(ours, theirs, "{length}");
            let mut theirs = Vec::new();
            PacketBuilder::ipv4([10, 9, 0, 1], [255; 4], 64)
                .tcp(1000, 80, 7, 500)
                .write_to_vec(&mut theirs, &payload)
                .unwrap();
            let mut ours = theirs.clone();
            let headers = Headers::parse(&ours).unwrap();
            put(&mut ours, 10, &[1, 2]);
            put(&mut ours, 36, &[1, 2]);
            headers.set_length(&mut ours, 0);
            headers.set_checksum(&mut ours);
            assert_eq!(ours, theirs, "{length}");
        }
    }

    #[test]
    fn headers__each_wrong_bit_shows() {
        for packet in [tcp4(1, 2, ACK, b"hello"), udp6(b"hello")] {
            let headers = Headers::parse(&packet).unwrap();
            assert!(headers.are_sound(&packet));
            for at in headers.len..packet.len() {
                let mut bad = packet.clone();
                bad[at] ^= 0x10;
                assert!(!headers.are_sound(&bad), "{at}");
            }
        }
    }

    #[test]
    fn headers__of_nothing_else() {
        let whole = tcp4(1, 2, ACK, b"");
        let fragment = |bits: [u8; 2]| {
            let mut packet = whole.clone();
            put(&mut packet, 6, &bits);
            packet
        };
        for bad in [fragment([0x20, 0]), fragment([0, 1])] {
            assert_eq!(Headers::parse(&bad), None);
        }
        assert!(Headers::parse(&fragment([0x40, 0])).is_some(), "DF");
        for at in 0..whole.len() {
            assert_eq!(Headers::parse(&whole[..at]), None, "{at}");
        }
        for first in 0..=255 {
            let mut packet = whole.clone();
            packet[0] = first;
            let _ = Headers::parse(&packet);
            packet[0] = whole[0];
            packet[32] = first;
            let _ = Headers::parse(&packet);
        }
    }
}
