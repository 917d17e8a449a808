//! Sessions over a graft as a carrier: one to each peer, which the broker is asked for as an application
//! would ask.
//!
//! Nothing is asked for and granted before, which saves two round trips: sessions come to a VTL port of vtld's
//! own, and whoever opens one says first, in HELLO, which association it is for. Each packet holds whole frames.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
    io, mem,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, Semaphore, mpsc},
    task::{spawn_blocking, spawn_local},
    time::{Instant, interval, timeout},
};
use vtl_bpf::sessions::SessionTable;
use vtl_control::{CarrierPath, Destination};
use vtl_core::flow::Chunk;
use vtl_proto::{
    carrier::{GRAFT_PORT, Kind},
    frame::{CarrierId, FlowId, Frame, FrameError, HEADER, Side},
};
use vtl_ring::{Events, RxRing, TxRing, egress};

use super::{
    super::{
        control::{emit, hello},
        peer::Peer,
        socket::watch,
    },
    Arrivals, Carrier, Endpoint, Grantor, HANDSHAKE, Link, Local, Refused, SILENCE, Shown, Taking,
    ToOpen,
};
use crate::broker::{self, Doorbell, Owner, wish};

/// Packets that are published, and read, at once.
const BURST: usize = 256;
/// Bytes of a flow that are put together before the flow gets them.
const RUN: usize = 128 << 10;
/// Bytes that wait for room in the ring: at least one chunk of the longest kind.
const MOST_WAITING: usize = 128 << 10;
/// Sessions at a time that have not said what they are for.
const HALF_OPEN: usize = 64;
/// A path's round-trip time before it is known.
const RTT: Duration = Duration::from_millis(300);
/// So many times that the doorbell told nothing of events, it is given up.
const UNHEARD: u32 = 8;
/// Between two looks whether the path is dead, and at its figures.
const TICK: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_secs(1);
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
            .spawn(move || accept(&listener, key, &opened, &over))?;
        let sessions = Self {
            broker: broker.clone(),
            open: Rc::default(),
            is_over,
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
fn accept(listener: &Owned, key: u64, opened: &mpsc::Sender<Opened>, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        let owned = Owned {
            broker: listener.broker.clone(),
            owner: next_owner(),
        };
        let accepted = owned
            .broker
            .accept(owned.owner, Some(key), || is_over.load(Ordering::Relaxed));
        let Ok(granted) = accepted else { return };
        // Of a flood the rest is closed.
        let _ = opened.try_send(Opened { granted, owned });
    }
}

impl Endpoint for Sessions {
    fn grantor(&self) -> Option<&dyn Grantor> {
        None
    }

