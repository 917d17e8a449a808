//! The stacks with room in turn.

use vtl_proto::frame::CarrierId;

use super::{Picks, Schedule, StackState, with_room};

#[derive(Default)]
pub(super) struct RoundRobin {
    last: Option<CarrierId>,
}

impl Schedule for RoundRobin {
    fn pick(&mut self, stacks: &[StackState], _backlog: u64) -> Picks {
        let is_behind = |id: CarrierId| self.last.is_none_or(|last| id > last);
        // `false` comes first.
        let next = with_room(stacks).min_by_key(|(_, stack)| (!is_behind(stack.id), stack.id));
        let Some((place, stack)) = next else {
            return Picks::NONE;
        };
        self.last = Some(stack.id);
        Picks::one(place)
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::tests::{full, stack};
    use super::*;

    #[test]
    fn round_robin__in_turn_past_those_without_room() {
        let mut stacks = [stack(1, 60, 1), stack(2, 20, 100), stack(3, 5, 5)];
        let mut robin = RoundRobin::default();
        let mut turn = |stacks: &[StackState]| robin.pick(stacks, 1).places().next();
        let turns = [(); 4].map(|()| turn(&stacks));
        assert_eq!(turns, [0, 1, 2, 0].map(Some));
        stacks[1] = full(stacks[1], 1);
        assert_eq!([(); 3].map(|()| turn(&stacks)), [2, 0, 2].map(Some));
    }
}
