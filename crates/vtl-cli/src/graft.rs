//! `vtl graft`: the protocols in the pool and in the kernel.

use clap::{Args, Subcommand};
use serde_json::json;

use crate::daemon::SocketArgs;
use crate::output;

/// Arguments of `vtl graft`.
#[derive(Debug, Subcommand)]
pub(crate) enum GraftCommand {
    /// List the grafts of the pool, and which of them are in the kernel
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Load a graft from the pool into the running kernel
    Deploy(GraftName),
    /// Take a graft out of the kernel
    Remove(GraftName),
}

/// Which graft.
#[derive(Debug, Args)]
pub(crate) struct GraftName {
    /// The graft's name, as `vtl graft list` shows it
    name: String,
}

/// Runs a subcommand of `vtl graft`.
pub(crate) fn run(command: &GraftCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        GraftCommand::List { json } => {
            let answer = socket.call(&json!({ "op": "graft_list" }))?;
            output::show(&answer, *json)?;
        }
        GraftCommand::Deploy(graft) => {
            socket.call(&json!({ "op": "graft_deploy", "name": graft.name }))?;
        }
        GraftCommand::Remove(graft) => {
            socket.call(&json!({ "op": "graft_remove", "name": graft.name }))?;
        }
    }
    Ok(())
}
