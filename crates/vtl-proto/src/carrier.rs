//! Carriers of hooked flows, by their names everywhere in VTL: what a flow can use besides TCP and the reliable
//! grafts.

use core::{fmt, str::FromStr};
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Unreliable grafts, as carriers of loss-tolerant flows.
pub const LOSSY: [&str; 4] = ["udp", "udp-lite", "dccp-ccid2", "dccp-ccid3"];

/// The graft that loses at most a share of its packets, a carrier of loss-tolerant flows, too.
pub const PARTIAL: &str = "partial-reliability";

/// Whether sessions over this graft carry loss-tolerant flows only.
pub fn may_lose(graft: &str) -> bool {
    graft == PARTIAL || LOSSY.contains(&graft)
}

/// A graft, and what its parameters shall be where they do not have their defaults: `NAME`, or
/// `NAME?PARAMETER=VALUE&PARAMETER=VALUE`. Serialized as that text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GraftSpec {
    /// The graft.
    pub name: String,
    /// Values by the parameters' names.
    pub params: BTreeMap<String, u32>,
}

/// A graft without parameters.
impl From<&str> for GraftSpec {
    fn from(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            params: BTreeMap::new(),
        }
    }
}

impl From<GraftSpec> for String {
    fn from(spec: GraftSpec) -> Self {
        spec.to_string()
    }
}

impl TryFrom<String> for GraftSpec {
    type Error = NoGraftSpec;

    fn try_from(text: String) -> Result<Self, NoGraftSpec> {
        text.parse()
    }
}

/// Error: the text is no [`GraftSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a graft is NAME, or with parameters NAME?PARAMETER=VALUE&PARAMETER=VALUE, each once, in whole numbers"
)]
pub struct NoGraftSpec;

impl FromStr for GraftSpec {
    type Err = NoGraftSpec;

    fn from_str(text: &str) -> Result<Self, NoGraftSpec> {
        let is_word = |text: &str| {
            let fits = |c: char| !c.is_whitespace() && !c.is_control() && !"?&=".contains(c);
            !text.is_empty() && text.chars().all(fits)
        };
        let (name, rest) = match text.split_once('?') {
            Some((name, rest)) => (name, Some(rest)),
            None => (text, None),
        };
        if !is_word(name) {
            return Err(NoGraftSpec);
        }
        let mut spec = Self::from(name);
        for pair in rest.into_iter().flat_map(|rest| rest.split('&')) {
            let (name, value) = pair.split_once('=').ok_or(NoGraftSpec)?;
            let value = value.parse().map_err(|_| NoGraftSpec)?;
            if !is_word(name) || spec.params.insert(name.to_owned(), value).is_some() {
                return Err(NoGraftSpec);
            }
        }
        Ok(spec)
    }
}

impl fmt::Display for GraftSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (i, (name, value)) in self.params.iter().enumerate() {
            let mark = if i == 0 { '?' } else { '&' };
            write!(f, "{mark}{name}={value}")?;
        }
        Ok(())
    }
}

/// VTL port of sessions that carry flows; not available to applications.
pub const GRAFT_PORT: u16 = 65_535;

/// Added to a kind's number in ASK: a carrier of that kind with layers over it. Older hosts refuse it, as numbers that they do
/// not know.
pub const WITH_LAYERS: u32 = 1 << 8;

/// Kinds of carriers: one carrier to each peer takes all flows of its kind. Serialized by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// QUIC, by quinn.
    Quic,
    /// MPTCP, by the kernel.
    Mptcp,
    /// SCTP in UDP, by sctp-proto.
    Sctp,
    /// KCP, by the crate of that name.
    Kcp,
    /// A session over a graft.
    Graft,
    /// Layers over UDP, or over a carrier of another kind (`stack:NAME`).
    Stack,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Quic,
        Self::Mptcp,
        Self::Sctp,
        Self::Kcp,
        Self::Graft,
        Self::Stack,
    ];
    /// Those that hooks and rules may name alone.
    pub const NAMED: [Self; 5] = [Self::Quic, Self::Mptcp, Self::Sctp, Self::Kcp, Self::Graft];

    /// Finds a kind that may be named alone.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMED.into_iter().find(|kind| kind.name() == name)
    }

    /// The kind's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Mptcp => "mptcp",
            Self::Sctp => "sctp",
            Self::Kcp => "kcp",
            Self::Graft => "graft",
            Self::Stack => "stack",
        }
    }

    /// The kind's number in ASK.
    pub fn number(self) -> u8 {
        match self {
            Self::Quic => 1,
            Self::Mptcp => 2,
            Self::Sctp => 3,
            Self::Kcp => 4,
            Self::Graft => 5,
            Self::Stack => 6,
        }
    }

    /// Finds a kind by its number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }
}

