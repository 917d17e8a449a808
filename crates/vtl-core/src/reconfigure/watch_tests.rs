use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::netmon::Bandwidth;

const MS: u64 = 1_000_000;
const DWELL: Duration = Duration::from_secs(10);
/// Places among [`CLASSES`].
const STREAM: Choice = Some(2);

fn delay(ms: u64) -> Bounds {
    Bounds {
        max_delay: Some(Duration::from_millis(ms)),
        ..Bounds::default()
    }
}

fn throughput(bits: u64) -> Bounds {
    Bounds {
        min_throughput: Some(bits),
        ..Bounds::default()
    }
}

fn engine(bounds: Bounds) -> Engine {
    Engine::by_model(Some(Profile::LossSensitive), DWELL).with_bounds(bounds)
}

/// A path with a queue of so many milliseconds.
fn path(rtt_ms: u64, queue_ms: u64, loss: f64, packets: u64) -> Metrics {
    Metrics {
        min_rtt: Some(Duration::from_millis(rtt_ms)),
        rtt: Some(Duration::from_millis(rtt_ms + queue_ms)),
        loss: Some(loss),
        clear_loss: Some(loss),
        loss_burst: Some(1.0),
        bandwidth: Some(Bandwidth {
            rate: 8_000_000,
            at_least: false,
            error: 0.0,
        }),
        packets,
        ..Metrics::default()
    }
}

/// A run of an engine, with a reading each 100 ms.
struct Run {
    engine: Engine,
    ms: u64,
    /// When it has switched, and to what.
    switches: Vec<(u64, Choice)>,
    changes: Vec<(u64, Change)>,
}

impl Run {
    fn new(engine: Engine) -> Self {
        Self {
            engine,
            ms: 0,
            switches: Vec::new(),
            changes: Vec::new(),
        }
    }

    /// Goes on for so long. `queue`: what stands, ms, by what the connections go by; `rate`: what they get, bit/s.
    fn go(
        &mut self,
        seconds: u64,
        rtt_ms: u64,
        loss: f64,
        queue: impl Fn(&str) -> u64,
        rate: impl Fn(&str) -> Option<u64>,
    ) {
        for _ in 0..seconds * 10 {
            self.ms += 100;
            let class = class_of(self.engine.made());
            let metrics = path(rtt_ms, queue(class), loss, self.ms);
            let outcome = Outcome {
                throughput: rate(class),
                ..Outcome::of(&metrics)
            };
            let now = self.ms * MS;
            self.engine.note_moving(true);
            let changes = self.engine.note_outcome(now, &outcome);
            let told = changes.into_iter().flatten();
            self.changes.extend(told.map(|change| (self.ms, change)));
            if let Some(switch) = self.engine.sample(now, Some(&metrics)) {
                self.switches.push((self.ms, switch.to));
                self.engine.succeeded();
            }
        }
    }

    fn told(&self) -> Vec<bool> {
        self.changes.iter().map(|(_, of)| of.is_missed).collect()
    }
}

/// What TCP does with a deep queue, and a graft does not.
fn deep(class: &str) -> u64 {
    if fills_queues(class) { 900 } else { 10 }
}

#[test]
fn max_delay__leaves_what_fills_the_queue() {
    let mut run = Run::new(engine(delay(200)));
    run.go(30, 20, 0.0, deep, |_| None);
    let [(at, to)] = run.switches[..] else {
        panic!("{:?}", run.switches);
    };
    // Not TCP under another control, which fills the queue as well; and not before it is certain.
    assert_eq!(to, STREAM);
    assert!((3000..=4000).contains(&at), "{at}");
    assert_eq!(run.told(), [true, false], "{:?}", run.changes);
    assert_eq!(run.changes[0].1.bound, Bound::MaxDelay);
    assert_eq!(run.engine.missed().count(), 0);
    let over = run.engine.passed_over(run.ms * MS);
    assert!(over.is_some_and(fills_queues), "{over:?}");
}

#[test]
fn max_delay__without_the_bound_nothing_is_left() {
    let mut run = Run::new(engine(Bounds::default()));
    run.go(60, 20, 0.0, deep, |_| Some(1));
    assert!(run.changes.is_empty());
    assert!(
        !run.switches.iter().any(|(_, to)| *to == STREAM),
        "{:?}",
        run.switches
    );
    // Nor with one that is kept.
    let mut run = Run::new(engine(delay(2000)));
    run.go(60, 20, 0.0, deep, |_| Some(1));
    assert!(run.changes.is_empty());
    assert!(
        !run.switches.iter().any(|(_, to)| *to == STREAM),
        "{:?}",
        run.switches
    );
}

