//! The side that opens a tunnel, and flows in it.

use std::{
    cell::RefCell,
    collections::HashMap,
    future::Future,
    io,
    net::{SocketAddr, TcpStream},
    pin::{Pin, pin},
    rc::Rc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{
    sync::oneshot,
    task::spawn_local,
    time::{error::Elapsed, timeout},
};
use vtl_proto::mux::ResetCode;

use super::{
    Discovered, Hub, Key, Kind, Link, Tunnel,
    flow::{self, App, Counted},
    mptcp,
    stream::{Broken, Receiver, Sender, Socket},
    wire,
    words::{FINGERPRINT, OPEN, Open, Word},
};
use crate::{
    broker::{set_linger, tcp_rtt},
    hooker::{ConnectError, HeldConnect},
};

/// How long the server's answer over TCP may take.
const ANSWER: Duration = Duration::from_secs(5);
/// How long flows wait for UDP to get through, besides round trips: with four of them, one packet
/// of the handshake may be lost.
const PATIENCE: Duration = Duration::from_millis(300);
const ROUND_TRIPS: u32 = 4;
/// How long a vtld's greeting may take besides round trips: it comes at once, but may get lost.
const GREETING_LATE: Duration = Duration::from_secs(1);
/// Assumed where TCP does not say.
const ROUND_TRIP: Duration = Duration::from_millis(100);
/// How long it is tried behind their backs.
const ATTEMPT: Duration = Duration::from_secs(10);
/// How long a host that did not take a tunnel is not asked again.
const FORGET: Duration = Duration::from_secs(120);
/// A tunnel without flows is closed after this time.
const IDLE: Duration = Duration::from_secs(300);

/// What has become of the tunnel to a host.
enum Slot {
    /// It is being opened, and flows wait for it.
    Opening(Vec<Discovered>),
    /// It is still tried, but takes too long for flows to wait.
    Late,
    Open(Rc<Tunnel>),
    /// It cannot be had before then.
    Failed {
        until: Instant,
    },
}

/// The tunnels of this side.
#[derive(Default)]
pub(super) struct Slots(RefCell<HashMap<Key, Slot>>);

impl Slots {
    pub(super) fn open(&self) -> Vec<Rc<Tunnel>> {
        let open = |slot: &Slot| match slot {
            Slot::Open(tunnel) => Some(Rc::clone(tunnel)),
            _ => None,
        };
        self.0.borrow().values().filter_map(open).collect()
    }

    fn get(&self, key: Key) -> Option<Rc<Tunnel>> {
        match self.0.borrow().get(&key) {
            Some(Slot::Open(tunnel)) => Some(Rc::clone(tunnel)),
            _ => None,
        }
    }
}

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("the peer's daemon does not answer: {0}")]
    NoAnswer(io::Error),
    #[error("the peer's daemon has none to give")]
    Refused,
    #[error("this host cannot have one: {0}")]
    Here(#[from] io::Error),
}

/// What the server has granted.
struct Granted {
    port: u16,
    token: u64,
}

impl Hub {
    /// A flow whose peer turned out to run VTL.
    pub(super) fn client(self: &Rc<Self>, flow: Discovered) {
        let mut slots = self.client.0.borrow_mut();
        match slots.get_mut(&flow.key) {
            Some(Slot::Open(tunnel)) => {
                let tunnel = Rc::clone(tunnel);
                drop(slots);
                self.start(&tunnel, flow);
            }
            Some(Slot::Opening(waiting)) => waiting.push(flow),
            Some(Slot::Late) => self.plain(flow.app, flow.dest, flow.peer),
            Some(Slot::Failed { until }) if *until > Instant::now() => {
                self.plain(flow.app, flow.dest, flow.peer);
            }
            None | Some(Slot::Failed { .. }) => {
                let now = Instant::now();
                slots.retain(|_, slot| !matches!(slot, Slot::Failed { until } if *until <= now));
                slots.insert(flow.key, Slot::Opening(Vec::new()));
                drop(slots);
                spawn_local(Rc::clone(self).open(flow));
            }
        }
    }

