//! The Hooker's stream service over one session: moves bytes between applications' TCP sockets and
//! the session's rings, many flows side by side.

use std::{
    any::Any,
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
};

use nix::sys::epoll::EpollFlags;
use vtl_proto::mux::{DATA_HEADER, Event, Mux, MuxError, ResetCode, StreamId, lossy::Losses};
use vtl_ring::{RxRing, TxRing};

use super::{early::Early, now_ns, set_linger};
use crate::urgent::{self, Ahead};

/// Packets taken from the receive ring between two flushes to the applications.
const RECEIVE_BATCH: u64 = 64;
/// Packets that one flow may fill before the next flow's turn, and as long as it has not filled as
/// many as these: each costs a read something, and the kernel takes no memory for up to eight areas.
const QUANTUM: u64 = 256;
const SMALL_QUANTUM: u64 = 8;

/// How soon it is looked again whether packets have left, of whose end the peer is to be told.
const LOOK_NS: u64 = 5_000_000;

/// What is to be told of flows' sockets.
pub(super) const INTEREST: EpollFlags = EpollFlags::EPOLLIN
    .union(EpollFlags::EPOLLPRI)
    .union(EpollFlags::EPOLLOUT)
    .union(EpollFlags::EPOLLRDHUP)
    .union(EpollFlags::EPOLLET);

/// What the application's side of a flow is.
pub(super) enum App<H> {
    /// Its connection.
    Socket(TcpStream),
    /// vtld's connection to a local server, not established yet.
    Connecting(TcpStream),
    /// Its connection, which goes to this destination. Nothing is read from it before the peer has
    /// said that the session may carry it.
    Asking(TcpStream, SocketAddr),
    /// It waits for the outcome of its connect.
    Held(H),
    /// Its connection is on the way.
    Pending,
}

pub(super) struct Flow<H> {
    pub(super) app: App<H>,
    writable: bool,
    /// An urgent byte, or the end, may come next: reading must find out first.
    wary: bool,
    /// Packets that the next read may fill.
    quantum: u64,
    /// The application has said its end, behind what it sent before.
    ending: bool,
    /// The application has sent its FIN.
    eof: bool,
    /// The peer's application has sent its FIN, behind `inbox`.
    peer_fin: bool,
    /// Our FIN to the application has left.
    shut: bool,
    /// Bytes for the application.
    inbox: VecDeque<u8>,
    /// Where in `inbox` the urgent byte is: as in TCP, the latest only.
    urgent: Option<usize>,
    /// What must live as long as the flow.
    _guard: Option<Box<dyn Any + Send>>,
}

impl<H> Flow<H> {
    fn new(app: App<H>) -> Self {
        Self {
            writable: matches!(app, App::Socket(_)),
            app,
            wary: true,
            quantum: SMALL_QUANTUM,
            ending: false,
            eof: false,
            peer_fin: false,
            shut: false,
            inbox: VecDeque::new(),
            urgent: None,
            _guard: None,
        }
    }

    /// Ends it with a reset towards the application, also where the true end of the other direction
    /// was passed on and a close would be an orderly one. What it was for, if it was not open yet.
    fn abort(self) -> Option<H> {
        match self.app {
            App::Socket(socket) | App::Asking(socket, _) => {
                set_linger(&socket, true);
                None
            }
            App::Connecting(_) | App::Pending => None,
            App::Held(held) => Some(held),
        }
    }
}

/// What the engine must do after a call.
pub(super) enum Effect<H> {
    /// Connect to the local application; then [`Streams::serve`] or [`Streams::refuse`].
    Open {
        id: StreamId,
        dest: SocketAddr,
        client: SocketAddr,
    },
    /// The peer has accepted the flow of this waiting connect.
    Accept { id: StreamId, held: H },
    /// The peer refused it.
    Refuse { held: H, code: ResetCode },
    /// The peer does not carry this connection to `dest` in such a session.
    Plain { app: TcpStream, dest: SocketAddr },
}

/// What the peer of a lossy session is told of a stream once all packets below this number have left.
struct Mark {
    packet: u64,
    id: StreamId,
    /// That it has ended; or else how far it is.
    end: bool,
}

pub(super) struct Streams<H> {
    mux: Mux,
    flows: BTreeMap<StreamId, Flow<H>>,
    /// Those with something to read, as far as is known; some may have gone.
    readable: BTreeSet<StreamId>,
    tx: TxRing,
    rx: RxRing,
    /// The session loses packets: control frames go beside them.
    lossy: bool,
    /// In the order of their numbers.
    marks: VecDeque<Mark>,
    /// What was done with packets behind a gap.
    early: Early,
    /// The flow whose turn it is.
    turn: StreamId,
    pub(super) bytes_sent: u64,
    pub(super) bytes_received: u64,
}

