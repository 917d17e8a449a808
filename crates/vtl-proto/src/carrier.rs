//! Carriers of hooked flows, by the names that all of VTL gives them: what besides TCP, and the
//! grafts that repeat what gets lost, a flow can travel by.

use core::fmt;

use serde::{Deserialize, Serialize};

/// The grafts that may lose something, as carriers of flows that are marked loss-tolerant.
pub const LOSSY: [&str; 4] = ["udp", "udp-lite", "dccp-ccid2", "dccp-ccid3"];

/// The VTL port that sessions which carry flows are opened to: no application gets it.
pub const GRAFT_PORT: u16 = 65_535;

/// Kinds of carriers of flows: one to each peer takes all flows that want its kind. Serialized by name.
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
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Quic, Self::Mptcp, Self::Sctp, Self::Kcp, Self::Graft];

    /// By its name as a carrier.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Its name as a carrier.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quic => "quic",
            Self::Mptcp => "mptcp",
            Self::Sctp => "sctp",
            Self::Kcp => "kcp",
            Self::Graft => "graft",
        }
    }

    /// Its number in what asks for it.
    pub fn number(self) -> u8 {
        match self {
            Self::Quic => 1,
            Self::Mptcp => 2,
            Self::Sctp => 3,
            Self::Kcp => 4,
            Self::Graft => 5,
        }
    }

    /// By its number.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
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
            assert_eq!(Kind::named(kind.name()), Some(kind));
            assert_eq!(Kind::numbered(kind.number()), Some(kind));
        }
        assert_eq!(Kind::ALL.map(Kind::number), [1, 2, 3, 4, 5]);
        assert_eq!((Kind::named("udp"), Kind::numbered(0)), (None, None));
    }
}
