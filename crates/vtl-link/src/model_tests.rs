use etherparse::{IpDscp, IpEcn, Ipv4Header};

use super::*;
use crate::link::LossModel;

const MS: Nanos = 1_000_000;

#[derive(Debug, Clone, PartialEq)]
struct Packet {
    id: u64,
    bytes: u64,
    flipped: bool,
    marked: bool,
}

impl Frame for Packet {
    fn link_bytes(&self) -> u64 {
        self.bytes
    }
    fn mark(&mut self) -> bool {
        self.marked = true;
        true
    }
    fn flip_bit(&mut self, _random: u64) -> bool {
        self.flipped = true;
        true
    }
}

fn packet(id: u64) -> Packet {
    Packet {
        id,
        bytes: 1500,
        flipped: false,
        marked: false,
    }
}

fn direction(link: &Link) -> Direction<Packet> {
    link.check().expect("valid link");
    Direction::new(Params::down(link))
}

/// Pushes packet `i` at `i * gap` and returns (arrival, packet) of everything, in order of arrival.
fn flow(link: &Link, packets: u64, gap: Nanos) -> (Vec<(Nanos, Packet)>, DirectionStats) {
    let mut d = direction(link);
    let mut got = Vec::new();
    let mut drain = |d: &mut Direction<Packet>, until: Nanos| {
        while let Some(at) = d.next_event().filter(|&at| at <= until) {
            while let Some(p) = d.pop(at) {
                got.push((at, p));
            }
        }
    };
    for i in 0..packets {
        drain(&mut d, i * gap);
        d.push(i * gap, packet(i));
    }
    drain(&mut d, Nanos::MAX);
    let stats = d.stats();
    (got, stats)
}

fn ids(got: &[(Nanos, Packet)]) -> Vec<u64> {
    got.iter().map(|(_, p)| p.id).collect()
}

#[test]
fn delay__half_the_rtt_exactly() {
    let (got, _) = flow(&Link::new(100.0, 0.0), 10, MS);
    assert_eq!(
        got.iter().map(|(at, _)| *at).collect::<Vec<_>>(),
        (0..10).map(|i| (50 + i) * MS).collect::<Vec<_>>()
    );
}

#[test]
fn rate__spaces_packets_by_their_serialisation() {
    // 1,500 bytes at 12 Mbit/s take 1 ms.
    let link = Link {
        queue_packets: Some(1000),
        ..Link::new(0.0, 12.0)
    };
    let (got, stats) = flow(&link, 100, 0);
    assert_eq!(
        got.iter().map(|(at, _)| *at).collect::<Vec<_>>(),
        (1..=100).map(|i| i * MS).collect::<Vec<_>>()
    );
    assert_eq!(stats.max_queue_packets, 99);
    assert_eq!(stats.queue_packets, 0);
}

#[test]
fn rate__long_run_is_exact() {
    let link = Link {
        queue_packets: Some(100_000),
        ..Link::new(0.0, 850.0)
    };
    let (got, _) = flow(&link, 70_000, 0);
    let mbit = 70_000.0 * 1500.0 * 8e3 / got.last().expect("arrivals").0 as f64;
    assert!((mbit / 850.0 - 1.0).abs() < 1e-4, "{mbit}");
}

#[test]
fn rate__idle_link_sends_at_once() {
    let (got, _) = flow(&Link::new(0.0, 12.0), 3, 10 * MS);
    assert_eq!(
        got.iter().map(|(at, _)| *at).collect::<Vec<_>>(),
        [MS, 11 * MS, 21 * MS]
    );
}

#[test]
fn queue__drops_the_tail_beyond_its_limit() {
    let link = Link {
        queue_packets: Some(5),
        ..Link::new(0.0, 12.0)
    };
    let (got, stats) = flow(&link, 20, 0);
    // One being sent and five waiting.
    assert_eq!(ids(&got), [0, 1, 2, 3, 4, 5]);
    assert_eq!((stats.queue_drops, stats.max_queue_packets), (14, 5));
}

#[test]
fn queue__of_zero_still_sends() {
    let link = Link {
        queue_packets: Some(0),
        ..Link::new(0.0, 12.0)
    };
    let (got, stats) = flow(&link, 4, MS / 2);
    assert_eq!((ids(&got), stats.queue_drops), (vec![0, 2], 2));
}

