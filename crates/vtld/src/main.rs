//! VTL's daemon: one per network namespace.

mod log;

use std::{
    fs::{self, File, Permissions},
    io::IsTerminal,
    os::fd::OwnedFd,
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow, bail};
use caps::{CapSet, Capability};
use clap::{Parser, ValueEnum};
use libbpf_rs::PrintLevel;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::signal::{SigSet, Signal},
};
use vtl_bpf::{anchor::FrameNamespace, plane::Ingress, pump::Choice};
use vtl_control::{Client, Done, Request};
use vtl_proto::intf;
use vtld::{
    Scope, broker,
    control::Control,
    handover::{self, Left},
    hooker::{self, Hooker, rules::Prefix},
    identity::Identity,
    netmon::{self, Loopback, NetMonitor},
    panics,
    rules::RulesManager,
    selection::Selection,
};

/// Changes this host's transport protocol: loads grafts into the kernel, opens sessions with peers,
/// and carries the connections of hooked applications.
///
/// Needs root, or the unit's user with its capabilities. Runs in the foreground, or under systemd; `vtl doctor` says what the kernel lacks.
/// When it ends, everything it loaded is gone and new connections are plain TCP, unless another one takes over.
#[derive(Parser)]
#[command(version, about, long_about)]
struct Args {
    /// Control socket
    #[arg(long, env = "VTL_SOCKET", default_value = vtl_control::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Group whose members may use the control socket
    #[arg(long, default_value = "vtl")]
    group: String,
    /// How packets leave
    #[arg(long, value_enum, default_value_t)]
    driver: Driver,
    /// Where packets are received
    #[arg(long, value_enum, default_value_t)]
    ingress: Hook,
    /// Most packets per ring (2 KiB each), a power of two; sessions over short paths get fewer
    #[arg(long, default_value_t = broker::Config::default().ring_slots, value_parser = slots)]
    ring_slots: u32,
    /// Sets of rings of each usual size kept ready for new sessions
    #[arg(long, default_value_t = broker::Config::default().stock)]
    stock: usize,
    /// Memory for all rings together, MiB; an eighth of the machine's unless given
    #[arg(long)]
    ring_memory: Option<u64>,
    /// Memory for what hooked flows wait to read or to have confirmed, MiB; an eighth of the
    /// machine's unless given. As it runs out, flows go by TCP alone
    #[arg(long)]
    flow_memory: Option<u64>,
    /// Sessions at a time, at most 65,536; room for each takes 12 KiB
    #[arg(long, default_value_t = broker::Config::default().max_sessions, value_parser = sessions)]
    max_sessions: usize,
    /// Hosts that may open sessions here, and whose connections to hooked ports VTL carries: an address
    /// or prefix, may be repeated; all unless given. Others have plain TCP
    #[arg(long, value_name = "PREFIX")]
    from: Vec<Prefix>,
    /// Interfaces that VTL is for, may be repeated; all unless given. On others it is as if vtld were not
    /// there: plain TCP, and nothing listens. An interface of that name may come later
    #[arg(long, value_name = "NAME", value_parser = interface)]
    interface: Vec<String>,
    /// Milliseconds of round trip up to which a host counts as near. Where its path is clean, too, connections that
    /// name no carrier go past vtld, as TCP is best there: in the clear unless they require encryption. 0: all are
    /// carried
    #[arg(long, value_name = "MS", default_value = "0.5", value_parser = milliseconds)]
    near: Duration,
    /// Open sessions for TCP programs in the clear: what they send is as private as without VTL
    #[arg(long)]
    no_encryption: bool,
    /// Threads that send, at most 64, each for sessions of its own [default: one for every two
    /// processors]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(intf::VTL_MAX_SHARDS)))]
    shards: Option<u32>,
    /// Directory of graft packages (*.vtlg)
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vtl/pool")]
    pool: PathBuf,
    /// Directory of the public keys (*.pub) that packages must be signed with
    #[arg(long, value_name = "DIR", default_value = "/etc/vtl/keys")]
    keys: PathBuf,
    /// File of peers: whose keys are whose, and which are taken
    #[arg(long, env = "VTL_PEERS", value_name = "FILE", default_value = vtld::identity::DEFAULT_PEERS)]
    peers: PathBuf,
    /// Directory of this host's key (host.key, made if there is none), of peers' that it has learned, and of `vtl select
    /// off` and `vtl select learn off`
    #[arg(long, env = "VTL_STATE", value_name = "DIR", default_value = vtld::identity::DEFAULT_STATE)]
    state: PathBuf,
    /// File of rules, and beside it stacks.toml, which declares stacks and what is taken of others' (docs/stacks.md); read
    /// again at SIGHUP and by `vtl rule reload`
    #[arg(long, value_name = "FILE", default_value = vtld::rules::DEFAULT_FILE)]
    rules: PathBuf,
    /// Directory of layers compiled outside of VTL (NAME.so, docs/stacks.md), root's alone
    #[arg(long, value_name = "DIR", default_value = "/usr/lib/vtl/layers")]
    layers: PathBuf,
    /// Show delay, loss and bandwidth of the paths (vtl path) to Prometheus, at http://ADDRESS/metrics: a
    /// loopback address and a port, like 127.0.0.1:9300. All programs of this host can read them
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<Loopback>,
    /// Take over from the daemon that runs: its connections and hooks go on here
    #[arg(long)]
    take_over: bool,
    /// Be the process that vtld starts for carriers of a kind, whose socket is standard input
    #[arg(long, hide = true, value_name = "KIND")]
    carriers: Option<String>,
    /// What to log: error, warn, info, debug, or a tracing filter
    #[arg(long, env = "VTL_LOG", default_value = "info")]
    log: String,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Driver {
    /// XDP live frames where the interface can, else tc
    #[default]
    Auto,
    /// XDP live frames: highest goodput, needs native XDP
    Live,
    /// Packet socket and tcx: any interface
    Tc,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Hook {
    /// Traffic control: costs other traffic nothing
    #[default]
    Tcx,
    /// XDP: a little faster for VTL, slower for others on virtual interfaces
    Xdp,
}

fn slots(text: &str) -> Result<u32, String> {
    let max = intf::VTL_MAX_WINDOW;
    match text.parse() {
        Ok(n) if (64..=max).contains(&n) && u32::is_power_of_two(n) => Ok(n),
        _ => Err(format!("must be a power of two from 64 to {max}")),
    }
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    let parsed: Option<f64> = text.parse().ok().filter(|ms| (0.0..=1000.0).contains(ms));
    let ms = parsed.ok_or("must be a number from 0 to 1000")?;
    Ok(Duration::from_secs_f64(ms / 1e3))
}

fn sessions(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=65_536).contains(&n) => Ok(n),
        _ => Err("must be a number from 1 to 65536".into()),
    }
}

