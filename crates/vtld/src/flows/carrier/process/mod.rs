//! Carriers that run in a process of their own, which has no privileges: what peers send by QUIC, SCTP and KCP is
//! parsed there, and only frames pass to vtld and back.
//!
//! Here is vtld's end (`child.rs` is the process, `confine.rs` what is taken from it, `message.rs` what passes). It
//! starts when it is first needed. Where it dies its carriers break, and flows go on over TCP; the next carrier starts
//! another one, on the same UDP sockets.

pub(super) mod child;
mod confine;
pub(super) mod message;

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io::{self, IoSlice},
    net::UdpSocket,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Stdio},
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::BytesMut;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, recv, sendmsg, shutdown,
    socketpair,
};
use rcgen::CertifiedKey;
use sha2::{Digest, Sha256};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::watch as flag,
    task::{AbortHandle, spawn_blocking, spawn_local},
};
use vtl_proto::{
    carrier::Kind,
    frame::{CRYPTO, HEADER},
};

use super::{
    super::socket::watch,
    Arrivals, CLEAR, Endpoint, Expected, Grantor, Link, Local, Shown, ToOpen,
    framed::{Arrived, Framed, Out, Pipe},
    socket,
};
use crate::broker::random_token;
pub use child::run;
pub use confine::drop_privileges;
use message::{Certificate, Channel, Figures, Opening, Setup, Tag, emit};

/// Between two starts.
const PAUSE: Duration = Duration::from_secs(1);
/// Bytes written at a time.
const BATCH: usize = 64 << 10;

/// A kind that the process has, or gets when it starts.
struct Started {
    kind: Kind,
    socket: UdpSocket,
    certificate: Option<Certificate>,
}

/// One that runs.
struct Running {
    socket: Rc<AsyncFd<OwnedFd>>,
    child: Child,
}

/// The process of carriers.
pub(in super::super) struct Process {
    /// Bytes that a peer may be allowed to have under way.
    most_ahead: u64,
    running: RefCell<Option<Running>>,
    kinds: RefCell<Vec<Rc<Started>>>,
    last_start: Cell<Option<Instant>>,
    /// This host's carriers are to end.
    is_over: Cell<bool>,
    /// Whether one runs.
    runs: flag::Sender<bool>,
}

impl Process {
    /// `most_ahead`: bytes that a peer may be allowed to have under way.
    pub(in super::super) fn new(most_ahead: u64) -> Rc<Self> {
        Rc::new(Self {
            most_ahead,
            running: RefCell::default(),
            kinds: RefCell::default(),
            last_start: Cell::new(None),
            is_over: Cell::new(false),
            runs: flag::Sender::new(false),
        })
    }

    /// Has it do something. Starts it if it does not run.
    fn tell(self: &Rc<Self>, setup: &Setup, given: BorrowedFd<'_>) -> io::Result<()> {
        let running = match &*self.running.borrow() {
            Some(running) => Some(Rc::clone(&running.socket)),
            None => None,
        };
        let socket = match running {
            Some(socket) => socket,
            None => self.start()?,
        };
        say(&socket, setup, given)
    }

