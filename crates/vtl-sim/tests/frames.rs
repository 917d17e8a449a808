//! Grafts frame by frame: fields, flags, checksums and marks of their packets.
#![allow(missing_docs, non_snake_case)]

use std::ops::Range;

use vtl_proto::{field, intf, ip};
use vtl_sim::{
    host::{FrameBuffer, Host, SessionConfig, graft},
    sim::{HONEST, MS},
};

const NOW: u64 = 5_000 * MS;
/// Offset of the VTL header over IPv4.
const VTL: usize = ip::OFFSET_V4;
const PAYLOAD: usize = VTL + size_of::<intf::vtl_data_hdr>();
/// The field of the VTL header whose meaning depends on the graft.
const AUX: Range<usize> = field!(vtl_hdr, aux);

/// A sender with `count` packets of 200 bytes in its ring, and a receiver.
fn pair(config: &SessionConfig, count: u64) -> [Host; 2] {
    let mut hosts = [Host::new(), Host::new()];
    for (side, host) in hosts.iter_mut().enumerate() {
        host.open(HONEST, side as u8, config);
    }
    for seq in 0..count {
        let slot = hosts[0].tx_slot(HONEST, seq);
        slot.len = 200;
        slot.data[..200].fill(seq as u8 + 1);
    }
    hosts[0].tx_ctl(HONEST).producer = count;
    hosts
}

fn next(host: &mut Host, now: u64) -> Option<Vec<u8>> {
    let mut buffer: FrameBuffer = [0; 2048];
    let length = host.egress(HONEST, now, &mut buffer)?;
    Some(buffer[..length].to_vec())
}

fn arrive(host: &mut Host, frame: &[u8]) -> Option<Vec<u8>> {
    let mut buffer: FrameBuffer = [0; 2048];
    let length = host.ingress(NOW, frame, &mut buffer)?;
    Some(buffer[..length].to_vec())
}

fn flags(frame: &[u8]) -> u32 {
    u32::from(frame[VTL + field!(vtl_hdr, flags).start])
}

fn aux(frame: &[u8]) -> u16 {
    u16::from_be_bytes(frame[VTL..][AUX].try_into().expect("two bytes"))
}

#[test]
fn gids__are_those_of_the_documents() {
    let known = [
        ("canonical", 1),
        ("stream", 2),
        ("stop-and-wait", 3),
        ("go-back-n", 4),
        ("selective-repeat", 5),
        ("partial-reliability", 6),
        ("udp", 7),
        ("udp-lite", 8),
        ("udp-plus", 9),
        ("dccp-ccid2", 10),
        ("dccp-ccid3", 11),
        ("newreno", 12),
        ("cubic", 13),
        ("hybla", 14),
        ("partial-order", 15),
    ];
    for (name, gid) in known {
        assert_eq!(graft(name).gid, gid, "{name}");
    }
    assert_eq!(vtl_sim::host::grafts().count(), known.len());
}

#[test]
fn checksums__every_bit_that_they_cover() {
    for (config, covered) in [
        (SessionConfig::of("canonical"), 200),
        (SessionConfig::of("udp-lite").with("coverage", 0), 0),
        (SessionConfig::of("udp-lite").with("coverage", 13), 13),
        (SessionConfig::of("udp-lite").with("coverage", 1000), 200),
        (SessionConfig::of("dccp-ccid2"), 200),
        (SessionConfig::of("dccp-ccid3"), 200),
    ] {
        let [mut sender, mut receiver] = pair(&config, 1);
        let frame = next(&mut sender, NOW).expect("a packet");
        let mut taken = 0;
        for bit in 0..200 * 8 {
            let mut damaged = frame.clone();
            damaged[PAYLOAD + bit / 8] ^= 1 << (bit % 8);
            arrive(&mut receiver, &damaged);
            taken += u64::from(bit / 8 >= covered);
            let rx = &receiver.session(HONEST).rx;
            let at = config.graft;
            assert_eq!(rx.received, taken.min(1024), "{at}, {covered}: bit {bit}");
        }
        // The header is covered in any case: here, the number.
        let mut damaged = frame.clone();
        damaged[VTL + field!(vtl_data_hdr, seq).end - 1] ^= 4;
        let before = receiver.session(HONEST).rx.received;
        arrive(&mut receiver, &damaged);
        assert_eq!(receiver.session(HONEST).rx.received, before);
    }
    // A packet that claims to cover more than it has.
    let [mut sender, mut receiver] = pair(&SessionConfig::of("udp-lite"), 1);
    let mut frame = next(&mut sender, NOW).expect("a packet");
    frame[VTL..][AUX].copy_from_slice(&2000_u16.to_be_bytes());
    arrive(&mut receiver, &frame);
    assert_eq!(receiver.session(HONEST).rx.received, 0);
}

