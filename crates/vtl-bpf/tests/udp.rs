//! Encapsulation in UDP and over TCP, in the kernel: what the programs recognise, learn, answer and
//! send.
#![allow(missing_docs, non_snake_case)]

use std::{net::IpAddr, ops::Range};

use vtl_bpf::trial::{self as kernel, Kernel, SID, TC, VTL, XDP, data, frame};
use vtl_proto::{
    field, intf, ip,
    ip::field as at,
    wire::{Header, Packet, Size},
};

/// Ingress, egress, and their return values.
const DRIVERS: [(&str, &str, kernel::Verdicts); 2] = [
    ("vtl_root_in_tc", "vtl_root_out_tc", TC),
    ("vtl_root_in_xdp", "vtl_root_out_xdp", XDP),
];
const UDP: usize = intf::VTL_UDP_HEADER as usize;
const PORT: u16 = intf::VTL_UDP_PORT as u16;
/// UDP port of a peer behind a NAT.
const THEIRS: u16 = 40_001;
const V6: usize = ip::OFFSET_V6;
const UDP_PROTOCOL: u8 = 17;
/// Fields of the UDP header in a frame over IPv4 (RFC 768).
const UDP_DESTINATION: Range<usize> = VTL + 2..VTL + 4;
const UDP_LENGTH: Range<usize> = VTL + 4..VTL + 6;

/// A UDP header.
fn header(from: u16, to: u16, length: usize) -> [u8; UDP] {
    let mut header = [0; UDP];
    for (i, field) in [from, to, (UDP + length) as u16].into_iter().enumerate() {
        header[2 * i..2 * i + 2].copy_from_slice(&field.to_be_bytes());
    }
    header
}

/// The same packet with UDP encapsulation.
fn behind(frame: &[u8], from: u16) -> Vec<u8> {
    let mut udp = frame.to_vec();
    udp.splice(VTL..VTL, header(from, PORT, frame.len() - VTL));
    let length = (frame.len() - at::IP + UDP) as u16;
    udp[at::V4_TOTAL_LENGTH].copy_from_slice(&length.to_be_bytes());
    udp[at::V4_PROTOCOL] = UDP_PROTOCOL;
    udp
}

fn v6_address(host: u16) -> IpAddr {
    IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, host])
}

/// The same over IPv6.
fn v6(frame: &[u8], from: Option<u16>) -> Vec<u8> {
    let body = match from {
        Some(from) => [&header(from, PORT, frame.len() - VTL), &frame[VTL..]].concat(),
        None => frame[VTL..].to_vec(),
    };
    let mut f = Vec::new();
    ip::enclose(&body, v6_address(2), v6_address(1), &mut f);
    f[..12].copy_from_slice(&frame[..12]);
    if from.is_some() {
        f[at::V6_NEXT_HEADER] = UDP_PROTOCOL;
    }
    f
}

fn over_v6(k: &Kernel) {
    k.alter(|s| {
        s.ip_version = 6;
        s.headers = ip::template(v6_address(1), v6_address(2));
    });
}

fn port(k: &Kernel) -> u16 {
    u16::from_be(k.session().port)
}

/// Parses the packet behind the UDP header, at `offset`, of a frame from us to the peer.
#[track_caller]
fn inside(frame: &[u8], offset: usize, to: u16) -> Packet<'_> {
    let body = &frame[offset + UDP..];
    assert_eq!(frame[offset..offset + UDP], header(PORT, to, body.len()));
    let (protocol, length, before) = if offset == V6 {
        (frame[at::V6_NEXT_HEADER], &frame[at::V6_PAYLOAD_LENGTH], V6)
    } else {
        let words = frame[at::IP..VTL].chunks(2);
        let sum: u32 = words
            .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "IP checksum");
        (frame[at::V4_PROTOCOL], &frame[at::V4_TOTAL_LENGTH], at::IP)
    };
    assert_eq!(protocol, UDP_PROTOCOL);
    assert_eq!(length, ((frame.len() - before) as u16).to_be_bytes());
    Packet::parse(body).expect("a packet of ours")
}

