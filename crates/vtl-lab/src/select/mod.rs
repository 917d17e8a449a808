//! `vtl select`: the part of VTL's choice that is done beforehand. `docs/select.md`.
//!
//! - [`campaign`]: what is measured; [`simulate`]: one transfer in virtual time; [`testbed`]: some by real kernels;
//!   [`measure`]: carries a campaign out; [`progress`]: how far it is;
//! - [`rows`]: what was measured, as CSV;
//! - [`train`]: a tree of the rows; [`evaluate`]: how well trees choose on links that they have not seen;
//! - [`model`]: model files.

mod campaign;
mod evaluate;
mod measure;
mod model;
mod progress;
mod rows;
mod simulate;
mod testbed;
mod train;

use clap::Subcommand;

use self::evaluate::EvaluateArgs;
use self::measure::MeasureArgs;
use self::train::TrainArgs;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum SelectCommand {
    /// Measure what transfers take by each carrier over many links: in virtual time, or by real kernels
    #[command(after_help = "Examples:\n  \
        vtl select measure rows.csv                              all; again, after an interrupt: the rest\n  \
        vtl select measure part2.csv --links 10000 --shard 2/8   a part of a larger campaign\n  \
        vtl select measure test.csv --links 300 --seed 1         links that no training has seen\n  \
        sudo vtl select measure testbed.csv --testbed --jobs 4   for `vtl select compare`\n\n\
        Rows are written as they come: an interrupt loses none but those that are being measured.")]
    Measure(MeasureArgs),
    /// Learn from measured rows to choose: a decision tree
    #[command(after_help = "Examples:\n  \
        vtl select train rows.csv                            draws the tree\n  \
        vtl select train part*.csv --output model.json       of all shards, for `--model`\n\n\
        The same rows give the same file, byte for byte.")]
    Train(TrainArgs),
    /// Say how well trees choose on links that they were not trained with, and what a wrong choice costs
    #[command(after_help = "Examples:\n  \
        vtl select evaluate rows.csv                         trees of two thirds of the links each, on the rest\n  \
        vtl select evaluate test.csv --model model.json      a model, on rows that it was not trained with")]
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