    fn connect(&self, opening: ToOpen) -> Local<'_, io::Result<Box<dyn Link>>> {
        let ToOpen {
            granted, rtt, over, ..
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
                let granted =
                    owned
                        .broker
                        .connect(owned.owner, to, &wish(over.as_deref()), gone)?;
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

/// This host's end of a session.
struct Session {
    tx: RefCell<TxRing>,
    rx: RefCell<RxRing>,
    /// Towards the broker.
    kick: OwnedFd,
    /// By which egress runs here.
    caller: Option<OwnedFd>,
    /// Its entry is `sid`.
    table: Option<Arc<SessionTable>>,
    sid: u32,
    /// From the broker.
    wake: AsyncFd<OwnedFd>,
    /// From the kernel, unless it leaves them to the broker.
    events: Option<AsyncFd<Events>>,
    /// There may be room to send.
    room: Notify,
    /// There may be packets to read.
    news: Notify,
    /// Egress sleeps and is to be woken; bytes of the packet where it is but one.
    sleeps: Cell<Option<u32>>,
    published: Notify,
    owned: Owned,
}

impl Session {
    fn new(opened: Opened) -> io::Result<Self> {
        let Opened { granted, owned } = opened;
        let [transmit, receive, kick, wake] = granted.rings;
        let (slots, payload) = (granted.grant.slots, granted.grant.max_payload);
        let events = granted.events.map(Events::map).transpose()?;
        Ok(Self {
            tx: RefCell::new(TxRing::map(transmit.as_fd(), slots, payload)?),
            rx: RefCell::new(RxRing::map(receive.as_fd(), slots)?),
            kick,
            caller: granted.caller,
            table: owned.broker.sessions().cloned(),
            sid: granted.grant.sid,
            wake: watch(wake)?,
            events: events.map(watch).transpose()?,
            room: Notify::new(),
            news: Notify::new(),
            sleeps: Cell::new(None),
            published: Notify::new(),
            owned,
        })
    }

    /// Which carrier the peer says this is, and of which association.
    async fn hello(&self) -> Option<(CarrierId, u32)> {
        let packet = tokio::select! {
            packet = self.first() => packet?,
            () = self.wake_up() => return None,
        };
        match Frame::take(&mut &packet[..]) {
            Ok(Frame::Hello { carrier, tag }) if carrier.opener == Side::Peer => {
                Some((carrier, tag))
            }
            _ => None,
        }
    }

    async fn first(&self) -> Option<Vec<u8>> {
        if !self.readable().await {
            return None;
        }
        let packet = self.rx.borrow().packet(0).to_vec();
        self.consume(1);
        Some(packet)
    }

    /// Passes wake-ups on, for good.
    async fn wake_up(&self) {
        let from_kernel = async {
            match &self.events {
                Some(events) => loop {
                    let Ok(mut ready) = events.readable().await else {
                        return;
                    };
                    ready.clear_ready();
                    self.take_events();
                },
                None => std::future::pending().await,
            }
        };
        let from_broker = async {
            let read = |fd: &OwnedFd| Ok(nix::unistd::read(fd, &mut [0; 8])?);
            while self.wake.async_io(Interest::READABLE, read).await.is_ok() {
                self.room.notify_one();
                self.news.notify_one();
            }
        };
        tokio::join!(from_kernel, from_broker, self.wake_egress());
    }

    /// Passes the kernel's events on, if there are any.
    fn take_events(&self) -> bool {
        let events = self.events.as_ref().map(AsyncFd::get_ref);
        let pending = events.filter(|events| events.is_pending());
        if let Some(events) = pending {
            events.clear();
            self.room.notify_one();
            self.news.notify_one();
        }
        pending.is_some()
    }

    fn kick(&self) {
        // Fails only if the counter is full, which takes thousands of years.
        let _ = nix::unistd::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Hands over the packets that lie in the next slots. Egress is woken once all that there is to send has
    /// been handed over, as each wake-up costs more than a packet.
    fn publish(&self, lengths: &[u32]) {
        let sleeps = self.tx.borrow_mut().publish(lengths);
        if sleeps {
            let single = if let [one] = lengths { *one } else { 0 };
            self.sleeps.set(Some(single));
            self.published.notify_one();
        } else if self.sleeps.get().is_some() {
            self.sleeps.set(Some(0));
        }
    }

    /// Wakes egress where it sleeps, for good.
    async fn wake_egress(&self) {
        loop {
            if let Some(single) = self.sleeps.take() {
                let caller = self.caller.as_ref().filter(|_| single > 0);
                if !caller.is_some_and(|caller| egress::run(caller, single)) {
                    self.kick();
                }
            }
            self.published.notified().await;
        }
    }

    /// Which packets have come of 64; `None` behind the last one, or if the session has ended.
    fn arrived(&self, word: u64) -> Option<u64> {
        let arrived = self.table.as_ref()?.get(self.sid)?.arrived(word);
        // The entry is another session's some time after this one's end, of which the ring says first.
        arrived.filter(|_| self.rx.borrow().closed().is_none())
    }

    /// Whether the session has ended, and all was read.
    fn is_at_end(&self) -> bool {
        let mut rx = self.rx.borrow_mut();
        // What arrived before the end was published before it.
        rx.closed().is_some() && rx.available() == 0
    }

    /// Announces that nothing is read before a wake-up. False if there is something in order.
    fn prepare_wait(&self, behind_gaps: bool) -> bool {
        let mut rx = self.rx.borrow_mut();
        match behind_gaps {
            true => rx.prepare_wait_for_any(),
            false => rx.prepare_wait(),
        }
    }

    /// Waits for packets; false if the session has ended and all were read.
    async fn readable(&self) -> bool {
        loop {
            {
                let mut rx = self.rx.borrow_mut();
                // What arrived before the end was published before it.
                let is_closed = rx.closed().is_some();
                if rx.available() > 0 {
                    return true;
                }
                if is_closed {
                    return false;
                }
                if !rx.prepare_wait() {
                    continue;
                }
            }
            self.news.notified().await;
        }
    }

    /// Frees the places of so many packets that were read.
    fn consume(&self, packets: u64) {
        let mut rx = self.rx.borrow_mut();
        if rx.consume(packets) {
            rx.offer_room();
            self.kick();
        }
    }

    /// Keeps figures of the path, up to the session's end.
    async fn look(&self, figures: &Cell<Option<CarrierPath>>) {
        let mut looks = interval(LOOK);
        loop {
            looks.tick().await;
            let Owned { broker, owner } = &self.owned;
            let (broker, owner) = (broker.clone(), *owner);
            let asked = spawn_blocking(move || broker.statistics(owner)).await;
            let Ok(Ok(status)) = asked else { return };
            figures.set(Some(CarrierPath {
                rtt_ms: status.rtt_ms,
                sent: status.sent,
                lost: status.lost,
                refused: None,
            }));
        }
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
        let graft = Rc::new(Graft {
            session,
            control: RefCell::default(),
            chunks: RefCell::default(),
            room: Semaphore::new(MOST_WAITING),
            is_over: Cell::new(false),
            over: Notify::new(),
            figures: Cell::new(None),
            seen: RefCell::default(),
        });
        open.grafts.borrow_mut().push(Rc::clone(&graft));
        Self {
            graft,
            number,
            rtt: rtt.unwrap_or(RTT),
            open: Rc::clone(open),
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
                if let Some(id) = opened {
                    let hello = emit(hello(id, peer.key.tag));
                    if graft.control(hello).await.is_err() {
                        return;
                    }
                }
                let id = opened.or(self.number);
                let Some(id) = id else { return };
                let serving = async {
                    tokio::select! {
                        () = graft.receive(&peer, id) => {}
                        () = graft.refill() => {}
                        () = session.look(&graft.figures) => {}
                        () = graft.dead(self.rtt, &self.open) => {
                            tracing::info!(carrier = %Kind::Graft, "nothing comes back");
                        }
                        () = graft.over() => {}
                    }
                };
                peer.run(id, Rc::clone(graft) as Rc<dyn Carrier>, serving)
                    .await;
            };
            tokio::select! {
                () = working => {}
                () = session.wake_up() => {}
            }
        })
    }
}

/// A session as a carrier.
struct Graft {
    session: Session,
    control: RefCell<VecDeque<Bytes>>,
    chunks: RefCell<VecDeque<(FlowId, Chunk)>>,
    /// Bytes that may still be queued.
    room: Semaphore,
    is_over: Cell<bool>,
    over: Notify,
    figures: Cell<Option<CarrierPath>>,
    /// Packets behind a gap that were read, by 64: bit n of word w is packet 64 w + n.
    seen: RefCell<BTreeMap<u64, u64>>,
}

impl Carrier for Graft {
    fn kind(&self) -> Option<Kind> {
        Some(Kind::Graft)
    }

