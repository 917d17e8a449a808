//! Egress of a shard: calls the pump for the sessions that are due.

use std::{collections::hash_map::Entry, sync::Arc};

use vtl_bpf::pump::{BATCH, Pump};
use vtl_proto::intf::{VTL_OPEN, VTL_PTO_MIN_MS, VTL_TUNNEL};

use super::{News, call::Call, worker::Worker};
use crate::broker::{MS, QUANTUM, now_ns};

/// Interval of checking a session whose application runs egress itself: no probe timeout is shorter.
const LINGER_NS: u64 = VTL_PTO_MIN_MS as u64 * MS;
/// Calls of the pump between two polls of descriptors.
const CALLS: u32 = 4;

impl Worker {
    /// Runs egress of sessions that are due, for a bounded number of calls, so that events are handled in
    /// between.
    pub(super) fn pump(&mut self) {
        self.schedule.expire(now_ns());
        for _ in 0..CALLS {
            if !self.call_pump() {
                return;
            }
            self.notifications();
        }
    }

    /// Makes one call of the pump, for as many sessions as it takes. False if no session is due.
    fn call_pump(&mut self) -> bool {
        let now = now_ns();
        let alone = self.schedule.ready() <= 1;
        let Some(first) = self.schedule.pop() else {
            return false;
        };
        let mut first = Some(first);
        let table = Arc::clone(&self.table);
        let mut call = Call::new(now, BATCH);
        let mut quantum = QUANTUM;
        let mut interface = None;
        while !call.is_full()
            && let Some(sid) = first.take().or_else(|| self.schedule.pop())
        {
            let (Some(session), Some(entry)) = (self.sessions.get(&sid), table.get(sid)) else {
                continue;
            };
            let ifindex = entry.ifindex();
            // Until the session is open, its entry belongs to the broker's thread; the peer's first packet will
            // be an event.
            if session.resting || ifindex == 0 || entry.state() != VTL_OPEN {
                continue;
            }
            if ifindex == VTL_TUNNEL {
                entry.take_event();
                self.news.tell(News::ByTcp(sid));
                continue;
            }
            if interface.is_some_and(|first| first != ifindex) {
                self.schedule.first(sid);
                break;
            }
            if alone && let Some(pump) = self.pumps.get(&ifindex) {
                quantum = pump.batch();
                call.set_max(quantum);
            }
            let published = session.controls.published();
            if call.add(sid, &entry, published, quantum, &mut self.schedule) {
                interface = Some(ifindex);
            }
        }
        let Some(ifindex) = interface else {
            return false;
        };
        let run = self.pump_of(ifindex).map(|pump| pump.run(call.turns()));
        let sessions = &mut self.sessions;
        call.settle(run, &table, &mut self.schedule, |sid, sent| {
            // While an application runs egress itself, poll its session for its probe timeout; otherwise every
            // packet would have to wake us.
            match sessions.get_mut(&sid) {
                Some(session) if session.sent != sent => {
                    session.sent = sent;
                    now + LINGER_NS
                }
                _ => u64::MAX,
            }
        });
        true
    }

    /// Returns an interface's egress driver; `None` if the interface is unknown or no driver works.
    fn pump_of(&mut self, ifindex: u32) -> Option<&mut Pump> {
        let mtu = *self.mtus.get(&ifindex)?;
        match self.pumps.entry(ifindex) {
            Entry::Occupied(pump) => Some(pump.into_mut()),
            Entry::Vacant(place) => {
                let opened = Pump::open(&self.shard, ifindex, mtu, self.driver)
                    .inspect_err(|error| tracing::error!(%error, ifindex, "egress: no driver works: nothing is sent by this interface"))
                    .ok();
                let (pump, why) = opened?;
                let name = pump.name();
                tracing::info!(ifindex, driver = name, why, "egress: driver chosen");
                self.news.tell(News::Driver { ifindex, name, why });
                Some(place.insert(pump))
            }
        }
    }
}