/// Decides by which stack, a carrier on a path, the bytes of a flow go that is spread over several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheduler {
    /// Where they arrive first, those that wait behind them considered (ECF, Lim et al., CoNEXT 2017).
    #[default]
    Ecf,
    /// The lowest round-trip time of those with room.
    LowestRtt,
    /// In proportion to delivery rates.
    Weighted,
    /// In turn.
    RoundRobin,
    /// By all with room: the first copy counts.
    Redundant,
    /// The first path; others only while that one does not deliver.
    Primary,
}

impl Scheduler {
    /// All schedulers.
    pub const ALL: [Self; 6] = [
        Self::Ecf,
        Self::LowestRtt,
        Self::Weighted,
        Self::RoundRobin,
        Self::Redundant,
        Self::Primary,
    ];

    /// The scheduler's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ecf => "ecf",
            Self::LowestRtt => "lowest-rtt",
            Self::Weighted => "weighted",
            Self::RoundRobin => "round-robin",
            Self::Redundant => "redundant",
            Self::Primary => "primary",
        }
    }

    /// Finds a scheduler by its name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|scheduler| scheduler.name() == name)
    }

    /// The scheduler's number in PREFER, three bits.
    pub fn number(self) -> u8 {
        match self {
            Self::Ecf => 0,
            Self::LowestRtt => 1,
            Self::Weighted => 2,
            Self::RoundRobin => 3,
            Self::Redundant => 4,
            Self::Primary => 5,
        }
    }

    /// The scheduler with the number in the lowest three bits; [`Scheduler::Ecf`] for one that this host does not know.
    pub fn numbered(number: u8) -> Self {
        let all = Self::ALL.into_iter();
        let mut found = all.filter(|scheduler| scheduler.number() == number & 7);
        found.next().unwrap_or_default()
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn kind__is_found_by_name_and_number() {
        for kind in Kind::ALL {
            let named = Kind::NAMED.contains(&kind).then_some(kind);
            assert_eq!(Kind::named(kind.name()), named);
            assert_eq!(Kind::numbered(kind.number()), Some(kind));
        }
        assert_eq!(Kind::ALL.map(Kind::number), [1, 2, 3, 4, 5, 6]);
        assert_eq!((Kind::named("udp"), Kind::numbered(0)), (None, None));
    }

    #[test]
    fn graft_spec__reads_what_it_writes_and_nothing_else() {
        for text in ["stream", "go-back-n?window=16", "a?b-c=0&d=4294967295"] {
            let spec: GraftSpec = text.parse().expect("valid");
            assert_eq!(spec.to_string(), text);
            assert_eq!(GraftSpec::try_from(String::from(spec.clone())), Ok(spec));
        }
        assert_eq!("stream".parse(), Ok(GraftSpec::from("stream")));
        // In the order of names, however written.
        let spec: GraftSpec = "a?d=1&b=2".parse().expect("valid");
        assert_eq!(spec.to_string(), "a?b=2&d=1");
        for text in [
            "",
            "?a=1",
            "a?",
            "a?b",
            "a?b=",
            "a?=1",
            "a?b=-1",
            "a?b=1.5",
            "a?b=1&",
            "a?b=1&b=2",
            "a?b=4294967296",
            "a b",
            "a?b=1?c=2",
        ] {
            assert_eq!(text.parse::<GraftSpec>(), Err(NoGraftSpec), "{text}");
        }
        assert!(may_lose("partial-reliability") && may_lose("udp") && !may_lose("go-back-n"));
    }

    #[test]
    fn scheduler__is_found_by_name_and_number() {
        for scheduler in Scheduler::ALL {
            assert_eq!(Scheduler::named(scheduler.name()), Some(scheduler));
            assert_eq!(Scheduler::numbered(scheduler.number()), scheduler);
            assert_eq!(Scheduler::numbered(scheduler.number() | 8), scheduler);
        }
        assert_eq!(Scheduler::ALL.map(Scheduler::number), [0, 1, 2, 3, 4, 5]);
        assert_eq!(Scheduler::named("best"), None);
        assert_eq!([6, 7].map(Scheduler::numbered), [Scheduler::Ecf; 2]);
    }
}
