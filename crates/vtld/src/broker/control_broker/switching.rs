//! Stateless switches: a session ends at once for its successor (`vtl_core::switch`; PROTOCOL.md, section 4,
//! "Succession").

use vtl_control::{GivenUp, What};
use vtl_core::switch::{Intolerant, Terms};
use vtl_proto::{intf, services::Services};

use super::{super::Owner, ControlBroker};
use crate::events::emit;

impl ControlBroker {
    /// Whether the session may lose what is in flight.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn may_be_cut(&self, sid: u32) -> Result<(), Intolerant> {
        let entry = self.plane.sessions().get(sid).map(|entry| entry.snapshot());
        let gid = entry.map_or(0, |entry| entry.gid);
        let graft = self.plane.grafts().find(|graft| graft.gid == gid);
        let session = self.sessions.get(sid);
        let terms = Terms {
            port: session.map_or(0, |session| session.port),
            // One that is not there is asked for nothing else either.
            provides: graft.map_or(Services::RELIABLE, |graft| graft.services),
            asked: session.map_or(Services::NONE, |session| session.asked),
            required: session.map_or(Services::NONE, |session| session.required),
        };
        terms.tolerate_loss()
    }

    /// Ends the predecessor of `by` at once if the switch to it is stateless. What is not acknowledged by now is given
    /// up, and what arrives from now on is dropped unacknowledged, so each sender knows what it may have lost.
    pub(super) fn cut_predecessor(&mut self, by: u32) {
        let successor = self.sessions.get(by).filter(|session| session.cuts);
        let Some(before) = successor.and_then(|session| session.succeeds) else {
            return;
        };
        let session = self.sessions.get_mut(before);
        let Some(session) = session.filter(|session| session.successor == Some(by)) else {
            return;
        };
        let Some(end) = session.lifecycle.cut() else {
            return;
        };
        session.cut_by = Some(by);
        tracing::debug!(peer = %session.peer, sid = before, by, "session: cut by a stateless switch");
        self.end(before, end);
    }

    /// Releases an application's session that was cut. Its library has counted what was given up: it alone has the
    /// ring mapped. The ring's positions bound what it may claim.
    pub(super) fn give_up(&mut self, owner: Owner, claimed: GivenUp) {
        for sid in self.sessions.of(owner) {
            let Some(session) = self.sessions.get(sid) else {
                continue;
            };
            let Some(by) = session.cut_by else {
                continue;
            };
            let packets = session.aware.controls.unacknowledged();
            let packets = claimed.packets.min(packets);
            let given_up = GivenUp {
                packets,
                messages: claimed.messages.min(packets),
                bytes: (claimed.bytes)
                    .min(packets.saturating_mul(u64::from(intf::VTL_MAX_PAYLOAD))),
            };
            tracing::info!(
                peer = %session.peer, sid, by, packets, messages = given_up.messages, bytes = given_up.bytes,
                "session: stateless switch, unacknowledged data given up"
            );
            emit(What::SessionCut {
                sid,
                by,
                peer: session.peer,
                port: session.port,
                given_up,
            });
            self.close(sid, false);
        }
    }
}
