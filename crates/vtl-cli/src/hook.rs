//! `vtl hook` and `vtl run`: whose TCP connections are captured.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::{Args, Subcommand};
use vtl_control::{CarrierSpec, Done, HookAdded, HookTarget, Hooks, Request};

use crate::daemon::SocketArgs;
use crate::failure::Failure;
use crate::output;

/// Arguments of `vtl hook`.
#[derive(Debug, Subcommand)]
pub(crate) enum HookCommand {
    /// Capture the TCP connections of a server's port or of a cgroup's programs
    #[command(after_help = "Examples:\n  \
        vtl hook add --port 80                                  clients that speak VTL reach port 80 over it\n  \
        vtl hook add --cgroup /sys/fs/cgroup/system.slice/x     what runs there connects over VTL\n  \
        vtl hook add --port 80 --others tcp:stream              and clients without VTL by TCP, sent as stream sends\n  \
        vtl hook add --port 80 --carrier tcp:bbr                whichever host connects: TCP, sent under BBR\n  \
        vtl hook add --port 5004 --loss-tolerant                clients may come by udp and the like")]
    Add(HookAddArgs),
    /// List what is captured
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Capture no further connections; those that run go on
    Remove(TargetArgs),
}

/// Arguments of `vtl hook add`.
#[derive(Debug, Args)]
pub(crate) struct HookAddArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    carrier: CarrierArg,
    /// Of a port: TCP to clients without VTL is sent under this congestion control, of the kernel's
    /// or of VTL's (`tcp:stream`, as the graft stream sends; --carrier names the others)
    #[arg(long, value_name = "tcp:CONTROL", conflicts_with_all = ["cgroup", "carrier"])]
    others: Option<String>,
}

/// What connections travel by.
#[derive(Debug, Args)]
struct CarrierArg {
    /// What the connections travel by, instead of the best graft: `auto`, what suits path and application, chosen while
    /// they run (vtl select); `tcp`, TCP as it is;
    /// `tcp:CONTROL`, TCP under a congestion control of the kernel's or of VTL's (stream, hybla,
    /// vegas, westwood, dctcp), which needs no VTL at the other end; `graft:NAME`, sessions over a graft;
    /// `multipath`, sessions on several paths at once, `multipath:SCHEDULER` by ecf, lowest-rtt, weighted,
    /// round-robin, redundant or primary (docs/stacks.md); `stack:NAME`, a stack of layers to each host: `stack:udp-plus?rate=20` repeats over UDP what gets lost, without
    /// congestion control, at 20 Mbit/s at most (docs/stacks.md); `quic`, `sctp`, `kcp` (all in UDP) and `mptcp`, a connection of this kind to each host, and
    /// TCP while that does not work; and, with --loss-tolerant, `udp`, `udp-lite`, `dccp-ccid2`,
    /// `dccp-ccid3` and `graft:partial-reliability`. Parameters of grafts follow:
    /// `graft:partial-reliability?max-loss=50&window=64` (docs/grafts.md)
    #[arg(long, value_name = "NAME")]
    carrier: Option<String>,
    /// These connections can do without what the network loses: the carriers that repeat nothing
    /// may carry them, in order and with gaps. Of a port: clients may come by them
    #[arg(long)]
    loss_tolerant: bool,
    /// Of a cgroup or a program: by such a carrier or not at all. Connections fail (EHOSTUNREACH) where the other host
    /// does not speak VTL or no carrier comes up within 10 s, and none of their bytes travels by plain TCP
    #[arg(long)]
    require: bool,
    /// As --require, and by carriers that are encrypted: where none works, inside TLS over the two hosts' own TCP
    /// connection
    #[arg(long)]
    require_encryption: bool,
}

impl CarrierArg {
    fn spec(&self) -> CarrierSpec {
        CarrierSpec {
            carrier: self.carrier.clone(),
            loss_tolerant: self.loss_tolerant,
            // A daemon that does not know encryption's mark knows this one.
            require: self.require || self.require_encryption,
            require_encryption: self.require_encryption,
            others: None,
        }
    }
}

/// What to capture.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct TargetArgs {
    /// A TCP port that a server on this host listens on
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// A cgroup's directory
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
}

impl TargetArgs {
    fn target(&self) -> anyhow::Result<HookTarget> {
        Ok(match (self.port, &self.cgroup) {
            (Some(port), _) => HookTarget::Port(port),
            (None, Some(path)) => {
                // The daemon has another working directory.
                let path = path.canonicalize().map_err(|err| {
                    anyhow::anyhow!("there is no cgroup {}: {err}", path.display())
                })?;
                HookTarget::Cgroup(path)
            }
            (None, None) => unreachable!("clap requires one of the two"),
        })
    }
}

/// Runs a subcommand of `vtl hook`.
pub(crate) fn run(command: &HookCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        HookCommand::Add(args) => {
            let _: HookAdded = socket.call(&Request::HookAdd {
                target: args.target.target()?,
                carrier: CarrierSpec {
                    others: args.others.clone(),
                    ..args.carrier.spec()
                },
            })?;
        }
        HookCommand::Remove(target) => {
            let _: Done = socket.call(&Request::HookRemove {
                target: target.target()?,
            })?;
        }
        HookCommand::List { json } => {
            let hooks: Hooks = socket.call(&Request::HookList)?;
            output::show(&hooks, *json)?;
        }
    }
    Ok(())
}

/// Arguments of `vtl run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    carrier: CarrierArg,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

/// Has the daemon move this process into a captured cgroup, and becomes the program.
pub(crate) fn exec(args: &RunArgs, socket: &SocketArgs) -> anyhow::Result<()> {
    let _: HookAdded = socket.call(&Request::HookRun {
        carrier: args.carrier.spec(),
    })?;
    let (program, arguments) = args.command.split_first().expect("clap requires one");
    let err = Command::new(program).args(arguments).exec();
    let program = program.to_string_lossy();
    Err(match err.kind() {
        io::ErrorKind::NotFound => Failure::not_found(format!("there is no program `{program}`")),
        _ => Failure::not_executable(format!("cannot run `{program}`: {err}")),
    })
}
