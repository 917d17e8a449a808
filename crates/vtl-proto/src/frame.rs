//! Frames: the messages of carriers, for the flows of an association. PROTOCOL.md, "Flows over carriers".
//!
//! All frames have a header of 16 bytes, big-endian:
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                             number                            |
//! +-------------------------------+---------------+---------------+
//! |              len              |     type      |     flags     |
//! +-------------------------------+---------------+---------------+
//! |                        offset (64 bits)                       |
//! +---------------------------------------------------------------+
//! |                      body (len bytes) ...                     |
//! ```

mod addresses;
mod figures;

use core::{fmt, net::Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::carrier::Scheduler;

pub use addresses::{Addresses, MAX_ADDRESSES};
pub use figures::Figures;

/// Length of a frame's header, bytes.
pub const HEADER: usize = 16;
/// Maximum length of a flow's frames but CHUNK, bytes.
pub const MAX_CONTROL: usize = HEADER + 12;
/// Maximum length of frames that set a carrier up, bytes.
pub const MAX_SETUP: usize = HEADER + MAX_CERTIFICATE;
/// Maximum length of the certificate in CERTIFICATE, bytes.
pub const MAX_CERTIFICATE: usize = 1024;
/// Maximum length of the message in LAYERS, bytes: its kind, and a packet.
pub const MAX_LAYERS: usize = 1 + 2048;
/// Length of GRANT's field for a carrier's encryption, bytes.
pub const CRYPTO: usize = 32;
/// Number in the SYN option of an association's control connection.
pub const CONTROL_CONNECTION: u32 = 0;

/// Flag in a flow's number: the flow requires a carrier, and its TCP connection carries no bytes.
pub const REQUIRES_CARRIER: u32 = 1 << 31;
/// Flag in a flow's number: the carrier must be encrypted, too.
pub const REQUIRES_ENCRYPTION: u32 = 1 << 30;
/// Flag in a flow's number: as `bbr` in [`Frame::Prefer`], which comes round trips later. Part of the number for older hosts.
pub const LETS_BBR: u32 = 1 << 29;

const CHUNK: u8 = 1;
const CONFIRM: u8 = 2;
const ATTACH: u8 = 3;
const ATTACHED: u8 = 4;
const RESET: u8 = 5;
const REJECT: u8 = 6;
const LOSES: u8 = 7;
const BROKEN: u8 = 16;
const HELLO: u8 = 17;
const ASK: u8 = 18;
const GRANT: u8 = 19;
const REFUSE: u8 = 20;
const CERTIFICATE: u8 = 21;
const FIGURES: u8 = 22;
const ADDRESSES: u8 = 23;
const GATEWAY: u8 = 24;
const LAYERS: u8 = 25;

/// Length of an address, bytes.
const ADDRESS: usize = 16;
/// Body of HELLO.
const MAGIC: &[u8; 4] = b"VTL2";
/// Flag in HELLO's offset: the sender can continue with TLS.
const TLS: u64 = 1 << 40;
/// Flag in HELLO's offset: the frame is PREFER.
const PREFERS: u64 = 1 << 41;
/// Flag in PREFER's offset: BBR is to take over the flows' TCP connections.
const BBR: u64 = 1 << 42;
/// Flag in PREFER's offset: the sender asks for FIGURES.
const ASKS: u64 = 1 << 43;
/// Flag in PREFER's offset: flows are spread over all carriers, by the scheduler in the three bits above.
const SPREADS: u64 = 1 << 44;
/// Lowest bit of the scheduler's number in PREFER's offset.
const SCHEDULER: u32 = 45;
/// Lowest bit of the path in HELLO's offset.
const PATH: u32 = 32;
/// Flag in HELLO's offset: the sender understands GATEWAY.
const GATEWAYS: u64 = 1 << 48;
/// Flag in HELLO's offset: the carrier has layers, and LAYERS follows.
const LAYERED: u64 = 1 << 49;
/// Flag in ASK's offset: the sender can seal the carrier's bytes.
const SEALS: u64 = 1;

/// The sender of the frame opened the flow, or the carrier.
const OPENER: u8 = 1;
/// The direction ends behind the body (CHUNK), or its end has been received (CONFIRM).
const FIN: u8 = 2;
/// The last byte of the body is TCP's urgent byte (RFC 6093).
const URGENT: u8 = 4;
/// The application of a CONFIRM's sender is loss-tolerant.
const TOLERANT: u8 = 8;
/// The rate in FIGURES is a lower bound.
const AT_LEAST: u8 = 16;

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Side {
    /// This host.
    Local,
    /// The other host.
    Peer,
}

impl Side {
    fn from_flags(flags: u8) -> Self {
        match flags & OPENER {
            0 => Self::Local,
            _ => Self::Peer,
        }
    }

    fn flags(self) -> u8 {
        match self {
            Self::Local => OPENER,
            Self::Peer => 0,
        }
    }
}

/// A flow's identity within its association: its opener, and the opener's number for it, which its SYN carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlowId {
    /// The host that opened the flow.
    pub opener: Side,
    /// Unique among the opener's flows.
    pub number: u32,
}

