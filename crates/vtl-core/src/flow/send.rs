//! The sending half of a flow.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vtl_proto::frame::{CarrierId, Run};

use super::{Chunk, INITIAL_CREDIT, Violation};

/// Bytes that the peer has not confirmed, at most, whatever credit it gives, unless
/// [`SendHalf::set_max_unconfirmed`] says something else.
const MAX_UNCONFIRMED: u64 = 16 << 20;
/// Overhead of a chunk in bytes: queue entry, reference count, allocator.
const CHUNK: u64 = 160;

fn max_unconfirmed() -> u64 {
    MAX_UNCONFIRMED
}

/// Where the bytes of one direction go.
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

/// What a path is to send next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Bytes that went by another carrier, which has broken: report with [`SendHalf::sent_again`].
    Again(Chunk),
    /// Up to `max` bytes that the application has written, from this offset on: report with
    /// [`SendHalf::sent_new`].
    New {
        /// Bytes of the direction before them.
        offset: u64,
        /// At least 1.
        max: u64,
    },
    /// Shut the TCP connection down for writing, and report with [`SendHalf::sent_fin`]. Only where the
    /// connection has carried the whole direction; else a frame says the end ([`SendHalf::owes_fin`]).
    Fin,
}

/// The flow's TCP connection as the sender sees it.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Connection {
    /// Bytes written to it.
    position: u64,
    /// The latest run that the peer knows of.
    run: Run,
    /// A newer one that it has been told of.
    asked: Option<Run>,
}

impl Connection {
    /// The offset of the next byte that may be written without a new run.
    fn offset(&self) -> u64 {
        self.run.offset + (self.position - self.run.position)
    }
}

/// A chunk that a carrier has, and that may have to go again by another one.
#[derive(Debug, Serialize, Deserialize)]
struct Retained {
    carrier: CarrierId,
    chunk: Chunk,
}

/// From which offset on chunks may be lost; those before `passed` are not on their way any more. Of two the one with
/// the greater `from` is the later one, or `passed` of one whose `from` is `u64::MAX`: the `from` that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loses {
    /// `u64::MAX`: from none on.
    pub from: u64,
    /// At most as much as was sent; where `from` is `u64::MAX`, the former `from`.
    pub passed: u64,
}

/// The sending half: which bytes go by which path, and which have to go again.
#[derive(Debug, Serialize, Deserialize)]
pub struct SendHalf {
    path: Path,
    /// A path to move to once the peer has shown that it knows the flow, or does without what gets lost.
    awaited: Option<(Path, bool)>,
    /// Whether both applications do without what gets lost: this host's, and the peer's.
    tolerant: [bool; 2],
    /// What the peer is told of losses.
    loses: Option<Loses>,
    /// Offset of the next byte that has never been sent.
    next: u64,
    /// Credit of the peer: carriers take nothing behind this offset.
    limit: u64,
    /// The application has ended its direction here.
    end: Option<u64>,
    /// TCP's FIN has said it.
    fin_by_tcp: bool,
    fin_confirmed: bool,
    /// Everything below has been received by the peer's flow layer, as far as it has said so.
    confirmed: u64,
    /// The peer has confirmed anything: it knows the flow.
    known: bool,
    /// To be sent again, by offset; they do not overlap.
    returned: BTreeMap<u64, Chunk>,
    /// In the order in which they were sent.
    retained: VecDeque<Retained>,
    tcp: Connection,
    /// The peer discards chunks of this flow.
    rejected: bool,
    /// No byte goes by the TCP connection.
    #[serde(default)]
    requires_carrier: bool,
    /// Bytes that carriers have and the peer has not confirmed, at most.
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
    /// The peer has said anything of the flow: before, it may ignore frames of it.
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// All goes by TCP, unless the peer confirms something after all.
    pub fn is_rejected(&self) -> bool {
        self.rejected
    }

    /// No byte may go by the TCP connection: without a carrier they wait. Before anything is sent.
    pub fn set_requires_carrier(&mut self) {
        self.requires_carrier = true;
    }

    /// There are bytes that were sent before and have to go again.
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

