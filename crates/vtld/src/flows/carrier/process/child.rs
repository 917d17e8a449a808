//! A process of carriers: parses the packets of QUIC, SCTP, KCP or stacks with a library, and may do nothing else. vtld passes
//! sockets to it and receives frames from it, which it trusts no more than peers.

use std::{
    cell::RefCell,
    collections::HashMap,
    io::{self, IoSliceMut},
    net::UdpSocket,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    os::unix::net::UnixStream,
    rc::Rc,
    time::Duration,
};

use bytes::BytesMut;
use nix::{
    cmsg_space,
    sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, send},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, oneshot},
    task::{LocalSet, spawn_local},
    time::{interval, timeout},
};
use vtl_proto::carrier::Kind;

use super::{
    super::{
        super::socket::watch,
        Expected, TICK,
        framed::{Arrived, Out, Pipe},
        kcp,
        library::{Certificate, Library, Opened, Opening},
        quic, sctp, stack,
    },
    confine,
    message::{Channel, SETUP, Setup},
    pipeline,
    wire::{BATCH, Figures, Tag, emit},
};
use crate::panics;

/// Heartbeat interval.
const BEAT: Duration = Duration::from_secs(2);
/// Timeout of telling peers about the end.
const FAREWELL: Duration = Duration::from_millis(150);

/// The library, and the carriers that wait for their peers.
struct Carriers {
    library: Box<dyn Library>,
    /// Tasks that wait for a peer to open a carrier, by token.
    expected: RefCell<HashMap<u64, oneshot::Sender<Opened>>>,
}

impl Carriers {
    fn start(
        kind: Kind,
        certificate: Option<Certificate>,
        max_ahead: u64,
        socket: UdpSocket,
    ) -> io::Result<Rc<Self>> {
        let (arrivals, mut arrived) = mpsc::unbounded_channel();
        let library: Box<dyn Library> = match (kind, certificate) {
            (Kind::Quic, Some(certificate)) => Box::new(quic::Here::start(
                socket,
                &certificate,
                max_ahead,
                arrivals,
            )?),
            (Kind::Sctp, None) => Box::new(sctp::Sctp::start(socket, arrivals)?),
            (Kind::Kcp, None) => Box::new(kcp::Kcp::start(kcp::Plain, socket, arrivals)?),
            (Kind::Stack, None) => Box::new(stack::Stacks::start(
                stack::Layered::load(),
                socket,
                arrivals,
            )?),
            _ => return Err(io::ErrorKind::Unsupported.into()),
        };
        let running = Rc::new(Self {
            library,
            expected: RefCell::default(),
        });
        let arriving = Rc::clone(&running);
        spawn_local(async move {
            while let Some((token, opened)) = arrived.recv().await {
                let waiting = arriving.expected.borrow_mut().remove(&token);
                // A carrier revoked meanwhile is dropped, which ends it.
                let _ = waiting.map(|waiting| waiting.send(opened));
            }
        });
        Ok(running)
    }

    async fn open(self: Rc<Self>, opening: Opening, channel: Channel) {
        let opened = tokio::select! {
            opened = self.library.connect(opening) => opened,
            // Cancelled by vtld.
            _ = channel.next() => return,
        };
        match opened {
            Ok(opened) => relay(channel, opened).await,
            Err(error) => {
                let mut refused = BytesMut::new();
                emit(&mut refused, Tag::Refused, error.to_string().as_bytes());
                let _ = channel.write(&refused).await;
            }
        }
    }

    async fn layer(self: Rc<Self>, layers: String, mtu: usize, channel: Channel) {
        match self.library.layers(&layers, mtu) {
            Ok(pipeline) => pipeline::run(channel, pipeline).await,
            Err(why) => {
                let mut refused = BytesMut::new();
                emit(&mut refused, Tag::Refused, why.as_bytes());
                let _ = channel.write(&refused).await;
            }
        }
    }

