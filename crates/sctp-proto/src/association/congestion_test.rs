//! Two endpoints in virtual time, over a link with a rate, a delay, a queue and random losses.

use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec;
use bytes::Bytes;
use core::net::SocketAddr;
use core::time::Duration;
use std::time::Instant;

use super::congestion::Model;
use super::*;
use crate::{
    AssociationHandle, ClientConfig, DatagramEvent, Endpoint, EndpointConfig,
    PayloadProtocolIdentifier, ServerConfig,
};

const MESSAGE: usize = 1168;
const HEADERS: usize = 28;

#[derive(Clone, Copy)]
struct Link {
    bits_per_second: u64,
    one_way: Duration,
    /// Bytes.
    queue: u64,
    /// Of 1,000 packets, in each direction.
    loss: u64,
}

const TERRESTRIAL: Link = Link {
    bits_per_second: 100_000_000,
    one_way: Duration::from_millis(50),
    queue: 1_250_000,
    loss: 0,
};

/// One direction.
struct Wire {
    link: Link,
    free_at: Instant,
    random: u64,
    under_way: VecDeque<(Instant, Bytes)>,
    /// DATA packets.
    sent: u64,
}

impl Wire {
    fn new(link: Link, seed: u64, now: Instant) -> Self {
        Self {
            link,
            free_at: now,
            random: seed,
            under_way: VecDeque::new(),
            sent: 0,
        }
    }

    fn send(&mut self, packet: Bytes, now: Instant) {
        let len = (packet.len() + HEADERS) as u64;
        self.sent += u64::from(packet.len() > MESSAGE);
        let wait = self.free_at.saturating_duration_since(now);
        let queued = wait.as_nanos() as u64 * self.link.bits_per_second / 8 / 1_000_000_000;
        if queued + len > self.link.queue {
            return;
        }
        let takes = Duration::from_nanos(len * 8 * 1_000_000_000 / self.link.bits_per_second);
        self.free_at = self.free_at.max(now) + takes;
        // splitmix64
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        if (z ^ (z >> 31)) % 1000 >= self.link.loss {
            let at = self.free_at + self.link.one_way;
            self.under_way.push_back((at, packet));
        }
    }
}

struct Host {
    endpoint: Endpoint,
    association: Option<(AssociationHandle, Association)>,
    address: SocketAddr,
}

impl Host {
    fn receive(&mut self, packet: Bytes, from: SocketAddr, now: Instant) {
        match self.endpoint.handle(now, from, None, None, packet) {
            Some((handle, DatagramEvent::NewAssociation(association))) => {
                self.association = Some((handle, association));
            }
            Some((_, DatagramEvent::AssociationEvent(event))) => {
                self.association.as_mut().unwrap().1.handle_event(event);
            }
            None => {}
        }
    }

    fn transmit(&mut self, wire: &mut Wire, now: Instant) {
        while let Some(transmit) = self.endpoint.poll_transmit() {
            let Payload::RawEncode(packets) = transmit.payload else {
                continue;
            };
            packets.into_iter().for_each(|p| wire.send(p, now));
        }
        let Some((_, association)) = &mut self.association else {
            return;
        };
        while let Some(transmit) = association.poll_transmit(now) {
            let Payload::RawEncode(packets) = transmit.payload else {
                continue;
            };
            packets.into_iter().for_each(|p| wire.send(p, now));
        }
    }
}

/// What a transfer was like.
#[derive(Debug)]
struct Outcome {
    mbit: f64,
    /// Of all DATA packets, those that were sent again.
    again: f64,
}

