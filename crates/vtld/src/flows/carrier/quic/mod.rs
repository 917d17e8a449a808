//! QUIC as a carrier: a stream for the control frames, and one for each run of bytes of a flow, which begins
//! with the header of a CHUNK without length. So a lost packet holds up the flow whose bytes it had, and
//! bytes are taken as they arrive, in any order.

mod endpoint;

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    future::Future,
    io,
    pin::pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use quinn::{Connection, FrameStats, PathStats, RecvStream, SendStream, WriteError};
use tokio::{
    sync::Mutex,
    task::{JoinSet, spawn_local},
    time::{Instant, interval, timeout},
};
use vtl_control::CarrierPath;
use vtl_core::flow::Chunk;
use vtl_proto::{
    carrier::Kind,
    frame::{self, CRYPTO, CarrierId, FlowId, Frame, HEADER, Side},
};

use super::{
    super::{
        control::{Frames, emit, hello},
        peer::Peer,
    },
    Arrivals, Carrier, Endpoint, Expected, Granted, Grantor, HANDSHAKE, Link, Local, Refused,
    SILENCE, Shown, Taking, ToOpen,
};
use endpoint::Quic;

/// Bytes that one stream takes before others have their turn.
const TURN: usize = 256 << 10;
/// Between two looks at the path.
const TICK: Duration = Duration::from_millis(100);
/// Idle time after which the window shrinks below its initial size; at least four round trips.
const QUIET: Duration = Duration::from_secs(2);
/// Bytes that flows may write ahead of the network at least.
const LEAST_AHEAD: u64 = 1 << 20;

/// The stream of a flow's latest run of bytes.
struct Run {
    stream: SendStream,
    /// Offset behind the last byte.
    next: u64,
}

/// The connection's receive window: what the peer may have in flight, and so have buffered behind gaps.
struct Window {
    connection: Connection,
    size: Cell<u32>,
    /// Bytes delivered since it grew, and when the last ones were.
    taken: Cell<u64>,
    latest: Cell<Instant>,
}

impl Window {
    /// That of a new connection.
    fn of(connection: &Connection) -> Rc<Self> {
        Rc::new(Self {
            connection: connection.clone(),
            size: Cell::new(endpoint::FIRST_WINDOW),
            taken: Cell::new(0),
            latest: Cell::new(Instant::now()),
        })
    }

    /// Auto-tuning: doubles the window each time that half of it was delivered, up to `most` bytes, so slow start is not
    /// limited by it.
    fn note_taken(&self, bytes: usize, most: u64) {
        let taken = self.taken.get() + bytes as u64;
        self.taken.set(taken);
        self.latest.set(Instant::now());
        let window = self.size.get();
        if taken >= u64::from(window / 2) {
            self.taken.set(0);
            let most = u32::try_from(most).unwrap_or(u32::MAX);
            self.set(window.saturating_mul(2).min(most));
        }
    }

    /// Decays by a quarter each round trip, at least each [`TICK`]: in steady state some five bandwidth-delay products
    /// remain.
    fn ease(&self, rtt: Duration) {
        let part = TICK.as_secs_f64() / rtt.max(TICK).as_secs_f64() / 4.0;
        let eased = (f64::from(self.size.get()) * (1.0 - part)) as u32;
        let least = match self.latest.get().elapsed() < QUIET.max(4 * rtt) {
            true => endpoint::FIRST_WINDOW,
            false => endpoint::LEAST_WINDOW,
        };
        self.set(eased.max(least.min(self.size.get())));
    }

    fn set(&self, window: u32) {
        let window = window.clamp(endpoint::LEAST_WINDOW, endpoint::MOST_WINDOW);
        if self.size.replace(window) != window {
            self.connection.set_receive_window(window.into());
        }
    }
}

/// A connection.
pub(super) struct QuicCarrier {
    id: CarrierId,
    connection: Connection,
    control: Rc<Mutex<SendStream>>,
    runs: RefCell<HashMap<FlowId, Run>>,
    /// As of the last look.
    stats: Cell<Option<PathStats>>,
    window: Rc<Window>,
}

