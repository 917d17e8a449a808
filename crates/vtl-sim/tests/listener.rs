//! Transport functions of the listener as tables.
#![allow(missing_docs, non_snake_case)]

mod table;

use table::{Fields, MS, NEXT, NOW, SID, STOP, ack_header, bitmap, host, lost};
use vtl_proto::intf::{VTL_F_PARTIAL, VTL_F_PHASE, VTL_F_UPDATE, vtl_session};
use vtl_sim::{
    ffi,
    host::{AckFunction, Host, in_flight},
};

const NONE: Fields = Fields {
    flags: 0,
    cum: 0,
    limit: 0,
    received: 0,
    echo_seq: 0,
    echo_xid: 0,
    echo_ts: 0,
    dups: 0,
    skip: 0,
};

fn call(h: &mut Host, f: AckFunction, fields: Fields, map: &[u64]) -> (u32, ffi::vtl_ackd) {
    h.ackd(f, SID, NOW, &mut ack_header(fields), map, |a| {
        a.cum = fields.cum;
    })
}

#[test]
fn ack_verify__any_bit() {
    let mut sender = host(|s| (s.rx.cum, s.rx.max, s.rx.received) = (3, 200, 50));
    let mut hdr = Default::default();
    let mut map = [0; 129];
    let words = sender.build_ack(SID, &mut hdr, &mut map, 128, false) as usize;
    assert_eq!(words, 4);
    let mut h = host(|_| ());
    let mut verify = |mut hdr, map: &[u64]| {
        h.ackd(ffi::vtl_native_ack_verify, SID, NOW, &mut hdr, map, |_| ())
            .0
    };
    assert_eq!(verify(hdr, &map[..words]), NEXT);
    for bit in 0..words * 64 {
        map[bit / 64] ^= 1 << (bit % 64);
        assert_eq!(verify(hdr, &map[..words]), STOP);
        map[bit / 64] ^= 1 << (bit % 64);
    }
    let mut other = hdr;
    other.cum ^= 1 << 56;
    assert_eq!(verify(other, &map[..words]), STOP);
    map[1] = 5;
    assert_eq!(verify(hdr, &map[..words]), STOP);
    assert_eq!(
        verify(hdr, &map[..1]),
        NEXT,
        "words of zeros say nothing to the sum"
    );
}

#[test]
fn ack_cumulative__table() {
    // 100 sent, 20 acknowledged, 30 delivered.
    let state = |s: &mut vtl_session| {
        (s.tx.next, s.tx.sent, s.tx.una, s.tx.delivered) = (100, 110, 20, 30);
        (s.tx.limit, s.tx.timeouts, s.tx.probe) = (256, 3, 2);
    };
    for (name, cum, received, limit, verdict, una, want_limit) in [
        ("nothing new", 20, 30, 256, NEXT, 20, 256),
        ("more", 50, 60, 306, NEXT, 50, 306),
        ("all", 100, 100, 356, NEXT, 100, 356),
        ("retransmissions count", 100, 110, 356, NEXT, 100, 356),
        ("what was never sent", 101, 100, 356, STOP, 20, 256),
        ("more received than sent", 100, 111, 356, STOP, 20, 256),
        ("an old cum", 19, 30, 300, STOP, 20, 256),
        ("an old received", 20, 29, 300, STOP, 20, 256),
        ("a limit that shrinks", 50, 60, 100, NEXT, 50, 256),
        (
            "a limit beyond every window",
            50,
            60,
            u64::MAX,
            NEXT,
            50,
            32768,
        ),
        (
            "the largest numbers",
            u64::MAX,
            u64::MAX,
            u64::MAX,
            STOP,
            20,
            256,
        ),
    ] {
        let mut h = host(state);
        let fields = Fields {
            cum,
            received,
            limit,
            ..Default::default()
        };
        let (v, a) = call(&mut h, ffi::vtl_native_ack_cumulative, fields, &[]);
        let tx = &h.session(SID).tx;
        assert_eq!((v, tx.una, tx.limit), (verdict, una, want_limit), "{name}");
        if v == NEXT {
            assert_eq!(
                (tx.delivered, a.delivered, tx.acks),
                (received, received - 30, 1),
                "{name}"
            );
            assert_eq!((tx.timeouts, tx.probe), (0, 0), "{name}");
            let consumer = if una > 20 { una } else { 0 };
            assert_eq!(h.tx_ctl(SID).consumer, consumer, "{name}");
        } else {
            assert_eq!((tx.delivered, tx.acks, tx.timeouts), (30, 0, 3), "{name}");
        }
    }
}

