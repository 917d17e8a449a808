//! Early flows: chunks and credit that arrive by carriers before the flow's TCP connection is established here.

use std::collections::BTreeMap;

use bytes::Bytes;
use vtl_proto::frame::{CarrierId, FlowId};

use crate::flow::INITIAL_CREDIT;

/// Memory limit of an association's early flows, bytes.
const MAX_EARLY: usize = 1 << 20;
/// Timeout of an early flow, ns: allows for the handshake's last segment to be lost twice.
const EARLY_NS: u64 = 4_000_000_000;

/// Frames received of one flow.
#[derive(Debug)]
pub(super) struct Early {
    pub(super) since: u64,
    pub(super) chunks: Vec<EarlyChunk>,
    /// Credit in a CONFIRM: the peer knows the flow,
    pub(super) limit: Option<u64>,
    /// and whether it marks the flow loss-tolerant.
    pub(super) tolerant: bool,
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
    /// Memory in bytes, overhead included: a peer may send any number of small chunks.
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

    /// Finds or creates an entry; also for a flow that this host is opening, which the peer may know first.
    fn entry(&mut self, now_ns: u64, id: FlowId) -> &mut Early {
        let cost = &mut self.cost;
        self.flows.entry(id).or_insert_with(|| {
            let early = Early {
                since: now_ns,
                chunks: Vec::new(),
                limit: None,
                tolerant: false,
            };
            *cost += early.cost();
            early
        })
    }

    /// Stores credit, without which the flow's first bytes would wait, and the mark. False if the memory limit is
    /// exceeded.
    pub(super) fn keep_credit(
        &mut self,
        now_ns: u64,
        id: FlowId,
        limit: u64,
        tolerant: bool,
    ) -> bool {
        let early = self.entry(now_ns, id);
        early.limit = early.limit.max(Some(limit));
        early.tolerant |= tolerant;
        self.cost <= MAX_EARLY
    }

    /// Stores a chunk. False if it exceeds the initial credit or the memory limit.
    pub(super) fn keep_chunk(&mut self, now_ns: u64, id: FlowId, chunk: EarlyChunk) -> bool {
        let cost = chunk.cost();
        let fits = chunk.offset + chunk.bytes.len() as u64 <= INITIAL_CREDIT;
        self.entry(now_ns, id).chunks.push(chunk);
        self.cost += cost;
        fits && self.cost <= MAX_EARLY
    }

    /// Flows that have timed out.
    pub(super) fn late(&self, now_ns: u64) -> Vec<FlowId> {
        let is_late = |early: &Early| now_ns.saturating_sub(early.since) >= EARLY_NS;
        let late = self.flows.iter().filter(|(_, early)| is_late(early));
        late.map(|(id, _)| *id).collect()
    }
}
