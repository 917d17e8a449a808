//! Moves the bytes of one flow between the application, the flow's TCP connection, and carriers.

mod spread;

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    fs,
    future::pending,
    io::{self, IoSlice, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
    task::{AbortHandle, spawn_local},
    time::sleep,
};
use vtl_core::{
    flow::{Chunk, Flow, Next, Path},
    traffic::Traffic,
};
use vtl_proto::frame::{FlowId, ResetCode, Side};

use super::{
    carrier::Refused,
    congestion::Congestion,
    licence::{self, Licence},
    parts::Parts,
    peer::Peer,
    profile::Observer,
    socket::{self, Got, read},
};
use crate::{
    broker::set_linger,
    hooker::{ClientAddressGuard, shut_down},
    netmon::TcpWatch,
    option, urgent,
};
use spread::{Shares, Spreading};

/// Maximum size of a read from a socket, and of a chunk, bytes.
const CHUNK: usize = 64 << 10;
/// Unsent bytes in the TCP connection's socket buffer (`TCP_NOTSENT_LOWAT`): they can no longer move to a carrier.
pub(super) const UNSENT: libc::c_int = 16 << 10;
/// Room for received bytes that a flow's TCP connection begins with, bytes. The kernel begins with 64 KiB, and adds to it as
/// they are read: where packets are lost nothing can be read behind a gap, and the sender waits.
pub(super) const ROOM: u32 = 1 << 20;
/// How long a flow that has left a full carrier stays on TCP: returning may cost it a round trip.
const RETURN: Duration = Duration::from_secs(10);
/// Retry interval on a full carrier, for flows that may not fall back to TCP.
const FULL: Duration = Duration::from_millis(20);
/// How long, besides three round trips, a peer may say nothing of a flow that has begun by a carrier.
const SILENCE: Duration = Duration::from_millis(200);
/// How long the state of a reset flow is kept, so that carriers can report the reset.
const AFTERMATH: Duration = Duration::from_secs(5);
/// How often a flow that waits for a carrier looks whether there is one.
const LOOK: Duration = Duration::from_secs(10);
/// How long bytes may delay the reset behind them.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// The same, besides two round trips, once a carrier has them.
const LAST_REPAIR: Duration = Duration::from_millis(50);

/// The sockets of a flow. Drop resets both connections unless both directions were closed in order.
pub(super) struct Ends {
    pub(super) app: AsyncFd<TcpStream>,
    pub(super) tcp: AsyncFd<TcpStream>,
    is_done: Cell<bool>,
    /// Lets the local application see the client's address.
    pub(super) guard: Option<ClientAddressGuard>,
}

impl Ends {
    /// Takes non-blocking sockets; the application's may still be connecting.
    pub(super) fn new(
        app: TcpStream,
        tcp: TcpStream,
        guard: Option<ClientAddressGuard>,
    ) -> io::Result<Self> {
        licence::prepare(&tcp);
        // On failure more bytes go by TCP.
        let _ = option::set(&tcp, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, UNSENT);
        Ok(Self {
            app: socket::watch(app)?,
            tcp: socket::watch(tcp)?,
            is_done: Cell::new(false),
            guard,
        })
    }
}

impl Ends {
    /// The kernel's socket cookie of the TCP connection.
    pub(super) fn cookie(&self) -> io::Result<u64> {
        option::cookie(self.tcp.get_ref())
    }

    /// The application's end of its connection, and this daemon's.
    pub(super) fn app(&self) -> Option<[SocketAddr; 2]> {
        let app = self.app.get_ref();
        Some([app.peer_addr().ok()?, app.local_addr().ok()?])
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        if !self.is_done.get() {
            set_linger(self.app.get_ref(), true);
            set_linger(self.tcp.get_ref(), true);
        }
    }
}

