//! Allocation of rings. Installing one waits for an RCU grace period (15 ms), so the daemon makes
//! them ahead of time and reuses them.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    thread,
};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use vtl_proto::intf;

use crate::{Error, Result, plane::DataPlane};

/// The rings of one session, installed in the directories under `index`.
pub struct RingSet {
    /// Entry of the ring directories.
    pub index: u32,
    /// Capacity of each ring, packets: a power of two.
    pub slots: u32,
    /// `None` once released.
    open: Option<Open>,
}

/// Descriptors of a set's maps, except the scoreboard's.
struct Open {
    transmit: MapHandle,
    receive: MapHandle,
    wake: Option<MapHandle>,
}

impl RingSet {
    fn open(&self) -> &Open {
        self.open.as_ref().expect("not released")
    }

    /// Descriptor of the transmit ring, for mapping.
    ///
    /// # Panics
    /// If the set was released.
    pub fn transmit(&self) -> BorrowedFd<'_> {
        self.open().transmit.as_fd()
    }

    /// Descriptor of the ring of events: readable when the application must be woken. Sets of fewer
    /// than [`MIN_SLOTS_WITH_EVENTS`] packets have none.
    ///
    /// # Panics
    /// If the set was released.
    pub fn wake(&self) -> Option<BorrowedFd<'_>> {
        self.open().wake.as_ref().map(AsFd::as_fd)
    }

    /// Descriptor of the receive ring, for mapping.
    ///
    /// # Panics
    /// If the set was released.
    pub fn receive(&self) -> BorrowedFd<'_> {
        self.open().receive.as_fd()
    }

    /// Closes the descriptors; the directories keep the rings.
    pub fn release(&mut self) {
        self.open = None;
    }
}

/// Packets of the smallest set with a ring of events, which takes as much memory as four packets.
/// Smaller sets are for hosts with very many sessions.
pub const MIN_SLOTS_WITH_EVENTS: u32 = 64;

/// Memory of a set of rings of `slots` packets, bytes: in pages, the kernel's overhead included.
pub const fn bytes(slots: u32) -> u64 {
    const PAGE: u64 = 4096;
    let events = if slots < MIN_SLOTS_WITH_EVENTS {
        0
    } else {
        // Two position pages and a page of the kernel's.
        3 * PAGE + intf::VTL_WAKE_BYTES as u64
    };
    let slots = slots as u64;
    // struct bpf_array before the mapped part.
    let ring = PAGE + ((slots + 1) * intf::VTL_SLOT_SIZE as u64).next_multiple_of(PAGE);
    let scoreboard = slots * size_of::<intf::vtl_sent>() as u64;
    2 * ring + scoreboard + events
}

/// The maps of a set.
struct Maps {
    /// Transmit ring, receive ring and scoreboard.
    arrays: [MapHandle; 3],
    events: Option<MapHandle>,
}

/// Makes and installs sets of rings.
pub struct RingMaker {
    directories: [MapHandle; 4],
    /// Placeholders in the directories, for entries without rings or without a ring of events.
    nothing: [MapHandle; 4],
    /// First entry never used so far.
    next: u32,
    /// Entries of a directory.
    entries: u32,
    /// Entries below `next` that are free again.
    free: Vec<u32>,
}

/// Makes the arrays of a set of `slots` packets.
fn arrays(slots: u32) -> Result<[MapHandle; 3]> {
    let slot = intf::VTL_SLOT_SIZE;
    let sent = size_of::<intf::vtl_sent>() as u32;
    let shared = libbpf_sys::BPF_F_MMAPABLE | libbpf_sys::BPF_F_INNER_MAP;
    Ok([
        array("vtl_tx_ring", slot, slots + 1, shared)?,
        array("vtl_rx_ring", slot, slots + 1, shared)?,
        array("vtl_scoreboard", sent, slots, libbpf_sys::BPF_F_INNER_MAP)?,
    ])
}

/// Makes all maps of a set of `slots` packets.
fn maps(slots: u32) -> Result<Maps> {
    let own = slots >= MIN_SLOTS_WITH_EVENTS;
    Ok(Maps {
        arrays: arrays(slots)?,
        events: own.then(ring_of_events).transpose()?,
    })
}

impl RingMaker {
    /// Prepares the placeholders.
    ///
    /// # Errors
    /// [`Error::Load`] if the directories' descriptors cannot be duplicated.
    pub fn new(plane: &DataPlane) -> Result<Self> {
        let directories = [
            plane.map_handle("vtl_tx_rings")?,
            plane.map_handle("vtl_rx_rings")?,
            plane.map_handle("vtl_scoreboards")?,
            plane.map_handle("vtl_wakes")?,
        ];
        let [transmit, receive, scoreboard] = arrays(1)?;
        Ok(Self {
            entries: directories[0].max_entries(),
            directories,
            nothing: [transmit, receive, scoreboard, ring_of_events()?],
            next: 0,
            free: Vec::new(),
        })
    }