impl QuicCarrier {
    /// Of a connection whose handshake is done: opens the control stream.
    async fn new(connection: Connection, id: CarrierId, tag: u32) -> Option<Rc<Self>> {
        let control = connection.open_uni().await.ok()?;
        let carrier = Rc::new(Self {
            id,
            window: Window::of(&connection),
            connection,
            control: Rc::new(Mutex::new(control)),
            runs: RefCell::default(),
            stats: Cell::new(None),
        });
        carrier.control(emit(hello(id, tag))).await.ok()?;
        Some(carrier)
    }

    async fn send(&self, flow: FlowId, mut chunk: Chunk) -> Result<(), Refused> {
        if chunk.urgent {
            // A stream has no place for the mark, so the byte goes as a frame.
            let last = chunk.bytes.split_off(chunk.bytes.len() - 1);
            let frame = Frame::Chunk {
                flow,
                offset: chunk.end(),
                bytes: &last,
                fin: false,
                urgent: true,
            };
            let (control, frame) = (Rc::clone(&self.control), emit(frame));
            // A task of its own: nobody may give up in the middle of a frame.
            let said = spawn_local(async move { control.lock().await.write_chunk(frame).await });
            if !matches!(said.await, Ok(Ok(()))) {
                return Err(Refused::Broken);
            }
            if chunk.bytes.is_empty() {
                return Ok(());
            }
        }
        let run = self.runs.borrow_mut().remove(&flow);
        // One that goes on elsewhere is dropped, which ends its stream behind what it has.
        let mut run = match run.filter(|run| run.next == chunk.offset) {
            Some(run) => run,
            None => {
                let stream = open(&self.connection)?;
                let next = chunk.offset;
                let mut run = Run { stream, next };
                let header = frame::chunk_header(flow, chunk.offset, 0, false, false);
                let header = Bytes::copy_from_slice(&header.unwrap_or_default());
                run.write(header).await?;
                run
            }
        };
        run.next = chunk.end();
        run.write(chunk.bytes).await?;
        self.runs.borrow_mut().insert(flow, run);
        Ok(())
    }

    /// Completes when the connection has ended, or nothing comes back on its path.
    async fn dead(&self) {
        let mut ticks = interval(TICK);
        let (mut heard, mut asked) = (0, 0);
        let mut since = None;
        loop {
            tokio::select! {
                _ = self.connection.closed() => return,
                _ = ticks.tick() => {}
            }
            let stats = self.connection.stats();
            self.stats.set(Some(stats.path));
            if stats.udp_rx.datagrams != heard {
                heard = stats.udp_rx.datagrams;
                asked = wants_answer(&stats.frame_tx);
                since = None;
            } else if wants_answer(&stats.frame_tx) != asked {
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() > SILENCE + 3 * stats.path.rtt {
                    tracing::info!(peer = %self.connection.remote_address().ip(), carrier = "quic", "nothing comes back");
                    return;
                }
            }
            self.window.ease(stats.path.rtt);
            // A new flow's bytes shall not wait behind seconds of another's.
            let window = stats.path.cwnd.saturating_mul(2);
            let window = window.clamp(LEAST_AHEAD, endpoint::SEND_WINDOW);
            self.connection.set_send_window(window);
        }
    }
}

/// Frames sent that the peer acknowledges.
fn wants_answer(sent: &FrameStats) -> u64 {
    sent.stream + sent.ping + sent.max_data + sent.max_stream_data + sent.reset_stream
}

impl Run {
    async fn write(&mut self, bytes: Bytes) -> Result<(), Refused> {
        let written = self.stream.write_chunk(bytes).await;
        written.map_err(|error| match error {
            // The peer wants no more of this stream.
            WriteError::Stopped(_) => Refused::Full,
            _ => Refused::Broken,
        })
    }
}

/// What a future gives without waiting.
fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// A new stream, if there may be one at once.
fn open(connection: &Connection) -> Result<SendStream, Refused> {
    let opened = now(connection.open_uni()).ok_or(Refused::Full)?;
    opened.map_err(|_| Refused::Broken)
}

impl Carrier for QuicCarrier {
    fn kind(&self) -> Option<Kind> {
        Some(Kind::Quic)
    }

