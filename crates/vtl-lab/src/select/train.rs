//! `vtl select train`: from labelled cases to a model.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use vtl_cli::output;
use vtl_core::select::{CLASSES, Features, TIE, VIEWS};
use vtl_link::Random;
use vtl_tree::{Case, DataSet, Model, Options};

use super::progress::Progress;
use super::rows::{self, Row};

/// How many trees a model has, each on cases drawn by chance: the average keeps it from learning chance.
const TREES: usize = 12;
/// The least weight of two branches of a test. This and the next are what `vtl select evaluate` liked best of some on
/// `bench/select/rows.csv`.
const MIN_CASES: f64 = 20.0;
/// A choice that takes so much longer than the best, as a share, is as bad as any worse one.
const CAP: f64 = 1.5;
/// Where losses come in bursts of so many packets or more, the least cost of all but the class that waits for no timeout: a
/// burst that outlasts them makes a transfer a thousand times longer, so seldom that most links' runs have none.
const BURST: f64 = 2.0;
const SELDOM: f64 = 0.6;
/// The class that a burst does not stop.
const STEADY: &str = "graft:stream";
/// The least weight of a case that the library takes.
const MIN_WEIGHT: f64 = 1e-3;

/// Arguments of `vtl select train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Files of `vtl select measure`
    #[arg(required = true, value_name = "ROWS.csv")]
    rows: Vec<PathBuf>,
    /// Write the models into this file, a line of JSON for each of what may be unknown; otherwise the trees are drawn
    #[arg(long, value_name = "MODEL.jsonl")]
    output: Option<PathBuf>,
    /// Write the models to standard output, as in a file
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// Runs `vtl select train`.
pub(super) fn run(args: &TrainArgs) -> Result<()> {
    let rows = rows::load(&args.rows)?;
    let progress = Progress::new(1, "models");
    let models = models(&rows)?;
    drop(progress);
    match &args.output {
        Some(path) => {
            fs::write(path, file(&models)).with_context(|| format!("{}", path.display()))?;
        }
        None if args.json => output::print(&file(&models))?,
        None => {
            for (model, [rate, size]) in models.iter().zip(VIEWS) {
                let known = |is_known| if is_known { "known" } else { "unknown" };
                let (rate, size) = (known(rate), known(size));
                output::print(&format!("Rate {rate}, size {size}:\n\n{model}\n"))?;
            }
        }
    }
    Ok(())
}

/// A model file's content: a line for each model.
pub(super) fn file(models: &[Model]) -> String {
    models.iter().map(|model| model.to_json() + "\n").collect()
}

/// Trains on rows, a model for each of [`VIEWS`]; the same rows give the same models.
///
/// # Errors
/// There is no row for one of them.
pub(super) fn models(rows: &[Row]) -> Result<Vec<Model>> {
    (0..VIEWS.len()).map(|view| model(rows, view)).collect()
}

/// A model of what rows are to one of [`VIEWS`].
fn model(rows: &[Row], view: usize) -> Result<Model> {
    let cases = rows.iter().flat_map(|row| cases(row, view)).collect();
    let classes = CLASSES.map(str::to_owned).into();
    let data = DataSet::new(Features::attributes(), classes, cases)?;
    // Pruning minimises errors, all of which count alike for it; here a leaf is right if it costs least.
    let options = Options {
        min_cases: MIN_CASES,
        prune: false,
        global: false,
        ..Options::default()
    };
    let mut random = Random::new(0, view as u64);
    let draw = |n: usize| random.below(n as u64) as usize;
    Ok(vtl_tree::bag(&data, TREES, &options, draw)?)
}

/// A row as cases: one of each class, with what the class wins over the worst as its weight. So the class with most
/// weight at a leaf is the one that costs least over the leaf's rows (N. Abe, B. Zadrozny, J. Langford: *An Iterative
/// Method for Multi-class Cost-sensitive Learning*, KDD 2004). What ties with the best costs nothing.
fn cases(row: &Row, view: usize) -> Vec<Case> {
    let Some(features) = row.features.seen(view) else {
        return Vec::new();
    };
    let cost = |class| match row.regret(class) {
        Some(regret) if regret <= TIE => 0.0,
        // The fourth root, so that many small losses count beside a few large ones.
        Some(regret) => (regret.min(CAP) / CAP).powf(0.25),
        None => 1.0,
    };
    let has_bursts = (row.features.loss_burst).is_some_and(|packets| packets >= BURST);
    let cost = |class| match CLASSES[class] {
        STEADY => cost(class),
        _ if has_bursts => cost(class).max(SELDOM),
        _ => cost(class),
    };
    let costs: Vec<f64> = (0..CLASSES.len()).map(cost).collect();
    let max = costs.iter().copied().fold(0.0, f64::max);
    let case = |class: usize| Case {
        values: features.values(),
        class,
        weight: max - costs[class],
    };
    let cases = (0..CLASSES.len()).map(case);
    cases.filter(|case| case.weight >= MIN_WEIGHT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rows::Origin;

    const ROWS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/select/rows.csv");

    #[test]
    fn model__of_the_committed_rows_is_the_committed_one() {
        let rows = rows::load(&[ROWS]).unwrap();
        assert!(rows.len() >= 3000, "{} rows", rows.len());
        let trained = file(&models(&rows).unwrap());
        assert!(
            trained == vtl_core::select::EMBEDDED,
            "bench/select/rows.csv gives another model than crates/vtl-core/src/select/model.jsonl: see docs/select.md"
        );
    }

    #[test]
    fn cases__weigh_what_is_won() {
        let row = Row {
            origin: Origin::Sim,
            link: "a".into(),
            features: Features {
                rate_mbit: Some(1.0),
                ..Features::default()
            },
            queue: 64,
            costs: [
                Some(102.0),
                Some(137.5),
                Some(100.0),
                Some(900.0),
                None,
                None,
            ],
        };
        assert!(cases(&row, 0).is_empty(), "its size is unknown");
        let cases = cases(&row, 1);
        let weight = |class| -> f64 {
            let of = cases.iter().filter(|case| case.class == class);
            of.map(|case| case.weight).sum()
        };
        for (class, won) in [1.0, 1.0 - f64::powf(0.25, 0.25), 1.0, 0.0, 0.0]
            .into_iter()
            .enumerate()
        {
            assert!(
                (weight(class) - won).abs() < 1e-9,
                "{class}: {}",
                weight(class)
            );
        }
        assert_eq!(cases.len(), 3);
    }
}
