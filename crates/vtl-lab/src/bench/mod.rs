//! `vtl bench`: transfers over emulated links, by VTL and by what it competes with, measured and compared.
//!
//! - [`plan`]: what to measure, from a TOML file;
//! - [`mod@run`]: carries a plan out, one transfer after the other, each on a testbed of its own;
//! - [`agent`]: the two ends of a transfer, processes in the testbed's namespaces;
//! - [`effort`]: what daemons did meanwhile;
//! - [`row`]: what a transfer came to; [`table`] and [`plot`] show rows to people;
//! - [`mod@micro`]: what each program costs by itself;
//! - [`mod@deploy`]: what deploying grafts and setting up sessions take; [`figure`]: how both say it;
//! - [`mod@load`]: many connections of ordinary sockets.

mod agent;
mod cpu;
mod deploy;
pub(crate) mod effort;
mod figure;
mod load;
mod micro;
pub(crate) mod plan;
pub(crate) mod plot;
mod row;
pub(crate) mod run;
mod table;

use std::fs;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use vtl_cli::failure::Failure;
use vtl_cli::graft::project;
use vtl_cli::programs::find_program;
use vtl_cli::{doctor, output};

use self::deploy::{Order, Report};
use self::load::Load;
use self::plan::Plan;
use self::row::{Row, columns};
use self::run::{Bench, Event};
use crate::interrupt::Interrupt;
use crate::nginx::Scratch;
use crate::programs::Programs;

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Carry out plans: transfers over emulated links, by every transport that they name
    #[command(
        after_help = "A plan names links, a workload and transports; lists are multiplied:\n  \
        transports = [\"tcp-cubic\", \"tcp-bbr\", \"quic\", \"graft:stream\", \"hook:graft:stream\"]\n  \
        runs = 3\n  \
        [link]\n  \
        profile = \"terrestrial\"   # or satellite, lan, campus, lte, wire; or rtt_ms and rate_mbit\n  \
        loss_pct = [0, 2]\n  \
        [workload]\n  \
        kind = \"file\"             # or request-response, stream, flows, compete\n  \
        bytes = 33554432\n\n\
        Examples:\n  \
        vtl bench run bench/plans/quick.toml --plot target/bench\n  \
        vtl bench run bench/plans/small.toml --runs 9 --json rows.json --csv rows.csv\n\n\
        bench/README.md describes plans and rows. Measure on a machine that does nothing else.\n\
        Needs root; plans with app = \"curl\" need nginx and curl. An interrupt ends it early:\n\
        the rows so far are written, and nothing else is left behind."
    )]
    Run(RunArgs),
    /// Draw rows that were written before, of several runs together
    #[command(
        after_help = "Example:\n  vtl bench draw today.json yesterday.json --plot target/bench"
    )]
    Draw {
        /// What `vtl bench run --json` has written
        #[arg(required = true, value_name = "ROWS.json")]
        rows: Vec<PathBuf>,
        /// Draw into this directory, as SVG
        #[arg(long, value_name = "DIR")]
        plot: PathBuf,
    },
    /// Nanoseconds a packet of programs, transport functions and frames; microseconds to the wire
    #[command(
        after_help = "Takes less than a minute, on a machine that does nothing else. Needs root."
    )]
    Micro {
        /// Write the figures into this file, as a JSON array
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// What deploying a graft and setting up a session take, by step; how large grafts are
    #[command(
        after_help = "The breakdown of figures 3.12 and 3.13 and of table 3.6 of the thesis, on this \
        machine.\nTakes about four minutes, on a machine that does nothing else. Needs root; compile \
        times need\nclang and VTL's sources."
    )]
    Deploy(DeployArgs),
    /// Many TCP connections, opened at a rate or held open: ordinary sockets, to be captured or not
    #[command(
        subcommand,
        after_help = "Example, in two network namespaces (vtl testbed) with a vtld in each:\n  \
        vtl hook add --port 7000; vtl bench load serve 7000            # server\n  \
        vtl run -- vtl bench load connect 10.73.0.2:7000 --rate 2000   # client"
    )]
    Load(LoadCommand),
    /// One end of a measured transfer
    #[command(hide = true)]
    Agent {
        /// What to do, as JSON
        order: String,
    },
}

/// An end of a load of connections.
#[derive(Debug, Subcommand)]
pub(crate) enum LoadCommand {
    /// Answer on a port until killed; says `ready`
    Serve {
        /// The port, of all addresses
        port: u16,
    },
    /// Open connections, send 64 bytes on each, get them back, close; print what became of them, as
    /// JSON
    Connect(Load),
}

