//! The stock of rings. Installing one waits for an RCU grace period (15 ms), so rings are made
//! ahead of time and used again after their session.

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

/// Makes and keeps rings.
pub struct RingStock {
    directories: [MapHandle; 3],
    next: u32,
    free: Vec<RingSet>,
}

impl RingStock {
    /// An empty stock.
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

    /// Makes one more set of rings of `slots` packets and puts it into stock. About 50 ms.
    ///
    /// # Errors
    /// [`Error::Load`] if memory or directory entries are used up.
    ///
    /// # Panics
    /// If `slots` is not a power of two of at most `VTL_MAX_WINDOW`.
    pub fn make(&mut self, slots: u32) -> Result<()> {
        assert!(slots.is_power_of_two() && slots <= intf::VTL_MAX_WINDOW);
        if self.next >= intf::VTL_MAX_RINGS {
            return Err(Error::System {
                what: "all entries of the ring directories are in use".into(),
                source: std::io::ErrorKind::StorageFull.into(),
            });
        }
        let slot = intf::VTL_SLOT_SIZE;
        let sent = size_of::<intf::vtl_sent>() as u32;
        let shared = libbpf_sys::BPF_F_MMAPABLE | libbpf_sys::BPF_F_INNER_MAP;
        let index = self.next;
        let set = RingSet {
            index,
            slots,
            transmit: array("vtl_tx_ring", slot, slots + 1, shared)?,
            receive: array("vtl_rx_ring", slot, slots + 1, shared)?,
            _scoreboard: array("vtl_scoreboard", sent, slots, libbpf_sys::BPF_F_INNER_MAP)?,
        };
        for (directory, map) in
            self.directories.iter().zip([&set.transmit, &set.receive, &set._scoreboard])
        {
            directory
                .update(
                    &index.to_ne_bytes(),
                    &map.as_fd().as_raw_fd().to_ne_bytes(),
                    MapFlags::ANY,
                )
                .map_err(|e| Error::load("a ring", e))?;
        }
        self.next += 1;
        self.free.push(set);
        Ok(())
    }

    /// A set of rings of at least `slots` packets, if there is one in stock.
    pub fn take(&mut self, slots: u32) -> Option<RingSet> {
        let at = self.free.iter().position(|set| set.slots >= slots)?;
        Some(self.free.swap_remove(at))
    }

    /// Puts a set back. The next session's application must not see what it holds: whoever used it
    /// has cleared it.
    pub fn put(&mut self, set: RingSet) {
        self.free.push(set);
    }

    /// Sets in stock.
    pub fn len(&self) -> usize {
        self.free.len()
    }

    /// Nothing in stock?
    pub fn is_empty(&self) -> bool {
        self.free.is_empty()
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
