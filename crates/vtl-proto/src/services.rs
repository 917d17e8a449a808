//! What applications require and grafts provide: the thesis's tables 3.1 (services) and 3.2
//! (quality of service).

use core::{fmt, ops::BitOr, str::FromStr};

use crate::intf;

/// A set of transport services, `enum vtl_service`. Bits without a name are kept: what a newer
/// peer requires and nobody here provides must not be granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Services(u16);

impl Services {
    /// Nothing at all.
    pub const NONE: Self = Self(0);
    /// No corruption, no duplicate, no loss.
    pub const RELIABLE: Self = Self(intf::VTL_S_RELIABLE as u16);
    /// Delivered in the order of sending.
    pub const ORDERED: Self = Self(intf::VTL_S_ORDERED as u16);
    /// A sender never overruns its receiver.
    pub const FLOW_CONTROL: Self = Self(intf::VTL_S_FLOW_CONTROL as u16);
    /// A sender adapts to what the network takes.
    pub const CONGESTION_CONTROL: Self = Self(intf::VTL_S_CONGESTION_CONTROL as u16);

    const NAMES: [(Self, &str); 4] = [
        (Self::RELIABLE, "reliable"),
        (Self::ORDERED, "ordered"),
        (Self::FLOW_CONTROL, "flow-control"),
        (Self::CONGESTION_CONTROL, "congestion-control"),
    ];

    /// The set with these bits of `enum vtl_service`.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// Its bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Both sets together; in constants, where `|` does not work.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether every service of `other` is in this set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Those of `required` that this set lacks.
    pub const fn missing(self, required: Self) -> Self {
        Self(required.0 & !self.0)
    }

    /// Whether there is no service in it.
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

/// A word that names no service.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no service; there are reliable, ordered, flow-control, congestion-control and none"
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

/// Quality of service; `None` means that the application does not care.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Qos {
    /// From the sender's call to availability at the receiving application, milliseconds.
    pub max_delay_ms: Option<u32>,
    /// Mbit/s of payload.
    pub min_throughput_mbit: Option<f64>,
    /// Packets that may fail to arrive, percent.
    pub max_loss_pct: Option<f64>,
}

/// What an application asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Requirements {
    /// Services that must be there.
    pub services: Services,
    /// Bounds.
    pub qos: Qos,
}

/// Two requirements that exclude each other, or one that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum Contradiction {
    /// Full reliability leaves no loss to allow.
    #[error("service `reliable` and max_loss {max_loss_pct} % exclude each other: drop one")]
    ReliableWithLoss {
        /// What was asked, percent.
        max_loss_pct: f64,
    },
    /// Only the service `reliable` can promise that nothing is lost.
    #[error("max_loss 0 % without service `reliable` cannot be kept: add `reliable`")]
    LosslessUnreliable,
    /// No such value.
    #[error("{name} {value} is out of range")]
    Range {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

impl Requirements {
    /// The first contradiction found in these requirements. (In the thesis, section 3.1, such
    /// requirements are left out of consideration; here they are refused.)
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

/// What a pool says about one of its grafts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraftInfo {
    /// Its name in the pool.
    pub name: String,
    /// Its identity in packets.
    pub gid: u16,
    /// The services it adds.
    pub provides: Services,
}

impl GraftInfo {
    /// Whether it provides all `services`.
    pub fn satisfies(&self, services: Services) -> bool {
        self.provides.contains(services)
    }
}

/// The grafts that provide the required services, in the order of `grafts`. Whether one keeps the
/// bounds of [`Qos`] depends on the network, and is not judged here.
pub fn select<'a>(
    grafts: &'a [GraftInfo],
    requirements: &Requirements,
) -> impl Iterator<Item = &'a GraftInfo> + use<'a> {
    let services = requirements.services;
    grafts.iter().filter(move |graft| graft.satisfies(services))
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
        }
    }

    #[test]
    fn services__names_round_trip() {
        for bits in 0..16 {
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
        let check = |services, qos| Requirements { services, qos }.contradiction();
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

    #[test]
    fn select__keeps_order_and_requires_all() {
        let both = Services::RELIABLE | Services::ORDERED;
        let pool = [graft(3, both), graft(1, Services::RELIABLE), graft(2, both)];
        let gids = |services| {
            let requirements = Requirements {
                services,
                qos: Qos::default(),
            };
            select(&pool, &requirements)
                .map(|g| g.gid)
                .collect::<Vec<_>>()
        };
        assert_eq!(gids(both), [3, 2]);
        assert_eq!(gids(Services::NONE), [3, 1, 2]);
        assert_eq!(gids(Services::from_bits(0x8000)), [0u16; 0]);
    }
}
