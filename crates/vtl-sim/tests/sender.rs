//! Transport functions of egress as tables.
#![allow(missing_docs, non_snake_case)]
#![allow(clippy::too_many_lines, reason = "tables of cases")]

mod table;

use table::{MS, NEXT, NOW, SEND, SID, STOP, host};
use vtl_proto::{
    intf::{self, VTL_F_ACK_NOW, VTL_F_RETRANSMIT, VTL_PTO_DELAY_MS, vtl_session},
    ip,
    wire::{Ack, Header, Packet},
};
use vtl_sim::{
    ffi,
    host::{Host, token},
};

/// Decision of tf_choose: a packet, or the time of the next call.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    Data(u64, u32),
    Probe(u64),
    Wait(u64),
}
use Choice::{Data, Probe, Wait};

fn choose(h: &mut Host) -> Choice {
    h.session_mut(SID).tx.wake_ns = u64::MAX;
    let (verdict, o) = h.out(ffi::vtl_native_choose, SID, NOW, |_| ());
    match (verdict, u32::from(o.type_)) {
        (NEXT, intf::VTL_DATA) => Data(o.seq, o.flags.into()),
        (NEXT, intf::VTL_PROBE) => Probe(o.seq),
        (STOP, _) => Wait(h.session(SID).tx.wake_ns),
        other => panic!("{other:?}"),
    }
}

/// Ten packets out, nothing acknowledged, sent just now, round trip 100 ms.
fn ten_out(s: &mut vtl_session) {
    (s.tx.next, s.tx.sent, s.tx.last_sent_ns) = (10, 10, NOW);
    (s.tx.srtt_us, s.tx.rttvar_us) = (100_000, 10_000);
}

/// Their probe timeout, ns: the smoothed round trip, four times its variation, and the allowance.
const TIMEOUT: u64 = (100 + 40 + VTL_PTO_DELAY_MS as u64) * MS;
const AGAIN: u32 = VTL_F_RETRANSMIT | VTL_F_ACK_NOW;
const NEVER: u64 = u64::MAX;

