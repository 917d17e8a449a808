//! Moves the bytes of one flow between the application, the flow's TCP connection, and carriers.

use std::{
    cell::{Cell, RefCell},
    fs,
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
use vtl_core::flow::{Chunk, Flow, Next, Path};
use vtl_proto::frame::{FlowId, ResetCode, Side};

use super::{
    carrier::Refused,
    licence::{self, Licence},
    parts::Parts,
    peer::Peer,
    profile::Observer,
    socket::{self, Got, read},
};
use crate::{broker::set_linger, hooker::ClientAddressGuard, option, urgent};

/// Bytes read from a socket, and given to a carrier, at a time.
const CHUNK: usize = 64 << 10;
/// Bytes that wait in the TCP connection's socket for their turn: they cannot go by a carrier any more.
const UNSENT: libc::c_int = 16 << 10;
/// How long a flow goes by TCP that has left a carrier: to come back may cost it a round trip.
const RETURN: Duration = Duration::from_secs(10);
/// Before a carrier that was full is tried again by a flow that has no other way.
const FULL: Duration = Duration::from_millis(20);
/// How long a flow that was reset is kept, so that carriers can say so.
const AFTERMATH: Duration = Duration::from_secs(5);

/// The sockets of a flow. Dropped before both directions have come to their true ends, both connections are
/// reset.
pub(super) struct Ends {
    pub(super) app: AsyncFd<TcpStream>,
    pub(super) tcp: AsyncFd<TcpStream>,
    is_done: Cell<bool>,
    /// What shows a local application its client.
    pub(super) guard: Option<ClientAddressGuard>,
}

impl Ends {
    /// Of sockets that do not block; the application's may still be connecting.
    pub(super) fn new(
        app: TcpStream,
        tcp: TcpStream,
        guard: Option<ClientAddressGuard>,
    ) -> io::Result<Self> {
        licence::prepare(&tcp);
        // Without, more goes by it.
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
    /// What the kernel calls the TCP connection.
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

/// How fast a flow is, from one look to the next.
#[derive(Default)]
pub(super) struct Rates {
    /// Bytes to the peer and from it, at the last look.
    seen: Cell<[u64; 2]>,
    /// Bytes a second between the last two looks.
    pub(super) rates: Cell<[f64; 2]>,
}

impl Rates {
    /// What was before counts for nothing.
    pub(super) fn begin(&self, bytes: [u64; 2]) {
        self.seen.set(bytes);
    }

    /// A look, so long after the last one.
    pub(super) fn look(&self, bytes: [u64; 2], after: Duration) {
        let before = self.seen.replace(bytes);
        let rate = |i: usize| (bytes[i] - before[i]) as f64 / after.as_secs_f64();
        self.rates.set([rate(0), rate(1)]);
    }
}

/// What there is to know of a flow besides its bytes.
pub(super) struct State {
    /// What commands call it.
    pub(super) number: u64,
    pub(super) local: SocketAddr,
    pub(super) peer: SocketAddr,
    pub(super) app: Option<[SocketAddr; 2]>,
    /// Of the TCP connection's socket.
    pub(super) cookie: u64,
    pub(super) rates: Rates,
    pub(super) profile: Observer,
    pub(super) began: Instant,
    /// Until it has been reset.
    pub(super) ends: RefCell<Option<Rc<Ends>>>,
    /// Read from the application, not sent yet, and whether the last byte is TCP's urgent one.
    pub(super) pending: RefCell<(Bytes, bool)>,
    task: RefCell<Option<AbortHandle>>,
    /// What bytes came by last.
    pub(super) heard_by: Cell<Path>,
    /// Why what this host sends goes by the path that it goes by.
    pub(super) why: Cell<&'static str>,
    /// What its peer may reach here has been looked at.
    pub(super) is_judged: Cell<bool>,
    /// It stays where it is, unless that breaks.
    pub(super) stays: Cell<bool>,
    /// At the last look it had sent by a carrier, and heard nothing.
    pub(super) is_unheard: Cell<bool>,
    /// It has left a carrier that others still go by, and is to try it again then.
    pub(super) returns: Cell<Option<Instant>>,
    pub(super) licence: Licence,
    pub(super) changed: Changed,
    /// The application's connection is established.
    is_connected: Cell<bool>,
}

impl State {
    /// `addresses`: this host's, and the peer's.
    pub(super) fn new(
        number: u64,
        opener: Side,
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
            rates: Rates::default(),
            profile: Observer::new(opener, addresses),
            began: Instant::now(),
            pending: RefCell::default(),
            task: RefCell::default(),
            heard_by: Cell::default(),
            why: Cell::new("no other carrier yet"),
            is_judged: Cell::new(false),
            stays: Cell::new(false),
            is_unheard: Cell::new(false),
            returns: Cell::new(None),
            licence: Licence::default(),
            changed: Changed::default(),
            is_connected: Cell::new(false),
        })
    }

    /// Gives the application what it takes at once of the next bytes; how many.
    pub(super) fn give(&self, pieces: &[IoSlice<'_>]) -> usize {
        let ends = self.ends.borrow();
        let Some(ends) = ends.as_ref() else { return 0 };
        if !self.is_connected.get() || self.licence.is_void() {
            return 0;
        }
        let write = |mut app: &TcpStream| app.write_vectored(pieces);
        // An error is found again by who writes the rest.
        let given = ends.app.try_io(Interest::WRITABLE, write).unwrap_or(0);
        let mut left = given;
        // Those behind the verdict are many.
        for piece in pieces.iter().take_while(|_| self.profile.is_looking()) {
            let seen = &piece[..piece.len().min(left)];
            self.profile.look(Side::Peer, seen);
            left -= seen.len();
        }
        given
    }

    /// Leaves it as it is.
    pub(super) fn stop(&self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

/// How a flow begins here.
pub(super) enum Beginning {
    /// Its TCP connection was just established.
    New {
        /// The local application does without what gets lost.
        is_tolerant: bool,
    },
    /// As a former daemon has left it.
    Left(Box<Flow>),
}

/// What a flow's tasks wait for besides sockets.
#[derive(Default)]
pub(super) struct Changed {
    /// The way, credit, or what was given back.
    pub(super) sending: Notify,
    /// There are bytes for the application, or the end.
    pub(super) arrived: Notify,
    /// There is room for bytes of the TCP connection.
    pub(super) room: Notify,
    /// It has ended in an error.
    pub(super) reset: Notify,
}

/// Why a flow has ended before its time.
#[derive(Debug, thiserror::Error)]
pub(super) enum Reset {
    #[error("the application's connection: {0}")]
    App(io::Error),
    #[error("the flow's TCP connection: {0}")]
    Tcp(io::Error),
    #[error("the peer has reset it, or broke the rules")]
    Peer,
    #[error("it requires a carrier, and none came in time")]
    NoCarrier,
    #[error("it requires a carrier, and bytes came by its TCP connection")]
    ByTcp,
    #[error("it requires a carrier, and the peer does not know that it is a flow")]
    Unknown,
}

impl Peer {
    /// Carries a flow whose TCP connection is established, to its end.
    pub(super) fn begin(self: &Rc<Self>, id: FlowId, state: State, beginning: Beginning) {
        let state = Rc::new(state);
        if !self.open(id, &state, beginning) {
            tracing::debug!(peer = %state.peer, %id, "a flow's number was used before");
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
            }
            Err(reset) => {
                tracing::debug!(%reset, peer = %state.peer, "a flow was reset");
                self.reset(id);
                drop(state.ends.take());
                drop(ends);
                sleep(AFTERMATH).await;
            }
        }
        tracing::debug!(flow = ?self.status(id), "a flow is over");
        self.close(id);
    }
}

struct Mover<'a> {
    peer: &'a Peer,
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
            socket::broken(app).await;
            Err(Reset::App(is_reset()))
        }));
        parts.push(Box::pin(async move {
            socket::broken(tcp).await;
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
        parts.push(Box::pin(self.send()));
        parts.push(Box::pin(self.receive()));
        parts.push(Box::pin(self.deliver()));
        // Three of them end well.
        for _ in 0..3 {
            if let Some(ended) = parts.next().await {
                ended?;
            }
        }
        Ok(())
    }

    /// The flow's state; what it owes the peer then is queued.
    fn with<T>(&self, change: impl FnOnce(&mut Flow) -> T) -> Result<T, Reset> {
        self.peer.with(self.id, change).ok_or(Reset::Peer)
    }

    /// From the application to the peer, up to the application's end and the peer's having everything.
    async fn send(&self) -> Result<(), Reset> {
        let pending = &self.state.pending;
        let mut lack = None;
        loop {
            let (path, next, is_complete) = self.with(|flow| {
                let path = flow.send.path();
                (path, flow.send.next(path, CHUNK), flow.send.is_complete())
            })?;
            if is_complete {
                // The peer has got everything another way, or has got this end already.
                let _ = self.ends.tcp.get_ref().shutdown(Shutdown::Write);
                return Ok(());
            }
            if path != Path::Tcp && self.state.licence.is_void() {
                tokio::select! {
                    () = self.state.licence.valid() => {}
                    () = self.changed.sending.notified() => {}
                }
                continue;
            }
            if path == Path::Tcp && next.is_none() && self.id.requires_carrier() {
                self.await_carrier(&mut lack).await?;
                continue;
            }
            match next {
                None => self.changed.sending.notified().await,
                Some(Next::Fin) => {
                    let shut = self.ends.tcp.get_ref().shutdown(Shutdown::Write);
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
                                    pending.replace((bytes, is_urgent));
                                }
                                Got::End => self.with(|flow| flow.send.finish())?,
                            },
                            () = self.changed.sending.notified() => {}
                        }
                        // The way may be another by now.
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

    /// Waits for a change of a flow that requires a carrier and has none. `lack`: since when there have been bytes for
    /// one, and how much the peer had confirmed then. One that comes and goes, and brings nothing, changes neither.
    ///
    /// # Errors
    /// There has been something to send for longer than TCP would repeat it.
    async fn await_carrier(&self, lack: &mut Option<(Instant, u64)>) -> Result<(), Reset> {
        let (is_rejected, is_owing, is_finished, confirmed) = self.with(|flow| {
            let send = &flow.send;
            (
                send.is_rejected(),
                send.has_returned(),
                send.is_finished(),
                send.confirmed_offset(),
            )
        })?;
        if is_rejected {
            return Err(Reset::Unknown);
        }
        let changed = self.changed.sending.notified();
        if !is_owing && self.state.pending.borrow().0.is_empty() {
            if is_finished {
                changed.await;
                return Ok(());
            }
            tokio::select! {
                () = changed => return Ok(()),
                readable = self.ends.app.readable() => readable.map_err(Reset::App)?.retain_ready(),
            }
        }
        let former = lack.filter(|(_, before)| *before == confirmed);
        let (since, _) = *lack.insert(former.unwrap_or_else(|| (Instant::now(), confirmed)));
        let patience = tcp_patience();
        let left = patience.saturating_sub(since.elapsed());
        tokio::select! {
            () = self.changed.sending.notified() => Ok(()),
            () = sleep(left) => Err(Reset::NoCarrier),
        }
    }

    /// Reads from the application once the path takes something.
    async fn read_app(&self, path: Path, max: u64) -> Result<Got, Reset> {
        if path == Path::Tcp {
            let writable = self.ends.tcp.writable().await;
            writable.map_err(Reset::Tcp)?.retain_ready();
        }
        let max = max.min(CHUNK as u64) as usize;
        let read = |socket: &TcpStream| read(socket, max);
        let got = self.ends.app.async_io(Interest::READABLE, read).await;
        got.map_err(Reset::App)
    }

    /// Sends a chunk by a path, all of it or a part. New ones are the beginning of what is pending.
    async fn send_chunk(&self, path: Path, chunk: Chunk, is_again: bool) -> Result<(), Reset> {
        let sent = |flow: &mut Flow, bytes: Bytes, urgent: bool| match is_again {
            true => flow.send.sent_again(bytes.len(), true),
            false => flow.send.sent_new(bytes, urgent, true),
        };
        let forget = |n: usize| {
            if !is_again {
                drop(self.state.pending.borrow_mut().0.split_to(n));
            }
        };
        let Path::Carrier(carrier) = path else {
            let write = |mut tcp: &TcpStream| match chunk.urgent && chunk.bytes.len() == 1 {
                true => urgent::send(tcp, chunk.bytes[0]),
                // The urgent byte goes alone.
                false => tcp.write(&chunk.bytes[..chunk.bytes.len() - usize::from(chunk.urgent)]),
            };
            tokio::select! {
                // First: what has changed since decides anew what goes by this path.
                biased;
                () = self.changed.sending.notified() => {}
                written = self.ends.tcp.async_io(Interest::WRITABLE, write) => {
                    let n = written.map_err(Reset::Tcp)?;
                    self.with(|flow| sent(flow, chunk.bytes.slice(..n), chunk.urgent && n == chunk.bytes.len()))?;
                    forget(n);
                }
            }
            return Ok(());
        };
        let len = chunk.bytes.len();
        self.with(|flow| sent(flow, chunk.bytes.clone(), chunk.urgent))?;
        forget(len);
        let Some(by) = self.peer.carrier(carrier) else {
            // It has broken just now, and gives the chunk back.
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
            // Its end is noted elsewhere, and the chunk given back then.
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
                if stays {
                    sleep(FULL).await;
                }
            }
        }
        Ok(())
    }

    /// Completes when the flow takes another path.
    async fn left(&self, path: Path) {
        while self
            .peer
            .with(self.id, |flow| flow.send.path() == path)
            .unwrap_or(false)
        {
            self.changed.sending.notified().await;
        }
    }

    /// From the TCP connection, up to its end.
    async fn receive(&self) -> Result<(), Reset> {
        loop {
            let has_room = self.peer.has_room();
            let room = self.with(|flow| match has_room || flow.receive.held() == 0 {
                true => flow.receive.tcp_room(),
                // The rest waits in the kernel.
                false => 0,
            })?;
            if room == 0 {
                self.changed.room.notified().await;
                continue;
            }
            let max = room.min(CHUNK as u64) as usize;
            let read = |socket: &TcpStream| read(socket, max);
            let got = tokio::select! {
                // First: there may be less room than before.
                biased;
                () = self.changed.room.notified() => continue,
                got = self.ends.tcp.async_io(Interest::READABLE, read) => got,
            };
            let taken = match got.map_err(Reset::Tcp)? {
                Got::Bytes(..) if self.id.requires_carrier() => return Err(Reset::ByTcp),
                Got::Bytes(bytes, is_urgent) => {
                    self.state.heard_by.set(Path::Tcp);
                    self.state.licence.set_void(false);
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

    /// To the application, up to the peer's end.
    async fn deliver(&self) -> Result<(), Reset> {
        let app = &self.ends.app;
        loop {
            self.state.licence.valid().await;
            let has_room = self.peer.has_room();
            // Whether that makes room for bytes of the TCP connection.
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
                    // From here on the end that the application sees is the true one.
                    set_linger(app.get_ref(), false);
                    let _ = app.get_ref().shutdown(Shutdown::Write);
                    return Ok(());
                }
                Ok(None) => self.changed.arrived.notified().await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writable = app.writable().await;
                    writable.map_err(Reset::App)?.retain_ready();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Reset::App(error)),
            }
        }
    }
}

/// How long TCP would repeat a segment before it gives the connection up, on a path with a short round trip (RFC 1122,
/// section 4.2.3.5, R2): 15 minutes and 24 s, unless the system's `tcp_retries2` says something else.
fn tcp_patience() -> Duration {
    let retries = fs::read_to_string("/proc/sys/net/ipv4/tcp_retries2");
    let retries = retries.ok().and_then(|text| text.trim().parse().ok());
    patience(retries.unwrap_or(RETRIES))
}

/// What TCP sends at first and so many times again.
const RETRIES: u32 = 15;

fn patience(retries: u32) -> Duration {
    const FIRST: Duration = Duration::from_millis(200); // TCP_RTO_MIN
    const LONGEST: Duration = Duration::from_secs(120); // TCP_RTO_MAX
    let timeout = |n: u32| (FIRST * (1 << n.min(16))).min(LONGEST);
    (0..=retries.min(255)).map(timeout).sum()
}

/// What ends a flow in both directions.
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
