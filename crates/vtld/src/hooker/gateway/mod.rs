//! Gateways: TCP connections that this host forwards are ended here and carried over a hop (`bpf/gateway.bpf.c`).
//!
//! - A SYN goes through the kernel's forwarding and is held where it would leave ([`HeldConnect`]). Its real connection
//!   is opened in the client's name (`connect.rs`); only when that has an answer does the client get one.
//! - From there on a gateway is the Hooker: the client's connection takes the place of an application's, or at the far
//!   end of the hop the server's does. Between two hops it is a flow of each (`joint.rs`).
//! - Packets of both connections are routed to this host by a mark (`routes.rs`). What the kernel keeps
//!   of ended connections goes with the routes (`lingering.rs`).
//!
//! [`HeldConnect`]: super::HeldConnect

mod connect;
mod joint;
mod kernel;
mod lingering;
mod routes;

use std::{
    io,
    net::TcpListener,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::Receiver,
    },
};

use libbpf_rs::RingBuffer;
use serde::{Deserialize, Serialize};
use vtl_control::What;
use vtl_proto::frame::FlowName;

use super::{
    Hooker, Shared,
    abi::{self, VTL_GATEWAY_FILTERS_MAX, VTL_SYN_MAX, vtl_gateway_syn},
    carrier::{Carrier, CarrierPolicy},
    error::HookerError,
    held::{self, Forwarded, HeldConnect},
    packet::SynPacket,
    rules::{Forwarding, Prefix},
    worker::Command,
};
use crate::events::emit;

pub(super) use connect::{connect_control, open};
pub(super) use joint::{Joint, join};
pub(super) use kernel::Table;
pub(crate) use lingering::shut_down;

use kernel::Kernel;

/// Which connections a gateway carries.
#[derive(Clone, Debug, PartialEq)]
pub struct Gateway {
    /// The interface of the hop: connections that leave by it, and those of VTL hosts beyond.
    pub interface: String,
    /// Destinations; empty: all.
    pub to: Vec<Prefix>,
    /// Destination ports; empty: all.
    pub ports: Vec<u16>,
    /// What connections that leave by the interface travel by.
    pub carrier: Carrier,
}

/// A gateway in force.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayListed {
    /// What it carries.
    pub gateway: Gateway,
    /// Whether an interface of that name exists.
    pub is_present: bool,
    /// Connections that it has ended and carried so far.
    pub carried: u64,
}

struct Entry {
    gateway: Gateway,
    policy: CarrierPolicy,
    carried: Arc<AtomicU64>,
}

/// The gateway of a held connect, and its way.
pub(super) struct Via {
    /// What it leaves by, if it leaves by a hop.
    pub(super) policy: CarrierPolicy,
    /// Count connections, one for each of its hops.
    pub(super) carried: Vec<Arc<AtomicU64>>,
    /// Index of the interface that its SYN would have left by.
    pub(super) exit: u32,
    /// It comes from beyond one hop, and leaves by another that is to carry it, too.
    pub(super) is_onward: bool,
}

/// All gateways of this host.
#[derive(Default)]
pub(super) struct Gateways {
    entries: Vec<Entry>,
    /// The programs, once there was a gateway: its connections need them to their end.
    kernel: Option<Kernel>,
}

/// What the worker reads: SYNs, and connections that were accepted.
pub(super) struct Input {
    pub(super) ring: RingBuffer<'static>,
    pub(super) read: Receiver<vtl_gateway_syn>,
    pub(super) listeners: Vec<TcpListener>,
    pub(super) flows: Arc<held::Flows>,
}

/// A gateway, for the next daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GatewayLeft {
    interface: String,
    to: Vec<String>,
    ports: Vec<u16>,
    carrier: vtl_control::CarrierSpec,
}

/// Removes what a gateway leaves in the kernel: routes, and sockets that nothing reaches without them.
pub(super) fn sweep() {
    routes::sweep();
    lingering::sweep();
}

