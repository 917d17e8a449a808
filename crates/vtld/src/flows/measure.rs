//! Readings for the monitor of paths: of carriers, and of flows' own TCP connections; and what follows from them.

use std::{rc::Rc, time::Duration};

use tokio::time::sleep;

use super::Flows;
use crate::netmon::MAX_READ;

/// Interval of reading carriers, while there are some. Rates are of half a second at least.
const OFTEN: Duration = Duration::from_millis(100);
/// Readings of carriers between two of TCP connections.
const ROUND: u32 = 10;

impl Flows {
    /// Reads counters. Never returns.
    pub(crate) async fn measure(self: Rc<Self>) {
        // Flows beyond the maximum have their turn a second later.
        let mut skip = 0;
        let mut turn = 0;
        loop {
            let has_carriers = (self.peers.borrow().values()).any(|peer| peer.has_carriers());
            let steps = if has_carriers { 1 } else { ROUND };
            sleep(OFTEN * steps).await;
            turn += steps;
            let monitor = self.broker.monitor();
            let peers = self.peers();
            for peer in &peers {
                peer.read_carriers(monitor);
            }
            self.follow_paths(&peers);
            if turn < ROUND {
                continue;
            }
            turn = 0;
            let mut seen = 0;
            for peer in &peers {
                peer.read_flows(monitor, |_| {
                    seen += 1;
                    (skip..skip + MAX_READ).contains(&(seen - 1))
                });
            }
            skip = if skip + MAX_READ < seen {
                skip + MAX_READ
            } else {
                0
            };
        }
    }
}
