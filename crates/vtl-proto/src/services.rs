//! Transport services: requirements of applications, and services that grafts provide; the thesis's tables 3.1
//! (services) and 3.2 (quality of service).

use core::{fmt, ops::BitOr, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::intf;

/// A set of transport services, `enum vtl_service`. Unknown bits are kept: a service that a newer peer requires
/// and no graft here provides must not be granted. Serialized as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Services(u16);

impl Services {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// No corruption, no duplicate, no loss.
    pub const RELIABLE: Self = Self(intf::VTL_S_RELIABLE as u16);
    /// In-order delivery.
    pub const ORDERED: Self = Self(intf::VTL_S_ORDERED as u16);
    /// Flow control: a sender never overruns its receiver.
    pub const FLOW_CONTROL: Self = Self(intf::VTL_S_FLOW_CONTROL as u16);
    /// Congestion control: a sender adapts to the network's capacity.
    pub const CONGESTION_CONTROL: Self = Self(intf::VTL_S_CONGESTION_CONTROL as u16);

    /// No corruption, no duplicate, and at most the agreed loss: [`Qos::max_loss_pct`]. Implied by `RELIABLE`.
    pub const PARTIAL_RELIABILITY: Self = Self(intf::VTL_S_PARTIAL_RELIABILITY as u16);
    /// Delivery in the agreed partial order. Implied by `ORDERED`.
    pub const PARTIAL_ORDER: Self = Self(intf::VTL_S_PARTIAL_ORDER as u16);
    /// Several paths at once.
    pub const MULTIPATH: Self = Self(intf::VTL_S_MULTIPATH as u16);
    /// Confidential and authentic.
    pub const ENCRYPTION: Self = Self(intf::VTL_S_ENCRYPTION as u16);

    const NAMES: [(Self, &str); 8] = [
        (Self::RELIABLE, "reliable"),
        (Self::ORDERED, "ordered"),
        (Self::FLOW_CONTROL, "flow-control"),
        (Self::CONGESTION_CONTROL, "congestion-control"),
        (Self::PARTIAL_RELIABILITY, "partial-reliability"),
        (Self::PARTIAL_ORDER, "partial-order"),
        (Self::MULTIPATH, "multipath"),
        (Self::ENCRYPTION, "encryption"),
    ];

    /// The services of a TCP connection.
    pub const TCP: Self = Self::RELIABLE
        .union(Self::ORDERED)
        .union(Self::FLOW_CONTROL)
        .union(Self::CONGESTION_CONTROL);

    /// Creates a set of bits of `enum vtl_service`.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Its bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The union; also in constants, where `|` does not work.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether every service of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Services of `required` that this set lacks.
    pub const fn missing(self, required: Self) -> Self {
        Self(required.0 & !self.0)
    }

    /// The intersection.
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Number of services.
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// This set with the services that it implies: reliability implies partial reliability, order partial
    /// order.
    pub const fn implied(self) -> Self {
        let mut all = self;
        if self.contains(Self::RELIABLE) {
            all = all.union(Self::PARTIAL_RELIABILITY);
        }
        if self.contains(Self::ORDERED) {
            all = all.union(Self::PARTIAL_ORDER);
        }
        all
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }
}

impl BitOr for Services {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        self.union(other)
    }
}

/// Names with `+` between them, `none` for the empty set, unknown bits in hexadecimal.
impl fmt::Display for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("none");
        }
        let mut rest = *self;
        let mut separator = "";
        for (service, name) in Self::NAMES {
            if self.contains(service) {
                write!(f, "{separator}{name}")?;
                separator = "+";
                rest = service.missing(rest);
            }
        }
        if rest.is_empty() {
            Ok(())
        } else {
            write!(f, "{separator}{:#x}", rest.0)
        }
    }
}

/// Unknown name of a service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no service; there are reliable, ordered, flow-control, congestion-control, \
     partial-reliability, partial-order, multipath, encryption and none"
)]
pub struct UnknownService(pub String);

/// The names of [`Services`]'s `Display`, separated by `+` or commas.
impl FromStr for Services {
    type Err = UnknownService;

    fn from_str(text: &str) -> Result<Self, UnknownService> {
        let mut set = Self::NONE;
        for word in text.split(['+', ',']).map(str::trim) {
            if word == "none" {
                continue;
            }
            let found = Self::NAMES.iter().find(|(_, name)| *name == word);
            set = set | found.ok_or_else(|| UnknownService(word.to_owned()))?.0;
        }
        Ok(set)
    }
}

