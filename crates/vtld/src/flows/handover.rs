//! Handover of the thread of flows to the next daemon: associations, and their flows with both sockets. Control
//! connections end, since their TLS keys are not handed over; but the next daemon closes their sockets, so that peers
//! learn of the end of all carriers when there is a daemon to connect to again.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_local;
use vtl_core::{Flow, flow::Path};
use vtl_pool::key::PublicKey;
use vtl_proto::frame::{CarrierId, FlowId, FlowName, Side};

use super::{
    Desired, Flows, Key, Names, Target,
    flow::{Beginning, Ends, State},
    lock,
    peer::Peer,
    profile::Observer,
};
use crate::handover::{Descriptors, Outgoing, Place};

/// State handed over by the thread of flows.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Handover {
    peers: Vec<PeerLeft>,
    /// The latest names of flows, by the addresses of both hosts.
    names: Vec<(IpAddr, IpAddr, Desired, FlowName)>,
    started: u64,
}

impl Handover {
    pub(crate) fn connections(&self) -> usize {
        self.peers.iter().map(|peer| peer.flows.len()).sum()
    }
}

/// An association.
#[derive(Debug, Serialize, Deserialize)]
struct PeerLeft {
    key: Key,
    desired: Option<Desired>,
    /// What a condition of the rule has the flows go by; empty: no condition. A list, since CBOR has no null within null.
    #[serde(default)]
    target: Vec<Target>,
    dest: Option<SocketAddr>,
    /// This host is a gateway for the local address.
    #[serde(default)]
    forwards: bool,
    /// The peer's own address, if it is a gateway.
    #[serde(default)]
    host: Option<IpAddr>,
    last_carrier: u32,
    /// Carriers that end with this daemon: peers are told.
    carriers: Vec<CarrierId>,
    /// The peer's public key.
    #[serde(default)]
    shown: Option<String>,
    /// The control connection's socket, to be closed.
    #[serde(default)]
    former_control: Option<Place>,
    flows: Vec<FlowLeft>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FlowLeft {
    id: FlowId,
    flow: Flow,
    number: u64,
    local: SocketAddr,
    peer: SocketAddr,
    /// The application's end of its connection, and vtld's.
    app_addresses: Option<[SocketAddr; 2]>,
    age: Duration,
    /// Pinned to TCP by hand.
    stays: bool,
    /// For so long; `None`: until it is moved.
    #[serde(default)]
    stays_for: Option<Duration>,
    /// Whether the peer's access to this port has been checked.
    #[serde(default = "looked_at")]
    is_judged: bool,
    /// Bytes read from the application and not sent yet, and whether the last one is TCP's urgent byte.
    pending: (Bytes, bool),
    app: Place,
    tcp: Place,
    /// vtld's end of the connection to a local application, which sees the client's address instead.
    shown: Option<SocketAddr>,
}

/// Default for a daemon that has no such check.
fn looked_at() -> bool {
    true
}

impl Names {
    fn left(&self) -> Vec<(IpAddr, IpAddr, Desired, FlowName)> {
        let latest = lock(&self.latest);
        let all = latest.iter().flat_map(|((local, peer), names)| {
            let left =
                |(desired, name): &(Desired, FlowName)| (*local, *peer, desired.clone(), *name);
            names.iter().map(left)
        });
        all.collect()
    }

    fn resume(&self, left: Vec<(IpAddr, IpAddr, Desired, FlowName)>) {
        let mut latest = lock(&self.latest);
        for (local, peer, desired, name) in left {
            latest
                .entry((local, peer))
                .or_default()
                .push((desired, name));
        }
    }
}

impl Flows {
    /// Stops all flows, and hands them over. Chunks that arrive later are not confirmed, so peers retransmit them.
    pub(super) fn hand_over(&self, outgoing: &mut Outgoing) -> Handover {
        let peers = self.peers();
        Handover {
            peers: peers.iter().map(|peer| peer.leave(outgoing)).collect(),
            names: self.names.left(),
            started: self.started.get(),
        }
    }

    /// Restores the state handed over by a former daemon.
    pub(super) fn resume(self: &Rc<Self>, left: Handover, descriptors: &mut Descriptors) {
        self.started.set(left.started);
        self.names.resume(left.names);
        for peer in left.peers {
            self.resume_peer(peer, descriptors);
        }
    }

    fn resume_peer(self: &Rc<Self>, left: PeerLeft, descriptors: &mut Descriptors) {
        let Some((peer, _)) = self.peer(left.key) else {
            let flows = left.flows.len();
            return tracing::warn!(peer = %left.key.peer, flows, "handover: association lost: there are too many");
        };
        peer.resume(&left);
        drop(left.former_control.map(|place| descriptors.take(place)));
        for flow in left.flows {
            let number = flow.number;
            if let Err(error) = self.resume_flow(&peer, flow, descriptors) {
                tracing::warn!(%error, number, "handover: flow lost");
            }
        }
        match left.key.opener {
            Side::Local => {
                spawn_local(Rc::clone(self).keep(peer));
            }
            Side::Peer => {
                spawn_local(Rc::clone(self).look_after(peer));
            }
        }
    }

