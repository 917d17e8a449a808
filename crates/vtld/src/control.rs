//! The control socket: JSON requests of `vtl` and of the client library. Each request has a thread of
//! its own, as it may have to wait; a connection that asks for nothing has none, since each
//! application's session keeps one.
//!
//! Members of the socket's group may look, run their own programs hooked, and have sessions of
//! their own. What changes the host for others (hooks, grafts) is for root.

use std::{
    collections::HashMap,
    fs,
    io::{self, Read},
    net::SocketAddr,
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        unix::fs::{PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
};

use anyhow::{Context, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        socket::{
            AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, getsockopt,
            listen, socket, sockopt,
        },
    },
    unistd::{Gid, Group},
};
use serde_json::{Value, json};
use vtl_control::{self as protocol, Client};
use vtl_proto::services::{Qos, Requirements, Services};

use crate::{
    broker::{self, Granted, Owner, Predecessor, Toward, Wish},
    hooker::{Carrier, Hooked, Hooker, rules::Connection as Opened},
    option::netns_cookie,
    rules::Keeper,
};

/// Connections at a time, besides those of sessions.
const SPARE_CLIENTS: usize = 1024;
/// Where the listening socket stands among the owners.
const LISTENER: u64 = 0;

/// The listening control socket; its file goes with it.
pub struct Control {
    socket: OwnedFd,
    path: PathBuf,
}

/// What requests act on.
struct Service {
    /// Of the network, ours.
    namespace: Option<u64>,
    broker: broker::Handle,
    /// Ends with the daemon, whoever still asks.
    hooker: Weak<Hooker>,
    rules: Arc<Keeper>,
    /// Says which connection has a request; each one once, until it is answered.
    epoll: Epoll,
    clients: Mutex<HashMap<Owner, Arc<Connection>>>,
    most_clients: usize,
}

/// A connection.
struct Connection {
    socket: OwnedFd,
    peer: Peer,
}

