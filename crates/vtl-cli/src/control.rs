//! The control protocol: one JSON message each way over a Unix SOCK_SEQPACKET socket.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, socket,
};
use serde_json::Value;

/// The longest answer.
const LONGEST: usize = 1024 * 1024;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The daemon is not there, or broke off.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The daemon refused, in its own words.
    #[error("{0}")]
    Refused(String),
}

/// A connection to the daemon.
#[derive(Debug)]
pub(crate) struct Client(OwnedFd);

impl Client {
    /// Connects to the daemon at `path`.
    pub(crate) fn connect(path: &Path) -> Result<Self, Error> {
        let fd = socket(
            AddressFamily::Unix,
            SockType::SeqPacket,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .map_err(io::Error::from)?;
        let address = UnixAddr::new(path).map_err(io::Error::from)?;
        connect(fd.as_raw_fd(), &address).map_err(io::Error::from)?;
        Ok(Self(fd))
    }

    /// Sends a request and waits for its answer.
    pub(crate) fn call(&mut self, request: &Value) -> Result<Value, Error> {
        let text = serde_json::to_vec(request).map_err(io::Error::from)?;
        send(self.0.as_raw_fd(), &text, MsgFlags::MSG_NOSIGNAL).map_err(io::Error::from)?;
        let mut buffer = vec![0; LONGEST];
        let n =
            recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()).map_err(io::Error::from)?;
        if n == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let answer: Value = serde_json::from_slice(&buffer[..n]).map_err(io::Error::from)?;
        if answer["ok"] == Value::Bool(true) {
            return Ok(answer);
        }
        let words = answer["error"]
            .as_str()
            .unwrap_or("vtld refused without a reason");
        Err(Error::Refused(words.to_owned()))
    }
}
