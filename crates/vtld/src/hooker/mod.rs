//! The Hooker captures unmodified TCP applications.
//!
//! * *Client side*: connects of hooked processes are redirected to vtld, and their SYNs are held
//!   until the real destination has answered ([`HeldConnect`]). A peer that runs VTL is discovered
//!   by a TCP option and given to the [`Broker`]; connections to any other are proxied over plain
//!   TCP, and later connects to it are not captured.
//! * *Server side*: connections to hooked ports whose SYN has the option are steered to vtld and
//!   given to the [`Broker`], which reaches the application by [`Handle::connect_local_app`].
//!
//! - `bpf.rs`, `abi.rs`: the programs in the kernel and their maps. `cgroup.rs`, `hooks.rs`, `rules/`: whose connections
//!   they capture; `carrier.rs`: what these are to go by.
//! - `worker.rs`: the thread `vtl-hooker`. `held.rs`: connects that wait, with their SYNs (`packet.rs`); `discovery.rs`:
//!   connects to their destinations; `steering.rs`: connections of peers; `listeners.rs`, `sock.rs`: sockets.
//! - `executable.rs`: what an application executes. `proxy.rs`: the thread `vtl-proxy`, for peers without VTL.
//! - `gateway/`: the same for connections that this host forwards. `handover.rs`: hands all of it over to the next
//!   daemon. `beat.rs`: the heartbeat, without which the programs leave connections to TCP.
//!
//! Nothing is pinned: when vtld dies, in whatever way, the kernel detaches every program, new
//! connections are plain TCP, and established ones end with an error.

mod abi;
mod beat;
mod bpf;
mod carrier;
mod cgroup;
mod discovery;
mod error;
mod executable;
mod gateway;
mod handover;
mod held;
mod hooks;
mod listeners;
mod packet;
mod proxy;
pub mod rules;
mod sock;
mod steering;
mod worker;

use std::{
    collections::BTreeMap,
    fmt, io,
    net::{IpAddr, SocketAddr, TcpStream},
    ops::{Deref, DerefMut},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, Ordering},
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use nix::{
    sys::{
        eventfd::{EfdFlags, EventFd},
        time::TimeValLike,
    },
    time::ClockId,
};
use vtl_control::OpenedConnection;
use vtl_core::{
    profile::{Profile, Source},
    reconfigure::Bounds,
};
use vtl_proto::frame::FlowName;

use vtl_proto::carrier::Kind;

use crate::{Scope, handover::Left};

pub(crate) use beat::Pulse;
use carrier::CarrierPolicy;
pub use carrier::{Carrier, CarrierOptions, Must};
pub use error::{ConnectError, HookerError};
pub use executable::Executable;
pub(crate) use gateway::shut_down;
pub use gateway::{Gateway, GatewayListed};
pub(crate) use handover::Handover;
pub use held::HeldConnect;
pub use hooks::{Hook, Hooked};
pub use steering::ClientAddressGuard;
pub(crate) use steering::{drain, watch_interfaces};

use crate::netmon::NetMonitor;

use abi::vtl_hook_config;
use beat::Heart;
use bpf::{ACCEPTED, ADDRESSES, Attached, HOLD_SYN, Maps, Programs, SOCKOPS, WATCH_NEAR};
use cgroup::Hierarchy;
use gateway::Gateways;
use handover::Inherited;
use held::{Flows, Raw};
use hooks::Hooks;
use listeners::{Bound, Listeners};
use proxy::ProxyHandle;
use rules::{Listed, Paths, Plans, Rule, Verdict, Wrong};
use steering::Clients;
use worker::{Command, Worker};

/// The loopback's interface index in every network namespace.
const LOOPBACK: u32 = 1;

/// Round trips of a near host that are measured under load may be so many times as long as [`Config::near`].
pub(crate) const UNDER_LOAD: u32 = 4;

/// Configuration, fixed once the Hooker runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long connects to a destination without VTL are not captured, before the next one probes
    /// it again. Long values save a proxied connection per destination, short ones discover VTL sooner.
    pub plain_ttl: Duration,
    /// Timeout of a SYN with the option, before one without it is sent; twice as long if there is an
    /// association with the host. Checked once a second.
    pub offer_timeout: Duration,
    /// Maximum round trip of a near host. If its path is clean, too, connects that name no carrier bypass vtld, until
    /// none was made for [`Config::plain_ttl`]. Zero: no host is near.
    pub near: Duration,
    /// The interfaces that VTL is enabled on.
    pub scope: Scope,
    /// Told what proxied connections show of paths.
    pub monitor: Arc<NetMonitor>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            plain_ttl: Duration::from_secs(600),
            offer_timeout: Duration::from_secs(3),
            near: Duration::from_micros(500),
            scope: Scope::default(),
            monitor: Arc::default(),
        }
    }
}

