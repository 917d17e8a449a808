//! An association: the flows and the carriers between two hosts.
//!
//! # Input and output
//! - Carriers: [`Association::add_carrier`], then [`Association::handle`] for received frames, and
//!   [`Association::poll_control`] for control frames to send. The carrier's driver takes chunks from the flows
//!   itself ([`crate::flow::SendHalf::next`]).
//! - Flows: [`Association::open`] once their TCP connection is established, [`Association::close`] when it has
//!   ended. Bytes of that connection pass through [`Association::flow_mut`] only.
//! - Events: [`Association::poll_event`].
//!
//! # Control frames
//! A flow's control frames convey state, not a sequence of messages: the latest state is sent by one carrier or
//! by all, and again if a carrier breaks that may have lost it.

mod early;
mod entry;
mod hearing;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
};

use bytes::{Bytes, BytesMut};
use vtl_proto::frame::{CarrierId, FlowId, Frame, FrameError, ResetCode};

use crate::flow::{Flow, Path};
use early::{EarlyChunk, EarlyFlows};
use entry::{Entry, Out};

/// Initial receive window of a flow, bytes: its share of `FIRST_WINDOWS`, clamped to `MIN_WINDOW` and
/// `FIRST_WINDOW`.
const FIRST_WINDOWS: u64 = 32 << 20;
const FIRST_WINDOW: u64 = 8 << 20;
const MIN_WINDOW: u64 = 256 << 10;
/// Maximum of REJECT frames queued for a carrier; those beyond are dropped, since the peer does not read.
const MAX_REJECTS: usize = 1024;
/// Memory of a flow without its buffers, bytes.
const FLOW: u64 = size_of::<Entry>() as u64;

/// Event for the association's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A flow changed: it may have bytes to read or to send, or an end to pass on.
    Flow(FlowId),
    /// The peer has given up this carrier: drain what has arrived by it, then call
    /// [`Association::carrier_broken`].
    Broken(CarrierId),
}

#[derive(Debug)]
struct Carrier {
    /// Unreliable: chunks may be lost, so no control frames are sent by it.
    loses: bool,
    /// Broken carriers to report to the peer by this one.
    broken: VecDeque<CarrierId>,
    /// Flows whose chunks were discarded, to report likewise.
    rejected: VecDeque<FlowId>,
    /// Flows with a control frame due by this carrier.
    owing: BTreeSet<FlowId>,
}

/// All flows and carriers between this host and another one.
#[derive(Debug)]
pub struct Association {
    /// Maximum receive window of each flow, bytes.
    window: u64,
    /// The peer spreads its flows over all carriers.
    is_spread: bool,
    carriers: BTreeMap<CarrierId, Carrier>,
    flows: BTreeMap<FlowId, Entry>,
    early: EarlyFlows,
    /// Memory that flows use, bytes.
    memory: u64,
    changed: BTreeSet<FlowId>,
    broken: VecDeque<CarrierId>,
    /// Broken carriers of the former daemon, to report to the peer.
    former: VecDeque<CarrierId>,
}

impl Association {
    /// Creates an association without flows. `window`: maximum receive window of each flow, bytes, at least
    /// [`crate::flow::INITIAL_CREDIT`].
    pub fn new(window: u64) -> Self {
        Self {
            window,
            is_spread: false,
            carriers: BTreeMap::new(),
            flows: BTreeMap::new(),
            early: EarlyFlows::default(),
            memory: 0,
            changed: BTreeSet::new(),
            broken: VecDeque::new(),
            former: VecDeque::new(),
        }
    }

    /// Adds a carrier that is ready. `loses`: it is unreliable, so it takes only chunks of loss-tolerant flows, and
    /// no control frames.
    pub fn add_carrier(&mut self, id: CarrierId, loses: bool) {
        let broken = match loses {
            true => VecDeque::new(),
            false => mem::take(&mut self.former),
        };
        let carrier = Carrier {
            loses,
            broken,
            rejected: VecDeque::new(),
            owing: BTreeSet::new(),
        };
        self.carriers.insert(id, carrier);
        // Runs, ends, losses and resets are sent by every carrier, also by later ones.
        self.all_owe();
    }

    /// Notes whether the peer spreads its flows over all carriers.
    pub fn set_spread(&mut self, is_spread: bool) {
        self.is_spread = is_spread;
    }

    /// Removes a carrier that has broken, here or at the peer.
    pub fn carrier_broken(&mut self, id: CarrierId) {
        if self.carriers.remove(&id).is_none() {
            return;
        }
        for carrier in self.reliable() {
            carrier.broken.push_back(id);
        }
        for (flow, entry) in &mut self.flows {
            entry.flow.send.carrier_broken(id);
            entry.carrier_broken(id);
            self.changed.insert(*flow);
        }
        self.all_owe();
    }

