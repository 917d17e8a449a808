//! The broker's thread: waits for events, opens and ends sessions, runs the pump.

mod carries;
mod closing;
mod initiating;
mod opening;
mod packets;
mod path;
mod pool;
mod pumping;
mod report;
mod responding;
mod tunnels;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    rc::Rc,
    sync::{Arc, mpsc::Receiver},
};

use anyhow::Context;
use libbpf_rs::{MapHandle, RingBuffer, RingBufferBuilder};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use vtl_bpf::{
    netdev::{self, Interface},
    plane::DataPlane,
    pump::{Choice, Pump},
    rings::RingMaker,
    tunnel::Tunnel,
};
use vtl_control::Destination;
use vtl_proto::{
    intf,
    nego::{Responder, Way},
};

pub(crate) use self::carries::wish;
use self::pool::Pooled;
pub(super) use self::pool::Wanted;
use super::{
    Command, Config, GRACE_NS, Granted, Handle, Owner, Reply,
    bells::Bells,
    doorbell::Doorbell,
    meter::Mark,
    now_ns,
    peers::Peers,
    random, random_token,
    raw::{Raw, Received},
    relay::Relay,
    schedule::Schedule,
    session::{Listener, Phase, Session, Wish},
    stock::Stock,
    tunnel::Tunnels,
};
use crate::hooker;

const MS: u64 = 1_000_000;
/// Housekeeping of sessions.
const TICK_NS: u64 = 100 * MS;
/// Of so many at a time.
const TICK_SESSIONS: usize = 1024;
/// An idle peer is asked after this long whether it is still there.
const KEEPALIVE_NS: u64 = 10_000 * MS;
/// A peer that has owed an answer for this long is gone.
const DEAD_NS: u64 = 15_000 * MS;
/// Peers that opened a session and have not shown yet that they got the answer are waited for so
/// long.
const UNVALIDATED_NS: u64 = 5_000 * MS;
/// CLOSE is sent this often, and this far apart.
const CLOSE_TRIES: u32 = 5;
const CLOSE_NS: u64 = 200 * MS;
/// How long the daemon naps, while it hands wake-ups on, when there is nothing else to do.
const NAP_NS: u64 = MS / 20;
/// With so many sessions, each needs a part of a short path only, and all together should not be
/// larger than they must be.
const CROWD: usize = 16;
/// From so many on, each begins with no more than its share of the memory for rings, so that all
/// that this host may have get some.
const MANY: usize = 256;
/// After how long without a new session rings are made in place of those that were taken.
const RESTOCK_NS: u64 = 1_000 * MS;
/// How long spare rings are kept after the last session was opened.
const SPARE_NS: u64 = 10_000 * MS;
/// A graft that did not load is not tried again for so long.
const BROKEN_NS: u64 = 60_000 * MS;
/// Peers' requests that may wait for rings; they repeat them.
const PARKED: usize = 64;
/// After so many events that the doorbell did not tell of, it is given up.
const UNHEARD: u32 = 8;
/// Connections that wait for an aware application's accept.
const BACKLOG: usize = 64;

/// What goes on when there are rings for it.
enum Parked {
    /// A peer's NEGO.
    Asked(Received),
    /// An aware application's.
    Connect {
        owner: Owner,
        to: Destination,
        wish: Wish,
        reply: Reply<Granted>,
    },
}

/// Where an epoll event comes from; packed into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Wake,
    Ring,
    Doorbell,
    Raw {
        v6: bool,
    },
    Udp {
        v6: bool,
    },
    Kick {
        sid: u32,
    },
    /// Peers that want to send packets by TCP.
    Listener {
        v6: bool,
    },
    Tunnel {
        number: u32,
    },
}

impl Source {
    fn pack(self) -> u64 {
        let (kind, high, low): (u64, u32, u32) = match self {
            Self::Wake => (0, 0, 0),
            Self::Ring => (1, 0, 0),
            Self::Raw { v6 } => (2, 0, v6.into()),
            Self::Kick { sid } => (3, sid, 0),
            Self::Doorbell => (4, 0, 0),
            Self::Udp { v6 } => (5, 0, v6.into()),
            Self::Listener { v6 } => (6, 0, v6.into()),
            Self::Tunnel { number } => (7, 0, number),
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
            4 => Self::Doorbell,
            5 => Self::Udp { v6: low != 0 },
            6 => Self::Listener { v6: low != 0 },
            _ => Self::Tunnel { number: low },
        }
    }
}

