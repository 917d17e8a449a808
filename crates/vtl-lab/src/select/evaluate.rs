//! `vtl select evaluate`: how well trees choose on links that they were not trained with.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use vtl_cli::output;
use vtl_core::profile::Profile;
use vtl_core::select::{CLASSES, Features, Selector, TIE};
use vtl_tree::evaluation::Confusion;

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
    /// Write JSON for machines instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `vtl select evaluate`.
pub(super) fn run(args: &EvaluateArgs) -> Result<()> {
    let report = Report::new(&rows::load(&args.rows)?)?;
    output::print(&if args.json {
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        report.text()
    })?;
    Ok(())
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
            .map(|(row, class)| cost(row, *class) / row.least() - 1.0)
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
    links: usize,
    folds: usize,
    tie: f64,
    scores: Vec<Score>,
    /// Of the trees with everything known, for each profile.
    profiles: Vec<Score>,
    classes: Vec<OfClass>,
    /// Of the rows where the trees lose most: the link, profile, size, choice, label and regret.
    worst: Vec<String>,
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
        let place = CLASSES.into_iter().position(|class| class == choice.class);
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

impl Report {
    fn new(rows: &[Row]) -> Result<Self> {
        // A choice must have been measured to be judged.
        let rows: Vec<Row> = (rows.iter())
            .filter(|row| row.costs.iter().all(Option::is_some))
            .cloned()
            .collect();
        let (folds, links) = folds(&rows)?;
        let mut selectors = Vec::new();
        for fold in 0..FOLDS {
            let others = rows.iter().zip(&folds).filter(|(_, f)| **f != fold);
            let others: Vec<Row> = others.map(|(row, _)| row.clone()).collect();
            let model = train::file(&train::model(&others)?);
            selectors.push(Selector::from_json(model.as_bytes())?);
        }
        let by_tree = |rate, size| held_out(&rows, &selectors, &folds, |f| known(f, rate, size));
        let all: Vec<&Row> = rows.iter().collect();
        let score = |name: &str, choices: &[usize]| Score::new(name, &all, choices);
        let chosen = by_tree(true, true);
        let labels: Vec<usize> = rows.iter().map(Row::best).collect();
        let mut scores = vec![
            score("tree", &chosen),
            score("tree, rate unknown", &by_tree(false, true)),
            score("tree, size unknown", &by_tree(true, false)),
            score("tree, both unknown", &by_tree(false, false)),
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
            links,
            folds: FOLDS,
            tie: TIE,
            scores,
            profiles: profiles.collect(),
            classes: of_classes(&labels, &chosen),
            worst: worst(&rows, &chosen),
        })
    }

    fn text(&self) -> String {
        let mut out = format!(
            "{} cases on {} links, each chosen by a tree of the other links ({} folds). Right: at most {} % slower than the \
             best. Behind tcp: more than\nthat slower than the default. Regret: how much longer the choice takes than the best, per cent.\n\n",
            self.rows,
            self.links,
            self.folds,
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
        for line in &self.worst {
            let _ = writeln!(out, "  {line}");
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

/// The ten rows where choices lose most, in words.
fn worst(rows: &[Row], chosen: &[usize]) -> Vec<String> {
    let mut all: Vec<(f64, &Row, usize)> = (rows.iter().zip(chosen))
        .filter_map(|(row, class)| Some((row.regret(*class)?, row, *class)))
        .collect();
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    let words = |(regret, row, class): &(f64, &Row, usize)| {
        let f = &row.features;
        let number = |x: Option<f64>| x.map_or("-".into(), |x| x.to_string());
        format!(
            "{}: {} ms, {} Mbit/s, {} %, bursts of {}, queue {}, {}, {} bytes: {} instead of {}, {:.0} % longer",
            row.link,
            number(f.rtt_ms),
            number(f.rate_mbit),
            number(f.loss_percent),
            number(f.loss_burst),
            row.queue,
            f.profile.map_or("no profile", Profile::name),
            number(f.bytes),
            CLASSES[*class],
            CLASSES[row.best()],
            regret * 100.0
        )
    };
    all.iter().take(10).map(words).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Twelve links on which loss decides between two carriers.
    fn rows() -> Vec<Row> {
        let row = |n: u32| Row {
            origin: "sim".into(),
            link: format!("link-{:02}", n / 4),
            features: Features {
                rtt_ms: Some(50.0 + f64::from(n)),
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
            ],
        };
        (0..48).map(row).collect()
    }

    #[test]
    fn report__a_tree_finds_what_decides() {
        let report = Report::new(&rows()).unwrap();
        let score = |name: &str| report.scores.iter().find(|s| s.choice == name).unwrap();
        let tree = score("tree");
        assert_eq!((tree.accuracy, tree.regret.worst_regret), (1.0, 0.0));
        assert_eq!(report.classes[0].chosen, [24, 0, 0, 0, 0]);
        assert_eq!(report.classes[2].chosen, [0, 0, 24, 0, 0]);
        let default = score("always tcp");
        assert_eq!((default.accuracy, default.behind_default), (0.5, 0.0));
        assert_eq!(score("always graft:stream").behind_default, 0.5);
        assert_eq!(default.regret.median_regret, 0.0);
        assert!((default.regret.worst_regret - (300.0 / 110.0 - 1.0)).abs() < 1e-9);
        assert_eq!(score("oracle (ties: the simplest)").accuracy, 1.0);
        assert_eq!(report.classes[0].rows, 24);
        assert!(report.text().contains("always tcp:bbr"));
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
