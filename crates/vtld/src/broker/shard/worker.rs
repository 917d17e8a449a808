//! The thread of a shard.

use std::{
    cell::RefCell,
    collections::HashMap,
    os::fd::BorrowedFd,
    panic::AssertUnwindSafe,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
};

use anyhow::Context;
use libbpf_rs::{RingBuffer, RingBufferBuilder};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags},
    eventfd::EventFd,
};
use vtl_bpf::{
    pump::{Choice, Pump},
    sessions::SessionTable,
    shard::Shard,
};
use vtl_proto::intf;

use super::{
    super::{MS, event, now_ns, wait},
    Handle, News, Order, Outlet, Pumped,
    doorbell::Doorbell,
    relay::Relay,
    schedule::Schedule,
    wakeups::Wakeups,
};
use crate::panics::test_point;

/// Poll interval of a shard that relays wake-ups and is idle otherwise.
const NAP_NS: u64 = MS / 20;
/// Maximum sleep of a shard with sessions.
const SLEEP_NS: u64 = 100 * MS;
/// Consecutive events missed by the doorbell after which it is disabled.
const UNHEARD: u32 = 8;

/// Events from the kernel's programs: session, flags.
type Events = Rc<RefCell<Vec<(u32, u32)>>>;

/// Where an epoll event comes from; packed into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Orders,
    Ring,
    Doorbell,
    Kick { sid: u32 },
}

impl Source {
    pub(super) fn pack(self) -> u64 {
        let (kind, sid): (u64, u32) = match self {
            Self::Orders => (0, 0),
            Self::Ring => (1, 0),
            Self::Doorbell => (2, 0),
            Self::Kick { sid } => (3, sid),
        };
        kind << 32 | u64::from(sid)
    }

    fn unpack(data: u64) -> Self {
        match data >> 32 {
            0 => Self::Orders,
            1 => Self::Ring,
            2 => Self::Doorbell,
            _ => Self::Kick { sid: data as u32 },
        }
    }
}

/// State of the thread.
pub(super) struct Worker {
    pub(super) shard: Arc<Shard>,
    pub(super) table: Arc<SessionTable>,
    pub(super) driver: Choice,
    orders: Receiver<Order>,
    wake: Arc<EventFd>,
    called: Arc<AtomicBool>,
    epoll: Arc<Epoll>,
    pub(super) news: Outlet,
    pub(super) sessions: HashMap<u32, Pumped>,
    pub(super) schedule: Schedule,
    /// By interface, where root programs are attached.
    pub(super) mtus: HashMap<u32, u32>,
    pub(super) pumps: HashMap<u32, Pump>,
    ring: RingBuffer<'static>,
    events: Events,
    /// Buffer for events in processing; empty otherwise.
    found: Vec<(u32, u32)>,
    /// Wake-up by ingress; without it the ring wakes the thread.
    doorbell: Option<Doorbell>,
    /// Consecutive events missed by the doorbell.
    unheard: u32,
    wakeups: Wakeups,
    relay: Relay,
    stopping: bool,
}

