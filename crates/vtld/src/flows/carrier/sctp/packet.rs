//! SCTP packets (RFC 9260, section 3), as far as VTL inspects them besides the library.

use bytes::Bytes;
use crc::{CRC_32_ISCSI, Crc, Table};

/// Sizes of the common header and of a chunk's header, bytes.
const HEADER: usize = 12;
const CHUNK: usize = 4;

/// Types of chunks.
pub(super) const DATA: u8 = 0;
pub(super) const INIT: u8 = 1;
pub(super) const INIT_ACK: u8 = 2;
pub(super) const SACK: u8 = 3;
pub(super) const HEARTBEAT: u8 = 4;
pub(super) const ABORT: u8 = 6;
pub(super) const SHUTDOWN: u8 = 7;
pub(super) const SHUTDOWN_ACK: u8 = 8;
pub(super) const COOKIE_ECHO: u8 = 10;
pub(super) const COOKIE_ACK: u8 = 11;
pub(super) const SHUTDOWN_COMPLETE: u8 = 14;

/// I bit of DATA (RFC 7053).
const IMMEDIATELY: u8 = 8;

/// Size of INIT's fixed fields, bytes, and types of parameters.
const INIT_FIELDS: usize = 16;
const STATE_COOKIE: u16 = 7;
/// RFC 4820; ignored by implementations that do not know it.
const PADDING: u16 = 0x8005;

static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);

/// The common header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) source: u16,
    pub(super) destination: u16,
    /// The verification tag.
    pub(super) tag: u32,
}

/// Whether a TSN comes after another one, modulo 2^32.
pub(super) fn is_behind(number: u32, other: u32) -> bool {
    (number.wrapping_sub(other) as i32) > 0
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

impl Header {
    /// Parses the header; `None` if the packet is too short.
    pub(super) fn of(packet: &[u8]) -> Option<Self> {
        packet.get(..HEADER)?;
        Some(Self {
            source: u16_at(packet, 0)?,
            destination: u16_at(packet, 2)?,
            tag: u32_at(packet, 4)?,
        })
    }
}

/// A chunk: its type, and its value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk<'a> {
    pub(super) kind: u8,
    pub(super) body: &'a [u8],
    /// The chunk with header and padding.
    whole: &'a [u8],
}

impl Chunk<'_> {
    /// The TSN of DATA, or the cumulative TSN of SACK.
    pub(super) fn tsn(&self) -> Option<u32> {
        u32_at(self.body, 0)
    }

    /// The stream of DATA.
    pub(super) fn stream(&self) -> Option<u16> {
        u16_at(self.body, 4)
    }

    /// The initiate tag of INIT or INIT ACK: the verification tag that its sender expects.
    pub(super) fn initiate_tag(&self) -> Option<u32> {
        u32_at(self.body, 0)
    }

    /// The initial TSN of INIT or INIT ACK.
    pub(super) fn initial_tsn(&self) -> Option<u32> {
        u32_at(self.body, 12)
    }
}

/// A packet's chunks, up to the first truncated one.
pub(super) fn chunks(packet: &[u8]) -> impl Iterator<Item = Chunk<'_>> {
    let mut rest = packet.get(HEADER..).unwrap_or_default();
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(rest, 2)?);
        let body = rest.get(CHUNK..len)?;
        let (whole, behind) = rest.split_at(len.next_multiple_of(4).min(rest.len()));
        rest = behind;
        Some(Chunk {
            kind: whole[0],
            body,
            whole,
        })
    })
}

fn checksum(packet: &[u8]) -> [u8; 4] {
    let mut digest = CRC.digest();
    digest.update(&packet[..8]);
    digest.update(&[0; 4]);
    digest.update(&packet[HEADER..]);
    digest.finalize().to_le_bytes()
}

/// Whether its checksum is right.
pub(super) fn is_intact(packet: &[u8]) -> bool {
    packet.len() >= HEADER && packet[8..HEADER] == checksum(packet)
}

/// Fills in a packet's checksum.
pub(super) fn sealed(mut packet: Vec<u8>) -> Bytes {
    let sum = checksum(&packet);
    packet[8..HEADER].copy_from_slice(&sum);
    packet.into()
}

/// The packet reduced to the chunks whose types `wanted` accepts.
pub(super) fn only(packet: &[u8], wanted: impl Fn(u8) -> bool) -> Bytes {
    let mut kept = packet[..HEADER].to_vec();
    let chunks = chunks(packet).filter(|chunk| wanted(chunk.kind));
    kept.extend(chunks.flat_map(|chunk| chunk.whole));
    sealed(kept)
}

/// Strips INIT or INIT ACK of extensions and addresses: all parameters but the cookie become padding.
/// VTL uses no extensions, the only address is UDP's, and the library rejects packets that list any.
pub(super) fn bare_init(packet: &[u8]) -> Bytes {
    let mut bare = packet.to_vec();
    let end = chunks(packet).next().map_or(0, |c| CHUNK + c.body.len());
    let end = HEADER + end.min(bare.len() - HEADER);
    let mut at = HEADER + CHUNK + INIT_FIELDS;
    while at + 4 <= end {
        let (Some(kind), Some(len)) = (u16_at(&bare, at), u16_at(&bare, at + 2)) else {
            break;
        };
        if kind != STATE_COOKIE {
            bare[at..at + 2].copy_from_slice(&PADDING.to_be_bytes());
        }
        at += usize::from(len.max(4)).next_multiple_of(4);
    }
    sealed(bare)
}

