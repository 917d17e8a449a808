#![allow(non_snake_case)]

mod lossy;
mod pair;
mod violations;

use std::net::SocketAddr;

use super::*;
use pair::{Owned, Pair, addr};

#[test]
fn handle_early__takes_what_waits_for_nothing() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let [one, two] = [(); 2].map(|()| pair.a.open(addr(80), addr(4000)).unwrap());
    pair.b_accepts();
    pair.send(0, one, b"lost");
    pair.send(0, two, b"come");
    pair.send(0, one, b"later");
    pair.a.finish(two);
    pair.send(0, one, b"");
    assert_eq!(
        pair.deliver_early(1, 1),
        [Owned::Data(two, b"come".to_vec())]
    );
    assert_eq!(pair.deliver_early(1, 1), [], "once");
    assert_eq!(pair.deliver_early(1, 2), [], "not before what comes first");
    assert_eq!(pair.deliver_early(1, 3), [Owned::Fin(two)]);
    // In order, all the rest.
    assert_eq!(
        pair.pump(),
        [
            (1, Owned::Data(one, b"lost".to_vec())),
            (1, Owned::Data(one, b"later".to_vec())),
        ]
    );
}

#[test]
fn handle_early__leaves_the_rest_to_its_turn() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let first = pair.a.open(addr(80), addr(4000)).unwrap();
    pair.b_accepts();
    // Neither OPEN, nor what follows it, nor RESET, nor CREDIT.
    let second = pair.a.open(addr(80), addr(4000)).unwrap();
    pair.send(0, second, b"early");
    pair.a.reset(first, ResetCode::Rst);
    pair.send(0, second, b"");
    for index in 0..4 {
        assert_eq!(pair.deliver_early(1, index), []);
    }
    let expected = [
        Owned::Open(second, addr(80), addr(4000)),
        Owned::Data(second, b"early".to_vec()),
        Owned::Reset(first, ResetCode::Rst),
    ];
    assert_eq!(pair.pump(), expected.map(|event| (1, event)));
}

#[test]
fn open__accept_exchange_finish() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let id = pair.a.open(addr(80), addr(4000)).unwrap();
    assert_eq!(pair.a.credit(id), 0, "OPEN has not left");
    assert_eq!(pair.pump(), [(1, Owned::Open(id, addr(80), addr(4000)))]);
    assert_eq!(pair.a.credit(id), EARLY_CREDIT);
    assert_eq!(pair.b.credit(id), 0, "OPENED has not left");

    pair.send(0, id, b"early");
    assert_eq!(pair.pump(), [(1, Owned::Data(id, b"early".to_vec()))]);
    pair.b.accept_opened(id);
    assert_eq!(pair.pump(), [(0, Owned::Opened(id))]);
    assert_eq!(pair.a.credit(id), DEFAULT_WINDOW - 5);
    assert_eq!(pair.b.credit(id), DEFAULT_WINDOW);

    pair.send(1, id, b"answer");
    pair.b.finish(id);
    assert_eq!(
        pair.pump(),
        [
            (0, Owned::Data(id, b"answer".to_vec())),
            (0, Owned::Fin(id))
        ]
    );
    assert_eq!((pair.a.streams(), pair.b.streams()), (1, 1));

    // Half-closed: the other direction goes on.
    pair.send(0, id, b"more");
    pair.a.finish(id);
    assert_eq!(pair.a.credit(id), 0);
    assert_eq!(pair.a.data_header(id, 1), None);
    assert_eq!(
        pair.pump(),
        [(1, Owned::Data(id, b"more".to_vec())), (1, Owned::Fin(id))]
    );
    assert_eq!((pair.a.streams(), pair.b.streams()), (0, 0));
}

#[test]
fn open__identities_have_parity_and_grow() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let open = |mux: &mut Mux| mux.open(addr(1), addr(2)).unwrap().0;
    assert_eq!([open(&mut pair.a), open(&mut pair.a)], [0, 2]);
    assert_eq!([open(&mut pair.b), open(&mut pair.b)], [1, 3]);
}

#[test]
fn open__addresses_of_both_families() {
    let v4: SocketAddr = "192.0.2.7:443".parse().unwrap();
    let v6: SocketAddr = "[2001:db8::1]:65535".parse().unwrap();
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let id = pair.b.open(v4, v6).unwrap();
    assert_eq!(pair.pump(), [(0, Owned::Open(id, v4, v6))]);
}

