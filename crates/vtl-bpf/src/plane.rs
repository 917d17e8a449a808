//! The root programs with their maps, and the grafts that they call.

use std::{
    collections::BTreeMap,
    mem::offset_of,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

use libbpf_rs::{Map, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject};
use vtl_proto::{intf, services::Services};

use crate::{
    Error, Result,
    link::{self, Hook},
    load::{Attachment, LoadedGraft, Loader, ROOT_PROGRAMS, Steps},
    netdev::Interface,
    objects,
    pump::PumpEntry,
    rings,
    sessions::SessionTable,
    shard::Shard,
};

/// Hook for incoming packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ingress {
    /// Traffic control: no measurable cost for other traffic.
    #[default]
    Tcx,
    /// XDP: a little faster for VTL, slower for all other traffic on virtual interfaces.
    Xdp,
}

/// A graft loaded into the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraftInfo {
    /// Its name.
    pub name: String,
    /// Its gid in packets.
    pub gid: u16,
    /// Services that it provides.
    pub services: Services,
    /// Whether it fragments packets larger than the path's maximum payload, into halves.
    pub halves: bool,
    /// eBPF instructions of all its programs.
    pub instructions: usize,
}

/// The loaded data plane of one network namespace.
pub struct DataPlane {
    root: Object,
    sessions: Arc<SessionTable>,
    shards: Vec<Arc<Shard>>,
    tunnel: Arc<PumpEntry>,
    grafts: BTreeMap<u16, LoadedGraft>,
    loader: Arc<Loader>,
    attached: BTreeMap<u32, Attachment>,
    direct: Option<OwnedFd>,
}

/// The programs of a graft that serve interfaces attached to by XDP.
pub(crate) const XDP_INGRESS: [&str; 2] = ["vtl_ingress_xdp", "vtl_listener_xdp"];

/// The programs of a graft, and their slots in the `PROG_ARRAY`s.
pub(crate) const SLOT_PROGRAMS: [(&str, &str, u32, u32); 7] = [
    // program, PROG_ARRAY, slots per gid, slot
    (
        "vtl_ingress_tc",
        "vtl_in_tc",
        intf::VTL_ROLES,
        intf::VTL_INGRESS,
    ),
    (
        "vtl_listener_tc",
        "vtl_in_tc",
        intf::VTL_ROLES,
        intf::VTL_LISTENER,
    ),
    (
        "vtl_ingress_xdp",
        "vtl_in_xdp",
        intf::VTL_ROLES,
        intf::VTL_INGRESS,
    ),
    (
        "vtl_listener_xdp",
        "vtl_in_xdp",
        intf::VTL_ROLES,
        intf::VTL_LISTENER,
    ),
    ("vtl_egress_tc", "vtl_out_tc", 1, 0),
    ("vtl_egress_direct", "vtl_out_direct", 1, 0),
    ("vtl_egress_xdp", "vtl_out_xdp", 1, 0),
];

impl DataPlane {
    /// Loads the root programs and creates the maps, for fewer than `VTL_MAX_SESSIONS` sessions and
    /// one shard, and for interfaces attached to by either hook. Attaches nothing.
    ///
    /// # Errors
    /// [`Error::Load`] if the kernel refuses, [`Error::System`] if the table cannot be mapped.
    pub fn load() -> Result<Self> {
        Self::load_for(0, 1, true, true)
    }

