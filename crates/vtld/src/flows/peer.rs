//! An association: its flows, its carriers, and what passes between them.

mod commands;
mod identity;

use std::{
    cell::{Cell, RefCell, RefMut},
    collections::{BTreeMap, BTreeSet},
    future::Future,
    io::IoSlice,
    net::{SocketAddr, TcpStream},
    pin::pin,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use tokio::sync::Notify;
use vtl_core::{
    Association,
    association::Event,
    flow::{Flow, INITIAL_CREDIT, Path},
};
use vtl_pool::key::PublicKey;
use vtl_proto::{
    carrier::Kind,
    frame::{CarrierId, FlowId, Frame, Side},
};

use super::{
    Desired, Key,
    budget::{Account, Room},
    carrier::Carrier,
    control::Control,
    flow::{Beginning, RESET, State},
    now_ns,
    socket::handshake,
};
use crate::{
    hooker::Over,
    identity::{Refused, Standing},
};

/// Receive window of a flow, at most, bytes. Delivery in order takes two bandwidth-delay products where packets get
/// lost: this is 100 Mbit/s with a round trip of a second, and what a ring of 16,384 slots holds.
const WINDOW: u64 = 24 << 20;
/// Carriers at a time.
const MOST_CARRIERS: usize = 16;
/// Control frames that a carrier is given at a time, bytes.
const CONTROL: usize = 4096;

/// Connections in a row whose handshakes were quick make a host near.
const QUICK: u32 = 8;
/// A path is clean where at most one of so many packets of the carriers was lost.
const CLEAN: u64 = 1000;
/// That takes so many packets at least.
const PROOF: u64 = 16;

/// Why flows go by a carrier.
const BEST: &str = "the best carrier that there is";

/// Bytes to the peer and from it.
fn counts(flow: &Flow) -> [u64; 2] {
    [flow.send.next_offset(), flow.receive.received()]
}

struct Running {
    carrier: Rc<dyn Carrier>,
    /// There are control frames for it.
    owes: Rc<Notify>,
    /// Bytes of flows, and of control frames.
    sent: Cell<u64>,
    received: Cell<u64>,
}

/// Moves a flow to a carrier, unless it was told to stay where it is.
fn prefer(core: &mut Association, id: FlowId, state: &State, carrier: CarrierId) {
    if !state.stays.get() {
        state.why.set(BEST);
        core.move_flow(id, Path::Carrier(carrier));
    }
}

/// Sees to it that a carrier is let go of, also where its task ends by a panic in somebody's library.
struct Serving<'a> {
    peer: &'a Peer,
    id: CarrierId,
}

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.peer.broken(self.id);
    }
}

/// An association with another host.
pub(super) struct Peer {
    pub(super) key: Key,
    began: Instant,
    core: RefCell<Association>,
    flows: RefCell<BTreeMap<FlowId, Rc<State>>>,
    carriers: RefCell<BTreeMap<CarrierId, Running>>,
    pub(super) last_carrier: Cell<u32>,
    /// Of the carriers that flows go by unless they are told otherwise: what the opener wants.
    desired: RefCell<Option<Desired>>,
    /// Kinds of carriers that flows were moved to by hand.
    wanted: RefCell<BTreeSet<u8>>,
    /// The control connection.
    pub(super) control: RefCell<Option<(CarrierId, Rc<Control>)>>,
    /// Memory charged to the association; the carriers' share of it, as of the last tick; the limits in force.
    account: Account,
    of_carriers: Cell<u64>,
    room: Cell<Room>,
    /// Bytes that flows which have ended went on without.
    skipped: Cell<u64>,
    /// Flows require encryption: only carriers that have it serve, and where there is no better one, the control
    /// connection.
    encrypted: Cell<bool>,
    /// Whether carriers may serve: not those of a peer that is refused, or must be known first.
    admitted: Cell<bool>,
    /// The key that it has shown, and why it is refused.
    pub(super) shown: Cell<Option<PublicKey>>,
    refused: RefCell<Option<Refused>>,
    /// What it may do here, once it is admitted.
    standing: RefCell<Standing>,
    /// Where the latest flow that this host has opened leads.
    pub(super) dest: Cell<Option<SocketAddr>>,
    /// Connections in a row whose handshakes were as quick as those with near hosts.
    quick: Cell<u32>,
    /// How often the other host has answered to VTL's option.
    answers: Cell<u64>,
    /// How often a daemon has appeared or taken over there.
    successions: Cell<u64>,
    /// The first flow or carrier has come, or the last one has gone; a sign has come.
    pub(super) changed: Notify,
}

