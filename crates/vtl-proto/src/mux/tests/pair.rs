//! Two endpoints back to back, and random traffic between them.

use std::collections::{BTreeMap, VecDeque};

use proptest::{collection::vec, prelude::*};

use super::*;

/// An [`Event`] that outlives its packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Owned {
    Open(StreamId, SocketAddr, SocketAddr),
    Opened(StreamId),
    Data(StreamId, Vec<u8>),
    Urgent(StreamId),
    Fin(StreamId),
    Reset(StreamId, ResetCode),
    Writable(StreamId),
}

impl From<Event<'_>> for Owned {
    fn from(event: Event<'_>) -> Self {
        match event {
            Event::Open { id, dst, src } => Self::Open(id, dst, src),
            Event::Opened { id } => Self::Opened(id),
            Event::Data { id, bytes } => Self::Data(id, bytes.to_vec()),
            Event::Urgent { id } => Self::Urgent(id),
            Event::Fin { id } => Self::Fin(id),
            Event::Reset { id, code } => Self::Reset(id, code),
            Event::Writable { id } => Self::Writable(id),
        }
    }
}

pub(super) fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], port))
}

/// `a` (0) is the session's initiator, `b` (1) the other side.
pub(super) struct Pair {
    pub(super) a: Mux,
    pub(super) b: Mux,
    /// Packets on their way to a and to b, with the frames that were taken early.
    wires: [VecDeque<(Vec<u8>, u128)>; 2],
}

impl Pair {
    pub(super) fn new(window: u64) -> Self {
        Self {
            a: Mux::new(true, window),
            b: Mux::new(false, window),
            wires: [VecDeque::new(), VecDeque::new()],
        }
    }

    fn mux(&mut self, side: usize) -> &mut Mux {
        if side == 0 { &mut self.a } else { &mut self.b }
    }

    /// Control frames of `side`, then `bytes`, in one packet.
    pub(super) fn send(&mut self, side: usize, id: StreamId, bytes: &[u8]) {
        self.flush(side, 1920);
        let mut packet = Vec::new();
        if !bytes.is_empty() {
            packet.extend(self.mux(side).data_header(id, bytes.len() as u16).unwrap());
            packet.extend(bytes);
        }
        self.wires[1 - side].push_back((packet, 0));
    }

    /// Packets of at most `room` bytes with all control frames of `side`.
    fn flush(&mut self, side: usize, room: usize) {
        loop {
            let mut packet = vec![0; room];
            let len = self.mux(side).poll_control(&mut packet);
            if len == 0 {
                assert!(!self.mux(side).has_control());
                return;
            }
            packet.truncate(len);
            self.wires[1 - side].push_back((packet, 0));
        }
    }

    /// Delivers the oldest packet to `side`.
    fn deliver_one(&mut self, side: usize) -> Vec<Owned> {
        let mut events = Vec::new();
        if let Some((packet, taken)) = self.wires[side].pop_front() {
            let sink = &mut |event: Event<'_>| events.push(event.into());
            self.mux(side).handle_rest(&packet, taken, sink).unwrap();
        }
        events
    }

    /// Takes what fits of a packet under way to `side`, which others are ahead of.
    pub(super) fn deliver_early(&mut self, side: usize, index: usize) -> Vec<Owned> {
        let mut events = Vec::new();
        let Some((packet, taken)) = self.wires[side].get(index).cloned() else {
            return events;
        };
        let sink = &mut |event: Event<'_>| events.push(event.into());
        self.wires[side][index].1 = self.mux(side).handle_early(&packet, taken, sink);
        events
    }

    /// Delivers all control frames of the other side to `side`.
    pub(super) fn deliver_to(&mut self, side: usize) {
        self.flush(1 - side, 1920);
        while !self.wires[side].is_empty() {
            self.deliver_one(side);
        }
    }

    /// Exchanges packets until nothing is left; the events with the side that saw them.
    pub(super) fn pump(&mut self) -> Vec<(usize, Owned)> {
        let mut events = Vec::new();
        loop {
            // What is under way first, so that packets cross.
            for side in [1, 0] {
                while !self.wires[side].is_empty() {
                    events.extend(
                        self.deliver_one(side)
                            .into_iter()
                            .map(|event| (side, event)),
                    );
                }
            }
            self.flush(0, 1920);
            self.flush(1, 1920);
            if self.wires.iter().all(VecDeque::is_empty) {
                return events;
            }
        }
    }

    /// b accepts all streams that a opens.
    pub(super) fn b_accepts(&mut self) {
        for (_, event) in self.pump() {
            if let Owned::Open(id, ..) = event {
                self.b.accept_opened(id);
            }
        }
        self.pump();
    }
}

/// One step of a random run; indices are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Open,
    Accept(usize),
    Send(usize, u16),
    Flush(usize),
    Deliver,
    Early(usize),
    Consume(usize, u64),
    Finish(usize),
    Reset(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let any = || any::<usize>();
    prop_oneof![
        2 => Just(Step::Open),
        4 => any().prop_map(Step::Accept),
        16 => (any(), 1..20_000u16).prop_map(|(i, n)| Step::Send(i, n)),
        4 => (MAX_CONTROL..200).prop_map(Step::Flush),
        16 => Just(Step::Deliver),
        16 => any().prop_map(Step::Early),
        8 => (any(), 1..80_000u64).prop_map(|(i, n)| Step::Consume(i, n)),
        2 => any().prop_map(Step::Finish),
        1 => any().prop_map(Step::Reset),
    ]
}

