//! Processor time that a transfer took.

use std::fs;
use std::time::Instant;

/// Clock ticks a second of `/proc`: fixed by Linux's interface.
const TICKS: f64 = 100.0;

/// A moment, to measure from.
pub(crate) struct Since {
    at: Instant,
    idle_s: f64,
    emulator_s: f64,
    processors: f64,
}

impl Since {
    /// Now.
    pub(crate) fn now() -> Self {
        let (idle_s, processors) = idle();
        Self {
            at: Instant::now(),
            idle_s,
            emulator_s: emulator_s(),
            processors,
        }
    }

    /// The time that all processors together have been busy since, less the link's emulator, seconds.
    ///
    /// Kernel work for packets is done on whatever thread is running, so the sum over processes would
    /// miss some of it: hence the whole machine's time, which counts everything else that runs, too.
    /// Idle time is what the kernel measures; its figures for work are samples.
    pub(crate) fn busy_s(&self) -> f64 {
        let (idle_s, _) = idle();
        let all = self.at.elapsed().as_secs_f64() * self.processors;
        let busy = all - (idle_s - self.idle_s) - (emulator_s() - self.emulator_s);
        // The figures are taken one after the other, and are multiples of 10 ms.
        busy.max(0.0)
    }
}

/// Time without work, or taken by the hypervisor, of all processors together; and how many there are.
fn idle() -> (f64, f64) {
    let text = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or_default();
    let field = |n: usize| -> f64 {
        let word = line.split_whitespace().nth(n);
        word.and_then(|w| w.parse().ok()).unwrap_or(0.0)
    };
    let processors = text
        .lines()
        .filter(|l| l.starts_with("cpu") && !l.starts_with("cpu "))
        .count();
    // idle, iowait, steal.
    let idle = [4, 5, 8].map(field).iter().sum::<f64>() / TICKS;
    (idle, processors as f64)
}

/// The emulator is a thread of this process.
fn emulator_s() -> f64 {
    let mut total = 0.0;
    for task in fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if name.trim() != "vtl-emulator" {
            continue;
        }
        // Nanoseconds on a processor come first.
        let stat = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        let first = stat.split_whitespace().next();
        total += first.and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0) / 1e9;
    }
    total
}
