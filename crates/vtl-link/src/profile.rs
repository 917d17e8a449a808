//! The named links of plans, tests and reports.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::link::{BadLink, Link};
use crate::medium::Medium;

/// A link with a name. None of them loses packets by itself: loss is a parameter of the experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// 600 ms, 4 Mbit/s (VTL thesis, chapter 5).
    Satellite,
    /// 100 ms, 100 Mbit/s (VTL thesis, chapters 4 and 5).
    Terrestrial,
    /// 50 ms, 850 Mbit/s (VTL thesis, chapter 5).
    Lan,
    /// 10 ms, 16 Mbit/s (VTL thesis, chapter 3).
    Campus,
    /// 40 ms, 20 Mbit/s, medium access in slots (VirtualStack).
    Lte,
    /// No emulator: one veth pair, segments of 1,500 bytes.
    Wire,
}

impl Profile {
    /// All profiles.
    pub const ALL: [Profile; 6] = [
        Profile::Satellite,
        Profile::Terrestrial,
        Profile::Lan,
        Profile::Campus,
        Profile::Lte,
        Profile::Wire,
    ];

    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Profile::Satellite => "satellite",
            Profile::Terrestrial => "terrestrial",
            Profile::Lan => "lan",
            Profile::Campus => "campus",
            Profile::Lte => "lte",
            Profile::Wire => "wire",
        }
    }

    /// The profile's link.
    pub fn link(self) -> Link {
        match self {
            Profile::Satellite => Link::new(600.0, 4.0),
            Profile::Terrestrial => Link::new(100.0, 100.0),
            Profile::Lan => Link::new(50.0, 850.0),
            Profile::Campus => Link::new(10.0, 16.0),
            Profile::Lte => lte(),
            Profile::Wire => Link {
                direct: true,
                ..Link::default()
            },
        }
    }
}

/// The mean wait for a slot is 2.8 ms per direction (half of the mean square of the interval over
/// its mean). It is subtracted from the propagation delay, so that the mean RTT of a lightly loaded
/// link is 40 ms.
fn lte() -> Link {
    const RTT_MS: f64 = 40.0;
    let slots = Medium::Lte.slots();
    let (low, high) = slots.map_or((0.0, 0.0), |slots| (slots.min_ms, slots.max_ms));
    let mean = f64::midpoint(low, high);
    let mean_square = (low * low + low * high + high * high) / 3.0;
    let wait = mean_square / (2.0 * mean);
    Link {
        slots,
        ..Link::new(RTT_MS - 2.0 * wait, 20.0)
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = BadLink;

    fn from_str(name: &str) -> Result<Self, BadLink> {
        Profile::ALL
            .into_iter()
            .find(|p| p.name() == name)
            .ok_or_else(|| BadLink(format!("there is no profile \"{name}\"")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names__round_trip() {
        for profile in Profile::ALL {
            assert_eq!(profile.name().parse::<Profile>().expect("known"), profile);
            profile.link().check().expect("valid");
        }
        assert!("wifi".parse::<Profile>().is_err());
    }

    #[test]
    fn lte__propagation_leaves_room_for_the_slots() {
        let link = Profile::Lte.link();
        assert!((34.3..34.5).contains(&link.rtt_ms), "{}", link.rtt_ms);
    }
}