#[test]
fn marks__of_the_application_go_with_every_transmission() {
    // Bits other than MORE and LAST must be ignored.
    let written = [0, intf::VTL_F_MORE, u32::MAX, !intf::VTL_F_MORE];
    for name in [
        "stream",
        "newreno",
        "go-back-n",
        "selective-repeat",
        "udp-plus",
    ] {
        let [mut sender, mut receiver] = pair(&SessionConfig::of(name), 4);
        for (seq, more) in (0..).zip(written) {
            sender.tx_slot(HONEST, seq).more = more;
            // Of the packet that lay there before.
            receiver.rx_slot(HONEST, seq).more = !more;
        }
        let mut now = NOW;
        let mut frames = Vec::new();
        while frames.len() < 12 {
            frames.extend(next(&mut sender, now));
            now += 100 * MS;
        }
        let seq = |frame: &[u8]| usize::from(frame[VTL + field!(vtl_data_hdr, seq).end - 1]);
        let again = intf::VTL_F_RETRANSMIT;
        assert!(frames.iter().any(|f| flags(f) & again != 0), "{name}");
        for frame in frames
            .iter()
            .filter(|f| u32::from(f[VTL]) == intf::VTL_VERSION << 4)
        {
            let known = intf::VTL_F_MARKS | intf::VTL_F_ACK_NOW | intf::VTL_F_RETRANSMIT;
            let flags = flags(frame);
            let wanted = written[seq(frame)] & intf::VTL_F_MARKS;
            assert_eq!(flags & intf::VTL_F_MARKS, wanted, "{name} {}", seq(frame));
            assert_eq!(
                flags & !known,
                0,
                "{name}: the application sets no other flag"
            );
            arrive(&mut receiver, frame);
        }
        for (seq, more) in (0..receiver.session(HONEST).rx.cum).zip(written) {
            let slot = receiver.rx_slot(HONEST, seq);
            assert_eq!(
                (slot.len, slot.more),
                (200, more & intf::VTL_F_MARKS),
                "{name} {seq}"
            );
        }
        assert_eq!(receiver.session(HONEST).rx.cum, 4, "{name}");
    }
}

