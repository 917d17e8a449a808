//! Connections from peers that run VTL: steering to vtld at the interfaces, and vtld's own
//! connections to the local applications.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use nix::{
    net::if_::if_nameindex,
    sys::socket::{self, AddressFamily, NetlinkAddr, SockFlag, SockProtocol, SockType},
};

use vtl_proto::frame::FlowName;

use super::{
    Shared,
    bpf::{Attached, Programs, STEER_SYN},
    error::HookerError,
    sock,
};
use crate::Scope;

/// How long a connection's client address stays in the map after vtld has closed its end: with a full accept queue
/// the connection may be established later. As long as TIME_WAIT.
const LINGER: Duration = Duration::from_secs(60);
/// Maximum number of ports tried for one connection from a loopback address: ports in use or in TIME_WAIT are skipped.
/// The kernel allows reuse of a port there a second after its last use.
const ATTEMPTS: usize = 256;
/// The same from another address of the host, where reuse takes a minute: more attempts are not worth it.
const FEW_ATTEMPTS: usize = 16;

/// Spare ports below the ephemeral range begin here: lower ones belong to services.
const FIRST_SPARE: u16 = 10_000;
/// Minimum size of a range of spare ports.
const ENOUGH_SPARE: u16 = 1_000;

/// The steering program's links, one for each interface that VTL is enabled on, except lo, while any port is hooked.
pub(super) struct Interfaces {
    scope: Scope,
    links: HashMap<u32, Attached>,
}

impl Interfaces {
    pub(super) fn new(scope: Scope) -> Self {
        Self {
            scope,
            links: HashMap::new(),
        }
    }

    /// Attaches to new interfaces, forgets removed ones.
    pub(super) fn update(&mut self, programs: &Programs) -> Result<(), HookerError> {
        let failed = |errno: nix::Error| HookerError::Socket {
            what: "list the network interfaces",
            source: errno.into(),
        };
        let names = if_nameindex().map_err(failed)?;
        let present: HashMap<u32, String> = names
            .into_iter()
            .map(|each| (each.index(), each.name().to_string_lossy().into_owned()))
            .filter(|(_, name)| name != "lo" && self.scope.has(name))
            .collect();
        follow(&mut self.links, present, |index, name| {
            programs.attach_tcx(STEER_SYN, index, name)
        })
    }

    /// The links of all interfaces.
    pub(super) fn links(&self) -> impl Iterator<Item = &Attached> {
        self.links.values()
    }

    /// Detaches from all interfaces.
    pub(super) fn clear(&mut self) {
        self.links.clear();
    }
}

/// Attaches to present interfaces without a link, drops the links of others. One that fails, as it may have vanished
/// since, does not keep the rest from theirs.
pub(super) fn follow<L>(
    links: &mut HashMap<u32, L>,
    present: HashMap<u32, String>,
    attach: impl Fn(u32, &str) -> Result<L, HookerError>,
) -> Result<(), HookerError> {
    links.retain(|index, _| present.contains_key(index));
    let mut result = Ok(());
    for (index, name) in present {
        if let Entry::Vacant(entry) = links.entry(index) {
            match attach(index, &name) {
                Ok(link) => {
                    entry.insert(link);
                }
                Err(error) => result = Err(error),
            }
        }
    }
    result
}