#[test]
fn choose__table() {
    type Change = fn(&mut vtl_session);
    let table: &[(&str, u64, Change, Choice)] = &[
        ("nothing to do", 0, |_| (), Wait(NEVER)),
        ("the first packet", 1, |_| (), Data(0, 0)),
        ("the next packet", 20, ten_out, Data(10, 0)),
        (
            "the app has no more: wait for the probe timeout",
            10,
            ten_out,
            Wait(NOW + TIMEOUT),
        ),
        (
            "no room at the peer",
            20,
            |s| {
                ten_out(s);
                s.tx.limit = 10;
            },
            Wait(NOW + TIMEOUT),
        ),
        (
            "no room in the congestion window",
            20,
            |s| {
                ten_out(s);
                s.tx.cwnd = 10;
            },
            Wait(NOW + TIMEOUT),
        ),
        (
            "a lost packet goes first",
            20,
            |s| {
                ten_out(s);
                (s.tx.lost[0], s.tx.lost_pending) = (1 << 4, 1);
            },
            Data(4, AGAIN),
        ),
        (
            "the lowest of several",
            20,
            |s| {
                ten_out(s);
                (s.tx.lost[0], s.tx.lost_pending) = (0b1100_0000, 2);
            },
            Data(6, AGAIN),
        ),
        (
            "the search goes on where it ended, and wraps",
            20,
            |s| {
                ten_out(s);
                (s.tx.lost[0], s.tx.lost_pending, s.tx.scan) = (1 << 4, 1, 5);
            },
            Data(4, AGAIN),
        ),
        (
            "a lost packet waits for the congestion window",
            20,
            |s| {
                ten_out(s);
                (s.tx.lost[0], s.tx.lost_pending, s.tx.cwnd) = (1 << 4, 1, 10);
            },
            Wait(NOW + TIMEOUT),
        ),
        (
            "a lost packet was promised and is not there",
            20,
            |s| {
                ten_out(s);
                s.tx.lost_pending = 1;
            },
            Data(10, 0),
        ),
        (
            "probe timeout",
            10,
            |s| {
                ten_out(s);
                s.tx.last_sent_ns = NOW - TIMEOUT;
            },
            Data(0, AGAIN),
        ),
        (
            "just before it",
            10,
            |s| {
                ten_out(s);
                s.tx.last_sent_ns = NOW - TIMEOUT + 1;
            },
            Wait(NOW + 1),
        ),
        (
            "four packets at a time",
            10,
            |s| {
                ten_out(s);
                s.tx.timeouts = 3;
                s.tx.last_sent_ns = NOW - MS;
            },
            Data(0, AGAIN),
        ),
        (
            "three times without backoff",
            10,
            |s| {
                ten_out(s);
                s.tx.timeouts = 8;
            },
            Wait(NOW + TIMEOUT),
        ),
        (
            "it doubles",
            10,
            |s| {
                ten_out(s);
                s.tx.timeouts = 16;
            },
            Wait(NOW + 4 * TIMEOUT),
        ),
        (
            "up to 3 s",
            10,
            |s| {
                ten_out(s);
                s.tx.timeouts = 40;
            },
            Wait(NOW + 3000 * MS),
        ),
        (
            "before the first sample",
            10,
            |s| {
                ten_out(s);
                s.tx.srtt_us = 0;
            },
            Wait(NOW + 500 * MS),
        ),
        (
            "at least 10 ms",
            10,
            |s| {
                ten_out(s);
                (s.tx.srtt_us, s.tx.rttvar_us) = (1, 0);
            },
            Wait(NOW + 10 * MS),
        ),
        (
            "probe timeout in spite of the congestion window",
            20,
            |s| {
                ten_out(s);
                (s.tx.cwnd, s.tx.last_sent_ns) = (4, 0);
            },
            Data(0, AGAIN),
        ),
        (
            "peer's ring full, nothing out",
            20,
            |s| (s.tx.next, s.tx.una, s.tx.limit, s.tx.last_sent_ns) = (10, 10, 10, 0),
            Probe(10),
        ),
        (
            "vtld asks: at once",
            0,
            |s| (s.tx.probe, s.tx.last_sent_ns) = (1, NOW),
            Probe(0),
        ),
        (
            "vtld asked: later again",
            0,
            |s| (s.tx.probe, s.tx.last_sent_ns) = (2, NOW),
            Wait(NOW + 500 * MS),
        ),
        (
            "vtld asks while packets are out: they are the question",
            10,
            |s| {
                ten_out(s);
                s.tx.probe = 1;
            },
            Data(0, AGAIN),
        ),
        (
            "the app claims more than its ring",
            1 << 40,
            |s| {
                ten_out(s);
                (s.tx.next, s.tx.limit, s.tx.cwnd, s.tx.sent) = (256, 10_000, 10_000, 256);
            },
            Wait(NOW + TIMEOUT),
        ),
        (
            "the app's producer jumps back",
            3,
            |s| {
                ten_out(s);
                s.tx.una = 5;
            },
            Data(10, 0),
        ),
        (
            "the window wraps round the bitmap",
            33_576,
            |s| {
                ten_out(s);
                (s.tx.una, s.tx.next, s.tx.limit, s.tx.sent) = (33_536, 33_556, 40_000, 10);
                (s.tx.lost[12], s.tx.lost_pending) = (1 << 3, 1);
            },
            Data(33_539, AGAIN),
        ),
    ];
    for (name, producer, change, want) in table {
        let mut h = host(change);
        h.tx_ctl(SID).producer = *producer;
        assert_eq!(choose(&mut h), *want, "{name}");
        let s = h.session(SID);
        let pending: u32 = s.tx.lost.iter().map(|w| w.count_ones()).sum();
        if !name.contains("promised") {
            assert_eq!(s.tx.lost_pending, pending, "{name}");
        }
    }
}

#[test]
fn choose__counts_what_a_timeout_gives_up() {
    let mut h = host(|s| {
        ten_out(s);
        s.tx.last_sent_ns = 0;
    });
    h.tx_ctl(SID).producer = 10;
    assert_eq!(choose(&mut h), Data(0, AGAIN));
    let tx = &h.session(SID).tx;
    assert_eq!((tx.timeouts, tx.abandoned), (1, 1));
    let mut h = host(|s| s.tx.probe = 1);
    choose(&mut h);
    let tx = &h.session(SID).tx;
    assert_eq!((tx.timeouts, tx.abandoned, tx.probe), (0, 0, 2));
}

