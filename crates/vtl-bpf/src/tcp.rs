//! VTL's own TCP congestion controls: struct_ops objects (`bpf/tcp/`), registered with the kernel
//! at run time as long as a descriptor is open. Connections that use one keep it until they end,
//! even after it is unregistered.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
};

use libbpf_rs::{MapCore, MapType, ObjectBuilder, OpenObject};

use crate::{Error, Result, objects};

/// Prefix of the kernel's names of VTL's congestion controls: they cannot collide with the kernel's
/// own.
pub const PREFIX: &str = "vtl_";

/// Maximum number of daemons that register the same one: each needs its own name.
const MAX_NUMBER: usize = 99;
/// The kernel's limit for names, with the terminating 0.
const NAME_MAX: usize = 16;

/// VTL's congestion controls.
pub fn names() -> impl Iterator<Item = &'static str> {
    objects::TCP.iter().map(|(name, _)| *name)
}

/// Whether this is one of [`names`].
pub fn is_known(name: &str) -> bool {
    names().any(|known| known == name)
}

/// Whether the congestion control with this name, one of the kernel's or [`Control::name`], needs
/// ECN.
pub fn needs_ecn(name: &str) -> bool {
    name.strip_prefix(PREFIX)
        .unwrap_or(name)
        .starts_with("dctcp")
}

/// All congestion controls in the kernel now, those of VTL's daemons included. Empty if the list is
/// unreadable.
pub fn of_kernel() -> Vec<String> {
    let path = "/proc/sys/net/ipv4/tcp_available_congestion_control";
    let listed = fs::read_to_string(path).unwrap_or_default();
    listed.split_whitespace().map(str::to_owned).collect()
}

/// A registered congestion control of VTL's; dropping it, or the end of the process, unregisters
/// it.
#[derive(Debug)]
pub struct Control {
    name: String,
    _link: OwnedFd,
}

impl Control {
    /// Registers one of [`names`].
    ///
    /// # Errors
    /// The kernel rejects it, or 99 daemons have registered it.
    pub fn register(name: &str) -> Result<Self> {
        let found = objects::TCP.iter().find(|(known, _)| *known == name);
        let (_, image) = found.ok_or_else(|| Error::BadGraft(format!("there is no tcp:{name}")))?;
        let taken = of_kernel();
        for number in 1..=MAX_NUMBER {
            let kernel_name = match number {
                1 => format!("{PREFIX}{name}"),
                _ => format!("{PREFIX}{name}_{number}"),
            };
            if taken.contains(&kernel_name) {
                continue;
            }
            match register(image, &kernel_name) {
                // Another daemon was faster: try the next name.
                Err(error) if error.kind() == libbpf_rs::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(Error::load(format!("tcp:{name}"), source)),
                Ok(link) => {
                    return Ok(Self {
                        name: kernel_name,
                        _link: link,
                    });
                }
            }
        }
        Err(Error::System {
            what: format!("tcp:{name} is registered {MAX_NUMBER} times"),
            source: io::ErrorKind::AlreadyExists.into(),
        })
    }

    /// The kernel's name for it.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn register(image: &[u8], name: &str) -> libbpf_rs::Result<OwnedFd> {
    let mut object = ObjectBuilder::default().open_memory(image)?;
    set_name(&mut object, name)?;
    let mut object = object.load()?;
    let mut map = object
        .maps_mut()
        .find(|map| map.map_type() == MapType::StructOps)
        .ok_or_else(|| invalid("the object has no congestion control"))?;
    // The link holds the map, and the map the programs.
    let link = map.attach_struct_ops()?;
    Ok(link.as_fd().try_clone_to_owned()?)
}

/// Writes the name, which is at the start of the structure in `bpf/tcp/kernel.h`.
fn set_name(object: &mut OpenObject, name: &str) -> libbpf_rs::Result<()> {
    let mut map = object
        .maps_mut()
        .find(|map| map.map_type() == MapType::StructOps)
        .ok_or_else(|| invalid("the object has no congestion control"))?;
    let to = map
        .initial_value_mut()
        .and_then(|value| value.get_mut(..NAME_MAX))
        .filter(|_| name.len() < NAME_MAX)
        .ok_or_else(|| invalid("there is no place for the congestion control's name"))?;
    to.fill(0);
    to[..name.len()].copy_from_slice(name.as_bytes());
    Ok(())
}

fn invalid(what: &str) -> libbpf_rs::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names__leave_room_for_a_number() {
        for name in names() {
            let longest = format!("{PREFIX}{name}_{MAX_NUMBER}");
            assert!(longest.len() < NAME_MAX, "{longest}");
        }
    }

    #[test]
    fn needs_ecn__is_dctcp_alone() {
        for name in ["dctcp", "vtl_dctcp", "vtl_dctcp_2"] {
            assert!(needs_ecn(name));
        }
        for name in ["vtl_vegas", "cubic", "reno"] {
            assert!(!needs_ecn(name));
        }
    }
}
