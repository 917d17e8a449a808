//! Carriers chosen by hooks and rules.
//!
//! A TCP congestion control needs no proxy and no discovery: `bpf/carrier.bpf.c`, loaded once for
//! each such hook, sets it when a connection is opened or accepted. VTL's own congestion controls
//! are registered on first use and unregistered when the daemon ends ([`vtl_bpf::tcp`]).

use std::{fmt, fs::File, path::Path, str::FromStr, sync::Arc};

use libbpf_rs::{MapCore, MapFlags, MapHandle, Object};
use serde::{Deserialize, Serialize};
use vtl_control::CarrierSpec;
use vtl_core::reconfigure::Bounds;
use vtl_proto::{
    carrier::{GraftSpec, Kind, LOSSY, PARTIAL, Scheduler},
    services::{Requirements, Services},
};

use super::{
    abi::{
        VTL_CC_NAME_MAX, VTL_POLICY_NEAR, VTL_POLICY_PLAIN, VTL_POLICY_REQUIRE, vtl_carrier_config,
    },
    bpf::{self, Attached},
    error::HookerError,
};
use crate::controls;

/// The carrier of a hook's connections.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Carrier {
    /// Sessions with peers that run VTL, over the highest-ranked graft that both have; TCP to others.
    #[default]
    Best,
    /// `auto`: one of `vtl_core::select::CLASSES` with peers that run VTL, chosen by the path and the application, so that
    /// a rule's bounds are kept where they can; TCP to others.
    Auto(Bounds),
    /// `tcp`: TCP with the system's defaults.
    Plain,
    /// `tcp:NAME`: TCP under this congestion control.
    Control(String),
    /// `graft:NAME`, with parameters `graft:NAME?PARAMETER=VALUE`: sessions over this graft with peers that run VTL; TCP to
    /// others.
    Graft(GraftSpec),
    /// Sessions over the highest-ranked graft that provides these services besides those that every TCP connection
    /// needs; TCP to hosts without VTL. For rules.
    Services(Requirements),
    /// `multipath` or `multipath:SCHEDULER`: sessions on several paths at once with peers that run VTL, over which each
    /// flow is spread; TCP to others.
    Multipath(Scheduler),
    /// `quic` and others: one carrier of this kind to each peer that runs VTL, shared by the flows; TCP to others.
    Flows(Kind),
    /// `stack:NAME`, with parameters `stack:NAME?rate=20`: one stack of layers to each peer that runs VTL, shared by the
    /// flows; TCP to others.
    Stack(GraftSpec),
    /// `udp` and others, and `graft:partial-reliability`, for flows that are marked loss-tolerant: sessions over the graft
    /// of that name, which repeats nothing, or not all, with peers whose port is marked so, too; TCP to others.
    Lossy(GraftSpec),
    /// For server ports that are marked loss-tolerant: as [`Carrier::Best`], and clients may use
    /// [`Carrier::Lossy`].
    Tolerant,
    /// For server ports: the carrier, [`Carrier::Best`] or [`Carrier::Tolerant`], for clients with
    /// VTL; TCP under this congestion control for the others.
    Others(Box<Self>, String),
    /// This carrier without fallback: connections fail if it is unavailable, and no byte goes by TCP.
    Required(Must, Box<Self>),
}

/// Requirement of connections without fallback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Must {
    /// A carrier.
    Carrier,
    /// An encrypted carrier: the one that is named, or TLS between the daemons.
    Encryption,
}

impl Carrier {
    /// Whether connections are captured by vtld.
    pub(super) fn captures(&self) -> bool {
        !matches!(self, Self::Plain | Self::Control(_))
    }

    /// The kind of carrier of flows, and the session's parameters; `None`: plain TCP.
    pub fn of_flows(&self) -> Option<(Kind, Option<Arc<CarrierOptions>>)> {
        let policy = CarrierPolicy::new(self)?;
        Some((policy.kind.unwrap_or(Kind::Graft), policy.options))
    }