#[test]
fn ack_cumulative__clears_losses_below_cum() {
    for (cum, left) in [
        (20, vec![30, 63, 64, 90, 130]),
        (31, vec![63, 64, 90, 130]),
        (64, vec![64, 90, 130]),
        (130, vec![130]),
        (131, vec![]),
    ] {
        let mut h = host(|s| {
            (s.tx.next, s.tx.sent, s.tx.una, s.tx.delivered) = (200, 200, 20, 20);
            for seq in [30, 63, 64, 90, 130] {
                s.tx.lost[seq / 64] |= 1 << (seq % 64);
            }
            (s.tx.lost_pending, s.tx.lost_total) = (5, 5);
        });
        let fields = Fields {
            cum,
            received: cum,
            ..Default::default()
        };
        call(&mut h, ffi::vtl_native_ack_cumulative, fields, &[]);
        let s = h.session(SID);
        assert_eq!(
            (lost(s), s.tx.lost_pending as usize),
            (left.clone(), left.len())
        );
        assert_eq!(
            in_flight(s),
            200 - cum as i64 - left.len() as i64,
            "given up and arrived: once"
        );
    }
}

#[test]
fn loss_reordering__threshold_and_largest_xid() {
    // threshold, dups before, dups now; threshold after
    for (reorder, before, now, after) in [
        (3, 0, 0, 3),
        (3, 0, 1, 4),
        (3, 5, 6, 4),
        (3, 6, 5, 3),
        (3, u32::MAX, 0, 4),
        (16, 0, 9, 19),
        (250, 0, 1, 256),
        (256, 0, 1, 256),
    ] {
        let mut h = host(|s| (s.tx.reorder, s.tx.dups) = (reorder, before));
        let fields = Fields {
            dups: now,
            ..Default::default()
        };
        call(&mut h, ffi::vtl_native_loss_reordering, fields, &[]);
        assert_eq!(h.session(SID).tx.reorder, after, "{before} {now}");
    }
    // next, largest acknowledged, echoed; largest after
    for (next, acked, echo, after) in [
        (100, 10, 20, 20),
        (100, 20, 10, 20),
        (100, 20, 99, 99),
        (100, 20, 100, 20), // never sent
        (100, 20, 1 << 30, 20),
        (5, u32::MAX - 5, u32::MAX, u32::MAX),
        (5, u32::MAX - 5, 4, 4),
        (5, 3, u32::MAX, 3),
        (5, u32::MAX - 5, 5, u32::MAX - 5),
    ] {
        let mut h = host(|s| (s.tx.xid, s.tx.acked_xid) = (next, acked));
        let fields = Fields {
            echo_xid: echo,
            ..Default::default()
        };
        call(&mut h, ffi::vtl_native_loss_reordering, fields, &[]);
        assert_eq!(h.session(SID).tx.acked_xid, after, "{next} {acked} {echo}");
    }
}