/// What one side's applications know of one stream.
#[derive(Default)]
struct App {
    sent: Vec<u8>,
    received: Vec<u8>,
    consumed: u64,
    finished: bool,
    ended: bool,
    reset: bool,
    accepted: bool,
}

#[derive(Default)]
struct Run {
    apps: [BTreeMap<StreamId, App>; 2],
    next_byte: u8,
}

impl Run {
    fn pick(&self, side: usize, index: usize) -> Option<StreamId> {
        let apps = &self.apps[side];
        apps.keys().nth(index.checked_rem(apps.len())?).copied()
    }

    fn step(&mut self, pair: &mut Pair, side: usize, step: &Step) {
        let pick = |index: usize| self.pick(side, index);
        match *step {
            Step::Open => {
                let id = pair.mux(side).open(addr(1), addr(2)).unwrap();
                self.apps[side].insert(
                    id,
                    App {
                        accepted: true,
                        ..App::default()
                    },
                );
            }
            Step::Accept(index) => {
                let Some(id) = pick(index) else { return };
                pair.mux(side).accept_opened(id);
            }
            Step::Send(index, len) => {
                let Some(id) = pick(index) else { return };
                pair.flush(side, 1920);
                let len = u64::from(len).min(pair.mux(side).credit(id)) as usize;
                let bytes: Vec<u8> = (0..len)
                    .map(|i| self.next_byte.wrapping_add(i as u8))
                    .collect();
                self.next_byte = self.next_byte.wrapping_mul(31).wrapping_add(17);
                pair.send(side, id, &bytes);
                self.apps[side].get_mut(&id).unwrap().sent.extend(bytes);
            }
            Step::Flush(room) => pair.flush(side, room),
            Step::Deliver => {
                for event in pair.deliver_one(side) {
                    self.note(side, event);
                }
            }
            Step::Early(index) => {
                let length = pair.wires[side].len().max(1);
                for event in pair.deliver_early(side, index % length) {
                    self.note(side, event);
                }
            }
            Step::Consume(index, n) => {
                let Some(id) = pick(index) else { return };
                let app = self.apps[side].get_mut(&id).unwrap();
                let n = n.min(app.received.len() as u64 - app.consumed);
                app.consumed += n;
                pair.mux(side).consumed(id, n);
            }
            Step::Finish(index) => {
                let Some(id) = pick(index) else { return };
                self.apps[side].get_mut(&id).unwrap().finished = true;
                pair.mux(side).finish(id);
            }
            Step::Reset(index) => {
                let Some(id) = pick(index) else { return };
                self.apps[side].get_mut(&id).unwrap().reset = true;
                pair.mux(side).reset(id, ResetCode::Rst);
            }
        }
    }

    fn note(&mut self, side: usize, event: Owned) {
        let apps = &mut self.apps[side];
        match event {
            Owned::Open(id, ..) => assert!(apps.insert(id, App::default()).is_none()),
            Owned::Opened(id) => assert!(apps[&id].accepted),
            Owned::Data(id, bytes) => {
                let app = apps.get_mut(&id).unwrap();
                assert!(!app.ended && !app.reset);
                app.received.extend(bytes);
            }
            Owned::Fin(id) => apps.get_mut(&id).unwrap().ended = true,
            Owned::Reset(id, _) => apps.get_mut(&id).unwrap().reset = true,
            Owned::Urgent(_) | Owned::Writable(_) => {}
        }
    }

    /// Lets everything finish, then compares.
    fn settle(&mut self, pair: &mut Pair) {
        loop {
            for side in [0, 1] {
                for id in self.apps[side].keys().copied().collect::<Vec<_>>() {
                    pair.mux(side).accept_opened(id);
                    self.step(pair, side, &Step::Consume(id.0 as usize, u64::MAX));
                }
                pair.flush(side, 1920);
            }
            if pair.wires.iter().all(VecDeque::is_empty) {
                break;
            }
            for side in [0, 1] {
                while !pair.wires[side].is_empty() {
                    self.step(pair, side, &Step::Deliver);
                }
            }
        }
        for (from, to) in [(0, 1), (1, 0)] {
            for (id, sender) in &self.apps[from] {
                // A stream that was reset before its OPEN left never reached the peer.
                let Some(receiver) = self.apps[to].get(id) else {
                    assert!(sender.reset);
                    continue;
                };
                if sender.reset || receiver.reset {
                    assert!(sender.sent.starts_with(&receiver.received));
                    assert!(pair.mux(from).stream(*id).is_none());
                } else {
                    assert_eq!(sender.sent, receiver.received);
                    assert_eq!(sender.finished, receiver.ended);
                    let over = sender.finished && receiver.finished;
                    assert_eq!(pair.mux(from).stream(*id).is_none(), over);
                }
            }
        }
        assert_eq!(pair.a.streams(), pair.b.streams());
    }
}

proptest! {
    /// Whatever two well-behaved sides do in whatever order: bytes in are bytes out, and neither
    /// ever sees the other break the rules.
    #[test]
    fn random_interleavings__bytes_in_are_bytes_out(
        steps in vec((0usize..2, step()), 0..400),
        window in prop_oneof![Just(EARLY_CREDIT), Just(100_000), Just(DEFAULT_WINDOW)],
    ) {
        let mut pair = Pair::new(window);
        let mut run = Run::default();
        for (side, step) in &steps {
            run.step(&mut pair, *side, step);
        }
        run.settle(&mut pair);
    }
}
