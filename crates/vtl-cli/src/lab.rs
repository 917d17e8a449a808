//! `vtl bench`, `vtl demo`, `vtl testbed` and a part of `vtl select`: what starts `vtl-lab`, the program that has them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow};
use clap::Args;

use crate::daemon::SocketArgs;
use crate::programs::{find_program, is_executable};

/// The program.
const PROGRAM: &str = "vtl-lab";

/// The commands that it has, and what each is for: `vtl` and `vtl-lab` list them alike.
pub const TESTBED: &str =
    "Make a client, a router and a server on this machine, with a link of any quality";
/// See [`TESTBED`].
pub const DEMO: &str = "Download a file over a bad link by TCP cubic, TCP BBR and VTL, and compare";
/// See [`TESTBED`].
pub const BENCH: &str = "Measure VTL against TCP, QUIC and UDP, over links of any quality";
/// See [`TESTBED`].
pub const SELECT: &str =
    "Have carriers chosen by path and application; measure which one suits which, and learn";
/// `vtl select explain`.
pub const EXPLAIN: &str = "Say what VTL would choose for a path and an application, why, and what each carrier would take";

/// The commands of `vtl select` that the program has.
const SELECT_COMMANDS: [&str; 5] = ["explain", "measure", "train", "evaluate", "compare"];

/// Arguments that are not looked at here, `--help` among them.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(crate) struct LabArgs {
    /// What vtl-lab makes of them: see `--help`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENTS"
    )]
    arguments: Vec<OsString>,
}

impl LabArgs {
    /// Becomes `vtl-lab COMMAND ARGUMENTS`. `socket`: where the daemon is.
    ///
    /// # Errors
    /// It is not installed, or cannot be run: returns only then.
    pub(crate) fn exec(&self, command: &[&str], socket: &SocketArgs) -> anyhow::Result<()> {
        let lab = find().map_err(|_| missing(&command.join(" ")))?;
        let option = [OsStr::new("--socket"), socket.socket.as_os_str()];
        let command = command.iter().map(OsStr::new);
        let arguments = self.arguments.iter().map(OsString::as_os_str);
        exec(&lab, option.into_iter().chain(command).chain(arguments))
    }
}

/// Becomes `vtl-lab` for `vtl help COMMAND …` of one of its commands. Returns if that was not asked.
///
/// # Errors
/// As [`LabArgs::exec`].
pub(crate) fn exec_help(arguments: &[OsString]) -> anyhow::Result<()> {
    // The one option that may stand in front of commands is of no use for help.
    let asked = match arguments.get(1..).unwrap_or_default() {
        [socket, _, asked @ ..] if socket == "--socket" => asked,
        [socket, asked @ ..] if socket.as_encoded_bytes().starts_with(b"--socket=") => asked,
        asked => asked,
    };
    let [help, command, below @ ..] = asked else {
        return Ok(());
    };
    if help != "help" || !has(command, below) {
        return Ok(());
    }
    let lab = find().map_err(|_| missing(&command.to_string_lossy()))?;
    exec(&lab, asked)
}

/// Whether `vtl-lab` has a command, with these below it.
fn has(command: &OsStr, below: &[OsString]) -> bool {
    match command.to_str().unwrap_or_default() {
        "testbed" | "demo" | "bench" => true,
        "select" => {
            let below = below.first().and_then(|below| below.to_str());
            below.is_some_and(|below| SELECT_COMMANDS.contains(&below))
        }
        _ => false,
    }
}

/// Becomes `vtl-lab` with these arguments.
///
/// # Errors
/// It cannot be run: returns only then.
pub(crate) fn exec(
    lab: &Path,
    arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
) -> anyhow::Result<()> {
    let error = Command::new(lab).args(arguments).exec();
    Err(error).with_context(|| format!("cannot run {}", lab.display()))
}

/// Where it is: beside this executable, or else in the PATH.
///
/// # Errors
/// `NotFound`.
pub(crate) fn find() -> io::Result<PathBuf> {
    let beside = std::env::current_exe()?.with_file_name(PROGRAM);
    if is_executable(&beside) {
        return Ok(beside);
    }
    find_program(PROGRAM)
}

fn missing(command: &str) -> anyhow::Error {
    anyhow!(
        "`vtl {command}` is done by the program {PROGRAM}, which is neither beside `vtl` nor in the PATH: \
         `make install` in VTL's sources installs it"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has__of_select_only_what_is_done_beforehand() {
        for (words, expected) in [
            ("bench", true),
            ("bench run", true),
            ("status", false),
            ("select", false),
            ("select measure", true),
            ("select evaluate", true),
            ("select train x", true),
            ("select status", false),
            ("select explain", true),
        ] {
            let words: Vec<OsString> = words.split(' ').map(OsString::from).collect();
            assert_eq!(has(&words[0], &words[1..]), expected, "{words:?}");
        }
    }
}
