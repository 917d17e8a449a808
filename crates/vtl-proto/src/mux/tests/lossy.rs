//! Streams whose packets get lost.

use proptest::{collection::vec, prelude::*};

use super::*;
use crate::mux::lossy::{Losses, PATIENCE_NS};

const WINDOW: u64 = DEFAULT_WINDOW;

fn raw(kind: u32, offset: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = frame::header(StreamId(0), kind, offset, body.len() as u16).to_vec();
    bytes.extend(body);
    bytes
}

fn open() -> Vec<u8> {
    raw(
        intf::VTL_FRAME_OPEN,
        WINDOW,
        &frame::open_body(addr(1), addr(2)),
    )
}

/// The side that accepts, with stream 0 open, and what it has delivered.
struct End {
    mux: Mux,
    got: Vec<u8>,
    over: bool,
    now: u64,
}

impl End {
    fn new() -> Self {
        let mut end = Self {
            mux: Mux::lossy(false, WINDOW),
            got: Vec::new(),
            over: false,
            now: 0,
        };
        end.control(&open()).unwrap();
        end.mux.accept_opened(StreamId(0));
        end.mux.poll_control(&mut [0; 100]);
        end
    }

    fn sink<'a>(got: &'a mut Vec<u8>, over: &'a mut bool) -> impl FnMut(Event<'_>) + 'a {
        |event| match event {
            Event::Data { bytes, .. } => got.extend(bytes),
            Event::Fin { .. } => *over = true,
            _ => {}
        }
    }

    fn control(&mut self, bytes: &[u8]) -> Result<usize, MuxError> {
        let mut sink = Self::sink(&mut self.got, &mut self.over);
        self.mux.handle_control(self.now, bytes, &mut sink)
    }

    fn piece(&mut self, offset: u64, body: &[u8]) -> Result<(), MuxError> {
        let mut sink = Self::sink(&mut self.got, &mut self.over);
        let payload = raw(intf::VTL_FRAME_DATA, offset, body);
        self.mux.handle_piece(self.now, &payload, &mut sink)
    }

    fn told(&mut self, kind: u32, offset: u64) -> Result<usize, MuxError> {
        self.control(&raw(kind, offset, &[]))
    }

    fn pass(&mut self, ns: u64) {
        self.now += ns;
        let mut sink = Self::sink(&mut self.got, &mut self.over);
        self.mux.give_up(self.now, &mut sink);
    }

    fn skipped(&self) -> u64 {
        self.mux.losses().skipped
    }
}

#[test]
fn handle_piece__reordered_pieces_are_delivered_in_order() {
    let mut end = End::new();
    for (offset, body) in [(3, b"def"), (6, b"ghi"), (0, b"abc"), (9, b"jkl")] {
        end.piece(offset, body).unwrap();
    }
    assert_eq!(end.got, b"abcdefghijkl");
    assert_eq!(end.mux.losses(), Losses::default());
    assert_eq!(end.mux.patience_ends(), u64::MAX);
}

#[test]
fn handle_piece__the_third_piece_behind_a_gap_ends_it() {
    let mut end = End::new();
    end.piece(0, b"abc").unwrap();
    end.piece(6, b"ghi").unwrap();
    end.piece(9, b"jkl").unwrap();
    assert_eq!(end.got, b"abc");
    end.piece(15, b"pqr").unwrap();
    // The second gap has one piece behind it.
    assert_eq!((&end.got[..], end.skipped()), (&b"abcghijkl"[..], 3));
    // Too late, and twice.
    end.piece(3, b"def").unwrap();
    end.piece(15, b"pqr").unwrap();
    assert_eq!(end.mux.losses().late, 2);
    end.piece(12, b"mno").unwrap();
    assert_eq!((&end.got[..], end.skipped()), (&b"abcghijklmnopqr"[..], 3));
}

#[test]
fn give_up__after_a_while_without_anything_new() {
    let mut end = End::new();
    end.piece(3, b"def").unwrap();
    assert_eq!(end.mux.patience_ends(), PATIENCE_NS);
    end.pass(PATIENCE_NS - 1);
    assert_eq!(end.got, b"");
    end.piece(9, b"jkl").unwrap();
    end.pass(PATIENCE_NS - 1);
    assert_eq!(end.got, b"");
    end.pass(1);
    assert_eq!((&end.got[..], end.skipped()), (&b"defjkl"[..], 6));
    assert_eq!(end.mux.patience_ends(), u64::MAX);
}

