//! The Ethernet and IP headers in front of VTL's packets.

use std::{
    net::{IpAddr, Ipv6Addr},
    ops::Range,
};

use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6Header};

use crate::intf;

/// TTL or hop limit of VTL's packets (RFC 1700's default).
const HOP_LIMIT: u8 = 64;
const PROTOCOL: IpNumber = IpNumber(intf::VTL_IPPROTO as u8);

/// Offset of the VTL header, or of UDP's in front of it, in a frame over IPv4.
pub const OFFSET_V4: usize = Ethernet2Header::LEN + Ipv4Header::MIN_LEN;
/// The same over IPv6.
pub const OFFSET_V6: usize = Ethernet2Header::LEN + Ipv6Header::LEN;
const _: () = assert!(OFFSET_V6 == intf::VTL_HEADROOM as usize);

/// Fields of the Ethernet and IP headers: their bytes in a frame, for what reads or damages frames whose headers no
/// parser would take (RFC 791, section 3.1; RFC 8200, section 3).
pub mod field {
    use super::Range;

    /// Where the IP header begins.
    pub const IP: usize = super::Ethernet2Header::LEN;
    /// Ethernet: destination.
    pub const LINK_DESTINATION: Range<usize> = 0..6;
    /// Ethernet: source.
    pub const LINK_SOURCE: Range<usize> = 6..12;
    /// Ethernet: type of what follows.
    pub const ETHERTYPE: Range<usize> = 12..IP;
    /// IPv4: version and header length.
    pub const V4_VERSION: usize = IP;
    /// IPv4: differentiated services and ECN.
    pub const V4_TOS: usize = IP + 1;
    /// IPv4: bytes of header and payload.
    pub const V4_TOTAL_LENGTH: Range<usize> = IP + 2..IP + 4;
    /// IPv4: flags and fragment offset.
    pub const V4_FRAGMENT: Range<usize> = IP + 6..IP + 8;
    /// IPv4: protocol of the payload.
    pub const V4_PROTOCOL: usize = IP + 9;
    /// IPv4: source address.
    pub const V4_SOURCE: Range<usize> = IP + 12..IP + 16;
    /// IPv4: destination address.
    pub const V4_DESTINATION: Range<usize> = IP + 16..IP + 20;
    /// IPv4: both addresses.
    pub const V4_ADDRESSES: Range<usize> = V4_SOURCE.start..V4_DESTINATION.end;
    /// IPv6: bytes of payload.
    pub const V6_PAYLOAD_LENGTH: Range<usize> = IP + 4..IP + 6;
    /// IPv6: protocol of the payload.
    pub const V6_NEXT_HEADER: usize = IP + 6;
    /// IPv6: source address.
    pub const V6_SOURCE: Range<usize> = IP + 8..IP + 24;
    /// IPv6: destination address.
    pub const V6_DESTINATION: Range<usize> = IP + 24..IP + 40;
}

/// The headers of a session's packets, as `vtl_session.headers` keeps them: the data plane adds link addresses, lengths
/// and checksums. Addresses of different versions give IPv6.
///
/// ```
/// let headers = vtl_proto::ip::template([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
/// assert_eq!(headers[vtl_proto::ip::field::V4_ADDRESSES], [192, 0, 2, 1, 192, 0, 2, 2]);
/// ```
pub fn template(local: IpAddr, peer: IpAddr) -> [u8; intf::VTL_HEADROOM as usize] {
    let mut written = Vec::new();
    write(&mut written, local, peer, None);
    let mut headers = [0; intf::VTL_HEADROOM as usize];
    headers[..written.len()].copy_from_slice(&written);
    headers
}

/// Writes a frame with that packet to `frame`, without link addresses and IPv4 checksum. Addresses of different
/// versions give IPv6.
pub fn enclose(packet: &[u8], from: IpAddr, to: IpAddr, frame: &mut Vec<u8>) {
    frame.clear();
    write(frame, from, to, Some(packet.len() as u16));
    frame.extend_from_slice(packet);
}

/// Appends the Ethernet and IP headers. `payload`: bytes behind the IP header; `None` leaves the length 0.
fn write(out: &mut Vec<u8>, from: IpAddr, to: IpAddr, payload: Option<u16>) {
    let ethernet = |ether_type| Ethernet2Header {
        ether_type,
        ..Default::default()
    };
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let ip = Ipv4Header {
                total_len: payload.map_or(0, |length| Ipv4Header::MIN_LEN as u16 + length),
                dont_fragment: true,
                time_to_live: HOP_LIMIT,
                protocol: PROTOCOL,
                source: from.octets(),
                destination: to.octets(),
                ..Default::default()
            };
            out.extend(ethernet(EtherType::IPV4).to_bytes());
            out.extend(ip.to_bytes());
        }
        (from, to) => {
            let ip = Ipv6Header {
                payload_length: payload.unwrap_or(0),
                next_header: PROTOCOL,
                hop_limit: HOP_LIMIT,
                source: wide(from).octets(),
                destination: wide(to).octets(),
                ..Default::default()
            };
            out.extend(ethernet(EtherType::IPV6).to_bytes());
            out.extend(ip.to_bytes());
        }
    }
}

/// IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2).
fn wide(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template__of_both_versions() {
        let [a, b]: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let v4 = [
            8, 0, 0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 253, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ];
        assert_eq!(
            template(a, b)[..],
            [&[0; 12], &v4[..], &[0; 20][..]].concat()
        );
        let c = IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 3]);
        let v6 = [
            &[0; 12][..],
            &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 253, 64, 0xfd],
            &[0; 14],
            &[3],
            &[0; 10],
            &[0xff, 0xff, 10, 0, 0, 2],
        ];
        assert_eq!(template(c, b)[..], v6.concat());
    }

    #[test]
    fn enclose__has_the_packets_length() {
        let [a, b]: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let mut frame = vec![1];
        enclose(&[7; 300], a, b, &mut frame);
        assert_eq!(frame.len(), OFFSET_V4 + 300);
        assert_eq!(frame[field::V4_TOTAL_LENGTH], 320_u16.to_be_bytes());
        let c = IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 3]);
        enclose(&[7; 300], c, c, &mut frame);
        assert_eq!(frame[field::V6_PAYLOAD_LENGTH], 300_u16.to_be_bytes());
        assert_eq!(frame[OFFSET_V6..], [7; 300]);
    }
}
