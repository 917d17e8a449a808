//! An association: its flows, its carriers, and what passes between them.

mod choice;
mod commands;
mod events;
mod identity;
mod measure;
mod stacks;

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
    flow::{Flow, INITIAL_CREDIT, Path, SendHalf},
    netmon::Metrics,
    reconfigure::learn::Outcome,
    traffic::Traffic,
};
use vtl_pool::key::PublicKey;
use vtl_proto::frame::{CarrierId, FlowId, Frame, Side};

use super::{
    Desired, Key,
    budget::{Account, Room},
    carrier::Carrier,
    control::Control,
    flow::{Beginning, RESET, State},
    gateway::Gateway,
    now_ns,
    reconfigure::Following,
    socket::handshake,
};
use crate::{
    hooker::UNDER_LOAD,
    identity::{Refused, Standing},
    netmon::{NetMonitor, Watch},
};
use choice::Choice;
pub(super) use choice::Preference;
pub(super) use commands::role;
use stacks::Stacks;

/// Maximum number of carriers.
const MAX_CARRIERS: usize = 16;
/// Maximum size of a batch of control frames, bytes.
const CONTROL: usize = 4096;

/// Consecutive fast handshakes after which a host may count as near.
const QUICK: u32 = 8;
/// A path is clean if at most one packet in this many was lost.
const CLEAN: u64 = 1000;
/// Minimum sample for that, packets.
const PROOF: u64 = 16;

/// Bytes sent to the peer and received from it.
fn counts(flow: &Flow) -> [u64; 2] {
    [flow.send.next_offset(), flow.receive.received()]
}

struct Running {
    carrier: Rc<dyn Carrier>,
    /// Wake-up: control frames are queued for it.
    owes: Rc<Notify>,
    /// Bytes of flows and of control frames.
    sent: Cell<u64>,
    received: Cell<u64>,
    watch: RefCell<Watch>,
    /// Rate of the link layer below it, bytes/s; 0: unknown, or nobody looks.
    link_rate: Cell<u64>,
}

/// Removes a carrier on drop, also if its task panics (in a third-party library).
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
    /// The carrier that flows use by default, as desired by the opener.
    desired: RefCell<Option<Desired>>,
    /// Which carrier of these the flows go by (`choice.rs`).
    choice: Choice,
    /// Flows that are spread over several carriers (`stacks.rs`).
    stacks: Stacks,
    /// What decides about it while flows run: conditions of the opener's rule, or the model (`reconfigure.rs`).
    pub(super) following: RefCell<Option<Rc<Following>>>,
    /// What became of flows that have ended, for the choice of others (`learn.rs`).
    pub(super) taught: RefCell<Vec<Outcome>>,
    /// What the peer has told last of the path, in the direction in which it sends, and when.
    pub(super) told: Cell<Option<(Instant, Metrics)>>,
    /// Kinds of carriers that flows were moved to by hand.
    wanted: RefCell<BTreeSet<u8>>,
    /// The control connection.
    pub(super) control: RefCell<Option<(CarrierId, Rc<Control>)>>,
    monitor: Arc<NetMonitor>,
    /// Memory account; the carriers' share of it as of the last tick, bytes; the limit in force.
    account: Account,
    of_carriers: Cell<u64>,
    room: Cell<Room>,
    /// Bytes lost for good by flows that have ended (lossy carriers).
    skipped: Cell<u64>,
    /// Flows require encryption: only encrypted carriers serve; the control connection if no other is up.
    encrypted: Cell<bool>,
    /// Whether carriers may serve: false while the peer is refused, or not authenticated yet although it must be.
    admitted: Cell<bool>,
    /// The peer's public key, and why the peer is refused.
    pub(super) shown: Cell<Option<PublicKey>>,
    refused: RefCell<Option<Refused>>,
    /// The peer's permissions, once it is admitted.
    standing: RefCell<Standing>,
    pub(super) gateway: Gateway,
    /// Carriers of the peer's that have come, whether they serve or not.
    pub(super) links: Cell<usize>,
    /// Nobody looks after the association any more: no carrier may serve it.
    pub(super) has_ended: Cell<bool>,
    /// Destination of the latest flow opened by this host.
    pub(super) dest: Cell<Option<SocketAddr>>,
    /// Consecutive handshakes fast enough for a near host.
    quick: Cell<u32>,
    /// Count of answers to VTL's TCP option.
    answers: Cell<u64>,
    /// Count of starts and take-overs of the peer's daemon.
    successions: Cell<u64>,
    /// Wake-up: flows, carriers, room, answers or successions have changed.
    pub(super) changed: Notify,
}

