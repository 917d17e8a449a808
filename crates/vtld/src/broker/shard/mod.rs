//! Shards: threads that run egress for the sessions that hash to them, and forward these sessions' events from
//! the kernel's programs. They open and close no sessions: the broker's thread does, by orders to them. A shard
//! never loads programs or reads disks.

mod call;
mod doorbell;
mod pumping;
mod relay;
mod schedule;
mod wakeups;
mod worker;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread::JoinHandle,
};

use nix::sys::{
    epoll::{Epoll, EpollEvent, EpollFlags},
    eventfd::EventFd,
};
use vtl_bpf::{plane::DataPlane, pump::Choice};
use vtl_ring::Controls;

pub(super) use call::Call;
pub(crate) use doorbell::Doorbell;
pub(super) use schedule::Schedule;
use wakeups::Wakeup;
use worker::Source;

/// Order of the broker to a shard.
enum Order {
    Open {
        sid: u32,
        session: Pumped,
    },
    /// Run egress of the session.
    Due(u32),
    /// Stop egress of the session.
    Rest(u32),
    /// Report its first packet.
    Report(u32),
    /// Wake its application.
    Wake(u32),
    /// Its application has received its descriptors.
    Granted(u32),
    Forget(u32),
    /// Root programs are attached to an interface with this MTU; `None`: detached.
    Interface {
        index: u32,
        mtu: Option<u32>,
    },
    Stop,
}

/// News of a shard for the broker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// The first packet of a session has arrived.
    Heard(u32),
    /// A session is no longer used here: its index may be reused.
    Forgotten(u32),
    /// A session is due whose packets are sent over TCP.
    ByTcp(u32),
    /// A shard has panicked.
    Died,
    /// The egress driver of an interface, and why it was chosen.
    Driver {
        ifindex: u32,
        name: &'static str,
        why: String,
    },
}

/// A session as its shard sees it.
struct Pumped {
    controls: Arc<Controls>,
    wake: Wakeup,
    /// Transmissions at the pump's latest check.
    sent: u64,
    /// Egress has been stopped.
    resting: bool,
    /// Report the first packet.
    report: bool,
}

/// Handle of a shard.
struct Handle {
    orders: Sender<Order>,
    wake: Arc<EventFd>,
    /// Set while the shard is bound to take its orders before it sleeps.
    called: Arc<AtomicBool>,
    epoll: Arc<Epoll>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    fn send(&self, order: Order) {
        // The shard ends with the broker only.
        let _ = self.orders.send(order);
        if !self.called.swap(true, Ordering::AcqRel) {
            let _ = self.wake.write(1);
        }
    }
}

/// All shards, for the broker's thread. Dropping it stops them.
pub(super) struct Shards {
    handles: Vec<Handle>,
    news: Receiver<News>,
}

impl Shards {
    /// Starts a thread for each shard of the data plane. They call `call` when they have news.
    pub(super) fn start(
        plane: &DataPlane,
        driver: Choice,
        call: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let (outbox, news) = mpsc::channel();
        let outlet = Outlet {
            news: outbox,
            call: Arc::new(call),
        };
        let mut shards = Self {
            handles: Vec::new(),
            news,
        };
        let mut ready = Vec::new();
        for shard in plane.shards() {
            let (shard, table) = (Arc::clone(shard), Arc::clone(plane.sessions()));
            let (handle, started) = worker::spawn(shard, table, driver, outlet.clone())?;
            shards.handles.push(handle);
            ready.push(started);
        }
        for ready in ready {
            ready.recv()??;
        }
        Ok(shards)
    }

    /// The number of the shard that a session belongs to.
    pub(super) fn number_of(&self, sid: u32) -> u32 {
        sid % self.handles.len() as u32
    }

    fn order(&self, sid: u32, order: Order) {
        self.handles[self.number_of(sid) as usize].send(order);
    }

    /// Registers a session with its shard. `kick` and `wake` are the eventfds from and to its application. `report`:
    /// as [`Shards::report`], from the beginning.
    pub(super) fn open(
        &self,
        sid: u32,
        controls: &Arc<Controls>,
        kick: &EventFd,
        wake: &Arc<EventFd>,
        report: bool,
    ) -> io::Result<()> {
        let session = Pumped {
            controls: Arc::clone(controls),
            wake: Wakeup::Held(Arc::clone(wake)),
            sent: 0,
            resting: false,
            report,
        };
        self.order(sid, Order::Open { sid, session });
        // Edge-triggered: each kick is an event, and the counter is never read. Watched for as long as the
        // application keeps the file open.
        let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        let event = EpollEvent::new(edges, Source::Kick { sid }.pack());
        let epoll = &self.handles[self.number_of(sid) as usize].epoll;
        Ok(epoll.add(kick, event)?)
    }

    /// Schedules egress of a session.
    pub(super) fn due(&self, sid: u32) {
        self.order(sid, Order::Due(sid));
    }

    /// Stops egress of a session.
    pub(super) fn rest(&self, sid: u32) {
        self.order(sid, Order::Rest(sid));
    }

    /// Requests a report of a session's first packet: [`News::Heard`].
    pub(super) fn report(&self, sid: u32) {
        self.order(sid, Order::Report(sid));
    }

    /// Wakes a session's application.
    pub(super) fn wake(&self, sid: u32) {
        self.order(sid, Order::Wake(sid));
    }

    /// Notes that a session's application has received its descriptors.
    pub(super) fn granted(&self, sid: u32) {
        self.order(sid, Order::Granted(sid));
    }

    /// Removes a session: [`News::Forgotten`] follows.
    pub(super) fn forget(&self, sid: u32) {
        self.order(sid, Order::Forget(sid));
    }

    /// Adds an interface for egress, with this MTU, or removes it.
    pub(super) fn interface(&self, index: u32, mtu: Option<u32>) {
        for handle in &self.handles {
            handle.send(Order::Interface { index, mtu });
        }
    }

    /// Returns the next news.
    pub(super) fn news(&self) -> Option<News> {
        self.news.try_recv().ok()
    }
}

impl Drop for Shards {
    fn drop(&mut self) {
        for handle in &self.handles {
            handle.send(Order::Stop);
        }
        for thread in self.handles.iter_mut().filter_map(|h| h.thread.take()) {
            let _ = thread.join();
        }
    }
}

/// Sender of news to the broker.
#[derive(Clone)]
struct Outlet {
    news: Sender<News>,
    call: Arc<dyn Fn() + Send + Sync>,
}

impl Outlet {
    fn tell(&self, news: News) {
        let _ = self.news.send(news);
        (self.call)();
    }
}
