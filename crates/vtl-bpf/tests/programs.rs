//! Root programs and graft as tables, in the kernel: packet in; verdict, counters, packet out.
#![allow(missing_docs, non_snake_case)]
#![allow(clippy::too_many_lines, reason = "tables of cases")]

use std::ops::Range;

use kernel::{
    GID, Kernel, SID, SLOTS, TC, TOKEN, VTL, XDP, ack, around, data, frame, header, seal,
};
use vtl_bpf::trial as kernel;
use vtl_proto::{
    field, intf,
    ip::field as at,
    wire::{Data, Extensions, Header, MAX_EXTENSIONS, Nego, Packet, Size, TAG_KEY, TagKey},
};

const INGRESS: [(&str, kernel::Verdicts); 2] = [("vtl_root_in_tc", TC), ("vtl_root_in_xdp", XDP)];
const EGRESS: [(&str, kernel::Verdicts); 2] = [("vtl_root_out_tc", TC), ("vtl_root_out_xdp", XDP)];

/// Header of a DATA packet, bytes.
const DATA: usize = size_of::<intf::vtl_data_hdr>();
/// Fields of VTL's header.
const GRAFTS: Range<usize> = field!(vtl_hdr, gid);
const SIDS: Range<usize> = field!(vtl_hdr, sid);
const TOKENS: Range<usize> = field!(vtl_hdr, token);

/// Verdict on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Pass,
    Stop,
    Answer,
}
use Then::{Answer, Pass, Stop};

struct Case {
    name: &'static str,
    frame: Vec<u8>,
    then: Then,
    counts: &'static [u32],
}

fn case(name: &'static str, frame: Vec<u8>, then: Then, counts: &'static [u32]) -> Case {
    Case {
        name,
        frame,
        then,
        counts,
    }
}

/// A valid packet after a change, with its checksum recomputed.
fn changed(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = data(0, intf::VTL_F_ACK_NOW, &[9; 100]);
    change(&mut frame);
    seal(&mut frame);
    frame
}

fn nego(header: Header) -> Nego<'static> {
    Nego {
        header,
        token: 5,
        peer_token: 6,
        sid: 3,
        ring_slots: 64,
        max_payload: 1440,
        gids: vtl_proto::wire::Gids::new(&[GID]).expect("one fits"),
        ..Default::default()
    }
}

/// As many extensions as one packet may have.
fn extensions() -> Extensions<'static> {
    Extensions::parse(&[0; MAX_EXTENSIONS]).expect("empty ones")
}

const RX: u32 = intf::VTL_ST_RX_PACKETS;
const BAD: u32 = intf::VTL_ST_RX_MALFORMED;
const NONE: u32 = intf::VTL_ST_RX_NO_SESSION;
const GRAFT: u32 = intf::VTL_ST_RX_NO_GRAFT;
const CONTROL: u32 = intf::VTL_ST_RX_CONTROL;
const ACKS: u32 = intf::VTL_ST_TX_ACKS;
const SUM: u32 = intf::VTL_ST_RX_BAD_CSUM;

