//! Figures worked out by hand.

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// One connection and its estimator.
#[derive(Default)]
struct Fed {
    now_ns: u64,
    counters: Counters,
    tracker: Tracker,
    estimator: Estimator,
}

impl Fed {
    /// Begins with a reading of nothing.
    fn new() -> Self {
        let mut fed = Self {
            counters: Counters {
                delivered: Some(0),
                bound: Bound::Path,
                ..Counters::default()
            },
            ..Self::default()
        };
        fed.read();
        fed
    }

    fn read(&mut self) {
        if let Some(step) = self.tracker.advance(self.now_ns, self.counters) {
            self.estimator.add(&step);
        }
    }

    /// 100 ms later: so many packets of 1,000 bytes more, and so many of them lost.
    fn step(&mut self, sent: u32, lost: u32) {
        self.now_ns += 100 * MS;
        self.counters.sent = self.counters.sent.wrapping_add(sent);
        self.counters.lost = self.counters.lost.wrapping_add(lost);
        let bytes = u64::from(sent - lost) * 1000;
        self.counters.delivered = self.counters.delivered.map(|then| then + bytes);
        self.read();
    }

    fn metrics(&self) -> Metrics {
        self.estimator.metrics()
    }
}

#[test]
fn tracker__what_has_come_since() {
    let mut tracker = Tracker::default();
    let mut counters = Counters {
        sent: 10,
        lost: 1,
        delivered: Some(900),
        ..Counters::default()
    };
    let first = tracker.advance(5, counters).unwrap();
    assert_eq!(
        (first.from_ns, first.at_ns),
        (5, 5),
        "since nobody knows when"
    );
    assert_eq!(
        (first.sent, first.lost, first.delivered),
        (10, 1, Some(900))
    );
    assert_eq!(tracker.advance(6, counters), None, "nothing new");
    counters.sent = 30;
    counters.lost = 0;
    counters.delivered = Some(2500);
    let next = tracker.advance(9, counters).unwrap();
    assert_eq!((next.from_ns, next.at_ns), (6, 9));
    assert_eq!((next.sent, next.lost, next.delivered), (20, -1, Some(1600)));
}

#[test]
fn tracker__counters_that_wrap_or_begin_again() {
    let mut tracker = Tracker::default();
    let at = |sent, lost| Counters {
        sent,
        lost,
        ..Counters::default()
    };
    assert_eq!(
        tracker.advance(0, at(u32::MAX - 4, u32::MAX)),
        None,
        "half the numbers"
    );
    let wrapped = tracker.advance(1, at(5, 2)).unwrap();
    assert_eq!((wrapped.sent, wrapped.lost), (10, 3));
    // Another connection: it counts from here on.
    assert_eq!(tracker.advance(2, at(3, 0)), None);
    let next = tracker.advance(3, at(7, 1)).unwrap();
    assert_eq!((next.sent, next.lost), (4, 1));
    // A clock that goes back is no step.
    assert_eq!(tracker.advance(2, at(8, 1)), None);
}

#[test]
fn tracker__estimated_deliveries_that_go_back_are_not_counted_twice() {
    let mut tracker = Tracker::default();
    let mut read = |at, sent, delivered| {
        let counters = Counters {
            sent,
            delivered: Some(delivered),
            ..Counters::default()
        };
        tracker
            .advance(at, counters)
            .and_then(|step| step.delivered)
    };
    assert_eq!(read(0, 1, 1000), Some(1000));
    assert_eq!(read(1, 2, 900), Some(0));
    assert_eq!(read(2, 3, 1100), Some(100));
}

