//! Tags: MACs of headers, which replace the token in sessions with keys: `bpf/include/vtl/tag.h`.

use core::{fmt, hash::Hasher, mem::offset_of};

use siphasher::sip::SipHasher24;

use super::parse::header_len;
use crate::intf;

/// Length of a key, bytes.
pub const TAG_KEY: usize = 16;

const TOKEN: core::ops::Range<usize> = {
    let at = offset_of!(intf::vtl_hdr, token);
    at..at + size_of::<u64>()
};

/// The key of the tags of one direction.
#[derive(Clone, PartialEq, Eq)]
pub struct TagKey([u64; 2]);

/// Hides the key.
impl fmt::Debug for TagKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TagKey(..)")
    }
}

impl From<[u8; TAG_KEY]> for TagKey {
    fn from(bytes: [u8; TAG_KEY]) -> Self {
        let (words, _) = bytes.as_chunks();
        Self([u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])])
    }
}

/// In the format of the kernel's programs.
impl From<&TagKey> for intf::vtl_tag_key {
    fn from(key: &TagKey) -> Self {
        Self { word: key.0 }
    }
}

impl TagKey {
    /// Computes the tag of a packet's header, which contains the token; `None` if its type has no tag, or the
    /// header is truncated.
    fn tag(&self, packet: &[u8]) -> Option<[u8; size_of::<u64>()]> {
        let kind = u32::from(packet.first()? & 15);
        let has_tag = ![intf::VTL_NEGO, intf::VTL_NEGO_ACK, intf::VTL_NEGO_NACK].contains(&kind);
        let header = packet.get(..header_len(kind).filter(|_| has_tag)?)?;
        let mut hasher = SipHasher24::new_with_keys(self.0[0], self.0[1]);
        hasher.write(header);
        Some(hasher.finish().to_le_bytes())
    }

    /// Replaces the token by the tag in a packet to be sent.
    pub fn put(&self, packet: &mut [u8]) {
        if let Some(tag) = self.tag(packet) {
            packet[TOKEN].copy_from_slice(&tag);
        }
    }

    /// Verifies the tag of a received packet, and replaces it by the token. False if it is wrong; the packet is
    /// unchanged then.
    pub fn take(&self, packet: &mut [u8], token: u64) -> bool {
        let Some(field) = packet.get(TOKEN) else {
            return false;
        };
        let shown: [u8; size_of::<u64>()] = field.try_into().expect("as long");
        packet[TOKEN].copy_from_slice(&token.to_be_bytes());
        let is_right = self.tag(packet) == Some(shown);
        if !is_right {
            packet[TOKEN].copy_from_slice(&shown);
        }
        is_right
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Header, Packet, Size},
        *,
    };

    #[test]
    fn tag__of_every_bit_of_the_header() {
        let key = TagKey::from([7; TAG_KEY]);
        let header = Header {
            sid: 3,
            token: 0x1122_3344_5566_7788,
            ..Header::default()
        };
        for packet in [
            Packet::Close(header),
            Packet::Size(Size {
                header,
                zeros: 8,
                answers: 0,
            }),
        ] {
            let mut sent = vec![0; packet.wire_len()];
            packet.emit(&mut sent).unwrap();
            let plain = sent.clone();
            key.put(&mut sent);
            assert_ne!(sent[TOKEN], plain[TOKEN]);
            let mut came = sent.clone();
            assert!(key.take(&mut came, header.token));
            assert_eq!(came, plain);
            assert!(!key.take(&mut sent.clone(), header.token ^ 1));
            assert!(!TagKey::from([8; TAG_KEY]).take(&mut sent.clone(), header.token));
            // What says of which type it is decides how much of it is a header.
            for bit in 8..24 * 8 {
                let mut forged = sent.clone();
                forged[bit / 8] ^= 1 << (bit % 8);
                let as_it_came = forged.clone();
                assert!(!key.take(&mut forged, header.token), "bit {bit}");
                assert_eq!(forged, as_it_came);
            }
        }
        assert!(!key.take(&mut [0; 15], 1));
        assert!(!key.take(&mut [0x20; 30], 1), "a header that is cut off");
    }
}
