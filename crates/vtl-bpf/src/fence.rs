//! Restricts VTL's sockets to the interfaces of `vtld --interface` (`bpf/fence.bpf.c`): packets that
//! arrive on others do not reach them.

use std::{
    collections::BTreeSet,
    fs::File,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder};
use nix::errno::Errno;

use crate::{Error, Result, objects, plane::program_of};

/// One of VTL's ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// `VTL_UDP_PORT`.
    Udp,
    /// `VTL_TCP_PORT`.
    Tcp,
}

/// The fence of the network namespace in which it was attached. Dropping it detaches it, except
/// from raw sockets.
pub struct Fence {
    object: Object,
    inside: MapHandle,
    links: Vec<OwnedFd>,
}

fn failed(source: libbpf_rs::Error) -> Error {
    Error::load("the programs of `vtld --interface`", source)
}

impl Fence {
    /// Loads the programs, with no interface inside.
    ///
    /// # Errors
    /// [`Error::Load`] if the kernel refuses.
    pub fn load() -> Result<Self> {
        let open = ObjectBuilder::default()
            .name("vtl_fence")
            .and_then(|builder| builder.open_memory(objects::FENCE));
        let object = open.and_then(|open| open.load()).map_err(failed)?;
        let inside = object.maps().find(|map| map.name() == "vtl_inside");
        let inside = inside.expect("it is built with this crate");
        let inside = MapHandle::try_from(&inside).map_err(failed)?;
        Ok(Self {
            object,
            inside,
            links: Vec::new(),
        })
    }

    /// Closes a port to packets that arrive on other interfaces of the calling thread's namespace:
    /// to them it looks unbound.
    ///
    /// # Errors
    /// [`Error::Load`] if the program cannot be attached.
    pub fn close_port(&mut self, port: Port) -> Result<()> {
        let name = match port {
            Port::Udp => "vtl_lookup_udp",
            Port::Tcp => "vtl_lookup_tcp",
        };
        let netns = File::open("/proc/thread-self/ns/net").map_err(|source| Error::System {
            what: "opening the network namespace".into(),
            source,
        })?;
        let mut programs = self.object.progs_mut();
        let program = programs.find(|program| program.name() == name);
        let program = program.expect("it is built with this crate");
        let link: Link = program.attach_netns(netns.as_raw_fd()).map_err(failed)?;
        let link = link.as_fd().try_clone_to_owned();
        self.links.push(link.map_err(|source| Error::System {
            what: "duplicating a link's descriptor".into(),
            source,
        })?);
        Ok(())
    }

    /// Filters a raw socket: from now on, and for good, it gets no packets that arrive on other
    /// interfaces.
    ///
    /// # Errors
    /// [`Error::System`] if the kernel refuses.
    pub fn filter(&self, socket: &impl AsFd) -> Result<()> {
        let program = program_of(&self.object, "vtl_filter").expect("it is built with this crate");
        let program = program.as_raw_fd();
        // SAFETY: the value and its size, both alive during the call.
        let result = unsafe {
            libc::setsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_BPF,
                (&raw const program).cast(),
                size_of_val(&program) as libc::socklen_t,
            )
        };
        Errno::result(result).map_err(|errno| Error::System {
            what: "attaching the interface filter to a raw socket".into(),
            source: errno.into(),
        })?;
        Ok(())
    }

    /// Sets the interfaces inside; all others are outside.
    ///
    /// # Errors
    /// [`Error::Load`] if there are too many (`INSIDE_MAX` in fence.bpf.c); interfaces no longer inside are removed nevertheless.
    pub fn set(&self, inside: &BTreeSet<u32>) -> Result<()> {
        let known = self.inside.keys().filter_map(|key| key.try_into().ok());
        let known: BTreeSet<u32> = known.map(u32::from_ne_bytes).collect();
        for index in known.difference(inside) {
            // Fails if it is absent already.
            let _ = self.inside.delete(&index.to_ne_bytes());
        }
        for index in inside.difference(&known) {
            let added = self
                .inside
                .update(&index.to_ne_bytes(), &[1], MapFlags::ANY);
            added.map_err(failed)?;
        }
        Ok(())
    }
}
