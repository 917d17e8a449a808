//! One flow's stream of a tunnel.

use std::{
    cell::RefCell,
    future::{Future, poll_fn},
    io::{self, Read, Write},
    net::TcpStream,
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use bytes::{Buf, Bytes};
use tokio::io::{Interest, unix::AsyncFd};
use vtl_proto::mux::ResetCode;

use super::{
    records,
    sctp::{SctpReceiver, SctpSender},
    wire,
};

/// Bytes read at a time.
const READ: usize = 64 << 10;

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

/// The way to the peer. Dropping it before its end resets it.
pub(super) enum Sender {
    Sctp(SctpSender),
    Socket(Socket),
}

/// A kernel's socket, which is a flow's alone. Whatever closes it, also the death of a daemon, may
/// look like an end to the peer: so the true one is a record of its own.
#[derive(Clone)]
pub(super) struct Socket(Rc<AsyncFd<TcpStream>>);

impl Socket {
    /// Of one that does not block and may still be connecting.
    pub(super) fn new(socket: TcpStream) -> io::Result<Self> {
        Ok(Self(Rc::new(wire::watch(socket)?)))
    }

    /// Waits until it is connected.
    pub(super) async fn connected(&self) -> io::Result<()> {
        wire::connected(&self.0).await
    }

    async fn write(&self, mut bytes: Bytes) -> Result<(), Broken> {
        while !bytes.is_empty() {
            let write = |mut socket: &TcpStream| socket.write(&bytes);
            let n = self.0.async_io(Interest::WRITABLE, write).await;
            bytes.advance(n.map_err(|_| RESET)?);
        }
        Ok(())
    }

    async fn read(&self) -> Result<Option<Bytes>, Broken> {
        let read = |mut socket: &TcpStream| {
            SCRATCH.with_borrow_mut(|scratch| {
                let n = socket.read(scratch)?;
                Ok(Bytes::copy_from_slice(&scratch[..n]))
            })
        };
        let read = self.0.async_io(Interest::READABLE, read).await;
        Ok(Some(read.map_err(|_| RESET)?).filter(|bytes| !bytes.is_empty()))
    }

    async fn broken(self) -> Broken {
        wire::broken(&self.0).await;
        RESET
    }
}

const RESET: Broken = Broken::Reset(ResetCode::Rst);

thread_local! {
    /// One for all flows: an idle one shall have no buffer.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; READ]);
}

impl Sender {
    /// Waits until the stream has taken all of it.
    pub(super) async fn write(&mut self, bytes: Bytes) -> Result<(), Broken> {
        match self {
            Self::Sctp(sctp) => sctp.write(bytes).await,
            Self::Socket(socket) => socket.write(bytes).await,
        }
    }

    /// The true end, behind everything written.
    pub(super) async fn finish(&mut self) -> Result<(), Broken> {
        match self {
            Self::Sctp(sctp) => sctp.finish(),
            Self::Socket(socket) => {
                // Closing comes when both directions have ended, or else is a reset.
                socket.write(Bytes::from_static(&records::END)).await?;
            }
        }
        Ok(())
    }

    pub(super) fn reset(&mut self, code: ResetCode) {
        match self {
            Self::Sctp(sctp) => sctp.reset(code),
            Self::Socket(_) => {}
        }
    }

    /// Completes when the peer wants nothing more of it, or the tunnel ends; not when it has
    /// received everything.
    pub(super) fn stopped(&self) -> Pin<Box<dyn Future<Output = Broken>>> {
        match self {
            Self::Sctp(sctp) => Box::pin(sctp.broken()),
            Self::Socket(socket) => Box::pin(socket.clone().broken()),
        }
    }

    /// Completes when the peer resets the flow behind the true end of what it sends, where that is
    /// seen only by reading on; for who has read that end.
    pub(super) fn gone(&self) -> Pin<Box<dyn Future<Output = Broken>>> {
        match self {
            Self::Sctp(_) => Box::pin(std::future::pending()),
            Self::Socket(socket) => {
                let socket = socket.clone();
                Box::pin(async move { socket.read().await.err().unwrap_or(RESET) })
            }
        }
    }
}

/// The way from the peer. Dropping it before its end stops the peer.
pub(super) struct Receiver {
    source: Source,
    /// What was read and not used.
    back: Bytes,
}

enum Source {
    Sctp(SctpReceiver),
    Socket(Socket),
}

impl Receiver {
    pub(super) fn sctp(stream: SctpReceiver) -> Self {
        Self {
            source: Source::Sctp(stream),
            back: Bytes::new(),
        }
    }

    pub(super) fn socket(socket: Socket) -> Self {
        Self {
            source: Source::Socket(socket),
            back: Bytes::new(),
        }
    }

    /// Whether the end of the stream is only true behind the record that says so.
    pub(super) fn ends_by_record(&self) -> bool {
        matches!(self.source, Source::Socket(_))
    }

    /// The next bytes; `None` at the end. Nothing is lost if it is dropped half-way.
    pub(super) async fn read(&mut self) -> Result<Option<Bytes>, Broken> {
        if !self.back.is_empty() {
            return Ok(Some(std::mem::take(&mut self.back)));
        }
        match &mut self.source {
            Source::Sctp(sctp) => sctp.read().await,
            Source::Socket(socket) => socket.read().await,
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

    /// So many bytes.
    pub(super) async fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), Broken> {
        let mut have = 0;
        while have < buffer.len() {
            let mut bytes = self.read().await?.ok_or(RESET)?;
            let take = bytes.split_to(bytes.len().min(buffer.len() - have));
            buffer[have..have + take.len()].copy_from_slice(&take);
            have += take.len();
            self.back = bytes;
        }
        Ok(())
    }

    pub(super) fn stop(&mut self, code: ResetCode) {
        match &mut self.source {
            Source::Sctp(sctp) => sctp.stop(code),
            Source::Socket(_) => {}
        }
    }
}
