//! MPTCP (RFC 8684) as a tunnel: the kernel's, one connection for each flow, between the daemons.
//! Which paths it takes is the system's matter (`ip mptcp endpoint`).
//!
//! The server grants a token and says at which port it listens; each connection begins with the
//! token. Where something on the way takes the options of MPTCP out it is TCP, and works.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use nix::sys::socket::{Backlog, SockaddrStorage, bind, connect, listen, setsockopt, sockopt};
use tokio::io::{Interest, unix::AsyncFd};

use super::wire;

/// A socket that does not block.
fn socket(ip: IpAddr) -> io::Result<OwnedFd> {
    let family = match ip {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    let kind = libc::SOCK_STREAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: no pointers.
    let fd = unsafe { libc::socket(family, kind, libc::IPPROTO_MPTCP) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Begins to connect.
pub(super) fn begin(to: SocketAddr) -> io::Result<TcpStream> {
    let fd = socket(to.ip())?;
    setsockopt(&fd, sockopt::TcpNoDelay, &true)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(nix::Error::EINPROGRESS) => Ok(fd.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// Where flows come.
pub(super) struct Listener {
    socket: AsyncFd<wire::Listening>,
    pub(super) port: u16,
}

impl Listener {
    /// Inside a tokio runtime.
    pub(super) fn new() -> io::Result<Self> {
        let open = |ip: IpAddr| -> io::Result<TcpListener> {
            let fd = socket(ip)?;
            bind(
                fd.as_raw_fd(),
                &SockaddrStorage::from(SocketAddr::new(ip, 0)),
            )?;
            listen(&fd, Backlog::MAXCONN)?;
            Ok(fd.into())
        };
        let socket =
            open(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| open(Ipv4Addr::UNSPECIFIED.into()))?;
        let port = socket.local_addr()?.port();
        let socket = wire::listen(socket)?;
        Ok(Self { socket, port })
    }

    /// The next connection.
    pub(super) async fn accept(&self) -> io::Result<(TcpStream, IpAddr)> {
        let accept = |socket: &wire::Listening| socket.0.accept();
        let (stream, from) = self.socket.async_io(Interest::READABLE, accept).await?;
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok((stream, from.ip().to_canonical()))
    }
}
