//! Sessions over a graft as a carrier: one to each peer, which the broker is asked for as an application
//! would ask.
//!
//! Whoever opens a session shows the token first. Then each packet holds whole frames.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{Notify, mpsc},
    task::{spawn_blocking, spawn_local},
    time::{Instant, interval, timeout},
};
use vtl_control::{CarrierPath, Destination};
use vtl_proto::{
    carrier::Kind,
    frame::{FINGERPRINT, Frame, HEADER},
    services::Services,
};
use vtl_ring::{Events, RxRing, TxRing, egress};

use super::{
    super::socket::watch,
    Arrivals, Endpoint, Granted, HANDSHAKE, Link, Local, SILENCE,
    framed::{Arrived, Framed, Out, Pipe},
};
use crate::broker::{self, Owner, Wish};

/// Sessions come to the first of these VTL ports that is free, from the last one on.
const PORTS: std::ops::RangeInclusive<u16> = 65_000..=65_535;
/// Packets that are written, and read, before others have their turn.
const BURST: usize = 64;
/// Sessions at a time that have not said what they are for.
const HALF_OPEN: usize = 64;
/// Between two looks whether the path is dead, and at its figures.
const TICK: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_secs(1);
/// Connections to the control socket, the broker's other owners, are counted from the other end.
static LAST_OWNER: AtomicU64 = AtomicU64::new(u64::MAX);

fn next_owner() -> Owner {
    LAST_OWNER.fetch_sub(1, Ordering::Relaxed)
}

/// Who may open one, by token: an address, and the path's round-trip time.
type Grants = Rc<RefCell<HashMap<u64, (IpAddr, Option<Duration>)>>>;
/// Those that are open.
type Pipes = Rc<RefCell<Vec<Rc<Pipe>>>>;

/// This host's part of all sessions.
pub(super) struct Sessions {
    broker: broker::Handle,
    port: u16,
    grants: Grants,
    pipes: Pipes,
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
        let listen = |port| Some((port, broker.listen(listener.owner, port).ok()?));
        let listening = PORTS.rev().find_map(listen);
        let (port, key) = listening.ok_or(io::ErrorKind::AddrInUse)?;
        let is_over = Arc::new(AtomicBool::new(false));
        let (opened, waiting) = mpsc::channel(HALF_OPEN);
        let over = Arc::clone(&is_over);
        std::thread::Builder::new()
            .name("vtl-accept".into())
            .spawn(move || accept(&listener, key, &opened, &over))?;
        let sessions = Self {
            broker: broker.clone(),
            port,
            grants: Rc::default(),
            pipes: Rc::default(),
            is_over,
        };
        let (grants, pipes) = (Rc::clone(&sessions.grants), Rc::clone(&sessions.pipes));
        spawn_local(admit(waiting, grants, pipes, arrivals));
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
    fn place(&self) -> (u16, [u8; FINGERPRINT]) {
        (self.port, [0; FINGERPRINT])
    }

    fn grant(&self, token: u64, client: IpAddr, rtt: Option<Duration>) {
        self.grants.borrow_mut().insert(token, (client, rtt));
    }

    fn revoke(&self, token: u64) {
        self.grants.borrow_mut().remove(&token);
    }

    fn connect(
        &self,
        _local: IpAddr,
        granted: Granted,
        rtt: Option<Duration>,
    ) -> Local<'_, io::Result<Box<dyn Link>>> {
        Box::pin(async move {
            let to = Destination::Peer {
                host: granted.to.ip(),
                port: granted.to.port(),
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
                        .connect(owned.owner, to, &Wish::from(Services::TCP), gone)?;
                Ok::<_, String>(Opened { granted, owned })
            });
            let opened = timeout(HANDSHAKE, asked).await;
            let opened = opened.map_err(|_| io::ErrorKind::TimedOut)?;
            let opened = opened
                .map_err(io::Error::other)?
                .map_err(io::Error::other)?;
            let session = Session::new(opened)?;
            session.show(granted.token);
            Ok(Box::new(session.carrier(rtt, &self.pipes)) as Box<dyn Link>)
        })
    }

    fn close(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.pipes.borrow().iter().for_each(|pipe| pipe.end());
    }

    fn wait_idle(&self) -> Local<'_, ()> {
        // The broker tells them.
        Box::pin(async {})
    }
}

