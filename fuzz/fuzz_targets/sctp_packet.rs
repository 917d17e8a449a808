//! SCTP's packets, with a checksum that is right: the daemon's own look at them, and the library's.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/vtld/src/flows/carrier/sctp/packet.rs"]
mod packet;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    sctp_proto::_fuzz::fuzz_packet_unmarshal(data);
    if packet::Header::of(data).is_none() {
        return;
    }
    let whole = packet::sealed(data.to_vec());
    assert!(packet::is_intact(&whole));
    for chunk in packet::chunks(&whole) {
        let _ = (
            chunk.tsn(),
            chunk.stream(),
            chunk.initiate_tag(),
            chunk.initial_tsn(),
        );
    }
    assert!(packet::is_intact(
        &packet::only(&whole, |kind| kind == packet::DATA)
    ));
    assert_eq!(packet::bare_init(&whole).len(), whole.len());
    assert_eq!(packet::urgent(&whole).len(), whole.len());
});