/// A captured connection whose destination runs VTL.
#[derive(Debug)]
pub struct ClientFlow {
    /// The application's held connect: waits for [`HeldConnect::accept`].
    pub app: HeldConnect,
    /// The destination of the application's connect.
    pub dest: SocketAddr,
    /// The application's address as the server shall see it.
    pub src: SocketAddr,
    /// The TCP connection to the destination, non-blocking; the other end is the peer's vtld.
    pub peer: TcpStream,
    /// Session parameters from the application's hook or rule, if any.
    pub options: Option<Arc<CarrierOptions>>,
    /// The desired kind of carrier.
    pub kind: Kind,
    /// The rule that decided, if it has conditions on the path.
    pub rule: Option<Arc<str>>,
    /// Whether the carrier is chosen by path and application.
    pub auto: bool,
    /// What the choice is to keep.
    pub bounds: Bounds,
    /// The profile of the application to choose by, as far as it was known when the connect came, and the carrier that the
    /// flow explores.
    pub expected: (Option<Profile>, Option<u8>),
    /// What the application executes, if that is known.
    pub exe: Option<Executable>,
    /// Whether its hook or rule marks it loss-tolerant.
    pub tolerant: bool,
    /// The flow's name, which the SYN of `peer` announced.
    pub name: FlowName,
    /// This host is a gateway: `src` is another host.
    pub forwarded: bool,
}

/// A connection that was steered to vtld at the server.
#[derive(Debug)]
pub struct ServerFlow {
    /// The TCP connection, non-blocking; the other end is the client's vtld.
    pub peer: TcpStream,
    /// The application's address that the client connected to.
    pub dest: SocketAddr,
    /// The client's address on that connection.
    pub client: SocketAddr,
    /// The name in its SYN: of a flow, or of an association's control connection.
    pub name: FlowName,
    /// This host is a gateway: `dest` is another host. A flow's connection to the application there, non-blocking.
    pub forwarded: Option<Option<TcpStream>>,
}

/// Receives connections whose both ends run VTL. All methods run on the Hooker's threads and must
/// not block.
pub trait Broker: Send + Sync + 'static {
    /// Allocates the name that the SYN of a flow's TCP connection announces.
    fn name_flow(&self, held: &HeldConnect) -> FlowName;

    /// The profile that connections of this kind had before, or that the port tells; and if it may, the carrier that this
    /// one explores, a place among `vtl_core::select::CLASSES`.
    fn expect(&self, source: &Source, _may_explore: bool) -> (Option<Profile>, Option<u8>) {
        (Profile::of(source.dest.port()), None)
    }

    /// Whether there is an association with the host.
    fn knows(&self, _host: IpAddr) -> bool {
        false
    }

    /// Whether there is an association that the host has opened.
    fn serves(&self, _host: IpAddr) -> bool {
        false
    }

    /// Whether it is responsive: if it hangs, connections are left to TCP.
    fn is_there(&self) -> bool {
        true
    }

    /// Takes a captured connection whose destination runs VTL.
    fn client(&self, flow: ClientFlow);

    /// Takes a connection of a peer with VTL to a hooked port.
    fn server(&self, flow: ServerFlow);
}

/// State shared by the Hooker's threads and handles.
struct Shared {
    config: Config,
    broker: Arc<dyn Broker>,
    maps: Maps,
    flows: Arc<Flows>,
    proxy: ProxyHandle,
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    /// Heartbeat of the thread `vtl-hooker`.
    pulse: Pulse,
    /// Handed over: another daemon takes new connections.
    is_left: Mutex<bool>,
    clients: Mutex<Clients>,
    hooks: Mutex<Hooks>,
    /// Hooked server ports, and whether each is marked loss-tolerant.
    ports: RwLock<BTreeMap<u16, bool>>,
    /// The conditions of the rules in force; a copy, as the lock of the hooks may be held long.
    plans: Mutex<Arc<Plans>>,
    /// The rules in force about forwarded connections.
    forwarding: Mutex<Arc<rules::ForwardRules>>,
    gateways: Mutex<Gateways>,
    /// Whether there is a gateway; a copy, as that lock may be held long.
    is_gateway: AtomicBool,
}

