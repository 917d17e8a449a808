//! Sessions that lose packets: what their daemons say to each other about streams goes over the
//! lifeline, whole and in order (PROTOCOL.md, section 7).

use vtl_proto::mux::MAX_CONTROL;

use super::{
    super::{
        lifeline::Lifeline,
        now_ns,
        session::{Session, Use},
        streams::Streams,
    },
    Engine,
};
use crate::hooker::HeldConnect;

/// Rounds of reading before others have their turn.
const TURNS: u32 = 8;

/// A lossy session's streams and its lifeline.
fn parts(session: &mut Session) -> Option<(&mut Streams<HeldConnect>, &mut Lifeline)> {
    match session {
        Session {
            lossy: true,
            lifeline: Some(lifeline),
            purpose:
                Use::Streams {
                    streams: Some(streams),
                    ..
                },
            ..
        } => Some((streams, lifeline)),
        _ => None,
    }
}

impl Engine {
    /// Heeds the frames that have come over a lossy session's lifeline, which may be none.
    pub(super) fn hear_control(&mut self, sid: u32) {
        for _ in 0..TURNS {
            let Some((streams, lifeline)) = self.sessions.get_mut(&sid).and_then(parts) else {
                return;
            };
            let pulled = lifeline.pull();
            if !lifeline.is_greeted() {
                return match pulled {
                    Ok(()) => {}
                    Err(fault) => self.untie(sid, &fault),
                };
            }
            let mut effects = Vec::new();
            let used = match streams.control(lifeline.come(), &mut effects) {
                Ok(used) => used,
                Err(error) => return self.breaks_rules(sid, &error),
            };
            lifeline.used(used);
            for effect in effects {
                self.effect(sid, effect);
            }
            if let Err(fault) = pulled {
                return self.untie(sid, &fault);
            }
            self.transmit(sid);
            if used == 0 {
                return;
            }
        }
        self.patience.now(sid);
    }

    /// Says what streams of a lossy session are to be told, and notes when to look again.
    pub(super) fn say_control(&mut self, sid: u32) {
        let Some((streams, lifeline)) = self.sessions.get_mut(&sid).and_then(parts) else {
            return;
        };
        lifeline.queue_frames(MAX_CONTROL, |buffer| streams.poll_control(buffer));
        let deadline = streams.deadline();
        if let Err(fault) = lifeline.flush() {
            return self.untie(sid, &fault);
        }
        self.patience.at(sid, deadline);
    }

    /// Lossy sessions go on without what they have waited for long enough.
    pub(super) fn lose_patience(&mut self) {
        self.patience.expire(now_ns());
        let due: Vec<u32> = std::iter::from_fn(|| self.patience.pop()).collect();
        for sid in due {
            self.receive(sid);
            self.hear_control(sid);
            let Some((streams, _)) = self.sessions.get_mut(&sid).and_then(parts) else {
                continue;
            };
            let mut effects = Vec::new();
            streams.give_up(&mut effects);
            for effect in effects {
                self.effect(sid, effect);
            }
            self.transmit(sid);
        }
    }
}
