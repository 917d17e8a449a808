//! Rings. Installing one waits for an RCU grace period (15 ms), so the
//! daemon makes them ahead of time and uses them again after their session.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use vtl_proto::intf;

use crate::{Error, Result, plane::DataPlane};

/// The rings of one session: installed in the directories under `index`.
pub struct RingSet {
    /// Entry of the ring directories.
    pub index: u32,
    /// Packets that each ring holds, a power of two.
    pub slots: u32,
    transmit: MapHandle,
    receive: MapHandle,
    _scoreboard: MapHandle,
}

impl RingSet {
    /// Descriptor of the transmit ring, for mapping.
    pub fn transmit(&self) -> BorrowedFd<'_> {
        self.transmit.as_fd()
    }

    /// Descriptor of the receive ring, for mapping.
    pub fn receive(&self) -> BorrowedFd<'_> {
        self.receive.as_fd()
    }
}

/// Makes rings.
pub struct RingMaker {
    directories: [MapHandle; 3],
    /// Entries from here on were never used.
    next: u32,
    /// Entries below that are free again.
    free: Vec<u32>,
}

impl RingMaker {
    /// Prepares to make rings.
    ///
    /// # Errors
    /// [`Error::Load`] if the directories' descriptors cannot be duplicated.
    pub fn new(plane: &DataPlane) -> Result<Self> {
        Ok(Self {
            directories: [
                plane.map_handle("vtl_tx_rings")?,
                plane.map_handle("vtl_rx_rings")?,
                plane.map_handle("vtl_scoreboards")?,
            ],
            next: 0,
            free: Vec::new(),
        })
    }

    /// Makes one more set of rings of `slots` packets. About 50 ms.
    ///
    /// # Errors
    /// [`Error::Load`] if memory or directory entries are used up.
    ///
    /// # Panics
    /// If `slots` is not a power of two of at most `VTL_MAX_WINDOW`.
    pub fn make(&mut self, slots: u32) -> Result<RingSet> {
        assert!(slots.is_power_of_two() && slots <= intf::VTL_MAX_WINDOW);
        let index = self.free.last().copied().unwrap_or(self.next);
        if index >= intf::VTL_MAX_RINGS {
            return Err(Error::System {
                what: "all entries of the ring directories are in use".into(),
                source: std::io::ErrorKind::StorageFull.into(),
            });
        }
        let slot = intf::VTL_SLOT_SIZE;
        let sent = size_of::<intf::vtl_sent>() as u32;
        let shared = libbpf_sys::BPF_F_MMAPABLE | libbpf_sys::BPF_F_INNER_MAP;
        let set = RingSet {
            index,
            slots,
            transmit: array("vtl_tx_ring", slot, slots + 1, shared)?,
            receive: array("vtl_rx_ring", slot, slots + 1, shared)?,
            _scoreboard: array("vtl_scoreboard", sent, slots, libbpf_sys::BPF_F_INNER_MAP)?,
        };
        for (directory, map) in
            self.directories
                .iter()
                .zip([&set.transmit, &set.receive, &set._scoreboard])
        {
            directory
                .update(
                    &index.to_ne_bytes(),
                    &map.as_fd().as_raw_fd().to_ne_bytes(),
                    MapFlags::ANY,
                )
                .map_err(|e| Error::load("a ring", e))?;
        }
        if self.free.pop().is_none() {
            self.next += 1;
        }
        Ok(set)
    }

    /// Takes a set out of the directories for good. Whoever has it mapped keeps its memory, and
    /// sees nothing new there. No program may be at work on it.
    ///
    /// # Errors
    /// [`Error::Load`] if the directories cannot be changed; the entry is then lost.
    #[allow(clippy::needless_pass_by_value)] // it ends here
    pub fn retire(&mut self, set: RingSet) -> Result<()> {
        for directory in &self.directories {
            directory
                .delete(&set.index.to_ne_bytes())
                .map_err(|e| Error::load("the end of a ring", e))?;
        }
        self.free.push(set.index);
        Ok(())
    }
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
