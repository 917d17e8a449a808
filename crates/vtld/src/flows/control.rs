//! The control connection: a TCP connection between the two daemons that carries frames inside TLS. Flow bytes only of
//! flows that require encryption and have no other carrier. The server speaks first: if a middlebox has redirected
//! the connection to an application, the application receives nothing.

use std::{
    cell::{Cell, RefCell},
    io::{self, Read, Write},
    net::TcpStream,
    rc::Rc,
};

use bytes::{Buf, Bytes, BytesMut};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Mutex,
};
use vtl_control::CarrierPath;
use vtl_core::flow::Chunk;
use vtl_pool::key::PublicKey;
use vtl_proto::{
    carrier::Kind,
    frame::{self, CarrierId, FlowId, Frame, FrameError},
};

use super::{
    carrier::{Carrier, Refused, Taking},
    socket,
};
use crate::{broker::set_linger, identity::tls, option};

/// Maximum size of a read, bytes.
const READ: usize = 16 << 10;

/// Maximum size of a chunk, bytes.
const CHUNK: usize = 8 << 10;
/// Unsent bytes in the socket buffer (`TCP_NOTSENT_LOWAT`): bounds the delay of control frames behind chunks.
const UNSENT: libc::c_int = 128 << 10;

/// First byte of a TLS handshake record (RFC 8446, section 5.1): no frame begins with it, as carriers' numbers are
/// small.
const TLS_HANDSHAKE: u8 = 22;

/// This end of a control connection.
pub(super) struct Control {
    socket: AsyncFd<TcpStream>,
    /// Serialises the frames.
    writing: Mutex<()>,
    /// Serialises chunks before that, so that control frames wait for one chunk at most.
    chunks: Mutex<()>,
    /// The rest of a partially written batch.
    unsent: RefCell<Bytes>,
    unread: RefCell<Frames>,
    /// TLS, once it has begun.
    tls: RefCell<Option<rustls::Connection>>,
    /// Handed over: another daemon closes the socket.
    is_left: Cell<bool>,
}

impl Control {
    /// Wraps a non-blocking connection.
    pub(super) fn new(socket: TcpStream) -> io::Result<Rc<Self>> {
        option::keep_asking(&socket);
        option::set(&socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, UNSENT)?;
        Ok(Rc::new(Self {
            socket: socket::watch(socket)?,
            writing: Mutex::new(()),
            chunks: Mutex::new(()),
            unsent: RefCell::default(),
            unread: RefCell::default(),
            tls: RefCell::default(),
            is_left: Cell::new(false),
        }))
    }

    /// Hands the socket over to another daemon: no more reads, no close.
    pub(super) fn leave(&self) {
        self.is_left.set(true);
    }

    /// Waits for the first byte; whether the client begins with a TLS handshake rather than a frame.
    pub(super) async fn is_tls(&self) -> io::Result<bool> {
        loop {
            if let Some(first) = self.unread.borrow().0.first() {
                return Ok(*first == TLS_HANDSHAKE);
            }
            self.read().await?;
        }
    }

    /// Whether TLS is in use.
    pub(super) fn has_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// Whether both sides exchange certificates first.
    pub(super) fn certifies(&self) -> bool {
        self.tls.borrow().as_ref().is_some_and(tls::certifies)
    }

    /// Runs the TLS handshake. Returns the peer's public key.
    pub(super) async fn secure(&self, tls: rustls::Connection) -> io::Result<PublicKey> {
        let _whole = self.writing.lock().await;
        self.tls.replace(Some(tls));
        let early = self.unread.take().0;
        self.take_in(&early)?;
        loop {
            let (records, is_done) = match &mut *self.tls.borrow_mut() {
                Some(tls) => (records(tls)?, !tls.is_handshaking()),
                None => return Err(io::ErrorKind::InvalidInput.into()),
            };
            self.unsent.replace(records);
            self.flush().await?;
            if is_done {
                let tls = self.tls.borrow();
                let shown = tls.as_ref().and_then(tls::shown);
                return shown.ok_or_else(|| io::ErrorKind::PermissionDenied.into());
            }
            self.read().await?;
        }
    }

    /// Writes `unsent` to the socket.
    async fn flush(&self) -> io::Result<()> {
        while !self.unsent.borrow().is_empty() {
            let write = |mut socket: &TcpStream| socket.write(&self.unsent.borrow());
            let written = self.socket.async_io(Interest::WRITABLE, write).await?;
            self.unsent.borrow_mut().advance(written);
        }
        Ok(())
    }

    pub(super) fn tcp(&self) -> &TcpStream {
        self.socket.get_ref()
    }

    /// Completes when the connect has succeeded or failed.
    pub(super) async fn connected(&self) -> io::Result<()> {
        socket::connected(&self.socket).await
    }

    /// Sends one frame.
    pub(super) async fn say(&self, frame: Frame<'_>) -> Result<(), Refused> {
        self.control(emit(frame)).await
    }