#[test]
fn loss_reordering__adapts_to_late_packets() {
    let mut h = host(|s| (s.tx.xid, s.tx.acked_xid) = (100_000, 50_000));
    let extent = |h: &mut Host, echo_xid, delivered, received| {
        let fields = Fields {
            echo_xid,
            ..Default::default()
        };
        h.session_mut(SID).tx.delivered += received;
        let mut header = ack_header(fields);
        let f = ffi::vtl_native_loss_reordering;
        h.ackd(f, SID, NOW, &mut header, &[], |a| a.delivered = delivered);
        h.session(SID).tx.reordering_extent
    };
    assert_eq!(extent(&mut h, 49_900, 0, 0), 0, "a duplicate");
    // At most twice as many, and three more, at a time.
    let grows = [3, 9, 21, 45, 93, 100, 100].map(|max| (extent(&mut h, 49_900, 1, 1), max));
    assert!(grows.iter().all(|(extent, max)| extent == max), "{grows:?}");
    // As late as before, or nearly so: the extent stays.
    assert_eq!(extent(&mut h, 49_910, 1, 5000), 100);
    assert_eq!(extent(&mut h, 50_001, 1, 1600), 100);
    assert_eq!(extent(&mut h, 50_002, 1, 65), 87, "16 times it without");
    for echo in 50_003..50_200 {
        extent(&mut h, echo, 1, 5000);
    }
    assert_eq!(extent(&mut h, 50_200, 1, 5000), 0);
    assert_eq!(
        extent(&mut h, 50_201_u32.wrapping_sub(1 << 31), 1, 1),
        3,
        "far behind"
    );
    // The threshold that duplicates raised shrinks in the same way.
    h.session_mut(SID).tx.reordering_extent = 0;
    h.session_mut(SID).tx.reorder = 40;
    extent(&mut h, 50_200, 1, 656);
    assert_eq!(h.session(SID).tx.reorder, 40);
    extent(&mut h, 50_200, 1, 1);
    assert_eq!(h.session(SID).tx.reorder, 35, "16 times it without");
    for _ in 0..50 {
        extent(&mut h, 50_200, 1, 5000);
    }
    assert_eq!(h.session(SID).tx.reorder, 3);
    // Packets overtaken by at most the extent are not lost.
    for (extent, lost) in [(0, 1), (9, 1), (10, 0)] {
        let mut h = sent(20, 1, 10);
        h.session_mut(SID).tx.reordering_extent = extent;
        let f = ffi::vtl_native_loss_selective;
        call(&mut h, f, Fields::default(), &[!1]);
        assert_eq!(h.session(SID).tx.lost[0] & 1, lost, "{extent}");
    }
}

/// Packets 0 to `count` - 1 were sent as transmissions `first_xid` and on, 10 ms ago.
fn sent(count: u64, first_xid: u32, acked: u32) -> Host {
    let mut h = host(|s| {
        (s.tx.next, s.tx.sent) = (count, count);
        s.tx.xid = first_xid.wrapping_add(count as u32);
        s.tx.acked_xid = first_xid.wrapping_add(acked);
        s.tx.srtt_us = 100_000;
    });
    for seq in 0..count {
        let entry = h.sent(SID, seq);
        entry.xid = first_xid.wrapping_add(seq as u32);
        entry.sent_ns = NOW - 10 * MS;
    }
    h
}

#[test]
fn loss_selective__table() {
    for first_xid in [1, u32::MAX - 3, i32::MAX as u32 - 3] {
        // sent, acknowledged transmission, cum, words, arrived, flags, lost
        type Line = (u64, u32, u64, usize, &'static [u64], u32, &'static [u64]);
        let table: &[Line] = &[
            (10, 0, 0, 0, &[], 0, &[]),
            (10, 2, 0, 1, &[2], 0, &[]),
            (10, 3, 0, 1, &[3], 0, &[0]),
            (10, 5, 0, 1, &[3, 5], 0, &[0, 1, 2]),
            (10, 9, 4, 1, &[9], 0, &[4, 5, 6]),
            (10, 9, 10, 0, &[], 0, &[]),
            // Over the borders of words.
            (200, 150, 60, 3, &[62, 150], 0, &[]),
            // Packets beyond the bitmap have not arrived.
            (100, 99, 0, 0, &[], 0, &[]),
            (70, 68, 60, 1, &[], 0, &[60, 61, 62, 63, 64, 65]),
            // The key phase is ignored.
            (70, 68, 60, 1, &[], VTL_F_PHASE, &[60, 61, 62, 63, 64, 65]),
            // Packets beyond a truncated bitmap are not described.
            (70, 68, 60, 1, &[], VTL_F_PARTIAL, &[60, 61, 62, 63]),
            (70, 68, 60, 0, &[], VTL_F_PARTIAL, &[]),
            // The bitmap describes packets never sent.
            (5, 4, 0, 2, &[4], 0, &[0, 1]),
        ];
        for (count, acked, cum, words, have, flags, want) in table {
            let mut h = sent(*count, first_xid, *acked);
            let fields = Fields {
                cum: *cum,
                flags: *flags,
                ..Default::default()
            };
            call(
                &mut h,
                ffi::vtl_native_loss_selective,
                fields,
                &bitmap(
                    *words,
                    &have.iter().map(|s| s - (cum & !63)).collect::<Vec<_>>(),
                ),
            );
            let s = h.session(SID);
            let want: Vec<u64> = match (count, words) {
                (200, 3) => (60..=147).filter(|s| *s != 62).collect(),
                (100, 0) => (0..64).collect(), // as many as one acknowledgement may find
                _ => want.to_vec(),
            };
            assert_eq!(
                lost(s),
                want,
                "xid {first_xid}, {count} sent, {acked} acked, cum {cum}"
            );
            assert_eq!(
                (s.tx.lost_total, s.tx.lost_pending),
                (want.len() as u64, want.len() as u32)
            );
            // The same again finds nothing new, if one search was enough.
            if *count != 100 {
                call(
                    &mut h,
                    ffi::vtl_native_loss_selective,
                    fields,
                    &bitmap(
                        *words,
                        &have.iter().map(|s| s - (cum & !63)).collect::<Vec<_>>(),
                    ),
                );
                assert_eq!(h.session(SID).tx.lost_total, want.len() as u64);
            }
        }
    }
}

