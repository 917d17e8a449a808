//! Two honest hosts with flows between them, over carriers that lose, reorder and die as the input says. Each
//! application gets a prefix of what the other one has written, at every moment; and all of it in the end, when the
//! flows go on over TCP.
#![no_main]

use std::collections::VecDeque;

use arbitrary::Arbitrary;
use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use vtl_core::{
    Association,
    association::Event,
    flow::{Chunk, INITIAL_CREDIT, Next, Path},
};
use vtl_proto::frame::{self, CarrierId, FlowId, Frame, Side};

#[derive(Arbitrary, Debug)]
enum Action {
    Open {
        host: bool,
        flow: u8,
    },
    Write {
        host: bool,
        flow: u8,
        len: u16,
    },
    Finish {
        host: bool,
        flow: u8,
    },
    Read {
        host: bool,
        flow: u8,
        len: u16,
    },
    TcpWrite {
        host: bool,
        flow: u8,
        len: u16,
    },
    TcpRead {
        host: bool,
        flow: u8,
        len: u16,
    },
    Move {
        host: bool,
        flow: u8,
        carrier: Option<u8>,
    },
    NewCarrier {
        host: bool,
        is_unordered: bool,
    },
    Fill {
        host: bool,
        carrier: u8,
        len: u16,
    },
    Deliver {
        host: bool,
        carrier: u8,
        which: u8,
    },
    /// Nothing more gets through.
    Die {
        carrier: u8,
    },
    /// A host notices that, or gives the carrier up for no reason.
    GiveUp {
        host: bool,
        carrier: u8,
    },
    Wait(u8),
    Restart {
        host: bool,
    },
}

const FLOWS: u32 = 2;
/// Of those that live at a time.
const CARRIERS: usize = 4;
const MAX_WRITTEN: u64 = 1 << 20;

fn pattern(flow: u32, host: usize, offset: u64) -> u8 {
    let mixed = offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (mixed as u8) ^ (flow as u8) ^ ((host as u8) << 4)
}

#[derive(Default)]
struct Direction {
    written: u64,
    ended: bool,
    read: u64,
    pipe: VecDeque<u8>,
    fin: bool,
    fin_read: bool,
}

#[derive(Default)]
struct Flow {
    opened: [bool; 2],
    /// By sender.
    directions: [Direction; 2],
}

struct Carrier {
    number: u32,
    opener: usize,
    is_unordered: bool,
    dead: bool,
    used: [bool; 2],
    /// By sender: under way.
    pipes: [VecDeque<Vec<u8>>; 2],
}

fn side(opener: usize, host: usize) -> Side {
    [Side::Peer, Side::Local][usize::from(opener == host)]
}

impl Carrier {
    fn id(&self, host: usize) -> CarrierId {
        CarrierId {
            opener: side(self.opener, host),
            number: self.number,
        }
    }
}

struct Network {
    hosts: [Association; 2],
    flows: [Flow; FLOWS as usize],
    carriers: Vec<Carrier>,
    next_carrier: u32,
    now: u64,
}

/// The first one has opened flow 0, the second one flow 1.
fn id(flow: usize, host: usize) -> FlowId {
    FlowId {
        opener: side(flow, host),
        number: flow as u32,
    }
}

impl Network {
    fn carrier(&self, number: u8) -> Option<usize> {
        (!self.carriers.is_empty()).then(|| usize::from(number) % self.carriers.len())
    }

    fn open(&mut self, host: usize, flow: usize) {
        if !std::mem::replace(&mut self.flows[flow].opened[host], true) {
            self.hosts[host].open(id(flow, host));
        }
    }

    /// The application's next bytes by a path.
    fn next(&mut self, host: usize, flow: usize, path: Path, max: usize) -> Option<Chunk> {
        let direction = &mut self.flows[flow].directions[host];
        let state = self.hosts[host].flow_mut(id(flow, host))?;
        assert!(state.error().is_none(), "honest hosts reset nothing");
        match state.send.next(path, max)? {
            Next::Again(chunk) => {
                state.send.sent_again(chunk.bytes.len());
                Some(chunk)
            }
            Next::New { offset, max } => {
                let len = max.min(direction.written - offset);
                if len == 0 {
                    return None;
                }
                let bytes = (offset..offset + len).map(|at| pattern(flow as u32, host, at));
                let bytes: Bytes = bytes.collect();
                state.send.sent_new(bytes.clone(), false);
                Some(Chunk {
                    offset,
                    bytes,
                    urgent: false,
                })
            }
            Next::Fin => {
                state.send.sent_fin();
                None
            }
        }
    }

    fn tcp_write(&mut self, host: usize, flow: usize, len: usize) {
        if let Some(chunk) = self.next(host, flow, Path::Tcp, len) {
            self.flows[flow].directions[host].pipe.extend(&chunk.bytes);
        }
        let state = self.hosts[host].flow(id(flow, host));
        if state.is_some_and(|state| state.send.is_complete()) {
            self.flows[flow].directions[host].fin = true;
        }
        self.hosts[host].touch(id(flow, host));
    }

