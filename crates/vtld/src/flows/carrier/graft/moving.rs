//! Moves chunks and control frames between flows and a session's rings.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    io::IoSlice,
    net::IpAddr,
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::{Notify, Semaphore},
    time::{Instant, interval},
};
use vtl_control::CarrierPath;
use vtl_core::{flow::Chunk, stacks::StackState};
use vtl_proto::{
    carrier::Kind,
    frame::{CarrierId, FlowId, Frame, FrameError, HEADER},
};

use super::{
    super::{Carrier, Refused, SILENCE, TICK, Taking, layered::Inbox},
    Open, Peer,
    load::Loads,
    lossy::Lossy,
    session::Session,
};

/// Maximum burst of packets written or read.
const BURST: usize = 256;
/// Maximum size of a run of bytes delivered to a flow, bytes,
const RUN: usize = 128 << 10;
/// and of its gather list (IOV_MAX).
const MAX_PIECES: usize = 1024;
/// Size of the send queue, bytes: at least one chunk of maximum size.
const MAX_WAITING: usize = 128 << 10;
/// Missed wake-ups after which the doorbell is disabled.
const UNHEARD: u32 = 8;

/// A session as a carrier.
pub(super) struct Graft {
    pub(super) session: Session,
    control: RefCell<VecDeque<Bytes>>,
    chunks: RefCell<VecDeque<(FlowId, Chunk)>>,
    /// Free bytes of the queues.
    pub(super) room: Semaphore,
    is_over: Cell<bool>,
    over: Notify,
    /// State of a lossy session.
    pub(super) lossy: Lossy,
    /// What schedulers want to know.
    pub(super) loads: Loads,
    /// Packets that were read out of order, by 64: bit n of word w is packet 64 w + n.
    seen: RefCell<BTreeMap<u64, u64>>,
}

impl Carrier for Graft {
    fn kind(&self) -> Option<Kind> {
        Some(Kind::Graft)
    }

    fn control(&self, frames: Bytes) -> Taking<'_> {
        Box::pin(async move {
            self.wait_for_room(frames.len()).await?;
            self.control.borrow_mut().push_back(frames);
            self.fill();
            Ok(())
        })
    }

    fn longest_message(&self) -> usize {
        self.session.tx.borrow().max_payload()
    }

    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_> {
        Box::pin(async move {
            self.wait_for_room(chunk.bytes.len()).await?;
            self.push(flow, chunk);
            Ok(())
        })
    }

    fn stack(&self, id: CarrierId) -> Option<StackState> {
        self.state(id)
    }

    fn between(&self) -> Option<(IpAddr, IpAddr)> {
        Some(self.session.between)
    }

    fn take_now(&self, flow: FlowId, chunk: Chunk) -> bool {
        self.push_now(flow, chunk)
    }

    fn loses(&self) -> bool {
        self.session.loses
    }

    fn look(&self, peer: &Peer, id: CarrierId) {
        while self.session.loses && matches!(self.take(peer, id, None), Ok(true)) {}
    }

    fn forget(&self, flow: FlowId) {
        self.lossy.forget(flow);
    }

    fn close(&self) {
        self.end();
    }

    fn path(&self) -> Option<CarrierPath> {
        self.session.path()
    }

    fn is_encrypted(&self) -> bool {
        self.session.shown.is_some()
    }

    fn is_clear(&self) -> bool {
        self.session.is_clear
    }
}

impl Graft {
    pub(super) fn new(session: Session) -> Self {
        Self {
            session,
            control: RefCell::default(),
            chunks: RefCell::default(),
            room: Semaphore::new(MAX_WAITING),
            is_over: Cell::new(false),
            over: Notify::new(),
            lossy: Lossy::default(),
            loads: Loads::default(),
            seen: RefCell::default(),
        }
    }

    /// Queues a chunk for which there is room.
    pub(super) fn push(&self, flow: FlowId, chunk: Chunk) {
        self.loads.note_given(chunk.bytes.len());
        self.chunks.borrow_mut().push_back((flow, chunk));
        self.fill();
    }

    pub(super) fn end(&self) {
        self.is_over.set(true);
        self.room.close();
        self.over.notify_one();
    }

    /// Completes when it is over.
    pub(super) async fn over(&self) {
        while !self.is_over.get() {
            self.over.notified().await;
        }
    }

