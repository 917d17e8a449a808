//! An association whose peer sends anything: frames of any flow and carrier, in any order, and bytes by the flows'
//! TCP connections. Applications get no byte that was not sent at its place, buffers stay within their windows, and
//! what this host sends again is what it has sent.
#![no_main]

use arbitrary::Arbitrary;
use bytes::{Bytes, BytesMut};
use libfuzzer_sys::fuzz_target;
use vtl_core::{
    Association,
    association::Event,
    flow::{Chunk, INITIAL_CREDIT, Next, Path},
};
use vtl_proto::frame::{CarrierId, FlowId, Frame, ResetCode, Run, Side};

/// Of a byte's place.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Offset {
    /// From where the receiver is.
    Received(i16),
    /// From where the sender is.
    Sent(i16),
    /// Before the end of the credit.
    Credit(i8),
    Any(u64),
}

#[derive(Arbitrary, Debug)]
enum Action<'a> {
    Chunk {
        flow: u8,
        by: u8,
        offset: Offset,
        len: u16,
        flags: u8,
    },
    Bytes {
        flow: u8,
        by: u8,
        offset: Offset,
        len: u16,
    },
    Confirm {
        flow: u8,
        by: u8,
        offset: Offset,
        limit: Offset,
        flags: u8,
    },
    Attach {
        flow: u8,
        by: u8,
        number: u32,
        position: Offset,
        offset: Offset,
    },
    Attached {
        flow: u8,
        by: u8,
        number: u32,
    },
    Loses {
        flow: u8,
        by: u8,
        from: Offset,
        passed: Offset,
    },
    Reset {
        flow: u8,
        by: u8,
    },
    Reject {
        flow: u8,
        by: u8,
    },
    BrokenFrame {
        by: u8,
        carrier: u8,
    },
    Raw {
        by: u8,
        bytes: &'a [u8],
    },
    AddCarrier {
        carrier: u8,
        loses: bool,
    },
    BreakCarrier {
        carrier: u8,
        gives_back: bool,
    },
    Open {
        flow: u8,
        tolerant: bool,
    },
    Close {
        flow: u8,
    },
    Move {
        flow: u8,
        carrier: Option<u8>,
    },
    ResetHere {
        flow: u8,
    },
    Write {
        flow: u8,
        len: u16,
        urgent: bool,
    },
    Finish {
        flow: u8,
    },
    Read {
        flow: u8,
        len: u16,
    },
    TcpWrite {
        flow: u8,
        len: u16,
    },
    TcpRead {
        flow: u8,
        len: u16,
    },
    TcpEnd {
        flow: u8,
    },
    Passed {
        flow: u8,
        offset: Offset,
    },
    Window(u8),
    Control {
        by: u8,
        room: u16,
    },
    Wait(u8),
    Restart,
}

const FLOWS: u8 = 4;
const CARRIERS: u8 = 4;
const S: u64 = 1_000_000_000;

fn pattern(offset: u64) -> u8 {
    (offset ^ (offset >> 8) ^ (offset >> 16)) as u8
}

/// The bytes from a place on, however close to the end of all places that is.
fn bytes(offset: u64, len: u64) -> Vec<u8> {
    (0..len).map(|i| pattern(offset.wrapping_add(i))).collect()
}

fn flow(number: u8) -> FlowId {
    let opener = [Side::Local, Side::Peer][usize::from(number & 1)];
    FlowId {
        opener,
        number: (number % FLOWS).into(),
    }
}

fn carrier(number: u8) -> CarrierId {
    let opener = [Side::Local, Side::Peer][usize::from(number & 1)];
    CarrierId {
        opener,
        number: (number % CARRIERS).into(),
    }
}

#[derive(Clone, Copy, Default)]
struct Model {
    /// Bytes that the TCP connection has brought; from which place on they lie elsewhere, nobody but the peer knows.
    tcp: u64,
    attached: bool,
}

struct Host {
    core: Association,
    now: u64,
    models: [Model; FLOWS as usize],
}

impl Host {
    fn place(&self, id: FlowId, offset: Offset) -> u64 {
        let halves = self.core.flow(id).map(|f| (&f.receive, &f.send));
        let (received, sent) = halves.map_or((0, 0), |(r, s)| (r.received(), s.next_offset()));
        match offset {
            Offset::Received(by) => received.saturating_add_signed(by.into()),
            Offset::Sent(by) => sent.saturating_add_signed(by.into()),
            Offset::Credit(by) => INITIAL_CREDIT.saturating_add_signed(by.into()),
            Offset::Any(offset) => offset,
        }
    }

    fn frame(&mut self, by: u8, frame: Frame<'_>) {
        let mut wire = vec![0; frame.wire_len()];
        frame.emit(&mut wire);
        // One whose chunk ends behind all places is refused.
        let _ = self.core.handle(self.now, carrier(by), &wire);
    }

