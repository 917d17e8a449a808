//! What a campaign measures: links, and on each the transfers that applications make.

use std::time::Duration;

use vtl_core::netmon::{Bandwidth, Metrics};
use vtl_core::profile::Profile;
use vtl_core::select::Features;
use vtl_link::{Link, LossModel, Nanos, Profile as Named, Random};
use vtl_sim::models::Model;

use super::simulate::{PAYLOAD, Simulated, Traffic};

/// Losses of the links with names, per cent.
const LOSSES: [f64; 4] = [0.0, 1.0, 2.0, 5.0];
/// Links with names: those of the thesis.
const NAMED: [Named; 5] = [
    Named::Satellite,
    Named::Terrestrial,
    Named::Lan,
    Named::Campus,
    Named::Lte,
];
/// The least and the greatest of what other links have; drawn so that each factor of two is as likely as any other.
const RTT_MS: (f64, f64) = (1.0, 700.0);
const RATE_MBIT: (f64, f64) = (1.0, 1000.0);
const LOSS_PCT: (f64, f64) = (0.05, 20.0);
const BURST_PACKETS: (f64, f64) = (2.0, 16.0);
/// Queues, in bandwidth-delay products, and their least length in packets.
const QUEUES: [f64; 3] = [0.5, 1.0, 2.0];
const QUEUE_MIN: f64 = 16.0;
/// Time after which a transfer is cut, and counts as if it ended then.
pub(super) const LIMIT: Nanos = 600_000_000_000;
/// Length of a stream.
const STREAM_S: f64 = 10.0;
/// Bit rates of streams, Mbit/s: speech, and video in three qualities. At most half of the link's.
const STREAMS_MBIT: [f64; 4] = [0.064, 0.5, 2.5, 8.0];
/// What a file takes longer by a carrier of VTL than by the simulated session, whose payload is not sealed and whose
/// hosts take no time: the upper end of what connections between hosts that knew each other took in the testbed
/// (`hook:graft:stream`, known, in `bench/results/2026-11-21b` to `2026-11-24-turns`). As a share, and in ms.
const ALLOWANCE: (f64, f64) = (0.03, 3.0);
/// What a packet of a stream may be late, besides the path's delay, and still be of use: half of the 300 ms that
/// ITU-T G.114 allows there and back.
const PLAYOUT: Nanos = 150_000_000;

/// Runs of one kind of transfer on a link; the fewer the longer it takes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Load {
    /// A file.
    File { bytes: u64, runs: u64 },
    /// Packets at a fixed rate, which must come in time.
    Stream { runs: u64 },
}

/// What is measured on every link.
pub(super) const LOADS: [Load; 5] = [
    Load::File {
        bytes: 4096,
        runs: 1000,
    },
    Load::File {
        bytes: 65_536,
        runs: 200,
    },
    Load::File {
        bytes: 1_048_576,
        runs: 24,
    },
    Load::File {
        bytes: 16_777_216,
        runs: 3,
    },
    Load::Stream { runs: 5 },
];

/// A carrier in virtual time; `None` if the simulator has no such one.
pub(super) fn simulated(carrier: &str) -> Option<Simulated> {
    match carrier {
        "tcp" => Some(Simulated::Tcp(Model::Cubic)),
        "tcp:bbr" => Some(Simulated::Tcp(Model::Bbr)),
        "graft:stream" => Some(Simulated::Graft("stream")),
        "graft:cubic" => Some(Simulated::Graft("cubic")),
        "graft:hybla" => Some(Simulated::Graft("hybla")),
        _ => None,
    }
}

impl Load {
    /// A file, with as many runs as the next larger one that is measured.
    pub(super) fn file(bytes: u64) -> Self {
        let runs = LOADS.into_iter().find_map(|load| match load {
            Self::File { bytes: max, runs } if bytes <= max => Some(runs),
            _ => None,
        });
        Self::File {
            bytes,
            runs: runs.unwrap_or(1),
        }
    }

    /// Bytes, where applications know them beforehand.
    pub(super) fn bytes(self) -> Option<u64> {
        match self {
            Self::File { bytes, .. } => Some(bytes),
            Self::Stream { .. } => None,
        }
    }

