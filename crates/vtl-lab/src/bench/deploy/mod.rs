//! What deploying a graft and setting up a session take, step by step, and how large grafts are: the
//! breakdown of figures 3.12 and 3.13 and of table 3.6 of the thesis, on this machine.

mod grafts;
mod lines;
mod setup;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::bench::figure::{Figure, Sheet};
use crate::interrupt::Interrupt;
use crate::programs::Programs;

/// A deployment should take less than this at the median, milliseconds.
const DEPLOY_AIM_MS: f64 = 5.0;
/// Round-trip time of the link that sessions are set up over, milliseconds: the thesis's.
const RTT_MS: f64 = 10.0;
/// Rate of that link, Mbit/s.
const RATE_MBIT: f64 = 16.0;
/// What setting up a session may take besides one round trip, and what it may take in all with a
/// known peer, milliseconds.
const SETUP_AIM_MS: f64 = 5.0;

/// Compiles a graft's source, the first path, into an object, the second one.
pub(crate) type Compiler<'a> = dyn Fn(&Path, &Path) -> anyhow::Result<()> + 'a;

/// What to measure, and how often.
pub(crate) struct Order<'a> {
    /// Grafts to load; empty: all that come with VTL.
    pub(crate) grafts: Vec<String>,
    /// Loads of each.
    pub(crate) loads: u32,
    /// Sessions of each kind.
    pub(crate) sessions: u32,
    /// The directory `bpf` of VTL's sources.
    pub(crate) sources: PathBuf,
    /// A directory for what comes up, the caller's to remove.
    pub(crate) scratch: &'a Path,
    /// What compiles grafts, or why nothing does.
    pub(crate) compiler: Result<&'a Compiler<'a>, String>,
}

/// What was measured.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// The figures, in the order of the tables.
    pub(crate) figures: Vec<Figure>,
    /// What could not be measured, and why.
    pub(crate) missing: Vec<String>,
}

