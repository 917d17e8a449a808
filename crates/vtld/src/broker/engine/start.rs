//! What the engine begins with: the data plane, the first look at interfaces and pool, and what its
//! thread waits for.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    os::fd::AsFd,
    sync::{Arc, mpsc::Receiver},
};

use anyhow::Context;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use vtl_bpf::{
    netdev::{self, Changes},
    plane::DataPlane,
    rings::RingMaker,
    tunnel::Tunnel,
};
use vtl_pool::Pool;
use vtl_proto::{
    intf,
    nego::{Responder, Way},
};

use super::{
    super::{
        Command, Config, Handle,
        launcher::{Launcher, Workshop},
        now_ns,
        peers::Peers,
        random,
        raw::Raw,
        shard::{Schedule, Shards},
        stock::Stock,
        tunnel::Tunnels,
    },
    Engine, Source, pool,
};

impl Engine {
    pub(in super::super) fn new(
        config: Config,
        handle: Handle,
        inbox: Receiver<Command>,
    ) -> anyhow::Result<Self> {
        let udp = udp_sockets();
        let sessions = config.max_sessions as u32;
        let mut plane = DataPlane::load_for(sessions, config.shards, udp[0].is_some())?;
        let places = plane.sessions().places();
        let wake = Arc::clone(&handle.wake);
        let shards = Shards::start(&plane, config.driver, move || {
            let _ = wake.write(1);
        })?;
        let raw4 = Raw::open(false, Way::Native).context("a raw socket for IP protocol 253")?;
        // A host may have no IPv6.
        let raw = [Some(raw4), Raw::open(true, Way::Native).ok()];
        let stock = stock(&plane, &config, &handle)?;
        let changes = Changes::open()?;
        // Errors of the first look at interfaces and pool are the daemon's.
        for interface in netdev::interfaces()? {
            plane.attach(&interface, config.ingress)?;
        }
        if let Err(error) = plane.attach_direct() {
            tracing::info!(%error, "applications cannot run their own egress");
        }
        let (launcher, library) = launcher(&plane, &config, &handle)?;
        let mut engine = Self {
            config,
            handle,
            inbox,
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            shards,
            drivers: HashMap::new(),
            raw,
            udp,
            tunnels: Tunnels::open(),
            tunnel: Tunnel::open(&plane)?,
            tunnelled: Vec::new(),
            changes,
            stock,
            launcher,
            parked: VecDeque::new(),
            peers: Peers::default(),
            responder: Responder::new(now_ns(), random()),
            freed: HashMap::new(),
            callers: plane.map_handle("vtl_callers")?,
            library: Pool::default(),
            pool: Vec::new(),
            sessions: BTreeMap::new(),
            by_tcp: Schedule::new(places),
            negotiations: Schedule::new(places),
            owned: BTreeSet::new(),
            next_ticked: 0,
            listeners: BTreeMap::new(),
            last_sid: 0,
            last_opened_ns: 0,
            hooker: None,
            started_ns: now_ns(),
            next_tick: 0,
            stopping: false,
            plane,
        };
        engine.watch()?;
        for attached in engine.plane.attached().values() {
            engine.use_interface(&attached.interface);
        }
        engine.use_library(library);
        // Ahead of the first session, which would wait for the verifier: what the Hooker uses, and
        // most applications. The others are loaded when they are first asked for.
        if let Some(best) = engine.pool.first() {
            engine.plane.deploy(&best.image)?;
        }
        Ok(engine)
    }

    /// Has epoll watch all that is there from the beginning.
    fn watch(&self) -> nix::Result<()> {
        let mut levels = vec![
            (self.handle.wake.as_fd(), Source::Wake),
            (self.changes.as_fd(), Source::Changes),
        ];
        for v6 in [false, true] {
            let raw = self.raw[usize::from(v6)].as_ref();
            let udp = self.udp[usize::from(v6)].as_ref();
            levels.extend(raw.map(|raw| (raw.as_fd(), Source::Raw { v6 })));
            levels.extend(udp.map(|udp| (udp.as_fd(), Source::Udp { v6 })));
        }
        for (fd, source) in levels {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, source.pack());
            self.epoll.add(fd, event)?;
        }
        let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        for (listener, v6) in self.tunnels.listeners().into_iter().zip([false, true]) {
            // Where no descriptors are left, the next connection is soon enough.
            let event = EpollEvent::new(edges, Source::Listener { v6 }.pack());
            listener.map_or(Ok(()), |listener| self.epoll.add(listener, event))?;
        }
        Ok(())
    }
}

fn stock(plane: &DataPlane, config: &Config, handle: &Handle) -> vtl_bpf::Result<Stock> {
    let wake = Arc::clone(&handle.wake);
    Ok(Stock::start(
        RingMaker::new(plane)?,
        config.ring_slots,
        config.stock,
        config.ring_memory,
        config.max_sessions,
        move || {
            let _ = wake.write(1);
        },
    ))
}

/// The launcher, and what it has found in the pool.
fn launcher(
    plane: &DataPlane,
    config: &Config,
    handle: &Handle,
) -> anyhow::Result<(Launcher, Pool)> {
    let mut workshop = Workshop {
        loader: Arc::clone(plane.loader()),
        ingress: config.ingress,
        library: pool::built_in()?,
        pool: config.pool.clone(),
        keys: config.keys.clone(),
    };
    workshop.read().map_err(anyhow::Error::msg)?;
    let library = workshop.library.clone();
    for (path, why) in library.refused() {
        tracing::warn!(package = %path.display(), %why, "not taken into the pool");
    }
    let wake = Arc::clone(&handle.wake);
    let launcher = Launcher::start(workshop, move || {
        let _ = wake.write(1);
    });
    Ok((launcher, library))
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
