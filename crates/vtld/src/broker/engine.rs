//! The broker's thread: waits for events, opens and ends sessions, runs the pump.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap, HashSet},
    io::{Read, Write},
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    rc::Rc,
    sync::{Arc, PoisonError, mpsc::Receiver},
};

use anyhow::Context;
use libbpf_rs::{RingBuffer, RingBufferBuilder};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
    eventfd::{EfdFlags, EventFd},
};
use serde_json::{Value, json};
use vtl::ring::{RxRing, TxRing};
use vtl_bpf::{
    netdev::{self, Interface},
    objects,
    plane::{DataPlane, describe},
    pump::{BATCH, Pump},
    rings::RingMaker,
};
use vtl_proto::{
    intf,
    mux::{ResetCode, StreamId},
    nego::{self, Established, Initiator, NegoKey, Offer, Policy},
    services::{GraftInfo, Services},
    wire::{Gids, Header, Nego, Packet},
};

use super::{
    Command, Config, Granted, Handle, Owner, Reply, now_ns,
    preamble::{self, Preamble},
    random_token,
    raw::{self, Raw, Received},
    session::{self, Aware, Listener, Phase, Session, Use, Waiting},
    stock::Stock,
    streams::{App, Effect, Streams},
};
use crate::hooker::{self, ConnectError, HeldConnect, ServerFlow};

const MS: u64 = 1_000_000;
/// Housekeeping of sessions.
const TICK_NS: u64 = 100 * MS;
/// An idle peer is asked after this long whether it is still there.
const KEEPALIVE_NS: u64 = 10_000 * MS;
/// A peer that has owed an answer for this long is gone.
const DEAD_NS: u64 = 15_000 * MS;
/// A stream session without flows is closed after this long.
const IDLE_NS: u64 = 300_000 * MS;
/// How long a discovery connection may take to say what it is for.
const PREAMBLE_NS: u64 = 10_000 * MS;
/// CLOSE is sent this often, and this far apart.
const CLOSE_TRIES: u32 = 5;
const CLOSE_NS: u64 = 200 * MS;
/// Batches that one session may have before the next one's turn.
const BATCHES: u32 = 4;
/// Connections that wait for an aware application's accept.
const BACKLOG: usize = 64;

/// Where an epoll event comes from; packed into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Wake,
    Ring,
    Raw { v6: bool },
    Kick { sid: u32 },
    Lifeline { sid: u32 },
    Flow { sid: u32, stream: u32 },
    Preamble { id: u32 },
}

impl Source {
    fn pack(self) -> u64 {
        let (kind, high, low) = match self {
            Self::Wake => (0, 0, 0),
            Self::Ring => (1, 0, 0),
            Self::Raw { v6 } => (2, 0, v6.into()),
            Self::Kick { sid } => (3, sid, 0),
            Self::Lifeline { sid } => (4, sid, 0),
            Self::Flow { sid, stream } => (5, sid, stream),
            Self::Preamble { id } => (6, 0, id),
        };
        kind << 56 | u64::from(high) << 32 | u64::from(low)
    }

    fn unpack(data: u64) -> Self {
        let (high, low) = ((data >> 32 & 0xff_ffff) as u32, data as u32);
        match data >> 56 {
            0 => Self::Wake,
            1 => Self::Ring,
            2 => Self::Raw { v6: low != 0 },
            3 => Self::Kick { sid: high },
            4 => Self::Lifeline { sid: high },
            5 => Self::Flow { sid: high, stream: low },
            _ => Self::Preamble { id: low },
        }
    }
}

/// A graft of the pool.
struct Pooled {
    info: GraftInfo,
    image: &'static [u8],
    /// Taken out by hand: not to be used until it is deployed again.
    disabled: bool,
}

/// A steered connection that has not said what it is for.
struct Arriving {
    flow: ServerFlow,
    bytes: Vec<u8>,
    since_ns: u64,
}

pub(super) struct Engine {
    config: Config,
    handle: Handle,
    inbox: Receiver<Command>,
    epoll: Epoll,
    events: Rc<RefCell<Vec<(u32, u32)>>>,
    ring: RingBuffer<'static>,
    raw: [Option<Raw>; 2],
    interfaces: BTreeMap<u32, Interface>,
    pumps: HashMap<u32, (Pump, String)>,
    stock: Stock,
    pool: Vec<Pooled>,
    sessions: BTreeMap<u32, Session>,
    listeners: BTreeMap<u16, Listener>,
    arriving: BTreeMap<u32, Arriving>,
    next_arriving: u32,
    last_sid: u32,
    hooker: Option<hooker::Handle>,
    started_ns: u64,
    next_tick: u64,
    stopping: bool,
    // Last: everything above is gone before the kernel's side goes.
    plane: DataPlane,
}

