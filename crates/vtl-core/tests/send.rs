//! The sending half where paths end one after the other.
#![allow(missing_docs, non_snake_case)]

use bytes::Bytes;
use vtl_core::flow::{INITIAL_CREDIT, Next, Path, ReceiveHalf, SendHalf};
use vtl_proto::frame::{CarrierId, Side};

fn carrier(number: u32) -> CarrierId {
    CarrierId {
        opener: Side::Local,
        number,
    }
}

/// Sends so many bytes by the path of the moment.
fn send(half: &mut SendHalf, len: usize) {
    let offset = half.next_offset();
    let next = half.next(half.path(), len);
    assert!(
        matches!(next, Some(Next::New { offset: at, .. }) if at == offset),
        "{next:?}"
    );
    half.sent_new(Bytes::from(vec![1; len]), false);
}

/// A flow that both ends know, and whose applications do without what gets lost.
fn tolerant() -> SendHalf {
    let mut half = SendHalf::default();
    half.set_tolerant();
    half.confirmed(0, false, INITIAL_CREDIT, true)
        .expect("right");
    half
}

#[test]
fn broken__behind_an_end_that_tcp_has_changes_nothing() {
    let mut half = SendHalf::default();
    half.move_to(Path::Carrier(carrier(0)), false);
    send(&mut half, 1000);
    // The peer has not said that it knows the flow, so TCP repeats it.
    half.move_to(Path::Tcp, false);
    assert!(matches!(half.next(Path::Tcp, 4000), Some(Next::Again(_))));
    half.sent_again(1000);
    half.finish();
    assert_eq!(half.next(Path::Tcp, 4000), Some(Next::Fin));
    half.sent_fin();
    half.confirmed(0, false, INITIAL_CREDIT, false)
        .expect("right");
    half.carrier_broken(carrier(0));
    assert_eq!(half.next(Path::Tcp, 4000), None, "TCP has all of it");
    assert_eq!(half.asked(), None, "nothing goes behind the end");
}

#[test]
fn lossy__what_comes_back_from_others_goes_by_tcp_first() {
    let (whole, lossy) = (carrier(0), carrier(1));
    let mut half = tolerant();
    half.move_to(Path::Carrier(whole), false);
    send(&mut half, 1000);
    half.move_to(Path::Carrier(lossy), true);
    assert_eq!(half.loses().map(|l| l.from), Some(1000));
    send(&mut half, 1000);
    half.carrier_broken(whole);
    assert_eq!(half.path(), Path::Tcp);
    let ended = half.loses().expect("it has");
    assert_eq!((ended.from, ended.passed), (u64::MAX, 1000));
    // It returns once the peer has that.
    assert!(matches!(half.next(Path::Tcp, 4000), Some(Next::Again(_))));
    half.sent_again(1000);
    half.confirmed(1000, false, INITIAL_CREDIT, true)
        .expect("right");
    assert_eq!(
        half.path(),
        Path::Tcp,
        "the lossy one's own is not confirmed"
    );
    half.sent_again(1000);
    half.confirmed(2000, false, INITIAL_CREDIT, true)
        .expect("right");
    assert_eq!(half.path(), Path::Carrier(lossy));
    assert_eq!(half.loses().map(|l| l.from), Some(2000));
}

#[test]
fn loses__what_was_overtaken_is_ignored() {
    let mut half = ReceiveHalf::new(INITIAL_CREDIT, INITIAL_CREDIT);
    half.set_tolerant();
    half.loses(u64::MAX, 100).expect("it may");
    half.loses(100, 5000).expect("it may");
    assert_eq!(half.received(), 0);
    half.loses(200, 200).expect("it may");
    half.loses(u64::MAX, 100).expect("it may");
    half.chunk(0, &[1; 200], false).expect("right");
    half.chunk(300, &[1; 100], false).expect("right");
    half.loses(200, 300).expect("it may");
    assert_eq!((half.received(), half.lost()), (400, 100));
}

/// Nothing goes by TCP, whatever breaks; what a broken carrier had goes by the next one.
#[test]
fn requires_carrier__waits_for_one() {
    let mut half = SendHalf::default();
    half.set_requires_carrier();
    assert_eq!(half.next(Path::Tcp, 4000), None, "before there is one");
    half.move_to(Path::Carrier(carrier(0)), false);
    // All of the first credit, which the peer confirms nothing of.
    send(&mut half, INITIAL_CREDIT as usize);
    half.carrier_broken(carrier(0));
    assert_eq!(half.path(), Path::Tcp);
    assert!(half.has_returned());
    assert_eq!(half.next(Path::Tcp, 4000), None);
    assert_eq!(half.asked(), None, "and the peer is asked for no run");
    half.move_to(Path::Carrier(carrier(1)), false);
    let again = half.next(Path::Carrier(carrier(1)), 1 << 20);
    assert!(matches!(&again, Some(Next::Again(chunk)) if chunk.offset == 0));
    half.sent_again(INITIAL_CREDIT as usize);
    half.confirmed(INITIAL_CREDIT, false, 2 * INITIAL_CREDIT, false)
        .expect("right");
    send(&mut half, 1000);
    half.finish();
    half.carrier_broken(carrier(1));
    assert_eq!(half.next(Path::Tcp, 4000), None);
    assert_eq!(
        half.owes_fin(),
        Some(INITIAL_CREDIT + 1000),
        "the end is said by a frame"
    );
}

/// Who ends without a byte needs no carrier.
#[test]
fn requires_carrier__no_bytes_no_carrier() {
    let mut half = SendHalf::default();
    half.set_requires_carrier();
    half.finish();
    assert_eq!(half.next(Path::Tcp, 4000), Some(Next::Fin));
}
