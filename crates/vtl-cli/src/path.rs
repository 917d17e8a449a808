//! `vtl path`: what is known of the paths to other hosts.

use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use clap::Subcommand;
use serde_json::{Map, Value};
use vtl_control::{Client, LinkStatus, PathReport, PathStatus, Request};

use crate::daemon::{self, SocketArgs};
use crate::output;

/// Arguments of `vtl path`.
#[derive(Debug, Subcommand)]
pub(crate) enum PathCommand {
    /// List the hosts to which connections were carried in the last ten minutes, and the paths there
    #[command(after_help = "\
No packet is sent for these figures: they are what connections count anyway, in the direction in\n\
which this host sends. They stay for ten minutes after a connection there was last read.\n\n  \
evidence   the kind of connection that told most: a carrier, or tcp (also proxied)\n  \
min rtt    the shortest round trip lately: the path without queues\n  \
rtt        the smoothed round trip (RFC 6298); what it exceeds min rtt by is queueing\n  \
loss       lost packets, of the latest 4,096 or more\n  \
bandwidth  the highest rate lately, of payload; with >= a lower bound, as less was sent\n  \
class      lan (below 50 ms), terrestrial (below 500 ms) or long-delay")]
    List {
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show all that is known of the path to one of them
    #[command(after_help = "Example: vtl path show 192.0.2.7\n\n  \
clear loss  the share of lost packets of those sent while no queue stood\n  \
burst       how many of these are lost in a row, on average: about 1 if losses are independent\n  \
wireless    packets get lost in bursts while no queue stands\n  \
leaves by   this host's interface, and what its link layer says: medium, rate, quality of the signal\n  \
error       by how much the two highest rates lately differ")]
    Show {
        /// Its address
        address: IpAddr,
        /// Write JSON for machines instead of text
        #[arg(long)]
        json: bool,
    },
    /// Show the list again every second, until it is interrupted
    #[command(after_help = "Example: vtl path watch --json | jq .rtt_ms\n\n\
With --json each line is a path, as in `vtl path list --json`, that has something new.")]
    Watch {
        /// Seconds in between
        #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
        interval: u64,
        /// Write a line of JSON for each path that has something new
        #[arg(long)]
        json: bool,
    },
}

/// Clears a terminal's screen, and goes to its first line (ECMA-48).
const CLEAR: &str = "\x1b[2J\x1b[H";

/// Runs a subcommand of `vtl path`.
pub(crate) fn run(command: &PathCommand, socket: &SocketArgs) -> anyhow::Result<()> {
    match command {
        PathCommand::List { json } => {
            let list = daemon::ask(&socket.socket, Client::paths)?;
            if *json {
                output::show(&list, true)?;
            } else {
                output::print(&listed(&list.paths))?;
            }
        }
        PathCommand::Watch { interval, json } => watch(socket, *interval, *json)?,
        PathCommand::Show { address, json } => {
            let report: PathReport = socket.call(&Request::PathShow { peer: *address })?;
            if *json {
                output::show(&report, true)?;
            } else {
                output::print(&text(&report))?;
            }
        }
    }
    Ok(())
}

/// Shows all paths again and again, until the reader has gone.
fn watch(socket: &SocketArgs, interval: u64, json: bool) -> anyhow::Result<()> {
    let pause = Duration::from_secs(interval);
    let is_terminal = io::stdout().is_terminal();
    let mut last = Vec::new();
    loop {
        let list = daemon::ask(&socket.socket, Client::paths)?;
        if json {
            for path in changed(&list.paths, &last) {
                output::print(&format!("{}\n", serde_json::to_string(path)?))?;
            }
            last = list.paths;
        } else {
            let clear = if is_terminal { CLEAR } else { "" };
            output::print(&format!("{clear}{}\n", listed(&list.paths)))?;
        }
        thread::sleep(pause);
    }
}

/// The paths that have something new, besides their age.
fn changed<'a>(paths: &'a [PathStatus], last: &[PathStatus]) -> Vec<&'a PathStatus> {
    let is_known = |path: &PathStatus| {
        let mut same = last.iter().filter(|known| known.peer == path.peer);
        same.any(|known| {
            let known = PathStatus {
                age_s: path.age_s,
                ..known.clone()
            };
            known == *path
        })
    };
    paths.iter().filter(|path| !is_known(path)).collect()
}

/// The paths as a table.
pub(crate) fn listed(paths: &[PathStatus]) -> String {
    if paths.is_empty() {
        return "paths: none; nothing was carried in the last ten minutes\n".to_owned();
    }
    let rows: Vec<_> = paths.iter().map(row).collect();
    let columns = [
        "peer",
        "evidence",
        "age",
        "class",
        "min_rtt",
        "rtt",
        "loss",
        "bandwidth",
    ];
    output::table(&rows.iter().collect::<Vec<_>>(), &columns)
}

