//! Loads and controls `bpf/gateway.bpf.c`.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    os::fd::{AsFd, AsRawFd},
    sync::{Arc, mpsc::channel},
    time::Duration,
};

use libbpf_rs::{MapCore, MapFlags, MapHandle, RingBufferBuilder};
use nix::net::if_::if_nameindex;
use vtl_bpf::netdev;

use super::{
    super::{
        Shared,
        abi::{
            self, VTL_GATEWAY_INJECT, VTL_STEER_4, VTL_STEER_6, bytes_of, vtl_gateway_hop,
            vtl_gateway_port, vtl_gateway_prefix, vtl_hook_config,
        },
        bpf::{self, Attached, Programs},
        error::HookerError,
        held::{Flows, Forwarded, Raw},
        sock,
        steering::follow,
    },
    Gateway, Input,
    connect::set_transparent,
    routes::Routes,
};
use crate::Scope;

/// Marks packets of connections that end here (tcx ingress).
const TAKE: &str = "vtl_gateway_take";
/// Holds SYNs (tcx egress).
const HOLD: &str = "vtl_gateway_hold";
/// Finds the listener of injected SYNs (sk_lookup).
const LISTEN: &str = "vtl_gateway_listen";
/// Maps shared with the Hooker's programs.
const SHARED: [&str; 8] = [
    "vtl_captured",
    "vtl_policies",
    "vtl_locals",
    "vtl_plain",
    "vtl_near",
    "vtl_own",
    "vtl_beat",
    "vtl_gateway_outside",
];

/// The programs, their maps, and the routes by which packets get here.
pub(super) struct Kernel {
    /// Both links of each interface.
    links: HashMap<u32, [Attached; 2]>,
    listen: Attached,
    programs: Programs,
    hops: MapHandle,
    prefixes: MapHandle,
    ports: MapHandle,
    /// Duplicates of the worker's.
    pub(super) listeners: Vec<TcpListener>,
    pub(super) routes: Routes,
}

impl Kernel {
    /// Loads the programs and makes the routes; nothing is held yet. `former`: a former daemon's listeners.
    pub(super) fn load(
        shared: &Arc<Shared>,
        former: Vec<TcpListener>,
    ) -> Result<(Self, Input), HookerError> {
        let config = vtl_hook_config::default();
        let object = bpf::load(vtl_bpf::objects::GATEWAY, &config, |open| {
            for mut map in open.maps_mut() {
                let name = map.name().to_string_lossy().into_owned();
                if let Some(name) = SHARED.into_iter().find(|shared| **shared == *name) {
                    let hooks = shared.hooks();
                    let known = hooks.map(name).map_err(|error| {
                        libbpf_rs::Error::from(io::Error::other(error.to_string()))
                    })?;
                    map.reuse_fd(known.as_fd())?;
                }
            }
            Ok(())
        })?;
        let programs = Programs::new(object);
        let routes = Routes::add().map_err(HookerError::socket("add the gateway's routes"))?;
        let mut listeners = Vec::new();
        let into = programs.map("vtl_gateway_listeners")?;
        for (slot, ip) in [
            (VTL_STEER_4, IpAddr::from(Ipv4Addr::LOCALHOST)),
            (VTL_STEER_6, Ipv6Addr::LOCALHOST.into()),
        ] {
            match listen(shared, ip) {
                Ok(listener) => {
                    let fd = listener.as_fd().as_raw_fd() as u64;
                    let update = into.update(&slot.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY);
                    update.map_err(|source| HookerError::Map {
                        map: "vtl_gateway_listeners",
                        source,
                    })?;
                    listeners.push(listener);
                }
                Err(error) if ip.is_ipv4() => return Err(error),
                Err(error) => tracing::debug!(%error, "gateway: no IPv6"),
            }
        }
        let (sender, read) = channel();
        let mut builder = RingBufferBuilder::new();
        let failed = |source| HookerError::Map {
            map: "vtl_gateway_syns",
            source,
        };
        let callback = move |bytes: &[u8]| {
            if let Some(syn) = abi::from_bytes(bytes) {
                // The receiver lives as long as the ring.
                let _ = sender.send(syn);
            }
            0
        };
        let map = programs.map("vtl_gateway_syns")?;
        builder.add(&map, callback).map_err(failed)?;
        let ring = builder.build().map_err(failed)?;
        let flows = flows(&programs)?;
        let own = listeners.iter().map(TcpListener::try_clone);
        let own = own.chain(former.into_iter().map(Ok));
        let own = own.collect::<io::Result<Vec<_>>>();
        let input = Input {
            ring,
            read,
            listeners: own.map_err(HookerError::socket("duplicate a listener"))?,
            flows,
        };
        let netns = File::open("/proc/thread-self/ns/net");
        let netns = netns.map_err(HookerError::socket("open the network namespace"))?;
        let kernel = Self {
            links: HashMap::new(),
            listen: programs.attach_netns(LISTEN, &netns)?,
            hops: programs.map("vtl_gateway_hops")?,
            prefixes: programs.map("vtl_gateway_prefixes")?,
            ports: programs.map("vtl_gateway_ports")?,
            programs,
            listeners,
            routes,
        };
        Ok((kernel, input))
    }

    /// Attaches to new interfaces, forgets removed ones.
    pub(super) fn attach(&mut self, scope: &Scope) -> Result<(), HookerError> {
        let names = if_nameindex().map_err(|errno| HookerError::Socket {
            what: "list the network interfaces",
            source: errno.into(),
        })?;
        let present: HashMap<u32, String> = names
            .into_iter()
            .map(|each| (each.index(), each.name().to_string_lossy().into_owned()))
            .filter(|(_, name)| name != "lo" && scope.has(name))
            .collect();
        let programs = &self.programs;
        follow(&mut self.links, present, |index, name| {
            Ok([
                programs.attach_tcx(TAKE, index, name)?,
                programs.attach_tcx(HOLD, index, name)?,
            ])
        })
    }

