//! Programs that run in the background and end with this one.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long a program may take to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// A running program, ended when dropped.
#[derive(Debug)]
pub(crate) struct Background {
    name: &'static str,
    child: Child,
}

impl Background {
    /// Starts `command`, out of reach of the terminal's Ctrl-C, which is for this program to
    /// handle; should this program be killed, so is that one.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(name: &'static str, command: &mut Command) -> anyhow::Result<Self> {
        command.process_group(0);
        // SAFETY: prctl is async-signal-safe, and the closure touches nothing of the parent's.
        unsafe {
            command.pre_exec(|| {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from)
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name, child })
    }

    /// The process, for its pipes.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The program's name, for messages.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Reaped already: the number may belong to another process by now.
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        let Ok(pid) = i32::try_from(self.child.id()) else {
            return;
        };
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        let asked = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if asked.elapsed() > GRACE {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Lets `command` run on one core only.
pub(crate) fn pin(command: &mut Command, core: usize) {
    let mut set = nix::sched::CpuSet::new();
    // A machine with fewer cores than that runs it anywhere.
    if set.set(core).is_err() {
        return;
    }
    // SAFETY: sched_setaffinity is a plain system call; the set was made before the fork.
    unsafe {
        command.pre_exec(move || {
            let _ = nix::sched::sched_setaffinity(Pid::from_raw(0), &set);
            Ok(())
        });
    }
}

/// The most memory that a running process has had resident, KiB; 0 if it is gone.
pub(crate) fn peak_kb(pid: u32) -> u64 {
    of_status(pid, "VmHWM:")
}

/// The memory that a running process has resident, KiB; 0 if it is gone.
pub(crate) fn resident_kb(pid: u32) -> u64 {
    of_status(pid, "VmRSS:")
}

fn of_status(pid: u32, key: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
