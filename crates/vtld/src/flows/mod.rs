//! Flows over carriers (PROTOCOL.md, section 7): each captured flow has a TCP connection of its own; its bytes
//! travel over a better carrier while one is up.
//!
//! - `peer.rs`: an association, its flows and carriers, and its status for commands.
//! - `flow.rs`: moves the bytes of one flow, by `socket.rs`. `profile.rs`: classifies its application by them.
//! - `congestion.rs`: the congestion control of flows' own TCP connections.
//! - `control.rs`: the control connection. `carrier/`: one file for each kind of carrier.
//! - `keeper.rs`: opens both. `grants.rs`: lets peers open carriers. `gateway.rs`: for hosts behind gateways.
//! - `budget.rs`: the memory budget.
//! - `stacks.rs`: opens sessions on further paths, and tells peers this host's further addresses (`addresses.rs`);
//!   `flow/spread.rs`: spreads a flow over all of them.
//! - `licence.rs`: stops flows whose TCP connections would be dead.
//! - `measure.rs`: readings for the monitor of paths. `reconfigure.rs`: carriers by what is known of them, as a rule's
//!   conditions say, or the model (`select.rs`), which keeps bounds where it can (`bounds.rs`), and which flows correct (`learn.rs`).
//! - `handover.rs`: hands all of it over to the next daemon.
//!
//! The protocol's state machines are in `vtl-core`; here are sockets, clocks and tasks (`parts.rs`: polling them),
//! all on one thread (`thread.rs`).

mod addresses;
mod bounds;
mod budget;
mod carrier;
mod congestion;
mod control;
mod flow;
mod gateway;
mod grants;
mod handover;
mod keeper;
mod learn;
mod licence;
mod measure;
mod parts;
mod peer;
mod profile;
mod reconfigure;
mod select;
mod socket;
mod stacks;
mod thread;

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::{sync::Notify, task::spawn_local, time::timeout};
use vtl_control::{AssociationEvent, CarrierStatus, FlowList, FlowStatus, What};
use vtl_pool::key::PublicKey;
use vtl_proto::{
    carrier::Kind,
    frame::{
        CONTROL_CONNECTION, FlowId, FlowName, LETS_BBR, REQUIRES_CARRIER, REQUIRES_ENCRYPTION, Side,
    },
};

use crate::{
    Scope,
    broker::{self, random_token},
    events::emit,
    hooker::{
        self, CarrierOptions, ClientFlow, ConnectError, Executable, Pulse, ServerFlow,
        rules::Prefix,
    },
    identity::Identity,
    network::{Network, Waiting, admits},
    option,
    selection::Selection,
};

use addresses::Addresses;
use budget::Budget;
use carrier::Endpoint;
pub use carrier::process::{drop_privileges, run};
use flow::{Beginning, Ends, ROOM, State};
pub(crate) use handover::Handover;
use learn::Teacher;
use peer::Peer;
use profile::{Observer, Profiles};
pub(crate) use reconfigure::RuleState;
pub(crate) use select::Auto;
use serde::{Deserialize, Serialize};
pub(crate) use thread::Handle;

/// Maximum number of associations,
const MAX_PEERS: usize = 1024;
/// with one address (it may be a NAT's), and with one network.
const MAX_OF_HOST: usize = 64;
const MAX_OF_NETWORK: usize = MAX_PEERS / 4;
/// Address pairs in [`Names`] above which those without an association are evicted.
const MAX_NAMES: usize = 4096;
/// Timeout of a connect that requires a carrier: enough for three attempts over a satellite link, less than the
/// applications' own connect timeouts.
const CARRIER_WAIT: Duration = Duration::from_secs(10);
/// Maximum number of flows, or of associations, in one message.
const PAGE: usize = 100;

/// Identity of an association. The tag is chosen by the opener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Key {
    opener: Side,
    local: IpAddr,
    peer: IpAddr,
    tag: u32,
}