#[test]
fn loss__comes_after_the_queue_and_uses_up_the_rate() {
    let link = Link {
        loss_pct: 100.0,
        queue_packets: Some(1),
        ..Link::new(0.0, 12.0)
    };
    let (got, stats) = flow(&link, 10, 0);
    assert_eq!((got.len(), stats.lost, stats.queue_drops), (0, 2, 8));
}

#[test]
fn loss__same_seed_same_packets_whatever_the_timing() {
    let link = Link {
        loss_pct: 5.0,
        loss_model: LossModel::BURSTS,
        seed: 42,
        ..Link::new(10.0, 0.0)
    };
    let slow = ids(&flow(&link, 5000, MS).0);
    let fast = ids(&flow(&link, 5000, 1000).0);
    assert_eq!(slow, fast);
    let other = ids(&flow(&Link { seed: 43, ..link }, 5000, MS).0);
    assert_ne!(slow, other);
}

#[test]
fn loss__directions_differ() {
    let link = Link {
        loss_pct: 50.0,
        ..Link::default()
    };
    let run = |params| {
        let mut d = Direction::new(params);
        (0..200)
            .filter_map(|i| {
                d.push(i, packet(i));
                d.pop(i).map(|p| p.id)
            })
            .collect::<Vec<_>>()
    };
    assert_ne!(run(Params::up(&link)), run(Params::down(&link)));
}

#[test]
fn duplicate__one_per_cent_arrive_twice_back_to_back() {
    let (got, stats) = flow(
        &Link {
            duplicate_pct: 1.0,
            ..Link::new(10.0, 0.0)
        },
        100_000,
        1000,
    );
    assert_eq!(got.len() as u64, 100_000 + stats.duplicated);
    assert!(
        (900..1100).contains(&stats.duplicated),
        "{}",
        stats.duplicated
    );
    let twins = got.windows(2).filter(|w| w[0].1.id == w[1].1.id).count() as u64;
    assert_eq!(twins, stats.duplicated);
}

#[test]
fn reorder__held_packets_are_overtaken() {
    let link = Link {
        reorder_pct: 1.0,
        reorder_ms: Some(5.0),
        ..Link::new(10.0, 0.0)
    };
    let (got, stats) = flow(&link, 10_000, MS);
    assert_eq!(got.len(), 10_000);
    let overtaken = ids(&got).windows(2).filter(|w| w[0] > w[1]).count() as u64;
    assert!(
        stats.reordered > 60 && overtaken > 50,
        "{} {overtaken}",
        stats.reordered
    );
    for (at, p) in got {
        let delay = at - p.id * MS;
        assert!(delay == 5 * MS || delay == 10 * MS, "{delay}");
    }
}

#[test]
fn corrupt__flips_the_given_share() {
    let (got, stats) = flow(
        &Link {
            corrupt_pct: 2.0,
            ..Link::default()
        },
        50_000,
        1000,
    );
    let flipped = got.iter().filter(|(_, p)| p.flipped).count() as u64;
    assert_eq!(flipped, stats.corrupted);
    assert!((850..1150).contains(&flipped), "{flipped}");
}

#[test]
fn ecn__marks_what_waited_too_long() {
    let link = Link {
        ecn_ms: Some(20.0),
        queue_packets: Some(1000),
        ..Link::new(10.0, 12.0)
    };
    // A packet each millisecond is what the link carries; at twice that, each one waits half a
    // millisecond longer than the one before.
    let (got, stats) = flow(&link, 100, MS);
    assert!(got.iter().all(|(_, p)| !p.marked));
    assert_eq!(stats.marked, 0);
    let (got, stats) = flow(&link, 100, MS / 2);
    for (_, p) in &got {
        assert_eq!(p.marked, p.id > 40, "packet {}", p.id);
    }
    assert_eq!((got.len(), stats.marked), (100, 59));
}

