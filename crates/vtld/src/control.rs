//! The control socket: JSON requests of `vtl` and of the client library. Each request runs on a thread of its
//! own, since it may block; an idle connection has none, since each application's session keeps one open.
//!
//! Members of the socket's group may read the status, run their own programs hooked, and have sessions. What
//! affects others on the host (hooks, grafts) is for root.

use std::{
    collections::HashMap,
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        signal::{Signal, kill},
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, listen, socket,
        },
    },
    unistd::{Group, Pid},
};
use serde::Serialize;
use serde_json::Value;
use vtl_control::{
    self as protocol, CarrierSpec, Client, Deployed, Done, FlowList, FlowStatus, Hook, HookAdded,
    HookTarget, Hooks, Listening, Refusal, Request, RuleCount, SessionRequest, Status, What,
};

use crate::{
    broker::{self, Granted, Owner},
    caller::Caller,
    events::{self, Wanted, emit},
    handover,
    hooker::{self, Carrier, Gateway, Hooked, Hooker},
    option::netns_cookie,
    panics::test_point,
    rules::{RulesManager, is_regular},
};

/// Maximum of concurrent connections, besides those of sessions.
const SPARE_CLIENTS: usize = 1024;
/// Connections reserved for root, so that the daemon can always be inspected and stopped.
const FOR_ROOT: usize = 64;
/// Time limit of releasing what closed connections held: threads that wait for a session notice within 0.2 s.
const SETTLE: Duration = Duration::from_secs(1);
/// Epoll key of the listening socket, among the owners.
const LISTENER: u64 = 0;

/// The listening control socket; dropping it removes its file.
pub struct Control {
    socket: OwnedFd,
    path: PathBuf,
    successor: Successor,
}

/// Socket for the handover to the daemon that takes over.
type Successor = Arc<Mutex<Option<OwnedFd>>>;

/// Context of requests.
struct Service {
    /// Cookie of our network namespace.
    namespace: Option<u64>,
    broker: broker::Handle,
    /// Weak, so that pending requests do not keep it alive.
    hooker: Weak<Hooker>,
    rules: Arc<RulesManager>,
    /// Watches connections for requests, one-shot until answered.
    epoll: Epoll,
    clients: Mutex<HashMap<Owner, Arc<Connection>>>,
    /// Maximum number of connections.
    max_clients: usize,
    successor: Successor,
}

/// A client's connection.
struct Connection {
    socket: OwnedFd,
    caller: Caller,
}

