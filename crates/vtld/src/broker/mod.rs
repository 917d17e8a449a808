//! The broker: opens, ends and watches sessions, and runs their egress. One thread opens and ends sessions
//! (`control_broker/`), others run egress (`shard/`), or load grafts (`launcher.rs`); this module is the handle to them.

mod bounds;
mod by_tcp;
mod control_broker;
mod direct;
mod graft_pool;
mod interfaces;
mod launcher;
mod listeners;
mod meter;
mod peers;
mod raw;
mod ring_pool;
mod session;
mod sessions;
mod shard;
mod sockets;
mod source;
mod tunnel;

use std::{
    net::IpAddr,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender},
    },
    thread::JoinHandle,
    time::Duration,
};

use nix::sys::{
    epoll::{Epoll, EpollEvent},
    eventfd::{EfdFlags, EventFd},
};
use serde_json::Value;
use vtl_bpf::{anchor::FrameNamespace, plane::Ingress, pump::Choice, sessions::SessionTable};
use vtl_control::{
    Deployed, Destination, GivenUp, Grafts, Grant, SessionKey, SessionStatus, Status,
};

use vtl_core::{
    profile::{Profile, Source},
    reconfigure::Bounds,
};
use vtl_pool::key::PublicKey;
use vtl_proto::{carrier::GRAFT_PORT, frame::FlowName, intf};

use crate::{
    Scope,
    flows::{self, Auto, Desired},
    hooker::{
        self, Carrier, CarrierOptions, ClientFlow, HeldConnect, Pulse, ServerFlow, rules::Prefix,
    },
    identity::Identity,
    netmon::NetMonitor,
    option,
    selection::Selection,
    stacks,
};

use control_broker::{Connect, ControlBroker};
pub(crate) use graft_pool::spec_for_flows;
use launcher::Wanted;
pub use session::SessionSpec;
pub(crate) use session::WHOLE;
pub(crate) use shard::Doorbell;

/// Configuration of the broker and the data plane, fixed at start.
#[derive(Clone, Debug)]
pub struct Config {
    /// Hook for received packets.
    pub ingress: Ingress,
    /// Egress driver.
    pub driver: Choice,
    /// Network namespace in which the programs of live frames are attached; `None`: the daemon creates
    /// namespaces.
    pub frame_namespace: Option<Arc<FrameNamespace>>,
    /// Maximum packets in each of a session's rings: a power of two, at most 32,768. Short paths get less; a
    /// packet takes 2 KiB.
    pub ring_slots: u32,
    /// Sets of rings of each usual size kept in the pool, as creating one takes up to 0.2 s.
    pub stock: usize,
    /// Whether to seal the payload of sessions that this host opens for flows, if the peer supports it.
    pub seals_flows: bool,
    /// Memory quota of all rings, bytes. As it runs out, new sessions get smaller ones.
    pub ring_memory: u64,
    /// Memory quota of hooked flows' buffers, bytes. As it runs out, flows go by TCP alone.
    pub flow_memory: u64,
    /// Maximum number of concurrent sessions.
    pub max_sessions: usize,
    /// Hosts allowed to open sessions and to have flows carried; empty: all.
    pub from: Vec<Prefix>,
    /// The interfaces that VTL uses.
    pub scope: Scope,
    /// Number of shards: threads that run egress, each for its own sessions.
    pub shards: u32,
    /// The directory of graft packages.
    pub pool: PathBuf,
    /// The directory of the keys that sign them.
    pub keys: PathBuf,
}

/// Minimum of [`Config::flow_memory`] by default, whatever the machine's memory.
const MIN_FLOW_MEMORY: u64 = 64 << 20;

impl Default for Config {
    fn default() -> Self {
        Self {
            ingress: Ingress::Tcx,
            driver: Choice::Auto,
            frame_namespace: None,
            ring_slots: 16384,
            stock: 2,
            seals_flows: true,
            ring_memory: physical_memory() / 8,
            flow_memory: (physical_memory() / 8).max(MIN_FLOW_MEMORY),
            max_sessions: 1000,
            from: Vec::new(),
            scope: Scope::default(),
            shards: shards(),
            pool: "/var/lib/vtl/pool".into(),
            keys: "/etc/vtl/keys".into(),
        }
    }
}