    fn resume_flow(
        &self,
        peer: &Rc<Peer>,
        left: FlowLeft,
        descriptors: &mut Descriptors,
    ) -> io::Result<()> {
        let app = TcpStream::from(descriptors.take(left.app)?);
        let tcp = TcpStream::from(descriptors.take(left.tcp)?);
        let guard = left.shown.map(|end| self.hooker.adopt_client(end));
        let ends = Ends::new(app, tcp, guard)?;
        let addresses = [left.local, left.peer];
        let mut state = State::new(left.number, Observer::none(), addresses, ends)?;
        state.app = left.app_addresses;
        state.began = Instant::now().checked_sub(left.age).unwrap_or(state.began);
        state.why.set("vtld was restarted");
        state.pending.replace(left.pending);
        state.stays.set(left.stays);
        let until = left.stays_for.map(|time| Instant::now() + time);
        state.stays_until.set(until);
        state.is_judged.set(left.is_judged);
        peer.begin(left.id, state, Beginning::Left(Box::new(left.flow)));
        Ok(())
    }
}

impl Peer {
    fn leave(&self, outgoing: &mut Outgoing) -> PeerLeft {
        // The next daemon does not know what the connections had before.
        self.set_bbr(false);
        // What they were moved to ends with this daemon, which puts them onto TCP.
        for (id, state) in self.states() {
            if self.with(id, |flow| flow.send.path() != Path::Tcp) == Some(true) {
                state.stays.set(false);
                state.stays_until.set(None);
            }
        }
        let (mut flows, carriers) = self.take_all();
        let mut left = Vec::new();
        for (id, state) in self.states() {
            state.stop();
            let Some(flow) = flows.remove(&id).filter(|flow| flow.error().is_none()) else {
                continue;
            };
            match state.leave(id, flow, outgoing) {
                Ok(flow) => left.push(flow),
                Err(error) => tracing::warn!(%error, "handover: cannot hand over a flow: reset"),
            }
        }
        let control = self.control.take();
        let former_control = control.and_then(|(_, control)| {
            control.leave();
            outgoing.put(control.tcp()).ok()
        });
        PeerLeft {
            key: self.key,
            // Taken: no more carriers may be opened here, whose numbers the next daemon would reuse.
            target: self.settled_target().into_iter().collect(),
            desired: self.forget_desired(),
            dest: self.dest.take(),
            forwards: self.gateway.forwards.get(),
            host: self.gateway.host.get(),
            last_carrier: self.last_carrier.get(),
            carriers: carriers.into_iter().collect(),
            shown: self.shown.get().map(|key| key.to_string()),
            former_control,
            flows: left,
        }
    }

    fn resume(&self, left: &PeerLeft) {
        if let Some(desired) = &left.desired {
            self.set_desired(desired.clone());
        }
        self.set_target(left.target.first().cloned());
        self.dest.set(left.dest);
        self.gateway.forwards.set(left.forwards);
        self.gateway.host.set(left.host);
        let shown = left.shown.as_deref();
        self.shown.set(shown.and_then(PublicKey::parse));
        self.last_carrier.set(left.last_carrier);
        self.restore_broken(&left.carriers);
    }
}

impl State {
    fn leave(&self, id: FlowId, flow: Flow, outgoing: &mut Outgoing) -> io::Result<FlowLeft> {
        let ends = self.ends.borrow().clone();
        let ends = ends.ok_or(io::ErrorKind::NotConnected)?;
        // The kernel would not tell the next daemon.
        if self.app_has_failed.get() || self.tcp_has_failed.get() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        Ok(FlowLeft {
            id,
            flow,
            number: self.number,
            local: self.local,
            peer: self.peer,
            app_addresses: self.app,
            age: self.began.elapsed(),
            stays: self.stays.get(),
            stays_for: {
                let until = self.stays_until.get();
                until.map(|until| until.saturating_duration_since(Instant::now()))
            },
            is_judged: self.is_judged.get(),
            pending: self.pending.take(),
            app: outgoing.put(ends.app.get_ref())?,
            tcp: outgoing.put(ends.tcp.get_ref())?,
            shown: ends
                .guard
                .as_ref()
                .map(crate::hooker::ClientAddressGuard::end),
        })
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use vtl_proto::carrier::Kind;

    use super::*;

    #[test]
    fn target__tcp_is_not_nothing() {
        for target in [None, Some(None), Some(Some((Kind::Quic, None)))] {
            let left: Vec<Target> = target.clone().into_iter().collect();
            let mut bytes = Vec::new();
            ciborium::into_writer(&left, &mut bytes).expect("written");
            let read: Vec<Target> = ciborium::from_reader(&bytes[..]).expect("read");
            assert_eq!(read.first().cloned(), target);
        }
    }
}