pub(super) struct Engine {
    config: Config,
    handle: Handle,
    inbox: Receiver<Command>,
    epoll: Epoll,
    events: Rc<RefCell<Vec<(u32, u32)>>>,
    /// Empty: memory for those that are looked at.
    reported: Vec<(u32, u32)>,
    ring: RingBuffer<'static>,
    /// What ingress wakes us by; else by the ring.
    doorbell: Option<Doorbell>,
    /// Sockets for control packets, over IPv4 and IPv6.
    raw: [Option<Raw>; 2],
    udp: [Option<Raw>; 2],
    /// Connections with other daemons, what makes and takes packets for them, and memory for those
    /// that have come.
    tunnels: Tunnels,
    tunnel: Tunnel,
    tunnelled: Vec<u8>,
    interfaces: BTreeMap<u32, Interface>,
    pumps: HashMap<u32, (Pump, String)>,
    stock: Stock,
    /// In the order in which they came.
    parked: VecDeque<Parked>,
    peers: Peers,
    responder: Responder,
    /// Indexes of sessions that ended a moment ago, and when.
    freed: HashMap<u32, u64>,
    bells: Bells,
    /// The map `vtl_callers`.
    callers: MapHandle,
    /// All versions of all grafts that this host may use.
    library: vtl_pool::Pool,
    pool: Vec<Pooled>,
    sessions: BTreeMap<u32, Session>,
    /// Those of aware applications, by owner.
    owned: BTreeSet<(Owner, u32)>,
    schedule: Schedule,
    /// When which negotiation goes on.
    negotiations: Schedule,
    relay: Relay,
    listeners: BTreeMap<u16, Listener>,
    last_sid: u32,
    last_opened_ns: u64,
    hooker: Option<hooker::Handle>,
    started_ns: u64,
    next_tick: u64,
    /// The session that the next tick begins with.
    next_ticked: u32,
    stopping: bool,
    /// Events that the doorbell has not told of, one after the other.
    unheard: u32,
    // Last: everything above is gone before the kernel's side goes.
    plane: DataPlane,
}