    fn control(&self, frames: Bytes) -> Taking<'_> {
        Box::pin(async move {
            self.wait_for_room(frames.len()).await?;
            self.control.borrow_mut().push_back(frames);
            self.fill();
            Ok(())
        })
    }

    fn chunk(&self, flow: FlowId, chunk: Chunk) -> Taking<'_> {
        Box::pin(async move {
            self.wait_for_room(chunk.bytes.len()).await?;
            self.chunks.borrow_mut().push_back((flow, chunk));
            self.fill();
            Ok(())
        })
    }

    fn forget(&self, _flow: FlowId) {}

    fn close(&self) {
        self.end();
    }

    fn path(&self) -> Option<CarrierPath> {
        self.figures.get()
    }
}

impl Graft {
    fn end(&self) {
        self.is_over.set(true);
        self.room.close();
        self.over.notify_one();
    }

    /// Completes when it is over.
    async fn over(&self) {
        while !self.is_over.get() {
            self.over.notified().await;
        }
    }

    /// Completes when packets wait for an acknowledgement for too long. Looks as well
    /// whether the doorbell is heard.
    async fn dead(&self, rtt: Duration, open: &Open) {
        let session = &self.session;
        let mut ticks = interval(TICK);
        let mut before = 0;
        let mut since = Instant::now();
        let Owned { broker, owner } = &session.owned;
        broker.ring(*owner, open.has_bell.get());
        let (mut unheard, mut heard) = (0, 0);
        loop {
            ticks.tick().await;
            let missed = session.take_events();
            if heard != open.heard.get() {
                (unheard, heard) = (0, open.heard.get());
            } else if missed && open.has_bell.get() {
                unheard += 1;
                if unheard == UNHEARD {
                    tracing::info!("the doorbell is not heard: is the loopback up?");
                    broker.ring(*owner, false);
                }
            }
            let tx = session.tx.borrow();
            let acknowledged = tx.acknowledged();
            if tx.unacknowledged() == 0 || acknowledged > before {
                since = Instant::now();
            }
            before = acknowledged;
            let measured = self.figures.get().map_or(0.0, |path| path.rtt_ms / 1e3);
            let rtt = rtt.max(Duration::from_secs_f64(measured));
            if since.elapsed() > SILENCE + 3 * rtt {
                return;
            }
        }
    }

