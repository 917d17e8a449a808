//! Forward error correction: one XOR for each block of packets, from which the receiver makes a lost one.

use std::collections::VecDeque;

use vtl_proto::layers::{Fec as Header, near};

use super::{Layer, MS, Ns, Out, Packet};

/// Blocks whose packets may still come: a packet is made only while its block is one of the latest.
const BLOCKS: usize = 16;

/// Sends the XOR of each `block` packets, or of fewer if no other comes in time.
///
/// Packets pass at once, in the order in which they come. One that was lost is made when the rest of its block and the XOR are
/// there; two of a block are lost. It drops a packet that comes twice while its block is one of the latest.
pub struct Fec {
    block: u8,
    wait: Ns,
    /// The block that is being sent, its packets so far, and when the first of them was sent.
    sending: u64,
    sum: Sum,
    begun: Ns,
    /// The latest blocks that have come, and the number of the first.
    first: u64,
    blocks: VecDeque<Block>,
}

/// The XOR of packets.
#[derive(Debug, Default)]
struct Sum {
    count: u8,
    lengths: u16,
    bytes: Vec<u8>,
}

impl Sum {
    fn add(&mut self, bytes: &[u8], len: u16) {
        if self.bytes.len() < bytes.len() {
            self.bytes.resize(bytes.len(), 0);
        }
        for (sum, byte) in self.bytes.iter_mut().zip(bytes) {
            *sum ^= byte;
        }
        self.lengths ^= len;
    }
}

/// A block that is being received.
#[derive(Debug, Default)]
struct Block {
    /// The XOR of what has come, the parity included, and a bit for each packet.
    sum: Sum,
    seen: u64,
    /// Number of the block's packets, known from the parity.
    count: Option<u8>,
}

impl Block {
    /// The packet that is missing, if it is one and the parity is there. Only once.
    fn missing(&mut self) -> Option<Packet> {
        let count = self.count?;
        // 1 to 64 ones.
        let all = u64::MAX >> (64 - u32::from(count));
        let missing = all & !self.seen;
        if missing.count_ones() != 1 || self.seen & !all != 0 {
            return None;
        }
        self.seen |= missing;
        let bytes = self.sum.bytes.get(..usize::from(self.sum.lengths))?;
        Some(Packet::new(bytes))
    }
}

impl Fec {
    /// `block`: packets, 1 to 64; `wait_ms`: after this a shorter block is ended.
    pub fn new(block: u32, wait_ms: u32) -> Self {
        Self {
            block: block.clamp(1, Header::MAX_BLOCK.into()) as u8,
            wait: Ns::from(wait_ms) * MS,
            sending: 0,
            sum: Sum::default(),
            begun: 0,
            first: 0,
            blocks: VecDeque::new(),
        }
    }

    /// Sends the parity of the block that is being sent.
    fn end(&mut self, out: &mut Out) {
        let sum = std::mem::take(&mut self.sum);
        let mut parity = Packet::new(&sum.bytes);
        let header = Header::Parity {
            // Truncated on purpose.
            block: self.sending as u32,
            count: sum.count,
            lengths: sum.lengths,
        };
        parity.push(&header.emit());
        self.sending += 1;
        out.down(parity);
    }

    /// The block with a number, if it is one of the latest. It may become that.
    fn at(&mut self, block: u32) -> Option<&mut Block> {
        let last = self.first + self.blocks.len() as u64;
        let block = near(block, last);
        let place = block.checked_sub(self.first)?;
        if place >= self.blocks.len() as u64 {
            let new = block + 1 - last;
            for _ in 0..new.min(BLOCKS as u64) {
                self.blocks.push_back(Block::default());
            }
            let old = self.blocks.len().saturating_sub(BLOCKS);
            self.blocks.drain(..old);
            self.first = block + 1 - self.blocks.len() as u64;
        }
        self.blocks.get_mut((block - self.first) as usize)
    }
}

impl Layer for Fec {
    fn header(&self) -> usize {
        Header::LEN
    }

