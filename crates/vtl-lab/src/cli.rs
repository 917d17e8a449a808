//! The command line: that of `vtl`, as far as it is done here.

use clap::{CommandFactory, Parser, Subcommand};
use vtl_cli::daemon::SocketArgs;
use vtl_cli::{CompletionsArgs, ManArgs, lab};

use crate::bench::BenchCommand;
use crate::demo::DemoArgs;
use crate::graft_test::GraftTestArgs;
use crate::select::SelectCommand;
use crate::testbed::TestbedArgs;

/// Hosts and links on this machine, and what is measured on them
///
/// Started by `vtl bench`, `vtl demo`, `vtl select` and `vtl testbed`.
#[derive(Debug, Parser)]
#[command(name = "vtl-lab", bin_name = "vtl", version, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) socket: SocketArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(about = lab::TESTBED, long_about = None)]
    Testbed(TestbedArgs),
    #[command(about = lab::DEMO, after_help = "Examples:\n  \
        vtl demo                                 100 Mbit/s, 100 ms, 2 % loss\n  \
        vtl demo --runs 5 --loss 5 --json r.json  medians of five, rows into r.json\n\n\
        Needs root, nginx and curl. Leaves nothing behind but the files below --out.")]
    Demo(DemoArgs),
    #[command(subcommand, about = lab::BENCH)]
    Bench(BenchCommand),
    #[command(subcommand, about = lab::SELECT)]
    Select(SelectCommand),
    /// Carry data over a graft that was built (started by `vtl graft test`)
    #[command(hide = true)]
    GraftTest(GraftTestArgs),
    /// Print a completion script for `vtl` (started by `vtl completions`)
    #[command(hide = true)]
    Completions(CompletionsArgs),
    /// Write the manual pages of `vtl` (started by `vtl man`)
    #[command(hide = true)]
    Man(ManArgs),
}

/// The command line of `vtl`, with what is done here in place of the names that `vtl` has for it.
pub(crate) fn whole() -> clap::Command {
    let (lab, vtl) = (Cli::command(), vtl_cli::command());
    let names = vtl.get_subcommands().map(clap::Command::get_name);
    // Each is taken out and added again, so that they keep their order.
    names.fold(vtl.clone(), |whole, name| {
        whole.mut_subcommand(name, |stub| {
            match lab.find_subcommand(name).filter(|own| !own.is_hide_set()) {
                Some(own) if stub.has_subcommands() => filled(stub, own),
                Some(own) => own.clone().display_order(stub.get_display_order()),
                None => stub,
            }
        })
    })
}

/// A command of `vtl` of which a part is done here, with that part in place of the names that `vtl` has for it.
fn filled(stub: clap::Command, own: &clap::Command) -> clap::Command {
    own.get_subcommands().fold(stub, |stub, own| {
        stub.mut_subcommand(own.get_name(), |name| {
            own.clone().display_order(name.get_display_order())
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cli__is_consistent() {
        Cli::command().debug_assert();
        whole().debug_assert();
    }

    #[test]
    fn whole__has_all_commands_of_vtl_in_their_order_and_the_arguments_of_these() {
        let (vtl, whole) = (vtl_cli::command(), whole());
        let names = |command: &clap::Command| -> Vec<String> {
            let commands = command.get_subcommands();
            commands.map(|c| c.get_name().to_owned()).collect()
        };
        assert_eq!(names(&whole), names(&vtl));
        for (command, stub) in whole.get_subcommands().zip(vtl.get_subcommands()) {
            assert_eq!(command.get_display_order(), stub.get_display_order());
            assert_eq!(command.is_hide_set(), stub.is_hide_set());
        }
        let lab = Cli::command();
        for command in lab.get_subcommands().filter(|c| !c.is_hide_set()) {
            let name = command.get_name();
            let stub = vtl.find_subcommand(name).expect(name);
            let made = whole.find_subcommand(name).expect(name);
            match stub.has_subcommands() {
                true => assert_eq!(names(made), names(stub)),
                false => assert_eq!(names(made), names(command)),
            }
            for below in command.get_subcommands() {
                let made = made.find_subcommand(below.get_name());
                let made = made
                    .unwrap_or_else(|| panic!("{}", below.get_name()))
                    .get_arguments();
                assert_eq!(made.count(), below.get_arguments().count());
            }
            assert_eq!(
                format!("{:?}", stub.get_about()),
                format!("{:?}", command.get_about())
            );
        }
    }
}