    /// Whether clients of a port may use lossy carriers.
    pub(super) fn is_tolerant(&self) -> bool {
        match self {
            Self::Others(carrier, _) => carrier.is_tolerant(),
            carrier => *carrier == Self::Tolerant,
        }
    }

    /// The congestion control of plain TCP connections, if one is named.
    pub(super) fn control(&self) -> Option<&str> {
        match self {
            Self::Control(name) | Self::Others(_, name) => Some(name),
            _ => None,
        }
    }

    /// Checks that it is a valid carrier for connections that a port accepts.
    pub(super) fn serves_port(&self) -> Result<(), HookerError> {
        let why = match self {
            Self::Best | Self::Tolerant | Self::Control(_) | Self::Others(..) => return Ok(()),
            Self::Plain => "a port that is not hooked is plain TCP already",
            Self::Auto(_) => "who connects chooses by its path (hook the port without a carrier)",
            Self::Graft(_) => "who connects chooses the graft (hook the port without a carrier)",
            Self::Services(_) => "who connects says what it needs (hook the port without services)",
            Self::Flows(_) | Self::Multipath(_) | Self::Stack(_) => {
                "who connects chooses it (hook the port without a carrier)"
            }
            Self::Required(..) => {
                "who connects requires a carrier (a packet filter decides which clients a port \
                 takes: docs/firewall.md)"
            }
            Self::Lossy(_) => {
                "who connects chooses it (mark the port loss-tolerant, without a carrier)"
            }
        };
        Err(HookerError::NotForPorts {
            carrier: self.to_string(),
            why,
        })
    }

    /// Converts the carrier of a request. `port`: for connections that a server accepts.
    pub fn wanted(spec: &CarrierSpec, port: bool) -> Result<Self, String> {
        let carrier = match &spec.carrier {
            None => Self::default(),
            Some(name) => name.parse()?,
        };
        let carrier = carrier.marked(spec.loss_tolerant, port, "--loss-tolerant")?;
        let carrier = match (spec.require_encryption, spec.require) {
            (true, _) => carrier.required(Must::Encryption, "--require-encryption"),
            (false, true) => carrier.required(Must::Carrier, "--require"),
            (false, false) => Ok(carrier),
        }?;
        match &spec.others {
            Some(others) => carrier.with_others(others, port, "--others"),
            None => Ok(carrier),
        }
    }

    /// Inverse of [`Carrier::wanted`]; not for rules' [`Carrier::Services`].
    pub(super) fn spec(&self) -> CarrierSpec {
        let carrier = match self {
            Self::Required(must, carrier) => {
                return CarrierSpec {
                    require: true,
                    require_encryption: *must == Must::Encryption,
                    ..carrier.spec()
                };
            }
            Self::Others(carrier, control) => {
                return CarrierSpec {
                    others: Some(Self::Control(control.clone()).to_string()),
                    ..carrier.spec()
                };
            }
            Self::Best | Self::Tolerant => None,
            other => Some(other.to_string()),
        };
        let loss_tolerant = matches!(self, Self::Tolerant | Self::Lossy(_));
        CarrierSpec {
            carrier,
            loss_tolerant,
            ..CarrierSpec::default()
        }
    }

    /// Adds a congestion control for clients without VTL; `others`: `tcp:CONTROL`. `how`: the option
    /// that asks for it, named in errors.
    pub fn with_others(self, others: &str, port: bool, how: &str) -> Result<Self, String> {
        let why = match self {
            Self::Best | Self::Tolerant if port => match others.parse()? {
                Self::Control(control) => return Ok(Self::Others(Box::new(self), control)),
                other => return Err(format!("{how} takes tcp:CONTROL (tcp:stream), not {other}")),
            },
            Self::Control(_) if port => "all that the port accepts is sent under that already",
            Self::Required(..) => "what must be carried is never plain TCP",
            _ => "it is for ports of servers that are hooked without a carrier",
        };
        Err(format!("{self} has no use for {how}: {why}"))
    }

