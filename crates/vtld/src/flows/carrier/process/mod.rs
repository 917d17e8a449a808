//! Carriers in unprivileged processes, one for each kind: packets of QUIC, SCTP, KCP and stacks are parsed there,
//! and only frames pass to vtld and back.
//!
//! This is vtld's end; `child.rs` is the process, `confine.rs` its sandbox, `message.rs` and `wire.rs` the messages. A
//! process is started on first use. If it dies or hangs, its carriers break, and flows fall back to TCP; the next
//! carrier starts a new one, without state of the former.

mod child;
mod confine;
mod filter;
mod message;
mod pipeline;
mod wire;

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io::{self, IoSlice},
    net::IpAddr,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Stdio},
    rc::{Rc, Weak},
    time::{Duration, Instant},
};

use bytes::BytesMut;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, recv, sendmsg,
    setsockopt, shutdown, socketpair, sockopt,
};
use rcgen::CertifiedKey;
use sha2::{Digest, Sha256};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch as count,
    task::{AbortHandle, coop::consume_budget, spawn_blocking, spawn_local},
    time::timeout,
};
use vtl_proto::{carrier::Kind, frame::CRYPTO};

use super::{
    super::socket::watch,
    Arrivals, CLEAR, Endpoint, Grant, Grantor, HANDSHAKE, Link, Local, Shown, ToOpen,
    framed::{Arrived, Framed, Out, Pipe},
    library::{Certificate, Layering, Opening},
    secret, socket,
};
use crate::{broker::random_token, hooker::CarrierOptions, stacks};
pub use child::run;
pub use confine::drop_privileges;
pub(in super::super) use filter::Filter;
use message::{Channel, Setup};
use wire::{BATCH, Figures, Tag, emit};

/// Heartbeat timeout of a process: five intervals.
const SILENT: Duration = Duration::from_secs(10);
/// Timeout of a handshake: longer than that in the process.
const OPENED: Duration = HANDSHAKE.saturating_add(Duration::from_secs(2));
/// Send buffer of the set-up socket, bytes.
const QUEUE: usize = 4 << 20;
/// Minimum interval between two starts.
const PAUSE: Duration = Duration::from_secs(1);

/// A running process.
struct Process {
    kind: Kind,
    socket: AsyncFd<OwnedFd>,
    /// Port of its UDP socket.
    port: u16,
    /// Fingerprint of its certificate.
    fingerprint: Option<[u8; CRYPTO]>,
    child: RefCell<Option<Child>>,
}

impl Process {
    /// Sends it a set-up message and a descriptor.
    fn tell(&self, setup: &Setup, given: BorrowedFd<'_>) -> io::Result<()> {
        let mut bytes = Vec::new();
        ciborium::into_writer(setup, &mut bytes).map_err(io::Error::other)?;
        let given = [given.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&given)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        let slices = [IoSlice::new(&bytes)];
        sendmsg::<()>(self.socket.as_raw_fd(), &slices, &rights, flags, None)?;
        Ok(())
    }

    /// Sends it a set-up message about one carrier. Returns this end of the carrier's channel.
    fn begin(&self, setup: &Setup) -> io::Result<Channel> {
        let (channel, theirs) = Channel::pair()?;
        self.tell(setup, theirs.as_fd())?;
        Ok(channel)
    }

    /// Completes when it is dead, or its heartbeat times out.
    async fn dead(&self) {
        let beat = |socket: &OwnedFd| {
            let read = recv(socket.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT)?;
            Ok(read > 0)
        };
        loop {
            match timeout(SILENT, self.socket.async_io(Interest::READABLE, beat)).await {
                // Yield: however many there are.
                Ok(Ok(true)) => consume_budget().await,
                Ok(_) => return,
                Err(_) => {
                    return tracing::error!(carrier = %self.kind, "carrier process: no heartbeat: killed");
                }
            }
        }
    }

    fn kill(&self) {
        if let Some(child) = &mut *self.child.borrow_mut() {
            let _ = child.kill();
        }
    }
}

