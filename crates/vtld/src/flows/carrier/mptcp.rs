//! The kernel's MPTCP (RFC 8684) as a carrier: one connection between the daemons. Its paths are configured in the
//! system (`ip mptcp endpoint`).
//!
//! The connection begins with the token; the rest is in records if it is sealed. If a middlebox strips MPTCP's options,
//! it falls back to TCP, and works.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    rc::Rc,
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use nix::sys::socket::{Backlog, SockaddrStorage, bind, connect, listen, setsockopt, sockopt};
use tokio::{
    io::{Interest, unix::AsyncFd},
    task::spawn_local,
    time::{Instant, interval, sleep, timeout},
};
use vtl_proto::{
    carrier::Kind,
    frame::{HEADER, Side},
    keys::Secret,
    preamble,
};

use super::{
    super::socket::{Listening, connected, read_exact, unacknowledged, watch},
    Arrivals, Endpoint, Expected, Grant, Grantor, HANDSHAKE, Link, Local, SILENCE, Shown, TICK,
    ToOpen, bind_any,
    framed::{Arrived, Framed, Out, Pipe},
    sealed, secret,
};
use crate::{
    broker::{random_token, set_linger},
    netmon, option,
};

/// Maximum size of a chunk, bytes.
const CHUNK: usize = (16 << 10) - HEADER;
/// Maximum size of a read, bytes.
const READ: usize = 64 << 10;
/// Maximum number of connections waiting for their token.
const HALF_OPEN: usize = 256;
/// Unsent bytes in the socket buffer (`TCP_NOTSENT_LOWAT`): few, so that a new flow does not wait behind seconds of
/// another's bytes.
const UNSENT: libc::c_int = 128 << 10;
/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);

/// Outstanding grants, by token.
type Grants = Rc<RefCell<HashMap<u64, Expected>>>;

/// This host's endpoint of all connections.
pub(super) struct Mptcp {
    port: u16,
    grants: Grants,
    /// Pipes of the open connections.
    pipes: Rc<RefCell<Vec<Rc<Pipe>>>>,
}

/// A non-blocking MPTCP socket.
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
fn begin(local: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let fd = socket(to.ip())?;
    let from = SockaddrStorage::from(SocketAddr::new(local, 0));
    bind(fd.as_raw_fd(), &from)?;
    setsockopt(&fd, sockopt::TcpNoDelay, &true)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) | Err(nix::Error::EINPROGRESS) => Ok(fd.into()),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens the listener.
fn listener() -> io::Result<TcpListener> {
    let fd = bind_any(socket)?;
    listen(&fd, Backlog::MAXCONN)?;
    Ok(fd.into())
}

impl Mptcp {
    pub(super) fn start(arrivals: Arrivals) -> io::Result<Self> {
        let listener = listener()?;
        let port = listener.local_addr()?.port();
        let mptcp = Self {
            port,
            grants: Rc::default(),
            pipes: Rc::default(),
        };
        let (grants, pipes) = (Rc::clone(&mptcp.grants), Rc::clone(&mptcp.pipes));
        spawn_local(accept(watch(Listening(listener))?, grants, pipes, arrivals));
        Ok(mptcp)
    }
}

impl Grantor for Mptcp {
    fn grant(&self, client: IpAddr, rtt: Option<Duration>, seals: bool) -> io::Result<Grant> {
        let grant = Grant {
            port: self.port,
            token: random_token(),
            crypto: secret(seals),
        };
        let expected = grant.expected(client, rtt);
        self.grants.borrow_mut().insert(grant.token, expected);
        Ok(grant)
    }

    fn revoke(&self, token: u64) {
        self.grants.borrow_mut().remove(&token);
    }
}

impl Endpoint for Mptcp {
    fn grantor(&self) -> Option<&dyn Grantor> {
        Some(self)
    }

