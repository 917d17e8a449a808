//! The Hooker's eBPF programs and maps.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    path::Path,
    ptr::NonNull,
    time::Duration,
};

use libbpf_rs::{
    AsRawLibbpf, ErrorKind, Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject,
    ProgramMut, RingBuffer, RingBufferBuilder,
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    sys::resource::{Resource, getrlimit},
};
use vtl_proto::frame::FlowName;

use super::{
    abi::{
        self, bytes_of, vtl_flow_name, vtl_four_tuple, vtl_hook_config, vtl_near, vtl_own_socket,
        vtl_syn,
    },
    error::HookerError,
};

/// Programs that capture the connects of a hooked cgroup.
pub(super) const CAPTURE: [&str; 2] = ["vtl_connect4", "vtl_connect6"];
/// Programs that make applications see the addresses of the real connections.
pub(super) const ADDRESSES: [&str; 4] = [
    "vtl_getpeername4",
    "vtl_getpeername6",
    "vtl_getsockname4",
    "vtl_getsockname6",
];
/// Stores the client's address in the socket that a local application accepts.
pub(super) const ACCEPTED: &str = "vtl_accepted";
/// Discovery by the TCP option (sockops).
pub(super) const SOCKOPS: &str = "vtl_sockops";
/// Monitors connections to near hosts (sockops).
pub(super) const WATCH_NEAR: &str = "vtl_watch_near";
/// Holds SYNs of captured connects (tcx egress on lo).
pub(super) const HOLD_SYN: &str = "vtl_hold_syn";
/// Steers SYNs with the option to vtld (tcx ingress on other interfaces).
pub(super) const STEER_SYN: &str = "vtl_steer_syn";

/// The link of an attached program; detached on drop.
///
/// Its descriptor is above those of all sockets. When a process dies, the kernel closes the highest
/// first: the programs are detached before the first application gets a reset, so an application
/// that reconnects at once gets plain TCP.
#[derive(Debug)]
pub(super) struct Attached {
    link: OwnedFd,
}

impl AsFd for Attached {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.link.as_fd()
    }
}

/// Section of the configuration; separate, since other constants have no fixed offsets.
const CONFIG: &str = ".rodata.config";

/// First descriptor of links, unless the limit is lower. A process's descriptor table takes eight
/// bytes for each one below the highest.
const LINKS_FROM: u64 = 1 << 17;
/// Descriptors below the limit reserved for links.
const LINKS: u64 = 256;

impl Attached {
    fn new(link: &Link) -> libbpf_rs::Result<Self> {
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
        let from = LINKS_FROM.min(limit.saturating_sub(LINKS)) as i32;
        let high = fcntl(link.as_fd(), FcntlArg::F_DUPFD_CLOEXEC(from)).map_err(io::Error::from)?;
        // SAFETY: a new descriptor that nobody else owns.
        let high = unsafe { OwnedFd::from_raw_fd(high) };
        Ok(Self { link: high })
    }
}

/// Loads an object: fills its section [`CONFIG`] with `config`, then calls `prepare` before loading.
pub(super) fn load<T: abi::Pod>(
    image: &[u8],
    config: &T,
    prepare: impl FnOnce(&mut OpenObject) -> libbpf_rs::Result<()>,
) -> Result<Object, HookerError> {
    let opened = ObjectBuilder::default().open_memory(image);
    let mut object = opened.map_err(HookerError::Load)?;
    let mut rodata = object
        .maps_mut()
        .find(|map| map.name() == CONFIG)
        .ok_or(HookerError::Missing(CONFIG))?;
    let value = rodata
        .initial_value_mut()
        .ok_or(HookerError::Missing(CONFIG))?;
    let config = bytes_of(config);
    if value.len() != config.len() {
        return Err(HookerError::Missing("configuration of that size"));
    }
    value.copy_from_slice(config);
    prepare(&mut object).map_err(HookerError::Load)?;
    object.load().map_err(HookerError::Load)
}

fn program<'a>(object: &'a Object, name: &'static str) -> Result<ProgramMut<'a>, HookerError> {
    let mut programs = object.progs_mut();
    programs
        .find(|program| program.name() == name)
        .ok_or(HookerError::Missing(name))
}

/// A map of a loaded object.
pub(super) fn map(object: &Object, name: &'static str) -> Result<MapHandle, HookerError> {
    let map = object.maps().find(|map| map.name() == name);
    let map = map.ok_or(HookerError::Missing(name))?;
    MapHandle::try_from(&map).map_err(|source| HookerError::Map { map: name, source })
}

