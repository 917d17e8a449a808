//! Programs that run in the background of the demo and end with it.

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
pub(super) struct Background {
    name: &'static str,
    child: Child,
}

impl Background {
    /// Starts `command`, out of reach of the terminal's Ctrl-C, which is for the demo to handle;
    /// should the demo be killed, so is the program.
    pub(super) fn start(name: &'static str, command: &mut Command) -> anyhow::Result<Self> {
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
    pub(super) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The program's name, for messages.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Its exit status, if it has ended.
    pub(super) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for its end.
    pub(super) fn wait(&mut self) -> io::Result<ExitStatus> {
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