#[test]
fn tracker__a_window_is_bounded_by_the_path_where_a_queue_stands() {
    let bound = |rtts: [u64; 2], bound| {
        let mut tracker = Tracker::default();
        let steps = rtts.map(|rtt| {
            let counters = Counters {
                sent: rtt as u32,
                rtt: Some(ms(rtt)),
                min_rtt: Some(ms(40)),
                bound,
                ..Counters::default()
            };
            tracker.advance(rtt, counters).unwrap()
        });
        (steps[1].bound, steps[1].is_queued)
    };
    assert_eq!(bound([60, 61], Bound::Window), (Bound::Path, true));
    // A fourth of 40 ms, and half a millisecond.
    assert_eq!(bound([50, 61], Bound::Window), (Bound::Window, true));
    assert_eq!(bound([45, 61], Bound::Window), (Bound::Window, true));
    assert_eq!(bound([44, 45], Bound::Window), (Bound::Window, false));
    assert_eq!(
        bound([60, 61], Bound::Application),
        (Bound::Application, true)
    );
    assert_eq!(bound([40, 41], Bound::Path), (Bound::Path, false));
}

#[test]
fn loss__is_that_of_the_latest_packets() {
    let mut fed = Fed::new();
    assert_eq!(fed.metrics(), Metrics::default());
    // 100 packets a step, of which 10 are lost for 10 s, then 2.
    (0..100).for_each(|_| fed.step(100, 10));
    let metrics = fed.metrics();
    assert_eq!((metrics.loss, metrics.packets), (Some(0.1), 10_000));
    (0..300).for_each(|_| fed.step(100, 2));
    let metrics = fed.metrics();
    assert_eq!(metrics.loss, Some(0.02));
    assert!(metrics.packets >= 4096, "{}", metrics.packets);
}

#[test]
fn loss__a_slow_connection_keeps_its_packets() {
    let mut fed = Fed::new();
    // One packet a second of which every tenth is lost: of the last 300 s.
    for n in 0..1000 {
        fed.now_ns += 900 * MS;
        fed.step(1, u32::from(n % 10 == 0));
    }
    let metrics = fed.metrics();
    assert!(
        (290..=310).contains(&metrics.packets),
        "{}",
        metrics.packets
    );
    let loss = metrics.loss.unwrap();
    assert!((loss - 0.1).abs() < 0.005, "{loss}");
}

#[test]
fn loss__late_packets_were_not_lost() {
    let mut fed = Fed::new();
    fed.step(100, 10);
    fed.counters.lost -= 10;
    fed.step(100, 0);
    assert_eq!(fed.metrics().loss, Some(0.0));
    // More than were counted as lost in the window.
    fed.counters.lost = fed.counters.lost.wrapping_sub(5);
    fed.step(100, 0);
    assert_eq!(fed.metrics().loss, Some(0.0));
}

#[test]
fn burst__of_equal_groups() {
    let mut fed = Fed::new();
    // Groups of 50 packets, of which all lose 5: a dispersion of 0. The shortest run is 1.
    (0..20).for_each(|_| fed.step(50, 5));
    assert_eq!(fed.metrics().loss_burst, Some(1.0));
}

#[test]
fn burst__of_groups_by_hand() {
    let mut fed = Fed::new();
    // Of 20 groups of 50 packets every other one loses 10: p = 0.1, l²/n = 2 each, 20 in all, less 100 p = 10: 10.
    // D = 10 / (19 · 0.09) = 5.848; the runs are (D + 1) / (2 · 0.9) = 3.804.
    (0..20).for_each(|n| fed.step(50, if n % 2 == 0 { 10 } else { 0 }));
    let burst = fed.metrics().loss_burst.unwrap();
    assert!((burst - 3.804).abs() < 0.001, "{burst}");
}

#[test]
fn burst__not_from_a_few_losses() {
    let mut fed = Fed::new();
    (0..15).for_each(|_| fed.step(50, 5));
    assert_eq!(fed.metrics().loss_burst, None, "15 groups");
    let mut fed = Fed::new();
    (0..20).for_each(|n| fed.step(50, u32::from(n < 7)));
    assert_eq!(fed.metrics().loss_burst, None, "7 losses");
    let mut fed = Fed::new();
    (0..20).for_each(|_| fed.step(50, 50));
    assert_eq!(fed.metrics().loss_burst, None, "nothing arrives");
    assert_eq!(fed.metrics().loss, Some(1.0));
}

