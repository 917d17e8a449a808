//! An association: the flows and the carriers between two hosts.
//!
//! # Input and output
//! - Carriers: [`Association::add_carrier`], then [`Association::handle`] for what arrives by one, and
//!   [`Association::poll_control`] for the frames that are to go by it. Chunks are taken from the flows
//!   ([`crate::flow::SendHalf::next`]) by whoever runs the carrier.
//! - Flows: [`Association::open`] once their TCP connection is established, [`Association::close`] when it
//!   has ended. Bytes of that connection do not pass here but through [`Association::flow_mut`].
//! - [`Association::poll_event`] says what changed.
//!
//! # Control frames
//! What the peer has to be told of a flow is a state, not a sequence of messages: the newest is told, by
//! one carrier or by all, and told again where a carrier has broken that may have had it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bytes::Bytes;
use vtl_proto::frame::{self, CarrierId, FlowId, Frame, FrameError, ResetCode, Run, Side};

use crate::flow::{Chunk, Flow, INITIAL_CREDIT, Path, Violation};

/// Bytes of chunks that are kept for flows whose TCP connection is not established here yet.
const MAX_EARLY: usize = 1 << 20;
/// Chunks of one such flow.
const MAX_EARLY_CHUNKS: usize = 256;
/// How long they are kept, nanoseconds: the handshake's last segment may be lost twice.
const EARLY_NS: u64 = 10_000_000_000;

/// What has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// There may be bytes to read, to send, or an end to pass on.
    Flow(FlowId),
    /// The peer has given up this carrier: take what has arrived by it, then call
    /// [`Association::carrier_broken`].
    Broken(CarrierId),
}

#[derive(Debug)]
struct Carrier {
    retains: bool,
    /// Carriers whose end the peer has to be told of by this one.
    owes_broken: VecDeque<CarrierId>,
}

/// What the peer has been told by several carriers, for each of which it is told once.
#[derive(Debug, Default)]
struct Told(BTreeSet<CarrierId>);

#[derive(Debug)]
struct Entry {
    flow: Flow,
    /// The carrier by which the peer was heard last.
    heard_by: Option<CarrierId>,
    confirm_by: Option<CarrierId>,
    attach: Option<Run>,
    attach_told: Told,
    attached: Option<u32>,
    attached_told: Told,
    fin_told: Told,
    reset: Option<ResetCode>,
    reset_told: Told,
}

/// Chunks of a flow whose TCP connection is not established here yet.
#[derive(Debug)]
struct Early {
    since: u64,
    chunks: Vec<EarlyChunk>,
}

#[derive(Debug)]
struct EarlyChunk {
    carrier: CarrierId,
    offset: u64,
    bytes: Bytes,
    fin: bool,
    urgent: bool,
}

/// The relation to another host.
#[derive(Debug)]
pub struct Association {
    /// Of each flow, bytes.
    window: u64,
    carriers: BTreeMap<CarrierId, Carrier>,
    flows: BTreeMap<FlowId, Entry>,
    /// Flows that may owe a control frame.
    owing: BTreeSet<FlowId>,
    early: BTreeMap<FlowId, Early>,
    early_bytes: usize,
    /// Flows whose chunks were discarded, and by which carriers the peer has been told.
    rejected: BTreeMap<FlowId, Told>,
    changed: BTreeSet<FlowId>,
    broken: VecDeque<CarrierId>,
}

impl Told {
    /// Whether it has to be told by `carrier` still; from now on it has been.
    fn tell(&mut self, carrier: CarrierId) -> bool {
        self.0.insert(carrier)
    }

    fn all(&self, carriers: &BTreeMap<CarrierId, Carrier>) -> bool {
        carriers.keys().all(|id| self.0.contains(id))
    }
}

impl Association {
    /// `window`: bytes that each flow holds at most for an application that does not read, at least
    /// [`INITIAL_CREDIT`].
    pub fn new(window: u64) -> Self {
        Self {
            window,
            carriers: BTreeMap::new(),
            flows: BTreeMap::new(),
            owing: BTreeSet::new(),
            early: BTreeMap::new(),
            early_bytes: 0,
            rejected: BTreeMap::new(),
            changed: BTreeSet::new(),
            broken: VecDeque::new(),
        }
    }

    /// A carrier is ready. `retains`: it does not give back what it could not deliver, so flows keep what
    /// goes by it until the peer has confirmed it.
    pub fn add_carrier(&mut self, id: CarrierId, retains: bool) {
        let owes_broken = VecDeque::new();
        self.carriers.insert(
            id,
            Carrier {
                retains,
                owes_broken,
            },
        );
        // Runs and resets are told by every carrier, also by later ones.
        self.owing.extend(self.flows.keys());
    }

