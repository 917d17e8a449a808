use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::netmon::Bandwidth;

const MS: u64 = 1_000_000;
const DWELL: Duration = Duration::from_secs(10);
/// Places among [`CLASSES`].
const STREAM: Choice = Some(2);

/// A path of which so many packets have told.
fn path(rtt_ms: u64, loss: f64, packets: u64) -> Metrics {
    Metrics {
        min_rtt: Some(Duration::from_millis(rtt_ms)),
        rtt: Some(Duration::from_millis(rtt_ms)),
        loss: Some(loss),
        clear_loss: Some(loss),
        loss_burst: Some(1.0),
        packets,
        ..Metrics::default()
    }
}

fn far(packets: u64) -> Metrics {
    path(600, 0.02, packets)
}

fn near(packets: u64) -> Metrics {
    Metrics {
        bandwidth: Some(Bandwidth {
            rate: 10_000_000,
            at_least: false,
            error: 0.0,
        }),
        ..path(5, 0.0, packets)
    }
}

fn engine() -> Engine {
    Engine::by_model(Some(Profile::LossSensitive), DWELL)
}

fn sample(engine: &mut Engine, ms: u64, metrics: &Metrics) -> Option<Choice> {
    let switch = engine.sample(ms * MS, Some(metrics));
    switch.map(|switch| switch.to)
}

#[test]
fn by_model__two_observations_agree_before_a_switch() {
    assert_eq!(CLASSES[2], "graft:stream");
    let mut engine = engine();
    assert_eq!(sample(&mut engine, 0, &far(100)), None);
    assert_eq!(sample(&mut engine, 400, &far(200)), None, "too early");
    assert_eq!(sample(&mut engine, 900, &far(100)), None, "nothing new");
    assert_eq!(sample(&mut engine, 1000, &near(200)), None, "disagrees");
    assert_eq!(sample(&mut engine, 2000, &far(300)), None);
    assert_eq!(engine.decision(), None);
    assert_eq!(sample(&mut engine, 2500, &far(400)), Some(STREAM));
    let decision = engine.decision().expect("decided");
    assert_eq!(decision.explanation.class, "graft:stream");
    assert_eq!(decision.features.rtt_ms, Some(600.0));
    // What is long ago does not agree with anything.
    let mut engine = self::engine();
    assert_eq!(sample(&mut engine, 0, &far(100)), None);
    assert_eq!(sample(&mut engine, 10_001, &far(200)), None);
    assert_eq!(sample(&mut engine, 10_501, &far(300)), Some(STREAM));
}

#[test]
fn by_model__what_is_unknown_changes_nothing() {
    let mut engine = engine();
    let unknown = [
        path(600, 0.02, ENOUGH_PACKETS - 1),
        Metrics {
            min_rtt: None,
            ..far(100)
        },
        Metrics {
            loss: None,
            clear_loss: None,
            ..far(101)
        },
    ];
    for round in 0..5 {
        for (i, metrics) in (0..).zip(&unknown) {
            let at = round * 10_000 + i * 1000;
            assert_eq!(sample(&mut engine, at, metrics), None);
        }
        assert_eq!(engine.sample(round * 10_000 * MS, None), None);
    }
    assert_eq!((engine.current(), engine.decision()), (UNKNOWN, None));
    assert_eq!(engine.begin(0, &unknown[0]), None);
    // Between two that agree, too.
    assert_eq!(sample(&mut engine, 60_000, &far(100)), None);
    assert_eq!(engine.sample(60_300 * MS, None), None);
    assert_eq!(sample(&mut engine, 60_600, &unknown[0]), None);
    assert_eq!(sample(&mut engine, 61_000, &far(200)), Some(STREAM));
}

