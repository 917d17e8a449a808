//! QUIC as a carrier: a stream for control frames, and one for each contiguous run of a flow's bytes, which begins with
//! the header of a CHUNK without length. So a lost packet blocks its own flow only, and bytes are delivered out of
//! order.

mod counting;
mod endpoint;

use std::{
    cell::Cell,
    collections::HashMap,
    future::Future,
    io,
    net::UdpSocket,
    pin::pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use quinn::{Connection, FrameStats, RecvStream, SendStream};
use tokio::{
    sync::mpsc,
    task::{JoinSet, spawn_local},
    time::{Instant, interval, timeout},
};
use vtl_control::CarrierPath;
use vtl_proto::frame::{self, FlowId, Frame, HEADER};

use super::{
    Expected, HANDSHAKE, Local, SILENCE, TICK,
    framed::{Arrived, Out, Pipe},
    library::{Certificate, Library, Opened, Opening, Opens, ms},
};
use crate::panics;
use counting::Counting;
use endpoint::Quic;

/// Maximum size of a CHUNK from vtld to this process, with its header, bytes.
const CHUNK: usize = 16 << 10;
/// Maximum payload of a CHUNK from this process to vtld, bytes.
const CHUNK_BACK: usize = u16::MAX as usize;
/// Bytes read from one stream before others have their turn.
const TURN: usize = 256 << 10;
/// Idle timeout of a run: its stream ends then.
const LINGER: Duration = Duration::from_millis(100);
/// Idle time after which the window shrinks below its initial size; at least four round trips.
const QUIET: Duration = Duration::from_secs(2);
/// Minimum send window, bytes.
const MIN_AHEAD: u64 = 1 << 20;

/// The connection's receive window: what the peer may have in flight, and so have buffered behind gaps.
struct Window {
    connection: Connection,
    /// Its upper bound.
    max: u32,
    size: Cell<u32>,
    /// Bytes delivered since it grew, and when the last ones were.
    taken: Cell<u64>,
    latest: Cell<Instant>,
}

impl Window {
    /// The window of a new connection.
    fn of(connection: &Connection, max: u32) -> Rc<Self> {
        Rc::new(Self {
            connection: connection.clone(),
            max,
            size: Cell::new(endpoint::FIRST_WINDOW),
            taken: Cell::new(0),
            latest: Cell::new(Instant::now()),
        })
    }

    /// Auto-tuning: doubles the window each time that half of it was delivered, so slow start is not limited by it.
    fn note_taken(&self, bytes: usize) {
        let taken = self.taken.get() + bytes as u64;
        self.taken.set(taken);
        self.latest.set(Instant::now());
        let window = self.size.get();
        if taken >= u64::from(window / 2) {
            self.taken.set(0);
            self.set(window.saturating_mul(2).min(self.max));
        }
    }

    /// Decays by a quarter each round trip, at least each [`TICK`]: in steady state some five bandwidth-delay products
    /// remain.
    fn ease(&self, rtt: Duration) {
        let part = TICK.as_secs_f64() / rtt.max(TICK).as_secs_f64() / 4.0;
        let eased = (f64::from(self.size.get()) * (1.0 - part)) as u32;
        let floor = match self.latest.get().elapsed() < QUIET.max(4 * rtt) {
            true => endpoint::FIRST_WINDOW,
            false => endpoint::MIN_WINDOW,
        };
        self.set(eased.max(floor.min(self.size.get())));
    }

    fn set(&self, window: u32) {
        let window = window.clamp(endpoint::MIN_WINDOW, endpoint::MAX_WINDOW);
        if self.size.replace(window) != window {
            self.connection.set_receive_window(window.into());
        }
    }
}

/// Polls a future once; `None` if it is pending.
fn now<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut context) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// A run of a flow's bytes that is being sent.
struct Run {
    more: mpsc::UnboundedSender<Bytes>,
    /// Offset after the last byte.
    next: u64,
}

/// Coalesces contiguous received bytes of a flow into CHUNKs.
struct Gathered {
    flow: FlowId,
    offset: u64,
    /// Room for the header, then the bytes.
    frame: BytesMut,
}

impl Gathered {
    fn new(flow: FlowId) -> Self {
        Self {
            flow,
            offset: 0,
            frame: BytesMut::zeroed(HEADER),
        }
    }

    fn len(&self) -> usize {
        self.frame.len() - HEADER
    }