/// Lock guard of the hooks. It may be held as long as the verifier takes, so [`Shared::ports`] does not need it: that
/// copy is updated when this is dropped.
struct LockedHooks<'a> {
    hooks: MutexGuard<'a, Hooks>,
    ports: &'a RwLock<BTreeMap<u16, bool>>,
    /// The hooks were borrowed mutably.
    is_changed: bool,
}

impl Deref for LockedHooks<'_> {
    type Target = Hooks;

    fn deref(&self) -> &Hooks {
        &self.hooks
    }
}

impl DerefMut for LockedHooks<'_> {
    fn deref_mut(&mut self) -> &mut Hooks {
        self.is_changed = true;
        &mut self.hooks
    }
}

impl Drop for LockedHooks<'_> {
    fn drop(&mut self) {
        if self.is_changed {
            let mut ports = self.ports.write().unwrap_or_else(PoisonError::into_inner);
            *ports = self.hooks.ports();
        }
    }
}

impl Shared {
    /// The profile to choose a connection's carrier by, and the one that it explores; nothing where nothing is chosen.
    fn expect(
        &self,
        policy: &CarrierPolicy,
        dest: SocketAddr,
        exe: Option<&Executable>,
    ) -> (Option<Profile>, Option<u8>) {
        let program = exe.map(|exe| exe.program);
        let source = Source { dest, program };
        // Never one with requirements.
        let may_explore = policy.bounds.is_none() && !policy.required;
        match policy.auto {
            true => self.broker.expect(&source, may_explore),
            false => (None, None),
        }
    }

    // Poisoning is harmless: no critical section panics half-way through an update.
    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_left(&self) -> MutexGuard<'_, bool> {
        self.is_left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hooks(&self) -> LockedHooks<'_> {
        LockedHooks {
            hooks: self.hooks.lock().unwrap_or_else(PoisonError::into_inner),
            ports: &self.ports,
            is_changed: false,
        }
    }

    fn plans(&self) -> MutexGuard<'_, Arc<Plans>> {
        self.plans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forwarding(&self) -> Arc<rules::ForwardRules> {
        let rules = self.forwarding.lock();
        Arc::clone(&rules.unwrap_or_else(PoisonError::into_inner))
    }

    fn ports(&self) -> RwLockReadGuard<'_, BTreeMap<u16, bool>> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The Hooker's interface for a [`Broker`]. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// Begins to connect to the application that listens at `dest`, which will see `client` as its
    /// peer. The stream does not block and may still be connecting: it becomes writable once
    /// connected. Keep the guard as long as the stream.
    pub fn connect_local_app(
        &self,
        dest: SocketAddr,
        client: SocketAddr,
    ) -> io::Result<(TcpStream, ClientAddressGuard)> {
        steering::connect_local_app(&self.shared, dest, client)
    }

    /// Whether this port is marked loss-tolerant, in both directions.
    pub fn tolerates(&self, port: u16) -> bool {
        self.shared.ports().get(&port) == Some(&true)
    }

    /// The conditions of the rules in force on paths.
    pub fn plans(&self) -> Arc<Plans> {
        Arc::clone(&self.shared.plans())
    }

    /// Whether any port is marked loss-tolerant.
    pub fn tolerates_any(&self) -> bool {
        self.shared.ports().values().any(|tolerant| *tolerant)
    }

    /// Whether any port is hooked, or this host is a gateway.
    pub fn serves_any(&self) -> bool {
        !self.shared.ports().is_empty() || self.shared.is_gateway.load(Ordering::Relaxed)
    }

    /// Proxies between two non-blocking streams, with TCP's semantics at both ends, until both have
    /// ended. `guard` is dropped then.
    pub fn carry(&self, a: TcpStream, b: TcpStream, guard: Option<ClientAddressGuard>) {
        self.shared.proxy.join(a, b, guard);
    }

    /// Begins to connect to a real destination, without VTL's option. The stream does not block
    /// and may still be connecting.
    pub fn connect_plain(&self, dest: SocketAddr) -> io::Result<TcpStream> {
        discovery::connect_plain(&self.shared, dest)
    }

    /// Begins to open an association's control connection from the local address `from`, which is another host's if
    /// this one `forwards`. The stream does not block and may still be connecting.
    pub fn connect_control(
        &self,
        from: IpAddr,
        dest: SocketAddr,
        name: FlowName,
        forwards: bool,
    ) -> io::Result<TcpStream> {
        discovery::connect_control(&self.shared, from, dest, name, forwards)
    }

    /// This host's address in packets to `dest`. Sends nothing.
    pub fn address_towards(&self, dest: SocketAddr) -> io::Result<IpAddr> {
        sock::route_source(dest, 0)
    }

    /// Whether the peer of a connection made by [`Handle::connect_control`], now established, speaks VTL.
    pub fn speaks_vtl(&self, stream: &TcpStream) -> bool {
        discovery::is_understood(&self.shared, stream)
    }

    /// Whether a flow's connection, by its socket's cookie, has stopped sending the option although the peer has
    /// acknowledged nothing: a peer that missed the first ones takes it for a plain connection.
    pub fn is_unnamed(&self, cookie: u64) -> bool {
        self.shared.maps.gave_up(cookie)
    }

    /// Stops capturing connects to `dest` for [`Config::plain_ttl`].
    pub fn leave_plain(&self, dest: SocketAddr) -> Result<(), HookerError> {
        self.shared
            .maps
            .leave_plain(dest, self.shared.config.plain_ttl)
    }

    /// Captures connects to `dest` again.
    pub fn forget_plain(&self, dest: SocketAddr) {
        self.shared.maps.forget_plain(dest);
    }

    /// Maximum round trip of a near host; zero: no host is near.
    pub fn near(&self) -> Duration {
        self.shared.config.near
    }

    /// Has connects to a near host with a clean path bypass vtld.
    pub fn leave_near(&self, host: IpAddr) {
        let ttl = self.shared.config.plain_ttl;
        match self.shared.maps.leave_near(host, ttl) {
            Ok(true) => {
                tracing::info!(%host, "hooker: near host with a clean path: connects that name no carrier bypass vtld");
            }
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, %host, "hooker: cannot remember a near host"),
        }
    }
}

