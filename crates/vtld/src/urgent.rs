//! TCP's urgent byte (RFC 6093), preserved by both ways of carrying a connection.
//!
//! vtld's sockets receive it in line (SO_OOBINLINE): it keeps its place among the others, reads stop before it,
//! and the kernel reports that it is next.

use std::{io, net::TcpStream, os::fd::AsRawFd};

use nix::{
    libc::c_int,
    sys::socket::{self, MsgFlags},
};

/// `linux/sockios.h`, which libc does not have.
const SIOCATMARK: c_int = 0x8905;

nix::ioctl_read_bad!(at_mark, SIOCATMARK, c_int);
nix::ioctl_read_bad!(unread, nix::libc::FIONREAD, c_int);

/// What a read of a socket returns next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// At least this many bytes, the next of which is not urgent. A read stops before an urgent byte, also
    /// before one that arrives in the meantime.
    Bytes(usize),
    /// The urgent byte; read it alone, since a longer read would continue behind it.
    Urgent,
    /// End of stream.
    End,
}

/// Peeks at a socket; errors are those of a read, such as `WouldBlock`.
pub(crate) fn ahead(socket: &TcpStream) -> io::Result<Ahead> {
    // In this order: only of a byte that has arrived it is certain whether it is urgent. FIONREAD is cheaper
    // than a peek.
    let mut count = waiting(socket);
    if count == 0 {
        count = socket.peek(&mut [0])?;
    }
    Ok(match count {
        0 => Ahead::End,
        _ if is_next(socket) => Ahead::Urgent,
        count => Ahead::Bytes(count),
    })
}

/// Number of unread bytes.
fn waiting(socket: &TcpStream) -> usize {
    let mut count = 0;
    // SAFETY: the call writes one integer to where the pointer points. Of a socket that fails, reading says more.
    match unsafe { unread(socket.as_raw_fd(), &raw mut count) } {
        Ok(_) => usize::try_from(count).unwrap_or(0),
        Err(_) => 0,
    }
}

/// Whether the urgent byte is next. Uncertain while no byte has arrived.
pub(crate) fn is_next(socket: &TcpStream) -> bool {
    let mut answer = 0;
    // SAFETY: the call writes one integer to where the pointer points. A socket that fails has no
    // such byte.
    unsafe { at_mark(socket.as_raw_fd(), &raw mut answer) }.is_ok() && answer != 0
}

/// Writes the urgent byte; returns 1. Alone: in a longer, partial write the mark would be too early.
pub(crate) fn send(socket: &TcpStream, byte: u8) -> io::Result<usize> {
    let flags = MsgFlags::MSG_OOB | MsgFlags::MSG_NOSIGNAL;
    Ok(socket::send(socket.as_raw_fd(), &[byte], flags)?)
}
