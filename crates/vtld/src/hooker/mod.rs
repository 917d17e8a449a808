//! The Hooker moves unmodified TCP applications.
//!
//! * *Client side*: connects of hooked processes go to vtld, and their SYNs wait until it is known
//!   how the real destination answers ([`HeldConnect`]). A peer that runs VTL is found by a TCP
//!   option and given to the [`Broker`]; to any other the Hooker carries the bytes over plain TCP,
//!   and later connects to it are left alone.
//! * *Server side*: connections to hooked ports whose SYN has the option are steered to vtld and
//!   given to the [`Broker`], which reaches the application by [`Handle::connect_local_app`].
//!
//! Nothing is pinned: when vtld dies, however it dies, the kernel detaches every program, new
//! connections are plain TCP, and those under way end with an error.

mod abi;
mod beat;
mod bpf;
mod carrier;
mod cgroup;
mod discovery;
mod error;
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
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard,
        mpsc::{Sender, channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use nix::sys::eventfd::{EfdFlags, EventFd};
use vtl_control::OpenedConnection;
use vtl_proto::frame::FlowName;

use vtl_proto::carrier::Kind;

use crate::{Scope, handover::Left};

pub(crate) use beat::Pulse;
pub use carrier::{Carrier, Must, Over};
pub use error::{ConnectError, HookerError};
pub(crate) use handover::Handover;
pub use held::HeldConnect;
pub use hooks::{Hook, Hooked};
pub use steering::ClientAddressGuard;

use abi::vtl_hook_config;
use beat::Heart;
use bpf::{ACCEPTED, ADDRESSES, Attached, HOLD_SYN, Maps, Programs, SOCKOPS, WATCH_NEAR};
use cgroup::Hierarchy;
use handover::Inherited;
use held::Flows;
use hooks::Hooks;
use listeners::{Bound, Listeners};
use proxy::ProxyHandle;
use rules::{Listed, Paths, Rule, Verdict, Wrong};
use steering::Clients;
use worker::{Command, Worker};

/// The loopback's interface index in every network namespace.
const LOOPBACK: u32 = 1;

/// Knobs, fixed once the Hooker runs.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long a destination without VTL is left alone before it is asked again. Long values
    /// save a proxied connection per destination, short ones notice sooner that VTL came.
    pub plain_ttl: Duration,
    /// How long a SYN with the option may stay unanswered before one without it is sent, and twice as
    /// long where there is an association with the host. Counted
    /// in whole seconds.
    pub offer_timeout: Duration,
    /// Round trips up to which a host counts as near: where its path is clean, too, connects that name no carrier
    /// go past vtld until none was made for [`Config::plain_ttl`]. Zero: none is near.
    pub near: Duration,
    /// The interfaces that VTL is for.
    pub scope: Scope,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            plain_ttl: Duration::from_secs(600),
            offer_timeout: Duration::from_secs(3),
            near: Duration::from_micros(500),
            scope: Scope::default(),
        }
    }
}

/// A captured connection whose destination runs VTL.
#[derive(Debug)]
pub struct ClientFlow {
    /// The application's side: waits for [`HeldConnect::accept`].
    pub app: HeldConnect,
    /// Where the application wants to go.
    pub dest: SocketAddr,
    /// The application's address as the server shall see it.
    pub src: SocketAddr,
    /// The TCP connection to the destination, non-blocking; the other end is the peer's vtld.
    pub peer: TcpStream,
    /// What the application's hook or rule says that its session is like, if it says so.
    pub over: Option<Arc<Over>>,
    /// The kind of carrier that it is for.
    pub kind: Kind,
    /// What its SYN said: from then on the connection is the flow's own.
    pub name: FlowName,
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
    /// What its SYN said: it is a flow's own, or an association's control connection.
    pub name: FlowName,
}