    /// As [`DataPlane::load`], for at least `sessions` sessions and 1 to `VTL_MAX_SHARDS` shards.
    /// Each entry takes the memory of a `vtl_session`, used or not. `udp`: the caller has bound
    /// VTL's UDP port, so packets to it are VTL's. `xdp`: whether interfaces may be attached to by XDP.
    ///
    /// # Errors
    /// As [`DataPlane::load`].
    ///
    /// # Panics
    /// If there are no shards, or too many.
    pub fn load_for(sessions: u32, shards: u32, udp: bool, xdp: bool) -> Result<Self> {
        assert!((1..=intf::VTL_MAX_SHARDS).contains(&shards));
        // Spare entries, so that indexes of ended sessions are not reused at once.
        let places = (sessions + sessions / 32 + 32).max(intf::VTL_MAX_SESSIONS);
        // Spare sets, for a pool of free ones while all sessions have theirs.
        let sets = (places + places / 4).max(intf::VTL_MAX_RINGS);
        let mut open = open_root(0, udp)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("vtl_sessions" | "vtl_callers") => map.set_max_entries(places),
                Some("vtl_tx_rings" | "vtl_rx_rings" | "vtl_scoreboards" | "vtl_wakes") => {
                    map.set_max_entries(sets)
                }
                Some("vtl_pump") => map.set_max_entries(shards + 1),
                Some("vtl_events") => map.set_max_entries(shards),
                _ => Ok(()),
            }
            .map_err(refused)?;
        }
        let root = open.load().map_err(refused)?;
        let table = SessionTable::map(map_of(&root, "vtl_sessions").as_fd(), places)?;
        let sessions = Arc::new(table);
        let pump = map_of(&root, "vtl_pump");
        let tunnel = Arc::new(PumpEntry::map(pump.as_fd(), shards)?);
        let loader = Arc::new(loader(&root, xdp)?);
        let events = rings::of_events(&map_of(&root, "vtl_events"), shards)?;
        let shard = |(number, events)| {
            let entry = PumpEntry::map(pump.as_fd(), number)?;
            let program = match number {
                0 => copy(program_of(&root, LIVE).expect("it is built with this crate"))?,
                _ => live_program(&loader, number, udp)?,
            };
            Ok(Arc::new(Shard::new(number, entry, events, program)))
        };
        let shards = (0..).zip(events).map(shard).collect::<Result<_>>()?;
        Ok(Self {
            root,
            sessions,
            shards,
            tunnel,
            grafts: BTreeMap::new(),
            loader,
            attached: BTreeMap::new(),
            direct: None,
        })
    }

    /// Attaches the root programs to an interface. No effect if they are attached.
    ///
    /// # Errors
    /// See [`link::attach`].
    pub fn attach(&mut self, interface: &Interface, ingress: Ingress) -> Result<()> {
        if self.attached.contains_key(&interface.index) {
            return Ok(());
        }
        self.adopt(self.loader.attach(interface, ingress)?);
        Ok(())
    }

    /// Takes over an attachment made by the [`Loader`].
    pub fn adopt(&mut self, attachment: Attachment) {
        self.attached.insert(attachment.interface.index, attachment);
    }

    /// Notes that an interface has another MTU.
    pub fn resize(&mut self, index: u32, mtu: u32) {
        if let Some(attachment) = self.attached.get_mut(&index) {
            attachment.interface.mtu = mtu;
        }
    }

    /// Detaches the root programs from an interface.
    pub fn detach(&mut self, index: u32) {
        self.attached.remove(&index);
    }

    /// Attaches the program by which aware applications run their own egress, to the loopback.
    ///
    /// # Errors
    /// See [`link::attach`].
    pub fn attach_direct(&mut self) -> Result<()> {
        let program = self.program("vtl_root_direct");
        let loopback = intf::VTL_LOOPBACK_IFINDEX;
        self.direct = Some(link::attach(program, loopback, Hook::TcxEgress)?);
        Ok(())
    }

    /// Whether [`DataPlane::attach_direct`] has succeeded.
    pub fn has_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The interfaces with root programs, by index.
    pub fn attached(&self) -> &BTreeMap<u32, Attachment> {
        &self.attached
    }

    /// The part that loads and attaches, for use on other threads: [`DataPlane::deploy`] and
    /// [`DataPlane::attach`] in two steps.
    pub fn loader(&self) -> &Arc<Loader> {
        &self.loader
    }

    /// Loads a graft's object into the kernel and installs it under its gid. Deploying the same
    /// graft again replaces the programs without packet loss.
    ///
    /// # Errors
    /// [`Error::BadGraft`] if the object does not describe a graft, [`Error::GidTaken`],
    /// [`Error::Load`] if the verifier rejects it. Deployed grafts are not affected.
    pub fn deploy(&mut self, image: &[u8]) -> Result<GraftInfo> {
        self.deploy_timed(image).map(|(info, _)| info)
    }

    /// As [`DataPlane::deploy`]; also returns the time of each step.
    ///
    /// # Errors
    /// As [`DataPlane::deploy`].
    pub fn deploy_timed(&mut self, image: &[u8]) -> Result<(GraftInfo, Steps)> {
        let mut steps = Steps::default();
        let loaded = self.loader.load(image, &mut steps)?;
        let started = Instant::now();
        let info = self.install(loaded)?;
        steps.fill = started.elapsed();
        Ok((info, steps))
    }

    /// The second step of [`DataPlane::deploy`]: installs a loaded graft in the `PROG_ARRAY`s.
    ///
    /// # Errors
    /// [`Error::GidTaken`]; [`Error::Load`] if the kernel is out of memory.
    pub fn install(&mut self, graft: LoadedGraft) -> Result<GraftInfo> {
        let info = graft.info.clone();
        let other = self.grafts.get(&info.gid).map(|other| &other.info.name);
        if let Some(name) = other.filter(|name| **name != info.name) {
            return Err(Error::GidTaken {
                gid: info.gid,
                name: name.clone(),
            });
        }
        for ((_, array, stride, slot), program) in SLOT_PROGRAMS.iter().zip(&graft.programs) {
            let Some(program) = program else {
                continue;
            };
            let key = u32::from(info.gid) * stride + slot;
            let program = program.as_raw_fd().to_ne_bytes();
            map_of(&self.root, array)
                .update(&key.to_ne_bytes(), &program, MapFlags::ANY)
                .map_err(|e| Error::load(format!("graft \"{}\"", info.name), e))?;
        }
        self.grafts.insert(info.gid, graft);
        Ok(info)
    }

    /// Removes a graft from the kernel.
    ///
    /// # Errors
    /// [`Error::NoGraft`] if it is not deployed.
    pub fn remove(&mut self, name: &str) -> Result<()> {
        let gid = self
            .grafts
            .iter()
            .find_map(|(gid, d)| (d.info.name == name).then_some(*gid))
            .ok_or_else(|| Error::NoGraft(name.to_owned()))?;
        for (_, array, stride, slot) in SLOT_PROGRAMS {
            let key = u32::from(gid) * stride + slot;
            // Fails if the slot is empty already.
            let _ = map_of(&self.root, array).delete(&key.to_ne_bytes());
        }
        self.grafts.remove(&gid);
        Ok(())
    }

    /// The deployed grafts, by gid.
    pub fn grafts(&self) -> impl Iterator<Item = &GraftInfo> {
        self.grafts.values().map(|d| &d.info)
    }

    /// The table of sessions.
    pub fn sessions(&self) -> &Arc<SessionTable> {
        &self.sessions
    }

    /// The shards, by number.
    pub fn shards(&self) -> &[Arc<Shard>] {
        &self.shards
    }

    /// The entry of `vtl_pump` for packets over TCP, and the mark of their frames.
    pub(crate) fn tunnel_entry(&self) -> (&Arc<PumpEntry>, u32) {
        (&self.tunnel, self.shards.len() as u32)
    }

    /// A handle of its own for one of the root object's maps.
    ///
    /// # Errors
    /// [`Error::Load`] if its descriptor cannot be duplicated.
    pub fn map_handle(&self, name: &str) -> Result<MapHandle> {
        MapHandle::try_from(&map_of(&self.root, name))
            .map_err(|e| Error::load(format!("map {name}"), e))
    }

    /// A root program, for egress drivers and test runs.
    ///
    /// # Panics
    /// If there is no such program.
    pub fn program(&self, name: &str) -> BorrowedFd<'_> {
        program_of(&self.root, name).expect("the root object is built with this crate")
    }

    /// Counters of the kernel side, indexed by `VTL_ST_*`, summed over CPUs.
    pub fn stats(&self) -> Vec<u64> {
        let map = map_of(&self.root, "vtl_stats");
        (0..intf::VTL_STATS)
            .map(|i| {
                map.lookup_percpu(&i.to_ne_bytes(), MapFlags::ANY)
                    .ok()
                    .flatten()
                    .unwrap_or_default()
                    .iter()
                    .filter_map(|v| v.as_slice().try_into().ok().map(u64::from_ne_bytes))
                    .sum()
            })
            .collect()
    }
}