    /// Tells the programs which connections to hold.
    pub(super) fn set<'a>(
        &self,
        gateways: impl Iterator<Item = &'a Gateway>,
    ) -> Result<(), HookerError> {
        let mut wanted = [const { BTreeMap::new() }; 3];
        for gateway in gateways {
            // It may come later.
            let Ok(ifindex) = netdev::index_of(&gateway.interface) else {
                continue;
            };
            let [hops, prefixes, ports] = &mut wanted;
            for prefix in &gateway.to {
                let (addr, bits) = prefix.wide();
                let key = vtl_gateway_prefix {
                    bits: 32 + u32::from(bits),
                    ifindex,
                    addr: addr.octets(),
                };
                prefixes.insert(bytes_of(&key).to_vec(), vec![1]);
            }
            for port in &gateway.ports {
                let key = vtl_gateway_port {
                    ifindex,
                    port: (*port).into(),
                };
                ports.insert(bytes_of(&key).to_vec(), vec![1]);
            }
            let hop = vtl_gateway_hop {
                has_prefixes: (!gateway.to.is_empty()).into(),
                has_ports: (!gateway.ports.is_empty()).into(),
            };
            hops.insert(ifindex.to_ne_bytes().to_vec(), bytes_of(&hop).to_vec());
        }
        // What stays is in force all the time, since this runs whenever an interface or an address changes.
        let maps = [
            (&self.hops, "vtl_gateway_hops"),
            (&self.prefixes, "vtl_gateway_prefixes"),
            (&self.ports, "vtl_gateway_ports"),
        ];
        for ((map, _), wanted) in maps.iter().zip(&wanted) {
            let gone = map.keys().filter(|key| !wanted.contains_key(key));
            for key in gone.collect::<Vec<_>>() {
                let _ = map.delete(&key);
            }
        }
        // A hop comes last, with its filters in place.
        for ((map, name), wanted) in maps.iter().zip(&wanted).rev() {
            for (key, value) in wanted {
                let put = map.update(key, value, MapFlags::ANY);
                put.map_err(|source| HookerError::Map { map: name, source })?;
            }
        }
        Ok(())
    }

    /// All links.
    pub(super) fn links(&self) -> impl Iterator<Item = &Attached> {
        self.links.values().flatten().chain([&self.listen])
    }
}

/// The listener of one family. Its connections have addresses of other hosts.
fn listen(shared: &Shared, ip: IpAddr) -> Result<TcpListener, HookerError> {
    let listen = || {
        let socket = sock::tcp(ip)?;
        set_transparent(&socket, ip)?;
        sock::bind(&socket, SocketAddr::new(ip, 0), false)?;
        let cookie = sock::cookie(&socket)?;
        shared.maps.own_listener(cookie).map_err(io::Error::other)?;
        // Otherwise a retransmitted SYN/ACK would lack the option.
        sock::save_syn(&socket)?;
        sock::listen(socket)
    };
    listen().map_err(HookerError::socket("listen for forwarded connections"))
}

/// Connects that the programs hold: to hosts beyond the hop, and from there.
pub(in super::super) struct Table([MapHandle; 2]);

impl Table {
    /// Enters a connect, unless it is there.
    pub(in super::super) fn hold(&self, ends: [SocketAddr; 2], forwarded: Forwarded) {
        let map = &self.0[usize::from(forwarded != Forwarded::Inside)];
        let now = bpf::monotonic().as_nanos() as u64;
        // Without room the SYN that comes again is forwarded.
        let _ = map.update(
            bytes_of(&abi::ends(ends)),
            &now.to_ne_bytes(),
            MapFlags::NO_EXIST,
        );
    }

    /// Removes a connect.
    pub(in super::super) fn release(&self, ends: [SocketAddr; 2]) {
        for map in &self.0 {
            // Absent is as good as removed.
            let _ = map.delete(bytes_of(&abi::ends(ends)));
        }
    }

    /// Connects whose first SYN came longer ago than `age`.
    pub(in super::super) fn stale(&self, age: Duration) -> Vec<[SocketAddr; 2]> {
        let limit = bpf::monotonic().saturating_sub(age).as_nanos() as u64;
        let is_old = |map: &MapHandle, key: &[u8]| {
            let value = map.lookup(key, MapFlags::ANY).ok().flatten();
            let began = value.and_then(|value| Some(u64::from_ne_bytes(*value.first_chunk()?)));
            began.is_some_and(|began| began < limit)
        };
        let of = |map: &MapHandle| {
            let keys: Vec<Vec<u8>> = map.keys().collect();
            let old = keys.into_iter().filter(|key| is_old(map, key));
            old.filter_map(|key| abi::from_bytes(&key).map(|key| abi::both(&key)))
                .collect::<Vec<_>>()
        };
        self.0.iter().flat_map(of).collect()
    }
}

/// The table of held connects, whose entries the programs count.
fn flows(programs: &Programs) -> Result<Arc<Flows>, HookerError> {
    let held = [
        programs.map("vtl_gateway_inside")?,
        programs.map("vtl_gateway_outside")?,
    ];
    let raw = |mark| Raw::open(mark).map_err(HookerError::socket("open a raw socket"));
    let flows = Flows::forwarded(raw(VTL_GATEWAY_INJECT)?, raw(0)?, Table(held));
    Ok(Arc::new(flows))
}