/// What becomes of connections whose both ends run VTL. All methods run on the Hooker's threads and
/// must not block.
pub trait Broker: Send + Sync + 'static {
    /// What the SYN of a flow's own connection is to say.
    fn name_flow(&self, held: &HeldConnect) -> FlowName;

    /// Whether there is an association with the host.
    fn knows(&self, _host: IpAddr) -> bool {
        false
    }

    /// Whether it takes connections: where it hangs, they are left to TCP.
    fn is_there(&self) -> bool {
        true
    }

    /// A captured connection's destination turned out to run VTL.
    fn client(&self, flow: ClientFlow);

    /// A peer with VTL connected to a hooked port.
    fn server(&self, flow: ServerFlow);
}

/// What the Hooker's threads and handles share.
struct Shared {
    config: Config,
    broker: Arc<dyn Broker>,
    maps: Maps,
    flows: Flows,
    proxy: ProxyHandle,
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    /// Of the thread that waits for connections.
    pulse: Pulse,
    /// No more connections are taken: another daemon is to.
    is_left: Mutex<bool>,
    clients: Mutex<Clients>,
    hooks: Mutex<Hooks>,
    /// The ports that are hooked for their servers, and whether their clients' bytes may be lost.
    ports: RwLock<BTreeMap<u16, bool>>,
}

/// The hooks, while nobody else changes them. That may take as long as the verifier: [`Shared::ports`] waits for
/// nobody, and follows when this is dropped.
struct LockedHooks<'a> {
    hooks: MutexGuard<'a, Hooks>,
    ports: &'a RwLock<BTreeMap<u16, bool>>,
    /// They may have changed.
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
    // Neither lock is held across code that may panic half-way through a change.
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

    fn ports(&self) -> RwLockReadGuard<'_, BTreeMap<u16, bool>> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a [`Broker`] needs of the Hooker. Cheap to clone; usable from any thread.
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

    /// Is this port marked so that what its clients send, and get, may be lost?
    pub fn tolerates(&self, port: u16) -> bool {
        self.shared.ports().get(&port) == Some(&true)
    }

    /// Is any port?
    pub fn tolerates_any(&self) -> bool {
        self.shared.ports().values().any(|tolerant| *tolerant)
    }

    /// Is any port hooked?
    pub fn serves_any(&self) -> bool {
        !self.shared.ports().is_empty()
    }

    /// Carries bytes between two non-blocking streams, with TCP's semantics at both ends, until
    /// both have ended. `guard` is dropped then.
    pub fn carry(&self, a: TcpStream, b: TcpStream, guard: Option<ClientAddressGuard>) {
        self.shared.proxy.join(a, b, guard);
    }

    /// Begins to connect to a real destination, without asking for VTL. The stream does not block
    /// and may still be connecting.
    pub fn connect_plain(&self, dest: SocketAddr) -> io::Result<TcpStream> {
        discovery::connect_plain(&self.shared, dest)
    }

    /// Begins to open an association's control connection, from this address of the host. The stream does
    /// not block and may still be connecting.
    pub fn connect_control(
        &self,
        from: IpAddr,
        dest: SocketAddr,
        name: FlowName,
    ) -> io::Result<TcpStream> {
        discovery::connect_control(&self.shared, from, dest, name)
    }

    /// Whether the peer of a connection made by [`Handle::connect_control`], now established, speaks VTL.
    pub fn speaks_vtl(&self, stream: &TcpStream) -> bool {
        discovery::is_understood(&self.shared, stream)
    }

    /// Whether a flow's connection, by its socket's cookie, repeats its option no more, although the peer has
    /// acknowledged nothing: who missed the first ones takes it for a plain connection.
    pub fn is_unnamed(&self, cookie: u64) -> bool {
        self.shared.maps.gave_up(cookie)
    }

    /// Leaves connects to `dest` alone for [`Config::plain_ttl`].
    pub fn leave_plain(&self, dest: SocketAddr) -> Result<(), HookerError> {
        self.shared
            .maps
            .leave_plain(dest, self.shared.config.plain_ttl)
    }

    /// Captures connects to `dest` again.
    pub fn forget_plain(&self, dest: SocketAddr) {
        self.shared.maps.forget_plain(dest);
    }

    /// How long round trips to a near host may be; zero: none is near.
    pub fn near(&self) -> Duration {
        self.shared.config.near
    }

    /// A host has turned out to be near, with a clean path.
    pub fn leave_near(&self, host: IpAddr) {
        let ttl = self.shared.config.plain_ttl;
        match self.shared.maps.leave_near(host, ttl) {
            Ok(true) => {
                tracing::info!(%host, "near, and its path is clean: connections that name no carrier go past vtld");
            }
            Ok(false) => {}
            Err(error) => tracing::debug!(%error, %host, "a near host was not remembered"),
        }
    }

    /// Exempts a socket of vtld's own from capture. Call it before connect().
    pub fn exempt(&self, socket: &impl AsFd) -> Result<(), HookerError> {
        let cookie = sock::cookie(socket);
        let cookie = cookie.map_err(HookerError::socket("read a socket's cookie"))?;
        self.shared.maps.own(cookie, None)
    }
}