/// State of a flow besides its bytes.
pub(super) struct State {
    /// The flow's id in commands.
    pub(super) number: u64,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    pub(super) app: Option<[SocketAddr; 2]>,
    /// The kernel's cookie of the TCP connection's socket.
    pub(super) cookie: u64,
    /// Sampled once a tick.
    pub(super) traffic: Cell<Traffic>,
    /// Readings of the TCP connection.
    pub(super) watch: RefCell<TcpWatch>,
    /// The TCP connection's congestion control.
    congestion: Congestion,
    pub(super) profile: Observer,
    pub(super) began: Instant,
    /// `None` once the flow was reset.
    pub(super) ends: RefCell<Option<Rc<Ends>>>,
    /// Bytes read from the application and not sent yet, and whether the last one is TCP's urgent byte.
    pub(super) pending: RefCell<(Bytes, bool)>,
    task: RefCell<Option<AbortHandle>>,
    /// The path that bytes arrived by last.
    pub(super) heard_by: Cell<Path>,
    /// Its bytes by carrier, while it is spread.
    pub(super) shares: Shares,
    /// Reason for the current send path, for commands.
    pub(super) why: Cell<&'static str>,
    /// Whether the peer's access to this port has been checked.
    pub(super) is_judged: Cell<bool>,
    /// Pinned to its current path until that breaks,
    pub(super) stays: Cell<bool>,
    /// or until this time.
    pub(super) stays_until: Cell<Option<Instant>>,
    /// The send path that was told last (`events`), and its name.
    pub(super) told: Cell<(Path, &'static str)>,
    /// When to retry the best carrier, which the flow left because it was full.
    pub(super) returns: Cell<Option<Instant>>,
    pub(super) licence: Licence,
    pub(super) changed: Changed,
    /// Whether the application's connection is established,
    is_connected: Cell<bool>,
    /// and whether it has failed since: no end of its stream is genuine then.
    pub(super) app_has_failed: Cell<bool>,
    /// The same of the TCP connection.
    pub(super) tcp_has_failed: Cell<bool>,
}

impl State {
    /// `addresses`: local, peer.
    pub(super) fn new(
        number: u64,
        profile: Observer,
        addresses: [SocketAddr; 2],
        ends: Ends,
    ) -> io::Result<Self> {
        let [local, peer] = addresses;
        Ok(Self {
            number,
            local,
            peer,
            app: ends.app(),
            cookie: ends.cookie()?,
            ends: RefCell::new(Some(Rc::new(ends))),
            traffic: Cell::default(),
            watch: RefCell::default(),
            congestion: Congestion::default(),
            profile,
            began: Instant::now(),
            pending: RefCell::default(),
            task: RefCell::default(),
            heard_by: Cell::default(),
            shares: Shares::default(),
            why: Cell::new("no other carrier yet"),
            is_judged: Cell::new(false),
            stays: Cell::new(false),
            stays_until: Cell::new(None),
            told: Cell::new((Path::Tcp, "tcp")),
            returns: Cell::new(None),
            licence: Licence::default(),
            changed: Changed::default(),
            is_connected: Cell::new(false),
            app_has_failed: Cell::new(false),
            tcp_has_failed: Cell::new(false),
        })
    }