    /// Starts it, with all kinds.
    fn start(self: &Rc<Self>) -> io::Result<Rc<AsyncFd<OwnedFd>>> {
        let is_soon = |last: Instant| last.elapsed() < PAUSE;
        if self.is_over.get() || self.last_start.get().is_some_and(is_soon) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        self.last_start.set(Some(Instant::now()));
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        )?;
        let ours = Rc::new(watch(ours)?);
        let child = Command::new("/proc/self/exe")
            .arg0("vtld")
            .args(std::env::args_os().skip(1))
            .arg("--carriers")
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            // Its end comes from here, not from the terminal.
            .process_group(0)
            .spawn()?;
        for kind in &*self.kinds.borrow() {
            self.introduce(&ours, kind)?;
        }
        let socket = Rc::clone(&ours);
        self.running.replace(Some(Running {
            socket: ours,
            child,
        }));
        self.runs.send_replace(true);
        spawn_local(Rc::clone(self).watch(Rc::clone(&socket)));
        Ok(socket)
    }

    /// Tells a process of a kind.
    fn introduce(&self, to: &AsyncFd<OwnedFd>, started: &Started) -> io::Result<()> {
        let setup = Setup::Start {
            kind: started.kind,
            certificate: started.certificate.clone(),
            most_ahead: self.most_ahead,
        };
        say(to, &setup, started.socket.as_fd())
    }

    /// Waits for its end.
    async fn watch(self: Rc<Self>, socket: Rc<AsyncFd<OwnedFd>>) {
        let read =
            |socket: &OwnedFd| Ok(recv(socket.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT)?);
        // It never says anything.
        let _ = socket.async_io(Interest::READABLE, read).await;
        let ended = self.running.take();
        if let Some(Running { mut child, .. }) = ended {
            let status = spawn_blocking(move || {
                let _ = child.kill();
                child.wait()
            });
            let status = status.await;
            if !self.is_over.get() {
                tracing::error!(
                    ?status,
                    "the process of carriers has died: flows go on over TCP"
                );
            }
        }
        self.runs.send_replace(false);
    }

    /// Ends all carriers.
    fn close(&self) {
        self.is_over.set(true);
        if let Some(running) = &*self.running.borrow() {
            let _ = shutdown(running.socket.as_raw_fd(), Shutdown::Write);
        }
    }

    /// Completes when none runs.
    async fn ended(&self) {
        let _ = self.runs.subscribe().wait_for(|runs| !runs).await;
    }

    /// A kind for this host. It needs no process yet.
    pub(super) fn endpoint(
        self: &Rc<Self>,
        kind: Kind,
        arrivals: Arrivals,
    ) -> io::Result<Rc<dyn Endpoint>> {
        let socket = socket()?;
        socket.set_nonblocking(true)?;
        let port = socket.local_addr()?.port();
        let certificate = match kind {
            Kind::Quic => Some(certificate()?),
            _ => None,
        };
        let fingerprint = certificate
            .as_ref()
            .map(|c| Sha256::digest(&c.certificate).into());
        let started = Rc::new(Started {
            kind,
            socket,
            certificate,
        });
        if let Some(running) = &*self.running.borrow() {
            self.introduce(&running.socket, &started)?;
        }
        self.kinds.borrow_mut().push(started);
        Ok(Rc::new(Remote {
            process: Rc::clone(self),
            kind,
            port,
            fingerprint,
            arrivals,
            granted: RefCell::default(),
        }))
    }
}

fn say(to: &AsyncFd<OwnedFd>, setup: &Setup, given: BorrowedFd<'_>) -> io::Result<()> {
    let mut bytes = Vec::new();
    ciborium::into_writer(setup, &mut bytes).map_err(io::Error::other)?;
    let given = [given.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&given)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg::<()>(
        to.as_raw_fd(),
        &[IoSlice::new(&bytes)],
        &rights,
        flags,
        None,
    )?;
    Ok(())
}

/// One for QUIC, whose name nobody looks at: peers know its fingerprint.
fn certificate() -> io::Result<Certificate> {
    let made = rcgen::generate_simple_self_signed(["vtl.invalid".to_owned()]);
    let CertifiedKey { cert, signing_key } = made.map_err(io::Error::other)?;
    Ok(Certificate {
        certificate: cert.der().to_vec().into(),
        key: signing_key.serialize_der().into(),
    })
}

/// Carriers of a kind, which the process has.
struct Remote {
    process: Rc<Process>,
    kind: Kind,
    /// UDP port.
    port: u16,
    /// Of the certificate.
    fingerprint: Option<[u8; CRYPTO]>,
    arrivals: Arrivals,
    /// What waits for peers, by token.
    granted: RefCell<HashMap<u64, AbortHandle>>,
}

impl Remote {
    /// Has the process do something about one carrier. Returns its socket.
    fn begin(&self, setup: &Setup) -> io::Result<Channel> {
        let (channel, theirs) = Channel::pair()?;
        self.process.tell(setup, theirs.as_fd())?;
        Ok(channel)
    }

    fn is_encrypted(&self, crypto: &[u8; CRYPTO]) -> bool {
        self.kind == Kind::Quic || *crypto != CLEAR
    }
}

