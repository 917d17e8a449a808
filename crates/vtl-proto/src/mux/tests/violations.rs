//! Peers that break the rules.

use proptest::{collection::vec, prelude::*};

use super::*;

/// The frame's header and body.
fn raw(id: u32, kind: u32, offset: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = frame::header(StreamId(id), kind, offset, body.len() as u16).to_vec();
    bytes.extend(body);
    bytes
}

fn open(id: u32) -> Vec<u8> {
    raw(
        id,
        intf::VTL_FRAME_OPEN,
        EARLY_CREDIT,
        &frame::open_body(addr(1), addr(2)),
    )
}

fn data(id: u32, offset: u64, body: &[u8]) -> Vec<u8> {
    raw(id, intf::VTL_FRAME_DATA, offset, body)
}

/// What the responder says to these frames.
fn answer(frames: &[Vec<u8>]) -> Result<(), MuxError> {
    Mux::new(false, DEFAULT_WINDOW).handle_packet(&frames.concat(), &mut |_| ())
}

#[test]
fn handle_early__what_was_read_is_no_excuse() {
    let opened = || {
        let mut mux = Mux::new(false, DEFAULT_WINDOW);
        mux.handle_packet(&open(0), &mut |_| ()).unwrap();
        mux
    };
    let (here, there) = (data(0, 0, b"abc"), data(0, 0, b"xyz"));
    let mut mux = opened();
    assert_eq!(mux.handle_early(&here, 0, &mut |_| ()), 1);
    // Another packet says what was read already: only the one that was taken may.
    let error = MuxError::Offset {
        id: StreamId(0),
        expected: 3,
        found: 0,
    };
    assert_eq!(mux.handle_rest(&there, 0, &mut |_| ()), Err(error));
    assert_eq!(mux.handle_rest(&here, 1, &mut |_| ()), Ok(()));
    // What breaks the rules is found when its turn comes.
    for bad in [
        data(0, 1, b"x"),
        data(0, EARLY_CREDIT, b"x"),
        data(7, 0, b"x"),
        raw(0, intf::VTL_FRAME_SENT, 0, &[]),
        raw(0, 99, 0, &[]),
        here[..17].to_vec(),
    ] {
        let mut mux = opened();
        assert_eq!(mux.handle_early(&bad, 0, &mut |_| ()), 0);
        assert!(mux.handle_rest(&bad, 0, &mut |_| ()).is_err());
    }
}

#[test]
fn handle_packet__rules() {
    let id = StreamId;
    let bare = |id, kind, offset| raw(id, kind, offset, &[]);
    use intf::*;
    type Row<'a> = (&'a [Vec<u8>], Result<(), MuxError>);
    let table: &[Row<'_>] = &[
        (&[], Ok(())),
        (
            &[
                open(0),
                data(0, 0, b"abc"),
                data(0, 3, b""),
                data(0, 3, b"d"),
            ],
            Ok(()),
        ),
        (&[open(0)[..15].to_vec()], Err(MuxError::Truncated)),
        (&[open(0)[..51].to_vec()], Err(MuxError::Truncated)),
        (&[bare(0, 0, 0)], Err(MuxError::UnknownType(0))),
        (&[bare(0, 7, 0)], Err(MuxError::UnknownType(7))),
        (
            &[bare(0, VTL_FRAME_OPEN, 0)],
            Err(MuxError::BodyLength { kind: 1, len: 0 }),
        ),
        (
            &[open(0), raw(0, VTL_FRAME_FIN, 0, b"x")],
            Err(MuxError::BodyLength { kind: 4, len: 1 }),
        ),
        (&[open(1)], Err(MuxError::BadOpen(id(1)))),
        (&[open(0), open(0)], Err(MuxError::BadOpen(id(0)))),
        (&[open(4), open(2)], Err(MuxError::BadOpen(id(2)))),
        (&[open(4), data(2, 0, b"x")], Ok(())),
        (&[data(0, 0, b"x")], Err(MuxError::NeverOpened(id(0)))),
        (&[data(1, 0, b"x")], Err(MuxError::NeverOpened(id(1)))),
        (
            &[bare(6, VTL_FRAME_RESET, 0)],
            Err(MuxError::NeverOpened(id(6))),
        ),
        (
            &[open(0), bare(0, VTL_FRAME_OPENED, 0)],
            Err(MuxError::UnexpectedOpened(id(0))),
        ),
        (
            &[open(0), data(0, 1, b"x")],
            Err(MuxError::Offset {
                id: id(0),
                expected: 0,
                found: 1,
            }),
        ),
        (
            &[open(0), data(0, 0, b"xy"), data(0, 1, b"y")],
            Err(MuxError::Offset {
                id: id(0),
                expected: 2,
                found: 1,
            }),
        ),
        (
            &[open(0), data(0, 0, b"x"), bare(0, VTL_FRAME_FIN, 0)],
            Err(MuxError::Offset {
                id: id(0),
                expected: 1,
                found: 0,
            }),
        ),
        (
            &[open(0), data(0, 0, b"x"), bare(0, VTL_FRAME_FIN, 2)],
            Err(MuxError::Offset {
                id: id(0),
                expected: 1,
                found: 2,
            }),
        ),
        (
            &[
                open(0),
                data(0, 0, &[1; 40_000]),
                data(0, 40_000, &[1; 40_000]),
            ],
            Err(MuxError::BeyondCredit(id(0))),
        ),
        (
            &[open(0), bare(0, VTL_FRAME_FIN, 0), data(0, 0, b"x")],
            Err(MuxError::AfterFin(id(0))),
        ),
        (
            &[
                open(0),
                bare(0, VTL_FRAME_FIN, 0),
                bare(0, VTL_FRAME_FIN, 0),
            ],
            Err(MuxError::AfterFin(id(0))),
        ),
        (
            &[open(0), bare(0, VTL_FRAME_CREDIT, EARLY_CREDIT - 1)],
            Err(MuxError::CreditShrank(id(0))),
        ),
        (
            &[
                open(0),
                bare(0, VTL_FRAME_RESET, 99),
                data(0, 77, b"ignored"),
            ],
            Ok(()),
        ),
        (
            &[open(0), bare(0, VTL_FRAME_RESET, 0), open(0)],
            Err(MuxError::BadOpen(id(0))),
        ),
    ];
    for (i, (frames, expected)) in table.iter().enumerate() {
        assert_eq!(answer(frames), *expected, "row {i}");
    }
}