#[test]
fn udp__answers_and_sends_in_the_encapsulation_received() {
    if !vtl_testing::is_root() {
        return;
    }
    let now = intf::VTL_F_ACK_NOW;
    for (input, output, verdicts) in DRIVERS {
        for at in [VTL, V6] {
            let k = Kernel::new();
            let max = if at == V6 { 1408 } else { 1432 };
            let wrap = |frame: Vec<u8>, from: u16| {
                if at == V6 {
                    v6(&frame, Some(from))
                } else {
                    behind(&frame, from)
                }
            };
            if at == V6 {
                over_v6(&k);
            }
            // The smallest, and one that fills the path.
            for (seq, payload) in [(0, vec![7; 1]), (1, vec![9; max])] {
                let ran = k.run(input, &wrap(data(seq, now, &payload), THEIRS), 1);
                assert_eq!(ran.verdict, verdicts.answer, "{input} {seq}");
                let Packet::Ack(ack) = inside(&ran.frame, at, THEIRS) else {
                    panic!("no acknowledgement")
                };
                assert_eq!(ack.cum, seq + 1);
                assert_eq!(k.read(seq), (payload, seq + 1));
            }
            assert_eq!(port(&k), THEIRS);
            for payload in [vec![1; 1], vec![2; max]] {
                let seq = k.session().tx.next;
                k.write(seq, &payload);
                let ran = k.run(output, &k.pump(SID), 1);
                assert_eq!(ran.verdict, verdicts.send, "{output}");
                let Packet::Data(d) = inside(&ran.frame, at, THEIRS) else {
                    panic!("no DATA")
                };
                assert_eq!((d.seq, d.payload), (seq, &payload[..]));
                let ack = kernel::ack(seq + 1, seq + 1, seq as u32 + 1, &[0; 8]);
                k.run(input, &wrap(ack, THEIRS), 1);
                assert_eq!(k.session().tx.una, seq + 1);
            }
            // A NAT changes the port.
            k.run(input, &wrap(data(2, 0, &[1]), 40_002), 1);
            assert_eq!(port(&k), 40_002);
            // Without UDP: so is the answer.
            let plain = data(3, now, &[3; 32]);
            let plain = if at == V6 { v6(&plain, None) } else { plain };
            let ran = k.run(input, &plain, 1);
            assert_eq!(ran.verdict, verdicts.answer);
            assert!(matches!(
                Packet::parse(&ran.frame[at..]),
                Ok(Packet::Ack(_))
            ));
            assert_eq!(port(&k), 0);
        }
    }
}

/// An interface, in a network namespace of this thread's own.
fn interface() -> u32 {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("root may");
    for line in ["link add eth0 type veth peer eth1", "link set eth0 up"] {
        let status = std::process::Command::new("ip")
            .args(line.split(' '))
            .status();
        assert!(status.expect("ip runs").success());
    }
    nix::net::if_::if_nametoindex("eth0").expect("it was made")
}

/// A router's interface, with the addresses that sessions of these tests have, in a namespace of this
/// thread's own; packets of both drivers may come in by it.
fn router() -> u32 {
    let interface = interface();
    for line in [
        "link set eth0 address 02:00:00:00:00:01",
        "link set eth1 up",
        "addr add 10.0.0.1/24 dev eth0",
        "addr add fd00::1/64 dev eth0 nodad",
    ] {
        let status = std::process::Command::new("ip")
            .args(line.split(' '))
            .status();
        assert!(status.expect("ip runs").success());
    }
    let status = std::process::Command::new("ethtool")
        .args(["-K", "eth0", "gro", "on"])
        .status();
    assert!(status.expect("ethtool runs").success());
    interface
}

fn forward(on: bool) {
    for key in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        let value = u8::from(on).to_string();
        std::fs::write(format!("/proc/sys/net/{key}"), value).expect("a sysctl");
    }
}

