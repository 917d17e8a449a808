//! An association's streams: what flows write and read, and when which of it goes.
//!
//! SCTP has one receive window for all streams, which one that is not read would close for all. So
//! everything that arrives is taken from the library at once, and each stream has credit of its own.
//! And SCTP has 65,536 streams, for many more flows: a stream carries one flow behind the other. Each
//! side says as its last word of a flow that it was the last, `DONE` or `RESET`; behind both of them
//! the stream is free. So nothing is needed of RFC 6525.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeSet, HashMap, VecDeque},
    future::{Future, poll_fn},
    rc::Rc,
    task::{Context, Poll, Waker},
};

use bytes::{Buf, Bytes};
use tokio::sync::Notify;
use vtl_proto::mux::ResetCode;

use super::super::stream::Broken;

/// Messages of a stream, by their first byte.
const DATA: u8 = 0;
const END: u8 = 1;
const CREDIT: u8 = 2;
const RESET: u8 = 3;
const DONE: u8 = 4;

/// Flows of an association at a time. Fewer than with QUIC: the library asks all streams for each
/// packet.
pub(super) const STREAMS: u16 = 1024;
/// Bytes of a message, one DATA chunk. Longer ones would be fragmented, and nothing of them would
/// arrive before everything of them has.
pub(super) const MESSAGE: usize = 1168;
/// Bytes that a flow may have written and not handed to the library, but for one record.
const WRITTEN: usize = 128 << 10;
/// Bytes that may come unasked, on each new flow.
const FIRST_CREDIT: u32 = 256 << 10;
/// Bytes of one flow that may be under way, for one that is read: 850 Mbit/s for 56 ms.
const MOST_CREDIT: u32 = 6 << 20;
/// The same while the association's flows together hold [`MUCH_HELD`] that nobody has read.
const LITTLE_CREDIT: u32 = 64 << 10;
const MUCH_HELD: usize = 64 << 20;
/// From so much on the library keeps the rest, and its window closes for all.
pub(super) const MOST_HELD: usize = 128 << 20;

/// Which end of the association this is. The client opens flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

/// The peer breaks the rules.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Nonsense;

struct Flow {
    id: u16,
    state: RefCell<State>,
}

/// What is known of a flow.
#[derive(Default)]
struct State {
    /// Written, and not with the library.
    written: VecDeque<Bytes>,
    written_bytes: usize,
    /// Bytes that the peer still takes.
    credit: u64,
    /// Everything has been written.
    finished: bool,
    end_sent: bool,
    /// To be said instead of anything else.
    reset: Option<ResetCode>,
    /// The first word, and the last.
    first_sent: bool,
    last_sent: bool,
    /// Bytes that the peer is to be allowed, besides `allowed`.
    grant: u32,

    /// Arrived, and not read.
    arrived: VecDeque<Bytes>,
    arrived_bytes: usize,
    /// Bytes that the peer may still send.
    allowed: u32,
    /// The same, when nothing had arrived of them.
    window: u32,
    end_came: bool,
    end_read: bool,
    last_came: bool,
    broken: Option<Broken>,

    /// It waits for its turn.
    queued: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
    watcher: Option<Waker>,
}

impl State {
    fn wake(&mut self) {
        let all = [&mut self.reader, &mut self.writer, &mut self.watcher];
        all.into_iter()
            .filter_map(Option::take)
            .for_each(Waker::wake);
    }

    fn may_finish(&self) -> bool {
        self.finished && self.written_bytes == 0 && !self.end_sent
    }

    fn is_done(&self) -> bool {
        self.end_sent && self.end_came
    }

    fn wants_to_speak(&self) -> bool {
        let credited = self.written_bytes > 0 && self.credit > 0;
        let something = self.grant > 0 || credited || self.may_finish() || self.is_done();
        !self.last_sent && (self.reset.is_some() || something)
    }

