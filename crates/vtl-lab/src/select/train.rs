//! `vtl select train`: from labelled cases to a model.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use vtl_cli::output;
use vtl_core::select::{CLASSES, Features, TIE};
use vtl_tree::{Case, DataSet, Model, Options};

use super::progress::Progress;
use super::rows::{self, Row};

/// The least weight of two branches of a test. As no leaf is pruned, it alone keeps the tree from learning chance. This
/// and the next two are what `vtl select evaluate` liked best of some on `bench/select/rows.csv`.
const MIN_CASES: f64 = 20.0;
/// A choice that takes so much longer than the best, as a share, is as bad as any worse one.
const CAP: f64 = 1.5;
/// What the whole row weighs of its views together.
const WHOLE: f64 = 0.8;
/// The least weight of a case that the library takes.
const MIN_WEIGHT: f64 = 1e-3;

/// Arguments of `vtl select train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Files of `vtl select measure`
    #[arg(required = true, value_name = "ROWS.csv")]
    rows: Vec<PathBuf>,
    /// Write the model into this file, as JSON; otherwise the tree is drawn
    #[arg(long, value_name = "MODEL.json")]
    output: Option<PathBuf>,
    /// Write the model to standard output, as JSON
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

/// Runs `vtl select train`.
pub(super) fn run(args: &TrainArgs) -> Result<()> {
    let rows = rows::load(&args.rows)?;
    let progress = Progress::new(1, "trees");
    let model = model(&rows)?;
    drop(progress);
    match &args.output {
        Some(path) => {
            fs::write(path, file(&model)).with_context(|| format!("{}", path.display()))?;
        }
        None if args.json => output::print(&file(&model))?,
        None => output::print(&model.to_string())?,
    }
    Ok(())
}

/// A model file's content.
pub(super) fn file(model: &Model) -> String {
    model.to_json().trim_end().to_owned() + "\n"
}

/// Trains on rows; the same ones give the same model.
///
/// # Errors
/// There is no row.
pub(super) fn model(rows: &[Row]) -> Result<Model> {
    let cases = rows.iter().flat_map(cases).collect();
    let classes = CLASSES.map(str::to_owned).into();
    let data = DataSet::new(Features::attributes(), classes, cases)?;
    // Pruning minimises errors, all of which count alike for it; here a leaf is right if it costs least.
    let options = Options {
        min_cases: MIN_CASES,
        prune: false,
        global: false,
        ..Options::default()
    };
    Ok(vtl_tree::train(&data, &options)?)
}

/// A row as the choice may see it: with everything known, without the size, without the rate, without both. Together they
/// weigh what the row does.
pub(super) fn views(features: &Features) -> Vec<Features> {
    let mut views = vec![*features];
    if features.bytes.is_some() {
        views.push(Features {
            bytes: None,
            ..*features
        });
    }
    for n in 0..views.len() {
        views.push(Features {
            rate_mbit: None,
            ..views[n]
        });
    }
    views
}

/// A row as cases: one of each class, with what the class wins over the worst as its weight. So the class with most
/// weight at a leaf is the one that costs least over the leaf's rows (N. Abe, B. Zadrozny, J. Langford: *An Iterative
/// Method for Multi-class Cost-sensitive Learning*, KDD 2004). What ties with the best costs nothing.
fn cases(row: &Row) -> Vec<Case> {
    let cost = |class| match row.regret(class) {
        Some(regret) if regret <= TIE => 0.0,
        // The root, so that many small losses count beside a few large ones.
        Some(regret) => (regret.min(CAP) / CAP).sqrt(),
        None => 1.0,
    };
    let costs: Vec<f64> = (0..CLASSES.len()).map(cost).collect();
    let most = costs.iter().copied().fold(0.0, f64::max);
    let views = views(&row.features);
    let case = |place: usize, class: usize| Case {
        values: views[place].values(),
        class,
        weight: (most - costs[class])
            * match place {
                0 => WHOLE,
                _ => (1.0 - WHOLE) / (views.len() - 1) as f64,
            },
    };
    let places = 0..views.len();
    let cases = places.flat_map(|place| (0..CLASSES.len()).map(move |class| (place, class)));
    let cases = cases.map(|(place, class)| case(place, class));
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
        let trained = file(&model(&rows).unwrap());
        assert!(
            trained == vtl_core::select::EMBEDDED,
            "bench/select/rows.csv gives another model than crates/vtl-core/src/select/model.json: see docs/select.md"
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
        let cases = cases(&row);
        let weight = |class| -> f64 {
            let of = cases.iter().filter(|case| case.class == class);
            of.map(|case| case.weight).sum()
        };
        for (class, won) in [1.0, 0.5, 1.0, 0.0, 0.0].into_iter().enumerate() {
            assert!(
                (weight(class) - won).abs() < 1e-9,
                "{class}: {}",
                weight(class)
            );
        }
        assert_eq!(cases.len(), 6, "with the rate, and without it");
    }

    #[test]
    fn views__lack_what_a_choice_may_lack() {
        let known = Features {
            rtt_ms: Some(10.0),
            rate_mbit: Some(10.0),
            bytes: Some(4096.0),
            ..Features::default()
        };
        assert_eq!(views(&known).len(), 4);
        let stream = Features {
            bytes: None,
            ..known
        };
        assert_eq!(views(&stream).len(), 2);
        assert_eq!(views(&known)[3].rate_mbit, None);
        assert_eq!(views(&known)[3].bytes, None);
    }
}
