//! An association's status for commands, and flows moved by hand.

use std::time::{Duration, Instant};

use tokio::time::timeout;
use vtl_control::{CarrierStatus, FlowStatus};
use vtl_core::flow::{Flow, Path};
use vtl_proto::{
    carrier::{GraftSpec, Kind},
    frame::{CarrierId, FlowId, Side},
};

use crate::{hooker::CarrierOptions, stacks};

use super::{super::flow::State, Peer, Running, choice::MODEL};

/// Reason of a flow that stays plain TCP even if the peer's reach has changed since.
const OUT_OF_REACH: &str = "its port was out of the peer's `reach` (peers.toml) when it began";

/// Timeout of opening a carrier for a flow moved by hand.
const OPENING: Duration = Duration::from_secs(5);

pub(in super::super) fn role(opener: Side) -> &'static str {
    match opener {
        Side::Local => "client",
        Side::Peer => "server",
    }
}

impl Peer {
    /// Finds a flow by its id in commands.
    pub(in super::super) fn find(&self, number: u64) -> Option<FlowId> {
        let flows = self.flows.borrow();
        let found = flows.iter().find(|(_, state)| state.number == number);
        found.map(|(id, _)| *id)
    }

    /// The name of a path.
    pub(super) fn name(&self, path: Path) -> &'static str {
        let carrier = match path {
            Path::Tcp => None,
            Path::Carrier(id) => self.carrier(id),
        };
        let name = carrier.map(|carrier| carrier.kind().map_or("tls", Kind::name));
        name.unwrap_or("tcp")
    }

    /// Moves the sending direction of a flow. `stay`: for how long; `None`: until that breaks.
    ///
    /// # Errors
    /// The carrier is unknown or cannot be opened, or the flow may not use it.
    pub(in super::super) async fn move_flow(
        &self,
        id: FlowId,
        carrier: &str,
        stay: Option<Duration>,
    ) -> Result<(), String> {
        let is_refused = self.core.borrow().flow(id).is_some_and(Flow::is_refused);
        let path = match carrier {
            "tcp" => Path::Tcp,
            _ if is_refused => return Err(OUT_OF_REACH.into()),
            _ => Path::Carrier(self.carrier_for(carrier).await?),
        };
        if path == Path::Tcp && id.requires_carrier() {
            return Err("the flow requires a carrier: it never goes by TCP".into());
        }
        if let Some(state) = self.flows.borrow().get(&id) {
            state.why.set("moved by hand");
            state.stays.set(stay.is_some() || self.pins(path));
            let until = stay.and_then(|stay| Instant::now().checked_add(stay));
            state.stays_until.set(until);
        }
        self.core.borrow_mut().move_flow(id, path);
        self.turn();
        Ok(())
    }

    /// Finds a carrier by its kind's name; the opener of the association opens one if none is up.
    async fn carrier_for(&self, name: &str) -> Result<CarrierId, String> {
        let peer = self.key.peer;
        let stack = name
            .strip_prefix("stack:")
            .and_then(|spec| spec.parse::<GraftSpec>().ok());
        let Some(kind) = Kind::named(name).or(stack.as_ref().map(|_| Kind::Stack)) else {
            let all = Kind::NAMED.map(Kind::name).join(", ");
            return Err(format!(
                "a flow cannot move to {name}: to tcp, {all}, stack:NAME"
            ));
        };
        if let Some(spec) = stack
            && self.key.opener == Side::Local
        {
            stacks::resolve(&spec)?;
            self.want_stack(CarrierOptions::Stack(spec).into())?;
        }
        if let Some(id) = self.latest(kind) {
            return Ok(id);
        }
        if self.key.opener == Side::Peer {
            return Err(format!(
                "there is no carrier {name} to {peer}: that host has opened the flow, and only it can open one"
            ));
        }
        self.wanted.borrow_mut().insert(kind.number());
        self.changed.notify_waiters();
        let opened = timeout(OPENING, self.until(|peer| peer.latest(kind).is_some())).await;
        let latest = opened.ok().and_then(|()| self.latest(kind));
        if latest.is_none() {
            self.wanted.borrow_mut().remove(&kind.number());
        }
        latest.ok_or_else(|| format!("{peer} does not open a carrier {name}"))
    }

    /// Status of a flow.
    pub(in super::super) fn status(&self, id: FlowId) -> Option<FlowStatus> {
        let flows = self.flows.borrow();
        let state = flows.get(&id)?;
        let row = self.row(id, state)?;
        let stacks = self.stacks_of(state);
        Some(FlowStatus { stacks, ..row })
    }

    /// Flows by their numbers, from `from` on, in no order.
    pub(in super::super) fn numbers(&self, from: u64) -> Vec<(u64, FlowId)> {
        let flows = self.flows.borrow();
        let all = flows.iter().map(|(id, state)| (state.number, *id));
        all.filter(|(number, _)| *number >= from).collect()
    }

    /// Status of a flow without its stacks, as lists have it.
    pub(in super::super) fn listed(&self, id: FlowId) -> Option<FlowStatus> {
        self.row(id, self.flows.borrow().get(&id)?)
    }

    fn row(&self, id: FlowId, state: &State) -> Option<FlowStatus> {
        let core = self.core.borrow();
        let flow = core.flow(id)?;
        let traffic = state.traffic.get();
        let [sends_mbit, receives_mbit] = traffic.rates().map(|rate| {
            // In Mbit/s, rounded to 0.01.
            (rate * 8e-4).round() / 100.0
        });
        let waits = id.requires_carrier() && flow.send.path() == Path::Tcp;
        let by = |path| match id.requires_carrier() && path == Path::Tcp {
            true => "none".to_owned(),
            false => self.name(path).to_owned(),
        };
        let verdict = state.profile.verdict();
        Some(FlowStatus {
            id: state.number,
            local: state.local,
            peer: state.peer,
            role: role(id.opener).to_owned(),
            requires_carrier: id.requires_carrier(),
            requires_encryption: id.requires_encryption(),
            sends_by: by(flow.send.path()),
            receives_by: by(state.heard_by.get()),
            bytes_sent: flow.send.next_offset(),
            bytes_received: flow.receive.received(),
            skipped_bytes: (flow.receive.is_tolerant()).then(|| flow.receive.lost()),
            sends_mbit,
            receives_mbit,
            size: Some(traffic.size().to_string()),
            burstiness: (traffic.burstiness()).map(|ratio| (ratio * 100.0).round() / 100.0),
            profile: verdict.as_ref().map(|verdict| verdict.profile.to_string()),
            profile_evidence: verdict.map(|verdict| verdict.evidence),
            app: state.app,
            association: Some(self.key.tag),
            stacks: Vec::new(),
            age_s: state.began.elapsed().as_secs_f64(),
            why: match (flow.error(), &*self.refused.borrow()) {
                (Some(_), _) => "it was reset".to_owned(),
                (None, Some(refused)) => refused.to_string(),
                _ if flow.is_refused() => {
                    let why = self.out_of_reach(state.local.port());
                    why.unwrap_or_else(|| OUT_OF_REACH.to_owned())
                }
                _ if state.licence.is_void() => {
                    "its TCP connection gets no answer, so it waits".to_owned()
                }
                _ if waits => "it requires a carrier, and waits for one".to_owned(),
                _ if flow.send.is_rejected() => {
                    "the peer does not take it as a flow of VTL: it may not know that it is one, or not let this \
                     host reach the port by VTL"
                        .to_owned()
                }
                _ if state.why.get() == MODEL => self.model_reason(),
                _ => state.why.get().to_owned(),
            },
        })
    }

    /// Status, one row for each carrier but control connections.
    pub(in super::super) fn rows(&self) -> Vec<CarrierStatus> {
        let carriers = self.carriers.borrow();
        let core = self.core.borrow();
        let flows = self.flows.borrow();
        let lost = flows
            .keys()
            .filter_map(|id| Some(core.flow(*id)?.receive.lost()));
        let skipped = self.skipped.get() + lost.sum::<u64>();
        let row = |(id, running): (&CarrierId, &Running)| {
            Some(CarrierStatus {
                peer: self.key.peer,
                carrier: running.carrier.kind()?.name().to_owned(),
                encrypted: running.carrier.is_encrypted(),
                role: role(id.opener).to_owned(),
                flows: flows.len(),
                bytes_sent: running.sent.get(),
                bytes_received: running.received.get(),
                skipped_bytes: running.carrier.loses().then_some(skipped),
                path: running.carrier.path(),
            })
        };
        carriers.iter().filter_map(row).collect()
    }
}
