//! One path, and the others as its backup: they are used while the first one does not deliver.

use super::{Picks, Schedule, StackState, delivering};

pub(super) struct Primary;

impl Schedule for Primary {
    fn pick(&mut self, stacks: &[StackState], _backlog: u64) -> Picks {
        let first = delivering(stacks).min_by_key(|(_, stack)| (stack.path, stack.id));
        first
            .filter(|(_, stack)| stack.has_room)
            .map_or(Picks::NONE, |(place, _)| Picks::one(place))
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::tests::{full, stack};
    use super::*;

    #[test]
    fn primary__others_only_while_it_does_not_deliver() {
        let [first, second] = [stack(1, 60, 1), stack(2, 20, 100)];
        assert_eq!(Primary.pick(&[second, first], 1 << 20), Picks::one(1));
        assert_eq!(
            Primary.pick(&[second, full(first, 9)], 1 << 20),
            Picks::NONE
        );
        let late = StackState {
            is_late: true,
            ..first
        };
        assert_eq!(Primary.pick(&[second, late], 1 << 20), Picks::one(0));
    }
}