impl Control {
    /// Binds the socket, and opens it to a group if there is one of that name.
    ///
    /// # Errors
    /// Another daemon answers there, or the place cannot be written.
    pub fn bind(path: &Path, group: &str) -> anyhow::Result<Self> {
        if Client::connect(path).is_ok() {
            bail!(
                "another vtld answers at {}: stop it, or choose another --socket",
                path.display()
            );
        }
        if let Some(folder) = path.parent().filter(|f| !f.as_os_str().is_empty()) {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot make the folder {}", folder.display()))?;
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
        // Narrow before anybody can connect: listen comes last.
        fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
        if let Ok(Some(group)) = Group::from_name(group) {
            chown(path, None, Some(Gid::as_raw(group.gid)))?;
        }
        listen(&fd, Backlog::new(128)?)?;
        Ok(Self {
            socket: fd,
            path: path.to_path_buf(),
        })
    }

    /// Serves requests from now until the process ends, also of that many sessions at a time.
    ///
    /// # Errors
    /// No thread can be started, or no descriptor is left.
    pub fn serve(
        &self,
        broker: broker::Handle,
        hooker: Weak<Hooker>,
        rules: Arc<Keeper>,
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
            most_clients: sessions + SPARE_CLIENTS,
        });
        thread::Builder::new()
            .name("vtl-control".into())
            .spawn(move || service.run(&socket))?;
        Ok(())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Who asks.
struct Peer {
    pid: u32,
    root: bool,
    /// In our network namespace.
    near: bool,
}

type Answer = Result<(Value, Vec<OwnedFd>), Refusal>;

/// Why a request is not granted.
struct Refusal {
    /// One sentence.
    why: String,
    /// Only because of who asks.
    denied: bool,
}

impl<T: Into<String>> From<T> for Refusal {
    fn from(why: T) -> Self {
        let why = why.into();
        Self { why, denied: false }
    }
}

impl Service {
    fn run(self: Arc<Self>, listener: &OwnedFd) {
        let mut next_owner = LISTENER + 1;
        let mut found = [EpollEvent::empty(); 64];
        loop {
            let count = self.epoll.wait(&mut found, EpollTimeout::NONE).unwrap_or(0);
            for event in &found[..count] {
                match event.data() {
                    LISTENER => {
                        self.welcome(listener, next_owner);
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

    /// Takes a connection, or closes it if there are too many.
    fn welcome(&self, listener: &OwnedFd, owner: Owner) {
        let socket = match accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
            // SAFETY: accept made this descriptor for us alone.
            Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
            Err(error) => {
                tracing::warn!(%error, "accepting a control connection");
                thread::sleep(std::time::Duration::from_millis(50));
                return;
            }
        };
        let Ok(credentials) = getsockopt(&socket, sockopt::PeerCredentials) else {
            return;
        };
        let peer = Peer {
            pid: credentials.pid() as u32,
            root: credentials.uid() == 0,
            near: netns_cookie(&socket).is_ok_and(|n| Some(n) == self.namespace),
        };
        let mut clients = self.clients();
        if clients.len() >= self.most_clients {
            return;
        }
        let connection = Arc::new(Connection { socket, peer });
        clients.insert(owner, Arc::clone(&connection));
        drop(clients);
        if let Err(error) = self.epoll.add(&connection.socket, once(owner)) {
            tracing::warn!(%error, "no place for a control connection");
            self.clients().remove(&owner);
        }
    }

    /// Answers a connection's request on a thread of its own.
    fn start(self: &Arc<Self>, owner: Owner) {
        let Some(connection) = self.clients().get(&owner).map(Arc::clone) else {
            return;
        };
        let service = Arc::clone(self);
        let work = move || {
            let goes_on = service.converse(&connection, owner)
                && service
                    .epoll
                    .modify(&connection.socket, &mut once(owner))
                    .is_ok();
            if !goes_on {
                service.clients().remove(&owner);
                service.broker.gone(owner);
            }
        };
        let started = thread::Builder::new()
            .name("vtl-client".into())
            .stack_size(256 << 10)
            .spawn(work);
        if let Err(error) = started {
            tracing::warn!(%error, "no thread for a request");
            self.clients().remove(&owner);
            self.broker.gone(owner);
        }
    }

    /// Answers one request. False if the connection has ended.
    fn converse(&self, connection: &Connection, owner: Owner) -> bool {
        let client = &connection.socket;
        let answer = match protocol::receive(client.as_raw_fd()) {
            Ok(Some((request, descriptors))) => {
                let gone = || hung_up(client);
                self.answer(&request, descriptors, &connection.peer, owner, gone)
            }
            Err(error @ protocol::Error::Malformed(_)) => Err(error.to_string().into()),
            Ok(None) | Err(_) => return false,
        };
        let (value, descriptors) = match answer {
            Ok((mut value, descriptors)) => {
                value["ok"] = true.into();
                (value, descriptors)
            }
            Err(Refusal { why, denied }) => {
                let answer = json!({ "ok": false, "error": why, "denied": denied });
                (answer, Vec::new())
            }
        };
        let fds: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
        protocol::send(client.as_raw_fd(), &value, &fds).is_ok()
    }

    /// What a hook's connections are to travel by.
    fn carrier(&self, request: &Value) -> Result<Carrier, String> {
        let carrier = match &request["carrier"] {
            Value::Null => Carrier::default(),
            Value::String(name) => name.parse()?,
            _ => return Err("\"carrier\" must be a name".into()),
        };
        let tolerant = request["loss_tolerant"].as_bool().unwrap_or(false);
        let carrier = carrier.marked(tolerant, !request["port"].is_null(), "--loss-tolerant")?;
        self.broker.carries(&carrier)?;
        Ok(carrier)
    }

    fn answer(
        &self,
        request: &Value,
        descriptors: Vec<OwnedFd>,
        peer: &Peer,
        owner: Owner,
        gone: impl Fn() -> bool,
    ) -> Answer {
        // Not held while an application waits for a session: the daemon could not end in order.
        let hooker = || self.hooker.upgrade().ok_or("the daemon is stopping");
        let op = request["op"].as_str().ok_or("the request names no op")?;
        let plain = |value: Value| Ok((value, Vec::new()));
        let done = || Ok((json!({}), Vec::new()));
        let root = || {
            if peer.root {
                Ok(())
            } else {
                let why = format!("vtl {} is for root: use sudo", op.replace('_', " "));
                Err(Refusal { why, denied: true })
            }
        };
        match op {
            "status" => {
                let from = request["from"].as_u64().and_then(|n| n.try_into().ok());
                let mut status = self.broker.status(from.unwrap_or(0))?;
                status["hooks"] = hooks(&*hooker()?);
                plain(status)
            }
            "graft_list" => plain(self.broker.grafts()?),
            "graft_show" => plain(self.broker.describe(text(request, "name")?)?),
            "graft_deploy" | "graft_swap" => {
                root()?;
                let swap = op == "graft_swap";
                plain(match descriptors.into_iter().next() {
                    Some(file) => self.broker.deploy_package(package(file)?, swap)?,
                    None => self.broker.deploy(text(request, "name")?, swap)?,
                })
            }
            "graft_remove" => {
                root()?;
                self.broker.remove(text(request, "name")?)?;
                done()
            }
            "hook_list" => plain(json!({ "hooks": hooks(&*hooker()?) })),
            "hook_run" => {
                let id = hooker()?.hook_pid(peer.pid, &self.carrier(request)?);
                plain(json!({ "id": id.map_err(|e| e.to_string())? }))
            }
            "hook_add" => {
                root()?;
                let (hooker, carrier) = (hooker()?, self.carrier(request)?);
                let id = match target(request)? {
                    Target::Port(port) => hooker.hook_port(port, &carrier),
                    Target::Cgroup(path) => hooker.hook_cgroup(&path, &carrier),
                };
                plain(json!({ "id": id.map_err(|e| e.to_string())? }))
            }
            "hook_remove" => {
                root()?;
                let wanted = target(request)?;
                let hooker = hooker()?;
                let hook = hooker
                    .list()
                    .into_iter()
                    .find(|h| match (&h.what, &wanted) {
                        (Hooked::Port(port), Target::Port(other)) => port == other,
                        (Hooked::Cgroup(path), Target::Cgroup(other)) => {
                            *path == hooker.cgroup(other)
                        }
                        _ => false,
                    });
                let hook = hook.ok_or("there is no such hook: vtl hook list")?;
                hooker.unhook(hook.id).map_err(|e| e.to_string())?;
                done()
            }
            "rule_list" => {
                let from = request["from"].as_u64().and_then(|n| n.try_into().ok());
                plain(self.rules.list(from.unwrap_or(0))?)
            }
            "rule_explain" => plain(self.rules.explain(&opened(request)?)?),
            "rule_check" => {
                let file = descriptors.into_iter().next();
                let file = file.ok_or("the request has no file")?;
                let count = self.rules.check(file.into(), &text(request, "name")?)?;
                plain(json!({ "count": count }))
            }
            "rule_reload" => {
                root()?;
                plain(json!({ "count": self.rules.reload()? }))
            }
            "connect" => {
                let to = match predecessor(request)? {
                    Some(of) => Toward::Successor(of),
                    None => {
                        let host = text(request, "host")?;
                        let host = host
                            .parse()
                            .map_err(|_| format!("{host} is no IP address"))?;
                        let port = number(request, "port")?;
                        Toward::Peer(SocketAddr::new(host, port))
                    }
                };
                granted(
                    self.broker.connect(owner, to, &wish(request)?, gone)?,
                    peer.near,
                )
            }
            "follow" => {
                let from = predecessor(request)?.ok_or("the request lacks \"succeeds\"")?;
                granted(self.broker.follow(owner, from)?, peer.near)
            }
            "listen" => {
                let key = self.broker.listen(owner, number(request, "port")?)?;
                plain(json!({ "key": key }))
            }
            "accept" => {
                let key = request["key"].as_u64();
                granted(self.broker.accept(owner, key, gone)?, peer.near)
            }
            "statistics" => plain(self.broker.statistics(owner)?),
            "close" => {
                self.broker
                    .close(owner, request["aborted"].as_bool().unwrap_or(false));
                done()
            }
            other => Err(format!("unknown op \"{other}\"").into()),
        }
    }
}

/// A connection that rules are asked about.
fn opened(request: &Value) -> Result<Opened, String> {
    let exe = &request["exe"];
    Ok(Opened {
        to: text(request, "to")?
            .parse()
            .map_err(|_| "\"to\" must be an address and a port".to_owned())?,
        user: request["user"].as_u64().and_then(|id| id.try_into().ok()),
        exe: exe["device"].as_u64().zip(exe["inode"].as_u64()),
        cgroup: request["cgroup"].as_str().map(PathBuf::from),
    })
}

/// The next request of a connection, and then none until it is asked for again.
fn once(owner: Owner) -> EpollEvent {
    EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, owner)
}

/// The bytes of a package that a client handed over.
fn package(file: OwnedFd) -> Result<Vec<u8>, String> {
    use vtl_pool::package::MAX_PACKAGE;
    let mut bytes = Vec::new();
    let mut file = fs::File::from(file).take(MAX_PACKAGE as u64 + 1);
    file.read_to_end(&mut bytes)
        .map_err(|e| format!("the package cannot be read: {e}"))?;
    Ok(bytes)
}

/// What an application wants a session to be like.
fn wish(request: &Value) -> Result<Wish, String> {
    let services = |key: &str| {
        let bits = request[key].as_u64().and_then(|n| n.try_into().ok());
        Services::from_bits(bits.unwrap_or_default())
    };
    let mut wanted = Requirements {
        services: services("services"),
        prefer: services("prefer"),
        avoid: services("avoid"),
        prohibit: services("prohibit"),
        ..Default::default()
    };
    wanted.qos = Qos {
        max_delay_ms: request["max_delay_ms"]
            .as_u64()
            .and_then(|ms| ms.try_into().ok()),
        min_throughput_mbit: request["min_throughput_mbit"].as_f64(),
        max_loss_pct: request["max_loss_pct"].as_f64(),
    };
    if let Some(contradiction) = wanted.contradiction() {
        return Err(contradiction.to_string());
    }
    let graft = request["graft"].as_str().map(str::to_owned);
    let params = match &request["params"] {
        Value::Null => Vec::new(),
        Value::Object(params) => {
            let param = |(name, value): (&String, &Value)| {
                let value = value.as_u64().and_then(|n| u32::try_from(n).ok());
                let value = value.ok_or_else(|| format!("parameter {name} is not a number"))?;
                Ok((name.clone(), value))
            };
            params.iter().map(param).collect::<Result<_, String>>()?
        }
        _ => return Err("\"params\" must be an object of numbers".into()),
    };
    Ok(Wish {
        wanted,
        graft,
        params,
    })
}

/// The session that a request is about another one to succeed.
fn predecessor(request: &Value) -> Result<Option<Predecessor>, String> {
    let succeeds = &request["succeeds"];
    if succeeds.is_null() {
        return Ok(None);
    }
    let sid = succeeds["sid"].as_u64().and_then(|n| n.try_into().ok());
    let predecessor = sid.zip(succeeds["key"].as_u64());
    let (sid, key) = predecessor.ok_or("\"succeeds\" must have a sid and a key")?;
    Ok(Some(Predecessor { sid, key }))
}

/// Has the other end closed the connection?
fn hung_up(client: &OwnedFd) -> bool {
    let mut events = [PollFd::new(client.as_fd(), PollFlags::empty())];
    matches!(poll(&mut events, PollTimeout::ZERO), Ok(1..))
}

fn hooks(hooker: &Hooker) -> Value {
    let row = |hook: crate::hooker::Hook| {
        let mut row = match hook.what {
            Hooked::Run { pid, cgroup } => json!({
                "id": hook.id, "run": pid, "cgroup": cgroup, "processes": hook.processes,
            }),
            Hooked::Cgroup(path) => {
                json!({ "id": hook.id, "cgroup": path, "processes": hook.processes })
            }
            Hooked::Port(port) => json!({ "id": hook.id, "port": port }),
        };
        if hook.carrier != Carrier::Best {
            row["carrier"] = hook.carrier.to_string().into();
        }
        if let Some(connections) = hook.connections {
            row["connections"] = connections.into();
        }
        if let Some(rule) = hook.rule {
            row["rule"] = rule.into();
        }
        row
    };
    hooker.list().into_iter().map(row).collect()
}

/// What a hook is put on.
enum Target {
    Port(u16),
    Cgroup(PathBuf),
}

fn target(request: &Value) -> Result<Target, String> {
    match (request["port"].as_u64(), request["cgroup"].as_str()) {
        (Some(_), None) => number(request, "port").map(Target::Port),
        (None, Some(path)) => Ok(Target::Cgroup(path.into())),
        _ => Err("name either a port or a cgroup".into()),
    }
}

fn text(request: &Value, key: &str) -> Result<String, String> {
    request[key]
        .as_str()
        .map(str::to_owned)
        .ok_or_else(|| format!("the request lacks \"{key}\""))
}

fn number(request: &Value, key: &str) -> Result<u16, String> {
    request[key]
        .as_u64()
        .and_then(|n| u16::try_from(n).ok())
        .filter(|n| *n > 0)
        .ok_or_else(|| format!("\"{key}\" must be a number from 1 to 65535"))
}

/// `near`: the application lives in our network namespace, or must not get a socket of it.
fn granted(granted: Granted, near: bool) -> Answer {
    let caller = granted.caller.filter(|_| near);
    let value = json!({
        "sid": granted.sid,
        "key": granted.key,
        "slots": granted.slots,
        "max_payload": granted.max_payload,
        "max_message": granted.max_message,
        "graft": granted.graft,
        "gid": granted.gid,
        "services": granted.services.bits(),
        "peer": granted.peer,
        "events": granted.events.is_some(),
    });
    let all = granted.rings.into_iter();
    Ok((value, all.chain(granted.events).chain(caller).collect()))
}
