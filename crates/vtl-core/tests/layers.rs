//! Pipelines of layers in virtual time, over a network that loses, repeats, reorders and delays packets.

use std::collections::BTreeMap;

use proptest::prelude::*;
use vtl_core::layers::{Description, Ns, Pipeline};
use vtl_testing::Random;

const MS: Ns = 1_000_000;
const MTU: usize = 1200;
const UDP_PLUS: &str = "udp/flow-control/ordering/nack";

/// A network, in both directions.
#[derive(Clone, Copy, Debug)]
struct Network {
    /// One way.
    delay: Ns,
    /// Up to this much later, each packet by itself: later packets overtake it.
    jitter: Ns,
    /// In percent.
    lost: u64,
    twice: u64,
}

const GOOD: Network = Network {
    delay: 20 * MS,
    jitter: 0,
    lost: 0,
    twice: 0,
};

/// One of two hosts.
struct Host {
    pipeline: Pipeline,
    /// Bytes to send, and how many were; what came.
    bytes: Vec<u8>,
    sent: usize,
    got: Vec<u8>,
    /// It takes one packet in this time; 0: all at once.
    takes: Ns,
    took: Ns,
    waiting: usize,
}

struct World {
    now: Ns,
    network: Network,
    random: Random,
    hosts: [Host; 2],
    /// Packets under way: when and where they arrive.
    flying: BTreeMap<(Ns, u64), (usize, Vec<u8>)>,
    packets: u64,
    /// Packets that get lost, by their number.
    cut: fn(u64) -> bool,
}

fn pipeline(stack: &str, rate: Option<u64>) -> Pipeline {
    let stack: Description = stack.parse().expect("a stack");
    let layers = stack.build(None, |_| false, |_| None).expect("it fits");
    Pipeline::new(layers, MTU, 28, rate)
}

impl World {
    fn new(stack: &str, rate: Option<u64>, network: Network, seed: u64, bytes: [usize; 2]) -> Self {
        let mut random = Random(seed);
        let hosts = bytes.map(|len| Host {
            pipeline: pipeline(stack, rate),
            bytes: (0..len).map(|_| random.bits() as u8).collect(),
            sent: 0,
            got: Vec::new(),
            takes: 0,
            took: 0,
            waiting: 0,
        });
        Self {
            now: 0,
            network,
            random,
            hosts,
            flying: BTreeMap::new(),
            packets: 0,
            cut: |_| false,
        }
    }

    /// Has a host do what it can now.
    fn turn(&mut self, at: usize) {
        let now = self.now;
        let host = &mut self.hosts[at];
        while (host.takes == 0 || host.took + host.takes <= now)
            && let Some(packet) = host.pipeline.poll_deliver(now)
        {
            host.got.extend_from_slice(packet.bytes());
            host.took = now;
        }
        loop {
            host.pipeline.handle_timeout(now);
            while host.pipeline.is_ready() && host.sent < host.bytes.len() {
                let rest = &host.bytes[host.sent..];
                let len = rest.len().min(host.pipeline.capacity());
                host.pipeline.send(now, &rest[..len]);
                host.sent += len;
            }
            let mut is_idle = true;
            while let Some(packet) = host.pipeline.poll_transmit(now) {
                assert!(packet.len() <= MTU);
                is_idle = false;
                self.packets += 1;
                let copies = 1 + usize::from(self.random.percent(self.network.twice));
                for _ in 0..copies {
                    let late = match self.network.jitter {
                        0 => 0,
                        jitter => self.random.below(jitter),
                    };
                    if !self.random.percent(self.network.lost) && !(self.cut)(self.packets) {
                        let number = self.random.bits() >> 40 | self.packets << 24;
                        let arrival = (now + self.network.delay + late, number);
                        self.flying
                            .insert(arrival, (1 - at, packet.bytes().to_vec()));
                    }
                }
            }
            if is_idle {
                break;
            }
        }
    }

    /// When something happens next.
    fn next(&self) -> Option<Ns> {
        let timeouts = self.hosts.iter().flat_map(|host| {
            let takes = host.pipeline.has_incoming().then(|| host.took + host.takes);
            [host.pipeline.next_timeout(), takes]
        });
        let arrival = self.flying.first_key_value().map(|((at, _), _)| *at);
        timeouts.flatten().chain(arrival).min()
    }

