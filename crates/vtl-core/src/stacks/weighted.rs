//! In proportion to delivery rates: start-time fair queueing (Goyal et al., 1996) turned round, each stack's tag being
//! the time that it needs for what it has got.

use std::collections::BTreeMap;

use vtl_proto::frame::CarrierId;

use super::{MAX_CHUNK, Picks, Schedule, StackState, with_room};

/// How far a stack without room may fall behind the others, ns: what it missed by more it need not make up for.
const BEHIND_NS: u64 = 100_000_000;

#[derive(Default)]
pub(super) struct Weighted {
    tags: BTreeMap<CarrierId, u64>,
}

impl Schedule for Weighted {
    fn pick(&mut self, stacks: &[StackState], backlog: u64) -> Picks {
        self.tags
            .retain(|id, _| stacks.iter().any(|stack| stack.id == *id));
        let floor = self
            .tags
            .values()
            .max()
            .map_or(0, |max| max.saturating_sub(BEHIND_NS));
        let end = |stack: &StackState| {
            let tag = self
                .tags
                .get(&stack.id)
                .map_or(floor, |tag| floor.max(*tag));
            let len = u128::from(backlog.min(MAX_CHUNK).min(stack.chunk_len()));
            let takes = len * 1_000_000_000 / u128::from(stack.rate());
            tag.saturating_add(u64::try_from(takes).unwrap_or(u64::MAX))
        };
        let next = with_room(stacks).map(|(place, stack)| (end(stack), place, stack.id));
        let Some((end, place, id)) = next.min() else {
            return Picks::NONE;
        };
        self.tags.insert(id, end);
        Picks::one(place)
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::super::tests::{full, stack};
    use super::*;

    /// Bytes that each of the stacks gets of `chunks` chunks.
    fn shares(weighted: &mut Weighted, stacks: &[StackState], chunks: usize) -> Vec<u64> {
        let mut got = vec![0; stacks.len()];
        for _ in 0..chunks {
            for place in weighted.pick(stacks, 1 << 20).places() {
                got[place] += stacks[place].chunk_len();
            }
        }
        got
    }

    #[test]
    fn weighted__by_rate() {
        let stacks = [stack(1, 20, 30), stack(2, 60, 90)];
        let got = shares(&mut Weighted::default(), &stacks, 400);
        let share = got[1] as f64 / got[0] as f64;
        assert!((2.9..3.1).contains(&share), "{got:?}");
    }

    #[test]
    fn weighted__what_a_full_one_missed_is_bounded() {
        let [a, b] = [stack(1, 20, 50), stack(2, 20, 50)];
        let mut weighted = Weighted::default();
        shares(&mut weighted, &[a, full(b, 10)], 1000);
        let got = shares(&mut weighted, &[a, b], 1000);
        let ahead = (got[1] - got[0]) * 1000 / a.rate;
        assert!((90..=110).contains(&ahead), "{ahead} ms");
    }
}