#[test]
fn mark_ip__keeps_the_checksum_true() {
    for tos in 0..=255_u8 {
        let mut header = Ipv4Header {
            dscp: IpDscp::try_new(tos >> 2).unwrap(),
            ecn: IpEcn::try_new(tos & 3).unwrap(),
            total_len: 40,
            identification: tos.into(),
            time_to_live: 64,
            source: [10, 0, tos, 1],
            destination: [10, 0, 0, 2],
            ..Default::default()
        };
        header.header_checksum = header.calc_header_checksum();
        let mut packet = header.to_bytes();
        assert_eq!(mark_ip(&mut packet), tos & 3 != 0);
        if tos & 3 != 0 {
            header.ecn = IpEcn::try_new(3).unwrap();
        }
        header.header_checksum = header.calc_header_checksum();
        assert_eq!(
            Ipv4Header::from_slice(&packet).unwrap().0,
            header,
            "{tos:#x}"
        );
    }
}

#[test]
fn slots__packets_leave_together_and_in_order() {
    let link = Link {
        slots: Some(Slots {
            min_ms: 2.0,
            max_ms: 8.0,
        }),
        ..Link::new(20.0, 0.0)
    };
    let (got, _) = flow(&link, 10_000, MS / 10);
    assert_eq!(ids(&got), (0..10_000).collect::<Vec<_>>());
    let mut openings: Vec<Nanos> = got.iter().map(|(at, _)| *at).collect();
    openings.dedup();
    let gaps: Vec<Nanos> = openings.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(gaps.iter().all(|g| (2 * MS..=8 * MS).contains(g)));
    let mean = gaps.iter().sum::<Nanos>() / gaps.len() as u64;
    assert!((45 * MS / 10..55 * MS / 10).contains(&mean), "{mean}");
    let wait = got
        .iter()
        .map(|(at, p)| at - 10 * MS - p.id * (MS / 10))
        .sum::<u64>()
        / 10_000;
    assert!((25 * MS / 10..31 * MS / 10).contains(&wait), "{wait}");
}

#[test]
fn slots__long_silence_costs_nothing() {
    let mut d = direction(&Link {
        slots: Some(Slots {
            min_ms: 0.001,
            max_ms: 0.001,
        }),
        ..Link::default()
    });
    let year = 365 * 86_400 * 1_000 * MS;
    d.push(year, packet(0));
    assert!(d.next_event().expect("waiting") - year < 2000);
}

#[test]
fn set__new_rate_applies_to_what_waits() {
    let slow = Link {
        queue_packets: Some(100),
        ..Link::new(0.0, 0.012)
    };
    let mut d = direction(&slow);
    for i in 0..3 {
        d.push(0, packet(i));
    }
    // At 12 kbit/s one packet takes a second; from 0.5 s on it takes 1 ms.
    let fast = Link {
        rate_mbit: 12.0,
        ..slow
    };
    d.set(500 * MS, Params::down(&fast));
    let mut arrivals = Vec::new();
    while let Some(at) = d.next_event() {
        while d.pop(at).is_some() {
            arrivals.push(at);
        }
    }
    assert_eq!(arrivals, [501 * MS, 502 * MS, 503 * MS]);
}

#[test]
fn set__shorter_delay_does_not_reorder() {
    let mut d = direction(&Link::new(200.0, 0.0));
    d.push(0, packet(0));
    d.set(MS, Params::down(&Link::new(2.0, 0.0)));
    d.push(2 * MS, packet(1));
    assert_eq!(d.pop(99 * MS), None);
    assert_eq!(d.pop(100 * MS).map(|p| p.id), Some(0));
    assert_eq!(d.pop(100 * MS).map(|p| p.id), Some(1));
}

#[test]
fn set__loss_changes_from_then_on() {
    let mut d = direction(&Link::default());
    d.push(0, packet(0));
    d.set(
        1,
        Params::down(&Link {
            loss_pct: 100.0,
            ..Link::default()
        }),
    );
    d.push(2, packet(1));
    assert_eq!(d.pop(3).map(|p| p.id), Some(0));
    assert_eq!((d.pop(3), d.stats().lost), (None, 1));
}

#[test]
fn push__with_a_late_clock_is_harmless() {
    let mut d = direction(&Link::new(0.0, 12.0));
    d.push(10 * MS, packet(0));
    assert_eq!(d.pop(20 * MS).map(|p| p.id), Some(0));
    d.push(15 * MS, packet(1));
    assert_eq!(d.next_event(), Some(16 * MS));
}
