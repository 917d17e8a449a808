//! Packets, as anybody may send them: what is parsed is emitted again byte for byte, but for padding and checksum.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vtl_proto::{nego, wire::Packet};

fuzz_target!(|data: &[u8]| {
    let _ = nego::refuse_version(data);
    let Ok(packet) = Packet::parse_unverified(data) else {
        assert!(Packet::parse(data).is_err());
        return;
    };
    if let Packet::Ack(ack) = &packet {
        let base = ack.base();
        let seqs = [
            ack.cum,
            ack.cum.wrapping_add(1),
            base,
            base.wrapping_add(63),
        ];
        for seq in seqs.into_iter().chain([0, u64::MAX]) {
            ack.has(seq);
        }
    }
    if let Packet::Nego(nego) | Packet::NegoAck(nego) | Packet::NegoNack(nego) = &packet {
        let extensions = nego.extensions.iter().map(|e| e.wire_len());
        assert_eq!(extensions.sum::<usize>(), nego.extensions.as_bytes().len());
        nego.extensions.unknown_critical();
        nego::succeeded(nego);
    }
    let mut again = vec![0; data.len()];
    assert_eq!(packet.emit(&mut again), Ok(data.len()));
    assert_eq!(Packet::parse(&again), Ok(packet));
});
