//! Readings of an association's carriers and of its flows' TCP connections.

use std::net::TcpStream;

use vtl_proto::carrier::Kind;

use super::{super::flow::State, Peer};
use crate::netmon::{Evidence, NetMonitor, of_carrier};

impl Peer {
    /// Reads the counters of the carriers that have some; `vtl-broker` reads those of sessions.
    pub(in super::super) fn read_carriers(&self, monitor: &NetMonitor) {
        for running in self.carriers.borrow().values() {
            let kind = running.carrier.kind().filter(|kind| *kind != Kind::Graft);
            if let Some(kind) = kind
                && let Some((at, path)) = running.carrier.reading()
            {
                let counters = of_carrier(kind, &path);
                let mut watch = running.watch.borrow_mut();
                monitor.note(
                    self.key.peer,
                    Evidence::Carrier(kind),
                    &mut watch,
                    at,
                    counters,
                );
            }
        }
    }

    /// Reads those of a flow's TCP connection by which everything has been sent, if somebody chooses by them: it may be over
    /// before its turn comes.
    pub(in super::super) fn read_last(&self, state: &State, tcp: &TcpStream) {
        if self.auto().is_some() || self.is_asked() {
            state.watch.borrow_mut().read(&self.monitor, tcp);
        }
    }

    /// Reads the counters of the TCP connections of those flows that are due.
    pub(in super::super) fn read_flows(
        &self,
        monitor: &NetMonitor,
        mut is_due: impl FnMut(&State) -> bool,
    ) {
        for state in self.flows.borrow().values() {
            if is_due(state)
                && let Some(ends) = &*state.ends.borrow()
            {
                state.watch.borrow_mut().read(monitor, ends.tcp.get_ref());
            }
        }
    }
}