    /// Opens the tunnel that its first flow asks for.
    async fn open(self: Rc<Self>, first: Discovered) {
        let key = first.key;
        let rtt = tcp_rtt(&first.peer);
        let connecting = async {
            // First what may not be had here.
            let sctp = match key.kind {
                Kind::Sctp => Some(self.sctp()?),
                Kind::Mptcp => None,
                // Its flows have connections of their own.
                Kind::Quic => return Err(Refusal::Refused),
            };
            let granted = ask(key.kind, &first.peer).await?;
            let to = SocketAddr::new(key.peer, granted.port);
            let token = granted.token;
            if let Some(sctp) = sctp {
                let connecting = sctp.connect(key.local, to, token, rtt)?;
                let link = async { Ok(Link::Sctp(connecting.await?)) };
                return Ok::<_, Refusal>(Err(Box::pin(link) as Connecting));
            }
            Ok(Ok(Link::Mptcp {
                to,
                token,
                over: Rc::default(),
            }))
        };
        let connecting = match connecting.await {
            Ok(Err(connecting)) => connecting,
            // Its flows connect on their own.
            Ok(Ok(link)) => return self.opened(key, link, Some(first)),
            Err(refusal) => {
                tracing::info!(%refusal, peer = %key.peer, carrier = %key.kind, "plain TCP instead of a tunnel");
                self.set(key, Slot::failed());
                match refusal {
                    // Who does not know the word has ended the connection.
                    Refusal::NoAnswer(_) => self.plain_again(first.app, first.dest),
                    Refusal::Refused => self.carry_plain(first.app, first.peer),
                    Refusal::Here(_) => self.plain(first.app, first.dest, first.peer),
                }
                return;
            }
        };
        let patience = rtt.unwrap_or(ROUND_TRIP) * ROUND_TRIPS + PATIENCE;
        let mut connecting = pin!(timeout(ATTEMPT, connecting));
        match timeout(patience, &mut connecting).await {
            Ok(Ok(Ok(link))) => self.opened(key, link, Some(first)),
            Ok(failed) => {
                let failed = why(failed);
                tracing::info!(failed, peer = %key.peer, carrier = %key.kind, "plain TCP instead of a tunnel");
                self.set(key, Slot::failed());
                self.carry_plain(first.app, first.peer);
            }
            Err(_) => {
                tracing::debug!(peer = %key.peer, carrier = %key.kind, "plain TCP until there is a tunnel");
                self.set(key, Slot::Late);
                self.carry_plain(first.app, first.peer);
                match connecting.await {
                    Ok(Ok(link)) => self.opened(key, link, None),
                    failed => {
                        let failed = why(failed);
                        tracing::info!(failed, peer = %key.peer, carrier = %key.kind, "no tunnel");
                        self.set(key, Slot::failed());
                    }
                }
            }
        }
    }

    /// Changes what has become of a tunnel; flows that waited for another outcome go by plain TCP.
    fn set(self: &Rc<Self>, key: Key, slot: Slot) {
        let before = self.client.0.borrow_mut().insert(key, slot);
        if let Some(Slot::Opening(waiting)) = before {
            for flow in waiting {
                self.plain(flow.app, flow.dest, flow.peer);
            }
        }
    }

    /// There is a tunnel. Of its first flow the discovery connection becomes the lifeline.
    fn opened(self: &Rc<Self>, key: Key, link: Link, first: Option<Discovered>) {
        let tunnel = Rc::new(Tunnel::new(key, link));
        let before = self
            .client
            .0
            .borrow_mut()
            .insert(key, Slot::Open(Rc::clone(&tunnel)));
        self.shared.set_open(key, true);
        let lifeline = first.map(
            |Discovered {
                 app,
                 dest,
                 src,
                 peer,
                 ..
             }| {
                // Of a new tunnel it gets a stream, or there is none any more and it is reset.
                let _ = self.start_stream(&tunnel, app, dest, src);
                wire::keep_asking(&peer);
                peer
            },
        );
        if let Some(Slot::Opening(waiting)) = before {
            for flow in waiting {
                self.start(&tunnel, flow);
            }
        }
        spawn_local(Rc::clone(self).keep(tunnel, lifeline));
    }

    /// Until the tunnel's end.
    async fn keep(self: Rc<Self>, tunnel: Rc<Tunnel>, lifeline: Option<TcpStream>) {
        tokio::select! {
            () = tunnel.look_after(Some(IDLE)) => {}
            () = wire::ended(lifeline.as_ref()) => {}
        }
        self.shared.set_open(tunnel.key, false);
        self.client.0.borrow_mut().remove(&tunnel.key);
        tunnel.close();
        if let Some(lifeline) = lifeline {
            set_linger(&lifeline, false);
        }
    }