/// Arguments of `vtl bench run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// What to measure
    #[arg(required = true, value_name = "PLAN.toml")]
    plans: Vec<PathBuf>,
    /// How often, instead of what the plans say
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: Option<u32>,
    /// Write all rows into this file, as a JSON array
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write all rows into this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the results into this directory, as SVG
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

/// Arguments of `vtl bench deploy`.
#[derive(Debug, Args)]
pub(crate) struct DeployArgs {
    /// How often each graft is loaded
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    loads: u32,
    /// How many sessions of each kind are set up
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    sessions: u32,
    /// Measure only this graft; may be given several times
    #[arg(long = "graft", value_name = "NAME")]
    grafts: Vec<String>,
    /// The directory `bpf` of VTL's sources, for lines and compile times
    #[arg(long, value_name = "DIR", default_value = "bpf")]
    sources: PathBuf,
    /// Write the figures into this file, as a JSON array
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Runs a subcommand of `vtl bench`.
pub(crate) fn run(command: &BenchCommand) -> anyhow::Result<()> {
    match command {
        BenchCommand::Run(args) => measure(args),
        BenchCommand::Draw { rows, plot } => draw(rows, plot),
        BenchCommand::Micro { json } => micro(json.as_deref()),
        BenchCommand::Deploy(args) => deploy(args),
        BenchCommand::Load(command) => load(command),
        BenchCommand::Agent { order } => agent::main(order),
    }
}

fn load(command: &LoadCommand) -> anyhow::Result<()> {
    match *command {
        LoadCommand::Serve { port } => {
            load::serve(port).with_context(|| format!("port {port} cannot be served"))
        }
        LoadCommand::Connect(load) => {
            let outcome = load::connect(load)?;
            output::print(&(serde_json::to_string(&outcome)? + "\n"))?;
            Ok(())
        }
    }
}

/// Refuses users and kernels that cannot measure.
fn require_fit() -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Err(Failure::permission(
            "the bench needs root, to make network namespaces and load eBPF: run it with sudo",
        ));
    }
    doctor::require_fit()
}

fn micro(json: Option<&Path>) -> anyhow::Result<()> {
    require_fit()?;
    require_file(json)?;
    let interrupt = Interrupt::catch()?;
    let (figures, result) = micro::run(
        &Programs::find()?,
        &Bench::testbed_name(),
        &interrupt,
        |part| eprintln!("measuring {part}"),
    );
    store_json(json, &figures)?;
    output::print(&micro::table(&figures))?;
    result
}

fn deploy(args: &DeployArgs) -> anyhow::Result<()> {
    require_fit()?;
    require_file(args.json.as_deref())?;
    let interrupt = Interrupt::catch()?;
    let scratch = Scratch::new()?;
    let include = scratch.path().join("include");
    project::write_headers(&include)?;
    let clang = project::clang();
    let compile = |source: &Path, object: &Path| {
        let clang = clang.as_ref().expect("only called if there is one");
        project::compile_source(clang, &include, source, object)
    };
    let order = Order {
        grafts: args.grafts.clone(),
        loads: args.loads,
        sessions: args.sessions,
        sources: args.sources.clone(),
        scratch: scratch.path(),
        compiler: match &clang {
            Ok(_) => Ok(&compile),
            Err(why) => Err(why.to_string()),
        },
    };
    let mut report = Report::default();
    let result = deploy::run(
        &order,
        &Programs::find()?,
        &Bench::testbed_name(),
        &interrupt,
        |part| eprintln!("measuring {part}"),
        &mut report,
    );
    store_json(args.json.as_deref(), &report.figures)?;
    output::print(&report.table())?;
    result
}

/// Refuses a file that cannot be written; leaves what is there alone.
fn require_file(json: Option<&Path>) -> anyhow::Result<()> {
    if let Some(path) = json {
        let is_there = path.exists();
        let mut options = fs::OpenOptions::new();
        let file = options.append(true).create(true).open(path);
        file.with_context(|| cannot_write(path))?;
        if !is_there {
            // Nobody wants an empty one where nothing was measured.
            let _ = fs::remove_file(path);
        }
    }
    Ok(())
}

/// Writes rows or figures where the user wants them: one a line, so that results can be compared line
/// by line.
fn store_json(path: Option<&Path>, all: &[impl Serialize]) -> anyhow::Result<()> {
    if let Some(path) = path {
        let lines: Result<Vec<_>, _> = all.iter().map(serde_json::to_string).collect();
        write(path, &format!("[\n{}\n]\n", lines?.join(",\n")))?;
    }
    Ok(())
}

