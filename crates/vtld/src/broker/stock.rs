//! Keeps sets of rings ready, on a thread of its own: making and clearing them takes milliseconds.

use std::{
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::Duration,
};

use vtl_bpf::rings::{RingMaker, RingSet};

/// After a session's end a program may still be at work on its rings; none runs for this long.
const GRACE: Duration = Duration::from_millis(50);

enum Order {
    Make,
    Recycle(RingSet),
    Replace(RingSet),
}

/// The stock.
pub(super) struct Stock {
    orders: Sender<Order>,
    ready: Receiver<vtl_bpf::Result<RingSet>>,
}

impl Stock {
    /// Starts the thread, which makes `count` sets of `slots` packets.
    pub(super) fn start(mut maker: RingMaker, slots: u32, count: usize) -> Self {
        let (orders, inbox) = mpsc::channel();
        let (outbox, ready) = mpsc::channel();
        let work = move || {
            for order in inbox {
                let set = match order {
                    Order::Make => maker.make(slots),
                    Order::Recycle(set) => {
                        thread::sleep(GRACE);
                        // What cannot be cleared must not be used again.
                        let cleared = vtl::ring::clear(set.transmit(), set.slots)
                            .and_then(|()| vtl::ring::clear(set.receive(), set.slots));
                        if let Err(error) = cleared {
                            tracing::warn!(%error, "a ring cannot be used again");
                            continue;
                        }
                        Ok(set)
                    }
                    Order::Replace(set) => {
                        thread::sleep(GRACE);
                        if let Err(error) = maker.retire(set) {
                            tracing::warn!(%error, "a ring cannot be taken away");
                        }
                        maker.make(slots)
                    }
                };
                if outbox.send(set).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("vtl-stock".into())
            .spawn(work)
            .expect("a thread can be started");
        let stock = Self { orders, ready };
        for _ in 0..count {
            stock.order(Order::Make);
        }
        stock
    }

    fn order(&self, order: Order) {
        let _ = self.orders.send(order);
    }

    /// A set of rings: from stock, or a new one.
    pub(super) fn take(&self) -> vtl_bpf::Result<RingSet> {
        if let Ok(Ok(set)) = self.ready.try_recv() {
            return Ok(set);
        }
        self.order(Order::Make);
        self.ready
            .recv()
            .expect("the thread lives as long as the stock")
    }

    /// Gives a set back that only the daemon and the kernel have seen.
    pub(super) fn put(&self, set: RingSet) {
        self.order(Order::Recycle(set));
    }

    /// Gives a set back that an application may still have mapped: nobody else may get it.
    pub(super) fn put_exposed(&self, set: RingSet) {
        self.order(Order::Replace(set));
    }
}