    /// Completes when packets have been unacknowledged for too long: the path is dead. Also checks that
    /// the doorbell works.
    pub(super) async fn dead(&self, rtt: Duration, open: &Open) {
        let session = &self.session;
        let mut ticks = interval(TICK);
        let mut before = 0;
        let mut since = Instant::now();
        session.set_doorbell(open.has_bell.get());
        let (mut unheard, mut heard) = (0, 0);
        loop {
            ticks.tick().await;
            let missed = session.take_events();
            if heard != open.heard.get() {
                (unheard, heard) = (0, open.heard.get());
            } else if missed && open.has_bell.get() {
                unheard += 1;
                if unheard == UNHEARD {
                    tracing::info!(
                        "wake-ups: no frames from the loopback: ring buffers used instead; is lo up?"
                    );
                    session.set_doorbell(false);
                }
            }
            let (acknowledged, is_idle) = {
                let tx = session.tx.borrow();
                (tx.acknowledged(), tx.unacknowledged() == 0)
            };
            if is_idle || acknowledged > before {
                since = Instant::now();
            }
            before = acknowledged;
            if since.elapsed() > SILENCE + 3 * rtt.max(session.srtt()) {
                return;
            }
        }
    }

    /// Waits for room in the queues, in turn.
    async fn wait_for_room(&self, bytes: usize) -> Result<(), Refused> {
        // Never more than the queue's size.
        let room = self.room.acquire_many(bytes as u32).await;
        room.map_err(|_| Refused::Broken)?.forget();
        Ok(())
    }

    /// Refills the ring from the queues whenever there is room, until the session ends.
    pub(super) async fn refill(&self) {
        while self.session.tx.borrow().closed().is_none() {
            self.session.room.notified().await;
            self.fill();
        }
    }

