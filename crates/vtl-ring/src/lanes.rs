//! Partial order.

use std::collections::HashMap;

use vtl_proto::intf;

/// The lanes of a session with partial order: the latest packet of each.
#[derive(Default)]
pub struct Lanes {
    latest: HashMap<u32, u64>,
}

impl Lanes {
    /// Distance, in packets, from `packet` back to its predecessor in `lane`; records `packet` as
    /// the latest. 0 if no predecessor is in the window: then it has arrived.
    pub(super) fn follow(&mut self, lane: u32, packet: u64) -> u32 {
        let window = u64::from(intf::VTL_MAX_WINDOW);
        if self.latest.len() >= 2 * intf::VTL_MAX_WINDOW as usize {
            self.latest.retain(|_, latest| packet - *latest < window);
        }
        let back = self
            .latest
            .insert(lane, packet)
            .map(|latest| packet - latest);
        back.filter(|back| *back < window).unwrap_or(0) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "long, and safe code")]
    fn lanes__follow_their_own() {
        let mut lanes = Lanes::default();
        let follow = [
            (1, 0),
            (2, 1),
            (1, 2),
            (1, 3),
            (2, 4),
            (2, 4 + 32768),
            (1, 3 + 32767),
        ];
        let back = follow.map(|(lane, packet)| lanes.follow(lane, packet));
        assert_eq!(back, [0, 0, 2, 1, 3, 0, 32767]);
        for lane in 0..200_000 {
            lanes.follow(lane, 100_000 + u64::from(lane));
        }
        assert!(lanes.latest.len() <= 65_536);
    }
}
