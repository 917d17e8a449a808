//! Connects of applications that wait for an answer.
//!
//! Each has its SYN here, keyed by the application's own address on the loopback. Accepting sends
//! the SYN on to vtld's listener, refusing answers it in the name of the destination.

use std::{
    collections::HashMap,
    fmt, io, mem,
    net::{SocketAddr, TcpStream},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    Shared,
    abi::{self, vtl_syn},
    carrier::{Over, Wish},
    error::ConnectError,
    packet::SynPacket,
    sock,
};
use crate::panics;
use vtl_proto::carrier::Kind;

/// From the injected SYN to the accepted socket; on the loopback this takes microseconds, unless
/// the application closed its socket in the meantime.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long SYNs of a connect that nobody answers are swallowed: longer than TCP tries by default.
const SILENCE: Duration = Duration::from_secs(130);
/// How long those of a connect that succeeded: TCP may have repeated its SYN just then, and the ring
/// says so later than the listener has the connection.
const STRAGGLING: Duration = Duration::from_secs(1);

/// Runs on the Hooker's thread: must not block.
pub(super) type Accepted = Box<dyn FnOnce(io::Result<TcpStream>) + Send>;

enum State {
    /// Somebody has the [`HeldConnect`].
    Open,
    /// The SYN is on its way to the listener.
    Injected {
        accepted: Accepted,
        deadline: Instant,
    },
    /// Answered, if only by silence. Repetitions of the SYN are swallowed.
    Over { until: Instant },
}

struct Entry {
    id: u64,
    cookie: u64,
    syn: SynPacket,
    state: State,
}

impl Entry {
    /// The former state.
    fn end(&mut self, swallows: Duration) -> State {
        let until = Instant::now() + swallows;
        mem::replace(&mut self.state, State::Over { until })
    }
}

/// All held connects, and the way to answer them.
pub(super) struct Flows {
    raw4: OwnedFd,
    raw6: Option<OwnedFd>,
    table: Mutex<(HashMap<SocketAddr, Entry>, u64)>,
    /// Another daemon will answer what waits.
    is_leaving: AtomicBool,
}

impl Flows {
    pub(super) fn new(raw4: OwnedFd, raw6: Option<OwnedFd>) -> Self {
        Self {
            raw4,
            raw6,
            table: Mutex::new((HashMap::new(), 0)),
            is_leaving: AtomicBool::new(false),
        }
    }

    /// Leaves connects that wait to another daemon: TCP repeats their SYNs.
    pub(super) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
    }

    /// Whether the listener is about to get a connection.
    pub(super) fn has_injected(&self) -> bool {
        let injected = |entry: &Entry| matches!(entry.state, State::Injected { .. });
        self.table().0.values().any(injected)
    }

    fn table(&self) -> MutexGuard<'_, (HashMap<SocketAddr, Entry>, u64)> {
        // No code between lock and unlock leaves the table half changed.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, packet: &[u8], to: SocketAddr) {
        let raw = if to.is_ipv4() {
            Some(&self.raw4)
        } else {
            self.raw6.as_ref()
        };
        // What is lost here the application's TCP sends again.
        if let Some(Err(error)) = raw.map(|raw| sock::send_to(raw, packet, to.ip())) {
            tracing::debug!(%error, %to, "cannot send on the loopback");
        }
    }

    /// Takes a SYN from the ring. `Some` if it opens a connect; a repetition is dealt with here.
    pub(super) fn hold(&self, shared: &Arc<Shared>, event: &vtl_syn) -> Option<HeldConnect> {
        let len = (event.len as usize).min(event.packet.len());
        let syn = SynPacket::parse(&event.packet[..len])?;
        let (app, dest) = (syn.source(), abi::socket_addr(&event.dest));
        if dest.port() == 0 {
            // Not a captured connect: this port is closed to it.
            if let Some(reset) = syn.refusal(ConnectError::Refused) {
                self.send(&reset, app);
            }
            return None;
        }
        let wish = match event.wish {
            0 => Wish::default(),
            wish => shared.hooks().wish(wish),
        };
        let mut guard = self.table();
        let (table, last) = &mut *guard;
        if let Some(entry) = table.get(&app)
            && entry.cookie == event.cookie
            && entry.syn.sequence() == syn.sequence()
        {
            if matches!(entry.state, State::Injected { .. }) {
                self.send(syn.bytes(), syn.target());
            }
            return None;
        }
        *last += 1;
        let id = *last;
        let entry = Entry {
            id,
            cookie: event.cookie,
            syn,
            state: State::Open,
        };
        let former = table.insert(app, entry);
        drop(guard);
        if let Some(Entry {
            state: State::Injected { accepted, .. },
            ..
        }) = former
        {
            accepted(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Some(HeldConnect(Box::new(Held {
            shared: Arc::clone(shared),
            app,
            id,
            cookie: event.cookie,
            mark: event.mark,
            dest,
            src: app,
            wish,
            answered: false,
        })))
    }

    /// The listener got a connection from `app`.
    pub(super) fn accepted(&self, app: SocketAddr, stream: TcpStream) {
        let former = {
            let mut guard = self.table();
            let injected = |entry: &&mut Entry| matches!(entry.state, State::Injected { .. });
            let entry = guard.0.get_mut(&app).filter(injected);
            entry.map(|entry| entry.end(STRAGGLING))
        };
        // Without an entry the stream is dropped, which resets it.
        if let Some(State::Injected { accepted, .. }) = former {
            accepted(Ok(stream));
        }
    }

    /// Forgets what has waited too long. Call about once a second.
    pub(super) fn expire(&self, now: Instant) {
        let expired: Vec<Entry> = {
            let mut guard = self.table();
            let old = |entry: &Entry| match &entry.state {
                State::Open => false,
                State::Injected {
                    deadline: until, ..
                }
                | State::Over { until } => *until <= now,
            };
            guard
                .0
                .extract_if(|_, entry| old(entry))
                .map(|(_, entry)| entry)
                .collect()
        };
        for entry in expired {
            if let State::Injected { accepted, .. } = entry.state {
                accepted(Err(io::ErrorKind::TimedOut.into()));
            }
        }
    }
}

/// An application's connect that waits for its outcome. Dropping it refuses the connect.
pub struct HeldConnect(Box<Held>);

struct Held {
    shared: Arc<Shared>,
    app: SocketAddr,
    id: u64,
    cookie: u64,
    mark: u32,
    dest: SocketAddr,
    src: SocketAddr,
    wish: Wish,
    answered: bool,
}

impl fmt::Debug for HeldConnect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeldConnect")
            .field("dest", &self.0.dest)
            .field("src", &self.0.src)
            .finish()
    }
}