impl Gateways {
    /// Loads the programs, the first time.
    fn load(&mut self, shared: &Arc<Shared>, former: Vec<TcpListener>) -> Result<(), HookerError> {
        if self.kernel.is_none() {
            let (kernel, input) = Kernel::load(shared, former)?;
            self.kernel = Some(kernel);
            // Fails if the worker has ended.
            let _ = shared.commands.send(Command::Gateway(Box::new(input)));
            let _ = shared.wake.write(1);
        }
        Ok(())
    }

    fn add(&mut self, shared: &Arc<Shared>, gateway: Gateway) -> Result<(), HookerError> {
        if *shared.is_left() {
            return Err(HookerError::Leaving);
        }
        let is_it = |entry: &Entry| entry.gateway.interface == gateway.interface;
        if self.entries.iter().any(is_it) {
            return Err(HookerError::AlreadyGateway(gateway.interface));
        }
        if !shared.config.scope.has(&gateway.interface) {
            return Err(HookerError::OutOfScope(gateway.interface));
        }
        if let Some(interface) = forwarding_outside(&shared.config.scope) {
            return Err(HookerError::ForwardsOutside(interface));
        }
        let filters = |entry: &Entry| entry.gateway.to.len().max(entry.gateway.ports.len());
        let filters: usize = self.entries.iter().map(filters).sum();
        if filters + gateway.to.len().max(gateway.ports.len()) > VTL_GATEWAY_FILTERS_MAX as usize {
            return Err(HookerError::TooManyFilters(VTL_GATEWAY_FILTERS_MAX));
        }
        let Some(policy) = CarrierPolicy::new(&gateway.carrier).filter(|policy| !policy.required)
        else {
            return Err(HookerError::NotForGateways(gateway.carrier.to_string()));
        };
        let accepts = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_fwmark_accept");
        if accepts.is_ok_and(|accepts| accepts.trim() != "0") {
            return Err(HookerError::MarksAccepted);
        }
        let demux = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_early_demux");
        if demux.is_ok_and(|demux| demux.trim() != "0") {
            tracing::info!(
                "gateway: net.ipv4.tcp_early_demux is on: once vtld has been killed, no connection is forwarded that has the ends of a carried one, until its next start, for a minute at most"
            );
        }
        self.load(shared, Vec::new())?;
        self.entries.push(Entry {
            gateway,
            policy,
            carried: Arc::default(),
        });
        let followed = self.follow(shared);
        if followed.is_err() {
            self.entries.pop();
            // Fails for the same reason, or takes back what was done.
            let _ = self.follow(shared);
        } else if let Some(entry) = self.entries.last() {
            emit(What::GatewayAdded {
                interface: entry.gateway.interface.clone().into(),
                carrier: entry.gateway.carrier.to_string().into(),
            });
        }
        followed
    }

    fn remove(&mut self, shared: &Shared, interface: &str) -> Result<(), HookerError> {
        let is_it = |entry: &Entry| entry.gateway.interface == interface;
        let Some(index) = self.entries.iter().position(is_it) else {
            return Err(HookerError::NoSuchGateway(interface.to_owned()));
        };
        self.entries.remove(index);
        emit(What::GatewayRemoved {
            interface: interface.to_owned().into(),
        });
        self.follow(shared)
    }

    /// Brings the kernel's programs and maps in line with gateways and interfaces.
    fn follow(&mut self, shared: &Shared) -> Result<(), HookerError> {
        let Some(kernel) = &mut self.kernel else {
            return Ok(());
        };
        let attached = kernel.attach(&shared.config.scope);
        shared
            .is_gateway
            .store(!self.entries.is_empty(), Ordering::Relaxed);
        // Of what is attached.
        kernel.set(self.entries.iter().map(|entry| &entry.gateway))?;
        attached
    }

