//! Flows over several stacks at once, each a carrier on a path of its own: by which stack the next bytes go
//! (VirtualStack, section III; PROTOCOL.md, section 7, "Several stacks").
//!
//! A [`Schedule`] decides for each chunk, by what the carriers say of themselves ([`StackState`]). It has no clock and no
//! memory of bytes: what was sent and is to be sent again is the flow's ([`crate::flow::SendHalf`]).

mod backlog;
mod ecf;
mod lowest_rtt;
mod peer_addresses;
mod primary;
mod redundant;
mod round_robin;
mod turns;
mod weighted;

pub use backlog::Backlog;
pub use peer_addresses::{PeerAddresses, is_host};
pub use turns::Turns;

use vtl_proto::{carrier::Scheduler, frame::CarrierId};

/// Maximum length of a chunk, bytes: a stack that turns slow holds up as much.
pub const MAX_CHUNK: u64 = 16 << 10;
/// Minimum length, bytes: about a packet.
const MIN_CHUNK: u64 = 1200;
/// Time that a chunk takes of a slow stack, ns.
const CHUNK_NS: u64 = 10_000_000;
/// Rate of a stack of which none is known, bytes in each round trip: an initial window (RFC 6928).
const INITIAL_WINDOW: u64 = 10 * 1400;

/// The state of a stack, as its carrier tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackState {
    /// The carrier.
    pub id: CarrierId,
    /// Number of its path; 0 is the path of the flow's own connection.
    pub path: u8,
    /// Smoothed round-trip time, ns.
    pub rtt_ns: u64,
    /// Rate at which it sends, bytes/s; 0: unknown.
    pub rate: u64,
    /// Rate of the link layer of this host's interface, bytes/s; 0: unknown. It sends no faster, whatever it believes.
    pub link_rate: u64,
    /// Bytes that it was given and that have not been acknowledged, sent or not.
    pub unacked: u64,
    /// Whether it takes a chunk now.
    pub has_room: bool,
    /// Whether nothing has come back for longer than a round trip, although something is in flight.
    pub is_late: bool,
    /// Bytes of chunks that it was given since it began,
    pub given: u64,
    /// and how many of these, from the first on, have arrived at the other host.
    pub delivered: u64,
}

impl StackState {
    fn rate(&self) -> u64 {
        let initial = u128::from(INITIAL_WINDOW) * 1_000_000_000 / u128::from(self.rtt_ns.max(1));
        let rate = match self.rate {
            0 => u64::try_from(initial).unwrap_or(u64::MAX).max(1),
            rate => rate,
        };
        match self.link_rate {
            0 => rate,
            link_rate => rate.min(link_rate),
        }
    }

    /// When `bytes` given to it now would have arrived at the other host, ns from now: behind what it has beyond a
    /// bandwidth-delay product, which is in flight.
    pub fn arrival_ns(&self, bytes: u64) -> u64 {
        let rate = u128::from(self.rate());
        let in_flight = rate * u128::from(self.rtt_ns) / 1_000_000_000;
        let queued = u128::from(self.unacked).saturating_sub(in_flight);
        let takes = (queued + u128::from(bytes)) * 1_000_000_000 / rate;
        u64::try_from(takes)
            .unwrap_or(u64::MAX)
            .saturating_add(self.rtt_ns / 2)
    }

    /// Length of the next chunk for it, bytes.
    pub fn chunk_len(&self) -> u64 {
        let takes = u128::from(self.rate()) * u128::from(CHUNK_NS) / 1_000_000_000;
        u64::try_from(takes)
            .unwrap_or(MAX_CHUNK)
            .clamp(MIN_CHUNK, MAX_CHUNK)
    }
}

/// Stacks chosen for a chunk, by their places in the list: none, one, or several, which get a copy each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Picks(u32);

impl Picks {
    /// Wait: no stack is to have the chunk now.
    pub const NONE: Self = Self(0);

    /// One stack.
    pub fn one(place: usize) -> Self {
        Self::NONE.and(place)
    }

