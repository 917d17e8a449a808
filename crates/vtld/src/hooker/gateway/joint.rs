//! The middle of a chain of gateways: a flow that came by one hop goes on over another.
//!
//! Each hop has a flow and an association of its own, whose carrier this host chooses for that hop. Between the two
//! flows is a TCP connection on the loopback, in the place of an application to both: so half-close, resets, urgent data
//! and back-pressure pass through.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    os::fd::OwnedFd,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::sys::socket::{setsockopt, sockopt};
use vtl_proto::frame::FlowName;

use super::super::{ServerFlow, Shared, held::Accepted, sock, steering};

/// How long a handshake on the loopback may take: the kernel completes it in `connect`, unless a packet filter is in the
/// way.
const PATIENCE: Duration = Duration::from_millis(20);

/// Buffers of each end, bytes, of which the kernel takes twice as many. They are enough for the loopback, and beside what
/// the memory of flows counts.
const BUFFER: usize = 256 << 10;

fn tune(socket: &OwnedFd) -> io::Result<()> {
    sock::tune_local(socket)?;
    setsockopt(socket, sockopt::RcvBuf, &BUFFER)?;
    Ok(setsockopt(socket, sockopt::SndBuf, &BUFFER)?)
}

/// Both ends of a connection on the loopback, non-blocking.
pub(in super::super) struct Joint {
    near: TcpStream,
    far: TcpStream,
}

impl Joint {
    /// Connects, at a second attempt if need be: a port may be that of the Hooker's own listener, which takes what comes
    /// to it on the loopback.
    ///
    /// # Errors
    /// No descriptors, or the loopback is filtered.
    pub(in super::super) fn open(shared: &Shared) -> io::Result<Self> {
        Self::attempt(shared).or_else(|_| Self::attempt(shared))
    }

    fn attempt(shared: &Shared) -> io::Result<Self> {
        // An address of its own, of the loopback's 127.64.0.0/10: no port is used up by connections in TIME_WAIT, and
        // nobody else knows where it listens.
        let host = getrandom::u32()? & 0x003f_ffff;
        let ip: IpAddr = Ipv4Addr::from_bits(Ipv4Addr::new(127, 64, 0, 0).to_bits() | host).into();
        let listener = sock::tcp(ip)?;
        tune(&listener)?;
        sock::bind(&listener, SocketAddr::new(ip, 0), false)?;
        let listener = sock::listen(listener)?;
        let far = sock::tcp(ip)?;
        tune(&far)?;
        let cookie = sock::cookie(&far)?;
        shared.maps.own(cookie, None).map_err(io::Error::other)?;
        let connected = listener.local_addr().and_then(|to| sock::connect(&far, to));
        shared.maps.disown(cookie);
        connected?;
        let far = TcpStream::from(far);
        let (began, own) = (Instant::now(), far.local_addr()?);
        loop {
            match listener.accept() {
                Ok((near, from)) if from == own => {
                    sock::tune_local(&near)?;
                    near.set_nonblocking(true)?;
                    return Ok(Self { near, far });
                }
                // Another program's, which is closed.
                Ok(_) => {}
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && began.elapsed() < PATIENCE =>
                {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// What to do with the connection from beyond the first hop, between `client` and `dest`, whose SYN had this name: it
/// becomes a flow, and `accepted`, which begins the next hop's, gets the end of `joint` that is an application's to it.
pub(in super::super) fn join(
    shared: Arc<Shared>,
    [client, dest]: [SocketAddr; 2],
    name: FlowName,
    joint: Joint,
    accepted: Accepted,
) -> Accepted {
    let join = move |outer: TcpStream| -> io::Result<TcpStream> {
        match steering::client_says(&shared, &outer)? {
            Some(said) if said == name => {
                let Joint { near, far } = joint;
                shared.broker.server(ServerFlow {
                    peer: outer,
                    dest,
                    client,
                    name,
                    forwarded: Some(Some(near)),
                });
                Ok(far)
            }
            // A middlebox stripped the option from our SYN/ACK: plain TCP on the first hop.
            None => Ok(outer),
            // Its SYN, too, decided on what was done: both must say the same.
            Some(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    };
    Box::new(move |outer| accepted(outer.and_then(join)))
}
