//! What can go wrong with a testbed. Every message is one sentence that a user can act on.

use std::io;
use std::path::PathBuf;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a testbed could not be made, changed or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Network namespaces and packet sockets need privileges.
    #[error("a testbed needs root: run this with sudo")]
    NotRoot,
    /// `ip netns exec` mounts another /sys, for which / must be a mount point.
    #[error(
        "a testbed cannot be made here, since / is not a mount point (a chroot?): before it is entered, mount --bind its directory onto itself"
    )]
    RootNotMounted,
    /// A tool of the system is not installed.
    #[error("`{tool}` is missing: install the package {package}")]
    MissingTool {
        /// The command.
        tool: &'static str,
        /// The Debian package that holds it.
        package: &'static str,
    },
    /// The name would not do as the name of a namespace or a file.
    #[error("\"{0}\" is no name for a testbed: use 1 to 32 letters, digits, '-' or '_'")]
    BadName(String),
    /// A figure of the link means nothing.
    #[error(transparent)]
    BadLink(#[from] vtl_link::BadLink),
    /// A testbed of this name is already there.
    #[error("the testbed \"{0}\" is already up: run `vtl testbed down --name {0}` first")]
    AlreadyUp(String),
    /// There is no testbed of this name.
    #[error("there is no testbed \"{0}\": run `vtl testbed up --name {0}` first")]
    NotUp(String),
    /// A wired testbed has no emulator to change, and an emulated one cannot become a wire.
    #[error(
        "a direct wire and an emulated link cannot be exchanged while up: run `vtl testbed down` and `up` again"
    )]
    WireFixed,
    /// A tool of the system refused.
    #[error("`{command}` failed: {message}")]
    Tool {
        /// The command with its arguments.
        command: String,
        /// What it said.
        message: String,
    },
    /// The kernel refused a system call.
    #[error("cannot {action}: {source}")]
    System {
        /// What was attempted.
        action: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// "read", "write", …
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The emulator is gone, or does not answer, or refused.
    #[error("the emulator of the testbed \"{name}\" {problem}")]
    Emulator {
        /// The testbed's name.
        name: String,
        /// What happened.
        problem: String,
    },
    /// The kernel does not have this congestion control.
    #[error("this kernel has no congestion control \"{wanted}\", only: {available}")]
    NoCongestionControl {
        /// What was asked for.
        wanted: String,
        /// What there is.
        available: String,
    },
}

impl Error {
    /// Wraps the answer of a system call; `action` completes "cannot …".
    pub(crate) fn system(action: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let action = action.into();
        move |source| Error::System { action, source }
    }

    /// Wraps the error of an operation on a file.
    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::File {
            action,
            path,
            source,
        }
    }
}
