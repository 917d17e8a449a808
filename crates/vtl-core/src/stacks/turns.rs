//! Turns of flows that wait for room in the stacks which they share.

use std::collections::VecDeque;

use vtl_proto::frame::FlowId;

/// Flows that wait for room, first come, first served: one at a time has the turn, and passes it on with each chunk, so
/// that no flow starves, and that looks for room do not multiply with flows.
#[derive(Debug, Default)]
pub struct Turns {
    waiting: VecDeque<FlowId>,
    turn: Option<FlowId>,
}

impl Turns {
    /// Whether a flow may place a chunk now: it has the turn, or nobody waits.
    pub fn may_place(&self, flow: FlowId) -> bool {
        self.turn == Some(flow) || self.turn.is_none() && self.waiting.is_empty()
    }

    /// Has a flow wait: behind all others, or before them if it has found no room in its turn.
    pub fn wait(&mut self, flow: FlowId) {
        if self.turn == Some(flow) {
            self.turn = None;
            self.waiting.push_front(flow);
        } else if !self.waiting.contains(&flow) {
            self.waiting.push_back(flow);
        }
    }

    /// Passes the turn on, behind a chunk or when it is time to look for room again. Returns the flow to wake; `None`:
    /// none waits.
    pub fn pass(&mut self) -> Option<FlowId> {
        self.turn = self.waiting.pop_front();
        self.turn
    }

    /// Has the turn passed on by the flow that had it; nothing for others.
    pub fn placed(&mut self, flow: FlowId) -> Option<FlowId> {
        match self.turn == Some(flow) {
            true => self.pass(),
            false => None,
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::collections::BTreeMap;

    use vtl_proto::frame::Side;

    use super::*;

    fn flow(number: u32) -> FlowId {
        FlowId {
            opener: Side::Local,
            number,
        }
    }

    #[test]
    fn turns__every_flow_has_its_share_of_little_room() {
        let mut turns = Turns::default();
        let mut placed: BTreeMap<FlowId, u32> = BTreeMap::new();
        // All want to place all the time, and there is room for three chunks at each look.
        for _ in 0..1000 {
            let mut room = 3;
            let mut woken = turns.pass();
            let mut looks = 0;
            while let Some(next) = woken.take() {
                looks += 1;
                assert!(turns.may_place(next));
                if room == 0 {
                    turns.wait(next);
                    break;
                }
                room -= 1;
                *placed.entry(next).or_default() += 1;
                woken = turns.placed(next);
                assert!(!turns.may_place(next), "it goes behind the others");
                turns.wait(next);
            }
            for number in 0..10 {
                if !turns.may_place(flow(number)) || looks == 0 {
                    turns.wait(flow(number));
                }
            }
            assert!(looks <= 4, "{looks}");
        }
        let (min, max) = (placed.values().min(), placed.values().max());
        assert_eq!(placed.len(), 10);
        assert!(
            max.zip(min).is_some_and(|(max, min)| max - min <= 1),
            "{placed:?}"
        );
    }

    #[test]
    fn turns__one_that_has_gone_holds_up_nobody() {
        let mut turns = Turns::default();
        assert!(turns.may_place(flow(1)));
        turns.wait(flow(1));
        turns.wait(flow(2));
        turns.wait(flow(1));
        assert_eq!(turns.pass(), Some(flow(1)));
        assert!(!turns.may_place(flow(2)));
        // It never places: the next look passes it by.
        assert_eq!(turns.pass(), Some(flow(2)));
        assert_eq!(turns.placed(flow(1)), None);
        turns.wait(flow(2));
        assert_eq!(
            turns.pass(),
            Some(flow(2)),
            "found no room: still the first"
        );
        assert_eq!(turns.placed(flow(2)), None);
        assert!(turns.may_place(flow(3)));
    }
}
