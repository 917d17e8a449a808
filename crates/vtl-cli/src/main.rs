//! The `vtl` command.
#![cfg_attr(test, allow(non_snake_case))] // tests are named `function__case`

mod cli;
mod doctor;
mod failure;
mod manual;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::pages(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => failure::report(&err),
    }
}