/// The mean run of losses that is estimated from a Markov chain (Gilbert's model) with this loss and these runs.
fn gilbert(loss: f64, run: f64) -> f64 {
    let mut random = vtl_testing::Random::new(7, 0);
    let (ends, begins) = (1.0 / run, loss / (run * (1.0 - loss)));
    let mut is_bad = false;
    let mut fed = Fed::new();
    for _ in 0..400 {
        let mut lost = 0;
        for _ in 0..100 {
            let turns = if is_bad { ends } else { begins };
            is_bad ^= random.chance(turns);
            lost += u32::from(is_bad);
        }
        fed.step(100, lost);
    }
    fed.metrics().loss_burst.unwrap()
}

#[test]
fn burst__of_chains() {
    for (loss, run, from, to) in [
        (0.02, 1.0 / 0.98, 0.9, 1.3),
        (0.05, 3.0, 2.3, 3.8),
        (0.05, 8.0, 5.0, 11.0),
    ] {
        let found = gilbert(loss, run);
        assert!((from..=to).contains(&found), "{run}: {found}");
    }
}

#[test]
fn bandwidth__measured_where_the_path_bounds_it() {
    let mut fed = Fed::new();
    fed.step(100, 0);
    assert_eq!(fed.metrics().bandwidth, None, "too short");
    // 100,000 bytes in 100 ms are 8 Mbit/s.
    (0..10).for_each(|_| fed.step(100, 0));
    let bandwidth = fed.metrics().bandwidth.unwrap();
    assert_eq!(
        (bandwidth.rate, bandwidth.at_least, bandwidth.error),
        (8_000_000, false, 0.0)
    );
    assert_eq!(fed.metrics().delivery_rate, Some(8_000_000));
}

#[test]
fn bandwidth__a_lower_bound_where_the_application_does() {
    let mut fed = Fed::new();
    fed.counters.bound = Bound::Application;
    (0..5).for_each(|_| fed.step(100, 0));
    let bandwidth = fed.metrics().bandwidth.unwrap();
    assert_eq!(
        (bandwidth.rate, bandwidth.at_least, bandwidth.error),
        (8_000_000, true, 1.0)
    );
    // Half a second at twice the rate: measured.
    fed.counters.bound = Bound::Path;
    (0..10).for_each(|_| fed.step(200, 0));
    let bandwidth = fed.metrics().bandwidth.unwrap();
    assert_eq!((bandwidth.rate, bandwidth.at_least), (16_000_000, false));
    // An application that sends less does not change it, one that sends more does.
    fed.counters.bound = Bound::Application;
    (0..6).for_each(|_| fed.step(50, 0));
    assert_eq!(fed.metrics().bandwidth.unwrap().rate, 16_000_000);
    assert_eq!(fed.metrics().delivery_rate, Some(4_000_000));
    (0..10).for_each(|_| fed.step(250, 0));
    let bandwidth = fed.metrics().bandwidth.unwrap();
    assert_eq!((bandwidth.rate, bandwidth.at_least), (20_000_000, true));
}

#[test]
fn bandwidth__one_step_of_the_application_makes_a_bound() {
    let mut fed = Fed::new();
    for n in 0..5 {
        fed.counters.bound = if n == 2 {
            Bound::Application
        } else {
            Bound::Path
        };
        fed.step(100, 0);
    }
    assert!(fed.metrics().bandwidth.unwrap().at_least);
}

#[test]
fn bandwidth__of_the_last_ten_seconds() {
    let mut fed = Fed::new();
    (0..50).for_each(|_| fed.step(1000, 0));
    (0..160).for_each(|_| fed.step(100, 0));
    assert_eq!(fed.metrics().bandwidth.unwrap().rate, 8_000_000);
    // Idle, it keeps what it had, and the pause is no rate.
    fed.now_ns += 3600 * 1000 * MS;
    fed.read();
    (0..3).for_each(|_| fed.step(100, 0));
    assert_eq!(fed.metrics().bandwidth.unwrap().rate, 8_000_000);
    assert_eq!(fed.metrics().delivery_rate, Some(8_000_000));
}