#[test]
fn loss_selective__undoes_spurious_losses() {
    let mut h = sent(10, 1, 9);
    call(
        &mut h,
        ffi::vtl_native_loss_selective,
        Fields::default(),
        &bitmap(1, &[9]),
    );
    assert_eq!(lost(h.session(SID)), [0, 1, 2, 3, 4, 5, 6]);
    call(
        &mut h,
        ffi::vtl_native_loss_selective,
        Fields::default(),
        &bitmap(1, &[3, 4, 9]),
    );
    let s = h.session(SID);
    assert_eq!(lost(s), [0, 1, 2, 5, 6]);
    assert_eq!((s.tx.lost_pending, s.tx.lost_total), (5, 5));
}

#[test]
fn loss_selective__detects_a_lost_retransmission() {
    let mut h = sent(10, 1, 9);
    h.sent(SID, 0).xid = 11; // sent again after the others
    h.session_mut(SID).tx.xid = 12;
    call(
        &mut h,
        ffi::vtl_native_loss_selective,
        Fields::default(),
        &bitmap(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9]),
    );
    assert_eq!(lost(h.session(SID)), [] as [u64; 0], "it may still come");
    h.session_mut(SID).tx.acked_xid = 14;
    call(
        &mut h,
        ffi::vtl_native_loss_selective,
        Fields::default(),
        &bitmap(1, &[1, 2, 3, 4, 5, 6, 7, 8, 9]),
    );
    assert_eq!(lost(h.session(SID)), [0]);
}

#[test]
fn loss_selective__overtaken_two_round_trips_ago() {
    // milliseconds ago, transmissions that overtook it, lost
    for (ago, overtaken, is_lost) in [
        (199, 1, false),
        (201, 1, true),
        (201, 0, false),
        (10, 99, false),
        (10, 100, true),
    ] {
        let mut h = sent(1, 1, overtaken);
        h.session_mut(SID).tx.reorder = 100;
        h.sent(SID, 0).sent_ns = NOW - ago * MS;
        call(
            &mut h,
            ffi::vtl_native_loss_selective,
            Fields::default(),
            &bitmap(1, &[]),
        );
        assert_eq!(
            !lost(h.session(SID)).is_empty(),
            is_lost,
            "{ago} ms, {overtaken}"
        );
    }
}

