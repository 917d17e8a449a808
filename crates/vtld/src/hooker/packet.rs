//! The packets of a held connect: the application's SYN, and the answers that vtld may give in the
//! name of the real destination.

use std::net::{IpAddr, SocketAddr};

use super::error::ConnectError;

const TCP: u8 = 6;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const FLAG_RST_ACK: u8 = 0x14;

/// A held SYN: an IP header without options that matter, and a TCP header with all its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SynPacket {
    bytes: Vec<u8>,
    /// Where the TCP header begins.
    tcp: usize,
}

impl SynPacket {
    /// Checks the lengths and completes the TCP checksum, which the kernel had left to a device.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let tcp = match bytes.first()? >> 4 {
            4 => usize::from(bytes[0] & 15) * 4,
            6 => 40,
            _ => return None,
        };
        if tcp < 20 || bytes.len() < tcp + 20 || bytes.len() > 128 {
            return None;
        }
        let mut syn = Self {
            bytes: bytes.to_vec(),
            tcp,
        };
        let end = syn.bytes.len();
        if syn.is_v4() {
            // The kernel fills in the IP checksum of what raw sockets send.
            syn.bytes[2..4].copy_from_slice(&(end as u16).to_be_bytes());
        } else {
            syn.bytes[4..6].copy_from_slice(&((end - tcp) as u16).to_be_bytes());
        }
        syn.bytes[tcp + 16..tcp + 18].fill(0);
        let sum = transport_checksum(syn.source().ip(), syn.target().ip(), TCP, &syn.bytes[tcp..]);
        syn.bytes[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
        Some(syn)
    }

    /// As it can be sent.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn is_v4(&self) -> bool {
        self.bytes[0] >> 4 == 4
    }

    fn ip(&self, v4: usize, v6: usize) -> IpAddr {
        if self.is_v4() {
            IpAddr::from(<[u8; 4]>::try_from(&self.bytes[v4..v4 + 4]).expect("four bytes"))
        } else {
            IpAddr::from(<[u8; 16]>::try_from(&self.bytes[v6..v6 + 16]).expect("sixteen bytes"))
        }
    }

    fn port(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.bytes[self.tcp + at], self.bytes[self.tcp + at + 1]])
    }

    /// The application's socket.
    pub(super) fn source(&self) -> SocketAddr {
        SocketAddr::new(self.ip(12, 8), self.port(0))
    }

    /// vtld's listener.
    pub(super) fn target(&self) -> SocketAddr {
        SocketAddr::new(self.ip(16, 24), self.port(2))
    }

    /// The initial sequence number.
    pub(super) fn sequence(&self) -> u32 {
        u32::from_be_bytes(
            self.bytes[self.tcp + 4..self.tcp + 8]
                .try_into()
                .expect("four bytes"),
        )
    }

    /// The packet that makes the application's connect fail in the way of `error`; none for a
    /// timeout, which is the absence of packets.
    pub(super) fn refusal(&self, error: ConnectError) -> Option<Vec<u8>> {
        // RFC 792, RFC 1812 5.2.7.1 and RFC 4443: type and code.
        let unreachable = match (error, self.is_v4()) {
            (ConnectError::TimedOut, _) => return None,
            (ConnectError::Refused, _) => return Some(self.reset()),
            (ConnectError::NetUnreachable, true) => [3, 0],
            (ConnectError::HostUnreachable, true) => [3, 1],
            (ConnectError::Prohibited, true) => [3, 13],
            (ConnectError::NetUnreachable, false) => [1, 0],
            (ConnectError::HostUnreachable, false) => [1, 3],
            (ConnectError::Prohibited, false) => [1, 1],
        };
        let mut body = vec![unreachable[0], unreachable[1], 0, 0, 0, 0, 0, 0];
        body.extend_from_slice(&self.bytes);
        let sum = if self.is_v4() {
            finish(add(0, &body))
        } else {
            transport_checksum(self.target().ip(), self.source().ip(), ICMPV6, &body)
        };
        body[2..4].copy_from_slice(&sum.to_be_bytes());
        Some(self.reply(if self.is_v4() { ICMP } else { ICMPV6 }, &body))
    }

    /// RFC 9293, 3.10.7.1: what a closed port answers.
    fn reset(&self) -> Vec<u8> {
        let mut tcp = [0; 20];
        tcp[0..2].copy_from_slice(&self.target().port().to_be_bytes());
        tcp[2..4].copy_from_slice(&self.source().port().to_be_bytes());
        tcp[8..12].copy_from_slice(&self.sequence().wrapping_add(1).to_be_bytes());
        tcp[12] = 5 << 4;
        tcp[13] = FLAG_RST_ACK;
        let sum = transport_checksum(self.target().ip(), self.source().ip(), TCP, &tcp);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        self.reply(TCP, &tcp)
    }

    fn reply(&self, protocol: u8, body: &[u8]) -> Vec<u8> {
        let mut packet = Vec::with_capacity(40 + body.len());
        match (self.target().ip(), self.source().ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let len = (20 + body.len()) as u16;
                packet.extend_from_slice(&[0x45, 0]);
                packet.extend_from_slice(&len.to_be_bytes());
                packet.extend_from_slice(&[0, 0, 0x40, 0, 64, protocol, 0, 0]);
                packet.extend_from_slice(&from.octets());
                packet.extend_from_slice(&to.octets());
            }
            (from, to) => {
                packet.extend_from_slice(&[0x60, 0, 0, 0]);
                packet.extend_from_slice(&(body.len() as u16).to_be_bytes());
                packet.extend_from_slice(&[protocol, 64]);
                packet.extend_from_slice(&super::abi::wide(from).octets());
                packet.extend_from_slice(&super::abi::wide(to).octets());
            }
        }
        packet.extend_from_slice(body);
        packet
    }
}