#[test]
fn handle_control__the_end_waits_for_what_is_under_way() {
    let mut end = End::new();
    end.piece(0, b"abc").unwrap();
    end.told(intf::VTL_FRAME_FIN, 12).unwrap();
    assert!(!end.over);
    end.pass(PATIENCE_NS - 1);
    end.piece(6, b"ghi").unwrap();
    end.pass(PATIENCE_NS - 1);
    assert!(!end.over);
    end.piece(3, b"def").unwrap();
    assert!(!end.over);
    end.pass(PATIENCE_NS);
    assert!(end.over);
    assert_eq!((&end.got[..], end.skipped()), (&b"abcdefghi"[..], 3));
    end.piece(9, b"jkl").unwrap();
    assert_eq!((end.got.len(), end.mux.losses().late), (9, 1));
    // Whole: at once.
    let mut end = End::new();
    end.told(intf::VTL_FRAME_FIN, 3).unwrap();
    end.piece(0, b"abc").unwrap();
    assert!(end.over);
}

#[test]
fn tell_sent__losses_of_a_sender_without_credit_are_noticed() {
    let mut end = End::new();
    end.told(intf::VTL_FRAME_SENT, WINDOW).unwrap();
    end.pass(PATIENCE_NS);
    assert_eq!(end.skipped(), WINDOW);
    let mut frames = [0; 100];
    let length = end.mux.poll_control(&mut frames);
    let credit = Frame::take(&mut &frames[..length]).unwrap();
    assert_eq!(
        (credit.kind, credit.offset),
        (intf::VTL_FRAME_CREDIT, 2 * WINDOW)
    );
    end.piece(WINDOW, b"on").unwrap();
    assert_eq!(end.got, b"on");
}

#[test]
fn handle_control__frames_may_come_in_parts() {
    let mut end = End {
        mux: Mux::lossy(false, WINDOW),
        got: Vec::new(),
        over: false,
        now: 0,
    };
    let all = [open(), raw(intf::VTL_FRAME_FIN, 0, &[])].concat();
    let (mut from, mut to) = (0, 0);
    while to < all.len() {
        to += 1;
        from += end.control(&all[from..to]).unwrap();
    }
    assert_eq!(from, all.len());
    assert!(end.over);
}

#[test]
fn open__nothing_is_sent_before_the_answer() {
    let (mut a, mut b) = (Mux::lossy(true, WINDOW), Mux::lossy(false, WINDOW));
    let id = a.open(addr(1), addr(2)).unwrap();
    let mut frames = [0; 100];
    let length = a.poll_control(&mut frames);
    assert_eq!(a.credit(id), 0);
    b.handle_control(0, &frames[..length], &mut |_| ()).unwrap();
    b.accept_opened(id);
    let length = b.poll_control(&mut frames);
    // Data overtakes OPENED.
    let header = b.data_header(id, 2).unwrap();
    let mut got: Vec<u8> = Vec::new();
    let packet = [&header[..], b"hi"].concat();
    a.handle_piece(0, &packet, &mut |event| {
        if let Event::Data { bytes, .. } = event {
            got.extend(bytes);
        }
    })
    .unwrap();
    assert_eq!(got, b"hi");
    a.handle_control(0, &frames[..length], &mut |_| ()).unwrap();
    assert_eq!(a.credit(id), WINDOW);
}

