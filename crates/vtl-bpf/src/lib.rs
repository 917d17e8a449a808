//! The data plane in the kernel, by libbpf: loads, attaches and swaps VTL's eBPF programs.
//!
//! - [`admit`]: what a graft's object may contain;
//! - [`anchor`]: where live frames' programs are attached;
//! - [`check`]: what the verifier says of a graft;
//! - [`cost`]: what a graft costs for each packet;
//! - [`flags`]: how programs are compiled;
//! - [`plane`]: the root programs with their maps, and the grafts behind them;
//! - [`load`]: how a graft's programs get into the kernel, and what each step takes;
//! - [`sessions`]: the table of sessions, shared with the kernel;
//! - [`rings`]: makes the sessions' rings;
//! - [`pump`]: the egress drivers;
//! - [`fence`]: keeps VTL's sockets to some interfaces;
//! - [`link`]: attachments that vanish with the process;
//! - [`netdev`]: what a network interface can do;
//! - [`objects`]: the compiled programs;
//! - [`tcp`]: TCP congestion controls of VTL's own;
//! - [`trial`]: a session whose programs run on single frames, to test and to time them;
//! - [`tunnel`]: packets that the caller carries, instead of an interface.
//!
//! Nothing is pinned: when the process ends, however it ends, the kernel removes everything, but for what is attached in
//! a namespace of the service manager's ([`anchor`]).

pub mod admit;
pub mod anchor;
pub mod check;
pub mod cost;
pub mod fence;
pub mod flags;
pub mod link;
pub mod load;
pub mod netdev;
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

/// Why the data plane refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel or libbpf did not load an object.
    #[error("the kernel refused to load {what}: {source}{hint}")]
    Load {
        /// Which object.
        what: String,
        /// libbpf's error.
        source: libbpf_rs::Error,
        /// What follows from it, or nothing.
        hint: &'static str,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A graft object does not describe itself as VTL expects.
    #[error("{0}")]
    BadGraft(String),
    /// The gid is taken by another graft.
    #[error("graft id {gid} is taken by \"{name}\": remove that graft first")]
    GidTaken {
        /// The id.
        gid: u16,
        /// Who has it.
        name: String,
    },
    /// No graft with this id or name is deployed.
    #[error("no graft \"{0}\" is deployed")]
    NoGraft(String),
}

/// What a graft's object says, or may not contain.
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

/// Keeps libbpf from writing to standard error; errors say what matters of it.
pub fn silence() {
    libbpf_rs::set_print(None);
}

/// This crate's results.
pub type Result<T> = std::result::Result<T, Error>;
