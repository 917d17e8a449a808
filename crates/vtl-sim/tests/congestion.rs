//! BBR's modes, gains and losses as tables.
#![allow(missing_docs, non_snake_case)]

mod table;

use table::{Fields, MS, NOW, SID, ack_header, host};
use vtl_proto::intf::{VTL_MODE_PROBE_RTT, VTL_MODE_STARTUP};
use vtl_sim::{
    ffi::{
        self, VTL_BBR_CRUISE, VTL_BBR_DOWN, VTL_BBR_DRAIN, VTL_BBR_EMPTY, VTL_BBR_PROBE_BW,
        VTL_BBR_PROBE_RTT, VTL_BBR_STARTUP, VTL_BBR_TRY, VTL_BBR_UP, vtl_bbr,
    },
    host::Host,
};

/// One acknowledgement for BBR: a rate sample, a round-trip sample, packets in flight.
fn bbr(h: &mut Host, now: u64, rate: u64, rtt_us: u32, flight: u64) {
    let mut hdr = ack_header(Fields::default());
    h.ackd(
        ffi::vtl_native_congestion_bbr,
        SID,
        now,
        &mut hdr,
        &[],
        |a| {
            (a.rate, a.rtt_us, a.in_flight) = (rate * 1024, rtt_us, flight);
        },
    );
}

#[test]
fn congestion_bbr__startup_drain_probe() {
    let mut h = host(|_| ());
    let mode = |h: &Host| h.state::<vtl_bbr>(SID).mode;
    let mut delivered = 0;
    let mut round = |h: &mut Host, rate, flight| {
        delivered += 1000;
        h.session_mut(SID).tx.delivered = delivered;
        h.state_mut::<vtl_bbr>(SID).next_round = delivered;
        bbr(h, NOW, rate, 100_000, flight);
    };
    for rate in [100, 200, 400, 800, 1000] {
        round(&mut h, rate, 50);
        assert_eq!(mode(&h), VTL_BBR_STARTUP, "{rate}");
    }
    // 1,000 packets/s times 2.89: one packet each 346 us.
    let gap = h.session(SID).tx.pacing_gap_ns;
    assert!((345_000..347_500).contains(&gap), "{gap}");
    for n in 0..3 {
        assert_eq!(mode(&h), VTL_BBR_STARTUP, "plateau {n}");
        round(&mut h, 1000, 300);
    }
    assert_eq!(mode(&h), VTL_BBR_DRAIN, "three rounds without growth");
    assert!(h.session(SID).tx.pacing_gap_ns > 2_800_000);
    round(&mut h, 1000, 101);
    assert_eq!(mode(&h), VTL_BBR_DRAIN, "the path holds 100");
    round(&mut h, 1000, 100);
    assert_eq!(
        (mode(&h), h.state::<vtl_bbr>(SID).phase),
        (VTL_BBR_PROBE_BW, VTL_BBR_CRUISE)
    );
    let tx = &h.session(SID).tx;
    assert!(
        (125..180).contains(&tx.cwnd),
        "1.25 bandwidth-delay products, and an allowance for hosts: {}",
        tx.cwnd
    );
}

/// A path of 1,000 packets/s and 100 ms, known, in PROBE_BW.
fn known(phase: u32) -> Host {
    let mut h = host(|s| s.tx.srtt_us = 100_000);
    *h.state_mut(SID) = vtl_bbr {
        mode: VTL_BBR_PROBE_BW,
        phase,
        phase_ns: NOW,
        min_rtt_us: 100_000,
        min_rtt_ns_at: NOW,
        round_min_us: u32::MAX,
        bw: 1000 * 1024,
        bw_max: [1000 * 1024; 10],
        phase_bw: 1000 * 1024,
        next_round: u64::MAX,
        ..Default::default()
    };
    h
}

/// Counts `arrived` more arrivals and `lost` more losses in the meter.
fn arrive(h: &mut Host, arrived: u32, lost: u32) {
    let meter = &mut h.session_mut(SID).tx.meter;
    meter.arrived += arrived;
    meter.xid += arrived + lost;
}