    fn control(&self, frames: Bytes) -> Taking<'_> {
        Box::pin(async {
            let mut control = self.control.lock().await;
            let written = control.write_chunk(frames).await;
            written.map_err(|_| Refused::Broken)
        })
    }

    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_> {
        Box::pin(self.send(flow, chunk))
    }

    fn forget(&self, flow: FlowId) {
        self.runs.borrow_mut().remove(&flow);
    }

    fn memory(&self) -> u64 {
        self.window.size.get().into()
    }

    fn close(&self) {
        self.connection.close(0_u32.into(), b"");
    }

    fn is_encrypted(&self) -> bool {
        true
    }

    fn path(&self) -> Option<CarrierPath> {
        let path = self.stats.get()?;
        Some(CarrierPath {
            rtt_ms: (path.rtt.as_secs_f64() * 1e5).round() / 1e2,
            sent: path.sent_packets,
            lost: path.lost_packets,
            refused: None,
        })
    }
}

/// This host's part of all connections.
struct Here(Rc<Quic>);

/// Starts it.
pub(super) fn start(arrivals: Arrivals) -> io::Result<impl Endpoint> {
    let quic = Rc::new(Quic::new()?);
    spawn_local(accept(Rc::clone(&quic), arrivals));
    Ok(Here(quic))
}

impl Grantor for Here {
    fn port(&self) -> u16 {
        self.0.port
    }

    fn certificate(&self) -> Option<[u8; CRYPTO]> {
        Some(self.0.fingerprint)
    }

    fn grant(&self, expected: Expected) {
        self.0.grants.table().insert(expected.token, expected);
    }

    fn revoke(&self, token: u64) {
        self.0.grants.table().remove(&token);
    }
}

impl Endpoint for Here {
    fn grantor(&self) -> Option<&dyn Grantor> {
        Some(self)
    }

    fn connect(&self, opening: ToOpen) -> Local<'_, io::Result<Box<dyn Link>>> {
        let ToOpen { granted, rtt, .. } = opening;
        Box::pin(async move {
            let Granted {
                to,
                token,
                crypto: certificate,
            } = granted;
            let connecting = self.0.connect(to, token, *certificate.as_bytes(), rtt)?;
            let connection = timeout(HANDSHAKE, connecting).await;
            let connection = connection.map_err(|_| io::ErrorKind::TimedOut)??;
            Ok(Box::new(Connected(connection)) as Box<dyn Link>)
        })
    }

    fn close(&self) {
        self.0.close();
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        Box::pin(self.0.wait_idle())
    }
}

/// Lets in who has a token.
async fn accept(quic: Rc<Quic>, arrivals: Arrivals) {
    let half_open = Rc::new(Cell::new(0));
    while let Some(connecting) = quic.accept(&half_open).await {
        half_open.set(half_open.get() + 1);
        let (quic, half_open) = (Rc::clone(&quic), Rc::clone(&half_open));
        let arrivals = arrivals.clone();
        spawn_local(async move {
            let connected = timeout(HANDSHAKE, connecting).await;
            half_open.set(half_open.get() - 1);
            match connected {
                Ok(Ok(connection)) => match quic.redeem(&connection) {
                    // Nobody takes it where the daemon is ending.
                    Some(token) => {
                        let shown = Shown::Token(token);
                        let _ = arrivals.send((shown, Box::new(Connected(connection))));
                    }
                    None => connection.close(0_u32.into(), b""),
                },
                failed => tracing::debug!(?failed, "a QUIC handshake failed"),
            }
        });
    }
}

/// A connection whose handshake is done.
struct Connected(Connection);

impl Link for Connected {
    fn serve(self: Box<Self>, peer: Rc<Peer>, opened: Option<CarrierId>) -> Local<'static, ()> {
        Box::pin(async move {
            let Self(connection) = *self;
            let begun = async {
                match opened {
                    Some(id) => Some((None, id)),
                    None => number(&connection, &peer).await,
                }
            };
            let Ok(Some((control, id))) = timeout(HANDSHAKE, begun).await else {
                return connection.close(0_u32.into(), b"");
            };
            let carrier = QuicCarrier::new(connection, id, peer.key.tag);
            let Ok(Some(carrier)) = timeout(HANDSHAKE, carrier).await else {
                return;
            };
            let receiving = carrier.receive(&peer, control);
            peer.run(id, carrier.clone(), receiving).await;
        })
    }
}