/// Starts the thread, which reports to `news`. The receiver gets a message when it is ready, or why it has
/// failed.
pub(super) fn spawn(
    shard: Arc<Shard>,
    table: Arc<SessionTable>,
    driver: Choice,
    news: Outlet,
) -> anyhow::Result<(Handle, Receiver<anyhow::Result<()>>)> {
    let (sender, orders) = mpsc::channel();
    let wake = Arc::new(event()?);
    let called = Arc::new(AtomicBool::new(false));
    let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
    let handle = (Arc::clone(&wake), Arc::clone(&called), Arc::clone(&epoll));
    let (ready, started) = mpsc::sync_channel(1);
    // libbpf's ring buffer stays on the thread that uses it.
    let thread = thread::Builder::new()
        .name(format!("vtl-shard-{}", shard.number()))
        .spawn(move || {
            let channel = (orders, wake, called, epoll);
            match Worker::new(shard, table, driver, channel, news) {
                Ok(worker) => {
                    let _ = ready.send(Ok(()));
                    let outlet = worker.news.clone();
                    let run = AssertUnwindSafe(|| worker.run());
                    if std::panic::catch_unwind(run).is_err() {
                        outlet.tell(News::Died);
                    }
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            }
        })?;
    let (wake, called, epoll) = handle;
    let handle = Handle {
        orders: sender,
        wake,
        called,
        epoll,
        thread: Some(thread),
    };
    Ok((handle, started))
}

type Channel = (Receiver<Order>, Arc<EventFd>, Arc<AtomicBool>, Arc<Epoll>);

impl Worker {
    fn new(
        shard: Arc<Shard>,
        table: Arc<SessionTable>,
        driver: Choice,
        (orders, wake, called, epoll): Channel,
        news: Outlet,
    ) -> anyhow::Result<Self> {
        let (ring, events) = events(&shard)?;
        let doorbell = Doorbell::of_shard(shard.number())
            .inspect_err(|error| tracing::info!(%error, "wake-ups: cannot use the loopback: ring buffers used instead"))
            .ok();
        shard.pump_entry().set_doorbell(doorbell.is_some());
        let places = table.places();
        let level = |source: Source| EpollEvent::new(EpollFlags::EPOLLIN, source.pack());
        epoll.add(&wake, level(Source::Orders))?;
        // SAFETY: the ring buffer keeps its descriptor open as long as it lives, and it lives as
        // long as the thread that waits on this epoll instance.
        let descriptor = unsafe { BorrowedFd::borrow_raw(ring.epoll_fd()) };
        epoll.add(descriptor, level(Source::Ring))?;
        if let Some(doorbell) = &doorbell {
            let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
            epoll.add(doorbell, EpollEvent::new(edges, Source::Doorbell.pack()))?;
        }
        if driver != Choice::Tc
            && let Err(error) = shard.prepare_live()
        {
            tracing::info!(%error, "egress: driver live unavailable");
        }
        Ok(Self {
            shard,
            table,
            driver,
            orders,
            wake,
            called,
            epoll,
            news,
            sessions: HashMap::new(),
            schedule: Schedule::new(places),
            mtus: HashMap::new(),
            pumps: HashMap::new(),
            ring,
            events,
            found: Vec::new(),
            doorbell,
            unheard: 0,
            wakeups: Wakeups::new(places),
            relay: Relay::default(),
            stopping: false,
        })
    }

    fn run(mut self) {
        let mut found = [EpollEvent::empty(); 64];
        let entry = Arc::clone(self.shard.pump_entry());
        while !self.stopping {
            test_point();
            self.pump();
            let now = now_ns();
            if let Some(relay) = self.relay.decide(now) {
                entry.set_relay(relay);
            }
            let longest = if self.sessions.is_empty() {
                u64::MAX
            } else {
                SLEEP_NS
            };
            let mut timeout = self.schedule.next().saturating_sub(now).min(longest);
            if self.relay.active() {
                timeout = timeout.min(NAP_NS);
            } else if timeout > 0 {
                entry.set_awake(false);
                let _ = self.ring.consume();
                if !self.events.borrow().is_empty() {
                    timeout = 0;
                }
            }
            if self.called.load(Ordering::Acquire) {
                timeout = 0;
            }
            let asleep = timeout > 0 && !self.relay.active();
            let count = wait(&self.epoll, &mut found, timeout);
            entry.set_awake(true);
            if count == 0 && asleep && self.is_unheard() {
                tracing::info!(
                    "wake-ups: no frames from the loopback: ring buffers used instead; is lo up?"
                );
                entry.set_doorbell(false);
            }
            // Orders first: kicked sessions must be registered.
            self.take_orders();
            for event in &found[..count] {
                self.handle_event(Source::unpack(event.data()));
            }
            self.notifications();
        }
    }

    fn take_orders(&mut self) {
        if !self.called.swap(false, Ordering::AcqRel) {
            return;
        }
        while let Ok(order) = self.orders.try_recv() {
            self.take_order(order);
        }
        self.wakeups.flush();
    }

    fn take_order(&mut self, order: Order) {
        match order {
            Order::Open { sid, session } => {
                self.sessions.insert(sid, session);
            }
            Order::Due(sid) if self.sessions.contains_key(&sid) => self.schedule.now(sid),
            Order::Due(_) => {}
            Order::Rest(sid) => {
                self.schedule.cancel(sid);
                if let Some(session) = self.sessions.get_mut(&sid) {
                    session.resting = true;
                }
            }
            Order::Report(sid) => {
                if let Some(session) = self.sessions.get_mut(&sid) {
                    session.report = true;
                }
            }
            Order::Wake(sid) => {
                if let Some(session) = self.sessions.get(&sid) {
                    self.wakeups.wake(&session.wake);
                }
            }
            Order::Granted(sid) => {
                if let Some(session) = self.sessions.get_mut(&sid) {
                    self.wakeups.keep(&mut session.wake);
                }
            }
            Order::Forget(sid) => {
                self.schedule.cancel(sid);
                if let Some(session) = self.sessions.remove(&sid) {
                    self.wakeups.flush();
                    self.wakeups.remove(&session.wake);
                }
                self.news.tell(News::Forgotten(sid));
            }
            Order::Interface { index, mtu } => {
                self.pumps.remove(&index);
                match mtu {
                    Some(mtu) => self.mtus.insert(index, mtu),
                    None => self.mtus.remove(&index),
                };
            }
            Order::Stop => self.stopping = true,
        }
    }

    /// After a sleep without any event: whether the doorbell has missed so many consecutive ones that it should
    /// be disabled.
    fn is_unheard(&mut self) -> bool {
        let _ = self.ring.consume();
        // Only packets ring it; other events may have just arrived.
        let rings = |(_, what): &(u32, u32)| *what == intf::VTL_EV_RECV;
        let missed = self.events.borrow().iter().any(rings);
        self.unheard += u32::from(missed);
        missed && self.unheard == UNHEARD
    }

    fn handle_event(&mut self, source: Source) {
        match source {
            Source::Orders => {
                let _ = self.wake.read();
            }
            Source::Ring => {}
            Source::Doorbell => {
                self.unheard = 0;
                self.doorbell.iter_mut().for_each(Doorbell::hear);
            }
            Source::Kick { sid } => self.kick(sid),
        }
    }

    /// Handles a kick: the application has written packets, or has room again.
    fn kick(&mut self, sid: u32) {
        let Some(session) = self.sessions.get(&sid) else {
            return;
        };
        self.schedule.now(sid);
        if session.controls.take_offer()
            && let Some(entry) = self.table.get(sid)
        {
            entry.request_ack();
        }
    }

    /// Handles events from the kernel's programs.
    pub(super) fn notifications(&mut self) {
        let _ = self.ring.consume();
        let mut events = std::mem::take(&mut self.found);
        events.append(&mut self.events.borrow_mut());
        if !events.is_empty() {
            // Orders about these sessions precede the events.
            self.take_orders();
        }
        for (sid, what) in events.drain(..) {
            if what & intf::VTL_EV_SEND != 0
                && let Some(session) = self.sessions.get_mut(&sid)
            {
                self.schedule.now(sid);
                if std::mem::take(&mut session.report) {
                    self.news.tell(News::Heard(sid));
                }
            }
            if what & (intf::VTL_EV_RECV | intf::VTL_EV_ROOM) != 0 {
                self.hand_on(sid);
            }
        }
        self.found = events;
        self.wakeups.flush();
    }

    /// Wakes an aware application if the programs have left that to the daemon.
    fn hand_on(&mut self, sid: u32) {
        let told = self.table.get(sid).is_some_and(|e| e.take_wakeups());
        if let Some(session) = self.sessions.get(&sid).filter(|_| told) {
            self.wakeups.wake(&session.wake);
            self.relay.note(sid);
        }
    }
}

/// Opens the ring of events from the kernel's programs, and the buffer it is read into.
fn events(shard: &Shard) -> anyhow::Result<(RingBuffer<'static>, Events)> {
    let events = Events::default();
    let sink = Rc::clone(&events);
    let mut builder = RingBufferBuilder::new();
    builder.add(shard.events(), move |bytes: &[u8]| {
        if let [a, b, c, d, e, f, g, h, ..] = *bytes {
            let words = [[a, b, c, d], [e, f, g, h]].map(u32::from_ne_bytes);
            sink.borrow_mut().push(words.into());
        }
        0
    })?;
    let ring = builder.build().context("the ring of events")?;
    Ok((ring, events))
}