#[test]
fn halves__deliver_packets_written_before_the_path_mtu_shrank() {
    const PATH: u16 = 1136;
    const COUNT: u64 = 60;
    for name in [
        "stream",
        "newreno",
        "cubic",
        "hybla",
        "go-back-n",
        "stop-and-wait",
        "selective-repeat",
        "udp-plus",
    ] {
        let config = SessionConfig {
            max_payload: 1920,
            ..SessionConfig::of(name)
        };
        let [mut sender, mut receiver] = pair(&config, COUNT);
        let length = |seq: u64| [1920, 960, 961, 1, 1136, 1137, 1440][seq as usize % 7];
        let byte = |seq: u64, i: usize| (seq as usize * 31 + i * 7 + i / 256) as u8;
        for seq in 0..COUNT {
            let slot = sender.tx_slot(HONEST, seq);
            slot.len = length(seq);
            slot.more = intf::VTL_F_MORE;
            for (i, place) in slot.data[..length(seq) as usize].iter_mut().enumerate() {
                *place = byte(seq, i);
            }
        }
        sender.session_mut(HONEST).path = PATH;
        let (mut now, mut frames, mut halves) = (NOW, 0, 0);
        let mut held: Option<Vec<u8>> = None;
        while sender.session(HONEST).tx.una < COUNT {
            assert!(frames < 4000, "{name}: it never ends");
            let Some(frame) = next(&mut sender, now) else {
                now += 20 * MS;
                continue;
            };
            frames += 1;
            assert!(frame.len() <= PAYLOAD + usize::from(PATH), "{name}");
            halves += u32::from(flags(&frame) & intf::VTL_F_HALF != 0);
            // Every seventh gets lost, every eleventh comes late, every fifth twice.
            if frames % 7 == 3 {
                continue;
            }
            if frames % 11 == 5 {
                held = Some(frame);
                continue;
            }
            let twice = (frames % 5 == 0).then(|| frame.clone());
            let late = held.take_if(|_| frames % 3 == 0);
            for frame in [Some(frame), late, twice].into_iter().flatten() {
                if let Some(ack) = arrive(&mut receiver, &frame) {
                    let mut buffer: FrameBuffer = [0; 2048];
                    sender.ingress(now, &ack, &mut buffer);
                }
            }
            now += MS;
        }
        assert!(halves > 2 * COUNT as u32 / 7, "{name}");
        let rx = &receiver.session(HONEST).rx;
        assert_eq!((rx.cum, rx.received), (COUNT, COUNT), "{name}");
        for seq in 0..COUNT {
            let slot = receiver.rx_slot(HONEST, seq);
            assert_eq!((slot.len, slot.more), (length(seq), intf::VTL_F_MORE));
            let got = &slot.data[..slot.len as usize];
            assert!(
                got.iter().enumerate().all(|(i, b)| *b == byte(seq, i)),
                "{name} {seq}"
            );
        }
    }
}

#[test]
fn halves__that_do_not_match_are_dropped() {
    let config = SessionConfig {
        max_payload: 1920,
        ..SessionConfig::of("stream")
    };
    let [mut sender, mut receiver] = pair(&config, 3);
    sender.tx_slot(HONEST, 0).len = 1500;
    sender.session_mut(HONEST).path = 1136;
    let first = next(&mut sender, NOW).expect("the first half");
    let second = next(&mut sender, NOW + MS).expect("the second");
    assert_eq!((aux(&first), aux(&second)), (0, 960));
    let flag = intf::VTL_F_ACK_NOW;
    assert_ne!(flags(&second) & flag, 0, "it says whether both have come");
    let xid = |frame: &[u8]| frame[VTL..][field!(vtl_data_hdr, xid)].to_vec();
    assert_eq!(xid(&first), xid(&second), "one transmission");
    let next = next(&mut sender, NOW + 2 * MS).expect("the next packet");
    assert_ne!(xid(&next), xid(&first));
    // Neither at another place, nor one as the other.
    for (frame, at) in [
        (&first, 960_u16),
        (&first, 8),
        (&second, 0),
        (&second, 1920),
    ] {
        let mut wrong = frame.clone();
        wrong[VTL..][AUX].copy_from_slice(&at.to_be_bytes());
        seal(&mut wrong);
        arrive(&mut receiver, &wrong);
    }
    assert_eq!(receiver.session(HONEST).rx.received, 0);
    // Of these only the first half at 960 was stored. The true halves overwrite it.
    arrive(&mut receiver, &second);
    arrive(&mut receiver, &first);
    let rx = &receiver.session(HONEST).rx;
    assert_eq!((rx.received, rx.cum), (1, 1));
    assert_eq!(receiver.rx_slot(HONEST, 0).len, 1500);
    // Again: a duplicate, and nothing else.
    arrive(&mut receiver, &first);
    assert_eq!(receiver.session(HONEST).rx.received, 1);
    assert_eq!(receiver.session(HONEST).rx.dups, 1);
}

/// Recomputes a frame's checksum.
fn seal(frame: &mut [u8]) {
    let sum = vtl_proto::wire::checksum(&frame[VTL..]);
    frame[VTL..][field!(vtl_hdr, csum)].copy_from_slice(&sum.to_le_bytes());
}