impl Peer {
    /// `admitted`: it need not be known.
    pub(super) fn new(key: Key, account: Account, admitted: bool) -> Self {
        Self {
            key,
            began: Instant::now(),
            core: RefCell::new(Association::new(account.flow_window(WINDOW))),
            flows: RefCell::default(),
            carriers: RefCell::default(),
            last_carrier: Cell::new(0),
            desired: RefCell::default(),
            wanted: RefCell::default(),
            control: RefCell::default(),
            account,
            of_carriers: Cell::new(0),
            room: Cell::new(Room::Ample),
            skipped: Cell::new(0),
            encrypted: Cell::new(false),
            admitted: Cell::new(admitted),
            shown: Cell::new(None),
            refused: RefCell::default(),
            standing: RefCell::default(),
            dest: Cell::new(None),
            quick: Cell::new(0),
            answers: Cell::new(0),
            successions: Cell::new(0),
            changed: Notify::new(),
        }
    }

    /// A connection to the host is up; whether the host has turned out to be near, over a clean path. `seals`: this
    /// host has its carriers encrypted, so the proof must come from encrypted ones of a peer that is who it was:
    /// anybody on the path can make handshakes quick.
    pub(super) fn turns_out_near(
        &self,
        connection: &TcpStream,
        near: Duration,
        seals: bool,
    ) -> bool {
        let quick = handshake(connection).is_some_and(|took| took <= near);
        self.quick.set(if quick { self.quick.get() + 1 } else { 0 });
        if self.quick.get() < QUICK || !self.is_admitted() {
            return false;
        }
        let carriers = self.carriers.borrow();
        let of_flows = carriers.values().map(|running| &running.carrier);
        let of_flows = of_flows.filter(|carrier| carrier.kind().is_some());
        let proving = of_flows.filter(|carrier| !seals || self.is_secret(&***carrier));
        let paths: Vec<_> = proving.filter_map(|carrier| carrier.path()).collect();
        let sent: u64 = paths.iter().map(|path| path.sent).sum();
        let lost: u64 = paths.iter().map(|path| path.lost).sum();
        // Measured while the hosts were busy, too.
        let most = near.as_secs_f64() * 1e3 * 4.0;
        let is_near =
            sent >= PROOF && lost * CLEAN <= sent && paths.iter().all(|path| path.rtt_ms <= most);
        if is_near {
            // To be proved again where it turns out otherwise.
            self.quick.set(0);
        }
        is_near
    }

    pub(super) fn has_flows(&self) -> bool {
        !self.flows.borrow().is_empty()
    }

    /// Whether a flow may have to wait for another's bytes.
    pub(super) fn has_flows_beside(&self) -> bool {
        self.flows.borrow().len() > 1
    }

    pub(super) fn has_carriers(&self) -> bool {
        !self.carriers.borrow().is_empty()
    }

    /// Completes when something is so.
    pub(super) async fn until(&self, is_so: impl Fn(&Self) -> bool) {
        loop {
            let mut changed = pin!(self.changed.notified());
            // Before the question, so that no answer is missed.
            changed.as_mut().enable();
            if is_so(self) {
                return;
            }
            changed.await;
        }
    }

    /// The other host has answered to VTL's option.
    pub(super) fn note_answer(&self) {
        self.answers.set(self.answers.get() + 1);
        self.changed.notify_waiters();
    }

