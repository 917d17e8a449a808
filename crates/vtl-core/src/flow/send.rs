//! The sending half of a flow: path selection, credit, retransmission by another path.

mod spread;

pub use spread::{Given, Hastened};

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vtl_proto::frame::{CarrierId, Run};

use super::{Chunk, INITIAL_CREDIT, Violation};

/// Default limit of unconfirmed bytes, which applies whatever credit the peer gives; see
/// [`SendHalf::set_max_unconfirmed`].
const MAX_UNCONFIRMED: u64 = 16 << 20;
/// Overhead of a chunk in bytes: queue entry, reference count, allocator.
const CHUNK: u64 = 160;

fn max_unconfirmed() -> u64 {
    MAX_UNCONFIRMED
}

/// Path of one direction's bytes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
pub enum Path {
    /// The flow's own TCP connection.
    #[default]
    Tcp,
    /// A carrier of the association.
    Carrier(CarrierId),
}

/// Next transmission by a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Retransmission of bytes that a carrier gave back, or that went by a carrier that has broken: report with
    /// [`SendHalf::sent_again`].
    Again(Chunk),
    /// New bytes of the application, from this offset on: report with [`SendHalf::sent_new`].
    New {
        /// Offset of the first one.
        offset: u64,
        /// Maximum length, at least 1.
        max: u64,
    },
    /// Shut the TCP connection down for writing: report with [`SendHalf::sent_fin`]. Only where the connection
    /// has carried the whole direction; otherwise a frame conveys the end ([`SendHalf::owes_fin`]).
    Fin,
}

/// The flow's TCP connection as the sender sees it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Connection {
    /// Bytes written to the connection.
    position: u64,
    /// The latest run that the peer has acknowledged (ATTACHED).
    run: Run,
    /// A newer run, announced to the peer (ATTACH).
    asked: Option<Run>,
}

impl Connection {
    /// Offset of the next byte that may be written without a new run.
    fn offset(&self) -> u64 {
        self.run.offset + (self.position - self.run.position)
    }
}

/// A chunk in flight by a carrier, kept for retransmission by another path.
#[derive(Debug, Serialize, Deserialize)]
struct Retained {
    carrier: CarrierId,
    chunk: Chunk,
    /// Sent by one of several stacks.
    #[serde(skip)]
    spread: Option<spread::Sent>,
}

/// Content of LOSES: the offset from which on chunks may get lost. Of two messages, the later one has the
/// greater `from`; one that ends losses (`from` is `u64::MAX`) compares by `passed`, the `from` that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loses {
    /// Chunks from this offset on may get lost; `u64::MAX`: none any more.
    pub from: u64,
    /// Chunks below this offset, at most that of the next byte, are no longer in flight; where `from` is
    /// `u64::MAX`, the former `from`.
    pub passed: u64,
}

/// The sending half: selects the path of each byte, and retransmits.
#[derive(Debug, Serialize, Deserialize)]
pub struct SendHalf {
    path: Path,
    /// Path to move to, and whether it loses, once the peer has confirmed that it knows the flow or tolerates
    /// losses.
    awaited: Option<(Path, bool)>,
    /// Whether the applications are loss-tolerant: this host's, and the peer's.
    tolerant: [bool; 2],
    /// LOSES to send to the peer.
    loses: Option<Loses>,
    /// Offset of the next byte that has never been sent.
    next: u64,
    /// Credit from the peer: carriers take no new bytes beyond this offset.
    limit: u64,
    /// Final offset, once the application has ended the direction.
    end: Option<u64>,
    /// The end was sent as TCP's FIN.
    fin_by_tcp: bool,
    fin_confirmed: bool,
    /// Cumulative confirmation: the peer's flow layer has received every byte below.
    confirmed: u64,
    /// The peer has sent a CONFIRM: it knows the flow.
    known: bool,
    /// Chunks to retransmit, by offset; they do not overlap.
    returned: BTreeMap<u64, Chunk>,
    /// Retransmission buffer, in the order of transmission.
    retained: VecDeque<Retained>,
    tcp: Connection,
    /// The peer has sent REJECT: it discards chunks of this flow.
    rejected: bool,
    /// The TCP connection carries no bytes.
    #[serde(default)]
    requires_carrier: bool,
    /// Limit of unconfirmed bytes.
    #[serde(skip, default = "max_unconfirmed")]
    max_unconfirmed: u64,
}

