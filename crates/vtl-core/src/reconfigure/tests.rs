use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::netmon::{Bandwidth, Link, Medium};

const MS: u64 = 1_000_000;

fn condition(text: &str) -> Condition {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn engine(conditions: &[&str], dwell_ms: u64) -> Engine {
    Engine::new(Plan {
        conditions: conditions.iter().map(|text| condition(text)).collect(),
        dwell: Duration::from_millis(dwell_ms),
    })
}

fn rtt(ms: u64) -> Metrics {
    Metrics {
        rtt: Some(Duration::from_millis(ms)),
        ..Metrics::default()
    }
}

fn bandwidth(rate: u64, at_least: bool) -> Metrics {
    Metrics {
        bandwidth: Some(Bandwidth {
            rate,
            at_least,
            error: 0.0,
        }),
        ..Metrics::default()
    }
}

/// Samples of round-trip times, one each 100 ms from a time on, in ms; the choice behind each.
fn choices(engine: &mut Engine, from_ms: u64, rtts: &[u64]) -> Vec<Choice> {
    let samples = (0..).zip(rtts).map(|(i, ms)| {
        if engine
            .sample((from_ms + i * 100) * MS, Some(&rtt(*ms)))
            .is_some()
        {
            engine.succeeded();
        }
        engine.current()
    });
    samples.collect()
}

#[test]
fn condition__reads_and_writes() {
    for (text, canonical) in [
        ("rtt >= 300ms for 200ms", "rtt >= 300ms for 200ms"),
        ("RTT>=0.3s FOR 0.2 S", "rtt >= 300ms for 200ms"),
        ("loss > 1.5%", "loss > 1.5%"),
        (
            "rate<2000kbit and loss>=.01 % for 2s",
            "rate < 2Mbit/s and loss >= 0.01% for 2s",
        ),
        ("rate <= 1Gbit/s", "rate <= 1Gbit/s"),
        ("jitter > 1500us", "jitter > 1.5ms"),
        ("queueing > 1us for 1h", ""),
        ("queueing > 1us for 3600s", "queueing > 1us for 3600s"),
        ("loss >= 100%", "loss >= 100%"),
    ] {
        let read = text.parse::<Condition>();
        match canonical {
            "" => assert!(read.is_err(), "{text}"),
            _ => assert_eq!(condition(text).to_string(), canonical),
        }
    }
}

#[test]
fn condition__refuses_with_one_sentence() {
    let five = ["rtt > 1ms"; 5].join(" and ");
    let long = format!("rtt > 1ms{}", " ".repeat(300));
    for (text, about) in [
        ("", "there is nothing, where a figure belongs"),
        ("rt >= 3ms", "no figure \"rt\": there are rtt, jitter"),
        (
            "rtt 300ms",
            "there is \"300\", where >=, >, <= or < belongs",
        ),
        ("rtt == 3ms", "there is \"==\""),
        ("rtt =< 3ms", "there is \"=<\""),
        ("rtt > ", "where a number belongs"),
        ("rtt > 300", "\"\" is no unit of rtt: take s, ms, us"),
        ("rtt > 300 for 2s", "\"\" is no unit of rtt"),
        ("rtt > 3%", "\"%\" is no unit of rtt"),
        ("loss > 3ms", "\"ms\" is no unit of loss: take %"),
        ("rate > 3MB", "\"MB\" is no unit of rate: take Gbit/s"),
        ("loss > 101%", "no number above 0 and up to 100%"),
        ("loss > 0%", "no number above 0"),
        ("rtt > 0.0001us", "no number above 0"),
        ("rtt > 3601s", "up to 3600s"),
        ("rtt > -3ms", "\"-\" is no number"),
        ("rtt > infms", "\"infms\" is no number"),
        ("rtt > 1.2.3ms", "\"1.2.3\" is no number"),
        ("rtt > 1e3ms", "\"e\" is no unit"),
        (
            "rate > 99999999999999999999999999999Gbit",
            "up to 10000Gbit/s",
        ),
        ("rtt > 3ms for", "where a number belongs"),
        ("rtt > 3ms for 2", "\"\" is no unit of a time"),
        ("rtt > 3ms for 2s more", "\"more\", where the end belongs"),
        ("rtt > 3ms or loss > 1%", "\"or\", where \"and\""),
        (&five, "at most 4 comparisons"),
        (&long, "at most 256"),
    ] {
        let error = text.parse::<Condition>().expect_err(text).to_string();
        assert!(error.contains(about), "{text}: {error}");
    }
    assert_eq!(parse_time(" 10 s"), Ok(Duration::from_secs(10)));
    assert!(parse_time("10s now").is_err() && parse_time("10").is_err());
}

#[test]
fn sample__waits_as_long_as_the_condition_says_and_ends_behind_the_hysteresis() {
    let mut engine = engine(&["rtt >= 300ms for 200ms"], 0);
    let some = Some(0);
    // A moment below begins the time anew.
    let began = choices(&mut engine, 0, &[320, 320, 299, 300, 300, 300]);
    assert_eq!(began, [None, None, None, None, None, some]);
    // 270 ms is not clearly below, 269 is, if it lasts.
    let near = choices(&mut engine, 1000, &[271, 270, 270, 270, 269, 269, 270]);
    assert_eq!(near, [some; 7]);
    let ended = choices(&mut engine, 2000, &[269, 100, 20, 280]);
    assert_eq!(ended, [some, some, None, None]);
}

#[test]
fn sample__what_is_unknown_begins_and_ends_nothing() {
    let mut engine = engine(&["rtt >= 300ms for 200ms"], 0);
    for (at_ms, metrics) in [(0, Some(rtt(400))), (100, None), (200, Some(rtt(400)))] {
        assert_eq!(engine.sample(at_ms * MS, metrics.as_ref()), None);
    }
    let switch = engine.sample(400 * MS, Some(&rtt(400)));
    assert_eq!(switch.map(|switch| switch.to), Some(Some(0)));
    assert_eq!(engine.sample(401 * MS, Some(&rtt(1))), None);
    assert_eq!(engine.sample(801 * MS, Some(&rtt(1))), None, "being made");
    engine.succeeded();
    let switch = engine.sample(802 * MS, Some(&rtt(1)));
    assert_eq!(switch.map(|switch| switch.to), Some(None));
    let mut engine = Engine::resume(engine.plan().clone(), Some(0));
    assert!(engine.holds(0) && engine.current() == Some(0));
    for at_ms in [500, 1000, 100_000] {
        let unknown = [None, Some(Metrics::default())];
        for metrics in &unknown {
            assert_eq!(engine.sample(at_ms * MS, metrics.as_ref()), None);
        }
    }
    assert_eq!(engine.sample(100_100 * MS, Some(&rtt(1))), None);
    assert_eq!(engine.sample(100_200 * MS, None), None, "begins anew");
    assert_eq!(engine.sample(100_300 * MS, Some(&rtt(1))), None);
    assert!(engine.sample(100_500 * MS, Some(&rtt(1))).is_some());
}

#[test]
fn sample__the_first_that_holds_counts_after_the_dwell() {
    let mut engine = engine(&["rtt > 500ms", "rtt > 100ms"], 1000);
    let [none, far, near] = [None, Some(0), Some(1)];
    let rtts = [50, 200, 600, 600, 600, 600, 600, 600, 600, 600, 600, 600];
    let all = choices(&mut engine, 0, &rtts);
    // From the second to the first one ten samples later, though that holds at once.
    let mut wanted = vec![none];
    wanted.resize(11, near);
    wanted.push(far);
    assert_eq!(all, wanted);
    assert!(engine.holds(0) && engine.holds(1) && !engine.holds(2));
}

#[test]
fn failed__goes_back_and_waits_for_the_dwell() {
    let mut engine = engine(&["rtt > 500ms", "rtt > 100ms"], 1000);
    let sample = |engine: &mut Engine, ms: u64, of: u64| {
        let switch = engine.sample(ms * MS, Some(&rtt(of)));
        switch.map(|switch| switch.to)
    };
    assert_eq!(sample(&mut engine, 0, 600), Some(Some(0)));
    assert!(engine.failed(300 * MS), "worth a report");
    assert_eq!(engine.current(), None);
    // Neither before the dwell of the switch has passed, nor what failed before its own.
    assert_eq!(sample(&mut engine, 900, 600), None);
    assert_eq!(sample(&mut engine, 1000, 600), Some(Some(1)), "the next");
    engine.succeeded();
    assert_eq!(sample(&mut engine, 2000, 600), Some(Some(0)), "again");
    assert!(!engine.failed(2000 * MS), "known");
    assert_eq!(engine.current(), Some(1));
    assert_eq!(sample(&mut engine, 3000, 600), Some(Some(0)));
    engine.succeeded();
    // The way back may fail, too, and then nothing else is chosen meanwhile.
    assert_eq!(sample(&mut engine, 4000, 10), Some(None));
    assert!(engine.failed(4900 * MS), "the rule's own carrier");
    assert_eq!(sample(&mut engine, 5100, 10), None);
    assert_eq!(engine.current(), Some(0));
    assert_eq!(sample(&mut engine, 5900, 10), Some(None));
}

#[test]
fn sample__a_rate_that_is_a_lower_bound_proves_no_less() {
    for (text, metrics, wanted) in [
        ("rate < 2Mbit", bandwidth(1_000_000, false), true),
        ("rate < 2Mbit", bandwidth(1_000_000, true), false),
        ("rate >= 2Mbit", bandwidth(2_000_000, true), true),
        ("rate >= 2Mbit", bandwidth(1_000_000, true), false),
    ] {
        let mut engine = engine(&[text], 0);
        assert_eq!(engine.sample(0, Some(&metrics)).is_some(), wanted, "{text}");
    }
    // What holds ends by what is measured only.
    let mut engine = engine(&["rate >= 2Mbit"], 0);
    assert!(
        engine
            .sample(0, Some(&bandwidth(3_000_000, true)))
            .is_some()
    );
    engine.succeeded();
    assert!(
        engine
            .sample(1, Some(&bandwidth(1_000_000, true)))
            .is_none()
    );
    assert!(
        engine
            .sample(2, Some(&bandwidth(1_000_000, false)))
            .is_some()
    );
}

#[test]
fn sample__all_comparisons_and_every_figure() {
    let path = Metrics {
        min_rtt: Some(Duration::from_millis(20)),
        rtt: Some(Duration::from_millis(50)),
        rtt_variance: Some(Duration::from_millis(7)),
        loss: Some(0.02),
        ..bandwidth(10_000_000, false)
    };
    for (text, wanted) in [
        (
            "queueing >= 30ms and jitter >= 7ms and loss >= 2% and rate <= 10Mbit",
            true,
        ),
        ("queueing > 30ms", false),
        ("jitter > 7ms", false),
        ("loss > 2%", false),
        ("loss < 2%", false),
        ("rate < 10Mbit", false),
        ("rtt <= 50ms and rtt >= 50ms", true),
        ("rtt <= 50ms and rtt > 50ms", false),
    ] {
        let mut engine = engine(&[text], 0);
        assert_eq!(engine.sample(0, Some(&path)).is_some(), wanted, "{text}");
    }
    let text = condition("rtt > 1ms and loss > 1% and rate > 1bit").figures(&path);
    assert_eq!(text, "rtt 50ms, loss 2%, rate 10Mbit/s");
    let text = condition("jitter > 1ms and rate > 1bit").figures(&bandwidth(1500, true));
    assert_eq!(text, "jitter unknown, rate 1.5kbit/s or more");
}

#[test]
fn sample__the_link_layer_by_itself() {
    let on = |medium, rate, signal| Metrics {
        link: Link {
            medium: Some(medium),
            rate: Some(rate),
            signal: Some(signal),
        },
        ..Metrics::default()
    };
    let mut engine = engine(
        &["medium is wifi and signal < 30%", "link-rate < 10Mbit/s"],
        0,
    );
    let mut decides = |now, path: &Metrics| {
        engine.sample(now, Some(path));
        engine.succeeded();
        engine.current()
    };
    assert_eq!(decides(0, &on(Medium::Ethernet, 1_000_000_000, 0.1)), None);
    assert_eq!(decides(1, &on(Medium::WiFi, 50_000_000, 0.2)), Some(0));
    assert_eq!(
        decides(2, &on(Medium::WiFi, 50_000_000, 0.32)),
        Some(0),
        "hysteresis"
    );
    assert_eq!(decides(3, &on(Medium::WiFi, 50_000_000, 0.4)), None);
    assert_eq!(decides(4, &on(Medium::Cellular, 5_000_000, 0.2)), Some(1));
    // It does not tell any more.
    assert_eq!(decides(5, &Metrics::default()), Some(1));
    let text = condition("medium is tunnel and signal > 1% and link-rate > 1bit").figures(&on(
        Medium::Cellular,
        5_000_000,
        0.25,
    ));
    assert_eq!(text, "medium cellular, signal 25%, link-rate 5Mbit/s");
}

#[test]
fn parse__a_medium_has_a_name() {
    let wrong = |text: &str| text.parse::<Condition>().unwrap_err().to_string();
    assert_eq!(
        wrong("medium is air"),
        "\"air\" is no medium: take ethernet, wifi, cellular, tunnel"
    );
    assert!(wrong("medium >= 1").contains("where \"is\" belongs"));
    assert!(wrong("rtt is 5ms").contains("where >=, >, <= or < belongs"));
    assert_eq!(
        condition("Medium IS WiFi for 1s").to_string(),
        "medium is wifi for 1s"
    );
}

fn any_condition() -> impl Strategy<Value = Condition> {
    let medium = (0..Medium::ALL.len() as u64).prop_map(|threshold| Term {
        figure: Figure::Medium,
        relation: Relation::Is,
        threshold,
    });
    let term =
        (0..7_usize, 0..4_usize, 1..1_000_000_u64).prop_map(|(figure, relation, threshold)| {
            let relations = [
                Relation::AtLeast,
                Relation::Above,
                Relation::AtMost,
                Relation::Below,
            ];
            Term {
                figure: Figure::ALL[figure],
                relation: relations[relation],
                threshold,
            }
        });
    let term = prop_oneof![4 => term, 1 => medium];
    let hold = (0..3_600_000_000_u64).prop_map(Duration::from_micros);
    (prop::collection::vec(term, 1..5), hold).prop_map(|(terms, hold)| Condition { terms, hold })
}

proptest! {
    #[test]
    fn condition__reads_what_it_writes(condition in any_condition()) {
        prop_assert_eq!(condition.to_string().parse(), Ok(condition));
    }

    #[test]
    fn condition__never_panics(
        text in "(rtt|loss|rate|medium|is|wifi|and|for|>=|<|[0-9.]{1,30}|ms|%|Gbit/s|\\PC| ){0,12}"
    ) {
        if let Ok(condition) = text.parse::<Condition>() {
            prop_assert_eq!(condition.to_string().parse(), Ok(condition));
        }
        let _ = parse_time(&text);
    }

    /// Whatever the path does and whatever fails: no two switches within the dwell; a switch leads to the first condition
    /// that holds or, if none does, to the rule's own carrier, unless what comes before has failed; and what is unknown
    /// changes nothing.
    #[test]
    fn sample__keeps_its_promises(
        dwell_ms in 0..2000_u64,
        samples in prop::collection::vec((1..300_u64, prop::option::of(0..500_u64), any::<bool>()), 1..200),
    ) {
        let mut engine = engine(&["rtt > 400ms for 300ms", "rtt > 200ms", "rtt < 50ms for 1s"], dwell_ms);
        let (mut now_ms, mut last, mut has_failed) = (0, None, false);
        for (pause_ms, sample, fails) in samples {
            now_ms += pause_ms;
            let held: Vec<bool> = (0..3).map(|i| engine.holds(i)).collect();
            let before = engine.current();
            let switch = engine.sample(now_ms * MS, sample.map(rtt).as_ref());
            let holds: Vec<bool> = (0..3).map(|i| engine.holds(i)).collect();
            if sample.is_none() {
                prop_assert_eq!(&held, &holds);
            }
            let Some(switch) = switch else {
                prop_assert_eq!(engine.current(), before);
                continue;
            };
            prop_assert_eq!((switch.from, switch.to), (before, engine.current()));
            prop_assert_ne!(switch.from, switch.to);
            prop_assert!(last.is_none_or(|last| now_ms - last >= dwell_ms));
            last = Some(now_ms);
            let first = holds.iter().position(|holds| *holds);
            prop_assert!(has_failed || switch.to == first);
            if fails {
                has_failed = true;
                engine.failed(now_ms * MS);
                prop_assert_eq!(engine.current(), before);
            } else {
                engine.succeeded();
            }
        }
    }
}
