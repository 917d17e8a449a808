//! Stream sessions whose packets get lost while TCP gets through go on over their lifelines, from the
//! exact packet (PROTOCOL.md, section 8).

use std::time::Duration;

use nix::sys::epoll::{EpollEvent, EpollFlags};
use vtl_proto::intf;

use super::{
    super::{
        GRACE_NS,
        lifeline::{Fault, Lifeline, Stage, Word},
        now_ns, preamble,
        session::{Session, Use},
    },
    Engine, MS, Source,
};

/// The peer is asked when nothing was heard by the graft for so long, and two round trips, though it
/// owes an answer.
const SILENT_NS: u64 = 300 * MS;
/// What it owes is waited for so long after it has said that it is there.
const LATE_NS: u64 = 200 * MS;
/// And so often it must not have been answered.
const TIMEOUTS: u32 = 3;
/// Batches of packets in each direction before others have their turn.
const TURNS: u32 = 8;
/// Of a path that nothing is known of.
const RTT: Duration = Duration::from_millis(100);

impl Engine {
    /// Gives a session its lifeline; without, it dies by silence.
    pub(super) fn tie(
        &mut self,
        sid: u32,
        socket: std::net::TcpStream,
        preamble: Option<[u8; preamble::LENGTH]>,
    ) {
        let flags = EpollFlags::EPOLLIN
            | EpollFlags::EPOLLOUT
            | EpollFlags::EPOLLRDHUP
            | EpollFlags::EPOLLET;
        let event = EpollEvent::new(flags, Source::Lifeline { sid }.pack());
        if self.epoll.add(&socket, event).is_ok()
            && let Some(session) = self.sessions.get_mut(&sid)
        {
            super::super::set_linger(&socket, true);
            session.lifeline = Some(Lifeline::new(socket, preamble));
        }
    }

    /// Something happened on a lifeline.
    pub(super) fn lifeline(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        if session.lossy {
            return self.hear_control(sid);
        }
        let Some(lifeline) = &mut session.lifeline else {
            return;
        };
        if let Err(fault) = lifeline.pull().and_then(|()| self.listen(sid)) {
            self.untie(sid, &fault);
        }
    }

    /// Heeds what the peer says, and carries packets if they go this way.
    fn listen(&mut self, sid: u32) -> Result<(), Fault> {
        loop {
            let Some(lifeline) = self.lifeline_of(sid) else {
                return Ok(());
            };
            if lifeline.peer_has.is_some() {
                break;
            }
            let Some(word) = lifeline.word()? else { break };
            match (word, lifeline.stage) {
                (Word::Ask, _) => {
                    lifeline.say(Word::Here);
                    self.probe(sid);
                }
                (Word::Here, Stage::Asked { at_ns, .. }) => {
                    let here_ns = Some(now_ns());
                    lifeline.stage = Stage::Asked { at_ns, here_ns };
                    self.probe(sid);
                }
                // It has answered too late to matter.
                (Word::Here, _) => {}
                (Word::Leave { received }, stage) => {
                    lifeline.peer_has = Some(received);
                    if matches!(stage, Stage::Quiet | Stage::Asked { .. }) {
                        self.leave(sid);
                    }
                }
            }
        }
        self.carry(sid)
    }

    fn lifeline_of(&mut self, sid: u32) -> Option<&mut Lifeline> {
        self.sessions.get_mut(&sid)?.lifeline.as_mut()
    }