/// The running Hooker of one network namespace: that of the thread which started it.
pub struct Hooker {
    handle: Handle,
    /// Programs that serve all hooks.
    links: Vec<Attached>,
    threads: Vec<JoinHandle<()>>,
    /// The worker's, which a panic does not close.
    listeners: Listeners,
    /// What steered for a former daemon.
    former: Mutex<Vec<OwnedFd>>,
    _heart: Heart,
}

impl Hooker {
    /// Loads the programs and starts the threads. Nothing is captured or steered until something
    /// is hooked.
    ///
    /// `left`: what a former daemon has left to this one.
    /// [`Hooker::begin`], or else [`Left::resume`], comes next.
    pub fn start(
        config: Config,
        broker: Arc<dyn Broker>,
        left: &mut Option<Left>,
    ) -> Result<Self, HookerError> {
        let is_heir = left.is_some();
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
        let raw4 = sock::raw(true, mark).map_err(failed("open a raw socket (needs root)"))?;
        // A host without IPv6 has nothing to capture there.
        let raw6 = sock::raw(false, mark).ok();
        let netns_cookie = sock::netns_cookie(&raw4).map_err(failed("identify the namespace"))?;
        let mut capture = inherited.capture.into_iter();
        let v4 = Bound::new(true, capture.next());
        let v4 = v4.map_err(failed("bind to 127.0.0.1 (is lo up?)"))?;
        let v6 = match &raw6 {
            Some(_) => Bound::new(false, capture.next()).ok(),
            None => None,
        };
        let hook = vtl_hook_config {
            netns_cookie,
            mark,
            capture_port4: v4.capture_port(),
            capture_port6: v6.as_ref().map_or(0, Bound::capture_port),
            near_ns: config.plain_ttl.as_nanos() as u64,
            far_us: 4 * config.near.as_micros() as u64,
            ..Default::default()
        };

        let programs = load(&hook, &inherited.maps)?;
        let maps = programs.maps()?;
        let hierarchy = Hierarchy::find()?;
        let mut links = attach(&programs, &hierarchy, !config.near.is_zero())?;
        links.push(programs.attach_tcx(HOLD_SYN, LOOPBACK, "lo")?);

        // After the attachment: the sock_ops program must see it.
        let mut listeners = Listeners::default();
        for bound in [Some(v4), v6].into_iter().flatten() {
            listeners.add(bound, &maps)?;
        }
        listeners.steer.extend(inherited.steer);
        // Ours are attached as well.
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
            inherited.wishes,
            config.scope.clone(),
        )?;
        let (proxy, proxy_thread) = proxy::spawn().map_err(failed("start the proxy"))?;
        let shared = Arc::new(Shared {
            config,
            broker,
            maps,
            flows: Flows::new(raw4, raw6),
            proxy,
            commands,
            wake: Arc::new(wake),
            pulse: Pulse::default(),
            is_left: Mutex::new(false),
            clients: Mutex::default(),
            hooks: Mutex::new(hooks),
            ports: RwLock::default(),
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

    /// Has connections go to the broker from now on.
    pub fn begin(&self) {
        let shared = &self.handle.shared;
        let _ = shared.commands.send(Command::Begin);
        let _ = shared.wake.write(1);
    }

    /// All that is to be hooked is: what a former daemon left in the meantime may go.
    pub fn forget_former(&self) {
        self.former().clear();
    }

    fn former(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.former.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For brokers.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Captures the TCP connections that the process opens from now on, and those of its future
    /// children. Sockets that it has already are left alone.
    pub fn hook_pid(&self, pid: u32, carrier: &Carrier) -> Result<u32, HookerError> {
        self.handle.shared.hooks().hook_pid(pid, carrier)
    }

    /// Captures the connections of all processes in a control group and in those below it: by its
    /// path in the hierarchy (`/user.slice`), or in the file system.
    pub fn hook_cgroup(&self, path: &Path, carrier: &Carrier) -> Result<u32, HookerError> {
        self.handle.shared.hooks().hook_cgroup(path, carrier)
    }

    /// The path that a hooked cgroup is listed by.
    pub fn cgroup(&self, path: &Path) -> PathBuf {
        self.handle.shared.hooks().cgroup(path)
    }

    /// Takes over connections to a local port from peers that run VTL; or has all connections that
    /// the port accepts travel by the carrier.
    pub fn hook_port(&self, port: u16, carrier: &Carrier) -> Result<u32, HookerError> {
        let shared = &self.handle.shared;
        shared.hooks().hook_port(shared, port, carrier)
    }

    /// Ends a hook. Connections under way go on.
    pub fn unhook(&self, id: u32) -> Result<(), HookerError> {
        let shared = &self.handle.shared;
        shared.hooks().unhook(shared, id)
    }

    /// Puts rules in force in the place of those that there are, all of them or none. Connections
    /// under way go on as they are.
    ///
    /// # Errors
    /// One of them asks for what this host does not have; those in force stay.
    pub fn set_rules(&self, rules: &[Rule]) -> Result<(), Wrong> {
        let shared = &self.handle.shared;
        let paths = Paths::look(rules, |path| self.cgroup(path))?;
        shared.hooks().set_rules(shared, rules, &paths)
    }

    /// Looks again at the files and groups that the rules in force name. False if they name none.
    pub fn refresh_rules(&self) -> bool {
        let hooks = || self.handle.shared.hooks();
        let rules = hooks().rules();
        let missed = |error: &dyn fmt::Display| {
            tracing::warn!(%error, "rules miss a change of files or groups");
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
        self.handle.shared.hooks().list_rules()
    }

    /// What the rules in force say to a connection, up to the one that decides.
    pub fn explain(&self, connection: &OpenedConnection) -> Vec<Verdict> {
        let rules = self.handle.shared.hooks().rules();
        rules::explain(&rules, connection, |path| self.cgroup(path))
    }

    /// Hosts that are near, so that connections to them go past vtld.
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
        // First no new connects come, then the threads end; what they still carry is reset.
        shared.hooks().close();
        self.links.clear();
        // A thread that has ended already needs no command.
        let _ = shared.commands.send(Command::Stop);
        let _ = shared.wake.write(1);
        shared.proxy.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Loads the programs, over the maps of a former daemon where these fit.
fn load(hook: &vtl_hook_config, maps: &[(String, OwnedFd)]) -> Result<Programs, HookerError> {
    match Programs::load(hook, maps) {
        Err(error) if !maps.is_empty() => {
            tracing::warn!(%error, "applications see addresses of the loopback: another version's maps");
            Programs::load(hook, &[])
        }
        loaded => loaded,
    }
}

/// Attaches what every hook needs: discovery to the group of vtld, the addresses to all processes,
/// since any may be the server that vtld connects to, and, where hosts may be near, what follows connections to them.
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

/// Each proxied connection takes two descriptors, and the customary limit is 1,024.
fn allow_many_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// A mark that no other program uses by accident.
fn random_mark() -> io::Result<u32> {
    Ok(getrandom::u32()? | 1)
}
