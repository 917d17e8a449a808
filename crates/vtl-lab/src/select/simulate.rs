//! One transfer in virtual time: a graft's own code, or a model of TCP, over the link model of `vtl-link`.
//!
//! The sender is host 0. Acknowledgements are not lost: the models of TCP have an acknowledgement for each segment, and
//! none that makes up for a lost one.

use anyhow::Result;
use vtl_link::{Direction, Frame, Link, Nanos, Params, mark_ip};
use vtl_proto::intf;
use vtl_sim::host::SessionConfig;
use vtl_sim::models::{Model, SEGMENT, Sender};
use vtl_sim::pair::Pair;

/// Payload of a packet or segment, bytes.
pub(super) const PAYLOAD: u64 = 1440;
/// Length of an Ethernet header, which does not count on the link.
const ETHERNET: u64 = 14;
/// Length of an acknowledgement of TCP on the link, bytes.
const ACKNOWLEDGEMENT: u64 = 64;

/// What carries a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Simulated {
    /// A model of the kernel's TCP under this congestion control.
    Tcp(Model),
    /// A session over this graft.
    Graft(&'static str),
}

/// What the sending application writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    /// Packets in all.
    pub(super) packets: u64,
    /// Time between two packets, ns; 0: all are there at once.
    pub(super) every: Nanos,
}

impl Traffic {
    /// Packets written by `now`, and the time of the next one.
    fn written(&self, now: Nanos) -> (u64, Nanos) {
        match now.checked_div(self.every) {
            None => (self.packets, Nanos::MAX),
            Some(before) if before + 1 >= self.packets => (self.packets, Nanos::MAX),
            Some(before) => (before + 1, (before + 1) * self.every),
        }
    }
}

/// Simulates a transfer until `limit`. For each packet, the time when the receiving application could read it, in order;
/// `None`: not by then.
///
/// # Errors
/// A graft that delivers wrong data, or spins: a bug.
pub(super) fn run(
    link: &Link,
    simulated: Simulated,
    traffic: Traffic,
    limit: Nanos,
) -> Result<Vec<Option<Nanos>>> {
    let mut party: Box<dyn Party> = match simulated {
        Simulated::Tcp(model) => Box::new(Tcp::new(model, link, traffic)),
        Simulated::Graft(graft) => Box::new(session(graft, link, traffic)),
    };
    let mut links = [Params::down(link), Params::up(link)].map(Direction::new);
    let mut sent = Vec::new();
    let mut read = vec![None; usize::try_from(traffic.packets)?];
    let (mut now, mut before) = (0, 0);
    while now < limit && before < read.len() {
        for (from, link) in links.iter_mut().enumerate() {
            while let Some(packet) = link.pop(now) {
                party.arrive(1 - from, packet, now, &mut sent);
            }
        }
        let (written, more) = traffic.written(now);
        let due = party.run(written, now, &mut sent)?;
        for (from, packet) in sent.drain(..) {
            links[from].push(now, packet);
        }
        let upto = usize::try_from(party.read())?;
        read[before..upto].fill(Some(now));
        before = upto;
        let arrivals = links.iter().filter_map(Direction::next_event).min();
        let next = due.min(more).min(arrivals.unwrap_or(Nanos::MAX));
        now = next.max(now + 1);
    }
    Ok(read)
}

/// A packet on the link.
#[derive(Clone, Debug)]
enum Packet {
    Graft(Vec<u8>),
    Segment { id: u64, segment: u64 },
    Acknowledgement(u64),
}

impl Frame for Packet {
    fn link_bytes(&self) -> u64 {
        match self {
            Self::Graft(bytes) => bytes.len() as u64 - ETHERNET,
            Self::Segment { .. } => SEGMENT,
            Self::Acknowledgement(_) => ACKNOWLEDGEMENT,
        }
    }

    fn mark(&mut self) -> bool {
        match self {
            Self::Graft(bytes) => mark_ip(&mut bytes[ETHERNET as usize..]),
            _ => false,
        }
    }

    fn flip_bit(&mut self, _: u64) -> bool {
        false
    }
}

/// Packets to send, with the host that sends them.
type Sent = Vec<(usize, Packet)>;

/// Both ends of a transfer.
trait Party {
    /// A packet arrives at a host.
    fn arrive(&mut self, at: usize, packet: Packet, now: Nanos, sent: &mut Sent);
    /// Sends what may be sent of `written` packets. Returns the time of the next call.
    fn run(&mut self, written: u64, now: Nanos, sent: &mut Sent) -> Result<Nanos>;
    /// Packets that the receiving application has read, in order.
    fn read(&self) -> u64;
}

struct Tcp {
    sender: Sender,
    offered: u64,
    arrived: Vec<bool>,
    /// All before have arrived.
    read: usize,
}

impl Tcp {
    fn new(model: Model, link: &Link, traffic: Traffic) -> Self {
        Self {
            sender: Sender::new(model, 0, link.seed).with_probes((link.rtt_ms * 1e6) as Nanos),
            offered: 0,
            arrived: vec![false; traffic.packets as usize],
            read: 0,
        }
    }
}

