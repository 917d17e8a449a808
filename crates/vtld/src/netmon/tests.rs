//! The state of paths, as connections come and go.

use std::net::Ipv4Addr;

use vtl_core::netmon::Bound;

use super::*;

const GRAFT: Evidence = Evidence::Carrier(Kind::Graft);

fn host(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 + n).into()
}

fn counters(sent: u32) -> Counters {
    Counters {
        sent,
        lost: sent / 10,
        rtt: Some(Duration::from_millis(20)),
        delivered: Some(u64::from(sent) * 1000),
        bound: Bound::Path,
        ..Counters::default()
    }
}

/// Notes the first reading of a connection.
fn note(monitor: &NetMonitor, peer: IpAddr, at: Instant) -> Watch {
    let mut watch = Watch::default();
    monitor.note(peer, GRAFT, &mut watch, at, counters(100));
    watch
}

#[test]
fn note__of_several_kinds_the_best_evidence() {
    let monitor = NetMonitor::default();
    let now = Instant::now();
    note(&monitor, host(1), now);
    let mut tcp = Watch::default();
    let of_tcp = Counters {
        rtt_variance: Some(Duration::from_millis(3)),
        ..counters(10)
    };
    // The same host by its address in IPv6.
    let mapped = Ipv4Addr::from_bits(0x0a00_0001).to_ipv6_mapped().into();
    monitor.note(mapped, Evidence::Tcp, &mut tcp, now, of_tcp);
    let report = monitor.report(host(1)).unwrap();
    assert_eq!(
        (&*report.path.evidence, report.path.packets),
        ("graft", 100)
    );
    assert_eq!(
        (report.path.loss_pct, report.path.rtt_ms),
        (Some(10.0), Some(20.0))
    );
    assert_eq!(report.path.rtt_variance_ms, Some(3.0), "only TCP has told");
    assert_eq!(report.told.len(), 2);
    assert_eq!(monitor.metrics(mapped), monitor.metrics(host(1)));
    let error = monitor.report(host(2)).unwrap_err();
    assert!(
        error.starts_with("nothing is known of the path to 10.0.0.2"),
        "{error}"
    );
}

#[test]
fn note__figures_outlive_the_last_connection_by_ten_minutes() {
    let monitor = NetMonitor::default();
    let now = Instant::now();
    let Some(long_ago) = now.checked_sub(Duration::from_secs(601)) else {
        return vtl_testing::skip("this machine runs for less than ten minutes");
    };
    let mut watch = note(&monitor, host(1), long_ago);
    note(&monitor, host(2), long_ago + Duration::from_secs(10));
    assert_eq!(monitor.metrics(host(1)), None);
    assert!(monitor.metrics(host(2)).is_some());
    // A connection that is there, though idle, keeps them.
    monitor.note(host(1), GRAFT, &mut watch, now, counters(100));
    let report = monitor.report(host(1)).unwrap();
    assert!(report.path.age_s > 600.0);
}

#[test]
fn note__hosts_are_bounded() {
    let monitor = NetMonitor::default();
    let now = Instant::now();
    let max = MAX_HOSTS as u32;
    for n in 0..max {
        note(&monitor, host(n), now + Duration::from_millis(n.into()));
    }
    // Those that were read a moment ago stay.
    let later = now + Duration::from_secs(30);
    note(&monitor, host(max), later);
    assert_eq!(monitor.metrics(host(max)), None);
    let later = now + Duration::from_secs(62);
    for n in 0..5 {
        note(&monitor, host(max + n), later);
    }
    assert_eq!(monitor.hosts().known.len(), MAX_HOSTS);
    assert_eq!(monitor.metrics(host(4)), None, "read first");
    assert!(monitor.metrics(host(5)).is_some());
    // An idle connection takes no place.
    let mut watch = Watch::default();
    monitor.note(host(5000), GRAFT, &mut watch, now, Counters::default());
    assert_eq!(monitor.hosts().known.len(), MAX_HOSTS);
    let mut seen = Vec::new();
    let mut from = None;
    loop {
        let page = monitor.list(from);
        seen.extend(page.paths.into_iter().map(|path| path.peer));
        from = page.more;
        if from.is_none() {
            break;
        }
    }
    assert_eq!(seen, (5..max + 5).map(host).collect::<Vec<_>>());
}

#[test]
fn recent__only_of_what_is_new() {
    let monitor = NetMonitor::default();
    let now = Instant::now();
    let Some(before) = now.checked_sub(Duration::from_secs(5)) else {
        return vtl_testing::skip("this host has started a moment ago");
    };
    // More packets, and older.
    note(&monitor, host(1), before);
    let all = |age| monitor.recent(host(1), Duration::from_secs(age));
    assert_eq!((all(600).is_some(), all(2)), (true, None));
    let mut tcp = Watch::default();
    let of_tcp = Counters {
        rtt: Some(Duration::from_millis(70)),
        ..counters(10)
    };
    monitor.note(host(1), Evidence::Tcp, &mut tcp, now, of_tcp);
    let rtts = [600, 2].map(|age| all(age).and_then(|metrics| metrics.rtt));
    assert_eq!(rtts, [20, 70].map(|ms| Some(Duration::from_millis(ms))));
}