#[test]
fn ecn__marks_are_counted_and_reported() {
    for (graft, ipv6) in [("cubic", false), ("dccp-ccid3", false), ("newreno", true)] {
        let config = SessionConfig {
            ipv6,
            ..SessionConfig::of(graft)
        };
        let [mut sender, mut receiver] = pair(&config, 1);
        let mut frame = next(&mut sender, NOW).expect("a packet");
        // In IPv6 the traffic class is four bits further on.
        let (shift, vtl) = if ipv6 {
            (4, ip::OFFSET_V6)
        } else {
            (0, ip::OFFSET_V4)
        };
        assert_eq!(frame[ip::field::V4_TOS] >> shift & 3, 2, "{graft}: ECT(0)");
        frame[ip::field::V4_TOS] |= 3 << shift;
        let ack = arrive(&mut receiver, &frame).expect("the last packet asks");
        let told = u16::from_be_bytes(ack[vtl..][AUX].try_into().expect("two bytes"));
        assert_eq!(
            (told, receiver.session(HONEST).rx.marked),
            (1, 1),
            "{graft}"
        );
        sender.session_mut(HONEST).tx.xid += 100;
        sender.session_mut(HONEST).tx.acked_xid += 100;
    }
    // Other grafts do not support ECN, and send no ECT.
    let [mut sender, _] = pair(&SessionConfig::of("udp-plus"), 1);
    assert_eq!(
        next(&mut sender, NOW).expect("a packet")[ip::field::V4_TOS] & 3,
        0
    );
}

#[test]
fn partial_reliability__tells_the_floor_and_skips_exactly() {
    let config = SessionConfig::of("partial-reliability").with("max-loss", 1000);
    let [mut sender, mut receiver] = pair(&config, 10);
    let frames: Vec<_> = std::iter::from_fn(|| next(&mut sender, NOW)).collect();
    assert_eq!(frames.len(), 10);
    // Packets 2 and 3 get lost.
    let acks: Vec<_> = [0, 1, 4, 5, 6, 7, 8, 9]
        .into_iter()
        .filter_map(|i| arrive(&mut receiver, &frames[i]))
        .collect();
    assert_eq!(receiver.session(HONEST).rx.cum, 2);
    arrive(&mut sender, acks.last().expect("the last packet asks"));
    // A PROBE tells that everything is settled, at once.
    let probe = next(&mut sender, NOW).expect("a probe");
    assert_eq!(probe[VTL] & 15, intf::VTL_PROBE as u8);
    assert_eq!(
        aux(&probe),
        0,
        "the next packet is the first that is not settled"
    );
    let ack = arrive(&mut receiver, &probe).expect("a probe asks");
    let rx = &receiver.session(HONEST).rx;
    assert_eq!((rx.cum, rx.received, rx.given_up), (10, 8, 2));
    assert_eq!(receiver.rx_ctl(HONEST).producer, 10);
    for seq in 0..10 {
        let want = if seq == 2 || seq == 3 { 0 } else { 200 };
        assert_eq!(receiver.rx_slot(HONEST, seq).len, want, "{seq}");
    }
    // One that comes after all is a duplicate.
    arrive(&mut receiver, &frames[2]);
    let rx = &receiver.session(HONEST).rx;
    assert_eq!((rx.received, rx.dups, rx.cum), (8, 1, 10));
    arrive(&mut sender, &ack);
    assert_eq!(sender.session(HONEST).tx.una, 10);
    assert_eq!(vtl_sim::host::in_flight(sender.session(HONEST)), 0);
}

#[test]
fn partial_reliability__a_floor_beyond_the_limit_is_cut() {
    let config = SessionConfig {
        slots: 16,
        ..SessionConfig::of("partial-reliability")
    };
    let [mut sender, mut receiver] = pair(&config, 1);
    // A peer that lies: it is at packet 2^40, and has settled everything.
    sender.session_mut(HONEST).tx.next = 1 << 40;
    sender.session_mut(HONEST).tx.una = 1 << 40;
    sender.session_mut(HONEST).tx.probe = 1;
    sender.tx_ctl(HONEST).producer = 1 << 40;
    sender.session_mut(HONEST).tx.own[0] = 1 << 40;
    let probe = next(&mut sender, NOW).expect("a probe");
    arrive(&mut receiver, &probe);
    let rx = &receiver.session(HONEST).rx;
    assert_eq!(
        (rx.cum, rx.given_up),
        (16, 16),
        "no slot that the app has not read"
    );
    arrive(&mut receiver, &probe);
    assert_eq!(receiver.session(HONEST).rx.cum, 16);
}

