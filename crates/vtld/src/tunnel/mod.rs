//! Tunnels: carriers of hooked flows that are no grafts.
//!
//! One tunnel leads to a host, and its flows are streams of it. It is set up over the first flow's
//! discovery connection, which stays open as its lifeline (`client.rs`, `server.rs`); where that does
//! not succeed in time, flows go on over their discovery connections as plain TCP. A thread with a
//! tokio runtime does all of it, started when the first flow wants a tunnel, or wants none after all
//! (`Handle::plain`).

mod client;
mod flow;
mod mptcp;
pub(crate) mod quic;
mod records;
mod sctp;
mod server;
mod stream;
pub(crate) mod wire;
mod words;

use std::{
    cell::{Cell, OnceCell},
    collections::HashSet,
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    pin::pin,
    rc::Rc,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, mpsc as blocking},
    thread::JoinHandle,
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc},
    task::LocalSet,
};

use vtl_control::{FlowList, FlowStatus, TunnelStatus};
pub use vtl_proto::carrier::Tunnel as Kind;
use vtl_proto::frame::FlowName;

use crate::{
    flows::{self, Flows, Names, Opened},
    hooker::{self, ClientFlow, HeldConnect, ServerFlow},
};

use flow::Meter;
use sctp::Sctp;
pub(crate) use words::ASK;

/// How long the peers' being told of the end may take.
const FAREWELL: Duration = Duration::from_millis(200);

/// The preamble that asks for a tunnel.
pub(crate) fn ask(kind: Kind) -> [u8; words::WORD] {
    words::Word::Ask(kind).emit()
}

/// Which tunnel a flow goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    kind: Kind,
    local: IpAddr,
    peer: IpAddr,
}

/// A flow whose discovery found that the peer runs VTL.
struct Discovered {
    key: Key,
    app: TcpStream,
    dest: SocketAddr,
    src: SocketAddr,
    /// The discovery connection.
    peer: TcpStream,
}

enum Command {
    Client(Discovered),
    Held(Key, HeldConnect),
    Plain {
        app: TcpStream,
        dest: SocketAddr,
        peer: TcpStream,
    },
    Server(Kind, ServerFlow),
    Opened(Opened),
    Steered(ServerFlow, FlowName),
    Status(blocking::SyncSender<Vec<TunnelStatus>>),
    Flows(u64, blocking::SyncSender<FlowList>),
    Flow(u64, blocking::SyncSender<Result<FlowStatus, String>>),
    Move(
        u64,
        String,
        blocking::SyncSender<Result<FlowStatus, String>>,
    ),
    Stop,
}

struct Thread {
    commands: mpsc::UnboundedSender<Command>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    /// Tunnels by which a flow can go at once.
    open: RwLock<HashSet<Key>>,
    names: Arc<Names>,
    /// While there is none, no thread is started.
    hooker: Mutex<Option<hooker::Handle>>,
    thread: Mutex<Option<Thread>>,
}

impl Shared {
    fn thread(&self) -> MutexGuard<'_, Option<Thread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_open(&self, key: Key, open: bool) {
        let mut all = self.open.write().unwrap_or_else(PoisonError::into_inner);
        match open {
            true => all.insert(key),
            false => all.remove(&key),
        };
    }
}

