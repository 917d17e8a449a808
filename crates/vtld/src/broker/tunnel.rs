//! TCP connections between daemons, for packets of applications' sessions where the path drops everything else
//! (PROTOCOL.md, section 2, "By TCP"). Each packet is preceded by its length.

use std::{
    collections::BTreeMap,
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::{
    errno::Errno,
    sys::socket::{
        self, AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrStorage,
        setsockopt, sockopt,
    },
};
use vtl_proto::{intf, record::Records};

use crate::{
    hooker::rules::Prefix,
    network::{Network, admits},
    option,
};

const PORT: u16 = intf::VTL_TCP_PORT as u16;
/// Quotas of connections by peers: in total, per address, and per network.
const MAX_CONNECTIONS: usize = 256;
const MAX_OF_PEER: usize = 16;
const MAX_OF_NETWORK: usize = MAX_CONNECTIONS / 4;
/// Limit of packets queued for writing, bytes; packets beyond it are dropped.
const MAX_QUEUE: usize = 256 << 10;
/// Limit of that queue before any session has used the connection, bytes.
const MAX_QUEUE_UNUSED: usize = 8 << 10;
/// Queue length from which on egress waits, bytes.
const EGRESS_QUEUE: usize = 64 << 10;
/// Limit of unsent bytes in the kernel (`TCP_NOTSENT_LOWAT`), whose queue adds to round trips.
const UNSENT: u32 = 128 << 10;
/// Maximum read at a time, for fairness.
const READ: usize = 64 << 10;
/// Idle timeout of a connection that carries no session's packets.
const IDLE_NS: u64 = 30_000_000_000;
/// Back-off after a failed connect.
const RETRY_NS: u64 = 1_000_000_000;

/// One connection.
struct Connection {
    stream: TcpStream,
    local: IpAddr,
    peer: IpAddr,
    /// The TCP handshake is complete.
    established: bool,
    /// An incomplete packet.
    arrived: Vec<u8>,
    /// Packets queued for writing, each preceded by its length.
    out: Vec<u8>,
    /// Watched for `EPOLLOUT`, too.
    watched: bool,
    /// A session has used it, or will: this host has opened it.
    known: bool,
    /// Time of the latest packet of a session, in either direction.
    used_ns: u64,
}

/// All connections of this host.
#[derive(Default)]
pub(super) struct Tunnels {
    listeners: [Option<TcpListener>; 2],
    connections: BTreeMap<u32, Connection>,
    last: u32,
    /// Peers to which a connect has failed or is in progress, and its time.
    failed: BTreeMap<IpAddr, u64>,
}

fn socket(v6: bool) -> io::Result<OwnedFd> {
    let family = if v6 {
        AddressFamily::Inet6
    } else {
        AddressFamily::Inet
    };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    Ok(socket::socket(
        family,
        SockType::Stream,
        flags,
        SockProtocol::Tcp,
    )?)
}

fn listen(v6: bool) -> io::Result<TcpListener> {
    let fd = socket(v6)?;
    let any: IpAddr = if v6 {
        setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
        Ipv6Addr::UNSPECIFIED.into()
    } else {
        Ipv4Addr::UNSPECIFIED.into()
    };
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    let any = SockaddrStorage::from(SocketAddr::new(any, PORT));
    socket::bind(fd.as_raw_fd(), &any)?;
    socket::listen(&fd, Backlog::new(64)?)?;
    Ok(fd.into())
}

impl Tunnels {
    /// Listens, if no other program has the port.
    pub(super) fn open() -> Self {
        let listeners = [false, true].map(|v6| {
            listen(v6)
                .inspect_err(|error| tracing::info!(%error, v6, port = PORT, "tunnel: cannot listen: no sessions over TCP from peers"))
                .ok()
        });
        Self {
            listeners,
            ..Default::default()
        }
    }

    /// The listening sockets, IPv4 and IPv6.
    pub(super) fn listeners(&self) -> [Option<BorrowedFd<'_>>; 2] {
        let [v4, v6] = &self.listeners;
        [v4, v6].map(|listener| listener.as_ref().map(AsFd::as_fd))
    }

    /// Accepts a peer's connection; `None` if there are no more. `from`: hosts allowed.
    pub(super) fn accept(&mut self, v6: bool, now: u64, from: &[Prefix]) -> Option<u32> {
        loop {
            let (stream, client) = self.listeners[usize::from(v6)].as_ref()?.accept().ok()?;
            let local = stream.local_addr().map(|a| a.ip());
            let peer = client.ip();
            if !admits(from, peer) {
                continue;
            }
            let theirs = self.connections.values().filter(|c| c.peer == peer);
            let network = Network::of(peer);
            let of_network = (self.connections.values()).filter(|c| Network::of(c.peer) == network);
            if peer.is_loopback()
                || self.connections.len() >= MAX_CONNECTIONS
                || theirs.count() >= MAX_OF_PEER
                || of_network.count() >= MAX_OF_NETWORK
            {
                tracing::debug!(%client, "tunnel: refused: too many connections");
                continue;
            }
            let prepared = stream.set_nonblocking(true).and(local);
            match prepared.and_then(|local| self.add(stream, local, peer, true, now)) {
                Ok(number) => return Some(number),
                Err(error) => tracing::debug!(%error, %client, "tunnel: cannot accept"),
            }
        }
    }

    /// Starts a connect to a peer.
    pub(super) fn connect(&mut self, local: IpAddr, peer: IpAddr, now: u64) -> io::Result<u32> {
        self.failed
            .retain(|_, at| now.saturating_sub(*at) < RETRY_NS);
        if self.failed.contains_key(&peer) {
            return Err(Errno::ECONNREFUSED.into());
        }
        self.failed.insert(peer, now);
        let fd = socket(peer.is_ipv6())?;
        let bound = SockaddrStorage::from(SocketAddr::new(local, 0));
        socket::bind(fd.as_raw_fd(), &bound)?;
        let to = SockaddrStorage::from(SocketAddr::new(peer, PORT));
        match socket::connect(fd.as_raw_fd(), &to) {
            Ok(()) | Err(Errno::EINPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        self.add(fd.into(), local, peer, false, now)
    }

    fn add(
        &mut self,
        stream: TcpStream,
        local: IpAddr,
        peer: IpAddr,
        established: bool,
        now: u64,
    ) -> io::Result<u32> {
        stream.set_nodelay(true)?;
        option::set(&stream, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, UNSENT)?;
        self.last = self.last.wrapping_add(1);
        let connection = Connection {
            stream,
            local,
            peer,
            established,
            arrived: Vec::new(),
            out: Vec::new(),
            watched: !established,
            known: !established,
            used_ns: now,
        };
        self.connections.insert(self.last, connection);
        Ok(self.last)
    }

    /// The descriptor of a connection.
    pub(super) fn descriptor(&self, number: u32) -> Option<BorrowedFd<'_>> {
        self.connections.get(&number).map(|c| c.stream.as_fd())
    }

    /// The connection's addresses, this host's first.
    pub(super) fn addresses(&self, number: u32) -> Option<[IpAddr; 2]> {
        self.connections.get(&number).map(|c| [c.local, c.peer])
    }

    /// Whether the connection has room for egress.
    pub(super) fn has_room(&self, number: u32) -> bool {
        let connection = self.connections.get(&number);
        connection.is_some_and(|c| c.established && c.out.len() < EGRESS_QUEUE)
    }

    /// Whether the TCP handshake is complete.
    pub(super) fn is_established(&self, number: u32) -> bool {
        self.connections.get(&number).is_some_and(|c| c.established)
    }

    /// Whether to watch for writability, as data are queued or the handshake is in progress; `None` if that is
    /// unchanged. The initial state: watched if this host connects.
    pub(super) fn watch(&mut self, number: u32) -> Option<bool> {
        let connection = self.connections.get_mut(&number)?;
        let waits = !connection.established || !connection.out.is_empty();
        let before = std::mem::replace(&mut connection.watched, waits);
        (waits != before).then_some(waits)
    }

    /// Notes that a session uses the connection.
    pub(super) fn note_use(&mut self, number: u32, now: u64) {
        if let Some(connection) = self.connections.get_mut(&number) {
            (connection.known, connection.used_ns) = (true, now);
        }
    }

    /// Queues a packet; drops it if it is too long or the queue is full.
    ///
    /// # Errors
    /// There is no such connection.
    pub(super) fn send(&mut self, number: u32, packet: &[u8]) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        let max = if connection.known {
            MAX_QUEUE
        } else {
            MAX_QUEUE_UNUSED
        };
        let head = Records::PACKETS.head(packet.len());
        if let Some(head) = head.filter(|_| connection.out.len() + packet.len() <= max) {
            connection.out.extend(head);
            connection.out.extend(packet);
        }
        Ok(())
    }

    /// Writes the queue. Detects the end of the handshake, too.
    ///
    /// # Errors
    /// The connection has broken.
    pub(super) fn flush(&mut self, number: u32) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        if !connection.established {
            match connection.stream.peer_addr() {
                Ok(_) => connection.established = true,
                Err(_) => {
                    return match connection.stream.take_error()? {
                        Some(error) => Err(error),
                        None => Ok(()), // not yet
                    };
                }
            }
        }
        self.failed.remove(&connection.peer);
        let mut written = 0;
        let result = loop {
            match connection.stream.write(&connection.out[written..]) {
                Ok(0) => break Ok(()),
                Ok(n) => written += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        connection.out.drain(..written);
        result
    }

    /// Reads once. `packets`, empty before, receives the complete packets, each preceded by its length.
    ///
    /// # Errors
    /// The connection has ended, or its data are malformed.
    pub(super) fn receive(&mut self, number: u32, packets: &mut Vec<u8>) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(&number) else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        packets.append(&mut connection.arrived);
        let before = packets.len();
        packets.resize(before + READ, 0);
        let read = connection.stream.read(&mut packets[before..]);
        packets.truncate(before + *read.as_ref().unwrap_or(&0));
        let (whole, result) = Records::PACKETS.count(packets);
        // Most connections are idle: buffer incomplete packets only.
        connection.arrived = packets.split_off(whole);
        match read {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
            _ => result.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)),
        }
    }

    /// Closes a connection.
    pub(super) fn close(&mut self, number: u32) {
        self.connections.remove(&number);
    }

    /// Closes idle connections.
    pub(super) fn sweep(&mut self, now: u64) {
        self.connections
            .retain(|_, c| now.saturating_sub(c.used_ns) < IDLE_NS);
    }
}
