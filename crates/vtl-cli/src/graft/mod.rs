//! `vtl graft`: the protocols in the pool and in the kernel, and a protocol developer's tools.

mod index;
mod package;
pub mod project;
mod trial;

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use vtl_control::{Deployed, Done, Grafts, Request};

use crate::daemon::{self, SocketArgs};
use crate::output;

const DAY: &str = "\
A protocol developer's day:
  vtl graft new mine                        a template that works, with its test
  cd mine && vtl graft build                compile it
  sudo vtl graft check                      would the kernel's verifier take it?
  sudo vtl graft test                       simulate it, and carry data over a bad link
  vtl graft key new me                      a key, once
  vtl graft sign --key me.key               the package mine-0.1.0.vtlg
  sudo install -Dm644 me.pub /etc/vtl/keys/me.pub   on each host that shall take it
  sudo vtl graft deploy mine-0.1.0.vtlg     into the kernel, and into the host's pool
  vtl send FILE HOST --graft mine";

/// Arguments of `vtl graft`.
#[derive(Debug, Subcommand)]
#[command(after_help = DAY)]
pub(crate) enum GraftCommand {
    /// List the grafts of the pool, and which of them are in the kernel
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show all that is known of a graft of the pool, or of a package
    ///
    /// As root also nanoseconds a packet, with 1,440 bytes of payload: the graft's programs are
    /// loaded beside everything else, and run on packets that go nowhere. Of a file only with
    /// --measure: who made it may not be trusted.
    Show {
        /// The graft's name, or NAME@VERSION, or a package's file
        graft: String,
        /// Measure a package's file, too, whoever signed it
        #[arg(long)]
        measure: bool,
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Load a graft into the running kernel, from the pool or from a package
    Deploy(GraftName),
    /// Put another version in the place of a graft that is in the kernel
    ///
    /// Versions with the same first number (the second, if that is 0) are compatible: open sessions
    /// keep their state, and their next packets meet the new programs. Otherwise connections of TCP
    /// programs fall back to TCP and return by a session over the new version, and with an open
    /// session of an aware application the swap is refused. Other hosts keep their version.
    Swap(GraftName),
    /// Take a graft out of the kernel
    Remove {
        /// The graft's name, as `vtl graft list` shows it
        name: String,
    },
    /// Make a directory with a graft that works, to begin with
    New(project::NewArgs),
    /// Compile a graft
    Build(project::BuildArgs),
    /// Ask the kernel's verifier for its verdict, without loading anything
    Check(project::CheckArgs),
    /// Run a graft's tables, simulate it on a grid of paths, and try it in the kernel
    Test(trial::TestArgs),
    /// Make keys to sign packages with
    #[command(subcommand)]
    Key(package::KeyCommand),
    /// Take no more what a key has signed, a package, or old versions of a graft
    Revoke(package::RevokeArgs),
    /// Make a signed package of a graft that was built
    Sign(package::SignArgs),
    /// Copy a package to where others find it
    Publish(package::PublishArgs),
    /// Say which packages are the newest, and which are revoked, where they are published
    Index(index::IndexArgs),
    /// Copy a package from where others put it
    Pull(package::PullArgs),
}

/// Which graft.
#[derive(Debug, Args)]
pub(crate) struct GraftName {
    /// The graft's name, or NAME@VERSION, or a package's file (*.vtlg)
    graft: String,
}

/// Runs a subcommand of `vtl graft`.
pub(crate) fn run(command: &GraftCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        GraftCommand::List { json } => {
            let grafts: Grafts = socket.call(&Request::GraftList)?;
            output::show(&grafts, *json)?;
        }
        GraftCommand::Show {
            graft,
            measure,
            json,
        } => {
            let answer = if is_file(graft) {
                package::describe(Path::new(graft), *measure)?
            } else {
                let answer = socket.call(&Request::GraftShow {
                    name: graft.clone(),
                })?;
                package::with_costs_of_pool(answer)
            };
            output::show(&answer, *json)?;
        }
        GraftCommand::Deploy(graft) => {
            load(socket, &graft.graft, |name| Request::GraftDeploy { name })?;
        }
        GraftCommand::Swap(graft) => {
            load(socket, &graft.graft, |name| Request::GraftSwap { name })?;
        }
        GraftCommand::Remove { name } => {
            let _: Done = socket.call(&Request::GraftRemove { name: name.clone() })?;
        }
        GraftCommand::New(args) => project::new(args)?,
        GraftCommand::Build(args) => project::build(args)?,
        GraftCommand::Check(args) => project::check(args)?,
        GraftCommand::Test(args) => trial::test(args)?,
        GraftCommand::Key(command) => package::key(command)?,
        GraftCommand::Revoke(args) => package::revoke(args, socket)?,
        GraftCommand::Sign(args) => package::sign(args)?,
        GraftCommand::Publish(args) => package::publish(args)?,
        GraftCommand::Index(args) => index::update(args)?,
        GraftCommand::Pull(args) => package::pull(args)?,
    }
    Ok(())
}

fn is_file(graft: &str) -> bool {
    graft.ends_with(".vtlg")
}

/// Has the daemon load a graft by name, or from a file that we open for it.
fn load(
    socket: &SocketArgs,
    graft: &str,
    request: impl Fn(Option<String>) -> Request,
) -> anyhow::Result<()> {
    let deployed: Deployed = if is_file(graft) {
        let file = File::open(graft).with_context(|| format!("cannot read {graft}"))?;
        daemon::ask(&socket.socket, |daemon| {
            daemon.call_handing(&request(None), &[file.as_fd()])
        })?
    } else {
        socket.call(&request(Some(graft.to_owned())))?
    };
    eprintln!(
        "{} {} is in the kernel: {} instructions, {:.1} ms",
        deployed.name, deployed.version, deployed.instructions, deployed.ms,
    );
    Ok(())
}

/// The directory of a graft's source.
#[derive(Debug, Args)]
pub(crate) struct ProjectArgs {
    /// The graft's directory, with its graft.toml
    #[arg(value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}