#[test]
fn lossy__peers_that_break_the_rules() {
    use intf::*;
    let id = StreamId(0);
    let fails = |error, act: fn(&mut End) -> Result<(), MuxError>| {
        assert_eq!(act(&mut End::new()), Err(error));
    };
    fails(MuxError::BeyondCredit(id), |e| e.piece(WINDOW, b"x"));
    fails(MuxError::BeyondCredit(id), |e| e.piece(u64::MAX, b"x"));
    fails(MuxError::BeyondCredit(id), |e| {
        e.told(VTL_FRAME_FIN, WINDOW + 1).map(|_| ())
    });
    fails(MuxError::BeyondCredit(id), |e| {
        e.told(VTL_FRAME_SENT, u64::MAX).map(|_| ())
    });
    fails(MuxError::AfterFin(id), |e| {
        e.told(VTL_FRAME_FIN, 3)?;
        e.piece(1, b"abc")
    });
    fails(MuxError::AfterFin(id), |e| {
        e.told(VTL_FRAME_FIN, 3)?;
        e.told(VTL_FRAME_SENT, 3).map(|_| ())
    });
    let (expected, found) = (8, 7);
    fails(
        MuxError::Offset {
            id,
            expected,
            found,
        },
        |e| {
            e.piece(5, b"abc")?;
            e.told(VTL_FRAME_FIN, 7).map(|_| ())
        },
    );
    let (data, fin) = (VTL_FRAME_DATA, VTL_FRAME_FIN);
    fails(MuxError::Misplaced(data as u8), |e| {
        e.control(&raw(VTL_FRAME_DATA, 0, b"x")).map(|_| ())
    });
    fails(
        MuxError::BodyLength {
            kind: fin as u8,
            len: 60_000,
        },
        |e| {
            e.control(&raw(VTL_FRAME_FIN, 0, &[0; 60_000])[..16])
                .map(|_| ())
        },
    );
    let packet = |packet: &[u8]| End::new().mux.handle_piece(0, packet, &mut |_| ());
    for (bytes, error) in [
        (raw(fin, 0, &[]), MuxError::Misplaced(fin as u8)),
        (open(), MuxError::Misplaced(VTL_FRAME_OPEN as u8)),
        (raw(data, 0, b"x")[..15].to_vec(), MuxError::Truncated),
        (raw(data, 0, b"x")[..16].to_vec(), MuxError::Truncated),
        (
            [raw(data, 0, b"x"), raw(data, 1, b"y")].concat(),
            MuxError::Misplaced(data as u8),
        ),
    ] {
        assert_eq!(packet(&bytes), Err(error));
    }
    assert_eq!(packet(&raw(data, 0, &[])), Ok(()));
}

proptest! {
    /// However pieces are lost, doubled and overtaken: what is delivered are pieces, in order, and
    /// what is missing is what was counted.
    #[test]
    fn lossy__what_is_missing_was_counted(
        fates in vec((0..4_u8, 0..6_usize, 1..40_usize), 1..200),
    ) {
        let total: usize = fates.iter().map(|(.., length)| length).sum();
        let text: Vec<u8> = (0..total).map(|i| (i % 251) as u8).collect();
        let (mut sent, mut offset) = (Vec::new(), 0);
        for (at, (fate, behind, length)) in fates.iter().enumerate() {
            let copies = [0, 1, 1, 2][usize::from(*fate)];
            for _ in 0..copies {
                sent.push((at + behind, offset, *length));
            }
            offset += length;
        }
        sent.sort_by_key(|(place, ..)| *place);
        let mut end = End::new();
        for (_, from, length) in sent {
            end.piece(from as u64, &text[from..from + length]).unwrap();
            let held: usize = end.mux.streams[&StreamId(0)].come.held();
            prop_assert!(held < 3, "{held} pieces are held");
        }
        end.told(intf::VTL_FRAME_FIN, total as u64).unwrap();
        end.pass(PATIENCE_NS);
        prop_assert!(end.over);
        prop_assert_eq!(end.got.len() as u64 + end.skipped(), total as u64);
        // A subsequence: what is delivered keeps its order.
        let mut rest = text.iter();
        prop_assert!(end.got.iter().all(|byte| rest.any(|other| other == byte)));
    }

    /// A hostile peer's pieces make nobody hold more than two, or deliver more than was allowed.
    #[test]
    fn lossy__hostile_pieces_are_bounded(
        pieces in vec((0..200_u64, 1..60_usize, 0..10_u8), 1..300),
    ) {
        let mut end = End::new();
        let mut told = 0;
        for (offset, length, kind) in pieces {
            let result = match kind {
                0 => end.told(intf::VTL_FRAME_SENT, offset).map(|_| ()),
                1 => { end.pass(PATIENCE_NS); Ok(()) }
                _ => { told = told.max(offset + length as u64); end.piece(offset, &vec![7; length]) }
            };
            prop_assert_eq!(result, Ok(()));
            prop_assert!(end.mux.streams[&StreamId(0)].come.held() < 3);
            let info = end.mux.stream(StreamId(0)).unwrap();
            prop_assert_eq!(info.received, end.got.len() as u64 + end.skipped());
            prop_assert!(info.received <= told.max(200));
        }
    }
}
