//! One call of egress, by any driver: its sessions, their quotas of frames, and when each is due next.

use std::io;

use vtl_bpf::{
    pump::{BATCH, Served, Turn},
    sessions::{Session, SessionTable},
};
use vtl_proto::intf;

use super::schedule::Schedule;
use crate::broker::MS;

/// Maximum delay of paced packets for batching.
const PACE_NS: u64 = intf::VTL_PACE_SLEEP_US as u64 * 1_000;
/// Retry interval after a failed call, and if the interface's queue is full or the session's egress busy.
const RETRY_NS: u64 = 10 * MS;
const QUEUE_NS: u64 = MS / 10;

/// A call being assembled. The egress of its sessions is locked.
pub(in crate::broker) struct Call {
    now: u64,
    /// Limit of frames, and frames so far.
    max: u32,
    frames: u32,
    turns: Vec<Turn>,
    /// Per turn, when it is due next if pacing limits its quota; otherwise 0.
    paced: Vec<u64>,
}

impl Call {
    pub(in crate::broker) fn new(now: u64, max: u32) -> Self {
        Self {
            now,
            max,
            frames: 0,
            turns: Vec::with_capacity(intf::VTL_TURNS as usize),
            paced: Vec::with_capacity(intf::VTL_TURNS as usize),
        }
    }

    /// Changes the limit of frames.
    pub(in crate::broker) fn set_max(&mut self, max: u32) {
        self.max = max;
    }

    pub(in crate::broker) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub(in crate::broker) fn is_full(&self) -> bool {
        self.frames >= self.max || self.turns.len() >= intf::VTL_TURNS as usize
    }

    pub(in crate::broker) fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// Adds a session with at most `quantum` frames. Postpones it, and returns false, while its egress is busy.
    pub(in crate::broker) fn add(
        &mut self,
        sid: u32,
        entry: &Session<'_>,
        published: u64,
        quantum: u32,
        schedule: &mut Schedule,
    ) -> bool {
        if !entry.lock_egress() {
            schedule.at(sid, self.now + QUEUE_NS);
            return false;
        }
        // One more, so that egress notices an empty ring.
        let ready = (entry.sendable(published) + 1).min(quantum.into());
        let left = self.max.saturating_sub(self.frames);
        let quota = entry.paced(self.now).min(ready).min(left.into()) as u32;
        self.frames += quota;
        self.turns.push(Turn { sid, quota });
        // A call costs as much as ten packets, so the next one waits for a batch, or for the tolerated delay of
        // pacing.
        let batch = entry.pacing_gap_ns() * u64::from(BATCH);
        let short = u64::from(quota) < ready && self.frames < self.max;
        self.paced.push(if short {
            self.now + batch.min(PACE_NS)
        } else {
            0
        });
        true
    }

    /// Ends a call, made or not: unlocks its sessions and schedules them. `idle` returns when to check again on
    /// a session without anything to send, by its number of transmissions.
    pub(in crate::broker) fn settle(
        self,
        run: Option<io::Result<Served>>,
        table: &SessionTable,
        schedule: &mut Schedule,
        mut idle: impl FnMut(u32, u64) -> u64,
    ) {
        let (served, later) = match run {
            Some(Ok(served)) => {
                let stuck = served.turns == 0 && served.left == self.turns[0].quota;
                (served.turns, stuck.then_some(QUEUE_NS))
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "egress: cannot transmit: tried again");
                (0, Some(RETRY_NS))
            }
            None => (0, Some(RETRY_NS)),
        };
        let mut unserved = Vec::new();
        for (i, (turn, paced)) in self.turns.iter().zip(&self.paced).enumerate() {
            let Some(entry) = table.get(turn.sid) else {
                continue;
            };
            let wake = match later {
                Some(later) => self.now + later,
                None if i >= served => {
                    unserved.push(turn.sid);
                    0
                }
                None => match entry.wake_ns() {
                    0 => *paced,
                    u64::MAX => idle(turn.sid, entry.sent()),
                    wake => wake,
                },
            };
            let again = entry.unlock_egress(wake != u64::MAX);
            if i < served || later.is_some() {
                schedule.at(turn.sid, if again { 0 } else { wake });
            }
        }
        for sid in unserved.into_iter().rev() {
            schedule.first(sid);
        }
    }
}