/// Quality of service; `None`: no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Qos {
    /// Maximum delay from the sender's call to availability at the receiving application, milliseconds.
    pub max_delay_ms: Option<u32>,
    /// Minimum throughput, Mbit/s of payload.
    pub min_throughput_mbit: Option<f64>,
    /// Maximum loss of packets, percent.
    pub max_loss_pct: Option<f64>,
}

/// Preference for a service or for its absence: the levels of RFC 9622, section 6.2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preference {
    /// Only grafts that provide it.
    Require,
    /// Rather grafts that provide it.
    Prefer,
    /// Either.
    #[default]
    None,
    /// Rather grafts that do not provide it.
    Avoid,
    /// Only grafts that do not provide it.
    Prohibit,
}

/// Requirements of an application. [`Requirements::set`] keeps the four sets disjoint. Serialized, the bounds
/// are fields beside the sets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Requirements {
    /// Services that must be there.
    pub services: Services,
    /// Services that should be there.
    pub prefer: Services,
    /// Services that should not be there.
    pub avoid: Services,
    /// Services that must not be there.
    pub prohibit: Services,
    /// Bounds.
    #[serde(flatten)]
    pub qos: Qos,
}

impl Requirements {
    /// Reliable, ordered and congestion-controlled: the default.
    pub const STREAM: Self = Self {
        services: Services::RELIABLE
            .union(Services::ORDERED)
            .union(Services::CONGESTION_CONTROL),
        prefer: Services::NONE,
        avoid: Services::NONE,
        prohibit: Services::NONE,
        qos: Qos {
            max_delay_ms: None,
            min_throughput_mbit: None,
            max_loss_pct: None,
        },
    };

    /// Sets the preference for `services`, replacing earlier ones.
    pub fn set(&mut self, services: Services, preference: Preference) {
        let levels = [
            (Preference::Require, &mut self.services),
            (Preference::Prefer, &mut self.prefer),
            (Preference::Avoid, &mut self.avoid),
            (Preference::Prohibit, &mut self.prohibit),
        ];
        for (level, set) in levels {
            *set = if level == preference {
                *set | services
            } else {
                services.missing(*set)
            };
        }
    }

    /// The services that a graft must provide: those required, and those implied by bounds.
    pub fn required(&self) -> Services {
        if self.limits_loss() {
            self.services | Services::PARTIAL_RELIABILITY
        } else {
            self.services
        }
    }

    fn limits_loss(&self) -> bool {
        self.qos.max_loss_pct.is_some_and(|pct| pct < 100.0)
    }

    /// Whether a graft is excluded: it lacks a required service, or has a prohibited one.
    pub fn excludes(&self, graft: &GraftInfo) -> bool {
        // Sealing provides it with any graft.
        let required = Services::ENCRYPTION.missing(self.required());
        !graft.satisfies(required) || !graft.provides.intersection(self.prohibit).is_empty()
    }

    /// Distance of a graft from the preferences: preferred services missing, then services to avoid; less is
    /// better (RFC 9623, section 4.2).
    fn distance(&self, graft: &GraftInfo) -> (u32, u32) {
        let tolerates_loss = self.limits_loss() && !self.services.contains(Services::RELIABLE);
        // An application that tolerates loss benefits from a graft that may lose something.
        let is_strict = !graft.provides.contains(Services::PARTIAL_RELIABILITY);
        (
            graft.provides.implied().missing(self.prefer).count()
                + u32::from(tolerates_loss && is_strict),
            graft.provides.intersection(self.avoid).count(),
        )
    }
}

/// Contradictory requirements, or one out of range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Contradiction {
    /// A loss bound above 0 together with reliability.
    #[error("service `reliable` and max_loss {max_loss_pct} % exclude each other: drop one")]
    ReliableWithLoss {
        /// The requested bound, percent.
        max_loss_pct: f64,
    },
    /// A loss bound of 0 without reliability, which alone can keep it.
    #[error("max_loss 0 % without service `reliable` cannot be kept: add `reliable`")]
    LosslessUnreliable,
    /// The same service is both required and avoided or prohibited.
    #[error("service `{service}` is both required and {level}: drop one")]
    Both {
        /// The service.
        service: Services,
        /// The other level.
        level: &'static str,
    },
    /// Value out of range.
    #[error("{name} {value} is out of range")]
    Range {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

impl Requirements {
    /// Returns the first contradiction in these requirements. (The thesis, section 3.1, leaves such
    /// requirements out of consideration; here they are refused.)
    pub fn contradiction(&self) -> Option<Contradiction> {
        let Qos {
            max_delay_ms,
            min_throughput_mbit,
            max_loss_pct,
        } = self.qos;
        let ranges = [
            (
                "max_delay",
                max_delay_ms.map(f64::from),
                f64::MIN_POSITIVE..=f64::MAX,
            ),
            ("min_throughput", min_throughput_mbit, 0.0..=f64::MAX),
            ("max_loss", max_loss_pct, 0.0..=100.0),
        ];
        for (name, value, range) in ranges {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                return Some(Contradiction::Range { name, value });
            }
        }
        for (set, level) in [(self.prohibit, "prohibited"), (self.avoid, "to be avoided")] {
            let both = self.services.intersection(set);
            if let Some((service, _)) = Services::NAMES.into_iter().find(|n| both.contains(n.0)) {
                return Some(Contradiction::Both { service, level });
            }
        }
        let reliable = self.services.contains(Services::RELIABLE);
        match max_loss_pct {
            Some(max_loss_pct) if reliable && max_loss_pct > 0.0 => {
                Some(Contradiction::ReliableWithLoss { max_loss_pct })
            }
            Some(0.0) if !reliable => Some(Contradiction::LosslessUnreliable),
            _ => None,
        }
    }
}

