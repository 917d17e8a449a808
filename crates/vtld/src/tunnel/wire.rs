//! Words on a discovery connection, which does not block.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    os::fd::{AsRawFd, RawFd},
};

use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{Interest, unix::AsyncFd};

use super::words::{WORD, Word};
use crate::broker::preamble::GREETING;

/// Has tokio watch a TCP socket, which does not block.
pub(crate) fn watch<S: Tcp>(socket: S) -> io::Result<AsyncFd<S>> {
    // SAFETY: all kinds of `Tcp` keep their one descriptor open and the same as long as they live.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

/// The same for a listener.
pub(super) fn listen(socket: TcpListener) -> io::Result<AsyncFd<Listening>> {
    watch(Listening(socket))
}

/// A listener that does not block.
pub(super) struct Listening(pub(super) TcpListener);

impl AsRawFd for Listening {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A socket, or one that is borrowed.
pub(crate) trait Tcp: AsRawFd {}
impl Tcp for TcpStream {}
impl Tcp for Borrowed<'_> {}
impl Tcp for Listening {}

struct Borrowed<'a>(&'a TcpStream);

impl AsRawFd for Borrowed<'_> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Waits for the outcome of a socket's connect.
pub(crate) async fn connected(socket: &AsyncFd<TcpStream>) -> io::Result<()> {
    socket
        .async_io(Interest::WRITABLE, |socket| match socket.take_error()? {
            Some(error) => Err(error),
            None if socket.peer_addr().is_ok() => Ok(()),
            None => Err(io::ErrorKind::WouldBlock.into()),
        })
        .await
}

/// Completes when a connection is reset, behind the end of what comes from it, where reading would
/// not show it.
pub(crate) async fn broken(socket: &AsyncFd<TcpStream>) {
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

/// Says something short: a connection that has carried next to nothing takes it at once.
pub(super) fn say(mut peer: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    match peer.write(bytes)? {
        n if n == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

/// The next bytes that the peer says.
pub(super) async fn read<const N: usize>(peer: &TcpStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut have = 0;
    let peer = watch(Borrowed(peer))?;
    while have < N {
        let rest = &mut bytes[have..];
        match peer
            .async_io(Interest::READABLE, |peer| {
                let mut peer = peer.0;
                peer.read(rest)
            })
            .await?
        {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => have += n,
        }
    }
    Ok(bytes)
}

/// What a vtld says first.
pub(super) async fn greeting(peer: &TcpStream) -> io::Result<()> {
    match read(peer).await? {
        GREETING => Ok(()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The next word.
pub(super) async fn word(peer: &TcpStream) -> io::Result<Word> {
    let bytes = read::<WORD>(peer).await?;
    Word::parse(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Has the kernel ask for the other end of a lifeline while that is silent: the reset that tells of a
/// daemon's end is sent once and may get lost, and is the answer to this question, too.
pub(crate) fn keep_asking(lifeline: &TcpStream) {
    const EVERY_S: u32 = 2;
    // An outage is not the end: as often as the kernel lets.
    const TIMES: u32 = 127;
    // Without, the end is noticed later.
    let _ = setsockopt(lifeline, sockopt::KeepAlive, &true);
    let _ = setsockopt(lifeline, sockopt::TcpKeepIdle, &EVERY_S);
    let _ = setsockopt(lifeline, sockopt::TcpKeepInterval, &EVERY_S);
    let _ = setsockopt(lifeline, sockopt::TcpKeepCount, &TIMES);
}

/// Has the kernel ask for the other end of a flow's connection while that has nothing to carry: so that NATs
/// and firewalls keep it.
pub(crate) fn keep_alive(flow: &TcpStream) {
    const EVERY_S: u32 = 60;
    // An outage is not the end: as often as the kernel lets.
    const TIMES: u32 = 127;
    // Without, they may forget it.
    let _ = setsockopt(flow, sockopt::KeepAlive, &true);
    let _ = setsockopt(flow, sockopt::TcpKeepIdle, &EVERY_S);
    let _ = setsockopt(flow, sockopt::TcpKeepInterval, &EVERY_S);
    let _ = setsockopt(flow, sockopt::TcpKeepCount, &TIMES);
}

/// Completes when a lifeline ends, or says what has no meaning there. Never without one.
pub(super) async fn ended(lifeline: Option<&TcpStream>) {
    match lifeline {
        Some(lifeline) => drop(read::<1>(lifeline).await),
        None => std::future::pending().await,
    }
}
