//! The side that grants tunnels, and reaches local applications for their flows.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    pin::pin,
    rc::Rc,
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::{mpsc, oneshot},
    task::spawn_local,
    time::{sleep, timeout},
};
use vtl_proto::mux::ResetCode;

use super::{
    Hub, Key, Kind, Link, Tunnel,
    flow::{self, App, Counted},
    mptcp::Listener,
    quic::Grant,
    sctp,
    stream::{Receiver, Sender, Socket},
    wire,
    words::{self, FINGERPRINT, OPEN, Open, WORD, Word},
};
use crate::{
    broker::{random_token, tcp_rtt},
    hooker::ServerFlow,
};

/// Tunnels that are open or may be opened, at a time.
const MOST: usize = 1024;
/// How long a grant is good.
const GRANT: Duration = Duration::from_secs(15);
/// How long a stream may take to say what it is for.
const HEADER: Duration = Duration::from_secs(10);

/// Connections over MPTCP at a time that have not said what they are for.
const HALF_OPEN: usize = 256;
/// Between two attempts to accept, where there are no descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// What a token is good for.
struct Promise {
    key: Key,
    /// Whoever holds the discovery connection, which becomes the lifeline.
    tie: oneshot::Sender<Rc<Tunnel>>,
}

/// The tunnels that peers have opened.
#[derive(Default)]
pub(super) struct Served {
    promises: RefCell<HashMap<u64, Promise>>,
    tunnels: RefCell<Vec<Rc<Tunnel>>>,
    /// Those of them that are found by token, each time.
    by_token: RefCell<HashMap<u64, Rc<Tunnel>>>,
}

impl Served {
    pub(super) fn all(&self) -> Vec<Rc<Tunnel>> {
        self.tunnels.borrow().clone()
    }

    /// One that is found by token.
    fn enter(&self, token: u64, tunnel: &Rc<Tunnel>) {
        self.tunnels.borrow_mut().push(Rc::clone(tunnel));
        self.by_token.borrow_mut().insert(token, Rc::clone(tunnel));
    }

    fn find(&self, token: u64) -> Option<Rc<Tunnel>> {
        self.by_token.borrow().get(&token).cloned()
    }

    fn forget(&self, tunnel: &Rc<Tunnel>) {
        let mut all = self.tunnels.borrow_mut();
        all.retain(|other| !Rc::ptr_eq(other, tunnel));
    }

    fn is_full(&self) -> bool {
        self.promises.borrow().len() + self.tunnels.borrow().len() >= MOST
    }
}

/// The server's word, and the fingerprint behind it.
fn granted(port: u16, token: u64, fingerprint: &[u8; FINGERPRINT]) -> [u8; WORD + FINGERPRINT] {
    let mut answer = [0; WORD + FINGERPRINT];
    answer[..WORD].copy_from_slice(&Word::Granted { port, token }.emit());
    answer[WORD..].copy_from_slice(fingerprint);
    answer
}

/// Waits for the tunnel that was granted on a discovery connection, and for its end. Or until the
/// client goes on over that connection, since the tunnel took too long for its first flow: then true,
/// and the tunnel that may have come meanwhile is for others and has no lifeline.
async fn goes_on_plain(peer: &TcpStream, tied: oneshot::Receiver<Rc<Tunnel>>) -> bool {
    let mut word = pin!(async { matches!(wire::word(peer).await, Ok(Word::Plain)) });
    let tunnel = tokio::select! {
        plain = &mut word => return plain,
        tunnel = tied => tunnel,
    };
    let Ok(tunnel) = tunnel else {
        return false; // nobody has come for it
    };
    wire::keep_asking(peer);
    tokio::select! {
        plain = &mut word => {
            if !plain {
                tunnel.close();
            }
            plain
        }
        () = tunnel.closed() => false,
    }
}

impl Hub {
    /// A client asks for a tunnel on its discovery connection.
    pub(super) async fn serve_asked(self: Rc<Self>, kind: Kind, flow: ServerFlow) {
        match kind {
            Kind::Sctp => self.serve_promised(flow).await,
            Kind::Mptcp => self.serve_mptcp(flow).await,
            // A release before this one asks for it.
            Kind::Quic => self.refuse(flow).await,
        }
    }

