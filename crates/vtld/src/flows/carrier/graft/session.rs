//! This host's end of a session: its rings, and what wakes who uses them.

use std::{
    cell::{Cell, RefCell},
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::Notify,
    task::spawn_blocking,
    time::interval,
};
use vtl_bpf::sessions::SessionTable;
use vtl_control::CarrierPath;
use vtl_proto::frame::{CarrierId, Frame, Side};
use vtl_ring::{Events, RxRing, TxRing, egress};

use super::{Opened, Owned, watch};

/// Between two looks at its figures.
const LOOK: Duration = Duration::from_secs(1);

/// This host's end of a session.
pub(super) struct Session {
    pub(super) tx: RefCell<TxRing>,
    pub(super) rx: RefCell<RxRing>,
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
    pub(super) room: Notify,
    /// There may be packets to read.
    pub(super) news: Notify,
    /// Egress sleeps and is to be woken; bytes of the packet where it is but one.
    sleeps: Cell<Option<u32>>,
    published: Notify,
    pub(super) owned: Owned,
}

impl Session {
    pub(super) fn new(opened: Opened) -> io::Result<Self> {
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
    pub(super) async fn hello(&self) -> Option<(CarrierId, u32)> {
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
        tokio::join!(from_kernel, from_broker, self.wake_egress());
    }

    /// Passes the kernel's events on, if there are any.
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

    /// Hands over the packets that lie in the next slots. Egress is woken once all that there is to send has
    /// been handed over, as each wake-up costs more than a packet.
    pub(super) fn publish(&self, lengths: &[u32]) {
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
    pub(super) fn arrived(&self, word: u64) -> Option<u64> {
        let arrived = self.table.as_ref()?.get(self.sid)?.arrived(word);
        // The entry is another session's some time after this one's end, of which the ring says first.
        arrived.filter(|_| self.rx.borrow().closed().is_none())
    }

    /// Whether the session has ended, and all was read.
    pub(super) fn is_at_end(&self) -> bool {
        let mut rx = self.rx.borrow_mut();
        // What arrived before the end was published before it.
        rx.closed().is_some() && rx.available() == 0
    }

    /// Announces that nothing is read before a wake-up. False if there is something in order.
    pub(super) fn prepare_wait(&self, behind_gaps: bool) -> bool {
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
    pub(super) fn consume(&self, packets: u64) {
        let mut rx = self.rx.borrow_mut();
        if rx.consume(packets) {
            rx.offer_room();
            self.kick();
        }
    }

    /// Keeps figures of the path, up to the session's end.
    pub(super) async fn look(&self, figures: &Cell<Option<CarrierPath>>) {
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
