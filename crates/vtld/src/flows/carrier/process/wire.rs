//! Messages of a carrier's socket: tag, length, body. A process of carriers is as untrusted as the peers whose packets
//! it parses.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use vtl_control::CarrierPath;

/// Size of tag and length, bytes.
const HEAD: usize = 1 + size_of::<u32>();
/// Maximum size of a body, bytes.
pub(super) const MAX_MESSAGE: usize = 256 << 10;
/// Size from which on a batch of messages is written, bytes; a CHUNK has at most as many.
pub(super) const BATCH: usize = 64 << 10;
/// Bodies shorter than this are copied, so that they do not keep the receive buffer alive.
const SHORT: usize = 4 << 10;

/// Plausibility limits of [`Figures`]: packets, and memory in bytes.
const MAX_PACKETS: u64 = 1 << 48;
const MAX_MEMORY: u64 = 1 << 30;
/// Maximum round-trip time, ms: longer ones count as this.
const MAX_RTT_MS: f64 = 1e6;
/// And bytes since the beginning.
const MAX_BYTES: u64 = 1 << 60;

/// Type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Tag {
    /// To the process: control frames, and a CHUNK.
    Control = 1,
    Chunk,
    /// From it: the carrier is open (maximum size of a CHUNK), or why it is not (text).
    Opened,
    Refused,
    /// The next bytes of a stream of frames, and a single frame.
    Stream,
    Frame,
    /// Number of bytes that the library has taken (credit).
    Taken,
    /// [`Figures`], in CBOR.
    Figures,
    /// Of layers over a carrier of vtld's, in both directions: a packet for that carrier, which begins with the kind of its
    /// message, and a packet from it, which does not. To the process, `Taken` says how many bytes the carrier has taken.
    Packet,
}

impl Tag {
    const ALL: [Self; 9] = [
        Self::Control,
        Self::Chunk,
        Self::Opened,
        Self::Refused,
        Self::Stream,
        Self::Frame,
        Self::Taken,
        Self::Figures,
        Self::Packet,
    ];
}

/// Statistics of a carrier in a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    pub(super) path: Option<CarrierPath>,
    /// As `Carrier::memory`, bytes.
    pub(super) memory: u64,
}

impl Figures {
    /// Parses a message; `None` if it is invalid or implausible.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let mut figures: Self = ciborium::from_reader(body).ok()?;
        if let Some(path) = &mut figures.path {
            // Round trips are the other host's to choose.
            for ms in std::iter::once(&mut path.rtt_ms).chain(&mut path.min_rtt_ms) {
                // Not what is no number.
                if *ms > MAX_RTT_MS {
                    *ms = MAX_RTT_MS;
                }
            }
        }
        let of_path = |path: &CarrierPath| {
            let refused = path.refused.unwrap_or(0);
            [Some(path.rtt_ms), path.min_rtt_ms]
                .into_iter()
                .flatten()
                .all(|ms| (0.0..=MAX_RTT_MS).contains(&ms))
                && path.delivered.unwrap_or(0) < MAX_BYTES
                && path.sent.max(path.lost).max(refused) < MAX_PACKETS
        };
        let is_plausible = figures.memory < MAX_MEMORY && figures.path.as_ref().is_none_or(of_path);
        is_plausible.then_some(figures)
    }
}

/// Appends a message.
pub(super) fn emit(to: &mut BytesMut, tag: Tag, body: &[u8]) {
    to.put_u8(tag as u8);
    to.put_u32_le(body.len() as u32);
    to.extend_from_slice(body);
}

/// Removes the first message from the buffer; `None` if it is incomplete.
///
/// # Errors
/// Unknown tag, or too long.
pub(super) fn take(from: &mut BytesMut) -> io::Result<Option<(Tag, Bytes)>> {
    let Some((head, _)) = from.split_first_chunk::<HEAD>() else {
        return Ok(None);
    };
    let [tag, len @ ..] = *head;
    let len = u32::from_le_bytes(len) as usize;
    let tag = Tag::ALL.into_iter().find(|known| *known as u8 == tag);
    let (Some(tag), true) = (tag, len <= MAX_MESSAGE) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    if from.len() < HEAD + len {
        return Ok(None);
    }
    from.advance(HEAD);
    let body = match len < SHORT {
        true => Bytes::copy_from_slice(&from[..len]),
        false => from.split_to(len).freeze(),
    };
    from.advance(if len < SHORT { len } else { 0 });
    Ok(Some((tag, body)))
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn take__what_makes_no_sense_is_refused() {
        let taken = |bytes: &[u8]| take(&mut BytesMut::from(bytes));
        assert!(taken(&[0, 0, 0, 0, 0]).is_err(), "no tag");
        assert!(taken(&[10, 0, 0, 0, 0]).is_err(), "no tag");
        assert!(taken(&[1, 1, 0, 4, 0]).is_err(), "too long");
        assert!(taken(&[1, 0, 0, 4, 0]).unwrap().is_none(), "the longest");
        assert!(taken(&[1, 0, 0, 0]).unwrap().is_none(), "cut");
    }

    #[test]
    fn figures__only_those_that_can_be_true() {
        let read = |path, memory| {
            let mut body = Vec::new();
            ciborium::into_writer(&Figures { path, memory }, &mut body).unwrap();
            Figures::read(&body)
        };
        let path = CarrierPath {
            rtt_ms: 1.5,
            sent: 7,
            lost: 1,
            delivered: Some(9000),
            ..CarrierPath::default()
        };
        assert!(read(Some(path), 5).is_some_and(|figures| figures.path == Some(path)));
        for rtt_ms in [1e9, f64::INFINITY] {
            let read = read(Some(CarrierPath { rtt_ms, ..path }), 5);
            let rtt_ms = read.and_then(|figures| Some(figures.path?.rtt_ms));
            assert_eq!(
                rtt_ms,
                Some(MAX_RTT_MS),
                "the peer may have made it so long"
            );
        }
        for rtt_ms in [f64::NAN, -1.0] {
            assert_eq!(read(Some(CarrierPath { rtt_ms, ..path }), 5), None);
            let min_rtt_ms = Some(rtt_ms);
            assert_eq!(read(Some(CarrierPath { min_rtt_ms, ..path }), 5), None);
        }
        let delivered = Some(MAX_BYTES);
        assert_eq!(read(Some(CarrierPath { delivered, ..path }), 5), None);
        let sent = MAX_PACKETS;
        assert_eq!(read(Some(CarrierPath { sent, ..path }), 5), None);
        assert_eq!(read(None, MAX_MEMORY), None);
        assert_eq!(Figures::read(b"\x81\x81"), None);
    }
}