#[test]
fn choose__retransmits_twice_at_the_end_of_a_transfer() {
    let lost = |producer| {
        let mut h = host(|s| {
            ten_out(s);
            (s.tx.lost[0], s.tx.lost_pending, s.tx.lost_total) = (0b10_0010, 2, 2);
        });
        h.tx_ctl(SID).producer = producer;
        h
    };
    let mut h = lost(10);
    let order: Vec<Choice> = (0..4).map(|_| choose(&mut h)).collect();
    assert_eq!(
        order,
        [
            Data(1, AGAIN),
            Data(5, AGAIN),
            Data(1, AGAIN),
            Data(5, AGAIN)
        ]
    );
    assert_eq!(choose(&mut h), Wait(NOW + TIMEOUT));
    let tx = &h.session(SID).tx;
    assert_eq!(
        (tx.copies_done, tx.abandoned),
        (2, 2),
        "one of each pair counts"
    );

    let mut h = lost(10);
    choose(&mut h);
    choose(&mut h);
    h.session_mut(SID).tx.una = 2;
    assert_eq!(choose(&mut h), Data(5, AGAIN), "1 has arrived meanwhile");

    let mut h = lost(20);
    let order: Vec<Choice> = (0..3).map(|_| choose(&mut h)).collect();
    assert_eq!(order, [Data(1, AGAIN), Data(5, AGAIN), Data(10, 0)]);
}

#[test]
fn choose__repeats_the_last_packet_on_lossy_paths() {
    // share of packets lost, packets not acknowledged, written; is the last one sent twice?
    for (loss_q16, out, written, is_twice) in [
        (655, 10, 11, true),
        (654, 10, 11, false),
        (655, 127, 128, true),
        (655, 128, 129, false),
    ] {
        let mut h = host(|s| {
            (s.tx.next, s.tx.sent, s.tx.limit, s.tx.cwnd) = (out, out, 2000, 2000);
            s.tx.last_sent_ns = NOW;
        });
        h.state_mut::<ffi::vtl_bbr>(SID).loss_q16 = loss_q16;
        h.tx_ctl(SID).producer = written;
        choose(&mut h);
        h.session_mut(SID).tx.next = written;
        let is_again = choose(&mut h) == Data(out, AGAIN);
        assert_eq!(is_again, is_twice, "{loss_q16}, {out}");

        // The next one, soon after it.
        h.sent(SID, out).sent_ns = NOW;
        h.session_mut(SID).tx.srtt_us = 100_000;
        h.tx_ctl(SID).producer = written + 1;
        assert_eq!(choose(&mut h), Data(written, 0));
        h.session_mut(SID).tx.next = written + 1;
        assert!(!is_twice || !matches!(choose(&mut h), Data(..)));
    }
}

#[test]
fn choose__marks_rate_samples_as_application_limited() {
    let mut h = host(ten_out);
    h.tx_ctl(SID).producer = 20;
    choose(&mut h);
    assert_eq!(h.session(SID).tx.app_limited, 0);
    h.tx_ctl(SID).producer = 10;
    choose(&mut h);
    assert_eq!(h.session(SID).tx.app_limited, 10);
}

#[test]
fn can_send__agrees_with_choose() {
    for (producer, cwnd, limit, lost) in (0..16).map(|i| {
        (
            10 + (i & 1) * 5,
            8 + (i >> 1 & 1) * 8,
            10 + (i >> 2 & 1) * 5,
            i >> 3,
        )
    }) {
        let mut h = host(|s| {
            ten_out(s);
            (s.tx.cwnd, s.tx.limit) = (cwnd, limit);
            (s.tx.lost[0], s.tx.lost_pending) = (lost, lost as u32);
        });
        h.tx_ctl(SID).producer = producer;
        let can = h.can_send(SID);
        let sends = !matches!(choose(&mut h), Wait(_));
        assert_eq!(can, sends, "{producer} {cwnd} {limit} {lost}");
    }
}

#[test]
fn fetch__clamps_the_length() {
    for (claimed, want) in [
        (0, 1),
        (1, 1),
        (1440, 1440),
        (1441, 1440),
        (1 << 16, 1440),
        (u32::MAX, 1440),
    ] {
        let mut h = host(|_| ());
        h.tx_slot(SID, 3).len = claimed;
        let (verdict, o) = h.out(ffi::vtl_native_fetch, SID, NOW, |o| o.seq = 3);
        assert_eq!((verdict, o.len), (NEXT, want), "{claimed}");
    }
    let mut h = host(|s| (s.max_payload, s.path) = (u16::MAX, u16::MAX));
    h.tx_slot(SID, 3).len = u32::MAX;
    let (_, o) = h.out(ffi::vtl_native_fetch, SID, NOW, |o| o.seq = 3);
    assert_eq!(o.len, intf::VTL_MAX_PAYLOAD);
    let (verdict, o) = h.out(ffi::vtl_native_fetch, SID, NOW, |o| {
        o.type_ = intf::VTL_PROBE as u8;
    });
    assert_eq!((verdict, o.len, o.slot.is_null()), (NEXT, 0, true));
}