    fn add(&mut self, mut offset: u64, bytes: &[u8], to: &Pipe) {
        for part in bytes.chunks(CHUNK_BACK) {
            let is_next = offset == self.offset + self.len() as u64;
            if !is_next || self.len() + part.len() > CHUNK_BACK {
                self.flush(to);
                self.offset = offset;
            }
            self.frame.extend_from_slice(part);
            offset += part.len() as u64;
        }
    }

    fn flush(&mut self, to: &Pipe) {
        let (offset, len) = (self.offset, self.len());
        if let (1.., Some(header)) = (
            len,
            frame::chunk_header(self.flow, offset, len, false, false),
        ) {
            let mut frame = std::mem::replace(&mut self.frame, BytesMut::zeroed(HEADER));
            frame[..HEADER].copy_from_slice(&header);
            to.arrived(Arrived::Frame(frame.freeze()));
        }
    }
}

/// State shared by the tasks of a connection and its streams. A stream's task that returns `false` ends the connection.
#[derive(Clone)]
struct Driver {
    connection: Connection,
    pipe: Rc<Pipe>,
    window: Rc<Window>,
    /// Bytes given to the library so far, and the maximum that it may hold.
    given: Rc<Cell<u64>>,
    max_held: Rc<Cell<u64>>,
}

impl Driver {
    /// Runs the connection until its end. `is_server`: the peer has opened it.
    async fn run(self, is_server: bool) {
        let begun = async {
            let theirs = match is_server {
                true => Some(self.greeted().await?),
                false => None,
            };
            Some((theirs, self.connection.open_uni().await.ok()?))
        };
        if let Ok(Some((theirs, ours))) = timeout(HANDSHAKE, begun).await {
            tokio::select! {
                () = self.send(ours) => {}
                () = self.receive(theirs) => {}
                () = self.dead() => {}
            }
        }
        self.connection.close(0_u32.into(), b"");
        self.pipe.end();
    }

    /// Accepts the peer's control stream, and passes its HELLO on before anything else.
    async fn greeted(&self) -> Option<RecvStream> {
        let mut stream = self.connection.accept_uni().await.ok()?;
        let mut hello = [0; HEADER + 4];
        stream.read_exact(&mut hello).await.ok()?;
        let hello = Bytes::copy_from_slice(&hello);
        self.pipe.arrived(Arrived::Stream(hello));
        Some(stream)
    }

    /// Sends the pipe's frames: no head-of-line blocking between flows, unless the whole connection is blocked.
    async fn send(&self, control: SendStream) {
        let mut tasks = JoinSet::new();
        let (say, said) = mpsc::unbounded_channel();
        tasks.spawn_local(self.clone().say(control, said));
        let mut runs = HashMap::new();
        while !self.pipe.is_over() {
            let Some(out) = self.pipe.pop() else {
                tokio::select! {
                    () = self.pipe.work.notified() => {}
                    Some(done) = tasks.join_next() => if !matches!(done, Ok(true)) {
                        return;
                    },
                }
                continue;
            };
            let rest = match out {
                Out::Control(frames) => Some(frames),
                Out::Chunk(frame) => self.add(&mut runs, &mut tasks, frame),
            };
            if rest.is_some_and(|frames| say.send(frames).is_err()) {
                return;
            }
        }
    }

    /// Appends a CHUNK to its flow's run. Returns it if it must be sent as a frame on the control stream: it is urgent,
    /// which a run cannot express, or there are too many streams.
    fn add(
        &self,
        runs: &mut HashMap<FlowId, Run>,
        tasks: &mut JoinSet<bool>,
        frame: Bytes,
    ) -> Option<Bytes> {
        let Ok(Frame::Chunk {
            flow,
            offset,
            bytes,
            fin: false,
            urgent: false,
        }) = Frame::take(&mut &frame[..])
        else {
            return Some(frame);
        };
        let next = offset + bytes.len() as u64;
        let bytes = frame.slice(HEADER..);
        if let Some(run) = runs.get_mut(&flow)
            && run.next == offset
            && run.more.send(bytes.clone()).is_ok()
        {
            run.next = next;
            return None;
        }
        let Some(Ok(stream)) = now(self.connection.open_uni()) else {
            return Some(frame);
        };
        let (more, said) = mpsc::unbounded_channel();
        let _ = more.send(bytes);
        let header = frame::chunk_header(flow, offset, 0, false, false).unwrap_or_default();
        tasks.spawn_local(self.clone().write(stream, header, said));
        runs.retain(|_, run| !run.more.is_closed());
        // A former run of the flow is dropped: its stream ends after the bytes that it has.
        runs.insert(flow, Run { more, next });
        None
    }

