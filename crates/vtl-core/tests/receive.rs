//! The receiving half against a model: whatever order, overlap and repetition, each byte once, in order.
#![allow(missing_docs, non_snake_case)]

use proptest::prelude::*;
use vtl_core::flow::{Flow, INITIAL_CREDIT, ReceiveHalf, Violation};
use vtl_proto::frame::{ResetCode, Run};

fn byte(offset: u64) -> u8 {
    (offset % 251) as u8
}

fn bytes(from: u64, len: u64) -> Vec<u8> {
    (from..from + len).map(byte).collect()
}

/// What the application gets now.
fn read(half: &mut ReceiveHalf, got: &mut Vec<u8>) {
    while let Some((bytes, _)) = half.peek() {
        let len = bytes.len();
        got.extend_from_slice(bytes);
        half.consume(len);
    }
}

proptest! {
    #[test]
    fn chunk__any_order_is_the_stream(
        pieces in prop::collection::vec((0u64..2000, 1u64..300), 1..200), total in 1000u64..2300,
    ) {
        let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
        let mut covered = vec![false; total as usize];
        let mut got = Vec::new();
        for (from, len) in pieces {
            let from = from.min(total - 1);
            let len = len.min(total - from);
            let fin = from + len == total;
            prop_assert_eq!(half.chunk(from, &bytes(from, len), fin), Ok(()));
            covered[from as usize..(from + len) as usize].fill(true);
            let contiguous = covered.iter().take_while(|c| **c).count() as u64;
            prop_assert_eq!(half.received(), contiguous);
            let held = covered.iter().filter(|c| **c).count() - got.len();
            prop_assert_eq!(half.held(), held as u64);
            if from % 3 == 0 {
                read(&mut half, &mut got);
            }
        }
        read(&mut half, &mut got);
        prop_assert_eq!(&got, &bytes(0, half.received()));
    }

    #[test]
    fn tcp__runs_lie_where_they_were_attached(
        runs in prop::collection::vec((1u64..400, 0u64..3), 1..20), reads in 1usize..300,
    ) {
        let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
        let mut connection = Vec::new();
        let mut offset = 0;
        for (number, (len, gap)) in (1..).zip(&runs) {
            // What lies between runs came by a carrier.
            prop_assert_eq!(half.chunk(offset, &bytes(offset, gap + 1), false), Ok(()));
            offset += gap + 1;
            let position = connection.len() as u64;
            prop_assert_eq!(half.attach(Run { number, position, offset }), Ok(()));
            connection.extend(bytes(offset, *len));
            offset += len;
        }
        let mut rest = &connection[..];
        while !rest.is_empty() {
            let len = rest.len().min(reads).min(half.tcp_room() as usize);
            prop_assert_eq!(half.tcp(&rest[..len], false), Ok(()));
            rest = &rest[len..];
        }
        prop_assert_eq!(half.tcp_end(), Ok(()));
        let mut got = Vec::new();
        read(&mut half, &mut got);
        prop_assert_eq!(got, bytes(0, offset));
        prop_assert!(half.is_complete());
    }
}

#[test]
fn chunk__beyond_credit_or_end_is_a_violation() {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    let beyond = half.chunk(INITIAL_CREDIT, b"x", false);
    let (end, limit) = (INITIAL_CREDIT + 1, INITIAL_CREDIT);
    assert_eq!(beyond, Err(Violation::BeyondCredit { end, limit }));
    assert_eq!(half.chunk(10, b"x", true), Ok(()));
    assert_eq!(half.chunk(10, b"xy", false), Err(Violation::TwoEnds(11)));
    assert_eq!(half.chunk(5, b"", true), Err(Violation::TwoEnds(11)));
    assert_eq!(half.chunk(11, b"", true), Ok(()), "the same end again");
}

#[test]
fn chunk__an_end_before_what_has_come_is_a_violation() {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    assert_eq!(half.chunk(10, b"xyz", false), Ok(()));
    assert_eq!(half.chunk(12, b"", true), Err(Violation::TwoEnds(12)));
}

#[test]
fn chunk__gaps_are_bounded() {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    let refused = (0..).find(|n| half.chunk(2 * n + 1, b"x", false).is_err());
    assert_eq!(refused, Some(16_384));
    assert_eq!(half.chunk(3, b"x", false), Err(Violation::TooManyGaps));
}