    /// What the local side of the flow sends next by a path, as far as that takes it.
    fn send(&mut self, id: FlowId, len: u16, urgent: bool) {
        let path = self.core.flow(id).map_or(Path::Tcp, |f| f.send.path());
        let Some(flow) = self.core.flow_mut(id).filter(|f| f.error().is_none()) else {
            return;
        };
        match flow.send.next(path, len.into()) {
            Some(Next::Again(chunk)) => {
                assert!(chunk.bytes.len() <= usize::from(len));
                let sent = bytes(chunk.offset, chunk.bytes.len() as u64);
                assert!(chunk.bytes == sent, "what goes again is something else");
                assert!(chunk.end() <= flow.send.next_offset());
                flow.send.sent_again(chunk.bytes.len().div_ceil(2));
            }
            Some(Next::New { offset, max }) => {
                assert!((1..=u64::from(len)).contains(&max));
                assert_eq!(offset, flow.send.next_offset());
                flow.send.sent_new(Bytes::from(bytes(offset, max)), urgent);
            }
            Some(Next::Fin) => flow.send.sent_fin(),
            None => {}
        }
        self.core.touch(id);
    }

    fn read(&mut self, id: FlowId, len: u16) {
        let model = self.models[id.number as usize];
        let Some(flow) = self.core.flow_mut(id) else {
            return;
        };
        let mut left = usize::from(len);
        while let Some((got, urgent)) = flow.receive.peek()
            && left > 0
        {
            assert!(!got.is_empty() && (!urgent || got.len() == 1));
            let got = &got[..got.len().min(left)];
            let at = flow.receive.consumed();
            let right = bytes(at, got.len() as u64) == got;
            assert!(
                right || model.attached,
                "bytes that are not those of their place"
            );
            left -= got.len();
            let len = got.len();
            flow.receive.consume(len);
            assert!(flow.receive.consumed() >= at + len as u64);
        }
        self.core.touch(id);
    }

