use alloc::collections::VecDeque;

use crate::chunk::chunk_payload_data::ChunkPayloadData;

/// Chunks in flight. Their TSNs follow one another, so a TSN is an index.
#[derive(Default, Debug)]
pub(crate) struct FlightQueue {
    chunks: VecDeque<ChunkPayloadData>,
    n_bytes: usize,
    /// Of chunks that are to be retransmitted, as part of `n_bytes`; and their number.
    retransmit_bytes: usize,
    retransmit_len: usize,
}

impl FlightQueue {
    fn index(&self, tsn: u32) -> Option<usize> {
        let first = self.chunks.front()?.tsn;
        Some(tsn.wrapping_sub(first) as usize).filter(|index| *index < self.chunks.len())
    }

    pub(crate) fn push_no_check(&mut self, chunk: ChunkPayloadData) {
        debug_assert!(
            self.chunks
                .back()
                .is_none_or(|last| last.tsn.wrapping_add(1) == chunk.tsn)
        );
        self.n_bytes += chunk.user_data.len();
        self.chunks.push_back(chunk);
    }

    /// Pops the oldest chunk if it has this TSN.
    pub(crate) fn pop(&mut self, tsn: u32) -> Option<ChunkPayloadData> {
        if self.index(tsn) != Some(0) {
            return None;
        }
        self.set_retransmit(tsn, false);
        let chunk = self.chunks.pop_front()?;
        self.n_bytes -= chunk.user_data.len();
        Some(chunk)
    }

    pub(crate) fn get(&self, tsn: u32) -> Option<&ChunkPayloadData> {
        self.chunks.get(self.index(tsn)?)
    }

    /// For what has no part in the sums: neither `user_data` nor `retransmit`.
    pub(crate) fn get_mut(&mut self, tsn: u32) -> Option<&mut ChunkPayloadData> {
        let index = self.index(tsn)?;
        self.chunks.get_mut(index)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &ChunkPayloadData> {
        self.chunks.iter()
    }

    /// Marks a chunk to be retransmitted, or takes that back.
    pub(crate) fn set_retransmit(&mut self, tsn: u32, retransmit: bool) {
        let Some(index) = self.index(tsn) else {
            return;
        };
        let chunk = &mut self.chunks[index];
        if chunk.retransmit != retransmit {
            chunk.retransmit = retransmit;
            if retransmit {
                self.retransmit_bytes += chunk.user_data.len();
                self.retransmit_len += 1;
            } else {
                self.retransmit_bytes -= chunk.user_data.len();
                self.retransmit_len -= 1;
            }
        }
    }

    /// Abandon siblings by identity, including nonconsecutive TSNs.
    pub(crate) fn abandon_message(&mut self, message_id: u64) -> usize {
        let before = self.n_bytes;
        for index in 0..self.chunks.len() {
            if self.chunks[index].message_id == message_id {
                self.set_retransmit(self.chunks[index].tsn, false);
                let chunk = &mut self.chunks[index];
                self.n_bytes -= chunk.user_data.len();
                chunk.user_data.clear();
                chunk.abandoned = true;
            }
        }
        before - self.n_bytes
    }

    pub(crate) fn mark_all_to_retransmit(&mut self) {
        for index in 0..self.chunks.len() {
            let chunk = &self.chunks[index];
            if !chunk.acked && !chunk.abandoned {
                self.set_retransmit(chunk.tsn, true);
            }
        }
    }

    pub(crate) fn mark_as_acked(&mut self, tsn: u32) -> usize {
        self.set_retransmit(tsn, false);
        let Some(chunk) = self.get_mut(tsn) else {
            return 0;
        };
        chunk.acked = true;
        let n = chunk.user_data.len();
        chunk.user_data.clear();
        self.n_bytes -= n;
        n
    }

    pub(crate) fn get_num_bytes(&self) -> usize {
        self.n_bytes
    }

    pub(crate) fn retransmit_bytes(&self) -> usize {
        self.retransmit_bytes
    }

    pub(crate) fn retransmit_len(&self) -> usize {
        self.retransmit_len
    }

    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn contains_stream(&self, stream_identifier: u16) -> bool {
        let mut chunks = self.chunks.iter();
        chunks.any(|chunk| chunk.stream_identifier == stream_identifier)
    }
}
