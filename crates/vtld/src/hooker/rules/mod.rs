//! Rules: they choose the carriers of TCP connections, in the kernel when a process connects.
//!
//! `file.rs` parses the file of rules, `table.rs` compiles them to steps for `bpf/rules.bpf.c`, and
//! `kernel.rs` puts these in force atomically. [`explain`] explains in words how they decide.

mod explain;
mod file;
mod forwarded;
mod kernel;
mod table;
mod when;

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    net::{IpAddr, Ipv6Addr},
    ops::RangeInclusive,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::SystemTime,
};

pub use explain::{Verdict, explain};
pub use file::{LONGEST_FILE, parse, parse_beside};
pub(super) use forwarded::ForwardRules;
pub use forwarded::{Forwarding, Forwards};
pub use vtl_core::profile::Profile;
pub(super) use when::plans;
pub use when::{Plans, When};

use super::{
    abi::{VTL_POLICY_PLAIN, VTL_RULES_MAX, vtl_hook_config, vtl_step, wide},
    bpf::Programs,
    carrier::{self, Carrier, CarrierPolicies},
    cgroup::Hierarchy,
    error::{HookerError, lacks_descriptors},
};
use kernel::Kernel;
use table::{Act, Entry, Test};

/// Maximum number of rules in a file: half of the counters, since the rules in force and their
/// successors are counted side by side.
pub const MAX_RULES: usize = VTL_RULES_MAX as usize / 2;

/// A position in the file; both numbers from 1, columns in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
}

/// An error in a file of rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}:{}: {text}", place.line, place.column)]
pub struct Wrong {
    /// Its position.
    pub place: Place,
    /// One sentence: what is wrong, and what is allowed.
    pub text: String,
}

/// A user, by id and as written in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The user id.
    pub id: u32,
    /// Name or id in the file.
    pub text: String,
}

/// An address prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The address; bits beyond the prefix are 0.
    pub address: IpAddr,
    /// The prefix length.
    pub bits: u8,
}

impl Prefix {
    /// The prefix of an address; `bits`: at most the address's length. An IPv4-mapped IPv6 prefix becomes IPv4's.
    pub(crate) fn new(address: IpAddr, bits: u8) -> Self {
        let (address, bits) = match address.to_canonical() {
            IpAddr::V4(v4) if address.is_ipv6() && bits >= 96 => (v4.into(), bits - 96),
            _ => (address, bits),
        };
        let address = match address {
            IpAddr::V4(a) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0);
                IpAddr::V4((a.to_bits() & mask).into())
            }
            IpAddr::V6(a) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0);
                IpAddr::V6((a.to_bits() & mask).into())
            }
        };
        Self { address, bits }
    }

    /// The prefix in IPv6, with IPv4 mapped.
    pub(super) fn wide(self) -> (Ipv6Addr, u8) {
        let before = if self.address.is_ipv4() { 96 } else { 0 };
        (wide(self.address), before + self.bits)
    }

    /// Whether it contains an address.
    pub fn contains(&self, address: IpAddr) -> bool {
        let same_family = self.address.is_ipv4() == address.is_ipv4();
        same_family && Self::new(address, self.bits).address == self.address
    }
}

/// The prefix of a single address.
impl From<IpAddr> for Prefix {
    fn from(address: IpAddr) -> Self {
        Self::new(address, if address.is_ipv4() { 32 } else { 128 })
    }
}

/// Error: the text is no [`Prefix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no address or prefix: write 192.0.2.7, 10.0.0.0/8 or 2001:db8::/32")]
pub struct NoPrefix;

impl FromStr for Prefix {
    type Err = NoPrefix;

    /// Parses an address, with or without a prefix length in bits behind a slash.
    fn from_str(text: &str) -> Result<Self, NoPrefix> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| NoPrefix)?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let bits = match bits {
            Some(bits) => bits.parse().map_err(|_| NoPrefix)?,
            None => width,
        };
        match bits <= width {
            true => Ok(Self::new(address, bits)),
            false => Err(NoPrefix),
        }
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

/// The conditions of a rule: of each kind that is named, one must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    /// Cgroups of the process, or ancestors of its cgroup; as written in the file.
    pub cgroup: Vec<PathBuf>,
    /// Users that the process runs as.
    pub user: Vec<User>,
    /// Executables of the process.
    pub exe: Vec<PathBuf>,
    /// The destination's ports.
    pub port: Vec<RangeInclusive<u16>>,
    /// The destination's addresses.
    pub to: Vec<Prefix>,
    /// The application's profiles, by the destination's port.
    pub profile: Vec<Profile>,
    /// Whether local destinations match, too: the host itself, link-local and multicast addresses.
    pub local: bool,
}