#[test]
fn loss_selective__early_where_the_last_packet_has_arrived() {
    // Ten were sent, and all have arrived but the last but one.
    type Change = fn(&mut vtl_session);
    let cases: [(u64, u32, Change, &[u64]); 6] = [
        (9, 9, |_| (), &[8]),
        (7, 7, |_| (), &[]),
        (9, 9, |s| s.tx.next = 11, &[]),
        (9, 9, |s| s.tx.reordering_extent = 1, &[]),
        (9, 9, |s| s.tx.reorder = 4, &[]),
        (
            9,
            9,
            |s| s.tx.acked_xid = s.tx.acked_xid.wrapping_add(1),
            &[],
        ),
    ];
    for first_xid in [1, u32::MAX - 3, i32::MAX as u32 - 3] {
        for (n, (echo_seq, echoed, change, want)) in cases.into_iter().enumerate() {
            let mut h = sent(11, first_xid, 9);
            h.session_mut(SID).tx.next = 10;
            change(h.session_mut(SID));
            let fields = Fields {
                echo_seq,
                echo_xid: first_xid.wrapping_add(echoed),
                ..Default::default()
            };
            let map = bitmap(1, &[0, 1, 2, 3, 4, 5, 6, 7, 9]);
            call(&mut h, ffi::vtl_native_loss_selective, fields, &map);
            assert_eq!(lost(h.session(SID)), want, "{n}, {first_xid}");
        }
        let mut h = sent(10, first_xid, 9);
        h.sent(SID, 8).xid = first_xid.wrapping_add(10); // sent again behind the last one
        let fields = Fields {
            echo_seq: 9,
            echo_xid: first_xid.wrapping_add(9),
            ..Default::default()
        };
        let map = bitmap(1, &[0, 1, 2, 3, 4, 5, 6, 7, 9]);
        call(&mut h, ffi::vtl_native_loss_selective, fields, &map);
        assert_eq!(lost(h.session(SID)), [] as [u64; 0]);
    }
}

#[test]
fn rtt__rfc_6298() {
    let now_us = (NOW / 1000) as u32;
    // smoothed, variation, echoed clock, flags; sample, smoothed, variation
    for (srtt, var, ts, flags, sample, srtt2, var2) in [
        (0, 0, now_us - 80_000, 0, 80_000, 80_000, 40_000),
        (80_000, 40_000, now_us - 80_000, 0, 80_000, 80_000, 30_000),
        (80_000, 0, now_us - 88_000, 0, 88_000, 81_000, 2_000),
        (80_000, 0, now_us - 72_000, 0, 72_000, 79_000, 2_000),
        (80_000, 7, now_us - 72_000, VTL_F_UPDATE, 0, 80_000, 7),
        (80_000, 7, now_us.wrapping_sub(60_000_001), 0, 0, 80_000, 7),
        (80_000, 7, now_us + 5, 0, 0, 80_000, 7),
        (0, 0, now_us, 0, 1, 1, 0),
    ] {
        let mut h = host(|s| (s.tx.srtt_us, s.tx.rttvar_us) = (srtt, var));
        let (_, a) = call(
            &mut h,
            ffi::vtl_native_rtt,
            Fields {
                echo_ts: ts,
                flags,
                ..Default::default()
            },
            &[],
        );
        let tx = &h.session(SID).tx;
        assert_eq!((a.rtt_us, tx.srtt_us, tx.rttvar_us), (sample, srtt2, var2));
    }
}

/// Replays of an attacker on the path, and spurious retransmissions, give no sample.
#[test]
fn rtt__a_late_duplicate_is_no_sample() {
    for (echo_xid, delivered, sample) in [
        (98, 0, 0),
        (98, 1, 80_000),
        (99, 0, 80_000),
        (100, 0, 80_000),
    ] {
        let mut h = host(|s| (s.tx.acked_xid, s.tx.xid) = (99, 200));
        let fields = Fields {
            echo_ts: (NOW / 1000) as u32 - 80_000,
            echo_xid,
            ..Default::default()
        };
        let mut header = ack_header(fields);
        let (_, a) = h.ackd(ffi::vtl_native_rtt, SID, NOW, &mut header, &[], |a| {
            a.delivered = delivered;
        });
        assert_eq!(a.rtt_us, sample, "{echo_xid}, {delivered}");
    }
}

