//! `vtl select compare`: how far virtual time agrees with real kernels.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;
use vtl_core::select::CLASSES;

use super::campaign::{self, Figure, LOADS, LinkId, Load};
use super::progress::Progress;
use super::rows::{self, Origin, Row};
use super::{measure, testbed};
use crate::bench::plan::size;

/// Differences in virtual time, as shares, beyond which orders are compared.
const BANDS: [f64; 6] = [0.0, 0.03, 0.1, 0.2, 0.5, 1.0];
/// The share of orders that the testbed must confirm beyond the tie band.
const CONFIRMED: f64 = 0.95;

/// Arguments of `vtl select compare`.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// Files of `vtl select measure --testbed`
    #[arg(required = true, value_name = "ROWS.csv")]
    rows: Vec<PathBuf>,
    /// Write JSON for machines instead of text
    #[arg(long)]
    json: bool,
}

/// Runs `vtl select compare`.
pub(super) fn run(args: &CompareArgs) -> Result<()> {
    let report = Report::new(&rows::load(&args.rows)?)?;
    super::show(&report, args.json, Report::text)
}

/// A case that was measured in both ways, ms.
struct Pair {
    is_random: bool,
    bytes: u64,
    testbed: [Option<f64>; CLASSES.len()],
    sim: [Option<f64>; CLASSES.len()],
    /// As if `testbed` were as many runs in virtual time, which are not among those of `sim`: what chance does.
    chance: [Option<f64>; CLASSES.len()],
}

/// Figures in virtual time, divided by what was measured.
#[derive(Debug, Serialize)]
struct Ratios {
    carrier: &'static str,
    /// Whether the links lose packets, or have slots.
    random: bool,
    bytes: u64,
    cases: usize,
    p10: f64,
    median: f64,
    p90: f64,
    /// The same of as few runs in virtual time, instead of the testbed's.
    chance_p10: f64,
    chance_p90: f64,
}

/// How often two carriers have the same order in both, of those that differ by more than a share in virtual time.
#[derive(Debug, Serialize)]
struct Orders {
    /// The share.
    beyond: f64,
    pairs: usize,
    /// Of these, the share in whose order both agree.
    agree: f64,
    /// The same of as few runs in virtual time, instead of the testbed's.
    chance_agree: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    cases: usize,
    ratios: Vec<Ratios>,
    orders: Vec<Orders>,
    /// Where nothing is random, the least difference in virtual time beyond which both agree in 95 % of the orders; `None`
    /// if they never do.
    tie_band: Option<f64>,
    /// How much longer the carrier that is best in virtual time takes on the testbed than the one that is best there.
    mean_regret: f64,
    p90_regret: f64,
    worst_regret: f64,
}

/// The value below which a share of sorted ones lies; there is at least one.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() as f64 * share).ceil() as usize).clamp(1, sorted.len()) - 1]
}

impl Pair {
    fn new(row: &Row) -> Result<Self> {
        let other = || {
            format!(
                "the link {} is none of this version's, or another one: measure it anew",
                row.link
            )
        };
        let id = LinkId::named(&row.link).with_context(other)?;
        let (link, bytes) = (id.link(), row.features.bytes.map(|bytes| bytes as u64));
        let profile = row.features.profile.with_context(other)?;
        let load = LOADS.into_iter().find(|load| load.bytes() == bytes);
        // Of larger files too few runs are simulated.
        let is_measured = |load: &Load| load.bytes().is_some_and(|b| b <= testbed::MAX_BYTES);
        let load = load.filter(is_measured).with_context(other)?;
        let figure = load.figures().iter().find(|(of, _)| *of == profile);
        let (_, figure) = figure.with_context(other)?;
        let own = campaign::features(&link, profile, bytes);
        ensure!(
            own == row.features && row.queue == link.queue_limit(),
            other()
        );
        let is_random = Load::is_random(&link);
        let runs = if is_random {
            testbed::RUNS.0
        } else {
            testbed::RUNS.1
        };
        let mut pair = Self {
            is_random,
            bytes: bytes.unwrap_or_default(),
            testbed: [None; CLASSES.len()],
            sim: [None; CLASSES.len()],
            chance: [None; CLASSES.len()],
        };
        for (place, carrier) in CLASSES.into_iter().enumerate() {
            if let Some(cost) = row.costs[place] {
                let Some(sim) = measure::costs(id, &link, load, carrier)? else {
                    continue;
                };
                let (some, others) = sim.split_at(runs as usize);
                pair.testbed[place] = Some(cost);
                pair.chance[place] = Some(figure.of(some));
                pair.sim[place] = Some(expected(*figure, others, some.len()));
            }
        }
        Ok(pair)
    }

