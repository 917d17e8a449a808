//! The body of ADDRESSES: a host's further addresses, 16 bytes each, IPv4 mapped into IPv6 (RFC 4291, section 2.5.5.2).

use core::net::{IpAddr, Ipv6Addr};

/// Maximum number of addresses.
pub const MAX_ADDRESSES: usize = 8;
/// Length of one, bytes.
const ADDRESS: usize = 16;

/// A list of addresses. Anything is possible in one from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses<'a>(&'a [[u8; ADDRESS]]);

/// The length of the longest well-formed body that is no longer than `len`.
pub(super) fn whole(len: usize) -> usize {
    (len / ADDRESS).min(MAX_ADDRESSES) * ADDRESS
}

impl<'a> Addresses<'a> {
    /// A list of these, at most [`MAX_ADDRESSES`] of them.
    pub fn new(addresses: &'a [[u8; ADDRESS]]) -> Self {
        Self(&addresses[..addresses.len().min(MAX_ADDRESSES)])
    }

    /// An address in this form.
    pub fn entry(address: IpAddr) -> [u8; ADDRESS] {
        match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        }
    }

    /// Reads the body, of a length that [`whole`] allows.
    pub(super) fn parse(body: &'a [u8]) -> Self {
        Self(body.as_chunks().0)
    }

    pub(super) fn as_bytes(&self) -> &'a [u8] {
        self.0.as_flattened()
    }

    /// The addresses.
    pub fn iter(&self) -> impl Iterator<Item = IpAddr> + use<'a> {
        let addresses = self.0.iter();
        addresses.map(|bytes| IpAddr::V6(Ipv6Addr::from(*bytes)).to_canonical())
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::{CarrierId, Frame, FrameError, Side};
    use super::*;
    use crate::carrier::Scheduler;

    fn emitted(frame: &Frame<'_>) -> Vec<u8> {
        let mut bytes = vec![0; frame.wire_len()];
        assert_eq!(frame.emit(&mut bytes), Some(bytes.len()));
        bytes
    }

    #[test]
    fn addresses__have_this_form() {
        let all: [IpAddr; 2] = ["192.0.2.7", "2001:db8::7"].map(|text| text.parse().unwrap());
        let entries = all.map(Addresses::entry);
        let frame = Frame::Addresses(Addresses::new(&entries));
        let bytes = emitted(&frame);
        let wanted = [
            0, 0, 0, 0, 0, 32, 23, 1, 0, 0, 0, 0, 0, 0, 0, 0, // header
            0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 192, 0, 2, 7, // IPv4
            32, 1, 13, 184, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, // IPv6
        ];
        assert_eq!(bytes, wanted);
        let Ok(Frame::Addresses(read)) = Frame::take(&mut &bytes[..]) else {
            panic!("no ADDRESSES");
        };
        assert!(read.iter().eq(all));
    }

    #[test]
    fn addresses__none_and_the_most() {
        for count in [0, MAX_ADDRESSES, MAX_ADDRESSES + 1] {
            let entries = vec![[9; ADDRESS]; count];
            let bytes = emitted(&Frame::Addresses(Addresses::new(&entries)));
            let Ok(Frame::Addresses(read)) = Frame::take(&mut &bytes[..]) else {
                panic!("no ADDRESSES");
            };
            assert_eq!(read.iter().count(), count.min(MAX_ADDRESSES));
        }
    }

    #[test]
    fn addresses__of_another_length_are_refused() {
        for len in [1, 15, 17, 144] {
            let mut bytes = emitted(&Frame::Addresses(Addresses::new(&[])));
            bytes[5] = len;
            bytes.extend([0; 144]);
            let wanted = FrameError::BodyLength {
                kind: 23,
                len: len.into(),
            };
            assert_eq!(Frame::take(&mut &bytes[..]), Err(wanted));
        }
    }

    /// A host that does not know the bits reads the same PREFER.
    #[test]
    fn prefer__has_the_scheduler_above() {
        let carrier = CarrierId {
            opener: Side::Local,
            number: 3,
        };
        for scheduler in Scheduler::ALL {
            let bytes = emitted(&Frame::Prefer {
                carrier,
                tag: 0x0102_0304,
                bbr: false,
                asks: false,
                spread: Some(scheduler),
            });
            let flags = scheduler.number() << 5 | 16 | 2;
            assert_eq!(bytes[8..16], [0, 0, flags, 0, 1, 2, 3, 4]);
        }
    }

    #[test]
    fn hello__has_the_path() {
        let hello = Frame::Hello {
            carrier: CarrierId {
                opener: Side::Peer,
                number: 3,
            },
            tag: 1,
            tls: false,
            path: 5,
            gateways: false,
            layers: false,
        };
        let bytes = emitted(&hello);
        assert_eq!(bytes[8..16], [0, 0, 0, 5, 0, 0, 0, 1]);
    }
}
