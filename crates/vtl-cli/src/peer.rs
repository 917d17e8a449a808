//! `vtl peer`: whose keys this host knows.

use anyhow::bail;
use clap::{Args, Subcommand};
use vtl_control::{Client, Done, PeerKey, Request};

use crate::daemon::{self, SocketArgs};
use crate::output;

/// Arguments of `vtl peer`.
#[derive(Debug, Subcommand)]
pub(crate) enum PeerCommand {
    /// List the peers that this host knows, and its own key
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show one of them
    Show {
        /// What it is called
        name: String,
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Trust a peer's key, in place of one that was learned under its name
    #[command(
        after_help = "Example: vtl peer trust gate 4f0c…9e --address 192.0.2.7 --address 2001:db8::/48 --reach 443\n\n\
        The key is what `vtl peer list` says first on that host."
    )]
    Trust(TrustArgs),
    /// Forget a peer that was learned: the next key that its addresses show counts as the first
    #[command(after_help = "Example: vtl peer forget 192.0.2.7")]
    Forget {
        /// What it is called
        name: String,
    },
}

/// Whose key is trusted.
#[derive(Debug, Args)]
pub(crate) struct TrustArgs {
    /// What this host calls it
    name: String,
    /// Its public key, 64 hexadecimal digits
    key: String,
    /// Where it may be, an address or prefix; may be repeated; anywhere unless given
    #[arg(long = "address", value_name = "PREFIX")]
    addresses: Vec<String>,
    /// A port of this host that its connections may be carried to by VTL, or a range (8000-8100); may be repeated;
    /// those of peers that are not listed unless given
    #[arg(long, value_name = "PORTS")]
    reach: Vec<String>,
}

/// Runs a subcommand of `vtl peer`.
pub(crate) fn run(command: &PeerCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        PeerCommand::List { json } => {
            output::show(&daemon::ask(&socket.socket, Client::peers)?, *json)?;
        }
        PeerCommand::Show { name, json } => {
            let all = daemon::ask(&socket.socket, Client::peers)?;
            let found = all.peers.iter().find(|peer| peer.known.name == *name);
            let Some(found) = found else {
                bail!("there is no peer {name}: vtl peer list");
            };
            output::show(found, *json)?;
        }
        PeerCommand::Trust(TrustArgs {
            name,
            key,
            addresses,
            reach,
        }) => {
            let Done {} = socket.call(&Request::PeerTrust(PeerKey {
                name: name.clone(),
                key: key.clone(),
                addresses: addresses.clone(),
                reach: Some(reach.clone()).filter(|reach| !reach.is_empty()),
            }))?;
        }
        PeerCommand::Forget { name } => {
            let Done {} = socket.call(&Request::PeerForget { name: name.clone() })?;
        }
    }
    Ok(())
}
