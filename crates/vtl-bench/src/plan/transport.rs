//! What carries a transfer.

use std::fmt;
use std::str::FromStr;

/// A transport as plans name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    /// The kernel's TCP with this congestion control.
    Tcp(&'static str),
    /// QUIC, by quinn, with this congestion control: `cubic` or `bbr`.
    Quic(&'static str),
    /// Datagrams at the link's rate, and what arrives of them: the ceiling.
    Udp,
    /// A VTL session over this graft, read in place.
    Graft(String),
    /// A TCP program captured by the Hooker, carried by a graft.
    Hook(String),
}

/// The kinds of carriers that rows and settings distinguish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// [`Transport::Tcp`].
    Tcp,
    /// [`Transport::Quic`].
    Quic,
    /// [`Transport::Udp`].
    Udp,
    /// [`Transport::Graft`] and [`Transport::Hook`].
    Vtl,
}

/// Every valid name; NAME stands for a graft.
pub(super) const NAMES: &str = "tcp-cubic, tcp-bbr, tcp-reno, quic, quic-bbr, udp, graft:NAME, \
                                hook:graft:NAME";

impl Transport {
    /// What carries the bytes.
    pub fn carrier(&self) -> Carrier {
        match self {
            Self::Tcp(_) => Carrier::Tcp,
            Self::Quic(_) => Carrier::Quic,
            Self::Udp => Carrier::Udp,
            Self::Graft(_) | Self::Hook(_) => Carrier::Vtl,
        }
    }

    /// Payload of a full packet over its size on the link with its IP header, at 1,500 bytes over
    /// IPv4: the share of the rate that goodput can reach.
    ///
    /// TCP: headers of 20 and 20 bytes, timestamps 12. QUIC: 20, 8, and 40 of its own (short header
    /// 1 + 8 + 3, STREAM frame 12, tag 16). UDP: 20 and 8. VTL: 20 and 40.
    pub fn efficiency(&self) -> f64 {
        let payload = match self.carrier() {
            Carrier::Tcp => 1448.0,
            Carrier::Quic => 1432.0,
            Carrier::Udp => 1472.0,
            Carrier::Vtl => 1440.0,
        };
        payload / 1500.0
    }

    /// Whether it takes daemons.
    pub fn needs_daemons(&self) -> bool {
        self.carrier() == Carrier::Vtl
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(control) => write!(f, "tcp-{control}"),
            Self::Quic("cubic") => f.write_str("quic"),
            Self::Quic(control) => write!(f, "quic-{control}"),
            Self::Udp => f.write_str("udp"),
            Self::Graft(name) => write!(f, "graft:{name}"),
            Self::Hook(name) => write!(f, "hook:graft:{name}"),
        }
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let graft = |name: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
            (!name.is_empty() && name.chars().all(fits)).then(|| name.to_owned())
        };
        let known = match name {
            "tcp-cubic" => Some(Self::Tcp("cubic")),
            "tcp-bbr" => Some(Self::Tcp("bbr")),
            "tcp-reno" => Some(Self::Tcp("reno")),
            "quic" => Some(Self::Quic("cubic")),
            "quic-bbr" => Some(Self::Quic("bbr")),
            "udp" => Some(Self::Udp),
            _ => match (
                name.strip_prefix("graft:"),
                name.strip_prefix("hook:graft:"),
            ) {
                (Some(name), _) => graft(name).map(Self::Graft),
                (_, Some(name)) => graft(name).map(Self::Hook),
                _ => None,
            },
        };
        known.ok_or_else(|| format!("there is no transport \"{name}\": valid are {NAMES}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names__round_trip() {
        for name in [
            "tcp-cubic",
            "tcp-bbr",
            "tcp-reno",
            "quic",
            "quic-bbr",
            "udp",
            "graft:stream",
            "hook:graft:stream",
        ] {
            let transport: Transport = name.parse().expect("valid");
            assert_eq!(transport.to_string(), name);
        }
        for wrong in ["tcp", "graft:", "hook:tcp", "graft:a b", ""] {
            let error = wrong.parse::<Transport>().expect_err("refused");
            assert!(error.contains("valid are tcp-cubic"), "{error}");
        }
    }
}