    /// The next message.
    fn speak(&mut self) -> Option<Vec<u8>> {
        if self.last_sent {
            return None;
        }
        let message = if let Some(code) = self.reset {
            self.last_sent = true;
            vec![RESET, code.to_wire() as u8]
        } else if self.grant > 0 {
            let grant = std::mem::take(&mut self.grant);
            [&[CREDIT][..], &grant.to_be_bytes()].concat()
        } else if self.written_bytes > 0 && self.credit > 0 {
            self.data()
        } else if self.may_finish() {
            self.end_sent = true;
            vec![END]
        } else if self.is_done() {
            self.last_sent = true;
            vec![DONE]
        } else {
            return None;
        };
        self.first_sent = true;
        Some(message)
    }

    fn data(&mut self) -> Vec<u8> {
        let credit = usize::try_from(self.credit).unwrap_or(usize::MAX);
        let mut left = self.written_bytes.min(credit).min(MESSAGE - 1);
        self.written_bytes -= left;
        self.credit -= left as u64;
        let mut message = Vec::with_capacity(1 + left);
        message.push(DATA);
        while left > 0
            && let Some(front) = self.written.front_mut()
        {
            let n = front.len().min(left);
            message.extend_from_slice(&front[..n]);
            front.advance(n);
            left -= n;
            if front.is_empty() {
                self.written.pop_front();
            }
        }
        if self.written_bytes < WRITTEN {
            self.writer.take().into_iter().for_each(Waker::wake);
        }
        message
    }

    /// Ends it without a true end. `said`: the peer knows.
    fn give_up(&mut self, code: ResetCode, broken: Broken) {
        if !self.last_sent {
            self.reset.get_or_insert(code);
        }
        self.broken.get_or_insert(broken);
        self.written.clear();
        self.written_bytes = 0;
        self.wake();
    }
}

#[derive(Default)]
struct Table {
    flows: HashMap<u16, Rc<Flow>>,
    /// Identifiers below `fresh` that are free: the lowest first, since the library keeps what was
    /// ever used.
    free: BTreeSet<u16>,
    fresh: u16,
    /// Flows with something to say, each once.
    turns: VecDeque<Rc<Flow>>,
    /// Opened by the peer, and not taken yet.
    accepted: VecDeque<Rc<Flow>>,
    over: bool,
}

/// All of an association.
pub(super) struct Streams {
    role: Role,
    table: RefCell<Table>,
    /// Bytes that have arrived and were not read.
    held: Cell<usize>,
    /// There is something for the association to do.
    pub(super) work: Notify,
    /// A flow was accepted, or the association is over.
    news: Notify,
    over: Notify,
}