/// The packet with the I bit set: its data are to be acknowledged at once (RFC 7053).
pub(super) fn urgent(packet: &[u8]) -> Bytes {
    let mut urgent = packet.to_vec();
    let mut at = HEADER;
    for chunk in chunks(packet) {
        if chunk.kind == DATA {
            urgent[at + 1] |= IMMEDIATELY;
        }
        at += chunk.whole.len();
    }
    sealed(urgent)
}

/// An ABORT packet.
pub(super) fn abort(header: Header) -> Bytes {
    let mut packet = Vec::with_capacity(HEADER + CHUNK);
    packet.extend(header.source.to_be_bytes());
    packet.extend(header.destination.to_be_bytes());
    packet.extend(header.tag.to_be_bytes());
    packet.extend([0, 0, 0, 0, ABORT, 0, 0, CHUNK as u8]);
    sealed(packet)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Header = Header {
        source: 1,
        destination: 2,
        tag: 3,
    };

    fn packet(chunks: &[(u8, &[u8])]) -> Bytes {
        let mut packet = abort(HERE)[..HEADER].to_vec();
        for (kind, body) in chunks {
            packet.extend([*kind, 0]);
            packet.extend(((CHUNK + body.len()) as u16).to_be_bytes());
            packet.extend(*body);
            packet.resize(packet.len().next_multiple_of(4), 0);
        }
        sealed(packet)
    }

    #[test]
    fn abort__is_a_packet() {
        let packet = abort(HERE);
        assert!(is_intact(&packet));
        assert_eq!(Header::of(&packet), Some(HERE));
        let kinds: Vec<_> = chunks(&packet).map(|c| (c.kind, c.body.len())).collect();
        assert_eq!(kinds, [(ABORT, 0)]);
        let mut other = packet.to_vec();
        other[1] ^= 1;
        assert!(!is_intact(&other) && !is_intact(&packet[..HEADER - 1]));
    }

    #[test]
    fn chunks__end_where_one_is_cut() {
        let whole = packet(&[(DATA, &[1; 13]), (SACK, &[2; 12])]);
        let kinds = |bytes: &[u8]| chunks(bytes).map(|c| c.kind).collect::<Vec<_>>();
        assert_eq!(kinds(&whole), [DATA, SACK]);
        assert_eq!(kinds(&whole[..whole.len() - 1]), [DATA]);
        assert_eq!(kinds(&whole[..HEADER + 2]), [0; 0]);
        // A length that does not even cover the chunk's own header.
        let mut bad = whole.to_vec();
        bad[HEADER + 3] = 3;
        assert_eq!(kinds(&bad), [0; 0]);
        assert_eq!(Header::of(&whole[..HEADER - 1]), None);
    }

    #[test]
    fn only__leaves_out_what_is_not_wanted() {
        let whole = packet(&[(9, &[1; 7]), (COOKIE_ECHO, &[2; 8]), (0xc0, &[])]);
        let kept = only(&whole, |kind| kind == COOKIE_ECHO);
        assert_eq!(kept, packet(&[(COOKIE_ECHO, &[2; 8])]));
    }

    #[test]
    fn urgent__marks_data() {
        let plain = packet(&[(SACK, &[0; 12]), (DATA, &[1; 13])]);
        let marked = urgent(&plain);
        assert!(is_intact(&marked));
        let at = HEADER + CHUNK + 12 + 1;
        let differ: Vec<_> = (HEADER..plain.len())
            .filter(|i| plain[*i] != marked[*i])
            .collect();
        assert_eq!((differ, marked[at]), (vec![at], IMMEDIATELY));
    }

    #[test]
    fn bare_init__keeps_the_cookie() {
        let fields = [7; INIT_FIELDS];
        let with = |kinds: [u16; 3]| {
            let mut body = fields.to_vec();
            for (kind, len) in kinds.iter().zip([8_u16, 7, 6]) {
                body.extend(kind.to_be_bytes());
                body.extend(len.to_be_bytes());
                body.extend(vec![1; usize::from(len).next_multiple_of(4) - 4]);
            }
            packet(&[(INIT_ACK, &body)])
        };
        let bare = bare_init(&with([5, STATE_COOKIE, 0x8008]));
        assert_eq!(bare, with([PADDING, STATE_COOKIE, PADDING]));
        // A parameter of length 0, or a chunk that is cut, is no way out of the packet.
        let mut body = fields.to_vec();
        body.extend([0, 5, 0, 0, 0, 6, 0xff, 0xff]);
        let odd = packet(&[(INIT, &body)]);
        assert_eq!(bare_init(&odd).len(), odd.len());
        assert_eq!(bare_init(&odd[..HEADER + 6]).len(), HEADER + 6);
    }
}
