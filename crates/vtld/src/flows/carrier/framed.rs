//! Carriers over a byte stream or messages: whole frames pass through the queues of a [`Pipe`] to the task that moves
//! them, in this process or in a process of carriers.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
    time::Instant,
};

use bytes::Bytes;
use tokio::{
    sync::{Notify, Semaphore},
    time::timeout,
};
use vtl_control::CarrierPath;
use vtl_core::flow::Chunk;
use vtl_proto::{
    carrier::Kind,
    frame::{CarrierId, FlowId, Frame, HEADER, Side},
};

use super::{
    super::{
        control::{Frames, cut, emit, hello},
        peer::Peer,
    },
    Carrier, HANDSHAKE, Link, Local, Refused, Taking,
    layered::{self, CarrierLayers, Inbox},
};

/// Size of the send queue, bytes: short, so that a new flow does not wait behind seconds of another's bytes.
const MAX_WAITING: usize = 128 << 10;
/// Size of the receive queue, bytes.
const MAX_ARRIVED: usize = 4 << 20;
/// Memory overhead of an entry of the receive queue, bytes.
const ARRIVED: usize = 64;

/// Maximum size of frames received before HELLO, bytes.
const MAX_EARLY: usize = 1 << 20;

/// An entry of the receive queue.
pub(super) enum Arrived {
    /// The next bytes of a stream of frames.
    Stream(Bytes),
    /// Whole frames, possibly out of order.
    Frame(Bytes),
}

impl Arrived {
    /// Memory that it takes, bytes.
    fn memory(&self) -> usize {
        let (Self::Stream(bytes) | Self::Frame(bytes)) = self;
        bytes.len() + ARRIVED
    }
}

/// An entry of the send queue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Out {
    /// The next control frames.
    Control(Bytes),
    /// A CHUNK, which may overtake others.
    Chunk(Bytes),
}

impl Out {
    fn len(&self) -> usize {
        let (Self::Control(bytes) | Self::Chunk(bytes)) = self;
        bytes.len()
    }
}

/// Backpressure of the send queue.
enum Room {
    /// Free bytes; senders wait for them.
    Here(Semaphore),
    /// Senders wait in another process: bytes taken that it has not been told of yet.
    There(Cell<u32>),
}

/// The queues between a carrier and the task that moves its packets.
pub(super) struct Pipe {
    /// Maximum size of a CHUNK, with its header, bytes.
    pub(super) frame: usize,
    control: RefCell<VecDeque<Bytes>>,
    chunks: RefCell<VecDeque<Bytes>>,
    arrived: RefCell<VecDeque<Arrived>>,
    /// Memory of the receive queue, bytes.
    held: Cell<usize>,
    is_over: Cell<bool>,
    /// Wakes the task: frames to send, packets received, or the end.
    pub(super) work: Notify,
    room: Room,
    /// Wakes the carrier: something has arrived, or the end; in a process of carriers also that bytes were taken.
    news: Notify,
    /// The receive queue has room again.
    taken: Notify,
}

impl Pipe {
    /// `frame`: maximum size of a CHUNK, with its header, bytes.
    pub(super) fn new(frame: usize) -> Rc<Self> {
        Self::with(frame, Room::Here(Semaphore::new(MAX_WAITING)))
    }

    /// The pipe in a process of carriers: the daemon bounds its send queue.
    pub(super) fn relayed(frame: usize) -> Rc<Self> {
        Self::with(frame, Room::There(Cell::new(0)))
    }

    fn with(frame: usize, room: Room) -> Rc<Self> {
        Rc::new(Self {
            frame,
            control: RefCell::default(),
            chunks: RefCell::default(),
            arrived: RefCell::default(),
            held: Cell::new(0),
            is_over: Cell::new(false),
            work: Notify::new(),
            room,
            news: Notify::new(),
            taken: Notify::new(),
        })
    }

    /// Closes it, for both sides.
    pub(super) fn end(&self) {
        self.is_over.set(true);
        self.work.notify_one();
        if let Room::Here(room) = &self.room {
            room.close();
        }
        self.news.notify_one();
        self.wake_taken();
    }

    /// Wakes all tasks that wait in [`Pipe::taken`], and the next one to come.
    fn wake_taken(&self) {
        self.taken.notify_waiters();
        self.taken.notify_one();
    }

