//! The packets of a held connect: the application's SYN, and vtld's answers in the name of the real
//! destination.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    Icmpv4Type, Icmpv6Type, IpHeaders, Ipv4Header, Ipv6Header, PacketBuilder, PacketBuilderStep,
    TcpHeader, icmpv4::DestUnreachableHeader, icmpv6::DestUnreachableCode,
};
use vtl_proto::intf;

use super::{abi, error::ConnectError};

/// TTL or hop limit of answers.
const HOP_LIMIT: u8 = 64;

/// A held SYN: an IP header without options that matter, and a TCP header with all its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SynPacket {
    bytes: Vec<u8>,
    source: SocketAddr,
    target: SocketAddr,
    sequence: u32,
}

impl SynPacket {
    /// Parses a SYN, and completes lengths and checksums, which the kernel has left to offload.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > intf::VTL_SYN_MAX as usize {
            return None;
        }
        let (ip, source, target, segment) = match bytes.first()? >> 4 {
            4 => {
                let (ip, rest) = Ipv4Header::from_slice(bytes).ok()?;
                let [source, target] = [ip.source, ip.destination].map(IpAddr::from);
                (
                    IpHeaders::Ipv4(ip, Default::default()),
                    source,
                    target,
                    rest,
                )
            }
            _ => {
                let (ip, rest) = Ipv6Header::from_slice(bytes).ok()?;
                let [source, target] = [ip.source, ip.destination].map(IpAddr::from);
                (
                    IpHeaders::Ipv6(ip, Default::default()),
                    source,
                    target,
                    rest,
                )
            }
        };
        let (tcp, data) = TcpHeader::from_slice(segment).ok()?;
        let mut syn = Self {
            bytes: Vec::new(),
            source: SocketAddr::new(source, tcp.source_port),
            target: SocketAddr::new(target, tcp.destination_port),
            sequence: tcp.sequence_number,
        };
        let whole = PacketBuilder::ip(ip).tcp_header(tcp);
        whole.write_to_vec(&mut syn.bytes, data).ok()?;
        Some(syn)
    }

    /// The packet, ready to be sent.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The application's socket.
    pub(super) fn source(&self) -> SocketAddr {
        self.source
    }

    /// vtld's listener.
    pub(super) fn target(&self) -> SocketAddr {
        self.target
    }

    /// The initial sequence number.
    pub(super) fn sequence(&self) -> u32 {
        self.sequence
    }

    /// The packet that fails the application's connect with `error`; `None` for a timeout.
    pub(super) fn refusal(&self, error: ConnectError) -> Option<Vec<u8>> {
        // RFC 792, RFC 1812 5.2.7.1 and RFC 4443.
        use {DestUnreachableCode as V6, DestUnreachableHeader as V4};
        let (v4, v6) = match error {
            ConnectError::TimedOut => return None,
            ConnectError::Refused => return self.reset(),
            ConnectError::NetUnreachable => (V4::Network, V6::NoRoute),
            ConnectError::HostUnreachable => (V4::Host, V6::Address),
            ConnectError::Prohibited => (V4::FilterProhibited, V6::Prohibited),
        };
        let mut packet = Vec::new();
        let written = if self.source.is_ipv4() {
            let icmp = self.reply().icmpv4(Icmpv4Type::DestinationUnreachable(v4));
            icmp.write_to_vec(&mut packet, &self.bytes)
        } else {
            let icmp = self.reply().icmpv6(Icmpv6Type::DestinationUnreachable(v6));
            icmp.write_to_vec(&mut packet, &self.bytes)
        };
        written.ok().map(|()| packet)
    }

    /// The RST of a closed port (RFC 9293, section 3.10.7.1).
    fn reset(&self) -> Option<Vec<u8>> {
        let (from, to) = (self.target.port(), self.source.port());
        let reset = self.reply().tcp(from, to, 0, 0).rst();
        let mut packet = Vec::new();
        let written = reset
            .ack(self.sequence.wrapping_add(1))
            .write_to_vec(&mut packet, &[]);
        written.ok().map(|()| packet)
    }

    /// A packet to the application, up to the IP header.
    fn reply(&self) -> PacketBuilderStep<IpHeaders> {
        match (self.target.ip(), self.source.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                PacketBuilder::ipv4(from.octets(), to.octets(), HOP_LIMIT)
            }
            (from, to) => {
                let [from, to] = [from, to].map(|ip| abi::wide(ip).octets());
                PacketBuilder::ipv6(from, to, HOP_LIMIT)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets in hexadecimal digits, as another implementation of RFC 1071 made them.
    struct Exchange {
        /// From port 40000 to port 9, sequence 7, with a maximum segment size; without lengths and checksums.
        captured: &'static str,
        completed: &'static str,
        reset: &'static str,
        /// Up to the quotation.
        unreachable: &'static str,
    }

    const V4: Exchange = Exchange {
        captured: "4500000000014000400600007f0000017f0000019c40000900000007000000006002ffff\
                   123400000204ffd7",
        completed: "4500002c0001400040063cc97f0000017f0000019c40000900000007000000006002ffff\
                    03b000000204ffd7",
        reset: "450000280000400040063cce7f0000017f00000100099c40000000000000000850140000\
                157d0000",
        unreachable: "450000480000400040013cb37f0000017f0000010301fb1f00000000",
    };
    const V6: Exchange = Exchange {
        captured: "600000000000064000000000000000000000000000000001fd0000000000000000000000\
                   000000099c40000900000007000000006002ffff123400000204ffd7",
        completed: "600000000018064000000000000000000000000000000001fd0000000000000000000000\
                    000000099c40000900000007000000006002ffff04a800000204ffd7",
        reset: "6000000000140640fd000000000000000000000000000009000000000000000000000000\
                0000000100099c4000000000000000085014000016750000",
        unreachable: "6000000000483a40fd000000000000000000000000000009000000000000000000000000\
                      0000000101039b3500000000",
    };

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |d: &u8| char::from(*d).to_digit(16).unwrap() as u8;
        let pairs = hex.as_bytes().as_chunks::<2>().0.iter();
        pairs.map(|[a, b]| digit(a) << 4 | digit(b)).collect()
    }

    #[test]
    fn parse__completes_lengths_and_checksums() {
        for (packets, from, to) in [
            (V4, "127.0.0.1:40000", "127.0.0.1:9"),
            (V6, "[::1]:40000", "[fd00::9]:9"),
        ] {
            let syn = SynPacket::parse(&bytes(packets.captured)).unwrap();
            assert_eq!(syn.source(), from.parse().unwrap());
            assert_eq!(syn.target(), to.parse().unwrap());
            assert_eq!(syn.sequence(), 7);
            assert_eq!(syn.bytes(), bytes(packets.completed));
        }
    }

    #[test]
    fn parse__rejects_what_is_cut_short() {
        for packets in [V4, V6] {
            let syn = bytes(packets.captured);
            for length in 0..syn.len() {
                assert_eq!(SynPacket::parse(&syn[..length]), None);
            }
            assert_eq!(SynPacket::parse(&[&syn[..], &[0; 128]].concat()), None);
        }
        assert_eq!(SynPacket::parse(&[0x60; 59]), None);
        assert_eq!(SynPacket::parse(&[0x10; 60]), None);
    }

    #[test]
    fn refusal__by_what_a_closed_port_or_a_router_would_send() {
        for packets in [V4, V6] {
            let syn = SynPacket::parse(&bytes(packets.captured)).unwrap();
            let refusal = |error| syn.refusal(error);
            assert_eq!(refusal(ConnectError::TimedOut), None);
            assert_eq!(refusal(ConnectError::Refused), Some(bytes(packets.reset)));
            let quoting = [bytes(packets.unreachable), bytes(packets.completed)].concat();
            assert_eq!(refusal(ConnectError::HostUnreachable), Some(quoting));
        }
    }

    #[test]
    fn refusal__says_why() {
        for (error, v4, v6) in [
            (ConnectError::NetUnreachable, [3, 0], [1, 0]),
            (ConnectError::HostUnreachable, [3, 1], [1, 3]),
            (ConnectError::Prohibited, [3, 13], [1, 1]),
        ] {
            for (packets, at, expected) in [(V4, 20, v4), (V6, 40, v6)] {
                let syn = SynPacket::parse(&bytes(packets.captured)).unwrap();
                let icmp = syn.refusal(error).unwrap();
                assert_eq!(icmp[at..at + 2], expected);
            }
        }
    }
}