/// As [`bbr`], at the end of a round.
fn round(h: &mut Host, now: u64, rtt_us: u32, flight: u64) {
    let delivered = h.session(SID).tx.delivered + 100;
    h.session_mut(SID).tx.delivered = delivered;
    h.state_mut::<vtl_bbr>(SID).next_round = delivered;
    arrive(h, 100, 0);
    bbr(h, now, 1000, rtt_us, flight);
}

fn phase(h: &Host) -> u32 {
    h.state::<vtl_bbr>(SID).phase
}

#[test]
fn congestion_bbr__phases() {
    let mut h = known(VTL_BBR_UP);
    let gap = |h: &Host| h.session(SID).tx.pacing_gap_ns / 1000;
    bbr(&mut h, NOW, 0, 120_000, 110);
    assert_eq!((phase(&h), gap(&h)), (VTL_BBR_UP, 800));
    bbr(&mut h, NOW + 101 * MS, 0, 120_000, 124);
    assert_eq!(phase(&h), VTL_BBR_UP, "a quarter more is not out yet");
    bbr(&mut h, NOW + 102 * MS, 0, 120_000, 125);
    assert_eq!((phase(&h), gap(&h)), (VTL_BBR_DOWN, 1333));
    bbr(&mut h, NOW + 103 * MS, 0, 120_000, 101);
    assert_eq!(phase(&h), VTL_BBR_DOWN);
    bbr(&mut h, NOW + 104 * MS, 0, 120_000, 100);
    assert_eq!((phase(&h), gap(&h)), (VTL_BBR_CRUISE, 1000));
    bbr(&mut h, NOW + 104 * MS + 150 * MS, 0, 100_000, 100);
    assert_eq!(phase(&h), VTL_BBR_CRUISE);
    bbr(&mut h, NOW + 104 * MS + 510 * MS, 0, 100_000, 100);
    assert_eq!(phase(&h), VTL_BBR_UP, "after five round trips at most");
    // The rate has grown and round trips show no queue: repeat.
    bbr(&mut h, NOW + 720 * MS, 1200, 101_000, 150);
    assert_eq!(phase(&h), VTL_BBR_UP);
    assert_eq!(h.state::<vtl_bbr>(SID).phase_ns, NOW + 720 * MS);
}

#[test]
fn congestion_bbr__a_standing_queue_is_drained() {
    let mut h = known(VTL_BBR_CRUISE);
    for n in 0..2 {
        assert_eq!(phase(&h), VTL_BBR_CRUISE, "round {n}");
        let gap = h.session(SID).tx.pacing_gap_ns;
        assert_eq!(gap, [0, 1_066_666][n], "a queue: a sixteenth slower");
        round(&mut h, NOW, 125_000, 110);
    }
    assert_eq!(phase(&h), VTL_BBR_EMPTY);
    let cwnd = |h: &Host| h.session(SID).tx.cwnd;
    assert!((100..105).contains(&cwnd(&h)), "{}", cwnd(&h));
    for _ in 0..2 {
        round(&mut h, NOW, 120_000, 110);
    }
    assert_eq!(phase(&h), VTL_BBR_EMPTY);
    assert!((75..80).contains(&cwnd(&h)), "{}", cwnd(&h));
    bbr(&mut h, NOW + 1, 0, 118_500, 75);
    assert_eq!(phase(&h), VTL_BBR_EMPTY);
    bbr(&mut h, NOW + 2, 0, 117_000, 75);
    assert_eq!(
        phase(&h),
        VTL_BBR_CRUISE,
        "a sixth longer than the shortest"
    );
}