/// Attaches a program of a loaded object to the cgroup at `path`.
pub(super) fn attach_cgroup(
    object: &Object,
    name: &'static str,
    path: &Path,
    cgroup: &impl AsFd,
) -> Result<Attached, HookerError> {
    let link = program(object, name)?.attach_cgroup(cgroup.as_fd().as_raw_fd());
    link.and_then(|link| Attached::new(&link))
        .map_err(|source| HookerError::Attach {
            program: name,
            to: path.display().to_string(),
            source,
        })
}

/// The loaded programs; links are kept elsewhere ([`Attached`]).
#[derive(Debug)]
pub(super) struct Programs {
    object: Object,
}

impl Programs {
    /// `maps`: a former daemon's maps to reuse, by name. Where the kernel does not show programs what a task executes, they
    /// are loaded without that.
    pub(super) fn load(
        config: &vtl_hook_config,
        maps: &[(String, OwnedFd)],
    ) -> Result<Self, HookerError> {
        let seeing = vtl_hook_config {
            sees_exe: 1,
            ..*config
        };
        Self::load_as(&seeing, maps).or_else(|error| {
            tracing::debug!(%error, "hooker: programs are loaded without a look at executables");
            Self::load_as(config, maps)
        })
    }

    fn load_as(config: &vtl_hook_config, maps: &[(String, OwnedFd)]) -> Result<Self, HookerError> {
        let object = load(vtl_bpf::objects::HOOKER, config, |open| {
            for mut map in open.maps_mut() {
                let name = map.name().to_string_lossy().into_owned();
                if let Some((_, former)) = maps.iter().find(|(known, _)| *known == name) {
                    map.reuse_fd(former.as_fd())?;
                }
            }
            Ok(())
        })?;
        Ok(Self { object })
    }

    /// Other programs, of a loaded object.
    pub(super) fn new(object: Object) -> Self {
        Self { object }
    }

    /// Attaches a program of type sk_lookup to a network namespace.
    pub(super) fn attach_netns(
        &self,
        name: &'static str,
        netns: &impl AsFd,
    ) -> Result<Attached, HookerError> {
        let link = program(&self.object, name)?.attach_netns(netns.as_fd().as_raw_fd());
        link.and_then(|link| Attached::new(&link))
            .map_err(|source| HookerError::Attach {
                program: name,
                to: "the network namespace".into(),
                source,
            })
    }

    pub(super) fn attach_cgroup(
        &self,
        name: &'static str,
        path: &Path,
        cgroup: &impl AsFd,
    ) -> Result<Attached, HookerError> {
        attach_cgroup(&self.object, name, path, cgroup)
    }

    pub(super) fn attach_tcx(
        &self,
        name: &'static str,
        ifindex: u32,
        ifname: &str,
    ) -> Result<Attached, HookerError> {
        let program = program(&self.object, name)?;
        // SAFETY: the program is alive; null options are the defaults. The result is a new link
        // that nobody else owns, or null with errno set.
        let link = unsafe {
            let link = libbpf_sys::bpf_program__attach_tcx(
                program.as_libbpf_object().as_ptr(),
                ifindex as i32,
                std::ptr::null(),
            );
            NonNull::new(link).map(|link| Link::from_ptr(link))
        };
        link.ok_or_else(|| io::Error::last_os_error().into())
            .and_then(|link| Attached::new(&link))
            .map_err(|source| HookerError::Attach {
                program: name,
                to: ifname.to_owned(),
                source,
            })
    }

    /// A map, by its name.
    pub(super) fn map(&self, name: &'static str) -> Result<MapHandle, HookerError> {
        map(&self.object, name)
    }

    /// Calls `each` for every held SYN when the ring is consumed.
    pub(super) fn syns(
        &self,
        mut each: impl FnMut(&vtl_syn) + Send + 'static,
    ) -> Result<RingBuffer<'static>, HookerError> {
        let failed = |source| HookerError::Map {
            map: "vtl_syns",
            source,
        };
        let map = self.map("vtl_syns")?;
        let mut builder = RingBufferBuilder::new();
        let callback = move |bytes: &[u8]| {
            if let Some(syn) = abi::from_bytes(bytes) {
                each(&syn);
            }
            0
        };
        builder.add(&map, callback).map_err(failed)?;
        builder.build().map_err(failed)
    }

    pub(super) fn maps(&self) -> Result<Maps, HookerError> {
        Ok(Maps {
            locals: self.map("vtl_locals")?,
            plain: self.map("vtl_plain")?,
            near: self.map("vtl_near")?,
            pairs: self.map("vtl_pairs")?,
            own: self.map("vtl_own")?,
            ports: self.map("vtl_ports")?,
            steer: self.map("vtl_steer")?,
            beat: self.map("vtl_beat")?,
        })
    }

    /// The socket storage in which hooks with a carrier leave the policy.
    pub(super) fn policies(&self) -> Result<MapHandle, HookerError> {
        self.map("vtl_policies")
    }
}

