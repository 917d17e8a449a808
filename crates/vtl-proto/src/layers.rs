//! Headers of the layers of a stack, and the messages that open one: PROTOCOL.md, section 7, "Layers".
//!
//! A layer puts its header in front of each packet from above, so a packet begins with the header of the lowest layer.
//! Integers are big-endian; sequence numbers are sent modulo 2^32, and [`near`] restores them.

/// Bytes of a datagram in front of everything else, in the clear: the number of the stack's conversation.
pub const NUMBER: usize = 4;

/// Maximum length of a [`Message::Setup`]'s layers and of a [`Message::Refuse`]'s reason, bytes.
pub const MAX_TEXT: usize = 512;

/// The sequence number closest to `known` that is sent as `sent`. None is below zero.
pub fn near(sent: u32, known: u64) -> u64 {
    // Truncated on purpose: a difference modulo 2^32, in two's complement.
    let ahead = sent.wrapping_sub(known as u32) as i32;
    let found = known.checked_add_signed(ahead.into());
    found.unwrap_or(sent.into())
}

/// Splits a number off the front.
fn take_u32(from: &mut &[u8]) -> Option<u32> {
    let (bytes, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(u32::from_be_bytes(*bytes))
}

fn take_u16(from: &mut &[u8]) -> Option<u16> {
    let (bytes, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(u16::from_be_bytes(*bytes))
}

/// What a datagram of a stack holds, behind its number and inside its seal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// A packet of the layers.
    Packet(&'a [u8]),
    /// From the opener, until it is answered: what the stack consists of.
    Setup {
        /// The token of the grant.
        token: u64,
        /// What the receiver shall send at most, kbit/s with IP headers; 0: without bound.
        rate: u32,
        /// The stack's layers, as text.
        layers: &'a str,
    },
    /// Answers [`Message::Setup`]: the stack is open.
    Accept,
    /// Answers [`Message::Setup`]: the stack is not opened, and why, for operators.
    Refuse(&'a str),
}

impl<'a> Message<'a> {
    /// First byte of [`Message::Packet`].
    pub const PACKET: u8 = 0;
    const SETUP: u8 = 1;
    const ACCEPT: u8 = 2;
    const REFUSE: u8 = 3;

    /// Decodes a message; `None` if it is malformed. What follows ACCEPT is ignored.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (kind, mut body) = bytes.split_first()?;
        let text = |body: &'a [u8]| {
            let text = std::str::from_utf8(body).ok()?;
            (text.len() <= MAX_TEXT).then_some(text)
        };
        match *kind {
            Self::PACKET => Some(Self::Packet(body)),
            Self::SETUP => {
                let token = u64::from(take_u32(&mut body)?) << 32;
                let token = token | u64::from(take_u32(&mut body)?);
                let rate = take_u32(&mut body)?;
                let layers = text(body)?;
                Some(Self::Setup {
                    token,
                    rate,
                    layers,
                })
            }
            Self::ACCEPT => Some(Self::Accept),
            Self::REFUSE => Some(Self::Refuse(text(body)?)),
            _ => None,
        }
    }

    /// Appends the message.
    pub fn emit(self, to: &mut Vec<u8>) {
        match self {
            Self::Packet(packet) => {
                to.push(Self::PACKET);
                to.extend_from_slice(packet);
            }
            Self::Setup {
                token,
                rate,
                layers,
            } => {
                to.push(Self::SETUP);
                to.extend_from_slice(&token.to_be_bytes());
                to.extend_from_slice(&rate.to_be_bytes());
                to.extend_from_slice(layers.as_bytes());
            }
            Self::Accept => to.push(Self::ACCEPT),
            Self::Refuse(why) => {
                to.push(Self::REFUSE);
                // Longer, the peer would not take it: it may quote much of what that has said.
                to.extend_from_slice(&why.as_bytes()[..why.floor_char_boundary(MAX_TEXT)]);
            }
        }
    }
}

/// The header of the layer `ordering`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ordering {
    /// Number of the packet, from 0 on.
    pub seq: u32,
}

impl Ordering {
    /// Length, bytes.
    pub const LEN: usize = 4;

    /// Decodes the header, and the packet behind it.
    pub fn parse(mut packet: &[u8]) -> Option<(Self, &[u8])> {
        let seq = take_u32(&mut packet)?;
        Some((Self { seq }, packet))
    }