impl HeldConnect {
    /// Where the application wants to go.
    pub fn dest(&self) -> SocketAddr {
        self.0.dest
    }

    /// What the application's getsockname shows: this host's end of the connection to the destination.
    /// The port is the application's own, if that is free there; one that it has bound itself to it sees in any
    /// case.
    pub fn src(&self) -> SocketAddr {
        self.0.src
    }

    /// What the application's hook or rule says that its session is like, if it says so.
    pub fn over(&self) -> Option<&Arc<Over>> {
        self.0.wish.over.as_ref()
    }

    /// The kind of carrier that its flow is for.
    pub fn kind(&self) -> Kind {
        self.0.wish.kind.unwrap_or(Kind::Graft)
    }

    /// The connection must be carried: it may not become a TCP connection with the destination.
    pub fn requires_carrier(&self) -> bool {
        self.0.wish.required
    }

    /// And by nothing that is not encrypted.
    pub fn requires_encryption(&self) -> bool {
        self.0.wish.encrypted
    }

    /// The destination is this host, as far as the local address is known.
    pub(super) fn is_own(&self) -> bool {
        self.0.src.ip() == self.0.dest.ip()
    }

    /// SO_MARK of the application's socket.
    pub(super) fn mark(&self) -> u32 {
        self.0.mark
    }

    /// The address that the application bound its socket to before the connect.
    pub(super) fn bound(&self) -> Option<SocketAddr> {
        (!self.0.app.ip().is_loopback()).then_some(self.0.app)
    }

    /// Decides what getsockname shows.
    pub fn set_src(&mut self, src: SocketAddr) {
        self.0.src = src;
        // Failing shows the loopback's address, as before.
        let _ = self.0.shared.maps.show_local(self.0.cookie, src);
    }

    /// Lets the connect succeed. `accepted` gets the application's connection, non-blocking, from
    /// the Hooker's thread, where it must not block; or an error if the application has gone.
    /// The stream is set to reset its connection when it is dropped: turn SO_LINGER off right
    /// before the shutdown that ends it in order.
    pub fn accept(mut self, accepted: impl FnOnce(io::Result<TcpStream>) + Send + 'static) {
        self.0.answered = true;
        let flows = &self.0.shared.flows;
        let mut guard = flows.table();
        match guard.0.get_mut(&self.0.app) {
            Some(entry) if entry.id == self.0.id => {
                let deadline = Instant::now() + ACCEPT_TIMEOUT;
                entry.state = State::Injected {
                    accepted: Box::new(accepted),
                    deadline,
                };
                flows.send(entry.syn.bytes(), entry.syn.target());
            }
            _ => {
                drop(guard);
                accepted(Err(io::ErrorKind::ConnectionAborted.into()));
            }
        }
    }

    /// Lets the connect fail.
    pub fn refuse(mut self, error: ConnectError) {
        self.answer(error);
    }

    /// Leaves it open: TCP repeats its SYN.
    pub(super) fn put_off(&mut self) {
        self.0.answered = true;
        let mut guard = self.0.shared.flows.table();
        if guard.0.get(&self.0.app).is_some_and(|e| e.id == self.0.id) {
            guard.0.remove(&self.0.app);
        }
    }

    fn answer(&mut self, error: ConnectError) {
        self.0.answered = true;
        let flows = &self.0.shared.flows;
        let mut guard = flows.table();
        let Some(entry) = guard.0.get_mut(&self.0.app) else {
            return;
        };
        if entry.id != self.0.id {
            return;
        }
        if let Some(packet) = entry.syn.refusal(error) {
            flows.send(&packet, self.0.app);
            // TCP does not hear ICMP within a system call, and asks again.
            guard.0.remove(&self.0.app);
        } else {
            entry.end(SILENCE);
        }
    }
}

impl Drop for HeldConnect {
    fn drop(&mut self) {
        if self.0.answered {
            return;
        }
        let is_leaving = self.0.shared.flows.is_leaving.load(Ordering::Relaxed);
        // After a panic the next daemon answers, too.
        match is_leaving || panics::happened() {
            true => self.put_off(),
            false => self.answer(ConnectError::Refused),
        }
    }
}