    /// Makes the carrier required (no fallback). `how`: the option that asks for it, named in errors.
    pub fn required(self, must: Must, how: &str) -> Result<Self, String> {
        let why = match self {
            Self::Best
            | Self::Graft(_)
            | Self::Services(_)
            | Self::Flows(_)
            | Self::Stack(_)
            | Self::Multipath(_) => {
                return Ok(Self::Required(must, Box::new(self)));
            }
            Self::Auto(_) => "where TCP is best for the path it chooses TCP",
            Self::Plain | Self::Control(_) => "it is TCP, which needs no other host's agreement",
            Self::Lossy(_) | Self::Tolerant => "what may not get lost of such flows goes by TCP",
            Self::Others(..) => "TCP is what others are sent by",
            Self::Required(..) => "it is required already",
        };
        Err(format!(
            "{self} cannot be required ({how}): {why}; name no carrier, graft:NAME, multipath, stack:NAME, or one of {}",
            Kind::NAMED.map(Kind::name).join(", ")
        ))
    }

    /// Checks the carrier against the mark loss-tolerant of its flows or port, so that nobody loses
    /// bytes by accident. `how`: the option that sets the mark, named in errors.
    pub fn marked(self, tolerant: bool, port: bool, how: &str) -> Result<Self, String> {
        match self {
            Self::Lossy(name) if !tolerant => Err(format!(
                "{} does not repeat what the network loses: mark these flows loss-tolerant \
                 ({how}) if they can do without that, or take another carrier",
                Self::Lossy(name)
            )),
            Self::Best if tolerant && port => Ok(Self::Tolerant),
            carrier if !tolerant || matches!(carrier, Self::Lossy(_)) => Ok(carrier),
            carrier => Err(format!(
                "{carrier} has no use for the mark loss-tolerant ({how}), which goes with the \
                 carriers {} and graft:{PARTIAL}, and with ports of servers without a carrier",
                LOSSY.join(", ")
            )),
        }
    }
}

impl FromStr for Carrier {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let word = |name: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
            !name.is_empty() && name.len() < VTL_CC_NAME_MAX as usize && name.chars().all(fits)
        };
        match text.split_once(':') {
            None if text == "best" => Ok(Self::Best),
            None if text == "tcp" => Ok(Self::Plain),
            None if text == "auto" => Ok(Self::Auto(Bounds::default())),
            None if text == "multipath" => Ok(Self::Multipath(Scheduler::default())),
            None if let Some(kind) = Kind::named(text) => Ok(Self::Flows(kind)),
            None if let Ok(spec) = text.parse::<GraftSpec>()
                && LOSSY.contains(&spec.name.as_str()) =>
            {
                Ok(Self::Lossy(spec))
            }
            Some(("tcp", name)) if word(name) => Ok(Self::Control(name.to_owned())),
            Some(("multipath", name)) => match Scheduler::named(name) {
                Some(scheduler) => Ok(Self::Multipath(scheduler)),
                None => Err(format!(
                    "there is no carrier \"{}\": multipath has the schedulers {}",
                    text.escape_debug(),
                    Scheduler::ALL.map(Scheduler::name).join(", ")
                )),
            },
            Some(("graft", spec)) if !spec.is_empty() => match spec.parse::<GraftSpec>() {
                Ok(spec) if spec.name == PARTIAL => Ok(Self::Lossy(spec)),
                Ok(spec) => Ok(Self::Graft(spec)),
                Err(why) => Err(format!(
                    "there is no carrier \"{}\": {why} (graft:go-back-n?window=64)",
                    text.escape_debug()
                )),
            },
            Some(("stack", spec)) if let Ok(spec) = spec.parse() => Ok(Self::Stack(spec)),
            _ => Err(format!(
                "there is no carrier \"{}\": name best, auto, tcp, tcp:CONTROL (tcp:cubic), graft:NAME \
                 (graft:cubic), multipath, multipath:SCHEDULER (multipath:redundant), stack:NAME (stack:udp-plus?rate=20), {} or, for flows that may lose something, {}",
                text.escape_debug(),
                Kind::NAMED.map(Kind::name).join(", "),
                LOSSY.join(", ")
            )),
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Best => f.write_str("best"),
            Self::Auto(bounds) if bounds.is_none() => f.write_str("auto"),
            Self::Auto(bounds) => write!(f, "auto, {bounds}"),
            Self::Plain => f.write_str("tcp"),
            Self::Control(name) => write!(f, "tcp:{name}"),
            Self::Graft(name) => write!(f, "graft:{name}"),
            Self::Services(wanted) => write!(f, "services {}", words(wanted)),
            Self::Multipath(scheduler) if *scheduler == Scheduler::default() => {
                f.write_str("multipath")
            }
            Self::Multipath(scheduler) => write!(f, "multipath:{scheduler}"),
            Self::Flows(kind) => kind.fmt(f),
            Self::Stack(spec) => write!(f, "stack:{spec}"),
            Self::Lossy(spec) if spec.name == PARTIAL => write!(f, "graft:{spec}"),
            Self::Lossy(spec) => spec.fmt(f),
            Self::Tolerant => f.write_str("best, loss-tolerant"),
            Self::Others(carrier, control) => write!(f, "{carrier}, others tcp:{control}"),
            Self::Required(Must::Carrier, carrier) => write!(f, "{carrier}, required"),
            Self::Required(Must::Encryption, carrier) => {
                write!(f, "{carrier}, encryption required")
            }
        }
    }
}

