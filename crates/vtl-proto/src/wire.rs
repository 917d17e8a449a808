//! Packets: parsing into checked values, once, and emission.
//!
//! Offsets and widths come from the C structs of `wire.h`; no other code computes any.
//!
//! A packet is the content of the IP (or UDP) datagram, cut to the length in that header: Ethernet padding is
//! not part of it.

mod emit;
mod extension;
pub(crate) mod fields;
mod parse;
mod tag;
#[cfg(test)]
mod tests;

use crate::intf;

pub use extension::{Extension, Extensions, MAX_EXTENSIONS};
#[doc(hidden)]
pub use fields::size_of_field;
pub(crate) use fields::{get, put};
pub use tag::{TAG_KEY, TagKey};

/// Minimum `max_payload` in negotiation, bytes: what every IPv4 path carries (RFC 791: 576), rounded down.
/// Spares senders the handling of tiny packets.
pub const MIN_PAYLOAD: u16 = 512;

/// The session index in a packet; `None` if truncated.
pub fn sid(packet: &[u8]) -> Option<u32> {
    let sid = packet.get(core::mem::offset_of!(intf::vtl_hdr, sid)..)?;
    Some(u32::from_be_bytes(*sid.first_chunk()?))
}

/// The token in a packet; `None` if truncated.
pub fn token(packet: &[u8]) -> Option<u64> {
    let token = packet.get(core::mem::offset_of!(intf::vtl_hdr, token)..)?;
    Some(u64::from_be_bytes(*token.first_chunk()?))
}

/// The common header. The checksum and the length are handled by [`Packet::parse`] and [`Packet::emit`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Bit set of `intf::VTL_F_*`; unknown bits are kept and have no meaning.
    pub flags: u8,
    /// The graft that sent the packet and must process it; 0 in NEGO, NEGO_ACK, NEGO_NACK, CLOSE and SIZE.
    pub gid: u16,
    /// The session's index at the receiver of the packet; in NEGO 0, or that of the early data, of the
    /// predecessor, or of the session whose handshake it finishes.
    pub sid: u32,
    /// The receiver's token of the session; in NEGO as `sid`.
    pub token: u64,
}

/// DATA, or PROBE, which has no payload. On the wire short ones are padded to `intf::VTL_MIN_PACKET` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Data<'a> {
    /// Common part.
    pub header: Header,
    /// Sequence number of the packet in the session; in a probe, that of the next new packet.
    pub seq: u64,
    /// Number of this transmission, modulo 2^32.
    pub xid: u32,
    /// Sender's clock, microseconds modulo 2^32.
    pub ts: u32,
    /// 1 to `intf::VTL_MAX_PAYLOAD` bytes; none in a probe.
    pub payload: &'a [u8],
}

/// An acknowledgement: the complete state of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack<'a> {
    /// Common part.
    pub header: Header,
    /// Cumulative acknowledgement: every packet below has arrived.
    pub cum: u64,
    /// Flow-control limit: there is no room for packets from here on.
    pub limit: u64,
    /// Distinct packets accepted since the session began.
    pub received: u64,
    /// `seq` of the packet that caused this acknowledgement; of the latest one before if none did
    /// (`intf::VTL_F_UPDATE`).
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
    /// Selective acknowledgement; see [`Ack::has`]. A multiple of 8 bytes, at most `intf::VTL_ACK_MAX_BITMAP`.
    pub bitmap: &'a [u8],
}

impl Ack<'_> {
    /// Sequence number of the bitmap's first bit.
    pub fn base(&self) -> u64 {
        (self.cum & !63).saturating_add(u64::from(self.skip) * 64)
    }

    /// Whether packet `seq` has arrived; `None` if this acknowledgement does not cover it.
    pub fn has(&self, seq: u64) -> Option<bool> {
        if seq < self.cum {
            return Some(true);
        }
        let Some(bit) = seq.checked_sub(self.base()) else {
            // Between `cum` and the bitmap only packet `cum` is known to be missing.
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

/// A list of at most 8 items.
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
    /// Creates a list; `None` if it is too long.
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
    /// The graft: index in the list of gids.
    pub graft: u8,
    /// The parameter's index in the graft's own order; below `intf::VTL_NEGO_PARAMS`.
    pub index: u8,
    /// Its value, in its own unit.
    pub value: u32,
}

/// A responder's ticket for an address, whose return validates that address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// Time of issue, ms since the responder started.
    pub time: u64,
    /// Opaque.
    pub mac: u64,
    /// The responder's session index for early data; 0: no ticket.
    pub sid: u32,
}

/// NEGO, NEGO_ACK and NEGO_NACK. "We": the sender of the packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nego<'a> {
    /// Common part.
    pub header: Header,
    /// The token that the peer must put into packets to us.
    pub token: u64,
    /// In an answer: the initiator's token. In NEGO 0.
    pub peer_token: u64,
    /// Our session index; never 0, except in NEGO_NACK.
    pub sid: u32,
    /// Slots of our receive ring; never 0, except in NEGO_NACK.
    pub ring_slots: u32,
    /// Maximum payload of a packet that we accept, bytes, at least [`MIN_PAYLOAD`]; 0 in NEGO_NACK.
    pub max_payload: u16,
    /// Destination port, not 0.
    pub port: u16,
    /// The initiator's required services: bits of [`crate::services::Services`].
    pub services: u16,
    /// `intf::VTL_NACK_*`; 0 except in NEGO_NACK.
    pub reason: u8,
    /// Offered grafts; in NEGO_ACK exactly one, the chosen one.
    pub gids: Gids,
    /// In NEGO, the ticket that the responder gave, if any; in its answers, one for the next NEGO.
    pub ticket: Ticket,
    /// Values of the grafts' parameters.
    pub params: Params,
    /// The extensions behind the fixed part.
    pub extensions: Extensions<'a>,
}

impl Nego<'_> {
    /// The fixed part alone, which borrows nothing.
    pub fn without_extensions(self) -> Nego<'static> {
        Nego {
            extensions: Extensions::default(),
            ..self
        }
    }
}

/// SIZE: a probe of its own packet size, with `intf::VTL_F_ACK_NOW`, or the short answer.
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
    /// Accepts a session.
    NegoAck(Nego<'a>),
    /// Refuses a session.
    NegoNack(Nego<'a>),
    /// Closes the session; with `intf::VTL_F_ABORT` before all data were delivered.
    Close(Header),
    /// Probes the path for a packet size.
    Size(Size),
}

/// Parse error of a packet.
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
    /// Version other than `intf::VTL_VERSION`.
    #[error("unsupported version {0}")]
    Version(u8),
    /// Type not in `enum vtl_type`.
    #[error("unknown packet type {0}")]
    Type(u8),
    /// `len` and its padding differ from the bytes behind the header.
    #[error("length field says {field}, {follow} bytes follow")]
    Length {
        /// The field's value.
        field: usize,
        /// Bytes there.
        follow: usize,
    },
    /// DATA without payload or with more than a slot holds, payload in another type, or too many extensions.
    #[error("payload of {0} bytes")]
    Payload(usize),
    /// Bitmap too long, not a multiple of 8 bytes, or beyond any window.
    #[error("bitmap of {0} bytes")]
    Bitmap(usize),
    /// An extension exceeds `len`, or `len` ends within one's header or padding. The value is its offset behind
    /// the fixed part.
    #[error("extension at byte {0} cut off")]
    Extension(usize),
    /// Wrong checksum.
    #[error("wrong checksum")]
    Checksum,
    /// A field has a value that is invalid for the packet's type.
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