impl Grantor for Remote {
    fn port(&self) -> u16 {
        self.port
    }

    fn certificate(&self) -> Option<[u8; CRYPTO]> {
        self.fingerprint
    }

    fn token(&self) -> u64 {
        loop {
            // SCTP has two ports from it, and KCP a number: 0 is none.
            let token = random_token();
            if token >> 48 != 0 && (token >> 32) as u16 != 0 && token as u32 != 0 {
                return token;
            }
        }
    }

    fn grant(&self, expected: Expected) {
        let token = expected.token;
        let (kind, is_encrypted) = (self.kind, self.is_encrypted(expected.crypto.as_bytes()));
        let channel = match self.begin(&Setup::Expect { kind, expected }) {
            Ok(channel) => channel,
            Err(error) => {
                return tracing::warn!(%error, carrier = %kind, "a carrier cannot be granted");
            }
        };
        let arrivals = self.arrivals.clone();
        let waiting = spawn_local(async move {
            if let Ok(carrier) = opened(kind, channel, is_encrypted).await {
                // Nobody takes it where the daemon is ending.
                let _ = arrivals.send((Shown::Token(token), Box::new(carrier)));
            }
        });
        let mut granted = self.granted.borrow_mut();
        granted.insert(token, waiting.abort_handle());
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
            ..
        } = opening;
        let is_encrypted = self.is_encrypted(granted.crypto.as_bytes());
        let opening = Opening {
            to: granted.to,
            token: granted.token,
            crypto: granted.crypto,
            local,
            rtt,
        };
        let kind = self.kind;
        Box::pin(async move {
            let channel = self.begin(&Setup::Open { kind, opening })?;
            let carrier = opened(kind, channel, is_encrypted).await?;
            Ok(Box::new(carrier) as Box<dyn Link>)
        })
    }

    fn close(&self) {
        self.process.close();
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        Box::pin(self.process.ended())
    }
}

/// A carrier, once its handshake is done.
async fn opened(kind: Kind, channel: Channel, is_encrypted: bool) -> io::Result<Framed> {
    let frame = match channel.next().await? {
        (Tag::Opened, body) => body.first_chunk().map(|frame| u32::from_le_bytes(*frame)),
        (Tag::Refused, body) => {
            return Err(io::Error::other(
                String::from_utf8_lossy(&body).into_owned(),
            ));
        }
        _ => None,
    };
    let frame = frame.filter(|frame| (HEADER as u32 + 1..=BATCH as u32).contains(frame));
    let pipe = Pipe::new(frame.ok_or(io::ErrorKind::InvalidData)? as usize);
    let figures = Rc::new(RefCell::new(Figures::default()));
    let (driven, known) = (Rc::clone(&pipe), Rc::clone(&figures));
    spawn_local(async move {
        let waiting = Cell::new(0);
        tokio::select! {
            _ = write(&channel, &driven, &waiting) => {}
            _ = read(&channel, &driven, &waiting, &known) => {}
        }
        driven.end();
    });
    let memory = Rc::clone(&figures);
    Ok(Framed {
        kind,
        pipe,
        is_encrypted,
        library: Box::new(move || memory.borrow().memory),
        figures: Box::new(move || figures.borrow().path),
    })
}

/// Sends what there is, up to the carrier's end. `waiting`: bytes of it that the process has not taken.
async fn write(channel: &Channel, pipe: &Pipe, waiting: &Cell<usize>) -> io::Result<()> {
    let mut messages = BytesMut::with_capacity(BATCH);
    while !pipe.is_over() {
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
        messages.clear();
    }
    Ok(())
}

/// Takes what comes, up to the end.
async fn read(
    channel: &Channel,
    pipe: &Pipe,
    waiting: &Cell<usize>,
    figures: &RefCell<Figures>,
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
                waiting.set(waiting.get().checked_sub(taken).ok_or_else(invalid)?);
                pipe.free(taken);
            }
            Tag::Figures => {
                let said = ciborium::from_reader(&body[..]);
                figures.replace(said.map_err(io::Error::other)?);
            }
            _ => return Err(invalid()),
        }
    }
}
