//! The receiving half of a flow: reassembly, flow control, skipped losses.

use std::collections::VecDeque;

use bytes::{Buf, BytesMut};
use serde::{Deserialize, Serialize};
use vtl_proto::frame::Run;

use super::{
    INITIAL_CREDIT, Violation,
    pieces::{Pieces, SMALL},
};

/// Maximum number of out-of-order pieces, and of gaps skipped.
const MAX_PIECES: usize = 16_384;
/// Maximum number of the TCP connection's runs beyond the current one.
const MAX_RUNS: usize = 64;
/// Reordering threshold: chunks beyond a gap after which it counts as lost, as TCP's duplicate acknowledgements
/// (RFC 5681, 3.2).
const REORDER: u32 = 3;
/// Overhead of a buffer in bytes: queue entry and allocator.
const BUFFER: u64 = 64;
/// Bytes received after which a CONFIRM is due.
const CONFIRM_EVERY: u64 = 64 << 10;

/// The receiving half: reassembles chunks by their offsets.
#[derive(Debug, Serialize, Deserialize)]
pub struct ReceiveHalf {
    /// Bytes that the application has consumed.
    consumed: u64,
    /// Bytes in order, from `consumed` on.
    ready: VecDeque<BytesMut>,
    /// Everything below has been received.
    received: u64,
    /// Out of order.
    pieces: Pieces,
    /// Final offset, once known.
    end: Option<u64>,
    /// Offset behind the latest urgent byte.
    urgent: Option<u64>,
    /// Receive window, bytes: doubled, up to `max_window`, each time the application has consumed half of it
    /// (`taken`).
    window: u64,
    max_window: u64,
    taken: u64,
    /// Credit given to the peer.
    limit: u64,
    /// The latest CONFIRM: offset received, credit, end received.
    #[serde(skip)]
    told: Option<(u64, u64, bool)>,
    /// The TCP connection: bytes read from it, the current run, later runs.
    position: u64,
    run: Run,
    runs: VecDeque<Run>,
    losses: Losses,
}

/// Losses that the application tolerates.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Losses {
    /// The application is loss-tolerant.
    is_tolerant: bool,
    /// Offset from which on chunks may get lost; those below `passed` are no longer in flight.
    from: Option<u64>,
    passed: u64,
    /// The latest `from` whose losses have ended.
    ended: Option<u64>,
    /// Offset of the first gap, and the number of chunks received beyond it.
    overtaken: (u64, u32),
    /// Bytes skipped in total,
    lost: u64,
    /// and the skipped ranges not consumed yet: offset and length. No buffer spans one.
    gaps: VecDeque<(u64, u64)>,
}

impl Losses {
    /// Ends the losses that began at `from`.
    fn end(&mut self, from: u64) {
        self.ended = self.ended.max(Some(from));
        self.from.take_if(|known| *known <= from);
    }
}

impl ReceiveHalf {
    /// `window`: initial receive window, bytes, `max_window`: its maximum; both at least [`INITIAL_CREDIT`].
    pub fn new(window: u64, max_window: u64) -> Self {
        let max_window = max_window.max(INITIAL_CREDIT);
        Self {
            consumed: 0,
            ready: VecDeque::new(),
            received: 0,
            pieces: Pieces::default(),
            end: None,
            urgent: None,
            window: window.clamp(INITIAL_CREDIT, max_window),
            max_window,
            taken: 0,
            limit: INITIAL_CREDIT,
            told: None,
            position: 0,
            run: Run::default(),
            runs: VecDeque::new(),
            losses: Losses::default(),
        }
    }

    /// Cumulative offset: every byte below has been received or skipped.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Whether the end, and every byte before it, has been received.
    pub fn is_ended(&self) -> bool {
        self.end == Some(self.received)
    }

    /// Whether the application has consumed all bytes up to the end.
    pub fn is_complete(&self) -> bool {
        self.end == Some(self.consumed)
    }

    /// Offset behind the latest urgent byte.
    pub fn urgent(&self) -> Option<u64> {
        self.urgent
    }

    /// Handles a chunk that arrived by a carrier.
    ///
    /// # Errors
    /// The peer violated the protocol: the flow must be reset.
    pub fn chunk(&mut self, offset: u64, bytes: &[u8], fin: bool) -> Result<(), Violation> {
        let end = offset + bytes.len() as u64;
        // An empty chunk with an end needs no credit: bytes before it may have come by TCP, which needs none.
        if !bytes.is_empty() {
            if end > self.limit.max(self.received) {
                let limit = self.limit;
                return Err(Violation::BeyondCredit { end, limit });
            }
            self.take(offset, bytes)?;
            self.skip_passed();
        }
        if fin { self.end_at(end) } else { Ok(()) }
    }