impl Engine {
    pub(super) fn new(
        config: Config,
        handle: Handle,
        inbox: Receiver<Command>,
    ) -> anyhow::Result<Self> {
        let plane = DataPlane::load()?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let watch = |fd: BorrowedFd<'_>, source: Source| {
            epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, source.pack()))
        };
        watch(handle.wake.as_fd(), Source::Wake)?;

        let events = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&events);
        let map = plane.map_handle("vtl_events")?;
        let mut builder = RingBufferBuilder::new();
        builder.add(&map, move |bytes: &[u8]| {
            if let Some((sid, what)) = bytes.split_at_checked(4) {
                let word = |b: &[u8]| b.get(..4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
                if let (Some(sid), Some(what)) = (word(sid), word(what)) {
                    sink.borrow_mut().push((sid, what));
                }
            }
            0
        })?;
        let ring = builder.build().context("the ring of events")?;
        // SAFETY: the ring buffer keeps its descriptor open as long as it lives, and it lives as
        // long as the epoll instance that watches it.
        watch(unsafe { BorrowedFd::borrow_raw(ring.epoll_fd()) }, Source::Ring)?;

        let raw4 = Raw::open(false).context("a raw socket for IP protocol 253")?;
        watch(raw4.as_fd(), Source::Raw { v6: false })?;
        // A host may have no IPv6.
        let raw6 = Raw::open(true).ok();
        if let Some(raw6) = &raw6 {
            watch(raw6.as_fd(), Source::Raw { v6: true })?;
        }

        let pool = objects::GRAFTS
            .iter()
            .map(|(_, image)| {
                let d = describe(image)?;
                let info = GraftInfo {
                    name: d.name,
                    gid: d.gid,
                    provides: Services::from_bits(d.services),
                };
                Ok(Pooled { info, image, disabled: false })
            })
            .collect::<vtl_bpf::Result<_>>()?;
        let stock = Stock::start(RingMaker::new(&plane)?, config.ring_slots, config.stock);
        let mut engine = Self {
            config,
            handle,
            inbox,
            epoll,
            events,
            ring,
            raw: [Some(raw4), raw6],
            interfaces: BTreeMap::new(),
            pumps: HashMap::new(),
            stock,
            pool,
            sessions: BTreeMap::new(),
            listeners: BTreeMap::new(),
            arriving: BTreeMap::new(),
            next_arriving: 0,
            last_sid: 0,
            hooker: None,
            started_ns: now_ns(),
            next_tick: 0,
            stopping: false,
            plane,
        };
        engine.find_interfaces()?;
        // Ahead of the first session, which would wait for the verifier.
        for gid in engine.pool.iter().map(|p| p.info.gid).collect::<Vec<_>>() {
            engine.launch(gid).map_err(anyhow::Error::msg)?;
        }
        Ok(engine)
    }

    /// Attaches the root programs to interfaces that are new.
    fn find_interfaces(&mut self) -> vtl_bpf::Result<()> {
        for interface in netdev::interfaces()? {
            if self.interfaces.contains_key(&interface.index) {
                continue;
            }
            self.plane.attach(&interface, self.config.ingress)?;
            tracing::info!(interface = interface.name, mtu = interface.mtu, ingress = ?self.config.ingress, "attached");
            self.interfaces.insert(interface.index, interface);
        }
        Ok(())
    }

    pub(super) fn run(mut self) {
        let mut found = [EpollEvent::empty(); 64];
        while !(self.stopping && self.sessions.is_empty()) {
            self.pump();
            let timeout = self.deadline().saturating_sub(now_ns());
            let count = wait(&self.epoll, &mut found, timeout);
            for event in &found[..count] {
                self.handle_event(Source::unpack(event.data()), event.events());
            }
            let _ = self.ring.consume();
            self.notifications();
            if now_ns() >= self.next_tick {
                self.tick();
            }
        }
    }

    fn deadline(&self) -> u64 {
        let opening = |s: &Session| match &s.phase {
            Phase::Opening(nego) => nego.poll_at(),
            Phase::Open => s.wake_ns,
            Phase::Closing { next_ns, .. } => *next_ns,
            Phase::Ended => u64::MAX,
        };
        let first = self.sessions.values().map(opening).min().unwrap_or(u64::MAX);
        first.min(self.next_tick)
    }

    fn handle_event(&mut self, source: Source, flags: EpollFlags) {
        match source {
            Source::Wake => {
                let _ = self.handle.wake.read();
                while let Ok(command) = self.inbox.try_recv() {
                    self.command(command);
                }
            }
            Source::Ring => {}
            Source::Raw { v6 } => self.control_packets(v6),
            Source::Kick { sid } => self.kick(sid),
            Source::Lifeline { sid } => self.lifeline(sid),
            Source::Flow { sid, stream } => {
                let read = flags.intersects(
                    EpollFlags::EPOLLIN
                        | EpollFlags::EPOLLRDHUP
                        | EpollFlags::EPOLLHUP
                        | EpollFlags::EPOLLERR,
                );
                let write =
                    flags.intersects(EpollFlags::EPOLLOUT | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
                if let Some(streams) = self.sessions.get_mut(&sid).and_then(Session::streams) {
                    streams.ready(StreamId(stream), read, write);
                    self.transmit(sid);
                }
            }
            Source::Preamble { id } => self.preamble(id),
        }
    }

    /// What the kernel's programs reported.
    fn notifications(&mut self) {
        let events = std::mem::take(&mut *self.events.borrow_mut());
        for (sid, what) in events {
            if what & intf::VTL_EV_SEND != 0
                && let Some(session) = self.sessions.get_mut(&sid)
            {
                session.wake_ns = 0;
                self.transmit(sid);
            }
            if what & intf::VTL_EV_RECV != 0 {
                self.receive(sid);
            }
        }
    }

    /// Runs the egress graft of every session that is due.
    fn pump(&mut self) {
        let now = now_ns();
        let table = Arc::clone(self.plane.sessions());
        let due: Vec<u32> = self
            .sessions
            .iter()
            .filter(|(_, s)| s.is_open() && s.wake_ns <= now)
            .map(|(sid, _)| *sid)
            .collect();
        for sid in due {
            self.transmit(sid);
            let Some(entry) = table.get(sid) else { continue };
            let ifindex = entry.ifindex();
            let mut wake = u64::MAX;
            if ifindex != 0 {
                if !self.pumps.contains_key(&ifindex) {
                    self.open_pump(ifindex);
                }
                let Some((pump, _)) = self.pumps.get_mut(&ifindex) else { continue };
                for _ in 0..BATCHES {
                    let count = entry.paced(now_ns()).min(BATCH.into()) as u32;
                    if let Err(error) = pump.run(sid, count) {
                        tracing::warn!(%error, sid, "cannot transmit");
                        wake = now + 10 * MS;
                        break;
                    }
                    wake = entry.wake_ns();
                    if wake != 0 {
                        break;
                    }
                }
            }
            if let Some(session) = self.sessions.get_mut(&sid) {
                session.wake_ns = wake;
            }
        }
    }

    fn open_pump(&mut self, ifindex: u32) {
        let mtu = self.interfaces.get(&ifindex).map_or(1500, |i| i.mtu);
        match Pump::open(&self.plane, ifindex, mtu, self.config.driver) {
            Ok((pump, why)) => {
                tracing::info!(ifindex, driver = pump.name(), why, "egress driver");
                self.pumps.insert(ifindex, (pump, why));
            }
            Err(error) => tracing::error!(%error, ifindex, "no egress driver works"),
        }
    }

    fn kick(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        let Use::Aware(aware) = &session.purpose else { return };
        let value = aware.kick.read().unwrap_or(0);
        session.wake_ns = 0;
        if value >> 32 != 0
            && let Some(entry) = self.plane.sessions().get(sid)
        {
            entry.request_ack();
        }
    }

    /// Packets lie in the receive ring.
    fn receive(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        session.used_ns = now_ns();
        match &mut session.purpose {
            Use::Aware(aware) => {
                let _ = aware.wake.write(1);
            }
            Use::Streams { streams: None, .. } => {}
            Use::Streams { streams: Some(streams), .. } => {
                let mut effects = Vec::new();
                match streams.receive(&mut effects) {
                    Ok(progress) => {
                        if progress.window
                            && let Some(entry) = self.plane.sessions().get(sid)
                        {
                            entry.request_ack();
                            session.wake_ns = 0;
                        }
                        if progress.more {
                            self.events.borrow_mut().push((sid, intf::VTL_EV_RECV));
                            let _ = self.handle.wake.write(1);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, peer = %session.peer, "the peer breaks the rules");
                        self.close(sid, true);
                        return;
                    }
                }
                for effect in effects {
                    self.effect(sid, effect);
                }
                self.transmit(sid);
            }
        }
    }

    /// Fills a stream session's transmit ring.
    fn transmit(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        let now = now_ns();
        if let Some(streams) = session.streams()
            && streams.transmit()
        {
            session.used_ns = now;
            session.wake_ns = 0;
        }
    }

    fn effect(&mut self, sid: u32, effect: Effect<HeldConnect>) {
        match effect {
            Effect::Open { id, dest, client } => self.serve(sid, id, dest, client),
            Effect::Accept { id, held } => {
                let handle = self.handle.clone();
                held.accept(move |app| handle.send(Command::Accepted { sid, stream: id.0, app }));
            }
            Effect::Refuse { held, code } => match code {
                ResetCode::NotHooked => held.fall_back(),
                ResetCode::Unreachable => held.refuse(ConnectError::HostUnreachable),
                ResetCode::Timeout => held.refuse(ConnectError::TimedOut),
                ResetCode::Rst | ResetCode::Refused => held.refuse(ConnectError::Refused),
            },
        }
    }

    /// The peer wants to reach a local application.
    fn serve(&mut self, sid: u32, id: StreamId, dest: SocketAddr, client: SocketAddr) {
        let local = self.sessions.get(&sid).map(|s| (s.local, s.peer));
        let hooker = self.hooker.clone();
        let Some(streams) = self.sessions.get_mut(&sid).and_then(Session::streams) else { return };
        // Only what a TCP connection over the same path could have asked for.
        let honest = local == Some((dest.ip(), client.ip()));
        let Some(hooker) = hooker.filter(|h| honest && h.serves(dest)) else {
            streams.refuse(id, ResetCode::NotHooked);
            return;
        };
        match hooker.connect_local_app(dest, client) {
            Ok((app, guard)) => {
                streams.serve(id, app, Some(Box::new(guard)));
                self.watch_flow(sid, id);
            }
            Err(error) => {
                tracing::debug!(%error, %dest, "the local application cannot be reached");
                streams.refuse(id, ResetCode::Refused);
            }
        }
    }

    fn watch_flow(&mut self, sid: u32, id: StreamId) {
        let Some(streams) = self.sessions.get_mut(&sid).and_then(Session::streams) else { return };
        let Some(socket) = streams.socket(id) else { return };
        let flags = EpollFlags::EPOLLIN
            | EpollFlags::EPOLLOUT
            | EpollFlags::EPOLLRDHUP
            | EpollFlags::EPOLLET;
        let event = EpollEvent::new(flags, Source::Flow { sid, stream: id.0 }.pack());
        if self.epoll.add(socket, event).is_err() {
            streams.refuse(id, ResetCode::Rst);
        }
    }

    fn tick(&mut self) {
        let now = now_ns();
        self.next_tick = now + TICK_NS;
        let _ = self.find_interfaces();
        self.arriving.retain(|_, a| now - a.since_ns < PREAMBLE_NS);
        for sid in self.sessions.keys().copied().collect::<Vec<_>>() {
            self.tick_session(sid, now);
        }
    }

    fn tick_session(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        let Some(entry) = self.plane.sessions().get(sid) else { return };
        match &mut session.phase {
            Phase::Opening(_) => self.open_timer(sid, now),
            Phase::Closing { tries, next_ns } if *next_ns <= now => {
                *tries += 1;
                *next_ns = now + CLOSE_NS;
                if *tries > CLOSE_TRIES {
                    self.end(sid, intf::VTL_CLOSED_LOCAL);
                } else {
                    self.send_close(sid, false);
                }
            }
            Phase::Closing { .. } | Phase::Ended => {}
            Phase::Open => {
                let heard = entry.heard();
                if heard != session.heard {
                    session.heard = heard;
                    session.heard_ns = now;
                }
                let silent = now - session.heard_ns;
                let used = session.used_ns;
                if silent > DEAD_NS && entry.timeouts() >= 3 {
                    tracing::info!(peer = %session.peer, "the peer does not answer any more");
                    self.end(sid, intf::VTL_CLOSED_TIMEOUT);
                    return;
                }
                if silent > KEEPALIVE_NS && entry.unacknowledged() == 0 && entry.timeouts() == 0
                {
                    entry.probe();
                    session.wake_ns = 0;
                }
                let idle = self.sessions.get_mut(&sid).and_then(Session::streams).is_some_and(|s| s.idle());
                if idle && now - used > IDLE_NS {
                    self.close(sid, false);
                }
            }
        }
    }

    // ------------------------------------------------------------------------------ commands

    fn command(&mut self, command: Command) {
        match command {
            Command::Client { app, dest, src, peer } => self.client(Waiting { app, dest, src, peer }),
            Command::Held(held) => self.held(held),
            Command::Accepted { sid, stream, app } => {
                let id = StreamId(stream);
                let Some(streams) = self.sessions.get_mut(&sid).and_then(Session::streams) else {
                    return;
                };
                match app {
                    Ok(app) => {
                        streams.attach(id, app);
                        self.watch_flow(sid, id);
                    }
                    Err(_) => streams.refuse(id, ResetCode::Rst),
                }
                self.transmit(sid);
            }
            Command::Server(flow) => self.arrive(flow),
            Command::Connect { owner, to, services, reply } => {
                self.connect(owner, to, services, reply);
            }
            Command::Listen { owner, port, reply } => {
                let answer = match self.listeners.entry(port) {
                    _ if port == 0 => Err("port 0 is the Hooker's".into()),
                    std::collections::btree_map::Entry::Occupied(_) => Err(format!(
                        "VTL port {port} is taken by another receiver: choose another one"
                    )),
                    std::collections::btree_map::Entry::Vacant(free) => {
                        free.insert(Listener { owner, backlog: Default::default(), waiting: None });
                        Ok(())
                    }
                };
                let _ = reply.send(answer);
            }
            Command::Accept { owner, reply } => {
                let Some(listener) = self.listeners.values_mut().find(|l| l.owner == owner) else {
                    let _ = reply.send(Err("accept without listen".into()));
                    return;
                };
                listener.waiting = Some(reply);
                self.grant_accepted();
            }
            Command::CloseSession { owner, aborted } => self.close_owned(owner, aborted),
            Command::Gone { owner } => {
                let orphans: Vec<u32> = self
                    .listeners
                    .extract_if(.., |_, l| l.owner == owner)
                    .flat_map(|(_, l)| l.backlog)
                    .collect();
                for sid in orphans {
                    self.close(sid, true);
                }
                self.close_owned(owner, true);
            }
            Command::Status { reply } => {
                let _ = reply.send(Ok(self.status()));
            }
            Command::Grafts { reply } => {
                let _ = reply.send(Ok(self.grafts()));
            }
            Command::Deploy { name, reply } => {
                let _ = reply.send(self.deploy(&name));
            }
            Command::Remove { name, reply } => {
                let _ = reply.send(self.remove(&name));
            }
            Command::Hooker(hooker) => self.hooker = Some(hooker),
            Command::Stop => {
                self.stopping = true;
                for sid in self.sessions.keys().copied().collect::<Vec<_>>() {
                    self.close(sid, true);
                }
            }
        }
    }

    /// A captured connection to a peer that speaks VTL.
    fn client(&mut self, flow: Waiting) {
        let peer = flow.dest.ip();
        let sid = match self.stream_session(peer) {
            Some(sid) => sid,
            None => {
                let services =
                    Services::RELIABLE.union(Services::ORDERED).union(Services::FLOW_CONTROL);
                let purpose = Use::Streams { waiting: Vec::new(), streams: None };
                match self.open(peer, 0, services, |_| Ok(purpose)) {
                    Ok(sid) => sid,
                    Err(error) => {
                        tracing::warn!(%error, %peer, "plain TCP instead of a session");
                        self.plain(flow);
                        return;
                    }
                }
            }
        };
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        let Use::Streams { waiting, .. } = &mut session.purpose else { return };
        waiting.push(flow);
        if session.is_open() {
            self.start_waiting(sid);
        }
    }

    /// The stream session with a peer that is open or being opened.
    fn stream_session(&self, peer: IpAddr) -> Option<u32> {
        let fits = |s: &Session| {
            s.peer == peer
                && matches!(s.purpose, Use::Streams { .. })
                && matches!(s.phase, Phase::Open | Phase::Opening(_))
        };
        self.sessions.iter().find(|(_, s)| fits(s)).map(|(sid, _)| *sid)
    }

    /// Flows that waited for the session start in it.
    fn start_waiting(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        let Some(entry) = self.plane.sessions().get(sid) else { return };
        let Use::Streams { waiting, streams: Some(streams) } = &mut session.purpose else { return };
        let mut opened = Vec::new();
        let mut rejected = Vec::new();
        for Waiting { app, dest, src, mut peer } in std::mem::take(waiting) {
            match streams.open(App::Socket(app), dest, src) {
                Ok(id) => opened.push(id),
                Err(App::Socket(app)) => {
                    rejected.push(Waiting { app, dest, src, peer });
                    continue;
                }
                Err(_) => continue,
            }
            if session.lifeline.is_none() && session.initiator {
                let token = entry.snapshot().peer_token;
                let preamble = Preamble::Lifeline { token }.emit();
                // A fresh connection takes 16 bytes.
                if matches!(peer.write(&preamble), Ok(preamble::LENGTH)) {
                    super::set_linger(&peer, true);
                    let event = EpollEvent::new(
                        EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP,
                        Source::Lifeline { sid }.pack(),
                    );
                    let _ = self.epoll.add(&peer, event);
                    session.lifeline = Some(peer);
                }
            } else {
                // Without a preamble the peer lets it go.
                super::set_linger(&peer, false);
            }
        }
        for id in opened {
            self.watch_flow(sid, id);
        }
        for flow in rejected {
            self.plain(flow);
        }
        self.transmit(sid);
    }

    /// Carries a flow over its discovery connection.
    fn plain(&mut self, flow: Waiting) {
        let Waiting { app, mut peer, .. } = flow;
        let Some(hooker) = &self.hooker else { return };
        if matches!(peer.write(&Preamble::Plain.emit()), Ok(preamble::LENGTH)) {
            hooker.carry(app, peer, None);
        }
    }

    /// A connect to a host with a live session.
    fn held(&mut self, held: HeldConnect) {
        let (dest, port) = (held.dest(), held.src().port());
        let session = self.stream_session(dest.ip()).and_then(|sid| Some((sid, self.sessions.get_mut(&sid)?)));
        let Some((sid, session)) = session else {
            held.fall_back();
            return;
        };
        let src = SocketAddr::new(session.local, port);
        let Some(streams) = session.streams() else {
            held.fall_back();
            return;
        };
        let mut held = held;
        held.set_src(src);
        if let Err(App::Held(held)) = streams.open(App::Held(held), dest, src) {
            held.fall_back();
        }
        self.transmit(sid);
    }

    /// A steered connection.
    fn arrive(&mut self, flow: ServerFlow) {
        let id = self.next_arriving;
        self.next_arriving = self.next_arriving.wrapping_add(1);
        let event = EpollEvent::new(
            EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP,
            Source::Preamble { id }.pack(),
        );
        if self.epoll.add(&flow.peer, event).is_ok() {
            self.arriving.insert(id, Arriving { flow, bytes: Vec::new(), since_ns: now_ns() });
        }
    }

    /// A steered connection says what it is for.
    fn preamble(&mut self, id: u32) {
        let Some(arriving) = self.arriving.get_mut(&id) else { return };
        let mut buffer = [0; preamble::LENGTH];
        let rest = &mut buffer[arriving.bytes.len()..];
        match arriving.flow.peer.read(rest) {
            Ok(0) => {
                self.arriving.remove(&id);
                return;
            }
            Ok(n) => {
                let bytes = rest[..n].to_vec();
                arriving.bytes.extend(bytes);
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
            Err(_) => {
                self.arriving.remove(&id);
                return;
            }
        }
        let Ok(bytes) = <[u8; preamble::LENGTH]>::try_from(arriving.bytes.as_slice()) else {
            return;
        };
        let Some(Arriving { flow, .. }) = self.arriving.remove(&id) else { return };
        let _ = self.epoll.delete(&flow.peer);
        match Preamble::parse(&bytes) {
            Some(Preamble::Plain) => {
                let Some(hooker) = &self.hooker else { return };
                match hooker.connect_local_app(flow.dest, flow.client) {
                    Ok((app, guard)) => hooker.carry(flow.peer, app, Some(guard)),
                    Err(error) => {
                        tracing::debug!(%error, dest = %flow.dest, "the local application cannot be reached");
                    }
                }
            }
            Some(Preamble::Lifeline { token }) => {
                let found = self.sessions.iter_mut().find(|(_, s)| {
                    s.token == token && !s.initiator && s.peer == flow.client.ip()
                });
                let Some((sid, session)) = found else { return };
                let event = EpollEvent::new(
                    EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP,
                    Source::Lifeline { sid: *sid }.pack(),
                );
                if self.epoll.add(&flow.peer, event).is_ok() {
                    super::set_linger(&flow.peer, true);
                    session.lifeline = Some(flow.peer);
                }
            }
            None => {
                // No vtld of this kind: not a byte of it may be lost, and none can be given back.
                tracing::warn!(client = %flow.client, "a discovery connection without preamble");
            }
        }
    }

    /// Something happened on a lifeline: only its end can.
    fn lifeline(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        let Some(lifeline) = &mut session.lifeline else { return };
        let mut byte = [0];
        match lifeline.read(&mut byte) {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            _ => {
                session.lifeline = None;
                if session.is_open() {
                    tracing::info!(peer = %session.peer, "the peer's daemon has ended");
                    self.end(sid, intf::VTL_CLOSED_TIMEOUT);
                }
            }
        }
    }

    // ------------------------------------------------------------------- opening and closing

    /// The grafts that a session may use, in order of preference, with those in the kernel that
    /// are not.
    fn usable(&self, services: Services) -> Vec<GraftInfo> {
        self.pool
            .iter()
            .filter(|p| !p.disabled && p.info.satisfies(services))
            .map(|p| p.info.clone())
            .collect()
    }

    /// Makes sure that a graft of the pool is in the kernel.
    fn launch(&mut self, gid: u16) -> Result<(), String> {
        if self.plane.grafts().any(|g| g.gid == gid) {
            return Ok(());
        }
        let image = self.pool.iter().find(|p| p.info.gid == gid && !p.disabled).map(|p| p.image);
        let image = image.ok_or_else(|| format!("the pool has no graft {gid}"))?;
        let start = now_ns();
        let info = self.plane.deploy(image).map_err(|e| e.to_string())?;
        let ms = (now_ns() - start) as f64 / 1e6;
        tracing::info!(graft = info.name, gid, instructions = info.instructions, ms, "deployed");
        Ok(())
    }

    /// Makes a session's entry and rings.
    fn create(
        &mut self,
        peer: IpAddr,
        local: IpAddr,
        port: u16,
        purpose: impl FnOnce(&vtl_bpf::rings::RingSet) -> Result<Use, String>,
    ) -> Result<(u32, u64), String> {
        let sid = self
            .plane
            .sessions()
            .free_after(self.last_sid)
            .ok_or("all sessions of this host are in use")?;
        self.last_sid = sid;
        let rings = self.stock.take().map_err(|e| e.to_string())?;
        let token = random_token();
        let purpose = match purpose(&rings) {
            Ok(purpose) => purpose,
            Err(error) => {
                self.stock.put(rings);
                return Err(error);
            }
        };
        if let Use::Aware(aware) = &purpose {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, Source::Kick { sid }.pack());
            self.epoll.add(&aware.kick, event).map_err(|e| e.to_string())?;
        }
        let entry = self.plane.sessions().get(sid).expect("it was found free");
        entry.initialise(session::entry(sid, token, &rings, local, peer));
        entry.set_state(intf::VTL_OPENING);
        let now = now_ns();
        let session = Session {
            peer,
            local,
            port,
            token,
            initiator: false,
            answered: None,
            phase: Phase::Ended,
            rings,
            purpose,
            lifeline: None,
            wake_ns: u64::MAX,
            heard: 0,
            heard_ns: now,
            used_ns: now,
        };
        self.sessions.insert(sid, session);
        Ok((sid, token))
    }

    /// Begins to open a session.
    fn open(
        &mut self,
        peer: IpAddr,
        port: u16,
        services: Services,
        purpose: impl FnOnce(&vtl_bpf::rings::RingSet) -> Result<Use, String>,
    ) -> Result<u32, String> {
        if self.stopping {
            return Err("the daemon is stopping".into());
        }
        if peer.is_loopback() || peer.is_unspecified() || peer.is_multicast() {
            return Err(format!("{peer} is not another host"));
        }
        let (local, mtu) =
            raw::route(peer).map_err(|e| format!("there is no route to {peer}: {e}"))?;
        let gids: Vec<u16> = self.usable(services).iter().map(|g| g.gid).collect();
        let gids = Gids::new(&gids[..gids.len().min(intf::VTL_NEGO_GRAFTS as usize)])
            .filter(|g| !g.is_empty())
            .ok_or("no graft of the pool provides the services asked for")?;
        let (sid, token) = self.create(peer, local, port, purpose)?;
        let offer = Offer {
            sid,
            ring_slots: self.config.ring_slots,
            max_payload: raw::max_payload(mtu, peer),
            port,
            services,
            gids,
            known_rtt: None,
        };
        let session = self.sessions.get_mut(&sid).expect("just made");
        session.initiator = true;
        session.phase = Phase::Opening(Initiator::new(offer, now_ns(), token));
        self.open_timer(sid, now_ns());
        Ok(sid)
    }

    /// Sends the NEGO when it is due.
    fn open_timer(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        let Phase::Opening(nego) = &mut session.phase else { return };
        let (local, peer) = (session.local, session.peer);
        match nego.poll(now) {
            Ok(Some(packet)) => self.send(&packet, local, peer),
            Ok(None) => {}
            Err(error) => self.failed(sid, &error.to_string()),
        }
    }

    fn send(&self, packet: &Packet<'_>, from: IpAddr, to: IpAddr) {
        let mut buffer = [0; 256];
        let Ok(length) = packet.emit(&mut buffer) else { return };
        let Some(raw) = &self.raw[usize::from(to.is_ipv6())] else { return };
        if let Err(error) = raw.send(&buffer[..length], from, to) {
            tracing::debug!(%error, %to, "a control packet cannot be sent");
        }
    }

    /// A session could not be opened.
    fn failed(&mut self, sid: u32, why: &str) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        tracing::info!(peer = %session.peer, why, "no session");
        let peer = session.peer;
        let mut flows = Vec::new();
        match &mut session.purpose {
            Use::Streams { waiting, .. } => flows = std::mem::take(waiting),
            Use::Aware(aware) => {
                if let Some(reply) = aware.reply.take() {
                    let _ = reply.send(Err(format!(
                        "no session with {peer}: {why} (does VTL run there? try: vtl doctor)"
                    )));
                }
            }
        }
        self.forget(sid);
        for flow in flows {
            self.plain(flow);
        }
    }

    fn control_packets(&mut self, v6: bool) {
        for _ in 0..64 {
            let Some(raw) = &self.raw[usize::from(v6)] else { return };
            match raw.receive() {
                Ok(Some(received)) => self.control_packet(&received),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(%error, "receiving a control packet");
                    return;
                }
            }
        }
    }

    fn control_packet(&mut self, received: &Received) {
        let packet = match Packet::parse(&received.bytes) {
            Ok(packet) => packet,
            Err(error) => {
                if let Some(nack) = nego::refuse_version(&received.bytes) {
                    self.send(&nack.answer(), received.to, received.from);
                }
                tracing::debug!(%error, from = %received.from, "a malformed control packet");
                return;
            }
        };
        match &packet {
            Packet::Nego(nego) => self.asked(nego, received),
            Packet::NegoAck(n) | Packet::NegoNack(n) => self.answered(n.header.sid, &packet, received),
            Packet::Close(header) => self.closed(*header, received),
            Packet::Data(_) | Packet::Ack(_) | Packet::Probe(_) => {}
        }
    }

    /// A peer wants to open a session.
    fn asked(&mut self, nego: &Nego, received: &Received) {
        let key = NegoKey::new(received.from, nego);
        let known = self
            .sessions
            .values()
            .find_map(|s| s.answered.as_ref().filter(|(k, _)| *k == key).map(|(_, p)| *p));
        if let Some(answer) = known {
            self.send(&answer, received.to, received.from);
            return;
        }
        let mut ports = vec![0];
        ports.extend(
            self.listeners.iter().filter(|(_, l)| l.backlog.len() < BACKLOG).map(|(port, _)| *port),
        );
        let mtu = raw::route(received.from).map_or(1500, |(_, mtu)| mtu);
        let grafts = self.usable(Services::NONE);
        let policy = Policy {
            grafts: &grafts,
            ports: &ports,
            room: !self.stopping,
            ring_slots: self.config.ring_slots,
            max_payload: raw::max_payload(mtu, received.from),
        };
        let choice = match nego::respond(nego, &policy) {
            Ok(choice) => choice,
            Err(nack) => {
                self.send(&nack.answer(), received.to, received.from);
                return;
            }
        };
        if let Err(error) = self.respond(key, &choice, received) {
            tracing::warn!(%error, peer = %received.from, "a session was not accepted");
        }
    }

    fn respond(
        &mut self,
        key: NegoKey,
        choice: &nego::Choice,
        received: &Received,
    ) -> Result<(), String> {
        self.launch(choice.session.gid)?;
        let port = choice.port;
        let owner = self.listeners.get(&port).map_or(0, |l| l.owner);
        let max_payload = choice.session.max_payload;
        let (sid, token) = self.create(received.from, received.to, port, |rings| {
            Ok(if port == 0 {
                Use::Streams { waiting: Vec::new(), streams: None }
            } else {
                Use::Aware(aware(owner, rings, max_payload, None)?)
            })
        })?;
        let answer = choice.answer(sid, token);
        self.sessions.get_mut(&sid).expect("just made").answered = Some((key, answer));
        self.establish(sid, &choice.session)?;
        self.send(&answer, received.to, received.from);
        if let Some(listener) = self.listeners.get_mut(&port) {
            listener.backlog.push_back(sid);
            self.grant_accepted();
        }
        Ok(())
    }

    /// The answer to our NEGO.
    fn answered(&mut self, sid: u32, packet: &Packet<'_>, received: &Received) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        if session.peer != received.from {
            return;
        }
        let Phase::Opening(nego) = &mut session.phase else { return };
        match nego.handle(now_ns(), packet) {
            Ok(None) => {}
            Ok(Some(established)) => {
                let done = self
                    .launch(established.gid)
                    .and_then(|()| self.establish(sid, &established));
                match done {
                    Ok(()) => self.opened(sid),
                    Err(error) => self.failed(sid, &error),
                }
            }
            Err(error) => self.failed(sid, &error.to_string()),
        }
    }

    /// Hands the session to the kernel's programs.
    fn establish(&mut self, sid: u32, established: &Established) -> Result<(), String> {
        let session = self.sessions.get_mut(&sid).ok_or("the session has gone")?;
        if let Use::Streams { streams, .. } = &mut session.purpose {
            let rings = &session.rings;
            let map = |e: std::io::Error| format!("mapping a ring: {e}");
            let tx = TxRing::map(rings.transmit(), rings.slots, established.max_payload).map_err(map)?;
            let rx = RxRing::map(rings.receive(), rings.slots).map_err(map)?;
            rx.prepare_wait();
            *streams = Some(Box::new(Streams::new(session.initiator, tx, rx)));
        }
        let entry = self.plane.sessions().get(sid).expect("it has an entry");
        entry.complete(|s| session::fill(s, established));
        entry.set_state(intf::VTL_OPEN);
        session.phase = Phase::Open;
        session.heard_ns = now_ns();
        session.wake_ns = 0;
        if matches!(session.purpose, Use::Streams { .. }) {
            let peer = session.peer;
            self.handle.peers.write().unwrap_or_else(PoisonError::into_inner).insert(peer);
        }
        Ok(())
    }

    /// A session that we opened is open.
    fn opened(&mut self, sid: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        tracing::info!(peer = %session.peer, sid, port = session.port, "session open");
        // The peer learns from our first packet where we live.
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.probe();
        }
        match &mut session.purpose {
            Use::Streams { .. } => self.start_waiting(sid),
            Use::Aware(aware) => {
                let reply = aware.reply.take();
                let granted = self.grant(sid);
                if let Some(reply) = reply {
                    let _ = reply.send(granted);
                }
            }
        }
    }

    fn grant(&self, sid: u32) -> Result<Granted, String> {
        let entry = self.plane.sessions().get(sid).ok_or("the session has gone")?.snapshot();
        let session = self.sessions.get(&sid).ok_or("the session has gone")?;
        let graft = self.plane.grafts().find(|g| g.gid == entry.gid);
        let graft = graft.map_or_else(String::new, |g| g.name.clone());
        session::grant(sid, session, &entry, graft)
            .ok_or_else(|| "out of file descriptors".to_owned())
    }

    fn connect(&mut self, owner: Owner, to: SocketAddr, services: Services, reply: Reply<Granted>) {
        if to.port() == 0 {
            let _ = reply.send(Err("port 0 is the Hooker's: name another one".into()));
            return;
        }
        let shared = reply.clone();
        let mtu = raw::route(to.ip()).map_or(1500, |(_, mtu)| mtu);
        let max_payload = raw::max_payload(mtu, to.ip());
        let opened = self.open(to.ip(), to.port(), services, |rings| {
            Ok(Use::Aware(aware(owner, rings, max_payload, Some(shared))?))
        });
        if let Err(error) = opened {
            let _ = reply.send(Err(error));
        }
    }

    /// Gives sessions that wait to applications that wait.
    fn grant_accepted(&mut self) {
        let mut ready = Vec::new();
        for listener in self.listeners.values_mut() {
            if listener.waiting.is_some()
                && let Some(sid) = listener.backlog.pop_front()
                && let Some(reply) = listener.waiting.take()
            {
                ready.push((sid, reply));
            }
        }
        for (sid, reply) in ready {
            let _ = reply.send(self.grant(sid));
        }
    }

    fn close_owned(&mut self, owner: Owner, aborted: bool) {
        let owned = |s: &Session| matches!(&s.purpose, Use::Aware(a) if a.owner == owner);
        let sids: Vec<u32> =
            self.sessions.iter().filter(|(_, s)| owned(s)).map(|(sid, _)| *sid).collect();
        for sid in sids {
            self.close(sid, aborted);
        }
    }

    /// Ends a session from our side.
    fn close(&mut self, sid: u32, aborted: bool) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        match session.phase {
            Phase::Open => {}
            Phase::Closing { .. } => return,
            Phase::Opening(_) | Phase::Ended => {
                self.forget(sid);
                return;
            }
        }
        session.phase = Phase::Closing { tries: 1, next_ns: now_ns() + CLOSE_NS };
        self.send_close(sid, aborted);
        if aborted {
            self.end(sid, intf::VTL_CLOSED_LOCAL);
        }
    }

    fn send_close(&mut self, sid: u32, aborted: bool) {
        let Some(session) = self.sessions.get(&sid) else { return };
        let Some(entry) = self.plane.sessions().get(sid) else { return };
        let entry = entry.snapshot();
        let header = Header {
            flags: if aborted { intf::VTL_F_ABORT as u8 } else { 0 },
            gid: 0,
            sid: entry.peer_sid,
            token: entry.peer_token,
        };
        self.send(&Packet::Close(header), session.local, session.peer);
    }

    /// The peer's CLOSE.
    fn closed(&mut self, header: Header, received: &Received) {
        let Some(session) = self.sessions.get(&header.sid) else { return };
        if session.token != header.token || session.peer != received.from {
            return;
        }
        let aborted = u32::from(header.flags) & intf::VTL_F_ABORT != 0;
        match session.phase {
            Phase::Closing { .. } => self.end(header.sid, intf::VTL_CLOSED_LOCAL),
            Phase::Open => {
                self.send_close(header.sid, false);
                // What arrived in order is still to be read.
                self.receive(header.sid);
                let why =
                    if aborted { intf::VTL_CLOSED_TIMEOUT } else { intf::VTL_CLOSED_BY_PEER };
                self.end(header.sid, why);
            }
            Phase::Opening(_) | Phase::Ended => {}
        }
    }

    /// The session is over: the programs let go of it, its users learn why. An aware application
    /// may still read what has arrived; its rings are freed when it leaves.
    fn end(&mut self, sid: u32, why: u32) {
        let Some(session) = self.sessions.get_mut(&sid) else { return };
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_state(intf::VTL_FREE);
        }
        let was_closing = matches!(session.phase, Phase::Closing { .. });
        session.phase = Phase::Ended;
        session.wake_ns = u64::MAX;
        session.lifeline = None;
        match &mut session.purpose {
            Use::Aware(aware) if !was_closing => {
                aware.tx.set_closed(why);
                aware.rx.set_closed(why);
                let _ = aware.wake.write(1);
            }
            Use::Aware(_) | Use::Streams { .. } => self.forget(sid),
        }
    }

    /// Removes a session and everything that belongs to it.
    fn forget(&mut self, sid: u32) {
        let Some(session) = self.sessions.remove(&sid) else { return };
        if let Some(entry) = self.plane.sessions().get(sid) {
            entry.set_state(intf::VTL_FREE);
        }
        for listener in self.listeners.values_mut() {
            listener.backlog.retain(|s| *s != sid);
        }
        if let Use::Streams { streams, .. } = session.purpose {
            let peer = session.peer;
            if self.stream_session(peer).is_none() {
                self.handle.peers.write().unwrap_or_else(PoisonError::into_inner).remove(&peer);
            }
            for held in streams.into_iter().flat_map(|s| s.into_held()) {
                held.fall_back();
            }
        }
        self.stock.put(session.rings);
    }

    // -------------------------------------------------------------------------------- reports

    fn deploy(&mut self, name: &str) -> Result<Value, String> {
        let start = now_ns();
        let pooled = self.pool.iter_mut().find(|p| p.info.name == name);
        let pooled = pooled
            .ok_or_else(|| format!("the pool has no graft \"{name}\": vtl graft list shows it"))?;
        let info = self.plane.deploy(pooled.image).map_err(|e| e.to_string())?;
        pooled.disabled = false;
        Ok(json!({
            "name": info.name,
            "gid": info.gid,
            "instructions": info.instructions,
            "ms": (now_ns() - start) as f64 / 1e6,
        }))
    }

    fn remove(&mut self, name: &str) -> Result<(), String> {
        let gid = self.plane.grafts().find(|g| g.name == name).map(|g| g.gid);
        let gid = gid.ok_or_else(|| format!("no graft \"{name}\" is deployed: vtl graft list"))?;
        let used = self
            .sessions
            .keys()
            .filter_map(|sid| self.plane.sessions().get(*sid))
            .filter(|e| e.state() == intf::VTL_OPEN && e.snapshot().gid == gid)
            .count();
        if used > 0 {
            return Err(format!("graft \"{name}\" carries {used} sessions: end them first"));
        }
        self.plane.remove(name).map_err(|e| e.to_string())?;
        for pooled in self.pool.iter_mut().filter(|p| p.info.gid == gid) {
            pooled.disabled = true;
        }
        Ok(())
    }

    fn grafts(&self) -> Value {
        let deployed: HashSet<u16> = self.plane.grafts().map(|g| g.gid).collect();
        let row = |name: &str, gid: u16, services: u16, size: usize, instructions: usize| {
            json!({
                "name": name,
                "gid": gid,
                "services": Services::from_bits(services).to_string(),
                "bytes": size,
                "instructions": instructions,
                "deployed": deployed.contains(&gid),
            })
        };
        let mut rows: Vec<Value> = self
            .plane
            .grafts()
            .map(|g| row(&g.name, g.gid, g.services, g.size, g.instructions))
            .collect();
        for p in self.pool.iter().filter(|p| !deployed.contains(&p.info.gid)) {
            rows.push(row(&p.info.name, p.info.gid, p.info.provides.bits(), p.image.len(), 0));
        }
        json!({ "grafts": rows })
    }

    fn status(&mut self) -> Value {
        let stats = self.plane.stats();
        let stat = |i: u32| stats.get(i as usize).copied().unwrap_or_default();
        let interfaces: Vec<Value> = self
            .interfaces
            .values()
            .map(|i| {
                let pump = self.pumps.get(&i.index);
                json!({
                    "name": i.name,
                    "mtu": i.mtu,
                    "driver": pump.map(|(p, _)| p.name()),
                    "why": pump.map(|(_, why)| why),
                })
            })
            .collect();
        let names: HashMap<u16, String> =
            self.plane.grafts().map(|g| (g.gid, g.name.clone())).collect();
        let mut sessions = Vec::new();
        for (sid, session) in &mut self.sessions {
            let Some(entry) = self.plane.sessions().get(*sid) else { continue };
            let s = entry.snapshot();
            let (tx, rx) = (&s.tx, &s.rx);
            let modes = ["startup", "drain", "probe-bw", "probe-rtt"];
            let mode = modes.get(tx.bbr.mode as usize);
            let mut row = json!({
                "sid": sid,
                "peer": session.peer,
                "port": session.port,
                "phase": match session.phase {
                    Phase::Opening(_) => "opening",
                    Phase::Open => "open",
                    Phase::Closing { .. } => "closing",
                    Phase::Ended => "ended",
                },
                "graft": names.get(&s.gid),
                "rtt_ms": f64::from(tx.srtt_us) / 1e3,
                "min_rtt_ms": f64::from(tx.bbr.min_rtt_us) / 1e3,
                "rate_mbit": tx.bbr.bw as f64 / 1024.0 * f64::from(s.max_payload) * 8.0 / 1e6,
                "loss_pct": f64::from(tx.bbr.loss_q16) / 655.36,
                "mode": mode,
                "cwnd": tx.cwnd,
                "sent": tx.sent,
                "retransmitted": tx.retransmitted,
                "delivered": tx.delivered,
                "lost": tx.lost_total,
                "reorder": tx.reorder,
                "timeouts": tx.timeouts,
                "unacknowledged": tx.next.saturating_sub(tx.una),
                "received": rx.received,
                "duplicates": rx.dups,
                "bad_checksum": rx.bad_csum,
                "beyond_window": rx.beyond,
            });
            if let Some(streams) = session.streams() {
                row["flows"] = streams.flows().into();
                row["bytes_sent"] = streams.bytes_sent.into();
                row["bytes_received"] = streams.bytes_received.into();
            }
            sessions.push(row);
        }
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "kernel": netdev::kernel_release(),
            "uptime_s": (now_ns() - self.started_ns) as f64 / 1e9,
            "interfaces": interfaces,
            "sessions": sessions,
            "listeners": self.listeners.keys().collect::<Vec<_>>(),
            "packets": {
                "received": stat(intf::VTL_ST_RX_PACKETS),
                "malformed": stat(intf::VTL_ST_RX_MALFORMED),
                "no_session": stat(intf::VTL_ST_RX_NO_SESSION),
                "no_graft": stat(intf::VTL_ST_RX_NO_GRAFT),
                "bad_checksum": stat(intf::VTL_ST_RX_BAD_CSUM),
                "duplicate": stat(intf::VTL_ST_RX_DUPLICATE),
                "beyond_window": stat(intf::VTL_ST_RX_BEYOND),
                "contended": stat(intf::VTL_ST_RX_CONTENDED),
                "control": stat(intf::VTL_ST_RX_CONTROL),
                "sent": stat(intf::VTL_ST_TX_PACKETS),
                "acknowledgements": stat(intf::VTL_ST_TX_ACKS),
                "failed": stat(intf::VTL_ST_TX_FAILED),
            },
        })
    }
}