#[test]
fn begin__a_path_that_is_known_decides_at_once() {
    let mut engine = engine();
    let switch = engine.begin(0, &far(1000)).expect("a switch");
    assert_eq!((switch.from, switch.to), (UNKNOWN, STREAM));
    engine.succeeded();
    // Then as any other: by two that agree, after the dwell.
    assert_eq!(sample(&mut engine, 1000, &near(1)), None);
    for ms in (2000..10_000).step_by(1000) {
        assert_eq!(sample(&mut engine, ms, &near(ms)), None, "{ms}");
    }
    assert_eq!(sample(&mut engine, 10_000, &near(10_000)), Some(None));
    let mut clean = self::engine();
    let switch = clean.begin(0, &near(1000)).expect("a switch");
    assert_eq!((switch.from, switch.to), (UNKNOWN, None));
    assert!(clean.decision().is_some());
    let mut plan = Engine::new(Plan {
        conditions: Vec::new(),
        dwell: DWELL,
    });
    assert_eq!(plan.begin(0, &far(1000)), None, "it has no model");
}

#[test]
fn failed__the_next_best_of_the_shares() {
    let mut engine = engine();
    assert_eq!(engine.begin(0, &far(1000)).map(|s| s.to), Some(STREAM));
    assert!(engine.failed(9000 * MS), "worth a report");
    assert_eq!(engine.current(), UNKNOWN);
    let shares = &engine.decision().expect("decided").explanation.shares;
    let next = shares[1].0;
    assert_ne!(next, "graft:stream");
    let next = CLASSES.iter().position(|class| *class == next);
    let next = next.filter(|place| *place > 0);
    let to = sample(&mut engine, 10_000, &far(1100)).unwrap_or(None);
    assert_eq!(to, next);
    engine.succeeded();
    // What has failed is tried again after its dwell, and that of the switch.
    assert_eq!(sample(&mut engine, 19_500, &far(1200)), None);
    assert_eq!(sample(&mut engine, 20_000, &far(1300)), Some(STREAM));
}

/// Where nothing can be had, and each attempt takes as long as the dwell.
#[test]
fn failed__each_class_has_its_turn() {
    let mut engine = engine();
    let first = engine.begin(0, &far(1000)).expect("a switch");
    let mut tried = vec![first.to];
    let mut is_pending = true;
    for ms in (10_000..600_000).step_by(10_000) {
        if is_pending {
            engine.failed(ms * MS);
        }
        let to = sample(&mut engine, ms, &far(1000 + ms));
        is_pending = to.is_some();
        tried.extend(to);
    }
    let decision = engine.decision().expect("decided");
    let shares = decision.explanation.shares.iter();
    // Up to what it goes by meanwhile.
    for (class, _) in shares.take_while(|(class, _)| *class != CLASSES[1]) {
        let place = CLASSES.iter().position(|known| known == class);
        assert!(tried.contains(&place), "{class}: {tried:?}");
    }
    assert_eq!(engine.made(), UNKNOWN);
}

#[test]
fn lost__goes_back_to_tcp() {
    let mut engine = engine();
    engine.begin(0, &far(1000)).expect("a switch");
    assert_eq!((engine.current(), engine.made()), (STREAM, UNKNOWN));
    engine.succeeded();
    assert_eq!(engine.made(), STREAM);
    engine.lost(5000 * MS);
    assert_eq!((engine.current(), engine.made()), (UNKNOWN, UNKNOWN));
    // Not that again, before its wait is over.
    let next = sample(&mut engine, 10_000, &far(1100)).unwrap_or(None);
    assert_ne!(next, STREAM);
}

/// A carrier that measures the rate is not left because another one does not.
#[test]
fn observe__a_rate_is_remembered() {
    let mut engine = engine();
    engine.begin(0, &near(1000));
    let unmeasured = path(5, 0.0, 2000);
    let rate = |engine: &Engine| engine.decision().and_then(|of| of.features.rate_mbit);
    assert_eq!(rate(&engine), Some(10.0));
    sample(&mut engine, 1000, &unmeasured);
    assert_eq!(rate(&engine), Some(10.0));
    let after = path(5, 0.0, 3000);
    sample(&mut engine, 310_000, &after);
    sample(&mut engine, 311_000, &path(5, 0.0, 4000));
    assert_eq!(rate(&engine), None);
}