impl FlowId {
    /// Whether the flow requires a carrier: its TCP connection carries no bytes.
    pub fn requires_carrier(self) -> bool {
        self.number & REQUIRES_CARRIER != 0
    }

    /// Whether the flow requires an encrypted carrier.
    pub fn requires_encryption(self) -> bool {
        self.number & REQUIRES_ENCRYPTION != 0
    }

    /// The flow's identity as seen by the peer.
    #[must_use]
    pub fn at_peer(self) -> Self {
        let opener = match self.opener {
            Side::Local => Side::Peer,
            Side::Peer => Side::Local,
        };
        Self { opener, ..self }
    }
}

/// Content of the SYN option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FlowName {
    /// The association's tag, chosen at random by its opener.
    pub tag: u32,
    /// The flow's number, or [`CONTROL_CONNECTION`].
    pub number: u32,
}

impl FlowName {
    /// As [`FlowId::requires_carrier`].
    pub fn requires_carrier(self) -> bool {
        self.number & REQUIRES_CARRIER != 0
    }

    /// Whether BBR may take over the flow's TCP connection.
    pub fn lets_bbr(self) -> bool {
        self.number & LETS_BBR != 0
    }

    /// As [`FlowId::requires_encryption`].
    pub fn requires_encryption(self) -> bool {
        self.number & REQUIRES_ENCRYPTION != 0
    }
}

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = match self.opener {
            Side::Local => 'l',
            Side::Peer => 'p',
        };
        write!(f, "{prefix}{}", self.number)
    }
}

/// A carrier's identity within its association.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CarrierId {
    /// The host that opened the carrier.
    pub opener: Side,
    /// Unique among the opener's carriers; never reused.
    pub number: u32,
}

/// A contiguous run of bytes in a flow's TCP connection: the byte at `position` of the connection is the
/// byte at `offset` of the flow, and so on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Increases with each run of a direction; 0 is the initial run of every connection.
    pub number: u32,
    /// Bytes of the connection before the run.
    pub position: u64,
    /// Bytes of the flow before the run.
    pub offset: u64,
}

/// Why a flow is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ResetCode {
    /// Reset by the application, or by its TCP connection.
    Reset,
    /// The peer violated the protocol in this flow.
    Violation,
}

impl ResetCode {
    fn from_wire(code: u64) -> Self {
        match code {
            1 => Self::Violation,
            // Unknown codes are resets, too.
            _ => Self::Reset,
        }
    }
}

