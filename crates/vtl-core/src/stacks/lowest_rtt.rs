//! The lowest round-trip time of the stacks with room: the default of Linux's MPTCP before 5.19, and of its
//! out-of-tree predecessor.

use super::{Picks, Schedule, StackState, with_room};

pub(super) struct LowestRtt;

impl Schedule for LowestRtt {
    fn pick(&mut self, stacks: &[StackState], _backlog: u64) -> Picks {
        let lowest = with_room(stacks).min_by_key(|(_, stack)| stack.rtt_ns);
        lowest.map_or(Picks::NONE, |(place, _)| Picks::one(place))
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::tests::{full, stack};
    use super::*;

    #[test]
    fn lowest_rtt__of_those_with_room() {
        let [near, far] = [stack(1, 20, 1), stack(2, 60, 100)];
        assert_eq!(LowestRtt.pick(&[far, near], 1000), Picks::one(1));
        assert_eq!(LowestRtt.pick(&[far, full(near, 1)], 1000), Picks::one(0));
    }
}