impl Default for SendHalf {
    fn default() -> Self {
        Self {
            path: Path::Tcp,
            awaited: None,
            tolerant: [false; 2],
            loses: None,
            next: 0,
            limit: INITIAL_CREDIT,
            end: None,
            fin_by_tcp: false,
            fin_confirmed: false,
            confirmed: 0,
            known: false,
            returned: BTreeMap::new(),
            retained: VecDeque::new(),
            tcp: Connection::default(),
            rejected: false,
            requires_carrier: false,
            max_unconfirmed: MAX_UNCONFIRMED,
        }
    }
}

impl SendHalf {
    /// Whether the peer has sent a CONFIRM of the flow; before, it may ignore the flow's frames.
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// Whether the peer has rejected the flow: all bytes go by TCP unless it confirms something later.
    pub fn is_rejected(&self) -> bool {
        self.rejected
    }

    /// Forbids bytes on the TCP connection: they wait for a carrier. Call it before anything is sent.
    pub fn set_requires_carrier(&mut self) {
        self.requires_carrier = true;
    }

    /// Whether bytes wait for retransmission.
    pub fn has_returned(&self) -> bool {
        !self.returned.is_empty()
    }

    /// Limits the bytes given to carriers and not confirmed by the peer.
    pub fn set_max_unconfirmed(&mut self, bytes: u64) {
        self.max_unconfirmed = bytes.max(INITIAL_CREDIT);
    }

    /// Upper bound of the memory in bytes that retransmission buffers use.
    pub fn memory(&self) -> u64 {
        let chunks = (self.retained.len() + self.returned.len()) as u64;
        let bytes = if chunks > 0 {
            self.next - self.confirmed
        } else {
            0
        };
        bytes + chunks * CHUNK
    }

    /// Frees the retransmission buffers: the flow was reset.
    pub(super) fn discard(&mut self) {
        self.returned.clear();
        self.retained = VecDeque::new();
    }

    /// The current path.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Moves the direction to another path. The former path still delivers what it has taken.
    ///
    /// The peer may not know the flow, if the SYN's option got lost. Therefore, until its first CONFIRM, TCP
    /// retransmits what carriers have, so that the connection stays valid for the application; and a carrier
    /// needs credit for a chunk, so that the peer answers, if only with REJECT. `loses`: the path is
    /// unreliable. The flow moves there once the peer tolerates losses and chunks given back by reliable paths
    /// have been retransmitted by a reliable one.
    pub fn move_to(&mut self, path: Path, loses: bool) {
        self.awaited = None;
        if path == self.path {
            return;
        }
        // If TCP is forbidden, chunks given back go by the carrier, and are answered, too.
        let has_no_credit = !self.requires_carrier && self.next >= self.limit;
        let is_unheard = !self.known && (self.rejected || has_no_credit);
        if loses && self.is_losing() {
            self.move_to(Path::Tcp, false);
        }
        let is_early = loses && !self.may_start_to_lose();
        if path != Path::Tcp && (is_unheard || is_early) {
            self.awaited = Some((path, loses));
            return;
        }
        let former = mem::replace(&mut self.path, path);
        if path == Path::Tcp && !self.known {
            self.give_back(|_| true);
        }
        if let Some(ended) = self.loses.filter(|_| self.is_losing()) {
            // The new path retransmits what the former one may lose.
            self.give_back(|retained| Path::Carrier(retained.carrier) == former);
            self.loses = Some(Loses {
                from: u64::MAX,
                passed: ended.from,
            });
        }
        if loses {
            let from = self.next;
            self.loses = Some(Loses { from, passed: from });
        }
    }

