//! `vtl testbed`: two hosts and the link between them, for people and scripts.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use vtl_cli::failure::Failure;
use vtl_cli::units;
use vtl_testbed::{
    Backend, DirectionStats, Host, Lifetime, Link, LossModel, Profile, Slots, Stats, Testbed,
};

/// Two hosts and the link between them, in network namespaces on this machine (needs root).
///
/// `up` makes them, `exec` runs a command on one of them, `set` changes the link while traffic flows, `down`
/// removes everything. Client: 10.73.0.1, fd73::1. Server: 10.73.0.2, fd73::2.
#[derive(Debug, Args)]
pub(crate) struct TestbedArgs {
    /// Which testbed; several can be up at once
    #[arg(long, global = true, env = "VTL_TESTBED", default_value = "vtl")]
    name: String,
    #[command(subcommand)]
    command: TestbedCommand,
}

#[derive(Debug, Subcommand)]
enum TestbedCommand {
    /// Make a testbed, with a perfect link unless options say otherwise
    Up(LinkArgs),
    /// Run a command on a host; its exit status becomes this command's
    Exec {
        /// On which host
        host: Host,
        /// The command with its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
    /// Change the link while traffic flows: only what is given changes
    Set(LinkArgs),
    /// Show the link and what it did so far
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a testbed and end what still runs in it
    Down,
    /// List the links that have names
    Profiles {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run the emulator (started by `up`)
    #[command(hide = true)]
    Emulate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pattern {
    /// Each packet on its own
    Uniform,
    /// Gilbert–Elliott bursts of the same mean
    Bursts,
}

/// What of a link to set.
#[derive(Debug, Default, Args)]
struct LinkArgs {
    /// Start from a link with a name
    #[arg(long)]
    profile: Option<Profile>,
    /// Round-trip time, milliseconds
    #[arg(long, value_name = "MS", value_parser = units::milliseconds)]
    rtt: Option<f64>,
    /// Rate, Mbit/s; 0: not limited
    #[arg(long, value_name = "MBIT", value_parser = units::mbit_per_second)]
    rate: Option<f64>,
    /// Mean loss in each direction, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    loss: Option<f64>,
    /// Mean loss from server to client only, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    loss_down: Option<f64>,
    /// Mean loss from client to server only, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    loss_up: Option<f64>,
    /// Which packets are lost
    #[arg(long, value_name = "PATTERN")]
    loss_pattern: Option<Pattern>,
    /// Mean burst of `--loss-pattern bursts`, packets
    #[arg(long, value_name = "PACKETS")]
    burst: Option<f64>,
    /// Drop-tail queue, packets; by default one bandwidth-delay product, at least 64
    #[arg(long, value_name = "PACKETS")]
    queue: Option<u32>,
    /// Packets that waited longer leave marked (ECN), milliseconds
    #[arg(long, value_name = "MS", value_parser = units::milliseconds)]
    ecn: Option<f64>,
    /// Drop packets of this IP protocol (VTL's is 253)
    #[arg(long, value_name = "NUMBER")]
    block: Option<u8>,
    /// Packets overtaken by later ones, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    reorder: Option<f64>,
    /// For how long these are held back, milliseconds; by default 1, or the time of eight packets
    #[arg(long, value_name = "MS", value_parser = units::milliseconds)]
    reorder_ms: Option<f64>,
    /// Packets delivered twice, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    duplicate: Option<f64>,
    /// Packets with a bit flipped after the IP header, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    corrupt: Option<f64>,
    /// Packets with two words of their payload exchanged, which no checksum finds, per cent
    #[arg(long, value_name = "PCT", value_parser = units::per_cent)]
    tamper: Option<f64>,
    /// Medium access in slots this far apart, milliseconds, for example 2-8; 0: none
    #[arg(long, value_name = "MIN-MAX", value_parser = parse_slots)]
    slots: Option<SlotsArg>,
    /// Where the random numbers start
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct SlotsArg(Option<Slots>);

fn parse_slots(text: &str) -> Result<SlotsArg, String> {
    if units::milliseconds(text) == Ok(0.0) {
        return Ok(SlotsArg(None));
    }
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    match (units::milliseconds(min), units::milliseconds(max)) {
        (Ok(min_ms), Ok(max_ms)) => Ok(SlotsArg(Some(Slots { min_ms, max_ms }))),
        _ => Err("expected milliseconds from least to most, such as 2-8 or 2-8ms".to_owned()),
    }
}

impl LinkArgs {
    /// `link` with what the user gave.
    fn apply(&self, mut link: Link) -> Link {
        fn put<T: Clone>(to: &mut T, from: Option<&T>) {
            if let Some(value) = from {
                to.clone_from(value);
            }
        }
        if let Some(profile) = self.profile {
            link = profile.link();
        }
        put(&mut link.rtt_ms, self.rtt.as_ref());
        put(&mut link.rate_mbit, self.rate.as_ref());
        if let Some(loss) = self.loss {
            link.loss_pct = loss;
            // A figure for both directions replaces those of each.
            link.loss_down_pct = None;
            link.loss_up_pct = None;
        }
        link.loss_down_pct = self.loss_down.or(link.loss_down_pct);
        link.loss_up_pct = self.loss_up.or(link.loss_up_pct);
        match self.loss_pattern {
            Some(Pattern::Uniform) => link.loss_model = LossModel::Uniform,
            Some(Pattern::Bursts) => link.loss_model = LossModel::BURSTS,
            None => {}
        }
        if let Some(burst) = self.burst {
            link.loss_model = LossModel::GilbertElliott {
                burst_packets: burst,
                bad_loss_pct: 100.0,
            };
        }
        link.queue_packets = self.queue.or(link.queue_packets);
        link.ecn_ms = self.ecn.or(link.ecn_ms);
        link.blocked = self.block.or(link.blocked);
        put(&mut link.reorder_pct, self.reorder.as_ref());
        link.reorder_ms = self.reorder_ms.or(link.reorder_ms);
        put(&mut link.duplicate_pct, self.duplicate.as_ref());
        put(&mut link.corrupt_pct, self.corrupt.as_ref());
        put(&mut link.tamper_pct, self.tamper.as_ref());
        if let Some(SlotsArg(slots)) = self.slots {
            link.slots = slots;
        }
        put(&mut link.seed, self.seed.as_ref());
        link
    }
}

#[derive(Serialize)]
struct Status {
    name: String,
    backend: Backend,
    link: Link,
    /// None if the link is not the emulator's.
    stats: Option<Stats>,
}

#[derive(Serialize)]
struct NamedLink {
    name: &'static str,
    queue_packets: u32,
    link: Link,
}

/// Runs the command. Errors are one sentence each.
pub(crate) fn run(args: TestbedArgs) -> Result<ExitCode> {
    let name = args.name;
    match args.command {
        TestbedCommand::Up(link) => {
            let link = link.apply(Link::default());
            let testbed = Testbed::up(&name, &link, Lifetime::Persistent)?;
            say(&format!("{name}: {}", describe(&link, testbed.backend())))?;
        }
        TestbedCommand::Exec { host, command } => {
            let (program, arguments) = command.split_first().context("no command given")?;
            let testbed = Testbed::attach(&name)?;
            // Only returns if it fails: the command takes this process's place, and with it its exit status
            // and its signals.
            let error = testbed.command(host, program)?.args(arguments).exec();
            let message = format!("cannot run {}: {error}", program.display());
            return Err(match error.kind() {
                io::ErrorKind::NotFound => Failure::not_found(message),
                _ => Failure::not_executable(message),
            });
        }
        TestbedCommand::Set(link) => {
            let testbed = Testbed::attach(&name)?;
            let link = link.apply(testbed.link()?);
            testbed.set(&link)?;
            say(&format!("{name}: {}", describe(&link, testbed.backend())))?;
        }
        TestbedCommand::Status { json } => {
            let testbed = Testbed::attach(&name)?;
            let backend = testbed.backend();
            let stats = if backend == Backend::Emulator {
                Some(testbed.stats()?)
            } else {
                None
            };
            let status = Status {
                name,
                backend,
                link: testbed.link()?,
                stats,
            };
            say(&if json {
                serde_json::to_string_pretty(&status)?
            } else {
                table(&status)
            })?;
        }
        TestbedCommand::Down => {
            let found = Testbed::down(&name)?;
            say(&format!(
                "{name}: {}",
                if found { "removed" } else { "there was none" }
            ))?;
        }
        TestbedCommand::Profiles { json } => {
            let links = Profile::ALL.map(|p| NamedLink {
                name: p.name(),
                queue_packets: p.link().queue_limit(),
                link: p.link(),
            });
            if json {
                say(&serde_json::to_string_pretty(&links)?)?;
            } else {
                for NamedLink { name, link, .. } in links {
                    let backend = if link.direct {
                        Backend::Direct
                    } else {
                        Backend::Emulator
                    };
                    say(&format!("{name:12} {}", describe(&link, backend)))?;
                }
            }
        }
        TestbedCommand::Emulate => Testbed::emulate(&name)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a line. A reader that has left is not an error.
fn say(text: &str) -> Result<()> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(e).context("cannot write the answer")
        }
        _ => Ok(()),
    }
}

/// A link in one line.
fn describe(link: &Link, backend: Backend) -> String {
    if link.direct {
        return "a direct wire".to_owned();
    }
    let mut words = vec![format!("RTT {} ms", round(link.rtt_ms))];
    if link.rate_mbit > 0.0 {
        words.push(format!("{} Mbit/s", round(link.rate_mbit)));
        words.push(format!("queue {} packets", link.queue_limit()));
    } else {
        words.push("rate not limited".to_owned());
    }
    let loss = if (link.loss_down() - link.loss_up()).abs() < f64::EPSILON {
        format!("loss {} %", round(link.loss_down()))
    } else {
        format!(
            "loss {} % down, {} % up",
            round(link.loss_down()),
            round(link.loss_up())
        )
    };
    words.push(loss);
    if let LossModel::GilbertElliott { burst_packets, .. } = link.loss_model {
        words.push(format!("in bursts of {}", round(burst_packets)));
    }
    if link.reorder_pct > 0.0 {
        let by = link.reorder_ms.map(|ms| format!(" by {} ms", round(ms)));
        let pct = round(link.reorder_pct);
        words.push(format!("reordering {pct} %{}", by.unwrap_or_default()));
    }
    for (name, pct) in [
        ("duplication", link.duplicate_pct),
        ("corruption", link.corrupt_pct),
        ("tampering", link.tamper_pct),
    ] {
        if pct > 0.0 {
            words.push(format!("{name} {} %", round(pct)));
        }
    }
    if let Some(ms) = link.ecn_ms {
        words.push(format!("marks above {} ms", round(ms)));
    }
    if let Some(protocol) = link.blocked {
        words.push(format!("drops IP protocol {protocol}"));
    }
    if let Some(slots) = link.slots {
        words.push(format!(
            "slots every {}-{} ms",
            round(slots.min_ms),
            round(slots.max_ms)
        ));
    }
    if backend == Backend::Netem {
        words.push("by netem".to_owned());
    }
    words.join(", ")
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// A status for people.
fn table(status: &Status) -> String {
    let mut text = format!(
        "{}: {}",
        status.name,
        describe(&status.link, status.backend)
    );
    let Some(stats) = &status.stats else {
        return text;
    };
    text += "\n                  client -> server  server -> client";
    type Figure = fn(&DirectionStats) -> u64;
    let rows: [(&str, Figure); 14] = [
        ("packets in", |s| s.rx_packets),
        ("packets out", |s| s.tx_packets),
        ("lost", |s| s.lost),
        ("queue drops", |s| s.queue_drops),
        ("queued", |s| s.queue_packets),
        ("most queued", |s| s.max_queue_packets),
        ("marked", |s| s.marked),
        ("duplicated", |s| s.duplicated),
        ("reordered", |s| s.reordered),
        ("corrupted", |s| s.corrupted),
        ("tampered", |s| s.tampered),
        ("aggregates", |s| s.aggregates),
        ("host drops", |s| s.host_drops + s.send_errors),
        ("most late, us", |s| s.max_late_us),
    ];
    for (name, figure) in rows {
        text += &format!(
            "\n{name:16}  {:>16}  {:>16}",
            figure(&stats.up),
            figure(&stats.down)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: TestbedArgs,
    }

    fn link(args: &[&str], before: Link) -> Link {
        let cli = Cli::try_parse_from([&["vtl", "set"], args].concat()).expect("parses");
        match cli.args.command {
            TestbedCommand::Set(link) => link.apply(before),
            _ => panic!("not set"),
        }
    }

    #[test]
    fn clap__definitions_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn set__changes_only_what_is_given() {
        let before = Link {
            loss_up_pct: Some(1.0),
            ..Link::new(100.0, 10.0)
        };
        assert_eq!(
            link(&["--rtt", "200"], before.clone()),
            Link {
                rtt_ms: 200.0,
                ..before.clone()
            }
        );
        let after = link(
            &["--loss", "5", "--loss-pattern", "bursts", "--slots", "2-8"],
            before,
        );
        assert_eq!(
            (after.loss_up(), after.loss_down(), after.loss_model),
            (5.0, 5.0, LossModel::BURSTS)
        );
        assert_eq!(
            after.slots,
            Some(Slots {
                min_ms: 2.0,
                max_ms: 8.0
            })
        );
        assert_eq!(link(&["--slots", "0"], after).slots, None);
    }

    #[test]
    fn figures__take_their_units_and_say_what_is_expected() {
        let got = link(
            &["--rtt=10ms", "--rate=8Mbit", "--loss=2%", "--slots=2-8ms"],
            Link::default(),
        );
        assert_eq!((got.rtt_ms, got.rate_mbit, got.loss_pct), (10.0, 8.0, 2.0));
        assert_eq!(got.slots.map(|s| (s.min_ms, s.max_ms)), Some((2.0, 8.0)));
        for (wrong, expected) in [
            ("--rtt=10s", "expected milliseconds, such as 10 or 10ms"),
            ("--ecn=soon", "expected milliseconds, such as 10 or 10ms"),
            ("--rate=1Gbit", "expected Mbit/s, such as 100 or 100Mbit"),
            ("--loss-up=1/2", "expected per cent, such as 2.5 or 2.5%"),
            (
                "--slots=2,8",
                "expected milliseconds from least to most, such as 2-8 or 2-8ms",
            ),
        ] {
            let error = Cli::try_parse_from(["vtl", "set", wrong]).expect_err(wrong);
            let message = error.to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn profile__then_options_on_top() {
        let got = link(&["--profile", "satellite", "--loss", "2"], Link::default());
        assert_eq!((got.rtt_ms, got.rate_mbit, got.loss_pct), (600.0, 4.0, 2.0));
    }

    #[test]
    fn exec__keeps_the_options_of_the_command() {
        let cli = Cli::try_parse_from(["vtl", "exec", "client", "--", "ls", "--name", "x"])
            .expect("parses");
        assert_eq!(
            cli.args.name,
            std::env::var("VTL_TESTBED").unwrap_or_else(|_| "vtl".to_owned())
        );
        assert!(
            matches!(cli.args.command, TestbedCommand::Exec { command, .. } if command.len() == 3)
        );
    }

    #[test]
    fn describe__reads_well() {
        let link = Link {
            loss_pct: 1.0,
            ..Profile::Terrestrial.link()
        };
        assert_eq!(
            describe(&link, Backend::Emulator),
            "RTT 100 ms, 100 Mbit/s, queue 834 packets, loss 1 %"
        );
    }
}