    /// A daemon has appeared at the other host, or has taken over there.
    pub(super) fn note_succession(&self) {
        self.successions.set(self.successions.get() + 1);
        self.changed.notify_waiters();
    }

    /// Counts what says that a carrier which did not last is worth another attempt.
    pub(super) fn successions(&self) -> u64 {
        self.successions.get()
    }

    /// The same of what needs no more than VTL's option does.
    pub(super) fn signs(&self) -> u64 {
        self.answers.get() + self.successions.get()
    }

    /// Ends all carriers.
    pub(super) fn close_carriers(&self) {
        for running in self.carriers.borrow().values() {
            running.carrier.close();
        }
    }

    /// A control connection has ended. If it was the only one the other daemon has ended too: its other carriers
    /// would say so by silence.
    pub(super) fn lost_control(&self, control: &Rc<Control>) {
        let is_it = |(_, known): &mut (CarrierId, Rc<Control>)| Rc::ptr_eq(known, control);
        drop(self.control.borrow_mut().take_if(is_it));
        let has_control = |running: &Running| running.carrier.kind().is_none();
        if !self.carriers.borrow().values().any(has_control) {
            self.close_carriers();
            // The resets of flows' own connections may have got lost: they are asked as if bytes moved.
            for state in self.flows.borrow().values() {
                state.licence.note_moved();
            }
        }
    }

    /// The number of the next carrier that this host opens.
    pub(super) fn next_carrier(&self) -> CarrierId {
        self.last_carrier.set(self.last_carrier.get() + 1);
        CarrierId {
            opener: Side::Local,
            number: self.last_carrier.get(),
        }
    }

    pub(super) fn carrier(&self, id: CarrierId) -> Option<Rc<dyn Carrier>> {
        let carriers = self.carriers.borrow();
        carriers.get(&id).map(|found| Rc::clone(&found.carrier))
    }

    /// Decides by which carrier flows go, once.
    pub(super) fn set_desired(&self, desired: Desired) {
        self.desired.borrow_mut().get_or_insert(desired);
    }

    /// What the session of such a carrier is to be like.
    pub(super) fn over(&self, kind: Kind) -> Option<Arc<Over>> {
        let desired = self.desired.borrow();
        desired
            .as_ref()
            .filter(|desired| desired.kind == kind)?
            .over
            .clone()
    }

    /// Of the carriers that flows go by.
    pub(super) fn kind(&self) -> Option<Kind> {
        self.desired.borrow().as_ref().map(|desired| desired.kind)
    }

    /// Whether a carrier of a kind is needed, and none is there.
    pub(super) fn needs(&self, kind: Kind) -> bool {
        let is_wanted = self.kind() == Some(kind) || self.wanted.borrow().contains(&kind.number());
        is_wanted && self.admitted.get() && self.has_room() && self.latest(kind).is_none()
    }

    /// Of the carriers of a kind the one that came last.
    fn latest(&self, kind: Kind) -> Option<CarrierId> {
        let carriers = self.carriers.borrow();
        let mut of_kind = carriers
            .iter()
            .filter(|(_, c)| c.carrier.kind() == Some(kind));
        of_kind.next_back().map(|(id, _)| *id)
    }

    /// The carrier that flows go by.
    fn best(&self) -> Option<CarrierId> {
        let latest = self.kind().and_then(|kind| self.latest(kind));
        latest.or_else(|| self.encrypted.get().then(|| self.latest_control())?)
    }

    /// Of the control connections that are encrypted the one that came last.
    fn latest_control(&self) -> Option<CarrierId> {
        let carriers = self.carriers.borrow();
        let mut controls = carriers
            .iter()
            .filter(|(_, c)| c.carrier.kind().is_none() && c.carrier.is_encrypted());
        controls.next_back().map(|(id, _)| *id)
    }

    /// Whether flows can go by it, and the other daemon has said that it takes them for VTL's: a middlebox may have
    /// taken the option out of what only that one has seen.
    pub(super) fn is_ready(&self) -> bool {
        self.best().is_some() && self.control.borrow().is_some()
    }

