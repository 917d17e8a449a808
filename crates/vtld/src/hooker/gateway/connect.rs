//! Connections in the name of a host behind this one.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::OwnedFd,
};

use vtl_proto::frame::FlowName;

use super::super::{
    Shared,
    held::{Forwarded, HeldConnect},
    sock,
};
use crate::{option, scope};

/// Lets a socket have addresses of other hosts.
pub(super) fn set_transparent(socket: &OwnedFd, ip: IpAddr) -> io::Result<()> {
    let (level, name) = match ip {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TRANSPARENT),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT),
    };
    option::set(socket, level, name, 1u32)
}

/// Whether the kernel tracks connections here. Then a connection in the client's name must not have the client's port
/// as well: to the kernel both would be one connection, whose sequence numbers make no sense.
fn is_tracked() -> bool {
    let count = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count");
    count.is_ok_and(|count| count.trim() != "0")
}

/// Maximum number of ports outside the ephemeral range tried for a connection.
const SPARE_ATTEMPTS: usize = 16;

/// Whether a failure is that of a local port.
fn is_taken(error: &io::Error) -> bool {
    let errno = error.raw_os_error();
    matches!(
        errno,
        Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL | libc::EACCES)
    )
}

/// Begins to open the connection of a forwarded connect, in the client's name, by the client's port if possible.
/// Returns the socket and its cookie.
///
/// # Errors
/// Also if a connection of this host's own would leave by another interface than the client's SYN, by policy routing.
pub(in super::super) fn open(
    shared: &Shared,
    held: &HeldConnect,
    offer: Option<FlowName>,
) -> io::Result<(OwnedFd, u64)> {
    let [src, dest] = [held.src(), held.dest()];
    let any = match dest {
        SocketAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let leaves = held.forwarded() == Some(Forwarded::Inside) || held.is_onward();
    if leaves && held.exit() != scope::exit(dest.ip(), any, 0).ok() {
        return Err(io::Error::other("the router's own route is another"));
    }
    if !is_tracked() {
        match open_from(shared, src, dest, offer) {
            Err(error) if is_taken(&error) => {}
            result => return result,
        }
    }
    open_by_another_port(shared, src.ip(), dest, offer)
}

/// Begins to open a connection in the name of a host behind this one, by a port that it hardly uses itself: to the
/// server its connection and this one would be one, and the later SYN would end it.
fn open_by_another_port(
    shared: &Shared,
    from: IpAddr,
    dest: SocketAddr,
    offer: Option<FlowName>,
) -> io::Result<(OwnedFd, u64)> {
    for _ in 0..SPARE_ATTEMPTS {
        let Some(port) = shared.clients().take_spare() else {
            break;
        };
        match open_from(shared, SocketAddr::new(from, port), dest, offer) {
            Err(error) if is_taken(&error) => {}
            result => return result,
        }
    }
    open_from(shared, SocketAddr::new(from, 0), dest, offer)
}

/// Begins to open an association's control connection in the name of a host behind this one.
pub(in super::super) fn connect_control(
    shared: &Shared,
    from: IpAddr,
    dest: SocketAddr,
    name: FlowName,
) -> io::Result<TcpStream> {
    let (socket, _) = open_by_another_port(shared, from, dest, Some(name))?;
    Ok(socket.into())
}

fn open_from(
    shared: &Shared,
    from: SocketAddr,
    dest: SocketAddr,
    offer: Option<FlowName>,
) -> io::Result<(OwnedFd, u64)> {
    let socket = sock::tcp(dest.ip())?;
    sock::tune(&socket)?;
    set_transparent(&socket, from.ip())?;
    match from.port() {
        // A port only to this destination: as many connections as there are ports, to each.
        0 => sock::bind_late(&socket, from)?,
        _ => sock::bind(&socket, from, true)?,
    }
    let cookie = sock::cookie(&socket)?;
    shared.maps.own(cookie, offer).map_err(io::Error::other)?;
    if let Err(error) = sock::connect(&socket, dest) {
        shared.maps.disown(cookie);
        return Err(error);
    }
    Ok((socket, cookie))
}
