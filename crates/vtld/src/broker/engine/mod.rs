//! The broker's thread: waits for events, opens and ends sessions, sends what goes by TCP.

mod carries;
mod closing;
mod initiating;
mod opening;
mod packets;
mod path;
mod pool;
mod report;
mod responding;
mod start;
mod tunnels;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{Arc, mpsc::Receiver},
};

use libbpf_rs::MapHandle;
use nix::sys::epoll::{Epoll, EpollEvent};
use vtl_bpf::{
    load::Attachment,
    netdev::{Changes, Interface},
    plane::DataPlane,
    tunnel::Tunnel,
};
use vtl_control::Destination;
use vtl_proto::nego::{Responder, Way};

pub(crate) use self::carries::wish;
use self::pool::Pooled;
use super::{
    Command, Config, GRACE_NS, Granted, Handle, MS, Owner, Reply,
    launcher::Launcher,
    now_ns,
    peers::Peers,
    random, random_token,
    raw::{Raw, Received},
    session::{Listener, Session, Wish},
    shard::{News, Schedule, Shards},
    stock::Stock,
    tunnel::Tunnels,
    wait,
};
use crate::hooker;

/// Housekeeping of sessions.
const TICK_NS: u64 = 100 * MS;
/// Of so many at a time.
const TICK_SESSIONS: usize = 1024;
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
    Raw {
        v6: bool,
    },
    Udp {
        v6: bool,
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
        let (kind, which): (u64, u32) = match self {
            Self::Wake => (0, 0),
            Self::Raw { v6 } => (1, v6.into()),
            Self::Udp { v6 } => (2, v6.into()),
            Self::Listener { v6 } => (3, v6.into()),
            Self::Tunnel { number } => (4, number),
            Self::Changes => (5, 0),
        };
        kind << 32 | u64::from(which)
    }

    fn unpack(data: u64) -> Self {
        let (v6, number) = (data as u32 != 0, data as u32);
        match data >> 32 {
            0 => Self::Wake,
            1 => Self::Raw { v6 },
            2 => Self::Udp { v6 },
            3 => Self::Listener { v6 },
            4 => Self::Tunnel { number },
            _ => Self::Changes,
        }
    }
}

pub(super) struct Engine {
    config: Config,
    handle: Handle,
    inbox: Receiver<Command>,
    epoll: Epoll,
    shards: Shards,
    /// By which driver packets leave interfaces, and why.
    drivers: HashMap<u32, (&'static str, String)>,
    /// Sockets for control packets, over IPv4 and IPv6.
    raw: [Option<Raw>; 2],
    udp: [Option<Raw>; 2],
    /// Connections with other daemons, what makes and takes packets for them, and memory for those
    /// that have come.
    tunnels: Tunnels,
    tunnel: Tunnel,
    tunnelled: Vec<u8>,
    changes: Changes,
    stock: Stock,
    launcher: Launcher,
    /// In the order in which they came.
    parked: VecDeque<Parked>,
    peers: Peers,
    responder: Responder,
    /// Indexes of sessions that ended a moment ago, and when their shards let go of them.
    freed: HashMap<u32, u64>,
    /// The map `vtl_callers`.
    callers: MapHandle,
    /// All versions of all grafts that this host may use, as last read.
    library: vtl_pool::Pool,
    pool: Vec<Pooled>,
    sessions: BTreeMap<u32, Session>,
    /// Those of aware applications, by owner.
    owned: BTreeSet<(Owner, u32)>,
    /// When egress of those sessions runs whose packets go by TCP.
    by_tcp: Schedule,
    /// When which negotiation goes on.
    negotiations: Schedule,
    listeners: BTreeMap<u16, Listener>,
    last_sid: u32,
    last_opened_ns: u64,
    hooker: Option<hooker::Handle>,
    started_ns: u64,
    next_tick: u64,
    /// The session that the next tick begins with.
    next_ticked: u32,
    stopping: bool,
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
            self.use_interface(&attachment.interface);
            self.plane.adopt(attachment);
        }
        for index in gone {
            self.plane.detach(*index);
            self.shards.interface(*index, None);
            self.drivers.remove(index);
        }
        if self.launcher.take_changed() {
            self.find_interfaces();
        }
    }

    fn use_interface(&self, interface: &Interface) {
        let Interface { name, mtu, index } = interface;
        tracing::info!(interface = name, mtu, ingress = ?self.config.ingress, "attached");
        self.shards.interface(*index, Some(*mtu));
    }

    pub(super) fn run(mut self) {
        let mut found = [EpollEvent::empty(); 64];
        while !(self.stopping && self.sessions.is_empty()) {
            self.pump_by_tcp();
            let timeout = self.deadline().saturating_sub(now_ns());
            let count = wait(&self.epoll, &mut found, timeout);
            for event in &found[..count] {
                self.handle_event(Source::unpack(event.data()));
            }
            self.shards_news();
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
        let next = self.by_tcp.next().min(self.negotiations.next());
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
            Source::Raw { v6 } => self.control_packets(v6, Way::Native),
            Source::Udp { v6 } => self.control_packets(v6, Way::Udp),
            Source::Listener { v6 } => self.accept_tunnels(v6),
            Source::Tunnel { number } => self.tunnel_event(number),
            Source::Changes => {
                self.changes.take();
                self.find_interfaces();
            }
        }
    }

    /// What the shards have to tell.
    fn shards_news(&mut self) {
        while let Some(news) = self.shards.news() {
            match news {
                News::Heard(sid) => {
                    let entry = self.plane.sessions().get(sid);
                    if entry.is_none_or(|e| e.ifindex() == 0) {
                        // An event of who had the index before.
                        self.shards.report(sid);
                        continue;
                    }
                    let session = self.sessions.get_mut(&sid);
                    if let Some(answered) = session.and_then(|s| s.answered.take()) {
                        self.validated(sid, answered);
                    }
                }
                News::Forgotten(sid) => {
                    self.freed.insert(sid, now_ns());
                }
                News::ByTcp(sid) if self.sessions.contains_key(&sid) => self.by_tcp.now(sid),
                News::ByTcp(_) => {}
                News::Died => panic!("a shard has died"),
                News::Driver { ifindex, name, why } => {
                    self.drivers.insert(ifindex, (name, why));
                }
            }
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
