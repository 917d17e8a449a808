//! Held connects: captured connects of applications that wait for an answer.
//!
//! The table of their SYNs is keyed by the application's address on the loopback. Accepting injects
//! the SYN to vtld's listener; refusing answers it in the destination's name.

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

/// Timeout from the injected SYN to the accepted socket. On the loopback it takes microseconds,
/// unless the application has closed its socket.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long SYN retransmissions of a timed-out connect are swallowed: longer than TCP's default
/// retries.
const SILENCE: Duration = Duration::from_secs(130);
/// The same after a connect that succeeded: a SYN retransmission may be in the ring still when the
/// listener has the connection.
const STRAGGLING: Duration = Duration::from_secs(1);

/// Callback of an accepted connect. Runs on the Hooker's thread: must not block.
pub(super) type Accepted = Box<dyn FnOnce(io::Result<TcpStream>) + Send>;

enum State {
    /// Unanswered: its [`HeldConnect`] is alive.
    Open,
    /// Accepted: the SYN was injected to the listener.
    Injected {
        accepted: Accepted,
        deadline: Instant,
    },
    /// Done, answered or timed out. SYN retransmissions are swallowed.
    Over { until: Instant },
}

struct Entry {
    id: u64,
    cookie: u64,
    syn: SynPacket,
    state: State,
}

impl Entry {
    /// Marks the entry as done. Returns the former state.
    fn end(&mut self, swallows: Duration) -> State {
        let until = Instant::now() + swallows;
        mem::replace(&mut self.state, State::Over { until })
    }
}

/// All held connects, and the raw sockets to answer them.
pub(super) struct Flows {
    raw4: OwnedFd,
    raw6: Option<OwnedFd>,
    table: Mutex<(HashMap<SocketAddr, Entry>, u64)>,
    /// Handing over: another daemon will answer the open connects.
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

    /// Leaves open connects to another daemon, which gets their SYN retransmissions.
    pub(super) fn leave(&self) {
        self.is_leaving.store(true, Ordering::Relaxed);
    }

    /// Whether an accepted connect has not reached the listener yet.
    pub(super) fn has_injected(&self) -> bool {
        let injected = |entry: &Entry| matches!(entry.state, State::Injected { .. });
        self.table().0.values().any(injected)
    }

    fn table(&self) -> MutexGuard<'_, (HashMap<SocketAddr, Entry>, u64)> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, packet: &[u8], to: SocketAddr) {
        let raw = if to.is_ipv4() {
            Some(&self.raw4)
        } else {
            self.raw6.as_ref()
        };
        // A lost packet is made up for by the application's SYN retransmission.
        if let Some(Err(error)) = raw.map(|raw| sock::send_to(raw, packet, to.ip())) {
            tracing::debug!(%error, %to, "hooker: cannot send on the loopback");
        }
    }

    /// Handles a SYN from the ring. `Some` for a new connect; retransmissions are handled here.
    pub(super) fn hold(&self, shared: &Arc<Shared>, event: &vtl_syn) -> Option<HeldConnect> {
        let len = (event.len as usize).min(event.packet.len());
        let syn = SynPacket::parse(&event.packet[..len])?;
        let (app, dest) = (syn.source(), abi::socket_addr(&event.dest));
        if dest.port() == 0 {
            // Not a captured connect: the port is closed.
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

    /// Completes an accepted connect: the listener got the connection from `app`.
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

    /// Removes entries that have timed out. Call about once a second.
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
    /// The destination of the application's connect.
    pub fn dest(&self) -> SocketAddr {
        self.0.dest
    }

    /// The address that the application's getsockname shows: this host's end of the connection to the destination.
    /// The port is the application's own, if it is free there; an explicitly bound port is shown in any case.
    pub fn src(&self) -> SocketAddr {
        self.0.src
    }

    /// Session parameters from the application's hook or rule, if any.
    pub fn over(&self) -> Option<&Arc<Over>> {
        self.0.wish.over.as_ref()
    }

    /// The rule that decided, if it has conditions on the path.
    pub fn rule(&self) -> Option<&Arc<str>> {
        self.0.wish.rule.as_ref()
    }

    /// Whether the carrier is chosen by path and application.
    pub fn is_auto(&self) -> bool {
        self.0.wish.auto
    }

    /// The desired kind of carrier.
    pub fn kind(&self) -> Kind {
        self.0.wish.kind.unwrap_or(Kind::Graft)
    }

    /// Whether a carrier is required: no fallback to a TCP connection with the destination.
    pub fn requires_carrier(&self) -> bool {
        self.0.wish.required
    }

    /// Whether the carrier must be encrypted, too.
    pub fn requires_encryption(&self) -> bool {
        self.0.wish.encrypted
    }

    /// Whether the destination is this host, as far as the local address is known.
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

    /// Sets the address that getsockname shows.
    pub fn set_src(&mut self, src: SocketAddr) {
        self.0.src = src;
        // On failure getsockname shows the loopback address, as before.
        let _ = self.0.shared.maps.show_local(self.0.cookie, src);
    }

    /// Accepts the connect. `accepted` is called on the Hooker's thread, must not block, and gets
    /// the application's connection, non-blocking, or an error if the application has gone. Drop
    /// of the stream resets the connection (SO_LINGER 0): turn that off right before the shutdown
    /// that closes it in order.
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

    /// Fails the connect.
    pub fn refuse(mut self, error: ConnectError) {
        self.answer(error);
    }

    /// Leaves the connect unanswered and drops its entry: the SYN retransmission starts anew.
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
            // TCP ignores ICMP while a system call owns the socket: its SYN retransmission is to be held anew.
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
        // Also after a panic: the next daemon answers.
        match is_leaving || panics::happened() {
            true => self.put_off(),
            false => self.answer(ConnectError::Refused),
        }
    }
}