#[test]
fn handle_packet__too_many_streams() {
    let frames: Vec<_> = (0..=MAX_STREAMS as u32).map(|i| open(2 * i)).collect();
    assert_eq!(answer(&frames[..MAX_STREAMS]), Ok(()));
    assert_eq!(answer(&frames), Err(MuxError::TooManyStreams));
}

#[test]
fn handle_packet__acceptor_speaks_too_early() {
    let mut mux = Mux::new(true, DEFAULT_WINDOW);
    let id = mux.open(addr(1), addr(2)).unwrap();
    let opened = raw(0, intf::VTL_FRAME_OPENED, EARLY_CREDIT, &[]);
    let handle = |mux: &mut Mux, bytes: &[u8]| mux.handle_packet(bytes, &mut |_| ());
    assert_eq!(handle(&mut mux, &opened), Err(MuxError::NeverOpened(id)));
    mux.poll_control(&mut [0; 100]);
    assert_eq!(
        handle(&mut mux, &data(0, 0, b"x")),
        Err(MuxError::NotOpened(id))
    );
    let small = raw(0, intf::VTL_FRAME_OPENED, EARLY_CREDIT - 1, &[]);
    assert_eq!(handle(&mut mux, &small), Err(MuxError::CreditShrank(id)));
    assert_eq!(handle(&mut mux, &opened), Ok(()));
    assert_eq!(
        handle(&mut mux, &opened),
        Err(MuxError::UnexpectedOpened(id))
    );
}

/// The queue of control frames is bounded by the number of streams, however long the caller does
/// not drain it.
#[test]
fn handle_packet__open_and_reset_leave_nothing_behind() {
    let mut mux = Mux::new(false, DEFAULT_WINDOW);
    for i in 0..10_000 {
        mux.handle_packet(&open(2 * i), &mut |_| ()).unwrap();
        mux.accept_opened(StreamId(2 * i));
        let reset = raw(2 * i, intf::VTL_FRAME_RESET, 0, &[]);
        mux.handle_packet(&reset, &mut |_| ()).unwrap();
    }
    assert_eq!((mux.streams(), mux.queue.len()), (0, 0));
    // A stream that we refuse counts until the refusal has left.
    let refuse = |mux: &mut Mux, i: u32| {
        let result = mux.handle_packet(&open(2 * i), &mut |_| ());
        mux.reset(StreamId(2 * i), ResetCode::Refused);
        result
    };
    let one_more = 10_000 + MAX_STREAMS as u32;
    for i in 10_000..one_more {
        refuse(&mut mux, i).unwrap();
    }
    assert_eq!(refuse(&mut mux, one_more), Err(MuxError::TooManyStreams));
}

proptest! {
    #[test]
    fn handle_packet__arbitrary_bytes_never_panic(packets in vec(vec(any::<u8>(), 0..200), 0..8)) {
        let mut mux = Mux::new(false, DEFAULT_WINDOW);
        for packet in packets {
            if mux.handle_packet(&packet, &mut |_| ()).is_err() {
                break;
            }
        }
    }

    /// Well-formed frames in any order and with any offsets.
    #[test]
    fn handle_packet__arbitrary_frames_never_panic(
        frames in vec((0u32..6, 1u32..7, prop_oneof![0u64..8, any::<u64>()], 0usize..4), 0..40),
    ) {
        let mut mux = Mux::new(false, DEFAULT_WINDOW);
        mux.open(addr(1), addr(2)).unwrap();
        mux.poll_control(&mut [0; 100]);
        for (id, kind, offset, len) in frames {
            let bytes = match kind {
                intf::VTL_FRAME_OPEN => {
                    raw(id, kind, offset, &frame::open_body(addr(1), addr(2)))
                }
                intf::VTL_FRAME_DATA => data(id, offset, &[0; 4][..len]),
                _ => raw(id, kind, offset, &[]),
            };
            let mut opened = None;
            let sink = &mut |event: Event<'_>| {
                if let Event::Open { id, .. } = event {
                    opened = Some(id);
                }
            };
            if mux.handle_packet(&bytes, sink).is_err() {
                break;
            }
            if let Some(id) = opened {
                mux.accept_opened(id);
                mux.data_header(id, 3);
                mux.finish(id);
            }
            mux.consumed(StreamId(id), 2);
            mux.poll_control(&mut [0; 100]);
        }
    }
}