#[test]
fn open__limit_counts_only_the_own_and_recovers() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let theirs = pair.b.open(addr(1), addr(2)).unwrap();
    pair.pump();
    let ids: Vec<_> = (0..MAX_STREAMS)
        .map(|_| pair.a.open(addr(1), addr(2)).unwrap())
        .collect();
    assert_eq!(
        pair.a.open(addr(1), addr(2)),
        Err(OpenError::TooManyStreams)
    );
    pair.pump();
    assert_eq!(pair.b.streams(), MAX_STREAMS + 1);
    // A stream counts until its RESET has left, so that the peer never sees one too many.
    pair.a.reset(ids[0], ResetCode::Rst);
    assert_eq!(
        pair.a.open(addr(1), addr(2)),
        Err(OpenError::TooManyStreams)
    );
    assert_eq!(pair.pump(), [(1, Owned::Reset(ids[0], ResetCode::Rst))]);
    let new = pair.a.open(addr(1), addr(2)).unwrap();
    assert_eq!(pair.pump(), [(1, Owned::Open(new, addr(1), addr(2)))]);
    assert!(pair.a.stream(theirs).is_some());
}

#[test]
fn open__identities_run_out() {
    let mut mux = Mux::new(true, DEFAULT_WINDOW);
    mux.next_local = Some(u32::MAX - 1);
    assert_eq!(mux.open(addr(1), addr(2)), Ok(StreamId(u32::MAX - 1)));
    assert_eq!(mux.open(addr(1), addr(2)), Err(OpenError::Exhausted));
    mux.poll_control(&mut [0; 100]);
    mux.reset(StreamId(u32::MAX - 1), ResetCode::Rst);
    mux.poll_control(&mut [0; 100]);
    let fin = frame::header(StreamId(u32::MAX - 1), intf::VTL_FRAME_FIN, 0, 0);
    assert_eq!(mux.handle_packet(&fin, &mut |_| ()), Ok(()));
}

#[test]
fn reset__forgets_and_ignores_what_was_under_way() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    pair.b_accepts();
    pair.send(0, id, b"under way");
    pair.a.finish(id);
    pair.b.reset(id, ResetCode::Timeout);
    assert_eq!(pair.b.credit(id), 0);
    // The data and the FIN reach a stream whose RESET is queued, then one that is forgotten.
    assert_eq!(pair.pump(), [(0, Owned::Reset(id, ResetCode::Timeout))]);
    assert_eq!((pair.a.streams(), pair.b.streams()), (0, 0));
    for kind in [
        intf::VTL_FRAME_FIN,
        intf::VTL_FRAME_CREDIT,
        intf::VTL_FRAME_RESET,
    ] {
        let late = frame::header(id, kind, 99, 0);
        assert_eq!(
            pair.b.handle_packet(&late, &mut |_| panic!("no event")),
            Ok(())
        );
    }
}

#[test]
fn reset__both_sides_at_once() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    pair.b_accepts();
    pair.a.reset(id, ResetCode::Rst);
    pair.b.reset(id, ResetCode::Refused);
    assert_eq!(pair.pump(), []);
    assert_eq!((pair.a.streams(), pair.b.streams()), (0, 0));
    assert!(!pair.a.has_control() && !pair.b.has_control());
}

#[test]
fn reset__before_open_left_is_silent() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let first = pair.a.open(addr(1), addr(2)).unwrap();
    let second = pair.a.open(addr(3), addr(4)).unwrap();
    pair.a.reset(first, ResetCode::Rst);
    assert_eq!(pair.pump(), [(1, Owned::Open(second, addr(3), addr(4)))]);
    assert_eq!(pair.a.streams(), 1);
}

#[test]
fn reset__codes_round_trip() {
    for (code, value) in ResetCode::ALL {
        assert_eq!(ResetCode::from_wire(value.into()), code);
        assert_eq!(code.to_wire(), u64::from(value));
    }
    assert_eq!(ResetCode::from_wire(u64::MAX), ResetCode::Rst);
}

#[test]
fn finish__before_accepting_waits_for_opened() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    pair.a.finish(id);
    assert_eq!(
        pair.pump(),
        [(1, Owned::Open(id, addr(1), addr(2))), (1, Owned::Fin(id))]
    );
    pair.b.finish(id);
    assert!(!pair.b.has_control());
    pair.b.accept_opened(id);
    assert_eq!(pair.pump(), [(0, Owned::Opened(id)), (0, Owned::Fin(id))]);
    assert_eq!((pair.a.streams(), pair.b.streams()), (0, 0));
}

