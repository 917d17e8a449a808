//! Connects to the real destinations, and discovery of VTL there.
//!
//! The SYN carries the TCP option (`VTL_OPT_KIND`); a SYN/ACK with it comes from a VTL daemon. A
//! network that drops such SYNs costs one [`Config::offer_timeout`] per destination.
//!
//! [`Config::offer_timeout`]: super::Config::offer_timeout

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use vtl_proto::frame::FlowName;

use super::{
    Shared, gateway,
    held::{Forwarded, HeldConnect},
    sock,
};

/// At a gateway: how long a host behind it may take to answer a connect from beyond the hop,
const SILENT_INSIDE: Duration = Duration::from_secs(5);
/// and one beyond the hop. Then the place is another's, and a SYN that comes again begins anew.
const SILENT_OUTSIDE: Duration = Duration::from_secs(30);

/// A connect to a real destination that is in progress.
pub(super) struct Attempt {
    pub(super) held: HeldConnect,
    pub(super) socket: OwnedFd,
    cookie: u64,
    offer: Option<FlowName>,
    /// Timeout of the option, if it is sent: then a SYN without it is tried; or of a forwarded connect.
    pub(super) deadline: Option<Instant>,
}

/// A successful attempt.
pub(super) struct Connected {
    pub(super) held: HeldConnect,
    pub(super) stream: TcpStream,
    /// The name in the SYN, if the peer understands the option.
    pub(super) understood: Option<FlowName>,
}

/// Finds the local address by which the destination is reached, for getsockname. True if the
/// destination is this host, where no other daemon can be.
pub(super) fn find_source(held: &mut HeldConnect) -> io::Result<bool> {
    let port = held.src().port();
    let ip = match held.bound() {
        Some(bound) => bound.ip(),
        None => sock::route_source(held.dest(), held.mark())?,
    };
    held.set_src(SocketAddr::new(ip, port));
    Ok(ip == held.dest().ip())
}

/// Whether the route to the destination uses an interface that VTL is enabled on. Call after [`find_source`].
pub(super) fn is_inside(shared: &Shared, held: &HeldConnect) -> bool {
    let scope = &shared.config.scope;
    scope.leads_to(held.dest().ip(), held.src().ip(), held.mark())
}

/// Begins to connect; gives the held connect back if that fails at once.
pub(super) fn start(
    shared: &Shared,
    mut held: HeldConnect,
    offer: Option<FlowName>,
) -> Result<Attempt, (HeldConnect, io::Error)> {
    let opened = match held.is_forwarded() {
        true => gateway::open(shared, &held, offer),
        false => open(shared, &held, offer),
    };
    match opened {
        Ok((socket, cookie)) => {
            show_port(&mut held, &socket);
            // Twice as long for a peer whose path is known to pass the option: there loss is the likelier reason. At
            // 7 % loss each way, three of ten thousand handshakes take longer.
            let known = shared.broker.knows(held.dest().ip());
            let patience = shared.config.offer_timeout * if known { 2 } else { 1 };
            let patience = match (offer, held.forwarded()) {
                // The gateway before this one may wait for no longer than that, and must not be first to give up.
                (Some(_), Some(Forwarded::Outside(_))) => Some(shared.config.offer_timeout / 2),
                (Some(_), _) => Some(patience),
                (None, None) => None,
                (None, Some(Forwarded::Inside)) => Some(SILENT_OUTSIDE),
                (None, Some(Forwarded::Outside(_))) => Some(SILENT_INSIDE),
            };
            let deadline = patience.map(|patience| Instant::now() + patience);
            Ok(Attempt {
                held,
                socket,
                cookie,
                offer,
                deadline,
            })
        }
        Err(error) => Err((held, error)),
    }
}

/// Begins to connect to `dest`, without a held connect and without the option.
pub(super) fn connect_plain(shared: &Shared, dest: SocketAddr) -> io::Result<TcpStream> {
    let socket = sock::tcp(dest.ip())?;
    sock::tune(&socket)?;
    let cookie = sock::cookie(&socket)?;
    shared.maps.own(cookie, None).map_err(io::Error::other)?;
    let connected = sock::connect(&socket, dest);
    shared.maps.disown(cookie);
    connected.map(|()| socket.into())
}

/// Begins to open an association's control connection from the local address `from`, which is another host's if this
/// one `forwards`.
pub(super) fn connect_control(
    shared: &Shared,
    from: IpAddr,
    dest: SocketAddr,
    name: FlowName,
    forwards: bool,
) -> io::Result<TcpStream> {
    if forwards {
        return gateway::connect_control(shared, from, dest, name);
    }
    let socket = sock::tcp(dest.ip())?;
    sock::tune(&socket)?;
    sock::bind(&socket, SocketAddr::new(from, 0), false)?;
    let cookie = sock::cookie(&socket)?;
    shared
        .maps
        .own(cookie, Some(name))
        .map_err(io::Error::other)?;
    if let Err(error) = sock::connect(&socket, dest) {
        shared.maps.disown(cookie);
        return Err(error);
    }
    Ok(socket.into())
}

