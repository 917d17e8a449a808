//! NewReno, CUBIC, Hybla and TFRC against the formulas of RFC 5681, RFC 9438, the paper of Caini and
//! Firrincieli, and RFC 5348, computed here in floating point; CRC32C against known values.
#![allow(missing_docs, non_snake_case)]

mod table;

use table::{MS, NOW, SID, host};
use vtl_proto::intf;
use vtl_sim::{
    ffi,
    host::{AckFunction, Host},
};

/// A path with this round-trip time and window, past slow start unless `threshold` is above.
fn path(rtt_us: u32, cwnd: u64, threshold: u64) -> Host {
    let mut h = host(|s| {
        (s.tx.srtt_us, s.tx.cwnd) = (rtt_us, cwnd);
        (s.tx.xid, s.tx.acked_xid) = (10_000, 9_000);
    });
    let cc: &mut ffi::vtl_cc = h.state_mut(SID);
    (cc.ssthresh, cc.recover, cc.min_rtt_us) = (threshold, 1, rtt_us);
    h
}

/// An acknowledgement of `delivered` packets with a full window.
fn ack(h: &mut Host, control: AckFunction, now: u64, delivered: u64) {
    let mut hdr = intf::vtl_ack_hdr::default();
    marked(h, control, now, delivered, &mut hdr);
}

fn marked(h: &mut Host, control: AckFunction, now: u64, n: u64, hdr: &mut intf::vtl_ack_hdr) {
    let tx = &mut h.session_mut(SID).tx;
    tx.delivered += n;
    let (cwnd, rtt_us) = (tx.cwnd, tx.srtt_us);
    h.ackd(control, SID, now, hdr, &[], |a| {
        (a.delivered, a.in_flight, a.rtt_us) = (n, cwnd, rtt_us);
    });
}

fn cwnd(h: &Host) -> u64 {
    h.session(SID).tx.cwnd
}

/// Loses a packet that was sent after the latest event.
fn lose(h: &mut Host) {
    let tx = &mut h.session_mut(SID).tx;
    tx.lost_total += 1;
    tx.xid += 1000;
    tx.acked_xid = tx.xid - 1;
}

const CONTROLS: [AckFunction; 3] = [
    ffi::vtl_native_newreno,
    ffi::vtl_native_cubic,
    ffi::vtl_native_hybla,
];

#[test]
fn newreno__table() {
    let newreno: AckFunction = ffi::vtl_native_newreno;
    // Slow start: RFC 5681, 3.1, equation 2: a packet for each that arrives.
    let mut h = path(100_000, 10, u64::MAX);
    for (n, want) in [(1, 11), (2, 13), (13, 26)] {
        ack(&mut h, newreno, NOW, n);
        assert_eq!(cwnd(&h), want);
    }
    // It ends at the threshold; the rest counts for congestion avoidance.
    let mut h = path(100_000, 10, 16);
    ack(&mut h, newreno, NOW, 10);
    assert_eq!(cwnd(&h), 16);
    // Equation 3: a packet for each window: 4 are over from above.
    ack(&mut h, newreno, NOW, 11);
    assert_eq!(cwnd(&h), 16);
    ack(&mut h, newreno, NOW, 1);
    assert_eq!(cwnd(&h), 17);
    // Equation 4: half after a loss, and once for each window (RFC 6582, 3.2).
    let mut h = path(100_000, 100, 50);
    lose(&mut h);
    ack(&mut h, newreno, NOW, 1);
    assert_eq!(cwnd(&h), 50);
    h.session_mut(SID).tx.lost_total += 1;
    ack(&mut h, newreno, NOW, 1);
    assert_eq!(cwnd(&h), 50, "sent before the window was halved");
    lose(&mut h);
    ack(&mut h, newreno, NOW, 1);
    assert_eq!(cwnd(&h), 25);
    // A timeout: one packet, slow start to half of what was.
    h.state_mut::<ffi::vtl_cc>(SID).timeout = 1;
    ack(&mut h, newreno, NOW, 0);
    assert_eq!(cwnd(&h), 1);
    ack(&mut h, newreno, NOW, 1);
    assert_eq!(cwnd(&h), 2);
    assert_eq!(h.state_mut::<ffi::vtl_cc>(SID).ssthresh, 12);
}

#[test]
fn every_control__grows_only_a_window_that_is_used() {
    for control in CONTROLS {
        let mut h = path(100_000, 100, 1000);
        let mut hdr = intf::vtl_ack_hdr::default();
        h.ackd(control, SID, NOW, &mut hdr, &[], |a| {
            (a.delivered, a.in_flight) = (10, 20);
        });
        assert_eq!(cwnd(&h), 100);
    }
}

#[test]
fn every_control__takes_a_mark_for_a_loss() {
    for (control, want) in CONTROLS.into_iter().zip([50, 70, 50]) {
        let mut h = path(100_000, 100, 50);
        let mut hdr = intf::vtl_ack_hdr::default();
        hdr.h.aux = 3_u16.to_be();
        marked(&mut h, control, NOW, 1, &mut hdr);
        assert_eq!(cwnd(&h), want);
        // The same count again is no news, nor is that of an older acknowledgement.
        for count in [3_u16, 1, 3] {
            h.session_mut(SID).tx.acked_xid += 5000;
            hdr.h.aux = count.to_be();
            marked(&mut h, control, NOW, 1, &mut hdr);
            assert!(cwnd(&h) >= want);
        }
    }
}

