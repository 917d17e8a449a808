//! Sends: calls the pump for the sessions that are due.

use std::sync::Arc;

use vtl_bpf::pump::{BATCH, Pump, Turn};
use vtl_proto::intf::{self, VTL_TUNNEL};

use super::{
    super::{now_ns, session::Session},
    Engine, MS,
};

/// No probe timeout is shorter.
const LINGER_NS: u64 = 10 * MS;
/// The longest that packets wait for others to be sent with.
const PACE_NS: u64 = MS / 4;
/// Calls of the pump between two looks at descriptors.
const CALLS: u32 = 4;
/// Frames that one session may have before the next one's turn.
const QUANTUM: u32 = 32;
/// What could not be sent is tried again after this long; likewise what found the interface's
/// queue full.
const RETRY_NS: u64 = 10 * MS;
const QUEUE_NS: u64 = MS / 10;
/// Frames of a call for packets that go by TCP.
const TUNNEL_BATCH: u32 = 2 * QUANTUM;

impl Engine {
    /// Runs the egress grafts of sessions that are due, for a while: events want their turn too.
    pub(super) fn pump(&mut self) {
        self.schedule.expire(now_ns());
        for _ in 0..CALLS {
            if !self.call_pump() {
                return;
            }
            self.notifications();
        }
    }

    /// One call of the pump, for as many sessions as it takes. False if no session is due.
    fn call_pump(&mut self) -> bool {
        let now = now_ns();
        let alone = self.schedule.ready() <= 1;
        let Some(first) = self.schedule.pop() else {
            return false;
        };
        let mut first = Some(first);
        let table = Arc::clone(self.plane.sessions());
        let mut most = BATCH;
        let mut interface = None;
        let mut turns = Vec::with_capacity(intf::VTL_TURNS as usize);
        // Of each turn, the time to go on at if pacing made it short.
        let mut paced = Vec::with_capacity(intf::VTL_TURNS as usize);
        let mut frames = 0;
        while frames < most
            && turns.len() < intf::VTL_TURNS as usize
            && let Some(sid) = first.take().or_else(|| self.schedule.pop())
        {
            let (Some(session), Some(entry)) = (self.sessions.get(&sid), table.get(sid)) else {
                continue;
            };
            let (ifindex, published) = (entry.ifindex(), session.published());
            if !session.is_open() || ifindex == 0 {
                continue; // the peer's first packet will be an event
            }
            if ifindex == VTL_TUNNEL
                && let Some(wait) = self.tunnel_wait_ns(sid)
            {
                self.schedule.at(sid, now + wait);
                continue;
            }
            if interface.is_some_and(|first| first != ifindex) {
                self.schedule.first(sid);
                break;
            }
            if ifindex == VTL_TUNNEL {
                most = TUNNEL_BATCH;
            } else if alone && let Some((pump, _)) = self.pumps.get(&ifindex) {
                most = pump.batch();
            }
            if !entry.lock_egress() {
                self.schedule.at(sid, now + QUEUE_NS);
                continue;
            }
            interface = Some(ifindex);
            // One more, so that egress finds out that it has run dry.
            let ready =
                (entry.sendable(published) + 1).min(if alone { most } else { QUANTUM }.into());
            let quota = entry.paced(now).min(ready).min((most - frames).into()) as u32;
            frames += quota;
            turns.push(Turn { sid, quota });
            // A call costs as much as ten packets, so the next one waits for a batch, or for as
            // long as a burst may be late.
            let batch = entry.pacing_gap_ns() * u64::from(BATCH);
            let short = u64::from(quota) < ready && frames < most;
            paced.push(if short { now + batch.min(PACE_NS) } else { 0 });
        }
        let Some(ifindex) = interface else {
            return false;
        };
        if ifindex != VTL_TUNNEL && !self.pumps.contains_key(&ifindex) {
            self.open_pump(ifindex);
        }
        let run = if ifindex == VTL_TUNNEL {
            Some(self.pump_tunnel(&turns))
        } else {
            self.pumps.get_mut(&ifindex).map(|(p, _)| p.run(&turns))
        };
        let (served, later) = match run {
            Some(Ok(served)) => {
                let stuck = served.turns == 0 && served.left == turns[0].quota;
                (served.turns, stuck.then_some(QUEUE_NS))
            }
            Some(Err(error)) => {
                tracing::warn!(%error, ifindex, "cannot transmit");
                (0, Some(RETRY_NS))
            }
            None => (0, Some(RETRY_NS)),
        };
        let mut unserved = Vec::new();
        for (i, (turn, paced)) in turns.iter().zip(&paced).enumerate() {
            let Some(entry) = table.get(turn.sid) else {
                continue;
            };
            let wake = match later {
                Some(later) => now + later,
                None if i >= served => {
                    unserved.push(turn.sid);
                    0
                }
                None => match entry.wake_ns() {
                    0 => *paced,
                    u64::MAX => self.linger(turn.sid, entry.sent(), now),
                    wake => wake,
                },
            };
            let again = entry.unlock_egress(wake != u64::MAX);
            if i < served || later.is_some() {
                self.schedule.at(turn.sid, if again { 0 } else { wake });
            }
        }
        for sid in unserved.into_iter().rev() {
            self.schedule.first(sid);
        }
        true
    }

    /// When to look again at a session that has nothing to send. One whose application sends by
    /// itself is watched while that goes on, or every packet would have to wake us, for its probe
    /// timeout.
    fn linger(&mut self, sid: u32, sent: u64, now: u64) -> u64 {
        match self.sessions.get_mut(&sid) {
            Some(Session { aware, .. }) if aware.sent != sent => {
                aware.sent = sent;
                now + LINGER_NS
            }
            _ => u64::MAX,
        }
    }

    /// The application has written packets, or has room again.
    pub(super) fn kick(&mut self, sid: u32) {
        let Some(session) = self.sessions.get(&sid) else {
            return;
        };
        self.schedule.now(sid);
        if session.aware.rx.take_offer()
            && let Some(entry) = self.plane.sessions().get(sid)
        {
            entry.request_ack();
        }
    }

    fn open_pump(&mut self, ifindex: u32) {
        let Some(attached) = self.plane.attached().get(&ifindex) else {
            return; // it has gone
        };
        let mtu = attached.interface.mtu;
        match Pump::open(&self.plane, ifindex, mtu, self.config.driver) {
            Ok((pump, why)) => {
                tracing::info!(ifindex, driver = pump.name(), why, "egress driver");
                self.pumps.insert(ifindex, (pump, why));
            }
            Err(error) => tracing::error!(%error, ifindex, "no egress driver works"),
        }
    }
}
