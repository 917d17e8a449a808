//! Sockets of flows, and other descriptors that tokio polls.

use std::{
    io::{self, Read},
    net::{TcpListener, TcpStream},
    os::fd::{AsRawFd, OwnedFd, RawFd},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::io::{Interest, unix::AsyncFd};
use vtl_ring::Events;

use crate::{
    broker::Doorbell,
    option,
    urgent::{self, Ahead},
};

/// Registers a non-blocking descriptor with tokio.
pub(super) fn watch<S: Watchable>(socket: S) -> io::Result<AsyncFd<S>> {
    // SAFETY: all of them keep their one descriptor open and the same as long as they live.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

/// A non-blocking listener.
pub(super) struct Listening(pub(super) TcpListener);

impl AsRawFd for Listening {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Types that keep one and the same descriptor open as long as they live.
pub(super) trait Watchable: AsRawFd {}
impl Watchable for TcpStream {}
impl Watchable for Listening {}
impl Watchable for OwnedFd {}
impl Watchable for Events {}
impl Watchable for Doorbell {}

/// State of a connection that has sent its SYN (`include/net/tcp_states.h`).
const TCP_SYN_SENT: u8 = 2;

/// Whether a socket waits for the SYN/ACK. False for one that has lost its peer.
fn is_connecting(socket: &TcpStream) -> io::Result<bool> {
    let info = option::tcp_info(socket)?;
    Ok(info.tcpi_state == TCP_SYN_SENT)
}

/// Round trip of a fresh connection's handshake; `None` if there were retransmissions.
pub(super) fn handshake(socket: &TcpStream) -> Option<Duration> {
    let info = option::tcp_info(socket).ok()?;
    (info.tcpi_total_retrans == 0).then(|| Duration::from_micros(info.tcpi_rtt.into()))
}

/// Completes when a socket's connect has succeeded or failed.
pub(super) async fn connected(socket: &AsyncFd<TcpStream>) -> io::Result<()> {
    socket
        .async_io(Interest::WRITABLE, |socket| match socket.take_error()? {
            Some(error) => Err(error),
            None if is_connecting(socket)? => Err(io::ErrorKind::WouldBlock.into()),
            None => Ok(()),
        })
        .await
}

/// Completes when a connection is reset, also after the end of its stream, where reading would
/// not show it.
pub(super) async fn broken(socket: &AsyncFd<TcpStream>) {
    loop {
        let Ok(mut ready) = socket.ready(Interest::ERROR).await else {
            return;
        };
        if !matches!(socket.get_ref().take_error(), Ok(None)) {
            return;
        }
        ready.clear_ready();
    }
}

nix::ioctl_read_bad!(waiting, nix::libc::FIONREAD, nix::libc::c_int);
// SIOCOUTQ has this number on sockets.
nix::ioctl_read_bad!(unsent, nix::libc::TIOCOUTQ, nix::libc::c_int);

/// Result of a read.
pub(super) enum Got {
    /// Bytes, and whether the last one is TCP's urgent byte.
    Bytes(Bytes, bool),
    End,
}

/// Reads at most `max` bytes; stops before an urgent byte, which is read by itself.
pub(super) fn read(socket: &TcpStream, max: usize) -> io::Result<Got> {
    let (max, is_urgent) = match urgent::ahead(socket)? {
        Ahead::End => return Ok(Got::End),
        Ahead::Urgent => (1, true),
        Ahead::Bytes(count) => (max.min(count), false),
    };
    let mut bytes = BytesMut::with_capacity(max);
    let spare = bytes.spare_capacity_mut().as_mut_ptr();
    // SAFETY: there is room for so many bytes. They are not cleared before, as that costs as much as a copy.
    let got = unsafe { libc::recv(socket.as_raw_fd(), spare.cast(), max, 0) };
    match usize::try_from(got) {
        Err(_) => Err(io::Error::last_os_error()),
        Ok(0) => Ok(Got::End),
        Ok(n) => {
            // SAFETY: the kernel has written them.
            unsafe { bytes.set_len(n) };
            Ok(Got::Bytes(bytes.freeze(), is_urgent))
        }
    }
}

/// Reads exactly `N` bytes.
pub(super) async fn read_exact<const N: usize>(socket: &AsyncFd<TcpStream>) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        let rest = &mut bytes[have..];
        let read = |mut socket: &TcpStream| socket.read(rest);
        match socket.async_io(Interest::READABLE, read).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => have += n,
        }
    }
    Ok(bytes)
}

/// Bytes received and not read.
pub(super) fn unread(socket: &TcpStream) -> u64 {
    let mut left = 0;
    // SAFETY: it writes an int.
    match unsafe { waiting(socket.as_raw_fd(), &mut left) } {
        Ok(_) => u64::try_from(left).unwrap_or(0),
        Err(_) => 0,
    }
}

/// Bytes written and not acknowledged by the other end.
pub(super) fn unacknowledged(socket: &TcpStream) -> usize {
    let mut left = 0;
    // SAFETY: it writes an int.
    match unsafe { unsent(socket.as_raw_fd(), &mut left) } {
        Ok(_) => usize::try_from(left).unwrap_or(0),
        // Fails on a closed connection.
        Err(_) => 0,
    }
}
