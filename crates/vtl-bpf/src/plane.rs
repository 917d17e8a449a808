//! The root programs with their maps, and the grafts behind them.

use std::{
    cmp::Reverse,
    collections::BTreeMap,
    ffi::OsString,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
    thread,
};

use libbpf_rs::{Map, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, OpenObject};
use vtl_proto::intf::{self, vtl_graft_info, vtl_param_info};

use crate::{
    Error, Result,
    link::{self, Hook},
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

/// What a graft says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GraftInfo {
    /// Its name.
    pub name: String,
    /// The id that its packets carry.
    pub gid: u16,
    /// Bits of `VTL_S_*`.
    pub services: u16,
    /// Of two that provide what is asked for, the one with the higher rank is taken.
    pub rank: u32,
    /// A sentence.
    pub summary: String,
    /// Its parameters, in the order of `vtl_session.param`.
    pub params: Vec<ParamInfo>,
    /// Bytes of its object.
    pub size: usize,
    /// eBPF instructions over all its programs; 0 before it is deployed.
    pub instructions: usize,
}

/// A parameter of a graft.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Its name.
    pub name: String,
    /// What its value counts; empty for a bare number.
    pub unit: String,
    /// The default.
    pub initial: u32,
    /// Lowest value.
    pub least: u32,
    /// Highest value.
    pub most: u32,
}

struct Deployed {
    info: GraftInfo,
    /// Keeps them alive.
    _programs: Vec<Loaded>,
}

/// A program in the kernel.
struct Loaded {
    name: OsString,
    fd: OwnedFd,
    instructions: usize,
}

/// Threads that load one graft. Nearly all the time is the verifier's, which works on several
/// programs at once.
const LOADERS: usize = 4;

/// The loaded data plane of one network namespace.
pub struct DataPlane {
    root: Object,
    sessions: Arc<SessionTable>,
    order: Arc<Order>,
    grafts: BTreeMap<u16, Deployed>,
    attached: BTreeMap<u32, Vec<OwnedFd>>,
    anchor: OnceLock<Arc<Anchor>>,
}