    fn probe(&mut self, sid: u32) {
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.probe();
        }
        self.schedule.now(sid);
    }

    /// The lifeline is of no use any more, and so is the session. But where no vtld was at its other
    /// end, the session never had one, which only a lossy one cannot do without.
    pub(super) fn untie(&mut self, sid: u32, fault: &Fault) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let was_one = session.lifeline.take().is_some_and(|l| l.is_greeted());
        if session.is_open() && (was_one || session.lossy) {
            tracing::info!(peer = %session.peer, %fault, "the lifeline ends the session");
            self.end(sid, intf::VTL_CLOSED_TIMEOUT);
        }
    }

    /// Looks whether the graft still does its work, by which nothing was heard for `silent_ns`.
    pub(super) fn watch_graft(&mut self, sid: u32, now: u64, silent_ns: u64) {
        let table = self.plane.sessions();
        let (Some(session), Some(entry)) = (self.sessions.get_mut(&sid), table.get(sid)) else {
            return;
        };
        let heard_ns = session.heard_ns;
        // What is lost by a lossy one is lost, and the lifeline says other things.
        let Some(lifeline) = session.lifeline.as_mut().filter(|_| !session.lossy) else {
            return;
        };
        let rtt = entry.measured_rtt().unwrap_or(RTT).as_nanos() as u64;
        let owed = entry.unacknowledged() > 0 || entry.timeouts() > 0;
        match lifeline.stage {
            Stage::Quiet if owed && silent_ns > SILENT_NS.max(2 * rtt) => {
                lifeline.ask(now);
                self.probe(sid);
            }
            Stage::Asked { at_ns, .. } if heard_ns > at_ns => lifeline.rest(),
            Stage::Asked {
                here_ns: Some(here_ns),
                ..
            } if now.saturating_sub(here_ns) > LATE_NS && entry.timeouts() >= TIMEOUTS => {
                self.leave(sid);
            }
            Stage::Leaving { since_ns } if now.saturating_sub(since_ns) > GRACE_NS => {
                self.left(sid);
            }
            _ => return,
        }
        if let Err(fault) = self.carry(sid) {
            self.untie(sid, &fault);
        }
    }

    /// The programs let go of the session.
    fn leave(&mut self, sid: u32) {
        let (Some(session), Some(entry)) =
            (self.sessions.get_mut(&sid), self.plane.sessions().get(sid))
        else {
            return;
        };
        let Some(lifeline) = &mut session.lifeline else {
            return;
        };
        tracing::info!(peer = %session.peer, "the graft's packets get lost: flows go on over TCP");
        entry.set_state(intf::VTL_OPENING);
        lifeline.stage = Stage::Leaving { since_ns: now_ns() };
        self.schedule.cancel(sid);
    }

    /// They have: what has arrived is settled.
    fn left(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let (
            Some(lifeline),
            Use::Streams {
                streams: Some(streams),
                ..
            },
        ) = (&mut session.lifeline, &mut session.purpose)
        else {
            return;
        };
        let (_, rx) = streams.rings();
        lifeline.say(Word::Leave {
            received: rx.received(),
        });
        lifeline.stage = Stage::Left;
    }

    /// Moves packets between the rings and the lifeline, once both daemons have left the graft; until
    /// then writes what is to be said.
    pub(super) fn carry(&mut self, sid: u32) -> Result<(), Fault> {
        let mut again = false;
        for _ in 0..TURNS {
            let Some(session) = self.sessions.get_mut(&sid) else {
                return Ok(());
            };
            let Session {
                lifeline: Some(lifeline),
                purpose:
                    Use::Streams {
                        streams: Some(streams),
                        ..
                    },
                ..
            } = session
            else {
                return Ok(());
            };
            let (tx, rx) = streams.rings();
            if let (Stage::Left, Some(peer_has)) = (lifeline.stage, lifeline.peer_has) {
                if !tx.acknowledge(peer_has) {
                    return Err(Fault::Nonsense);
                }
                lifeline.stage = Stage::Carrying;
            }
            if lifeline.stage != Stage::Carrying {
                return lifeline.flush();
            }
            let mut moved = false;
            while let Some(packet) = tx.outstanding()
                && lifeline.queue(packet)
            {
                tx.acknowledge(tx.acknowledged() + 1);
                moved = true;
            }
            lifeline.flush()?;
            lifeline.pull()?;
            let delivered = lifeline.packets(|packet| rx.deliver(packet))? > 0;
            // More is to be written, and can be.
            let goes_on = lifeline.is_flushed() && tx.outstanding().is_some();
            again |= delivered;
            if delivered {
                session.heard_ns = now_ns();
            }
            let published = moved && self.fill(sid);
            if !delivered && !published && !goes_on {
                break;
            }
            again |= goes_on;
        }
        if again {
            // What has come is handed on, and then this goes on.
            self.events.borrow_mut().push((sid, intf::VTL_EV_RECV));
            let _ = self.handle.wake.write(1);
        }
        Ok(())
    }

    /// As [`Engine::carry`]; a fault ends the session.
    pub(super) fn carry_on(&mut self, sid: u32) {
        if let Err(fault) = self.carry(sid) {
            self.untie(sid, &fault);
        }
    }
}