    /// Writes a run to its stream.
    async fn write(
        self,
        mut stream: SendStream,
        header: [u8; HEADER],
        mut more: mpsc::UnboundedReceiver<Bytes>,
    ) -> bool {
        if stream.write_all(&header).await.is_err() {
            return false;
        }
        while let Ok(Some(bytes)) = timeout(LINGER, more.recv()).await {
            let len = HEADER + bytes.len();
            if stream.write_chunk(bytes).await.is_err() {
                return false;
            }
            self.given(len);
        }
        true
    }

    /// Writes frames to the control stream.
    async fn say(self, mut stream: SendStream, mut frames: mpsc::UnboundedReceiver<Bytes>) -> bool {
        while let Some(bytes) = frames.recv().await {
            let len = bytes.len();
            if stream.write_chunk(bytes).await.is_err() {
                return false;
            }
            self.given(len);
        }
        true
    }

    /// Notes bytes that the library has taken.
    fn given(&self, bytes: usize) {
        self.given.set(self.given.get() + bytes as u64);
        self.pipe.free(bytes);
    }

    /// Accepts and reads the peer's streams. `control`: the peer's control stream, if it was accepted already.
    async fn receive(&self, control: Option<RecvStream>) {
        let mut streams = JoinSet::new();
        let mut has_control = control.is_some();
        if let Some(stream) = control {
            streams.spawn_local(self.clone().hear(stream));
        }
        loop {
            tokio::select! {
                stream = self.connection.accept_uni() => match stream {
                    // The first one is the control stream.
                    Ok(stream) if !std::mem::replace(&mut has_control, true) => {
                        streams.spawn_local(self.clone().hear(stream));
                    }
                    Ok(stream) => drop(streams.spawn_local(self.clone().take(stream))),
                    Err(_) => return,
                },
                // A protocol violation ends the carrier.
                Some(done) = streams.join_next() => if !matches!(done, Ok(true)) {
                    return;
                },
            }
        }
    }

    /// Waits for room in the pipe's receive queue.
    async fn has_room(&self) {
        while !self.pipe.has_room() {
            self.pipe.taken().await;
        }
    }

    /// Reads a run to its end, out of order, as bytes arrive.
    async fn take(self, mut stream: RecvStream) -> bool {
        let mut header = [0; HEADER];
        if stream.read_exact(&mut header).await.is_err() {
            return true;
        }
        let Some((flow, begin)) = frame::open_chunk(&header) else {
            return false;
        };
        let place = |chunk: &quinn::Chunk| {
            let offset = begin.checked_add(chunk.offset.checked_sub(HEADER as u64)?)?;
            offset.checked_add(chunk.bytes.len() as u64)?;
            Some(offset)
        };
        let mut gathered = Gathered::new(flow);
        loop {
            self.has_room().await;
            let Ok(Some(chunk)) = stream.read_chunk(usize::MAX, false).await else {
                return true;
            };
            let mut next = Some(chunk);
            let mut taken = 0;
            // As much as has arrived.
            while let Some(chunk) = next {
                let Some(offset) = place(&chunk) else {
                    return false;
                };
                gathered.add(offset, &chunk.bytes, &self.pipe);
                taken += chunk.bytes.len();
                next = match taken < TURN {
                    true => now(stream.read_chunk(usize::MAX, false)).and_then(|read| read.ok()?),
                    false => None,
                };
            }
            gathered.flush(&self.pipe);
            self.window.note_taken(taken);
        }
    }

    /// Reads the control stream, in order.
    async fn hear(self, mut stream: RecvStream) -> bool {
        loop {
            self.has_room().await;
            match stream.read_chunk(CHUNK_BACK, true).await {
                Ok(Some(chunk)) => {
                    // With layers, all of a carrier's bytes come by it.
                    self.window.note_taken(chunk.bytes.len());
                    self.pipe.arrived(Arrived::Stream(chunk.bytes));
                }
                _ => return true,
            }
        }
    }

