//! BBR's modes, gains and losses as tables.
#![allow(missing_docs, non_snake_case)]

mod table;

use table::{Fields, MS, NOW, SID, ack_header, host};
use vtl_proto::intf::{VTL_BBR_DRAIN, VTL_BBR_PROBE_BW, VTL_BBR_PROBE_RTT, VTL_BBR_STARTUP};
use vtl_sim::{ffi, host::Host};

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
    let mode = |h: &Host| h.session(SID).tx.bbr.mode;
    let mut delivered = 0;
    let mut round = |h: &mut Host, rate, flight| {
        delivered += 1000;
        h.session_mut(SID).tx.delivered = delivered;
        h.session_mut(SID).tx.bbr.next_round = delivered;
        bbr(h, NOW, rate, 100_000, flight);
    };
    for rate in [100, 200, 400, 800, 1000] {
        round(&mut h, rate, 50);
        assert_eq!(mode(&h), VTL_BBR_STARTUP, "{rate}");
    }
    // 1,000 packets/s times 2.89: one packet each 346 us.
    let gap = h.session(SID).tx.pacing_gap_ns;
    assert!((345_000..347_500).contains(&gap), "{gap}");
    for n in 0..4 {
        assert_eq!(mode(&h), VTL_BBR_STARTUP, "plateau {n}");
        round(&mut h, 1000, 300);
    }
    assert_eq!(mode(&h), VTL_BBR_DRAIN, "three rounds without growth");
    assert!(h.session(SID).tx.pacing_gap_ns > 2_800_000);
    round(&mut h, 1000, 101);
    assert_eq!(mode(&h), VTL_BBR_DRAIN, "the path holds 100");
    round(&mut h, 1000, 100);
    assert_eq!(
        (mode(&h), h.session(SID).tx.bbr.cycle),
        (VTL_BBR_PROBE_BW, 2)
    );
    let tx = &h.session(SID).tx;
    assert!(
        (200..320).contains(&tx.cwnd),
        "two of what the path holds: {}",
        tx.cwnd
    );
}

#[test]
fn congestion_bbr__gain_cycle() {
    let mut h = host(|s| {
        let b = &mut s.tx.bbr;
        (b.mode, b.cycle, b.cycle_ns, b.min_rtt_us, b.min_rtt_ns_at) =
            (VTL_BBR_PROBE_BW, 0, NOW, 100_000, NOW);
        (b.bw, b.bw_max[0], b.next_round) = (1000 * 1024, 1000 * 1024, u64::MAX);
    });
    let mut seen = Vec::new();
    for step in 0..9 {
        let now = NOW + step * 101 * MS;
        bbr(&mut h, now, 0, 100_000, 150);
        seen.push((
            h.session(SID).tx.bbr.cycle,
            h.session(SID).tx.pacing_gap_ns / 1000,
        ));
    }
    assert_eq!(
        seen,
        [
            (0, 800),
            (1, 1333),
            (2, 1000),
            (3, 1000),
            (4, 1000),
            (5, 1000),
            (6, 1000),
            (7, 1000),
            (0, 800)
        ]
    );
    bbr(&mut h, NOW + 1000 * MS, 0, 100_000, 150);
    assert_eq!(h.session(SID).tx.bbr.cycle, 1);
    bbr(&mut h, NOW + 1001 * MS, 0, 100_000, 99);
    assert_eq!(
        h.session(SID).tx.bbr.cycle,
        2,
        "the queue that probing made is gone"
    );
}

#[test]
fn congestion_bbr__probe_rtt() {
    const S: u64 = 1000 * MS;
    let mut h = host(|s| {
        let b = &mut s.tx.bbr;
        (b.mode, b.cycle, b.min_rtt_us, b.min_rtt_ns_at) = (VTL_BBR_PROBE_BW, 2, 100_000, NOW);
        (b.bw, b.bw_max[0], b.next_round) = (1000 * 1024, 1000 * 1024, u64::MAX);
    });
    let mode = |h: &Host| h.session(SID).tx.bbr.mode;
    bbr(&mut h, NOW + 9 * S, 0, 150_000, 150);
    assert_eq!(mode(&h), VTL_BBR_PROBE_BW);
    bbr(&mut h, NOW + 11 * S, 0, 101_900, 150);
    assert_eq!(mode(&h), VTL_BBR_PROBE_BW, "as good as the minimum");
    bbr(&mut h, NOW + 22 * S, 0, 150_000, 150);
    assert_eq!(
        (mode(&h), h.session(SID).tx.cwnd),
        (VTL_BBR_PROBE_RTT, 75),
        "half of what the path holds"
    );
    bbr(&mut h, NOW + 22 * S + 250 * MS, 0, 120_000, 60);
    assert_eq!(
        (mode(&h), h.session(SID).tx.bbr.min_rtt_us),
        (VTL_BBR_PROBE_RTT, 120_000)
    );
    bbr(&mut h, NOW + 22 * S + 301 * MS, 0, 120_000, 60);
    assert_eq!(mode(&h), VTL_BBR_PROBE_BW);
}

#[test]
fn congestion_bbr__losses_are_made_up_for_to_a_limit() {
    // lost per 1,000 delivered; the pace's surplus in per mille at most and at least
    for (lost, low, high) in [(0, 0, 0), (10, 2, 3), (1000, 100, 101)] {
        let mut h = host(|s| {
            s.tx.bbr.mode = VTL_BBR_PROBE_BW;
            (s.tx.bbr.cycle, s.tx.bbr.cycle_ns, s.tx.bbr.min_rtt_us) = (2, NOW, 100_000);
            (s.tx.delivered, s.tx.lost_total) = (1000, lost);
        });
        bbr(&mut h, NOW, 1000, 100_000, 100);
        let surplus = 1_000_000_000_000 / h.session(SID).tx.pacing_gap_ns / 1000;
        assert!(
            (1000 + low..=1000 + high).contains(&surplus),
            "{lost}: {surplus}"
        );
        // Losses that are taken back leave no trace.
        h.session_mut(SID).tx.lost_total = 0;
        h.session_mut(SID).tx.delivered = 3000;
        h.session_mut(SID).tx.bbr.next_round = 3000;
        let before = h.session(SID).tx.bbr.loss_q16;
        bbr(&mut h, NOW, 1000, 100_000, 100);
        assert!(h.session(SID).tx.bbr.loss_q16 <= before);
    }
    let mut h = host(|s| (s.tx.delivered, s.tx.lost_total) = (700, 300));
    bbr(&mut h, NOW, 1000, 100_000, 1000);
    assert_eq!(
        h.session(SID).tx.bbr.mode,
        VTL_BBR_DRAIN,
        "startup ends when the queue runs over"
    );
}

#[test]
fn congestion_bbr__drains_paths_that_hold_nothing() {
    let mut h = host(|s| {
        let b = &mut s.tx.bbr;
        (b.mode, b.min_rtt_us, b.bw, b.bw_max[0]) = (VTL_BBR_DRAIN, 1000, 1024, 1024);
        b.next_round = u64::MAX;
    });
    bbr(&mut h, NOW, 0, 1000, 5);
    assert_eq!(h.session(SID).tx.bbr.mode, VTL_BBR_DRAIN);
    bbr(&mut h, NOW, 0, 1000, 4);
    assert_eq!(h.session(SID).tx.bbr.mode, VTL_BBR_PROBE_BW);
}