#[test]
fn bandwidth__is_that_of_all_connections_together() {
    let mut estimator = Estimator::default();
    let mut trackers = [Tracker::default(); 2];
    for n in 0..=10_u32 {
        for tracker in &mut trackers {
            let counters = Counters {
                sent: n * 100,
                delivered: Some(u64::from(n) * 100_000),
                bound: Bound::Path,
                ..Counters::default()
            };
            let step = tracker.advance(u64::from(n) * 100 * MS, counters);
            step.iter().for_each(|step| estimator.add(step));
        }
    }
    assert_eq!(estimator.metrics().delivery_rate, Some(16_000_000));
}

/// Connections that are read once a second, half a second apart, and one that is read every three seconds.
#[test]
fn bandwidth__of_connections_that_are_read_in_turn() {
    let mut estimator = Estimator::default();
    let mut trackers = [Tracker::default(); 3];
    let of = [
        (1000, 0, 250_000),
        (1000, 500, 2_250_000),
        (3000, 100, 500_000),
    ];
    for now in (0..20_000).step_by(100) {
        for (tracker, (every, first, bytes)) in trackers.iter_mut().zip(of) {
            if now % every == first {
                let counters = Counters {
                    delivered: Some(now * bytes / 1000),
                    bound: Bound::Path,
                    ..Counters::default()
                };
                let step = tracker.advance(now * MS, counters);
                step.iter().for_each(|step| estimator.add(step));
            }
        }
    }
    // 2, 18 and 4 Mbit/s.
    let metrics = estimator.metrics();
    let bandwidth = metrics.bandwidth.unwrap();
    assert!(
        (23_990_000..=24_000_000).contains(&bandwidth.rate),
        "{bandwidth:?}"
    );
    assert!(!bandwidth.at_least);
    let rate = metrics.delivery_rate.unwrap();
    assert!((23_990_000..=24_000_000).contains(&rate), "{rate}");
}

#[test]
fn rtt__the_minimum_is_of_the_last_seconds() {
    let mut fed = Fed::new();
    fed.counters.rtt = Some(ms(30));
    fed.step(1, 0);
    fed.counters.rtt = Some(ms(50));
    fed.step(1, 0);
    let metrics = fed.metrics();
    assert_eq!((metrics.min_rtt, metrics.rtt), (Some(ms(30)), Some(ms(50))));
    assert_eq!(metrics.queueing(), Some(ms(20)));
    (0..220).for_each(|_| fed.step(1, 0));
    assert_eq!(fed.metrics().min_rtt, Some(ms(50)));
    // A carrier's own minimum counts.
    fed.counters.min_rtt = Some(ms(41));
    fed.step(1, 0);
    assert_eq!(fed.metrics().min_rtt, Some(ms(41)));
    // 0 is no time.
    fed.counters.rtt = Some(ms(0));
    fed.step(1, 0);
    assert_eq!(fed.metrics().rtt, Some(ms(50)));
}

#[test]
fn class__as_in_table_5_2() {
    let class = |rtt| {
        let min_rtt = Some(Duration::from_micros(rtt));
        Metrics {
            min_rtt,
            ..Metrics::default()
        }
        .class()
        .map(|class| class.to_string())
    };
    assert_eq!(class(49_999).as_deref(), Some("lan"));
    assert_eq!(class(50_000).as_deref(), Some("terrestrial"));
    assert_eq!(class(499_999).as_deref(), Some("terrestrial"));
    assert_eq!(class(500_000).as_deref(), Some("long-delay"));
    assert_eq!(Metrics::default().class(), None);
}

#[test]
fn wireless__bursts_without_a_queue() {
    let path = |loss, burst, packets| {
        let metrics = Metrics {
            clear_loss: Some(loss),
            loss_burst: burst,
            packets,
            ..Metrics::default()
        };
        metrics.looks_wireless()
    };
    assert_eq!(path(0.02, Some(3.0), 9000), Some(true));
    assert_eq!(path(0.02, Some(1.1), 9000), Some(false), "one by one");
    assert_eq!(path(0.02, None, 300), None, "too few");
    assert_eq!(path(0.0, None, 9000), Some(false), "it loses nothing");
    assert_eq!(path(0.0, None, 300), None);
}