/// Formats requirements with the keywords of rules.
fn words(wanted: &Requirements) -> String {
    let sets = [
        ("require", wanted.services),
        ("prefer", wanted.prefer),
        ("avoid", wanted.avoid),
        ("prohibit", wanted.prohibit),
    ];
    let sets = sets.into_iter().filter(|(_, set)| !set.is_empty());
    let mut all: Vec<_> = sets.map(|(level, set)| format!("{level} {set}")).collect();
    let qos = &wanted.qos;
    all.extend(qos.max_delay_ms.map(|ms| format!("max_delay_ms {ms}")));
    all.extend(
        qos.min_throughput_mbit
            .map(|mbit| format!("min_throughput_mbit {mbit}")),
    );
    all.join(", ")
}

/// Session parameters of flows, as chosen by a hook or rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum CarrierOptions {
    /// This graft.
    Graft(GraftSpec),
    /// The highest-ranked graft that provides these services besides those that every TCP connection needs.
    Services(Requirements),
    /// This lossy graft.
    Lossy(GraftSpec),
    /// The highest-ranked graft, on several paths, over which flows are spread by this scheduler.
    Spread(Scheduler),
    /// No session, but this stack.
    Stack(GraftSpec),
}

/// The policy of a hook for its connections.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CarrierPolicy {
    #[serde(rename = "over")]
    pub(super) options: Option<Arc<CarrierOptions>>,
    pub(super) kind: Option<Kind>,
    /// A carrier is required: no fallback to TCP.
    #[serde(default)]
    pub(super) required: bool,
    /// Encryption is required.
    #[serde(default)]
    pub(super) encrypted: bool,
    /// The rule, if it has conditions on the path.
    #[serde(default)]
    pub(super) rule: Option<Arc<str>>,
    /// The carrier is chosen by path and application.
    #[serde(default)]
    pub(super) auto: bool,
    /// What the choice is to keep.
    #[serde(default)]
    pub(super) bounds: Bounds,
    /// The connections are marked loss-tolerant.
    #[serde(default)]
    pub(super) tolerant: bool,
}

