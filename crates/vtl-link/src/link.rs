//! Parameters of a link, as set by users.

use serde::{Deserialize, Serialize};

/// The machines at a link's ends, and the one between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Host {
    /// 10.73.0.1, fd73::1.
    Client,
    /// Carries frames between the other two; has no address.
    Router,
    /// 10.73.0.2, fd73::2.
    Server,
}

impl Host {
    /// All hosts.
    pub const ALL: [Host; 3] = [Host::Client, Host::Router, Host::Server];

    /// The name used on the command line and as the end of the namespace's name.
    pub fn name(self) -> &'static str {
        match self {
            Host::Client => "client",
            Host::Router => "router",
            Host::Server => "server",
        }
    }
}

/// An invalid parameter of a link, named in the message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("bad link: {0}")]
pub struct BadLink(pub String);

/// Distribution of losses.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossModel {
    /// Independent losses.
    #[default]
    Uniform,
    /// Bursts: two states, a good one without loss and a bad one (Gilbert 1960, Elliott 1963).
    GilbertElliott {
        /// Mean duration of the bad state, packets, at least 1.
        burst_packets: f64,
        /// Loss rate in the bad state, per cent: an upper bound of the link's mean loss.
        bad_loss_pct: f64,
    },
}

impl LossModel {
    /// Bursts of 8 packets on average, with total loss.
    pub const BURSTS: LossModel = LossModel::GilbertElliott {
        burst_packets: 8.0,
        bad_loss_pct: 100.0,
    };
}

/// Slotted medium access: packets leave only when a slot opens, all queued ones together. The
/// interval between openings is uniform between the bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Slots {
    /// Shortest interval, milliseconds.
    pub min_ms: f64,
    /// Longest interval, milliseconds.
    pub max_ms: f64,
}

/// A link between client and server. Parameters hold for both directions unless stated otherwise.
///
/// Stages of a packet: the drop-tail queue, serialisation at `rate_mbit`, loss, slots, propagation
/// delay `rtt_ms / 2`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Link {
    /// No emulation: client and server are the two ends of one veth pair. Only offloads are
    /// controlled (segments of 1,500 bytes), and all other fields but the loss are ignored. With
    /// loss, the router drops frames at that rate in the kernel, uniformly, without a seed.
    pub direct: bool,
    /// Round-trip propagation delay, milliseconds.
    pub rtt_ms: f64,
    /// Rate in Mbit/s (10⁶ bits) of IP packets, without the Ethernet header. 0: unlimited.
    pub rate_mbit: f64,
    /// Mean loss rate, per cent, of each direction without one of its own below.
    pub loss_pct: f64,
    /// Mean loss rate from server to client, per cent (the data of a download). Unset: `loss_pct`.
    pub loss_down_pct: Option<f64>,
    /// Mean loss rate from client to server, per cent (the acknowledgements of a download). Unset:
    /// `loss_pct`.
    pub loss_up_pct: Option<f64>,
    /// Distribution of losses.
    pub loss_model: LossModel,
    /// Reordered packets, held back so that later ones overtake them: per cent.
    pub reorder_pct: f64,
    /// Time by which a reordered packet is held back, milliseconds. Unset: 1 ms or the
    /// serialisation time of eight full-size packets, whichever is longer.
    pub reorder_ms: Option<f64>,
    /// Duplicated packets, per cent.
    pub duplicate_pct: f64,
    /// Packets with a bit error after the IP header, per cent.
    pub corrupt_pct: f64,
    /// Packets with two words of their payload swapped, per cent: undetected by the checksums of
    /// VTL, TCP and UDP, as an attacker on the path would do it. Emulator only.
    pub tamper_pct: f64,
    /// Queue limit, packets, without the one being sent. Unset: one bandwidth-delay product of
    /// 1,500-byte packets, at least 64.
    pub queue_packets: Option<u32>,
    /// Queueing time, milliseconds, above which ECN-capable packets leave with a CE mark (RFC
    /// 3168). Unset: no marks.
    pub ecn_ms: Option<f64>,
    /// IP protocol that is dropped, as middleboxes do with unknown ones.
    pub blocked: Option<u8>,
    /// Host whose packets of that protocol are dropped. Unset: both.
    pub blocked_from: Option<Host>,
    /// Slotted medium access.
    pub slots: Option<Slots>,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Link {
    fn default() -> Self {
        Link {
            direct: false,
            rtt_ms: 0.0,
            rate_mbit: 0.0,
            loss_pct: 0.0,
            loss_down_pct: None,
            loss_up_pct: None,
            loss_model: LossModel::Uniform,
            reorder_pct: 0.0,
            reorder_ms: None,
            duplicate_pct: 0.0,
            corrupt_pct: 0.0,
            tamper_pct: 0.0,
            queue_packets: None,
            ecn_ms: None,
            blocked: None,
            blocked_from: None,
            slots: None,
            seed: 1,
        }
    }
}

