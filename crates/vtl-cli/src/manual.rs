//! Completion scripts and manual pages, generated from the command line's own definition: by `vtl-lab`
//! where it is installed, as only that knows all of it.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;
use clap_complete::Shell;

use crate::cli::{CompletionsArgs, ManArgs};
use crate::{command, lab};

/// Prints a completion script.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    match lab::find() {
        Ok(lab) => lab::exec(&lab, ["completions", &args.shell.to_string()]),
        Err(_) => write_completions(command(), args.shell),
    }
}

/// Writes `vtl.1` and one page per subcommand.
pub(crate) fn pages(args: &ManArgs) -> anyhow::Result<()> {
    match lab::find() {
        Ok(lab) => lab::exec(&lab, ["man".as_ref(), args.dir.as_os_str()]),
        Err(_) => write_pages(command(), &args.dir),
    }
}

/// Prints the completion script of `command`.
///
/// # Errors
/// Standard output is closed.
pub fn write_completions(mut command: clap::Command, shell: Shell) -> anyhow::Result<()> {
    // Into memory first: clap_complete panics when it cannot write, as into a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "vtl", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}

/// Writes the manual pages of `command` into a directory.
///
/// # Errors
/// It is none, or cannot be written to.
pub fn write_pages(command: clap::Command, directory: &Path) -> anyhow::Result<()> {
    clap_mangen::generate_to(command, directory)
        .with_context(|| format!("cannot write manual pages into {}", directory.display()))
}
