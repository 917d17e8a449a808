//! Sessions over a graft as a carrier: one to each peer, requested from the broker as by an application.
//!
//! No grant is needed, which saves two round trips: sessions are opened to a VTL port of vtld's own, and their first
//! frame, HELLO, identifies the association. Each packet holds whole frames. Sessions over unreliable grafts
//! (`lossy.rs`) carry chunks of loss-tolerant flows.

mod load;
mod lossy;
mod moving;
mod session;

use std::{
    cell::{Cell, RefCell},
    io,
    net::IpAddr,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::unix::AsyncFd,
    sync::mpsc,
    task::{spawn_blocking, spawn_local},
    time::{Instant, timeout},
};
use vtl_control::Destination;
use vtl_proto::{
    carrier::{GRAFT_PORT, Kind},
    frame::CarrierId,
    services::Services,
};

use super::{
    super::{
        control::{emit, hello},
        parts::first,
        peer::Peer,
        socket::watch,
    },
    Arrivals, Carrier, Endpoint, Grantor, HANDSHAKE, Link, Local, Shown, ToOpen,
    layered::{self, CarrierLayers, Inbox},
};
use crate::{
    broker::{self, Doorbell, Owner, spec_for_flows},
    network::{Network, Waiting},
};
use moving::Graft;
pub(super) use moving::whole;
use session::{Hello, Session};

/// Maximum number of sessions waiting for HELLO.
const HALF_OPEN: usize = 64;
/// Initial round-trip time, before it is measured.
const RTT: Duration = Duration::from_millis(300);
/// Pause after a failed accept.
const PAUSE: Duration = Duration::from_millis(50);
/// Owner ids here count down; the broker's other owners, connections to the control socket, count up.
static LAST_OWNER: AtomicU64 = AtomicU64::new(u64::MAX);

fn next_owner() -> Owner {
    LAST_OWNER.fetch_sub(1, Ordering::Relaxed)
}

/// The open sessions.
#[derive(Default)]
struct Open {
    grafts: RefCell<Vec<Rc<Graft>>>,
    /// The doorbell works: a frame on the loopback wakes this thread.
    has_bell: Cell<bool>,
    /// Count of its wake-ups.
    heard: Cell<u64>,
}

/// This host's endpoint of all sessions.
pub(super) struct Sessions {
    broker: broker::Handle,
    open: Rc<Open>,
    is_over: Arc<AtomicBool>,
    /// The listening port; on drop, a pending accept fails.
    _listener: Owned,
}

/// A resource of the broker's; released on drop.
struct Owned {
    broker: broker::Handle,
    owner: Owner,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.broker.gone(self.owner);
    }
}

/// A session opened by either host.
struct Opened {
    granted: broker::Granted,
    owned: Owned,
}