/// Numbers packet `seq`; `end` is the first that the app has not written.
fn number(h: &mut Host, seq: u64, end: u64) -> ffi::vtl_out {
    let sent: *mut _ = h.sent(SID, seq);
    h.out(ffi::vtl_native_number, SID, NOW, |o| {
        (o.seq, o.sent, o.len, o.end) = (seq, sent, 5, end);
    })
    .1
}

#[test]
fn number__new_and_again() {
    let mut h = host(|s| {
        ten_out(s);
        (
            s.tx.xid,
            s.tx.delivered,
            s.tx.delivered_ns,
            s.tx.first_sent_ns,
        ) = (u32::MAX, 4, 7, 8);
    });
    let o = number(&mut h, 10, 100);
    // SAFETY: `words` covers the union.
    let words = unsafe { o.hdr.words.as_ref() };
    assert_eq!(
        words[0].to_le_bytes()[..4],
        [(intf::VTL_VERSION << 4) as u8, o.flags, 0, 2]
    );
    let sent = *h.sent(SID, 10);
    assert_eq!(
        (
            sent.sent_ns,
            sent.first_ns,
            sent.delivered,
            sent.delivered_ns
        ),
        (NOW, 8, 4, 7)
    );
    assert_eq!((sent.xid, sent.app_limited), (u32::MAX, 0));
    let tx = &h.session(SID).tx;
    assert_eq!(
        (tx.next, tx.sent, tx.retransmitted, tx.xid, tx.last_sent_ns),
        (11, 11, 0, 0, NOW)
    );
    number(&mut h, 3, 100);
    let tx = &h.session(SID).tx;
    assert_eq!((tx.next, tx.sent, tx.retransmitted, tx.xid), (11, 12, 1, 1));
    assert_eq!(h.sent(SID, 3).xid, 0);
}

#[test]
fn number__rate_samples_start_when_the_pipe_was_empty() {
    let mut h = host(|_| ());
    number(&mut h, 0, 9);
    let tx = &h.session(SID).tx;
    assert_eq!((tx.first_sent_ns, tx.delivered_ns), (NOW, NOW));
}

#[test]
fn number__asks_for_acknowledgements() {
    // cwnd, limit, seq, end, asks
    for (cwnd, limit, seq, end, asks) in [
        (8, 1000, 5, 900, true),
        (32, 1000, 5, 900, false),
        (32, 1000, 6, 900, true),
        (100, 1000, 6, 900, false),
        (100, 1000, 8, 900, true),
        (1000, 1000, 40, 900, false),
        (1000, 1000, 48, 900, true),
        (1000, 1000, 49, 50, true),
        (1000, 50, 49, 900, true),
        (50, 1000, 49, 900, true),
    ] {
        let mut h = host(|s| {
            (s.tx.next, s.tx.sent, s.tx.cwnd, s.tx.limit) = (seq, seq, cwnd, limit);
        });
        let o = number(&mut h, seq, end);
        let got = u32::from(o.flags) & VTL_F_ACK_NOW != 0;
        assert_eq!(
            got, asks,
            "cwnd {cwnd}, limit {limit}, packet {seq} of {end}"
        );
    }
}

#[test]
fn pacing__waits_and_catches_up_a_little() {
    let wait = |gap, at| {
        let mut h = host(|s| (s.tx.pacing_gap_ns, s.tx.pace_ns) = (gap, at));
        (
            h.out(ffi::vtl_native_pace_wait, SID, NOW, |_| ()).0,
            h.session(SID).tx.wake_ns,
        )
    };
    assert_eq!(wait(0, NOW + 5).0, NEXT, "no pacing");
    assert_eq!(wait(100, NOW).0, NEXT, "due");
    assert_eq!(
        wait(100, NOW + 1),
        (STOP, NOW + 1 + MS / 4),
        "not due; several packets at a time"
    );
    let charge = |gap, at| {
        let mut h = host(|s| (s.tx.pacing_gap_ns, s.tx.pace_ns) = (gap, at));
        h.out(ffi::vtl_native_pace_charge, SID, NOW, |_| ());
        h.session(SID).tx.pace_ns
    };
    assert_eq!(charge(100, NOW), NOW + 100);
    assert_eq!(
        charge(100, NOW - MS / 2),
        NOW - MS / 2 + 100,
        "late: catches up"
    );
    assert_eq!(
        charge(100, 0),
        NOW - MS + 100,
        "very late: by no more than a millisecond"
    );
    let mut h = host(|s| (s.tx.pacing_gap_ns, s.tx.srtt_us) = (100, 160_000));
    h.out(ffi::vtl_native_pace_charge, SID, NOW, |_| ());
    assert_eq!(
        h.session(SID).tx.pace_ns,
        NOW - 160 * 62_000 + 100,
        "on long paths by a sixteenth of a round trip"
    );
}