/// Default number of shards: one for every two processors; the others receive, and move the bytes of flows.
fn shards() -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors as u32 / 2).clamp(1, intf::VTL_MAX_SHARDS)
}

/// Physical memory of this machine, bytes.
fn physical_memory() -> u64 {
    // SAFETY: plain calls; -1 means that the system does not say.
    let (pages, size) = unsafe {
        (
            libc::sysconf(libc::_SC_PHYS_PAGES),
            libc::sysconf(libc::_SC_PAGESIZE),
        )
    };
    u64::try_from(pages).unwrap_or(0) * u64::try_from(size).unwrap_or(0)
}

/// Identifies a connection to the control socket; its sessions and listeners end with it.
pub type Owner = u64;

/// A session handed to an aware application.
#[derive(Debug)]
pub struct Granted {
    /// The grant to send to the application.
    pub grant: Grant,
    /// This host's address.
    pub(crate) local: IpAddr,
    /// Transmit ring, receive ring, eventfd towards the daemon, eventfd from the daemon.
    pub rings: [OwnedFd; 4],
    /// Ring of events from the kernel; `None`: the daemon forwards all wake-ups.
    pub events: Option<OwnedFd>,
    /// The socket through which the application runs egress.
    pub caller: Option<OwnedFd>,
    /// The peer's authenticated key, if payload is sealed.
    pub(crate) shown: Option<PublicKey>,
    /// Payload is not sealed, though this host asked for it.
    pub(crate) is_clear: bool,
}

const MS: u64 = 1_000_000;
/// Frames that a session may send per turn.
const QUANTUM: u32 = 32;
/// Grace period before a session's entry and rings are reused: no program that still works on them runs this
/// long.
const GRACE_NS: u64 = 50_000_000;

/// Interval of checking whether an application that waits for a session has gone.
const GONE_CHECK: Duration = Duration::from_millis(200);

type Reply<T> = SyncSender<Result<T, String>>;

enum Command {
    Connect(Connect),
    Follow {
        owner: Owner,
        from: SessionKey,
        reply: Reply<Granted>,
    },
    Listen {
        owner: Owner,
        port: u16,
        reply: Reply<u64>,
    },
    Accept {
        owner: Owner,
        key: Option<u64>,
        reply: Reply<Granted>,
    },
    CloseSession {
        owner: Owner,
        aborted: bool,
    },
    GiveUp {
        owner: Owner,
        given_up: GivenUp,
    },
    Gone {
        owner: Owner,
    },
    Status {
        from: u32,
        reply: Reply<Status>,
    },
    Statistics {
        owner: Owner,
        reply: Reply<SessionStatus>,
    },
    Ask(Question),
    Deploy {
        wanted: Wanted,
        swap: bool,
        reply: Reply<Deployed>,
    },
    Remove {
        name: String,
        reply: Reply<()>,
    },
    Hooker(hooker::Handle),
    Stop,
}

/// Question whose answer needs the pool's directory to be read first.
enum Question {
    Grafts {
        reply: Reply<Grafts>,
    },
    Describe {
        name: String,
        reply: Reply<Value>,
    },
    Carries {
        options: CarrierOptions,
        reply: Reply<()>,
    },
}

/// Handle of the broker's thread. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    /// Set before the handle is published.
    sessions: Arc<OnceLock<Arc<SessionTable>>>,
    flows: flows::Handle,
    /// Heartbeat of the broker's thread.
    pulse: Arc<Pulse>,
    monitor: Arc<NetMonitor>,
}

impl Handle {
    fn send(&self, command: Command) {
        // Without the thread the daemon is stopping, which the command's reply channel reports.
        let _ = self.commands.send(command);
        let _ = self.wake.write(1);
    }

    fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, String> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.send(command(reply));
        answer
            .recv()
            .unwrap_or_else(|_| Err("the daemon is stopping".into()))
    }

    /// As [`Handle::ask`], for commands that may take long: gives up once the application has gone.
    fn ask_patiently<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
        gone: impl Fn() -> bool,
    ) -> Result<T, String> {
        let (reply, answer) = mpsc::sync_channel(1);
        self.send(command(reply));
        loop {
            match answer.recv_timeout(GONE_CHECK) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => return Err("the daemon is stopping".into()),
                Err(RecvTimeoutError::Timeout) if gone() => {
                    return Err("the application has gone".into());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Opens a session for an aware application; blocks until it is negotiated or the application has gone.
    ///
    /// # Errors
    /// Why there is no session, as a sentence.
    pub fn connect(
        &self,
        owner: Owner,
        to: Destination,
        request: &SessionSpec,
        gone: impl Fn() -> bool,
    ) -> Result<Granted, String> {
        let command = |reply| {
            Command::Connect(Connect {
                owner,
                to,
                request: request.clone(),
                reply,
            })
        };
        self.ask_patiently(command, gone)
    }

    /// Hands over the successor that the peer has opened for the application's session.
    ///
    /// # Errors
    /// The session has no successor.
    pub fn follow(&self, owner: Owner, from: SessionKey) -> Result<Granted, String> {
        self.ask(|reply| Command::Follow { owner, from, reply })
    }

    /// Listens for sessions at a port. Returns the key with which other connections may accept them.
    ///
    /// # Errors
    /// The port is taken, or 0, or vtld's own.
    pub fn listen(&self, owner: Owner, port: u16) -> Result<u64, String> {
        if port == GRAFT_PORT {
            return Err(format!("VTL port {port} is vtld's own: take another one"));
        }
        self.ask(|reply| Command::Listen { owner, port, reply })
    }

    /// Listens for the sessions of hooked flows, as [`Handle::listen`].
    ///
    /// # Errors
    /// The daemon is stopping.
    pub(crate) fn listen_for_flows(&self, owner: Owner) -> Result<u64, String> {
        let port = GRAFT_PORT;
        self.ask(|reply| Command::Listen { owner, port, reply })
    }

    /// Accepts the next session at the port of `key`, or else of the owner; blocks until there is one or the
    /// application has gone. The session then belongs to the owner.
    ///
    /// # Errors
    /// Nobody listens with that key; the owner does not listen.
    pub fn accept(
        &self,
        owner: Owner,
        key: Option<u64>,
        gone: impl Fn() -> bool,
    ) -> Result<Granted, String> {
        self.ask_patiently(|reply| Command::Accept { owner, key, reply }, gone)
    }

    /// As [`Handle::accept`]; blocks until there is a session or the listener has gone.
    ///
    /// # Errors
    /// As [`Handle::accept`].
    pub(crate) fn accept_for_flows(&self, owner: Owner, key: u64) -> Result<Granted, String> {
        let key = Some(key);
        self.ask(|reply| Command::Accept { owner, key, reply })
    }

    /// Closes the owner's session.
    pub fn close(&self, owner: Owner, aborted: bool) {
        self.send(Command::CloseSession { owner, aborted });
    }

    /// Releases the owner's session that a stateless switch has ended.
    pub fn give_up(&self, owner: Owner, given_up: GivenUp) {
        self.send(Command::GiveUp { owner, given_up });
    }

    /// Releases everything of an owner that has gone.
    pub fn gone(&self, owner: Owner) {
        self.send(Command::Gone { owner });
    }

    /// State of the data plane, of carriers, and of the sessions from an index on; without hooks.
    ///
    /// # Errors
    /// The daemon is stopping.
    pub fn status(&self, from: u32) -> Result<Status, String> {
        let status: Status = self.ask(|reply| Command::Status { from, reply })?;
        Ok(Status {
            carriers: self.flows.status(),
            ..status
        })
    }

    /// The session table, shared with the kernel's programs.
    pub(crate) fn sessions(&self) -> Option<&Arc<SessionTable>> {
        self.sessions.get()
    }

    /// The state of paths.
    pub(crate) fn monitor(&self) -> &Arc<NetMonitor> {
        &self.monitor
    }

    /// Handle of the thread of flows.
    pub(crate) fn flows(&self) -> &flows::Handle {
        &self.flows
    }

    /// State of the owner's session.
    ///
    /// # Errors
    /// The owner has no session, or the daemon is stopping.
    pub fn statistics(&self, owner: Owner) -> Result<SessionStatus, String> {
        self.ask(|reply| Command::Statistics { owner, reply })
    }

    /// All grafts of the pool, deployed or not, and its files that are refused.
    ///
    /// # Errors
    /// The daemon is stopping.
    pub fn grafts(&self) -> Result<Grafts, String> {
        self.ask(|reply| Command::Ask(Question::Grafts { reply }))
    }

    /// Deploys a graft of the pool, `NAME` or `NAME@VERSION`, to the kernel. `swap`: replaces another version,
    /// which must be deployed; open sessions keep their state if the two are compatible.
    ///
    /// # Errors
    /// The pool does not have it, or why it is refused. Deployed grafts are unchanged then.
    pub fn deploy(&self, name: String, swap: bool) -> Result<Deployed, String> {
        let wanted = Wanted::Named(name);
        self.ask(|reply| Command::Deploy {
            wanted,
            swap,
            reply,
        })
    }

    /// Deploys the graft of a package to the kernel, and adds the package to the pool.
    ///
    /// # Errors
    /// Why it is refused. Deployed grafts and the pool are unchanged then.
    pub fn deploy_package(&self, package: Vec<u8>, swap: bool) -> Result<Deployed, String> {
        let wanted = Wanted::Package(package);
        self.ask(|reply| Command::Deploy {
            wanted,
            swap,
            reply,
        })
    }

    /// Describes a graft of the pool.
    ///
    /// # Errors
    /// The pool does not have it.
    pub fn describe(&self, name: String) -> Result<Value, String> {
        self.ask(|reply| Command::Ask(Question::Describe { name, reply }))
    }

    /// Removes a graft from the kernel.
    ///
    /// # Errors
    /// It is not deployed, or sessions of applications use it.
    pub fn remove(&self, name: String) -> Result<(), String> {
        self.ask(|reply| Command::Remove { name, reply })
    }

    /// Checks that hooked connections can use this carrier, as far as the pool, or the file of stacks, decides.
    ///
    /// # Errors
    /// There is no such graft or stack, or it lacks what it needs: which ones there are.
    pub fn carries(&self, carrier: &Carrier) -> Result<(), String> {
        let options = match carrier {
            Carrier::Required(_, carrier) => return self.carries(carrier),
            Carrier::Graft(spec) => CarrierOptions::Graft(spec.clone()),
            Carrier::Services(wanted) => CarrierOptions::Services(*wanted),
            Carrier::Lossy(spec) => CarrierOptions::Lossy(spec.clone()),
            Carrier::Stack(spec) => return stacks::resolve(spec).map(drop),
            _ => return Ok(()),
        };
        self.ask(|reply| Command::Ask(Question::Carries { options, reply }))
    }

    /// What the conditions of rules on paths say, by association.
    pub(crate) fn rule_states(&self) -> Vec<flows::RuleState> {
        self.flows.rule_states()
    }

    /// Connects the Hooker to the broker and to the thread of flows.
    pub fn set_hooker(&self, hooker: hooker::Handle) {
        self.flows.set_hooker(hooker.clone(), self.clone());
        self.send(Command::Hooker(hooker));
    }

    /// Ends all sessions and flows, and the threads.
    pub fn stop(&self) {
        self.flows.stop();
        self.send(Command::Stop);
    }
}

impl hooker::Broker for Handle {
    fn knows(&self, host: IpAddr) -> bool {
        self.flows.knows(host)
    }

    fn serves(&self, host: IpAddr) -> bool {
        self.flows.serves(host)
    }

    fn is_there(&self) -> bool {
        self.flows.is_there() && self.pulse.is_there()
    }

    fn expect(&self, source: &Source, may_explore: bool) -> (Option<Profile>, Option<u8>) {
        self.flows.expect(source, may_explore)
    }

    fn name_flow(&self, held: &HeldConnect) -> FlowName {
        let (local, peer) = (held.src().ip(), held.dest().ip());
        let desired = Desired {
            kind: held.kind(),
            options: held.options().cloned(),
            encrypted: held.requires_encryption(),
            rule: held.rule().cloned(),
            tolerant: held.is_tolerant(),
            auto: auto(held.is_auto(), held.expected(), held.bounds()),
        };
        self.flows
            .name_flow(local, peer, desired, held.requires_carrier())
    }

    fn client(&self, flow: ClientFlow) {
        let desired = Desired {
            kind: flow.kind,
            options: flow.options.clone(),
            encrypted: flow.name.requires_encryption(),
            rule: flow.rule.clone(),
            tolerant: flow.tolerant,
            auto: auto(flow.auto, flow.expected, flow.bounds),
        };
        self.flows.opened(flow, desired);
    }

    fn server(&self, flow: ServerFlow) {
        let name = flow.name;
        self.flows.steered(flow, name);
    }
}

/// The mark of flows whose carrier is chosen, with the profile that they are expected to have, and what they explore.
fn auto(
    is_auto: bool,
    (profile, explores): (Option<Profile>, Option<u8>),
    bounds: Bounds,
) -> Option<Auto> {
    is_auto.then_some(Auto {
        profile,
        bounds,
        explores,
    })
}

/// Loads the data plane in the calling thread's network namespace and starts the broker.
///
/// # Errors
/// The kernel refused an operation.
pub fn start(
    config: Config,
    identity: Identity,
    selection: Selection,
    monitor: Arc<NetMonitor>,
) -> anyhow::Result<(Handle, JoinHandle<()>)> {
    let (commands, inbox): (_, Receiver<Command>) = mpsc::channel();
    let wake = Arc::new(event()?);
    let pulse = Arc::new(Pulse::default());
    let identity = Arc::new(identity);
    let handle = Handle {
        commands,
        wake: Arc::clone(&wake),
        sessions: Arc::default(),
        flows: flows::Handle::new(flows::Limits {
            identity: Arc::clone(&identity),
            memory: config.flow_memory,
            from: config.from.clone(),
            seals: config.seals_flows,
            scope: config.scope.clone(),
            selection: Arc::new(selection),
        }),
        pulse: Arc::clone(&pulse),
        monitor: Arc::clone(&monitor),
    };
    let (ready, started) = mpsc::sync_channel(1);
    // Created on the thread that uses it: libbpf's objects stay there.
    let thread = std::thread::Builder::new()
        .name("vtl-broker".into())
        .spawn(
            move || match ControlBroker::new(config, identity, wake, inbox, pulse, monitor) {
                Ok(broker) => {
                    let _ = ready.send(Ok(broker.sessions()));
                    broker.run();
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            },
        )?;
    let _ = handle.sessions.set(started.recv()??);
    Ok((handle, thread))
}

/// With `on`, closing the socket resets the connection.
pub(crate) fn set_linger(socket: &impl AsFd, on: bool) {
    // Cannot fail on a TCP socket.
    let _ = option::abort_on_close(socket, on);
}

/// A non-blocking eventfd.
fn event() -> nix::Result<EventFd> {
    EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)
}

/// CLOCK_MONOTONIC in ns: the clock of `bpf_ktime_get_ns`.
fn now_ns() -> u64 {
    let t = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .expect("every Linux has this clock");
    t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64
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

/// Unpredictable bytes.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0_u8; N];
    getrandom::fill(&mut bytes).expect("the kernel always gives random bytes");
    bytes
}

/// 64 unpredictable bits, not all 0: a token of 0 means none.
pub(crate) fn random_token() -> u64 {
    u64::from_ne_bytes(random()).max(1)
}
