//! Sealing of carriers that have no encryption of their own, with the secret from the grant (PROTOCOL.md, section 7,
//! "Sealed carriers").

use bytes::{Buf, BufMut, Bytes, BytesMut};
use vtl_proto::{
    frame::Side,
    keys::{Secret, Suite},
    record::{LENGTH, MAX_SEALED, Records},
    seal::{TAG, overhead},
};
use vtl_ring::seal::{Opener, Sealer, directions};

use super::CLEAR;

/// Cipher suite, not negotiated: available on any processor, on most in hardware.
const SUITE: Suite = Suite::Aes128Gcm;

/// Cleartext head of a datagram, bytes: identifies its carrier.
const HEAD: usize = 4;
/// Bytes that sealing adds to a datagram.
const OVERHEAD: usize = overhead(true);
/// Replay window, datagrams: maximum reordering.
const WINDOW: u32 = 16_384;

/// A record was modified in transit, or is not the carrier's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("authentication of a record failed: it was altered on the path")]
pub(super) struct Forged;

/// This host's sealer and opener; `None` if the carrier is in the clear. `opener`: the side that opened the carrier.
fn ends(crypto: &Secret, opener: Side, numbered: bool) -> Option<(Sealer, Opener)> {
    if *crypto.as_bytes() == CLEAR {
        return None;
    }
    let [mut ours, mut theirs] = directions(crypto);
    if opener == Side::Peer {
        std::mem::swap(&mut ours, &mut theirs);
    }
    let sealer = Sealer::new(SUITE, &ours, numbered);
    let opener = Opener::new(SUITE, &theirs, numbered, WINDOW, 0);
    Some((sealer, opener))
}

/// A carrier's datagrams, sealed or in the clear.
pub(super) struct Datagrams {
    ends: Option<(Sealer, Opener)>,
    sent: u64,
}

impl Datagrams {
    /// `opener`: the side that opened the carrier.
    pub(super) fn new(crypto: &Secret, opener: Side) -> Self {
        Self {
            ends: ends(crypto, opener, true),
            sent: 0,
        }
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.ends.is_some()
    }

    /// Bytes that sealing adds to each datagram.
    pub(super) fn overhead(&self) -> usize {
        match self.is_encrypted() {
            true => OVERHEAD,
            false => 0,
        }
    }

    /// Seals a packet for sending, except its head.
    pub(super) fn seal(&mut self, packet: Bytes) -> Bytes {
        let Some((sealer, _)) = &mut self.ends else {
            return packet;
        };
        // In its place, if nobody else has it.
        let mut sealed = BytesMut::from(packet);
        sealed.put_bytes(0, OVERHEAD);
        sealer.seal(self.sent, 0, &mut sealed[HEAD..]);
        self.sent += 1;
        sealed.freeze()
    }

    /// Opens a datagram; `None` if it is forged or replayed.
    pub(super) fn open(&mut self, datagram: &[u8]) -> Option<Bytes> {
        let mut packet = BytesMut::from(datagram);
        if let Some((_, opener)) = &mut self.ends {
            let len = opener.open(0, 0, packet.get_mut(HEAD..)?)?;
            packet.truncate(HEAD + len);
        }
        Some(packet.freeze())
    }
}

/// Seals a byte stream into records.
pub(super) struct Writer {
    sealer: Sealer,
    sent: u64,
}

impl Writer {
    /// Seals bytes.
    pub(super) fn seal(&mut self, bytes: &[u8]) -> Bytes {
        let records = bytes.len().div_ceil(MAX_SEALED);
        let mut sealed = BytesMut::with_capacity(bytes.len() + records * (LENGTH + TAG));
        for part in bytes.chunks(MAX_SEALED) {
            let head = Records::SEALED.head(part.len() + TAG);
            sealed.extend_from_slice(&head.expect("a part has 1 to MAX_SEALED bytes"));
            let at = sealed.len();
            sealed.extend_from_slice(part);
            sealed.put_bytes(0, TAG);
            self.sealer.seal(self.sent, 0, &mut sealed[at..]);
            self.sent += 1;
        }
        sealed.freeze()
    }
}

/// Opens the records of a byte stream.
pub(super) struct Reader {
    opener: Opener,
    received: u64,
    /// An incomplete record.
    partial: BytesMut,
}

