//! `vtl select`: the carrier `auto` on this host, which the daemon chooses; and, by `vtl-lab`, the part that is done
//! beforehand.

use std::fmt::Write;

use clap::Subcommand;
use vtl_control::{Client, Done, Learning, Lessons, Request, SelectStatus, SelectedPath};

use crate::daemon::{self, SocketArgs};
use crate::lab::{EXPLAIN, LabArgs};
use crate::output;

/// Arguments of `vtl select`.
#[derive(Debug, Subcommand)]
pub(crate) enum SelectCommand {
    /// Have the daemon choose for connections of the carrier `auto`
    On,
    /// Stop that: connections of `auto` go by TCP, those that run as well, until `vtl select on`
    #[command(
        after_help = "It takes effect at once, and stays over restarts of vtld. Connections of other carriers are not concerned.\n\
                      Needs root."
    )]
    Off,
    /// Say what is chosen for which host, by which figures, and why
    #[command(after_help = "\
direction  which one counts, as it has more bytes: what this host sends, or receives\n\
min rtt    the shortest round trip lately, in that direction; as are the others\n\
loss       lost packets, of those sent while no queue stood if there were enough\n\
rate       the bandwidth, of payload; with >= a lower bound, which the model does not go by")]
    Status {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Have connections of auto teach what carriers are worth: on, off, forget it, or say what was learnt
    #[command(
        subcommand_required = true,
        after_help = "Examples:\n  \
            vtl select learn list              what was learnt of which host, and by which outcomes\n  \
            vtl select learn list --json       the same for machines: an export\n  \
            vtl select learn off               neither learn nor choose by it; stays over restarts of vtld\n\n\
            Three in a hundred connections, by chance, go by another carrier than the one that is chosen; none that a\n\
            rule names a carrier for, or bounds. on, off and reset need root."
    )]
    Learn {
        #[command(subcommand)]
        command: LearnCommand,
    },
    #[command(about = EXPLAIN)]
    Explain(LabArgs),
    /// Measure what transfers take by each carrier over many links (by vtl-lab)
    Measure(LabArgs),
    /// Learn from measured rows to choose: a decision tree (by vtl-lab)
    Train(LabArgs),
    /// Say how well trees choose on links that they were not trained with (by vtl-lab)
    Evaluate(LabArgs),
    /// Say how far virtual time agrees with what was measured by real kernels (by vtl-lab)
    Compare(LabArgs),
}

/// Arguments of `vtl select learn`.
#[derive(Debug, Subcommand)]
pub(crate) enum LearnCommand {
    /// Learn, and choose by it
    On,
    /// Do neither, until `vtl select learn on`
    Off,
    /// Forget what was learnt
    Reset,
    /// Say what was learnt
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
}

/// Runs a subcommand of `vtl select`.
pub(crate) fn run(command: &SelectCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    let lab = |name, args: &LabArgs| args.exec(&["select", name], socket);
    match command {
        SelectCommand::On => set(true, socket),
        SelectCommand::Off => set(false, socket),
        SelectCommand::Status { json } => {
            let status = daemon::ask(&socket.socket, Client::selected)?;
            match json {
                true => output::show(&status, true)?,
                false => output::print(&text(&status))?,
            }
            Ok(())
        }
        SelectCommand::Learn { command } => learn(command, socket),
        SelectCommand::Explain(args) => lab("explain", args),
        SelectCommand::Measure(args) => lab("measure", args),
        SelectCommand::Train(args) => lab("train", args),
        SelectCommand::Evaluate(args) => lab("evaluate", args),
        SelectCommand::Compare(args) => lab("compare", args),
    }
}

fn set(on: bool, socket: &SocketArgs) -> anyhow::Result<()> {
    let _: Done = socket.call(&Request::SelectSet { on })?;
    Ok(())
}

fn learn(command: &LearnCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    let learn = match command {
        LearnCommand::On => Learning::On,
        LearnCommand::Off => Learning::Off,
        LearnCommand::Reset => Learning::Reset,
        LearnCommand::List { json } => {
            let lessons = daemon::ask(&socket.socket, Client::lessons)?;
            match json {
                true => output::show(&lessons, true)?,
                false => output::print(&taught(&lessons))?,
            }
            return Ok(());
        }
    };
    let _: Done = socket.call(&Request::SelectLearn { learn })?;
    Ok(())
}

