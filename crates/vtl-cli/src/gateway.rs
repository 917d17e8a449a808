//! `vtl gateway`: forwarded TCP connections that this host carries for others.

use clap::{Args, Subcommand};
use vtl_control::{Done, Gateways, Request};

use crate::daemon::SocketArgs;
use crate::output;

/// Arguments of `vtl gateway`.
#[derive(Debug, Subcommand)]
pub(crate) enum GatewayCommand {
    /// Carry the TCP connections that this host, a router, forwards over an interface
    #[command(after_help = "\
The interface is the one to the bad part of the path. Connections that leave by it are carried if at its other end the\n\
server, or a gateway before it, speaks VTL; all others are forwarded as before. Connections that VTL hosts and gateways\n\
beyond it open to hosts behind this one are ended here. The hosts themselves need nothing, and see each other's\n\
addresses. The firewall's forward rules decide as before (docs/gateway.md).\n\n\
Examples:\n  \
        vtl gateway add wan0                           whatever this router forwards over wan0\n  \
        vtl gateway add wan0 --to 10.20.0.0/16         only to these hosts; --to again for more\n  \
        vtl gateway add wan0 --port 80 --port 443      only to these ports\n  \
        vtl gateway add wan0 --carrier graft:stream    by this carrier instead of the best one")]
    Add(AddArgs),
    /// List the gateways
    #[command(after_help = "\
connections  those ended here so far, in either direction, also if the other end turned out not to speak VTL")]
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Forward new connections as before; those that are carried go on
    #[command(after_help = "Example: vtl gateway remove wan0")]
    Remove {
        /// The interface
        interface: String,
    },
}

/// Arguments of `vtl gateway add`.
#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// The interface to the part of the path that is to be carried over; it may come later
    interface: String,
    /// Only connections to this address or prefix; all others are forwarded
    #[arg(long, value_name = "PREFIX")]
    to: Vec<String>,
    /// Only connections to this port; all others are forwarded
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    port: Vec<u16>,
    /// What connections that leave by the interface travel by, instead of the best graft (`best`): `auto`, `graft:NAME`,
    /// `multipath`, `stack:NAME`, `quic`, `sctp`, `kcp` or `mptcp`
    #[arg(long, value_name = "NAME")]
    carrier: Option<String>,
}

/// Runs a subcommand of `vtl gateway`.
pub(crate) fn run(command: &GatewayCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        GatewayCommand::Add(args) => {
            let _: Done = socket.call(&Request::GatewayAdd {
                interface: args.interface.clone(),
                to: args.to.clone(),
                ports: args.port.clone(),
                carrier: args.carrier.clone(),
            })?;
        }
        GatewayCommand::Remove { interface } => {
            let interface = interface.clone();
            let _: Done = socket.call(&Request::GatewayRemove { interface })?;
        }
        GatewayCommand::List { json } => {
            let gateways: Gateways = socket.call(&Request::GatewayList)?;
            output::show(&gateways, *json)?;
        }
    }
    Ok(())
}