impl Reader {
    /// Takes bytes of the stream, and returns the plaintext of the records that they complete.
    pub(super) fn open(&mut self, bytes: &[u8]) -> Result<Bytes, Forged> {
        self.partial.extend_from_slice(bytes);
        let mut opened = BytesMut::new();
        while let Some(len) = { Records::SEALED.length(&self.partial) }.map_err(|_| Forged)? {
            let Some(record) = self.partial.get_mut(LENGTH..LENGTH + len) else {
                break;
            };
            let plain = self.opener.open(self.received, 0, record).ok_or(Forged)?;
            opened.extend_from_slice(&record[..plain]);
            self.received += 1;
            self.partial.advance(LENGTH + len);
        }
        Ok(opened.freeze())
    }
}

/// Writer and reader of a sealed stream; `None` if the carrier is in the clear.
pub(super) fn records(crypto: &Secret, opener: Side) -> Option<(Writer, Reader)> {
    let (sealer, opener) = ends(crypto, opener, false)?;
    let reader = Reader {
        opener,
        received: 0,
        partial: BytesMut::new(),
    };
    Some((Writer { sealer, sent: 0 }, reader))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vtl_proto::frame::CRYPTO;

    use super::*;

    fn secret() -> Secret {
        [9; CRYPTO].into()
    }

    fn datagrams(opener: Side) -> Datagrams {
        Datagrams::new(&secret(), opener)
    }

    #[test]
    fn clear__seals_nothing() {
        let mut clear = Datagrams::new(&CLEAR.into(), Side::Local);
        assert!(!clear.is_encrypted() && clear.overhead() == 0);
        assert_eq!(clear.seal(Bytes::from_static(b"head")), "head");
        assert_eq!(clear.open(b"head").unwrap(), "head");
        assert!(records(&CLEAR.into(), Side::Peer).is_none());
    }

    #[test]
    fn datagrams__open_once_at_the_other_end_and_in_any_order() {
        let (mut here, mut there) = (datagrams(Side::Local), datagrams(Side::Peer));
        let sealed = ["headone", "headtwo"].map(|packet| here.seal(packet.into()));
        assert!(sealed[0].starts_with(b"head") && sealed[0].len() == 7 + here.overhead());
        assert_eq!(here.open(&sealed[0]), None, "reflected");
        assert_eq!(there.open(&sealed[1]).unwrap(), "headtwo");
        assert_eq!(there.open(&sealed[0]).unwrap(), "headone");
        assert_eq!(there.open(&sealed[0]), None, "repeated");
        let back = there.seal("headback".into());
        assert_eq!(here.open(&back).unwrap(), "headback");
        for len in 0..HEAD + OVERHEAD + 1 {
            assert_eq!(there.open(&vec![0; len]), None);
        }
    }

    #[test]
    fn datagrams__any_change_is_noticed() {
        let sealed = datagrams(Side::Local).seal("headbody".into());
        for at in HEAD..sealed.len() {
            let mut forged = sealed.to_vec();
            forged[at] ^= 4;
            assert_eq!(datagrams(Side::Peer).open(&forged), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn records__are_the_bytes_however_they_come(
            writes in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40_000), 1..4),
            reads in prop::collection::vec(1_usize..30_000, 1..8),
            changed in any::<prop::sample::Index>(),
        ) {
            let (mut writer, _) = records(&secret(), Side::Peer).unwrap();
            let (_, mut reader) = records(&secret(), Side::Local).unwrap();
            let plain = writes.concat();
            let mut sealed: Vec<u8> = writes.iter().flat_map(|bytes| writer.seal(bytes)).collect();
            let mut opened = Vec::new();
            let mut rest = &sealed[..];
            for read in reads.iter().cycle() {
                let (now, later) = rest.split_at(rest.len().min(*read));
                opened.extend_from_slice(&reader.open(now).unwrap());
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(&opened, &plain);
            if !sealed.is_empty() {
                let (_, mut reader) = records(&secret(), Side::Local).unwrap();
                let at = changed.index(sealed.len());
                sealed[at] ^= 1;
                // What came before may be read; nothing that was changed, and nothing behind.
                let opened = reader.open(&sealed).unwrap_or_default();
                prop_assert!(plain.starts_with(&opened) && opened.len() < plain.len());
            }
        }
    }
}
