//! What telling a flow's profile costs, in all, for each capture of `tests/captures`.

#[path = "../tests/captures/mod.rs"]
mod captures;

use std::{hint::black_box, time::Instant};

const ROUNDS: u32 = 2000;

fn main() {
    let mut all = Vec::new();
    for part in ["tuned", "held-out"] {
        for capture in captures::captures(part) {
            let flow = || {
                black_box(captures::verdict(
                    &capture,
                    capture.port,
                    Some(&capture.executable),
                ))
            };
            flow();
            let start = Instant::now();
            for _ in 0..ROUNDS {
                flow();
            }
            all.push((
                start.elapsed() / ROUNDS,
                capture.name.clone(),
                capture.profile,
            ));
        }
    }
    all.sort_by_key(|(cost, ..)| *cost);
    for (cost, name, profile) in &all {
        println!(
            "{:>8.2} µs  {name} ({profile})",
            cost.as_nanos() as f64 / 1000.0
        );
    }
}