#[test]
fn rtt__meter_counts_arrivals() {
    let mut h = host(|s| (s.tx.extra, s.tx.xid) = (7, 300));
    let mut heard = |echo_xid, received, dups, flags| {
        let fields = Fields {
            echo_xid,
            received,
            dups,
            flags,
            ..Default::default()
        };
        call(&mut h, ffi::vtl_native_rtt, fields, &[]);
        let m = &h.session(SID).tx.meter;
        (m.xid, m.extra, m.received, m.arrived)
    };
    assert_eq!(heard(100, 80, 3, 0), (100, 7, 80, 83));
    assert_eq!(heard(50, 40, 3, 0), (100, 7, 80, 83), "overtaken");
    assert_eq!(heard(200, 90, 3, VTL_F_UPDATE), (100, 7, 80, 83));
    assert_eq!(heard(300, 90, 3, 0), (100, 7, 80, 83), "never sent");
    assert_eq!(heard(200, 1 << 32, 1, 0), (200, 7, 1 << 32, 1));
}

/// Extra transmissions after the echoed one are not among those before it.
#[test]
fn rtt__meter_counts_no_unanswered_probe() {
    let mut h = host(|s| (s.tx.extra, s.tx.xid) = (0, 104));
    let heard = |h: &mut Host, echo_xid| {
        let fields = Fields {
            echo_xid,
            received: 100,
            ..Default::default()
        };
        call(h, ffi::vtl_native_rtt, fields, &[]);
        let m = &h.session(SID).tx.meter;
        m.xid - m.extra
    };
    assert_eq!(heard(&mut h, 100), 100);
    h.session_mut(SID).tx.extra = 3;
    assert_eq!([101, 102, 103].map(|xid| heard(&mut h, xid)), [100; 3]);
}

#[test]
fn rtt__a_packet_that_overtook_most_others_sets_no_minimum() {
    // of 100 that were sent, how many have arrived; the sample
    for (arrived, sample) in [(49, 0), (50, 80_000), (100, 80_000)] {
        let mut h = host(|s| {
            (s.tx.srtt_us, s.tx.xid) = (100_000, 111);
            let m = &mut s.tx.meter;
            (m.xid, m.arrived, m.min_rtt_us, m.min_rtt_ns) = (10, 10, 90_000, NOW);
        });
        let fields = Fields {
            echo_xid: 110,
            received: 10 + arrived,
            echo_ts: (NOW / 1000) as u32 - 80_000,
            ..Default::default()
        };
        let (_, a) = call(&mut h, ffi::vtl_native_rtt, fields, &[]);
        let tx = &h.session(SID).tx;
        let shortest = if sample == 0 { 90_000 } else { sample };
        assert_eq!((a.rtt_us, tx.meter.min_rtt_us), (sample, shortest));
        assert!(tx.srtt_us < 100_000);
    }
}

#[test]
fn rtt__minimum_of_ten_seconds() {
    let mut h = host(|_| ());
    let mut sample = |at_ms: u64, rtt_us: u32| {
        let now = NOW + at_ms * MS;
        let fields = Fields {
            echo_ts: ((now / 1000) as u32).wrapping_sub(rtt_us),
            ..Default::default()
        };
        h.ackd(
            ffi::vtl_native_rtt,
            SID,
            now,
            &mut ack_header(fields),
            &[],
            |_| (),
        );
        h.session(SID).tx.meter.min_rtt_us
    };
    assert_eq!(sample(0, 80_000), 80_000);
    assert_eq!(sample(5_000, 70_000), 70_000);
    assert_eq!(sample(14_999, 90_000), 70_000);
    assert_eq!(sample(15_000, 90_000), 90_000);
}