/// RFC 9438, figure 1, in packets and seconds.
fn w_cubic(t: f64, max: f64, after: f64) -> f64 {
    let k = ((max - after) / 0.4).cbrt();
    0.4 * (t - k).powi(3) + max
}

#[test]
fn cubic__follows_the_curve() {
    let cubic: AckFunction = ffi::vtl_native_cubic;
    for (max, rtt_ms) in [(100_u64, 50_u64), (1000, 100), (5000, 200)] {
        let mut h = path(rtt_ms as u32 * 1000, max, max / 2);
        lose(&mut h);
        ack(&mut h, cubic, NOW, 1);
        let after = max * 7 / 10;
        assert_eq!(cwnd(&h), after, "beta = 0.7");
        // Each round trip, the whole window is acknowledged in ten parts.
        let start = NOW + rtt_ms * MS;
        let mut now = start;
        let k = ((max - after) as f64 / 0.4).cbrt();
        // NewReno's estimate: section 4.3.
        let mut friendly = after as f64;
        let rounds = (2.0 * k * 1000.0 / rtt_ms as f64) as u64;
        for round in 0..rounds {
            for part in 1..=10 {
                now = start + (round * 10 + part) * rtt_ms * MS / 10;
                let acked = cwnd(&h).div_ceil(10);
                ack(&mut h, cubic, now, acked);
            }
            let t = (now - start) as f64 / 1e9;
            let want = w_cubic(t, max as f64, after as f64);
            friendly += if friendly < max as f64 { 0.53 } else { 1.0 };
            let got = cwnd(&h) as f64;
            // Between the curve now and a round trip ahead; NewReno's estimate may be above it.
            let ahead = w_cubic(t + rtt_ms as f64 / 1e3, max as f64, after as f64);
            let low = want.max(friendly) * 0.97 - 2.0;
            let high = ahead.max(friendly * 1.05) * 1.02 + 2.0;
            assert!(
                (low..=high).contains(&got),
                "{max}, {rtt_ms} ms, {t} s: {got}, not {low} to {high}"
            );
        }
        assert!(cwnd(&h) > max, "it goes beyond what it was");
    }
}

#[test]
fn cubic__fast_convergence() {
    let cubic: AckFunction = ffi::vtl_native_cubic;
    let mut h = path(100_000, 1000, 500);
    lose(&mut h);
    ack(&mut h, cubic, NOW, 1);
    lose(&mut h);
    ack(&mut h, cubic, NOW, 1);
    // 700 was less than 1,000: the next plateau is at 700 (1 + 0.7) / 2.
    let max = h.state_mut::<ffi::vtl_cc>(SID).w_max / 1024;
    assert_eq!((cwnd(&h), max), (490, 595));
}

#[test]
fn hybla__grows_as_a_path_of_25_ms() {
    let hybla: AckFunction = ffi::vtl_native_hybla;
    for rtt_ms in [10.0_f64, 25.0, 60.0, 100.0, 200.0, 333.0] {
        let rho = (rtt_ms / 25.0).max(1.0);
        // SAFETY: takes numbers.
        let slow = unsafe { ffi::vtl_native_hybla_slow((rtt_ms * 1000.0) as u32) } as f64 / 128.0;
        let want = 2_f64.powf(rho) - 1.0;
        assert!(
            (slow / want - 1.0).abs() < 0.02,
            "{rtt_ms} ms: {slow}, not {want}"
        );
        // Congestion avoidance: rho^2 / W for each packet.
        let mut h = path((rtt_ms * 1000.0) as u32, 1000, 500);
        for _ in 0..100 {
            ack(&mut h, hybla, NOW, 100);
        }
        let want = (1000_f64.powi(2) + 2.0 * rho * rho * 10_000.0).sqrt();
        let got = cwnd(&h) as f64;
        assert!(
            (got - want).abs() < want * 0.01 + 1.0,
            "{rtt_ms} ms: {got}, not {want}"
        );
    }
}

/// RFC 5348, section 3.1, in packets per second, with b = 1 and t_RTO = 4 R.
fn equation(rtt: f64, p: f64) -> f64 {
    let first = rtt * (2.0 * p / 3.0).sqrt();
    let second = 4.0 * rtt * (3.0 * (3.0 * p / 8.0).sqrt() * p * (1.0 + 32.0 * p * p));
    1.0 / (first + second)
}