    /// Handles bytes that arrived by a carrier, as [`ReceiveHalf::chunk`], without a copy where they are large
    /// and in order.
    ///
    /// # Errors
    /// As [`ReceiveHalf::chunk`].
    pub fn bytes(&mut self, offset: u64, bytes: BytesMut) -> Result<(), Violation> {
        let end = offset + bytes.len() as u64;
        let is_next = offset == self.received && self.pieces.is_empty();
        let is_allowed = end <= self.limit && self.end.is_none_or(|last| end <= last);
        if bytes.len() < SMALL || !is_next || !is_allowed {
            return self.chunk(offset, &bytes, false);
        }
        self.received = end;
        self.ready.push_back(bytes);
        self.skip_passed();
        Ok(())
    }

    /// Whether bytes received by a carrier may bypass reassembly and go to the application at once, being the
    /// next in order.
    pub fn is_next(&self, offset: u64, len: u64) -> bool {
        let end = offset + len;
        offset == self.received
            && offset == self.consumed
            && self.pieces.is_empty()
            && end <= self.limit
            && self.end.is_none_or(|last| end <= last)
            && self.urgent.is_none_or(|behind| behind <= offset)
            && !self.losses.is_tolerant
    }

    /// Notes that the application was given the first `len` bytes of those that [`ReceiveHalf::is_next`]
    /// allowed.
    pub fn note_given(&mut self, len: usize) {
        self.received += len as u64;
        self.note_consumed(len);
    }

    /// Notes that the byte before `offset` is urgent.
    pub fn note_urgent(&mut self, offset: u64) {
        self.urgent = self.urgent.max(Some(offset));
    }

    fn take(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let end = offset + bytes.len() as u64;
        if let Some(last) = self.end.filter(|last| end > *last) {
            return Err(Violation::TwoEnds(last));
        }
        if end <= self.received {
            return Ok(());
        }
        let skip = self.received.saturating_sub(offset);
        let (offset, bytes) = (offset + skip, &bytes[skip as usize..]);
        if offset == self.received && self.pieces.is_empty() {
            self.append(bytes);
            return Ok(());
        }
        self.pieces.insert(offset, bytes);
        if self.pieces.len() > MAX_PIECES {
            return Err(Violation::TooManyGaps);
        }
        self.join();
        Ok(())
    }

    /// Moves pieces that are in order now to the ready queue.
    fn join(&mut self) {
        while let Some(piece) = self.pieces.take(self.received) {
            if piece.len() < SMALL {
                self.append(&piece);
            } else {
                self.received += piece.len() as u64;
                self.ready.push_back(piece);
            }
        }
    }

    /// Marks the application as loss-tolerant.
    pub fn set_tolerant(&mut self) {
        self.losses.is_tolerant = true;
    }

    /// Whether the application is loss-tolerant.
    pub fn is_tolerant(&self) -> bool {
        self.losses.is_tolerant
    }

    /// Offset of the next byte to be read by the application.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Bytes skipped as lost so far.
    pub fn lost(&self) -> u64 {
        self.losses.lost
    }

    /// Handles LOSES: the peer sends by an unreliable carrier from offset `from` on, of which bytes below
    /// `passed` are no longer in flight; handle all chunks that have arrived first. `from` of `u64::MAX`: the
    /// losses that began at `passed` have ended. Outdated messages are ignored.
    ///
    /// # Errors
    /// The application is not loss-tolerant: the flow must be reset.
    pub fn loses(&mut self, from: u64, passed: u64) -> Result<(), Violation> {
        let losses = &mut self.losses;
        if !losses.is_tolerant {
            return Err(Violation::Loses);
        }
        if from == u64::MAX {
            losses.end(passed);
        } else if losses.ended.is_none_or(|ended| from > ended) {
            if losses.from.is_none_or(|known| from > known) {
                (losses.from, losses.passed) = (Some(from), passed);
            } else if losses.from == Some(from) {
                losses.passed = losses.passed.max(passed);
            }
            self.skip_passed();
        }
        Ok(())
    }