/// The maps that vtld writes. A failed write is reported by the caller or costs no more than the
/// service of one entry; it must not break a connection.
#[derive(Debug)]
pub(super) struct Maps {
    locals: MapHandle,
    plain: MapHandle,
    near: MapHandle,
    pairs: MapHandle,
    own: MapHandle,
    ports: MapHandle,
    steer: MapHandle,
    beat: MapHandle,
}

fn put(map: &MapHandle, name: &'static str, key: &[u8], value: &[u8]) -> Result<(), HookerError> {
    let result = map.update(key, value, MapFlags::ANY);
    result.map_err(|source| HookerError::Map { map: name, source })
}

impl Maps {
    /// Sets the address that getsockname shows on the socket with this cookie.
    pub(super) fn show_local(&self, cookie: u64, local: SocketAddr) -> Result<(), HookerError> {
        put(
            &self.locals,
            "vtl_locals",
            &cookie.to_ne_bytes(),
            bytes_of(&abi::endpoint(local)),
        )
    }

    /// Stops capturing connects to `dest` for the given time.
    pub(super) fn leave_plain(&self, dest: SocketAddr, ttl: Duration) -> Result<(), HookerError> {
        let until = monotonic().saturating_add(ttl).as_nanos() as u64;
        put(
            &self.plain,
            "vtl_plain",
            bytes_of(&abi::endpoint(dest)),
            &until.to_ne_bytes(),
        )
    }

    /// Captures connects to `dest` again.
    pub(super) fn forget_plain(&self, dest: SocketAddr) {
        // Absent is as good as removed.
        let _ = self.plain.delete(bytes_of(&abi::endpoint(dest)));
    }

    /// Marks a host as near: connects to it that name no carrier are not captured for the given time. Ignored if the
    /// mark was lost within that time before (`spoiled`). False if nothing has changed.
    pub(super) fn leave_near(&self, host: IpAddr, ttl: Duration) -> Result<bool, HookerError> {
        let now = monotonic();
        let key = abi::wide(host).octets();
        let known = self.near(&key).unwrap_or_default();
        let lately = now.saturating_sub(ttl).as_nanos() as u64;
        let is_near = known.spoiled == 0 && known.until > now.as_nanos() as u64;
        if is_near || (known.spoiled != 0 && known.spoiled >= lately) {
            return Ok(false);
        }
        // Keep the statistics of connections that go on.
        let before = if known.spoiled == 0 {
            known
        } else {
            vtl_near::default()
        };
        let near = vtl_near {
            until: now.saturating_add(ttl).as_nanos() as u64,
            ..before
        };
        put(&self.near, "vtl_near", &key, bytes_of(&near)).map(|()| true)
    }

    /// The near hosts, sorted.
    pub(super) fn near_hosts(&self) -> Vec<IpAddr> {
        let now = monotonic().as_nanos() as u64;
        let is_near = |key: &Vec<u8>| {
            self.near(key)
                .is_some_and(|near| near.until > now && near.spoiled == 0)
        };
        let keys = self.near.keys().filter(is_near);
        let mut hosts: Vec<IpAddr> = keys
            .filter_map(|key| <[u8; 16]>::try_from(key).ok())
            .map(|octets| Ipv6Addr::from(octets).to_canonical())
            .collect();
        hosts.sort();
        hosts
    }

    fn near(&self, key: &[u8]) -> Option<vtl_near> {
        abi::from_bytes(&self.near.lookup(key, MapFlags::ANY).ok()??)
    }