    /// Whether losses may begin: both applications tolerate them, the peer knows the flow, no reliable
    /// retransmission is left, and the new LOSES can be told from the former one.
    fn may_start_to_lose(&self) -> bool {
        let is_another = self.loses.is_none_or(|ended| self.next > ended.passed);
        // A late ATTACH would end the losses.
        let is_attached = self.tcp.asked.is_none();
        let may_lose = self.known && self.tolerant == [true; 2];
        may_lose && self.returned.is_empty() && is_another && is_attached
    }

    /// Whether bytes sent now may get lost.
    fn is_losing(&self) -> bool {
        self.loses.is_some_and(|loses| loses.from != u64::MAX)
    }

    /// Marks the local application as loss-tolerant.
    pub fn set_tolerant(&mut self) {
        self.tolerant[0] = true;
    }

    /// LOSES to send to the peer.
    pub fn loses(&self) -> Option<Loses> {
        self.loses
    }

    /// Notes that bytes sent by an unreliable carrier below `offset` are no longer in flight.
    pub fn passed(&mut self, offset: u64) {
        let offset = offset.min(self.next);
        if let Some(loses) = self.loses.as_mut().filter(|loses| loses.from != u64::MAX) {
            loses.passed = loses.passed.max(offset);
        }
    }

    /// Cumulative confirmation: the peer has received every byte below.
    pub fn confirmed_offset(&self) -> u64 {
        self.confirmed
    }

    /// Offset of the next byte that has never been sent.
    pub fn next_offset(&self) -> u64 {
        self.next
    }

    /// Ends the direction at the next offset: the application has sent its FIN.
    pub fn finish(&mut self) {
        self.end.get_or_insert(self.next);
    }

    /// Whether the application has ended the direction.
    pub fn is_finished(&self) -> bool {
        self.end.is_some()
    }

    /// Whether the end has been confirmed, or sent as TCP's FIN. Then shut the TCP connection down for writing,
    /// which tells the peer that it is no longer needed.
    pub fn is_complete(&self) -> bool {
        self.fin_confirmed || self.fin_by_tcp
    }

    /// Whether the TCP connection has carried every byte of the direction, in order.
    fn is_verbatim(&self) -> bool {
        self.tcp.run.number == 0 && self.tcp.asked.is_none() && self.tcp.position == self.next
    }

    /// The final offset, if it has to be sent in a frame.
    pub fn owes_fin(&self) -> Option<u64> {
        let by_tcp = self.path == Path::Tcp && self.is_verbatim();
        self.end.filter(|_| !by_tcp && !self.is_complete())
    }

    /// Next transmission by `path`, at most `max` bytes; `None` if there is nothing to send, or it waits for
    /// credit or for [`SendHalf::attached`].
    pub fn next(&mut self, path: Path, max: usize) -> Option<Next> {
        if path != self.path || max == 0 {
            return None;
        }
        let again = self.returned.first_key_value().map(|(offset, _)| *offset);
        let offset = again.unwrap_or(self.next);
        if again.is_none() && self.end.is_some() {
            let says_fin = path == Path::Tcp && self.is_verbatim() && !self.is_complete();
            return says_fin.then_some(Next::Fin);
        }
        if path == Path::Tcp && (self.requires_carrier || !self.attach(offset)) {
            return None;
        }
        if let Some(chunk) = again.and_then(|offset| self.returned.get(&offset)) {
            let mut chunk = chunk.clone();
            if chunk.bytes.len() > max {
                chunk.bytes.truncate(max);
                chunk.urgent = false;
            }
            return Some(Next::Again(chunk));
        }
        let room = match path {
            // No gap can be below these bytes: TCP's own flow control suffices.
            Path::Tcp if self.is_verbatim() => u64::MAX - self.next,
            // A gap may be filled later, so the receiver must have room for them.
            _ => self
                .limit
                .min(self.confirmed.saturating_add(self.max_unconfirmed))
                .saturating_sub(self.next),
        };
        let max = room.min(max as u64);
        (max > 0).then_some(Next::New { offset, max })
    }

