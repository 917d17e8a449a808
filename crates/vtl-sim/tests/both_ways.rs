//! Bulk transfers in both directions of one session, and the estimate of the peer's queue (tf/reverse.h).
#![allow(missing_docs, non_snake_case)]

mod table;

use std::thread;

use table::{Fields, MS, NOW, SID, ack_header, host};
use vtl_sim::{ffi, host::Host, report::BothWays};

/// Asserts that each direction has at least this share of the rate that it has alone.
fn check(cells: &[BothWays], min: f64) {
    thread::scope(|scope| {
        for cell in cells {
            scope.spawn(move || {
                let (alone, both) = cell.measure().unwrap_or_else(|e| panic!("{cell:?}: {e}"));
                for (alone, both) in alone.iter().zip(both) {
                    assert!(
                        both >= min * alone,
                        "{cell:?}: {both:.0} of {alone:.0} bit/s"
                    );
                }
            });
        }
    });
}

#[test]
fn both_ways__each_direction_gets_its_rate_alone() {
    let cells = [(50.0, 100.0, 0.5), (100.0, 100.0, 2.0), (10.0, 100.0, 0.0)];
    check(
        &cells.map(|(rtt_ms, rate_mbit, loss_pct)| BothWays::new(rtt_ms, rate_mbit, loss_pct)),
        0.95,
    );
}

/// The peer's packets carry their departure by its own clock.
#[test]
fn both_ways__clocks_that_drift_change_nothing() {
    // Far more than clocks drift, so that an effect would show.
    check(
        &[-5000, 5000].map(|drift_ppm| BothWays {
            drift_ppm,
            ..BothWays::new(50.0, 100.0, 0.5)
        }),
        0.93,
    );
}

/// A longer return path looks like a queue of the peer's at first.
#[test]
fn both_ways__a_longer_return_path_is_detected() {
    check(
        &[75.0, 150.0, 300.0].map(|rtt_ms| BothWays {
            change: Some(rtt_ms),
            ..BothWays::new(50.0, 100.0, 0.5)
        }),
        0.5,
    );
}

/// The estimated queueing delay, ms, of an acknowledgement that arrives at `NOW` + `ms`, `after` ms after a packet
/// of the peer, whose arrival by our clock is `took` ms after its departure by the peer's.
fn waited(h: &mut Host, ms: u64, after: u64, took: u32) -> u32 {
    let now = NOW + ms * MS;
    let r: &mut ffi::vtl_reverse = h.state_mut(SID);
    (r.came_ns, r.took_us) = (now - after * MS, took.wrapping_mul(1000));
    let mut hdr = ack_header(Fields::default());
    let function = ffi::vtl_native_reverse;
    let (_, a) = h.ackd(function, SID, now, &mut hdr, &[], |_| ());
    a.waited_us / 1000
}

#[test]
fn reverse__separates_the_peers_queue_from_its_path() {
    let path = || {
        host(|s| {
            (s.tx.srtt_us, s.tx.meter.min_rtt_us) = (100_000, 80_000);
        })
    };
    let mut h = path();
    assert_eq!(waited(&mut h, 0, 0, 500), 0, "the first one");
    assert_eq!(waited(&mut h, 10, 0, 520), 20);
    assert_eq!(waited(&mut h, 20, 0, 490), 0, "the quickest");
    assert_eq!(waited(&mut h, 30, 0, 520), 30);
    assert_eq!(waited(&mut h, 40, 8, 520), 22, "nothing came since then");
    assert_eq!(waited(&mut h, 90, 58, 520), 0);
    assert_eq!(
        waited(&mut h, 100, 0, 571),
        0,
        "more than a round trip: a longer way"
    );
    assert_eq!(waited(&mut h, 110, 0, 581), 10, "compared with that");
    // After the minimum's window, four to eight round trips, a delay that persists is the path's.
    assert_eq!(waited(&mut h, 450, 0, 581), 10);
    assert_eq!(waited(&mut h, 860, 0, 581), 0);
    assert_eq!(waited(&mut h, 870, 0, 586), 5);
    // Nor is clock drift during a long silence a queue.
    assert_eq!(waited(&mut h, 600_000, 0, 616), 0);
    assert_eq!(waited(&mut h, 600_010, 0, 620), 4);

    // Clocks without a common origin.
    let mut h = path();
    assert_eq!(waited(&mut h, 0, 0, u32::MAX / 1000 - 5), 0);
    assert_eq!(waited(&mut h, 10, 0, u32::MAX / 1000), 5);
}