const SLOT_PROGRAMS: [(&str, &str, u32, u32); 7] = [
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
    /// Loads the root programs and creates the maps. Attaches nothing.
    ///
    /// # Errors
    /// [`Error::Load`] if the kernel refuses, [`Error::System`] if the table cannot be mapped.
    pub fn load() -> Result<Self> {
        let root = ObjectBuilder::default()
            .name("vtl_root")
            .and_then(|b| b.open_memory(objects::ROOT))
            .and_then(|o| o.load())
            .map_err(|e| Error::load("the root programs", e))?;
        let sessions = Arc::new(SessionTable::map(map_of(&root, "vtl_sessions").as_fd())?);
        let order = Arc::new(Order::map(map_of(&root, "vtl_pump").as_fd())?);
        Ok(Self {
            root,
            sessions,
            order,
            grafts: BTreeMap::new(),
            attached: BTreeMap::new(),
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
        let (program, hook) = match ingress {
            Ingress::Tcx => ("vtl_root_in_tc", Hook::TcxIngress),
            Ingress::Xdp => ("vtl_root_in_xdp", Hook::XdpNative),
        };
        let links = vec![
            link::attach(self.program(program), interface.index, hook)?,
            link::attach(
                self.program("vtl_root_out_tc"),
                interface.index,
                Hook::TcxEgress,
            )?,
        ];
        self.attached.insert(interface.index, links);
        Ok(())
    }

    /// Attaches what lets aware applications run their own egress to the loopback.
    ///
    /// # Errors
    /// See [`link::attach`].
    pub fn attach_direct(&mut self) -> Result<()> {
        const LOOPBACK: u32 = 1;
        let program = self.program("vtl_root_direct");
        let link = link::attach(program, LOOPBACK, Hook::TcxEgress)?;
        self.attached.entry(LOOPBACK).or_default().push(link);
        Ok(())
    }

    /// Indexes of the interfaces with root programs.
    pub fn attached(&self) -> impl Iterator<Item = u32> + '_ {
        self.attached.keys().copied()
    }

    /// Loads a graft's object into the kernel and makes it reachable under its gid. The same graft
    /// again replaces the programs without losing a packet.
    ///
    /// # Errors
    /// [`Error::BadGraft`] if the object does not describe a graft, [`Error::GidTaken`],
    /// [`Error::Load`] with the verifier's refusal. Running grafts are not touched then.
    pub fn deploy(&mut self, image: &[u8]) -> Result<GraftInfo> {
        let mut info = describe(image)?;
        if let Some(other) = self.grafts.get(&info.gid)
            && other.info.name != info.name
        {
            return Err(Error::GidTaken {
                gid: info.gid,
                name: other.info.name.clone(),
            });
        }
        let what = format!("graft \"{}\"", info.name);
        let programs = self
            .load_programs(image)
            .map_err(|e| Error::load(&what, e))?;
        info.instructions = programs.iter().map(|p| p.instructions).sum();
        for (program, array, stride, slot) in SLOT_PROGRAMS {
            let loaded = programs
                .iter()
                .find(|p| p.name == program)
                .ok_or_else(|| Error::BadGraft(format!("{what} has no program {program}")))?;
            let key = u32::from(info.gid) * stride + slot;
            map_of(&self.root, array)
                .update(
                    &key.to_ne_bytes(),
                    &loaded.fd.as_raw_fd().to_ne_bytes(),
                    MapFlags::ANY,
                )
                .map_err(|e| Error::load(&what, e))?;
        }
        self.grafts.insert(
            info.gid,
            Deployed {
                info: info.clone(),
                _programs: programs,
            },
        );
        Ok(info)
    }

    /// Has an object use the maps that the root programs made.
    pub(crate) fn share_maps(&self, open: &mut OpenObject) -> libbpf_rs::Result<()> {
        share_maps(open, &self.maps())
    }

    fn maps(&self) -> SharedMaps<'_> {
        let one = |map: Map<'_>| {
            let fd = map.as_fd().as_raw_fd();
            // SAFETY: the root object owns the map, whose descriptor stays open as long as it lives.
            (map.name().to_owned(), unsafe { BorrowedFd::borrow_raw(fd) })
        };
        self.root.maps().map(one).collect()
    }

    /// Has the kernel verify and load all programs of an object, several at a time.
    fn load_programs(&self, image: &[u8]) -> libbpf_rs::Result<Vec<Loaded>> {
        let maps = self.maps();
        let open = ObjectBuilder::default().open_memory(image)?;
        let mut sizes: Vec<(usize, OsString)> = open
            .progs()
            .map(|p| (p.insn_cnt(), p.name().to_owned()))
            .collect();
        sizes.sort_by_key(|(size, _)| Reverse(*size));
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let mut shares = vec![(0, Vec::new()); processors.min(LOADERS)];
        for (size, name) in sizes {
            let share = shares.iter_mut().min_by_key(|(sum, _)| *sum);
            let (sum, names) = share.expect("there is a processor");
            *sum += size;
            names.push(name);
        }
        thread::scope(|scope| {
            let maps = &maps;
            let start =
                |(_, names): (usize, _)| scope.spawn(move || load_share(image, maps, names));
            let threads: Vec<_> = shares.into_iter().map(start).collect();
            let mut loaded = Vec::new();
            for thread in threads {
                loaded.extend(thread.join().expect("it returns its errors")?);
            }
            Ok(loaded)
        })
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

/// Maps by name.
type SharedMaps<'a> = Vec<(OsString, BorrowedFd<'a>)>;

fn share_maps(open: &mut OpenObject, maps: &SharedMaps<'_>) -> libbpf_rs::Result<()> {
    for mut map in open.maps_mut() {
        let name = map.name().to_owned();
        if let Some((_, shared)) = maps.iter().find(|(known, _)| *known == name) {
            map.reuse_fd(*shared)?;
        }
    }
    Ok(())
}