    fn connect(&self, opening: ToOpen) -> Local<'_, io::Result<Box<dyn Link>>> {
        let ToOpen {
            granted,
            local,
            rtt,
            ..
        } = opening;
        Box::pin(async move {
            // MPTCP chooses further addresses itself.
            let socket = watch(begin(local, granted.to)?)?;
            let opened = timeout(HANDSHAKE, connected(&socket)).await;
            opened.map_err(|_| io::ErrorKind::TimedOut)??;
            socket
                .get_ref()
                .write_all(&preamble::token(granted.token))?;
            let carrier = carrier(socket, rtt, &granted.crypto, Side::Local, &self.pipes);
            Ok(Box::new(carrier) as Box<dyn Link>)
        })
    }

    fn close(&self) {
        self.pipes.borrow().iter().for_each(|pipe| pipe.end());
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        // The kernel tells the peers.
        Box::pin(async {})
    }
}

/// Accepts connections of clients that hold a grant.
async fn accept(
    listener: AsyncFd<Listening>,
    grants: Grants,
    pipes: Rc<RefCell<Vec<Rc<Pipe>>>>,
    arrivals: Arrivals,
) {
    let half_open = Rc::new(Cell::new(0));
    loop {
        let next = |socket: &Listening| socket.0.accept();
        let (stream, from) = match listener.async_io(Interest::READABLE, next).await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::debug!(%error, "carrier: cannot accept an MPTCP connection");
                sleep(PAUSE).await;
                continue;
            }
        };
        let address = from.ip().to_canonical();
        let is_expected = grants.borrow().values().any(|e| e.client == address);
        if !is_expected || half_open.get() >= HALF_OPEN {
            continue;
        }
        half_open.set(half_open.get() + 1);
        let (grants, pipes) = (Rc::clone(&grants), Rc::clone(&pipes));
        let (half_open, arrivals) = (Rc::clone(&half_open), arrivals.clone());
        spawn_local(async move {
            let shown = timeout(HANDSHAKE, shown(stream)).await;
            half_open.set(half_open.get() - 1);
            let Ok(Ok((socket, token))) = shown else {
                return;
            };
            let granted = grants.borrow().get(&token).cloned();
            let Some(expected) = granted.filter(|expected| expected.client == address) else {
                return;
            };
            grants.borrow_mut().remove(&token);
            let Expected { rtt, crypto, .. } = expected;
            let carrier = carrier(socket, rtt, &crypto, Side::Peer, &pipes);
            // Fails if the daemon is ending.
            let _ = arrivals.send((Shown::Token(token), Box::new(carrier)));
        });
    }
}

/// Reads the client's token.
async fn shown(stream: TcpStream) -> io::Result<(AsyncFd<TcpStream>, u64)> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let socket = watch(stream)?;
    let token = preamble::shown(read_exact(&socket).await?);
    Ok((socket, token))
}

/// Starts a connection as a carrier. `opener`: the side that has opened it.
fn carrier(
    socket: AsyncFd<TcpStream>,
    rtt: Option<Duration>,
    crypto: &Secret,
    opener: Side,
    pipes: &Rc<RefCell<Vec<Rc<Pipe>>>>,
) -> Framed {
    // Keepalive: `dead` sees unacknowledged bytes only.
    option::keep_asking(socket.get_ref());
    // Fails on kernels before 6.10.
    let _ = option::set(
        socket.get_ref(),
        libc::IPPROTO_TCP,
        libc::TCP_NOTSENT_LOWAT,
        UNSENT,
    );
    let socket = Rc::new(socket);
    let known = Rc::downgrade(&socket);
    let counters = netmon::mptcp();
    let pipe = Pipe::new(HEADER + CHUNK);
    pipes.borrow_mut().push(Rc::clone(&pipe));
    let (driven, pipes) = (Rc::clone(&pipe), Rc::clone(pipes));
    let (sealing, opening) = sealed::records(crypto, opener).unzip();
    let is_encrypted = sealing.is_some();
    spawn_local(async move {
        let written = Cell::new(0);
        tokio::select! {
            () = write(&socket, &driven, sealing, &written) => {}
            () = read(&socket, &driven, opening) => {}
            () = dead(&socket, &driven, &written, rtt.unwrap_or_default()) => {
                let peer = socket.get_ref().peer_addr().ok();
                tracing::info!(?peer, carrier = %Kind::Mptcp, "carrier: closed: timeout, nothing acknowledged");
            }
        }
        // Reset: bytes in flight are retransmitted by another path.
        set_linger(socket.get_ref(), true);
        driven.end();
        pipes
            .borrow_mut()
            .retain(|other| !Rc::ptr_eq(other, &driven));
    });
    Framed {
        kind: Kind::Mptcp,
        pipe,
        is_encrypted,
        library: Box::new(|| 0),
        figures: Box::new(move || counters(known.upgrade()?.get_ref())),
    }
}

