//! Profiles of real programs' flows, by captures that `scripts/captures.py` made: precision and recall. Rules were tuned on
//! those under `captures/tuned`; those under `captures/held-out` were set apart before any was made.

mod captures;

use captures::{Capture, captures, verdict};
use vtl_core::profile::{Profile, Verdict};

/// Prints precision and recall of each profile; how many are right.
fn score(title: &str, captures: &[Capture], tell: impl Fn(&Capture) -> Option<Profile>) -> usize {
    let told: Vec<_> = captures
        .iter()
        .map(|capture| (capture.profile, tell(capture)))
        .collect();
    let right = told.iter().filter(|(is, told)| Some(*is) == *told).count();
    println!("{title}: {right} of {} right", told.len());
    for profile in Profile::ALL {
        let right = told
            .iter()
            .filter(|(is, told)| *is == profile && *told == Some(profile))
            .count();
        let [are, said] = [
            told.iter().filter(|(is, _)| *is == profile).count(),
            told.iter()
                .filter(|(_, told)| *told == Some(profile))
                .count(),
        ];
        println!(
            "  {:<24} precision {right}/{said}, recall {right}/{are}",
            profile.name()
        );
    }
    right
}

fn full(capture: &Capture) -> Option<Verdict> {
    verdict(capture, capture.port, Some(&capture.executable))
}

/// Precision and recall, per cent, rounded down.
fn rates(captures: &[Capture], profile: Profile) -> (usize, usize) {
    let told = captures
        .iter()
        .map(|capture| (capture.profile, full(capture).map(|v| v.profile)));
    let count = |test: fn(bool, bool) -> bool| {
        let told = told.clone();
        told.filter(|(is, told)| test(*is == profile, *told == Some(profile)))
            .count()
    };
    let right = count(|is, told| is && told);
    (
        100 * right / count(|_, told| told).max(1),
        100 * right / count(|is, _| is).max(1),
    )
}

fn print(captures: &[Capture]) {
    for capture in captures {
        let full = full(capture);
        let mark = if full.as_ref().map(|v| v.profile) == Some(capture.profile) {
            ' '
        } else {
            '!'
        };
        let said = full.map_or("none".to_owned(), |verdict| verdict.to_string());
        println!(
            "{mark} {:<24} {:<24} {said}",
            capture.name,
            capture.profile.name()
        );
    }
}

#[test]
fn tuned__are_all_right() {
    let captures = captures("tuned");
    print(&captures);
    let right = score("tuned", &captures, |capture| {
        full(capture).map(|v| v.profile)
    });
    assert_eq!(right, captures.len());
}

/// Who reads these figures should know: each protocol is here once or twice, in an exchange on the loopback, and most of them are
/// known by their specification. They say that real programs keep to it, not how often the world's flows are right.
#[test]
fn held_out__precision_and_recall() {
    let captures = captures("held-out");
    print(&captures);
    let all = score("bytes, executable, port", &captures, |c| {
        full(c).map(|v| v.profile)
    });
    let bytes = score("bytes and shape only", &captures, |c| {
        verdict(c, 0, None).map(|v| v.profile)
    });
    let ports = score("port only", &captures, |c| Profile::of(c.port));
    assert!(
        captures.len() >= 33 && all >= 31 && bytes >= 29 && ports < bytes,
        "{all}, {bytes}, {ports}"
    );
    let wanted = [
        (Profile::TimeSensitive, 100, 100),
        (Profile::TimeAndLossSensitive, 84, 100),
        (Profile::LossSensitive, 100, 86),
        (Profile::Insensitive, 100, 100),
    ];
    for (profile, precision, recall) in wanted {
        let rates = rates(&captures, profile);
        assert!(
            rates.0 >= precision && rates.1 >= recall,
            "{profile}: {rates:?} %"
        );
    }
}