impl Party for Tcp {
    fn arrive(&mut self, at: usize, packet: Packet, now: Nanos, sent: &mut Sent) {
        match packet {
            Packet::Segment { id, segment } => {
                self.arrived[segment as usize] = true;
                while self.arrived.get(self.read) == Some(&true) {
                    self.read += 1;
                }
                sent.push((at, Packet::Acknowledgement(id)));
            }
            Packet::Acknowledgement(id) => self.sender.acknowledged(now, id),
            Packet::Graft(_) => {}
        }
    }

    fn run(&mut self, written: u64, now: Nanos, sent: &mut Sent) -> Result<Nanos> {
        self.sender.offer(written - self.offered);
        self.offered = written;
        while let Some(id) = self.sender.send(now) {
            let segment = self.sender.latest_segment();
            sent.push((0, Packet::Segment { id, segment }));
        }
        Ok(self.sender.due())
    }

    fn read(&self) -> u64 {
        self.read as u64
    }
}

/// A session over a graft.
fn session(graft: &'static str, link: &Link, traffic: Traffic) -> Pair {
    // Four bandwidth-delay products, or all that there is to send.
    let path = link.rtt_ms * link.rate_mbit * 125.0 / 1500.0;
    let slots = ((4.0 * path) as u64).max(1024).min(traffic.packets.max(64));
    let config = SessionConfig {
        slots: slots.next_power_of_two().min(intf::VTL_MAX_WINDOW.into()) as u32,
        max_payload: PAYLOAD as u16,
        rtt_us: (link.rtt_ms * 1e3) as u32,
        ..SessionConfig::of(graft)
    };
    Pair::new(&config, 0, link.seed)
}

impl Party for Pair {
    fn arrive(&mut self, at: usize, packet: Packet, now: Nanos, sent: &mut Sent) {
        if let Packet::Graft(bytes) = packet
            && let Some(answer) = Pair::arrive(self, at, &bytes, now)
        {
            sent.push((at, Packet::Graft(answer)));
        }
    }

    fn run(&mut self, written: u64, now: Nanos, sent: &mut Sent) -> Result<Nanos> {
        let send = |side, bytes| sent.push((side, Packet::Graft(bytes)));
        Ok(Pair::run(self, written, now, send)?)
    }

    fn read(&self) -> u64 {
        Pair::read(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Simulated; 3] = [
        Simulated::Tcp(Model::Cubic),
        Simulated::Tcp(Model::Bbr),
        Simulated::Graft("stream"),
    ];

    fn link(loss_pct: f64) -> Link {
        let mut link = Link::new(100.0, 100.0);
        (link.loss_down_pct, link.loss_up_pct) = (Some(loss_pct), Some(0.0));
        link
    }

    #[test]
    fn run__a_few_packets_take_half_a_round_trip() {
        let traffic = Traffic {
            packets: 3,
            every: 0,
        };
        for simulated in ALL {
            let read = run(&link(0.0), simulated, traffic, 1_000_000_000).unwrap();
            let last = read[2].unwrap();
            assert!(
                (50_000_000..60_000_000).contains(&last),
                "{simulated:?}: {last}"
            );
        }
    }

    #[test]
    fn run__everything_arrives_in_order_despite_losses() {
        let traffic = Traffic {
            packets: 500,
            every: 1_000_000,
        };
        for simulated in ALL {
            let read = run(&link(5.0), simulated, traffic, 60_000_000_000).unwrap();
            let times: Vec<Nanos> = read.into_iter().map(Option::unwrap).collect();
            assert!(times.is_sorted());
            assert!(
                (0..)
                    .zip(&times)
                    .all(|(n, at)| *at >= n * 1_000_000 + 50_000_000)
            );
        }
    }

    #[test]
    fn run__what_is_late_is_not_there() {
        let traffic = Traffic {
            packets: 10_000,
            every: 0,
        };
        let read = run(&link(0.0), ALL[2], traffic, 500_000_000).unwrap();
        assert!(read[0].is_some() && read[9_999].is_none());
    }

    /// A window that is longer than any bitmap, nearly all of it lost, but for its end: what no acknowledgement describes must
    /// not fill the window that is left.
    #[test]
    fn run__repairs_more_than_a_bitmap_describes() {
        let mut link = link(0.0);
        (link.rtt_ms, link.rate_mbit, link.queue_packets) = (691.0, 48.72, Some(1402));
        let traffic = Traffic {
            packets: 11_651,
            every: 0,
        };
        let read = run(&link, Simulated::Graft("hybla"), traffic, 60_000_000_000).unwrap();
        let count = read.iter().flatten().count();
        assert_eq!(count, read.len(), "packets within a minute");
    }

    /// A tail loss probe repairs the last segment after two round trips and what Linux adds, without a timeout of a second.
    #[test]
    fn run__tcp_repairs_the_tail_by_a_probe() {
        let traffic = Traffic {
            packets: 10,
            every: 0,
        };
        let ends = (1..=200).map(|seed| {
            let link = Link { seed, ..link(5.0) };
            let read = run(&link, ALL[0], traffic, 60_000_000_000).unwrap();
            read[9].unwrap() / 1_000_000
        });
        let ends: Vec<Nanos> = ends.collect();
        assert!(ends.iter().all(|end| *end < 1500), "{ends:?}");
        assert!(ends.iter().any(|end| (250..400).contains(end)), "{ends:?}");
    }
}
