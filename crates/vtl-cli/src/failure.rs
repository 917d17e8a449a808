//! How the `vtl` command ends when it does not succeed.

use std::fmt;
use std::io;
use std::process::ExitCode;

/// Exit statuses, as documented in `vtl --help`.
const FAILURE: u8 = 1;
/// As in `sysexits.h`: EX_UNAVAILABLE.
const UNREACHABLE: u8 = 69;
/// As in `sysexits.h`: EX_NOPERM.
pub const PERMISSION: u8 = 77;
/// As a shell reports a program that it may not or cannot run.
const NOT_EXECUTABLE: u8 = 126;
/// As a shell reports a program that does not exist.
const NOT_FOUND: u8 = 127;
/// As a shell reports a program that SIGINT ended.
pub const INTERRUPTED: u8 = 130;

/// An error with an exit status of its own. Any other error ends with status 1.
#[derive(Debug)]
pub struct Failure {
    status: u8,
    /// One sentence for the user; empty if the command has said it already.
    message: String,
}

impl Failure {
    /// The command has already said what is wrong.
    pub(crate) fn reported() -> anyhow::Error {
        Self::error(FAILURE, String::new())
    }

    /// The daemon does not answer.
    pub(crate) fn unreachable(message: impl Into<String>) -> anyhow::Error {
        Self::error(UNREACHABLE, message.into())
    }

    /// The user may not do this.
    pub fn permission(message: impl Into<String>) -> anyhow::Error {
        Self::error(PERMISSION, message.into())
    }

    /// The program to run cannot be run.
    pub fn not_executable(message: impl Into<String>) -> anyhow::Error {
        Self::error(NOT_EXECUTABLE, message.into())
    }

    /// The program to run does not exist.
    pub fn not_found(message: impl Into<String>) -> anyhow::Error {
        Self::error(NOT_FOUND, message.into())
    }

    fn error(status: u8, message: String) -> anyhow::Error {
        Self { status, message }.into()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// The exit status that goes with an error.
pub fn status(err: &anyhow::Error) -> u8 {
    err.downcast_ref::<Failure>()
        .map_or(FAILURE, |failure| failure.status)
}

/// Prints the error, unless it was reported, and gives this exit status.
pub fn report(err: &anyhow::Error, status: u8) -> ExitCode {
    // The reader of our output has seen enough, as in `vtl status | head`. A session that its peer has closed is of
    // the same kind, with words of its own.
    if let Some(io) = err.downcast_ref::<io::Error>()
        && io.kind() == io::ErrorKind::BrokenPipe
        && io.get_ref().is_none()
    {
        return ExitCode::from(FAILURE);
    }
    let failure = err.downcast_ref::<Failure>();
    if failure.is_none_or(|failure| !failure.message.is_empty()) {
        eprintln!("vtl: {err:#}");
    }
    ExitCode::from(status)
}