fn measure(args: &RunArgs) -> anyhow::Result<()> {
    let mut plans = Vec::new();
    for path in &args.plans {
        let mut plan = Plan::read(path)?;
        plan.runs = args.runs.unwrap_or(plan.runs);
        plans.push(plan);
    }
    require_fit()?;
    // Better now than after hours.
    require_programs(&plans)?;
    require_writable(args)?;
    let interrupt = Interrupt::catch()?;
    let bench = Bench::new(Programs::find()?, Bench::testbed_name(), interrupt)?;
    let progress = Spinner::new();
    let finished = bench.run(&plans, |event| progress.show(event));
    progress.end();
    let rows = &finished.rows;
    if rows.is_empty() {
        return finished.stopped.map_or(Ok(()), Err);
    }
    // Whatever cannot be written, the table is shown.
    let stored = store(args, rows);
    output::print(&table::table(rows))?;
    stored?;
    if let Some(error) = finished.stopped {
        return Err(error);
    }
    let mut failed = rows.iter().filter(|row| !row.ok);
    if let Some(first) = failed.next() {
        anyhow::bail!(
            "{} of {} transfers failed, the first one ({}) because: {}",
            failed.count() + 1,
            rows.len(),
            first.transport,
            first.error.as_deref().unwrap_or("unknown")
        );
    }
    Ok(())
}

/// What is under way on a terminal, with the seconds since it began; lines for what has ended.
struct Spinner(Option<ProgressBar>);

impl Spinner {
    fn new() -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{msg}: {elapsed}").expect("a valid template");
            let bar = ProgressBar::new_spinner().with_style(style);
            bar.enable_steady_tick(Duration::from_secs(1));
            bar
        });
        Self(bar)
    }

    fn show(&self, event: Event<'_>) {
        match (&self.0, event) {
            (Some(bar), Event::Begun(text)) => {
                bar.reset_elapsed();
                bar.set_message(text.to_owned());
            }
            (Some(bar), Event::Ended(text)) => bar.println(text),
            (None, Event::Begun(_)) => {}
            (None, Event::Ended(text)) => eprintln!("{text}"),
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// Refuses plans for which a program is missing.
fn require_programs(plans: &[Plan]) -> anyhow::Result<()> {
    let curl = plans
        .iter()
        .find(|plan| plan.cells.iter().any(|cell| cell.curl));
    if let Some(plan) = curl {
        for program in ["nginx", "curl"] {
            if find_program(program).is_err() {
                anyhow::bail!(
                    "the plan \"{}\" needs `{program}`: apt install {program} (or run `make setup`)",
                    plan.name
                );
            }
        }
    }
    Ok(())
}

/// Refuses places where nothing can be written; leaves what is there alone.
fn require_writable(args: &RunArgs) -> anyhow::Result<()> {
    require_file(args.json.as_deref())?;
    require_file(args.csv.as_deref())?;
    if let Some(directory) = &args.plot {
        fs::create_dir_all(directory)
            .with_context(|| format!("cannot make the directory {}", directory.display()))?;
    }
    Ok(())
}

/// Draws the rows of these files, and prints their table.
fn draw(files: &[PathBuf], directory: &Path) -> anyhow::Result<()> {
    let mut all: Vec<Row> = Vec::new();
    for path in files {
        let text = fs::read_to_string(path)
            .with_context(|| format!("cannot read the rows {}", path.display()))?;
        let rows: Vec<Row> = serde_json::from_str(&text)
            .with_context(|| format!("{} has no rows of vtl bench run", path.display()))?;
        all.extend(rows);
    }
    for file in plot::draw(directory, &all)? {
        eprintln!("drawn: {}", file.display());
    }
    Ok(output::print(&table::table(&all))?)
}

/// Writes and draws rows where the user wants them.
fn store(args: &RunArgs, rows: &[Row]) -> anyhow::Result<()> {
    store_json(args.json.as_deref(), rows)?;
    if let Some(path) = &args.csv {
        write(path, &csv(rows))?;
    }
    if let Some(directory) = &args.plot {
        for file in plot::draw(directory, rows)? {
            eprintln!("drawn: {}", file.display());
        }
    }
    Ok(())
}

fn csv(rows: &[Row]) -> String {
    let head = columns().collect::<Vec<_>>().join(",");
    let lines = std::iter::once(head).chain(rows.iter().map(Row::csv));
    lines.map(|line| line + "\n").collect()
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| cannot_write(path))
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
