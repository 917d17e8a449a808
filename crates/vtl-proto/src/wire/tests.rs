//! Packets, emitted and parsed: every field, every bound, and anything that may arrive.
#![allow(non_snake_case)]

use proptest::{collection::vec, prelude::*};

use super::*;

const VERSION: u8 = (intf::VTL_VERSION << 4) as u8;

fn header() -> impl Strategy<Value = Header> {
    any::<(u8, u16, u32, u64)>().prop_map(|(flags, gid, sid, token)| Header {
        flags,
        gid,
        sid,
        token,
    })
}

/// A negotiation packet that is valid for `kind`.
fn nego(kind: u32) -> impl Strategy<Value = Nego<'static>> {
    let nack = kind == intf::VTL_NEGO_NACK;
    let grafts = match kind {
        intf::VTL_NEGO => 1..=8,
        intf::VTL_NEGO_ACK => 1..=1,
        _ => 0..=8,
    };
    let reason = if nack { 1..=255u8 } else { 0..=0 };
    let fields = any::<(u64, u64, u16, u16)>();
    let ticket = any::<(u64, u64, u32)>().prop_map(|(time, mac, sid)| Ticket { time, mac, sid });
    let params = vec(any::<(u8, u8, u32)>(), 0..=8);
    (
        header(),
        fields,
        1u32..,
        1u32..,
        MIN_PAYLOAD..,
        reason,
        vec(any::<u16>(), grafts),
        ticket,
        params,
    )
        .prop_map(
            |(header, fields, sid, ring_slots, max_payload, reason, gids, ticket, params)| Nego {
                header,
                token: fields.0,
                peer_token: fields.1,
                sid,
                ring_slots,
                max_payload,
                port: fields.2,
                services: fields.3,
                reason,
                ticket,
                params: Params::new(
                    &params
                        .iter()
                        .filter(|_| !gids.is_empty())
                        .map(|(graft, index, value)| Param {
                            graft: graft % gids.len() as u8,
                            index: index % 8,
                            value: *value,
                        })
                        .collect::<Vec<_>>(),
                )
                .unwrap(),
                gids: Gids::new(&gids).unwrap(),
                extensions: Extensions::default(),
            },
        )
}

/// Extensions as they lie in a packet; those that are too many are left out.
fn extensions() -> impl Strategy<Value = Vec<u8>> {
    let value = prop_oneof![vec(any::<u8>(), 0..12), vec(any::<u8>(), 0..=1036)];
    vec((0..1u16 << 15, any::<bool>(), value), 0..8).prop_map(|list| {
        let mut bytes = vec![0xaa; MAX_EXTENSIONS];
        let mut used = 0;
        for (kind, critical, value) in &list {
            let extension = Extension {
                kind: *kind,
                critical: *critical,
                value,
            };
            used += extension.emit(&mut bytes[used..]).unwrap_or_default();
        }
        bytes.truncate(used);
        bytes
    })
}

fn round_trip(packet: Packet<'_>) {
    let mut buffer = [0xaa; 2048];
    let len = packet.emit(&mut buffer).unwrap();
    assert_eq!(len, packet.wire_len());
    assert_eq!(Packet::parse(&buffer[..len]), Ok(packet));
    assert!(buffer[len..].iter().all(|byte| *byte == 0xaa));
    let short = EmitError::Buffer {
        have: len - 1,
        need: len,
    };
    assert_eq!(packet.emit(&mut buffer[..len - 1]), Err(short));
}

