//! Chunks of a flow that is spread over several stacks: what each has, and what is sent again by another one before a
//! carrier breaks, since it holds up the receiver (MPTCP's opportunistic retransmission, Raiciu et al., NSDI 2012).

use bytes::Bytes;
use vtl_proto::frame::CarrierId;

use super::{Chunk, Retained, SendHalf};
use crate::stacks::StackState;

/// How much earlier a copy has to arrive than the chunk itself, ns.
const WORTH_NS: u64 = 2_000_000;

/// A chunk as a stack has taken it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// The stack's carrier.
    pub carrier: CarrierId,
    /// Bytes of chunks that it had been given then, this one included ([`StackState::given`]).
    pub position: u64,
    /// When it is to arrive.
    pub due_ns: u64,
}

impl Given {
    /// A chunk of `len` bytes, to be given to a stack now.
    pub fn new(now_ns: u64, stack: &StackState, len: u64) -> Self {
        Self {
            carrier: stack.id,
            position: stack.given + len,
            due_ns: now_ns.saturating_add(stack.arrival_ns(len)),
        }
    }
}

/// State of a chunk that was sent by a stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    position: u64,
    due_ns: u64,
    /// Another stack has it, too.
    is_copied: bool,
}

/// A chunk to be sent once more, by another stack: report with [`SendHalf::hastened`], or try again later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hastened {
    /// The chunk.
    pub chunk: Chunk,
    /// Place of the stack in the list.
    pub stack: usize,
    /// Place of the chunk in the retransmission buffer.
    place: usize,
}

impl SendHalf {
    /// Notes that the first `len` bytes of the chunk that [`SendHalf::next`] returned last were sent by these stacks.
    pub fn sent_again_by(&mut self, len: usize, by: &[Given]) {
        if let Some(chunk) = self.take_returned(len) {
            self.retain_by(&chunk, by);
        }
    }

    /// Notes that these bytes, the next ones of the application, were sent by these stacks.
    pub fn sent_new_by(&mut self, bytes: Bytes, urgent: bool, by: &[Given]) {
        let chunk = self.new_chunk(bytes, urgent);
        self.retain_by(&chunk, by);
    }

    fn retain_by(&mut self, chunk: &Chunk, by: &[Given]) {
        for given in by {
            self.retained.push_back(Retained {
                carrier: given.carrier,
                chunk: chunk.clone(),
                spread: Some(Sent {
                    position: given.position,
                    due_ns: given.due_ns,
                    is_copied: by.len() > 1,
                }),
            });
        }
    }

    /// The next chunk to be sent once more, by a stack with room that delivers it earlier: because the stack that has
    /// it is late, or, if `is_idle`, nothing new can be sent, and the flow waits for it alone. Each chunk once.
    pub fn hasten(&self, now_ns: u64, stacks: &[StackState], is_idle: bool) -> Option<Hastened> {
        if !is_idle && stacks.iter().all(|stack| !stack.is_late) {
            return None;
        }
        let retained = self.retained.iter().enumerate();
        let mut hastened = retained.filter_map(|(place, retained)| {
            let (stack, sent) = self.outstanding(stacks, retained)?;
            if sent.is_copied || !(stack.is_late || is_idle) {
                return None;
            }
            let len = retained.chunk.bytes.len() as u64;
            let others = stacks.iter().enumerate();
            let others = others.filter(|(_, other)| {
                other.id != retained.carrier && other.has_room && !other.is_late
            });
            let (place_of, other) = others.min_by_key(|(_, other)| other.arrival_ns(len))?;
            // What is overdue was lost, and comes with the stack's own retransmission.
            let left = match sent.due_ns.checked_sub(now_ns) {
                Some(left) => left,
                None if now_ns - sent.due_ns > stack.rtt_ns => stack.rtt_ns / 2,
                None => 0,
            };
            let is_earlier = other.arrival_ns(len).saturating_add(WORTH_NS) < left;
            (stack.is_late || is_earlier).then(|| Hastened {
                chunk: retained.chunk.clone(),
                stack: place_of,
                place,
            })
        });
        hastened.next()
    }

    /// Notes that a chunk was sent once more, before anything else has changed.
    pub fn hastened(&mut self, hastened: &Hastened, by: Given) {
        let Some(sent) = self
            .retained
            .get_mut(hastened.place)
            .and_then(|retained| retained.spread.as_mut())
        else {
            return;
        };
        sent.is_copied = true;
        self.retained.push_back(Retained {
            carrier: by.carrier,
            chunk: hastened.chunk.clone(),
            spread: Some(Sent {
                position: by.position,
                due_ns: by.due_ns,
                is_copied: true,
            }),
        });
    }

    /// Whether a stack has chunks that have not arrived at the other host.
    pub fn has_outstanding(&self, stacks: &[StackState]) -> bool {
        let mut latest_first = self.retained.iter().rev();
        latest_first.any(|retained| self.outstanding(stacks, retained).is_some())
    }

    /// The stack that has a chunk, and its state there, if the chunk has not arrived.
    fn outstanding<'a>(
        &self,
        stacks: &'a [StackState],
        retained: &Retained,
    ) -> Option<(&'a StackState, Sent)> {
        let sent = retained.spread?;
        if retained.chunk.end() <= self.confirmed {
            return None;
        }
        let mut of_carrier = stacks.iter().filter(|stack| stack.id == retained.carrier);
        let stack = of_carrier.next()?;
        (sent.position > stack.delivered).then_some((stack, sent))
    }

    /// Whether another stack has a chunk whose carrier has broken, too.
    pub(super) fn has_copy(&self, of: &Retained) -> bool {
        let is_copy = |other: &Retained| {
            other.chunk.offset <= of.chunk.offset && other.chunk.end() >= of.chunk.end()
        };
        of.spread.is_some_and(|sent| sent.is_copied) && self.retained.iter().any(is_copy)
    }
}