/// The action of a rule on a connection.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Does not capture it.
    Bypass,
    /// Sets its carrier.
    Carry(Carrier),
}

impl Action {
    /// Whether the connection is captured by vtld.
    fn captures(&self) -> bool {
        match self {
            Self::Bypass => false,
            Self::Carry(carrier) => carrier.captures(),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bypass => f.write_str("bypass"),
            Self::Carry(carrier) => carrier.fmt(f),
        }
    }
}

/// The scope of a rule, and its action.
#[derive(Clone, Debug, PartialEq)]
pub enum About {
    /// Connections that processes of this host open.
    Opened(Matches, Action),
    /// Connections that these ports of this host accept.
    Accepted(Vec<u16>, Carrier),
    /// Connections that this host forwards as a gateway.
    Forwarded(Forwards, Carrier),
}

/// One rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Its unique name.
    pub name: String,
    /// Its scope and action.
    pub about: About,
    /// Its conditions on the path, if it has some: then its action is a carrier of flows.
    pub when: Option<Arc<When>>,
    /// When it stops to match.
    pub expires: Option<SystemTime>,
    /// Position of its action in the file.
    pub place: Place,
    /// Position of its executables, if any.
    exe: Option<Place>,
}

impl Rule {
    /// Whether it matches nothing any more.
    pub fn has_expired(&self, now: SystemTime) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }

    /// An error at the position of its action.
    pub(super) fn wrong(&self, text: String) -> Wrong {
        Wrong {
            place: self.place,
            text,
        }
    }

    fn says_the_same(&self, other: &Self) -> bool {
        self.name == other.name && self.about == other.about
    }

    /// What happens with connections that match.
    pub fn action(&self) -> String {
        match &self.about {
            About::Opened(_, action) => action.to_string(),
            About::Accepted(_, carrier) | About::Forwarded(_, carrier) => carrier.to_string(),
        }
    }

    /// Whether it is the same rule as another, its time included.
    pub fn is_same(&self, other: &Self) -> bool {
        self.says_the_same(other) && self.when == other.when && self.expires == other.expires
    }
}

/// The files and cgroups that rules name, resolved. Created without holding a lock, since a file
/// system may hang.
#[derive(Debug, Default)]
pub(super) struct Paths {
    /// Executables; `None`: no such file.
    exes: BTreeMap<PathBuf, Option<File>>,
    /// Ids of the cgroups; `None`: no such cgroup.
    groups: BTreeMap<PathBuf, Option<u64>>,
}

impl Paths {
    pub(super) fn is_empty(&self) -> bool {
        self.exes.is_empty() && self.groups.is_empty()
    }

    /// Resolves the files and cgroups of `rules`. `cgroup`: resolves a cgroup to its path in the file system.
    ///
    /// # Errors
    /// Out of file descriptors: a missing file could not be told from an existing one.
    pub(super) fn look(rules: &[Rule], cgroup: impl Fn(&Path) -> PathBuf) -> Result<Self, Wrong> {
        let mut paths = Self::default();
        for rule in rules {
            let About::Opened(matches, _) = &rule.about else {
                continue;
            };
            for path in &matches.exe {
                // Needs no permission to read.
                let mut options = File::options();
                options.read(true).custom_flags(libc::O_PATH);
                let file = match options.open(path) {
                    Err(error) if lacks_descriptors(&error) => {
                        return Err(
                            rule.wrong(format!("cannot look at {}: {error}", path.display()))
                        );
                    }
                    file => file.ok(),
                };
                paths.exes.insert(path.clone(), file);
            }
            for path in &matches.cgroup {
                let number = cgroup(path).metadata().ok().map(|of| of.ino());
                paths.groups.insert(path.clone(), number);
            }
        }
        Ok(paths)
    }
}

/// One row of the list of rules.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The rule.
    pub rule: Rule,
    /// Connections matched since it came into force; `None`: not counted.
    pub connections: Option<u64>,
    /// Files and cgroups that it names and that do not exist.
    pub missing: Vec<PathBuf>,
}

/// A rule in force.
struct Loaded {
    rule: Rule,
    /// Index of its counter.
    place: u32,
    act: Act,
    missing: Vec<PathBuf>,
}