proptest! {
    #[test]
    fn parse__arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..2200)) {
        let _ = Packet::parse(&bytes);
        let _ = Packet::parse_unverified(&bytes);
    }

    /// As above, but the version, the type and mostly the length are right.
    #[test]
    fn parse__plausible_bytes_never_panic(
        mut bytes in prop_oneof![vec(any::<u8>(), 24..1300), vec(any::<u8>(), 72)],
        kind in 0u8..16,
        lie in prop::bool::weighted(0.1),
        padding in 0usize..=32,
    ) {
        bytes[0] = VERSION | kind;
        if let Some(mut follow) = parse::header_len(kind.into()).and_then(|n| bytes.len().checked_sub(n))
            && !lie
        {
            if parse::padding(kind.into(), 0) == follow {
                follow -= padding.min(follow);
            }
            put!(&mut bytes, vtl_hdr, len, follow as u16);
        }
        if let Ok(packet) = Packet::parse_unverified(&bytes) {
            let mut again = [0; 2048];
            let len = packet.emit(&mut again).unwrap();
            prop_assert_eq!(len, bytes.len());
            prop_assert_eq!(Packet::parse(&again[..len]), Ok(packet));
        }
    }

    /// Only one length of a packet is right for each length of its payload.
    #[test]
    fn parse__padding_is_exact(payload in vec(any::<u8>(), 0..48), total in 40usize..100) {
        let kind = if payload.is_empty() { intf::VTL_PROBE } else { intf::VTL_DATA };
        let mut bytes = vec![0; total.max(40 + payload.len())];
        bytes[40..40 + payload.len()].copy_from_slice(&payload);
        put!(&mut bytes, vtl_hdr, version_type, VERSION | kind as u8);
        put!(&mut bytes, vtl_hdr, len, payload.len() as u16);
        let sum = checksum(&bytes);
        put!(&mut bytes, vtl_hdr, csum, sum.swap_bytes());
        let right = bytes.len() == 72.max(40 + payload.len());
        let length = WireError::Length { field: payload.len(), follow: bytes.len() - 40 };
        match Packet::parse(&bytes) {
            Ok(Packet::Data(data) | Packet::Probe(data)) => {
                prop_assert!(right);
                prop_assert_eq!(data.payload, &payload);
            }
            other => {
                prop_assert!(!right);
                prop_assert_eq!(other, Err(length));
            }
        }
    }

    /// Padding may be anything, and means nothing; every other bit is covered.
    #[test]
    fn parse__only_padding_may_change(
        header in header(),
        payload in vec(any::<u8>(), 1..48),
        byte in 0usize..88,
        bit in 0..8u8,
    ) {
        let data = Packet::Data(Data { header, seq: 1, xid: 2, ts: 3, payload: &payload });
        let mut buffer = [0; 88];
        let len = data.emit(&mut buffer).unwrap();
        prop_assert_eq!(len, 72.max(40 + payload.len()));
        let byte = byte.min(len - 1);
        buffer[byte] ^= 1u8 << bit;
        let parsed = Packet::parse(&buffer[..len]);
        if byte >= 40 + payload.len() {
            prop_assert_eq!(parsed, Ok(data));
        } else {
            prop_assert!(parsed.is_err());
        }
    }

    #[test]
    fn emit__data_round_trip(
        header in header(),
        fields in any::<(u64, u32, u32)>(),
        payload in vec(any::<u8>(), 1..=1920),
    ) {
        let (seq, xid, ts) = fields;
        round_trip(Packet::Data(Data { header, seq, xid, ts, payload: &payload }));
        round_trip(Packet::Probe(Data { header, seq, xid, ts, payload: &[] }));
        round_trip(Packet::Close(header));
        let (zeros, answers) = (payload.len() as u16 + 16, xid as u16);
        round_trip(Packet::Size(Size { header, zeros, answers }));
    }

    #[test]
    fn emit__ack_round_trip(
        header in header(),
        fields in any::<([u64; 4], [u32; 3])>(),
        skip in 0u32..=512 - 128,
        words in vec(any::<u64>(), 0..=128),
    ) {
        let ([cum, limit, received, echo_seq], [echo_xid, echo_ts, dups]) = fields;
        let bitmap: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let ack = Ack {
            header, cum, limit, received, echo_seq, echo_xid, echo_ts, dups, skip,
            bitmap: &bitmap,
        };
        round_trip(Packet::Ack(ack));
        for (i, word) in words.iter().enumerate() {
            for bit in 0..64 {
                let Some(seq) = ack.base().checked_add(i as u64 * 64 + bit) else { break };
                prop_assert_eq!(ack.has(seq), Some(seq < cum || word >> bit & 1 == 1));
            }
        }
    }

    #[test]
    fn emit__nego_round_trip(
        nego in nego(intf::VTL_NEGO),
        ack in nego(intf::VTL_NEGO_ACK),
        nack in nego(intf::VTL_NEGO_NACK),
        bytes in extensions(),
    ) {
        let extensions = Extensions::parse(&bytes).unwrap();
        for [nego, ack, nack] in [
            [nego, ack, nack],
            [nego, ack, nack].map(|nego| Nego { extensions, ..nego }),
        ] {
            round_trip(Packet::Nego(nego));
            round_trip(Packet::NegoAck(ack));
            round_trip(Packet::NegoNack(nack));
        }
    }

    /// Whatever parses is a sequence of whole extensions, which emit to as many bytes.
    #[test]
    fn extensions__of_plausible_bytes(
        mut bytes in extensions(),
        cut in 0usize..8,
        changed in any::<(prop::sample::Index, u8)>(),
    ) {
        bytes.truncate(bytes.len().saturating_sub(cut / 4));
        if !bytes.is_empty() {
            let at = changed.0.index(bytes.len());
            bytes[at] = changed.1;
        }
        let Ok(extensions) = Extensions::parse(&bytes) else { return Ok(()) };
        prop_assert_eq!(extensions.as_bytes(), &bytes);
        let mut again = [0; MAX_EXTENSIONS];
        let mut used = 0;
        for extension in extensions.iter() {
            used += extension.emit(&mut again[used..]).unwrap();
        }
        prop_assert_eq!(used, bytes.len());
        prop_assert!(extensions.iter().eq(Extensions::parse(&again[..used]).unwrap().iter()));
    }

    #[test]
    fn extensions__arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..1100)) {
        if let Ok(extensions) = Extensions::parse(&bytes) {
            extensions.iter().for_each(drop);
        }
    }

    #[test]
    fn parse__every_bit_is_covered(
        nego in nego(intf::VTL_NEGO),
        bytes in extensions(),
        byte in any::<prop::sample::Index>(),
        bit in 0..8u8,
    ) {
        let mut buffer = [0; intf::VTL_NEGO_MAX as usize];
        let extensions = Extensions::parse(&bytes).unwrap();
        let len = Packet::Nego(Nego { extensions, ..nego }).emit(&mut buffer).unwrap();
        buffer[byte.index(len)] ^= 1u8 << bit;
        prop_assert!(Packet::parse(&buffer[..len]).is_err());
    }
}