/// What was learnt, for people.
fn taught(lessons: &Lessons) -> String {
    let mut out = match lessons.on {
        true => "learning: on\n".to_owned(),
        false => "learning: off\n".to_owned(),
    };
    if lessons.lessons.is_empty() {
        out.push_str(
            "learnt: nothing; no connection of the carrier auto of 64 KiB or more has ended\n",
        );
    }
    for lesson in &lessons.lessons {
        let _ = writeln!(out, "\npeer: {}", lesson.peer);
        if let Some(profile) = &lesson.profile {
            let _ = writeln!(out, "profile: {profile}");
        }
        let _ = writeln!(out, "model: {}", lesson.model);
        let learnt = lesson.learnt.as_deref();
        let _ = writeln!(out, "learnt: {}", learnt.unwrap_or("nothing"));
        for of in &lesson.outcomes {
            let (carrier, kib, mbit) = (&of.carrier, of.bytes_from >> 10, of.rate_mbit);
            let (flows, age) = (of.flows, of.age_s);
            let _ = writeln!(
                out,
                "outcomes: {carrier}, from {kib} KiB: {mbit:.2} Mbit/s, {flows} connections, {age:.0} s ago"
            );
        }
    }
    out
}

/// The choice for people.
fn text(status: &SelectStatus) -> String {
    let mut out = match status.on {
        true => "select: on\n".to_owned(),
        false => "select: off, connections of the carrier auto go by TCP\n".to_owned(),
    };
    if status.paths.is_empty() {
        out.push_str("paths: none; no connection of the carrier auto lately\n");
    }
    for path in &status.paths {
        out.push('\n');
        for (key, value) in cells(path) {
            let _ = writeln!(out, "{key}: {value}");
        }
    }
    out
}

/// What is known of a path, with units.
fn cells(path: &SelectedPath) -> Vec<(&'static str, String)> {
    let bound = if path.rate_at_least == Some(true) {
        ">= "
    } else {
        ""
    };
    let cells = [
        ("peer", Some(path.peer.to_string())),
        ("profile", path.profile.clone()),
        ("max delay", path.max_delay_ms.map(|ms| format!("{ms} ms"))),
        (
            "min throughput",
            path.min_throughput_mbit
                .map(|mbit| format!("{mbit} Mbit/s")),
        ),
        (
            "missed",
            Some(path.missed.join(", ")).filter(|all| !all.is_empty()),
        ),
        ("carrier", Some(path.carrier.clone())),
        ("flows", Some(path.flows.to_string())),
        ("since", path.since_s.map(|s| format!("{s:.0} s"))),
        ("direction", path.direction.clone()),
        ("min rtt", path.min_rtt_ms.map(|ms| format!("{ms:.1} ms"))),
        ("loss", path.loss_pct.map(|pct| format!("{pct:.2} %"))),
        (
            "burst",
            path.loss_burst.map(|burst| format!("{burst:.1} packets")),
        ),
        (
            "rate",
            path.rate_mbit
                .map(|mbit| format!("{bound}{mbit:.2} Mbit/s")),
        ),
        ("packets", path.packets.map(|packets| packets.to_string())),
        ("why", Some(path.why.clone())),
        ("explanation", path.explanation.clone()),
    ];
    let known = cells.into_iter();
    known.filter_map(|(key, cell)| Some((key, cell?))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text__what_is_known() {
        let status: SelectStatus = serde_json::from_value(json!({
            "on": true,
            "paths": [{
                "peer": "192.0.2.7", "carrier": "graft:stream", "flows": 2, "direction": "receives",
                "max_delay_ms": 200.0, "missed": ["max_delay"], "min_rtt_ms": 600.04, "loss_pct": 2.0, "rate_mbit": 9.5, "rate_at_least": true,
                "why": "auto: graft:stream", "since_s": 3.2,
            }],
        }))
        .unwrap();
        assert_eq!(
            text(&status),
            "select: on\n\npeer: 192.0.2.7\nmax delay: 200 ms\nmissed: max_delay\ncarrier: graft:stream\nflows: 2\nsince: 3 s\ndirection: receives\n\
             min rtt: 600.0 ms\nloss: 2.00 %\nrate: >= 9.50 Mbit/s\nwhy: auto: graft:stream\n"
        );
    }

    #[test]
    fn taught__what_was_learnt() {
        let lessons: Lessons = serde_json::from_value(json!({
            "on": true,
            "lessons": [{
                "peer": "192.0.2.7", "model": "tcp", "learnt": "graft:stream",
                "outcomes": [
                    { "carrier": "tcp", "bytes_from": 1_048_576, "rate_mbit": 2.5, "flows": 9, "age_s": 3.4 },
                ],
            }],
        }))
        .unwrap();
        assert_eq!(
            taught(&lessons),
            "learning: on\n\npeer: 192.0.2.7\nmodel: tcp\nlearnt: graft:stream\n\
             outcomes: tcp, from 1024 KiB: 2.50 Mbit/s, 9 connections, 3 s ago\n"
        );
        let none = Lessons {
            on: false,
            lessons: Vec::new(),
            more: None,
        };
        assert!(taught(&none).starts_with("learning: off\nlearnt: nothing"));
    }

    #[test]
    fn text__off() {
        let status = SelectStatus {
            on: false,
            paths: Vec::new(),
            more: None,
        };
        let text = text(&status);
        assert!(text.starts_with("select: off") && text.contains("paths: none"));
    }
}