    /// Whether flows may use the carrier.
    pub fn has_carrier(&self, id: CarrierId) -> bool {
        self.carriers.contains_key(&id)
    }

    /// Whether flows have to keep what goes by the carrier.
    pub fn retains(&self, id: CarrierId) -> bool {
        self.carriers
            .get(&id)
            .is_some_and(|carrier| carrier.retains)
    }

    /// A carrier has broken, here or at the peer. `undelivered`: what it gives back.
    pub fn carrier_broken(
        &mut self,
        id: CarrierId,
        undelivered: impl IntoIterator<Item = (FlowId, Chunk)>,
    ) {
        if self.carriers.remove(&id).is_none() {
            return;
        }
        for carrier in self.carriers.values_mut() {
            carrier.owes_broken.push_back(id);
        }
        let mut back: BTreeMap<FlowId, Vec<Chunk>> = BTreeMap::new();
        for (flow, chunk) in undelivered {
            back.entry(flow).or_default().push(chunk);
        }
        for (flow, entry) in &mut self.flows {
            let undelivered = back.remove(flow).unwrap_or_default();
            entry.flow.send.carrier_broken(id, undelivered);
            if entry.confirm_by == Some(id) {
                entry.confirm_by = None;
                entry.flow.receive.confirm_lost();
            }
            entry.heard_by.take_if(|by| *by == id);
            self.owing.insert(*flow);
            self.changed.insert(*flow);
        }
    }

    /// A flow's TCP connection is established.
    pub fn open(&mut self, id: FlowId) {
        let mut entry = Entry::new(self.window);
        if let Some(early) = self.early.remove(&id) {
            for chunk in early.chunks {
                self.early_bytes -= chunk.bytes.len();
                entry.heard_by = Some(chunk.carrier);
                if entry
                    .chunk(chunk.offset, &chunk.bytes, chunk.fin, chunk.urgent)
                    .is_err()
                {
                    entry.flow.reset(ResetCode::Violation);
                    entry.reset = Some(ResetCode::Violation);
                }
            }
        }
        self.flows.insert(id, entry);
        self.touch(id);
    }

    /// Takes over a flow of a former daemon, whose carriers have all broken.
    pub fn restore(&mut self, id: FlowId, flow: Flow) {
        let reset = flow.error();
        let entry = Entry {
            flow,
            reset,
            ..Entry::new(self.window)
        };
        self.flows.insert(id, entry);
        self.touch(id);
    }

    /// All flows, for a daemon that restarts, once all carriers have broken.
    pub fn into_flows(self) -> impl Iterator<Item = (FlowId, Flow)> {
        self.flows.into_iter().map(|(id, entry)| (id, entry.flow))
    }

    /// A flow's TCP connection has ended, or was never established: forgets the flow.
    pub fn close(&mut self, id: FlowId) {
        self.flows.remove(&id);
        self.owing.remove(&id);
        self.changed.remove(&id);
    }

    /// A flow.
    pub fn flow(&self, id: FlowId) -> Option<&Flow> {
        self.flows.get(&id).map(|entry| &entry.flow)
    }

    /// A flow, to read from it or to send by a path. Call [`Association::touch`] afterwards.
    pub fn flow_mut(&mut self, id: FlowId) -> Option<&mut Flow> {
        self.flows.get_mut(&id).map(|entry| &mut entry.flow)
    }

    /// A flow was changed by its owner: it may owe control frames.
    pub fn touch(&mut self, id: FlowId) {
        if self.flows.contains_key(&id) {
            self.owing.insert(id);
            self.changed.insert(id);
        }
    }

    /// Moves the local direction of a flow to another path. A carrier that is not there is ignored.
    pub fn move_flow(&mut self, id: FlowId, to: Path) {
        let is_there = match to {
            Path::Tcp => true,
            Path::Carrier(carrier) => self.carriers.contains_key(&carrier),
        };
        if let Some(entry) = self.flows.get_mut(&id).filter(|_| is_there) {
            entry.flow.send.move_to(to);
            self.touch(id);
        }
    }

    /// Ends a flow in an error, and tells the peer.
    pub fn reset(&mut self, id: FlowId, code: ResetCode) {
        if let Some(entry) = self.flows.get_mut(&id) {
            entry.flow.reset(code);
            entry.reset = Some(code);
            self.touch(id);
        }
    }

