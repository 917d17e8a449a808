//! Streams over packets that may get lost and overtake each other, for sessions whose graft is not
//! reliable: what comes is delivered in order, what is missing is skipped and counted.
//!
//! Data go in packets, one DATA frame in each. All other frames go by a reliable byte stream beside
//! the packets, [`Mux::handle_control`]. Nobody sends data before OPENED.
//!
//! A gap is given up once [`REORDER`] pieces have come behind it, or none for [`PATIENCE_NS`]: so
//! two pieces at most are held back for a stream. What comes after that is dropped and counted. FIN
//! tells how long the stream was, and SENT, of a sender that has used up its credit, how far it is:
//! so losses at the end are noticed as well. Who sends says both only when its packets have left
//! ([`Mux::finish`], [`Mux::tell_sent`]).

use super::{Event, Frame, Mux, MuxError, StreamId, frame, stream::Stream};
use crate::{intf, wire::get};

/// So many pieces behind a gap tell that it is a loss: as many as TCP waits for (RFC 5681, 3.2).
pub const REORDER: usize = 3;
/// Time without anything new after which it is one: what overtakes on a path is seldom so far apart.
pub const PATIENCE_NS: u64 = 50_000_000;

/// What got lost in a session, or might as well have been.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Bytes that streams went on without.
    pub skipped: u64,
    /// Pieces that came too late, or twice.
    pub late: u64,
}

/// Bytes of a stream that have come before others.
#[derive(Clone, Debug)]
struct Piece {
    offset: u64,
    urgent: bool,
    bytes: Box<[u8]>,
}

/// What has come of a stream, besides what was delivered.
#[derive(Clone, Debug, Default)]
pub(super) struct Come {
    /// Pieces behind a gap, by offset; they do not overlap. Less than [`REORDER`].
    ahead: Vec<Piece>,
    /// So far the peer has sent at least, as it says,
    told: u64,
    /// and this was its end.
    ended: bool,
    /// When something new came last, ns.
    heard_ns: u64,
}

impl Come {
    /// Whether something is missing, as far as is known.
    fn lacks(&self, received: u64) -> bool {
        !self.ahead.is_empty() || self.told > received
    }

    /// How many pieces wait behind gaps.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.ahead.len()
    }

    /// Puts a piece in its place, unless it overlaps another one.
    fn insert(&mut self, piece: Piece) -> bool {
        let end = |p: &Piece| p.offset + p.bytes.len() as u64;
        let at = self.ahead.partition_point(|p| p.offset < piece.offset);
        let clear = (at == 0 || end(&self.ahead[at - 1]) <= piece.offset)
            && (self.ahead.get(at)).is_none_or(|next| end(&piece) <= next.offset);
        if clear {
            self.ahead.insert(at, piece);
        }
        clear
    }
}

impl Mux {
    /// One side of the streams of a session that loses packets.
    pub fn lossy(initiator: bool, window: u64) -> Self {
        Self {
            lossy: true,
            ..Self::new(initiator, window)
        }
    }

    /// What got lost so far.
    pub fn losses(&self) -> Losses {
        self.losses
    }