impl CarrierPolicy {
    /// The policy for a client's carrier by way of vtld; `None` for plain TCP, and for server ports' carriers.
    pub(super) fn new(carrier: &Carrier) -> Option<Self> {
        let mut policy = Self::default();
        match carrier {
            Carrier::Best => {}
            Carrier::Auto(bounds) => {
                policy.auto = true;
                policy.bounds = *bounds;
            }
            Carrier::Graft(name) => {
                policy.options = Some(CarrierOptions::Graft(name.clone()).into());
            }
            Carrier::Services(wanted) => {
                policy.options = Some(CarrierOptions::Services(*wanted).into());
                policy.encrypted = wanted.required().contains(Services::ENCRYPTION);
                policy.required = policy.encrypted;
            }
            Carrier::Multipath(scheduler) => {
                policy.options = Some(CarrierOptions::Spread(*scheduler).into());
            }
            Carrier::Flows(kind) => policy.kind = Some(*kind),
            Carrier::Stack(spec) => {
                policy.kind = Some(Kind::Stack);
                policy.options = Some(CarrierOptions::Stack(spec.clone()).into());
            }
            Carrier::Lossy(spec) => {
                policy.options = Some(CarrierOptions::Lossy(spec.clone()).into());
                policy.tolerant = true;
            }
            Carrier::Required(must, carrier) => {
                policy = Self::new(carrier)?;
                policy.required = true;
                policy.encrypted |= *must == Must::Encryption;
            }
            Carrier::Tolerant | Carrier::Others(..) | Carrier::Plain | Carrier::Control(_) => {
                return None;
            }
        }
        Some(policy)
    }
}

/// The policies of hooks, indexed by the number in their sockets' storage.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct CarrierPolicies(Vec<CarrierPolicy>);

impl CarrierPolicies {
    /// The number for a carrier; [`VTL_POLICY_PLAIN`] for one that bypasses vtld.
    pub(super) fn number(&mut self, carrier: &Carrier) -> u32 {
        self.index(CarrierPolicy::new(carrier))
    }

    /// The same for connections of a rule that has conditions on the path. `tolerant`: it marks them loss-tolerant.
    pub(super) fn number_of(&mut self, carrier: &Carrier, rule: Arc<str>, tolerant: bool) -> u32 {
        self.index(CarrierPolicy::new(carrier).map(|policy| CarrierPolicy {
            rule: Some(rule),
            tolerant: policy.tolerant || tolerant,
            ..policy
        }))
    }

    fn index(&mut self, policy: Option<CarrierPolicy>) -> u32 {
        let Some(policy) = policy.filter(|policy| *policy != CarrierPolicy::default()) else {
            return VTL_POLICY_PLAIN;
        };
        let mark = match (policy.required, policy.auto) {
            (true, _) => VTL_POLICY_REQUIRE,
            (false, true) => VTL_POLICY_NEAR,
            (false, false) => 0,
        };
        let known = self.0.iter().position(|known| *known == policy);
        let index = known.unwrap_or_else(|| {
            self.0.push(policy);
            self.0.len() - 1
        });
        (index as u32 + 1) | mark
    }

    /// The policy with a number.
    pub(super) fn get(&self, number: u32) -> CarrierPolicy {
        let index = ((number & !(VTL_POLICY_REQUIRE | VTL_POLICY_NEAR)) as usize).wrapping_sub(1);
        self.0.get(index).cloned().unwrap_or_default()
    }
}

/// Resolves a congestion control that a hook or rule names to its name in the kernel. VTL's own take precedence over the
/// kernel's of the same name.
pub(super) fn kernel_control(name: &str) -> Result<String, HookerError> {
    if vtl_bpf::tcp::is_known(name) {
        return controls::register(name).map_err(|source| HookerError::Control {
            name: name.to_owned(),
            others: own_carriers(),
            source,
        });
    }
    // Not another daemon's: that would be gone with it.
    if own_of_kernel().any(|known| known == name) {
        return Ok(name.to_owned());
    }
    let mut others: Vec<_> = vtl_bpf::tcp::names().map(|n| format!("tcp:{n}")).collect();
    others.push(own_carriers());
    Err(HookerError::NoSuchControl {
        name: name.to_owned(),
        others: others.join(", "),
    })
}

