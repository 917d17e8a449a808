//! Pipelines of layers over a carrier that moves messages: all of them, each once, in any order.

use proptest::prelude::*;
use vtl_core::layers::{Description, MAX_PACKET, Ns, Pipeline};
use vtl_testing::Random;

const MS: Ns = 1_000_000;

fn pipeline(stack: &str, mtu: usize) -> Pipeline {
    let stack: Description = stack.parse().expect("a stack");
    assert!(stack.is_over_messages());
    let layers = stack.build(None, |_| false, |_| None).expect("it fits");
    Pipeline::new(layers, mtu, 0, None)
}

/// Messages that get shorter, and some that do not.
fn messages(random: &mut Random, count: usize, longest: usize) -> Vec<Vec<u8>> {
    let mut message = |_| {
        let len = 1 + random.below(longest as u64) as usize;
        match random.percent(50) {
            true => vec![random.bits() as u8; len],
            false => (0..len).map(|_| random.bits() as u8).collect(),
        }
    };
    (0..count).map(&mut message).collect()
}

/// Passes messages through one pipeline, and its packets through the other in an order in which up to `ahead` overtake. Returns
/// what came.
fn through(stack: &str, mtu: usize, seed: u64, ahead: usize, count: usize) -> [Vec<Vec<u8>>; 2] {
    let mut random = Random(seed);
    let (mut here, mut there) = (pipeline(stack, mtu), pipeline(stack, mtu));
    let sent = messages(&mut random, count, here.capacity());
    let mut rest = sent.iter();
    let mut flying: Vec<Vec<u8>> = Vec::new();
    let (mut now, mut came) = (0, Vec::new());
    loop {
        now += MS;
        while here.is_ready()
            && let Some(message) = rest.next()
        {
            here.send(now, message);
        }
        while flying.len() <= ahead
            && let Some(packet) = here.poll_transmit(now)
        {
            assert!(packet.len() <= mtu);
            flying.push(packet.bytes().to_vec());
        }
        if flying.is_empty() {
            break;
        }
        let which = random.below(flying.len() as u64) as usize;
        there.receive(now, &flying.swap_remove(which));
        here.handle_timeout(now);
        there.handle_timeout(now);
        while let Some(message) = there.poll_deliver(now) {
            came.push(message.bytes().to_vec());
        }
    }
    assert_eq!((here.refused(), there.refused()), (0, 0));
    [sent, came]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn messages__all_come_each_once_and_in_order_where_that_is_said(
        seed in any::<u64>(),
        stack in prop::sample::select(vec![
            "quic/compression",
            "graft/ordering",
            "sctp/compression/ordering/encryption",
            "mptcp/ordering/compression",
        ]),
        mtu in 300..MAX_PACKET,
        ahead in 0..200_usize,
        count in 1..300_usize,
    ) {
        let [mut sent, mut came] = through(stack, mtu, seed, ahead, count);
        if !stack.contains("ordering") {
            sent.sort();
            came.sort();
        }
        prop_assert_eq!(sent, came);
    }

    #[test]
    fn hostile__whatever_comes_is_counted_and_bounded(
        stack in prop::sample::select(vec!["quic/compression", "graft/ordering/compression"]),
        packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..300),
    ) {
        let mut hit = pipeline(stack, 1200);
        for (i, packet) in packets.iter().enumerate() {
            let now = i as Ns * MS;
            hit.receive(now, packet);
            hit.handle_timeout(now);
            while let Some(packet) = hit.poll_deliver(now) {
                prop_assert!(packet.len() <= MAX_PACKET);
            }
            // Nothing that a stranger sends makes layers over messages send.
            prop_assert_eq!(hit.backlog(), 0);
        }
    }
}

#[test]
fn ordering__waits_for_a_gap_whatever_is_behind_and_passes_all_of_it_up() {
    const PACKETS: usize = 16_384;
    let (mut here, mut there) = (
        pipeline("graft/ordering", 1200),
        pipeline("graft/ordering?buffer=8&wait=1", 1200),
    );
    let mut packets = Vec::new();
    for number in 0..=PACKETS {
        here.send(0, &number.to_be_bytes());
        packets.extend(here.poll_transmit(0));
    }
    let last = packets.pop().expect("sent");
    for packet in &packets[1..] {
        there.receive(0, packet.bytes());
    }
    // No time passes for which the gap would be given up.
    there.handle_timeout(3_600_000 * MS);
    assert!(!there.has_incoming() && there.refused() == 0);
    // One more is beyond what the largest ring has, so no honest peer sends it.
    let mut beyond = pipeline("graft/ordering", 1200);
    beyond.receive(0, last.bytes());
    assert_eq!(beyond.refused(), 1);
    there.receive(0, packets[0].bytes());
    let mut came = 0_usize;
    while let Some(message) = there.poll_deliver(0) {
        assert_eq!(message.bytes(), came.to_be_bytes());
        came += 1;
    }
    assert_eq!((came, there.refused()), (PACKETS, 0));
}
