//! What a host's daemon has taken of the machine.

use std::{fs, time::Duration};

use vtl_testbed::Host;

use super::{World, memory_kib, process_of_carriers};

/// Of a daemon and its processes of carriers.
pub(crate) struct Cost {
    pids: Vec<u32>,
    /// Resident, KiB.
    kib: u64,
    /// Since they began.
    processor: Duration,
}

impl World {
    /// What the daemon of a host has taken so far.
    pub(crate) fn cost(&mut self, host: Host) -> Cost {
        let daemon = self.daemon(host).pid();
        let kinds = ["quic", "sctp", "kcp"];
        let carriers = kinds.iter().filter_map(|k| process_of_carriers(daemon, k));
        let all: Vec<u32> = carriers.chain([daemon]).collect();
        Cost {
            kib: all.iter().map(|pid| memory_kib(*pid)).sum(),
            processor: all.iter().map(|pid| processor_time(*pid)).sum(),
            pids: all,
        }
    }

    /// What has happened since has cost at most so many KiB, and so many seconds of processor time, and no process.
    #[track_caller]
    pub(crate) fn assert_cost(&mut self, host: Host, before: &Cost, kib: u64, seconds: f64) {
        let now = self.cost(host);
        let is_there = |pid| now.pids.contains(pid);
        assert!(before.pids.iter().all(is_there), "a process has ended");
        let grown = now.kib.saturating_sub(before.kib);
        let took = now.processor.saturating_sub(before.processor).as_secs_f64();
        println!("cost: {grown} KiB of {kib}, {took:.2} s of {seconds}");
        assert!(grown <= kib, "{grown} KiB");
        assert!(took <= seconds, "{took} s of a processor");
    }
}

/// The processor time that a process has taken.
fn processor_time(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let (_, behind) = stat.rsplit_once(')').expect("its name");
    // utime and stime are its 14th and 15th fields, in 1/100 s.
    let ticks = behind.split_whitespace().skip(11).take(2);
    ticks
        .map(|n| Duration::from_millis(10 * n.parse::<u64>().expect("a number")))
        .sum()
}