impl Key {
    /// The event that the association's control connection is up, or up no more.
    fn event(&self, is_up: bool) -> What {
        let event = AssociationEvent {
            association: self.tag,
            local: self.local,
            peer: self.peer,
            role: peer::role(self.opener).into(),
        };
        match is_up {
            true => What::AssociationUp(event),
            false => What::AssociationLost(event),
        }
    }
}

/// The carrier that an association's flows are to use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Desired {
    pub(crate) kind: Kind,
    /// Parameters of the session, if the carrier is a graft.
    #[serde(rename = "over")]
    pub(crate) options: Option<Arc<CarrierOptions>>,
    /// Carriers must be encrypted.
    #[serde(default)]
    pub(crate) encrypted: bool,
    /// The rule that hooked the flows, if it has conditions on the path.
    #[serde(default)]
    pub(crate) rule: Option<Arc<str>>,
    /// The flows are marked loss-tolerant; those of a former daemon's by a lossy carrier alone.
    #[serde(default)]
    pub(crate) tolerant: bool,
    /// The model chooses the carrier; `kind` and `options` count for nothing.
    #[serde(default)]
    pub(crate) auto: Option<Auto>,
}

impl Desired {
    /// The carrier of a kind that a peer opens: no parameters, encryption not required.
    fn of(kind: Kind) -> Self {
        Self {
            kind,
            options: None,
            encrypted: false,
            rule: None,
            tolerant: false,
            auto: None,
        }
    }

    /// Whether its flows tolerate losses.
    fn may_lose(&self) -> bool {
        self.tolerant || matches!(self.options.as_deref(), Some(CarrierOptions::Lossy(_)))
    }
}

/// What flows are to go by: a kind of carrier, with a session's parameters; `None`: their TCP connections.
type Target = Option<(Kind, Option<Arc<CarrierOptions>>)>;

/// The latest names of flows between two addresses.
type Latest = Vec<(Desired, FlowName)>;

/// Allocates the names of flows that this host opens.
#[derive(Default)]
pub(crate) struct Names {
    latest: Mutex<HashMap<(IpAddr, IpAddr), Latest>>,
    /// Associations whose control connection is up.
    known: Mutex<HashSet<Key>>,
    /// Associations of `auto` for which the model has chosen TCP under its own control.
    without_bbr: Mutex<HashSet<Key>>,
    /// Profiles of earlier flows: those of different profiles have associations of their own.
    profiles: Arc<Profiles>,
    /// What flows have taught.
    teacher: Teacher,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // Poisoning is harmless: no critical section leaves a partial update.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Names {
    /// Whether this host has opened an association with `peer` whose control connection is up.
    pub(crate) fn knows(&self, peer: IpAddr) -> bool {
        self.has_known(Side::Local, peer)
    }

    /// The same of an association that `peer` has opened.
    pub(crate) fn serves(&self, peer: IpAddr) -> bool {
        self.has_known(Side::Peer, peer)
    }

    fn has_known(&self, opener: Side, peer: IpAddr) -> bool {
        let known = lock(&self.known);
        known
            .iter()
            .any(|key| (key.opener, key.peer) == (opener, peer))
    }

    fn set_known(&self, key: Key, is_known: bool) {
        let mut known = lock(&self.known);
        let is_changed = match is_known {
            true => known.insert(key),
            false => known.remove(&key),
        };
        drop(known);
        if is_changed {
            emit(key.event(is_known));
        }
    }

    fn set_lets_bbr(&self, key: Key, lets_bbr: bool) {
        let mut without_bbr = lock(&self.without_bbr);
        match lets_bbr {
            true => without_bbr.remove(&key),
            false => without_bbr.insert(key),
        };
    }