#[test]
fn fec__recovers_the_missing_packet() {
    for lost in 0..4 {
        let config = SessionConfig::of("partial-reliability").with("fec", 4);
        let [mut sender, mut receiver] = pair(&config, 4);
        sender.tx_slot(HONEST, 2).len = 77;
        let frames: Vec<_> = std::iter::from_fn(|| next(&mut sender, NOW)).collect();
        assert_eq!(frames.len(), 5, "four and their parity");
        assert_eq!(flags(&frames[4]), intf::VTL_F_PARITY);
        assert_eq!(aux(&frames[4]), 4);
        for (i, frame) in frames.iter().enumerate() {
            if i != lost {
                arrive(&mut receiver, frame);
            }
        }
        let rx = &receiver.session(HONEST).rx;
        assert_eq!((rx.cum, rx.received, rx.recovered), (4, 4, 1), "{lost}");
        for seq in 0..4 {
            let slot = receiver.rx_slot(HONEST, seq);
            let len = if seq == 2 { 77 } else { 200 };
            assert_eq!(slot.len, len);
            assert!(
                slot.data[..len as usize]
                    .iter()
                    .all(|b| *b == seq as u8 + 1)
            );
        }
    }
    // Two missing packets cannot be recovered; with none missing there is nothing to recover.
    for lost in [&[0, 1][..], &[]] {
        let config = SessionConfig::of("partial-reliability").with("fec", 4);
        let [mut sender, mut receiver] = pair(&config, 4);
        let frames: Vec<_> = std::iter::from_fn(|| next(&mut sender, NOW)).collect();
        for (i, frame) in frames.iter().enumerate() {
            if !lost.contains(&i) {
                arrive(&mut receiver, frame);
            }
        }
        let rx = &receiver.session(HONEST).rx;
        assert_eq!((rx.received, rx.recovered), (4 - lost.len() as u64, 0));
    }
}

#[test]
fn go_back_n__acknowledges_and_drops_out_of_order_packets() {
    let [mut sender, mut receiver] = pair(&SessionConfig::of("go-back-n"), 10);
    let frames: Vec<_> = std::iter::from_fn(|| next(&mut sender, NOW)).collect();
    arrive(&mut receiver, &frames[0]);
    let mut last = None;
    for frame in &frames[2..] {
        last = arrive(&mut receiver, frame);
        assert!(last.is_some(), "every one is answered");
    }
    let rx = &receiver.session(HONEST).rx;
    assert_eq!((rx.cum, rx.max, rx.received, rx.beyond), (1, 1, 1, 8));
    // One of those answers sends everything again, in order.
    arrive(&mut sender, &last.expect("an answer"));
    let again: Vec<_> = std::iter::from_fn(|| next(&mut sender, NOW)).collect();
    let seqs: Vec<u64> = again
        .iter()
        .map(|f| {
            u64::from_be_bytes(
                f[VTL..][field!(vtl_data_hdr, seq)]
                    .try_into()
                    .expect("eight"),
            )
        })
        .collect();
    assert_eq!(seqs, (1..10).collect::<Vec<_>>());
}

/// vtld receives a CLOSE itself, so no event may tell it that the peer goes on with the session.
#[test]
fn close__as_first_packet_sets_the_return_path_without_an_event() {
    for (close, reported) in [(true, 0), (false, intf::VTL_EV_SEND)] {
        let [mut sender, mut receiver] = pair(&SessionConfig::of("stream"), 1);
        let mut frame = next(&mut sender, NOW).expect("a packet");
        if close {
            frame[VTL] = frame[VTL] & 0xf0 | intf::VTL_CLOSE as u8;
        }
        receiver.session_mut(HONEST).ifindex = 0;
        receiver.events(HONEST);
        arrive(&mut receiver, &frame);
        assert_ne!(receiver.session(HONEST).ifindex, 0);
        assert_eq!(receiver.events(HONEST) & intf::VTL_EV_SEND, reported);
    }
}
