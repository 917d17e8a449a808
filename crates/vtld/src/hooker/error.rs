//! The Hooker's errors, each with its remedy.

use std::{io, path::PathBuf};

/// Error of the Hooker's start, or of a request to it.
#[derive(Debug, thiserror::Error)]
pub enum HookerError {
    /// The programs do not load.
    #[error(
        "the Hooker's eBPF programs do not load: {0:#} (they need root and Linux 6.6 or newer)"
    )]
    Load(#[source] libbpf_rs::Error),
    /// A program cannot be attached.
    #[error("cannot attach {program} to {to}: {source:#}")]
    Attach {
        /// The program's name.
        program: &'static str,
        /// Interface or cgroup.
        to: String,
        /// The kernel's answer.
        source: libbpf_rs::Error,
    },
    /// A map operation failed.
    #[error("eBPF map {map}: {source:#}")]
    Map {
        /// The map's name.
        map: &'static str,
        /// The kernel's answer.
        source: libbpf_rs::Error,
    },
    /// The object lacks a program or map: it does not belong to this build.
    #[error("the eBPF object has no {0}: rebuild it")]
    Missing(&'static str),
    /// This process's cgroup cannot be read.
    #[error("cannot find the cgroup of this process: {0}")]
    NoCgroup2(#[source] io::Error),
    /// No cgroup v2 hierarchy is mounted, and vtld cannot mount one.
    #[error(
        "no control groups of version 2 are mounted, and vtld cannot mount them (mount -t cgroup2 none \
         /sys/fs/cgroup/unified; or, in vtld's unit, CapabilityBoundingSet=CAP_SYS_ADMIN, \
         AmbientCapabilities=CAP_SYS_ADMIN and SystemCallFilter=fsopen fsconfig fsmount)"
    )]
    NoMount(#[source] io::Error),
    /// A cgroup operation failed.
    #[error("cgroup {path}: {source}")]
    Cgroup {
        /// The file or directory.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A socket operation failed.
    #[error("{what}: {source}")]
    Socket {
        /// What was tried.
        what: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No hook has that number.
    #[error("there is no hook {0}: `vtl hook list` shows those there are")]
    NoSuchHook(u32),
    /// Neither VTL nor the kernel has this congestion control.
    #[error("there is no carrier tcp:{name}: there are tcp, {others}")]
    NoSuchControl {
        /// What was asked for.
        name: String,
        /// Available carriers.
        others: String,
    },
    /// The kernel rejects a congestion control of VTL's.
    #[error(
        "this kernel does not take tcp:{name} (it needs struct_ops): {source}; it has tcp, {others}"
    )]
    Control {
        /// What was asked for.
        name: String,
        /// Other available carriers.
        others: String,
        /// The kernel's answer.
        source: vtl_bpf::Error,
    },
    /// A port cannot have this carrier.
    #[error("a port cannot have the carrier {carrier}: {why}")]
    NotForPorts {
        /// The carrier.
        carrier: String,
        /// The reason, and what to do instead.
        why: &'static str,
    },
    /// The port belongs to a rule.
    #[error("rule \"{rule}\" serves port {port}: vtl rule remove {rule}")]
    OfRule {
        /// The port.
        port: u16,
        /// The rule's name.
        rule: String,
    },
    /// The same thing is hooked already.
    #[error("{0} is hooked already")]
    AlreadyHooked(String),
    /// The interface has a gateway.
    #[error("{0} has a gateway already: vtl gateway remove {0}")]
    AlreadyGateway(String),
    /// The interface has no gateway.
    #[error("there is no gateway at {0}: `vtl gateway list` shows those there are")]
    NoSuchGateway(String),
    /// The interface is not one of `vtld --interface`.
    #[error("vtld does not use the interface {0}: start it with --interface {0}, too")]
    OutOfScope(String),
    /// vtld is limited to interfaces without this one.
    #[error(
        "vtld is limited to other interfaces than {0}, which forwards packets as well, and whose connections a gateway would miss: start it with --interface {0}, too, or without --interface"
    )]
    ForwardsOutside(String),
    /// A gateway cannot have this carrier.
    #[error(
        "a gateway cannot have the carrier {0}: it forwards what it cannot carry; take best, auto, graft:NAME, or another kind of carrier"
    )]
    NotForGateways(String),
    /// Accepted connections inherit marks.
    #[error(
        "a gateway's connections would inherit its mark: sysctl net.ipv4.tcp_fwmark_accept=0 first"
    )]
    MarksAccepted,
    /// Too many prefixes and ports.
    #[error("all gateways together have at most {0} prefixes, and as many ports")]
    TooManyFilters(u32),
    /// Another daemon is taking over.
    #[error("another vtld is taking over: ask it")]
    Leaving,
    /// The carrier of a former daemon's hook is invalid.
    #[error("{0}")]
    Inherited(String),
    /// The state handed over by a former daemon is invalid.
    #[error("taking over from the former daemon: {0}")]
    TakeOver(#[source] io::Error),
}

impl HookerError {
    /// Wraps the error of a socket operation. `what`: what was tried.
    pub(super) fn socket(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Socket { what, source }
    }
}

/// Outcome of a failed held connect, as the application sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// `ECONNREFUSED`.
    Refused,
    /// `EHOSTUNREACH`. Also if a required carrier is unavailable: like a packet filter's rejection, it does not imply
    /// an answer of the destination.
    HostUnreachable,
    /// `ENETUNREACH`.
    NetUnreachable,
    /// `EACCES` with IPv6, `EHOSTUNREACH` with IPv4: TCP's errors for the ICMP message.
    Prohibited,
    /// No answer: the application's own timer decides, as with TCP.
    TimedOut,
}

impl From<&io::Error> for ConnectError {
    fn from(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENETUNREACH | libc::ENETDOWN) => Self::NetUnreachable,
            Some(libc::EHOSTUNREACH | libc::EHOSTDOWN) => Self::HostUnreachable,
            Some(libc::EACCES | libc::EPERM) => Self::Prohibited,
            Some(libc::ETIMEDOUT) => Self::TimedOut,
            _ => Self::Refused,
        }
    }
}

/// Whether an operation failed for lack of file descriptors (`EMFILE`, `ENFILE`), not because of its target.
pub(super) fn lacks_descriptors(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}