    /// How often it is repeated; where nothing is random, twice, as BBR's phase differs.
    pub(super) fn runs(self, link: &Link) -> u64 {
        let (Self::File { runs, .. } | Self::Stream { runs }) = self;
        if Self::is_random(link) {
            runs
        } else {
            runs.min(2)
        }
    }

    /// Whether transfers on a link differ by chance.
    pub(super) fn is_random(link: &Link) -> bool {
        link.loss_down() > 0.0 || link.slots.is_some()
    }

    /// What the application writes.
    pub(super) fn traffic(self, id: LinkId, link: &Link) -> Traffic {
        match self {
            Self::File { bytes, .. } => Traffic {
                packets: bytes.div_ceil(PAYLOAD),
                every: 0,
            },
            Self::Stream { .. } => {
                let wanted = Random::new(id.start(), 2).pick(&STREAMS_MBIT);
                let bits = wanted.min(link.rate_mbit / 2.0) * 1e6;
                let every = PAYLOAD as f64 * 8.0 / bits;
                Traffic {
                    packets: (STREAM_S / every).ceil() as u64,
                    every: (every * 1e9) as Nanos,
                }
            }
        }
    }

    /// What a run came to, ms: the time from `connect` to a file's last byte, or the time in which as much of a stream is
    /// in time as was sent.
    pub(super) fn cost(self, link: &Link, run: Run<'_>) -> f64 {
        let Run {
            simulated,
            traffic,
            read,
        } = run;
        let rtt = (link.rtt_ms * 1e6) as Nanos;
        match self {
            // The handshake, and the request.
            Self::File { .. } => {
                let end = read.last().copied().flatten().unwrap_or(LIMIT);
                let ms = (end + rtt * 3 / 2) as f64 / 1e6;
                match simulated {
                    Simulated::Tcp(_) => ms,
                    Simulated::Graft(_) => ms * (1.0 + ALLOWANCE.0) + ALLOWANCE.1,
                }
            }
            Self::Stream { .. } => {
                let due = |n: u64| n * traffic.every + rtt / 2 + PLAYOUT;
                let in_time = |(n, at): (u64, &Option<Nanos>)| at.is_some_and(|at| at <= due(n));
                let count = (0..).zip(read).filter(|it| in_time(*it)).count();
                let share = count as f64 / read.len() as f64;
                STREAM_S * 1e3 / share.max(1e-2)
            }
        }
    }

    /// What the profiles whose applications do this make of its runs.
    pub(super) fn figures(self) -> &'static [(Profile, Figure)] {
        const BULK: (Profile, Figure) = (Profile::LossSensitive, Figure::Mean);
        const WAITS: (Profile, Figure) = (Profile::TimeAndLossSensitive, Figure::Tail);
        match self {
            Self::File { bytes: 4096, .. } => &[WAITS],
            Self::File {
                bytes: 16_777_216, ..
            } => &[BULK],
            Self::File { .. } => &[WAITS, BULK],
            Self::Stream { .. } => &[(Profile::TimeSensitive, Figure::Mean)],
        }
    }
}

/// A transfer that was simulated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run<'a> {
    pub(super) simulated: Simulated,
    pub(super) traffic: Traffic,
    /// See [`super::simulate::run`].
    pub(super) read: &'a [Option<Nanos>],
}

/// What counts of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    /// Their mean.
    Mean,
    /// The mean of the slowest quarter: as the tail is felt, without a percentile's cliff where one loss more or less
    /// decides.
    Tail,
}

impl Figure {
    /// The figure of some runs; there is at least one.
    pub(super) fn of(self, costs: &[f64]) -> f64 {
        let mut sorted = costs.to_vec();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        if self == Self::Tail {
            sorted.truncate(costs.len().div_ceil(4));
        }
        sorted.iter().sum::<f64>() / sorted.len() as f64
    }
}

/// Campaigns, each with its own links.
pub(super) const MAX_SEED: u64 = 0xffff;
/// Links of a campaign.
pub(super) const MAX_LINKS: u64 = 1 << 20;

/// Which link, of all campaigns: the campaign's seed, and a number below [`MAX_LINKS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LinkId {
    pub(super) seed: u64,
    pub(super) number: u64,
}

