//! `vtl select measure`: a campaign, in pieces that can be interrupted, resumed and merged.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use nix::fcntl::{Flock, FlockArg};
use serde::Serialize;
use vtl_cli::failure::Failure;
use vtl_cli::output;
use vtl_link::Link;

use super::campaign::{self, Figure, LIMIT, LOADS, LinkId, Load, MAX_LINKS, MAX_SEED, Run};
use super::progress::Progress;
use super::rows::{self, CARRIERS, Key, Origin, Row};
use super::simulate;
use super::testbed::{self, Testbeds};
use crate::interrupt::{Interrupt, Interrupted};

/// Arguments of `vtl select measure`.
#[derive(Debug, Args)]
pub(crate) struct MeasureArgs {
    /// Append the rows to this file; what stands there is not measured again
    #[arg(value_name = "ROWS.csv")]
    rows: PathBuf,
    /// How many links: 20 with names and others drawn by chance, always the same ones; seven cases on each
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..=MAX_LINKS))]
    links: u64,
    /// Draw other links, and none with names: for cases that no training has seen
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=MAX_SEED))]
    seed: u64,
    /// Measure one part of the links only; the files of all parts together are the campaign
    #[arg(long, value_name = "I/N", default_value = "1/1")]
    shard: Shard,
    /// How many transfers are measured at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    jobs: u64,
    /// Measure by this host's kernel and daemons instead of in virtual time: files of at most 1 MiB, links of at most 50 Mbit/s (needs root)
    #[arg(long)]
    testbed: bool,
    /// At the end, write how many rows there are as JSON
    #[arg(long)]
    json: bool,
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

/// What a run of the command came to.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    file: &'a Path,
    /// Rows that were there.
    found: usize,
    /// Rows that were measured.
    added: usize,
    /// Transfers that were left out, or that failed: on testbeds only.
    without: usize,
    /// Whether all of the campaign, or of the shard, is there.
    complete: bool,
}

/// Runs `vtl select measure`.
pub(super) fn run(args: &MeasureArgs) -> Result<()> {
    if args.testbed && !nix::unistd::geteuid().is_root() {
        return Err(Failure::permission(
            "`vtl select measure --testbed` needs root, to make network namespaces and load eBPF: run it with sudo",
        ));
    }
    let interrupt = Interrupt::catch()?;
    let (file, found) = open(&args.rows)?;
    let mut jobs = Vec::new();
    for number in (0..args.links).filter(|number| args.shard.has(*number)) {
        let seed = args.seed;
        jobs.extend(LOADS.map(|load| Job::new(LinkId { seed, number }, load, args.testbed)));
    }
    jobs.retain(|job| job.is_wanted() && job.rows().any(|(row, _)| !found.contains(&row.key())));
    let written = Written {
        path: &args.rows,
        file: Mutex::new(file),
        added: AtomicUsize::new(0),
        without: AtomicUsize::new(0),
    };
    let result = measure(args, &jobs, &found, &interrupt, &written);
    let summary = Summary {
        file: &args.rows,
        found: found.len(),
        added: written.added.into_inner(),
        without: written.without.into_inner(),
        complete: result.is_ok(),
    };
    if args.json {
        output::print(&(serde_json::to_string(&summary)? + "\n"))?;
    } else {
        eprintln!(
            "{}: {} rows were there, {} added{}",
            args.rows.display(),
            summary.found,
            summary.added,
            match summary.without {
                0 => String::new(),
                without => format!(", {without} transfers left out or failed"),
            }
        );
    }
    match result {
        Err(error) if error.is::<Interrupted>() => {
            Err(error.context("stopped; the same command measures the rest"))
        }
        result => result,
    }
}

/// The file that rows are added to.
struct Written<'a> {
    path: &'a Path,
    file: Mutex<Flock<File>>,
    added: AtomicUsize,
    without: AtomicUsize,
}

/// Has all jobs done, and the rows written as they come.
fn measure(
    args: &MeasureArgs,
    jobs: &[Job],
    found: &HashSet<Key>,
    interrupt: &Interrupt,
    written: &Written<'_>,
) -> Result<()> {
    let progress = Progress::new(jobs.len(), "transfers");
    let next = AtomicUsize::new(0);
    let failed = Interrupt::default();
    let work = |worker: usize| -> Result<()> {
        let testbeds = match args.testbed {
            true => Some(Testbeds::new(worker, interrupt.clone())?),
            false => None,
        };
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            interrupt.check()?;
            failed.check()?;
            let lines = job.lines(found, testbeds.as_ref())?;
            if lines.is_empty() {
                written.without.fetch_add(1, Ordering::Relaxed);
            }
            // One call, so that a crash leaves at most one line incomplete, which the next start removes.
            let mut file = written.file.lock().expect("nobody panics with it");
            let done = file.write_all(lines.concat().as_bytes());
            done.with_context(|| written.path.display().to_string())?;
            written.added.fetch_add(lines.len(), Ordering::Relaxed);
            progress.add_one();
        }
        Ok(())
    };
    let results: Vec<Result<()>> = thread::scope(|scope| {
        let work = &work;
        let failed = &failed;
        let worker = move |worker| {
            let result = work(worker);
            if result.is_err() {
                failed.set();
            }
            result
        };
        let workers: Vec<_> = (0..args.jobs as usize)
            .map(|number| scope.spawn(move || worker(number)))
            .collect();
        let results = workers.into_iter().map(|worker| worker.join());
        results
            .map(|result| result.unwrap_or_else(|_| bail!("a thread panicked")))
            .collect()
    });
    // What went wrong first; the others were told to stop.
    let (stopped, errors): (Vec<_>, Vec<_>) =
        (results.into_iter().filter_map(Result::err)).partition(|error| error.is::<Interrupted>());
    errors.into_iter().chain(stopped).next().map_or(Ok(()), Err)
}

