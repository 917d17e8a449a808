//! Carriers that run in processes without privileges, one for each kind: what peers send by QUIC, SCTP and KCP is
//! parsed there, and only frames pass to vtld and back.
//!
//! Here is vtld's end (`child.rs` is the process, `confine.rs` what is taken from it, `message.rs` what passes). A
//! process starts when it is first needed. Where it dies its carriers break, and flows go on over TCP; the next carrier
//! starts another one, on the same UDP socket.

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
    rc::{Rc, Weak},
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

/// A process that runs.
struct Running {
    socket: Rc<AsyncFd<OwnedFd>>,
    child: Child,
}

/// Carriers of a kind, which a process has.
pub(super) struct Remote {
    kind: Kind,
    /// The UDP socket of all processes, and its port.
    socket: UdpSocket,
    port: u16,
    certificate: Option<Certificate>,
    /// Of the certificate.
    fingerprint: Option<[u8; CRYPTO]>,
    /// Bytes that a peer may be allowed to have under way.
    most_ahead: u64,
    arrivals: Arrivals,
    /// What waits for peers, by token.
    granted: RefCell<HashMap<u64, AbortHandle>>,
    running: RefCell<Option<Running>>,
    last_start: Cell<Option<Instant>>,
    /// All carriers are to end.
    is_over: Cell<bool>,
    /// Whether a process runs.
    runs: flag::Sender<bool>,
    /// For tasks.
    own: Weak<Self>,
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

impl Remote {
    /// Needs no process yet.
    pub(super) fn start(kind: Kind, most_ahead: u64, arrivals: Arrivals) -> io::Result<Rc<Self>> {
        let socket = socket()?;
        socket.set_nonblocking(true)?;
        let certificate = match kind {
            Kind::Quic => Some(certificate()?),
            _ => None,
        };
        let fingerprint = certificate
            .as_ref()
            .map(|c| Sha256::digest(&c.certificate).into());
        Ok(Rc::new_cyclic(|own| Self {
            kind,
            port: socket.local_addr().map_or(0, |address| address.port()),
            socket,
            certificate,
            fingerprint,
            most_ahead,
            arrivals,
            granted: RefCell::default(),
            running: RefCell::default(),
            last_start: Cell::new(None),
            is_over: Cell::new(false),
            runs: flag::Sender::new(false),
            own: Weak::clone(own),
        }))
    }

    /// Has the process do something about one carrier. Returns its socket.
    fn begin(&self, setup: &Setup) -> io::Result<Channel> {
        let (channel, theirs) = Channel::pair()?;
        let running = self
            .running
            .borrow()
            .as_ref()
            .map(|running| Rc::clone(&running.socket));
        let process = match running {
            Some(socket) => socket,
            None => self.spawn()?,
        };
        say(&process, setup, theirs.as_fd())?;
        Ok(channel)
    }

    /// Starts a process.
    fn spawn(&self) -> io::Result<Rc<AsyncFd<OwnedFd>>> {
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
            .args(["--carriers", &self.kind.to_string()])
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            // Its end comes from here, not from the terminal.
            .process_group(0)
            .spawn()?;
        let socket = Rc::clone(&ours);
        self.running.replace(Some(Running { socket, child }));
        self.runs.send_replace(true);
        if let Some(own) = self.own.upgrade() {
            spawn_local(own.attend(Rc::clone(&ours)));
        }
        let setup = Setup::Start {
            kind: self.kind,
            certificate: self.certificate.clone(),
            most_ahead: self.most_ahead,
        };
        say(&ours, &setup, self.socket.as_fd())?;
        Ok(ours)
    }

    /// Waits for the process's end.
    async fn attend(self: Rc<Self>, socket: Rc<AsyncFd<OwnedFd>>) {
        // It never says anything.
        let read =
            |socket: &OwnedFd| Ok(recv(socket.as_raw_fd(), &mut [0], MsgFlags::MSG_DONTWAIT)?);
        let _ = socket.async_io(Interest::READABLE, read).await;
        let ended = self.running.take();
        if let Some(Running { mut child, .. }) = ended {
            let waited = spawn_blocking(move || {
                let _ = child.kill();
                child.wait()
            });
            let status = waited.await;
            if !self.is_over.get() {
                tracing::error!(carrier = %self.kind, ?status, "a process of carriers has died: flows go on over TCP");
            }
        }
        self.runs.send_replace(false);
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
        let channel = match self.begin(&Setup::Expect(expected)) {
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
            let channel = self.begin(&Setup::Open(opening))?;
            let carrier = opened(kind, channel, is_encrypted).await?;
            Ok(Box::new(carrier) as Box<dyn Link>)
        })
    }

    fn close(&self) {
        self.is_over.set(true);
        if let Some(running) = &*self.running.borrow() {
            let _ = shutdown(running.socket.as_raw_fd(), Shutdown::Write);
        }
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        Box::pin(async {
            let _ = self.runs.subscribe().wait_for(|runs| !runs).await;
        })
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