    /// A flow's TCP connection is established; false if its number was used before.
    pub(super) fn open(&self, id: FlowId, state: &Rc<State>, beginning: Beginning) -> bool {
        if self.flows.borrow().contains_key(&id) {
            return false;
        }
        if id.requires_encryption() {
            self.require_encryption();
        }
        self.flows.borrow_mut().insert(id, Rc::clone(state));
        self.changed.notify_waiters();
        let is_refused = match &beginning {
            Beginning::New { .. } => self.refuses(id, state),
            Beginning::Left { .. } => false,
        };
        let best = self.best();
        let mut core = self.core.borrow_mut();
        match beginning {
            Beginning::New { .. } if is_refused => core.open_refused(id),
            Beginning::New { is_tolerant } => {
                core.open(id);
                if let Some(flow) = core.flow_mut(id).filter(|_| is_tolerant) {
                    flow.set_tolerant();
                }
            }
            Beginning::Left(flow) => {
                state.rates.begin(counts(&flow));
                core.restore(id, *flow);
            }
        }
        if let Some(best) = best {
            prefer(&mut core, id, state, best);
        }
        drop(core);
        self.turn();
        true
    }

    /// Changes a flow; what it owes the peer then is queued. `None` if it has ended, or was reset: the bytes that it
    /// had are gone then, and what is left must not look like a whole stream.
    pub(super) fn with<T>(&self, id: FlowId, change: impl FnOnce(&mut Flow) -> T) -> Option<T> {
        let mut core = self.core.borrow_mut();
        let flow = core.flow_mut(id).filter(|flow| flow.error().is_none());
        let result = flow.map(change);
        core.owe(id);
        self.ring(&core);
        self.account(core);
        result
    }

    /// Ends a flow in an error.
    pub(super) fn reset(&self, id: FlowId) {
        self.core.borrow_mut().reset(id, RESET);
        self.turn();
    }

    /// Takes out all flows, whose carriers have ended, and the carriers' numbers: nothing that comes from now on
    /// is taken.
    pub(super) fn take_all(&self) -> (BTreeMap<FlowId, Flow>, BTreeSet<CarrierId>) {
        let mut core = self
            .core
            .replace(Association::new(self.account.flow_window(WINDOW)));
        let mut carriers: BTreeSet<CarrierId> = core.untold_broken().collect();
        for id in self.carriers.borrow().keys() {
            core.carrier_broken(*id, []);
            carriers.insert(*id);
        }
        (core.into_flows().collect(), carriers)
    }

    pub(super) fn states(&self) -> Vec<(FlowId, Rc<State>)> {
        let flows = self.flows.borrow();
        flows
            .iter()
            .map(|(id, state)| (*id, Rc::clone(state)))
            .collect()
    }

    /// Needs no carriers any more. What the flows' are to be like.
    pub(super) fn forget_desired(&self) -> Option<Desired> {
        self.wanted.borrow_mut().clear();
        self.desired.take()
    }

    /// Has the peer told that carriers of a former daemon have ended.
    pub(super) fn restore_broken(&self, carriers: &[CarrierId]) {
        let mut core = self.core.borrow_mut();
        core.restore_broken(carriers.iter().copied());
    }

    /// Forgets a flow.
    pub(super) fn close(&self, id: FlowId) {
        let mut core = self.core.borrow_mut();
        let lost = core.flow(id).map_or(0, |flow| flow.receive.lost());
        self.skipped.set(self.skipped.get() + lost);
        core.close(id);
        drop(core);
        self.flows.borrow_mut().remove(&id);
        for running in self.carriers.borrow().values() {
            running.carrier.forget(id);
        }
        self.changed.notify_waiters();
    }

    /// Has carriers send the control frames that there are for them.
    fn ring(&self, core: &Association) {
        for (id, running) in &*self.carriers.borrow() {
            if core.owes(*id) {
                running.owes.notify_one();
            }
        }
    }