/// The root program for live frames.
const LIVE: &str = "vtl_root_out_xdp";

fn refused(error: libbpf_rs::Error) -> Error {
    Error::load("the root programs", error)
}

/// Opens the root object, with its constants set.
fn open_root(shard: u32, udp: bool) -> Result<OpenObject> {
    let mut open = ObjectBuilder::default()
        .name("vtl_root")
        .and_then(|b| b.open_memory(objects::ROOT))
        .map_err(refused)?;
    let mut constants = open
        .maps_mut()
        .find(|map| map.name().to_string_lossy().ends_with(".rodata"));
    let value = constants.as_mut().and_then(|map| map.initial_value_mut());
    // struct vtl_root_config, the only constant.
    let value = value.expect("the root object is built with this crate and has constants");
    for (at, field) in [
        (offset_of!(intf::vtl_root_config, by_udp), u32::from(udp)),
        (offset_of!(intf::vtl_root_config, shard), shard),
    ] {
        value[at..][..size_of::<u32>()].copy_from_slice(&field.to_ne_bytes());
    }
    Ok(open)
}

/// Loads the live-frame program of a shard other than the first.
fn live_program(loader: &Loader, shard: u32, udp: bool) -> Result<OwnedFd> {
    let mut open = open_root(shard, udp)?;
    loader.share_maps(&mut open).map_err(refused)?;
    for mut program in open.progs_mut() {
        let is_it = program.name() == LIVE;
        program.set_autoload(is_it);
    }
    let object = open.load().map_err(refused)?;
    copy(program_of(&object, LIVE).expect("it is built with this crate"))
}

