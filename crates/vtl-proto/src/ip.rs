//! The Ethernet and IP headers in front of VTL's packets.

use std::net::{IpAddr, Ipv6Addr};

use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv4Header, Ipv6Header};

use crate::intf;

/// TTL or hop limit of VTL's packets (RFC 1700's default).
const HOP_LIMIT: u8 = 64;
const PROTOCOL: IpNumber = IpNumber(intf::VTL_IPPROTO as u8);

/// The headers of a session's packets, as `vtl_session.headers` keeps them: the data plane adds link addresses, lengths
/// and checksums. Addresses of different versions give IPv6.
///
/// ```
/// let headers = vtl_proto::ip::template([192, 0, 2, 1].into(), [192, 0, 2, 2].into());
/// assert_eq!(headers[26..34], [192, 0, 2, 1, 192, 0, 2, 2]);
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

/// `payload`: bytes behind the IP header; `None` leaves the length 0.
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
        assert_eq!((frame.len(), &frame[16..18]), (334, &[1, 64][..]));
        let c = IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 3]);
        enclose(&[7; 300], c, c, &mut frame);
        assert_eq!((frame.len(), &frame[18..20]), (354, &[1, 44][..]));
        assert_eq!(frame[54..], [7; 300]);
    }
}
