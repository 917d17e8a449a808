//! `vtl-lab`, the program behind `vtl bench`, `vtl demo`, `vtl select` and `vtl testbed`: hosts and links on one machine,
//! and what is measured and shown on them.
//!
//! [`child`], [`daemons`], [`download`], [`nginx`], [`payload`], [`programs`], [`provenance`] and [`spread`] are
//! what its commands share.
#![cfg_attr(test, allow(non_snake_case))] // tests are named `function__case`

mod bench;
mod child;
mod cli;
mod daemons;
mod demo;
mod download;
mod graft_test;
mod interrupt;
mod nginx;
mod payload;
mod programs;
mod provenance;
mod select;
mod spread;
mod testbed;

use std::process::ExitCode;

use clap::Parser;
use vtl_cli::failure::{self, INTERRUPTED, PERMISSION};
use vtl_cli::manual;

use crate::cli::{Cli, Command};
use crate::interrupt::Interrupted;

fn main() -> ExitCode {
    let Cli { socket, command } = Cli::parse();
    let outcome = match command {
        Command::Testbed(args) => match testbed::run(args) {
            // `testbed exec` ends as the command that it ran.
            Ok(status) => return status,
            Err(err) => Err(err),
        },
        Command::Demo(args) => demo::run(&args),
        Command::Bench(command) => bench::run(&command),
        Command::Select(command) => select::run(&command, &socket),
        Command::GraftTest(args) => graft_test::run(&args),
        Command::Completions(args) => manual::write_completions(cli::whole(), args.shell),
        Command::Man(args) => manual::write_pages(cli::whole(), &args.dir),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => failure::report(&err, status(&err)),
    }
}

/// The exit status that goes with an error.
fn status(err: &anyhow::Error) -> u8 {
    if err.downcast_ref::<Interrupted>().is_some() {
        return INTERRUPTED;
    }
    match err.downcast_ref() {
        Some(vtl_testbed::Error::NotRoot) => PERMISSION,
        _ => failure::status(err),
    }
}
