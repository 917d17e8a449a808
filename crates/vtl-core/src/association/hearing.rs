//! The carrier by which a flow's chunks arrive: CONFIRM goes by that one.

use vtl_proto::frame::CarrierId;

/// Where flows are spread, CONFIRM stays with one carrier as long as that delivers: it leaves it for one that has brought
/// so many bytes in a row,
const MAX_HEARD: u64 = 16 << 10;
/// or anything when its own one has brought nothing for so long, ns.
const SILENT_NS: u64 = 250_000_000;

/// What a flow was heard by.
#[derive(Debug, Default)]
pub(super) struct Hearing {
    by: Option<CarrierId>,
    /// When it was heard last.
    at_ns: u64,
    /// Bytes by others since.
    overheard: u64,
}

impl Hearing {
    /// The carrier; `None`: no chunk has arrived by one that is up.
    pub(super) fn by(&self) -> Option<CarrierId> {
        self.by
    }

    /// Notes a chunk that arrived by a carrier. `is_spread`: the peer sends by several. Returns whether it is another
    /// carrier than before: what was said by that one may not have arrived.
    pub(super) fn note(
        &mut self,
        now_ns: u64,
        carrier: CarrierId,
        bytes: u64,
        is_spread: bool,
    ) -> bool {
        let is_other = self.by.is_some_and(|before| before != carrier);
        self.overheard = match is_other {
            true => self.overheard.saturating_add(bytes),
            false => 0,
        };
        let is_silent = now_ns.saturating_sub(self.at_ns) >= SILENT_NS;
        let stays = is_spread && is_other && self.overheard < MAX_HEARD && !is_silent;
        if !stays {
            self.by = Some(carrier);
            self.at_ns = now_ns;
            self.overheard = 0;
        }
        is_other && !stays
    }

    /// Forgets a carrier that has broken.
    pub(super) fn broken(&mut self, carrier: CarrierId) {
        self.by.take_if(|by| *by == carrier);
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use vtl_proto::frame::Side;

    use super::*;

    const fn carrier(number: u32) -> CarrierId {
        CarrierId {
            opener: Side::Local,
            number,
        }
    }

    #[test]
    fn hearing__follows_the_last_chunk_unless_flows_are_spread() {
        let mut hearing = Hearing::default();
        for (number, is_other) in [(1, false), (2, true), (1, true)] {
            assert_eq!(hearing.note(0, carrier(number), 1, false), is_other);
            assert_eq!(hearing.by(), Some(carrier(number)));
        }
        for _ in 0..3 {
            assert!(!hearing.note(0, carrier(2), MAX_HEARD - 1, true));
            assert_eq!(hearing.by(), Some(carrier(1)), "it still delivers");
            hearing.note(0, carrier(1), 1, true);
        }
        assert!(!hearing.note(0, carrier(2), MAX_HEARD - 1, true));
        assert!(hearing.note(0, carrier(2), 1, true));
        assert_eq!(hearing.by(), Some(carrier(2)), "it delivers no more");
        hearing.broken(carrier(1));
        assert_eq!(hearing.by(), Some(carrier(2)));
        hearing.broken(carrier(2));
        assert_eq!(hearing.by(), None);
        assert!(!hearing.note(0, carrier(1), 1, true));
        assert_eq!(hearing.by(), Some(carrier(1)), "any is better than none");
    }

    #[test]
    fn hearing__leaves_a_silent_carrier_at_the_first_chunk_by_another() {
        let mut hearing = Hearing::default();
        hearing.note(5, carrier(1), 1, true);
        assert!(!hearing.note(4 + SILENT_NS, carrier(2), 1, true));
        assert!(hearing.note(5 + SILENT_NS, carrier(2), 1, true));
        assert!(!hearing.note(6 + SILENT_NS, carrier(1), 1, true));
        assert_eq!(hearing.by(), Some(carrier(2)));
    }
}
