//! Completion scripts and manual pages, generated from the command line's own definition.

use std::io::{self, Write};

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::{Cli, CompletionsArgs, ManArgs};

/// Prints a completion script.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    // Into memory first: clap_complete panics when it cannot write, as into a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "vtl", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}

/// Writes `vtl.1` and one page per subcommand.
pub(crate) fn pages(args: &ManArgs) -> anyhow::Result<()> {
    clap_mangen::generate_to(Cli::command(), &args.dir)
        .with_context(|| format!("cannot write manual pages into {}", args.dir.display()))
}