    /// Encodes the header.
    pub fn emit(self) -> [u8; Self::LEN] {
        self.seq.to_be_bytes()
    }
}

/// The header of the layer `flow-control`, or a packet of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowControl {
    /// In front of a packet from above.
    Data,
    /// Number of the first packet from above that the receiver of this must not send yet. Nothing follows.
    Credit(u32),
}

impl FlowControl {
    /// Length of the header of a packet from above, bytes.
    pub const LEN: usize = 1;

    /// Decodes the header, and the packet behind it.
    pub fn parse(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (kind, mut rest) = packet.split_first()?;
        match kind {
            0 => Some((Self::Data, rest)),
            1 => Some((Self::Credit(take_u32(&mut rest)?), rest)),
            _ => None,
        }
    }

    /// Encodes the header.
    pub fn emit(self) -> Vec<u8> {
        match self {
            Self::Data => vec![0],
            Self::Credit(limit) => [&[1], &limit.to_be_bytes()[..]].concat(),
        }
    }
}

/// The header of the layer `nack`, or a packet of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Nack {
    /// In front of a packet from above.
    Data {
        /// Number of the packet, from 0 on; the same when it is sent again.
        seq: u32,
        /// Number of the transmission.
        xid: u32,
    },
    /// Asks for a report at once. Nothing follows.
    Probe {
        /// Number that the next new packet will have.
        next: u32,
        /// Number of the transmission.
        xid: u32,
    },
    /// What the receiver lacks.
    Report(Report),
}

/// The state of a receiver of the layer `nack`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// All packets below this number have arrived.
    pub cum: u32,
    /// The report is about packets below this number: those that `missing` does not name have arrived.
    pub end: u32,
    /// The latest transmission that has arrived, DATA or PROBE,
    pub echo: u32,
    /// and how long ago, µs.
    pub held: u32,
    /// Packets that have arrived more than once, modulo 2^32.
    pub dups: u32,
    /// Runs of missing packets in ascending order from `cum` on: how many have arrived before the run (behind the one
    /// before), and how many it has, at least 1.
    pub missing: Vec<(u16, u16)>,
}

impl Report {
    /// Maximum number of runs in a report: it fits into the smallest packet.
    pub const MAX_RUNS: usize = 128;
}

impl Nack {
    /// Length of the header of a packet from above, bytes.
    pub const LEN: usize = 9;

    /// Decodes the header, and the packet behind it.
    pub fn parse(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (kind, mut rest) = packet.split_first()?;
        let first = take_u32(&mut rest)?;
        let second = take_u32(&mut rest)?;
        let parsed = match kind {
            0 => Self::Data {
                seq: first,
                xid: second,
            },
            1 => Self::Probe {
                next: first,
                xid: second,
            },
            2 => {
                let mut report = Report {
                    cum: first,
                    end: second,
                    echo: take_u32(&mut rest)?,
                    held: take_u32(&mut rest)?,
                    dups: take_u32(&mut rest)?,
                    missing: Vec::new(),
                };
                // Each takes 4 bytes; what is left over is ignored.
                while let (Some(arrived), Some(missing)) =
                    (take_u16(&mut rest), take_u16(&mut rest))
                {
                    if missing == 0 || report.missing.len() == Report::MAX_RUNS {
                        return None;
                    }
                    report.missing.push((arrived, missing));
                }
                Self::Report(report)
            }
            _ => return None,
        };
        Some((parsed, rest))
    }

    /// Encodes the header.
    pub fn emit(&self) -> Vec<u8> {
        let (kind, first, second) = match self {
            Self::Data { seq, xid } => (0, *seq, *xid),
            Self::Probe { next, xid } => (1, *next, *xid),
            Self::Report(report) => (2, report.cum, report.end),
        };
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&first.to_be_bytes());
        bytes.extend_from_slice(&second.to_be_bytes());
        if let Self::Report(report) = self {
            for number in [report.echo, report.held, report.dups] {
                bytes.extend_from_slice(&number.to_be_bytes());
            }
            for (arrived, missing) in &report.missing {
                bytes.extend_from_slice(&arrived.to_be_bytes());
                bytes.extend_from_slice(&missing.to_be_bytes());
            }
        }
        bytes
    }
}

