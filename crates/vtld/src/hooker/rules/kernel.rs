//! Loads and controls `bpf/rules.bpf.c`.

use std::{
    fs::File,
    net::Ipv6Addr,
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, Object, ProgramInput};

use super::super::{
    abi::{self, VTL_LEVELS, bytes_of, vtl_hook_config, vtl_identity, vtl_step, wide},
    bpf::{self, Attached, Programs},
    error::HookerError,
};
use crate::addresses;

/// Programs that match the connects of all processes.
const MATCH: [&str; 2] = ["vtl_rule4", "vtl_rule6"];
const IDENTIFY: &str = "vtl_identify";
/// Maps shared with the Hooker's other programs.
const SHARED: [&str; 8] = [
    "vtl_captured",
    "vtl_exes",
    "vtl_policies",
    "vtl_locals",
    "vtl_plain",
    "vtl_near",
    "vtl_own",
    "vtl_beat",
];

/// The loaded programs and their maps.
pub(super) struct Kernel {
    object: Object,
    rules: MapHandle,
    matched: MapHandle,
    addresses: MapHandle,
    links: Vec<Attached>,
    /// Depth of the hierarchy's root, as this process sees it, below the topmost cgroup.
    level: u32,
    /// Why programs cannot see a task's executable, if so.
    blind: Option<String>,
}

impl Kernel {
    /// Loads the programs. `root`: the topmost cgroup visible here.
    pub(super) fn load(
        config: &vtl_hook_config,
        hooker: &Programs,
        root: &Path,
    ) -> Result<Self, HookerError> {
        let mut config = vtl_hook_config {
            sees_exe: 1,
            ..*config
        };
        let mut blind = None;
        let object = match load(&config, hooker) {
            Ok(object) => object,
            Err(error) => {
                blind = Some(error.to_string());
                config.sees_exe = 0;
                load(&config, hooker)?
            }
        };
        let map = |name| bpf::map(&object, name);
        let mut kernel = Self {
            rules: map("vtl_rules")?,
            matched: map("vtl_matched")?,
            addresses: map("vtl_addresses")?,
            object,
            links: Vec::new(),
            level: 0,
            blind,
        };
        let group = root.metadata().map_or(0, |m| m.ino());
        let own = File::open("/proc/self/exe");
        if let Some(known) = own.ok().and_then(|own| kernel.ask(&own, group)) {
            if known.level != VTL_LEVELS {
                kernel.level = known.level;
            }
            if kernel.blind.is_none() && (known.id == 0 || known.id != known.own) {
                kernel.blind = Some("it does not show its programs what a task executes".into());
            }
        } else if kernel.blind.is_none() {
            kernel.blind = Some("it does not run the program that identifies a file".into());
        }
        kernel.learn_addresses()?;
        Ok(kernel)
    }

    /// Depth of the hierarchy's root below the topmost cgroup.
    pub(super) fn level(&self) -> u32 {
        self.level
    }

    /// Checks that connections can be matched by executable; the error says why not.
    pub(super) fn sees_exe(&self) -> Result<(), &str> {
        self.blind.as_deref().map_or(Ok(()), Err)
    }

    /// Identifies a file as the programs do, by inode number and device.
    pub(super) fn identify(&self, file: &File) -> Option<(u64, u32)> {
        let known = self.ask(file, 0)?;
        (known.id != 0).then_some((known.id, known.dev))
    }

    fn ask(&self, file: &File, group: u64) -> Option<vtl_identity> {
        let question = vtl_identity {
            group,
            fd: file.as_raw_fd() as u32,
            ..Default::default()
        };
        let mut bytes = bytes_of(&question).to_vec();
        let input = ProgramInput {
            context_in: Some(&mut bytes),
            ..Default::default()
        };
        let mut programs = self.object.progs_mut();
        let program = programs.find(|program| program.name() == IDENTIFY)?;
        program.test_run(input).ok()?;
        abi::from_bytes(&bytes)
    }

