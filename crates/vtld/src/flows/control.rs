//! The control connection: a TCP connection between the two daemons that carries frames, but no flows'
//! bytes. The host that was connected to speaks first: if something between the hosts has led the connection
//! to an application, the application hears nothing.

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
use vtl_proto::{
    carrier::Kind,
    frame::{self, CarrierId, FlowId, Frame, FrameError},
};

use super::{
    carrier::{Carrier, Refused, Taking},
    socket,
};
use crate::{broker::set_linger, option};

/// Bytes read at a time.
const READ: usize = 16 << 10;

/// This end of a control connection.
pub(super) struct Control {
    socket: AsyncFd<TcpStream>,
    /// Frames go one behind the other.
    writing: Mutex<()>,
    /// The rest of those that have begun to leave.
    unsent: RefCell<Bytes>,
    unread: RefCell<Frames>,
    /// It is another daemon's now.
    is_left: Cell<bool>,
}

impl Control {
    /// Of a connection that does not block.
    pub(super) fn new(socket: TcpStream) -> io::Result<Rc<Self>> {
        Self::resume(socket, &[], Bytes::new())
    }

    /// The same, as [`Control::leave`] has left it.
    pub(super) fn resume(socket: TcpStream, unread: &[u8], unsent: Bytes) -> io::Result<Rc<Self>> {
        option::keep_asking(&socket);
        Ok(Rc::new(Self {
            socket: socket::watch(socket)?,
            writing: Mutex::new(()),
            unsent: RefCell::new(unsent),
            unread: RefCell::new(Frames(unread.into())),
            is_left: Cell::new(false),
        }))
    }

    /// Leaves it to another daemon: neither reads nor writes any more. The beginning of a frame that has come,
    /// and the rest of one that has begun to leave.
    pub(super) fn leave(&self) -> (Bytes, Bytes) {
        self.is_left.set(true);
        let unread = self.unread.borrow().0.clone();
        (unread.freeze(), self.unsent.take())
    }

    fn check(&self) -> io::Result<()> {
        match self.is_left.get() {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => Ok(()),
        }
    }

    /// Writes what is unsent.
    async fn flush(&self) -> io::Result<()> {
        while !self.unsent.borrow().is_empty() {
            let write = |mut socket: &TcpStream| {
                self.check()?;
                socket.write(&self.unsent.borrow())
            };
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
            let read = |mut socket: &TcpStream| {
                self.check()?;
                let mut bytes = [0; READ];
                let n = socket.read(&mut bytes)?;
                self.unread.borrow_mut().push(&bytes[..n]);
                Ok(n)
            };
            if self.socket.async_io(Interest::READABLE, read).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

impl Carrier for Control {
    fn kind(&self) -> Option<Kind> {
        None
    }

    fn control(&self, frames: Bytes) -> Taking<'_> {
        Box::pin(async move {
            let _whole = self.writing.lock().await;
            // What a former daemon has begun, first.
            self.flush().await.map_err(|_| Refused::Broken)?;
            self.unsent.replace(frames);
            self.flush().await.map_err(|_| Refused::Broken)
        })
    }

    fn chunk(&self, _flow: FlowId, _chunk: Chunk) -> Taking<'_> {
        Box::pin(async { Err(Refused::Full) })
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

/// What a host says first by a carrier.
pub(super) fn hello(carrier: CarrierId, tag: u32) -> Frame<'static> {
    Frame::Hello { carrier, tag }
}

/// The longest frame is a chunk.
const _: () = assert!(frame::MAX_SETUP < READ);