/// Sends so much from the client to the server. User space's timers are a millisecond coarse.
fn transfer(link: Link, bytes: usize, model: bool, window: u32, seed: u64) -> Outcome {
    const TICK: Duration = Duration::from_millis(1);
    let begin = Instant::now();
    let transport = || {
        TransportConfig::default()
            .with_path_model(model)
            .with_max_receive_buffer_size(window)
            .with_rto_min_ms(100)
            .with_rto_initial_ms(500)
    };
    let mut endpoint = EndpointConfig::new();
    endpoint.max_payload_size(MESSAGE as u32);
    let endpoint = Arc::new(endpoint);
    let mut server = ServerConfig::new();
    server.transport = Arc::new(transport());
    let mut client = ClientConfig::new();
    client.transport = Arc::new(transport());
    let mut hosts = [None, Some(Arc::new(server))].map(|server| Host {
        endpoint: Endpoint::new(Arc::clone(&endpoint), server),
        association: None,
        address: SocketAddr::from(([127, 0, 0, 1], 1)),
    });
    hosts[1].address = SocketAddr::from(([127, 0, 0, 2], 1));
    let addresses = [hosts[0].address, hosts[1].address];
    hosts[0].association = Some(hosts[0].endpoint.connect(client, addresses[1]).unwrap());
    let mut wires = [0, 1].map(|i| Wire::new(link, seed * 2 + i, begin));

    let messages = bytes.div_ceil(MESSAGE);
    let (mut written, mut read) = (0, 0);
    let (mut now, mut started) = (begin, None);
    while read < messages {
        assert!(now - begin < Duration::from_secs(600), "stuck at {read}");
        for side in [0, 1] {
            while let Some((at, packet)) = wires[1 - side].under_way.pop_front() {
                if at > now {
                    wires[1 - side].under_way.push_front((at, packet));
                    break;
                }
                hosts[side].receive(packet, addresses[1 - side], now);
            }
            let Some((_, association)) = &mut hosts[side].association else {
                continue;
            };
            association.handle_timeout(now);
            while let Some(event) = association.poll() {
                assert!(!matches!(event, Event::AssociationLost { .. }));
                if side == 0 && matches!(event, Event::Connected) {
                    association
                        .open_stream(1, PayloadProtocolIdentifier::Binary)
                        .unwrap();
                    started = Some(now);
                }
            }
            while association.accept_stream().is_some() {}
            if let Ok(mut stream) = association.stream(1) {
                while side == 1
                    && let Some(chunks) = stream.read().unwrap()
                {
                    assert_eq!(chunks.len(), MESSAGE);
                    let mut number = [0; MESSAGE];
                    chunks.read(&mut number).unwrap();
                    assert_eq!(number[..8], (read as u64).to_be_bytes());
                    read += 1;
                }
                while side == 0 && written < messages && stream.buffered_amount().unwrap() < 8 << 20
                {
                    let mut message = vec![0; MESSAGE];
                    message[..8].copy_from_slice(&(written as u64).to_be_bytes());
                    stream.write(&message).unwrap();
                    written += 1;
                }
            }
            hosts[side].transmit(&mut wires[side], now);
        }
        let timers = hosts
            .iter()
            .filter_map(|host| host.association.as_ref()?.1.poll_timeout());
        // Never twice at the same time, and late.
        let timer = timers.min().map(|at| at.max(now) + TICK);
        let packets = wires
            .iter()
            .filter_map(|wire| Some(wire.under_way.front()?.0));
        now = packets
            .chain(timer)
            .min()
            .expect("nothing happens any more");
    }
    let took = now - started.unwrap();
    Outcome {
        mbit: bytes as f64 * 8.0 / took.as_secs_f64() / 1e6,
        again: 1.0 - messages as f64 / wires[0].sent as f64,
    }
}

#[test]
fn transfer__fills_a_long_path_whatever_gets_lost_by_chance() {
    for (loss, least) in [(0, 60.0), (10, 55.0), (20, 55.0)] {
        let link = Link {
            loss,
            ..TERRESTRIAL
        };
        let outcome = transfer(link, 16 << 20, true, 16 << 20, 1);
        assert!(outcome.mbit > least, "{loss}: {outcome:?}");
        assert!(outcome.again < 0.03 + loss as f64 / 1e3, "{outcome:?}");
    }
    let link = Link {
        loss: 10,
        ..TERRESTRIAL
    };
    let outcome = transfer(link, 1 << 20, false, 16 << 20, 1);
    assert!(outcome.mbit < 10.0, "RFC 9260's own: {outcome:?}");
}

