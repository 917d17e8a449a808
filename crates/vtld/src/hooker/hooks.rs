//! The hooks: on programs run by hand, cgroups, and server ports.

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use libbpf_rs::MapHandle;
use serde::{Deserialize, Serialize};

use super::{
    Shared,
    abi::vtl_hook_config,
    bpf::{Attached, CAPTURE, Programs},
    carrier::{self, At, Carrier, CarrierPolicies, CarrierPolicy},
    cgroup::{self, Hierarchy, Runs},
    error::HookerError,
    handover::HookLeft,
    rules::{About, Listed, Means, Paths, Rule, Rules, Wrong},
    steering::Interfaces,
};
use crate::Scope;

/// Scope of a hook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Hooked {
    /// A process that was given to [`Hooker::hook_pid`](super::Hooker::hook_pid), and its children.
    Run {
        /// The process.
        pid: u32,
        /// The cgroup created for it.
        cgroup: PathBuf,
    },
    /// All processes of a cgroup.
    Cgroup(PathBuf),
    /// A TCP port of local servers.
    Port(u16),
}

/// One row of the list of hooks.
#[derive(Clone, Debug, PartialEq)]
pub struct Hook {
    /// Its id, for [`Hooker::unhook`](super::Hooker::unhook).
    pub id: u32,
    /// Its scope.
    pub what: Hooked,
    /// The carrier of its connections.
    pub carrier: Carrier,
    /// Current number of processes in it; 0 for ports.
    pub processes: usize,
    /// Connections whose congestion control was set to the one that the carrier names.
    pub connections: Option<u64>,
    /// The rule that created it, if any.
    pub rule: Option<String>,
}

struct Entry {
    what: Hooked,
    carrier: Carrier,
    attached: Taken,
    /// The rule that created it, if any.
    rule: Option<String>,
}

/// A hook on a port that a rule serves.
struct Served {
    id: u32,
    rule: String,
    carrier: Carrier,
}

/// Programs attached for a hook.
#[derive(Default)]
struct Taken {
    /// The capture programs at the cgroup; detached first, so that nothing is captured while closing.
    links: Vec<Attached>,
    /// The carrier's programs.
    programs: Option<carrier::Programs>,
}

impl Taken {
    fn detach(&mut self) {
        self.links.clear();
        if let Some(programs) = &mut self.programs {
            programs.detach();
        }
    }
}

fn open(path: &Path) -> Result<File, HookerError> {
    File::open(path).map_err(|source| HookerError::Cgroup {
        path: path.to_owned(),
        source,
    })
}

/// All hooks of one daemon.
pub(super) struct Hooks {
    programs: Programs,
    config: vtl_hook_config,
    rules: Rules,
    policies: CarrierPolicies,
    hierarchy: Hierarchy,
    runs: Runs,
    interfaces: Interfaces,
    entries: BTreeMap<u32, Entry>,
    last: u32,
    /// Handed over to another daemon.
    is_left: bool,
}

impl Hooks {
    pub(super) fn new(
        programs: Programs,
        config: vtl_hook_config,
        hierarchy: Hierarchy,
        groups: Vec<(PathBuf, OwnedFd)>,
        policies: CarrierPolicies,
        scope: Scope,
    ) -> Result<Self, HookerError> {
        let runs = Runs::new(&hierarchy, groups)?;
        hierarchy.sweep();
        Ok(Self {
            programs,
            config,
            rules: Rules::default(),
            policies,
            hierarchy,
            runs,
            interfaces: Interfaces::new(scope),
            entries: BTreeMap::new(),
            last: 0,
            is_left: false,
        })
    }

    fn add(&mut self, what: Hooked, carrier: &Carrier, attached: Taken) -> u32 {
        self.last += 1;
        let entry = Entry {
            what,
            carrier: carrier.clone(),
            attached,
            rule: None,
        };
        self.entries.insert(self.last, entry);
        self.last
    }

    /// The policies, by the numbers that sockets are marked with.
    pub(super) fn policies(&self) -> CarrierPolicies {
        self.policies.clone()
    }

    fn check(&self) -> Result<(), HookerError> {
        match self.is_left {
            true => Err(HookerError::Leaving),
            false => Ok(()),
        }
    }