/// A frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// CHUNK: bytes of a flow, or its end, or both.
    Chunk {
        /// The flow.
        flow: FlowId,
        /// Bytes of the direction before this chunk.
        offset: u64,
        /// At most 65,535; empty only with `fin`.
        bytes: &'a [u8],
        /// The direction ends behind `bytes`.
        fin: bool,
        /// The last byte is TCP's urgent byte.
        urgent: bool,
    },
    /// CONFIRM: the sender's flow layer has received every byte below `offset`.
    Confirm {
        /// The flow.
        flow: FlowId,
        /// Cumulative offset: bytes received in order.
        offset: u64,
        /// The end of the direction has been received, too.
        fin: bool,
        /// Credit: chunks may reach up to this offset.
        limit: u64,
        /// The sender's application is loss-tolerant.
        tolerant: bool,
    },
    /// ATTACH: the sender will write this run to the flow's TCP connection, once ATTACHED has arrived.
    Attach {
        /// The flow.
        flow: FlowId,
        /// The run.
        run: Run,
    },
    /// ATTACHED: acknowledges ATTACH of the run with this number.
    Attached {
        /// The flow.
        flow: FlowId,
        /// The run's number.
        number: u32,
    },
    /// RESET: the flow has ended in an error, in both directions.
    Reset {
        /// The flow.
        flow: FlowId,
        /// Why.
        code: ResetCode,
    },
    /// REJECT: chunks of a flow that is unknown here were discarded, so all bytes have to go by its TCP
    /// connection.
    Reject {
        /// The flow.
        flow: FlowId,
    },
    /// LOSES: the sender has moved to an unreliable carrier, or has left one (`from` is 2^64 - 1).
    Loses {
        /// The flow.
        flow: FlowId,
        /// Chunks from this offset on may get lost; 2^64 - 1: none any more.
        from: u64,
        /// Chunks below this offset are no longer in flight; where `from` is 2^64 - 1, the former `from`.
        passed: u64,
    },
    /// BROKEN: the sender has given up a carrier, so unconfirmed bytes that went by it are retransmitted.
    Broken {
        /// The carrier.
        carrier: CarrierId,
    },
    /// HELLO: the first frame by each carrier, from both hosts.
    Hello {
        /// This carrier.
        carrier: CarrierId,
        /// The association's tag.
        tag: u32,
        /// On a control connection, from the server: it accepts TLS here.
        tls: bool,
        /// The carrier's path; 0 that of the control connection. Older hosts send 0, and ignore it.
        path: u8,
        /// On a control connection: the sender understands GATEWAY. Older hosts ignore it.
        gateways: bool,
        /// From the carrier's opener: layers are over the carrier, and LAYERS are its only further frames. Older hosts ignore
        /// it, and close the carrier because of LAYERS.
        layers: bool,
    },
    /// LAYERS: a message of the layers over this carrier.
    Layers {
        /// A [`Message`](crate::layers::Message), 1 to [`MAX_LAYERS`] bytes.
        message: &'a [u8],
    },
    /// GATEWAY: the sender is a gateway for the host whose address the association has, and other carriers than flows'
    /// TCP connections are between this address of its own and the receiver. Inside TLS on the control connection, to
    /// hosts that understand it.
    Gateway {
        /// The sender's address; IPv4 mapped into IPv6.
        address: Ipv6Addr,
    },
    /// PREFER, a HELLO behind the first on a control connection, from the association's opener: its flows are to go by
    /// this carrier from now on, in both directions. Older hosts ignore it.
    Prefer {
        /// The carrier; the control connection itself: by the flows' own TCP connections.
        carrier: CarrierId,
        /// The association's tag.
        tag: u32,
        /// BBR, or a congestion control like it, is to take over TCP connections of the flows once the path loses packets,
        /// where the host has one. Older hosts do so at once, or ignore it.
        bbr: bool,
        /// The sender asks for FIGURES. Older hosts ignore it.
        asks: bool,
        /// The flows are spread over all carriers of the association, in both directions, by this scheduler, and the
        /// sender asks for ADDRESSES. Older hosts ignore it.
        spread: Option<Scheduler>,
    },
    /// FIGURES: the state of the path in the direction in which the sender sends. For associations whose opener has
    /// asked, by the control connection, at most once a second.
    Figures(Figures),
    /// ADDRESSES: the sender's further addresses, all that there are. For associations whose opener has asked (PREFER), by
    /// a control connection inside TLS.
    Addresses(Addresses<'a>),
    /// ASK: requests a carrier of this kind.
    Ask {
        /// [`Kind::number`](crate::carrier::Kind::number); with [`WITH_LAYERS`](crate::carrier::WITH_LAYERS), for layers over
        /// that carrier.
        kind: u32,
        /// The sender can seal the carrier's bytes, with a secret from the grant.
        seals: bool,
    },
    /// GRANT: permits to open the carrier.
    Grant {
        /// As in ASK.
        kind: u32,
        /// Port at which the sender listens for it.
        port: u16,
        /// Token that identifies the carrier.
        token: u64,
        /// For QUIC, SHA-256 of the sender's certificate. For others, the secret to seal the carrier's bytes
        /// with; zeros if they are not sealed.
        crypto: [u8; CRYPTO],
    },
    /// REFUSE: denies the carrier.
    Refuse {
        /// As in ASK.
        kind: u32,
    },
    /// CERTIFICATE: the certificate for the sender's key.
    Certificate {
        /// At most [`MAX_CERTIFICATE`]; empty if there is none.
        bytes: &'a [u8],
    },
}