    /// A flow whose application is connected already goes into the tunnel.
    fn start(self: &Rc<Self>, tunnel: &Rc<Tunnel>, flow: Discovered) {
        let Discovered {
            app,
            dest,
            src,
            peer,
            ..
        } = flow;
        match self.start_stream(tunnel, app, dest, src) {
            // Without a word the peer lets it go.
            Ok(()) => set_linger(&peer, false),
            Err(app) => self.plain(app, dest, peer),
        }
    }

    /// Gives the application back if the tunnel is full.
    fn start_stream(
        self: &Rc<Self>,
        tunnel: &Rc<Tunnel>,
        app: TcpStream,
        dest: SocketAddr,
        src: SocketAddr,
    ) -> Result<(), TcpStream> {
        let Some(opening) = Opening::new(tunnel, dest, src) else {
            return Err(app);
        };
        let (hub, key) = (Rc::clone(self), tunnel.key);
        spawn_local(async move {
            let Some((sender, receiver, counted)) = opening.wait().await else {
                // Nothing was taken from the application yet.
                hub.unreachable(key);
                hub.plain_again(app, dest);
                return;
            };
            if let Ok(app) = App::new(app, None) {
                finished(
                    flow::carry(app, sender, receiver, true, counted).await,
                    dest,
                );
            }
        });
        Ok(())
    }

    /// A flow of a tunnel that is no connection of its own did not get through.
    fn unreachable(self: &Rc<Self>, key: Key) {
        tracing::info!(peer = %key.peer, carrier = %key.kind, "plain TCP instead of a tunnel");
        if let Some(tunnel) = self.client.get(key) {
            tunnel.close();
        }
        self.shared.set_open(key, false);
        self.set(key, Slot::failed());
    }

    /// A connect to a host with a tunnel.
    pub(super) fn held(self: &Rc<Self>, key: Key, held: HeldConnect) {
        let opening = self
            .client
            .get(key)
            .and_then(|tunnel| Opening::new(&tunnel, held.dest(), held.src()));
        let Some(opening) = opening else {
            return held.fall_back();
        };
        let hub = Rc::clone(self);
        spawn_local(async move {
            match opening.wait().await {
                Some((sender, receiver, counted)) => connect(held, sender, receiver, counted).await,
                None => {
                    hub.unreachable(key);
                    held.fall_back();
                }
            }
        });
    }

    /// Carries a flow over its discovery connection; over another one if a vtld does not answer there:
    /// a network that spoils the option of discovery may have led it to the application.
    pub(super) fn plain(self: &Rc<Self>, app: TcpStream, dest: SocketAddr, peer: TcpStream) {
        let patience = tcp_rtt(&peer).unwrap_or(ROUND_TRIP) * ROUND_TRIPS + GREETING_LATE;
        let hub = Rc::clone(self);
        spawn_local(async move {
            match timeout(patience, wire::greeting(&peer)).await {
                Ok(Ok(())) => hub.carry_plain(app, peer),
                _ => {
                    set_linger(&peer, false);
                    hub.plain_again(app, dest);
                }
            }
        });
    }

    /// Carries a flow over its discovery connection, on which a vtld has answered.
    fn carry_plain(&self, app: TcpStream, peer: TcpStream) {
        if wire::say(&peer, &Word::Plain.emit()).is_ok() {
            self.hooker.carry(app, peer, None);
        }
    }

    /// Carries a flow over a new connection: its discovery connection has ended, or serves another
    /// purpose.
    fn plain_again(&self, app: TcpStream, dest: SocketAddr) {
        match self.hooker.connect_plain(dest) {
            Ok(peer) => self.hooker.carry(app, peer, None),
            Err(error) => tracing::debug!(%error, %dest, "no second connection"),
        }
    }
}

impl Slot {
    fn failed() -> Self {
        Self::Failed {
            until: Instant::now() + FORGET,
        }
    }
}