    /// Makes the application that accepts the connection with these ends, vtld's first, see `client` as its peer.
    /// False: an earlier connection with these ends has yet to be accepted.
    pub(super) fn show_client(
        &self,
        ends: [SocketAddr; 2],
        client: SocketAddr,
    ) -> Result<bool, HookerError> {
        let (ends, client) = (abi::ends(ends), abi::endpoint(client));
        let (key, value) = (bytes_of(&ends), bytes_of(&client));
        match self.pairs.update(key, value, MapFlags::NO_EXIST) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(source) => Err(HookerError::Map {
                map: "vtl_pairs",
                source,
            }),
        }
    }

    /// The ends of connections whose client address was set and that are not accepted yet.
    pub(super) fn shown(&self) -> Vec<[SocketAddr; 2]> {
        let ends = |key: Vec<u8>| {
            let ends: vtl_four_tuple = abi::from_bytes(&key)?;
            Some([ends.from, ends.to].map(|end| abi::socket_addr(&end)))
        };
        self.pairs.keys().filter_map(ends).collect()
    }

    pub(super) fn hide_client(&self, ends: [SocketAddr; 2]) {
        let _ = self.pairs.delete(bytes_of(&abi::ends(ends)));
    }

    /// Registers a socket of vtld's own: it is never captured. `name`: announced by the option in its SYN, for the
    /// connection of a flow or a control connection.
    pub(super) fn own(&self, cookie: u64, name: Option<FlowName>) -> Result<(), HookerError> {
        let of = |name: FlowName| vtl_own_socket {
            flags: abi::VTL_SOCK_OFFER | abi::VTL_SOCK_FLOW,
            flow: vtl_flow_name {
                tag: name.tag.to_be(),
                number: name.number.to_be(),
            },
            ..Default::default()
        };
        self.enter(cookie, &name.map_or_else(vtl_own_socket::default, of))
    }

    /// Registers a listener whose connections answer the option.
    pub(super) fn own_listener(&self, cookie: u64) -> Result<(), HookerError> {
        let owned = vtl_own_socket {
            flags: abi::VTL_SOCK_OFFER,
            ..Default::default()
        };
        self.enter(cookie, &owned)
    }

    fn enter(&self, cookie: u64, owned: &vtl_own_socket) -> Result<(), HookerError> {
        put(&self.own, "vtl_own", &cookie.to_ne_bytes(), bytes_of(owned))
    }

    fn owned(&self, cookie: u64) -> Option<vtl_own_socket> {
        let found = self.own.lookup(&cookie.to_ne_bytes(), MapFlags::ANY);
        abi::from_bytes(&found.ok()??)
    }

    /// Whether the kernel has given up a socket's option, because segments with it seem to be dropped.
    pub(super) fn gave_up(&self, cookie: u64) -> bool {
        let owned = self.owned(cookie);
        owned.is_some_and(|owned| owned.flags & abi::VTL_SOCK_GAVE_UP != 0)
    }

    /// The name of a socket's flow, if its peer has shown that it understands the option.
    pub(super) fn understood(&self, cookie: u64) -> Option<FlowName> {
        let owned = self.owned(cookie)?;
        (owned.flags & abi::VTL_SOCK_PEER != 0).then(|| FlowName {
            tag: u32::from_be(owned.flow.tag),
            number: u32::from_be(owned.flow.number),
        })
    }

    pub(super) fn disown(&self, cookie: u64) {
        // Absent is as good as removed.
        let _ = self.own.delete(&cookie.to_ne_bytes());
    }

    pub(super) fn hook_port(&self, port: u16, on: bool) -> Result<(), HookerError> {
        put(
            &self.ports,
            "vtl_ports",
            &u32::from(port).to_ne_bytes(),
            &[on.into()],
        )
    }

    /// Heartbeat: programs capture and steer for another second (`VTL_BEAT_NS`).
    pub(super) fn beat(&self) -> Result<(), HookerError> {
        self.beaten(monotonic().as_nanos() as u64)
    }

    /// Ends the heartbeat: programs stop capturing and steering at once.
    pub(super) fn beat_no_more(&self) -> Result<(), HookerError> {
        self.beaten(0)
    }

    fn beaten(&self, at_ns: u64) -> Result<(), HookerError> {
        put(
            &self.beat,
            "vtl_beat",
            &0u32.to_ne_bytes(),
            &at_ns.to_ne_bytes(),
        )
    }

    pub(super) fn steer_to(&self, slot: u32, listener: &impl AsFd) -> Result<(), HookerError> {
        let fd = listener.as_fd().as_raw_fd() as u64;
        put(
            &self.steer,
            "vtl_steer",
            &slot.to_ne_bytes(),
            &fd.to_ne_bytes(),
        )
    }
}

/// The clock of `bpf_ktime_get_ns`.
pub(super) fn monotonic() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .map_or(Duration::ZERO, Duration::from)
}