    /// Runs until nothing is to happen any more; at most this long.
    fn run(&mut self, max: Ns) {
        let end = self.now + max;
        self.turn(0);
        self.turn(1);
        while let Some(next) = self.next() {
            assert!(next <= end, "it ends: {:?}", self.progress());
            // What is due at once cannot go on for ever.
            self.now = next.max(self.now + 1000);
            while let Some(first) = self.flying.first_entry()
                && first.key().0 <= self.now
            {
                let (to, packet) = first.remove();
                self.hosts[to].pipeline.receive(self.now, &packet);
            }
            self.turn(0);
            self.turn(1);
            for host in &mut self.hosts {
                host.waiting = host.waiting.max(host.got.len());
            }
        }
    }

    fn progress(&self) -> [(usize, usize); 2] {
        let of = |at: usize| (self.hosts[1 - at].got.len(), self.hosts[at].bytes.len());
        [of(0), of(1)]
    }

    #[track_caller]
    fn assert_exact(&self) {
        for at in [0, 1] {
            let (sent, got) = (&self.hosts[at].bytes, &self.hosts[1 - at].got);
            assert!(sent == got, "{:?}", self.progress());
            let figures = self.hosts[at].pipeline.figures().expect("nack's");
            assert_eq!(figures.waits, None, "nothing is waited for");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn reliable__is_exact_over_any_network(
        seed in any::<u64>(),
        stack in prop::sample::select(vec![
            UDP_PLUS,
            "udp/flow-control?window=8/ordering?buffer=64/nack?window=64",
            "udp/flow-control/ordering/nack?window=40/fec?block=4",
            "udp/compression/flow-control/ordering/nack/fec",
            "udp/flow-control/compression/ordering/nack/fec?block=1&wait=1/encryption",
        ]),
        rate in prop::sample::select(vec![None, Some(1_000_000), Some(50_000_000)]),
        delay in 0..50_u64,
        jitter in 0..30_u64,
        lost in 0..40_u64,
        twice in 0..20_u64,
        bytes in prop::array::uniform2(0..60_000_usize),
        takes in prop::array::uniform2(0..3_u64),
    ) {
        let network = Network { delay: delay * MS, jitter: jitter * MS, lost, twice };
        let mut world = World::new(stack, rate, network, seed, bytes);
        for (host, takes) in world.hosts.iter_mut().zip(takes) {
            host.takes = takes * MS;
        }
        world.run(600_000 * MS);
        world.assert_exact();
    }

    #[test]
    fn hostile__any_packets_are_taken_and_the_rest_is_exact(
        seed in any::<u64>(),
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..60), 0..200),
        flips in prop::collection::vec((0..200_usize, 0..40_usize, any::<u8>()), 0..100),
    ) {
        let stack = "udp/compression/flow-control/ordering/nack/fec";
        // By itself, among packets of its own that were changed.
        let mut world = World::new(stack, None, GOOD, seed, [100_000, 0]);
        world.turn(0);
        let mut own: Vec<_> = world.flying.values().map(|(_, packet)| packet.clone()).collect();
        for (which, at, bits) in flips {
            let which = which % own.len();
            let at = at % own[which].len();
            own[which][at] ^= bits;
        }
        let mut hit = pipeline(stack, None);
        for (i, packet) in packets.iter().chain(&own).enumerate() {
            let now = i as Ns * MS;
            hit.receive(now, packet);
            hit.handle_timeout(now);
            while hit.poll_deliver(now).is_some() || hit.poll_transmit(now).is_some() {}
        }
        // The sender, among reports that are none.
        let host = &mut world.hosts[0].pipeline;
        for packet in packets.iter().chain(&own) {
            host.receive(0, packet);
        }
        host.handle_timeout(0);
    }
}

#[test]
fn tail__the_last_packets_are_repaired_in_few_round_trips() {
    let mut world = World::new(UDP_PLUS, None, GOOD, 1, [12_000, 0]);
    // The last three of eleven.
    world.cut = |packet| (9..=11).contains(&packet);
    world.run(1000 * MS);
    world.assert_exact();
    // Half a round trip, a pause, the probe's round trip, and half of one.
    assert!(
        world.now < 2 * 40 * MS + 20 * MS + 30 * MS,
        "{} ms",
        world.now / MS
    );
}