    /// Skips gaps whose bytes are no longer in flight.
    fn skip_passed(&mut self) {
        let passed = self.losses.passed;
        // Carriers take no bytes beyond the credit.
        let until = passed.min(self.limit).min(self.end.unwrap_or(passed));
        while self.may_skip() && self.received < until {
            self.skip(until.min(self.pieces.first().unwrap_or(until)));
        }
    }

    /// Counts a chunk of an unreliable carrier that arrived beyond the first gap; skips the gap at the
    /// reordering threshold. One that was late, or has filled a part of the gap, says nothing of it.
    pub fn note_overtaken(&mut self, offset: u64) {
        let Some(piece) = self.pieces.first().filter(|first| offset >= *first) else {
            return;
        };
        let (at, count) = &mut self.losses.overtaken;
        if *at != self.received {
            (*at, *count) = (self.received, 0);
        }
        *count += 1;
        if *count >= REORDER && self.may_skip() {
            self.skip(piece);
        }
    }

    /// Whether the next byte may be lost, and another gap can be tracked.
    fn may_skip(&self) -> bool {
        let is_lossy = self.losses.from.is_some_and(|from| self.received >= from);
        is_lossy && self.losses.gaps.len() < MAX_PIECES
    }

    /// Skips the bytes below offset `to`.
    fn skip(&mut self, to: u64) {
        let len = to - self.received;
        self.losses.lost += len;
        if self.consumed == self.received {
            self.consumed = to;
        } else {
            self.losses.gaps.push_back((self.received, len));
        }
        self.received = to;
        self.join();
    }

    /// Appends bytes in order. Small ones are coalesced, since a peer decides on their size.
    fn append(&mut self, bytes: &[u8]) {
        let gap = self.losses.gaps.back();
        let is_behind_gap = gap.is_some_and(|(at, len)| at + len == self.received);
        match self.ready.back_mut() {
            Some(last) if last.len() + bytes.len() <= SMALL && !is_behind_gap => {
                last.extend_from_slice(bytes);
            }
            _ => self.ready.push_back(BytesMut::from(bytes)),
        }
        self.received += bytes.len() as u64;
    }

    fn end_at(&mut self, end: u64) -> Result<(), Violation> {
        let known = self.pieces.end().unwrap_or(0);
        if self.end.is_some_and(|other| other != end) || known.max(self.received) > end {
            return Err(Violation::TwoEnds(self.end.unwrap_or(end)));
        }
        self.end = Some(end);
        Ok(())
    }

    /// Bytes that may be read from the TCP connection now; 0 is backpressure, until the application has read.
    pub fn tcp_room(&self) -> u64 {
        let offset = self.tcp_offset();
        let until_run = self
            .runs
            .front()
            .map_or(u64::MAX, |run| run.position - self.position);
        let credit = self.limit.max(self.consumed + self.window);
        credit.saturating_sub(offset).min(until_run)
    }

    /// Offset of the TCP connection's next byte.
    fn tcp_offset(&self) -> u64 {
        self.run.offset + (self.position - self.run.position)
    }

    /// Handles bytes read from the TCP connection, at most [`ReceiveHalf::tcp_room`]. `urgent`: the last one is
    /// TCP's urgent byte.
    ///
    /// # Errors
    /// The peer violated the protocol: the flow must be reset.
    pub fn tcp(&mut self, bytes: &[u8], urgent: bool) -> Result<(), Violation> {
        if bytes.len() as u64 > self.tcp_room() {
            return Err(Violation::NoRun);
        }
        let offset = self.tcp_offset();
        self.position += bytes.len() as u64;
        self.take(offset, bytes)?;
        self.skip_passed();
        if urgent {
            self.note_urgent(offset + bytes.len() as u64);
        }
        self.next_run();
        Ok(())
    }

    /// Handles the TCP connection's FIN behind the bytes read.
    ///
    /// # Errors
    /// Bytes lie beyond that end: the flow must be reset.
    pub fn tcp_end(&mut self) -> Result<(), Violation> {
        match self.end {
            // The end came by a carrier; the peer has closed the unused connection.
            Some(_) => Ok(()),
            None => self.end_at(self.tcp_offset()),
        }
    }