#[test]
fn resume_by_model__goes_on_until_the_figures_say_otherwise() {
    let resume = |choice| Engine::resume_by_model(None, DWELL, choice);
    assert_eq!(resume(STREAM).current(), STREAM);
    for none in [None, Some(0), Some(CLASSES.len())] {
        assert_eq!(resume(none).current(), UNKNOWN);
    }
    let mut engine = resume(STREAM);
    assert_eq!(engine.sample(0, None), None);
    assert_eq!(sample(&mut engine, 0, &near(100)), None);
    assert_tcp(sample(&mut engine, 1000, &near(200)));
}

/// A switch to TCP, whichever.
fn assert_tcp(switch: Option<Choice>) {
    assert!([Some(None), Some(UNKNOWN)].contains(&switch), "{switch:?}");
}

/// Two observations that agree, a second apart.
fn observe_two(engine: &mut Engine, from_ms: u64, of: impl Fn(u64) -> Metrics) -> Option<Choice> {
    assert_eq!(sample(engine, from_ms, &of(from_ms + 100)), None);
    sample(engine, from_ms + 1000, &of(from_ms + 1100))
}

#[test]
fn note_moving__tcp_that_does_well_is_left_in_the_next_pause() {
    assert_eq!(CLASSES[..TCP_CLASSES], ["tcp", "tcp:bbr"]);
    for loss in [0.0, 0.02, 0.07] {
        let does_well = |packets| path(600, loss, packets);
        let mut engine = engine();
        engine.note_moving(true);
        assert_eq!(observe_two(&mut engine, 0, does_well), None);
        assert_eq!(
            engine.decision().expect("decided").explanation.class,
            "graft:stream"
        );
        assert_eq!(sample(&mut engine, 5000, &does_well(9000)), None);
        // Nothing new is told in a pause.
        engine.note_moving(false);
        let switch = engine.sample(6000 * MS, None).expect("a switch");
        assert_eq!((switch.from, switch.to), (UNKNOWN, STREAM));
    }
}

#[test]
fn note_moving__other_tcp_is_left_at_once() {
    let mut engine = engine();
    engine.note_moving(true);
    let suffers = |packets| path(600, 0.1, packets);
    assert_eq!(observe_two(&mut engine, 0, suffers), Some(STREAM));
    // A graft is, too: TCP is no better at waiting.
    let mut engine = Engine::resume_by_model(None, DWELL, STREAM);
    engine.note_moving(true);
    assert_tcp(observe_two(&mut engine, 0, near));
}

/// What TCP reaches where it waits for timeouts is not the path's rate: the choice neither calls that too slow nor unsure.
#[test]
fn observe__a_rate_under_heavy_loss_is_a_lower_bound() {
    let crawls = |mbit: u64| {
        move |packets| Metrics {
            bandwidth: Some(Bandwidth {
                rate: mbit * 100_000,
                at_least: false,
                error: 0.0,
            }),
            ..path(200, 0.14, packets)
        }
    };
    for tenths in [3, 15] {
        let mut engine = engine();
        engine.note_moving(true);
        let switched = observe_two(&mut engine, 0, crawls(tenths));
        assert_eq!(switched, Some(STREAM), "0.1 x {tenths} Mbit/s");
        // Nor is one that was measured on the way there.
        let mut engine = self::engine();
        engine.note_moving(true);
        let on_the_way = |packets| Metrics {
            loss: Some(0.05),
            clear_loss: Some(0.05),
            ..crawls(tenths)(packets)
        };
        for second in 0..60 {
            let packets = 100 * (second + 1);
            let seen = match second {
                0..5 => on_the_way(packets),
                _ => crawls(tenths)(packets),
            };
            if sample(&mut engine, 1000 * second, &seen).is_some() {
                engine.succeeded();
            }
        }
        assert_eq!(engine.current(), STREAM, "0.1 x {tenths} Mbit/s");
    }
}