/// Whether this host has opened the flow, and the peer has neither confirmed nor rejected it.
fn may_be_unknown(id: FlowId, send: &SendHalf) -> bool {
    id.opener == Side::Local && !send.is_known() && !send.is_rejected()
}

fn leave_to_tcp(state: &State, send: &mut SendHalf) {
    tracing::debug!(
        flow = state.number,
        "flows: the peer may not know the flow: plain TCP"
    );
    send.reject();
}

impl Peer {
    /// `admitted`: it need not authenticate first.
    pub(super) fn new(
        key: Key,
        account: Account,
        admitted: bool,
        monitor: Arc<NetMonitor>,
    ) -> Self {
        Self {
            key,
            began: Instant::now(),
            core: RefCell::new(Association::new(account.flow_window())),
            flows: RefCell::default(),
            carriers: RefCell::default(),
            last_carrier: Cell::new(0),
            desired: RefCell::default(),
            choice: Choice::default(),
            stacks: Stacks::default(),
            following: RefCell::default(),
            taught: RefCell::default(),
            told: Cell::default(),
            wanted: RefCell::default(),
            control: RefCell::default(),
            monitor,
            account,
            of_carriers: Cell::new(0),
            room: Cell::new(Room::Ample),
            skipped: Cell::new(0),
            encrypted: Cell::new(false),
            admitted: Cell::new(admitted),
            shown: Cell::new(None),
            refused: RefCell::default(),
            standing: RefCell::default(),
            gateway: Gateway::default(),
            links: Cell::new(0),
            has_ended: Cell::new(false),
            dest: Cell::new(None),
            quick: Cell::new(0),
            answers: Cell::new(0),
            successions: Cell::new(0),
            changed: Notify::new(),
        }
    }