#[test]
fn make__one_packet_of_each_kind() {
    let mut frame = [0; 2048];
    let mut h = host(|s| s.ifindex = 0);
    h.tx_ctl(SID).producer = 1;
    assert_eq!(
        h.egress(SID, NOW, &mut frame),
        None,
        "the way to the peer is not known"
    );
    assert_eq!(h.session(SID).tx.wake_ns, NEVER);
    h.session_mut(SID).ifindex = ffi::VTL_NATIVE_IFINDEX;
    let n = h.egress(SID, NOW, &mut frame).expect("DATA");
    assert!(
        matches!(Packet::parse(&frame[ip::OFFSET_V4..n]), Ok(Packet::Data(d)) if d.seq == 0 && d.payload == [0])
    );
    assert_eq!(h.session(SID).tx.wake_ns, 0, "there may be more");
    assert_eq!(h.egress(SID, NOW, &mut frame), None);
    let s = h.session(SID);
    assert_eq!((s.tx.idle, s.tx.wake_ns), (1, NOW + 500 * MS));
    assert_eq!(h.tx_ctl(SID).waiting, 1, "the app shall kick");
    let n = h
        .egress(SID, NOW + 500 * MS, &mut frame)
        .expect("the probe timeout");
    assert!(matches!(Packet::parse(&frame[ip::OFFSET_V4..n]), Ok(Packet::Data(d)) if d.xid == 2));
    assert_eq!(h.stat(intf::VTL_ST_TX_PACKETS), 2);
    let (verdict, _) = h.out(ffi::vtl_native_make, SID, NOW, |_| ());
    assert!(verdict == STOP && verdict != SEND);
}

#[test]
fn listen__an_acknowledgement_after_timeouts_wakes_egress() {
    let mut frame = [0; 2048];
    let mut h = host(|_| ());
    h.tx_ctl(SID).producer = 1;
    let gid = h.session(SID).gid;
    h.egress(SID, NOW, &mut frame).expect("DATA");
    let mut now = NOW;
    for _ in 0..20 {
        assert_eq!(h.egress(SID, now, &mut frame), None);
        now = h.session(SID).tx.wake_ns;
        h.egress(SID, now, &mut frame).expect("a timeout");
    }
    assert_eq!(h.egress(SID, now, &mut frame), None);
    assert!(h.session(SID).tx.wake_ns > now + 900 * MS, "it has doubled");
    h.events(SID);
    // The peer has lost all of it.
    let ack = Packet::Ack(Ack {
        header: Header {
            flags: 0,
            gid,
            sid: SID,
            token: token(SID, 0),
        },
        cum: 0,
        limit: 256,
        received: 0,
        echo_seq: 1,
        echo_xid: 1,
        echo_ts: (now / 1000) as u32,
        dups: 0,
        skip: 0,
        bitmap: &[],
    });
    // Addresses and length are those of the packet that the peer answers, exchanged.
    let (destination, source) = frame[ip::field::V4_ADDRESSES].split_at_mut(4);
    destination.swap_with_slice(source);
    let n = ip::OFFSET_V4 + ack.emit(&mut frame[ip::OFFSET_V4..]).expect("room");
    now += 10 * MS;
    let answer = h.ingress(now, &frame[..n], &mut [0; 2048]);
    assert_eq!((answer, h.session(SID).tx.acks), (None, 1));
    assert_ne!(h.events(SID) & intf::VTL_EV_SEND, 0);
    assert_eq!(h.egress(SID, now, &mut frame), None);
    let timeout = h.session(SID).tx.wake_ns - now;
    assert!(timeout < 100 * MS, "{timeout} ns, of a path of 10 ms");
}