/// The header of the layer `fec`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fec {
    /// In front of a packet from above.
    Data {
        /// Number of the block, from 0 on.
        block: u32,
        /// Place of the packet in its block, below [`Fec::MAX_BLOCK`].
        index: u8,
    },
    /// In front of the XOR of a block's packets, each filled up with zeros to the longest.
    Parity {
        /// Number of the block.
        block: u32,
        /// Number of the block's packets, 1 to [`Fec::MAX_BLOCK`].
        count: u8,
        /// XOR of their lengths.
        lengths: u16,
    },
}

impl Fec {
    /// Maximum number of packets of a block.
    pub const MAX_BLOCK: u8 = 64;
    /// Maximum length of the header, bytes.
    pub const LEN: usize = 7;
    /// Bit of the first byte that marks a parity.
    const PARITY: u8 = 0x80;

    /// Decodes the header, and the packet behind it.
    pub fn parse(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (first, mut rest) = packet.split_first()?;
        let block = take_u32(&mut rest)?;
        let number = first & !Self::PARITY;
        let parsed = if first & Self::PARITY == 0 {
            (number < Self::MAX_BLOCK).then_some(Self::Data {
                block,
                index: number,
            })
        } else {
            let lengths = take_u16(&mut rest)?;
            let is_valid = (1..=Self::MAX_BLOCK).contains(&number);
            is_valid.then_some(Self::Parity {
                block,
                count: number,
                lengths,
            })
        };
        Some((parsed?, rest))
    }

    /// Encodes the header.
    pub fn emit(self) -> Vec<u8> {
        match self {
            Self::Data { block, index } => [&[index], &block.to_be_bytes()[..]].concat(),
            Self::Parity {
                block,
                count,
                lengths,
            } => {
                let (block, lengths) = (block.to_be_bytes(), lengths.to_be_bytes());
                [&[count | Self::PARITY], &block[..], &lengths].concat()
            }
        }
    }
}

/// The header of the layer `compression`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// The packet follows as it is.
    Stored,
    /// The packet follows as one block of LZ4.
    Lz4,
}

impl Compression {
    /// Length, bytes.
    pub const LEN: usize = 1;

    /// Decodes the header, and the packet behind it.
    pub fn parse(packet: &[u8]) -> Option<(Self, &[u8])> {
        let (kind, rest) = packet.split_first()?;
        match kind {
            0 => Some((Self::Stored, rest)),
            1 => Some((Self::Lz4, rest)),
            _ => None,
        }
    }

    /// Encodes the header.
    pub fn emit(self) -> [u8; Self::LEN] {
        match self {
            Self::Stored => [0],
            Self::Lz4 => [1],
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn near__is_the_closest_number() {
        const TURN: u64 = 1 << 32;
        for (sent, known, found) in [
            (5, 0, 5),
            (5, 7, 5),
            (0, TURN - 1, TURN),
            (u32::MAX, TURN + 3, TURN - 1),
            (7, 3 * TURN, 3 * TURN + 7),
            (u32::MAX, 3, u32::MAX.into()),
        ] {
            assert_eq!(near(sent, known), found, "{sent} near {known}");
        }
    }

    proptest! {
        #[test]
        fn headers__any_bytes_are_parsed_or_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
        ) {
            // What is parsed is emitted alike, but for bytes that are ignored.
            if let Some((header, rest)) = Nack::parse(&bytes) {
                let again = header.emit();
                prop_assert_eq!(&again[..], &bytes[..again.len()]);
                if !matches!(header, Nack::Report(_)) {
                    prop_assert_eq!([&again, rest].concat(), bytes.clone());
                }
            }
            if let Some((header, rest)) = Fec::parse(&bytes) {
                prop_assert_eq!([&header.emit(), rest].concat(), bytes.clone());
            }
            if let Some((header, rest)) = FlowControl::parse(&bytes) {
                prop_assert_eq!([&header.emit(), rest].concat(), bytes.clone());
            }
            if let Some((header, rest)) = Compression::parse(&bytes) {
                prop_assert_eq!([&header.emit(), rest].concat(), bytes.clone());
            }
            if let Some((header, rest)) = Ordering::parse(&bytes) {
                prop_assert_eq!([&header.emit(), rest].concat(), bytes.clone());
            }
            if let Some(message) = Message::parse(&bytes).filter(|m| *m != Message::Accept) {
                let mut again = Vec::new();
                message.emit(&mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
