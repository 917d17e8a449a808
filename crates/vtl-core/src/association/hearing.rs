//! The carrier by which a flow's chunks arrive: CONFIRM goes by that one.

use vtl_proto::frame::CarrierId;

/// Chunks in a row by another carrier after which CONFIRM leaves its own, where flows are spread: all deliver, so it stays
/// with one, but not with one that delivers no more.
const SILENT: u32 = 32;

/// What a flow was heard by.
#[derive(Debug, Default)]
pub(super) struct Hearing {
    by: Option<CarrierId>,
    /// Chunks by others since.
    overheard: u32,
}

impl Hearing {
    /// The carrier; `None`: no chunk has arrived by one that is up.
    pub(super) fn by(&self) -> Option<CarrierId> {
        self.by
    }

    /// Notes a chunk that arrived by a carrier. `is_spread`: the peer sends by several.
    pub(super) fn note(&mut self, carrier: CarrierId, is_spread: bool) {
        let is_other = self.by.is_some_and(|before| before != carrier);
        self.overheard = if is_other { self.overheard + 1 } else { 0 };
        if !(is_spread && is_other && self.overheard < SILENT) {
            self.by = Some(carrier);
            self.overheard = 0;
        }
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
        for number in [1, 2, 1] {
            hearing.note(carrier(number), false);
            assert_eq!(hearing.by(), Some(carrier(number)));
        }
        for _ in 0..SILENT - 1 {
            hearing.note(carrier(2), true);
            assert_eq!(hearing.by(), Some(carrier(1)), "it still delivers");
        }
        hearing.note(carrier(1), true);
        for _ in 0..SILENT {
            hearing.note(carrier(2), true);
        }
        assert_eq!(hearing.by(), Some(carrier(2)), "it delivers no more");
        hearing.broken(carrier(1));
        assert_eq!(hearing.by(), Some(carrier(2)));
        hearing.broken(carrier(2));
        assert_eq!(hearing.by(), None);
        hearing.note(carrier(1), true);
        assert_eq!(hearing.by(), Some(carrier(1)), "any is better than none");
    }
}
