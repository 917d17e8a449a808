//! Readers and what they get.

use std::{
    sync::atomic::AtomicBool,
    thread::{sleep, spawn},
};

use super::*;

fn removed(rule: usize) -> What {
    What::RuleRemoved {
        rule: rule.to_string().into(),
    }
}

fn emit(bus: &Bus, what: What) {
    bus.emit(what, UNIX_EPOCH);
}

fn wanted(since: Option<u64>) -> Wanted {
    Wanted {
        since,
        kinds: Vec::new(),
        wait: Some(Duration::ZERO),
        is_root: true,
    }
}

#[track_caller]
fn read(bus: &Bus, wanted: &Wanted) -> Events {
    bus.read(wanted, || false).expect("events")
}

#[test]
fn read__everything_once_and_in_order() {
    let bus = Bus::new(UNIX_EPOCH + Duration::from_secs(3));
    let start = 3 << 20;
    assert_eq!(read(&bus, &wanted(None)).last, start);
    for rule in 0..2 * PAGE {
        emit(&bus, removed(rule));
    }
    // What came before is not asked for.
    assert_eq!(read(&bus, &wanted(None)).events, []);
    let mut since = start;
    let mut all = Vec::new();
    while let Events { events, last } = read(&bus, &wanted(Some(since)))
        && !events.is_empty()
    {
        assert_eq!(events.last().map(|event| event.id), Some(last));
        since = last;
        all.extend(events);
    }
    let ids: Vec<u64> = all.iter().map(|event| event.id - start).collect();
    assert_eq!(ids, (1..=2 * PAGE as u64).collect::<Vec<_>>());
    assert_eq!(all[7].what, removed(7));
    assert_eq!(all[7].time, "1970-01-01T00:00:00.000Z");
}

#[test]
fn read__a_slow_reader_is_told_what_it_has_missed() {
    let bus = Bus::new(UNIX_EPOCH);
    for rule in 0..ROOM + 12 {
        emit(&bus, removed(rule));
    }
    let events = read(&bus, &wanted(Some(2))).events;
    assert_eq!(events[0].what, What::Missed { events: Some(10) });
    assert_eq!((events[0].id, events[1].id), (12, 13));
    assert_eq!(events[1].what, removed(12));
    assert_eq!(bus.state().kept.len(), ROOM, "bounded");
    // A filter does not hide it.
    let kinds = vec!["flow".to_owned()];
    let filtered = Wanted {
        kinds,
        ..wanted(Some(2))
    };
    let events = read(&bus, &filtered).events;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].what, What::Missed { events: Some(10) });
}

#[test]
fn read__of_another_daemon() {
    let bus = Bus::new(UNIX_EPOCH + Duration::from_secs(3));
    emit(&bus, removed(1));
    for since in [0, 5 << 20, u64::MAX] {
        let Events { events, last } = read(&bus, &wanted(Some(since)));
        assert_eq!(events[0].what, What::Missed { events: None });
        assert_eq!((events[1].what.clone(), last), (removed(1), (3 << 20) + 1));
    }
}

#[test]
fn read__filters_by_kind_and_skips_the_rest() {
    let bus = Bus::new(UNIX_EPOCH);
    emit(&bus, removed(1));
    emit(&bus, What::SelectionSwitched { on: true });
    emit(&bus, removed(2));
    let of = |kind: &str| {
        let kinds = vec![kind.to_owned()];
        bus.read(
            &Wanted {
                kinds,
                ..wanted(Some(0))
            },
            || false,
        )
    };
    let ids = |events: Events| {
        events
            .events
            .iter()
            .map(|event| event.id)
            .collect::<Vec<_>>()
    };
    assert_eq!(of("rule").map(ids), Ok(vec![1, 3]));
    assert_eq!(of("selection_switched").map(ids), Ok(vec![2]));
    let nothing = of("gateway").expect("known");
    assert_eq!((nothing.events, nothing.last), (Vec::new(), 3));
    let error = of("rules").expect_err("unknown");
    assert!(error.contains("no kind \"rules\": flow, "), "{error}");
}