impl Control {
    /// Binds the socket, and gives access to a group, if it exists.
    ///
    /// # Errors
    /// Another daemon answers there, or the path is not writable.
    pub fn bind(path: &Path, group: &str) -> anyhow::Result<Self> {
        if matches!(
            Client::connect(path),
            Ok(_) | Err(vtl_control::Error::Silent(_))
        ) {
            bail!(
                "another vtld answers at {}: stop it, or choose another --socket",
                path.display()
            );
        }
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
        }
        let other = |file: fs::Metadata| !file.file_type().is_socket();
        if fs::symlink_metadata(path).is_ok_and(other) {
            bail!(
                "{} is no socket, and would be replaced: choose another --socket",
                path.display()
            );
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot replace {}", path.display()));
            }
            _ => {}
        }
        let flags = SockFlag::SOCK_CLOEXEC;
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)
            .with_context(|| format!("cannot bind {}", path.display()))?;
        // Restrict access before anybody can connect: listen comes last.
        fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
        if let Ok(Some(Group { gid, .. })) = Group::from_name(group)
            && fs::metadata(path)?.gid() != gid.as_raw()
        {
            chown(path, None, Some(gid.as_raw())).with_context(|| {
                format!(
                    "cannot give {} to the group {group} (of a unit with a user, that must be its Group=)",
                    path.display()
                )
            })?;
        }
        listen(&fd, Backlog::new(128)?)?;
        Ok(Self {
            socket: fd,
            path: path.to_path_buf(),
            successor: Successor::default(),
        })
    }

    /// Serves requests until the process ends, with room for `sessions` sessions' connections.
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn serve(
        &self,
        broker: broker::Handle,
        hooker: Weak<Hooker>,
        rules: Arc<RulesManager>,
        sessions: usize,
    ) -> io::Result<()> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let socket = self.socket.try_clone()?;
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER))?;
        let service = Arc::new(Service {
            namespace: netns_cookie(&self.socket).ok(),
            broker,
            hooker,
            rules,
            epoll,
            clients: Mutex::default(),
            max_clients: sessions + SPARE_CLIENTS,
            successor: Arc::clone(&self.successor),
        });
        thread::Builder::new()
            .name("vtl-control".into())
            .spawn(move || service.run(&socket))?;
        Ok(())
    }

    /// Takes the socket for the handover, if another daemon has asked to take over: this process then gets
    /// SIGTERM.
    pub fn successor(&self) -> Option<OwnedFd> {
        let mut successor = self
            .successor
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        successor.take()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Message and descriptors of an answer.
type Answer = Result<(Value, Vec<OwnedFd>), Refusal>;

fn plain(answer: impl Serialize) -> Answer {
    Ok((protocol::to_message(&answer)?, Vec::new()))
}

impl Service {
    fn run(self: Arc<Self>, listener: &OwnedFd) {
        let mut next_owner = LISTENER + 1;
        let mut found = [EpollEvent::empty(); 64];
        loop {
            let count = self.epoll.wait(&mut found, EpollTimeout::NONE).unwrap_or(0);
            test_point();
            for event in &found[..count] {
                match event.data() {
                    LISTENER => {
                        self.accept_client(listener, next_owner);
                        next_owner += 1;
                    }
                    owner => self.start(owner),
                }
            }
        }
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<Owner, Arc<Connection>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts a connection, or closes it if a quota is exceeded: of all, or of its user.
    fn accept_client(&self, listener: &OwnedFd, owner: Owner) {
        let socket = match accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            // SAFETY: accept made this descriptor for us alone.
            Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
            Err(error) => {
                tracing::warn!(%error, "control socket: cannot accept");
                thread::sleep(Duration::from_millis(50));
                return;
            }
        };
        let Ok(caller) = Caller::of(&socket, self.namespace) else {
            return;
        };
        let mut clients = self.clients();
        let theirs = |c: &&Arc<Connection>| c.caller.uid == caller.uid;
        let is_full = if caller.is_root() {
            clients.len() >= self.max_clients
        } else {
            clients.len() >= self.max_clients - FOR_ROOT
                || clients.values().filter(theirs).count() >= self.max_clients / 2
        };
        if is_full {
            return;
        }
        let connection = Arc::new(Connection { socket, caller });
        clients.insert(owner, Arc::clone(&connection));
        drop(clients);
        if let Err(error) = self.epoll.add(&connection.socket, once(owner)) {
            tracing::warn!(%error, "control socket: cannot watch a connection: closed");
            self.clients().remove(&owner);
        }
    }

    /// Answers a connection's request on a new thread.
    fn start(self: &Arc<Self>, owner: Owner) {
        let Some(connection) = self.clients().get(&owner).map(Arc::clone) else {
            return;
        };
        let service = Arc::clone(self);
        let work = move || {
            let goes_on = service.handle_request(&connection, owner)
                && service
                    .epoll
                    .modify(&connection.socket, &mut once(owner))
                    .is_ok();
            if !goes_on {
                service.forget(owner);
            }
        };
        let started = thread::Builder::new()
            .name("vtl-client".into())
            .stack_size(256 << 10)
            .spawn(work);
        if let Err(error) = started {
            tracing::warn!(%error, "control socket: cannot start a thread for a request: connection closed");
            self.forget(owner);
        }
    }

    /// Releases what a connection held, then the connection.
    fn forget(&self, owner: Owner) {
        self.broker.gone(owner);
        self.clients().remove(&owner);
    }

    /// Listens on a port. Before it is taken for another's, what connections held that have been closed by now is
    /// released: a receiver that closes its port gets it again at once, as with TCP, though each connection has a thread
    /// of its own.
    fn listen(&self, owner: Owner, port: u16) -> Result<u64, String> {
        let listen = || self.broker.listen(owner, port);
        listen().or_else(|_| {
            self.settle();
            listen()
        })
    }

    /// Waits until what connections held that have been closed by now is released.
    fn settle(&self) {
        let mut closed: Vec<_> = (self.clients().iter())
            .filter(|(_, connection)| hung_up(&connection.socket))
            .map(|(owner, _)| *owner)
            .collect();
        let give_up = Instant::now() + SETTLE;
        loop {
            closed.retain(|owner| self.clients().contains_key(owner));
            if closed.is_empty() || Instant::now() >= give_up {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Answers one request. False if the connection has ended.
    fn handle_request(&self, connection: &Connection, owner: Owner) -> bool {
        let client = &connection.socket;
        let mut ends = false;
        let answer = match protocol::receive(client.as_raw_fd()) {
            Ok(Some((request, descriptors))) => {
                let gone = || hung_up(client);
                Request::parse(&request)
                    .map_err(|bad| bad.to_string().into())
                    .and_then(|request| {
                        ends = request == Request::TakeOver;
                        self.answer(request, descriptors, &connection.caller, owner, gone)
                    })
            }
            Err(error @ protocol::Error::Malformed(_)) => Err(error.to_string().into()),
            Ok(None) | Err(_) => return false,
        };
        let (message, descriptors) =
            answer.unwrap_or_else(|refusal| (refusal.to_message(), Vec::new()));
        let fds: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        let is_sent = protocol::send(client.as_raw_fd(), &message, &fds).is_ok();
        if ends && !fds.is_empty() {
            if is_sent {
                // Only after the successor has the socket.
                let _ = kill(Pid::this(), Signal::SIGTERM);
            } else {
                // It has given up waiting: nobody takes over.
                let successor = self.successor.lock();
                successor.unwrap_or_else(PoisonError::into_inner).take();
            }
        }
        is_sent
    }

    /// Parses and checks the carrier of a hook. `port`: for connections that a server accepts.
    fn carrier(&self, spec: &CarrierSpec, port: bool) -> Result<Carrier, String> {
        let carrier = Carrier::wanted(spec, port)?;
        self.broker.carries(&carrier)?;
        Ok(carrier)
    }

    /// Lists flows from a number on, as many as fit into one message.
    fn flows(&self, from: u64, caller: &Caller) -> FlowList {
        let FlowList { flows, more } = self.broker.flows().list(from);
        let flows = flows.into_iter().map(|flow| redacted(flow, caller));
        FlowList {
            flows: flows.collect(),
            more,
        }
    }

    /// Executes a request and returns the answer. `descriptors` came with the request; `gone`: whether the
    /// client has hung up.
    fn answer(
        &self,
        request: Request,
        descriptors: Vec<OwnedFd>,
        caller: &Caller,
        owner: Owner,
        gone: impl Fn() -> bool,
    ) -> Answer {
        let root = |command| caller.require_root(command);
        match request {
            Request::Status { from } => plain(self.status(from)?),
            Request::GraftList => plain(self.broker.grafts()?),
            Request::GraftShow { name } => plain(self.broker.describe(name)?),
            Request::GraftDeploy { name } => {
                root("graft deploy")?;
                plain(self.load(name, descriptors, false)?)
            }
            Request::GraftSwap { name } => {
                root("graft swap")?;
                plain(self.load(name, descriptors, true)?)
            }
            Request::GraftRemove { name } => {
                root("graft remove")?;
                self.broker.remove(name)?;
                plain(Done {})
            }
            Request::FlowList { from } => plain(self.flows(from, caller)),
            Request::FlowShow { id } => plain(redacted(self.broker.flows().show(id)?, caller)),
            Request::FlowMove { id, carrier, for_s } => {
                root("flow move")?;
                let stay = for_s.map(|s| Duration::from_secs(s.get().into()));
                plain(self.broker.flows().move_flow(id, carrier, stay)?)
            }
            request @ Request::Events { .. } => happened(request, caller, gone),
            Request::PathList { from } => plain(self.broker.monitor().list(from)),
            Request::PathShow { peer } => plain(self.broker.monitor().report_with_link(peer)?),
            request @ (Request::PeerList { .. }
            | Request::PeerTrust(_)
            | Request::PeerForget { .. }) => self.peer(request, caller),
            Request::HookList => plain(Hooks {
                hooks: hooks(&*self.hooker()?),
            }),
            Request::HookRun { carrier } => plain(self.hook_process(caller, &carrier)?),
            Request::HookAdd { target, carrier } => {
                root("hook add")?;
                plain(self.add_hook(target, &carrier)?)
            }
            Request::HookRemove { target } => {
                root("hook remove")?;
                self.remove_hook(&target)?;
                plain(Done {})
            }
            request @ (Request::GatewayAdd { .. }
            | Request::GatewayRemove { .. }
            | Request::GatewayList) => self.gateway(request, caller),
            request @ (Request::RuleList { .. }
            | Request::RuleExplain(_)
            | Request::RuleCheck { .. }
            | Request::RuleReload
            | Request::RuleInstall { .. }
            | Request::RuleWithdraw { .. }) => self.rule(request, descriptors, caller),
            Request::SelectStatus { from } => plain(self.broker.flows().select_status(from)),
            Request::SelectSet { on } => {
                root("select")?;
                self.broker.flows().select(on)?;
                plain(Done {})
            }
            Request::SelectLearn { learn } => {
                root("select learn")?;
                self.broker.flows().learn(learn)?;
                plain(Done {})
            }
            Request::SelectLessons { from } => plain(self.broker.flows().lessons(from)),
            Request::TakeOver => {
                root("take-over")?;
                self.take_over(caller)
            }
            Request::Connect { to, session } => {
                let spec = checked(session)?;
                granted(
                    self.broker.connect(owner, to, &spec, gone)?,
                    caller.same_netns,
                )
            }
            Request::Follow { succeeds } => {
                granted(self.broker.follow(owner, succeeds)?, caller.same_netns)
            }
            Request::Listen { port } => {
                caller.may_listen(port)?;
                plain(Listening {
                    key: self.listen(owner, port)?,
                })
            }
            Request::Accept { key } => {
                granted(self.broker.accept(owner, key, gone)?, caller.same_netns)
            }
            Request::Statistics => plain(self.broker.statistics(owner)?),
            Request::GiveUp(given_up) => {
                self.broker.give_up(owner, given_up);
                plain(Done {})
            }
            Request::Close { aborted } => {
                self.broker.close(owner, aborted);
                plain(Done {})
            }
        }
    }

    /// Returns the Hooker, unless the daemon is stopping. Do not hold it while blocking: the daemon could not
    /// stop in order.
    fn hooker(&self) -> Result<Arc<Hooker>, Refusal> {
        let hooker = self.hooker.upgrade();
        hooker.ok_or_else(|| "the daemon is stopping".into())
    }

    /// Hooks a process and its future children.
    fn hook_process(&self, caller: &Caller, carrier: &CarrierSpec) -> Result<HookAdded, Refusal> {
        let carrier = self.carrier(carrier, false)?;
        let hooker = self.hooker()?;
        let id = hooker.hook_pid(caller.process()?, &carrier);
        let id = id.map_err(|e| e.to_string())?;
        if !caller.is_alive() {
            // The PID may have been reused.
            let _ = hooker.unhook(id);
            return Err("the process has ended".into());
        }
        Ok(HookAdded { id })
    }

    /// Hooks a port or a cgroup.
    fn add_hook(&self, target: HookTarget, carrier: &CarrierSpec) -> Result<HookAdded, Refusal> {
        let port = matches!(target, HookTarget::Port(_));
        let carrier = self.carrier(carrier, port)?;
        let hooker = self.hooker()?;
        let id = match target {
            HookTarget::Port(port) => hooker.hook_port(port, &carrier),
            HookTarget::Cgroup(path) => hooker.hook_cgroup(&path, &carrier),
        };
        let id = id.map_err(|e| e.to_string())?;
        Ok(HookAdded { id })
    }

    /// State of the daemon, and sessions from an index on.
    fn status(&self, from: u32) -> Result<Status, Refusal> {
        let status = self.broker.status(from)?;
        let hooker = self.hooker()?;
        Ok(Status {
            hooks: hooks(&hooker),
            near: hooker.near_hosts(),
            gateways: gateways(&hooker),
            ..status
        })
    }

    /// Executes a request about peers.
    fn peer(&self, request: Request, caller: &Caller) -> Answer {
        let identity = self.broker.flows().identity();
        match request {
            Request::PeerTrust(key) => {
                caller.require_root("peer trust")?;
                identity.trust(&key)?;
                let (name, key) = (key.name.into(), key.key.into());
                emit(What::PeerTrusted { name, key });
            }
            Request::PeerForget { name } => {
                caller.require_root("peer forget")?;
                identity.forget(&name)?;
                emit(What::PeerForgotten { name: name.into() });
            }
            Request::PeerList { from } => return plain(identity.list(from)?),
            _ => {}
        }
        plain(Done {})
    }

    /// Executes a request about rules.
    fn rule(&self, request: Request, descriptors: Vec<OwnedFd>, caller: &Caller) -> Answer {
        match request {
            Request::RuleList { from } => return plain(self.rules.list(from)?),
            Request::RuleExplain(connection) => return plain(self.rules.explain(&connection)?),
            Request::RuleCheck { name } => return plain(self.check_rules(descriptors, &name)?),
            Request::RuleInstall { rule, for_s } => {
                caller.require_root("rule add")?;
                self.rules
                    .install(rule, Duration::from_secs(for_s.get().into()))?;
            }
            Request::RuleWithdraw { name } => {
                caller.require_root("rule remove")?;
                self.rules.withdraw(&name)?;
            }
            _ => {
                caller.require_root("rule reload")?;
                let count = self.rules.reload()?;
                return plain(RuleCount { count });
            }
        }
        plain(Done {})
    }

    /// Executes a request about gateways.
    fn gateway(&self, request: Request, caller: &Caller) -> Answer {
        match request {
            Request::GatewayAdd {
                interface,
                to,
                ports,
                carrier,
            } => {
                caller.require_root("gateway add")?;
                self.add_gateway(interface, &to, ports, carrier)?;
            }
            Request::GatewayRemove { interface } => {
                caller.require_root("gateway remove")?;
                let removed = self.hooker()?.remove_gateway(&interface);
                removed.map_err(|error| error.to_string())?;
            }
            _ => {
                return plain(vtl_control::Gateways {
                    gateways: gateways(&*self.hooker()?),
                });
            }
        }
        plain(Done {})
    }

    /// Makes this host a gateway at an interface.
    fn add_gateway(
        &self,
        interface: String,
        to: &[String],
        ports: Vec<u16>,
        carrier: Option<String>,
    ) -> Result<(), Refusal> {
        let prefix = |text: &String| {
            text.parse()
                .map_err(|error| format!("--to {text}: {error}"))
        };
        let to = to.iter().map(prefix).collect::<Result<_, String>>()?;
        let spec = CarrierSpec {
            carrier,
            ..CarrierSpec::default()
        };
        let gateway = Gateway {
            interface,
            to,
            ports,
            carrier: self.carrier(&spec, false)?,
        };
        let added = self.hooker()?.add_gateway(gateway);
        Ok(added.map_err(|error| error.to_string())?)
    }

    /// Removes the hook of a port or a cgroup.
    fn remove_hook(&self, target: &HookTarget) -> Result<(), Refusal> {
        let hooker = self.hooker()?;
        let is_target = |hook: &hooker::Hook| match (&hook.what, target) {
            (Hooked::Port(port), HookTarget::Port(other)) => port == other,
            (Hooked::Cgroup(path), HookTarget::Cgroup(other)) => *path == hooker.cgroup(other),
            _ => false,
        };
        let hook = hooker.list().into_iter().find(is_target);
        let hook = hook.ok_or("there is no such hook: vtl hook list")?;
        hooker.unhook(hook.id).map_err(|e| e.to_string())?;
        Ok(())
    }

    /// Checks a file of rules, passed as a descriptor.
    fn check_rules(&self, descriptors: Vec<OwnedFd>, name: &str) -> Result<RuleCount, Refusal> {
        let file = descriptors.into_iter().next();
        let file = file.ok_or("the request has no file")?;
        let count = self.rules.check(file.into(), name)?;
        Ok(RuleCount { count })
    }

    /// Starts the handover to the caller, and the end of this daemon.
    fn take_over(&self, caller: &Caller) -> Answer {
        if !caller.same_netns {
            return Err("this vtld is another network namespace's".into());
        }
        let mut successor = self
            .successor
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if successor.is_some() {
            return Err("another daemon is taking over".into());
        }
        let (ours, theirs) = handover::channel().map_err(|error| error.to_string())?;
        *successor = Some(ours);
        Ok((protocol::to_message(&Done {})?, vec![theirs]))
    }

    /// Deploys a graft of the pool, or of a package passed as a descriptor.
    fn load(
        &self,
        name: Option<String>,
        descriptors: Vec<OwnedFd>,
        swap: bool,
    ) -> Result<Deployed, String> {
        match (descriptors.into_iter().next(), name) {
            (Some(file), _) => self.broker.deploy_package(package(file)?, swap),
            (None, Some(name)) => self.broker.deploy(name, swap),
            (None, None) => Err("name a graft of the pool, or hand a package over".into()),
        }
    }
}

/// Answers a request for events. `gone`: whether the client has hung up.
fn happened(request: Request, caller: &Caller, gone: impl Fn() -> bool) -> Answer {
    let Request::Events {
        since,
        kinds,
        wait_ms,
    } = request
    else {
        return plain(Done {});
    };
    let wanted = Wanted {
        since,
        kinds,
        wait: wait_ms.map(|ms| Duration::from_millis(ms.into())),
        is_root: caller.is_root(),
    };
    plain(events::read(&wanted, gone)?)
}

/// One-shot event for the next request of a connection.
fn once(owner: Owner) -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, owner)
}

/// Reads a package passed by a client.
fn package(file: OwnedFd) -> Result<Vec<u8>, String> {
    use vtl_pool::package::MAX_PACKAGE;
    let mut bytes = Vec::new();
    let mut file = File::from(file);
    is_regular(&file)
        .and_then(|()| {
            file.by_ref()
                .take(MAX_PACKAGE as u64 + 1)
                .read_to_end(&mut bytes)
        })
        .map_err(|e| format!("the package cannot be read: {e}"))?;
    Ok(bytes)
}

/// Checks an application's request for a session.
fn checked(session: SessionRequest) -> Result<broker::SessionSpec, String> {
    if let Some(contradiction) = session.requirements.contradiction() {
        return Err(contradiction.to_string());
    }
    Ok(broker::SessionSpec {
        wanted: session.requirements,
        graft: session.graft,
        params: session.params.into_iter().collect(),
        stateless: session.stateless,
        from: None,
    })
}

/// Hides what derives from application data, such as a server's name, unless root asks.
fn redacted(mut flow: FlowStatus, caller: &Caller) -> FlowStatus {
    if !caller.is_root() {
        flow.profile_evidence = None;
    }
    flow
}

/// Whether the other end has closed the connection.
fn hung_up(client: &OwnedFd) -> bool {
    let mut events = [PollFd::new(client.as_fd(), PollFlags::empty())];
    matches!(poll(&mut events, PollTimeout::ZERO), Ok(1..))
}

fn hooks(hooker: &Hooker) -> Vec<Hook> {
    let row = |hook: hooker::Hook| Hook {
        id: hook.id,
        on: match hook.what {
            Hooked::Run { pid, cgroup } => vtl_control::Hooked::Run {
                run: pid,
                cgroup,
                processes: hook.processes,
            },
            Hooked::Cgroup(cgroup) => vtl_control::Hooked::Cgroup {
                cgroup,
                processes: hook.processes,
            },
            Hooked::Port(port) => vtl_control::Hooked::Port { port },
        },
        carrier: (hook.carrier != Carrier::Best).then(|| hook.carrier.to_string()),
        connections: hook.connections,
        rule: hook.rule,
    };
    hooker.list().into_iter().map(row).collect()
}

fn gateways(hooker: &Hooker) -> Vec<vtl_control::Gateway> {
    let row = |listed: hooker::GatewayListed| vtl_control::Gateway {
        to: listed.gateway.to.iter().map(ToString::to_string).collect(),
        ports: listed.gateway.ports,
        carrier: (listed.gateway.carrier != Carrier::Best)
            .then(|| listed.gateway.carrier.to_string()),
        interface: listed.gateway.interface,
        absent: !listed.is_present,
        connections: listed.carried,
    };
    hooker.gateways().into_iter().map(row).collect()
}

/// Encodes a granted session. `same_netns`: the application is in our network namespace; otherwise it must not get a
/// socket of it.
fn granted(granted: Granted, same_netns: bool) -> Answer {
    let caller = granted.caller.filter(|_| same_netns);
    let rings = granted.rings.into_iter();
    Ok((
        protocol::to_message(&granted.grant)?,
        rings.chain(granted.events).chain(caller).collect(),
    ))
}
