//! The `vtl` command.
#![cfg_attr(test, allow(non_snake_case))] // tests are named `function__case`

mod bench;
mod cli;
mod daemon;
mod demo;
mod doctor;
mod exchange;
mod failure;
mod flow;
mod graft;
mod hook;
mod manual;
mod output;
mod peer;
mod progress;
mod registry;
mod rule;
mod status;
mod transfer;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let socket = &cli.socket;
    let outcome = match cli.command {
        Command::Run(args) => hook::exec(&args, socket),
        Command::Hook(command) => hook::run(&command, socket),
        Command::Rule(command) => rule::run(&command, socket),
        Command::Flow(command) => flow::run(&command, socket),
        Command::Peer(command) => peer::run(&command, socket),
        Command::Graft(command) => graft::run(&command, socket),
        Command::Send(args) => exchange::send(&args, socket),
        Command::Recv(args) => exchange::recv(&args, socket),
        Command::Status { json } => status::run(socket, json),
        Command::Testbed(args) => match vtl_testbed::cli::run(args) {
            // `testbed exec` ends as the command that it ran.
            Ok(status) => return status,
            Err(err) => Err(err),
        },
        Command::Demo(args) => demo::run(&args),
        Command::Bench(command) => bench::run(&command),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::pages(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => failure::report(&err),
    }
}
