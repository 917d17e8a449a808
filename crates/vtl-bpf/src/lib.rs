//! The data plane in the kernel, over libbpf: loads, attaches and replaces VTL's eBPF programs.
//!
//! - [`admit`]: the allow list for a graft's object;
//! - [`anchor`]: the attachment of live-frame programs;
//! - [`check`]: the verifier's result for a graft;
//! - [`cost`]: a graft's cost per packet;
//! - [`flags`]: compiler flags of programs;
//! - [`plane`]: the root programs with their maps, and the grafts that they call;
//! - [`load`]: loads a graft's programs, and times each step;
//! - [`sessions`]: the table of sessions, shared with the kernel;
//! - [`rings`]: makes the rings of sessions;
//! - [`shard`]: the part of one thread that sends;
//! - [`pump`]: the egress drivers;
//! - [`fence`]: restricts VTL's sockets to some interfaces;
//! - [`link`]: attachments that end with the process;
//! - [`netdev`]: capabilities of network interfaces;
//! - [`objects`]: the compiled programs;
//! - [`tcp`]: VTL's own TCP congestion controls;
//! - [`trial`]: a session whose programs run on single frames, for tests and timing;
//! - [`tunnel`]: packets carried by the caller, instead of an interface.
//!
//! Nothing is pinned: however the process ends, the kernel removes everything, except attachments
//! in a namespace of the service manager ([`anchor`]).

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "VTL's programs and rings rely on x86-64, which keeps the order of stores and of loads"
);

pub mod admit;
pub mod anchor;
pub mod check;
pub mod cost;
pub mod fence;
pub mod flags;
pub mod link;
pub mod load;
pub mod netdev;
pub mod netlink;
pub mod objects;
pub mod plane;
pub mod pump;
pub mod rings;
pub mod sessions;
pub mod shard;
pub mod tcp;
mod test_run;
pub mod trial;
pub mod tunnel;

use std::io;

/// Errors of the data plane.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel or libbpf did not load an object.
    #[error("the kernel refused to load {what}: {source}{hint}")]
    Load {
        /// Name of the object.
        what: String,
        /// libbpf's error.
        source: libbpf_rs::Error,
        /// Advice, or empty.
        hint: &'static str,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A graft object does not describe itself as VTL expects, or violates the allow list.
    #[error("{0}")]
    BadGraft(String),
    /// The gid is in use by another graft.
    #[error("graft id {gid} is taken by \"{name}\": remove that graft first")]
    GidTaken {
        /// The gid.
        gid: u16,
        /// Name of the other graft.
        name: String,
    },
    /// No graft with this id or name is deployed.
    #[error("no graft \"{0}\" is deployed")]
    NoGraft(String),
}

/// Errors in a graft's description, or violations of the allow list.
impl From<vtl_pool::Error> for Error {
    fn from(error: vtl_pool::Error) -> Self {
        Self::BadGraft(error.to_string())
    }
}

impl Error {
    pub(crate) fn last(what: impl Into<String>) -> Self {
        Self::System {
            what: what.into(),
            source: io::Error::last_os_error(),
        }
    }

    pub(crate) fn load(what: impl Into<String>, source: libbpf_rs::Error) -> Self {
        let hint = match source.kind() {
            libbpf_rs::ErrorKind::PermissionDenied => {
                " (loading eBPF programs needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON)"
            }
            _ => "",
        };
        Self::Load {
            what: what.into(),
            source,
            hint,
        }
    }
}

/// The running kernel's release string.
pub fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Keeps libbpf from writing to standard error; its errors are returned.
pub fn silence() {
    libbpf_rs::set_print(None);
}

/// This crate's results.
pub type Result<T> = std::result::Result<T, Error>;