    /// The path that bytes take now.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Moves the direction to another path. What the former one has is still delivered by it.
    ///
    /// The peer may never have heard of the flow, where the SYN's option got lost. So until it has confirmed
    /// something, TCP repeats what carriers have, which leaves the connection the application's; and a carrier
    /// must have credit for a chunk, which the peer answers, if only by rejecting it.
    /// `loses`: what goes by that path may get lost. The flow waits until the peer does without it, and until what
    /// has come back from paths that do not lose has gone by another such path.
    pub fn move_to(&mut self, path: Path, loses: bool) {
        self.awaited = None;
        if path == self.path {
            return;
        }
        // Where TCP may have nothing, what has come back goes by the carrier, and is answered, too.
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
            // Nothing need be lost that the new path can bring.
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

    /// Both applications do without what gets lost, and the peer knows the flow; nothing has to come by a path that
    /// does not lose, and what begins can be told from what has ended.
    fn may_start_to_lose(&self) -> bool {
        let is_another = self.loses.is_none_or(|ended| self.next > ended.passed);
        // An ATTACH that comes late would end it.
        let is_attached = self.tcp.asked.is_none();
        let may_lose = self.known && self.tolerant == [true; 2];
        may_lose && self.returned.is_empty() && is_another && is_attached
    }

    /// What is sent now may get lost.
    fn is_losing(&self) -> bool {
        self.loses.is_some_and(|loses| loses.from != u64::MAX)
    }

    /// The application does without what gets lost.
    pub fn set_tolerant(&mut self) {
        self.tolerant[0] = true;
    }

    /// What the peer is to be told of losses.
    pub fn loses(&self) -> Option<Loses> {
        self.loses
    }

    /// What was sent by a carrier that loses chunks, below this offset, is not on its way any more.
    pub fn passed(&mut self, offset: u64) {
        let offset = offset.min(self.next);
        if let Some(loses) = self.loses.as_mut().filter(|loses| loses.from != u64::MAX) {
            loses.passed = loses.passed.max(offset);
        }
    }

    /// Everything below has been received, as far as the peer has said so.
    pub fn confirmed_offset(&self) -> u64 {
        self.confirmed
    }

    /// Offset of the next byte that has never been sent.
    pub fn next_offset(&self) -> u64 {
        self.next
    }

    /// Ends the direction behind what was sent so far: the application has sent its FIN.
    pub fn finish(&mut self) {
        self.end.get_or_insert(self.next);
    }

    /// The application has ended the direction.
    pub fn is_finished(&self) -> bool {
        self.end.is_some()
    }

    /// Nothing is left to do: the peer has everything, or TCP has. The TCP connection is to be shut down
    /// for writing, which tells the peer that nothing of it is needed any more.
    pub fn is_complete(&self) -> bool {
        self.fin_confirmed || self.fin_by_tcp
    }

    /// The TCP connection has carried the direction from its first byte to the latest.
    fn is_verbatim(&self) -> bool {
        self.tcp.run.number == 0 && self.tcp.asked.is_none() && self.tcp.position == self.next
    }

    /// The direction's end, which the peer has to be told of by a frame.
    pub fn owes_fin(&self) -> Option<u64> {
        let by_tcp = self.path == Path::Tcp && self.is_verbatim();
        self.end.filter(|_| !by_tcp && !self.is_complete())
    }

    /// What `path` is to send next, at most `max` bytes; `None` while it has nothing to send, waits for
    /// credit, or for [`SendHalf::attached`].
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
            // The receiver is never stuck in the middle: TCP's own flow control will do.
            Path::Tcp if self.is_verbatim() => u64::MAX - self.next,
            // A gap may be filled behind these bytes, so the receiver must have room for them.
            _ => self
                .limit
                .min(self.confirmed.saturating_add(self.max_unconfirmed))
                .saturating_sub(self.next),
        };
        let max = room.min(max as u64);
        (max > 0).then_some(Next::New { offset, max })
    }

    /// Whether TCP may write the byte at `offset`; if not, a new run is on its way to the peer.
    fn attach(&mut self, offset: u64) -> bool {
        let tcp = &mut self.tcp;
        if tcp.offset() == offset {
            // An older run that the peer has not taken over yet must not come into force.
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

    /// The run that the peer has to be told of before TCP can go on.
    pub fn asked(&self) -> Option<Run> {
        self.tcp.asked
    }

    /// The peer knows the run with this number.
    pub fn attached(&mut self, number: u32) {
        if let Some(run) = self.tcp.asked.take_if(|run| run.number == number) {
            self.tcp.run = run;
            self.move_on();
        }
    }

    /// Moves to the path that it waits to take, if it may now.
    fn move_on(&mut self) {
        if let Some((path, loses)) = self.awaited.take() {
            self.move_to(path, loses);
        }
    }

    /// `len` bytes of the chunk that [`SendHalf::next`] returned last have gone by the current path.
    /// `retain`: the carrier does not give back what it could not deliver.
    pub fn sent_again(&mut self, len: usize, retain: bool) {
        let Some((_, mut chunk)) = self.returned.pop_first() else {
            return;
        };
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
        self.account(chunk, retain);
    }

    /// These bytes, the next ones of the application, have gone by the current path.
    pub fn sent_new(&mut self, bytes: Bytes, urgent: bool, retain: bool) {
        let chunk = Chunk {
            offset: self.next,
            bytes,
            urgent,
        };
        self.next = chunk.end();
        self.account(chunk, retain);
    }

    /// The TCP connection was shut down for writing behind everything.
    pub fn sent_fin(&mut self) {
        self.fin_by_tcp = true;
    }

    fn account(&mut self, chunk: Chunk, retain: bool) {
        match self.path {
            Path::Tcp => self.tcp.position += chunk.bytes.len() as u64,
            Path::Carrier(carrier) if retain || !self.known || self.is_losing() => {
                self.retained.push_back(Retained { carrier, chunk });
            }
            Path::Carrier(_) => {}
        }
    }

    /// The peer has received everything below `offset`, and the end if `fin`, and takes chunks up to
    /// `limit`. `tolerant`: its application does without what gets lost.
    ///
    /// # Errors
    /// It was never sent.
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
        // Chunks that were sent again stand behind younger ones: those wait for their turn.
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

    /// A carrier has broken. `undelivered`: what it gives back. All of it goes by another path, which is
    /// TCP if this one was in use.
    pub fn carrier_broken(
        &mut self,
        carrier: CarrierId,
        undelivered: impl IntoIterator<Item = Chunk>,
    ) {
        let broken = Path::Carrier(carrier);
        self.awaited.take_if(|(path, _)| *path == broken);
        if self.path == broken {
            self.wait_by_tcp(self.awaited);
        }
        self.give_back(|retained| retained.carrier == carrier);
        for chunk in undelivered {
            self.give_back_chunk(&chunk);
        }
        self.keep_whole();
    }

    /// What has come back from a path that does not lose goes by TCP where everything else may get lost.
    fn keep_whole(&mut self) {
        let first = self.returned.first_key_value().map(|(offset, _)| *offset);
        let from = self.loses.filter(|_| self.is_losing()).map(|l| l.from);
        if first.zip(from).is_some_and(|(first, from)| first < from) {
            self.wait_by_tcp(Some((self.path, true)));
        }
    }

    /// Goes by TCP until it may take another path.
    fn wait_by_tcp(&mut self, awaited: Option<(Path, bool)>) {
        self.move_to(Path::Tcp, false);
        self.awaited = awaited;
    }

    /// A carrier gives back a chunk, all or part of which it may have delivered.
    pub fn returned(&mut self, chunk: &Chunk) {
        self.give_back_chunk(chunk);
        self.keep_whole();
    }

    /// The peer discards chunks of this flow, or will, as it may never have heard of it: all goes by TCP until
    /// it confirms something.
    pub fn reject(&mut self) {
        if !self.known && !self.rejected {
            self.rejected = true;
            // If it confirms something after all.
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
            self.give_back_chunk(&retained.chunk);
        }
    }

    /// Queues what of a chunk is neither confirmed nor queued already.
    fn give_back_chunk(&mut self, chunk: &Chunk) {
        if self.is_complete() {
            return;
        }
        let mut from = chunk.offset.max(self.confirmed);
        if !self.known {
            // TCP has what was given back before, from the first byte on.
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
