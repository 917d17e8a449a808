//! Packets of a reliable session that lie in the receive ring behind a gap: what of them was read
//! already, before their turn comes.

use std::collections::BTreeMap;

/// Packets behind a gap; no more than the ring holds.
#[derive(Default)]
pub(super) struct Early {
    /// Those that were looked at, by 64: bit n of word w is packet 64 w + n.
    seen: BTreeMap<u64, u64>,
    /// Those of which frames were taken, and which: as [`vtl_proto::mux::Mux::handle_early`] says.
    taken: BTreeMap<u64, u128>,
}

impl Early {
    /// The packet's turn has come: the frames of it that were taken.
    pub(super) fn turn(&mut self, packet: u64) -> u128 {
        if self.taken.is_empty() {
            return 0;
        }
        self.taken.remove(&packet).unwrap_or(0)
    }

    /// Looks at packets that have come since the last time, of the `slots` from `first` on, of which
    /// `arrived` says which are there, for 64 at a time. `take` gets a packet's number and what was
    /// taken of it, and says what is now.
    ///
    /// A packet that fills one of several gaps may free frames of those behind it, so these are
    /// looked at once more.
    pub(super) fn look(
        &mut self,
        first: u64,
        slots: u64,
        arrived: impl Fn(u64) -> Option<u64>,
        take: &mut impl FnMut(u64, u128) -> u128,
    ) {
        if !self.seen.is_empty() {
            self.seen = self.seen.split_off(&(first / 64));
        }
        let end = first + slots;
        let mut freed = false;
        for word in first / 64..end.div_ceil(64) {
            let Some(there) = arrived(word) else { break };
            let place = |packet: u64| packet.saturating_sub(word * 64).min(64);
            let below = |n: u64| u64::MAX.checked_shr(64 - n as u32).unwrap_or(0);
            let there = there & below(place(end)) & !below(place(first));
            if there == 0 {
                continue;
            }
            let seen = self.seen.entry(word).or_insert(0);
            let mut left = there & if freed { u64::MAX } else { !*seen };
            *seen |= there;
            let known = *seen;
            while left != 0 {
                let bit = left & left.wrapping_neg();
                left &= !bit;
                let packet = word * 64 + u64::from(bit.trailing_zeros());
                let before = self.taken.get(&packet).copied().unwrap_or(0);
                let taken = take(packet, before);
                if taken == before {
                    continue;
                }
                self.taken.insert(packet, taken);
                if !freed {
                    freed = true;
                    left = there & known & !(bit | (bit - 1));
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    /// Which packets a look takes, of those in `there`; each is taken if `fits`.
    fn look(early: &mut Early, first: u64, there: &[u64], fits: impl Fn(u64) -> bool) -> Vec<u64> {
        let mut looked = Vec::new();
        let last = there.iter().max().map_or(0, |last| last / 64);
        let arrived = |word: u64| {
            let bits = there.iter().filter(|p| **p / 64 == word);
            (word <= last).then(|| bits.fold(0, |all, p| all | 1 << (p % 64)))
        };
        early.look(first, 128, arrived, &mut |packet, taken| {
            looked.push(packet);
            taken | u128::from(fits(packet))
        });
        looked
    }

    #[test]
    fn look__sees_each_packet_once() {
        let mut early = Early::default();
        let none = |_| false;
        assert_eq!(look(&mut early, 10, &[5, 12, 70], none), [12, 70]);
        assert_eq!(
            look(&mut early, 10, &[12, 13, 70, 137, 138], none),
            [13, 137]
        );
        assert_eq!(look(&mut early, 11, &[12, 13, 70, 137, 138], none), [138]);
        assert_eq!(look(&mut early, 64, &[70, 137, 138], none), [0; 0]);
        assert_eq!(
            early.seen.keys().next(),
            Some(&1),
            "what has passed is gone"
        );
        assert_eq!(early.turn(70), 0);
    }

    #[test]
    fn look__sees_again_what_lies_behind_one_that_was_taken() {
        let mut early = Early::default();
        let is = |wanted: u64| move |packet| packet == wanted;
        assert_eq!(look(&mut early, 0, &[2, 4, 5, 80], is(0)), [2, 4, 5, 80]);
        assert_eq!(look(&mut early, 0, &[2, 3, 4, 5, 80], is(3)), [3, 4, 5, 80]);
        assert_eq!(look(&mut early, 0, &[2, 3, 4, 5, 80], is(3)), [0; 0]);
        assert_eq!((early.turn(3), early.turn(3), early.turn(4)), (1, 0, 0));
        assert!(early.taken.is_empty());
    }
}