/// The rules in force.
#[derive(Default)]
pub(super) struct Rules {
    loaded: Vec<Loaded>,
    steps: Vec<vtl_step>,
    /// Loaded with the first rule that needs it.
    kernel: Option<Kernel>,
}

/// Parts of the Hooker that rules need.
pub(super) struct Means<'a> {
    pub(super) config: &'a vtl_hook_config,
    pub(super) programs: &'a Programs,
    pub(super) hierarchy: &'a Hierarchy,
    pub(super) policies: &'a mut CarrierPolicies,
}

impl Rules {
    /// Replaces the rules in force, all or none.
    pub(super) fn set(
        &mut self,
        rules: &[Rule],
        paths: &Paths,
        means: &mut Means<'_>,
    ) -> Result<(), Wrong> {
        let opens = |rule: &&Rule| matches!(rule.about, About::Opened(..));
        if let Some(first) = rules.iter().find(opens)
            && self.kernel.is_none()
        {
            let loaded = Kernel::load(means.config, means.programs, means.hierarchy.root());
            self.kernel = Some(loaded.map_err(at(first.place))?);
        }
        let Some(kernel) = &mut self.kernel else {
            self.loaded = rules.iter().map(untouched).collect();
            return Ok(());
        };
        let mut taken: Vec<u32> = self.loaded.iter().map(|l| l.place).collect();
        let mut loaded = Vec::with_capacity(rules.len());
        for rule in rules {
            let About::Opened(_, action) = &rule.about else {
                loaded.push(untouched(rule));
                continue;
            };
            if let (Some(place), Err(why)) = (rule.exe, kernel.sees_exe()) {
                let text = format!("this kernel cannot match by executable: {why}");
                return Err(Wrong { place, text });
            }
            let same = self.loaded.iter().find(|l| l.rule.says_the_same(rule));
            let place = same.map(|l| l.place).unwrap_or_else(|| {
                let free = (0..).find(|place| !taken.contains(place));
                free.expect("fewer rules than numbers")
            });
            if same.is_none() {
                kernel.forget(place).map_err(at(rule.place))?;
            }
            taken.push(place);
            let act = act(rule, action, place, means).map_err(at(rule.place))?;
            loaded.push(Loaded {
                rule: rule.clone(),
                place,
                act,
                missing: Vec::new(),
            });
        }
        let steps = steps(&mut loaded, paths, kernel, means.hierarchy);
        let place = rules
            .last()
            .map_or(Place { line: 1, column: 1 }, |r| r.place);
        let Some(steps) = steps else {
            let text = "the rules up to here name too much for the kernel's table: name fewer \
                        ports, prefixes, users, executables and groups"
                .to_owned();
            return Err(Wrong { place, text });
        };
        let needed = loaded.iter().any(|l| opens(&&l.rule));
        let was_attached = kernel.is_attached();
        if needed && !was_attached {
            kernel.attach(means.hierarchy.root()).map_err(at(place))?;
        }
        if let Err(error) = kernel.replace(&steps) {
            if !was_attached {
                kernel.detach();
            }
            return Err(at(place)(error));
        }
        if !needed {
            kernel.detach();
        }
        self.loaded = loaded;
        self.steps = steps;
        Ok(())
    }

    /// The rules in force.
    pub(super) fn rules(&self) -> Vec<Rule> {
        self.loaded.iter().map(|l| l.rule.clone()).collect()
    }

    /// Follows changes of the files and cgroups that rules name.
    pub(super) fn refresh(
        &mut self,
        paths: &Paths,
        hierarchy: &Hierarchy,
    ) -> Result<(), HookerError> {
        let Some(kernel) = &self.kernel else {
            return Ok(());
        };
        // Never too long: as many steps as before, as what is absent has its own.
        let Some(steps) = steps(&mut self.loaded, paths, kernel, hierarchy) else {
            return Ok(());
        };
        if steps != self.steps {
            kernel.replace(&steps)?;
            self.steps = steps;
        }
        Ok(())
    }

    /// Follows changes of the host's addresses.
    pub(super) fn addresses_changed(&self) {
        if let Some(kernel) = &self.kernel
            && let Err(error) = kernel.learn_addresses()
        {
            tracing::warn!(%error, "rules: cannot learn the host's addresses: rules for other hosts may match connections to this one");
        }
    }

    /// Attaches anew, so that rules run after hooks attached to the same cgroup since.
    pub(super) fn reattach(&mut self, hierarchy: &Hierarchy) -> Result<(), HookerError> {
        match &mut self.kernel {
            Some(kernel) if kernel.is_attached() => kernel.attach(hierarchy.root()),
            _ => Ok(()),
        }
    }

