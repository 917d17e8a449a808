//! Sessions over a graft as a carrier: one to each peer, which the broker is asked for as an application
//! would ask.
//!
//! Nothing is asked for and granted before, which saves two round trips: sessions come to a VTL port of vtld's
//! own, and whoever opens one says first, in HELLO, which association it is for. Each packet holds whole frames.
//! Sessions over grafts that are not reliable (`lossy.rs`) have chunks of flows that do without some.

mod lossy;
mod moving;
mod session;

use std::{
    cell::{Cell, RefCell},
    io,
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
};
use crate::broker::{self, Doorbell, Owner, wish};
use moving::Graft;
use session::Session;

/// Sessions at a time that have not said what they are for.
const HALF_OPEN: usize = 64;
/// A path's round-trip time before it is known.
const RTT: Duration = Duration::from_millis(300);
/// Between two attempts to accept, where there are no descriptors.
const PAUSE: Duration = Duration::from_millis(50);
/// Connections to the control socket, the broker's other owners, are counted from the other end.
static LAST_OWNER: AtomicU64 = AtomicU64::new(u64::MAX);

fn next_owner() -> Owner {
    LAST_OWNER.fetch_sub(1, Ordering::Relaxed)
}

/// Those that are open.
#[derive(Default)]
struct Open {
    grafts: RefCell<Vec<Rc<Graft>>>,
    /// A frame on the loopback wakes this thread.
    has_bell: Cell<bool>,
    /// How often it has.
    heard: Cell<u64>,
}

/// This host's part of all sessions.
pub(super) struct Sessions {
    broker: broker::Handle,
    open: Rc<Open>,
    is_over: Arc<AtomicBool>,
    /// Whoever waits for sessions is told when it goes.
    _listener: Owned,
}

/// Something of the broker's that goes when this does.
struct Owned {
    broker: broker::Handle,
    owner: Owner,
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.broker.gone(self.owner);
    }
}

/// A session that was opened, by either host.
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
            // The rings of events do, at the price of an interrupt each time.
            Err(error) => tracing::info!(%error, "no doorbell for flows"),
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

/// Takes sessions that peers open, one after the other, until it is over. The broker answers when there is
/// one, so this has a thread of its own.
fn accept(broker: &broker::Handle, key: u64, opened: &mpsc::Sender<Opened>, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        let owned = Owned {
            broker: broker.clone(),
            owner: next_owner(),
        };
        match broker.accept_for_flows(owned.owner, key) {
            // Of a flood the rest is closed.
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
            over,
            encrypted,
            ..
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
            // Nobody waits any more once this one has been dropped.
            let waits = Arc::new(());
            let watch = Arc::downgrade(&waits);
            let asked = spawn_blocking(move || {
                let gone = || watch.strong_count() == 0;
                let mut wish = wish(over.as_deref());
                if encrypted {
                    wish.wanted.services = wish.wanted.services | Services::ENCRYPTION;
                }
                let granted = owned.broker.connect(owned.owner, to, &wish, gone)?;
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
            Ok(Box::new(Ready::new(session, None, rtt, &self.open)) as Box<dyn Link>)
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
        // The broker tells them.
        Box::pin(async {})
    }
}

/// Passes on what the doorbell says, for good: in some session packets have come.
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

/// Lets in who says which association it is for.
async fn admit(mut opened: mpsc::Receiver<Opened>, open: Rc<Open>, arrivals: Arrivals) {
    let half_open = Rc::new(Cell::new(0));
    while let Some(opened) = opened.recv().await {
        let peer = opened.granted.grant.peer.to_canonical();
        let session = Session::new(opened);
        let Some(session) = session.ok().filter(|_| half_open.get() < HALF_OPEN) else {
            continue;
        };
        half_open.set(half_open.get() + 1);
        let (open, arrivals) = (Rc::clone(&open), arrivals.clone());
        let half_open = Rc::clone(&half_open);
        spawn_local(async move {
            let hello = timeout(HANDSHAKE, session.hello()).await;
            half_open.set(half_open.get() - 1);
            if let Ok(Some((number, tag))) = hello {
                let ready = Ready::new(session, Some(number), None, &open);
                // Nobody takes it where the daemon is ending.
                let _ = arrivals.send((Shown::Association { peer, tag }, Box::new(ready)));
            }
        });
    }
}

/// A session before it serves.
struct Ready {
    graft: Rc<Graft>,
    /// What the peer has said, if it has opened it.
    number: Option<CarrierId>,
    rtt: Duration,
    open: Rc<Open>,
}

impl Ready {
    fn new(
        session: Session,
        number: Option<CarrierId>,
        rtt: Option<Duration>,
        open: &Rc<Open>,
    ) -> Self {
        let graft = Rc::new(Graft::new(session));
        open.grafts.borrow_mut().push(Rc::clone(&graft));
        Self {
            graft,
            number,
            rtt: rtt.unwrap_or(RTT),
            open: Rc::clone(open),
        }
    }

    /// Whether the peer is who it has to be, as far as the session shows that.
    async fn is_admitted(&self, peer: &Peer) -> bool {
        let session = &self.graft.session;
        let Some(shown) = session.shown else {
            return !session.is_clear || !peer.refuses_clear();
        };
        if peer.shown.get() == Some(shown) {
            return true;
        }
        let flows = session.owned.broker.flows().clone();
        let (opener, address) = (peer.key.opener, peer.key.peer);
        // Files are read.
        let judging = move || flows.identity().judge(opener, address, Some(shown), None);
        match spawn_blocking(judging).await {
            Ok(judged) => peer.note_identity(Some(shown), judged).is_ok(),
            Err(_) => false,
        }
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        self.graft.end();
        let mut grafts = self.open.grafts.borrow_mut();
        grafts.retain(|other| !Rc::ptr_eq(other, &self.graft));
    }
}

impl Link for Ready {
    fn serve(self: Box<Self>, peer: Rc<Peer>, opened: Option<CarrierId>) -> Local<'static, ()> {
        Box::pin(async move {
            let (graft, session) = (&self.graft, &self.graft.session);
            let working = async {
                let id = opened.or(self.number);
                let Some(id) = id else { return };
                if !self.is_admitted(&peer).await {
                    return;
                }
                let hello = emit(hello(id, peer.key.tag));
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
                    tracing::info!(carrier = %Kind::Graft, "nothing comes back");
                };
                let serving = first([
                    Box::pin(graft.receive(&peer, id)),
                    Box::pin(graft.refill()),
                    Box::pin(dead),
                    Box::pin(graft.over()),
                ]);
                peer.run(id, Rc::clone(graft) as Rc<dyn Carrier>, serving)
                    .await;
            };
            first([Box::pin(working), Box::pin(session.wake_up())]).await;
        })
    }
}
