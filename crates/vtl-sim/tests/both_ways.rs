//! Bulk transfers in both directions of one session, and what is known of the peer's queue.
#![allow(missing_docs, non_snake_case)]

mod table;

use std::thread;

use table::{Fields, MS, NOW, SID, ack_header, host};
use vtl_sim::{ffi, host::Host, report::BothWays};

/// Of what a direction gets alone.
const LEAST: f64 = 0.95;

fn check(cells: &[BothWays]) {
    thread::scope(|scope| {
        for cell in cells {
            scope.spawn(move || {
                let (alone, both) = cell.measure().unwrap_or_else(|e| panic!("{cell:?}: {e}"));
                for (alone, both) in alone.iter().zip(both) {
                    assert!(
                        both >= LEAST * alone,
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
    check(&cells.map(|(rtt_ms, rate_mbit, loss_pct)| BothWays::new(rtt_ms, rate_mbit, loss_pct)));
}

/// The peer's packets say when they left by its own clock.
#[test]
fn both_ways__clocks_that_drift_change_nothing() {
    check(&[-200, 200].map(|drift_ppm| BothWays {
        drift_ppm,
        ..BothWays::new(50.0, 100.0, 0.5)
    }));
}

/// Milliseconds that an acknowledgement is said to have waited, which comes at `ms` from now, `after` milliseconds
/// after a packet of the peer's that took `took` by the two clocks.
fn waited(h: &mut Host, ms: u64, after: u64, took: u32) -> u32 {
    let now = NOW + ms * MS;
    let r: &mut ffi::vtl_reverse = h.control(SID);
    (r.came_ns, r.took_us) = (now - after * MS, took.wrapping_mul(1000));
    let mut hdr = ack_header(Fields::default());
    let function = ffi::vtl_native_reverse;
    let (_, a) = h.ackd(function, SID, now, &mut hdr, &[], |a| a.delivered = 1);
    let delivered_ns = now - u64::from(a.waited_us) * 1000;
    let known = h.session(SID).tx.delivered_ns;
    // Where nothing is known, tf_ack_cumulative has the last word.
    assert!(known == delivered_ns || a.waited_us == 0);
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
    assert_eq!(waited(&mut h, 0, 1, 500), 0, "the first one");
    assert_eq!(waited(&mut h, 10, 1, 520), 20);
    assert_eq!(waited(&mut h, 20, 1, 490), 0, "the quickest");
    assert_eq!(waited(&mut h, 30, 1, 520), 30);
    assert_eq!(waited(&mut h, 40, 8, 520), 0, "long ago");
    assert_eq!(
        waited(&mut h, 50, 1, 571),
        0,
        "more than a round trip: a longer way"
    );
    assert_eq!(waited(&mut h, 60, 1, 581), 10, "compared with that");
    // Four round trips, and as many again: what stands then is no queue of the peer's.
    assert_eq!(waited(&mut h, 450, 1, 581), 10);
    assert_eq!(waited(&mut h, 860, 1, 581), 0);
    assert_eq!(waited(&mut h, 870, 1, 586), 5);

    // Clocks that have nothing to do with each other.
    let mut h = path();
    assert_eq!(waited(&mut h, 0, 1, u32::MAX / 1000 - 5), 0);
    assert_eq!(waited(&mut h, 10, 1, u32::MAX / 1000), 5);
}