#[test]
fn loss__what_a_queue_drops_is_apart() {
    let mut fed = Fed::new();
    fed.counters.min_rtt = Some(ms(40));
    fed.counters.rtt = Some(ms(41));
    (0..20).for_each(|_| fed.step(100, 2));
    // A queue that overflows for half a second, and is seen for one step more.
    fed.counters.rtt = Some(ms(80));
    (0..5).for_each(|_| fed.step(100, 50));
    fed.counters.rtt = Some(ms(41));
    fed.step(100, 50);
    (0..10).for_each(|_| fed.step(100, 2));
    let metrics = fed.metrics();
    assert_eq!(metrics.loss, Some(360.0 / 3600.0));
    assert_eq!(metrics.clear_loss, Some(0.02));
    assert_eq!(metrics.loss_burst, Some(1.0), "a dispersion of 0");
    assert_eq!(metrics.looks_wireless(), Some(false));
}

#[test]
fn best__most_packets_of_the_newest() {
    let told = |age, packets, rtt: Option<u64>| {
        let metrics = Metrics {
            packets,
            loss: (packets > 0).then_some(0.01),
            rtt: rtt.map(ms),
            ..Metrics::default()
        };
        (Duration::from_secs(age), metrics)
    };
    assert_eq!(best(&[]), None);
    let all = [
        told(100, 9000, Some(9)),
        told(0, 0, Some(1)),
        told(5, 500, None),
    ];
    let (main, metrics) = best(&all).unwrap();
    assert_eq!((main, metrics.packets, metrics.rtt), (2, 500, Some(ms(1))));
    // A bandwidth that was measured, if one was.
    let with = |rate, at_least| Metrics {
        bandwidth: Some(Bandwidth {
            rate,
            at_least,
            error: 0.0,
        }),
        packets: rate,
        ..Metrics::default()
    };
    let now = Duration::ZERO;
    let (_, metrics) = best(&[(now, with(7, true)), (now, with(5, false))]).unwrap();
    assert_eq!(metrics.bandwidth.unwrap().rate, 5);
    let (_, metrics) = best(&[(now, with(7, true)), (now, with(5, true))]).unwrap();
    assert_eq!(metrics.bandwidth.unwrap().rate, 7);
}

fn anything() -> impl Strategy<Value = (u64, Counters)> {
    let time =
        || proptest::option::of(any::<u32>().prop_map(|us| Duration::from_micros(us.into())));
    let bound = prop_oneof![
        Just(Bound::Path),
        Just(Bound::Window),
        Just(Bound::Application)
    ];
    let counts = (
        any::<u32>(),
        any::<u32>(),
        proptest::option::of(any::<u64>()),
    );
    (any::<u64>(), time(), time(), counts, bound, any::<f64>()).prop_map(
        |(at, rtt, min_rtt, (sent, lost, delivered), bound, reordering)| {
            let counters = Counters {
                rtt,
                rtt_variance: rtt,
                min_rtt,
                sent,
                lost,
                delivered,
                bound,
                reordering: Some(reordering),
            };
            (at, counters)
        },
    )
}

proptest! {
    /// Whatever a carrier says, and whatever the clock does.
    #[test]
    fn estimator__any_counters_give_figures_that_can_be_true(readings in proptest::collection::vec(anything(), 0..200)) {
        let mut fed = Fed::default();
        for (at, counters) in readings {
            fed.now_ns = at;
            fed.counters = counters;
            fed.read();
            let metrics = fed.metrics();
            let shares = [metrics.loss, metrics.clear_loss, metrics.reordering, metrics.bandwidth.map(|b| b.error)];
            prop_assert!(shares.into_iter().flatten().all(|share| (0.0..=1.0).contains(&share)));
            prop_assert!(metrics.loss_burst.is_none_or(|burst| burst >= 1.0 && burst.is_finite()));
        }
    }
}

#[test]
fn may_overflow__where_the_queue_is_long() {
    let full = |rtt| Counters {
        rtt: Some(ms(rtt)),
        min_rtt: Some(ms(100)),
        ..Counters::default()
    };
    assert!(!full(175).may_overflow() && full(176).may_overflow());
    let unknown = Counters {
        sent: 1000,
        lost: 1,
        ..Counters::default()
    };
    assert!(!unknown.may_overflow());
}
