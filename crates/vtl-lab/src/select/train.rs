//! `vtl select train`: from labelled cases to a model.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use vtl_cli::output;
use vtl_core::select::{CLASSES, Features};
use vtl_tree::{Case, DataSet, Model, Options};

use super::rows::{self, Row};

/// How trees are grown: the least weight of two branches, and the confidence of pruning.
pub(super) const MIN_CASES: f64 = 5.0;
/// See [`MIN_CASES`].
pub(super) const CONFIDENCE: f64 = 0.25;

/// Arguments of `vtl select train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Files of `vtl select measure`
    #[arg(required = true, value_name = "ROWS.csv")]
    rows: Vec<PathBuf>,
    /// Write the model into this file, as JSON; otherwise the tree is drawn
    #[arg(long, value_name = "MODEL.json")]
    output: Option<PathBuf>,
}

/// Runs `vtl select train`.
pub(super) fn run(args: &TrainArgs) -> Result<()> {
    let rows = rows::load(&args.rows)?;
    let model = model(&rows)?;
    match &args.output {
        Some(path) => fs::write(path, file(&model)).with_context(|| format!("{}", path.display()))?,
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
    let options = Options {
        min_cases: MIN_CASES,
        confidence: CONFIDENCE,
        ..Options::default()
    };
    Ok(vtl_tree::train(&data, &options)?)
}

/// A row as the choice may see it: with everything known, without the size, without the rate, without both. Together they
/// weigh one.
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

fn cases(row: &Row) -> Vec<Case> {
    let views = views(&row.features);
    let weight = 1.0 / views.len() as f64;
    let case = |view: &Features| Case {
        values: view.values(),
        class: row.best(),
        weight,
    };
    views.iter().map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../bench/select/rows.csv"
    );

    #[test]
    fn model__of_the_committed_rows_is_the_committed_one() {
        let rows = rows::load(&[ROWS]).unwrap();
        assert!(rows.len() >= 3000, "{} rows", rows.len());
        let trained = file(&model(&rows).unwrap());
        assert!(
            trained == vtl_core::select::EMBEDDED,
            "bench/select/rows.csv gives another model than crates/vtl-core/src/select/model.json: see docs/select.md"
        );
        // Whatever the order of the rows.
        let mut turned = rows;
        turned.reverse();
        assert_eq!(model(&turned).unwrap().classes(), CLASSES);
    }

    #[test]
    fn cases__weigh_one_together() {
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