    fn tcp_read(&mut self, host: usize, flow: usize, len: usize) {
        let direction = &mut self.flows[flow].directions[1 - host];
        let Some(state) = self.hosts[host].flow_mut(id(flow, host)) else {
            return;
        };
        let room = usize::try_from(state.receive.tcp_room()).unwrap_or(usize::MAX);
        let len = len.min(direction.pipe.len()).min(room);
        let bytes: Vec<u8> = direction.pipe.drain(..len).collect();
        if len > 0 {
            assert_eq!(state.receive.tcp(&bytes, false), Ok(()));
        }
        if direction.fin && direction.pipe.is_empty() && !direction.fin_read {
            direction.fin_read = true;
            assert_eq!(state.receive.tcp_end(), Ok(()));
        }
        self.hosts[host].touch(id(flow, host));
    }

    fn read(&mut self, host: usize, flow: usize, len: usize) {
        let direction = &mut self.flows[flow].directions[1 - host];
        let Some(state) = self.hosts[host].flow_mut(id(flow, host)) else {
            return;
        };
        let mut left = len;
        while let Some((bytes, _)) = state.receive.peek()
            && left > 0
        {
            let len = bytes.len().min(left);
            for (at, byte) in (direction.read..).zip(&bytes[..len]) {
                assert_eq!(*byte, pattern(flow as u32, 1 - host, at), "offset {at}");
            }
            direction.read += len as u64;
            left -= len;
            state.receive.consume(len);
        }
        assert!(direction.read <= direction.written);
        if state.receive.is_complete() {
            assert!(
                direction.ended && direction.read == direction.written,
                "an end too early"
            );
        }
        self.hosts[host].touch(id(flow, host));
    }

    fn fill(&mut self, host: usize, carrier: usize, len: usize) {
        if !self.carriers[carrier].used[host] || self.carriers[carrier].pipes[host].len() > 64 {
            return;
        }
        let by = self.carriers[carrier].id(host);
        let mut packet = vec![0; 200 + len];
        let mut used = self.hosts[host].poll_control(by, &mut packet);
        for flow in 0..self.flows.len() {
            let room = packet.len() - used;
            if room <= frame::HEADER {
                break;
            }
            let path = Path::Carrier(by);
            let Some(chunk) = self.next(host, flow, path, room - frame::HEADER) else {
                continue;
            };
            let frame = Frame::Chunk {
                flow: id(flow, host),
                offset: chunk.offset,
                bytes: &chunk.bytes,
                fin: false,
                urgent: chunk.urgent,
            };
            used += frame.emit(&mut packet[used..]).expect("there is room");
            self.hosts[host].touch(id(flow, host));
        }
        packet.truncate(used);
        if used > 0 {
            self.carriers[carrier].pipes[host].push_back(packet);
        }
    }

    fn deliver(&mut self, host: usize, carrier: usize, which: usize) {
        let carrier = &mut self.carriers[carrier];
        if carrier.dead || !carrier.used[host] {
            return;
        }
        let which = if carrier.is_unordered { which } else { 0 };
        let by = carrier.id(host);
        let pipe = &mut carrier.pipes[1 - host];
        let which = which % pipe.len().max(1);
        if let Some(packet) = pipe.remove(which) {
            self.hosts[host]
                .handle(self.now, by, &packet)
                .expect("well-formed");
        }
    }

    fn give_up(&mut self, host: usize, carrier: usize) {
        let found = &mut self.carriers[carrier];
        if !std::mem::replace(&mut found.used[host], false) {
            return;
        }
        let by = found.id(host);
        // What has arrived is looked at before; what the other side has sent is lost.
        found.dead = true;
        self.hosts[host].carrier_broken(by);
    }

