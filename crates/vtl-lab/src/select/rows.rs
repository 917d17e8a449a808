//! Labelled cases as CSV: what each carrier took, for a state of the network, a profile and a size.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::RangeInclusive;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use vtl_core::profile::Profile;
use vtl_core::select::{CLASSES, Features, TIE};

/// The most bytes of a file of rows: about two million.
const MAX_FILE: u64 = 256 << 20;
/// What is measured: first [`CLASSES`], which can be chosen, then what is only looked at, on testbeds.
pub(super) const CARRIERS: [&str; CLASSES.len() + 1] = [
    CLASSES[0], CLASSES[1], CLASSES[2], CLASSES[3], CLASSES[4], "tcp:reno",
];
/// The columns before those of the carriers, each of which has what its carrier took, ms.
const COLUMNS: [&str; 9] = [
    "origin",
    "link",
    "rtt [ms]",
    "rate [Mbit/s]",
    "loss [%]",
    "burst [packets]",
    "queue [packets]",
    "profile",
    "size [bytes]",
];
/// The column behind those of the carriers: the label, which follows from them.
const BEST: &str = "best";

/// What a path can have: round-trip time in ms, rate in Mbit/s, loss in per cent, packets that are lost together.
pub(super) const RTT_MS: RangeInclusive<f64> = 1e-3..=1e5;
pub(super) const RATE_MBIT: RangeInclusive<f64> = 1e-3..=1e6;
pub(super) const LOSS_PERCENT: RangeInclusive<f64> = 0.0..=100.0;
pub(super) const BURST_PACKETS: RangeInclusive<f64> = 1.0..=1e6;

/// A case.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// How it was measured.
    pub(super) origin: Origin,
    /// The link's name. Cases of one link are held out together.
    pub(super) link: String,
    /// What a choice is made by.
    pub(super) features: Features,
    /// The link's queue, which nobody knows beforehand.
    pub(super) queue: u32,
    /// What each of [`CARRIERS`] took, ms; `None` if it was not measured.
    pub(super) costs: [Option<f64>; CARRIERS.len()],
}

/// How a case was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// In virtual time, by the grafts' own code and models of TCP.
    Sim,
    /// By real kernels, in `vtl testbed`.
    Testbed,
}

impl Origin {
    const ALL: [Self; 2] = [Self::Sim, Self::Testbed];

    /// The name in files.
    fn name(self) -> &'static str {
        match self {
            Self::Sim => "sim",
            Self::Testbed => "testbed",
        }
    }
}