fn copy(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(|source| Error::System {
        what: "duplicating the root programs' descriptors".into(),
        source,
    })
}

/// Duplicates the descriptors for loading and attaching.
fn loader(root: &Object, has_xdp: bool) -> Result<Loader> {
    let one = |map: Map<'_>| Ok((map.name().to_owned(), copy(map.as_fd())?));
    // Constants are per object, not shared.
    let shared = |map: &Map<'_>| !map.name().to_string_lossy().ends_with(".rodata");
    let [tc, xdp, out] = ROOT_PROGRAMS.map(|name| {
        copy(program_of(root, name).expect("the root object is built with this crate"))
    });
    Ok(Loader {
        maps: root.maps().filter(shared).map(one).collect::<Result<_>>()?,
        programs: [tc?, xdp?, out?],
        has_xdp,
    })
}

fn map_of<'a>(object: &'a Object, name: &str) -> Map<'a> {
    object
        .maps()
        .find(|m| m.name() == name)
        .unwrap_or_else(|| panic!("the root object is built with this crate and has map {name}"))
}

pub(crate) fn program_of<'a>(object: &'a Object, name: &str) -> Option<BorrowedFd<'a>> {
    object.progs().find(|p| p.name() == name).map(|p| {
        let fd = p.as_fd().as_raw_fd();
        // SAFETY: the object owns the program, whose descriptor stays open as long as it lives.
        unsafe { BorrowedFd::borrow_raw(fd) }
    })
}