impl Engine {
    pub(super) fn new(
        config: Config,
        handle: Handle,
        inbox: Receiver<Command>,
    ) -> anyhow::Result<Self> {
        let udp = udp_sockets();
        let plane = DataPlane::load_for(config.max_sessions as u32, udp[0].is_some())?;
        let places = plane.sessions().places();
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
                let word = |b: &[u8]| {
                    b.get(..4)
                        .and_then(|b| b.try_into().ok())
                        .map(u32::from_ne_bytes)
                };
                if let (Some(sid), Some(what)) = (word(sid), word(what)) {
                    sink.borrow_mut().push((sid, what));
                }
            }
            0
        })?;
        let ring = builder.build().context("the ring of events")?;
        // SAFETY: the ring buffer keeps its descriptor open as long as it lives, and it lives as
        // long as the epoll instance that watches it.
        let fd = unsafe { BorrowedFd::borrow_raw(ring.epoll_fd()) };
        watch(fd, Source::Ring)?;

        let doorbell = Doorbell::open()
            .inspect_err(|error| tracing::info!(%error, "no doorbell"))
            .ok();
        if let Some(doorbell) = &doorbell {
            let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
            epoll.add(doorbell, EpollEvent::new(edges, Source::Doorbell.pack()))?;
        }
        plane.pump_order().set_bell(doorbell.is_some());

        let raw4 = Raw::open(false, Way::Native).context("a raw socket for IP protocol 253")?;
        watch(raw4.as_fd(), Source::Raw { v6: false })?;
        // A host may have no IPv6.
        let raw6 = Raw::open(true, Way::Native).ok();
        if let Some(raw6) = &raw6 {
            watch(raw6.as_fd(), Source::Raw { v6: true })?;
        }
        for (socket, v6) in udp.iter().zip([false, true]) {
            if let Some(socket) = socket {
                watch(socket.as_fd(), Source::Udp { v6 })?;
            }
        }

        let tunnels = Tunnels::open();
        for (listener, v6) in tunnels.listeners().into_iter().zip([false, true]) {
            if let Some(listener) = listener {
                // Where no descriptors are left, the next connection is soon enough.
                let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
                epoll.add(
                    listener,
                    EpollEvent::new(edges, Source::Listener { v6 }.pack()),
                )?;
            }
        }

        let maker = RingMaker::new(&plane)?;
        let wake = Arc::clone(&handle.wake);
        let stock = Stock::start(
            maker,
            config.ring_slots,
            config.stock,
            config.ring_memory,
            config.max_sessions,
            move || {
                let _ = wake.write(1);
            },
        );
        let mut engine = Self {
            config,
            handle,
            inbox,
            epoll,
            events,
            reported: Vec::new(),
            ring,
            doorbell,
            raw: [Some(raw4), raw6],
            udp,
            tunnels,
            tunnel: Tunnel::open(&plane)?,
            tunnelled: Vec::new(),
            interfaces: BTreeMap::new(),
            pumps: HashMap::new(),
            stock,
            parked: VecDeque::new(),
            peers: Peers::default(),
            responder: Responder::new(now_ns(), random()),
            freed: HashMap::new(),
            bells: Bells::new(places),
            callers: plane.map_handle("vtl_callers")?,
            library: pool::built_in()?,
            pool: Vec::new(),
            sessions: BTreeMap::new(),
            schedule: Schedule::new(places),
            negotiations: Schedule::new(places),
            owned: BTreeSet::new(),
            next_ticked: 0,
            relay: Relay::default(),
            listeners: BTreeMap::new(),
            last_sid: 0,
            last_opened_ns: 0,
            hooker: None,
            started_ns: now_ns(),
            next_tick: 0,
            stopping: false,
            unheard: 0,
            plane,
        };
        engine.find_interfaces()?;
        if let Err(error) = engine.plane.attach_direct() {
            tracing::info!(%error, "applications cannot run their own egress");
        }
        engine.read_pool().map_err(anyhow::Error::msg)?;
        for (path, why) in engine.library.refused() {
            tracing::warn!(package = %path.display(), %why, "not taken into the pool");
        }
        // Ahead of the first session, which would wait for the verifier: what the Hooker uses, and
        // most applications. The others are loaded when they are first asked for.
        if let Some(gid) = engine.pool.first().map(|p| p.info.gid) {
            engine.launch(gid).map_err(anyhow::Error::msg)?;
        }
        if engine.config.driver != Choice::Tc
            && let Err(error) = engine.plane.prepare_live()
        {
            tracing::info!(%error, "no live frames");
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
        let order = Arc::clone(self.plane.pump_order());
        while !(self.stopping && self.sessions.is_empty()) {
            self.pump();
            let now = now_ns();
            if let Some(relay) = self.relay.decide(now) {
                order.set_relay(relay);
            }
            let mut timeout = self.deadline().saturating_sub(now);
            if self.relay.active() {
                timeout = timeout.min(NAP_NS);
            } else if timeout > 0 {
                order.set_awake(false);
                let _ = self.ring.consume();
                if !self.events.borrow().is_empty() {
                    timeout = 0;
                }
            }
            let asleep = timeout > 0 && !self.relay.active();
            let count = wait(&self.epoll, &mut found, timeout);
            order.set_awake(true);
            if count == 0 && asleep && self.is_unheard() {
                tracing::info!("the doorbell is not heard: is the loopback up?");
                order.set_bell(false);
            }
            for event in &found[..count] {
                self.handle_event(Source::unpack(event.data()));
            }
            self.notifications();
            self.negotiate();
            if now_ns() >= self.next_tick {
                self.tick();
            }
        }
    }

    /// The table of sessions.
    pub(super) fn sessions(&self) -> Arc<vtl_bpf::sessions::SessionTable> {
        Arc::clone(self.plane.sessions())
    }

    fn deadline(&self) -> u64 {
        // For those that are closing the next tick is soon enough.
        let next = self.schedule.next().min(self.negotiations.next());
        next.min(self.next_tick)
    }

    /// Goes on with negotiations whose time has come.
    fn negotiate(&mut self) {
        let now = now_ns();
        self.negotiations.expire(now);
        while let Some(sid) = self.negotiations.pop() {
            self.open_timer(sid, now);
            self.confirm_timer(sid, now);
        }
    }

    /// Nothing has woken us. Whether the doorbell should have so often, one time after the other, that it is to
    /// be left alone from now on.
    fn is_unheard(&mut self) -> bool {
        let _ = self.ring.consume();
        // Only packets ring: other news may have come just now.
        let rings = |(_, what): &(u32, u32)| *what == intf::VTL_EV_RECV;
        let missed = self.events.borrow().iter().any(rings);
        self.unheard += u32::from(missed);
        missed && self.unheard == UNHEARD
    }

    fn handle_event(&mut self, source: Source) {
        match source {
            Source::Wake => {
                let _ = self.handle.wake.read();
                while let Ok(command) = self.inbox.try_recv() {
                    self.command(command);
                }
                self.resume();
            }
            Source::Ring => {}
            Source::Doorbell => {
                self.unheard = 0;
                self.doorbell.iter_mut().for_each(Doorbell::hear);
            }
            Source::Raw { v6 } => self.control_packets(v6, Way::Native),
            Source::Udp { v6 } => self.control_packets(v6, Way::Udp),
            Source::Kick { sid } => self.kick(sid),
            Source::Listener { v6 } => self.accept_tunnels(v6),
            Source::Tunnel { number } => self.tunnel_event(number),
        }
    }

    /// What the kernel's programs reported.
    fn notifications(&mut self) {
        let _ = self.ring.consume();
        let mut events = std::mem::take(&mut self.reported);
        events.append(&mut self.events.borrow_mut());
        for (sid, what) in events.drain(..) {
            if what & intf::VTL_EV_SEND != 0
                && let Some(session) = self.sessions.get_mut(&sid)
            {
                self.schedule.now(sid);
                if let Some(answered) = session.answered.take() {
                    self.validated(sid, answered);
                }
            }
            if what & (intf::VTL_EV_RECV | intf::VTL_EV_ROOM) != 0 {
                self.hand_on(sid);
            }
        }
        self.reported = events;
        self.bells.flush();
    }

    /// Wakes an aware application if the programs left that to us.
    fn hand_on(&mut self, sid: u32) {
        let told = self
            .plane
            .sessions()
            .get(sid)
            .is_some_and(|e| e.take_told());
        if let Some(session) = self.sessions.get(&sid).filter(|_| told) {
            self.bells.ring(&session.aware.wake);
            self.relay.note(sid);
        }
    }

    fn tick(&mut self) {
        let now = now_ns();
        self.next_tick = now + TICK_NS;
        let _ = self.find_interfaces();
        let quiet = now.saturating_sub(self.last_opened_ns);
        if quiet > RESTOCK_NS {
            self.stock.replenish(now);
        }
        if quiet > SPARE_NS {
            self.stock.trim();
        }
        self.resume();
        self.freed
            .retain(|_, at| now.saturating_sub(*at) < GRACE_NS);
        self.responder.maintain(now, random);
        self.tunnels.sweep(now);
        // All of them would take milliseconds if they were many.
        let turn = self.sessions.range(self.next_ticked..);
        let turn: Vec<u32> = turn.take(TICK_SESSIONS).map(|(sid, _)| *sid).collect();
        self.next_ticked = match turn.last() {
            Some(last) if turn.len() == TICK_SESSIONS => last + 1,
            _ => 0,
        };
        for sid in turn {
            self.tick_session(sid, now);
        }
    }

    fn tick_session(&mut self, sid: u32, now: u64) {
        let Some(session) = self.sessions.get_mut(&sid) else {
            return;
        };
        let Some(entry) = self.plane.sessions().get(sid) else {
            return;
        };
        match &mut session.phase {
            Phase::Closing { tries, next_ns } if *next_ns <= now => {
                *tries += 1;
                *next_ns = now + CLOSE_NS;
                if *tries > CLOSE_TRIES {
                    self.end(sid, intf::VTL_CLOSED_LOCAL);
                } else {
                    self.send_close(sid, false);
                }
            }
            Phase::Opening(_) | Phase::Closing { .. } | Phase::Ended => {}
            Phase::Open => {
                if session.confirming.is_some() {
                    self.confirm_timer(sid, now);
                    return;
                }
                if session.answered.is_some()
                    && entry.ifindex() == 0
                    && now.saturating_sub(session.heard_ns) > UNVALIDATED_NS
                {
                    self.forget(sid);
                    return;
                }
                if session.detour.is_none() && session.way != entry.way() {
                    self.turn(sid);
                    self.go_on(sid);
                    return;
                }
                session.meter.note(Mark::new(now, &entry.meter()));
                let heard = entry.heard();
                if heard != session.heard {
                    session.heard = heard;
                    session.heard_ns = now;
                    session.asked = 0;
                    if let Some(rtt) = entry.measured_rtt() {
                        self.peers.note_shorter_rtt(session.peer, rtt);
                    }
                }
                let silent = now.saturating_sub(session.heard_ns);
                let asked = entry.timeouts().max(session.asked);
                if silent > DEAD_NS && asked >= 3 {
                    tracing::info!(peer = %session.peer, sid, "the peer does not answer any more");
                    self.end(sid, intf::VTL_CLOSED_TIMEOUT);
                    return;
                }
                let again = entry.timeouts() == 0;
                if silent > KEEPALIVE_NS && entry.unacknowledged() == 0 && again {
                    session.asked += 1;
                    entry.probe();
                    self.schedule.now(sid);
                }
                if session.detour.is_some() {
                    self.look_back(sid, now);
                } else {
                    self.watch_path(sid, now);
                }
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Connect {
                owner,
                to,
                wish,
                reply,
            } => {
                self.connect(owner, to, wish, reply);
            }
            Command::Follow { owner, from, reply } => {
                let _ = reply.send(self.follow(owner, from));
            }
            Command::Listen { owner, port, reply } => {
                let answer = match self.listeners.entry(port) {
                    _ if port == 0 => Err("there is no port 0".into()),
                    std::collections::btree_map::Entry::Occupied(_) => Err(format!(
                        "VTL port {port} is taken by another receiver: choose another one"
                    )),
                    std::collections::btree_map::Entry::Vacant(free) => {
                        let key = random_token();
                        free.insert(Listener {
                            owner,
                            key,
                            backlog: Default::default(),
                            waiting: Default::default(),
                        });
                        Ok(key)
                    }
                };
                let _ = reply.send(answer);
            }
            Command::Accept { owner, key, reply } => {
                let found = self
                    .listeners
                    .values_mut()
                    .find(|l| key.map_or(l.owner == owner, |key| l.key == key));
                let Some(listener) = found else {
                    let _ = reply.send(Err("accept without listen".into()));
                    return;
                };
                listener.waiting.push_back((owner, reply));
                self.grant_accepted();
            }
            Command::CloseSession { owner, aborted } => self.close_owned(owner, aborted),
            Command::Gone { owner } => {
                self.parked
                    .retain(|p| !matches!(p, Parked::Connect { owner: o, .. } if *o == owner));
                let gone = self.listeners.extract_if(.., |_, l| l.owner == owner);
                for (_, listener) in gone.collect::<Vec<_>>() {
                    for (_, reply) in listener.waiting {
                        let _ = reply.send(Err("the listener has gone".into()));
                    }
                    for sid in listener.backlog {
                        self.close(sid, true);
                    }
                }
                for listener in self.listeners.values_mut() {
                    listener.waiting.retain(|(waiting, _)| *waiting != owner);
                }
                self.close_owned(owner, true);
            }
            Command::Status { from, reply } => {
                let _ = reply.send(Ok(self.status(from)));
            }
            Command::Statistics { owner, reply } => {
                let _ = reply.send(self.statistics(owner));
            }
            Command::Grafts { reply } => {
                let _ = reply.send(Ok(self.grafts()));
            }
            Command::Deploy {
                wanted,
                swap,
                reply,
            } => {
                let _ = reply.send(self.deploy(&wanted, swap));
            }
            Command::Describe { name, reply } => {
                let _ = reply.send(self.describe(&name));
            }
            Command::Remove { name, reply } => {
                let _ = reply.send(self.remove(&name));
            }
            Command::Carries { over, reply } => {
                let _ = reply.send(self.carries(&over));
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
}

/// Sockets of VTL's UDP port, over IPv4 and IPv6: none if another program has it.
fn udp_sockets() -> [Option<Raw>; 2] {
    match Raw::open(false, Way::Udp) {
        // A host may have no IPv6.
        Ok(v4) => [Some(v4), Raw::open(true, Way::Udp).ok()],
        Err(error) => {
            let port = intf::VTL_UDP_PORT;
            tracing::warn!(%error, port, "no packets by UDP");
            [None, None]
        }
    }
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