    /// Attaches the programs that capture the connections of a cgroup and set their carrier.
    fn capture(&mut self, path: &Path, carrier: &Carrier) -> Result<Taken, HookerError> {
        self.check()?;
        let mut taken = Taken::default();
        if *carrier != Carrier::Best {
            taken.programs = Some(self.control(path, carrier, &At::Opened)?);
        }
        if carrier.captures() {
            let group = open(path)?;
            for name in CAPTURE {
                let link = self.programs.attach_cgroup(name, path, &group)?;
                taken.links.push(link);
            }
        }
        if path == self.hierarchy.root() {
            self.rules.reattach(&self.hierarchy)?;
        }
        Ok(taken)
    }

    fn control(
        &mut self,
        path: &Path,
        carrier: &Carrier,
        at: &At,
    ) -> Result<carrier::Programs, HookerError> {
        let control = carrier.control();
        let control = control.map(carrier::kernel_control).transpose()?;
        carrier::Programs::attach(
            self.config.netns_cookie,
            at,
            self.policies.number(carrier),
            control.as_deref(),
            &self.programs.policies()?,
            path,
            &open(path)?,
        )
    }

    pub(super) fn hook_pid(&mut self, pid: u32, carrier: &Carrier) -> Result<u32, HookerError> {
        self.check()?;
        let from = self.hierarchy.group_of(pid)?;
        let cgroup = self.runs.make(&from)?;
        let result = self
            .capture(&cgroup, carrier)
            .and_then(|taken| Runs::enter(pid, &cgroup).map(|()| taken));
        match result {
            Ok(taken) => Ok(self.add(Hooked::Run { pid, cgroup }, carrier, taken)),
            Err(error) => {
                self.runs.remove(&cgroup);
                Err(error)
            }
        }
    }

    pub(super) fn hook_cgroup(
        &mut self,
        path: &Path,
        carrier: &Carrier,
    ) -> Result<u32, HookerError> {
        let path = self.cgroup(path);
        let what = Hooked::Cgroup(path.clone());
        if self.entries.values().any(|entry| entry.what == what) {
            return Err(HookerError::AlreadyHooked(path.display().to_string()));
        }
        let taken = self.capture(&path, carrier)?;
        Ok(self.add(what, carrier, taken))
    }

    /// Detaches everything but the steering programs, for a handover. Returns the hooks made by hand, and the cgroups
    /// of programs, with their locks, for the next daemon to keep.
    pub(super) fn leave(&mut self) -> (Vec<HookLeft>, Vec<(PathBuf, OwnedFd)>) {
        self.is_left = true;
        self.rules.close();
        let mut left = Vec::new();
        for entry in self.entries.values_mut() {
            entry.attached.detach();
            if entry.rule.is_some() {
                continue;
            }
            let inside = |path: &Path| self.hierarchy.inside(path);
            let what = match &entry.what {
                Hooked::Run { pid, cgroup } => Hooked::Run {
                    pid: *pid,
                    cgroup: inside(cgroup),
                },
                Hooked::Cgroup(path) => Hooked::Cgroup(inside(path)),
                Hooked::Port(port) => Hooked::Port(*port),
            };
            let carrier = entry.carrier.spec();
            left.push(HookLeft { what, carrier });
        }
        let groups = self.runs.leave().into_iter();
        let groups = groups.map(|(path, lock)| (self.hierarchy.inside(&path), lock));
        (left, groups.collect())
    }

    /// Restores a hook of a former daemon.
    pub(super) fn adopt(&mut self, shared: &Shared, hook: HookLeft) -> Result<u32, HookerError> {
        let port = matches!(hook.what, Hooked::Port(_));
        let carrier = Carrier::wanted(&hook.carrier, port).map_err(HookerError::Inherited)?;
        match hook.what {
            Hooked::Run { pid, cgroup } => {
                let cgroup = self.cgroup(&cgroup);
                self.runs.keep(&cgroup);
                match self.capture(&cgroup, &carrier) {
                    Ok(taken) => Ok(self.add(Hooked::Run { pid, cgroup }, &carrier, taken)),
                    Err(error) => {
                        self.runs.remove(&cgroup);
                        Err(error)
                    }
                }
            }
            Hooked::Cgroup(path) => self.hook_cgroup(&path, &carrier),
            Hooked::Port(port) => self.hook_port(shared, port, &carrier),
        }
    }

    /// An eBPF map, by its name.
    pub(super) fn map(&self, name: &'static str) -> Result<MapHandle, HookerError> {
        self.programs.map(name)
    }