/// Malformed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The frame exceeds its packet or message.
    #[error("truncated frame")]
    Truncated,
    /// The type is unknown.
    #[error("unknown frame type {0}")]
    UnknownType(u8),
    /// The body's length does not fit the type.
    #[error("frame of type {kind} with a body of {len} bytes")]
    BodyLength {
        /// The frame's type.
        kind: u8,
        /// The body's length, bytes.
        len: usize,
    },
    /// The chunk would end beyond offset 2^64 - 1.
    #[error("offset overflow")]
    Overflow,
    /// HELLO of another protocol, or of another version.
    #[error("invalid HELLO: not VTL's")]
    Magic,
}

impl<'a> Frame<'a> {
    /// The frame's flow; `None` for carriers' frames.
    pub fn flow(&self) -> Option<FlowId> {
        match *self {
            Self::Chunk { flow, .. }
            | Self::Confirm { flow, .. }
            | Self::Attach { flow, .. }
            | Self::Attached { flow, .. }
            | Self::Reset { flow, .. }
            | Self::Reject { flow }
            | Self::Loses { flow, .. } => Some(flow),
            Self::Broken { .. }
            | Self::Hello { .. }
            | Self::Layers { .. }
            | Self::Gateway { .. }
            | Self::Prefer { .. }
            | Self::Figures(_)
            | Self::Addresses(_)
            | Self::Ask { .. }
            | Self::Grant { .. }
            | Self::Refuse { .. }
            | Self::Certificate { .. } => None,
        }
    }

    /// Parses the first frame of `payload`, and removes it.
    ///
    /// # Errors
    /// The frame is malformed; `payload` is not changed.
    pub fn take(payload: &mut &'a [u8]) -> Result<Self, FrameError> {
        let (head, rest) = payload
            .split_first_chunk::<HEADER>()
            .ok_or(FrameError::Truncated)?;
        let [n0, n1, n2, n3, l0, l1, kind, flags, offset @ ..] = *head;
        let number = u32::from_be_bytes([n0, n1, n2, n3]);
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        let offset = u64::from_be_bytes(offset);
        check_len(kind, flags, len)?;
        let (body, rest) = rest.split_at_checked(len).ok_or(FrameError::Truncated)?;
        let opener = Side::from_flags(flags);
        let flow = FlowId { opener, number };
        let frame = match kind {
            CHUNK => {
                offset.checked_add(len as u64).ok_or(FrameError::Overflow)?;
                Self::Chunk {
                    flow,
                    offset,
                    bytes: body,
                    fin: flags & FIN != 0,
                    urgent: flags & URGENT != 0 && len > 0,
                }
            }
            CONFIRM => Self::Confirm {
                flow,
                offset,
                fin: flags & FIN != 0,
                limit: be64(body),
                tolerant: flags & TOLERANT != 0,
            },
            LOSES => Self::Loses {
                flow,
                from: offset,
                passed: be64(body),
            },
            ATTACH => Self::Attach {
                flow,
                run: Run {
                    number: u32::from_be_bytes([body[8], body[9], body[10], body[11]]),
                    position: be64(body),
                    offset,
                },
            },
            // Truncated on purpose: the field is wider than numbers are.
            ATTACHED => Self::Attached {
                flow,
                number: offset as u32,
            },
            RESET => Self::Reset {
                flow,
                code: ResetCode::from_wire(offset),
            },
            REJECT => Self::Reject { flow },
            HELLO if body != MAGIC => return Err(FrameError::Magic),
            HELLO => Self::hello(CarrierId { opener, number }, offset),
            FIGURES => Self::Figures(Figures::parse(body, flags & AT_LEAST != 0)),
            ADDRESSES => Self::Addresses(Addresses::parse(body)),
            GATEWAY => {
                let mut octets = [0; ADDRESS];
                octets.copy_from_slice(body);
                Self::Gateway {
                    address: octets.into(),
                }
            }
            ASK => Self::Ask {
                kind: number,
                seals: offset & SEALS != 0,
            },
            GRANT => {
                let mut crypto = [0; CRYPTO];
                crypto.copy_from_slice(&body[2..]);
                Self::Grant {
                    kind: number,
                    port: u16::from_be_bytes([body[0], body[1]]),
                    token: offset,
                    crypto,
                }
            }
            REFUSE => Self::Refuse { kind: number },
            LAYERS => Self::Layers { message: body },
            CERTIFICATE => Self::Certificate { bytes: body },
            _ => Self::Broken {
                carrier: CarrierId { opener, number },
            },
        };
        *payload = rest;
        Ok(frame)
    }