/// What a round of work leaves to be done.
#[derive(Default)]
pub(super) struct Progress {
    /// The peer should hear about room in our receive ring.
    pub(super) window: bool,
    /// There is more to read right away.
    pub(super) more: bool,
}

impl<H> Streams<H> {
    /// Packets that were written to the transmit ring since the session began.
    pub(super) fn published(&self) -> u64 {
        self.tx.published()
    }

    /// Bytes of payload in the packet that was published last, if there was one.
    pub(super) fn latest(&self) -> Option<u32> {
        self.tx.latest()
    }

    /// For whoever carries packets in place of the kernel's programs.
    pub(super) fn rings(&mut self) -> (&mut TxRing, &mut RxRing) {
        (&mut self.tx, &mut self.rx)
    }

    /// The path takes packets with so much payload at most.
    pub(super) fn set_path(&self, most: u16) {
        self.tx.set_path(most);
    }

    /// `lossy`: the session loses packets. Then control frames go by [`Streams::poll_control`] and
    /// [`Streams::control`], and [`Streams::give_up`] wants to be called.
    pub(super) fn new(initiator: bool, lossy: bool, tx: TxRing, rx: RxRing) -> Self {
        let mux = if lossy { Mux::lossy } else { Mux::new };
        Self {
            mux: mux(initiator, vtl_proto::mux::DEFAULT_WINDOW),
            lossy,
            marks: VecDeque::new(),
            early: Early::default(),
            flows: BTreeMap::new(),
            readable: BTreeSet::new(),
            tx,
            rx,
            turn: StreamId(0),
            bytes_sent: 0,
            bytes_received: 0,
        }
    }

    pub(super) fn flows(&self) -> usize {
        self.flows.len()
    }

    /// Opens a stream for a local application; gives it back if the session is full.
    pub(super) fn open(
        &mut self,
        app: App<H>,
        dest: SocketAddr,
        src: SocketAddr,
    ) -> Result<StreamId, App<H>> {
        match self.mux.open(dest, src) {
            Ok(id) => {
                let app = match app {
                    App::Socket(socket) if self.lossy => App::Asking(socket, dest),
                    app => app,
                };
                if matches!(app, App::Socket(_)) {
                    self.readable.insert(id);
                }
                self.flows.insert(id, Flow::new(app));
                Ok(id)
            }
            Err(_) => Err(app),
        }
    }

