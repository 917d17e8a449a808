//! `vtl select measure`, `train` and `evaluate`: the part of VTL's choice that is done beforehand. `docs/select.md`.
//!
//! - [`campaign`]: what is measured; [`simulate`]: one transfer in virtual time; [`measure`]: carries a campaign out;
//! - [`rows`]: what was measured, as CSV;

mod campaign;
mod measure;
mod rows;
mod simulate;

use clap::Subcommand;

use self::measure::MeasureArgs;

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum SelectCommand {
    /// Measure, in virtual time, what transfers take by each carrier over many links
    #[command(
        after_help = "Examples:\n  \
        vtl select measure bench/select/rows.csv             all rows; again, after an interrupt: the rest\n  \
        vtl select measure part2.csv --links 10000 --shard 2/8   a part of a larger campaign"
    )]
    Measure(MeasureArgs),
}

/// Runs a subcommand of `vtl select`.
pub(crate) fn run(command: &SelectCommand) -> anyhow::Result<()> {
    match command {
        SelectCommand::Measure(args) => measure::run(args),
    }
}
