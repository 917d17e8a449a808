//! Helpers of randomised tests: seeds, and runs on all cores.
#![allow(unreachable_pub)]

use std::{env, ops::Range, sync::Mutex, thread};

/// Seeds of a randomised test: `VTL_SIM_SEEDS=FROM..TO`, or the first `default` ones.
pub fn seeds(default: u64) -> Range<u64> {
    let Ok(seeds) = env::var("VTL_SIM_SEEDS") else {
        return 0..default;
    };
    let number = |text: &str| text.parse().expect("a number");
    let (from, to) = seeds.split_once("..").expect("VTL_SIM_SEEDS=FROM..TO");
    number(from)..number(to)
}

/// Runs `jobs` on all cores. Returns the failures.
pub fn failures<J: Send>(jobs: Vec<J>, run: impl Fn(J) -> Option<String> + Sync) -> Vec<String> {
    let jobs = Mutex::new(jobs);
    let found = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(job) = jobs.lock().expect("nobody panics with it").pop() else {
                        return;
                    };
                    if let Some(failure) = run(job) {
                        let mut found = found.lock().expect("nobody panics with it");
                        found.push(failure);
                    }
                }
            });
        }
    });
    found.into_inner().expect("nobody panics with it")
}

/// Asserts that none of `count` runs has failed.
#[track_caller]
pub fn none(failures: &[String], count: usize) {
    for failure in failures.iter().take(10) {
        println!("{failure}");
    }
    assert!(failures.is_empty(), "{} of {count}", failures.len());
}
