//! A flow: one application's byte stream in both directions.

mod pieces;
mod receive;
mod send;

pub use receive::ReceiveHalf;
pub use send::{Given, Hastened, Loses, Next, Path, SendHalf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vtl_proto::frame::ResetCode;

/// Initial credit, bytes: what a sender may send by carriers before the peer has confirmed anything of the
/// flow.
pub const INITIAL_CREDIT: u64 = 64 << 10;

/// Contiguous bytes of one direction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Bytes of the direction before this chunk.
    pub offset: u64,
    /// Never empty.
    pub bytes: Bytes,
    /// The last byte is TCP's urgent byte (RFC 6093).
    pub urgent: bool,
}

impl Chunk {
    /// The offset behind the last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes.len() as u64
    }
}

/// Protocol violation by the peer in one flow, which must be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A chunk exceeds the credit.
    #[error("flow control violated: chunk up to offset {end}, credit {limit}")]
    BeyondCredit {
        /// Where the chunk ends.
        end: u64,
        /// The credit.
        limit: u64,
    },
    /// Bytes beyond the end of the direction, or a second end.
    #[error("final size changed: end at offset {0}, and at another one")]
    TwoEnds(u64),
    /// More gaps than a receiver tracks.
    #[error("too many gaps")]
    TooManyGaps,
    /// Confirmation of bytes, or of an end, that were never sent.
    #[error("confirmation of offset {0}, which was never sent")]
    ConfirmedUnsent(u64),
    /// Invalid run of the TCP connection: its position precedes bytes already read, its offset overflows, or
    /// there are too many runs.
    #[error("invalid run of the TCP connection at offset {0}")]
    BadRun(u64),
    /// Losses announced for a flow whose application does not tolerate them.
    #[error("unreliable carrier for a flow that requires reliability")]
    Loses,
    /// Bytes on the TCP connection beyond its run or the window.
    #[error("bytes outside any run on the TCP connection")]
    NoRun,
}

/// Both directions of a flow, and its error. Serialised for the handover to the next daemon, together with the
/// flow's sockets.
#[derive(Debug, Serialize, Deserialize)]
pub struct Flow {
    /// Sending direction.
    pub send: SendHalf,
    /// Receiving direction.
    pub receive: ReceiveHalf,
    reset: Option<ResetCode>,
    /// Carriers are refused: plain TCP.
    #[serde(default)]
    refused: bool,
}

impl Flow {
    /// Creates a flow whose TCP connection is established. `window`: initial receive window, bytes,
    /// `max_window`: its maximum; both at least [`INITIAL_CREDIT`].
    pub fn new(window: u64, max_window: u64) -> Self {
        Self {
            send: SendHalf::default(),
            receive: ReceiveHalf::new(window, max_window),
            reset: None,
            refused: false,
        }
    }

    /// Memory that the flow's buffers use, bytes, approximately.
    pub fn memory(&self) -> u64 {
        self.send.memory() + self.receive.memory()
    }

    /// Marks the local application as loss-tolerant. Losses are allowed if the peer's is, too.
    pub fn set_tolerant(&mut self) {
        self.send.set_tolerant();
        self.receive.set_tolerant();
    }

    /// Resets the flow: frees its buffers. The first code counts.
    pub fn reset(&mut self, code: ResetCode) {
        self.reset.get_or_insert(code);
        self.send.discard();
        self.receive.discard();
    }

    /// The code of the reset, if any.
    pub fn error(&self) -> Option<ResetCode> {
        self.reset
    }

    /// Refuses carriers: keeps the flow on its TCP connection.
    pub(crate) fn refuse(&mut self) {
        self.refused = true;
    }

    /// Whether carriers are refused, by this host's policy: the flow is plain TCP.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Whether both directions have ended in order: the peer has all bytes, and so has the local application.
    pub fn is_complete(&self) -> bool {
        self.send.is_complete() && self.receive.is_complete()
    }
}
