//! Handover of the Hooker to the next daemon:
//!
//! * listeners, for handshakes in progress,
//! * the maps with the addresses that applications see, and the programs that show them,
//! * the program that holds SYNs, so that pending connects get no answer before the next daemon can give one (TCP
//!   retransmits the SYNs), and the steering programs, for the same reason,
//! * hooks and proxied connections.

use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    path::PathBuf,
    sync::mpsc::sync_channel,
};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vtl_control::CarrierSpec;

use super::{
    Handle, Hooker, carrier::CarrierPolicies, gateway, hooks::Hooked, listeners::Listeners,
    worker::Command,
};
use crate::handover::{Descriptors, Outgoing, Place};

/// Maps that outlive a daemon: addresses that applications see, and the state of sockets and destinations.
const MAPS: [&str; 7] = [
    "vtl_captured",
    "vtl_locals",
    "vtl_plain",
    "vtl_pairs",
    "vtl_shown",
    "vtl_own",
    "vtl_gateway_outside",
];

/// State handed over by the Hooker.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Handover {
    capture: Vec<Place>,
    steer: Vec<Place>,
    maps: Vec<(String, Place)>,
    links: Vec<Place>,
    /// Steering programs: they keep peers' control connections from reaching applications meanwhile.
    #[serde(default)]
    steering: Vec<Place>,
    hooks: Vec<HookLeft>,
    /// The policies behind the numbers in sockets' storage.
    #[serde(rename = "wishes")]
    policies: CarrierPolicies,
    /// Folders for the cgroups of programs that `vtl run` has started, relative to the hierarchy's root, and their
    /// locks.
    groups: Vec<(PathBuf, Place)>,
    proxied: Vec<Proxied>,
    #[serde(default)]
    gateways: gateway::Left,
}

impl Handover {
    pub(crate) fn connections(&self) -> usize {
        self.proxied.len()
    }
}

/// A hook made by hand. Paths are relative to the hierarchy's root.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct HookLeft {
    pub(super) what: Hooked,
    pub(super) carrier: CarrierSpec,
}

/// A proxied connection.
#[derive(Debug, Serialize, Deserialize)]
struct Proxied {
    sides: [Side; 2],
    /// vtld's end of the connection to a local application, which sees the client's address instead.
    shown: Option<SocketAddr>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Side {
    socket: Place,
    /// Bytes read from the other side and not written to this one yet, and whether they are just the urgent byte.
    pending: Bytes,
    urgent: bool,
}

/// A proxied pair of connections.
pub(super) struct PairLeft {
    pub(super) sides: [(TcpStream, Bytes, bool); 2],
    pub(super) shown: Option<SocketAddr>,
}

/// The part of the state that is restored before the programs are loaded.
#[derive(Default)]
pub(super) struct Inherited {
    pub(super) capture: Vec<OwnedFd>,
    pub(super) steer: Vec<TcpListener>,
    pub(super) maps: Vec<(String, OwnedFd)>,
    /// Links of the former daemon's programs that are still attached.
    pub(super) links: Vec<OwnedFd>,
    pub(super) groups: Vec<(PathBuf, OwnedFd)>,
    pub(super) policies: CarrierPolicies,
}

impl Inherited {
    pub(super) fn take(left: &Handover, descriptors: &mut Descriptors) -> io::Result<Self> {
        let mut all = |places: &[Place]| -> io::Result<Vec<OwnedFd>> {
            places
                .iter()
                .map(|place| descriptors.take(*place))
                .collect()
        };
        fn unzip<T: Clone>(of: &[(T, Place)]) -> (Vec<T>, Vec<Place>) {
            of.iter().cloned().unzip()
        }
        let (names, maps) = unzip(&left.maps);
        let (folders, locks) = unzip(&left.groups);
        Ok(Self {
            capture: all(&left.capture)?,
            steer: all(&left.steer)?
                .into_iter()
                .map(TcpListener::from)
                .collect(),
            maps: names.into_iter().zip(all(&maps)?).collect(),
            links: all(&left.links)?,
            groups: folders.into_iter().zip(all(&locks)?).collect(),
            policies: left.policies.clone(),
        })
    }
}

impl Hooker {
    /// Stops capture and steering, and hands the state over, all but what is proxied. Drop does the rest.
    ///
    /// # Errors
    /// Out of file descriptors.
    pub(crate) fn hand_over(&self, outgoing: &mut Outgoing) -> io::Result<Handover> {
        let shared = &self.handle.shared;
        let (hooks, folders) = shared.hooks().leave();
        // Stop steering.
        *shared.is_left() = true;
        if let Err(error) = shared.maps.beat_no_more() {
            tracing::debug!(%error, "handover: cannot clear the heartbeat: connects may wait for the next daemon");
        }
        let mut groups = Vec::new();
        for (path, lock) in folders {
            groups.push((path, outgoing.put(&lock)?));
        }
        shared.flows.leave();
        let (reply, answer) = sync_channel(1);
        let _ = shared.commands.send(Command::Leave(reply));
        let _ = shared.wake.write(1);
        // The listeners are valid in any case: the worker has drained them, or has died.
        let _ = answer.recv();
        let Listeners { capture, steer } = &self.listeners;
        let maps = MAPS.into_iter().filter_map(|name| {
            let map = shared.hooks().map(name).ok()?;
            Some(outgoing.put(&map).map(|place| (name.to_owned(), place)))
        });
        let maps = maps.collect::<io::Result<_>>()?;
        let put = |listener: &TcpListener| outgoing.put(listener);
        let all = capture
            .iter()
            .chain(steer.iter().take(capture.len()))
            .map(put);
        let mut capture_places = all.collect::<io::Result<Vec<_>>>()?;
        let steer_places = capture_places.split_off(capture.len());
        let links = self.links.iter().map(|link| outgoing.put(link));
        let links = links.collect::<io::Result<_>>()?;
        let hooked = shared.hooks();
        let steering = hooked.steering().map(|link| outgoing.put(link));
        let steering = steering.collect::<io::Result<_>>()?;
        drop(hooked);
        let gateways = self.leave_gateways(|descriptor| outgoing.put(&descriptor))?;
        Ok(Handover {
            gateways,
            steering,
            capture: capture_places,
            steer: steer_places,
            maps,
            links,
            hooks,
            policies: shared.hooks().policies(),
            groups,
            proxied: Vec::new(),
        })
    }

