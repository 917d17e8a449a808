//! The root programs with their maps, and the grafts behind them.

use std::{
    collections::BTreeMap,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
    time::Instant,
};

use libbpf_rs::{Map, MapCore, MapFlags, MapHandle, Object, ObjectBuilder};
use vtl_proto::{intf, services::Services};

use crate::{
    Error, Result,
    link::{self, Hook},
    load::{Attachment, LoadedGraft, Loader, ROOT_PROGRAMS, Steps},
    netdev::Interface,
    objects,
    pump::{Anchor, Order},
    sessions::SessionTable,
};

/// On which hook packets are received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ingress {
    /// Traffic control: costs other traffic nothing measurable.
    #[default]
    Tcx,
    /// XDP: a little faster for VTL, slower for everybody else on virtual interfaces.
    Xdp,
}

/// A graft in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraftInfo {
    /// Its name.
    pub name: String,
    /// The id that its packets carry.
    pub gid: u16,
    /// What it provides.
    pub services: Services,
    /// Packets that are too large for the path go in halves.
    pub halves: bool,
    /// eBPF instructions over all its programs.
    pub instructions: usize,
}

/// The loaded data plane of one network namespace.
pub struct DataPlane {
    root: Object,
    sessions: Arc<SessionTable>,
    order: Arc<Order>,
    grafts: BTreeMap<u16, LoadedGraft>,
    loader: Arc<Loader>,
    attached: BTreeMap<u32, Attachment>,
    direct: Option<OwnedFd>,
    anchor: OnceLock<Arc<Anchor>>,
}