impl LinkId {
    /// What the link's random numbers start from.
    fn start(self) -> u64 {
        self.seed << 32 | self.number
    }

    /// The seed of one transfer's losses.
    pub(super) fn run_seed(self, run: u64) -> u64 {
        (self.start() << 16) + run
    }

    /// The place among the links with names, which only the campaign with seed 0 has.
    fn place(self) -> Option<usize> {
        let place = usize::try_from(self.number).ok()?;
        (self.seed == 0 && place < NAMED.len() * LOSSES.len()).then_some(place)
    }

    /// The link's name, the same in all versions.
    pub(super) fn name(self) -> String {
        match (self.place(), self.seed) {
            (Some(place), _) => {
                let (profile, loss) = (NAMED[place / LOSSES.len()], LOSSES[place % LOSSES.len()]);
                format!("{profile}-{loss}")
            }
            (None, 0) => format!("random-{}", self.number),
            (None, seed) => format!("seed-{seed}-{}", self.number),
        }
    }

    /// The link of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        let all = (0..(NAMED.len() * LOSSES.len()) as u64).map(|number| Self { seed: 0, number });
        let numbers = || {
            let (seed, number) = match name.strip_prefix("random-") {
                Some(number) => ("0", number),
                None => name.strip_prefix("seed-")?.split_once('-')?,
            };
            Some(Self {
                seed: seed.parse().ok().filter(|seed| *seed <= MAX_SEED)?,
                number: number.parse().ok().filter(|n| *n < MAX_LINKS)?,
            })
        };
        let found = all.into_iter().find(|link| link.name() == name);
        // Numbers with leading zeros are other names.
        found.or_else(numbers).filter(|link| link.name() == name)
    }

    /// The link.
    pub(super) fn link(self) -> Link {
        let start = self.start();
        if let Some(place) = self.place() {
            let (profile, loss) = (NAMED[place / LOSSES.len()], LOSSES[place % LOSSES.len()]);
            return lossy(&profile.link(), loss, start);
        }
        let mut random = Random::new(start, 1);
        let mut between = |(min, max): (f64, f64)| round(min * f64::powf(max / min, random.unit()));
        let (rtt_ms, rate_mbit) = (between(RTT_MS), between(RATE_MBIT));
        let (loss, burst) = (between(LOSS_PCT), between(BURST_PACKETS));
        let loss = if random.chance(0.2) { 0.0 } else { loss };
        let mut link = lossy(&Link::new(rtt_ms, rate_mbit), loss, start);
        if random.chance(0.4) {
            link.loss_model = LossModel::GilbertElliott {
                burst_packets: burst,
                bad_loss_pct: 100.0,
            };
        }
        let product = link.bdp_bytes() as f64 / 1500.0;
        let queue = (product * random.pick(&QUEUES)).max(QUEUE_MIN);
        link.queue_packets = Some(queue as u32);
        link
    }
}

fn lossy(link: &Link, loss: f64, seed: u64) -> Link {
    Link {
        loss_down_pct: Some(loss),
        loss_up_pct: Some(0.0),
        seed,
        ..link.clone()
    }
}

/// What a choice is made by on a link that was measured without an error; the code that vtld's measurements go through
/// makes features of it.
pub(super) fn features(link: &Link, profile: Profile, bytes: Option<u64>) -> Features {
    let loss = link.loss_down() / 100.0;
    let path = Metrics {
        min_rtt: Some(Duration::from_secs_f64(rtt_ms(link) / 1e3)),
        loss: Some(loss),
        clear_loss: Some(loss),
        loss_burst: burst(link),
        bandwidth: Some(Bandwidth {
            rate: (link.rate_mbit * 1e6) as u64,
            at_least: false,
            error: 0.0,
        }),
        ..Metrics::default()
    };
    let features = Features::new(&path, Some(profile));
    Features {
        rtt_ms: features.rtt_ms.map(round),
        rate_mbit: features.rate_mbit.map(round),
        loss_percent: features.loss_percent.map(round),
        bytes: bytes.map(|bytes| bytes as f64),
        ..features
    }
}

