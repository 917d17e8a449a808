#![allow(non_snake_case)]

use proptest::{collection::vec, prelude::*};

use super::*;

fn header() -> impl Strategy<Value = Header> {
    any::<(u8, u16, u32, u64)>().prop_map(|(flags, gid, sid, token)| Header {
        flags,
        gid,
        sid,
        token,
    })
}

/// A negotiation packet that is valid for `kind`.
fn nego(kind: u32) -> impl Strategy<Value = Nego> {
    let nack = kind == intf::VTL_NEGO_NACK;
    let grafts = match kind {
        intf::VTL_NEGO => 1..=8,
        intf::VTL_NEGO_ACK => 1..=1,
        _ => 0..=8,
    };
    let reason = if nack { 1..=255u8 } else { 0..=0 };
    let fields = any::<(u64, u64, u16, u16)>();
    (
        header(),
        fields,
        1u32..,
        1u32..,
        MIN_PAYLOAD..,
        reason,
        vec(any::<u16>(), grafts),
    )
        .prop_map(
            |(header, fields, sid, ring_slots, max_payload, reason, gids)| Nego {
                header,
                token: fields.0,
                peer_token: fields.1,
                sid,
                ring_slots,
                max_payload,
                port: fields.2,
                services: fields.3,
                reason,
                gids: Gids::new(&gids).unwrap(),
            },
        )
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
        mut bytes in vec(any::<u8>(), 24..1300),
        kind in 0u8..16,
        lie in prop::bool::weighted(0.1),
    ) {
        bytes[0] = 0x10 | kind;
        if let Some(follow) = parse::header_len(kind.into()).and_then(|n| bytes.len().checked_sub(n))
            && !lie
        {
            put!(&mut bytes, vtl_hdr, len, follow as u16);
        }
        if let Ok(packet) = Packet::parse_unverified(&bytes) {
            let mut again = [0; 2048];
            let len = packet.emit(&mut again).unwrap();
            prop_assert_eq!(len, bytes.len());
            prop_assert_eq!(Packet::parse(&again[..len]), Ok(packet));
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
    }

    #[test]
    fn emit__ack_round_trip(
        header in header(),
        fields in any::<([u64; 4], [u32; 3])>(),
        words in vec(any::<u64>(), 0..=128),
    ) {
        let ([cum, limit, received, echo_seq], [echo_xid, echo_ts, dups]) = fields;
        let bitmap: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let ack = Ack {
            header, cum, limit, received, echo_seq, echo_xid, echo_ts, dups, bitmap: &bitmap,
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
    ) {
        round_trip(Packet::Nego(nego));
        round_trip(Packet::NegoAck(ack));
        round_trip(Packet::NegoNack(nack));
    }

    #[test]
    fn parse__every_bit_is_covered(nego in nego(intf::VTL_NEGO), byte in 0usize..72, bit in 0..8u8) {
        let mut buffer = [0; 72];
        Packet::Nego(nego).emit(&mut buffer).unwrap();
        buffer[byte] ^= 1u8 << bit;
        prop_assert!(Packet::parse(&buffer).is_err());
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
        bitmap: &[0xff; 8],
    };
    assert_eq!(ack.base(), 64);
    assert_eq!((ack.has(0), ack.has(127)), (Some(true), Some(true)));
    assert_eq!(
        (ack.has(128), ack.has(u64::MAX)),
        (Some(false), Some(false))
    );
    ack.header.flags = intf::VTL_F_PARTIAL as u8;
    assert_eq!((ack.has(127), ack.has(128)), (Some(true), None));
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
fn gids__too_many() {
    assert!(Gids::new(&[1; 8]).is_some());
    assert!(Gids::new(&[1; 9]).is_none());
    assert!(Gids::new(&[1; 300]).is_none());
}

#[test]
fn checksum__carries_and_padding() {
    let mut bytes = [0xff; 29];
    bytes[16..20].fill(0);
    // Six words of all ones, and a byte of ones padded: -0 plus 0xff in one's complement.
    assert_eq!(checksum(&bytes), !0xff);
    bytes[16..20].fill(0x77);
    assert_eq!(
        checksum(&bytes),
        !0xff,
        "the checksum's own field counts as zero"
    );
}
