//! `vtl select measure`, `train` and `evaluate`: the part of VTL's choice that is done beforehand. `docs/select.md`.
//!
//! - [`campaign`]: what is measured; [`simulate`]: one transfer in virtual time; [`measure`]: carries a campaign out;
//! - [`rows`]: what was measured, as CSV;
//! - [`train`]: a tree of the rows; [`evaluate`]: how well trees choose on links that they have not seen.

mod campaign;
mod evaluate;
mod measure;
mod rows;
mod simulate;
mod train;

use clap::Subcommand;

use self::evaluate::EvaluateArgs;
use self::measure::MeasureArgs;
use self::train::TrainArgs;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum SelectCommand {
    /// Measure, in virtual time, what transfers take by each carrier over many links
    #[command(after_help = "Examples:\n  \
        vtl select measure bench/select/rows.csv             all rows; again, after an interrupt: the rest\n  \
        vtl select measure part2.csv --links 10000 --shard 2/8   a part of a larger campaign")]
    Measure(MeasureArgs),
    /// Learn from measured rows to choose: a decision tree
    #[command(after_help = "Examples:\n  \
        vtl select train bench/select/rows.csv                       draws the tree\n  \
        vtl select train part*.csv --output model.json               of all shards, for the program\n\n\
        The same rows give the same file, byte for byte.")]
    Train(TrainArgs),
    /// Say how well trees choose on links that they were not trained with, and what a wrong choice costs
    #[command(after_help = "Example: vtl select evaluate bench/select/rows.csv")]
    Evaluate(EvaluateArgs),
}

/// Runs a subcommand of `vtl select`.
pub(crate) fn run(command: &SelectCommand) -> anyhow::Result<()> {
    match command {
        SelectCommand::Measure(args) => measure::run(args),
        SelectCommand::Train(args) => train::run(args),
        SelectCommand::Evaluate(args) => evaluate::run(args),
    }
}