#[test]
fn rate__table() {
    // Packet 5 was sent 100 ms ago as transmission 6, when 10 packets had been delivered.
    type Change = fn(&mut Host);
    let table: &[(&str, Change, Fields, u64)] = &[
        (
            "500 packets in 100 ms",
            |_| (),
            Fields::default(),
            5000 * 1024,
        ),
        (
            "sent over a longer time than acknowledged",
            |h| h.sent(SID, 5).first_ns = NOW - 350 * MS,
            Fields::default(),
            2000 * 1024,
        ),
        ("nothing delivered", |_| (), Fields::default(), 0),
        (
            "nobody asked",
            |_| (),
            Fields {
                flags: VTL_F_UPDATE,
                ..NONE
            },
            0,
        ),
        (
            "sent again since",
            |h| h.sent(SID, 5).xid = 99,
            Fields::default(),
            0,
        ),
        (
            "never sent",
            |h| h.session_mut(SID).tx.next = 5,
            Fields::default(),
            0,
        ),
        (
            "faster than any round trip",
            |h| h.state_mut::<ffi::vtl_bbr>(SID).min_rtt_us = 100_001,
            Fields::default(),
            0,
        ),
        (
            "acknowledgements arrive together",
            |h| h.sent(SID, 5).delivered_ns = NOW,
            Fields::default(),
            10_000 * 1024,
        ),
        (
            "no time at all",
            |h| {
                h.sent(SID, 5).delivered_ns = NOW;
                h.sent(SID, 5).first_ns = NOW - 100 * MS;
            },
            Fields::default(),
            0,
        ),
        (
            "ten seconds",
            |h| h.sent(SID, 5).delivered_ns = 0,
            Fields::default(),
            50 * 1024,
        ),
    ];
    for (name, change, fields, want) in table {
        let mut h = host(|s| (s.tx.next, s.tx.sent, s.tx.delivered) = (1000, 1000, 510));
        *h.sent(SID, 5) = vtl_proto::intf::vtl_sent {
            sent_ns: NOW - 100 * MS,
            first_ns: NOW - 150 * MS,
            delivered: 10,
            delivered_ns: NOW - 100 * MS,
            xid: 6,
            app_limited: 1,
        };
        change(&mut h);
        let fields = Fields {
            echo_seq: 5,
            echo_xid: 6,
            ..*fields
        };
        let mut hdr = ack_header(fields);
        let delivered = u64::from(!name.contains("nothing"));
        let (_, a) = h.ackd(ffi::vtl_native_rate, SID, NOW, &mut hdr, &[], |a| {
            a.delivered = delivered;
        });
        assert_eq!(a.rate, *want, "{name}");
        assert_eq!(a.in_flight, 490, "{name}");
    }
}

#[test]
fn loss_selective__a_long_tail_takes_several_acknowledgements() {
    let mut h = sent(200, u32::MAX - 100, 0);
    h.sent(SID, 0).xid = 99; // the probe timeout's
    h.session_mut(SID).tx.xid = 100;
    h.session_mut(SID).tx.acked_xid = 99;
    let fields = Fields { cum: 1, ..NONE };
    // The last two were not overtaken by three.
    for found in [64, 128, 192, 197, 197] {
        call(&mut h, ffi::vtl_native_loss_selective, fields, &[]);
        assert_eq!(h.session(SID).tx.lost_total, found);
    }
    assert_eq!(lost(h.session(SID)), (1..198).collect::<Vec<_>>());
    // All sent again and lost again.
    h.session_mut(SID).tx.lost = [0; 512];
    h.session_mut(SID).tx.lost_pending = 0;
    for found in [197 + 64, 197 + 128] {
        call(&mut h, ffi::vtl_native_loss_selective, fields, &[]);
        assert_eq!(h.session(SID).tx.lost_total, found);
    }
}

#[test]
fn loss_selective__a_bitmap_about_a_part_of_the_window() {
    let mut h = Host::new();
    let config = vtl_sim::host::SessionConfig {
        slots: 1024,
        ..Default::default()
    };
    h.open(SID, 0, &config);
    (h.session_mut(SID).tx.next, h.session_mut(SID).tx.xid) = (1000, 1001);
    h.session_mut(SID).tx.acked_xid = 1000;
    for seq in 0..1000 {
        h.sent(SID, seq).xid = seq as u32 + 1;
    }
    // From word 1 + 4, of 64 to 127 and so on: 320 to 447.
    let fields = Fields {
        cum: 70,
        skip: 4,
        flags: VTL_F_PARTIAL,
        ..NONE
    };
    let all_but = |missing: u32| !(1u64 << missing);
    let map = [all_but(3), all_but(63)];
    call(&mut h, ffi::vtl_native_loss_selective, fields, &map);
    assert_eq!(
        lost(h.session(SID)),
        [70, 320 + 3, 384 + 63],
        "what cum waits for is missing; nothing is said about the others"
    );
}