#[test]
fn paced__uses_its_rate_where_packets_get_lost() {
    const BYTES: usize = 10_000_000;
    let rate = 20_000_000;
    for lost in [0, 1, 5] {
        let network = Network { lost, ..GOOD };
        let mut world = World::new(UDP_PLUS, Some(rate), network, 7, [BYTES, 0]);
        world.run(60_000 * MS);
        world.assert_exact();
        let goodput = BYTES as f64 * 8.0 / (world.now as f64 / 1e9);
        // Of 1,228 bytes on the link 1,186 are payload; what is lost is sent once more.
        let max = rate as f64 * 1186.0 / 1228.0 * (1.0 - lost as f64 / 100.0);
        println!("{lost} %: {:.2} of {:.2} Mbit/s", goodput / 1e6, max / 1e6);
        assert!(goodput > 0.95 * max, "{lost} %: {goodput} of {max}");
        let figures = world.hosts[0].pipeline.figures().expect("nack's");
        let share = figures.lost as f64 / figures.sent as f64;
        assert!((share - lost as f64 / 100.0).abs() < 0.006, "{share}");
        assert!(figures.rtt.abs_diff(40 * MS) < 10 * MS, "{figures:?}");
    }
}

#[test]
fn fec__needs_fewer_repetitions() {
    let network = Network { lost: 1, ..GOOD };
    let lost = |stack| {
        let mut world = World::new(stack, Some(20_000_000), network, 7, [2_000_000, 0]);
        world.run(60_000 * MS);
        world.assert_exact();
        world.hosts[0].pipeline.figures().expect("nack's").lost
    };
    let (without, with) = (
        lost(UDP_PLUS),
        lost("udp/flow-control/ordering/nack/fec?block=10"),
    );
    assert!(with * 4 < without, "{with} instead of {without}");
}

#[test]
fn flow_control__a_reader_that_stops_stops_its_sender() {
    let stack = "udp/flow-control?window=16/ordering/nack";
    let mut world = World::new(stack, None, GOOD, 3, [1_000_000, 0]);
    world.hosts[1].takes = Ns::MAX / 2;
    world.hosts[1].took = 1;
    world.turn(0);
    for _ in 0..200 {
        world.now += 20 * MS;
        let flying = std::mem::take(&mut world.flying);
        for (to, packet) in flying.into_values() {
            world.hosts[to].pipeline.receive(world.now, &packet);
        }
        world.turn(0);
        world.turn(1);
    }
    assert_eq!(world.hosts[0].sent, 16 * world.hosts[0].pipeline.capacity());
    assert!(
        world.flying.is_empty(),
        "nothing is repeated that has arrived"
    );
    (world.hosts[1].takes, world.hosts[1].took) = (0, 0);
    world.run(10_000 * MS);
    world.assert_exact();
}

/// What a packet costs at both hosts together: without layers, by single ones, by those that need others below, and by all.
#[test]
#[ignore = "measures"]
fn cost__of_a_packet() {
    const ROUNDS: usize = 15;
    let stacks = [
        "kcp",
        "kcp/ordering",
        "kcp/nack",
        "kcp/fec",
        "kcp/compression",
        UDP_PLUS,
        "udp/compression/flow-control/ordering/nack/fec",
        "quic/ordering",
        "quic/ordering/compression",
    ];
    let mut taken = stacks.map(|_| Vec::new());
    for _ in 0..ROUNDS {
        // In turn, so that whatever else the machine does is spread.
        for (stack, taken) in stacks.iter().zip(&mut taken) {
            taken.push(cost(stack));
        }
    }
    for (stack, mut taken) in stacks.iter().zip(taken) {
        taken.sort_unstable();
        let [min, median, max] = [0, ROUNDS / 2, ROUNDS - 1].map(|i| taken[i]);
        println!("{stack}: {median} ns a packet ({min} to {max})");
    }
}

/// Nanoseconds for each packet, of which half get shorter by compression: from the one host's top to the other's, and what
/// the layers there answer.
fn cost(stack: &str) -> u64 {
    const PACKETS: usize = 20_000;
    let (mut here, mut there) = (pipeline(stack, None), pipeline(stack, None));
    let mut random = Random(7);
    let len = here.capacity();
    let mut message = |number: usize| match number % 2 {
        0 => vec![number as u8; len],
        _ => (0..len).map(|_| random.bits() as u8).collect(),
    };
    let messages: Vec<Vec<u8>> = (0..64).map(&mut message).collect();
    let mut came = 0;
    let began = std::time::Instant::now();
    for number in 0..PACKETS {
        let now = number as Ns * 10_000;
        here.send(now, &messages[number % messages.len()]);
        here.handle_timeout(now);
        while let Some(packet) = here.poll_transmit(now) {
            there.receive(now, packet.bytes());
        }
        there.handle_timeout(now);
        while let Some(packet) = there.poll_deliver(now) {
            came += usize::from(packet.len() == len);
        }
        while let Some(packet) = there.poll_transmit(now) {
            here.receive(now, packet.bytes());
        }
    }
    let taken = began.elapsed().as_nanos() as u64;
    assert_eq!(came, PACKETS, "{stack}");
    taken / PACKETS as u64
}