/// Frames of PROTOCOL.md, section 2, none of which a graft accepts, so the order of cases does not matter.
fn malformed() -> Vec<Case> {
    let with = |at: usize, value: u8| {
        let mut f = data(0, 0, &[9; 100]);
        f[at] = value;
        f
    };
    const ACK: usize = size_of::<intf::vtl_ack_hdr>();
    const LEN: std::ops::Range<usize> = field!(vtl_hdr, len);
    let big = |length: usize| {
        let mut body = data(0, 0, &[9; 100])[VTL..VTL + DATA].to_vec();
        body.resize(DATA + length, 1);
        body[LEN].copy_from_slice(&(length as u16).to_be_bytes());
        let mut f = around(&body);
        seal(&mut f);
        f
    };
    let bitmap = |field: u16, bytes: usize| {
        let mut body = ack(0, 0, 0, &[])[VTL..].to_vec();
        body.resize(ACK + bytes, 0);
        body[LEN].copy_from_slice(&field.to_be_bytes());
        let mut f = around(&body);
        seal(&mut f);
        f
    };
    vec![
        case(
            "IP header with options",
            with(at::V4_VERSION, 0x46),
            Stop,
            &[BAD],
        ),
        case(
            "a fragment",
            with(at::V4_FRAGMENT.start, 0x20),
            Stop,
            &[BAD],
        ),
        case(
            "a later fragment",
            with(at::V4_FRAGMENT.start + 1, 0x10),
            Stop,
            &[BAD],
        ),
        case(
            "IP length beyond the frame",
            with(at::V4_TOTAL_LENGTH.start, 0x40),
            Stop,
            &[BAD],
        ),
        case(
            "IP length without a header of ours",
            with(at::V4_TOTAL_LENGTH.start + 1, 43),
            Stop,
            &[BAD],
        ),
        case("shorter than any header", around(&[0x20; 23]), Stop, &[BAD]),
        case("version 0", changed(|f| f[VTL] = 0), Stop, &[BAD]),
        case("version 1", changed(|f| f[VTL] = 0x10), Stop, &[BAD]),
        case("type 8", changed(|f| f[VTL] = 0x28), Stop, &[BAD]),
        case("type 15", changed(|f| f[VTL] = 0x2f), Stop, &[BAD]),
        case(
            "length field beyond the packet",
            changed(|f| f[VTL + LEN.start + 1] = 101),
            Stop,
            &[RX, BAD],
        ),
        case(
            "length field short of the packet",
            changed(|f| f[VTL + LEN.start + 1] = 99),
            Stop,
            &[RX, BAD],
        ),
        case(
            "DATA without payload",
            changed(|f| f[VTL..][LEN].fill(0)),
            Stop,
            &[RX, BAD],
        ),
        case(
            "PROBE with payload",
            changed(|f| f[VTL] = 0x22),
            Stop,
            &[RX, BAD],
        ),
        case(
            "more payload than a slot holds",
            big(1921),
            Stop,
            &[RX, BAD],
        ),
        case(
            "DATA cut in its header",
            around(&data(0, 0, &[1])[VTL..VTL + DATA - 10]),
            Stop,
            &[RX, BAD],
        ),
        case(
            "ACK cut in its header",
            around(&ack(0, 0, 0, &[])[VTL..VTL + ACK - 1]),
            Stop,
            &[RX, BAD],
        ),
        case("bitmap of 7 bytes", bitmap(7, 7), Stop, &[RX, BAD]),
        case(
            "bitmap beyond every window",
            {
                let mut body = ack(0, 0, 0, &[0; 16])[VTL..].to_vec();
                body[field!(vtl_ack_hdr, skip)].copy_from_slice(&511u32.to_be_bytes());
                let mut f = around(&body);
                seal(&mut f);
                f
            },
            Stop,
            &[RX, BAD],
        ),
        case("bitmap beyond the packet", bitmap(16, 8), Stop, &[RX, BAD]),
        case(
            "bitmap of 1,032 bytes",
            bitmap(1032, 1032),
            Stop,
            &[RX, BAD],
        ),
        case(
            "not IP",
            changed(|f| f[at::ETHERTYPE].copy_from_slice(&[0x08, 0x06])),
            Pass,
            &[],
        ),
        case("TCP", with(at::V4_PROTOCOL, 6), Pass, &[]),
        case("UDP", with(at::V4_PROTOCOL, 17), Pass, &[]),
        case(
            "NEGO",
            frame(&Packet::Nego(Nego {
                peer_token: 0,
                ..nego(Header::default())
            })),
            Pass,
            &[RX, CONTROL],
        ),
        case(
            "NEGO with extensions",
            frame(&Packet::Nego(Nego {
                peer_token: 0,
                extensions: extensions(),
                ..nego(Header::default())
            })),
            Pass,
            &[RX, CONTROL],
        ),
        case(
            "NEGO of another version",
            changed(|f| f[VTL] = 0x13),
            Pass,
            &[],
        ),
        case(
            "NEGO_ACK",
            frame(&Packet::NegoAck(nego(Header { gid: 0, ..header() }))),
            Pass,
            &[RX, CONTROL],
        ),
        case(
            "NEGO_ACK with extensions",
            frame(&Packet::NegoAck(Nego {
                extensions: extensions(),
                ..nego(Header { gid: 0, ..header() })
            })),
            Pass,
            &[RX, CONTROL],
        ),
        case(
            "NEGO_ACK with a wrong token",
            frame(&Packet::NegoAck(nego(Header {
                gid: 0,
                token: TOKEN ^ 1,
                ..header()
            }))),
            Stop,
            &[RX, NONE],
        ),
        case(
            "CLOSE",
            frame(&Packet::Close(Header { gid: 0, ..header() })),
            Pass,
            &[RX, CONTROL],
        ),
        case(
            "SIZE",
            frame(&Packet::Size(size(header()))),
            Pass,
            &[RX, CONTROL],
        ),
        case(
            "SIZE with a wrong token",
            frame(&Packet::Size(size(Header {
                token: !TOKEN,
                ..header()
            }))),
            Stop,
            &[RX, NONE],
        ),
        case(
            "CLOSE with a wrong token",
            frame(&Packet::Close(Header {
                gid: 0,
                token: !TOKEN,
                ..header()
            })),
            Stop,
            &[RX, NONE],
        ),
        case(
            "wrong token",
            changed(|f| f[VTL..][TOKENS.end - 1] ^= 1),
            Stop,
            &[RX, NONE],
        ),
        case(
            "wrong token, first byte",
            changed(|f| f[VTL..][TOKENS.start] ^= 0x80),
            Stop,
            &[RX, NONE],
        ),
        case(
            "session 0",
            changed(|f| f[VTL..][SIDS.end - 1] = 0),
            Stop,
            &[RX, NONE],
        ),
        case(
            "a free session",
            changed(|f| f[VTL..][SIDS.end - 1] = 9),
            Stop,
            &[RX, NONE],
        ),
        case(
            "a session beyond the table",
            changed(|f| f[VTL..][SIDS.start] = 0xff),
            Stop,
            &[RX, NONE],
        ),
        case(
            "wrong source address",
            with(at::V4_SOURCE.end - 1, 99),
            Stop,
            &[RX, NONE],
        ),
        case(
            "another graft's packet",
            changed(|f| f[VTL..][GRAFTS.end - 1] = 3),
            Stop,
            &[RX, GRAFT],
        ),
        case(
            "gid beyond the table",
            changed(|f| f[VTL..][GRAFTS.start] = 1),
            Stop,
            &[RX, GRAFT],
        ),
        case(
            "session still opening",
            changed(|f| f[VTL..][SIDS.end - 1] = 2),
            Stop,
            &[RX, GRAFT],
        ),
        case(
            "graft that is not deployed",
            changed(|f| (f[VTL..][GRAFTS.end - 1], f[VTL..][SIDS.end - 1]) = (5, 3)),
            Stop,
            &[RX, GRAFT],
        ),
    ]
}

