//! `vtl select evaluate`: how well models choose on links that they were not trained with.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use vtl_core::profile::Profile;
use vtl_core::select::{CLASSES, Features, Selector, TIE};
use vtl_tree::evaluation::Confusion;

use super::progress::Progress;
use super::rows::{self, Row};
use super::train;

/// Into how many parts the links are divided; each is evaluated by a model of the others.
const FOLDS: usize = 3;

/// Arguments of `vtl select evaluate`.
#[derive(Debug, Args)]
pub(crate) struct EvaluateArgs {
    /// Files of `vtl select measure`
    #[arg(required = true, value_name = "ROWS.csv")]
    rows: Vec<PathBuf>,
    /// Evaluate this model, of `vtl select train`, instead of models of two thirds of the links each. It must not have been
    /// trained with these rows
    #[arg(long, value_name = "MODEL.jsonl")]
    model: Option<PathBuf>,
    /// Write JSON for machines instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `vtl select evaluate`.
pub(super) fn run(args: &EvaluateArgs) -> Result<()> {
    let model = args.model.as_deref().map(super::model::read).transpose()?;
    let report = Report::new(&rows::load(&args.rows)?, model)?;
    super::show(&report, args.json, Report::text)
}

/// How a way to choose does over rows.
#[derive(Debug, Serialize)]
struct Score {
    /// Who chooses.
    choice: String,
    /// The share of rows where the choice is at most a tie's width slower than the best.
    accuracy: f64,
    /// The share of rows where the choice is more than a tie's width slower than the default.
    behind_default: f64,
    /// How much longer the choice takes than the best, as a share.
    #[serde(flatten)]
    regret: Regret,
}

#[derive(Debug, Default, Serialize)]
struct Regret {
    mean_regret: f64,
    median_regret: f64,
    p90_regret: f64,
    p99_regret: f64,
    worst_regret: f64,
}

impl Score {
    /// What `choices` come to over rows, of which there is at least one.
    fn new(choice: &str, rows: &[&Row], choices: &[usize]) -> Self {
        let cost = |row: &Row, class: usize| row.costs[class].unwrap_or(f64::INFINITY);
        let chosen = || rows.iter().zip(choices);
        let mut regrets: Vec<f64> = chosen()
            .map(|(row, class)| cost(row, *class) / row.min_cost() - 1.0)
            .collect();
        let behind = chosen()
            .filter(|(row, class)| cost(row, **class) > cost(row, 0) * (1.0 + TIE))
            .count();
        regrets.sort_unstable_by(f64::total_cmp);
        let n = regrets.len();
        let percentile = |percent: usize| regrets[(n * percent).div_ceil(100).max(1) - 1];
        let right = regrets.iter().filter(|regret| **regret <= TIE).count();
        Self {
            choice: choice.to_owned(),
            accuracy: right as f64 / n as f64,
            behind_default: behind as f64 / n as f64,
            regret: Regret {
                mean_regret: regrets.iter().sum::<f64>() / n as f64,
                median_regret: percentile(50),
                p90_regret: percentile(90),
                p99_regret: percentile(99),
                worst_regret: percentile(100),
            },
        }
    }
}

/// How often a class was chosen for what it is best for.
#[derive(Debug, Serialize)]
struct OfClass {
    class: &'static str,
    /// Rows whose label it is.
    rows: usize,
    precision: Option<f64>,
    recall: Option<f64>,
    /// How often each class was chosen for it, in the order of the classes.
    chosen: Vec<usize>,
}

#[derive(Debug, Serialize)]
struct Report {
    rows: usize,
    /// Rows that say nothing of a choice, as not every carrier was measured.
    left_out: usize,
    links: usize,
    /// How many models there are, each of the links that the other ones have not; `None`: one model of other rows.
    folds: Option<usize>,
    tie: f64,
    scores: Vec<Score>,
    /// Of the models with everything known, for each profile.
    profiles: Vec<Score>,
    classes: Vec<OfClass>,
    /// The rows where the models lose most.
    worst: Vec<Worst>,
}

/// A row where a choice loses much.
#[derive(Debug, Serialize)]
struct Worst {
    link: String,
    rtt_ms: Option<f64>,
    rate_mbit: Option<f64>,
    loss_percent: Option<f64>,
    loss_burst: Option<f64>,
    queue_packets: u32,
    profile: Option<&'static str>,
    bytes: Option<f64>,
    chosen: &'static str,
    best: &'static str,
    regret: f64,
}

/// What is known when choosing.
fn known(view: &Features, rate: bool, size: bool) -> Features {
    Features {
        rate_mbit: view.rate_mbit.filter(|_| rate),
        bytes: view.bytes.filter(|_| size),
        ..*view
    }
}

/// For each row, a class that was chosen by a model of other links; `view` says what the choice sees.
fn held_out(
    rows: &[Row],
    selectors: &[Selector],
    folds: &[usize],
    view: impl Fn(&Features) -> Features,
) -> Vec<usize> {
    let choose = |(row, fold): (&Row, &usize)| {
        let choice = selectors[*fold].choose(&view(&row.features));
        let place = CLASSES.into_iter().position(|class| class == choice);
        place.expect("a choice is one of the classes")
    };
    rows.iter().zip(folds).map(choose).collect()
}

/// For each row, the fold of its link.
fn folds(rows: &[Row]) -> Result<(Vec<usize>, usize)> {
    let mut links: BTreeMap<&str, usize> = rows.iter().map(|row| (row.link.as_str(), 0)).collect();
    for (number, fold) in links.values_mut().enumerate() {
        *fold = number % FOLDS;
    }
    let count = links.len();
    ensure!(
        count >= FOLDS,
        "{count} links: there must be at least {FOLDS}, to train with some and evaluate with others"
    );
    Ok((
        rows.iter().map(|row| links[row.link.as_str()]).collect(),
        count,
    ))
}

/// For each row the fold of its link, how many links there are, and for each fold a model of the others.
fn models(rows: &[Row]) -> Result<(Vec<usize>, usize, Vec<Selector>)> {
    let (folds, links) = folds(rows)?;
    let progress = Progress::new(FOLDS, "models");
    let mut selectors = Vec::new();
    for fold in 0..FOLDS {
        let others = rows.iter().zip(&folds).filter(|(_, f)| **f != fold);
        let others: Vec<Row> = others.map(|(row, _)| row.clone()).collect();
        let model = train::file(&train::models(&others)?);
        selectors.push(Selector::from_json(model.as_bytes())?);
        progress.add_one();
    }
    Ok((folds, links, selectors))
}

impl Report {
    /// Of a model, or of models of all links but those that they choose for.
    fn new(given: &[Row], model: Option<Selector>) -> Result<Self> {
        // A choice must have been measured to be judged.
        let complete = given.iter().filter(|row| row.is_complete());
        let rows: Vec<Row> = complete.cloned().collect();
        ensure!(
            !rows.is_empty(),
            "there is no row of which all carriers were measured: rows of testbeds are for `vtl select compare`"
        );
        let is_given = model.is_some();
        let (folds, links, selectors) = match model {
            Some(model) => {
                let links: BTreeSet<&str> = rows.iter().map(|row| row.link.as_str()).collect();
                (vec![0; rows.len()], links.len(), vec![model])
            }
            None => models(&rows)?,
        };
        let by_model = |rate, size| held_out(&rows, &selectors, &folds, |f| known(f, rate, size));
        let all: Vec<&Row> = rows.iter().collect();
        let score = |name: &str, choices: &[usize]| Score::new(name, &all, choices);
        let chosen = by_model(true, true);
        let labels: Vec<usize> = rows.iter().map(Row::best).collect();
        let mut scores = vec![
            score("model", &chosen),
            score("model, rate unknown", &by_model(false, true)),
            score("model, size unknown", &by_model(true, false)),
            score("model, both unknown", &by_model(false, false)),
        ];
        for (class, name) in CLASSES.into_iter().enumerate() {
            scores.push(score(&format!("always {name}"), &vec![class; rows.len()]));
        }
        scores.push(score("oracle (ties: the simplest)", &labels));
        let profiles = Profile::ALL.into_iter().filter_map(|profile| {
            let of = rows.iter().zip(&chosen);
            let of = of.filter(|(row, _)| row.features.profile == Some(profile));
            let (rows, choices): (Vec<&Row>, Vec<usize>) = of.unzip();
            (!rows.is_empty()).then(|| Score::new(profile.name(), &rows, &choices))
        });
        Ok(Self {
            rows: rows.len(),
            left_out: given.len() - rows.len(),
            links,
            folds: (!is_given).then_some(FOLDS),
            tie: TIE,
            scores,
            profiles: profiles.collect(),
            classes: of_classes(&labels, &chosen),
            worst: worst(&rows, &chosen),
        })
    }

