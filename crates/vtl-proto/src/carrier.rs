//! Carriers of hooked flows, by the names that all of VTL gives them: what besides TCP, and the
//! grafts that repeat what gets lost, a flow can travel by.

use core::fmt;

/// The grafts that may lose something, as carriers of flows that are marked loss-tolerant.
pub const LOSSY: [&str; 4] = ["udp", "udp-lite", "dccp-ccid2", "dccp-ccid3"];

/// Carriers that are no grafts: a flow is a stream of one tunnel to each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tunnel {
    /// QUIC, by quinn.
    Quic,
    /// MPTCP, by the kernel.
    Mptcp,
    /// SCTP in UDP, by sctp-proto.
    Sctp,
}

impl Tunnel {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Quic, Self::Mptcp, Self::Sctp];

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
        }
    }

    /// Its number in the preamble that asks for it.
    pub fn number(self) -> u8 {
        match self {
            Self::Quic => 1,
            Self::Mptcp => 2,
            Self::Sctp => 3,
        }
    }

    /// By its number in the preamble.
    pub fn numbered(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }
}

impl fmt::Display for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn tunnel__is_found_by_name_and_number() {
        for tunnel in Tunnel::ALL {
            assert_eq!(Tunnel::named(tunnel.name()), Some(tunnel));
            assert_eq!(Tunnel::numbered(tunnel.number()), Some(tunnel));
        }
        assert_eq!(Tunnel::ALL.map(Tunnel::number), [1, 2, 3]);
        assert_eq!((Tunnel::named("udp"), Tunnel::numbered(0)), (None, None));
    }
}