    fn act(&mut self, action: &Action<'_>) {
        match *action {
            Action::Chunk {
                flow: id,
                by,
                offset,
                len,
                flags,
            } => {
                let (flow, len) = (flow(id), u64::from(len % 4096));
                let offset = self.place(flow, offset);
                let bytes = &bytes(offset, len);
                let fin = flags & 1 != 0 || len == 0;
                let urgent = flags & 6 == 6;
                self.frame(
                    by,
                    Frame::Chunk {
                        flow,
                        offset,
                        bytes,
                        fin,
                        urgent,
                    },
                );
            }
            Action::Bytes {
                flow: id,
                by,
                offset,
                len,
            } => {
                let (flow, len) = (flow(id), u64::from(len.max(1)));
                // Carriers check that.
                let offset = self.place(flow, offset).min(u64::MAX - len);
                let mut given = 0;
                if self.core.is_next(flow, offset, len) {
                    given = len / 2;
                    self.core
                        .note_given(self.now, carrier(by), flow, given as usize);
                }
                let rest = BytesMut::from(&bytes(offset + given, len - given)[..]);
                self.core
                    .handle_bytes(self.now, carrier(by), flow, offset + given, rest);
            }
            Action::Confirm {
                flow: id,
                by,
                offset,
                limit,
                flags,
            } => {
                let flow = flow(id);
                let (offset, limit) = (self.place(flow, offset), self.place(flow, limit));
                let (fin, tolerant) = (flags & 1 != 0, flags & 2 != 0);
                self.frame(
                    by,
                    Frame::Confirm {
                        flow,
                        offset,
                        fin,
                        limit,
                        tolerant,
                    },
                );
            }
            Action::Attach {
                flow: id,
                by,
                number,
                position,
                offset,
            } => {
                let flow = flow(id);
                let run = Run {
                    number,
                    position: self.place(flow, position),
                    offset: self.place(flow, offset),
                };
                self.models[flow.number as usize].attached = true;
                self.frame(by, Frame::Attach { flow, run });
            }
            Action::Attached {
                flow: id,
                by,
                number,
            } => {
                self.frame(
                    by,
                    Frame::Attached {
                        flow: flow(id),
                        number,
                    },
                );
            }
            Action::Loses {
                flow: id,
                by,
                from,
                passed,
            } => {
                let flow = flow(id);
                let (from, passed) = (self.place(flow, from), self.place(flow, passed));
                self.frame(by, Frame::Loses { flow, from, passed });
            }
            Action::Reset { flow: id, by } => {
                let code = ResetCode::Reset;
                self.frame(
                    by,
                    Frame::Reset {
                        flow: flow(id),
                        code,
                    },
                );
            }
            Action::Reject { flow: id, by } => self.frame(by, Frame::Reject { flow: flow(id) }),
            Action::BrokenFrame { by, carrier: id } => {
                self.frame(
                    by,
                    Frame::Broken {
                        carrier: carrier(id),
                    },
                );
            }
            Action::Raw { by, bytes } => {
                // Which bytes they have, and for which place, is unknown.
                for model in &mut self.models {
                    model.attached = true;
                }
                let _ = self.core.handle(self.now, carrier(by), bytes);
            }
            Action::AddCarrier { carrier: id, loses } => {
                self.core.add_carrier(carrier(id), loses);
            }
            Action::BreakCarrier {
                carrier: id,
                gives_back,
            } => {
                for id in (0..FLOWS).map(flow).filter(|_| gives_back) {
                    let Some(flow) = self.core.flow_mut(id) else {
                        continue;
                    };
                    let sent = flow.send.next_offset();
                    let offset = sent.saturating_sub(1000);
                    if sent > 0 {
                        flow.send.returned(&Chunk {
                            offset,
                            bytes: Bytes::from(bytes(offset, sent - offset)),
                            urgent: false,
                        });
                        self.core.touch(id);
                    }
                }
                self.core.carrier_broken(carrier(id));
            }
            Action::Open { flow: id, tolerant } => {
                let id = flow(id);
                if self.core.flow(id).is_none() {
                    self.core.open(id);
                    let model = &mut self.models[id.number as usize];
                    model.tcp = 0;
                    if tolerant && let Some(flow) = self.core.flow_mut(id) {
                        flow.set_tolerant();
                    }
                }
            }
            Action::Close { flow: id } => self.core.close(flow(id)),
            Action::Move {
                flow: id,
                carrier: to,
            } => {
                let to = to.map_or(Path::Tcp, |to| Path::Carrier(carrier(to)));
                self.core.move_flow(flow(id), to);
            }
            Action::ResetHere { flow: id } => self.core.reset(flow(id), ResetCode::Reset),
            Action::Write {
                flow: id,
                len,
                urgent,
            } => self.send(flow(id), len, urgent),
            Action::TcpWrite { flow: id, len } => self.send(flow(id), len / 16, false),
            Action::Finish { flow: id } => {
                if let Some(flow) = self.core.flow_mut(flow(id)) {
                    flow.send.finish();
                }
                self.core.touch(flow(id));
            }
            Action::Read { flow: id, len } => self.read(flow(id), len),
            Action::TcpRead { flow: id, len } => {
                let id = flow(id);
                let model = &mut self.models[id.number as usize];
                let Some(flow) = self.core.flow_mut(id).filter(|f| f.error().is_none()) else {
                    return;
                };
                let len = flow.receive.tcp_room().min(len.into());
                let result = flow.receive.tcp(&bytes(model.tcp, len), false);
                model.tcp += len;
                if result.is_err() {
                    self.core.reset(id, ResetCode::Violation);
                }
                self.core.touch(id);
            }
            Action::TcpEnd { flow: id } => {
                let id = flow(id);
                let flow = self.core.flow_mut(id).filter(|f| f.error().is_none());
                if flow.is_some_and(|flow| flow.receive.tcp_end().is_err()) {
                    self.core.reset(id, ResetCode::Violation);
                }
                self.core.touch(id);
            }
            Action::Passed { flow: id, offset } => {
                let offset = self.place(flow(id), offset);
                if let Some(flow) = self.core.flow_mut(flow(id)) {
                    flow.send.passed(offset);
                }
                self.core.touch(flow(id));
            }
            Action::Window(shift) => self.core.set_window(INITIAL_CREDIT << (shift % 4)),
            Action::Control { by, room } => {
                let mut buffer = vec![0; usize::from(room)];
                let used = self.core.poll_control(carrier(by), &mut buffer);
                let mut rest = &buffer[..used];
                while !rest.is_empty() {
                    Frame::take(&mut rest).expect("this host's frames are well-formed");
                }
            }
            Action::Wait(tenths) => {
                self.now += u64::from(tenths) * S / 10;
                self.core.handle_timeout(self.now);
            }
            Action::Restart => {
                let window = self.core.window();
                let old = std::mem::replace(&mut self.core, Association::new(window));
                for (id, flow) in old.into_flows() {
                    let state = serde_json::to_vec(&flow).expect("written");
                    let flow = serde_json::from_slice(&state).expect("read again");
                    self.core.restore(id, flow);
                }
            }
        }
    }

    fn check(&mut self) {
        let max = (INITIAL_CREDIT << 3) + INITIAL_CREDIT;
        let mut flows = 0;
        for id in (0..FLOWS).map(flow) {
            if let Some(flow) = self.core.flow(id) {
                flows += 1;
                assert!(flow.receive.held() <= max, "more is held than the window");
                assert!(flow.receive.consumed() <= flow.receive.received());
                assert!(flow.send.confirmed_offset() <= flow.send.next_offset());
            }
        }
        // Of flows without a TCP connection.
        assert!(flows > 0 || self.core.memory() <= (1 << 20) + (1 << 17));
        while let Some(event) = self.core.poll_event() {
            if let Event::Broken(id) = event {
                self.core.carrier_broken(id);
            }
        }
    }
}

fuzz_target!(|actions: Vec<Action<'_>>| {
    let mut host = Host {
        core: Association::new(INITIAL_CREDIT),
        now: 1,
        models: Default::default(),
    };
    for action in actions.iter().take(300) {
        host.act(action);
        host.check();
    }
});