fn size(header: Header) -> Size {
    Size {
        header: Header { gid: 0, ..header },
        zeros: 1456,
        answers: 0,
    }
}

fn check(k: &Kernel, program: &str, verdicts: kernel::Verdicts, cases: &[Case]) {
    let mut wrong = 0;
    for c in cases {
        let (ran, counts) = k.counted(program, &c.frame);
        let then = match ran.verdict {
            v if v == verdicts.pass => Pass,
            v if v == verdicts.stop => Stop,
            v if v == verdicts.answer => Answer,
            v => panic!("{}: verdict {v}", c.name),
        };
        let want: Vec<_> = c.counts.iter().map(|n| (*n, 1)).collect();
        if (then, &counts) != (c.then, &want) {
            wrong += 1;
            println!(
                "{program}: {}: {then:?} {counts:?}, not {:?} {want:?}",
                c.name, c.then
            );
        }
    }
    assert_eq!(wrong, 0);
}

#[test]
fn root_ingress__malformed_and_unauthentic_packets() {
    if !vtl_testing::is_root() {
        return;
    }
    for (program, verdicts) in INGRESS {
        let k = Kernel::new();
        k.open(2, GID, intf::VTL_OPENING);
        k.open(3, 5, intf::VTL_OPEN);
        check(&k, program, verdicts, &malformed());
        let s = k.session();
        assert_eq!(
            (s.rx.cum, s.rx.received, s.tx.una),
            (0, 0, 0),
            "nothing was accepted"
        );
    }
}

