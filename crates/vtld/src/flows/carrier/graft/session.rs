//! This host's end of a session: its rings and wake-ups.

use std::{
    cell::{Cell, RefCell},
    io,
    net::IpAddr,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
};
use vtl_bpf::sessions::{Session as Entry, SessionTable};
use vtl_control::CarrierPath;
use vtl_pool::key::PublicKey;
use vtl_proto::{
    frame::{CarrierId, Frame, Side},
    intf::{VTL_DOORBELL, VTL_EVENTS},
    services::Services,
};
use vtl_ring::{Events, RxRing, TxRing, egress};

use super::{Opened, Owned, first, watch};
use crate::broker::WHOLE;

/// Staged packets that are published at once.
const MANY: u64 = 64;
/// How long packets may wait in the ring, at a window per round trip: longer than this thread sleeps when it is due.
const NOTSENT: Duration = Duration::from_millis(25);
/// Packets that may wait in the ring in any case.
const MIN_NOTSENT: u32 = 64;

/// What a peer says first on a session that it has opened.
pub(super) struct Hello {
    pub(super) carrier: CarrierId,
    pub(super) tag: u32,
    pub(super) path: u8,
    /// There are layers over the session.
    pub(super) layers: bool,
}

/// This host's end of a session.
pub(super) struct Session {
    pub(super) tx: RefCell<TxRing>,
    pub(super) rx: RefCell<RxRing>,
    /// Wake-ups to the broker.
    kick: OwnedFd,
    /// Program by which egress runs on this thread.
    caller: Option<OwnedFd>,
    /// The table with its entry, at `sid`.
    table: Arc<SessionTable>,
    sid: u32,
    /// Wake-ups from the broker.
    wake: AsyncFd<OwnedFd>,
    /// Wake-ups from the kernel; `None`: they come from the broker.
    events: Option<AsyncFd<Events>>,
    /// Wake-up: there may be room to send.
    pub(super) room: Notify,
    /// Wake-up: there may be packets to read.
    pub(super) news: Notify,
    /// Its graft is lossy.
    pub(super) loses: bool,
    /// Of a lossy graft: it tells the sender of each packet whether that has arrived or is given up.
    pub(super) settles: bool,
    /// The peer's public key, if the payload is sealed.
    pub(super) shown: Option<PublicKey>,
    /// The addresses of this host and of the peer.
    pub(super) between: (IpAddr, IpAddr),
    /// In the clear although this host has offered keys.
    pub(super) is_clear: bool,
    /// Size of the last staged packet as sent, bytes.
    last: Cell<u32>,
    staged: Notify,
    pub(super) owned: Owned,
}

impl Session {
    pub(super) fn new(opened: Opened) -> io::Result<Self> {
        let Opened { granted, owned } = opened;
        let [transmit, receive, kick, wake] = granted.rings;
        let (slots, payload) = (granted.grant.slots, granted.grant.max_payload);
        let events = granted.events.map(Events::map).transpose()?;
        let loses = !granted.grant.services.contains(WHOLE);
        let mut tx = TxRing::map(transmit.as_fd(), slots, payload)?;
        let mut rx = RxRing::map(receive.as_fd(), slots)?;
        if let Some(keys) = &granted.grant.keys {
            tx = tx.with_keys(keys, loses);
            rx = rx.with_keys(keys, loses);
        }
        Ok(Self {
            tx: RefCell::new(tx),
            rx: RefCell::new(rx),
            kick,
            caller: granted.caller,
            table: Arc::clone(owned.broker.sessions().ok_or(io::ErrorKind::NotConnected)?),
            sid: granted.grant.sid,
            wake: watch(wake)?,
            events: events.map(watch).transpose()?,
            room: Notify::new(),
            news: Notify::new(),
            loses,
            settles: granted
                .grant
                .services
                .contains(Services::PARTIAL_RELIABILITY),
            shown: granted.shown,
            between: (
                granted.local.to_canonical(),
                granted.grant.peer.to_canonical(),
            ),
            is_clear: granted.is_clear,
            last: Cell::new(0),
            staged: Notify::new(),
            owned,
        })
    }

    /// Waits for the peer's HELLO.
    pub(super) async fn hello(&self) -> Option<Hello> {
        let packet = tokio::select! {
            packet = self.first() => packet?,
            () = self.wake_up() => return None,
        };
        match Frame::take(&mut &packet[..]) {
            Ok(Frame::Hello {
                carrier,
                tag,
                path,
                layers,
                ..
            }) if carrier.opener == Side::Peer => Some(Hello {
                carrier,
                tag,
                path,
                // Those over a lossy session would lose what nobody repeats.
                layers: layers && !self.loses,
            }),
            _ => None,
        }
    }

    /// The first packet; those that the peer has given up are empty.
    async fn first(&self) -> Option<Vec<u8>> {
        loop {
            if !self.readable().await {
                return None;
            }
            let packet = self.rx.borrow().packet(0).to_vec();
            self.consume(1);
            if !(packet.is_empty() && self.settles) {
                return Some(packet);
            }
        }
    }

    /// Dispatches wake-ups, and publishes staged packets, until a descriptor fails.
    pub(super) async fn wake_up(&self) {
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
        first([
            Box::pin(from_kernel),
            Box::pin(from_broker),
            Box::pin(self.hand_over()),
        ])
        .await;
    }