    /// The carriers that were measured both ways: on the testbed, or by chance, and in virtual time.
    fn both(&self, by_chance: bool) -> Vec<(f64, f64)> {
        let measured = if by_chance {
            &self.chance
        } else {
            &self.testbed
        };
        let pairs = measured.iter().zip(&self.sim);
        pairs.filter_map(|(t, s)| Some(((*t)?, (*s)?))).collect()
    }
}

/// What a figure of so few runs is on average, from more runs: the slowest of four are less slow than the slowest of forty.
fn expected(figure: Figure, costs: &[f64], runs: usize) -> f64 {
    let groups: Vec<f64> = costs
        .chunks_exact(runs)
        .map(|some| figure.of(some))
        .collect();
    match groups.is_empty() {
        true => figure.of(costs),
        false => Figure::Mean.of(&groups),
    }
}

impl Report {
    fn new(rows: &[Row]) -> Result<Self> {
        let rows: Vec<&Row> = rows
            .iter()
            .filter(|r| r.origin == Origin::Testbed)
            .collect();
        ensure!(
            !rows.is_empty(),
            "there is no row of a testbed: `vtl select measure --testbed` makes some"
        );
        let progress = Progress::new(rows.len(), "cases in virtual time");
        let mut pairs = Vec::new();
        for row in rows {
            pairs.push(Pair::new(row)?);
            progress.add_one();
        }
        Ok(Self::of(&pairs))
    }

    fn of(pairs: &[Pair]) -> Self {
        let mut regrets: Vec<f64> = pairs
            .iter()
            .filter_map(|pair| {
                let both = pair.both(false);
                let chosen = both.iter().min_by(|a, b| a.1.total_cmp(&b.1))?;
                let min = both.iter().map(|(t, _)| *t).fold(f64::INFINITY, f64::min);
                Some(chosen.0 / min - 1.0)
            })
            .collect();
        regrets.sort_unstable_by(f64::total_cmp);
        let [measured, chance] = [false, true].map(|by_chance| gaps(pairs, by_chance));
        let clean: Vec<Gap> = measured
            .iter()
            .filter(|gap| !gap.is_random)
            .copied()
            .collect();
        Self {
            cases: pairs.len(),
            ratios: ratios(pairs),
            orders: BANDS
                .map(|beyond| {
                    let (pairs, agree) = orders(&measured, beyond);
                    let (_, chance_agree) = orders(&chance, beyond);
                    Orders {
                        beyond,
                        pairs,
                        agree,
                        chance_agree,
                    }
                })
                .into(),
            tie_band: tie_band(clean),
            mean_regret: regrets.iter().sum::<f64>() / regrets.len().max(1) as f64,
            p90_regret: if regrets.is_empty() {
                0.0
            } else {
                percentile(&regrets, 0.9)
            },
            worst_regret: regrets.last().copied().unwrap_or_default(),
        }
    }

