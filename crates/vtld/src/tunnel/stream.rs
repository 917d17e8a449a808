//! One flow's stream of a tunnel.

use std::{
    collections::BTreeMap,
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
};

use bytes::Bytes;
use quinn::{ReadError, VarInt, WriteError};
use vtl_proto::mux::ResetCode;

/// Bytes read at a time.
const READ: usize = 64 << 10;
/// Bytes behind a gap that a stream may hold: many times what the fastest path has under way.
const MOST_AHEAD: usize = 64 << 20;

/// Why a stream moves nothing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    /// The peer has reset it.
    #[error("the peer reset it: {0:?}")]
    Reset(ResetCode),
    /// The tunnel has ended.
    #[error("the tunnel has ended")]
    Tunnel,
    /// The application's connection was reset.
    #[error("the application has reset it")]
    App,
    /// The peer breaks the rules.
    #[error("the peer breaks the rules")]
    Nonsense,
}

fn wire(code: ResetCode) -> VarInt {
    VarInt::from_u64(code.to_wire()).unwrap_or(VarInt::MAX)
}

fn reset_code(code: VarInt) -> Broken {
    Broken::Reset(ResetCode::from_wire(code.into()))
}

impl From<WriteError> for Broken {
    fn from(error: WriteError) -> Self {
        match error {
            WriteError::Stopped(code) => reset_code(code),
            _ => Self::Tunnel,
        }
    }
}

impl From<ReadError> for Broken {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Reset(code) => reset_code(code),
            _ => Self::Tunnel,
        }
    }
}

/// The way to the peer. Dropping it resets it, unless it was finished: quinn alone would make a
/// false end of it.
pub(super) struct Sender {
    stream: quinn::SendStream,
    ended: bool,
}

impl Sender {
    pub(super) fn new(stream: quinn::SendStream) -> Self {
        Self {
            stream,
            ended: false,
        }
    }

    /// Waits until the stream has taken all of it.
    pub(super) async fn write(&mut self, bytes: Bytes) -> Result<(), Broken> {
        Ok(self.stream.write_chunk(bytes).await?)
    }

    /// The true end, behind everything written.
    pub(super) fn finish(&mut self) {
        self.ended = true;
        // An error means that the peer has stopped it, which is seen elsewhere.
        let _ = self.stream.finish();
    }

    pub(super) fn reset(&mut self, code: ResetCode) {
        self.ended = true;
        let _ = self.stream.reset(wire(code));
    }

    /// Completes when the peer wants nothing more of it, or the tunnel ends; not when it has
    /// received everything.
    pub(super) fn stopped(&self) -> impl Future<Output = Broken> + 'static {
        let stopped = self.stream.stopped();
        async {
            match stopped.await {
                Ok(Some(code)) => reset_code(code),
                Ok(None) => std::future::pending().await,
                Err(_) => Broken::Tunnel,
            }
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.ended {
            self.reset(ResetCode::Rst);
        }
    }
}

/// The way from the peer. Dropping it before its end stops the peer.
///
/// Puts the stream in order itself: quinn gives a connection up ("too many gaps in stream buffer")
/// when more than 1,024 pieces wait for lost ones, which an overflowing queue brings about.
pub(super) struct Receiver {
    stream: quinn::RecvStream,
    /// The offset up to which everything has been handed over.
    next: u64,
    /// What has arrived behind a gap, by offset.
    ahead: BTreeMap<u64, Bytes>,
    ahead_bytes: usize,
}

impl Receiver {
    pub(super) fn new(stream: quinn::RecvStream) -> Self {
        Self {
            stream,
            next: 0,
            ahead: BTreeMap::new(),
            ahead_bytes: 0,
        }
    }

    /// The next bytes; `None` at the true end. Nothing is lost if it is dropped half-way.
    pub(super) async fn read(&mut self) -> Result<Option<Bytes>, Broken> {
        loop {
            if let Some(bytes) = self.ahead.remove(&self.next) {
                self.ahead_bytes -= bytes.len();
                self.next += bytes.len() as u64;
                return Ok(Some(bytes));
            }
            let Some(chunk) = self.stream.read_chunk(READ, false).await? else {
                return Ok(None);
            };
            // quinn hands no byte over twice.
            if chunk.offset == self.next {
                self.next += chunk.bytes.len() as u64;
                return Ok(Some(chunk.bytes));
            }
            self.ahead_bytes += chunk.bytes.len();
            self.ahead.insert(chunk.offset, chunk.bytes);
            if self.ahead_bytes > MOST_AHEAD {
                return Err(Broken::Nonsense);
            }
        }
    }

    /// The same, without waiting: `None` if nothing is there.
    pub(super) async fn read_now(&mut self) -> Option<Result<Option<Bytes>, Broken>> {
        poll_fn(|cx| match pin!(self.read()).poll(cx) {
            Poll::Ready(read) => Poll::Ready(Some(read)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    /// So many bytes; more of the stream may be read before it.
    pub(super) async fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), Broken> {
        let mut have = 0;
        while have < buffer.len() {
            let mut bytes = self.read().await?.ok_or(Broken::Nonsense)?;
            let take = bytes.split_to(bytes.len().min(buffer.len() - have));
            buffer[have..have + take.len()].copy_from_slice(&take);
            have += take.len();
            self.give_back(bytes);
        }
        Ok(())
    }

    /// Bytes that were read last, or their end, and not used.
    fn give_back(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.next -= bytes.len() as u64;
            self.ahead_bytes += bytes.len();
            self.ahead.insert(self.next, bytes);
        }
    }

    pub(super) fn stop(&mut self, code: ResetCode) {
        let _ = self.stream.stop(wire(code));
    }
}
