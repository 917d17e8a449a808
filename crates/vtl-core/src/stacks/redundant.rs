//! Each chunk by all stacks with room: what one loses or delays another one brings. Bulk gets no copy from a stack that
//! is slower, as that has no room. A stack that is late gets its copy, too: where little is sent, one lost packet makes it
//! look so.

use super::{Picks, Schedule, StackState, with_room};

pub(super) struct Redundant;

impl Schedule for Redundant {
    fn pick(&mut self, stacks: &[StackState], _backlog: u64) -> Picks {
        if with_room(stacks).next().is_none() {
            return Picks::NONE;
        }
        let all = stacks
            .iter()
            .enumerate()
            .filter(|(_, stack)| stack.has_room);
        all.fold(Picks::NONE, |all, (place, _)| all.and(place))
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::tests::{full, stack};
    use super::*;

    #[test]
    fn redundant__all_with_room() {
        let [a, b, c] = [stack(1, 60, 1), stack(2, 20, 100), stack(3, 5, 5)];
        assert_eq!(Redundant.pick(&[a, b, c], 1), Picks::one(0).and(1).and(2));
        let stacks = [a, full(b, 1), c];
        assert_eq!(Redundant.pick(&stacks, 1), Picks::one(0).and(2));
        let late = StackState { is_late: true, ..a };
        assert_eq!(Redundant.pick(&[late, c], 1), Picks::one(0).and(1));
        let none = Redundant.pick(&[late, full(c, 1)], 1);
        assert_eq!(none, Picks::NONE, "the one that delivers comes first");
    }
}