/// The running Hooker of one network namespace: that of the thread which started it.
pub struct Hooker {
    handle: Handle,
    /// Links of the programs that serve all hooks.
    links: Vec<Attached>,
    threads: Vec<JoinHandle<()>>,
    /// Duplicates of the worker's listeners, which its panic does not close.
    listeners: Listeners,
    /// Steering links of a former daemon.
    former: Mutex<Vec<OwnedFd>>,
    _heart: Heart,
}

impl Hooker {
    /// Loads the programs and starts the threads. Nothing is captured or steered until something
    /// is hooked.
    ///
    /// `left`: state handed over by a former daemon. Next call [`Hooker::begin`], or else
    /// [`Left::resume`].
    pub fn start(
        config: Config,
        broker: Arc<dyn Broker>,
        left: &mut Option<Left>,
    ) -> Result<Self, HookerError> {
        let is_heir = left.is_some();
        if !is_heir {
            gateway::sweep();
        }
        let inherited = match left {
            Some(Left {
                handover,
                descriptors,
            }) => Inherited::take(&handover.hooker, descriptors).map_err(HookerError::TakeOver)?,
            None => Inherited::default(),
        };
        let failed = HookerError::socket;
        allow_many_descriptors();
        let mark = random_mark().map_err(failed("get random bytes"))?;
        // Without IPv6 there is nothing to capture of it.
        let raw = Raw::open(mark).map_err(failed("open a raw socket (needs root)"))?;
        let netns_cookie =
            sock::netns_cookie(raw.v4()).map_err(failed("identify the namespace"))?;
        let mut capture = inherited.capture.into_iter();
        let v4 = Bound::new(true, capture.next());
        let v4 = v4.map_err(failed("bind to 127.0.0.1 (is lo up?)"))?;
        let v6 = match raw.has_v6() {
            true => Bound::new(false, capture.next()).ok(),
            false => None,
        };
        let hook = vtl_hook_config {
            netns_cookie,
            mark,
            capture_port4: v4.capture_port(),
            capture_port6: v6.as_ref().map_or(0, Bound::capture_port),
            near_ns: config.plain_ttl.as_nanos() as u64,
            far_us: config.near.saturating_mul(UNDER_LOAD).as_micros() as u64,
            ticks: ticks(),
            ..Default::default()
        };

        let programs = load(&hook, &inherited.maps)?;
        let maps = programs.maps()?;
        let hierarchy = Hierarchy::find()?;
        let mut links = attach(&programs, &hierarchy, !config.near.is_zero())?;
        links.push(programs.attach_tcx(HOLD_SYN, LOOPBACK, "lo")?);

        // After attaching: the sock_ops program must see the listen.
        let mut listeners = Listeners::default();
        for bound in [Some(v4), v6].into_iter().flatten() {
            listeners.add(bound, &maps)?;
        }
        listeners.steer.extend(inherited.steer);
        // Detach the former daemon's, now that ours are attached.
        drop(inherited.links);

        let (commands, inbox) = channel();
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC);
        let wake = wake.map_err(|errno| failed("make an eventfd")(errno.into()))?;
        let ring = worker::Syns::new(&programs)?;
        let hooks = Hooks::new(
            programs,
            hook,
            hierarchy,
            inherited.groups,
            inherited.policies,
            config.scope.clone(),
        )?;
        let (proxy, proxy_thread) =
            proxy::spawn(Arc::clone(&config.monitor)).map_err(failed("start the proxy"))?;
        let shared = Arc::new(Shared {
            config,
            broker,
            maps,
            flows: Arc::new(Flows::captured(raw)),
            proxy,
            commands,
            wake: Arc::new(wake),
            pulse: Pulse::default(),
            is_left: Mutex::new(false),
            clients: Mutex::default(),
            hooks: Mutex::new(hooks),
            ports: RwLock::default(),
            plans: Mutex::default(),
            forwarding: Mutex::default(),
            gateways: Mutex::default(),
            is_gateway: AtomicBool::new(false),
        });
        if is_heir {
            shared.clients().inherit(shared.maps.shown());
        }
        let heart = Heart::start(Arc::clone(&shared)).map_err(failed("start a thread"))?;
        let own = listeners.try_clone();
        let own = own.map_err(failed("duplicate a listener"))?;
        let worker = Worker::new(Arc::clone(&shared), ring, own, inbox)?;
        let worker_thread = std::thread::Builder::new()
            .name("vtl-hooker".into())
            .spawn(move || worker.run())
            .map_err(failed("start the Hooker's thread"))?;
        Ok(Self {
            handle: Handle { shared },
            links,
            threads: vec![worker_thread, proxy_thread],
            listeners,
            former: Mutex::default(),
            _heart: heart,
        })
    }

    /// Starts passing connections to the broker.
    pub fn begin(&self) {
        let shared = &self.handle.shared;
        let _ = shared.commands.send(Command::Begin);
        let _ = shared.wake.write(1);
    }

    /// Detaches the former daemon's steering programs, once all hooks are restored.
    pub fn forget_former(&self) {
        self.former().clear();
    }

    fn former(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle for brokers.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Captures the TCP connections that the process and its future children open from now on.
    /// Existing sockets are not affected.
    pub fn hook_pid(&self, pid: u32, carrier: &Carrier) -> Result<u32, HookerError> {
        self.handle.shared.hooks().hook_pid(pid, carrier)
    }

    /// Captures the connections of all processes in a cgroup and its descendants. `path`: in the
    /// hierarchy (`/user.slice`), or in the file system.
    pub fn hook_cgroup(&self, path: &Path, carrier: &Carrier) -> Result<u32, HookerError> {
        self.handle.shared.hooks().hook_cgroup(path, carrier)
    }

    /// The path that a hooked cgroup is listed by.
    pub fn cgroup(&self, path: &Path) -> PathBuf {
        self.handle.shared.hooks().cgroup(path)
    }

    /// Steers connections to a local port from peers that run VTL to vtld; or sets the carrier of
    /// all connections that the port accepts.
    pub fn hook_port(&self, port: u16, carrier: &Carrier) -> Result<u32, HookerError> {
        let shared = &self.handle.shared;
        shared.hooks().hook_port(shared, port, carrier)
    }

    /// Removes a hook. Established connections go on.
    pub fn unhook(&self, id: u32) -> Result<(), HookerError> {
        let shared = &self.handle.shared;
        shared.hooks().unhook(shared, id)
    }

    /// Replaces the rules in force, all or none. Established connections go on as they are.
    ///
    /// # Errors
    /// A rule needs something that this host lacks; the rules in force stay.
    pub fn set_rules(&self, rules: &[Rule]) -> Result<(), Wrong> {
        let shared = &self.handle.shared;
        let paths = Paths::look(rules, |path| self.cgroup(path))?;
        shared.hooks().set_rules(shared, rules, &paths)?;
        *shared.plans() = Arc::new(rules::plans(rules));
        let forwarding = rules::ForwardRules::new(rules, &shared.forwarding());
        *shared
            .forwarding
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Arc::new(forwarding);
        Ok(())
    }

    /// Resolves the files and cgroups that the rules in force name anew. False if they name none.
    pub fn refresh_rules(&self) -> bool {
        let hooks = || self.handle.shared.hooks();
        let rules = hooks().rules();
        let missed = |error: &dyn fmt::Display| {
            tracing::warn!(%error, "rules: cannot look at their files and cgroups: changes are missed until the next look");
        };
        match Paths::look(&rules, |path| self.cgroup(path)) {
            Ok(paths) => {
                if let Err(error) = hooks().refresh_rules(&paths) {
                    missed(&error);
                }
                !paths.is_empty()
            }
            Err(error) => {
                missed(&error);
                true
            }
        }
    }

    /// The rules in force.
    pub fn rules(&self) -> Vec<Listed> {
        let mut listed = self.handle.shared.hooks().list_rules();
        let forwarding = self.handle.shared.forwarding();
        for row in &mut listed {
            row.connections = row.connections.or(forwarding.matched(&row.rule.name));
        }
        listed
    }

    /// Verdicts of the rules in force on a connection, up to the one that decides.
    pub fn explain(&self, connection: &OpenedConnection) -> Vec<Verdict> {
        let rules = self.handle.shared.hooks().rules();
        rules::explain(&rules, connection, |path| self.cgroup(path))
    }

    /// Near hosts, connections to which bypass vtld.
    pub fn near_hosts(&self) -> Vec<IpAddr> {
        self.handle.shared.maps.near_hosts()
    }

    /// All hooks.
    pub fn list(&self) -> Vec<Hook> {
        self.handle.shared.hooks().list()
    }
}