    fn text(&self) -> String {
        let by = match self.folds {
            Some(folds) => format!("each chosen by a model of the other links ({folds} folds)"),
            None => "chosen by the model".to_owned(),
        };
        let left_out = match self.left_out {
            0 => String::new(),
            n => format!(" {n} rows are left out, as not every carrier was measured."),
        };
        let mut out = format!(
            "{} cases on {} links, {by}.{left_out}\nRight: at most {} % slower than the best. Behind tcp: more than that slower than \
             the default. Regret: how much\nlonger the choice takes than the best, per cent: mean to worst.\n\n",
            self.rows,
            self.links,
            self.tie * 100.0
        );
        for scores in [&self.scores, &self.profiles] {
            let line = format!(
                "{:30}{:>9}{:>12}{:>10}{:>10}{:>10}{:>10}{:>10}\n",
                "", "right", "behind tcp", "mean", "median", "p90", "p99", "worst"
            );
            out += &line;
            for score in scores {
                let regret = &score.regret;
                let (right, behind) = (score.accuracy * 100.0, score.behind_default * 100.0);
                let _ = write!(out, "{:30}{right:7.1} %{behind:10.1} %", score.choice);
                for regret in [
                    regret.mean_regret,
                    regret.median_regret,
                    regret.p90_regret,
                    regret.p99_regret,
                    regret.worst_regret,
                ] {
                    let _ = write!(out, "{:10.1}", regret * 100.0);
                }
                out.push('\n');
            }
            out.push('\n');
        }
        let _ = write!(
            out,
            "{:16}{:>8}{:>11}{:>9}  chosen:",
            "label", "cases", "precision", "recall"
        );
        for class in CLASSES {
            let _ = write!(out, "{class:>14}");
        }
        out.push('\n');
        for of in &self.classes {
            let percent = |x: Option<f64>| x.map_or("-".into(), |x| format!("{:.1}", x * 100.0));
            let (precision, recall) = (percent(of.precision), percent(of.recall));
            let _ = write!(
                out,
                "{:16}{:8}{precision:>11}{recall:>9}         ",
                of.class, of.rows
            );
            for count in &of.chosen {
                let _ = write!(out, "{count:14}");
            }
            out.push('\n');
        }
        out += "\nWorst:\n";
        for case in &self.worst {
            let number = |x: Option<f64>| x.map_or("-".into(), |x| x.to_string());
            let _ = writeln!(
                out,
                "  {}: {} ms, {} Mbit/s, {} %, bursts of {}, queue {}, {}, {} bytes: {} instead of {}, {:.0} % longer",
                case.link,
                number(case.rtt_ms),
                number(case.rate_mbit),
                number(case.loss_percent),
                number(case.loss_burst),
                case.queue_packets,
                case.profile.unwrap_or("no profile"),
                number(case.bytes),
                case.chosen,
                case.best,
                case.regret * 100.0
            );
        }
        out
    }
}

fn of_classes(labels: &[usize], chosen: &[usize]) -> Vec<OfClass> {
    let mut confusion = Confusion::new(&CLASSES.map(str::to_owned));
    for (label, class) in labels.iter().zip(chosen) {
        confusion.add(*label, *class, 1.0);
    }
    let of = |(class, name)| {
        let counts = (0..CLASSES.len()).map(|other| confusion.count(class, other) as usize);
        let chosen: Vec<usize> = counts.collect();
        OfClass {
            class: name,
            rows: chosen.iter().sum(),
            precision: confusion.precision(class),
            recall: confusion.recall(class),
            chosen,
        }
    };
    CLASSES.into_iter().enumerate().map(of).collect()
}

/// The ten rows where choices lose most.
fn worst(rows: &[Row], chosen: &[usize]) -> Vec<Worst> {
    let mut all: Vec<(f64, &Row, usize)> = (rows.iter().zip(chosen))
        .filter_map(|(row, class)| Some((row.regret(*class)?, row, *class)))
        .collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    let case = |(regret, row, class): &(f64, &Row, usize)| Worst {
        link: row.link.clone(),
        rtt_ms: row.features.rtt_ms,
        rate_mbit: row.features.rate_mbit,
        loss_percent: row.features.loss_percent,
        loss_burst: row.features.loss_burst,
        queue_packets: row.queue,
        profile: row.features.profile.map(Profile::name),
        bytes: row.features.bytes,
        chosen: CLASSES[*class],
        best: CLASSES[row.best()],
        regret: *regret,
    };
    all.iter().take(10).map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select::rows::Origin;

    /// Twelve links on which loss decides between two carriers.
    fn rows() -> Vec<Row> {
        let row = |n: u32| Row {
            origin: Origin::Sim,
            link: format!("link-{:02}", n / 20),
            features: Features {
                rtt_ms: Some(50.0 + f64::from(n % 20)),
                rate_mbit: Some(10.0),
                loss_percent: Some(if n.is_multiple_of(2) { 0.0 } else { 2.0 }),
                loss_burst: None,
                profile: Some(Profile::LossSensitive),
                bytes: Some(1e6 + f64::from(n)),
            },
            queue: 64,
            costs: [
                Some(if n.is_multiple_of(2) { 100.0 } else { 300.0 }),
                Some(200.0),
                Some(110.0),
                Some(400.0),
                Some(400.0),
                None,
            ],
        };
        (0..240).map(row).collect()
    }

    #[test]
    fn report__a_model_finds_what_decides() {
        let report = Report::new(&rows(), None).unwrap();
        let score = |name: &str| report.scores.iter().find(|s| s.choice == name).unwrap();
        let model = score("model");
        assert_eq!((model.accuracy, model.regret.worst_regret), (1.0, 0.0));
        assert_eq!(report.classes[0].chosen, [120, 0, 0, 0, 0]);
        assert_eq!(report.classes[2].chosen, [0, 0, 120, 0, 0]);
        let default = score("always tcp");
        assert_eq!((default.accuracy, default.behind_default), (0.5, 0.0));
        assert_eq!(score("always graft:stream").behind_default, 0.5);
        assert_eq!(default.regret.median_regret, 0.0);
        assert!((default.regret.worst_regret - (300.0 / 110.0 - 1.0)).abs() < 1e-9);
        assert_eq!(score("oracle (ties: the simplest)").accuracy, 1.0);
        assert_eq!(report.classes[0].rows, 120);
        assert!(report.text().contains("always tcp:bbr"));
    }

    #[test]
    fn report__of_a_model_and_rows_that_are_not_complete() {
        let mut rows = rows();
        let model = train::file(&train::models(&rows).unwrap());
        let model = || Some(Selector::from_json(model.as_bytes()).unwrap());
        rows[0].costs[3] = None;
        let report = Report::new(&rows[..40], model()).unwrap();
        assert_eq!((report.rows, report.left_out, report.links), (39, 1, 2));
        assert_eq!((report.folds, report.scores[0].accuracy), (None, 1.0));
        assert!(report.text().contains(" 1 rows are left out"));
        assert!(Report::new(&rows[..1], model()).is_err());
    }

    #[test]
    fn folds__keep_links_together() {
        let rows = rows();
        let (folds, links) = folds(&rows).unwrap();
        assert_eq!(links, 12);
        for (row, fold) in rows.iter().zip(&folds) {
            let same = rows
                .iter()
                .zip(&folds)
                .filter(|(other, _)| other.link == row.link);
            assert!(same.into_iter().all(|(_, other)| other == fold));
        }
        assert!(super::folds(&rows[..8]).is_err());
    }
}
