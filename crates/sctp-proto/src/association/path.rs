//! What an association does with the model of its path (`congestion`): when a packet may leave, and
//! when it counts as lost.

use alloc::collections::VecDeque;
use std::time::Instant;

use super::{
    Association,
    congestion::{Model, PathMeasured},
    timer::Timer,
};

/// In place of `cwnd`, `ssthresh` and fast recovery.
#[derive(Debug, Default)]
pub(crate) struct Path {
    /// Since the first DATA.
    model: Option<Model>,
    /// TSNs and transmissions that may be in flight, in the order of sending.
    in_order: VecDeque<(u32, u64)>,
    /// The receiver window, as the last SACK has it.
    pub(crate) peer_window: u32,
    /// Something waits for its time.
    pub(crate) paced: Option<Instant>,
}

impl Path {
    pub(crate) fn model(&mut self, mtu: u32, now: Instant) -> &mut Model {
        self.model.get_or_insert_with(|| Model::new(mtu, now))
    }
}

impl Association {
    /// What the model of the path has measured; `None` without one, and before the first DATA.
    pub fn measured(&self) -> Option<PathMeasured> {
        self.path.as_ref()?.model.as_ref().map(Model::figures)
    }

    /// Whether a chunk may leave by the model: `None` without one. `first`: it is the earliest one
    /// in flight, whose retransmission the window does not delay (RFC 9260, section 7.2.4).
    pub(crate) fn path_allows(&mut self, len: usize, first: bool, now: Instant) -> Option<bool> {
        let path = self.path.as_mut()?;
        let in_flight = self.outbound_queue.pipe();
        let model = path.model(self.mtu, now);
        if !first && in_flight + len > model.cwnd() as usize {
            return Some(false);
        }
        let wait = model.wait_until(now);
        path.paced = wait;
        Some(wait.is_none())
    }

    /// Whether the peer has room for a retransmission of so much.
    pub(crate) fn peer_has_room(&self, len: usize) -> bool {
        let window = self.path.as_ref().map_or(0, |path| path.peer_window);
        self.outbound_queue.pipe() + len <= window as usize
    }

    /// A chunk in flight leaves, for the first time or again.
    pub(crate) fn path_sent(&mut self, tsn: u32, now: Instant) {
        let Some(path) = &mut self.path else {
            return;
        };
        self.outbound_queue.set_retransmit(tsn, false);
        let in_flight = self.outbound_queue.pipe();
        let Some(chunk) = self.outbound_queue.get_mut(tsn) else {
            return;
        };
        let len = chunk.user_data.len();
        let sent = path.model(self.mtu, now).sent(len, in_flight - len, now);
        chunk.sent = Some(sent);
        path.in_order.push_back((tsn, sent.order));
    }

    /// Nothing waits to be sent, and the window has room.
    pub(crate) fn note_application_limit(&mut self) {
        if let Some(model) = self.path.as_mut().and_then(|path| path.model.as_mut())
            && self.outbound_queue.pending_len() == 0
            && self.outbound_queue.retransmit_len() == 0
        {
            model.app_limited(self.outbound_queue.pipe());
        }
    }

    /// A chunk counts as lost, and is to be retransmitted.
    pub(crate) fn count_lost(&mut self, tsn: u32) {
        let len = self
            .outbound_queue
            .get(tsn)
            .map_or(0, |chunk| chunk.user_data.len());
        self.outbound_queue.set_retransmit(tsn, true);
        if let Some(model) = self.path.as_mut().and_then(|path| path.model.as_mut()) {
            model.lost(len);
        }
    }

    /// Finds what has been under way for longer than something that was sent after it and has
    /// arrived (RFC 8985), retransmissions as well.
    pub(crate) fn find_losses(&mut self, now: Instant) {
        loop {
            let Some(path) = &mut self.path else {
                return;
            };
            self.timers.set(Timer::Loss, None);
            let (Some(model), Some(&(tsn, order))) = (&path.model, path.in_order.front()) else {
                return;
            };
            let chunk = self.outbound_queue.get(tsn);
            let open = chunk.filter(|c| !c.acked && !c.abandoned && !c.retransmit);
            let sent = open.and_then(|chunk| chunk.sent);
            match sent.filter(|sent| sent.order == order) {
                None => {
                    path.in_order.pop_front();
                }
                Some(sent) => match model.lost_at(&sent) {
                    None => return,
                    Some(at) if at > now => {
                        self.timers.set(Timer::Loss, Some(at));
                        return;
                    }
                    Some(_) => {
                        path.in_order.pop_front();
                        self.count_lost(tsn);
                    }
                },
            }
        }
    }

    /// A SACK has been processed.
    pub(crate) fn path_acknowledged(&mut self, peer_window: u32, now: Instant) {
        self.find_losses(now);
        let in_flight = self.outbound_queue.pipe();
        if let Some(path) = &mut self.path {
            path.peer_window = peer_window;
            path.model(self.mtu, now).sack(in_flight, now);
        }
    }

    /// The retransmission timer has expired: the earliest chunk in flight counts as lost, and those
    /// that have been under way for longer than a round trip (RFC 8985, section 6.3).
    pub(crate) fn path_timed_out(&mut self, now: Instant) {
        let Some(path) = &mut self.path else {
            return;
        };
        let model = path.model(self.mtu, now);
        model.timed_out();
        let first = self.outbound_queue.earliest_outstanding_tsn();
        let lost = self.outbound_queue.outstanding(|chunk| {
            Some(chunk.tsn) == first || chunk.sent.is_none_or(|s| model.is_overdue(&s, now))
        });
        for tsn in lost {
            self.count_lost(tsn);
        }
    }
}