    /// Stops proxying, and hands its connections over as well: behind the flows, some of which may have become such until
    /// then.
    ///
    /// # Errors
    /// Out of file descriptors.
    pub(crate) fn hand_over_proxied(
        &self,
        outgoing: &mut Outgoing,
        handover: &mut Handover,
    ) -> io::Result<()> {
        for PairLeft { sides, shown } in self.handle.shared.proxy.leave() {
            let mut side = |(socket, pending, urgent): (TcpStream, Bytes, bool)| {
                let socket = outgoing.put(&socket)?;
                Ok::<_, io::Error>(Side {
                    socket,
                    pending,
                    urgent,
                })
            };
            let [a, b] = sides;
            let sides = [side(a)?, side(b)?];
            handover.proxied.push(Proxied { sides, shown });
        }
        Ok(())
    }

    /// Restores the hooks and proxied connections of a former daemon, and begins. Those that fail are logged and
    /// skipped.
    pub(crate) fn resume(&self, left: Handover, descriptors: &mut Descriptors) {
        let shared = &self.handle.shared;
        for hook in left.hooks {
            let what = format!("{:?}", hook.what);
            if let Err(error) = shared.hooks().adopt(shared, hook) {
                tracing::warn!(%error, what, "handover: hook lost");
            }
        }
        let steering = left.steering.into_iter();
        let steering = steering.filter_map(|place| descriptors.take(place).ok());
        let mut former: Vec<OwnedFd> = steering.collect();
        former.extend(self.resume_gateways(left.gateways, descriptors));
        *self.former() = former;
        for Proxied { sides, shown } in left.proxied {
            let guard = shown.map(|end| self.handle.adopt_client(end));
            let mut side = |side: Side| {
                let socket = TcpStream::from(descriptors.take(side.socket)?);
                Ok::<_, io::Error>((socket, side.pending, side.urgent))
            };
            let [a, b] = sides;
            match side(a).and_then(|a| Ok([a, side(b)?])) {
                Ok(sides) => shared.proxy.resume(sides, guard),
                Err(error) => tracing::warn!(%error, "handover: proxied connection lost"),
            }
        }
        self.begin();
    }
}

impl Handle {
    /// Keeps the client address that a local application sees, across a restart.
    pub fn adopt_client(&self, end: SocketAddr) -> super::ClientAddressGuard {
        super::steering::adopt(&self.shared, end)
    }
}