    /// What has changed.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(carrier) = self.broken.pop_front() {
            return Some(Event::Broken(carrier));
        }
        self.changed.pop_first().map(Event::Flow)
    }

    /// Takes the frames of a packet or message that came by a carrier.
    ///
    /// # Errors
    /// They are malformed: the carrier must be closed.
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

    fn handle_frame(&mut self, now_ns: u64, carrier: CarrierId, frame: Frame<'_>) {
        let (id, result) = match frame {
            Frame::Broken { carrier: broken } => {
                if self.carriers.contains_key(&broken) && !self.broken.contains(&broken) {
                    self.broken.push_back(broken);
                }
                return;
            }
            Frame::Chunk {
                flow,
                offset,
                bytes,
                fin,
                urgent,
            } => {
                let Some(entry) = self.flows.get_mut(&flow) else {
                    let chunk = EarlyChunk {
                        carrier,
                        offset,
                        bytes: Bytes::copy_from_slice(bytes),
                        fin,
                        urgent,
                    };
                    return self.keep_early(now_ns, flow, chunk);
                };
                entry.heard_by = Some(carrier);
                (flow, entry.chunk(offset, bytes, fin, urgent))
            }
            Frame::Confirm {
                flow,
                offset,
                fin,
                limit,
            } => {
                let Some(entry) = self.flows.get_mut(&flow) else {
                    return;
                };
                if !entry.flow.send.is_known() {
                    // The peer had no use for what it was told before.
                    entry.attach_told = Told::default();
                    entry.fin_told = Told::default();
                }
                (flow, entry.flow.send.confirmed(offset, fin, limit))
            }
            Frame::Attach { flow, run } => {
                let Some(entry) = self.flows.get_mut(&flow) else {
                    return;
                };
                let result = entry.flow.receive.attach(run);
                if entry.attached.is_none_or(|number| number < run.number) {
                    entry.attached = Some(run.number);
                    entry.attached_told = Told::default();
                }
                // The one by which it came is alive.
                entry.attached_told.0.remove(&carrier);
                (flow, result)
            }
            Frame::Attached { flow, number } => {
                let Some(entry) = self.flows.get_mut(&flow) else {
                    return;
                };
                entry.flow.send.attached(number);
                (flow, Ok(()))
            }
            Frame::Reset { flow, code } => {
                let Some(entry) = self.flows.get_mut(&flow) else {
                    return;
                };
                entry.flow.reset(code);
                (flow, Ok(()))
            }
            Frame::Reject { flow } => {
                let Some(entry) = self.flows.get_mut(&flow) else {
                    return;
                };
                entry.flow.send.reject();
                (flow, Ok(()))
            }
        };
        if result.is_err() {
            self.reset(id, ResetCode::Violation);
        }
        self.touch(id);
    }

    /// Keeps a chunk whose flow has no TCP connection here yet, or rejects the flow.
    fn keep_early(&mut self, now_ns: u64, id: FlowId, chunk: EarlyChunk) {
        if id.opener == Side::Local || self.rejected.contains_key(&id) {
            return; // it was ours, and has ended; or the peer knows already
        }
        let early = self.early.entry(id).or_insert_with(|| Early {
            since: now_ns,
            chunks: Vec::new(),
        });
        self.early_bytes += chunk.bytes.len();
        let fits = chunk.offset + chunk.bytes.len() as u64 <= INITIAL_CREDIT
            && early.chunks.len() < MAX_EARLY_CHUNKS
            && self.early_bytes <= MAX_EARLY;
        early.chunks.push(chunk);
        if !fits {
            self.reject(id);
        }
    }

    fn reject(&mut self, id: FlowId) {
        if let Some(early) = self.early.remove(&id) {
            self.early_bytes -= early.chunks.iter().map(|c| c.bytes.len()).sum::<usize>();
            self.rejected.insert(id, Told::default());
        }
    }

    /// Rejects flows whose chunks have waited too long for a TCP connection.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        let late = |early: &Early| now_ns.saturating_sub(early.since) >= EARLY_NS;
        let late: Vec<FlowId> = self
            .early
            .iter()
            .filter(|(_, early)| late(early))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            self.reject(id);
        }
    }

    /// Writes control frames that are to go by `carrier` to the beginning of `buffer`; returns their
    /// bytes, 0 if there are none. With less than [`frame::MAX_CONTROL`] bytes of room none may fit.
    pub fn poll_control(&mut self, carrier: CarrierId, buffer: &mut [u8]) -> usize {
        let Some(found) = self.carriers.get_mut(&carrier) else {
            return 0;
        };
        let mut out = Out { buffer, used: 0 };
        while let Some(id) = found.owes_broken.front().copied() {
            if !out.push(Frame::Broken { carrier: id }) {
                return out.used;
            }
            found.owes_broken.pop_front();
        }
        let carriers = &self.carriers;
        self.rejected.retain(|flow, told| {
            if out.has_room() && told.tell(carrier) {
                out.push(Frame::Reject { flow: *flow });
            }
            !told.all(carriers)
        });
        let mut settled = Vec::new();
        for id in &self.owing {
            let Some(entry) = self.flows.get_mut(id) else {
                continue;
            };
            if !entry.poll_control(*id, carrier, carriers, &mut out) {
                break;
            }
            if !entry.owes(carriers) {
                settled.push(*id);
            }
        }
        for id in settled {
            self.owing.remove(&id);
        }
        out.used
    }
}

