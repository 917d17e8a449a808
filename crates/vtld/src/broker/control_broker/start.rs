//! Start of the broker: the data plane, interfaces and pool, and its event sources.

use std::{
    os::fd::AsFd,
    sync::{Arc, mpsc::Receiver},
};

use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
    eventfd::EventFd,
};
use vtl_bpf::{
    fence::{Fence, Port},
    netdev,
    plane::{DataPlane, Ingress},
    pump::Choice,
    rings::RingMaker,
};
use vtl_pool::Pool;
use vtl_proto::nego::{Encapsulation, Responder};

use super::{
    super::{
        Command, Config,
        by_tcp::ByTcp,
        event,
        graft_pool::{self, GraftPool},
        interfaces::Interfaces,
        launcher::{Launcher, Workshop},
        listeners::Listeners,
        now_ns,
        peers::Peers,
        random,
        ring_pool::RingPool,
        sessions::Sessions,
        shard::{Schedule, Shards},
        sockets::Sockets,
        source::Source,
    },
    ControlBroker, Events,
    parked::Parking,
};
use crate::{Scope, hooker::Pulse, identity::Identity, netmon::NetMonitor};

impl ControlBroker {
    pub(in super::super) fn new(
        config: Config,
        identity: Arc<Identity>,
        commands: Arc<EventFd>,
        inbox: Receiver<Command>,
        pulse: Arc<Pulse>,
        monitor: Arc<NetMonitor>,
    ) -> anyhow::Result<Self> {
        let mut sockets = Sockets::by_udp();
        let sessions = config.max_sessions as u32;
        let by_udp = sockets.has(false, Encapsulation::Udp);
        let has_xdp = config.ingress == Ingress::Xdp;
        let mut plane = DataPlane::load_for(sessions, config.shards, by_udp, has_xdp)?;
        let places = plane.sessions().places();
        let events = Events {
            commands,
            shards: Arc::new(event()?),
            parked: Arc::new(event()?),
        };
        anchor(&plane, &config);
        let shards = Shards::start(&plane, config.driver, waker(&events.shards))?;
        // After the root programs, which keep DATA from these sockets.
        sockets.open_native()?;
        let mut fence = fence(&config.scope, &sockets)?;
        let rings = ring_pool(&plane, &config, &events.parked)?;
        let interfaces = Interfaces::watch()?;
        // The first look at interfaces and pool: errors end the daemon.
        for interface in netdev::interfaces()? {
            if config.scope.has(&interface.name) {
                plane.attach(&interface, config.ingress)?;
            }
        }
        for name in config.scope.absent() {
            tracing::warn!(
                interface = name,
                "interfaces: --interface names one that does not exist (yet)"
            );
        }
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        let by_tcp = ByTcp::open(&plane, Arc::clone(&epoll))?;
        if let Some(fence) = &mut fence
            && by_tcp.is_listening()
        {
            fence.close_port(Port::Tcp)?;
        }
        if let Err(error) = plane.attach_direct() {
            tracing::info!(%error, "egress: no direct egress for applications: all packets go by the pump");
        }
        let (launcher, host_pool) = launcher(&plane, &config, fence, &events.parked)?;
        let mut broker = Self {
            config,
            identity,
            inbox,
            pulse,
            monitor,
            events,
            shards,
            launcher,
            rings,
            interfaces,
            sockets,
            by_tcp,
            epoll,
            parking: Parking::default(),
            peers: Peers::default(),
            responder: Responder::new(now_ns(), random()),
            negotiations: Schedule::new(places),
            callers: plane.map_handle("vtl_callers")?,
            pool: GraftPool::default(),
            sessions: Sessions::new(Arc::clone(plane.sessions())),
            listeners: Listeners::default(),
            hooker: None,
            started_ns: now_ns(),
            next_tick: 0,
            stopping: false,
            plane,
        };
        broker.watch()?;
        for attached in broker.plane.attached().values() {
            broker.use_interface(&attached.interface);
        }
        broker.use_host_pool(host_pool);
        // Deploy the highest-ranked graft, which the Hooker and most applications use, before the first
        // session, which would wait for the verifier. The others are deployed on demand.
        if let Some(best) = broker.pool.iter().next() {
            broker.plane.deploy(&best.image)?;
        }
        Ok(broker)
    }

    /// Registers the permanent event sources with epoll.
    fn watch(&self) -> nix::Result<()> {
        let mut watched = vec![
            (self.events.commands.as_fd(), Source::Commands),
            (self.events.shards.as_fd(), Source::Shards),
            (self.events.parked.as_fd(), Source::Parked),
            (self.interfaces.descriptor(), Source::Interfaces),
        ];
        watched.extend(
            self.sockets
                .all()
                .map(|(fd, v6, encapsulation)| match encapsulation {
                    Encapsulation::Udp => (fd, Source::Udp { v6 }),
                    _ => (fd, Source::Native { v6 }),
                }),
        );
        for (fd, source) in watched {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, source.pack());
            self.epoll.add(fd, event)?;
        }
        Ok(())
    }
}

/// Returns a function that wakes the broker by an eventfd.
fn waker(event: &Arc<EventFd>) -> impl Fn() + Send + Sync + 'static {
    let event = Arc::clone(event);
    move || {
        let _ = event.write(1);
    }
}

/// Attaches the programs of live frames in the configured namespace, if any.
fn anchor(plane: &DataPlane, config: &Config) {
    let namespace = config.frame_namespace.as_ref();
    let Some(namespace) = namespace.filter(|_| config.driver != Choice::Tc) else {
        return;
    };
    for shard in plane.shards() {
        if let Err(error) = shard.anchor_in(namespace) {
            tracing::warn!(%error, shard = shard.number(), "egress: cannot use the namespace of vtld-frames.socket");
        }
    }
}

fn ring_pool(
    plane: &DataPlane,
    config: &Config,
    parked: &Arc<EventFd>,
) -> vtl_bpf::Result<RingPool> {
    Ok(RingPool::start(
        RingMaker::new(plane)?,
        config.ring_slots,
        config.stock,
        config.ring_memory,
        config.max_sessions,
        waker(parked),
    ))
}

/// Restricts the sockets of control packets to VTL's interfaces, unless it uses all.
fn fence(scope: &Scope, sockets: &Sockets) -> anyhow::Result<Option<Fence>> {
    if scope.is_all() {
        return Ok(None);
    }
    let mut fence = Fence::load()?;
    fence.set(&scope.inside()?)?;
    for (socket, _, encapsulation) in sockets.all() {
        if encapsulation == Encapsulation::Native {
            fence.filter(&socket)?;
        }
    }
    if sockets.has(false, Encapsulation::Udp) {
        fence.close_port(Port::Udp)?;
    }
    Ok(Some(fence))
}

/// Starts the launcher; returns it with the pool it has read.
fn launcher(
    plane: &DataPlane,
    config: &Config,
    fence: Option<Fence>,
    parked: &Arc<EventFd>,
) -> anyhow::Result<(Launcher, Pool)> {
    let mut workshop = Workshop {
        loader: Arc::clone(plane.loader()),
        ingress: config.ingress,
        scope: config.scope.clone(),
        fence,
        host_pool: graft_pool::built_in()?,
        pool: config.pool.clone(),
        keys: config.keys.clone(),
    };
    workshop.read().map_err(anyhow::Error::msg)?;
    let host_pool = workshop.host_pool.clone();
    for (path, why) in host_pool.refused() {
        tracing::warn!(package = %path.display(), %why, "pool: package refused");
    }
    Ok((Launcher::start(workshop, waker(parked)), host_pool))
}