#[test]
fn congestion_bbr__ecn_marks_signal_a_queue() {
    let mut h = known(VTL_BBR_CRUISE);
    let mut marked = |count: u16| {
        let mut hdr = ack_header(Fields::default());
        hdr.h.aux = count.to_be();
        h.session_mut(SID).tx.delivered += 100;
        h.state_mut::<vtl_bbr>(SID).next_round = u64::MAX;
        h.ackd(
            ffi::vtl_native_congestion_bbr,
            SID,
            NOW,
            &mut hdr,
            &[],
            |a| {
                (a.delivered, a.in_flight, a.rtt_us) = (1, 100, 100_000);
            },
        );
        round(&mut h, NOW, 100_000, 100);
        h.state::<vtl_bbr>(SID).queued
    };
    // New marks twice, none, an older acknowledgement, new marks across the wrap.
    assert_eq!([7, 9, 9, 8, 9 + 0x7fff].map(&mut marked), [1, 1, 0, 0, 1]);
    assert_eq!(marked(3), 1);
}

#[test]
fn congestion_bbr__a_queue_that_stays_is_a_competitors() {
    let mut h = known(VTL_BBR_CRUISE);
    bbr(&mut h, NOW, 0, 150_000, 120);
    let before = h.session(SID).tx.cwnd;
    for n in 0..100 {
        if h.state::<vtl_bbr>(SID).competing != 0 {
            break;
        }
        assert!(n < 30, "three times in vain are enough");
        // Shorter by what our reduced window takes out.
        round(&mut h, NOW + n * MS, 150_000 - n as u32 % 3 * 4000, 110);
    }
    let tx = &h.session(SID).tx;
    assert_eq!(tx.cwnd, before, "not what draining has left");
    // CUBIC: 0.4 packets for the cube of each second.
    h.state_mut::<vtl_bbr>(SID).next_round = u64::MAX;
    let start = h.state::<vtl_bbr>(SID).epoch_ns;
    bbr(&mut h, start + 5000 * MS, 0, 150_000, 1000);
    assert_eq!(h.session(SID).tx.cwnd, before + 50);
    // A loss: 30 % less.
    round(&mut h, start + 5000 * MS, 200_000, 150);
    h.session_mut(SID).tx.lost_total += 1;
    round(&mut h, start + 5001 * MS, 200_000, 150);
    let less = h.session(SID).tx.cwnd;
    assert!(((before + 50) * 179 / 256).abs_diff(less) <= 1, "{less}");
    // Losses of the next round are of packets sent before the decrease.
    h.session_mut(SID).tx.lost_total += 1;
    round(&mut h, start + 5002 * MS, 150_000, less);
    assert_eq!(h.session(SID).tx.cwnd, less);
    h.state_mut::<vtl_bbr>(SID).next_round = u64::MAX;
    // CUBIC takes seconds to get back.
    let k = u64::from(h.state::<vtl_bbr>(SID).k_ms);
    assert!((3000..6000).contains(&k), "{k}");
    h.state_mut::<vtl_bbr>(SID).min_rtt_ns_at = start + 5000 * MS;
    let later = start + (5002 + k) * MS;
    // Probing for the round trip happens at times that hosts share, and one may be in between.
    for n in 0..5 {
        round(&mut h, later + n * 600 * MS, 150_000, 1000);
    }
    let window = h.state::<vtl_bbr>(SID).window;
    assert!((before + 49..=before + 60).contains(&window), "{window}");
}

/// Round trips of three times the minimum, with less and with more in flight. `rtt`, `losses` and `flight` are
/// those of the round that decides.
fn longer(rtt: u32, losses: u32, flight: u64) -> Host {
    let mut h = known(VTL_BBR_CRUISE);
    for n in 0..4 {
        round(&mut h, NOW + n * MS, 300_000, 75);
    }
    assert_eq!(phase(&h), VTL_BBR_TRY);
    assert_eq!(h.session(SID).tx.cwnd, 112);
    for n in 4..6 {
        round(&mut h, NOW + n * MS, 302_000, 112);
    }
    arrive(&mut h, 0, losses);
    round(&mut h, NOW + 6 * MS, rtt, flight);
    h
}