/// Measures everything. `say` hears what comes next. What was measured before something failed is in
/// `report` all the same.
///
/// # Errors
/// A graft is unknown, the kernel refuses one, a testbed cannot be made, or a session does not open.
pub(crate) fn run(
    order: &Order<'_>,
    daemons: &Programs,
    testbed: &str,
    interrupt: &Interrupt,
    mut say: impl FnMut(&str),
    report: &mut Report,
) -> anyhow::Result<()> {
    let chosen = grafts::chosen(&order.grafts)?;
    grafts::run(order, &chosen, interrupt, &mut say, report)?;
    let names: Vec<&str> = chosen.iter().map(|(name, _)| *name).collect();
    setup::run(order, &names, daemons, testbed, interrupt, &mut say, report)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Report {
    fn sheet(&mut self, table: &'static str, unit: &'static str) -> Sheet<'_> {
        Sheet::new(table, unit, &mut self.figures)
    }

    /// The tables for people, with the aims.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        for (table, title) in [
            (
                "graft",
                "Grafts (table 3.6): lines of code without comments: of the composition, with its \
                 transport functions, with all of VTL that it includes; sizes; medians of times",
            ),
            (
                "deployment",
                "Deployment of a precompiled graft (figure 3.12), medians, ms: package read and \
                 checked; object taken apart; kernel's types read, and relocated; all programs \
                 verified and compiled, several at a time; PROG_ARRAYs filled",
            ),
            (
                "program",
                "Verified and compiled, by program, medians, ms; several at a time",
            ),
            (
                "set-up",
                "Session set-up (figure 3.13) over 10 ms, 16 Mbit/s, ms, from the application's \
                 call until it may send",
            ),
        ] {
            if self.figures.iter().any(|f| f.table == table) {
                let gap = if text.is_empty() { "" } else { "\n" };
                text += &format!("{gap}{title}:\n{}", self.pivot(table));
            }
        }
        for missing in &self.missing {
            text += &format!("\nNot measured: {missing}\n");
        }
        text + &self.aims()
    }

    /// A row for each place, a column for each thing.
    fn pivot(&self, table: &str) -> String {
        let rows = || self.figures.iter().filter(|f| f.table == table);
        let (mut places, mut things): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
        for f in rows() {
            if !places.contains(&f.place.as_str()) {
                places.push(&f.place);
            }
            if !things.contains(&f.what.as_str()) {
                things.push(&f.what);
            }
        }
        let cell = |place: &str, what: &str| {
            let found = rows().find(|f| f.place == place && f.what == what);
            found.map_or_else(
                || "-".to_owned(),
                |f| match f.unit {
                    "ms" => format!("{:.2}", f.value),
                    _ => format!("{:.0}", f.value),
                },
            )
        };
        let first = places.iter().map(|p| p.chars().count()).max().unwrap_or(0);
        let width = |what: &str| {
            let cells = places.iter().map(|p| cell(p, what).len());
            cells.chain([what.chars().count()]).max().unwrap_or(0)
        };
        let line = |head: &str, cells: &dyn Fn(&str) -> String| {
            let mut line = format!("  {head:<first$}");
            for what in &things {
                line += &format!("  {:>width$}", cells(what), width = width(what));
            }
            line + "\n"
        };
        let mut text = line("", &|what| what.to_owned());
        for place in &places {
            text += &line(place, &|what| cell(place, what));
        }
        text
    }

    fn aims(&self) -> String {
        let of = |table, what: &str| -> Vec<(&str, f64)> {
            let rows = self.figures.iter();
            rows.filter(|f| f.table == table && f.what == what)
                .map(|f| (f.place.as_str(), f.value))
                .collect()
        };
        let mut text = String::new();
        let mut judge = |what: String, aim: f64, figures: &[(&str, f64)]| {
            let Some((worst, max)) = figures.iter().max_by(|a, b| a.1.total_cmp(&b.1)) else {
                return;
            };
            let met = figures.iter().filter(|(_, ms)| *ms < aim).count();
            let all = figures.len();
            let verdict = if met == all { "met" } else { "missed" };
            text += &format!(
                "{what}, aim: median under {aim:.0} ms: {verdict} ({met} of {all}; at most \
                 {max:.2} ms, {worst})\n"
            );
        };
        judge(
            "Deployment".into(),
            DEPLOY_AIM_MS,
            &of("deployment", "total"),
        );
        let setups = of("set-up", "median");
        let kind = |suffix: &str| -> Vec<(&str, f64)> {
            let all = setups.iter().copied();
            all.filter(|(place, _)| place.ends_with(suffix)).collect()
        };
        judge(
            format!("Set-up, {}", setup::COLD),
            RTT_MS + SETUP_AIM_MS,
            &kind(setup::COLD),
        );
        judge(
            format!("Set-up, {}", setup::FIRST),
            RTT_MS + SETUP_AIM_MS,
            &kind(setup::FIRST),
        );
        judge(
            format!("Set-up, {}", setup::KNOWN),
            SETUP_AIM_MS,
            &kind(setup::KNOWN),
        );
        if text.is_empty() {
            text
        } else {
            format!("\n{text}")
        }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn table__names_what_is_missing_and_judges_the_aims() {
        let mut report = Report::default();
        let mut sheet = report.sheet("deployment", "ms");
        sheet.add("quick", "total", 4.0);
        sheet.add("slow", "total", 6.25);
        sheet.add("slow", "fill", 0.5);
        report.sheet("set-up", "ms").add("g: cold", "median", 14.0);
        report.missing.push("compile time: no clang".into());
        let text = report.table();
        for words in [
            "  quick   4.00     -\n",
            "  slow    6.25  0.50\n",
            "Not measured: compile time: no clang\n",
            "Deployment, aim: median under 5 ms: missed (1 of 2; at most 6.25 ms, slow)\n",
            "Set-up, cold, aim: median under 15 ms: met (1 of 1; at most 14.00 ms, g: cold)\n",
        ] {
            assert!(text.contains(words), "{words}\n{text}");
        }
    }
}