/// What tells a case from others: link, profile and size.
pub(super) type Key = (String, Option<&'static str>, Option<u64>);

impl Row {
    pub(super) fn key(&self) -> Key {
        let bytes = self.features.bytes.map(|bytes| bytes as u64);
        let profile = self.features.profile.map(Profile::name);
        (self.link.clone(), profile, bytes)
    }

    /// What the best of [`CLASSES`] took.
    pub(super) fn min_cost(&self) -> f64 {
        let costs = self.costs[..CLASSES.len()].iter().flatten();
        costs.copied().fold(f64::INFINITY, f64::min)
    }

    /// Whether each of [`CLASSES`] was measured.
    pub(super) fn is_complete(&self) -> bool {
        self.costs[..CLASSES.len()].iter().all(Option::is_some)
    }

    /// Whether a choice can be seen in it: two of [`CLASSES`] were measured.
    pub(super) fn is_measured(&self) -> bool {
        self.costs[..CLASSES.len()].iter().flatten().count() >= 2
    }

    /// How much longer a class takes than the best, as a share; `None` if it was not measured.
    pub(super) fn regret(&self, class: usize) -> Option<f64> {
        self.costs[class].map(|cost| cost / self.min_cost() - 1.0)
    }

    /// The label: the first class that is at most [`TIE`] slower than the best.
    pub(super) fn best(&self) -> usize {
        let within = |class: &usize| self.regret(*class).is_some_and(|regret| regret <= TIE);
        let best = (0..CLASSES.len()).find(within);
        best.expect("the best is within")
    }

    /// A line of the file, with its end.
    pub(super) fn line(&self) -> String {
        let number = |x: Option<f64>| x.map_or(String::new(), |x| x.to_string());
        let features = &self.features;
        let mut fields = vec![
            self.origin.name().to_owned(),
            self.link.clone(),
            number(features.rtt_ms),
            number(features.rate_mbit),
            number(features.loss_percent),
            number(features.loss_burst),
            self.queue.to_string(),
            features.profile.map_or(String::new(), |p| p.to_string()),
            number(features.bytes),
        ];
        fields.extend(self.costs.map(number));
        fields.push(CLASSES[self.best()].to_owned());
        fields.join(",") + "\n"
    }

    fn parse(record: &csv::StringRecord) -> Result<Self> {
        let mut costs = [None; CARRIERS.len()];
        for (carrier, cost) in costs.iter_mut().enumerate() {
            *cost = number(record, COLUMNS.len() + carrier, CARRIERS[carrier])?;
            let name = CARRIERS[carrier];
            ensure!(*cost != Some(0.0), "{name} took no time at all");
        }
        ensure!(
            costs[..CLASSES.len()].iter().any(Option::is_some),
            "no carrier was measured that can be chosen"
        );
        let within = |place: usize, range: RangeInclusive<f64>| -> Result<Option<f64>> {
            let (name, value) = (COLUMNS[place], number(record, place, COLUMNS[place])?);
            let (min, max) = (range.start(), range.end());
            if let Some(x) = value {
                ensure!(
                    range.contains(&x),
                    "{name} is {x}, and must be {min} to {max}"
                );
            }
            Ok(value)
        };
        let known = |place: usize, range: RangeInclusive<f64>| -> Result<f64> {
            within(place, range)?.with_context(|| format!("\"{}\" is missing", COLUMNS[place]))
        };
        let origin = Origin::ALL.into_iter().find(|o| o.name() == &record[0]);
        let row = Self {
            origin: origin.with_context(|| {
                let told = record[0].escape_debug();
                format!("origin is \"{told}\", and must be sim or testbed")
            })?,
            link: record[1].to_owned(),
            features: Features {
                rtt_ms: Some(known(2, RTT_MS)?),
                rate_mbit: Some(known(3, RATE_MBIT)?),
                loss_percent: Some(known(4, LOSS_PERCENT)?),
                loss_burst: within(5, BURST_PACKETS)?,
                profile: match &record[7] {
                    "" => None,
                    name => Some(name.parse().map_err(anyhow::Error::msg)?),
                },
                bytes: within(8, 0.0..=1e15)?,
            },
            queue: known(6, 0.0..=f64::from(u32::MAX))? as u32,
            costs,
        };
        let (told, best) = (&record[record.len() - 1], CLASSES[row.best()]);
        ensure!(
            told == best,
            "{BEST} is \"{}\", and by the figures it is {best}",
            told.escape_debug()
        );
        Ok(row)
    }
}

/// A field's number; `None` if it is empty.
fn number(record: &csv::StringRecord, place: usize, name: &str) -> Result<Option<f64>> {
    let field = &record[place];
    if field.is_empty() {
        return Ok(None);
    }
    let number = field.parse::<f64>().ok();
    let number = number.filter(|x| (0.0..=1e15).contains(x));
    let complain = || {
        format!(
            "{name} is \"{}\": no number from 0 to 1e15",
            field.escape_debug()
        )
    };
    number.with_context(complain).map(Some)
}

/// The file's first line, with its end.
pub(super) fn header() -> String {
    let columns: Vec<&str> = COLUMNS.into_iter().chain(CARRIERS).chain([BEST]).collect();
    columns.join(",") + "\n"
}

/// Reads a file's text. None if there is no such file.
///
/// # Errors
/// It cannot be read, or is too large.
pub(super) fn read(path: &Path) -> Result<Option<String>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("{}", path.display())),
    };
    let mut text = String::new();
    let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
    read.with_context(|| format!("{}", path.display()))?;
    let max = MAX_FILE >> 20;
    ensure!(
        text.len() as u64 <= MAX_FILE,
        "{}: more than {max} MiB: these are no rows of `vtl select measure`",
        path.display()
    );
    Ok(Some(text))
}