/// The path itself is too long: it is told once, and nothing flaps.
#[test]
fn max_delay__that_no_carrier_keeps_is_told_and_little_is_tried() {
    let mut run = Run::new(engine(delay(100)));
    run.go(600, 600, 0.0, |_| 0, |_| None);
    assert_eq!(run.told(), [true]);
    assert_eq!(run.engine.missed().collect::<Vec<_>>(), [Bound::MaxDelay]);
    // Each of five classes once, and again after five minutes.
    assert!(run.switches.len() <= 10, "{:?}", run.switches);
    // And kept again where the path is shorter.
    run.go(10, 20, 0.0, |_| 0, |_| None);
    assert_eq!(run.told(), [true, false]);
}

#[test]
fn min_throughput__passes_cubic_over_where_losses_bound_it() {
    // Nobody knows it to be slow: by its response function CUBIC has 1.4 Mbit/s here.
    let wanted = |bounds| {
        let mut engine = engine(bounds);
        engine.begin(0, &path(100, 0, 0.01, 1000));
        let is_kept = |choice| engine.keeps(0, choice);
        [None, UNKNOWN, STREAM].map(is_kept)
    };
    assert_eq!(wanted(throughput(5_000_000)), [false, true, true]);
    assert_eq!(wanted(throughput(500_000)), [true; 3]);
    assert_eq!(wanted(Bounds::default()), [true; 3]);
}

#[test]
fn min_throughput__leaves_what_misses_it() {
    let mut run = Run::new(engine(throughput(5_000_000)));
    let rate = |class: &str| {
        Some(if class == "graft:stream" {
            7_000_000
        } else {
            2_000_000
        })
    };
    run.go(60, 20, 0.0, |_| 0, rate);
    assert_eq!(
        run.switches.last().map(|(_, to)| *to),
        Some(STREAM),
        "{:?}",
        run.switches
    );
    assert_eq!(run.told(), [true, false]);
    // A rate around the bound is neither.
    let noisy = |_: &str| Some(5_200_000);
    let before = run.switches.len();
    run.go(60, 20, 0.0, |_| 0, noisy);
    assert_eq!((run.told().len(), run.switches.len()), (2, before));
    // What nobody can tell changes nothing.
    run.go(60, 20, 0.0, |_| 0, |_| None);
    assert_eq!((run.told().len(), run.switches.len()), (2, before));
}

#[test]
fn note_outcome__a_moment_is_no_miss() {
    let mut run = Run::new(engine(delay(200)));
    for _ in 0..20 {
        run.go(2, 20, 0.0, |_| 900, |_| None);
        run.go(2, 20, 0.0, |_| 0, |_| None);
    }
    assert!(run.changes.is_empty(), "{:?}", run.changes);
    // A rule's conditions have no bounds.
    let mut plan = Engine::new(Plan {
        conditions: Vec::new(),
        dwell: DWELL,
    })
    .with_bounds(delay(1));
    let outcome = Outcome::of(&path(900, 0, 0.0, 1));
    for at in 0..100 {
        assert_eq!(plan.note_outcome(at * 1000 * MS, &outcome), [None; 2]);
    }
}

#[test]
fn parse_rate__reads_what_rules_have() {
    for (text, bits) in [
        ("5M", 5_000_000),
        ("5Mbit/s", 5_000_000),
        ("2.5 Mbit", 2_500_000),
        ("800k", 800_000),
        ("1G", 1_000_000_000),
        ("64bit/s", 64),
    ] {
        assert_eq!(parse_rate(text), Ok(bits), "{text}");
    }
    for text in ["", "5", "5 MB", "-5M", "0M", "5M and", "99999G", "M"] {
        assert!(parse_rate(text).is_err(), "{text}");
    }
    assert_eq!(rate_in_words(2_500_000), "2.5Mbit/s");
    assert_eq!(time_in_words(Duration::from_millis(200)), "200ms");
}

proptest! {
    /// Whatever is measured: two switches are the dwell apart, and a miss is told before it is kept.
    #[test]
    fn note_outcome__keeps_its_promises(
        steps in proptest::collection::vec((0_u64..2000, 1_u64..900, 0_u64..2000, 0_u64..9_000_000, any::<bool>()), 1..200),
        max_ms in 1_u64..1000,
    ) {
        let mut engine = engine(Bounds { max_delay: Some(Duration::from_millis(max_ms)), ..throughput(4_000_000) });
        let (mut ms, mut last, mut missed) = (0, None, [false; 2]);
        for (after, rtt, queue, rate, is_up) in steps {
            ms += after;
            let metrics = path(rtt, queue, 0.0, ms);
            let outcome = Outcome { throughput: Some(rate), ..Outcome::of(&metrics) };
            for (place, change) in engine.note_outcome(ms * MS, &outcome).into_iter().enumerate() {
                if let Some(change) = change {
                    prop_assert_ne!(missed[place], change.is_missed);
                    missed[place] = change.is_missed;
                }
            }
            if engine.sample(ms * MS, Some(&metrics)).is_some() {
                if let Some(last) = last {
                    prop_assert!(ms - last >= 10_000);
                }
                last = Some(ms);
                match is_up {
                    true => engine.succeeded(),
                    false => drop(engine.failed(ms * MS)),
                }
            }
        }
    }
}