    /// Waits for the next frame, and passes it to `each`.
    pub(super) async fn next<T>(&self, each: impl FnOnce(Frame<'_>) -> T) -> io::Result<T> {
        let invalid = |error: FrameError| io::Error::new(io::ErrorKind::InvalidData, error);
        loop {
            let has_one = self.unread.borrow().has_one();
            if has_one.map_err(invalid)? {
                return self.unread.borrow_mut().take(each).map_err(invalid);
            }
            self.read().await?;
        }
    }

    /// Reads once from the socket into `unread`.
    ///
    /// # Errors
    /// Also at the end of the stream (`UnexpectedEof`).
    async fn read(&self) -> io::Result<()> {
        let read = |mut socket: &TcpStream| {
            if self.is_left.get() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let mut bytes = [0; READ];
            let n = socket.read(&mut bytes)?;
            Ok(BytesMut::from(&bytes[..n]))
        };
        let bytes = self.socket.async_io(Interest::READABLE, read).await?;
        match bytes.is_empty() {
            true => Err(io::ErrorKind::UnexpectedEof.into()),
            false => self.take_in(&bytes),
        }
    }

    fn take_in(&self, mut bytes: &[u8]) -> io::Result<()> {
        let mut unread = self.unread.borrow_mut();
        let mut tls = self.tls.borrow_mut();
        let Some(tls) = &mut *tls else {
            unread.push(bytes);
            return Ok(());
        };
        while !bytes.is_empty() {
            tls.read_tls(&mut bytes)?;
            let state = tls.process_new_packets();
            let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            let mut plain = vec![0; state.plaintext_bytes_to_read()];
            tls.reader().read_exact(&mut plain)?;
            unread.push(&plain);
            if state.peer_has_closed() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// Encrypts frames, if TLS is in use.
    fn seal(&self, frames: Bytes) -> io::Result<Bytes> {
        match &mut *self.tls.borrow_mut() {
            Some(tls) => {
                tls.writer().write_all(&frames)?;
                records(tls)
            }
            None => Ok(frames),
        }
    }
}

/// TLS records that are ready to be sent.
fn records(tls: &mut rustls::Connection) -> io::Result<Bytes> {
    let mut records = Vec::new();
    while tls.wants_write() {
        tls.write_tls(&mut records)?;
    }
    Ok(records.into())
}

impl Carrier for Control {
    fn kind(&self) -> Option<Kind> {
        None
    }

    fn control(&self, frames: Bytes) -> Taking<'_> {
        Box::pin(async move {
            let _whole = self.writing.lock().await;
            // First the rest of a batch whose sender was cancelled.
            self.flush().await.map_err(|_| Refused::Broken)?;
            let sealed = self.seal(frames).map_err(|_| Refused::Broken)?;
            self.unsent.replace(sealed);
            self.flush().await.map_err(|_| Refused::Broken)
        })
    }

    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_> {
        Box::pin(async move {
            if !self.has_tls() {
                return Err(Refused::Full);
            }
            for frame in cut(flow, &chunk, CHUNK) {
                // One at a time, so that control frames wait for one chunk at most.
                let _turn = self.chunks.lock().await;
                self.say(frame).await?;
            }
            Ok(())
        })
    }

    fn is_encrypted(&self) -> bool {
        self.has_tls()
    }

    fn forget(&self, _flow: FlowId) {}

    fn close(&self) {
        if self.is_left.get() {
            return;
        }
        set_linger(self.socket.get_ref(), false);
        let _ = crate::hooker::shut_down(self.socket.get_ref(), std::net::Shutdown::Both);
    }

    fn path(&self) -> Option<CarrierPath> {
        None
    }
}

/// Reassembles frames from a byte stream.
#[derive(Default)]
pub(super) struct Frames(BytesMut);

impl Frames {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Whether a complete frame is buffered.
    ///
    /// # Errors
    /// Protocol violation.
    pub(super) fn has_one(&self) -> Result<bool, FrameError> {
        match Frame::take(&mut &self.0[..]) {
            Ok(_) => Ok(true),
            Err(FrameError::Truncated) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the first frame, and passes it to `each`.
    ///
    /// # Errors
    /// No complete frame, or protocol violation.
    pub(super) fn take<T>(&mut self, each: impl FnOnce(Frame<'_>) -> T) -> Result<T, FrameError> {
        let mut rest = &self.0[..];
        let result = each(Frame::take(&mut rest)?);
        let used = self.0.len() - rest.len();
        self.0.advance(used);
        Ok(result)
    }
}

/// Encodes a frame.
pub(super) fn emit(frame: Frame<'_>) -> Bytes {
    let mut bytes = BytesMut::zeroed(frame.wire_len());
    frame.emit(&mut bytes);
    bytes.freeze()
}

/// Splits a chunk into frames with at most `max` bytes of payload.
pub(super) fn cut(flow: FlowId, chunk: &Chunk, max: usize) -> impl Iterator<Item = Frame<'_>> {
    let last = chunk.bytes.len().div_ceil(max);
    let parts = chunk.bytes.chunks(max).enumerate();
    parts.map(move |(i, bytes)| Frame::Chunk {
        flow,
        offset: chunk.offset + (i * max) as u64,
        bytes,
        fin: false,
        urgent: chunk.urgent && i + 1 == last,
    })
}

/// The first frame on a carrier, HELLO. `layers`: there are layers over it.
pub(super) fn hello(carrier: CarrierId, tag: u32, path: u8, layers: bool) -> Frame<'static> {
    Frame::Hello {
        carrier,
        tag,
        tls: false,
        path,
        gateways: true,
        layers,
    }
}

/// Frames other than chunks fit into one read.
const _: () = assert!(frame::MAX_SETUP < READ);