/// Loads some of an object's programs.
fn load_share(
    image: &[u8],
    maps: &SharedMaps<'_>,
    names: Vec<OsString>,
) -> libbpf_rs::Result<Vec<Loaded>> {
    let mut open = ObjectBuilder::default().open_memory(image)?;
    share_maps(&mut open, maps)?;
    for mut program in open.progs_mut() {
        let wanted = names.iter().any(|name| program.name() == name);
        program.set_autoload(wanted);
    }
    let object = open.load()?;
    let loaded = |name: OsString| {
        let program = object.progs().find(|p| p.name() == name);
        let program = program.expect("it was there when it was opened");
        let fd = program.as_fd().try_clone_to_owned()?;
        let instructions = program.insn_cnt();
        Ok(Loaded {
            name,
            fd,
            instructions,
        })
    };
    names.into_iter().map(loaded).collect()
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

/// Reads the description from a graft's `.vtl.graft` section without loading anything.
///
/// # Errors
/// [`Error::BadGraft`] if the object is not a graft of this interface version.
pub fn describe(image: &[u8]) -> Result<GraftInfo> {
    let bad = |why: &str| Error::BadGraft(format!("not a usable graft object: {why}"));
    let section = elf_section(image, ".vtl.graft").ok_or_else(|| bad("no .vtl.graft section"))?;
    let abi_at = std::mem::offset_of!(vtl_graft_info, version);
    let abi = section
        .get(abi_at..abi_at + 4)
        .and_then(|b| b.try_into().ok());
    let abi = abi
        .map(u32::from_le_bytes)
        .ok_or_else(|| bad("its .vtl.graft section is too short"))?;
    if abi != intf::VTL_GRAFT_ABI {
        return Err(bad(&format!(
            "built for interface version {abi}, this is {}",
            intf::VTL_GRAFT_ABI
        )));
    }
    if section.len() < size_of::<vtl_graft_info>() {
        return Err(bad("its .vtl.graft section is too short"));
    }
    // SAFETY: that many bytes are there, and every value of them is one of the structure.
    let info: vtl_graft_info =
        unsafe { section.as_ptr().cast::<vtl_graft_info>().read_unaligned() };
    if info.gid == 0 || info.gid >= intf::VTL_MAX_GRAFTS {
        return Err(bad(&format!(
            "gid {} is not within 1..{}",
            info.gid,
            intf::VTL_MAX_GRAFTS - 1
        )));
    }
    let name = text(&info.name)
        .filter(|name| is_name(name))
        .ok_or_else(|| {
            bad("its name is empty or has other characters than letters, digits and -")
        })?;
    let params = info.param.get(..info.params as usize);
    let params = params.ok_or_else(|| bad("it has more parameters than there is room for"))?;
    let params = params
        .iter()
        .map(|p| param(p).ok_or_else(|| bad("a parameter of it makes no sense")));
    Ok(GraftInfo {
        name,
        gid: info.gid as u16,
        services: info.services as u16,
        rank: info.rank,
        summary: text(&info.summary).ok_or_else(|| bad("its summary is not text"))?,
        params: params.collect::<Result<_>>()?,
        size: image.len(),
        instructions: 0,
    })
}

fn param(p: &vtl_param_info) -> Option<ParamInfo> {
    let name = text(&p.name).filter(|name| is_name(name))?;
    let fits = (p.least..=p.most).contains(&p.initial);
    fits.then_some(ParamInfo {
        name,
        unit: text(&p.unit)?,
        initial: p.initial,
        least: p.least,
        most: p.most,
    })
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// Text that ends with a zero byte; `None` if it does not, or holds control characters.
fn text(bytes: &[std::ffi::c_char]) -> Option<String> {
    let bytes: Vec<u8> = bytes.iter().map(|c| *c as u8).collect();
    let text = std::ffi::CStr::from_bytes_until_nul(&bytes).ok()?;
    let text = text.to_str().ok()?;
    (!text.chars().any(char::is_control)).then(|| text.to_owned())
}

/// The bytes of a section of a 64-bit little-endian ELF file.
fn elf_section<'a>(image: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let u64_at = |at: usize| Some(u64::from_le_bytes(image.get(at..at + 8)?.try_into().ok()?));
    let u32_at = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?));
    let u16_at = |at: usize| Some(u16::from_le_bytes(image.get(at..at + 2)?.try_into().ok()?));
    if image.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let table = usize::try_from(u64_at(40)?).ok()?;
    let size = usize::from(u16_at(58)?);
    let count = usize::from(u16_at(60)?);
    let header = |i: usize| table.checked_add(i.checked_mul(size)?);
    let bytes = |at: usize| -> Option<&'a [u8]> {
        let start = usize::try_from(u64_at(at + 24)?).ok()?;
        let length = usize::try_from(u64_at(at + 32)?).ok()?;
        image.get(start..start.checked_add(length)?)
    };
    let names = bytes(header(usize::from(u16_at(62)?))?)?;
    (0..count).find_map(|i| {
        let at = header(i)?;
        let own = names
            .get(u32_at(at)? as usize..)?
            .split(|b| *b == 0)
            .next()?;
        if own == name.as_bytes() {
            bytes(at)
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn describe__built_in_grafts_match_their_names() {
        for (name, image) in objects::GRAFTS {
            let info = describe(image).unwrap();
            assert_eq!(&info.name, name);
        }
    }

    #[test]
    fn describe__refuses_what_is_no_graft() {
        assert!(describe(b"").is_err());
        assert!(describe(b"\x7fELF\x02\x01").is_err());
        assert!(describe(objects::ROOT).is_err());
        let (_, image) = objects::GRAFTS[0];
        for cut in (0..image.len()).step_by(997) {
            // Must not panic; a prefix may or may not still hold the section.
            let _ = describe(&image[..cut]);
        }
    }
}
