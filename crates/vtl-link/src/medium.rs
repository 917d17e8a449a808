//! How a link's medium is shared: what VirtualStack's measurements tell apart as Ethernet, Wi-Fi and LTE.

use std::fmt;
use std::str::FromStr;

use crate::link::{BadLink, Link, LossModel, Slots};

/// A medium. It adds to a link what access to it costs; rate, propagation delay and loss stay the link's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium {
    /// Wired and full-duplex: packets leave as soon as they are serialised, losses are independent.
    Ethernet,
    /// Contention with other stations (IEEE 802.11 EDCA): packets wait for the medium, the queued ones leave together
    /// as one aggregate, and aggregates are lost together. A station waits for up to the time of another's aggregate,
    /// 4 ms; the losses are bursts of 8 packets on average. Rate adaptation is not modelled.
    Wifi,
    /// Grants of a base station: packets wait for a slot every 2 to 8 ms, as in [`Profile::Lte`](crate::Profile::Lte).
    Lte,
}

impl Medium {
    /// All media.
    pub const ALL: [Self; 3] = [Self::Ethernet, Self::Wifi, Self::Lte];

    /// The name used in plans and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ethernet => "ethernet",
            Self::Wifi => "wifi",
            Self::Lte => "lte",
        }
    }

    /// When packets may leave; `None`: always.
    pub fn slots(self) -> Option<Slots> {
        let slots = |min_ms, max_ms| Some(Slots { min_ms, max_ms });
        match self {
            Self::Ethernet => None,
            Self::Wifi => slots(0.1, 4.0),
            Self::Lte => slots(2.0, 8.0),
        }
    }

    /// The distribution of losses.
    pub fn loss_model(self) -> LossModel {
        match self {
            Self::Ethernet | Self::Lte => LossModel::Uniform,
            Self::Wifi => LossModel::BURSTS,
        }
    }

    /// The link over this medium.
    #[must_use]
    pub fn over(self, link: &Link) -> Link {
        Link {
            slots: self.slots(),
            loss_model: self.loss_model(),
            ..link.clone()
        }
    }
}

impl fmt::Display for Medium {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Medium {
    type Err = BadLink;

    fn from_str(name: &str) -> Result<Self, BadLink> {
        let mut all = Self::ALL.into_iter();
        let found = all.find(|medium| medium.name() == name);
        found.ok_or_else(|| {
            let all = Self::ALL.map(Self::name).join(", ");
            BadLink(format!("there is no medium \"{name}\": valid are {all}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names__round_trip() {
        for medium in Medium::ALL {
            assert_eq!(medium.name().parse::<Medium>().expect("known"), medium);
            let link = medium.over(&Link::new(20.0, 10.0));
            link.check().expect("valid");
            assert_eq!((link.rtt_ms, link.rate_mbit), (20.0, 10.0));
        }
        assert!("lora".parse::<Medium>().is_err());
    }

    #[test]
    fn over__what_the_media_add() {
        let over = |medium: Medium| medium.over(&Link::new(20.0, 10.0));
        assert_eq!(over(Medium::Ethernet), Link::new(20.0, 10.0));
        assert_eq!(over(Medium::Lte).slots, crate::Profile::Lte.link().slots);
        assert_eq!(over(Medium::Wifi).loss_model, LossModel::BURSTS);
    }
}