    /// Tells flows and carriers what has changed.
    pub(super) fn turn(&self) {
        let mut core = self.core.borrow_mut();
        while let Some(event) = core.poll_event() {
            match event {
                Event::Flow(id) => {
                    let flows = self.flows.borrow();
                    let Some(changed) = flows.get(&id).map(|state| &state.changed) else {
                        continue;
                    };
                    if core.flow(id).is_some_and(|flow| flow.error().is_some()) {
                        changed.reset.notify_one();
                    }
                    changed.sending.notify_one();
                    changed.arrived.notify_one();
                    changed.room.notify_one();
                }
                Event::Broken(id) => {
                    if let Some(running) = self.carriers.borrow().get(&id) {
                        running.carrier.close();
                    }
                }
            }
        }
        self.ring(&core);
        self.account(core);
    }

    /// Bytes of a flow have arrived by a carrier. Call [`Peer::turn`] behind the last ones.
    pub(super) fn chunk(&self, carrier: CarrierId, flow: FlowId, offset: u64, bytes: &[u8]) {
        if !self.takes(carrier, flow, bytes.len()) {
            return;
        }
        let frame = Frame::Chunk {
            flow,
            offset,
            bytes,
            fin: false,
            urgent: false,
        };
        let now = now_ns(self.began);
        self.core.borrow_mut().handle_frame(now, carrier, frame);
    }