/// Sends the pipe's frames until the carrier ends.
async fn write(
    socket: &AsyncFd<TcpStream>,
    pipe: &Pipe,
    mut sealing: Option<sealed::Writer>,
    written: &Cell<usize>,
) {
    while !pipe.is_over() {
        let Some(Out::Control(mut bytes) | Out::Chunk(mut bytes)) = pipe.next() else {
            pipe.work.notified().await;
            continue;
        };
        if let Some(writer) = &mut sealing {
            bytes = writer.seal(&bytes);
        }
        while !bytes.is_empty() {
            let write = |mut socket: &TcpStream| socket.write(&bytes);
            match socket.async_io(Interest::WRITABLE, write).await {
                Ok(n) => {
                    written.set(written.get() + n);
                    bytes.advance(n);
                }
                Err(_) => return,
            }
        }
    }
}

/// Receives bytes until the connection ends.
async fn read(socket: &AsyncFd<TcpStream>, pipe: &Pipe, mut opening: Option<sealed::Reader>) {
    loop {
        while !pipe.has_room() {
            pipe.taken().await;
        }
        let read = |mut socket: &TcpStream| {
            let mut bytes = BytesMut::zeroed(READ);
            let n = socket.read(&mut bytes)?;
            bytes.truncate(n);
            Ok(bytes.freeze())
        };
        match socket.async_io(Interest::READABLE, read).await {
            Ok(bytes) if !bytes.is_empty() => {
                let bytes = match &mut opening {
                    // Copied to free the rest of the buffer.
                    None => Bytes::copy_from_slice(&bytes),
                    Some(reader) => match reader.open(&bytes) {
                        Ok(opened) => opened,
                        Err(error) => {
                            return tracing::warn!(%error, carrier = %Kind::Mptcp, "carrier: closed: authentication of its bytes failed");
                        }
                    },
                };
                if !bytes.is_empty() {
                    pipe.arrived(Arrived::Stream(bytes));
                }
            }
            _ => return,
        }
    }
}

/// Completes when bytes have been unacknowledged for too long, or the carrier has ended.
async fn dead(socket: &AsyncFd<TcpStream>, pipe: &Pipe, written: &Cell<usize>, rtt: Duration) {
    let mut ticks = interval(TICK);
    let mut before = 0;
    let mut since = Instant::now();
    while !pipe.is_over() {
        ticks.tick().await;
        let left = unacknowledged(socket.get_ref());
        let acknowledged = written.get().saturating_sub(left);
        if left == 0 || acknowledged > before {
            since = Instant::now();
        }
        before = acknowledged;
        // The handshake's may have been measured on an idle path.
        let now = option::tcp_rtt(socket.get_ref()).unwrap_or_default();
        if since.elapsed() > SILENCE + 3 * rtt.max(now) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tokio::task::LocalSet;

    use super::{super::CLEAR, *};

    #[test]
    fn carrier__is_probed_while_it_is_idle() {
        let Ok(listener) = listener() else {
            return vtl_testing::skip("this kernel has no MPTCP");
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        LocalSet::new().block_on(&runtime, async {
            let to = SocketAddr::new(
                Ipv4Addr::LOCALHOST.into(),
                listener.local_addr().unwrap().port(),
            );
            let stream = begin(to.ip(), to).unwrap();
            let shown = stream.try_clone().unwrap();
            let pipes = Rc::default();
            let _carrier = carrier(
                watch(stream).unwrap(),
                None,
                &CLEAR.into(),
                Side::Local,
                &pipes,
            );
            let is_on = nix::sys::socket::getsockopt(&shown, sockopt::KeepAlive).unwrap();
            assert!(is_on);
        });
    }
}