    /// The local server of a flow that the peer opened is being connected to.
    pub(super) fn serve(
        &mut self,
        id: StreamId,
        app: TcpStream,
        guard: Option<Box<dyn Any + Send>>,
    ) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.app = App::Connecting(app);
            flow._guard = guard;
        }
    }

    pub(super) fn refuse(&mut self, id: StreamId, code: ResetCode) {
        if let Some(flow) = self.flows.remove(&id) {
            // A connect that waits is refused by being dropped.
            drop(flow.abort());
        }
        self.mux.reset(id, code);
    }

    /// The connection of an application whose connect was accepted.
    pub(super) fn attach(&mut self, id: StreamId, app: TcpStream) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.app = App::Socket(app);
            flow.writable = true;
            self.readable.insert(id);
        }
    }

    /// The flow's socket, to be watched.
    pub(super) fn socket(&self, id: StreamId) -> Option<&TcpStream> {
        match &self.flows.get(&id)?.app {
            App::Socket(socket) | App::Connecting(socket) | App::Asking(socket, _) => Some(socket),
            App::Held(_) | App::Pending => None,
        }
    }

    /// Something happened to the socket of a flow (edge-triggered).
    pub(super) fn ready(&mut self, id: StreamId, what: EpollFlags) {
        let Some(flow) = self.flows.get_mut(&id) else {
            return;
        };
        // Before its end, reading shows the error, behind the bytes that came before it. After it
        // nothing would.
        if what.contains(EpollFlags::EPOLLERR) && flow.eof {
            self.refuse(id, ResetCode::Rst);
            return;
        }
        let over = EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR;
        flow.ending |= what.intersects(over | EpollFlags::EPOLLRDHUP);
        flow.wary |= what.contains(EpollFlags::EPOLLPRI);
        if flow.ending || what.contains(EpollFlags::EPOLLIN) {
            self.readable.insert(id);
        }
        if what.intersects(over | EpollFlags::EPOLLOUT) {
            flow.writable = true;
            if matches!(flow.app, App::Connecting(_)) {
                self.connected(id);
            }
        }
        self.flush(id);
    }

    fn connected(&mut self, id: StreamId) {
        let Some(flow) = self.flows.get_mut(&id) else {
            return;
        };
        let App::Connecting(socket) = &flow.app else {
            return;
        };
        match socket.take_error() {
            Ok(None) if socket.peer_addr().is_ok() => {
                let App::Connecting(socket) = std::mem::replace(&mut flow.app, App::Pending) else {
                    return;
                };
                flow.app = App::Socket(socket);
                self.readable.insert(id);
                self.mux.accept_opened(id);
            }
            Ok(None) => {} // still on its way
            Ok(Some(error)) | Err(error) => {
                let code = match error.raw_os_error() {
                    Some(libc::ECONNREFUSED) => ResetCode::Refused,
                    Some(libc::ETIMEDOUT) => ResetCode::Timeout,
                    Some(libc::EHOSTUNREACH | libc::ENETUNREACH) => ResetCode::Unreachable,
                    _ => ResetCode::Rst,
                };
                self.refuse(id, code);
            }
        }
    }

    /// Says to the application of each flow what has come for it.
    fn flush_all(&mut self, touched: Vec<StreamId>) {
        for id in touched {
            self.flush(id);
        }
    }

    /// Takes the control frames at the beginning of what has come beside the packets; returns their
    /// bytes.
    pub(super) fn control(
        &mut self,
        bytes: &[u8],
        effects: &mut Vec<Effect<H>>,
    ) -> Result<usize, MuxError> {
        let mut touched = Vec::new();
        let (flows, readable) = (&mut self.flows, &mut self.readable);
        let used = self.mux.handle_control(now_ns(), bytes, &mut |event| {
            take(event, flows, readable, effects, &mut touched);
        })?;
        self.flush_all(touched);
        Ok(used)
    }

    /// Writes control frames to go beside the packets; returns their bytes.
    pub(super) fn poll_control(&mut self, buffer: &mut [u8]) -> usize {
        let left = self.tx.acknowledged();
        while let Some(mark) = self.marks.pop_front_if(|mark| mark.packet <= left) {
            if mark.end {
                self.mux.finish(mark.id);
            } else {
                self.mux.tell_sent(mark.id);
            }
        }
        self.mux.poll_control(buffer)
    }

    /// When something is to be done though nothing happens; `u64::MAX` for never.
    pub(super) fn deadline(&self) -> u64 {
        let patience = self.mux.patience_ends();
        match self.marks.front() {
            Some(_) => patience.min(now_ns() + LOOK_NS),
            None => patience,
        }
    }

    /// Goes on without what was waited for long enough. What lies in the ring was received before.
    pub(super) fn give_up(&mut self, effects: &mut Vec<Effect<H>>) {
        let mut touched = Vec::new();
        let (flows, readable) = (&mut self.flows, &mut self.readable);
        self.mux.give_up(now_ns(), &mut |event| {
            take(event, flows, readable, effects, &mut touched);
        });
        self.flush_all(touched);
    }

    /// What got lost.
    pub(super) fn losses(&self) -> Losses {
        self.mux.losses()
    }

    /// Takes packets from the receive ring and hands bytes to the applications: in order, and behind
    /// a gap what waits for nothing in it. `arrived` is [`vtl_bpf::sessions::Session::arrived`].
    pub(super) fn receive(
        &mut self,
        arrived: impl Fn(u64) -> Option<u64>,
        effects: &mut Vec<Effect<H>>,
    ) -> Result<Progress, MuxError> {
        let mut progress = Progress::default();
        for _ in 0..8 {
            let count = self.rx.available().min(RECEIVE_BATCH);
            if count == 0 {
                // A single flow waits for the gap in any case.
                let any = !self.lossy && self.flows.len() > 1;
                let sleeps = match any {
                    true => self.rx.prepare_wait_for_any(),
                    false => self.rx.prepare_wait(),
                };
                if any {
                    self.look_behind_gap(&arrived, effects);
                }
                if sleeps || self.rx.closed().is_some() {
                    return Ok(progress);
                }
                continue;
            }
            let mut touched: Vec<StreamId> = Vec::new();
            let now = if self.lossy { now_ns() } else { 0 };
            let Self {
                mux,
                flows,
                readable,
                rx,
                ..
            } = self;
            for i in 0..count {
                self.bytes_received += rx.packet(i).len() as u64;
                let mut sink =
                    |event: Event<'_>| take(event, flows, readable, effects, &mut touched);
                if self.lossy {
                    mux.handle_piece(now, rx.packet(i), &mut sink)?;
                } else {
                    let taken = self.early.turn(rx.next() + i);
                    mux.handle_rest(rx.packet(i), taken, &mut sink)?;
                }
            }
            progress.window |= self.rx.consume(count);
            self.flush_all(touched);
        }
        progress.more = true;
        Ok(progress)
    }

    /// Hands on what lies behind a gap and waits for nothing in it.
    fn look_behind_gap(
        &mut self,
        arrived: impl Fn(u64) -> Option<u64>,
        effects: &mut Vec<Effect<H>>,
    ) {
        let first = self.rx.next();
        let mut touched = Vec::new();
        let Self {
            mux,
            flows,
            readable,
            rx,
            early,
            ..
        } = self;
        let mut look = |packet: u64, taken: u128| {
            // SAFETY: it has arrived, and is read below.
            let payload = unsafe { rx.behind_gap(packet - first) };
            mux.handle_early(payload, taken, &mut |event| {
                take(event, flows, readable, effects, &mut touched);
            })
        };
        early.look(first, rx.slots(), arrived, &mut look);
        self.flush_all(touched);
    }

    /// Writes what waits for an application, and ends its direction behind it.
    fn flush(&mut self, id: StreamId) {
        let Some(flow) = self.flows.get_mut(&id) else {
            return;
        };
        let App::Socket(socket) = &mut flow.app else {
            return;
        };
        while flow.writable && !flow.inbox.is_empty() {
            let (front, _) = flow.inbox.as_slices();
            let written = match flow.urgent {
                Some(0) => urgent::send(socket, front[0]),
                Some(at) => socket.write(&front[..at.min(front.len())]),
                None => socket.write(front),
            };
            match written {
                Ok(n) => {
                    flow.inbox.drain(..n);
                    flow.urgent = flow.urgent.and_then(|at| at.checked_sub(n));
                    self.mux.consumed(id, n as u64);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => flow.writable = false,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.refuse(id, ResetCode::Rst);
                    return;
                }
            }
        }
        if flow.peer_fin && flow.inbox.is_empty() && !flow.shut {
            // From here on the end that the application sees is the true one.
            set_linger(socket, false);
            let _ = socket.shutdown(Shutdown::Write);
            flow.shut = true;
        }
        if flow.shut && flow.eof {
            self.flows.remove(&id);
        }
    }

    /// Fills the transmit ring with control frames and the applications' bytes. Returns whether
    /// packets were published.
    pub(super) fn transmit(&mut self) -> bool {
        let mut published = false;
        loop {
            published |= self.fill();
            if self.tx.room() > 0 || self.tx.wait_for_room() {
                return published;
            }
        }
    }

    /// As much of that as the ring takes.
    fn fill(&mut self) -> bool {
        let mut published = false;
        loop {
            while !self.lossy && self.mux.has_control() && self.tx.room() > 0 {
                let most = self.tx.max_payload();
                let n = self.mux.poll_control(&mut self.tx.slot(0)[..most]);
                if n == 0 {
                    break;
                }
                self.tx.publish(&[n as u32]);
                published = true;
            }
            let mut moved = false;
            let behind = self.readable.range(self.turn..);
            let before = self.readable.range(..self.turn);
            for id in behind.chain(before).copied().collect::<Vec<_>>() {
                if self.tx.room() == 0 {
                    self.turn = id;
                    return published;
                }
                moved |= self.read(id);
            }
            published |= moved;
            let control = !self.lossy && self.mux.has_control() && self.tx.room() > 0;
            if !moved && !control {
                return published;
            }
        }
    }

    /// Reads from one application straight into the ring. Returns whether packets were made.
    fn read(&mut self, id: StreamId) -> bool {
        let flow = self.flows.get_mut(&id).filter(|flow| !flow.eof);
        let Some(flow) = flow else {
            self.readable.remove(&id);
            return false;
        };
        let App::Socket(socket) = &mut flow.app else {
            return false;
        };
        let packet = self.tx.max_payload();
        let each = packet - DATA_HEADER;
        let credit = self.mux.credit(id);
        let count = self
            .tx
            .room()
            .min(flow.quantum)
            .min(credit.div_ceil(each as u64));
        if credit == 0 || count == 0 {
            return false;
        }
        // What is known to be there is no urgent byte: of one, epoll would have told, and reading
        // ends before one that comes now.
        let ahead = match flow.wary {
            true => urgent::ahead(socket),
            false => Ok(Ahead::Bytes(1)),
        };
        let most = match ahead {
            Ok(Ahead::Urgent) => 1,
            _ => credit.min(count * each as u64) as usize,
        };
        let mut areas = self.tx.areas(most, packet, DATA_HEADER);
        let read = ahead.and_then(|ahead| match ahead {
            Ahead::Bytes(_) | Ahead::Urgent => Ok((ahead, socket.read_vectored(&mut areas)?)),
            Ahead::End => Ok((ahead, 0)),
        });
        let (ahead, mut left) = match read {
            Ok((_, 0)) => {
                flow.eof = true;
                self.readable.remove(&id);
                if flow.shut {
                    self.flows.remove(&id);
                }
                if self.lossy {
                    self.mark(id, true);
                } else {
                    self.mux.finish(id);
                }
                return false;
            }
            Ok(read) => read,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                flow.wary = flow.ending;
                self.readable.remove(&id);
                return false;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return false,
            Err(_) => {
                self.refuse(id, ResetCode::Rst);
                return false;
            }
        };
        flow.quantum = if left < most { SMALL_QUANTUM } else { QUANTUM };
        let drained = left < most && !flow.wary && !flow.ending;
        if drained {
            self.readable.remove(&id);
        } else {
            flow.wary = true;
        }
        self.bytes_sent += left as u64;
        let mut lengths = Vec::with_capacity(count as usize);
        while left > 0 {
            let len = left.min(each);
            let header = match ahead {
                Ahead::Urgent => self.mux.urgent_header(id, len as u16),
                Ahead::Bytes(_) | Ahead::End => self.mux.data_header(id, len as u16),
            };
            let header = header.expect("within the credit");
            self.tx.slot(lengths.len() as u64)[..DATA_HEADER].copy_from_slice(&header);
            lengths.push((DATA_HEADER + len) as u32);
            left -= len;
        }
        self.tx.publish(&lengths);
        if self.lossy && self.mux.credit(id) == 0 {
            self.mark(id, false);
        }
        true
    }

    /// Has the peer told how far a stream is, once what was written so far has left.
    fn mark(&mut self, id: StreamId, end: bool) {
        let packet = self.tx.published();
        self.marks.push_back(Mark { packet, id, end });
    }

    /// Everything that was handed over has reached the peer.
    pub(super) fn idle(&self) -> bool {
        self.flows.is_empty()
            && self.marks.is_empty()
            && !self.mux.has_control()
            && self.tx.unacknowledged() == 0
    }

    /// Ends all flows, as the session has ended. Those that wait for the peer's answer are returned.
    pub(super) fn into_held(self) -> impl Iterator<Item = H> {
        self.flows.into_values().filter_map(Flow::abort)
    }
}