    /// HELLO, or PREFER, by its offset. Truncated on purpose: bits above the tag have their own meaning, or none.
    fn hello(carrier: CarrierId, offset: u64) -> Self {
        let has = |flag: u64| offset & flag != 0;
        let tag = offset as u32;
        match has(PREFERS) {
            true => Self::Prefer {
                carrier,
                tag,
                bbr: has(BBR),
                asks: has(ASKS),
                spread: has(SPREADS).then(|| Scheduler::numbered((offset >> SCHEDULER) as u8)),
            },
            false => Self::Hello {
                carrier,
                tag,
                tls: has(TLS),
                path: (offset >> PATH) as u8,
                gateways: has(GATEWAYS),
                layers: has(LAYERED),
            },
        }
    }

    /// Length of the frame, bytes.
    pub fn wire_len(&self) -> usize {
        HEADER
            + match self {
                Self::Chunk { bytes, .. } | Self::Certificate { bytes } => bytes.len(),
                Self::Layers { message } => message.len(),
                Self::Confirm { .. } | Self::Loses { .. } => 8,
                Self::Attach { .. } => 12,
                Self::Hello { .. } | Self::Prefer { .. } => MAGIC.len(),
                Self::Grant { .. } => 2 + CRYPTO,
                Self::Figures(_) => figures::LEN,
                Self::Addresses(addresses) => addresses.as_bytes().len(),
                Self::Gateway { .. } => ADDRESS,
                _ => 0,
            }
    }

    /// The offset of HELLO and PREFER.
    fn hello_offset(&self) -> u64 {
        let flag = |set: bool, flag: u64| if set { flag } else { 0 };
        match *self {
            Self::Hello {
                tag,
                tls,
                path,
                gateways,
                layers,
                ..
            } => {
                let flags = flag(tls, TLS) | flag(gateways, GATEWAYS) | flag(layers, LAYERED);
                u64::from(tag) | u64::from(path) << PATH | flags
            }
            Self::Prefer {
                tag,
                bbr,
                asks,
                spread,
                ..
            } => {
                let number = |by: Scheduler| u64::from(by.number()) << SCHEDULER;
                let spread = spread.map_or(0, |by| SPREADS | number(by));
                u64::from(tag) | PREFERS | flag(bbr, BBR) | flag(asks, ASKS) | spread
            }
            _ => 0,
        }
    }

    /// Writes the frame to the beginning of `buffer`; returns its length in bytes, or `None` without room.
    pub fn emit(&self, buffer: &mut [u8]) -> Option<usize> {
        let total = self.wire_len();
        let (head, body) = buffer.get_mut(..total)?.split_first_chunk_mut::<HEADER>()?;
        let bit = |set: bool, bit: u8| if set { bit } else { 0 };
        *head = match *self {
            Self::Chunk {
                flow,
                offset,
                bytes,
                fin,
                urgent,
            } => {
                body.copy_from_slice(bytes);
                return chunk_header(flow, offset, bytes.len(), fin, urgent).map(|header| {
                    *head = header;
                    total
                });
            }
            Self::Confirm {
                flow,
                offset,
                fin,
                limit,
                tolerant,
            } => {
                body.copy_from_slice(&limit.to_be_bytes());
                let flags = bit(fin, FIN) | bit(tolerant, TOLERANT);
                header(flow.opener, flow.number, 8, CONFIRM, flags, offset)
            }
            Self::Loses { flow, from, passed } => {
                body.copy_from_slice(&passed.to_be_bytes());
                header(flow.opener, flow.number, 8, LOSES, 0, from)
            }
            Self::Attach { flow, run } => {
                body[..8].copy_from_slice(&run.position.to_be_bytes());
                body[8..].copy_from_slice(&run.number.to_be_bytes());
                header(flow.opener, flow.number, 12, ATTACH, 0, run.offset)
            }
            Self::Attached { flow, number } => {
                header(flow.opener, flow.number, 0, ATTACHED, 0, number.into())
            }
            Self::Reset { flow, code } => {
                header(flow.opener, flow.number, 0, RESET, 0, code as u64)
            }
            Self::Reject { flow } => header(flow.opener, flow.number, 0, REJECT, 0, 0),
            Self::Broken { carrier } => header(carrier.opener, carrier.number, 0, BROKEN, 0, 0),
            Self::Hello { carrier, .. } | Self::Prefer { carrier, .. } => {
                body.copy_from_slice(MAGIC);
                header(
                    carrier.opener,
                    carrier.number,
                    4,
                    HELLO,
                    0,
                    self.hello_offset(),
                )
            }
            Self::Gateway { address } => {
                body.copy_from_slice(&address.octets());
                header(Side::Local, 0, ADDRESS as u16, GATEWAY, 0, 0)
            }
            Self::Figures(figures) => {
                figures.write(body);
                let len = u16::try_from(figures::LEN).ok()?;
                let flags = bit(figures.at_least, AT_LEAST);
                header(Side::Local, 0, len, FIGURES, flags, 0)
            }
            Self::Addresses(addresses) => {
                body.copy_from_slice(addresses.as_bytes());
                let len = u16::try_from(body.len()).ok()?;
                header(Side::Local, 0, len, ADDRESSES, 0, 0)
            }
            Self::Ask { kind, seals } => {
                let offset = if seals { SEALS } else { 0 };
                header(Side::Local, kind, 0, ASK, 0, offset)
            }
            Self::Grant {
                kind,
                port,
                token,
                crypto,
            } => {
                body[..2].copy_from_slice(&port.to_be_bytes());
                body[2..].copy_from_slice(&crypto);
                header(Side::Local, kind, 34, GRANT, 0, token)
            }
            Self::Refuse { kind } => header(Side::Local, kind, 0, REFUSE, 0, 0),
            Self::Layers { message } => {
                body.copy_from_slice(message);
                let len = u16::try_from(message.len()).ok()?;
                header(Side::Local, 0, len, LAYERS, 0, 0)
            }
            Self::Certificate { bytes } => {
                body.copy_from_slice(bytes);
                let len = u16::try_from(bytes.len()).ok()?;
                header(Side::Local, 0, len, CERTIFICATE, 0, 0)
            }
        };
        Some(total)
    }
}