    /// Allocates the name of the next flow between two addresses. Flows with the same desired carrier share an
    /// association (tag). `is_on`: the model chooses for flows of `auto`.
    fn next(
        &self,
        local: IpAddr,
        peer: IpAddr,
        desired: Desired,
        required: bool,
        is_on: bool,
    ) -> FlowName {
        let mut latest = lock(&self.latest);
        if latest.len() >= MAX_NAMES {
            // Evict destinations without an association: most do not speak VTL.
            let known = lock(&self.known);
            latest.retain(|(local, peer), names| {
                let is_known = |name: &FlowName| {
                    let is_it =
                        |key: &Key| (key.local, key.peer, key.tag) == (*local, *peer, name.tag);
                    known.iter().any(is_it)
                };
                names.retain(|(_, name)| is_known(name));
                !names.is_empty()
            });
        }
        let names = latest.entry((local, peer)).or_default();
        let found = names.iter().position(|(known, _)| *known == desired);
        let encrypted = desired.encrypted;
        let may_be_bbr = desired.auto.is_some() && is_on;
        let index = found.unwrap_or_else(|| {
            let name = FlowName {
                // Truncated on purpose.
                tag: random_token() as u32,
                number: CONTROL_CONNECTION,
            };
            names.push((desired, name));
            names.len() - 1
        });
        let name = &mut names[index].1;
        name.number += 1;
        let mut name = *name;
        if name.number == LETS_BBR - 1 {
            names.swap_remove(index);
        }
        let key = Key {
            opener: Side::Local,
            local,
            peer,
            tag: name.tag,
        };
        if may_be_bbr && !lock(&self.without_bbr).contains(&key) {
            name.number |= LETS_BBR;
        }
        if required {
            name.number |= REQUIRES_CARRIER;
        }
        if encrypted {
            name.number |= REQUIRES_ENCRYPTION;
        }
        name
    }

    /// Drops the names of an association that has ended: flow numbers are never reused, so the next association gets a
    /// new tag.
    fn forget(&self, key: Key) {
        self.set_lets_bbr(key, true);
        let mut latest = lock(&self.latest);
        if let Some(names) = latest.get_mut(&(key.local, key.peer)) {
            names.retain(|(_, name)| name.tag != key.tag);
            if names.is_empty() {
                latest.remove(&(key.local, key.peer));
            }
        }
    }
}

/// A flow opened by this host, TCP connection established.
pub(crate) struct Opened {
    pub(crate) app: TcpStream,
    pub(crate) src: SocketAddr,
    pub(crate) dest: SocketAddr,
    pub(crate) tcp: TcpStream,
    pub(crate) name: FlowName,
    pub(crate) desired: Desired,
    /// What the application executes, if that is known.
    pub(crate) exe: Option<Executable>,
    /// This host is a gateway: `src` is another host.
    pub(crate) forwarded: bool,
}

/// Policy towards peers.
pub(crate) struct Limits {
    /// This host's key, and authentication of peers.
    pub(crate) identity: Arc<Identity>,
    /// Memory budget of flows, bytes.
    pub(crate) memory: u64,
    /// Prefixes of hosts whose flows are carried; empty: all hosts.
    pub(crate) from: Vec<Prefix>,
    /// Whether carriers that this host opens are encrypted, if the peer supports it.
    pub(crate) seals: bool,
    /// The interfaces that VTL uses.
    pub(crate) scope: Scope,
    /// Whether the model chooses for the carrier `auto`.
    pub(crate) selection: Arc<Selection>,
}

/// The association that a carrier was granted to, and the public key of the peer at that time.
type Promise = (Rc<Peer>, Option<PublicKey>);

/// The endpoint of a kind of carrier, or when it could not be started.
type Started = Result<Rc<dyn Endpoint>, Instant>;

/// All associations.
pub(crate) struct Flows {
    hooker: hooker::Handle,
    broker: broker::Handle,
    names: Arc<Names>,
    /// Heartbeat of the thread.
    pulse: Arc<Pulse>,
    peers: RefCell<HashMap<Key, Rc<Peer>>>,
    budget: Rc<Budget>,
    limits: Arc<Limits>,
    /// A new association was added.
    appeared: Notify,
    /// Flows started so far.
    started: Cell<u64>,
    /// By kind.
    endpoints: RefCell<HashMap<Kind, Started>>,
    /// Networks of carriers that arrived before their associations.
    early: Waiting,
    /// This host's addresses, watched once they are of interest.
    addresses: RefCell<Option<Rc<Addresses>>>,
    /// Outstanding grants, by token.
    promises: RefCell<HashMap<u64, Promise>>,
}