    fn send(&mut self, now: Ns, mut packet: Packet, out: &mut Out) {
        if self.sum.count == 0 {
            self.begun = now;
        }
        self.sum.add(packet.bytes(), packet.len() as u16);
        let header = Header::Data {
            // Truncated on purpose.
            block: self.sending as u32,
            index: self.sum.count,
        };
        self.sum.count += 1;
        packet.push(&header.emit());
        out.down(packet);
        if self.sum.count >= self.block {
            self.end(out);
        }
    }

    fn receive(&mut self, _now: Ns, mut packet: Packet, out: &mut Out) {
        let Some((header, rest)) = Header::parse(packet.bytes()) else {
            return out.refuse();
        };
        let rest = rest.len();
        packet.keep(rest);
        let made = match header {
            Header::Data { block, index } => {
                let Some(block) = self.at(block) else {
                    // Too late to help others.
                    return out.up(packet);
                };
                if block.seen & (1 << index) != 0 {
                    return out.refuse();
                }
                block.seen |= 1 << index;
                block.sum.add(packet.bytes(), rest as u16);
                let made = block.missing();
                out.up(packet);
                made
            }
            Header::Parity {
                block,
                count,
                lengths,
            } => {
                let Some(block) = self.at(block).filter(|block| block.count.is_none()) else {
                    return out.refuse();
                };
                block.count = Some(count);
                block.sum.add(packet.bytes(), lengths);
                block.missing()
            }
        };
        made.into_iter().for_each(|packet| out.up(packet));
    }

    fn poll(&mut self, now: Ns, room: usize, out: &mut Out) {
        if room > 0 && self.next_timeout().is_some_and(|at| at <= now) {
            self.end(out);
        }
    }

    fn next_timeout(&self) -> Option<Ns> {
        (self.sum.count > 0).then(|| self.begun.saturating_add(self.wait))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sent(block: u32, packets: &[Vec<u8>]) -> Vec<Packet> {
        let mut layer = Fec::new(block, 5);
        let mut out = Out::default();
        for packet in packets {
            layer.send(0, Packet::new(packet), &mut out);
        }
        layer.poll(5 * MS, 1, &mut out);
        out.down
    }

    proptest! {
        #[test]
        fn fec__makes_one_lost_packet_of_each_block(
            packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..40),
            block in 1_u32..12,
            lost in any::<prop::sample::Index>(),
            twice in any::<bool>(),
        ) {
            let sent = sent(block, &packets);
            let mut layer = Fec::new(1, 0);
            let mut out = Out::default();
            // One of each run of block + 1 packets, the parity among them.
            let per = block as usize + 1;
            for (i, packet) in sent.iter().enumerate() {
                let run = sent.len().min((i / per + 1) * per) - i / per * per;
                if i % per == lost.index(run) {
                    continue;
                }
                for _ in 0..1 + usize::from(twice) {
                    layer.receive(0, packet.clone(), &mut out);
                }
            }
            let mut got: Vec<_> = out.up.iter().map(|p| p.bytes().to_vec()).collect();
            let mut expected = packets.clone();
            got.sort();
            expected.sort();
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn fec__any_packets_are_taken(
            packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..60),
        ) {
            let mut layer = Fec::new(10, 5);
            for packet in packets {
                layer.receive(0, Packet::new(&packet), &mut Out::default());
                prop_assert!(layer.blocks.len() <= BLOCKS);
            }
        }
    }

    #[test]
    fn fec__old_blocks_are_forgotten() {
        let packets: Vec<_> = (0..40).map(|i| vec![i]).collect();
        let sent = sent(2, &packets);
        let mut layer = Fec::new(2, 5);
        let mut out = Out::default();
        layer.receive(0, sent[0].clone(), &mut out);
        layer.receive(0, sent[3 * 17].clone(), &mut out);
        assert_eq!(out.up.len(), 2);
        // The packet itself passes; its block's XOR is of no use any more.
        layer.receive(0, sent[1].clone(), &mut out);
        layer.receive(0, sent[2].clone(), &mut out);
        assert_eq!((out.up.len(), out.refused), (3, 1));
    }
}
