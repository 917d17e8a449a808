//! Records in a stream: a length of 16 bits, big-endian, and that many bytes. Used for packets over TCP
//! (PROTOCOL.md, section 2), and for the ciphertext of MPTCP carriers (section 7, "Sealed carriers").

use core::ops::RangeInclusive;

use crate::{intf, seal};

/// Size of the length field, bytes.
pub const LENGTH: usize = size_of::<u16>();
/// Maximum plaintext of a sealed record, bytes.
pub const MAX_SEALED: usize = 16 << 10;

/// Permitted lengths of a stream's records, bytes.
#[derive(Clone, Debug)]
pub struct Records(RangeInclusive<usize>);

/// Invalid length of a record: the next record cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid record length: {0} bytes")]
pub struct BadLength(pub usize);

impl Records {
    /// Packets, from the common header to the end of padding.
    pub const PACKETS: Self = Self(size_of::<intf::vtl_hdr>()..=2048);
    /// Ciphertext, at least a byte, and tag.
    pub const SEALED: Self = Self(seal::TAG + 1..=seal::TAG + MAX_SEALED);

    /// Decodes the length in front of a record; `None` if it is incomplete.
    ///
    /// # Errors
    /// The length is not permitted.
    pub fn length(&self, bytes: &[u8]) -> Result<Option<usize>, BadLength> {
        let Some(length) = bytes.first_chunk() else {
            return Ok(None);
        };
        let length = usize::from(u16::from_be_bytes(*length));
        match self.0.contains(&length) {
            true => Ok(Some(length)),
            false => Err(BadLength(length)),
        }
    }

    /// Length in bytes of all complete records, length fields included, and an error if an invalid one follows.
    pub fn count(&self, bytes: &[u8]) -> (usize, Result<(), BadLength>) {
        let mut whole = 0;
        loop {
            match self.length(&bytes[whole..]) {
                Ok(Some(length)) if bytes.len() - whole >= LENGTH + length => {
                    whole += LENGTH + length;
                }
                Ok(_) => return (whole, Ok(())),
                Err(error) => return (whole, Err(error)),
            }
        }
    }

    /// Splits off the first record, without its length field.
    pub fn first<'a>(&self, records: &'a [u8]) -> Option<(&'a [u8], &'a [u8])> {
        let length = self.length(records).ok()??;
        records.get(LENGTH..)?.split_at_checked(length)
    }

    /// Encodes the length field of a record; `None` if the length is not permitted.
    pub fn head(&self, length: usize) -> Option<[u8; LENGTH]> {
        let length = Some(length).filter(|length| self.0.contains(length));
        length.map(|length| (length as u16).to_be_bytes())
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PACKETS: Records = Records::PACKETS;

    #[test]
    fn count__up_to_what_is_no_packet() {
        let packet =
            |length: usize| [&PACKETS.head(length).unwrap()[..], &vec![7; length]].concat();
        let two = [packet(24), packet(2048)].concat();
        assert_eq!(two[..2], [0, 24]);
        assert_eq!(PACKETS.count(&two), (two.len(), Ok(())));
        assert_eq!(PACKETS.count(&two[..two.len() - 1]), (26, Ok(())));
        assert_eq!(PACKETS.count(&two[..1]), (0, Ok(())));
        for no_packet in [23, 2049, 0, u16::MAX] {
            assert_eq!(PACKETS.head(no_packet.into()), None);
            let bytes = [&two[..], &no_packet.to_be_bytes()].concat();
            let error = Err(BadLength(no_packet.into()));
            assert_eq!(PACKETS.count(&bytes), (two.len(), error));
        }
    }

    #[test]
    fn sealed__has_a_byte_at_least_and_16_KiB_at_most() {
        let length = |length: u16| Records::SEALED.length(&length.to_be_bytes());
        assert_eq!(
            (length(17), length(16_400)),
            (Ok(Some(17)), Ok(Some(16_400)))
        );
        for wrong in [0, 16, 16_401, u16::MAX] {
            assert_eq!(length(wrong), Err(BadLength(wrong.into())));
        }
    }

    proptest! {
        #[test]
        fn first__takes_apart_what_was_counted(bytes: Vec<u8>) {
            let (whole, _) = PACKETS.count(&bytes);
            let mut rest = &bytes[..whole];
            while let Some((packet, others)) = PACKETS.first(rest) {
                prop_assert!(PACKETS.0.contains(&packet.len()));
                rest = others;
            }
            prop_assert!(rest.is_empty());
        }
    }
}