    /// Reliable carriers, which take control frames.
    fn reliable(&mut self) -> impl Iterator<Item = &mut Carrier> {
        self.carriers.values_mut().filter(|carrier| !carrier.loses)
    }

    /// Opens a flow, whose TCP connection is established.
    pub fn open(&mut self, id: FlowId) {
        // A single flow's start is limited by its path, that of one among a thousand by the memory of all.
        let share = FIRST_WINDOWS / (self.flows.len() as u64 + 1);
        let mut entry = Entry::new(share.clamp(MIN_WINDOW, FIRST_WINDOW), self.window);
        if id.requires_carrier() {
            entry.flow.send.set_requires_carrier();
        }
        if let Some(early) = self.early.take(id) {
            if let Some(limit) = early.limit {
                // Confirming 0 bytes never fails.
                let _ = entry.flow.send.confirmed(0, false, limit, early.tolerant);
            }
            for chunk in early.chunks {
                let len = chunk.bytes.len();
                entry.note_heard(early.since, chunk.carrier, len, self.is_spread);
                if entry
                    .chunk(chunk.offset, &chunk.bytes, chunk.fin, chunk.urgent)
                    .is_err()
                {
                    entry.flow.reset(ResetCode::Violation);
                    entry.reset = Some(ResetCode::Violation);
                }
            }
        }
        entry.flow.send.set_max_unconfirmed(2 * self.window);
        self.flows.insert(id, entry);
        self.touch(id);
    }

    /// Opens a flow as [`Association::open`], but refuses carriers to it.
    pub fn open_refused(&mut self, id: FlowId) {
        let early = self.early.take(id);
        self.open(id);
        self.refuse(id);
        if let Some(entry) = self.flows.get_mut(&id) {
            entry.rejects = early.is_some_and(|early| !early.chunks.is_empty());
        }
        self.touch(id);
    }

    /// Keeps a flow on its TCP connection, by this host's policy: its chunks are discarded and the peer is sent
    /// REJECT, as for an unknown flow. Call it before any frame of the flow has been handled.
    pub fn refuse(&mut self, id: FlowId) {
        self.move_flow(id, Path::Tcp);
        if let Some(entry) = self.flows.get_mut(&id) {
            entry.flow.refuse();
        }
    }

    /// Restores a flow of the former daemon, whose carriers have all broken.
    pub fn restore(&mut self, id: FlowId, mut flow: Flow) {
        let reset = flow.error();
        // The former daemon may not have sent ATTACHED for this run.
        let attached = Some(flow.receive.latest_run()).filter(|number| *number > 0);
        flow.receive.set_max_window(self.window);
        flow.send.set_max_unconfirmed(2 * self.window);
        let mut entry = Entry::new(self.window, self.window);
        (entry.flow, entry.reset, entry.attached) = (flow, reset, attached);
        self.flows.insert(id, entry);
        self.touch(id);
    }

    /// Reports broken carriers of the former daemon to the peer by the next carrier.
    pub fn restore_broken(&mut self, ids: impl IntoIterator<Item = CarrierId>) {
        self.former.extend(ids);
    }

    /// Broken carriers that have yet to be reported to the peer.
    pub fn untold_broken(&self) -> impl Iterator<Item = CarrierId> {
        let queued = self.carriers.values().flat_map(|carrier| &carrier.broken);
        queued.chain(&self.former).copied()
    }

    /// Returns all flows, for the handover of a daemon that restarts, once all carriers have broken.
    pub fn into_flows(self) -> impl Iterator<Item = (FlowId, Flow)> {
        self.flows.into_iter().map(|(id, entry)| (id, entry.flow))
    }

    /// Removes a flow whose TCP connection has ended or was never established.
    pub fn close(&mut self, id: FlowId) {
        if let Some(entry) = self.flows.remove(&id) {
            self.memory -= entry.memory;
        }
        self.changed.remove(&id);
    }

    /// Returns a flow.
    pub fn flow(&self, id: FlowId) -> Option<&Flow> {
        self.flows.get(&id).map(|entry| &entry.flow)
    }

    /// Returns a flow to read from or to send by a path. Call [`Association::touch`] afterwards.
    pub fn flow_mut(&mut self, id: FlowId) -> Option<&mut Flow> {
        self.flows.get_mut(&id).map(|entry| &mut entry.flow)
    }

    /// Notes that a flow has changed: queues its event and its control frames.
    pub fn touch(&mut self, id: FlowId) {
        if self.flows.contains_key(&id) {
            self.changed.insert(id);
            self.owe(id);
        }
    }