    /// Makes sets of rings, one per element of `slots`: its capacity in packets. Takes about 20 ms,
    /// and little more for many sets. May make fewer than requested, if memory or directory entries
    /// run out.
    ///
    /// # Errors
    /// [`Error::Load`] if not even one can be made.
    ///
    /// # Panics
    /// If a number of slots is not a power of two of at most `VTL_MAX_WINDOW`.
    pub fn make(&mut self, slots: &[u32]) -> Result<Vec<RingSet>> {
        let mut made = Vec::with_capacity(slots.len());
        for &slots in slots {
            assert!(slots.is_power_of_two() && slots <= intf::VTL_MAX_WINDOW);
            let set = self.entry().and_then(|index| {
                let maps = maps(slots).inspect_err(|_| self.free.push(index))?;
                Ok((index, slots, maps))
            });
            match set {
                Ok(set) => made.push(set),
                Err(error) if made.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        let none = &self.nothing[3];
        let entries: Vec<_> = made
            .iter()
            .map(|(index, _, maps)| {
                let [transmit, receive, scoreboard] = &maps.arrays;
                let events = maps.events.as_ref().unwrap_or(none);
                (*index, [transmit, receive, scoreboard, events])
            })
            .collect();
        if let Err(error) = install(&self.directories, &entries) {
            self.free.extend(made.iter().map(|(index, ..)| *index));
            return Err(error);
        }
        let set = |(index, slots, maps): (u32, u32, Maps)| {
            let [transmit, receive, _] = maps.arrays;
            RingSet {
                index,
                slots,
                open: Some(Open {
                    transmit,
                    receive,
                    wake: maps.events,
                }),
            }
        };
        Ok(made.into_iter().map(set).collect())
    }

    /// Allocates an entry of the directories.
    fn entry(&mut self) -> Result<u32> {
        if let Some(index) = self.free.pop() {
            return Ok(index);
        }
        if self.next >= self.entries {
            return Err(Error::System {
                what: "all entries of the ring directories are in use".into(),
                source: std::io::ErrorKind::StorageFull.into(),
            });
        }
        self.next += 1;
        Ok(self.next - 1)
    }

    /// Removes sets from the directories for good. Processes that have them mapped keep the memory,
    /// and see no new data. No program may use them.
    ///
    /// # Errors
    /// [`Error::Load`] if the directories cannot be changed; the entries are then leaked.
    #[allow(clippy::needless_pass_by_value)] // they end here
    pub fn retire(&mut self, sets: Vec<RingSet>) -> Result<()> {
        let [transmit, receive, scoreboard, wake] = &self.nothing;
        let entries: Vec<_> = sets
            .iter()
            .map(|set| (set.index, [transmit, receive, scoreboard, wake]))
            .collect();
        install(&self.directories, &entries)?;
        self.free.extend(sets.iter().map(|s| s.index));
        Ok(())
    }
}

/// Installs maps in the directories. Each directory's batch call waits for one RCU grace period,
/// however many entries change; all four wait in parallel.
fn install(directories: &[MapHandle; 4], entries: &[(u32, [&MapHandle; 4])]) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let keys: Vec<u8> = entries.iter().flat_map(|(i, _)| i.to_ne_bytes()).collect();
    let update = |at: usize| {
        let values: Vec<u8> = entries
            .iter()
            .flat_map(|(_, maps)| maps[at].as_fd().as_raw_fd().to_ne_bytes())
            .collect();
        let count = entries.len() as u32;
        directories[at]
            .update_batch(&keys, &values, count, MapFlags::ANY, MapFlags::ANY)
            .map_err(|e| Error::load("rings", e))
    };
    thread::scope(|scope| {
        let update = &update;
        let updates = [0, 1, 2, 3].map(|at| scope.spawn(move || update(at)));
        updates
            .map(|update| update.join().expect("it does not panic"))
            .into_iter()
            .collect()
    })
}

/// Makes the rings of events of the shards, and installs them in the directory `vtl_events`.
pub(crate) fn of_events(directory: &impl MapCore, shards: u32) -> Result<Vec<MapHandle>> {
    let made = (0..shards).map(|_| ringbuf("vtl_events", intf::VTL_EVENTS_BYTES));
    let made = made.collect::<Result<Vec<_>>>()?;
    let keys: Vec<u8> = (0..shards).flat_map(u32::to_ne_bytes).collect();
    let descriptor = |map: &MapHandle| map.as_fd().as_raw_fd().to_ne_bytes();
    let values: Vec<u8> = made.iter().flat_map(descriptor).collect();
    directory
        .update_batch(&keys, &values, shards, MapFlags::ANY, MapFlags::ANY)
        .map_err(|e| Error::load("rings of events", e))?;
    Ok(made)
}

fn ring_of_events() -> Result<MapHandle> {
    ringbuf("vtl_wake", intf::VTL_WAKE_BYTES)
}

fn ringbuf(name: &str, bytes: u32) -> Result<MapHandle> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
        ..Default::default()
    };
    MapHandle::create(MapType::RingBuf, Some(name), 0, 0, bytes, &options)
        .map_err(|e| Error::load("a ring of events", e))
}

fn array(name: &str, value: u32, entries: u32, flags: u32) -> Result<MapHandle> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
        map_flags: flags,
        ..Default::default()
    };
    MapHandle::create(MapType::Array, Some(name), 4, value, entries, &options)
        .map_err(|e| Error::load(format!("a ring of {entries} slots"), e))
}