    /// The same, of many. Where nothing is before them the application gets them from where they lie.
    pub(super) fn pieces(
        &self,
        carrier: CarrierId,
        flow: FlowId,
        offset: u64,
        pieces: &[IoSlice<'_>],
    ) {
        let len: usize = pieces.iter().map(|piece| piece.len()).sum();
        if !self.takes(carrier, flow, len) {
            return;
        }
        let mut core = self.core.borrow_mut();
        let mut given = 0;
        if core.is_next(flow, offset, len as u64) {
            let flows = self.flows.borrow();
            given = flows.get(&flow).map_or(0, |state| state.give(pieces));
        }
        if given > 0 {
            core.note_given(carrier, flow, given);
        }
        if given < len {
            let mut rest = BytesMut::with_capacity(len - given);
            let mut known = given;
            for piece in pieces {
                let skip = known.min(piece.len());
                known -= skip;
                rest.extend_from_slice(&piece[skip..]);
            }
            let now = now_ns(self.began);
            core.handle_bytes(now, carrier, flow, offset + given as u64, rest);
        }
    }

    /// Notes bytes of a flow, or its end (0), that have come by a carrier; false if they must not. Where there is no room,
    /// or a control connection has bytes of a flow that it is not for, the carrier ends, and the peer sends them again.
    fn takes(&self, carrier: CarrierId, flow: FlowId, bytes: usize) -> bool {
        let carriers = self.carriers.borrow();
        // `None`: it has just ended.
        let running = carriers.get(&carrier);
        let is_secret = |running: &Running| self.is_secret(&*running.carrier);
        if flow.requires_encryption() && !running.is_some_and(is_secret) {
            return false;
        }
        if bytes == 0 {
            return true;
        }
        let control = running.filter(|running| running.carrier.kind().is_none());
        if !self.has_room() || control.is_some() && !self.encrypted.get() {
            // All others are closed when there is no more room.
            control.inspect(|running| running.carrier.close());
            return false;
        }
        if let Some(running) = running {
            running.received.set(running.received.get() + bytes as u64);
        }
        if let Some(state) = self.flows.borrow().get(&flow) {
            state.heard_by.set(Path::Carrier(carrier));
            state.licence.note_moved();
        }
        true
    }

    /// A frame has arrived by a carrier.
    pub(super) fn frame(&self, carrier: CarrierId, frame: Frame<'_>) {
        let loses = |running: &Running| running.carrier.loses();
        let is_lossy = self.carriers.borrow().get(&carrier).is_some_and(loses);
        if is_lossy && !matches!(frame, Frame::Chunk { .. }) {
            return; // none goes by it
        }
        match frame {
            Frame::Loses { .. } => self.look_at_lossy(),
            Frame::Chunk { flow, bytes, .. } if !self.takes(carrier, flow, bytes.len()) => return,
            _ => {}
        }
        let now = now_ns(self.began);
        self.core.borrow_mut().handle_frame(now, carrier, frame);
        self.turn();
    }

    /// Takes what has come by carriers that lose something.
    fn look_at_lossy(&self) {
        let carriers = self.carriers.borrow();
        let lossy = carriers.iter().filter(|(_, c)| c.carrier.loses());
        let lossy: Vec<_> = lossy.map(|(id, c)| (*id, Rc::clone(&c.carrier))).collect();
        drop(carriers);
        for (id, carrier) in lossy {
            carrier.look(self, id);
        }
    }

    /// Whether a flow cannot go on before the peer has been told something.
    pub(super) fn is_stuck(&self) -> bool {
        let core = self.core.borrow();
        let flows = self.flows.borrow();
        let mut all = flows.keys().filter_map(|id| core.flow(*id));
        all.any(|flow| flow.send.asked().is_some())
    }

    /// Charges the association for its memory, carriers included.
    pub(super) fn count_memory(&self) {
        let carriers = self.carriers.borrow();
        let of_carriers = carriers.values().map(|c| c.carrier.memory()).sum();
        self.of_carriers.set(of_carriers);
        self.account.set(self.core.borrow().memory() + of_carriers);
    }

    /// Charges the association for its flows' memory, and applies a limit at once that it has reached.
    fn account(&self, core: RefMut<'_, Association>) {
        let is_more = self.account.set(core.memory() + self.of_carriers.get());
        drop(core);
        // That there is room again is seen at the next look.
        if is_more && self.account.room() < self.room.get() {
            self.follow_room();
        }
    }

    /// Whether the budget allows carriers (hard limit not reached).
    pub(super) fn has_room(&self) -> bool {
        self.room.get() > Room::None
    }

    /// Whether the budget allows another carrier (soft limit not reached).
    pub(super) fn has_ample_room(&self) -> bool {
        self.room.get() == Room::Ample
    }

    /// Applies the budget: resizes windows, closes carriers at the hard limit.
    pub(super) fn follow_room(&self) {
        let room = self.account.room();
        if self.room.replace(room) == room {
            return;
        }
        let window = match room {
            Room::Ample => self.account.flow_window(WINDOW),
            Room::Little | Room::None => INITIAL_CREDIT,
        };
        self.core.borrow_mut().set_window(window);
        for state in self.flows.borrow().values() {
            state.changed.room.notify_one();
        }
        if room == Room::None {
            tracing::warn!(peer = %self.key.peer, "flows: memory limit reached: carriers closed, falling back to TCP");
            self.close_flow_carriers();
        }
        self.changed.notify_waiters();
    }

    /// Ends all carriers but control connections.
    fn close_flow_carriers(&self) {
        for running in self.carriers.borrow().values() {
            if running.carrier.kind().is_some() {
                running.carrier.close();
            }
        }
    }

    /// Notes how fast flows are, so long after the last time.
    pub(super) fn look(&self, after: Duration) {
        let core = self.core.borrow();
        for (id, state) in &*self.flows.borrow() {
            if let Some(flow) = core.flow(*id) {
                state.rates.look(counts(flow), after);
            }
        }
    }

    /// Has flows go by TCP that the peer seems not to know: their connections may be plain ones there, or the last
    /// segment of a handshake got lost, which the first bytes make up for. Flows that have left the best carrier
    /// come back to it.
    pub(super) fn review(&self, is_unnamed: impl Fn(u64) -> bool) {
        let best = self.best();
        let mut core = self.core.borrow_mut();
        for (id, state) in &*self.flows.borrow() {
            let Some(flow) = core.flow_mut(*id) else {
                continue;
            };
            let send = &mut flow.send;
            let may_be_unknown =
                id.opener == Side::Local && !send.is_known() && !send.is_rejected();
            let is_unheard = may_be_unknown && send.next_offset() > 0 && send.path() != Path::Tcp;
            let is_long = state.is_unheard.replace(is_unheard) && is_unheard;
            let must_wait = id.requires_carrier();
            if may_be_unknown && (is_unnamed(state.cookie) || (is_long && !must_wait)) {
                tracing::debug!(
                    flow = state.number,
                    "the peer may not know the flow: by TCP"
                );
                send.reject();
                core.touch(*id);
            } else if state.returns.get().is_some_and(|at| at <= Instant::now()) {
                state.returns.set(None);
                if let Some(best) = best {
                    prefer(&mut core, *id, state, best);
                }
            }
        }
        drop(core);
        self.turn();
    }

    pub(super) fn handle_timeout(&self) {
        self.core.borrow_mut().handle_timeout(now_ns(self.began));
        self.turn();
    }

    pub(super) fn count_sent(&self, carrier: CarrierId, bytes: usize) {
        if let Some(running) = self.carriers.borrow().get(&carrier) {
            running.sent.set(running.sent.get() + bytes as u64);
        }
    }

    /// A carrier serves, until `receiving` completes, since it has broken. False if its number was used.
    pub(super) async fn run(
        &self,
        id: CarrierId,
        carrier: Rc<dyn Carrier>,
        receiving: impl Future<Output = ()>,
    ) -> bool {
        let is_known = self.carriers.borrow().contains_key(&id);
        if is_known || !self.may_serve(&*carrier) || self.carriers.borrow().len() >= MOST_CARRIERS {
            return false;
        }
        let owes = Rc::new(Notify::new());
        let running = Running {
            carrier: Rc::clone(&carrier),
            owes: Rc::clone(&owes),
            sent: Cell::new(0),
            received: Cell::new(0),
        };
        self.carriers.borrow_mut().insert(id, running);
        let loses = carrier.loses();
        self.core.borrow_mut().add_carrier(id, true, loses);
        // Flows return to the best carrier.
        if self.best() == Some(id) {
            self.prefer_best();
        }
        self.changed.notify_waiters();
        self.turn();
        let _serving = Serving { peer: self, id };
        tokio::select! {
            () = receiving => {}
            () = self.say(id, &*carrier, &owes) => {}
        }
        true
    }

    /// Has flows go by the best carrier.
    fn prefer_best(&self) {
        if let Some(best) = self.best() {
            let mut core = self.core.borrow_mut();
            for (flow, state) in &*self.flows.borrow() {
                prefer(&mut core, *flow, state, best);
            }
        }
    }

    /// A carrier serves no more.
    fn broken(&self, id: CarrierId) {
        for (flow, state) in &*self.flows.borrow() {
            if self.path(*flow) == Some(Path::Carrier(id)) {
                state.why.set("its carrier has broken");
                state.stays.set(false);
            }
        }
        let running = self.carriers.borrow_mut().remove(&id);
        self.core.borrow_mut().carrier_broken(id, []);
        if self.encrypted.get() {
            self.prefer_best();
        }
        self.changed.notify_waiters();
        self.turn();
        if let Some(running) = running {
            running.carrier.close();
        }
    }

    /// Sends control frames by a carrier until it breaks.
    async fn say(&self, id: CarrierId, carrier: &dyn Carrier, owes: &Notify) {
        let mut buffer = vec![0; CONTROL];
        loop {
            let used = self.core.borrow_mut().poll_control(id, &mut buffer);
            if used == 0 {
                owes.notified().await;
                continue;
            }
            self.count_sent(id, used);
            let frames = Bytes::copy_from_slice(&buffer[..used]);
            if carrier.control(frames).await.is_err() {
                return;
            }
        }
    }

    fn path(&self, id: FlowId) -> Option<Path> {
        let core = self.core.borrow();
        core.flow(id).map(|flow| flow.send.path())
    }
}
