//! Bounds of flows of the carrier `auto`: what these get is measured, and where it is too little the choice hears of it.

use std::{
    net::IpAddr,
    rc::Rc,
    time::{Duration, Instant},
};

use vtl_control::{BoundEvent, What};
use vtl_core::reconfigure::{Change, Outcome};
use vtl_proto::carrier::Kind;

use super::{
    Flows,
    peer::Peer,
    reconfigure::{Following, STALE},
    select::{ByModel, Direction, TOLD_STALE},
    socket::unread,
};
use crate::{events::emit, netmon::Evidence};

/// Age from which on a flow's rate counts: before, it is its start's.
const STARTED: Duration = Duration::from_secs(5);

impl Flows {
    /// Notes what the flows of an association get of what is bounded, and tells where that changes something.
    pub(super) fn follow_bounds(
        &self,
        peer: &Rc<Peer>,
        following: &Rc<Following>,
        direction: Option<Direction>,
    ) {
        let bounds = following.engine.borrow().bounds();
        if bounds.is_none() || !peer.has_flows() {
            return;
        }
        if bounds.max_delay.is_some() {
            // Only by what it sends does a host see the round-trip time.
            peer.confirm_one();
        }
        let host = peer.key.peer;
        let mut engine = following.engine.borrow_mut();
        let carrier = ByModel::class(engine.made());
        let delay = self.delay(host, ByModel::target(engine.made()).is_some());
        let throughput = match direction {
            Some(Direction::Receives) => {
                let told = peer.told(TOLD_STALE);
                let rate = told.and_then(|metrics| metrics.bandwidth);
                rate.filter(|rate| !rate.at_least).map(|rate| rate.rate)
            }
            _ => peer.min_wanted_rate(),
        };
        let outcome = Outcome {
            throughput,
            ..delay
        };
        let changes = engine.note_outcome(following.now_ns(), &outcome);
        let changes = changes.into_iter().flatten();
        let changes = changes.map(|change| (change, engine.figures(change.bound, &outcome)));
        let changes: Vec<_> = changes.collect();
        drop(engine);
        for (change, why) in changes {
            let event = BoundEvent {
                peer: host,
                association: Some(peer.key.tag),
                sid: None,
                carrier: carrier.into(),
                bound: change.bound.name().into(),
                why: why.clone().into(),
            };
            let Change { bound, is_missed } = change;
            tracing::info!(peer = %host, %bound, is_missed, carrier, why, "select: what flows get of a bound has changed");
            emit(match is_missed {
                true => What::BoundMissed(event),
                false => What::BoundKept(event),
            });
        }
    }
}

impl Flows {
    /// The delay of what flows to a host go by, sessions or their TCP connections. Both directions' queues are in its
    /// round-trip time.
    fn delay(&self, host: IpAddr, by_graft: bool) -> Outcome {
        let monitor = self.broker.monitor();
        let evidence = match by_graft {
            true => Evidence::Carrier(Kind::Graft),
            false => Evidence::Tcp,
        };
        let Some(mut metrics) = monitor.recent_of(host, evidence, STALE) else {
            return Outcome::default();
        };
        // A connection that began while a queue stood does not know the path without.
        let path = monitor.recent(host, STALE).and_then(|path| path.min_rtt);
        metrics.min_rtt = [metrics.min_rtt, path].into_iter().flatten().min();
        Outcome::of(&metrics)
    }
}

impl Peer {
    /// The rate, bit/s, of the slowest flow whose application has more to send; `None`: none has.
    fn min_wanted_rate(&self) -> Option<u64> {
        let now = Instant::now();
        let states = self.states();
        let wanting = states.iter().filter(|(_, state)| {
            let ends = state.ends.borrow();
            let waits = ends
                .as_ref()
                .is_some_and(|ends| unread(ends.app.get_ref()) > 0);
            waits && now.duration_since(state.began) >= STARTED
        });
        let rates = wanting.map(|(_, state)| {
            let [sent, _] = state.traffic.get().rates();
            // Bytes per second: far below 2^53.
            (sent * 8.0) as u64
        });
        rates.min()
    }
}