#[test]
fn root_ingress__learns_the_return_path_from_authentic_packets_only() {
    if !vtl_testing::is_root() {
        return;
    }
    for (program, _) in INGRESS {
        let k = Kernel::new();
        k.run(program, &changed(|f| f[VTL..][TOKENS.end - 1] ^= 1), 1);
        assert_eq!(k.session().ifindex, 0);
        k.run(program, &data(0, 0, &[1]), 1);
        let s = k.session();
        assert_ne!(s.ifindex, 0);
        assert_eq!(s.headers[..14], [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    }
}

#[test]
fn graft_ingress__new_duplicate_beyond_and_damaged() {
    if !vtl_testing::is_root() {
        return;
    }
    const DUPLICATE: u32 = intf::VTL_ST_RX_DUPLICATE;
    const BEYOND: u32 = intf::VTL_ST_RX_BEYOND;
    let now = intf::VTL_F_ACK_NOW;
    let damaged = |at: usize| {
        let mut f = data(1, now, &[3; 200]);
        f[at] ^= 4;
        f
    };
    let probe = frame(&Packet::Probe(Data {
        header: Header {
            flags: now as u8,
            ..header()
        },
        seq: 0,
        xid: 9,
        ts: 5,
        payload: &[],
    }));
    for (program, verdicts) in INGRESS {
        let k = Kernel::new();
        let cases = [
            case("probe", probe.clone(), Answer, &[RX, ACKS]),
            case("new, quiet", data(0, 0, &[1; 300]), Stop, &[RX]),
            case(
                "damaged payload",
                damaged(VTL + DATA + 10),
                Stop,
                &[RX, SUM],
            ),
            case(
                "damaged last byte",
                damaged(VTL + DATA + 199),
                Stop,
                &[RX, SUM],
            ),
            case(
                "damaged header",
                damaged(VTL + field!(vtl_data_hdr, xid).start + 1),
                Stop,
                &[RX, SUM],
            ),
            case(
                "new, to be acknowledged",
                data(1, now, &[2; 1440]),
                Answer,
                &[RX, ACKS],
            ),
            case(
                "duplicate",
                data(1, now, &[7; 1440]),
                Answer,
                &[RX, DUPLICATE, ACKS],
            ),
            case(
                "duplicate, quiet",
                data(0, 0, &[1; 300]),
                Answer,
                &[RX, DUPLICATE, ACKS],
            ),
            case("ahead", data(70, now, &[4; 1440]), Answer, &[RX, ACKS]),
            case(
                "duplicate ahead",
                data(70, now, &[8; 1440]),
                Answer,
                &[RX, DUPLICATE, ACKS],
            ),
            case(
                "the last that fits",
                data(u64::from(SLOTS) - 1, now, &[5; 1440]),
                Answer,
                &[RX, ACKS],
            ),
            case(
                "the first that does not",
                data(SLOTS.into(), now, &[5; 99]),
                Stop,
                &[RX, BEYOND],
            ),
            case(
                "far beyond",
                data(1 << 63, now, &[5; 99]),
                Stop,
                &[RX, BEYOND],
            ),
            case(
                "the largest",
                data(u64::MAX, now, &[5; 99]),
                Stop,
                &[RX, BEYOND],
            ),
        ];
        check(&k, program, verdicts, &cases);
        let s = k.session();
        assert_eq!((s.rx.cum, s.rx.max, s.rx.received), (2, SLOTS.into(), 4));
        assert_eq!((s.rx.dups, s.rx.bad_csum, s.rx.beyond), (3, 3, 3));
        // Duplicates did not overwrite what the application may be reading.
        assert_eq!(k.read(0), (vec![1; 300], 2));
        assert_eq!(k.read(1), (vec![2; 1440], 2));
        assert_eq!(k.read(70), (vec![4; 1440], 2));
    }
}

#[test]
fn graft_ingress__acknowledgement_describes_the_whole_state() {
    if !vtl_testing::is_root() {
        return;
    }
    for (program, verdicts) in INGRESS {
        let k = Kernel::new();
        for seq in [0, 1, 2, 5, 64, 200] {
            k.run(program, &data(seq, 0, &[seq as u8 + 1; 1000]), 1);
        }
        let ran = k.run(program, &data(130, intf::VTL_F_ACK_NOW, &[1; 1000]), 1);
        assert_eq!(ran.verdict, verdicts.answer);
        let f = &ran.frame;
        assert_eq!(
            f[..12],
            [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1],
            "link addresses exchanged"
        );
        assert_eq!(
            f[at::V4_ADDRESSES],
            [10, 0, 0, 1, 10, 0, 0, 2],
            "addresses exchanged"
        );
        assert_eq!(
            f[at::V4_TOTAL_LENGTH],
            ((f.len() - at::IP) as u16).to_be_bytes()
        );
        let sum: u32 = f[at::IP..VTL]
            .chunks(2)
            .map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "IP checksum");
        let Ok(Packet::Ack(a)) = Packet::parse(&f[VTL..]) else {
            panic!("{:?}", Packet::parse(&f[VTL..]))
        };
        assert_eq!(
            (a.header.sid, a.header.token),
            (kernel::PEER_SID, kernel::PEER_TOKEN)
        );
        assert_eq!((a.header.gid, a.header.flags), (GID, 0));
        assert_eq!(
            (a.cum, a.limit, a.received, a.dups),
            (3, SLOTS.into(), 7, 0)
        );
        assert_eq!((a.echo_seq, a.echo_xid, a.echo_ts), (130, 131, 77));
        for seq in 0..300 {
            let want = [0, 1, 2, 5, 64, 130, 200].contains(&seq);
            assert_eq!(a.has(seq), Some(want), "{seq}");
        }
    }
}

#[test]
fn egress_and_listener__a_packet_and_its_acknowledgement() {
    if !vtl_testing::is_root() {
        return;
    }
    for ((program, verdicts), (input, _)) in EGRESS.into_iter().zip(INGRESS) {
        let k = Kernel::new();
        k.write(0, b"before anything is known of the peer");
        assert_eq!(
            k.run(program, &k.pump(SID), 1).verdict,
            verdicts.stop,
            "no return path"
        );
        k.run(input, &data(0, 0, &[1]), 1);

        let (ran, counts) = k.counted(program, &k.pump(SID));
        assert_eq!(ran.verdict, verdicts.send);
        assert_eq!(counts, [(intf::VTL_ST_TX_PACKETS, 1)]);
        assert_eq!(ran.frame[at::V4_ADDRESSES], [10, 0, 0, 1, 10, 0, 0, 2]);
        let Ok(Packet::Data(d)) = Packet::parse(&ran.frame[VTL..]) else {
            panic!("no DATA")
        };
        assert_eq!((d.seq, d.xid, d.header.sid), (0, 1, kernel::PEER_SID));
        assert_eq!(d.payload, b"before anything is known of the peer");
        assert_eq!(
            u32::from(d.header.flags),
            intf::VTL_F_ACK_NOW,
            "the last one before silence"
        );
        let (ran, counts) = k.counted(program, &k.pump(SID));
        assert_eq!(
            (ran.verdict, counts),
            (verdicts.stop, vec![]),
            "nothing more"
        );
        assert_ne!(k.session().tx.wake_ns, 0);
        for sid in [0, 5, intf::VTL_MAX_SESSIONS, u32::MAX] {
            assert_eq!(
                k.run(program, &k.pump(sid), 1).verdict,
                verdicts.stop,
                "session {sid}"
            );
        }

        // Acknowledgements: a damaged one, a lie, the true one, an old one.
        let mut damaged = ack(1, 1, 1, &[]);
        damaged[VTL + field!(vtl_ack_hdr, cum).end - 1] ^= 2;
        let (_, counts) = k.counted(input, &damaged);
        assert_eq!(counts, [(RX, 1), (intf::VTL_ST_RX_BAD_CSUM, 1)]);
        for (lie, what) in [(ack(2, 1, 1, &[]), "cum"), (ack(1, 2, 1, &[]), "received")] {
            k.run(input, &lie, 1);
            assert_eq!((k.session().tx.una, k.session().tx.acks), (0, 0), "{what}");
        }
        k.run(input, &ack(1, 1, 1, &[0; 8]), 1);
        let s = k.session();
        assert_eq!(
            (s.tx.una, s.tx.delivered, s.tx.acked_xid, s.tx.acks),
            (1, 1, 1, 1)
        );
        assert_eq!(s.tx.limit, 1 + u64::from(SLOTS));
        k.run(input, &ack(0, 0, 1, &[]), 1);
        assert_eq!(
            (k.session().tx.una, k.session().tx.acks),
            (1, 1),
            "an old one"
        );
    }
}

/// In a session with keys, headers carry tags in place of the token, in both directions; no other header is
/// accepted.
#[test]
fn tags__authenticate_each_header() {
    if !vtl_testing::is_root() {
        return;
    }
    let [ours, theirs] = [[1; TAG_KEY], [2; TAG_KEY]].map(TagKey::from);
    for ((program, verdicts), (input, _)) in EGRESS.into_iter().zip(INGRESS) {
        let k = Kernel::new();
        k.alter(|s| {
            (s.tag_out, s.tag_in) = ((&ours).into(), (&theirs).into());
            s.keyed = 1;
        });
        let tagged = |mut frame: Vec<u8>| {
            theirs.put(&mut frame[VTL..]);
            frame
        };
        // With the token, with another tag, with a tag and another bit anywhere.
        let nobodys = vec![(RX, 1), (intf::VTL_ST_RX_NO_SESSION, 1)];
        assert_eq!(k.counted(input, &data(0, 0, &[1])).1, nobodys);
        let good = tagged(data(0, 0, &[1; 100]));
        for bit in (VTL + field!(vtl_hdr, flags).start) * 8..(VTL + DATA) * 8 {
            // The index says which session it is, so another one's or none's.
            if SIDS.contains(&(bit / 8 - VTL)) {
                continue;
            }
            let mut forged = good.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(k.counted(input, &forged).1, nobodys, "bit {bit}");
        }
        assert_eq!((k.session().ifindex, k.session().rx.received), (0, 0));
        k.run(input, &good, 1);
        assert_ne!(k.session().ifindex, 0);
        assert_eq!(k.session().rx.received, 1);

        // Egress, and the acknowledgement that ingress makes.
        k.write(0, b"sealed, for all that anybody knows");
        let (ran, _) = k.counted(program, &k.pump(SID));
        assert_eq!(ran.verdict, verdicts.send);
        let mut sent = ran.frame[VTL..].to_vec();
        assert!(Packet::parse(&sent).is_err());
        assert!(ours.take(&mut sent, kernel::PEER_TOKEN));
        assert!(matches!(Packet::parse(&sent), Ok(Packet::Data(d)) if d.seq == 0));
        let asks = tagged(data(1, intf::VTL_F_ACK_NOW, &[9; 100]));
        let mut answer = k.run(input, &asks, 1).frame[VTL..].to_vec();
        assert!(ours.take(&mut answer, kernel::PEER_TOKEN));
        assert!(matches!(Packet::parse(&answer), Ok(Packet::Ack(a)) if a.cum == 2));

        // Acknowledgements: all of the header, whatever its bitmap.
        let good = tagged(ack(1, 1, 1, &[0; 8]));
        for byte in [1, 20, 31, 40, 47, 71].map(|at| VTL + at) {
            let mut forged = good.clone();
            forged[byte] ^= 4;
            assert_eq!(k.counted(input, &forged).1, nobodys, "byte {byte}");
        }
        k.run(input, &good, 1);
        assert_eq!((k.session().tx.una, k.session().tx.acks), (1, 1));

        // Control packets, for vtld.
        for packet in [Packet::Close(header()), Packet::Size(size(header()))] {
            let frame = frame(&packet);
            assert_eq!(k.counted(input, &frame).1, nobodys, "{packet:?}");
            let passed = vec![(RX, 1), (intf::VTL_ST_RX_CONTROL, 1)];
            assert_eq!(k.counted(input, &tagged(frame)).1, passed, "{packet:?}");
        }
    }
}

/// In a session with keys, only packets that are no replay update the return path.
#[test]
fn tags__replayed_packets_do_not_update_the_return_path() {
    if !vtl_testing::is_root() {
        return;
    }
    let theirs = TagKey::from([2; TAG_KEY]);
    for (input, _) in INGRESS {
        let k = Kernel::new();
        k.alter(|s| {
            s.tag_in = (&theirs).into();
            s.keyed = 1;
        });
        let tagged = |mut frame: Vec<u8>| {
            theirs.put(&mut frame[VTL..]);
            frame
        };
        // Lets the frame come from the link-layer address that ends in `from`. Returns where the return path leads.
        let back_to = |mut frame: Vec<u8>, from: u8| {
            frame[at::LINK_SOURCE.end - 1] = from;
            k.run(input, &frame, 1);
            k.session().headers[at::LINK_DESTINATION.end - 1]
        };
        let [first, second, third] = [0, 1, 2].map(|seq| tagged(data(seq, 0, &[1; 100])));
        let closing = tagged(frame(&Packet::Close(header())));
        let asking = tagged(frame(&Packet::Size(size(header()))));
        assert_eq!(back_to(second.clone(), 2), 2);
        for repeated in [&second, &closing, &asking] {
            assert_eq!(back_to(repeated.clone(), 3), 2);
        }
        assert_eq!(back_to(first, 4), 2, "overtaken");
        assert_eq!(back_to(third.clone(), 5), 5, "the peer is elsewhere");
        assert_eq!(back_to(third, 6), 5);

        k.alter(|s| s.tx.xid = 9);
        let [first, second] = [3, 4].map(|xid| tagged(ack(0, 0, xid, &[])));
        assert_eq!(back_to(second.clone(), 7), 7);
        assert_eq!(back_to(second, 8), 7);
        assert_eq!(back_to(first, 9), 7);
    }
}

/// `vtl bench micro` compares their costs, so they must do the same.
#[test]
fn micro__composed_and_by_hand_do_the_same() {
    if !vtl_testing::is_root() {
        return;
    }
    let after = |function: &str| {
        let k = Kernel::new();
        k.write(0, &[1; 1440]);
        k.alter(|s| {
            s.tx.srtt_us = 2_000;
            s.tx.acks = 1;
            s.tx.xid = 9;
        });
        let micro = kernel::Micro::load(&k);
        for _ in 0..3 {
            micro.call(function, &data(0, 0, &[1; 1440]));
        }
        let mut s = k.session();
        // Each at its own time.
        s.tx.first_sent_ns = s.tx.first_sent_ns.min(1);
        s.tx.delivered_ns = s.tx.delivered_ns.min(1);
        s.tx.last_sent_ns = s.tx.last_sent_ns.min(1);
        s.tx.meter.min_rtt_ns = s.tx.meter.min_rtt_ns.min(1);
        s
    };
    let idle = format!("{:?}", after("nothing"));
    for part in ["send", "receive", "hear"] {
        let [composed, hand] =
            ["composed", "hand"].map(|way| format!("{:?}", after(&format!("{way}_{part}"))));
        assert_eq!(composed, hand, "{part}");
        assert_ne!(composed, idle, "{part} does something");
    }
}