    /// Resolves a cgroup, given in the hierarchy or in the file system, to its path in the file system.
    pub(super) fn cgroup(&self, path: &Path) -> PathBuf {
        self.hierarchy.place(path)
    }

    /// The ports whose connections are steered here, and whether clients may use lossy carriers.
    pub(super) fn ports(&self) -> BTreeMap<u16, bool> {
        let steered = self.entries.values().filter(|e| e.carrier.captures());
        let port = |entry: &Entry| match entry.what {
            Hooked::Port(port) => Some((port, entry.carrier.is_tolerant())),
            _ => None,
        };
        steered.filter_map(port).collect()
    }

    pub(super) fn hook_port(
        &mut self,
        shared: &Shared,
        port: u16,
        carrier: &Carrier,
    ) -> Result<u32, HookerError> {
        let what = Hooked::Port(port);
        match self.entries.values().find(|entry| entry.what == what) {
            None => self.serve(shared, port, carrier),
            Some(Entry {
                rule: Some(rule), ..
            }) => Err(HookerError::OfRule {
                port,
                rule: rule.clone(),
            }),
            Some(_) => Err(HookerError::AlreadyHooked(format!("port {port}"))),
        }
    }

    /// Hooks a port, without a check for hooks that it has already.
    fn serve(&mut self, shared: &Shared, port: u16, carrier: &Carrier) -> Result<u32, HookerError> {
        self.check()?;
        let what = Hooked::Port(port);
        carrier.serves_port()?;
        let mut taken = Taken::default();
        if carrier.control().is_some() {
            // Any process may be the server.
            let root = self.hierarchy.root().to_owned();
            taken.programs = Some(self.control(&root, carrier, &At::Port(port))?);
        }
        if carrier.captures() {
            let was = self.ports().contains_key(&port);
            shared.maps.hook_port(port, true)?;
            if let Err(error) = self.interfaces.update(&self.programs) {
                let _ = shared.maps.hook_port(port, was);
                return Err(error);
            }
        }
        Ok(self.add(what, carrier, taken))
    }

    pub(super) fn unhook(&mut self, shared: &Shared, id: u32) -> Result<(), HookerError> {
        match self.entries.get(&id) {
            Some(Entry {
                what: Hooked::Port(port),
                rule: Some(rule),
                ..
            }) => Err(HookerError::OfRule {
                port: *port,
                rule: rule.clone(),
            }),
            _ => self.end(shared, id),
        }
    }

    fn end(&mut self, shared: &Shared, id: u32) -> Result<(), HookerError> {
        let entry = self
            .entries
            .remove(&id)
            .ok_or(HookerError::NoSuchHook(id))?;
        drop(entry.attached);
        match entry.what {
            Hooked::Run { cgroup, .. } => self.runs.remove(&cgroup),
            // Unless a rule has hooked it anew with another congestion control.
            Hooked::Port(port) if entry.carrier.captures() && !self.ports().contains_key(&port) => {
                shared.maps.hook_port(port, false)?;
                if !self.steers() {
                    self.interfaces.clear();
                }
            }
            Hooked::Cgroup(_) | Hooked::Port(_) => (),
        }
        Ok(())
    }