#[test]
fn transfer__is_no_slower_than_rfc_9260_on_a_short_path() {
    let link = Link {
        bits_per_second: 1_000_000_000,
        one_way: Duration::from_micros(100),
        queue: 1_250_000,
        loss: 0,
    };
    let [model, rfc] = [true, false].map(|m| transfer(link, 16 << 20, m, 16 << 20, 1));
    assert!(model.mbit > 0.9 * rfc.mbit, "{model:?} {rfc:?}");
}

#[test]
fn transfer__ends_through_heavy_loss_and_a_small_window() {
    let link = Link {
        bits_per_second: 10_000_000,
        queue: 30_000,
        loss: 200,
        ..TERRESTRIAL
    };
    let outcome = transfer(link, 256 << 10, true, 16 << 20, 1);
    assert!(outcome.mbit > 0.5, "{outcome:?}");
    let outcome = transfer(TERRESTRIAL, 1 << 20, true, 64 << 10, 1);
    assert!(outcome.mbit > 3.0 && outcome.again < 0.01, "{outcome:?}");
}

/// A model that gets an acknowledgement each millisecond, of so much, a round trip after sending.
fn fed(bytes_per_ms: usize, rtt: Duration, rounds: u32) -> (Model, Instant) {
    let mut now = Instant::now();
    let mut model = Model::new(1200, now);
    let millis = rtt.as_millis() as usize;
    let mut under_way = VecDeque::new();
    for _ in 0..rounds * millis as u32 {
        let in_flight = bytes_per_ms * under_way.len();
        under_way.push_back(model.sent(bytes_per_ms, in_flight, now));
        now += Duration::from_millis(1);
        if under_way.len() >= millis {
            let sent = under_way.pop_front().unwrap();
            model.acked(&sent, true, bytes_per_ms, now);
            model.sack(bytes_per_ms * under_way.len(), now);
        }
    }
    (model, now)
}

#[test]
fn model__window_is_bounded_by_twice_the_product() {
    let rtt = Duration::from_millis(100);
    let (model, _) = fed(10_000, rtt, 12);
    let product = 1_000_000;
    let cwnd = model.cwnd() as usize;
    assert!((product..product * 9 / 4).contains(&cwnd), "{cwnd}");
}

#[test]
fn model__losses_without_a_queue_leave_the_window() {
    let (mut model, now) = fed(10_000, Duration::from_millis(100), 12);
    let before = model.cwnd();
    (0..50).for_each(|_| model.lost(1200));
    model.sack(900_000, now);
    assert_eq!(model.cwnd(), before);
}

#[test]
fn model__timeout_leaves_one_packet() {
    let (mut model, now) = fed(10_000, Duration::from_millis(100), 12);
    model.timed_out();
    assert_eq!(model.cwnd(), 1200);
    let sent = model.sent(1200, 0, now);
    let later = now + Duration::from_millis(100);
    model.acked(&sent, true, 1200, later);
    model.sack(0, later);
    assert_eq!(model.cwnd(), 4 * 1200);
}

#[test]
fn model__packets_wait_for_their_time() {
    let (mut model, now) = fed(10_000, Duration::from_millis(100), 12);
    let mut free = 0;
    while model.wait_until(now).is_none() {
        model.sent(1200, 0, now);
        free += 1;
        assert!(free < 500, "nothing is paced");
    }
    let wait = model.wait_until(now).unwrap();
    assert!(model.wait_until(wait).is_none());
}

#[test]
fn model__what_was_sent_before_something_that_arrived_is_lost_after_a_while() {
    let (mut model, now) = fed(10_000, Duration::from_millis(100), 12);
    let first = model.sent(1200, 0, now);
    let second = model.sent(1200, 0, now);
    assert!(model.lost_at(&second).is_none());
    let later = now + Duration::from_millis(100);
    model.acked(&second, true, 1200, later);
    let at = model.lost_at(&first).unwrap();
    assert!(at > later && at < later + Duration::from_millis(20));
    assert!(model.lost_at(&second).is_none());
    // An early answer to a retransmission is one to the packet before it.
    let third = model.sent(1200, 0, later);
    let fourth = model.sent(1200, 0, later);
    model.acked(&fourth, false, 1200, later + Duration::from_millis(1));
    assert!(model.lost_at(&third).is_none());
}
