//! The control connection: a TCP connection between the two daemons that carries frames inside TLS; flows' bytes
//! only of those that require encryption, where they have no other carrier. The host that was connected to speaks
//! first: if something between the hosts has led the connection to an application, the application hears nothing.

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

/// Bytes read at a time.
const READ: usize = 16 << 10;

/// Bytes of a chunk.
const CHUNK: usize = 8 << 10;
/// Those that wait in the kernel: what is said about flows shall not wait behind seconds of their bytes.
const UNSENT: libc::c_int = 128 << 10;

/// The first byte of a TLS record that has a handshake (RFC 8446, section 5.1): no frame begins so, as carriers'
/// numbers are small.
const TLS_HANDSHAKE: u8 = 22;

/// This end of a control connection.
pub(super) struct Control {
    socket: AsyncFd<TcpStream>,
    /// Frames go one behind the other.
    writing: Mutex<()>,
    /// Flows' bytes take turns first.
    chunks: Mutex<()>,
    /// The rest of those that have begun to leave.
    unsent: RefCell<Bytes>,
    unread: RefCell<Frames>,
    /// Once it is used.
    tls: RefCell<Option<rustls::Connection>>,
    /// Another daemon closes it.
    is_left: Cell<bool>,
}

impl Control {
    /// Of a connection that does not block.
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

    /// Leaves its end to another daemon, and reads no more.
    pub(super) fn leave(&self) {
        self.is_left.set(true);
    }

    /// Whether the other side begins TLS, rather than with a frame.
    pub(super) async fn is_tls(&self) -> io::Result<bool> {
        loop {
            if let Some(first) = self.unread.borrow().0.first() {
                return Ok(*first == TLS_HANDSHAKE);
            }
            self.read().await?;
        }
    }

    /// Whether it goes on inside TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.tls.borrow().is_some()
    }

    /// Whether both sides show certificates first.
    pub(super) fn certifies(&self) -> bool {
        self.tls.borrow().as_ref().is_some_and(tls::certifies)
    }

    /// Goes on inside TLS. The key that the other side has shown.
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

    /// Writes what is unsent.
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

    /// Waits for the outcome of its connect.
    pub(super) async fn connected(&self) -> io::Result<()> {
        socket::connected(&self.socket).await
    }

    /// Sends one frame.
    pub(super) async fn say(&self, frame: Frame<'_>) -> Result<(), Refused> {
        self.control(emit(frame)).await
    }

    /// The next frame, given to `each`.
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

    /// Waits for bytes, and takes them.
    ///
    /// # Errors
    /// The end, too.
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

    /// Frames as they go over the connection.
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

/// What TLS has to send.
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
            // The rest of what somebody has given up waiting for, first.
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
                // One at a time, so that what is said about flows waits behind one.
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
        let _ = self.socket.get_ref().shutdown(std::net::Shutdown::Both);
    }

    fn path(&self) -> Option<CarrierPath> {
        None
    }
}

/// Frames as they arrive, however they are cut.
#[derive(Default)]
pub(super) struct Frames(BytesMut);

impl Frames {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Whether a whole frame is there.
    ///
    /// # Errors
    /// It violates the protocol.
    pub(super) fn has_one(&self) -> Result<bool, FrameError> {
        match Frame::take(&mut &self.0[..]) {
            Ok(_) => Ok(true),
            Err(FrameError::Truncated) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Gives the first frame to `each`, and takes it off.
    ///
    /// # Errors
    /// There is none, or it violates the protocol.
    pub(super) fn take<T>(&mut self, each: impl FnOnce(Frame<'_>) -> T) -> Result<T, FrameError> {
        let mut rest = &self.0[..];
        let result = each(Frame::take(&mut rest)?);
        let used = self.0.len() - rest.len();
        self.0.advance(used);
        Ok(result)
    }
}

/// A frame's bytes.
pub(super) fn emit(frame: Frame<'_>) -> Bytes {
    let mut bytes = BytesMut::zeroed(frame.wire_len());
    frame.emit(&mut bytes);
    bytes.freeze()
}

/// A chunk as frames of at most so many bytes.
pub(super) fn cut(flow: FlowId, chunk: &Chunk, most: usize) -> impl Iterator<Item = Frame<'_>> {
    let last = chunk.bytes.len().div_ceil(most);
    let parts = chunk.bytes.chunks(most).enumerate();
    parts.map(move |(i, bytes)| Frame::Chunk {
        flow,
        offset: chunk.offset + (i * most) as u64,
        bytes,
        fin: false,
        urgent: chunk.urgent && i + 1 == last,
    })
}

/// What a host says first by a carrier.
pub(super) fn hello(carrier: CarrierId, tag: u32) -> Frame<'static> {
    Frame::Hello {
        carrier,
        tag,
        tls: false,
    }
}

/// The longest frame is a chunk.
const _: () = assert!(frame::MAX_SETUP < READ);
