//! Misbehaviour: garbled frames, applications that write nonsense into their rings, and peers that
//! send it.

use vtl_link::Random;
use vtl_proto::{intf, ip, wire};

use crate::host::{FrameBuffer, Host};

/// Offset of the VTL header, or the frame's length if that is shorter.
pub fn offset(frame: &[u8]) -> usize {
    let v6 = frame.get(ip::field::ETHERTYPE) == Some(&[0x86, 0xdd]);
    (if v6 { ip::OFFSET_V6 } else { ip::OFFSET_V4 }).min(frame.len())
}

/// Damages a frame in one of several ways, all of which a sum of 32-bit words detects; swapped
/// words and opposite flips of the same bit are excluded, as PROTOCOL.md promises no more.
pub fn garble(frame: &mut Vec<u8>, rng: &mut Random) {
    let length = frame.len() as u64;
    match rng.below(6) {
        0 => frame.truncate(rng.below(length) as usize),
        1 => {
            let more = 1 + rng.below(64) as usize;
            frame.resize_with((frame.len() + more).min(1900), || 0xa5);
            // Longer than the headers tell: harmless padding on its own.
            let at = rng.below(length) as usize;
            frame[at] ^= 1 << rng.below(8);
        }
        2 => {
            for byte in frame.iter_mut() {
                *byte = rng.bits() as u8;
            }
        }
        3 => {
            // Headers intact, noise after them.
            let from = offset(frame) + size_of::<intf::vtl_hdr>();
            for byte in frame.iter_mut().skip(from) {
                *byte = rng.bits() as u8;
            }
        }
        4 => {
            // A burst of up to four bytes.
            let at = rng.below(length) as usize;
            let random = rng.bits() | 1;
            let end = (at + 1 + rng.below(3) as usize).min(frame.len());
            for (i, byte) in frame[at..end].iter_mut().enumerate() {
                *byte ^= (random >> (8 * i)) as u8;
            }
        }
        _ => {
            let at = rng.below(length) as usize;
            frame[at] ^= 1 << rng.below(8);
        }
    }
}

/// Recomputes the checksum of a frame's VTL packet.
pub fn seal(frame: &mut [u8]) {
    let from = offset(frame);
    let at = from + std::mem::offset_of!(intf::vtl_hdr, csum);
    if frame.len() >= at + 4 {
        let sum = wire::checksum(&frame[from..]);
        frame[at..at + 4].copy_from_slice(&sum.to_le_bytes());
    }
}

/// A misbehaving application, and a misbehaving peer.
pub struct Hostile {
    rng: Random,
    /// Time of the next attack.
    pub due: u64,
}

impl Hostile {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self {
            rng: Random::new(seed, 0xbad),
            due: 0,
        }
    }

    fn number(&mut self, near: u64) -> u64 {
        match self.rng.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => near.wrapping_sub(self.rng.below(100)),
            3 => near.wrapping_add(self.rng.below(100_000)),
            4 => 1 << 63,
            5 => self.rng.bits(),
            _ => near.wrapping_add(self.rng.below(64)),
        }
    }

    /// Writes nonsense into both rings of a session.
    pub fn misuse(&mut self, host: &mut Host, sid: u32, now: u64) {
        self.due = now + 1_000_000 + self.rng.below(20_000_000);
        let (next, cum) = (host.session(sid).tx.next, host.session(sid).rx.cum);
        let producer = self.number(next);
        let consumer = self.number(cum);
        let tx = host.tx_ctl(sid);
        tx.producer = producer;
        (tx.consumer, tx.waiting, tx.closed) = (self.rng.bits(), self.rng.bits() as u32, 7);
        let rx = host.rx_ctl(sid);
        rx.consumer = consumer;
        (rx.producer, rx.waiting) = (self.rng.bits(), self.rng.bits() as u32);
        for _ in 0..8 {
            let seq = next.wrapping_add(self.rng.below(64));
            let length = self
                .rng
                .pick(&[0, 1, 7, 1440, 1441, 1920, 1921, 0xffff, 0x8000_0000, !0]);
            let slot = host.tx_slot(sid, seq);
            (slot.len, slot.more) = (length, length);
            let slot = host.rx_slot(sid, seq);
            (slot.len, slot.more) = (length, length);
        }
    }

    /// Makes a packet for session `sid` of this host as only its peer could: with valid token and
    /// checksum, all other fields malicious.
    pub fn forge(&mut self, host: &Host, token: u64, frame: &mut FrameBuffer) -> Option<usize> {
        const SID: u32 = crate::sim::HOSTILE;
        let s = host.session(SID);
        let (next, cum) = (s.tx.next, s.rx.cum);
        let header = wire::Header {
            flags: self.rng.bits() as u8,
            gid: s.gid,
            sid: SID,
            token,
        };
        let from = match s.ip_version {
            4 => ip::OFFSET_V4,
            _ => ip::OFFSET_V6,
        };
        let mut body = [0; intf::VTL_MAX_PAYLOAD as usize];
        for byte in &mut body {
            *byte = self.rng.bits() as u8;
        }
        let echo_xid = self.number(s.tx.xid.into()) as u32;
        let packet = match self.rng.below(3) {
            0 => wire::Packet::Data(wire::Data {
                header,
                seq: self.number(cum),
                xid: echo_xid,
                ts: self.rng.bits() as u32,
                payload: &body[..1 + self.rng.below(1440) as usize],
            }),
            1 => wire::Packet::Probe(wire::Data {
                header,
                seq: self.number(cum),
                xid: echo_xid,
                ts: self.rng.bits() as u32,
                payload: &[],
            }),
            _ => wire::Packet::Ack(wire::Ack {
                header,
                cum: self.number(next),
                limit: self.number(next),
                received: self.number(s.tx.delivered),
                echo_seq: self.number(next),
                echo_xid,
                echo_ts: self.rng.bits() as u32,
                dups: self.number(s.tx.dups.into()) as u32,
                skip: self.rng.pick(&[0, 0, 1, 50, 384]),
                bitmap: &body[..8 * self.rng.below(129) as usize],
            }),
        };
        let length = packet.emit(&mut frame[from..]).ok()?;
        address_as_peer(&s.headers[..from], length as u16, frame);
        Some(from + length)
    }
}

/// Writes the headers in front of a packet of `length` bytes that the peer sends: our own, with the addresses swapped.
fn address_as_peer(headers: &[u8], length: u16, frame: &mut FrameBuffer) {
    use ip::field::{
        IP, V4_DESTINATION, V4_SOURCE, V4_TOTAL_LENGTH, V6_DESTINATION, V6_PAYLOAD_LENGTH,
        V6_SOURCE,
    };
    let (source, destination, field, counted) = match headers.len() {
        ip::OFFSET_V4 => {
            let header = (ip::OFFSET_V4 - IP) as u16;
            (V4_SOURCE, V4_DESTINATION, V4_TOTAL_LENGTH, header + length)
        }
        _ => (V6_SOURCE, V6_DESTINATION, V6_PAYLOAD_LENGTH, length),
    };
    frame[..headers.len()].copy_from_slice(headers);
    frame[source.clone()].copy_from_slice(&headers[destination.clone()]);
    frame[destination].copy_from_slice(&headers[source]);
    frame[field].copy_from_slice(&counted.to_be_bytes());
}