    /// As [`Association::touch`], without an event.
    pub fn owe(&mut self, id: FlowId) {
        let Some(entry) = self.flows.get_mut(&id) else {
            return;
        };
        let memory = entry.flow.memory() + FLOW;
        self.memory = self.memory - entry.memory + memory;
        entry.memory = memory;
        entry.look_at_states();
        let confirms_by = entry.confirms_by(&self.carriers);
        for (carrier, state) in self.carriers.iter_mut().filter(|(_, state)| !state.loses) {
            if entry.owes(*carrier, confirms_by) {
                state.owing.insert(id);
            }
        }
    }

    fn all_owe(&mut self) {
        let all: Vec<FlowId> = self.flows.keys().copied().collect();
        for id in all {
            self.owe(id);
        }
    }

    /// Maximum receive window of each flow, bytes.
    pub fn window(&self) -> u64 {
        self.window
    }

    /// Changes the maximum receive window of each flow, and the limit of unconfirmed bytes, which is twice as
    /// large. Credit already given stays.
    pub fn set_window(&mut self, window: u64) {
        self.window = window;
        for entry in self.flows.values_mut() {
            entry.flow.receive.set_max_window(window);
            entry.flow.send.set_max_unconfirmed(2 * window);
        }
    }

    /// Memory of all flows in both directions, bytes, approximately.
    pub fn memory(&self) -> u64 {
        self.memory + self.early.memory()
    }

    /// Whether [`Association::poll_control`] has frames for the carrier.
    pub fn owes(&self, carrier: CarrierId) -> bool {
        self.carriers.get(&carrier).is_some_and(|state| {
            !(state.broken.is_empty() && state.rejected.is_empty() && state.owing.is_empty())
        })
    }

    /// Moves the sending direction of a flow to another path. Ignored for an unknown carrier and for a refused
    /// flow.
    pub fn move_flow(&mut self, id: FlowId, to: Path) {
        let loses = match to {
            Path::Tcp => Some(false),
            Path::Carrier(carrier) => self.carriers.get(&carrier).map(|carrier| carrier.loses),
        };
        let entry = self.flows.get_mut(&id);
        let entry = entry.filter(|entry| !entry.flow.is_refused());
        if let Some((entry, loses)) = entry.zip(loses) {
            entry.flow.send.move_to(to, loses);
            self.touch(id);
        }
    }

    /// Resets a flow, and sends RESET to the peer.
    pub fn reset(&mut self, id: FlowId, code: ResetCode) {
        if let Some(entry) = self.flows.get_mut(&id) {
            entry.flow.reset(code);
            entry.reset = Some(code);
            self.touch(id);
        }
    }