/// The endpoint of a kind whose carriers are in a process.
pub(super) struct Remote {
    kind: Kind,
    /// Upper bound of a carrier's receive window, bytes.
    max_ahead: u64,
    arrivals: Arrivals,
    /// Tasks that wait for peers, by token.
    granted: RefCell<HashMap<u64, AbortHandle>>,
    process: RefCell<Option<Rc<Process>>>,
    last_start: Cell<Option<Instant>>,
    /// Closed: all carriers are to end.
    is_over: Cell<bool>,
    /// Number of running processes.
    running: count::Sender<usize>,
    /// Reference to itself, for tasks.
    own: Weak<Self>,
}

/// Generates a certificate for QUIC. Peers know its fingerprint; the name is not checked.
fn certificate() -> io::Result<Certificate> {
    let made = rcgen::generate_simple_self_signed(["vtl.invalid".to_owned()]);
    let CertifiedKey { cert, signing_key } = made.map_err(io::Error::other)?;
    Ok(Certificate {
        certificate: cert.der().to_vec().into(),
        key: signing_key.serialize_der().into(),
    })
}

impl Remote {
    /// Creates the endpoint, without a process yet.
    pub(super) fn start(kind: Kind, max_ahead: u64, arrivals: Arrivals) -> Rc<Self> {
        Rc::new_cyclic(|own| Self {
            kind,
            max_ahead,
            arrivals,
            granted: RefCell::default(),
            process: RefCell::default(),
            last_start: Cell::new(None),
            is_over: Cell::new(false),
            running: count::Sender::new(0),
            own: Weak::clone(own),
        })
    }

    /// The process; started if none is running.
    fn process(&self) -> io::Result<Rc<Process>> {
        if let Some(process) = &*self.process.borrow() {
            return Ok(Rc::clone(process));
        }
        let is_soon = |last: Instant| last.elapsed() < PAUSE;
        if self.is_over.get() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if self.last_start.get().is_some_and(is_soon) {
            return Err(io::Error::other("its process has just died"));
        }
        self.last_start.set(Some(Instant::now()));
        let process = Rc::new(self.spawn()?);
        self.process.replace(Some(Rc::clone(&process)));
        self.running.send_modify(|running| *running += 1);
        if let Some(own) = self.own.upgrade() {
            spawn_local(own.attend(Rc::clone(&process)));
        }
        Ok(process)
    }

    /// Starts a process.
    fn spawn(&self) -> io::Result<Process> {
        let udp = socket()?;
        udp.set_nonblocking(true)?;
        let port = udp.local_addr()?.port();
        let certificate = match self.kind {
            Kind::Quic => Some(certificate()?),
            _ => None,
        };
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        )?;
        // Room for many set-up messages to a busy process; less will do.
        let _ = setsockopt(&ours, sockopt::SndBufForce, &QUEUE);
        let ours = watch(ours)?;
        let child = Command::new("/proc/self/exe")
            .arg0("vtld")
            .args(std::env::args_os().skip(1))
            .args(["--carriers", &self.kind.to_string()])
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            // No signals from the terminal: vtld ends it.
            .process_group(0)
            .spawn()?;
        let fingerprint = certificate
            .as_ref()
            .map(|c| Sha256::digest(&c.certificate).into());
        let process = Process {
            kind: self.kind,
            socket: ours,
            port,
            fingerprint,
            child: RefCell::new(Some(child)),
        };
        let setup = Setup::Start {
            kind: self.kind,
            certificate,
            max_ahead: self.max_ahead,
        };
        // Fails if it has died already, which `attend` notices.
        let _ = process.tell(&setup, udp.as_fd());
        Ok(process)
    }

    fn forget(&self, process: &Rc<Process>) {
        let mut current = self.process.borrow_mut();
        // Unless another process has taken its place.
        current.take_if(|current| Rc::ptr_eq(current, process));
    }

    /// Supervises a process until it is dead or hangs; kills and reaps it.
    async fn attend(self: Rc<Self>, process: Rc<Process>) {
        process.dead().await;
        self.forget(&process);
        let child = process.child.take();
        let waited = spawn_blocking(move || {
            let mut child = child?;
            let _ = child.kill();
            Some(child.wait())
        });
        let status = waited.await;
        if !self.is_over.get() {
            tracing::error!(carrier = %self.kind, ?status, "carrier process: died: flows fall back to TCP");
        }
        self.running.send_modify(|running| *running -= 1);
    }

    fn is_encrypted(&self, crypto: &[u8; CRYPTO]) -> bool {
        self.kind == Kind::Quic || *crypto != CLEAR
    }
}

