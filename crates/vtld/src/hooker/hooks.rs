//! What is hooked: programs that vtld runs, control groups, and server ports.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use super::{
    Shared,
    bpf::{Attached, CAPTURE, Programs},
    cgroup::{self, Hierarchy, Runs},
    error::HookerError,
    steering::Interfaces,
};

/// What a hook takes in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hooked {
    /// A process that was given to [`Hooker::hook_pid`](super::Hooker::hook_pid), and its children.
    Run {
        /// The process.
        pid: u32,
        /// The control group made for it.
        cgroup: PathBuf,
    },
    /// All processes of a control group.
    Cgroup(PathBuf),
    /// A TCP port of local servers.
    Port(u16),
}

/// One line of a list of hooks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// For [`Hooker::unhook`](super::Hooker::unhook).
    pub id: u32,
    /// What it takes in.
    pub what: Hooked,
    /// Processes in it now; 0 for ports.
    pub processes: usize,
}

struct Entry {
    what: Hooked,
    /// The capture programs at the group; dropped first, so that nothing is captured on the way out.
    links: Vec<Attached>,
}

/// All hooks of one daemon.
pub(super) struct Hooks {
    programs: Programs,
    hierarchy: Hierarchy,
    runs: Runs,
    interfaces: Interfaces,
    entries: BTreeMap<u32, Entry>,
    last: u32,
}

impl Hooks {
    pub(super) fn new(programs: Programs, hierarchy: Hierarchy) -> Result<Self, HookerError> {
        hierarchy.sweep();
        let runs = Runs::new(&hierarchy)?;
        Ok(Self {
            programs,
            hierarchy,
            runs,
            interfaces: Interfaces::default(),
            entries: BTreeMap::new(),
            last: 0,
        })
    }

    fn add(&mut self, what: Hooked, links: Vec<Attached>) -> u32 {
        self.last += 1;
        self.entries.insert(self.last, Entry { what, links });
        self.last
    }

    fn capture(&self, path: &Path) -> Result<Vec<Attached>, HookerError> {
        let group = File::open(path).map_err(|source| HookerError::Cgroup {
            path: path.to_owned(),
            source,
        })?;
        CAPTURE
            .iter()
            .map(|name| self.programs.attach_cgroup(name, path, &group))
            .collect()
    }

    pub(super) fn hook_pid(&mut self, pid: u32) -> Result<u32, HookerError> {
        let cgroup = self.runs.make()?;
        let result = self
            .capture(&cgroup)
            .and_then(|links| Runs::enter(pid, &cgroup).map(|()| links));
        match result {
            Ok(links) => Ok(self.add(Hooked::Run { pid, cgroup }, links)),
            Err(error) => {
                self.runs.remove(&cgroup);
                Err(error)
            }
        }
    }

    pub(super) fn hook_cgroup(&mut self, path: &Path) -> Result<u32, HookerError> {
        // As seen from the hierarchy's root, or as a path in the file system.
        let inside = path.strip_prefix("/").unwrap_or(path);
        let inside = self.hierarchy.root().join(inside);
        let path = if inside.join("cgroup.procs").exists() {
            inside
        } else {
            path.to_owned()
        };
        let what = Hooked::Cgroup(path.clone());
        if self.entries.values().any(|entry| entry.what == what) {
            return Err(HookerError::AlreadyHooked(path.display().to_string()));
        }
        let links = self.capture(&path)?;
        Ok(self.add(what, links))
    }

    pub(super) fn has_port(&self, port: u16) -> bool {
        self.entries.values().any(|e| e.what == Hooked::Port(port))
    }

    pub(super) fn hook_port(&mut self, shared: &Shared, port: u16) -> Result<u32, HookerError> {
        let what = Hooked::Port(port);
        if self.entries.values().any(|entry| entry.what == what) {
            return Err(HookerError::AlreadyHooked(format!("port {port}")));
        }
        shared.maps.hook_port(port, true)?;
        if let Err(error) = self.interfaces.update(&self.programs) {
            let _ = shared.maps.hook_port(port, false);
            return Err(error);
        }
        Ok(self.add(what, Vec::new()))
    }

    pub(super) fn unhook(&mut self, shared: &Shared, id: u32) -> Result<(), HookerError> {
        let entry = self
            .entries
            .remove(&id)
            .ok_or(HookerError::NoSuchHook(id))?;
        drop(entry.links);
        match entry.what {
            Hooked::Run { cgroup, .. } => self.runs.remove(&cgroup),
            Hooked::Cgroup(_) => (),
            Hooked::Port(port) => {
                shared.maps.hook_port(port, false)?;
                if !self.steers() {
                    self.interfaces.clear();
                }
            }
        }
        Ok(())
    }

    pub(super) fn list(&self) -> Vec<Hook> {
        let hook = |(&id, entry): (&u32, &Entry)| {
            let processes = match &entry.what {
                Hooked::Run { cgroup: path, .. } | Hooked::Cgroup(path) => {
                    cgroup::members(path).len()
                }
                Hooked::Port(_) => 0,
            };
            Hook {
                id,
                what: entry.what.clone(),
                processes,
            }
        };
        self.entries.iter().map(hook).collect()
    }

    /// Removes the groups of programs that have ended.
    pub(super) fn reap(&mut self) {
        let runs = &self.runs;
        self.entries.retain(|_, entry| {
            let Hooked::Run { cgroup, .. } = &entry.what else {
                return true;
            };
            // A program may have made groups below its own.
            let events = std::fs::read_to_string(cgroup.join("cgroup.events"));
            if events.is_ok_and(|events| events.contains("populated 1")) {
                return true;
            }
            entry.links.clear();
            runs.remove(cgroup);
            false
        });
    }

    /// Ends all hooks and removes what was made for them.
    pub(super) fn close(&mut self) {
        self.entries.clear();
        self.interfaces.clear();
        self.runs.close();
    }

    fn steers(&self) -> bool {
        self.entries
            .values()
            .any(|entry| matches!(entry.what, Hooked::Port(_)))
    }

    /// An interface came or went.
    pub(super) fn interfaces_changed(&mut self) {
        if self.steers()
            && let Err(error) = self.interfaces.update(&self.programs)
        {
            tracing::warn!(%error, "connections that come in there stay plain TCP");
        }
    }
}
