//! Records of testbeds in files, while they are up: other processes can use and remove a testbed, even if
//! the process that created it is gone.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use vtl_link::Link;

use crate::error::{Error, Result};
use crate::testbed::Backend;

const DIRECTORY: &str = "/run/vtl/testbed";

/// The record of one testbed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) name: String,
    pub(crate) backend: Backend,
    pub(crate) link: Link,
    /// The process on which the testbed depends: its emulator, or the one that guards it. `None`: it depends
    /// on none.
    pub(crate) process: Option<Process>,
}

/// A process, identified by pid and start time, since pids are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// Start time, clock ticks after boot.
    started: u64,
}

impl Process {
    pub(crate) fn of(pid: u32) -> Option<Process> {
        let started = started(pid as i32)?;
        Some(Process {
            pid: pid as i32,
            started,
        })
    }

    pub(crate) fn is_alive(self) -> bool {
        started(self.pid) == Some(self.started)
    }
}

/// Start time: field 22 of /proc/PID/stat. `None` if the process is gone or a zombie.
fn started(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses, which may contain anything.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

pub(crate) fn path(name: &str, extension: &str) -> PathBuf {
    Path::new(DIRECTORY).join(format!("{name}.{extension}"))
}

/// The directory of the records.
pub(crate) fn directory() -> &'static Path {
    Path::new(DIRECTORY)
}

/// Path of the emulator's control socket.
pub(crate) fn socket_path(name: &str) -> PathBuf {
    path(name, "sock")
}

/// Standard error of an emulator in a process of its own.
pub(crate) fn log_path(name: &str) -> PathBuf {
    path(name, "log")
}

/// Copy of the host's list of allowed congestion controls, to be restored when the last testbed is down.
pub(crate) fn saved_congestion_controls() -> PathBuf {
    Path::new(DIRECTORY).join("tcp_allowed_congestion_control")
}

/// Locks the creation and removal of testbeds, for all processes, until dropped.
pub(crate) fn lock() -> Result<Flock<File>> {
    fs::create_dir_all(DIRECTORY).map_err(Error::file("create", DIRECTORY))?;
    let path = Path::new(DIRECTORY).join("lock");
    let file = File::create(&path).map_err(Error::file("create", &path))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, e)| Error::file("lock", &path)(e.into()))
}

pub(crate) fn read(name: &str) -> Option<State> {
    serde_json::from_slice(&fs::read(path(name, "json")).ok()?).ok()
}

pub(crate) fn write(state: &State) -> Result<()> {
    let target = path(&state.name, "json");
    let draft = path(&state.name, "json.new");
    let text =
        serde_json::to_vec_pretty(state).map_err(|e| Error::file("write", &target)(e.into()))?;
    // Renaming is atomic: a reader sees the old record or the new one.
    fs::write(&draft, text)
        .and_then(|()| fs::rename(&draft, &target))
        .map_err(Error::file("write", &target))
}

/// Removes the record of a testbed and all its files.
pub(crate) fn remove(name: &str) {
    for extension in ["json", "json.new", "sock", "log"] {
        let _ = fs::remove_file(path(name, extension));
    }
    let _ = fs::remove_dir_all(path(name, "state"));
}

/// The names of all recorded testbeds.
pub(crate) fn names() -> Vec<String> {
    let Ok(entries) = fs::read_dir(DIRECTORY) else {
        return Vec::new();
    };
    let mut names: Vec<String> = entries
        .filter_map(|e| {
            e.ok()?
                .file_name()
                .to_str()?
                .strip_suffix(".json")
                .map(str::to_owned)
        })
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process__own_is_alive_and_a_reused_pid_is_not() {
        let own = Process::of(std::process::id()).expect("runs");
        assert!(own.is_alive());
        assert!(
            !Process {
                started: own.started + 1,
                ..own
            }
            .is_alive()
        );
        assert_eq!(Process::of(0x7fff_ffff), None);
    }
}
