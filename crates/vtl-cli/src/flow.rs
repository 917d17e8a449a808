//! `vtl flow`: hooked connections, and what they travel by.

use clap::{Args, Subcommand};
use vtl_control::{Client, FlowStatus, Request};

use crate::daemon::{self, SocketArgs};
use crate::output;

/// Arguments of `vtl flow`.
#[derive(Debug, Subcommand)]
pub(crate) enum FlowCommand {
    /// List the connections whose carrier may change while they run, with what each travels by and why
    #[command(
        after_help = "They are those that go by `--carrier quic`; `vtl status` has the others."
    )]
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show one of them
    Show(FlowArgs),
    /// Have what this host sends of one travel by another carrier, from the next byte on
    #[command(after_help = "Example: vtl flow move 17 --carrier tcp\n\n\
        What the former carrier has is still delivered; nothing is lost, nothing comes twice. With\n\
        `tcp` the flow stays on its own TCP connection until it is moved again. The other direction\n\
        is the other host's to move.")]
    Move {
        #[command(flatten)]
        flow: FlowArgs,
        /// `tcp`, the flow's own connection, or a carrier that there is to its peer: `quic`
        #[arg(long, value_name = "NAME")]
        carrier: String,
    },
}

/// One flow.
#[derive(Debug, Args)]
pub(crate) struct FlowArgs {
    /// Its id, as `vtl flow list` shows it
    id: u64,
    /// Write JSON for machines instead of text
    #[arg(long)]
    json: bool,
}

/// Runs a subcommand of `vtl flow`.
pub(crate) fn run(command: &FlowCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        FlowCommand::List { json } => {
            output::show(&daemon::ask(&socket.socket, Client::flows)?, *json)?;
        }
        FlowCommand::Show(FlowArgs { id, json }) => {
            let flow: FlowStatus = socket.call(&Request::FlowShow { id: *id })?;
            output::show(&flow, *json)?;
        }
        FlowCommand::Move { flow, carrier } => {
            let moved: FlowStatus = socket.call(&Request::FlowMove {
                id: flow.id,
                carrier: carrier.clone(),
            })?;
            if flow.json {
                output::show(&moved, true)?;
            }
        }
    }
    Ok(())
}