    /// Waits for room in the queues, in turn.
    async fn wait_for_room(&self, bytes: usize) -> Result<(), Refused> {
        // No longer than all that may wait.
        let room = self.room.acquire_many(bytes as u32).await;
        room.map_err(|_| Refused::Broken)?.forget();
        Ok(())
    }

    /// Moves what is queued into the ring whenever there is room again, up to the session's end.
    async fn refill(&self) {
        while self.session.tx.borrow().closed().is_none() {
            self.session.room.notified().await;
            self.fill();
        }
    }

    /// Moves what is queued into the ring while there is room; asks to be woken where some is left.
    fn fill(&self) {
        loop {
            let mut lengths = [0; BURST];
            let mut count = 0;
            let mut taken = 0;
            let mut tx = self.session.tx.borrow_mut();
            if tx.closed().is_some() {
                return;
            }
            let room = tx.room().min(BURST as u64) as usize;
            let most = tx.max_payload();
            while count < room {
                let len = self.next(&mut tx.slot(count as u64)[..most], &mut taken);
                if len == 0 {
                    break;
                }
                lengths[count] = len as u32;
                count += 1;
            }
            let is_full = count == room && !self.is_empty();
            let asked = is_full && count == 0 && tx.wait_for_room();
            drop(tx);
            self.room.add_permits(taken);
            if count > 0 {
                self.session.publish(&lengths[..count]);
            }
            if !is_full || asked {
                return;
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.control.borrow().is_empty() && self.chunks.borrow().is_empty()
    }

    /// Writes the next frames into a packet, whole ones; returns how many bytes, 0 if there are none. `taken`:
    /// bytes that the queues have lost.
    fn next(&self, packet: &mut [u8], taken: &mut usize) -> usize {
        let mut control = self.control.borrow_mut();
        while let Some(frames) = control.front_mut() {
            let len = whole(frames, packet.len());
            if len > 0 {
                packet[..len].copy_from_slice(&frames[..len]);
                drop(frames.split_to(len));
                *taken += len;
                return len;
            }
            control.pop_front();
        }
        let mut chunks = self.chunks.borrow_mut();
        let mut used = 0;
        while let Some((flow, chunk)) = chunks.front_mut() {
            let room = packet.len() - used;
            if room <= HEADER || used > 0 && room < HEADER + chunk.bytes.len() {
                break;
            }
            let bytes = chunk.bytes.split_to(chunk.bytes.len().min(room - HEADER));
            let frame = Frame::Chunk {
                flow: *flow,
                offset: chunk.offset,
                bytes: &bytes,
                fin: false,
                urgent: chunk.urgent && chunk.bytes.is_empty(),
            };
            used += frame.emit(&mut packet[used..]).unwrap_or(0);
            *taken += bytes.len();
            chunk.offset += bytes.len() as u64;
            if !chunk.bytes.is_empty() {
                break;
            }
            chunks.pop_front();
        }
        used
    }

    /// Gives what comes to the peer's association, up to the session's end.
    async fn receive(&self, peer: &Peer, id: CarrierId) {
        loop {
            let taken = self.take(peer, id);
            peer.turn();
            match taken {
                Err(_) => {
                    tracing::debug!(peer = %peer.key.peer, carrier = %Kind::Graft, "a peer breaks the rules");
                    return;
                }
                // The flows have their turn.
                Ok(true) => tokio::task::yield_now().await,
                Ok(false) if self.session.is_at_end() => return,
                Ok(false) => {
                    // What has come since wakes nobody.
                    let behind_gaps = peer.has_flows_beside();
                    if self.session.prepare_wait(behind_gaps) && !self.has_news(behind_gaps) {
                        self.session.news.notified().await;
                    }
                }
            }
        }
    }

    /// Takes packets out of the ring, those behind a gap too: their bytes may be another flow's than what the gap
    /// lacks. False if there are none.
    fn take(&self, peer: &Peer, id: CarrierId) -> Result<bool, FrameError> {
        let mut run = Run::default();
        let mut rx = self.session.rx.borrow_mut();
        let count = rx.available().min(BURST as u64);
        let first = rx.next();
        for i in 0..count {
            if !self.was_seen(first + i) {
                run.take(rx.packet(i), peer, id)?;
            }
        }
        run.give(peer, id);
        drop(rx);
        if count > 0 {
            self.session.consume(count);
        }
        let mut seen = self.seen.borrow_mut();
        if !seen.is_empty() {
            *seen = seen.split_off(&((first + count) / 64));
        }
        drop(seen);
        if count == BURST as u64 || !peer.has_flows_beside() {
            return Ok(count > 0);
        }
        Ok(self.take_behind_gaps(peer, id)? || count > 0)
    }

    fn was_seen(&self, packet: u64) -> bool {
        let seen = self.seen.borrow();
        let word = seen.get(&(packet / 64));
        word.is_some_and(|bits| bits & (1 << (packet % 64)) != 0)
    }

    /// The packets of a word that lie behind a gap and were not read; `None` behind the last one.
    fn unread(&self, word: u64, next: u64) -> Option<u64> {
        let there = self.session.arrived(word)?;
        let seen = self.seen.borrow().get(&word).copied().unwrap_or(0);
        let passed = match next.saturating_sub(word * 64) {
            0 => 0,
            n @ 1..64 => u64::MAX >> (64 - n),
            _ => u64::MAX,
        };
        Some(there & !seen & !passed)
    }

    fn take_behind_gaps(&self, peer: &Peer, id: CarrierId) -> Result<bool, FrameError> {
        let mut run = Run::default();
        let rx = self.session.rx.borrow();
        let (next, end) = (rx.next(), rx.next() + rx.slots());
        let mut word = next / 64;
        let mut any = false;
        while let Some(mut unread) = self.unread(word, next) {
            while unread != 0 {
                let packet = word * 64 + u64::from(unread.trailing_zeros());
                unread &= unread - 1;
                if packet >= end {
                    break;
                }
                *self.seen.borrow_mut().entry(word).or_insert(0) |= 1 << (packet % 64);
                any = true;
                // SAFETY: its bit was seen, the session is still open, and its graft is reliable and ordered.
                run.take(unsafe { rx.behind_gap(packet - next) }, peer, id)?;
            }
            word += 1;
        }
        run.give(peer, id);
        Ok(any)
    }

    /// Whether there are packets to take.
    fn has_news(&self, behind_gaps: bool) -> bool {
        let mut rx = self.session.rx.borrow_mut();
        if rx.available() > 0 || rx.closed().is_some() {
            return true;
        }
        let next = rx.next();
        drop(rx);
        let mut words = (next / 64..).map_while(|word| self.unread(word, next));
        behind_gaps && words.any(|unread| unread != 0)
    }
}

/// Bytes of a flow that have come one behind the other.
#[derive(Default)]
struct Run {
    flow: Option<FlowId>,
    offset: u64,
    bytes: BytesMut,
}

impl Run {
    fn new(flow: FlowId, offset: u64, bytes: &[u8]) -> Self {
        Self {
            flow: Some(flow),
            offset,
            bytes: bytes.into(),
        }
    }

    /// Takes the frames of a packet.
    fn take(&mut self, packet: &[u8], peer: &Peer, carrier: CarrierId) -> Result<(), FrameError> {
        let mut rest = packet;
        while !rest.is_empty() {
            match Frame::take(&mut rest)? {
                Frame::Chunk {
                    flow,
                    offset,
                    bytes,
                    fin: false,
                    urgent: false,
                } => {
                    if !self.takes(flow, offset, bytes) {
                        self.give(peer, carrier);
                        *self = Self::new(flow, offset, bytes);
                    }
                }
                frame => {
                    self.give(peer, carrier);
                    peer.frame(carrier, frame);
                }
            }
        }
        Ok(())
    }

    /// Takes more, if it follows.
    fn takes(&mut self, flow: FlowId, offset: u64, bytes: &[u8]) -> bool {
        let follows = self.flow == Some(flow) && offset == self.offset + self.bytes.len() as u64;
        let fits = follows && self.bytes.len() + bytes.len() <= RUN;
        if fits {
            self.bytes.extend_from_slice(bytes);
        }
        fits
    }

    /// Gives the flow what there is.
    fn give(&mut self, peer: &Peer, carrier: CarrierId) {
        if let Some(flow) = self.flow.take() {
            peer.bytes(carrier, flow, self.offset, mem::take(&mut self.bytes));
        }
    }
}

/// Bytes of the frames at the beginning that are together not longer than `most`. They are our own, and short.
fn whole(frames: &[u8], most: usize) -> usize {
    let mut rest = frames;
    let mut len = 0;
    while !rest.is_empty() && Frame::take(&mut rest).is_ok() {
        if frames.len() - rest.len() > most {
            break;
        }
        len = frames.len() - rest.len();
    }
    len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole__frames_are_not_cut() {
        let flow = FlowId {
            opener: Side::Local,
            number: 7,
        };
        let mut bytes = BytesMut::new();
        for number in 0..5 {
            bytes.extend_from_slice(&emit(Frame::Attached { flow, number }));
        }
        let each = bytes.len() / 5;
        assert_eq!(whole(&bytes, bytes.len()), 5 * each);
        assert_eq!(whole(&bytes, 3 * each + 1), 3 * each);
        assert_eq!(whole(&bytes, each - 1), 0);
        assert_eq!(whole(&[], 100), 0);
    }
}
