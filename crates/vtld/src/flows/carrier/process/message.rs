//! Messages between vtld and a process of carriers, which share one binary: set-up over one socket, and each carrier's
//! bytes over a socket of its own, which is closed when the carrier ends.

use std::{cell::RefCell, io};

use bytes::{Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use tokio::{net::UnixStream, task::coop::consume_budget};
use vtl_proto::{carrier::Kind, frame::HEADER};

use super::{
    super::{
        Expected,
        library::{Certificate, Opening},
    },
    wire::{Tag, take},
};

/// A set-up message from vtld to a process of carriers: CBOR, with one descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Setup {
    /// The first message: starts a kind. Descriptor: its UDP socket.
    Start {
        kind: Kind,
        certificate: Option<Certificate>,
        /// Upper bound of a carrier's receive window, bytes.
        max_ahead: u64,
    },
    /// Opens a carrier. Descriptor: its socket.
    Open(Opening),
    /// Permits a peer to open a carrier. Descriptor: its socket, which carries nothing but its end until then.
    Expect(Expected),
    /// Makes layers over a carrier of vtld's. Descriptor: their socket.
    Layers {
        /// As [`vtl_core::layers::Description`].
        layers: String,
        /// Maximum length of a packet at the bottom, bytes.
        mtu: usize,
    },
}

/// Maximum size of a set-up message, bytes.
pub(super) const SETUP: usize = 8 << 10;

/// Size of a read buffer, and the free space below which a new one is allocated, bytes.
const READ: usize = 64 << 10;
const LEFT: usize = 4 << 10;

/// One end of a carrier's socket.
pub(super) struct Channel {
    socket: UnixStream,
    unread: RefCell<BytesMut>,
}

impl Channel {
    /// Creates a channel: this process's end, and the other one to be passed on.
    pub(super) fn pair() -> io::Result<(Self, std::os::unix::net::UnixStream)> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        theirs.set_nonblocking(true)?;
        ours.set_nonblocking(true)?;
        Ok((Self::new(ours)?, theirs))
    }

    /// Wraps a non-blocking socket.
    pub(super) fn new(socket: std::os::unix::net::UnixStream) -> io::Result<Self> {
        Ok(Self {
            socket: UnixStream::from_std(socket)?,
            unread: RefCell::default(),
        })
    }

    /// Waits for the process's answer to a set-up. Returns the maximum size of a frame, which is at most `longest`, bytes.
    ///
    /// # Errors
    /// The process refuses, or breaks the protocol.
    pub(super) async fn opened(&self, longest: usize) -> io::Result<usize> {
        let frame = match self.next().await? {
            (Tag::Opened, body) => body.first_chunk().map(|frame| u32::from_le_bytes(*frame)),
            (Tag::Refused, body) => {
                return Err(io::Error::other(
                    String::from_utf8_lossy(&body).into_owned(),
                ));
            }
            _ => None,
        };
        let frame = frame.map(|frame| frame as usize);
        let frame = frame.filter(|frame| (HEADER + 1..=longest).contains(frame));
        Ok(frame.ok_or(io::ErrorKind::InvalidData)?)
    }

    /// The next message, if it has been read already.
    pub(super) fn buffered(&self) -> io::Result<Option<(Tag, Bytes)>> {
        take(&mut self.unread.borrow_mut())
    }

    /// Waits for the next message. Cancellation safe.
    ///
    /// # Errors
    /// Also at the end of the stream (`UnexpectedEof`).
    pub(super) async fn next(&self) -> io::Result<(Tag, Bytes)> {
        loop {
            // Yield to other tasks, however much there is to read.
            consume_budget().await;
            if let Some(message) = take(&mut self.unread.borrow_mut())? {
                return Ok(message);
            }
            if self.unread.borrow().is_empty() {
                self.unread.take();
            }
            self.socket.readable().await?;
            let mut unread = self.unread.borrow_mut();
            if unread.capacity() - unread.len() < LEFT {
                unread.reserve(READ);
            }
            match self.socket.try_read_buf(&mut *unread) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
    }

    /// Writes messages.
    pub(super) async fn write(&self, mut messages: &[u8]) -> io::Result<()> {
        while !messages.is_empty() {
            self.socket.writable().await?;
            match self.socket.try_write(messages) {
                Ok(n) => messages = &messages[n..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::wire::{MAX_MESSAGE, emit},
        *,
    };

    #[tokio::test]
    async fn channel__messages_come_whole_and_the_end_behind_them() {
        let (here, there) = Channel::pair().unwrap();
        let there = Channel::new(there).unwrap();
        let mut messages = BytesMut::new();
        let long = vec![7; MAX_MESSAGE];
        emit(&mut messages, Tag::Control, b"");
        emit(&mut messages, Tag::Chunk, &long);
        emit(&mut messages, Tag::Figures, b"end");
        let write = async {
            for part in messages.chunks(9_999) {
                here.write(part).await.unwrap();
            }
            drop(here);
        };
        let read = async {
            assert_eq!(there.next().await.unwrap(), (Tag::Control, Bytes::new()));
            assert_eq!(there.next().await.unwrap(), (Tag::Chunk, long.into()));
            assert_eq!(there.next().await.unwrap(), (Tag::Figures, "end".into()));
            let end = there.next().await.unwrap_err();
            assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        };
        tokio::join!(write, read);
    }
}