    /// Completes when the carrier has taken something from the receive queue, or the pipe is closed.
    pub(super) async fn taken(&self) {
        self.taken.notified().await;
    }

    pub(super) fn is_over(&self) -> bool {
        self.is_over.get()
    }

    /// Takes the next entry to send, and frees its room; `None` if there is none.
    pub(super) fn next(&self) -> Option<Out> {
        let out = self.pop()?;
        self.free(out.len());
        Some(out)
    }

    /// Takes the next entry to send, control frames first. Its room stays in use until [`Pipe::free`].
    pub(super) fn pop(&self) -> Option<Out> {
        let control = self.control.borrow_mut().pop_front().map(Out::Control);
        control.or_else(|| self.chunks.borrow_mut().pop_front().map(Out::Chunk))
    }

    /// Frees room of the send queue.
    pub(super) fn free(&self, bytes: usize) {
        match &self.room {
            Room::Here(room) => room.add_permits(bytes),
            Room::There(taken) => {
                taken.set(taken.get() + bytes as u32);
                self.news.notify_one();
            }
        }
    }

    /// Queues an entry to send without waiting for room.
    pub(super) fn push(&self, out: Out) {
        match out {
            Out::Control(bytes) => self.control.borrow_mut().push_back(bytes),
            Out::Chunk(bytes) => self.chunks.borrow_mut().push_back(bytes),
        }
        self.work.notify_one();
    }

    /// Memory of the receive queue, bytes.
    pub(super) fn memory(&self) -> u64 {
        self.held.get() as u64
    }

    /// Whether the receive queue is below its limit.
    pub(super) fn has_room(&self) -> bool {
        self.held.get() < MAX_ARRIVED
    }

    /// Releases the memory of an entry from [`Pipe::news`].
    pub(super) fn seen(&self, what: &Arrived) {
        self.held.set(self.held.get() - what.memory());
        self.wake_taken();
    }

    /// Queues a received entry.
    pub(super) fn arrived(&self, what: Arrived) {
        self.held.set(self.held.get() + what.memory());
        self.arrived.borrow_mut().push_back(what);
        self.news.notify_one();
    }

    /// Queues an entry to send, waiting for room in turn.
    async fn put(&self, out: Out) -> Result<(), Refused> {
        if let Room::Here(room) = &self.room {
            // An entry is never larger than the queue.
            let room = room.acquire_many(out.len() as u32).await;
            room.map_err(|_| Refused::Broken)?.forget();
        }
        self.push(out);
        Ok(())
    }

    pub(super) async fn put_control(&self, frames: Bytes) -> Result<(), Refused> {
        self.put(Out::Control(frames)).await
    }

    pub(super) async fn put_chunk(&self, flow: FlowId, chunk: &Chunk) -> Result<(), Refused> {
        for frame in cut(flow, chunk, self.frame - HEADER) {
            self.put(Out::Chunk(emit(frame))).await?;
        }
        Ok(())
    }

    /// Waits for received entries, and takes them all; `None` at the end.
    pub(super) async fn arrivals(&self) -> Option<VecDeque<Arrived>> {
        let (arrived, _) = self.news().await?;
        self.held.set(0);
        self.wake_taken();
        Some(arrived)
    }

    /// Waits for received entries, whose memory counts until [`Pipe::seen`], or for sent bytes to report to the other
    /// process. Returns all entries and the number of bytes, not both empty; `None` at the end.
    pub(super) async fn news(&self) -> Option<(VecDeque<Arrived>, u32)> {
        loop {
            let arrived = std::mem::take(&mut *self.arrived.borrow_mut());
            let taken = match &self.room {
                Room::Here(_) => 0,
                Room::There(taken) => taken.take(),
            };
            if !arrived.is_empty() || taken > 0 {
                return Some((arrived, taken));
            }
            if self.is_over() {
                return None;
            }
            self.news.notified().await;
        }
    }
}

/// A carrier over a [`Pipe`].
pub(super) struct Framed {
    pub(super) kind: Kind,
    pub(super) pipe: Rc<Pipe>,
    pub(super) is_encrypted: bool,
    /// Memory that the library may hold, bytes.
    pub(super) library: Box<dyn Fn() -> u64>,
    /// Statistics of the path, and when they were true.
    pub(super) figures: Box<dyn Fn() -> Option<(Instant, CarrierPath)>>,
}