    /// Replaces the rules in force, all or none. Ports that they serve are hooks like any other.
    pub(super) fn set_rules(
        &mut self,
        shared: &Shared,
        rules: &[Rule],
        paths: &Paths,
    ) -> Result<(), Wrong> {
        let former: Vec<u32> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.rule.is_some())
            .map(|(id, _)| *id)
            .collect();
        let (mut kept, mut made) = (Vec::new(), Vec::new());
        let served = self.serve_rules(shared, rules, &mut kept, &mut made);
        let mut means = Means {
            config: &self.config,
            programs: &self.programs,
            hierarchy: &self.hierarchy,
            policies: &mut self.policies,
        };
        let result = served.and_then(|()| self.rules.set(rules, paths, &mut means));
        let in_vain: Vec<u32> = if result.is_ok() {
            let stays = |id: &u32| kept.iter().any(|kept: &Served| kept.id == *id);
            former.into_iter().filter(|id| !stays(id)).collect()
        } else {
            made.iter().map(|made| made.id).collect()
        };
        if result.is_ok() {
            for Served { id, rule, carrier } in kept.into_iter().chain(made) {
                if let Some(entry) = self.entries.get_mut(&id) {
                    entry.rule = Some(rule);
                    entry.carrier = carrier;
                }
            }
        }
        for id in in_vain {
            if let Err(error) = self.end(shared, id) {
                tracing::warn!(%error, "hooks: cannot unhook a port: connections to it may still be steered to vtld");
            }
        }
        result
    }

    /// Hooks the ports that rules serve: `kept` are those that are hooked alike already, `made` the new ones, also of
    /// rules before one that fails.
    fn serve_rules(
        &mut self,
        shared: &Shared,
        rules: &[Rule],
        kept: &mut Vec<Served>,
        made: &mut Vec<Served>,
    ) -> Result<(), Wrong> {
        for rule in rules {
            let About::Accepted(ports, carrier) = &rule.about else {
                continue;
            };
            let served = |id: u32| Served {
                id,
                rule: rule.name.clone(),
                carrier: carrier.clone(),
            };
            for port in ports {
                let what = Hooked::Port(*port);
                match self.entries.iter().find(|(_, e)| e.what == what) {
                    Some((_, Entry { rule: None, .. })) => {
                        return Err(rule.wrong(format!(
                            "port {port} is hooked by hand: vtl hook remove --port {port}"
                        )));
                    }
                    // The port itself stays hooked.
                    Some((id, entry))
                        if entry.carrier == *carrier
                            || entry.carrier.captures()
                                && carrier.captures()
                                && entry.carrier.control() == carrier.control() =>
                    {
                        kept.push(served(*id));
                    }
                    _ => {
                        let id = self.serve(shared, *port, carrier);
                        made.push(served(id.map_err(|e| rule.wrong(e.to_string()))?));
                    }
                }
            }
        }
        Ok(())
    }

    /// The rules in force.
    pub(super) fn rules(&self) -> Vec<Rule> {
        self.rules.rules()
    }

    /// The rules in force and their status.
    pub(super) fn list_rules(&self) -> Vec<Listed> {
        self.rules.list()
    }

    /// Follows changes of the files and cgroups that rules name.
    pub(super) fn refresh_rules(&mut self, paths: &Paths) -> Result<(), HookerError> {
        self.rules.refresh(paths, &self.hierarchy)
    }

    /// The policy behind the number in a socket's storage.
    pub(super) fn policy(&self, number: u32) -> CarrierPolicy {
        self.policies.get(number)
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
                carrier: entry.carrier.clone(),
                processes,
                connections: match (entry.carrier.control(), &entry.attached.programs) {
                    (Some(_), Some(programs)) => Some(programs.connections()),
                    _ => None,
                },
                rule: entry.rule.clone(),
            }
        };
        self.entries.iter().map(hook).collect()
    }

    /// Removes the cgroups of programs that have ended.
    pub(super) fn reap(&mut self) {
        let runs = &mut self.runs;
        self.entries.retain(|_, entry| {
            let Hooked::Run { cgroup, .. } = &entry.what else {
                return true;
            };
            // Not `cgroup.procs`: a program may have created cgroups below its own.
            let is_over = match std::fs::read_to_string(cgroup.join("cgroup.events")) {
                Ok(events) => !events.contains("populated 1"),
                // Any other error, such as EMFILE, says nothing about the program.
                Err(error) => error.kind() == std::io::ErrorKind::NotFound,
            };
            if !is_over {
                return true;
            }
            entry.attached.detach();
            runs.remove(cgroup);
            false
        });
    }

    /// Links of the steering programs.
    pub(super) fn steering(&self) -> impl Iterator<Item = &Attached> {
        self.interfaces.links()
    }

    /// Removes all hooks and the cgroups created for them.
    pub(super) fn close(&mut self) {
        self.rules.close();
        self.entries.clear();
        self.interfaces.clear();
        self.runs.close();
    }

    fn steers(&self) -> bool {
        self.entries
            .values()
            .any(|entry| matches!(entry.what, Hooked::Port(_)) && entry.carrier.captures())
    }

    /// Follows changes of interfaces and addresses.
    pub(super) fn interfaces_changed(&mut self) {
        self.rules.addresses_changed();
        if self.steers()
            && let Err(error) = self.interfaces.update(&self.programs)
        {
            tracing::warn!(%error, "hooks: cannot attach to an interface: connections accepted there stay plain TCP");
        }
    }
}
