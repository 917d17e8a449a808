//! Bulk transfers in both directions of one session, and what is known of the peer's queue.
#![allow(missing_docs, non_snake_case)]

mod table;

use std::thread;

use table::{Fields, MS, NOW, SID, ack_header, host};
use vtl_sim::{ffi, host::Host, report::BothWays};

/// Each direction gets at least this share of what it gets alone.
fn check(cells: &[BothWays], least: f64) {
    thread::scope(|scope| {
        for cell in cells {
            scope.spawn(move || {
                let (alone, both) = cell.measure().unwrap_or_else(|e| panic!("{cell:?}: {e}"));
                for (alone, both) in alone.iter().zip(both) {
                    assert!(
                        both >= least * alone,
                        "{cell:?}: {both:.0} of {alone:.0} bit/s"
                    );
                }
            });
        }
    });
}

#[test]
fn both_ways__each_gets_what_it_gets_alone() {
    let cells = [(50.0, 100.0, 0.5), (100.0, 100.0, 2.0), (10.0, 100.0, 0.0)];
    check(
        &cells.map(|(rtt_ms, rate_mbit, loss_pct)| BothWays::new(rtt_ms, rate_mbit, loss_pct)),
        0.95,
    );
}

/// The peer's packets say when they left by its own clock.
#[test]
fn both_ways__clocks_that_drift_change_nothing() {
    // Far more than any do, so that it would show.
    check(
        &[-5000, 5000].map(|drift_ppm| BothWays {
            drift_ppm,
            ..BothWays::new(50.0, 100.0, 0.5)
        }),
        0.93,
    );
}

/// A longer way back looks like a queue of the peer's at first.
#[test]
fn both_ways__a_longer_way_is_found_out() {
    check(
        &[75.0, 150.0, 300.0].map(|rtt_ms| BothWays {
            change: Some(rtt_ms),
            ..BothWays::new(50.0, 100.0, 0.5)
        }),
        0.5,
    );
}

/// Milliseconds that an acknowledgement is said to have waited, which comes at `ms` from now, `after` milliseconds
/// after a packet of the peer's that took `took` by the two clocks.
fn waited(h: &mut Host, ms: u64, after: u64, took: u32) -> u32 {
    let now = NOW + ms * MS;
    let r: &mut ffi::vtl_reverse = h.control(SID);
    (r.came_ns, r.took_us) = (now - after * MS, took.wrapping_mul(1000));
    let mut hdr = ack_header(Fields::default());
    let function = ffi::vtl_native_reverse;
    let (_, a) = h.ackd(function, SID, now, &mut hdr, &[], |_| ());
    a.waited_us / 1000
}

#[test]
fn reverse__tells_the_peers_queue_from_its_way() {
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
    // Four round trips, and as many again: what stands then is no queue of the peer's.
    assert_eq!(waited(&mut h, 450, 0, 581), 10);
    assert_eq!(waited(&mut h, 860, 0, 581), 0);
    assert_eq!(waited(&mut h, 870, 0, 586), 5);
    // Nor is what the clocks have drifted apart since something came.
    assert_eq!(waited(&mut h, 600_000, 0, 616), 0);
    assert_eq!(waited(&mut h, 600_010, 0, 620), 4);

    // Clocks that have nothing to do with each other.
    let mut h = path();
    assert_eq!(waited(&mut h, 0, 0, u32::MAX / 1000 - 5), 0);
    assert_eq!(waited(&mut h, 10, 0, u32::MAX / 1000), 5);
}