    fn text(&self) -> String {
        let mut out = format!(
            "{} cases of testbeds, simulated again. Figures in virtual time, divided by what was measured; by chance: divided \
             by\nthose of as few runs in virtual time.\n\n{:14}{:8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>18}\n",
            self.cases,
            "carrier",
            "losses",
            "size",
            "cases",
            "p10",
            "median",
            "p90",
            "by chance p10-p90"
        );
        for r in &self.ratios {
            let losses = if r.random { "yes" } else { "no" };
            let (bytes, chance) = (
                size(r.bytes),
                format!("{:.2}-{:.2}", r.chance_p10, r.chance_p90),
            );
            let _ = writeln!(
                out,
                "{:14}{losses:8}{bytes:>8}{:8}{:9.2}{:9.2}{:9.2}{chance:>18}",
                r.carrier, r.cases, r.p10, r.median, r.p90
            );
        }
        out += "\nTwo carriers that differ by more than so much in virtual time, and how often they were measured in the same order:\n\n";
        for o in &self.orders {
            let [beyond, agree, chance] = [o.beyond, o.agree, o.chance_agree].map(|x| x * 100.0);
            let _ = writeln!(
                out,
                "{beyond:6.0} %{:8} pairs{agree:8.1} %, by chance {chance:.1} %",
                o.pairs
            );
        }
        out += "\nTie band, the least difference beyond which 95 % of the orders agree where nothing is random: ";
        let _ = match self.tie_band {
            Some(band) => writeln!(out, "{:.1} %.", band * 100.0),
            None => writeln!(out, "there is none."),
        };
        let [mean, p90, worst] =
            [self.mean_regret, self.p90_regret, self.worst_regret].map(|x| x * 100.0);
        let _ = writeln!(
            out,
            "The best in virtual time takes longer on the testbed than the best there: mean {mean:.1} %, p90 {p90:.1} %, worst {worst:.1} %."
        );
        out
    }
}

fn ratios(pairs: &[Pair]) -> Vec<Ratios> {
    let mut all = Vec::new();
    let files = || LOADS.into_iter().filter_map(Load::bytes);
    for (place, carrier) in CLASSES.into_iter().enumerate() {
        for (random, bytes) in [false, true]
            .into_iter()
            .flat_map(|r| files().map(move |b| (r, b)))
        {
            let of = |pair: &&Pair| pair.is_random == random && pair.bytes == bytes;
            let sorted = |measured: fn(&Pair) -> &[Option<f64>; CLASSES.len()]| {
                let ratio = |pair: &Pair| Some(pair.sim[place]? / measured(pair)[place]?);
                let mut found: Vec<f64> = pairs.iter().filter(of).filter_map(ratio).collect();
                found.sort_unstable_by(f64::total_cmp);
                found
            };
            let (found, chance) = (sorted(|pair| &pair.testbed), sorted(|pair| &pair.chance));
            if found.is_empty() {
                continue;
            }
            all.push(Ratios {
                carrier,
                random,
                bytes,
                cases: found.len(),
                p10: percentile(&found, 0.1),
                median: percentile(&found, 0.5),
                p90: percentile(&found, 0.9),
                chance_p10: percentile(&chance, 0.1),
                chance_p90: percentile(&chance, 0.9),
            });
        }
    }
    all
}

/// Two carriers of a case.
#[derive(Clone, Copy)]
struct Gap {
    /// By which share they differ in virtual time.
    size: f64,
    /// Whether their order was measured to be the same.
    agrees: bool,
    is_random: bool,
}

/// All pairs of carriers of all cases.
fn gaps(pairs: &[Pair], by_chance: bool) -> Vec<Gap> {
    let mut gaps = Vec::new();
    for pair in pairs {
        let both = pair.both(by_chance);
        for (place, a) in both.iter().enumerate() {
            for b in &both[place + 1..] {
                gaps.push(Gap {
                    size: a.1.max(b.1) / a.1.min(b.1) - 1.0,
                    agrees: (a.1 < b.1) == (a.0 < b.0),
                    is_random: pair.is_random,
                });
            }
        }
    }
    gaps
}

/// How many gaps are larger, and in which share of these the orders agree.
fn orders(gaps: &[Gap], beyond: f64) -> (usize, f64) {
    let of = || gaps.iter().filter(|gap| gap.size > beyond);
    let agree = of().filter(|gap| gap.agrees).count();
    (of().count(), agree as f64 / of().count().max(1) as f64)
}

