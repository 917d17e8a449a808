//! `vtl flow`: hooked connections, and what they travel by.

use std::{collections::HashMap, net::SocketAddr, num::NonZeroU32};

use clap::{Args, Subcommand};
use procfs::process::{FDTarget, all_processes};
use serde::Serialize;
use vtl_control::{Client, FlowStatus, Request};

use crate::daemon::{self, SocketArgs};
use crate::{output, units};

/// Arguments of `vtl flow`.
#[derive(Debug, Subcommand)]
pub(crate) enum FlowCommand {
    /// List the connections whose carrier may change while they run, with what each travels by and why
    #[command(
        after_help = "They are the connections that vtld carries between this host and hosts that run VTL. Programs of\n\
                      others are shown to root only."
    )]
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show one of them
    Show(FlowArgs),
    /// Have what this host sends of one travel by another carrier, from the next byte on
    #[command(after_help = "Examples:\n  \
        vtl flow move 17 --carrier tcp\n  \
        vtl flow move 17 --carrier quic --for 10min\n  \
        vtl flow move 17 --carrier 'stack:udp-plus?rate=20'\n\n\
        What the former carrier has is still delivered; nothing is lost, nothing comes twice. With\n\
        `tcp` the flow stays on its own TCP connection until it is moved again. The other direction\n\
        is the other host's to move.")]
    Move {
        #[command(flatten)]
        flow: FlowArgs,
        /// `tcp`, the flow's own connection, or another carrier: `graft`, `quic`, `sctp`, `mptcp`, `kcp`, `stack:NAME`
        #[arg(long, value_name = "NAME")]
        carrier: String,
        /// For so long, such as 10min: then it goes where it would go without
        #[arg(long = "for", value_name = "TIME", value_parser = units::seconds)]
        time: Option<NonZeroU32>,
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
            let list = daemon::ask(&socket.socket, Client::flows)?;
            let flows = rows(list.flows);
            output::show(&Rows { flows }, *json)?;
        }
        FlowCommand::Show(FlowArgs { id, json }) => {
            let flow: FlowStatus = socket.call(&Request::FlowShow { id: *id })?;
            output::show(&rows(vec![flow]).first(), *json)?;
        }
        FlowCommand::Move {
            flow,
            carrier,
            time,
        } => {
            let moved: FlowStatus = socket.call(&Request::FlowMove {
                id: flow.id,
                carrier: carrier.clone(),
                for_s: *time,
            })?;
            if flow.json {
                output::show(&rows(vec![moved]).first(), true)?;
            }
        }
    }
    Ok(())
}

/// A flow, and whose it is.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    /// Of the application here; nothing where that has gone, or may not be looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) program: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pid: Option<i32>,
    #[serde(flatten)]
    pub(crate) flow: FlowStatus,
}

/// All of them.
#[derive(Debug, Serialize)]
struct Rows {
    flows: Vec<Row>,
}

/// Finds the programs of flows.
pub(crate) fn rows(flows: Vec<FlowStatus>) -> Vec<Row> {
    let programs = programs(&flows);
    let row = |flow: FlowStatus| {
        let found = flow.app.and_then(|app| programs.get(&app));
        Row {
            program: found.map(|(program, _)| program.clone()),
            pid: found.map(|(_, pid)| *pid),
            // Said by the program.
            flow: FlowStatus { app: None, ..flow },
        }
    };
    flows.into_iter().map(row).collect()
}

/// The programs that hold the applications' ends, with their process ids.
fn programs(flows: &[FlowStatus]) -> HashMap<[SocketAddr; 2], (String, i32)> {
    let canonical = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
    let wanted: HashMap<_, _> = flows
        .iter()
        .filter_map(|flow| flow.app)
        .map(|app| (app.map(canonical), app))
        .collect();
    // The kernel's tables: a system that does not show them shows no programs.
    let sockets = [procfs::net::tcp(), procfs::net::tcp6()];
    let by_inode: HashMap<u64, [SocketAddr; 2]> = sockets
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|socket| {
            let ends = [socket.local_address, socket.remote_address].map(canonical);
            Some((socket.inode, *wanted.get(&ends)?))
        })
        .collect();
    let mut found = HashMap::new();
    if by_inode.is_empty() {
        return found;
    }
    for process in all_processes().into_iter().flatten().flatten() {
        let Ok(descriptors) = process.fd() else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            let FDTarget::Socket(inode) = descriptor.target else {
                continue;
            };
            if let (Some(app), Ok(stat)) = (by_inode.get(&inode), process.stat()) {
                // Chosen by the program, and shown on a terminal.
                let name = stat.comm.replace(char::is_control, "?");
                found.insert(*app, (name, process.pid));
            }
        }
    }
    found
}
