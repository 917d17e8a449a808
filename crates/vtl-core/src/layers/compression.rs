//! Compression of packets by LZ4, each by itself.

use lz4_flex::block::{compress_into, decompress_into, get_maximum_output_size};
use vtl_proto::layers::Compression as Header;

use super::{Layer, MAX_PACKET, Ns, Out, Packet};

/// Compresses packets that get shorter, and passes on others as they are.
///
/// It keeps nothing between packets, so that loss and order do not matter. Like any compression in front of encryption, the
/// length tells something of the content where an attacker chooses a part of it (CRIME).
#[derive(Default)]
pub struct Compression {
    buffer: Vec<u8>,
}

impl Layer for Compression {
    fn header(&self) -> usize {
        Header::LEN
    }

    fn send(&mut self, _now: Ns, mut packet: Packet, out: &mut Out) {
        self.buffer.resize(get_maximum_output_size(packet.len()), 0);
        let compressed = compress_into(packet.bytes(), &mut self.buffer);
        match compressed {
            Ok(len) if len < packet.len() => {
                packet = Packet::new(&self.buffer[..len]);
                packet.push(&Header::Lz4.emit());
            }
            _ => packet.push(&Header::Stored.emit()),
        }
        out.down(packet);
    }

    fn receive(&mut self, _now: Ns, mut packet: Packet, out: &mut Out) {
        match Header::parse(packet.bytes()) {
            Some((Header::Stored, rest)) => {
                packet.keep(rest.len());
                out.up(packet);
            }
            Some((Header::Lz4, rest)) => {
                self.buffer.resize(MAX_PACKET, 0);
                match decompress_into(rest, &mut self.buffer) {
                    Ok(len) => out.up(Packet::new(&self.buffer[..len])),
                    Err(_) => out.refuse(),
                }
            }
            None => out.refuse(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn through(bytes: &[u8]) -> (usize, Packet) {
        let (mut here, mut there) = (Compression::default(), Compression::default());
        let mut out = Out::default();
        here.send(0, Packet::new(bytes), &mut out);
        let sent = out.down.pop().unwrap();
        let len = sent.len();
        there.receive(0, sent, &mut out);
        (len, out.up.pop().unwrap())
    }

    #[test]
    fn compression__shortens_what_can_be() {
        let (len, packet) = through(&[7; 1000]);
        assert!(len < 50, "{len}");
        assert_eq!(packet.bytes(), [7; 1000]);
        // A bomb is no longer than a packet.
        let mut out = Out::default();
        let bomb = lz4_flex::block::compress(&vec![0; MAX_PACKET + 1]);
        let mut packet = Packet::new(&bomb);
        packet.push(&Header::Lz4.emit());
        Compression::default().receive(0, packet, &mut out);
        assert_eq!((out.up.len(), out.refused), (0, 1));
    }

    proptest! {
        #[test]
        fn compression__is_exact_and_never_longer_than_its_header(
            bytes in prop::collection::vec(any::<u8>(), 0..1500),
        ) {
            let (len, packet) = through(&bytes);
            prop_assert!(len <= bytes.len() + Header::LEN);
            prop_assert_eq!(packet.bytes(), &bytes[..]);
            // The same bytes as if they had come from the network.
            Compression::default().receive(0, Packet::new(&bytes), &mut Out::default());
        }
    }
}