    /// Queues SENT: all packets that were accounted for have left. For a stream whose credit is used
    /// up, and without effect on one that is gone.
    pub fn tell_sent(&mut self, id: StreamId) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.sent_pending = true;
            self.enqueue(id);
        }
    }

    /// Takes the whole frames off the beginning of what has come by the reliable way; returns their
    /// bytes.
    ///
    /// # Errors
    /// The peer broke the rules: the session must end, and this `Mux` with it.
    pub fn handle_control(
        &mut self,
        now_ns: u64,
        bytes: &[u8],
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<usize, MuxError> {
        let mut rest = bytes;
        while let Some(head) = rest.first_chunk::<{ frame::HEADER }>() {
            if u32::from(get!(head, vtl_frame, type_)) == intf::VTL_FRAME_DATA {
                return Err(MuxError::Misplaced(intf::VTL_FRAME_DATA as u8));
            }
            let frame = match Frame::take(&mut rest) {
                Err(MuxError::Truncated) => break,
                frame => frame?,
            };
            match (frame.kind, self.streams.get(&frame.stream)) {
                (intf::VTL_FRAME_FIN | intf::VTL_FRAME_SENT, Some(stream)) => {
                    if stream.info.local && !stream.hello_sent {
                        return Err(MuxError::NeverOpened(frame.stream));
                    }
                    if stream.reset_pending.is_none() {
                        self.handle_told(now_ns, &frame, sink)?;
                    }
                }
                _ => self.handle(&frame, sink)?,
            }
        }
        Ok(bytes.len() - rest.len())
    }

    /// The peer says how far it is.
    fn handle_told(
        &mut self,
        now_ns: u64,
        frame: &Frame<'_>,
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<(), MuxError> {
        let (id, told) = (frame.stream, frame.offset);
        let Some(Stream { info, come, .. }) = self.streams.get_mut(&id) else {
            return Ok(());
        };
        if info.local && !info.opened {
            return Err(MuxError::NotOpened(id));
        }
        if come.ended {
            return Err(MuxError::AfterFin(id));
        }
        if told > info.recv_limit {
            return Err(MuxError::BeyondCredit(id));
        }
        let last = come.ahead.last();
        let come_so_far = last.map_or(info.received, |p| p.offset + p.bytes.len() as u64);
        // A later packet may have overtaken SENT, but not the end.
        come.ended = frame.kind == intf::VTL_FRAME_FIN;
        let expected = come_so_far.max(come.told);
        if come.ended && told < expected {
            return Err(MuxError::Offset {
                id,
                expected,
                found: told,
            });
        }
        come.told = come.told.max(told);
        come.heard_ns = now_ns;
        self.advance(id, false, sink);
        Ok(())
    }

    /// Takes a packet's payload: a piece of a stream.
    ///
    /// # Errors
    /// As [`Mux::handle_control`].
    pub fn handle_piece(
        &mut self,
        now_ns: u64,
        mut payload: &[u8],
        sink: &mut impl FnMut(Event<'_>),
    ) -> Result<(), MuxError> {
        let frame = Frame::take(&mut payload)?;
        if frame.kind != intf::VTL_FRAME_DATA || !payload.is_empty() {
            return Err(MuxError::Misplaced(frame.kind as u8));
        }
        let id = frame.stream;
        let Some(stream) = self.streams.get_mut(&id) else {
            self.losses.late += 1;
            let used = self.was_used(id);
            return used.then_some(()).ok_or(MuxError::NeverOpened(id));
        };
        let Stream { info, come, .. } = stream;
        // OPENED may come later: the network may hold it up and not this.
        if info.local && !stream.hello_sent {
            return Err(MuxError::NeverOpened(id));
        }
        if stream.reset_pending.is_some() || frame.body.is_empty() {
            return Ok(());
        }
        let end = frame.offset.checked_add(frame.body.len() as u64);
        let Some(end) = end.filter(|end| *end <= info.recv_limit) else {
            return Err(MuxError::BeyondCredit(id));
        };
        if come.ended && end > come.told {
            return Err(MuxError::AfterFin(id));
        }
        let urgent = u32::from(frame.flags) & intf::VTL_FRAME_URGENT != 0;
        let fits = come.ahead.first().is_none_or(|p| end <= p.offset);
        if frame.offset == info.received && fits {
            deliver(stream, frame.body, urgent, sink);
        } else if frame.offset <= info.received
            || !come.insert(Piece {
                offset: frame.offset,
                urgent,
                bytes: frame.body.into(),
            })
        {
            self.losses.late += 1;
            return Ok(());
        }
        stream.come.heard_ns = now_ns;
        self.advance(id, false, sink);
        Ok(())
    }

    /// When [`Mux::give_up`] has something to do; `u64::MAX` for never.
    pub fn patience_ends(&self) -> u64 {
        let heard = |id| self.streams.get(id).map(|stream| stream.come.heard_ns);
        let first = self.waiting.iter().filter_map(heard).min();
        first.map_or(u64::MAX, |at| at.saturating_add(PATIENCE_NS))
    }

    /// Goes on without what has been waited for long enough.
    pub fn give_up(&mut self, now_ns: u64, sink: &mut impl FnMut(Event<'_>)) {
        for id in self.waiting.iter().copied().collect::<Vec<_>>() {
            let stream = self.streams.get(&id);
            if stream.is_some_and(|s| now_ns.saturating_sub(s.come.heard_ns) >= PATIENCE_NS) {
                self.advance(id, true, sink);
            }
        }
    }

    /// Delivers what is in order, without what counts as lost; `late`: all that is missing does.
    fn advance(&mut self, id: StreamId, late: bool, sink: &mut impl FnMut(Event<'_>)) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        let mut skipped = 0;
        loop {
            let Stream { info, come, .. } = stream;
            let next = match come.ahead.first() {
                Some(piece) if piece.offset == info.received => {
                    let piece = come.ahead.remove(0);
                    deliver(stream, &piece.bytes, piece.urgent, sink);
                    continue;
                }
                Some(piece) => piece.offset,
                None => come.told,
            };
            if next <= info.received || !(late || come.ahead.len() >= REORDER) {
                break;
            }
            skipped += next - info.received;
            info.received = next;
        }
        self.losses.skipped += skipped;
        let received = stream.info.received;
        if stream.come.lacks(received) {
            self.waiting.insert(id);
        } else {
            self.waiting.remove(&id);
        }
        let over = stream.come.ended && stream.come.told == received;
        if over && !stream.info.fin_received {
            stream.info.fin_received = true;
            stream.credit_pending = false;
            let gone = stream.is_over();
            sink(Event::Fin { id });
            if gone {
                self.forget(id);
            } else {
                self.dequeue_if_idle(id);
            }
        } else if skipped > 0 {
            self.consumed(id, skipped);
        }
    }
}

fn deliver(stream: &mut Stream, bytes: &[u8], urgent: bool, sink: &mut impl FnMut(Event<'_>)) {
    let id = stream.info.id;
    stream.info.received += bytes.len() as u64;
    sink(Event::Data { id, bytes });
    if urgent {
        sink(Event::Urgent { id });
    }
}