    /// Completes when the connection has ended or its path is dead. Also tunes the windows.
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
            if stats.udp_rx.datagrams != heard {
                heard = stats.udp_rx.datagrams;
                asked = wants_answer(&stats.frame_tx);
                since = None;
            } else if wants_answer(&stats.frame_tx) != asked {
                let since = *since.get_or_insert_with(Instant::now);
                if since.elapsed() > SILENCE + 3 * stats.path.rtt {
                    tracing::info!(peer = %self.connection.remote_address().ip(), carrier = "quic", "carrier: closed: timeout, nothing acknowledged");
                    return;
                }
            }
            self.window.ease(stats.path.rtt);
            // Bounded, so that a new flow does not wait behind seconds of another's bytes.
            let window = stats.path.cwnd.saturating_mul(2);
            let window = window.clamp(MIN_AHEAD, endpoint::SEND_WINDOW);
            self.connection.set_send_window(window);
            self.max_held.set(window);
        }
    }
}

/// Count of frames sent that elicit an acknowledgement.
fn wants_answer(sent: &FrameStats) -> u64 {
    sent.stream + sent.ping + sent.max_data + sent.max_stream_data + sent.reset_stream
}

/// QUIC as a [`Library`]: all connections.
pub(super) struct Here {
    quic: Rc<Quic>,
    /// Upper bound of a connection's receive window, bytes.
    max_ahead: u32,
}

impl Here {
    /// Starts on a non-blocking socket.
    pub(super) fn start(
        socket: UdpSocket,
        certificate: &Certificate,
        max_ahead: u64,
        arrivals: Opens,
    ) -> io::Result<Self> {
        let quic = Rc::new(Quic::new(socket, certificate)?);
        let max_ahead = u32::try_from(max_ahead).unwrap_or(u32::MAX);
        spawn_local(accept(Rc::clone(&quic), max_ahead, arrivals));
        Ok(Self { quic, max_ahead })
    }
}

impl Library for Here {
    fn expect(&self, expected: Expected) {
        let mut grants = self.quic.grants.table();
        grants.insert(expected.token, expected);
    }

    fn revoke(&self, token: u64) {
        self.quic.grants.table().remove(&token);
    }

    fn connect(&self, opening: Opening) -> Local<'_, io::Result<Opened>> {
        let Opening {
            to,
            token,
            crypto: certificate,
            rtt,
            ..
        } = opening;
        Box::pin(async move {
            let connecting = self.quic.connect(to, token, *certificate.as_bytes(), rtt)?;
            let connection = timeout(HANDSHAKE, connecting).await;
            let connection = connection.map_err(|_| io::ErrorKind::TimedOut)??;
            Ok(opened(connection, self.max_ahead, false))
        })
    }

    fn close(&self) {
        self.quic.close();
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        Box::pin(self.quic.wait_idle())
    }
}

/// Accepts connections of clients that hold a grant.
async fn accept(quic: Rc<Quic>, max_ahead: u32, arrivals: Opens) {
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
                    // Fails if the daemon is ending.
                    Some(token) => {
                        let _ = arrivals.send((token, opened(connection, max_ahead, true)));
                    }
                    None => connection.close(0_u32.into(), b""),
                },
                failed => tracing::debug!(?failed, "carrier: QUIC handshake failed"),
            }
        });
    }
}

/// Starts an established connection as a carrier. `is_server`: the peer has opened it.
fn opened(connection: Connection, max_ahead: u32, is_server: bool) -> Opened {
    let driver = Driver {
        window: Window::of(&connection, max_ahead),
        connection,
        pipe: Pipe::relayed(CHUNK),
        given: Rc::default(),
        max_held: Rc::new(Cell::new(endpoint::SEND_WINDOW)),
    };
    spawn_local(panics::isolated(driver.clone().run(is_server)));
    let Driver {
        connection,
        pipe,
        window,
        given,
        max_held,
        ..
    } = driver;
    Opened {
        pipe,
        memory: Box::new(move || {
            // quinn does not report unacknowledged bytes: assume a full send window.
            u64::from(window.size.get()) + given.get().min(max_held.get())
        }),
        path: Box::new(move || Some(figures(&connection))),
    }
}

/// Statistics of a connection.
fn figures(connection: &Connection) -> CarrierPath {
    let path = connection.stats().path;
    let control = connection.congestion_state().into_any();
    let counted = control.downcast::<Counting>().ok();
    CarrierPath {
        rtt_ms: ms(path.rtt),
        min_rtt_ms: Some(ms(path.min_rtt)),
        sent: path.sent_packets,
        lost: path.lost_packets,
        delivered: counted.as_ref().map(|counted| counted.acknowledged),
        app_limited: counted.map(|counted| counted.is_app_limited),
        refused: None,
    }
}