    async fn expect(self: Rc<Self>, expected: Expected, channel: Channel) {
        let token = expected.token;
        let (arrives, arrived) = oneshot::channel();
        self.expected.borrow_mut().insert(token, arrives);
        self.library.expect(expected);
        tokio::select! {
            Ok(opened) = arrived => relay(channel, opened).await,
            _ = channel.next() => {
                self.library.revoke(token);
                self.expected.borrow_mut().remove(&token);
            }
        }
    }
}

/// Relays between vtld and the library until the carrier ends.
async fn relay(channel: Channel, opened: Opened) {
    let mut first = BytesMut::new();
    let frame = opened.pipe.frame as u32;
    emit(&mut first, Tag::Opened, &frame.to_le_bytes());
    if channel.write(&first).await.is_ok() {
        tokio::select! {
            () = to_library(&channel, &opened.pipe) => {}
            () = to_vtld(&channel, &opened) => {}
        }
    }
}

async fn to_library(channel: &Channel, pipe: &Pipe) {
    while let Ok((tag, body)) = channel.next().await {
        match tag {
            Tag::Control => pipe.push(Out::Control(body)),
            Tag::Chunk => pipe.push(Out::Chunk(body)),
            _ => return,
        }
    }
}

async fn to_vtld(channel: &Channel, opened: &Opened) {
    let mut told = Figures::default();
    let mut ticks = interval(TICK);
    loop {
        let mut messages = BytesMut::new();
        tokio::select! {
            news = opened.pipe.news() => {
                let Some((arrived, taken)) = news else {
                    return;
                };
                for what in arrived {
                    match &what {
                        Arrived::Stream(bytes) => {
                            for part in bytes.chunks(BATCH) {
                                emit(&mut messages, Tag::Stream, part);
                            }
                        }
                        Arrived::Frame(bytes) => emit(&mut messages, Tag::Frame, bytes),
                    }
                    if messages.len() >= BATCH {
                        if channel.write(&messages).await.is_err() {
                            return;
                        }
                        messages.clear();
                    }
                    opened.pipe.seen(&what);
                }
                if taken > 0 {
                    emit(&mut messages, Tag::Taken, &taken.to_le_bytes());
                }
            }
            _ = ticks.tick() => {
                let figures = Figures {
                    path: (opened.path)(),
                    memory: (opened.memory)() + opened.pipe.memory(),
                };
                if figures != told {
                    let mut body = Vec::new();
                    // Writing to memory cannot fail.
                    let _ = ciborium::into_writer(&figures, &mut body);
                    emit(&mut messages, Tag::Figures, &body);
                    told = figures;
                }
            }
        }
        if channel.write(&messages).await.is_err() {
            return;
        }
    }
}

