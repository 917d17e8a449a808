//! `vtl select measure`: a campaign in virtual time, in pieces that can be interrupted, resumed and merged.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use vtl_core::select::{CLASSES, Features};
use vtl_link::Link;

use super::campaign::{self, LIMIT, LOADS, Load, Run};
use super::rows::{self, Key, Row};
use super::simulate;

/// Time between two lines of progress.
const NEWS: Duration = Duration::from_secs(15);

/// Arguments of `vtl select measure`.
#[derive(Debug, Args)]
pub(crate) struct MeasureArgs {
    /// Append the rows to this file; what stands there is not measured again
    #[arg(value_name = "ROWS.csv")]
    rows: PathBuf,
    /// How many links: 20 with names, the rest drawn by chance, always the same ones; seven cases on each
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    links: u64,
    /// Measure one part of the links only; the files of all parts together are the campaign
    #[arg(long, value_name = "K/N", default_value = "1/1")]
    shard: Shard,
}

/// A part of a campaign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shard {
    /// From 1.
    part: u64,
    of: u64,
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/');
        let shard = parts.and_then(|(part, of)| {
            let (part, of) = (part.parse().ok()?, of.parse().ok()?);
            (1..=of).contains(&part).then_some(Self { part, of })
        });
        shard.ok_or_else(|| "a shard is its number and how many there are, such as 2/8".to_owned())
    }
}

impl Shard {
    fn has(self, link: u64) -> bool {
        link % self.of == self.part - 1
    }
}

/// Runs `vtl select measure`.
pub(super) fn run(args: &MeasureArgs) -> Result<()> {
    let (mut file, done) = open(&args.rows)?;
    let all: Vec<u64> = (0..args.links).filter(|n| args.shard.has(*n)).collect();
    let (start, mut news) = (Instant::now(), Instant::now());
    let (mut measured, mut added) = (0, 0);
    for (before, number) in all.iter().enumerate() {
        let (name, link) = campaign::link(*number);
        let lines = link_rows(*number, &name, &link, &done)?;
        if lines.is_empty() {
            continue;
        }
        // One call, so that an interrupt leaves at most one line incomplete, which the next start removes.
        let written = file.write_all(lines.concat().as_bytes());
        written.with_context(|| format!("{}", args.rows.display()))?;
        measured += 1;
        added += lines.len();
        if news.elapsed() >= NEWS {
            news = Instant::now();
            let left = start.elapsed().as_secs() * (all.len() - before - 1) as u64 / measured;
            eprintln!("{} of {} links, about {left} s left", before + 1, all.len());
        }
    }
    let there = done.len();
    eprintln!(
        "{}: {there} rows were there, {added} added",
        args.rows.display()
    );
    Ok(())
}

/// Opens the file of rows at its end, after an incomplete line was removed, and tells which rows it has.
fn open(path: &Path) -> Result<(File, HashSet<Key>)> {
    let text = rows::read(path)?.unwrap_or_default();
    let whole = text.rfind('\n').map_or(0, |end| end + 1);
    let done = match whole {
        0 => Vec::new(),
        _ => rows::parse(&text[..whole]).with_context(|| format!("{}", path.display()))?,
    };
    ensure!(
        whole > 0 || text.is_empty() || rows::header().starts_with(&text),
        "{}: this is no file of rows, and would be overwritten: name another one",
        path.display()
    );
    let open = || -> std::io::Result<File> {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        file.set_len(whole as u64)?;
        if whole == 0 {
            file.write_all(rows::header().as_bytes())?;
        }
        Ok(file)
    };
    let file = open().with_context(|| format!("{}", path.display()))?;
    Ok((file, done.iter().map(Row::key).collect()))
}

/// Measures what is missing on a link.
fn link_rows(number: u64, name: &str, link: &Link, done: &HashSet<Key>) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    for load in LOADS {
        let row = |profile| Row {
            origin: "sim".into(),
            link: name.into(),
            features: Features {
                rtt_ms: Some(campaign::rtt_ms(link)),
                rate_mbit: Some(link.rate_mbit),
                loss_percent: Some(link.loss_down()),
                loss_burst: campaign::burst(link),
                profile: Some(profile),
                bytes: load.bytes().map(|bytes| bytes as f64),
            },
            queue: link.queue_limit(),
            costs: [None; CLASSES.len()],
        };
        let mut missing: Vec<_> = (load.figures().iter())
            .map(|(profile, figure)| (row(*profile), figure))
            .filter(|(row, _)| !done.contains(&row.key()))
            .collect();
        if missing.is_empty() {
            continue;
        }
        for (class, carrier) in CLASSES.into_iter().enumerate() {
            let costs = costs(number, link, load, carrier)
                .with_context(|| format!("{name}, {carrier}, {load:?}"))?;
            for (row, figure) in &mut missing {
                row.costs[class] = costs.as_deref().map(|c| campaign::round(figure.of(c)));
            }
        }
        lines.extend(missing.iter().map(|(row, _)| row.line()));
    }
    Ok(lines)
}

/// What each run of a load takes by a carrier, ms; `None` if the simulator does not have it.
fn costs(number: u64, link: &Link, load: Load, carrier: &str) -> Result<Option<Vec<f64>>> {
    let Some(sending) = campaign::sending(carrier) else {
        return Ok(None);
    };
    let traffic = load.traffic(link, number);
    let cost = |run: u64| {
        let link = Link {
            seed: (number << 16) + run,
            ..link.clone()
        };
        let read = simulate::run(&link, sending, traffic, LIMIT)?;
        let run = Run {
            sending,
            traffic,
            read: &read,
        };
        Ok(load.cost(&link, run))
    };
    (1..=load.runs(link))
        .map(cost)
        .collect::<Result<_>>()
        .map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard__parts_are_disjoint_and_together_all() {
        let shards: Vec<Shard> = ["1/3", "2/3", "3/3"].map(|s| s.parse().unwrap()).into();
        for link in 0..100 {
            assert_eq!(shards.iter().filter(|shard| shard.has(link)).count(), 1);
        }
        for bad in ["", "1", "0/3", "4/3", "1/0", "a/b", "-1/2"] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }

    #[test]
    fn run__goes_on_where_it_was_interrupted() {
        let dir = std::env::temp_dir().join(format!("vtl-select-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let args = |name: &str, shard: &str| MeasureArgs {
            rows: dir.join(name),
            links: 2,
            shard: shard.parse().unwrap(),
        };
        let whole = args("whole.csv", "1/2");
        run(&whole).unwrap();
        let text = std::fs::read_to_string(&whole.rows).unwrap();
        assert_eq!(rows::parse(&text).unwrap().len(), 7);
        let cut = args("cut.csv", "1/2");
        for end in [10, text.len() - 3, text.len()] {
            std::fs::write(&cut.rows, &text[..end]).unwrap();
            run(&cut).unwrap();
            assert_eq!(std::fs::read_to_string(&cut.rows).unwrap(), text, "{end}");
        }
        std::fs::write(&cut.rows, "a letter\n").unwrap();
        assert!(run(&cut).is_err());
        std::fs::write(&cut.rows, "a letter").unwrap();
        assert!(run(&cut).is_err());
        assert_eq!(std::fs::read_to_string(&cut.rows).unwrap(), "a letter");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
