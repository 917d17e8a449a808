//! Shards: threads that run egress for the sessions that hash to them, and hand on what the kernel's
//! programs report of those. They open and end nothing: the broker's thread does, and orders what
//! follows from it. A shard never loads or reads disks.

mod bells;
mod call;
mod doorbell;
mod pumping;
mod relay;
mod schedule;
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

use bells::Bell;
pub(super) use call::Call;
pub(crate) use doorbell::Doorbell;
pub(super) use schedule::Schedule;
use worker::Source;

/// What the broker wants of a shard.
enum Order {
    Open {
        sid: u32,
        session: Pumped,
    },
    /// Egress of the session is to run.
    Due(u32),
    /// Egress of the session is not to run any more.
    Rest(u32),
    /// Its first packet is to be reported.
    Report(u32),
    /// Its application is to be woken.
    Wake(u32),
    /// Its application has its descriptors.
    Granted(u32),
    Forget(u32),
    /// Root programs are attached to an interface with this MTU, or no longer.
    Interface {
        index: u32,
        mtu: Option<u32>,
    },
    Stop,
}

/// What a shard tells the broker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// The first packet of a session has come.
    Heard(u32),
    /// Nothing of a session is at work here any more: its index may be used again.
    Forgotten(u32),
    /// A session is due whose packets go by TCP.
    ByTcp(u32),
    /// A shard has panicked.
    Died,
    /// By which driver packets leave an interface, and why.
    Driver {
        ifindex: u32,
        name: &'static str,
        why: String,
    },
}

/// A session as its shard sees it.
struct Pumped {
    controls: Arc<Controls>,
    wake: Bell,
    /// Transmissions when the pump last looked.
    sent: u64,
    /// Nothing is to be sent any more.
    resting: bool,
    /// The first packet is to be reported.
    report: bool,
}

/// The way to a shard.
struct Handle {
    orders: Sender<Order>,
    wake: Arc<EventFd>,
    /// It will look at its orders before it sleeps.
    called: Arc<AtomicBool>,
    epoll: Arc<Epoll>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    fn send(&self, order: Order) {
        // It ends with the broker only.
        let _ = self.orders.send(order);
        if !self.called.swap(true, Ordering::AcqRel) {
            let _ = self.wake.write(1);
        }
    }
}

/// All of them, for the broker's thread. Dropping it ends them.
pub(super) struct Shards {
    handles: Vec<Handle>,
    news: Receiver<News>,
}

impl Shards {
    /// Starts a thread for each shard of the data plane. They call `call` when there is news.
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

    /// Has a session served. `kick` and `wake` are the eventfds from and to its application.
    pub(super) fn open(
        &self,
        sid: u32,
        controls: &Arc<Controls>,
        kick: &EventFd,
        wake: &Arc<EventFd>,
    ) -> io::Result<()> {
        let session = Pumped {
            controls: Arc::clone(controls),
            wake: Bell::Held(Arc::clone(wake)),
            sent: 0,
            resting: false,
            report: false,
        };
        self.order(sid, Order::Open { sid, session });
        // Each kick is an event; nobody reads how many there were. It is watched for as long as the
        // application has it.
        let edges = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        let event = EpollEvent::new(edges, Source::Kick { sid }.pack());
        let epoll = &self.handles[self.number_of(sid) as usize].epoll;
        Ok(epoll.add(kick, event)?)
    }

    /// Has egress of a session run.
    pub(super) fn due(&self, sid: u32) {
        self.order(sid, Order::Due(sid));
    }

    /// Has nothing of a session sent any more.
    pub(super) fn rest(&self, sid: u32) {
        self.order(sid, Order::Rest(sid));
    }

    /// Has a session's first packet reported: [`News::Heard`].
    pub(super) fn report(&self, sid: u32) {
        self.order(sid, Order::Report(sid));
    }

    /// Has a session's application woken.
    pub(super) fn wake(&self, sid: u32) {
        self.order(sid, Order::Wake(sid));
    }

    /// A session's application has got its descriptors.
    pub(super) fn granted(&self, sid: u32) {
        self.order(sid, Order::Granted(sid));
    }

    /// A session is over and forgotten: [`News::Forgotten`] follows.
    pub(super) fn forget(&self, sid: u32) {
        self.order(sid, Order::Forget(sid));
    }

    /// Tells that packets may leave by an interface, which has this MTU, or no longer.
    pub(super) fn interface(&self, index: u32, mtu: Option<u32>) {
        for handle in &self.handles {
            handle.send(Order::Interface { index, mtu });
        }
    }

    /// What they have to tell.
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

/// How a shard tells the broker something.
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
