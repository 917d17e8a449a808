//! What a daemon's threads have done so far: processor time, and how often they slept.

use std::fs;
use std::ops::{Add, Sub};
use std::path::Path;

/// The sum over the threads of a process and of those that it has started: carriers are processes of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Effort {
    /// Time on a processor, seconds: also the kernel's work for packets, where it was done on these threads.
    pub(crate) cpu_s: f64,
    /// Times that a thread has given up its processor, each of which ends with a wake-up.
    pub(crate) wakeups: u64,
}

impl Effort {
    /// That of a process until now. Threads and processes that have ended are not counted.
    pub(crate) fn of(pid: u32) -> Self {
        let tasks = fs::read_dir(format!("/proc/{pid}/task"));
        let tasks = tasks.into_iter().flatten().flatten();
        tasks.fold(Self::default(), |all, task| {
            let task = task.path();
            let children = fs::read_to_string(task.join("children")).unwrap_or_default();
            let children = children
                .split_whitespace()
                .filter_map(|pid| pid.parse().ok());
            let children = children.fold(Self::default(), |all, pid| all + Self::of(pid));
            all + Self::of_thread(&task) + children
        })
    }

    fn of_thread(task: &Path) -> Self {
        let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default();
        // Nanoseconds on a processor come first.
        let schedstat = read("schedstat");
        let ns = schedstat.split_whitespace().next();
        let ns = ns.and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(0.0);
        let status = read("status");
        let mut lines = status.lines();
        let slept = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        Self {
            cpu_s: ns / 1e9,
            wakeups: slept.and_then(|n| n.trim().parse().ok()).unwrap_or(0),
        }
    }
}

impl Add for Effort {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            cpu_s: self.cpu_s + other.cpu_s,
            wakeups: self.wakeups + other.wakeups,
        }
    }
}

impl Sub for Effort {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            cpu_s: (self.cpu_s - before.cpu_s).max(0.0),
            wakeups: self.wakeups.saturating_sub(before.wakeups),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn of__counts_work_and_sleep_of_all_threads() {
        let own = std::process::id();
        let before = Effort::of(own);
        let (begin, begun) = std::sync::mpsc::channel::<()>();
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let worker = thread::spawn(move || {
            let mut sum = 0_u64;
            for n in 0..20_000_000_u64 {
                sum = std::hint::black_box(sum.wrapping_add(n));
            }
            let _ = begin.send(());
            // Sleeps until it has been looked at.
            let _ = stopped.recv();
            sum
        });
        begun.recv().expect("it works");
        let did = Effort::of(own) - before;
        drop(stop);
        worker.join().expect("it ends");
        assert!(did.cpu_s > 0.001, "{did:?}");
        assert!(did.wakeups >= 1, "{did:?}");
    }
}