/// A random token whose parts are not 0: SCTP's ports and KCP's conversation number derive from it.
fn token() -> u64 {
    loop {
        let token = random_token();
        if token >> 48 != 0 && (token >> 32) as u16 != 0 && token as u32 != 0 {
            return token;
        }
    }
}

impl Grantor for Remote {
    fn grant(&self, client: IpAddr, rtt: Option<Duration>, seals: bool) -> io::Result<Grant> {
        let process = self.process()?;
        let grant = Grant {
            port: process.port,
            token: token(),
            crypto: process.fingerprint.unwrap_or_else(|| secret(seals)),
        };
        let is_encrypted = self.is_encrypted(&grant.crypto);
        let channel = process.begin(&Setup::Expect(grant.expected(client, rtt)))?;
        let token = grant.token;
        let arrivals = self.arrivals.clone();
        let waiting = spawn_local(async move {
            match opened(&process, channel, is_encrypted).await {
                Ok(carrier) => {
                    // Fails if the daemon is ending.
                    let _ = arrivals.send((Shown::Token(token), Box::new(carrier)));
                }
                Err(error) => {
                    tracing::debug!(%error, carrier = %process.kind, "carrier process: cannot open a granted carrier");
                }
            }
        });
        let mut granted = self.granted.borrow_mut();
        granted.insert(token, waiting.abort_handle());
        Ok(grant)
    }

    fn revoke(&self, token: u64) {
        if let Some(waiting) = self.granted.borrow_mut().remove(&token) {
            waiting.abort();
        }
    }
}

impl Endpoint for Remote {
    fn grantor(&self) -> Option<&dyn Grantor> {
        Some(self)
    }

    fn connect(&self, opening: ToOpen) -> Local<'_, io::Result<Box<dyn Link>>> {
        let ToOpen {
            granted,
            local,
            rtt,
            options,
            ..
        } = opening;
        let is_encrypted = self.is_encrypted(granted.crypto.as_bytes());
        let layering = layering(options.as_deref(), is_encrypted);
        let opening = Opening {
            to: granted.to,
            token: granted.token,
            crypto: granted.crypto,
            local,
            rtt,
            layering: None,
        };
        Box::pin(async move {
            let opening = Opening {
                layering: layering?,
                ..opening
            };
            let process = self.process()?;
            let channel = process.begin(&Setup::Open(opening))?;
            let carrier = timeout(OPENED, opened(&process, channel, is_encrypted)).await;
            let carrier = carrier.map_err(|_| io::ErrorKind::TimedOut)??;
            Ok(Box::new(carrier) as Box<dyn Link>)
        })
    }

    fn filter(&self, layers: String, mtu: usize) -> Local<'_, io::Result<Filter>> {
        Box::pin(async move {
            let process = self.process()?;
            let channel = process.begin(&Setup::Layers { layers, mtu })?;
            let filter = timeout(OPENED, Filter::new(channel, mtu)).await;
            filter.map_err(|_| io::ErrorKind::TimedOut)?
        })
    }

    fn close(&self) {
        self.is_over.set(true);
        if let Some(process) = &*self.process.borrow() {
            let _ = shutdown(process.socket.as_raw_fd(), Shutdown::Write);
        }
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        Box::pin(async {
            let mut running = self.running.subscribe();
            let _ = running.wait_for(|running| *running == 0).await;
        })
    }
}

