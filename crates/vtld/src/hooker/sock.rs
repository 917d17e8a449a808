//! Socket calls of the Hooker that the standard library lacks.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
};

use nix::sys::socket::{
    self, AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage, setsockopt,
    sockopt,
};

use crate::option;
pub(super) use crate::option::{abort_on_close, cookie, netns_cookie};

fn family(addr: IpAddr) -> AddressFamily {
    if addr.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

/// Takes the socket's pending error (SO_ERROR).
pub(super) fn take_error(fd: &impl AsFd) -> io::Result<()> {
    match option::get(fd, libc::SOL_SOCKET, libc::SO_ERROR)? {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// A non-blocking TCP socket.
pub(super) fn tcp(ip: IpAddr) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    Ok(socket::socket(
        family(ip),
        SockType::Stream,
        flags,
        SockProtocol::Tcp,
    )?)
}

/// Sets the options of every stream with an application's bytes: no Nagle delay, urgent data in
/// line, and reset on close unless ended in order. The last also covers the death of vtld: the
/// other end never takes truncated data for the whole.
pub(super) fn tune(fd: &impl AsFd) -> io::Result<()> {
    setsockopt(fd, sockopt::TcpNoDelay, &true)?;
    setsockopt(fd, sockopt::OobInline, &true)?;
    abort_on_close(fd, true)
}

/// As [`tune`], for a connection on the loopback, where pacing by the host's default congestion
/// control would only add delay.
pub(super) fn tune_local(fd: &impl AsFd) -> io::Result<()> {
    tune(fd)?;
    Ok(setsockopt(fd, sockopt::TcpCongestion, &"reno".into())?)
}

/// Sets SO_MARK.
pub(super) fn mark(fd: &impl AsFd, mark: u32) -> io::Result<()> {
    Ok(setsockopt(fd, sockopt::Mark, &mark)?)
}

/// Binds. `shared`: with SO_REUSEADDR, also next to connections in TIME_WAIT.
pub(super) fn bind(fd: &OwnedFd, addr: SocketAddr, shared: bool) -> io::Result<()> {
    setsockopt(fd, sockopt::ReuseAddr, &shared)?;
    Ok(socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(addr))?)
}

/// Binds to an address, and leaves the port to [`connect`], which takes `port` unless another
/// connection to the same destination uses it, and any port if `port` is outside the ephemeral range.
/// EADDRNOTAVAIL on kernels before Linux 6.3.
pub(super) fn bind_when_connecting(fd: &OwnedFd, addr: SocketAddr, port: u16) -> io::Result<()> {
    const IP_LOCAL_PORT_RANGE: libc::c_int = 51; // libc lacks it
    // ip(7): lowest port in the lower half, highest in the upper.
    let range = u32::from(port) << 16 | u32::from(port);
    option::set(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, range)
        .map_err(|_| io::Error::from_raw_os_error(libc::EADDRNOTAVAIL))?;
    bind_late(fd, addr)
}

/// Binds to an address, whose port (0) the kernel chooses when it connects: one that is free for that destination.
pub(super) fn bind_late(fd: &OwnedFd, addr: SocketAddr) -> io::Result<()> {
    option::set(fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1u32)?;
    Ok(socket::bind(fd.as_raw_fd(), &SockaddrStorage::from(addr))?)
}

/// Begins to connect.
pub(super) fn connect(fd: &OwnedFd, addr: SocketAddr) -> io::Result<()> {
    match socket::connect(fd.as_raw_fd(), &SockaddrStorage::from(addr)) {
        Ok(()) | Err(nix::Error::EINPROGRESS) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Sets TCP_SAVE_SYN on a listener, so that programs can read the SYN's options again when the SYN/ACK
/// is retransmitted.
pub(super) fn save_syn(fd: &impl AsFd) -> io::Result<()> {
    option::set(fd, libc::IPPROTO_TCP, libc::TCP_SAVE_SYN, 1u32)
}

/// Turns the socket into a listener with the longest queue that the kernel allows.
pub(super) fn listen(fd: OwnedFd) -> io::Result<TcpListener> {
    socket::listen(&fd, Backlog::MAXCONN)?;
    Ok(fd.into())
}

/// A bound loopback socket of one family, not yet listening, and its port.
pub(super) fn loopback(v4: bool) -> io::Result<(OwnedFd, u16)> {
    let ip: IpAddr = if v4 {
        Ipv4Addr::LOCALHOST.into()
    } else {
        Ipv6Addr::LOCALHOST.into()
    };
    let fd = tcp(ip)?;
    bind(&fd, SocketAddr::new(ip, 0), true)?;
    let port = local(&fd)?.port();
    Ok((fd, port))
}

/// getsockname.
pub(super) fn local(fd: &OwnedFd) -> io::Result<SocketAddr> {
    TcpStream::from(fd.try_clone()?).local_addr()
}

/// A raw socket that sends whole IP packets, with SO_MARK.
pub(super) fn raw(v4: bool, mark_value: u32) -> io::Result<OwnedFd> {
    let domain = if v4 { libc::AF_INET } else { libc::AF_INET6 };
    let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers; nix has no name for IPPROTO_RAW over IPv6.
    let fd = unsafe { libc::socket(domain, flags, libc::IPPROTO_RAW) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor that nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    mark(&fd, mark_value)?;
    Ok(fd)
}

/// Sends one packet through a raw socket.
pub(super) fn send_to(fd: &OwnedFd, packet: &[u8], to: IpAddr) -> io::Result<()> {
    // IPv6 raw sockets insist on port 0.
    let to = SockaddrStorage::from(SocketAddr::new(to, 0));
    socket::sendto(fd.as_raw_fd(), packet, &to, socket::MsgFlags::empty())?;
    Ok(())
}

/// The source address that the kernel's route to `dest` selects. Sends nothing.
pub(super) fn route_source(dest: SocketAddr, mark_value: u32) -> io::Result<IpAddr> {
    let any: IpAddr = if dest.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let probe = UdpSocket::bind((any, 0))?;
    if mark_value != 0 {
        mark(&probe, mark_value)?;
    }
    probe.connect(dest)?;
    Ok(probe.local_addr()?.ip())
}
