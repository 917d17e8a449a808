//! `vtl doctor`: which kernel features are there, which are not, and what follows.

mod bpf;
mod check;
mod host;
mod kernel;
mod network;
mod nic;

use std::io::{self, IsTerminal, Write};

use clap::Args;
use serde::Serialize;

use crate::failure::Failure;
use check::{Check, Need, State};
use nic::Nic;

/// Arguments of `vtl doctor`.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Write JSON for machines instead of text
    #[arg(long)]
    json: bool,
}

/// What follows from all checks together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// VTL can run.
    Ready,
    /// A required feature is missing.
    Unfit,
    /// Nothing is known to be missing, but not everything could be tried.
    Undecided,
}

#[derive(Serialize)]
struct Report {
    verdict: Verdict,
    checks: Vec<Check>,
    interfaces: Vec<Nic>,
}

/// Fails with one sentence if this machine lacks something that VTL requires.
pub fn require_fit() -> anyhow::Result<()> {
    vtl_bpf::silence();
    let mut checks = kernel::checks();
    checks.extend(network::checks());
    let missing = |check: &&Check| check.need == Need::Required && check.state == State::Missing;
    match checks.iter().find(missing) {
        Some(Check {
            name,
            found,
            advice,
            ..
        }) => anyhow::bail!(
            "VTL cannot run on this machine, because of {name} ({found}): {}",
            advice.unwrap_or("see `vtl doctor`")
        ),
        None => Ok(()),
    }
}

/// Examines this machine; fails if VTL cannot run on it.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<()> {
    vtl_bpf::silence();
    let mut checks = kernel::checks();
    checks.extend(network::checks());
    checks.extend(host::checks());
    let report = Report {
        verdict: verdict(&checks),
        checks,
        interfaces: nic::all(),
    };
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
    } else {
        let color = out.is_terminal() && std::env::var_os("NO_COLOR").is_none();
        write!(out, "{}", text(&report, color))?;
    }
    out.flush()?;
    match report.verdict {
        Verdict::Ready => Ok(()),
        Verdict::Unfit => Err(Failure::reported()),
        Verdict::Undecided => Err(Failure::permission(
            "some checks need root: run `sudo vtl doctor` for the whole picture",
        )),
    }
}

fn verdict(checks: &[Check]) -> Verdict {
    let required = |state| {
        checks
            .iter()
            .any(|check| check.need == Need::Required && check.state == state)
    };
    if required(State::Missing) {
        Verdict::Unfit
    } else if required(State::Unknown) {
        Verdict::Undecided
    } else {
        Verdict::Ready
    }
}

fn text(report: &Report, color: bool) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    let groups = [
        (Need::Required, "Required"),
        (Need::Optional, "Optional"),
        (Need::Development, "For building, tests and the demo"),
    ];
    for (need, title) in groups {
        let _ = writeln!(out, "{title}");
        for check in report.checks.iter().filter(|check| check.need == need) {
            let mark = match (check.state, color) {
                (State::Present, true) => "\x1b[32m✓\x1b[0m",
                (State::Present, false) => "✓",
                (State::Missing, true) => "\x1b[31m✗\x1b[0m",
                (State::Missing, false) => "✗",
                (State::Unknown, true) => "\x1b[33m?\x1b[0m",
                (State::Unknown, false) => "?",
            };
            let Check {
                name,
                used_for,
                found,
                ..
            } = check;
            let detail = match found.as_str() {
                "works" => String::new(),
                found => format!(": {found}"),
            };
            let _ = writeln!(out, "  {mark} {name:<16} {used_for}{detail}");
            if let Some(advice) = check.advice {
                let _ = writeln!(out, "    {:<16} → {advice}", "");
            }
        }
    }
    if !report.interfaces.is_empty() {
        let _ = writeln!(out, "Interfaces");
    }
    for nic in &report.interfaces {
        let xdp = match (nic.native_xdp, nic.xdp_xmit) {
            (Some(true), Some(true)) => "native XDP, transmits redirected frames",
            (Some(true), _) => "native XDP, does not transmit redirected frames",
            (Some(false), _) => "no native XDP",
            (None, _) => "the kernel does not say what XDP it offers",
        };
        let _ = writeln!(
            out,
            "  {:<18} {}: {xdp} → egress driver `{}`",
            nic.name, nic.driver, nic.egress
        );
    }
    let _ = writeln!(
        out,
        "{}",
        match report.verdict {
            Verdict::Ready => "VTL can run on this machine.",
            Verdict::Unfit =>
                "VTL cannot run on this machine: a required feature is missing (✗ above).",
            Verdict::Undecided => "Nothing required is known to be missing.",
        }
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(need: Need, state: State) -> Check {
        Check {
            name: "name",
            used_for: "use",
            need,
            state,
            found: "found".into(),
            advice: (state == State::Missing).then_some("advice"),
        }
    }

    #[test]
    fn verdict__only_required_features_decide() {
        use Need::*;
        use State::*;
        let cases = [
            (
                vec![(Required, Present), (Optional, Missing)],
                Verdict::Ready,
            ),
            (
                vec![(Required, Missing), (Required, Unknown)],
                Verdict::Unfit,
            ),
            (
                vec![(Required, Present), (Required, Unknown)],
                Verdict::Undecided,
            ),
            (vec![(Development, Missing)], Verdict::Ready),
        ];
        for (states, expected) in cases {
            let checks: Vec<_> = states.iter().map(|&(n, s)| check(n, s)).collect();
            assert_eq!(verdict(&checks), expected, "{states:?}");
        }
    }

    #[test]
    fn text__puts_advice_below_what_is_missing() {
        let report = Report {
            verdict: Verdict::Unfit,
            checks: vec![check(Need::Required, State::Missing)],
            interfaces: vec![],
        };
        let text = text(&report, false);
        assert!(text.contains("✗ name"), "{text}");
        assert!(text.contains("→ advice"), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
    }
}