    /// Whether TCP may write the byte at `offset`; if not, announces a new run to the peer.
    fn attach(&mut self, offset: u64) -> bool {
        let tcp = &mut self.tcp;
        if tcp.offset() == offset {
            // A pending older run must not take effect.
            return tcp.asked.is_none();
        }
        if tcp.asked.is_none_or(|asked| asked.offset != offset) {
            let number = tcp.asked.map_or(tcp.run.number, |asked| asked.number) + 1;
            tcp.asked = Some(Run {
                number,
                position: tcp.position,
                offset,
            });
        }
        false
    }

    /// The run to announce in ATTACH, which TCP waits for.
    pub fn asked(&self) -> Option<Run> {
        self.tcp.asked
    }

    /// Handles ATTACHED for the run with this number.
    pub fn attached(&mut self, number: u32) {
        if let Some(run) = self.tcp.asked.take_if(|run| run.number == number) {
            self.tcp.run = run;
            self.move_on();
        }
    }

    /// Retries the pending move.
    fn move_on(&mut self) {
        if let Some((path, loses)) = self.awaited.take() {
            self.move_to(path, loses);
        }
    }

    /// Notes that `len` bytes of the chunk that [`SendHalf::next`] returned last were sent by the current path.
    pub fn sent_again(&mut self, len: usize) {
        if let Some(chunk) = self.take_returned(len) {
            self.account(chunk);
        }
    }

    /// Takes the first `len` bytes of the first chunk that waits for retransmission.
    fn take_returned(&mut self, len: usize) -> Option<Chunk> {
        let (_, mut chunk) = self.returned.pop_first()?;
        let rest = chunk.bytes.split_off(len.min(chunk.bytes.len()));
        if !rest.is_empty() {
            let offset = chunk.end();
            let rest = Chunk {
                offset,
                bytes: rest,
                urgent: mem::take(&mut chunk.urgent),
            };
            self.returned.insert(offset, rest);
        }
        Some(chunk)
    }

    /// Notes that these bytes, the next ones of the application, were sent by the current path.
    pub fn sent_new(&mut self, bytes: Bytes, urgent: bool) {
        let chunk = self.new_chunk(bytes, urgent);
        self.account(chunk);
    }

    fn new_chunk(&mut self, bytes: Bytes, urgent: bool) -> Chunk {
        let chunk = Chunk {
            offset: self.next,
            bytes,
            urgent,
        };
        self.next = chunk.end();
        chunk
    }

    /// Notes that the TCP connection was shut down for writing behind all bytes.
    pub fn sent_fin(&mut self) {
        self.fin_by_tcp = true;
    }

    fn account(&mut self, chunk: Chunk) {
        match self.path {
            Path::Tcp => self.tcp.position += chunk.bytes.len() as u64,
            Path::Carrier(carrier) => {
                let spread = None;
                self.retained.push_back(Retained {
                    carrier,
                    chunk,
                    spread,
                });
            }
        }
    }

    /// Handles CONFIRM: the peer has received every byte below `offset`, and the end if `fin`, and gives credit
    /// up to `limit`. `tolerant`: its application is loss-tolerant.
    ///
    /// # Errors
    /// The offset, or the end, was never sent.
    pub fn confirmed(
        &mut self,
        offset: u64,
        fin: bool,
        limit: u64,
        tolerant: bool,
    ) -> Result<(), Violation> {
        if offset > self.next || (fin && self.end != Some(offset)) {
            return Err(Violation::ConfirmedUnsent(offset));
        }
        self.known = true;
        self.rejected = false;
        self.tolerant[1] |= tolerant;
        self.fin_confirmed |= fin;
        self.limit = self.limit.max(limit);
        if offset > self.confirmed {
            self.forget_confirmed(offset);
        }
        self.move_on();
        Ok(())
    }