/// Lets in who has a token.
async fn admit(
    mut opened: mpsc::Receiver<Opened>,
    grants: Grants,
    pipes: Pipes,
    arrivals: Arrivals,
) {
    let half_open = Rc::new(Cell::new(0));
    while let Some(opened) = opened.recv().await {
        let address = opened.granted.grant.peer.to_canonical();
        let is_expected = grants.borrow().values().any(|(ip, _)| *ip == address);
        if !is_expected || half_open.get() >= HALF_OPEN {
            continue;
        }
        let Ok(session) = Session::new(opened) else {
            continue;
        };
        half_open.set(half_open.get() + 1);
        let (grants, pipes) = (Rc::clone(&grants), Rc::clone(&pipes));
        let (half_open, arrivals) = (Rc::clone(&half_open), arrivals.clone());
        spawn_local(async move {
            let shown = timeout(HANDSHAKE, session.shown()).await;
            half_open.set(half_open.get() - 1);
            let Ok(Some(token)) = shown else { return };
            let granted = grants.borrow().get(&token).copied();
            let Some((_, rtt)) = granted.filter(|(client, _)| *client == address) else {
                return;
            };
            grants.borrow_mut().remove(&token);
            let carrier = session.carrier(rtt, &pipes);
            // Nobody takes it where the daemon is ending.
            let _ = arrivals.send((token, Box::new(carrier)));
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
    /// From the broker.
    wake: AsyncFd<OwnedFd>,
    /// From the kernel, unless it leaves them to the broker.
    events: Option<AsyncFd<Events>>,
    /// There may be room to send.
    room: Notify,
    /// There may be packets to read.
    news: Notify,
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
            wake: watch(wake)?,
            events: events.map(watch).transpose()?,
            room: Notify::new(),
            news: Notify::new(),
            owned,
        })
    }

    /// Sends the token, first of all.
    fn show(&self, token: u64) {
        let bytes = token.to_be_bytes();
        self.tx.borrow_mut().slot(0)[..bytes.len()].copy_from_slice(&bytes);
        self.publish(&[bytes.len() as u32]);
    }

    /// The token, once it has come.
    async fn shown(&self) -> Option<u64> {
        tokio::select! {
            packet = self.first() => Some(u64::from_be_bytes(packet?.as_ref().try_into().ok()?)),
            () = self.wake_up() => None,
        }
    }

    async fn first(&self) -> Option<Bytes> {
        self.readable().await.then(|| self.take(1).pop())?
    }

    /// As a carrier.
    fn carrier(self, rtt: Option<Duration>, pipes: &Pipes) -> Framed {
        let pipe = Pipe::new(self.tx.borrow().max_payload());
        pipes.borrow_mut().push(Rc::clone(&pipe));
        let (driven, pipes) = (Rc::clone(&pipe), Rc::clone(pipes));
        let figures = Rc::new(Cell::new(None));
        let said = Rc::clone(&figures);
        spawn_local(async move {
            tokio::select! {
                () = self.write(&driven) => {}
                () = self.read(&driven) => {}
                () = self.wake_up() => {}
                () = self.dead(&driven, rtt.unwrap_or_default()) => {
                    tracing::info!(carrier = %Kind::Graft, "nothing comes back");
                }
                () = self.look(&said) => {}
            }
            driven.end();
            pipes
                .borrow_mut()
                .retain(|other| !Rc::ptr_eq(other, &driven));
        });
        Framed {
            kind: Kind::Graft,
            pipe,
            figures: Box::new(move || figures.get()),
        }
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
                    events.get_ref().clear();
                    self.room.notify_one();
                    self.news.notify_one();
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
        tokio::join!(from_kernel, from_broker);
    }

    fn kick(&self) {
        // Fails only if the counter is full, which takes thousands of years.
        let _ = nix::unistd::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Hands over the packets that lie in the next slots.
    fn publish(&self, lengths: &[u32]) {
        if !self.tx.borrow_mut().publish(lengths) {
            return;
        }
        let [one] = lengths else { return self.kick() };
        let caller = self.caller.as_ref();
        if !caller.is_some_and(|caller| egress::run(caller, *one)) {
            self.kick();
        }
    }

    /// Sends what there is, up to the carrier's end or the session's.
    async fn write(&self, pipe: &Pipe) {
        let mut packets = Packets::default();
        while !pipe.is_over() {
            if packets.is_empty() {
                let Some(Out::Control(bytes) | Out::Chunk(bytes)) = pipe.next() else {
                    pipe.work.notified().await;
                    continue;
                };
                packets = Packets(bytes);
            }
            if !self.has_room().await {
                return;
            }
            let mut lengths = Vec::with_capacity(BURST);
            let mut tx = self.tx.borrow_mut();
            let room = tx.room().min(BURST as u64) as usize;
            let most = tx.max_payload();
            while lengths.len() < room {
                let len = packets.take(&mut tx.slot(lengths.len() as u64)[..most]);
                if len > 0 {
                    lengths.push(len as u32);
                } else if let Some(Out::Control(bytes) | Out::Chunk(bytes)) = pipe.next() {
                    packets = Packets(bytes);
                } else {
                    break;
                }
            }
            drop(tx);
            self.publish(&lengths);
        }
    }

    /// Waits for room to send; false if the session has ended.
    async fn has_room(&self) -> bool {
        loop {
            {
                let mut tx = self.tx.borrow_mut();
                if tx.closed().is_some() {
                    return false;
                }
                if tx.room() > 0 {
                    return true;
                }
                if !tx.wait_for_room() {
                    continue;
                }
            }
            self.room.notified().await;
        }
    }

    /// Takes what comes, up to the end.
    async fn read(&self, pipe: &Pipe) {
        while self.readable().await {
            for packet in self.take(BURST) {
                pipe.arrived(Arrived::Stream(packet));
            }
            // The flows have their turn.
            tokio::task::yield_now().await;
            while !pipe.has_room() {
                pipe.taken.notified().await;
            }
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

    /// Takes at most so many packets out of the ring.
    fn take(&self, most: usize) -> Vec<Bytes> {
        let mut rx = self.rx.borrow_mut();
        let count = rx.available().min(most as u64);
        let packets = (0..count).map(|i| Bytes::copy_from_slice(rx.packet(i)));
        let packets = packets.collect();
        if rx.consume(count) {
            rx.offer_room();
            self.kick();
        }
        packets
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

    /// Completes when packets wait for an acknowledgement for too long, or the carrier is over.
    async fn dead(&self, pipe: &Pipe, rtt: Duration) {
        let mut ticks = interval(TICK);
        let mut before = 0;
        let mut since = Instant::now();
        while !pipe.is_over() {
            ticks.tick().await;
            let tx = self.tx.borrow();
            let acknowledged = tx.acknowledged();
            if tx.unacknowledged() == 0 || acknowledged > before {
                since = Instant::now();
            }
            before = acknowledged;
            if since.elapsed() > SILENCE + 3 * rtt {
                return;
            }
        }
    }
}

/// Frames, to be cut into packets.
#[derive(Default)]
struct Packets(Bytes);

impl Packets {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes whole frames to the beginning of `packet`, at least one, and a chunk that is too long for it in
    /// part; returns how many bytes, 0 if nothing is left.
    fn take(&mut self, packet: &mut [u8]) -> usize {
        let mut used = 0;
        while !self.0.is_empty() {
            let mut rest = &self.0[..];
            // They are our own.
            let Ok(frame) = Frame::take(&mut rest) else {
                self.0.clear();
                break;
            };
            let len = self.0.len() - rest.len();
            if let Some(place) = packet[used..].get_mut(..len) {
                place.copy_from_slice(&self.0[..len]);
                drop(self.0.split_to(len));
                used += len;
                continue;
            }
            if used == 0 {
                let (first, behind) = cut(frame, packet.len() - HEADER);
                used = first.emit(packet).unwrap_or(0);
                let mut rest = vec![0; behind.wire_len()];
                behind.emit(&mut rest);
                self.0 = rest.into();
            }
            break;
        }
        used
    }
}

/// A chunk's first bytes, and the others, as frames. Nothing else is longer than any path's packets.
fn cut(frame: Frame<'_>, at: usize) -> (Frame<'_>, Frame<'_>) {
    match frame {
        Frame::Chunk {
            flow,
            offset,
            bytes,
            fin,
            urgent,
        } => {
            let (bytes, others) = bytes.split_at(at.min(bytes.len()));
            let chunk = |offset, bytes, is_last| Frame::Chunk {
                flow,
                offset,
                bytes,
                fin: fin && is_last,
                urgent: urgent && is_last,
            };
            let behind = offset + bytes.len() as u64;
            (chunk(offset, bytes, false), chunk(behind, others, true))
        }
        other => unreachable!("{other:?} is short"),
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use vtl_proto::frame::{FlowId, Side};

    use super::*;

    fn emit(frame: Frame<'_>, to: &mut BytesMut) {
        let from = to.len();
        to.resize(from + frame.wire_len(), 0);
        frame.emit(&mut to[from..]);
    }

    #[test]
    fn packets__hold_whole_frames_and_cut_long_chunks() {
        let flow = FlowId {
            opener: Side::Local,
            number: 7,
        };
        let data: Vec<u8> = (0..250).collect();
        let mut bytes = BytesMut::new();
        for number in 0..5 {
            emit(Frame::Attached { flow, number }, &mut bytes);
        }
        let chunk = Frame::Chunk {
            flow,
            offset: 1000,
            bytes: &data,
            fin: true,
            urgent: false,
        };
        emit(chunk, &mut bytes);
        let mut packets = Packets(bytes.freeze());
        let (mut attached, mut got, mut ended) = (0, Vec::new(), false);
        let mut packet = [0; 100];
        loop {
            let len = packets.take(&mut packet);
            if len == 0 {
                break;
            }
            let mut rest = &packet[..len];
            while !rest.is_empty() {
                match Frame::take(&mut rest).expect("whole") {
                    Frame::Attached { number, .. } => {
                        assert_eq!(number, attached);
                        attached += 1;
                    }
                    Frame::Chunk {
                        offset, bytes, fin, ..
                    } => {
                        assert_eq!(offset, 1000 + got.len() as u64);
                        got.extend_from_slice(bytes);
                        ended = fin;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert_eq!((attached, got, ended), (5, data, true));
        assert!(packets.is_empty());
    }
}