#[test]
fn congestion_bbr__round_trips_that_ignore_our_window_are_the_paths() {
    let h = longer(301_000, 1, 112);
    let b = h.state::<vtl_bbr>(SID);
    assert_eq!(b.mode, VTL_BBR_STARTUP, "the model starts anew");
    assert_eq!(h.session(SID).tx.mode, VTL_MODE_STARTUP);
    assert_eq!((b.min_rtt_us, b.busy), (301_000, 0));
    // A queue that grew with our window, one that overflowed, and an application that did not fill the window.
    for h in [
        longer(306_000, 0, 112),
        longer(301_000, 20, 112),
        longer(301_000, 0, 75),
    ] {
        let b = h.state::<vtl_bbr>(SID);
        assert_eq!((b.mode, phase(&h)), (VTL_BBR_PROBE_BW, VTL_BBR_CRUISE));
        assert_eq!((b.min_rtt_us, b.busy), (100_000, 1));
    }
}

#[test]
fn congestion_bbr__probe_rtt() {
    const S: u64 = 1000 * MS;
    let mut h = known(VTL_BBR_CRUISE);
    h.state_mut::<vtl_bbr>(SID).probe_rtt_end_ns = NOW;
    let mode = |h: &Host| h.state::<vtl_bbr>(SID).mode;
    bbr(&mut h, NOW + 9 * S, 0, 150_000, 150);
    assert_eq!(mode(&h), VTL_BBR_PROBE_BW);
    bbr(&mut h, NOW + 11 * S, 0, 101_900, 150);
    assert_eq!(mode(&h), VTL_BBR_PROBE_BW, "near the minimum");
    bbr(&mut h, NOW + 22 * S, 0, 150_000, 150);
    assert_eq!(
        (mode(&h), h.session(SID).tx.cwnd),
        (VTL_BBR_PROBE_RTT, 100),
        "first one bandwidth-delay product"
    );
    assert_eq!(h.session(SID).tx.mode, VTL_MODE_PROBE_RTT);
    for n in 1..=2 {
        round(&mut h, NOW + 22 * S + n * 100 * MS, 130_000, 100);
    }
    assert_eq!(h.session(SID).tx.cwnd, 50, "then half of one");
    bbr(&mut h, NOW + 22 * S + 250 * MS, 0, 120_000, 50);
    bbr(&mut h, NOW + 22 * S + 501 * MS, 0, 125_000, 50);
    assert_eq!(
        (mode(&h), h.state::<vtl_bbr>(SID).min_rtt_us),
        (VTL_BBR_PROBE_BW, 105_000),
        "a quarter of the difference: others may have queued"
    );
}

/// The path may have become shorter, and a queue may hide it.
#[test]
fn congestion_bbr__the_shortest_round_trip_is_not_trusted_for_ever() {
    const S: u64 = 1000 * MS;
    let mut h = known(VTL_BBR_CRUISE);
    h.state_mut::<vtl_bbr>(SID).probe_rtt_end_ns = NOW;
    let known = |h: &Host| {
        (
            h.state::<vtl_bbr>(SID).mode,
            h.state::<vtl_bbr>(SID).min_rtt_us,
        )
    };
    // For 30 s and 200 round trips, and 10 s as any.
    for second in [9, 18, 27, 36, 45, 52] {
        bbr(&mut h, NOW + second * S, 0, 100_000, 150);
        assert_eq!(known(&h), (VTL_BBR_PROBE_BW, 100_000), "{second} s");
    }
    bbr(&mut h, NOW + 56 * S, 0, 100_000, 150);
    assert_eq!(known(&h), (VTL_BBR_PROBE_RTT, 100_000));
    // What the probe shows, and with it the window, shrinks as the queue does.
    for (n, rtt_us) in (1..).zip([90_000, 75_000, 60_000]) {
        round(&mut h, NOW + 56 * S + n * 100 * MS, rtt_us, 50);
    }
    bbr(&mut h, NOW + 57 * S, 0, 60_000, 50);
    assert_eq!(known(&h), (VTL_BBR_PROBE_BW, 60_000));
}