/// Bytes of memory for each byte, where so many came one by one in this order.
fn memory_of(offsets: impl Iterator<Item = u64>) -> u64 {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    for offset in offsets {
        half.chunk(offset, &bytes(offset, 1), false).unwrap();
    }
    let memory = half.memory() / half.held();
    let mut got = Vec::new();
    read(&mut half, &mut got);
    assert_eq!(got, bytes(0, half.received()));
    assert_eq!(half.memory(), 0);
    memory
}

#[test]
fn memory__bytes_one_by_one_take_few_allocations() {
    const ALL: u64 = 32_000;
    assert_eq!(memory_of(0..ALL), 1);
    assert_eq!(memory_of((0..ALL).rev()), 1);
    let odd_first = (0..ALL / 2).map(|n| 2 * n + 1);
    assert_eq!(memory_of(odd_first.chain((0..ALL / 2).map(|n| 2 * n))), 1);
    // One ahead, always.
    let swapped = (0..ALL / 2).flat_map(|n| [2 * n + 1, 2 * n]);
    assert_eq!(memory_of(swapped), 1);
}

#[test]
fn memory__gaps_are_charged() {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    for n in 0..1000 {
        half.chunk(2 * n + 1, b"x", false).unwrap();
    }
    assert!(half.memory() > 100 * half.held(), "{}", half.memory());
}

/// A flow that was reset has no bytes left, and no end that an application could take for the stream's.
#[test]
fn reset__is_no_end() {
    let mut flow = Flow::new(INITIAL_CREDIT, INITIAL_CREDIT);
    flow.receive.chunk(0, &bytes(0, 1000), false).unwrap();
    flow.receive.chunk(2000, &bytes(2000, 1000), false).unwrap();
    flow.receive.chunk(1000, &bytes(1000, 1000), false).unwrap();
    flow.receive.chunk(3000, b"", true).unwrap();
    assert!(flow.receive.is_ended());
    flow.reset(ResetCode::Reset);
    assert_eq!((flow.receive.peek(), flow.memory()), (None, 0));
    assert!(!flow.receive.is_complete());
}

/// To put something in front of what has come must not have that copied: this would take minutes.
#[test]
fn chunk__from_the_end_to_the_beginning_is_not_copied_each_time() {
    const WINDOW: u64 = 8 << 20;
    let mut half = ReceiveHalf::new(WINDOW, WINDOW);
    let confirm = half.owes_confirm().unwrap();
    half.confirm_sent(confirm);
    let large = bytes(0, 1 << 20);
    let mut end = WINDOW;
    for _ in 0..7 {
        end -= 1 << 20;
        half.chunk(end, &large, false).unwrap();
    }
    for offset in (1..end).rev().take(200_000) {
        half.chunk(offset, b"x", false).unwrap();
    }
    assert!(half.memory() < half.held() + half.held() / 10);
}

#[test]
fn attach__what_cannot_be_is_a_violation() {
    let run = |number, position, offset| Run {
        number,
        position,
        offset,
    };
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    half.tcp(b"four", false).unwrap();
    assert_eq!(half.attach(run(1, 3, 9)), Err(Violation::BadRun(9)));
    assert_eq!(
        half.attach(run(1, 4, u64::MAX)),
        Err(Violation::BadRun(u64::MAX))
    );
    assert_eq!(half.attach(run(2, 4, 9)), Ok(()));
    assert_eq!(half.attach(run(1, 4, 7)), Ok(()), "overtaken, so ignored");
    half.tcp(b"ten", false).unwrap();
    assert_eq!(half.received(), 4);
    half.chunk(4, b"5-byt", false).unwrap();
    assert_eq!(half.received(), 12);
}

#[test]
fn tcp_room__waits_for_the_application() {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    half.tcp(&bytes(0, INITIAL_CREDIT), false).unwrap();
    assert_eq!(half.tcp_room(), 0);
    assert_eq!(half.tcp(b"x", false), Err(Violation::NoRun));
    half.consume(100);
    assert_eq!(half.tcp_room(), 100);
}

#[test]
fn confirm_now__if_bytes_have_come_since() {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    let confirm = half.owes_confirm().expect("the first");
    half.confirm_sent(confirm);
    assert!(!half.confirm_now() && half.owes_confirm().is_none());
    half.chunk(0, &bytes(0, 10), false).expect("allowed");
    assert!(half.owes_confirm().is_none(), "few bytes wait");
    assert!(half.confirm_now());
    let confirm = half.owes_confirm().expect("due now");
    assert_eq!(confirm.0, 10);
    half.confirm_sent(confirm);
    assert!(!half.confirm_now());
}