impl Drop for Framed {
    fn drop(&mut self) {
        self.pipe.end();
    }
}

impl Carrier for Framed {
    fn kind(&self) -> Option<Kind> {
        Some(self.kind)
    }

    fn control(&self, frames: Bytes) -> Taking<'_> {
        Box::pin(self.pipe.put_control(frames))
    }

    fn message(&self, frame: Bytes) -> Taking<'_> {
        Box::pin(self.pipe.put(Out::Chunk(frame)))
    }

    fn longest_message(&self) -> usize {
        self.pipe.frame
    }

    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_> {
        Box::pin(async move { self.pipe.put_chunk(flow, &chunk).await })
    }

    fn forget(&self, _flow: FlowId) {}

    fn is_encrypted(&self) -> bool {
        self.is_encrypted
    }

    fn memory(&self) -> u64 {
        self.pipe.memory().saturating_add((self.library)())
    }

    fn close(&self) {
        self.pipe.end();
    }

    fn path(&self) -> Option<CarrierPath> {
        Some(self.reading()?.1)
    }

    fn reading(&self) -> Option<(Instant, CarrierPath)> {
        (self.figures)()
    }
}

/// Reassembles frames from received entries.
#[derive(Default)]
pub(super) struct Reader {
    stream: Frames,
    /// Single frames received before HELLO.
    early: VecDeque<Bytes>,
    early_bytes: usize,
}

/// Protocol violation by the peer.
struct Violation;

impl Reader {
    /// Takes the peer's HELLO: the carrier's id, the tag, and whether layers are over the carrier. `None` if it is not
    /// complete yet.
    fn hello(
        &mut self,
        arrived: VecDeque<Arrived>,
    ) -> Result<Option<(CarrierId, u32, bool)>, Violation> {
        for what in arrived {
            self.early_bytes += what.memory();
            match what {
                Arrived::Stream(bytes) => self.stream.push(&bytes),
                Arrived::Frame(bytes) => self.early.push_back(bytes),
            }
        }
        if !self.stream.has_one().map_err(|_| Violation)? {
            return match self.early_bytes < MAX_EARLY {
                true => Ok(None),
                false => Err(Violation),
            };
        }
        let said = self.stream.take(|frame| match frame {
            Frame::Hello {
                carrier,
                tag,
                layers,
                ..
            } => Some((carrier, tag, layers)),
            _ => None,
        });
        said.ok().flatten().ok_or(Violation).map(Some)
    }

    /// Passes frames to the peer's association, or to the layers over the carrier.
    fn give(
        &mut self,
        peer: &Peer,
        carrier: CarrierId,
        arrived: VecDeque<Arrived>,
        layers: Option<&Inbox>,
    ) -> Result<(), Violation> {
        let give = |frame: Frame<'_>| match frame {
            frame if let Some(inbox) = layers => inbox.take(frame),
            Frame::Chunk {
                flow,
                offset,
                bytes,
                fin: false,
                urgent: false,
            } => peer.chunk(carrier, flow, offset, bytes),
            frame => peer.frame(carrier, frame),
        };
        let early = std::mem::take(&mut self.early);
        for what in early.into_iter().map(Arrived::Frame).chain(arrived) {
            match what {
                Arrived::Frame(bytes) => {
                    let mut rest = &bytes[..];
                    while !rest.is_empty() {
                        give(Frame::take(&mut rest).map_err(|_| Violation)?);
                    }
                }
                Arrived::Stream(bytes) => self.stream.push(&bytes),
            }
        }
        while self.stream.has_one().map_err(|_| Violation)? {
            self.stream.take(give).map_err(|_| Violation)?;
        }
        peer.turn();
        Ok(())
    }
}