    /// Returns the next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(carrier) = self.broken.pop_front() {
            return Some(Event::Broken(carrier));
        }
        self.changed.pop_first().map(Event::Flow)
    }

    /// Handles the frames of a packet or message that arrived by a carrier.
    ///
    /// # Errors
    /// Malformed frames: the carrier must be closed.
    pub fn handle(
        &mut self,
        now_ns: u64,
        carrier: CarrierId,
        mut frames: &[u8],
    ) -> Result<(), FrameError> {
        while !frames.is_empty() {
            let frame = Frame::take(&mut frames)?;
            self.handle_frame(now_ns, carrier, frame);
        }
        Ok(())
    }

    /// Handles bytes of a flow that arrived by a carrier: equivalent to one or more CHUNKs without flags.
    pub fn handle_bytes(
        &mut self,
        now_ns: u64,
        carrier: CarrierId,
        flow: FlowId,
        offset: u64,
        bytes: BytesMut,
    ) {
        let Some(entry) = self.flows.get_mut(&flow) else {
            let chunk = EarlyChunk {
                carrier,
                offset,
                bytes: bytes.freeze(),
                fin: false,
                urgent: false,
            };
            return self.keep_early(now_ns, flow, chunk);
        };
        if entry.flow.error().is_some() {
            return;
        }
        entry.note_heard(now_ns, carrier, bytes.len(), self.is_spread);
        if entry.flow.is_refused() {
            entry.rejects = true;
            return self.touch(flow);
        }
        let result = entry.flow.receive.bytes(offset, bytes);
        entry.note_overtaken(carrier, offset, &self.carriers);
        if result.is_err() {
            self.reset(flow, ResetCode::Violation);
        }
        self.touch(flow);
    }

    /// Whether received bytes may bypass reassembly and go to the application at once, being the next in order.
    /// Call [`Association::note_given`] then for those delivered, instead of [`Association::handle_bytes`].
    pub fn is_next(&self, flow: FlowId, offset: u64, len: u64) -> bool {
        let entry = self.flows.get(&flow);
        entry.is_some_and(|entry| {
            let flow = &entry.flow;
            flow.error().is_none() && !flow.is_refused() && flow.receive.is_next(offset, len)
        })
    }

    /// Notes that the application was given the first `len` bytes of those that [`Association::is_next`]
    /// allowed.
    pub fn note_given(&mut self, now_ns: u64, carrier: CarrierId, flow: FlowId, len: usize) {
        let Some(entry) = self.flows.get_mut(&flow) else {
            return;
        };
        entry.note_heard(now_ns, carrier, len, self.is_spread);
        let receive = &mut entry.flow.receive;
        let was_full = receive.tcp_room() == 0;
        receive.note_given(len);
        if was_full || receive.is_ended() {
            self.touch(flow);
        } else {
            self.owe(flow);
        }
    }

    /// Handles one frame that arrived by a carrier.
    pub fn handle_frame(&mut self, now_ns: u64, carrier: CarrierId, frame: Frame<'_>) {
        if let Frame::Broken { carrier: broken } = frame
            && self.carriers.contains_key(&broken)
            && !self.broken.contains(&broken)
        {
            self.broken.push_back(broken);
        }
        // Frames that open carriers are for the carriers' owner.
        let Some(id) = frame.flow() else {
            return;
        };
        let Some(entry) = self.flows.get_mut(&id) else {
            return self.keep_early_frame(now_ns, carrier, frame);
        };
        if entry.flow.error().is_some() {
            return; // the flow has been reset already
        }
        if let Frame::Chunk { bytes, .. } = frame {
            entry.note_heard(now_ns, carrier, bytes.len(), self.is_spread);
        }
        if entry.handle_frame(carrier, &self.carriers, frame).is_err() {
            self.reset(id, ResetCode::Violation);
        }
        self.touch(id);
    }

    /// Buffers the chunk or the credit of a flow without a TCP connection here yet.
    fn keep_early_frame(&mut self, now_ns: u64, carrier: CarrierId, frame: Frame<'_>) {
        match frame {
            Frame::Chunk {
                flow,
                offset,
                bytes,
                fin,
                urgent,
            } => {
                let chunk = EarlyChunk {
                    carrier,
                    offset,
                    bytes: Bytes::copy_from_slice(bytes),
                    fin,
                    urgent,
                };
                self.keep_early(now_ns, flow, chunk);
            }
            Frame::Confirm {
                flow,
                limit,
                tolerant,
                ..
            } if !self.early.keep_credit(now_ns, flow, limit, tolerant) => {
                self.reject(flow);
            }
            // The peer sends other states again once it knows the flow.
            _ => {}
        }
    }

    /// Buffers a chunk whose flow has no TCP connection here yet, or rejects the flow.
    fn keep_early(&mut self, now_ns: u64, id: FlowId, chunk: EarlyChunk) {
        if !self.early.keep_chunk(now_ns, id, chunk) {
            self.reject(id);
        }
    }

    fn reject(&mut self, id: FlowId) {
        let Some(early) = self.early.take(id) else {
            return;
        };
        if early.chunks.is_empty() {
            return; // no chunk was discarded
        }
        for carrier in self.reliable() {
            if carrier.rejected.len() < MAX_REJECTS {
                carrier.rejected.push_back(id);
            }
        }
    }

    /// Rejects flows whose early chunks have timed out.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        for id in self.early.late(now_ns) {
            self.reject(id);
        }
    }

    /// Writes control frames for `carrier` to the beginning of `buffer`; returns their length in bytes, 0 if
    /// there are none. With less than 140 bytes of room none may fit.
    pub fn poll_control(&mut self, carrier: CarrierId, buffer: &mut [u8]) -> usize {
        let Some(found) = self.carriers.get_mut(&carrier) else {
            return 0;
        };
        let mut out = Out { buffer, used: 0 };
        while out.has_room()
            && let Some(carrier) = found.broken.pop_front()
        {
            out.push(Frame::Broken { carrier });
        }
        while out.has_room()
            && let Some(flow) = found.rejected.pop_front()
        {
            out.push(Frame::Reject { flow });
        }
        let mut owing = mem::take(&mut found.owing);
        while out.has_room()
            && let Some(id) = owing.pop_first()
        {
            if let Some(entry) = self.flows.get_mut(&id) {
                let confirms_by = entry.confirms_by(&self.carriers);
                entry.poll_control(id, carrier, confirms_by, &mut out);
            }
        }
        if let Some(found) = self.carriers.get_mut(&carrier) {
            found.owing = owing;
        }
        out.used
    }
}
