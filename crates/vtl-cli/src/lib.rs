//! The inside of the `vtl` command. What is public is what `vtl-lab` shares with it.
#![cfg_attr(test, allow(non_snake_case))] // tests are named `function__case`

mod cli;
pub mod daemon;
pub mod doctor;
mod events;
mod exchange;
pub mod failure;
mod flow;
mod gateway;
pub mod graft;
mod hook;
pub mod lab;
pub mod manual;
pub mod output;
mod path;
mod peer;
pub mod programs;
pub mod progress;
mod registry;
mod rule;
mod select;
mod status;
mod top;
mod transfer;
mod tun;
pub mod units;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use cli::{Cli, Command};
pub use cli::{CompletionsArgs, ManArgs};

/// Does what the arguments of this process say.
pub fn main() -> ExitCode {
    match run(&env::args_os().collect::<Vec<_>>()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => failure::report(&err, failure::status(&err)),
    }
}

/// The command line, with `vtl-lab`'s commands as `vtl` knows them: by name only.
pub fn command() -> clap::Command {
    Cli::command()
}

fn run(arguments: &[OsString]) -> anyhow::Result<()> {
    lab::exec_help(arguments)?;
    let cli = Cli::parse_from(arguments);
    let socket = &cli.socket;
    match cli.command {
        Command::Run(args) => hook::exec(&args, socket),
        Command::Hook(command) => hook::run(&command, socket),
        Command::Rule(command) => rule::run(&command, socket),
        Command::Flow(command) => flow::run(&command, socket),
        Command::Path(command) => path::run(&command, socket),
        Command::Top(args) => top::run(&args, socket),
        Command::Events(args) => events::run(&args, socket),
        Command::Peer(command) => peer::run(&command, socket),
        Command::Graft(command) => graft::run(&command, socket),
        Command::Send(args) => exchange::send(&args, socket),
        Command::Recv(args) => exchange::recv(&args, socket),
        Command::Gateway(command) => gateway::run(&command, socket),
        Command::Tun(command) => tun::run(&command, socket),
        Command::Status { json } => status::run(socket, json),
        Command::Testbed(args) => args.exec(&["testbed"], socket),
        Command::Demo(args) => args.exec(&["demo"], socket),
        Command::Bench(args) => args.exec(&["bench"], socket),
        Command::Select(command) => select::run(&command, socket),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::pages(&args),
    }
}
