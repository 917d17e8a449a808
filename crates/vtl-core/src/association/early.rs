//! What carriers bring of flows whose TCP connection is not established here yet.

use std::collections::BTreeMap;

use bytes::Bytes;
use vtl_proto::frame::{CarrierId, FlowId};

use crate::flow::INITIAL_CREDIT;

/// Memory in bytes of an association's early flows at most.
const MAX_EARLY: usize = 1 << 20;
/// How long they are kept, nanoseconds: the handshake's last segment may be lost twice.
const EARLY_NS: u64 = 4_000_000_000;

/// What has come of one flow.
#[derive(Debug)]
pub(super) struct Early {
    since: u64,
    pub(super) chunks: Vec<EarlyChunk>,
    /// Credit: the peer knows the flow.
    pub(super) limit: Option<u64>,
}

impl Early {
    /// Memory in bytes.
    fn cost(&self) -> usize {
        size_of::<Self>() + self.chunks.iter().map(EarlyChunk::cost).sum::<usize>()
    }
}

/// A chunk of an early flow.
#[derive(Debug)]
pub(super) struct EarlyChunk {
    pub(super) carrier: CarrierId,
    pub(super) offset: u64,
    pub(super) bytes: Bytes,
    pub(super) fin: bool,
    pub(super) urgent: bool,
}

impl EarlyChunk {
    /// Memory in bytes: a peer may send any number of small ones.
    fn cost(&self) -> usize {
        size_of::<Self>() + self.bytes.len()
    }
}

/// The early flows of an association.
#[derive(Debug, Default)]
pub(super) struct EarlyFlows {
    flows: BTreeMap<FlowId, Early>,
    cost: usize,
}

impl EarlyFlows {
    /// Memory in bytes.
    pub(super) fn memory(&self) -> u64 {
        self.cost as u64
    }

    /// Removes a flow.
    pub(super) fn take(&mut self, id: FlowId) -> Option<Early> {
        let early = self.flows.remove(&id)?;
        self.cost -= early.cost();
        Some(early)
    }

    /// Also of a flow that this host has opened, which the other may have heard of first.
    fn entry(&mut self, now_ns: u64, id: FlowId) -> &mut Early {
        let cost = &mut self.cost;
        self.flows.entry(id).or_insert_with(|| {
            let early = Early {
                since: now_ns,
                chunks: Vec::new(),
                limit: None,
            };
            *cost += early.cost();
            early
        })
    }

    /// Keeps credit: without, the flow's first bytes would wait. False if that is too much.
    pub(super) fn keep_credit(&mut self, now_ns: u64, id: FlowId, limit: u64) -> bool {
        let early = self.entry(now_ns, id);
        early.limit = early.limit.max(Some(limit));
        self.cost <= MAX_EARLY
    }

    /// Keeps a chunk. False if that is too much.
    pub(super) fn keep_chunk(&mut self, now_ns: u64, id: FlowId, chunk: EarlyChunk) -> bool {
        let cost = chunk.cost();
        let fits = chunk.offset + chunk.bytes.len() as u64 <= INITIAL_CREDIT;
        self.entry(now_ns, id).chunks.push(chunk);
        self.cost += cost;
        fits && self.cost <= MAX_EARLY
    }

    /// Flows that have waited too long.
    pub(super) fn late(&self, now_ns: u64) -> Vec<FlowId> {
        let is_late = |early: &Early| now_ns.saturating_sub(early.since) >= EARLY_NS;
        let late = self.flows.iter().filter(|(_, early)| is_late(early));
        late.map(|(id, _)| *id).collect()
    }
}