impl Entry {
    fn new(window: u64) -> Self {
        Self {
            flow: Flow::new(window),
            heard_by: None,
            confirm_by: None,
            attach: None,
            attach_told: Told::default(),
            attached: None,
            attached_told: Told::default(),
            fin_told: Told::default(),
            reset: None,
            reset_told: Told::default(),
        }
    }

    fn chunk(
        &mut self,
        offset: u64,
        bytes: &[u8],
        fin: bool,
        urgent: bool,
    ) -> Result<(), Violation> {
        let receive = &mut self.flow.receive;
        receive.chunk(offset, bytes, fin)?;
        if urgent {
            receive.note_urgent(offset + bytes.len() as u64);
        }
        Ok(())
    }

    /// The carrier that confirmations go by: the one by which the peer was heard, or else any.
    fn confirms_by(&self, carriers: &BTreeMap<CarrierId, Carrier>) -> Option<CarrierId> {
        self.heard_by
            .filter(|id| carriers.contains_key(id))
            .or_else(|| carriers.keys().next().copied())
    }

    /// Frames of a flow that go by one carrier; returns false if there was no room.
    fn poll_control(
        &mut self,
        flow: FlowId,
        carrier: CarrierId,
        carriers: &BTreeMap<CarrierId, Carrier>,
        out: &mut Out<'_>,
    ) -> bool {
        if let Some(code) = self.reset {
            if !out.has_room() {
                return false;
            }
            if self.reset_told.tell(carrier) {
                out.push(Frame::Reset { flow, code });
            }
            return true;
        }
        if self.attach != self.flow.send.asked() {
            self.attach = self.flow.send.asked();
            self.attach_told = Told::default();
        }
        if !out.has_room() {
            return false;
        }
        if let Some(run) = self.attach
            && self.attach_told.tell(carrier)
        {
            out.push(Frame::Attach { flow, run });
        }
        if !out.has_room() {
            return false;
        }
        if let Some(number) = self.attached
            && self.attached_told.tell(carrier)
        {
            out.push(Frame::Attached { flow, number });
        }
        if !out.has_room() {
            return false;
        }
        if let Some(offset) = self.flow.send.owes_fin()
            && self.fin_told.tell(carrier)
        {
            out.push(Frame::Chunk {
                flow,
                offset,
                bytes: &[],
                fin: true,
                urgent: false,
            });
        }
        if !out.has_room() {
            return false;
        }
        if self.confirms_by(carriers) == Some(carrier)
            && let Some(confirm) = self.flow.receive.owes_confirm()
        {
            let (offset, fin, limit) = confirm;
            out.push(Frame::Confirm {
                flow,
                offset,
                fin,
                limit,
            });
            self.flow.receive.confirm_sent(confirm);
            self.confirm_by = Some(carrier);
        }
        true
    }

    fn owes(&self, carriers: &BTreeMap<CarrierId, Carrier>) -> bool {
        if self.reset.is_some() {
            return !self.reset_told.all(carriers);
        }
        self.attach != self.flow.send.asked()
            || (self.attach.is_some() && !self.attach_told.all(carriers))
            || (self.attached.is_some() && !self.attached_told.all(carriers))
            || (self.flow.send.owes_fin().is_some() && !self.fin_told.all(carriers))
            || self.flow.receive.owes_confirm().is_some()
    }
}

/// Frames written one behind the other.
struct Out<'a> {
    buffer: &'a mut [u8],
    used: usize,
}

impl Out<'_> {
    fn has_room(&self) -> bool {
        self.buffer.len() - self.used >= frame::MAX_CONTROL
    }

    fn push(&mut self, frame: Frame<'_>) -> bool {
        let written = frame.emit(&mut self.buffer[self.used..]);
        self.used += written.unwrap_or(0);
        written.is_some()
    }
}