/// Asks for a tunnel on a discovery connection.
async fn ask(kind: Kind, peer: &TcpStream) -> Result<Granted, Refusal> {
    let exchange = async {
        // What is said before may be heard by the application.
        wire::greeting(peer).await?;
        wire::say(peer, &Word::Ask(kind).emit())?;
        match wire::word(peer).await? {
            Word::Granted { port, token } => {
                // Of a certificate, which neither carrier has.
                let _: [u8; FINGERPRINT] = wire::read(peer).await?;
                Ok(Some(Granted { port, token }))
            }
            Word::Refused => Ok(None),
            Word::Plain | Word::Ask(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    };
    let late = || Err(io::ErrorKind::TimedOut.into());
    let answer = timeout(ANSWER, exchange).await.unwrap_or_else(|_| late());
    answer.map_err(Refusal::NoAnswer)?.ok_or(Refusal::Refused)
}

/// A tunnel in the making.
type Connecting = Pin<Box<dyn Future<Output = io::Result<Link>>>>;

/// Why there is none, of the outcome of one.
fn why(outcome: Result<io::Result<Link>, Elapsed>) -> String {
    match outcome {
        Ok(Err(error)) => error.to_string(),
        _ => "no answer".to_owned(),
    }
}

/// `None` where the peer does not get to hear of it.
type OpeningStream = Pin<Box<dyn Future<Output = Option<(Sender, Receiver)>>>>;

/// A stream in the making.
struct Opening {
    stream: OpeningStream,
    counted: Counted,
}

impl Opening {
    /// `None` if the tunnel is full, or has ended.
    fn new(tunnel: &Rc<Tunnel>, dest: SocketAddr, src: SocketAddr) -> Option<Self> {
        let open = Open {
            dest_port: dest.port(),
            src_port: src.port(),
        };
        let counted = Counted::new(&tunnel.meter);
        counted.said(OPEN);
        let stream: OpeningStream = match &tunnel.link {
            Link::Sctp(connection) => {
                let (sender, receiver) = connection.open()?;
                let header = Bytes::copy_from_slice(&open.emit());
                Box::pin(async move {
                    let mut sender = Sender::Sctp(sender);
                    let _ = sender.write(header).await;
                    Some((sender, Receiver::sctp(receiver)))
                })
            }
            Link::Mptcp { to, token, .. } => {
                let header = [&token.to_be_bytes()[..], &open.emit()].concat();
                let to = *to;
                Box::pin(async move {
                    let connected = timeout(ATTEMPT, mptcp_stream(to)).await;
                    let socket = connected.ok()?.ok()?;
                    let mut sender = Sender::Socket(socket.clone());
                    let _ = sender.write(header.into()).await;
                    Some((sender, Receiver::socket(socket)))
                })
            }
        };
        Some(Self { stream, counted })
    }

    /// `None` if the peer does not get to hear of it.
    async fn wait(self) -> Option<(Sender, Receiver, Counted)> {
        let (sender, receiver) = self.stream.await?;
        Some((sender, receiver, self.counted))
    }
}

async fn mptcp_stream(to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(mptcp::begin(to)?)?;
    socket.connected().await?;
    Ok(socket)
}

fn finished(result: Result<(), Broken>, dest: SocketAddr) {
    if let Err(broken) = result {
        tracing::debug!(%broken, %dest, "a flow was reset");
    }
}

/// Answers a waiting connect as the peer does, and carries its flow.
async fn connect(held: HeldConnect, sender: Sender, mut receiver: Receiver, counted: Counted) {
    let dest = held.dest();
    match flow::opened(&mut receiver).await {
        Ok(()) => {}
        Err(Broken::Reset(code)) => {
            return match code {
                ResetCode::NotHooked => held.fall_back(),
                ResetCode::Unreachable => held.refuse(ConnectError::HostUnreachable),
                ResetCode::Timeout => held.refuse(ConnectError::TimedOut),
                ResetCode::Rst | ResetCode::Refused => held.refuse(ConnectError::Refused),
            };
        }
        Err(_) => return held.fall_back(),
    }
    let (accepted, app) = oneshot::channel();
    held.accept(move |app| {
        // Nobody waits for it where the daemon is ending.
        let _ = accepted.send(app);
    });
    let app = app.await.ok().and_then(Result::ok);
    if let Some(app) = app.and_then(|app| App::new(app, None).ok()) {
        finished(
            flow::carry(app, sender, receiver, false, counted).await,
            dest,
        );
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

    use super::*;

    #[test]
    fn ask__says_nothing_to_an_application() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        peer.set_nonblocking(true).unwrap();
        let mut application = listener.accept().unwrap().0;
        application.write_all(b"220 ready, talk\n").unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let answer = runtime.block_on(ask(Kind::Sctp, &peer));
        assert!(matches!(answer, Err(Refusal::NoAnswer(_))));
        drop(peer);
        let mut heard = Vec::new();
        application.read_to_end(&mut heard).unwrap();
        assert!(heard.is_empty(), "{heard:?}");
    }
}