impl Flows {
    pub(crate) fn new(
        hooker: hooker::Handle,
        broker: broker::Handle,
        names: Arc<Names>,
        pulse: Arc<Pulse>,
        limits: Arc<Limits>,
    ) -> Rc<Self> {
        Rc::new(Self {
            hooker,
            broker,
            names,
            pulse,
            peers: RefCell::default(),
            budget: Budget::new(limits.memory),
            limits,
            appeared: Notify::new(),
            started: Cell::new(0),
            endpoints: RefCell::default(),
            early: Waiting::new(grants::MAX_EARLY),
            addresses: RefCell::default(),
            promises: RefCell::default(),
        })
    }

    /// Completes an application's connect that requires a carrier: calls `succeed` once one is up, refuses the connect
    /// after [`CARRIER_WAIT`].
    pub(crate) fn await_carrier(
        self: &Rc<Self>,
        flow: ClientFlow,
        desired: Desired,
        succeed: impl FnOnce(ClientFlow, Desired) + 'static,
    ) {
        let refuse = |flow: ClientFlow, why| {
            tracing::info!(dest = %flow.dest, why, "flows: connect refused: it requires a carrier, and none can be opened");
            flow.app.refuse(ConnectError::HostUnreachable);
        };
        let key = Key {
            opener: Side::Local,
            local: flow.src.ip(),
            peer: flow.dest.ip(),
            tag: flow.name.tag,
        };
        let Some(peer) = self.opened_peer(key, flow.dest, &desired) else {
            return refuse(flow, "too many associations");
        };
        spawn_local(async move {
            let carried = peer.until(Peer::is_ready);
            match timeout(CARRIER_WAIT, carried).await {
                Ok(()) => succeed(flow, desired),
                Err(_) => refuse(flow, "none could be opened in time"),
            }
        });
    }

    /// Gets or creates the association of a flow that this host opens, and keeps its carriers open. `None` if there are
    /// too many.
    fn opened_peer(
        self: &Rc<Self>,
        key: Key,
        dest: SocketAddr,
        desired: &Desired,
    ) -> Option<Rc<Peer>> {
        let (peer, is_new) = self.peer(key)?;
        peer.dest.set(Some(dest));
        peer.set_desired(desired.clone());
        if desired.encrypted {
            peer.require_encryption();
        }
        peer.note_answer();
        if is_new {
            self.begin_model(&peer);
            spawn_local(Rc::clone(self).keep(Rc::clone(&peer)));
        }
        Some(peer)
    }

    /// Starts a flow of a local application to a destination that speaks VTL.
    pub(crate) fn opened(self: &Rc<Self>, flow: Opened) {
        let key = Key {
            opener: Side::Local,
            local: flow.src.ip(),
            peer: flow.dest.ip(),
            tag: flow.name.tag,
        };
        let Some(peer) = self.opened_peer(key, flow.dest, &flow.desired) else {
            // Dropping the flow resets both connections.
            if !flow.name.requires_carrier() {
                self.hooker.carry(flow.app, flow.tcp, None);
            }
            return;
        };
        peer.gateway.forwards.set(flow.forwarded);
        let near = self.hooker.near();
        if !near.is_zero() && peer.turns_out_near(&flow.tcp, near, self.limits.seals) {
            self.hooker.leave_near(flow.dest.ip());
        }
        let is_tolerant = flow.desired.may_lose();
        let id = FlowId {
            opener: Side::Local,
            number: flow.name.number,
        };
        if flow.forwarded {
            option::keep_alive(&flow.app, option::IDLE_S, option::IDLE_AGAIN_S);
        }
        let ends = Ends::new(flow.app, flow.tcp, None);
        let (exe, profiles) = (flow.exe.as_ref(), &self.names.profiles);
        let observer = Observer::new(flow.dest, exe, profiles, flow.desired.auto.is_some());
        let addresses = [flow.src, flow.dest];
        self.start(&peer, id, ends, addresses, observer, is_tolerant);
    }

