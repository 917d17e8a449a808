//! The Hooker's streams: many ordered byte streams in the one reliable, ordered sequence of
//! packets that a session delivers.
//!
//! # Sending
//! The caller fills one packet payload after the other, and places frames in the order in which it
//! got them from [`Mux`]: first [`Mux::poll_control`] until it returns 0 or the packet is full,
//! then for each stream that has data and [`Mux::credit`]: read up to that many bytes from the
//! application behind room for a header ([`DATA_HEADER`] bytes), and put what
//! [`Mux::data_header`] returns before them. A stream has no credit before its OPEN or OPENED was
//! polled, and a FIN is polled after all data that was accounted for, so frames of one stream are
//! always in order.
//!
//! # Credit
//! Per stream: OPEN and OPENED tell how many bytes their sender takes, CREDIT raises that. Before
//! OPENED the opener may send [`EARLY_CREDIT`] bytes.
//!
//! # With loss
//! Where the session loses packets, see [`lossy`].
//!
//! # End
//! A stream is forgotten when both FINs have passed, or a RESET in either direction. Bytes that
//! the caller still holds for the application are its own.

use core::net::SocketAddr;
use std::collections::{BTreeMap, BTreeSet};

use crate::intf;

pub mod frame;
pub mod lossy;
mod stream;
#[cfg(test)]
mod tests;
mod types;

pub use stream::StreamInfo;
pub use types::{Event, MuxError, OpenError, ResetCode, StreamId};

use frame::{Frame, Out};
use stream::Stream;

/// Bytes of receive credit per stream unless told otherwise.
pub const DEFAULT_WINDOW: u64 = 8 << 20;
/// Bytes that an opener may send before OPENED arrives; part of the protocol.
pub const EARLY_CREDIT: u64 = 64 << 10;
/// Streams that each side may have open at a time; part of the protocol.
pub const MAX_STREAMS: usize = 16_384;
/// Bytes that go before each piece of data in a packet.
pub const DATA_HEADER: usize = frame::HEADER;
/// Bytes of the longest control frame: with less room, [`Mux::poll_control`] may return 0.
pub const MAX_CONTROL: usize = frame::HEADER + frame::OPEN;

/// One side of a session's streams.
#[derive(Debug)]
pub struct Mux {
    initiator: bool,
    window: u64,
    streams: BTreeMap<StreamId, Stream>,
    /// Streams that owe a control frame, oldest first.
    queue: BTreeMap<u64, StreamId>,
    next_place: u64,
    /// Next identity of ours, and the lowest that the peer may still use.
    next_local: Option<u32>,
    next_peer: Option<u32>,
    /// Streams opened by us, by the peer.
    counts: [usize; 2],
    /// Packets may get lost: [`lossy`]. Then these streams wait for something that may have been.
    lossy: bool,
    waiting: BTreeSet<StreamId>,
    losses: lossy::Losses,
}

impl Mux {
    /// `initiator`: this side sent the NEGO. `window`: receive credit of each stream in bytes, at
    /// least [`EARLY_CREDIT`]; so much the caller may have to buffer per stream.
    pub fn new(initiator: bool, window: u64) -> Self {
        let first = |even: bool| Some(u32::from(!even));
        Self {
            initiator,
            window: window.max(EARLY_CREDIT),
            streams: BTreeMap::new(),
            queue: BTreeMap::new(),
            next_place: 0,
            next_local: first(initiator),
            next_peer: first(!initiator),
            counts: [0; 2],
            lossy: false,
            waiting: BTreeSet::new(),
            losses: lossy::Losses::default(),
        }
    }

    /// Opens a stream and queues OPEN.
    ///
    /// # Errors
    /// The session has no room for another.
    pub fn open(&mut self, dst: SocketAddr, src: SocketAddr) -> Result<StreamId, OpenError> {
        let id = self.next_local.ok_or(OpenError::Exhausted)?;
        if self.counts[0] >= MAX_STREAMS {
            return Err(OpenError::TooManyStreams);
        }
        self.next_local = id.checked_add(2);
        let id = StreamId(id);
        self.insert(id, true, dst, src).hello_pending = true;
        self.enqueue(id);
        Ok(id)
    }

