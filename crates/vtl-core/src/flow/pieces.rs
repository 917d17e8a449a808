//! Reassembly buffer of a flow: out-of-order bytes.

use std::collections::BTreeMap;

use bytes::{Buf, BytesMut};
use serde::{Deserialize, Serialize, Serializer};

/// Adjacent pieces are coalesced up to this size in bytes. It bounds both the allocations per byte, when a peer sends
/// bytes one by one, and the bytes copied per arrival.
pub(super) const SMALL: usize = 16 << 10;
/// Overhead of a piece in bytes: tree node and allocator.
const PIECE: u64 = 128;

/// Pieces by offset. They do not overlap; two adjacent ones exceed [`SMALL`] together.
#[derive(Debug, Default, Deserialize)]
#[serde(from = "BTreeMap<u64, BytesMut>")]
pub(super) struct Pieces {
    pieces: BTreeMap<u64, BytesMut>,
    bytes: u64,
}

impl From<BTreeMap<u64, BytesMut>> for Pieces {
    fn from(pieces: BTreeMap<u64, BytesMut>) -> Self {
        let bytes = pieces.values().map(|piece| piece.len() as u64).sum();
        Self { pieces, bytes }
    }
}

impl Serialize for Pieces {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.pieces.serialize(serializer)
    }
}

fn end(offset: u64, piece: &BytesMut) -> u64 {
    offset + piece.len() as u64
}

impl Pieces {
    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes stored.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Memory in bytes, overhead included.
    pub(super) fn memory(&self) -> u64 {
        self.bytes + self.pieces.len() as u64 * PIECE
    }

    /// Offset of the first byte.
    pub(super) fn first(&self) -> Option<u64> {
        self.pieces.first_key_value().map(|(offset, _)| *offset)
    }

    /// Offset behind the last byte.
    pub(super) fn end(&self) -> Option<u64> {
        let (offset, piece) = self.pieces.last_key_value()?;
        Some(end(*offset, piece))
    }

    /// Removes the first piece if it starts at or before `received`; trims what lies before that.
    pub(super) fn take(&mut self, received: u64) -> Option<BytesMut> {
        let first = self.pieces.first_entry()?;
        if *first.key() > received {
            return None;
        }
        let (offset, mut piece) = first.remove_entry();
        self.bytes -= piece.len() as u64;
        let known = (received - offset).min(piece.len() as u64);
        piece.advance(known as usize);
        Some(piece)
    }

    /// Stores the bytes that are not duplicates.
    pub(super) fn insert(&mut self, offset: u64, bytes: &[u8]) {
        let behind = offset + bytes.len() as u64;
        let before = self.pieces.range(..=offset).next_back();
        let mut at = before.map_or(offset, |(start, piece)| end(*start, piece).max(offset));
        while at < behind {
            let next = self.pieces.range(at..).next();
            let (until, covered) = match next {
                Some((start, piece)) if *start < behind => (*start, end(*start, piece)),
                _ => (behind, behind),
            };
            if at < until {
                self.fill(
                    at,
                    &bytes[(at - offset) as usize..(until - offset) as usize],
                );
            }
            at = covered;
        }
    }

    /// Stores bytes in a gap, and coalesces them with their neighbours.
    fn fill(&mut self, offset: u64, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        let behind = offset + bytes.len() as u64;
        let is_small = |piece: &BytesMut, more: usize| piece.len() + more <= SMALL;
        let before = self.pieces.range(..offset).next_back();
        let before = before
            .filter(|(start, piece)| end(**start, piece) == offset && is_small(piece, bytes.len()));
        let start = before.map_or(offset, |(start, _)| *start);
        let piece = self.pieces.entry(start).or_default();
        piece.extend_from_slice(bytes);
        let len = piece.len();
        let joins = |next: &BytesMut| is_small(next, len);
        if self.pieces.get(&behind).is_some_and(joins)
            && let Some(next) = self.pieces.remove(&behind)
            && let Some(piece) = self.pieces.get_mut(&start)
        {
            piece.extend_from_slice(&next);
        }
    }
}
