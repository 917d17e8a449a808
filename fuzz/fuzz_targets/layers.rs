//! A stack of layers with a peer that sends anything: packets near those that are due, or any bytes; and what a peer says that
//! a stack consists of.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vtl_core::layers::{BUILT_IN, Description, Pipeline};
use vtl_proto::layers::{Fec, FlowControl, Message, Nack, Ordering, Report};

const MTU: usize = 1200;
const STACKS: [&str; 7] = [
    BUILT_IN[0].1,
    "udp/compression/flow-control?window=8/ordering?buffer=64/nack?window=64",
    "udp/flow-control/ordering/nack?window=40/fec?block=4",
    "kcp/ordering?buffer=8/fec?block=3/compression",
    "quic/compression",
    "graft/ordering",
    "sctp/compression/ordering",
];

#[derive(Arbitrary, Debug)]
enum Action<'a> {
    Raw(&'a [u8]),
    Data {
        seq: u8,
        xid: u8,
        order: u8,
        data: &'a [u8],
    },
    Probe {
        next: u8,
        xid: u8,
    },
    Report {
        cum: u8,
        len: u8,
        echo: u8,
        dups: u8,
        runs: [(u8, u8); 3],
    },
    Credit {
        seq: u8,
        order: u8,
        limit: u16,
    },
    Parity {
        block: u8,
        count: u8,
        lengths: u16,
        data: &'a [u8],
    },
    Send(u16),
    Deliver,
    Wait(u16),
}

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    stack: u8,
    rate: Option<u16>,
    said: &'a [u8],
    actions: Vec<Action<'a>>,
}

fn packet(action: &Action<'_>) -> Option<Vec<u8>> {
    let nack = |seq: u8, xid: u8| Nack::Data {
        seq: seq.into(),
        xid: xid.into(),
    };
    let numbered = |seq: u8, xid: u8, order: u8, rest: Vec<u8>| {
        let order = Ordering { seq: order.into() }.emit();
        [&nack(seq, xid).emit()[..], &order, &rest].concat()
    };
    Some(match *action {
        Action::Raw(bytes) => bytes.to_vec(),
        Action::Data {
            seq,
            xid,
            order,
            data,
        } => numbered(
            seq,
            xid,
            order,
            [&FlowControl::Data.emit()[..], data].concat(),
        ),
        Action::Credit { seq, order, limit } => {
            numbered(seq, seq, order, FlowControl::Credit(limit.into()).emit())
        }
        Action::Probe { next, xid } => Nack::Probe {
            next: next.into(),
            xid: xid.into(),
        }
        .emit(),
        Action::Report {
            cum,
            len,
            echo,
            dups,
            runs,
        } => Nack::Report(Report {
            cum: cum.into(),
            end: u32::from(cum) + u32::from(len),
            echo: echo.into(),
            held: 0,
            dups: dups.into(),
            missing: runs.map(|(a, m)| (a.into(), m.into())).to_vec(),
        })
        .emit(),
        Action::Parity {
            block,
            count,
            lengths,
            data,
        } => {
            let header = Fec::Parity {
                block: block.into(),
                count: count & 0x7f,
                lengths,
            };
            [&header.emit()[..], data].concat()
        }
        Action::Send(_) | Action::Deliver | Action::Wait(_) => return None,
    })
}

fuzz_target!(|input: Input<'_>| {
    if let Some(Message::Setup { layers, .. }) = Message::parse(input.said)
        && let Ok(parsed) = layers.parse::<Description>()
    {
        let again: Description = parsed.to_string().parse().expect("what was written");
        assert_eq!(again, parsed);
        if parsed.check(|_| false).is_ok() {
            parsed.build(None, |_| false, |_| None).expect("it fits");
        }
    }
    let stack = STACKS[usize::from(input.stack) % STACKS.len()];
    let stack: Description = stack.parse().expect("a stack");
    let layers = stack.build(None, |_| false, |_| None).expect("it fits");
    let rate = input.rate.map(|rate| u64::from(rate) * 10_000);
    let mut pipeline = Pipeline::new(layers, MTU, 28, rate);
    let (mut now, mut delivered) = (0, 0);
    for action in input.actions.iter().take(500) {
        if let Some(packet) = packet(action) {
            pipeline.receive(now, &packet);
        }
        match action {
            Action::Send(len) if pipeline.is_ready() => {
                let len = usize::from(*len).min(pipeline.capacity());
                pipeline.send(now, &vec![7; len]);
            }
            Action::Deliver => {
                while let Some(packet) = pipeline.poll_deliver(now) {
                    assert!(packet.len() <= 2048);
                    delivered += 1;
                }
            }
            Action::Wait(ms) => now += u64::from(*ms) * 1_000_000,
            _ => {}
        }
        pipeline.handle_timeout(now);
        while let Some(packet) = pipeline.poll_transmit(now) {
            assert!(packet.len() <= MTU);
        }
    }
    // FEC makes at most one more of each packet.
    assert!(delivered <= 2 * input.actions.len());
});
