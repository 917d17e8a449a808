//! Packets: parsed once into checked values, and emitted from them.
//!
//! Offsets and widths come from the C structs of `wire.h`; no other code computes any.
//!
//! A packet is what follows the IP (or UDP) header, cut to the length that header states:
//! Ethernet padding is not part of it.

mod emit;
mod extension;
pub(crate) mod fields;
mod parse;
mod tag;
#[cfg(test)]
mod tests;

use crate::intf;

pub use extension::{Extension, Extensions, MAX_EXTENSIONS};
pub(crate) use fields::{get, put};
pub use tag::{TAG_KEY, TagKey};

/// The smallest `max_payload` that negotiation accepts, bytes: what every IPv4 path carries (RFC 791:
/// 576), rounded down. So whoever fills packets need not think of tiny ones.
pub const MIN_PAYLOAD: u16 = 512;

/// The session that a packet names; `None` if it ends before that.
pub fn sid(packet: &[u8]) -> Option<u32> {
    let sid = packet.get(core::mem::offset_of!(intf::vtl_hdr, sid)..)?;
    Some(u32::from_be_bytes(*sid.first_chunk()?))
}

/// The token that a packet shows; `None` if it ends before that.
pub fn token(packet: &[u8]) -> Option<u64> {
    let token = packet.get(core::mem::offset_of!(intf::vtl_hdr, token)..)?;
    Some(u64::from_be_bytes(*token.first_chunk()?))
}

/// The part that every packet starts with. The checksum and the length are handled by
/// [`Packet::parse`] and [`Packet::emit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Bit set of `intf::VTL_F_*`; unknown bits are carried and mean nothing.
    pub flags: u8,
    /// The graft that made the packet and must process it; 0 in NEGO, NEGO_ACK, NEGO_NACK, CLOSE.
    pub gid: u16,
    /// The session's index at the receiver of the packet; in NEGO 0, or the one wished for.
    pub sid: u32,
    /// The receiver's guard of the session; in NEGO 0, or the one wished for.
    pub token: u64,
}

/// A packet of data, or a probe, which carries none. On the wire short ones are padded to
/// `intf::VTL_MIN_PACKET` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data<'a> {
    /// Common part.
    pub header: Header,
    /// The packet's number in the session; in a probe, that of the next new packet.
    pub seq: u64,
    /// Number of this transmission, modulo 2^32.
    pub xid: u32,
    /// Sender's clock, microseconds modulo 2^32.
    pub ts: u32,
    /// 1 to `intf::VTL_MAX_PAYLOAD` bytes; none in a probe.
    pub payload: &'a [u8],
}

/// An acknowledgement: the whole state of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack<'a> {
    /// Common part.
    pub header: Header,
    /// Every packet below has arrived.
    pub cum: u64,
    /// Packets from here on find no room.
    pub limit: u64,
    /// Distinct packets accepted since the session began.
    pub received: u64,
    /// `seq` of the packet that caused this acknowledgement, or, with `intf::VTL_F_UPDATE`, which
    /// says that none did, of the one before.
    pub echo_seq: u64,
    /// Its `xid`.
    pub echo_xid: u32,
    /// Its `ts`.
    pub echo_ts: u32,
    /// Packets received more than once, modulo 2^32.
    pub dups: u32,
    /// Words of 64 packets between `cum`'s own and the bitmap's first; they and the bitmap's words
    /// are at most `intf::VTL_WINDOW_WORDS`.
    pub skip: u32,
    /// Which packets have arrived; see [`Ack::has`]. A multiple of 8 bytes, at most
    /// `intf::VTL_ACK_MAX_BITMAP`.
    pub bitmap: &'a [u8],
}

impl Ack<'_> {
    /// The packet that the bitmap's first bit speaks of.
    pub fn base(&self) -> u64 {
        (self.cum & !63).saturating_add(u64::from(self.skip) * 64)
    }

    /// Whether packet `seq` has arrived; `None` when this acknowledgement says nothing about it
    /// (its bitmap is about others).
    pub fn has(&self, seq: u64) -> Option<bool> {
        if seq < self.cum {
            return Some(true);
        }
        let Some(bit) = seq.checked_sub(self.base()) else {
            // Only what holds up everything else is known to be missing.
            return (seq == self.cum).then_some(false);
        };
        let byte = usize::try_from(bit / 8)
            .ok()
            .and_then(|i| self.bitmap.get(i));
        match byte {
            Some(byte) => Some(byte >> (bit % 8) & 1 == 1),
            None if u32::from(self.header.flags) & intf::VTL_F_PARTIAL != 0 => None,
            None => Some(false),
        }
    }
}

/// A short list, at most 8 long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Few<T> {
    count: u8,
    items: [T; 8],
}

/// gids, in order of preference.
pub type Gids = Few<u16>;
/// Parameters of the offered grafts; in NEGO_ACK all those of the chosen one.
pub type Params = Few<Param>;

const _: () = assert!(intf::VTL_NEGO_GRAFTS == 8 && intf::VTL_NEGO_PARAMS == 8);

impl<T: Copy + Default> Few<T> {
    /// The list, or `None` if it is too long.
    pub fn new(items: &[T]) -> Option<Self> {
        let mut list = Self {
            count: u8::try_from(items.len()).ok()?,
            ..Self::default()
        };
        list.items.get_mut(..items.len())?.copy_from_slice(items);
        Some(list)
    }
}

impl<T> core::ops::Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[..usize::from(self.count)]
    }
}

/// A parameter of an offered graft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Param {
    /// Which graft: index in the list of gids.
    pub graft: u8,
    /// Which parameter, in the graft's own order; below `intf::VTL_NEGO_PARAMS`.
    pub index: u8,
    /// Its value, in its own unit.
    pub value: u32,
}

