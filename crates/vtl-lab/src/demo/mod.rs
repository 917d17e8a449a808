//! `vtl demo`: an unmodified curl downloads a file from an unmodified web server over a bad link,
//! by TCP cubic, by TCP BBR and by VTL.

mod payload;
mod plot;
mod report;
mod transport;

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use sha2::{Digest, Sha256};
use vtl_cli::failure::Failure;
use vtl_cli::output::hex;
use vtl_cli::programs::find_program;
use vtl_cli::progress::Progress;
use vtl_cli::{doctor, units};
use vtl_testbed::{Host, Lifetime, Link, Testbed};

use self::report::{Report, Row};
use self::transport::Transport;
use crate::daemons::{self, Daemons};
use crate::download;
use crate::interrupt::Interrupt;
use crate::nginx::{self, Scratch};
use crate::programs::Programs;
use crate::provenance;

/// When the running transfer is looked at: past the handshake, before the end at any rate.
const LOOK: Duration = Duration::from_millis(800);

/// Arguments of `vtl demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Downloads over each transport, alternating; medians are reported
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Packets lost in each direction, in per cent
    #[arg(long, value_name = "PERCENT", default_value_t = 2.0, value_parser = units::per_cent)]
    loss: f64,
    /// Round-trip time of the link, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 100.0, value_parser = units::milliseconds)]
    rtt: f64,
    /// Rate of the link, in Mbit/s
    #[arg(long, value_name = "MBIT", default_value_t = 100.0, value_parser = units::mbit_per_second)]
    rate: f64,
    /// Seed of the link's random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Bytes to download
    #[arg(long, value_name = "BYTES", default_value_t = 32_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    size: u64,
    /// Cut a download after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 45, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    cut: u64,
    /// Use IPv6
    #[arg(long)]
    ipv6: bool,
    /// Where to write the rows [default: demo.json in --out]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Directory for the rows and the picture
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    out: PathBuf,
    /// Only these transports
    #[arg(long, value_name = "LIST", value_delimiter = ',', hide = true,
          default_values = ["tcp-cubic", "tcp-bbr", "vtl"])]
    only: Vec<Transport>,
}

/// Runs the demo; fails if a byte differs or a download other than cubic's does not finish.
pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<()> {
    preflight(args)?;
    let interrupt = Interrupt::catch()?;
    let link = Link {
        loss_pct: args.loss,
        seed: args.seed,
        ..Link::new(args.rtt, args.rate)
    };
    link.check()?;
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make the directory {}", args.out.display()))?;

    println!(
        "Link: {} Mbit/s, {} ms round trip, {} % loss; file: {:.1} MB over HTTP, IPv{}",
        args.rate,
        args.rtt,
        args.loss,
        args.size as f64 / 1e6,
        if args.ipv6 { 6 } else { 4 },
    );
    let date = provenance::date();
    let rows = measure(args, &link, &interrupt)?;
    let report = Report {
        date,
        kernel: provenance::kernel(),
        command: std::env::args().collect(),
        link,
        ip_version: if args.ipv6 { 6 } else { 4 },
        size: args.size,
        sha256: payload::sha256(args.size),
        summary: report::summarise(&rows),
        rows,
    };
    publish(args, &report)
}

/// Refuses, in one sentence each, what would fail later at greater length.
fn preflight(args: &DemoArgs) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Err(Failure::permission(
            "the demo needs root, to make network namespaces and load eBPF: run it with sudo",
        ));
    }
    for (program, package) in [("nginx", "nginx"), ("curl", "curl"), ("ss", "iproute2")] {
        if find_program(program).is_err() {
            bail!("`{program}` is missing: apt install {package} (or run `make setup`)");
        }
    }
    if args.only.contains(&Transport::Vtl) {
        Programs::find()?;
    }
    doctor::require_fit()
}

/// All downloads, on one testbed that is gone afterwards.
fn measure(args: &DemoArgs, link: &Link, interrupt: &Interrupt) -> anyhow::Result<Vec<Row>> {
    let scratch = Scratch::new()?;
    let name = format!("demo-{}", std::process::id());
    let testbed = Testbed::up(&name, link, Lifetime::Guarded)?;
    interrupt.check()?;
    let server = nginx::start(&testbed, &scratch, &[(nginx::FILE, args.size)], interrupt)?;
    let mut rows = Vec::new();
    for run in 1..=args.runs {
        for &transport in &args.only {
            let label = if args.runs > 1 {
                format!("{} {run}/{}", transport.name(), args.runs)
            } else {
                transport.name().to_owned()
            };
            let leg = Leg {
                args,
                testbed: &testbed,
                scratch: &scratch,
                interrupt,
                transport,
                run,
            };
            rows.push(leg.download(label)?);
        }
    }
    drop(server);
    Ok(rows)
}

/// One download in its surroundings.
struct Leg<'a> {
    args: &'a DemoArgs,
    testbed: &'a Testbed,
    scratch: &'a Scratch,
    interrupt: &'a Interrupt,
    transport: Transport,
    run: u32,
}

