//! `vtl testbed` by itself, for working on this crate and for its tests: `vtl-testbed testbed up`, as the
//! emulator is started by those arguments.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use vtl_testbed::cli::{self, TestbedArgs};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Testbed(TestbedArgs),
}

fn main() -> ExitCode {
    let Command::Testbed(args) = Cli::parse().command;
    cli::run(args).unwrap_or_else(|e| {
        eprintln!("error: {e:#}");
        ExitCode::FAILURE
    })
}
