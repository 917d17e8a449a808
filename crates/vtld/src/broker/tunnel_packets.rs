//! Packets in a TCP connection, as it brings them: each has its length in front.

use std::io;

use vtl_proto::intf;

/// Bytes of the shortest and the longest packet.
const PACKET: [usize; 2] = [size_of::<intf::vtl_hdr>(), 2048];

/// The length that stands in front of a packet, if it is there yet.
fn length(bytes: &[u8]) -> io::Result<Option<usize>> {
    let Some(length) = bytes.first_chunk() else {
        return Ok(None);
    };
    let length = usize::from(u16::from_be_bytes(*length));
    if (PACKET[0]..=PACKET[1]).contains(&length) {
        Ok(Some(length))
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// Bytes of the whole packets, and an error if something else follows.
pub(super) fn count(bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut whole = 0;
    loop {
        match length(&bytes[whole..]) {
            Ok(Some(length)) if bytes.len() >= whole + 2 + length => whole += 2 + length,
            Ok(_) => return (whole, Ok(())),
            Err(error) => return (whole, Err(error)),
        }
    }
}

/// The first of some packets with their lengths in front, and the others.
pub(super) fn first(packets: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = length(packets).ok()??;
    packets.get(2..)?.split_at_checked(length)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn count__up_to_what_is_no_packet() {
        let packet = |length: u16| [&length.to_be_bytes()[..], &vec![7; length.into()]].concat();
        let two = [packet(24), packet(2048)].concat();
        assert!(matches!(count(&two), (n, Ok(())) if n == two.len()));
        assert!(matches!(count(&two[..two.len() - 1]), (26, Ok(()))));
        assert!(matches!(count(&two[..1]), (0, Ok(()))));
        for no_packet in [23, 2049, 0, u16::MAX] {
            let bytes = [&two[..], &no_packet.to_be_bytes()].concat();
            assert!(matches!(count(&bytes), (n, Err(_)) if n == two.len()));
        }
    }

    proptest! {
        #[test]
        fn first__takes_apart_what_was_counted(bytes: Vec<u8>) {
            let (whole, _) = count(&bytes);
            let mut rest = &bytes[..whole];
            while let Some((packet, others)) = first(rest) {
                prop_assert!((PACKET[0]..=PACKET[1]).contains(&packet.len()));
                rest = others;
            }
            prop_assert!(rest.is_empty());
        }
    }
}
