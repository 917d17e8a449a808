//! The broker's thread: event loop, session set-up and teardown. Single concerns have objects of their own
//! beside this module; operations on several are here.

mod closing;
mod grafts;
mod initiating;
mod mtud;
mod opening;
mod packets;
mod parked;
mod report;
mod responding;
mod start;
mod switching;

use std::sync::{Arc, mpsc::Receiver};

use libbpf_rs::MapHandle;
use nix::sys::{
    epoll::{Epoll, EpollEvent},
    eventfd::EventFd,
};
use vtl_bpf::{load::Attachment, netdev::Interface, plane::DataPlane};
use vtl_proto::nego::{Encapsulation, Responder};

pub(super) use self::parked::Connect;
use self::parked::Parking;
use super::{
    Command, Config, MS,
    by_tcp::ByTcp,
    graft_pool::GraftPool,
    interfaces::Interfaces,
    launcher::Launcher,
    listeners::Listeners,
    now_ns,
    peers::Peers,
    random,
    ring_pool::RingPool,
    sessions::Sessions,
    shard::{News, Schedule, Shards},
    sockets::Sockets,
    source::Source,
    wait,
};
use crate::{
    hooker::{self, Pulse},
    identity::Identity,
    netmon::NetMonitor,
    panics::test_point,
};

/// Interval of the sessions' housekeeping.
const TICK_NS: u64 = 100 * MS;
/// Sessions per tick: a tick over very many would take milliseconds.
const TICK_SESSIONS: usize = 1024;

/// Eventfds that wake the broker.
struct Events {
    commands: Arc<EventFd>,
    /// News of shards.
    shards: Arc<EventFd>,
    /// See [`Source::Parked`].
    parked: Arc<EventFd>,
}

pub(super) struct ControlBroker {
    config: Config,
    identity: Arc<Identity>,
    inbox: Receiver<Command>,
    pulse: Arc<Pulse>,
    monitor: Arc<NetMonitor>,
    epoll: Arc<Epoll>,
    events: Events,
    shards: Shards,
    launcher: Launcher,
    rings: RingPool,
    interfaces: Interfaces,
    sockets: Sockets,
    by_tcp: ByTcp,
    parking: Parking,
    peers: Peers,
    responder: Responder,
    /// Timers of negotiations.
    negotiations: Schedule,
    /// The map `vtl_callers`.
    callers: MapHandle,
    pool: GraftPool,
    sessions: Sessions,
    listeners: Listeners,
    hooker: Option<hooker::Handle>,
    started_ns: u64,
    next_tick: u64,
    stopping: bool,
    // Last, so that it is dropped after everything above.
    plane: DataPlane,
}

impl ControlBroker {
    /// Has the launcher attach the root programs to new interfaces.
    fn find_interfaces(&mut self) {
        let attached = self.plane.attached().values();
        let known = attached.map(|Attachment { interface, .. }| (interface.index, interface.mtu));
        self.launcher.look(known.collect());
    }

    /// Follows MTUs: frames that shards have made for the former one would be too short for sessions opened from now on.
    fn resize_interfaces(&mut self, resized: &[(u32, u32)]) {
        for (index, mtu) in resized {
            self.plane.resize(*index, *mtu);
            self.shards.interface(*index, Some(*mtu));
        }
    }

    fn use_interfaces(&mut self, new: Vec<Attachment>, gone: &[u32]) {
        for attachment in new {
            self.use_interface(&attachment.interface);
            self.plane.adopt(attachment);
        }
        for index in gone {
            self.plane.detach(*index);
            self.shards.interface(*index, None);
            self.interfaces.forget(*index);
        }
        if self.launcher.take_changed() {
            self.find_interfaces();
        }
    }

    fn use_interface(&self, interface: &Interface) {
        let Interface { name, mtu, index } = interface;
        tracing::info!(interface = name, mtu, ingress = ?self.config.ingress, "interfaces: attached");
        self.shards.interface(*index, Some(*mtu));
    }