impl Leg<'_> {
    fn download(&self, label: String) -> anyhow::Result<Row> {
        // Where VTL gives way to TCP, it gives way to the better of the two.
        let control = self.transport.congestion_control().unwrap_or("bbr");
        for host in [Host::Client, Host::Server] {
            self.testbed.tune_tcp(host, control)?;
        }
        let daemons = match self.transport {
            Transport::Vtl => {
                let programs = Programs::find()?;
                let daemons = Daemons::start(
                    self.testbed,
                    &programs,
                    &daemons::Options::default(),
                    self.scratch.path(),
                    &self.args.out,
                    self.interrupt,
                )?;
                daemons.hook(nginx::PORT, None, false)?;
                Some((programs, daemons))
            }
            Transport::Cubic | Transport::Bbr => None,
        };
        let mut command = match &daemons {
            Some((programs, daemons)) => {
                daemons.captured(self.testbed, programs, None, false, Path::new("curl"))?
            }
            None => self.testbed.command(Host::Client, "curl")?,
        };
        download::arguments(&mut command, self.server());

        let mut progress = Progress::start(label, Some(self.args.size));
        let mut control = None;
        let mut hash = Sha256::new();
        let limit = Duration::from_secs(self.args.cut);
        let outcome = download::run(
            &mut command,
            self.args.size,
            limit,
            self.interrupt,
            |data| hash.update(data),
            |elapsed, bytes| {
                progress.update(bytes);
                if control.is_none() && elapsed >= LOOK {
                    control = self.congestion_control()?;
                }
                Ok(())
            },
        )
        .with_context(|| self.describe())?;

        let mut row = Row::new(
            self.transport,
            self.run,
            self.args.size,
            outcome,
            hex(&hash.finalize()),
        );
        row.congestion_control = control;
        if let Some((_, daemons)) = &daemons {
            let statuses = daemons.statuses()?;
            let carried = statuses.carried();
            // The beginning goes by the flow's own TCP connection.
            if carried < row.bytes / 2 {
                bail!(
                    "only {carried} of the {} bytes that curl received came over VTL; the rest was plain TCP",
                    row.bytes
                );
            }
            row.daemons = Some(statuses);
        }
        progress.finish(&format!(
            "{:.1} MB in {:.2} s, {:.1} Mbit/s{}",
            row.bytes as f64 / 1e6,
            row.seconds,
            row.goodput_mbit,
            if row.complete { "" } else { " (cut)" },
        ));
        Ok(row)
    }

    /// Which download failed, and where more is said about it.
    fn describe(&self) -> String {
        let which = format!("{}, run {}", self.transport.name(), self.run);
        match self.transport {
            Transport::Vtl => format!("{which} (see {}/vtld-*.log)", self.args.out.display()),
            Transport::Cubic | Transport::Bbr => which,
        }
    }

    /// The web server's address.
    fn server(&self) -> IpAddr {
        match self.args.ipv6 {
            true => self.testbed.addr6(Host::Server).into(),
            false => self.testbed.addr4(Host::Server).into(),
        }
    }

    /// The congestion control of the web server's connection, if there is one now. A TCP baseline
    /// that uses another one than its name says is an error: a "cubic" that is BBR would go
    /// unnoticed.
    fn congestion_control(&self) -> anyhow::Result<Option<String>> {
        let connections = self.testbed.congestion_controls(Host::Server)?;
        let served = connections
            .into_iter()
            .find(|c| c.local.port() == nginx::PORT);
        let is = served.map(|connection| connection.name);
        if let (Some(want), Some(is)) = (self.transport.congestion_control(), &is)
            && want != is
        {
            bail!("the web server's connection uses {is} where {want} was set");
        }
        Ok(is)
    }
}

/// Writes the rows and the picture, prints the table, and judges.
fn publish(args: &DemoArgs, report: &Report) -> anyhow::Result<()> {
    let json = args
        .json
        .clone()
        .unwrap_or_else(|| args.out.join("demo.json"));
    let text = serde_json::to_string(report)?;
    fs::write(&json, text + "\n").with_context(|| format!("cannot write {}", json.display()))?;
    let picture = args.out.join("goodput.png");
    let title = format!(
        "{} Mbit/s, {} ms, {} % loss: one download of {:.0} MB",
        args.rate,
        args.rtt,
        args.loss,
        args.size as f64 / 1e6
    );
    plot::draw(&picture, &title, args.rate, &report.rows)?;

    println!("\n{}", report::table(&report.summary, args.rate, args.size));
    println!("goodput over time: {}", picture.display());
    println!("rows: {}", json.display());
    let intact = report.rows.iter().all(|row| row.intact);
    println!("{}", report::last_line(&report.summary, intact));
    if !intact {
        bail!(
            "a download is not what the server sent: see \"intact\" in {}",
            json.display()
        );
    }
    let cut = report
        .rows
        .iter()
        .find(|r| !r.complete && r.transport != Transport::Cubic);
    if let Some(row) = cut {
        bail!(
            "{} did not finish within {} s",
            row.transport.name(),
            args.cut
        );
    }
    Ok(())
}