    /// Grants MPTCP: the tunnel is there at once.
    async fn serve_mptcp(self: Rc<Self>, flow: ServerFlow) {
        let port = match self.mptcp() {
            Ok(port) if !self.served.is_full() => port,
            _ => return self.refuse(flow).await,
        };
        let token = random_token();
        let key = Key {
            kind: Kind::Mptcp,
            local: flow.dest.ip(),
            peer: flow.client.ip(),
        };
        let link = Link::Mptcp {
            to: flow.client,
            token,
            over: Rc::default(),
        };
        let tunnel = Rc::new(Tunnel::new(key, link));
        self.served.enter(token, &tunnel);
        if wire::say(&flow.peer, &granted(port, token, &[0; FINGERPRINT])).is_ok() {
            wire::keep_asking(&flow.peer);
            wire::ended(Some(&flow.peer)).await;
        }
        tunnel.close();
        self.served.by_token.borrow_mut().remove(&token);
        self.served.forget(&tunnel);
    }

    /// Flows over MPTCP.
    pub(super) async fn accept_mptcp(self: Rc<Self>, listener: Listener) {
        let half_open = Rc::new(Cell::new(0));
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "accepting MPTCP");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            if half_open.get() >= HALF_OPEN {
                continue;
            }
            half_open.set(half_open.get() + 1);
            let (hub, half_open) = (Rc::clone(&self), Rc::clone(&half_open));
            spawn_local(async move {
                let said = timeout(HEADER, wire::read::<8>(&stream)).await;
                half_open.set(half_open.get() - 1);
                let Ok(Ok(token)) = said else { return };
                let tunnel = hub.served.find(u64::from_be_bytes(token));
                let tunnel = tunnel.filter(|tunnel| tunnel.key.peer == from);
                if let (Some(tunnel), Ok(socket)) = (tunnel, Socket::new(stream)) {
                    let receiver = Receiver::socket(socket.clone());
                    let sender = Sender::Socket(socket);
                    // Its flows end with it.
                    tokio::select! {
                        () = tunnel.closed() => {}
                        () = hub.serve_flow(Rc::clone(&tunnel), sender, receiver) => {}
                    }
                }
            });
        }
    }

    /// There is no tunnel to have.
    async fn refuse(&self, flow: ServerFlow) {
        if wire::say(&flow.peer, &Word::Refused.emit()).is_ok() {
            self.serve_plain(flow).await;
        }
    }

    /// Promises an association, and waits for it.
    async fn serve_promised(self: Rc<Self>, flow: ServerFlow) {
        let sctp = match self.sctp() {
            Ok(sctp) if !self.served.is_full() => sctp,
            _ => return self.refuse(flow).await,
        };
        let token = loop {
            let token = random_token();
            if sctp::is_fit(token) {
                break token;
            }
        };
        let key = Key {
            kind: Kind::Sctp,
            local: flow.dest.ip(),
            peer: flow.client.ip(),
        };
        let (tie, tied) = oneshot::channel();
        let grant = Grant {
            client: key.peer,
            rtt: tcp_rtt(&flow.peer),
        };
        sctp.grant(token, &grant);
        let port = sctp.port;
        self.served
            .promises
            .borrow_mut()
            .insert(token, Promise { key, tie });
        let expiring = Rc::clone(&self);
        spawn_local(async move {
            sleep(GRANT).await;
            sctp.revoke(token);
            expiring.served.promises.borrow_mut().remove(&token);
        });
        if wire::say(&flow.peer, &granted(port, token, &[0; FINGERPRINT])).is_err() {
            return;
        }
        if goes_on_plain(&flow.peer, tied).await {
            self.reach(flow);
        }
    }

    /// The client may go on over a connection on which no tunnel was granted.
    async fn serve_plain(&self, flow: ServerFlow) {
        if let Ok(Ok(Word::Plain)) = timeout(GRANT, wire::word(&flow.peer)).await {
            self.reach(flow);
        }
    }

    /// Connects a discovery connection to the application.
    fn reach(&self, flow: ServerFlow) {
        match self.hooker.connect_local_app(flow.dest, flow.client) {
            Ok((app, guard)) => self.hooker.carry(flow.peer, app, Some(guard)),
            Err(error) => {
                tracing::debug!(%error, dest = %flow.dest, "the local application cannot be reached");
            }
        }
    }

    /// Associations that clients have opened with their tokens.
    pub(super) async fn accept_sctp(
        self: Rc<Self>,
        mut incoming: mpsc::UnboundedReceiver<(u64, sctp::Connection)>,
    ) {
        while let Some((token, connection)) = incoming.recv().await {
            match self.promised(token) {
                Some(promise) => {
                    spawn_local(Rc::clone(&self).serve_sctp(promise, connection));
                }
                None => connection.close(),
            }
        }
    }

    /// An association, until its end.
    async fn serve_sctp(self: Rc<Self>, promise: Promise, connection: sctp::Connection) {
        let tunnel = self.begin(promise, Link::Sctp(connection.clone()));
        while let Some((sender, receiver)) = connection.accept().await {
            let (sender, receiver) = (Sender::Sctp(sender), Receiver::sctp(receiver));
            spawn_local(Rc::clone(&self).serve_flow(Rc::clone(&tunnel), sender, receiver));
        }
        self.served.forget(&tunnel);
    }

    fn promised(&self, token: u64) -> Option<Promise> {
        self.served.promises.borrow_mut().remove(&token)
    }

    /// A tunnel is there.
    fn begin(&self, Promise { key, tie }: Promise, link: Link) -> Rc<Tunnel> {
        let tunnel = Rc::new(Tunnel::new(key, link));
        tracing::debug!(peer = %key.peer, carrier = %key.kind, "a tunnel is open");
        self.served.tunnels.borrow_mut().push(Rc::clone(&tunnel));
        // Where the first flow has gone on as plain TCP there is no lifeline.
        let _ = tie.send(Rc::clone(&tunnel));
        tunnel
    }

    /// One flow of a peer's.
    async fn serve_flow(
        self: Rc<Self>,
        tunnel: Rc<Tunnel>,
        mut sender: Sender,
        mut receiver: Receiver,
    ) {
        let counted = Counted::new(&tunnel.meter);
        let (server, client): (IpAddr, IpAddr) = (tunnel.key.local, tunnel.key.peer);
        drop(tunnel);
        let mut header = [0; OPEN];
        let said = timeout(HEADER, receiver.read_exact(&mut header)).await;
        let open = match (said, Open::parse(&header)) {
            (Ok(Ok(())), Some(open)) => open,
            _ => return,
        };
        let dest = SocketAddr::new(server, open.dest_port);
        let client = SocketAddr::new(client, open.src_port);
        match self.reached(dest, client, &sender).await {
            Ok(app) => {
                counted.said(1);
                if sender
                    .write(Bytes::from_static(&[words::OPENED]))
                    .await
                    .is_ok()
                    && let Err(broken) = flow::carry(app, sender, receiver, false, counted).await
                {
                    tracing::debug!(%broken, %dest, "a flow was reset");
                }
            }
            Err(code) => {
                if receiver.ends_by_record() {
                    let answer = [words::RESET, code.to_wire() as u8];
                    let _ = sender.write(Bytes::copy_from_slice(&answer)).await;
                }
                sender.reset(code);
                receiver.stop(code);
            }
        }
    }

    /// The local application's connection, or why there is none.
    async fn reached(
        &self,
        dest: SocketAddr,
        client: SocketAddr,
        sender: &Sender,
    ) -> Result<App, ResetCode> {
        // A stream reaches nothing that TCP over the same path would not reach.
        if !self.hooker.serves(dest) {
            return Err(ResetCode::NotHooked);
        }
        let code = |error: io::Error| match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => ResetCode::Refused,
            Some(libc::ETIMEDOUT) => ResetCode::Timeout,
            Some(libc::EHOSTUNREACH | libc::ENETUNREACH) => ResetCode::Unreachable,
            _ => ResetCode::Rst,
        };
        let (app, guard) = self.hooker.connect_local_app(dest, client).map_err(code)?;
        let app = App::new(app, Some(Box::new(guard))).map_err(code)?;
        tokio::select! {
            connected = app.connected() => connected.map(|()| app).map_err(code),
            _ = sender.stopped() => Err(ResetCode::Rst),
        }
    }
}