/// Length of a full-size IP packet, bytes: the MTU of the testbed.
pub const MTU: u32 = 1500;

/// Minimum of the default queue limit, packets.
const QUEUE_MIN: u32 = 64;

/// Queue limit of a link without a rate, packets: a safety net, as nothing queues there.
const QUEUE_UNLIMITED: u32 = 1_000_000;

impl Link {
    /// A link with this round-trip time (milliseconds) and rate (Mbit/s), without impairments.
    pub fn new(rtt_ms: f64, rate_mbit: f64) -> Self {
        Link {
            rtt_ms,
            rate_mbit,
            ..Link::default()
        }
    }

    /// Bandwidth-delay product, bytes. 0 without a rate.
    pub fn bdp_bytes(&self) -> u64 {
        (self.rate_mbit * 1e6 / 8.0 * self.rtt_ms / 1e3) as u64
    }

    /// Queue limit, packets: the parameter, or its default.
    pub fn queue_limit(&self) -> u32 {
        match self.queue_packets {
            Some(packets) => packets,
            None if self.rate_mbit == 0.0 => QUEUE_UNLIMITED,
            None => (self.bdp_bytes().div_ceil(u64::from(MTU)) as u32).max(QUEUE_MIN),
        }
    }

    /// Mean loss rate from server to client, per cent.
    pub fn loss_down(&self) -> f64 {
        self.loss_down_pct.unwrap_or(self.loss_pct)
    }

    /// Mean loss rate from client to server, per cent.
    pub fn loss_up(&self) -> f64 {
        self.loss_up_pct.unwrap_or(self.loss_pct)
    }

    /// Checks that all parameters are valid.
    ///
    /// # Errors
    /// The first invalid parameter.
    pub fn check(&self) -> Result<(), BadLink> {
        let refuse = |what: &str| Err(BadLink(what.to_owned()));
        for (name, pct) in [
            ("loss", self.loss_down()),
            ("loss", self.loss_up()),
            ("reordering", self.reorder_pct),
            ("duplication", self.duplicate_pct),
            ("corruption", self.corrupt_pct),
            ("tampering", self.tamper_pct),
        ] {
            if !(0.0..=100.0).contains(&pct) {
                return refuse(&format!("{name} of {pct} % is not between 0 and 100"));
            }
        }
        if !(0.0..=60_000.0).contains(&self.rtt_ms) {
            return refuse(&format!(
                "an RTT of {} ms is not between 0 and 60,000",
                self.rtt_ms
            ));
        }
        if !(self.rate_mbit == 0.0 || (0.001..=1e6).contains(&self.rate_mbit)) {
            return refuse(&format!(
                "a rate of {} Mbit/s is neither 0 nor between 0.001 and 1,000,000",
                self.rate_mbit
            ));
        }
        if self
            .reorder_ms
            .is_some_and(|ms| !(0.0..=60_000.0).contains(&ms))
        {
            return refuse(
                "the time by which packets are reordered is not between 0 and 60,000 ms",
            );
        }
        if self
            .ecn_ms
            .is_some_and(|ms| !(0.0..=60_000.0).contains(&ms))
        {
            return refuse(
                "the wait above which packets are marked is not between 0 and 60,000 ms",
            );
        }
        if self
            .slots
            .is_some_and(|s| !(s.min_ms > 0.0 && s.min_ms <= s.max_ms && s.max_ms <= 10_000.0))
        {
            return refuse("slots need 0 < shortest gap <= longest gap <= 10,000 ms");
        }
        if let LossModel::GilbertElliott {
            burst_packets,
            bad_loss_pct,
        } = self.loss_model
        {
            if !(1.0..=1e6).contains(&burst_packets) {
                return refuse(&format!(
                    "a mean burst of {burst_packets} packets is not between 1 and 1,000,000"
                ));
            }
            if !(bad_loss_pct > 0.0 && bad_loss_pct <= 100.0) {
                return refuse("the loss within a burst is not between 0 and 100 %");
            }
            if self.loss_down().max(self.loss_up()) > bad_loss_pct {
                return refuse("the mean loss is more than the loss within a burst");
            }
        }
        if self.loses_directly() && self.loss_model != LossModel::Uniform {
            return refuse("a direct link has uniform loss only");
        }
        Ok(())
    }