/// The daemon's part of an aware application's session.
fn aware(
    owner: Owner,
    rings: &vtl_bpf::rings::RingSet,
    max_payload: u16,
    reply: Option<Reply<Granted>>,
) -> Result<Aware, String> {
    let event = || {
        EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
            .map(Arc::new)
            .map_err(|e| format!("an eventfd: {e}"))
    };
    let map = |e: std::io::Error| format!("mapping a ring: {e}");
    Ok(Aware {
        owner,
        reply,
        kick: event()?,
        wake: event()?,
        tx: TxRing::map(rings.transmit(), rings.slots, max_payload).map_err(map)?,
        rx: RxRing::map(rings.receive(), rings.slots).map_err(map)?,
    })
}

/// epoll_wait with a timeout in nanoseconds.
fn wait(epoll: &Epoll, events: &mut [EpollEvent], timeout_ns: u64) -> usize {
    let timeout = libc::timespec {
        tv_sec: (timeout_ns / 1_000_000_000) as libc::time_t,
        tv_nsec: (timeout_ns % 1_000_000_000) as libc::c_long,
    };
    // SAFETY: EpollEvent is a transparent epoll_event; the buffer's length is given; no mask.
    let n = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            epoll.0.as_raw_fd(),
            events.as_mut_ptr(),
            events.len() as libc::c_int,
            &raw const timeout,
            std::ptr::null::<libc::sigset_t>(),
            0_usize,
        )
    };
    usize::try_from(n).unwrap_or(0)
}