/// The best evidence, and what each kind of connection told if there are several.
fn text(report: &PathReport) -> String {
    let mut out = String::new();
    for (key, value) in cells(&report.path) {
        let _ = writeln!(out, "{}: {value}", output::words(key));
    }
    if let Some(link) = &report.link {
        let _ = writeln!(out, "leaves by: {}", leaves_by(link));
    }
    if report.told.len() > 1 {
        let rows: Vec<_> = report.told.iter().map(row).collect();
        let columns = [
            "evidence",
            "age",
            "min_rtt",
            "rtt",
            "packets",
            "loss",
            "burst",
            "delivery",
            "bandwidth",
        ];
        out.push('\n');
        out.push_str(&output::table(&rows.iter().collect::<Vec<_>>(), &columns));
    }
    out
}

/// An interface, and what its link layer says.
fn leaves_by(link: &LinkStatus) -> String {
    let rate = link.rate_mbit.map(|rate| format!("{rate} Mbit/s"));
    let signal = link.signal_pct.map(|signal| format!("signal {signal} %"));
    let said = [link.medium.clone(), rate, signal];
    let said: Vec<_> = said.into_iter().flatten().collect();
    match said.is_empty() {
        true => link.interface.clone(),
        false => format!("{} ({})", link.interface, said.join(", ")),
    }
}

/// A path in words, with units; what was not measured is not there.
fn cells(path: &PathStatus) -> Vec<(&'static str, String)> {
    let ms = |value: f64| format!("{value:.2} ms");
    let percent = |value: f64| format!("{value:.2} %");
    let mbit = |value: f64| format!("{value:.2} Mbit/s");
    let is_bound = path.bandwidth_at_least == Some(true);
    let bandwidth = |value: f64| match is_bound {
        true => format!(">= {}", mbit(value)),
        false => mbit(value),
    };
    let yes = |value: bool| if value { "yes" } else { "no" }.to_owned();
    let cells = [
        ("peer", Some(path.peer.to_string())),
        ("evidence", Some(path.evidence.clone())),
        ("age", Some(format!("{:.0} s", path.age_s))),
        ("class", path.class.clone()),
        ("wireless", path.looks_wireless.map(yes)),
        ("min_rtt", path.min_rtt_ms.map(ms)),
        ("rtt", path.rtt_ms.map(ms)),
        ("rtt_variance", path.rtt_variance_ms.map(ms)),
        ("packets", Some(path.packets.to_string())),
        ("loss", path.loss_pct.map(percent)),
        ("clear_loss", path.clear_loss_pct.map(percent)),
        (
            "burst",
            path.loss_burst.map(|burst| format!("{burst:.1} packets")),
        ),
        ("reordering", path.reordering_pct.map(percent)),
        ("delivery", path.delivery_mbit.map(mbit)),
        ("bandwidth", path.bandwidth_mbit.map(bandwidth)),
        (
            "error",
            path.bandwidth_error_pct.filter(|_| !is_bound).map(percent),
        ),
    ];
    let known = cells
        .into_iter()
        .filter_map(|(key, cell)| Some((key, cell?)));
    known.collect()
}

/// The same as a row of a table.
fn row(path: &PathStatus) -> Map<String, Value> {
    let cells = cells(path).into_iter();
    cells
        .map(|(key, cell)| (key.to_owned(), cell.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path() -> PathStatus {
        serde_json::from_value(serde_json::json!({
            "peer": "192.0.2.7", "evidence": "quic", "age_s": 0.2, "class": "lan", "min_rtt_ms": 10.0,
            "packets": 3000, "loss_pct": 2.0, "bandwidth_mbit": 8.0, "bandwidth_at_least": true,
            "bandwidth_error_pct": 3.0,
        }))
        .unwrap()
    }

    #[test]
    fn text__only_what_is_known() {
        let report = PathReport {
            path: path(),
            told: vec![path()],
            link: Some(LinkStatus {
                interface: "wlan0".to_owned(),
                medium: Some("wifi".to_owned()),
                rate_mbit: Some(866.7),
                signal_pct: Some(60.0),
            }),
        };
        assert_eq!(
            text(&report),
            "peer: 192.0.2.7\nevidence: quic\nage: 0 s\nclass: lan\nmin rtt: 10.00 ms\npackets: 3000\n\
             loss: 2.00 %\nbandwidth: >= 8.00 Mbit/s\nleaves by: wlan0 (wifi, 866.7 Mbit/s, signal 60 %)\n"
        );
    }

    #[test]
    fn text__what_each_kind_told() {
        let tcp = PathStatus {
            evidence: "tcp".to_owned(),
            bandwidth_at_least: Some(false),
            ..path()
        };
        let report = PathReport {
            path: tcp.clone(),
            told: vec![path(), tcp],
            link: None,
        };
        let said = text(&report);
        assert!(
            said.contains("bandwidth: 8.00 Mbit/s\nerror: 3.00 %\n"),
            "{said}"
        );
        assert!(said.contains("  quic      0 s  10.00 ms"), "{said}");
    }

    #[test]
    fn changed__what_is_older_is_not_new() {
        let older = PathStatus {
            age_s: 1.2,
            ..path()
        };
        let slower = PathStatus {
            rtt_ms: Some(80.0),
            ..path()
        };
        assert_eq!(changed(&[older], &[path()]), Vec::<&PathStatus>::new());
        assert_eq!(changed(std::slice::from_ref(&slower), &[path()]), [&slower]);
        assert_eq!(changed(&[path()], &[]).len(), 1);
    }
}