/// A netlink socket that becomes readable when an interface or address of the host is added, removed or changed.
pub(crate) fn watch_interfaces() -> Result<OwnedFd, HookerError> {
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
pub(crate) fn drain(socket: BorrowedFd<'_>) {
    let mut buffer = [0; 8192];
    while nix::unistd::read(socket, &mut buffer).is_ok_and(|count| count > 0) {}
}

/// Allocates vtld's ends of connections to local applications, each tied to the client address that is shown.
///
/// Ports are taken in turn: the kernel's own search takes longer the more ports are in TIME_WAIT. On the loopback
/// addresses a port in TIME_WAIT can be reused after a second (the default of `tcp_tw_reuse`); with the host's
/// other addresses there are at most 28,232 connections a minute.
#[derive(Default)]
pub(super) struct Clients {
    ends: HashMap<SocketAddr, End>,
    last: u64,
    leaving: Vec<Leaving>,
    turns: [u16; 2],
    ports: LocalPorts,
    /// The last port of [`Clients::take_spare`].
    spare: u16,
}

/// The latest user of an end.
struct End {
    generation: u64,
    live: bool,
    /// Destination of its connection; `None`: made by a former daemon.
    dest: Option<SocketAddr>,
}

/// A connection whose end vtld has closed.
struct Leaving {
    until: Instant,
    end: SocketAddr,
    generation: u64,
    dest: Option<SocketAddr>,
}

impl Clients {
    /// Whether a port is in the ephemeral range, so that it may have been allocated automatically.
    pub(super) fn is_given(&mut self, port: u16) -> bool {
        self.ports().given(port)
    }

    fn ports(&mut self) -> &LocalPorts {
        if self.ports.last == 0 {
            self.ports = LocalPorts::read();
        }
        &self.ports
    }

    /// Takes the next port outside the ephemeral range; `None` if there are too few.
    pub(super) fn take_spare(&mut self) -> Option<u16> {
        let (first, last) = self.ports().spare()?;
        for _ in first..=last {
            let is_within = (first..last).contains(&self.spare);
            self.spare = if is_within { self.spare + 1 } else { first };
            if !self.ports.reserved(self.spare) {
                return Some(self.spare);
            }
        }
        None
    }

    /// Allocates the next free end, for a connection to `dest`. Returns it and its generation.
    fn take(&mut self, ip: IpAddr, dest: SocketAddr) -> Option<(SocketAddr, u64)> {
        let family = usize::from(ip.is_ipv4());
        for _ in 0..=u16::MAX {
            let port = match self.ports.after(self.turns[family]) {
                Some(port) => port,
                None => {
                    // Read anew at each wrap: the sysctls may have changed.
                    self.ports = LocalPorts::read();
                    self.ports.first
                }
            };
            self.turns[family] = port;
            let end = SocketAddr::new(ip, port);
            if !self.ports.reserved(port) && self.ends.get(&end).is_none_or(|end| !end.live) {
                return Some((end, self.enter(end, true, Some(dest))));
            }
        }
        None
    }

    /// Frees an end that no connection was made from.
    fn abandon(&mut self, end: SocketAddr, generation: u64) {
        if self
            .ends
            .get(&end)
            .is_some_and(|entry| entry.generation == generation)
        {
            self.ends.remove(&end);
        }
    }

    /// Registers an end handed over by a former daemon. Returns its generation.
    fn adopt(&mut self, end: SocketAddr) -> u64 {
        let dest = self.ends.get(&end).and_then(|inherited| inherited.dest);
        self.enter(end, true, dest)
    }

    fn enter(&mut self, end: SocketAddr, live: bool, dest: Option<SocketAddr>) -> u64 {
        self.last += 1;
        let entry = End {
            generation: self.last,
            live,
            dest,
        };
        self.ends.insert(end, entry);
        self.last
    }

    /// Registers the entries of a former daemon's map of client addresses: they expire after [`LINGER`] unless adopted.
    pub(super) fn inherit(&mut self, connections: impl IntoIterator<Item = [SocketAddr; 2]>) {
        for [end, dest] in connections {
            let generation = self.enter(end, false, Some(dest));
            self.linger(end, generation, Some(dest));
        }
    }

    fn leave(&mut self, end: SocketAddr, generation: u64) {
        if let Some(entry) = self.ends.get_mut(&end)
            && entry.generation == generation
        {
            entry.live = false;
            let dest = entry.dest;
            self.linger(end, generation, dest);
        }
    }

    fn linger(&mut self, end: SocketAddr, generation: u64, dest: Option<SocketAddr>) {
        self.leaving.push(Leaving {
            until: Instant::now() + LINGER,
            end,
            generation,
            dest,
        });
    }

    /// Removes ends closed for [`LINGER`]. Returns their connections, except those that were made again.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<[SocketAddr; 2]> {
        let mut gone = Vec::new();
        self.leaving.retain(|one| {
            if one.until > now {
                return true;
            }
            match self.ends.get(&one.end) {
                Some(later) if later.generation != one.generation => {
                    if later.dest == one.dest {
                        return false;
                    }
                }
                _ => {
                    self.ends.remove(&one.end);
                }
            }
            gone.extend(one.dest.map(|dest| [one.end, dest]));
            false
        });
        gone
    }
}

/// The system's ephemeral ports.
#[derive(Default)]
struct LocalPorts {
    first: u16,
    last: u16,
    /// Reserved ranges (`ip_local_reserved_ports`).
    reserved: Vec<(u16, u16)>,
}

impl LocalPorts {
    fn read() -> Self {
        let setting = |name: &str| {
            let path = format!("/proc/sys/net/ipv4/ip_local_{name}");
            std::fs::read_to_string(path).unwrap_or_default()
        };
        Self::parse(&setting("port_range"), &setting("reserved_ports"))
    }