#[test]
fn read__waits_and_wakes() {
    let bus = Arc::new(Bus::new(UNIX_EPOCH));
    let reader = Arc::clone(&bus);
    let kinds = vec!["selection".to_owned()];
    let waiting = spawn(move || {
        let wait = Wanted {
            kinds,
            wait: None,
            ..wanted(Some(0))
        };
        reader.read(&wait, || false)
    });
    let waits = || bus.waiting.load(Ordering::Relaxed) == 1;
    vtl_testing::until("the reader waits", waits);
    emit(&bus, removed(1));
    emit(&bus, What::SelectionSwitched { on: false });
    let events = waiting.join().expect("no panic").expect("events");
    assert_eq!((events.events.len(), events.last), (1, 2));
    assert_eq!(bus.waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn read__who_goes_is_noticed_while_others_events_come() {
    let bus = Arc::new(Bus::new(UNIX_EPOCH));
    let reader = Arc::clone(&bus);
    let kinds = vec!["selection".to_owned()];
    let reading = spawn(move || {
        let wait = Wanted {
            kinds,
            wait: None,
            ..wanted(None)
        };
        reader.read(&wait, || true)
    });
    vtl_testing::until("the reader's end", || {
        emit(&bus, removed(1));
        reading.is_finished()
    });
    assert!(reading.join().expect("no panic").is_err());
    assert_eq!(bus.waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn read__too_many_and_those_who_go() {
    let bus = Arc::new(Bus::new(UNIX_EPOCH));
    let gone = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..MAX_WAITING)
        .map(|i| {
            let (bus, gone) = (Arc::clone(&bus), Arc::clone(&gone));
            spawn(move || {
                // Those who have to leave room for root come first.
                let place = || bus.waiting.load(Ordering::Relaxed);
                vtl_testing::until("its turn", || place() == i);
                let is_root = i >= MAX_WAITING_OTHERS;
                let wait = Wanted {
                    wait: None,
                    is_root,
                    ..wanted(None)
                };
                bus.read(&wait, || gone.load(Ordering::Relaxed))
            })
        })
        .collect();
    let waiting = || bus.waiting.load(Ordering::Relaxed);
    vtl_testing::until("all wait", || waiting() == MAX_WAITING);
    for is_root in [true, false] {
        let wait = Wanted {
            wait: None,
            is_root,
            ..wanted(None)
        };
        let refused = bus.read(&wait, || false);
        assert!(refused.is_err_and(|why| why.contains("ask later")));
    }
    assert!(
        read(&bus, &wanted(Some(0))).events.is_empty(),
        "who does not wait"
    );
    gone.store(true, Ordering::Relaxed);
    for reader in readers {
        let ended = reader.join().expect("no panic");
        assert!(ended.is_err_and(|why| why.contains("gone")));
    }
    assert_eq!(bus.waiting.load(Ordering::Relaxed), 0);
}

/// Nanoseconds for an event, without readers and with one: `cargo test --release -p vtld --lib events -- --ignored
/// --nocapture`.
#[test]
#[ignore = "a measurement"]
fn emit__cost() {
    let event = |flow: u64| What::FlowEnded {
        flow,
        local: ([10, 0, 0, 1], 40_000).into(),
        peer: ([10, 0, 0, 2], 80).into(),
        bytes_sent: 1,
        bytes_received: 2,
        how: "closed".into(),
        why: None,
    };
    let bus = Arc::new(Bus::new(UNIX_EPOCH));
    let measure = |what: &str| {
        const COUNT: u64 = 1_000_000;
        let began = Instant::now();
        (0..COUNT).for_each(|flow| bus.emit(event(flow), SystemTime::now()));
        let ns = began.elapsed().as_nanos() as u64 / COUNT;
        println!("{what}: {ns} ns an event");
    };
    measure("first");
    measure("nobody listens");
    let reader = Arc::clone(&bus);
    let gone = Arc::new(AtomicBool::new(false));
    let is_gone = Arc::clone(&gone);
    let reading = spawn(move || {
        let mut since = None;
        while !is_gone.load(Ordering::Relaxed) {
            let wait = Some(Duration::from_millis(50));
            let read = reader.read(
                &Wanted {
                    wait,
                    ..wanted(since)
                },
                || false,
            );
            since = read.ok().map(|events| events.last);
        }
    });
    sleep(Duration::from_millis(20));
    measure("one listens");
    gone.store(true, Ordering::Relaxed);
    reading.join().expect("no panic");
}