/// Receives a set-up message and its descriptor. `None`: out of descriptors; that carrier is given up.
///
/// # Errors
/// Also when vtld has closed the socket.
fn receive(socket: &OwnedFd) -> io::Result<Option<(Setup, OwnedFd)>> {
    let mut bytes = [0; SETUP];
    let mut slices = [IoSliceMut::new(&mut bytes)];
    let mut space = cmsg_space!([RawFd; 1]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let received = recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
    // Without a free descriptor the kernel leaves the message's out, and says so by this flag, which nix takes for an
    // error.
    let has_given = !received.flags.contains(MsgFlags::MSG_CTRUNC);
    let controls = has_given.then(|| received.cmsgs()).transpose()?;
    let mut given = None;
    for control in controls.into_iter().flatten() {
        if let ControlMessageOwned::ScmRights(rights) = control {
            // SAFETY: the kernel has just made them for this process.
            let owned = |fd: RawFd| unsafe { OwnedFd::from_raw_fd(fd) };
            given = rights.into_iter().map(owned).next_back();
        }
    }
    let len = received.bytes;
    if len == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let setup = ciborium::from_reader(&bytes[..len]);
    let setup = setup.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(given.map(|given| (setup, given)))
}

/// Serves vtld until it closes its socket.
async fn serve(socket: AsyncFd<OwnedFd>) -> io::Result<()> {
    let next = || socket.async_io(Interest::READABLE, receive);
    let carriers = match next().await? {
        Some((
            Setup::Start {
                kind,
                certificate,
                max_ahead,
            },
            given,
        )) => Carriers::start(kind, certificate, max_ahead, given.into())?,
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    // After the library has probed the socket's features, and before it receives anything.
    confine::forbid_calls()?;
    let beats = async {
        let mut ticks = interval(BEAT);
        loop {
            ticks.tick().await;
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            // A full queue holds enough of them.
            let _ = send(socket.get_ref().as_raw_fd(), &[0], flags);
        }
    };
    tokio::select! {
        () = obey(&carriers, next) => {}
        () = beats => {}
    }
    carriers.library.close();
    let _ = timeout(FAREWELL, carriers.library.wait_idle()).await;
    Ok(())
}

/// Executes set-up messages until vtld closes the socket.
async fn obey(
    carriers: &Rc<Carriers>,
    next: impl AsyncFn() -> io::Result<Option<(Setup, OwnedFd)>>,
) {
    while let Ok(setup) = next().await {
        let Some((setup, given)) = setup else {
            tracing::error!(
                "carrier process: no file descriptor left for a carrier: raise LimitNOFILE="
            );
            continue;
        };
        let channel = match Channel::new(UnixStream::from(given)) {
            Ok(channel) => channel,
            Err(error) => {
                tracing::error!(%error, "carrier process: cannot set up a carrier");
                continue;
            }
        };
        let carriers = Rc::clone(carriers);
        match setup {
            Setup::Start { .. } => return,
            Setup::Open(opening) => drop(spawn_local(carriers.open(opening, channel))),
            Setup::Expect(expected) => drop(spawn_local(carriers.expect(expected, channel))),
            Setup::Layers { layers, mtu } => {
                let running = panics::isolated(carriers.layer(layers, mtu, channel));
                drop(spawn_local(running));
            }
        }
    }
}

/// Runs the process; its standard input is the socket to vtld. All threads that it needs must have been started.
///
/// # Errors
/// It cannot be confined, or the kind of carrier cannot be started.
pub fn run() -> io::Result<()> {
    // Close descriptors that vtld itself has inherited.
    let first = libc::STDERR_FILENO + 1;
    // SAFETY: nothing was opened yet.
    unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, 0) };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    // SAFETY: nobody else uses the process's standard input.
    let socket = unsafe { OwnedFd::from_raw_fd(libc::STDIN_FILENO) };
    LocalSet::new().block_on(&runtime, async { serve(watch(socket)?).await })
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;

    use nix::{
        sys::{
            resource::{Resource, getrlimit, setrlimit},
            socket::{AddressFamily, ControlMessage, SockFlag, SockType, sendmsg, socketpair},
            wait::{WaitStatus, waitpid},
        },
        unistd::{ForkResult, fork},
    };

    use super::*;

    /// Whether a message for whose descriptor there is no room is given up, and the next one taken.
    fn goes_on(here: &OwnedFd, there: &OwnedFd) -> io::Result<bool> {
        let setup = Setup::Start {
            kind: Kind::Kcp,
            certificate: None,
            max_ahead: 7,
        };
        let mut bytes = Vec::new();
        ciborium::into_writer(&setup, &mut bytes).map_err(io::Error::other)?;
        let given = [here.as_raw_fd()];
        for _ in 0..2 {
            let rights = [ControlMessage::ScmRights(&given)];
            let slices = [IoSlice::new(&bytes)];
            sendmsg::<()>(here.as_raw_fd(), &slices, &rights, MsgFlags::empty(), None)?;
        }
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        setrlimit(Resource::RLIMIT_NOFILE, 0, hard)?;
        let lacking = receive(there)?;
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
        Ok(lacking.is_none() && receive(there)?.is_some())
    }

    #[test]
    fn receive__goes_on_without_a_free_descriptor() {
        let flags = SockFlag::SOCK_CLOEXEC;
        let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
        let (here, there) = pair.unwrap();
        // In a process of its own: the limit is of all threads.
        // SAFETY: the child takes no lock of this process's threads but malloc's, which glibc makes usable after a fork.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let is_good = goes_on(&here, &there).unwrap_or(false);
                // SAFETY: nothing of the parent's is flushed or run.
                unsafe { libc::_exit(i32::from(!is_good)) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
        }
    }
}