/// The rows of a file's text.
///
/// # Errors
/// Another header, or a line that is no row, with its number.
pub(super) fn parse(text: &str) -> Result<Vec<Row>> {
    let first = text.split_inclusive('\n').next().unwrap_or_default();
    ensure!(
        first.trim_end() == header().trim_end(),
        "line 1: this is no header of `vtl select measure`, or one of another version: the columns must be {}",
        header().trim_end()
    );
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        rows.push(Row::parse(&record).with_context(|| format!("line {line}"))?);
    }
    Ok(rows)
}

/// The rows of several files, those of shards for instance, in an order that depends on the rows alone.
///
/// # Errors
/// As [`parse`], with the file's name; no such file; no row; two rows of the same link, profile and size that differ.
pub(super) fn load(paths: &[impl AsRef<Path>]) -> Result<Vec<Row>> {
    let mut rows: BTreeMap<Key, Row> = BTreeMap::new();
    for path in paths.iter().map(AsRef::as_ref) {
        let text =
            read(path)?.with_context(|| format!("{}: there is no such file", path.display()))?;
        for row in parse(&text).with_context(|| path.display().to_string())? {
            if let Some(other) = rows.insert(row.key(), row.clone())
                && other != row
            {
                let link = &row.link;
                bail!(
                    "{}: the link {link} stands in the rows twice with different figures: leave one campaign out",
                    path.display()
                );
            }
        }
    }
    ensure!(
        !rows.is_empty(),
        "there is no row: `vtl select measure` makes some"
    );
    Ok(rows.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            origin: Origin::Sim,
            link: "random-7".into(),
            features: Features {
                rtt_ms: Some(100.0),
                rate_mbit: Some(12.5),
                loss_percent: Some(0.0),
                loss_burst: None,
                profile: Some(Profile::LossSensitive),
                bytes: Some(65536.0),
            },
            queue: 64,
            costs: [
                Some(102.0),
                Some(100.0),
                None,
                Some(300.5),
                Some(99.1),
                Some(1.0),
            ],
        }
    }

    #[test]
    fn line__is_read_as_it_was_written() {
        assert_eq!(parse(&(header() + &row().line())).unwrap(), [row()]);
        assert!(row().line().ends_with(",tcp\n"));
    }

    #[test]
    fn best__of_those_that_tie_is_the_simplest() {
        for (costs, best, regret) in [
            ([102.9, 100.0, 100.0, 100.0, 100.0, 1.0], 0, 0.029),
            ([104.0, 102.0, 100.0, 100.0, 100.0, 1.0], 1, 0.04),
            ([104.0, 104.0, 104.0, 104.0, 100.0, 1.0], 4, 0.04),
        ] {
            let row = Row {
                costs: costs.map(Some),
                ..row()
            };
            assert_eq!(row.best(), best);
            assert!((row.regret(0).unwrap() - regret).abs() < 1e-9);
        }
    }

    #[test]
    fn parse__refuses_what_is_no_row() {
        let line = row().line();
        for (bad, why) in [
            (line.replace("12.5", "fast"), "line 2"),
            (line.replace("12.5", "NaN"), "no number"),
            (line.replace("12.5", "-1"), "no number"),
            (line.replace("12.5", ""), "is missing"),
            (line.replace("loss-sensitive", "lossy"), "no profile"),
            (line.replace(",102,", ",0,"), "no time"),
            (line.replace(",tcp\n", ",tcp:bbr\n"), "by the figures"),
            (line.replace(",64,", ","), "fields"),
            (line.replace("sim,", "dream,"), "must be sim or testbed"),
            (line.replace(",100,12.5", ",0,12.5"), "rtt [ms] is 0"),
            (line.replace("12.5,0,", "12.5,101,"), "must be 0 to 100"),
            (line.replace("65536", "1e16"), "size [bytes] is \"1e16\""),
        ] {
            let error = parse(&(header() + &bad)).unwrap_err();
            assert!(format!("{error:#}").contains(why), "{bad}: {error:#}");
        }
        assert!(parse("a,b\n1,2\n").is_err());
        assert!(parse("").is_err());
    }
}