fn tie_band(mut gaps: Vec<Gap>) -> Option<f64> {
    gaps.sort_unstable_by(|a, b| b.size.total_cmp(&a.size));
    let mut band = None;
    let mut agreed = 0;
    for (place, gap) in gaps.iter().enumerate() {
        agreed += usize::from(gap.agrees);
        if agreed as f64 >= CONFIRMED * (place + 1) as f64 {
            band = Some(gap.size);
        }
    }
    band
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(testbed: [f64; 2], sim: [f64; 2]) -> Pair {
        let both = |[a, b]: [f64; 2]| [Some(a), Some(b), None, None, None];
        Pair {
            is_random: false,
            bytes: 65536,
            testbed: both(testbed),
            sim: both(sim),
            chance: both(sim),
        }
    }

    #[test]
    fn report__of_three_cases() {
        let pairs = [
            pair([100.0, 200.0], [110.0, 200.0]),
            pair([100.0, 300.0], [90.0, 300.0]),
            pair([100.0, 110.0], [100.0, 98.0]),
        ];
        let report = Report::of(&pairs);
        let first = &report.ratios[0];
        assert_eq!(
            (first.carrier, first.cases, first.random),
            ("tcp", 3, false)
        );
        assert_eq!((first.p10, first.median, first.p90), (0.9, 1.0, 1.1));
        let orders: Vec<_> = report.orders.iter().map(|o| (o.pairs, o.agree)).collect();
        assert_eq!(orders[0], (3, 2.0 / 3.0));
        assert_eq!(orders[1], (2, 1.0));
        // The third pair differs by 2 %, and the testbed disagrees.
        assert!((report.tie_band.unwrap() - (200.0 / 110.0 - 1.0)).abs() < 1e-9);
        assert!((report.worst_regret - 0.1).abs() < 1e-9);
        assert!((report.mean_regret - 0.1 / 3.0).abs() < 1e-9);
        assert!(report.orders.iter().all(|o| o.chance_agree == 1.0));
        assert!(report.text().contains("nothing is random: 81.8 %"));
    }

    #[test]
    fn expected__of_few_runs() {
        let costs = [4.0, 1.0, 2.0, 8.0, 3.0];
        assert_eq!(expected(Figure::Mean, &costs, 2), (2.5 + 5.0) / 2.0);
        assert_eq!(expected(Figure::Tail, &costs, 2), (4.0 + 8.0) / 2.0);
        assert_eq!(expected(Figure::Tail, &costs, 6), 6.0, "of 8 and 4");
    }

    #[test]
    fn new__refuses_files_that_no_testbed_measures() {
        let id = (0..100).map(|number| LinkId { seed: 0, number });
        let id = id.into_iter().find(|id| Load::is_random(&id.link()));
        let id = id.expect("some lose packets");
        let link = id.link();
        let profile = vtl_core::profile::Profile::LossSensitive;
        let row = Row {
            origin: Origin::Testbed,
            link: id.name(),
            features: campaign::features(&link, profile, Some(16 << 20)),
            queue: link.queue_limit(),
            costs: [Some(1.0); rows::CARRIERS.len()],
        };
        let error = Report::new(&[row]).unwrap_err();
        assert!(error.to_string().contains("is none"), "{error}");
    }

    #[test]
    fn new__refuses_rows_that_are_not_of_this_versions_links() {
        let text = rows::header()
            + "testbed,random-21,9,9,0,,64,loss-sensitive,65536,100,101,,,,,tcp\n\
               testbed,nowhere,9,9,0,,64,loss-sensitive,65536,100,101,,,,,tcp\n\
               sim,random-22,9,9,0,,64,loss-sensitive,65536,100,101,,,,,tcp\n";
        let rows = rows::parse(&text).unwrap();
        for (place, why) in [
            (0, "random-21 is none"),
            (1, "nowhere is none"),
            (2, "no row of a testbed"),
        ] {
            let error = Report::new(&rows[place..=place]).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
