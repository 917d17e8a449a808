//! Tests of frames: the peer's view of what is emitted, and lengths.

use proptest::prelude::*;

use super::*;

const ADDRESSES_OF_TWO: [u8; 32] = [1; 32];

fn any_flow() -> impl Strategy<Value = FlowId> {
    (any::<bool>(), any::<u32>()).prop_map(|(local, number)| FlowId {
        opener: if local { Side::Local } else { Side::Peer },
        number,
    })
}

proptest! {
    #[test]
    fn take__never_panics(bytes in prop::collection::vec(any::<u8>(), 0..80), kind in 0u8..27) {
        let mut bytes = bytes;
        if let Some(place) = bytes.get_mut(6) {
            *place = kind;
        }
        let mut rest = &bytes[..];
        while Frame::take(&mut rest).is_ok() && !rest.is_empty() {}
    }

    #[test]
    fn emit__then_take_is_the_peers_view(
        flow in any_flow(), offset in 0..1u64 << 60, number in any::<u32>(), fin in any::<bool>(),
        bytes in prop::collection::vec(any::<u8>(), 1..40), kind in 0..18,
    ) {
        let run = Run { number, position: offset / 2, offset };
        let code = ResetCode::Violation;
        let carrier = CarrierId { opener: flow.opener, number };
        let frame = |flow: FlowId| match kind {
            0 => Frame::Chunk { flow, offset, bytes: &bytes, fin, urgent: fin },
            1 => Frame::Confirm { flow, offset, fin, limit: offset + 1, tolerant: number % 2 == 0 },
            2 => Frame::Attach { flow, run },
            3 => Frame::Attached { flow, number },
            4 => Frame::Reset { flow, code },
            5 => Frame::Reject { flow },
            6 => Frame::Hello {
                carrier: CarrierId { opener: flow.opener, ..carrier },
                tag: number,
                tls: fin,
                path: offset as u8,
                gateways: offset % 2 == 0,
                layers: offset % 3 == 0,
            },
            7 => Frame::Ask { kind: number, seals: fin },
            8 => Frame::Grant { kind: number, port: number as u16, token: offset, crypto: [7; 32] },
            9 => Frame::Refuse { kind: number },
            10 => Frame::Loses { flow, from: offset, passed: offset + 1 },
            11 => Frame::Certificate { bytes: &bytes },
            12 => Frame::Prefer {
                carrier: CarrierId { opener: flow.opener, ..carrier }, tag: number, bbr: fin, asks: offset % 2 == 0,
                spread: (offset % 3 == 0).then(|| Scheduler::numbered(number as u8)),
            },
            13 => Frame::Figures(Figures {
                rate: offset, at_least: fin, min_rtt_us: number, loss_ppm: fin.then_some(number % 1_000_001),
                burst_milli: number, packets: number,
            }),
            14 => Frame::Addresses(Addresses::parse(&ADDRESSES_OF_TWO)),
            15 => Frame::Gateway { address: u128::from(offset).into() },
            16 => Frame::Layers { message: &bytes },
            _ => Frame::Broken { carrier: CarrierId { opener: flow.opener, ..carrier } },
        };
        let mut buffer = [0; 64];
        let used = frame(flow).emit(&mut buffer).unwrap();
        let mut rest = &buffer[..used];
        prop_assert_eq!(Frame::take(&mut rest), Ok(frame(flow.at_peer())));
        prop_assert!(rest.is_empty());
        prop_assert_eq!(frame(flow).emit(&mut buffer[..used - 1]), None);
        let mut short = &buffer[..used - 1];
        prop_assert!(Frame::take(&mut short).is_err());
    }
}

#[test]
fn take__refuses_what_no_host_sends() {
    let flow = FlowId {
        opener: Side::Local,
        number: 7,
    };
    let take = |bytes: &[u8]| Frame::take(&mut &bytes[..]).unwrap_err();
    let empty = chunk_header(flow, 0, 0, false, false).unwrap();
    assert_eq!(take(&empty), FrameError::BodyLength { kind: 1, len: 0 });
    let mut far = chunk_header(flow, u64::MAX, 1, false, false)
        .unwrap()
        .to_vec();
    far.push(0);
    assert_eq!(take(&far), FrameError::Overflow);
    let mut unknown = empty;
    unknown[6] = 99;
    assert_eq!(take(&unknown), FrameError::UnknownType(99));
    assert_eq!(chunk_header(flow, 0, 1 << 16, false, false), None);
    let long = vec![0; MAX_CERTIFICATE + 1];
    let mut buffer = vec![0; HEADER + long.len()];
    let frame = Frame::Certificate { bytes: &long };
    assert_eq!(frame.emit(&mut buffer), Some(buffer.len()));
    assert_eq!(
        take(&buffer),
        FrameError::BodyLength {
            kind: 21,
            len: 1025
        }
    );
}
