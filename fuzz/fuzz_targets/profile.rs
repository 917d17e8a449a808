//! A flow whose both ends send anything, at any time: memory stays bounded, what a verdict says can be shown, and is the
//! same however the bytes were cut.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use vtl_core::profile::{Classifier, Verdict};

#[derive(Arbitrary, Debug)]
struct Said<'a> {
    opener: bool,
    /// Milliseconds since what was said before.
    after: u16,
    cut: u16,
    bytes: &'a [u8],
}

#[derive(Arbitrary, Debug)]
struct Flow<'a> {
    executable: Option<&'a str>,
    port: u16,
    said: Vec<Said<'a>>,
}

fn run(flow: &Flow<'_>, cuts: bool) -> Option<Verdict> {
    let mut classifier = Classifier::new(flow.executable, flow.port);
    let mut now = 0;
    // The tenth packet is looked at as it begins, so it is left out.
    for said in flow.said.iter().take(9) {
        now += u64::from(said.after) * 1_000_000;
        let cut = if cuts { usize::from(said.cut) } else { 0 };
        let (first, rest) = said.bytes.split_at(cut.min(said.bytes.len()));
        for part in [first, rest] {
            match said.opener {
                true => classifier.sent(now, part),
                false => classifier.received(now, part),
            }
        }
    }
    let by_itself = classifier.verdict().cloned();
    classifier.conclude();
    assert!(classifier.is_done());
    assert!(by_itself.is_none() || by_itself == classifier.verdict().cloned());
    classifier.verdict().cloned()
}

fuzz_target!(|flow: Flow<'_>| {
    let verdict = run(&flow, false);
    if let Some(verdict) = &verdict {
        assert!(verdict.evidence.len() <= 600);
        assert!(
            verdict
                .evidence
                .bytes()
                .all(|byte| (b' '..=b'~').contains(&byte))
        );
    }
    // What the shape tells depends on packets, which cuts of more than a segment add to.
    let small = flow
        .said
        .iter()
        .all(|said| said.bytes.len() <= 1448 && said.after > 0);
    let recognised = verdict
        .as_ref()
        .is_some_and(|verdict| verdict.protocol.is_some());
    if small && recognised {
        assert_eq!(verdict, run(&flow, true));
    }
});