/// The way to the thread of tunnels. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// Lets tunnels be.
    pub(crate) fn set_hooker(&self, hooker: hooker::Handle) {
        let mut own = self.shared.hooker.lock();
        *own.as_deref_mut().unwrap_or_else(|e| e.get_mut()) = Some(hooker);
    }

    fn send(&self, command: Command) {
        let mut thread = self.shared.thread();
        if thread.is_none() {
            let hooker = self.shared.hooker.lock();
            let hooker = hooker.unwrap_or_else(PoisonError::into_inner).clone();
            let Some(hooker) = hooker else { return };
            match start(&self.shared, hooker) {
                Ok(started) => *thread = Some(started),
                Err(error) => tracing::error!(%error, "tunnels cannot be had"),
            }
        }
        if let Some(thread) = &*thread {
            // Without a thread the daemon is ending.
            let _ = thread.commands.send(command);
        }
    }

    /// Takes a connect if there is a tunnel to its host, else gives it back.
    pub(crate) fn try_flow(&self, kind: Kind, held: HeldConnect) -> Result<(), HeldConnect> {
        let key = Key {
            kind,
            local: held.src().ip(),
            peer: held.dest().ip(),
        };
        let open = self.shared.open.read();
        if !open.unwrap_or_else(PoisonError::into_inner).contains(&key) {
            return Err(held);
        }
        self.send(Command::Held(key, held));
        Ok(())
    }

    /// Whether there is an association with the host.
    pub(crate) fn knows(&self, host: IpAddr) -> bool {
        self.shared.names.knows(host)
    }

    /// The name of the next flow from one address to another.
    pub(crate) fn name_flow(&self, local: IpAddr, peer: IpAddr) -> FlowName {
        self.shared.names.next(local, peer)
    }

    /// The connection of a flow that this host has opened is established.
    pub(crate) fn opened(&self, flow: ClientFlow, name: FlowName) {
        let tunnels = self.clone();
        let ClientFlow {
            app,
            dest,
            src,
            peer: tcp,
            ..
        } = flow;
        app.accept(move |app| match app {
            Ok(app) => tunnels.send(Command::Opened(Opened {
                app,
                src,
                dest,
                tcp,
                name,
            })),
            Err(error) => tracing::debug!(%error, %dest, "the application has gone"),
        });
    }

    /// A connection was steered here whose SYN says which one it is.
    pub(crate) fn steered(&self, flow: ServerFlow, name: FlowName) {
        self.send(Command::Steered(flow, name));
    }

    /// A captured connection's destination turned out to run VTL.
    pub(crate) fn client(&self, kind: Kind, flow: ClientFlow) {
        let ClientFlow {
            app,
            dest,
            src,
            peer,
            ..
        } = flow;
        let key = Key {
            kind,
            local: src.ip(),
            peer: dest.ip(),
        };
        let tunnels = self.clone();
        app.accept(move |app| match app {
            Ok(app) => tunnels.send(Command::Client(Discovered {
                key,
                app,
                dest,
                src,
                peer,
            })),
            Err(error) => tracing::debug!(%error, %dest, "the application has gone"),
        });
    }

    /// Carries a connection to `dest` over its discovery connection `peer`.
    pub(crate) fn plain(&self, app: TcpStream, dest: SocketAddr, peer: TcpStream) {
        self.send(Command::Plain { app, dest, peer });
    }

    /// A peer asks for a tunnel on a discovery connection.
    pub(crate) fn server(&self, kind: Kind, flow: ServerFlow) {
        self.send(Command::Server(kind, flow));
    }

    /// What there is: one object for each tunnel.
    pub(crate) fn status(&self) -> Vec<TunnelStatus> {
        self.ask(Command::Status).unwrap_or_default()
    }

    fn ask<T>(&self, command: impl FnOnce(blocking::SyncSender<T>) -> Command) -> Option<T> {
        if self.shared.thread().is_none() {
            return None;
        }
        let (reply, answer) = blocking::sync_channel(1);
        self.send(command(reply));
        answer.recv().ok()
    }

    /// Flows, from an id on.
    pub(crate) fn flows(&self, from: u64) -> FlowList {
        let none = FlowList {
            flows: Vec::new(),
            more: None,
        };
        self.ask(|reply| Command::Flows(from, reply))
            .unwrap_or(none)
    }

    /// One flow.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn flow(&self, id: u64) -> Result<FlowStatus, String> {
        let answer = self.ask(|reply| Command::Flow(id, reply));
        answer.unwrap_or_else(|| Err(flows::no_such(id)))
    }

    /// Has what this host sends of a flow travel by another carrier.
    ///
    /// # Errors
    /// There is no such flow, or no such carrier to its peer.
    pub(crate) fn move_flow(&self, id: u64, carrier: String) -> Result<FlowStatus, String> {
        let answer = self.ask(|reply| Command::Move(id, carrier, reply));
        answer.unwrap_or_else(|| Err(flows::no_such(id)))
    }

    /// Ends all tunnels and the thread.
    pub(crate) fn stop(&self) {
        let mut hooker = self.shared.hooker.lock();
        hooker.as_deref_mut().unwrap_or_else(|e| e.get_mut()).take();
        drop(hooker);
        let thread = self.shared.thread().take();
        if let Some(Thread { commands, thread }) = thread {
            let _ = commands.send(Command::Stop);
            let _ = thread.join();
        }
    }
}

fn start(shared: &Arc<Shared>, hooker: hooker::Handle) -> io::Result<Thread> {
    let (commands, inbox) = mpsc::unbounded_channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let shared = Arc::clone(shared);
    let thread = std::thread::Builder::new()
        .name("vtl-tunnels".into())
        .spawn(move || {
            let flows = Flows::new(hooker.clone(), Arc::clone(&shared.names));
            let hub = Rc::new(Hub {
                shared,
                hooker,
                flows,
                sctp: OnceCell::new(),
                mptcp: OnceCell::new(),
                client: client::Slots::default(),
                served: server::Served::default(),
            });
            LocalSet::new().block_on(&runtime, hub.run(inbox));
        })?;
    Ok(Thread { commands, thread })
}

/// What the thread's tasks share.
struct Hub {
    shared: Arc<Shared>,
    hooker: hooker::Handle,
    flows: Rc<Flows>,
    /// Made when it is first needed.
    sctp: OnceCell<Option<Rc<Sctp>>>,
    /// The port where flows come.
    mptcp: OnceCell<Option<u16>>,
    client: client::Slots,
    served: server::Served,
}

