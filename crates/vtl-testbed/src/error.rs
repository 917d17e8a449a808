//! Errors of this crate. Each message is one sentence that says what is wrong and how to mend it.

use std::io;
use std::path::PathBuf;

/// This crate's results.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Errors of creating, changing and using a testbed.
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
    /// A system tool is not installed.
    #[error("`{tool}` is missing: install the package {package}")]
    MissingTool {
        /// The command.
        tool: &'static str,
        /// The Debian package that holds it.
        package: &'static str,
    },
    /// The name is invalid as a namespace's or a file's.
    #[error("\"{0}\" is no name for a testbed: use 1 to 32 letters, digits, '-' or '_'")]
    BadName(String),
    /// A parameter of the link is invalid.
    #[error(transparent)]
    BadLink(#[from] vtl_link::BadLink),
    /// A testbed of this name is up.
    #[error("the testbed \"{0}\" is already up: run `vtl testbed down --name {0}` first")]
    AlreadyUp(String),
    /// There is no testbed of this name.
    #[error("there is no testbed \"{0}\": run `vtl testbed up --name {0}` first")]
    NotUp(String),
    /// The backend cannot change from a direct veth pair to emulation, or back.
    #[error(
        "a direct wire and an emulated link cannot be exchanged while up: run `vtl testbed down` and `up` again"
    )]
    WireFixed,
    /// A system tool failed.
    #[error("`{command}` failed: {message}")]
    Tool {
        /// The command with its arguments.
        command: String,
        /// The first line of its standard error.
        message: String,
    },
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// The operation; completes "cannot …".
        action: String,
        /// The system's error.
        source: io::Error,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// The operation: "read", "write", …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The emulator has exited, does not respond, or refused a request.
    #[error("the emulator of the testbed \"{name}\" {problem}")]
    Emulator {
        /// The testbed's name.
        name: String,
        /// The problem; follows "the emulator of the testbed NAME".
        problem: String,
    },
    /// The kernel does not have this congestion control.
    #[error("this kernel has no congestion control \"{wanted}\", only: {available}")]
    NoCongestionControl {
        /// The congestion control asked for.
        wanted: String,
        /// Those that the kernel has.
        available: String,
    },
}

impl Error {
    /// Wraps the error of a system call; `action` completes "cannot …".
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