/// Applies what arrived to the flows.
fn take<H>(
    event: Event<'_>,
    flows: &mut BTreeMap<StreamId, Flow<H>>,
    readable: &mut BTreeSet<StreamId>,
    effects: &mut Vec<Effect<H>>,
    touched: &mut Vec<StreamId>,
) {
    match event {
        Event::Open { id, dst, src } => {
            // Data may follow in the same packet, long before the server is connected.
            flows.insert(id, Flow::new(App::Pending));
            effects.push(Effect::Open {
                id,
                dest: dst,
                client: src,
            });
        }
        Event::Opened { id } => {
            let Some(flow) = flows.get_mut(&id) else {
                return;
            };
            match std::mem::replace(&mut flow.app, App::Pending) {
                App::Held(held) => effects.push(Effect::Accept { id, held }),
                App::Asking(socket, _) => {
                    flow.app = App::Socket(socket);
                    flow.writable = true;
                    readable.insert(id);
                    touched.push(id);
                }
                other => flow.app = other,
            }
        }
        Event::Data { id, bytes } => {
            if let Some(flow) = flows.get_mut(&id) {
                flow.inbox.extend(bytes);
                touched.push(id);
            }
        }
        Event::Urgent { id } => {
            if let Some(flow) = flows.get_mut(&id) {
                flow.urgent = flow.inbox.len().checked_sub(1);
            }
        }
        Event::Fin { id } => {
            if let Some(flow) = flows.get_mut(&id) {
                flow.peer_fin = true;
                touched.push(id);
            }
        }
        Event::Reset { id, code } => {
            effects.extend(flows.remove(&id).and_then(|flow| match flow.app {
                App::Asking(app, dest) if code == ResetCode::NotHooked => {
                    Some(Effect::Plain { app, dest })
                }
                _ => flow.abort().map(|held| Effect::Refuse { held, code }),
            }));
        }
        Event::Writable { .. } => {} // every round tries all flows
    }
}

#[cfg(test)]
mod tests;