    fn parse(range: &str, reserved: &str) -> Self {
        let mut bounds = range.split_whitespace().map(str::parse);
        let (first, last) = match (bounds.next(), bounds.next()) {
            (Some(Ok(first)), Some(Ok(last))) if 0 < first && first <= last => (first, last),
            _ => (32_768, 60_999),
        };
        let span = |text: &str| {
            let (from, to) = text.split_once('-').unwrap_or((text, text));
            Some((from.parse().ok()?, to.parse().ok()?))
        };
        let reserved = reserved.trim().split(',').filter_map(span).collect();
        Self {
            first,
            last,
            reserved,
        }
    }

    /// The port after `port`; `None` after the last one.
    fn after(&self, port: u16) -> Option<u16> {
        (self.first..self.last).contains(&port).then(|| port + 1)
    }

    /// First and last spare port: above the ephemeral range if there are enough, else below it.
    fn spare(&self) -> Option<(u16, u16)> {
        let above = (self.last.saturating_add(1), u16::MAX);
        let below = (FIRST_SPARE, self.first.saturating_sub(1));
        let is_enough = |(first, last): &(u16, u16)| last.saturating_sub(*first) >= ENOUGH_SPARE;
        [above, below].into_iter().find(is_enough)
    }

    fn given(&self, port: u16) -> bool {
        (self.first..=self.last).contains(&port) && !self.reserved(port)
    }

    fn reserved(&self, port: u16) -> bool {
        let within = |&(from, to): &(u16, u16)| (from..=to).contains(&port);
        self.reserved.iter().any(within)
    }
}

/// Reserves vtld's end of the connection to a local application, which sees the real client as its peer; released
/// on drop.
pub struct ClientAddressGuard {
    shared: Weak<Shared>,
    end: SocketAddr,
    generation: u64,
}

impl ClientAddressGuard {
    /// vtld's end of the connection to the application.
    pub(crate) fn end(&self) -> SocketAddr {
        self.end
    }
}