    /// Handles a peer's connection that was steered here, a flow or a control connection; `name` is from its SYN.
    pub(crate) fn steered(self: &Rc<Self>, flow: ServerFlow, name: FlowName) {
        let key = Key {
            opener: Side::Peer,
            local: flow.dest.ip(),
            peer: flow.client.ip(),
            tag: name.tag,
        };
        let is_admitted = admits(&self.limits.from, key.peer);
        let peer = is_admitted.then(|| self.peer(key)).flatten();
        let peer = peer.map(|(peer, is_new)| {
            peer.gateway.forwards.set(flow.forwarded.is_some());
            if is_new {
                spawn_local(Rc::clone(self).look_after(Rc::clone(&peer)));
            }
            peer
        });
        if name.number == CONTROL_CONNECTION {
            if let Some(peer) = peer {
                spawn_local(Rc::clone(self).serve_control(peer, flow.peer));
            }
            return;
        }
        let is_out_of_reach = |peer: &Rc<Peer>| peer.out_of_reach(flow.dest.port()).is_some();
        if name.requires_carrier() && peer.as_ref().is_none_or(is_out_of_reach) {
            return tracing::debug!(client = %flow.client, "flows: reset: it requires a carrier, and came without");
        }
        let (app, guard) = match flow.forwarded {
            Some(Some(app)) => {
                option::keep_alive(&app, option::IDLE_S, option::IDLE_AGAIN_S);
                (app, None)
            }
            // There is nothing to connect to on this host.
            Some(None) => return,
            None => match self.hooker.connect_local_app(flow.dest, flow.client) {
                Ok((app, guard)) => (app, Some(guard)),
                Err(error) => {
                    tracing::debug!(%error, dest = %flow.dest, "flows: cannot connect to the local application");
                    return;
                }
            },
        };
        let Some(peer) = peer else {
            return self.hooker.carry(app, flow.peer, guard);
        };
        if name.lets_bbr() {
            peer.note_lets_bbr();
            self.follow_preferred_control(&peer);
        }
        let id = FlowId {
            opener: Side::Peer,
            number: name.number,
        };
        let ends = Ends::new(app, flow.peer, guard);
        let is_tolerant = self.hooker.tolerates(flow.dest.port());
        let observer = Observer::of_peer(flow.dest);
        let addresses = [flow.dest, flow.client];
        self.start(&peer, id, ends, addresses, observer, is_tolerant);
    }

    /// Starts a flow. `addresses`: local, peer. `is_tolerant`: the application tolerates losses.
    fn start(
        &self,
        peer: &Rc<Peer>,
        id: FlowId,
        ends: io::Result<Ends>,
        addresses: [SocketAddr; 2],
        observer: Observer,
        is_tolerant: bool,
    ) {
        self.started.set(self.started.get() + 1);
        let number = self.started.get();
        if let Ok(ends) = &ends {
            let flows = self
                .peers
                .borrow()
                .values()
                .map(|peer| peer.count_flows())
                .sum();
            if self.budget.has_room(flows, ROOM) {
                // On failure the connection is slower.
                let _ = option::make_room(&ends.tcp, ROOM);
            }
        }
        let state = ends.and_then(|ends| State::new(number, observer, addresses, ends));
        match state {
            Ok(state) => peer.begin(id, state, Beginning::New { is_tolerant }),
            Err(error) => {
                tracing::debug!(%error, peer = %addresses[1], "flows: cannot begin: reset");
            }
        }
    }