/// The number that the peer says on its first stream, which is the one for control frames.
async fn number(connection: &Connection, peer: &Peer) -> Option<(Option<RecvStream>, CarrierId)> {
    let mut control = connection.accept_uni().await.ok()?;
    let mut bytes = [0; HEADER + 4];
    control.read_exact(&mut bytes).await.ok()?;
    match Frame::take(&mut &bytes[..]) {
        Ok(Frame::Hello { carrier, tag, .. })
            if tag == peer.key.tag && carrier.opener == Side::Peer =>
        {
            Some((Some(control), carrier))
        }
        _ => None,
    }
}

impl QuicCarrier {
    /// Takes what arrives, until it breaks.
    async fn receive(&self, peer: &Rc<Peer>, control: Option<RecvStream>) {
        let mut streams = JoinSet::new();
        if let Some(control) = control {
            streams.spawn_local(Incoming::new(peer, self).frames(control, Frames::default()));
        }
        let mut dead = pin!(self.dead());
        loop {
            tokio::select! {
                stream = self.connection.accept_uni() => match stream {
                    Ok(stream) => drop(streams.spawn_local(Incoming::new(peer, self).take(stream))),
                    Err(_) => return,
                },
                // Who breaks the rules has no carrier any more.
                Some(done) = streams.join_next() => if !matches!(done, Ok(true)) {
                    return;
                },
                () = &mut dead => return,
            }
        }
    }
}

/// Where a stream's bytes go.
struct Incoming {
    peer: Rc<Peer>,
    carrier: CarrierId,
    window: Rc<Window>,
}

impl Incoming {
    fn new(peer: &Rc<Peer>, carrier: &QuicCarrier) -> Self {
        Self {
            peer: Rc::clone(peer),
            carrier: carrier.id,
            window: Rc::clone(&carrier.window),
        }
    }

    /// A stream, to its end. False if the peer breaks the rules.
    async fn take(self, mut stream: RecvStream) -> bool {
        let mut header = [0; HEADER];
        if stream.read_exact(&mut header).await.is_err() {
            return true;
        }
        match frame::open_chunk(&header) {
            Some((flow, offset)) => self.run(stream, flow, offset).await,
            None => {
                let mut frames = Frames::default();
                frames.push(&header);
                self.frames(stream, frames).await
            }
        }
    }

    /// Bytes of a flow, in the order in which they arrive.
    async fn run(self, mut stream: RecvStream, flow: FlowId, begin: u64) -> bool {
        let take = |chunk: &quinn::Chunk| {
            let offset = chunk.offset.checked_sub(HEADER as u64)?;
            let offset = begin.checked_add(offset)?;
            offset.checked_add(chunk.bytes.len() as u64)?;
            self.peer.chunk(self.carrier, flow, offset, &chunk.bytes);
            Some(chunk.bytes.len())
        };
        while let Ok(Some(chunk)) = stream.read_chunk(usize::MAX, false).await {
            let mut next = Some(chunk);
            let mut taken = 0;
            // As much as has come, before the application is given any of it.
            while let Some(chunk) = next {
                let Some(len) = take(&chunk) else {
                    return false;
                };
                taken += len;
                next = match taken < TURN {
                    true => now(stream.read_chunk(usize::MAX, false)).and_then(|read| read.ok()?),
                    false => None,
                };
            }
            self.window.note_taken(taken, self.peer.most_ahead());
            self.peer.turn();
        }
        true
    }

    /// Frames, one behind the other.
    async fn frames(self, mut stream: RecvStream, mut frames: Frames) -> bool {
        loop {
            loop {
                match frames.has_one() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(_) => return false,
                }
                if frames
                    .take(|frame| self.peer.frame(self.carrier, frame))
                    .is_err()
                {
                    return false;
                }
            }
            match stream.read_chunk(usize::MAX, true).await {
                Ok(Some(chunk)) => frames.push(&chunk.bytes),
                _ => return true,
            }
        }
    }
}
