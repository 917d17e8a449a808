//! TCP's urgent byte (RFC 6093), which stays what it is in both ways of carrying a connection.
//!
//! The sockets of vtld have it in line (SO_OOBINLINE): it keeps its place among the others, reading
//! stops before it, and the kernel tells that it is next.

use std::{io, net::TcpStream, os::fd::AsRawFd};

use nix::{
    libc::c_int,
    sys::socket::{self, MsgFlags},
};

/// `linux/sockios.h`, which libc does not have.
const SIOCATMARK: c_int = 0x8905;

nix::ioctl_read_bad!(at_mark, SIOCATMARK, c_int);
nix::ioctl_read_bad!(unread, nix::libc::FIONREAD, c_int);

/// What a socket's reader finds next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// At least so many bytes, and the next is not urgent. A read ends before an urgent one, also if that comes
    /// before the read does.
    Bytes(usize),
    /// The urgent byte: a read of more than one would go on behind it.
    Urgent,
    /// The end.
    End,
}

/// Looks ahead; an error is what reading would show, such as that there is nothing yet.
pub(crate) fn ahead(socket: &TcpStream) -> io::Result<Ahead> {
    // In this order: of a byte that is there already it is certain whether it is urgent. Looking at
    // it has the kernel do more than counting it.
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

/// Bytes that have come and were not read.
fn waiting(socket: &TcpStream) -> usize {
    let mut count = 0;
    // SAFETY: the call writes one integer to where the pointer points. Of a socket that fails, reading says more.
    match unsafe { unread(socket.as_raw_fd(), &raw mut count) } {
        Ok(_) => usize::try_from(count).unwrap_or(0),
        Err(_) => 0,
    }
}

/// Whether an urgent byte comes next. Not certain where nothing has come yet.
pub(crate) fn is_next(socket: &TcpStream) -> bool {
    let mut answer = 0;
    // SAFETY: the call writes one integer to where the pointer points. A socket that fails has no
    // such byte.
    unsafe { at_mark(socket.as_raw_fd(), &raw mut answer) }.is_ok() && answer != 0
}

/// Writes the urgent byte; returns 1. One alone: the mark of a longer write that does not fit would
/// come too early.
pub(crate) fn send(socket: &TcpStream, byte: u8) -> io::Result<usize> {
    let flags = MsgFlags::MSG_OOB | MsgFlags::MSG_NOSIGNAL;
    Ok(socket::send(socket.as_raw_fd(), &[byte], flags)?)
}