    /// Gets or creates an association, and tells whether it is new. `None` if there are too many.
    fn peer(&self, key: Key) -> Option<(Rc<Peer>, bool)> {
        let mut peers = self.peers.borrow_mut();
        if let Some(peer) = peers.get(&key) {
            return Some((Rc::clone(peer), false));
        }
        let network = Network::of(key.peer);
        let of_host = peers.keys().filter(|other| other.peer == key.peer);
        let of_network = (peers.keys()).filter(|other| Network::of(other.peer) == network);
        if peers.len() >= MAX_PEERS
            || of_host.count() >= MAX_OF_HOST
            || of_network.count() >= MAX_OF_NETWORK
        {
            return None;
        }
        let account = self.budget.open(Network::of(key.peer));
        let must_be_judged = self.limits.identity.judges_first(key.opener);
        let peer = Rc::new(Peer::new(
            key,
            account,
            !must_be_judged,
            Arc::clone(self.broker.monitor()),
        ));
        peers.insert(key, Rc::clone(&peer));
        self.appeared.notify_waiters();
        Some((peer, true))
    }

    fn peers(&self) -> Vec<Rc<Peer>> {
        self.peers.borrow().values().map(Rc::clone).collect()
    }

    fn forget(&self, peer: &Peer) {
        self.peers.borrow_mut().remove(&peer.key);
        self.names.forget(peer.key);
    }

    /// A page of flows, sorted by id, from id `from` on.
    pub(crate) fn list(&self, from: u64) -> FlowList {
        let peers = self.peers.borrow();
        let mut meant: Vec<(u64, FlowId, &Rc<Peer>)> = Vec::new();
        for peer in peers.values() {
            let numbers = peer.numbers(from).into_iter();
            meant.extend(numbers.map(|(number, id)| (number, id, peer)));
        }
        let mut more = None;
        // Rows cost more than numbers: only those of the page are made.
        if meant.len() > PAGE {
            more = Some(meant.select_nth_unstable_by_key(PAGE, |(n, ..)| *n).1.0);
            meant.truncate(PAGE);
        }
        meant.sort_unstable_by_key(|(n, ..)| *n);
        let row = |(_, id, peer): (u64, FlowId, &Rc<Peer>)| peer.listed(id);
        let flows = meant.into_iter().filter_map(row).collect();
        FlowList { flows, more }
    }

    fn find(&self, number: u64) -> Option<(Rc<Peer>, FlowId)> {
        let peers = self.peers.borrow();
        let mut found = peers
            .values()
            .filter_map(|peer| Some((Rc::clone(peer), peer.find(number)?)));
        found.next()
    }

    /// Status of one flow.
    pub(crate) fn show(&self, number: u64) -> Result<FlowStatus, String> {
        let (peer, id) = self.find(number).ok_or_else(|| no_such(number))?;
        peer.status(id).ok_or_else(|| no_such(number))
    }

    /// Moves the sending direction of a flow to another carrier, which is opened if none is up. `stay`: for how long;
    /// `None`: until that breaks.
    pub(crate) async fn move_flow(
        &self,
        number: u64,
        carrier: &str,
        stay: Option<Duration>,
    ) -> Result<FlowStatus, String> {
        let (peer, id) = self.find(number).ok_or_else(|| no_such(number))?;
        peer.move_flow(id, carrier, stay).await?;
        peer.status(id).ok_or_else(|| no_such(number))
    }

    /// Follows a change of [`Limits::selection`] at once.
    pub(crate) fn follow_selection(&self) {
        self.follow_paths(&self.peers());
    }

    /// Status, one row for each carrier.
    pub(crate) fn status(&self) -> Vec<CarrierStatus> {
        let peers = self.peers.borrow();
        peers.values().flat_map(|peer| peer.rows()).collect()
    }
}

/// Error message for an unknown flow.
fn no_such(number: u64) -> String {
    format!("there is no flow {number}: vtl flow list")
}

/// Nanoseconds since `since`, the clock of `vtl-core`.
fn now_ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn names__tell_whom_this_host_serves() {
        let names = Names::default();
        let [local, peer] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().expect("an address"));
        let key = |opener| Key {
            opener,
            local,
            peer,
            tag: 1,
        };
        names.set_known(key(Side::Peer), true);
        assert!(names.serves(peer) && !names.knows(peer) && !names.serves(local));
        names.set_known(key(Side::Local), true);
        names.set_known(key(Side::Peer), false);
        assert!(names.knows(peer) && !names.serves(peer));
    }
}