fn add(mut sum: u32, bytes: &[u8]) -> u32 {
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([
            pair[0],
            pair.get(1).copied().unwrap_or(0),
        ]));
    }
    sum
}

fn finish(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// RFC 1071 over the pseudo header and `body`, whose checksum field holds 0.
fn transport_checksum(from: IpAddr, to: IpAddr, protocol: u8, body: &[u8]) -> u16 {
    let mut sum = u32::from(protocol) + body.len() as u32;
    for ip in [from, to] {
        sum = match ip {
            IpAddr::V4(v4) => add(sum, &v4.octets()),
            IpAddr::V6(v6) => add(sum, &v6.octets()),
        };
    }
    finish(add(sum, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 127.0.0.1:40000 to 127.0.0.1:9, sequence 7, checksum left out.
    fn syn() -> Vec<u8> {
        let mut bytes = vec![0x45, 0, 0, 40, 0, 1, 0x40, 0, 64, 6, 0, 0];
        bytes.extend_from_slice(&[127, 0, 0, 1, 127, 0, 0, 1]);
        bytes.extend_from_slice(&[
            0x9c, 0x40, 0, 9, 0, 0, 0, 7, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff,
        ]);
        bytes.extend_from_slice(&[0x12, 0x34, 0, 0]);
        bytes
    }

    fn sum_is_right(protocol: u8, from: IpAddr, to: IpAddr, body: &[u8]) -> bool {
        transport_checksum(from, to, protocol, body) == 0
    }

    #[test]
    fn parse__completes_the_checksum() {
        let syn = SynPacket::parse(&syn()).unwrap();
        assert_eq!(syn.source(), "127.0.0.1:40000".parse().unwrap());
        assert_eq!(syn.target(), "127.0.0.1:9".parse().unwrap());
        assert_eq!(syn.sequence(), 7);
        assert!(sum_is_right(
            TCP,
            syn.source().ip(),
            syn.target().ip(),
            &syn.bytes()[20..]
        ));
    }

    #[test]
    fn parse__rejects_what_is_cut_short() {
        assert_eq!(SynPacket::parse(&[]), None);
        assert_eq!(SynPacket::parse(&syn()[..39]), None);
        assert_eq!(SynPacket::parse(&[0x60; 59]), None);
        assert_eq!(SynPacket::parse(&[0x10; 60]), None);
    }

    #[test]
    fn refusal__acknowledges_the_syn() {
        let syn = SynPacket::parse(&syn()).unwrap();
        let reset = syn.refusal(ConnectError::Refused).unwrap();
        assert_eq!(reset[20..24], [0, 9, 0x9c, 0x40]);
        assert_eq!(reset[28..32], [0, 0, 0, 8]);
        assert_eq!(reset[33], FLAG_RST_ACK);
        assert!(sum_is_right(
            TCP,
            syn.target().ip(),
            syn.source().ip(),
            &reset[20..]
        ));
    }

    #[test]
    fn refusal__quotes_the_syn() {
        let syn = SynPacket::parse(&syn()).unwrap();
        let icmp = syn.refusal(ConnectError::HostUnreachable).unwrap();
        assert_eq!(icmp[20..22], [3, 1]);
        assert_eq!(&icmp[28..], syn.bytes());
        assert_eq!(finish(add(0, &icmp[20..])), 0);
        assert_eq!(syn.refusal(ConnectError::TimedOut), None);
    }
}
