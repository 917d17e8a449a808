//! A flow: one application's byte stream in both directions.

mod pieces;
mod receive;
mod send;

pub use receive::ReceiveHalf;
pub use send::{Loses, Next, Path, SendHalf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vtl_proto::frame::ResetCode;

/// Bytes that a sender may send by carriers before the peer has confirmed anything of the flow.
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

/// How a peer violated the protocol in one flow; the flow is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A chunk reaches beyond the credit.
    #[error("chunk up to offset {end} beyond the credit of {limit}")]
    BeyondCredit {
        /// Where the chunk ends.
        end: u64,
        /// The credit.
        limit: u64,
    },
    /// There are bytes behind the end, or two ends.
    #[error("the direction ends at offset {0}, and at another one")]
    TwoEnds(u64),
    /// There are more gaps than a receiver keeps track of.
    #[error("too many gaps")]
    TooManyGaps,
    /// More was confirmed than was sent.
    #[error("offset {0} was confirmed and never sent")]
    ConfirmedUnsent(u64),
    /// A run of the TCP connection lies before bytes that were received, or beyond the credit.
    #[error("a run of the TCP connection begins at {0}, which cannot be")]
    BadRun(u64),
    /// Chunks may have been lost that the application does not do without.
    #[error("a carrier that loses chunks of a flow that needs them")]
    Loses,
    /// The TCP connection carries bytes beyond its run.
    #[error("bytes on the TCP connection that belong to no run")]
    NoRun,
}

/// Both directions of a flow, and how it ended. A daemon that restarts hands it to its successor, together
/// with the flow's sockets.
#[derive(Debug, Serialize, Deserialize)]
pub struct Flow {
    /// From the local application to the peer's.
    pub send: SendHalf,
    /// From the peer's application to the local one.
    pub receive: ReceiveHalf,
    reset: Option<ResetCode>,
    /// No carrier may serve it.
    #[serde(default)]
    refused: bool,
}

impl Flow {
    /// A flow whose TCP connection is established. `max_window`: bytes that it holds at most for an application
    /// that stops reading, `window`: for one that has not read yet; both at least [`INITIAL_CREDIT`].
    pub fn new(window: u64, max_window: u64) -> Self {
        Self {
            send: SendHalf::default(),
            receive: ReceiveHalf::new(window, max_window),
            reset: None,
            refused: false,
        }
    }

    /// Memory in bytes that its buffers use, approximately.
    pub fn memory(&self) -> u64 {
        self.send.memory() + self.receive.memory()
    }

    /// Both applications may do without what gets lost, if the peer says so, too.
    pub fn set_tolerant(&mut self) {
        self.send.set_tolerant();
        self.receive.set_tolerant();
    }

    /// Ends the flow in an error; the first one counts. Bytes that it has are nobody's any more.
    pub fn reset(&mut self, code: ResetCode) {
        self.reset.get_or_insert(code);
        self.send.discard();
        self.receive.discard();
    }

    /// The error that the flow has ended in.
    pub fn error(&self) -> Option<ResetCode> {
        self.reset
    }

    /// Keeps the flow on its TCP connection.
    pub(crate) fn refuse(&mut self) {
        self.refused = true;
    }

    /// No carrier serves the flow, by this host's policy: it is plain TCP.
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Both directions have ended in order: the peer has everything, and so has the local application.
    pub fn is_complete(&self) -> bool {
        self.send.is_complete() && self.receive.is_complete()
    }
}