impl Streams {
    pub(super) fn new(role: Role) -> Self {
        let table = Table {
            fresh: 1,
            ..Table::default()
        };
        Self {
            role,
            table: RefCell::new(table),
            held: Cell::new(0),
            work: Notify::new(),
            news: Notify::new(),
            over: Notify::new(),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.held.get() < MOST_HELD
    }

    pub(super) fn is_over(&self) -> bool {
        self.table.borrow().over
    }

    /// Identifiers in use.
    #[cfg(test)]
    pub(super) fn flows(&self) -> usize {
        self.table.borrow().flows.len()
    }

    /// Nothing comes or goes any more.
    pub(super) fn end(&self) {
        let mut table = self.table.borrow_mut();
        table.over = true;
        table.turns.clear();
        table.accepted.clear();
        let flows = std::mem::take(&mut table.flows);
        drop(table);
        for flow in flows.into_values() {
            let mut state = flow.state.borrow_mut();
            state.broken.get_or_insert(Broken::Tunnel);
            state.wake();
        }
        self.work.notify_one();
        self.news.notify_one();
        self.over.notify_waiters();
    }

    /// Completes at the end.
    pub(super) async fn ended(&self) {
        let mut notified = std::pin::pin!(self.over.notified());
        // Before the question, so that no answer is missed.
        notified.as_mut().enable();
        if !self.is_over() {
            notified.await;
        }
    }

    fn enter(table: &mut Table, id: u16) -> Rc<Flow> {
        let state = State {
            credit: FIRST_CREDIT.into(),
            allowed: FIRST_CREDIT,
            window: FIRST_CREDIT,
            ..State::default()
        };
        let flow = Rc::new(Flow {
            id,
            state: RefCell::new(state),
        });
        table.flows.insert(id, Rc::clone(&flow));
        flow
    }

    /// A new flow; `None` if there is no room, or nothing any more.
    pub(super) fn open(self: &Rc<Self>) -> Option<(SctpSender, SctpReceiver)> {
        let mut table = self.table.borrow_mut();
        if table.over {
            return None;
        }
        let id = match table.free.pop_first() {
            Some(id) => id,
            None if table.fresh <= STREAMS => {
                table.fresh += 1;
                table.fresh - 1
            }
            None => return None,
        };
        let flow = Self::enter(&mut table, id);
        Some(self.ends_of(flow))
    }

    /// The next flow that the peer opens; `None` at the end.
    pub(super) async fn accept(self: &Rc<Self>) -> Option<(SctpSender, SctpReceiver)> {
        loop {
            let accepted = {
                let mut table = self.table.borrow_mut();
                let accepted = table.accepted.pop_front();
                if accepted.is_none() && table.over {
                    return None;
                }
                accepted
            };
            match accepted {
                Some(flow) => return Some(self.ends_of(flow)),
                None => self.news.notified().await,
            }
        }
    }

    fn ends_of(self: &Rc<Self>, flow: Rc<Flow>) -> (SctpSender, SctpReceiver) {
        let sender = SctpSender(End {
            flow: Rc::clone(&flow),
            streams: Rc::clone(self),
        });
        let streams = Rc::clone(self);
        (sender, SctpReceiver(End { flow, streams }))
    }

    /// Gives it a turn if it needs one.
    fn queue(&self, flow: &Rc<Flow>, state: &mut State) {
        if state.wants_to_speak() && !state.queued {
            state.queued = true;
            self.table.borrow_mut().turns.push_back(Rc::clone(flow));
            self.work.notify_one();
        }
    }

    /// The next message, and its stream: one of each flow in turn.
    pub(super) fn next(&self) -> Option<(u16, Vec<u8>)> {
        loop {
            let flow = self.table.borrow_mut().turns.pop_front()?;
            let mut state = flow.state.borrow_mut();
            state.queued = false;
            if state.reset.is_some() && !state.first_sent && self.role == Role::Client {
                // The peer has not heard of it.
                (state.last_sent, state.last_came) = (true, true);
            }
            let message = state.speak();
            self.queue(&flow, &mut state);
            self.forget_if_over(&flow, &state);
            if let Some(message) = message {
                return Some((flow.id, message));
            }
        }
    }

    fn forget_if_over(&self, flow: &Rc<Flow>, state: &State) {
        if state.last_sent && state.last_came {
            let mut table = self.table.borrow_mut();
            if table.flows.remove(&flow.id).is_some() && self.role == Role::Client {
                table.free.insert(flow.id);
            }
        }
    }

    /// A message of the peer's.
    pub(super) fn take(&self, id: u16, message: &Bytes) -> Result<(), Nonsense> {
        let &kind = message.first().ok_or(Nonsense)?;
        let body = message.slice(1..);
        let known = self.table.borrow().flows.get(&id).cloned();
        let flow = match known {
            Some(flow) => flow,
            None if self.role == Role::Server && kind == DATA && id <= STREAMS => {
                let mut table = self.table.borrow_mut();
                let flow = Self::enter(&mut table, id);
                table.accepted.push_back(Rc::clone(&flow));
                self.news.notify_one();
                flow
            }
            None => return Err(Nonsense),
        };
        let mut state = flow.state.borrow_mut();
        if state.last_came {
            return Err(Nonsense);
        }
        match kind {
            DATA => {
                let len = u32::try_from(body.len()).map_err(|_| Nonsense)?;
                let room = state.allowed.checked_sub(len);
                if state.end_came || len == 0 {
                    return Err(Nonsense);
                }
                state.allowed = room.ok_or(Nonsense)?;
                if state.broken.is_none() {
                    self.held.set(self.held.get() + body.len());
                    state.arrived_bytes += body.len();
                    state.arrived.push_back(body);
                    state.reader.take().into_iter().for_each(Waker::wake);
                }
            }
            END if !state.end_came && body.is_empty() => {
                state.end_came = true;
                state.reader.take().into_iter().for_each(Waker::wake);
            }
            CREDIT => {
                let more = <[u8; 4]>::try_from(&body[..]).map_err(|_| Nonsense)?;
                state.credit = state.credit.saturating_add(u32::from_be_bytes(more).into());
            }
            RESET => {
                let &[code] = &body[..] else {
                    return Err(Nonsense);
                };
                let code = ResetCode::from_wire(code.into());
                state.last_came = true;
                self.drop_arrived(&mut state);
                state.give_up(code, Broken::Reset(code));
            }
            DONE if state.is_done() && body.is_empty() => state.last_came = true,
            _ => return Err(Nonsense),
        }
        self.queue(&flow, &mut state);
        self.forget_if_over(&flow, &state);
        Ok(())
    }

    fn drop_arrived(&self, state: &mut State) {
        self.held.set(self.held.get() - state.arrived_bytes);
        state.arrived_bytes = 0;
        state.arrived.clear();
    }

    /// Takes what has arrived of a flow.
    fn read(&self, flow: &Rc<Flow>) -> Option<Result<Option<Bytes>, Broken>> {
        let mut state = flow.state.borrow_mut();
        if let Some(bytes) = state.arrived.pop_front() {
            state.arrived_bytes -= bytes.len();
            let was_full = !self.has_room();
            self.held.set(self.held.get() - bytes.len());
            if was_full {
                // The library may have something.
                self.work.notify_one();
            }
            self.give_credit(flow, &mut state);
            return Some(Ok(Some(bytes)));
        }
        if state.end_came && !matches!(state.broken, Some(Broken::Reset(_))) {
            state.end_read = true;
            return Some(Ok(None));
        }
        state.broken.map(Err)
    }

    /// Allows the peer more once half of it is used up.
    fn give_credit(&self, flow: &Rc<Flow>, state: &mut State) {
        if state.end_came || state.broken.is_some() {
            return;
        }
        let window = match self.held.get() < MUCH_HELD {
            true => state.window.saturating_mul(2).min(MOST_CREDIT),
            false => LITTLE_CREDIT,
        };
        let used = state.allowed.saturating_add(state.arrived_bytes as u32);
        let room = window.saturating_sub(used);
        if room >= window / 2 {
            state.window = window;
            state.grant += room;
            state.allowed += room;
            self.queue(flow, state);
        }
    }

    fn reset(&self, flow: &Rc<Flow>, code: ResetCode) {
        let mut state = flow.state.borrow_mut();
        self.drop_arrived(&mut state);
        state.give_up(code, Broken::Reset(code));
        self.queue(flow, &mut state);
    }
}

/// Of a flow, at this side.
struct End {
    flow: Rc<Flow>,
    streams: Rc<Streams>,
}

impl End {
    fn reset(&self, code: ResetCode) {
        self.streams.reset(&self.flow, code);
    }
}

/// The way to the peer. Dropping it before its end resets the flow.
pub(in super::super) struct SctpSender(End);

impl SctpSender {
    /// Waits until there is room.
    pub(in super::super) async fn write(&mut self, bytes: Bytes) -> Result<(), Broken> {
        let mut bytes = Some(bytes).filter(|bytes| !bytes.is_empty());
        poll_fn(|cx| {
            let mut state = self.0.flow.state.borrow_mut();
            if let Some(broken) = state.broken {
                return Poll::Ready(Err(broken));
            }
            if state.written_bytes >= WRITTEN {
                state.writer = Some(cx.waker().clone());
                return Poll::Pending;
            }
            if let Some(bytes) = bytes.take() {
                state.written_bytes += bytes.len();
                state.written.push_back(bytes);
                self.0.streams.queue(&self.0.flow, &mut state);
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// The true end, behind everything written.
    pub(in super::super) fn finish(&mut self) {
        let mut state = self.0.flow.state.borrow_mut();
        state.finished = true;
        self.0.streams.queue(&self.0.flow, &mut state);
    }

    pub(in super::super) fn reset(&mut self, code: ResetCode) {
        self.0.reset(code);
    }

    /// Completes when the flow is reset, or the association ends.
    pub(in super::super) fn broken(&self) -> impl Future<Output = Broken> + use<> {
        let flow = Rc::clone(&self.0.flow);
        poll_fn(move |cx: &mut Context<'_>| {
            let mut state = flow.state.borrow_mut();
            match state.broken {
                Some(broken) => Poll::Ready(broken),
                None => {
                    state.watcher = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
    }
}

impl Drop for SctpSender {
    fn drop(&mut self) {
        if !self.0.flow.state.borrow().finished {
            self.0.reset(ResetCode::Rst);
        }
    }
}

/// The way from the peer. Dropping it before its end resets the flow.
pub(in super::super) struct SctpReceiver(End);

impl SctpReceiver {
    /// The next bytes; `None` at the true end.
    pub(in super::super) async fn read(&mut self) -> Result<Option<Bytes>, Broken> {
        poll_fn(|cx| match self.0.streams.read(&self.0.flow) {
            Some(read) => Poll::Ready(read),
            None => {
                self.0.flow.state.borrow_mut().reader = Some(cx.waker().clone());
                Poll::Pending
            }
        })
        .await
    }

    pub(in super::super) fn stop(&mut self, code: ResetCode) {
        self.0.reset(code);
    }
}

impl Drop for SctpReceiver {
    fn drop(&mut self) {
        if !self.0.flow.state.borrow().end_read {
            self.0.reset(ResetCode::Rst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends, without an association between them.
    fn pair() -> (Rc<Streams>, Rc<Streams>) {
        (
            Rc::new(Streams::new(Role::Client)),
            Rc::new(Streams::new(Role::Server)),
        )
    }

    /// Carries messages until there are none; how many bytes of flows.
    fn carry(one: &Streams, other: &Streams) -> usize {
        let mut bytes = 0;
        loop {
            let mut any = false;
            for (from, to) in [(one, other), (other, one)] {
                while let Some((id, message)) = from.next() {
                    any = true;
                    bytes += match message[0] {
                        DATA => message.len() - 1,
                        _ => 0,
                    };
                    assert_eq!(to.take(id, &message.into()), Ok(()));
                }
            }
            if !any {
                return bytes;
            }
        }
    }

    fn now<T>(future: impl Future<Output = T>) -> Option<T> {
        let mut context = Context::from_waker(Waker::noop());
        match std::pin::pin!(future).poll(&mut context) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    const RST: Broken = Broken::Reset(ResetCode::Rst);

    #[test]
    fn flow__has_two_true_ends_and_its_stream_is_used_again() {
        let (client, server) = pair();
        for round in 0..3 {
            let (mut up, mut back) = client.open().unwrap();
            assert_eq!(up.0.flow.id, 1, "{round}");
            now(up.write(Bytes::from_static(b"question")))
                .unwrap()
                .unwrap();
            up.finish();
            carry(&client, &server);
            let (mut down, mut got) = now(server.accept()).unwrap().unwrap();
            assert_eq!(now(got.read()).unwrap().unwrap().unwrap(), "question");
            assert_eq!(now(got.read()), Some(Ok(None)));
            now(down.write(Bytes::from_static(b"answer")))
                .unwrap()
                .unwrap();
            down.finish();
            carry(&client, &server);
            assert_eq!(now(back.read()).unwrap().unwrap().unwrap(), "answer");
            assert_eq!(now(back.read()), Some(Ok(None)));
            assert!(client.table.borrow().flows.is_empty());
            assert!(server.table.borrow().flows.is_empty());
        }
        assert_eq!((client.held.get(), server.held.get()), (0, 0));
    }

    #[test]
    fn flow__that_is_not_read_stops_its_sender_and_no_other() {
        let (client, server) = pair();
        let (mut up, _back) = client.open().unwrap();
        let piece = Bytes::from(vec![7; 64 << 10]);
        let mut fill = || {
            let mut written = 0;
            while now(up.write(piece.clone())).is_some() {
                written += piece.len();
                assert!(written < 10 << 20);
                carry(&client, &server);
            }
            written
        };
        let most = fill();
        assert!(
            most <= FIRST_CREDIT as usize + WRITTEN + piece.len(),
            "{most}"
        );
        let (_down, mut got) = now(server.accept()).unwrap().unwrap();
        assert_eq!(server.held.get(), FIRST_CREDIT as usize);
        // Another one has credit of its own.
        let (mut other, _other_back) = client.open().unwrap();
        now(other.write(Bytes::from_static(b"x"))).unwrap().unwrap();
        assert_eq!(carry(&client, &server), 1);
        // Whoever is read gets more and more.
        for _ in 0..100 {
            while now(got.read()).is_some() {}
            carry(&client, &server);
            fill();
        }
        assert_eq!(got.0.flow.state.borrow().window, MOST_CREDIT);
        assert!(server.held.get() <= MOST_CREDIT as usize + 1);
    }

    #[test]
    fn flow__that_is_dropped_is_reset_at_both_ends() {
        let (client, server) = pair();
        let (mut up, mut back) = client.open().unwrap();
        now(up.write(Bytes::from_static(b"x"))).unwrap().unwrap();
        carry(&client, &server);
        let accepted = now(server.accept()).unwrap();
        drop(accepted);
        carry(&client, &server);
        assert_eq!(now(back.read()), Some(Err(RST)));
        assert_eq!(now(up.write(Bytes::from_static(b"y"))), Some(Err(RST)));
        assert_eq!(now(up.broken()), Some(RST));
        assert!(client.table.borrow().flows.is_empty() && server.table.borrow().flows.is_empty());
        // One that the peer never heard of leaves nothing, either.
        drop(client.open());
        assert_eq!(carry(&client, &server), 0);
        assert_eq!(client.table.borrow().free.len(), 1);
    }

    #[test]
    fn flow__that_is_cut_by_the_end_has_no_true_end() {
        let (client, server) = pair();
        let (mut up, mut back) = client.open().unwrap();
        now(up.write(Bytes::from_static(b"x"))).unwrap().unwrap();
        carry(&client, &server);
        let (_down, mut got) = now(server.accept()).unwrap().unwrap();
        client.end();
        server.end();
        assert_eq!(now(got.read()).unwrap().unwrap().unwrap(), "x");
        for end in [&mut got, &mut back] {
            assert_eq!(now(end.read()), Some(Err(Broken::Tunnel)));
        }
        assert_eq!(now(up.broken()), Some(Broken::Tunnel));
        assert!(client.open().is_none());
        assert!(now(server.accept()).unwrap().is_none());
    }

    #[test]
    fn open__has_an_end() {
        let (client, _) = pair();
        let all: Vec<_> = std::iter::from_fn(|| client.open()).collect();
        assert_eq!(all.len(), usize::from(STREAMS));
    }

    #[test]
    fn take__refuses_what_breaks_the_rules() {
        let beyond = vec![DATA; 2 + FIRST_CREDIT as usize];
        let bad: [(u16, &[&[u8]]); 14] = [
            (1, &[&[]]),
            (1, &[&[END]]),
            (1, &[&[RESET, 0]]),
            (1, &[&[DATA]]),
            (STREAMS + 1, &[&[DATA, 1]]),
            (1, &[&beyond]),
            (1, &[&[DATA, 1], &[END], &[DATA, 1]]),
            (1, &[&[DATA, 1], &[END], &[END]]),
            (1, &[&[DATA, 1], &[END, 0]]),
            (1, &[&[DATA, 1], &[DONE]]),
            (1, &[&[DATA, 1], &[CREDIT, 0, 0, 1]]),
            (1, &[&[DATA, 1], &[RESET]]),
            (1, &[&[DATA, 1], &[RESET, 0], &[DATA, 1]]),
            (1, &[&[DATA, 1], &[99]]),
        ];
        for (id, messages) in bad {
            let (_, server) = pair();
            let (last, before) = messages.split_last().unwrap();
            for message in before {
                let message = Bytes::copy_from_slice(message);
                assert_eq!(server.take(id, &message), Ok(()), "{messages:?}");
            }
            let last = Bytes::copy_from_slice(last);
            assert_eq!(server.take(id, &last), Err(Nonsense), "{id} {messages:?}");
        }
        let (client, _) = pair();
        assert_eq!(
            client.take(1, &Bytes::from_static(&[DATA, 1])),
            Err(Nonsense)
        );
    }
}