/// The link's mean burst of losses, packets; `None` without losses.
fn burst(link: &Link) -> Option<f64> {
    let loss = link.loss_down() / 100.0;
    match link.loss_model {
        _ if loss == 0.0 => None,
        LossModel::Uniform => Some(round(1.0 / (1.0 - loss))),
        LossModel::GilbertElliott { burst_packets, .. } => Some(burst_packets),
    }
}

/// The mean round-trip time of a link without traffic, ms.
fn rtt_ms(link: &Link) -> f64 {
    // Each direction waits for a slot: half the mean square of the interval over its mean.
    let wait = link.slots.map_or(0.0, |slots| {
        let (a, b) = (slots.min_ms, slots.max_ms);
        (a * a + a * b + b * b) / (3.0 * (a + b))
    });
    round(link.rtt_ms + 2.0 * wait)
}

/// To four digits, so that files stay small.
pub(super) fn round(x: f64) -> f64 {
    format!("{x:.3e}").parse().expect("a number")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link__is_valid_reproducible_and_found_by_its_name() {
        for (seed, number) in [0, 1, MAX_SEED]
            .into_iter()
            .flat_map(|s| (0..300).map(move |n| (s, n)))
        {
            let id = LinkId { seed, number };
            let link = id.link();
            link.check().unwrap();
            assert_eq!(link, id.link());
            assert_eq!(LinkId::named(&id.name()), Some(id));
            let range = RTT_MS.0 * 0.999..=RTT_MS.1 * 1.001;
            assert!(range.contains(&rtt_ms(&link)), "{}", link.rtt_ms);
        }
        assert_eq!(
            rtt_ms(
                &LinkId {
                    seed: 0,
                    number: 16
                }
                .link()
            ),
            40.0
        );
        for bad in [
            "",
            "random-",
            "random-07",
            "random-3",
            "seed-0-30",
            "seed-70000-1",
            "x",
        ] {
            assert_eq!(LinkId::named(bad), None, "{bad}");
        }
    }

    /// Links of another seed are others: what was tuned on one campaign has not seen them.
    #[test]
    fn link__of_another_seed_is_another() {
        let of = |seed| (0..300).map(move |number| LinkId { seed, number }.link().rtt_ms);
        let first: Vec<f64> = of(0).collect();
        let same = of(1).filter(|rtt| first.contains(rtt)).count();
        assert!(same < 30, "{same} of 300 by chance");
    }

    #[test]
    fn features__are_the_links_own() {
        for number in 0..300 {
            let link = LinkId { seed: 0, number }.link();
            let features = features(&link, Profile::LossSensitive, Some(1 << 20));
            assert_eq!(features.rtt_ms, Some(rtt_ms(&link)));
            assert_eq!(features.rate_mbit, Some(link.rate_mbit));
            assert_eq!(features.loss_percent, Some(link.loss_down()));
            assert_eq!(features.bytes, Some(1048576.0));
        }
    }

    #[test]
    fn figure__of_ten_runs() {
        let costs: Vec<f64> = (1..=10).rev().map(f64::from).collect();
        assert_eq!(Figure::Tail.of(&costs), 9.0, "of 10, 9 and 8");
        assert_eq!(Figure::Mean.of(&costs), 5.5);
        assert_eq!(Figure::Tail.of(&[7.0]), 7.0);
    }

    #[test]
    fn cost__counts_what_is_in_time() {
        let link = Link::new(100.0, 10.0);
        let traffic = Traffic {
            packets: 4,
            every: 1_000_000,
        };
        let ms = |ms: u64| Some(ms * 1_000_000);
        // Due at 200, 201, 202 and 203 ms.
        let read = [ms(200), ms(202), ms(202), None];
        let run = |simulated, n| Run {
            simulated,
            traffic,
            read: &read[..n],
        };
        let (tcp, graft) = (Simulated::Tcp(Model::Cubic), Simulated::Graft("stream"));
        let stream = Load::Stream { runs: 1 };
        assert_eq!(stream.cost(&link, run(tcp, 4)), 20_000.0);
        let file = Load::File { bytes: 1, runs: 1 };
        assert_eq!(file.cost(&link, run(tcp, 3)), 352.0);
        assert_eq!(file.cost(&link, run(graft, 3)), 352.0 * 1.03 + 3.0);
        assert_eq!(file.cost(&link, run(tcp, 4)), 600_150.0);
    }
}