    /// Follows changes of interfaces.
    pub(super) fn interfaces_changed(&mut self, shared: &Shared) {
        if let Err(error) = self.follow(shared) {
            tracing::warn!(%error, "gateway: cannot attach to an interface: its connections are forwarded");
        }
    }

    /// The gateway whose hop is behind an interface with this index.
    fn of(&mut self, index: u32) -> Option<&mut Entry> {
        let name = vtl_bpf::netdev::name_of(index)?;
        let mut all = self.entries.iter_mut();
        all.find(|entry| entry.gateway.interface == name)
    }

    /// Ends them: nothing is held any more, and the routes go.
    pub(super) fn close(&mut self) {
        self.entries.clear();
        self.kernel = None;
    }
}

/// An interface that forwards packets and that vtld does not use: connections of hosts there would not be carried.
fn forwarding_outside(scope: &crate::Scope) -> Option<String> {
    let names = nix::net::if_::if_nameindex().ok()?;
    let names = names.iter().map(|each| each.name().to_string_lossy());
    let forwards = |name: &str| {
        ["ipv4", "ipv6"].iter().any(|family| {
            let path = format!("/proc/sys/net/{family}/conf/{name}/forwarding");
            std::fs::read_to_string(path).is_ok_and(|is| is.trim() == "1")
        })
    };
    let mut outside = names.filter(|name| *name != "lo" && !scope.has(name));
    outside.find(|name| forwards(name)).map(Into::into)
}

/// Handles a SYN from the ring. `Some` for a new connect.
pub(super) fn hold(
    shared: &Arc<Shared>,
    flows: &Arc<held::Flows>,
    event: &vtl_gateway_syn,
) -> Option<HeldConnect> {
    let len = event.len.min(VTL_SYN_MAX) as usize;
    let Some(syn) = SynPacket::parse(&event.packet[..len]) else {
        flows.release(abi::both(&event.ends));
        return None;
    };
    let forwarded = match event.outside {
        0 => Forwarded::Inside,
        _ => Forwarded::Outside(FlowName {
            tag: u32::from_be(event.flow.tag),
            number: u32::from_be(event.flow.number),
        }),
    };
    let is_onward = event.onward != 0;
    let hops = [event.ifindex, event.out];
    let mut via = Via {
        policy: CarrierPolicy::default(),
        carried: Vec::new(),
        exit: event.out,
        is_onward,
    };
    let mut gateways = shared.gateways();
    for hop in &hops[..1 + usize::from(is_onward)] {
        if let Some(entry) = gateways.of(*hop) {
            via.policy = entry.policy.clone();
            via.carried.push(Arc::clone(&entry.carried));
        }
    }
    drop(gateways);
    if let Some(policy) = policy_of_rule(shared, &syn, &via, forwarded) {
        via.policy = policy;
    }
    flows.hold_forwarded(shared, syn, via, forwarded)
}

/// What a rule says a connection is to travel by that leaves by a hop.
fn policy_of_rule(
    shared: &Shared,
    syn: &SynPacket,
    via: &Via,
    forwarded: Forwarded,
) -> Option<CarrierPolicy> {
    let leaves = forwarded == Forwarded::Inside || via.is_onward;
    let rules = shared.forwarding();
    if !leaves || rules.is_empty() {
        return None;
    }
    let interface = vtl_bpf::netdev::name_of(via.exit)?;
    rules.decide(&Forwarding {
        via: &interface,
        from: Some(syn.source()),
        to: syn.target(),
    })
}

impl Hooker {
    /// Makes this host a gateway at an interface.
    ///
    /// # Errors
    /// There is one, or the kernel refuses.
    pub fn add_gateway(&self, gateway: Gateway) -> Result<(), HookerError> {
        let shared = &self.handle.shared;
        shared.gateways().add(shared, gateway)
    }