/// What a graft consists of, and where it is reached.
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
    /// Loads the root programs and creates the maps, for fewer than `VTL_MAX_SESSIONS` sessions.
    /// Attaches nothing.
    ///
    /// # Errors
    /// [`Error::Load`] if the kernel refuses, [`Error::System`] if the table cannot be mapped.
    pub fn load() -> Result<Self> {
        Self::load_for(0, true)
    }

    /// As [`DataPlane::load`], for so many sessions at least. Each place takes the memory of a
    /// `vtl_session`, whether it is used or not. `udp`: the caller has bound VTL's UDP port, and what
    /// comes to it is VTL's.
    ///
    /// # Errors
    /// As [`DataPlane::load`].
    pub fn load_for(sessions: u32, udp: bool) -> Result<Self> {
        // More, so that the indexes of sessions that have ended can rest.
        let places = (sessions + sessions / 32 + 32).max(intf::VTL_MAX_SESSIONS);
        // More, since some are ready while all sessions have theirs.
        let sets = (places + places / 4).max(intf::VTL_MAX_RINGS);
        let refused = |e| Error::load("the root programs", e);
        let mut open = ObjectBuilder::default()
            .name("vtl_root")
            .and_then(|b| b.open_memory(objects::ROOT))
            .map_err(refused)?;
        for mut map in open.maps_mut() {
            match map.name().to_str() {
                Some("vtl_sessions" | "vtl_callers") => map.set_max_entries(places),
                Some("vtl_tx_rings" | "vtl_rx_rings" | "vtl_scoreboards" | "vtl_wakes") => {
                    map.set_max_entries(sets)
                }
                _ => Ok(()),
            }
            .map_err(refused)?;
        }
        // The constant `vtl_by_udp`, the only one.
        let mut constants = open
            .maps_mut()
            .find(|map| map.name().to_string_lossy().ends_with(".rodata"));
        if let Some(value) = constants.as_mut().and_then(|map| map.initial_value_mut()) {
            value[..4].copy_from_slice(&u32::from(udp).to_ne_bytes());
        }
        let root = open.load().map_err(refused)?;
        let table = SessionTable::map(map_of(&root, "vtl_sessions").as_fd(), places)?;
        let sessions = Arc::new(table);
        let order = Arc::new(Order::map(map_of(&root, "vtl_pump").as_fd())?);
        let loader = Arc::new(loader(&root)?);
        Ok(Self {
            root,
            sessions,
            order,
            grafts: BTreeMap::new(),
            loader,
            attached: BTreeMap::new(),
            direct: None,
            anchor: OnceLock::new(),
        })
    }

    /// Does ahead of time what the first pump for live frames would wait for: about 12 ms.
    ///
    /// # Errors
    /// See [`link::attach`].
    pub fn prepare_live(&self) -> Result<()> {
        self.anchor().map(drop)
    }

    /// What all pumps for live frames share.
    pub(crate) fn anchor(&self) -> Result<Arc<Anchor>> {
        if let Some(anchor) = self.anchor.get() {
            return Ok(Arc::clone(anchor));
        }
        let made = Anchor::drop_in(self.program("vtl_root_out_xdp"))?;
        Ok(Arc::clone(self.anchor.get_or_init(|| Arc::new(made))))
    }

    /// Attaches the root programs to an interface. Again for the same interface: nothing happens.
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

    /// Keeps what was attached by the [`Loader`].
    pub fn adopt(&mut self, attachment: Attachment) {
        self.attached.insert(attachment.interface.index, attachment);
    }

    /// Takes the root programs away from an interface.
    pub fn detach(&mut self, index: u32) {
        self.attached.remove(&index);
    }

    /// Attaches what lets aware applications run their own egress to the loopback.
    ///
    /// # Errors
    /// See [`link::attach`].
    pub fn attach_direct(&mut self) -> Result<()> {
        const LOOPBACK: u32 = 1;
        let program = self.program("vtl_root_direct");
        self.direct = Some(link::attach(program, LOOPBACK, Hook::TcxEgress)?);
        Ok(())
    }

    /// Whether that was done.
    pub fn has_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// The interfaces with root programs, by index.
    pub fn attached(&self) -> &BTreeMap<u32, Attachment> {
        &self.attached
    }

    /// What does the work of [`DataPlane::deploy`] and [`DataPlane::attach`] on other threads.
    pub fn loader(&self) -> &Arc<Loader> {
        &self.loader
    }

    /// Loads a graft's object into the kernel and makes it reachable under its gid. The same graft
    /// again replaces the programs without losing a packet.
    ///
    /// # Errors
    /// [`Error::BadGraft`] if the object does not describe a graft, [`Error::GidTaken`],
    /// [`Error::Load`] with the verifier's refusal. Running grafts are not touched then.
    pub fn deploy(&mut self, image: &[u8]) -> Result<GraftInfo> {
        self.deploy_timed(image).map(|(info, _)| info)
    }

    /// As [`DataPlane::deploy`]; says also where the time went.
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

    /// The second half of [`DataPlane::deploy`]: what was loaded takes its place.
    ///
    /// # Errors
    /// [`Error::GidTaken`]; [`Error::Load`] if the kernel has no memory for it.
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
            let key = u32::from(info.gid) * stride + slot;
            let program = program.as_raw_fd().to_ne_bytes();
            map_of(&self.root, array)
                .update(&key.to_ne_bytes(), &program, MapFlags::ANY)
                .map_err(|e| Error::load(format!("graft \"{}\"", info.name), e))?;
        }
        self.grafts.insert(info.gid, graft);
        Ok(info)
    }

    /// Takes a graft out of the kernel.
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
            // A slot that is empty already is as good.
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

    /// What tells egress which sessions to work on.
    pub fn pump_order(&self) -> &Arc<Order> {
        &self.order
    }

    /// One of the root object's maps, as a handle of its own.
    ///
    /// # Errors
    /// [`Error::Load`] if its descriptor cannot be duplicated.
    pub fn map_handle(&self, name: &str) -> Result<MapHandle> {
        MapHandle::try_from(&map_of(&self.root, name))
            .map_err(|e| Error::load(format!("map {name}"), e))
    }

    /// A root program, for the egress drivers and for test runs.
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

/// Duplicates of what loading and attaching need.
fn loader(root: &Object) -> Result<Loader> {
    let copy = |fd: BorrowedFd<'_>| {
        fd.try_clone_to_owned().map_err(|source| Error::System {
            what: "duplicating the root programs' descriptors".into(),
            source,
        })
    };
    let one = |map: Map<'_>| Ok((map.name().to_owned(), copy(map.as_fd())?));
    let [tc, xdp, out] = ROOT_PROGRAMS.map(|name| {
        copy(program_of(root, name).expect("the root object is built with this crate"))
    });
    Ok(Loader {
        maps: root.maps().map(one).collect::<Result<_>>()?,
        programs: [tc?, xdp?, out?],
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