#[test]
fn tfrc__throughput_equation() {
    for rtt_us in [1_000_u32, 10_000, 100_000, 600_000] {
        for interval in [1_u64, 2, 3, 5, 10, 33, 100, 1000, 10_000, 1_000_000] {
            // SAFETY: takes numbers.
            let got = unsafe { ffi::vtl_native_tfrc_equation(rtt_us, interval) } as f64 / 1024.0;
            let want = equation(f64::from(rtt_us) / 1e6, 1.0 / interval as f64);
            let slack = want * 0.01 + 1.0 / 1024.0;
            assert!(
                (got - want).abs() < slack,
                "{rtt_us} us, 1/{interval}: {got}, not {want}"
            );
        }
    }
}

#[test]
fn tfrc__mean_of_the_loss_intervals() {
    const WEIGHTS: [f64; 8] = [1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2];
    let mean = |values: &[u64]| {
        let weighted: f64 = values.iter().zip(WEIGHTS).map(|(v, w)| *v as f64 * w).sum();
        weighted / WEIGHTS[..values.len().min(8)].iter().sum::<f64>()
    };
    for intervals in [
        &[100][..],
        &[50, 200],
        &[10, 20, 30, 40, 50, 60, 70, 80],
        &[800, 10, 10, 10, 10, 10, 10, 10],
    ] {
        for open in [0, 1, 100, 5000] {
            let mut t = ffi::vtl_tfrc::default();
            t.interval[..intervals.len()].copy_from_slice(intervals);
            let mut with = vec![open];
            with.extend(intervals);
            let want = mean(intervals).max(mean(&with[..with.len().min(8)]));
            // SAFETY: reads the structure.
            let got = unsafe { ffi::vtl_native_tfrc_mean(&raw const t, open) } as f64;
            assert!(
                (got - want).abs() <= 1.0,
                "{open}, {intervals:?}: {got}, not {want}"
            );
        }
    }
}

#[test]
fn tfrc__slow_start_loss_and_silence() {
    let tfrc: AckFunction = ffi::vtl_native_tfrc;
    let rtt = 100 * MS;
    let mut h = host(|s| {
        (s.tx.srtt_us, s.tx.cwnd) = (100_000, 10);
        (s.tx.xid, s.tx.acked_xid) = (10_000, 9_000);
    });
    h.state_mut::<ffi::vtl_tfrc>(SID).cc.recover = 1;
    let rate = |h: &mut Host| h.state_mut::<ffi::vtl_tfrc>(SID).rate as f64 / 1024.0;
    ack(&mut h, tfrc, NOW, 1);
    assert!(
        (rate(&mut h) - 30.0).abs() < 0.5,
        "three packets a round trip"
    );
    // Doubled each round trip, and at most twice what arrives.
    for (n, arrived, want) in [(1, 6, 60.0), (2, 12, 120.0), (3, 24, 240.0), (4, 20, 400.0)] {
        ack(&mut h, tfrc, NOW + n * rtt, arrived);
        let got = rate(&mut h);
        assert!((got - want).abs() < want * 0.01, "{n}: {got}, not {want}");
    }
    // The first loss: the equation at the rate that arrived, 200 a second.
    lose(&mut h);
    ack(&mut h, tfrc, NOW + 5 * rtt, 20);
    let got = rate(&mut h);
    let interval = h.state_mut::<ffi::vtl_tfrc>(SID).interval[0];
    let want = equation(0.1, 1.0 / interval as f64);
    assert!((got - want).abs() < want * 0.02, "{got}, not {want}");
    assert!((130.0..=200.0).contains(&got), "about what arrived: {got}");
    // More losses in the same round trip are the same event.
    lose(&mut h);
    ack(&mut h, tfrc, NOW + 5 * rtt + 50 * MS, 5);
    assert_eq!(h.state_mut::<ffi::vtl_tfrc>(SID).interval[1], 0);
    // Silence halves it for every four round trips.
    h.state_mut::<ffi::vtl_tfrc>(SID).interval[0] = 1_000_000;
    let t = h.state_mut::<ffi::vtl_tfrc>(SID);
    (t.rate, t.received) = (400 * 1024, 1_000_000 * 1024);
    t.heard_ns = NOW;
    t.round_ns = NOW + 9 * rtt;
    ack(&mut h, tfrc, NOW + 9 * rtt, 0);
    let got = rate(&mut h);
    assert!((got - 100.0).abs() < 1.0, "{got}");
}

#[test]
fn crc32c__known_values() {
    let mut h = host(|_| ());
    let zeros = [0_u8; 32];
    let ones = [255_u8; 32];
    let up: Vec<u8> = (0..32).collect();
    // RFC 3720, B.4, and the check value of the catalogue of CRCs.
    for (bytes, want) in [
        (&b"123456789"[..], 0xe306_9283_u32),
        (&zeros, 0x8a91_36aa),
        (&ones, 0x62a8_ab43),
        (&up, 0x46dd_794e),
        (b"a", 0xc1d0_4330),
        (b"", 0),
    ] {
        let slot: *mut _ = h.tx_slot(SID, 0);
        // SAFETY: the slot is alive, and larger than any of these.
        let got = unsafe {
            (&mut (*slot).data)[..bytes.len()].copy_from_slice(bytes);
            ffi::vtl_native_crc32c(slot, bytes.len() as u32)
        };
        assert_eq!(got, want, "{bytes:?}");
    }
}
