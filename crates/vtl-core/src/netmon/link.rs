//! The link layer of this host's interface to a peer (VirtualStack, section III.B).

use std::fmt;

/// What the link layer says; `None`: it does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// The medium.
    pub medium: Option<Medium>,
    /// The rate at which it sends now, bit/s, headers and all; of Wi-Fi what it modulates by.
    pub rate: Option<u64>,
    /// The quality of the signal, 0 to 1.
    pub signal: Option<f64>,
}

/// A medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Wires, and what looks like them: bridges, VLANs, virtual machines' interfaces.
    Ethernet,
    /// IEEE 802.11.
    WiFi,
    /// A modem in a cellular network.
    Cellular,
    /// Another network: VPNs, PPP.
    Tunnel,
}

impl Medium {
    /// All media.
    pub const ALL: [Self; 4] = [Self::Ethernet, Self::WiFi, Self::Cellular, Self::Tunnel];

    /// Its name in conditions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ethernet => "ethernet",
            Self::WiFi => "wifi",
            Self::Cellular => "cellular",
            Self::Tunnel => "tunnel",
        }
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The quality of a signal of this strength, dBm: 0 at -100, 1 at -50, linear in between, as operating systems show it
/// (Microsoft, WLAN_ASSOCIATION_ATTRIBUTES).
pub fn signal_quality(dbm: i8) -> f64 {
    (f64::from(dbm) + 100.0).clamp(0.0, 50.0) / 50.0
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn signal_quality__is_linear_between_its_ends() {
        for (dbm, quality) in [(-128, 0.0), (-100, 0.0), (-75, 0.5), (-50, 1.0), (0, 1.0)] {
            assert!((signal_quality(dbm) - quality).abs() < 1e-9, "{dbm}");
        }
    }
}