    /// Whether this is a link with loss but without emulation.
    pub fn loses_directly(&self) -> bool {
        self.direct && self.loss_up().max(self.loss_down()) > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue__one_bdp_but_at_least_64() {
        assert_eq!(Link::new(100.0, 100.0).queue_limit(), 834);
        assert_eq!(Link::new(600.0, 4.0).queue_limit(), 200);
        assert_eq!(Link::new(10.0, 16.0).queue_limit(), 64);
        assert_eq!(
            Link {
                queue_packets: Some(5),
                ..Link::new(10.0, 16.0)
            }
            .queue_limit(),
            5
        );
    }

    #[test]
    fn loss__both_directions_unless_set() {
        let link = Link {
            loss_pct: 2.0,
            loss_up_pct: Some(0.0),
            ..Link::default()
        };
        assert_eq!((link.loss_down(), link.loss_up()), (2.0, 0.0));
    }

    #[test]
    fn check__names_the_invalid_parameter() {
        let wrong = [
            (
                Link {
                    loss_pct: 101.0,
                    ..Link::default()
                },
                "loss",
            ),
            (
                Link {
                    loss_pct: f64::NAN,
                    ..Link::default()
                },
                "loss",
            ),
            (
                Link {
                    rtt_ms: -1.0,
                    ..Link::default()
                },
                "RTT",
            ),
            (
                Link {
                    rate_mbit: -1.0,
                    ..Link::default()
                },
                "rate",
            ),
            (
                Link {
                    slots: Some(Slots {
                        min_ms: 5.0,
                        max_ms: 1.0,
                    }),
                    ..Link::default()
                },
                "slots",
            ),
            (
                Link {
                    loss_model: LossModel::GilbertElliott {
                        burst_packets: 0.5,
                        bad_loss_pct: 100.0,
                    },
                    ..Link::default()
                },
                "burst",
            ),
            (
                Link {
                    loss_pct: 30.0,
                    loss_model: LossModel::GilbertElliott {
                        burst_packets: 5.0,
                        bad_loss_pct: 20.0,
                    },
                    ..Link::default()
                },
                "burst",
            ),
        ];
        for (link, word) in wrong {
            let message = link.check().expect_err("refused").to_string();
            assert!(message.contains(word), "{message}");
        }
        assert!(Link::new(100.0, 100.0).check().is_ok());
    }

    #[test]
    fn serde__round_trip_and_defaults() {
        let link = Link {
            loss_model: LossModel::BURSTS,
            slots: Some(Slots {
                min_ms: 1.0,
                max_ms: 2.0,
            }),
            ..Link::new(40.0, 20.0)
        };
        let text = serde_json::to_string(&link).expect("serialises");
        assert_eq!(serde_json::from_str::<Link>(&text).expect("parses"), link);
        assert_eq!(
            serde_json::from_str::<Link>(r#"{"rtt_ms":5}"#).expect("parses"),
            Link::new(5.0, 0.0)
        );
        assert!(serde_json::from_str::<Link>(r#"{"rrt_ms":5}"#).is_err());
    }
}