    fn forget_confirmed(&mut self, offset: u64) {
        self.confirmed = offset;
        // Retransmitted chunks are behind younger ones: they are freed with those.
        while let Some(first) = self.retained.front()
            && first.chunk.end() <= offset
        {
            self.retained.pop_front();
        }
        while let Some(mut first) = self.returned.first_entry() {
            if *first.key() >= offset {
                break;
            }
            if first.get().end() <= offset {
                first.remove();
                continue;
            }
            let mut chunk = mem::take(first.get_mut());
            first.remove();
            let _ = chunk.bytes.split_to((offset - chunk.offset) as usize);
            chunk.offset = offset;
            self.returned.insert(offset, chunk);
        }
    }

    /// Handles a broken carrier. All that was sent by it and is unconfirmed is retransmitted by another path, which
    /// is TCP if this one was in use.
    pub fn carrier_broken(&mut self, carrier: CarrierId) {
        let broken = Path::Carrier(carrier);
        self.awaited.take_if(|(path, _)| *path == broken);
        if self.path == broken {
            self.wait_by_tcp(self.awaited);
        }
        self.give_back(|retained| retained.carrier == carrier);
        self.keep_whole();
    }

    /// Moves to TCP while chunks given back by a reliable path wait for retransmission and the current one is
    /// unreliable.
    fn keep_whole(&mut self) {
        let first = self.returned.first_key_value().map(|(offset, _)| *offset);
        let from = self.loses.filter(|_| self.is_losing()).map(|l| l.from);
        if first.zip(from).is_some_and(|(first, from)| first < from) {
            self.wait_by_tcp(Some((self.path, true)));
        }
    }

    /// Moves to TCP, with a pending move to another path.
    fn wait_by_tcp(&mut self, awaited: Option<(Path, bool)>) {
        self.move_to(Path::Tcp, false);
        self.awaited = awaited;
    }

    /// Handles a chunk that a carrier gives back; it may have delivered all or part of it.
    pub fn returned(&mut self, chunk: &Chunk) {
        self.give_back_chunk(chunk);
        self.keep_whole();
    }

    /// Handles REJECT: the peer discards chunks of this flow, which it may not know. All bytes go by TCP until
    /// it confirms something.
    pub fn reject(&mut self) {
        if !self.known && !self.rejected {
            self.rejected = true;
            // In case of a later CONFIRM.
            let awaited = Some((self.path, false)).filter(|(path, _)| *path != Path::Tcp);
            self.wait_by_tcp(awaited);
        }
    }

    fn give_back(&mut self, mut is_meant: impl FnMut(&Retained) -> bool) {
        let (back, kept) = mem::take(&mut self.retained)
            .into_iter()
            .partition::<VecDeque<_>, _>(|retained| is_meant(retained));
        self.retained = kept;
        for retained in back {
            if !self.has_copy(&retained) {
                self.give_back_chunk(&retained.chunk);
            }
        }
    }

    /// Queues for retransmission what of a chunk is neither confirmed nor queued already.
    fn give_back_chunk(&mut self, chunk: &Chunk) {
        if self.is_complete() {
            return;
        }
        let mut from = chunk.offset.max(self.confirmed);
        if !self.known {
            // TCP has carried earlier retransmissions, from the first byte on.
            from = from.max(self.tcp.position);
        }
        let end = chunk.end();
        while from < end {
            let before = self.returned.range(..=from).next_back();
            if let Some(covered) = before.map(|(_, c)| c.end()).filter(|to| *to > from) {
                from = covered;
                continue;
            }
            let until = self.returned.range(from..).next().map_or(end, |(o, _)| *o);
            let until = until.min(end);
            let at = |offset: u64| (offset - chunk.offset) as usize;
            let piece = Chunk {
                offset: from,
                bytes: chunk.bytes.slice(at(from)..at(until)),
                urgent: chunk.urgent && until == end,
            };
            self.returned.insert(from, piece);
            from = until;
        }
    }
}