    /// These, and another one. Places from 32 on are ignored.
    #[must_use]
    pub fn and(self, place: usize) -> Self {
        let bit = u32::try_from(place).ok().and_then(|n| 1_u32.checked_shl(n));
        Self(self.0 | bit.unwrap_or(0))
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The places, in order.
    pub fn places(self) -> impl Iterator<Item = usize> {
        (0..32).filter(move |place| self.0 & 1 << place != 0)
    }
}

/// Decides by which stacks the chunks of one flow go.
pub trait Schedule {
    /// Chooses the stacks for the next chunk, among those with room. `backlog`: bytes expected to be sent, the
    /// chunk included. The caller sends it by all of them.
    fn pick(&mut self, stacks: &[StackState], backlog: u64) -> Picks;
}

/// A new scheduler, for one flow.
pub fn scheduler(kind: Scheduler) -> Box<dyn Schedule> {
    match kind {
        Scheduler::Ecf => Box::new(ecf::Ecf),
        Scheduler::LowestRtt => Box::new(lowest_rtt::LowestRtt),
        Scheduler::Weighted => Box::new(weighted::Weighted::default()),
        Scheduler::RoundRobin => Box::new(round_robin::RoundRobin::default()),
        Scheduler::Redundant => Box::new(redundant::Redundant),
        Scheduler::Primary => Box::new(primary::Primary),
    }
}

/// The stacks that deliver, with their places; all, if none does: one of them may come back.
fn delivering(stacks: &[StackState]) -> impl Iterator<Item = (usize, &StackState)> {
    let none = stacks.iter().all(|stack| stack.is_late);
    let all = stacks.iter().enumerate();
    all.filter(move |(_, stack)| none || !stack.is_late)
}

/// Those of them with room.
fn with_room(stacks: &[StackState]) -> impl Iterator<Item = (usize, &StackState)> {
    delivering(stacks).filter(|(_, stack)| stack.has_room)
}

#[cfg(test)]
#[allow(non_snake_case)]
pub(crate) mod tests {
    use vtl_proto::frame::Side;

    use super::*;

    pub(crate) const MS: u64 = 1_000_000;

    /// An idle stack with room.
    pub(crate) fn stack(number: u32, rtt_ms: u64, mbit: u64) -> StackState {
        StackState {
            id: CarrierId {
                opener: Side::Local,
                number,
            },
            path: number as u8,
            rtt_ns: rtt_ms * MS,
            rate: mbit * 125_000,
            link_rate: 0,
            unacked: 0,
            has_room: true,
            is_late: false,
            given: 0,
            delivered: 0,
        }
    }

    /// The same, with as much as it takes.
    pub(crate) fn full(stack: StackState, queued_ms: u64) -> StackState {
        StackState {
            unacked: stack.rate * (stack.rtt_ns / MS + queued_ms) / 1000,
            has_room: false,
            ..stack
        }
    }

    #[test]
    fn arrival__is_half_a_round_trip_behind_what_is_queued() {
        let idle = stack(1, 20, 8);
        assert_eq!(idle.arrival_ns(1000), 11 * MS);
        // A bandwidth-delay product is on its way: 20,000 bytes.
        let busy = StackState {
            unacked: 20_000,
            ..idle
        };
        assert_eq!(busy.arrival_ns(1000), 11 * MS);
        assert_eq!(full(idle, 5).arrival_ns(1000), 16 * MS);
        let unknown = StackState { rate: 0, ..idle };
        assert_eq!(unknown.arrival_ns(14_000), 30 * MS);
        let nothing = StackState {
            rtt_ns: 0,
            rate: 1,
            unacked: u64::MAX,
            ..idle
        };
        assert_eq!(nothing.arrival_ns(u64::MAX), u64::MAX);
    }

    #[test]
    fn arrival__no_faster_than_the_link_layer() {
        // By its initial window 14 ms; by a modem of 1 Mbit/s, 112.
        let new = StackState {
            rate: 0,
            link_rate: 125_000,
            ..stack(1, 10, 1)
        };
        assert_eq!(new.arrival_ns(14_000), 117 * MS);
        let starting = StackState {
            rate: 25_000_000,
            ..new
        };
        assert_eq!(starting.arrival_ns(14_000), 117 * MS);
        assert_eq!(starting.chunk_len(), 1250);
    }

    #[test]
    fn chunk_len__takes_a_slow_stack_ten_milliseconds() {
        let len = |mbit| stack(1, 20, mbit).chunk_len();
        assert_eq!([1, 8, 100].map(len), [1250, 10_000, MAX_CHUNK]);
        let unknown = StackState {
            rate: 0,
            ..stack(1, 600, 1)
        };
        assert_eq!(unknown.chunk_len(), MIN_CHUNK);
    }

    #[test]
    fn picks__are_places() {
        assert!(Picks::NONE.is_empty());
        let picks = Picks::one(3).and(0).and(99);
        assert_eq!(picks.places().collect::<Vec<_>>(), [0, 3]);
    }

    #[test]
    fn pick__nobody_waits_for_a_stack_that_does_not_deliver() {
        let [late, fine] = [stack(1, 20, 50), stack(2, 60, 50)];
        let late = StackState {
            is_late: true,
            ..late
        };
        for kind in Scheduler::ALL {
            let pick = scheduler(kind).pick(&[late, fine], 1000);
            assert!(pick.places().any(|place| place == 1), "{kind}: {pick:?}");
            // Where none does, one of them may come back.
            let fine = StackState {
                is_late: true,
                ..fine
            };
            let pick = scheduler(kind).pick(&[late, fine], 1000);
            assert!(!pick.is_empty(), "{kind}");
            assert!(scheduler(kind).pick(&[], 1000).is_empty(), "{kind}");
            let busy = [late, fine].map(|stack| full(stack, 10));
            assert!(scheduler(kind).pick(&busy, 1000).is_empty(), "{kind}");
        }
    }
}
