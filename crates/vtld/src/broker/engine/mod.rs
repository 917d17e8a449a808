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
mod start;
mod tunnels;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    os::fd::AsRawFd,
    rc::Rc,
    sync::{Arc, mpsc::Receiver},
};

use libbpf_rs::{MapHandle, RingBuffer};
use nix::sys::epoll::{Epoll, EpollEvent};
use vtl_bpf::{
    load::Attachment,
    netdev::{Changes, Interface},
    plane::{DataPlane, Ingress},
    pump::Pump,
    tunnel::Tunnel,
};
use vtl_control::Destination;
use vtl_proto::{
    intf,
    nego::{Responder, Way},
};

pub(crate) use self::carries::wish;
use self::pool::Pooled;
use super::{
    Command, Config, GRACE_NS, Granted, Handle, Owner, Reply,
    bells::Bells,
    doorbell::Doorbell,
    launcher::Launcher,
    now_ns,
    peers::Peers,
    random, random_token,
    raw::{Raw, Received},
    relay::Relay,
    schedule::Schedule,
    session::{Listener, Session, Wish},
    stock::Stock,
    tunnel::Tunnels,
};
use crate::hooker;

const MS: u64 = 1_000_000;
/// Housekeeping of sessions.
const TICK_NS: u64 = 100 * MS;
/// Of so many at a time.
const TICK_SESSIONS: usize = 1024;
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

/// What goes on when there are rings for it, and the graft is in the kernel.
enum Parked {
    /// A peer's NEGO.
    Asked(Received),
    /// A peer's answer.
    Answered(Received),
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
    /// Interfaces have changed.
    Changes,
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
            Self::Changes => (8, 0, 0),
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
            7 => Self::Tunnel { number: low },
            _ => Self::Changes,
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
    changes: Changes,
    pumps: HashMap<u32, (Pump, String)>,
    stock: Stock,
    launcher: Launcher,
    /// In the order in which they came.
    parked: VecDeque<Parked>,
    peers: Peers,
    responder: Responder,
    /// Indexes of sessions that ended a moment ago, and when.
    freed: HashMap<u32, u64>,
    bells: Bells,
    /// The map `vtl_callers`.
    callers: MapHandle,
    /// All versions of all grafts that this host may use, as last read.
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
    /// Has the root programs attached to interfaces that are new.
    fn find_interfaces(&mut self) {
        let known = self.plane.attached().keys().copied().collect();
        self.launcher.look(known);
    }

    fn use_interfaces(&mut self, new: Vec<Attachment>, gone: &[u32]) {
        for attachment in new {
            log_attached(&attachment.interface, self.config.ingress);
            self.plane.adopt(attachment);
        }
        for index in gone {
            self.plane.detach(*index);
            self.pumps.remove(index);
        }
        if self.launcher.take_changed() {
            self.find_interfaces();
        }
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
                self.launcher_news();
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
            Source::Changes => {
                self.changes.take();
                self.find_interfaces();
            }
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
            Command::Ask(question) => self.launcher.read(question),
            Command::Deploy {
                wanted,
                swap,
                reply,
            } => self.launcher.deploy(wanted, swap, reply),
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
}

fn log_attached(interface: &Interface, ingress: Ingress) {
    let (interface, mtu) = (&interface.name, interface.mtu);
    tracing::info!(interface, mtu, ?ingress, "attached");
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
