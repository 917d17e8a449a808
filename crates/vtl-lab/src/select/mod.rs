//! `vtl select`: the part of VTL's choice that is done beforehand. `docs/select.md`.
//!
//! - [`campaign`]: what is measured; [`simulate`]: one transfer in virtual time; [`testbed`]: some by real kernels;
//!   [`measure`]: carries a campaign out; [`progress`]: how far it is;
//! - [`rows`]: what was measured, as CSV;
//! - [`train`]: decision trees of the rows; [`evaluate`]: how well they choose on links that they have not seen;
//! - [`compare`]: how far virtual time agrees with real kernels;
//! - [`explain`]: one choice, in words; [`model`]: the file that it may be by.

mod campaign;
mod compare;
mod evaluate;
mod explain;
mod measure;
mod model;
mod progress;
mod rows;
mod simulate;
mod testbed;
mod train;

use clap::Subcommand;
use serde::Serialize;
use vtl_cli::daemon::SocketArgs;
use vtl_cli::{lab, output};

use self::compare::CompareArgs;
use self::evaluate::EvaluateArgs;
use self::explain::ExplainArgs;
use self::measure::MeasureArgs;
use self::train::TrainArgs;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum SelectCommand {
    #[command(about = lab::EXPLAIN, after_help = "Examples:\n  \
        vtl select explain --path 192.0.2.7 --profile loss-sensitive       by what the daemon knows of the path\n  \
        vtl select explain --flow 17               why a connection of the carrier auto goes by what it does\n  \
        vtl select explain --rtt 600 --loss 2 --rate 10 --profile loss-sensitive --size 1MiB\n  \
        vtl select explain --rtt 20 --loss 0 --profile time-sensitive      without what is unknown\n\n\
        docs/select.md says how the choice is learned. Connections of the carrier auto are chosen for by it.")]
    Explain(ExplainArgs),
    /// Measure what transfers take by each carrier over many links: in virtual time, or by real kernels
    #[command(after_help = "Examples:\n  \
        vtl select measure rows.csv                              all; again, after an interrupt: the rest\n  \
        vtl select measure part2.csv --links 10000 --shard 2/8   a part of a larger campaign\n  \
        vtl select measure test.csv --links 300 --seed 1         links that no training has seen\n  \
        sudo vtl select measure testbed.csv --testbed --jobs 4   for `vtl select compare`\n\n\
        Rows are written as they come: an interrupt loses none but those that are being measured.")]
    Measure(MeasureArgs),
    /// Learn from measured rows to choose: decision trees
    #[command(after_help = "Examples:\n  \
        vtl select train rows.csv                            draws the trees\n  \
        vtl select train part*.csv --output model.jsonl       of all shards, for `--model`\n\n\
        The same rows give the same file, byte for byte.")]
    Train(TrainArgs),
    /// Say how well models choose on links that they were not trained with, and what a wrong choice costs
    #[command(after_help = "Examples:\n  \
        vtl select evaluate rows.csv                         models of two thirds of the links each, on the rest\n  \
        vtl select evaluate test.csv --model model.jsonl      a model, on rows that it was not trained with")]
    Evaluate(EvaluateArgs),
    /// Say how far virtual time agrees with what was measured by real kernels
    #[command(after_help = "Example: vtl select compare testbed.csv\n\n\
        The testbed's cases are simulated again, with the same losses on average.")]
    Compare(CompareArgs),
}

/// Runs a subcommand of `vtl select`.
pub(crate) fn run(command: &SelectCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        SelectCommand::Explain(args) => explain::run(args, socket),
        SelectCommand::Measure(args) => measure::run(args),
        SelectCommand::Train(args) => train::run(args),
        SelectCommand::Evaluate(args) => evaluate::run(args),
        SelectCommand::Compare(args) => compare::run(args),
    }
}

/// Prints a report, for people or for machines.
fn show<T: Serialize>(
    report: &T,
    json: bool,
    text: impl FnOnce(&T) -> String,
) -> anyhow::Result<()> {
    output::print(&match json {
        true => serde_json::to_string_pretty(report)? + "\n",
        false => text(report),
    })?;
    Ok(())
}