/// A graft's entry in a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraftInfo {
    /// Its name in the pool.
    pub name: String,
    /// Its number in packets.
    pub gid: u16,
    /// The services it provides.
    pub provides: Services,
    /// Its parameters, in its own order; at most `intf::VTL_NEGO_PARAMS`.
    pub params: Vec<ParamRange>,
}

/// Range of a graft's parameter, in its own unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamRange {
    /// The default.
    pub initial: u32,
    /// The lowest.
    pub min: u32,
    /// The highest.
    pub max: u32,
}

impl ParamRange {
    /// Whether the range contains this value.
    pub fn allows(&self, value: u32) -> bool {
        (self.min..=self.max).contains(&value)
    }
}

impl AsRef<Self> for GraftInfo {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl GraftInfo {
    /// Whether it provides all `services`, directly or implied.
    pub fn satisfies(&self, services: Services) -> bool {
        self.provides.implied().contains(services)
    }
}

/// Selects the grafts that meet the requirements, the best one first; ties in the order of `grafts`. Bounds of
/// [`Qos`] on delay and throughput depend on the network, and are not judged here.
pub fn select<'a>(
    grafts: impl IntoIterator<Item = &'a GraftInfo>,
    requirements: &Requirements,
) -> Vec<&'a GraftInfo> {
    let mut found: Vec<_> = grafts
        .into_iter()
        .filter(|graft| !requirements.excludes(graft))
        .collect();
    found.sort_by_key(|graft| requirements.distance(graft));
    found
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    fn graft(gid: u16, provides: Services) -> GraftInfo {
        GraftInfo {
            name: format!("g{gid}"),
            gid,
            provides,
            params: Vec::new(),
        }
    }

    #[test]
    fn services__names_round_trip() {
        for bits in (0..64).chain([0x100, 0x200, 0x33f]) {
            let set = Services::from_bits(bits);
            assert_eq!(set.to_string().parse(), Ok(set));
        }
        assert_eq!(
            "reliable, ordered".parse(),
            Ok(Services::RELIABLE | Services::ORDERED)
        );
        assert_eq!(
            "fast".parse::<Services>(),
            Err(UnknownService("fast".into()))
        );
        assert_eq!(Services::from_bits(0x8001).to_string(), "reliable+0x8000");
    }

    #[test]
    fn contradiction__reliable_with_loss_names_the_pair() {
        let qos = Qos {
            max_loss_pct: Some(5.0),
            ..Qos::default()
        };
        let found = Requirements {
            services: Services::RELIABLE,
            qos,
            ..Default::default()
        }
        .contradiction()
        .unwrap();
        let text = found.to_string();
        assert!(
            text.contains("reliable") && text.contains("max_loss 5 %"),
            "{text}"
        );
    }

    #[test]
    fn contradiction__bounds() {
        let check = |services, qos| {
            let requirements = Requirements {
                services,
                qos,
                ..Default::default()
            };
            requirements.contradiction()
        };
        let none = Qos::default();
        assert_eq!(check(Services::RELIABLE, none), None);
        assert_eq!(
            check(
                Services::RELIABLE,
                Qos {
                    max_loss_pct: Some(0.0),
                    ..none
                }
            ),
            None
        );
        assert_eq!(
            check(
                Services::NONE,
                Qos {
                    max_loss_pct: Some(5.0),
                    ..none
                }
            ),
            None
        );
        assert_eq!(
            check(
                Services::ORDERED,
                Qos {
                    max_loss_pct: Some(0.0),
                    ..none
                }
            ),
            Some(Contradiction::LosslessUnreliable)
        );
        for qos in [
            Qos {
                max_loss_pct: Some(101.0),
                ..none
            },
            Qos {
                max_loss_pct: Some(f64::NAN),
                ..none
            },
            Qos {
                max_delay_ms: Some(0),
                ..none
            },
            Qos {
                min_throughput_mbit: Some(-1.0),
                ..none
            },
            Qos {
                min_throughput_mbit: Some(f64::INFINITY),
                ..none
            },
        ] {
            let found = check(Services::NONE, qos);
            assert!(
                matches!(found, Some(Contradiction::Range { .. })),
                "{qos:?}: {found:?}"
            );
        }
    }

    fn gids(pool: &[GraftInfo], requirements: &Requirements) -> Vec<u16> {
        select(pool, requirements).iter().map(|g| g.gid).collect()
    }

    #[test]
    fn set__moves_a_service_between_levels() {
        let mut r = Requirements::STREAM;
        r.set(Services::ORDERED, Preference::Avoid);
        assert!(!r.services.contains(Services::ORDERED));
        assert_eq!(r.avoid, Services::ORDERED);
        r.set(Services::ORDERED, Preference::None);
        assert!(r.avoid.is_empty());
        r.set(Services::ORDERED, Preference::Prohibit);
        assert_eq!(r.prohibit, Services::ORDERED);
        assert_eq!(r.contradiction(), None);
    }

    #[test]
    fn contradiction__required_and_prohibited_names_the_service() {
        let r = Requirements {
            prohibit: Services::ORDERED | Services::MULTIPATH,
            ..Requirements::STREAM
        };
        let text = r.contradiction().unwrap().to_string();
        assert!(
            text.contains("`ordered`") && text.contains("prohibited"),
            "{text}"
        );
    }

    #[test]
    fn select__preferred_first_avoided_last_prohibited_never() {
        let full = Services::RELIABLE | Services::ORDERED;
        let pool = [
            graft(1, full | Services::CONGESTION_CONTROL),
            graft(2, full),
            graft(3, Services::RELIABLE),
            graft(4, Services::RELIABLE | Services::CONGESTION_CONTROL),
        ];
        let mut r = Requirements::default();
        r.set(Services::RELIABLE, Preference::Require);
        r.set(Services::ORDERED, Preference::Avoid);
        assert_eq!(gids(&pool, &r), [3, 4, 1, 2]);
        r.set(Services::CONGESTION_CONTROL, Preference::Prefer);
        assert_eq!(gids(&pool, &r), [4, 1, 3, 2]);
        r.set(Services::ORDERED, Preference::Prohibit);
        assert_eq!(gids(&pool, &r), [4, 3]);
        r.set(Services::CONGESTION_CONTROL, Preference::Prohibit);
        assert_eq!(gids(&pool, &r), [3]);
        r.set(Services::ENCRYPTION, Preference::Require);
        assert_eq!(gids(&pool, &r), [3], "any graft's packets can be sealed");
        r.set(Services::MULTIPATH, Preference::Require);
        assert_eq!(gids(&pool, &r), [0u16; 0]);
    }

    #[test]
    fn select__a_loss_budget_takes_partial_reliability_or_better() {
        let pool = [
            graft(1, Services::RELIABLE),
            graft(2, Services::NONE),
            graft(3, Services::PARTIAL_RELIABILITY),
        ];
        let mut r = Requirements {
            qos: Qos {
                max_loss_pct: Some(5.0),
                ..Default::default()
            },
            ..Default::default()
        };
        assert_eq!(gids(&pool, &r), [3, 1]);
        r.set(Services::RELIABLE, Preference::Prefer);
        assert_eq!(gids(&pool, &r), [1, 3], "as good, and first in the pool");
        r.qos.max_loss_pct = Some(100.0);
        assert_eq!(gids(&pool, &r), [1, 2, 3]);
    }

    #[test]
    fn select__prefers_what_is_implied_as_well() {
        let pool = [graft(1, Services::NONE), graft(2, Services::ORDERED)];
        let mut r = Requirements::default();
        r.set(Services::PARTIAL_ORDER, Preference::Prefer);
        assert_eq!(gids(&pool, &r), [2, 1]);
    }

    #[test]
    fn select__keeps_order_and_requires_all() {
        let both = Services::RELIABLE | Services::ORDERED;
        let pool = [graft(3, both), graft(1, Services::RELIABLE), graft(2, both)];
        let among = |services| {
            let requirements = Requirements {
                services,
                ..Default::default()
            };
            gids(&pool, &requirements)
        };
        assert_eq!(among(both), [3, 2]);
        assert_eq!(among(Services::NONE), [3, 1, 2]);
        assert_eq!(among(Services::from_bits(0x8000)), [0u16; 0]);
    }
}