/// Names of the kernel's own congestion controls.
fn own_of_kernel() -> impl Iterator<Item = String> {
    let all = vtl_bpf::tcp::of_kernel().into_iter();
    all.filter(|name| !name.starts_with(vtl_bpf::tcp::PREFIX))
}

/// The same as a list of carriers, for errors.
fn own_carriers() -> String {
    own_of_kernel()
        .map(|name| format!("tcp:{name}"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// The programs of one hook whose carrier is named; detached on drop.
pub(super) struct Programs {
    object: Object,
    links: Vec<Attached>,
}

/// Scope of the programs.
pub(super) enum At {
    /// Connections that the programs of the hooked cgroup open.
    Opened,
    /// Connections that this port accepts.
    Port(u16),
}

const SOCKOPS: &str = "vtl_control";
const POLICY: [&str; 2] = ["vtl_policy4", "vtl_policy6"];

impl Programs {
    /// Loads the programs that the carrier needs and attaches them to the cgroup at `path`.
    /// `control`: the congestion control's name in the kernel.
    pub(super) fn attach(
        netns_cookie: u64,
        at: &At,
        policy: u32,
        control: Option<&str>,
        policies: &MapHandle,
        path: &Path,
        cgroup: &File,
    ) -> Result<Self, HookerError> {
        let mut config = vtl_carrier_config {
            netns_cookie,
            policy,
            ..Default::default()
        };
        if let At::Port(port) = at {
            config.port = *port;
        }
        if let Some(name) = control {
            config.marks = vtl_bpf::tcp::needs_ecn(name).into();
            for (to, from) in config.control.iter_mut().zip(name.bytes()) {
                *to = from as _;
            }
        }
        let mut names = Vec::new();
        if matches!(at, At::Opened) {
            names.extend(POLICY);
        }
        if control.is_some() {
            names.push(SOCKOPS);
        }
        let object = bpf::load(vtl_bpf::objects::CARRIER, &config, |open| {
            for mut program in open.progs_mut() {
                let wanted = names.iter().any(|name| program.name() == *name);
                program.set_autoload(wanted);
            }
            use std::os::fd::AsFd;
            let mut map = open.maps_mut().find(|map| map.name() == "vtl_policies");
            map.as_mut()
                .map_or(Ok(()), |map| map.reuse_fd(policies.as_fd()))
        })?;
        let links = names
            .into_iter()
            .map(|name| bpf::attach_cgroup(&object, name, path, cgroup))
            .collect::<Result<_, _>>()?;
        Ok(Self { object, links })
    }

    /// Detaches the programs; established connections keep their congestion control.
    pub(super) fn detach(&mut self) {
        self.links.clear();
    }

    /// Number of connections whose congestion control was set.
    pub(super) fn connections(&self) -> u64 {
        let counted = self
            .object
            .maps()
            .find(|map| map.name().to_string_lossy().ends_with(".bss"))
            .and_then(|map| map.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY).ok()?);
        let count = counted.and_then(|bytes| bytes.first_chunk().copied());
        count.map_or(0, u64::from_ne_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others__are_for_ports_without_a_carrier() {
        let spec = |carrier: Option<&str>, loss_tolerant, others: &str| CarrierSpec {
            carrier: carrier.map(str::to_owned),
            loss_tolerant,
            others: Some(others.to_owned()),
            ..CarrierSpec::default()
        };
        for tolerant in [false, true] {
            let spec = spec(None, tolerant, "tcp:stream");
            let carrier = Carrier::wanted(&spec, true).expect("valid");
            assert_eq!(carrier.spec(), spec);
            assert!(carrier.captures() && carrier.is_tolerant() == tolerant);
            assert_eq!(carrier.control(), Some("stream"));
            assert!(carrier.serves_port().is_ok());
        }
        for (spec, port, about) in [
            (spec(None, false, "tcp:stream"), false, "for ports"),
            (spec(Some("quic"), false, "tcp:stream"), true, "for ports"),
            (spec(Some("tcp:bbr"), false, "tcp:stream"), true, "already"),
            (spec(None, false, "quic"), true, "takes tcp:CONTROL"),
            (spec(None, false, "x"), true, "there is no carrier"),
        ] {
            let error = Carrier::wanted(&spec, port).expect_err("refused");
            assert!(error.contains(about), "{error}");
        }
    }

    #[test]
    fn carrier__reads_what_it_writes() {
        for text in [
            "tcp",
            "tcp:cubic",
            "tcp:a-b_9",
            "auto",
            "graft:stream",
            "graft:go-back-n?window=16",
            "graft:partial-reliability",
            "graft:partial-reliability?max-loss=100&window=64",
            "multipath",
            "multipath:redundant",
            "stack:udp-plus",
            "stack:udp-plus?peer-rate=5&rate=20",
            "quic",
            "sctp",
            "udp",
            "udp-lite?coverage=8",
        ] {
            assert_eq!(text.parse::<Carrier>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn carrier__loses_only_what_is_marked() {
        for name in LOSSY
            .into_iter()
            .chain(["graft:partial-reliability?max-loss=1"])
        {
            let carrier: Carrier = name.parse().unwrap();
            assert!(carrier.clone().marked(false, false, "").is_err(), "{name}");
            assert_eq!(carrier.clone().marked(true, false, ""), Ok(carrier));
        }
        assert_eq!(Carrier::Best.marked(true, true, ""), Ok(Carrier::Tolerant));
        assert_eq!(Carrier::Best.marked(false, true, ""), Ok(Carrier::Best));
        for other in [Carrier::Best, Carrier::Plain, Carrier::Graft("x".into())] {
            assert!(other.marked(true, false, "").is_err());
        }
    }

    #[test]
    fn carrier__requires_only_what_is_no_tcp() {
        for text in ["tcp", "tcp:cubic", "auto"] {
            let carrier: Carrier = text.parse().unwrap();
            let error = carrier.required(Must::Carrier, "--require").unwrap_err();
            assert!(
                error.contains("--require") && error.contains("quic"),
                "{error}"
            );
        }
        assert!(
            Carrier::Lossy(LOSSY[0].into())
                .required(Must::Encryption, "")
                .is_err()
        );
        let required = |must| Carrier::Graft("x".into()).required(must, "").unwrap();
        let encrypted = required(Must::Encryption);
        assert_eq!(encrypted.to_string(), "graft:x, encryption required");
        let required = required(Must::Carrier);
        assert_eq!(required.to_string(), "graft:x, required");
        assert!(required.captures());
    }

    #[test]
    fn spec__is_what_was_wanted() {
        for (text, port) in [
            ("auto", false),
            ("quic", false),
            ("graft:x", false),
            ("multipath:primary", false),
            ("stack:udp-plus?rate=20", false),
            ("tcp:bbr", true),
        ] {
            let carrier: Carrier = text.parse().unwrap();
            assert_eq!(Carrier::wanted(&carrier.spec(), port), Ok(carrier));
        }
        for carrier in [Carrier::Best, Carrier::Tolerant] {
            assert_eq!(Carrier::wanted(&carrier.spec(), true), Ok(carrier));
        }
        for carrier in [Carrier::Best, Carrier::Flows(Kind::Quic)] {
            for must in [Must::Carrier, Must::Encryption] {
                let carrier = carrier.clone().required(must, "").unwrap();
                assert!(carrier.spec().require && carrier.serves_port().is_err());
                assert_eq!(Carrier::wanted(&carrier.spec(), false), Ok(carrier));
            }
        }
        for lossy in [LOSSY[0], PARTIAL] {
            let lossy = Carrier::Lossy(lossy.into());
            assert_eq!(Carrier::wanted(&lossy.spec(), false), Ok(lossy));
        }
    }

    #[test]
    fn policies__number_each_graft_once() {
        let mut policies = CarrierPolicies::default();
        let [a, b] = ["a", "b"].map(|name| Carrier::Graft(name.into()));
        assert_eq!([&a, &b, &a].map(|c| policies.number(c)), [1, 2, 1]);
        assert_eq!(policies.number(&Carrier::Plain), VTL_POLICY_PLAIN);
        assert_eq!(
            policies.get(2).options.as_deref(),
            Some(&CarrierOptions::Graft("b".into()))
        );
        let quic = Kind::Quic;
        assert_eq!(policies.number(&Carrier::Flows(quic)), 3);
        assert_eq!(policies.get(3).kind, Some(quic));
        let required = |must| Carrier::Best.required(must, "").unwrap();
        let number = policies.number(&required(Must::Carrier));
        assert_eq!(number, 4 | VTL_POLICY_REQUIRE);
        assert!(policies.get(number).required && !policies.get(number).encrypted);
        let number = policies.number(&required(Must::Encryption));
        assert_eq!(number, 5 | VTL_POLICY_REQUIRE);
        assert!(policies.get(number).required && policies.get(number).encrypted);
        // Connections of a rule with conditions are told from others, also without a carrier of their own.
        let number = policies.number_of(&Carrier::Best, "far".into(), false);
        assert_eq!(
            (number, policies.number(&Carrier::Best)),
            (6, VTL_POLICY_PLAIN)
        );
        assert_eq!(policies.get(number).rule.as_deref(), Some("far"));
        assert!(!policies.get(number).tolerant);
        // Those whose carrier is chosen bypass vtld where the host is near.
        let number = policies.number(&Carrier::Auto(Bounds::default()));
        assert_eq!(number, 7 | VTL_POLICY_NEAR);
        assert!(policies.get(number).auto && !policies.get(6).auto);
        // And those with bounds from those without.
        let bounds = Bounds {
            min_throughput: Some(5_000_000),
            ..Bounds::default()
        };
        let bounded = policies.number(&Carrier::Auto(bounds));
        assert_eq!(bounded, 8 | VTL_POLICY_NEAR);
        assert_eq!(policies.get(bounded).bounds, bounds);
        // What may lose something is told from what may not.
        let tolerant = policies.number_of(&Carrier::Best, "far".into(), true);
        assert!(tolerant == 9 && policies.get(tolerant).tolerant);
        for nobody in [0, 10, VTL_POLICY_PLAIN] {
            assert_eq!(policies.get(nobody), CarrierPolicy::default());
        }
    }

    #[test]
    fn of_flows__is_a_kind_or_tcp() {
        assert_eq!(Carrier::Best.of_flows(), Some((Kind::Graft, None)));
        assert_eq!(Carrier::Plain.of_flows(), None);
        assert_eq!(
            Carrier::Flows(Kind::Kcp).of_flows(),
            Some((Kind::Kcp, None))
        );
        let options = Some(Arc::new(CarrierOptions::Graft("x".into())));
        let graft = Carrier::Graft("x".into());
        assert_eq!(graft.of_flows(), Some((Kind::Graft, options)));
    }

    #[test]
    fn carrier__refuses_everything_else() {
        let bad = [
            "",
            "dccp",
            "best, loss-tolerant",
            "graft:",
            "tcp:",
            "tcp:a/b",
            "tcp:a b",
            "tcp:sixteen-letters-",
            "TCP",
            "multipath:",
            "multipath:fastest",
            "graft:a?b",
            "graft:a?b=1&b=2",
            "udp?x",
            "stack",
            "stack:",
            "stack:a?b",
        ];
        for text in bad {
            let error = text.parse::<Carrier>().unwrap_err();
            assert!(error.contains("there is no carrier"), "{text}: {error}");
        }
    }
}