    /// Replaces the table atomically. Running programs finish with the former one, before this returns.
    pub(super) fn replace(&self, steps: &[vtl_step]) -> Result<(), HookerError> {
        let failed = |source| HookerError::Map {
            map: "vtl_rules",
            source,
        };
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as _,
            map_flags: libbpf_sys::BPF_F_INNER_MAP,
            ..Default::default()
        };
        let size = size_of::<vtl_step>() as u32;
        let count = steps.len() as u32;
        let table = MapHandle::create(MapType::Array, Some("vtl_table"), 4, size, count, &options)
            .map_err(failed)?;
        let keys: Vec<u8> = (0..count).flat_map(u32::to_ne_bytes).collect();
        let values: Vec<u8> = steps.iter().flat_map(bytes_of).copied().collect();
        table
            .update_batch(&keys, &values, count, MapFlags::ANY, MapFlags::ANY)
            .map_err(failed)?;
        let table = table.as_fd().as_raw_fd().to_ne_bytes();
        let first = 0_u32.to_ne_bytes();
        self.rules
            .update(&first, &table, MapFlags::ANY)
            .map_err(failed)
    }

    /// Attaches to the connects of all processes, after the programs that are attached already.
    pub(super) fn attach(&mut self, root: &Path) -> Result<(), HookerError> {
        let group = File::open(root).map_err(|source| HookerError::Cgroup {
            path: root.to_owned(),
            source,
        })?;
        // The former links are detached after the new ones are attached.
        self.links = MATCH
            .into_iter()
            .map(|name| bpf::attach_cgroup(&self.object, name, root, &group))
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    pub(super) fn is_attached(&self) -> bool {
        !self.links.is_empty()
    }

    pub(super) fn detach(&mut self) {
        self.links.clear();
    }

    /// Connections counted at an index.
    pub(super) fn matched(&self, place: u32) -> u64 {
        let count = self.matched.lookup(&place.to_ne_bytes(), MapFlags::ANY);
        let count = count.ok().flatten().and_then(|bytes| bytes.try_into().ok());
        count.map_or(0, u64::from_ne_bytes)
    }

    /// Resets a counter.
    pub(super) fn forget(&self, place: u32) -> Result<(), HookerError> {
        let zero = 0_u64.to_ne_bytes();
        let result = self
            .matched
            .update(&place.to_ne_bytes(), &zero, MapFlags::ANY);
        result.map_err(|source| HookerError::Map {
            map: "vtl_matched",
            source,
        })
    }

    /// Updates the map of the host's own addresses.
    pub(super) fn learn_addresses(&self) -> Result<(), HookerError> {
        let failed = |source| HookerError::Map {
            map: "vtl_addresses",
            source,
        };
        let own = own_addresses()?;
        for address in &own {
            let key = address.octets();
            self.addresses
                .update(&key, &[1], MapFlags::ANY)
                .map_err(failed)?;
        }
        let gone: Vec<_> = self
            .addresses
            .keys()
            .filter(|key| {
                let octets = <[u8; 16]>::try_from(key.as_slice());
                octets.is_ok_and(|octets| !own.contains(&octets.into()))
            })
            .collect();
        for key in gone {
            self.addresses.delete(&key).map_err(failed)?;
        }
        Ok(())
    }
}

/// The host's own addresses.
pub(super) fn own_addresses() -> Result<Vec<Ipv6Addr>, HookerError> {
    let all = addresses::own().map_err(|errno| HookerError::Socket {
        what: "list the host's addresses",
        source: errno.into(),
    })?;
    Ok(all.into_iter().map(|own| wide(own.address)).collect())
}

fn load(config: &vtl_hook_config, hooker: &Programs) -> Result<Object, HookerError> {
    let shared: Vec<_> = SHARED
        .into_iter()
        .map(|name| Ok((name, hooker.map(name)?)))
        .collect::<Result<_, HookerError>>()?;
    bpf::load(vtl_bpf::objects::RULES, config, |open| {
        for mut map in open.maps_mut() {
            let theirs = shared.iter().find(|(name, _)| map.name() == *name);
            if let Some((_, theirs)) = theirs {
                map.reuse_fd(theirs.as_fd())?;
            }
        }
        Ok(())
    })
}
