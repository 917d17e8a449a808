//! A VTL session, as an aware application uses it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use vtl::{Mode, Socket};

use super::conn::Conn;

/// Packets read at a time.
const PACKETS: u64 = 256;

/// A session.
pub(super) struct Session(Socket);

impl Session {
    /// Opens one, over the graft of this name or not at all.
    pub(super) fn connect(to: SocketAddr, daemon: &Path, graft: &str) -> io::Result<Self> {
        let mut socket = Socket::init(Mode::Initiator, to, daemon)?;
        socket.negotiate_over(graft, &[])?;
        Ok(Self(socket))
    }

    /// Will accept one at a port.
    pub(super) fn listen(at: SocketAddr, daemon: &Path) -> io::Result<Self> {
        Ok(Self(Socket::init(Mode::Responder, at, daemon)?))
    }

    /// Waits for the peer.
    pub(super) fn accept(&mut self) -> io::Result<()> {
        self.0.validate()?;
        Ok(())
    }
}

impl Conn for Session {
    async fn send(&mut self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let n = self.0.send_data(data)?;
            data = &data[n..];
        }
        Ok(())
    }

    async fn receive(&mut self, mut take: impl FnMut(&[u8])) -> io::Result<usize> {
        let mut bytes = 0;
        self.0.recv_in_place(PACKETS, |packet| {
            bytes += packet.len();
            take(packet);
        })?;
        Ok(bytes)
    }
}