#[test]
fn has__beyond_the_bitmap() {
    let mut ack = Ack {
        header: Header::default(),
        cum: 70,
        limit: 1000,
        received: 70,
        echo_seq: 0,
        echo_xid: 0,
        echo_ts: 0,
        dups: 0,
        skip: 0,
        bitmap: &[0xff; 8],
    };
    assert_eq!(ack.base(), 64);
    assert_eq!((ack.has(0), ack.has(127)), (Some(true), Some(true)));
    assert_eq!(
        (ack.has(128), ack.has(u64::MAX)),
        (Some(false), Some(false))
    );
    ack.header.flags = intf::VTL_F_PHASE as u8;
    assert_eq!(ack.has(128), Some(false));
    ack.header.flags = intf::VTL_F_PARTIAL as u8;
    assert_eq!((ack.has(127), ack.has(128)), (Some(true), None));
    ack.skip = 2;
    assert_eq!(ack.base(), 192);
    assert_eq!((ack.has(69), ack.has(70)), (Some(true), Some(false)));
    assert_eq!((ack.has(71), ack.has(191)), (None, None));
    assert_eq!((ack.has(192), ack.has(256)), (Some(true), None));
}

#[test]
fn emit__refuses_what_would_not_parse() {
    let mut buffer = [0; 4096];
    let header = Header::default();
    let data = Data {
        header,
        seq: 0,
        xid: 0,
        ts: 0,
        payload: &[0; 1921],
    };
    let invalid = |error| Err(EmitError::Invalid(error));
    assert_eq!(
        Packet::Data(data).emit(&mut buffer),
        invalid(WireError::Payload(1921))
    );
    let probe = Data {
        payload: &[0],
        ..data
    };
    assert_eq!(
        Packet::Probe(probe).emit(&mut buffer),
        invalid(WireError::Payload(1))
    );
    let nego = Packet::Nego(Nego {
        sid: 1,
        ring_slots: 1,
        max_payload: 1,
        ..Nego::default()
    });
    assert_eq!(nego.emit(&mut buffer), invalid(WireError::Field("grafts")));
}

#[test]
fn emit__padding_is_zero() {
    let probe = Packet::Probe(Data {
        header: Header::default(),
        seq: 0,
        xid: 0,
        ts: 0,
        payload: &[],
    });
    let mut buffer = [0xaa; 80];
    assert_eq!(probe.emit(&mut buffer), Ok(72));
    assert_eq!(buffer[40..], [[0; 32].as_slice(), &[0xaa; 8]].concat());
}