#[test]
fn congestion_bbr__probe_rtt_finds_the_competitor_gone() {
    const S: u64 = 1000 * MS;
    for (rtt_us, competing, min_rtt_us) in [(105_000, 0, 101_250), (140_000, 1, 110_000)] {
        let mut h = known(VTL_BBR_CRUISE);
        let b = h.state_mut::<vtl_bbr>(SID);
        (b.competing, b.window, b.max, b.epoch_ns) = (1, 200, 200, NOW);
        bbr(&mut h, NOW + 11 * S, 0, 180_000, 200);
        for n in 1..=3 {
            round(&mut h, NOW + 11 * S + n * 100 * MS, rtt_us, 50);
        }
        bbr(&mut h, NOW + 11 * S + 501 * MS, 0, rtt_us, 50);
        let b = h.state::<vtl_bbr>(SID);
        assert_eq!((b.mode, b.competing), (VTL_BBR_PROBE_BW, competing));
        assert_eq!(
            b.min_rtt_us, min_rtt_us,
            "a competitor's queue counts little"
        );
    }
}

/// In 65,536ths.
fn share(percent: u32) -> u32 {
    percent * 65536 / 100
}

#[test]
fn congestion_bbr__compensates_losses_up_to_a_limit() {
    // lost per 1,000 that arrive; the path's own loss rate, per cent; minimum surplus of the pacing rate, per mille
    for (lost, floor, surplus) in [
        (0, 10, 0),
        (10, 10, 2),
        (400, 10, 76),
        (1000, 10, 131),
        (1000, 0, 3),
        (1000, 60, 142),
    ] {
        let mut h = host(|s| s.tx.delivered = 1000);
        *h.state_mut(SID) = vtl_bbr {
            mode: VTL_BBR_PROBE_BW,
            phase: VTL_BBR_CRUISE,
            phase_ns: NOW,
            min_rtt_us: 100_000,
            min_rtt_ns_at: NOW,
            floor_q16: share(floor),
            probe_rtt_end_ns: NOW,
            ..Default::default()
        };
        arrive(&mut h, 1000, lost);
        bbr(&mut h, NOW, 1000, 100_000, 100);
        let more = 1_000_000_000_000 / h.session(SID).tx.pacing_gap_ns / 1000 - 1000;
        assert!((surplus..=surplus + 1).contains(&more), "{lost}: {more}");
        // Late, but not lost.
        let before = h.state::<vtl_bbr>(SID).loss_q16;
        let tx = &mut h.session_mut(SID).tx;
        tx.meter.arrived += lost;
        tx.delivered = 3000;
        h.state_mut::<vtl_bbr>(SID).next_round = 3000;
        arrive(&mut h, 2000, 0);
        bbr(&mut h, NOW, 1000, 100_000, 100);
        assert_eq!(h.state::<vtl_bbr>(SID).loss_q16, 3 * before / 4);
    }
}

#[test]
fn congestion_bbr__loss_at_a_lower_rate_is_the_paths_own() {
    let mut h = known(VTL_BBR_DOWN);
    let tx = &mut h.session_mut(SID).tx;
    (tx.xid, tx.meter.xid, tx.meter.arrived) = (1000, 900, 700);
    let floor = |h: &mut Host, arrived, lost, flight| {
        arrive(h, arrived, lost);
        let mut hdr = ack_header(Fields::default());
        let f = ffi::vtl_native_congestion_bbr;
        h.ackd(f, SID, NOW, &mut hdr, &[], |a| {
            (a.sent, a.arrived) = (arrived + lost, arrived);
            (a.rtt_us, a.in_flight) = (100_000, flight);
        });
        h.state::<vtl_bbr>(SID).floor_q16
    };
    assert_eq!(floor(&mut h, 50, 50, 120), 0, "sent before");
    h.session_mut(SID).tx.xid = 1250;
    assert_eq!(floor(&mut h, 35, 15, 120), 0, "too few to tell");
    let half = share(30) / 2;
    assert!(floor(&mut h, 35, 15, 120).abs_diff(half) <= 1);
    assert!(floor(&mut h, 100, 0, 100).abs_diff(half / 2) <= 1);
    assert_eq!(phase(&h), VTL_BBR_CRUISE);
    h.session_mut(SID).tx.xid = 2000;
    let before = floor(&mut h, 50, 0, 100);
    assert_eq!(floor(&mut h, 0, 500, 100), before, "sent after");
}