impl Link for Framed {
    fn serve(
        self: Box<Self>,
        peer: Rc<Peer>,
        opened: Option<CarrierId>,
        layers: CarrierLayers,
    ) -> Local<'static, ()> {
        Box::pin(async move {
            let mut reader = Reader::default();
            let said = match opened {
                Some(id) => {
                    let has_layers = layers.to_open.is_some();
                    let hello = emit(hello(id, peer.key.tag, 0, has_layers));
                    let said = self.pipe.put_control(hello).await;
                    said.ok().map(|()| (id, has_layers))
                }
                None => timeout(HANDSHAKE, self.number(&peer, &mut reader))
                    .await
                    .ok()
                    .flatten(),
            };
            let Some((id, has_layers)) = said else {
                return tracing::debug!(peer = %peer.key.peer, carrier = %self.kind, "carrier: closed: its first frame does not name it");
            };
            if opened.is_none() && self.kind == Kind::Quic {
                // With QUIC both sides send HELLO.
                let _ = self
                    .pipe
                    .put_control(emit(hello(id, peer.key.tag, 0, false)))
                    .await;
            }
            let carrier = Rc::from(self);
            let (of_receiver, of_peer) = (Rc::clone(&carrier), Rc::clone(&peer));
            let receiving = |inbox| receive(of_receiver, of_peer, id, reader, inbox);
            if has_layers {
                let inbox = Rc::new(Inbox::default());
                let receiving = receiving(Some(Rc::clone(&inbox)));
                layered::serve(carrier, peer, id, layers, inbox, receiving).await;
            } else {
                peer.run(id, carrier, receiving(None)).await;
            }
        })
    }
}

impl Framed {
    /// Waits for the peer's HELLO, and checks it. Returns the carrier's id, and whether there are layers over it.
    async fn number(&self, peer: &Peer, reader: &mut Reader) -> Option<(CarrierId, bool)> {
        loop {
            let arrived = self.pipe.arrivals().await?;
            if let Some((id, tag, layers)) = reader.hello(arrived).ok()? {
                let is_it = id.opener == Side::Peer && tag == peer.key.tag;
                return is_it.then_some((id, layers));
            }
        }
    }
}

/// Receives frames until the carrier breaks. `layers`: those over it, for which the frames are.
pub(super) async fn receive(
    carrier: Rc<Framed>,
    peer: Rc<Peer>,
    id: CarrierId,
    mut reader: Reader,
    layers: Option<Rc<Inbox>>,
) {
    let mut arrived = VecDeque::new();
    loop {
        if reader.give(&peer, id, arrived, layers.as_deref()).is_err() {
            tracing::debug!(peer = %peer.key.peer, carrier = %carrier.kind, "carrier: closed: protocol violation by the peer");
            return;
        }
        if let Some(inbox) = &layers {
            inbox.room().await;
        }
        match carrier.pipe.arrivals().await {
            Some(more) => arrived = more,
            None => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    fn flow() -> FlowId {
        FlowId {
            opener: Side::Local,
            number: 1,
        }
    }

    fn chunk(len: usize) -> Chunk {
        Chunk {
            offset: 5,
            bytes: Bytes::from(vec![9; len]),
            urgent: false,
        }
    }

    #[tokio::test]
    async fn pipe__control_goes_first_and_chunks_are_cut() {
        let pipe = Pipe::new(HEADER + 100);
        pipe.put_chunk(flow(), &chunk(150)).await.unwrap();
        let said = Bytes::from_static(b"control");
        pipe.put_control(said.clone()).await.unwrap();
        assert_eq!(pipe.next(), Some(Out::Control(said)));
        let mut found = Vec::new();
        while let Some(Out::Chunk(bytes)) = pipe.next() {
            match Frame::take(&mut &bytes[..]).unwrap() {
                Frame::Chunk { offset, bytes, .. } => found.push((offset, bytes.len())),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(found, [(5, 100), (105, 50)]);
    }

    #[tokio::test]
    async fn pipe__full_waits_for_room_and_ends() {
        let pipe = Pipe::new(MAX_WAITING);
        pipe.put_chunk(flow(), &chunk(MAX_WAITING - HEADER))
            .await
            .unwrap();
        let more = chunk(1);
        let mut second = pin!(pipe.put_chunk(flow(), &more));
        tokio::select! {
            biased;
            _ = &mut second => panic!("there was no room"),
            () = tokio::task::yield_now() => {}
        }
        assert!(pipe.next().is_some());
        second.await.unwrap();
        assert!(pipe.next().is_some());
        pipe.put_chunk(flow(), &chunk(MAX_WAITING - HEADER))
            .await
            .unwrap();
        let third = pipe.put_chunk(flow(), &more);
        let (refused, ()) = tokio::join!(third, async { pipe.end() });
        assert_eq!(refused, Err(Refused::Broken));
        assert!(pipe.arrivals().await.is_none());
    }
}