    /// Queues OPENED: the local application has accepted the peer's stream. Without effect on
    /// streams that are gone, ours, or accepted before.
    pub fn accept_opened(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if !stream.info.local && !stream.info.opened {
            stream.info.opened = true;
            stream.hello_pending = true;
            self.enqueue(id);
        }
    }

    /// Abandons a stream, with data under way in both directions, and queues RESET.
    pub fn reset(&mut self, id: StreamId, code: ResetCode) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if stream.info.local && !stream.hello_sent {
            // The peer has never heard of it.
            self.forget(id);
        } else if stream.reset_pending.is_none() {
            stream.reset_pending = Some(code);
            self.enqueue(id);
        }
    }

    /// Ends our direction behind the data accounted for so far, and queues FIN.
    pub fn finish(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if !stream.info.finished {
            stream.info.finished = true;
            stream.fin_pending = true;
            self.enqueue(id);
        }
    }

    /// `n` bytes more were written to the application; queues CREDIT once a quarter of the window
    /// is free again.
    pub fn consumed(&mut self, id: StreamId, n: u64) {
        let window = self.window;
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let info = &mut stream.info;
        info.consumed = info.consumed.saturating_add(n).min(info.received);
        let free = info
            .consumed
            .saturating_add(window)
            .saturating_sub(info.recv_limit);
        if free >= window / 4 && !info.fin_received && stream.hello_sent {
            stream.credit_pending = true;
            self.enqueue(id);
        }
    }

    /// Bytes of data that may be sent on a stream now; 0 if it is gone or finished.
    pub fn credit(&self, id: StreamId) -> u64 {
        self.streams.get(&id).map_or(0, Stream::credit)
    }

    /// Accounts for `len` bytes that the caller puts into the packet, and returns the header that
    /// goes right before them. `None` if `len` is 0 or more than [`Mux::credit`].
    pub fn data_header(&mut self, id: StreamId, len: u16) -> Option<[u8; DATA_HEADER]> {
        let offset = self.account(id, len)?;
        Some(frame::header(id, intf::VTL_FRAME_DATA, offset, len))
    }

    /// The same for bytes of which the last is TCP's urgent one.
    pub fn urgent_header(&mut self, id: StreamId, len: u16) -> Option<[u8; DATA_HEADER]> {
        let offset = self.account(id, len)?;
        Some(frame::urgent_header(id, offset, len))
    }

    /// The place in the stream of the next `len` bytes, which count as sent from now on.
    fn account(&mut self, id: StreamId, len: u16) -> Option<u64> {
        let stream = self.streams.get_mut(&id)?;
        if len == 0 || u64::from(len) > stream.credit() {
            return None;
        }
        let offset = stream.info.sent;
        stream.info.sent += u64::from(len);
        Some(offset)
    }

    /// Whether [`Mux::poll_control`] has frames.
    pub fn has_control(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Writes control frames, as many as fit, to the beginning of `buffer`; returns their bytes.
    pub fn poll_control(&mut self, buffer: &mut [u8]) -> usize {
        let mut used = 0;
        while let Some((place, id)) = self.queue.first_key_value().map(|(p, i)| (*p, *i)) {
            used += self.poll_stream(id, &mut buffer[used..]);
            let Some(stream) = self.streams.get_mut(&id) else {
                continue;
            };
            if stream.owes() {
                break; // no room
            }
            stream.queued = None;
            self.queue.remove(&place);
            if stream.is_over() {
                self.forget(id);
            }
        }
        used
    }

    /// Decodes a packet's payload and tells `sink` what it meant.
    ///
    /// # Errors
    /// The peer broke the rules: the session must end, and this `Mux` with it.
    pub fn handle_packet(
        &mut self,
        payload: &[u8],
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<(), MuxError> {
        self.handle_rest(payload, 0, sink)
    }

    fn handle(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<(), MuxError> {
        if frame.kind == intf::VTL_FRAME_OPEN {
            self.handle_open(frame, sink)
        } else if self.streams.contains_key(&frame.stream) {
            self.handle_frame(frame, sink)
        } else if self.was_used(frame.stream) {
            Ok(())
        } else {
            Err(MuxError::NeverOpened(frame.stream))
        }
    }

    /// As [`Mux::handle_packet`], without the frames in `taken`, of [`Mux::handle_early`].
    ///
    /// # Errors
    /// As [`Mux::handle_packet`].
    pub fn handle_rest(
        &mut self,
        mut payload: &[u8],
        taken: u128,
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<(), MuxError> {
        let mut bit = 1;
        while !payload.is_empty() {
            let frame = Frame::take(&mut payload)?;
            if frame.kind == intf::VTL_FRAME_SENT {
                return Err(MuxError::UnknownType(frame.kind as u8));
            }
            if taken & bit == 0 {
                self.handle(&frame, sink)?;
            }
            bit <<= 1;
        }
        Ok(())
    }

    /// Takes what it can of a packet that came before others: bytes that are the next ones of their
    /// stream, and ends behind them. Returns `taken` with the bits of those frames, the first frame's
    /// is the lowest. All others, and what breaks the rules, are left for the packet's turn.
    pub fn handle_early(
        &mut self,
        mut payload: &[u8],
        mut taken: u128,
        sink: &mut impl FnMut(Event<'_>),
    ) -> u128 {
        let mut bit = 1;
        while let Ok(frame) = Frame::take(&mut payload) {
            let stream = self.streams.get(&frame.stream);
            let fits = stream.is_some_and(|s| {
                let len = frame.body.len() as u64;
                (s.hello_sent || !s.info.local)
                    && s.reset_pending.is_none()
                    && s.check_data(frame.offset, len).is_ok()
            });
            let kind = matches!(frame.kind, intf::VTL_FRAME_DATA | intf::VTL_FRAME_FIN);
            if fits && kind && taken & bit == 0 && self.handle_frame(&frame, sink).is_ok() {
                taken |= bit;
            }
            bit <<= 1;
        }
        taken
    }

    /// Streams that are not forgotten.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    /// Their states, by identity.
    pub fn iter(&self) -> impl Iterator<Item = &StreamInfo> {
        self.streams.values().map(|stream| &stream.info)
    }

    /// The state of one.
    pub fn stream(&self, id: StreamId) -> Option<&StreamInfo> {
        self.streams.get(&id).map(|stream| &stream.info)
    }

    fn handle_open(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<(), MuxError> {
        let id = frame.stream;
        if self.is_local(id) || self.next_peer.is_none_or(|next| id.0 < next) {
            return Err(MuxError::BadOpen(id));
        }
        if self.counts[1] >= MAX_STREAMS {
            return Err(MuxError::TooManyStreams);
        }
        self.next_peer = id.0.checked_add(2);
        let (dst, src) = frame::open_addrs(frame.body);
        let early = self.early_credit();
        let stream = self.insert(id, false, dst, src);
        stream.info.send_limit = frame.offset;
        stream.info.recv_limit = early;
        sink(Event::Open { id, dst, src });
        Ok(())
    }

    /// A frame for a stream that exists.
    fn handle_frame(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<(), MuxError> {
        let id = frame.stream;
        let Some(stream) = self.streams.get_mut(&id) else {
            return Ok(());
        };
        if stream.info.local && !stream.hello_sent {
            return Err(MuxError::NeverOpened(id));
        }
        if frame.kind == intf::VTL_FRAME_RESET {
            let ours = stream.reset_pending.is_some();
            self.forget(id);
            if !ours {
                sink(Event::Reset {
                    id,
                    code: ResetCode::from_wire(frame.offset),
                });
            }
            return Ok(());
        }
        if stream.reset_pending.is_some() {
            return Ok(());
        }
        match frame.kind {
            intf::VTL_FRAME_OPENED => {
                if !stream.info.local || stream.info.opened {
                    return Err(MuxError::UnexpectedOpened(id));
                }
                let writable = stream.raise_send_limit(frame.offset)?;
                stream.info.opened = true;
                sink(Event::Opened { id });
                if writable {
                    sink(Event::Writable { id });
                }
            }
            intf::VTL_FRAME_DATA => {
                let len = frame.body.len() as u64;
                if len == 0 && frame.offset < stream.info.received {
                    return Ok(()); // what follows it was taken early
                }
                stream.check_data(frame.offset, len)?;
                stream.info.received += len;
                if len > 0 {
                    sink(Event::Data {
                        id,
                        bytes: frame.body,
                    });
                    if u32::from(frame.flags) & intf::VTL_FRAME_URGENT != 0 {
                        sink(Event::Urgent { id });
                    }
                }
            }
            intf::VTL_FRAME_FIN => {
                stream.check_data(frame.offset, 0)?;
                stream.info.fin_received = true;
                stream.credit_pending = false;
                let over = stream.is_over();
                sink(Event::Fin { id });
                if over {
                    self.forget(id);
                } else {
                    self.dequeue_if_idle(id);
                }
            }
            _ => {
                if stream.raise_send_limit(frame.offset)? {
                    sink(Event::Writable { id });
                }
            }
        }
        Ok(())
    }

    /// Writes frames that one stream owes, in their order, as far as there is room.
    fn poll_stream(&mut self, id: StreamId, buffer: &mut [u8]) -> usize {
        let (window, early) = (self.window, self.early_credit());
        let Some(stream) = self.streams.get_mut(&id) else {
            return 0;
        };
        let mut out = Out { buffer, used: 0 };
        if let Some(code) = stream.reset_pending {
            if out.push(id, intf::VTL_FRAME_RESET, code.to_wire(), &[]) {
                self.forget(id);
            }
            return out.used;
        }
        if stream.hello_pending {
            let (kind, body) = if stream.info.local {
                (
                    intf::VTL_FRAME_OPEN,
                    &frame::open_body(stream.info.dst, stream.info.src)[..],
                )
            } else {
                (intf::VTL_FRAME_OPENED, &[][..])
            };
            if !out.fits(body.len()) {
                return out.used;
            }
            out.push(id, kind, stream.advertise(window), body);
            stream.hello_pending = false;
            stream.hello_sent = true;
            if stream.info.local {
                stream.info.send_limit = early;
            }
        }
        if stream.credit_pending && out.fits(0) {
            out.push(id, intf::VTL_FRAME_CREDIT, stream.advertise(window), &[]);
        }
        if stream.sent_pending && out.push(id, intf::VTL_FRAME_SENT, stream.info.sent, &[]) {
            stream.sent_pending = false;
        }
        // A stream that the peer opened may be finished before it is accepted: FIN waits.
        if stream.fin_pending && stream.hello_sent && out.fits(0) {
            out.push(id, intf::VTL_FRAME_FIN, stream.info.sent, &[]);
            stream.fin_pending = false;
            stream.info.fin_sent = true;
        }
        out.used
    }

    fn insert(
        &mut self,
        id: StreamId,
        local: bool,
        dst: SocketAddr,
        src: SocketAddr,
    ) -> &mut Stream {
        self.counts[usize::from(!local)] += 1;
        self.streams.entry(id).or_insert(Stream::new(StreamInfo {
            id,
            local,
            dst,
            src,
            opened: false,
            sent: 0,
            send_limit: 0,
            received: 0,
            consumed: 0,
            recv_limit: 0,
            finished: false,
            fin_sent: false,
            fin_received: false,
        }))
    }

    fn enqueue(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if stream.queued.is_none() && stream.owes() {
            stream.queued = Some(self.next_place);
            self.queue.insert(self.next_place, id);
            self.next_place += 1;
        }
    }

    fn dequeue_if_idle(&mut self, id: StreamId) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        if !stream.owes()
            && let Some(place) = stream.queued.take()
        {
            self.queue.remove(&place);
        }
    }

    /// What the opener may send before OPENED.
    fn early_credit(&self) -> u64 {
        if self.lossy { 0 } else { EARLY_CREDIT }
    }

    fn forget(&mut self, id: StreamId) {
        self.waiting.remove(&id);
        let Some(stream) = self.streams.remove(&id) else {
            return;
        };
        self.counts[usize::from(!stream.info.local)] -= 1;
        if let Some(place) = stream.queued {
            self.queue.remove(&place);
        }
    }

    fn is_local(&self, id: StreamId) -> bool {
        id.0.is_multiple_of(2) == self.initiator
    }

    /// Whether a stream of this identity has been open, or was skipped.
    fn was_used(&self, id: StreamId) -> bool {
        let next = if self.is_local(id) {
            self.next_local
        } else {
            self.next_peer
        };
        next.is_none_or(|next| id.0 < next)
    }
}