    /// Ends a gateway. Connections that it carries go on.
    ///
    /// # Errors
    /// There is none.
    pub fn remove_gateway(&self, interface: &str) -> Result<(), HookerError> {
        let shared = &self.handle.shared;
        shared.gateways().remove(shared, interface)
    }

    /// The gateways.
    pub fn gateways(&self) -> Vec<GatewayListed> {
        let gateways = self.handle.shared.gateways();
        let listed = |entry: &Entry| GatewayListed {
            gateway: entry.gateway.clone(),
            is_present: vtl_bpf::netdev::index_of(&entry.gateway.interface).is_ok(),
            carried: entry.carried.load(Ordering::Relaxed),
        };
        gateways.entries.iter().map(listed).collect()
    }

    /// The next daemon's part: gateways, listeners with handshakes in progress, and the links that stay attached until
    /// it has its own.
    pub(super) fn leave_gateways(
        &self,
        mut put: impl FnMut(&dyn std::os::fd::AsFd) -> io::Result<crate::handover::Place>,
    ) -> io::Result<Left> {
        let mut gateways = self.handle.shared.gateways();
        let left = |entry: &Entry| GatewayLeft {
            interface: entry.gateway.interface.clone(),
            to: entry.gateway.to.iter().map(Prefix::to_string).collect(),
            ports: entry.gateway.ports.clone(),
            carrier: entry.gateway.carrier.spec(),
        };
        let mut all = Left {
            gateways: gateways.entries.iter().map(left).collect(),
            ..Left::default()
        };
        if let Some(kernel) = &mut gateways.kernel {
            all.is_loaded = true;
            kernel.routes.leave();
            for listener in &kernel.listeners {
                all.listeners.push(put(listener)?);
            }
            for link in kernel.links() {
                all.links.push(put(link)?);
            }
        }
        Ok(all)
    }

    /// Restores the gateways of a former daemon. Returns its links, to be closed when the rest is restored.
    pub(super) fn resume_gateways(
        &self,
        left: Left,
        descriptors: &mut crate::handover::Descriptors,
    ) -> Vec<std::os::fd::OwnedFd> {
        let shared = &self.handle.shared;
        let mut take = |places: Vec<crate::handover::Place>| {
            let all = places.into_iter();
            all.filter_map(|place| descriptors.take(place).ok())
                .collect::<Vec<_>>()
        };
        let listeners = take(left.listeners);
        let links = take(left.links);
        if left.is_loaded {
            let listeners = listeners.into_iter().map(TcpListener::from).collect();
            if let Err(error) = shared.gateways().load(shared, listeners) {
                tracing::warn!(%error, "handover: gateways lost");
                return links;
            }
            // Those that carry no gateway any more carry its connections.
            shared.gateways().interfaces_changed(shared);
        }
        for gateway in left.gateways {
            let interface = gateway.interface.clone();
            let added = gateway
                .restored()
                .and_then(|gateway| shared.gateways().add(shared, gateway));
            if let Err(error) = added {
                tracing::warn!(%error, interface, "handover: gateway lost");
            }
        }
        links
    }
}

impl GatewayLeft {
    fn restored(self) -> Result<Gateway, HookerError> {
        let carrier = Carrier::wanted(&self.carrier, false).map_err(HookerError::Inherited)?;
        let to = self.to.iter().filter_map(|text| text.parse().ok());
        Ok(Gateway {
            interface: self.interface,
            to: to.collect(),
            ports: self.ports,
            carrier,
        })
    }
}

/// What a daemon leaves of its gateways.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Left {
    gateways: Vec<GatewayLeft>,
    /// The programs were loaded.
    is_loaded: bool,
    listeners: Vec<crate::handover::Place>,
    links: Vec<crate::handover::Place>,
}

impl Shared {
    pub(super) fn gateways(&self) -> std::sync::MutexGuard<'_, Gateways> {
        // Poisoning is harmless: no critical section leaves a partial update.
        self.gateways.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
