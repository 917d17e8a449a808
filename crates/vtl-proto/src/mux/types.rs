//! What the multiplexer's callers see: identities, events, errors.

use core::{fmt, net::SocketAddr};

use crate::intf;

/// A stream's identity within its session: even if the session's initiator opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u32);

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a stream is abandoned, `enum vtl_reset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ResetCode {
    /// Connection reset.
    Rst,
    /// Nobody listens there.
    Refused,
    /// No route, or prohibited.
    Unreachable,
    /// The application's peer did not answer.
    Timeout,
    /// That host does not serve that port through VTL: use plain TCP.
    NotHooked,
}

impl ResetCode {
    pub(super) const ALL: [(Self, u32); 5] = [
        (Self::Rst, intf::VTL_RESET_RST),
        (Self::Refused, intf::VTL_RESET_REFUSED),
        (Self::Unreachable, intf::VTL_RESET_UNREACHABLE),
        (Self::Timeout, intf::VTL_RESET_TIMEOUT),
        (Self::NotHooked, intf::VTL_RESET_NOT_HOOKED),
    ];

    /// An unknown code is a reset all the same.
    pub fn from_wire(value: u64) -> Self {
        let found = Self::ALL.iter().find(|(_, code)| u64::from(*code) == value);
        found.map_or(Self::Rst, |(reset, _)| *reset)
    }

    /// The code that stands for it on the wire.
    pub fn to_wire(self) -> u64 {
        let found = Self::ALL.iter().find(|(reset, _)| *reset == self);
        found.map_or(0, |(_, code)| u64::from(*code))
    }
}

/// What a packet meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// The peer opens a stream: answer with [`super::Mux::accept_opened`] or [`super::Mux::reset`].
    Open {
        /// The new stream.
        id: StreamId,
        /// Where the peer's application wants to go.
        dst: SocketAddr,
        /// Who it is.
        src: SocketAddr,
    },
    /// The application at the peer has accepted.
    Opened {
        /// The stream.
        id: StreamId,
    },
    /// The next bytes; report them with [`super::Mux::consumed`] once written to the application.
    Data {
        /// The stream.
        id: StreamId,
        /// Never empty.
        bytes: &'a [u8],
    },
    /// The last byte of the data that came right before is TCP's urgent one.
    Urgent {
        /// The stream.
        id: StreamId,
    },
    /// No data follow.
    Fin {
        /// The stream.
        id: StreamId,
    },
    /// The stream is gone, at once.
    Reset {
        /// The stream, already forgotten.
        id: StreamId,
        /// Why.
        code: ResetCode,
    },
    /// Sending was blocked by credit and no longer is.
    Writable {
        /// The stream.
        id: StreamId,
    },
}

/// How a peer broke the rules: the session must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MuxError {
    /// A frame reaches beyond its packet.
    #[error("truncated frame")]
    Truncated,
    /// No `enum vtl_frame_type`.
    #[error("unknown frame type {0}")]
    UnknownType(u8),
    /// The body's length does not fit the type.
    #[error("frame of type {kind} with {len} bytes of body")]
    BodyLength {
        /// `enum vtl_frame_type`.
        kind: u8,
        /// Bytes.
        len: usize,
    },
    /// An OPEN with an identity of ours, or not above the peer's previous one.
    #[error("stream {0} cannot be opened by the peer")]
    BadOpen(StreamId),
    /// A frame for a stream that never was.
    #[error("stream {0} was never opened")]
    NeverOpened(StreamId),
    /// The peer has more than [`super::MAX_STREAMS`] streams open.
    #[error("too many streams")]
    TooManyStreams,
    /// OPENED for a stream of the peer's own, or twice.
    #[error("unexpected OPENED for stream {0}")]
    UnexpectedOpened(StreamId),
    /// Data or FIN from the side that accepts, before OPENED.
    #[error("stream {0} carries data before it is accepted")]
    NotOpened(StreamId),
    /// A gap or an overlap.
    #[error("stream {id}: offset {found} where {expected} comes next")]
    Offset {
        /// The stream.
        id: StreamId,
        /// Bytes received so far.
        expected: u64,
        /// The frame's offset.
        found: u64,
    },
    /// More bytes than were allowed.
    #[error("stream {0}: data beyond credit")]
    BeyondCredit(StreamId),
    /// Data or FIN after FIN.
    #[error("stream {0}: data after its end")]
    AfterFin(StreamId),
    /// A frame that does not go this way: with loss, data lie in packets, one frame in each, and
    /// nothing else does.
    #[error("frame of type {0} where it does not belong")]
    Misplaced(u8),
    /// Credit was taken back.
    #[error("stream {0}: credit shrank")]
    CreditShrank(StreamId),
}

/// Why a stream cannot be opened now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// [`super::MAX_STREAMS`] of ours are open.
    #[error("too many streams in this session")]
    TooManyStreams,
    /// All 2^31 identities were used.
    #[error("no stream identities left in this session")]
    Exhausted,
}