    /// Moves the queues into the ring while there is room; requests a wake-up if some is left.
    fn fill(&self) {
        loop {
            let mut lengths = [0; BURST];
            let mut count = 0;
            let mut taken = 0;
            let room = self.session.room().min(BURST as u64) as usize;
            let mut tx = self.session.tx.borrow_mut();
            if tx.closed().is_some() {
                return;
            }
            let max = tx.max_payload();
            let first = tx.next();
            while count < room {
                let number = first + count as u64;
                let packet = &mut tx.slot(count as u64)[..max];
                let len = self.next(packet, number, &mut taken);
                if len == 0 {
                    break;
                }
                lengths[count] = len as u32;
                count += 1;
            }
            drop(tx);
            self.room.add_permits(taken);
            self.session.stage(&lengths[..count]);
            if count < room || self.is_empty() {
                return;
            }
            if count == 0 {
                self.session.publish();
                if self.session.wait_for_room() {
                    return;
                }
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.control.borrow().is_empty() && self.chunks.borrow().is_empty()
    }

    /// Writes the next whole frames into packet `number`. Returns their size in bytes, 0 if there are none. `taken`:
    /// increased by the bytes removed from the queues.
    fn next(&self, packet: &mut [u8], number: u64, taken: &mut usize) -> usize {
        let mut control = self.control.borrow_mut();
        while let Some(frames) = control.front_mut() {
            let len = whole(frames, packet.len());
            if len > 0 {
                packet[..len].copy_from_slice(&frames[..len]);
                drop(frames.split_to(len));
                *taken += len;
                return len;
            }
            if !frames.is_empty() {
                // Of layers, which were made when the path's packets were larger: what was given is lost, so all is.
                tracing::info!(carrier = %Kind::Graft, "carrier: closed: the path's packets have become too small for its layers");
                self.end();
                return 0;
            }
            control.pop_front();
        }
        let mut chunks = self.chunks.borrow_mut();
        let mut used = 0;
        while let Some((flow, chunk)) = chunks.front_mut() {
            let room = packet.len() - used;
            if room <= HEADER || used > 0 && room < HEADER + chunk.bytes.len() {
                break;
            }
            let bytes = chunk.bytes.split_to(chunk.bytes.len().min(room - HEADER));
            let frame = Frame::Chunk {
                flow: *flow,
                offset: chunk.offset,
                bytes: &bytes,
                fin: false,
                urgent: chunk.urgent && chunk.bytes.is_empty(),
            };
            used += frame.emit(&mut packet[used..]).unwrap_or(0);
            *taken += bytes.len();
            self.loads.note_placed(number, bytes.len());
            chunk.offset += bytes.len() as u64;
            if self.session.loses {
                self.lossy.note_sent(*flow, chunk.offset, number);
            }
            if !chunk.bytes.is_empty() {
                break;
            }
            chunks.pop_front();
            if self.session.loses {
                // One chunk per packet: the checksum of `udp-lite` covers the first header only.
                break;
            }
        }
        used
    }

    /// Passes received frames to the peer's association, or to the layers over the session, until the session ends.
    pub(super) async fn receive(&self, peer: &Peer, id: CarrierId, layers: Option<&Inbox>) {
        loop {
            let taken = self.take(peer, id, layers);
            peer.turn();
            if let Some(inbox) = layers {
                inbox.room().await;
            }
            match taken {
                Err(_) => {
                    tracing::debug!(peer = %peer.key.peer, carrier = %Kind::Graft, "carrier: closed: protocol violation by the peer");
                    return;
                }
                Ok(_) if self.session.is_forged() => {
                    tracing::warn!(peer = %peer.key.peer, carrier = %Kind::Graft, "carrier: closed: authentication of a packet failed: it was altered on the path");
                    return;
                }
                // Let the flows run.
                Ok(true) => tokio::task::yield_now().await,
                Ok(false) if self.session.is_at_end() => return,
                Ok(false) => {
                    // Check again: packets that arrived before the request cause no wake-up.
                    let behind_gaps = self.reads_behind_gaps(peer);
                    if self.session.prepare_wait(behind_gaps) && !self.has_news(behind_gaps) {
                        self.session.news.notified().await;
                    }
                }
            }
        }
    }

    /// Takes packets out of the ring, also out of order: this avoids head-of-line blocking between flows. False if
    /// there are none.
    fn take(&self, peer: &Peer, id: CarrierId, layers: Option<&Inbox>) -> Result<bool, FrameError> {
        let count = self.session.rx.borrow_mut().available().min(BURST as u64);
        let rx = self.session.rx.borrow();
        let mut run = Run::default();
        let first = rx.next();
        for i in 0..count {
            if !self.was_seen(first + i) {
                let packet = rx.packet(i);
                if !self.session.loses && rx.forged() > 0 {
                    // Nothing after a forged packet is trusted.
                    run.give(peer, id);
                    return Ok(false);
                }
                run.take(packet, peer, id, layers)?;
            }
            if self.session.loses {
                self.lossy.note_received(rx.packet(i));
                // One by one: each packet after a gap counts for loss detection.
                run.give(peer, id);
            }
        }
        run.give(peer, id);
        drop(run);
        drop(rx);
        if count > 0 {
            self.session.consume(count);
        }
        let mut seen = self.seen.borrow_mut();
        if !seen.is_empty() {
            *seen = seen.split_off(&((first + count) / 64));
        }
        drop(seen);
        if count == BURST as u64 || !self.reads_behind_gaps(peer) {
            return Ok(count > 0);
        }
        Ok(self.take_behind_gaps(peer, id, layers)? || count > 0)
    }

    /// Whether packets are read out of order: not on lossy sessions, which have no retransmissions to wait for, nor
    /// with a single flow, unless what it lacks may come by another session.
    fn reads_behind_gaps(&self, peer: &Peer) -> bool {
        !self.session.loses && (peer.has_flows_beside() || peer.is_spread())
    }

    fn was_seen(&self, packet: u64) -> bool {
        let seen = self.seen.borrow();
        let word = seen.get(&(packet / 64));
        word.is_some_and(|bits| bits & (1 << (packet % 64)) != 0)
    }

    /// The packets of a word that arrived out of order and were not read; `None` beyond the last one.
    fn unread(&self, word: u64, next: u64) -> Option<u64> {
        let there = self.session.arrived(word)?;
        let seen = self.seen.borrow().get(&word).copied().unwrap_or(0);
        let passed = match next.saturating_sub(word * 64) {
            0 => 0,
            n @ 1..64 => u64::MAX >> (64 - n),
            _ => u64::MAX,
        };
        Some(there & !seen & !passed)
    }

    fn take_behind_gaps(
        &self,
        peer: &Peer,
        id: CarrierId,
        layers: Option<&Inbox>,
    ) -> Result<bool, FrameError> {
        let rx = self.session.rx.borrow();
        let mut run = Run::default();
        let (next, end) = (rx.next(), rx.next() + rx.slots());
        let mut word = next / 64;
        let mut any = false;
        while let Some(mut unread) = self.unread(word, next) {
            while unread != 0 {
                let packet = word * 64 + u64::from(unread.trailing_zeros());
                unread &= unread - 1;
                if packet >= end {
                    break;
                }
                *self.seen.borrow_mut().entry(word).or_insert(0) |= 1 << (packet % 64);
                any = true;
                // SAFETY: its bit was seen, the session is still open, and its graft is reliable and ordered.
                let packet = unsafe { rx.behind_gap(packet - next) };
                if rx.forged() > 0 {
                    run.give(peer, id);
                    return Ok(false);
                }
                run.take(packet, peer, id, layers)?;
            }
            word += 1;
        }
        run.give(peer, id);
        Ok(any)
    }

    /// Whether packets, or the end, are available.
    fn has_news(&self, behind_gaps: bool) -> bool {
        let mut rx = self.session.rx.borrow_mut();
        if rx.available() > 0 || rx.closed().is_some() {
            return true;
        }
        let next = rx.next();
        drop(rx);
        let mut words = (next / 64..).map_while(|word| self.unread(word, next));
        behind_gaps && words.any(|unread| unread != 0)
    }
}

/// A contiguous run of a flow's bytes, still in the ring.
#[derive(Default)]
struct Run<'a> {
    flow: Option<FlowId>,
    offset: u64,
    len: usize,
    pieces: Vec<IoSlice<'a>>,
}

impl<'a> Run<'a> {
    /// Takes the frames of a packet.
    fn take(
        &mut self,
        packet: &'a [u8],
        peer: &Peer,
        carrier: CarrierId,
        layers: Option<&Inbox>,
    ) -> Result<(), FrameError> {
        let mut rest = packet;
        while !rest.is_empty() {
            match Frame::take(&mut rest)? {
                frame if let Some(inbox) = layers => inbox.take(frame),
                Frame::Chunk {
                    flow,
                    offset,
                    bytes,
                    fin: false,
                    urgent: false,
                } => {
                    if !self.is_followed_by(flow, offset, bytes.len()) {
                        self.give(peer, carrier);
                        (self.flow, self.offset) = (Some(flow), offset);
                    }
                    self.len += bytes.len();
                    self.pieces.push(IoSlice::new(bytes));
                }
                frame => {
                    self.give(peer, carrier);
                    peer.frame(carrier, frame);
                }
            }
        }
        Ok(())
    }

