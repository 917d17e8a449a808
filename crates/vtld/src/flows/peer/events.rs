//! What an association tells of its flows and carriers, for the control socket.

use vtl_control::{Text, What};
use vtl_core::{
    Association,
    flow::{Flow, Path},
};
use vtl_proto::frame::{CarrierId, FlowId};

use super::{
    super::flow::{Reset, State},
    Peer, Running,
    commands::role,
    counts,
};
use crate::events::emit;

impl Peer {
    /// The name of what a flow travels by: a kind of carrier, `tls`, `tcp` or, if it waits for a carrier, `none`.
    fn travels_by(&self, id: FlowId, path: Path) -> &'static str {
        match path {
            Path::Tcp if id.requires_carrier() => "none",
            path => self.name(path),
        }
    }

    /// Tells of a new flow. `resumed`: of a former daemon.
    pub(super) fn tell_opened(&self, core: &Association, id: FlowId, state: &State, resumed: bool) {
        let path = core.flow(id).map_or(Path::Tcp, |flow| flow.send.path());
        state.told.set((path, self.travels_by(id, path)));
        emit(What::FlowOpened {
            flow: state.number,
            local: state.local,
            peer: state.peer,
            role: role(id.opener).into(),
            association: self.key.tag,
            resumed,
        });
    }

    /// Tells where a flow goes, if that is not where it went. On the way of data: a comparison.
    pub(super) fn tell_moved(&self, flow: Option<&Flow>, id: FlowId, state: &State) {
        let Some(path) = flow.map(|flow| flow.send.path()) else {
            return;
        };
        let (before, from) = state.told.get();
        if path == before {
            return;
        }
        let to = self.travels_by(id, path);
        state.told.set((path, to));
        state
            .profile
            .note_moved(flow.map_or(0, |flow| counts(flow).into_iter().sum()));
        emit(What::FlowMoved {
            flow: state.number,
            local: state.local,
            peer: state.peer,
            from: from.into(),
            to: to.into(),
            why: state.why.get().into(),
        });
    }

    /// The same, for who does not have the core.
    pub(in super::super) fn tell_if_moved(&self, id: FlowId, state: &State) {
        self.tell_moved(self.core.borrow().flow(id), id, state);
    }

    /// Tells that a flow has ended, in order or by a reset.
    pub(in super::super) fn tell_ended(&self, id: FlowId, state: &State, reset: Option<&Reset>) {
        let core = self.core.borrow();
        let [bytes_sent, bytes_received] = core.flow(id).map_or([0; 2], counts);
        emit(What::FlowEnded {
            flow: state.number,
            local: state.local,
            peer: state.peer,
            bytes_sent,
            bytes_received,
            how: if reset.is_some() { "reset" } else { "closed" }.into(),
            why: reset.map(|reset| reset.to_string().into()),
        });
    }

    /// Tells that a carrier is up.
    pub(super) fn tell_carrier_up(&self, id: CarrierId, running: &Running) {
        if let Some(kind) = running.carrier.kind() {
            emit(What::CarrierUp {
                association: self.key.tag,
                peer: self.key.peer,
                carrier: kind.name().into(),
                number: id.number,
                role: role(id.opener).into(),
            });
        }
    }

    /// Tells that a carrier is up no more.
    pub(super) fn tell_carrier_down(&self, id: CarrierId, running: &Running) {
        if let Some(kind) = running.carrier.kind() {
            emit(What::CarrierDown {
                association: self.key.tag,
                peer: self.key.peer,
                carrier: kind.name().into(),
                number: id.number,
                role: role(id.opener).into(),
                bytes_sent: running.sent.get(),
                bytes_received: running.received.get(),
            });
        }
    }

    /// Tells that a carrier cannot be opened.
    pub(in super::super) fn tell_failed(&self, carrier: &'static str, why: impl Into<Text>) {
        emit(What::CarrierFailed {
            association: self.key.tag,
            peer: self.key.peer,
            carrier: carrier.into(),
            why: why.into(),
        });
    }
}