/// What the stack to be opened consists of; `None`: the carrier is none.
fn layering(options: Option<&CarrierOptions>, is_encrypted: bool) -> io::Result<Option<Layering>> {
    let Some(CarrierOptions::Stack(spec)) = options else {
        return Ok(None);
    };
    let stacks::ToOpen {
        layers,
        rate,
        peer_rate,
    } = stacks::resolve(spec).map_err(io::Error::other)?;
    if layers.needs_encryption() && !is_encrypted {
        return Err(io::Error::other(format!(
            "stack:{spec} has the layer encryption, which this host or the peer does not allow (--no-encryption)"
        )));
    }
    Ok(Some(Layering {
        layers: layers.to_string(),
        rate,
        peer_rate,
    }))
}

/// Waits for a carrier's handshake, and starts the carrier.
async fn opened(process: &Rc<Process>, channel: Channel, is_encrypted: bool) -> io::Result<Framed> {
    let pipe = Pipe::new(channel.opened(BATCH).await?);
    let figures = Rc::new(RefCell::new((Instant::now(), Figures::default())));
    let (driven, known) = (Rc::clone(&pipe), Rc::clone(&figures));
    let (kind, process) = (process.kind, Rc::downgrade(process));
    spawn_local(async move {
        let waiting = Cell::new(0);
        let ended = tokio::select! {
            ended = write(&channel, &driven, &waiting) => ended,
            ended = read(&channel, &driven, &waiting, &known) => ended,
        };
        if let (Err(error), Some(process)) = (ended, process.upgrade())
            && error.kind() == io::ErrorKind::InvalidData
        {
            tracing::error!(carrier = %kind, "carrier process: invalid message: killed");
            process.kill();
        }
        driven.end();
    });
    let memory = Rc::clone(&figures);
    Ok(Framed {
        kind,
        pipe,
        is_encrypted,
        library: Box::new(move || memory.borrow().1.memory),
        figures: Box::new(move || {
            let (at, figures) = &*figures.borrow();
            Some((*at, figures.path?))
        }),
    })
}

/// Sends the pipe's frames to the process until the carrier ends. `waiting`: bytes that the library has not taken yet.
async fn write(channel: &Channel, pipe: &Pipe, waiting: &Cell<usize>) -> io::Result<()> {
    while !pipe.is_over() {
        let mut messages = BytesMut::new();
        while messages.len() < BATCH
            && let Some(out) = pipe.pop()
        {
            let (tag, bytes) = match &out {
                Out::Control(bytes) => (Tag::Control, bytes),
                Out::Chunk(bytes) => (Tag::Chunk, bytes),
            };
            emit(&mut messages, tag, bytes);
            waiting.set(waiting.get() + bytes.len());
        }
        match messages.is_empty() {
            true => pipe.work.notified().await,
            false => channel.write(&messages).await?,
        }
    }
    Ok(())
}

/// Receives messages from the process until the carrier ends.
async fn read(
    channel: &Channel,
    pipe: &Pipe,
    waiting: &Cell<usize>,
    figures: &RefCell<(Instant, Figures)>,
) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    loop {
        while !pipe.has_room() {
            pipe.taken().await;
        }
        let (tag, body) = channel.next().await?;
        match tag {
            Tag::Stream => pipe.arrived(Arrived::Stream(body)),
            Tag::Frame => pipe.arrived(Arrived::Frame(body)),
            Tag::Taken => {
                let taken = u32::from_le_bytes(*body.first_chunk().ok_or_else(invalid)?) as usize;
                if taken == 0 {
                    return Err(invalid());
                }
                waiting.set(waiting.get().checked_sub(taken).ok_or_else(invalid)?);
                pipe.free(taken);
            }
            Tag::Figures => {
                let read = Figures::read(&body).ok_or_else(invalid)?;
                figures.replace((Instant::now(), read));
            }
            _ => return Err(invalid()),
        }
    }
}