    /// Handles ATTACH: the peer is about to write a run to the TCP connection.
    ///
    /// # Errors
    /// The peer violated the protocol: the flow must be reset.
    pub fn attach(&mut self, run: Run) -> Result<(), Violation> {
        let last = self.runs.back().unwrap_or(&self.run);
        if run.number <= last.number {
            return Ok(()); // duplicate or out of order
        }
        let floor = last.position.max(self.position);
        if run.position < floor || run.offset.checked_add(self.window).is_none() {
            return Err(Violation::BadRun(run.offset));
        }
        if self.runs.back().is_some_and(|r| r.position == run.position) {
            self.runs.pop_back(); // an empty run
        }
        // Unconfirmed bytes are retransmitted over TCP.
        if let Some(from) = self.losses.from {
            self.losses.end(from);
        }
        self.runs.push_back(run);
        if self.runs.len() > MAX_RUNS {
            return Err(Violation::BadRun(run.offset));
        }
        self.next_run();
        Ok(())
    }

    /// Number of the latest run that the peer has announced; 0: none.
    pub fn latest_run(&self) -> u32 {
        self.runs.back().unwrap_or(&self.run).number
    }

    fn next_run(&mut self) {
        if let Some(run) = self.runs.pop_front_if(|r| r.position == self.position) {
            self.run = run;
        }
    }

    /// Next bytes for the application, in order, and whether they are TCP's urgent byte, which is returned
    /// alone.
    pub fn peek(&self) -> Option<(&[u8], bool)> {
        let bytes = &self.ready.front()?[..];
        match self.urgent.map(|behind| behind.wrapping_sub(self.consumed)) {
            Some(1) => Some((&bytes[..1], true)),
            Some(until) if (2..=bytes.len() as u64).contains(&until) => {
                Some((&bytes[..until as usize - 1], false))
            }
            _ => Some((bytes, false)),
        }
    }

    /// Notes that the application has consumed `len` of the bytes of [`ReceiveHalf::peek`].
    pub fn consume(&mut self, len: usize) {
        let Some(first) = self.ready.front_mut() else {
            return;
        };
        let len = len.min(first.len());
        first.advance(len);
        if first.is_empty() {
            self.ready.pop_front();
        }
        self.note_consumed(len);
        let gaps = &mut self.losses.gaps;
        while let Some((_, len)) = gaps.pop_front_if(|(at, _)| *at == self.consumed) {
            self.consumed += len;
        }
    }

    fn note_consumed(&mut self, len: usize) {
        self.consumed += len as u64;
        self.taken += len as u64;
        if self.taken >= self.window / 2 {
            self.taken = 0;
            self.window = (2 * self.window).min(self.max_window);
        }
    }

    /// Changes the maximum receive window. Credit already given stays.
    pub fn set_max_window(&mut self, max_window: u64) {
        self.max_window = max_window.max(INITIAL_CREDIT);
        self.window = self.window.min(self.max_window);
    }

    /// Bytes buffered, in order or not.
    pub fn held(&self) -> u64 {
        self.received - self.consumed + self.pieces.bytes()
    }

    /// Memory in bytes, overhead included.
    pub fn memory(&self) -> u64 {
        let gaps = self.losses.gaps.len() * size_of::<(u64, u64)>();
        let buffers = self.ready.len() as u64 * BUFFER + gaps as u64;
        self.received - self.consumed + self.pieces.memory() + buffers
    }

    /// Frees all buffers: the flow was reset.
    pub(super) fn discard(&mut self) {
        self.ready = VecDeque::new();
        self.pieces = Pieces::default();
        self.losses.gaps = VecDeque::new();
        self.consumed = self.received;
        // The application has not had all bytes.
        self.end = None;
    }

    /// The CONFIRM that is due, if any: offset received, end received, credit.
    pub fn owes_confirm(&self) -> Option<(u64, bool, u64)> {
        let limit = self.limit.max(self.consumed + self.window);
        let ended = self.is_ended();
        let due = self.told.is_none_or(|(received, told_limit, told_end)| {
            self.received - received >= CONFIRM_EVERY
                || limit.saturating_sub(told_limit) >= self.window / 4
                || ended && !told_end
        });
        due.then_some((self.received, ended, limit))
    }

    /// Notes that a CONFIRM is sent.
    pub fn confirm_sent(&mut self, (received, ended, limit): (u64, bool, u64)) {
        self.limit = self.limit.max(limit);
        self.told = Some((received, limit, ended));
    }

    /// Makes a CONFIRM due if bytes were received since the latest one. Returns whether they were.
    pub fn confirm_now(&mut self) -> bool {
        let is_news = |(received, ..): &mut (u64, u64, bool)| *received < self.received;
        self.told.take_if(is_news).is_some()
    }

    /// Notes that the latest CONFIRM may be lost.
    pub fn confirm_lost(&mut self) {
        self.told = None;
    }
}