/// Where the kernel forwards, packets for other hosts pass untouched, whatever they look like.
#[test]
fn root_ingress__passes_packets_for_other_hosts() {
    if !vtl_testing::is_root() {
        return;
    }
    const OTHERS: u32 = intf::VTL_ST_RX_OTHERS;
    let interface = router();
    for (input, _, verdicts) in DRIVERS {
        for (at, by_udp) in [(VTL, false), (VTL, true), (V6, false), (V6, true)] {
            let k = Kernel::new();
            if at == V6 {
                over_v6(&k);
            }
            let from = by_udp.then_some(THEIRS);
            let make = |body: &[u8], last: u8| {
                let mut f = match from {
                    _ if at == V6 => v6(body, from),
                    Some(from) => behind(body, from),
                    None => body.to_vec(),
                };
                f[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
                f[at - 1] = last;
                f
            };
            let whole = data(0, 0, &[1; 32]);
            let with = |at: usize, value: u8| {
                let mut f = whole.clone();
                f[at] = value;
                f
            };
            let cases = [
                ("of a session", whole.clone()),
                ("of none", with(VTL + field!(vtl_hdr, sid).end - 1, 9)),
                ("malformed", with(VTL, 0x10)),
            ];
            let run = |frame: &[u8]| {
                let (ran, moved) = k.counting(|| k.run_from(interface, input, frame));
                assert!(ran.verdict != verdicts.pass || ran.frame == frame);
                let is_others = moved.iter().any(|(counter, _)| *counter == OTHERS);
                (ran.verdict == verdicts.pass, is_others)
            };
            for (what, body) in cases {
                let what = format!("{input}, {at}, {from:?}, {what}");
                forward(true);
                assert_eq!(run(&make(&body, 9)), (true, true), "{what}");
                assert_eq!(run(&make(&body, 1)), (false, false), "{what}, ours");
                forward(false);
                assert_eq!(run(&make(&body, 9)), (false, false), "{what}, no router");
                // One that is bridged.
                let mut bridged = make(&body, 9);
                bridged[at::LINK_DESTINATION.end - 1] = 7;
                let is_seen = input == "vtl_root_in_tc";
                assert_eq!(run(&bridged), (is_seen, is_seen), "{what}, bridged");
            }
            // Only the packet of the session for this host was accepted.
            assert_eq!(k.session().rx.received, 1);
        }
    }
}

#[test]
fn tunnel__the_initiator_decides_and_the_responder_follows() {
    if !vtl_testing::is_root() {
        return;
    }
    const TUNNEL: u32 = intf::VTL_TUNNEL;
    let interface = interface();
    let input = "vtl_root_in_tc";
    let by_tcp = |k: &Kernel, frame: &[u8]| k.run(input, frame, 1);
    let plain = |k: &Kernel, frame: &[u8]| k.run_from(interface, input, frame);
    let size = frame(&Packet::Size(Size {
        header: Header {
            gid: 0,
            ..kernel::header()
        },
        zeros: 100,
        answers: 0,
    }));
    for is_initiator in [0, 1] {
        let k = Kernel::new();
        k.alter(|s| s.is_initiator = is_initiator);
        let goes = |by: u32| assert_eq!(k.session().ifindex, by, "initiator {is_initiator}");
        let follows = |by: u32, or: u32| goes(if is_initiator == 0 { by } else { or });
        plain(&k, &data(0, 0, &[1]));
        goes(interface);
        by_tcp(&k, &size);
        goes(interface);
        by_tcp(&k, &data(1, 0, &[1]));
        follows(TUNNEL, interface);
        k.alter(|s| s.ifindex = TUNNEL);
        plain(&k, &size);
        goes(TUNNEL);
        plain(&k, &data(2, 0, &[1]));
        follows(interface, TUNNEL);
        // DATA is accepted and answered by either way.
        let before = k.session().rx.received;
        let now = intf::VTL_F_ACK_NOW;
        assert_eq!(by_tcp(&k, &data(3, now, &[1])).verdict, kernel::TC.answer);
        assert_eq!(plain(&k, &data(4, now, &[1])).verdict, kernel::TC.answer);
        assert_eq!(k.session().rx.received, before + 2);
        // Nothing known yet.
        k.alter(|s| s.ifindex = 0);
        by_tcp(&k, &data(5, 0, &[1]));
        follows(TUNNEL, 0);
    }
}

#[test]
fn udp__the_initiator_keeps_its_encapsulation() {
    if !vtl_testing::is_root() {
        return;
    }
    let ask = |seq| data(seq, intf::VTL_F_ACK_NOW, &[5; 100]);
    let interface = interface();
    for (input, _, verdicts) in DRIVERS {
        for ours in [0, PORT] {
            let k = Kernel::new();
            k.alter(|s| (s.is_initiator, s.port) = (1, ours.to_be()));
            for (seq, frame) in [(0, ask(0)), (1, behind(&ask(1), THEIRS)), (2, ask(2))] {
                let ran = k.run_from(interface, input, &frame);
                assert_eq!(ran.verdict, verdicts.answer, "{input} {seq}");
                let to = match (ours, seq) {
                    (0, _) => 0,
                    (_, 0) => PORT,
                    _ => THEIRS,
                };
                assert_eq!(port(&k), to);
                let answer = match to {
                    0 => Packet::parse(&ran.frame[VTL..]).expect("a packet of ours"),
                    to => inside(&ran.frame, VTL, to),
                };
                assert!(matches!(answer, Packet::Ack(_)), "{answer:?}");
            }
        }
    }
}

#[test]
fn udp__foreign_malformed_and_unauthentic_packets() {
    if !vtl_testing::is_root() {
        return;
    }
    const BAD: u32 = intf::VTL_ST_RX_MALFORMED;
    const RX: u32 = intf::VTL_ST_RX_PACKETS;
    let good = behind(&data(0, 0, &[9; 100]), THEIRS);
    let with = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        frame
    };
    let stranger = |sid, token| {
        let header = Header {
            sid,
            token,
            ..kernel::header()
        };
        behind(&kernel::frame(&Packet::Close(header)), THEIRS)
    };
    for (input, _, verdicts) in DRIVERS {
        let k = Kernel::new();
        let short = behind(&kernel::around(&[0x20; 23]), THEIRS);
        let cases = [
            (
                "another port",
                with(UDP_DESTINATION.end - 1, 1),
                verdicts.pass,
                &[][..],
            ),
            ("not UDP", with(at::V4_PROTOCOL, 6), verdicts.pass, &[]),
            (
                "a fragment",
                with(at::V4_FRAGMENT.start, 0x20),
                verdicts.pass,
                &[],
            ),
            ("options", with(at::V4_VERSION, 0x46), verdicts.pass, &[]),
            (
                "UDP's length",
                with(UDP_LENGTH.end - 1, 1),
                verdicts.stop,
                &[BAD],
            ),
            (
                "IP's length",
                with(at::V4_TOTAL_LENGTH.start + 1, 1),
                verdicts.stop,
                &[BAD],
            ),
            (
                "no source port",
                behind(&data(0, 0, &[9; 100]), 0),
                verdicts.stop,
                &[BAD],
            ),
            ("too short for a header", short, verdicts.stop, &[BAD]),
            (
                "its own length",
                with(VTL + UDP + field!(vtl_hdr, len).start + 1, 99),
                verdicts.stop,
                &[RX, BAD],
            ),
            (
                "an unknown session",
                stranger(9, kernel::TOKEN),
                verdicts.stop,
                &[RX, intf::VTL_ST_RX_NO_SESSION],
            ),
            (
                "a wrong token",
                stranger(SID, 1),
                verdicts.stop,
                &[RX, intf::VTL_ST_RX_NO_SESSION],
            ),
            (
                "for vtld, whole",
                stranger(SID, kernel::TOKEN),
                verdicts.pass,
                &[RX, intf::VTL_ST_RX_CONTROL],
            ),
        ];
        for (what, frame, verdict, counts) in cases {
            let known = what == "for vtld, whole" || what == "its own length";
            let before = port(&k);
            let (ran, moved) = k.counted(input, &frame);
            let moved: Vec<u32> = moved.into_iter().map(|(counter, _)| counter).collect();
            assert_eq!(
                (ran.verdict, &moved[..]),
                (verdict, counts),
                "{input}: {what}"
            );
            assert_eq!(ran.frame, frame, "{input}: {what}");
            assert!(known || port(&k) == before, "{input}: {what}");
        }
        assert_eq!(k.session().rx.received, 0);
    }
}
