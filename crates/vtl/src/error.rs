//! Errors of operations.

use std::{io, net::IpAddr};

use vtl_control as control;
use vtl_proto::services::Contradiction;

/// Error of an operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The daemon refused, or cannot be reached.
    #[error(transparent)]
    Daemon(#[from] control::Error),
    /// The requirements contradict each other.
    #[error(transparent)]
    Contradiction(#[from] Contradiction),
    /// The session broke: the peer does not answer, or gave up. Data may be lost.
    #[error("the session with {0} broke: what was sent last may not have arrived")]
    Broken(IpAddr),
    /// The peer closed the session and reads no more.
    #[error("{0} has closed the session")]
    ClosedByPeer(IpAddr),
    /// The peer closed the session in the middle of a message.
    #[error("{0} has closed the session in the middle of a message")]
    Cut(IpAddr),
    /// A packet failed authentication: it is not as the peer sealed it. Nothing after it is read,
    /// and the session is unusable.
    #[error("authentication of a packet from {0} failed: it was altered on the path")]
    Forged(IpAddr),
    /// The operation does not fit the socket's mode, or comes too early.
    #[error("{0}")]
    Misuse(&'static str),
    /// The socket has been closed.
    #[error("the socket has been closed")]
    Closed,
    /// The socket's time limit has passed. Nothing is lost: the operation may be retried; a message
    /// of several packets must be, with the same message.
    #[error("the time limit has passed")]
    TimedOut,
    /// A message is empty, or longer than the session takes.
    #[error("a message has 1 to {max} bytes in this session, not {len}")]
    MessageSize {
        /// Length of the message, bytes.
        len: usize,
        /// Maximum: [`crate::Socket::max_message`], bytes.
        max: usize,
    },
    /// The next message does not fit into the buffer; it stays for a larger one.
    #[error("the next message does not fit into the buffer: {0} bytes of it are here")]
    BufferTooSmall(usize),
    /// A system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// Keeps the system's error code where there is one, else maps to the nearest kind.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        let kind = match error {
            Error::System(error) => return error,
            Error::Daemon(control::Error::System(code)) => return code.into(),
            Error::Daemon(control::Error::Unreachable { cause, .. }) => Self::from(cause).kind(),
            Error::Daemon(control::Error::Denied(_) | control::Error::Forbidden(_)) => {
                io::ErrorKind::PermissionDenied
            }
            Error::Daemon(control::Error::Malformed(_)) | Error::Forged(_) => {
                io::ErrorKind::InvalidData
            }
            Error::Broken(_) | Error::Cut(_) | Error::Daemon(control::Error::Closed) => {
                io::ErrorKind::ConnectionAborted
            }
            Error::ClosedByPeer(_) => io::ErrorKind::BrokenPipe,
            Error::Misuse(_)
            | Error::Contradiction(_)
            | Error::MessageSize { .. }
            | Error::BufferTooSmall(_) => io::ErrorKind::InvalidInput,
            Error::TimedOut | Error::Daemon(control::Error::Silent(_)) => io::ErrorKind::TimedOut,
            Error::Closed => io::ErrorKind::NotConnected,
            Error::Daemon(control::Error::Protocol(_) | control::Error::TooOld) => {
                io::ErrorKind::Unsupported
            }
            Error::Daemon(control::Error::Refused(_)) => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn io_error__keeps_the_systems_code() {
        let full = || io::Error::from_raw_os_error(libc::ENOSPC);
        let system = io::Error::from(Error::System(full()));
        assert_eq!(system.raw_os_error(), Some(libc::ENOSPC));
        let daemon = io::Error::from(Error::Daemon(Errno::EMFILE.into()));
        assert_eq!(daemon.raw_os_error(), Some(libc::EMFILE));
    }

    #[test]
    fn io_error__says_what_this_user_may_not_do() {
        for error in [
            control::Error::Denied("/run/vtl/vtld.sock".into()),
            control::Error::Forbidden("not you".into()),
            control::Error::Unreachable {
                path: "/run/vtl/vtld.sock".into(),
                cause: Errno::EACCES,
            },
        ] {
            let words = error.to_string();
            let io = io::Error::from(Error::Daemon(error));
            assert_eq!(io.kind(), io::ErrorKind::PermissionDenied);
            assert_eq!(io.to_string(), words);
        }
    }
}
