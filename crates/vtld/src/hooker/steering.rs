//! Connections from peers that run VTL: the interfaces on which they are steered to vtld, and
//! vtld's own connections to the local applications that they are for.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    net::{SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use nix::{
    net::if_::if_nameindex,
    sys::socket::{self, AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType},
};

use super::{
    Shared, abi,
    bpf::{Attached, Programs, STEER_SYN},
    error::HookerError,
    sock,
};

/// An application may call accept() or getpeername() after vtld has closed. As long as TIME_WAIT,
/// in which the same pair of addresses cannot be used again.
const LINGER: Duration = Duration::from_secs(60);

/// The steering program's links, one for each interface but lo, while any port is hooked.
#[derive(Default)]
pub(super) struct Interfaces {
    links: HashMap<u32, Attached>,
}

impl Interfaces {
    /// Attaches to interfaces that are new, forgets those that are gone.
    pub(super) fn update(&mut self, programs: &Programs) -> Result<(), HookerError> {
        let failed = |errno: nix::Error| HookerError::Socket {
            what: "list the network interfaces",
            source: errno.into(),
        };
        let names = if_nameindex().map_err(failed)?;
        let present: HashMap<u32, String> = names
            .into_iter()
            .map(|each| (each.index(), each.name().to_string_lossy().into_owned()))
            .filter(|(_, name)| name != "lo")
            .collect();
        self.links.retain(|index, _| present.contains_key(index));
        for (index, name) in present {
            if let Entry::Vacant(entry) = self.links.entry(index) {
                entry.insert(programs.attach_tcx(STEER_SYN, index, &name)?);
            }
        }
        Ok(())
    }

    /// Detaches from all.
    pub(super) fn clear(&mut self) {
        self.links.clear();
    }
}

/// A socket that becomes readable when an interface or an address of the host comes, goes or changes.
pub(super) fn watch_interfaces() -> Result<OwnedFd, HookerError> {
    let open = || -> nix::Result<OwnedFd> {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let route = SockProtocol::NetlinkRoute;
        let socket = socket::socket(AddressFamily::Netlink, SockType::Raw, flags, route)?;
        let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        socket::bind(
            std::os::fd::AsRawFd::as_raw_fd(&socket),
            &NetlinkAddr::new(0, groups as u32),
        )?;
        Ok(socket)
    };
    open().map_err(|errno| HookerError::Socket {
        what: "watch the network interfaces",
        source: errno.into(),
    })
}

/// Empties a socket made by [`watch_interfaces`].
pub(super) fn drain(socket: BorrowedFd<'_>) {
    let mut buffer = [0; 8192];
    while nix::unistd::read(socket, &mut buffer).is_ok_and(|count| count > 0) {}
}

/// vtld's ends of connections to local applications. Only the latest user of an address may take
/// its entry out.
#[derive(Default)]
pub(super) struct Clients {
    generations: HashMap<SocketAddr, u64>,
    last: u64,
    leaving: Vec<(Instant, SocketAddr, u64)>,
}

impl Clients {
    fn enter(&mut self, end: SocketAddr) -> u64 {
        self.last += 1;
        self.generations.insert(end, self.last);
        self.last
    }

    /// The ends whose time is over.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<SocketAddr> {
        let mut gone = Vec::new();
        self.leaving.retain(|&(until, end, generation)| {
            if until > now {
                return true;
            }
            if self.generations.get(&end) == Some(&generation) {
                self.generations.remove(&end);
                gone.push(end);
            }
            false
        });
        gone
    }
}

/// While it lives, the local application sees the real client as its peer, and for a minute more.
pub struct ClientAddressGuard {
    shared: Weak<Shared>,
    end: SocketAddr,
    generation: u64,
}

impl Drop for ClientAddressGuard {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            let leaving = (Instant::now() + LINGER, self.end, self.generation);
            shared.clients().leaving.push(leaving);
        }
    }
}

/// Begins to connect to the application that listens at `dest`, which will see `client` as its
/// peer. The stream may still be connecting: it is writable once connected.
pub(super) fn connect_local_app(
    shared: &Arc<Shared>,
    dest: SocketAddr,
    client: SocketAddr,
) -> io::Result<(TcpStream, ClientAddressGuard)> {
    let socket = sock::tcp(dest.ip())?;
    sock::tune_local(&socket)?;
    sock::bind(&socket, SocketAddr::new(dest.ip(), 0), false)?;
    let end = sock::local(&socket)?;
    shared
        .maps
        .own(sock::cookie(&socket)?, 0)
        .map_err(io::Error::other)?;
    shared
        .maps
        .show_client(end, client)
        .map_err(io::Error::other)?;
    let generation = shared.clients().enter(end);
    let guard = ClientAddressGuard {
        shared: Arc::downgrade(shared),
        end,
        generation,
    };
    sock::connect(&socket, dest)?;
    Ok((socket.into(), guard))
}

/// Whether the client of an accepted, steered connection has shown in its last segment of the
/// handshake that it saw vtld's answer.
pub(super) fn client_speaks_vtl(shared: &Shared, stream: &TcpStream) -> io::Result<bool> {
    let cookie = sock::cookie(&stream.as_fd())?;
    let known = shared.maps.owned(cookie);
    shared.maps.disown(cookie);
    Ok(known & abi::VTL_OWN_PEER != 0)
}