fn interface(text: &str) -> Result<String, String> {
    match text {
        "lo" => Err("VTL is for other hosts, which are not behind the loopback".into()),
        _ if text.is_empty() || text.len() >= libc::IF_NAMESIZE => {
            Err(format!("must have 1 to {} bytes", libc::IF_NAMESIZE - 1))
        }
        name => Ok(name.to_owned()),
    }
}

/// Poll interval while another daemon ends.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long another daemon may take to end once it has handed over.
const HANDED_OVER_PATIENCE: Duration = Duration::from_secs(120);

/// Raises the limit of open files: a session takes one descriptor, two without io_uring, and eight while it is
/// opened, and the usual limits are 1,024 and half a million.
fn allow_descriptors(sessions: usize) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let wanted = sessions as u64 * 2 + (1 << 18);
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| {
        let max = hard.max(wanted);
        setrlimit(Resource::RLIMIT_NOFILE, max, max)
            .or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, hard, hard))
    });
    if let Err(error) = raised {
        tracing::debug!(%error, "daemon: cannot raise the limit of open files");
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.carriers.is_none() && !is_privileged() {
        eprintln!(
            "vtld: loading programs into the kernel needs root: use sudo, or systemctl start vtld"
        );
        return ExitCode::from(77);
    }
    vtld::carriers::use_layers(args.layers.clone());
    let done = match args.carriers {
        Some(_) => carry(&args),
        None => run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vtld: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether this process is root, or has the capabilities from the service manager.
fn is_privileged() -> bool {
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    nix::unistd::geteuid().is_root() || has(Capability::CAP_BPF) && has(Capability::CAP_NET_ADMIN)
}

/// Drops all capabilities that the daemon does not use. Child processes have none, unless it is root, whose
/// programs regain them. Call it before any thread starts, since threads inherit them. The systemd unit omits
/// those with comments in brackets.
fn drop_privileges() -> Result<(), caps::errors::CapsError> {
    let needed = [
        Capability::CAP_BPF,              // programs and maps
        Capability::CAP_PERFMON,          // the verifier's larger freedoms
        Capability::CAP_NET_ADMIN,        // attaching, live frames, marks
        Capability::CAP_NET_RAW,          // raw and packet sockets
        Capability::CAP_DAC_OVERRIDE,     // control groups of root and of other users
        Capability::CAP_NET_BIND_SERVICE, // the port that an application bound
        Capability::CAP_SYS_ADMIN,        // (a namespace for live frames, mounting cgroup2)
        Capability::CAP_SYS_RESOURCE,     // (as many descriptors as flows need)
        Capability::CAP_CHOWN,            // (the socket's group)
    ];
    // Only root can, and only root's programs regain capabilities of that set.
    if caps::has_cap(None, CapSet::Effective, Capability::CAP_SETPCAP)? {
        for capability in caps::all() {
            if !needed.contains(&capability) && caps::has_cap(None, CapSet::Bounding, capability)? {
                caps::drop(None, CapSet::Bounding, capability)?;
            }
        }
    }
    // A container may have fewer; a missing one is reported where it is needed.
    let ours = caps::read(None, CapSet::Permitted)?;
    let needed = needed.into_iter().filter(|c| ours.contains(c)).collect();
    caps::set(None, CapSet::Effective, &needed)?;
    caps::set(None, CapSet::Permitted, &needed)?;
    caps::clear(None, CapSet::Ambient)?;
    caps::clear(None, CapSet::Inheritable)
}

/// Lock of this network namespace's daemon: two would steal each other's packets. Released with the process,
/// however it ends.
struct Claim {
    path: PathBuf,
    _lock: Flock<File>,
}

impl Claim {
    /// `patience`: how long another daemon may take to end.
    fn new(patience: Duration) -> anyhow::Result<Self> {
        let socket = Path::new(vtl_control::DEFAULT_SOCKET);
        let folder = socket.parent().unwrap_or(Path::new("/run"));
        // Owned by root or by the unit's user, so that nobody else can claim it.
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        let number = fs::metadata("/proc/self/ns/net")?.ino();
        let path = folder.join(format!("net-{number}.lock"));
        let began = Instant::now();
        loop {
            // Mode 0600: whoever can open it can lock it.
            let file = File::options()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&path)
                .and_then(|file| {
                    // Unless it is another user's.
                    if file.metadata()?.mode() & 0o077 != 0 {
                        file.set_permissions(Permissions::from_mode(0o600))?;
                    }
                    Ok(file)
                })
                .with_context(|| format!("cannot write {}", path.display()))?;
            let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((_, Errno::EWOULDBLOCK)) if began.elapsed() < patience => {
                    std::thread::sleep(POLL_INTERVAL);
                    continue;
                }
                Err((_, Errno::EWOULDBLOCK)) => {
                    bail!("another vtld runs in this network namespace: stop it first")
                }
                Err((_, error)) => {
                    return Err(error).with_context(|| format!("cannot lock {}", path.display()));
                }
            };
            // Retry if its owner has just removed it.
            if fs::metadata(&path).is_ok_and(|m| lock.metadata().is_ok_and(|l| l.ino() == m.ino()))
            {
                return Ok(Self { path, _lock: lock });
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Receives the state of the former daemon: the running one, or one whose state the service manager has kept.
/// Returns how long it may take to end, too.
fn take_over(args: &Args, stored: Option<OwnedFd>) -> anyhow::Result<(Option<Left>, Duration)> {
    let (socket, patience) = if args.take_over {
        let running = Client::connect(&args.socket)?;
        let (Done {}, mut sockets) = running.call_with_descriptors(&Request::TakeOver)?;
        let socket = sockets
            .pop()
            .context("the running daemon cannot be taken over")?;
        (Some(socket), HANDED_OVER_PATIENCE)
    } else {
        (stored, Duration::ZERO)
    };
    let Some(socket) = socket else {
        return Ok((None, patience));
    };
    match handover::receive(&socket) {
        Ok(left) => Ok((Some(left), patience)),
        Err(error) => {
            // The former daemon's connections are lost; new ones can still be carried.
            tracing::error!(%error, "handover: cannot take over: the former daemon's connections are lost");
            Ok((None, patience))
        }
    }
}

/// Hands connections and hooks over to the daemon that takes over, or to the service manager for the next one.
/// Without either they end.
fn hand_over(
    successor: Option<OwnedFd>,
    hooker: &Hooker,
    broker: &broker::Handle,
    rules: &RulesManager,
) {
    let handed = match successor {
        Some(to) => handover::leave(to, hooker, broker, rules),
        None if handover::has_manager() => handover::channel().and_then(|(ours, theirs)| {
            let connections = handover::leave(ours, hooker, broker, rules)?;
            handover::store(&theirs)?;
            Ok(connections)
        }),
        None => return,
    };
    match handed {
        Ok(connections) => tracing::info!(connections, "handover: connections handed over"),
        Err(error) => tracing::error!(%error, "handover: failed: the connections end"),
    }
}

/// Configuration of the broker.
fn config(args: &Args, scope: Scope, frames: Option<OwnedFd>) -> broker::Config {
    broker::Config {
        frame_namespace: frames.map(FrameNamespace::new).map(Arc::new),
        ingress: match args.ingress {
            Hook::Tcx => Ingress::Tcx,
            Hook::Xdp => Ingress::Xdp,
        },
        driver: match args.driver {
            Driver::Auto => Choice::Auto,
            Driver::Live => Choice::Live,
            Driver::Tc => Choice::Tc,
        },
        ring_slots: args.ring_slots,
        stock: args.stock,
        ring_memory: args.ring_memory.map_or_else(
            || broker::Config::default().ring_memory,
            |mib| mib.saturating_mul(1 << 20),
        ),
        flow_memory: args.flow_memory.map_or_else(
            || broker::Config::default().flow_memory,
            |mib| mib.saturating_mul(1 << 20),
        ),
        seals_flows: !args.no_encryption,
        max_sessions: args.max_sessions,
        from: args.from.clone(),
        scope,
        shards: args
            .shards
            .unwrap_or_else(|| broker::Config::default().shards),
        pool: args.pool.clone(),
        keys: args.keys.clone(),
    }
}

/// Logs to standard error; flushes when the result is dropped.
fn start_log(args: &Args) -> anyhow::Result<log::Written> {
    let (log, written) = log::start(std::io::stderr()).context("no thread can be started")?;
    tracing_subscriber::fmt()
        // The SCTP library logs every bad packet.
        .with_env_filter(format!("sctp_proto=off,{}", args.log))
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(move || log.clone())
        .init();
    Ok(written)
}

/// Runs as a process of carriers.
fn carry(args: &Args) -> anyhow::Result<()> {
    vtld::carriers::drop_privileges().context("cannot give up privileges")?;
    let _written = start_log(args)?;
    panics::watch_carriers();
    vtld::carriers::run().context("no process of carriers")
}

fn run(args: &Args) -> anyhow::Result<()> {
    drop_privileges().context("cannot give up privileges")?;
    // Blocked in every thread, so that only the wait below sees them.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGHUP);
    signals.thread_block()?;
    let _written = start_log(args)?;
    libbpf_rs::set_print(Some((PrintLevel::Warn, |_, says| {
        tracing::debug!("{}", says.trim_end());
    })));
    panics::watch();
    allow_descriptors(args.max_sessions);

    // Before the take-over: an error in a file must not lose connections.
    let identity = Identity::open(&args.state, &args.peers).map_err(|error| anyhow!(error))?;
    let given = handover::given();
    let (mut left, patience) = take_over(args, given.left)?;
    // After the take-over: the former daemon may have been told until then.
    let selection = Selection::open(&args.state);
    if !selection.is_on() {
        tracing::info!("select: off: connections of the carrier auto go by TCP (vtl select on)");
    }
    let control = Control::bind(&args.socket, &args.group)?;
    let _claim = Claim::new(patience)?;
    let monitor = Arc::new(NetMonitor::default());
    if let Some(at) = args.metrics {
        // The daemon before has let go of the port by now. Anybody may have taken it: connections matter more.
        if let Err(error) = netmon::serve(at, Arc::clone(&monitor)) {
            tracing::error!(%error, "metrics: cannot serve --metrics {at}: continues without");
        }
    }
    let scope = Scope::new(args.interface.clone());
    let config = config(args, scope.clone(), given.frames);
    let (broker, thread) = broker::start(config, identity, selection, Arc::clone(&monitor))
        .context("the data plane does not start (try: vtl doctor)")?;
    let hooks = hooker::Config {
        near: args.near,
        scope,
        monitor,
        ..Default::default()
    };
    let hooker = Hooker::start(hooks, Arc::new(broker.clone()), &mut left)
        .context("the Hooker does not start (try: vtl doctor)")?;
    broker.set_hooker(hooker.handle());
    let is_heir = left.is_some();
    let installed = left.as_mut().map(handover::Left::take_rules);
    match left {
        Some(left) => {
            tracing::info!(
                connections = left.connections(),
                "handover: connections taken over"
            );
            left.resume(&hooker, &broker);
        }
        None => hooker.begin(),
    }
    let hooker = Arc::new(hooker);
    let sessions = args.max_sessions;
    // Errors in the rules end the daemon, since it would seem to work without them; not after a take-over,
    // which must not lose connections.
    let rules = RulesManager::start(
        args.rules.clone(),
        broker.clone(),
        Arc::downgrade(&hooker),
        is_heir,
        installed.unwrap_or_default(),
    )
    .map_err(|error| anyhow!(error))?;
    hooker.forget_former();
    control.serve(
        broker.clone(),
        Arc::downgrade(&hooker),
        Arc::clone(&rules),
        sessions,
    )?;
    tracing::info!(socket = %args.socket.display(), "ready");
    handover::ready();

    let signal = loop {
        match signals.wait()? {
            Signal::SIGHUP => match rules.reload() {
                Ok(count) => tracing::info!(count, "rules: read"),
                Err(error) => tracing::error!(%error, "rules: stay as they were"),
            },
            signal => break signal,
        }
    };
    tracing::info!(%signal, "stopping");
    // In order: no new requests, then no hooks, then no sessions.
    let successor = control.successor();
    drop(control);
    hand_over(successor, &hooker, &broker, &rules);
    drop(hooker);
    broker.stop();
    let _ = thread.join();
    if panics::happened() {
        bail!("a thread has panicked");
    }
    Ok(())
}