impl Drop for ClientAddressGuard {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.clients().leave(self.end, self.generation);
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
    // The host's own address first: not every host accepts packets from a loopback address to its other ones.
    let loopback: IpAddr = match dest.ip() {
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    for (from, attempts) in [(dest.ip(), FEW_ATTEMPTS), (loopback, ATTEMPTS)] {
        for _ in 0..attempts {
            let Some((end, generation)) = shared.clients().take(from, dest) else {
                break;
            };
            let error = match connect_from(shared, end, dest, client) {
                Ok(stream) => {
                    let guard = ClientAddressGuard {
                        shared: Arc::downgrade(shared),
                        end,
                        generation,
                    };
                    return Ok((stream, guard));
                }
                Err(error) => error,
            };
            shared.clients().abandon(end, generation);
            let is_taken = [libc::EADDRINUSE, libc::EADDRNOTAVAIL].map(Some);
            if !is_taken.contains(&error.raw_os_error()) {
                return Err(error);
            }
        }
    }
    Err(io::ErrorKind::AddrNotAvailable.into())
}

/// Reserves vtld's end of a connection made by a former daemon.
pub(super) fn adopt(shared: &Arc<Shared>, end: SocketAddr) -> ClientAddressGuard {
    ClientAddressGuard {
        shared: Arc::downgrade(shared),
        end,
        generation: shared.clients().adopt(end),
    }
}

fn connect_from(
    shared: &Shared,
    end: SocketAddr,
    dest: SocketAddr,
    client: SocketAddr,
) -> io::Result<TcpStream> {
    let socket = sock::tcp(dest.ip())?;
    sock::tune_local(&socket)?;
    sock::bind(&socket, end, true)?;
    let cookie = sock::cookie(&socket)?;
    let shown = shared.maps.show_client([end, dest], client);
    if !shown.map_err(io::Error::other)? {
        return Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
    }
    let owned = shared.maps.own(cookie, None).map_err(io::Error::other);
    let connected = owned.and_then(|()| sock::connect(&socket, dest));
    shared.maps.disown(cookie);
    if connected.is_err() {
        shared.maps.hide_client([end, dest]);
    }
    connected.map(|()| socket.into())
}

/// The name that the client of a steered connection has repeated in the handshake's last segment. `None`: it did not
/// see the option in vtld's SYN/ACK.
pub(super) fn client_says(shared: &Shared, stream: &TcpStream) -> io::Result<Option<FlowName>> {
    let cookie = sock::cookie(&stream.as_fd())?;
    let says = shared.maps.understood(cookie);
    shared.maps.disown(cookie);
    Ok(says)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const DEST: SocketAddr = SocketAddr::new(LOOPBACK, 80);

    #[test]
    fn follow__one_that_fails_keeps_no_other_from_its_link() {
        let present = |indexes: std::ops::Range<u32>| -> HashMap<u32, String> {
            indexes.map(|index| (index, format!("if{index}"))).collect()
        };
        let attach = |index, name: &str| match index {
            7 => Err(HookerError::OutOfScope(name.to_owned())),
            _ => Ok(()),
        };
        let mut links = HashMap::new();
        assert!(follow(&mut links, present(2..20), attach).is_err());
        assert_eq!(links.len(), 17);
        assert!(follow(&mut links, present(10..21), attach).is_ok());
        let mut left: Vec<u32> = links.into_keys().collect();
        left.sort_unstable();
        assert_eq!(left, Vec::from_iter(10..21));
    }

    #[test]
    fn local_ports__parse() {
        let spare = |range| LocalPorts::parse(range, "").spare();
        assert_eq!(spare("32768 60999"), Some((61_000, 65_535)));
        assert_eq!(spare("15000 65000"), Some((10_000, 14_999)));
        assert_eq!(spare("1024 65535"), None);
        assert_eq!(spare("1024 64534"), Some((64_535, 65_535)));
        let ports = LocalPorts::parse("1024\t2000\n", "1030,1040-1050\n");
        assert_eq!((ports.first, ports.last), (1024, 2000));
        assert_eq!((ports.after(0), ports.after(1024)), (None, Some(1025)));
        assert_eq!(ports.after(2000), None);
        let given = [1023, 1024, 1030, 2000, 2001].map(|port| ports.given(port));
        assert_eq!(given, [false, true, false, true, false]);
        let reserved = (1024..=2000).filter(|port| ports.reserved(*port)).count();
        assert_eq!(reserved, 12);
        for nonsense in ["", "5", "9 7", "a b", "0 9"] {
            let ports = LocalPorts::parse(nonsense, nonsense);
            assert_eq!((ports.first, ports.last), (32_768, 60_999), "{nonsense}");
        }
    }

    #[test]
    fn take__every_end_in_turn_but_those_in_use() {
        let mut clients = Clients::default();
        let (first, _) = clients.take(LOOPBACK, DEST).unwrap();
        let (second, generation) = clients.take(LOOPBACK, DEST).unwrap();
        assert_ne!(first, second);
        clients.leave(second, generation);
        let count = usize::from(clients.ports.last - clients.ports.first) + 1;
        let seen: std::collections::HashSet<_> = std::iter::from_fn(|| {
            let (end, generation) = clients.take(LOOPBACK, DEST)?;
            clients.leave(end, generation);
            Some(end)
        })
        .take(2 * count)
        .collect();
        assert!(seen.contains(&second) && !seen.contains(&first));
        // Whoever left first does not take the later one's entry out.
        let (again, _) = std::iter::from_fn(|| clients.take(LOOPBACK, DEST))
            .find(|(end, _)| *end == second)
            .unwrap();
        clients.leave(second, generation);
        let gone = clients.expire(Instant::now() + 2 * LINGER);
        assert!(!gone.iter().any(|[end, _]| *end == again));
        assert!(gone.iter().any(|[end, _]| *end != again));
    }

    #[test]
    fn expire__each_connection_by_both_ends() {
        let mut clients = Clients::default();
        let other = SocketAddr::new(LOOPBACK, 81);
        let later = || Instant::now() + 2 * LINGER;
        // The end of a connection, taken again for one to another destination.
        let (end, generation) = clients.take(LOOPBACK, DEST).unwrap();
        clients.leave(end, generation);
        let (_, generation) = std::iter::from_fn(|| clients.take(LOOPBACK, other))
            .find(|(taken, _)| *taken == end)
            .unwrap();
        assert_eq!(clients.expire(later()), [[end, DEST]]);
        clients.leave(end, generation);
        assert_eq!(clients.expire(later()), [[end, other]]);
        // Ends of a former daemon: one that is not adopted, and one that is.
        clients.inherit([[end, DEST]]);
        assert_eq!(clients.expire(later()), [[end, DEST]]);
        clients.inherit([[end, DEST]]);
        let generation = clients.adopt(end);
        assert!(clients.expire(later()).is_empty(), "adopted");
        clients.leave(end, generation);
        assert_eq!(clients.expire(later()), [[end, DEST]]);
        let generation = clients.adopt(end);
        clients.leave(end, generation);
        assert!(clients.expire(later()).is_empty(), "nobody knows where to");
    }

    #[test]
    fn take__none_is_left() {
        let mut clients = Clients::default();
        assert!(std::iter::from_fn(|| clients.take(LOOPBACK, DEST)).count() > 1);
        assert_eq!(clients.take(LOOPBACK, DEST), None);
    }
}
