//! Earliest completion first (Lim, Nahum, Towsley, Gibbens: ECF, CoNEXT 2017): the stack by which a chunk arrives first
//! gets it. Where that one is full, a slower one does if it brings the chunk before the faster one has brought all
//! that waits; otherwise the chunk waits, since it would arrive later than what comes behind it.

use super::{MAX_CHUNK, Picks, Schedule, StackState, delivering, with_room};

pub(super) struct Ecf;

impl Schedule for Ecf {
    fn pick(&mut self, stacks: &[StackState], backlog: u64) -> Picks {
        let len = backlog.min(MAX_CHUNK);
        let arrival =
            |(_, stack): &(usize, &StackState)| stack.arrival_ns(len.min(stack.chunk_len()));
        let Some((place, first)) = delivering(stacks).min_by_key(arrival) else {
            return Picks::NONE;
        };
        if first.has_room {
            return Picks::one(place);
        }
        let next = with_room(stacks).min_by_key(arrival);
        let all_there = first.arrival_ns(backlog);
        next.filter(|next| arrival(next) < all_there)
            .map_or(Picks::NONE, |(place, _)| Picks::one(place))
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::tests::{full, stack};
    use super::*;

    #[test]
    fn ecf__the_faster_one_while_it_has_room() {
        let stacks = [stack(1, 60, 50), stack(2, 20, 50)];
        assert_eq!(Ecf.pick(&stacks, 1 << 20), Picks::one(1));
    }

    #[test]
    fn ecf__the_slower_one_helps_with_much_only() {
        // 10 ms of queue and 10 ms of path; the other one takes 30.
        let stacks = [full(stack(1, 20, 50), 10), stack(2, 60, 50)];
        assert_eq!(Ecf.pick(&stacks, 16 << 10), Picks::NONE);
        assert_eq!(Ecf.pick(&stacks, 256 << 10), Picks::one(1));
    }

    #[test]
    fn ecf__a_very_slow_one_waits_for_very_much() {
        let stacks = [full(stack(1, 20, 50), 10), stack(2, 600, 1)];
        assert_eq!(Ecf.pick(&stacks, 1 << 20), Picks::NONE);
    }

    #[test]
    fn ecf__a_queue_makes_the_shorter_path_the_longer_one() {
        let long_queue = StackState {
            has_room: true,
            ..full(stack(1, 20, 50), 100)
        };
        assert_eq!(
            Ecf.pick(&[long_queue, stack(2, 60, 50)], 1000),
            Picks::one(1)
        );
    }
}