    fn is_followed_by(&self, flow: FlowId, offset: u64, len: usize) -> bool {
        self.flow == Some(flow)
            && offset == self.offset + self.len as u64
            && self.len + len <= RUN
            && self.pieces.len() < MAX_PIECES
    }

    /// Delivers the run to the flow.
    fn give(&mut self, peer: &Peer, carrier: CarrierId) {
        if let Some(flow) = self.flow.take() {
            peer.pieces(carrier, flow, self.offset, &self.pieces);
            self.pieces.clear();
            self.len = 0;
        }
    }
}

/// Size in bytes of the leading whole frames that fit into `max`. They are this host's own, and short.
pub(in super::super) fn whole(frames: &[u8], max: usize) -> usize {
    let mut rest = frames;
    let mut len = 0;
    while !rest.is_empty() && Frame::take(&mut rest).is_ok() {
        if frames.len() - rest.len() > max {
            break;
        }
        len = frames.len() - rest.len();
    }
    len
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use vtl_proto::frame::Side;

    use super::{super::emit, *};

    #[test]
    fn whole__frames_are_not_cut() {
        let flow = FlowId {
            opener: Side::Local,
            number: 7,
        };
        let mut bytes = BytesMut::new();
        for number in 0..5 {
            bytes.extend_from_slice(&emit(Frame::Attached { flow, number }));
        }
        let each = bytes.len() / 5;
        assert_eq!(whole(&bytes, bytes.len()), 5 * each);
        assert_eq!(whole(&bytes, 3 * each + 1), 3 * each);
        assert_eq!(whole(&bytes, each - 1), 0);
        assert_eq!(whole(&[], 100), 0);
    }
}