/// A path onto which few packets fit.
fn campus(packets: u64) -> Metrics {
    Metrics {
        bandwidth: Some(Bandwidth {
            rate: 16_000_000,
            at_least: false,
            error: 0.0,
        }),
        ..path(10, 0.02, packets)
    }
}

#[test]
fn note_moving__bbr_begins_at_once() {
    let mut engine = engine();
    assert_eq!(
        engine.begin(0, &near(1000)).map(|switch| switch.to),
        Some(None)
    );
    engine.succeeded();
    engine.note_moving(true);
    assert_eq!(observe_two(&mut engine, 10_000, campus), Some(UNKNOWN));
    assert_eq!(CLASSES[1], "tcp:bbr");
    let decision = engine.decision().expect("decided");
    assert_eq!(decision.explanation.class, "graft:stream");
    assert!(decision.is_unsure, "so TCP in its place");
}

proptest! {
    /// Whatever the path does and whatever fails: no two switches within the dwell, what is unknown changes nothing, and
    /// a switch leads to what the model has decided, unless that has failed or is not sure.
    #[test]
    fn by_model__keeps_its_promises(
        samples in prop::collection::vec(
            (1..3000_u64, prop::option::of((1..700_u64, 0.0..0.2_f64)), any::<bool>()), 1..100
        ),
    ) {
        let mut engine = engine();
        let (mut now_ms, mut packets, mut last, mut has_failed) = (0, 0, None, false);
        for (pause_ms, figures, fails) in samples {
            now_ms += pause_ms;
            packets += 1;
            let before = engine.clone();
            let metrics = figures.map(|(rtt, loss)| path(rtt, loss, ENOUGH_PACKETS + packets));
            let switch = engine.sample(now_ms * MS, metrics.as_ref());
            if metrics.is_none() {
                prop_assert_eq!(engine.decision(), before.decision());
            }
            let Some(switch) = switch else {
                prop_assert_eq!(engine.current(), before.current());
                continue;
            };
            prop_assert_eq!((switch.from, switch.to), (before.current(), engine.current()));
            prop_assert_ne!(switch.from, switch.to);
            prop_assert!(last.is_none_or(|last| now_ms - last >= 10_000));
            last = Some(now_ms);
            let class = CLASSES[switch.to.unwrap_or(0)];
            let decided = engine.decision().map(|decision| match decision.is_unsure {
                true => CLASSES[1],
                false => decision.explanation.class,
            });
            prop_assert!(has_failed || decided == Some(class));
            if fails {
                has_failed = true;
                engine.failed(now_ms * MS);
                prop_assert_eq!(engine.current(), before.current());
            } else {
                engine.succeeded();
            }
        }
    }
}

/// Where a graft is surely better for streams, and not for files.
fn lossy(packets: u64) -> Metrics {
    path(40, 0.04, packets)
}

#[test]
fn set_profile__moves_a_flow_that_turns_out_to_be_a_stream() {
    let mut engine = Engine::by_model(None, DWELL);
    engine.note_moving(true);
    assert_eq!(sample(&mut engine, 0, &lossy(100)), None);
    assert_eq!(sample(&mut engine, 1000, &lossy(200)), None);
    assert!(engine.decision().expect("decided").is_unsure);
    // The bytes have shown what it is: two observations have to agree, as with any change.
    engine.set_profile(Some(Profile::TimeSensitive));
    assert_eq!(sample(&mut engine, 2000, &lossy(200)), None, "nothing new");
    assert_eq!(sample(&mut engine, 2100, &lossy(300)), None, "one");
    assert_eq!(sample(&mut engine, 2400, &lossy(400)), None, "too early");
    assert_eq!(sample(&mut engine, 2600, &lossy(500)), Some(STREAM));
    engine.succeeded();
    assert_eq!(engine.profile(), Some(Profile::TimeSensitive));
    // Back, once the cost of a switch has been worth it; and no verdict that alternates makes more of them.
    let mut switches = 0;
    for at in (3000..63_000).step_by(1000) {
        let is_stream = at / 1000 % 2 == 0;
        let stream = is_stream.then_some(Profile::TimeSensitive);
        engine.set_profile(stream);
        engine.note_moving(false);
        switches += usize::from(sample(&mut engine, at, &lossy(at)).is_some());
        engine.succeeded();
    }
    assert_eq!(switches, 0, "no two observations agree");
    engine.set_profile(None);
    for at in (63_000..66_000).step_by(1000) {
        switches += usize::from(sample(&mut engine, at, &lossy(at)) == Some(UNKNOWN));
        engine.succeeded();
    }
    assert_eq!((switches, engine.current()), (1, UNKNOWN));
}