    pub(super) fn run(mut self) {
        let mut found = [EpollEvent::empty(); 64];
        while !(self.stopping && self.sessions.is_empty()) {
            self.pulse.note();
            test_point();
            let table = self.plane.sessions();
            self.by_tcp.pump(&mut self.sessions, table, &self.shards);
            let timeout = self.deadline().saturating_sub(now_ns());
            let count = wait(&self.epoll, &mut found, timeout);
            for event in &found[..count] {
                self.handle_event(Source::unpack(event.data()));
            }
            self.negotiate();
            if now_ns() >= self.next_tick {
                self.tick();
            }
        }
    }

    /// The session table.
    pub(super) fn sessions(&self) -> Arc<vtl_bpf::sessions::SessionTable> {
        Arc::clone(self.plane.sessions())
    }

    fn deadline(&self) -> u64 {
        // Closing sessions are served by the tick.
        let next = self.by_tcp.next().min(self.negotiations.next());
        next.min(self.next_tick)
    }

    /// Runs the negotiations' expired timers.
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
            Source::Commands => {
                let _ = self.events.commands.read();
                while let Ok(command) = self.inbox.try_recv() {
                    self.command(command);
                }
            }
            Source::Shards => {
                let _ = self.events.shards.read();
                self.shards_news();
            }
            Source::Parked => {
                let _ = self.events.parked.read();
                self.launcher_news();
                self.resume();
            }
            Source::Native { v6 } => self.control_packets(v6, Encapsulation::Native),
            Source::Udp { v6 } => self.control_packets(v6, Encapsulation::Udp),
            Source::Tunnels { v6 } => self.by_tcp.accept(v6, &self.config.from),
            Source::Tunnel { number } => self.tunnel_event(number),
            Source::Interfaces => {
                self.interfaces.take_changes();
                self.find_interfaces();
            }
        }
    }

    /// Handles news of the shards.
    fn shards_news(&mut self) {
        while let Some(news) = self.shards.news() {
            match news {
                News::Heard(sid) => {
                    if !self.is_heard(sid) {
                        // An event of the index's former session.
                        self.shards.report(sid);
                    }
                    if !self.is_heard(sid) {
                        continue; // the first packet's event follows that order
                    }
                    let session = self.sessions.get_mut(sid).filter(|s| !s.awaits_keys());
                    if let Some(answered) = session.and_then(|s| s.answered.take()) {
                        self.validated(sid, answered);
                    }
                }
                News::Forgotten(sid) => {
                    self.sessions.release(sid);
                }
                News::ByTcp(sid) if self.sessions.contains(sid) => self.by_tcp.due(sid),
                News::ByTcp(_) => {}
                News::Died => panic!("a shard has died"),
                News::Driver { ifindex, name, why } => {
                    self.interfaces.note_driver(ifindex, name, why);
                }
            }
        }
    }

    /// Whether a packet of the session has arrived from its peer.
    fn is_heard(&self, sid: u32) -> bool {
        let entry = self.plane.sessions().get(sid);
        entry.is_some_and(|entry| entry.ifindex() != 0)
    }

    fn tick(&mut self) {
        let now = now_ns();
        self.next_tick = now + TICK_NS;
        self.rings.tick(now);
        self.resume();
        self.sessions.sweep(now);
        self.responder.maintain(now, random);
        self.by_tcp.sweep(now);
        for sid in self.sessions.take_turn(TICK_SESSIONS) {
            self.tick_session(sid, now);
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Connect(request) => self.connect(request),
            Command::Follow { owner, from, reply } => {
                let _ = reply.send(self.follow(owner, from));
            }
            Command::Listen { owner, port, reply } => {
                let _ = reply.send(self.listeners.listen(owner, port));
            }
            Command::Accept { owner, key, reply } => {
                self.listeners.accept(owner, key, reply);
                self.grant_accepted();
            }
            Command::CloseSession { owner, aborted } => self.close_owned(owner, aborted),
            Command::GiveUp { owner, given_up } => self.give_up(owner, given_up),
            Command::Gone { owner } => {
                self.parking.gone(owner);
                for sid in self.listeners.gone(owner) {
                    self.close(sid, true);
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
                for sid in self.sessions.indexes_from(0).collect::<Vec<_>>() {
                    self.close(sid, true);
                }
            }
        }
    }
}