    fn act(&mut self, action: &Action) {
        let flow = |flow: u8| usize::from(flow) % FLOWS as usize;
        match *action {
            Action::Open { host, flow: f } => self.open(host.into(), flow(f)),
            Action::Write { host, flow: f, len } => {
                let direction = &mut self.flows[flow(f)].directions[usize::from(host)];
                if !direction.ended {
                    direction.written = MAX_WRITTEN.min(direction.written + u64::from(len));
                }
            }
            Action::Finish { host, flow: f } => self.finish(host.into(), flow(f)),
            Action::Read { host, flow: f, len } => self.read(host.into(), flow(f), len.into()),
            Action::TcpWrite { host, flow: f, len } => {
                self.tcp_write(host.into(), flow(f), len.into());
            }
            Action::TcpRead { host, flow: f, len } => {
                self.tcp_read(host.into(), flow(f), len.into());
            }
            Action::Move {
                host,
                flow: f,
                carrier,
            } => {
                let host = usize::from(host);
                let carrier = carrier.and_then(|c| self.carrier(c));
                let carrier = carrier.filter(|c| self.carriers[*c].used[host]);
                let to = carrier.map_or(Path::Tcp, |c| Path::Carrier(self.carriers[c].id(host)));
                self.hosts[host].move_flow(id(flow(f), host), to);
            }
            Action::NewCarrier { host, is_unordered } => {
                self.new_carrier(host.into(), is_unordered)
            }
            Action::Fill { host, carrier, len } => {
                if let Some(carrier) = self.carrier(carrier) {
                    self.fill(host.into(), carrier, len.into());
                }
            }
            Action::Deliver {
                host,
                carrier,
                which,
            } => {
                if let Some(carrier) = self.carrier(carrier) {
                    self.deliver(host.into(), carrier, which.into());
                }
            }
            Action::Die { carrier } => {
                if let Some(carrier) = self.carrier(carrier) {
                    self.carriers[carrier].dead = true;
                }
            }
            Action::GiveUp { host, carrier } => {
                if let Some(carrier) = self.carrier(carrier) {
                    self.give_up(host.into(), carrier);
                }
            }
            Action::Wait(tenths) => {
                self.now += u64::from(tenths) * 100_000_000;
                for host in &mut self.hosts {
                    host.handle_timeout(self.now);
                }
            }
            Action::Restart { host } => self.restart(host.into()),
        }
        self.events();
    }

    fn finish(&mut self, host: usize, flow: usize) {
        let direction = &mut self.flows[flow].directions[host];
        direction.ended = true;
        let state = self.hosts[host].flow_mut(id(flow, host));
        if let Some(state) = state.filter(|s| s.send.next_offset() == direction.written) {
            state.send.finish();
        }
        self.hosts[host].touch(id(flow, host));
    }

    fn new_carrier(&mut self, opener: usize, is_unordered: bool) {
        self.carriers.retain(|carrier| carrier.used != [false; 2]);
        if self.carriers.len() == CARRIERS {
            return;
        }
        self.next_carrier += 1;
        let carrier = Carrier {
            number: self.next_carrier,
            opener,
            is_unordered,
            dead: false,
            used: [true; 2],
            pipes: Default::default(),
        };
        for host in 0..2 {
            self.hosts[host].add_carrier(carrier.id(host), false);
        }
        self.carriers.push(carrier);
    }

    fn restart(&mut self, host: usize) {
        for carrier in 0..self.carriers.len() {
            self.give_up(host, carrier);
        }
        let old = std::mem::replace(&mut self.hosts[host], Association::new(INITIAL_CREDIT));
        for (id, flow) in old.into_flows() {
            let state = serde_json::to_vec(&flow).expect("written");
            let flow = serde_json::from_slice(&state).expect("read again");
            self.hosts[host].restore(id, flow);
        }
    }

    fn events(&mut self) {
        for host in 0..2 {
            while let Some(event) = self.hosts[host].poll_event() {
                let Event::Broken(by) = event else {
                    continue;
                };
                let found = self.carriers.iter().position(|c| c.id(host) == by);
                if let Some(carrier) = found {
                    self.give_up(host, carrier);
                }
            }
        }
        for flow in 0..self.flows.len() {
            for host in 0..2 {
                let state = self.hosts[host].flow(id(flow, host));
                assert!(
                    state.is_none_or(|s| s.error().is_none()),
                    "honest hosts reset nothing"
                );
                let held = state.map_or(0, |s| s.receive.held());
                assert!(held <= 2 * INITIAL_CREDIT, "more is held than the window");
            }
        }
    }

    /// Everything comes to its end: by TCP, with one carrier for the frames.
    fn settle(&mut self) {
        for carrier in 0..self.carriers.len() {
            self.give_up(0, carrier);
            self.give_up(1, carrier);
        }
        self.new_carrier(0, false);
        for (flow, host) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            self.open(host, flow);
            self.hosts[host].move_flow(id(flow, host), Path::Tcp);
        }
        for _ in 0..4000 {
            for (flow, host) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                self.tcp_write(host, flow, 60_000);
                self.tcp_read(host, flow, 60_000);
                self.read(host, flow, 60_000);
                self.finish(host, flow);
            }
            for host in 0..2 {
                self.fill(host, 0, 4000);
                self.deliver(1 - host, 0, 0);
            }
            self.events();
            let mut all = self.flows.iter().enumerate();
            if all.all(|(flow, _)| {
                (0..2).all(|host| {
                    self.hosts[host]
                        .flow(id(flow, host))
                        .is_some_and(|f| f.is_complete())
                })
            }) {
                return;
            }
        }
        panic!("a flow hangs");
    }
}

fuzz_target!(|actions: Vec<Action>| {
    let mut network = Network {
        hosts: [INITIAL_CREDIT; 2].map(Association::new),
        flows: Default::default(),
        carriers: Vec::new(),
        next_carrier: 0,
        now: 1,
    };
    for action in actions.iter().take(400) {
        network.act(action);
    }
    network.settle();
});