/// Opens and locks the file of rows, with its end after the last complete line, and tells which rows it has.
fn open(path: &Path) -> Result<(Flock<File>, HashSet<Key>)> {
    let name = || path.display().to_string();
    // Not truncated: what is there stays.
    let mut options = OpenOptions::new();
    let file = options
        .create(true)
        .append(true)
        .open(path)
        .with_context(name)?;
    let mut file = Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| {
        anyhow::anyhow!(
            "{}: another `vtl select measure` writes this file: give each shard its own",
            path.display()
        )
    })?;
    let text = rows::read(path)?.unwrap_or_default();
    let whole = text.rfind('\n').map_or(0, |end| end + 1);
    let found = match whole {
        0 => Vec::new(),
        _ => rows::parse(&text[..whole]).with_context(name)?,
    };
    ensure!(
        whole > 0 || text.is_empty() || rows::header().starts_with(&text),
        "{}: this is no file of rows, and would be overwritten: name another one",
        path.display()
    );
    file.set_len(whole as u64).with_context(name)?;
    if whole == 0 {
        let written = file.write_all(rows::header().as_bytes());
        written.with_context(name)?;
    }
    Ok((file, found.iter().map(Row::key).collect()))
}

/// A load on a link, to be measured.
struct Job {
    id: LinkId,
    link: Link,
    load: Load,
    origin: Origin,
}

impl Job {
    fn new(id: LinkId, load: Load, testbed: bool) -> Self {
        Self {
            id,
            link: id.link(),
            load,
            origin: match testbed {
                true => Origin::Testbed,
                false => Origin::Sim,
            },
        }
    }

    /// Whether it is measured at all.
    fn is_wanted(&self) -> bool {
        self.origin == Origin::Sim
            || self.link.rate_mbit <= testbed::MAX_RATE_MBIT
                && self.load.bytes().is_some_and(|b| b <= testbed::MAX_BYTES)
    }

    /// The rows that come of it, without figures, and what their figures are.
    fn rows(&self) -> impl Iterator<Item = (Row, Figure)> {
        self.load.figures().iter().map(|(profile, figure)| {
            let row = Row {
                origin: self.origin,
                link: self.id.name(),
                features: campaign::features(&self.link, *profile, self.load.bytes()),
                queue: self.link.queue_limit(),
                costs: [None; CARRIERS.len()],
            };
            (row, *figure)
        })
    }

    /// Measures, and gives the lines of the rows that were not found. None where the load takes too long, or too little of
    /// it could be measured.
    fn lines(&self, found: &HashSet<Key>, testbeds: Option<&Testbeds>) -> Result<Vec<String>> {
        let mut missing: Vec<_> = (self.rows())
            .filter(|(row, _)| !found.contains(&row.key()))
            .collect();
        if testbeds.is_some() && self.is_too_long()? {
            return Ok(Vec::new());
        }
        for (place, carrier) in CARRIERS.into_iter().enumerate() {
            let costs = match testbeds {
                Some(testbeds) => testbeds.costs(self.id, &self.link, self.load, carrier),
                None => costs(self.id, &self.link, self.load, carrier),
            };
            let costs =
                costs.with_context(|| format!("{}, {carrier}, {:?}", self.id.name(), self.load))?;
            for (row, figure) in &mut missing {
                row.costs[place] = costs.as_deref().map(|c| campaign::round(figure.of(c)));
            }
        }
        let lines = missing.iter().map(|(row, _)| row);
        Ok(lines
            .filter(|row| row.is_measured())
            .map(Row::line)
            .collect())
    }

    /// Whether it takes too long for a testbed.
    fn is_too_long(&self) -> Result<bool> {
        for carrier in ["tcp", "tcp:bbr"] {
            let costs = costs(self.id, &self.link, self.load, carrier)?.unwrap_or_default();
            if Figure::Mean.of(&costs) > testbed::MAX_MS {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// What each run of a load takes by a carrier in virtual time, ms; `None` if the simulator does not have it.
pub(super) fn costs(
    id: LinkId,
    link: &Link,
    load: Load,
    carrier: &str,
) -> Result<Option<Vec<f64>>> {
    let Some(simulated) = campaign::simulated(carrier) else {
        return Ok(None);
    };
    let traffic = load.traffic(id, link);
    let cost = |run: u64| {
        let link = Link {
            seed: id.run_seed(run),
            ..link.clone()
        };
        let read = simulate::run(&link, simulated, traffic, LIMIT)?;
        let run = Run {
            simulated,
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
            seed: 0,
            shard: shard.parse().unwrap(),
            jobs: 1,
            testbed: false,
            json: false,
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