impl Sessions {
    pub(super) fn start(arrivals: Arrivals, broker: &broker::Handle) -> io::Result<Self> {
        let listener = Owned {
            broker: broker.clone(),
            owner: next_owner(),
        };
        let key = broker.listen_for_flows(listener.owner);
        let key = key.map_err(io::Error::other)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let (opened, waiting) = mpsc::channel(HALF_OPEN);
        let over = Arc::clone(&is_over);
        std::thread::Builder::new()
            .name("vtl-accept".into())
            .spawn({
                let broker = broker.clone();
                move || accept(&broker, key, &opened, &over)
            })?;
        let sessions = Self {
            broker: broker.clone(),
            open: Rc::default(),
            is_over,
            _listener: listener,
        };
        match Doorbell::of_flows().and_then(watch) {
            Ok(doorbell) => drop(spawn_local(hear(doorbell, Rc::clone(&sessions.open)))),
            // Fallback: the event rings, at the cost of an interrupt per wake-up.
            Err(error) => {
                tracing::info!(%error, "wake-ups: cannot use the loopback: ring buffers used instead");
            }
        }
        spawn_local(admit(waiting, Rc::clone(&sessions.open), arrivals));
        Ok(sessions)
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Accepts sessions of peers until `is_over`. On a thread of its own, since the broker's accept blocks.
fn accept(broker: &broker::Handle, key: u64, opened: &mpsc::Sender<Opened>, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        let owned = Owned {
            broker: broker.clone(),
            owner: next_owner(),
        };
        match broker.accept_for_flows(owned.owner, key) {
            // Full (flood): the session is closed.
            Ok(granted) => drop(opened.try_send(Opened { granted, owned })),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

impl Endpoint for Sessions {
    fn grantor(&self) -> Option<&dyn Grantor> {
        None
    }

    fn connect(&self, opening: ToOpen) -> Local<'_, io::Result<Box<dyn Link>>> {
        let ToOpen {
            granted,
            rtt,
            options,
            encrypted,
            path,
            local,
        } = opening;
        Box::pin(async move {
            let to = Destination::Peer {
                host: granted.to.ip(),
                port: GRAFT_PORT,
            };
            let owned = Owned {
                broker: self.broker.clone(),
                owner: next_owner(),
            };
            // Dropped with this future: tells the broker that nobody waits any more.
            let waits = Arc::new(());
            let watch = Arc::downgrade(&waits);
            let asked = spawn_blocking(move || {
                let gone = || watch.strong_count() == 0;
                let mut request = spec_for_flows(options.as_deref());
                request.from = (path != 0).then_some(local);
                if encrypted {
                    request.wanted.services = request.wanted.services | Services::ENCRYPTION;
                }
                let granted = owned.broker.connect(owned.owner, to, &request, gone)?;
                Ok::<_, String>(Opened { granted, owned })
            });
            let began = Instant::now();
            let opened = timeout(HANDSHAKE, asked).await;
            let rtt = rtt.or(Some(began.elapsed()));
            let opened = opened.map_err(|_| io::ErrorKind::TimedOut)?;
            let opened = opened
                .map_err(io::Error::other)?
                .map_err(io::Error::other)?;
            let session = Session::new(opened)?;
            Ok(Box::new(Ready::new(session, None, path, rtt, &self.open)) as Box<dyn Link>)
        })
    }

    fn close(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.open
            .grafts
            .borrow()
            .iter()
            .for_each(|graft| graft.end());
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        // The broker tells the peers.
        Box::pin(async {})
    }
}

/// Handles the doorbell's wake-ups: polls the events of all sessions. Ends only on an error.
async fn hear(mut doorbell: AsyncFd<Doorbell>, open: Rc<Open>) {
    open.has_bell.set(true);
    while let Ok(mut ready) = doorbell.readable_mut().await {
        ready.clear_ready();
        ready.get_inner_mut().hear();
        open.heard.set(open.heard.get() + 1);
        for graft in &*open.grafts.borrow() {
            graft.session.take_events();
        }
    }
}

/// Waits for HELLO on accepted sessions, and passes them on with the association that it identifies.
async fn admit(mut opened: mpsc::Receiver<Opened>, open: Rc<Open>, arrivals: Arrivals) {
    let half_open = Waiting::new(HALF_OPEN);
    while let Some(opened) = opened.recv().await {
        let peer = opened.granted.grant.peer.to_canonical();
        let session = Session::new(opened);
        let place = half_open.enter(Network::of(peer));
        let (Ok(session), Some(place)) = (session, place) else {
            continue;
        };
        let (open, arrivals) = (Rc::clone(&open), arrivals.clone());
        spawn_local(async move {
            let hello = timeout(HANDSHAKE, session.hello()).await;
            drop(place);
            if let Ok(Some(said)) = hello {
                let shown = session.shown.map(Box::new);
                let (tag, path) = (said.tag, said.path);
                let ready = Ready::new(session, Some(said), path, None, &open);
                // Fails if the daemon is ending.
                let _ = arrivals.send((Shown::Association { peer, tag, shown }, Box::new(ready)));
            }
        });
    }
}

/// A session ready to serve.
struct Ready {
    graft: Rc<Graft>,
    /// The peer's HELLO, if the peer has opened it.
    said: Option<Hello>,
    rtt: Duration,
    open: Rc<Open>,
}

impl Ready {
    fn new(
        session: Session,
        said: Option<Hello>,
        path: u8,
        rtt: Option<Duration>,
        open: &Rc<Open>,
    ) -> Self {
        let graft = Rc::new(Graft::new(session));
        let rtt = rtt.unwrap_or(RTT);
        graft.loads.begin(path, rtt);
        open.grafts.borrow_mut().push(Rc::clone(&graft));
        Self {
            graft,
            said,
            rtt,
            open: Rc::clone(open),
        }
    }

    /// Authenticates the peer by the session's key. Without one: whether a session in the clear is acceptable.
    async fn is_admitted(&self, peer: &Peer) -> bool {
        let session = &self.graft.session;
        self.graft.loads.set_path(path_of(
            self.graft.loads.path(),
            session.between,
            (peer.key.local.to_canonical(), peer.key.peer.to_canonical()),
        ));
        if self.graft.loads.path() != 0 {
            // Of another address, it must show the same key, and disturbs nothing if it does not.
            return session.shown.is_some() && session.shown == peer.shown.get();
        }
        let Some(shown) = session.shown else {
            return !session.is_clear || !peer.refuses_clear();
        };
        if peer.shown.get() == Some(shown) {
            return true;
        }
        let flows = session.owned.broker.flows().clone();
        let (opener, address) = (peer.key.opener, peer.key.peer);
        // Off the event loop: it reads files.
        let judging = move || flows.identity().judge(opener, address, Some(shown), None);
        match spawn_blocking(judging).await {
            Ok(judged) => peer.note_identity(Some(shown), judged).is_ok(),
            Err(_) => false,
        }
    }
}

/// Number of a session's path, of which the peer says that it is `said`: 0 if it is the path of the flows' own
/// connections, `home`, whose firewalls hold for it then.
fn path_of(said: u8, between: (IpAddr, IpAddr), home: (IpAddr, IpAddr)) -> u8 {
    if between == home { 0 } else { said }
}

impl Drop for Ready {
    fn drop(&mut self) {
        self.graft.end();
        let mut grafts = self.open.grafts.borrow_mut();
        grafts.retain(|other| !Rc::ptr_eq(other, &self.graft));
    }
}

impl Link for Ready {
    fn has_layers(&self) -> bool {
        self.said.as_ref().is_some_and(|said| said.layers)
    }

    fn serve(
        self: Box<Self>,
        peer: Rc<Peer>,
        opened: Option<CarrierId>,
        layers: CarrierLayers,
    ) -> Local<'static, ()> {
        Box::pin(async move {
            let (graft, session) = (&self.graft, &self.graft.session);
            let working = async {
                let id = opened.or(self.said.as_ref().map(|said| said.carrier));
                let Some(id) = id else { return };
                let has_layers = layers.to_open.is_some() && !session.loses || self.has_layers();
                if !self.is_admitted(&peer).await {
                    return;
                }
                let path = graft.loads.path();
                let hello = emit(hello(id, peer.key.tag, path, has_layers));
                if session.loses {
                    if !graft.meet(&hello, opened.is_some(), self.rtt).await {
                        return;
                    }
                } else if opened.is_some() && graft.control(hello.clone()).await.is_err() {
                    return;
                }
                let dead = async {
                    match session.loses {
                        false => graft.dead(self.rtt, &self.open).await,
                        true => {
                            let asking = opened.is_some();
                            graft.attend(&peer, &hello, asking, self.rtt).await;
                        }
                    }
                    tracing::info!(peer = %peer.key.peer, carrier = %Kind::Graft, "carrier: closed: timeout, nothing received");
                };
                let inbox = has_layers.then(Rc::<Inbox>::default);
                let serving = first([
                    Box::pin(graft.receive(&peer, id, inbox.as_deref())),
                    Box::pin(graft.refill()),
                    Box::pin(dead),
                    Box::pin(graft.over()),
                ]);
                let carrier = Rc::clone(graft) as Rc<dyn Carrier>;
                if let Some(inbox) = &inbox {
                    let (peer, inbox) = (Rc::clone(&peer), Rc::clone(inbox));
                    layered::serve(carrier, peer, id, layers, inbox, serving).await;
                } else {
                    peer.run(id, carrier, serving).await;
                }
            };
            first([Box::pin(working), Box::pin(session.wake_up())]).await;
        })
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn path_of__is_of_the_addresses_whatever_the_peer_says() {
        let ip = |n| IpAddr::from([192, 0, 2, n]);
        let home = (ip(1), ip(2));
        assert_eq!(path_of(1, home, home), 0);
        for between in [(ip(1), ip(3)), (ip(4), ip(2))] {
            assert_eq!(path_of(1, between, home), 1);
            assert_eq!(path_of(0, between, home), 0, "the licence holds");
        }
    }
}