#[test]
fn set_profile__waits_for_the_dwell() {
    let mut engine = Engine::by_model(Some(Profile::TimeSensitive), DWELL);
    assert_eq!(engine.begin(0, &lossy(1000)).map(|s| s.to), Some(STREAM));
    engine.succeeded();
    engine.set_profile(Some(Profile::LossSensitive));
    let mut moved = None;
    for at in (1000..20_000).step_by(1000) {
        if let Some(to) = sample(&mut engine, at, &lossy(at)) {
            moved.get_or_insert((at, to));
            engine.succeeded();
        }
    }
    assert_eq!(moved, Some((10_000, UNKNOWN)));
    // A plan of a rule has no model: its carriers stay.
    let mut plan = Engine::new(Plan {
        conditions: Vec::new(),
        dwell: DWELL,
    });
    plan.set_profile(Some(Profile::TimeSensitive));
    assert_eq!((plan.profile(), plan.current()), (None, None));
}

/// What a stream sends at its own pace is not what the path carries.
#[test]
fn by_model__a_stream_says_nothing_of_the_path_s_rate() {
    let mut engine = Engine::by_model(Some(Profile::TimeSensitive), DWELL);
    let slow = Metrics {
        bandwidth: Some(Bandwidth {
            rate: 100_000,
            at_least: false,
            error: 0.0,
        }),
        ..lossy(1000)
    };
    assert_eq!(engine.begin(0, &slow).map(|s| s.to), Some(STREAM));
    let decision = engine.decision().expect("decided");
    assert_eq!(decision.features.rate_mbit, None);
}

/// A stream does not wait for a pause, as it has none; a file does.
#[test]
fn note_moving__a_stream_leaves_tcp_while_bytes_move() {
    for (profile, to) in [
        (Profile::TimeSensitive, Some(STREAM)),
        (Profile::LossSensitive, None),
    ] {
        let mut engine = Engine::by_model(Some(profile), DWELL);
        engine.note_moving(true);
        let long = |packets| path(200, 0.02, packets);
        assert_eq!(sample(&mut engine, 0, &long(100)), None);
        assert_eq!(sample(&mut engine, 1000, &long(200)), to, "{profile}");
    }
}

#[test]
fn set_learnt__comes_first_once_the_model_has_decided() {
    let mut engine = engine();
    engine.set_learnt(Some(STREAM));
    assert_eq!(sample(&mut engine, 0, &near(100)), None, "nothing decided");
    assert!(engine.wanted().is_empty() && !engine.follows_learnt());
    assert_eq!(sample(&mut engine, 1000, &near(200)), Some(STREAM));
    engine.succeeded();
    assert!(engine.follows_learnt());
    // What is wanted goes on behind TCP, each class once.
    let wanted = engine.wanted();
    assert!([None, UNKNOWN, STREAM].iter().all(|of| wanted.contains(of)));
    assert!(
        wanted
            .iter()
            .enumerate()
            .all(|(i, of)| !wanted[..i].contains(of))
    );
    // It fails: the model's choice.
    assert_eq!(sample(&mut engine, 2000, &near(300)), None);
    engine.lost(2000 * MS);
    assert_eq!(sample(&mut engine, 11_000, &near(400)), Some(None));
    engine.succeeded();
    // What is forgotten no longer counts.
    engine.set_learnt(None);
    for ms in (12_000..60_000).step_by(1000) {
        assert_eq!(sample(&mut engine, ms, &near(ms)), None, "{ms}");
    }
}