#[test]
fn credit__blocks_and_unblocks() {
    let window = EARLY_CREDIT;
    let mut pair = Pair::new(window);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    pair.b_accepts();
    let bytes = vec![7; 1024];
    for _ in 0..window / 1024 {
        assert!(pair.a.credit(id) >= 1024);
        pair.send(0, id, &bytes);
    }
    assert_eq!(pair.a.credit(id), 0);
    assert_eq!(pair.a.data_header(id, 1), None);
    pair.pump();
    // Less than a quarter is not worth a frame.
    pair.b.consumed(id, window / 4 - 1);
    assert!(!pair.b.has_control());
    pair.b.consumed(id, 1);
    assert_eq!(pair.pump(), [(0, Owned::Writable(id))]);
    assert_eq!(pair.a.credit(id), window / 4);
    // More credit while there is some is no event.
    pair.b.consumed(id, window / 2);
    assert_eq!(pair.pump(), []);
    assert_eq!(pair.a.credit(id), window * 3 / 4);
}

#[test]
fn credit__none_after_fin() {
    let mut pair = Pair::new(EARLY_CREDIT);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    pair.b_accepts();
    let bytes = vec![7; 32 << 10];
    pair.send(0, id, &bytes);
    pair.pump();
    pair.b.consumed(id, 20 << 10);
    assert!(pair.b.has_control());
    pair.a.finish(id);
    pair.deliver_to(1);
    assert!(!pair.b.has_control(), "a CREDIT that nobody needs any more");
    pair.b.consumed(id, 12 << 10);
    assert!(!pair.b.has_control());
}

#[test]
fn consumed__never_more_than_received() {
    let mut pair = Pair::new(EARLY_CREDIT);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    pair.b_accepts();
    pair.b.consumed(id, u64::MAX);
    assert!(!pair.b.has_control());
    assert_eq!(pair.b.stream(id).unwrap().recv_limit, EARLY_CREDIT);
}

#[test]
fn new__window_has_a_floor() {
    let mut pair = Pair::new(0);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    pair.b_accepts();
    assert_eq!(pair.a.credit(id), EARLY_CREDIT);
}

#[test]
fn poll_control__small_buffers_lose_nothing() {
    let mut mux = Mux::new(true, DEFAULT_WINDOW);
    let id = mux.open(addr(1), addr(2)).unwrap();
    mux.finish(id);
    assert_eq!(mux.poll_control(&mut [0; MAX_CONTROL - 1]), 0);
    assert_eq!(mux.poll_control(&mut [0; MAX_CONTROL + 15]), MAX_CONTROL);
    assert!(mux.has_control());
    assert_eq!(mux.poll_control(&mut [0; 15]), 0);
    assert_eq!(mux.poll_control(&mut [0; 16]), 16);
    assert!(!mux.has_control());
    assert_eq!(mux.poll_control(&mut [0; 100]), 0);
}

#[test]
fn urgent_header__tells_which_byte() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let id = pair.a.open(addr(80), addr(4000)).unwrap();
    pair.pump();
    let mut packet = pair.a.urgent_header(id, 3).unwrap().to_vec();
    packet.extend(b"ab!");
    packet.extend(pair.a.data_header(id, 1).unwrap());
    packet.extend(b"c");
    // Other bits mean nothing.
    packet[7] |= 0xfe;
    let mut events: Vec<Owned> = Vec::new();
    let sink = &mut |event: Event<'_>| events.push(event.into());
    pair.b.handle_packet(&packet, sink).unwrap();
    let expected = [
        Owned::Data(id, b"ab!".to_vec()),
        Owned::Urgent(id),
        Owned::Data(id, b"c".to_vec()),
    ];
    assert_eq!(events, expected);
    assert_eq!(pair.a.urgent_header(id, 0), None);
}

#[test]
fn data_header__refuses_misuse() {
    let mut pair = Pair::new(DEFAULT_WINDOW);
    let id = pair.a.open(addr(1), addr(2)).unwrap();
    assert_eq!(pair.a.data_header(id, 1), None, "OPEN has not left");
    pair.b_accepts();
    assert_eq!(pair.a.data_header(id, 0), None);
    assert_eq!(pair.a.data_header(StreamId(98), 1), None);
    assert!(pair.a.data_header(id, u16::MAX).is_some());
}