    pub(super) fn list(&self) -> Vec<Listed> {
        let listed = |l: &Loaded| Listed {
            rule: l.rule.clone(),
            connections: match (&l.rule.about, &self.kernel) {
                (About::Opened(..), Some(kernel)) => Some(kernel.matched(l.place)),
                _ => None,
            },
            missing: l.missing.clone(),
        };
        self.loaded.iter().map(listed).collect()
    }

    pub(super) fn close(&mut self) {
        self.kernel = None;
    }
}

/// Converts an error to one at a position in the file.
fn at(place: Place) -> impl FnOnce(HookerError) -> Wrong {
    move |error| Wrong {
        place,
        text: error.to_string(),
    }
}

/// A rule that the kernel's programs do not need.
fn untouched(rule: &Rule) -> Loaded {
    Loaded {
        rule: rule.clone(),
        // No counter.
        place: VTL_RULES_MAX,
        act: Act::default(),
        missing: Vec::new(),
    }
}

/// Converts a rule's action for the kernel's programs.
fn act(
    rule: &Rule,
    action: &Action,
    place: u32,
    means: &mut Means<'_>,
) -> Result<Act, HookerError> {
    let mut act = Act {
        policy: VTL_POLICY_PLAIN,
        place,
        ..Default::default()
    };
    match action {
        Action::Bypass => {}
        Action::Carry(carrier) if let Some(when) = &rule.when => {
            let name = rule.name.as_str().into();
            act.policy = means.policies.number_of(carrier, name, when.tolerant);
        }
        Action::Carry(Carrier::Best) => act.policy = 0,
        Action::Carry(carrier) => {
            act.policy = means.policies.number(carrier);
            if let Carrier::Control(name) = carrier {
                act.control = carrier::kernel_control(name)?;
            }
        }
    }
    Ok(act)
}

/// Compiles the table of the rules, and notes missing files and cgroups; `None`: too long.
fn steps(
    loaded: &mut [Loaded],
    paths: &Paths,
    kernel: &Kernel,
    hierarchy: &Hierarchy,
) -> Option<Vec<vtl_step>> {
    let mut entries = Vec::new();
    for Loaded {
        rule, act, missing, ..
    } in loaded
    {
        let About::Opened(matches, _) = &rule.about else {
            continue;
        };
        missing.clear();
        let mut exe = |path: &PathBuf| {
            let file = paths.exes.get(path).and_then(Option::as_ref);
            let known = file.and_then(|file| kernel.identify(file));
            if known.is_none() {
                missing.push(path.clone());
            }
            known.map_or(Test::ABSENT, |(id, device)| Test::Exe { id, device })
        };
        let exes: Vec<_> = matches.exe.iter().map(&mut exe).collect();
        let mut group = |path: &PathBuf| {
            let id = paths.groups.get(path).copied().flatten();
            let below = hierarchy.depth(path);
            let level = below.and_then(|below| kernel.level().checked_add(below));
            let known = id.zip(level);
            if known.is_none() {
                missing.push(path.clone());
            }
            known.map_or(Test::ABSENT, |(id, level)| Test::Group { id, level })
        };
        let groups: Vec<_> = matches.cgroup.iter().map(&mut group).collect();
        let ports = |range: &RangeInclusive<u16>| Test::Port(*range.start(), *range.end());
        let prefix = |prefix: &Prefix| {
            let (address, bits) = prefix.wide();
            Test::Prefix(address, bits)
        };
        let profiles = matches.profile.iter().flat_map(|profile| profile.ports());
        // The cheapest and most selective tests first.
        let kinds = [
            (
                !matches.port.is_empty(),
                matches.port.iter().map(ports).collect(),
            ),
            (!matches.profile.is_empty(), profiles.map(ports).collect()),
            (
                !matches.user.is_empty(),
                matches.user.iter().map(|u| Test::User(u.id)).collect(),
            ),
            (
                !matches.to.is_empty(),
                matches.to.iter().map(prefix).collect(),
            ),
            (!matches.cgroup.is_empty(), groups),
            (!matches.exe.is_empty(), exes),
        ];
        let named = kinds.into_iter().filter(|(named, _)| *named);
        entries.push(Entry {
            all: named.map(|(_, any)| any).collect(),
            local: matches.local,
            act: act.clone(),
        });
    }
    table::compile(&entries)
}