    /// Dispatches the kernel's pending events. False if there are none.
    pub(super) fn take_events(&self) -> bool {
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

    /// Stages the packets in the next slots for egress. Coalescing: published once there are [`MANY`], or no more for
    /// now, since a call of egress and a wake-up cost as much as dozens of packets; at once if none is in flight.
    pub(super) fn stage(&self, lengths: &[u32]) {
        let Some(last) = lengths.last() else { return };
        let mut tx = self.tx.borrow_mut();
        self.last.set(tx.sealed_len(*last));
        tx.stage(lengths);
        let are_many = tx.staged() >= MANY;
        let is_idle = tx.unacknowledged() == lengths.len() as u64;
        drop(tx);
        match are_many || is_idle {
            true => self.publish(),
            false => self.staged.notify_one(),
        }
    }

    /// Publishes all staged packets, and runs egress or wakes it if it sleeps.
    pub(super) fn publish(&self) {
        let mut tx = self.tx.borrow_mut();
        let count = tx.staged();
        let sleeps = count > 0 && tx.publish_staged();
        drop(tx);
        if sleeps {
            let caller = self.caller.as_ref().filter(|_| count == 1);
            if !caller.is_some_and(|caller| egress::run(caller, self.last.get())) {
                self.kick();
            }
        }
    }

    /// Publishes staged packets after this thread's other tasks have had their turn. Never completes.
    async fn hand_over(&self) {
        loop {
            self.staged.notified().await;
            self.publish();
        }
    }

    /// Reads the session's entry in the kernel's table; `None` if the session has ended.
    pub(super) fn known<T>(&self, of: impl FnOnce(Entry<'_>) -> T) -> Option<T> {
        let known = of(self.table.get(self.sid)?);
        // After the end the entry may be reused by another session; the ring signals the end before.
        self.rx.borrow().closed().is_none().then_some(known)
    }

    /// Bitmap of the packets received among 64; `None` beyond the last one, or if the session has ended.
    pub(super) fn arrived(&self, word: u64) -> Option<u64> {
        self.known(|entry| entry.arrived(word))?
    }

    /// Statistics of the path.
    pub(super) fn path(&self) -> Option<CarrierPath> {
        self.known(|entry| {
            let meter = entry.meter();
            let transmitted = meter.xid.wrapping_sub(meter.extra);
            CarrierPath {
                rtt_ms: entry.srtt().as_secs_f64() * 1e3,
                sent: entry.sent(),
                // Negative if the network duplicates packets.
                lost: (transmitted.wrapping_sub(meter.arrived) as i32).max(0) as u64,
                ..CarrierPath::default()
            }
        })
    }

    /// Smoothed round-trip time; 0 before the first.
    pub(super) fn srtt(&self) -> Duration {
        self.known(|entry| entry.srtt()).unwrap_or_default()
    }

    /// Free slots of the transmit ring that may be written now, packets.
    pub(super) fn room(&self) -> u64 {
        let mut tx = self.tx.borrow_mut();
        let unsent = tx.next().saturating_sub(self.next());
        tx.room()
            .min(u64::from(self.notsent_lowat()).saturating_sub(unsent))
    }

    /// Requests a wake-up when there is room again; false if there is, or if the session has ended.
    pub(super) fn wait_for_room(&self) -> bool {
        let lowat = self.notsent_lowat();
        self.tx.borrow_mut().wait_for_notsent(lowat, || self.next())
    }

    /// Number of the first packet that was not sent yet.
    fn next(&self) -> u64 {
        self.known(|entry| entry.next()).unwrap_or(u64::MAX)
    }

    /// Maximum number of packets that wait in the ring to be sent. Control frames and new flows wait behind them, so
    /// they are what the window sends in [`NOTSENT`], or in a round trip: wake-ups come with acknowledgements, and a
    /// window that grows sends for as long between these.
    fn notsent_lowat(&self) -> u32 {
        let lowat = self.known(|entry| {
            let (srtt, cwnd) = (entry.srtt().max(Duration::from_nanos(1)), entry.cwnd());
            u128::from(cwnd) * NOTSENT.max(srtt).as_nanos() / srtt.as_nanos()
        });
        let lowat = lowat.and_then(|packets| packets.try_into().ok());
        lowat.unwrap_or(u32::MAX).max(MIN_NOTSENT)
    }

    /// Selects the wake-up for received packets: the doorbell (frames on the loopback), or the event ring alone.
    pub(super) fn set_doorbell(&self, on: bool) {
        let aware = if on { VTL_DOORBELL } else { VTL_EVENTS };
        if self.events.is_some() && self.rx.borrow().closed().is_none() {
            self.table
                .get(self.sid)
                .inspect(|entry| entry.set_aware(aware));
        }
    }

    /// Whether a forged packet has arrived on a reliable session.
    pub(super) fn is_forged(&self) -> bool {
        !self.loses && self.rx.borrow().forged() > 0
    }

    /// Whether the session has ended, and all packets were read.
    pub(super) fn is_at_end(&self) -> bool {
        let mut rx = self.rx.borrow_mut();
        // In this order: packets were published before the end.
        rx.closed().is_some() && rx.available() == 0
    }

    /// Requests a wake-up for the next packet; `behind_gaps`: also for one out of order. False if packets in order are
    /// available.
    pub(super) fn prepare_wait(&self, behind_gaps: bool) -> bool {
        let mut rx = self.rx.borrow_mut();
        match behind_gaps {
            true => rx.prepare_wait_for_any(),
            false => rx.prepare_wait(),
        }
    }

    /// Waits for packets; false if the session has ended and all were read.
    pub(super) async fn readable(&self) -> bool {
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

    /// Frees the slots of packets that were read.
    pub(super) fn consume(&self, packets: u64) {
        let mut rx = self.rx.borrow_mut();
        if rx.consume(packets) {
            rx.offer_room();
            self.kick();
        }
    }
}