/// Whether the peer of a connection made by [`connect_control`], now established, has understood its option.
pub(super) fn is_understood(shared: &Shared, stream: &TcpStream) -> bool {
    let Ok(cookie) = sock::cookie(stream) else {
        return false;
    };
    let understood = shared.maps.understood(cookie).is_some();
    if !understood {
        // Else the entry stays: the option is sent until data is acknowledged.
        shared.maps.disown(cookie);
    }
    understood
}

/// Maximum number of spare ports tried for a connection: other programs may use some.
const SPARE_ATTEMPTS: usize = 16;

/// Choice of a connection's local port.
#[derive(Clone, Copy)]
enum Port {
    /// The application's port, bound explicitly; shared with other connections of vtld.
    Shared,
    /// The application's port, bound at connect time; shared with ephemeral connections of other programs, which
    /// block an explicit bind up to a minute after their end.
    Chosen,
    /// A port outside the ephemeral range.
    Spare(u16),
    Any,
}

fn open(
    shared: &Shared,
    held: &HeldConnect,
    offer: Option<FlowName>,
) -> io::Result<(OwnedFd, u64)> {
    // Preferably the application's port, which its getsockname shows already. Another one if it is in use, or if an
    // earlier connection to the same destination is in TIME_WAIT.
    let taken = |error: &io::Error| {
        let errno = error.raw_os_error();
        matches!(errno, Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL))
    };
    // An explicitly bound port can be reused at once despite TIME_WAIT, as TCP's timestamps tell the two connections
    // apart (RFC 6191). But the kernel then withholds it from automatic allocation until a minute after the last
    // user: so ephemeral ports are never bound explicitly, unless the application has done so.
    let is_asked = held.bound().is_some() || !shared.clients().is_given(held.src().port());
    let own = [Port::Shared, Port::Chosen];
    for port in if is_asked { &own[..] } else { &own[1..] } {
        match open_from(shared, held, offer, *port) {
            Err(error) if taken(&error) => (),
            result => return result,
        }
    }
    for _ in 0..if is_asked { 0 } else { SPARE_ATTEMPTS } {
        let Some(port) = shared.clients().take_spare() else {
            break;
        };
        match open_from(shared, held, offer, Port::Spare(port)) {
            Err(error) if taken(&error) => (),
            result => return result,
        }
    }
    open_from(shared, held, offer, Port::Any)
}

/// Updates the port that the application's getsockname shows to the one that the peer sees.
fn show_port(held: &mut HeldConnect, socket: &OwnedFd) {
    if let Ok(local) = sock::local(socket)
        && local.port() != held.src().port()
    {
        held.set_src(SocketAddr::new(held.src().ip(), local.port()));
    }
}

fn open_from(
    shared: &Shared,
    held: &HeldConnect,
    offer: Option<FlowName>,
    port: Port,
) -> io::Result<(OwnedFd, u64)> {
    let socket = sock::tcp(held.dest().ip())?;
    sock::tune(&socket)?;
    if held.mark() != 0 {
        sock::mark(&socket, held.mark())?;
    }
    let any = SocketAddr::new(held.src().ip(), 0);
    match port {
        Port::Shared => sock::bind(&socket, held.src(), true)?,
        Port::Chosen => sock::bind_when_connecting(&socket, any, held.src().port())?,
        Port::Spare(port) => sock::bind(&socket, SocketAddr::new(held.src().ip(), port), true)?,
        Port::Any if held.bound().is_some() => sock::bind(&socket, any, false)?,
        Port::Any => (),
    }
    let cookie = sock::cookie(&socket)?;
    shared.maps.own(cookie, offer).map_err(io::Error::other)?;
    if let Err(error) = sock::connect(&socket, held.dest()) {
        shared.maps.disown(cookie);
        return Err(error);
    }
    Ok((socket, cookie))
}

impl Attempt {
    /// Evaluates the attempt, once the socket is writable or has failed.
    pub(super) fn finish(self, shared: &Shared) -> Result<Connected, (HeldConnect, io::Error)> {
        let understood = self.offer.and_then(|_| shared.maps.understood(self.cookie));
        if understood.is_none() {
            // Else the entry stays: the option is sent until data is acknowledged.
            shared.maps.disown(self.cookie);
        }
        if let Err(error) = sock::take_error(&self.socket) {
            return Err((self.held, error));
        }
        Ok(Connected {
            held: self.held,
            stream: self.socket.into(),
            understood,
        })
    }

    /// Abandons the attempt, and returns the held connect for another one.
    pub(super) fn cancel(self, shared: &Shared) -> HeldConnect {
        shared.maps.disown(self.cookie);
        self.held
    }
}