/// What a responder gives to an address, and gets back as a proof that somebody receives there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// When it was made, ms since the responder started.
    pub time: u64,
    /// Opaque.
    pub mac: u64,
    /// The responder's session that it is good for; 0 says that there is no ticket.
    pub sid: u32,
}

/// NEGO, NEGO_ACK and NEGO_NACK. "We" is who sends the packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nego<'a> {
    /// Common part.
    pub header: Header,
    /// The guard that the peer must put into packets it sends to us.
    pub token: u64,
    /// In an answer: the initiator's token. In NEGO 0.
    pub peer_token: u64,
    /// Our session index; never 0, except in NEGO_NACK.
    pub sid: u32,
    /// Packets that our receive ring holds; never 0, except in NEGO_NACK.
    pub ring_slots: u32,
    /// The most payload bytes per packet that we take, at least [`MIN_PAYLOAD`]; 0 in NEGO_NACK.
    pub max_payload: u16,
    /// Rendezvous; 0 is the Hooker's stream service.
    pub port: u16,
    /// What the initiator requires: bits of [`crate::services::Services`].
    pub services: u16,
    /// `intf::VTL_NACK_*`; 0 except in NEGO_NACK.
    pub reason: u8,
    /// Offered grafts; in NEGO_ACK exactly one, the chosen one.
    pub gids: Gids,
    /// In NEGO the responder's, if there is one; in its answers one for the next NEGO.
    pub ticket: Ticket,
    /// Values for the grafts.
    pub params: Params,
    /// What is behind the fixed part.
    pub extensions: Extensions<'a>,
}

impl Nego<'_> {
    /// The fixed part, which borrows nothing.
    pub fn without_extensions(self) -> Nego<'static> {
        Nego {
            extensions: Extensions::default(),
            ..self
        }
    }
}

/// A question whether a packet of its own size gets through, with `intf::VTL_F_ACK_NOW`, or the
/// answer, which is short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Common part.
    pub header: Header,
    /// Zero bytes behind the header: at most `intf::VTL_MAX_PAYLOAD` + 16, which makes the packet as
    /// long as the longest of DATA.
    pub zeros: u16,
    /// In an answer: `zeros` of the question.
    pub answers: u16,
}

/// One packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet<'a> {
    /// Payload for the receive ring.
    Data(Data<'a>),
    /// The receiver's state.
    Ack(Ack<'a>),
    /// Asks for an acknowledgement; the payload is empty.
    Probe(Data<'a>),
    /// Opens a session.
    Nego(Nego<'a>),
    /// Accepts.
    NegoAck(Nego<'a>),
    /// Refuses.
    NegoNack(Nego<'a>),
    /// The sender ends the session; with `intf::VTL_F_ABORT` before everything was delivered.
    Close(Header),
    /// Whether the path takes packets of a size.
    Size(Size),
}

/// Why bytes are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Shorter than the header of its type.
    #[error("truncated: {have} bytes where the header takes {need}")]
    Truncated {
        /// Bytes there.
        have: usize,
        /// Bytes of the header.
        need: usize,
    },
    /// Another version than `intf::VTL_VERSION`.
    #[error("version {0} is not spoken here")]
    Version(u8),
    /// No `enum vtl_type`.
    #[error("unknown packet type {0}")]
    Type(u8),
    /// `len`, with the padding that belongs to it, differs from what follows the header.
    #[error("length field says {field}, {follow} bytes follow")]
    Length {
        /// The field's value.
        field: usize,
        /// Bytes there.
        follow: usize,
    },
    /// Data without payload or with more than fits into a slot, payload in another type, or too many
    /// extensions.
    #[error("payload of {0} bytes")]
    Payload(usize),
    /// The bitmap is too long, no multiple of 8 bytes, or goes beyond any window.
    #[error("bitmap of {0} bytes")]
    Bitmap(usize),
    /// An extension reaches behind `len`, or `len` ends within one's header or padding. The value is
    /// where it begins behind the fixed part.
    #[error("extension at byte {0} cut off")]
    Extension(usize),
    /// The checksum does not fit.
    #[error("wrong checksum")]
    Checksum,
    /// A field has a value that its type of packet never has.
    #[error("field {0} out of range")]
    Field(&'static str),
}

/// Why a packet could not be emitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// The buffer is shorter than [`Packet::wire_len`].
    #[error("buffer of {have} bytes for a packet of {need}")]
    Buffer {
        /// Length of the buffer.
        have: usize,
        /// Length of the packet.
        need: usize,
    },
    /// The packet would not parse.
    #[error(transparent)]
    Invalid(#[from] WireError),
}

/// The checksum of `packet`, which starts at `version_type` and comes without its padding, or with
/// the zeros that were sent: the sum modulo 2^64 of its little-endian 64-bit words, zero-padded, with
/// the checksum's own field as zero, folded to 32 bits and complemented. Stored little-endian.
pub fn checksum(packet: &[u8]) -> u32 {
    let at = core::mem::offset_of!(intf::vtl_hdr, csum);
    let mut sum = 0u64;
    for (i, word) in packet.chunks(8).enumerate() {
        let mut bytes = [0; 8];
        bytes[..word.len()].copy_from_slice(word);
        if i == at / 8 {
            bytes[at % 8..at % 8 + 4].fill(0);
        }
        sum = sum.wrapping_add(u64::from_le_bytes(bytes));
    }
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    !(sum as u32)
}

const _: () = assert!(core::mem::offset_of!(intf::vtl_hdr, csum) % 8 <= 4);