impl Hub {
    async fn run(self: Rc<Self>, mut inbox: mpsc::UnboundedReceiver<Command>) {
        tokio::task::spawn_local(Rc::clone(&self.flows).tend());
        while let Some(command) = inbox.recv().await {
            match command {
                Command::Client(flow) => self.client(flow),
                Command::Held(key, held) => self.held(key, held),
                Command::Plain { app, dest, peer } => self.plain(app, dest, peer),
                Command::Server(kind, flow) => {
                    tokio::task::spawn_local(Rc::clone(&self).serve_asked(kind, flow));
                }
                Command::Opened(flow) => self.flows.opened(flow),
                Command::Steered(flow, name) => self.flows.steered(flow, name),
                Command::Status(reply) => {
                    let _ = reply.send(self.status());
                }
                Command::Flows(from, reply) => {
                    let _ = reply.send(self.flows.list(from));
                }
                Command::Flow(id, reply) => {
                    let _ = reply.send(self.flows.show(id));
                }
                Command::Move(id, carrier, reply) => {
                    let _ = reply.send(self.flows.move_flow(id, &carrier));
                }
                Command::Stop => break,
            }
        }
        self.flows.close().await;
        if let Some(Some(sctp)) = self.sctp.get() {
            sctp.close();
            let _ = tokio::time::timeout(FAREWELL, sctp.wait_idle()).await;
        }
    }

    /// The endpoint.
    fn sctp(self: &Rc<Self>) -> io::Result<Rc<Sctp>> {
        let made = self.sctp.get_or_init(|| match Sctp::new() {
            Ok((sctp, incoming)) => {
                tokio::task::spawn_local(Rc::clone(self).accept_sctp(incoming));
                Some(Rc::new(sctp))
            }
            Err(error) => {
                tracing::error!(%error, "SCTP cannot be had");
                None
            }
        });
        made.clone()
            .ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// The port where flows over MPTCP come.
    fn mptcp(self: &Rc<Self>) -> io::Result<u16> {
        let made = self.mptcp.get_or_init(|| match mptcp::Listener::new() {
            Ok(listener) => {
                let port = listener.port;
                tokio::task::spawn_local(Rc::clone(self).accept_mptcp(listener));
                Some(port)
            }
            Err(error) => {
                tracing::error!(%error, "MPTCP cannot be had");
                None
            }
        });
        made.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    fn status(&self) -> Vec<TunnelStatus> {
        let mut all: Vec<_> = self.client.open().iter().map(|t| t.row("client")).collect();
        all.extend(self.served.all().iter().map(|t| t.row("server")));
        all.extend(self.flows.status());
        all
    }
}

/// What a tunnel's flows travel by.
enum Link {
    /// As streams of an association.
    Sctp(sctp::Connection),
    /// Each by a connection of its own.
    Mptcp {
        to: SocketAddr,
        token: u64,
        over: Rc<Over>,
    },
}

/// The end of what has no connection of its own.
#[derive(Default)]
struct Over {
    is: Cell<bool>,
    notify: Notify,
}

/// A tunnel that is open.
struct Tunnel {
    key: Key,
    link: Link,
    meter: Rc<Meter>,
}

impl Tunnel {
    fn new(key: Key, link: Link) -> Self {
        Self {
            key,
            link,
            meter: Rc::default(),
        }
    }

    /// Ends it.
    fn close(&self) {
        match &self.link {
            Link::Sctp(connection) => connection.close(),
            Link::Mptcp { over, .. } => {
                over.is.set(true);
                over.notify.notify_waiters();
            }
        }
    }

    /// Completes at its end.
    async fn closed(&self) {
        match &self.link {
            Link::Sctp(connection) => connection.closed().await,
            Link::Mptcp { over, .. } => {
                let mut notified = pin!(over.notify.notified());
                // Before the question, so that no answer is missed.
                notified.as_mut().enable();
                if !over.is.get() {
                    notified.await;
                }
            }
        }
    }

    fn row(&self, role: &str) -> TunnelStatus {
        TunnelStatus {
            peer: self.key.peer,
            carrier: self.key.kind.name().to_owned(),
            role: role.to_owned(),
            flows: self.meter.flows.get(),
            bytes_sent: self.meter.sent.get(),
            bytes_received: self.meter.received.get(),
            path: match &self.link {
                Link::Sctp(connection) => Some(connection.figures()),
                Link::Mptcp { .. } => None,
            },
        }
    }

    /// Completes when the tunnel ends, or, with a limit, has had no flow for so long.
    async fn look_after(&self, idle: Option<Duration>) {
        loop {
            let idle = idle.filter(|_| self.meter.flows.get() == 0);
            tokio::select! {
                () = self.closed() => return,
                () = self.meter.changed.notified() => {}
                () = tokio::time::sleep(idle.unwrap_or(Duration::MAX)) => {
                    if self.meter.flows.get() == 0 {
                        return;
                    }
                }
            }
        }
    }
}