    /// Notes a new connection to the host, and tells whether the host is near over a clean path. `seals`: this host
    /// encrypts its carriers, so only measurements of encrypted carriers of an authenticated peer count: anybody on the
    /// path can fake fast handshakes.
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
        let max = near.saturating_mul(UNDER_LOAD).as_secs_f64() * 1e3;
        let is_near =
            sent >= PROOF && lost * CLEAN <= sent && paths.iter().all(|path| path.rtt_ms <= max);
        if is_near {
            // A host that stops being near has to prove it anew.
            self.quick.set(0);
        }
        is_near
    }

    pub(super) fn has_flows(&self) -> bool {
        !self.flows.borrow().is_empty()
    }

    /// Whether there are several flows: head-of-line blocking between them is possible.
    pub(super) fn has_flows_beside(&self) -> bool {
        self.flows.borrow().len() > 1
    }

    pub(super) fn has_carriers(&self) -> bool {
        !self.carriers.borrow().is_empty()
    }

    /// Completes when the condition holds.
    pub(super) async fn until(&self, is_so: impl Fn(&Self) -> bool) {
        loop {
            let mut changed = pin!(self.changed.notified());
            // Registered before the check, so that no wake-up is missed.
            changed.as_mut().enable();
            if is_so(self) {
                return;
            }
            changed.await;
        }
    }

    /// Counts an answer of the host to VTL's TCP option.
    pub(super) fn note_answer(&self) {
        self.answers.set(self.answers.get() + 1);
        self.changed.notify_waiters();
    }

    /// Counts a start or take-over of the peer's daemon.
    pub(super) fn note_succession(&self) {
        self.successions.set(self.successions.get() + 1);
        self.changed.notify_waiters();
    }

    /// Count of events after which a failed carrier is worth another attempt: starts and take-overs of the peer's
    /// daemon.
    pub(super) fn successions(&self) -> u64 {
        self.successions.get()
    }

    /// The same for control connections and sessions, for which an answer to VTL's option is enough.
    pub(super) fn signs(&self) -> u64 {
        self.answers.get() + self.successions.get()
    }

    /// Closes all carriers.
    pub(super) fn close_carriers(&self) {
        for running in self.carriers.borrow().values() {
            running.carrier.close();
        }
    }

    /// Handles the end of a control connection. If it was the last one the peer's daemon has ended, too: all carriers
    /// are closed at once, instead of by timeout.
    pub(super) fn lost_control(&self, control: &Rc<Control>) {
        let is_it = |(_, known): &mut (CarrierId, Rc<Control>)| Rc::ptr_eq(known, control);
        drop(self.control.borrow_mut().take_if(is_it));
        let has_control = |running: &Running| running.carrier.kind().is_none();
        if !self.carriers.borrow().values().any(has_control) {
            self.close_carriers();
            // RSTs of the flows' TCP connections may have been lost: probe them.
            for state in self.flows.borrow().values() {
                state.licence.note_moved();
            }
        }
    }

    /// Allocates the id of the next carrier that this host opens.
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

    /// Adds a flow whose TCP connection is established. False if its number is in use.
    pub(super) fn open(&self, id: FlowId, state: &Rc<State>, beginning: Beginning) -> bool {
        if self.flows.borrow().contains_key(&id) {
            return false;
        }
        if id.requires_encryption() {
            self.require_encryption();
        }
        self.control_new(state);
        let is_resumed = matches!(beginning, Beginning::Left { .. });
        state.licence.set_waived(self.is_elsewhere());
        self.flows.borrow_mut().insert(id, Rc::clone(state));
        self.changed.notify_waiters();
        let is_refused = match &beginning {
            Beginning::New { .. } => self.refuses(id, state),
            Beginning::Left { .. } => false,
        };
        let best = self.best_path();
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
                state.traffic.set(Traffic::new(counts(&flow)));
                core.restore(id, *flow);
            }
        }
        self.tell_opened(&core, id, state, is_resumed);
        if let Some(best) = best {
            self.prefer(&mut core, id, state, best);
        }
        drop(core);
        self.turn();
        true
    }

    /// Applies `change` to a flow, and queues the control frames that result. `None` if the flow has ended or was
    /// reset: its bytes are gone then, and the rest must not pass for a complete stream.
    pub(super) fn with<T>(&self, id: FlowId, change: impl FnOnce(&mut Flow) -> T) -> Option<T> {
        let mut core = self.core.borrow_mut();
        let flow = core.flow_mut(id).filter(|flow| flow.error().is_none());
        let result = flow.map(change);
        core.owe(id);
        self.ring(&core);
        self.account(core);
        result
    }

    /// Resets a flow.
    pub(super) fn reset(&self, id: FlowId) {
        self.core.borrow_mut().reset(id, RESET);
        self.turn();
    }

    /// Takes out all flows and the ids of all carriers, which count as broken. Frames that arrive later are ignored.
    pub(super) fn take_all(&self) -> (BTreeMap<FlowId, Flow>, BTreeSet<CarrierId>) {
        let mut core = self
            .core
            .replace(Association::new(self.account.flow_window()));
        let mut carriers: BTreeSet<CarrierId> = core.untold_broken().collect();
        for id in self.carriers.borrow().keys() {
            core.carrier_broken(*id);
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

    /// Queues the news for the peer that a former daemon's carriers have ended.
    pub(super) fn restore_broken(&self, carriers: &[CarrierId]) {
        let mut core = self.core.borrow_mut();
        core.restore_broken(carriers.iter().copied());
    }

    /// Forgets a flow.
    pub(super) fn close(&self, id: FlowId) {
        let mut core = self.core.borrow_mut();
        let lost = core.flow(id).map_or(0, |flow| flow.receive.lost());
        self.skipped.set(self.skipped.get() + lost);
        if let Some(flow) = core.flow(id) {
            self.note_ended(counts(flow));
        }
        core.close(id);
        drop(core);
        self.flows.borrow_mut().remove(&id);
        for running in self.carriers.borrow().values() {
            running.carrier.forget(id);
        }
        self.changed.notify_waiters();
    }

    /// Wakes the carriers that have control frames to send.
    fn ring(&self, core: &Association) {
        for (id, running) in &*self.carriers.borrow() {
            if core.owes(*id) {
                running.owes.notify_one();
            }
        }
    }

    /// Dispatches the core's events to flows and carriers.
    pub(super) fn turn(&self) {
        let mut core = self.core.borrow_mut();
        while let Some(event) = core.poll_event() {
            match event {
                Event::Flow(id) => {
                    let flows = self.flows.borrow();
                    let Some(state) = flows.get(&id) else {
                        continue;
                    };
                    let (flow, changed) = (core.flow(id), &state.changed);
                    self.tell_moved(flow, id, state);
                    if flow.is_some_and(|flow| flow.error().is_some()) {
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

    /// Takes a chunk that has arrived by a carrier. Call [`Peer::turn`] after the last one.
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

    /// The same for a gather list. Zero-copy if nothing is queued before it: written to the application from where it
    /// lies.
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
            core.note_given(now_ns(self.began), carrier, flow, given);
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

    /// Notes bytes of a flow, or its end (0), that arrived by a carrier. False if they must be dropped: the carrier
    /// lacks the encryption that the flow requires, the memory limit is reached, or a control connection carries a
    /// flow that it may not. In the latter two cases a control connection is closed, and the peer retransmits.
    fn takes(&self, carrier: CarrierId, flow: FlowId, bytes: usize) -> bool {
        let carriers = self.carriers.borrow();
        // `None`: it has just broken.
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
            // All others are closed at the memory limit anyway.
            control.inspect(|running| running.carrier.close());
            return false;
        }
        if let Some(running) = running {
            running.received.set(running.received.get() + bytes as u64);
        }
        if let Some(state) = self.flows.borrow().get(&flow) {
            state.heard_by.set(Path::Carrier(carrier));
            state.licence.note_moved();
            state.profile.note_moving();
            if running.is_some() && self.stacks.was_spread() {
                state.shares.note(carrier, true, bytes);
            }
        }
        true
    }

    /// Handles a frame that has arrived by a carrier.
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

    /// Polls the lossy carriers for packets that have arrived.
    fn look_at_lossy(&self) {
        let carriers = self.carriers.borrow();
        let lossy = carriers.iter().filter(|(_, c)| c.carrier.loses());
        let lossy: Vec<_> = lossy.map(|(id, c)| (*id, Rc::clone(&c.carrier))).collect();
        drop(carriers);
        for (id, carrier) in lossy {
            carrier.look(self, id);
        }
    }

    /// Whether a flow cannot continue on TCP until a control frame has told the peer.
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

    /// Charges the association for its flows' memory, and applies a limit as soon as it is reached.
    fn account(&self, core: RefMut<'_, Association>) {
        let is_more = self.account.set(core.memory() + self.of_carriers.get());
        drop(core);
        // Limits are lifted at the next tick.
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
            Room::Ample => self.account.flow_window(),
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

    /// Closes all carriers but control connections.
    fn close_flow_carriers(&self) {
        for running in self.carriers.borrow().values() {
            if running.carrier.kind().is_some() {
                running.carrier.close();
            }
        }
    }

    /// Samples the flows' traffic, `after` the last sample.
    pub(super) fn look(&self, after: Duration) {
        let core = self.core.borrow();
        for (id, state) in &*self.flows.borrow() {
            if let Some(flow) = core.flow(*id) {
                let mut traffic = state.traffic.get();
                traffic.sample(counts(flow), after);
                state.traffic.set(traffic);
            }
        }
    }

    /// Has a flow that this host has opened go on by TCP, if the peer has said nothing of it.
    pub(super) fn doubt(&self, id: FlowId, state: &State) {
        let mut core = self.core.borrow_mut();
        let send = core.flow_mut(id).map(|flow| &mut flow.send);
        let unheard = send.filter(|send| may_be_unknown(id, send) && send.path() != Path::Tcp);
        let Some(send) = unheard else { return };
        leave_to_tcp(state, send);
        core.touch(id);
        drop(core);
        self.turn();
    }

    /// Confirms what has come. Moves flows to TCP that may be plain connections for the peer. Returns flows that have left
    /// the best carrier to it after their back-off.
    pub(super) fn review(&self, is_unnamed: impl Fn(u64) -> bool) {
        self.follow_preferred();
        let best = self.best_path();
        let mut core = self.core.borrow_mut();
        for (id, state) in &*self.flows.borrow() {
            // What stays unconfirmed stays in the peer's memory.
            let confirm = |flow: &mut Flow| flow.receive.confirm_now();
            if core.flow_mut(*id).is_some_and(confirm) {
                core.owe(*id);
            }
            let Some(flow) = core.flow_mut(*id) else {
                continue;
            };
            let send = &mut flow.send;
            if state
                .stays_until
                .get()
                .is_some_and(|at| at <= Instant::now())
            {
                state.stays_until.set(None);
                state.stays.set(false);
                // At once.
                state.returns.set(Some(Instant::now()));
            }
            if may_be_unknown(*id, send) && is_unnamed(state.cookie) {
                leave_to_tcp(state, send);
                core.touch(*id);
            } else if state.returns.get().is_some_and(|at| at <= Instant::now()) {
                state.returns.set(None);
                if let Some(best) = best {
                    self.prefer(&mut core, *id, state, best);
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

    /// Carriers that the peer has opened and that do not serve yet.
    pub(super) fn half_open(&self) -> usize {
        let carriers = self.carriers.borrow();
        let of_peer = carriers.keys().filter(|id| id.opener == Side::Peer);
        self.links.get().saturating_sub(of_peer.count())
    }

    /// Serves a carrier until it breaks: `receiving` completes, or control frames cannot be sent. False if it may not
    /// serve, its id is in use, there are too many, or the association has ended.
    pub(super) async fn run(
        &self,
        id: CarrierId,
        carrier: Rc<dyn Carrier>,
        receiving: impl Future<Output = ()>,
    ) -> bool {
        let is_known = self.carriers.borrow().contains_key(&id);
        let is_full = self.carriers.borrow().len() >= MAX_CARRIERS;
        if is_known || is_full || self.has_ended.get() || !self.may_serve(&*carrier) {
            return false;
        }
        let owes = Rc::new(Notify::new());
        let running = Running {
            carrier: Rc::clone(&carrier),
            owes: Rc::clone(&owes),
            sent: Cell::new(0),
            received: Cell::new(0),
            watch: RefCell::default(),
            link_rate: Cell::new(0),
        };
        self.tell_carrier_up(id, &running);
        self.carriers.borrow_mut().insert(id, running);
        let loses = carrier.loses();
        self.core.borrow_mut().add_carrier(id, loses);
        self.follow_spread();
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

    /// Removes a carrier that has broken; its flows go to the best one that is left.
    fn broken(&self, id: CarrierId) {
        for (flow, state) in &*self.flows.borrow() {
            state.shares.forget(id);
            if self.path(*flow) == Some(Path::Carrier(id)) {
                state.why.set("its carrier has broken");
                state.stays.set(false);
                state.stays_until.set(None);
            }
        }
        let running = self.carriers.borrow_mut().remove(&id);
        if let Some(running) = &running {
            self.tell_carrier_down(id, running);
        }
        self.forget_options(id);
        self.core.borrow_mut().carrier_broken(id);
        self.follow_spread();
        // Also flows that were waiting for it.
        self.prefer_best();
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

    /// The path that a flow sends by, and the bytes that it has moved in both directions.
    pub(super) fn path_and_bytes(&self, id: FlowId) -> Option<(Path, u64)> {
        let core = self.core.borrow();
        let flow = core.flow(id)?;
        let [sent, received] = counts(flow);
        Some((flow.send.path(), sent.saturating_add(received)))
    }

    fn path(&self, id: FlowId) -> Option<Path> {
        let core = self.core.borrow();
        core.flow(id).map(|flow| flow.send.path())
    }
}