#[test]
fn congestion_bbr__startup_ends_when_the_queue_overflows() {
    // the rate that growth is compared with; the round trip; the resulting mode
    for (full, rtt_us, mode) in [
        (1000, 100_000, VTL_BBR_DRAIN),
        (700, 100_000, VTL_BBR_STARTUP),
        (700, 150_000, VTL_BBR_DRAIN),
    ] {
        let mut h = host(|s| s.tx.delivered = 700);
        *h.state_mut(SID) = vtl_bbr {
            full_bw: full * 1024,
            min_rtt_us: 100_000,
            round_min_us: u32::MAX,
            ..Default::default()
        };
        arrive(&mut h, 700, 300);
        bbr(&mut h, NOW, 1000, rtt_us, 1000);
        assert_eq!(h.state::<vtl_bbr>(SID).mode, mode, "{full} {rtt_us}");
    }
}

/// Where a few packets overtake most others, round trips are longer than the minimum, and more is in flight.
#[test]
fn congestion_bbr__window_includes_overtaken_packets() {
    for (share_q16, queued, more) in [(8000, 1, 0), (8192, 0, 40)] {
        let mut h = known(VTL_BBR_CRUISE);
        round(&mut h, NOW, 100_000, 100);
        let before = h.session(SID).tx.cwnd;
        let tx = &mut h.session_mut(SID).tx;
        (tx.reordering_extent, tx.reordered_q16) = (40, share_q16);
        bbr(&mut h, NOW, 0, 140_000, 100);
        assert_eq!(h.session(SID).tx.cwnd - before, more);
        round(&mut h, NOW, 140_000, 100);
        assert_eq!(h.state::<vtl_bbr>(SID).queued, queued);
    }
}

/// The model in competition after rounds with this round trip and in flight, which follow a window of 400.
fn against(rtt: u32, flight: u64, rounds: u64) -> vtl_bbr {
    let mut h = known(VTL_BBR_CRUISE);
    let b = h.state_mut::<vtl_bbr>(SID);
    (b.competing, b.busy, b.window, b.max, b.epoch_ns) = (1, 8, 400, 400, NOW);
    for n in 0..3 {
        round(&mut h, NOW + n * MS, 160_000, 400);
    }
    for n in 3..3 + rounds {
        round(&mut h, NOW + n * MS, rtt, flight);
    }
    *h.state(SID)
}

#[test]
fn congestion_bbr__a_queue_that_ignores_our_window_is_no_competitor() {
    let b = against(161_000, 200, 3);
    assert_eq!(
        (b.competing, b.mode, b.min_rtt_us),
        (0, VTL_BBR_STARTUP, 160_000)
    );
    // Too few rounds; more than half in flight; a queue that shrank with our window.
    for (rtt, flight, rounds) in [(161_000, 200, 2), (161_000, 210, 9), (150_000, 200, 9)] {
        let b = against(rtt, flight, rounds);
        assert_eq!((b.competing, b.min_rtt_us), (1, 100_000), "{rtt} {flight}");
    }
}

#[test]
fn congestion_bbr__drain_ends_at_the_minimum_window() {
    let mut h = host(|_| ());
    let b: &mut vtl_bbr = h.state_mut(SID);
    (b.mode, b.min_rtt_us, b.bw, b.bw_max[0]) = (VTL_BBR_DRAIN, 1000, 1024, 1024);
    b.next_round = u64::MAX;
    bbr(&mut h, NOW, 0, 1000, 5);
    assert_eq!(h.state::<vtl_bbr>(SID).mode, VTL_BBR_DRAIN);
    bbr(&mut h, NOW, 0, 1000, 4);
    assert_eq!(h.state::<vtl_bbr>(SID).mode, VTL_BBR_PROBE_BW);
}