/// Whether a frame of this type may have a body of `len` bytes.
fn check_len(kind: u8, flags: u8, len: usize) -> Result<(), FrameError> {
    let expected = match kind {
        CHUNK if len > 0 || flags & FIN != 0 => len,
        CHUNK => return Err(FrameError::BodyLength { kind, len }),
        CONFIRM | LOSES => 8,
        ATTACH => 12,
        HELLO => MAGIC.len(),
        GRANT => 2 + CRYPTO,
        FIGURES => figures::LEN,
        ADDRESSES => addresses::whole(len),
        GATEWAY => ADDRESS,
        CERTIFICATE => len.min(MAX_CERTIFICATE),
        LAYERS => len.clamp(1, MAX_LAYERS),
        ATTACHED | RESET | REJECT | BROKEN | ASK | REFUSE => 0,
        _ => return Err(FrameError::UnknownType(kind)),
    };
    if len != expected {
        return Err(FrameError::BodyLength { kind, len });
    }
    Ok(())
}

/// The header of a chunk of `len` bytes; `None` if that is too long.
pub fn chunk_header(
    flow: FlowId,
    offset: u64,
    len: usize,
    fin: bool,
    urgent: bool,
) -> Option<[u8; HEADER]> {
    let len = u16::try_from(len).ok()?;
    let flags = if fin { FIN } else { 0 } | if urgent { URGENT } else { 0 };
    Some(header(flow.opener, flow.number, len, CHUNK, flags, offset))
}

/// Parses the header of a CHUNK without length, whose body extends to the end of its stream: the flow, and the
/// offset of the first byte. `None` for any other.
pub fn open_chunk(header: &[u8; HEADER]) -> Option<(FlowId, u64)> {
    let [n0, n1, n2, n3, 0, 0, CHUNK, flags, offset @ ..] = *header else {
        return None;
    };
    let number = u32::from_be_bytes([n0, n1, n2, n3]);
    let opener = Side::from_flags(flags);
    let flow = FlowId { opener, number };
    (flags & FIN == 0).then_some((flow, u64::from_be_bytes(offset)))
}

fn header(opener: Side, number: u32, len: u16, kind: u8, flags: u8, offset: u64) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes[4..6].copy_from_slice(&len.to_be_bytes());
    bytes[6] = kind;
    bytes[7] = flags | opener.flags();
    bytes[8..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

fn be64(bytes: &[u8]) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    u64::from_be_bytes(first)
}

#[cfg(test)]
mod tests;
