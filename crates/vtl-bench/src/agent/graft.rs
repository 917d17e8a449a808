//! A VTL session, as an aware application uses it.

use std::io;
use std::net::SocketAddr;
use std::path::Path;

use vtl::{Listener, Mode, Socket};

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

    /// The next one that a peer opens.
    pub(super) fn accept(listener: &mut Listener) -> io::Result<Self> {
        Ok(Self(listener.accept()?))
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