#[test]
fn extensions__as_many_bytes_as_fit() {
    let longest = Extension {
        kind: 1,
        critical: false,
        value: &[7; MAX_EXTENSIONS - 4],
    };
    let mut bytes = [0; MAX_EXTENSIONS + 4];
    assert_eq!(longest.emit(&mut bytes), Some(MAX_EXTENSIONS));
    let extensions = Extensions::parse(&bytes[..MAX_EXTENSIONS]).unwrap();
    assert!(extensions.iter().eq([longest]));
    // With an empty one behind it, it is beyond what one packet may have.
    let beyond = WireError::Payload(MAX_EXTENSIONS + 4);
    assert_eq!(Extensions::parse(&bytes), Err(beyond));
    let nego = Nego {
        sid: 1,
        ring_slots: 1,
        max_payload: MIN_PAYLOAD,
        gids: Gids::new(&[1]).unwrap(),
        extensions,
        ..Nego::default()
    };
    let mut buffer = [0; 1200];
    assert_eq!(Packet::Nego(nego).emit(&mut buffer), Ok(1200));
    assert_eq!(Packet::parse(&buffer), Ok(Packet::Nego(nego)));
}

#[test]
fn extensions__unknown_and_critical() {
    let mut bytes = [0; 64];
    let mut used = 0;
    let mut add = |kind, critical| {
        let value = &[1, 2, 3, 4, 5][..];
        let extension = Extension {
            kind,
            critical,
            value,
        };
        used += extension.emit(&mut bytes[used..]).unwrap();
        Extensions::parse(&bytes[..used])
            .unwrap()
            .unknown_critical()
    };
    assert_eq!(add(1, false), None);
    assert_eq!(add(0, true), None);
    assert_eq!(add(0x7fff, true), Some(0x7fff));
    assert_eq!(add(2, true), Some(0x7fff));
}

#[test]
fn extension__that_cannot_be_emitted() {
    let mut buffer = [0xaa; 12];
    let extension = Extension {
        kind: 0x7fff,
        critical: false,
        value: &[1; 5],
    };
    assert_eq!(extension.emit(&mut buffer[..11]), None);
    let kind = Extension {
        kind: 0x8000,
        ..extension
    };
    assert_eq!(kind.emit(&mut buffer), None);
    assert_eq!(extension.emit(&mut buffer), Some(12));
    assert_eq!(buffer, [0x7f, 0xff, 0, 5, 1, 1, 1, 1, 1, 0, 0, 0]);
    let long = [0; 1 << 16];
    let value = Extension {
        value: &long,
        ..extension
    };
    assert_eq!(value.emit(&mut vec![0; 1 << 17]), None);
}

#[test]
fn gids__too_many() {
    assert!(Gids::new(&[1; 8]).is_some());
    assert!(Gids::new(&[1; 9]).is_none());
    assert!(Gids::new(&[1; 300]).is_none());
}

#[test]
fn checksum__carries_and_padding() {
    let mut bytes = [0xff; 25];
    bytes[crate::field!(vtl_hdr, csum)].fill(0);
    // Twice -1, 2^64 - 2^32, and a byte of ones padded: 0xffffffff_000000fd modulo 2^64.
    assert_eq!(checksum(&bytes), !0xfd);
    let sum = checksum(&bytes);
    bytes[crate::field!(vtl_hdr, csum)].fill(0x77);
    assert_eq!(
        checksum(&bytes),
        sum,
        "the checksum's own field counts as zero"
    );
}

#[test]
fn sid_and_token__are_those_of_the_parsed_header() {
    let header = Header {
        sid: 0x0102_0304,
        token: u64::MAX - 7,
        ..Header::default()
    };
    let packet = Packet::Data(Data {
        header,
        seq: 1,
        xid: 2,
        ts: 3,
        payload: b"payload",
    });
    let mut bytes = vec![0; packet.wire_len()];
    packet.emit(&mut bytes).unwrap();
    assert_eq!(sid(&bytes), Some(header.sid));
    assert_eq!(token(&bytes), Some(header.token));
    let short = core::mem::offset_of!(intf::vtl_hdr, token);
    assert_eq!(token(&bytes[..short + 7]), None);
    assert_eq!(sid(&bytes[..3]), None);
}