    /// Writes the next bytes to the application without waiting. Returns the number written.
    pub(super) fn give(&self, pieces: &[IoSlice<'_>]) -> usize {
        let ends = self.ends.borrow();
        let Some(ends) = ends.as_ref() else { return 0 };
        if !self.is_connected.get() || self.licence.is_void() {
            return 0;
        }
        let write = |mut app: &TcpStream| app.write_vectored(pieces);
        let given = match ends.app.try_io(Interest::WRITABLE, write) {
            Ok(given) => given,
            Err(error) => {
                self.note_app_error(&error);
                0
            }
        };
        let mut left = given;
        // Most bytes come after the profile's verdict: skip them.
        for piece in pieces.iter().take_while(|_| self.profile.is_looking()) {
            let seen = &piece[..piece.len().min(left)];
            self.profile.look(Side::Peer, seen);
            left -= seen.len();
        }
        given
    }

    /// Lets BBR take over the TCP connection once its path loses packets; or not.
    pub(super) fn allow_bbr(&self, may: bool) {
        let ends = self.ends.borrow();
        let Some(ends) = ends.as_ref() else { return };
        if self.congestion.allow_bbr(ends.tcp.get_ref(), may) {
            self.watch.borrow_mut().forget_control();
        }
    }

    /// Notes an error of the application's connection, unless that only has no room. The kernel tells of it once.
    fn note_app_error(&self, error: &io::Error) {
        use io::ErrorKind::{Interrupted, WouldBlock};
        if !matches!(error.kind(), WouldBlock | Interrupted) {
            self.app_has_failed.set(true);
            self.changed.app_failed.notify_one();
        }
    }

    /// Notes an error of the TCP connection.
    fn note_tcp_error(&self) {
        self.tcp_has_failed.set(true);
        self.changed.tcp_failed.notify_one();
    }

    /// Aborts the flow's task; its state stays as it is.
    pub(super) fn stop(&self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// Origin of a flow.
pub(super) enum Beginning {
    /// Its TCP connection was just established.
    New {
        /// The local application tolerates losses.
        is_tolerant: bool,
    },
    /// Handed over by a former daemon.
    Left(Box<Flow>),
}

/// Wake-ups of a flow's tasks, besides socket readiness.
#[derive(Default)]
pub(super) struct Changed {
    /// The send path, credit, or chunks to retransmit have changed.
    pub(super) sending: Notify,
    /// Bytes were given to a carrier.
    pub(super) begun: Notify,
    /// Bytes for the application, or the end, have arrived.
    pub(super) arrived: Notify,
    /// There is room to read from the TCP connection.
    pub(super) room: Notify,
    /// The application's connection has failed,
    app_failed: Notify,
    /// or the TCP connection.
    tcp_failed: Notify,
    /// The flow has ended in an error.
    pub(super) reset: Notify,
}

/// Why a flow was reset.
#[derive(Debug, thiserror::Error)]
pub(super) enum Reset {
    #[error("the application's connection: {0}")]
    App(io::Error),
    #[error("the flow's TCP connection: {0}")]
    Tcp(io::Error),
    #[error("reset by the peer, or a protocol violation by it")]
    Peer,
    #[error("it needs a carrier to go on, and none came in time")]
    NoCarrier,
    #[error("it requires a carrier, and bytes came by its TCP connection")]
    ByTcp,
    #[error("it requires a carrier, and the peer does not know that it is a flow")]
    Unknown,
}

impl Peer {
    /// Spawns the task that carries an established flow to its end.
    pub(super) fn begin(self: &Rc<Self>, id: FlowId, state: State, beginning: Beginning) {
        let state = Rc::new(state);
        if !self.open(id, &state, beginning) {
            tracing::debug!(peer = %state.peer, %id, "flows: refused: flow number reused");
            return;
        }
        let ends = state.ends.borrow().clone();
        let carry = |ends| Rc::clone(self).carry(id, ends, Rc::clone(&state));
        let task = ends.map(|ends| spawn_local(carry(ends)).abort_handle());
        state.task.replace(task);
    }

    async fn carry(self: Rc<Self>, id: FlowId, ends: Rc<Ends>, state: Rc<State>) {
        let mover = Mover {
            peer: &self,
            id,
            ends: &ends,
            state: &state,
            changed: &state.changed,
        };
        let result = mover.run().await;
        match result {
            Ok(()) => {
                ends.is_done.set(true);
                set_linger(ends.tcp.get_ref(), false);
                self.note_outcome(id, &state);
                self.tell_ended(id, &state, None);
            }
            Err(reset) => {
                tracing::debug!(%reset, peer = %state.peer, "flows: reset");
                self.tell_ended(id, &state, Some(&reset));
                self.reset(id);
                drop(state.ends.take());
                drop(ends);
                sleep(AFTERMATH).await;
            }
        }
        tracing::debug!(flow = ?self.status(id), "flows: ended");
        self.close(id);
    }
}

struct Mover<'a> {
    peer: &'a Rc<Peer>,
    id: FlowId,
    ends: &'a Ends,
    state: &'a State,
    changed: &'a Changed,
}

impl Mover<'_> {
    async fn run(&self) -> Result<(), Reset> {
        let Ends { app, tcp, .. } = self.ends;
        let is_reset = || io::ErrorKind::ConnectionReset.into();
        let mut parts = Parts::<Result<(), Reset>>::default();
        parts.push(Box::pin(async move {
            tokio::select! {
                () = socket::broken(app) => {}
                () = self.changed.app_failed.notified() => {}
            }
            self.state.app_has_failed.set(true);
            self.last_words().await;
            Err(Reset::App(is_reset()))
        }));
        parts.push(Box::pin(async move {
            tokio::select! {
                () = socket::broken(tcp) => {}
                () = self.changed.tcp_failed.notified() => {}
            }
            self.state.tcp_has_failed.set(true);
            self.delivered().await;
            Err(Reset::Tcp(is_reset()))
        }));
        parts.push(Box::pin(async {
            self.changed.reset.notified().await;
            Err(Reset::Peer)
        }));
        parts.push(Box::pin(async {
            match self.state.licence.keep(tcp.get_ref()).await {}
        }));
        tokio::select! {
            connected = socket::connected(app) => connected.map_err(Reset::App)?,
            Some(Err(reset)) = parts.next() => return Err(reset),
        }
        self.state.is_connected.set(true);
        parts.push(Box::pin(async { match self.watch_start().await {} }));
        if self.id.opener == Side::Local && !self.id.requires_carrier() {
            parts.push(Box::pin(async { match self.await_word().await {} }));
        }
        parts.push(Box::pin(self.send()));
        parts.push(Box::pin(self.receive()));
        parts.push(Box::pin(self.deliver()));
        // Three of them complete; the others only fail.
        for _ in 0..3 {
            if let Some(ended) = parts.next().await {
                ended?;
            }
        }
        Ok(())
    }

    /// Waits until the peer has what the application had written before its connection failed, since TCP's reset is behind
    /// that; not for long, and no longer than a carrier needs to repeat it, as the peer does not confirm each byte.
    async fn last_words(&self) {
        let Ends { app, tcp, .. } = self.ends;
        let rtt = option::tcp_rtt(tcp.get_ref()).unwrap_or_default();
        let wait = async |limit: Duration, has_more: &dyn Fn() -> bool| {
            let until = Instant::now() + limit;
            while has_more() && Instant::now() < until {
                sleep((rtt / 8).max(Duration::from_millis(1))).await;
            }
        };
        wait(LAST_WORDS + 3 * rtt, &|| {
            socket::unread(app.get_ref()) > 0
                || !self.state.pending.borrow().0.is_empty()
                || socket::unacknowledged(tcp.get_ref()) > 0
        })
        .await;
        wait(LAST_REPAIR + 2 * rtt, &|| {
            self.with(|flow| flow.send.memory() > 0).unwrap_or(false)
        })
        .await;
    }

    /// Waits until the application has what came before the TCP connection failed; for [`LAST_WORDS`] at most.
    async fn delivered(&self) {
        let until = Instant::now() + LAST_WORDS;
        let has_more = || {
            socket::unread(self.ends.tcp.get_ref()) > 0
                || (self.with(|flow| flow.receive.peek().is_some())).unwrap_or(false)
        };
        while has_more() && Instant::now() < until {
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// Looks for losses while the TCP connection begins, from when BBR may take over.
    async fn watch_start(&self) -> Infallible {
        let tcp = self.ends.tcp.get_ref();
        self.state.congestion.allowed().await;
        let mut looks = 0;
        while let Some(pause) = self.state.congestion.next_look(tcp, looks) {
            sleep(pause).await;
            self.watch_losses();
            looks += 1;
        }
        pending().await
    }

    /// Has the flow go on by TCP if the peer says nothing of it: the handshake's last ACK may be lost, and the peer does
    /// not have the connection then. The first bytes make up for it.
    async fn await_word(&self) -> Infallible {
        self.changed.begun.notified().await;
        // Without a sample (its SYN was repeated), what TCP assumes (RFC 6298).
        let rtt = option::tcp_rtt(self.ends.tcp.get_ref());
        sleep(SILENCE + 3 * rtt.unwrap_or(Duration::from_secs(1))).await;
        // What has come from the peer by a carrier is a word, too.
        if self.state.heard_by.get() == Path::Tcp {
            self.peer.doubt(self.id, self.state);
        }
        pending().await
    }

    /// Has BBR take over the TCP connection if it may and the path loses packets, or give it back.
    fn watch_losses(&self) {
        if self.state.congestion.watch(self.ends.tcp.get_ref()) {
            self.state.watch.borrow_mut().forget_control();
        }
    }

    /// Applies `change` to the flow; queues the control frames that result.
    fn with<T>(&self, change: impl FnOnce(&mut Flow) -> T) -> Result<T, Reset> {
        self.peer.with(self.id, change).ok_or(Reset::Peer)
    }

    /// Sends from the application to the peer, until the application's end and everything before it are confirmed.
    async fn send(&self) -> Result<(), Reset> {
        let pending = &self.state.pending;
        let mut lack = None;
        let mut spreading: Option<Spreading> = None;
        loop {
            let (path, next, is_complete) = self.with(|flow| {
                let path = flow.send.path();
                (path, flow.send.next(path, CHUNK), flow.send.is_complete())
            })?;
            if is_complete {
                self.state.profile.note_moving();
                self.peer.read_last(self.state, self.ends.tcp.get_ref());
                // The peer has everything already, by a carrier or with this FIN sent before.
                let _ = shut_down(self.ends.tcp.get_ref(), Shutdown::Write);
                return Ok(());
            }
            if path != Path::Tcp && self.state.licence.is_void() {
                tokio::select! {
                    () = self.state.licence.valid() => {}
                    () = self.changed.sending.notified() => {}
                }
                continue;
            }
            if let Some(kind) = self.peer.scheduler().filter(|_| self.may_spread(path)) {
                let spreading = match &mut spreading {
                    Some(spreading) if spreading.is(kind) => spreading,
                    spreading => spreading.insert(Spreading::new(kind)),
                };
                self.spread(spreading, path, next).await?;
                continue;
            }
            if path != Path::Tcp && self.state.licence.is_void_on_path() {
                tokio::select! {
                    () = self.state.licence.valid_on_path() => {}
                    () = self.changed.sending.notified() => {}
                }
                continue;
            }
            match next {
                None => self.await_change(&mut lack).await?,
                Some(Next::Fin) => {
                    let shut = shut_down(self.ends.tcp.get_ref(), Shutdown::Write);
                    shut.map_err(Reset::Tcp)?;
                    self.with(|flow| flow.send.sent_fin())?;
                }
                Some(Next::Again(chunk)) => {
                    self.send_chunk(path, chunk, true).await?;
                }
                Some(Next::New { offset, max }) => {
                    if pending.borrow().0.is_empty() {
                        tokio::select! {
                            got = self.read_app(path, max) => match got? {
                                Got::Bytes(bytes, is_urgent) => {
                                    self.state.profile.look(Side::Local, &bytes);
                                    self.state.profile.note_moving();
                                    pending.replace((bytes, is_urgent));
                                }
                                Got::End => self.with(|flow| flow.send.finish())?,
                            },
                            () = self.changed.sending.notified() => {}
                        }
                        // The path may have changed meanwhile.
                        continue;
                    }
                    let chunk = {
                        let (all, is_urgent) = &*pending.borrow();
                        let bytes = all.slice(..all.len().min(max as usize));
                        let urgent = *is_urgent && bytes.len() == all.len();
                        Chunk {
                            offset,
                            bytes,
                            urgent,
                        }
                    };
                    self.send_chunk(path, chunk, false).await?;
                }
            }
        }
    }

    /// Whether the flow may go by several carriers instead of its path: neither by its TCP connection, nor pinned by hand,
    /// nor by a carrier that takes no part.
    fn may_spread(&self, path: Path) -> bool {
        let Path::Carrier(id) = path else {
            return false;
        };
        let carrier = self.peer.carrier(id);
        !self.state.stays.get() && carrier.is_some_and(|carrier| carrier.stack(id).is_some())
    }

    /// Waits for a change, for a flow that has nothing to send by its path. On TCP it may need a carrier: because it requires
    /// one, or since the peer has yet to learn from which byte on the connection goes on, or of the end. `lack`: since when
    /// something has been waiting for one, and the offset that the peer had confirmed by then; a carrier that breaks without
    /// progress resets neither.
    ///
    /// # Errors
    /// That is longer than TCP's retransmission limit ([`tcp_patience`]): nothing else would tell the application, as when the
    /// peer refuses this host by now. Or the peer does not know the flow, which requires a carrier.
    async fn await_change(&self, lack: &mut Option<(Instant, u64)>) -> Result<(), Reset> {
        let changed = self.changed.sending.notified();
        let requires = self.id.requires_carrier();
        let (is_by_tcp, is_rejected, has_news, has_more, confirmed) = self.with(|flow| {
            let send = &flow.send;
            let owes_fin = send.owes_fin().is_some();
            (
                send.path() == Path::Tcp,
                send.is_rejected(),
                send.asked().is_some() || owes_fin,
                send.has_returned() || owes_fin,
                send.confirmed_offset(),
            )
        })?;
        let has_news = has_news && !requires;
        if !is_by_tcp || !(requires || has_news && !self.peer.has_carriers()) {
            *lack = None;
            tokio::select! {
                () = changed => {}
                () = sleep(LOOK), if has_news => {}
            }
            return Ok(());
        }
        if requires && is_rejected {
            return Err(Reset::Unknown);
        }
        if !has_more && self.state.pending.borrow().0.is_empty() {
            tokio::select! {
                biased;
                ahead = self.ends.app.async_io(Interest::READABLE, urgent::ahead) => {
                    if let Err(error) = ahead {
                        self.state.note_app_error(&error);
                    }
                }
                () = changed => return Ok(()),
            }
        }
        let former = lack.filter(|(_, before)| *before == confirmed);
        let (since, _) = *lack.insert(former.unwrap_or_else(|| (Instant::now(), confirmed)));
        let left = tcp_patience().saturating_sub(since.elapsed());
        if left.is_zero() {
            return Err(Reset::NoCarrier);
        }
        tokio::select! {
            () = self.changed.sending.notified() => {}
            () = sleep(left.min(LOOK)) => {}
        }
        Ok(())
    }

    /// Reads from the application once the path is writable. Does not complete where its connection has failed and
    /// everything was read: a reset comes next.
    async fn read_app(&self, path: Path, max: u64) -> Result<Got, Reset> {
        if path == Path::Tcp {
            let writable = self.ends.tcp.writable().await;
            writable.map_err(Reset::Tcp)?.retain_ready();
        }
        let max = max.min(CHUNK as u64) as usize;
        let read = |socket: &TcpStream| read(socket, max);
        match self.ends.app.async_io(Interest::READABLE, read).await {
            Ok(Got::End) if self.state.app_has_failed.get() => pending().await,
            Ok(got) => Ok(got),
            Err(error) => {
                self.state.note_app_error(&error);
                pending().await
            }
        }
    }

    /// Sends a chunk, or a part of it, by a path. `is_again`: a retransmission; a new chunk is the head of `pending`.
    async fn send_chunk(&self, path: Path, chunk: Chunk, is_again: bool) -> Result<(), Reset> {
        let sent = |flow: &mut Flow, bytes: Bytes, urgent: bool| match is_again {
            true => flow.send.sent_again(bytes.len()),
            false => flow.send.sent_new(bytes, urgent),
        };
        let forget = |n: usize| {
            if !is_again {
                drop(self.state.pending.borrow_mut().0.split_to(n));
            }
        };
        let Path::Carrier(carrier) = path else {
            let write = |mut tcp: &TcpStream| match chunk.urgent && chunk.bytes.len() == 1 {
                true => urgent::send(tcp, chunk.bytes[0]),
                // The urgent byte is sent by itself.
                false => tcp.write(&chunk.bytes[..chunk.bytes.len() - usize::from(chunk.urgent)]),
            };
            tokio::select! {
                // First: after a change the path is chosen anew.
                biased;
                () = self.changed.sending.notified() => {}
                written = self.ends.tcp.async_io(Interest::WRITABLE, write) => {
                    let Ok(n) = written else {
                        self.state.note_tcp_error();
                        return pending().await;
                    };
                    self.with(|flow| sent(flow, chunk.bytes.slice(..n), chunk.urgent && n == chunk.bytes.len()))?;
                    forget(n);
                    self.watch_losses();
                }
            }
            return Ok(());
        };
        let len = chunk.bytes.len();
        self.with(|flow| sent(flow, chunk.bytes.clone(), chunk.urgent))?;
        self.changed.begun.notify_one();
        forget(len);
        let Some(by) = self.peer.carrier(carrier) else {
            // It has just broken: the chunk is returned for retransmission.
            return Ok(());
        };
        let taken = tokio::select! {
            taken = by.chunk(self.id, chunk.clone()) => taken,
            () = self.left(path) => Err(Refused::Full),
        };
        match taken {
            Ok(()) => {
                self.state.licence.note_moved();
                self.peer.count_sent(carrier, len);
            }
            // `Peer::broken` returns the chunk for retransmission.
            Err(Refused::Broken) => {
                self.left(path).await;
            }
            Err(Refused::Full) => {
                let stays = self.id.requires_carrier();
                self.with(|flow| {
                    if flow.send.path() == path && !stays {
                        self.state.why.set("the carrier is full");
                        self.state.returns.set(Some(Instant::now() + RETURN));
                        flow.send.move_to(Path::Tcp, false);
                    }
                    flow.send.returned(&chunk);
                })?;
                self.peer.tell_if_moved(self.id, self.state);
                if stays {
                    sleep(FULL).await;
                }
            }
        }
        Ok(())
    }

    /// Completes when the flow has left the path.
    async fn left(&self, path: Path) {
        while self
            .peer
            .with(self.id, |flow| flow.send.path() == path)
            .unwrap_or(false)
        {
            self.changed.sending.notified().await;
        }
    }

    /// Receives from the TCP connection, until its end.
    async fn receive(&self) -> Result<(), Reset> {
        loop {
            let has_room = self.peer.has_room();
            let room = self.with(|flow| {
                match has_room || flow.receive.received() == flow.receive.consumed() {
                    true => flow.receive.tcp_room(),
                    // Memory limit: backpressure by TCP's receive window.
                    false => 0,
                }
            })?;
            if room == 0 {
                self.changed.room.notified().await;
                continue;
            }
            let max = room.min(CHUNK as u64) as usize;
            let read = |socket: &TcpStream| read(socket, max);
            let got = tokio::select! {
                // First: the room may have shrunk.
                biased;
                () = self.changed.room.notified() => continue,
                got = self.ends.tcp.async_io(Interest::READABLE, read) => got,
            };
            let Ok(got) = got else {
                self.state.note_tcp_error();
                return pending().await;
            };
            let taken = match got {
                // A reset comes next.
                Got::End if self.state.tcp_has_failed.get() => return pending().await,
                Got::Bytes(..) if self.id.requires_carrier() => return Err(Reset::ByTcp),
                Got::Bytes(bytes, is_urgent) => {
                    self.state.heard_by.set(Path::Tcp);
                    self.state.licence.set_void(false);
                    self.state.profile.note_moving();
                    self.with(|flow| flow.receive.tcp(&bytes, is_urgent).map(|()| false))?
                }
                Got::End => self.with(|flow| flow.receive.tcp_end().map(|()| true))?,
            };
            self.changed.arrived.notify_one();
            if taken.map_err(|_| Reset::Peer)? {
                return Ok(());
            }
        }
    }

    /// Delivers to the application, until the peer's end.
    async fn deliver(&self) -> Result<(), Reset> {
        let app = &self.ends.app;
        loop {
            self.state.licence.valid().await;
            let has_room = self.peer.has_room();
            // `Some(true)`: the write has made room to read from the TCP connection.
            let written: io::Result<Option<bool>> = self.with(|flow| {
                let (bytes, is_urgent) = match flow.receive.peek() {
                    Some(next) => next,
                    None => return Ok(None),
                };
                let write = |mut app: &TcpStream| match is_urgent {
                    true => urgent::send(app, bytes[0]),
                    false => app.write(bytes),
                };
                let n = app.try_io(Interest::WRITABLE, write)?;
                self.state.profile.look(Side::Peer, &bytes[..n]);
                let was_full = flow.receive.tcp_room() == 0;
                flow.receive.consume(n);
                Ok(Some(was_full || !has_room))
            })?;
            match written {
                Ok(Some(true)) => self.changed.room.notify_one(),
                Ok(Some(false)) => {}
                Ok(None) if self.with(|flow| flow.receive.is_complete())? => {
                    // The end of the stream is genuine: close with FIN, not RST.
                    set_linger(app.get_ref(), false);
                    let _ = shut_down(app.get_ref(), Shutdown::Write);
                    return Ok(());
                }
                Ok(None) => self.changed.arrived.notified().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writable = app.writable().await;
                    writable.map_err(Reset::App)?.retain_ready();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.state.note_app_error(&error);
                    pending::<()>().await;
                }
            }
        }
    }
}

/// How long TCP retransmits before it aborts the connection, on a path with a short round trip (RFC 1122, section
/// 4.2.3.5, R2): 15 minutes and 24 s with the default of `tcp_retries2`.
fn tcp_patience() -> Duration {
    let retries = fs::read_to_string("/proc/sys/net/ipv4/tcp_retries2");
    let retries = retries.ok().and_then(|text| text.trim().parse().ok());
    patience(retries.unwrap_or(RETRIES))
}

/// Default of `tcp_retries2`: retransmissions before TCP aborts.
const RETRIES: u32 = 15;

fn patience(retries: u32) -> Duration {
    const FIRST: Duration = Duration::from_millis(200); // TCP_RTO_MIN
    const LONGEST: Duration = Duration::from_secs(120); // TCP_RTO_MAX
    let timeout = |n: u32| (FIRST * (1 << n.min(16))).min(LONGEST);
    (0..=retries.min(255)).map(timeout).sum()
}

/// Reset code: ends a flow in both directions.
pub(super) const RESET: ResetCode = ResetCode::Reset;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience__is_tcps() {
        // Linux's ip-sysctl.rst on tcp_retries2.
        assert_eq!(patience(15).as_millis(), 924_600);
        assert_eq!(patience(3).as_millis(), 3000);
    }
}