impl Drop for Hooker {
    fn drop(&mut self) {
        let shared = &self.handle.shared;
        // Stop capturing first, then end the threads, which resets the connections that they carry.
        shared.hooks().close();
        shared.gateways().close();
        self.links.clear();
        // Fails if the thread has ended already.
        let _ = shared.commands.send(Command::Stop);
        let _ = shared.wake.write(1);
        shared.proxy.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Loads the programs; reuses the maps of a former daemon if they are compatible.
fn load(hook: &vtl_hook_config, maps: &[(String, OwnedFd)]) -> Result<Programs, HookerError> {
    match Programs::load(hook, maps) {
        Err(error) if !maps.is_empty() => {
            tracing::warn!(%error, "handover: the maps are of another version: applications with open connections see loopback addresses");
            Programs::load(hook, &[])
        }
        loaded => loaded,
    }
}

/// Attaches the programs that every hook needs: discovery at vtld's cgroup; client addresses at the root, since any
/// process may be the server that vtld connects to; if hosts may be near, monitoring of connections to them.
fn attach(
    programs: &Programs,
    hierarchy: &Hierarchy,
    may_be_near: bool,
) -> Result<Vec<Attached>, HookerError> {
    let open = |path: &Path| {
        let path = path.to_owned();
        std::fs::File::open(&path).map_err(|source| HookerError::Cgroup { path, source })
    };
    let (root, own) = (open(hierarchy.root())?, open(hierarchy.own())?);
    let mut links = vec![programs.attach_cgroup(SOCKOPS, hierarchy.own(), &own)?];
    for name in ADDRESSES
        .into_iter()
        .chain([ACCEPTED])
        .chain(may_be_near.then_some(WATCH_NEAR))
    {
        links.push(programs.attach_cgroup(name, hierarchy.root(), &root)?);
    }
    Ok(links)
}

/// Raises the limit of open files: each proxied connection takes two, and the usual limit is 1,024.
fn allow_many_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::debug!(%error, "hooker: cannot raise the limit of open files");
    }
}

/// The kernel's ticks per second (CONFIG_HZ), from the resolution of its coarse clock: its
/// configuration is not readable everywhere. 0 if unknown.
fn ticks() -> u64 {
    let tick = ClockId::CLOCK_MONOTONIC_COARSE.res();
    let tick = tick.map_or(0, |tick| tick.num_nanoseconds() as u64);
    (1_000_000_000 + tick / 2).checked_div(tick).unwrap_or(0)
}

/// A random SO_MARK, which no other program uses by accident.
fn random_mark() -> io::Result<u32> {
    Ok(getrandom::u32()? | 1)
}
